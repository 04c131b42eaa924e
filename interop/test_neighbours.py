"""One bad neighbour, many good ones: field case F7.

Our transport node has a server interface with a stock client, and four client interfaces: to a closed port, to an
address that never answers, to a listener that accepts and does not read, and to a healthy stock node. What is measured
with the bad ones is compared with what is measured without them in the same run. The short version fills the queue
towards the silent reader from a connection of the test's own; with --soak the loads are those of the case.
"""

from __future__ import annotations

import os
import queue
import select
import socket
import statistics
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from time import monotonic, time
from typing import Any

import pytest

from interop.harness import Section, StockPeer, Workspace, free_port, tcp_client, tcp_server
from interop.ours import LIMIT, Task
from interop.seeded import data, digest
from rnsfast import Identity, Node
from rnsfast.interfaces.client import CONNECT_TIMEOUT, RECONNECT_WAIT
from rnsfast.interfaces.common import CommonConfig
from rnsfast.interfaces.stream import QUEUE_LIMIT, STALL_TIME
from rnsfast.interfaces.tcp import TcpClientConfig, TcpClientInterface
from rnsfast.wire.announce import Announce, build_announce, random_blob, signed_data
from rnsfast.wire.hdlc import HdlcDecoder, encode_many
from rnsfast.wire.names import destination_hash, name_hash
from rnsfast.wire.packet import ANNOUNCE, CTX_NONE, DATA, SINGLE, Packet, make_raw, parse_packet

NAME = "interop.far"
WIDE = {"ingress_control": False, "announce_cap": 100, "announce_rate_target": 1, "announce_rate_grace": 1 << 20}
PACKET = 480  # bytes of what fills the queue, header and all
CHUNK = 2000  # packets
BAD = ("closed", "mute", "silent")
ROUNDS = 3
WORSE = (2.0, 4.0, 3.0)  # times, at most: median and 95th percentile of echoes, duration of the resource


@dataclass(frozen=True)
class Load:
    """How much and how long."""

    echoes: int
    announces: int  # a second
    resource: int  # bytes
    stalls: int


SHORT = Load(echoes=40, announces=20, resource=2_000_000, stalls=1)
FULL = Load(echoes=1200, announces=50, resource=20_000_000, stalls=3)


