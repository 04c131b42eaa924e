"""Datagrams on macOS, both ways, over a kernel that follows the rules of the private calls."""

from __future__ import annotations

import errno
import socket
import threading
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rnsfast.osio.contract import IOClosed, RxBatch, TxState
from rnsfast.osio.darwin import DarwinDatagramIO
from rnsfast.osio.peers import make_peer
from tests.fakes import PATIENCE
from tests.osio.darwin_fakes import (
    DONTWAIT,
    Kernel,
    packets,
)

pytestmark = pytest.mark.linux  # whose sockets the stand-ins use, and their errors


def receive(io: DarwinDatagramIO, batch: RxBatch | None = None) -> list[bytes]:
    """Everything that is there."""
    into = io.make_batch() if batch is None else batch
    got: list[bytes] = []
    while io.recv(into):
        got += into.take_all()
    return got


# -- the stand-in kernel ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plain", [False, True], ids=["batched", "plain"])
def test_packets_cross_a_pair_in_order_each_once(darwin_pair: Any, plain: bool) -> None:
    left, right, kernel = darwin_pair(plain=plain)
    items = packets(150)
    got: list[bytes] = []
    at = 0
    while at < len(items):  # a queue of a pair has room for fewer
        result = left.send(items, None, at)
        assert result.state in (TxState.DONE, TxState.BLOCKED) and result.rejected == ()
        at = result.taken
        got += receive(right)
    assert got == items
    assert left.stats.tx_packets == right.stats.rx_packets == len(items)
    used = {"recvfrom", "sendto"} if plain else {"recvmsg_x", "sendmsg_x"}
    assert used <= set(kernel.calls) <= used | {"sendto"}
    assert set(kernel.flags) == {DONTWAIT}


@pytest.mark.parametrize("plain", [False, True], ids=["batched", "plain"])
@pytest.mark.parametrize("large", [[0], [3], [0, 3, 9], [8, 9], list(range(10))], ids=str)
def test_what_the_kernel_finds_too_large_costs_only_itself(darwin_pair: Any, plain: bool, large: list[int]) -> None:
    left, right, _ = darwin_pair(limit=200, plain=plain)
    items = [b"L" * 300 if i in large else packet for i, packet in enumerate(packets(10))]
    result = left.send(items)
    assert (result.state, result.taken) == (TxState.DONE, 10)
    assert result.rejected == tuple((i, errno.EMSGSIZE) for i in large)
    assert receive(right) == [packet for i, packet in enumerate(items) if i not in large]
    assert left.stats.tx_rejected == len(large)


@pytest.mark.parametrize("plain", [False, True], ids=["batched", "plain"])
def test_a_full_pair_blocks_and_the_rest_arrives_once(darwin_pair: Any, plain: bool) -> None:
    left, right, _ = darwin_pair(plain=plain, max_batch=128)
    items = packets(2000, size=2000)
    items = [item[:2048] for item in items]
    result = left.send(items)
    assert result.state is TxState.BLOCKED and 0 < result.taken < 2000
    assert result.sent == result.taken
    got: list[bytes] = []
    while result.state is TxState.BLOCKED:
        got += receive(right)
        assert got == items[: result.taken]
        result = left.send(items, None, result.taken)
    assert result.state is TxState.DONE
    assert got + receive(right) == items


def test_a_peer_that_is_gone_leaves_nothing_to_send_again(darwin_pair: Any) -> None:
    left, right, kernel = darwin_pair()
    right.close()
    result = left.send(packets(3))
    assert (result.state, result.errno) == (TxState.UNKNOWN, errno.ECONNREFUSED)
    assert kernel.calls == ["sendmsg_x"]


def test_receive_drains_without_a_second_look(darwin_pair: Any) -> None:
    left, right, kernel = darwin_pair()
    batch = right.make_batch()
    left.send_one(b"one")
    assert right.recv(batch, None) == 1
    left.send(packets(3))
    assert right.recv(batch, None) == 3
    assert batch.take_all() == packets(3)
    assert kernel.calls.count("recvmsg_x") == 2


def test_five_packets_into_room_for_two(darwin_pair: Any) -> None:
    left, right, _ = darwin_pair()
    left.send(packets(5))
    batch = RxBatch(2, 2049)
    assert [right.recv(batch) for _ in range(4)] == [2, 2, 1, 0]


def test_the_clamp_of_the_kernel_is_never_reached(darwin_pair: Any) -> None:
    left, right, kernel = darwin_pair(max_batch=128)
    left.send(packets(100))
    receive(right)
    assert max(kernel.counts) <= 128


