"""Hostile peers of a transport node, in virtual time: tables stay bounded, and a good neighbour is still served."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from rnsfast.crypto.identity import Identity
from rnsfast.engine import linktable
from rnsfast.engine.destination import Destination, Direction
from rnsfast.engine.engine import HALF_OPEN_LIMIT
from rnsfast.engine.inbound import LENGTHS, Asked, TrafficClass, Unverified
from rnsfast.engine.linktable import UNPROVED_LIMIT
from rnsfast.engine.port import Policy
from rnsfast.engine.transport import rebroadcast, search, tunnels
from rnsfast.wire.drop import Drop
from rnsfast.wire.packet import (
    CTX_CHANNEL,
    CTX_NONE,
    DATA,
    HEADER_2,
    LINK,
    PLAIN,
    SINGLE,
    TRANSPORT,
    link_id,
    make_raw,
    packet_hash,
)
from rnsfast.wire.pathrequest import PATH_REQUEST_DESTINATION
from rnsfast.wire.proof import proof_packet
from tests.engine.besieged import (
    DICE,
    OPEN,
    UNIX,
    Besieged,
    announce,
    answers,
    direct_request,
    in_transport,
    link_proof,
    link_request,
    many,
    request,
    synthesis,
)
from tests.virtualnet import UNIX as SIM_UNIX
from tests.virtualnet import VirtualNet


def test_a_flood_of_valid_announces_is_held() -> None:
    here = Besieged(Policy(announce_cap=1.0))
    for port in here.ports[1:]:
        port.policy = OPEN
    owner = Identity(entropy=DICE.randbytes)
    here.pour(many(800, lambda n: announce(owner, str(n), UNIX)))
    intake = here.transport.intakes[here.hostile]
    assert len(intake.held) == here.hostile.policy.ic_max_held_announces
    assert len(here.engine.paths.paths) < 10
    here.check_good_are_served()


def test_what_is_not_verified_yet_is_bounded_and_served_in_turn() -> None:
    here = Besieged()
    owner = Identity(entropy=DICE.randbytes)
    flood = many(500, lambda n: announce(owner, str(n), UNIX))
    left = here.engine.relay(here.hostile, flood, 0.0)
    here.engine.intake(here.hostile, left, 0.0)
    assert here.hostile.drops[Drop.ANNOUNCE_OVERLOAD] == 500 - LENGTHS[TrafficClass.ANNOUNCE]
    news = announce(Identity(entropy=DICE.randbytes), "news", UNIX)
    here.engine.intake(here.right, [news], 0.0)
    first = here.engine.inbound.take()
    assert any(item.raw == news for item in first), "the other interface is next in turn"


def test_path_requests_wait_in_lines_of_their_own_and_no_flood_of_announces_keeps_them_there() -> None:
    here = Besieged(Policy())
    owner = Identity(entropy=DICE.randbytes)
    questions = many(300, lambda n: request(DICE.randbytes(16), DICE.randbytes(16)))
    here.engine.intake(here.hostile, questions, 0.0)
    waiting = here.engine.inbound.lines
    calm, limited = waiting[TrafficClass.PATH_REQUEST], waiting[TrafficClass.INGRESS_LIMITED]
    assert 0 < len(calm) < 10 and len(limited) == limited.length  # from the fourth within a second on it is a burst
    assert here.hostile.drops[Drop.LIMITED_OVERLOAD] == 300 - len(calm) - len(limited)
    flood = many(500, lambda n: announce(owner, str(n), UNIX))
    here.engine.intake(here.hostile, here.engine.relay(here.hostile, flood, 0.0), 0.0)
    question = request(here.good[2:18], DICE.randbytes(16))
    here.engine.intake(here.left, [question], 0.0)
    first = here.engine.inbound.take()
    assert any(isinstance(item, Asked) and item.port is here.left for item in first)
    assert sum(isinstance(item, Unverified) for item in first) == 4
    here.engine.verified(first, here.engine.verify(first), 0.0)
    assert here.good[2:18] in here.transport.announces.answers


def test_forged_signatures_cost_their_verification_and_nothing_else() -> None:
    here = Besieged()
    owner = Identity(entropy=DICE.randbytes)
    before = len(here.engine.known.entries)
    here.pour(many(300, lambda n: announce(owner, str(n), UNIX, forged=True)))
    assert here.hostile.drops[Drop.ANNOUNCE_SIGNATURE] == 300
    assert len(here.engine.known.entries) == before and not here.transport.announces.entries.keys() - {here.good[2:18]}
    here.check_good_are_served()


def test_replayed_announces_change_nothing_and_are_not_passed_on() -> None:
    here = Besieged()
    for _ in range(3):
        here.now += 10.0
        here.engine.run_timers(here.now)
    here.sent()
    path = here.engine.paths.paths[here.good[2:18]]
    for _ in range(200):
        here.engine.receive(here.hostile, [here.good] * 3, here.now)
        here.now += 0.1
        here.engine.run_timers(here.now)
    assert not any(here.sent().values())
    assert here.engine.paths.paths[here.good[2:18]] is path
    here.check_good_are_served()


@pytest.mark.parametrize("hops", [127, 128, 255])
def test_forged_hops_do_not_come_out(hops: int) -> None:
    here = Besieged()
    raw = announce(Identity(entropy=DICE.randbytes), "far", UNIX)
    here.engine.receive(here.hostile, [raw[:1] + bytes((hops,)) + raw[2:]], 0.0)
    data = make_raw(LINK << 2 | DATA, here.link, CTX_CHANNEL, b"x" * 40)
    here.engine.receive(here.left, [data[:1] + bytes((hops,)) + data[2:]], 0.0)
    here.engine.run_timers(10.0)
    assert all(r[1] < 128 for group in here.sent().values() for r in group)


def test_huge_application_data_is_heard_and_stops_here() -> None:
    here = Besieged()
    raw = announce(Identity(entropy=DICE.randbytes), "huge", UNIX, bytes(330))
    here.engine.receive(here.hostile, [raw], 0.0)
    assert raw[2:18] in here.engine.paths.paths
    here.engine.run_timers(10.0)
    assert not any(raw[2:18] in r[:34] for group in here.sent().values() for r in group)
    too_long = announce(Identity(entropy=DICE.randbytes), "huger", UNIX, bytes(340))
    here.engine.receive(here.hostile, [too_long], 0.0)
    assert here.hostile.drops[Drop.ANNOUNCE_TOO_LONG] == 1


def test_floods_of_path_requests_stay_bounded() -> None:
    here = Besieged()
    here.pour(many(20_000, lambda n: request(DICE.randbytes(16), DICE.randbytes(16))), 5.0)
    assert len(here.transport.searches.in_flight) <= search.IN_FLIGHT_LIMIT
    assert len(here.transport.searches.waiting) <= search.WAITING_LIMIT
    known = here.good[2:18]
    here.pour(many(5000, lambda n: request(known, DICE.randbytes(16))))
    assert len(here.transport.announces.entries) <= rebroadcast.LIMIT
    here.pour(many(2000, lambda n: request(known, b"same tag for all")))
    assert here.hostile.drops[Drop.PATH_REQUEST_REPEATED] >= 1999
    here.pour(many(500, lambda n: make_raw(PLAIN << 2 | DATA, PATH_REQUEST_DESTINATION, CTX_NONE, known)))
    assert here.hostile.drops[Drop.PATH_REQUEST_SIZE] == 500
    here.now += 60.0
    here.engine.run_timers(here.now)
    assert not here.transport.searches.in_flight
    here.check_good_are_served()


def test_half_open_links_by_the_thousand_give_way() -> None:
    here = Besieged()
    here.pour(many(6000, lambda n: link_request(here)), 2.0)
    assert len(here.transport.links.unproved) == UNPROVED_LIMIT
    here.check_good_are_served()
    here.now += 60.0
    here.engine.run_timers(here.now)
    assert not here.transport.links.unproved
    here.now += 60.0
    here.engine.run_timers(here.now)
    asked = [r for group in here.sent().values() for r in group if r[2:18] == PATH_REQUEST_DESTINATION]
    assert len(asked) <= 3 * 3, "one search for the destination, not one a link"


def test_half_open_links_of_one_take_no_room_from_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linktable, "UNPROVED_LIMIT", 100)
    here = Besieged()
    asked = link_request(here)
    here.engine.receive(here.left, [asked], here.now)
    here.pour(many(300, lambda n: link_request(here)), 0.1)
    assert len(here.transport.links.unproved) == 100 and link_id(asked) in here.transport.links.unproved
    here.engine.receive(here.right, [link_proof(here, asked)], here.now)
    assert link_id(asked) in here.transport.links.proved


def test_running_links_of_one_take_no_room_from_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linktable, "PROVED_LIMIT", 100)
    monkeypatch.setattr(linktable, "EVICTED", 5)
    here = Besieged()
    table = here.transport.links.proved
    for _ in range(120):
        asked = link_request(here)
        here.pour([asked], 0.01)
        here.engine.receive(here.right, [link_proof(here, asked)], here.now)
    assert len(table) == 100 and here.right.drops[Drop.LINK_TABLE_FULL] == 21
    asked = link_request(here)
    here.engine.receive(here.left, [asked], here.now)
    here.engine.receive(here.right, [link_proof(here, asked)], here.now)
    assert link_id(asked) in table and len(table) == 96
    here.check_good_are_served()


def test_a_flood_of_tunnels_is_bounded() -> None:
    here = Besieged()
    owner = Identity(entropy=DICE.randbytes)
    here.pour(many(640, lambda n: synthesis(owner, n)), 2.0)
    known = here.transport.tunnels.tunnels
    assert tunnels.VERIFIED_AT_ONCE <= len(known) <= tunnels.VERIFIED_AT_ONCE + 2
    assert here.hostile.drops[Drop.TUNNEL_OVERLOAD] == 640 - len(known)
    assert sum(t.port is not None for t in known.values()) == 1, "one interface, one tunnel"
    honest = synthesis(here.owner, 0)
    here.engine.receive(here.right, [honest], here.now)
    tunnel = list(known.values())[-1]
    assert tunnel.port is here.right
    here.engine.receive(here.hostile, [honest], here.now + 60.0)
    assert tunnel.port is here.right, "a repeat takes nothing away"
    here.check_good_are_served()


def test_a_forged_proof_does_not_use_up_the_way_back() -> None:
    """Trap T7; whoever stands where the packet went still can, since nobody on the way can check a proof."""
    here = Besieged()
    single = make_raw(SINGLE << 2 | DATA, here.good[2:18], CTX_NONE, DICE.randbytes(60))
    here.engine.receive(here.left, [in_transport(here, single)], 1.0)
    here.sent()
    forged, right = (proof_packet(packet_hash(single), DICE.randbytes(64), explicit=False) for _ in range(2))
    here.engine.receive(here.hostile, [forged, right], 1.1)
    assert here.hostile.drops[Drop.PROOF_UNEXPECTED] == 2 and not any(here.sent().values())
    here.engine.receive(here.right, [right], 1.2)
    assert [r[2:] for r in here.sent()["left"]] == [right[2:]]


def test_half_open_links_to_this_node_are_limited_by_interface() -> None:
    here = Besieged()
    place = Destination(Identity(entropy=DICE.randbytes), Direction.IN, SINGLE, "hostile", "here")
    here.engine.register(place)
    raws = many(HALF_OPEN_LIMIT + 200, lambda n: direct_request(place.hash))
    here.pour(raws, 1.0)
    assert here.hostile.drops[Drop.LINK_HALF_OPEN_LIMIT] == 200
    assert len(here.engine.links) == HALF_OPEN_LIMIT
    here.engine.receive(here.left, [direct_request(place.hash)], here.now)
    assert len(here.engine.links) == HALF_OPEN_LIMIT + 1
    here.check_good_are_served()
    here.engine.run_timers(here.now + 400.0)
    assert not here.engine.links


def test_two_relays_that_hear_each_other_come_to_rest() -> None:
    """Two transport nodes with two wires between them, each the other's next hop for a destination that is gone."""
    net = VirtualNet(seed=11)
    a, b = net.node("a", transport=True), net.node("b", transport=True)
    wires = [*net.join(a, b), *net.join(b, a, delay=0.03)]
    ghost = Identity(entropy=net.random.randbytes)
    raw = announce(ghost, "ghost", SIM_UNIX + net.now, hops=3)
    for node in (a, b):
        port = node.engine.ports[0]
        head = bytes((HEADER_2 | TRANSPORT | raw[0], 3)) + (b if node is a else a).engine.transport_id
        node.engine.receive(port, [head + raw[2:]], net.now)
    net.run(30.0)
    before = [len(wire.sent) for wire in wires]
    for node in (a, b):
        for kind in (make_raw(SINGLE << 2 | DATA, raw[2:18], CTX_NONE, DICE.randbytes(50)), direct_request(raw[2:18])):
            packet = bytes((HEADER_2 | TRANSPORT | kind[0], 0)) + node.engine.transport_id + kind[2:]
            node.engine.receive(node.engine.ports[1], [packet], net.now)
            net.run(1.0)
    for n in range(10):
        a.engine.receive(a.engine.ports[0], [request(DICE.randbytes(16), n.to_bytes(16, "big"))], net.now)
    net.run(60.0)
    packets = sum(len(wire.sent) for wire in wires) - sum(before)
    assert packets < 40, f"{packets} packets were sent for 14"
    quiet = [len(wire.sent) for wire in wires]
    net.run(120.0)
    assert [len(wire.sent) for wire in wires] == quiet


