"""A file while it arrives: under a temporary name until it is whole.  docs/file-protocol.md, Course 8."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from rnsfast.files.errors import NotStored
from rnsfast.files.names import TEMPORARY, numbered

if sys.platform != "win32":  # there, files in use cannot be removed anyway
    import fcntl

PART: Final = ".part"
MAX_NUMBER: Final = 9999  # of files with the same name
FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
NO_LINKS: Final = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})

#: What an error of the file system means to the person at the other end.
MEANINGS: Final = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file system takes no file of this size",
    errno.ENAMETOOLONG: "the name is too long for the file system",
    errno.EROFS: "the directory cannot be written to",
    errno.EACCES: "the directory cannot be written to",
    errno.ENOENT: "the directory is not there any more",
}


def not_stored(error: OSError) -> NotStored:
    """One sentence, without names of directories: it goes to the sender."""
    meaning = MEANINGS.get(error.errno or 0) or f"the file cannot be written: {(error.strerror or str(error)).lower()}"
    return NotStored(meaning)


class PartFile:
    """Write to it, then `keep` or `discard` it. All methods raise NotStored for what the file system refuses."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / f"{TEMPORARY}{os.urandom(8).hex()}{PART}"
        try:
            self._descriptor = os.open(self._path, FLAGS, 0o666)
        except OSError as error:
            raise not_stored(error) from error
        if sys.platform != "win32":
            with suppress(OSError):  # network file systems; it only keeps `remove_abandoned` away
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def write(self, data: bytes) -> None:
        """Append all of `data`."""
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError as error:
            raise not_stored(error) from error

    def keep(self, name: str) -> str:
        """Sync, and give the file its name or the next free one like it. Returns which."""
        try:
            os.fsync(self._descriptor)
            saved = self._publish(name)
            self._sync_directory()
        except OSError as error:
            raise not_stored(error) from error
        finally:
            self.discard()
        return saved

    def _publish(self, name: str) -> str:
        """Never replaces anything, whoever else makes files there at the same time."""
        for number in range(MAX_NUMBER + 1):
            candidate = numbered(name, number)
            with suppress(FileExistsError):
                move_without_replacing(self._path, self._directory / candidate)
                return candidate
        raise NotStored(f"there are {MAX_NUMBER} files of that name already")

    def discard(self) -> None:
        """Nothing is left under the temporary name. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        if os.name == "nt":  # an open file cannot be removed there
            os.close(descriptor)
        with suppress(OSError):
            os.unlink(self._path)
        if os.name != "nt":
            os.close(descriptor)

    def _sync_directory(self) -> None:
        if os.name == "nt":
            return
        descriptor = os.open(self._directory, os.O_RDONLY)
        try:
            with suppress(OSError):  # some file systems cannot
                os.fsync(descriptor)
        finally:
            os.close(descriptor)


def move_without_replacing(path: Path, target: Path) -> None:
    """Give the file at `path` the name `target` as well or instead. FileExistsError if that exists."""
    if os.name == "nt":
        os.rename(path, target)
        return
    try:
        os.link(path, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        os.close(os.open(target, FLAGS, 0o666))  # takes the name, or raises
        try:
            os.replace(path, target)
        except OSError:
            os.unlink(target)
            raise


def remove_abandoned(directory: Path) -> list[str]:
    """Remove what transfers left that were killed; what another program is writing stays. Returns the names."""
    removed: list[str] = []
    if sys.platform == "win32":
        return removed
    for path in directory.glob(f"{TEMPORARY}*{PART}"):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
                removed.append(path.name)
            finally:
                os.close(descriptor)
    return removed


def free_space(directory: Path) -> int | None:
    """Bytes that can be written to files in `directory`; None if that cannot be told."""
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return None
