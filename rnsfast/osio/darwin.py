"""Datagram sockets on macOS: recvmsg_x, and sendmsg_x where the socket is connected.  Protocol 09, section 6.1.

Not verified on macOS beyond what `tests/osio/test_native_darwin.py` says when it is run there.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import socket
import struct
from collections.abc import Sequence
from typing import Final

from rnsfast.osio.contract import Caps, Kind, Peer, RxBatch
from rnsfast.osio.layouts_darwin import MSG_CTRUNC, MSG_DONTWAIT, MSG_TRUNC
from rnsfast.osio.msgx import (
    IOVEC,
    NAME,
    NAME_ROOM,
    STEP,
    W_BASE,
    W_DATALEN,
    W_LEN,
    DarwinSys,
    Headers,
    Libsystem,
    MsgxIO,
)
from rnsfast.osio.peers import parse_peer

BATCH: Final = 64  # packets; protocol 09, section 11
MAX_BATCH: Final = 128
SLOT: Final = 2048  # bytes

SENDERS: Final = 1024  # addresses remembered

NAME_SIZES: Final = {int(socket.AF_INET): 16, int(socket.AF_INET6): 28}


class DarwinDatagramIO(MsgxIO):
    """One datagram socket; takes it over.

    Several packets go out in one call only if the socket is connected, which is looked at once, here; a connected
    socket takes no peers. An unconnected one sends them one by one.

    Args:
        sock: SOCK_DGRAM of AF_INET, AF_INET6 or AF_UNIX.
        max_batch: packets a call, 1..128.
        max_packet: bytes of the largest packet.
        peers: whether received packets say where they come from.
        sys: other system calls, for tests.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        max_batch: int = BATCH,
        max_packet: int = SLOT,
        peers: bool = True,
        sys: DarwinSys | None = None,
    ) -> None:
        if not 1 <= max_batch <= MAX_BATCH:
            raise ValueError(f"a batch of {max_batch} packets is not within 1..{MAX_BATCH}")
        sock.setblocking(False)
        self._sock = sock
        family = int(sock.family)
        self._name_size = NAME_SIZES.get(family)  # bytes of an address; None: senders have none
        self._scope = _scope_of(sock)
        self._senders: dict[bytes, Peer] = {}  # at most SENDERS, then all are forgotten
        self._name = (ctypes.c_char * NAME_ROOM)()  # for the plain call
        self._name_length = ctypes.c_uint32()
        super().__init__(
            Caps(Kind.DATAGRAM, "darwin-msgx", max_batch, max_batch, max_packet, peers, 1, True),
            family,
            connected=_is_connected(sock),
            pieces=1,
            names=self._name_size is not None,
            sys=Libsystem() if sys is None else sys,
        )

    def _number(self) -> int:
        return self._sock.fileno()

    def _shut(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _release(self) -> None:
        self._sock.close()

    # Receiving

    def _aim(self, headers: Headers, into: RxBatch) -> None:
        for i in range(headers.size):
            headers.iovecs[IOVEC * i + W_BASE] = into.address + i * into.slot
            headers.iovecs[IOVEC * i + W_LEN] = into.slot

    def _room(self, into: RxBatch) -> int:
        return into.slot

    def _sort_in(self, into: RxBatch, headers: Headers, sizes: list[int]) -> bool:
        count = len(sizes)
        senders: list[Peer | None] = [None] * count
        if size := self._name_size:
            if headers.name_sizes(count).count(size) != count:
                return False
            for i in range(count):
                sender = self._sender(bytes(headers.names[NAME_ROOM * i : NAME_ROOM * i + size]))
                if sender is None:
                    return False
                senders[i] = sender
        limit = min(self.caps.max_packet, into.slot - 1)
        flags = headers.flags(count)
        if min(sizes) > 0 and max(sizes) <= limit and not any(flags):
            into.add_many([into.room(i)[:size] for i, size in enumerate(sizes)])
        else:
            kept = [i for i in range(count) if 0 < sizes[i] <= limit and not flags[i] & (MSG_TRUNC | MSG_CTRUNC)]
            into.dropped += count - len(kept)
            into.add_many([into.room(i)[: sizes[i]] for i in kept])
            senders = [senders[i] for i in kept]
        self._mark(into, senders)
        return True

    def _mark(self, into: RxBatch, senders: list[Peer | None]) -> None:
        """Who sent it, and whether it was one sender."""
        if self.caps.peers and senders:
            into.peers = senders
            if all(sender is senders[0] for sender in senders):
                into.uniform = senders[0]

    def _sender(self, raw: bytes) -> Peer | None:
        """The peer behind an address; None if it is none of this socket's family."""
        known = self._senders.get(raw)
        if known is not None:
            return known
        peer = parse_peer(raw, "darwin")
        if peer is None or peer.family != self._family:
            return None
        if self._scope and not peer.scope and ipaddress.ip_address(peer.host).is_link_local:
            # recvmsg_x gives the address without its zone, and an answer cannot be sent without.
            peer = parse_peer(raw[:24] + struct.pack("=I", self._scope), "darwin")
            assert peer is not None
        if len(self._senders) >= SENDERS:
            self._senders.clear()
        self._senders[raw] = peer
        return peer

    def _take_plainly(self, into: RxBatch) -> int:
        number, recvfrom, slot = self._number(), self._sys.recvfrom, into.slot
        name, length = ctypes.addressof(self._name), ctypes.addressof(self._name_length)
        limit = min(self.caps.max_packet, slot - 1)
        senders: list[Peer | None] = []
        error = 0
        for _ in range(min(into.slots, into.capacity)):
            at = into.count
            self._name_length.value = NAME
            self.stats.rx_calls += 1
            size = recvfrom(number, into.address + at * slot, slot, MSG_DONTWAIT, name, length)
            if size < 0:
                error = self._sys.get_errno()
                break
            if not 0 < size <= limit:
                into.dropped += 1
                continue
            into.add(into.room(at)[:size])
            raw = ctypes.string_at(name, min(self._name_length.value, NAME))
            senders.append(self._sender(raw) if self._name_size else None)
        self._mark(into, senders)
        return error

    # Sending

    def _load(self, headers: Headers, items: Sequence[bytes]) -> object:
        count = len(items)
        pointers = (ctypes.c_char_p * count)(*items)  # keeps nothing alive; `items` does
        sizes = memoryview((ctypes.c_uint64 * count)(*map(len, items))).cast("B").cast("Q")
        headers.iovecs[W_BASE : IOVEC * count : IOVEC] = memoryview(pointers).cast("B").cast("Q")
        headers.iovecs[W_LEN : IOVEC * count : IOVEC] = sizes
        headers.words[W_DATALEN : STEP * count : STEP] = sizes
        return items

    def _write(self, item: bytes, peer: Peer | None) -> int:
        name, length = (None, 0) if peer is None else (peer.raw, len(peer.raw))
        if self._sys.sendto(self._number(), item, len(item), MSG_DONTWAIT, name, length) < 0:
            return self._sys.get_errno()
        return 0


def _is_connected(sock: socket.socket) -> bool:
    try:
        sock.getpeername()
    except OSError:
        return False
    return True


def _scope_of(sock: socket.socket) -> int:
    """The zone of a socket bound to a link-local address, 0 for others."""
    if sock.family != socket.AF_INET6:
        return 0
    try:
        return int(sock.getsockname()[3])
    except OSError:
        return 0
