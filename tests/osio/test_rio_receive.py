"""Registered I/O, receiving, waiting, closing, and whether it is there at all.  Protocol 09, 10.1, A1, A2, D4."""

from __future__ import annotations

import errno
import logging
import socket
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from rnsfast.osio import backend
from rnsfast.osio.contract import IOBroken, IOClosed, Kind, RxBatch
from rnsfast.osio.peers import make_peer
from rnsfast.osio.rio import RioDatagramIO, open_rio, open_socket, why_not
from rnsfast.osio.verdicts import forget_what_was_logged
from tests.osio.fake_rio import ABORTED, COMMIT_ONLY, DEFER, EALREADY, EINVAL, ENOBUFS, FakeRio
from tests.osio.rio_makers import ALICE, BOB, name28, opened, packets

CONNRESET = 10054
JOIN = 5.0  # seconds a thread of a test may take


@pytest.fixture
def rio() -> FakeRio:
    forget_what_was_logged()
    return FakeRio()


def arrive(rio: FakeRio, count: int, *, size: int = 40) -> list[bytes]:
    items = packets(count, size)
    for item in items:
        rio.arrive(item, name28(ALICE))
    return items


def receive_all(io: RioDatagramIO) -> list[bytes]:
    batch = io.make_batch()
    found: list[bytes] = []
    while io.recv(batch):
        found += batch.take_all()
    return found


# -- posting and draining --------------------------------------------------------------------------------------------


def test_all_slots_are_posted_at_the_start_with_one_commit(rio: FakeRio) -> None:
    with opened(rio):
        assert rio.rx
        assert len(rio.rx.started) == 1024
        assert rio.rx.flags == [0] + [DEFER] * 1023 + [COMMIT_ONLY]
        assert len({request.at for request in rio.rx.started}) == 1024
        assert all(request.size == 2016 for request in rio.rx.started)
        assert rio.quiet


@pytest.mark.parametrize(
    ("count", "flags"), [(1, [0]), (2, [DEFER] * 2 + [COMMIT_ONLY]), (32, [DEFER] * 32 + [COMMIT_ONLY])]
)
def test_what_is_there_comes_in_one_dequeue_and_is_posted_again_with_one_commit(
    rio: FakeRio, count: int, flags: list[int]
) -> None:
    with opened(rio) as io:
        assert rio.rx
        rio.rx.flags.clear()
        items = arrive(rio, count)
        batch = io.make_batch()
        assert io.recv(batch) == count
        assert batch.take_all() == items
        assert (rio.rx.flags, rio.rx.queue.dequeues) == (flags, 1)
        assert len(rio.rx.started) == 1024
        assert not rio.waits
        assert io.recv(batch) == 0


def test_a_drain_is_bounded_by_the_batch_and_by_the_callers_room(rio: FakeRio) -> None:
    with opened(rio, max_batch=32) as io:
        assert rio.rx
        items = arrive(rio, 70)
        assert receive_all(io) == items
        assert rio.rx.queue.taken == [32, 32, 6, 0]
        items = arrive(rio, 5)
        small = RxBatch(2, 0)
        found = []
        while io.recv(small):
            found.append(small.take_all())
        assert found == [items[:2], items[2:4], items[4:]]


def test_a_packet_is_a_copy_of_its_own(rio: FakeRio) -> None:
    with opened(rio, max_batch=2, slots=2) as io:
        batch = io.make_batch()
        rio.arrive(b"first", name28(ALICE))
        assert io.recv(batch) == 1
        kept = batch.take(0)
        for i in range(4):
            rio.arrive(bytes([i]) * 9, name28(ALICE))
            assert io.recv(batch) == 1
        assert kept == b"first"


def test_nothing_is_lost_without_a_counter_when_all_slots_are_full(rio: FakeRio) -> None:
    with opened(rio, max_batch=4, slots=8) as io:
        items = arrive(rio, 11)
        assert receive_all(io) == items[:8]
        assert rio.lost == 3  # by the system, which counts it
        assert arrive(rio, 8) == receive_all(io)


def test_the_first_packet_is_waited_for_and_nothing_after_it(rio: FakeRio) -> None:
    with opened(rio) as io:
        assert rio.rx
        batch = io.make_batch()
        rio.before_wait.append(lambda: arrive(rio, 3) and None)
        assert io.recv(batch, timeout=None) == 3
        assert len(rio.waits) == 1
        assert rio.rx.queue.notifies == 1
        assert io.recv(batch, timeout=0.0) == 0
        assert (len(rio.waits), rio.rx.queue.notifies) == (1, 1)


