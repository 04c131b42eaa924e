"""Links that send and receive many plain packets at once, and the direct way for forwarders."""

from __future__ import annotations

import queue
import threading

import pytest

from rnsfast import Identity, Link, LinkClosed, MessageTooLarge
from tests.loopback import PATIENCE, Pair, settle


class Heard:
    """Batches as a handler gets them."""

    def __init__(self) -> None:
        self.batches: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
        self.threads: set[str] = set()

    def __call__(self, packets: list[bytes]) -> None:
        self.threads.add(threading.current_thread().name)
        self.batches.put(packets)

    def take(self, count: int) -> list[bytes]:
        got: list[bytes] = []
        while len(got) < count:
            got += self.batches.get(timeout=PATIENCE)
        return got


def numbered(count: int) -> list[bytes]:
    return [i.to_bytes(2, "big") * (i % 100 + 1) for i in range(count)]


def test_many_packets_are_sent_in_one_flush_and_arrive_in_order(pair: Pair) -> None:
    link, peer = pair.link()
    heard, flushes = Heard(), []
    peer.on_packets(heard)
    pair.to_b.on_carry = lambda packets: flushes.append(len(packets))
    link.send_many(numbered(64))
    assert flushes == [64]
    assert heard.take(64) == numbered(64)
    assert all("callbacks" in name for name in heard.threads)
    assert not link._engine.outstanding


def test_a_packet_that_is_too_large_is_named_and_nothing_is_sent(pair: Pair) -> None:
    link, _ = pair.link()
    carried = pair.to_b.carried
    with pytest.raises(MessageTooLarge, match=rf"message 2 has {link.mdu + 1} bytes") as caught:
        link.send_many([b"a", bytes(link.mdu), bytes(link.mdu + 1), bytes(link.mdu + 5)])
    assert (caught.value.index, caught.value.size, caught.value.limit) == (2, link.mdu + 1, link.mdu)
    assert pair.to_b.carried == carried
    link.send_many([])
    assert pair.to_b.carried == carried


def test_a_closed_link_sends_nothing(pair: Pair) -> None:
    link, _ = pair.link()
    link.close()
    with pytest.raises(LinkClosed):
        link.send_many([b"a"])
    link.send_many([])


def test_what_came_before_the_handler_comes_as_one_batch(pair: Pair) -> None:
    link, peer = pair.link()
    link.send_many(numbered(40))
    settle(pair.b)
    heard = Heard()
    peer.on_packets(heard)
    assert heard.batches.get(timeout=PATIENCE) == numbered(40)


def test_a_busy_handler_gets_everything_else_in_one_call(pair: Pair) -> None:
    link, peer = pair.link()
    entered, leave, heard = threading.Event(), threading.Event(), Heard()

    def handler(packets: list[bytes]) -> None:
        heard(packets)
        entered.set()
        assert leave.wait(PATIENCE)

    peer.on_packets(handler)
    link.send_many([b"first"])
    assert entered.wait(PATIENCE)
    for packet in numbered(30):
        link.send_many([packet])
    settle(pair.b)
    leave.set()
    assert heard.batches.get(timeout=PATIENCE) == [b"first"]
    assert heard.batches.get(timeout=PATIENCE) == numbered(30)


def test_the_last_handler_set_counts(pair: Pair) -> None:
    link, peer = pair.link()
    single: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    heard = Heard()
    peer.on_packets(heard)
    link.send_many([b"1"])
    assert heard.take(1) == [b"1"]
    peer.on_packet(single.put)
    link.send_many([b"2", b"3"])
    assert [single.get(timeout=PATIENCE) for _ in range(2)] == [b"2", b"3"]
    peer.on_packets(heard)
    link.send_many([b"4"])
    assert heard.take(1) == [b"4"] and single.empty()


def test_the_application_decides_what_of_a_batch_is_proved(pair: Pair) -> None:
    arrived: queue.SimpleQueue[Link] = queue.SimpleQueue()
    inbox = pair.b.register(Identity(), "test", "proofs")
    inbox.on_link(arrived.put)
    inbox.set_proofs("app", lambda data: data != b"no")
    link = pair.a.connect(inbox.hash, "test", "proofs", timeout=PATIENCE)
    heard = Heard()
    pair.to_b.hold()
    receipts = [link.send(data) for data in (b"yes", b"no", b"yes too")]
    pair.to_b.flow()
    arrived.get(timeout=PATIENCE).on_packets(heard)
    assert heard.take(3) == [b"yes", b"no", b"yes too"]
    assert receipts[0].wait(PATIENCE) and receipts[2].wait(PATIENCE)
    assert receipts[1].status.name == "SENT"


# ------------------------------------------------------------------ forwarders


def test_a_sink_is_called_on_the_reactor_after_the_flush_without_the_lock(pair: Pair) -> None:
    link, peer = pair.link()
    heard, free = Heard(), []

    def sink(packets: list[bytes]) -> None:
        taken = peer._reactor.lock.acquire(blocking=False)
        free.append(taken)
        if taken:
            peer._reactor.lock.release()
        heard(packets)

    peer._forward_to(sink)
    link.send_many(numbered(10))
    assert heard.batches.get(timeout=PATIENCE) == numbered(10)  # one turn, one call
    assert free == [True] and heard.threads == {peer._reactor._thread.name}


def test_a_sink_gets_what_was_kept_and_hands_back_when_it_goes(pair: Pair) -> None:
    link, peer = pair.link()
    link.send_many(numbered(5))
    settle(pair.b)
    heard, later = Heard(), Heard()
    peer._forward_to(heard)
    assert heard.take(5) == numbered(5)
    peer._forward_to(None)
    link.send_many(numbered(3))
    settle(pair.b)
    peer.on_packets(later)
    assert later.take(3) == numbered(3) and heard.batches.empty()


def test_a_sink_that_raises_harms_nothing_else(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    link, peer = pair.link()
    heard, raised = Heard(), threading.Event()

    def sink(packets: list[bytes]) -> None:
        if packets == [b"bad"]:
            raised.set()
            raise ValueError("of the forwarder")
        heard(packets)

    peer._forward_to(sink)
    link.send_many([b"bad"])
    assert raised.wait(PATIENCE)
    link.send_many([b"good"])
    assert heard.take(1) == [b"good"]
    assert "of the forwarder" in caplog.text
