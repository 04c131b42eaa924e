"""How often, when and in which order announces are passed on.  Protocol 02, sections 8 and 21 (9)."""

from __future__ import annotations

from itertools import pairwise

import pytest

from rnsfast.engine.port import Policy
from rnsfast.wire.drop import Drop
from rnsfast.wire.packet import ANNOUNCE, CTX_PATH_RESPONSE
from tests.sim.checks import is_rebroadcast
from tests.sim.network import Network
from tests.virtualnet import SimNode, Wire

TICK = 0.25  # seconds: what falls due within one leaves together


class Times:
    """When a wire got its rebroadcasts."""

    def __init__(self, net: Network, wire: Wire) -> None:
        self.at: list[float] = []
        carry, began = wire.carry, net.now

        def noting(raw: bytes) -> None:
            if is_rebroadcast(raw):
                self.at.append(net.now - began)
            carry(raw)

        wire.carry = noting  # type: ignore[method-assign]


def order(wire: Wire, names: dict[bytes, str]) -> list[str]:
    """The destinations of the announces on a wire."""
    return [names[raw[18:34]] for raw in wire.sent if is_rebroadcast(raw)]


@pytest.mark.parametrize("seed", range(10))
def test_twice_where_nobody_else_passes_it_on(seed: int) -> None:
    net = Network(seed)
    source, relay, end = net.node("source"), net.relay("relay"), net.node("end")
    net.join(source, relay)
    wire, _ = net.join(relay, end)
    times = Times(net, wire)
    net.announce(source)
    net.run(60.0)
    first, second = times.at
    assert 0.01 <= first <= 0.01 + 0.5 + TICK
    assert 5.5 <= second - first <= 5.5 + TICK


@pytest.mark.parametrize("seed", range(10))
def test_once_where_the_next_node_is_heard_to_pass_it_on(seed: int) -> None:
    net = Network(seed)
    source, relays = net.node("source"), net.relays(2)
    net.join(source, relays[0])
    wire, _ = net.join(*relays)
    times = Times(net, wire)
    net.announce(source)
    net.run(60.0)
    assert len(times.at) == 1


def test_once_where_two_neighbours_at_our_distance_have_sent_it() -> None:
    """source - a, b, c, and these three connected among each other."""
    net = Network(seed=70)
    source, relays = net.node("source"), net.relays(3)
    net.star(source, relays)
    wires = net.ring(relays)
    net.announce(source)
    net.run(60.0)
    for there, back in wires:
        assert len([raw for raw in there.sent if is_rebroadcast(raw)]) == 1
        assert len([raw for raw in back.sent if is_rebroadcast(raw)]) == 1


def test_an_answer_does_not_lose_the_announce_it_was_set_aside_for() -> None:
    """Asked between its two transmissions: the answer goes to who asked, the second transmission to everyone."""
    net = Network(seed=71)
    source, relay, asker, end = net.node("source"), net.relay("relay"), net.node("asker"), net.node("end")
    net.join(source, relay)
    wire, _ = net.join(relay, end)
    asked, _ = net.join(relay, asker)
    place = net.announce(source)
    net.run(2.0)
    asker.engine.announcing.request_path(place.hash, net.now)
    net.run(60.0)
    assert len([raw for raw in wire.sent if is_rebroadcast(raw)]) == 2
    contexts = [raw[34] for raw in asked.sent if is_rebroadcast(raw)]
    assert contexts.count(CTX_PATH_RESPONSE) == 1 and len(contexts) == 3


def test_a_newer_announce_replaces_the_one_that_waits() -> None:
    net = Network(seed=72)
    source, relay, end = net.node("source"), net.relay("relay"), net.node("end")
    net.join(source, relay)
    wire, _ = net.join(relay, end)
    place = source.inbound("x")
    for n in range(3):
        source.engine.announcing.announce(place, bytes((n,)), net.now)
    net.run(60.0)
    sent = [raw[-1] for raw in wire.sent if is_rebroadcast(raw)]
    assert sent == [2, 2], "only the last of a burst is passed on"


def test_who_was_answered_first_passes_the_announce_on_all_the_same() -> None:
    """source - near - asker - end: `asker` waits for a path, so `near` answers before it passes on."""
    net = Network(seed=79)
    source, end = net.node("source"), net.node("end")
    near, asker = net.relay("near"), net.relay("asker")
    net.join(source, near)
    net.join(near, asker)
    wire, _ = net.join(asker, end)
    place = source.inbound("late")
    near.engine.announcing.request_path(place.hash, net.now)
    source.engine.deregister(place, net.now)
    for node in (end, asker):
        assert not net.ask(node, place, 1.0)
    source.engine.register(place)
    net.announce(source, destination=place)
    net.settle()
    assert net.way(end, place) == [end, asker, near, source]
    net.run(30.0)
    assert [raw[34] for raw in wire.sent if is_rebroadcast(raw)].count(0) <= 2


# -- bandwidth ----------------------------------------------------------------------------------------------------


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


