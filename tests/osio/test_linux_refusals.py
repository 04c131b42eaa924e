"""Field case F12, step 3: every way in which some kernels refuse a batch, and what it may cost.

A refusal is about the first packets, the third batch, one packet, or segmentation only. Whatever it is: the same
packets leave in the same order, none twice; what cannot leave is told with its error; nothing is tried for ever.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

from rnsfast.osio.contract import TxState
from rnsfast.osio.linux import Libc, LinuxDatagramIO
from rnsfast.osio.peers import make_peer
from tests.osio.linux_fake import FakeSys

pytestmark = pytest.mark.skipif(not Libc.usable(), reason="the structures are those of 64-bit little-endian Linux")

PEER, OTHER = make_peer("127.0.0.1", 4242), make_peer("127.0.0.1", 4243)
INVALID, IO, LONG, SPACE = errno.EINVAL, errno.EIO, errno.EMSGSIZE, errno.ENOBUFS
ERRORS = pytest.mark.parametrize("error", [INVALID, IO, LONG, SPACE], ids=errno.errorcode.get)

Judge = Callable[[bytes, bytes, int], int]  # (data, name, segment size) -> errno, 0 if it may leave


@dataclass
class Kernel(FakeSys):
    """Sends by a rule instead of a script, as a kernel does: what entry j meets is told only once it stands first."""

    judge: Judge = lambda data, name, segment: 0
    budget: int = 500  # calls; whoever needs more spins
    waits: list[int] = field(default_factory=list)

    def _offer(self, entry: tuple[bytes, bytes, int]) -> int:
        self.budget -= 1
        assert self.budget > 0, "it spins"
        return self.judge(*entry)

    def sendmmsg(self, fd: int, vector: int, count: int, flags: int, /) -> int:
        before = len(self.log)
        self.sends.append(None)
        super().sendmmsg(fd, vector, count, flags)
        sent = self.log[before]
        for j, entry in enumerate(sent.entries):
            if error := self._offer(entry):
                sent.taken, self.error = j, error
                return j or -1
        return sent.taken

    def sendto(self, fd: int, data: bytes, size: int, flags: int, name: bytes | None, length: int, /) -> int:
        self.singles.append(None)
        super().sendto(fd, data, size, flags, name, length)
        if error := self._offer(self.log[-1].entries[0]):
            self.log[-1].taken, self.error = 0, error
            return -1
        return size


Boot = Callable[..., tuple[LinuxDatagramIO, Kernel]]


@pytest.fixture
def boot(stack: ExitStack) -> Boot:
    def make(judge: Judge, **options: object) -> tuple[LinuxDatagramIO, Kernel]:
        kernel = Kernel(judge=judge)
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        io = LinuxDatagramIO(sock, sys=kernel, **options)  # type: ignore[arg-type]
        stack.callback(io.close)
        if not io.segmentation and options.get("segmentation", True):
            pytest.skip("this kernel cuts no runs")
        return io, kernel

    return make


def numbered(count: int, size: int = 500, first: int = 0) -> list[bytes]:
    return [n.to_bytes(2, "big") + bytes(size - 2) for n in range(first, first + count)]


class Times:
    """Answers `error` from the call `first` on, `times` times, and then lets everything leave."""

    def __init__(self, error: int, first: int = 0, times: int = 1) -> None:
        self.error, self.first, self.times, self.calls = error, first, times, -1

    def __call__(self, data: bytes, name: bytes, segment: int) -> int:
        self.calls += 1
        return self.error if self.first <= self.calls < self.first + self.times else 0


@ERRORS
@pytest.mark.parametrize("third", [False, True], ids=["first batch", "third batch"])
@pytest.mark.parametrize("segmentation", [True, False], ids=["runs", "singly"])
def test_a_batch_refused_once(boot: Boot, error: int, third: bool, segmentation: bool) -> None:
    """Of a run nothing is lost, since its packets go again one by one; a packet refused by itself is."""
    judge = Times(0)
    io, kernel = boot(judge, segmentation=segmentation)
    rejected = 0
    for batch in range(5):
        if batch == (2 if third else 0):
            judge.error, judge.first, judge.calls = error, 0, -1
        result = io.send(numbered(20, first=20 * batch), PEER)
        assert result.state is TxState.DONE and result.taken == 20
        assert all(told == error for _, told in result.rejected)
        rejected += len(result.rejected)
    assert rejected == (0 if segmentation or error == SPACE else 1)
    expected = numbered(100)
    if rejected:
        del expected[40 if third else 0]
    assert kernel.wire == expected


@ERRORS
@pytest.mark.parametrize("at", [0, 7, 19])
@pytest.mark.parametrize("segmentation", [True, False], ids=["runs", "singly"])
def test_one_packet_that_is_always_refused_costs_itself(boot: Boot, error: int, at: int, segmentation: bool) -> None:
    items = numbered(20)
    bad = items[at]
    io, kernel = boot(lambda data, name, segment: error if bad in data else 0, segmentation=segmentation)
    result = io.send(items, PEER)
    assert (result.state, result.sent, result.rejected) == (TxState.DONE, 19, ((at, error),))
    assert kernel.wire == [item for item in items if item != bad]
    assert io.stats.tx_rejected == 1 and io.stats.tx_packets == 19


@ERRORS
def test_what_is_refused_only_when_it_is_segmented(boot: Boot, error: int, caplog: pytest.LogCaptureFixture) -> None:
    io, kernel = boot(lambda data, name, segment: error if segment else 0)
    with caplog.at_level(logging.WARNING):
        for batch in range(4):
            assert io.send(numbered(20, first=20 * batch), PEER).sent == 20
    assert kernel.wire == numbered(80), "in this batch, in order, each once"
    tried = sum(any(size for _, _, size in sent.entries) for sent in kernel.log)
    if error == SPACE:  # passing: tried again with every batch, and not more than once in it
        assert io.segmentation and tried == 4 and not caplog.records
    else:
        assert tried == 1 and len(caplog.records) == 1
        assert io.segmentation is (error == LONG)


@ERRORS
def test_an_extra_control_message_that_is_refused_is_left_out_for_all_peers(boot: Boot, error: int) -> None:
    io, kernel = boot(lambda data, name, segment: error if segment else 0)
    peers = [PEER if n % 8 < 4 else OTHER for n in range(40)]
    assert io.send(numbered(40), peers).sent == 40
    assert [(data, name) for sent in kernel.log for data, name, _ in sent.entries[: sent.taken]] == [
        (item, peer.raw) for item, peer in zip(numbered(40), peers, strict=True)
    ]


@pytest.mark.parametrize("error", [errno.EIO, errno.EINVAL])
def test_a_refusal_of_the_second_run_leaves_no_trace_in_the_descriptors(boot: Boot, error: int) -> None:
    """Runs of three sizes to three peers; the replay has more entries than the batch had, and none asks for cutting."""
    peers = [make_peer("127.0.0.1", 4000 + n // 10) for n in range(30)]
    items = [*numbered(10, 400), *numbered(10, 500, 10), *numbered(10, 600, 20)]
    io, kernel = boot(lambda data, name, segment: error if segment == 500 else 0)
    result = io.send(items, peers)
    assert (result.sent, result.rejected) == (30, ()) and kernel.wire == items
    assert [len(sent.entries) for sent in kernel.log] == [3, 2, 20]
    assert io.send(items, peers).sent == 30 and kernel.wire == items * 2
    assert len(kernel.log[3].entries) == 30 and not io.segmentation


def test_an_address_that_is_not_legal_does_not_end_segmentation(boot: Boot, caplog: pytest.LogCaptureFixture) -> None:
    """The system answers "invalid argument" for the address, with and without runs."""
    io, kernel = boot(lambda data, name, segment: errno.EINVAL if name == OTHER.raw else 0)
    peers = [OTHER if 5 <= n < 12 else PEER for n in range(20)]
    for _ in range(2):
        result = io.send(numbered(20), peers)
        assert result.state is TxState.DONE and result.sent == 13
        assert result.rejected == tuple((n, errno.EINVAL) for n in range(5, 12))
    assert io.segmentation and not caplog.records
    assert len(kernel.log) == 2 * 10  # what stands before, the run, its seven packets, and the rest as a run
    assert [size for _, _, size in kernel.log[-1].entries] == [500]
    assert kernel.wire == [item for n, item in enumerate(numbered(20)) if not 5 <= n < 12] * 2


def test_a_real_address_that_is_not_legal_does_not_end_segmentation() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as there:
        there.bind(("127.0.0.1", 0))
        good, bad = make_peer(*there.getsockname()), make_peer("127.0.0.1", 0)
        io = LinuxDatagramIO(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        before = io.segmentation
        result = io.send(numbered(12), [bad if n < 6 else good for n in range(12)])
        assert result.state is TxState.DONE and result.sent == 6
        assert result.rejected == tuple((n, errno.EINVAL) for n in range(6))
        assert io.segmentation is before
        io.close()


def test_no_buffer_space_that_stays_costs_every_packet_and_no_loop(boot: Boot) -> None:
    io, kernel = boot(lambda data, name, segment: errno.ENOBUFS)
    result = io.send(numbered(20), PEER)
    assert result.state is TxState.DONE and result.rejected == tuple((n, errno.ENOBUFS) for n in range(20))
    assert not kernel.wire and io.segmentation


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EOPNOTSUPP])
def test_without_sendmmsg_runs_are_not_blamed(boot: Boot, error: int, caplog: pytest.LogCaptureFixture) -> None:
    """The call itself is refused: it is made once, or twice if the answer may have been about the run."""
    calls = []

    def refuse(fd: int, vector: int, count: int, flags: int, /) -> int:
        calls.append(count)
        kernel.error = error
        return -1

    io, kernel = boot(lambda data, name, segment: 0)
    kernel.sendmmsg = refuse  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert io.send(numbered(20), PEER).sent == 20
    assert calls == ([1] if error == errno.ENOSYS else [1, 20])
    assert kernel.wire == numbered(20) * 3
    assert sum("sendmmsg" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_plain_call_that_is_refused_says_nothing_about_sendmmsg(boot: Boot, error: int) -> None:
    """Five packets in chunks of four: the last goes by sendto."""
    io, kernel = boot(lambda data, name, segment: 0, max_batch=4, segmentation=False)
    plain = kernel.sendto
    kernel.sendto = lambda *arguments: (setattr(kernel, "error", error), -1)[1]  # type: ignore[method-assign]
    assert io.send(numbered(5), PEER).rejected == ((4, error),)
    kernel.sendto = plain  # type: ignore[method-assign]
    assert io.send(numbered(4), PEER).sent == 4 and kernel.log[-1].call == "sendmmsg"


def test_a_call_that_raises_leaves_no_control_messages_behind(boot: Boot) -> None:
    io, kernel = boot(lambda data, name, segment: 0)
    real = kernel.sendmmsg

    def interrupted(fd: int, vector: int, count: int, flags: int, /) -> int:
        raise KeyboardInterrupt

    kernel.sendmmsg = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        io.send(numbered(20), PEER)
    kernel.sendmmsg = real  # type: ignore[method-assign]
    items = [b"a" * 700, b"b" * 800, b"c" * 900]  # no run among them
    assert io.send(items, PEER).sent == 3 and kernel.wire == items
    assert [size for _, _, size in kernel.log[-1].entries] == [0, 0, 0]


def test_descriptors_of_a_send_that_were_not_used_are_not_touched(boot: Boot) -> None:
    io, kernel = boot(lambda data, name, segment: 0)
    vectors = []
    real = kernel.sendmmsg

    def look(fd: int, vector: int, count: int, flags: int, /) -> int:
        vectors.append(vector)
        return real(fd, vector, count, flags)

    kernel.sendmmsg = look  # type: ignore[method-assign]
    mixed = [bytes(600 + n) for n in range(3)]
    io.send(mixed, PEER)
    beyond = (ctypes.c_uint64 * 8).from_address(vectors[0] + 64 * 5)
    beyond[0], beyond[1], beyond[4], beyond[5] = 1, 2, 3, 4
    io.send(mixed, PEER)
    io.send(numbered(40), PEER)  # one run: one entry
    assert list(beyond[0:2]) + list(beyond[4:6]) == [1, 2, 3, 4]


def test_whether_the_lock_is_held_and_nothing_blocks(boot: Boot) -> None:
    io, kernel = boot(lambda data, name, segment: 0)
    seen = []

    def watched(name: str) -> Callable[..., int]:
        real = getattr(kernel, name)

        def call(*arguments: int) -> int:
            seen.append((name, io._tx_lock.locked(), bool(arguments[3] & 0x40), bool(arguments[3] & 0x4000)))
            return int(real(*arguments))

        return call

    for name in ("sendmmsg", "sendto"):
        setattr(kernel, name, watched(name))
    io.send(numbered(20), PEER)
    io.send_one(b"x", PEER)
    assert seen == [("sendmmsg", True, True, True), ("sendto", True, True, True)]
    assert not io._tx_lock.locked()
