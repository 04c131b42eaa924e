"""The text of the configuration file: sections, options, and where each stands.  Protocol 07, section 2.1.

ConfigObj reads the dialect, so that every file means here what it means to other implementations.  It keeps no line
numbers.  They are recovered by counting: in this dialect all options of a section stand before its subsections, so a
walk through the tree meets sections and options in the order of the lines that made them.
"""

from __future__ import annotations

import math
import re
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, TypeVar, overload

from configobj import ConfigObj, ConfigObjError, DuplicateError, NestingError

from rnsfast.errors import ConfigError
from rnsfast.node.configkeys import COMMON_KEYS, EXACT_KEYS, RADIO_KEYS, SECRET_KEYS, TYPE_KEYS

T = TypeVar("T")
D = TypeVar("D")

MAX_FILE: Final = 4 << 20  # bytes; a configuration is a few thousand. Local

BOOLEANS: Final[Mapping[str, bool]] = {
    **dict.fromkeys(("yes", "true", "on", "1"), True),
    **dict.fromkeys(("no", "false", "off", "0"), False),
}

# The divider of an option line, past a key that may be quoted; what follows it is the value as written.
_DIVIDER: Final = re.compile(r"\s*(\"[^\"]*\"|'[^']*'|[^='\"][^=]*?)\s*=\s*")


class _Missing:
    """Marks the absence of a default: then the option is required."""


_REQUIRED: Final = _Missing()


