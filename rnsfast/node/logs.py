"""Logging for commands.  Protocol 07, section 3.

A library lives in other people's programs and leaves their logging alone: nothing in here happens by itself, only the
commands call `set_up`. The levels 0..8 of configuration files are mapped to numbers of the `logging` module, the
finished lines look as operators know them.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path
from typing import Final, TextIO

ROOT: Final = "rnsfast"
MAX_LOG_FILE: Final = 5 << 20  # bytes; then the file becomes `<name>.1` (protocol 07, section 3)

#: Level of the configuration file -> level of the `logging` module. Numbers between theirs keep the order.
LEVELS: Final = (
    logging.CRITICAL,  # 0 critical
    logging.ERROR,  # 1 error
    logging.WARNING,  # 2 warning
    25,  # 3 notice
    logging.INFO,  # 4 info
    15,  # 5 verbose
    logging.DEBUG,  # 6 debug
    7,  # 7 pathing
    5,  # 8 extreme
)
TAGS: Final = ("Critical", "Error", "Warning", "Notice", "Info", "Verbose", "Debug", "Pathing", "Extra")
SILENT: Final = logging.CRITICAL + 1  # level -1: nothing at all

_ESCAPES: Final = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code != 9}


def python_level(loglevel: int) -> int:
    """The level of the `logging` module for a level of the configuration file; below 0 is silence, above 8 is 8."""
    return SILENT if loglevel < 0 else LEVELS[min(loglevel, len(LEVELS) - 1)]


class LineFormatter(logging.Formatter):
    """`[2026-09-21 14:13:20] [Info]     text`. Control characters are escaped: names come from the network."""

    def __init__(self, *, timestamps: bool = True, tags: bool = True) -> None:
        super().__init__()
        self._timestamps = timestamps
        self._tags = tags

    def format(self, record: logging.LogRecord) -> str:
        line = record.getMessage().translate(_ESCAPES)
        if self._tags:
            line = f"{_tag(record.levelno):<10} {line}"
        if self._timestamps:
            line = f"[{time.strftime('%Y-%m-%d %H:%M:%S', self.converter(record.created))}] {line}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _tag(levelno: int) -> str:
    for level, tag in zip(LEVELS, TAGS, strict=True):
        if levelno >= level:
            return f"[{tag}]"
    return f"[{TAGS[-1]}]"


class LogFile(logging.Handler):
    """Lines into a file, opened for each line so that it may be moved away; to `fallback` if that fails once."""

    def __init__(self, path: Path, fallback: TextIO, limit: int = MAX_LOG_FILE) -> None:
        super().__init__()
        self.path = path
        self._fallback = fallback
        self._limit = limit
        self._broken = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record) + "\n"
        except Exception:  # a wrong format string somewhere must not stop the program
            self.handleError(record)
            return
        if not self._broken:
            try:
                self._append(line)
                return
            except OSError as error:
                self._broken = True  # for good, or every line would try again
                _write(self._fallback, f"{self.path}: the log cannot be written ({error.strerror}), it goes on here\n")
        _write(self._fallback, line)

    def _append(self, line: str) -> None:
        with open(self.path, "a", encoding="utf-8", errors="replace") as file:
            file.write(line)
            size = file.tell()
        if size > self._limit:
            os.replace(self.path, f"{self.path}.1")


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
        stream.flush()
    except (OSError, ValueError):  # the console is gone; there is nowhere left to say so
        pass


def set_up(
    loglevel: int, *, timestamps: bool = True, file: Path | None = None, stream: TextIO | None = None
) -> logging.Handler:
    """Send the log of this package to a stream or a file. For commands only.

    Args:
        loglevel: -1 (nothing) to 8 (everything), see `LEVELS`.
        timestamps: whether lines begin with the local time.
        file: a log file; without it, lines go to `stream`.
        stream: standard error if None.

    Returns:
        The handler, for `take_down`. A second call replaces what an earlier one did.
    """
    console = sys.stderr if stream is None else stream
    handler: logging.Handler = logging.StreamHandler(console) if file is None else LogFile(file, console)
    handler.setFormatter(LineFormatter(timestamps=timestamps))
    root = logging.getLogger(ROOT)
    for earlier in [h for h in root.handlers if isinstance(h.formatter, LineFormatter)]:
        root.removeHandler(earlier)
    root.addHandler(handler)
    root.setLevel(python_level(loglevel))
    root.propagate = False
    return handler


def take_down(handler: logging.Handler) -> None:
    """Undo `set_up`."""
    root = logging.getLogger(ROOT)
    root.removeHandler(handler)
    root.setLevel(logging.NOTSET)
    root.propagate = True
