"""Closing while others use the descriptor, waiting and waking, for every pollable back end.  Protocol 09, 4.4 and 8."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from rnsfast.osio.backend import open_backend
from rnsfast.osio.contract import IOClosed, Kind, TxState
from rnsfast.osio.peers import make_peer
from rnsfast.osio.tun import TunIO

PATIENCE = 10.0
CYCLES = 1000
OURS, FOREIGN = b"\x45ours", b"\x45foreign"  # both look like IPv4, so that no check stands in the way


@dataclass
class End:
    """One back end, and what stands at its other side."""

    io: Any
    far: socket.socket
    peer: Any = None

    def send(self, count: int = 4) -> Any:
        return self.io.send([OURS] * count, self.peer)

    def answer(self) -> None:
        self.far.sendto(OURS, self.io._sock.getsockname()) if self.peer else self.far.send(OURS)

    def close(self) -> None:
        self.io.close()
        self.far.close()


def bound() -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("127.0.0.1", 0))
    return sock


def datagrams() -> End:
    far = bound()
    return End(open_backend(Kind.DATAGRAM, bound()), far, make_peer(*far.getsockname()))


def unix_datagrams() -> End:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    return End(open_backend(Kind.DATAGRAM, near, peers=False), far)


def stream() -> End:
    near, far = socket.socketpair()
    return End(open_backend(Kind.STREAM, near), far)


def tun() -> End:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    return End(TunIO(near.detach()), far)


MAKERS = {make.__name__: make for make in (datagrams, unix_datagrams, stream, tun)}
Connect = Callable[[], End]


@pytest.fixture(params=MAKERS)
def connect(request: pytest.FixtureRequest, variant: str, stack: ExitStack) -> Connect:
    def make() -> End:
        end = MAKERS[request.param]()
        stack.callback(end.close)
        return end

    return make


@pytest.fixture
def end(connect: Connect) -> End:
    return connect()


class Worker(threading.Thread):
    """A thread whose exception is the test's."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self.work, self.result, self.error = work, None, None
        self.start()

    def run(self) -> None:
        try:
            self.result = self.work()
        except BaseException as error:
            self.error = error

    def get(self) -> Any:
        self.join(PATIENCE)
        assert not self.is_alive(), "it hangs"
        if self.error is not None:
            raise self.error
        return self.result


def announced(end: End, calls: int = 1) -> threading.Event:
    """Set as soon as `calls` threads are about to wait."""
    about, real, left = threading.Event(), end.io.wait, [calls]

    def wait(*arguments: Any, **options: Any) -> int:
        left[0] -= 1
        if not left[0]:
            about.set()
        return int(real(*arguments, **options))

    end.io.wait = wait
    return about


def fill_up(end: End) -> None:
    """Until there is no room; unconnected UDP always has some."""
    while end.send(64).state is TxState.DONE and not end.peer:
        pass


# -- waking -------------------------------------------------------------------------------------------------------


def test_a_wake_ends_the_wait_of_a_reader(end: End) -> None:
    about = announced(end)
    reader = Worker(lambda: end.io.recv(end.io.make_batch(), PATIENCE))
    assert about.wait(PATIENCE)
    end.io.wake()
    assert reader.get() == 0


def test_a_wake_before_the_wait_is_not_lost(end: End) -> None:
    """Otherwise a reader that was just about to wait would not hear of it."""
    end.io.wake()
    assert end.io.recv(end.io.make_batch(), PATIENCE) == 0


def test_many_wakes_are_one(end: End) -> None:
    batch = end.io.make_batch()
    for _ in range(2):  # before there is anything to wake, and after
        for _ in range(1000):
            end.io.wake()
        assert end.io.recv(batch, PATIENCE) == 0
        assert end.io.wait(0.0) == 0
        end.answer()
        assert end.io.recv(batch, PATIENCE) == 1


def test_packets_come_before_a_wake(end: End) -> None:
    end.io.wake()
    end.answer()
    assert end.io.recv(end.io.make_batch(), PATIENCE) == 1


