"""A model of Registered I/O after the rules of protocol 09, section 10.1.

It knows nothing of the product's bookkeeping: descriptors, addresses and packets are read from the raw pointers it is
given, by offsets written down here once more. What breaks a rule fails the test at once.

    deferred    starts at a commit, or at the next request that is not deferred; with `eager` it starts at once
    capacity    a request counts from its post until its completion is dequeued
    started     a send completes at once, or when the test calls `complete`; a receive when the test calls `arrive`
"""

from __future__ import annotations

import ctypes
import mmap
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.osio.fake_events import FakeEvents

RIO_BUF = struct.Struct("<QII")  # buffer, offset, length
RIORESULT = struct.Struct("<iIQQ")  # status, transferred, socket context, request context
NOTIFICATION = struct.Struct("<i4xQi4x8x")  # type, event, reset
DEFER, COMMIT_ONLY = 2, 8
CORRUPT = 0xFFFFFFFF
EINVAL, EALREADY, EMSGSIZE, ENOBUFS, ABORTED = 10022, 10037, 10040, 10055, 995


@dataclass
class Queue:
    """A completion queue."""

    size: int
    event: int
    done: deque[tuple[int, int, int]] = field(default_factory=deque)  # status, transferred, context
    armed: bool = False
    corrupt: bool = False
    dequeues: int = 0
    notifies: int = 0
    taken: list[int] = field(default_factory=list)  # by each dequeue


@dataclass
class Request:
    context: int
    at: int
    size: int
    name_at: int  # 0: none
    deferred: bool
    data: bytes = b""  # as it was when the request started
    name: bytes = b""


@dataclass
class Lane:
    """One direction of the request queue."""

    limit: int
    queue: Queue
    deferred: list[Request] = field(default_factory=list)
    started: list[Request] = field(default_factory=list)
    outstanding: int = 0
    posts: int = 0
    commits: int = 0
    flags: list[int] = field(default_factory=list)
    fail_posts: dict[int, int] = field(default_factory=dict)  # the k-th post from now: error
    fail_commits: list[int] = field(default_factory=list)  # error of each of the next commits, 0 for none


class FakeSocket:
    """A socket that only has a number and a family; closing it ends its requests."""

    def __init__(self, rio: FakeRio, family: int) -> None:
        self.rio, self.family, self.number = rio, family, rio.new_handle()
        self.close_error: OSError | None = None

    def fileno(self) -> int:
        return self.number

    def close(self) -> None:
        if self.close_error:
            raise self.close_error
        if self.number != -1:
            self.rio.close_socket(self.number)
            self.number = -1

    def __enter__(self) -> FakeSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Slab(mmap.mmap):
    """Memory that tells when it is given back."""

    owner: FakeRio

    def close(self) -> None:
        assert not self.owner.buffers, "memory was freed while it was registered"
        assert not self.owner.is_outstanding(), "memory was freed while the system may write into it"
        self.owner.log.append("free")
        super().close()


