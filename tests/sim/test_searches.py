"""Path requests: who is answered, who is asked, how often.  Protocol 02, sections 3.4, 7 and 21 (8)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rnsfast.engine.destination import Destination
from rnsfast.engine.port import Mode, Policy
from rnsfast.wire.packet import ANNOUNCE, CTX_PATH_RESPONSE, HEADER_2
from tests.sim.network import Network
from tests.virtualnet import SimNode, Wire


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
    assert max(requests_on(net.wires)) <= 1
    for node in nodes:
        assert node.engine.transport is not None
        assert not node.engine.transport.searches.waiting and not node.engine.transport.searches.in_flight


ALL_MODES = list(Mode)
SEARCHES = {Mode.ACCESS_POINT, Mode.GATEWAY, Mode.ROAMING, Mode.INTERNAL}  # these search everywhere
BORDERS = {Mode.BOUNDARY, Mode.GATEWAY}


@pytest.mark.parametrize("behind", ALL_MODES)
@pytest.mark.parametrize("asking", ALL_MODES)
def test_which_interfaces_search_for_those_behind_them(asking: Mode, behind: Mode) -> None:
    """asker - relay - hidden, which never announced: the relay asks on, or does not, by the modes of its interfaces."""
    net = Network(seed=46)
    asker, relay, hidden = net.node("asker"), net.relay("relay"), net.node("hidden")
    net.join(asker, relay, mode=asking)
    onward, _ = net.join(relay, hidden, mode=behind)
    place = hidden.inbound("hidden")
    expected = asking in SEARCHES or (asking is Mode.BOUNDARY and behind in BORDERS)
    assert net.ask(asker, place, 5.0) is expected
    assert requests_on([onward]) == [int(expected)]


def test_an_interface_can_be_told_to_search() -> None:
    net = Network(seed=47)
    asker, relay, hidden = net.node("asker"), net.relay("relay"), net.node("hidden")
    net.join(asker, relay, policy=Policy(recursive_prs=True))
    net.join(relay, hidden)
    assert net.ask(asker, hidden.inbound("hidden"), 5.0)


def gateway(count: int, **options: float) -> tuple[Network, SimNode, list[SimNode], SimNode, Wire, Destination]:
    """`count` askers at a relay that searches, and a destination behind it that nobody has heard of."""
    net = Network(seed=48)
    relay, hidden = net.relay("relay"), net.node("hidden")
    askers = [net.node(f"asker{i}") for i in range(count)]
    net.star(relay, askers, mode=Mode.GATEWAY)
    onward, _ = net.join(relay, hidden, mode=Mode.GATEWAY, **options)
    return net, relay, askers, hidden, onward, hidden.inbound("hidden")


def test_the_answer_reaches_everyone_who_waits() -> None:
    net, _, askers, _, onward, place = gateway(5, delay=2.0)
    for asker in askers:
        asker.engine.announcing.request_path(place.hash, net.now)
        net.run(0.3)
    assert requests_on([onward]) == [1], "the others only joined"
    net.run(6.0)
    for asker in askers:
        path = asker.engine.paths.usable(place.hash)
        assert path is not None and path.hops == 2
    answers = [raw for wire in net.wires for raw in wire.sent if raw[0] & 3 == ANNOUNCE and raw[0] & HEADER_2]
    assert len(answers) == 5 and {raw[34] for raw in answers} == {CTX_PATH_RESPONSE}


def test_an_unanswered_search_is_joined_for_45_seconds_and_then_made_anew() -> None:
    net, _, askers, hidden, onward, place = gateway(2)
    hidden.engine.deregister(place, net.now)
    assert not net.ask(askers[0], place, 1.0)
    assert not net.ask(askers[1], place, 1.0)
    net.run(40.0)
    assert not net.ask(askers[1], place, 1.0) and requests_on([onward]) == [1]
    hidden.engine.register(place)
    net.run(3.0)
    assert net.ask(askers[0], place, 3.0) and requests_on([onward]) == [2]


def test_a_known_path_is_told_at_once_with_its_hops() -> None:
    net = Network(seed=49)
    relays = net.relays(4)
    net.line(relays)
    place = net.announce(relays[3])
    net.settle()
    late = net.node("late")
    _, answers = net.join(late, relays[0])
    began = net.now
    assert net.ask(late, place, 3.0) and net.now - began < 0.4 + 0.25 + 0.1
    path = late.engine.paths.paths[place.hash]
    assert path.hops == 4 and path.next_hop == relays[0].engine.transport_id
    assert len(answers.sent) == 1 and net.delivers(late, place)


def test_a_roaming_neighbour_is_not_sent_back_where_it_came_from() -> None:
    """Both on one roaming interface (a shared medium): no answer over the interface the path leads over."""
    net = Network(seed=50)
    relay, there = net.relay("relay"), net.node("there")
    _, answers = net.join(there, relay, mode=Mode.ROAMING)
    place = net.announce(there)
    net.settle()
    sent = len(answers.sent)
    there.engine.deregister(place, net.now)  # it asks for what it has itself announced
    assert not net.ask(there, place, 5.0) and len(answers.sent) == sent


def test_the_next_hop_is_not_told_to_come_back() -> None:
    """Two relays that each think the other one knows would send packets to and fro (trap T22)."""
    net = Network(seed=51)
    near, far, owner = net.relay("near"), net.relay("far"), net.node("owner")
    net.join(far, near)
    last = net.join(near, owner)
    place = net.announce(owner)
    net.settle()
    net.cut(last)
    assert not net.ask(near, place, 5.0)
    assert net.way(far, place) == [far, near]


def test_one_neighbour_more_than_asked_for_is_no_storm() -> None:
    """A full mesh of eight that all search: the request passes each cable at most once in each direction."""
    net = Network(seed=52)
    nodes = net.relays(8)
    for i, a in enumerate(nodes):
        for b in nodes[i + 1 :]:
            net.join(a, b, mode=Mode.GATEWAY, delay=net.random.uniform(0.005, 0.05))
    stranger = Network(seed=53).node("stranger").inbound("nowhere")
    assert not net.ask(nodes[0], stranger, 60.0)
    assert max(requests_on(net.wires)) <= 1 and sum(requests_on(net.wires)) <= 8 * 7


def test_a_full_relay_does_not_ask_on_behalf_of_a_burst() -> None:
    """More than three requests a second on a young interface: no searches, but known destinations are answered."""
    net = Network(seed=54)
    asker, relay, owner = net.node("asker"), net.relay("relay"), net.node("owner")
    net.join(asker, relay, mode=Mode.GATEWAY, policy=Policy())
    onward, _ = net.join(relay, owner, mode=Mode.GATEWAY)
    place = net.announce(owner)
    net.settle()
    elsewhere = Network(seed=55).node("elsewhere")
    strangers = [elsewhere.inbound(str(n)) for n in range(30)]
    for stranger in strangers:
        asker.engine.announcing.request_path(stranger.hash, net.now)
        net.run(0.05)
    assert requests_on([onward])[0] <= 4
    asker.engine.paths.drop(place.hash)
    assert net.ask(asker, place, 2.0)
