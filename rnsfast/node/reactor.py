"""The reactor: one thread that polls all descriptors, one lock, deadlines.  Protocol 09, section 4; DESIGN, section 6.

Every use of the engine is a turn: lock, work, unlock, flush what the work queued, then wake who waits for what it
changed.  A turn may be taken on any thread; a turn of an application thread flushes on that thread, so a single packet
leaves without waiting for anybody.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from math import inf
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from rnsfast.engine.engine import Engine
from rnsfast.engine.port import Port
from rnsfast.interfaces.base import Address, Interface
from rnsfast.node.dispatch import Dispatcher, Strand
from rnsfast.node.waiting import Waitable
from rnsfast.osio.memory import keep_heap
from rnsfast.osio.poller import open_poller

if TYPE_CHECKING:
    from rnsfast.node.link import Link

log = logging.getLogger(__name__)

SLICE: Final = 16  # packets processed before what they caused is flushed: both ends of a link work at the same time
LARGE: Final = 4096  # bytes of a packet from which on slices are smaller: its work is worth a system call
LARGE_IN: Final = 2  # packets a slice of large ones
LARGE_OUT: Final = 4  # packets a slice of small ones that let go large ones
LONGEST_SLEEP: Final = 3600.0  # seconds; a poller takes no infinity


class Call:
    """A deadline given to the reactor."""

    __slots__ = ("fn",)

    def __init__(self, fn: Callable[[], None]) -> None:
        self.fn: Callable[[], None] | None = fn

    def cancel(self) -> None:
        """Idempotent; harmless when it has run."""
        self.fn = None


class Turn:
    """`with reactor.turn as now:` the lock is held inside; afterwards queues are flushed and waiters woken."""

    __slots__ = ("_reactor", "_tell")

    def __init__(self, reactor: Reactor, *, tell: bool = True) -> None:
        self._reactor = reactor
        self._tell = tell

    def __enter__(self) -> float:
        self._reactor.lock.acquire()
        return monotonic()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._reactor.finish_turn(tell=self._tell or kind is not None)


class Reactor:
    """Implements `Runtime` for interfaces."""

    def __init__(self, name: str, dispatcher: Dispatcher) -> None:
        self.name = name
        self.lock = threading.Lock()
        self.turn = Turn(self)
        self.engine: Engine = None  # type: ignore[assignment]  # set by the node before anything runs
        self.dispatcher = dispatcher
        self.ready: list[Strand] = []  # strands with new calls, submitted at the end of the turn
        self.sinks: list[Link] = []  # links of forwarders for which this turn has brought packets
        self._poller = open_poller()
        self._callbacks: dict[int, Callable[[int], None]] = {}
        self._calls: list[tuple[float, int, Call]] = []
        self._calls_lock = threading.Lock()
        self._numbers = count()
        self._wake_at = 0.0  # the poller returns by then; 0 while the reactor is awake
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"{name}-reactor", daemon=True)
        self.closed = False  # the node is stopping: nothing new is begun. Under the lock
        self.wakeups = 0
        self.port_generation = 0  # counts changes of interfaces
        self.on_ports_changed: Callable[[Port], None] = lambda port: None  # under the lock

    # ------------------------------------------------------------------ turns

    def finish_turn(self, *, tell: bool = True) -> None:
        """Unlock, flush, wake. Called with the lock held; `Turn` does.

        Without `tell` the waking is left to a later turn of the same batch.
        """
        engine = self.engine
        ports: list[Port] | None = None
        wake: list[Waitable] | None = None
        strands: list[Strand] | None = None
        arrived: list[tuple[Link, list[bytes]]] | None = None
        if engine.dirty:
            ports = list(engine.dirty)
            engine.dirty.clear()
        if engine.touched and tell:
            wake = [owner for item in engine.touched if (owner := item.owner) is not None and owner.has_waiters]
            engine.touched.clear()
        if self.ready and tell:
            strands, self.ready = self.ready, []
        if self.sinks:
            arrived = [(link, link._arrived) for link in self.sinks]
            for link in self.sinks:
                link._arrived = []
            self.sinks = []
        late = engine.timers.deadline < self._wake_at or bool(engine.inbound)
        self.lock.release()
        if ports is not None:
            for port in ports:
                if port.owner is not None:
                    _guard(port.owner.flush, port)
        if arrived is not None:
            for link, packets in arrived:
                _guard(link._hand_over, packets)
        if wake:
            rings: list[Callable[[], object]] = []
            with self.lock:
                for owner in wake:
                    rings += owner.notify()
            for ring in rings:
                _ring(ring)
        if strands is not None:
            for strand in strands:
                self.dispatcher.submit(strand)
        if late:
            self._poller.wake()

    def enqueue(self, strand: Strand, call: Callable[[], None]) -> None:
        """Have `call` made in the strand's order, without the lock. Under the lock."""
        if strand.append(call):
            self.ready.append(strand)

    def is_mine(self, thread: threading.Thread) -> bool:
        """Whether `thread` is the reactor's."""
        return thread is self._thread

    def check_may_block(self) -> None:
        """RuntimeError on the reactor thread: whoever waits there waits for itself."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("this call waits for the network and cannot be made on the node's reactor thread")

    # ------------------------------------------------------------------ Runtime

    def now(self) -> float:
        """Monotonic seconds."""
        return monotonic()

    def watch(self, fd: int, events: int, callback: Callable[[int], None]) -> None:
        """Call `callback(events)` on the reactor thread whenever `fd` is ready."""
        self._callbacks[fd] = callback
        self._poller.watch(fd, events)

    def rewatch(self, fd: int, events: int) -> None:
        """Other events for a watched descriptor."""
        self._poller.rewatch(fd, events)

    def unwatch(self, fd: int) -> None:
        """Stop watching; before the descriptor is closed."""
        self._poller.unwatch(fd)
        self._callbacks.pop(fd, None)

    def call_at(self, when: float, fn: Callable[[], None]) -> Call:
        """Call `fn()` on the reactor thread at `when`."""
        call = Call(fn)
        with self._calls_lock:
            heappush(self._calls, (when, next(self._numbers), call))
            late = when < self._wake_at
        if late and threading.current_thread() is not self._thread:
            self._poller.wake()
        return call

    def attach(self, port: Port, interface: Interface) -> None:
        """A port appears."""
        with self.turn:
            port.owner = interface
            self.engine.attach(port, monotonic())
            self._tell_change(port)

    def detach(self, port: Port) -> None:
        """A port is gone for good."""
        with self.turn as now:
            self.engine.detach(port, now)
            self._tell_change(port)

    def changed(self, port: Port) -> None:
        """`port.online` or `port.congested` changed."""
        with self.turn as now:
            self.engine.changed(port, now)
            self._tell_change(port)

    def _tell_change(self, port: Port) -> None:
        """Under the lock."""
        self.port_generation += 1
        self.on_ports_changed(port)

    def deliver(self, port: Port, packets: list[bytes]) -> None:
        """One batch of received packets, in slices: what the first packets cause leaves while the next are handled."""
        engine = self.engine
        if engine.transport is None:
            with self.lock:
                packets = engine.relay(port, packets, monotonic())
        else:
            with Turn(self, tell=False) as now:  # what is for others leaves first, all at once
                packets = engine.relay(port, packets, now)
        if not packets:
            return
        size = LARGE_IN if len(packets[-1]) >= LARGE else LARGE_OUT if port.last_size >= LARGE else SLICE
        last = len(packets) - size
        for at in range(0, len(packets), size):
            with Turn(self, tell=at >= last) as now:  # the batch rings once
                engine.intake(port, packets[at : at + size] if len(packets) > size else packets, now)
                settlements = engine.take_settlements()
            if settlements:
                for settlement in settlements:
                    settlement.compute_yielding()
                with Turn(self, tell=at >= last) as now:
                    engine.settle(settlements, now)

    def report(self, interface: Interface, message: str) -> None:
        """One sentence for the operator."""
        log.warning("%s", message)

    def resolve(self, host: str, port: int, callback: Callable[[list[Address] | OSError], None]) -> None:
        """Look `host` up on a callback thread."""

        def look_up() -> None:
            answer: list[Address] | OSError
            try:
                found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                answer = [(int(family), address) for family, _, _, _, address in found]
            except OSError as error:
                answer = error
            except UnicodeError as error:
                answer = OSError(f"{host!r} is no host name ({error})")
            self.call_at(0.0, lambda: callback(answer))

        strand = Strand()
        strand.append(look_up)
        self.dispatcher.submit(strand)

    # ------------------------------------------------------------------ the thread

    def start(self) -> None:
        """Begin to poll."""
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """End the thread; not from the thread itself. What was watched is forgotten."""
        self._stopping = True
        self._poller.wake()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        self._poller.close()

    def _run(self) -> None:
        keep_heap()
        wait, callbacks = self._poller.wait, self._callbacks
        while not self._stopping:
            timeout = 0.0 if self.engine.inbound else self._sleep_until_due()
            events = wait(timeout)
            self.wakeups += 1
            self._wake_at = 0.0
            for fd, ready in events:
                callback = callbacks.get(fd)
                if callback is not None:
                    _guard(callback, ready)
            now = monotonic()
            if self._calls and self._calls[0][0] <= now:
                self._make_calls(now)
            if self.engine.timers.deadline <= now:
                _guard(self._run_timers)
            if self.engine.inbound:
                _guard(self._serve_waiting)

    def _serve_waiting(self) -> None:
        """A few at a time, and only after everything else: links do not wait for them."""
        engine = self.engine
        with self.lock:
            items = engine.inbound.take()
        verdicts = engine.verify(items)
        with self.turn as now:
            engine.verified(items, verdicts, now)

    def _run_timers(self) -> None:
        with self.turn as now:
            self.engine.run_timers(now)

    def _sleep_until_due(self) -> float:
        """Seconds to sleep. Note the moment first, look second: who sets an earlier deadline in between rings."""
        with self.lock, self._calls_lock:
            first = self._calls[0][0] if self._calls else inf
            self._wake_at = due = min(first, self.engine.timers.deadline)
        return min(max(due - monotonic(), 0.0), LONGEST_SLEEP)

    def _make_calls(self, now: float) -> None:
        while True:
            with self._calls_lock:
                if not self._calls or self._calls[0][0] > now:
                    return
                _, _, call = heappop(self._calls)
            if call.fn is not None:
                _guard(call.fn)


def _guard(fn: Callable[..., None], *args: Any) -> None:
    """The reactor outlives whatever goes wrong in one interface."""
    try:
        fn(*args)
    except Exception:
        log.exception("an interface or a timer raised; the node goes on")


def _ring(ring: Callable[[], object]) -> None:
    """A waker that fails (its event loop is closed) must not keep the others from being woken."""
    try:
        ring()
    except Exception as error:
        log.debug("a waiter could not be woken: %r", error)
