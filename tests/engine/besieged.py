"""A transport node between a hostile neighbour and two good ones, and what hostile neighbours send."""

from __future__ import annotations

import random
from collections.abc import Callable

from rnsfast.crypto.identity import Identity
from rnsfast.crypto.x25519 import X25519Key
from rnsfast.engine.destination import Destination, Direction
from rnsfast.engine.engine import Engine
from rnsfast.engine.linktable import LinkEntry
from rnsfast.engine.port import Policy, Port
from rnsfast.wire.announce import Announce, build_announce, random_blob, signed_data
from rnsfast.wire.handshake import (
    MODE_AES256_CBC,
    LinkRequest,
    build_link_proof,
    build_link_request,
    link_proof_signed_data,
)
from rnsfast.wire.packet import (
    ANNOUNCE,
    CTX_CHANNEL,
    CTX_LRPROOF,
    CTX_NONE,
    CTX_PATH_RESPONSE,
    DATA,
    HEADER_2,
    LINK,
    LINKREQUEST,
    PLAIN,
    PROOF,
    SINGLE,
    TRANSPORT,
    link_id,
    make_raw,
)
from rnsfast.wire.pathrequest import PATH_REQUEST_DESTINATION, PathRequest, build_path_request
from rnsfast.wire.tunnel import TUNNEL_DESTINATION, Synthesis, build_synthesis, synthesis_signed_data
from tests.virtualnet import Recorder

UNIX = 1_750_000_000.0
DICE = random.Random(5)
OPEN = Policy(ingress_control=False, announce_cap=1.0)


class Besieged:
    """A transport node with a hostile neighbour and two good ones, between which a link runs."""

    def __init__(self, policy: Policy = OPEN) -> None:
        self.now = 0.0
        self.engine = Engine(
            Recorder(),  # type: ignore[arg-type]
            0.0,
            unix_offset=UNIX,
            entropy=random.Random(1).randbytes,
            transport_identity=Identity(entropy=random.Random(2).randbytes),
            transport=True,
        )
        self.ports = [Port(name, hw_mtu=1064, policy=policy) for name in ("hostile", "left", "right")]
        for port in self.ports:
            port.online = True
            self.engine.attach(port, 0.0)
        self.hostile, self.left, self.right = self.ports
        assert self.engine.transport is not None
        self.transport = self.engine.transport
        self.owner = Identity(entropy=random.Random(3).randbytes)
        self.good = announce(self.owner, "good", UNIX)
        self.engine.receive(self.right, [self.good], 0.0)
        path = self.engine.paths.paths[self.good[2:18]]
        self.link = bytes(range(16))
        entry = LinkEntry(self.link, self.good[2:18], self.left, 1, path, 0.0)
        entry.validated = True
        self.transport.links.proved[self.link] = entry
        self.transport.links._running[self.left] += 1
        self.sent()

    def sent(self) -> dict[str, list[bytes]]:
        self.engine.dirty.clear()
        return {port.name: port.take() for port in self.ports}

    def pour(self, packets: list[bytes], seconds: float = 1.0) -> None:
        """As batches of 64, in that time."""
        for at in range(0, len(packets), 64):
            self.engine.receive(self.hostile, packets[at : at + 64], self.now)
            self.now += seconds * 64 / len(packets)
            self.engine.run_timers(self.now)
        self.sent()

    def check_good_are_served(self) -> None:
        """The link between the good ones runs, a new destination is heard, a packet finds its way."""
        raw = make_raw(LINK << 2 | DATA, self.link, CTX_CHANNEL, DICE.randbytes(60))
        self.engine.receive(self.left, [raw], self.now)
        assert any(r[2:] == raw[2:] for r in self.sent()["right"])
        news = announce(Identity(entropy=DICE.randbytes), "news", UNIX + self.now)
        self.engine.receive(self.right, [news], self.now)
        assert news[2:18] in self.engine.paths.paths
        self.sent()
        single = make_raw(SINGLE << 2 | DATA, self.good[2:18], CTX_NONE, DICE.randbytes(60))
        head = bytes((HEADER_2 | TRANSPORT | single[0], 0)) + self.engine.transport_id
        self.engine.receive(self.left, [head + single[2:]], self.now)
        assert any(r[2:] == single[2:] for r in self.sent()["right"])


def announce(
    owner: Identity, name: str, unix_time: float, data: bytes | None = None, *, hops: int = 0, forged: bool = False
) -> bytes:
    place = Destination(owner, Direction.IN, SINGLE, "hostile", name)
    blob = random_blob(DICE.randbytes(5), int(unix_time))
    made = Announce(place.hash, owner.public_key, place.name_hash, blob, None, b"", data)
    signature = DICE.randbytes(63) + b"\x05" if forged else owner.sign(signed_data(made))
    return make_raw(ANNOUNCE, place.hash, CTX_NONE, build_announce(made, signature), hops=hops)


def request(destination: bytes, tag: bytes) -> bytes:
    data = build_path_request(PathRequest(destination, None, tag))
    return make_raw(PLAIN << 2 | DATA, PATH_REQUEST_DESTINATION, CTX_NONE, data)


def direct_request(destination: bytes) -> bytes:
    keys = X25519Key(DICE.randbytes(32)).public, DICE.randbytes(32)
    return make_raw(LINKREQUEST, destination, CTX_NONE, build_link_request(LinkRequest(*keys, None, MODE_AES256_CBC)))


def in_transport(here: Besieged, raw: bytes) -> bytes:
    return bytes((HEADER_2 | TRANSPORT | raw[0], 0)) + here.engine.transport_id + raw[2:]


def link_request(here: Besieged) -> bytes:
    return in_transport(here, direct_request(here.good[2:18]))


def link_proof(here: Besieged, asked: bytes) -> bytes:
    identifier, key = link_id(asked), DICE.randbytes(32)
    signed = link_proof_signed_data(identifier, key, here.owner.signing.public, b"")
    return make_raw(LINK << 2 | PROOF, identifier, CTX_LRPROOF, build_link_proof(here.owner.sign(signed), key, b""))


def many(count: int, make: Callable[[int], bytes]) -> list[bytes]:
    return [make(n) for n in range(count)]


def synthesis(owner: Identity, n: int) -> bytes:
    port, salt = n.to_bytes(32, "big"), DICE.randbytes(16)
    signature = owner.sign(synthesis_signed_data(owner.public_key, port, salt))
    body = build_synthesis(Synthesis(owner.public_key, port, salt, signature))
    return make_raw(PLAIN << 2 | DATA, TUNNEL_DESTINATION, CTX_NONE, body)


def answers(packets: list[bytes], destination: bytes) -> int:
    """How many answers to path requests for it there are."""
    return sum(r[0] & 0x43 == 0x41 and r[18:34] == destination and r[34] == CTX_PATH_RESPONSE for r in packets)
