"""Stream back ends: same bytes whatever the system takes at a time, and every error in its place."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rnsfast.osio.backend import open_backend
from rnsfast.osio.contract import IOBroken, IOClosed, Kind, RxBatch, TxState
from rnsfast.osio.stream import READ_SIZE, TX_FRAMES, StreamIO
from tests.fakes import EAGAIN, PATIENCE, ScriptedCalls

EINTR = -errno.EINTR


Scripted = Callable[..., tuple[StreamIO, ScriptedCalls]]


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    """Makes back ends whose system calls follow a script of sends."""
    made: list[StreamIO] = []

    def make(*sends: int | None, join_below: int = 1024) -> tuple[StreamIO, ScriptedCalls]:
        calls = ScriptedCalls(list(sends), join_below=join_below)
        made.append(StreamIO(socket.socket(), calls=calls))
        return made[-1], calls

    yield make
    for io in made:
        io.close()


def send_all(io: StreamIO, items: list[bytes]) -> int:
    """Send until everything is gone, as an interface does on writable events. How many times it was blocked."""
    start = offset = blocked = 0
    while True:
        result = io.send(items, None, start, offset)
        if result.state is TxState.DONE:
            assert result.taken == len(items)
            return blocked
        assert result.state is TxState.BLOCKED
        assert (result.taken, result.offset) >= (start, offset)
        assert result.offset < len(items[result.taken])
        start, offset = result.taken, result.offset
        blocked += 1


# -- the wire equals the input ------------------------------------------------------------------------------------


def test_short_counts_at_every_byte_of_three_frames(scripted: Scripted) -> None:
    items = [b"~abc~", b"~defgh~", b"~i~"]
    total = sum(map(len, items))
    for first, second, join_below in product(range(1, total), range(1, total), (1, 1024)):
        io, calls = scripted(first, EAGAIN, EINTR, second, None, None, None, join_below=join_below)
        send_all(io, items)
        assert bytes(calls.wire) == b"".join(items)
        io.close()


@settings(max_examples=150, deadline=None)
@given(
    items=st.lists(st.binary(min_size=1, max_size=3000), min_size=1, max_size=300),
    steps=st.lists(st.one_of(st.just(EAGAIN), st.just(EINTR), st.none(), st.integers(1, 20_000)), max_size=40),
    max_batch=st.integers(1, TX_FRAMES),
    max_bytes=st.integers(1, 50_000),
    join_below=st.sampled_from([1, 1024, 1 << 20]),
)
def test_any_sequence_of_partial_writes_gives_the_same_stream(
    items: list[bytes], steps: list[int | None], max_batch: int, max_bytes: int, join_below: int
) -> None:
    calls = ScriptedCalls([*steps, *[None] * 400], join_below=join_below)
    io = StreamIO(socket.socket(), calls=calls, max_batch=max_batch, max_bytes=max_bytes)
    send_all(io, items)
    assert bytes(calls.wire) == b"".join(items)
    assert io.stats.tx_bytes == len(calls.wire)
    io.close()


@settings(max_examples=40, deadline=None)
@given(items=st.lists(st.binary(min_size=1, max_size=40_000), min_size=1, max_size=60), portable=st.booleans())
def test_real_sockets_carry_the_same_stream_with_a_small_buffer(items: list[bytes], portable: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if portable:
            patch.setenv("RNSFAST_OSIO", "portable")
        left, right = socket.socketpair()
        left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4608)
        sender, receiver = StreamIO(left), StreamIO(right)
    buffer, got = RxBatch(1, 10_000), bytearray()
    start = offset = 0
    while True:
        result = sender.send(items, None, start, offset)
        start, offset = result.taken, result.offset
        while receiver.recv(buffer):
            got += buffer.data(0)
        if result.state is TxState.DONE:
            break
    assert bytes(got) == b"".join(items)
    sender.close()
    receiver.close()


# -- how it is sent -----------------------------------------------------------------------------------------------


def test_one_frame_is_one_plain_call(scripted: Scripted) -> None:
    io, calls = scripted(None)
    assert io.send_one(b"x" * 5000).state is TxState.DONE
    assert calls.calls == ["send"]


@pytest.mark.parametrize(("size", "how"), [(100, "send"), (1023, "send"), (1024, "gather"), (9000, "gather")])
def test_small_frames_are_joined_and_large_ones_gathered(scripted: Scripted, size: int, how: str) -> None:
    io, calls = scripted(None)
    assert io.send([b"x" * size] * 3).state is TxState.DONE
    assert calls.calls == [how]


def test_a_call_takes_at_most_128_frames(scripted: Scripted) -> None:
    io, calls = scripted(None, None, None)
    result = io.send([b"x"] * 257)
    assert (result.state, result.sent, len(calls.calls)) == (TxState.DONE, 257, 3)


def test_a_call_takes_at_most_256_kib_but_at_least_one_frame(scripted: Scripted) -> None:
    io, calls = scripted(None, None, None)
    io.send([b"x" * 300_000, b"y" * 200_000, b"z" * 100_000])
    assert calls.calls == ["send", "send", "send"]


def test_a_short_count_ends_the_attempt_without_another_call(scripted: Scripted) -> None:
    io, calls = scripted(7)
    result = io.send([b"12345", b"67890"])
    assert (result.taken, result.sent, result.offset, result.state) == (1, 1, 2, TxState.BLOCKED)
    assert calls.calls == ["send"]
    assert io.stats.tx_short == 1


# -- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.EPIPE, errno.ECONNRESET, errno.ENOBUFS, errno.EMSGSIZE, errno.ETIMEDOUT])
@pytest.mark.parametrize("before", [0, 1, 2])
def test_any_other_error_is_the_end_whatever_was_sent_before(scripted: Scripted, code: int, before: int) -> None:
    io, _ = scripted(*[None] * before, -code)
    result = io.send([b"x" * 200_000] * 3)
    assert (result.state, result.taken, result.errno) == (TxState.UNKNOWN, before, code)


def test_a_call_without_progress_and_without_error_is_not_repeated(scripted: Scripted) -> None:
    io, calls = scripted(0)
    assert io.send([b"a", b"b"]).state is TxState.UNKNOWN
    assert calls.calls == ["send"]


@pytest.mark.parametrize("step", [EAGAIN, 2])
def test_a_full_socket_blocks_one_frame_too(scripted: Scripted, step: int) -> None:
    io, _ = scripted(step)
    result = io.send_one(b"12345")
    assert (result.state, result.taken, result.offset) == (TxState.BLOCKED, 0, max(step, 0))


def test_interrupted_calls_are_repeated(scripted: Scripted) -> None:
    io, calls = scripted(EINTR, EINTR, None, EINTR, None)
    assert io.send_one(b"one").state is TxState.DONE
    assert io.send([b"two", b"three"]).state is TxState.DONE
    assert bytes(calls.wire) == b"onetwothree"


def test_reading_tells_end_and_errors_apart(scripted: Scripted) -> None:
    io, calls = scripted()
    calls.receives.extend([EINTR, b"hello", EAGAIN, b"", -errno.ECONNRESET])
    buffer = RxBatch(1, 64)
    assert io.recv(buffer) == 1
    assert buffer.take(0) == b"hello"
    assert io.recv(buffer) == 0
    with pytest.raises(IOClosed) as closed:
        io.recv(buffer)
    assert closed.value.eof
    with pytest.raises(IOBroken) as broken:
        io.recv(buffer)
    assert broken.value.errno == errno.ECONNRESET


# -- real sockets, every variant ----------------------------------------------------------------------------------

Pair = tuple[socket.socket, socket.socket]


def test_backend_is_the_one_that_was_asked_for(variant: str, sockets: Pair) -> None:
    io = open_backend(Kind.STREAM, sockets[0])
    assert io.caps.backend == f"stream-{variant}"
    assert io.caps.pollable
    assert io.fileno() == sockets[0].fileno()


def test_frames_arrive_in_order_joined_and_gathered(variant: str, sockets: Pair) -> None:
    sender, receiver = StreamIO(sockets[0]), StreamIO(sockets[1])
    items = [os.urandom(size) for size in (1, 50, 9000, 1, 20_000, 3, 700)]
    for batch in (items, items[:2], [items[2], items[4]]):
        assert sender.send(batch).state is TxState.DONE
        buffer, got = RxBatch(1, READ_SIZE), b""
        while receiver.recv(buffer):
            got += buffer.take(0)
        assert got == b"".join(batch)


def test_peer_that_does_not_read_blocks_and_then_gets_everything(variant: str, sockets: Pair) -> None:
    sender = StreamIO(sockets[0])
    items = [bytes([i]) * 30_000 for i in range(100)]
    result = sender.send(items)
    assert result.state is TxState.BLOCKED
    assert (
        sender.send(items, None, result.taken, result.offset).state is TxState.BLOCKED
    )  # and nothing is lost by asking
    got = bytearray()
    sockets[1].settimeout(PATIENCE)
    while len(got) < 3_000_000:
        got += sockets[1].recv(1 << 20)
        if result.state is not TxState.DONE:
            result = sender.send(items, None, result.taken, result.offset)
    assert bytes(got) == b"".join(items)


def test_sending_to_a_closed_peer_is_the_end_and_no_signal(variant: str, sockets: Pair) -> None:
    sender = StreamIO(sockets[0])
    sockets[1].close()
    result = sender.send_one(b"x")
    assert (result.state, result.errno) == (TxState.UNKNOWN, errno.EPIPE)
    assert sender.send([b"x", b"y" * 3000]).state is TxState.UNKNOWN


def test_end_of_stream_and_reset(variant: str) -> None:
    buffer = RxBatch(1, 100)
    for linger in (False, True):
        with socket.create_server(("127.0.0.1", 0)) as server:
            client = socket.create_connection(server.getsockname())
            accepted, _ = server.accept()
        if linger:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        client.close()
        io = StreamIO(accepted)
        with pytest.raises(IOBroken if linger else IOClosed):
            io.recv(buffer, PATIENCE)
        io.close()


def test_blocked_recv_returns_on_wake_data_timeout_and_close(variant: str, sockets: Pair) -> None:
    io, buffer = StreamIO(sockets[0]), RxBatch(1, 100)
    results: list[object] = []
    turn = threading.Semaphore(0)

    def reader() -> None:
        for _ in range(3):
            try:
                results.append(io.recv(buffer, PATIENCE))
            except IOClosed:
                results.append("closed")
            turn.release()

    assert io.recv(buffer, 0.001) == 0
    thread = threading.Thread(target=reader)
    thread.start()
    io.wake()
    assert turn.acquire(timeout=PATIENCE)
    sockets[1].send(b"data")
    assert turn.acquire(timeout=PATIENCE)
    io.close()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert results == [0, 1, "closed"]
    assert io.send_one(b"x").state is TxState.CLOSED
    assert io.fileno() == -1
    io.close()


def test_close_does_not_destroy_what_was_sent_although_bytes_are_unread(variant: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname(), PATIENCE)
        accepted, _ = server.accept()
    io = StreamIO(accepted)
    client.sendall(b"never read")
    assert io.wait(PATIENCE)
    io.send_one(b"last words")
    io.close()
    with client:
        assert client.recv(100) == b"last words"
        assert client.recv(100) == b""


def test_a_reused_descriptor_number_never_gets_foreign_bytes(variant: str) -> None:
    """Senders that go on while their socket is closed, and a thread that grabs each number as it becomes free."""
    strays: list[bytes] = []
    for _ in range(150):
        left, right = socket.socketpair()
        io = StreamIO(left)
        begun = threading.Event()

        def hammer(io: StreamIO = io, begun: threading.Event = begun) -> None:
            while io.send([b"foreign" * 10, b"bytes" * 400]).state is not TxState.CLOSED:
                begun.set()

        thread = threading.Thread(target=hammer)
        thread.start()
        assert begun.wait(PATIENCE)
        io.close()
        others = [socket.socketpair() for _ in range(3)]
        thread.join(PATIENCE)
        assert not thread.is_alive()
        ends = [end for both in others for end in both]
        for end in ends:
            end.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                strays.append(end.recv(100))
        for end in ends:
            end.close()
        right.close()
    assert not strays


def test_no_call_that_could_block_keeps_the_gil_and_none_of_these_can() -> None:
    """Every libc call of the Linux variant is made with MSG_DONTWAIT."""
    if sys.platform != "linux":
        pytest.skip("Linux only")
    from rnsfast.osio import stream

    left, right = socket.socketpair()
    calls = stream.LinuxCalls(left)
    left.setblocking(True)  # what the socket says must not matter
    assert calls.recv(RxBatch(1, 10)) == EAGAIN
    while calls.send(b"x" * 100_000) > 0:
        pass
    assert calls.send(b"x") == EAGAIN
    assert calls.gather([b"x", b"y"]) == EAGAIN
    left.close()
    right.close()


def test_batch_buffer_keeps_its_address_and_shows_no_stale_data() -> None:
    batch = RxBatch(2, 8)
    batch.room(0)[:3] = b"abc"
    batch.room(1)[:2] = b"de"
    batch.fill((3, 2))
    assert [batch.take(i) for i in range(batch.count)] == [b"abc", b"de"]
    batch.fill(())
    assert batch.count == 0


def test_unknown_kinds_and_bounds_are_refused(sockets: Pair) -> None:
    with pytest.raises(ValueError, match="open_tun"):
        open_backend(Kind.TUN, sockets[0])
    for bound in (0, TX_FRAMES + 1):
        with pytest.raises(ValueError, match="max_batch"):
            StreamIO(sockets[0], max_batch=bound)
