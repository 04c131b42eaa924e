"""Every destination is reached from everywhere, without loops, in the time the protocol allows and with the announces
it allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from rnsfast.engine.destination import Destination
from rnsfast.engine.linkstate import State
from rnsfast.engine.port import DEFAULT_POLICY
from tests.sim.checks import rebroadcasts
from tests.sim.network import Network
from tests.virtualnet import SimNode

Build = Callable[[Network, Sequence[SimNode]], object]

#: name -> (nodes, how they are joined, longest way in hops)
SMALL: dict[str, tuple[int, Build, int]] = {
    "line": (10, lambda net, nodes: net.line(nodes), 9),
    "ring": (11, lambda net, nodes: net.ring(nodes), 10),
    "star": (12, lambda net, nodes: net.star(nodes[0], nodes[1:]), 2),
    "grid": (25, lambda net, nodes: net.grid(nodes, 5), 24),
    "random": (40, lambda net, nodes: net.tangle(nodes, 25), 39),
}

HOP = 0.5 + 0.25 + 0.1  # seconds an announce takes for a hop at most: window, round, wire


def converge(net: Network, nodes: Sequence[SimNode]) -> tuple[dict[SimNode, Destination], float]:
    places = {node: net.announce(node) for node in nodes}
    return places, net.settle()


def check_everything_is_reached(net: Network, nodes: Sequence[SimNode], places: dict[SimNode, Destination]) -> int:
    """By the tables: from everywhere to everywhere, nobody twice. Returns the longest way in hops."""
    longest = 0
    for source in nodes:
        for owner, place in places.items():
            if owner is source:
                continue
            way = net.way(source, place)
            assert way[-1] is owner, f"{source.name} to {owner.name}: {[node.name for node in way]}"
            assert len({id(node) for node in way}) == len(way), "a loop"
            path = source.engine.paths.usable(place.hash)
            assert path is not None and path.hops == len(way) - 1
            longest = max(longest, len(way) - 1)
    return longest


def report(net: Network, shape: str, nodes: int, announced: int, longest: int, took: float) -> None:
    """One row of the table in docs/architecture.md; shown with `pytest -s`."""
    share = net.announces_sent / announced / len(net.wires)
    print(f"| {shape} | {nodes} | {announced} | {longest} | {took:.2f} s | {took / longest:.2f} s | {share:.2f} |")


@pytest.mark.parametrize("shape", SMALL)
def test_all_reach_all_in_time_and_without_loops(shape: str) -> None:
    count, build, diameter = SMALL[shape]
    net = Network(seed=3)
    nodes = net.relays(count)
    build(net, nodes)
    places, took = converge(net, nodes)
    longest = check_everything_is_reached(net, nodes, places)
    assert longest <= diameter
    assert took <= longest * HOP, f"{took} s for {longest} hops"
    net.run(20)
    assert max(rebroadcasts(net).values()) <= 2, "an announce was passed on too often"
    for source in net.random.sample(nodes, 6):
        for owner in net.random.sample(nodes, 3):
            if owner is not source:
                assert net.delivers(source, places[owner])
    report(net, shape, count, count, longest, took)


LARGE: dict[str, tuple[int, int, Build]] = {  # name -> (nodes, announced, how they are joined)
    "ring": (120, 20, lambda net, nodes: net.ring(nodes)),
    "star": (300, 30, lambda net, nodes: net.star(nodes[0], nodes[1:])),
    "grid": (400, 20, lambda net, nodes: net.grid(nodes, 20)),
    "random": (500, 50, lambda net, nodes: net.tangle(nodes, 350)),
    "random, all announce": (500, 500, lambda net, nodes: net.tangle(nodes, 350)),
    "grid, all announce": (400, 400, lambda net, nodes: net.grid(nodes, 20)),
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", [
    "ring", "star", "grid", "random",
    *(pytest.param(name, marks=[pytest.mark.soak, pytest.mark.timeout(1800)]) for name in LARGE if "all" in name),
])  # fmt: skip
def test_large_networks(shape: str) -> None:
    count, announced, build = LARGE[shape]
    net = Network(seed=count)
    nodes = net.relays(count)
    build(net, nodes)
    owners = net.random.sample(nodes, announced)
    places = {node: net.announce(node) for node in owners}
    took = net.settle()
    longest = check_everything_is_reached(net, nodes, places)
    assert took <= longest * HOP
    net.run(10.0)
    assert max(rebroadcasts(net).values()) <= 2
    for source in net.random.sample(nodes, 20):
        owner = net.random.choice([node for node in owners if node is not source])
        assert net.delivers(source, places[owner])
    report(net, shape, count, announced, longest, took)


@pytest.mark.parametrize("shape", SMALL)
def test_with_default_limits_everything_arrives_in_the_end(shape: str) -> None:
    """All announce at once, on young interfaces: most is held for up to 20 s and let in one by one, nothing is lost."""
    count, build, _ = SMALL[shape]
    net = Network(seed=3, policy=DEFAULT_POLICY)
    nodes = net.relays(count)
    build(net, nodes)
    places = {node: net.announce(node) for node in nodes}
    took = net.settle(quiet=60.0)
    longest = check_everything_is_reached(net, nodes, places)
    assert took <= 20 + 5.25 * count
    report(net, f"{shape}, default limits", count, count, longest, took)


@pytest.mark.slow
def test_the_longest_way_has_128_hops() -> None:
    net = Network(seed=9)
    nodes = net.relays(131)
    net.line(nodes)
    place = net.announce(nodes[0])
    net.settle()
    for hops, node in enumerate(nodes):
        path = node.engine.paths.paths.get(place.hash)
        assert (path.hops if path is not None else 0) == (hops if hops <= 128 else 0)
    assert net.delivers(nodes[128], place, 900.0)
    link = nodes[128].engine.open_link(nodes[128].outbound(place), net.now)
    net.run(900.0, lambda: bool(nodes[0].recorder.named("link_established")))
    assert link.state is State.ACTIVE and link.hops == 128


def test_convergence_with_loss_duplicates_and_reordering() -> None:
    """What is lost comes with the second transmission, or with the next announce."""
    net = Network(seed=11)
    nodes = net.relays(16)
    net.grid(nodes, 4)
    for wire in net.wires:
        wire.loss, wire.duplication, wire.jitter = 0.05, 0.2, 0.2
    places, _ = converge(net, nodes)
    for place in places.values():
        net.announce(next(n for n, p in places.items() if p is place), destination=place)
    net.settle()
    net.run(15)
    for wire in net.wires:
        wire.loss = 0.0
    for source in nodes:
        for owner, place in places.items():
            if owner is not source:
                way = net.way(source, place)
                assert way[-1] is owner and len({id(node) for node in way}) == len(way)


def test_a_partition_heals() -> None:
    net = Network(seed=5)
    left, right = net.relays(4), net.relays(4)
    net.ring(left)
    net.ring(right)
    bridge = net.join(left[0], right[0])
    places, _ = converge(net, [*left, *right])
    net.cut(bridge)
    net.run(5)
    assert not net.delivers(left[2], places[right[2]], 8.0)
    assert net.delivers(left[2], places[left[0]])
    net.mend(bridge)
    for node, place in places.items():
        net.announce(node, destination=place)
    net.settle()
    check_everything_is_reached(net, [*left, *right], places)
    assert net.delivers(left[2], places[right[2]])


def test_a_flapping_wire_is_left_for_the_other_way() -> None:
    net = Network(seed=6)
    nodes = net.relays(6)
    wires = net.ring(nodes)
    places, _ = converge(net, nodes)
    for _ in range(5):
        net.cut(wires[0])
        net.run(2)
        net.mend(wires[0])
        net.run(2)
    net.cut(wires[0])
    assert (
        nodes[0].engine.paths.usable(places[nodes[1]].hash) is None
        or net.way(nodes[0], places[nodes[1]])[1] is nodes[5]
    )
    net.announce(nodes[1], destination=places[nodes[1]])
    net.settle()
    assert net.delivers(nodes[0], places[nodes[1]])
    assert [node.name for node in net.way(nodes[0], places[nodes[1]])] == ["n0", "n5", "n4", "n3", "n2", "n1"]


def test_a_node_that_moves_is_reached_at_its_new_place() -> None:
    net = Network(seed=8)
    nodes = net.relays(6)
    net.line(nodes)
    walker = net.node("walker")
    here = net.join(walker, nodes[0])
    place = net.announce(walker)
    net.settle()
    assert net.delivers(nodes[5], place)
    net.cut(here)
    there = net.join(walker, nodes[4])
    assert there
    net.run(1.5)  # an announce of the same second would be no newer
    net.announce(walker, destination=place)
    net.settle()
    assert [node.name for node in net.way(nodes[5], place)] == ["n5", "n4", "walker"]
    assert net.delivers(nodes[5], place) and net.delivers(nodes[0], place)
