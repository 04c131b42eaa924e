"""Datagram sockets on Linux: recvmmsg, sendmmsg, and runs that the kernel cuts.  Protocol 09, section 5.

All calls go through a handle that keeps the GIL, since none can block (protocol 09, section 3). Descriptor arrays are
made once and seen as 64-bit words: one strided store fills or restores a field of many entries. An `mmsghdr` is eight
words (name, namelen, iov, iovlen, control, controllen, flags, msg_len), an `iovec` two (base, len).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import platform
import socket
import sys as system
from collections.abc import Sequence
from typing import Final, Protocol

from rnsfast.osio.contract import Caps, Kind, Peer, RxBatch
from rnsfast.osio.packets import PacketIO, Peers
from rnsfast.osio.peers import parse_peer
from rnsfast.osio.portable import take_plainly
from rnsfast.osio.runs import (
    CONTROL,
    RUN_BYTES,
    SOL_UDP,
    UDP_GRO,
    UDP_SEGMENT,
    cut,
    plan_runs,
    run_packets,
    segment_control,
)
from rnsfast.osio.runs import segment_size as size_of_segments
from rnsfast.osio.verdicts import SEND, UNSUPPORTED, Verdict, describe, log_once

BATCH: Final = 64  # packets; protocol 09, section 11, and docs/benchmarks.md
MAX_BATCH: Final = 128
SLOT: Final = 2048  # bytes; covers every interface on datagrams and its access code
GRO_SLOT: Final = 65_535  # bytes; anything less loses the boundaries
GRO_SLOTS: Final = 32  # 2 MiB, of which the kernel touches what it fills
NAME: Final = 28  # bytes of the largest address

SENDERS: Final = 1024  # addresses remembered

DONTWAIT: Final = 0x40
TRUNC: Final = 0x20
CTRUNC: Final = 0x08
NOSIGNAL: Final = 0x4000

Array = ctypes.Array[ctypes.c_uint64]


class LinuxSys(Protocol):
    """The system calls of a datagram socket. Counts, or -1 and an errno."""

    def recvmmsg(self, fd: int, vector: int, count: int, flags: int, timeout: None, /) -> int: ...
    def sendmmsg(self, fd: int, vector: int, count: int, flags: int, /) -> int: ...
    def sendto(self, fd: int, data: bytes, size: int, flags: int, name: bytes | None, length: int, /) -> int: ...
    def get_errno(self) -> int: ...


class Libc:
    """libc by handles that keep the GIL."""

    def __init__(self) -> None:
        libc = ctypes.PyDLL(None, use_errno=True)
        number, pointer, unsigned = ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32
        self.recvmmsg = libc.recvmmsg
        self.recvmmsg.argtypes, self.recvmmsg.restype = (number, pointer, unsigned, number, pointer), number
        self.sendmmsg = libc.sendmmsg
        self.sendmmsg.argtypes, self.sendmmsg.restype = (number, pointer, unsigned, number), number
        self.sendto = libc.sendto
        self.sendto.argtypes = (number, ctypes.c_char_p, ctypes.c_size_t, number, ctypes.c_char_p, unsigned)
        self.sendto.restype = ctypes.c_ssize_t
        self.get_errno = ctypes.get_errno

    @staticmethod
    def usable() -> bool:
        """64-bit little-endian Linux: the layouts below are no others."""
        return (
            system.platform == "linux"
            and system.byteorder == "little"
            and ctypes.sizeof(ctypes.c_void_p) == ctypes.sizeof(ctypes.c_size_t) == 8
        )


class Vector:
    """An array of `mmsghdr` with an `iovec`, room for a name and one control message each.

    Kept together, since the kernel is given addresses: a part that is collected is memory that it writes into.
    """

    __slots__ = ("_views", "address", "control", "control_address", "iovecs", "names", "names_address", "words")

    def __init__(self, size: int) -> None:
        headers = (ctypes.c_uint64 * (8 * size))()
        iovecs = (ctypes.c_uint64 * (2 * size))()
        names = (ctypes.c_char * (32 * size))()
        control = (ctypes.c_char * (CONTROL * size))()
        self._views = (headers, iovecs, names, control)
        self.words = memoryview(headers).cast("B").cast("Q")
        self.iovecs = memoryview(iovecs).cast("B").cast("Q")
        self.names = memoryview(names).cast("B")
        self.control = memoryview(control).cast("B")
        self.address = ctypes.addressof(headers)
        self.names_address, self.control_address = ctypes.addressof(names), ctypes.addressof(control)
        first = ctypes.addressof(iovecs)
        for i in range(size):
            self.words[8 * i + 2] = first + 16 * i
            self.words[8 * i + 3] = 1


class LinuxDatagramIO(PacketIO):
    """One datagram socket, connected or not; takes it over.

    Args:
        sock: SOCK_DGRAM of AF_INET, AF_INET6 or AF_UNIX.
        max_batch: packets a call, 1..128.
        max_packet: bytes of the largest packet.
        peers: whether received packets say where they come from.
        segmentation: whether runs may be handed to the kernel as one (GSO).
        coalescing: whether the kernel may hand over several as one (GRO).
        sys: other system calls, for tests.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        max_batch: int = BATCH,
        max_packet: int = SLOT,
        peers: bool = True,
        segmentation: bool = True,
        coalescing: bool = False,
        sys: LinuxSys | None = None,
    ) -> None:
        if not 1 <= max_batch <= MAX_BATCH:
            raise ValueError(f"a batch of {max_batch} packets is not within 1..{MAX_BATCH}")
        sock.setblocking(False)
        self._sock = sock
        self._sys: LinuxSys = Libc() if sys is None else sys
        family = int(sock.family)
        inet = family in (socket.AF_INET, socket.AF_INET6)
        self._gso = segmentation and inet and max_batch > 1 and _probe(sock, UDP_SEGMENT, 0)
        self._gro = coalescing and inet and max_batch > 1 and _probe(sock, UDP_GRO, 1)
        self._ceiling = max_packet  # bytes of the largest packet in a run
        self._runs: dict[int, int] = {}  # of the last submission: where a run begins, and its packets
        self._rx_plain = self._tx_plain = False  # recvmmsg, sendmmsg were refused
        self._singly = 0  # packets from here on that go without runs, since the run that they made was refused
        self._suspected = False  # segmentation: if the first of them is taken, it was the run that was refused
        self._batched = False  # the last call was sendmmsg
        self._run_packets = run_packets(platform.release()) if self._gso else 1
        caps = Caps(Kind.DATAGRAM, "linux-mmsg", max_batch, max_batch, max_packet, peers, self._run_packets, True)
        super().__init__(caps, family)
        self._name_size = {int(socket.AF_INET): 16, int(socket.AF_INET6): 28}.get(family)
        self._tx = Vector(max_batch)
        self._run = bytearray(RUN_BYTES if self._gso else 1)  # a run that is all there is stands here
        self._run_address = ctypes.addressof(ctypes.c_char.from_buffer(self._run))
        self._to: dict[bytes, tuple[ctypes.Array[ctypes.c_char], int]] = {}  # address bytes and where they stand
        self._rx: Vector | None = None  # made for the first batch
        self._rx_for: RxBatch | None = None
        self._rx_used = 0
        self._senders: dict[bytes, Peer | None] = {}  # at most SENDERS, then all are forgotten
        # Datagrams of a coalesced buffer for which the batch had no room, and their senders.
        self._left: tuple[list[memoryview], list[Peer | None]] | None = None

    @property
    def segmentation(self) -> bool:
        """Whether runs are handed over as one."""
        return self._gso

    def _number(self) -> int:
        return self._sock.fileno()

    def _shut(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _release(self) -> None:
        self._sock.close()

    # -- receiving ------------------------------------------------------------------------------------------------

    def make_batch(self) -> RxBatch:
        size = self.caps.max_packet + 1  # a packet that fills it is too large
        if self._gro:
            return RxBatch(self.caps.max_rx, GRO_SLOT, min(GRO_SLOTS, self.caps.max_rx))
        return RxBatch(self.caps.max_rx, size)

    def _prepare(self, into: RxBatch) -> Vector:
        """Point the descriptors at the slots of `into`; usually they do already."""
        vector = Vector(into.slots)
        slots, words, iovecs = into.slots, vector.words, vector.iovecs
        for i in range(slots):
            iovecs[2 * i], iovecs[2 * i + 1] = into.address + i * into.slot, into.slot
            words[8 * i] = vector.names_address + 32 * i
            words[8 * i + 1] = NAME
            if self._gro:
                words[8 * i + 4] = vector.control_address + CONTROL * i
                words[8 * i + 5] = CONTROL
        self._rx, self._rx_for, self._rx_used = vector, into, 0
        return vector

    def _take(self, into: RxBatch) -> int:
        if self._left is not None:  # no call: they are here already
            found, senders = self._left
            if into is not self._rx_for:  # they stand in the memory of another batch
                found = [memoryview(bytes(piece)) for piece in found]
            self._deliver(into, found, senders)
            return 0
        if self._rx_plain:
            return self._take_plainly(into)
        vector = self._rx
        if vector is None or self._rx_for is not into:
            vector = self._prepare(into)
        sys, words = self._sys, vector.words
        if used := self._rx_used:
            words[1 : 8 * used : 8] = _filled(NAME, used)
            words[6 : 8 * used : 8] = _filled(0, used)
            if self._gro:
                words[5 : 8 * used : 8] = _filled(CONTROL, used)
        limit = self._rx_used = min(into.slots, into.capacity)  # whatever comes, what may be touched is restored
        self.stats.rx_calls += 1
        count = sys.recvmmsg(self._number(), vector.address, limit, DONTWAIT, None)
        if count <= 0:
            error = sys.get_errno() if count else errno.EAGAIN
            self._rx_used = 0
            if error in UNSUPPORTED:
                self._receive_plainly(error)
                return self._take_plainly(into)
            return error
        self._rx_used = min(count, limit)
        if count > limit:
            into.dropped += count  # more than there was room for: nothing in it can be trusted
            return 0
        return self._check(into, vector, count)

    def _receive_plainly(self, error: int) -> None:
        self._rx_plain = True
        _say_plain("recvmmsg", error)
        if self._gro:  # plain calls do not say where the datagrams of a buffer end
            self._gro = False
            _probe(self._sock, UDP_GRO, 0)

    def _check(self, into: RxBatch, vector: Vector, count: int) -> int:
        """Hand over what looks as it should (protocol 09, 5.4)."""
        words, slot = vector.words, into.slot
        sizes = words[7 : 8 * count : 8].tolist()
        names = words[1 : 8 * count : 8].tolist()
        bad = self._name_size is not None and (
            names.count(self._name_size) != count
            or vector.names[0 : 32 * count : 32].tobytes().count(self._family or 0) != count
            or vector.names[1 : 32 * count : 32].tobytes().count(0) != count
        )
        if max(sizes) > slot or bad:
            into.dropped += count  # no shape that the kernel produces: nothing in it can be trusted
            return 0
        flags = words[6 : 8 * count : 8].tolist()
        limit = self.caps.max_packet
        joined = self._gro and any(words[5 : 8 * count : 8].tolist())  # a control message: more than one datagram
        if not joined and not any(flags) and max(sizes) <= limit and min(sizes) > 0:
            into.add_many([into.room(i)[:size] for i, size in enumerate(sizes)])
            if self.caps.peers:
                into.peers = self._peers(vector, names)
                self._mark(into)
            return 0
        found: list[memoryview] = []
        senders: list[Peer | None] = []
        known = self._peers(vector, names) if self.caps.peers else [None] * count
        for i, size in enumerate(sizes):
            if flags[i] & (TRUNC | CTRUNC) or not size:
                into.dropped += 1
                continue
            pieces = [into.room(i)[:size]]
            if joined:
                used = min(words[8 * i + 5], CONTROL)
                pieces = cut(pieces[0], size_of_segments(vector.control[CONTROL * i : CONTROL * i + used]))
            for piece in pieces:
                if len(piece) > limit:
                    into.dropped += 1
                else:
                    found.append(piece)
                    senders.append(known[i])
        self._deliver(into, found, senders)
        return 0

    def _deliver(self, into: RxBatch, found: list[memoryview], senders: list[Peer | None]) -> None:
        """As many as fit; the rest waits for the next receive."""
        room = into.capacity
        into.add_many(found[:room])
        if self.caps.peers:
            into.peers = senders[:room]
            self._mark(into)
        self._left = (found[room:], senders[room:]) if len(found) > room else None

    def _mark(self, into: RxBatch) -> None:
        """Whether one sender is behind all of it."""
        peers = into.peers
        if peers and all(peer is peers[0] for peer in peers):
            into.uniform = peers[0]

    def _peers(self, vector: Vector, sizes: list[int]) -> list[Peer | None]:
        known, names = self._senders, vector.names
        found: list[Peer | None] = []
        for i, size in enumerate(sizes):
            raw = bytes(names[32 * i : 32 * i + min(size & 0xFFFFFFFF, NAME)])
            if raw not in known:
                if len(known) >= SENDERS:
                    known.clear()
                known[raw] = parse_peer(raw, "linux")
            found.append(known[raw])
        return found

    def _take_plainly(self, into: RxBatch) -> int:
        self.stats.rx_calls += 1
        return take_plainly(self._sock, into, self.caps)

    # -- sending --------------------------------------------------------------------------------------------------

    def _all_valid(self, items: Sequence[bytes]) -> bool:
        sizes = set(map(len, items))
        return min(sizes) > 0 and max(sizes) <= self.caps.max_packet

    def _submit_one(self, item: bytes, peer: Peer | None) -> int:
        if self._batched:  # the runs are of an earlier submission: what goes wrong now is about this packet
            self._batched = self._suspected = False
            self._runs, self._singly = {}, 0
        name, size = (None, 0) if peer is None else (peer.raw, len(peer.raw))
        sys = self._sys
        if sys.sendto(self._number(), item, len(item), DONTWAIT | NOSIGNAL, name, size) < 0:
            return sys.get_errno()
        return 0

    def _submit(self, items: Sequence[bytes], peers: Peers, first: int, stop: int) -> tuple[int, int]:
        if self._tx_plain:
            return self._submit_plainly(items, peers, first, stop)
        one = peers if peers is None or isinstance(peers, Peer) else None
        each = peers if peers is not None and one is None else None
        self._batched = True
        if self._gso and not self._singly:
            runs = plan_runs(items, each, first, stop, self._ceiling, self._run_packets)  # type: ignore[arg-type]
            if len(runs) == 1 and each is None:
                return self._submit_run(items[first:stop], one, first)
            entries = [items[a] if b - a == 1 else b"".join(items[a:b]) for a, b in runs]
            self._runs = {a: b - a for a, b in runs}
        else:
            runs = []
            entries = list(items[first:stop])
            self._runs = {}
        count = len(entries)
        vector = self._tx
        words, iovecs = vector.words, vector.iovecs
        pointers = (ctypes.c_char_p * count)(*entries)  # keeps nothing alive; `entries` does
        iovecs[0 : 2 * count : 2] = memoryview(pointers).cast("B").cast("Q")
        iovecs[1 : 2 * count : 2] = memoryview((ctypes.c_uint64 * count)(*map(len, entries))).cast("B").cast("Q")
        if len(self._to) >= SENDERS:  # not further down: the entries of this batch point at what is remembered
            self._to.clear()
        if each is None:
            address, size = (0, 0) if one is None else self._address_of(one)
            words[0 : 8 * count : 8] = _filled(address, count)
            words[1 : 8 * count : 8] = _filled(size, count)
        else:
            starts = [a for a, _ in runs] if runs else range(first, stop)
            for i, at in enumerate(starts):
                words[8 * i], words[8 * i + 1] = self._address_of(each[at])  # type: ignore[index]
        with_control = 0
        sys = self._sys
        try:
            for i, (a, b) in enumerate(runs):
                if b - a > 1:
                    with_control = i + 1
                    vector.control[CONTROL * i : CONTROL * (i + 1)] = segment_control(len(items[a]))
                    words[8 * i + 4], words[8 * i + 5] = vector.control_address + CONTROL * i, CONTROL
            taken = sys.sendmmsg(self._number(), vector.address, count, DONTWAIT | NOSIGNAL)
            error = sys.get_errno() if taken < 0 else 0
        finally:
            if with_control:  # only what was used is put back
                words[4 : 8 * with_control : 8] = _filled(0, with_control)
                words[5 : 8 * with_control : 8] = _filled(0, with_control)
        if taken < 0:
            return 0, error
        if runs:
            return sum(b - a for a, b in runs[:taken]), 0
        if self._singly and taken:
            self._went_singly(taken)
        return taken, 0

    def _submit_run(self, items: Sequence[bytes], peer: Peer | None, first: int) -> tuple[int, int]:
        """All there is, as one run: nothing of the vector is needed but its first entry."""
        count = len(items)
        self._runs = {first: count}
        data = b"".join(items)
        self._run[: len(data)] = data
        if len(self._to) >= SENDERS:
            self._to.clear()
        vector, sys = self._tx, self._sys
        words = vector.words
        words[0], words[1] = (0, 0) if peer is None else self._address_of(peer)
        vector.iovecs[0], vector.iovecs[1] = self._run_address, len(data)
        vector.control[:CONTROL] = segment_control(len(items[0]))
        words[4], words[5] = vector.control_address, CONTROL
        try:
            taken = sys.sendmmsg(self._number(), vector.address, 1, DONTWAIT | NOSIGNAL)
            error = sys.get_errno() if taken < 0 else 0
        finally:
            words[4] = words[5] = 0
        return (count if taken > 0 else 0), error

    def _went_singly(self, count: int) -> None:
        self._singly = max(0, self._singly - count)
        if self._suspected:  # legal one by one, so it is segmentation that does not work here
            self._suspected = False
            self._end_segmentation(errno.EINVAL)

    def _address_of(self, peer: Peer) -> tuple[int, int]:
        known = self._to.get(peer.raw)
        if known is None:
            buffer = ctypes.create_string_buffer(peer.raw, len(peer.raw))
            known = self._to[peer.raw] = (buffer, ctypes.addressof(buffer))
        return known[1], len(peer.raw)

    def _submit_plainly(self, items: Sequence[bytes], peers: Peers, first: int, stop: int) -> tuple[int, int]:
        for at in range(first, stop):
            error = self._submit_one(items[at], peers if peers is None or isinstance(peers, Peer) else peers[at])
            if error:
                return at - first, 0 if at > first else error
        return stop - first, 0

    def _judge(self, error: int, items: Sequence[bytes], at: int) -> tuple[Verdict, int]:
        length = self._runs.get(at, 1)
        if self._batched and (error == errno.ENOSYS or (error == errno.EOPNOTSUPP and length == 1)):
            self._tx_plain = True
            _say_plain("sendmmsg", error)
            return Verdict.AGAIN, 1
        if length > 1:
            return self._judge_run(error, len(items[at]), length)
        verdict = SEND.get(error, Verdict.REJECT)
        self._suspected = False
        if verdict is Verdict.REJECT:
            self._singly = max(0, self._singly - 1)
        return verdict, 1

    def _judge_run(self, error: int, size: int, length: int) -> tuple[Verdict, int]:
        """A refused run: nothing of it was sent. What would go out packet by packet does so, in this very batch."""
        verdict = SEND.get(error)
        if verdict in (Verdict.RETRY, Verdict.BLOCKED, Verdict.BROKEN):
            return verdict, length
        if error in _WHOLE_RUN:
            return Verdict.REJECT, length  # says something about the peer or the device, not about the run
        self._singly = length
        if error == errno.EMSGSIZE:
            # The way is narrower than before. Smaller packets may still travel in runs.
            self._ceiling = min(self._ceiling, size - 1)
            log_once("segments", "packets of %d bytes are too large to be segmented by the system: sent singly", size)
        elif error == errno.EINVAL:
            self._suspected = True  # or the address is illegal, and its packets are refused one by one, too
        elif error in _NO_SEGMENTATION:
            self._end_segmentation(error)
        return Verdict.AGAIN, length  # anything else passes: the next run is tried again

    def _end_segmentation(self, error: int) -> None:
        self._gso = False
        log_once("segmentation", "segmentation by the system is refused (%s): sent singly", describe(error))


#: A run is refused with one of these where the device or a policy of the system cannot segment.
_NO_SEGMENTATION: Final = frozenset({errno.EIO, errno.EOPNOTSUPP, errno.ENOPROTOOPT})

#: Errors that each packet of a run would meet.
_WHOLE_RUN: Final = frozenset(
    {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EACCES}
)


def _say_plain(name: str, error: int) -> None:
    log_once(name, "%s is refused (%s): packets go one by one", name, describe(error))


def _probe(sock: socket.socket, option: int, value: int) -> bool:
    """Whether the kernel has a UDP option."""
    try:
        sock.setsockopt(SOL_UDP, option, value)
    except OSError:
        return False
    return True


def _filled(value: int, count: int) -> memoryview:
    """`count` times `value`, to be stored with a stride."""
    known = _FILLED.get((value, count))
    if known is None:
        if len(_FILLED) >= 2048:
            _FILLED.clear()
        words = (ctypes.c_uint64 * count)(*([value] * count))
        known = _FILLED[value, count] = memoryview(words).cast("B").cast("Q")
    return known


_FILLED: dict[tuple[int, int], memoryview] = {}  # constants, at most 2048