def test_readiness_is_told_by_kind(end: End) -> None:
    assert end.io.wait(0.0) == 0 and end.io.wait(0.0, read=False, write=True) == 2
    end.answer()
    assert end.io.wait(PATIENCE) == 1 and end.io.wait(PATIENCE, write=True) == 3


def test_who_waits_for_room_is_not_held_up_by_a_reader(end: End) -> None:
    about = announced(end)
    reader = Worker(lambda: end.io.recv(end.io.make_batch(), None))
    assert about.wait(PATIENCE)
    assert Worker(lambda: end.io.wait(PATIENCE, read=False, write=True)).get() == 2
    end.answer()
    assert reader.get() == 1


def test_a_wake_ends_all_waits(end: End) -> None:
    fill_up(end)
    about = announced(end, 2)
    reader = Worker(lambda: end.io.recv(end.io.make_batch(), PATIENCE))
    writer = Worker(lambda: end.io.wait(PATIENCE, read=False, write=True))
    assert about.wait(PATIENCE)
    end.io.wake()
    assert reader.get() == 0 and writer.get() in (0, 2 if end.peer else 0)


# -- closing ------------------------------------------------------------------------------------------------------


def test_close_ends_everybody_who_waits(end: End) -> None:
    fill_up(end)
    about = announced(end, 2)

    def read() -> None:
        with pytest.raises(IOClosed) as told:
            end.io.recv(end.io.make_batch(), None)
        assert not told.value.eof

    reader, writer = Worker(read), Worker(lambda: end.io.wait(None, read=False, write=True))
    assert about.wait(PATIENCE)
    Worker(end.io.close).get()
    reader.get()
    assert writer.get() in (0, 2 if end.peer else 0)


def test_after_close_nothing_works_and_nothing_hangs(end: End) -> None:
    end.answer()
    end.io.close()
    end.io.close()
    end.io.wake()
    assert end.io.fileno() == -1 and end.io.wait(None) == end.io.wait(None, read=False, write=True) == 0
    for timeout in (0.0, None):
        with pytest.raises(IOClosed):
            end.io.recv(end.io.make_batch(), timeout)
    assert end.send().state is end.send(1).state is end.io.send_one(OURS, end.peer).state is TxState.CLOSED


@pytest.mark.parametrize("closers", [1, 2])
def test_the_number_is_kept_until_a_send_is_over(end: End, closers: int) -> None:
    """Close comes in the middle of the call; every closer returns only when the number is given up."""
    number, inside, shut, go = end.io.fileno(), threading.Event(), threading.Event(), threading.Event()
    owner, name = (end.io, "_submit_one") if hasattr(end.io, "_submit_one") else (end.io._calls, "send")
    real, real_shut = getattr(owner, name), end.io._shut

    def call(*arguments: Any) -> Any:
        inside.set()
        assert go.wait(PATIENCE)
        os.fstat(number)
        return real(*arguments)

    def shut_down() -> None:
        real_shut()
        shut.set()

    setattr(owner, name, call)
    end.io._shut = shut_down
    sender = Worker(lambda: end.io.send_one(OURS, end.peer))
    assert inside.wait(PATIENCE)
    closing = [Worker(end.io.close) for _ in range(closers)]
    assert shut.wait(PATIENCE)
    assert end.io.fileno() == -1 and all(closer.is_alive() for closer in closing)
    go.set()
    assert sender.get().state in (TxState.DONE, TxState.CLOSED)
    for closer in closing:
        closer.get()
    with pytest.raises(OSError):
        os.fstat(number)


def foreign_sockets(end: End) -> list[socket.socket]:
    """Sockets of the same sort that take the numbers which have become free, each with something in its queue."""
    if end.peer:
        socks = [bound() for _ in range(4)]
        for sock in socks:
            sock.sendto(FOREIGN, sock.getsockname())
    else:
        kind = socket.SOCK_STREAM if end.io.caps.kind is Kind.STREAM else socket.SOCK_DGRAM
        socks = [sock for _ in range(2) for sock in socket.socketpair(socket.AF_UNIX, kind)]
        for sock in socks:
            sock.send(FOREIGN)
    return socks


