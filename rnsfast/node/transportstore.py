"""What a transport node keeps of its tables on disk, in the files of the reference.  Protocol 02, section 17.

Nothing here stops the reactor: tables are copied in parts, each under the lock for a moment, and packed and written on
the caller's thread. A path is worth nothing without its announce, which is a file of its own: written once, read at
start, removed when no path and no tunnel needs it any more.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, Final, TypeVar

from rnsfast.engine.known import PATH_LIFETIME, Path
from rnsfast.errors import StorageError
from rnsfast.node.files import read_file, remove_unfinished
from rnsfast.wire.packet import packet_hash
from rnsfast.wire.transportfiles import (
    HASH,
    StoredPath,
    StoredTunnel,
    build_announce_file,
    build_list,
    parse_announce_file,
    parse_hashes,
    parse_paths,
    parse_tunnels,
    tunnel_row,
)

if TYPE_CHECKING:
    from rnsfast.engine.engine import Engine
    from rnsfast.node.storage import Storage

log = logging.getLogger(__name__)

T = TypeVar("T")

PART: Final = 500  # entries copied while the lock is held: about half a millisecond
PATHS: Final = "destination_table"
TUNNELS: Final = "tunnels"
HASHES: Final = "packet_hashlist.raw"
CACHE: Final = "cache/announces"
MAX_ANNOUNCE: Final = 4096  # bytes of a cached announce


class TransportStore:
    """Loads and saves the tables of one engine. One caller at a time; blocks on the disk."""

    def __init__(self, storage: Storage, lock: AbstractContextManager[Any]) -> None:
        self._storage, self._lock = storage, lock
        self._cache = storage.root / CACHE
        self._cached: set[bytes] = set()  # packet hashes of the announces on disk
        self._opened = False

    # -- loading --------------------------------------------------------------------------------------------------

    def load(self, engine: Engine, unix_time: float) -> int:
        """Before anything runs: give the engine what was stored. Returns the number of paths that have an announce."""
        self._open_cache()
        for digest in self._storage.load(HASHES, parse_hashes, lost="the packets seen before the restart") or ():
            engine.seen.add(digest)
        lost = "all paths; each comes back with an announce or a path request"
        paths = self._storage.load(PATHS, parse_paths, lost=lost) or []
        paths.reverse()
        kept = 0
        while paths:  # taken one by one, so that a large table is not in memory twice
            stored = paths.pop()
            if unix_time > stored.heard_at + PATH_LIFETIME or stored.interface is None:
                continue
            path = self._path(stored, engine)
            if path is not None:
                engine.stored_paths.setdefault(stored.interface, []).append((stored.destination, path))
                kept += 1
        tunnels = self._storage.load(TUNNELS, parse_tunnels, lost="paths over connections of others") or []
        if engine.transport is not None:
            for tunnel in tunnels:
                restored = {p.destination: path for p in tunnel.paths if (path := self._path(p, engine)) is not None}
                if restored and unix_time <= tunnel.expires_at:
                    engine.transport.tunnels.restore(tunnel.id, restored, tunnel.expires_at)
        return kept

    def _open_cache(self) -> None:
        if self._opened:
            return
        self._opened = True
        try:
            self._cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            remove_unfinished(self._cache)
            names = os.listdir(self._cache)
        except OSError as error:
            log.warning("%s: announces cannot be kept there (%s)", self._cache, error.strerror)
            names = []
        self._cached = {digest for name in names if (digest := _hash_of(name)) is not None}

    def _path(self, stored: StoredPath, engine: Engine) -> Path | None:
        """A path without interface; None if its announce is not there or is not that announce."""
        digest = stored.packet_hash
        if digest not in self._cached:
            return None
        raw = self._read_announce(digest)
        if raw is None:
            return None
        known = engine.known.entries.get(stored.destination)
        if known is not None and known.packet_hash == digest:
            digest = known.packet_hash  # one object instead of two
        return Path(
            stored.heard_at, stored.next_hop, stored.hops, stored.expires_at, list(stored.blobs), None,  # type: ignore[arg-type]
            digest, announce=raw,
        )  # fmt: skip

    def _read_announce(self, digest: bytes) -> bytes | None:
        path = self._cache / digest.hex()
        try:
            data = read_file(path, MAX_ANNOUNCE)
            raw = None if data is None else parse_announce_file(data)
        except (StorageError, ValueError):
            raw = None
        if raw is not None and len(raw) > 20 and packet_hash(raw) == digest:
            return raw
        self._cached.discard(digest)
        _remove(path)  # damaged, and of no use: the next announce replaces it
        return None

    # -- saving ---------------------------------------------------------------------------------------------------

    def save(self, engine: Engine, *, hashes: bool) -> bool:
        """Write paths, tunnels and new announces; with `hashes` also the packets seen. False if something failed."""
        self._open_cache()
        transport = engine.transport
        needed: dict[bytes, tuple[bytes, str | None]] = {}  # packet hash to announce and interface name
        parts: list[list[list[object]]] = []
        for part in slices(self._lock, engine.paths.paths, lambda d, p: (d, p, p.port.hash, p.port.name)):
            rows: list[list[object]] = []
            for destination, path, interface, name in part:
                if path.announce:
                    rows.append(_stored(destination, path, interface).row())
                    needed[path.packet_hash] = (path.announce, name)
            parts.append(rows)
        with self._lock:
            engine.stored_paths.clear()  # an interface that has not come up by now is gone
        tunnels: list[list[object]] = []
        if transport is not None:
            for group in slices(self._lock, transport.tunnels.tunnels, lambda _, t: (t, list(t.paths.items()))):
                for tunnel, paths in group:
                    kept = tuple(_stored(d, p, None) for d, p in paths if p.announce)
                    if kept:
                        interface = None if tunnel.port is None else tunnel.port.hash
                        tunnels.append(tunnel_row(StoredTunnel(tunnel.id, interface, kept, tunnel.expires_at)))
                        needed |= {p.packet_hash: (p.announce, None) for _, p in paths if p.announce}
        good = self._write_announces(needed)
        good = self._storage.save(PATHS, build_list(parts, sum(map(len, parts)))) and good
        good = self._storage.save(TUNNELS, build_list([[row] for row in tunnels], len(tunnels))) and good
        if good:
            self._prune(needed)
        if hashes and transport is not None:
            with self._lock:
                recent = engine.seen.recent()
            good = self._storage.save(HASHES, b"".join(recent)) and good
        return good

    def _write_announces(self, needed: dict[bytes, tuple[bytes, str | None]]) -> bool:
        """The announces that are not on disk yet. Renamed into place, not synced: a damaged one costs its path only."""
        for digest, (raw, name) in needed.items():
            if digest in self._cached:
                continue
            path = self._cache / digest.hex()
            temporary = f"{path}.unfinished-{os.getpid()}"
            try:
                descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
                try:
                    os.write(descriptor, build_announce_file(raw, name))
                finally:
                    os.close(descriptor)
                os.replace(temporary, path)
            except OSError as error:
                log.warning(
                    "%s: announces cannot be written (%s); their paths are lost by a restart", self._cache, error
                )
                return False
            self._cached.add(digest)
        return True

    def _prune(self, needed: Iterable[bytes]) -> None:
        """Remove the announces that nothing refers to any more."""
        for digest in self._cached.difference(needed):
            _remove(self._cache / digest.hex())
            self._cached.discard(digest)


def slices(
    lock: AbstractContextManager[Any], table: dict[bytes, Any], make: Callable[[bytes, Any], T]
) -> Iterator[list[T]]:
    """What `make` makes of every entry, a part at a time: the lock is free in between."""
    with lock:
        keys = iter(list(table))
    while part := list(islice(keys, PART)):
        with lock:
            made = [make(key, value) for key in part if (value := table.get(key)) is not None]
        yield made


def _stored(destination: bytes, path: Path, interface: bytes | None) -> StoredPath:
    return StoredPath(
        destination, path.heard_at, path.next_hop, path.hops, path.expires_at, tuple(path.blobs), interface,
        path.packet_hash,
    )  # fmt: skip


def _hash_of(name: str) -> bytes | None:
    if len(name) != 2 * HASH:
        return None
    try:
        return bytes.fromhex(name)
    except ValueError:
        return None


def _remove(path: FilePath) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.debug("%s: cannot be removed (%s)", path, error.strerror)
