"""Two stand-ins for macOS: scripted calls, and a kernel that moves real datagrams.  Protocol 09, 14.2 and 14.3.

Both read and write the memory they are given the addresses of, by offsets written down here once more: a wrong layout,
pointer or length in the product does not agree with them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

MSGHDR_X = struct.Struct("<QI4xQi4xQIiQ")  # name, namelen, iov, iovlen, control, controllen, flags, datalen
IOVEC = struct.Struct("<QQ")
DONTWAIT = 0x80
assert MSGHDR_X.size == 56

NAMELEN_AT, FLAGS_AT, DATALEN_AT = 8, 44, 48
BOUND = 4096  # bytes: no length the tests use is larger, so a wrong one is found instead of followed


@dataclass
class Header:
    """One `msghdr_x` as it stands in memory."""

    address: int
    name: int = 0
    namelen: int = 0
    iov: int = 0
    iovlen: int = 0
    control: int = 0
    controllen: int = 0
    flags: int = 0
    datalen: int = 0
    pieces: list[tuple[int, int]] = field(default_factory=list)

    def data(self) -> bytes:
        return b"".join(ctypes.string_at(base, size) for base, size in self.pieces)

    def scatter(self, data: bytes) -> int:
        """Write as much as fits, as the kernel does; how much that was."""
        done = 0
        for base, size in self.pieces:
            part = data[done : done + size]
            ctypes.memmove(base, part, len(part))
            done += len(part)
        return done

    def put(self, at: int, form: str, value: int) -> None:
        raw = struct.pack(form, value)
        ctypes.memmove(self.address + at, raw, len(raw))


def headers_at(address: int, count: int) -> list[Header]:
    found = []
    for i in range(count):
        at = address + MSGHDR_X.size * i
        header = Header(at, *MSGHDR_X.unpack(ctypes.string_at(at, MSGHDR_X.size)))
        assert 1 <= header.iovlen <= 2, f"header {i} has {header.iovlen} iovecs"
        assert header.iov and header.iov % 8 == 0
        raw = ctypes.string_at(header.iov, IOVEC.size * header.iovlen)
        header.pieces = list(IOVEC.iter_unpack(raw))
        assert all(base and 0 < size <= BOUND for base, size in header.pieces), header.pieces
        found.append(header)
    return found


def check_receive(headers: Sequence[Header]) -> None:
    """What every header of a recvmsg_x has to look like."""
    assert len({header.iovlen for header in headers}) == 1, "the vector lengths differ"
    for header in headers:
        assert (header.control, header.controllen, header.flags, header.datalen) == (0, 0, 0, 0), header
        assert (header.name != 0) == (header.namelen == 28), header
    memory = [piece for header in headers for piece in header.pieces]
    memory += [(header.name, header.namelen) for header in headers if header.name]
    memory.sort()
    for (base, size), (after, _) in pairwise(memory):
        assert base + size <= after, "two pieces of memory overlap"


def check_send(headers: Sequence[Header]) -> None:
    """What every header of a sendmsg_x has to look like."""
    for header in headers:
        assert (header.name, header.namelen, header.control, header.controllen, header.flags) == (0, 0, 0, 0, 0), header
        assert header.datalen == sum(size for _, size in header.pieces), header


# -- calls that follow a script -----------------------------------------------------------------------------------


@dataclass
class Entry:
    """What a scripted recvmsg_x puts into one header. `name` None: as an unnamed sender."""

    data: bytes = b""
    name: bytes | None = None
    namelen: int | None = None
    datalen: int | None = None
    flags: int = 0


@dataclass
class Fill:
    """A recvmsg_x that returns `count` datagrams, as many as there are entries if None."""

    entries: list[Entry]
    count: int | None = None


@dataclass
class Fail:
    errno: int


ALL = -1  # as a step of a send: everything that is offered
Step = int | Fail | Fill | Callable[[], Any]


class Scripted:
    """System calls that follow a script; a call beyond it fails the test.

    A step is a number to return (ALL: all), a Fail, a Fill, an Entry for the plain receive, or something to call whose
    result is the step. `wire` has what the sends took, in order, decoded from memory.

    Args:
        locks: called at every call; what it returns is recorded.
        missing: private calls that do not exist.
    """

    def __init__(self, *, missing: Sequence[str] = (), **steps: Sequence[Any]) -> None:
        self.steps = {name: deque(script) for name, script in steps.items()}
        self.calls: list[str] = []
        self.counts: list[int] = []  # packets offered, or headers given, one a call
        self.flags: list[int] = []
        self.offered: list[list[bytes]] = []  # what each send was given
        self.wire: list[bytes] = []
        self.locked: list[bool] = []
        self.lock_of: Callable[[str], bool] = lambda name: True
        self.errno = 0
        self.recvmsg_x = None if "recvmsg_x" in missing else self._recvmsg_x
        self.sendmsg_x = None if "sendmsg_x" in missing else self._sendmsg_x

    def _next(self, name: str, count: int, flags: int) -> Any:
        self.calls.append(name)
        self.counts.append(count)
        self.flags.append(flags)
        self.locked.append(self.lock_of(name))
        assert self.steps.get(name), f"{name} beyond the script"
        step = self.steps[name].popleft()
        if callable(step):
            step = step()
        self.errno = step.errno if isinstance(step, Fail) else 0
        return step

    def done(self) -> bool:
        return not any(self.steps.values())

    def get_errno(self) -> int:
        return self.errno

    def _recvmsg_x(self, fd: int, address: int, count: int, flags: int) -> int:
        headers = headers_at(address, count)
        check_receive(headers)
        step = self._next("recvmsg_x", count, flags)
        if isinstance(step, Fail):
            return -1
        if isinstance(step, int):
            return step
        for header, entry in zip(headers, step.entries, strict=False):
            done = header.scatter(entry.data)
            header.put(DATALEN_AT, "<Q", done if entry.datalen is None else entry.datalen)
            if entry.name is not None:
                ctypes.memmove(header.name, entry.name, min(len(entry.name), 28))
            size = len(entry.name or b"")
            header.put(NAMELEN_AT, "<I", size if entry.namelen is None else entry.namelen)
            header.put(FLAGS_AT, "<i", entry.flags)
        return len(step.entries) if step.count is None else step.count

    def _sendmsg_x(self, fd: int, address: int, count: int, flags: int) -> int:
        headers = headers_at(address, count)
        check_send(headers)
        packets = [header.data() for header in headers]
        self.offered.append(packets)
        step = self._next("sendmsg_x", count, flags)
        if isinstance(step, Fail):
            return -1
        taken = count if step == ALL else int(step)
        self.wire += packets[:taken]
        return taken

    def _one(self, name: str, packet: bytes, flags: int) -> int:
        self.offered.append([packet])
        step = self._next(name, 1, flags)
        if isinstance(step, Fail):
            return -1
        self.wire.append(packet)
        return len(packet)

    def sendto(self, fd: int, data: bytes, size: int, flags: int, name: bytes | None, length: int) -> int:
        assert size == len(data) and length == (0 if name is None else len(name))
        return self._one("sendto", data, flags)

    def writev(self, fd: int, buffers: Sequence[Any]) -> int:
        size = self._one("writev", b"".join(map(bytes, buffers)), DONTWAIT)
        if size < 0:
            raise OSError(self.errno, os.strerror(self.errno))
        return size

    def recvfrom(self, fd: int, buffer: int, size: int, flags: int, name: int, length: int) -> int:
        step = self._next("recvfrom", 1, flags)
        if isinstance(step, Fail):
            return -1
        ctypes.memmove(buffer, step.data, min(size, len(step.data)))
        raw = step.name or b""
        assert struct.unpack("<I", ctypes.string_at(length, 4)) == (28,), "no room for an address"
        ctypes.memmove(name, raw, len(raw))
        ctypes.memmove(length, struct.pack("<I", len(raw)), 4)
        return min(size, len(step.data))

    def readv(self, fd: int, buffers: Sequence[Any]) -> int:
        step = self._next("readv", 1, DONTWAIT)
        if isinstance(step, Fail):
            raise OSError(step.errno, os.strerror(step.errno))
        return _spread(step.data, buffers)


def _spread(data: bytes, buffers: Sequence[Any]) -> int:
    done = 0
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        part = data[done : done + len(view)]
        view[: len(part)] = part
        done += len(part)
    return done


REFUSALS = [errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP]
EMPTY = Fail(errno.EAGAIN)
Make = Callable[..., Any]  # a maker of `darwin_makers`


def packets(count: int, size: int = 40) -> list[bytes]:
    """Packets that differ, of different sizes."""
    return [bytes([65 + i % 26]) * (size + i % 7) + struct.pack(">H", i) for i in range(count)]


def lines(caplog: pytest.LogCaptureFixture, name: str) -> list[str]:
    """What the log says about a call."""
    return [record.getMessage() for record in caplog.records if name in record.getMessage()]


# -- a kernel ---------------------------------------------------------------------------------------------------------


class Kernel:
    """`recvmsg_x` and `sendmsg_x` by real datagrams over the sockets of this system, by the rules of protocol 09, 6.1.

    Addresses are turned into those of macOS and back. Errors after the first datagram are hidden, MSG_TRUNC is never
    reported, a packet above `limit` is too large for the send buffer.

    Args:
        limit: bytes a datagram may have; None for whatever the sockets take.
    """

    CLAMP = 256

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.calls: list[str] = []
        self.counts: list[int] = []
        self.flags: list[int] = []
        self.errno = 0
        self.recvmsg_x: Callable[[int, int, int, int], int] | None = self._recvmsg_x
        self.sendmsg_x: Callable[[int, int, int, int], int] | None = self._sendmsg_x

    def get_errno(self) -> int:
        return self.errno

    def _fail(self, error: int) -> int:
        self.errno = error
        return -1

    def _note(self, name: str, count: int, flags: int) -> None:
        self.calls.append(name)
        self.counts.append(count)
        self.flags.append(flags)

    def _recvmsg_x(self, fd: int, address: int, count: int, flags: int) -> int:
        self._note("recvmsg_x", count, flags)
        if flags != DONTWAIT or not 1 <= count <= 1024:
            return self._fail(errno.EINVAL)
        headers = headers_at(address, min(count, self.CLAMP))
        check_receive(headers)
        with _socket(fd) as sock:
            for i, header in enumerate(headers):
                buffers = [(ctypes.c_char * size).from_address(base) for base, size in header.pieces]
                try:
                    size, _, _, sender = sock.recvmsg_into(buffers, 0, socket.MSG_DONTWAIT)
                except OSError as error:
                    return i if i else self._fail(error.errno or errno.EIO)
                raw = darwin_name(sender)
                ctypes.memmove(header.name, raw, len(raw))
                header.put(NAMELEN_AT, "<I", len(raw))
                header.put(DATALEN_AT, "<Q", size)
        return len(headers)

    def _sendmsg_x(self, fd: int, address: int, count: int, flags: int) -> int:
        self._note("sendmsg_x", count, flags)
        if flags not in (0, DONTWAIT) or not 1 <= count <= 1024:
            return self._fail(errno.EINVAL)
        headers = headers_at(address, min(count, self.CLAMP))
        check_send(headers)
        with _socket(fd) as sock:
            sock.getpeername()  # raises where the product should have known better
            for i, header in enumerate(headers):
                data = header.data()
                if self.limit is not None and len(data) > self.limit:
                    return i if i else self._fail(errno.EMSGSIZE)
                try:
                    sock.send(data, socket.MSG_DONTWAIT)
                except OSError as error:
                    return i if i else self._fail(error.errno or errno.EIO)
        return len(headers)

    def sendto(self, fd: int, data: bytes, size: int, flags: int, name: bytes | None, length: int) -> int:
        self._note("sendto", 1, flags)
        assert size == len(data) and length == (0 if name is None else len(name))
        if self.limit is not None and size > self.limit:
            return self._fail(errno.EMSGSIZE)
        with _socket(fd) as sock:
            try:
                if name is None:
                    return sock.send(data, socket.MSG_DONTWAIT)
                return sock.sendto(data, socket.MSG_DONTWAIT, address_of(name))
            except OSError as error:
                return self._fail(error.errno or errno.EIO)

    def recvfrom(self, fd: int, buffer: int, size: int, flags: int, name: int, length: int) -> int:
        self._note("recvfrom", 1, flags)
        room = (ctypes.c_char * size).from_address(buffer)
        with _socket(fd) as sock:
            try:
                got, sender = sock.recvfrom_into(room, size, socket.MSG_DONTWAIT)
            except OSError as error:
                return self._fail(error.errno or errno.EIO)
        raw = darwin_name(sender)
        ctypes.memmove(name, raw, len(raw))
        ctypes.memmove(length, struct.pack("<I", len(raw)), 4)
        return got

    def readv(self, fd: int, buffers: Sequence[Any]) -> int:
        self._note("readv", 1, DONTWAIT)
        return os.readv(fd, buffers)

    def writev(self, fd: int, buffers: Sequence[Any]) -> int:
        self._note("writev", 1, DONTWAIT)
        if self.limit is not None and sum(map(len, buffers)) > self.limit:
            raise OSError(errno.EMSGSIZE, "too large")
        return os.writev(fd, buffers)


@contextmanager
def _socket(fd: int) -> Iterator[socket.socket]:
    sock = socket.socket(fileno=os.dup(fd))
    try:
        yield sock
    finally:
        sock.close()


def darwin_name(address: Any) -> bytes:
    """An address of the `socket` module as macOS writes it; nothing for senders without one."""
    if not isinstance(address, tuple):
        return b""
    if len(address) == 2:
        return struct.pack(">BBH4s8x", 16, 2, address[1], socket.inet_aton(address[0]))
    host = address[0].partition("%")[0]
    packed = socket.inet_pton(socket.AF_INET6, host)
    return struct.pack(">BBHI16sI", 28, 30, address[1], 0, packed, 0)  # without its zone


def address_of(raw: bytes) -> Any:
    """The reverse, with the checks that macOS makes."""
    size, family, port = struct.unpack_from(">BBH", raw)
    assert size == len(raw)
    if family == 2:
        return socket.inet_ntoa(raw[4:8]), port
    assert family == 30
    return socket.inet_ntop(socket.AF_INET6, raw[8:24]), port, 0, struct.unpack_from("<I", raw, 24)[0]


FIRST, SECOND = darwin_name(("10.0.0.1", 4001)), darwin_name(("10.0.0.2", 4002))
LONG = darwin_name(("fe80::1", 4003, 0, 0))
