"""What grows, and how far: tables, timers, half-open links, in virtual time.  Protocol 03, 22.14; protocol 05, R10."""

from __future__ import annotations

from typing import Any

import pytest

from rnsfast.crypto.x25519 import X25519Key
from rnsfast.engine.channel import UNOPENED, UNOPENED_STREAMS, Ticket
from rnsfast.engine.engine import HALF_OPEN_LIMIT, HALF_OPEN_PATIENCE
from rnsfast.engine.filter import HashMemory
from rnsfast.engine.linkstate import State
from rnsfast.engine.receipts import LIMIT as RECEIPT_LIMIT
from rnsfast.engine.receipts import Status
from rnsfast.engine.streams import ReceiveStream
from rnsfast.engine.timers import SLACK, Timers
from rnsfast.wire.channel import pack_envelope
from rnsfast.wire.drop import Drop
from rnsfast.wire.handshake import LinkRequest, build_link_request, build_rtt
from rnsfast.wire.packet import CTX_CHANNEL, CTX_LRRTT, CTX_NONE, LINKREQUEST, make_raw
from tests.engine.support import NOW, make_link, sealed, sealed_channel, sent
from tests.engine.test_channel_vectors import Receiving
from tests.engine.test_faults import Forgetful
from tests.virtualnet import VirtualNet

PEER = X25519Key(bytes(range(32))).public


def request(destination: bytes, number: int) -> bytes:
    """A link request of its own: the signing key is any 32 bytes, nobody looks at it before the first proof."""
    keys = LinkRequest(PEER, number.to_bytes(32, "big"), 500, 1)
    return make_raw(LINKREQUEST, destination, CTX_NONE, build_link_request(keys))


@pytest.mark.slow
def test_ten_thousand_half_open_links() -> None:
    net = VirtualNet(seed=5)
    node = net.node("n")
    destination = node.inbound("inbox")
    quiet, loud = node.port("quiet"), node.port("loud")
    flood = [request(destination.hash, n) for n in range(10_000)]
    for at in range(0, len(flood), 500):
        node.engine.receive(loud, flood[at : at + 500], net.now)
    assert len(node.engine.links) == HALF_OPEN_LIMIT
    assert loud.drops[Drop.LINK_HALF_OPEN_LIMIT] == 10_000 - HALF_OPEN_LIMIT
    node.engine.receive(quiet, [request(destination.hash, 20_000)], net.now)
    assert len(node.engine.links) == HALF_OPEN_LIMIT + 1, "another interface is not kept out"
    later = net.now + HALF_OPEN_PATIENCE
    fresh = [request(destination.hash, 30_000 + n) for n in range(100)]
    node.engine.receive(loud, fresh, later)
    assert len(node.engine.links) == HALF_OPEN_LIMIT + 1, "the old give way to the new"
    assert node.engine.receive(loud, [request(destination.hash, 1)], later) is None
    assert len(node.engine.timers) <= 2 * (HALF_OPEN_LIMIT + 2) + SLACK
    node.engine.run_timers(later + 400)
    assert not node.engine.links and not node.recorder.events
    assert len(node.engine.timers) <= SLACK + 1 and not any(node.engine._half_open.values())


def test_packets_of_a_link_that_gave_way_in_the_same_batch_harm_nobody() -> None:
    net = VirtualNet(seed=5)
    node = net.node("n")
    destination, port = node.inbound("inbox"), node.port("p")
    node.engine.receive(port, [request(destination.hash, n) for n in range(HALF_OPEN_LIMIT)], net.now)
    oldest = next(iter(node.engine.links.values()))
    plain = pack_envelope(1, 0, b"x")
    mine = [make_raw(0x0C, oldest.link_id, context, oldest.key.seal(plain)) for context in (CTX_CHANNEL, CTX_NONE)]
    proof = make_raw(0x0F, oldest.link_id, 0, bytes(96))
    batch = [*mine, proof, request(destination.hash, 99_999)]
    node.engine.receive(port, batch, net.now + HALF_OPEN_PATIENCE)
    assert oldest.state is State.CLOSED and port.drops[Drop.NO_SUCH_LINK] == 3
    assert len(node.engine.links) == HALF_OPEN_LIMIT and not node.recorder.events


