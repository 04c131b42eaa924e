"""The packets of a utun device, by stand-ins: prefixes, order, and what every answer means."""

from __future__ import annotations

import errno
import socket
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rnsfast.osio.contract import IOBroken, Kind, RxBatch, TxState
from rnsfast.osio.utun import UtunIO
from tests.fakes import PATIENCE
from tests.osio.darwin_fakes import ALL, EMPTY, REFUSALS, Entry, Fail, Fill, Kernel, Make, Scripted, lines

pytestmark = pytest.mark.linux  # whose sockets the stand-ins use, and their errors

V4, V6 = struct.pack(">I", 2), struct.pack(">I", 30)


def ip(version: int, tail: bytes = b"", size: int = 40) -> bytes:
    return bytes([version << 4 | 5]) + b"." * (size - 1) + tail


def mixed(count: int) -> list[bytes]:
    return [ip(4 if i % 3 else 6, struct.pack(">H", i), 20 + i % 5) for i in range(count)]


def framed(items: list[bytes]) -> list[bytes]:
    """As they are on the socket."""
    return [(V4 if item[0] >> 4 == 4 else V6) + item for item in items]


def arrived(far: socket.socket) -> list[bytes]:
    got: list[bytes] = []
    while True:
        try:
            got.append(far.recv(4096))
        except BlockingIOError:
            return got


both = pytest.mark.parametrize("plain", [False, True], ids=["batched", "plain"])

# -- sending ------------------------------------------------------------------------------------------------------


@both
def test_every_packet_gets_the_prefix_of_its_version(utun: Make, plain: bool) -> None:
    io, far, kernel = utun(plain=plain)
    items = mixed(9)
    result = io.send(items)
    assert (result.state, result.sent, result.taken) == (TxState.DONE, 9, 9)
    assert arrived(far) == framed(items)
    assert set(kernel.calls) == ({"writev"} if plain else {"sendmsg_x"})
    assert io.stats.tx_bytes == sum(map(len, items))


@both
def test_invalid_packets_are_skipped_and_reported(utun: Make, plain: bool) -> None:
    io, far, _ = utun(plain=plain, max_packet=100)
    good = mixed(4)
    items = [b"", good[0], ip(5), good[1], b"\x00", ip(4, size=101), good[2], good[3], ip(15)]
    result = io.send(items)
    assert (result.state, result.taken, result.sent) == (TxState.DONE, 9, 4)
    assert result.rejected == (
        (0, errno.EINVAL),
        (2, errno.EINVAL),
        (4, errno.EINVAL),
        (5, errno.EMSGSIZE),
        (8, errno.EINVAL),
    )
    assert arrived(far) == framed(good)


@pytest.mark.parametrize("bad", [b"", ip(7), ip(4, size=101)], ids=["empty", "version", "large"])
def test_one_invalid_packet_is_enough_to_look_at_each(scripted_utun: Make, bad: bytes) -> None:
    io, calls = scripted_utun(sendmsg_x=[ALL], options={"max_packet": 100})
    items = mixed(3)
    result = io.send([items[0], bad, *items[1:]])
    assert (result.taken, result.sent) == (4, 3) and [i for i, _ in result.rejected] == [1]
    assert calls.wire == framed(items)


def test_an_invalid_packet_alone_is_never_written(scripted_utun: Make) -> None:
    io, _ = scripted_utun()
    assert [io.send_one(item).rejected for item in (b"", ip(3))] == [((0, errno.EINVAL),)] * 2


@both
@pytest.mark.parametrize("large", [[0], [3], [0, 3, 9], [8, 9], list(range(10))], ids=str)
def test_what_the_kernel_finds_too_large_costs_only_itself(utun: Make, plain: bool, large: list[int]) -> None:
    io, far, _ = utun(limit=204, plain=plain)
    items = [ip(4, size=201) if i in large else packet for i, packet in enumerate(mixed(10))]
    items[5 if 5 not in large else 0] = ip(6, size=200) if 5 not in large else items[0]  # just fits, with its prefix
    result = io.send(items)
    assert (result.state, result.taken) == (TxState.DONE, 10)
    assert result.rejected == tuple((i, errno.EMSGSIZE) for i in large)
    assert arrived(far) == framed([item for i, item in enumerate(items) if i not in large])


@pytest.mark.parametrize("counts", [[ALL], [1, ALL], [1, 1, 1, ALL], [2, ALL]], ids=str)
def test_what_a_call_did_not_take_goes_into_the_next_one(scripted_utun: Make, counts: list[int]) -> None:
    io, calls = scripted_utun(sendmsg_x=counts)
    items = mixed(8)
    assert io.send(items).sent == 8
    assert calls.wire == framed(items)
    assert io.stats.tx_short == len(counts) - 1


