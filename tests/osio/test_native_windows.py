"""Windows itself, and no stand-in: what Registered I/O and Wintun really do.  Protocol 09, 14.4 and 14.5.

A back end that RNSFAST_EXPECT names and that was not chosen fails these tests instead of skipping.
"""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from rnsfast.osio.backend import datagram_socket, open_backend
from rnsfast.osio.contract import BatchIO, IOClosed, Kind, Peer, TxState
from rnsfast.osio.device import DeviceError, TunDevice, open_tun
from rnsfast.osio.peers import make_peer
from rnsfast.osio.rio import why_not
from tests.fakes import PATIENCE

pytestmark = pytest.mark.windows

FAMILIES = pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["IPv4", "IPv6"])
SEED = 20_240
NETWORK = "10.199.78"


def is_expected(name: str) -> bool:
    return name in os.environ.get("RNSFAST_EXPECT", "").split(",")


def check(io: BatchIO, name: str) -> None:
    """The back end is the one that was expected."""
    if io.caps.backend != name and not is_expected(name):
        pytest.skip(f"{name} is not expected here (RNSFAST_EXPECT), and {io.caps.backend} was chosen")
    assert io.caps.backend == name, why_not()


@pytest.fixture
def open_udp(stack: ExitStack) -> Callable[..., tuple[Any, socket.socket, tuple[Any, ...]]]:
    """Makes a back end and a plain socket, both bound to the loopback, and tells where the back end is."""

    def make(family: int, connected: bool = False, **options: Any) -> tuple[Any, socket.socket, tuple[Any, ...]]:
        host = "127.0.0.1" if family == socket.AF_INET else "::1"
        plain = stack.enter_context(socket.socket(family, socket.SOCK_DGRAM))
        plain.bind((host, 0))
        plain.settimeout(PATIENCE)
        ours = datagram_socket(family)
        ours.bind((host, 0))
        if connected:
            ours.connect(plain.getsockname())
        where = ours.getsockname()
        io = open_backend(Kind.DATAGRAM, ours, **options)
        stack.callback(io.close)
        check(io, "win-rio")
        return io, plain, where

    return make


def packets(count: int, size: int = 500) -> list[bytes]:
    return [struct.pack("<I", i) + bytes([i % 256]) * (size - 4) for i in range(count)]


def receive(io: BatchIO, count: int) -> Iterator[tuple[bytes, Peer | None, int]]:
    """So many packets, each with its peer and the size of its batch."""
    batch = io.make_batch()
    while count > 0:
        got = io.recv(batch, PATIENCE)
        assert got, f"{count} packets did not come"
        for i in range(got):
            yield batch.take(i), batch.peer(i), got
        count -= got


def send_all(io: BatchIO, items: list[bytes], peer: Peer | None) -> None:
    at = 0
    while at < len(items):
        result = io.send(items, peer, at)
        assert result.state in (TxState.DONE, TxState.BLOCKED)
        assert result.rejected == ()
        at = result.taken
        if result.state is TxState.BLOCKED:
            assert io.wait(PATIENCE, read=False, write=True)


# -- Registered I/O --------------------------------------------------------------------------------------------------


def test_registered_io_works_here() -> None:
    reason = why_not()
    if reason and not is_expected("win-rio"):
        pytest.skip(f"win-rio is not expected here (RNSFAST_EXPECT): {reason}")
    assert reason is None


@FAMILIES
def test_a_burst_comes_in_batches_with_the_address_of_its_sender(open_udp: Any, family: int) -> None:
    io, plain, where = open_udp(family)
    assert (io.caps.max_rx, io.caps.max_tx, io.fileno()) == (32, 32, -1)
    items = packets(200)
    for item in items:
        plain.sendto(item, where)
    found = list(receive(io, 200))
    assert [item for item, _, _ in found] == items
    host, port = plain.getsockname()[:2]
    assert {peer for _, peer, _ in found} == {make_peer(host, port)}
    assert max(size for _, _, size in found) > 1, "never more than one packet a dequeue"


@FAMILIES
@pytest.mark.parametrize("connected", [True, False], ids=["connected", "unconnected"])
def test_a_burst_goes_out_in_order_and_once(open_udp: Any, family: int, connected: bool) -> None:
    io, plain, _ = open_udp(family, connected)
    peer = None if connected else make_peer(*plain.getsockname()[:2])
    items = packets(50)
    for start in (0, 1, 3, 35):  # one, two, thirty-two, the rest
        stop = {0: 1, 1: 3, 3: 35, 35: 50}[start]
        send_all(io, items[start:stop], peer)
    assert [plain.recv(4096) for _ in items] == items


def test_the_ring_goes_round_many_times(open_udp: Any) -> None:
    io, plain, where = open_udp(socket.AF_INET)
    peer = make_peer(*plain.getsockname()[:2])
    for turn in range(200):
        items = packets(32, 100 + turn)
        send_all(io, items, peer)
        assert [plain.recv(4096) for _ in items] == items
        for item in items:
            plain.sendto(item, where)
        assert [item for item, _, _ in receive(io, 32)] == items
    assert io.stats.tx_rejected == io.stats.rx_dropped == 0


