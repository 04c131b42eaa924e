"""One connected stream socket and the port whose packets it carries.  Protocol 06, section 5; protocol 09, section 7.

Sending: `flush` frames everything in the port's queue and offers it to the system in one go. What the system does not
take stays here, at most 4 MiB, and only then write readiness is watched. A frame that does not fit is dropped whole and
counted; a frame that was accepted into the queue is never dropped while the connection lives, so the peer never sees
one cut or glued.

Receiving: up to four reads an event into a buffer that all connections of an interface share, one delivery for all.

The connection ends on the reactor thread, once, whoever finds out; `close` may come from any thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from rnsfast.engine.port import Port
from rnsfast.interfaces.base import Framing, Handle, Runtime
from rnsfast.osio.backend import open_backend
from rnsfast.osio.contract import BatchIO, IOBroken, IOClosed, Kind, RxBatch, TxResult, TxState
from rnsfast.osio.poller import READ, WRITE
from rnsfast.osio.stream import READ_SIZE, TX_BYTES, StreamCalls
from rnsfast.wire.drop import Drop

QUEUE_LIMIT: Final = 4 << 20  # bytes of frames waiting for the socket; local (protocol 06, section 5)
CONGESTED_ABOVE: Final = 256 << 10  # bytes waiting; streams stop pulling
CONGESTED_BELOW: Final = 64 << 10  # bytes waiting; they go on
STALL_TIME: Final = 12.0  # seconds without one byte accepted while some wait; then the connection is given up
_NO_LINGER: Final = struct.pack("hh" if os.name == "nt" else "ii", 1, 0)
READS: Final = 4  # reads an event, so that one busy connection does not keep the others waiting
TURN: Final = 0.004  # seconds that handling one event's packets may take; a connection whose take longer reads less
SMALL_READ: Final = 16_384  # bytes, of a connection whose packets are costly


class Cause(Enum):
    PEER = "closed by the other side"
    BROKEN = "broken"
    STALLED = "stalled"


@dataclass(frozen=True, slots=True)
class End:
    """Why a connection ended."""

    cause: Cause
    errno: int = 0

    def __str__(self) -> str:
        if self.cause is Cause.STALLED:
            return f"the other side took nothing for {STALL_TIME:.0f} s"
        if self.errno:
            return f"{os.strerror(self.errno)} ({errno.errorcode.get(self.errno, self.errno)})"
        return str(self.cause.value)


def receive_buffer() -> RxBatch:
    """A buffer for any number of connections whose events are handled on one thread."""
    return RxBatch(1, READ_SIZE)


class StreamConnection:
    """A connected socket, taken over. `watch` begins to read; `on_end` is called on the reactor thread.

    Args:
        runtime, port, framing: whose packets, and how they stand on the stream.
        sock: connected; becomes non-blocking.
        buffer: from `receive_buffer`, used only within `on_events`.
        on_end: called once when the connection ends by itself; not after `close`.
        batch: packets that are framed and offered to the system together; None for as many as fill a call.
        calls: other system calls, for tests.
    """

    def __init__(
        self,
        runtime: Runtime,
        port: Port,
        sock: socket.socket,
        framing: Framing,
        buffer: RxBatch,
        on_end: Callable[[StreamConnection, End], None],
        *,
        batch: int | None = None,
        calls: StreamCalls | None = None,
    ) -> None:
        self.port = port
        self.since = runtime.now()
        self._runtime = runtime
        self._framing = framing
        self._buffer = buffer
        self._on_end = on_end
        self._sock = sock
        self._io: BatchIO = open_backend(Kind.STREAM, sock, max_batch=batch, sys=calls)
        self._batch = batch
        self._fd = self._io.fileno()
        self._decoder = framing.decoder(port.hw_mtu + port.ifac_size)
        self._room = READS * READ_SIZE  # bytes read an event; on the reactor thread
        self._small: RxBatch | None = None
        self._tx_lock = threading.Lock()
        # All below under the transmit lock.
        self._pending: list[bytes] = []  # chunks of whole frames; those before _head are gone
        self._head = 0
        self._offset = 0  # bytes of _pending[_head] that are gone
        self._waiting = 0  # bytes in _pending that are not gone
        self._progress_at = 0.0  # when the system last took a byte, or pending began
        self._stall_check: Handle | None = None
        self._open = True
        self._failed: End | None = None  # no more sending; the reactor is about to end it

    # -- life -----------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Begin to read. The port must be attached."""
        with self._tx_lock:
            if self._open:
                self._runtime.watch(self._fd, READ | (WRITE if self._waiting else 0), self.on_events)

    def close(self) -> None:
        """Send what is queued if the system takes it at once, then close. Any thread, idempotent."""
        self.flush()
        self._shut()

    def _shut(self, *, abort: bool = False) -> bool:
        """Give the descriptor up. False if somebody was first. `abort`: also what the system has taken already."""
        with self._tx_lock:
            if not self._open:
                return False
            self._open = False
            if abort:
                with contextlib.suppress(OSError):
                    self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            self._runtime.unwatch(self._fd)
            check, self._stall_check = self._stall_check, None
            lost = len(self._pending) - self._head
            self._pending, self._head, self._offset, self._waiting = [], 0, 0, 0
        if check is not None:
            check.cancel()
        self._io.close()
        with self._runtime.lock:
            if lost:
                self.port.drops[Drop.TX_CONNECTION_LOST] += lost
            self.port.congested = False
        return True

    def _finish(self, end: End) -> None:
        """On the reactor thread.

        A peer that takes nothing would not even see the end, which stands behind all that the system still keeps for
        it, megabytes and for minutes: such a connection is reset.
        """
        if self._shut(abort=end.cause is Cause.STALLED):
            self._on_end(self, end)

    @property
    def waiting(self) -> int:
        """Bytes that the socket has not taken yet."""
        return self._waiting

    def status(self) -> dict[str, Any]:
        stats = self._io.stats
        return {
            "backend": self._io.caps.backend,
            "connected_for": self._runtime.now() - self.since,  # seconds
            "waiting_bytes": self._waiting,
            "rx_calls": stats.rx_calls,
            "tx_calls": stats.tx_calls,
            "tx_short": stats.tx_short,
            "tx_blocked": stats.tx_blocked,
        }

    # -- sending --------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Send the port's queue. Any thread, without the node's lock."""
        port, runtime = self.port, self._runtime
        if not port.queue:  # whoever adds to it flushes afterwards
            return
        with self._tx_lock:
            with runtime.lock:
                packets = port.take()
            if not packets:
                return
            if not self._open or self._failed is not None:
                with runtime.lock:
                    port.drops[Drop.TX_CONNECTION_LOST] += len(packets)
                return
            port.tx_packets += len(packets)
            port.tx_bytes += sum(map(len, packets))
            if self._waiting:
                self._append(packets)
            elif len(packets) == 1:
                self._send_first(self._framing.encode(packets[0]))
            else:
                self._send_many(packets)
            turned = self._turn()
        if turned:
            runtime.changed(port)

    def _send_first(self, chunk: bytes) -> None:
        """Offer `chunk` by the plain call; nothing is waiting before it."""
        result = self._io.send_one(chunk)
        if result.state is not TxState.DONE:
            self._pending, self._head = [chunk], 0
            self._offset, self._waiting = 0, len(chunk)
            self._settle(result)

    def _send_many(self, packets: list[bytes]) -> None:
        """Nothing is waiting. Frames are made and offered a call's worth at a time, while the system takes them all."""
        for group in _groups(packets, self._batch):
            if self._waiting:
                self._append(group)
            else:
                self._send_first(self._framing.encode_many(group))

    def _append(self, packets: list[bytes]) -> None:
        """Let them wait behind what waits already; drop what goes beyond the limit, whole frames each."""
        pending, waiting = self._pending, self._waiting
        for group in _groups(packets, self._batch):
            chunk = self._framing.encode_many(group)
            if waiting + len(chunk) <= QUEUE_LIMIT:
                pending.append(chunk)
                waiting += len(chunk)
                continue
            refused = 0
            for packet in group:
                frame = self._framing.encode(packet)
                if waiting + len(frame) <= QUEUE_LIMIT:
                    pending.append(frame)
                    waiting += len(frame)
                else:
                    refused += 1
                    self.port.tx_packets -= 1
                    self.port.tx_bytes -= len(packet)
            with self._runtime.lock:
                self.port.drops[Drop.TX_QUEUE_FULL] += refused
        self._waiting = waiting

    def _settle(self, result: TxResult) -> None:
        """Account for a send of the pending chunks that left some. Arms what is needed to go on."""
        taken, pending = result.taken, self._pending
        moved = sum(map(len, pending[self._head : taken])) - self._offset + result.offset
        self._waiting -= moved
        self._head, self._offset = taken, result.offset
        runtime = self._runtime
        if result.state is TxState.DONE:
            self._pending, self._head, self._offset, self._waiting = [], 0, 0, 0
            runtime.rewatch(self._fd, READ)
        elif result.state is TxState.BLOCKED:
            if self._head > 64:
                del pending[: self._head]
                self._head = 0
            now = runtime.now()
            if moved or self._stall_check is None:
                self._progress_at = now
            if self._stall_check is None:
                self._stall_check = runtime.call_at(now + STALL_TIME, self._check_stall)
            runtime.rewatch(self._fd, READ | WRITE)
        elif self._failed is None:
            # Bytes may be in flight: nothing is sent again. Only the reactor thread ends connections.
            self._failed = End(Cause.BROKEN, result.errno)
            runtime.call_at(runtime.now(), self._end_failed)

    def _end_failed(self) -> None:
        self._finish(self._failed or End(Cause.BROKEN))

    def _turn(self) -> bool:
        """Update `port.congested`; whether it changed."""
        waiting, port = self._waiting, self.port
        if waiting > CONGESTED_ABOVE if not port.congested else waiting < CONGESTED_BELOW:
            with self._runtime.lock:
                port.congested = not port.congested
            return True
        return False

    def _check_stall(self) -> None:
        """A deadline: runs only after data began to wait, and again only while it waits."""
        runtime = self._runtime
        with self._tx_lock:
            self._stall_check = None
            if not self._open or not self._waiting:
                return
            due = self._progress_at + STALL_TIME
            if runtime.now() < due:
                self._stall_check = runtime.call_at(due, self._check_stall)
                return
        self._finish(End(Cause.STALLED))

    # -- the reactor's calls --------------------------------------------------------------------------------------

    def on_events(self, events: int) -> None:
        if events & WRITE:
            self._on_writable()
        if events & READ:
            self._on_readable()

    def _on_writable(self) -> None:
        with self._tx_lock:
            if not self._open or self._failed is not None:
                return
            if not self._waiting:
                self._runtime.rewatch(self._fd, READ)
                return
            self._settle(self._io.send(self._pending, None, self._head, self._offset))
            turned = self._turn()
        if turned:
            self._runtime.changed(self.port)

    def _adapt(self, read: int, took: float) -> None:
        """Read as much an event as is handled within a turn, so that costly packets of one hold up no other."""
        room, most = self._room, READS * READ_SIZE
        if took > TURN:
            self._room = max(SMALL_READ, int(min(room, read) * TURN / took))
        elif room < most and took < TURN / 2 and 2 * read > room:
            self._room = min(most, 2 * room)

    def _on_readable(self) -> None:
        io, buffer, feed = self._io, self._buffer, self._decoder.feed
        if self._room < buffer.slot:
            if self._small is None:
                self._small = RxBatch(1, SMALL_READ)
            buffer = self._small
        packets: list[bytes] = []
        end: End | None = None
        read, reads = 0, max(1, self._room // buffer.slot)
        for _ in range(reads):
            try:
                if not io.recv(buffer):
                    break
            except IOClosed as closed:
                if not closed.eof:
                    return  # our own close, from another thread
                end = End(Cause.PEER)
                break
            except IOBroken as broken:
                end = End(Cause.BROKEN, broken.errno or 0)
                break
            data = buffer.data(0)
            read += len(data)
            packets += feed(data)
            if len(data) < buffer.slot:
                break
        drops = self._decoder.drops
        if drops:
            with self._runtime.lock:
                self.port.drops.update(drops)
            drops.clear()
        if packets:
            began = self._runtime.now()
            self._runtime.deliver(self.port, packets)
            self._adapt(read, self._runtime.now() - began)
        if end is not None:  # what the peer wrote before its end is delivered first
            self._finish(end)


def _groups(packets: list[bytes], most: int | None) -> list[list[bytes]]:
    """Cut a batch so that the frames of a group fill about one call; usually that is the batch itself."""
    limit = len(packets) if most is None else most
    if len(packets) <= limit and sum(map(len, packets)) <= TX_BYTES:
        return [packets]
    groups: list[list[bytes]] = []
    group: list[bytes] = []
    size = 0
    for packet in packets:
        if group and (size + len(packet) > TX_BYTES or len(group) >= limit):
            groups.append(group)
            group, size = [], 0
        group.append(packet)
        size += len(packet)
    groups.append(group)
    return groups