class Section:
    """One section of the file. Reading an option checks it; every error names file, line, section and option.

    An option that is absent, empty, or the word `None` counts as not set, and then the default applies; an option
    read without a default is required.
    """

    __slots__ = ("_lines", "_used", "_values", "children", "depth", "line", "name", "path")

    def __init__(self, name: str, path: Path, line: int, depth: int, values: Any, lines: Mapping[str, int]) -> None:
        self.name = name
        self.path = path
        self.line = line  # of the section's heading, from 1; 0 if the section is not in the file
        self.depth = depth
        self.children: list[Section] = []
        self._values = values
        self._lines = lines
        self._used: set[str] = set()

    # -- places and messages ------------------------------------------------------------------------------------------

    @property
    def title(self) -> str:
        """The heading as written: `[[Home]]`."""
        return "[" * self.depth + self.name + "]" * self.depth

    def line_of(self, key: str) -> int:
        """Line of an option, or of the heading if the option is not there."""
        return self._lines.get(key, self.line)

    def fail(self, key: str, message: str) -> ConfigError:
        """The error to raise for `key`. `message` says what was found and what is accepted."""
        line = self.line_of(key)
        text = f"{_place(self.path, line)}: {self.title}: {key}: {message}"
        return ConfigError(text, file=str(self.path), line=line, section=self.name, key=key)

    def note(self, key: str, message: str) -> str:
        """A warning in the form of `fail`."""
        return f"{_place(self.path, self.line_of(key))}: {self.title}: {key}: {message}"

    # -- what is there ------------------------------------------------------------------------------------------------

    @property
    def keys(self) -> list[str]:
        """The options, in the order of the file."""
        return [] if self._values is None else list(self._values.scalars)

    def has(self, key: str) -> bool:
        """Whether `key` is there and set."""
        return self._read(key) is not None

    @property
    def enabled(self) -> bool:
        """Either spelling can enable a section; a section that does not say so is not enabled."""
        return self.boolean("enabled", False) | self.boolean("interface_enabled", False)

    @property
    def kind(self) -> str:
        """The word after `type`. Raises ConfigError if there is none."""
        return self.text("type")

    def unknown(self, known: Iterable[str] = ()) -> list[str]:
        """One warning for each option that nothing reads and that is not in `known`, with the nearest right name."""
        known = set(known)
        candidates = {*known, *self._used, *COMMON_KEYS}
        kind = None if self._values is None else dict.get(self._values, "type")
        if isinstance(kind, str):
            candidates |= TYPE_KEYS.get(kind, frozenset())
        warnings = unknown_options(self, candidates)
        for child in self.children:
            warnings += unknown_options(child, {*known, *child._used, *RADIO_KEYS})
        return warnings

    # -- reading ------------------------------------------------------------------------------------------------------

    def _read(self, key: str) -> str | list[str] | None:
        self._used.add(key)
        if self._values is None or key not in self._values:
            return None
        try:
            value = self._values[key]
        except (ConfigObjError, TypeError, AttributeError, RecursionError):
            # The library has no single exception for this: an unknown name, a loop, a list, a section.
            hint = "%(name)s stands for another option of this section or those around it; none can be put in here"
            raise self.fail(key, f"{self._shown(key)} cannot be filled in; {hint}") from None
        if isinstance(value, dict):
            raise self.fail(key, "is a section here; 'key = value' is accepted")
        if isinstance(value, list):
            return [str(item) for item in value]
        return None if value in ("", "None") else str(value)

    def _shown(self, key: str) -> str:
        return "the value" if key in SECRET_KEYS else repr(dict.get(self._values, key))

    def _single(self, key: str, accepted: str) -> str | None:
        value = self._read(key)
        if isinstance(value, list):
            found = f"the unquoted comma makes this a list of {len(value)}"
            if key not in SECRET_KEYS:
                found += f" ({', '.join(map(repr, value))})"
            raise self.fail(key, f"{found}, accepted is {accepted}; put the value in quotes if the comma belongs to it")
        return value

    def _absent(self, key: str, default: D | _Missing, accepted: str) -> D:
        if isinstance(default, _Missing):
            found = "is set to nothing" if key in self._lines else "is missing"
            raise self.fail(key, f"{found}, accepted is {accepted}")
        return default

    @overload
    def text(self, key: str) -> str: ...
    @overload
    def text(self, key: str, default: D, required: bool | None = None) -> str | D: ...
    def text(self, key: str, default: Any = _REQUIRED, required: bool | None = None) -> Any:
        """One text. Without a default it is required; `required=True` insists even if there is one."""
        value = self._single(key, "one text")
        if value is not None:
            return value
        if required is False and isinstance(default, _Missing):
            return None
        return self._absent(key, _REQUIRED if required else default, "one text")

    @overload
    def integer(self, key: str, low: int | None = None, high: int | None = None) -> int: ...
    @overload
    def integer(self, key: str, low: int | None = None, high: int | None = None, *, default: D) -> int | D: ...
    @overload
    def integer(self, key: str, low: int | None, high: int | None, default: D) -> int | D: ...
    def integer(self, key: str, low: int | None = None, high: int | None = None, default: Any = _REQUIRED) -> Any:
        """A whole number within `low`..`high`, both included; None is no limit."""
        accepted = "a whole number" + _within(low, high)
        text = self._single(key, accepted)
        if text is None:
            return self._absent(key, default, accepted)
        try:
            value = int(text)
        except ValueError:
            raise self.fail(key, f"{self._shown(key)} is not a whole number, accepted is {accepted}") from None
        if (low is not None and value < low) or (high is not None and value > high):
            raise self.fail(key, f"{self._shown(key)} is not{_within(low, high)}")
        return value

    @overload
    def number(self, key: str, low: float | None = None, high: float | None = None) -> float: ...
    @overload
    def number(self, key: str, low: float | None = None, high: float | None = None, *, default: D) -> float | D: ...
    @overload
    def number(self, key: str, low: float | None, high: float | None, default: D) -> float | D: ...
    def number(self, key: str, low: float | None = None, high: float | None = None, default: Any = _REQUIRED) -> Any:
        """A finite number within `low`..`high`, both included; None is no limit."""
        accepted = "a number" + _within(low, high)
        text = self._single(key, accepted)
        if text is None:
            return self._absent(key, default, accepted)
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise self.fail(key, f"{self._shown(key)} is not a number, accepted is {accepted}")
        if (low is not None and value < low) or (high is not None and value > high):
            raise self.fail(key, f"{self._shown(key)} is not{_within(low, high)}")
        return value

    @overload
    def boolean(self, key: str) -> bool: ...
    @overload
    def boolean(self, key: str, default: D) -> bool | D: ...
    def boolean(self, key: str, default: Any = _REQUIRED) -> Any:
        """Yes or no: `yes true on 1`, `no false off 0`, in any case of letters."""
        accepted = "yes or no (also true, on, 1; false, off, 0)"
        text = self._single(key, accepted)
        if text is None:
            return self._absent(key, default, accepted)
        value = BOOLEANS.get(text.lower())
        if value is None:
            raise self.fail(key, f"{self._shown(key)} is neither yes nor no, accepted is {accepted}")
        return value

    def words(self, key: str, default: Sequence[str] = ()) -> list[str]:
        """A list; a single value is a list of one."""
        value = self._read(key)
        if value is None:
            return list(default)
        return [value] if isinstance(value, str) else value

    @overload
    def choice(self, key: str, table: Mapping[str, T]) -> T: ...
    @overload
    def choice(self, key: str, table: Mapping[str, T], default: D) -> T | D: ...
    def choice(self, key: str, table: Mapping[str, Any], default: Any = _REQUIRED) -> Any:
        """The entry of `table` for a word, in any case of letters."""
        accepted = "one of " + ", ".join(table)
        text = self._single(key, accepted)
        if text is None:
            return self._absent(key, default, accepted)
        exact = table.get(text)
        if exact is not None:
            return exact
        for word, entry in table.items():
            if word.lower() == text.lower():
                return entry
        raise self.fail(key, f"{self._shown(key)} is not known, accepted is {accepted}{did_you_mean(text, table)}")


