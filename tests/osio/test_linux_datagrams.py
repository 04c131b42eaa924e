"""recvmmsg and sendmmsg by script: what is asked of the system, what every answer leads to.  Field case F12, step 3."""

from __future__ import annotations

import ctypes
import errno
import logging
import socket
from collections import deque
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rnsfast.osio import linux
from rnsfast.osio.contract import IOBroken, TxState
from rnsfast.osio.linux import Libc, LinuxDatagramIO
from rnsfast.osio.peers import make_peer
from rnsfast.osio.verdicts import forget_what_was_logged
from tests.osio.linux_fake import Arrived, FakeSys, gro

pytestmark = pytest.mark.skipif(not Libc.usable(), reason="the structures are those of 64-bit little-endian Linux")

PEER = make_peer("127.0.0.1", 4242)
Make = Callable[..., tuple[LinuxDatagramIO, FakeSys]]


@pytest.fixture(autouse=True)
def fresh_log() -> None:
    forget_what_was_logged()


def build(
    *sends: int | None,
    singles: list[int | None] | None = None,
    receives: list[list[Arrived] | int] | None = None,
    **options: object,
) -> tuple[LinuxDatagramIO, FakeSys]:
    sys = FakeSys(deque(sends), deque(singles or []), deque(receives or []))
    io = LinuxDatagramIO(socket.socket(socket.AF_INET, socket.SOCK_DGRAM), sys=sys, **options)  # type: ignore[arg-type]
    return io, sys


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[LinuxDatagramIO] = []

    def maker(*sends: int | None, **options: object) -> tuple[LinuxDatagramIO, FakeSys]:
        io, sys = build(*sends, **options)  # type: ignore[arg-type]
        made.append(io)
        return io, sys

    yield maker
    for io in made:
        io.close()


def numbered(count: int, size: int = 40) -> list[bytes]:
    return [n.to_bytes(2, "big") + bytes(size - 2) for n in range(count)]


# -- sending ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [[None], [1, None], [1, 1, 1, None], [2, None], [3, None]])
def test_counts_short_of_all_are_gone_on_from(make: Make, script: list[int | None]) -> None:
    io, sys = make(*script, segmentation=False)
    items = numbered(5)
    result = io.send(items, PEER)
    assert (result.state, result.taken, result.sent, result.rejected) == (TxState.DONE, 5, 5, ())
    assert sys.wire == items and not sys.sends
    assert all(name == PEER.raw for sent in sys.log for _, name, _ in sent.entries)


def test_one_packet_is_one_plain_call(make: Make) -> None:
    io, sys = make(singles=[None, None])
    assert io.send([b"one"], PEER).sent == io.send_one(b"two", PEER).sent == 1
    assert [sent.call for sent in sys.log] == ["sendto", "sendto"] and sys.wire == [b"one", b"two"]


def test_equal_packets_are_one_entry_that_the_kernel_cuts(make: Make) -> None:
    io, sys = make(None)
    items = [*numbered(10, 500), b"short"]
    assert io.send(items, PEER).sent == 11
    assert [(len(data), size) for data, _, size in sys.log[0].entries] == [(5005, 500)]
    assert sys.wire == items


def test_what_is_left_over_of_a_chunk_of_one_goes_plainly(make: Make) -> None:
    io, sys = make(None, singles=[None], max_batch=4, segmentation=False)
    assert io.send(numbered(5), PEER).sent == 5
    assert [sent.call for sent in sys.log] == ["sendmmsg", "sendto"]


@pytest.mark.parametrize("at", [0, 2, 4])
def test_a_packet_that_cannot_be_sent_is_dropped_alone(make: Make, at: int) -> None:
    """Too large for the interface: it is not even offered."""
    io, sys = make(None, segmentation=False, max_packet=100)
    items = numbered(5)
    items[at] = bytes(101)
    result = io.send(items, PEER)
    assert (result.state, result.sent, result.rejected) == (TxState.DONE, 4, ((at, errno.EMSGSIZE),))
    assert sys.wire == [item for i, item in enumerate(items) if i != at]