def test_a_notification_that_is_pending_already_is_fine(rio: FakeRio) -> None:
    with opened(rio) as io:
        batch = io.make_batch()
        assert io.recv(batch, timeout=0.001) == 0
        rio.before_wait.append(lambda: arrive(rio, 1) and None)
        assert io.recv(batch, timeout=None) == 1
        rio.notify_error = [EALREADY]
        assert io.wait(0.001) == 0


def test_a_signal_with_nothing_behind_it_is_waited_out(rio: FakeRio) -> None:
    with opened(rio) as io:
        assert rio.rx
        event = rio.rx.queue.event
        rio.before_wait = [lambda: rio.set_event(event), lambda: arrive(rio, 1) and None]
        assert io.recv(io.make_batch(), timeout=None) == 1
        assert len(rio.waits) == 2


def test_wait_tells_of_what_is_there_and_of_room(rio: FakeRio) -> None:
    with opened(rio) as io:
        assert io.wait(0.0) == 0
        assert io.wait(0.0, read=True, write=True) == 2
        arrive(rio, 1)
        assert io.wait(None) == 1
        assert io.wait(None, read=True, write=True) == 3


def test_a_wake_ends_one_wait(rio: FakeRio) -> None:
    with opened(rio) as io:
        rio.before_wait.append(io.wake)
        assert io.recv(io.make_batch(), timeout=None) == 0
        assert len(rio.waits) == 1


# -- addresses -------------------------------------------------------------------------------------------------------


def test_packets_say_where_they_come_from(rio: FakeRio) -> None:
    with opened(rio) as io:
        batch = io.make_batch()
        rio.arrive(b"1", name28(ALICE)[:8] + b"\xee" * 20)  # the system leaves what it does not need
        rio.arrive(b"2", name28(ALICE))
        assert io.recv(batch) == 2
        assert batch.uniform == ALICE
        assert batch.peer(0) is batch.peer(1)
        rio.arrive(b"3", name28(BOB))
        rio.arrive(b"4", name28(ALICE))
        assert io.recv(batch) == 2
        assert (batch.peers, batch.uniform) == ([BOB, ALICE], None)
        assert io.send([b"back"], batch.peer(0)).sent == 1
        assert rio.wire == [(b"back", name28(BOB))]


def test_addresses_of_ipv6_keep_their_zone() -> None:
    rio = FakeRio(socket.AF_INET6)
    peer = make_peer("fe80::7", 4242, scope=3, flavour="windows")
    with opened(rio) as io:
        batch = io.make_batch()
        rio.arrive(b"x", peer.raw)
        assert io.recv(batch) == 1
        assert (batch.peers, batch.peers[0].scope if batch.peers[0] else 0) == ([peer], 3)
        assert io.send([b"1", b"2"], [ALICE, peer]).rejected == ((0, errno.EAFNOSUPPORT),)
        assert rio.wire == [(b"2", peer.raw)]


def test_nobody_is_looked_up_if_nobody_asks(rio: FakeRio) -> None:
    with opened(rio, peers=False) as io:
        batch = io.make_batch()
        rio.arrive(b"x", b"\xff" * 28)
        assert io.recv(batch) == 1
        assert batch.peer(0) is None


def test_a_foreign_address_drops_the_batch(rio: FakeRio) -> None:
    with opened(rio) as io:
        batch = io.make_batch()
        rio.arrive(b"1", name28(ALICE))
        rio.arrive(b"2", struct.pack("<H26x", 23))
        assert io.recv(batch) == 0
        assert (batch.dropped, io.stats.rx_dropped) == (2, 2)
        assert arrive(rio, 1) == receive_all(io)


# -- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [CONNRESET, ABORTED])
def test_a_receive_that_failed_is_dropped_and_posted_again(rio: FakeRio, status: int) -> None:
    with opened(rio, max_batch=4, slots=4) as io:
        assert rio.rx
        batch = io.make_batch()
        rio.arrive(b"1", name28(ALICE))
        rio.arrive(b"", name28(ALICE), status=status)
        rio.arrive(b"x" * 2017, name28(ALICE))  # above the slot
        rio.arrive(b"2", name28(ALICE))
        assert io.recv(batch) == 2
        assert batch.take_all() == [b"1", b"2"]
        assert (batch.dropped, io.stats.rx_dropped, len(rio.rx.started)) == (2, 2, 4)


def test_empty_and_larger_datagrams_than_asked_for_are_dropped(rio: FakeRio) -> None:
    with opened(rio, max_packet=100) as io:
        for data in (b"", b"x" * 101, b"y" * 100):
            rio.arrive(data, name28(ALICE))
        assert receive_all(io) == [b"y" * 100]
        assert (io.stats.rx_packets, io.stats.rx_bytes, io.stats.rx_dropped) == (1, 100, 2)


