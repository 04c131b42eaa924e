"""TUN devices of macOS: a control socket that carries packets.  Protocol 09, section 6.2.

    0   4     address family, big-endian: 2 or 30
    4   >= 1  packet

The family is an iovec of its own, so that packets land without it. The kernel still takes packets out of a call one by
one: a batch saves calls, not work per packet. iOS is no target; there `Libsystem` finds no calls and the plain path is
taken. Not verified on macOS beyond what `tests/osio/test_native_darwin.py` says when it is run there.
"""

from __future__ import annotations

import ctypes
import errno
import socket
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from rnsfast.osio.contract import Caps, Kind, Peer, RxBatch
from rnsfast.osio.layouts_darwin import AF_INET, AF_INET6, MSG_CTRUNC, MSG_TRUNC
from rnsfast.osio.msgx import IOVEC, STEP, W_BASE, W_DATALEN, W_LEN, DarwinSys, Headers, Libsystem, MsgxIO

BATCH: Final = 64  # packets; protocol 09, section 11
MAX_BATCH: Final = 128

PREFIX: Final = 4  # bytes before each packet
_PREFIXES: Final = {4: struct.pack(">I", AF_INET), 6: struct.pack(">I", AF_INET6)}  # by IP version
_VERSIONS: Final = {prefix: version for version, prefix in _PREFIXES.items()}


class UtunIO(MsgxIO):
    """The packets of one utun device; takes its socket over.

    Args:
        sock: the connected control socket.
        max_batch: packets a call, 1..128.
        max_packet: bytes of the largest packet, without the prefix: at least the MTU of the device.
        sys: other system calls, for tests.
    """

    def __init__(
        self, sock: socket.socket, *, max_batch: int = BATCH, max_packet: int = 1500, sys: DarwinSys | None = None
    ) -> None:
        if not 1 <= max_batch <= MAX_BATCH:
            raise ValueError(f"a batch of {max_batch} packets is not within 1..{MAX_BATCH}")
        sock.setblocking(False)
        self._sock = sock
        self._kinds = (ctypes.c_char * (PREFIX * MAX_BATCH))()  # prefixes of received packets
        self._v4, self._v6 = ctypes.create_string_buffer(_PREFIXES[4]), ctypes.create_string_buffer(_PREFIXES[6])
        self._at = {4: ctypes.addressof(self._v4), 6: ctypes.addressof(self._v6)}
        super().__init__(
            Caps(Kind.TUN, "darwin-utun", max_batch, max_batch, max_packet, False, 1, True),
            None,
            connected=True,
            pieces=2,
            names=False,
            sys=Libsystem() if sys is None else sys,
        )

    def set_max_packet(self, size: int) -> None:
        """The device carries larger or smaller packets now. Batches made before keep the room they have."""
        self.caps = replace(self.caps, max_packet=size)

    def _number(self) -> int:
        return self._sock.fileno()

    def _release(self) -> None:
        self._sock.close()

    # Receiving

    def _aim(self, headers: Headers, into: RxBatch) -> None:
        kinds, iovecs = ctypes.addressof(self._kinds), headers.iovecs
        for i in range(headers.size):
            first, second = 2 * IOVEC * i, 2 * IOVEC * i + IOVEC
            iovecs[first + W_BASE], iovecs[first + W_LEN] = kinds + PREFIX * i, PREFIX
            iovecs[second + W_BASE], iovecs[second + W_LEN] = into.address + i * into.slot, into.slot

    def _room(self, into: RxBatch) -> int:
        return PREFIX + into.slot

    def _sort_in(self, into: RxBatch, headers: Headers, sizes: list[int]) -> bool:
        count = len(sizes)
        if any(headers.name_sizes(count)):
            return False  # packets of a device have no sender
        limit = min(self.caps.max_packet, into.slot - 1)
        flags = headers.flags(count)
        kinds = bytes(memoryview(self._kinds).cast("B")[: PREFIX * count])
        seen: set[int] = set()
        entries: list[memoryview] = []
        for i, size in enumerate(sizes):
            room = into.room(i)
            version = self._version(kinds[PREFIX * i : PREFIX * i + PREFIX], room, size - PREFIX, limit)
            if not version or flags[i] & (MSG_TRUNC | MSG_CTRUNC):
                into.dropped += 1
                continue
            seen.add(version)
            entries.append(room[: size - PREFIX])
        into.add_many(entries)
        into.uniform = seen.pop() if len(seen) == 1 else None
        return True

    @staticmethod
    def _version(kind: bytes, packet: memoryview, size: int, limit: int) -> int:
        """The IP version of a received packet; 0 if it is empty, cut, or not what its prefix says."""
        if not 0 < size <= limit:
            return 0
        version = packet[0] >> 4
        return version if _VERSIONS.get(kind) == version else 0

    def _take_plainly(self, into: RxBatch) -> int:
        number, readv = self._number(), self._sys.readv
        limit = min(self.caps.max_packet, into.slot - 1)
        kind = bytearray(PREFIX)
        seen: set[int] = set()
        error = 0
        for _ in range(min(into.slots, into.capacity)):
            room = into.room(into.count)
            self.stats.rx_calls += 1
            try:
                size = readv(number, (kind, room))
            except OSError as problem:
                error = problem.errno or errno.EIO
                break
            version = self._version(bytes(kind), room, size - PREFIX, limit)
            if not version:
                into.dropped += 1
                continue
            seen.add(version)
            into.add(room[: size - PREFIX])
        into.uniform = seen.pop() if len(seen) == 1 else None
        return error

    # Sending

    def _is_valid(self, item: bytes) -> bool:
        return 0 < len(item) <= self.caps.max_packet and item[0] >> 4 in _PREFIXES

    def _all_valid(self, items: Sequence[bytes]) -> bool:
        return super()._all_valid(items) and all(item[0] >> 4 in _PREFIXES for item in items)

    def _load(self, headers: Headers, items: Sequence[bytes]) -> object:
        count, step = len(items), 2 * IOVEC
        pointers = (ctypes.c_char_p * count)(*items)  # keeps nothing alive; `items` does
        at = self._at
        kinds = (ctypes.c_uint64 * count)(*[at[item[0] >> 4] for item in items])
        sizes = list(map(len, items))
        iovecs = headers.iovecs
        iovecs[W_BASE : step * count : step] = memoryview(kinds).cast("B").cast("Q")
        iovecs[W_LEN : step * count : step] = _words([PREFIX] * count)
        iovecs[IOVEC + W_BASE : step * count : step] = memoryview(pointers).cast("B").cast("Q")
        iovecs[IOVEC + W_LEN : step * count : step] = _words(sizes)
        headers.words[W_DATALEN : STEP * count : STEP] = _words([PREFIX + size for size in sizes])
        return items

    def _write(self, item: bytes, peer: Peer | None) -> int:
        try:
            self._sys.writev(self._number(), (_PREFIXES[item[0] >> 4], item))
        except OSError as error:
            return error.errno or errno.EIO
        return 0


def _words(values: Sequence[int]) -> memoryview:
    return memoryview((ctypes.c_uint64 * len(values))(*values)).cast("B").cast("Q")
