"""The channel against the recorded traces of the reference.  Protocol 05, section 16."""

from __future__ import annotations

import bz2
import tracemalloc
from typing import Any

import pytest

from rnsfast.crypto.token import TokenKey
from rnsfast.engine.channel import BEYOND, REPEAT_WAIT, Channel, Envelope, Ticket
from rnsfast.engine.linkstate import State
from rnsfast.engine.streams import ReceiveStream, SendStream
from rnsfast.engine.window import TRIES, Window, timeout
from rnsfast.wire.channel import is_acceptable, pack_envelope
from rnsfast.wire.drop import Drop
from rnsfast.wire.packet import CTX_LINKCLOSE, packet_hash
from rnsfast.wire.stream import parse_stream
from tests.engine.support import KEY, NOW, make_link, message, sealed_channel, sent
from tests.vectors_support import Case, by_name, unhex, vectors
from tests.wire.test_channel_stream import written

NOTE, UNKNOWN = 0x0101, 0x0202


class CountOnly(Channel):
    """The reference's readiness: the number of unproved messages only, as the traces were made without range rule."""

    @property
    def room(self) -> int:
        return max(0, self.window.size - len(self.ring))


class TraceRun:
    """One sender at a standstill of the clock, so that only what the trace says expires."""

    def __init__(self, case: Case) -> None:
        self.link, _, self.port = make_link(rtt=case["rtt"], mtu=500)
        assert self.link.mdu == case["link_mdu"]
        self.channel = self.link.channel = CountOnly(self.link)
        self.channel.next_tx = case["next_sequence"]
        self.gone: dict[int, Envelope] = {}

    def state(self) -> list[Any]:
        c, w = self.channel, self.channel.window
        ready = w.size > len(c.ring)  # what the reference calls ready: it does not look at the link
        return [
            w.size, w.maximum, w.minimum, w.flexibility, w.fast_rounds, w.medium_rounds, len(c.ring), ready, c.next_tx,
        ]  # fmt: skip

    def timeouts(self) -> dict[int, tuple[int, float]]:
        return {e.sequence: (e.tries, e.timeout) for e in self.channel.ring.values()}

    def step(self, op: str, argument: Any) -> Any:
        channel = self.channel
        if op == "rtt":
            self.link.rtt = argument
            return None
        if op == "send":
            if argument > channel.mdu:
                return "ME_TOO_BIG"  # the facade's check
            if not channel.is_ready:
                return "ME_LINK_NOT_READY"
            sequence = channel.next_tx
            assert channel.send(Ticket(NOTE, bytes(argument)), NOW)
            return sequence
        if op.startswith("late_"):
            envelope = self.gone[argument]
            if op == "late_deliver":
                channel.proved([envelope], NOW)
            else:
                assert channel.expire(envelope, NOW)
            return "ignored"
        envelope = channel.ring[argument]
        self.gone[argument] = envelope
        if op == "deliver":
            channel.proved([envelope], NOW)
            return "removed"
        assert op == "timeout"
        if channel.expire(envelope, NOW):
            return "resend"
        self.link.close(NOW, "vector")
        return "teardown"


@pytest.mark.parametrize("case", vectors("channel", "window_traces"), ids=by_name)
def test_the_window_moves_as_in_the_trace(case: Case) -> None:
    run = TraceRun(case)
    assert run.state() == case["initial"]
    for number, (op, argument, result, state, changed) in enumerate(case["steps"]):
        before = run.timeouts()
        got = run.step(op, argument)
        where = f"step {number}: {op} {argument}"
        if op != "rtt":
            assert got == result, where
        assert run.state() == state, where
        after = run.timeouts()
        assert {s: t for s, t in after.items() if before.get(s) != t} == {
            int(s): (tries, pytest.approx(seconds, rel=1e-9)) for s, (tries, seconds) in changed.items()
        }, where
    if any(step[2] == "teardown" for step in case["steps"]):
        assert run.link.state is State.CLOSED and not run.channel.is_ready  # a robust node does not call this ready
        assert any(raw[18] == CTX_LINKCLOSE for raw in sent(run.port))


@pytest.mark.parametrize("case", vectors("channel", "timeouts"), ids=lambda c: f"{c['rtt']}-{c['ring']}")
def test_timeouts(case: Case) -> None:
    for tries, seconds in enumerate(case["by_try"], start=1):
        assert timeout(tries, case["rtt"], case["ring"]) == pytest.approx(seconds, rel=1e-9)
    assert len(case["by_try"]) == TRIES


