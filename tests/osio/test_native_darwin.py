"""macOS itself, and no stand-in: what `recvmsg_x`, `sendmsg_x` and utun devices really do.  Protocol 09, 14.4 and 14.5.

A back end that RNSFAST_EXPECT names and that was not chosen, or gave a call up, fails these tests instead of skipping.
"""

from __future__ import annotations

import errno
import os
import random
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from rnsfast.osio.backend import open_backend
from rnsfast.osio.contract import Kind, RxBatch, TxState
from rnsfast.osio.darwin import DarwinDatagramIO
from rnsfast.osio.msgx import STEP, Libsystem, MsgxIO
from rnsfast.osio.peers import make_peer
from tests.fakes import PATIENCE
from tests.osio.darwin_fakes import packets

pytestmark = pytest.mark.darwin

FAMILIES = pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["IPv4", "IPv6"])
SEED = 20_240
LARGE = 20_000  # bytes: above net.inet.udp.maxdgram, 9,216


def is_expected(name: str) -> bool:
    return name in os.environ.get("RNSFAST_EXPECT", "").split(",")


def check(io: Any, name: str) -> None:
    """The back end is the one that was expected, and every private call is still made."""
    if io.caps.backend != name and not is_expected(name):
        pytest.skip(f"{name} is not expected here (RNSFAST_EXPECT), and {io.caps.backend} was chosen")
    assert io.caps.backend == name
    assert io.fallbacks == {}


@pytest.fixture
def open_udp(stack: ExitStack) -> Callable[..., tuple[DarwinDatagramIO, socket.socket]]:
    """Makes a back end and a plain socket, both bound to the loopback."""

    def make(family: int, connected: bool = False, **options: Any) -> tuple[DarwinDatagramIO, socket.socket]:
        host = "127.0.0.1" if family == socket.AF_INET else "::1"
        ours, plain = (stack.enter_context(socket.socket(family, socket.SOCK_DGRAM)) for _ in range(2))
        for sock in (ours, plain):
            sock.bind((host, 0))
        plain.settimeout(PATIENCE)
        if connected:
            ours.connect(plain.getsockname())
        io = DarwinDatagramIO(ours, **options)
        stack.callback(io.close)
        check(io, "darwin-msgx")
        return io, plain

    return make


def receive(io: Any, count: int, batch: RxBatch | None = None) -> Iterator[tuple[bytes, Any, int]]:
    """So many packets, each with its peer and the size of its batch."""
    into = io.make_batch() if batch is None else batch
    while count > 0:
        got = io.recv(into, PATIENCE)
        assert got, f"{count} packets did not come"
        for i in range(got):
            yield into.take(i), into.peer(i), got
        count -= got


# -- recvmsg_x --------------------------------------------------------------------------------------------------------


def test_both_calls_are_there() -> None:
    real = Libsystem()
    if not is_expected("darwin-msgx") and real.recvmsg_x is None:
        pytest.skip("recvmsg_x is not expected here (RNSFAST_EXPECT)")
    assert real.recvmsg_x is not None and real.sendmsg_x is not None


