"""One stream connection: whole frames only, bounded, nothing watched that is not needed."""

from __future__ import annotations

import errno
import os
import random
import select
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from rnsfast.engine.port import Port
from rnsfast.interfaces.framing import HDLC, KISS
from rnsfast.interfaces.stream import (
    CONGESTED_ABOVE,
    CONGESTED_BELOW,
    QUEUE_LIMIT,
    SMALL_READ,
    STALL_TIME,
    Cause,
    End,
    StreamConnection,
    receive_buffer,
)
from rnsfast.osio.poller import READ, WRITE
from rnsfast.wire.drop import Drop
from rnsfast.wire.hdlc import HdlcDecoder
from tests.fakes import EAGAIN, PATIENCE, FakeRuntime, ScriptedCalls

Pair = tuple[socket.socket, socket.socket]
Ends = list[End]
Make = Callable[..., tuple[StreamConnection, Port, Ends]]


@pytest.fixture
def connect(runtime: FakeRuntime) -> Iterator[Make]:
    made: list[StreamConnection] = []

    def make(
        sock: socket.socket, calls: ScriptedCalls | None = None, *, framing: object = HDLC, hw_mtu: int = 16384
    ) -> tuple[StreamConnection, Port, Ends]:
        ends: Ends = []
        port = Port("TCPInterface[x/y:1]", hw_mtu=hw_mtu)
        port.online = True
        runtime.attach(port, None)
        connection = StreamConnection(
            runtime,
            port,
            sock,
            framing,  # type: ignore[arg-type]
            receive_buffer(),
            lambda _, end: ends.append(end),
            calls=calls,
        )
        connection.watch()
        made.append(connection)
        return connection, port, ends

    yield make
    for connection in made:
        connection.close()


def queue(port: Port, packets: list[bytes]) -> None:
    assert port.send_many(packets)


def read_packets(sock: socket.socket, count: int, max_frame: int = 20_000) -> list[bytes]:
    sock.settimeout(PATIENCE)
    decoder, packets = HdlcDecoder(max_frame), []
    while len(packets) < count:
        chunk = sock.recv(1 << 16)
        assert chunk, f"end of stream after {len(packets)} of {count}"
        packets += decoder.feed(chunk)
    assert not decoder.drops
    return packets


def some_packets(seed: int, count: int, low: int = 20, high: int = 1000) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(rng.randint(low, high)) for _ in range(count)]


# -- sending ------------------------------------------------------------------------------------------------------


def test_one_packet_is_one_plain_call_and_touches_neither_poller_nor_timer(
    runtime: FakeRuntime, connect: Make, sockets: Pair
) -> None:
    calls = ScriptedCalls([None])
    connection, port, _ = connect(sockets[0], calls)
    queue(port, [b"p" * 50])
    connection.flush()
    assert calls.calls == ["send"]
    assert bytes(calls.wire) == b"~" + b"p" * 50 + b"~"
    assert runtime.rewatches == 0
    assert runtime.pending_calls == []
    assert (port.tx_packets, port.tx_bytes) == (1, 50)


def test_a_batch_is_one_call(connect: Make, sockets: Pair) -> None:
    calls = ScriptedCalls([None])
    connection, port, _ = connect(sockets[0], calls)
    packets = some_packets(1, 60)
    queue(port, packets)
    connection.flush()
    assert calls.calls == ["send"]
    assert HdlcDecoder(2000).feed(bytes(calls.wire)) == packets


def test_flush_without_packets_does_nothing(connect: Make, sockets: Pair) -> None:
    calls = ScriptedCalls()
    connection, _, _ = connect(sockets[0], calls)
    connection.flush()
    assert calls.calls == []


@pytest.mark.parametrize("taken", [EAGAIN, 1, 51, 52, 53, 120])
def test_write_readiness_is_watched_only_while_something_is_left(
    runtime: FakeRuntime, connect: Make, sockets: Pair, taken: int
) -> None:
    calls = ScriptedCalls([taken, EAGAIN, None])
    connection, port, _ = connect(sockets[0], calls)
    fd = sockets[0].fileno()
    packets = [b"a" * 50, b"b" * 50, b"c" * 50]
    queue(port, packets)
    connection.flush()
    assert runtime.events[fd] == READ | WRITE
    connection.on_events(WRITE)
    assert runtime.events[fd] == READ | WRITE
    connection.on_events(WRITE)
    assert runtime.events[fd] == READ
    assert connection.waiting == 0
    assert HdlcDecoder(100).feed(bytes(calls.wire)) == packets


