"""TUN devices on Linux: one packet a call, drained until nothing is left.  Protocol 09, section 5.5.

There is no call that reads or writes several packets of a TUN device. What a batch saves here is everything around the
calls: the poll, the lock, the hand-over. The calls go through a handle that keeps the GIL, see docs/decisions.md; the
portable variant uses `os.read` and `os.write`. Both also work on any datagram descriptor, such as an AF_UNIX pair.

The device cuts a packet that is larger than the buffer without a word, so the buffer takes any packet there is.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys as system
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Final, Protocol

from rnsfast.osio import virtio
from rnsfast.osio.contract import Caps, Kind, Peer, RxBatch
from rnsfast.osio.packets import PacketIO, Peers
from rnsfast.osio.virtio import NO_HEADER, ROOM

BATCH: Final = 64  # packets; protocol 09, section 11
MAX_BATCH: Final = 128
BUDGET: Final = 512 << 10  # bytes after which a batch is full
MAX_PACKET: Final = 65_535  # bytes: no IP packet is larger
VERSIONS: Final = frozenset({4, 6})

_FIRST: Final = itemgetter(0)  # byte of a packet


class TunCalls(Protocol):
    """The system calls of a packet descriptor. An errno is positive, and 0 if all went well."""

    backend: str

    def read_many(self, fd: int, count: int, budget: int) -> tuple[list[bytes], int]:
        """Up to `count` packets, fewer if they reach `budget` bytes, and the errno that ended it."""

    def write(self, fd: int, packet: bytes) -> int: ...

    def write_many(self, fd: int, packets: Sequence[bytes]) -> tuple[int, int]:
        """How many were taken, and the errno of the next."""


class TunSys(Protocol):
    """What `LibcCalls` needs of the C library: counts, or -1 and an errno."""

    def read(self, fd: int, address: int, size: int, /) -> int: ...
    def write(self, fd: int, data: bytes, size: int, /) -> int: ...
    def get_errno(self) -> int: ...


class Libc:
    """libc by handles that keep the GIL: neither call blocks on a non-blocking descriptor."""

    def __init__(self) -> None:
        libc = ctypes.PyDLL(None, use_errno=True)
        self.read = libc.read
        self.read.argtypes, self.read.restype = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_ssize_t
        self.write = libc.write
        self.write.argtypes, self.write.restype = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t), ctypes.c_ssize_t
        self.get_errno: Callable[[], int] = ctypes.get_errno


class LibcCalls:
    """read(2) and write(2) with the GIL kept. Has one reader and one writer at a time."""

    backend = "linux-tun"

    def __init__(self, sys: TunSys | None = None) -> None:
        self._sys: TunSys = Libc() if sys is None else sys
        self._buffer = ctypes.create_string_buffer(ROOM)
        self._view = memoryview(self._buffer).cast("B")
        self._address = ctypes.addressof(self._buffer)

    @staticmethod
    def usable() -> bool:
        return system.platform == "linux" and os.environ.get("RNSFAST_OSIO") != "portable"

    def read_many(self, fd: int, count: int, budget: int) -> tuple[list[bytes], int]:
        read, address, view = self._sys.read, self._address, self._view
        found: list[bytes] = []
        while count and budget > 0:
            size = read(fd, address, ROOM)
            if size <= 0:
                error = self._sys.get_errno() if size else errno.EAGAIN
                if error == errno.EINTR:
                    continue
                return found, error
            found.append(bytes(view[:size]))
            count -= 1
            budget -= size
        return found, 0

    def write(self, fd: int, packet: bytes) -> int:
        size = self._sys.write(fd, packet, len(packet))
        return 0 if size > 0 else self._sys.get_errno() if size else errno.ENXIO

    def write_many(self, fd: int, packets: Sequence[bytes]) -> tuple[int, int]:
        write, done = self._sys.write, 0
        for packet in packets:
            size = write(fd, packet, len(packet))
            if size <= 0:
                return done, self._sys.get_errno() if size else errno.ENXIO
            done += 1
        return done, 0


class PlainCalls:
    """`os.read` and `os.write`, which let go of the GIL at every packet."""

    backend = "portable"

    def read_many(self, fd: int, count: int, budget: int) -> tuple[list[bytes], int]:
        found: list[bytes] = []
        try:
            while count and budget > 0:
                packet = os.read(fd, ROOM)
                if not packet:
                    return found, errno.EAGAIN
                found.append(packet)
                count -= 1
                budget -= len(packet)
        except OSError as error:
            return found, error.errno or errno.EIO
        return found, 0

    def write(self, fd: int, packet: bytes) -> int:
        try:
            return 0 if os.write(fd, packet) else errno.ENXIO
        except OSError as error:
            return error.errno or errno.EIO

    def write_many(self, fd: int, packets: Sequence[bytes]) -> tuple[int, int]:
        done = 0
        for packet in packets:
            error = self.write(fd, packet)
            if error:
                return done, error
            done += 1
        return done, 0


def choose_calls() -> TunCalls:
    """The best calls for this system."""
    if not LibcCalls.usable():
        return PlainCalls()
    from rnsfast.osio.tunadaptive import AdaptiveCalls  # which is made of what stands above

    return AdaptiveCalls()


class TunIO(PacketIO):
    """The packets of one open TUN descriptor; takes it over.

    Args:
        fd: the descriptor; becomes non-blocking.
        max_batch: packets a call, 1..128.
        max_packet: bytes of the largest packet that is sent; received ones have any size.
        vnet_header: whether a virtio-net header stands before each packet (`IFF_VNET_HDR`), and super-packets may come.
        calls: other system calls, for tests.
    """

    def __init__(
        self,
        fd: int,
        *,
        max_batch: int = BATCH,
        max_packet: int = MAX_PACKET,
        vnet_header: bool = False,
        calls: TunCalls | None = None,
    ) -> None:
        if not 1 <= max_batch <= MAX_BATCH:
            raise ValueError(f"a batch of {max_batch} packets is not within 1..{MAX_BATCH}")
        os.set_blocking(fd, False)
        self._fd = fd
        self._calls: TunCalls = choose_calls() if calls is None else calls
        self._vnet = vnet_header
        self._left: list[bytes] = []  # packets of a super-packet for which a batch had no room
        name = self._calls.backend + ("-vnet" if vnet_header else "")
        super().__init__(
            Caps(Kind.TUN, name, max_batch, max_batch, max_packet, peers=False, run_tx=1, pollable=True), None
        )

    def _number(self) -> int:
        return self._fd

    def _release(self) -> None:
        os.close(self._fd)

    # Receiving

    def make_batch(self) -> RxBatch:
        return RxBatch(self.caps.max_rx, 0)  # packets come as bytes of their own

    def _take(self, into: RxBatch) -> int:
        packets, error = self._left[: into.capacity], 0
        if packets:
            self._left = self._left[into.capacity :]
        if len(packets) < into.capacity:
            self.stats.rx_calls += 1
            found, error = self._calls.read_many(self._fd, into.capacity - len(packets), BUDGET)
            if self._vnet:
                found, bad = virtio.unpack_many(found)
                into.dropped += bad
            packets = packets + found if packets else found
        kinds = {first >> 4 for first in set(map(_FIRST, packets))}
        if not kinds <= VERSIONS:
            sound = [packet for packet in packets if packet[0] >> 4 in VERSIONS]
            into.dropped += len(packets) - len(sound)
            packets, kinds = sound, kinds & VERSIONS
        if len(packets) > into.capacity:
            self._left = packets[into.capacity :]
            packets = packets[: into.capacity]
            kinds = {packet[0] >> 4 for packet in packets}
        into.add_many(packets)
        into.owned = True
        into.uniform = kinds.pop() if len(kinds) == 1 else None
        return error

    # Sending

    def _is_valid(self, item: bytes) -> bool:
        return 0 < len(item) <= self.caps.max_packet and item[0] >> 4 in VERSIONS

    def _submit_one(self, item: bytes, peer: Peer | None) -> int:
        return self._calls.write(self._fd, NO_HEADER + item if self._vnet else item)

    def _submit(self, items: Sequence[bytes], peers: Peers, first: int, stop: int) -> tuple[int, int]:
        packets = items[first:stop]
        if self._vnet:
            packets = [NO_HEADER + packet for packet in packets]
        return self._calls.write_many(self._fd, packets)
