"""What comes in by recvmmsg: coalesced buffers, descriptors between two receives, errors, and what is not believed."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rnsfast.osio.contract import IOBroken, RxBatch
from rnsfast.osio.linux import GRO_SLOT, Libc, LinuxDatagramIO
from rnsfast.osio.peers import make_peer
from rnsfast.osio.runs import SOL_UDP, UDP_GRO, UDP_SEGMENT
from tests.osio.linux_fake import DONTWAIT, Arrived, FakeSys, gro

pytestmark = pytest.mark.skipif(not Libc.usable(), reason="the structures are those of 64-bit little-endian Linux")

PATIENCE = 10.0
NOTHING = -errno.EAGAIN
Open = Callable[..., tuple[LinuxDatagramIO, FakeSys]]


@pytest.fixture
def opened(stack: ExitStack) -> Open:
    def make(*receives: list[Arrived] | int, **options: object) -> tuple[LinuxDatagramIO, FakeSys]:
        sys = FakeSys(receives=deque(receives))
        io = LinuxDatagramIO(socket.socket(socket.AF_INET, socket.SOCK_DGRAM), sys=sys, **options)  # type: ignore[arg-type]
        stack.callback(io.close)
        return io, sys

    return make


def words(sys: FakeSys, entry: int) -> ctypes.Array[ctypes.c_uint64]:
    return (ctypes.c_uint64 * 8).from_address(sys.vector + 64 * entry)


# -- descriptors --------------------------------------------------------------------------------------------------


def test_names_and_control_space_are_there_again_at_every_receive(opened: Open) -> None:
    """A kernel that finds no room for them leaves the sender out, and the sizes."""
    joined = Arrived(b"a" * 100 + b"b" * 20, control=gro(100))
    io, sys = opened(*[[joined] * 3] * 3, coalescing=True)
    batch = io.make_batch()
    for _ in range(3):
        assert io.recv(batch) == 6 and batch.dropped == 0
        assert batch.take_all() == [b"a" * 100, b"b" * 20] * 3
    assert sys.received == [(batch.slots, 28)] * 3


def test_only_what_was_used_is_restored(opened: Open) -> None:
    io, sys = opened([Arrived(b"x", control=gro(9))] * 3, [Arrived(b"y")] * 2, NOTHING, coalescing=True)
    batch = io.make_batch()
    io.recv(batch)
    beyond = words(sys, 3)
    beyond[1], beyond[5], beyond[6] = 1, 5, 6
    io.recv(batch)
    io.recv(batch)
    assert (beyond[1], beyond[5], beyond[6]) == (1, 5, 6)
    assert [list(words(sys, n)[1:7:4]) for n in range(3)] == [[28, 24]] * 3
    assert [words(sys, n)[6] for n in range(3)] == [0] * 3


def test_descriptors_are_restored_after_a_call_that_raised(opened: Open) -> None:
    io, sys = opened([Arrived(b"x")] * 3)
    batch, real = io.make_batch(), sys.recvmmsg
    io.recv(batch)
    touched = []

    def interrupted(fd: int, vector: int, count: int, flags: int, timeout: None, /) -> int:
        for n in range(5):  # what the kernel had done by then
            words(sys, n)[1], words(sys, n)[6] = 16, 0x8
        touched.append(count)
        raise KeyboardInterrupt

    sys.recvmmsg = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        io.recv(batch)
    assert touched == [64] and not io._rx_lock.locked()
    sys.recvmmsg = real  # type: ignore[method-assign]
    sys.receives.append(NOTHING)
    io.recv(batch)
    assert [(words(sys, n)[1], words(sys, n)[6]) for n in range(64)] == [(28, 0)] * 64


def test_a_receive_that_finds_nothing_restores_nothing_and_counts_as_a_call(opened: Open) -> None:
    io, _ = opened(NOTHING, NOTHING)
    batch = io.make_batch()
    assert io.recv(batch) == io.recv(batch) == 0 and io.stats.rx_calls == 2 and io._rx_used == 0


def test_calls_are_made_under_the_lock_and_cannot_block(opened: Open) -> None:
    io, sys = opened([Arrived(b"x")])
    seen, real = [], sys.recvmmsg

    def look(fd: int, vector: int, count: int, flags: int, timeout: None, /) -> int:
        seen.append((fd == io.fileno(), io._rx_lock.locked(), flags, timeout))
        return real(fd, vector, count, flags, timeout)

    sys.recvmmsg = look  # type: ignore[method-assign]
    io.recv(io.make_batch())
    assert seen == [(True, True, DONTWAIT, None)]


def test_memory_of_another_batch_is_filled_when_it_is_given(opened: Open) -> None:
    io, _ = opened([Arrived(b"one")], [Arrived(b"two")], [Arrived(b"three")])
    batches = [io.make_batch(), io.make_batch()]
    io.recv(batches[0])
    io.recv(batches[1])
    assert batches[0].take_all() == [b"one"] and batches[1].take_all() == [b"two"]
    io.recv(batches[0])
    assert batches[0].take_all() == [b"three"] and batches[1].take_all() == [b"two"]


# -- coalesced buffers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "size", "pieces"),
    [
        (100, 0, [100]),
        (100, -1, [100]),
        (100, -(2**31), [100]),
        (100, 100, [100]),
        (100, 101, [100]),
        (100, 2**31 - 1, [100]),
        (100, 50, [50, 50]),
        (101, 50, [50, 50, 1]),
        (119, 50, [50, 50, 19]),
        (3, 1, [1, 1, 1]),
    ],
)
def test_a_buffer_is_cut_as_the_sender_had_it(opened: Open, length: int, size: int, pieces: list[int]) -> None:
    data = bytes(n & 255 for n in range(length))
    io, _ = opened([Arrived(data, control=gro(size))], coalescing=True)
    batch = io.make_batch()
    assert io.recv(batch) == len(pieces)
    assert [len(batch.data(n)) for n in range(batch.count)] == pieces and b"".join(batch.take_all()) == data
    assert batch.uniform == batch.peer(0) == make_peer("127.0.0.1", 4242)


@pytest.mark.parametrize(
    "control",
    [
        gro(50)[:18],
        gro(50)[:15],
        struct.pack("=Qii8x", 2**63, SOL_UDP, UDP_GRO),
        struct.pack("=Qii8x", 2**64 - 1, SOL_UDP, UDP_GRO),
        struct.pack("=Qii8x", 0, SOL_UDP, UDP_GRO),
        struct.pack("=Qiii4x", 16, SOL_UDP, UDP_GRO, 50),
        struct.pack("=Qiii4x", 20, SOL_UDP, UDP_SEGMENT, 50),
        struct.pack("=Qiii4x", 20, 1, UDP_GRO, 50),
    ],
    ids=["cut value", "cut header", "overflow", "all ones", "no length", "no value", "other kind", "other level"],
)
def test_control_messages_that_say_nothing_sound_mean_one_datagram(opened: Open, control: bytes) -> None:
    io, _ = opened([Arrived(b"x" * 100, control=control)], coalescing=True)
    batch = io.make_batch()
    assert io.recv(batch) == 1 and batch.take(0) == b"x" * 100


def test_control_messages_of_the_next_entry_are_not_read(opened: Open) -> None:
    """A length that reaches beyond the control space of an entry: what stands there belongs to another."""
    other = struct.pack("=Qii8x", 24, 1, 1)
    first = Arrived(b"x" * 100, control=other, controllen=48)
    io, _ = opened([first, Arrived(b"y" * 100, control=gro(50))], coalescing=True)
    batch = io.make_batch()
    assert io.recv(batch) == 3 and batch.take(0) == b"x" * 100


def test_a_buffer_without_its_boundaries_is_dropped(opened: Open) -> None:
    cut = Arrived(b"x" * 100, control=gro(50) + bytes(8))  # more than there is room for: the kernel says so
    io, _ = opened([cut, Arrived(b"y")], coalescing=True)
    batch = io.make_batch()
    assert io.recv(batch) == 1 and batch.take_all() == [b"y"] and batch.dropped == 1


def test_a_datagram_in_a_buffer_that_is_too_large_costs_itself(opened: Open) -> None:
    joined = Arrived(b"a" * 3000 + b"b" * 100, control=gro(3000))
    io, _ = opened([joined, Arrived(b"c")], coalescing=True)
    batch = io.make_batch()
    assert io.recv(batch) == 2 and batch.take_all() == [b"b" * 100, b"c"] and batch.dropped == 1
    assert len(batch.peers) == 2


def test_buffers_take_whatever_the_kernel_joins(opened: Open) -> None:
    io, _ = opened([Arrived(bytes(GRO_SLOT - 35), control=gro(1000))] * 2, NOTHING, coalescing=True)
    batch, found = io.make_batch(), 0
    assert batch.slot == GRO_SLOT
    while count := io.recv(batch):
        assert count <= batch.capacity
        found += batch.size
    assert found == 2 * (GRO_SLOT - 35) and io.stats.rx_dropped == 0


def test_what_has_no_room_is_handed_over_without_a_wait_and_before_what_comes(opened: Open) -> None:
    joined = Arrived(b"".join(bytes([n]) * 10 for n in range(5)), control=gro(10))
    io, sys = opened([joined], [Arrived(b"new")], coalescing=True, max_batch=2)
    io.wait = lambda *arguments, **options: pytest.fail("it waits")  # type: ignore[method-assign]
    batch, found = io.make_batch(), []
    for _ in range(4):
        assert io.recv(batch, PATIENCE)
        found.append(batch.take_all())
    assert found == [[b"\0" * 10, b"\1" * 10], [b"\2" * 10, b"\3" * 10], [b"\4" * 10], [b"new"]]
    assert len(sys.received) == 2 and io.stats.rx_packets == 6


Buffers = st.lists(
    st.tuples(st.integers(1, 400), st.sampled_from([-1, 0, 1, 7, 50, 399, 1000])), min_size=1, max_size=6
)


@settings(max_examples=100, deadline=None)
@given(st.lists(Buffers, max_size=6), st.sampled_from([2, 3, 8, 64]))
def test_every_byte_of_every_buffer_arrives_once_in_order(script: list[list[tuple[int, int]]], capacity: int) -> None:
    number, fills, expected = 0, [], []
    for buffers in script:
        fill = []
        for length, size in buffers[:capacity]:
            data = bytes((number + n) & 255 for n in range(length))
            number += length
            fill.append(Arrived(data, control=gro(size)))
            step = size if 0 < size < length else length
            expected += [data[at : at + step] for at in range(0, length, step)]
        fills.append(fill)
    sys = FakeSys(receives=deque([*fills, *[NOTHING] * 2]))
    io = LinuxDatagramIO(socket.socket(socket.AF_INET, socket.SOCK_DGRAM), sys=sys, max_batch=capacity, coalescing=True)
    batch, found = io.make_batch(), []
    while count := io.recv(batch):
        assert count == len(batch.peers) <= capacity
        found += batch.take_all()
    io.close()
    assert found == expected and io.stats.rx_packets == len(expected) and io.stats.rx_bytes == number


# -- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM])
def test_plain_calls_after_a_refusal_do_not_get_joined_datagrams(error: int) -> None:
    """They could not tell where one ends, so the kernel must not join them any more."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("127.0.0.1", 0))
    receiver = LinuxDatagramIO(sock, sys=FakeSys(receives=deque([-error])), coalescing=True)
    sender = LinuxDatagramIO(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    batch, items, found = receiver.make_batch(), [bytes([n]) * 500 for n in range(40)], []
    assert receiver.recv(batch) == 0
    assert sender.send(items, make_peer(*sock.getsockname())).sent == 40
    while len(found) < 40:
        assert receiver.recv(batch, PATIENCE)
        found += batch.take_all()
    assert found == items and receiver.stats.rx_dropped == 0
    receiver.close()
    sender.close()


def test_an_interrupted_call_is_made_again_without_a_wait(opened: Open) -> None:
    io, _ = opened(-errno.EINTR, -errno.EINTR, [Arrived(b"x")])
    assert io.recv(io.make_batch()) == 1


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOTSOCK, errno.EFAULT, errno.EBADF])
def test_an_error_that_is_not_passing_ends_the_reader(opened: Open, error: int) -> None:
    io, _ = opened([Arrived(b"x")], -error)
    batch = io.make_batch()
    assert io.recv(batch) == 1
    with pytest.raises(IOBroken) as told:
        io.recv(batch)
    assert told.value.errno == error and told.value.strerror == os.strerror(error)