def unknown_options(section: Section, known: Collection[str]) -> list[str]:
    """A warning for each option of `section` whose name is not in `known`."""
    return [
        f"{_place(section.path, section.line_of(key))}: {section.title}: unknown option {key!r}"
        f"{did_you_mean(key, known)}"
        for key in section.keys
        if key not in known
    ]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint with the nearest of the names in `known`; empty if none is near."""
    by_lower = {name.lower(): name for name in sorted(known)}
    near = get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return f", did you mean {by_lower[near[0]]!r}?" if near else ""


def _within(low: float | None, high: float | None) -> str:
    if low is None and high is None:
        return ""
    if high is None:
        return f" at least {low}"
    return f" at most {high}" if low is None else f" within {low}..{high}"


def _place(path: Path, line: int) -> str:
    return f"{path.name}:{line}" if line else path.name


# -- reading the file -------------------------------------------------------------------------------------------------


def read_file(path: Path) -> tuple[Section, list[str]]:
    """Read the file at `path` into the unnamed section around everything, and warnings. Raises ConfigError."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            what = "a directory" if stat.S_ISDIR(mode) else "not a file"
            raise ConfigError(f"{path}: is {what}; a configuration file is needed", file=str(path))
        with path.open("rb") as file:
            data = file.read(MAX_FILE + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})", file=str(path)) from error
    return parse(data, path)


def parse(data: bytes, path: Path) -> tuple[Section, list[str]]:
    """As `read_file`, for bytes that are already here; `path` is for the messages."""
    lines = _decode(data, path)
    try:
        tree = ConfigObj(lines, list_values=True, interpolation=True, raise_errors=False)
    except ConfigObjError as error:
        raise _explain(error, lines, path) from None
    warnings: list[str] = []
    numbers = list(_logical_lines(lines))
    root = Section("", path, 0, 0, tree, {})
    if len(numbers) == _count(tree):  # or else no line number is better than a wrong one
        _build(root, tree, iter(numbers), lines, warnings)
    else:
        _build(root, tree, None, lines, warnings)
    return root, warnings


def _decode(data: bytes, path: Path) -> list[str]:
    if len(data) > MAX_FILE:
        raise ConfigError(f"{path}: larger than {MAX_FILE >> 20} MiB; this is no configuration file", file=str(path))
    for bad, what in (
        (data.find(b"\0"), "there is a zero byte, so this is no text file"),
        (_first_bad(data), "there are bytes that are not UTF-8"),
    ):
        if bad >= 0:
            line = data.count(b"\n", 0, bad) + 1
            raise ConfigError(
                f"{_place(path, line)}: {what}; save the file as UTF-8 text, or restore it from a backup",
                file=str(path),
                line=line,
            )
    return data.decode("utf-8-sig").splitlines()


def _first_bad(data: bytes) -> int:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start
    return -1


def _count(tree: Any) -> int:
    return len(tree.scalars) + sum(1 + _count(dict.__getitem__(tree, name)) for name in tree.sections)


def _logical_lines(lines: list[str]) -> Iterator[int]:
    """Numbers of the lines that make a section or an option, from 1. A value in triple quotes spans several lines."""
    at = 0
    while at < len(lines):
        line = lines[at].strip()
        at += 1
        if not line or line.startswith("#"):
            continue
        yield at
        value = written_value(line)
        quotes = value[:3]
        if quotes in ("'''", '"""') and quotes not in value[3:]:
            while at < len(lines) and quotes not in lines[at]:
                at += 1
            at += 1  # the line with the closing quotes


def written_value(line: str) -> str:
    """What stands after the divider, comment included."""
    match = _DIVIDER.match(line)
    return line[match.end() :] if match else ""


