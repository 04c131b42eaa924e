"""What announces have taught: public keys, app data, ratchets; and the paths to their destinations.

Protocol 01, section 2.3; protocol 02, sections 2.4 and 6.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import TYPE_CHECKING, Final

from rnsfast.crypto.identity import Identity
from rnsfast.wire.announce import emission_time

if TYPE_CHECKING:
    from rnsfast.engine.port import Port

KNOWN_LIMIT: Final = 131_072  # destinations; those longest unheard among the never used go first, then the oldest
PATH_LIMIT: Final = 131_072  # paths; those longest unused go first
EVICTED: Final = 1024  # entries that leave a full table at a time: looking for them takes a look at all
BLOBS_KEPT: Final = 64  # random blobs a path remembers
PATH_LIFETIME: Final = 7 * 86400.0  # seconds
PATH_LIFETIME_BY_MODE: Final = {3: 86400.0, 4: 6 * 3600.0}  # access point, roaming
RETAINED: Final = -1.0  # use mark: never cleaned
NEVER_USED_LIFETIME: Final = 360.0  # seconds after the announce, without path
UNUSED_LIFETIME: Final = 756_000.0  # seconds after the last use, without path


@dataclass(slots=True)
class Known:
    """One announced destination."""

    heard_at: float  # unix time
    packet_hash: bytes  # 32 bytes, of the announce
    public_key: bytes  # 64 bytes
    app_data: bytes | None
    used_at: float = 0.0  # unix time of last use, 0 never, RETAINED for ever
    emitted: int = 0  # emission time of the newest announce

    def identity(self) -> Identity:
        """The public half of whose destination it is."""
        return Identity.from_public(self.public_key)


@dataclass(slots=True)
class Path:
    """How to reach a destination."""

    heard_at: float  # unix time, refreshed by use
    next_hop: bytes  # 16 bytes: a transport id, or the destination itself
    hops: int
    expires_at: float  # unix time; only influences replacement
    blobs: list[bytes]
    port: Port
    packet_hash: bytes  # of the announce
    unresponsive: bool = False
    announce: bytes = b""  # raw as received, kept with the path (trap T18)
    confirmed: int = 0  # answers to path requests that brought nothing newer
    is_answer: bool = False  # learnt from the answer to a path request: such are not passed on

    @property
    def newest(self) -> int:
        """The newest emission time among the remembered announces."""
        return max((emission_time(blob) for blob in self.blobs), default=0)


def takes(path: Path | None, hops: int, blob: bytes, unix_time: float, gravity: int = 0) -> bool:
    """Whether an announce replaces the path there is.  Protocol 02, section 6.3. `gravity` is its interface's."""
    if path is None:
        return True
    emitted, new = emission_time(blob), blob not in path.blobs
    if hops <= path.hops:
        newest = path.newest
        return (new and emitted > newest) or (emitted == newest and gravity > path.port.gravity)
    if unix_time >= path.expires_at:
        return new
    if path.unresponsive:
        # Scanned from the oldest, the first blob at least as new decides: any announce heard before counts as equal.
        reached = next((emission_time(b) for b in path.blobs if emission_time(b) >= emitted), path.newest)
        if emitted == reached:
            return True
    return new and emitted > path.newest


@dataclass(slots=True)
class PathTable:
    """Destination hash to path. At most PATH_LIMIT, the longest unused goes first."""

    paths: dict[bytes, Path] = field(default_factory=dict)

    def usable(self, destination: bytes) -> Path | None:
        """The path, if there is one and its interface is up."""
        path = self.paths.get(destination)
        return path if path is not None and path.port.online else None

    def usable_count(self, ports: Sequence[Port]) -> int:
        """How many paths there are whose interface is up."""
        if all(port.online for port in ports):
            return len(self.paths)  # those over an interface that is gone are gone
        return sum(path.port.online for path in self.paths.values())

    def put(self, destination: bytes, path: Path) -> None:
        """Enter or replace."""
        self.paths.pop(destination, None)
        if len(self.paths) >= PATH_LIMIT:
            for old in nsmallest(EVICTED, self.paths, key=lambda d: self.paths[d].heard_at):
                del self.paths[old]
        self.paths[destination] = path

    def drop(self, destination: bytes) -> bool:
        """Forget a path. False if there was none."""
        return self.paths.pop(destination, None) is not None

    def clean(self, unix_time: float, destinations: Iterable[bytes]) -> None:
        """Remove those of these paths that have expired or whose interface is gone."""
        paths = self.paths
        for destination in destinations:
            path = paths.get(destination)
            if path is not None and (
                path.port.gone or unix_time > path.heard_at + PATH_LIFETIME_BY_MODE.get(path.port.mode, PATH_LIFETIME)
            ):
                del paths[destination]


@dataclass(slots=True)
class KnownTable:
    """Destination hash to what its announces said, and the ratchets that came with them. At most KNOWN_LIMIT."""

    entries: dict[bytes, Known] = field(default_factory=dict)
    ratchets: dict[bytes, tuple[bytes, float]] = field(default_factory=dict)  # (public key 32, unix time received)

    def put(self, destination: bytes, known: Known) -> None:
        """Enter, or update everything but the use mark."""
        before = self.entries.get(destination)
        if before is not None:
            known.used_at = before.used_at
        elif len(self.entries) >= KNOWN_LIMIT:
            for old in nsmallest(EVICTED, self.entries, key=self._worth):
                del self.entries[old]
                self.ratchets.pop(old, None)
        self.entries[destination] = known

    def _worth(self, destination: bytes) -> tuple[bool, float]:
        known = self.entries[destination]
        return known.used_at != 0, known.heard_at

    def use(self, destination: bytes, unix_time: float) -> Known | None:
        """Look up for an application: stamps the use mark."""
        known = self.entries.get(destination)
        if known is not None and known.used_at != RETAINED:
            known.used_at = unix_time
        return known

    def clean(self, unix_time: float, with_path: dict[bytes, Path], destinations: Iterable[bytes]) -> None:
        """Remove those of these destinations that nobody needs any more."""
        for destination in destinations:
            known = self.entries.get(destination)
            if known is not None and destination not in with_path and _is_old(known, unix_time):
                del self.entries[destination]
                self.ratchets.pop(destination, None)


def _is_old(known: Known, unix_time: float) -> bool:
    if known.used_at == RETAINED:
        return False
    if known.used_at == 0:
        return unix_time > known.heard_at + NEVER_USED_LIFETIME
    return unix_time > known.used_at + UNUSED_LIFETIME
