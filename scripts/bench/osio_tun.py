"""Packets through a TUN device in a network namespace of its own, which ends with this process. Needs root, and Linux.

    osio_tun.py '{"sizes": [...], "batches": [...], ...}'

Prints the rows in one line, or why there are none. `measure_tun` starts it and reads that.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from osio_echo import Echoes, Round, alternate_rounds, echo_rows, pinned
from osio_far import Far
from osio_moves import BURST, Busy, Load, Mode, Sample, alternate, enlarge, pieces
from osio_rows import Row, move_rows

from rnsfast.osio.checksum import complement, word_sum
from rnsfast.osio.contract import BatchIO, TxState
from rnsfast.osio.device import DeviceError, open_tun
from rnsfast.osio.memory import keep_heap
from rnsfast.osio.poller import READ, open_poller
from rnsfast.osio.tun import PlainCalls, TunIO

CLONE_NEWNET: Final = 0x40000000
HERE, THERE = "10.77.0.1", "10.77.0.2"
MTU: Final = 9000  # so that packets of 8192 bytes fit
HEADERS: Final = 28  # bytes of IPv4 and UDP
LIMIT: Final = 300.0  # seconds
BATCH: Final = 64  # the default
BUSY: Final = "tun read, busy thread"


class _Device(Load):
    """What reading and writing share."""

    def __init__(self, fd: int, size: int) -> None:
        self.notes: list[str] = []
        self._size = size
        self._poller = open_poller()
        self._fd = fd
        self._open: list[BatchIO] = []

    def _io(self, batch: int, plain: bool = False) -> BatchIO:
        io = TunIO(os.dup(self._fd), max_batch=batch, calls=PlainCalls() if plain else None)
        self._open.append(io)
        return io

    def close(self) -> None:
        for io in self._open:
            io.close()
        self._poller.close()


class TunRead(_Device):
    """Packets that the system has routed into the device."""

    def __init__(self, fd: int, size: int, batches: Iterable[int], every_mode: bool) -> None:
        super().__init__(fd, size)
        self._source = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        enlarge(self._source)
        self._source.connect((THERE, 9))
        self._items = [i.to_bytes(4, "big") + bytes(size - HEADERS - 4) for i in range(BURST)]
        self._ready = select.poll()
        self._ready.register(fd, select.POLLIN)
        self.baseline = "poll + read"
        self.modes: dict[str, Mode] = {"poll + read": self._one_by_one}
        if every_mode:
            self._add("drain 1", 1)
        for batch in batches:
            self._add(f"drain {batch}", batch)
            if every_mode:
                self._add(f"portable {batch}", batch, plain=True)

    def _fill(self) -> None:
        for item in self._items:
            self._source.send(item)

    def _one_by_one(self, bursts: int) -> Sample:
        sample, poll, read, fd = Sample(), self._ready.poll, os.read, self._fd
        for _ in range(bursts):
            self._fill()
            kept = []
            with sample.timed(), contextlib.suppress(BlockingIOError):
                for _ in range(BURST):
                    poll(1000)
                    kept.append(read(fd, MTU))
            sample.packets += BURST
            sample.lost += BURST - len(kept)
        sample.calls = 2 * sample.packets
        return sample

    def _add(self, name: str, batch: int, plain: bool = False) -> None:
        io = self._io(batch, plain)
        into, wait, poller = io.make_batch(), self._poller.wait, self._poller

        def mode(bursts: int) -> Sample:
            sample, polls, turns = Sample(), 0, 0
            poller.watch(io.fileno(), READ)
            for _ in range(bursts):
                self._fill()
                kept: list[bytes] = []
                with sample.timed():
                    while len(kept) < BURST and wait(1.0):
                        polls += 1
                        while count := io.recv(into):
                            kept += into.take_all()
                            if count < into.capacity or batch == 1:
                                turns += count < into.capacity  # one call more says that nothing is left
                                break
                sample.packets += BURST
                sample.lost += BURST - len(kept)
            poller.unwatch(io.fileno())
            sample.calls = sample.packets + polls + turns
            return sample

        self.modes[name] = mode

    def close(self) -> None:
        super().close()
        self._source.close()


class TunWrite(_Device):
    """Packets into the device for a socket of this machine, which is emptied between the bursts."""

    def __init__(self, fd: int, size: int, batches: Iterable[int], every_mode: bool) -> None:
        super().__init__(fd, size)
        self._sink = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        enlarge(self._sink)
        self._sink.bind((HERE, 0))
        self._sink.setblocking(False)
        port = self._sink.getsockname()[1]
        self._items = [ipv4_udp(port, i.to_bytes(4, "big") + bytes(size - HEADERS - 4)) for i in range(BURST)]
        self.baseline = "write"
        self.modes: dict[str, Mode] = {"write": self._one_by_one}
        if every_mode:
            single = self._io(1).send_one
            self.modes["send_one"] = lambda bursts: self._each(bursts, single)
        for batch in batches:
            self._add(f"batch {batch}", batch)

    def _empty(self, sample: Sample) -> None:
        got = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                self._sink.recv(self._size)
                got += 1
        sample.packets += BURST
        sample.lost += BURST - got

    def _one_by_one(self, bursts: int) -> Sample:
        fd, write = self._fd, os.write
        return self._each(bursts, lambda item: write(fd, item))

    def _each(self, bursts: int, send: Callable[[bytes], Any]) -> Sample:
        sample = Sample()
        for _ in range(bursts):
            with sample.timed():
                for item in self._items:
                    send(item)
            self._empty(sample)
        sample.calls = sample.packets
        return sample

    def _add(self, name: str, batch: int) -> None:
        io, chunks = self._io(batch), pieces(self._items, batch)

        def mode(bursts: int) -> Sample:
            sample, send = Sample(), io.send
            for _ in range(bursts):
                with sample.timed():
                    for chunk in chunks:
                        if send(chunk).state is not TxState.DONE:
                            raise RuntimeError("the device does not take the burst")
                self._empty(sample)
            sample.calls = sample.packets
            return sample

        self.modes[name] = mode

    def close(self) -> None:
        super().close()
        self._sink.close()


def ipv4_udp(port: int, data: bytes) -> bytes:
    """An IPv4 packet from the other side of the device, with UDP to `port` of this side. UDP's own sum is left out."""
    size = HEADERS + len(data)
    head = b"\x45\0" + size.to_bytes(2, "big") + b"\0\0\x40\0\x40\x11"
    addresses = socket.inet_aton(THERE) + socket.inet_aton(HERE)
    total = complement(word_sum(head) + word_sum(addresses)).to_bytes(2, "big")
    udp = (9).to_bytes(2, "big") + port.to_bytes(2, "big") + (size - 20).to_bytes(2, "big") + b"\0\0"
    return head + total + addresses + udp + data


