"""A packet descriptor (datagram socket, TUN device) and the port whose packets it carries.  Protocol 09, section 2.

Sending: `flush` offers everything in the port's queue in one go. What the system does not take stays here, in order and
bounded, and only then write readiness is watched. What it refuses is counted by cause. What may have left is never
offered again.

Receiving: each readiness event drains what is there, and hands every batch over at once. A descriptor that cannot be
polled is read by a thread of its own.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

from rnsfast.engine.port import Port
from rnsfast.interfaces.base import Handle, Runtime
from rnsfast.osio.contract import BatchIO, IOBroken, IOClosed, Peer, TxState
from rnsfast.osio.poller import READ, WRITE
from rnsfast.wire.drop import Drop

QUEUE_LIMIT: Final = 1 << 20  # bytes of packets waiting for the system; local
CONGESTED_ABOVE: Final = 256 << 10  # bytes waiting; streams stop pulling
CONGESTED_BELOW: Final = 64 << 10  # bytes waiting; they go on
RETRY: Final = 0.01  # seconds until a full ring that cannot be watched is tried again; only while something waits
READS: Final = 4  # full batches an event, so that one busy descriptor does not keep the others waiting

#: What a refused packet is counted as. Everything else is TX_REFUSED.
CAUSES: Final[Mapping[int, Drop]] = {
    errno.EMSGSIZE: Drop.TX_TOO_LARGE,
    errno.EHOSTUNREACH: Drop.TX_UNREACHABLE,
    errno.ENETUNREACH: Drop.TX_UNREACHABLE,
    errno.ECONNREFUSED: Drop.TX_UNREACHABLE,
    errno.ENOBUFS: Drop.TX_NO_BUFFERS,
    errno.ENOMEM: Drop.TX_NO_BUFFERS,
    errno.ENETDOWN: Drop.TX_DEVICE_DOWN,
    errno.EIO: Drop.TX_DEVICE_DOWN,
}

Convert = Callable[[list[bytes]], list[bytes]]


class PacketConnection:
    """A descriptor, taken over. `watch` begins to read.

    Args:
        runtime, port: whose packets.
        io: the back end.
        peer: where everything goes; None for a TUN device.
        on_broken: called once, on the reactor thread, with an errno, when the descriptor has become unusable; not after
            `close`.
        wrap, unwrap: from packets to what is on the medium, and back; both take whole batches. `unwrap` counts what
            it leaves out.
        overhead: bytes that `wrap` adds to each.
    """

    def __init__(
        self,
        runtime: Runtime,
        port: Port,
        io: BatchIO,
        peer: Peer | None,
        on_broken: Callable[[int], None],
        *,
        wrap: Convert | None = None,
        unwrap: Convert | None = None,
        overhead: int = 0,
    ) -> None:
        self.port = port
        self._runtime = runtime
        self._io = io
        self._fd = io.fileno()
        self._peer = peer
        self._on_broken = on_broken
        self._wrap, self._unwrap, self._overhead = wrap, unwrap, overhead
        self._batch = io.make_batch()
        self._reader: threading.Thread | None = None
        self._again: Handle | None = None  # the rest of what was there; the reactor thread's
        self._tx_lock = threading.Lock()
        # All below under the transmit lock.
        self._pending: list[bytes] = []  # in order, bounded by QUEUE_LIMIT
        self._waiting = 0  # bytes in _pending
        self._open = True
        self._watched = False
        self._broken = False
        self._retry: Handle | None = None  # where write readiness cannot be watched

    # -- life -----------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Begin to read. The port must be attached."""
        with self._tx_lock:
            if not self._open:
                return
            if self._io.caps.pollable:
                self._watched = True
                self._runtime.watch(self._fd, READ | (WRITE if self._pending else 0), self.on_events)
                return
            self._reader = threading.Thread(target=self._read, name=f"{self.port.name}-reader", daemon=True)
            self._reader.start()

    def close(self) -> None:
        """Send what is queued if the system takes it at once, then close. Any thread, idempotent."""
        self.flush()
        self._shut()

    def _shut(self) -> bool:
        """Give the descriptor up. False if somebody was first."""
        with self._tx_lock:
            if not self._open:
                return False
            self._open = False
            if self._watched:
                self._runtime.unwatch(self._fd)
            lost, self._pending, self._waiting = self._pending, [], 0
            calls, self._retry = (self._retry, self._again), None
        for call in calls:
            if call is not None:
                call.cancel()
        self._io.close()
        reader = self._reader
        if reader is not None and reader is not threading.current_thread():
            reader.join()
        self._lose(lost, Drop.TX_CONNECTION_LOST)
        with self._runtime.lock:
            self.port.congested = False
        return True

    def _fail(self, error: int) -> None:
        """Any thread: the descriptor is unusable. The reactor thread ends it, once."""
        with self._tx_lock:
            self._break(error)

    def _break(self, error: int) -> None:
        """`_fail`, under the transmit lock: from now on nothing is offered."""
        if self._broken or not self._open:
            return
        self._broken = True
        if self._watched:
            self._runtime.rewatch(self._fd, 0)  # it may be reported as ready for ever
        self._runtime.call_at(self._runtime.now(), lambda: self._end(error))

    def _end(self, error: int) -> None:
        if self._shut():
            self._on_broken(error)

    def status(self) -> dict[str, Any]:
        """What the back end is, and its counters."""
        caps, stats = self._io.caps, self._io.stats
        return {
            "backend": caps.backend,
            "batch": caps.max_tx,
            "waiting_bytes": self._waiting,
            "rx_calls": stats.rx_calls,
            "rx_refused": stats.rx_dropped,
            "tx_calls": stats.tx_calls,
            "tx_short": stats.tx_short,
            "tx_blocked": stats.tx_blocked,
            "tx_rejected": stats.tx_rejected,
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
                if not self._open or self._broken:
                    port.drops[Drop.TX_CONNECTION_LOST] += len(packets)
                    return
            if not packets:
                return
            port.tx_packets += len(packets)
            port.tx_bytes += sum(map(len, packets))
            items = packets if self._wrap is None else self._wrap(packets)
            if self._pending:
                self._append(items)
            elif items:
                self._send(items)
            turned = self._turn()
        if turned:
            runtime.changed(port)

    def _send(self, items: list[bytes]) -> None:
        """Offer `items`; nothing waits before them. What is left becomes what waits."""
        io = self._io
        result = io.send_one(items[0], self._peer) if len(items) == 1 else io.send(items, self._peer)
        for index, error in result.rejected:
            self._lose([items[index]], CAUSES.get(error, Drop.TX_REFUSED))
        self._pending, self._waiting = [], 0
        if result.state is TxState.DONE:
            return
        left = items[result.taken :]
        if result.state is TxState.BLOCKED:
            self._append(left)
        elif result.state is TxState.UNKNOWN:
            with self._runtime.lock:
                self.port.drops[Drop.TX_UNKNOWN] += len(left)  # they stay counted as sent: they may have been
        else:
            self._lose(left, Drop.TX_CONNECTION_LOST)
            if result.state is TxState.BROKEN:
                self._break(result.errno)

    def _lose(self, items: list[bytes], cause: Drop) -> None:
        """These were counted as sent, and were not."""
        if not items:
            return
        port = self.port
        with self._runtime.lock:
            port.drops[cause] += len(items)
            port.tx_packets -= len(items)
            port.tx_bytes -= sum(map(len, items)) - self._overhead * len(items)

    def _append(self, items: list[bytes]) -> None:
        """Let them wait behind what waits already; drop what goes beyond the limit."""
        first, waiting = not self._pending, self._waiting
        refused: list[bytes] = []
        for item in items:
            if waiting + len(item) <= QUEUE_LIMIT:
                self._pending.append(item)
                waiting += len(item)
            else:
                refused.append(item)
        self._waiting = waiting
        self._lose(refused, Drop.TX_QUEUE_FULL)
        if first and self._pending:
            self._want_to_write()

    def _want_to_write(self) -> None:
        runtime = self._runtime
        if self._io.caps.pollable:
            if self._watched:  # otherwise `watch` will see that something waits
                runtime.rewatch(self._fd, READ | WRITE)
        elif self._retry is None:  # nothing tells when there is room again
            self._retry = runtime.call_at(runtime.now() + RETRY, self._on_writable)

    def _turn(self) -> bool:
        """Update `port.congested`; whether it changed."""
        waiting, port = self._waiting, self.port
        if waiting > CONGESTED_ABOVE if not port.congested else waiting < CONGESTED_BELOW:
            with self._runtime.lock:
                port.congested = not port.congested
            return True
        return False

    # -- the reactor's calls --------------------------------------------------------------------------------------

    def on_events(self, events: int) -> None:
        if events & WRITE:
            self._on_writable()
        if events & READ and self._again is None:
            self._on_readable()

    def _on_writable(self) -> None:
        with self._tx_lock:
            self._retry = None
            if not self._open or self._broken:
                return
            if self._pending:
                self._send(self._pending)
            if not self._pending and self._watched:
                self._runtime.rewatch(self._fd, READ)
            turned = self._turn()
        if turned:
            self._runtime.changed(self.port)

    def _on_readable(self) -> None:
        batch = self._batch
        for _ in range(READS):
            try:
                count = self._io.recv(batch)
            except IOClosed:
                return
            except IOBroken as broken:
                self._fail(broken.errno or errno.EIO)
                return
            if not count and not batch.dropped:
                return
            self._hand_over()
            if count < batch.capacity:
                return
        # The back end may have more although the system has not, so readiness would not tell: a buffer can hold many.
        self._again = self._runtime.call_at(self._runtime.now(), self._read_on)

    def _read_on(self) -> None:
        self._again = None
        if self._open and not self._broken:
            self._on_readable()

    def _read(self) -> None:
        """The thread of a descriptor that cannot be polled."""
        batch, recv = self._batch, self._io.recv
        while True:
            try:
                recv(batch, None)
            except IOClosed:
                return
            except IOBroken as broken:
                self._fail(broken.errno or errno.EIO)
                return
            self._hand_over()

    def _hand_over(self) -> None:
        """One delivery a batch."""
        batch, port = self._batch, self.port
        if batch.dropped:
            with self._runtime.lock:
                port.drops[Drop.RX_REFUSED] += batch.dropped
        packets = batch.take_all()
        if self._unwrap is not None:
            packets = self._unwrap(packets)
        if packets:
            self._runtime.deliver(port, packets)
