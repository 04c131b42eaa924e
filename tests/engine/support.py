"""Engines, links and channels made by hand, where a whole network would be in the way."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from rnsfast.crypto.ed25519 import SigningKey, VerifyKey
from rnsfast.crypto.identity import Identity
from rnsfast.crypto.token import TokenKey, seal_with_iv
from rnsfast.crypto.x25519 import X25519Key
from rnsfast.engine.channel import Channel, Ticket
from rnsfast.engine.destination import Destination, Direction
from rnsfast.engine.engine import Engine
from rnsfast.engine.link import Link
from rnsfast.engine.linkstate import State
from rnsfast.engine.port import Port
from rnsfast.wire.packet import CTX_CHANNEL, SINGLE, make_raw
from tests.virtualnet import UNIX, Recorder

NOW = 1000.0
KEY = bytes(range(64))
LINK_ID = bytes.fromhex("00112233445566778899aabbccddeeff")


class Script:
    """Random bytes: what was laid in first, in order, then those of a seeded generator."""

    def __init__(self, *draws: bytes, seed: int = 1) -> None:
        self.draws = list(draws)
        self.random = random.Random(seed)

    def __call__(self, size: int) -> bytes:
        if self.draws and len(self.draws[0]) == size:
            return self.draws.pop(0)
        return self.random.randbytes(size)


def make_engine(entropy: Callable[[int], bytes] | None = None, **options: Any) -> tuple[Engine, Recorder]:
    recorder = Recorder()
    options.setdefault("unix_offset", UNIX)
    options.setdefault("transport_identity", some_identity(99))
    return Engine(recorder, NOW, entropy=entropy or Script(), **options), recorder  # type: ignore[arg-type]


def make_port(engine: Engine, name: str = "port", **options: Any) -> Port:
    port = Port(name, **options)
    port.online = True
    engine.attach(port)
    return port


def sent(port: Port) -> list[bytes]:
    return port.take()


def some_identity(seed: int = 7) -> Identity:
    return Identity(entropy=random.Random(seed).randbytes)


def make_link(
    *,
    initiator: bool = False,
    rtt: float = 0.05,
    mtu: int = 500,
    key: bytes = KEY,
    link_id: bytes = LINK_ID,
    state: State = State.ACTIVE,
    identity: Identity | None = None,
    peer: SigningKey | None = None,
    engine: Engine | None = None,
    now: float = NOW,
) -> tuple[Link, Recorder, Port]:
    """A link as the handshake leaves it, without the handshake. `peer` signs the other side's proofs."""
    if engine is None:
        engine, recorder = make_engine()
    else:
        recorder = engine.listener  # type: ignore[assignment]
    port = engine.ports[0] if engine.ports else make_port(engine)
    identity = identity or some_identity()
    if initiator:
        public = Identity.from_public(identity.public_key)
        destination = Destination(public, Direction.OUT, SINGLE, "test", "inbox")
        peer_key = identity.verifying
        signing = SigningKey(bytes(range(32)))
    else:
        destination = Destination(identity, Direction.IN, SINGLE, "test", "inbox")
        peer_key = VerifyKey((peer or SigningKey(bytes(range(32)))).public)
        signing = identity.signing
    link = Link(
        engine, link_id, destination, port, initiator=initiator, exchange=X25519Key(bytes(range(32))), signing=signing,
        mode=1, timeout=366.0, now=now,
    )  # fmt: skip
    link._key = TokenKey(key, engine.entropy)
    link._peer_key = peer_key
    link.remote_identity = destination.identity if initiator else None
    link.set_mtu(mtu)
    engine.links[link_id] = link
    link.state = state
    if state is State.ACTIVE:
        link.rtt = rtt
        link.activated_at = now
        link.rtt_told = not initiator
    return link, recorder, port


def sealed_channel(plain: bytes, iv: bytes, link_id: bytes = LINK_ID, key: bytes = KEY) -> bytes:
    return make_raw(0x0C, link_id, CTX_CHANNEL, seal_with_iv(key, iv, plain))


def sealed(context: int, plain: bytes, iv: bytes, link_id: bytes = LINK_ID, key: bytes = KEY) -> bytes:
    return make_raw(0x0C, link_id, context, seal_with_iv(key, iv, plain))


def message(channel: Channel, payload: bytes, now: float, msgtype: int = 0x0101) -> Ticket:
    ticket = Ticket(msgtype, payload)
    channel.send(ticket, now)
    return ticket
