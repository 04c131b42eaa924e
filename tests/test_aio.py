"""The asyncio face: the same transitions as in threads, cancellation at every moment, several loops at once.

Protocol 05, R1 to R14 as far as they differ from `tests/node/test_readiness.py`.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

import pytest

from rnsfast import ChannelFull, Identity, LinkClosed, LinkTimeout, NodeClosed, PathNotFound, StreamBroken, aio
from rnsfast.aio import waiting
from tests.loopback import (
    PATIENCE,
    Clock,
    Note,
    Pair,
    Worker,
    anything,
    install_clock,
    is_message,
    is_proof,
    joined,
    number,
    number_of,
    settle,
)

Test = Callable[[], Coroutine[Any, Any, Any]]


def run(test: Test) -> Any:
    """Run a coroutine to its end in a loop of its own; the deadline is reached only by a failure."""

    async def bounded() -> Any:
        async with asyncio.timeout(6 * PATIENCE):
            return await test()

    return asyncio.run(bounded())


async def soon(awaitable: Awaitable[Any]) -> Any:
    async with asyncio.timeout(PATIENCE):
        return await awaitable


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return install_clock(monkeypatch)


@pytest.fixture
def pair(clock: Clock) -> Iterator[Pair]:
    with joined() as pair:
        yield pair


class Ends:
    """Both ends of a link, in asyncio; the plain nodes are the pair's."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.a, self.b = aio.Node.wrap(pair.a), aio.Node.wrap(pair.b)
        link, peer = pair.link()
        self.link, self.peer = aio.Link(self.a, link), aio.Link(self.b, peer)
        for end in (self.link, self.peer):
            end.channel.register(Note)
        self.channel = self.link.channel
        self.engine = self.channel.sync._engine

    def fill(self) -> int:
        """Hold the proofs and send until the window is full."""
        self.pair.to_a.hold(is_proof)
        count = 0
        while self.channel.is_ready:
            self.channel.sync.send(number(count), timeout=0)
            count += 1
        self.pair.to_a.wait_held(count)
        return count

    def nothing_waits(self) -> bool:
        channel = self.channel.sync
        return not (channel.has_waiters or channel._senders._rings or self.engine.outbox or self.engine.granted)


