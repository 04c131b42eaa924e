"""Stream sockets: few calls, each for many frames.  Protocol 09, sections 4.5 and 7.

Two ways to the system, with the same semantics. `StdlibCalls` uses `socket` and works everywhere. `LinuxCalls` calls
libc with the GIL kept: none of these calls can block, and a call that gives the GIL away may wait 5 ms to get it back
when another thread computes, which costs more than anything else here. Both return a negative errno instead of
raising, since EAGAIN is an everyday answer.

On a stream everything but EINTR and EAGAIN is the end: bytes may be in flight, so nothing is ever sent again.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import sys as system
from collections.abc import Sequence
from typing import Final, Protocol

from rnsfast.osio.contract import Caps, IOBroken, IOClosed, Kind, Peer, RxBatch, Stats, TxResult, TxState
from rnsfast.osio.descriptor import Descriptor, deadline_in

READ_SIZE: Final = 262_144  # bytes; recv costs 276 ns a KiB with 4 KiB buffers, 47 with this (protocol 09, section 7)
TX_FRAMES: Final = 128  # frames a call; the hard limit of the system is 1024
TX_BYTES: Final = 262_144  # bytes a call; 64 KiB is four frames of a TCP link, and every call may cost a GIL hand-off

EAGAIN: Final = frozenset({errno.EAGAIN, errno.EWOULDBLOCK})


class StreamCalls(Protocol):
    """The system calls of one stream socket. Each returns a count or a negative errno and never blocks."""

    backend: str
    join_below: int  # bytes of mean frame size; smaller frames are joined, larger ones gathered

    def recv(self, into: RxBatch) -> int: ...
    def send(self, data: bytes) -> int: ...
    def gather(self, items: list[bytes]) -> int: ...


class StdlibCalls:
    """By the standard library, on every system."""

    backend = "stream-portable"
    join_below = 1024

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sendmsg = getattr(sock, "sendmsg", None)  # absent on Windows

    def recv(self, into: RxBatch) -> int:
        try:
            return self._sock.recv_into(into.room(0))
        except OSError as error:
            return -(error.errno or errno.EIO)

    def send(self, data: bytes) -> int:
        try:
            return self._sock.send(data)
        except OSError as error:
            return -(error.errno or errno.EIO)

    def gather(self, items: list[bytes]) -> int:
        if self._sendmsg is None:
            return self.send(b"".join(items))
        try:
            return int(self._sendmsg(items))
        except OSError as error:
            return -(error.errno or errno.EIO)


class _Libc:
    """recv, send and sendmsg of libc through handles that keep the GIL."""

    def __init__(self) -> None:
        libc = ctypes.PyDLL(None, use_errno=True)
        size, number, pointer = ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
        self.recv = libc.recv
        self.recv.argtypes, self.recv.restype = (number, pointer, size, number), ctypes.c_ssize_t
        self.send = libc.send
        self.send.argtypes, self.send.restype = (number, ctypes.c_char_p, size, number), ctypes.c_ssize_t
        self.sendmsg = libc.sendmsg
        self.sendmsg.argtypes, self.sendmsg.restype = (number, pointer, number), ctypes.c_ssize_t


class LinuxCalls:
    """By libc with the GIL kept; 64-bit little-endian Linux only (layouts of protocol 09, section 5.1)."""

    backend = "stream-linux"
    join_below = 8192  # filling the vector costs as much as copying 8 KiB
    _libc: _Libc | None = None  # function handles, made once; immutable

    def __init__(self, sock: socket.socket) -> None:
        cls = type(self)
        if cls._libc is None:
            cls._libc = _Libc()
        libc = cls._libc
        self._recv, self._send, self._sendmsg = libc.recv, libc.send, libc.sendmsg
        self._fd = sock.fileno()
        self._get_errno = ctypes.get_errno
        # Made at the first gather: msghdr is seven 64-bit words (iov in word 2, iovlen in word 3), an iovec two.
        self._header: ctypes.Array[ctypes.c_uint64] | None = None
        self._words: memoryview | None = None

    @staticmethod
    def usable() -> bool:
        return (
            system.platform == "linux"
            and system.byteorder == "little"
            and ctypes.sizeof(ctypes.c_void_p) == ctypes.sizeof(ctypes.c_size_t) == 8
        )

    def recv(self, into: RxBatch) -> int:
        count = int(self._recv(self._fd, into.address, into.slot, _DONTWAIT))
        return count if count >= 0 else -self._get_errno()

    def send(self, data: bytes) -> int:
        count = int(self._send(self._fd, data, len(data), _DONTWAIT | _NOSIGNAL))
        return count if count >= 0 else -self._get_errno()

    def gather(self, items: list[bytes]) -> int:
        if self._words is None:
            vectors = (ctypes.c_uint64 * (2 * TX_FRAMES))()
            self._words = memoryview(vectors).cast("B").cast("Q")
            self._header = (ctypes.c_uint64 * 7)(0, 0, ctypes.addressof(vectors), 0, 0, 0, 0)
        header, words, count = self._header, self._words, len(items)
        assert header is not None
        pointers = (ctypes.c_char_p * count)(*items)  # keeps `items` alive until the call is over
        words[0 : 2 * count : 2] = memoryview(pointers).cast("B").cast("Q")
        words[1 : 2 * count : 2] = memoryview((ctypes.c_uint64 * count)(*map(len, items))).cast("B").cast("Q")
        header[3] = count
        taken = int(self._sendmsg(self._fd, ctypes.addressof(header), _DONTWAIT | _NOSIGNAL))
        return taken if taken >= 0 else -self._get_errno()


_DONTWAIT: Final = 0x40  # MSG_DONTWAIT of Linux
_NOSIGNAL: Final = 0x4000  # MSG_NOSIGNAL of Linux: EPIPE as an answer, whatever the program did to SIGPIPE


def choose_calls(sock: socket.socket) -> StreamCalls:
    """The best calls for this system; RNSFAST_OSIO=portable or =linux forces one, for diagnosis and tests."""
    wanted = os.environ.get("RNSFAST_OSIO", "")
    if wanted == "linux" and not LinuxCalls.usable():
        raise OSError(errno.ENOSYS, "RNSFAST_OSIO=linux, but this is not 64-bit Linux")
    if wanted == "linux" or (wanted != "portable" and LinuxCalls.usable()):
        return LinuxCalls(sock)
    return StdlibCalls(sock)


class StreamIO(Descriptor):
    """One connected stream socket; takes it over. See `contract.BatchIO`."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        calls: StreamCalls | None = None,
        max_batch: int = TX_FRAMES,
        max_bytes: int = TX_BYTES,
    ) -> None:
        if not 1 <= max_batch <= TX_FRAMES:
            raise ValueError(f"max_batch {max_batch} is not within 1..{TX_FRAMES}")
        super().__init__()
        sock.setblocking(False)
        self._sock = sock
        self._calls = calls if calls is not None else choose_calls(sock)
        self.caps = Caps(Kind.STREAM, self._calls.backend, 1, max_batch, max_bytes, False, 1, True)
        self.stats = Stats()

    def make_batch(self) -> RxBatch:
        return RxBatch(1, READ_SIZE)

    # Receiving

    def recv(self, into: RxBatch, timeout: float | None = 0.0) -> int:
        count = self._recv_now(into)
        if count or timeout == 0.0:
            return count
        deadline = deadline_in(timeout)
        while self._wait_readable(deadline):
            if count := self._recv_now(into):
                return count
        return 0

    def _recv_now(self, into: RxBatch) -> int:
        with self._rx_lock:
            if self._closing:
                raise IOClosed
            stats = self.stats
            stats.rx_calls += 1
            count = self._calls.recv(into)
            while count == -errno.EINTR:
                count = self._calls.recv(into)
        if count > 0:
            stats.rx_bytes += count
            into.fill((count,))
            return 1
        into.fill(())
        if count == 0:
            raise IOClosed(eof=not self._is_closing())
        if -count in EAGAIN:
            return 0
        if self._is_closing():
            raise IOClosed
        raise IOBroken(-count, os.strerror(-count))

    # Sending

    def send_one(self, item: bytes, peer: Peer | None = None) -> TxResult:
        with self._tx_lock:
            if self._closing:
                return TxResult(0, 0, (), 0, TxState.CLOSED)
            stats = self.stats
            stats.tx_calls += 1
            count = self._calls.send(item)
            while count == -errno.EINTR:
                count = self._calls.send(item)
            if count == len(item):
                stats.tx_bytes += count
                return TxResult(1, 1, (), 0, TxState.DONE)
            if count > 0:
                stats.tx_bytes += count
                stats.tx_short += 1
                return TxResult(0, 0, (), count, TxState.BLOCKED)
            return self._refused(count, 0, 0, 0)

    def send(
        self, items: Sequence[bytes], peers: Sequence[Peer] | Peer | None = None, start: int = 0, offset: int = 0
    ) -> TxResult:
        calls, stats, end, first = self._calls, self.stats, len(items), start
        max_frames, max_bytes, join_below = self.caps.max_tx, self.caps.max_packet, calls.join_below
        with self._tx_lock:
            while start < end:
                if self._closing:
                    return TxResult(start, start - first, (), offset, TxState.CLOSED)
                # The leading frames that fit into one call, at least one.
                limit = min(end, start + max_frames)
                stop, size = start + 1, len(items[start]) - offset
                while stop < limit and (more := size + len(items[stop])) <= max_bytes:
                    size = more
                    stop += 1
                chunk = list(items[start:stop])
                if offset:
                    chunk[0] = chunk[0][offset:]
                stats.tx_calls += 1
                while True:
                    if stop - start == 1:
                        count = calls.send(chunk[0])
                    elif size < join_below * (stop - start):
                        count = calls.send(b"".join(chunk))
                    else:
                        count = calls.gather(chunk)
                    if count != -errno.EINTR:
                        break
                if count == size:
                    stats.tx_bytes += size
                    start, offset = stop, 0
                    continue
                if count <= 0:
                    return self._refused(count, start, start - first, offset)
                # A short count says that the socket is full: no further call is needed to learn it.
                stats.tx_bytes += count
                stats.tx_short += 1
                count += offset
                while count >= len(items[start]):
                    count -= len(items[start])
                    start += 1
                return TxResult(start, start - first, (), count, TxState.BLOCKED)
        return TxResult(end, end - first, (), 0, TxState.DONE)

    def _refused(self, count: int, taken: int, sent: int, offset: int) -> TxResult:
        """Nothing was accepted; `count` is a negative errno, or 0 for a call that neither sent nor said why not."""
        if -count in EAGAIN:
            self.stats.tx_blocked += 1
            return TxResult(taken, sent, (), offset, TxState.BLOCKED)
        if self._closing:
            return TxResult(taken, sent, (), offset, TxState.CLOSED)
        return TxResult(taken, sent, (), offset, TxState.UNKNOWN, -count or errno.EIO)

    # Closing

    def _number(self) -> int:
        return self._sock.fileno()

    def _shut(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def _release(self) -> None:
        self._drain()
        self._sock.close()

    def _drain(self) -> None:
        """Throw away what has arrived: closing with unread bytes resets the connection, and what we sent is lost."""
        waste = bytearray(65_536)
        with contextlib.suppress(OSError):
            for _ in range(64):
                if not self._sock.recv_into(waste):
                    break
