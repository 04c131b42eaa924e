"""One bad neighbour, many good ones: field case F7 in virtual time.

What sockets do with a silent reader is tested where sockets are (`tests/interfaces`). Here: what the relay makes of it
must not depend on neighbours that are down, silent, or pour in announces. Verifying costs half a millisecond, and every
cable has a rate.
"""

from __future__ import annotations

import random
from statistics import median, quantiles

import pytest

from rnsfast.engine.destination import Destination
from rnsfast.engine.link import Link
from rnsfast.wire.drop import Drop
from tests.engine.test_faults import Transfer
from tests.sim.network import Network, PacedWire
from tests.sim.test_links import far_end, link_between
from tests.virtualnet import SimNode

VERIFY = 0.0005  # seconds
ECHOES = 10  # a second


class Town:
    """client - relay - healthy - server, 50 sources behind `healthy`, and whoever else is connected to the relay."""

    def __init__(self, seed: int = 80) -> None:
        self.net = net = Network(seed, verify_seconds=VERIFY)
        self.client, self.relay, self.healthy, self.server = (
            net.node("client"), net.relay("relay"), net.relay("healthy"), net.node("server"),
        )  # fmt: skip
        for a, b in ((self.client, self.relay), (self.relay, self.healthy), (self.healthy, self.server)):
            net.join(a, b, paced=True)
        self.sources = net.node("sources")
        net.join(self.sources, self.healthy, paced=True)
        self.places = [self.sources.inbound(str(n)) for n in range(50)]

    def neighbour(self, name: str) -> tuple[SimNode, PacedWire, PacedWire]:
        node = self.net.node(name)
        there, back = self.net.join(self.relay, node, paced=True)
        assert isinstance(there, PacedWire) and isinstance(back, PacedWire)
        return node, there, back

    def start(self) -> tuple[Link, Link]:
        place = self.net.announce(self.server)
        self.net.run(3.0)
        link = link_between(self.net, self.client, place, self.server)
        return link, far_end(self.server)

    def announce(self, n: int) -> None:
        self.net.announce(self.sources, destination=self.places[n % 50])

    def echoes(self, link: Link, seconds: float) -> list[float]:
        """Round trips of `ECHOES` a second: each goes there, and the server sends it back."""
        net, sent, trips = self.net, {}, []

        def back(_: Link, packets: list[bytes], __: list[bytes]) -> None:
            far = far_end(self.server)
            for packet in packets:
                far.send_data(packet, net.now)

        def home(_: Link, packets: list[bytes], __: list[bytes]) -> None:
            trips.extend(net.now - sent[packet] for packet in packets)

        def send(n: int) -> None:
            sent[data := n.to_bytes(4, "big")] = net.now
            link.send_data(data, net.now)
            net.flush()

        self.server.recorder.on["link_data"], self.client.recorder.on["link_data"] = back, home
        times = int(seconds * ECHOES)
        net.every(1 / ECHOES, times, send)
        net.run(seconds + 2.0)
        assert len(trips) == times, "none is lost"
        return trips


