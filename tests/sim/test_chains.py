"""Packets through chains of relays: headers hop by hop, proofs back, duplicates once.  Protocol 02, 21 (4, 6, 7)."""

from __future__ import annotations

import pytest

from rnsfast.engine.linkstate import State
from rnsfast.engine.receipts import Status
from rnsfast.wire.drop import Drop
from rnsfast.wire.packet import CTX_LRPROOF, DATA, HEADER_2, LINKREQUEST, PROOF, TRANSPORT
from tests.sim.network import Network
from tests.virtualnet import Wire


def chain(relays: int, seed: int = 60) -> tuple[Network, list[tuple[Wire, Wire]]]:
    """`relays` transport nodes between two endpoints."""
    net = Network(seed)
    nodes = [net.node("left"), *net.relays(relays), net.node("right")]
    return net, net.line(nodes)


def of_kind(wire: Wire, kind: int) -> list[bytes]:
    """Packets of a type; path requests are left out."""
    return [raw for raw in wire.sent if raw[0] & 3 == kind and raw[0] >> 2 & 3 != 2]


@pytest.mark.parametrize("relays", range(1, 7))
def test_the_header_at_every_hop(relays: int) -> None:
    net, wires = chain(relays)
    left, right = net.nodes[0], net.nodes[-1]
    place = net.announce(right)
    net.settle()
    assert net.delivers(left, place)
    for hop, (there, back) in enumerate(wires):
        (raw,) = of_kind(there, DATA)
        assert raw[1] == hop
        if hop < relays:
            assert raw[0] == HEADER_2 | TRANSPORT | DATA
            assert raw[2:18] == net.nodes[hop + 1].engine.transport_id and raw[18:34] == place.hash
        else:
            assert raw[0] == DATA and raw[2:18] == place.hash
        (proof,) = of_kind(back, PROOF)
        assert proof[0] & 0xC3 == PROOF and proof[1] == relays - hop
    first, last = of_kind(wires[0][0], DATA)[0], of_kind(wires[-1][0], DATA)[0]
    assert first[18:] == last[2:], "nobody touches what is inside"


def test_link_packets_count_hops_in_both_directions() -> None:
    net, wires = chain(4)
    left, right = net.nodes[0], net.nodes[-1]
    place = net.announce(right)
    net.settle()
    link = left.engine.open_link(left.outbound(place), net.now)
    net.run(5.0, lambda: bool(right.recorder.named("link_established")))
    (far,) = right.recorder.named("link_established")[0]
    link.send_data(b"there", net.now)
    far.send_data(b"back", net.now)
    net.run(1.0)
    assert [p for _, ps, _ in right.recorder.named("link_data") for p in ps] == [b"there"]
    assert [p for _, ps, _ in left.recorder.named("link_data") for p in ps] == [b"back"]
    for hop, (there, back) in enumerate(wires):
        onward = [raw for raw in there.sent if raw[2:18] == link.link_id]
        return_ = [raw for raw in back.sent if raw[2:18] == link.link_id]
        assert onward and return_
        assert {raw[1] for raw in onward} == {hop} and {raw[1] for raw in return_} == {4 - hop}


@pytest.mark.parametrize(("hops", "arrives"), [(125, True), (126, True), (127, False)])
def test_the_last_hop_of_all(hops: int, arrives: bool) -> None:
    """What would leave with 128 does not leave."""
    net, ((first, _), (second, _)) = chain(1)
    left, relay, right = net.nodes
    place = net.announce(right)
    net.settle()
    receipt = left.engine.send_packet(left.outbound(place), b"from far away", net.now)
    (raw,) = first.source.take()
    before = len(second.sent)
    relay.engine.receive(first.sink, [raw[:1] + bytes((hops,)) + raw[2:]], net.now)
    net.run(1.0)
    assert receipt is not None
    assert (len(second.sent) > before) is arrives
    assert bool(right.recorder.named("packet_arrived")) is arrives


def test_the_same_packet_over_two_interfaces_is_delivered_once() -> None:
    net = Network(seed=61)
    left, right = net.node("left"), net.node("right")
    first, _ = net.join(left, right)
    second, _ = net.join(left, right)
    place = right.inbound("twice")
    for n in range(1000):
        raw = left.engine.send_packet(left.outbound(place), n.to_bytes(4, "big"), net.now, receipt=False)
        assert raw is None
        assert len(first.source.queue) == len(second.source.queue) == n + 1
    net.run(1.0)
    (arrived,) = zip(*right.recorder.named("packet_arrived"), strict=True)
    assert [event.data for event in arrived] == [n.to_bytes(4, "big") for n in range(1000)]


def test_duplicates_and_late_copies_make_no_second_delivery() -> None:
    net, wires = chain(3, seed=62)
    for pair in wires:
        for wire in pair:
            wire.duplication, wire.jitter = 0.7, 0.3
    left, right = net.nodes[0], net.nodes[-1]
    place = net.announce(right)
    net.settle()
    receipts = [left.engine.send_packet(left.outbound(place), bytes((n,)), net.now) for n in range(50)]
    net.run(60.0)
    assert sorted(event.data for (event,) in right.recorder.named("packet_arrived")) == [bytes((n,)) for n in range(50)]
    assert all(receipt is not None and receipt.status is Status.DELIVERED for receipt in receipts)


