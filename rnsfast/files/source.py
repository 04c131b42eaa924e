"""What is sent: a file of known size, or something that is read until it ends."""

from __future__ import annotations

import os
import select
import stat
import sys
from contextlib import suppress
from typing import Final, Protocol

from rnsfast.files.errors import SourceFault
from rnsfast.files.names import proper_name

CAN_SELECT: Final = sys.platform != "win32"  # there, only sockets can be waited for


class Source(Protocol):
    """Where the bytes come from. `size` is None if it is not known before the end."""

    name: str  # what it is called here, for messages
    size: int | None

    @property
    def offered_name(self) -> str: ...
    def read(self, most: int) -> bytes: ...
    def interrupt(self) -> None: ...
    def close(self) -> None: ...


class DescriptorSource:
    """A descriptor that is read to its end. `interrupt` makes a read that waits, and every later one, return b""."""

    def __init__(self, descriptor: int, name: str, size: int | None, *, owned: bool = True) -> None:
        self.name, self.size = name, size
        self._descriptor, self._owned = descriptor, owned
        self._interrupted = False
        self._bell: tuple[int, int] | None = os.pipe() if size is None and CAN_SELECT else None

    @property
    def offered_name(self) -> str:
        """The name for the offer."""
        return proper_name(self.name)

    def read(self, most: int) -> bytes:
        """At least one and at most `most` bytes, b"" at the end. Raises SourceFault."""
        if self._bell is not None and not self._interrupted:
            select.select([self._descriptor, self._bell[0]], [], [])
        if self._interrupted:
            return b""
        try:
            return os.read(self._descriptor, most)
        except OSError as error:
            raise SourceFault(f"{self.name} cannot be read: {reason(error)}") from error

    def interrupt(self) -> None:
        """From another thread: the transfer is over, read no more."""
        self._interrupted = True
        if self._bell is not None:
            with suppress(OSError):
                os.write(self._bell[1], b"!")

    def close(self) -> None:
        """Idempotent; not while somebody reads."""
        bell, self._bell = self._bell, None
        self._interrupted = True
        owned, self._owned = self._owned, False
        for descriptor in (*(bell or ()), *((self._descriptor,) if owned else ())):
            os.close(descriptor)


def open_source(path: str) -> DescriptorSource:
    """The file at `path`, or standard input for `-`. Raises SourceFault with one sentence."""
    if path == "-":
        try:
            return DescriptorSource(sys.stdin.fileno(), "stdin", None, owned=False)
        except (OSError, ValueError, AttributeError) as error:
            raise SourceFault("there is no standard input to read") from error
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
        found = os.fstat(descriptor)
    except (OSError, ValueError) as error:
        raise SourceFault(f"{path} cannot be read: {reason(error)}") from error
    if stat.S_ISDIR(found.st_mode):
        os.close(descriptor)
        raise SourceFault(f"{path} is a directory; one file is sent at a time")
    return DescriptorSource(descriptor, path, found.st_size if stat.S_ISREG(found.st_mode) else None)


def reason(error: Exception) -> str:
    """What the system says, without numbers and file names."""
    text = error.strerror if isinstance(error, OSError) else None
    return (text or str(error) or type(error).__name__).lower()
