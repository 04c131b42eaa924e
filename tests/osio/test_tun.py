"""TUN descriptors: drained without waiting, one write a packet, what each error means. Pairs, scripts, real devices.

A connected pair of datagram sockets keeps packets apart and takes `read` and `write`, as a TUN device does.
"""

from __future__ import annotations

import ctypes
import errno
import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rnsfast.osio.contract import IOBroken, IOClosed, Kind, TxState
from rnsfast.osio.device import DeviceError
from rnsfast.osio.linux_tun import LinuxTun, open_linux_tun
from rnsfast.osio.tun import BUDGET, LibcCalls, PlainCalls, TunIO
from rnsfast.osio.verdicts import EBADFD
from tests.fakes import PATIENCE
from tests.namespaces import Namespace, namespace, need_devices


def packet(number: int, size: int = 40, version: int = 4) -> bytes:
    return bytes((version << 4 | 5, number)) + bytes(size - 2)


def pair(**options: Any) -> tuple[TunIO, socket.socket]:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    far.setblocking(False)
    return TunIO(near.detach(), **options), far


@pytest.fixture
def ends(variant: str) -> Iterator[tuple[TunIO, socket.socket]]:
    io, far = pair()
    assert io.caps.backend == ("portable" if variant == "portable" else "linux-tun")
    yield io, far
    io.close()
    far.close()


Ends = tuple[TunIO, socket.socket]


