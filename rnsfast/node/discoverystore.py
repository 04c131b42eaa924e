"""Remembers the interfaces that were heard of, on disk if the node has one.  Protocol 02, section 15.4; 07, section 8.

One file each, as the reference keeps them: programs read the directory themselves.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Final

from rnsfast.errors import StorageError
from rnsfast.node.files import atomic_write, read_file
from rnsfast.wire.discoveryrecord import Record, build_record, parse_record

log = logging.getLogger(__name__)

AVAILABLE_FOR: Final = 24 * 3600.0  # seconds since it was last heard of
UNKNOWN_FOR: Final = 3 * 86400.0
STALE_FOR: Final = 7 * 86400.0  # then it is deleted
LIMIT: Final = 1024  # records; the one longest unheard gives way
MAX_FILE: Final = 16384  # bytes of a record; they have about one thousand


class RecordStatus(IntEnum):
    """How likely a discovered interface is still there. Numbers are public API: the reference's."""

    STALE = 0
    UNKNOWN = 100
    AVAILABLE = 1000


@dataclass(frozen=True, slots=True)
class Discovered:
    """A record, and what to think of it now."""

    record: Record
    status: RecordStatus


class DiscoveryStore:
    """The records. Threads: any; blocks on the disk.

    `directory` None keeps them in memory only. `is_welcome` says whether what an identity announces may be kept.
    """

    def __init__(self, directory: Path | None, is_welcome: Callable[[bytes], bool]) -> None:
        self._directory, self._is_welcome = directory, is_welcome
        self._lock = threading.Lock()
        self._records: dict[bytes, Record] = {}  # by discovery hash
        self._failing = False

    def load(self, unix_time: float) -> None:
        """Read the directory. Files that are not, or no longer, worth keeping are removed."""
        with self._lock:
            for path in self._paths():
                record = self._read(path)
                if record is None or record.hash.hex() != path.name:
                    log.info("%s: is no record of a discovered interface, removed", path)
                    _unlink(path)
                else:
                    self._records[record.hash] = record
            self._clean(unix_time)

    def _paths(self) -> list[Path]:
        try:
            return [] if self._directory is None else sorted(p for p in self._directory.iterdir() if p.is_file())
        except OSError:
            return []

    @staticmethod
    def _read(path: Path) -> Record | None:
        try:
            data = read_file(path, MAX_FILE)
        except StorageError:
            return None
        return None if data is None else parse_record(data)

    def heard(self, record: Record) -> Record:
        """An interface was heard of. Returns the record as it is kept: what it says anew, known as long as before."""
        with self._lock:
            before = self._records.pop(record.hash, None)
            if before is not None:
                record = replace(record, discovered=before.discovered, heard_count=before.heard_count + 1)
            self._clean(record.last_heard)
            if len(self._records) >= LIMIT:
                self._remove(min(self._records.values(), key=lambda one: one.last_heard))
            self._records[record.hash] = record
            self._write(record)
        return record

    def all(self, unix_time: float) -> list[Discovered]:
        """What is known, most promising first: by status, work, and when it was last heard of."""
        with self._lock:
            self._clean(unix_time)
            found = [Discovered(record, status_of(record, unix_time)) for record in self._records.values()]
        found.sort(key=lambda one: (one.status, one.record.value, one.record.last_heard), reverse=True)
        return found

    def _clean(self, unix_time: float) -> None:
        for record in list(self._records.values()):
            if unix_time - record.last_heard >= STALE_FOR or not self._is_welcome(record.network_id):
                self._remove(record)

    def _remove(self, record: Record) -> None:
        self._records.pop(record.hash, None)
        if self._directory is not None:
            _unlink(self._directory / record.hash.hex())

    def _write(self, record: Record) -> None:
        if self._directory is None:
            return
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            atomic_write(self._directory / record.hash.hex(), build_record(record))
            self._failing = False
        except (OSError, StorageError) as error:
            if not self._failing:
                log.warning("%s; further failures are not reported until saving works again", error)
            self._failing = True


def status_of(record: Record, unix_time: float) -> RecordStatus:
    """What to think of a record at that time."""
    age = unix_time - record.last_heard
    if age < AVAILABLE_FOR:
        return RecordStatus.AVAILABLE
    return RecordStatus.UNKNOWN if age < UNKNOWN_FOR else RecordStatus.STALE


def _unlink(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)
