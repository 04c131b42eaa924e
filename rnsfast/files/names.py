"""File names as they travel.  docs/file-protocol.md, Messages."""

from __future__ import annotations

import os
import re
from pathlib import PurePosixPath
from typing import Final

NAME_BYTES: Final = 200  # of a name, UTF-8; on the wire, must match
SUFFIX_BYTES: Final = 16  # a suffix up to this length survives the cut; on the wire, must match
REASON_BYTES: Final = 120  # of a reason; on the wire, must match
SAVED_BYTES: Final = 210  # of the name a file was saved under; on the wire, must match
TEMPORARY: Final = ".rnsfast-"  # names of ours begin like this; nobody else's may

#: What cannot stand in a name: separators of any system, control characters, halves of surrogate pairs.
_FORBIDDEN: Final = re.compile(r"[/\\\x00-\x1f\x7f\ud800-\udfff]")
#: What Windows takes for a device, with any suffix, and what it cannot store.
_DEVICES: Final = re.compile(r"(?i)(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9\u00b9\u00b2\u00b3])\s*(\..*)?")
_WINDOWS: Final = re.compile(r'[<>:"|?*]|[. ]$')


def shorten(text: str, limit: int) -> str:
    """`text` in at most `limit` bytes of UTF-8, cut between characters."""
    return text.encode("utf-8", "replace")[:limit].decode("utf-8", "ignore")


def name_fault(name: str, *, windows: bool = os.name == "nt") -> str | None:
    """What is wrong with a file name from the network; None if a file may be called so here."""
    if not 1 <= len(name.encode("utf-8", "replace")) <= NAME_BYTES:
        return f"the name of the file must have 1 to {NAME_BYTES} bytes"
    if _FORBIDDEN.search(name):
        return "the name of the file has characters that are not allowed"
    if name in (".", "..") or name != name.strip():
        return "that is not a file name"
    if name.startswith(TEMPORARY):
        return f"names that begin with {TEMPORARY} are reserved here"
    if windows and (_DEVICES.fullmatch(name) or _WINDOWS.search(name)):
        return "a file cannot have that name on this system"
    return None


def proper_name(path: str) -> str:
    """A name that may be offered, made from any path or text."""
    name = _FORBIDDEN.sub("_", os.path.basename(path.rstrip("/"))).strip()
    if name in ("", ".", ".."):
        return "file"
    if len(name.encode()) > NAME_BYTES:
        stem, suffix = split_suffix(name)
        name = shorten(stem, NAME_BYTES - len(suffix.encode())).rstrip() + suffix
    return name if not name.startswith(TEMPORARY) else name.replace(".", "_", 1)


def split_suffix(name: str) -> tuple[str, str]:
    """Stem and suffix; the suffix is empty if it is longer than a suffix is."""
    suffix = PurePosixPath(name).suffix
    if not suffix or len(suffix.encode()) > SUFFIX_BYTES:
        return name, ""
    return name.removesuffix(suffix), suffix


def numbered(name: str, number: int) -> str:
    """`report (1).pdf` for `report.pdf`; `name` itself for 0. At most SAVED_BYTES bytes."""
    if not number:
        return name
    stem, suffix = split_suffix(name)
    ending = f" ({number}){suffix}"
    return shorten(stem, SAVED_BYTES - len(ending.encode())) + ending