def congested(seed: int) -> tuple[Network, SimNode, dict[bytes, str], list[SimNode], Wire]:
    """A relay with a slow interface, and sources one to five hops away from it."""
    net = Network(seed)
    relay, slow = net.relay("relay"), net.node("slow")
    chain = net.relays(5)
    net.line([relay, *chain])
    wire, _ = net.join(relay, slow, bitrate=1200, policy=Policy(ingress_control=False))
    return net, relay, {}, chain, wire


def test_what_waits_leaves_nearest_first() -> None:
    net, _, names, chain, wire = congested(73)
    for node in reversed(chain):
        place = net.announce(node)
        names[place.hash] = node.name
        net.run(3.0)  # the farthest announce first, and is the one that takes the only free place
    net.run(600.0)
    heard = list(dict.fromkeys(order(wire, names)))
    assert heard[0] == "n4" and heard[1:] == ["n0", "n1", "n2", "n3"]


def test_a_newer_announce_takes_the_place_of_the_one_in_the_queue() -> None:
    net, relay, names, chain, wire = congested(74)
    for node in chain:
        names[net.announce(node).hash] = node.name
    net.run(10.0)
    assert relay.engine.transport is not None
    outlet = relay.engine.transport.outlets[wire.source]
    (place,) = [place for key, place in chain[4].engine.destinations.items()]
    for _ in range(5):
        net.announce(chain[4], destination=place)
        net.run(2.0)
    queued = outlet.queue[place.hash]
    assert len(outlet.queue) <= 5 and queued.emitted == place.last_emission
    net.run(1200.0)
    assert not outlet.queue
    bodies = [raw for raw in wire.sent if is_rebroadcast(raw) and raw[18:34] == place.hash]
    assert bodies and int.from_bytes(bodies[-1][35 + 79 : 35 + 84], "big") == place.last_emission


def test_a_slow_interface_never_carries_more_announces_than_its_share() -> None:
    net = Network(seed=75)
    relay, slow = net.relay("relay"), net.node("slow")
    sources = [net.node(f"s{i}") for i in range(30)]
    net.star(relay, sources)
    wire, _ = net.join(relay, slow, bitrate=9600, policy=Policy(ingress_control=False, announce_cap=0.05))
    for source in sources:
        net.announce(source)
    net.run(60.0)
    spent = sum(8 * len(raw) for raw in wire.sent if raw[0] & 3 == ANNOUNCE)
    assert 55 <= spent / 9600 / 0.05 <= 60 + 4  # seconds that they pay for; the last may reach beyond


# -- rates and bursts ---------------------------------------------------------------------------------------------


def test_a_destination_that_announces_too_often_is_not_passed_on_but_stays_reachable() -> None:
    """Target 60 s, grace 2, penalty 30 s: the fourth in a row is too much."""
    limits = Policy(
        ingress_control=False, announce_cap=1.0, announce_rate_target=60, announce_rate_grace=2,
        announce_rate_penalty=30,
    )  # fmt: skip
    net = Network(seed=76)
    source, relay, end = net.node("source"), net.relay("relay"), net.node("end")
    net.join(source, relay, policy=limits)
    wire, _ = net.join(relay, end)
    place = source.inbound("x")
    passed: list[int] = []
    for _ in range(12):
        net.announce(source, destination=place)
        before = len(wire.sent)
        net.run(10.0)
        passed.append(int(len(wire.sent) > before))
        assert relay.engine.paths.paths[place.hash].newest == place.last_emission, "the path is always the newest"
    assert passed[:3] == [1, 1, 1] and passed[3:8] == [0] * 5
    net.run(150.0)
    net.announce(source, destination=place)
    before = len(wire.sent)
    net.run(10.0)
    assert len(wire.sent) > before and net.delivers(end, place)


def test_a_burst_of_strangers_is_held_and_let_in_one_by_one() -> None:
    """Known and wanted destinations are not concerned."""
    net = Network(seed=77)
    crowd, relay, end = net.node("crowd"), net.relay("relay"), net.node("end")
    there, _ = net.join(crowd, relay, policy=Policy())
    net.join(relay, end)
    known = net.announce(crowd, "known")
    net.run(20.0)
    wanted = crowd.inbound("wanted")
    strangers = [crowd.inbound(f"s{i}") for i in range(12)]
    relay.engine.announcing.request_path(wanted.hash, net.now)
    net.now += 1.0
    for place in [*strangers, known, wanted]:
        net.announce(crowd, destination=place)
    net.run(1.0)
    paths = relay.engine.paths.paths
    assert there.sink.drops[Drop.ANNOUNCE_HELD] >= 9
    assert paths[known.hash].newest == known.last_emission and wanted.hash in paths
    let_in = []
    for _ in range(90):
        net.run(1.0)
        let_in.append(sum(place.hash in paths for place in strangers))
    assert let_in[12] <= 3 and let_in[-1] == 12
    assert max(b - a for a, b in pairwise(let_in)) == 1


def test_two_transmissions_and_no_more_in_an_hour_of_quiet() -> None:
    net = Network(seed=78)
    nodes = net.relays(8)
    net.ring(nodes)
    for node in nodes:
        net.announce(node)
    net.settle()
    net.run(15.0)
    sent = net.announces_sent
    net.run(3600.0)
    assert net.announces_sent == sent
