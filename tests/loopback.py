"""Nodes joined in memory: interfaces that hand their batches to each other, and wires that tests can stop.

The nodes are real ones with their threads. What makes tests repeatable is that packets move only when a test lets them,
that the clock moves only when a test moves it, and that a test can wait for a thread to have gone to sleep. Every wait
has a deadline that only a failure reaches.
"""

from __future__ import annotations

import queue
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rnsfast import Identity, Link, Node
from rnsfast.engine.port import Port
from rnsfast.node.config import NodeConfig

PATIENCE = 10.0  # real seconds after which a test that waits fails

Match = Callable[[bytes], bool]


def is_proof(raw: bytes) -> bool:
    """The proof of a packet on a link."""
    return raw[0] & 0x0F == 0x0F and raw[18] == 0x00


def is_message(raw: bytes) -> bool:
    """A channel packet."""
    return raw[0] & 0x0F == 0x0C and raw[18] == 0x0E


def anything(raw: bytes) -> bool:
    return True


class Clock:
    """Time as the reactors see it. It creeps by a microsecond a look, so that nothing takes no time at all."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now

    def advance(self, seconds: float, *nodes: Node) -> None:
        """Move time, and have the reactors see it and do what is due."""
        self.now += seconds
        for node in nodes:
            settle(node)


class Sleepers:
    """Stands in for `threading.Condition` in waits: says when a thread is about to sleep, the node's lock held.

    Whoever then takes the node's lock finds it asleep. `before` runs once at that moment, without the lock given up.
    """

    def __init__(self) -> None:
        self._asleep = threading.Semaphore(0)
        self.before: Callable[[], None] | None = None
        self.waits = 0

    def condition(self, lock: Any) -> threading.Condition:
        sleepers = self

        class Condition(threading.Condition):
            def wait(self, timeout: float | None = None) -> bool:
                before, sleepers.before = sleepers.before, None
                if before is not None:
                    before()
                sleepers.waits += 1
                sleepers._asleep.release()
                return super().wait(timeout)

        return Condition(lock)

    def forget(self) -> None:
        """Whoever has slept until now does not count."""
        while self._asleep.acquire(blocking=False):
            pass

    def await_one(self, count: int = 1) -> None:
        """Wait until `count` more threads sleep."""
        for _ in range(count):
            assert self._asleep.acquire(timeout=PATIENCE), "no thread went to sleep"


def install_clock(monkeypatch: Any) -> Clock:
    clock = Clock()
    monkeypatch.setattr("rnsfast.node.reactor.monotonic", clock)
    return clock


def install_sleepers(monkeypatch: Any) -> Sleepers:
    sleepers = Sleepers()
    stand_in = types.SimpleNamespace(Condition=sleepers.condition, TIMEOUT_MAX=threading.TIMEOUT_MAX)
    monkeypatch.setattr("rnsfast.node.waiting.threading", stand_in)
    return sleepers


def settle(node: Node) -> None:
    """Return when the node's reactor has gone once round its loop, timers included."""
    for _ in range(2):
        done = threading.Event()
        node._reactor.call_at(0.0, done.set)
        assert done.wait(PATIENCE), "the reactor does not turn"


class Worker:
    """A thread with a result."""

    def __init__(self, fn: Callable[..., Any], *args: Any) -> None:
        self._fn, self._args = fn, args
        self.value: Any = None
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True, name="test-worker")
        self.thread.start()

    def _run(self) -> None:
        try:
            self.value = self._fn(*self._args)
        except BaseException as error:
            self.error = error

    @property
    def is_running(self) -> bool:
        return self.thread.is_alive()

    def join(self) -> None:
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive(), "the thread still waits"

    def result(self) -> Any:
        self.join()
        if self.error is not None:
            raise self.error
        return self.value


class Wire:
    """One direction. Packets cross it in order on the receiver's reactor thread, or inside the sender's call."""

    def __init__(self, delay: float = 0.0) -> None:
        self.delay = delay
        self.inline = False
        self.drop: Match | None = None
        self.carried = 0
        self.senders: list[str] | None = None  # names of the threads that sent, if a test wants to know
        self.on_carry: Callable[[list[bytes]], None] | None = None
        self._hold: Match | None = None
        self._held: deque[bytes] = deque()
        self._queue: deque[bytes] = deque()
        self._draining = False
        self._changed = threading.Condition()
        self.sink: Interface | None = None

    def carry(self, packets: list[bytes]) -> None:
        """From the sender, in order."""
        if self.on_carry is not None:
            self.on_carry(packets)
        with self._changed:
            self.carried += len(packets)
            if self.senders is not None:
                self.senders += [threading.current_thread().name] * len(packets)
            if self.drop is not None:
                packets = [raw for raw in packets if not self.drop(raw)]
            if self._hold is not None:
                self._held += [raw for raw in packets if self._hold(raw)]
                packets = [raw for raw in packets if not self._hold(raw)]
            self._changed.notify_all()
        self._pass_on(packets)

    def hold(self, match: Match = anything) -> None:
        """Keep packets that match until they are released."""
        with self._changed:
            self._hold = match

    def release(self, count: int | None = None, *, skip: int = 0) -> None:
        """Let held packets go: `count` of them (all for None) after the first `skip`. Later ones are held again."""
        with self._changed:
            held = list(self._held)
            end = len(held) if count is None else skip + count
            assert end <= len(held), f"{len(held)} packets are held"
            self._held = deque(held[:skip] + held[end:])
        self._pass_on(held[skip:end])

    def flow(self) -> None:
        """Hold no more."""
        with self._changed:
            self._hold = None
        self.release()

    @property
    def held(self) -> int:
        return len(self._held)

    def wait_held(self, count: int) -> None:
        """Wait until `count` packets are held."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._held) >= count, PATIENCE), f"{self.held} held"

    def wait_carried(self, count: int) -> None:
        """Wait until `count` packets have been sent since the beginning."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.carried >= count, PATIENCE), f"{self.carried} carried"

    def restart(self) -> None:
        """The receiver begins anew: what its last run did not take is lost."""
        with self._changed:
            self._queue.clear()
            self._draining = False

    def _pass_on(self, packets: list[bytes]) -> None:
        sink = self.sink
        if sink is None or not packets:
            return
        if self.delay:
            sink.after(self.delay, lambda: sink.receive(packets))
            return
        with self._changed:
            self._queue += packets
            if self._draining:
                return
            self._draining = True
        if self.inline:
            self._drain()
        else:
            sink.after(0.0, self._drain)

    def _drain(self) -> None:
        while True:
            with self._changed:
                packets = list(self._queue)
                self._queue.clear()
                if not packets:
                    self._draining = False
                    return
            assert self.sink is not None
            self.sink.receive(packets)


