"""Receipts: packets whose delivery the peer is to prove.  Protocol 01, section 8.2; protocol 03, section 12."""

from __future__ import annotations

from enum import IntEnum
from math import inf
from typing import TYPE_CHECKING, Any, Final

from rnsfast.crypto.ed25519 import VerifyKey
from rnsfast.engine.linkstate import PER_HOP_TIMEOUT, UNKNOWN_HOPS

if TYPE_CHECKING:
    from rnsfast.engine.engine import Engine

LIMIT: Final = 1024  # receipts waiting off links, and as many on each link; the oldest are culled
GRACE: Final = 1.0  # seconds a proof may be late: peers look at their clocks about once a second


class Status(IntEnum):
    """Numbers are public API (protocol 01, 8.2)."""

    SENT = 1  # on its way
    DELIVERED = 2  # proved
    FAILED = 0  # not proved in time
    CULLED = 255  # pushed out by later ones


class Receipt:
    """One packet sent and not yet proved. `timeout` is seconds from `sent_at`; the proof may be GRACE late."""

    __slots__ = (
        "armed",
        "concluded_at",
        "engine",
        "key",
        "owner",
        "packet_hash",
        "sent_at",
        "status",
        "tables",
        "timeout",
    )

    def __init__(
        self,
        engine: Engine,
        tables: tuple[dict[bytes, Any], ...],
        packet_hash: bytes,
        key: VerifyKey | None,
        sent_at: float,
        timeout: float,
    ) -> None:
        self.engine = engine
        self.tables = tables  # where it waits, by packet hash on links, by its first 16 bytes elsewhere
        self.packet_hash = packet_hash  # 32 bytes
        self.key = key  # whose signature proves it; None if the destination's identity is not known
        self.sent_at = sent_at
        self.timeout = timeout
        self.status = Status.SENT
        self.concluded_at: float | None = None
        self.owner: Any = None
        self.armed = inf

    @property
    def rtt(self) -> float | None:
        """Seconds from sending to the proof, None if there is none."""
        return (
            None if self.concluded_at is None or self.status != Status.DELIVERED else self.concluded_at - self.sent_at
        )

    def conclude(self, status: Status, now: float) -> None:
        """The one end of a receipt; later ones change nothing."""
        if self.status is not Status.SENT:
            return
        self.status = status
        self.concluded_at = now
        for table in self.tables:
            for key in (self.packet_hash, self.packet_hash[:16]):
                if table.get(key) is self:
                    del table[key]
        self.engine.timers.disarm(self)
        self.engine.receipt_concluded(self)

    def advance(self, now: float) -> float:
        """Fail when the time is up."""
        if self.status is not Status.SENT:
            return inf
        due = self.sent_at + self.timeout + GRACE
        if now < due:
            return due
        self.conclude(Status.FAILED, now)
        return inf


def packet_timeout(hops: int | None, next_hop_bitrate: float | None) -> float:
    """Seconds a proof off links may take: first hop and 6 s a hop. None, None: no path known, 774 s."""
    first = PER_HOP_TIMEOUT
    if hops is not None and next_hop_bitrate:
        first += 500 * 8 / next_hop_bitrate
    return first + PER_HOP_TIMEOUT * (UNKNOWN_HOPS if hops is None else hops)