def test_an_error_of_an_earlier_packet_hides_none_that_has_come() -> None:
    """Connected, nobody there: the answer to our packet is told before what waits (protocol 09, 5.2)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as far:
        far.bind(("127.0.0.1", 0))
        near = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        near.bind(("127.0.0.1", 0))
        near.connect(far.getsockname())
        for item in (b"one", b"two"):
            far.sendto(item, near.getsockname())
        io = LinuxDatagramIO(near)
        far.close()
        assert io.send_one(b"nobody hears it").sent == 1
        batch, found = io.make_batch(), []
        while len(found) < 2:
            assert io.recv(batch, PATIENCE)
            found += batch.take_all()
        assert found == [b"one", b"two"]
        io.close()


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.builds(
            Arrived,
            data=st.binary(max_size=120),
            name=st.sampled_from([b"\x02\x00\x10\x92\x7f\x00\x00\x01" + bytes(8), bytes(16), b"", bytes(28)]),
            flags=st.sampled_from([0, 0x20, 0x8, 0x4000]),
            control=st.one_of(st.just(b""), st.integers(-5, 200).map(gro), st.binary(max_size=40)),
            length=st.one_of(st.none(), st.integers(0, 2**32 - 1)),
            namelen=st.one_of(st.none(), st.integers(0, 2**32 - 1)),
            controllen=st.one_of(st.none(), st.integers(0, 2**64 - 1)),
        ),
        min_size=1,
        max_size=6,
    ),
    st.booleans(),
    st.booleans(),
)
def test_no_answer_of_the_system_raises_or_hands_over_what_is_out_of_bounds(
    entries: list[Arrived], coalescing: bool, peers: bool
) -> None:
    sys = FakeSys(receives=deque([entries, NOTHING, NOTHING]))
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    io = LinuxDatagramIO(sock, sys=sys, max_batch=4, max_packet=100, coalescing=coalescing, peers=peers)
    batch = RxBatch(4, 200)
    for _ in range(60):
        if not (count := io.recv(batch)):
            break
        assert count <= 4 and all(0 < len(batch.data(n)) <= 100 for n in range(count))
        assert not peers or (len(batch.peers) == count and None not in [p and p.raw for p in batch.peers])
    io.close()
    assert not count