@contextmanager
def mute_port() -> Iterator[int]:
    """A port whose connections never come about: its line is full, so that the system leaves new ones unanswered."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
        probe = stack.enter_context(socket.socket())
        probe.settimeout(0.3)
        try:
            probe.connect(listener.getsockname())
        except TimeoutError:
            yield listener.getsockname()[1]
            return
        pytest.skip("this system answers connections beyond a full line: no address that never answers")


class Silent:
    """A listener that accepts, says once that a destination is behind it, and reads only when it is told to."""

    def __init__(self) -> None:
        self.listener = socket.socket()
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen(1)
        self.listener.settimeout(4 * RECONNECT_WAIT + LIMIT)
        self.port = self.listener.getsockname()[1]
        self.connected: list[float] = []  # when
        self._identity, self._name = Identity(), name_hash("interop", "silent")
        self.destination = destination_hash(self._name, self._identity.hash)

    def accept(self, node: Node) -> None:
        """Take the next connection of our node, and return when it knows the way to the destination."""
        heard = threading.Event()
        node.on_announce(lambda news: heard.set(), "interop.silent")
        self.sock, _ = self.listener.accept()
        self.connected.append(monotonic())
        self.decoder = HdlcDecoder(1 << 16)
        blob = random_blob(os.urandom(5), int(time()))
        made = Announce(self.destination, self._identity.public_key, self._name, blob, None, b"", None)
        body = build_announce(made, self._identity.sign(signed_data(made)))
        self.sock.sendall(encode_many([make_raw(ANNOUNCE, self.destination, CTX_NONE, body)]))
        assert heard.wait(LIMIT), "the announce of the silent reader was not heard"

    def read_until(self, last: bytes) -> list[bytes]:
        """All packets up to the one that ends with `last`."""
        found: list[bytes] = []
        end = monotonic() + LIMIT
        while not any(packet.endswith(last) for packet in found[-2000:]):
            self.sock.settimeout(max(0.01, end - monotonic()))
            piece = self.sock.recv(1 << 18)
            assert piece, "the connection ended"
            found += self.decoder.feed(memoryview(piece))
        return found

    def wait_end(self) -> float:
        """When our node gives the connection up. Reading would spoil it, so the end is all that is waited for."""
        poll = select.poll()
        poll.register(self.sock, select.POLLHUP)
        assert poll.poll((STALL_TIME + LIMIT) * 1000), "the silent reader was not given up"
        return monotonic()

    def drop_all(self) -> None:
        """Have no connection, not even one that the system has completed."""
        self.sock.close()
        patience = self.listener.gettimeout()
        self.listener.settimeout(0)
        with suppress(BlockingIOError):
            while True:
                self.listener.accept()[0].close()
        self.listener.settimeout(patience)

    def close(self) -> None:
        self.listener.close()
        self.sock.close()


class Filler:
    """Fills the queue towards the silent reader, with numbered packets from a connection to the server interface."""

    def __init__(self, port: int, relay: bytes, destination: bytes) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), LIMIT)
        self.sock.settimeout(None)
        self._head, self._destination = bytes((0x50, 0)) + relay, destination
        self.count = 0
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        """Not to be one more that does not read."""
        with suppress(OSError):
            while self.sock.recv(1 << 16):
                pass

    def close(self) -> None:
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()

    def packet(self, content: bytes) -> bytes:
        raw = make_raw(SINGLE << 2 | DATA, self._destination, CTX_NONE, content)
        return self._head + raw[2:]

    def numbered(self, number: int) -> bytes:
        return number.to_bytes(4, "big") + (number.to_bytes(4, "little") * 128)[: PACKET - 39]

    def send(self, *contents: bytes) -> None:
        self.sock.sendall(encode_many([self.packet(content) for content in contents]))

    def send_chunk(self) -> None:
        self.send(*(self.numbered(n) for n in range(self.count, self.count + CHUNK)))
        self.count += CHUNK


@dataclass
class Scene:
    """All of F7."""

    node: Node
    left: StockPeer
    right: StockPeer
    silent: Silent
    filler: Filler
    link: str
    load: Load
    targets: dict[str, int]

    def interface(self, name: str) -> dict[str, Any]:
        return next(i for i in self.node.status()["interfaces"] if i["name"] == name)

    def port(self, name: str) -> dict[str, Any]:
        return next(p for p in self.node.status()["ports"] if p["interface"] == name)

    def queue_is_full(self) -> bool:
        return self.port("silent")["drops"].get("tx.queue_full", 0) > 0

    def waiting(self) -> int:
        connection = self.interface("silent").get("connection")
        return 0 if connection is None else connection["waiting_bytes"]

    def fill(self) -> None:
        """Until nothing more fits."""
        before = self.port("silent")["drops"].get("tx.queue_full", 0)
        for _ in range(40):
            self.filler.send_chunk()
            if self.port("silent")["drops"].get("tx.queue_full", 0) > before:
                return
        raise AssertionError("the queue towards the silent reader has no end")

    def add_bad(self) -> None:
        """The three, once more."""
        self.silent.drop_all()
        for name, port in self.targets.items():
            if name in BAD:
                common = CommonConfig(name=name, ingress_control=False, announce_cap=1.0)
                target = TcpClientConfig(common=common, target_host="127.0.0.1", target_port=port)
                self.node.add_interface(TcpClientInterface(target))
        self.silent.accept(self.node)

    def echoes(self) -> tuple[float, float]:
        """Median and 95th percentile of as many as the load says, ten a second."""
        took: list[float] = []
        pause, lost = threading.Event(), 0
        for number in range(self.load.echoes):
            began = monotonic()
            told = self.left.request("request", link=self.link, path="/echo", data=f"{number:04x}", timeout=5.0)
            spent = monotonic() - began
            if told["status"] == "ready":
                took.append(spent)
            else:
                lost += 1
            pause.wait(max(0.0, 0.1 - spent))
        assert lost <= self.load.echoes // 20, f"{lost} of {self.load.echoes} echoes were lost"
        return statistics.median(took), sorted(took)[int(len(took) * 0.95)]

    def resource(self) -> float:
        began = monotonic()
        size = self.load.resource
        sent = self.left.request("resource", link=self.link, seed="f7", size=size, timeout=120)
        told = self.right.expect("resource", link=self.link)
        assert sent["complete"] and told["sha256"] == digest(data("random", "f7", size))
        return monotonic() - began


class Announcer:
    """Announces from the healthy side, as many a second as the load says."""

    def __init__(self, peer: StockPeer, a_second: int) -> None:
        self._peer, self._pause, self._over = peer, 1 / a_second, threading.Event()
        made = [peer.request("destination", name=f"interop.news{n}") for n in range(a_second)]
        self.destinations = [one["dest"] for one in made]
        self.sent = 0
        self._task = Task(self._run)

    def _run(self) -> None:
        while not self._over.wait(self._pause):
            self._peer.request("announce", dest=self.destinations[self.sent % len(self.destinations)])
            self.sent += 1

    def stop(self) -> None:
        self._over.set()
        self._task.result()


@contextmanager
def scene(space: Workspace, load: Load) -> Iterator[Scene]:
    port, healthy = free_port(), free_port()
    with ExitStack() as stack:
        mute = stack.enter_context(mute_port())
        silent = Silent()
        stack.callback(silent.close)
        right = stack.enter_context(StockPeer(space.config("right", [tcp_server(healthy, **WIDE)])))
        targets = {"closed": free_port(), "mute": mute, "silent": silent.port, "healthy": healthy}
        sections: list[Section] = [tcp_server(port, "clients", **WIDE)]
        sections += [tcp_client(target, name, **WIDE) for name, target in targets.items()]
        node = Node(space.config("ours", sections, transport=True), strict=True)
        began = monotonic()
        stack.enter_context(node)
        assert monotonic() - began < CONNECT_TIMEOUT / 2, "the start waited for a neighbour"
        silent.accept(node)
        left = stack.enter_context(StockPeer(space.config("left", [tcp_client(port, **WIDE)])))
        made = right.request("destination", name=NAME, announce=True, handlers=["/echo"], on_link={"resources": True})
        assert left.request("wait_path", dest=made["dest"])["found"]
        link = left.request("open", dest=made["dest"], name=NAME)["link"]
        right.expect("link", link=link)
        filler = Filler(port, node._engine.transport_id, silent.destination)
        stack.callback(filler.close)
        yield Scene(node, left, right, silent, filler, link, load, targets)


def check_frames(here: Scene) -> None:
    """What waited for the silent reader arrives whole, in order, without a gap before the first that was dropped."""
    sent = here.filler.count
    here.filler.send(b"the end")  # dropped if it comes before there is room: then it is sent again
    reading = Task(here.silent.read_until, b"the end")
    while True:
        try:
            packets = reading.result(0.2)
            break
        except queue.Empty:
            here.filler.send(os.urandom(8) + b"the end")  # repeats are filtered
    assert not here.silent.decoder.drops
    numbers = []
    for raw in packets:
        packet = parse_packet(raw)
        assert isinstance(packet, Packet), raw.hex()
        is_ours = packet.flags & 3 == DATA and packet.destination == here.silent.destination
        if is_ours and not packet.data.endswith(b"the end"):
            number = int.from_bytes(packet.data[:4], "big")
            assert packet.data == here.filler.numbered(number), "a damaged frame"
            numbers.append(number)
    assert numbers == sorted(set(numbers)), "a repeated frame, or one out of order"
    dropped = here.port("silent")["drops"]["tx.queue_full"]
    assert sent - len(numbers) <= dropped, f"{len(numbers)} of {sent} arrived, {dropped} were counted as dropped"
    assert numbers[: QUEUE_LIMIT // PACKET // 2] == list(range(QUEUE_LIMIT // PACKET // 2))


def check_status(here: Scene) -> None:
    """Every neighbour has a state, and since when."""
    states = {name: here.interface(name) for name in ("closed", "mute", "silent", "healthy", "clients")}
    assert all(state["state_for"] >= 0 for state in states.values())
    assert states["healthy"]["state"] == states["silent"]["state"] == "online"
    assert states["clients"]["state"] == "listening"
    assert states["closed"]["state"] in ("waiting for the next try", "connecting", "resolving")
    assert "ECONNREFUSED" in states["closed"]["last_error"] or "refused" in states["closed"]["last_error"]
    assert states["mute"]["state"] in ("waiting for the next try", "connecting", "resolving")
    assert states["closed"]["connects"] == states["mute"]["connects"] == 0


def check_given_up(here: Scene, stalls: int) -> None:
    """A reader that stays silent is given up and tried again, later each time."""
    pauses = []
    for number in range(stalls):
        if number:
            here.fill()
        ended = here.silent.wait_end()
        here.silent.sock.close()
        here.silent.accept(here.node)
        state = here.interface("silent")
        assert "took nothing" in state["last_error"] and state["connects"] == number + 2, state
        pauses.append(here.silent.connected[-1] - ended)
    assert not pauses or pauses[0] > RECONNECT_WAIT - 1.0
    assert all(later > 1.4 * sooner for sooner, later in pairwise(pauses)), pauses


def compare(here: Scene) -> None:
    """With and without bad neighbours. Others use this machine, too: of three rounds one must be as it should be."""
    found = []
    for number in range(ROUNDS):
        if number:
            here.add_bad()
            here.fill()
        giving_up = Task(check_given_up, here, 0 if number else here.load.stalls)
        with_bad = *here.echoes(), here.resource()
        assert here.waiting() <= QUEUE_LIMIT
        giving_up.result(here.load.stalls * (STALL_TIME + LIMIT))
        for interface in [i for i in here.node.interfaces if i.name in BAD]:
            here.node.remove_interface(interface)
        without = *here.echoes(), here.resource()
        found.append((with_bad, without))
        print(f"median, 95th percentile, resource: {with_bad}, without {without}")
        if all(bad <= limit * good for bad, good, limit in zip(with_bad, without, WORSE, strict=True)):
            return
    raise AssertionError(f"bad neighbours disturb the good ones: {found}")


def run(space: Workspace, load: Load) -> None:
    with scene(space, load) as here:
        announcer = Announcer(here.right, load.announces)
        try:
            here.resource()  # the first of a link is slower: the stock node widens its window
            here.fill()
            assert here.waiting() <= QUEUE_LIMIT
            check_frames(here)
            here.fill()
            check_status(here)
            compare(here)
        finally:
            announcer.stop()
        heard = len(here.left.seen("announce"))
        assert heard >= announcer.sent // 2, f"{heard} of {announcer.sent} announces arrived"


@pytest.mark.slow
def test_bad_neighbours_disturb_nobody(space: Workspace) -> None:
    run(space, SHORT)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_two_minutes_with_bad_neighbours(space: Workspace) -> None:
    run(space, FULL)
