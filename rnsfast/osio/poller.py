"""Waiting for many descriptors at once, with changes and wake-ups from any thread.  Level-triggered everywhere.

`EpollPoller` on Linux, `SelectorPoller` (kqueue, poll or select) elsewhere or with RNSFAST_OSIO=portable.

A descriptor number is reused within microseconds after a close. So every registration gets a serial number, and an
event is dropped if its registration is younger than the wait that found it: if it is real, the next wait reports it
again. An event may still be late by the time it is handled, so a handler takes "ready" as a hint and uses calls that
do not block. Unwatch a descriptor before closing it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import select
import selectors
import socket
import struct
import sys
import threading
from typing import Final, Protocol

READ: Final = 1
WRITE: Final = 2


class Poller(Protocol):
    """All methods but `wait` may be called from any thread; `wait` has one caller."""

    def watch(self, fd: int, events: int) -> None:
        """Begin to watch `fd` for READ | WRITE; 0 keeps it registered without watching anything."""

    def rewatch(self, fd: int, events: int) -> None:
        """Watch `fd` for other events from now on. Does nothing if it is not watched."""

    def unwatch(self, fd: int) -> None:
        """Forget `fd`. Does nothing if it is not watched."""

    def wait(self, timeout: float | None) -> list[tuple[int, int]]:
        """Wait up to `timeout` seconds (None: for ever) and return (fd, events) of what is ready; [] after `wake()`."""

    def wake(self) -> None:
        """Make the current or the next `wait` return at once. Many wakes before a wait are one."""

    def close(self) -> None:
        """Idempotent; not while another thread is in `wait`."""


def open_poller() -> EpollPoller | SelectorPoller:
    """The best poller for this system; RNSFAST_OSIO=portable forces the portable one."""
    if sys.platform == "linux" and os.environ.get("RNSFAST_OSIO") != "portable":
        return EpollPoller()
    return SelectorPoller()


class _Bell:
    """A descriptor that becomes readable when it is rung: eventfd, or a socket pair where there is none."""

    def __init__(self) -> None:
        self._pair: tuple[socket.socket, socket.socket] | None = None
        if hasattr(os, "eventfd"):
            self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            self._pair = socket.socketpair()
            for end in self._pair:
                end.setblocking(False)
            self.fd = self._pair[0].fileno()

    def ring(self) -> None:
        with contextlib.suppress(OSError):  # full is as good as rung; closed means nobody waits any more
            if self._pair is None:
                os.eventfd_write(self.fd, 1)
            else:
                self._pair[1].send(b"w")

    def hush(self) -> None:
        with contextlib.suppress(OSError):
            if self._pair is None:
                os.eventfd_read(self.fd)
            else:
                self._pair[0].recv(4096)

    def close(self) -> None:
        if self._pair is None:
            os.close(self.fd)
        else:
            for end in self._pair:
                end.close()


class _Base:
    """The parts both pollers share: the table of registrations and the wake-up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._table: dict[int, tuple[int, int]] = {}  # fd -> (events, serial)
        self._serial = 0
        self._waiting = False
        self._woken = False
        self._closed = False
        self._bell = _Bell()

    def wake(self) -> None:
        with self._lock:
            if self._woken or self._closed:
                return
            self._woken = True
            if self._waiting:  # otherwise the flag is enough: the next wait does not wait
                self._bell.ring()

    def _begin(self, timeout: float | None) -> float | None:
        """Call with the lock held. The timeout to use."""
        self._waiting = True
        return 0.0 if self._woken else timeout

    def _end(self, ready: list[tuple[int, int]], mark: int) -> list[tuple[int, int]]:
        """Sort out what the system reported: the bell, stale descriptors, and events nobody asked for."""
        bell, found = self._bell.fd, []
        with self._lock:
            self._waiting = self._woken = False
            table = self._table
            for fd, events in ready:
                if fd == bell:
                    self._bell.hush()
                    continue
                entry = table.get(fd)
                if entry is None or entry[1] > mark:
                    continue  # gone, or younger than this wait
                wanted = entry[0]
                # An error or hang-up comes as both; it is handed to whatever is being waited for.
                if events & wanted:
                    found.append((fd, events & wanted))
        return found


class _Glance:
    """What is ready right now, by epoll_wait with the GIL kept.

    A call that gives the GIL away may wait 5 ms to get it back when another thread computes; a busy reactor would pay
    that on every turn although something is always ready.
    """

    def __init__(self, fd: int) -> None:
        libc = ctypes.PyDLL(None, use_errno=True)
        self._call = libc.epoll_wait
        self._call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
        # struct epoll_event is packed on x86-64 only; the descriptor is the low half of its data.
        self._layout = struct.Struct("=Ii4x" if platform.machine() in ("x86_64", "AMD64") else "=I4xi4x")
        self._fd = fd
        self._buffer = ctypes.create_string_buffer(self._layout.size * self.EVENTS)
        self._view = memoryview(self._buffer).cast("B")
        self._address = ctypes.addressof(self._buffer)

    EVENTS: Final = 256

    @staticmethod
    def usable() -> bool:
        return sys.byteorder == "little" and ctypes.sizeof(ctypes.c_void_p) == 8

    def look(self) -> list[tuple[int, int]]:
        """(fd, epoll events), at most 256; [] also if the call failed, since a real wait follows."""
        count = self._call(self._fd, self._address, self.EVENTS, 0)
        if count <= 0:
            return []
        return [(fd, mask) for mask, fd in self._layout.iter_unpack(self._view[: count * self._layout.size])]


