"""Every datagram back end of this system, on real sockets: drained, in order, a refused packet costs only itself."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rnsfast.osio import descriptor
from rnsfast.osio.backend import bounds, open_backend
from rnsfast.osio.contract import BatchIO, Kind, TxState
from rnsfast.osio.linux import Libc, LinuxDatagramIO
from rnsfast.osio.peers import make_peer
from rnsfast.osio.portable import PortableDatagramIO

PATIENCE = 10.0
V4, V6 = ("127.0.0.1", 0), ("::1", 0)

Open = Callable[..., BatchIO]


@pytest.fixture
def opened(variant: str) -> Iterator[Open]:
    made: list[BatchIO] = []

    def make(sock: socket.socket, **options: object) -> BatchIO:
        made.append(open_backend(Kind.DATAGRAM, sock, **options))  # type: ignore[call-overload]
        return made[-1]

    yield make
    for io in made:
        io.close()


def bound(address: tuple[str, int] = V4) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_DGRAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    sock.bind(address)
    return sock


def pair(opened: Open, **options: object) -> tuple[BatchIO, BatchIO]:
    """Two connected ends that keep datagrams apart and say when they are full."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    return opened(left, peers=False, **options), opened(right, peers=False, **options)


def numbered(count: int, size: int = 40) -> list[bytes]:
    return [n.to_bytes(2, "big") + bytes(size - 2) for n in range(count)]


def open_as(plain: bool) -> type[PortableDatagramIO] | type[LinuxDatagramIO]:
    return PortableDatagramIO if plain or not Libc.usable() else LinuxDatagramIO


def drain(io: BatchIO, wanted: int) -> list[bytes]:
    """Everything up to `wanted` packets; what does not come fails the test."""
    batch, found = io.make_batch(), []
    while len(found) < wanted:
        assert io.recv(batch, PATIENCE), f"{len(found)} of {wanted} came"
        found += batch.take_all()
    return found


