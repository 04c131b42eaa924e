"""Transport nodes and shared instances under mutated traffic: nothing raises, nothing grows without bound, nothing
forbidden goes out.

What is fed in is valid traffic of a small network that the test plays by itself (announces, path requests, link
requests and proofs, link data, packets in transport, proofs, tunnels), with some of it cut, flipped, repeated,
reordered or sent from elsewhere. What comes out is checked against the rules, told here a second time and plainly.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from rnsfast.crypto.identity import Identity
from rnsfast.engine.engine import Engine
from rnsfast.engine.known import PATH_LIMIT, Path, PathTable
from rnsfast.engine.linktable import PROVED_LIMIT, UNPROVED_LIMIT
from rnsfast.engine.port import Local, Mode, Policy, Port
from rnsfast.engine.transport import outlets, rates, rebroadcast, search, tunnels
from rnsfast.engine.transport.relay import REVERSE_GENERATION
from rnsfast.wire.announce import Announce, build_announce, random_blob, signed_data
from rnsfast.wire.handshake import (
    MODE_AES256_CBC,
    LinkRequest,
    build_link_proof,
    build_link_request,
    encode_signalling,
    link_proof_signed_data,
)
from rnsfast.wire.names import destination_hash, name_hash
from rnsfast.wire.packet import (
    ANNOUNCE,
    CTX_CHANNEL,
    CTX_KEEPALIVE,
    CTX_LRPROOF,
    CTX_NONE,
    CTX_PATH_RESPONSE,
    DATA,
    HEADER_2,
    LINK,
    LINKREQUEST,
    MTU,
    PLAIN,
    PROOF,
    SINGLE,
    TRANSPORT,
    link_id,
    make_raw,
    packet_hash,
)
from rnsfast.wire.pathrequest import PATH_REQUEST_DESTINATION, PathRequest, build_path_request
from rnsfast.wire.tunnel import TUNNEL_DESTINATION, Synthesis, build_synthesis, synthesis_signed_data
from tests.virtualnet import Recorder

UNIX = 1_750_000_000.0
MODES = (Mode.FULL, Mode.GATEWAY, Mode.ROAMING, Mode.BOUNDARY)


class Traffic:
    """Valid packets, as neighbours of a transport node send them."""

    def __init__(self, seed: int, own_id: bytes) -> None:
        self.random = random.Random(seed)
        self.own = own_id
        self.owners = [Identity(entropy=self.random.randbytes) for _ in range(12)]
        self.names = [name_hash("fuzz", str(n)) for n in range(3)]
        self.links: list[bytes] = []
        self.requests: deque[tuple[bytes, Identity, bytes]] = deque(maxlen=20)  # link id, owner, signalling
        self.sent: deque[bytes] = deque(maxlen=40)  # packets in transport, whose proofs may come
        self.now = 0.0

    def destination(self) -> tuple[Identity, bytes, bytes]:
        owner, name = self.random.choice(self.owners), self.random.choice(self.names)
        return owner, name, destination_hash(name, owner.hash)

    def announce(self) -> bytes:
        owner, name, destination = self.destination()
        emitted = int(UNIX + self.now) + self.random.randint(-5, 5)
        data = self.random.choice((None, b"app", bytes(300)))
        blob = random_blob(self.random.randbytes(5), emitted)
        made = Announce(destination, owner.public_key, name, blob, None, b"", data)
        body = build_announce(made, owner.sign(signed_data(made)))
        context = self.random.choice((CTX_NONE, CTX_NONE, CTX_PATH_RESPONSE))
        raw = make_raw(ANNOUNCE, destination, context, body, hops=self.random.choice((0, 1, 2, 126, 127)))
        return self.in_transport(raw, self.random.randbytes(16)) if self.random.random() < 0.4 else raw

    def in_transport(self, raw: bytes, via: bytes | None = None) -> bytes:
        return bytes((HEADER_2 | TRANSPORT | raw[0] & 0x2F, raw[1])) + (via or self.own) + raw[2:]

    def packet(self) -> bytes:
        raw = make_raw(SINGLE << 2 | DATA, self.destination()[2], CTX_NONE, self.random.randbytes(80))
        self.sent.append(packet_hash(raw))
        return self.sometimes_in_transport(raw)

    def sometimes_in_transport(self, raw: bytes) -> bytes:
        """Straight to its destination it goes on only to programs behind a shared instance."""
        return raw if self.random.random() < 0.3 else self.in_transport(raw)

    def proof(self) -> bytes:
        target = self.random.choice(self.sent) if self.sent else self.random.randbytes(32)
        return make_raw(PROOF, target[:16], CTX_NONE, self.random.randbytes(64))

    def request(self) -> bytes:
        owner, _, destination = self.destination()
        keys = self.random.randbytes(32), self.random.randbytes(32)
        mtu = self.random.choice((None, 500, 16384))
        raw = make_raw(LINKREQUEST, destination, CTX_NONE, build_link_request(LinkRequest(*keys, mtu, MODE_AES256_CBC)))
        signalling = b"" if mtu is None else encode_signalling(mtu, MODE_AES256_CBC)
        self.requests.append((link_id(raw), owner, signalling))
        return self.sometimes_in_transport(raw)

    def link_proof(self) -> bytes:
        if not self.requests:
            return self.request()
        identifier, owner, signalling = self.random.choice(self.requests)
        key = self.random.randbytes(32)
        signature = owner.sign(link_proof_signed_data(identifier, key, owner.signing.public, signalling))
        self.links.append(identifier)
        body = build_link_proof(signature, key, signalling)
        return make_raw(LINK << 2 | PROOF, identifier, CTX_LRPROOF, body, hops=self.random.randint(0, 2))

    def link_data(self) -> bytes:
        identifier = self.random.choice(self.links[-20:]) if self.links else self.random.randbytes(16)
        context = self.random.choice((CTX_NONE, CTX_CHANNEL, CTX_KEEPALIVE))
        kind = self.random.choice((DATA, PROOF))
        return make_raw(
            LINK << 2 | kind, identifier, context, self.random.randbytes(64), hops=self.random.randint(0, 2)
        )

    def path_request(self) -> bytes:
        destination = self.random.choice((self.destination()[2], self.random.randbytes(16)))
        via = self.random.choice((None, self.random.randbytes(16)))
        data = build_path_request(PathRequest(destination, via, self.random.randbytes(16)))
        return make_raw(PLAIN << 2 | DATA, PATH_REQUEST_DESTINATION, CTX_NONE, data)

    def plain(self) -> bytes:
        return make_raw(
            PLAIN << 2 | DATA, self.random.randbytes(16), CTX_NONE, b"hello", hops=self.random.randint(0, 2)
        )

    def tunnel(self) -> bytes:
        owner, random_bytes, port = self.random.choice(self.owners), self.random.randbytes(16), bytes(32)
        signature = owner.sign(synthesis_signed_data(owner.public_key, port, random_bytes))
        data = build_synthesis(Synthesis(owner.public_key, port, random_bytes, signature))
        return make_raw(PLAIN << 2 | DATA, TUNNEL_DESTINATION, CTX_NONE, data)

    def next(self) -> bytes:
        makers = (
            self.announce, self.packet, self.packet, self.proof, self.request, self.link_proof, self.link_data,
            self.link_data, self.path_request, self.plain, self.tunnel,
        )  # fmt: skip
        raw = self.random.choice(makers)()
        return self.mutated(raw) if self.random.random() < 0.35 else raw

    def mutated(self, raw: bytes) -> bytes:
        way = self.random.randrange(6)
        at = self.random.randrange(len(raw))
        if way == 0:
            return raw[:at]
        if way == 1:
            return raw[:at] + bytes((raw[at] ^ 1 << self.random.randrange(8),)) + raw[at + 1 :]
        if way == 2:
            return bytes((self.random.randrange(256),)) + raw[1:]
        if way == 3:
            return raw[:1] + bytes((self.random.randrange(256),)) + raw[2:]
        if way == 4:
            return raw + self.random.randbytes(self.random.randrange(1, 1200))
        return self.random.randbytes(self.random.randrange(0, 600))


def body_of(raw: bytes) -> bytes:
    """From the destination on."""
    return raw[18:] if raw[0] & HEADER_2 else raw[2:]


Fed = dict[bytes, set[tuple[int, bool]]]  # what came in: hops as counted, whether from a program behind us
Ways = dict[bytes, set[tuple[Port, bytes]]]  # destination to every (interface, next hop) its path ever had


class NotedPaths(PathTable):
    """Remembers every path that was ever entered."""

    def __init__(self) -> None:
        super().__init__()
        self.ways: Ways = {}

    def put(self, destination: bytes, path: Path) -> None:
        self.ways.setdefault(destination, set()).add((path.port, path.next_hop))
        super().put(destination, path)


def check_sent(engine: Engine, port: Port, raw: bytes, fed: Fed, ways: Ways) -> None:
    """The rules for what a node without local destinations may send."""
    assert 20 <= len(raw) <= port.hw_mtu, raw.hex()
    assert raw[1] < 128
    kind, target, to_client = raw[0] & 3, raw[0] >> 2 & 3, port.local is Local.CLIENT
    hops = {raw[1]}  # that it may have had when it came, counted
    if engine.local_hops_delta and not to_client:
        assert raw[1] or target == PLAIN, "it should seem to come from further away"
        if raw[1] == engine.local_hops_delta:
            hops.add(0)
    if kind == ANNOUNCE:
        assert len(raw) <= MTU and raw[0] & 0xDF == 0x51 and raw[2:18] == engine.transport_id and target == SINGLE
        assert raw[34] in (CTX_NONE, CTX_PATH_RESPONSE)
        assert engine.carries or to_client or from_client(fed, lambda known, _: known[17:] == raw[35:])
        return
    if target == PLAIN:
        assert raw[0] & 0xDF == 0x08, raw.hex()
        if raw[2:18] == PATH_REQUEST_DESTINATION:
            size = 67 if engine.carries else 51
            assert raw[1] == 0 and len(raw) <= size and len(raw) > size - 16, raw.hex()
            assert not engine.carries or raw[35:51] == engine.transport_id
        else:
            assert raw[2:18] != TUNNEL_DESTINATION and (
                to_client or from_client(fed, lambda known, _: known == raw[2:])
            )
        return
    assert target in (SINGLE, LINK), raw.hex()
    body = body_of(raw)
    # What signals the MTU may change on the way.
    size = 81 if kind == LINKREQUEST else max(len(body), 1)
    came = {way for known, found in fed.items() if known[:size] == body[:size] for way in found}
    assert hops & {counted for counted, _ in came}, f"{raw.hex()} was not received with {hops} hops"
    if not engine.carries and not to_client:
        assert any(client for counted, client in came if counted in hops), f"{raw.hex()} was for others to carry"
    if raw[0] & HEADER_2:
        assert (port, raw[2:18]) in ways[raw[18:34]] or (to_client and raw[2:18] == engine.transport_id)


def from_client(fed: Fed, matches: Callable[[bytes, int], bool]) -> bool:
    """Whether something like that came from a program behind us."""
    return any(client and matches(known, counted) for known, found in fed.items() for counted, client in found)


def check_bounds(engine: Engine) -> None:
    transport = engine.transport
    assert transport is not None
    assert len(engine.paths.paths) <= PATH_LIMIT
    assert len(transport.links.unproved) <= UNPROVED_LIMIT and len(transport.links.proved) <= PROVED_LIMIT
    assert len(transport.relay.reverse) <= 2 * REVERSE_GENERATION
    assert len(transport.announces.entries) <= rebroadcast.LIMIT
    assert len(transport.announces._heap) <= 4 * len(transport.announces.entries) + 4096
    assert len(transport.searches.in_flight) <= search.IN_FLIGHT_LIMIT
    assert len(transport.searches.waiting) <= search.WAITING_LIMIT
    assert len(transport.searches.awaited) <= len(engine.paths.paths) + 200
    assert len(transport.rates.entries) <= rates.LIMIT and len(transport.tunnels.tunnels) <= tunnels.LIMIT
    for port in engine.ports:
        assert len(transport.outlets[port].queue) <= outlets.QUEUE_LIMIT
        assert len(transport.intakes[port].held) <= port.policy.ic_max_held_announces


ROLES: dict[str, dict[str, Any]] = {
    "transport": {"transport": True},
    "instance": {"transport": True, "shared_instance": True},
    "plain instance": {"shared_instance": True},
    "plain instance in disguise": {"shared_instance": True, "local_hops_delta": 5},
    "instance in disguise": {"transport": True, "shared_instance": True, "local_hops_delta": 2},
}


def fuzz(seed: int, rounds: int, role: str) -> int:
    """How many packets went out."""
    dice = random.Random(seed)
    engine = Engine(
        Recorder(),  # type: ignore[arg-type]
        0.0,
        unix_offset=UNIX,
        entropy=random.Random(seed + 1).randbytes,
        transport_identity=Identity(entropy=random.Random(seed + 2).randbytes),
        **ROLES[role],
    )
    traffic = Traffic(seed, engine.transport_id)
    ports = [
        Port(f"port {n}", mode=mode, hw_mtu=1064, policy=Policy(announce_rate_target=3600 if n else None))
        for n, mode in enumerate(MODES)
    ]
    if "instance" in role:
        ports += [Port(f"program {n}", hw_mtu=262_144, local=Local.CLIENT) for n in range(2)]
    for port in ports:
        port.online = True
        engine.attach(port, 0.0)
    engine.paths = NotedPaths()
    ways = engine.paths.ways
    fed: Fed = {}
    order: deque[bytes] = deque()
    old: deque[bytes] = deque(maxlen=300)
    now, out = 0.0, 0
    for number in range(rounds):
        batch = [
            traffic.next() if not old or dice.random() < 0.8 else dice.choice(old) for _ in range(dice.randint(1, 12))
        ]
        dice.shuffle(batch)
        old.extend(batch)
        source = dice.choice(ports)
        for raw in batch:
            if len(raw) > 2:
                body = body_of(raw)
                if body not in fed:
                    order.append(body)
                fed.setdefault(body, set()).add((raw[1] + source.hop, source.local is Local.CLIENT))
        engine.receive(source, batch, now)
        if dice.random() < 0.02:
            port = dice.choice(ports)
            port.online = not port.online
            engine.changed(port, now)
        now += dice.choice((0.0, 0.01, 0.3, 6.0))
        traffic.now = now
        engine.run_timers(now)
        while engine.inbound:
            items = engine.inbound.take()
            engine.verified(items, engine.verify(items), now)
        engine.dirty.clear()
        for port in ports:
            for raw in port.take():
                check_sent(engine, port, raw, fed, ways)
                out += 1
        while len(order) > 4000:
            del fed[order.popleft()]
        if number % 50 == 0:
            check_bounds(engine)
    return out


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("seed", range(3))
def test_mutated_traffic_breaks_no_rule(seed: int, role: str) -> None:
    assert fuzz(seed, 400, role) > 50


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_ten_minutes_of_mutated_traffic() -> None:
    end, seed = time.monotonic() + 600, 1000
    while time.monotonic() < end:
        fuzz(seed, 3000, list(ROLES)[seed % len(ROLES)])
        seed += 1