FLOODS: dict[str, Callable[[Besieged, Identity, int], bytes]] = {
    "announces, valid": lambda here, owner, n: announce(owner, str(n), UNIX),
    "announces, forged": lambda here, owner, n: announce(owner, str(n), UNIX, forged=True),
    "announces, repeated": lambda here, owner, n: here.good,
    "path requests, any": lambda here, owner, n: request(DICE.randbytes(16), DICE.randbytes(16)),
    "path requests, known": lambda here, owner, n: request(here.good[2:18], DICE.randbytes(16)),
    "link requests": lambda here, owner, n: link_request(here),
    "link data, unknown": lambda here, owner, n: make_raw(LINK << 2 | DATA, DICE.randbytes(16), 0, bytes(40)),
    "tunnels": lambda here, owner, n: synthesis(owner, n),
    "packets, no path": lambda here, owner, n: in_transport(
        here, make_raw(SINGLE << 2 | DATA, DICE.randbytes(16), 0, DICE.randbytes(40))
    ),
    "proofs, unknown": lambda here, owner, n: proof_packet(DICE.randbytes(32), bytes(64), explicit=False),
    "noise": lambda here, owner, n: DICE.randbytes(60),
}


@pytest.mark.parametrize("kind", FLOODS)
def test_the_good_are_served_after_every_flood(kind: str) -> None:
    """And what a packet costs, with -s."""
    here = Besieged(Policy(announce_cap=1.0))
    here.left.policy = here.right.policy = OPEN
    owner = Identity(entropy=DICE.randbytes)
    flood = many(512, lambda n: FLOODS[kind](here, owner, n))
    began = time.process_time()
    here.pour(flood)
    print(f"{kind}: {(time.process_time() - began) / len(flood) * 1e6:.1f} us a packet")
    here.check_good_are_served()


