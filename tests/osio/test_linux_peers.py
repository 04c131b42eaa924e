"""Whose address stands in which entry: many peers at once, and senders that cannot be."""

from __future__ import annotations

import errno
import socket
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from rnsfast.osio.contract import Peer, RxBatch, TxState
from rnsfast.osio.linux import SENDERS, Libc, LinuxDatagramIO
from rnsfast.osio.peers import make_peer
from tests.osio.linux_fake import Arrived, FakeSys, gro

pytestmark = pytest.mark.skipif(not Libc.usable(), reason="the structures are those of 64-bit little-endian Linux")


Open = Callable[..., LinuxDatagramIO]


@pytest.fixture
def opened(stack: ExitStack) -> Open:
    def make(sys: FakeSys, family: int = socket.AF_INET, **options: object) -> LinuxDatagramIO:
        io = LinuxDatagramIO(socket.socket(family, socket.SOCK_DGRAM), sys=sys, **options)  # type: ignore[arg-type]
        stack.callback(io.close)
        return io

    return make


@pytest.fixture
def fake(opened: Open) -> tuple[LinuxDatagramIO, FakeSys]:
    sys = FakeSys()
    return opened(sys, segmentation=False), sys


def crowd(count: int, first: int = 0) -> list[Peer]:
    return [make_peer(f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}", 4242) for n in range(first, first + count)]


def test_more_peers_than_are_remembered_get_their_own_packets(fake: tuple[LinuxDatagramIO, FakeSys]) -> None:
    """What is forgotten in the middle of a batch would be memory that the kernel still reads addresses from."""
    io, sys = fake
    peers = crowd(SENDERS + 500)
    items = [n.to_bytes(2, "big") for n in range(len(peers))]
    sys.sends.extend([None] * 100)
    assert io.send(items[:30], peers[:30]).sent == 30  # so that the bound is met in the middle of a batch
    assert io.send(items, peers, start=30).state is TxState.DONE
    pairs = [(data, name) for sent in sys.log for data, name, _ in sent.entries]
    assert pairs == [(item, peer.raw) for item, peer in zip(items, peers, strict=True)]


def test_one_peer_after_many_is_the_one(fake: tuple[LinuxDatagramIO, FakeSys]) -> None:
    io, sys = fake
    sys.sends.extend([None, None, None])
    for peers in (crowd(64), crowd(1, 500)[0], None):
        assert io.send([b"x"] * 64, peers).sent == 64
    names = [[name for _, name, _ in sent.entries] for sent in sys.log]
    assert names == [[peer.raw for peer in crowd(64)], [crowd(1, 500)[0].raw] * 64, [b""] * 64]


def test_peers_count_from_where_the_batch_goes_on(fake: tuple[LinuxDatagramIO, FakeSys]) -> None:
    io, sys = fake
    peers = crowd(6)
    peers[4] = make_peer("::1", 4242)
    sys.sends.append(None)
    result = io.send([bytes([n]) for n in range(6)], peers, start=2)
    assert (result.taken, result.sent, result.rejected) == (6, 3, ((4, errno.EAFNOSUPPORT),))
    assert [(data, name) for data, name, _ in sys.log[0].entries] == [(bytes([n]), peers[n].raw) for n in (2, 3, 5)]


V4 = b"\x02\x00\x10\x92\x7f\x00\x00\x01" + bytes(8)
V6 = b"\x0a\x00\x10\x92" + bytes(24)


@pytest.mark.parametrize("peers", [True, False], ids=["with peers", "without"])
@pytest.mark.parametrize(
    ("family", "good", "odd"),
    [
        (socket.AF_INET, V4, b"\x0a" + V4[1:]),  # the length of one family, the number of another
        (socket.AF_INET, V4, b"\x01" + V4[1:]),
        (socket.AF_INET, V4, V6),
        (socket.AF_INET6, V6, V4),
        (socket.AF_INET6, V6, b"\x02" + V6[1:]),
    ],
    ids=["4 as 6", "4 as unix", "6 on 4", "4 on 6", "6 as 4"],
)
def test_a_sender_of_another_family_drops_the_batch(
    opened: Open, family: int, good: bytes, odd: bytes, peers: bool
) -> None:
    sys = FakeSys(receives=deque([[Arrived(b"a", good), Arrived(b"b", odd)], -errno.EAGAIN, [Arrived(b"c", good)]]))
    io = opened(sys, family, peers=peers)
    batch = io.make_batch()
    assert io.recv(batch) == 0 and io.stats.rx_dropped == batch.dropped == 2
    assert io.recv(batch) == 1 and batch.take_all() == [b"c"]
    assert (batch.peer(0) is not None) is peers


def test_senders_beyond_what_is_remembered_are_still_told_apart(opened: Open) -> None:
    peers = crowd(SENDERS + 100)
    batches = [[Arrived(b"x", peer.raw) for peer in peers[at : at + 64]] for at in range(0, len(peers), 64)]
    io = opened(FakeSys(receives=deque(batches)))
    batch, found = io.make_batch(), []
    while len(found) < len(peers):
        assert io.recv(batch)
        found += batch.peers
    assert found == peers


def test_what_waits_from_one_batch_stays_right_in_another(opened: Open) -> None:
    """Datagrams without room in the first batch stand in its memory, which its next fill overwrites."""
    joined = Arrived(b"".join(bytes([n]) * 50 for n in range(4)), control=gro(50))
    sys = FakeSys(receives=deque([[joined], [Arrived(b"z" * 200)]]))
    io = opened(sys, max_batch=2, coalescing=True)
    one, two = io.make_batch(), io.make_batch()
    assert io.recv(one) == 2 and io.recv(two) == 2
    assert io.recv(one) == 1 and one.take(0) == b"z" * 200
    assert two.take_all() == [b"\x02" * 50, b"\x03" * 50]


def test_a_batch_of_the_caller_may_have_fewer_slots(opened: Open) -> None:
    sys = FakeSys(receives=deque([[Arrived(b"a"), Arrived(b"b")], -errno.EAGAIN]))
    io = opened(sys)
    batch = RxBatch(2, 100)
    assert io.recv(batch) == 2 and sys.received[0][0] == 2