def test_too_large_first_goes_alone_through_the_plain_write(scripted_utun: Make) -> None:
    io, calls = scripted_utun(sendmsg_x=[2, Fail(errno.EMSGSIZE), ALL], writev=[Fail(errno.EMSGSIZE)])
    items = mixed(6)
    result = io.send(items)
    assert (result.sent, result.rejected) == (5, ((2, errno.EMSGSIZE),))
    assert calls.wire == framed(items[:2] + items[3:])
    assert calls.calls == ["sendmsg_x", "sendmsg_x", "writev", "sendmsg_x"]


@pytest.mark.parametrize("error", REFUSALS, ids=errno.errorcode.get)
def test_a_refused_sendmsg_x_writes_the_same_batch_plainly_and_for_good(
    scripted_utun: Make, caplog: pytest.LogCaptureFixture, error: int
) -> None:
    items = mixed(4)
    for _ in range(2):
        io, calls = scripted_utun(sendmsg_x=[Fail(error)], writev=[ALL] * 8)
        assert io.send(items).sent == io.send(items).sent == 4
        assert calls.wire == framed(items * 2)
        assert calls.calls == ["sendmsg_x", *["writev"] * 8]
    assert len(lines(caplog, "sendmsg_x")) == 1


def test_without_the_private_calls_the_plain_path_is_taken(
    scripted_utun: Make, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        io, _ = scripted_utun(
            missing=("recvmsg_x", "sendmsg_x"), writev=[ALL] * 2, readv=[Entry(V4 + ip(4)), Entry(V4 + ip(4)), EMPTY]
        )
        assert io.caps.backend == "portable"
        assert io.send(mixed(2)).sent == 2
        batch = io.make_batch()
        assert io.recv(batch) == 2
        assert batch.take_all() == [ip(4)] * 2 and batch.uniform == 4
    assert len(lines(caplog, "recvmsg_x")) == len(lines(caplog, "sendmsg_x")) == 1


def test_an_unknown_error_is_reported_and_nothing_offered_again(scripted_utun: Make) -> None:
    io, calls = scripted_utun(sendmsg_x=[1, Fail(errno.EIO)])
    result = io.send(mixed(5))
    assert (result.state, result.taken, result.errno) == (TxState.UNKNOWN, 1, errno.EIO)
    assert io.stats.tx_unknown == 4
    assert calls.calls == ["sendmsg_x"] * 2


def test_a_call_that_took_nothing_and_says_nothing_is_not_repeated(scripted_utun: Make) -> None:
    io, _ = scripted_utun(sendmsg_x=[0])
    assert io.send(mixed(5)).state is TxState.BROKEN


def test_one_packet_is_written_plainly(scripted_utun: Make) -> None:
    io, calls = scripted_utun(writev=[ALL, Fail(errno.ENETDOWN), EMPTY])
    assert io.send([ip(6)]).sent == 1
    assert io.send_one(ip(4)).rejected == ((0, errno.ENETDOWN),)
    assert io.send_one(ip(4)).state is TxState.BLOCKED
    assert calls.wire == [V6 + ip(6)]


@both
def test_a_full_device_blocks_and_the_rest_arrives_once(utun: Make, plain: bool) -> None:
    io, far, _ = utun(plain=plain)
    items = mixed(1000)
    result = io.send(items)
    assert result.state is TxState.BLOCKED
    got: list[bytes] = []
    while result.state is TxState.BLOCKED:
        got += arrived(far)
        assert len(got) == result.taken
        result = io.send(items, None, result.taken)
    assert got + arrived(far) == framed(items)


# -- receiving ----------------------------------------------------------------------------------------------------


@both
def test_packets_are_handed_over_without_their_prefix(utun: Make, plain: bool) -> None:
    io, far, kernel = utun(plain=plain)
    items = mixed(7)
    for packet in framed(items):
        far.send(packet)
    batch = io.make_batch()
    assert io.recv(batch, PATIENCE) == 7
    assert batch.take_all() == items
    assert batch.uniform is None and batch.peer(0) is None
    assert kernel.calls.count("recvmsg_x") == (0 if plain else 1)
    for packet in framed([ip(6), ip(6)]):
        far.send(packet)
    assert io.recv(batch) == 2 and batch.uniform == 6
    assert io.recv(batch) == 0


@both
def test_what_is_no_packet_is_dropped_and_counted(utun: Make, plain: bool) -> None:
    io, far, _ = utun(plain=plain, max_packet=100)
    bad = [V4, b"\x00", b"", V4 + ip(6), V6 + ip(4), b"\x00\x00\x00\x1c" + ip(6), b"\x02\x00\x00\x00" + ip(4)]
    bad += [V4 + ip(4, size=101), V4 + ip(4, size=300)]
    for packet in [V4 + ip(4), *bad, V6 + ip(6, size=100)]:
        far.send(packet)
    batch = io.make_batch()
    assert batch.slot == 101
    assert io.recv(batch) == 2
    assert batch.take_all() == [ip(4), ip(6, size=100)]
    assert batch.dropped == io.stats.rx_dropped == len(bad)
    assert bool(io.fallbacks) == plain


@both
@pytest.mark.parametrize("rest", [b"", V4[:2], V4], ids=["nothing", "half a prefix", "a prefix"])
def test_what_a_slot_held_before_is_no_packet(utun: Make, plain: bool, rest: bytes) -> None:
    io, far, _ = utun(plain=plain)
    batch = io.make_batch()
    far.send(V4 + ip(4))
    assert io.recv(batch) == 1
    far.send(rest)
    assert io.recv(batch) == 0
    assert io.stats.rx_dropped == 1


@both
def test_room_for_two_of_five(utun: Make, plain: bool) -> None:
    io, far, _ = utun(plain=plain)
    for packet in framed(mixed(5)):
        far.send(packet)
    batch = RxBatch(2, 1501)
    got: list[bytes] = []
    counts = []
    while count := io.recv(batch):
        counts.append(count)
        got += batch.take_all()
    assert counts == [2, 2, 1] and got == mixed(5)


IMPOSSIBLE = {
    "more packets than headers": Fill([Entry(V4 + ip(4))] * 2, 65),
    "longer than prefix and slot": Fill([Entry(V4 + ip(4), datalen=1506)]),
    "a sender": Fill([Entry(V4 + ip(4), namelen=16)]),
}


@pytest.mark.parametrize("fill", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_an_impossible_answer_drops_the_batch_and_ends_the_private_call(
    scripted_utun: Make, caplog: pytest.LogCaptureFixture, fill: Fill
) -> None:
    io, _ = scripted_utun(recvmsg_x=[fill], readv=[Entry(V6 + ip(6)), EMPTY, EMPTY])
    batch = io.make_batch()
    assert io.recv(batch) == 1
    assert batch.take_all() == [ip(6)] and batch.uniform == 6
    assert io.recv(batch) == 0
    assert io.stats.rx_dropped == (64 if fill.count else 1)
    assert len(lines(caplog, "recvmsg_x")) == 1


@pytest.mark.parametrize("error", REFUSALS, ids=errno.errorcode.get)
def test_a_refused_recvmsg_x_reads_plainly_and_for_good(scripted_utun: Make, error: int) -> None:
    io, calls = scripted_utun(recvmsg_x=[Fail(error)], readv=[Entry(V4 + ip(4)), EMPTY, EMPTY])
    batch = io.make_batch()
    assert io.recv(batch) == 1 and io.recv(batch) == 0
    assert calls.calls == ["recvmsg_x", "readv", "readv", "readv"]


def test_an_error_after_a_packet_is_kept_for_the_next_receive(scripted_utun: Make) -> None:
    io, _ = scripted_utun(missing=("recvmsg_x",), readv=[Entry(V4 + ip(4)), Fail(errno.ENXIO)])
    batch = io.make_batch()
    assert io.recv(batch) == 1
    with pytest.raises(IOBroken):
        io.recv(batch)


@pytest.mark.parametrize("bound", [0, 129])
def test_a_bound_outside_of_1_to_128_is_refused(bound: int) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock, pytest.raises(ValueError, match="128"):
        UtunIO(sock, max_batch=bound, sys=Scripted())


def test_what_it_says_about_itself(utun: Make) -> None:
    io, _, _ = utun(max_batch=32, max_packet=1280)
    caps = io.caps
    assert (caps.kind, caps.backend, caps.max_rx, caps.max_tx) == (Kind.TUN, "darwin-utun", 32, 32)
    assert (caps.max_packet, caps.peers, caps.run_tx, caps.pollable) == (1280, False, 1, True)


@settings(max_examples=50, deadline=None)
@given(
    items=st.lists(st.binary(max_size=120), min_size=1, max_size=30),
    limit=st.integers(5, 120),
    max_batch=st.integers(1, 10),
    plain=st.booleans(),
)
def test_nothing_is_lost_without_a_counter_and_nothing_comes_twice(
    items: list[bytes], limit: int, max_batch: int, plain: bool
) -> None:
    kernel = Kernel(limit)
    if plain:
        kernel.recvmsg_x = kernel.sendmsg_x = None
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    ends = [UtunIO(sock, sys=kernel, max_batch=max_batch, max_packet=100) for sock in (left, right)]
    try:
        got: list[bytes] = []
        at, rejected = 0, []
        batch = ends[1].make_batch()
        while True:
            result = ends[0].send(items, None, at)
            at, rejected = result.taken, rejected + list(result.rejected)
            while ends[1].recv(batch):
                got += batch.take_all()
            if result.state is TxState.DONE:
                break
            assert result.state is TxState.BLOCKED
        good = [0 < len(item) <= min(100, limit - 4) and item[0] >> 4 in (4, 6) for item in items]
        assert got == [item for item, is_good in zip(items, good, strict=True) if is_good]
        assert [i for i, _ in rejected] == [i for i, is_good in enumerate(good) if not is_good]
        assert ends[1].stats.rx_dropped == 0
    finally:
        for end in ends:
            end.close()
