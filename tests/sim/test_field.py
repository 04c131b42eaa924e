"""Cases from the field in virtual time: the path dies (F6), one bad neighbour (F7), the power fails (F11)."""

from __future__ import annotations

import pytest

from rnsfast.engine.link import Link
from rnsfast.engine.linkstate import State
from rnsfast.wire.packet import LINKREQUEST
from rnsfast.wire.pathrequest import PATH_REQUEST_DESTINATION
from tests.sim.network import Network
from tests.virtualnet import Wire

Cable = tuple[Wire, Wire]


class Square:
    """Our node with two relays to one destination, which announced once.  `used` is the relay of the path."""

    def __init__(self, seed: int, *, transport: bool) -> None:
        self.net = net = Network(seed)
        self.ours = net.node("ours", transport=transport)
        self.target = net.node("target")
        self.relays = {name: net.relay(name) for name in ("north", "south")}
        self.cables: dict[str, Cable] = {name: net.join(self.ours, relay) for name, relay in self.relays.items()}
        self.onward: dict[str, Cable] = {
            name: net.join(relay, self.target, delay=0.012) for name, relay in self.relays.items()
        }
        self.place = net.announce(self.target)
        net.settle()
        self.used = self.way()
        self.other = "south" if self.used == "north" else "north"

    def way(self) -> str:
        return self.net.way(self.ours, self.place)[1].name

    def shown(self) -> bool:
        return self.ours.engine.paths.usable(self.place.hash) is not None

    def ask_for_link(self) -> Link:
        link = self.ours.engine.open_link(self.ours.outbound(self.place), self.net.now)
        self.net.flush()
        return link

    def connect(self, limit: float) -> Link | None:
        """As an application does: finds a path, asks for a link, and tries again while there is time."""
        end = self.net.now + limit
        while self.net.now < end:
            if not self.shown() and not self.net.ask(self.ours, self.place, min(5.0, end - self.net.now)):
                continue
            link = self.ask_for_link()
            self.net.run_until(end, lambda link=link: link.state is not State.PENDING)  # type: ignore[misc]
            if link.state is State.ACTIVE:
                return link
        return None

    def requests(self, name: str) -> int:
        """Path requests that we have sent to a relay."""
        return sum(raw[2:18] == PATH_REQUEST_DESTINATION for raw in self.cables[name][0].sent)


@pytest.fixture(params=[False, True], ids=["endpoint", "relay"])
def transport(request: pytest.FixtureRequest) -> bool:
    """What our node is."""
    return bool(request.param)


SEEDS = range(4)


@pytest.mark.parametrize("seed", SEEDS)
def test_f6_a_relay_that_died_is_not_used_and_not_shown(seed: int, transport: bool) -> None:
    square = Square(seed, transport=transport)
    square.net.remove(square.relays[square.used])
    assert not square.shown()
    began = square.net.now
    link = square.connect(30.0)
    assert link is not None and square.way() == square.other
    assert square.net.now - began < 1.5, "the first attempt succeeds"
    assert square.requests(square.other) == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_f6_a_connection_that_swallows_everything(seed: int, transport: bool) -> None:
    """The first attempt fails after its time; then the path is given up and asked for at that very moment."""
    square = Square(seed, transport=transport)
    net = square.net
    net.cut(square.cables[square.used], down=False)
    link = square.ask_for_link()
    net.run(60.0, lambda: link.state is State.CLOSED)
    failed_at = net.now
    assert not square.shown()
    assert square.requests(square.used) == square.requests(square.other) == 1, "at once, on both"
    net.run(5.0, square.shown)
    assert square.way() == square.other and net.now - failed_at < 1.0
    assert square.connect(20.0) is not None


@pytest.mark.parametrize("seed", SEEDS)
def test_f6_one_call_with_enough_time_does_it_all(seed: int, transport: bool) -> None:
    square = Square(seed, transport=transport)
    square.net.cut(square.cables[square.used], down=False)
    assert square.connect(30.0) is not None and square.way() == square.other


