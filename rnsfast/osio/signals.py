"""Back ends whose readiness is an event object of Windows, so that no poller can watch them.  Protocol 09, 10.

A thread calls `recv(batch, timeout=None)` until IOClosed. Every wait ends by what it waits for, by `wake` or by
`close`: two events that reset themselves wake the reader and who waits for room, a third that stays set ends all.
"""

from __future__ import annotations

import math
import threading
import time
from contextlib import ExitStack
from typing import Protocol

from rnsfast.osio.contract import Caps
from rnsfast.osio.packets import PacketIO


class EventSys(Protocol):
    """Event objects. A handle is an integer, never 0."""

    def create_event(self, manual: bool) -> int:
        """An event that is not set. A manual one stays set, others are reset by the wait that they end."""

    def set_event(self, handle: int) -> None: ...
    def close_handle(self, handle: int) -> None: ...

    def wait_any(self, handles: tuple[int, ...], milliseconds: int | None) -> int:
        """Index of the first that is set; -1 after `milliseconds`, None for no limit."""


class SignalIO(PacketIO):
    """What such back ends share: waiting, waking, closing. Its methods are those of `Descriptor`, without one.

    Who waits for room holds no transmit lock meanwhile, only `_write_wait`, so that others can send.
    """

    def __init__(self, caps: Caps, family: int | None, events: EventSys) -> None:
        super().__init__(caps, family)
        self._events = events
        self._gone = False  # the events are closed; under `_gone_lock`
        self._gone_lock = threading.Lock()
        self._stop = events.create_event(True)
        self._wake_read = events.create_event(False)
        self._wake_write = events.create_event(False)

    # What a back end supplies

    def _arm_read(self) -> int:
        """An event that will be set once there is something to read, now or later. The receive lock is held."""
        raise NotImplementedError

    def _arm_write(self) -> int:
        """0 if there is room to send, or an event that is set when there may be. The transmit lock is held."""
        return 0

    def _free(self) -> None:
        """Give everything up. All locks are held, nobody uses it, nobody will."""
        raise NotImplementedError

    # For everybody

    def _number(self) -> int:
        return -1

    def wait(self, timeout: float | None, read: bool = True, write: bool = False) -> int:
        began = time.monotonic()
        with ExitStack() as held:
            if write:
                held.enter_context(self._write_wait)
            if read:
                held.enter_context(self._rx_lock)
            enders = (self._stop, *((self._wake_read,) if read else ()), *((self._wake_write,) if write else ()))
            while True:
                if self._is_closing():
                    return 0
                reading = (self._arm_read(),) if read else ()
                room = self._room_event() if write else 0
                writable = 2 if write and not room else 0
                handles = enders + reading + ((room,) if room else ())
                index = self._events.wait_any(
                    handles, 0 if writable else until(None if timeout is None else began + timeout)
                )
                if index < 0:
                    return writable
                if index < len(enders):
                    return 0
                if index < len(enders) + len(reading):
                    return 1 | writable

    def _room_event(self) -> int:
        with self._tx_lock:
            return self._stop if self._is_closing() else self._arm_write()

    def wake(self) -> None:
        with self._gone_lock:
            if not self._gone:
                self._events.set_event(self._wake_read)
                self._events.set_event(self._wake_write)

    def _shut(self) -> None:
        self._events.set_event(self._stop)
        with self._write_wait:
            pass  # whoever waited for room is out, and who comes now sees that it is closing

    def _release(self) -> None:
        self._free()
        with self._gone_lock:
            self._gone = True
            self._close_events()

    def _close_events(self) -> None:
        for handle in (self._stop, self._wake_read, self._wake_write):
            self._events.close_handle(handle)


def until(deadline: float | None) -> int | None:
    """Milliseconds, rounded up so that a wait never ends early and turns into a loop."""
    return None if deadline is None else max(0, math.ceil((deadline - time.monotonic()) * 1000))
