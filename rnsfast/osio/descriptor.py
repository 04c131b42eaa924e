"""A descriptor that may be closed while other threads use it.  Protocol 09, section 4.4.

Its number is reused within microseconds after a close, and a call that has the old number then reads somebody else's
packets. So whoever uses the number holds one of two locks meanwhile, which are the lease on it: `close` sets the flag,
wakes who waits, takes both locks, and only then closes.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time

from rnsfast.osio.contract import IOClosed


def deadline_in(timeout: float | None) -> float | None:
    """The moment `timeout` seconds from now; None for no end."""
    return timeout if timeout is None else timeout + time.monotonic()


class Descriptor:
    """The part that all pollable back ends share: locks, waiting, waking, closing."""

    def __init__(self) -> None:
        self._rx_lock, self._tx_lock = threading.Lock(), threading.Lock()
        self._closing = False
        self._close_lock = threading.Lock()
        self._waker: tuple[socket.socket, socket.socket] | None = None  # made by the first wait that needs it
        self._waker_lock = threading.Lock()

    # What a back end says about itself

    def _number(self) -> int:
        """The descriptor itself, whether or not it is being closed."""
        raise NotImplementedError

    def _shut(self) -> None:
        """Wake whoever is blocked in a call, and tell the peer, without giving the number up."""

    def _release(self) -> None:
        """Give the number up. Both locks are held, nobody uses it."""
        raise NotImplementedError

    # For everybody

    def fileno(self) -> int:
        return -1 if self._closing else self._number()

    def _is_closing(self) -> bool:
        """Looks again: another thread may have closed since the last look."""
        return self._closing

    def wait(self, timeout: float | None, read: bool = True, write: bool = False) -> int:
        with self._waker_lock:
            if self._closing:
                return 0
            if self._waker is None:
                self._waker = socket.socketpair()
                for end in self._waker:
                    end.setblocking(False)
            ear = self._waker[0]
        events = (selectors.EVENT_READ if read else 0) | (selectors.EVENT_WRITE if write else 0)
        with self._rx_lock, selectors.DefaultSelector() as selector:
            if self._is_closing():
                return 0
            selector.register(ear, selectors.EVENT_READ)
            selector.register(self._number(), events)
            ready = 0
            for key, mask in selector.select(timeout):
                if key.fileobj is ear:
                    with contextlib.suppress(OSError):
                        ear.recv(64)
                    return 0
                ready = mask
            return ready

    def _wait_readable(self, deadline: float | None) -> bool:
        """Wait until there may be something to read. False at the deadline and when woken; IOClosed when closed."""
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if self.wait(left):
            return True
        if self._closing:
            raise IOClosed
        return False

    def wake(self) -> None:
        with self._waker_lock:
            if self._waker is not None:
                with contextlib.suppress(OSError):
                    self._waker[1].send(b"w")

    def close(self) -> None:
        with self._close_lock:
            if self._closing:
                return
            self._closing = True
            self.wake()
            self._shut()
            with self._rx_lock, self._tx_lock:
                self._release()
            with self._waker_lock:
                for end in self._waker or ():
                    end.close()
                self._waker = None