def test_upgrade_happens_once_and_never_beyond_48() -> None:
    window = Window(0.01)
    for _ in range(1000):
        window.delivered(0.01)
    assert (window.size, window.maximum) == (48, 48)
    for _ in range(1000):
        window.timed_out()
    assert (window.size, window.maximum) == (16, 20)


# ---------------------------------------------------------------------- receiving


class Receiving:
    """A receiver fed one packet at a time or in batches. The traces drop whatever is beyond the span: `reach` 0."""

    def __init__(self, start: int, reach: int = BEYOND) -> None:
        self.link, self.recorder, self.port = make_link()
        self.channel = self.link.open_channel(NOW)
        self.channel.next_rx = start
        self.channel.reach = reach
        self.count = 0

    def packet(self, sequence: int, msgtype: int = NOTE, payload: bytes | None = None) -> bytes:
        self.count += 1
        body = sequence.to_bytes(2, "big") if payload is None else payload
        return sealed_channel(pack_envelope(msgtype, sequence, body), self.count.to_bytes(16, "big"))

    def give(self, *packets: bytes) -> tuple[list[int], list[bytes]]:
        """Sequences delivered, proofs sent; those of repeats come later, and at that moment."""
        known = len(self.recorder.events)
        self.link.engine.receive(self.port, list(packets), NOW)
        self.channel.prove_repeated(NOW + REPEAT_WAIT)
        delivered = [
            int.from_bytes(payload, "big")
            for name, *args in self.recorder.events[known:]
            if name == "messages_arrived"
            for _, payload in args[1]
        ]
        return delivered, sent(self.port)


@pytest.mark.parametrize("case", vectors("channel", "receive", "traces"), ids=by_name)
def test_receiving_as_in_the_trace_where_robust(case: Case) -> None:
    receiving = Receiving(case["next_rx_at_start"], 0)
    for number, step in enumerate(case["steps"]):
        known = step["kind"] == "note"
        expected = step.get("robust") or {**step["reference"], "prove": True}
        delivered, proofs = receiving.give(receiving.packet(step["seq"], NOTE if known else UNKNOWN))
        # The engine hands unknown types up at their turn: it is the facade that knows the types, counts and skips.
        unknown = {s["seq"] for s in case["steps"] if s["kind"] != "note"}
        where = f"step {number}: {step}"
        assert [s for s in delivered if s not in unknown] == expected["delivered"], where
        assert receiving.channel.next_rx == expected["next"], where
        assert sorted(receiving.channel.held) == sorted(expected["held"]), where
        assert bool(proofs) == expected.get("prove", True), where


@pytest.mark.parametrize("case", vectors("channel", "receive", "traces"), ids=by_name)
def test_a_trace_in_one_batch_ends_as_one_by_one(case: Case) -> None:
    single, batched = Receiving(case["next_rx_at_start"], 0), Receiving(case["next_rx_at_start"], 0)
    one_by_one: list[int] = []
    for step in case["steps"]:
        one_by_one += single.give(single.packet(step["seq"]))[0]
    together, _ = batched.give(*(batched.packet(step["seq"]) for step in case["steps"]))
    assert together == one_by_one
    assert batched.channel.next_rx == single.channel.next_rx
    assert batched.channel.held.keys() == single.channel.held.keys()


@pytest.mark.parametrize(("expected", "sequence", "accepted"), vectors("channel", "receive", "acceptance"))
def test_acceptance(expected: int, sequence: int, accepted: bool) -> None:
    assert is_acceptable(sequence, expected) is accepted
    receiving = Receiving(expected)
    receiving.give(receiving.packet(sequence))
    assert (receiving.channel.next_rx != expected or bool(receiving.channel.held)) is accepted


def test_behind_is_proved_far_ahead_is_not() -> None:
    receiving = Receiving(100)
    for distance, proved in ((-1, True), (-32768, True), (49, False), (32767, False), (48, True)):
        _, proofs = receiving.give(receiving.packet((100 + distance) % 65536))
        assert bool(proofs) is proved, distance


def test_garbage_is_neither_proved_nor_delivered() -> None:
    receiving = Receiving(0)
    good = receiving.packet(0)
    broken = good[:-1] + bytes((good[-1] ^ 1,))
    short = sealed_channel(b"12345", bytes(16))
    assert receiving.give(broken, short, good[:40], good[:20]) == ([], [])
    delivered, proofs = receiving.give(good)
    assert delivered == [0] and len(proofs) == 1