@FAMILIES
def test_bursts_of_any_size_and_number_pass_the_checks(open_udp: Any, family: int) -> None:
    io, plain, where = open_udp(family)
    chance = random.Random(SEED)
    for _ in range(100):
        items = [
            chance.randbytes(chance.choice([1, 2, 500, 2016, chance.randint(1, 2016)]))
            for _ in range(chance.randint(1, 40))
        ]
        for item in items:
            plain.sendto(item, where)
        assert [item for item, _, _ in receive(io, len(items))] == items
    assert io.stats.rx_dropped == 0


def test_a_datagram_above_the_slot_is_dropped_and_counted(open_udp: Any) -> None:
    io, plain, where = open_udp(socket.AF_INET)
    for size in (1, 2016, 2017, 9000, 7):
        plain.sendto(b"x" * size, where)
    assert [len(item) for item, _, _ in receive(io, 3)] == [1, 2016, 7]
    assert io.stats.rx_dropped == 2


def test_an_unreachable_peer_does_not_end_the_reader(open_udp: Any) -> None:
    io, plain, where = open_udp(socket.AF_INET)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as gone:
        gone.bind(("127.0.0.1", 0))
        nobody = make_peer(*gone.getsockname()[:2])
    for _ in range(10):
        send_all(io, packets(3), nobody)
    plain.sendto(b"still here", where)
    assert [item for item, _, _ in receive(io, 1)] == [b"still here"]


def test_nothing_there_is_said_at_once_and_a_wake_ends_a_wait(open_udp: Any) -> None:
    io, _, _ = open_udp(socket.AF_INET)
    batch = io.make_batch()
    assert [io.recv(batch) for _ in range(3)] == [0, 0, 0]
    io.wake()
    assert io.recv(batch, PATIENCE) == 0


def close_under_a_reader(io: BatchIO) -> None:
    ended, reading = threading.Event(), threading.Event()

    def read() -> None:
        batch = io.make_batch()
        reading.set()
        try:
            while True:
                io.recv(batch, timeout=None)
        except IOClosed:
            ended.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert reading.wait(PATIENCE)
    io.close()
    assert ended.wait(PATIENCE)
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_closing_ends_a_blocked_reader_and_frees_the_port(open_udp: Any) -> None:
    io, _, where = open_udp(socket.AF_INET)
    close_under_a_reader(io)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as again:
        again.bind(where)


def test_many_are_opened_and_closed_while_packets_are_under_way(open_udp: Any) -> None:
    for _ in range(50):
        io, plain, where = open_udp(socket.AF_INET)
        send_all(io, packets(32), make_peer(*plain.getsockname()[:2]))
        for item in packets(32):
            plain.sendto(item, where)
        io.close()


# -- Wintun ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def device(stack: ExitStack) -> TunDevice:
    try:
        found = open_tun("rnsfast test")
    except DeviceError as error:
        if is_expected("win-wintun"):
            raise
        pytest.skip(f"win-wintun is not expected here (RNSFAST_EXPECT): {error}")
    stack.callback(found.close)
    check(found.io, "win-wintun")
    found.set_mtu(1400)
    found.add_address(f"{NETWORK}.1/24")
    found.up()
    return found


def udp4(source: str, target: str, port: int, payload: bytes) -> bytes:
    """An IPv4 packet with a datagram, without the checksum that UDP may do without."""
    head = struct.pack(
        ">BBHHHBBH4s4s", 0x45, 0, 28 + len(payload), 0, 0, 64, 17, 0, socket.inet_aton(source), socket.inet_aton(target)
    )
    total = sum(struct.unpack(">10H", head))
    total = (total & 0xFFFF) + (total >> 16)
    total = (total & 0xFFFF) + (total >> 16)
    head = head[:10] + struct.pack(">H", ~total & 0xFFFF) + head[12:]
    return head + struct.pack(">HHHH", 40_000, port, 8 + len(payload), 0) + payload


def test_what_the_machine_sends_through_a_device_is_read(device: TunDevice, stack: ExitStack) -> None:
    sender = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    items = packets(60)
    for item in items:
        sender.sendto(item, (f"{NETWORK}.2", 4242))
    target, got = socket.inet_aton(f"{NETWORK}.2"), []
    batch = device.io.make_batch()
    while len(got) < len(items):
        assert device.io.recv(batch, PATIENCE), "packets did not come"
        got += [packet[28:] for packet in batch.take_all() if packet[0] == 0x45 and packet[16:20] == target]
    assert got == items


def test_what_is_written_to_a_device_is_taken_in_order(device: TunDevice) -> None:
    """Whether it is delivered is for the firewall to say; what is no packet is refused here."""
    items = [udp4(f"{NETWORK}.2", f"{NETWORK}.1", 4242, payload) for payload in packets(50)]
    result = device.io.send([*items[:10], b"\x75 no version", *items[10:]])
    assert (result.state, result.taken, result.sent) == (TxState.DONE, 51, 50)
    assert [index for index, _ in result.rejected] == [10]


def test_a_device_is_closed_under_its_reader_and_made_again(device: TunDevice) -> None:
    close_under_a_reader(device.io)
    again = open_tun("rnsfast test")
    assert again.is_up
    again.close()
