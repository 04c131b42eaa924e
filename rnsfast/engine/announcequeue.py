"""Announces that wait for the verification of their signatures.  Protocol 02, section 3.5.

Verifying is the cost of an announce, and nothing else waits for it: whoever drives the engine verifies when there is
nothing better to do, a batch at a time. Each interface has its own bounded line, and all are served in turn, so that
one that pours in announces delays its own only.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rnsfast.wire.drop import Drop

if TYPE_CHECKING:
    from rnsfast.crypto.identity import Identity
    from rnsfast.engine.port import Port
    from rnsfast.wire.announce import Announce
    from rnsfast.wire.packet import Packet

LINE: Final = 128  # announces an interface; more are dropped
BATCH: Final = 4  # announces verified at a time: a quarter of a millisecond that links may have to wait


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


class AnnounceQueue:
    """One line an interface."""

    def __init__(self) -> None:
        self._lines: dict[Port, deque[Unverified]] = {}  # those with something in them, next to be served first

    def __bool__(self) -> bool:
        return bool(self._lines)

    def put(self, item: Unverified) -> None:
        """To the end of its interface's line; dropped and counted if that is full."""
        line = self._lines.setdefault(item.port, deque())
        if len(line) >= LINE:
            item.port.drops[Drop.ANNOUNCE_OVERLOAD] += 1
            return
        line.append(item)

    def take(self, most: int = BATCH) -> list[Unverified]:
        """The next ones, one of each interface in turn."""
        found: list[Unverified] = []
        while self._lines and len(found) < most:
            port = next(iter(self._lines))
            line = self._lines.pop(port)
            found.append(line.popleft())
            if line:
                self._lines[port] = line
        return found

    def leave(self, port: Port) -> None:
        """`port` is gone."""
        self._lines.pop(port, None)