def test_waits_for_the_first_packet_and_can_be_woken(darwin_pair: Any) -> None:
    left, right, _ = darwin_pair()
    batch = right.make_batch()
    assert right.recv(batch, 0.01) == 0
    right.wake()
    assert right.recv(batch, PATIENCE) == 0
    left.send(packets(2))
    assert right.recv(batch, PATIENCE) == 2


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["IPv4", "IPv6"])
@pytest.mark.parametrize("connected", [True, False], ids=["connected", "unconnected"])
@pytest.mark.parametrize("plain", [False, True], ids=["batched", "plain"])
def test_datagrams_over_loopback_with_their_senders(
    stack: ExitStack, family: int, connected: bool, plain: bool
) -> None:
    host = "127.0.0.1" if family == socket.AF_INET else "::1"
    kernel = Kernel()
    if plain:
        kernel.recvmsg_x = kernel.sendmsg_x = None
    socks = [socket.socket(family, socket.SOCK_DGRAM) for _ in range(2)]
    for sock in socks:
        sock.bind((host, 0))
    ports = [sock.getsockname()[1] for sock in socks]
    if connected:
        socks[0].connect((host, ports[1]))
    sender, receiver = (DarwinDatagramIO(sock, sys=kernel) for sock in socks)
    for io in (sender, receiver):
        stack.callback(io.close)
    peer = None if connected else make_peer(host, ports[1], flavour="darwin")
    items = packets(40)
    assert sender.send(items, peer).sent == 40
    batch = receiver.make_batch()
    got: list[bytes] = []
    while len(got) < 40:
        assert receiver.recv(batch, PATIENCE)
        got += batch.take_all()
        assert batch.uniform == make_peer(host, ports[0], flavour="darwin")
    assert got == items
    assert ("sendmsg_x" in kernel.calls) == (connected and not plain)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 260), min_size=1, max_size=40),
    limit=st.integers(1, 260),
    capacity=st.integers(1, 20),
    max_batch=st.integers(1, 20),
    plain=st.booleans(),
)
def test_nothing_is_lost_without_a_counter_and_nothing_comes_twice(
    sizes: list[int], limit: int, capacity: int, max_batch: int, plain: bool
) -> None:
    kernel = Kernel(limit)
    if plain:
        kernel.recvmsg_x = kernel.sendmsg_x = None
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    sender = DarwinDatagramIO(left, sys=kernel, max_batch=max_batch, max_packet=250)
    receiver = DarwinDatagramIO(right, sys=kernel, max_batch=max_batch, max_packet=230)
    try:
        items = [bytes([i + 1]) * size for i, size in enumerate(sizes)]
        got: list[bytes] = []
        at = sent = 0
        rejected: list[tuple[int, int]] = []
        batch = RxBatch(capacity, 231)
        while True:
            result = sender.send(items, None, at)
            at, sent, rejected = result.taken, sent + result.sent, rejected + list(result.rejected)
            got += receive(receiver, batch)
            if result.state is TxState.DONE:
                break
            assert result.state is TxState.BLOCKED
        refused = dict(rejected)
        assert set(refused) == {i for i, size in enumerate(sizes) if not 0 < size <= min(limit, 250)}
        assert sent + len(rejected) == len(items)
        arrived = [item for i, item in enumerate(items) if i not in refused]
        assert got == [item for item in arrived if len(item) <= 230]
        assert receiver.stats.rx_dropped == len(arrived) - len(got)
        assert not sender.fallbacks.keys() - {"recvmsg_x", "sendmsg_x"} and bool(sender.fallbacks) == plain
    finally:
        sender.close()
        receiver.close()


def test_close_tells_a_reader(darwin_pair: Any) -> None:
    left, _, _ = darwin_pair()
    left.close()
    assert left.fileno() == -1
    assert left.send(packets(3)).state is TxState.CLOSED


def test_close_wakes_a_reader_that_waits(darwin_pair: Any) -> None:
    left, _, kernel = darwin_pair()
    ended: list[type] = []
    looked = threading.Event()
    take = kernel._recvmsg_x

    def recvmsg_x(fd: int, address: int, count: int, flags: int) -> int:
        result: int = take(fd, address, count, flags)
        looked.set()
        return result

    left._recvmsg_x = recvmsg_x

    def read() -> None:
        try:
            left.recv(left.make_batch(), None)
        except OSError as error:
            ended.append(type(error))

    reader = threading.Thread(target=read)
    reader.start()
    assert looked.wait(PATIENCE)
    left.close()
    reader.join(PATIENCE)
    assert not reader.is_alive() and ended == [IOClosed]