def test_bytes_waiting_are_exact_after_every_partial_write(runtime: FakeRuntime, connect: Make, sockets: Pair) -> None:
    calls = ScriptedCalls([7, 11, 13, 200, 60, EAGAIN, 1, None])
    connection, port, _ = connect(sockets[0], calls)
    queue(port, [b"a" * 98])
    connection.flush()
    for number in range(5):
        queue(port, [bytes([number]) * 98])
        connection.flush()
    assert connection.waiting == 600 - 7
    while calls.sends:
        connection.on_events(WRITE)
        assert connection.waiting == 600 - len(calls.wire)


def test_while_frames_wait_new_ones_queue_behind_them_without_a_call(
    runtime: FakeRuntime, connect: Make, sockets: Pair
) -> None:
    calls = ScriptedCalls([10, None])
    connection, port, _ = connect(sockets[0], calls)
    packets = some_packets(2, 40)
    for packet in packets:
        queue(port, [packet])
        connection.flush()
    assert calls.calls == ["send"]
    assert runtime.rewatches == 1  # a hundred frames, one change of the poller
    connection.on_events(WRITE)
    assert HdlcDecoder(2000).feed(bytes(calls.wire)) == packets


def test_random_partial_writes_never_cut_or_glue_a_frame(runtime: FakeRuntime, connect: Make, sockets: Pair) -> None:
    rng = random.Random(3)
    for _ in range(30):
        steps: list[int | None] = [rng.choice([EAGAIN, None, rng.randint(1, 5000)]) for _ in range(60)]
        calls = ScriptedCalls([*steps, *[None] * 100])
        left, right = socket.socketpair()
        connection, port, ends = connect(left, calls)
        sent: list[bytes] = []
        for _ in range(30):
            packets = some_packets(rng.randrange(1 << 30), rng.randint(1, 20))
            queue(port, packets)
            sent += packets
            connection.flush()
            if rng.random() < 0.5:
                connection.on_events(WRITE)
        while connection.waiting:
            connection.on_events(WRITE)
        assert HdlcDecoder(2000).feed(bytes(calls.wire)) == sent
        assert not ends
        connection.close()
        right.close()


def test_peer_that_does_not_read_costs_bounded_memory_and_whole_frames_only(
    runtime: FakeRuntime, connect: Make, sockets: Pair
) -> None:
    connection, port, _ = connect(sockets[0])
    rng = random.Random(4)
    packets = [i.to_bytes(4, "big") + rng.randbytes(496) for i in range(30_000)]
    for at in range(0, len(packets), 300):
        queue(port, packets[at : at + 300])
        connection.flush()
        assert connection.waiting <= QUEUE_LIMIT
    dropped = port.drops[Drop.TX_QUEUE_FULL]
    assert dropped > 0
    assert connection.waiting > QUEUE_LIMIT - 600  # the room was used
    assert port.congested
    assert port.tx_packets == len(packets) - dropped
    got: list[bytes] = []
    decoder = HdlcDecoder(1000)
    sockets[1].setblocking(False)

    def read() -> bool:
        try:
            while chunk := sockets[1].recv(1 << 16):
                got.extend(decoder.feed(chunk))
        except BlockingIOError:
            pass
        return len(got) == len(packets) - dropped

    runtime.run_until(read)
    assert not decoder.drops
    kept = set(got)
    assert len(kept) == len(got)
    assert [packet for packet in packets if packet in kept] == got  # in order, none cut, none glued
    assert not port.congested
    # and it goes on as if nothing had been
    queue(port, packets[:3])
    connection.flush()
    assert read_packets(sockets[1], 3) == packets[:3]


def test_one_batch_above_the_limit_keeps_what_was_begun(runtime: FakeRuntime, connect: Make, sockets: Pair) -> None:
    calls = ScriptedCalls([1000, *[None] * 200])
    connection, port, _ = connect(sockets[0], calls)
    packets = [bytes([i % 100]) * 16_000 for i in range(400)]  # 6.4 MB
    queue(port, packets)
    connection.flush()
    assert connection.waiting <= QUEUE_LIMIT
    dropped = port.drops[Drop.TX_QUEUE_FULL]
    assert dropped > 0
    connection.on_events(WRITE)
    assert HdlcDecoder(16_000).feed(bytes(calls.wire)) == packets[: len(packets) - dropped]