def enter_namespace() -> None:
    """A network namespace of our own. OSError without the right to make one."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    with contextlib.suppress(OSError):  # router solicitations would be packets that nobody has sent
        Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1", encoding="ascii")


def inside(options: dict[str, Any]) -> dict[str, Any]:
    """In the process that has the namespace."""
    try:
        enter_namespace()
        device = open_tun("bench0")
    except (OSError, AttributeError, DeviceError) as error:
        return {"rows": [], "notes": [f"tun: not here ({error})"]}
    keep_heap()
    rows: list[Row] = []
    notes: list[str] = []
    try:
        device.set_mtu(MTU)
        device.add_address(f"{HERE}/24")
        device.up()
        fd = device.io.fileno()
        kinds: tuple[tuple[str, type[TunRead] | type[TunWrite]], ...] = (("tun read", TunRead), ("tun write", TunWrite))
        for name, kind in kinds:
            if name in options["workloads"]:
                for size in options["sizes"]:
                    rows += moves(name, kind(fd, size, options["batches"], options["every_mode"]), size, options)
        if BUSY in options["workloads"]:
            with Busy():
                rows += moves(BUSY, TunRead(fd, 64, (BATCH,), True), 64, options)
        if "tun echo" in options["workloads"]:
            rows += echo(fd, options["echoes"], options["pings"])
    finally:
        device.close()
    return {"rows": rows, "notes": notes}


def moves(name: str, load: Load, size: int, options: dict[str, Any]) -> list[Row]:
    try:
        return move_rows(name, size, load.baseline, alternate(load, options["rounds"], options["bursts"]))
    finally:
        load.close()


def echo(fd: int, rounds: int, pings: int) -> list[Row]:
    """Round trips through the device, its reader in another process."""
    modes: dict[str, Callable[[], Round]] = {}
    for name, batch in (("one by one", 1), (f"batch {BATCH}", BATCH)):

        def mode(batch: int = batch) -> Round:
            with Far("echo-tun", pass_fds=(fd,), fd=fd, batch=batch, cpu=cpu), Echoes((THERE, 7)) as client:
                return client.measure(pings)

        modes[name] = mode
    with pinned() as (cpu, _):
        found = alternate_rounds("one by one", modes, rounds)
    return echo_rows("tun echo, idle", "one by one", found)


def measure_tun(options: dict[str, Any]) -> tuple[list[Row], list[str]]:
    """Rows, and notes about what is missing."""
    if sys.platform != "linux":
        return [], [f"tun: not here ({sys.platform})"]
    command = [sys.executable, str(Path(__file__)), json.dumps(options)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT, check=False)
    if done.returncode != 0 or not done.stdout:
        return [], [f"tun: failed (the process ended with {done.returncode})"]
    found = json.loads(done.stdout.splitlines()[-1])
    return found["rows"], found["notes"]


if __name__ == "__main__":
    print(json.dumps(inside(json.loads(sys.argv[1]))))