def test_an_established_link_leaves_the_half_open_ones() -> None:
    net = VirtualNet(seed=6)
    _, peer, _, _ = net.linked()
    assert not any(net.nodes[1].engine._half_open.values())
    peer.close(net.now)
    net.run(1)
    assert not any(net.nodes[0].engine._half_open.values())


def test_links_that_nobody_completed_end_with_their_destination() -> None:
    net = VirtualNet(seed=5)
    node = net.node("n")
    inbox, other, port = node.inbound("inbox"), node.inbound("other"), node.port("p")
    node.engine.receive(port, [request(inbox.hash, 1), request(other.hash, 2), request(inbox.hash, 3)], net.now)
    node.engine.deregister(inbox, net.now)
    assert [link.destination for link in node.engine.links.values()] == [other]
    assert [len(links) for links in node.engine._half_open.values()] == [1] and not node.recorder.events


@pytest.mark.slow
def test_a_hundred_thousand_messages_leave_nothing_behind() -> None:
    net = VirtualNet(seed=7)
    link, peer, to_b, to_a = net.linked(delay=0.001)
    to_b.sent = to_a.sent = Forgetful()
    channel, sink = link.open_channel(net.now), peer.open_channel(net.now)
    for node in net.nodes:
        node.recorder.events = Forgetful()
    count = 0

    def arrived(channel: Any, messages: list[tuple[int, bytes]]) -> None:
        nonlocal count
        count += len(messages)
        channel.messages_consumed(messages)

    net.nodes[1].recorder.on["messages_arrived"] = arrived
    given = 0
    tickets: list[Ticket] = []
    most = {"outstanding": 0, "timers": 0, "ring": 0, "held": 0, "seen": 0}

    def turn() -> bool:
        nonlocal given
        while given < 100_000 and len(tickets) < 200 and channel.room and not channel.outbox:
            channel.send(Ticket(1, b"m"), net.now)
            given += 1
        for engine in (link.engine, peer.engine):
            most["timers"] = max(most["timers"], len(engine.timers))
            most["seen"] = max(most["seen"], len(engine.seen))
        most["outstanding"] = max(most["outstanding"], len(link.outstanding))
        most["ring"] = max(most["ring"], len(channel.ring))
        net.flush()
        return count == 100_000

    net.run(600, turn)
    assert count == 100_000
    net.run(3)
    assert not channel.ring and not channel.outbox and not link.outstanding and not sink.held
    assert not link.engine.settlements and not peer.engine.settlements
    assert not link.engine.touched and sink.backlog == 0
    assert most["ring"] <= 48 and most["outstanding"] <= 48 and most["timers"] < 12 and most["seen"] < 100


def test_receipts_do_not_pile_up() -> None:
    link, _recorder, port = make_link(initiator=True)
    first = link.send_data(b"first", NOW)
    for n in range(RECEIPT_LIMIT):
        link.send_data(b"x", NOW + n * 0.001)
    assert first is not None and first.status is Status.CULLED
    assert len(link.outstanding) == RECEIPT_LIMIT
    for _ in range(20_000):  # each culls one
        link.send_data(b"x", NOW + 2)
    assert len(link.outstanding) == RECEIPT_LIMIT and len(link.engine.timers) < 2 * RECEIPT_LIMIT + SLACK + 10
    sent(port)
    link.close(NOW + 3)
    assert not link.outstanding and len(link.engine.timers) < RECEIPT_LIMIT + SLACK + 10
    link.engine.run_timers(NOW + 60)
    assert len(link.engine.timers) <= SLACK + 1


def test_timers_forget_the_dead_and_call_the_living_once() -> None:
    class Thing:
        armed = float("inf")
        called = 0

        def advance(self, now: float) -> float:
            self.called += 1
            return float("inf")

    timers = Timers()
    things = [Thing() for _ in range(5000)]
    for n, thing in enumerate(things):
        timers.arm(thing, 100.0 + n)
        timers.arm(thing, 50.0 + n)  # replaces
        timers.arm(thing, 90.0 + n)  # later: nothing
    for thing in things[:4000]:
        timers.disarm(thing)
        timers.disarm(thing)
    assert len(timers) <= 2 * 1000 + 2 * SLACK
    timers.advance(1e9)
    assert [t.called for t in things] == [0] * 4000 + [1] * 1000
    assert len(timers) == 0 and timers.deadline == float("inf")


