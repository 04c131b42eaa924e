"""Streams in threads: blocking writes and reads, and every way a stream can end.  Protocol 05, R13, sections 8, 9."""

from __future__ import annotations

import hashlib
import io
import queue
import random
import shutil
import threading
from typing import Any

import pytest

from rnsfast import Link, LinkClosed, StreamBroken, StreamWriter
from rnsfast.engine.channel import BACKLOG
from tests.loopback import (
    Note,
    Pair,
    Sleepers,
    Worker,
    anything,
    is_message,
    is_proof,
    joined,
    number,
    number_of,
    settle,
)


def noise(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def blocked_writer(pair: Pair, sleepers: Sleepers, size: int = 400_000) -> tuple[Link, Link, StreamWriter, Worker]:
    """A writer whose buffer is full, in a `write` that waits, all proofs held."""
    link, peer = pair.link()
    peer.channel.register(Note)
    writer = link.open_writer(1, compression="never", buffer=50_000)
    pair.to_a.hold(is_proof)
    worker = Worker(writer.write, noise(size))
    sleepers.await_one()
    return link, peer, writer, worker


# ------------------------------------------------------------------ R13


def test_blocked_write_goes_on_with_deliveries_and_tries_nothing_in_vain(pair: Pair, sleepers: Sleepers) -> None:
    _, peer, writer, worker = blocked_writer(pair, sleepers)
    attempts = []
    put = writer._put
    writer._put = lambda view, room: attempts.append(room) or put(view, room)  # type: ignore[func-returns-value]
    before = sleepers.waits
    reader = peer.open_reader(1)
    pair.to_a.flow()
    assert worker.result() == 400_000
    assert all(room > 0 for room in attempts)  # it tries when it knows that it can
    assert sleepers.waits - before <= 400_000 // writer._stream.low  # woken at the low mark, not for every message
    closing = Worker(writer.close)
    assert reader.readall() == noise(400_000)
    closing.result()


def test_blocked_write_and_flush_raise_when_the_link_closes(pair: Pair, sleepers: Sleepers) -> None:
    link, peer, writer, worker = blocked_writer(pair, sleepers)
    other = link.open_writer(2, compression="never")
    other.write(b"x" * 100)
    flushing = Worker(other.flush)
    sleepers.await_one()
    peer.close()
    for waiting in (worker, flushing):
        with pytest.raises(LinkClosed, match="the peer closed it"):
            waiting.result()
    with pytest.raises(LinkClosed):
        writer.close()
    assert writer.closed
    writer.close()  # idempotent


def test_write_that_makes_no_progress_for_its_timeout_says_so(pair: Pair, sleepers: Sleepers) -> None:
    _, peer, writer, worker = blocked_writer(pair, sleepers)
    peer.close()
    with pytest.raises(LinkClosed):
        worker.result()
    assert writer.written < 400_000
    pair.to_a.flow()
    link, _ = pair.link()
    writer = link.open_writer(1, compression="never", buffer=1000)
    writer.timeout = 0.01
    with pytest.raises(TimeoutError, match=r"made no progress for 0\.01 s"):
        writer.write(noise(50_000))  # the peer has no channel, so nothing is proved
    with pytest.raises(TimeoutError, match=r"not proved within 0\.01 s"):
        writer.close()
    assert writer.closed


# ------------------------------------------------------------------ a writer that dies


def test_aborted_stream_has_no_end_and_wakes_who_waits_in_it(pair: Pair, sleepers: Sleepers) -> None:
    link, peer, writer, worker = blocked_writer(pair, sleepers)
    reader = peer.open_reader(1)
    flushing = Worker(link.channel.flush)
    sleepers.await_one()
    writer.abort()
    writer.abort()
    with pytest.raises(ValueError, match="closed for writing"):
        worker.result()
    with pytest.raises(ValueError, match="closed for writing"):
        writer.write(b"more")
    pair.to_a.flow()
    assert flushing.result() is True  # the rest was given up: nothing waits any more
    sent = writer.sent
    assert 0 < sent < 400_000
    link.channel.send(Note(b"after"))
    assert peer.channel.receive(5.0).raw == b"after"
    got = reader.read_available()
    assert got is not None
    assert noise(400_000).startswith(got)
    assert reader.read_available() is None  # no end of file
    link.close()
    with pytest.raises(StreamBroken, match="cut off before its end"):
        reader.read(1)


def test_exception_in_the_block_gives_the_stream_up(pair: Pair) -> None:
    link, peer = pair.link()
    reader = peer.open_reader(1)

    def dies() -> None:
        with link.open_writer(1) as writer:
            writer.write(b"half a senten")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        dies()
    assert reader.read(100) == b"half a senten"
    waiting = Worker(reader.readall)
    link.close()
    with pytest.raises(StreamBroken):
        waiting.result()


def test_abort_while_the_end_is_waiting_takes_the_end_back(pair: Pair) -> None:
    link, peer = pair.link()
    reader = peer.open_reader(1)
    peer.channel.register(Note)
    pair.to_b.hold(is_message)
    link.channel.send(number(0))
    link.channel.send(number(1))
    writer = link.open_writer(1)
    writer.write(b"never sent")
    writer.finish()
    assert not writer._stream.eof_sent
    writer.abort()
    pair.to_b.flow()
    link.channel.flush(5.0)
    link.channel.send(number(2))
    link.channel.flush(5.0)
    assert reader.read_available() is None


def test_dropped_writer_and_reader_send_nothing(pair: Pair) -> None:
    link, peer = pair.link()
    reader = peer.open_reader(1)
    link.open_writer(1).write(b"x")
    link.open_reader(7)
    link.channel.flush(5.0)
    assert reader.read_available() == b"x"
    assert reader.read_available() is None


# ------------------------------------------------------------------ a peer that vanishes


@pytest.mark.parametrize("vanish", ["interface", "node"])
def test_peer_that_vanishes_in_the_middle_breaks_both_directions_at_once(
    pair: Pair, sleepers: Sleepers, vanish: str
) -> None:
    link, peer, _, worker = blocked_writer(pair, sleepers)
    back = peer.open_writer(2, compression="never")
    back.write(b"the beginning")
    reader = link.open_reader(2)
    assert reader.read(100) == b"the beginning"
    waiting = Worker(reader.read, 100)
    sleepers.await_one()
    if vanish == "interface":
        pair.end_b.close()
    else:
        pair.to_a.drop = anything  # no LINKCLOSE arrives
        pair.b.stop()
    with pytest.raises(StreamBroken):
        waiting.result()
    with pytest.raises(LinkClosed, match="interface"):
        worker.result()
    with pytest.raises(LinkClosed):
        back.write(b"more")


def test_what_arrived_before_the_cut_can_be_read_also_after_readall(pair: Pair, sleepers: Sleepers) -> None:
    link, peer = pair.link()
    writer = link.open_writer(1, compression="never")
    reader = peer.open_reader(1)
    writer.write(noise(100_000))
    whole = Worker(reader.readall)
    link.channel.flush(5.0)
    link.close()
    with pytest.raises(StreamBroken):
        whole.result()
    got = bytearray()
    with pytest.raises(StreamBroken):
        while True:
            got += reader.read(30_000)
    assert bytes(got) == noise(100_000)
    reader.close()
    with pytest.raises(ValueError, match="closed for reading"):
        reader.read(1)


def test_read_that_times_out_loses_nothing(pair: Pair) -> None:
    link, peer = pair.link()
    reader = peer.open_reader(1)
    reader.timeout = 0.01
    writer = link.open_writer(1)
    with pytest.raises(TimeoutError, match=r"nothing arrived on stream 1 for 0\.01 s"):
        reader.read(5)
    writer.write(b"abc")
    link.channel.flush(5.0)
    with pytest.raises(TimeoutError):
        reader.readall()
    writer.write(b"def")
    writer.close()
    assert reader.readall() == b"abcdef"
    assert peer.channel._engine.backlog == 0


# ------------------------------------------------------------------ readers


def test_slow_reader_gets_everything_and_the_writer_is_not_kept(pair: Pair) -> None:
    link, peer = pair.link()
    reader = peer.open_reader(1)
    with link.open_writer(1, compression="never") as writer:
        writer.write(noise(3_000_000))  # returns when it is proved, read or not
    assert reader.available == 3_000_000
    digest = hashlib.sha256()
    while piece := reader.read(777):
        digest.update(piece)
    assert digest.digest() == hashlib.sha256(noise(3_000_000)).digest()
    assert peer.channel._engine.backlog == 0
    assert BACKLOG > 3_000_000


def test_reader_that_stands_still_stops_the_sender_at_the_backlog(pair: Pair) -> None:
    link, peer = pair.link()
    reader = peer.open_reader(1)
    peer.channel._engine.backlog_limit = 100_000
    writer = link.open_writer(1, compression="never", buffer=10_000_000)
    writer.write(noise(2_000_000))
    writer.finish()
    pair.to_a.wait_carried(8)
    settle(pair.b)
    settle(pair.a)
    assert reader.available < 1_200_000  # the limit and one batch
    assert not writer.wait_delivered(0)
    assert peer.channel._engine.backlog == reader.available
    link.close()


def test_two_threads_on_one_reader_see_no_end_that_is_none(pair: Pair, sleepers: Sleepers) -> None:
    link, peer = pair.link()
    reader = peer.open_reader(1)
    first, second = Worker(reader.read, 100), Worker(reader.read, 100)
    sleepers.await_one(2)
    writer = link.open_writer(1)
    writer.write(b"one")
    link.channel.flush(5.0)
    writer.write(b"two")
    writer.close()
    assert {first.result(), second.result()} in ({b"one", b"two"}, {b"onetwo", b""})


def test_streams_are_file_objects(pair: Pair) -> None:
    link, peer = pair.link()
    copied = Worker(lambda: peer.open_reader(1).readall())
    with link.open_writer(1, compression="always") as writer:
        shutil.copyfileobj(io.BytesIO(b"text " * 20_000), writer)
    assert copied.result() == b"text " * 20_000
    with io.TextIOWrapper(io.BufferedWriter(link.open_writer(2)), encoding="utf-8") as text:
        text.write("zeile 1\nzeile 2\n")
    lines = io.TextIOWrapper(io.BufferedReader(peer.open_reader(2)), encoding="utf-8").readlines()
    assert lines == ["zeile 1\n", "zeile 2\n"]


def test_closing_a_reader_wakes_who_reads(pair: Pair, sleepers: Sleepers) -> None:
    _, peer = pair.link()
    reader = peer.open_reader(1)
    waiting = Worker(reader.read, 1)
    sleepers.await_one()
    reader.close()
    with pytest.raises(StreamBroken, match="closed for reading"):
        waiting.result()


def test_buffer_without_room_is_refused(pair: Pair) -> None:
    link, _ = pair.link()
    with pytest.raises(ValueError, match="at least one byte"):
        link.open_writer(1, buffer=0)


# ------------------------------------------------------------------ everything at once


@pytest.mark.slow
def test_ten_streams_and_messages_share_a_channel_both_ways() -> None:
    with joined(mtu_discovery=False) as pair:
        link, peer = pair.link()
        for end in (link, peer):
            end.channel.register(Note)
        results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        start = threading.Barrier(22)

        def write(end: Link, stream_id: int) -> None:
            chance = random.Random(stream_id)
            data = noise(150_000, stream_id)
            start.wait(10.0)
            with end.open_writer(stream_id, compression="never", buffer=20_000) as writer:
                at = 0
                while at < len(data):
                    size = chance.choice((1, 10, 423, 5000))
                    writer.write(data[at : at + size])
                    at += size

        def talk(end: Link) -> None:
            start.wait(10.0)
            for i in range(500):
                end.channel.send(number(i), 10.0)

        writers = [Worker(write, end, stream_id) for end in (link, peer) for stream_id in range(10)]
        writers += [Worker(talk, end) for end in (link, peer)]
        readers = [Worker(end.open_reader(stream_id).readall) for end in (peer, link) for stream_id in range(10)]
        for end in (peer, link):
            assert [number_of(end.channel.receive(10.0)) for _ in range(500)] == list(range(500))
        for i, reader in enumerate(readers):
            assert reader.result() == noise(150_000, i % 10)
        for worker in writers:
            worker.result()
        assert results.empty()
