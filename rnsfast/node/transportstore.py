"""What a transport node keeps of its tables on disk, in the files of the reference.  Protocol 02, section 17.

Nothing here stops the reactor: tables are copied in parts, each under the lock for a moment, and packed and written on
the caller's thread. A path is worth nothing without its announce, which is a file of its own: written once, read at
start, removed when no path and no tunnel needs it any more.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from hashlib import sha256
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, TypeVar

from rnsfast.crypto.hashes import truncated
from rnsfast.engine.announcing import FUTURE
from rnsfast.engine.filter import GENERATION
from rnsfast.engine.known import PATH_LIFETIME, PATH_LIMIT, Path
from rnsfast.engine.transport.tunnels import LIFETIME as TUNNEL_LIFETIME
from rnsfast.engine.transport.tunnels import PATHS as TUNNEL_PATHS
from rnsfast.node.files import TEMPORARY, remove_unfinished
from rnsfast.wire.packet import ANNOUNCE, HEADER_2, packet_hash
from rnsfast.wire.transportfiles import (
    HASH,
    StoredPath,
    StoredTunnel,
    build_announce_file,
    build_list,
    pack_paths,
    pack_tunnel,
    parse_announce_file,
    parse_hashes,
    parse_tunnels,
    read_paths,
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
MAX_ANNOUNCE: Final = 4096  # bytes of a cached announce's file; one of 500 bytes has about 560
NEXT_HOPS: Final = 4096  # neighbours; with more there is less in common
SHORTEST: Final = 148  # bytes of data an announce has at least


class TransportStore:
    """Loads and saves the tables of one engine. Blocks on the disk; two saves at a time wait for each other."""

    def __init__(self, storage: Storage, lock: AbstractContextManager[Any]) -> None:
        self._storage, self._lock = storage, lock
        self._cache = storage.root / CACHE
        self.cached: set[bytes] = set()  # packet hashes of the announces on disk
        self._opened = False
        self._saving = threading.Lock()
        self._written: dict[str, bytes] = {}  # file name to digest of what it holds
        self._failing = False  # announces could not be written, and that was said

    # -- loading --------------------------------------------------------------------------------------------------

    def load(self, engine: Engine, unix_time: float) -> int:
        """Before anything runs: give the engine what was stored. Returns how many paths wait for their interfaces.

        Left out: paths that are over, those whose announce is not there or not theirs, and those to identities that the
        engine has been told not to hear (trap T14). Times ahead of the clock count as now.
        """
        self._open_cache()
        lost = "the packets seen before the restart"
        for digest in self._storage.load(HASHES, lambda file: parse_hashes(file, GENERATION), lost=lost) or ():
            engine.seen.add(digest)
        reader = _Reader(self, engine, unix_time)
        lost = "all paths; each comes back with an announce or a path request"
        engine.stored_paths = self._storage.load(PATHS, reader.table, lost=lost) or {}
        tunnels = self._storage.load(TUNNELS, parse_tunnels, lost="paths over connections of others") or []
        if engine.transport is not None and tunnels:
            reader.share(path for waiting in engine.stored_paths.values() for _, path in waiting)
            for tunnel in tunnels:
                restored = reader.tunnel(tunnel)
                if restored:
                    expires_at = min(tunnel.expires_at, unix_time + TUNNEL_LIFETIME)
                    engine.transport.tunnels.restore(tunnel.id, restored, expires_at)
        return sum(map(len, engine.stored_paths.values()))

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
        self.cached = {digest for name in names if (digest := _hash_of(name)) is not None}

    def read_announce(self, digest: bytes) -> bytes | None:
        """The announce with this packet hash. A file that holds something else is removed."""
        if digest not in self.cached:
            return None
        name = f"{self._cache}/{digest.hex()}"
        raw = None
        with suppress(OSError):
            descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would block
            try:
                raw = parse_announce_file(os.read(descriptor, MAX_ANNOUNCE))
            finally:
                os.close(descriptor)
        if raw is not None and len(raw) > SHORTEST and packet_hash(raw) == digest:
            return raw
        self.cached.discard(digest)
        _remove(name)  # damaged, and of no use: the next announce replaces it
        return None

    # -- saving ---------------------------------------------------------------------------------------------------

    def save(self, engine: Engine, *, hashes: bool = False, waiting: bool = True) -> bool:
        """Write paths, tunnels and new announces. False if something failed: what was on disk is still there.

        Args:
            hashes: write the packets seen, too. They are copied in one go, which takes some 30 ms under the lock.
            waiting: keep the paths whose interface has not come up yet; if not, they are given up.
        """
        with self._saving:
            self._open_cache()
            needed: set[bytes] = set()  # packet hashes of announces
            good = self._save_paths(engine, needed, waiting)
            if engine.transport is not None:
                good = self._save_tunnels(engine, needed) and good
                if hashes:
                    with self._lock:
                        recent = engine.seen.recent()
                    good = self._storage.save(HASHES, b"".join(recent)) and good
            if good:
                self._prune(needed)
            return good

    def _save_paths(self, engine: Engine, needed: set[bytes], waiting: bool) -> bool:
        rows = _Rows()
        good = True
        for part in slices(self._lock, engine.paths.paths, lambda d, p: (d, p, p.port.hash, p.port.name)):
            found = [entry for entry in part if entry[1].announce]
            rows.add(pack_paths(_stored(d, path, interface) for d, path, interface, _ in found), len(found))
            good = self._keep_announces(((path, name) for _, path, _, name in found), needed) and good
        with self._lock:
            if not waiting:
                engine.stored_paths.clear()
            stored = list(engine.stored_paths.items())
        for interface, paths in stored:
            rest = [(d, path) for d, path in paths if d not in engine.paths.paths]
            rows.add(pack_paths(_stored(d, path, interface) for d, path in rest), len(rest))
            needed.update(path.packet_hash for _, path in rest)  # that is where they came from
        return self._replace(PATHS, rows) and good

    def _save_tunnels(self, engine: Engine, needed: set[bytes]) -> bool:
        assert engine.transport is not None
        good = True
        tunnels = _Rows()
        with self._lock:
            heads = [
                (tunnel, None if tunnel.port is None else tunnel.port.hash, tunnel.expires_at)
                for tunnel in engine.transport.tunnels.tunnels.values()
            ]
        for tunnel, interface, expires_at in heads:
            rows = _Rows()
            for part in slices(self._lock, tunnel.paths, lambda d, p: (d, p)):
                found = [(d, path) for d, path in part if path.announce]
                rows.add(pack_paths(_stored(d, path, None) for d, path in found), len(found))
                good = self._keep_announces(((path, None) for _, path in found), needed) and good
            if rows.count:
                tunnels.add(pack_tunnel(tunnel.id, interface, rows.parts, rows.count, expires_at), 1)
        return self._replace(TUNNELS, tunnels) and good

    def _replace(self, name: str, rows: _Rows) -> bool:
        """Write a file, unless it holds just that."""
        digest = rows.digest.digest()
        if self._written.get(name) == digest and (self._storage.root / name).is_file():
            return True
        self._written.pop(name, None)
        if not self._storage.save(name, build_list(rows.parts, rows.count)):
            return False
        self._written[name] = digest
        return True

    def _keep_announces(self, paths: Iterable[tuple[Path, str | None]], needed: set[bytes]) -> bool:
        """Write the announces that are not on disk yet; all are added to `needed`.

        They are renamed into place and not synced: after a power cut a damaged one is noticed and costs its path only,
        and syncing 100,000 files would take minutes.
        """
        try:
            for path, interface in paths:
                digest = path.packet_hash
                needed.add(digest)
                if digest not in self.cached:
                    self._write_announce(digest, build_announce_file(path.announce, interface))
                    self.cached.add(digest)
        except OSError as error:
            if not self._failing:
                log.warning(
                    "%s: announces cannot be written (%s), a restart would lose their paths; not reported again until"
                    " it works", self._cache, error.strerror,
                )  # fmt: skip
            self._failing = True
            return False
        if self._failing and self.cached.issuperset(needed):
            self._failing = False
            log.info("%s: announces can be written again", self._cache)
        return True

    def _write_announce(self, digest: bytes, data: bytes) -> None:
        name = f"{self._cache}/{digest.hex()}"
        temporary = f"{name}{TEMPORARY}{os.getpid()}"
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                if os.write(descriptor, data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(descriptor)
            os.replace(temporary, name)
        except OSError:
            with suppress(OSError):
                os.unlink(temporary)
            raise

    def _prune(self, needed: set[bytes]) -> None:
        """Remove the announces that nothing refers to any more."""
        for digest in self.cached - needed:
            _remove(f"{self._cache}/{digest.hex()}")
            self.cached.discard(digest)


class _Rows:
    """Rows of a file. Their digest is taken part by part: hashing lets the other threads run in between."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.count = 0
        self.digest = sha256()

    def add(self, part: bytes, count: int) -> None:
        self.parts.append(part)
        self.count += count
        self.digest.update(part)