@pytest.mark.parametrize("seed", SEEDS)
def test_f6_an_interface_that_is_taken_away_at_run_time(seed: int, transport: bool) -> None:
    square = Square(seed, transport=transport)
    square.net.unplug(square.cables[square.used][0])
    assert not square.shown() and square.place.hash not in square.ours.engine.paths.paths
    began = square.net.now
    assert square.connect(30.0) is not None
    assert square.way() == square.other and square.net.now - began < 1.5


@pytest.mark.parametrize("seed", SEEDS)
def test_f6_the_relay_comes_back_and_ten_connects_in_a_row_succeed(seed: int, transport: bool) -> None:
    square = Square(seed, transport=transport)
    net = square.net
    net.cut(square.cables[square.used])
    net.call_at(net.now + 5.0, lambda: net.mend(square.cables[square.used]))
    for _ in range(10):
        link = square.connect(30.0)
        assert link is not None
        link.close(net.now)
        net.run(1.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_f6_the_relay_dies_while_it_is_being_used_for_the_attempt(seed: int, transport: bool) -> None:
    """No waiting for an answer that cannot come: the attempt ends with its interface."""
    square = Square(seed, transport=transport)
    net = square.net
    link = square.ask_for_link()
    net.run(0.015)
    assert link.state is State.PENDING
    net.remove(square.relays[square.used])
    assert link.state is State.CLOSED and square.requests(square.other) == 1
    began = net.now
    assert square.connect(30.0) is not None and net.now - began < 1.5


@pytest.mark.parametrize("seed", SEEDS)
def test_f6_a_request_that_was_answered_does_not_delay_the_next_one(seed: int, transport: bool) -> None:
    """Asked shortly before, and told what was known already: when the link then fails, that counts for nothing."""
    square = Square(seed, transport=transport)
    net = square.net
    square.ours.engine.announcing.request_path(square.place.hash, net.now)
    net.run(1.0)
    net.cut(square.cables[square.used], down=False)
    link = square.ask_for_link()
    net.run(60.0, lambda: link.state is State.CLOSED)
    assert square.requests(square.other) == 2
    net.run(5.0, square.shown)
    assert square.way() == square.other


@pytest.mark.parametrize("seed", SEEDS)
def test_f6_nothing_goes_to_the_dead_hop(seed: int, transport: bool) -> None:
    """From the moment the interface is down: not one packet, however often one tries."""
    square = Square(seed, transport=transport)
    net = square.net
    there, _ = square.cables[square.used]
    net.cut(square.cables[square.used])
    sent = len(there.sent)
    for _ in range(5):
        assert square.connect(30.0) is not None
    receipt = square.ours.engine.send_packet(square.ours.outbound(square.place), b"x", net.now)
    net.run(5.0)
    assert receipt is not None and len(there.sent) == sent
    requests = [raw for raw in square.cables[square.other][0].sent if raw[0] & 3 == LINKREQUEST]
    assert len(requests) == 5


@pytest.mark.parametrize("how", ["down", "gone"])
@pytest.mark.parametrize("what", ["link", "packet"])
@pytest.mark.parametrize("seed", SEEDS)
def test_f6_a_relay_in_the_middle_loses_its_way_and_finds_another(seed: int, what: str, how: str) -> None:
    """Not we, but the relay of our path has two ways onward. We do not learn of it, and what we send makes it ask."""
    net = Network(seed)
    ours, near, target = net.node("ours"), net.relay("near"), net.node("target")
    relays = net.relays(2)
    net.join(ours, near)
    cables = {relay: net.join(near, relay) for relay in relays}
    for relay in relays:
        net.join(relay, target)
    place = net.announce(target)
    net.settle()
    used = net.way(ours, place)[2]
    if how == "down":
        net.cut(cables[used])
    else:
        net.unplug(cables[used][0])
    other = next(relay for relay in relays if relay is not used)
    asked, _ = cables[other]
    if what == "link":
        ours.engine.open_link(ours.outbound(place), net.now)
    for _ in range(20):
        if what == "packet":
            ours.engine.send_packet(ours.outbound(place), b"x", net.now)
        net.run(0.1)
    assert net.way(ours, place) == [ours, near, other, target]
    assert sum(raw[2:18] == PATH_REQUEST_DESTINATION for raw in asked.sent) == 1
    assert net.delivers(ours, place)