class FakeRio(FakeEvents):
    def __init__(self, family: int = socket.AF_INET, *, eager: bool = False, hold: bool = False) -> None:
        super().__init__()
        self.family, self.eager, self.hold = family, eager, hold
        self.error = 0
        self.buffers: dict[int, tuple[int, int]] = {}
        self.queues: dict[int, Queue] = {}
        self.rx: Lane | None = None
        self.tx: Lane | None = None
        self.requests = 0
        self.open_sockets: set[int] = set()
        self.wire: list[tuple[bytes, bytes]] = []  # what was sent: packet, address
        self.lost = 0  # datagrams that found no posted receive
        self.quiet = False
        self.fail: dict[str, int] = {}  # name of a call: error
        self.locked: Callable[[], bool] = lambda: True  # whether the lock for posts is held
        self.read_locked: Callable[[], bool] = lambda: True
        self.write_locked: Callable[[], bool] = lambda: True
        self.notify_error: list[int] = []

    # Making and closing

    def socket(self) -> Any:
        sock = FakeSocket(self, self.family)
        self.open_sockets.add(sock.number)
        return sock

    def open_socket(self, family: int) -> Any:
        if self._fails("open_socket"):
            raise OSError(self.error, "WSASocketW")
        return self.socket()

    def _fails(self, name: str) -> bool:
        if name in self.fail:
            self.error = self.fail[name]
            return True
        return False

    def load(self, sock: int) -> None:
        assert sock in self.open_sockets
        if self._fails("load"):
            raise OSError(self.error, "WSAIoctl")

    def ignore_unreachable(self, sock: int) -> None:
        assert sock in self.open_sockets
        self.quiet = True

    def allocate(self, size: int) -> mmap.mmap:
        slab = Slab(-1, size)
        slab.owner = self
        return slab

    def get_last_error(self) -> int:
        return self.error

    def register_buffer(self, address: int, size: int, /) -> int:
        if self._fails("register_buffer"):
            return 0xFFFFFFFF
        handle = self.new_handle()
        self.buffers[handle] = (address, size)
        return handle

    def deregister_buffer(self, buffer: int, /) -> None:
        assert not self.is_outstanding(), "memory was deregistered with requests outstanding"
        del self.buffers[buffer]
        self.log.append("deregister")

    def create_completion_queue(self, size: int, notification: int, /) -> int:
        if self._fails("create_completion_queue"):
            return 0
        kind, event, reset = NOTIFICATION.unpack(ctypes.string_at(notification, NOTIFICATION.size))
        assert (kind, reset) == (1, 0)
        assert event in self.events
        handle = self.new_handle()
        self.queues[handle] = Queue(size, event)
        return handle

    def close_completion_queue(self, queue: int, /) -> None:
        assert not self.is_outstanding(), "a queue was closed before the socket"
        del self.queues[queue]
        self.log.append("close queue")

    def create_request_queue(
        self, sock: int, receives: int, rb: int, sends: int, sb: int, rx: int, tx: int, context: int, /
    ) -> int:
        if self._fails("create_request_queue"):
            return 0
        assert sock in self.open_sockets
        assert (rb, sb) == (1, 1)
        assert receives <= self.queues[rx].size
        assert sends <= self.queues[tx].size
        self.rx, self.tx = Lane(receives, self.queues[rx]), Lane(sends, self.queues[tx])
        self.requests = self.new_handle()
        return self.requests

    def close_socket(self, number: int) -> None:
        self.open_sockets.remove(number)
        self.log.append("closesocket")
        for lane in (self.rx, self.tx):
            if lane:
                lane.deferred, lane.started, lane.outstanding = [], [], 0
        self.requests = 0

    def is_outstanding(self) -> bool:
        """Whether the system may still touch the memory."""
        return any(lane and (lane.deferred or lane.started) for lane in (self.rx, self.tx))

    # Requests

    def receive_ex(self, q: int, d: int, n: int, loc: int, r: int, c: int, f: int, flags: int, ctx: int, /) -> int:
        assert self.rx
        return self._request(self.rx, q, d, n, (loc, r, c, f), flags, ctx)

    def send_ex(self, q: int, d: int, n: int, loc: int, r: int, c: int, f: int, flags: int, ctx: int, /) -> int:
        assert self.tx
        return self._request(self.tx, q, d, n, (loc, r, c, f), flags, ctx)

    def _request(
        self, lane: Lane, queue: int, data: int, count: int, rest: tuple[int, ...], flags: int, context: int
    ) -> int:
        assert queue == self.requests, "the request queue is not open"
        with self.changed:
            lane.flags.append(flags)
            if flags & COMMIT_ONLY:
                assert (data, count, rest, flags, context) == (0, 0, (0, 0, 0, 0), COMMIT_ONLY, 0)
                lane.commits += 1
                if lane.fail_commits and (error := lane.fail_commits.pop(0)):
                    self.error = error
                    return 0
                self._start_all(lane)
                return 1
            assert flags in (0, DEFER)
            assert self.locked(), "posted without the lock"
            at, size = self._piece(data)
            local, remote, control, flag_room = rest
            assert (count, local, control, flag_room) == (1, 0, 0, 0)
            name_at = 0
            if remote:
                name_at, name_size = self._piece(remote)
                assert name_size == 28
                assert name_at + 28 <= at or at + size <= name_at, "address and packet overlap"
            lane.posts += 1
            if error := lane.fail_posts.pop(lane.posts, 0):
                self.error = error
                return 0
            if lane.outstanding >= lane.limit:
                self.error = ENOBUFS
                return 0
            lane.outstanding += 1
            lane.deferred.append(Request(context, at, size, name_at, bool(flags & DEFER)))
            if not flags or self.eager:
                self._start_all(lane)
            return 1

    def _piece(self, address: int) -> tuple[int, int]:
        buffer, offset, size = RIO_BUF.unpack(ctypes.string_at(address, RIO_BUF.size))
        base, room = self.buffers[buffer]
        assert size > 0
        assert offset + size <= room
        return base + offset, size

    def _start_all(self, lane: Lane) -> None:
        for request in lane.deferred:
            assert all(request.at != other.at for other in lane.started), "a slot was posted twice"
            if lane is self.tx:
                request.data = ctypes.string_at(request.at, request.size)
                request.name = ctypes.string_at(request.name_at, 28) if request.name_at else b""
            lane.started.append(request)
        lane.deferred = []
        if lane is self.tx and not self.hold:
            self.complete()

    @property
    def deferred(self) -> tuple[int, int]:
        """Requests that are not committed: receives, sends."""
        assert self.rx
        assert self.tx
        return len(self.rx.deferred), len(self.tx.deferred)

    # What the test lets happen

    def complete(self, count: int | None = None, *, status: int = 0, last: bool = False) -> None:
        """Let the oldest `count` sends that started end; the newest with `last`."""
        assert self.tx
        with self.changed:
            started = self.tx.started
            for _ in range(len(started) if count is None else count):
                request = started.pop() if last else started.pop(0)
                assert ctypes.string_at(request.at, request.size) == request.data, "a slot changed before it completed"
                if not status:
                    self.wire.append((request.data, request.name))
                self._finish(self.tx, (status, request.size, request.context))

    def arrive(self, data: bytes, name: bytes, *, status: int = 0) -> None:
        """A datagram from `name`. It is lost if no receive has started."""
        assert self.rx
        with self.changed:
            if not self.rx.started:
                self.lost += 1
                return
            request = self.rx.started.pop(0)
            taken = data[: request.size]
            ctypes.memmove(request.at, taken, len(taken))
            ctypes.memmove(request.name_at, name, len(name))
            status = status or (EMSGSIZE if len(data) > request.size else 0)
            self._finish(self.rx, (status, len(taken), request.context))

    def _finish(self, lane: Lane, entry: tuple[int, int, int]) -> None:
        lane.queue.done.append(entry)
        if lane.queue.armed:
            lane.queue.armed = False
            self.set_event(lane.queue.event)

    # Completions

    def dequeue(self, queue: int, results: int, count: int, /) -> int:
        found = self.queues[queue]
        lane = self.rx if self.rx and self.rx.queue is found else self.tx
        assert lane
        assert self.read_locked() if lane is self.rx else self.write_locked(), "dequeued without the lock"
        with self.changed:
            found.dequeues += 1
            if found.corrupt:
                return CORRUPT
            number = min(count, len(found.done))
            for i in range(number):
                status, transferred, context = found.done.popleft()
                ctypes.memmove(results + 24 * i, RIORESULT.pack(status, transferred, 0, context), 24)
            lane.outstanding -= number
            found.taken.append(number)
            return number

    def notify(self, queue: int, /) -> int:
        with self.changed:
            found = self.queues[queue]
            found.notifies += 1
            if self.notify_error:
                return self.notify_error.pop(0)
            if found.armed:
                return EALREADY
            if found.done:
                self.set_event(found.event)
            else:
                found.armed = True
            return 0

    def check_wait(self, handles: tuple[int, ...]) -> None:
        for lane in (self.rx, self.tx):
            if lane and lane.queue.event in handles:
                assert not lane.deferred, "waits for completions of requests that are not committed"
