"""Channels over networks that lose, repeat, reorder and damage, in virtual time.  Protocol 05, sections 4 to 6."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any

import pytest

from rnsfast.engine.channel import REFILL, Channel, Ticket
from rnsfast.engine.link import Link
from rnsfast.engine.linkstate import Reason, State
from rnsfast.engine.roundtrip import RoundTrip
from rnsfast.engine.streams import ReceiveStream, SendStream
from rnsfast.wire.drop import Drop
from rnsfast.wire.packet import CTX_CHANNEL, CTX_LINKCLOSE, CTX_NONE
from tests.engine.support import message
from tests.virtualnet import VirtualNet, Wire

RTT = 0.020


def noise(tag: str, size: int) -> bytes:
    return random.Random(tag).randbytes(size)


class Transfer:
    """One stream from a link's end to the other's, fed as its buffer empties."""

    def __init__(self, net: VirtualNet, source: Link, sink: Link, data: bytes, stream_id: int = 5) -> None:
        self.net, self.data = net, data
        self.sender, self.receiver = source.open_channel(net.now), sink.open_channel(net.now)
        self.reader = self.receiver.open_reader(stream_id)
        self.stream = SendStream(stream_id)
        self.at = 0
        self.digest = hashlib.sha256()
        self.received = 0
        self.arrivals: list[float] = []

    def turn(self) -> bool:
        """Feed and read; True when all is there."""
        room = self.stream.room
        if self.at < len(self.data) and room:
            self.stream.put(self.data[self.at : self.at + room])
            self.at += min(room, len(self.data) - self.at)
            if self.at == len(self.data):
                self.stream.close()
            self.sender.feed(self.stream, self.net.now)
        got = self.reader.take()
        if got:
            self.receiver.consumed(len(got))
            self.digest.update(got)
            self.received += len(got)
            self.arrivals.append(self.net.now)
        return got == b"" and self.reader.eof

    def check(self) -> None:
        assert self.received == len(self.data)
        assert self.digest.digest() == hashlib.sha256(self.data).digest()


def linked(
    seed: int, mtu: int = 500, delay: float = RTT / 2, initiator_sends: bool = True
) -> tuple[VirtualNet, Link, Link, Wire, Wire]:
    """The net, the sender's end, the receiver's end, the wire with data, the wire with proofs."""
    net = VirtualNet(seed)
    link, peer, to_b, to_a = net.linked(delay=delay, hw_mtu=mtu)
    assert link.mtu == peer.mtu == mtu
    return (net, link, peer, to_b, to_a) if initiator_sends else (net, peer, link, to_a, to_b)


def run(net: VirtualNet, transfers: list[Transfer], seconds: float) -> float:
    start = net.now
    done: set[int] = set()

    def all_done() -> bool:
        done.update(i for i, t in enumerate(transfers) if i not in done and t.turn())
        net.flush()
        return len(done) == len(transfers)

    net.run(seconds, all_done)
    assert len(done) == len(transfers), f"only {[t.received for t in transfers]} after {net.now - start:.1f} s"
    for transfer in transfers:
        transfer.check()
    return net.now - start


@pytest.mark.slow
@pytest.mark.parametrize("initiator_sends", [True, False], ids=["initiator", "responder"])
@pytest.mark.parametrize(("mtu", "size"), [(500, 1_000_000), (16384, 3_000_000)])
@pytest.mark.parametrize("loss", [0.01, 0.05])
def test_streams_survive_loss_reordering_and_repeats(loss: float, mtu: int, size: int, initiator_sends: bool) -> None:
    net, source, sink, data, proofs = linked(11, mtu, initiator_sends=initiator_sends)
    for wire in (data, proofs):
        wire.loss, wire.duplication, wire.jitter = loss, 0.02, RTT
    transfer = Transfer(net, source, sink, noise("loss", size))
    run(net, [transfer], 600)
    assert source.state is sink.state is State.ACTIVE
    assert not sink.port.drops[Drop.CHANNEL_TOO_FAR]  # the range rule


@pytest.mark.slow
@pytest.mark.parametrize("initiator_sends", [True, False], ids=["initiator", "responder"])
def test_streams_survive_damage(initiator_sends: bool) -> None:
    """A flipped bit anywhere in one of fifty frames: not delivered, not proved, sent again."""
    net, source, sink, data, proofs = linked(12, 500, initiator_sends=initiator_sends)
    for wire in (data, proofs):
        damage(net, wire, 0.02)
    transfer = Transfer(net, source, sink, noise("damage", 500_000))
    run(net, [transfer], 600)
    assert sink.port.drops[Drop.CHANNEL_TOKEN] > 3 and source.port.drops[Drop.PROOF_SIGNATURE] > 3


def damage(net: VirtualNet, wire: Wire, share: float) -> None:
    carry = wire.carry

    def damaging(raw: bytes) -> None:
        if net.random.random() < share:
            at = net.random.randrange(len(raw))
            raw = raw[:at] + bytes((raw[at] ^ 1 << net.random.randrange(8),)) + raw[at + 1 :]
        carry(raw)

    wire.carry = damaging  # type: ignore[method-assign]


def drop_nth(wire: Wire, number: int, context: int = CTX_CHANNEL) -> None:
    """Lose the `number`th packet of a context, once."""
    seen = 0

    def lose(raw: bytes) -> bool:
        nonlocal seen
        if raw[18] == context and (context == CTX_CHANNEL or raw[0] & 3 == 3):
            seen += 1
            return seen == number
        return False

    wire.drop = lose


@pytest.mark.parametrize("mtu", [500, 16384])
@pytest.mark.parametrize("what", ["data", "proof"])
def test_one_loss_at_full_speed_costs_a_few_round_trips(what: str, mtu: int) -> None:
    size = 400_000 if mtu == 500 else 4_000_000
    net, source, sink, data, proofs = linked(13, mtu)
    clean = run(net, [Transfer(net, source, sink, noise("one", size))], 60)
    net, source, sink, data, proofs = linked(13, mtu)
    drop_nth(
        data if what == "data" else proofs, 300 if mtu == 500 else 120, CTX_CHANNEL if what == "data" else CTX_NONE
    )
    transfer = Transfer(net, source, sink, noise("one", size))
    lossy = run(net, [transfer], 60)
    assert lossy - clean < 4 * RTT
    gaps = [b - a for a, b in zip(transfer.arrivals, transfer.arrivals[1:], strict=False)]
    assert max(gaps) < 4 * RTT
    assert transfer.sender.retransmissions == 1 and transfer.sender.window.size == 48  # uncounted: nothing shrank


def test_the_window_opens_to_48_and_full_speed_is_48_a_round_trip() -> None:
    net, source, sink, data, _ = linked(14)
    transfer = Transfer(net, source, sink, noise("speed", 400_000))
    seconds = run(net, [transfer], 60)
    messages = sum(raw[18] == CTX_CHANNEL for raw in data.sent)
    ramp = 8 * RTT  # 2 to 48: seven round trips
    assert seconds <= ramp + (messages / 48 + 3) * RTT
    assert transfer.sender.retransmissions == 0


def test_range_rule() -> None:
    """R14: without the proof of o nothing beyond o + 48 is sent; with it, all at once."""
    net, source, sink, _data, proofs = linked(15)
    transfer = Transfer(net, source, sink, noise("range", 200_000))
    run_some(net, transfer, lambda: transfer.sender.window.size == 48)
    channel = transfer.sender
    victim = channel.next_tx
    withheld: list[bytes] = []

    def withhold(raw: bytes) -> bool:
        envelope = channel.ring.get(victim)
        if envelope is not None and raw[19:51] in envelope.hashes:
            withheld.append(raw)
            return True
        return False

    proofs.drop = withhold
    run_some(net, transfer, lambda: bool(withheld) and len(channel.ring) == 1, 0.5)
    assert list(channel.ring) == [victim]
    # Streams refill the window in parts: the last few numbers of the span may stay unused, never one beyond it is used.
    assert victim + 49 - 48 // REFILL < channel.next_tx <= victim + 49
    while channel.is_ready:
        message(channel, b"fill", net.now)
    assert channel.next_tx == victim + 49 and channel.room == 0
    waiting = message(channel, b"", net.now)
    assert not waiting.sent and channel.cancel(waiting)
    assert channel.window.size == 48 and net.now < channel.ring[victim].sent_at + 1.0
    before = channel.next_tx
    channel.link.engine.receive(channel.link.port, [withheld[0]], net.now)
    assert channel.next_tx > before and len(channel.ring) == 48  # all slots, at once
    proofs.drop = None
    run(net, [transfer], 60)
    assert not sink.port.drops[Drop.CHANNEL_TOO_FAR]


def run_some(net: VirtualNet, transfer: Transfer, stop: Callable[[], bool], seconds: float = 30.0) -> None:
    def stopping() -> bool:
        transfer.turn()
        net.flush()
        return stop()

    net.run(seconds, stopping)


def test_five_tries_then_the_link_is_torn_down() -> None:
    net, source, _sink, data, _proofs = linked(16)
    channel = source.open_channel(net.now)
    data.sent.clear()
    data.cut = True
    start = net.now
    ticket = message(channel, b"anybody?", net.now)
    times: list[float] = []
    carry = data.carry
    data.carry = lambda raw: (times.append(net.now), carry(raw))[1]  # type: ignore[method-assign]
    net.run(60)
    tries = [raw for raw in data.sent if raw[18] == CTX_CHANNEL]
    assert len(tries) == 5 and len(set(tries)) == 5  # sealed anew each time
    assert [raw[18] for raw in data.sent if raw[18] != 0xFA] == [CTX_CHANNEL] * 5 + [CTX_LINKCLOSE]
    assert times[-1] - start >= 5.0
    assert source.state is State.CLOSED and source.reason is Reason.INITIATOR_CLOSED
    assert "5 tries" in source.closing and channel.closed and not ticket.delivered
    assert not source.outstanding


def test_a_late_proof_of_the_first_try_counts_after_the_second() -> None:
    net, source, sink, _data, proofs = linked(17)
    channel = source.open_channel(net.now)
    sink.open_channel(net.now)
    held: list[bytes] = []
    proofs.drop = lambda raw: raw[18] == CTX_NONE and (held.append(raw), True)[1]
    ticket = message(channel, b"slow", net.now)
    net.run(1.5)
    assert len(held) == 2 and held[0] != held[1] and channel.ring[0].tries == 2
    window = channel.window.size
    channel.link.engine.receive(source.port, [held[0]], net.now)
    assert ticket.delivered and not channel.ring and not source.outstanding and channel.window.size == window + 1
    channel.link.engine.receive(source.port, [held[1]], net.now)
    assert channel.window.size == window + 1  # the second proof frees nothing more
    assert len([1 for name, *_ in net.nodes[1].recorder.events if name == "messages_arrived"]) == 1


@pytest.mark.parametrize("start", [65530, 65535, 0, 65488])
def test_any_order_around_the_wrap(start: int) -> None:
    from tests.engine.test_channel_vectors import Receiving

    rng = random.Random(start)
    for _ in range(60):
        receiving = Receiving(start)
        order = [(start + i) % 65536 for i in range(49)]
        rng.shuffle(order)
        packets = [receiving.packet(sequence) for sequence in order]
        delivered: list[int] = []
        while packets:
            cut = rng.randint(1, 12)
            delivered += receiving.give(*packets[:cut])[0]
            packets = packets[cut:]
        assert delivered == [(start + i) % 65536 for i in range(49)]


@pytest.mark.slow
def test_messages_go_past_the_wrap_in_both_directions_at_once() -> None:
    net, source, sink, _, _ = linked(18)
    ends = [source.open_channel(net.now), sink.open_channel(net.now)]
    got: list[list[int]] = [[], []]
    for number, node in enumerate(net.nodes):

        def arrived(channel: Channel, messages: list[tuple[int, bytes]], into: list[int] = got[number]) -> None:
            into += [int.from_bytes(payload, "big") for _, payload in messages]
            channel.messages_consumed(messages)

        node.recorder.on["messages_arrived"] = arrived
        node.recorder.events = Forgetful()
    total = 70_000
    given = [0, 0]

    def turn() -> bool:
        for i, channel in enumerate(ends):
            while given[i] < total and channel.is_ready:
                channel.send(Ticket(1, given[i].to_bytes(4, "big")), net.now)
                given[i] += 1
        net.flush()
        return len(got[0]) == len(got[1]) == total

    net.wires[0].sent = net.wires[1].sent = Forgetful()
    net.run(600, turn)
    assert got[0] == got[1] == list(range(total))
    assert [c.next_tx for c in ends] == [total & 0xFFFF] * 2 and not any(c.held for c in ends)


class Forgetful(list[Any]):
    def append(self, _: Any) -> None:
        pass


@pytest.mark.parametrize("loss", [0.0, 0.02])
def test_ten_streams_and_messages_on_one_channel(loss: float) -> None:
    net, source, sink, data, proofs = linked(19, 1064)
    data.loss = proofs.loss = loss
    rng = random.Random(5)
    transfers = [Transfer(net, source, sink, noise(f"s{i}", rng.randint(1, 40_000)), i) for i in range(10)]
    for transfer in transfers:
        transfer.stream.limit = rng.randint(1, 5000)
    channel = transfers[0].sender
    texts = [noise(f"m{i}", rng.randint(0, 900)) for i in range(100)]
    waiting = list(texts)
    got: list[bytes] = []
    net.nodes[1].recorder.on["messages_arrived"] = lambda c, ms: got.extend(payload for _, payload in ms)
    done: set[int] = set()

    def turn() -> bool:
        done.update(i for i, t in enumerate(transfers) if i not in done and t.turn())
        if waiting and rng.random() < 0.4:
            channel.send(Ticket(0x20, waiting.pop(0)), net.now)
        net.flush()
        return len(done) == 10 and len(got) == 100

    net.run(300, turn)
    assert got == texts
    for transfer in transfers:
        transfer.check()


def test_a_close_in_the_middle_of_a_batch_ends_it() -> None:
    """Messages before the close are delivered, those after it are not; waiting readers are told the truth."""
    net, source, sink, _data, _ = linked(20)
    channel = source.open_channel(net.now)
    peer = sink.open_channel(net.now)
    reader = peer.open_reader(5)
    channel.window.size = 10
    stream = SendStream(5)
    stream.put(b"some")
    channel.feed(stream, net.now)
    frames = source.port.take()
    source.close(net.now, "done")
    frames += source.port.take()
    late = [bytes(f) for f in frames[:1]]
    net.nodes[1].engine.receive(sink.port, [*frames, *late], net.now)
    assert sink.state is State.CLOSED and sink.reason is Reason.INITIATOR_CLOSED
    assert reader.take() == b"some" and reader.broken is not None and not reader.eof
    assert net.nodes[1].recorder.named("link_closed") == [(sink,)]
    assert not net.nodes[1].engine.links and peer.closed


def test_the_end_of_file_before_a_close_stays_an_end() -> None:
    net, source, sink, _, _ = linked(21)
    transfer = Transfer(net, source, sink, b"all of it")
    run(net, [transfer], 5)
    sink.close(net.now)
    assert isinstance(transfer.reader, ReceiveStream) and transfer.reader.eof and transfer.reader.broken is None


def test_a_lost_interface_breaks_streams_and_forgets_nothing_half() -> None:
    net, source, sink, _, _ = linked(22)
    transfer = Transfer(net, source, sink, noise("x", 100_000))
    run_some(net, transfer, lambda: transfer.received > 20_000)
    source.port.online = False
    source.engine.changed(source.port, net.now)
    assert source.state is State.CLOSED and transfer.stream.broken is not None and not source.outstanding
    assert not transfer.sender.ring


def test_a_short_outage_costs_no_try_of_messages_that_could_not_be_sent() -> None:
    """Interface congested: streams wait in their buffers; when it drains they go on at once."""
    net, source, sink, _, _ = linked(23)
    transfer = Transfer(net, source, sink, noise("c", 50_000))
    source.port.congested = True
    transfer.turn()
    assert not transfer.sender.ring
    ticket = message(transfer.sender, b"urgent", net.now)
    assert ticket.sent and len(transfer.sender.ring) == 1, "messages pass, streams do not"
    source.port.congested = False
    source.engine.changed(source.port, net.now)
    assert len(transfer.sender.ring) == 2
    run(net, [transfer], 30)


def test_streams_go_on_when_a_stale_link_comes_back() -> None:
    """Any authentic packet wakes the sender, also one that needs no proof (protocol 05, 13.2 row 11)."""
    net, source, sink, _data, _proofs = linked(24)
    transfer = Transfer(net, source, sink, noise("stale", 20_000))
    source.state = State.STALE
    transfer.turn()
    assert not transfer.sender.ring
    assert sink.send_sealed(0x0D, b"sign of life", net.now) or True
    sink.send_data(b"hello", net.now)
    run(net, [transfer], 30)


def test_a_proof_flood_and_forged_proofs_change_nothing() -> None:
    net, source, sink, _data, proofs = linked(25)
    channel = source.open_channel(net.now)
    sink.open_channel(net.now)
    held: list[bytes] = []
    proofs.drop = lambda raw: raw[18] == CTX_NONE and (held.append(raw), True)[1]
    ticket = message(channel, b"x", net.now)
    net.run(0.5)
    (proof,) = held
    before = (channel.window.size, source.last_proof)
    forged = [proof[:-1] + bytes((proof[-1] ^ 1,))] * 40
    unknown = [proof[:19] + net.random.randbytes(96) for _ in range(2000)]
    short = [proof[:80], proof[:20], proof[:114]]
    implicit = [proof[:19] + proof[51:]]
    source.engine.receive(source.port, forged + unknown + short + implicit, net.now)
    assert (channel.window.size, source.last_proof) == before and not ticket.delivered and len(channel.ring) == 1
    source.engine.receive(source.port, [proof] * 500, net.now)
    assert ticket.delivered and channel.window.size == before[0] + 1 and not source.outstanding


@pytest.mark.parametrize("jitter", [0.1, 0.5, 2.0])
def test_packets_that_overtake_each_other_are_not_taken_for_lost(jitter: float) -> None:
    net, source, sink, data, proofs = linked(26)
    data.jitter = proofs.jitter = RTT * jitter
    transfer = Transfer(net, source, sink, noise("jitter", 300_000))
    run(net, [transfer], 60)
    messages = 300_000 // 423
    assert transfer.sender.retransmissions < messages * 0.02


def test_losing_the_repeat_as_well_does_not_cost_a_second() -> None:
    net, source, sink, data, proofs = linked(27)
    data.loss = proofs.loss = 0.05
    transfer = Transfer(net, source, sink, noise("twice", 400_000))
    seconds = run(net, [transfer], 60)
    gaps = [b - a for a, b in zip(transfer.arrivals, transfer.arrivals[1:], strict=False)]
    assert max(gaps) < 0.5 and seconds < 5 and transfer.sender.window.size == 48
    assert transfer.sender.retransmissions < 400_000 // 423 * 0.25


def test_the_wait_for_a_proof_follows_what_proofs_take() -> None:
    trip = RoundTrip(0.001)
    for _ in range(100):
        trip.measured(0.200)
    assert trip.patience == pytest.approx(0.250, rel=0.01)
    for n in range(100):
        trip.measured(0.150 if n & 1 else 0.250)
    assert 0.300 < trip.patience < 0.500
    idle = RoundTrip(0.0)
    idle.measured(0.0)
    assert idle.patience == 0.010


SLOW_HOPS = [(16384, 1e6, 3_000_000), (16384, 1e5, 3_000_000), (16384, 1e4, 400_000), (500, 1200, 60_000)]


@pytest.mark.parametrize(("mtu", "rate", "size"), SLOW_HOPS)  # bytes a second
def test_a_slow_hop_in_the_middle_is_filled_and_not_flooded(mtu: int, rate: float, size: int) -> None:
    """The queue in front of it makes proofs take long; the link's round trip time knows nothing of that."""
    net, source, sink, data, _ = linked(41, mtu)
    free_at = net.now

    def queued(raw: bytes) -> None:
        nonlocal free_at
        free_at = max(net.now, free_at) + len(raw) / rate
        net.later(free_at - net.now + data.delay, data, raw)

    data.carry = queued  # type: ignore[method-assign]
    transfer = Transfer(net, source, sink, noise("slow", size))
    seconds = run(net, [transfer], 600)
    messages = size / transfer.sender.stream_mdu
    assert transfer.sender.retransmissions <= max(5, messages * 0.05)
    assert seconds < (size + 80 * messages) / rate * 1.15 + 2


def test_a_peer_that_is_silent_for_three_seconds_keeps_its_link() -> None:
    """A reference handler that blocks stops the proofs of its whole node."""
    net, source, sink, _, proofs = linked(40)
    transfer = Transfer(net, source, sink, noise("silent", 300_000))
    run_some(net, transfer, lambda: transfer.received > 50_000)
    kept: list[bytes] = []
    proofs.drop = lambda raw: (kept.append(raw), True)[1]
    net.run(3.0)
    proofs.drop = None
    for raw in kept:
        net.later(0.01, proofs, raw)
    assert run(net, [transfer], 60) < 2