def test_an_announce_of_the_future_does_not_shut_out_the_present() -> None:
    """Trap T4: an emission time far ahead would win until its path expires."""
    here = Besieged()
    here.engine.receive(here.hostile, [announce(here.owner, "good", UNIX + 40 * 86400)], 1.0)
    assert here.hostile.drops[Drop.ANNOUNCE_FUTURE] == 1
    assert here.engine.paths.paths[here.good[2:18]].port is here.right
    here.engine.receive(here.right, [announce(here.owner, "good", UNIX + 5)], 5.0)
    assert here.engine.known.entries[here.good[2:18]].emitted == int(UNIX + 5)


def test_links_that_nobody_knows_are_counted() -> None:
    here = Besieged()
    here.pour(many(2000, lambda n: make_raw(LINK << 2 | DATA, DICE.randbytes(16), CTX_CHANNEL, DICE.randbytes(40))))
    assert here.hostile.drops[Drop.NO_SUCH_LINK] == 2000
    here.check_good_are_served()


def test_an_echo_of_everything_is_filtered() -> None:
    here = Besieged()
    here.now = 8.0
    here.engine.run_timers(here.now)
    for _ in range(6):
        for name, group in here.sent().items():
            port = next(port for port in here.ports if port.name == name)
            here.engine.receive(port, group, here.now)
        here.now += 6.0
        here.engine.run_timers(here.now)
    assert not any(here.sent().values())
    here.check_good_are_served()