# -- proofs -------------------------------------------------------------------------------------------------------


def test_a_proof_finds_its_way_once_and_only_from_where_the_packet_went() -> None:
    net, ((first, back), (_, answer)) = chain(1)
    left, relay, right = net.nodes
    place = net.announce(right)
    net.settle()
    assert net.delivers(left, place)
    (proof,) = of_kind(answer, PROOF)
    before = len(back.sent)
    relay.engine.receive(answer.sink, [proof], net.now)
    net.run(1.0)
    assert len(back.sent) == before, "it has gone back already"
    receipt = left.engine.send_packet(left.outbound(place), b"again", net.now)
    assert receipt is not None
    net.run(0.015)  # the relay has passed it on
    forged = proof[:2] + receipt.packet_hash[:16] + proof[18:]
    relay.engine.receive(first.sink, [forged], net.now)  # from the wrong side
    net.run(0.004)
    assert len(back.sent) == before and first.sink.drops[Drop.PROOF_UNEXPECTED] == 1


def test_link_request_proofs_forged_repeated_and_from_the_wrong_side() -> None:
    net, ((first, back), (second, answer)) = chain(1, seed=63)
    left, relay, right = net.nodes
    place = net.announce(right)
    net.settle()
    link = left.engine.open_link(left.outbound(place), net.now)
    net.run(0.025)  # the request is there, its proof on the way
    proof = answer.sent[-1]
    assert proof[18] == CTX_LRPROOF
    forged = proof[:-1] + bytes((proof[-1] ^ 1,))
    relay.engine.receive(answer.sink, [forged], net.now)
    relay.engine.receive(first.sink, [proof], net.now)
    assert not back.source.queue and relay.engine.transport is not None
    assert not relay.engine.transport.links.proved
    net.run(1.0)
    assert link.state is State.ACTIVE and len(relay.engine.transport.links.proved) == 1
    relay.engine.receive(answer.sink, [proof], net.now)
    relay.engine.receive(second.source, [proof[:1] + b"\x05" + proof[2:]], net.now)  # wrong hops
    net.run(1.0)
    assert link.state is State.ACTIVE
    assert len([raw for raw in of_kind(back, PROOF) if raw[18] == CTX_LRPROOF]) <= 2


def test_a_link_packet_with_wrong_hops_goes_nowhere_and_may_come_right_later() -> None:
    net, ((first, _), (second, _)) = chain(1, seed=64)
    left, relay, right = net.nodes
    place = net.announce(right)
    net.settle()
    link = left.engine.open_link(left.outbound(place), net.now)
    net.run(2.0)
    link.send_data(b"data", net.now)
    (raw,) = first.source.take()
    sent = len(second.sent)
    relay.engine.receive(first.sink, [raw[:1] + b"\x03" + raw[2:]], net.now)
    net.run(0.5)
    assert len(second.sent) == sent and first.sink.drops[Drop.LINK_HOPS] == 1
    relay.engine.receive(first.sink, [raw], net.now)
    net.run(0.5)
    assert [p for _, ps, _ in right.recorder.named("link_data") for p in ps] == [b"data"]


def test_an_idle_link_is_forgotten_after_900_seconds_and_not_before() -> None:
    """With both ends silent: their keepalives are swallowed."""
    net, wires = chain(1, seed=65)
    left, relay, right = net.nodes
    place = net.announce(right)
    net.settle()
    left.engine.open_link(left.outbound(place), net.now)
    net.run(2.0)
    table = relay.engine.transport.links.proved if relay.engine.transport is not None else {}
    for pair in wires:
        for wire in pair:
            wire.cut = True
    net.run(880.0)
    assert len(table) == 1
    net.run(40.0)
    assert not table


def test_a_link_request_nobody_answers_makes_the_relay_look_for_another_way() -> None:
    """The neighbour of the destination marks its path, asks, and takes the longer way with the same announce.

    left - near - right directly, and near - other - right; the direct cable swallows everything.
    """
    net = Network(seed=66)
    left, right = net.node("left"), net.node("right")
    near, other = net.relay("near"), net.relay("other")
    net.join(left, near)
    direct = net.join(near, right)
    net.join(near, other)
    net.join(other, right)
    place = net.announce(right)
    net.settle()
    assert [node.name for node in net.way(left, place)] == ["left", "near", "right"]
    net.cut(direct, down=False)
    first = left.engine.open_link(left.outbound(place), net.now)
    net.run(40.0, lambda: first.state is State.CLOSED)
    assert first.state is State.CLOSED
    net.run(5.0)
    assert [node.name for node in net.way(near, place)] == ["near", "other", "right"]
    second = left.engine.open_link(left.outbound(place), net.now)
    net.run(30.0, lambda: second.state is not State.PENDING)
    assert second.state is State.ACTIVE


def test_a_repeated_link_request_is_carried_once() -> None:
    net, wires = chain(2, seed=67)
    for pair in wires:
        for wire in pair:
            wire.duplication = 1.0
    left, right = net.nodes[0], net.nodes[-1]
    place = net.announce(right)
    net.settle()
    link = left.engine.open_link(left.outbound(place), net.now)
    net.run(5.0)
    assert link.state is State.ACTIVE and len(right.engine.links) == 1
    assert [len(of_kind(there, LINKREQUEST)) for there, _ in wires] == [1, 1, 1]
