"""A mesh of transport nodes, stock ones and ours in turn: everybody reaches everybody, also after nodes were killed.

Protocol 02, section 21, test 17. Nothing waits for the clock: an announce that arrives is an event.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count, permutations
from typing import Any

import pytest

from interop.harness import Section, StockPeer, Workspace, free_port, tcp_client, tcp_server, workspace
from interop.ours import LIMIT
from rnsfast import AnnounceHeard, Identity, Node, PathNotFound

NAME = "interop.mesh"
#: Nothing is held back: that is tested elsewhere.
OPEN = {"ingress_control": "no", "announce_cap": 100, "announce_rate_target": 1, "announce_rate_grace": 1000}
TRANSMISSIONS = 2  # of one announce by one node on one interface

_numbers = count()


class Stock:
    """A stock transport node and its destination."""

    def __init__(self, config: Any) -> None:
        self.peer = StockPeer(config)
        self.dest = ""

    def start(self) -> None:
        self.peer.start()
        self.dest = self.peer.request("destination", name=NAME, proof="all")["dest"]

    def announce(self, app_data: bytes) -> None:
        self.peer.request("announce", dest=self.dest, app_data=app_data.hex())

    def hears(self, dest: str, app_data: bytes) -> None:
        self.peer.expect("announce", dest=dest, app_data=app_data.hex(), timeout=LIMIT)

    def asks(self, dest: str) -> bool:
        return bool(self.peer.request("wait_path", dest=dest, timeout=2.0)["found"])

    def delivers(self, dest: str) -> bool:
        return bool(self.peer.request_proof("send", name=NAME, dest=dest, data="00")["status"] == "delivered")

    def kill(self) -> None:
        self.peer.kill()

    def end(self) -> None:
        self.peer.stop()


class Ours:
    """One of our transport nodes and its destination."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self._identity = Identity()
        self._heard: set[tuple[str, bytes | None]] = set()
        self._changed = threading.Condition()
        self.node: Node | None = None

    def start(self) -> None:
        self.node = Node(self._config, strict=True)
        self.node.start()
        self.node.on_announce(self._note)
        self._inbox = self.node.register(self._identity, *NAME.split("."))
        self._inbox.set_proofs("all")
        self.dest = self._inbox.hash.hex()

    def _note(self, event: AnnounceHeard) -> None:
        with self._changed:
            self._heard.add((event.destination.hex(), event.app_data))
            self._changed.notify_all()

    def announce(self, app_data: bytes) -> None:
        assert self._inbox.announce(app_data)

    def hears(self, dest: str, app_data: bytes) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: (dest, app_data) in self._heard, LIMIT), f"{dest} was not heard"

    def asks(self, dest: str) -> bool:
        assert self.node is not None
        try:
            self.node.request_path(bytes.fromhex(dest), 2.0)
        except PathNotFound:
            return False
        return True

    def delivers(self, dest: str) -> bool:
        assert self.node is not None
        receipt = self.node.outbox(bytes.fromhex(dest), *NAME.split(".")).send(b"\0")
        return receipt is not None and receipt.wait(LIMIT)

    def announces_sent(self) -> dict[str, int]:
        """By interface."""
        assert self.node is not None
        with self.node._reactor.lock:
            return {port.name: port.announces.tx_packets for port in self.node._engine.ports}

    def kill(self) -> None:
        """As near to it as one can come in one's own process: nothing is saved."""
        assert self.node is not None
        self.node._transport_store = None
        self.node.stop()

    def end(self) -> None:
        assert self.node is not None
        self.node.stop()


Place = Stock | Ours


def next_second() -> None:
    """An announce in the same second as an answer is no news to stock nodes (protocol 02, T2)."""
    threading.Event().wait(1.0 - time.time() % 1.0 + 0.05)


class Mesh:
    """Five nodes, every second one ours, and cables between them: who comes later connects to who was there."""

    def __init__(self, space: Workspace, cables: list[tuple[int, int]], ours: set[int]) -> None:
        sections: dict[int, list[Section]] = {n: [] for n in range(5)}
        self.cables = cables
        for a, b in cables:
            port = free_port()
            sections[a].append(tcp_server(port, f"to {b}", **OPEN))
            sections[b].append(tcp_client(port, f"to {a}", **OPEN))
        self.places: list[Place] = []
        for n in range(5):
            config = space.config(f"node{n}", sections[n], transport=True)
            self.places.append(Ours(config) if n in ours else Stock(config))

    def connected(self, cables: list[tuple[int, int]]) -> None:
        """Questions pass over each of these cables, in both directions."""
        for a, b in cables:
            for one, other in ((self.places[a], self.places[b]), (self.places[b], self.places[a])):
                assert any(one.asks(other.dest) for _ in range(12)), f"{a} and {b} do not meet"

    def everybody_announces(self) -> None:
        next_second()
        words = {place: f"word {next(_numbers)}".encode() for place in self.places}
        for place, word in words.items():
            place.announce(word)
        for place in self.places:
            for other, word in words.items():
                if other is not place:
                    place.hears(other.dest, word)

    def everybody_reaches_everybody(self) -> None:
        for one, other in permutations(self.places, 2):
            assert one.delivers(other.dest), f"{self.places.index(one)} does not reach {self.places.index(other)}"


SHAPES: dict[str, tuple[list[tuple[int, int]], set[int]]] = {
    "line": ([(0, 1), (1, 2), (2, 3), (3, 4)], {1, 3}),
    "ring": ([(0, 1), (1, 2), (2, 3), (3, 4), (0, 4)], {1, 3}),
    "star": ([(0, 1), (0, 2), (0, 3), (0, 4)], {0, 2, 4}),
}


@pytest.fixture(params=SHAPES)
def mesh(request: pytest.FixtureRequest) -> Iterator[Mesh]:
    with workspace() as space, ExitStack() as stack:
        made = Mesh(space, *SHAPES[request.param])
        for place in made.places:
            place.start()
            stack.callback(place.end)
        made.connected(made.cables)
        yield made


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_nodes_are_killed_again_and_again(mesh: Mesh) -> None:
    dice = random.Random(17)
    for _ in range(8):
        victims = dice.sample(range(len(mesh.places)), 2)
        for n in victims:
            mesh.places[n].kill()
        for n in sorted(victims):
            mesh.places[n].start()
        mesh.connected([cable for cable in mesh.cables if set(cable) & set(victims)])
        mesh.everybody_announces()
        mesh.everybody_reaches_everybody()


@pytest.mark.slow
def test_everybody_reaches_everybody_and_does_again_when_nodes_were_killed(mesh: Mesh) -> None:
    ours = [place for place in mesh.places if isinstance(place, Ours)]
    before = [place.announces_sent() for place in ours]
    mesh.everybody_announces()
    for place, counts in zip(ours, before, strict=True):
        for name, sent in place.announces_sent().items():
            # Each node's announce, twice at most; our own once.
            assert sent - counts.get(name, 0) <= TRANSMISSIONS * (len(mesh.places) - 1) + 1, name
    mesh.everybody_reaches_everybody()
    victims = [next(n for n, place in enumerate(mesh.places) if isinstance(place, kind)) for kind in (Ours, Stock)]
    for n in victims:
        mesh.places[n].kill()
    for n in victims:
        mesh.places[n].start()
    mesh.connected([cable for cable in mesh.cables if set(cable) & set(victims)])
    mesh.everybody_announces()
    mesh.everybody_reaches_everybody()
