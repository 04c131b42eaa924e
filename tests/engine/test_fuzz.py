"""Whatever comes in, nothing comes out of `Engine.receive` but packets and events, and nothing grows without bound."""

from __future__ import annotations

import random

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rnsfast.crypto.ed25519 import SigningKey
from rnsfast.crypto.identity import Identity
from rnsfast.engine.destination import Destination, Direction, ProofStrategy, RatchetRing
from rnsfast.engine.engine import Engine
from rnsfast.engine.link import Link
from rnsfast.engine.linkstate import State
from rnsfast.engine.port import Port
from rnsfast.engine.requests import Policy, RequestHandler, ask
from rnsfast.wire.channel import pack_envelope
from rnsfast.wire.handshake import build_rtt
from rnsfast.wire.ifac import IfacKey
from rnsfast.wire.packet import (
    ANNOUNCE,
    CTX_LINKCLOSE,
    CTX_LRRTT,
    CTX_RESOURCE_ADV,
    GROUP,
    PLAIN,
    SINGLE,
    make_raw,
    packet_hash,
)
from rnsfast.wire.pathrequest import PATH_REQUEST_DESTINATION
from tests.engine.support import LINK_ID, NOW, make_engine, make_link, make_port, message, sealed, sent, some_identity
from tests.virtualnet import VirtualNet

CONTEXTS = st.one_of(
    st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0x0A, 0x0E, 0xFA, 0xFB, 0xFC, 0xFD, 0xFE, 0xFF]), st.integers(0, 255)
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary(max_size=20) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner),
    max_leaves=8,
)  # fmt: skip
PLAINTEXTS = st.one_of(
    st.binary(max_size=200),
    VALUES.map(msgpack.packb),
    st.builds(pack_envelope, st.sampled_from([0, 0x101, 0xFF00, 0xFFFF]), st.integers(0, 65535), st.binary()),
    st.builds(pack_envelope, st.just(0xFF00), st.integers(0, 60), st.binary(max_size=90)),
    st.builds(lambda h, b: pack_envelope(0xFF00, 0, h + b"BZh9" + b), st.binary(min_size=2, max_size=2), st.binary()),
    st.floats().map(build_rtt),
    st.just(LINK_ID),
    st.builds(lambda f, q, h, d: msgpack.packb({"f": f, "q": q, "h": h, "d": d}), VALUES, VALUES, VALUES, VALUES),
    st.builds(
        lambda f, q, h: msgpack.packb({"f": f, "q": q, "h": h, "d": 1000}),
        st.integers(0, 63), st.binary(min_size=16, max_size=16), st.binary(min_size=32, max_size=32),
    ),
)  # fmt: skip


def check_bounds(engine: Engine, link: Link | None = None) -> None:
    assert len(engine.links) <= 2 and len(engine.timers) < 600 and not engine.settlements
    if link is not None:
        channel = link.channel
        assert len(link._early) <= 48 and len(link.outstanding) <= 2000
        if channel is not None:
            assert len(channel.held) <= 48 and len(channel.ring) <= 48 and len(channel._unopened) <= 64


@settings(max_examples=400, deadline=None)
@given(
    st.booleans(),
    st.sampled_from([State.HANDSHAKE, State.ACTIVE, State.STALE]),
    st.booleans(),
    st.lists(st.tuples(CONTEXTS, PLAINTEXTS, st.booleans()), min_size=1, max_size=12),
    st.booleans(),
)
def test_sealed_rubbish_in_every_context(
    initiator: bool, state: State, with_channel: bool, packets: list[tuple[int, bytes, bool]], in_one_batch: bool
) -> None:
    """With the right key, even: no exception, and only an advertisement, an RTT packet or a close ends the link."""
    if initiator and state is State.HANDSHAKE:
        state = State.ACTIVE
    link, _, port = make_link(initiator=initiator, state=state)
    link.destination.proofs = ProofStrategy.ALL
    link.destination.requests.register(RequestHandler("/x", lambda request: None, Policy.ALL))
    if with_channel and state is not State.HANDSHAKE:
        channel = link.open_channel(NOW)
        channel.open_reader(5)
        if state is State.ACTIVE:
            message(channel, b"mine", NOW)
            ask(link, "/x", None, NOW)
    frames = []
    for n, (context, plain, is_sealed) in enumerate(packets):
        frame = sealed(context, plain, n.to_bytes(16, "big"))
        frames.append(frame if is_sealed or not plain else make_raw(0x0C, LINK_ID, context, plain))
    if in_one_batch:
        link.engine.receive(port, frames, NOW + 1)
    else:
        for frame in frames:
            link.engine.receive(port, [frame], NOW + 1)
    may_close = {CTX_LINKCLOSE, CTX_LRRTT, CTX_RESOURCE_ADV}
    if link.state is State.CLOSED:
        assert may_close & {context for context, _, _ in packets}
        assert not link.engine.links and link._key is None
    check_bounds(link.engine, link)
    link.engine.run_timers(NOW + 3)
    link.engine.run_timers(NOW + 30)
    check_bounds(link.engine, link)
    sent(port)