def test_who_asks_again_and_again_keeps_nobody_from_his_answer() -> None:
    here = Besieged()
    here.engine.run_timers(20.0)
    here.engine.run_timers(30.0)
    here.sent()
    here.now, known = 40.0, here.good[2:18]
    here.engine.receive(here.left, [request(known, DICE.randbytes(16))], here.now)
    told, asked = {"left": 0, "hostile": 0}, 0
    while here.now < 44.0:
        here.engine.receive(here.hostile, [request(known, DICE.randbytes(16)) for _ in range(5)], here.now)
        asked += 5
        here.now += 0.1
        here.engine.run_timers(here.now)
        for name, group in here.sent().items():
            told[name] = told.get(name, 0) + answers(group, known)
    assert told["left"] == 1
    assert 4 <= told["hostile"] <= asked / 10


def test_who_asks_again_and_again_does_not_stop_the_announce() -> None:
    here = Besieged()
    passed = 0
    news = announce(Identity(entropy=DICE.randbytes), "news", UNIX)
    here.engine.receive(here.right, [news], 0.0)
    while here.now < 20.0:
        here.engine.receive(here.hostile, [request(news[2:18], DICE.randbytes(16))], here.now)
        here.now += 0.1
        here.engine.run_timers(here.now)
        left = here.sent()["left"]
        passed += sum(r[0] & 0x43 == 0x41 and r[18:34] == news[2:18] for r in left)
    assert passed == rebroadcast.TRANSMISSIONS


def test_many_answers_go_out_early_instead_of_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rebroadcast, "ANSWERS_LIMIT", 10)
    here = Besieged()
    owner = Identity(entropy=DICE.randbytes)
    known = many(50, lambda n: announce(owner, str(n), UNIX))
    here.engine.receive(here.right, known, 0.0)
    here.sent()
    here.engine.receive(here.hostile, [request(raw[2:18], DICE.randbytes(16)) for raw in known], 0.01)
    assert len(here.transport.announces.answers) == 10
    early = here.sent()["hostile"]
    here.engine.run_timers(1.0)
    late = here.sent()["hostile"]
    assert sum(answers(early, raw[2:18]) for raw in known) == 40
    assert all(answers(early + late, raw[2:18]) == 1 for raw in known)
