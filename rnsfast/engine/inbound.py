"""What has been received and waits for its turn, by traffic class.  Protocol 02, section 3.5.

Data is never here: it is handled when it is received, before the next read. What needs a signature verified or tables
searched waits, and whoever drives the engine takes a little of it when there is nothing better to do. Each interface
has its own bounded line in each class, and all are served in turn, so that one that pours in announces or path requests
delays its own only. A class comes before the next one, but every class has its share of each helping: a flood of
announces must not keep path requests waiting for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

from rnsfast.wire.drop import Drop

if TYPE_CHECKING:
    from rnsfast.crypto.identity import Identity
    from rnsfast.engine.port import Port
    from rnsfast.wire.announce import Announce
    from rnsfast.wire.packet import Packet
    from rnsfast.wire.pathrequest import PathRequest


class TrafficClass(IntEnum):
    """In the order in which they are served."""

    DATA = 0
    ANNOUNCE = 1
    PATH_REQUEST = 2
    INGRESS_LIMITED = 3  # path requests during a burst, announces that were held


#: Entries an interface may have waiting; more are dropped.
LENGTHS: Final[Mapping[TrafficClass, int]] = {
    TrafficClass.ANNOUNCE: 128,
    TrafficClass.PATH_REQUEST: 128,
    TrafficClass.INGRESS_LIMITED: 8,
}

#: Entries taken at a time: with four verifications a quarter of a millisecond that links may have to wait.
SHARES: Final[Mapping[TrafficClass, int]] = {
    TrafficClass.DATA: 64,
    TrafficClass.ANNOUNCE: 4,
    TrafficClass.PATH_REQUEST: 8,
    TrafficClass.INGRESS_LIMITED: 1,
}

OVERLOADS: Final[Mapping[TrafficClass, Drop]] = {
    TrafficClass.ANNOUNCE: Drop.ANNOUNCE_OVERLOAD,
    TrafficClass.PATH_REQUEST: Drop.PATH_REQUEST_OVERLOAD,
    TrafficClass.INGRESS_LIMITED: Drop.LIMITED_OVERLOAD,
}


@dataclass(slots=True)
class Unverified:
    """One announce on its way to verification."""

    port: Port
    packet: Packet
    announce: Announce
    raw: bytes
    digest: bytes
    identity: Identity
    released: bool = False  # it was held before


@dataclass(slots=True)
class Asked:
    """One path request for a destination that is not ours."""

    port: Port
    request: PathRequest
    tag: bytes
    limited: bool = False  # its interface asks too often


Item = Unverified | Asked


class Lines:
    """One class: a line an interface."""

    __slots__ = ("_lines", "dropped", "length")

    def __init__(self, length: int) -> None:
        self.length = length
        self.dropped = 0
        self._lines: dict[Port, deque[Any]] = {}  # those with something in them, next to be served first

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    @property
    def pressure(self) -> float:
        """How full the fullest line is, 0..1."""
        return max(map(len, self._lines.values()), default=0) / self.length

    def put(self, port: Port, item: Any) -> bool:
        """To the end of the line of `port`; False if that is full."""
        line = self._lines.get(port)
        if line is None:
            line = self._lines[port] = deque()
        elif len(line) >= self.length:
            self.dropped += 1
            return False
        line.append(item)
        return True

    def take(self, most: int) -> list[Any]:
        """The next ones, one of each interface in turn."""
        found: list[Any] = []
        while self._lines and len(found) < most:
            port = next(iter(self._lines))
            line = self._lines.pop(port)
            found.append(line.popleft())
            if line:
                self._lines[port] = line
        return found

    def leave(self, port: Port) -> int:
        """`port` is gone. How many entries went with it."""
        return len(self._lines.pop(port, ()))


class Inbound:
    """All classes. `lengths`: entries an interface may have waiting, by class; those not named as usual."""

    def __init__(self, lengths: Mapping[TrafficClass, int] | None = None) -> None:
        self.lines = {kind: Lines(length) for kind, length in sorted({**LENGTHS, **(lengths or {})}.items())}
        self._count = 0

    def __bool__(self) -> bool:
        return self._count > 0

    def put(self, kind: TrafficClass, port: Port, item: Any) -> bool:
        """To the end of its line. Dropped and counted if that is full: False."""
        if self.lines[kind].put(port, item):
            self._count += 1
            return True
        overload = OVERLOADS.get(kind)
        if overload is not None:
            port.drops[overload] += 1
        return False

    def take(self) -> list[Any]:
        """One helping: every class's share, the first class first."""
        found: list[Any] = []
        for kind, lines in self.lines.items():
            found += lines.take(SHARES[kind])
        self._count -= len(found)
        return found

    def leave(self, port: Port) -> None:
        """`port` is gone, and what waits for it."""
        for lines in self.lines.values():
            self._count -= lines.leave(port)
