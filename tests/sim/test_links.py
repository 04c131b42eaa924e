"""Links over several hops: streams, MTUs, relays that go.  Protocol 02, sections 5.3 to 5.6."""

from __future__ import annotations

import hashlib
import random
from itertools import pairwise

import pytest

from rnsfast.engine.destination import Destination
from rnsfast.engine.link import Link
from rnsfast.engine.linkstate import State
from tests.engine.test_faults import Transfer
from tests.sim.network import Network
from tests.virtualnet import SimNode


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


# -- relays that go ------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("noticed", [True, False])
@pytest.mark.parametrize("hops", [2, 4, 6])
def test_a_link_ends_with_its_relay_and_is_made_again_over_what_is_left(hops: int, noticed: bool) -> None:
    """A relay in the middle is started anew and has forgotten everything. Its neighbours may not even notice."""
    net = Network(seed=33)
    nodes = net.relays(hops + 1)
    net.line(nodes)
    place = net.announce(nodes[-1])
    net.settle()
    link = link_between(net, nodes[0], place, nodes[-1])
    far = far_end(nodes[-1])
    stream(net, link, far, 20_000)
    net.restart(nodes[hops // 2], noticed=noticed)
    link.send_data(b"into the void", net.now)
    net.run(120.0, lambda: link.state is State.CLOSED and far.state is State.CLOSED)
    assert link.state is State.CLOSED and far.state is State.CLOSED
    net.announce(nodes[-1], destination=place)
    net.settle()
    assert net.way(nodes[0], place) == nodes
    stream(net, link_between(net, nodes[0], place, nodes[-1]), far_end(nodes[-1]), 20_000)


def test_many_links_share_a_relay() -> None:
    net = Network(seed=34)
    relay = net.relay("relay")
    sources, owners = [net.node(f"s{i}") for i in range(8)], [net.node(f"o{i}") for i in range(8)]
    net.star(relay, [*sources, *owners], paced=True)
    places = [net.announce(owner) for owner in owners]
    net.settle()
    ends = []
    for source, owner, place in zip(sources, owners, places, strict=True):
        link = link_between(net, source, place, owner)
        ends.append((link, far_end(owner)))
    transfers = [Transfer(net, a, b, random.Random(n).randbytes(100_000)) for n, (a, b) in enumerate(ends)]
    undone = list(transfers)

    def turn() -> bool:
        undone[:] = [transfer for transfer in undone if not transfer.turn()]
        return not undone

    turn()
    net.run(60.0, turn)
    assert not undone
    for transfer in transfers:
        transfer.check()