@pytest.mark.parametrize(("queued", "capacity", "counts"), [(1, 64, [1]), (3, 64, [3]), (5, 2, [2, 2, 1])])
def test_what_is_there_is_taken_and_nothing_is_waited_for(
    opened: Open, queued: int, capacity: int, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    left, right = pair(opened, max_batch=capacity)
    left.send(numbered(queued))
    monkeypatch.setattr(descriptor.Descriptor, "wait", lambda *arguments: pytest.fail("it waited"))
    batch, found, seen = right.make_batch(), [], []
    while count := right.recv(batch):
        seen.append(count)
        found += batch.take_all()
    assert seen == counts and found == numbered(queued)


def test_the_first_packet_is_waited_for_once_and_the_others_are_not(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, right = pair(opened)
    waits, real = [0], descriptor.Descriptor.wait

    def wait(self: descriptor.Descriptor, *arguments: object, **options: object) -> int:
        waits[0] += 1
        left.send(numbered(3))
        return real(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(descriptor.Descriptor, "wait", wait)
    assert right.recv(right.make_batch(), PATIENCE) == 3 and waits == [1]


@pytest.mark.parametrize("address", [V4, V6], ids=["IPv4", "IPv6"])
@pytest.mark.parametrize("size", [19, 500, 1064])
def test_batches_arrive_whole_and_in_order(opened: Open, address: tuple[str, int], size: int) -> None:
    there, here = bound(address), bound(address)
    host, port, *_ = there.getsockname()
    receiver, sender = opened(there, coalescing=True), opened(here)
    peer = make_peer(host, port)
    for count in (1, 2, 63, 64, 65, 128):
        items = numbered(count, size)
        result = sender.send(items, peer)
        assert (result.state, result.sent) == (TxState.DONE, count)
        assert drain(receiver, count) == items


def test_who_sent_it_is_told_and_what_all_have_in_common(opened: Open) -> None:
    there, one, two = bound(), bound(), bound()
    names = [make_peer(*sock.getsockname()) for sock in (one, two)]
    peer = make_peer(*there.getsockname())
    receiver = opened(there)
    senders = [opened(one), opened(two)]
    batch = receiver.make_batch()
    senders[0].send(numbered(3), peer)
    assert receiver.recv(batch, PATIENCE) == 3 and batch.uniform == names[0]
    senders[0].send_one(b"a", peer)
    senders[1].send_one(b"b", peer)
    assert receiver.recv(batch, PATIENCE) == 2 and batch.uniform is None
    assert [batch.peer(0), batch.peer(1)] == names


def test_packets_go_to_the_peer_of_each(opened: Open) -> None:
    one, two = bound(), bound()
    peers = [make_peer(*sock.getsockname()) for sock in (one, two)]
    sender = opened(bound())
    items = numbered(12)
    assert sender.send(items, [peers[n % 3 == 2] for n in range(12)]).sent == 12
    assert drain(opened(one), 8) == [items[n] for n in range(12) if n % 3 != 2]
    assert drain(opened(two), 4) == [items[n] for n in range(12) if n % 3 == 2]


@pytest.mark.parametrize("at", [0, 3, 6])
@pytest.mark.parametrize("how", ["oversize", "empty", "family", "unreachable", "permission"])
def test_a_refused_packet_costs_only_itself(opened: Open, at: int, how: str) -> None:
    there = bound()
    receiver, sender = opened(there, max_packet=100), opened(bound(), max_packet=100)
    peers = [make_peer(*there.getsockname())] * 7
    items = numbered(7)
    expected = errno.EMSGSIZE
    if how == "oversize":
        items[at] = bytes(101)
    elif how == "empty":
        items[at], expected = b"", errno.EINVAL
    elif how == "family":
        peers[at], expected = make_peer("::1", 9), errno.EAFNOSUPPORT
    elif how == "unreachable":
        peers[at], expected = make_peer("240.0.0.1", 9), errno.EINVAL
    else:
        peers[at], expected = make_peer("255.255.255.255", 9), errno.EACCES
    result = sender.send(items, peers)
    assert (result.state, result.taken, result.sent) == (TxState.DONE, 7, 6)
    assert [index for index, _ in result.rejected] == [at]
    assert result.rejected[0][1] in (expected, errno.ENETUNREACH)
    assert drain(receiver, 6) == [item for i, item in enumerate(items) if i != at]
    assert sender.stats.tx_rejected == 1


def test_what_a_full_queue_does_not_take_goes_out_later_once(opened: Open) -> None:
    left, right = pair(opened)
    items = numbered(3000)
    found: list[bytes] = []
    batch, start, blocked = right.make_batch(), 0, 0
    while True:
        result = left.send(items, start=start)
        assert result.taken >= start and not result.rejected
        start = result.taken
        if result.state is TxState.DONE:
            break
        assert result.state is TxState.BLOCKED
        blocked += 1
        while right.recv(batch):
            found += batch.take_all()
    while right.recv(batch):
        found += batch.take_all()
    assert blocked and found == items


def test_a_datagram_that_is_too_large_is_dropped_and_counted(opened: Open) -> None:
    there = bound()
    receiver = opened(there, max_packet=100)
    with bound() as sender:
        for item in (b"first", bytes(101), bytes(9000), b"", b"last"):
            sender.sendto(item, there.getsockname())
    assert drain(receiver, 2) == [b"first", b"last"] and receiver.stats.rx_dropped == 3


def test_a_closed_port_costs_nothing_once_it_is_open_again(opened: Open) -> None:
    with bound() as gone:
        address = gone.getsockname()
    sender = opened(bound())
    for _ in range(3):
        assert sender.send(numbered(20, 500), make_peer(*address)).state is TxState.DONE
    there = bound(address)
    assert sender.send(numbered(20, 500), make_peer(*address)).sent == 20
    assert drain(opened(there), 20) == numbered(20, 500)


@pytest.mark.parametrize(("queued", "capacity", "counts"), [(1, 64, [1]), (3, 64, [3]), (5, 2, [2, 2, 1])])
@pytest.mark.parametrize("address", [V4, V6], ids=["IPv4", "IPv6"])
def test_what_waits_in_an_internet_socket_is_taken_the_same_way(
    opened: Open, address: tuple[str, int], queued: int, capacity: int, counts: list[int]
) -> None:
    there = bound(address)
    receiver = opened(there, max_batch=capacity)
    with bound(address) as sender:
        for item in numbered(queued):
            sender.sendto(item, there.getsockname())
        name = make_peer(*sender.getsockname()[:2])
    assert receiver.wait(PATIENCE) == 1
    batch, found = receiver.make_batch(), []
    for count in counts:
        assert receiver.recv(batch) == count and batch.uniform == name
        found += batch.take_all()
    assert receiver.recv(batch) == 0 and batch.uniform is None and found == numbered(queued)


def test_nothing_comes_until_the_time_is_over(opened: Open) -> None:
    io = opened(bound())
    assert io.recv(io.make_batch(), 0.001) == 0 and io.wait(0.001) == 0


def test_datagrams_of_every_length_are_told_apart_by_one(opened: Open) -> None:
    there = bound()
    receiver, sender = opened(there, max_packet=100), opened(bound())
    items = [bytes([size]) * size for size in (99, 100, 101, 102, 1, 100)]
    peer = make_peer(*there.getsockname())
    for item in items:
        assert sender.send_one(item, peer).sent == 1
    assert drain(receiver, 4) == [item for item in items if len(item) <= 100]
    assert receiver.stats.rx_dropped == 2


def test_a_batch_of_nothing_sound_hands_over_nothing(opened: Open) -> None:
    there = bound()
    receiver = opened(there, max_packet=100)
    batch = receiver.make_batch()
    with bound() as sender:
        for _ in range(5):
            sender.sendto(bytes(101), there.getsockname())
            sender.sendto(b"", there.getsockname())
        assert receiver.wait(PATIENCE) == 1
        assert receiver.recv(batch) == 0 and batch.dropped == receiver.stats.rx_dropped == 10
        sender.sendto(b"sound", there.getsockname())
    assert drain(receiver, 1) == [b"sound"]


def test_connected_sockets_need_no_peers(opened: Open) -> None:
    one, two = bound(), bound()
    one.connect(two.getsockname())
    two.connect(one.getsockname())
    names = [make_peer(*sock.getsockname()) for sock in (one, two)]
    left, right = opened(one), opened(two)
    assert left.send(numbered(70, 500)).sent == 70 and left.send_one(b"alone").sent == 1
    batch = right.make_batch()
    found: list[bytes] = []
    while len(found) < 71:
        assert right.recv(batch, PATIENCE) and batch.uniform == names[0]
        found += batch.take_all()
    assert found == [*numbered(70, 500), b"alone"]
    assert right.send(numbered(3), names[0]).sent == 3
    assert drain(left, 3) == numbered(3)


def test_a_peer_that_is_gone_costs_no_packet_of_a_connected_socket_once_it_is_back(opened: Open) -> None:
    """Its answers to earlier packets are told by later calls, and are not about these."""
    far = bound()
    address, sock = far.getsockname(), bound()
    sock.connect(address)
    far.close()
    sender = opened(sock)
    for _ in range(5):
        result = sender.send(numbered(10, 300))
        assert result.state is TxState.DONE and result.sent + len(result.rejected) == 10
        assert all(error == errno.ECONNREFUSED for _, error in result.rejected)
        assert sender.send_one(b"x").state is TxState.DONE
        assert sender.recv(sender.make_batch()) == 0, "an answer does not end the reader"
    receiver = opened(bound(address))
    assert sender.send(numbered(10, 300)).sent == 10
    assert drain(receiver, 10) == numbered(10, 300)


def test_a_broadcast_needs_leave(opened: Open) -> None:
    sock = bound(("0.0.0.0", 0))
    peer = make_peer("255.255.255.255", sock.getsockname()[1])
    sender = opened(sock)
    assert sender.send_one(b"x", peer).rejected in (((0, errno.EACCES),), ((0, errno.ENETUNREACH),))
    result = sender.send(numbered(3, 500), peer)
    assert result.state is TxState.DONE and len(result.rejected) == 3
    loop = make_peer("127.255.255.255", sock.getsockname()[1])
    assert [told for _, told in sender.send(numbered(3, 500), loop).rejected] == [errno.EACCES] * 3
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
    assert sender.send(numbered(3, 500), loop).sent == 3
    assert drain(sender, 3) == numbered(3, 500)


def test_a_far_end_that_is_closed_costs_packets_and_not_the_descriptor(opened: Open) -> None:
    left, right = pair(opened)
    right.close()
    result = left.send(numbered(3))
    assert result.state is TxState.DONE and result.taken == 3 and len(result.rejected) == 3
    assert left.send_one(b"x").state is TxState.DONE and left.fileno() >= 0


def test_a_short_room_blocks_one_packet_too(opened: Open) -> None:
    left, right = pair(opened)
    while left.send_one(b"x").state is TxState.DONE:
        pass
    result = left.send_one(b"y")
    assert (result.state, result.taken, result.rejected) == (TxState.BLOCKED, 0, ())
    assert left.stats.tx_blocked == 2
    batch = right.make_batch()
    while right.recv(batch):
        pass
    assert left.wait(PATIENCE, read=False, write=True) == 2 and left.send_one(b"y").sent == 1


@settings(max_examples=25, deadline=None)
@given(
    kinds=st.lists(
        st.tuples(st.sampled_from([2, 19, 500, 500, 500, 1064]), st.sampled_from([0, 0, 0, 1])), max_size=150
    ),
    batch=st.sampled_from([1, 2, 63, 64, 128]),
    plain=st.booleans(),
)
def test_whatever_the_batch_what_arrives_is_what_plain_sends_bring(
    kinds: list[tuple[int, int]], batch: int, plain: bool
) -> None:
    items = [n.to_bytes(2, "big") + bytes(size - 2) for n, (size, _) in enumerate(kinds)]
    with ExitStack() as stack:
        socks = [bound(), bound()]
        receivers = [open_as(plain)(sock) for sock in socks]
        sender = open_as(plain)(bound(), max_batch=batch)
        for io in (*receivers, sender):
            stack.callback(io.close)
        peers = [make_peer(*sock.getsockname()) for sock in socks]
        result = sender.send(items, [peers[to] for _, to in kinds])
        assert (result.state, result.sent) == (TxState.DONE, len(items))
        for to, receiver in enumerate(receivers):
            expected = [item for item, (_, where) in zip(items, kinds, strict=True) if where == to]
            assert drain(receiver, len(expected)) == expected


# -- choosing -----------------------------------------------------------------------------------------------------


def test_the_variable_chooses(opened: Open, variant: str) -> None:
    io = opened(bound())
    assert io.caps.backend == {"portable": "portable", "linux": "linux-mmsg"}.get(variant, io.caps.backend)
    assert io.caps.kind is Kind.DATAGRAM and io.caps.pollable and io.fileno() >= 0


@pytest.mark.parametrize("bad", [0, 129])
def test_a_bound_out_of_range_is_refused(variant: str, bad: int) -> None:
    with bound() as sock, pytest.raises(ValueError, match=r"1\.\.128"):
        open_backend(Kind.DATAGRAM, sock, max_batch=bad)
    default, low, high = bounds(Kind.DATAGRAM)
    assert (low, high) == (1, 128) and default in (32, 64)
    for good in (low, high):
        io = open_backend(Kind.DATAGRAM, bound(), max_batch=good)
        assert io.caps.max_tx == io.caps.max_rx == good
        io.close()


@pytest.mark.parametrize(
    ("word", "sentence"), [("fast", "it takes portable, linux"), ("darwin", "does not work on this")]
)
def test_a_word_that_cannot_be_is_said_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, word: str, sentence: str
) -> None:
    monkeypatch.setenv("RNSFAST_OSIO", word)
    with bound() as sock, pytest.raises(OSError, match=sentence):
        open_backend(Kind.DATAGRAM, sock)
