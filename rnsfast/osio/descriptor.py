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


class _Bell:
    """Ends the current wait of one waiter, or else its next one. Rung often before it is heard, it counts once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pair: tuple[socket.socket, socket.socket] | None = None  # made by the first wait that needs it
        self._rung = False

    def listen(self) -> socket.socket | None:
        """What becomes readable when the bell rings; None if it has rung."""
        with self._lock:
            if self._pair is None:
                self._pair = socket.socketpair()
                for end in self._pair:
                    end.setblocking(False)
            if self._rung:
                self._hush(self._pair[0])
                return None
            return self._pair[0]

    def hush(self) -> None:
        with self._lock:
            if self._pair is not None:
                self._hush(self._pair[0])

    def _hush(self, ear: socket.socket) -> None:
        self._rung = False
        with contextlib.suppress(OSError):
            ear.recv(64)

    def ring(self) -> None:
        with self._lock:
            if not self._rung:
                self._rung = True
                if self._pair is not None:
                    with contextlib.suppress(OSError):
                        self._pair[1].send(b"w")

    def close(self) -> None:
        with self._lock:
            for end in self._pair or ():
                end.close()
            self._pair = None


class Descriptor:
    """The part that all pollable back ends share: locks, waiting, waking, closing.

    Who waits for room only does not hold the receive lock: a reader that waits for ever must not keep a writer waiting.
    """

    def __init__(self) -> None:
        self._rx_lock, self._tx_lock, self._write_wait = threading.Lock(), threading.Lock(), threading.Lock()
        self._closing = False
        self._close_lock = threading.Lock()
        self._read_bell, self._write_bell = _Bell(), _Bell()

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
        events = (selectors.EVENT_READ if read else 0) | (selectors.EVENT_WRITE if write else 0)
        lock, bell = (self._rx_lock, self._read_bell) if read else (self._write_wait, self._write_bell)
        with lock:
            if self._is_closing() or (ear := bell.listen()) is None:
                return 0
            with selectors.DefaultSelector() as selector:
                selector.register(ear, selectors.EVENT_READ)
                selector.register(self._number(), events)
                ready = 0
                for key, mask in selector.select(timeout):
                    if key.fileobj is ear:
                        bell.hush()
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
        self._read_bell.ring()
        self._write_bell.ring()

    def close(self) -> None:
        with self._close_lock:
            if self._closing:
                return
            self._closing = True
            self.wake()
            self._shut()
            with self._write_wait, self._rx_lock, self._tx_lock:
                self._release()
                self._read_bell.close()
                self._write_bell.close()
