"""Links of others that run through this node.  Protocol 03, sections 9.2 and 10; protocol 02, sections 5.3 to 5.6.

Pure: packets in, the packet to send and the port to send it on out.  The transport decides what comes here, remembers
packet hashes, and asks for paths when a request stays without proof.  A packet whose link is in the table is never
processed locally.
"""

from __future__ import annotations

from collections import Counter
from heapq import nsmallest
from typing import TYPE_CHECKING, Final

from rnsfast.crypto.identity import Identity
from rnsfast.engine.known import Path
from rnsfast.engine.linkstate import PER_HOP_TIMEOUT
from rnsfast.wire.drop import Drop
from rnsfast.wire.handshake import (
    ENABLED_MODES,
    SIGNALLING_SIZE,
    decode_signalling,
    encode_signalling,
    link_proof_signed_data,
    parse_link_proof,
)
from rnsfast.wire.packet import MAX_HOPS, MTU, Packet, link_id

if TYPE_CHECKING:
    from rnsfast.engine.port import Port

IDLE_LIFETIME: Final = 900.0  # seconds a validated entry lives after the last packet it relayed
UNPROVED_LIMIT: Final = 4096  # requests waiting for their proof; the oldest of whoever has most gives way
PROVED_LIMIT: Final = 65536  # links that run; the longest idle of whoever has most give way to those of others
CLEANED: Final = 1024  # running links looked at in a cleaning: with a full table, each within six minutes
EVICTED: Final = 64  # running links that give way at a time: finding them takes a look at all

_KEYS: Final = 64  # bytes of a link request's data before the signalling


class LinkEntry:
    """One link of others. Hops are those a packet has when it arrives here, counted."""

    __slots__ = (
        "deadline", "destination", "link_id", "next_hop", "next_port", "previous_port", "remaining", "taken", "used_at",
        "validated",
    )  # fmt: skip

    def __init__(
        self, identifier: bytes, destination: bytes, previous_port: Port, taken: int, path: Path, now: float
    ) -> None:
        self.link_id = identifier
        self.destination = destination
        self.previous_port = previous_port  # towards the initiator
        self.taken = taken
        self.next_hop, self.next_port, self.remaining = path.next_hop, path.port, path.hops
        self.validated = False
        self.used_at = now
        self.deadline = now + PER_HOP_TIMEOUT * max(1, path.hops) + 8 * MTU / path.port.bitrate  # of the proof


def clamp_request(data: bytes, previous_port: Port, next_port: Port) -> bytes | Drop:
    """A link request's data as it goes on: the MTU it offers can only fall.  Protocol 03, section 9.2."""
    if len(data) != _KEYS + SIGNALLING_SIZE:
        return data
    mtu, mode = decode_signalling(data[_KEYS:])
    if not mtu:
        return data
    if not next_port.upgradable:
        return data[:_KEYS]
    limit = min(previous_port.hw_mtu, next_port.hw_mtu)
    if limit >= mtu:
        return data
    return data[:_KEYS] + encode_signalling(limit, mode) if mode in ENABLED_MODES else Drop.LINK_MODE_CLAMPED