class EpollPoller(_Base):
    """epoll; changes take effect at once, also while another thread waits."""

    def __init__(self) -> None:
        super().__init__()
        self._epoll = select.epoll()
        self._glance = _Glance(self._epoll.fileno()) if _Glance.usable() else None
        self._epoll.register(self._bell.fd, select.EPOLLIN)

    def watch(self, fd: int, events: int) -> None:
        with self._lock:
            self._serial += 1
            self._table[fd] = (events, self._serial)
            self._arm(fd, events)

    def rewatch(self, fd: int, events: int) -> None:
        with self._lock:
            entry = self._table.get(fd)
            if entry is None or entry[0] == events:
                return
            self._table[fd] = (events, entry[1])
            with contextlib.suppress(OSError):  # closed meanwhile, which its owner will find out
                self._arm(fd, events)

    def _arm(self, fd: int, events: int) -> None:
        mask = (select.EPOLLIN if events & READ else 0) | (select.EPOLLOUT if events & WRITE else 0)
        if not events:  # epoll reports hang-ups even for an empty mask, for ever
            self._forget(fd)
            return
        try:
            self._epoll.modify(fd, mask)
        except FileNotFoundError:
            self._epoll.register(fd, mask)

    def unwatch(self, fd: int) -> None:
        with self._lock:
            if self._table.pop(fd, None) is not None:
                self._forget(fd)

    def _forget(self, fd: int) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed descriptors leave by themselves
            self._epoll.unregister(fd)

    def wait(self, timeout: float | None) -> list[tuple[int, int]]:
        with self._lock:
            mark = self._serial
            limit = self._begin(timeout)
        out, into = select.EPOLLOUT, select.EPOLLIN
        ready = []
        found = self._glance.look() if self._glance is not None else []
        for fd, events in found or self._epoll.poll(limit):
            ready.append((fd, (READ if events & ~out else 0) | (WRITE if events & ~into else 0)))
        return self._end(ready, mark)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._table.clear()
            self._epoll.close()
            self._bell.close()


class SelectorPoller(_Base):
    """`selectors`; changes are noted and applied by the waiting thread, which is rung for it."""

    def __init__(self) -> None:
        super().__init__()
        kinds = ("KqueueSelector", "PollSelector", "SelectSelector")
        kind = next(getattr(selectors, name) for name in kinds if hasattr(selectors, name))
        self._selector: selectors.BaseSelector = kind()
        self._selector.register(self._bell.fd, selectors.EVENT_READ)
        self._dirty: set[int] = set()

    def watch(self, fd: int, events: int) -> None:
        with self._lock:
            self._serial += 1
            self._note(fd, (events, self._serial))

    def rewatch(self, fd: int, events: int) -> None:
        with self._lock:
            entry = self._table.get(fd)
            if entry is not None and entry[0] != events:
                self._note(fd, (events, entry[1]))

    def unwatch(self, fd: int) -> None:
        with self._lock:
            if fd in self._table:
                self._note(fd, None)

    def _note(self, fd: int, entry: tuple[int, int] | None) -> None:
        if self._closed:
            return
        if entry is None:
            del self._table[fd]
        else:
            self._table[fd] = entry
        self._dirty.add(fd)
        if self._waiting and not self._woken:
            self._woken = True
            self._bell.ring()

    def wait(self, timeout: float | None) -> list[tuple[int, int]]:
        with self._lock:
            mark = self._serial
            for fd in self._dirty:
                self._apply(fd)
            self._dirty.clear()
            limit = self._begin(timeout)
        try:
            found = self._selector.select(limit)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            found = []
            self._drop_closed()
        return self._end([(key.fd, mask) for key, mask in found], mark)

    def _apply(self, fd: int) -> None:
        with contextlib.suppress(KeyError, OSError, ValueError):
            self._selector.unregister(fd)
        entry = self._table.get(fd)
        if entry is not None and entry[0]:
            try:
                self._selector.register(fd, entry[0])
            except (OSError, ValueError):
                self._table.pop(fd, None)

    def _drop_closed(self) -> None:
        """select() names no culprit: whatever does not answer fstat was closed while it was watched."""
        with self._lock:
            for fd in list(self._table):
                try:
                    os.fstat(fd)
                except OSError:
                    del self._table[fd]
                    self._apply(fd)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._table.clear()
            self._selector.close()
            self._bell.close()