def test_congested_is_set_high_and_cleared_low(runtime: FakeRuntime, connect: Make, sockets: Pair) -> None:
    calls = ScriptedCalls([EAGAIN, CONGESTED_ABOVE - CONGESTED_BELOW, 20_000, None])
    connection, port, _ = connect(sockets[0], calls)
    queue(port, [b"x" * 10_000] * 26)
    connection.flush()
    assert not port.congested  # 260,052 bytes
    queue(port, [b"x" * 10_000])
    connection.flush()
    assert port.congested
    connection.on_events(WRITE)
    assert port.congested  # still above the lower mark
    connection.on_events(WRITE)
    assert not port.congested
    assert [line.split(" TCP")[0] for line in runtime.log[1:]] == ["online congested", "online"]


def test_flush_may_be_called_again_from_inside_changed(runtime: FakeRuntime, connect: Make, sockets: Pair) -> None:
    """The engine answers a cleared congestion with more packets on the same thread: no lock may be held."""
    calls = ScriptedCalls([EAGAIN, *[None] * 10])
    connection, port, _ = connect(sockets[0], calls)

    def more(port: Port) -> None:
        if not port.congested:
            queue(port, [b"more" * 10])
            connection.flush()

    runtime.on_changed = more
    queue(port, [b"x" * 10_000] * 30)
    connection.flush()
    connection.on_events(WRITE)
    assert HdlcDecoder(10_000).feed(bytes(calls.wire))[-1] == b"more" * 10


# -- stalls -------------------------------------------------------------------------------------------------------


def test_no_timer_exists_unless_something_waits(runtime: FakeRuntime, connect: Make, sockets: Pair) -> None:
    connection, port, ends = connect(sockets[0])
    queue(port, some_packets(5, 10))
    connection.flush()
    runtime.advance(3600)
    assert runtime.pending_calls == []
    assert not ends


def test_peer_that_takes_nothing_for_12_s_is_given_up(runtime: FakeRuntime, connect: Make, sockets: Pair) -> None:
    connection, port, ends = connect(sockets[0], ScriptedCalls([5, EAGAIN]))
    queue(port, [b"x" * 100] * 3)
    connection.flush()
    runtime.advance(STALL_TIME - 0.1)
    assert not ends
    runtime.advance(0.2)
    assert [end.cause for end in ends] == [Cause.STALLED]
    assert port.drops[Drop.TX_CONNECTION_LOST] == 1  # the chunk that was waiting
    assert runtime.callbacks == {}


