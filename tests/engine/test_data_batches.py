"""Plain packets of a link in batches: opened together, sealed together, counted and ordered as if one by one."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rnsfast.crypto.ed25519 import SigningKey
from rnsfast.crypto.identity import Identity
from rnsfast.crypto.token import TokenKey
from rnsfast.engine.destination import ProofStrategy
from rnsfast.engine.link import Link
from rnsfast.engine.linkstate import State
from rnsfast.wire.drop import Drop
from rnsfast.wire.handshake import build_identify, identify_signed_data
from rnsfast.wire.packet import CTX_LINKCLOSE, CTX_LINKIDENTIFY, CTX_LRRTT, CTX_NONE
from tests.engine.support import KEY, LINK_ID, NOW, make_link, message, sealed, sent, some_identity
from tests.virtualnet import Recorder, VirtualNet

RANDOM = random.Random(5)


def data(plain: bytes) -> bytes:
    return sealed(CTX_NONE, plain, RANDOM.randbytes(16))


def delivered(recorder: Recorder) -> list[bytes]:
    return [plain for _, packets, _ in recorder.named("link_data") for plain in packets]


def spied(link: Link) -> list[int]:
    """How many tokens each opening had."""
    calls: list[int] = []
    real = link.key

    class Spy:
        def open_many(self, tokens: Any) -> Any:
            calls.append(len(tokens))
            return real.open_many(tokens)

        def open(self, token: bytes) -> Any:
            return self.open_many((token,))[0]

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    link._key = Spy()  # type: ignore[assignment]
    return calls


def test_packets_of_a_batch_are_opened_and_delivered_at_once() -> None:
    link, recorder, port = make_link()
    calls = spied(link)
    plains = [bytes((i,)) * i for i in range(1, 65)]
    link.engine.receive(port, [data(plain) for plain in plains], NOW + 1)
    assert calls == [64] and len(recorder.named("link_data")) == 1
    assert delivered(recorder) == plains
    assert link.last_inbound == link.last_data == NOW + 1 and link.rx_packets == 64


def test_duplicates_and_damaged_packets_of_a_batch_are_counted_and_harm_no_other() -> None:
    link, recorder, port = make_link()
    one, two, three = data(b"one"), data(b"two"), data(b"three")
    forged = two[:-1] + bytes((two[-1] ^ 1,))
    link.engine.receive(port, [one, one, forged, two, forged, three], NOW)
    assert delivered(recorder) == [b"one", b"two", b"three"]
    assert port.drops == {Drop.FILTERED: 2, Drop.LINK_TOKEN: 1}
    link.engine.receive(port, [three, one], NOW)
    assert delivered(recorder) == [b"one", b"two", b"three"]
    assert port.drops == {Drop.FILTERED: 4, Drop.LINK_TOKEN: 1}


def test_a_batch_of_nothing_that_opens_is_no_sign_of_life() -> None:
    link, recorder, port = make_link()
    before = link.last_inbound
    link.engine.receive(port, [data(b"x")[:-1] + b"\0"] * 3, NOW + 5)
    assert link.last_inbound == before and not recorder.named("link_data")


def test_what_came_before_the_close_is_delivered_and_what_came_after_is_not() -> None:
    link, recorder, port = make_link()
    close = sealed(CTX_LINKCLOSE, LINK_ID, bytes(16))
    link.engine.receive(port, [data(b"1"), data(b"2"), close, data(b"3")], NOW)
    assert delivered(recorder) == [b"1", b"2"]
    assert [event[0] for event in recorder.events] == ["link_data", "link_closed"]


def test_what_came_before_an_identity_is_delivered_before_it() -> None:
    link, recorder, port = make_link()
    who = some_identity(3)
    claim = build_identify(who.public_key, who.sign(identify_signed_data(LINK_ID, who.public_key)))
    link.engine.receive(port, [data(b"1"), sealed(CTX_LINKIDENTIFY, claim, bytes(16)), data(b"2"), data(b"3")], NOW)
    assert [event[0] for event in recorder.events] == ["link_data", "peer_identified", "link_data"]
    assert delivered(recorder) == [b"1", b"2", b"3"]


def test_packets_activate_a_link_whose_rtt_packet_was_lost() -> None:
    link, recorder, port = make_link(state=State.HANDSHAKE)
    link.engine.receive(port, [data(b"1"), data(b"2")], NOW + 0.5)
    assert link.state is State.ACTIVE
    assert [event[0] for event in recorder.events] == ["link_established", "link_data"]


def test_messages_and_proofs_in_between_do_not_cut_the_batch() -> None:
    net = VirtualNet(3)
    link, peer, _, _ = net.linked(delay=0.002)
    sender = link.open_channel(net.now)
    peer.open_channel(net.now)
    calls = spied(peer)
    for i in range(8):
        link.send_data(bytes((i,)), net.now)
        message(sender, b"m", net.now)
    net.run(0.1)
    assert delivered(net.nodes[1].recorder) == [bytes((i,)) for i in range(8)]
    assert calls[-1] == 8 or 8 in calls


def test_every_packet_of_a_batch_is_proved_if_the_destination_proves_all() -> None:
    net = VirtualNet(4)
    link, peer, _, _ = net.linked(delay=0.002)
    peer.destination.proofs = ProofStrategy.ALL
    receipts = [link.send_data(bytes((i,)), net.now) for i in range(20)]
    net.run(0.1)
    assert {receipt.status.name for receipt in receipts if receipt is not None} == {"DELIVERED"} and len(receipts) == 20


def test_many_are_sealed_at_once_without_receipts_and_arrive_in_order() -> None:
    net = VirtualNet(5)
    link, _, there, _ = net.linked(delay=0.002)
    plains = [bytes((i,)) * (i * 6) for i in range(1, 65)]
    before = link.tx_packets, link.tx_bytes
    assert link.send_data_many(plains, net.now) == 64
    assert not link.outstanding and link.last_outbound == net.now
    net.run(0.1)
    assert delivered(net.nodes[1].recorder) == plains
    assert link.tx_packets == before[0] + 64
    assert link.tx_bytes == before[1] + sum(len(raw) - 19 for raw in there.sent[-64:])


def test_nothing_is_sent_on_a_link_that_is_not_active_or_whose_interface_is_down() -> None:
    link, _, port = make_link(state=State.HANDSHAKE)
    assert link.send_data_many([b"a", b"b"], NOW) == 0 and not sent(port)
    link.state = State.STALE
    assert link.send_data_many([], NOW) == 0
    assert link.send_data_many([b"a", b"b"], NOW) == 2 and len(sent(port)) == 2
    port.online = False
    assert link.send_data_many([b"a"], NOW) == 0 and port.drops[Drop.TX_OFFLINE] == 1


@given(st.lists(st.tuples(st.sampled_from("dcxir"), st.integers(0, 3)), max_size=30))
def test_a_batch_is_taken_as_its_packets_one_by_one(kinds: list[tuple[str, int]]) -> None:
    """Whatever comes in whatever order: the application sees the same, the counters are the same."""
    seen: list[tuple[Any, ...]] = []
    who: Identity = some_identity(3)
    claim = build_identify(who.public_key, who.sign(identify_signed_data(LINK_ID, who.public_key)))
    draw = random.Random(9)
    pool: dict[tuple[str, int], bytes] = {}
    for n in range(4):
        pool["d", n] = sealed(CTX_NONE, b"data%d" % n, draw.randbytes(16))
        pool["x", n] = sealed(CTX_NONE, b"bad", draw.randbytes(16), key=bytes(64))
        pool["i", n] = sealed(CTX_LINKIDENTIFY, claim, draw.randbytes(16))
        pool["r", n] = sealed(CTX_LRRTT, b"\xcb" + bytes(8), draw.randbytes(16))
        pool["c", n] = sealed(CTX_LINKCLOSE, LINK_ID if n == 3 else bytes(16), draw.randbytes(16))
    if ("c", 3) in kinds:  # what comes after the close is another test's matter
        kinds = kinds[: kinds.index(("c", 3)) + 1]
    packets = [pool[kind] for kind in kinds]
    for batches in ([packets], [[packet] for packet in packets]):
        link, recorder, port = make_link(peer=SigningKey(bytes(range(32))))
        link._key = TokenKey(KEY, link.engine.entropy)
        for batch in batches:
            link.engine.receive(port, batch, NOW + 1)
        drops = port.drops.copy()
        others = [event[0] for event in recorder.events if event[0] != "link_data"]
        seen.append((delivered(recorder), others, link.state, drops))
    assert seen[0] == seen[1]
