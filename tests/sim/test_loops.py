"""Ways never come to a node twice, whatever is lost, repeated, late or newer.  Protocol 02, sections 6.3 and 21 (5)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sim.checks import is_rebroadcast, loops, only_newer, passed_on_too_often, rebroadcasts
from tests.sim.network import Network


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(n, marks=pytest.mark.soak) for n in range(4, 40))])
def test_no_loop_at_any_moment_while_announces_cross(seed: int) -> None:
    """Every destination announces again and again, on wires that lose, repeat and reorder."""
    net = Network(seed)
    nodes = net.relays(16)
    net.tangle(nodes, 12)
    for wire in net.wires:
        wire.loss, wire.duplication, wire.jitter = 0.1, 0.2, 0.5
    places = {node: node.inbound(node.name) for node in nodes[:6]}
    with only_newer(net):
        for n in range(60):
            if n % 2 == 0:
                node = net.random.choice(list(places))
                net.announce(node, destination=places[node])
            net.run(0.25)
            assert not list(loops(net, places.values())), f"after {n / 4} s"
        net.run(15.0)
    assert not list(loops(net, places.values()))
    assert max(rebroadcasts(net).values()) <= 2


Graphs = st.integers(2, 7).flatmap(
    lambda count: st.tuples(
        st.tuples(*(st.integers(0, i - 1) for i in range(1, count))),  # a tree: whom each node joins
        st.sets(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)).filter(lambda e: e[0] < e[1])),
        st.lists(st.sampled_from((0.001, 0.05, 0.3, 2.0)), min_size=1, max_size=8),  # delays, in turn
        st.integers(0, 2**32),
    )
)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(Graphs)
def test_any_small_graph_converges(graph: tuple[tuple[int, ...], set[tuple[int, int]], list[float], int]) -> None:
    tree, more, delays, seed = graph
    net = Network(seed)
    nodes = net.relays(len(tree) + 1)
    edges = [(i + 1, j) for i, j in enumerate(tree)] + sorted(more)
    for n, (a, b) in enumerate(edges):
        net.join(nodes[a], nodes[b], delay=delays[n % len(delays)])
    places = {node: net.announce(node) for node in nodes}
    for _ in range(20):
        net.run(0.5)
        assert not list(loops(net, places.values()))
    net.settle()
    for source in nodes:
        for owner, place in places.items():
            way = net.way(source, place)
            assert way[-1] is owner and len(set(way)) == len(way)
            assert source is owner or source.engine.paths.paths[place.hash].hops == len(way) - 1
    assert max(rebroadcasts(net).values()) <= 2
    assert net.delivers(nodes[0], places[nodes[-1]])


def test_a_packet_in_a_circle_of_old_ways_ends_there() -> None:
    """After a failure a node takes what a neighbour answers that relied on it, and not knowing, nobody is to blame. The
    duplicate check ends what circles there, and the next announce ends the circle.

        target - a - b - c, and a slow cable from c to a
    """
    net = Network(seed=4)
    a, b, c = nodes = net.relays(3)
    net.line(nodes)
    net.join(c, a, delay=3.0)
    target = net.node("target")
    last = net.join(a, target)
    place = net.announce(target)
    net.settle()
    assert net.way(c, place) == [c, b, a, target]
    net.cut(last)
    assert net.ask(a, place, 10.0)
    assert list(loops(net, [place])) == [["n0", "n2", "n1", "n0"]]
    before = net.relayed()
    assert b.engine.send_packet(b.outbound(place), b"round and round", net.now) is not None
    net.run(60.0)
    assert net.relayed() - before <= len(nodes)
    net.mend(last)
    net.announce(target, destination=place)
    net.settle()
    assert not list(loops(net, [place])) and all(net.way(node, place)[-1] is target for node in nodes)
    assert net.delivers(c, place)


@pytest.mark.parametrize("seed", range(6))
def test_an_echo_is_no_way_around_a_cable_that_is_out_for_a_moment(seed: int) -> None:
    """c passes on what it has heard of b, and b, whose own way is out just then, does not take that for another way.

    target - a - b - c
    """
    net = Network(seed)
    a, b, c = nodes = net.relays(3)
    cables = net.line(nodes)
    target = net.node("target")
    net.join(target, a)
    place = net.announce(target)
    net.run(5.0, lambda: c.engine.paths.usable(place.hash) is not None)
    heard = [raw for raw in cables[1][1].sent if is_rebroadcast(raw)]
    assert not heard, "c has not passed it on yet"
    net.cut(cables[0])
    net.run(15.0)
    assert any(is_rebroadcast(raw) for raw in cables[1][1].sent)
    assert not list(loops(net, [place])) and net.way(b, place) == [b]
    net.mend(cables[0])
    assert net.way(c, place) == [c, b, a, target] and net.delivers(c, place)


@pytest.mark.parametrize("seed", range(6))
def test_a_neighbour_as_near_as_we_are_is_a_way_around(seed: int) -> None:
    """Its copy of the announce cannot have come from us.

    target - a - b, and a - d - b
    """
    net = Network(seed)
    a, b, d = net.relays(3)
    cable = net.join(a, b)
    net.join(a, d)
    around = net.join(d, b)
    target = net.node("target")
    net.join(target, a)
    place = net.announce(target)
    net.run(5.0, lambda: b.engine.paths.usable(place.hash) is not None)
    assert not any(map(is_rebroadcast, around[0].sent)), "d has not passed it on yet"
    net.cut(cable)
    net.run(15.0, lambda: any(map(is_rebroadcast, around[0].sent)))
    net.run(1.0)
    assert net.way(b, place) == [b, d, a, target] and net.delivers(b, place)


def test_the_same_seed_is_the_same_run() -> None:
    def run(seed: int) -> list[bytes]:
        net = Network(seed)
        nodes = net.relays(12)
        net.tangle(nodes, 10)
        for wire in net.wires:
            wire.loss, wire.duplication, wire.jitter = 0.1, 0.2, 0.5
        places = [net.announce(node) for node in nodes]
        net.run(3.0)
        net.restart(nodes[4])
        net.settle()
        net.delivers(nodes[0], places[-1])
        return [raw for wire in net.wires for raw in wire.sent]

    assert run(1) == run(1) != run(2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(n, marks=pytest.mark.soak) for n in range(3, 30))])
def test_churn_is_survived(seed: int) -> None:
    """Cables break and are mended, relays start anew and forget, nodes move; after one round of announces all is well,
    and nothing was sent more than twice for each time that it was news."""
    net = Network(seed)
    nodes = net.relays(14)
    net.tangle(nodes, 14)
    walkers = [net.node(f"w{i}") for i in range(3)]
    at = {walker: net.join(walker, net.random.choice(nodes)) for walker in walkers}
    owners = [*nodes[:4], *walkers]
    places = {owner: net.announce(owner) for owner in owners}
    net.settle()
    cables = [wires for wires in zip(net.wires[::2], net.wires[1::2], strict=True) if wires not in at.values()]
    broken: list[tuple[object, object]] = []
    for _ in range(40):
        what = net.random.randrange(6)
        if what == 0 and len(broken) < 6:
            cable = net.random.choice(cables)
            net.cut(cable, down=net.random.random() < 0.5)
            broken.append(cable)
        elif what == 1 and broken:
            net.mend(broken.pop(0))  # type: ignore[arg-type]
        elif what == 2:
            net.restart(net.random.choice(nodes[4:]), noticed=net.random.random() < 0.5)
        elif what == 3:
            walker = net.random.choice(walkers)
            net.cut(at[walker])
            at[walker] = net.join(walker, net.random.choice(nodes))
            net.announce(walker, destination=places[walker])
        elif what == 4:
            owner = net.random.choice(owners)
            net.announce(owner, destination=places[owner])
        else:
            net.ask(net.random.choice(nodes), places[net.random.choice(owners)], 2.0)
        net.run(net.random.uniform(0.0, 3.0))
    for cable in broken:
        net.mend(cable)  # type: ignore[arg-type]
    net.run(2.0)
    for owner, place in places.items():
        net.announce(owner, destination=place)
    net.settle()
    assert not list(loops(net, places.values()))
    for owner, place in places.items():
        for source in [*nodes, *walkers]:
            assert net.way(source, place)[-1] is owner, f"{source.name} to {owner.name}"
        assert net.delivers(net.random.choice([node for node in nodes if node is not owner]), place)
    assert not passed_on_too_often(net)