def test_it_is_what_a_datagram_socket_gets(stack: ExitStack) -> None:
    io = open_backend(Kind.DATAGRAM, socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    stack.callback(io.close)
    check(io, "darwin-msgx")
    assert (io.caps.max_rx, io.caps.max_tx) == (64, 64)


@FAMILIES
@pytest.mark.parametrize("connected", [True, False], ids=["connected", "unconnected"])
def test_a_burst_comes_in_batches_with_the_address_of_its_sender(open_udp: Any, family: int, connected: bool) -> None:
    io, plain = open_udp(family, connected)
    where = io._sock.getsockname()
    items = packets(50)
    for item in items:
        plain.sendto(item, where)
    found = list(receive(io, 50))
    assert [item for item, _, _ in found] == items
    host, port = plain.getsockname()[:2]
    assert {peer for _, peer, _ in found} == {make_peer(host, port)}
    assert max(size for _, _, size in found) > 1, "never more than one packet a call"
    check(io, "darwin-msgx")


@FAMILIES
def test_several_senders_keep_their_addresses(open_udp: Any, stack: ExitStack, family: int) -> None:
    io, plain = open_udp(family)
    where, host = io._sock.getsockname(), plain.getsockname()[0]
    senders = [stack.enter_context(socket.socket(family, socket.SOCK_DGRAM)) for _ in range(8)]
    for sender in senders:
        sender.bind((host, 0))
    for i in range(40):
        senders[i % 8].sendto(bytes([i + 1]), where)
    ports = [sender.getsockname()[1] for sender in senders]
    for item, peer, _ in receive(io, 40):
        assert peer == make_peer(host, ports[(item[0] - 1) % 8])
    check(io, "darwin-msgx")


@FAMILIES
def test_bursts_of_any_size_and_number_pass_the_checks(open_udp: Any, family: int) -> None:
    io, plain = open_udp(family)
    where, chance = io._sock.getsockname(), random.Random(SEED)
    batch = io.make_batch()
    for _ in range(300):
        items = [
            chance.randbytes(chance.choice([1, 2, 500, 2048, chance.randint(1, 2048)]))
            for _ in range(chance.randint(1, 70))
        ]
        for item in items:
            plain.sendto(item, where)
        assert [item for item, _, _ in receive(io, len(items), batch)] == items
    assert io.stats.rx_dropped == 0
    check(io, "darwin-msgx")


def test_what_the_kernel_writes_into_the_headers(open_udp: Any) -> None:
    io, plain = open_udp(socket.AF_INET)
    batch = io.make_batch()
    assert io.recv(batch) == 0
    headers = io._rx
    fresh = headers.words.tolist()
    for size in (10, 20, 30):
        plain.sendto(b"x" * size, io._sock.getsockname())
    assert len(list(receive(io, 3, batch))) == 3
    used = headers.used
    assert headers.sizes(used)[-1] in (10, 20, 30)
    assert set(headers.name_sizes(used)) == {16}
    assert set(headers.flags(used)) == {0}
    # What no datagram went into is as it was: only used headers are restored.
    assert headers.words[STEP * used :].tolist() == fresh[STEP * used :]


def test_a_packet_that_is_too_large_is_dropped_and_counted(open_udp: Any) -> None:
    io, plain = open_udp(socket.AF_INET, max_packet=100)
    for size in (1, 99, 100, 101, 102, 5000, 7):
        plain.sendto(b"x" * size, io._sock.getsockname())
    assert [len(item) for item, _, _ in receive(io, 4)] == [1, 99, 100, 7]
    assert io.stats.rx_dropped == 3
    check(io, "darwin-msgx")


def test_nothing_there_is_said_at_once(open_udp: Any) -> None:
    io, _ = open_udp(socket.AF_INET)
    batch = io.make_batch()
    assert [io.recv(batch) for _ in range(3)] == [0, 0, 0]
    check(io, "darwin-msgx")


def test_a_link_local_sender_can_be_answered(stack: ExitStack) -> None:
    zone = socket.if_nametoindex("lo0")
    ours, plain = (stack.enter_context(socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)) for _ in range(2))
    for sock in (ours, plain):
        sock.bind(("fe80::1", 0, 0, zone))
    plain.settimeout(PATIENCE)
    io = DarwinDatagramIO(ours)
    stack.callback(io.close)
    check(io, "darwin-msgx")
    plain.sendto(b"question", ours.getsockname())
    ((_, peer, _),) = receive(io, 1)
    assert peer == make_peer("fe80::1", plain.getsockname()[1], scope=zone)
    assert io.send([b"answer", b"again"], peer).sent == 2
    assert [plain.recv(100) for _ in range(2)] == [b"answer", b"again"]


# -- sendmsg_x --------------------------------------------------------------------------------------------------------


@FAMILIES
def test_a_connected_socket_sends_in_batches(open_udp: Any, family: int) -> None:
    io, plain = open_udp(family, connected=True)
    items = packets(150)
    at = 0
    while at < len(items):
        result = io.send(items, None, at)
        assert result.state in (TxState.DONE, TxState.BLOCKED) and result.rejected == ()
        at = result.taken
        if result.state is TxState.BLOCKED:
            assert io.wait(PATIENCE, read=False, write=True)
    assert [plain.recv(4096) for _ in items] == items
    assert io.stats.tx_calls < 50, "not in batches"
    check(io, "darwin-msgx")