@pytest.mark.parametrize("at", [0, 2, 4])
def test_a_packet_that_the_system_refuses_is_dropped_alone(make: Make, at: int) -> None:
    script: list[int | None] = [at] if at else []
    io, sys = make(*script, *([-errno.EPERM] if at < 4 else []), *([None] if at < 4 else []),
                   singles=[-errno.EPERM] if at == 4 else [], segmentation=False)  # fmt: skip
    items = numbered(5)
    result = io.send(items, PEER)
    assert (result.state, result.rejected) == (TxState.DONE, ((at, errno.EPERM),))
    assert sys.wire == [item for i, item in enumerate(items) if i != at]
    assert io.caps.backend == "linux-mmsg"


def test_a_full_queue_leaves_the_rest_to_the_caller(make: Make) -> None:
    io, sys = make(3, -errno.EAGAIN, None, segmentation=False)
    items = numbered(8)
    result = io.send(items, PEER)
    assert (result.state, result.taken, result.sent) == (TxState.BLOCKED, 3, 3)
    assert io.send(items, PEER, start=result.taken).state is TxState.DONE
    assert sys.wire == items


def test_a_call_that_does_nothing_and_says_nothing_is_the_end(make: Make) -> None:
    io, sys = make(0, segmentation=False)
    result = io.send(numbered(3), PEER)
    assert result.state is TxState.BROKEN and result.taken == 0 and len(sys.log) == 1


def test_no_buffer_space_is_tried_again_a_few_times_and_then_dropped(make: Make) -> None:
    io, sys = make(*[-errno.ENOBUFS] * 4, None, segmentation=False)
    items = numbered(3)
    result = io.send(items, PEER)
    assert result.rejected == ((0, errno.ENOBUFS),) and sys.wire == items[1:]


def test_an_answer_to_an_earlier_packet_costs_none(make: Make) -> None:
    io, sys = make(-errno.ECONNREFUSED, None, segmentation=False)
    items = numbered(3)
    assert io.send(items, PEER).sent == 3 and sys.wire == items


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EOPNOTSUPP])
def test_without_sendmmsg_the_same_batch_goes_plainly_and_for_good(
    make: Make, error: int, caplog: pytest.LogCaptureFixture
) -> None:
    items = numbered(3)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            io, sys = make(-error, singles=[None] * 6, segmentation=False)
            assert io.send(items, PEER).sent == io.send(items, PEER).sent == 3
            assert [sent.call for sent in sys.log] == ["sendmmsg", *["sendto"] * 6]
            assert sys.wire == items * 2
    assert sum("sendmmsg" in record.message for record in caplog.records) == 1


