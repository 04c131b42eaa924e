"""A packet descriptor and its port, over a back end that follows a script: what is sent when, and what is counted."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rnsfast.engine.port import Port
from rnsfast.interfaces.packets import (
    CONGESTED_ABOVE,
    CONGESTED_BELOW,
    QUEUE_LIMIT,
    READS,
    RETRY,
    PacketConnection,
)
from rnsfast.osio.contract import IOBroken, IOClosed, TxState
from rnsfast.osio.peers import make_peer
from rnsfast.osio.poller import READ, WRITE
from rnsfast.wire.drop import Drop
from tests.fakes import PATIENCE, FakeRuntime
from tests.interfaces.packet_fakes import Fill, Outcome, ScriptedIO, blocked

PEER = make_peer("192.0.2.1", 4242)


class Bench:
    """One connection with everything around it."""

    def __init__(self, io: ScriptedIO, **options: Any) -> None:
        self.io = io
        self.fd = io.fileno()
        self.runtime = FakeRuntime()
        self.port = Port("UDPInterface[x/127.0.0.1:1]", hw_mtu=1064, upgradable=False)
        self.port.online = True
        self.broken: list[int] = []
        self.connection = PacketConnection(self.runtime, self.port, io, PEER, self.broken.append, **options)
        self.runtime.attach(self.port, self)
        self.runtime.log.clear()
        self.connection.watch()

    def queue(self, *packets: bytes) -> None:
        with self.runtime.lock:
            assert self.port.send_many(list(packets))

    def send(self, *packets: bytes) -> None:
        self.queue(*packets)
        self.connection.flush()

    def count(self, drop: Drop) -> int:
        return self.port.drops[drop]

    @property
    def sent(self) -> tuple[int, int]:
        return self.port.tx_packets, self.port.tx_bytes

    @property
    def watched(self) -> int:
        return self.runtime.events.get(self.fd, 0)

    def close(self) -> None:
        self.connection.close()
        assert self.runtime.pending_calls == []
        self.runtime.close()
        self.io.close()


Open = Callable[..., Bench]


@pytest.fixture
def open_bench() -> Iterator[Open]:
    made: list[Bench] = []

    def make(*outcomes: Outcome, receives: Any = (), pollable: bool = True, capacity: int = 4, **options: Any) -> Bench:
        io = ScriptedIO(*outcomes, receives=receives, pollable=pollable, capacity=capacity)
        made.append(Bench(io, **options))
        return made[-1]

    yield make
    for bench in made:
        bench.close()


def packets(count: int, size: int = 100) -> list[bytes]:
    return [number.to_bytes(4, "big") * (size // 4) for number in range(count)]


# -- sending ------------------------------------------------------------------------------------------------------


def test_one_flush_is_one_send_of_everything_that_was_queued(open_bench: Open) -> None:
    bench = open_bench()
    three = packets(3)
    bench.send(*three)
    assert bench.io.calls == [("send", three)]
    assert bench.io.peers == [PEER]
    assert bench.sent == (3, 300)
    assert bench.runtime.rewatches == 0
    assert bench.watched == READ


def test_a_single_packet_goes_by_the_plain_call(open_bench: Open) -> None:
    bench = open_bench()
    bench.send(b"one")
    assert bench.io.calls == [("send_one", [b"one"])]
    assert bench.io.peers == [PEER]


def test_a_flush_with_nothing_queued_makes_no_call(open_bench: Open) -> None:
    bench = open_bench()
    bench.connection.flush()
    assert bench.io.calls == []


def test_what_is_blocked_waits_in_order_and_only_then_write_is_watched(open_bench: Open) -> None:
    bench = open_bench(blocked(2), blocked(1))
    six = packets(6)
    bench.send(*six[:5])
    assert bench.io.wire == six[:2]
    assert bench.watched == READ | WRITE
    bench.send(six[5])  # goes behind them, without a call
    assert len(bench.io.calls) == 1
    bench.runtime.handle_ready()
    assert bench.io.wire == six[:3]
    assert bench.watched == READ | WRITE
    bench.runtime.handle_ready()
    assert bench.io.wire == six
    assert bench.watched == READ
    assert bench.sent == (6, 600)
    assert bench.connection.status()["waiting_bytes"] == 0
    bench.runtime.handle_ready()
    assert len(bench.io.calls) == 3


def test_blocked_before_it_is_watched_is_sent_once_it_is() -> None:
    """What coming online causes is queued before the descriptor is watched."""
    io, runtime, port = ScriptedIO(blocked()), FakeRuntime(), Port("x")
    port.online = True
    connection = PacketConnection(runtime, port, io, PEER, lambda error: None)
    port.send(b"early")
    connection.flush()
    connection.watch()
    runtime.handle_ready()
    assert io.wire == [b"early"]
    connection.close()
    runtime.close()


def test_a_connection_that_is_closed_before_it_is_watched_is_never_watched() -> None:
    io, runtime, port = ScriptedIO(), FakeRuntime(), Port("x")
    connection = PacketConnection(runtime, port, io, PEER, lambda error: None)
    connection.close()
    connection.watch()
    assert runtime.callbacks == {}
    runtime.close()


def test_beyond_1_MiB_packets_are_dropped_and_counted_and_not_counted_as_sent(open_bench: Open) -> None:
    bench = open_bench(blocked(), blocked())
    size = 1000
    fit = QUEUE_LIMIT // size
    bench.send(*packets(fit + 7, size))
    assert bench.count(Drop.TX_QUEUE_FULL) == 7
    assert bench.sent == (fit, fit * size)
    assert bench.connection.status()["waiting_bytes"] == fit * size
    bench.send(*packets(3, size))
    assert bench.count(Drop.TX_QUEUE_FULL) == 10
    bench.runtime.handle_ready()  # blocked again: nothing of it is lost
    assert bench.connection.status()["waiting_bytes"] == fit * size
    bench.runtime.handle_ready()
    assert bench.io.wire == packets(fit + 7, size)[:fit]
    assert bench.sent == (fit, fit * size)


def test_congested_is_set_once_and_cleared_once(open_bench: Open) -> None:
    size = 1000
    above, below = CONGESTED_ABOVE // size + 1, CONGESTED_BELOW // size
    bench = open_bench(blocked(), blocked(1), blocked(above - below), blocked(1))
    bench.send(*packets(above - 1, size))
    assert not bench.port.congested
    bench.send(*packets(1, size))
    assert bench.port.congested
    bench.send(*packets(1, size))
    bench.runtime.handle_ready()
    assert bench.port.congested
    assert bench.runtime.log == [f"online congested {bench.port}"]
    bench.runtime.handle_ready()
    assert not bench.port.congested
    bench.runtime.handle_ready()
    bench.runtime.handle_ready()
    assert bench.runtime.log == [f"online congested {bench.port}", f"online {bench.port}"]


@pytest.mark.parametrize(
    ("error", "drop"),
    [
        (errno.EMSGSIZE, Drop.TX_TOO_LARGE),
        (errno.EHOSTUNREACH, Drop.TX_UNREACHABLE),
        (errno.ENETUNREACH, Drop.TX_UNREACHABLE),
        (errno.ECONNREFUSED, Drop.TX_UNREACHABLE),
        (errno.ENOBUFS, Drop.TX_NO_BUFFERS),
        (errno.ENOMEM, Drop.TX_NO_BUFFERS),
        (errno.ENETDOWN, Drop.TX_DEVICE_DOWN),
        (errno.EIO, Drop.TX_DEVICE_DOWN),
        (errno.EPERM, Drop.TX_REFUSED),
        (errno.EACCES, Drop.TX_REFUSED),
        (12345, Drop.TX_REFUSED),
    ],
)
def test_refused_packets_are_counted_by_cause_and_not_as_sent(open_bench: Open, error: int, drop: Drop) -> None:
    bench = open_bench(Outcome(rejected=((1, error), (2, error))), Outcome(rejected=((0, error),)))
    sizes = [100, 70, 30, 200]
    bench.send(*(b"x" * size for size in sizes))
    assert bench.port.drops == {drop: 2}
    assert bench.sent == (2, 300)
    bench.send(b"y" * 50)
    assert bench.port.drops == {drop: 3}
    assert bench.sent == (2, 300)
    assert bench.connection.status()["waiting_bytes"] == 0


def test_refused_and_blocked_in_one_send(open_bench: Open) -> None:
    bench = open_bench(Outcome(TxState.BLOCKED, 3, ((1, errno.EMSGSIZE),)))
    five = packets(5)
    bench.send(*five)
    bench.runtime.handle_ready()
    assert bench.io.wire == [five[0], five[2], five[3], five[4]]
    assert bench.port.drops == {Drop.TX_TOO_LARGE: 1}
    assert bench.sent == (4, 400)


def test_what_may_have_left_is_never_offered_again(open_bench: Open) -> None:
    bench = open_bench(Outcome(TxState.UNKNOWN, 1))
    four = packets(4)
    bench.send(*four)
    assert bench.count(Drop.TX_UNKNOWN) == 3
    assert bench.watched == READ
    bench.send(b"next")
    bench.runtime.handle_ready()
    assert [items for _, items in bench.io.calls] == [four, [b"next"]]
    assert bench.broken == []


def test_unknown_while_something_waits_is_never_offered_again(open_bench: Open) -> None:
    bench = open_bench(blocked(), Outcome(TxState.UNKNOWN, 1))
    four = packets(4)
    bench.send(*four)
    bench.runtime.handle_ready()
    assert bench.io.wire == four[:1]
    assert bench.count(Drop.TX_UNKNOWN) == 3
    assert bench.watched == READ


# -- the end ------------------------------------------------------------------------------------------------------


def test_a_descriptor_that_breaks_while_sending_ends_once_and_on_the_reactor(open_bench: Open) -> None:
    bench = open_bench(Outcome(TxState.BROKEN, 1, errno=errno.ENODEV))
    bench.send(*packets(3))
    assert bench.broken == []
    assert bench.watched == 0
    bench.send(b"later")  # offered no more
    assert len(bench.io.calls) == 1
    bench.runtime.run_until(lambda: bench.broken)
    bench.runtime.handle_ready()
    assert bench.broken == [errno.ENODEV]
    assert bench.io.closes == 1
    assert bench.port.drops == {Drop.TX_CONNECTION_LOST: 3}
    assert bench.sent == (1, 100)


def test_a_descriptor_that_breaks_while_receiving_ends_once(open_bench: Open) -> None:
    bench = open_bench()
    bench.io.bring(Fill((b"last",)), IOBroken(errno.ENXIO, "x"), IOBroken(errno.ENXIO, "x"))
    bench.runtime.run_until(lambda: bench.runtime.received)
    bench.io.ring()
    bench.runtime.run_until(lambda: bench.broken)
    assert bench.broken == [errno.ENXIO]
    assert bench.runtime.received == [b"last"]
    assert bench.io.closes == 1


def test_broken_in_both_directions_ends_once(open_bench: Open) -> None:
    bench = open_bench(Outcome(TxState.BROKEN, 0, errno=errno.EBADF), receives=[IOBroken(errno.EBADF, "x")])
    bench.io.ring()
    bench.send(b"x")
    bench.runtime.run_until(lambda: bench.broken)
    bench.runtime.handle_ready()
    assert bench.broken == [errno.EBADF]


def test_a_close_before_the_reactor_learns_of_the_break_wins(open_bench: Open) -> None:
    bench = open_bench(Outcome(TxState.BROKEN, 0, errno=errno.EBADF))
    bench.send(b"x")
    bench.connection.close()
    bench.runtime.handle_ready()
    assert bench.broken == []
    assert bench.io.closes == 1


def test_close_sends_what_is_queued_and_counts_what_is_left(open_bench: Open) -> None:
    bench = open_bench(blocked(2))
    bench.queue(*packets(5))
    bench.connection.close()
    assert bench.io.wire == packets(2)
    assert bench.port.drops == {Drop.TX_CONNECTION_LOST: 3}
    assert bench.sent == (2, 200)
    bench.send(b"after")
    assert bench.count(Drop.TX_CONNECTION_LOST) == 4
    assert bench.sent == (2, 200)


def test_close_ends_congestion(open_bench: Open) -> None:
    bench = open_bench(blocked())
    bench.send(*packets(300, 1000))
    assert bench.port.congested
    bench.connection.close()
    assert not bench.port.congested


def test_many_threads_close_at_once(open_bench: Open) -> None:
    bench = open_bench(blocked(1))
    bench.send(*packets(3))
    start = threading.Barrier(8)

    def close() -> None:
        start.wait(PATIENCE)
        bench.connection.close()

    threads = [threading.Thread(target=close) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert bench.io.closes == 1
    assert bench.count(Drop.TX_CONNECTION_LOST) == 2
    assert bench.runtime.callbacks == {}


# -- receiving ----------------------------------------------------------------------------------------------------


def full(number: int, size: int = 4) -> Fill:
    return Fill(tuple(f"{number}.{place}".encode() for place in range(size)))


def test_every_batch_is_handed_up_once_and_a_short_one_ends_the_event(open_bench: Open) -> None:
    bench = open_bench()
    bench.io.bring(full(0), full(1, 2), full(2))
    bench.runtime.run_until(lambda: bench.runtime.batches)
    assert [batch for _, batch in bench.runtime.batches] == [list(full(0).packets), list(full(1, 2).packets)]
    assert bench.io.recv_calls == 2


def test_a_readable_descriptor_with_nothing_to_read_delivers_nothing(open_bench: Open) -> None:
    bench = open_bench()
    bench.io.bring(Fill())
    bench.runtime.handle_ready()
    assert bench.io.recv_calls == 1
    assert bench.runtime.batches == []


def test_at_most_four_batches_an_event_and_the_rest_comes_without_another_one(open_bench: Open) -> None:
    """A buffer that the system filled with many datagrams is emptied although the descriptor is not readable."""
    bench = open_bench()
    fills = [full(number) for number in range(2 * READS + 2)]
    bench.io.bring(*fills)
    bench.runtime.handle_ready()
    assert bench.io.recv_calls == READS
    bench.runtime.handle_ready()
    assert bench.io.recv_calls == 2 * READS
    bench.runtime.run_until(lambda: len(bench.runtime.batches) == len(fills))
    bench.runtime.handle_ready()
    assert bench.runtime.received == [packet for fill in fills for packet in fill.packets]
    assert bench.io.recv_calls == len(fills) + 1
    assert bench.runtime.pending_calls == []


def test_the_limit_holds_while_the_descriptor_stays_readable(open_bench: Open) -> None:
    bench = open_bench()
    bench.io.bring(*(full(number) for number in range(3 * READS)))
    bench.runtime.handle_ready()
    for turn in (2, 3):
        bench.io.ring()
        bench.runtime.handle_ready()
        assert bench.io.recv_calls == turn * READS


def test_close_forgets_the_rest(open_bench: Open) -> None:
    bench = open_bench()
    bench.io.bring(*(full(number) for number in range(2 * READS)))
    bench.runtime.handle_ready()
    bench.connection.close()
    assert bench.runtime.pending_calls == []
    assert len(bench.runtime.batches) == READS


def test_what_was_refused_on_receiving_is_counted(open_bench: Open) -> None:
    bench = open_bench()
    bench.io.bring(Fill((b"a", b"b"), dropped=3))
    bench.runtime.handle_ready()
    bench.io.bring(Fill(dropped=2))
    bench.runtime.handle_ready()
    assert bench.count(Drop.RX_REFUSED) == 5
    assert bench.runtime.batches == [(bench.port, [b"a", b"b"])]


def test_an_end_of_the_back_end_ends_reading_quietly(open_bench: Open) -> None:
    bench = open_bench()
    bench.io.bring(IOClosed())
    bench.runtime.handle_ready()
    assert bench.broken == []


# -- what is between packets and medium ---------------------------------------------------------------------------


def test_wrap_and_unwrap_take_whole_batches(open_bench: Open) -> None:
    wrapped: list[list[bytes]] = []
    unwrapped: list[list[bytes]] = []

    def wrap(items: list[bytes]) -> list[bytes]:
        wrapped.append(items)
        return [b"head" + item for item in items]

    def unwrap(items: list[bytes]) -> list[bytes]:
        unwrapped.append(items)
        return [item[4:] for item in items if item.startswith(b"head")]

    bench = open_bench(Outcome(rejected=((1, errno.EMSGSIZE),)), wrap=wrap, unwrap=unwrap, overhead=4)
    three = packets(3)
    bench.send(*three)
    assert wrapped == [three]
    assert bench.io.wire == [b"head" + three[0], b"head" + three[2]]
    assert bench.sent == (2, 200)  # without the overhead
    bench.io.bring(Fill((b"headone", b"other", b"headtwo")))
    bench.runtime.handle_ready()
    assert unwrapped == [[b"headone", b"other", b"headtwo"]]
    assert bench.runtime.batches == [(bench.port, [b"one", b"two"])]
    bench.io.bring(Fill((b"other",)))
    bench.runtime.handle_ready()
    assert len(bench.runtime.batches) == 1


# -- one that cannot be polled ------------------------------------------------------------------------------------


def test_a_thread_reads_what_cannot_be_polled_and_ends_with_it(open_bench: Open) -> None:
    bench = open_bench(pollable=False)
    arrived = threading.Event()
    bench.runtime.on_deliver = lambda port, batch: arrived.set()
    bench.io.bring(Fill(dropped=1), full(0), full(1, 2))
    assert arrived.wait(PATIENCE)
    bench.connection.close()
    assert next(batch for _, batch in bench.runtime.batches) == list(full(0).packets)
    assert bench.count(Drop.RX_REFUSED) == 1
    (thread,) = bench.io.recv_threads
    assert thread is not threading.current_thread()
    assert not thread.is_alive()
    assert bench.runtime.callbacks == {}
    assert bench.broken == []


def test_the_reading_thread_may_close(open_bench: Open) -> None:
    bench = open_bench(pollable=False)
    closed = threading.Event()

    def close(port: Port, batch: list[bytes]) -> None:
        bench.connection.close()
        closed.set()

    bench.runtime.on_deliver = close
    bench.io.bring(full(0))
    assert closed.wait(PATIENCE)
    (thread,) = bench.io.recv_threads
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_a_break_on_the_reading_thread_is_told_on_the_reactor(open_bench: Open) -> None:
    bench = open_bench(pollable=False)
    tellers: list[threading.Thread] = []
    bench.connection._on_broken = lambda error: tellers.append(threading.current_thread())
    bench.io.bring(IOBroken(errno.ENXIO, "x"))
    bench.runtime.run_until(lambda: tellers)
    assert tellers == [threading.current_thread()]
    assert bench.io.closes == 1


def test_a_full_ring_that_cannot_be_watched_is_tried_again_by_the_clock(open_bench: Open) -> None:
    bench = open_bench(blocked(1), blocked(), pollable=False)
    four = packets(4)
    bench.send(*four[:3])
    bench.send(four[3])
    assert len(bench.runtime.pending_calls) == 1
    bench.runtime.advance(RETRY / 2)
    assert bench.io.wire == four[:1]
    bench.runtime.advance(RETRY)
    assert bench.io.wire == four[:1]
    assert len(bench.runtime.pending_calls) == 1
    bench.runtime.advance(RETRY)
    assert bench.io.wire == four
    assert bench.runtime.pending_calls == []


def test_close_cancels_the_retry(open_bench: Open) -> None:
    bench = open_bench(blocked(), pollable=False)
    bench.send(*packets(2))
    bench.connection.close()
    assert bench.runtime.pending_calls == []


def test_status_names_the_back_end_and_its_counters(open_bench: Open) -> None:
    bench = open_bench(blocked())
    bench.send(b"x" * 10)
    status = bench.connection.status()
    assert (status["backend"], status["batch"], status["waiting_bytes"]) == ("scripted", 64, 10)
    assert set(status) == {
        *("backend", "batch", "waiting_bytes", "rx_calls", "rx_refused"),
        *("tx_calls", "tx_short", "tx_blocked", "tx_rejected"),
    }
