"""Hostile peers of a transport node, in virtual time: tables stay bounded, and a good neighbour is still served."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from rnsfast.crypto.identity import Identity
from rnsfast.engine import announcequeue
from rnsfast.engine.destination import Destination, Direction
from rnsfast.engine.engine import Engine
from rnsfast.engine.linktable import UNPROVED_LIMIT, LinkEntry
from rnsfast.engine.port import Policy, Port
from rnsfast.engine.transport import rebroadcast, search
from rnsfast.wire.announce import Announce, build_announce, random_blob, signed_data
from rnsfast.wire.drop import Drop
from rnsfast.wire.handshake import MODE_AES256_CBC, LinkRequest, build_link_request
from rnsfast.wire.packet import (
    ANNOUNCE,
    CTX_CHANNEL,
    CTX_NONE,
    CTX_PATH_RESPONSE,
    DATA,
    HEADER_2,
    LINK,
    LINKREQUEST,
    PLAIN,
    SINGLE,
    TRANSPORT,
    make_raw,
)
from rnsfast.wire.pathrequest import PATH_REQUEST_DESTINATION, PathRequest, build_path_request
from rnsfast.wire.tunnel import TUNNEL_DESTINATION, Synthesis, build_synthesis, synthesis_signed_data
from tests.virtualnet import Recorder

UNIX = 1_750_000_000.0
DICE = random.Random(5)
OPEN = Policy(ingress_control=False, announce_cap=1.0)


class Besieged:
    """A transport node with a hostile neighbour and two good ones, between which a link runs."""

    def __init__(self, policy: Policy = OPEN) -> None:
        self.now = 0.0
        self.engine = Engine(
            Recorder(),  # type: ignore[arg-type]
            0.0,
            unix_offset=UNIX,
            entropy=random.Random(1).randbytes,
            transport_identity=Identity(entropy=random.Random(2).randbytes),
            transport=True,
        )
        self.ports = [Port(name, hw_mtu=1064, policy=policy) for name in ("hostile", "left", "right")]
        for port in self.ports:
            port.online = True
            self.engine.attach(port, 0.0)
        self.hostile, self.left, self.right = self.ports
        assert self.engine.transport is not None
        self.transport = self.engine.transport
        self.owner = Identity(entropy=random.Random(3).randbytes)
        self.good = announce(self.owner, "good", UNIX)
        self.engine.receive(self.right, [self.good], 0.0)
        path = self.engine.paths.paths[self.good[2:18]]
        self.link = bytes(range(16))
        entry = LinkEntry(self.link, self.good[2:18], self.left, 1, path, 0.0)
        entry.validated = True
        self.transport.links.proved[self.link] = entry
        self.sent()

    def sent(self) -> dict[str, list[bytes]]:
        self.engine.dirty.clear()
        return {port.name: port.take() for port in self.ports}

    def pour(self, packets: list[bytes], seconds: float = 1.0) -> None:
        """As batches of 64, in that time."""
        for at in range(0, len(packets), 64):
            self.engine.receive(self.hostile, packets[at : at + 64], self.now)
            self.now += seconds * 64 / len(packets)
            self.engine.run_timers(self.now)
        self.sent()

    def check_good_are_served(self) -> None:
        """The link between the good ones runs, a new destination is heard, a packet finds its way."""
        raw = make_raw(LINK << 2 | DATA, self.link, CTX_CHANNEL, DICE.randbytes(60))
        self.engine.receive(self.left, [raw], self.now)
        assert any(r[2:] == raw[2:] for r in self.sent()["right"])
        news = announce(Identity(entropy=DICE.randbytes), "news", UNIX + self.now)
        self.engine.receive(self.right, [news], self.now)
        assert news[2:18] in self.engine.paths.paths
        self.sent()
        single = make_raw(SINGLE << 2 | DATA, self.good[2:18], CTX_NONE, DICE.randbytes(60))
        head = bytes((HEADER_2 | TRANSPORT | single[0], 0)) + self.engine.transport_id
        self.engine.receive(self.left, [head + single[2:]], self.now)
        assert any(r[2:] == single[2:] for r in self.sent()["right"])


def announce(
    owner: Identity, name: str, unix_time: float, data: bytes | None = None, *, hops: int = 0, forged: bool = False
) -> bytes:
    place = Destination(owner, Direction.IN, SINGLE, "hostile", name)
    blob = random_blob(DICE.randbytes(5), int(unix_time))
    made = Announce(place.hash, owner.public_key, place.name_hash, blob, None, b"", data)
    signature = bytes(64) if forged else owner.sign(signed_data(made))
    return make_raw(ANNOUNCE, place.hash, CTX_NONE, build_announce(made, signature), hops=hops)


def request(destination: bytes, tag: bytes) -> bytes:
    data = build_path_request(PathRequest(destination, None, tag))
    return make_raw(PLAIN << 2 | DATA, PATH_REQUEST_DESTINATION, CTX_NONE, data)


def many(count: int, make: Callable[[int], bytes]) -> list[bytes]:
    return [make(n) for n in range(count)]


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
    assert here.hostile.drops[Drop.ANNOUNCE_OVERLOAD] == 500 - announcequeue.LINE
    news = announce(Identity(entropy=DICE.randbytes), "news", UNIX)
    here.engine.intake(here.right, [news], 0.0)
    first = here.engine.unverified.take()
    assert any(item.raw == news for item in first), "the other interface is next in turn"


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

    def ask(n: int) -> bytes:
        keys = build_link_request(LinkRequest(DICE.randbytes(32), DICE.randbytes(32), None, MODE_AES256_CBC))
        raw = make_raw(LINKREQUEST, here.good[2:18], CTX_NONE, keys)
        return bytes((HEADER_2 | TRANSPORT | raw[0], 0)) + here.engine.transport_id + raw[2:]

    here.pour(many(6000, ask), 2.0)
    assert len(here.transport.links.unproved) == UNPROVED_LIMIT
    here.check_good_are_served()
    here.now += 60.0
    here.engine.run_timers(here.now)
    assert not here.transport.links.unproved
    here.now += 60.0
    here.engine.run_timers(here.now)
    asked = [r for group in here.sent().values() for r in group if r[2:18] == PATH_REQUEST_DESTINATION]
    assert len(asked) <= 3 * 3, "one search for the destination, not one a link"


def test_a_flood_of_tunnels_is_bounded() -> None:
    here = Besieged()
    owner = Identity(entropy=DICE.randbytes)

    def synthesis(n: int) -> bytes:
        port, salt = n.to_bytes(32, "big"), DICE.randbytes(16)
        signature = owner.sign(synthesis_signed_data(owner.public_key, port, salt))
        body = build_synthesis(Synthesis(owner.public_key, port, salt, signature))
        return make_raw(PLAIN << 2 | DATA, TUNNEL_DESTINATION, CTX_NONE, body)

    here.pour(many(600, synthesis))
    assert sum(t.port is not None for t in here.transport.tunnels.tunnels.values()) == 1, "one interface, one tunnel"
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


def answers(packets: list[bytes], destination: bytes) -> int:
    """How many answers to path requests for it there are."""
    return sum(r[0] & 0x43 == 0x41 and r[18:34] == destination and r[34] == CTX_PATH_RESPONSE for r in packets)


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
