"""`recvmsg_x` and `sendmsg_x`, which datagram sockets and utun devices of macOS share.  Protocol 09, section 6.1.

Both are private system calls, so nothing they say is taken on trust: what comes back is checked, and a call that is
refused, missing or gives an impossible answer is never made again by that object. They are made only on descriptors
that do not block, through a handle that keeps the GIL.

What user space cannot see: the kernel counts packets as it copies them in and hides an error that comes after the
first. When memory runs out in the middle of a call, packets that it reported as sent are gone, which the plain call
would have refused. `Stats.tx_short` counts the calls that took less than they were offered, the only trace of it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys as system
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

from rnsfast.osio.contract import Caps, Peer, RxBatch
from rnsfast.osio.layouts_darwin import KERNEL_CLAMP, MSG_DONTWAIT, Iovec, MsghdrX
from rnsfast.osio.packets import PacketIO, Peers
from rnsfast.osio.verdicts import SEND, UNSUPPORTED, Verdict, describe, log_once

NAME: Final = 28  # bytes of the largest address
NAME_ROOM: Final = 32  # bytes from one address to the next

#: Positions in 64-bit words, and in 32-bit halves where a field is narrower.
STEP: Final = ctypes.sizeof(MsghdrX) // 8
W_NAME: Final = MsghdrX.msg_name.offset // 8
W_IOV: Final = MsghdrX.msg_iov.offset // 8
W_DATALEN: Final = MsghdrX.msg_datalen.offset // 8
H_NAMELEN: Final = MsghdrX.msg_namelen.offset // 4
H_IOVLEN: Final = MsghdrX.msg_iovlen.offset // 4
H_FLAGS: Final = MsghdrX.msg_flags.offset // 4
IOVEC: Final = ctypes.sizeof(Iovec) // 8
W_BASE: Final = Iovec.iov_base.offset // 8
W_LEN: Final = Iovec.iov_len.offset // 8

#: Refusals of the call itself. ENOTSUP is another number than EOPNOTSUPP on macOS.
REFUSED: Final = UNSUPPORTED | {errno.ENOTSUP}

#: What an error of sendmsg_x says: all of these come only when nothing was taken (protocol 09, 6.1). With any other the
#: count is lost, so the packets may have been delivered. EMSGSIZE is about the first packet and handled before this.
SENDMSG_X: Final[Mapping[int, Verdict]] = {
    errno.EINTR: Verdict.RETRY,
    errno.EAGAIN: Verdict.BLOCKED,
    errno.EWOULDBLOCK: Verdict.BLOCKED,
    errno.ENOBUFS: Verdict.REPEAT,  # not BLOCKED: the socket stays writable, and whoever polls would spin
}

#: Errors of recvmsg_x after which the headers are as they were.
_UNTOUCHED: Final = frozenset({errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR})

#: recvmsg_x that does not like how it is called says EINVAL and has taken nothing; the plain call then tells whether it
#: is the socket.
_RX_REFUSED: Final = REFUSED | {errno.EINVAL}

MsgX = Callable[[int, int, int, int], int]  # descriptor, address of the headers, how many, flags


class DarwinSys(Protocol):
    """The system calls of a socket or a utun device. Counts, or -1 and an errno; `readv` and `writev` raise OSError."""

    recvmsg_x: MsgX | None  # None where it does not exist
    sendmsg_x: MsgX | None

    def recvfrom(self, fd: int, buffer: int, size: int, flags: int, name: int, length: int, /) -> int: ...
    def sendto(self, fd: int, data: bytes, size: int, flags: int, name: bytes | None, length: int, /) -> int: ...
    def readv(self, fd: int, buffers: Sequence[Any], /) -> int: ...
    def writev(self, fd: int, buffers: Sequence[Any], /) -> int: ...
    def get_errno(self) -> int: ...


class Libsystem:
    """libSystem by handles that keep the GIL: no call here can block."""

    def __init__(self) -> None:
        library = ctypes.PyDLL(None, use_errno=True)
        number, pointer, unsigned, size = ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_size_t
        self.recvmsg_x = self._private(library, "recvmsg_x")
        self.sendmsg_x = self._private(library, "sendmsg_x")
        self.recvfrom = library.recvfrom
        self.recvfrom.argtypes = (number, pointer, size, number, pointer, pointer)
        self.recvfrom.restype = ctypes.c_ssize_t
        self.sendto = library.sendto
        self.sendto.argtypes = (number, ctypes.c_char_p, size, number, ctypes.c_char_p, unsigned)
        self.sendto.restype = ctypes.c_ssize_t
        self.readv, self.writev = _readv, _writev
        self.get_errno = ctypes.get_errno

    @staticmethod
    def _private(library: ctypes.CDLL, name: str) -> MsgX | None:
        if not Libsystem.usable():
            return None
        try:
            function = getattr(library, name)
        except AttributeError:
            return None
        function.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int)
        function.restype = ctypes.c_ssize_t
        return function  # type: ignore[no-any-return]

    @staticmethod
    def usable() -> bool:
        """64-bit little-endian macOS: the layouts are no others. iOS has the calls too and takes the plain path.

        RNSFAST_OSIO=portable asks for the plain path, also where a device can be opened in no other way.
        """
        return (
            system.platform == "darwin"
            and system.byteorder == "little"
            and ctypes.sizeof(ctypes.c_void_p) == ctypes.sizeof(ctypes.c_size_t) == 8
            and not _is_portable()
        )


def _is_portable() -> bool:
    return os.environ.get("RNSFAST_OSIO") == "portable"


def _readv(fd: int, buffers: Sequence[Any], /) -> int:
    return os.readv(fd, buffers)


def _writev(fd: int, buffers: Sequence[Any], /) -> int:
    return os.writev(fd, buffers)


class Headers:
    """An array of `msghdr_x` with its iovecs, and room for an address each if wanted.

    Kept together, since the kernel is given addresses: a part that is collected is memory that it writes into.

    Args:
        size: datagrams.
        pieces: iovecs a datagram, the same for all: the kernel gets it wrong when they differ.
        names: whether there is room for addresses.
    """

    __slots__ = ("_fresh", "_keep", "address", "halves", "iovecs", "names", "size", "used", "words")

    def __init__(self, size: int, pieces: int, names: bool) -> None:
        headers = (ctypes.c_uint64 * (STEP * size))()
        iovecs = (ctypes.c_uint64 * (IOVEC * pieces * size))()
        room = (ctypes.c_char * (NAME_ROOM * size))()
        self._keep = (headers, iovecs, room)
        self.size, self.used = size, 0  # `used`: leading headers that a call may have changed
        self.address = ctypes.addressof(headers)
        self.words = memoryview(headers).cast("B").cast("Q")
        self.halves = memoryview(headers).cast("B").cast("I")
        self.iovecs = memoryview(iovecs).cast("B").cast("Q")
        self.names = memoryview(room).cast("B")
        for i in range(size):
            if names:
                self.words[STEP * i + W_NAME] = ctypes.addressof(room) + NAME_ROOM * i
                self.halves[2 * STEP * i + H_NAMELEN] = NAME
            self.words[STEP * i + W_IOV] = ctypes.addressof(iovecs) + 8 * IOVEC * pieces * i
            self.halves[2 * STEP * i + H_IOVLEN] = pieces
        self._fresh = memoryview(bytes(headers)).cast("Q")

    def restore(self) -> None:
        """Every field of what was used as it was at first; the others were not touched."""
        self.words[: STEP * self.used] = self._fresh[: STEP * self.used]

    def sizes(self, count: int) -> list[int]:
        return self.words[W_DATALEN : STEP * count : STEP].tolist()

    def flags(self, count: int) -> list[int]:
        return self.halves[H_FLAGS : 2 * STEP * count : 2 * STEP].tolist()

    def name_sizes(self, count: int) -> list[int]:
        return self.halves[H_NAMELEN : 2 * STEP * count : 2 * STEP].tolist()


class MsgxIO(PacketIO):
    """What a datagram socket and a utun device have in common.

    A subclass says how packets stand in a datagram (`_aim`, `_load`, `_sort_in`) and what the plain path is
    (`_take_plainly`, `_write`).

    Args:
        caps: what the back end found out about itself.
        family: the address family of peers; None if packets carry none.
        connected: whether several packets may go out in one call.
        pieces: iovecs a packet.
        names: whether received packets come with addresses.
        sys: the system calls.
    """

    #: Calls given up for good, and why.
    fallbacks: dict[str, str]

    def __init__(
        self, caps: Caps, family: int | None, *, connected: bool, pieces: int, names: bool, sys: DarwinSys
    ) -> None:
        super().__init__(caps, family)
        self._sys, self._connected = sys, connected
        self._pieces, self._names = pieces, names
        self._recvmsg_x, self._sendmsg_x = sys.recvmsg_x, sys.sendmsg_x  # None: not there, or never again
        self.fallbacks = {}
        self._tx = Headers(caps.max_tx, pieces, names=False)
        self._rx: Headers | None = None  # made for the first batch
        self._rx_for: RxBatch | None = None
        self._batched = False  # whether the last submission was a sendmsg_x
        reason = "RNSFAST_OSIO=portable" if _is_portable() else "it is missing"
        if self._recvmsg_x is None:
            self._give_up("recvmsg_x", reason)
        if connected and self._sendmsg_x is None:
            self._give_up("sendmsg_x", reason)

    def _give_up(self, name: str, reason: str) -> None:
        """Never make a private call again; one line in the log for all objects."""
        self.fallbacks[name] = reason
        log_once(name, "%s is not used any more (%s): packets go one by one", name, reason)
        if name == "sendmsg_x":
            self._sendmsg_x = None
        else:
            self._recvmsg_x = None
            self.caps = replace(self.caps, backend="portable")

    # What a subclass supplies

    def _aim(self, headers: Headers, into: RxBatch) -> None:
        """Point the iovecs at the slots of `into`."""
        raise NotImplementedError

    def _room(self, into: RxBatch) -> int:
        """Bytes of the largest datagram that fits."""
        raise NotImplementedError

    def _sort_in(self, into: RxBatch, headers: Headers, sizes: list[int]) -> bool:
        """Hand over the datagrams, or say that no kernel fills headers like this."""
        raise NotImplementedError

    def _load(self, headers: Headers, items: Sequence[bytes]) -> object:
        """Point the iovecs at `items` and fill in the lengths. What is returned is kept until the call is over."""
        raise NotImplementedError

    def _take_plainly(self, into: RxBatch) -> int:
        """As `_take`, one packet a call."""
        raise NotImplementedError

    def _write(self, item: bytes, peer: Peer | None) -> int:
        """As `_submit_one`."""
        raise NotImplementedError

    # Receiving

    def make_batch(self) -> RxBatch:
        return RxBatch(self.caps.max_rx, self.caps.max_packet + 1)  # truncation is not flagged: a full slot is cut

    def _headers_for(self, into: RxBatch) -> Headers:
        """Headers whose iovecs point at the slots of `into`; usually they do already."""
        headers = self._rx
        if headers is None or self._rx_for is not into:
            headers = Headers(min(into.slots, into.capacity, self.caps.max_rx, KERNEL_CLAMP), self._pieces, self._names)
            self._aim(headers, into)
            self._rx, self._rx_for = headers, into
        return headers

    def _take(self, into: RxBatch) -> int:
        recvmsg_x = self._recvmsg_x
        if recvmsg_x is None:
            return self._take_plainly(into)
        headers = self._headers_for(into)
        limit = headers.size
        headers.restore()
        headers.used = limit  # until it is known better, also if the call raises
        self.stats.rx_calls += 1
        count = recvmsg_x(self._number(), headers.address, limit, MSG_DONTWAIT)
        if count < 0:
            error = self._sys.get_errno()
            if error in _UNTOUCHED:
                headers.used = 0
            if error in _RX_REFUSED:
                self._give_up("recvmsg_x", describe(error))
                return self._take_plainly(into)
            return error
        headers.used = min(count, limit)
        if not count:
            return errno.EAGAIN
        sizes = headers.sizes(min(count, limit))
        if count > limit or max(sizes) > self._room(into) or not self._sort_in(into, headers, sizes):
            into.clear()
            into.dropped = min(count, limit)  # nothing in it can be trusted
            self._give_up("recvmsg_x", "it gave an impossible answer")
        return 0

    # Sending

    def _all_valid(self, items: Sequence[bytes]) -> bool:
        sizes = list(map(len, items))
        return min(sizes) > 0 and max(sizes) <= self.caps.max_packet

    def _submit(self, items: Sequence[bytes], peers: Peers, first: int, stop: int) -> tuple[int, int]:
        sendmsg_x = self._sendmsg_x
        if sendmsg_x is None or not self._connected or peers is not None:
            return self._submit_plainly(items, peers, first, stop)
        chunk = list(items[first:stop])
        count = len(chunk)
        headers = self._tx
        headers.restore()
        headers.used = count
        keep = self._load(headers, chunk)
        self._batched = True
        taken = sendmsg_x(self._number(), headers.address, count, MSG_DONTWAIT)
        error = self._sys.get_errno() if taken < 0 else 0
        del keep
        if taken > count:
            self._give_up("sendmsg_x", "it gave an impossible answer")
            return 0, errno.EPROTO  # which is not in the table, so nothing of this is offered again
        if error == errno.EMSGSIZE:  # it is the first: alone by the plain call, which says the same or takes it
            self.stats.tx_calls += 1
            error = self._submit_one(chunk[0], None)
            return 0 if error else 1, error
        return max(taken, 0), error

    def _submit_one(self, item: bytes, peer: Peer | None) -> int:
        self._batched = False
        return self._write(item, peer)

    def _submit_plainly(self, items: Sequence[bytes], peers: Peers, first: int, stop: int) -> tuple[int, int]:
        one = peers is None or isinstance(peers, Peer)
        for at in range(first, stop):
            error = self._submit_one(items[at], peers if one else peers[at])  # type: ignore[arg-type, index]
            if error:
                return at - first, error
        return stop - first, 0

    def _judge(self, error: int, items: Sequence[bytes], at: int) -> tuple[Verdict, int]:
        if not self._batched:
            return SEND.get(error, Verdict.REJECT), 1
        if error in REFUSED:
            self._give_up("sendmsg_x", describe(error))
            return Verdict.AGAIN, 1
        return SENDMSG_X.get(error, Verdict.UNKNOWN), 1