async def asleep(*awaitables: Coroutine[Any, Any, Any]) -> list[asyncio.Task[Any]]:
    """Start tasks and return when each has reached its first wait."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    for _ in range(3):
        await waiting.let_others_run()
    assert not any(task.done() for task in tasks), [task for task in tasks if task.done()]
    return tasks


# ------------------------------------------------------------------ R1 to R5


def test_delivery_wakes_ready_and_send(pair: Pair, clock: Clock) -> None:
    async def test() -> None:
        ends = Ends(pair)
        count = ends.fill()
        ready, sending = await asleep(ends.channel.ready(), ends.channel.send(number(count)))
        before = clock.now
        pair.to_a.release(1)
        assert (await soon(sending)).sent
        pair.to_a.flow()
        await soon(ready)
        assert clock.now - before < 0.1
        assert ends.nothing_waits()

    run(test)


def test_cancelled_waiters_leave_nothing_and_have_sent_nothing(pair: Pair) -> None:
    async def test() -> None:
        ends = Ends(pair)
        count = ends.fill()
        tasks = await asleep(
            ends.channel.send(number(90)), ends.channel.ready(), ends.channel.flush(), ends.channel.receive(),
            ends.link.wait_closed(), ends.link.send(b"x").wait(), ends.peer.wait_identified(),
        )  # fmt: skip
        for task in tasks:
            task.cancel()
        for task in tasks:
            with pytest.raises(asyncio.CancelledError):
                await soon(task)
        assert ends.nothing_waits()
        assert not ends.link.sync.has_waiters
        assert not ends.peer.sync.has_waiters
        pair.to_a.flow()
        await soon(ends.channel.flush())
        assert ends.engine.next_tx == count

    run(test)


def test_timeouts_of_all_waits(pair: Pair) -> None:
    async def test() -> None:
        ends = Ends(pair)
        ends.fill()
        with pytest.raises(ChannelFull, match=r"stayed full for 0\.01 s"):
            await ends.channel.send(number(90), timeout=0.01)
        with pytest.raises(ChannelFull):
            await ends.channel.send(number(90), timeout=0)
        assert await ends.channel.wait_ready(0.01) is False
        assert await ends.channel.flush(0.01) is False
        assert await ends.link.wait_closed(0.01) is False
        assert await ends.link.send(b"x").wait(0.0) is False
        assert await ends.link.wait_identified(0.0) is not None  # the destination's identity
        assert await ends.peer.wait_identified(0.01) is None
        with pytest.raises(TimeoutError):
            await ends.channel.receive(0.01)
        reader = ends.link.open_reader(1)
        reader.timeout = 0.01
        assert await reader.wait_readable(0.01) is False
        for read in (reader.read(1), reader.readall(), reader.readline(), reader.readexactly(3)):
            with pytest.raises(TimeoutError):
                await read
        writer = ends.link.open_writer(1, compression="never", buffer=10)
        writer.timeout = 0.01
        with pytest.raises(TimeoutError, match="made no progress"):
            await writer.write(b"x" * 100)
        with pytest.raises(TimeoutError, match="made no progress"):
            await writer.drain()
        with pytest.raises(TimeoutError, match="was not proved"):
            await writer.close()
        assert writer.closed
        assert ends.nothing_waits()

    run(test)


@pytest.mark.parametrize("waiters", [16, 1000])
def test_many_senders_are_served_in_order_and_none_is_lost(pair: Pair, waiters: int) -> None:
    async def test() -> None:
        ends = Ends(pair)
        count = ends.fill()
        senders = await asleep(*(ends.channel.send(number(count + i)) for i in range(waiters)))
        threads = threading.active_count()
        with pytest.raises(ChannelFull):
            await ends.channel.send(number(5000), timeout=0)
        pair.to_a.flow()
        for i in range(count + waiters):
            assert number_of(await soon(ends.peer.channel.receive())) == i
        await soon(asyncio.gather(*senders))
        await soon(ends.channel.flush())
        assert threading.active_count() == threads  # no thread waits for anybody
        assert ends.nothing_waits()

    run(test)


def test_a_thousand_waiters_for_readiness_and_one_whose_loop_is_gone(pair: Pair) -> None:
    async def test() -> None:
        ends = Ends(pair)
        ends.fill()
        gone = asyncio.new_event_loop()
        _, ring = waiting.bell(gone)
        gone.close()
        with ends.channel.sync._lock:
            ends.channel.sync.watch(ring)
        tasks = await asleep(*(ends.channel.ready() for _ in range(1000)))
        pair.to_a.release(1)
        await soon(asyncio.gather(*tasks))
        assert ends.nothing_waits()

    run(test)


def test_room_passes_on_when_its_owner_is_cancelled_as_it_wakes(pair: Pair) -> None:
    async def test() -> None:
        ends = Ends(pair)
        count = ends.fill()
        ends.engine.window.maximum = count  # one proof, one slot
        first, second = await asleep(ends.channel.send(number(91)), ends.channel.send(number(92)))
        wake = waiting.wake

        def cancel_at_that_moment(waiter: asyncio.Future[None]) -> None:
            wake(waiter)
            first.cancel()

        ticket = ends.engine.outbox[0]
        with ends.channel.sync._lock:
            ring: Any = ticket.owner._rings[ticket]
            loop, waiter = asyncio.get_running_loop(), ring.args[1]
            ticket.owner._rings[ticket] = lambda: loop.call_soon_threadsafe(cancel_at_that_moment, waiter)
        pair.to_a.release(1)
        with pytest.raises(asyncio.CancelledError):
            await soon(first)
        assert waiter.done()
        assert not waiter.cancelled()  # it had been woken
        assert (await soon(second)).sent
        pair.to_a.flow()
        got = [number_of(await soon(ends.peer.channel.receive())) for _ in range(count + 1)]
        assert got == [*range(count), 92]
        assert ends.nothing_waits()

    run(test)


def test_room_that_was_granted_and_not_taken_does_not_block_who_comes_later(pair: Pair) -> None:
    async def test() -> None:
        ends = Ends(pair)
        count = ends.fill()
        (first,) = await asleep(ends.channel.send(number(91)))
        carried = pair.to_b.carried
        pair.to_a.release()
        settle(pair.a)  # this thread is the loop's: the sender has not run yet
        assert ends.engine.granted == 1
        assert not await ends.channel.flush(0)
        first.cancel()
        other = Worker(ends.channel.sync.send, number(92))
        other.result()  # another thread sends into what else is free
        with pytest.raises(asyncio.CancelledError):
            await soon(first)
        assert ends.engine.granted == 0
        pair.to_a.flow()
        assert await soon(ends.channel.flush())
        assert pair.to_b.carried == carried + 1
        assert ends.engine.next_tx == count + 1

    run(test)


def test_room_of_a_sender_whose_loop_is_gone_goes_to_the_next(pair: Pair) -> None:
    link, peer = pair.link()
    for end in (link, peer):
        end.channel.register(Note)
    pair.to_a.hold(is_proof)
    link.channel.send_many([number(0), number(1)])
    pair.to_a.wait_held(2)
    link.channel._engine.window.maximum = 2
    gone = asyncio.new_event_loop()
    lost = gone.create_task(aio.Link(aio.Node.wrap(pair.a), link).channel.send(number(91)))
    gone.run_until_complete(asyncio.wait([lost], timeout=0.0))
    assert link.channel._engine.outbox
    gone.close()
    pair.to_a.release(1)
    Worker(link.channel.send, number(92)).result()
    pair.to_a.flow()
    assert [number_of(peer.channel.receive(PATIENCE)) for _ in range(3)] == [0, 1, 92]
    assert not link.channel._engine.granted
    lost._log_destroy_pending = False  # type: ignore[attr-defined]


def test_a_message_has_priority_over_a_stream_that_fills_every_window(pair: Pair) -> None:
    async def test() -> None:
        ends = Ends(pair)
        writer = ends.link.open_writer(1, compression="never", buffer=2_000_000)
        reader = ends.peer.open_reader(1)
        pair.to_a.hold(is_proof)
        await writer.write(bytes(2_000_000))
        pair.to_a.wait_held(2)
        (sending,) = await asleep(ends.channel.send(number(7)))
        pair.to_a.release(1)
        await soon(sending)
        pair.to_a.flow()
        assert number_of(await soon(ends.peer.channel.receive())) == 7
        closing = asyncio.ensure_future(writer.close())
        assert await soon(reader.readall()) == bytes(2_000_000)
        await soon(closing)

    run(test)


# ------------------------------------------------------------------ R6, R7, R8


ENDINGS: dict[str, Callable[[Ends, Clock], Any]] = {
    "closed here": lambda ends, clock: ends.link.close(),
    "closed by the peer": lambda ends, clock: ends.peer.close(),
    "interface closed": lambda ends, clock: ends.pair.end_a.close(),
    "node stopped": lambda ends, clock: ends.pair.a.stop(),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_end_wakes_every_waiter(pair: Pair, clock: Clock, ending: str) -> None:
    async def test() -> None:
        ends = Ends(pair)
        ends.fill()
        writer = ends.link.open_writer(3, compression="never", buffer=1000)
        closing, flushing = ends.link.open_writer(4), ends.link.open_writer(5)
        await flushing.write(b"x")
        closed_tasks = await asleep(
            ends.channel.ready(), ends.channel.send(number(9)), ends.channel.flush(), ends.channel.receive(),
            writer.write(b"x" * 5000), closing.close(), flushing.flush(), closing.wait_delivered(),
        )  # fmt: skip
        broken_tasks = await asleep(ends.link.open_reader(6).read(1), ends.link.open_reader(7).readexactly(9))
        closed, receipt = await asleep(ends.link.wait_closed(), ends.link.send(b"x").wait())
        iteration = (await asleep(anext(ends.channel)))[0]
        ENDINGS[ending](ends, clock)
        for task in closed_tasks:
            with pytest.raises(LinkClosed):
                await soon(task)
        for task in broken_tasks:
            with pytest.raises(StreamBroken):
                await soon(task)
        assert await soon(closed) is True
        assert await soon(receipt) is False
        with pytest.raises(StopAsyncIteration):
            await soon(iteration)
        for later in (ends.channel.ready(), ends.channel.send(number(9)), ends.channel.flush(), ends.channel.receive()):
            with pytest.raises(LinkClosed):
                await soon(later)
        for late in (writer.write(b"x"), writer.drain(), writer.flush()):
            with pytest.raises(LinkClosed):
                await soon(late)
        assert ends.link.closing != "it is open"
        assert ends.nothing_waits()

    run(test)


def test_change_between_look_and_watch_is_not_lost(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        ends = Ends(pair)
        ends.fill()
        watch, workers = type(ends.channel.sync).watch, []

        def deliver_first(self: Any, ring: Any) -> None:  # under the lock, which the delivery has to wait for
            if not workers:
                workers.append(Worker(lambda: (pair.to_a.release(1), settle(pair.a))))
            watch(self, ring)

        monkeypatch.setattr(waiting.Waitable, "watch", deliver_first)
        await soon(ends.channel.ready())
        workers[0].join()

    run(test)


def test_link_that_comes_back_from_stale_wakes(pair: Pair, clock: Clock) -> None:
    async def test() -> None:
        ends = Ends(pair)
        pair.to_b.hold()
        clock.advance(11.0, pair.b)
        ready, sending = await asleep(ends.peer.channel.ready(), ends.peer.channel.send(number(1)))
        ends.link.send(b"still here")
        pair.to_b.flow()
        await soon(ready)
        await soon(sending)

    run(test)


# ------------------------------------------------------------------ iteration and handlers


def test_iteration_gives_everything_and_ends_with_the_link(pair: Pair) -> None:
    async def test() -> None:
        ends = Ends(pair)

        async def talk() -> None:
            for i in range(100):
                await ends.channel.send(number(i))
            await ends.channel.send_many(number(100 + i) for i in range(100))
            await ends.channel.flush()
            ends.link.close()

        talking = asyncio.ensure_future(talk())
        got = [number_of(message) async for message in ends.peer.channel]
        assert got == list(range(200))
        assert ends.peer.closing == "the peer closed it"
        await soon(talking)

    run(test)


def test_cancelled_receive_loses_no_message(pair: Pair) -> None:
    async def test() -> None:
        ends = Ends(pair)
        pair.to_b.hold(is_message)
        await ends.channel.send(number(0))
        (receiving,) = await asleep(ends.peer.channel.receive())
        pair.to_b.release()
        settle(pair.b)
        receiving.cancel()  # it has been rung and has not run yet
        with pytest.raises(asyncio.CancelledError):
            await soon(receiving)
        assert number_of(await soon(ends.peer.channel.receive())) == 0

    run(test)


def test_handlers_form_a_chain_plain_or_async_and_what_they_raise_is_logged(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        ends = Ends(pair)
        calls: list[str] = []
        last = asyncio.Event()

        def plain(message: Note) -> None:
            calls.append(f"plain {number_of(message)}")

        async def slow(message: Note) -> bool:
            await waiting.let_others_run()
            calls.append(f"slow {number_of(message)}")
            return number_of(message) == 1

        def raises(message: Note) -> None:
            raise RuntimeError("on purpose")

        def end(message: Note) -> None:
            calls.append(f"end {number_of(message)}")
            if number_of(message) == 2:
                last.set()

        for handler in (plain, slow, raises, end, plain):
            ends.peer.channel.on_message(handler)
        await ends.channel.send_many(number(i) for i in range(3))
        await soon(last.wait())
        assert calls == [
            "plain 0", "slow 0", "end 0", "plain 1", "slow 1", "plain 2", "slow 2", "end 2",
        ]  # fmt: skip
        assert "a handler raised" in caplog.text
        for handler in (plain, slow, raises, end):
            ends.peer.channel.remove_handler(handler)
        await ends.channel.send(number(3))
        assert number_of(await soon(ends.peer.channel.receive())) == 3
        ends.peer.channel.on_message(end)
        last.clear()
        await ends.channel.send(number(2))
        await soon(last.wait())

    run(test)


def test_handler_may_send_close_and_open_streams_while_others_send(pair: Pair) -> None:
    async def test() -> None:
        ends = Ends(pair)
        channel = ends.peer.channel

        async def handler(message: Note) -> None:
            await channel.send(message)
            if number_of(message) == 50:
                async with ends.peer.open_writer(1, compression="never") as writer:
                    await writer.write(bytes(50_000))
            elif number_of(message) == 99:
                await channel.flush()
                ends.peer.close()

        channel.on_message(handler)
        thread = Worker(lambda: [ends.peer.channel.sync.send(number(1000)) for _ in range(50)])

        async def talk() -> None:
            for i in range(100):
                await ends.channel.send(number(i))

        talking = asyncio.ensure_future(talk())
        reading = asyncio.ensure_future(ends.link.open_reader(1).readall())
        echoes = [number_of(message) async for message in ends.channel]
        assert [i for i in echoes if i < 1000] == list(range(100))
        assert await soon(reading) == bytes(50_000)
        await soon(talking)
        thread.join()

    run(test)


def test_link_handler_runs_first_and_the_others_in_order_after_it(pair: Pair) -> None:
    async def test() -> None:
        a, b = aio.Node.wrap(pair.a), aio.Node.wrap(pair.b)
        inbox = b.register(Identity(), "test", "order")
        events: list[Any] = []
        go, done = asyncio.Event(), asyncio.Event()
        mine = Identity()

        async def on_link(link: aio.Link) -> None:
            link.on_packet(lambda data: events.append(data))
            link.channel.register(Note)
            link.channel.on_message(lambda message: events.append(number_of(message)))
            link.on_identified(lambda identity: events.append(identity.hash))

            async def closed(link: aio.Link) -> None:
                events.append(link.closing)
                done.set()

            link.on_close(closed)
            await go.wait()
            events.append("greeted")

        inbox.on_link(on_link)
        link = await soon(a.connect(inbox.hash, "test", "order", identity=mine))
        for i in range(20):
            link.send(b"%d" % i)
        await link.channel.send_many(number(i) for i in range(5))
        await soon(link.channel.flush())
        link.close()
        settle(pair.b)
        assert events == []
        go.set()
        await soon(done.wait())
        assert events[0] == "greeted"
        assert [event for event in events if isinstance(event, bytes) and len(event) < 16] == [
            b"%d" % i for i in range(20)
        ]
        assert [event for event in events if isinstance(event, int)] == list(range(5))
        assert mine.hash in events
        assert events.count("the peer closed it") == 1

    run(test)


def test_packets_outside_links_and_their_receipts(pair: Pair) -> None:
    async def test() -> None:
        pair.link()
        a, b = aio.Node.wrap(pair.a), aio.Node.wrap(pair.b)
        inbox = b.register(Identity(), "test", "packets")
        inbox.set_proofs("all")
        got: asyncio.Queue[bytes] = asyncio.Queue()
        inbox.on_packet(got.put)
        await soon(a.request_path(inbox.hash))
        outbox = a.outbox(inbox.hash, "test", "packets")
        receipts = [outbox.send(b"%d" % i) for i in range(10)]
        for i, receipt in enumerate(receipts):
            assert receipt is not None
            assert await soon(receipt) is True
            assert receipt.rtt is not None
            assert await soon(got.get()) == b"%d" % i

    run(test)


def test_announces_are_iterated_from_the_call_until_the_node_stops(pair: Pair) -> None:
    async def test() -> None:
        a, b = aio.Node.wrap(pair.a), aio.Node.wrap(pair.b)
        wanted, other = b.register(Identity(), "test", "wanted"), b.register(Identity(), "test", "other")
        announces = a.announces("test.wanted")
        heard: list[bytes | None] = []
        handled = asyncio.Event()
        a.on_announce(lambda event: (heard.append(event.app_data), handled.set()))
        assert await other.announce(b"no")
        assert await wanted.announce(b"first")
        event = await soon(anext(announces))
        assert (event.destination, event.app_data) == (wanted.hash, b"first")
        await soon(handled.wait())
        assert heard[0] == b"no"
        (waiting_for,) = await asleep(anext(announces))
        waiting_for.cancel()
        with pytest.raises(asyncio.CancelledError):
            await soon(waiting_for)
        listener = pair.a._listener
        assert len(listener._announce_handlers) == 2
        dropped = a.announces()
        del dropped
        gc.collect()
        assert len(listener._announce_handlers) == 2
        async with a.announces() as closing:
            (last,) = await asleep(anext(closing))
            closing.close()
            with pytest.raises(StopAsyncIteration):
                await soon(last)
        assert len(listener._announce_handlers) == 2
        (last,) = await asleep(anext(announces))
        await a.stop()
        with pytest.raises(StopAsyncIteration):
            await soon(last)
        assert not a._tasks._tasks

    run(test)


# ------------------------------------------------------------------ connecting, starting, stopping


def test_cancelled_connect_leaves_no_link_and_no_waiter(pair: Pair) -> None:
    async def test() -> None:
        a = aio.Node.wrap(pair.a)
        inbox = pair.b.register(Identity(), "test", "far")
        for drop_all in (True, False):  # while a path is looked for, and while the proof is awaited
            pair.to_a.drop = anything if drop_all else (lambda raw: raw[0] & 3 == 3)
            if not drop_all:
                await soon(a.request_path(inbox.hash))
            (connecting,) = await asleep(a.connect(inbox.hash, "test", "far", timeout=None))
            connecting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await soon(connecting)
            assert not pair.a._reactor.engine.links
            assert not pair.a._listener._path_waiters

    run(test)


def test_connect_that_is_cancelled_as_its_link_comes_up_closes_it(pair: Pair) -> None:
    async def test() -> None:
        a = aio.Node.wrap(pair.a)
        inbox = pair.b.register(Identity(), "test", "late")
        await soon(a.request_path(inbox.hash))
        pair.to_a.hold()
        (connecting,) = await asleep(a.connect(inbox.hash, "test", "late"))
        pair.to_a.wait_held(1)
        pair.to_a.flow()
        settle(pair.a)
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await soon(connecting)
        settle(pair.b)
        assert not pair.a._reactor.engine.links
        assert not pair.b._reactor.engine.links

    run(test)


def test_connect_says_what_is_missing(pair: Pair) -> None:
    async def test() -> None:
        a = aio.Node.wrap(pair.a)
        inbox = pair.b.register(Identity(), "test", "errors")
        with pytest.raises(PathNotFound):
            await a.connect(bytes(16), "test", timeout=0.01)
        with pytest.raises(PathNotFound):
            await a.request_path(bytes(16), timeout=0.01)
        with pytest.raises(ValueError, match="16 bytes"):
            await a.connect(b"short", "test")
        await soon(a.request_path(inbox.hash))
        with pytest.raises(ValueError, match="is not named"):
            await a.connect(inbox.hash, "test", "other")
        inbox.accepts_links = False
        with pytest.raises(LinkTimeout):
            await a.connect(inbox.hash, "test", "errors", timeout=0.05)
        assert not pair.a._reactor.engine.links

    run(test)


def test_stop_ends_every_wait_and_waits_for_the_handlers(pair: Pair) -> None:
    async def test() -> None:
        ends = Ends(pair)
        pair.to_b.drop = anything
        connecting, searching = await asleep(
            ends.a.connect(ends.link.destination_hash, "test", "n1", timeout=None), ends.a.request_path(bytes(16), None)
        )
        ended: list[str] = []

        async def on_close(link: aio.Link) -> None:
            await waiting.let_others_run()
            ended.append(link.closing)
            await ends.a.stop()  # inside a handler

        ends.link.on_close(on_close)
        await soon(ends.a.stop())
        for task in (connecting, searching):
            with pytest.raises(NodeClosed):
                await soon(task)
        assert ended == ["the node was stopped"]
        assert not ends.a._tasks._tasks
        with pytest.raises(NodeClosed):
            await ends.a.connect(bytes(16), "test")

    run(test)


def test_handler_that_never_ends_is_cancelled_by_the_stop(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "HANDLER_PATIENCE", 0.01)

    async def test() -> None:
        ends = Ends(pair)
        cancelled = asyncio.Event()

        async def never(link: aio.Link) -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise

        ends.link.on_close(never)
        ends.link.close()
        await soon(ends.a.stop())
        await soon(cancelled.wait())

    run(test)


def test_cancelled_start_is_undone_and_cancelled_stop_is_carried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    entered, go = threading.Event(), threading.Event()
    start = pair.a._start

    def slow_start() -> None:
        entered.set()
        assert go.wait(PATIENCE)
        start()

    monkeypatch.setattr(pair.a, "_start", slow_start)

    async def test() -> None:
        node = aio.Node.wrap(pair.a)
        starting = asyncio.ensure_future(node.start())
        await asyncio.to_thread(entered.wait, PATIENCE)
        starting.cancel()
        await waiting.let_others_run()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await soon(starting)
        assert not node.is_running
        await node.start()
        assert node.is_running
        stopping = asyncio.ensure_future(node.stop())
        await waiting.let_others_run()
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await soon(stopping)
        await soon(node.stop())  # waits for the one under way
        assert not node.is_running

    run(test)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rnsfast-")]


# ------------------------------------------------------------------ streams


def test_streams_read_by_size_by_line_and_whole(pair: Pair) -> None:
    async def test() -> None:
        ends = Ends(pair)
        lines = [b"line %d\n" % i for i in range(1000)]
        async with ends.link.open_writer(1) as writer:
            await writer.write(b"head" + b"".join(lines) + b"the rest")
            await writer.drain()
        reader = ends.peer.open_reader(1)
        assert await soon(reader.readexactly(4)) == b"head"
        assert await soon(reader.readline()) == lines[0]
        assert await soon(reader.read(3)) == b"lin"
        got = [line async for line in reader]
        assert got == [lines[1][3:], *lines[2:], b"the rest"]
        assert await soon(reader.read(10)) == b""
        with pytest.raises(asyncio.IncompleteReadError):
            await reader.readexactly(1)
        assert ends.peer.channel.sync._engine.backlog == 0

    run(test)


def test_cancelled_reads_lose_no_data(pair: Pair) -> None:
    async def test() -> None:
        ends = Ends(pair)
        reader = ends.peer.open_reader(1)
        writer = ends.link.open_writer(1)
        makers: list[Callable[[], Coroutine[Any, Any, bytes]]] = [
            lambda: reader.readexactly(10_000), reader.readline, reader.readall,
        ]  # fmt: skip
        expected = b""
        for i, make in enumerate(makers):
            (reading,) = await asleep(make())
            for part in (b"a%d" % i, b"b%d" % i):
                await writer.write(part)
                await soon(ends.channel.flush())
                expected += part
                await waiting.let_others_run()
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await soon(reading)
        (reading,) = await asleep(reader.readexactly(len(expected) + 1))
        await writer.write(b".")
        assert await soon(reading) == expected + b"."
        (reading,) = await asleep(reader.read(5))
        pair.to_b.hold(is_message)
        await writer.write(b"x")
        pair.to_b.wait_held(1)
        pair.to_b.flow()
        settle(pair.b)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await soon(reading)
        await writer.close()
        assert await soon(reader.readall()) == b"x"

    run(test)


def test_cancelled_write_says_how_much_was_accepted_and_close_goes_on(pair: Pair) -> None:
    async def test() -> None:
        ends = Ends(pair)
        reader = ends.peer.open_reader(1)
        pair.to_a.hold(is_proof)
        writer = ends.link.open_writer(1, compression="never", buffer=50_000)
        data = bytes(range(256)) * 2000
        (writing,) = await asleep(writer.write(data))
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await soon(writing)
        accepted = writer.written
        assert 50_000 <= accepted < len(data)
        (closing,) = await asleep(writer.close())
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await soon(closing)
        pair.to_a.flow()
        assert await soon(reader.readall()) == data[:accepted]
        with pytest.raises(ValueError, match="closed for writing"):
            await writer.write(b"more")

    run(test)


def test_exception_in_the_block_gives_the_stream_up(pair: Pair) -> None:
    async def test() -> None:
        ends = Ends(pair)
        reader = ends.peer.open_reader(1)
        with pytest.raises(ZeroDivisionError):
            async with ends.link.open_writer(1) as writer:
                await writer.write(b"half")
                raise ZeroDivisionError
        assert await soon(reader.read(100)) == b"half"
        (waiting_for,) = await asleep(reader.readline())
        async with ends.link:
            pass  # closed at the end of the block
        with pytest.raises(StreamBroken):
            await soon(waiting_for)
        assert writer.closed

    run(test)


def test_what_arrived_before_the_cut_can_be_read(pair: Pair) -> None:
    async def test() -> None:
        ends = Ends(pair)
        reader = ends.peer.open_reader(1)
        await ends.link.open_writer(1).write(b"no newline")
        await soon(ends.channel.flush())
        (line,) = await asleep(reader.readline())
        ends.link.close()
        with pytest.raises(StreamBroken):
            await soon(line)
        assert reader.available == 10
        assert await soon(reader.read(4)) == b"no n"
        assert reader.read_available() == b"ewline"
        with pytest.raises(StreamBroken):
            await soon(reader.read(1))
        reader.close()
        with pytest.raises(ValueError, match="closed for reading"):
            await reader.read(1)

    run(test)


# ------------------------------------------------------------------ loops and accumulation


def test_loops_in_several_threads_share_a_node(pair: Pair) -> None:
    link, peer = pair.link()
    for end in (link, peer):
        end.channel.register(Note)

    def sending(start: int) -> None:
        async def test() -> None:
            channel = aio.Link(aio.Node.wrap(pair.a), link).channel
            for i in range(100):
                await channel.send(number(start + i))

        run(test)

    def receiving() -> list[int]:
        async def test() -> list[int]:
            channel = aio.Link(aio.Node.wrap(pair.b), peer).channel
            return [number_of(await soon(channel.receive())) for _ in range(100)]

        result: list[int] = run(test)
        return result

    receivers = [Worker(receiving) for _ in range(4)]
    senders = [Worker(sending, 1000 * i) for i in range(4)]
    for sender in senders:
        sender.result()
    got = [i for receiver in receivers for i in receiver.result()]
    assert sorted(got) == sorted(1000 * i + j for i in range(4) for j in range(100))


def test_handlers_run_in_the_loop_that_registered_them(pair: Pair) -> None:
    link, peer = pair.link()
    peer.channel.register(Note)
    wrapped = aio.Link(aio.Node.wrap(pair.b), peer)
    called: list[threading.Thread] = []
    ready, done = threading.Barrier(2), threading.Event()

    def other_loop() -> None:
        async def test() -> None:
            async def handler(message: Note) -> None:
                called.append(threading.current_thread())

            await soon(asyncio.to_thread(ready.wait, PATIENCE))
            wrapped.channel.on_message(handler)
            await soon(asyncio.to_thread(ready.wait, PATIENCE))
            await soon(asyncio.to_thread(done.wait, PATIENCE))

        run(test)

    worker = Worker(other_loop)

    async def test() -> None:
        last = asyncio.Event()
        wrapped.channel.on_message(lambda message: called.append(threading.current_thread()))
        await soon(asyncio.to_thread(ready.wait, PATIENCE))
        await soon(asyncio.to_thread(ready.wait, PATIENCE))
        wrapped.channel.on_message(lambda message: last.set())
        await asyncio.to_thread(link.channel.send, number(1))
        await soon(last.wait())

    try:
        run(test)
    finally:
        done.set()
    worker.result()
    assert called == [threading.main_thread(), worker.thread]


@pytest.mark.slow
def test_sustained_transfer_leaves_no_task_future_or_thread(pair: Pair) -> None:
    async def test() -> None:
        ends = Ends(pair)
        await ends.channel.send(number(0))
        await soon(ends.peer.channel.receive())
        tasks, threads = len(asyncio.all_tasks()), threading.active_count()
        loop: Any = asyncio.get_running_loop()

        async def talk() -> None:
            for i in range(5000):
                await ends.channel.send(number(i), timeout=PATIENCE)

        talking = [asyncio.ensure_future(talk()) for _ in range(4)]
        most = 0
        for _ in range(20_000):
            await soon(ends.peer.channel.receive())
            most = max(most, threading.active_count())
        await asyncio.gather(*talking)
        del talking
        await soon(ends.channel.flush())
        assert len(asyncio.all_tasks()) == tasks
        assert most <= threads + 2
        assert ends.nothing_waits()
        assert not ends.peer.channel.sync.has_waiters
        assert len(loop._scheduled) <= 2 * 100 + 4  # cancelled timers, which the loop cleans up when there are 100
        gc.collect()
        futures = [f for f in gc.get_objects() if isinstance(f, asyncio.Future) and not isinstance(f, asyncio.Task)]
        assert len([future for future in futures if not future.done()]) <= 4

    run(test)
