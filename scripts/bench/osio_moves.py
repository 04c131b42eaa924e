"""Packets through sockets in one process: what sending and receiving cost, one by one and in batches.

A load has a baseline and batch modes. Each is called for one sample: it moves a burst a few times and times only its
own half of it. Bursts fit into the receive buffers, so nothing is lost; what is lost anyway is counted. Samples are
short and many: beside other processes, some are then undisturbed.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import statistics
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, process_time
from typing import Final, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from rnsfast.interfaces.framing import HDLC
from rnsfast.osio.backend import open_backend
from rnsfast.osio.contract import BatchIO, Kind, TxState
from rnsfast.osio.peers import make_peer
from rnsfast.osio.poller import READ, open_poller
from rnsfast.osio.portable import PortableDatagramIO

BURST: Final = 256  # packets, a multiple of every batch
ROOM: Final = 16 << 20  # bytes asked for socket buffers
_SO_SNDBUFFORCE: Final = 32
_SO_RCVBUFFORCE: Final = 33
LOOPBACK: Final = "127.0.0.1"


@dataclass(slots=True)
class Sample:
    """What moving some packets took."""

    packets: int = 0
    seconds: float = 0.0
    cpu: float = 0.0  # seconds, of this process, the system's part included
    calls: int = 0  # system calls
    lost: int = 0

    @property
    def each(self) -> float:
        """Seconds a packet."""
        return self.seconds / self.packets

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        cpu, began = process_time(), perf_counter()
        yield
        self.seconds += perf_counter() - began
        self.cpu += process_time() - cpu


PATIENCE: Final = 30.0  # seconds for one load; beside a busy thread a packet may take 5 ms
Mode = Callable[[int], Sample]  # bursts -> what they took


class Load(Protocol):
    """One workload at one packet size."""

    baseline: str
    modes: dict[str, Mode]  # the baseline among them
    notes: list[str]

    def close(self) -> None: ...


@dataclass(slots=True)
class Outcome:
    """The samples of one mode, and how many times faster than its neighbours of the baseline each was."""

    samples: list[Sample] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def median(self, of: Callable[[Sample], float]) -> float:
        return statistics.median(map(of, self.samples))


def alternate(load: Load, rounds: int, bursts: int) -> dict[str, Outcome]:
    """Every mode between two samples of the baseline, as often as `rounds` says, but not longer than PATIENCE."""
    found = {name: Outcome() for name in load.modes}
    base = load.modes[load.baseline]
    for mode in load.modes.values():
        mode(1)  # warm up
    deadline = perf_counter() + PATIENCE
    for done in range(rounds):
        if done and perf_counter() > deadline:
            break
        before = base(bursts)
        found[load.baseline].samples.append(before)
        for name, mode in load.modes.items():
            if name == load.baseline:
                continue
            sample, after = mode(bursts), base(bursts)
            found[name].samples.append(sample)
            found[name].times.append((before.each + after.each) / 2 / sample.each)
            found[load.baseline].samples.append(after)
            before = after
    return found


def enlarge(sock: socket.socket) -> None:
    """Buffers for several bursts, beyond the system's limit where that is allowed."""
    for forced, usual in ((_SO_RCVBUFFORCE, socket.SO_RCVBUF), (_SO_SNDBUFFORCE, socket.SO_SNDBUF)):
        try:
            sock.setsockopt(socket.SOL_SOCKET, forced if sys.platform == "linux" else usual, ROOM)
        except OSError:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, usual, ROOM)


def udp_socket(host: str = LOOPBACK) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    enlarge(sock)
    sock.bind((host, 0))
    return sock


def shown(io: BatchIO, call: str) -> str:
    """What a back end's rows are called: on Linux by its system call."""
    return call if io.caps.backend == "linux-mmsg" else io.caps.backend


def pieces(items: Sequence[bytes], batch: int) -> list[Sequence[bytes]]:
    return [items[at : at + batch] for at in range(0, len(items), batch)]