def test_every_copy_of_a_delivered_message_is_proved_and_delivered_once() -> None:
    receiving = Receiving(0)
    first, second = receiving.packet(0), receiving.packet(0)
    assert receiving.give(first)[0] == [0]
    delivered, proofs = receiving.give(second, first)
    assert delivered == [] and len(proofs) == 2 and len({p[19:51] for p in proofs}) == 2


def test_a_repeat_is_proved_a_moment_later_than_the_first_copy() -> None:
    """A reference node that missed the first proof, because it was too fast, would miss a second fast one, too."""
    receiving = Receiving(0)
    engine, port = receiving.link.engine, receiving.port
    engine.receive(port, [receiving.packet(0), receiving.packet(2)], NOW)
    assert len(sent(port)) == 2
    repeats = [receiving.packet(0), receiving.packet(2)]
    engine.receive(port, repeats, NOW + 1)
    assert sent(port) == []
    engine.run_timers(NOW + 1 + REPEAT_WAIT / 2)
    assert sent(port) == []
    engine.run_timers(NOW + 1 + REPEAT_WAIT)
    assert {proof[19:51] for proof in sent(port)} == {packet_hash(raw) for raw in repeats}
    engine.run_timers(NOW + 2)
    assert sent(port) == []
    assert port.drops[Drop.CHANNEL_DUPLICATE] == 2


def test_repeats_are_proved_before_a_close() -> None:
    receiving = Receiving(0)
    engine, port = receiving.link.engine, receiving.port
    engine.receive(port, [receiving.packet(0)], NOW)
    repeat = receiving.packet(0)
    engine.receive(port, [repeat], NOW)
    sent(port)
    receiving.link.close(NOW)
    assert sent(port)[0][19:51] == packet_hash(repeat)


def test_a_flood_of_repeats_is_bounded() -> None:
    receiving = Receiving(0)
    engine, port = receiving.link.engine, receiving.port
    engine.receive(port, [receiving.packet(0)], NOW)
    engine.receive(port, [receiving.packet(0) for _ in range(3 * BEYOND)], NOW)
    assert len(receiving.channel.repeated) == BEYOND


# ---------------------------------------------------------------------- errors, in the order of the vectors


def test_errors_leave_the_sequence_alone() -> None:
    """Registration and ME_NO_MSG_TYPE, ME_TOO_BIG are the facade's; what the engine refuses costs no number."""
    link, _, _ = make_link(rtt=0.01)
    channel = link.open_channel(NOW)
    channel.window.size = channel.window.maximum = 50
    steps = {e["name"]: e for e in vectors("channel", "errors")}

    def after(name: str) -> None:
        assert channel.next_tx == steps[name]["next_sequence_after"], name

    assert message(channel, bytes(channel.mdu), NOW).sent
    after("send_payload_equal_channel_mdu")
    assert message(channel, b"", NOW, msgtype=0x0999).sent
    after("send_unregistered_type")
    assert message(channel, b"", NOW, msgtype=0xFFFE).sent
    after("send_reserved_type")
    channel.window.size = len(channel.ring)
    waiting = message(channel, b"", NOW)
    assert not waiting.sent and channel.cancel(waiting)
    after("send_window_full")
    channel.window.size = 50
    link.state = State.STALE
    waiting = message(channel, b"", NOW)
    assert not waiting.sent and not channel.is_ready and channel.cancel(waiting)
    after("send_link_stale")
    link.state = State.ACTIVE
    link.close(NOW)
    assert channel.closed and not channel.is_ready
    assert not message(channel, b"", NOW).sent
    after("send_link_closed")


def test_a_type_above_16_bits_costs_no_number_and_harms_nobody() -> None:
    link, _, port = make_link(rtt=0.01)
    channel = link.open_channel(NOW)
    with pytest.raises(ValueError):
        message(channel, b"", NOW, msgtype=0x10000)
    assert channel.next_tx == 0 and not channel.ring
    assert message(channel, b"x", NOW).sent
    assert channel.next_tx == 1 and len(sent(port)) == 1


# ---------------------------------------------------------------------- streams


@pytest.mark.parametrize("case", vectors("channel", "reader"), ids=str)
def test_reader(case: Case) -> None:
    receiving = Receiving(0)
    own = receiving.channel.open_reader(case["stream_id"])
    receiving.channel.open_reader(10)
    sequence = 0
    for op in case["ops"]:
        if op[0] == "message":
            _, stream_id, data, eof = op
            payload = (stream_id | (0x8000 if eof else 0)).to_bytes(2, "big") + unhex(data)
            receiving.give(receiving.packet(sequence, 0xFF00, payload))
            sequence += 1
        else:
            _, size, result = op
            assert own.take(size) == (None if result is None else unhex(result)), op