# -- runs that are refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [errno.EIO, errno.EINVAL])
def test_a_device_that_cannot_segment_ends_it_for_good(
    make: Make, error: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The second of three runs is refused: the first is out, the others go packet by packet, each once."""
    io, sys = make(1, -error, None, None)
    items = [*numbered(4, 500), *numbered(4, 600), *numbered(4, 700)]
    with caplog.at_level(logging.WARNING):
        result = io.send(items, PEER)
        again = io.send(items, PEER)
    assert (result.state, result.sent, result.rejected, again.sent) == (TxState.DONE, 12, (), 12)
    assert sys.wire == items * 2
    assert not io.segmentation and all(not size for sent in sys.log[2:] for _, _, size in sent.entries)
    assert sum("segmentation" in record.message for record in caplog.records) == 1


def test_packets_that_have_become_too_large_for_runs_leave_smaller_ones_in_theirs(make: Make) -> None:
    io, sys = make(-errno.EMSGSIZE, None, None, None)
    large, small = numbered(4, 1064), numbered(4, 500)
    assert io.send(large, PEER).sent == 4
    assert io.send(large, PEER).sent == 4  # not tried again
    assert io.send(small, PEER).sent == 4
    assert sys.wire == large * 2 + small
    assert [len(sent.entries) for sent in sys.log] == [1, 4, 4, 1] and io.segmentation


@pytest.mark.parametrize("error", [errno.ENOBUFS, errno.EPERM, errno.ENOMEM])
def test_a_passing_error_switches_nothing_off(make: Make, error: int) -> None:
    io, sys = make(-error, None, None)
    items = numbered(4, 500)
    assert io.send(items, PEER).sent == 4
    assert io.send(items, PEER).sent == 4
    assert [len(sent.entries) for sent in sys.log] == [1, 4, 1] and sys.wire == items * 2
    assert io.segmentation


@pytest.mark.parametrize("error", [errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN])
def test_who_cannot_be_reached_is_not_tried_packet_by_packet(make: Make, error: int) -> None:
    io, sys = make(-error, None)
    items = numbered(30, 500)
    result = io.send(items, PEER)
    assert result.state is TxState.DONE and result.rejected == tuple((i, error) for i in range(30))
    assert len(sys.log) == 1
    assert io.send(items, PEER).sent == 30 and io.segmentation


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([3, 500, 500, 500, 1064, 3000]), min_size=2, max_size=150),
    steps=st.lists(
        st.one_of(
            st.integers(1, 5),
            st.sampled_from(
                [-errno.EINTR, -errno.EAGAIN, -errno.ENOBUFS, -errno.EIO, -errno.EINVAL, -errno.EMSGSIZE, -errno.EPERM,
                 -errno.EHOSTUNREACH, -errno.ECONNREFUSED]
            ),
        ),
        max_size=25,
    ),
    batch=st.sampled_from([1, 2, 8, 64]),
)  # fmt: skip
def test_every_packet_leaves_once_or_is_told_of(lengths: list[int], steps: list[int], batch: int) -> None:
    items = [n.to_bytes(2, "big") + bytes(size - 2) for n, size in enumerate(lengths)]
    singles: list[int | None] = [step for step in steps if step < 0]
    io, sys = build(*steps, *[None] * 400, singles=[*singles, *[None] * 2000], max_batch=batch)
    start, rejected = 0, []
    for _ in range(200):
        result = io.send(items, PEER, start=start)
        rejected += [index for index, _ in result.rejected]
        start = result.taken
        if result.state is TxState.DONE:
            break
        assert result.state is TxState.BLOCKED
    io.close()
    assert start == len(items)
    numbers = [int.from_bytes(item[:2], "big") for item in sys.wire]
    assert numbers == sorted(set(numbers)), "each once, in order"
    assert sorted(numbers + rejected) == list(range(len(items)))


# -- receiving ----------------------------------------------------------------------------------------------------


def arrivals(count: int, size: int = 40) -> list[Arrived]:
    return [Arrived(data) for data in numbered(count, size)]


def test_a_batch_is_one_call_and_says_who_sent_it(make: Make) -> None:
    io, sys = make(receives=[arrivals(5)])
    batch = io.make_batch()
    assert io.recv(batch) == 5
    assert batch.take_all() == numbered(5)
    assert batch.peer(0) == batch.uniform == make_peer("127.0.0.1", 4242)
    assert sys.received == [(64, 28)]


def test_descriptors_that_were_used_are_restored_and_no_others(make: Make) -> None:
    io, sys = make(receives=[arrivals(3), arrivals(2), -errno.EAGAIN])
    batch = io.make_batch()
    assert io.recv(batch) == 3
    sentinel = (ctypes.c_uint64 * 8).from_address(sys.vector + 64 * 10)
    sentinel[1], sentinel[6] = 0x1234, 0x55
    third = (ctypes.c_uint64 * 8).from_address(sys.vector + 64 * 2)
    assert third[1] == 16  # as the kernel left it
    assert io.recv(batch) == 2
    assert (sentinel[1], sentinel[6]) == (0x1234, 0x55) and third[1] == 28
    assert io.recv(batch) == 0
    assert [namelen for _, namelen in sys.received] == [28, 28, 28]


@pytest.mark.parametrize(
    "odd",
    [
        Arrived(b"x" * 40, flags=linux.TRUNC),
        Arrived(b"x" * 40, flags=linux.CTRUNC),
        Arrived(b""),
        Arrived(b"x" * 2049),  # larger than anything the interface carries
    ],
    ids=["truncated", "control truncated", "empty", "too large"],
)
def test_a_datagram_that_is_not_whole_costs_only_itself(make: Make, odd: Arrived) -> None:
    first, last = arrivals(2)
    io, _ = make(receives=[[first, odd, last]])
    batch = io.make_batch()
    assert io.recv(batch) == 2 and batch.dropped == 1
    assert batch.take_all() == numbered(2) and io.stats.rx_dropped == 1
    assert len(batch.peers) == 2


@pytest.mark.parametrize(
    "odd",
    [Arrived(b"x", length=5000), Arrived(b"x", namelen=7), Arrived(b"x", namelen=200), Arrived(b"x", name=b"")],
    ids=["length", "name too short", "name too long", "no name"],
)
def test_a_shape_that_no_kernel_makes_drops_the_batch(make: Make, odd: Arrived) -> None:
    io, _ = make(receives=[[*arrivals(1), odd], -errno.EAGAIN])
    batch = io.make_batch()
    assert io.recv(batch) == 0 and io.stats.rx_dropped == 2


def test_more_datagrams_than_there_were_descriptors_drop_the_batch(make: Make) -> None:
    io, _ = make(receives=[arrivals(5), -errno.EAGAIN], max_batch=4)
    assert io.recv(io.make_batch()) == 0 and io.stats.rx_dropped == 5


def test_a_coalesced_buffer_is_taken_apart_and_what_has_no_room_waits(make: Make) -> None:
    joined = Arrived(b"".join(numbered(10, 50)) + b"tail", control=gro(50))
    io, sys = make(receives=[[joined, *arrivals(1)], -errno.EAGAIN], coalescing=True, max_batch=4)
    batch, found, counts = io.make_batch(), [], []
    while count := io.recv(batch):
        counts.append(count)
        found += batch.take_all()
        assert len(batch.peers) == count
    assert found == [*numbered(10, 50), b"tail", *numbered(1)] and counts == [4, 4, 4]
    assert len(sys.received) == 2  # what waited took no call


@pytest.mark.parametrize("size", [0, -3, 54, 100])
def test_a_size_that_cuts_nothing_means_one_datagram(make: Make, size: int) -> None:
    io, _ = make(receives=[[Arrived(b"x" * 54, control=gro(size))]], coalescing=True)
    batch = io.make_batch()
    assert io.recv(batch) == 1 and batch.take(0) == b"x" * 54


@pytest.mark.parametrize("error", [errno.ECONNREFUSED, errno.ENETDOWN, errno.EINTR])
def test_what_passes_does_not_end_the_reader(make: Make, error: int) -> None:
    io, _ = make(receives=[-error, arrivals(2)])
    assert io.recv(io.make_batch()) == 2


def test_an_unusable_descriptor_is_told(make: Make) -> None:
    io, _ = make(receives=[-errno.EBADF])
    with pytest.raises(IOBroken) as told:
        io.recv(io.make_batch())
    assert told.value.errno == errno.EBADF


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM])
def test_without_recvmmsg_the_same_datagrams_are_read_plainly_and_for_good(
    error: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            sys = FakeSys(receives=deque([-error]))
            sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            sock.bind(("127.0.0.1", 0))
            io = LinuxDatagramIO(sock, sys=sys)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
                sender.bind(("127.0.0.1", 0))
                for item in (b"one", b"two"):
                    sender.sendto(item, sock.getsockname())
                batch = io.make_batch()
                assert io.recv(batch, 5.0) >= 1
                found = batch.take_all()
                while len(found) < 2:
                    assert io.recv(batch, 5.0)
                    found += batch.take_all()
                assert found == [b"one", b"two"]
                assert batch.peer(0) == make_peer(*sender.getsockname())
            io.close()
    assert sum("recvmmsg" in record.message for record in caplog.records) == 1


def test_calls_go_through_handles_that_keep_the_gil() -> None:
    libc = Libc()
    for call in (libc.recvmmsg, libc.sendmmsg, libc.sendto):
        assert call._flags_ & ctypes._FUNCFLAG_PYTHONAPI  # type: ignore[attr-defined]