class UdpSend:
    """Datagrams to a socket on loopback that is emptied between the bursts."""

    def __init__(self, size: int, batches: Iterable[int], every_mode: bool) -> None:
        self.notes: list[str] = []
        self._sink = udp_socket()
        self._sink.setblocking(False)
        self._address = self._sink.getsockname()
        self._peer = make_peer(*self._address)
        self._items = [i.to_bytes(4, "big") + bytes(size - 4) for i in range(BURST)]
        self._size = size
        self._plain = udp_socket()
        self._plain.setblocking(False)
        self._open: list[BatchIO] = []
        self.baseline = "sendto"
        self.modes: dict[str, Mode] = {"sendto": self._sendto}
        if every_mode:
            self.modes["a socket each"] = self._socket_each
            single = self._backend(1, segmentation=False)
            self.modes["send_one"] = lambda bursts: self._send_one(single, bursts)
        for batch in batches:
            io = self._backend(batch, segmentation=False)
            self._add(f"{shown(io, 'sendmmsg')} {batch}", io, batch)
            runs = self._backend(batch, segmentation=True)
            if runs.caps.run_tx > 1:
                self._add(f"gso {batch}", runs, batch)
            elif not self.notes:
                self.notes.append("udp send: the system does not cut runs (GSO); those rows are missing")
            if every_mode and io.caps.backend != "portable":
                io = PortableDatagramIO(udp_socket(), max_batch=batch, max_packet=size)
                self._open.append(io)
                self._add(f"portable {batch}", io, batch)

    def _backend(self, batch: int, *, segmentation: bool) -> BatchIO:
        io = open_backend(
            Kind.DATAGRAM, udp_socket(), max_batch=batch, max_packet=self._size, segmentation=segmentation
        )
        self._open.append(io)
        return io

    def _add(self, name: str, io: BatchIO, batch: int) -> None:
        chunks = pieces(self._items, batch)

        def mode(bursts: int) -> Sample:
            sample, send, peer = Sample(), io.send, self._peer
            calls = io.stats.tx_calls
            for _ in range(bursts):
                with sample.timed():
                    for chunk in chunks:
                        send(chunk, peer)
                self._empty(sample)
            singly = io.caps.backend == "portable"
            sample.calls = sample.packets if singly else io.stats.tx_calls - calls
            return sample

        self.modes[name] = mode

    def _empty(self, sample: Sample) -> None:
        got = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                self._sink.recv(self._size)
                got += 1
        sample.packets += BURST
        sample.lost += BURST - got

    def _sendto(self, bursts: int) -> Sample:
        sample, send, address = Sample(), self._plain.sendto, self._address
        for _ in range(bursts):
            with sample.timed():
                for item in self._items:
                    send(item, address)
            self._empty(sample)
        sample.calls = sample.packets
        return sample

    def _socket_each(self, bursts: int) -> Sample:
        """As the reference does: a socket for every packet."""
        sample = Sample()
        for _ in range(bursts):
            with sample.timed():
                for item in self._items:
                    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
                        sock.sendto(item, self._address)
            self._empty(sample)
        sample.calls = 4 * sample.packets
        return sample

    def _send_one(self, io: BatchIO, bursts: int) -> Sample:
        sample, send, peer = Sample(), io.send_one, self._peer
        for _ in range(bursts):
            with sample.timed():
                for item in self._items:
                    send(item, peer)
            self._empty(sample)
        sample.calls = sample.packets
        return sample

    def close(self) -> None:
        for io in self._open:
            io.close()
        self._plain.close()
        self._sink.close()


class UdpReceive:
    """Datagrams that wait in the socket; they came back to back, as a batching sender sends them."""

    def __init__(self, size: int, batches: Iterable[int], every_mode: bool) -> None:
        self.notes: list[str] = []
        self._size = size
        self._poller = open_poller()
        self._source = open_backend(Kind.DATAGRAM, udp_socket(), max_batch=64, max_packet=size)
        self._items = [i.to_bytes(4, "big") + bytes(size - 4) for i in range(BURST)]
        self._open: list[BatchIO] = []
        self._plain = udp_socket()
        self._plain.setblocking(False)
        self._ready = select.poll()
        self._ready.register(self._plain, select.POLLIN)
        self.baseline = "poll + recvfrom"
        self.modes: dict[str, Mode] = {"poll + recvfrom": lambda bursts: self._recvfrom(bursts, True)}
        if every_mode:
            self.modes["recvfrom"] = lambda bursts: self._recvfrom(bursts, False)
            self._add(1, coalescing=False)
        for batch in batches:
            self._add(batch, coalescing=False)
            self._add(batch, coalescing=True)

    def _fill(self, port: int) -> None:
        if self._source.send(self._items, make_peer(LOOPBACK, port)).state is not TxState.DONE:
            raise RuntimeError("the burst does not fit into the socket")

    def _recvfrom(self, bursts: int, polled: bool) -> Sample:
        sample, recvfrom, poll, room = Sample(), self._plain.recvfrom, self._ready.poll, self._size + 1
        port = self._plain.getsockname()[1]
        for _ in range(bursts):
            self._fill(port)
            kept = []
            with sample.timed(), contextlib.suppress(BlockingIOError):
                for _ in range(BURST):
                    if polled:
                        poll(1000)
                    kept.append(recvfrom(room))
            sample.packets += BURST
            sample.lost += BURST - len(kept)
        sample.calls = (2 if polled else 1) * sample.packets
        return sample

    def _add(self, batch: int, *, coalescing: bool) -> None:
        sock = udp_socket()
        port = sock.getsockname()[1]
        io = open_backend(
            Kind.DATAGRAM, sock, max_batch=batch, max_packet=self._size, peers=False, coalescing=coalescing
        )
        self._open.append(io)
        into, wait, poller = io.make_batch(), self._poller.wait, self._poller
        if not io.caps.pollable:
            self.notes.append(f"udp receive: {io.caps.backend} cannot be polled; its rows are missing")
            return
        name = shown(io, "recvmmsg")
        if coalescing:
            if io.caps.backend != "linux-mmsg":
                self.notes.append(f"udp receive: {io.caps.backend} joins nothing (GRO); those rows are missing")
                return
            name = "gro"

        def mode(bursts: int) -> Sample:
            sample, calls, polls = Sample(), io.stats.rx_calls, 0
            poller.watch(io.fileno(), READ)
            for _ in range(bursts):
                self._fill(port)
                kept: list[bytes] = []
                with sample.timed():
                    while len(kept) < BURST and wait(1.0):
                        polls += 1
                        while count := io.recv(into):
                            kept += into.take_all()
                            if count < into.capacity or batch == 1:
                                break
                sample.packets += BURST
                sample.lost += BURST - len(kept)
            poller.unwatch(io.fileno())
            singly = io.caps.backend == "portable"
            sample.calls = (sample.packets if singly else io.stats.rx_calls - calls) + polls
            return sample

        self.modes[f"{name} {batch}"] = mode

    def close(self) -> None:
        for io in self._open:
            io.close()
        self._source.close()
        self._plain.close()
        self._poller.close()


