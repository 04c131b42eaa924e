"""The portable back end by script: which calls it makes, and what every answer leads to."""

from __future__ import annotations

import errno
import socket
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from rnsfast.osio.contract import IOBroken, TxState
from rnsfast.osio.peers import make_peer
from rnsfast.osio.portable import PortableDatagramIO
from rnsfast.osio.verdicts import REPEATS

PEER, ADDRESS = make_peer("127.0.0.1", 4242), ("127.0.0.1", 4242)
ALONE = make_peer("fe80::1", 7, scope=3)


class Calls:
    """A call beyond its script fails the test. A step is an errno, 0 for well, or what arrives."""

    def __init__(self, sends: list[int], receives: list[tuple[bytes, Any] | int]) -> None:
        self.sends, self.receives = deque(sends), deque(receives)
        self.wire: list[tuple[bytes, Any]] = []
        self.calls = 0

    def sendto(self, data: bytes, address: Any) -> int:
        assert self.sends, "a send beyond the script"
        self.calls += 1
        if error := self.sends.popleft():
            raise OSError(error, "scripted")
        self.wire.append((data, address))
        return len(data)

    def send(self, data: bytes) -> int:
        return self.sendto(data, None)

    def recvfrom(self, size: int) -> tuple[bytes, Any]:
        assert self.receives, "a receive beyond the script"
        self.calls += 1
        step = self.receives.popleft()
        if isinstance(step, int):
            raise OSError(step, "scripted")
        return step[0][:size], step[1]


Make = Callable[..., tuple[PortableDatagramIO, Calls]]


@pytest.fixture
def make(stack: ExitStack) -> Make:
    def maker(
        sends: list[int] | None = None, receives: list[Any] | None = None, **options: Any
    ) -> tuple[PortableDatagramIO, Calls]:
        calls = Calls(sends or [], receives or [])
        io = PortableDatagramIO(socket.socket(socket.AF_INET, socket.SOCK_DGRAM), sys=calls, **options)
        stack.callback(io.close)
        return io, calls

    return maker


def numbered(count: int) -> list[bytes]:
    return [bytes([n, n]) for n in range(count)]


@pytest.mark.parametrize("count", [1, 2, 32, 33])
def test_every_packet_is_one_call_to_its_peer(make: Make, count: int) -> None:
    io, calls = make([0] * 2 * count)
    items = numbered(count)
    assert io.send(items, PEER).sent == io.send(items).sent == count
    assert calls.wire == [(item, where) for where in (ADDRESS, None) for item in items]


@pytest.mark.parametrize("at", [0, 2, 4])
@pytest.mark.parametrize("error", [errno.EMSGSIZE, errno.EINVAL, errno.EIO, errno.EPERM, errno.ENETUNREACH])
def test_a_refused_packet_is_offered_once_and_costs_itself(make: Make, at: int, error: int) -> None:
    io, calls = make([error if n == at else 0 for n in range(5)])
    assert io.send(numbered(5), PEER).rejected == ((at, error),)
    assert [data for data, _ in calls.wire] == [item for n, item in enumerate(numbered(5)) if n != at]


def test_what_was_taken_before_a_full_queue_is_not_offered_again(make: Make) -> None:
    io, calls = make([0, 0, errno.EAGAIN, 0, 0, 0])
    result = io.send(numbered(5), PEER)
    assert (result.state, result.taken, result.sent) == (TxState.BLOCKED, 2, 2) and calls.calls == 3
    assert io.send(numbered(5), PEER, start=2).sent == 3
    assert [data for data, _ in calls.wire] == numbered(5)


def test_no_buffer_space_is_repeated_a_few_times(make: Make) -> None:
    io, calls = make([0, *[errno.ENOBUFS] * (REPEATS + 1), 0])
    assert io.send(numbered(3), PEER).rejected == ((1, errno.ENOBUFS),)
    assert [data for data, _ in calls.wire] == [numbered(3)[0], numbered(3)[2]]


def test_a_drain_ends_with_nothing_there_and_an_error_is_kept(make: Make) -> None:
    arrived = [(item, ADDRESS) for item in numbered(3)]
    io, calls = make(receives=[*arrived, errno.EAGAIN, arrived[0], errno.EIO])
    batch = io.make_batch()
    assert io.recv(batch) == 3 and batch.take_all() == numbered(3)
    assert batch.uniform == PEER and calls.calls == 4
    assert io.recv(batch) == 1
    with pytest.raises(IOBroken) as told:
        io.recv(batch)
    assert told.value.errno == errno.EIO


def test_a_full_batch_needs_no_call_that_finds_nothing(make: Make) -> None:
    io, calls = make(receives=[(item, ADDRESS) for item in numbered(5)] + [errno.EAGAIN] * 2, max_batch=2)
    batch, counts = io.make_batch(), []
    while count := io.recv(batch):
        counts.append(count)
    assert counts == [2, 2, 1] and calls.calls == io.stats.rx_calls == 7


def test_a_flood_of_refused_packets_is_bounded(make: Make) -> None:
    io, calls = make(receives=[(bytes(101), ADDRESS)] * 1000, max_packet=100, max_batch=4)
    assert io.recv(io.make_batch()) == 0
    assert calls.calls == io.stats.rx_dropped == 32


@pytest.mark.parametrize("error", [errno.ECONNREFUSED, errno.ECONNRESET, errno.ENETDOWN, 10_040])
def test_passing_errors_end_nothing(make: Make, error: int) -> None:
    io, _ = make(receives=[error, (b"x", ADDRESS), error, errno.EAGAIN])
    assert io.recv(io.make_batch()) == 1


@pytest.mark.parametrize(
    ("address", "peer"),
    [
        (ADDRESS, PEER),
        (("fe80::1", 7, 0, 3), ALONE),
        (("fe80::1%lo", 7, 0, 3), ALONE),
        (None, None),
        ("", None),
        (b"\0abstract", None),
    ],
)
def test_senders_are_read_from_every_form_of_address(make: Make, address: Any, peer: Any) -> None:
    io, _ = make(receives=[(b"x", address), errno.EAGAIN])
    batch = io.make_batch()
    assert io.recv(batch) == 1 and batch.peer(0) == peer and batch.uniform == peer
