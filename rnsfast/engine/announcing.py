"""Announces, path requests and tunnels, as an endpoint has them.  Protocol 02, sections 2, 6, 7 and 9."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final

from rnsfast.crypto.identity import Identity
from rnsfast.engine.destination import Destination, Direction
from rnsfast.engine.events import AnnounceHeard
from rnsfast.engine.filter import HashMemory
from rnsfast.engine.inbound import TrafficClass, Unverified
from rnsfast.engine.known import BLOBS_KEPT, PATH_LIFETIME, PATH_LIFETIME_BY_MODE, Known, Path, takes
from rnsfast.engine.port import Local, Mode
from rnsfast.wire.announce import (
    APP_DATA_MAX,
    Announce,
    build_announce,
    emission_time,
    parse_announce,
    random_blob,
    signed_data,
)
from rnsfast.wire.drop import Drop
from rnsfast.wire.names import destination_hash
from rnsfast.wire.packet import (
    ANNOUNCE,
    CONTEXT_FLAG,
    CTX_NONE,
    CTX_PATH_RESPONSE,
    DATA,
    HEADER_1_SIZE,
    MTU,
    PLAIN,
    SINGLE,
    Packet,
    make_raw,
    packet_hash,
    parse_packet,
)
from rnsfast.wire.pathrequest import (
    PATH_REQUEST_DESTINATION,
    TAG_SIZE,
    PathRequest,
    build_path_request,
    parse_path_request,
)
from rnsfast.wire.tunnel import TUNNEL_DESTINATION, Synthesis, build_synthesis, synthesis_signed_data

if TYPE_CHECKING:
    from rnsfast.engine.engine import Engine
    from rnsfast.engine.port import Port

TAG_GENERATION: Final = 16_000  # request tags remembered, two generations of this many
VERIFIED_GENERATION: Final = 8_192  # announces, two generations of this many
REQUEST_MEMORY: Final = 45.0  # seconds a request is remembered
RESPONSE_REUSE: Final = 1.0  # seconds for which one announce answers all path requests for a destination
FUTURE: Final = 86_400.0  # seconds an emission time may be ahead of our clock
CLOCK_IS_SET: Final = 1_600_000_000.0  # unix time; a clock before it was never set, and proves nothing
EMISSION_LEAD: Final = 30  # seconds an emission time may run ahead of the clock to tell quick announces apart
RATCHET_APP_DATA_MAX: Final = APP_DATA_MAX - 32


def _is_second_word(path: Path, port: Port, blob: bytes) -> bool:
    """Whether an announce is what a program behind us says, having introduced itself in the same second (trap T2)."""
    from_there = port.local is Local.CLIENT and path.port is port
    return from_there and blob not in path.blobs and emission_time(blob) == path.newest


class Announcing:
    """The engine's part that learns and tells where destinations are."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tags = HashMemory(TAG_GENERATION)
        self._verified = HashMemory(VERIFIED_GENERATION)  # copies of an announce are verified once
        self._responses: dict[bytes, tuple[float, int, bytes]] = {}  # own destination to (now, emission time, packet)
        self._requested: dict[bytes, float] = {}  # destination to `now` of the last request; cleaned after 45 s

    # ------------------------------------------------------------------ own announces

    def announce(
        self,
        destination: Destination,
        app_data: bytes | None,
        now: float,
        *,
        port: Port | None = None,
        is_path_response: bool = False,
    ) -> bool:
        """Announce an IN SINGLE destination, on one port or all that take announces. False if nothing was sent.

        ValueError as by `build`.
        """
        raw = self.build(destination, app_data, now, is_path_response=is_path_response)
        if port is not None:
            return port.send(raw)
        sent = False
        for each in self._engine.ports:
            if each.online and each.outgoing and each.mode is not Mode.ACCESS_POINT:
                sent = each.send(raw) or sent
        return sent

    def build(
        self, destination: Destination, app_data: bytes | None, now: float, *, is_path_response: bool = False
    ) -> bytes:
        """The packet of a new announce.

        ValueError for another destination, or app data beyond 317 bytes (285 with ratchets), which no relay could
        pass on.  Protocol 02, section 2.2.
        """
        engine = self._engine
        if destination.direction is not Direction.IN or destination.kind != SINGLE or destination.identity is None:
            raise ValueError(f"{destination!r}: only IN SINGLE destinations are announced")
        data = destination.app_data if app_data is None else app_data
        limit = APP_DATA_MAX if destination.ratchets is None else RATCHET_APP_DATA_MAX
        if data is not None and len(data) > limit:
            raise ValueError(f"app data of {len(data)} bytes: an announce that relays can pass on carries {limit}")
        unix_time = now + engine.unix_offset
        ratchet: bytes | None = None
        if destination.ratchets is not None:
            if destination.ratchets.rotate(unix_time, engine.entropy):
                engine.listener.ratchets_rotated(destination)
            ratchet = destination.ratchets.public
            if ratchet is not None:
                self._learn_ratchet(destination.hash, ratchet, unix_time)
        # Peers ignore a second announce with the same whole second, so quick ones count on.
        emission = int(unix_time)
        if emission <= destination.last_emission <= emission + EMISSION_LEAD:
            emission = min(destination.last_emission + 1, emission + EMISSION_LEAD)
        destination.last_emission = emission
        announce = Announce(
            destination.hash,
            destination.identity.public_key,
            destination.name_hash,
            random_blob(engine.entropy(5), emission),
            ratchet,
            b"",
            data,
        )
        body = build_announce(announce, destination.identity.sign(signed_data(announce)))
        flags = ANNOUNCE | (CONTEXT_FLAG if ratchet is not None else 0)
        return make_raw(flags, destination.hash, CTX_PATH_RESPONSE if is_path_response else CTX_NONE, body)

    def _response(self, own: Destination, now: float) -> bytes:
        """What answers a path request for a destination of ours."""
        made_at, emission, raw = self._responses.get(own.hash, (-inf, 0, b""))
        if now - made_at >= RESPONSE_REUSE or emission != own.last_emission:
            raw = self.build(own, None, now, is_path_response=True)
            self._responses[own.hash] = now, own.last_emission, raw
        return raw

    # ------------------------------------------------------------------ announces of others

    def receive(
        self, port: Port, packet: Packet, raw: bytes, digest: bytes, now: float, *, released: bool = False
    ) -> None:
        """An announce from the network. Cheap checks come first; its signature is verified when nothing else waits."""
        if not released:
            port.announces.received(len(raw))
        if packet.flags >> 2 & 3 != SINGLE:
            port.drops[Drop.ANNOUNCE_TYPE] += 1
            return
        if len(raw) > MTU:
            port.drops[Drop.ANNOUNCE_TOO_LONG] += 1
            return
        announce = parse_announce(packet)
        if isinstance(announce, Drop):
            port.drops[announce] += 1
            return
        engine = self._engine
        identity = Identity.from_public(announce.public_key)
        known = engine.known.entries.get(announce.destination)
        if engine.blackhole.bans and engine.blackhole.is_banned(identity.hash, now + engine.unix_offset):
            port.drops[Drop.ANNOUNCE_BLACKHOLED] += 1
        elif destination_hash(announce.name_hash, identity.hash) != announce.destination:
            port.drops[Drop.ANNOUNCE_DESTINATION] += 1
        elif known is not None and known.public_key != announce.public_key:
            port.drops[Drop.ANNOUNCE_KEY_CHANGED] += 1
        else:
            item = Unverified(port, packet, announce, raw, digest, identity, released)
            if digest + raw[:1] in self._verified:
                self.valid(item, now)
            else:
                engine.inbound.put(TrafficClass.INGRESS_LIMITED if released else TrafficClass.ANNOUNCE, port, item)

    def _is_from_the_future(self, announce: Announce, unix_time: float) -> bool:
        """It would keep the destination's later announces out until its path expires (02, trap T4)."""
        ahead = emission_time(announce.random_blob) - unix_time
        return ahead > FUTURE and unix_time > CLOCK_IS_SET

    def valid(self, item: Unverified, now: float) -> None:
        """An announce with a valid signature: remember it, take the path if it is better.  Protocol 02, 2.3."""
        port, packet, announce, raw = item.port, item.packet, item.announce, item.raw
        engine, transport = self._engine, self._engine.transport
        if port not in engine.ports:
            return  # gone meanwhile
        self._verified.add(item.digest + raw[:1])
        if self._is_from_the_future(announce, now + engine.unix_offset):
            port.drops[Drop.ANNOUNCE_FUTURE] += 1
            return
        if transport is not None:
            if transport.announce_counted(port, announce, raw, now, released=item.released):
                port.drops[Drop.ANNOUNCE_HELD] += 1
                return
            if packet.transport_id is not None:
                transport.announce_heard(packet, now)
        unix_time = now + engine.unix_offset
        is_newest = self._remember(announce, item.digest, unix_time)
        if (announce.destination, SINGLE) in engine.destinations:
            return
        path = self._take_path(port, packet, announce, raw, item.digest, unix_time)
        if path is None:
            port.drops[Drop.ANNOUNCE_STALE] += 1
            known = engine.paths.usable(announce.destination)
            if packet.context == CTX_PATH_RESPONSE and known is not None:
                known.confirmed += 1
                engine.listener.path_confirmed(announce.destination)
            elif transport is not None and known is not None and known.is_answer:
                transport.announce_follows(port, packet, announce, raw, known, now)
            return
        event = AnnounceHeard(
            announce.destination,
            announce.name_hash,
            item.identity,
            announce.app_data,
            item.digest,
            packet.hops + port.hop,
            announce.ratchet if is_newest else None,
            packet.context == CTX_PATH_RESPONSE,
        )
        engine.listener.announce_heard(event)
        if transport is not None:
            transport.announce_taken(port, packet, raw, path, now)

    def release(self, port: Port, raw: bytes, now: float) -> None:
        """An announce that was held goes on its way."""
        packet = parse_packet(raw)
        if isinstance(packet, Packet):
            self.receive(port, packet, raw, packet_hash(raw), now, released=True)

    def _remember(self, announce: Announce, digest: bytes, unix_time: float) -> bool:
        """Known destination and ratchet, unless a newer announce was heard. An old one replayed changes nothing."""
        known = self._engine.known
        emitted = emission_time(announce.random_blob)
        before = known.entries.get(announce.destination)
        if before is not None and emitted < before.emitted:
            return False
        known.put(
            announce.destination, Known(unix_time, digest, announce.public_key, announce.app_data, emitted=emitted)
        )
        if announce.ratchet is not None:
            self._learn_ratchet(announce.destination, announce.ratchet, unix_time)
        return True

    def _learn_ratchet(self, destination: bytes, ratchet: bytes, unix_time: float) -> None:
        """A ratchet is replaced by another one only; hearing the same again does not make it younger."""
        ratchets = self._engine.known.ratchets
        before = ratchets.get(destination)
        if before is None or before[0] != ratchet:
            ratchets[destination] = (ratchet, unix_time)
            self._engine.listener.ratchet_learnt(destination, ratchet, unix_time)

    def _take_path(
        self, port: Port, packet: Packet, announce: Announce, raw: bytes, digest: bytes, unix_time: float
    ) -> Path | None:
        """The new path, None if the one there is stays."""
        paths = self._engine.paths
        destination = announce.destination
        before, hops = paths.paths.get(destination), packet.hops + port.hop
        if before is not None and not before.port.online:
            if self._may_be_echo(before, packet, hops, announce.random_blob, unix_time):
                return None
            before = None  # what leads over an interface that is down is worth nothing
        if not takes(before, hops, announce.random_blob, unix_time, port.gravity) and not (
            before is not None and before.is_answer and _is_second_word(before, port, announce.random_blob)
        ):
            return None
        blobs = [] if before is None else before.blobs
        if announce.random_blob not in blobs:
            blobs = [*blobs, announce.random_blob][-BLOBS_KEPT:]
        next_hop = packet.transport_id or destination
        expires = unix_time + PATH_LIFETIME_BY_MODE.get(port.mode, PATH_LIFETIME)
        path = Path(unix_time, next_hop, hops, expires, blobs, port, digest, announce=raw)
        paths.put(destination, path)
        self._requested.pop(destination, None)
        return path

    def _may_be_echo(self, before: Path, packet: Packet, hops: int, blob: bytes, unix_time: float) -> bool:
        """Whether a copy of an announce that we passed on may come from us: its sender is further away than we are.

        As a path it would lead to somebody who relies on us, and replace the one that is good again when its interface
        is. Whoever needs a path meanwhile asks for one, and then everything is taken that comes.
        """
        if self._engine.transport is None or packet.context == CTX_PATH_RESPONSE:
            return False
        farther = hops > before.hops + 1 and blob in before.blobs
        return farther and not self.is_requested(packet.destination, unix_time - self._engine.unix_offset)

    # ------------------------------------------------------------------ path requests

    def is_requested(self, destination: bytes, now: float) -> bool:
        """Whether we have asked for it and had no answer."""
        return self.was_requested(destination, now, REQUEST_MEMORY)

    def was_requested(self, destination: bytes, now: float, within: float) -> bool:
        """Whether we have asked for it in the last `within` seconds."""
        return now - self._requested.get(destination, -inf) < within

    def request_path(
        self, destination: bytes, now: float, *, on: Port | None = None, except_for: Port | None = None
    ) -> bool:
        """Ask everybody who can hear us for a path, or those on one interface. False if nothing was sent.  02, 7.1."""
        self._requested[destination] = now
        raw = self.path_request(destination)
        return self._engine.broadcast(raw, except_for) if on is None else on.send(raw)

    def path_request(self, destination: bytes) -> bytes:
        """The packet of a new question. Neighbours that pass it on send it back, which is then no question to us."""
        engine = self._engine
        tag = engine.entropy(TAG_SIZE)
        self._tags.add(destination + tag)
        transport_id = engine.transport_id if engine.carries else None
        data = build_path_request(PathRequest(destination, transport_id, tag))
        return make_raw(PLAIN << 2 | DATA, PATH_REQUEST_DESTINATION, CTX_NONE, data)

    def receive_path_request(self, port: Port, packet: Packet, now: float) -> None:
        """Somebody looks for a destination: if it is ours, announce it to where the question came from."""
        port.requests.received(HEADER_1_SIZE + len(packet.data))
        request = parse_path_request(packet.data)
        if isinstance(request, Drop):
            port.drops[request] += 1
            return
        tag = request.tag[:TAG_SIZE]
        if not self._tags.add(request.destination + tag):
            port.drops[Drop.PATH_REQUEST_REPEATED] += 1
            return
        own = self._engine.destinations.get((request.destination, SINGLE))
        if own is not None:
            port.send(self._response(own, now))
        elif self._engine.transport is not None:
            self._engine.transport.path_requested(port, request, tag, now)

    def path_failed(self, destination: bytes, now: float) -> None:
        """A link along the path came to nothing: give the path up, ask for another at once.

        Only a path that was there is asked for again, so there is one request for each that was learnt.
        """
        if self._engine.paths.drop(destination):
            self.request_path(destination, now)

    def forget_requests(self) -> None:
        """Whoever was asked is gone."""
        self._requested.clear()

    def clean(self, now: float) -> None:
        """Forget requests that are over."""
        self._requested = {d: at for d, at in self._requested.items() if now - at < REQUEST_MEMORY}

    # ------------------------------------------------------------------ tunnels

    def send_tunnel(self, port: Port) -> None:
        """Tell the other end of a connection who we are, so that paths over it survive a reconnect.  02, section 9."""
        identity, random = self._engine.transport_identity, self._engine.entropy(16)
        signature = identity.sign(synthesis_signed_data(identity.public_key, port.hash, random))
        data = build_synthesis(Synthesis(identity.public_key, port.hash, random, signature))
        port.send(make_raw(PLAIN << 2 | DATA, TUNNEL_DESTINATION, CTX_NONE, data))
