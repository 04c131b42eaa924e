"""What a node keeps on disk: its identity, and what it has learnt about others.  Protocol 07, sections 1.2 and 9.

Formats are functions of `rnsfast.wire`; this module knows names, and what to do when a file cannot be read or written.
A damaged file is set aside and the node starts without it, with one exception: the identity, which only the user may
replace.
"""

from __future__ import annotations

import logging
import os
import string
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Final, TypeVar

from rnsfast.crypto.identity import KEY_SIZE, Identity
from rnsfast.errors import StorageError
from rnsfast.node.files import (
    DAMAGED,
    DirectoryLock,
    atomic_write,
    read_file,
    read_or_set_aside,
    remove_unfinished,
    set_aside,
)
from rnsfast.wire.drop import Drop
from rnsfast.wire.knowndest import KnownDestination, build_known_destinations, parse_known_destinations
from rnsfast.wire.ratchets import (
    RATCHET_EXPIRY,
    build_peer_ratchet,
    build_ring,
    is_expired,
    parse_peer_ratchet,
    parse_ring,
)

__all__ = [
    "DirectoryLock",
    "Storage",
    "atomic_write",
    "load_ring",
    "read_file",
    "read_or_set_aside",
    "save_ring",
    "set_aside",
]

log = logging.getLogger(__name__)

T = TypeVar("T")

TRANSPORT_IDENTITY: Final = "transport_identity"
IDENTITY_CHECK: Final = "transport_identity.hash"  # 32 hex digits; ours, other implementations do not know it
KNOWN_DESTINATIONS: Final = "known_destinations"
RATCHETS: Final = "ratchets"
MAX_RATCHET_FILE: Final = 4096  # bytes; one has 64


