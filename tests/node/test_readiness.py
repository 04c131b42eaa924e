"""Waiting for room, in threads.  Protocol 05, section 13.6: R1 to R9, R11 and R14; the others are beside this file.

Packets move when a test releases them and time when it moves the clock, so a waiter that goes on was woken by what the
test has just done. R15 is a matter of the benchmark; what it stands on, that the refill needs no other thread and no
time, is tested here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from rnsfast import ChannelFull, Link, LinkClosed, NodeClosed, StreamBroken
from rnsfast.engine.channel import REPEAT_WAIT
from rnsfast.engine.linkstate import State
from rnsfast.engine.window import Window
from tests.loopback import (
    Clock,
    Note,
    Pair,
    Sleepers,
    Worker,
    anything,
    is_message,
    is_proof,
    number,
    number_of,
    settle,
)

INITIAL = 2  # the window a channel begins with


def fill(link: Link, start: int = 0) -> int:
    """Send until the window is full; returns how many it took."""
    count = 0
    while True:
        try:
            link.channel.send(number(start + count), timeout=0)
        except ChannelFull:
            return count
        count += 1


def full(pair: Pair) -> tuple[Link, Link]:
    """A link whose window is full, and the proofs held."""
    link, peer = pair.link()
    peer.channel.register(Note)
    pair.to_a.hold(is_proof)
    assert fill(link) == INITIAL
    pair.to_a.wait_held(INITIAL)
    return link, peer


def unused(link: Link) -> bool:
    """Nobody waits on the channel, and nothing waits for it."""
    channel = link.channel
    return not (channel.has_waiters or channel._engine.outbox or channel._engine.granted)


# ------------------------------------------------------------------ R1, R2, R3


def test_delivery_wakes_a_waiter_without_time_passing(pair: Pair, clock: Clock, sleepers: Sleepers) -> None:
    link, _ = full(pair)
    ready, sending = Worker(link.channel.wait_ready), Worker(link.channel.send, number(2))
    sleepers.await_one(2)
    before = clock.now
    pair.to_a.release(1)
    sending.result()
    pair.to_a.wait_held(INITIAL)
    assert ready.is_running or ready.result()  # the sender may have taken the room first: two slots, one sender
    pair.to_a.flow()
    assert ready.result() is True
    assert clock.now - before < 0.1  # the clock creeps by a microsecond a look, nobody moved it
    assert unused(link)


def test_interrupted_sender_leaves_nothing_behind(pair: Pair, sleepers: Sleepers) -> None:
    link, peer = full(pair)

    def interrupt() -> None:
        raise KeyboardInterrupt

    sleepers.before = interrupt
    interrupted = Worker(link.channel.send, number(99))
    with pytest.raises(KeyboardInterrupt):
        interrupted.result()
    assert unused(link)
    pair.to_a.flow()
    link.channel.flush(5.0)
    assert [number_of(peer.channel.receive(5.0)) for _ in range(INITIAL)] == [0, 1]
    assert link.channel._engine.next_tx == INITIAL  # nothing was queued, no number was used


def test_wait_gives_up_at_its_deadline_and_not_before(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    link, _ = full(pair)
    now = [50.0]
    monkeypatch.setattr("rnsfast.node.waiting.monotonic", lambda: now[0])
    waits: list[float | None] = []

    def condition(lock: Any) -> threading.Condition:
        class Condition(threading.Condition):
            def wait(self, timeout: float | None = None) -> bool:
                waits.append(timeout)
                assert timeout is not None
                now[0] += timeout - 1.0 if len(waits) == 1 else timeout  # woken early once, for nothing
                return False

        return Condition(lock)

    monkeypatch.setattr("rnsfast.node.waiting.threading.Condition", condition)
    with pytest.raises(ChannelFull, match=r"stayed full for 7\.0 s, 1 message was not sent"):
        link.channel.send(number(2), timeout=7.0)
    assert waits == [7.0, 1.0]
    assert link.channel.wait_ready(3.0) is False
    assert now[0] == 60.0
    assert unused(link)
    assert not pair.a._reactor._calls or len(pair.a._reactor._calls) == 1  # no timer but that of saving


def test_send_that_may_not_wait_does_not(pair: Pair) -> None:
    link, _ = full(pair)
    assert not link.channel.is_ready
    assert link.channel.wait_ready(0) is False
    with pytest.raises(ChannelFull):
        link.channel.send(number(2), timeout=0)
    assert unused(link)


# ------------------------------------------------------------------ R4, R5


def test_sixteen_senders_go_one_slot_at_a_time_in_order_of_arrival(pair: Pair, sleepers: Sleepers) -> None:
    link, peer = full(pair)
    senders = []
    for i in range(16):
        senders.append(Worker(link.channel.send, number(INITIAL + i)))
        sleepers.await_one()
    engine, model = link.channel._engine, Window(link.rtt)
    sent, released = INITIAL, 0
    while released < INITIAL + 16:
        with pytest.raises(ChannelFull):  # nobody overtakes those who wait
            if engine.outbox:
                link.channel.send(number(1000), timeout=0)
            else:
                raise ChannelFull("none waits any more")
        pair.to_a.release(1)
        released += 1
        model.delivered(link.rtt)
        sent = min(released + model.size, INITIAL + 16)  # two while the window grows
        pair.to_a.wait_held(sent - released)
        settle(pair.a)
        assert engine.next_tx == sent
        assert len(engine.ring) == sent - released
    for sender in senders:
        sender.result()
    received = [number_of(peer.channel.receive(5.0)) for _ in range(INITIAL + 16)]
    assert received == list(range(INITIAL + 16))
    assert unused(link)


def test_a_thousand_waiters_are_woken_and_none_is_lost(pair: Pair, sleepers: Sleepers) -> None:
    link, peer = full(pair)
    senders = [Worker(link.channel.send, number(INITIAL + i)) for i in range(500)]
    ready = [Worker(link.channel.wait_ready) for _ in range(500)]
    sleepers.await_one(1000)
    pair.to_a.flow()
    for worker in senders + ready:
        worker.result()
    link.channel.flush(5.0)
    received = {number_of(peer.channel.receive(5.0)) for _ in range(INITIAL + 500)}
    assert received == set(range(INITIAL + 500))
    assert unused(link)


def test_room_of_a_sender_that_gives_up_goes_to_the_next(pair: Pair, sleepers: Sleepers) -> None:
    link, peer = full(pair)
    with pytest.raises(ChannelFull):
        Worker(link.channel.send, number(77), 0.01).result()
    sleepers.await_one()
    second = Worker(link.channel.send, number(2))
    sleepers.await_one()
    pair.to_a.release(1)
    second.result()
    assert [number_of(peer.channel.receive(5.0)) for _ in range(3)] == [0, 1, 2]


def test_window_that_grows_wakes_two(pair: Pair, sleepers: Sleepers) -> None:
    link, _ = full(pair)
    workers = [Worker(link.channel.send, number(2 + i)) for i in range(2)]
    sleepers.await_one(2)
    pair.to_a.release(1)
    for worker in workers:
        worker.result()


# ------------------------------------------------------------------ R6


def _tries_used_up(pair: Pair, clock: Clock, link: Link, peer: Link) -> None:
    pair.to_b.drop = anything
    for _ in range(6):
        clock.advance(1.2, pair.a)
    assert "5 tries" in link.closing


def _silence(pair: Pair, clock: Clock, link: Link, peer: Link) -> None:
    pair.to_a.drop = pair.to_b.drop = anything
    for _ in range(2):
        clock.advance(70.0, pair.a)
    assert link.closing == "the peer was silent for too long"


ENDS: dict[str, Callable[[Pair, Clock, Link, Link], Any]] = {
    "closed here": lambda pair, clock, link, peer: link.close(),
    "closed by the peer": lambda pair, clock, link, peer: peer.close(),
    "tries used up": _tries_used_up,
    "silence": _silence,
    "interface closed": lambda pair, clock, link, peer: pair.end_a.close(),
    "peer's interface closed": lambda pair, clock, link, peer: pair.end_b.close(),
    "node stopped": lambda pair, clock, link, peer: pair.a.stop(),
    "peer's node stopped": lambda pair, clock, link, peer: pair.b.stop(),
}


@pytest.mark.parametrize("end", ENDS)
def test_every_end_of_a_link_wakes_every_waiter_with_the_reason(
    pair: Pair, clock: Clock, sleepers: Sleepers, end: str
) -> None:
    link, peer = full(pair)
    channel = link.channel
    writer, closing = link.open_writer(3, compression="never", buffer=1000), link.open_writer(4)
    reader, whole = link.open_reader(5), link.open_reader(6)
    receipt = link.send(b"nobody proves this")
    raise_closed = {
        "ready": Worker(channel.wait_ready), "send": Worker(channel.send, number(2)), "flush": Worker(channel.flush),
        "receive": Worker(channel.receive), "write": Worker(writer.write, b"x" * 5000), "close": Worker(closing.close),
    }  # fmt: skip
    broken = {"read": Worker(reader.read, 10), "readall": Worker(whole.readall)}
    closed, proved = Worker(link.wait_closed), Worker(receipt.wait)
    sleepers.await_one(10)

    ENDS[end](pair, clock, link, peer)

    for name, worker in raise_closed.items():
        with pytest.raises(LinkClosed):
            worker.result()
        assert isinstance(worker.error, LinkClosed), name
        assert worker.error.reason == link.closing
    for worker in broken.values():
        with pytest.raises(StreamBroken):
            worker.result()
    assert closed.result() is True
    assert proved.result() is False
    for later in (channel.wait_ready, channel.flush, channel.receive, lambda: channel.send(number(3))):
        with pytest.raises(LinkClosed):
            later()
    with pytest.raises(LinkClosed):
        channel.send(number(3), timeout=0)
    with pytest.raises(LinkClosed):
        writer.write(b"more")
    with pytest.raises(LinkClosed):
        link.send(b"more")
    assert not channel.is_ready
    assert unused(link)
    assert not link._engine.outstanding


def test_stopping_ends_a_wait_for_a_path_and_for_a_link(pair: Pair, sleepers: Sleepers) -> None:
    link, _ = pair.link()
    pair.to_b.drop = anything
    unanswered = Worker(lambda: pair.a.connect(link.destination_hash, "test", "n1", timeout=None))
    sleepers.await_one()
    unknown = Worker(lambda: pair.a.request_path(bytes(16), None))
    sleepers.await_one()
    pair.a.stop()
    for worker in (unanswered, unknown):
        with pytest.raises(NodeClosed):
            worker.result()
    with pytest.raises(NodeClosed):
        pair.a.connect(bytes(16), "test")


def test_node_that_stops_between_path_and_request_leaves_no_link_waiting(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, _ = pair.link()
    ask = pair.a._ask_for_link

    def stop_first(*args: Any) -> Link:
        pair.a.stop()
        return ask(*args)

    monkeypatch.setattr(pair.a, "_ask_for_link", stop_first)
    with pytest.raises(NodeClosed):
        Worker(lambda: pair.a.connect(link.destination_hash, "test", "n1", timeout=None)).result()


def test_link_that_is_closed_before_connect_can_return_it_says_so(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    decided = pair.a._is_connected

    def close_first(link: Link, identity: Any) -> bool:
        link.close()
        return decided(link, identity)

    monkeypatch.setattr(pair.a, "_is_connected", close_first)
    with pytest.raises(LinkClosed):
        pair.link()


# ------------------------------------------------------------------ R7


def test_delivery_between_look_and_sleep_is_not_lost(pair: Pair, sleepers: Sleepers) -> None:
    link, _ = full(pair)
    sleepers.before = pair.to_a.release
    assert Worker(link.channel.wait_ready).result() is True
    fill(link, 2)
    sleepers.before = pair.to_a.flow
    Worker(link.channel.send, number(9)).result()


def test_close_between_look_and_sleep_is_not_lost(pair: Pair, sleepers: Sleepers) -> None:
    link, _ = full(pair)
    closers: list[Worker] = []
    sleepers.before = lambda: closers.append(Worker(link.close))
    with pytest.raises(LinkClosed):
        Worker(link.channel.send, number(9)).result()
    closers[0].result()


def test_message_that_arrives_between_look_and_sleep_is_not_lost(pair: Pair, sleepers: Sleepers) -> None:
    link, peer = pair.link()
    peer.channel.register(Note)
    pair.to_b.hold(is_message)
    link.channel.send(number(5))
    sleepers.before = pair.to_b.flow
    assert number_of(Worker(peer.channel.receive).result()) == 5


def test_proof_that_arrives_inside_the_transmit_call_counts(pair: Pair) -> None:
    link, peer = pair.link()
    peer.channel.register(Note)
    pair.to_a.inline = pair.to_b.inline = True
    for i in range(100):
        link.channel.send(number(i), timeout=0)  # never full: each is proved before `send` returns
    assert link.channel._engine.is_idle
    assert link.channel.flush(0) is True
    assert [number_of(peer.channel.receive(0)) for _ in range(100)] == list(range(100))
    assert link.channel._engine.retransmissions == 0


# ------------------------------------------------------------------ R8, R9


def test_link_that_comes_back_from_stale_wakes_without_a_proof(pair: Pair, clock: Clock, sleepers: Sleepers) -> None:
    link, peer = pair.link()
    peer.channel.register(Note)
    link.channel.register(Note)
    pair.to_b.hold()
    clock.advance(11.0, pair.b)  # twice the shortest keepalive interval
    assert peer.state is State.STALE
    assert not peer.channel.is_ready
    ready, sending = Worker(peer.channel.wait_ready), Worker(peer.channel.send, number(7))
    sleepers.await_one(2)
    link.send(b"still here")
    pair.to_b.flow()
    assert ready.result() is True
    sending.result()
    assert number_of(link.channel.receive(5.0)) == 7


def test_window_that_shrinks_wakes_nobody(pair: Pair, clock: Clock, sleepers: Sleepers) -> None:
    link, _ = full(pair)
    pair.to_a.flow()
    link.channel.flush(5.0)
    for i in range(30):
        link.channel.send(number(100 + i))
    link.channel.flush(5.0)
    pair.to_a.hold(is_proof)
    window = link.channel._engine.window.size
    count = fill(link, 200)
    assert count == window > 16
    pair.to_a.wait_held(count)
    waiting = Worker(link.channel.wait_ready)
    sleepers.await_one()
    waits = sleepers.waits
    # Later timeouts follow the ring's length: 5 s are beyond every first one, and before any second one.
    clock.advance(5.0, pair.a)
    shrunk = link.channel._engine.window.size
    assert shrunk < window
    settle(pair.b)  # every message was repeated
    clock.advance(REPEAT_WAIT, pair.b)
    pair.to_a.wait_held(2 * count)  # and proved again
    assert waiting.is_running
    assert sleepers.waits == waits
    sent = link.channel._engine.next_tx
    pair.to_a.release(count - shrunk)
    settle(pair.a)
    assert link.channel._engine.next_tx == sent
    pair.to_a.flow()
    assert waiting.result() is True


# ------------------------------------------------------------------ R11


def test_waker_that_raises_keeps_nobody_asleep_and_delivery_goes_on(pair: Pair, sleepers: Sleepers) -> None:
    link, _ = full(pair)
    rung: list[int] = []

    def broken() -> None:
        raise OSError("my event loop is gone")

    with link.channel._lock:
        for i in range(1000):
            link.channel.watch(broken if i == 500 else lambda i=i: rung.append(i))
    thread = Worker(link.channel.wait_ready)
    sleepers.await_one()
    pair.to_a.release(1)
    assert thread.result() is True
    settle(pair.a)
    assert rung == [i for i in range(1000) if i != 500]
    pair.to_a.release()
    settle(pair.a)
    assert len(rung) == 999  # each was rung once
    assert unused(link)


# ------------------------------------------------------------------ R14, R15


def test_range_rule_stops_the_sender_and_its_proof_lets_it_go_on_at_once(pair: Pair) -> None:
    link, peer = pair.link()
    peer.channel.register(Note)
    for i in range(60):
        link.channel.send(number(i))
    link.channel.flush(5.0)
    engine, oldest, before = link.channel._engine, link.channel._engine.next_tx, pair.to_b.carried
    first: list[bytes] = []

    def proves_the_oldest(raw: bytes) -> bool:
        if not first and is_proof(raw):
            first.append(raw[19:51])
        return raw[19:51] in first

    pair.to_a.hold(proves_the_oldest)
    sender = Worker(lambda: [link.channel.send(number(100 + i)) for i in range(150)])
    pair.to_b.wait_carried(before + 49)  # the receiver's span: the oldest and 48 after it
    for node in (pair.b, pair.a):
        settle(node)
    assert (engine.next_tx - oldest) & 0xFFFF == 49
    assert list(engine.ring) == [oldest]
    assert engine.window.size == 48
    assert not link.channel.is_ready
    assert sender.is_running
    pair.to_a.hold(is_proof)
    pair.to_a.release(1)
    pair.to_b.wait_carried(before + 49 + 48)  # all slots at once: nothing else has been proved
    settle(pair.a)
    assert pair.to_b.carried == before + 49 + 48
    pair.to_a.flow()
    sender.result()


def test_refill_happens_where_the_proof_is_handled_and_needs_no_writer(pair: Pair, sleepers: Sleepers) -> None:
    link, peer = pair.link()
    peer.open_reader(1)
    writer = link.open_writer(1, compression="never", buffer=100_000)
    pair.to_a.hold(is_proof)
    blocked = Worker(writer.write, bytes(400_000))
    sleepers.await_one()
    pair.to_a.wait_held(INITIAL)
    pair.to_b.senders = senders = []
    sent_at: list[float] = []
    settled: list[float] = []
    engine = link.channel._engine
    proved, transmit = engine.proved, engine._transmit
    engine.proved = lambda envelopes, now: (settled.append(now), proved(envelopes, now))  # type: ignore[method-assign]
    engine._transmit = lambda batch, now: (sent_at.append(now), transmit(batch, now))  # type: ignore[method-assign]
    pair.to_a.release(1)
    settle(pair.a)
    assert blocked.is_running  # the buffer is still above its low mark
    assert len(senders) >= 1
    assert set(senders) == {pair.a._reactor._thread.name}
    assert sent_at == settled  # in the same turn, at the same time: there is no interval to be found
    pair.to_a.flow()
    blocked.result()