class Interface:
    """One end. Closing it takes the other end down."""

    kind = "Loopback"

    def __init__(self, name: str, wire: Wire, **options: Any) -> None:
        self.name, self.wire = name, wire  # the wire it sends on
        self.peer: Interface | None = None
        self._options = options
        self._tx = threading.Lock()
        self._runtime: Any = None
        self.port: Port | None = None

    @property
    def ports(self) -> list[Port]:
        return [] if self.port is None else [self.port]

    def start(self, runtime: Any) -> None:
        self._runtime = runtime
        if self.peer is not None:
            self.peer.wire.restart()
        self.port = Port(self.name, **self._options)
        runtime.attach(self.port, self)
        self._look()
        if self.peer is not None:
            self.peer._look()

    def _look(self) -> None:
        """Up if both ends are open."""
        port, runtime, peer = self.port, self._runtime, self.peer
        if port is None:
            return
        with runtime.lock:
            before, port.online = port.online, peer is not None and peer.port is not None
        if port.online != before:
            runtime.changed(port)

    def flush(self, port: Port) -> None:
        with self._tx:
            with self._runtime.lock:
                packets = port.take()
            if packets and self.port is port and not self.wire.inline:
                self.wire.carry(packets)
                return
        if packets and self.port is port:
            self.wire.carry(packets)

    def after(self, seconds: float, fn: Callable[[], None]) -> None:
        runtime = self._runtime
        if runtime is not None:
            runtime.call_at(runtime.now() + seconds if seconds else 0.0, fn)

    def receive(self, packets: list[bytes]) -> None:
        port = self.port
        if port is not None:
            self._runtime.deliver(port, packets)

    def close(self) -> None:
        port, self.port = self.port, None
        if port is None:
            return
        self._runtime.detach(port)
        if self.peer is not None:
            self.peer._look()

    def status(self) -> dict[str, Any]:
        return {"state": "up" if self.port is not None and self.port.online else "down"}


class Pair:
    """Two nodes, `a` and `b`, and what lies between them: `to_b` and `to_a`."""

    def __init__(self, *, delay: float = 0.0, mtu_discovery: bool = True, **options: Any) -> None:
        self.to_b, self.to_a = Wire(delay), Wire(delay)
        self.end_a, self.end_b = Interface("a", self.to_b, **options), Interface("b", self.to_a, **options)
        self.end_a.peer, self.end_b.peer = self.end_b, self.end_a
        self.to_b.sink, self.to_a.sink = self.end_b, self.end_a
        self.config = NodeConfig(link_mtu_discovery=mtu_discovery)
        self.a = Node.from_interfaces([self.end_a], self.config)
        self.b = Node.from_interfaces([self.end_b], self.config)
        self._names = 0
        self.sleepers: Sleepers | None = None  # told to forget the waits that making a link takes

    def start(self) -> Pair:
        self.a.start()
        self.b.start()
        return self

    def stop(self) -> None:
        self.a.stop()
        self.b.stop()

    def link(self, on_link: Callable[[Link], Any] | None = None) -> tuple[Link, Link]:
        """A new link from `a` to `b`: both ends."""
        self._names += 1
        arrived: queue.SimpleQueue[Link] = queue.SimpleQueue()

        def handler(link: Link) -> None:
            if on_link is not None:
                on_link(link)
            arrived.put(link)

        inbox = self.b.register(Identity(), "test", f"n{self._names}")
        inbox.on_link(handler)
        link = self.a.connect(inbox.hash, "test", f"n{self._names}", timeout=PATIENCE)
        peer = arrived.get(timeout=PATIENCE)
        if self.sleepers is not None:
            self.sleepers.forget()
        return link, peer


@contextmanager
def joined(**options: Any) -> Iterator[Pair]:
    pair = Pair(**options).start()
    try:
        yield pair
    finally:
        for wire in (pair.to_a, pair.to_b):
            wire.drop, wire._hold = None, None
        pair.stop()


class Note:
    """A message of raw bytes."""

    MSGTYPE = 0x0101

    def __init__(self, raw: bytes = b"") -> None:
        self.raw = raw

    def pack(self) -> bytes:
        return self.raw

    def unpack(self, raw: bytes) -> None:
        self.raw = raw


def number(i: int) -> Note:
    return Note(i.to_bytes(4, "big"))


def number_of(note: Note) -> int:
    return int.from_bytes(note.raw, "big")