class Storage:
    """The directory `storage` in a node's configuration directory.

    One node at a time: `open` takes a lock and `close` releases it. Loading never raises, except for the identity;
    saving answers whether it worked, and reports a failure once, until it works again.

    Threads: loading and saving of different files may run side by side; the caller keeps two saves of one file apart.
    All of it blocks on the disk.
    """

    def __init__(self, directory: Path, *, write: Callable[[Path, bytes], None] = atomic_write) -> None:
        self.directory = Path(directory)
        self.root = self.directory / "storage"
        self._write = write
        self._lock = DirectoryLock(self.root / "lock", self.directory)
        self._failing = False

    def open(self) -> None:
        """Lock the directory and remove what a killed writer left in it.

        Raises:
            StorageError: another node uses the directory, or it cannot be written to.
        """
        for path in (self.root, self.root / RATCHETS):
            try:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise StorageError(f"{path}: this directory cannot be created ({error.strerror})") from error
        if os.path.lexists(self._lock.path) and not self._lock.path.is_file():
            set_aside(self._lock.path, "it is not a file", "nothing")
        self._lock.acquire()
        remove_unfinished(self.root)
        remove_unfinished(self.root / RATCHETS)

    def close(self) -> None:
        """Let another node use the directory. Idempotent."""
        self._lock.release()

    def __enter__(self) -> Storage:
        self.open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- any file -----------------------------------------------------------------------------------------------------

    def load(self, name: str, parse: Callable[[bytes], T | Drop | None], *, lost: str) -> T | None:
        """The value in `storage/<name>`; None if there is none, or if it was damaged and has been set aside."""
        return read_or_set_aside(self.root / name, parse, lost=lost)

    def save(self, name: str, data: bytes) -> bool:
        """Replace `storage/<name>` in one step. False if that failed: the old content is intact, try again later."""
        try:
            self._write(self.root / name, data)
        except StorageError as error:
            if not self._failing:
                log.warning("%s; further failures are not reported until saving works again", error)
            self._failing = True
            return False
        if self._failing:
            self._failing = False
            log.info("%s: saving works again", self.root)
        return True

    # -- known destinations -------------------------------------------------------------------------------------------

    def load_known_destinations(self) -> list[KnownDestination]:
        """The destinations heard of, in the order of the file; entries that make no sense are left out."""
        lost = "all known destinations; each comes back with its next announce"
        return self.load(KNOWN_DESTINATIONS, parse_known_destinations, lost=lost) or []

    def save_known_destinations(self, entries: Iterable[KnownDestination]) -> bool:
        """Replace the file. False if that failed, see `save`."""
        return self.save(KNOWN_DESTINATIONS, build_known_destinations(entries))

    # -- ratchets of others -------------------------------------------------------------------------------------------

    def load_peer_ratchet(self, destination: bytes, unix_time: float) -> bytes | None:
        """The public ratchet last heard from a destination, 32 bytes; None if there is none or it is too old."""
        found = self._read_peer_ratchet(destination)
        return None if found is None or is_expired(found[1], unix_time) else found[0]

    def load_peer_ratchets(self, unix_time: float) -> dict[bytes, tuple[bytes, float]]:
        """All ratchets that are not too old: destination -> (ratchet, unix time received)."""
        found = ((destination, self._read_peer_ratchet(destination)) for destination in self._ratchet_owners())
        return {dest: ratchet for dest, ratchet in found if ratchet and not is_expired(ratchet[1], unix_time)}

    def save_peer_ratchet(self, destination: bytes, ratchet: bytes, unix_time: float) -> bool:
        """Remember a ratchet heard at `unix_time`; the same one again changes nothing. False if saving failed.

        Protocol: 01, section 7.2: hearing the same ratchet again does not extend its life.
        """
        found = self._read_peer_ratchet(destination)
        if found is not None and found[0] == ratchet:
            return True
        return self.save(f"{RATCHETS}/{destination.hex()}", build_peer_ratchet(ratchet, unix_time))

    def remove_peer_ratchet(self, destination: bytes) -> None:
        """Forget the stored ratchet of a destination; fine if there is none."""
        _unlink(self.root / RATCHETS / destination.hex())

    def clean_peer_ratchets(self, known: Collection[bytes], unix_time: float) -> int:
        """Remove ratchets that are too old or whose destination is not in `known`. Returns how many."""
        removed = 0
        for destination in list(self._ratchet_owners()):
            found = self._read_peer_ratchet(destination)
            if found is not None and (destination not in known or is_expired(found[1], unix_time)):
                self.remove_peer_ratchet(destination)
                removed += 1
        for path in self._ratchet_files():
            if DAMAGED in path.name and _modified(path) < unix_time - RATCHET_EXPIRY:
                _unlink(path)  # what was set aside here is of no use to anybody by now
        return removed

    def _read_peer_ratchet(self, destination: bytes) -> tuple[bytes, float] | None:
        path = self.root / RATCHETS / destination.hex()
        lost = "the ratchet of that destination, until its next announce"
        return read_or_set_aside(path, parse_peer_ratchet, lost=lost, limit=MAX_RATCHET_FILE)

    def _ratchet_files(self) -> list[Path]:
        try:
            return sorted((self.root / RATCHETS).iterdir())
        except OSError:
            return []

    def _ratchet_owners(self) -> Iterator[bytes]:
        for path in self._ratchet_files():
            if len(path.name) == 32 and all(digit in string.hexdigits for digit in path.name):
                yield bytes.fromhex(path.name)

    # -- the node's own identity --------------------------------------------------------------------------------------

    def transport_identity(self) -> Identity:
        """The node's identity; made if there is none yet. A damaged one is never replaced.

        Its hash is kept in a second file, so that a file full of other bytes is noticed too.

        Raises:
            StorageError: the file is damaged or cannot be read or written. The user has to decide.

        Protocol: 07, section 1.2; 01, section 2.2.
        """
        path, check = self.root / TRANSPORT_IDENTITY, self.root / IDENTITY_CHECK
        advice = "restore it from a backup, or remove it to start with a new identity, which others will not recognise"
        try:
            key = read_file(path, KEY_SIZE)
        except StorageError as error:
            raise StorageError(f"{path}: the node's identity cannot be read: {error}; {advice}") from error
        if key is None:
            _unlink(check)  # first, so that a crash does not leave the new identity with the hash of the old one
            identity = Identity()
            self._write(path, identity.private_key)
            self._write(check, identity.hash.hex().encode() + b"\n")
            return identity
        if len(key) != KEY_SIZE or _is_constant(key[:32]) or _is_constant(key[32:]):
            found = f"{len(key)} bytes, it must have {KEY_SIZE}" if len(key) != KEY_SIZE else "no keys, only filling"
            raise StorageError(f"{path}: the node's identity is damaged: the file has {found}; {advice}")
        identity = Identity.from_private(key)
        expected = read_or_set_aside(check, _parse_hash, lost="nothing, it is made again")
        if expected is None:
            self.save(IDENTITY_CHECK, identity.hash.hex().encode() + b"\n")
        elif expected != identity.hash:
            raise StorageError(
                f"{path}: holds identity {identity.hash.hex()}, but this node was {expected.hex()} when it last ran;"
                f" {advice}, or remove {IDENTITY_CHECK} if the change was meant"
            )
        return identity


def load_ring(path: Path, owner: Identity) -> list[bytes]:
    """The private ratchet keys of a destination of ours, newest first; none if there is no file, or a damaged one.

    Args:
        path: where the application keeps them.
        owner: the destination's identity, which must have signed the file.

    Protocol: 01, section 7.1.
    """

    def parse(data: bytes) -> list[bytes] | None:
        return parse_ring(data, owner.verifying)

    lost = "this destination's ratchets; what others seal to them cannot be opened until they hear the next announce"
    return read_or_set_aside(Path(path), parse, lost=lost) or []


def save_ring(path: Path, keys: Collection[bytes], owner: Identity) -> None:
    """Replace the file of `load_ring`. Raises StorageError; the old file is intact then."""
    atomic_write(Path(path), build_ring(list(keys), owner.signing))


def _parse_hash(data: bytes) -> bytes | None:
    value = bytes.fromhex(data.decode("ascii").strip())
    return value if len(value) == 16 else None


def _is_constant(key: bytes) -> bool:
    return key == key[:1] * len(key)


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s: cannot be removed (%s)", path, error.strerror)


def _modified(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return float("inf")