class LinkTable:
    """Link id to entry: those waiting for their proof, and those that have it.

    Both are shared out by the interface the request came from: where they are full, whoever has most gives way, so
    that one that asks for thousands of links takes none from the others.
    """

    def __init__(self) -> None:
        self.unproved: dict[bytes, LinkEntry] = {}  # oldest first, at most UNPROVED_LIMIT
        self.proved: dict[bytes, LinkEntry] = {}  # at most PROVED_LIMIT
        self._asked: dict[Port, dict[bytes, None]] = {}  # link ids of `unproved` by the previous port, oldest first
        self._running: Counter[Port] = Counter()  # entries of `proved` by the previous port
        self._over: dict[Port, dict[bytes, None]] = {}  # link ids of both tables by either port
        self._cleaning: list[bytes] = []  # link ids of `proved` that this round has not looked at yet

    def __contains__(self, identifier: bytes) -> bool:
        return identifier in self.proved or identifier in self.unproved

    def get(self, identifier: bytes) -> LinkEntry | None:
        """The entry of a link."""
        return self.proved.get(identifier) or self.unproved.get(identifier)

    def enter(self, port: Port, packet: Packet, raw: bytes, path: Path, now: float) -> bytes | Drop:
        """Take on the link that `raw`, a request from `port`, asks for. Returns what goes out on `path.port`.

        The first copy of a request counts, as at the responder: one that came by another way, with another MTU, or
        from somebody who recorded it, must not take the link away (trap T4).
        """
        identifier = link_id(raw)
        hops = packet.hops + port.hop
        entry = self.get(identifier)
        if entry is not None and (entry.validated or now <= entry.deadline):
            return Drop.LINK_REPEATED
        if hops >= MAX_HOPS:
            return Drop.TOO_MANY_HOPS
        data = clamp_request(packet.data, port, path.port)
        if isinstance(data, Drop):
            return data
        if entry is not None:
            self._forget(entry)
        if len(self.unproved) >= UNPROVED_LIMIT:
            most = max(self._asked.values(), key=len)
            self._forget(self.unproved[next(iter(most))])
        self.unproved[identifier] = LinkEntry(identifier, packet.destination, port, hops, path, now)
        for end in (port, path.port):
            self._over.setdefault(end, {})[identifier] = None
        self._asked.setdefault(port, {})[identifier] = None
        if path.hops > 1:
            head = bytes((packet.flags, hops)) + path.next_hop
        else:
            head = bytes((packet.flags & 0x0F, hops))
        return head + packet.destination + bytes((packet.context,)) + data

    def prove(
        self, port: Port, raw: bytes, identity: Identity | None, path: Path | None, now: float
    ) -> tuple[Port, bytes] | Drop:
        """Relay a link request proof, if it is right: (port to send on, packet).

        `identity` is the destination's, as announced: without it nothing is relayed. A right proof that took another
        number of hops than expected corrects the entry and `path`, once, before the entry is validated.
        """
        entry = self.get(raw[2:18])
        if entry is None:
            return Drop.NO_SUCH_LINK
        hops = raw[1] + port.hop
        if port is not entry.next_port or identity is None or hops >= MAX_HOPS:
            return Drop.NOT_FORWARDED
        if hops != entry.remaining and entry.validated:
            return Drop.LINK_HOPS
        proof = parse_link_proof(raw[19:])
        if isinstance(proof, Drop):
            return proof
        key = identity.verifying
        signed = link_proof_signed_data(entry.link_id, proof.x25519, key.public, proof.signalling)
        if not key.verify(proof.signature, signed):
            return Drop.LINK_SIGNATURE if hops == entry.remaining else Drop.LINK_HOPS
        if not entry.validated:
            if len(self.proved) >= PROVED_LIMIT and not self._make_room(entry.previous_port):
                return Drop.LINK_TABLE_FULL
            if hops != entry.remaining:
                entry.remaining = hops
                if path is not None and path.port is port:  # it may lead another way by now
                    path.hops = hops
            self._forget_request(entry)
            entry.validated = True
            entry.used_at = now
            self.proved[entry.link_id] = entry
            self._running[entry.previous_port] += 1
        return entry.previous_port, raw[:1] + bytes((hops,)) + raw[2:]

    def _make_room(self, port: Port) -> bool:
        """Have links of others that are idle give way to one that `port` asks for. False if it has most itself."""
        most, count = self._running.most_common(1)[0]
        if self._running[port] + 1 >= count:
            return False
        theirs = (entry for entry in self.proved.values() if entry.previous_port is most)
        for entry in nsmallest(EVICTED, theirs, key=lambda entry: entry.used_at):
            self._forget(entry)
        return True

    def _forget(self, entry: LinkEntry) -> None:
        """Out of the tables."""
        port = entry.previous_port
        if entry.link_id in self.unproved:
            self._forget_request(entry)
        elif self.proved.pop(entry.link_id, None) is not None:
            self._running[port] -= 1
            if not self._running[port]:
                del self._running[port]
        for end in (port, entry.next_port):
            over = self._over.get(end)
            if over is not None:
                over.pop(entry.link_id, None)
                if not over:
                    del self._over[end]

    def _forget_request(self, entry: LinkEntry) -> None:
        """It waits no more."""
        del self.unproved[entry.link_id]
        asked = self._asked[entry.previous_port]
        del asked[entry.link_id]
        if not asked:
            del self._asked[entry.previous_port]

    def clean(self, now: float) -> list[LinkEntry]:
        """Forget what is over. Returns the entries that never got their proof: their paths may be wrong.

        Of the running links a part is looked at each time, so that nobody waits for a look at all.
        """
        late = [entry for entry in self.unproved.values() if now > entry.deadline]
        for entry in late:
            self._forget(entry)
        if not self._cleaning:
            self._cleaning = list(self.proved)
        for identifier in self._cleaning[-CLEANED:]:
            running = self.proved.get(identifier)
            if running is not None and now > running.used_at + IDLE_LIFETIME:
                self._forget(running)
        del self._cleaning[-CLEANED:]
        return late

    def leave(self, port: Port) -> None:
        """`port` is gone, and every link over it."""
        for identifier in list(self._over.get(port, ())):
            entry = self.get(identifier)
            if entry is not None:
                self._forget(entry)
