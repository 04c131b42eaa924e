"""What an interface knows of the operating system: batches in, batches out, how each ended.  Protocol 09, section 2.

A back end never blocks in `send`, never raises for what is wrong with one packet, and never offers again what may
already have been delivered. `RxBatch` is made once by its reader and filled again and again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class Kind(Enum):
    STREAM = 1  # bytes without boundaries, one peer
    DATAGRAM = 2  # packets, each with its peer
    TUN = 3  # packets, no peers


class TxState(Enum):
    DONE = 0  # every item is settled
    BLOCKED = 1  # items from `taken` were surely not delivered: wait for writability, then offer them again
    UNKNOWN = 2  # items from `taken` may have been delivered: drop them (datagrams), tear the connection down (streams)
    CLOSED = 3  # a close is in progress


class IOClosed(OSError):
    """The descriptor was closed by us, or the peer ended the stream in good order (`eof` is true)."""

    def __init__(self, eof: bool = False) -> None:
        super().__init__("end of stream" if eof else "closed")
        self.eof = eof


class IOBroken(OSError):
    """The descriptor cannot be used any more. `errno` says why."""


@dataclass(frozen=True, slots=True)
class Caps:
    """What a back end found out about itself when it was made."""

    kind: Kind
    backend: str  # name for `status` and logs, like "stream-linux"
    max_rx: int  # packets a receive batch (a stream: chunks), at least 1
    max_tx: int  # packets a submission, at least 1
    max_packet: int  # bytes of the largest packet accepted (a stream: of the largest submission)
    peers: bool  # packets carry a peer
    run_tx: int  # > 1: equal-size runs to one peer may become one super-packet
    pollable: bool  # fileno() may be watched by a poller


@dataclass(slots=True)
class Stats:
    """Counters, each with one writer: `rx_*` the reader, `tx_*` the holder of the transmit lock."""

    rx_calls: int = 0
    rx_bytes: int = 0
    tx_calls: int = 0
    tx_bytes: int = 0
    tx_short: int = 0  # calls that took less than they were offered
    tx_blocked: int = 0  # calls that took nothing because the socket was full


class Peer:
    """Where a datagram comes from or goes to. Equality and hash by `raw`, the platform's own address bytes."""

    __slots__ = ("family", "host", "port", "raw", "scope")

    def __init__(self, family: int, host: str, port: int, scope: int, raw: bytes) -> None:
        self.family, self.host, self.port, self.scope, self.raw = family, host, port, scope, raw

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Peer) and other.raw == self.raw

    def __hash__(self) -> int:
        return hash(self.raw)

    def __repr__(self) -> str:
        return f"Peer({self.host!r}, {self.port})"


class RxBatch:
    """Slots for received packets, made once and filled again and again by one reader.

    Args:
        capacity: slots; a stream uses one.
        slot: bytes a slot.
    """

    __slots__ = ("_export", "_sizes", "_slab", "_view", "address", "capacity", "count", "dropped", "peers", "slot")

    def __init__(self, capacity: int, slot: int) -> None:
        self.capacity, self.slot = capacity, slot
        self.count = 0
        self.dropped = 0  # entries refused in this fill
        self.peers: list[Peer | None] = [None] * capacity
        self._sizes = [0] * capacity
        self._slab = bytearray(capacity * slot)
        self._view = memoryview(self._slab)
        # The address is asked for once. While this export lives the slab cannot move, so the number stays right.
        self._export = ctypes.c_char.from_buffer(self._slab)
        self.address = ctypes.addressof(self._export)

    def room(self, index: int) -> memoryview:
        """The whole slot, for the back end to write into."""
        return self._view[index * self.slot : (index + 1) * self.slot]

    def fill(self, sizes: Sequence[int]) -> None:
        """The back end says how many bytes it wrote into the leading slots."""
        self.count = len(sizes)
        self.dropped = 0
        self._sizes[: len(sizes)] = sizes

    def data(self, index: int) -> memoryview:
        """Entry `index` without a copy; valid until the next receive into this batch."""
        start = index * self.slot
        return self._view[start : start + self._sizes[index]]

    def take(self, index: int) -> bytes:
        """Entry `index` as a copy that may be kept."""
        return bytes(self.data(index))

    def peer(self, index: int) -> Peer | None:
        return self.peers[index]


@dataclass(slots=True)
class TxResult:
    taken: int  # index of the first item that is not settled; the number of items if all are
    sent: int  # items this call settled that the system accepted
    rejected: tuple[tuple[int, int], ...]  # (index, errno) of items dropped for good
    offset: int  # a stream: bytes of item `taken` that are already accepted
    state: TxState
    errno: int = 0


class BatchIO(Protocol):
    """One descriptor. `recv` has one caller at a time, so has `send`; `wake` and `close` may come from any thread."""

    caps: Caps
    stats: Stats

    def fileno(self) -> int:
        """The descriptor, -1 when closed or not pollable."""

    def recv(self, into: RxBatch, timeout: float | None = 0.0) -> int:
        """Fill `into` with what is already there; waits up to `timeout` seconds for the first packet only.

        Returns the number of entries, 0 if nothing came or `wake()` was called.
        Raises IOClosed (our close, or the peer's end of a stream) and IOBroken (the descriptor is unusable).
        """

    def send(
        self, items: Sequence[bytes], peers: Sequence[Peer] | Peer | None = None, start: int = 0, offset: int = 0
    ) -> TxResult:
        """Offer `items[start:]` to the system, `offset` bytes of the first being gone already. Never blocks."""

    def send_one(self, item: bytes, peer: Peer | None = None) -> TxResult:
        """Offer one packet by the plain call, without what batching costs."""

    def wait(self, timeout: float | None, read: bool = True, write: bool = False) -> int:
        """Wait for readiness: bit 1 read, bit 2 write, 0 for a timeout or a wake."""

    def wake(self) -> None:
        """Make a blocked `recv` or `wait` return 0."""

    def close(self) -> None:
        """Idempotent. Returns when no other thread uses the descriptor any more."""
