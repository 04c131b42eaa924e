"""The engine: packets, the time and commands in; packets to send and events out.  DESIGN, section 5.

Driven by exactly four kinds of call, always under the node's lock: `receive`, `advance`, commands, and port changes.
Nothing here reads a clock or a random source: `now` is monotonic seconds, `unix_offset` what to add for unix time,
`entropy` the source of random bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from rnsfast.crypto.ed25519 import SigningKey
from rnsfast.crypto.entropy import Entropy, system_entropy
from rnsfast.crypto.identity import Identity
from rnsfast.crypto.x25519 import X25519Key
from rnsfast.engine.announcing import Announcing
from rnsfast.engine.channel import Channel
from rnsfast.engine.destination import Destination, Direction, ProofStrategy
from rnsfast.engine.disguise import Disguise
from rnsfast.engine.events import Listener, PacketArrived
from rnsfast.engine.filter import HashMemory
from rnsfast.engine.housekeeping import Housekeeping
from rnsfast.engine.inbound import Inbound, Item, TrafficClass, Unverified
from rnsfast.engine.known import KnownTable, Path, PathTable
from rnsfast.engine.link import Link
from rnsfast.engine.linkstate import INITIATOR_STALE_FLOOR, Cause, State, initiator_timeout, responder_timeout
from rnsfast.engine.membership import Membership
from rnsfast.engine.port import Local, Port
from rnsfast.engine.receipts import LIMIT as RECEIPT_LIMIT
from rnsfast.engine.receipts import Receipt, Status, packet_timeout
from rnsfast.engine.settling import Settlement
from rnsfast.engine.timers import Timers
from rnsfast.engine.transport.blackhole import Ban, Blackhole
from rnsfast.engine.transport.transport import Transport
from rnsfast.wire.announce import signed_data
from rnsfast.wire.drop import Drop
from rnsfast.wire.handshake import (
    ENABLED_MODES,
    MODE_AES256_CBC,
    LinkRequest,
    build_link_proof,
    build_link_request,
    encode_signalling,
    link_proof_signed_data,
    parse_link_proof,
    parse_link_request,
)
from rnsfast.wire.ifac import unmask
from rnsfast.wire.packet import (
    ANNOUNCE,
    CTX_CACHE_REQUEST,
    CTX_CHANNEL,
    CTX_KEEPALIVE,
    CTX_LRPROOF,
    CTX_NONE,
    CTX_RESOURCE,
    CTX_RESOURCE_PRF,
    CTX_RESOURCE_REQ,
    DATA,
    GROUP,
    HEADER_2,
    IFAC_FLAG,
    LINK,
    LINKREQUEST,
    MAX_HOPS,
    MTU,
    PLAIN,
    PROOF,
    SINGLE,
    TRANSPORT,
    Packet,
    link_id,
    make_raw,
    packet_hash,
    parse_packet,
)
from rnsfast.wire.pathrequest import PATH_REQUEST_DESTINATION
from rnsfast.wire.proof import parse_proof, proof_packet

HALF_OPEN_LIMIT: Final = 1024  # links of one interface waiting for their RTT packet
HALF_OPEN_PATIENCE: Final = 15.0  # seconds; then they give way to newer ones at the limit, else the newer are dropped
TRANSPORT_HEADER: Final = HEADER_2 | TRANSPORT

_UNFILTERED: Final = frozenset(
    (CTX_KEEPALIVE, CTX_RESOURCE, CTX_RESOURCE_REQ, CTX_RESOURCE_PRF, CTX_CACHE_REQUEST, CTX_CHANNEL)
)


class Engine:
    """Protocol state of one node. `listener` gets the events, `touched` collects what waiters may be waiting for."""

    def __init__(
        self,
        listener: Listener,
        now: float,
        *,
        unix_offset: float = 0.0,
        entropy: Entropy = system_entropy,
        transport_identity: Identity | None = None,
        link_mtu_discovery: bool = True,
        implicit_proofs: bool = True,
        transport: bool = False,
        shared_instance: bool = False,
        behind_instance: bool = False,
        local_hops_delta: int = 0,
        queue_lengths: Mapping[TrafficClass, int] | None = None,
    ) -> None:
        """`transport`: carry other people's packets. `shared_instance`: serve programs behind `Local.CLIENT` ports.

        `behind_instance`: be such a program; the only port is then a `Local.INSTANCE` one. `local_hops_delta`: hops
        with which our own packets leave.  Protocol 02, sections 11 and 12.
        """
        if behind_instance and (transport or shared_instance):
            raise ValueError("a program behind a shared instance neither carries packets nor serves others")
        self.listener = listener
        self.entropy = entropy
        self.unix_offset = unix_offset
        self.transport_identity = transport_identity or Identity(entropy=entropy)
        self.transport_id = self.transport_identity.hash
        self.link_mtu_discovery = link_mtu_discovery
        self.implicit_proofs = implicit_proofs
        self.initiator_stale_floor = INITIATOR_STALE_FLOOR
        self.ports: list[Port] = []
        self.dirty: set[Port] = set()  # ports with something to send; the runtime empties it with every flush
        self.touched: set[Any] = set()  # objects whose waiters may go on; the runtime empties it once a batch
        self.settlements: list[Settlement] = []  # signatures of the batch in hand
        self.timers = Timers()
        self.carries = transport
        self.local_hops_delta = local_hops_delta
        self.membership = Membership(self) if behind_instance else None
        self.seen = HashMemory()
        self.known = KnownTable()
        self.paths = PathTable()
        self.announcing = Announcing(self)
        self.inbound = Inbound(queue_lengths)  # announces and path requests that wait for their turn; see `verify`
        self.blackhole = Blackhole()
        self.stored_paths: dict[bytes, list[tuple[bytes, Path]]] = {}  # by interface hash: until that is there
        self.transport = Transport(self, carries=transport) if transport or shared_instance else None
        self.destinations: dict[tuple[bytes, int], Destination] = {}  # by hash and kind
        self.links: dict[bytes, Link] = {}  # by link id, pending ones too
        self.receipts: dict[bytes, Receipt] = {}  # off links, by truncated packet hash; at most receipts.LIMIT
        self.drops: Counter[Drop] = Counter()  # of packets without a port, or whose port is gone
        self._half_open: dict[Port, dict[Link, None]] = {}  # oldest first; at most HALF_OPEN_LIMIT a port
        self._nowhere = Port("no interface")
        self._housekeeping = Housekeeping(self, now)

    # ------------------------------------------------------------------ time

    def run_timers(self, now: float) -> float:
        """Do everything that is due. Returns when to call again."""
        return self.timers.advance(now)

    # ------------------------------------------------------------------ ports

    def attach(self, port: Port, now: float = 0.0) -> None:
        """A new interface."""
        if port not in self.ports:
            self.ports.append(port)
            port.joined(self.dirty)
            if self.local_hops_delta and port.local is Local.NO:
                port.disguise = Disguise(self.local_hops_delta, self.transport_id)
            if self.transport is not None:
                self.transport.attach(port, now)
            if self.stored_paths:
                self._take_stored(port)

    def _take_stored(self, port: Port) -> None:
        """The paths that were stored for an interface, now that it is there. Not those to the banned (trap T14)."""
        for destination, path in self.stored_paths.pop(port.hash, ()):
            if destination not in self.paths.paths and not (
                self.blackhole.bans and self._housekeeping.is_banned(destination)
            ):
                path.port = port
                self.paths.put(destination, path)

    def detach(self, port: Port, now: float) -> None:
        """An interface is gone for good: so are its links, and the paths over it."""
        if port in self.ports:
            self.ports.remove(port)
        port.online = False
        port.gone = True
        self._lost(port, now)
        self._half_open.pop(port, None)
        self._housekeeping.port_gone(now)
        self.inbound.leave(port)
        if self.transport is not None:
            self.transport.detach(port)
        self.dirty.discard(port)
        self.drops.update(port.drops)

    def changed(self, port: Port, now: float) -> None:
        """`online` or `congested` of a port has another value."""
        if not port.online:
            port.take()
            self._lost(port, now)
            if self.transport is not None:
                self.transport.lost(port)
            if self.membership is not None:
                self.membership.lost(port)
            return
        if self.membership is not None:
            self.membership.joined(now)
        if port.wants_tunnel:
            port.wants_tunnel = False
            self.announcing.send_tunnel(port)
        if not port.congested:
            for link in self._links_of(port):
                if link.channel is not None:
                    link.channel.pump(now)
                    self.touched.add(link.channel)

    def _links_of(self, port: Port) -> list[Link]:
        return [link for link in self.links.values() if link.port is port and link.state is not State.PENDING]

    def _lost(self, port: Port, now: float) -> None:
        """Links over `port` end; so do those whose request went out on it, as no answer can come."""
        for link in [link for link in self.links.values() if link.port is port]:
            link.apply(Cause.PORT_LOST, now)

    # ------------------------------------------------------------------ destinations

    def register(self, destination: Destination, now: float = 0.0) -> None:
        """Receive for an IN destination. ValueError if it is an OUT one or its address is taken."""
        if destination.direction is not Direction.IN:
            raise ValueError(f"{destination!r} is an OUT destination: only IN destinations receive")
        key = (destination.hash, destination.kind)
        if key in self.destinations:
            raise ValueError(f"{destination!r} is registered already")
        self.destinations[key] = destination
        if self.membership is not None:
            self.membership.introduce(destination, now)

    def deregister(self, destination: Destination, now: float) -> None:
        """Receive no more for it. Links that peers have not completed end: nobody would be told of them."""
        self.destinations.pop((destination.hash, destination.kind), None)
        for half_open in list(self._half_open.values()):
            for link in [link for link in half_open if link.destination is destination]:
                link.close(now, "its destination was closed")

    def recall(self, destination: bytes, unix_time: float) -> Identity | None:
        """The public half of the identity behind an address, if an announce told it or it is our own."""
        known = self.known.use(destination, unix_time)
        if known is not None:
            return Identity.from_public(known.public_key)
        own = self.destinations.get((destination, SINGLE))
        return None if own is None else own.identity

    # ------------------------------------------------------------------ receiving

    def receive(self, port: Port, packets: list[bytes], now: float) -> None:
        """Take one batch of raw packets from `port`. Order within a link is kept; a link may overtake another."""
        packets = self.relay(port, packets, now)
        if packets:
            self.intake(port, packets, now)
            self.settle_now(now)
        while self.inbound:
            items = self.inbound.take()
            self.verified(items, self.verify(items), now)

    @staticmethod
    def verify(items: list[Item]) -> list[bool]:
        """Which announces have a valid signature. Needs no lock; `inbound.take()` before and `verified` after do."""
        return [
            not isinstance(item, Unverified)
            or item.identity.verify(item.announce.signature, signed_data(item.announce))
            for item in items
        ]

    def verified(self, items: list[Item], verdicts: list[bool], now: float) -> None:
        """Make of announces and path requests what there is to be made of them."""
        for item, valid in zip(items, verdicts, strict=True):
            if not isinstance(item, Unverified):
                if self.transport is not None and not item.port.gone:
                    self.transport.path_asked(item, now)
            elif valid:
                self.announcing.valid(item, now)
            else:
                item.port.drops[Drop.ANNOUNCE_SIGNATURE] += 1

    def settle_now(self, now: float) -> None:
        """Compute and apply the signatures noted so far."""
        while self.settlements:
            settlements = self.take_settlements()
            for settlement in settlements:
                settlement.compute()
            self.settle(settlements, now)

    def take_settlements(self) -> list[Settlement]:
        """What is to be computed now; whatever comes from here on belongs to the next batch."""
        settlements, self.settlements = self.settlements, []
        for settlement in settlements:
            settlement.link.begin_settling()
        return settlements

    def settle(self, settlements: list[Settlement], now: float) -> None:
        """Apply the signatures that have been computed since `intake`."""
        for settlement in settlements:
            settlement.link.settle(settlement, now)

    def intake(self, port: Port, packets: list[bytes], now: float) -> None:
        """Take what `relay` left: open, deliver, and note in `settlements` what is to be signed and verified for it."""
        links, drops = self.links, port.drops
        groups: dict[Link, list[bytes]] = {}
        for raw in packets:
            if (
                len(raw) > 19
                and raw[0] & 0xCC == 0x0C
                and raw[1] < MAX_HOPS
                and (link := links.get(raw[2:18])) is not None
            ):
                if link.state is State.PENDING:
                    self._receive_link_proof(port, link, raw, now)
                elif link.port is not port:
                    drops[Drop.LINK_OTHER_PORT] += 1
                elif link in groups:
                    groups[link].append(raw)
                else:
                    groups[link] = [raw]
            else:
                self._receive_one(port, raw, now)
        for link, group in groups.items():  # one opening, one delivery and one wake-up a link, however many packets
            link.receive(group, now)

    def relay(self, port: Port, packets: list[bytes], now: float) -> list[bytes]:
        """Let one batch in: access codes, sizes, counters. A transport node sends on what is for others.

        Returns what is for this node, for `intake`.
        """
        if port.ifac is not None:
            packets = self._unmask(port, packets)
        if not packets:
            return packets
        sizes = list(map(len, packets))
        port.rx_packets += len(packets)
        port.rx_bytes += sum(sizes)
        limit = port.hw_mtu + port.ifac_size
        if max(sizes) > limit:
            fitting = [raw for raw in packets if len(raw) <= limit]
            port.drops[Drop.PACKET_TOO_LONG] += len(packets) - len(fitting)
            packets = fitting
        return packets if self.transport is None else self.transport.relay.forward(port, packets, now)

    def _unmask(self, port: Port, packets: list[bytes]) -> list[bytes]:
        key, drops = port.ifac, port.drops
        assert key is not None
        plain: list[bytes] = []
        for frame in packets:
            raw = unmask(frame, key)
            if isinstance(raw, Drop):
                drops[raw] += 1
            else:
                plain.append(raw)
        return plain

    def _receive_link_proof(self, port: Port, link: Link, raw: bytes, now: float) -> None:
        if raw[0] & 3 != PROOF or raw[18] != CTX_LRPROOF:
            port.drops[Drop.LINK_UNEXPECTED] += 1
            return
        proof = parse_link_proof(raw[19:])
        problem = proof if isinstance(proof, Drop) else link.receive_proof(port, proof, raw[1] + port.hop, now)
        if problem is not None:
            port.drops[problem] += 1
        elif (path := self.paths.paths.get(link.destination.hash)) is not None and path.port is port:
            path.hops = link.hops

    def _receive_one(self, port: Port, raw: bytes, now: float) -> None:
        """A packet that is not on a link of ours: filter, then by its type.  Protocol 02, section 3."""
        packet = parse_packet(raw)
        drops = port.drops
        if isinstance(packet, Drop):
            drops[packet] += 1
            return
        if packet.flags & IFAC_FLAG:
            drops[Drop.IFAC_UNEXPECTED] += 1
            return
        kind, packet_type = packet.flags >> 2 & 3, packet.flags & 3
        foreign = packet.transport_id not in (None, self.transport_id) and packet_type != ANNOUNCE
        if foreign and self.membership is None:
            drops[Drop.FOREIGN_TRANSPORT] += 1
            return
        digest = packet_hash(raw)
        problem = self._filter(packet, kind, packet_type, digest)
        if problem is not None:
            drops[problem] += 1
        elif packet_type == ANNOUNCE:
            self.announcing.receive(port, packet, raw, digest, now)
        elif packet.destination == PATH_REQUEST_DESTINATION and packet_type == DATA:
            self.announcing.receive_path_request(port, packet, now)
        elif self.transport is not None and self.transport.handles(port, packet, raw, now):
            pass
        elif packet_type == LINKREQUEST:
            self._receive_link_request(port, packet, raw, kind, now)
        elif packet_type == PROOF:
            self._receive_packet_proof(port, packet, now)
        elif kind == LINK:
            self.seen.forget(digest)  # it may still become ours
            drops[Drop.NO_SUCH_LINK] += 1
        else:
            self._receive_packet(port, packet, kind, digest, now)

    def _filter(self, packet: Packet, kind: int, packet_type: int, digest: bytes) -> Drop | None:
        """Why a packet is dropped before anything looks at it.  Protocol 02, section 3.3.

        Behind a shared instance nothing is: what comes has been filtered there, and may be from ourselves.
        """
        if packet.context in _UNFILTERED or self.membership is not None:
            return None
        if kind in (PLAIN, GROUP):
            if packet_type == ANNOUNCE:
                return Drop.BROADCAST_ANNOUNCE
            return Drop.BROADCAST_TOO_FAR if packet.hops > 1 else None
        if packet.context == CTX_LRPROOF and packet_type == PROOF:
            return None
        if self.seen.add(digest) or (packet_type == ANNOUNCE and kind == SINGLE):
            return None
        return Drop.FILTERED

    def _receive_packet(self, port: Port, packet: Packet, kind: int, digest: bytes, now: float) -> None:
        """Data for a destination of ours: open it, hand it up, prove it by the destination's strategy."""
        destination = self.destinations.get((packet.destination, kind))
        if destination is None:
            port.drops[Drop.NO_SUCH_DESTINATION] += 1
            return
        opened = destination.open(packet.data, now)
        if opened is None:
            port.drops[Drop.DECRYPTION] += 1
            return
        plain, ratchet = opened
        self.listener.packet_arrived(PacketArrived(destination, plain, digest, ratchet, port))
        if destination.proofs is ProofStrategy.ALL:
            self.prove(destination, digest, port)

    def prove(self, destination: Destination, digest: bytes, port: Port) -> None:
        """Prove a packet that came to `destination` over `port`. PLAIN packets are never proved."""
        if destination.kind == PLAIN or destination.identity is None or not destination.identity.has_private:
            return
        signature = destination.identity.sign(digest)
        port.send(proof_packet(digest, signature, explicit=not self.implicit_proofs))

    def _receive_packet_proof(self, port: Port, packet: Packet, now: float) -> None:
        """A proof off links: its address says which receipt, one verification says whether.  Protocol 01, 8.2."""
        proof = parse_proof(packet.data)
        if isinstance(proof, Drop):
            port.drops[proof] += 1
            return
        receipt = self.receipts.get(packet.destination)
        if receipt is None or proof.packet_hash not in (None, receipt.packet_hash):
            receipt = None if proof.packet_hash is None else self.receipts.get(proof.packet_hash[:16])
        if receipt is None or (proof.packet_hash is not None and proof.packet_hash != receipt.packet_hash):
            port.drops[Drop.PROOF_UNEXPECTED] += 1
        elif receipt.key is None or not receipt.key.verify(proof.signature, receipt.packet_hash):
            port.drops[Drop.PROOF_SIGNATURE] += 1
        else:
            receipt.conclude(Status.DELIVERED, now)

    # ------------------------------------------------------------------ links

    def _receive_link_request(self, port: Port, packet: Packet, raw: bytes, kind: int, now: float) -> None:
        """Somebody wants a link: any failure means silence.  Protocol 03, section 3."""
        destination = self.destinations.get((packet.destination, kind))
        if destination is None or kind != SINGLE:
            port.drops[Drop.NO_SUCH_DESTINATION] += 1
            return
        problem = self._answer_link_request(port, packet, raw, destination, now)
        if problem is not None:
            port.drops[problem] += 1

    def _answer_link_request(
        self, port: Port, packet: Packet, raw: bytes, destination: Destination, now: float
    ) -> Drop | None:
        request = parse_link_request(packet.data)
        if isinstance(request, Drop):
            return request
        if not destination.accepts_links or destination.identity is None or not destination.identity.has_private:
            return Drop.LINK_REFUSED
        if request.mode not in ENABLED_MODES:
            return Drop.LINK_MODE
        identifier = link_id(raw)
        if identifier in self.links:
            return Drop.LINK_REPEATED
        half_open = self._half_open.setdefault(port, {})
        if len(half_open) >= HALF_OPEN_LIMIT:
            oldest = next(iter(half_open))
            if now - oldest.requested_at < HALF_OPEN_PATIENCE:
                return Drop.LINK_HALF_OPEN_LIMIT
            oldest.apply(Cause.ESTABLISHMENT_TIMEOUT, now)
        exchange, signing = X25519Key(self.entropy(32)), destination.identity.signing
        hops = packet.hops + port.hop
        link = Link(
            self, identifier, destination, port, initiator=False, exchange=exchange, signing=signing,
            mode=request.mode, timeout=responder_timeout(hops), now=now,
        )  # fmt: skip
        if not link.answer(request.x25519, request.ed25519, now):
            return Drop.LINK_KEYS
        link.hops = hops
        link.set_mtu(min(request.mtu or MTU, port.offered_mtu))
        signalling = encode_signalling(link.mtu, link.mode)
        signature = signing.sign(link_proof_signed_data(identifier, exchange.public, signing.public, signalling))
        self.links[identifier] = link  # before the proof leaves: what answers it must find the link
        half_open[link] = None
        self.timers.arm(link, now + link.establishment_timeout)
        port.send(
            make_raw(
                LINK << 2 | PROOF, identifier, CTX_LRPROOF, build_link_proof(signature, exchange.public, signalling)
            )
        )
        return None

    def open_link(self, destination: Destination, now: float) -> Link:
        """Ask for a link; the request is sent once. Find a path first: without one the request reaches neighbours only.

        TypeError unless `destination` is an OUT SINGLE one.
        """
        if destination.kind != SINGLE or destination.direction is not Direction.OUT:
            raise TypeError(f"{destination!r}: links lead to OUT SINGLE destinations")
        exchange, signing = X25519Key(self.entropy(32)), SigningKey(self.entropy(32))
        path = self.paths.usable(destination.hash)
        mtu = path.port.offered_mtu if path is not None and self.link_mtu_discovery else MTU
        request = LinkRequest(exchange.public, signing.public, mtu, MODE_AES256_CBC)
        raw = make_raw(LINKREQUEST, destination.hash, CTX_NONE, build_link_request(request))
        identifier = link_id(raw)
        hops, bitrate = (None, None) if path is None else (path.hops, path.port.bitrate)
        link = Link(
            self, identifier, destination, self._nowhere if path is None else path.port, initiator=True,
            exchange=exchange, signing=signing, mode=MODE_AES256_CBC, timeout=initiator_timeout(hops, bitrate), now=now,
        )  # fmt: skip
        self.links[identifier] = link  # before the request leaves
        self.timers.arm(link, now + link.establishment_timeout)
        self._route(raw, destination.hash, now)
        return link

    # ------------------------------------------------------------------ sending

    def send_packet(
        self, destination: Destination, plain: bytes, now: float, *, receipt: bool = True
    ) -> Receipt | None:
        """Send one packet off links. Returns its receipt, None for a PLAIN destination or without one.

        ValueError if nothing can be sent to such a destination; ConnectionError if no interface took it.
        Size is the caller's: PLAIN 464, GROUP 415, SINGLE 383 bytes (protocol 01, 4.3).
        """
        ratchet = self.known.ratchets.get(destination.hash, (None, 0.0))[0] if destination.kind == SINGLE else None
        raw = make_raw(
            destination.kind << 2 | DATA, destination.hash, CTX_NONE, destination.seal(plain, ratchet, self.entropy)
        )
        waiting: Receipt | None = None
        if receipt and destination.kind != PLAIN:
            waiting = self._wait_for_proof(destination, packet_hash(raw), now)
        if not self._route(raw, destination.hash, now):
            if waiting is not None:
                waiting.conclude(Status.FAILED, now)
            raise ConnectionError(f"no interface is up to send to {destination!r}")
        return waiting

    def _wait_for_proof(self, destination: Destination, digest: bytes, now: float) -> Receipt:
        """Make the receipt before the packet leaves: a proof may be fast."""
        if len(self.receipts) >= RECEIPT_LIMIT:
            oldest = next(iter(self.receipts))
            self.receipts.pop(oldest).conclude(Status.CULLED, now)
        path = self.paths.usable(destination.hash)
        hops, bitrate = (None, None) if path is None else (path.hops, path.port.bitrate)
        key = None if destination.identity is None else destination.identity.verifying
        waiting = Receipt(self, (self.receipts,), digest, key, now, packet_timeout(hops, bitrate))
        self.receipts[digest[:16]] = waiting
        self.timers.arm(waiting, now + waiting.timeout)
        return waiting

    def _route(self, raw: bytes, destination: bytes, now: float) -> bool:
        """Along the path if there is one, else everywhere.  Protocol 02, sections 4.1 and 4.2."""
        kind = raw[0] >> 2 & 3
        path = self.paths.usable(destination) if kind in (SINGLE, LINK) else None
        if path is None:
            return self.broadcast(raw)
        if path.hops > 1 or (path.hops and self.membership is not None):  # behind an instance nothing is next to us
            raw = bytes((TRANSPORT_HEADER | raw[0] & 0x0F, raw[1])) + path.next_hop + raw[2:]
            path.heard_at = now + self.unix_offset
        return path.port.send(raw)

    def broadcast(self, raw: bytes, except_for: Port | None = None) -> bool:
        """On every interface that is up and may transmit. Our own echo is filtered."""
        self.seen.add(packet_hash(raw))
        sent = False
        for port in self.ports:
            if port.online and port.outgoing and port is not except_for:
                sent = port.send(raw) or sent
        return sent

    def ban(self, identity: bytes, ban: Ban, now: float) -> None:
        """Take no more announces of an identity, and give up the paths to its destinations.  Protocol 02, 14.

        The paths go while time passes, all within some seconds: finding them takes a look at everything known.
        """
        self.ban_all({identity: ban}, now)

    def ban_all(self, bans: Mapping[bytes, Ban], now: float) -> None:
        """As `ban`, for many at once."""
        self.blackhole.bans.update(bans)
        if bans:
            self._housekeeping.identity_banned(now)

    # ------------------------------------------------------------------ what links and receipts report

    def link_established(self, link: Link) -> None:
        """A link became active."""
        if not link.initiator:
            self._half_open.get(link.port, {}).pop(link, None)
        self.listener.link_established(link)

    def link_closed(self, link: Link, now: float) -> None:
        """A link is closed. A path that led nowhere is given up and asked for again (protocol 03, 7.1)."""
        self.links.pop(link.link_id, None)
        if link.activated_at is None:
            if not link.initiator:
                self._half_open.get(link.port, {}).pop(link, None)
                return  # no application has seen it
            self.announcing.path_failed(link.destination.hash, now)
        self.listener.link_closed(link)

    def link_data(self, link: Link, packets: list[bytes], hashes: list[bytes]) -> None:
        """Packets on a link for the application; proved by the strategy of the link's destination."""
        self.listener.link_data(link, packets, hashes)
        if link.destination.proofs is ProofStrategy.ALL:
            link.prove(hashes)

    def peer_identified(self, link: Link) -> None:
        """The initiator has revealed itself."""
        self.listener.peer_identified(link)

    def messages_arrived(self, channel: Channel, messages: list[tuple[int, bytes]]) -> None:
        """Channel messages in order, (type, payload)."""
        self.listener.messages_arrived(channel, messages)

    def receipt_concluded(self, receipt: Receipt) -> None:
        """Delivered, failed or culled."""
        self.touched.add(receipt)
        self.listener.receipt_concluded(receipt)