def test_oversize_datagrams_never_end_the_reader_but_endless_failures_do(rio: FakeRio) -> None:
    with opened(rio, max_batch=4, slots=4) as io:
        for _ in range(20):
            rio.arrive(b"x" * 3000, name28(ALICE))
            assert receive_all(io) == []
        for _ in range(2):
            for _ in range(3):
                rio.arrive(b"", name28(ALICE), status=ABORTED)
                assert receive_all(io) == []
            assert arrive(rio, 1) == receive_all(io)
        for _ in range(3):
            rio.arrive(b"", name28(ALICE), status=ABORTED)
            assert receive_all(io) == []
        rio.arrive(b"", name28(ALICE), status=ABORTED)
        with pytest.raises(IOBroken):
            receive_all(io)


def test_a_slot_that_cannot_be_posted_is_tried_again_with_the_next_batch(rio: FakeRio) -> None:
    with opened(rio, max_batch=4, slots=4) as io:
        assert rio.rx
        rio.rx.fail_posts = {rio.rx.posts + 2: ENOBUFS}
        items = arrive(rio, 3)
        assert receive_all(io) == items
        assert len(rio.rx.started) == 2
        assert rio.rx.flags[-2:] == [DEFER, COMMIT_ONLY]  # the refused post was the last
        assert arrive(rio, 1) == receive_all(io)
        assert len(rio.rx.started) == 4


def test_the_reader_ends_when_nothing_can_be_posted(rio: FakeRio) -> None:
    with opened(rio, max_batch=2, slots=2) as io:
        assert rio.rx
        rio.rx.fail_posts = {rio.rx.posts + 1: ENOBUFS}
        items = arrive(rio, 2)
        batch = io.make_batch()
        assert io.recv(batch) == 2  # what came is handed over, the error is kept
        assert batch.take_all() == items
        with pytest.raises(IOBroken):
            io.recv(batch)
        with pytest.raises(IOBroken):
            io.wait(None)


def test_a_failed_commit_ends_the_reader_after_what_came(rio: FakeRio, caplog: pytest.LogCaptureFixture) -> None:
    with opened(rio) as io:
        assert rio.rx
        rio.rx.fail_commits = [ENOBUFS]
        arrive(rio, 2)
        assert io.recv(io.make_batch()) == 2
        with pytest.raises(IOBroken):
            io.recv(io.make_batch(), timeout=None)
        assert "commit of 2 receives failed (10055)" in caplog.text
        assert not rio.waits  # nobody waits while something deferred is not committed


@pytest.mark.parametrize(
    "entry", [(0, 8, 1024), (0, 8, 1 << 31), (0, 2017, 1)], ids=["slot", "far slot", "longer than the slot"]
)
def test_an_impossible_completion_ends_the_reader_and_delivers_nothing(
    rio: FakeRio, entry: tuple[int, int, int]
) -> None:
    with opened(rio) as io:
        assert rio.rx
        arrive(rio, 1)
        rio.rx.queue.done.append(entry)
        with pytest.raises(IOBroken):
            io.recv(io.make_batch())
        assert io.stats.rx_packets == 0


def test_nothing_is_delivered_twice(rio: FakeRio) -> None:
    with opened(rio) as io:
        assert rio.rx
        arrive(rio, 1)
        rio.rx.queue.done.append(rio.rx.queue.done[0])
        with pytest.raises(IOBroken):
            io.recv(io.make_batch())


def test_a_corrupt_queue_ends_the_reader(rio: FakeRio) -> None:
    with opened(rio) as io:
        assert rio.rx
        rio.rx.queue.corrupt = True
        with pytest.raises(IOBroken):
            io.recv(io.make_batch(), timeout=None)


def test_a_notification_that_is_refused_ends_the_reader(rio: FakeRio) -> None:
    with opened(rio) as io:
        rio.notify_error = [EINVAL]
        with pytest.raises(IOBroken):
            io.recv(io.make_batch(), timeout=None)


# -- closing ---------------------------------------------------------------------------------------------------------


def test_closing_gives_everything_up_in_order_and_once(rio: FakeRio) -> None:
    with opened(rio) as io:
        batch = io.make_batch()
        arrive(rio, 3)
        io.close()
        io.close()
        assert rio.log == ["closesocket", "close queue", "close queue", "deregister", "free"]
        with pytest.raises(IOClosed):
            io.recv(batch)
        assert io.wait(None) == 0
        assert io.wait(None, read=False, write=True) == 0
        io.wake()


@pytest.mark.parametrize("closers", [1, 2])
def test_closing_ends_a_blocked_receive(rio: FakeRio, closers: int) -> None:
    ended = threading.Event()
    with opened(rio) as io:

        def read() -> None:
            with pytest.raises(IOClosed):
                io.recv(io.make_batch(), timeout=None)
            ended.set()

        threads = [threading.Thread(target=read)]
        threads[0].start()
        assert rio.waiting.wait(JOIN)
        threads += [threading.Thread(target=io.close) for _ in range(closers)]
        for thread in threads[1:]:
            thread.start()
        assert ended.wait(JOIN)
        for thread in threads:
            thread.join(JOIN)
            assert not thread.is_alive()
        assert rio.log.count("free") == 1