def look_into(sock: socket.socket) -> str:
    """What is wrong with a foreign socket."""
    sock.setblocking(False)
    try:
        if (found := sock.recv(1000)) != FOREIGN:
            return f"{found!r} arrived at a foreign socket"
    except BlockingIOError:
        return "somebody has read from a foreign socket"
    try:
        return f"{sock.recv(1000)!r} arrived at a foreign socket"
    except BlockingIOError:
        return ""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors by /proc")
def test_no_call_touches_a_number_that_somebody_else_has_now(connect: Connect) -> None:
    """A reader and a sender hammer while two threads close; a third takes the numbers at once."""
    kind = connect()
    kind.close()
    stop, wrong = threading.Event(), []

    def grab() -> None:
        while not stop.is_set():
            socks = foreign_sockets(kind)
            wrong.extend(filter(None, map(look_into, socks)))
            for sock in socks:
                sock.close()

    before = len(os.listdir("/proc/self/fd"))
    grabber = Worker(grab)
    try:
        for _ in range(CYCLES):
            end = connect()
            began = threading.Barrier(3)
            workers = [
                Worker(lambda end=end, began=began: read_all(end, began, wrong)),  # type: ignore[misc]
                Worker(lambda end=end, began=began: send_all(end, began)),  # type: ignore[misc]
            ]
            began.wait(PATIENCE)
            workers += [Worker(end.io.close) for _ in range(2)]
            for worker in workers:
                worker.get()
            end.far.close()
    finally:
        stop.set()
    grabber.get()
    assert not wrong, wrong[:3]
    assert len(os.listdir("/proc/self/fd")) == before


def read_all(end: End, began: threading.Barrier, wrong: list[str]) -> None:
    batch = end.io.make_batch()
    began.wait(PATIENCE)
    try:
        while True:
            end.io.recv(batch, PATIENCE)
            wrong.extend("a foreign packet was read" for data in batch.take_all() if FOREIGN in data)
    except IOClosed:
        return


def send_all(end: End, began: threading.Barrier) -> None:
    began.wait(PATIENCE)
    while True:
        result = end.send()
        if result.state is TxState.CLOSED:
            return
        assert result.state in (TxState.DONE, TxState.BLOCKED) and not result.rejected
        if result.state is TxState.BLOCKED:
            end.io.wait(PATIENCE, read=False, write=True)


# -- counting -----------------------------------------------------------------------------------------------------


@pytest.fixture
def both(variant: str) -> Iterator[tuple[Any, Any]]:
    ends = [
        open_backend(Kind.DATAGRAM, sock, peers=False) for sock in socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    ]
    yield ends[0], ends[1]
    for io in ends:
        io.close()


def test_counters_are_exact_under_several_threads_and_a_backlog_is_never_negative(both: tuple[Any, Any]) -> None:
    sender, receiver = both
    each, backlogs = 2000, []

    def send() -> None:
        at = 0
        while at < each:
            arrived = receiver.stats.rx_packets  # the other side's first (protocol 09, section 8)
            result = sender.send([OURS] * min(10, each - at))
            backlogs.append(sender.stats.tx_packets - arrived)
            at += result.sent
            if result.state is TxState.BLOCKED:
                sender.wait(PATIENCE, read=False, write=True)

    def read() -> int:
        batch, count = receiver.make_batch(), 0
        while count < 2 * each:
            got = receiver.recv(batch, PATIENCE)
            assert got
            count += got
        return count

    workers = [Worker(read), Worker(send), Worker(send)]
    for worker in workers:
        worker.get()
    assert min(backlogs) >= 0
    assert sender.stats.tx_packets == receiver.stats.rx_packets == 2 * each
    assert sender.stats.tx_bytes == receiver.stats.rx_bytes == 2 * each * len(OURS)
