"""recvmmsg, sendmmsg and sendto by script, read from the raw pointers they are given."""

from __future__ import annotations

import ctypes
import struct
from collections import deque
from dataclasses import dataclass, field

from rnsfast.osio.runs import SOL_UDP, UDP_GRO, UDP_SEGMENT

DONTWAIT, TRUNC, CTRUNC = 0x40, 0x20, 0x8


@dataclass
class Sent:
    """What one call offered: entries as (bytes, name, segment size or 0)."""

    call: str
    entries: list[tuple[bytes, bytes, int]]
    taken: int = 0


@dataclass
class Arrived:
    """One entry that recvmmsg fills in."""

    data: bytes
    name: bytes = b"\x02\x00\x10\x92\x7f\x00\x00\x01" + bytes(8)
    flags: int = 0
    control: bytes = b""
    length: int | None = None  # what the kernel claims, if not the data's
    namelen: int | None = None
    controllen: int | None = None


@dataclass
class FakeSys:
    """A call beyond its script fails the test. A send step is a count of entries, None for all, or a negative errno."""

    sends: deque[int | None] = field(default_factory=deque)
    singles: deque[int | None] = field(default_factory=deque)  # of sendto: None for well, or a negative errno
    receives: deque[list[Arrived] | int] = field(default_factory=deque)
    log: list[Sent] = field(default_factory=list)
    received: list[tuple[int, int]] = field(default_factory=list)  # (entries asked for, namelen of the first)
    vector: int = 0
    error: int = 0

    @property
    def wire(self) -> list[bytes]:
        """Every datagram that left, cut as the kernel cuts."""
        found: list[bytes] = []
        for sent in self.log:
            for data, _, size in sent.entries[: sent.taken]:
                found += [data[at : at + size] for at in range(0, len(data), size)] if size else [data]
        return found

    def _entry(self, address: int) -> tuple[bytes, bytes, int]:
        words = (ctypes.c_uint64 * 8).from_address(address)
        name, namelen, iov, iovlen, control, controllen = words[0], words[1] & 0xFFFFFFFF, *words[2:6]
        data = b""
        for i in range(iovlen):
            base, size = (ctypes.c_uint64 * 2).from_address(iov + 16 * i)
            data += ctypes.string_at(base, size)
        segment = 0
        if control:
            raw = ctypes.string_at(control, controllen)
            length, level, kind = struct.unpack_from("=Qii", raw)
            assert (length, level, kind) == (18, SOL_UDP, UDP_SEGMENT)
            (segment,) = struct.unpack_from("=H", raw, 16)
        else:
            assert not controllen
        return data, ctypes.string_at(name, namelen) if name else b"", segment

    def sendmmsg(self, fd: int, vector: int, count: int, flags: int, /) -> int:
        assert flags & DONTWAIT and self.sends, "sendmmsg beyond the script"
        sent = Sent("sendmmsg", [self._entry(vector + 64 * i) for i in range(count)])
        self.log.append(sent)
        step = self.sends.popleft()
        if step is not None and step < 0:
            self.error = -step
            return -1
        sent.taken = count if step is None else min(step, count)
        return sent.taken

    def sendto(self, fd: int, data: bytes, size: int, flags: int, name: bytes | None, length: int, /) -> int:
        assert flags & DONTWAIT and self.singles, "sendto beyond the script"
        sent = Sent("sendto", [(data[:size], (name or b"")[:length], 0)])
        self.log.append(sent)
        step = self.singles.popleft()
        if step is not None:
            self.error = -step
            return -1
        sent.taken = 1
        return size

    def recvmmsg(self, fd: int, vector: int, count: int, flags: int, timeout: None, /) -> int:
        assert flags & DONTWAIT and self.receives, "recvmmsg beyond the script"
        self.vector = vector
        first = (ctypes.c_uint64 * 8).from_address(vector)
        self.received.append((count, first[1] & 0xFFFFFFFF))
        step = self.receives.popleft()
        if isinstance(step, int):
            self.error = -step
            return -1
        for i, entry in enumerate(step[:count]):
            words = (ctypes.c_uint64 * 8).from_address(vector + 64 * i)
            base, room = (ctypes.c_uint64 * 2).from_address(words[2])
            data = entry.data[:room]
            ctypes.memmove(base, data, len(data))
            ctypes.memmove(words[0], entry.name, min(len(entry.name), words[1] & 0xFFFFFFFF))
            words[1] = len(entry.name) if entry.namelen is None else entry.namelen
            flags = entry.flags
            if words[4]:
                fits = len(entry.control) <= words[5]
                ctypes.memmove(words[4], entry.control, min(len(entry.control), words[5]))
                words[5] = len(entry.control) if fits and entry.controllen is None else entry.controllen or 0
                flags |= 0 if fits else CTRUNC
            words[6] = flags | (TRUNC if len(entry.data) > room else 0)
            words[7] = len(data) if entry.length is None else entry.length
        return len(step)

    def get_errno(self) -> int:
        return self.error


def gro(size: int) -> bytes:
    """The control message that says how large each datagram is."""
    return struct.pack("=Qiii4x", 20, SOL_UDP, UDP_GRO, size)
