"""Reading and writing the node's files so that neither a crash nor a damaged file stops it.

Writing: a temporary name in the same directory, synced, renamed over the old file, the directory synced. Whoever reads
sees the old content or the new one, never half of either. Reading: what cannot be understood is renamed out of the way
and reported once, and the caller starts without it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from rnsfast.errors import StorageError
from rnsfast.wire.drop import Drop

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_FILE: Final = 256 << 20  # bytes read of one file; a million known destinations are 150 MiB. Local
TEMPORARY: Final = ".unfinished-"  # in the name of a file that was not renamed yet
DAMAGED: Final = ".damaged-"  # in the name of a file that was set aside
MAX_DAMAGED: Final = 1000  # copies of one file that are set aside before the newest is replaced

_counter = itertools.count()  # tells apart two threads that write the same file


def atomic_write(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replace the content of `path` by `data`, or leave it as it was.

    A symbolic link is followed: the file it names is replaced. Blocks until the disk has the data.

    Raises:
        StorageError: the disk is full, the directory is missing or not writable… Nothing is left behind.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f"{target.name}{TEMPORARY}{os.getpid()}-{next(_counter)}")
    try:
        try:
            _write_synced(temporary, data, mode)
            os.replace(temporary, target)
        except BaseException:
            _remove(temporary)
            raise
        _sync_directory(target.parent)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({_reason(error)}); what it held before is intact") from error


def _write_synced(path: Path, data: bytes, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EROFS):  # file systems that cannot
            raise
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("%s: this unfinished file cannot be removed (%s)", path, _reason(error))


def remove_unfinished(directory: Path) -> None:
    """Remove what writers that were killed left in `directory`. Only for who holds the directory's lock."""
    for name in _names(directory):
        if TEMPORARY in name:
            _remove(directory / name)


def _names(directory: Path) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def read_file(path: Path, limit: int = MAX_FILE) -> bytes | None:
    """The content of a regular file; None if there is none. Never blocks on what is no file.

    Raises:
        StorageError: it is a directory, a device…, larger than `limit`, or cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would block without O_NONBLOCK
        with os.fdopen(descriptor, "rb") as file:
            kind = os.fstat(descriptor).st_mode
            if stat.S_ISDIR(kind):
                raise StorageError("it is a directory")
            if not stat.S_ISREG(kind):
                raise StorageError("it is not a regular file")
            data = file.read(limit + 1)
    except FileNotFoundError:
        if os.path.islink(path):
            raise StorageError("it is a symbolic link to nothing") from None
        return None
    except StorageError:
        raise
    except OSError as error:
        raise StorageError("it is a directory" if error.errno == errno.EISDIR else _reason(error)) from error
    if len(data) > limit:
        raise StorageError(f"it is larger than {limit} bytes")
    return data


def set_aside(path: Path, why: str, lost: str) -> Path | None:
    """Rename `path` to `<name>.damaged-<n>` and log one warning. Returns the new path; None if that failed too."""
    for number in range(1, MAX_DAMAGED + 1):
        aside = path.with_name(f"{path.name}{DAMAGED}{number}")
        if not os.path.lexists(aside):
            break
    try:
        os.rename(path, aside)
    except OSError as error:
        log.error(
            "%s: cannot be used (%s) and cannot be set aside (%s), lost: %s; remove it by hand, until then nothing is"
            " saved there",
            path,
            why,
            _reason(error),
            lost,
        )
        return None
    log.warning("%s: damaged (%s), set aside as %s, lost: %s", path, why, aside.name, lost)
    return aside


def read_or_set_aside(
    path: Path, parse: Callable[[bytes], T | Drop | None], *, lost: str = "what it held", limit: int = MAX_FILE
) -> T | None:
    """Read and parse a file; if that is impossible, set it aside, report it once and go on without it. Never raises.

    Args:
        path: the file. If there is none the answer is None and nothing is reported.
        parse: makes the bytes into a value. A `Drop`, None or a ValueError says that they are damaged.
        lost: for the report: what the node has to do without.
    """
    try:
        data = read_file(path, limit)
    except StorageError as error:
        set_aside(path, str(error), lost)
        return None
    if data is None:
        return None
    try:
        value = parse(data)
    except ValueError as error:
        set_aside(path, str(error) or "unreadable", lost)
        return None
    if value is None or isinstance(value, Drop):
        set_aside(path, "it is empty" if not data else f"its {len(data)} bytes make no sense", lost)
        return None
    return value


class DirectoryLock:
    """Keeps a second node out of a directory. The system releases it when the process ends, however it ends."""

    def __init__(self, path: Path, directory: Path) -> None:
        self.path = path
        self.directory = directory  # for the message
        self._descriptor: int | None = None

    @property
    def held(self) -> bool:
        return self._descriptor is not None

    def acquire(self) -> None:
        """Raises StorageError if another node has it, in this process or in another one, or if it cannot be made."""
        if self._descriptor is not None:
            return
        import fcntl  # not on Windows, where what needs no files works all the same

        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        except OSError as error:
            raise StorageError(f"{self.path}: the lock file cannot be opened ({_reason(error)})") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _first_line(descriptor)
            os.close(descriptor)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise StorageError(f"{self.path}: the lock cannot be taken ({_reason(error)})") from error
            who = f" (process {holder})" if holder.isdigit() else ""
            raise StorageError(
                f"{self.directory}: another node{who} is using this directory; stop it, or give this node a directory"
                " of its own"
            ) from error
        self._descriptor = descriptor
        with contextlib.suppress(OSError):  # on a full disk the lock holds without the process number in it
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)

    def release(self) -> None:
        """Idempotent. The file stays: removing it could take it from under a node that is just locking it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _first_line(descriptor: int) -> str:
    try:
        return os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
    except OSError:
        return ""


def _reason(error: OSError) -> str:
    name = errno.errorcode.get(error.errno or 0, "")
    return f"{error.strerror or error}{', ' + name if name else ''}"