def test_peer_that_is_given_up_is_told_at_once(runtime: FakeRuntime, connect: Make) -> None:
    """The end would stand behind what the system keeps for a peer that does not read."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock:
        far = server.accept()[0]
        connection, port, ends = connect(sock)
        while not connection.waiting:
            queue(port, [b"x" * 10_000] * 50)
            connection.flush()
        runtime.advance(STALL_TIME + 0.1)
        assert [end.cause for end in ends] == [Cause.STALLED]
        poll = select.poll()
        poll.register(far, select.POLLHUP)
        assert poll.poll(PATIENCE * 1000)
        with far, pytest.raises(ConnectionResetError):
            while far.recv(1 << 20):
                pass


def test_one_byte_is_a_sign_of_life(runtime: FakeRuntime, connect: Make, sockets: Pair) -> None:
    connection, port, ends = connect(sockets[0], ScriptedCalls([5, 1, EAGAIN, 1, 500]))
    queue(port, [b"x" * 100] * 3)
    connection.flush()
    runtime.advance(11)
    connection.on_events(WRITE)  # one byte
    runtime.advance(6)
    connection.on_events(WRITE)  # none
    runtime.advance(5.5)
    connection.on_events(WRITE)  # one byte, 11.5 s after the last
    runtime.advance(11)
    assert not ends
    connection.on_events(WRITE)  # the rest
    assert connection.waiting == 0
    runtime.advance(100)
    assert not ends
    assert runtime.pending_calls == []


def test_a_useless_write_event_is_no_sign_of_life(runtime: FakeRuntime, connect: Make, sockets: Pair) -> None:
    connection, port, ends = connect(sockets[0], ScriptedCalls([5, EAGAIN]))
    queue(port, [b"x" * 100])
    connection.flush()
    runtime.advance(STALL_TIME - 1)
    connection.on_events(WRITE)
    runtime.advance(1.1)
    assert [end.cause for end in ends] == [Cause.STALLED]


# -- ends ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.EPIPE, errno.ECONNRESET, errno.ETIMEDOUT])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_send_error_ends_the_connection_once_and_on_the_reactor(
    runtime: FakeRuntime, connect: Make, sockets: Pair, code: int, position: int
) -> None:
    steps: list[int | None] = [7, 9][:position]
    connection, port, ends = connect(sockets[0], ScriptedCalls([*steps, -code]))
    queue(port, [b"x" * 100] * 3)
    connection.flush()
    for _ in range(position):
        connection.on_events(WRITE)
    assert not ends  # a flush may come from any thread; the end does not
    queue(port, [b"later" * 10])
    connection.flush()  # nothing is sent any more
    runtime.make_due_calls()
    assert ends == [End(Cause.BROKEN, code)]
    assert errno.errorcode[code] in str(ends[0])
    assert runtime.callbacks == {}
    connection.on_events(READ | WRITE)
    connection.close()
    assert len(ends) == 1


def test_what_the_peer_wrote_before_its_end_is_delivered_first(
    runtime: FakeRuntime, connect: Make, sockets: Pair
) -> None:
    _, _, ends = connect(sockets[0])
    packets = some_packets(6, 5)
    sockets[1].sendall(HDLC.encode_many(packets))
    sockets[1].close()
    runtime.run_until(lambda: ends)
    assert runtime.received == packets
    assert len(runtime.batches) == 1
    assert [end.cause for end in ends] == [Cause.PEER]


def test_close_sends_what_the_socket_takes_and_says_nothing(runtime: FakeRuntime, connect: Make, sockets: Pair) -> None:
    connection, port, ends = connect(sockets[0])
    packets = some_packets(7, 5)
    queue(port, packets)
    connection.close()
    connection.close()
    assert read_packets(sockets[1], 5) == packets
    assert sockets[1].recv(10) == b""
    assert not ends
    assert runtime.callbacks == {}


def test_close_from_another_thread_during_flushes(runtime: FakeRuntime, connect: Make) -> None:
    for round_ in range(40):
        left, right = socket.socketpair()
        connection, port, ends = connect(left)
        begun = threading.Event()
        closed = threading.Event()

        def flusher(
            connection: StreamConnection = connection,
            port: Port = port,
            begun: threading.Event = begun,
            closed: threading.Event = closed,
        ) -> None:
            while not closed.is_set():
                with runtime.lock:
                    port.send_many([b"x" * 3000] * 3)
                connection.flush()
                begun.set()

        thread = threading.Thread(target=flusher)
        thread.start()
        assert begun.wait(PATIENCE)
        if round_ % 2:
            right.close()
        connection.close()
        closed.set()
        thread.join(PATIENCE)
        assert not thread.is_alive()
        runtime.make_due_calls()
        assert not ends  # `close` was first, or it came after an end nobody has been told yet
        right.close()


# -- receiving ----------------------------------------------------------------------------------------------------


def test_all_that_is_there_is_one_delivery(runtime: FakeRuntime, connect: Make, sockets: Pair) -> None:
    connect(sockets[0])
    packets = some_packets(8, 200)
    sockets[1].sendall(HDLC.encode_many(packets))
    runtime.run_until(lambda: len(runtime.received) == 200)
    assert runtime.received == packets
    assert len(runtime.batches) == 1


def test_an_event_reads_at_most_four_times(runtime: FakeRuntime, connect: Make, sockets: Pair) -> None:
    full = (HDLC.encode(b"x" * 16_000) * 17)[:262_144]
    calls = ScriptedCalls(receives=[full] * 4)
    connection, _, _ = connect(sockets[0], calls)
    connection.on_events(READ)
    assert calls.calls == ["recv"] * 4
    assert len(runtime.batches) == 1


def test_a_read_that_does_not_fill_the_buffer_is_the_last(runtime: FakeRuntime, connect: Make, sockets: Pair) -> None:
    calls = ScriptedCalls(receives=[HDLC.encode(b"x" * 40)])
    connection, _, _ = connect(sockets[0], calls)
    connection.on_events(READ)
    assert calls.calls == ["recv"]


def test_garbage_and_oversize_frames_are_counted_and_the_connection_stays(
    runtime: FakeRuntime, connect: Make, sockets: Pair
) -> None:
    _, port, ends = connect(sockets[0], hw_mtu=500)
    rng = random.Random(9)
    good = some_packets(10, 3, 20, 516)
    sockets[1].sendall(b"noise without a flag" * 10)
    sockets[1].sendall(b"~" * 10_000)
    sockets[1].sendall(HDLC.encode(b"x" * 19) + HDLC.encode(b"y" * 517))
    sockets[1].sendall(b"~" + b"z" * 5000)
    sockets[1].sendall(HDLC.encode_many(good))
    runtime.run_until(lambda: len(runtime.received) >= 3)
    assert runtime.received == good
    assert port.drops[Drop.FRAME_SHORT] == 1
    assert port.drops[Drop.FRAME_LONG] + port.drops[Drop.FRAME_UNFINISHED] == 2
    for _ in range(50):
        sockets[1].sendall(rng.randbytes(20_000).replace(b"~", b"."))
        runtime.handle_ready(0)
    assert not ends
    sockets[1].sendall(b"~" + HDLC.encode(good[0]))
    runtime.run_until(lambda: runtime.received[-1] == good[0] and len(runtime.received) > 3)


def test_kiss_framing(runtime: FakeRuntime, connect: Make, sockets: Pair) -> None:
    connection, port, _ = connect(sockets[0], framing=KISS)
    queue(port, [bytes(range(256)), b"\xc0\xdb" * 20])
    connection.flush()
    sockets[1].settimeout(PATIENCE)
    wire = sockets[1].recv(10_000)
    assert wire == KISS.encode(bytes(range(256))) + KISS.encode(b"\xc0\xdb" * 20)
    sockets[1].sendall(wire)
    runtime.run_until(lambda: len(runtime.received) == 2)
    assert runtime.received == [bytes(range(256)), b"\xc0\xdb" * 20]


def test_megabytes_both_ways_over_a_real_pair(runtime: FakeRuntime) -> None:
    left, right = socket.socketpair()
    ends: Ends = []
    sides: list[tuple[StreamConnection, Port]] = []
    for sock in (left, right):
        port = Port(f"side {len(sides)}")
        port.online = True
        runtime.attach(port, None)
        connection = StreamConnection(runtime, port, sock, HDLC, receive_buffer(), lambda _, end: ends.append(end))
        connection.watch()
        sides.append((connection, port))
    packets = [os.urandom(8000) for _ in range(400)]
    for connection, port in sides:
        queue(port, packets)
        connection.flush()
    runtime.run_until(lambda: len(runtime.received) == 800)
    for _, port in sides:
        assert [packet for at, batch in runtime.batches if at is port for packet in batch] == packets
        assert not port.drops
    for connection, _ in sides:
        connection.close()
    assert not ends


@pytest.mark.parametrize(("batch", "calls"), [(1, 100), (8, 13), (64, 2), (None, 1)])
def test_a_batch_bounds_the_packets_of_a_call(batch: int | None, calls: int, runtime: FakeRuntime) -> None:
    left, right = socket.socketpair()
    port = Port("TCPInterface[x/y:1]")
    port.online = True
    runtime.attach(port, None)
    connection = StreamConnection(
        runtime, port, left, HDLC, receive_buffer(), lambda connection, end: None, batch=batch
    )
    port.send_many([bytes([i]) * 40 for i in range(100)])
    connection.flush()
    assert connection.status()["tx_calls"] == calls
    packets = HdlcDecoder(600).feed(memoryview(right.recv(100_000)))
    assert packets == [bytes([i]) * 40 for i in range(100)]
    connection.close()
    right.close()


def test_a_connection_whose_packets_take_long_reads_less_at_a_time(
    runtime: FakeRuntime, connect: Make, sockets: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others on the thread wait meanwhile. When they take less again, so does it."""
    connection, _, _ = connect(sockets[0])
    cost, handled = [0.0], [0]

    def deliver(port: Port, packets: list[bytes]) -> None:
        handled[0] = len(packets)
        runtime.advance(cost[0] * len(packets))

    monkeypatch.setattr(runtime, "deliver", deliver)
    block = b"".join(map(HDLC.encode, [b"p" * 62] * 1500))  # 96,000 bytes

    def next_read() -> int:
        connection.on_events(READ)
        return handled[0]

    sockets[1].sendall(block)
    assert next_read() == 1500
    cost[0] = 100e-6  # 0.15 s for all of them
    sockets[1].sendall(block)
    assert next_read() == 1500
    sockets[1].sendall(block)
    assert next_read() == SMALL_READ // 64, "25 ms"
    assert next_read() == SMALL_READ // 64, "the least there is"
    cost[0] = 0.0
    found = []
    left = 1500 - 2 * SMALL_READ // 64
    while sum(found) < left:
        found.append(next_read())
    assert found[:2] == [SMALL_READ // 64, 2 * SMALL_READ // 64]
    counts = []
    for _ in range(4):
        sockets[1].sendall(block)
        counts.append(next_read())
    assert counts[-1] == 1500, f"all that is there, again: {counts}"