def test_a_reader_and_a_sender_do_not_lose_or_double_anything_until_the_close(rio: FakeRio) -> None:
    found: list[bytes] = []
    with opened(rio, max_batch=8, slots=64) as io:

        def read() -> None:
            batch = io.make_batch()
            while True:
                try:
                    io.recv(batch, timeout=None)
                except IOClosed:
                    return
                found.extend(batch.take_all())
                if len(found) + rio.lost >= 600:
                    done.set()

        done = threading.Event()
        reader = threading.Thread(target=read)
        reader.start()
        for i in range(300):
            rio.arrive(struct.pack("<I", 2 * i), name28(ALICE))
            rio.arrive(struct.pack("<I", 2 * i + 1), name28(BOB))
            io.send(packets(3), ALICE)
        assert done.wait(JOIN)
        io.close()
        reader.join(JOIN)
        assert not reader.is_alive()
    numbers = [struct.unpack("<I", data)[0] for data in found]
    assert numbers == sorted(set(numbers))
    assert len(numbers) == 600 - rio.lost
    assert len(rio.wire) == 900


# -- whether it is there ---------------------------------------------------------------------------------------------

CALLS = ["open_socket", "load", "create_completion_queue", "create_request_queue"]


@pytest.mark.parametrize("call", CALLS)
def test_where_it_cannot_be_used_one_line_says_why_and_the_socket_is_as_it_was(
    rio: FakeRio, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    sock = rio.socket()
    rio.fail[call] = 10045
    assert open_rio(sock, sys=rio) is None
    assert open_rio(sock, sys=rio) is None
    lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == 1
    assert "10045" in lines[0].getMessage()
    assert sock.number in rio.open_sockets
    sock.close()
    assert not rio.events
    assert not rio.queues


def register(rio: FakeRio) -> None:
    rio.fail["register_buffer"] = 10055


def first_post(rio: FakeRio) -> None:
    create = rio.create_request_queue

    def and_fail(*arguments: Any) -> int:
        made = create(*arguments)
        assert rio.rx
        rio.rx.fail_posts = {1: EINVAL}
        return made

    rio.create_request_queue = and_fail  # type: ignore[method-assign]


@pytest.mark.parametrize("failure", [register, first_post])
def test_a_construction_that_fails_half_way_leaves_nothing_behind(
    rio: FakeRio, failure: Callable[[FakeRio], None]
) -> None:
    sock = rio.socket()
    failure(rio)
    assert open_rio(sock, sys=rio) is None
    assert sock.number in rio.open_sockets
    assert not rio.events
    assert not rio.queues
    assert not rio.buffers
    assert "free" in rio.log
    sock.close()


def test_the_probe_cleans_up_and_the_back_end_follows(rio: FakeRio) -> None:
    assert why_not(rio) is None
    assert not rio.events
    assert not rio.open_sockets
    io = open_rio(rio.socket(), max_batch=8, sys=rio)
    assert io is not None
    assert io.caps.max_rx == 8
    io.close()


def test_windows_gets_it_where_it_works_and_the_portable_way_where_not(
    rio: FakeRio, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Noticed(socket.socket):
        def close(self) -> None:
            if (number := self.fileno()) in rio.open_sockets:
                rio.close_socket(number)
            super().close()

    monkeypatch.delenv("RNSFAST_OSIO", raising=False)
    monkeypatch.setattr(backend, "_here", lambda: "windows")
    sock = Noticed(socket.AF_INET, socket.SOCK_DGRAM)
    rio.open_sockets.add(sock.fileno())
    io = backend.open_backend(Kind.DATAGRAM, sock, max_batch=64, sys=rio)
    assert (io.caps.backend, io.caps.max_rx, io.fileno()) == ("win-rio", 64, -1)
    io.close()
    assert backend.bounds(Kind.DATAGRAM) == (32, 1, 64)
    rio.fail["create_request_queue"] = 10055
    io = backend.open_backend(Kind.DATAGRAM, backend.datagram_socket(socket.AF_INET), sys=rio)
    assert (io.caps.backend, io.caps.max_rx) == ("portable", 32)
    io.close()


@pytest.mark.skipif(sys.platform == "win32", reason="this is Windows")
def test_elsewhere_there_is_none_and_sockets_are_ordinary() -> None:
    assert why_not()
    sock = open_socket(socket.AF_INET)
    assert sock.type == socket.SOCK_DGRAM
    assert open_rio(sock) is None
    sock.close()
