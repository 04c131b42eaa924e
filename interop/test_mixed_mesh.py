"""A mesh of transport nodes, stock ones and ours in turn: everybody reaches everybody, also after nodes were killed.

Protocol 02, section 21, test 17. Every node is a process, and what passes between two of them passes a proxy, where the
copies of each announce are counted. Nothing waits for the clock: an announce that arrives is an event.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count, permutations
from pathlib import Path

import pytest

from interop.harness import HERE, Peer, Section, StockPeer, Workspace, free_port, tcp_client, tcp_server, workspace
from interop.ours import LIMIT
from interop.proxy import Frame, FrameProxy, Lane
from rnsfast.wire.announce import Announce, parse_announce
from rnsfast.wire.packet import ANNOUNCE, CTX_NONE, Packet, parse_packet

NAME = "interop.mesh"
#: Nothing is held back: that is tested elsewhere.
OPEN = {"ingress_control": "no", "announce_cap": 100, "announce_rate_target": 1, "announce_rate_grace": 1000}
TRANSMISSIONS = 2  # of one announce by one node on one cable: the first, and a repetition if nobody was heard to go on
NEWS = 2  # how often one announce may be news to a node: again when its own way is gone, or when it has been restarted
REPEATED = 10.0  # seconds after which no node has a repetition left (protocol 02, section 8)
TRIES = 12  # questions of two seconds each: a stock client tries a connection that was lost every five

NODES = 5

_numbers = count()


class OurPeer(Peer):
    """A node of ours, driven through `interop/our_peer.py`."""

    def __init__(self, config: Path) -> None:
        super().__init__([sys.executable, str(HERE / "our_peer.py"), "--config", str(config)], config)


class Place:
    """A transport node and its destination, which it has again after a restart."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self._private: str | None = None
        self.dest = ""

    def start(self) -> None:
        self.peer.start()
        known = {} if self._private is None else {"private": self._private}
        made = self.peer.request("identity", **known)
        self._private = made["private"]
        made = self.peer.request("destination", name=NAME, identity=made["identity"], proof="all")
        assert self.dest in ("", made["dest"])
        self.dest = made["dest"]

    def announce(self, word: str) -> None:
        self.peer.request("announce", dest=self.dest, app_data=word)

    def hears(self, dest: str, word: str) -> None:
        self.peer.expect("announce", dest=dest, app_data=word, timeout=LIMIT)

    def delivers(self, dest: str) -> bool:
        return bool(self.peer.request_proof("send", name=NAME, dest=dest, data="00")["status"] == "delivered")


class Tally:
    """How often each node has sent each announce over each of its cables. Answers to path requests do not count.

    What a node sends of an announce has the same hops in it until it has learnt another way and been told anew.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._copies: dict[tuple[bytes, bytes], Counter[tuple[int, int, int, int]]] = {}
        self._of_word: dict[str, tuple[bytes, bytes]] = {}
        self._runs = [0] * NODES
        self.storm = threading.Event()  # somebody has sent a copy too many

    def follow(self, lane: Lane, sender: int, receiver: int) -> None:
        lane.watch(lambda frame: self._note(frame, sender, receiver))

    def restarted(self, n: int) -> None:
        """What it knew it does not know any more."""
        with self._lock:
            self._runs[n] += 1

    def _note(self, frame: Frame, sender: int, receiver: int) -> bool:
        """On the proxy's thread. False: the watch is never over."""
        packet = parse_packet(frame.raw)
        if isinstance(packet, Packet) and packet.flags & 3 == ANNOUNCE and packet.context == CTX_NONE:
            announce = parse_announce(packet)
            assert isinstance(announce, Announce)
            which = (announce.destination, announce.random_blob)
            with self._lock:
                self._copies.setdefault(which, Counter())[(sender, receiver, self._runs[sender], packet.hops)] += 1
                self._of_word[(announce.app_data or b"").hex()] = which
            if self.too_many():
                self.storm.set()
        return False

    def copies(self, word: str) -> Counter[tuple[int, int]]:
        """(sender, receiver) to copies of the announce that says `word`."""
        with self._lock:
            return self._by_way(self._copies[self._of_word[word]])

    @staticmethod
    def _by_way(copies: Counter[tuple[int, int, int, int]]) -> Counter[tuple[int, int]]:
        found: Counter[tuple[int, int]] = Counter()
        for (sender, receiver, _, _), times in copies.items():
            found[(sender, receiver)] += times
        return found

    def too_many(self) -> list[str]:
        found = []
        with self._lock:
            for (destination, _), copies in self._copies.items():
                limits = [(copies, TRANSMISSIONS), (self._by_way(copies), NEWS * TRANSMISSIONS)]
                for counted, most in limits:
                    found += [f"{destination.hex()}: {way} {n} times" for way, n in counted.items() if n > most]
        return found


