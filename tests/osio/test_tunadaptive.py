"""When the GIL is kept: from the group of packets on that took too long, and for longer each time it happens again."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator

import pytest

from rnsfast.osio.tun import TunIO
from rnsfast.osio.tunadaptive import FIRST, GROUP, SLOW, AdaptiveCalls

PACKET = b"\x45" + bytes(39)


class Clock:
    """Every look costs `step` seconds."""

    def __init__(self) -> None:
        self.now, self.step = 0.0, SLOW / 100

    def __call__(self) -> float:
        self.now += self.step
        return self.now


class Counting:
    """`os.read` and `os.write`, counted."""

    def __init__(self) -> None:
        self.reads = self.writes = 0

    def read(self, fd: int, size: int) -> bytes:
        self.reads += 1
        return os.read(fd, size)

    def write(self, fd: int, data: bytes) -> int:
        self.writes += 1
        return os.write(fd, data)


@pytest.fixture
def ends() -> Iterator[tuple[int, int]]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    left.setblocking(False)
    right.setblocking(False)
    with left, right:
        yield left.fileno(), right.fileno()


def made() -> tuple[AdaptiveCalls, Clock, Counting]:
    clock, counting = Clock(), Counting()
    return AdaptiveCalls(read=counting.read, write=counting.write, clock=clock), clock, counting


def test_alone_every_packet_goes_the_plain_way(ends: tuple[int, int]) -> None:
    calls, _, counting = made()
    assert calls.write_many(ends[0], [PACKET] * 30) == (30, 0)
    found, error = calls.read_many(ends[1], 64, 1 << 20)
    assert found == [PACKET] * 30 and error == errno.EAGAIN
    assert (counting.reads, counting.writes, calls.reading.slow, calls.writing.slow) == (31, 30, 0, 0)


def test_a_slow_group_has_the_rest_read_with_the_gil_kept(ends: tuple[int, int]) -> None:
    calls, clock, counting = made()
    for n in range(30):
        os.write(ends[0], PACKET + bytes((n,)))
    clock.step = 2 * SLOW
    found, error = calls.read_many(ends[1], 30, 1 << 20)
    assert found == [PACKET + bytes((n,)) for n in range(30)] and not error
    assert counting.reads == GROUP and calls.reading.slow == 1


def test_the_same_for_writing(ends: tuple[int, int]) -> None:
    calls, clock, counting = made()
    clock.step = 2 * SLOW
    packets = [PACKET + bytes((n,)) for n in range(30)]
    assert calls.write_many(ends[0], packets) == (30, 0)
    assert counting.writes == GROUP
    assert [os.read(ends[1], 100) for _ in range(30)] == packets


def test_the_plain_way_is_tried_again_and_less_often_each_time_it_fails(ends: tuple[int, int]) -> None:
    calls, clock, counting = made()
    clock.step = 2 * SLOW
    kept: list[int] = []
    for _ in range(GROUP):
        os.write(ends[0], PACKET)
    calls.read_many(ends[1], GROUP, 1 << 20)
    for _ in range(3):
        for _ in range(GROUP):
            os.write(ends[0], PACKET)
        calls.read_many(ends[1], GROUP, 1 << 20)
        batches, before = 0, counting.reads
        while calls.reading.keeping:
            assert calls.read_many(ends[1], GROUP, 1 << 20) == ([], errno.EAGAIN)
            batches += 1
        assert counting.reads == before
        kept.append(batches)
    assert kept == [FIRST, 2 * FIRST, 4 * FIRST]
    clock.step = SLOW / 100
    for _ in range(3):
        for _ in range(GROUP):
            os.write(ends[0], PACKET)
        calls.read_many(ends[1], GROUP, 1 << 20)
    assert calls.reading.span == FIRST


def test_one_slow_group_alone_is_an_accident(ends: tuple[int, int]) -> None:
    calls, clock, _ = made()
    for step in (2 * SLOW, SLOW / 100, 2 * SLOW, SLOW / 100):
        clock.step = step
        for _ in range(GROUP):
            os.write(ends[0], PACKET)
        calls.read_many(ends[1], 2 * GROUP, 1 << 20)
        assert not calls.reading.keeping
    assert calls.reading.slow == 2


def test_what_was_read_before_an_error_is_kept(ends: tuple[int, int]) -> None:
    """In the middle of a group, whatever the error; a read of nothing ends the batch."""
    _, _, counting = made()
    left = [PACKET + bytes((n,)) for n in range(GROUP + 5)]

    def read(fd: int, size: int) -> bytes:
        counting.reads += 1
        if len(left) == 3:
            raise OSError(errno.EBADFD, "gone")
        return left.pop(0)

    calls = AdaptiveCalls(read=read, write=counting.write, clock=Clock())
    found, error = calls.read_many(ends[1], 64, 1 << 20)
    assert found == [PACKET + bytes((n,)) for n in range(GROUP + 2)] and error == errno.EBADFD
    left[:] = [PACKET, b"", PACKET, *[PACKET] * GROUP]
    found, error = calls.read_many(ends[1], 3, 1 << 20)
    assert found == [PACKET, PACKET] and error == errno.EAGAIN


def test_bounds_and_errors_are_those_of_the_other_calls(ends: tuple[int, int]) -> None:
    calls, _, _ = made()
    assert calls.write_many(ends[0], [PACKET] * 40) == (40, 0)
    assert len(calls.read_many(ends[1], 5, 1 << 20)[0]) == 5
    assert len(calls.read_many(ends[1], 50, 3 * len(PACKET) - 1)[0]) == 3
    broken = os.open(os.devnull, os.O_WRONLY)
    os.close(broken)
    assert calls.read_many(broken, 5, 100) == ([], errno.EBADF)
    assert calls.write_many(broken, [PACKET] * 2) == (0, errno.EBADF)


def test_it_is_what_a_tun_descriptor_gets_on_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RNSFAST_OSIO", raising=False)
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with right:
        io = TunIO(left.detach())
        assert isinstance(io._calls, AdaptiveCalls) and io.caps.backend == "linux-tun"
        io.close()
