"""Links over several hops: streams, MTUs, dead relays.  Protocol 02, sections 5.3 to 5.6; field case F6."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from rnsfast.engine.destination import Destination
from rnsfast.engine.link import Link
from rnsfast.engine.linkstate import State
from rnsfast.engine.port import Mode, Policy
from tests.engine.test_faults import Transfer
from tests.sim.network import OPEN, Network
from tests.virtualnet import SimNode, Wire


def link_between(net: Network, source: SimNode, target: Destination, owner: SimNode, patience: float = 90.0) -> Link:
    """The initiator's end of an active link. AssertionError if it does not come about."""
    link = source.engine.open_link(source.outbound(target), net.now)
    known = len(owner.recorder.named("link_established"))
    net.run(patience, lambda: link.state is State.CLOSED or len(owner.recorder.named("link_established")) > known)
    assert link.state is State.ACTIVE, f"{link.state} after {net.now}: {link.closing}"
    return link


def far_end(owner: SimNode) -> Link:
    (end,) = owner.recorder.named("link_established")[-1]
    assert isinstance(end, Link)
    return end


def stream(net: Network, source: Link, sink: Link, size: int) -> None:
    """A stream arrives whole."""
    transfer = Transfer(net, source, sink, random.Random(size).randbytes(size))
    done = [False]

    def turn() -> bool:
        done[0] = done[0] or transfer.turn()
        return done[0]

    turn()
    net.run(200.0, turn)
    assert done[0] and transfer.received == size
    assert transfer.digest.digest() == hashlib.sha256(transfer.data).digest()


@pytest.mark.parametrize("hops", range(1, 11))
def test_a_link_over_several_hops_carries_streams_both_ways(hops: int) -> None:
    net = Network(seed=hops)
    nodes = net.relays(hops + 1)
    net.line(nodes)
    place = net.announce(nodes[-1])
    net.settle()
    assert nodes[0].engine.paths.paths[place.hash].hops == hops
    link = link_between(net, nodes[0], place, nodes[-1])
    stream(net, link, far_end(nodes[-1]), 60_000)
    stream(net, far_end(nodes[-1]), link, 30_000)
    for relay in nodes[1:-1]:
        assert relay.engine.transport is not None and len(relay.engine.transport.links.proved) == 1
        assert not relay.engine.links


@pytest.mark.parametrize(
    ("mtus", "agreed"),
    [
        ([16384, 16384, 16384], 16384),
        ([32768, 1064, 16384], 1064),
        ([1064, 32768, 16384], 1064),
        ([16384, 32768, 2048], 2048),
        ([262144, 16384, 500], 500),
    ],
)
def test_the_narrowest_hop_decides_the_mtu(mtus: list[int], agreed: int) -> None:
    net = Network(seed=21)
    nodes = net.relays(len(mtus) + 1)
    for (a, b), mtu in zip(pairwise(nodes), mtus, strict=True):
        net.join(a, b, hw_mtu=mtu)
    place = net.announce(nodes[-1])
    net.settle()
    link = link_between(net, nodes[0], place, nodes[-1])
    assert link.mtu == far_end(nodes[-1]).mtu == agreed
    stream(net, link, far_end(nodes[-1]), 40_000)


def test_a_hop_that_cannot_signal_leaves_500() -> None:
    net = Network(seed=22)
    nodes = net.relays(4)
    net.join(nodes[0], nodes[1])
    net.join(nodes[1], nodes[2], upgradable=False, hw_mtu=1064)
    net.join(nodes[2], nodes[3])
    place = net.announce(nodes[3])
    net.settle()
    assert link_between(net, nodes[0], place, nodes[3]).mtu == 500


def test_a_link_over_lossy_hops_carries_a_stream() -> None:
    net = Network(seed=23)
    nodes = net.relays(5)
    net.line(nodes)
    place = net.announce(nodes[-1])
    net.settle()
    for wire in net.wires:
        wire.loss, wire.duplication, wire.jitter = 0.01, 0.05, 0.005
    link: Link | None = None
    for _ in range(5):  # a request or its proof may be lost
        try:
            link = link_between(net, nodes[0], place, nodes[-1])
            break
        except AssertionError:
            net.announce(nodes[-1], destination=place)
            net.settle()
    assert link is not None
    stream(net, link, far_end(nodes[-1]), 50_000)


# -- two ways -----------------------------------------------------------------------------------------------------


def square(
    seed: int,
) -> tuple[Network, SimNode, SimNode, dict[str, SimNode], dict[str, tuple[Wire, Wire]], Destination]:
    """An endpoint with two relays to one destination, which announced once."""
    net = Network(seed)
    ours, target = net.node("ours"), net.node("target")
    relays = {name: net.relay(name) for name in ("north", "south")}
    wires = {name: net.join(ours, relay) for name, relay in relays.items()}
    for relay in relays.values():
        net.join(relay, target, delay=0.012)
    place = net.announce(target)
    net.settle()
    return net, ours, target, relays, wires, place


def in_use(net: Network, ours: SimNode, place: Destination) -> str:
    return net.way(ours, place)[1].name


@pytest.mark.parametrize("seed", range(4))
def test_a_relay_that_is_gone_is_not_used_and_not_shown(seed: int) -> None:
    net, ours, target, relays, wires, place = square(seed)
    used = in_use(net, ours, place)
    net.cut(wires[used])
    assert ours.engine.paths.usable(place.hash) is None
    assert net.ask(ours, place, 5.0)
    assert in_use(net, ours, place) != used
    assert link_between(net, ours, place, target, 10.0).state is State.ACTIVE
    assert relays