class TcpFlush:
    """Frames into a connection on loopback, which is read between the bursts."""

    def __init__(self, size: int, batches: Iterable[int], every_mode: bool) -> None:
        self.notes: list[str] = []
        with socket.socket() as server:
            enlarge(server)
            server.bind((LOOPBACK, 0))
            server.listen()
            ours = socket.socket()
            enlarge(ours)
            ours.connect(server.getsockname())
            self._theirs, _ = server.accept()
        ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = ours
        self._io = open_backend(Kind.STREAM, ours)
        self._packets = [i.to_bytes(4, "big") + bytes(size - 4) for i in range(BURST)]
        self._frames = [HDLC.encode(packet) for packet in self._packets]
        self._bytes = sum(map(len, self._frames))
        self._waste = bytearray(1 << 20)
        self.baseline = "send each"
        self.modes: dict[str, Mode] = {"send each": self._send_each}
        if every_mode:
            self.modes["frame + send each"] = self._frame_and_send_each
        for batch in batches:
            self._add_frames(batch)
            if every_mode:
                self._add_packets(batch)

    def _read(self, size: int) -> None:
        while size:
            size -= self._theirs.recv_into(self._waste, min(size, len(self._waste)))

    def _send_each(self, bursts: int) -> Sample:
        return self._one_by_one(bursts, self._frames, None)

    def _frame_and_send_each(self, bursts: int) -> Sample:
        return self._one_by_one(bursts, self._packets, HDLC.encode)

    def _one_by_one(self, bursts: int, items: list[bytes], encode: Callable[[bytes], bytes] | None) -> Sample:
        sample, send = Sample(), self._sock.send
        for _ in range(bursts):
            for chunk in self._halves(items):
                size = 0
                with sample.timed():
                    for item in chunk:
                        frame = item if encode is None else encode(item)
                        size += len(frame)
                        if send(frame) != len(frame):
                            raise OSError(errno.ENOBUFS, "the burst does not fit into the connection")
                self._read(size)
            sample.packets += BURST
        sample.calls = sample.packets
        return sample

    @staticmethod
    def _halves(items: list[bytes]) -> list[Sequence[bytes]]:
        return pieces(items, 128)  # what the connection holds of the largest packets

    def _add_frames(self, batch: int) -> None:
        chunks = [pieces(half, batch) for half in self._halves(self._frames)]

        def mode(bursts: int) -> Sample:
            sample, io = Sample(), self._io
            calls = io.stats.tx_calls
            for _ in range(bursts):
                for half in chunks:
                    with sample.timed():
                        for chunk in half:
                            if io.send(chunk).state is not TxState.DONE:
                                raise OSError(errno.ENOBUFS, "the burst does not fit into the connection")
                    self._read(sum(len(frame) for chunk in half for frame in chunk))
                sample.packets += BURST
            sample.calls = io.stats.tx_calls - calls
            return sample

        self.modes[f"flush {batch}"] = mode

    def _add_packets(self, batch: int) -> None:
        chunks = [pieces(half, batch) for half in self._halves(self._packets)]

        def mode(bursts: int) -> Sample:
            sample, io, encode = Sample(), self._io, HDLC.encode_many
            calls = io.stats.tx_calls
            for _ in range(bursts):
                for half in chunks:
                    size = 0
                    with sample.timed():
                        for chunk in half:
                            frames = encode(list(chunk))
                            size += len(frames)
                            if io.send_one(frames).state is not TxState.DONE:
                                raise OSError(errno.ENOBUFS, "the burst does not fit into the connection")
                    self._read(size)
                sample.packets += BURST
            sample.calls = io.stats.tx_calls - calls
            return sample

        self.modes[f"frame + flush {batch}"] = mode

    def close(self) -> None:
        self._io.close()
        self._theirs.close()


class Busy:
    """A second thread in a pure Python loop, for the time of a `with` block."""

    def __enter__(self) -> None:
        self._stop = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()

    def _run(self) -> None:
        x = 0
        while not self._stop:
            for i in range(1000):
                x = (x * 31 + i) & 0xFFFF


LOADS: Final[dict[str, type[UdpSend] | type[UdpReceive] | type[TcpFlush]]] = {
    "udp send": UdpSend,
    "udp receive": UdpReceive,
    "tcp flush": TcpFlush,
}
