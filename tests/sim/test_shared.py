"""Programs behind a shared instance.  Protocol 02, sections 11 and 12."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from rnsfast.engine.destination import Destination, Direction
from rnsfast.engine.disguise import DELTAS
from rnsfast.engine.linkstate import State
from rnsfast.engine.membership import SETTLE
from rnsfast.wire.drop import Drop
from rnsfast.wire.packet import (
    ANNOUNCE,
    DATA,
    GROUP,
    HEADER_2,
    LINK,
    LINKREQUEST,
    PLAIN,
    SINGLE,
    TRANSPORT,
    make_raw,
)
from rnsfast.wire.pathrequest import PATH_REQUEST_DESTINATION
from tests.sim.network import Network
from tests.sim.test_links import far_end, link_between, stream
from tests.virtualnet import SimNode, Wire


@dataclass
class House:
    """far - relay - instance, and two programs behind the instance."""

    net: Network
    far: SimNode
    relay: SimNode
    instance: SimNode
    programs: list[SimNode]
    outside: tuple[Wire, Wire]  # between relay and instance
    inside: list[tuple[Wire, Wire]]  # between instance and programs

    @property
    def nodes(self) -> list[SimNode]:
        return [self.far, self.relay, self.instance, *self.programs]


def house(seed: int = 1, *, transport: bool, **options: int) -> House:
    net = Network(seed=seed)
    far, relay = net.relays(2)
    instance = net.node("instance", transport=transport, shared_instance=True, **options)
    net.join(far, relay)
    outside = net.join(relay, instance)
    programs = [net.node(name, behind_instance=True) for name in ("one", "two")]
    inside = [net.behind(instance, program) for program in programs]
    return House(net, far, relay, instance, programs, outside, inside)


@pytest.fixture(params=[True, False], ids=["transport", "plain"])
def at_home(request: pytest.FixtureRequest) -> Iterator[House]:
    yield house(transport=request.param)


def hops(node: SimNode, place: Destination) -> int:
    path = node.engine.paths.usable(place.hash)
    assert path is not None, f"{node.name} has no path"
    return path.hops


def test_everybody_hears_of_everybody_and_connections_are_no_hops(at_home: House) -> None:
    places = {node.name: at_home.net.announce(node) for node in at_home.nodes}
    at_home.net.settle()
    expected = {
        "n0": {"n1": 1, "instance": 2, "one": 2, "two": 2},
        "instance": {"n0": 2, "n1": 1, "one": 0, "two": 0},
        "one": {"n0": 2, "n1": 1, "instance": 0, "two": 0},
    }
    for node in at_home.nodes:
        if node.name in expected:
            assert {name: hops(node, places[name]) for name in expected[node.name]} == expected[node.name]


def test_packets_are_proved_in_every_direction(at_home: House) -> None:
    net = at_home.net
    places = {node: net.announce(node) for node in at_home.nodes}
    net.settle()
    for source in at_home.nodes:
        for target, place in places.items():
            if source is not target:
                assert net.delivers(source, place), f"{source.name} to {target.name}"
    for node in at_home.nodes:
        for port in node.engine.ports:
            assert not port.drops[Drop.NOT_FORWARDED] and not port.drops[Drop.LINK_HOPS]


@pytest.mark.parametrize(("source", "target"), [(0, 3), (3, 0), (3, 4), (2, 3), (3, 2)])
def test_links_carry_streams_both_ways(at_home: House, source: int, target: int) -> None:
    net, start, end = at_home.net, at_home.nodes[source], at_home.nodes[target]
    place = net.announce(end)
    net.settle()
    link = link_between(net, start, place, end)
    assert link.mtu == far_end(end).mtu == (262_144 if source > 1 and target > 1 else 16_384)
    stream(net, link, far_end(end), 100_000)
    stream(net, far_end(end), link, 50_000)
    assert link.state is State.ACTIVE


def test_a_program_that_was_only_introduced_is_found_and_nobody_hears_of_it_before(at_home: House) -> None:
    net, (one, two) = at_home.net, at_home.programs
    place = one.inbound("quiet")
    net.run(SETTLE + 1.0)
    assert hops(at_home.instance, place) == 0 and hops(two, place) == 0
    net.settle()
    assert at_home.relay.engine.paths.usable(place.hash) is None
    assert net.ask(at_home.far, place) is False  # a full interface asks nobody on: the relay does not search
    assert net.ask(at_home.relay, place) and hops(at_home.relay, place) == 1
    link_between(net, at_home.relay, place, one)


def test_who_registers_again_and_again_is_introduced_all_the_same(at_home: House) -> None:
    net, one = at_home.net, at_home.programs[0]
    places = []
    for n in range(20):
        places.append(one.inbound(f"number{n}"))
        if n == 3:
            places[-1].app_data = bytes(400)  # more than an announce carries
        net.run(0.2)
    paths = at_home.instance.engine.paths
    assert sum(paths.usable(place.hash) is not None for place in places) >= 17
    net.run(1.0)
    assert [n for n, place in enumerate(places) if paths.usable(place.hash) is None] == [3]


def test_a_program_finds_what_its_instance_does_not_know(at_home: House) -> None:
    net, (one, _) = at_home.net, at_home.programs
    place = at_home.relay.inbound("unheard")
    assert net.ask(one, place) and hops(one, place) == 1
    link_between(net, one, place, at_home.relay)


def test_a_program_may_ask_again_sooner_than_the_network(at_home: House) -> None:
    net, (one, _) = at_home.net, at_home.programs
    place = at_home.relay.inbound("late")
    for wire in at_home.outside:
        wire.cut = True  # unnoticed
    assert not net.ask(one, place, patience=15.0)
    for wire in at_home.outside:
        wire.cut = False
    assert net.ask(one, place, patience=5.0)


def test_the_instance_is_restarted(at_home: House) -> None:
    net, (one, _) = at_home.net, at_home.programs
    place, away = net.announce(one), net.announce(at_home.far)
    net.settle()
    link = link_between(net, one, away, at_home.far)
    net.restart(at_home.instance)
    assert link.state is State.CLOSED and not one.engine.paths.paths
    net.run(SETTLE + 1.0)
    assert hops(at_home.instance, place) == 0
    net.announce(at_home.far, destination=away)
    net.settle()
    link_between(net, one, away, at_home.far)
    link_between(net, at_home.far, place, one)


def test_a_program_that_has_left_is_offered_to_nobody(at_home: House) -> None:
    net, (one, two) = at_home.net, at_home.programs
    place = net.announce(one)
    net.settle()
    net.unplug(at_home.inside[0][0])
    net.run(1.0)
    assert at_home.instance.engine.paths.usable(place.hash) is None
    transport = at_home.instance.engine.transport
    assert transport is not None and len(transport.clients) == 1
    two.engine.paths.drop(place.hash)
    assert not net.ask(two, place, patience=5.0) or hops(two, place) > 0


def test_plain_packets_go_between_network_and_programs_and_no_further(at_home: House) -> None:
    net, one = at_home.net, at_home.programs[0]
    everybody = [*at_home.nodes]
    for node in everybody:
        node.engine.register(Destination(None, Direction.IN, PLAIN, "test", "all"))

    def reached(source: SimNode) -> set[str]:
        before = {node: len(node.recorder.named("packet_arrived")) for node in everybody}
        source.engine.send_packet(Destination(None, Direction.OUT, PLAIN, "test", "all"), b"hello", net.now)
        net.run(1.0)
        counts = {node: len(node.recorder.named("packet_arrived")) - n for node, n in before.items()}
        assert max(counts.values()) == 1
        return {node.name for node, count in counts.items() if count}

    assert reached(one) == {"instance", "two", "n1"}
    assert reached(at_home.relay) == {"instance", "one", "two", "n0"}
    assert reached(at_home.instance) == {"one", "two", "n1"}
    assert reached(at_home.far) == {"n1"}


def test_group_packets_are_not_passed_on(at_home: House) -> None:
    net = at_home.net
    before = len(at_home.inside[1][0].sent), len(at_home.outside[1].sent)
    raw = make_raw(GROUP << 2 | DATA, b"g" * 16, 0, b"hello")
    at_home.instance.engine.receive(at_home.inside[0][0].source, [raw], net.now)
    net.run(1.0)
    assert (len(at_home.inside[1][0].sent), len(at_home.outside[1].sent)) == before


def two_networks(seed: int = 3) -> tuple[Network, SimNode, SimNode, SimNode, list[tuple[Wire, Wire]]]:
    """A plain shared instance with a program, between two nodes."""
    net = Network(seed=seed)
    left, right = net.relays(2)
    instance = net.node("instance", shared_instance=True)
    program = net.node("program", behind_instance=True)
    wires = [net.join(left, instance), net.join(right, instance)]
    net.behind(instance, program)
    return net, left, right, instance, wires


def test_a_plain_instance_carries_nothing_from_one_network_to_the_other() -> None:
    net, left, right, instance, wires = two_networks()
    place = net.announce(right)
    net.settle()
    assert instance.engine.paths.usable(place.hash) is not None  # it knows, and keeps it to itself
    to_left = wires[0][1]
    assert not to_left.sent
    assert not net.ask(left, place, patience=50.0)
    sent = [raw for raw in to_left.sent if raw[0] & 3 == ANNOUNCE]
    assert not sent
    head = bytes((HEADER_2 | TRANSPORT, 0)) + instance.engine.transport_id
    forged = [
        head + place.hash + b"\0" + b"x" * 40,
        bytes((head[0] | LINKREQUEST,)) + head[1:] + place.hash + b"\0" + b"k" * 64,
        make_raw(LINK << 2 | DATA, place.hash, 0, b"y" * 40),
        make_raw(SINGLE << 2 | DATA, place.hash, 0, b"z" * 40),
    ]
    before = len(wires[1][1].sent)
    port = to_left.source
    for raw in forged:
        instance.engine.receive(port, [raw], net.now)
    net.run(20.0)
    questions = [raw for raw in wires[1][1].sent[before:] if raw[2:18] != PATH_REQUEST_DESTINATION]
    assert not questions
    assert port.drops[Drop.NOT_FORWARDED] == 2
    assert instance.engine.transport is not None and not instance.engine.transport.relay.forwarded


def test_who_waits_in_the_other_network_is_not_answered_for_what_is_there() -> None:
    net, left, right, _, wires = two_networks()
    place = right.inbound("later")
    for _ in range(3):  # the first is passed to the program, the next are joined or not
        left.engine.announcing.request_path(place.hash, net.now)
        net.run(2.0)
    net.announce(right, destination=place)
    net.settle()
    assert not [raw for raw in wires[0][1].sent if raw[0] & 3 == ANNOUNCE]


def test_questions_of_the_network_are_not_multiplied_without_bound() -> None:
    net, _, _, instance, wires = two_networks()
    transport = instance.engine.transport
    assert transport is not None
    port = wires[0][1].source
    to_program = next(wire for wire in net.wires if wire.source in transport.clients)
    question = make_raw(PLAIN << 2 | DATA, PATH_REQUEST_DESTINATION, 0, b"d" * 16 + b"t" * 15)
    for n in range(200):
        instance.engine.receive(port, [question + bytes((n,))], net.now)
        net.run(0.01)
    assert sum(raw[2:18] == PATH_REQUEST_DESTINATION for raw in to_program.sent) == 1
    assert not transport.searches.awaited


@pytest.mark.parametrize("transport", [True, False], ids=["transport", "plain"])
@pytest.mark.parametrize("delta", [DELTAS.start, DELTAS.stop - 1])
def test_what_is_ours_may_seem_to_come_from_further_away(transport: bool, delta: int) -> None:
    at_home = house(transport=transport, local_hops_delta=delta)
    net, one = at_home.net, at_home.programs[0]
    mine, theirs, away = net.announce(at_home.instance), net.announce(one), net.announce(at_home.far)
    net.settle()
    assert (hops(at_home.relay, mine), hops(at_home.relay, theirs)) == (delta + 1, delta + 1)
    assert (hops(one, mine), hops(at_home.instance, theirs), hops(one, away)) == (0, 0, 2)
    for owner, place in ((at_home.instance, mine), (one, theirs)):
        assert net.delivers(at_home.far, place) and net.delivers(owner, away)
        link = link_between(net, at_home.far, place, owner)
        stream(net, link, far_end(owner), 30_000)
        link = link_between(net, owner, away, at_home.far)
        stream(net, link, far_end(at_home.far), 30_000)
    assert net.delivers(one, mine) and net.delivers(at_home.instance, theirs)
    sent = at_home.outside[1].sent
    assert {raw[1] for raw in sent if raw[0] & 0x0C not in (PLAIN << 2, GROUP << 2)} <= {delta, 2, 3}
    assert {raw[1] for raw in sent if raw[0] & 0x0C == PLAIN << 2} <= {0}


def test_the_same_destination_at_the_instance_and_at_a_program_is_the_instances() -> None:
    at_home = house(transport=True)
    net, one = at_home.net, at_home.programs[0]
    place = net.announce(at_home.instance)
    one.engine.register(place)
    net.announce(one, destination=place)
    net.settle()
    assert net.delivers(at_home.far, place)
    assert len(at_home.instance.recorder.named("packet_arrived")) == 1
    assert not one.recorder.named("packet_arrived")


def test_a_program_gives_way_to_nobody_and_carries_nothing() -> None:
    with pytest.raises(ValueError, match="neither carries"):
        Network().node("both", behind_instance=True, transport=True)