@pytest.mark.parametrize("seed", range(4))
def test_a_silent_relay_is_given_up_after_the_first_attempt(seed: int) -> None:
    """The connection stays up and swallows everything: the path is dropped with the attempt, and asked for at once."""
    net, ours, target, _, wires, place = square(seed)
    used = in_use(net, ours, place)
    net.cut(wires[used], down=False)
    link = ours.engine.open_link(ours.outbound(place), net.now)
    net.run(60.0, lambda: link.state is State.CLOSED)
    assert link.state is State.CLOSED
    net.run(5.0, lambda: ours.engine.paths.usable(place.hash) is not None)
    assert in_use(net, ours, place) != used
    assert link_between(net, ours, place, target, 20.0).state is State.ACTIVE


def test_a_relay_that_restarts_carries_new_links() -> None:
    net = Network(seed=31)
    nodes = net.relays(3)
    net.line(nodes)
    place = net.announce(nodes[2])
    net.settle()
    link = link_between(net, nodes[0], place, nodes[2])
    net.remove(nodes[1])
    net.run(1.0)
    assert link.state is State.CLOSED, "its interface is gone"
    again = net.relay("n1 again")
    net.join(nodes[0], again)
    net.join(again, nodes[2])
    net.run(1.5)
    net.announce(nodes[2], destination=place)
    net.settle()
    stream(net, link_between(net, nodes[0], place, nodes[2]), far_end(nodes[2]), 20_000)


def test_the_rest_of_a_ring_takes_over_from_a_dead_relay() -> None:
    net = Network(seed=32)
    nodes = net.relays(7)
    net.ring(nodes)
    place = net.announce(nodes[3])
    net.settle()
    first = net.way(nodes[0], place)
    link = link_between(net, nodes[0], place, nodes[3])
    stream(net, link, far_end(nodes[3]), 20_000)
    net.remove(first[1])
    net.run(1.5)
    net.announce(nodes[3], destination=place)
    net.settle()
    second = net.way(nodes[0], place)
    assert second[-1] is nodes[3] and len(second) == 5
    stream(net, link_between(net, nodes[0], place, nodes[3]), far_end(nodes[3]), 20_000)


# -- asking -------------------------------------------------------------------------------------------------------


def requests_on(wires: Sequence[Wire]) -> list[int]:
    return [sum(raw[:2] == b"\x08\x00" and len(raw) == 67 for raw in wire.sent) for wire in wires]


def test_a_search_through_a_ring_ends_and_asks_each_interface_once() -> None:
    net = Network(seed=41)
    nodes = net.relays(5)
    net.ring(nodes, mode=Mode.GATEWAY)
    asker = net.node("asker")
    net.join(asker, nodes[0], mode=Mode.GATEWAY)
    hidden = net.node("hidden")
    net.join(hidden, nodes[2], mode=Mode.GATEWAY)
    place = hidden.inbound("hidden")
    assert net.ask(asker, place, 20.0)
    net.run(10.0)
    assert max(requests_on(net.wires)) <= 1
    way = net.way(asker, place)
    assert way[-1] is hidden and len({id(node) for node in way}) == len(way)


def test_a_search_for_what_nobody_has_ends() -> None:
    net = Network(seed=42)
    nodes = net.relays(5)
    net.ring(nodes, mode=Mode.GATEWAY)
    stranger = Network(seed=43).node("stranger").inbound("nowhere")
    assert not net.ask(nodes[0], stranger, 20.0)
    net.run(60.0)
    assert max(requests_on(net.wires)) <= 2  # our own, and that of the neighbour that asks on
    for node in nodes:
        assert node.engine.transport is not None
        assert not node.engine.transport.searches.waiting and not node.engine.transport.searches.in_flight


@pytest.mark.parametrize(
    ("source", "out", "heard"),
    [
        (Mode.FULL, Mode.FULL, True),
        (Mode.FULL, Mode.ACCESS_POINT, False),
        (Mode.ROAMING, Mode.BOUNDARY, False),
        (Mode.BOUNDARY, Mode.ROAMING, False),
        (Mode.ROAMING, Mode.FULL, True),
        (Mode.GATEWAY, Mode.ROAMING, True),
    ],
)
def test_modes_decide_where_announces_go(source: Mode, out: Mode, heard: bool) -> None:
    net = Network(seed=44)
    left, right = net.node("left"), net.node("right")
    relay = net.relay("relay")
    net.join(left, relay, mode=source)
    net.join(relay, right, mode=out)
    place = net.announce(left)
    net.settle()
    assert (right.engine.paths.usable(place.hash) is not None) is heard


def test_a_slow_interface_gets_its_share_and_the_nearest_first() -> None:
    """1,200 bit/s with 2 %: an announce of about 190 bytes buys a minute of silence."""
    net = Network(seed=45)
    relay, slow = net.relay("relay"), net.node("slow")
    sources = [net.node(f"s{i}") for i in range(4)]
    for source in sources:
        net.join(source, relay)
    wire, _ = net.join(relay, slow, bitrate=1200, policy=Policy(ingress_control=False))
    for source in sources:
        net.announce(source)
    net.run(5.0)
    assert len(wire.sent) == 1
    net.run(400.0)
    assert 4 <= len(wire.sent) <= 8
    assert OPEN.announce_cap == 1.0
