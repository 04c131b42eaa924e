"""The queues and the memory of Registered I/O.  Protocol 09, section 10.1.

Each direction has a completion queue with its event, and for each of its slots two descriptors that never change except
for the length of a packet to send: where the packet is, and where its address is.
"""

from __future__ import annotations

import ctypes
import mmap
import socket
from typing import Final, Protocol

from rnsfast.osio.layouts_windows import (
    RIO_EVENT_COMPLETION,
    WSAEALREADY,
    RioBuf,
    RioNotification,
    RioResult,
    SockaddrInet,
)
from rnsfast.osio.signals import EventSys

SLOTS: Final = 1024  # a direction; a power of two
SLOT: Final = 2048  # bytes
NAME: Final = ctypes.sizeof(SockaddrInet)
DATA_AT: Final = 32  # bytes from the start of a slot: the address, aligned
MAX_PACKET: Final = SLOT - DATA_AT

STEP: Final = ctypes.sizeof(RioBuf)
NAME_STEP: Final = STEP  # of each slot: the packet, then the address
PAIR: Final = 2 * STEP
LENGTH: Final = RioBuf.length.offset // 4  # in words of 32 bits
RESULT: Final = ctypes.sizeof(RioResult) // 4
STATUS: Final = RioResult.status.offset // 4
TRANSFERRED: Final = RioResult.transferred.offset // 4
CONTEXT: Final = RioResult.request_context.offset // 4  # its low half; slots fit there


class RioSys(EventSys, Protocol):
    """Registered I/O. Addresses, handles and sockets are integers; what can fail leaves an error number."""

    def open_socket(self, family: int) -> socket.socket:
        """A datagram socket for Registered I/O."""

    def load(self, sock: int) -> None:
        """Look the functions up. OSError if they are not there."""

    def ignore_unreachable(self, sock: int) -> None:
        """ICMP answers shall not end receives."""

    def allocate(self, size: int) -> mmap.mmap: ...
    def get_last_error(self) -> int: ...
    def register_buffer(self, address: int, size: int, /) -> int: ...
    def deregister_buffer(self, buffer: int, /) -> None: ...
    def create_completion_queue(self, size: int, notification: int, /) -> int: ...
    def close_completion_queue(self, queue: int, /) -> None: ...
    def create_request_queue(
        self,
        sock: int,
        receives: int,
        receive_buffers: int,
        sends: int,
        send_buffers: int,
        receive_queue: int,
        send_queue: int,
        context: int,
        /,
    ) -> int: ...

    # 0 is failure. queue, data, buffers, local, remote, control, flags, Flags, context
    def receive_ex(self, q: int, d: int, n: int, loc: int, r: int, c: int, f: int, flags: int, ctx: int, /) -> int: ...
    def send_ex(self, q: int, d: int, n: int, loc: int, r: int, c: int, f: int, flags: int, ctx: int, /) -> int: ...
    def dequeue(self, queue: int, results: int, count: int, /) -> int: ...
    def notify(self, queue: int, /) -> int:
        """0, or an error number."""


class Lane:
    """One direction: a completion queue with its event, and the descriptors of its slots."""

    def __init__(self, sys: RioSys, slots: int) -> None:
        self._sys = sys
        self.event = sys.create_event(False)
        self.bufs = (RioBuf * (2 * slots))()
        self.bufs_at = ctypes.addressof(self.bufs)
        self.lengths = memoryview(self.bufs).cast("B").cast("I")
        self.results = (RioResult * slots)()
        self.results_at = ctypes.addressof(self.results)
        self.words = memoryview(self.results).cast("B").cast("I")
        # The event resets itself when it ends a wait; resetting it at a notify could only lose a signal.
        self.notification = RioNotification(type=RIO_EVENT_COMPLETION, handle=self.event, notify_reset=0)
        self.queue = sys.create_completion_queue(slots, ctypes.addressof(self.notification))
        if not self.queue:
            error = sys.get_last_error()
            sys.close_handle(self.event)
            raise OSError(error, "RIOCreateCompletionQueue")

    def aim(self, buffer: int, start: int) -> None:
        """Let the descriptors of slot i point at registered memory from `start + i * SLOT` on."""
        for i in range(len(self.bufs) // 2):
            data, name = self.bufs[2 * i], self.bufs[2 * i + 1]
            data.buffer_id = name.buffer_id = buffer
            name.offset = start + i * SLOT
            data.offset = start + i * SLOT + DATA_AT
            data.length, name.length = MAX_PACKET, NAME

    def arm(self) -> int:
        """Ask for the event. 0, or why it will not come."""
        error = self._sys.notify(self.queue)
        return 0 if error == WSAEALREADY else error

    def close_queue(self) -> None:
        self._sys.close_completion_queue(self.queue)

    def close_event(self) -> None:
        self._sys.close_handle(self.event)