def test_streams_nobody_reads_are_bounded() -> None:
    receiving = Receiving(0)
    channel = receiving.channel
    for n in range(200):  # two hundred stream ids, 200 bytes each
        receiving.give(receiving.packet(n, 0xFF00, n.to_bytes(2, "big") + bytes(200)))
    assert len(channel._unopened) == UNOPENED_STREAMS
    for n in range(200, 200 + UNOPENED // 400 + 100):
        receiving.give(receiving.packet(n, 0xFF00, b"\x00\x01" + bytes(400)))
    assert channel._unopened_bytes <= UNOPENED and channel.backlog <= UNOPENED
    reader = channel.open_reader(1)
    assert reader.broken is not None and "before anybody read it" in reader.broken


def test_small_chunks_cost_their_bytes_and_not_a_list_entry_each() -> None:
    stream = ReceiveStream(1)
    pieces = [bytes((n & 0xFF, n >> 8)) for n in range(10_000)]
    got = b""
    for n, piece in enumerate(pieces):
        stream.put(piece)
        if n % 777 == 0:
            got += stream.take(3) or b""
    assert len(stream._chunks) < 20_000 / 200
    got += stream.take() or b""
    assert got == b"".join(pieces) and stream.buffered == 0 and stream.take() is None


def test_a_reader_far_behind_makes_packets_wait_unproved() -> None:
    receiving = Receiving(0)
    channel = receiving.channel
    channel.backlog_limit = 1000
    reader = channel.open_reader(1)
    n = 0
    while channel.backlog <= 1000:
        assert receiving.give(receiving.packet(n, 0xFF00, b"\x00\x01" + bytes(400)))[1]
        n += 1
    assert receiving.give(receiving.packet(n, 0xFF00, b"\x00\x01" + bytes(400)))[1] == []
    got = reader.take()
    channel.consumed(len(got or b""))
    assert receiving.give(receiving.packet(n, 0xFF00, b"\x00\x01" + bytes(400)))[1]


def test_early_channel_packets_must_open_to_be_kept() -> None:
    link, recorder, port = make_link()
    rubbish = [make_raw(0x0C, link.link_id, CTX_CHANNEL, n.to_bytes(96, "big")) for n in range(100)]
    good = [sealed_channel(pack_envelope(1, n, b"x"), n.to_bytes(16, "big")) for n in range(60)]
    link.engine.receive(port, rubbish + good, NOW + 1)
    assert not sent(port) and len(link._early) == 48 and link.last_inbound == NOW + 1
    link.open_channel(NOW + 2)
    assert len(sent(port)) == 48
    (arrived,) = recorder.named("messages_arrived")
    assert len(arrived[1]) == 48


def test_hash_memory_is_bounded_and_remembers_the_recent() -> None:
    memory = HashMemory(1000)
    for n in range(10_000):
        assert memory.add(n.to_bytes(32, "big"))
        assert len(memory) <= 2000
        assert not memory.add(max(0, n - 999).to_bytes(32, "big"))
    memory.forget((9_999).to_bytes(32, "big"))
    assert memory.add((9_999).to_bytes(32, "big"))


def test_closed_links_leave_nothing_in_the_engine() -> None:
    for state in (State.PENDING, State.HANDSHAKE, State.ACTIVE, State.STALE):
        link, _, port = make_link(initiator=state is State.PENDING, state=state)
        if state is not State.PENDING:
            link.engine.receive(port, [sealed(CTX_LRRTT, build_rtt(0.1), bytes(16))], NOW)
            link.open_channel(NOW)
        link.close(NOW + 1)
        assert link.state is State.CLOSED and not link.engine.links and link._key is None and not link.outstanding
        link.close(NOW + 2)
        assert link.send_data(b"x", NOW + 3) is None
