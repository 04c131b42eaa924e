"""Nothing piles up: threads, timers, waiters and tables after long transfers.  Protocol 05, R10."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter
from typing import Any

import pytest

from rnsfast import Link, Node
from rnsfast.engine.timers import SLACK
from rnsfast.node.dispatch import BATCH, MAX_THREADS, Dispatcher, Strand
from tests.loopback import PATIENCE, Note, Pair, Worker, joined, number, number_of, settle


def load(node: Node) -> Counter[str]:
    """How much of everything that could pile up there is in a node."""
    reactor, engine = node._reactor, node._reactor.engine
    count: Counter[str] = Counter()
    with reactor.lock:
        count["timers"] = len(engine.timers)
        count["calls"] = len(reactor._calls)
        count["strands"] = len(reactor.ready)
        count["touched"] = len(engine.touched)
        count["receipts"] = len(engine.receipts)
        count["links"] = len(engine.links)
        count["settlements"] = len(engine.settlements)
        count["path waiters"] = len(node._listener._path_waiters)
        count["interfaces queued"] = sum(len(port.queue) for port in engine.ports)
        for link in engine.links.values():
            count["outstanding"] += len(link.outstanding) + len(link._receipts)
            channel = link.channel
            if channel is not None:
                count["ring"] += len(channel.ring) + len(channel.held)
                count["outbox"] += len(channel.outbox) + channel.granted
                count["streams"] += len(channel._streams) + len(channel._unopened)
                count["backlog"] += channel.backlog
                count["inbox"] += len(channel.owner._inbox)
                count["waiters"] += channel.owner._sleepers + len(channel.owner._watchers)
            count["strand calls"] += len(link.owner._strand.calls)
    count["callback threads"] = len(node._dispatcher._threads)
    return +count


def rest(pair: Pair) -> None:
    for node in (pair.b, pair.a, pair.b):
        settle(node)


@pytest.mark.slow
def test_a_hundred_thousand_messages_leave_nothing_behind() -> None:
    with joined(mtu_discovery=False) as pair:
        link, peer = pair.link()
        for end in (link, peer):
            end.channel.register(Note)
        got = threading.Semaphore(0)
        peer.channel.on_message(lambda message: got.release())
        link.channel.send(number(0))
        assert got.acquire(timeout=PATIENCE)
        link.channel.flush(PATIENCE)
        rest(pair)
        before, threads = load(pair.a) + load(pair.b), threading.active_count()
        most: Counter[str] = Counter()
        most_threads = 0

        def look(packets: list[bytes]) -> None:
            nonlocal most_threads
            most_threads = max(most_threads, threading.active_count())

        pair.to_b.on_carry = look

        def send() -> None:
            for i in range(25_000):
                link.channel.send(number(i))
                if i % 1000 == 0:
                    most.update({name: n for name, n in load(pair.a).items() if n > most[name]})

        senders = [Worker(send) for _ in range(4)]
        for _ in range(100_000):
            assert got.acquire(timeout=PATIENCE)
        for sender in senders:
            sender.result()
        link.channel.flush(PATIENCE)
        pair.to_b.on_carry = None
        rest(pair)
        after = load(pair.a) + load(pair.b)
        assert after["timers"] <= before["timers"] + 4  # entries that were replaced and are not yet due
        after["timers"] = min(after["timers"], before["timers"])
        assert after - before == Counter(), after - before
        assert threading.active_count() <= threads
        assert most_threads <= threads + 4 + 2  # the senders, and a callback thread or two
        assert link.channel._engine.next_tx == 100_001 & 0xFFFF  # past the end of the numbers


@pytest.mark.slow
def test_twenty_megabytes_leave_nothing_behind() -> None:
    with joined(mtu_discovery=False) as pair:
        link, peer = pair.link()
        data = bytes(range(256)) * 78_125
        reader = peer.open_reader(1)
        reading = Worker(reader.readall)
        rest(pair)
        before, threads = load(pair.a) + load(pair.b), threading.active_count()
        with link.open_writer(1, compression="never") as writer:
            writer.write(data)
        assert reading.result() == data
        rest(pair)
        after = load(pair.a) + load(pair.b)
        after["timers"] = min(after["timers"], before["timers"] + 4)
        assert set(after - before) <= {"timers"}
        assert threading.active_count() <= threads


def test_links_that_come_and_go_leave_nothing_behind() -> None:
    with joined() as pair:
        ends: list[weakref.ref[Link]] = []

        def once() -> None:
            link, peer = pair.link()
            peer.channel.register(Note)
            link.channel.send(number(1))
            assert number_of(peer.channel.receive(PATIENCE)) == 1
            with link.open_writer(1) as writer:
                writer.write(b"x")
            link.send(b"packet")
            link.close()
            assert peer.wait_closed(PATIENCE)
            ends.extend((weakref.ref(link), weakref.ref(peer)))

        once()
        rest(pair)
        before = load(pair.a) + load(pair.b)
        for _ in range(50):
            once()
        rest(pair)
        after = load(pair.a) + load(pair.b)
        for name in ("links", "outstanding", "receipts", "path waiters", "strand calls", "touched", "settlements"):
            assert after[name] <= before[name], name
        assert after["timers"] <= before["timers"] + 2 * 2 * SLACK  # dead entries are taken out when they are many
        assert after["callback threads"] <= 6
        gc.collect()
        alive = [end for end in ends if end() is not None]
        assert len(alive) <= 2 * SLACK + 6  # a dead entry holds its link, as do the last calls of callback threads


# ------------------------------------------------------------------ the threads of callbacks


@pytest.fixture
def dispatcher() -> Any:
    made = Dispatcher("test")
    yield made
    made.close(PATIENCE)


def submit(dispatcher: Dispatcher, strand: Strand, call: Any) -> None:
    if strand.append(call):
        dispatcher.submit(strand)


def test_calls_of_a_strand_are_made_in_order_by_one_thread_at_a_time(dispatcher: Dispatcher) -> None:
    strand, done = Strand(), threading.Event()
    order: list[int] = []
    inside = threading.Lock()

    def call(i: int) -> None:
        assert inside.acquire(blocking=False)
        order.append(i)
        inside.release()
        if i == 999:
            done.set()

    for i in range(1000):
        submit(dispatcher, strand, lambda i=i: call(i))
    assert done.wait(PATIENCE)
    assert order == list(range(1000))
    assert len(dispatcher._threads) <= 4


def test_blocked_strands_get_threads_up_to_the_limit_and_idle_ones_are_used_again(dispatcher: Dispatcher) -> None:
    go, running = threading.Event(), threading.Semaphore(0)
    for _ in range(MAX_THREADS + 10):
        submit(dispatcher, Strand(), lambda: (running.release(), go.wait(PATIENCE)))
    for _ in range(MAX_THREADS):
        assert running.acquire(timeout=PATIENCE)
    assert len(dispatcher._threads) == MAX_THREADS
    go.set()
    for _ in range(10):
        assert running.acquire(timeout=PATIENCE)
    assert len(dispatcher._threads) == MAX_THREADS


@pytest.mark.parametrize("error", [RuntimeError, SystemExit, KeyboardInterrupt])
def test_callback_that_raises_ends_neither_its_thread_nor_its_strand(
    dispatcher: Dispatcher, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise error("on purpose")

    strand, done = Strand(), threading.Event()
    submit(dispatcher, strand, fail)
    submit(dispatcher, strand, done.set)
    assert done.wait(PATIENCE)
    assert "an application callback raised" in caplog.text


def test_closing_runs_what_was_queued_and_nothing_that_comes_later() -> None:
    dispatcher, strand, go = Dispatcher("test"), Strand(), threading.Event()
    made: list[int] = []
    submit(dispatcher, strand, lambda: go.wait(PATIENCE))
    for i in range(5 * BATCH):
        submit(dispatcher, strand, lambda i=i: made.append(i))
    closing = Worker(dispatcher.close, PATIENCE)
    with dispatcher._lock:
        pass
    go.set()
    closing.join()
    assert made == list(range(5 * BATCH))
    submit(dispatcher, Strand(), lambda: made.append(-1))
    assert made[-1] != -1
    assert not dispatcher._threads
    dispatcher.close(PATIENCE)


def test_closing_from_a_callback_does_not_wait_for_itself() -> None:
    dispatcher, done = Dispatcher("test"), threading.Event()
    submit(dispatcher, Strand(), lambda: (dispatcher.close(PATIENCE), done.set()))
    assert done.wait(PATIENCE / 2)