class Mesh:
    """Five nodes, every second one ours, and cables between them: who comes later connects to who was there."""

    def __init__(self, space: Workspace, stack: ExitStack, cables: list[tuple[int, int]], ours: set[int]) -> None:
        sections: dict[int, list[Section]] = {n: [] for n in range(NODES)}
        self.cables, self.ours, self.tally = cables, ours, Tally()
        for a, b in cables:
            port = free_port()
            proxy = stack.enter_context(FrameProxy(port))
            self.tally.follow(proxy.to_client, a, b)
            self.tally.follow(proxy.to_target, b, a)
            sections[a].append(tcp_server(port, f"to {b}", **OPEN))
            sections[b].append(tcp_client(proxy.port, f"to {a}", **OPEN))
        self.places: list[Place] = []
        for n in range(NODES):
            config = space.config(f"node{n}", sections[n], transport=True)
            self.places.append(Place(OurPeer(config) if n in ours else StockPeer(config)))
        for place in self.places:
            stack.callback(place.peer.stop)
            place.start()
        self._meet(cables)

    def _meet(self, cables: list[tuple[int, int]]) -> None:
        """Questions and answers pass over each of these cables, in both directions."""
        for cable in cables:
            for one, other in (cable, cable[::-1]):
                asking, asked = self.places[one].peer, self.places[other].peer
                probe = asked.request("destination", name=f"{NAME}.probe{next(_numbers)}")["dest"]
                assert any(asking.request("wait_path", dest=probe, timeout=2.0)["found"] for _ in range(TRIES)), (
                    f"{one} does not reach {other}\n{asking.said()}\n{asked.said()}"
                )

    def kill(self, *victims: int) -> None:
        """All at once, then start them again, one after the other."""
        for n in victims:
            self.places[n].peer.kill()
        for n in victims:
            self.tally.restarted(n)
            self.places[n].start()
        self._meet([cable for cable in self.cables if set(cable) & set(victims)])

    def everybody_announces(self) -> dict[int, str]:
        """Returns when everybody has heard everybody: what each node said."""
        # An announce in the same second as an answer is no news to stock nodes (protocol 02, T2).
        threading.Event().wait(1.0 - time.time() % 1.0 + 0.05)
        words = {n: f"word {next(_numbers)}".encode().hex() for n in range(NODES)}
        for n, word in words.items():
            self.places[n].announce(word)
        for one, other in permutations(range(NODES), 2):
            self.places[one].hears(self.places[other].dest, words[other])
        return words

    def everybody_reaches_everybody(self) -> None:
        for one, other in permutations(range(NODES), 2):
            assert self.places[one].delivers(self.places[other].dest), f"{one} does not reach {other}"

    def check_copies(self, words: dict[int, str]) -> None:
        """Each announce left its owner once on each of its cables and was passed on to everybody else; no storms."""
        for n, word in words.items():
            copies = self.tally.copies(word)
            neighbours = {sum(cable) - n for cable in self.cables if n in cable}
            own = {receiver: times for (sender, receiver), times in copies.items() if sender == n}
            assert own == dict.fromkeys(neighbours, 1), f"{n} sent its own announce {own}"
            reached = {receiver for _, receiver in copies}
            assert reached >= set(range(NODES)) - {n}, f"the announce of {n} reached {reached} only"
        assert not self.tally.too_many()


SHAPES: dict[str, tuple[list[tuple[int, int]], set[int]]] = {
    "line": ([(0, 1), (1, 2), (2, 3), (3, 4)], {1, 3}),
    "ring": ([(0, 1), (1, 2), (2, 3), (3, 4), (0, 4)], {1, 3}),
    "star": ([(0, 1), (0, 2), (0, 3), (0, 4)], {0, 2, 4}),
}


@pytest.fixture(params=SHAPES)
def mesh(request: pytest.FixtureRequest) -> Iterator[Mesh]:
    with workspace() as space, ExitStack() as stack:
        yield Mesh(space, stack, *SHAPES[request.param])


@pytest.mark.slow
def test_everybody_reaches_everybody_and_does_again_when_nodes_were_killed(mesh: Mesh) -> None:
    """The victims are one of ours and a stock one; in the star, ours is the one in the middle."""
    first = mesh.everybody_announces()
    mesh.everybody_reaches_everybody()
    mesh.kill(min(mesh.ours), min(set(range(NODES)) - mesh.ours))
    second = mesh.everybody_announces()
    mesh.everybody_reaches_everybody()
    mesh.check_copies(first)
    mesh.check_copies(second)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_nodes_are_killed_again_and_again(mesh: Mesh) -> None:
    dice = random.Random(17)
    for _ in range(8):
        mesh.kill(*sorted(dice.sample(range(NODES), 2)))
        words = mesh.everybody_announces()
        mesh.everybody_reaches_everybody()
        mesh.check_copies(words)
    assert not mesh.tally.storm.wait(REPEATED), mesh.tally.too_many()
