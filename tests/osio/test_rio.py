"""Registered I/O, sending: reservation, deferring, one commit, undoing, completions.  Protocol 09, 4.3."""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack

import pytest

from rnsfast.osio.contract import TxState
from rnsfast.osio.ring import Ring
from tests.osio.fake_rio import ABORTED, COMMIT_ONLY, DEFER, EINVAL, ENOBUFS, FakeRio
from tests.osio.rio_makers import ALICE, BOB, name28, opened, packets, sent

NOTSOCK = 10038
JOIN = 5.0  # seconds a thread of a test may take


@pytest.fixture
def rio() -> FakeRio:
    return FakeRio()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A send waits until the test lets something complete, however slow this machine is."""
    monkeypatch.setattr("rnsfast.osio.rio.PATIENCE", JOIN)


# -- flags, kicks, dequeues ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(
    ("count", "flags", "dequeues"),
    [
        (0, [], 0),
        (1, [0], 1),
        (2, [DEFER] * 2 + [COMMIT_ONLY], 1),
        (32, [DEFER] * 32 + [COMMIT_ONLY], 1),
        (33, [DEFER] * 32 + [COMMIT_ONLY, 0], 2),
        (64, ([DEFER] * 32 + [COMMIT_ONLY]) * 2, 2),
    ],
)
def test_several_are_deferred_and_committed_once_a_single_one_goes_at_once(
    count: int, flags: list[int], dequeues: int, eager: bool
) -> None:
    rio = FakeRio(eager=eager)
    with opened(rio) as io:
        assert rio.tx
        items = packets(count)
        result = io.send(items, ALICE)
        assert (result.state, result.taken, result.sent, result.rejected) == (TxState.DONE, count, count, ())
        assert rio.tx.flags == flags
        assert rio.tx.queue.dequeues == dequeues
        assert rio.tx.queue.notifies == 0
        assert rio.wire == [(item, name28(ALICE)) for item in items]
        assert not rio.waits


@pytest.mark.parametrize("count", [0, 33])
def test_the_primitive_refuses_what_is_no_batch(rio: FakeRio, count: int) -> None:
    with opened(rio) as io, pytest.raises(ValueError, match=r"within 1\.\.32"):
        io._submit(packets(count), ALICE, 0, count)


@pytest.mark.parametrize("batch", [0, 65])
def test_the_bound_of_a_batch_is_checked(rio: FakeRio, batch: int) -> None:
    sock = rio.socket()
    with pytest.raises(ValueError, match=r"within 1\.\.64"), opened(rio, max_batch=batch):
        pass
    sock.close()


@pytest.mark.parametrize("batch", [1, 64])
def test_the_bound_of_a_batch_is_kept(rio: FakeRio, batch: int) -> None:
    with opened(rio, max_batch=batch) as io:
        assert rio.tx
        assert io.send(packets(64), ALICE).sent == 64
        assert rio.tx.commits == (0 if batch == 1 else 1)
        assert (io.caps.max_tx, io.caps.backend, io.caps.pollable, io.fileno()) == (batch, "win-rio", False, -1)


def test_each_packet_goes_to_its_peer_and_none_goes_without_address(rio: FakeRio) -> None:
    with opened(rio) as io:
        io.send([b"a", b"b"], [ALICE, BOB])
        io.send_one(b"c", BOB)
        io.send([b"d", b"e"])
        assert rio.wire == [
            (b"a", name28(ALICE)),
            (b"b", name28(BOB)),
            (b"c", name28(BOB)),
            (b"d", b""),
            (b"e", b""),
        ]


def test_what_may_not_be_offered_is_left_out_and_its_neighbours_go(rio: FakeRio) -> None:
    with opened(rio) as io:
        items = [b"", b"1" * 2016, b"2" * 2017, b"3", b""]
        result = io.send(items, ALICE)
        assert (result.taken, result.sent) == (5, 2)
        assert [index for index, _ in result.rejected] == [0, 2, 4]
        assert sent(rio) == [items[1], items[3]]


def test_start_goes_on_where_an_earlier_send_ended(rio: FakeRio) -> None:
    with opened(rio) as io:
        items = packets(5)
        assert io.send(items, ALICE, start=3).taken == 5
        assert io.send(items, ALICE, start=4).sent == 1
        assert sent(rio) == [items[3], items[4], items[4]]


# -- posts that fail -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("failing", "commits"), [(0, 1), (1, 2), (7, 1)])
def test_a_refused_post_costs_only_its_packet(rio: FakeRio, failing: int, commits: int) -> None:
    with opened(rio) as io:
        assert rio.tx
        items = packets(8)
        rio.tx.fail_posts[failing + 1] = EINVAL
        result = io.send(items, ALICE)
        assert (result.state, result.taken, result.sent) == (TxState.DONE, 8, 7)
        assert result.rejected == ((failing, EINVAL),)
        assert sent(rio) == items[:failing] + items[failing + 1 :]
        assert rio.tx.commits == commits  # what was deferred before it, and what came after it
        io.send([b"x"], ALICE)
        assert io._ring.used == 1  # only what was sent just now


def test_a_refused_single_post_gives_its_slot_back(rio: FakeRio) -> None:
    with opened(rio) as io:
        assert rio.tx
        rio.tx.fail_posts[1] = EINVAL
        result = io.send_one(b"x", ALICE)
        assert (result.rejected, io._ring.used, rio.wire) == (((0, EINVAL),), 0, [])


def test_short_memory_is_tried_again_and_then_costs_the_packet(rio: FakeRio) -> None:
    with opened(rio) as io:
        assert rio.tx
        rio.tx.fail_posts = {1: ENOBUFS, 3: ENOBUFS}
        assert io.send_one(b"x", ALICE).sent == 1
        assert io.send([b"1", b"2"], ALICE).sent == 2
        rio.tx.fail_posts = {rio.tx.posts + k: ENOBUFS for k in range(1, 6)}
        assert io.send_one(b"y", ALICE).rejected == ((0, ENOBUFS),)
        assert sent(rio) == [b"x", b"1", b"2"]


def test_a_socket_that_is_none_any_more_breaks_the_back_end(rio: FakeRio) -> None:
    with opened(rio) as io:
        assert rio.tx
        rio.tx.fail_posts[2] = NOTSOCK
        result = io.send(packets(3), ALICE)
        assert (result.state, result.taken, result.sent) == (TxState.BROKEN, 1, 1)


def test_after_a_failed_commit_nothing_is_offered_again(rio: FakeRio, caplog: pytest.LogCaptureFixture) -> None:
    with opened(rio) as io:
        assert rio.tx
        rio.tx.fail_commits = [ENOBUFS]
        items = packets(3)
        result = io.send(items, ALICE)
        assert (result.state, result.taken, result.sent, result.errno) == (TxState.UNKNOWN, 0, 0, ENOBUFS)
        assert (rio.tx.posts, rio.wire) == (3, [])
        assert io.stats.tx_unknown == 3
        assert io._ring.used == 3  # the system may still read them
        assert "commit of 3 packets failed (10055)" in caplog.text
        # The next kick starts them; that is no second offer.
        assert io.send([b"x", b"y"], ALICE).sent == 2
        assert sent(rio) == [*items, b"x", b"y"]


def test_both_errors_are_kept_if_a_post_and_then_the_commit_fails(
    rio: FakeRio, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(rio) as io:
        assert rio.tx
        rio.tx.fail_posts[3] = EINVAL
        rio.tx.fail_commits = [ENOBUFS]
        result = io.send(packets(4), ALICE)
        assert (result.state, result.taken, result.sent, rio.tx.posts) == (TxState.UNKNOWN, 0, 0, 3)
        assert io._ring.used == 2
        assert "10055" in caplog.text
        assert "10022" in caplog.text


def test_a_failed_commit_of_a_later_chunk_keeps_what_went_before(rio: FakeRio) -> None:
    with opened(rio, max_batch=2) as io:
        assert rio.tx
        rio.tx.fail_commits = [0, ENOBUFS]
        result = io.send(packets(6), ALICE)
        assert (result.state, result.taken, result.sent) == (TxState.UNKNOWN, 2, 2)
        assert rio.tx.posts == 4


# -- the ring --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("patient")
def test_a_full_ring_waits_for_completions_before_anything_is_posted() -> None:
    rio = FakeRio(hold=True)
    with opened(rio, max_batch=4, slots=4) as io:
        assert rio.tx
        io.send(packets(4), ALICE)
        rio.before_wait.append(lambda: rio.complete(2))
        assert io.send([b"x", b"y"], ALICE).state is TxState.DONE
        assert len(rio.waits) == 1
        assert rio.tx.flags[4:] == [COMMIT_ONLY, DEFER, DEFER, COMMIT_ONLY]
        rio.complete()
        assert sent(rio) == [*packets(4), b"x", b"y"]


@pytest.mark.usefixtures("patient")
def test_the_whole_batch_is_reserved_and_completions_come_in_portions() -> None:
    rio = FakeRio(hold=True)
    with opened(rio, max_batch=4, slots=4) as io:
        assert rio.tx
        io.send(packets(4), ALICE)
        rio.before_wait += [lambda: rio.complete(1), lambda: rio.complete(2)]
        assert io.send([b"x", b"y", b"z"], ALICE).sent == 3
        assert len(rio.waits) == 2
        assert rio.tx.posts == 7


def test_a_ring_that_stays_full_blocks_and_takes_the_rest_later(rio: FakeRio) -> None:
    rio.hold = True
    with opened(rio, max_batch=4, slots=4) as io:
        items = packets(10)
        result = io.send(items, ALICE)
        assert (result.state, result.taken, result.sent) == (TxState.BLOCKED, 4, 4)
        assert io.stats.tx_blocked == 1
        rio.before_wait.append(rio.complete)
        assert io.wait(5.0, read=False, write=True) == 2
        rio.hold = False
        assert io.send(items, ALICE, start=result.taken).taken == 10
        assert sent(rio) == items


def test_waiting_for_room_ends_at_the_timeout_and_by_a_wake(rio: FakeRio) -> None:
    rio.hold = True
    with opened(rio, max_batch=2, slots=2) as io:
        assert io.wait(0.0, read=False, write=True) == 2
        io.send(packets(2), ALICE)
        assert io.wait(0.001, read=False, write=True) == 0
        rio.before_wait.append(io.wake)
        assert io.wait(None, read=False, write=True) == 0
        rio.complete()


@pytest.mark.usefixtures("patient")
def test_uncommitted_packets_are_committed_before_anybody_waits() -> None:
    rio = FakeRio(hold=True)
    with opened(rio, max_batch=4, slots=4) as io:
        assert rio.tx
        rio.tx.fail_commits = [ENOBUFS]
        assert io.send(packets(4), ALICE).state is TxState.UNKNOWN
        assert rio.deferred == (0, 4)
        rio.before_wait.append(rio.complete)
        assert io.send_one(b"x", ALICE).sent == 1  # the fake fails a wait with deferred requests
        assert len(rio.waits) == 1


def test_waiting_for_room_commits_first_too() -> None:
    rio = FakeRio(hold=True)
    with opened(rio, max_batch=4, slots=4) as io:
        assert rio.tx
        rio.tx.fail_commits = [ENOBUFS]
        io.send(packets(4), ALICE)
        rio.before_wait.append(rio.complete)
        assert io.wait(5.0, read=False, write=True) == 2
        assert (len(rio.waits), rio.tx.commits) == (1, 2)


@pytest.mark.parametrize("count", [1, 2])
def test_what_a_later_send_started_is_not_committed_again(count: int) -> None:
    rio = FakeRio(hold=True)
    with opened(rio, max_batch=4, slots=4) as io:
        assert rio.tx
        rio.tx.fail_commits = [ENOBUFS]
        io.send(packets(2), ALICE)
        io.send(packets(count), ALICE)
        commits = rio.tx.commits
        assert io.send(packets(4), ALICE).state is TxState.BLOCKED
        assert rio.tx.commits == commits


def test_a_commit_that_fails_again_breaks_the_back_end() -> None:
    rio = FakeRio(hold=True)
    with opened(rio, max_batch=4, slots=4) as io:
        assert rio.tx
        rio.tx.fail_commits = [ENOBUFS, ENOBUFS]
        io.send(packets(4), ALICE)
        result = io.send_one(b"x", ALICE)
        assert (result.state, result.taken) == (TxState.BROKEN, 0)
        assert not rio.waits
        assert io.send(packets(2), ALICE).state is TxState.BROKEN
        assert io.wait(5.0, read=False, write=True) == 2  # so that the next send tells


def test_the_counters_wrap_and_nothing_is_lost(rio: FakeRio) -> None:
    with opened(rio, max_batch=4, slots=8) as io:
        io._ring = Ring(8, 0xFFFFFFFA)
        items = packets(50)
        assert io.send(items, ALICE).sent == 50
        assert sent(rio) == items
        assert io._ring.tail < 0xFF


@pytest.mark.usefixtures("patient")
def test_a_completion_that_overtakes_does_not_free_the_slots_before_it() -> None:
    rio = FakeRio(hold=True)
    with opened(rio, max_batch=2, slots=4) as io:
        io.send(packets(4), ALICE)
        rio.complete(2, last=True)
        rio.before_wait.append(rio.complete)
        assert io.send([b"x", b"y"], ALICE).sent == 2  # the fake fails if a slot changes before it completes
        rio.complete()


def test_a_completion_with_an_error_is_a_drop_and_never_sent_again() -> None:
    rio = FakeRio(hold=True)
    with opened(rio) as io:
        io.send(packets(5), ALICE)
        rio.complete(2)
        rio.complete(3, status=ABORTED)
        rio.hold = False
        io.send_one(b"x", ALICE)
        assert (io.stats.tx_packets, io.stats.tx_rejected) == (6, 3)
        assert sent(rio) == [*packets(2), b"x"]
        assert io._ring.used == 1


def test_more_completions_than_sends_break_the_back_end(rio: FakeRio, caplog: pytest.LogCaptureFixture) -> None:
    with opened(rio) as io:
        assert rio.tx
        io.send(packets(2), ALICE)
        rio.tx.queue.done.append((0, 4, 0))
        result = io.send_one(b"x", ALICE)
        assert (result.state, result.taken) == (TxState.BROKEN, 0)
        assert "3 completions for 2 slots" in caplog.text


def test_a_corrupt_queue_breaks_the_back_end(rio: FakeRio) -> None:
    with opened(rio) as io:
        assert rio.tx
        rio.tx.queue.corrupt = True
        result = io.send(packets(3), ALICE)
        assert (result.state, result.taken, result.sent, rio.tx.posts) == (TxState.BROKEN, 0, 0, 0)


@pytest.mark.usefixtures("patient")
def test_a_notification_that_is_refused_breaks_the_back_end() -> None:
    rio = FakeRio(hold=True)
    with opened(rio, max_batch=2, slots=2) as io:
        io.send(packets(2), ALICE)
        rio.notify_error = [EINVAL]
        assert io.send_one(b"x", ALICE).state is TxState.BROKEN


# -- threads ---------------------------------------------------------------------------------------------------------


def test_closing_ends_a_send_that_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rnsfast.osio.rio.PATIENCE", 60.0)
    rio = FakeRio(hold=True)
    states: list[TxState] = []
    with opened(rio, max_batch=2, slots=2) as io:
        io.send(packets(2), ALICE)
        thread = threading.Thread(target=lambda: states.append(io.send_one(b"x", ALICE).state))
        thread.start()
        assert rio.waiting.wait(JOIN)
        io.close()
        thread.join(JOIN)
        assert states == [TxState.CLOSED]
        assert io.send(packets(2), ALICE).state is TxState.CLOSED


def test_closing_ends_a_wait_for_room() -> None:
    rio = FakeRio(hold=True)
    found: list[int] = []
    with opened(rio, max_batch=2, slots=2) as io:
        io.send(packets(2), ALICE)
        thread = threading.Thread(target=lambda: found.append(io.wait(None, read=False, write=True)))
        thread.start()
        assert rio.waiting.wait(JOIN)
        io.close()
        thread.join(JOIN)
        assert found == [0]


def test_no_packet_is_lost_or_doubled_between_two_sending_threads(rio: FakeRio) -> None:
    with opened(rio, max_batch=8, slots=16) as io:
        start = threading.Barrier(2)

        def send_all(mark: int) -> None:
            start.wait(JOIN)
            for i in range(60):
                assert io.send([bytes([mark, i, k]) for k in range(1 + i % 9)], ALICE).state is TxState.DONE

        threads = [threading.Thread(target=send_all, args=(mark,)) for mark in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(JOIN)
        for mark in (0, 1):
            expected = [bytes([mark, i, k]) for i in range(60) for k in range(1 + i % 9)]
            assert [data for data in sent(rio) if data[0] == mark] == expected
        assert io.stats.tx_packets == len(rio.wire)


def test_what_is_outstanding_is_never_negative_for_who_looks_from_outside() -> None:
    """Protocol 09, section 8: the other side's counter first, then one's own."""
    rio = FakeRio()
    stop = threading.Event()
    with opened(rio, max_batch=4, slots=16) as io, ExitStack() as ending:
        seen: list[int] = []

        def look() -> None:
            while not stop.is_set():
                head = io._ring.head
                seen.append(io._ring.tail - head)

        watcher = threading.Thread(target=look)
        watcher.start()
        ending.callback(watcher.join, JOIN)
        ending.callback(stop.set)
        for _ in range(300):
            io.send(packets(4), ALICE)
    assert min(seen, default=0) >= 0


def test_one_line_is_logged_for_a_closing_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    rio = FakeRio()
    sock = rio.socket()
    from rnsfast.osio.rio import RioDatagramIO

    io = RioDatagramIO(sock, sys=rio)
    sock.close_error = OSError(10036, "in progress")
    io.close()
    assert "memory is kept" in caplog.text
    assert "free" not in rio.log  # the system may still write there
    sock.close_error = None
    sock.close()