def _build(section: Section, tree: Any, numbers: Iterator[int] | None, lines: list[str], warnings: list[str]) -> None:
    places: dict[str, int] = {}
    for key in tree.scalars:
        line = places[key] = next(numbers) if numbers else 0
        if line and (comment := tree.inline_comments.get(key)):
            warning = _cut_by_comment(section, key, dict.get(tree, key), lines[line - 1], comment, line)
            warnings += [warning] if warning else []
    section._lines = places
    for name in tree.sections:
        inner = dict.__getitem__(tree, name)
        child = Section(name, section.path, next(numbers) if numbers else 0, section.depth + 1, inner, {})
        section.children.append(child)
        _build(child, inner, numbers, lines, warnings)


def _cut_by_comment(section: Section, key: str, value: Any, line: str, comment: str, number: int) -> str | None:
    """A `#` outside quotes starts a comment even in the middle of a word; say so where it may not be meant."""
    written = written_value(line).rstrip()
    before = written[: len(written) - len(comment.rstrip())]
    if before[:1] in ("'", '"') or (before[-1:].strip() == "" and key not in EXACT_KEYS):
        return None  # quoted, or the usual comment after a blank
    size = sum(map(len, value))
    understood = f"the {size} characters before it are the value" if key in SECRET_KEYS else f"the value is {value!r}"
    return (
        f"{_place(section.path, number)}: {section.title}: {key}: the unquoted '#' starts a comment, {understood};"
        " put it in quotes if the '#' belongs to it"
    )


# -- explaining what cannot be read -----------------------------------------------------------------------------------


def _explain(error: ConfigObjError, lines: list[str], path: Path) -> ConfigError:
    """One sentence about the first fault."""
    first = error.errors[0] if getattr(error, "errors", None) else error
    number = int(getattr(first, "line_number", 0) or 0)
    line = lines[number - 1].strip() if 0 < number <= len(lines) else ""
    if isinstance(first, DuplicateError):
        message = _duplicate(line, number, lines)
    elif isinstance(first, NestingError):
        message = f"{line}: the brackets do not fit; a section is one level deeper than the one around it, not more"
    elif line.startswith("["):
        message = f"{line!r} is not a section heading; accepted is [name] or [[name]], with as many ] as ["
    else:
        message = _bad_line(line)
    return ConfigError(f"{_place(path, number)}: {message}", file=str(path), line=number)


def _heading(line: str) -> str:
    return line.split("#")[0].strip().strip("[]").strip().strip("'\"")


def _duplicate(line: str, number: int, lines: list[str]) -> str:
    is_section = line.startswith("[")
    depth = len(line) - len(line.lstrip("["))
    name = _heading(line) if is_section else _key(line)
    for earlier in range(number - 1, 0, -1):
        other = lines[earlier - 1].strip()
        other_depth = len(other) - len(other.lstrip("["))
        if is_section and other_depth == depth and _heading(other) == name:
            return f"{line}: this section is there already, on line {earlier}; give one of them another name"
        if not is_section and other_depth == 0 and not other.startswith("#") and _key(other) == name:
            return f"{name}: this option is there already, on line {earlier}; remove one of them"
    what = "section" if is_section else "option"
    return f"{name}: this {what} is there twice; only one can be"


def _key(line: str) -> str:
    match = _DIVIDER.match(line)
    return match.group(1).strip("'\"") if match else ""


def _bad_line(line: str) -> str:
    if line.startswith(";"):
        return "a comment starts with '#', not with ';'"
    match = _DIVIDER.match(line)
    key = line.split("=")[0].split(":")[0].strip()
    if match is None:
        shown = "this line" if key in SECRET_KEYS or key.split(" ")[0] in SECRET_KEYS else repr(line)
        hint = "; write '=' instead of ':'" if ":" in line and "=" not in line else ""
        return f"{shown} is neither a [section] nor 'key = value'{hint}"
    key, value = _key(line), line[match.end() :]
    quote = value[:1]
    if value[:3] in ("'''", '"""'):
        return f"{key}: the closing {value[:3]} is missing"
    if quote in ("'", '"'):
        if quote not in value[1:]:
            return f"{key}: the closing {quote} is missing"
        return f"{key}: there is text after the closing {quote}; quote the whole value, with the other kind if need be"
    return f"{key}: the quotes in the value do not fit; put the whole value in one pair of quotes"
