"""Stand-ins that keep the real rules: a runtime with a clock that tests move, and system calls that follow a script."""

from __future__ import annotations

import errno
import heapq
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from rnsfast.engine.port import Port
from rnsfast.osio.contract import RxBatch
from rnsfast.osio.poller import open_poller

PATIENCE = 10.0  # real seconds after which a test that waits for a socket fails


class FakeCall:
    def __init__(self, fn: Callable[[], None]) -> None:
        self.fn: Callable[[], None] | None = fn

    def cancel(self) -> None:
        self.fn = None


class FakeRuntime:
    """Real descriptors, virtual time, everything on the test's thread.

    `advance` moves the clock and makes the calls that fall due; `run_until` handles descriptors until something is
    true. Names resolve to what `names` says, or to themselves if they are addresses.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.time = 1000.0
        self.ports: dict[Port, Any] = {}
        self.detached: list[Port] = []
        self.log: list[str] = []  # what happened, in order
        self.reports: list[str] = []
        self.received: list[bytes] = []
        self.batches: list[tuple[Port, list[bytes]]] = []
        self.names: dict[str, list[Any] | OSError] = {}
        self.on_changed: Callable[[Port], None] = lambda port: None
        self.on_deliver: Callable[[Port, list[bytes]], None] = lambda port, packets: None
        self.poller = open_poller()
        self.callbacks: dict[int, Callable[[int], None]] = {}
        self.events: dict[int, int] = {}
        self.rewatches = 0
        self._calls: list[tuple[float, int, FakeCall]] = []
        self._numbers = count()

    # Runtime

    def now(self) -> float:
        return self.time

    def watch(self, fd: int, events: int, callback: Callable[[int], None]) -> None:
        assert not self.lock.locked()
        self.callbacks[fd] = callback
        self.events[fd] = events
        self.poller.watch(fd, events)

    def rewatch(self, fd: int, events: int) -> None:
        assert fd in self.callbacks, "rewatch of a descriptor that is not watched"
        self.rewatches += 1
        self.events[fd] = events
        self.poller.rewatch(fd, events)

    def unwatch(self, fd: int) -> None:
        self.poller.unwatch(fd)
        self.callbacks.pop(fd, None)
        self.events.pop(fd, None)

    def call_at(self, when: float, fn: Callable[[], None]) -> FakeCall:
        call = FakeCall(fn)
        heapq.heappush(self._calls, (when, next(self._numbers), call))
        self.poller.wake()
        return call

    def attach(self, port: Port, interface: Any) -> None:
        with self.lock:
            assert port not in self.ports
            self.ports[port] = interface
            port.owner = interface
            self.log.append(f"attach {port}")

    def detach(self, port: Port) -> None:
        with self.lock:
            del self.ports[port]
            self.detached.append(port)
            self.log.append(f"detach {port}")

    def changed(self, port: Port) -> None:
        with self.lock:
            state = "online" if port.online else "offline"
            self.log.append(f"{state}{' congested' if port.congested else ''} {port}")
        self.on_changed(port)

    def deliver(self, port: Port, packets: list[bytes]) -> None:
        with self.lock:
            assert port in self.ports, "packets of a port that is not attached"
            self.batches.append((port, packets))
            self.received += packets
        self.on_deliver(port, packets)

    def report(self, interface: Any, message: str) -> None:
        self.reports.append(message)

    def resolve(self, host: str, port: int, callback: Callable[[Any], None]) -> None:
        answer = self.names.get(host)
        if answer is None:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            answer = [(family, (host, port))]
        self.call_at(self.time, lambda: callback(answer))

    # For tests

    @property
    def pending_calls(self) -> list[float]:
        """When the calls that are not cancelled fall due, in order."""
        return sorted(when for when, _, call in self._calls if call.fn is not None)

    def make_due_calls(self) -> None:
        """What is due now; what these calls ask for at once has its turn next time, as on the reactor."""
        due: list[FakeCall] = []
        while self._calls and self._calls[0][0] <= self.time:
            due.append(heapq.heappop(self._calls)[2])
        for call in due:
            if call.fn is not None:
                call.fn()

    def advance(self, seconds: float) -> None:
        """Move the clock in steps from call to call. Descriptors are not looked at."""
        end = self.time + seconds
        while self._calls and self._calls[0][0] <= end:
            self.time = max(self.time, self._calls[0][0])
            self.make_due_calls()
        self.time = end

    def handle_ready(self, timeout: float = 0.0) -> int:
        """Make the calls that are due and handle the descriptors that are ready; how many were."""
        self.make_due_calls()
        events = self.poller.wait(timeout)
        for fd, ready in events:
            callback = self.callbacks.get(fd)
            if callback is not None:
                callback(ready)
        return len(events)

    def run_until(self, done: Callable[[], Any]) -> None:
        """Handle descriptors until `done()`; the clock stands still. Fails after some real seconds."""
        limit = time.monotonic() + PATIENCE
        while not done():
            left = limit - time.monotonic()
            assert left > 0, "it did not happen"
            self.handle_ready(min(left, 0.05))
        self.make_due_calls()

    def close(self) -> None:
        assert not self.callbacks, f"descriptors still watched: {list(self.callbacks)}"
        self.poller.close()


class ScriptedCalls:
    """System calls of a stream that follow a script; a call beyond it fails the test.

    A step of `sends` is how many bytes to take (at most what is offered), None for all of them, or a negative errno.
    A step of `receives` is bytes, b"" for the end of the stream, or a negative errno.
    """

    backend = "scripted"

    def __init__(
        self, sends: list[int | None] | None = None, receives: list[bytes | int] | None = None, join_below: int = 1024
    ) -> None:
        self.sends: deque[int | None] = deque(sends or [])
        self.receives: deque[bytes | int] = deque(receives or [])
        self.join_below = join_below
        self.wire = bytearray()
        self.calls: list[str] = []

    def recv(self, into: RxBatch) -> int:
        assert self.receives, "recv beyond the script"
        self.calls.append("recv")
        step = self.receives.popleft()
        if isinstance(step, int):
            return step
        into.room(0)[: len(step)] = step
        return len(step)

    def _take(self, name: str, data: bytes) -> int:
        assert self.sends, f"{name} beyond the script"
        self.calls.append(name)
        step = self.sends.popleft()
        if step is not None and step < 0:
            return step
        taken = len(data) if step is None else min(step, len(data))
        self.wire += data[:taken]
        return taken

    def send(self, data: bytes) -> int:
        return self._take("send", data)

    def gather(self, items: list[bytes]) -> int:
        assert 1 < len(items) <= 1024
        return self._take("gather", b"".join(items))


EAGAIN = -errno.EAGAIN


def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connected pair that is closed afterwards."""
    left, right = socket.socketpair()
    try:
        yield left, right
    finally:
        left.close()
        right.close()