@pytest.mark.parametrize("large", [[0], [3], [0, 3, 9], [8, 9]], ids=str)
def test_an_oversize_packet_costs_only_itself(open_udp: Any, large: list[int]) -> None:
    io, plain = open_udp(socket.AF_INET, connected=True, max_packet=60_000)
    items = [b"L" * LARGE if i in large else item for i, item in enumerate(packets(10))]
    result = io.send(items)
    assert (result.state, result.taken) == (TxState.DONE, 10)
    assert result.rejected == tuple((i, errno.EMSGSIZE) for i in large)
    good = [item for i, item in enumerate(items) if i not in large]
    assert [plain.recv(4096) for _ in good] == good
    check(io, "darwin-msgx")


def test_an_unconnected_socket_sends_one_by_one(open_udp: Any) -> None:
    io, plain = open_udp(socket.AF_INET)
    items = packets(20)
    assert io.send(items, make_peer(*plain.getsockname())).sent == 20
    assert [plain.recv(4096) for _ in items] == items
    check(io, "darwin-msgx")


def test_packets_cross_an_af_unix_pair(stack: ExitStack) -> None:
    left, right = (
        DarwinDatagramIO(sock, max_packet=1000) for sock in socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    )
    stack.callback(left.close)
    stack.callback(right.close)
    items = packets(8)
    result = left.send(items)
    assert (result.state, result.rejected) == (TxState.DONE, ())
    assert [item for item, _, _ in receive(right, 8)] == items
    check(left, "darwin-msgx")
    check(right, "darwin-msgx")


# -- utun ---------------------------------------------------------------------------------------------------------


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


@pytest.fixture
def utun_device(stack: ExitStack) -> Any:
    from rnsfast.osio.utun_device import open_utun

    device = open_utun(None)
    stack.callback(device.close)
    check(device.io, "darwin-utun")
    device.add_address("10.199.77.1/24")
    device.up()
    return device


@pytest.mark.darwin_root
def test_the_kernel_keeps_two_batches_for_a_device(utun_device: Any) -> None:
    from rnsfast.osio import layouts_darwin as layout

    kept = utun_device.io._sock.getsockopt(layout.SYSPROTO_CONTROL, layout.UTUN_OPT_MAX_PENDING_PACKETS)
    assert kept >= 2 * utun_device.io.caps.max_rx
    assert utun_device.name.startswith("utun") and utun_device.is_up and utun_device.mtu >= 1280


@pytest.mark.darwin_root
def test_what_the_machine_sends_through_a_device_is_read_in_batches(utun_device: Any, stack: ExitStack) -> None:
    io: MsgxIO = utun_device.io
    sender = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    items = packets(60)
    for item in items:
        sender.sendto(item, ("10.199.77.2", 4242))
    target, got, largest = socket.inet_aton("10.199.77.2"), [], 0
    batch = io.make_batch()
    while len(got) < len(items):
        count = io.recv(batch, PATIENCE)
        assert count, "packets did not come"
        largest = max(largest, count)
        got += [packet[28:] for packet in batch.take_all() if packet[0] == 0x45 and packet[16:20] == target]
    assert got == items
    assert largest > 1, "never more than one packet a call"
    check(io, "darwin-utun")


@pytest.mark.darwin_root
def test_what_is_written_to_a_device_reaches_the_machine(utun_device: Any, stack: ExitStack) -> None:
    io: MsgxIO = utun_device.io
    receiver = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    receiver.bind(("10.199.77.1", 0))
    receiver.settimeout(PATIENCE)
    payloads = packets(50)
    items = [udp4("10.199.77.2", "10.199.77.1", receiver.getsockname()[1], payload) for payload in payloads]
    result = io.send([*items[:10], b"\x75 no version", *items[10:]])
    assert (result.state, result.sent, result.rejected) == (TxState.DONE, 50, ((10, errno.EINVAL),))
    assert [receiver.recv(4096) for _ in payloads] == payloads
    assert io.stats.tx_calls < 25, "not in batches"
    check(io, "darwin-utun")
