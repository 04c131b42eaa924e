"""A port over the back ends of Windows, which no poller can watch: read by a thread, retried by the clock."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from rnsfast.engine.port import Port
from rnsfast.interfaces.packets import RETRY, PacketConnection
from rnsfast.osio.contract import BatchIO, Peer
from rnsfast.osio.wintun import WintunIO
from rnsfast.wire.drop import Drop
from tests.fakes import PATIENCE, FakeRuntime
from tests.osio.fake_rio import COMMIT_ONLY, DEFER, FakeRio
from tests.osio.fake_wintun import FakeWintun
from tests.osio.rio_makers import ALICE, name28, opened, packets, sent


class Bench:
    def __init__(self, io: BatchIO, peer: Peer | None) -> None:
        self.runtime = FakeRuntime()
        self.port = Port("UDPInterface[x/127.0.0.1:1]", hw_mtu=1064, upgradable=False)
        self.port.online = True
        self.broken: list[int] = []
        self.arrived = threading.Condition()
        self.runtime.on_deliver = self._notice
        self.connection = PacketConnection(self.runtime, self.port, io, peer, self.broken.append)
        self.runtime.attach(self.port, self)
        self.connection.watch()

    def _notice(self, port: Port, items: list[bytes]) -> None:
        with self.arrived:
            self.arrived.notify_all()

    def wait_for(self, count: int) -> list[bytes]:
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.runtime.received) >= count, PATIENCE)
        return self.runtime.received

    def send(self, items: list[bytes]) -> None:
        with self.runtime.lock:
            assert self.port.send_many(items)
        self.connection.flush()


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def bench_over(closing: ExitStack, io: BatchIO, peer: Peer | None) -> Bench:
    bench = Bench(io, peer)
    closing.callback(bench.runtime.close)
    closing.callback(bench.connection.close)
    return bench


def test_datagrams_go_both_ways_until_the_port_is_closed(closing: ExitStack) -> None:
    rio = FakeRio()
    bench = bench_over(closing, closing.enter_context(opened(rio)), ALICE)
    items = packets(5, 400)
    bench.send(items)
    assert rio.tx
    assert (sent(rio), rio.tx.flags) == (items, [DEFER] * 5 + [COMMIT_ONLY])
    assert rio.waiting.wait(PATIENCE)
    for item in items:
        rio.arrive(item, name28(ALICE))
    assert bench.wait_for(5) == items
    bench.connection.close()
    assert rio.log[-1] == "free"
    assert not bench.broken


def test_a_ring_that_stays_full_is_tried_again_later(closing: ExitStack) -> None:
    rio = FakeRio(hold=True)
    bench = bench_over(closing, closing.enter_context(opened(rio, max_batch=4, slots=4)), ALICE)
    items = packets(7, 400)
    bench.send(items)
    rio.complete()
    rio.hold = False
    bench.runtime.advance(RETRY)
    assert sent(rio) == items
    assert bench.port.tx_packets == 7


def test_packets_of_a_device_go_both_ways_and_a_full_ring_is_counted(closing: ExitStack) -> None:
    tun = FakeWintun(room=3)
    bench = bench_over(closing, WintunIO("test", sys=tun), None)
    items = [b"\x45" + item for item in packets(5, 400)]
    bench.send(items)
    assert tun.sent == items[:3]
    assert (bench.port.tx_packets, bench.port.drops[Drop.TX_NO_BUFFERS]) == (3, 2)
    assert tun.waiting.wait(PATIENCE)
    tun.arrive(*items)
    assert bench.wait_for(5) == items
    bench.connection.close()
    assert tun.log[-1] == "close adapter"