# -- receiving ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3])
def test_what_is_there_comes_at_once_and_nothing_is_waited_for(
    ends: Ends, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    io, far = ends
    batch = io.make_batch()
    sent = [packet(i, 20 + i) for i in range(count)]
    for item in sent:
        far.send(item)
    monkeypatch.setattr(io, "wait", lambda *args: pytest.fail("waited although something was there"))
    assert io.recv(batch, None) == count
    assert batch.take_all() == sent
    assert io.stats.rx_calls == 1


def test_a_full_batch_leaves_the_rest_for_the_next(variant: str) -> None:
    io, far = pair(max_batch=2)
    batch = io.make_batch()
    sent = [packet(i) for i in range(5)]
    for item in sent:
        far.send(item)
    found, sizes = [], []
    while count := io.recv(batch):
        sizes.append(count)
        found += batch.take_all()
    assert (sizes, found) == ([2, 2, 1], sent)
    io.close()
    far.close()


def test_the_first_packet_is_waited_for_once(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    io, far = ends
    waits = []
    real = io.wait

    def wait(*args: Any, **more: Any) -> int:
        waits.append(args)
        far.send(packet(1))
        return real(*args, **more)

    monkeypatch.setattr(io, "wait", wait)
    assert io.recv(io.make_batch(), None) == 1
    assert len(waits) == 1


def test_a_batch_ends_at_its_budget(variant: str) -> None:
    io, far = pair(max_batch=128)
    far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
    size = 60_000
    sent = 0
    while True:
        try:
            far.send(packet(1, size))
        except BlockingIOError:
            break
        sent += 1
    batch = io.make_batch()
    enough = min(sent, -(-BUDGET // size))
    assert io.recv(batch) == enough
    if sent > enough:
        assert io.recv(batch) > 0
    io.close()
    far.close()


def test_packets_of_one_version_are_marked(ends: Ends) -> None:
    io, far = ends
    batch = io.make_batch()
    for versions, mark in (((4, 4), 4), ((6,), 6), ((4, 6, 4), None)):
        for version in versions:
            far.send(packet(1, version=version))
        assert io.recv(batch) == len(versions)
        assert batch.uniform == mark


def test_what_is_no_ip_is_dropped_and_does_not_end_the_drain(ends: Ends) -> None:
    io, far = ends
    batch = io.make_batch()
    sent = [packet(1), packet(2, version=7), b"\x00", packet(3)]
    for item in sent:
        far.send(item)
    assert io.recv(batch) == 2
    assert batch.take_all() == [sent[0], sent[3]]
    assert (batch.dropped, io.stats.rx_dropped, batch.uniform) == (2, 2, 4)


def test_nothing_there_is_nothing(ends: Ends) -> None:
    io, _ = ends
    assert io.recv(io.make_batch()) == 0
    assert io.recv(io.make_batch(), 0.001) == 0


def test_close_ends_a_reader_that_waits(ends: Ends) -> None:
    io, _ = ends
    ended = threading.Event()

    def read() -> None:
        with pytest.raises(IOClosed):
            io.recv(io.make_batch(), None)
        ended.set()

    reader = threading.Thread(target=read)
    reader.start()
    io.close()
    assert ended.wait(PATIENCE)
    reader.join()
    assert io.fileno() == -1
    assert io.send([packet(1)]).state is TxState.CLOSED


# -- sending ------------------------------------------------------------------------------------------------------


def test_packets_arrive_in_order_each_by_itself(ends: Ends) -> None:
    io, far = ends
    sent = [packet(i, 20 + i, version=4 if i % 2 else 6) for i in range(10)]
    assert io.send(sent).sent == 10
    assert io.send_one(packet(77)).state is TxState.DONE
    assert [far.recv(2000) for _ in range(11)] == [*sent, packet(77)]


def test_invalid_packets_cost_themselves_only_and_meet_no_call(ends: Ends) -> None:
    io, far = ends
    items = [b"", packet(1), packet(2, version=5), packet(3), bytes(70_000), packet(4, 70_000)]
    result = io.send(items)
    assert (result.taken, result.sent, result.state) == (6, 2, TxState.DONE)
    assert [index for index, _ in result.rejected] == [0, 2, 4, 5]
    assert dict(result.rejected)[5] == errno.EMSGSIZE
    assert [far.recv(2000), far.recv(2000)] == [items[1], items[3]]
    for bad in (b"", b"\x10"):
        assert io.send_one(bad).rejected == ((0, errno.EINVAL),)


def test_a_full_queue_blocks_and_the_rest_follows_once(ends: Ends) -> None:
    io, far = ends
    sent = [packet(i % 256, 200) for i in range(2000)]
    found: list[bytes] = []
    start = blocked = 0
    while start < len(sent):
        result = io.send(sent, None, start)
        start = result.taken
        if result.state is TxState.BLOCKED:
            blocked += 1
            found.append(far.recv(2000))
        else:
            assert result.state is TxState.DONE
    while True:
        try:
            found.append(far.recv(2000))
        except BlockingIOError:
            break
    assert blocked and found == sent
    assert io.stats.tx_blocked == blocked


class ScriptedLibc:
    """read and write that follow a script: bytes, a count, or a negative errno. Reads what it is given from memory."""

    def __init__(self, reads: list[bytes | int] | None = None, writes: list[int | None] | None = None) -> None:
        self.reads, self.writes = deque(reads or []), deque(writes or [])
        self.wire: list[bytes] = []
        self.error = 0

    def read(self, fd: int, address: int, size: int, /) -> int:
        assert self.reads, "read beyond the script"
        step = self.reads.popleft()
        if isinstance(step, int):
            self.error = -step
            return -1
        assert size >= 65_535
        ctypes.memmove(address, step, len(step))
        return len(step)

    def write(self, fd: int, data: bytes, size: int, /) -> int:
        assert self.writes, "write beyond the script"
        step = self.writes.popleft()
        if step is None:
            self.wire.append(ctypes.string_at(data, size))
            return size
        self.error = -step
        return -1 if step else 0

    def get_errno(self) -> int:
        return self.error


def scripted(**script: Any) -> tuple[TunIO, ScriptedLibc, socket.socket]:
    libc = ScriptedLibc(**script)
    io, far = pair(calls=LibcCalls(libc))
    return io, libc, far


@pytest.fixture
def script() -> Iterator[Any]:
    made: list[tuple[TunIO, socket.socket]] = []

    def make(**steps: Any) -> tuple[TunIO, ScriptedLibc]:
        io, libc, far = scripted(**steps)
        made.append((io, far))
        return io, libc

    yield make
    for io, far in made:
        io.close()
        far.close()


def test_an_error_after_packets_is_kept_for_the_next_receive(script: Any) -> None:
    io, _ = script(reads=[packet(1), -errno.EINTR, packet(2), -EBADFD])
    batch = io.make_batch()
    assert io.recv(batch) == 2
    with pytest.raises(IOBroken) as broken:
        io.recv(batch)
    assert broken.value.errno == EBADFD


@pytest.mark.parametrize("error", [errno.EIO, errno.ENETDOWN, errno.EINVAL])
def test_a_refused_write_costs_one_packet(script: Any, error: int) -> None:
    io, libc = script(writes=[None, -error, None, -errno.EINTR, None])
    items = [packet(i) for i in range(4)]
    result = io.send(items)
    assert (result.taken, result.sent, result.rejected) == (4, 3, ((1, error),))
    assert libc.wire == [items[0], items[2], items[3]]


def test_a_device_that_was_removed_breaks_the_descriptor(script: Any) -> None:
    io, libc = script(writes=[None, -EBADFD])
    result = io.send([packet(i) for i in range(3)])
    assert (result.state, result.taken, result.sent, result.errno) == (TxState.BROKEN, 1, 1, EBADFD)
    assert len(libc.wire) == 1


def test_a_write_without_progress_is_not_repeated(script: Any) -> None:
    io, _ = script(writes=[0, 0])
    assert io.send([packet(1), packet(2)]).state is TxState.BROKEN
    assert io.send_one(packet(1)).state is TxState.BROKEN


def test_buffers_run_out_three_times_then_the_packet_is_dropped(script: Any) -> None:
    io, libc = script(writes=[*[-errno.ENOBUFS] * 4, None, None])
    result = io.send([packet(1), packet(2), packet(3)])
    assert result.rejected == ((0, errno.ENOBUFS),)
    assert libc.wire == [packet(2), packet(3)]


@given(st.lists(st.sampled_from([None, -errno.EIO, -errno.EAGAIN, -errno.EINTR]), min_size=1, max_size=30))
def test_every_packet_is_sent_refused_or_left_and_none_twice(steps: list[int | None]) -> None:
    items = [packet(i) for i in range(12)]
    io, libc, far = scripted(writes=[*steps, *[None] * 13])
    start, refused = 0, []
    while start < len(items):
        result = io.send(items, None, start)
        refused += [items[index] for index, _ in result.rejected]
        assert result.taken >= start
        start = result.taken
    io.close()
    far.close()
    assert libc.wire == [item for item in items if item not in refused]
    assert len(libc.wire) + len(refused) == len(items)


@pytest.mark.parametrize("bad", [0, 129])
def test_bounds_of_a_batch(bad: int) -> None:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with pytest.raises(ValueError, match=r"1\.\.128"):
        TunIO(near.fileno(), max_batch=bad)
    for good in (1, 128):
        io = TunIO(os.dup(near.fileno()), max_batch=good)
        assert (io.caps.max_rx, io.caps.max_tx, io.caps.kind) == (good, good, Kind.TUN)
        io.close()
    near.close()
    far.close()


def test_the_portable_way_uses_the_standard_library_only() -> None:
    io, far = pair(calls=PlainCalls())
    assert io.send([packet(1), packet(2)]).sent == 2
    far.send(packet(3))
    batch = io.make_batch()
    assert io.recv(batch) == 1
    far.close()
    assert io.send([packet(1), packet(2)]).sent == 0
    io.close()


# -- real devices -------------------------------------------------------------------------------------------------


@pytest.fixture
def space() -> Iterator[Namespace]:
    need_devices()
    with namespace() as made:
        yield made


@pytest.fixture
def device(space: Namespace, variant: str) -> Iterator[LinuxTun]:
    with space.inside():
        made = open_linux_tun("rf0")
    made.add_address("10.77.0.1/24")
    made.up()
    yield made
    made.close()


def datagrams(space: Namespace, count: int, size: int = 50) -> None:
    """Sent by the kernel to somebody behind the device."""
    with space.inside(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
        for i in range(count):
            sender.sendto(bytes((i % 256,)) * size, ("10.77.0.2", 9))


@pytest.mark.parametrize(("count", "capacity", "sizes"), [(1, 64, [1]), (3, 64, [3]), (5, 2, [2, 2, 1])])
def test_device_is_drained(space: Namespace, variant: str, count: int, capacity: int, sizes: list[int]) -> None:
    with space.inside():
        device = open_linux_tun("rf0", batch=capacity)
    device.add_address("10.77.0.1/24")
    device.up()
    datagrams(space, count)
    batch = device.io.make_batch()
    found, seen = [], []
    while taken := device.io.recv(batch):
        seen.append(taken)
        found += batch.take_all()
        assert batch.uniform == 4
    assert seen == sizes
    assert [item[28] for item in found] == list(range(count))
    assert all(len(item) == 78 for item in found)
    device.close()


def test_seven_hundred_packets_fit_the_queue(space: Namespace, device: LinuxTun) -> None:
    datagrams(space, 700)
    batch = device.io.make_batch()
    found: list[bytes] = []
    while device.io.recv(batch):
        found += batch.take_all()
    assert [item[28] for item in found] == [i % 256 for i in range(700)]


def test_device_down_refuses_packets_and_takes_them_again(space: Namespace, device: LinuxTun) -> None:
    device.down()
    batch = device.io.make_batch()
    assert device.io.recv(batch) == 0
    result = device.io.send([packet(1), packet(2)])
    assert (result.state, result.rejected) == (TxState.DONE, ((0, errno.EIO), (1, errno.EIO)))
    assert device.io.send_one(packet(1)).rejected == ((0, errno.EIO),)
    device.up()
    assert device.io.send([packet(1), packet(2)]).sent == 2


def test_device_removed_under_a_reader_that_waits(space: Namespace, device: LinuxTun) -> None:
    ended: list[BaseException] = []
    batch = device.io.make_batch()
    waiting = threading.Event()
    real = device.io.wait

    def wait(*args: Any, **more: Any) -> int:
        waiting.set()
        return real(*args, **more)

    device.io.wait = wait  # type: ignore[method-assign]

    def read() -> None:
        try:
            device.io.recv(batch, None)
        except OSError as error:
            ended.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    assert waiting.wait(PATIENCE)
    space.ip("link", "del", "rf0")
    reader.join(PATIENCE)
    assert not reader.is_alive()
    assert isinstance(ended[0], IOBroken)
    assert ended[0].errno == EBADFD
    assert device.io.send([packet(1)]).state is TxState.BROKEN
    with pytest.raises(DeviceError, match="gone"):
        device.up()


def test_close_wakes_a_reader_of_a_device(space: Namespace, device: LinuxTun) -> None:
    ended = threading.Event()

    def read() -> None:
        with pytest.raises(IOClosed):
            device.io.recv(device.io.make_batch(), None)
        ended.set()

    reader = threading.Thread(target=read)
    reader.start()
    device.close()
    assert ended.wait(PATIENCE)
    reader.join()


def test_a_poller_sees_packets_and_the_end_of_a_device(space: Namespace, device: LinuxTun) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(device.io.fileno(), selectors.EVENT_READ)
        assert not selector.select(0)
        datagrams(space, 1)
        assert selector.select(PATIENCE)
        assert device.io.recv(device.io.make_batch()) == 1
        assert not selector.select(0)
        space.ip("link", "del", "rf0")
        assert selector.select(PATIENCE)


def test_packets_we_write_reach_a_socket(space: Namespace, device: LinuxTun) -> None:
    from tests.osio.ip_packets import udp4

    with space.inside():
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.bind(("10.77.0.1", 7777))
    sock.settimeout(PATIENCE)
    bodies = [bytes((i,)) * (10 + i) for i in range(100)]
    result = device.io.send([udp4("10.77.0.2", "10.77.0.1", 5, 7777, body) for body in bodies])
    assert result.sent == 100
    assert [sock.recv(2000) for _ in bodies] == bodies
    sock.close()