class _Reader:
    """Makes paths without interfaces out of stored ones."""

    def __init__(self, store: TransportStore, engine: Engine, unix_time: float) -> None:
        self._store, self._engine, self._unix_time = store, engine, unix_time
        self._next_hops: dict[bytes, bytes] = {}  # one object for what many paths have in common; at most NEXT_HOPS
        self._announces: dict[bytes, bytes] = {}
        self._left = PATH_LIMIT  # paths of tunnels; more are not read

    def share(self, paths: Iterable[Path]) -> None:
        """Have further paths use the announces of these."""
        self._announces = {path.packet_hash: path.announce for path in paths}

    def table(self, file: bytes) -> dict[bytes, list[tuple[bytes, Path]]]:
        """The paths of the table that are not over, by interface hash. ValueError if it is damaged."""
        keys = {destination: destination for destination in self._engine.known.entries}  # the same objects: 6 MB less
        found: dict[bytes, list[tuple[bytes, Path]]] = {}
        for stored in read_paths(file, PATH_LIMIT):
            if stored.interface is None or self._unix_time > stored.heard_at + PATH_LIFETIME:
                continue
            path = self.path(stored)
            if path is not None:
                found.setdefault(stored.interface, []).append((keys.get(stored.destination, stored.destination), path))
        return found

    def tunnel(self, stored: StoredTunnel) -> dict[bytes, Path]:
        """The paths of a tunnel; none if it is over."""
        if self._unix_time > stored.expires_at:
            return {}
        valid = [p for p in stored.paths if self._unix_time <= p.heard_at + TUNNEL_LIFETIME]
        valid = valid[-min(TUNNEL_PATHS, self._left) :] if self._left else []
        self._left -= len(valid)
        return {p.destination: path for p in valid if (path := self.path(p)) is not None}

    def path(self, stored: StoredPath) -> Path | None:
        """None if its announce is not there or is another one, and for those nobody wants to hear of."""
        digest, engine, unix_time = stored.packet_hash, self._engine, self._unix_time
        raw = self._announces.get(digest) or self._store.read_announce(digest)
        if raw is None:
            return None
        at = 18 if raw[0] & HEADER_2 else 2
        if raw[at : at + 16] != stored.destination or raw[0] & 3 != ANNOUNCE or len(raw) < at + 17 + SHORTEST:
            return None
        if engine.blackhole.bans and engine.blackhole.is_banned(truncated(raw[at + 17 : at + 81]), unix_time):
            return None
        known = engine.known.entries.get(stored.destination)
        if known is not None and known.packet_hash == digest:
            digest = known.packet_hash  # one object instead of two
        next_hop = self._next_hops.get(stored.next_hop, stored.next_hop)
        if len(self._next_hops) < NEXT_HOPS:
            self._next_hops[next_hop] = next_hop
        self._store.cached.discard(digest)
        self._store.cached.add(digest)  # this object
        path = Path(
            min(stored.heard_at, unix_time), next_hop, stored.hops,
            min(stored.expires_at, unix_time + PATH_LIFETIME), list(stored.blobs), None,  # type: ignore[arg-type]
            digest, announce=raw,
        )  # fmt: skip
        return path if path.newest <= unix_time + FUTURE else None  # nothing could replace it


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


def _remove(name: str) -> None:
    try:
        os.unlink(name)
    except FileNotFoundError:
        pass
    except OSError as error:
        log.debug("%s: cannot be removed (%s)", name, error.strerror)