def busy_engine() -> tuple[Engine, Port, Link, list[bytes]]:
    """An engine with a destination of every kind, a link, receipts, and a path request outstanding."""
    engine, _ = make_engine()
    port = make_port(engine, hw_mtu=1064)
    inbox = Destination(some_identity(), Direction.IN, SINGLE, "x")
    inbox.ratchets = RatchetRing([bytes([n]) * 32 for n in range(1, 4)])
    inbox.proofs = ProofStrategy.ALL
    group = Destination(some_identity(2), Direction.IN, GROUP, "g")
    group.set_group_key(bytes(64), engine.entropy)
    plain = Destination(None, Direction.IN, PLAIN, "p")
    for destination in (inbox, group, plain):
        engine.register(destination)
    out = Destination(Identity.from_public(some_identity(3).public_key), Direction.OUT, SINGLE, "o")
    receipt = engine.send_packet(out, b"x", NOW)
    assert receipt is not None
    link, _, _ = make_link(engine=engine)
    pending = engine.open_link(out, NOW)
    addresses = [inbox.hash, group.hash, plain.hash, PATH_REQUEST_DESTINATION, link.link_id, pending.link_id]
    return engine, port, link, [*addresses, receipt.packet_hash[:16], engine.transport_id]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(min_size=20, max_size=600), max_size=8), st.integers(0, 2**32))
def test_random_packets(packets: list[bytes], seed: int) -> None:
    engine, port, _, _ = busy_engine()
    engine.receive(port, packets, NOW)
    engine.run_timers(NOW + seed % 1000)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 255), st.integers(0, 255), st.integers(0, 7), st.integers(0, 7), CONTEXTS,
            st.one_of(st.binary(max_size=220), st.sampled_from([64, 67, 96, 99, 115, 148, 180]).map(bytes)),
        ),
        max_size=10,
    )
)  # fmt: skip
def test_packets_to_what_is_here(drawn: list[tuple[int, int, int, int, int, bytes]]) -> None:
    engine, port, _, addresses = busy_engine()
    frames = []
    for flags, hops, via, target, context, data in drawn:
        transport = addresses[via] if flags & 0x40 else b""
        frames.append(bytes((flags, hops)) + transport + addresses[target] + bytes((context,)) + data)
    engine.receive(port, frames, NOW)
    engine.run_timers(NOW + 1)
    check_bounds_loosely(engine)


def check_bounds_loosely(engine: Engine) -> None:
    assert len(engine.links) <= 12 and len(engine.timers) < 600 and len(engine.paths.paths) <= 10


@settings(max_examples=150, deadline=None)
@given(st.lists(st.binary(max_size=300), max_size=6))
def test_random_frames_on_an_interface_with_access_code(frames: list[bytes]) -> None:
    engine, recorder = make_engine()
    port = make_port(engine, ifac=IfacKey("net", "secret", 8))
    engine.receive(port, frames, NOW)
    assert not recorder.events and sum(port.drops.values()) == len(frames)


@pytest.mark.parametrize("seed", range(6))
def test_damaged_traffic_of_a_whole_life(seed: int) -> None:
    """Announce, handshake, messages, streams, requests, close: with any frame cut, lengthened or flipped at random."""
    net = VirtualNet(seed)
    a, b, to_b, to_a = net.pair(delay=0.01)
    rng = random.Random(seed)
    for wire in (to_b, to_a):
        carry = wire.carry

        def damage(raw: bytes, carry=carry) -> None:  # type: ignore[no-untyped-def]
            kind = rng.random()
            if kind < 0.1:
                raw = raw[: rng.randrange(len(raw))]
            elif kind < 0.15:
                raw += rng.randbytes(rng.randrange(40))
            elif kind < 0.3:
                at = rng.randrange(len(raw))
                raw = raw[:at] + bytes((rng.randrange(256),)) + raw[at + 1 :]
            elif kind < 0.35:
                carry(raw)
            carry(raw)

        wire.carry = damage  # type: ignore[method-assign]
    inbox = b.inbound("inbox")
    for attempt in range(12):
        b.engine.announcing.announce(inbox, bytes(attempt), net.now)
        net.run(2)
        link = a.engine.open_link(a.outbound(inbox), net.now)
        net.run(1)
        if link.state is State.ACTIVE:
            channel = link.open_channel(net.now)
            for other in list(b.engine.links.values()):
                if other.state is State.ACTIVE:
                    other.open_channel(net.now)
            for n in range(5):
                message(channel, bytes(n), net.now)
            ask(link, "/x", n, net.now)
            link.send_data(b"data", net.now)
            net.run(4)
        link.close(net.now)
    net.run(800)
    assert not a.engine.links and not b.engine.links
    assert not a.engine.receipts and len(a.engine.timers) < 600 and len(b.engine.timers) < 600


def test_an_announce_to_a_link_id_is_not_a_proof() -> None:
    """Only packets of type PROOF prove: any other type with the same bytes is something else."""
    link, _, port = make_link()
    ticket = message(link.open_channel(NOW), b"x", NOW)
    (raw,) = sent(port)
    digest = packet_hash(raw)
    body = digest + SigningKey(bytes(range(32))).sign(digest)
    for flags in (0x0C | ANNOUNCE, 0x0E):
        link.engine.receive(port, [make_raw(flags, LINK_ID, 0, body)], NOW)
        assert not ticket.delivered
    link.engine.receive(port, [make_raw(0x0F, LINK_ID, 0, body)], NOW)
    assert ticket.delivered
