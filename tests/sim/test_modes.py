"""Where announces go by the modes of interfaces, in small networks.  Protocol 02, sections 4.3 and 21 (10)."""

from __future__ import annotations

import pytest

from rnsfast.engine.port import Mode, Policy
from tests.sim.network import Network

M = Mode

#: For every mode of the outgoing interface, the modes from which nothing goes there. Row by row as in the protocol.
SHUT_TO: dict[Mode, set[Mode]] = {
    M.FULL: set(),
    M.POINT_TO_POINT: set(),
    M.GATEWAY: set(),
    M.ACCESS_POINT: set(M),
    M.INTERNAL: {M.BOUNDARY},
    M.ROAMING: {M.ROAMING, M.BOUNDARY},
    M.BOUNDARY: {M.ROAMING},
}


@pytest.mark.parametrize("out", list(M))
@pytest.mark.parametrize("source", list(M))
def test_modes_decide_where_announces_go(source: Mode, out: Mode) -> None:
    net = Network(seed=44)
    left, right = net.node("left"), net.node("right")
    relay = net.relay("relay")
    from_left, _ = net.join(left, relay)
    from_left.sink.mode = source
    towards, _ = net.join(relay, right)
    towards.source.mode = out
    place = net.announce(left)
    net.settle()
    heard = source not in SHUT_TO[out]
    assert (right.engine.paths.usable(place.hash) is not None) is heard
    assert net.ask(right, place, 3.0), "who asks is answered in every mode"
    assert net.delivers(right, place)


@pytest.mark.parametrize("mode", list(M))
def test_own_destinations_are_announced_everywhere_but_to_access_points(mode: Mode) -> None:
    net = Network(seed=45)
    relay, other = net.relay("relay"), net.node("other")
    wire, _ = net.join(relay, other)
    wire.source.mode = mode
    place = net.announce(relay)
    net.run(1.0)
    assert bool(wire.sent) is (mode is not Mode.ACCESS_POINT)
    assert net.ask(other, place, 3.0)


def test_an_access_point_keeps_its_air_free_and_its_clients_reachable() -> None:
    """Two clients on access point interfaces of one relay, a backbone behind it: clients hear no announce of others,
    ask for what they want, and are reached from everywhere."""
    net = Network(seed=46)
    hub, backbone, server = net.relay("hub"), net.relay("backbone"), net.node("server")
    clients = [net.node(f"client{i}") for i in range(2)]
    air = []
    for client in clients:
        there, back = net.join(client, hub)
        there.sink.mode = Mode.ACCESS_POINT
        air.append(back)
    net.join(hub, backbone)
    net.join(backbone, server)
    places = {node: net.announce(node) for node in (*clients, server)}
    net.settle()
    assert [len(wire.sent) for wire in air] == [0, 0]
    assert net.delivers(server, places[clients[0]])
    assert net.ask(clients[0], places[server]) and net.delivers(clients[0], places[server])
    assert net.ask(clients[0], places[clients[1]]) and net.delivers(clients[0], places[clients[1]])


def test_a_roamer_takes_its_path_along() -> None:
    """A roaming client changes relays several times; from a fixed place it is reached after each announce."""
    net = Network(seed=47)
    relays = net.relays(4)
    net.ring(relays)
    home, roamer = net.node("home"), net.node("roamer")
    net.join(home, relays[0])
    place = roamer.inbound("roamer")
    cable = None
    for turn in (1, 2, 3, 2, 0, 1):
        if cable is not None:
            net.cut(cable)
        cable = net.join(roamer, relays[turn], mode=Mode.ROAMING)
        net.run(1.5)
        net.announce(roamer, destination=place)
        net.settle()
        assert net.way(home, place)[-2:] == [relays[turn], roamer]
        assert net.delivers(home, place)


def test_a_boundary_lets_announces_of_the_world_in_and_those_of_roamers_not_out() -> None:
    net = Network(seed=48)
    border, world, inside, roamer = net.relay("border"), net.node("world"), net.node("inside"), net.node("roamer")
    for node, mode in ((world, Mode.BOUNDARY), (inside, Mode.FULL), (roamer, Mode.ROAMING)):
        there, _ = net.join(node, border)
        there.sink.mode = mode
    places = {node: net.announce(node) for node in (world, inside, roamer)}
    net.settle()

    def knows(node: object, owner: object) -> bool:
        return node.engine.paths.usable(places[owner].hash) is not None  # type: ignore[attr-defined,index]

    assert knows(inside, world) and knows(world, inside) and knows(inside, roamer)
    assert not knows(world, roamer), "comes and goes: nothing for the world"
    assert not knows(roamer, world), "too much for it"
    assert knows(roamer, inside)


def test_an_internal_network_stays_inside_if_told_so() -> None:
    net = Network(seed=49)
    relay, inside, outside = net.relay("relay"), net.node("inside"), net.node("outside")
    within, _ = net.join(inside, relay)
    within.sink.mode = Mode.INTERNAL
    net.join(relay, outside, policy=Policy(ingress_control=False, announces_from_internal=False))
    place = net.announce(inside)
    net.settle()
    assert outside.engine.paths.usable(place.hash) is None