def chunks_sent(receiving_key: bytes, port: Any) -> list[tuple[bool, bool, bytes]]:
    out = []
    for raw in sent(port):
        plain = TokenKey(receiving_key).open(raw[19:])
        assert plain is not None and plain[:2] == b"\xff\x00"
        parsed = parse_stream(plain[6:])
        out.append((parsed.eof, bool(plain[6] & 0x40), parsed.data))  # type: ignore[union-attr]
    return out


@pytest.mark.parametrize("case", vectors("channel", "writer", "streams"), ids=lambda c: f"{c['input']}{c['input_len']}")
def test_uncompressed_streams_are_cut_as_the_reference_cuts_them(case: Case) -> None:
    """Compression is a policy of the writer above the engine; without it chunks have the sizes of the raw writes."""
    data = written(case)
    link, _, port = make_link(rtt=0.01, mtu=500 if case["link_mdu"] == 431 else 16384)
    assert link.mdu == case["link_mdu"]
    channel = link.open_channel(NOW)
    channel.window.size = channel.window.maximum = 48
    stream = SendStream(5)
    stream.put(data)
    channel.feed(stream, NOW)
    while channel.ring:
        channel.proved(list(channel.ring.values()), NOW)
        channel.pump(NOW)
    got = chunks_sent(KEY, port)
    assert b"".join(body for _, _, body in got) == data
    room = channel.stream_mdu
    assert [len(body) for _, _, body in got[:-1]] == [room] * (len(got) - 1)
    if not any(compressed for _, compressed, _ in case["writes"]):
        assert [len(body) for _, _, body in got] == [size for _, _, size in case["writes"]]


def test_writer_misc_at_the_engine() -> None:
    """Close sends one empty message with the mark; the end of file waits behind data; a full window takes no more."""
    misc = {m["op"]: m for m in vectors("channel", "writer", "misc")}
    link, _, port = make_link(rtt=0.01)
    channel = link.open_channel(NOW)
    stream = SendStream(5)
    stream.close()
    channel.feed(stream, NOW)
    assert chunks_sent(KEY, port) == [(True, False, b"")]
    assert misc["close"]["envelope"].endswith("8005")
    channel.proved(list(channel.ring.values()), NOW)
    channel.window.size = 2
    other = SendStream(6)
    other.put(bytes(4000))
    channel.feed(other, NOW)
    assert [len(b) for _, _, b in chunks_sent(KEY, port)] == [423, 423]  # "four writes ...": the window takes two
    assert other.buffered == 4000 - 846 and not channel.is_ready


def test_stream_end_and_data_after_it() -> None:
    stream = ReceiveStream(1)
    assert stream.take() is None and stream.take(0) == b""
    stream.put(b"abc")
    stream.eof = True
    assert stream.take(2) == b"ab" and stream.take() == b"c"
    assert stream.take() == b"" and stream.take(5) == b""
    stream.put(b"more")
    assert stream.take() == b"more"


def test_a_decompression_bomb_ends_its_stream_and_nothing_else() -> None:
    receiving = Receiving(0)
    bombed, other = receiving.channel.open_reader(5), receiving.channel.open_reader(6)
    bomb = bz2.compress(bytes(20_000_000))
    tracemalloc.start()
    _, proofs = receiving.give(
        receiving.packet(0, 0xFF00, b"\x40\x05" + bomb),
        receiving.packet(1, 0xFF00, b"\x00\x06still here"),
        receiving.packet(2, 0xFF00, b"\x00\x05after the damage"),
        receiving.packet(3),
    )
    assert tracemalloc.get_traced_memory()[1] < 200_000
    tracemalloc.stop()
    assert len(proofs) == 4 and receiving.channel.next_rx == 4
    assert bombed.broken is not None and bombed.take() is None and not bombed.eof
    assert other.take() == b"still here" and other.broken is None
    assert receiving.recorder.named("messages_arrived")[-1][1] == [(NOTE, b"\x00\x03")]


@pytest.mark.parametrize("state", [State.PENDING, State.HANDSHAKE])
def test_no_channel_before_the_link_is_established(state: State) -> None:
    link, _, _ = make_link(initiator=state is State.PENDING, state=state)
    with pytest.raises(RuntimeError, match=state.name):
        link.open_channel(NOW)
    link.state = State.ACTIVE
    link.set_mtu(8192)
    assert link.open_channel(NOW).mdu == 8105