def measured(*, bad: bool, seconds: float) -> tuple[list[float], float, Town, PacedWire | None]:
    town = Town()
    net = town.net
    silent: PacedWire | None = None
    if bad:
        closed, unreachable = town.neighbour("closed"), town.neighbour("unreachable")
        for _, there, back in (closed, unreachable):
            net.cut((there, back))
        _, silent, _ = town.neighbour("silent")
        silent.stalled, silent.limit = True, 100_000
    link, far = town.start()
    net.every(0.02, int(50 * seconds), town.announce)
    trips = town.echoes(link, seconds)
    transfer = Transfer(net, link, far, random.Random(1).randbytes(4_000_000))
    began = net.now
    transfer.turn()
    net.every(0.02, 500, town.announce)
    done = [False]

    def turn() -> bool:
        done[0] = done[0] or transfer.turn()
        return done[0]

    net.run(60.0, turn)
    transfer.check()
    return trips, net.now - began, town, silent


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [15, pytest.param(120, marks=pytest.mark.soak)])
def test_f7_bad_neighbours_cost_the_good_ones_nothing(seconds: int) -> None:
    trips, took, town, silent = measured(bad=True, seconds=seconds)
    plain, plain_took, _, _ = measured(bad=False, seconds=seconds)
    assert median(trips) <= 2 * median(plain) and quantiles(trips, n=20)[-1] <= 2 * quantiles(plain, n=20)[-1]
    assert took <= 1.2 * plain_took
    assert silent is not None and silent.most <= silent.limit and silent.overflowed > 0
    assert sum(place.hash in town.relay.engine.paths.paths for place in town.places) == 50
    silent.resume()
    town.net.run(20.0)
    node = silent.node
    heard = node.recorder.named("announce_heard")
    assert len({event.destination for (event,) in heard}) >= 50 and not silent.sink.drops[Drop.TOO_SHORT]
    print(f"echo {1000 * median(trips):.1f} ms, without bad neighbours {1000 * median(plain):.1f} ms")


@pytest.mark.slow
def test_f7_whoever_pours_in_announces_delays_its_own() -> None:
    """A neighbour sends 4,000 announces a second whose signatures are wrong: twice what the relay can verify."""
    town = Town(seed=81)
    net = town.net
    bad, _, pours = town.neighbour("bad")
    model = bad.engine.announcing.build(bad.inbound("model"), None, net.now)
    link, _ = town.start()
    base = median(town.echoes(link, 2.0))

    def pour(n: int) -> None:
        for k in range(40):  # another random blob each: a new packet, and no signature for it
            blob = (40 * n + k).to_bytes(5, "big") + int(net.now + 1_700_000_000).to_bytes(5, "big")
            pours.carry(model[: 19 + 74] + blob + model[19 + 84 :])

    taken: dict[bytes, float] = {}
    sent: dict[bytes, float] = {}

    def noted(node: SimNode, event: object) -> None:
        if node is town.relay:
            taken[event.destination] = net.now  # type: ignore[attr-defined]

    def announce(n: int) -> None:
        sent[town.places[n].hash] = net.now
        town.announce(n)

    net.on_taken = noted
    net.every(0.01, 500, pour)
    net.every(0.1, 50, announce)
    trips = town.echoes(link, 5.0)
    assert pours.sink.drops[Drop.ANNOUNCE_SIGNATURE] > 3000 and pours.sink.drops[Drop.ANNOUNCE_OVERLOAD] > 3000
    assert quantiles(trips, n=20)[-1] <= base + 2 * 4 * VERIFY + 0.001, "an echo waits for one batch each way at most"
    late = [taken[destination] - at for destination, at in sent.items()]
    assert len(late) == 50 and max(late) <= 0.5 + 0.25 + 0.05 + 8 * VERIFY, "the others' announces are not behind it"


def test_f7_a_neighbour_that_does_not_read_keeps_no_memory_and_loses_whole_packets() -> None:
    town = Town(seed=82)
    net = town.net
    _, silent, _ = town.neighbour("silent")
    silent.stalled, silent.limit = True, 5_000
    town.start()
    for n in range(50):
        town.announce(n)
        net.run(0.1)
    net.run(10.0)
    relay = town.relay.engine
    assert silent.most <= silent.limit and silent.overflowed
    assert all(not port.queue for port in relay.ports)
    assert relay.transport is not None and not relay.transport.announces.entries
    got: list[bytes] = []
    silent.drop = lambda raw: bool(got.append(raw))  # type: ignore[func-returns-value]
    silent.resume()
    net.run(1.0)
    assert got and all(len(raw) > 167 for raw in got)
    place: Destination = town.places[0]
    assert town.relay.engine.paths.usable(place.hash) is not None
