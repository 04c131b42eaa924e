"""Channels as applications see them: types, handlers, errors, re-entrance.  Protocol 05, sections 3.7 and 4; R12."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest

from rnsfast import ChannelFull, Link, LinkClosed, MessageTooLarge, MessageTypeError
from rnsfast.engine.linkstate import State
from rnsfast.node.mailbox import COST, HELD
from rnsfast.wire.drop import Drop
from tests.loopback import (
    PATIENCE,
    Note,
    Pair,
    Sleepers,
    Worker,
    is_message,
    is_proof,
    joined,
    number,
    number_of,
    settle,
)
from tests.vectors_support import Case, by_name, vectors


def quiet(pair: Pair, link: Link) -> None:
    """Return when everything that was sent has been handed to the handlers of the peer."""
    link.channel.flush(PATIENCE)
    done = threading.Event()
    peer = next(iter(pair.b._reactor.engine.links.values())).owner
    with pair.b._reactor.turn:
        pair.b._reactor.enqueue(peer._strand, done.set)
    assert done.wait(PATIENCE)


# ------------------------------------------------------------------ vectors

ANSWERS: dict[str, Any] = {"true": True, "false": False, "none": None, "truthy": "yes", "record": None}


@pytest.mark.parametrize("case", vectors("channel", "handler_chain"), ids=by_name)
def test_handlers_are_called_as_the_reference_calls_them(pair: Pair, case: Case) -> None:
    link, peer = pair.link()
    peer.channel.register(Note)
    called: list[int] = []

    def make(index: int, kind: str) -> Any:
        def handler(message: Note) -> Any:
            called.append(index)
            if kind == "raise":
                raise RuntimeError("on purpose")
            return ANSWERS[kind]

        return handler

    for index, kind in enumerate(case["handlers"]):
        peer.channel.on_message(make(index, kind))
    link.channel.send(Note(b"x"))
    quiet(pair, link)
    assert called == case["called"]
    assert peer.channel._engine.next_rx == case["next_rx"]


class Highest(Note):
    MSGTYPE = 0xEFFF


class FirstReserved(Note):
    MSGTYPE = 0xF000


class OfStreams(Note):
    MSGTYPE = 0xFF00


class WithoutType(Note):
    MSGTYPE = None  # type: ignore[assignment]


class NoMessage:
    MSGTYPE = 0x0101


class NeedsArguments(Note):
    def __init__(self, raw: bytes) -> None:
        super().__init__(raw)


class Unregistered(Note):
    MSGTYPE = 0x0202


class TooHigh(Note):
    MSGTYPE = 0x10000


CODES = {MessageTooLarge: 5, ChannelFull: 3, LinkClosed: 3}


def test_registration_and_sending_fail_as_in_the_reference_and_use_no_number(pair: Pair) -> None:
    link, _ = pair.link()
    pair.to_a.hold(is_proof)
    channel, engine = link.channel, link.channel._engine
    engine.window.size = 50
    engine.mdu = 425

    def stale() -> None:
        link._engine.state = State.STALE
        try:
            channel.send(Note(), timeout=0)
        finally:
            link._engine.state = State.ACTIVE

    def window_full() -> None:
        engine.window.size = len(engine.ring)
        channel.send(Note(), timeout=0)

    def closed() -> None:
        link.close()
        channel.send(Note())

    steps = {
        "register_ordinary_0x0101": lambda: channel.register(Note),
        "register_0xefff": lambda: channel.register(Highest),
        "register_0xf000": lambda: channel.register(FirstReserved),
        "register_0xff00": lambda: channel.register(OfStreams),
        "register_type_none": lambda: channel.register(WithoutType),
        "register_not_a_message_class": lambda: channel.register(NoMessage),
        "register_no_default_constructor": lambda: channel.register(NeedsArguments),
        "send_type_none": lambda: channel.send(WithoutType()),
        "send_payload_equal_channel_mdu": lambda: channel.send(Note(bytes(425))),
        "send_payload_channel_mdu_plus_1": lambda: channel.send(Note(bytes(426))),
        "send_unregistered_type": lambda: channel.send(Unregistered()),
        "send_reserved_type": lambda: channel.send(FirstReserved()),
        "send_msgtype_above_16_bits": lambda: channel.send(TooHigh()),
        "send_window_full": window_full,
        "send_link_stale": stale,
        "send_link_closed": closed,
    }
    for case in vectors("channel", "errors"):
        error: BaseException | None = None
        try:
            steps[case["name"]]()
        except (MessageTypeError, MessageTooLarge, ChannelFull, LinkClosed) as raised:
            error = raised
        assert (error is None) == (case["error"] is None), (case["name"], error)
        if error is not None and case.get("code") is not None:
            code = error.code if isinstance(error, MessageTypeError) else CODES[type(error)]
            assert code == case["code"], case["name"]
        assert engine.next_tx == case["next_sequence_after"], case["name"]


# ------------------------------------------------------------------ handlers


def test_handlers_added_late_get_what_has_arrived_and_one_added_twice_counts_once(pair: Pair) -> None:
    link, peer = pair.link()
    peer.channel.register(Note)
    link.channel.send_many([number(i) for i in range(2)])
    link.channel.flush(5.0)
    got: list[int] = []

    def handler(message: Note) -> None:
        got.append(number_of(message))

    peer.channel.on_message(handler)
    peer.channel.on_message(handler)
    link.channel.send(number(2))
    quiet(pair, link)
    assert got == [0, 1, 2]
    peer.channel.remove_handler(handler)
    peer.channel.remove_handler(handler)
    link.channel.send(number(3))
    link.channel.flush(5.0)
    assert number_of(peer.channel.receive(5.0)) == 3


def test_handler_that_leaves_in_the_middle_of_a_batch_leaves_the_rest_to_receive(
    pair: Pair, sleepers: Sleepers
) -> None:
    link, peer = pair.link()
    channel = peer.channel
    channel.register(Note)
    link.channel.send_many([number(i) for i in range(5)])
    link.channel.flush(5.0)

    greeted, go_on = threading.Event(), threading.Event()

    def greet(message: Note) -> None:
        channel.remove_handler(greet)
        greeted.set()
        assert go_on.wait(PATIENCE)

    channel.on_message(greet)
    assert greeted.wait(PATIENCE)
    receiving = Worker(channel.receive)
    sleepers.await_one()
    link.channel.send(number(5))  # does not overtake what the handler leaves
    link.channel.flush(5.0)
    go_on.set()
    assert number_of(receiving.result()) == 1
    assert [number_of(channel.receive(5.0)) for _ in range(4)] == [2, 3, 4, 5]
    with peer._lock:
        assert channel._engine.backlog == 0


def test_handler_that_adds_and_removes_takes_effect_from_the_next_message(pair: Pair) -> None:
    link, peer = pair.link()
    channel = peer.channel
    channel.register(Note)
    calls: list[tuple[str, int]] = []

    def second(message: Note) -> None:
        calls.append(("second", number_of(message)))

    def first(message: Note) -> None:
        calls.append(("first", number_of(message)))
        channel.remove_handler(first)
        channel.on_message(second)

    channel.on_message(first)
    for i in range(3):
        link.channel.send(number(i))
    quiet(pair, link)
    assert calls == [("first", 0), ("second", 1), ("second", 2)]


def test_message_that_cannot_be_read_is_counted_and_skipped(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Note):
        MSGTYPE = 0x0303
        made = 0

        def __init__(self) -> None:
            Broken.made += 1
            if Broken.made == 3:  # the first is made when it is registered
                raise ValueError("cannot be made any more")

        def unpack(self, raw: bytes) -> None:
            raise ValueError("unreadable")

    class Sent(Note):
        MSGTYPE = 0x0303

    link, peer = pair.link()
    peer.channel.register(Note, Broken)
    link.channel.send_many([Sent(b"x"), Sent(b"y"), Unregistered(b"z"), number(1)])
    assert number_of(peer.channel.receive(5.0)) == 1
    drops = peer._engine.port.drops
    assert drops[Drop.CHANNEL_PAYLOAD] == 2
    assert drops[Drop.CHANNEL_TYPE] == 1
    assert "a message of type 0x0303 was skipped: Broken.unpack raised" in caplog.text


def test_receive_gives_what_had_arrived_after_the_close_and_then_the_reason(pair: Pair) -> None:
    link, peer = pair.link()
    peer.channel.register(Note)
    link.channel.send_many([number(0), number(1)])
    link.channel.flush(5.0)
    link.close()
    assert peer.wait_closed(5.0)
    assert [number_of(peer.channel.receive()) for _ in range(2)] == [0, 1]
    with pytest.raises(LinkClosed, match="the peer closed it"):
        peer.channel.receive()
    with pytest.raises(TimeoutError):
        pair.link()[1].channel.receive(0)


def test_send_many_says_how_many_are_not_sent(pair: Pair) -> None:
    link, peer = pair.link()
    peer.channel.register(Note)
    pair.to_a.hold(is_proof)
    with pytest.raises(ChannelFull) as full:
        link.channel.send_many([number(i) for i in range(5)], timeout=0)
    assert full.value.unsent == 3
    assert not link.channel._engine.outbox
    pair.to_a.flow()
    link.channel.flush(5.0)
    assert link.channel._engine.next_tx == 2


# ------------------------------------------------------------------ R12


def test_handler_may_call_everything_while_another_thread_sends(pair: Pair) -> None:
    answers: queue.SimpleQueue[int] = queue.SimpleQueue()
    opened: list[Any] = []

    def on_link(link: Link) -> None:
        channel = link.channel
        channel.register(Note)

        def handler(message: Note) -> None:
            value = number_of(message)
            channel.send(number(value))  # waits for room, in the middle of a delivery
            if value == 10:
                opened.append(link.open_writer(3, compression="never"))
                opened[0].write(bytes(100_000))
                channel.on_message(lambda message: answers.put(number_of(message)))
            elif value == 20:
                opened.append(link.open_reader(4))
                link.send(b"packet")
                assert channel.flush(PATIENCE)
            elif value == 199:
                opened[0].close()
                link.close()

        channel.on_message(handler)

    link, peer = pair.link(on_link)
    link.channel.register(Note)
    echoes: queue.SimpleQueue[int] = queue.SimpleQueue()
    link.channel.on_message(lambda message: echoes.put(number_of(message)))
    reader = link.open_reader(3)
    others = [Worker(lambda: [peer.channel.send(number(1000)) for _ in range(50)]) for _ in range(3)]
    for i in range(200):
        link.channel.send(number(i))
    for worker in others:
        worker.result()
    assert reader.readall() == bytes(100_000)
    assert link.wait_closed(PATIENCE)
    assert peer.wait_closed(PATIENCE)


def test_handler_that_blocks_holds_up_its_own_link_only(pair: Pair) -> None:
    release, reached = threading.Event(), threading.Event()

    def on_link(link: Link) -> None:
        link.channel.register(Note)

    slow, slow_peer = pair.link(on_link)
    fast, fast_peer = pair.link(on_link)

    def block(message: Note) -> None:
        reached.set()
        assert release.wait(PATIENCE)

    slow_peer.channel.on_message(block)
    got: queue.SimpleQueue[int] = queue.SimpleQueue()
    fast_peer.channel.on_message(lambda message: got.put(number_of(message)))
    slow.channel.send(number(0))
    assert reached.wait(PATIENCE)
    for i in range(100):
        fast.channel.send(number(i), PATIENCE)
        slow.channel.send(number(i), PATIENCE)  # proved on arrival, handled or not
    assert [got.get(timeout=PATIENCE) for _ in range(100)] == list(range(100))
    release.set()


def test_waiting_on_the_reactor_thread_is_refused(pair: Pair) -> None:
    link, _ = pair.link()
    errors: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

    def calls() -> None:
        for call in (
            lambda: link.channel.send(number(0)), link.channel.wait_ready, link.channel.flush, link.channel.receive,
            link.wait_closed, link.open_reader(1).read, lambda: pair.a.connect(bytes(16), "x"),
        ):  # fmt: skip
            try:
                call()
            except RuntimeError as error:
                errors.put(error)
        link.channel.send(number(0), timeout=0)  # what does not wait may be called

    pair.a._reactor.call_at(0.0, calls)
    settle(pair.a)
    assert errors.qsize() == 7
    assert "cannot be made on the node's reactor thread" in str(errors.get())
    assert link.channel._engine.next_tx == 1


# ------------------------------------------------------------------ packets


def test_packets_keep_their_order_whenever_the_handler_is_set(pair: Pair, sleepers: Sleepers) -> None:
    link, peer = pair.link()
    stopped, go = threading.Event(), threading.Event()
    with pair.a._reactor.turn:
        pair.a._reactor.enqueue(link._strand, lambda: (stopped.set(), go.wait(PATIENCE)))  # type: ignore[arg-type]
    assert stopped.wait(PATIENCE)
    got: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    for i in range(20):
        peer.send(b"%d" % i)
    settle(pair.b)
    settle(pair.a)
    go.set()
    with pair.a._reactor.turn:
        pair.a._reactor.enqueue(link._strand, lambda: link.on_packet(got.put))
    for i in range(20, 40):
        peer.send(b"%d" % i)
    assert [got.get(timeout=PATIENCE) for _ in range(40)] == [b"%d" % i for i in range(40)]


def test_packets_nobody_wants_are_held_up_to_a_bound_and_then_counted(pair: Pair) -> None:
    link, peer = pair.link()
    room = HELD // (10_000 + COST)
    for i in range(room + 6):
        peer.send(b"%10000d" % i)
    settle(pair.b)
    settle(pair.a)
    assert link._engine.port.drops[Drop.PACKET_NO_HANDLER] == 6
    got: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    link.on_packet(got.put)
    assert [int(got.get(timeout=PATIENCE)) for _ in range(room)] == list(range(room))


def test_receipt_is_proved_when_the_application_says_so(pair: Pair) -> None:
    from rnsfast import Identity

    inbox = pair.b.register(Identity(), "test", "proofs")
    inbox.set_proofs("app", lambda data: {b"yes": True, b"no": False}[data])  # raises for others
    inbox.on_link(lambda link: link.on_packet(lambda data: None))
    link = pair.a.connect(inbox.hash, "test", "proofs", timeout=PATIENCE)
    assert link.send(b"yes").wait(PATIENCE) is True
    refused, odd = link.send(b"no"), link.send(b"what?")
    assert link.send(b"yes").wait(PATIENCE) is True
    link.close()
    assert refused.wait(PATIENCE) is False
    assert odd.wait(PATIENCE) is False


# ------------------------------------------------------------------ loss


@pytest.mark.parametrize("match", [is_message, is_proof], ids=["message", "proof"])
def test_one_loss_at_full_speed_stalls_nothing(match: Any) -> None:
    with joined(mtu_discovery=False) as pair:
        link, peer = pair.link()
        peer.channel.register(Note)
        seen = [0]

        def hundredth(raw: bytes) -> bool:
            seen[0] += match(raw)
            return bool(match(raw)) and seen[0] == 100

        (pair.to_b if match is is_message else pair.to_a).drop = hundredth
        sender = Worker(lambda: [link.channel.send(number(i)) for i in range(1000)])
        assert [number_of(peer.channel.receive(PATIENCE)) for _ in range(1000)] == list(range(1000))
        sender.result()
        link.channel.flush(PATIENCE)
        assert link.channel._engine.retransmissions >= 1
