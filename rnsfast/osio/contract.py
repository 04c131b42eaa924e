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
    BROKEN = 4  # the descriptor is unusable; items from `taken` were surely not delivered (packets only)


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
    rx_packets: int = 0  # handed over; a stream counts chunks in rx_calls only
    rx_bytes: int = 0
    rx_dropped: int = 0  # refused by the checks on what the system returned
    tx_calls: int = 0
    tx_packets: int = 0  # accepted by the system
    tx_bytes: int = 0
    tx_short: int = 0  # calls that took less than they were offered
    tx_blocked: int = 0  # calls that took nothing because the queue was full
    tx_rejected: int = 0  # packets dropped for good, each by itself
    tx_unknown: int = 0  # packets given up because they may have been delivered


class Peer:
    """Where a datagram comes from or goes to. Equality and hash by `raw`, the platform's own address bytes."""

    __slots__ = ("address", "family", "host", "port", "raw", "scope")

    def __init__(self, family: int, host: str, port: int, scope: int, raw: bytes) -> None:
        self.family, self.host, self.port, self.scope, self.raw = family, host, port, scope, raw
        #: As the `socket` module takes it.
        self.address: tuple[str, int] | tuple[str, int, int, int] = (
            (host, port, 0, scope) if ":" in host else (host, port)
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Peer) and other.raw == self.raw

    def __hash__(self) -> int:
        return hash(self.raw)

    def __repr__(self) -> str:
        return f"Peer({self.host!r}, {self.port})"


class RxBatch:
    """Room for received packets, made once and filled again and again by one reader.

    A back end either reads into slots and says how long each came out, or adds entries that stand anywhere: parts of a
    slot that holds several packets, or `bytes` of their own.

    Args:
        capacity: packets a batch.
        slot: bytes a slot.
        slots: slots; `capacity` if not given.
    """

    __slots__ = (
        "_entries",
        "_export",
        "_rooms",
        "_slab",
        "_view",
        "address",
        "capacity",
        "dropped",
        "owned",
        "peers",
        "slot",
        "slots",
        "uniform",
    )

    def __init__(self, capacity: int, slot: int, slots: int | None = None) -> None:
        self.capacity, self.slot, self.slots = capacity, slot, capacity if slots is None else slots
        self.dropped = 0  # entries refused in this receive
        self.owned = False  # every entry is `bytes` of its own, that stays
        self.uniform: object | None = None  # what all entries have in common, if the back end says so
        self.peers: list[Peer | None] = []  # one an entry if the back end reports peers
        self._entries: list[bytes | memoryview] = []  # at most `capacity`
        self._slab = bytearray(self.slots * slot)
        self._view = memoryview(self._slab)
        self._rooms = [self._view[i * slot : (i + 1) * slot] for i in range(self.slots)]
        # The address is asked for once. While this export lives the slab cannot move, so the number stays right.
        self._export = ctypes.c_char.from_buffer(self._slab) if self._slab else None
        self.address = 0 if self._export is None else ctypes.addressof(self._export)

    @property
    def count(self) -> int:
        """Entries of the last fill."""
        return len(self._entries)

    @property
    def size(self) -> int:
        """Bytes of all entries."""
        return sum(map(len, self._entries))

    def room(self, index: int) -> memoryview:
        """The whole slot, for the back end to write into."""
        return self._rooms[index]

    def clear(self) -> None:
        """Begin a fill."""
        self._entries = []
        self.peers = []
        self.dropped = 0
        self.owned = False
        self.uniform = None

    def fill(self, sizes: Sequence[int]) -> None:
        """A whole fill at once: how many bytes stand in the leading slots."""
        self.clear()
        self._entries = [room[:size] for room, size in zip(self._rooms, sizes, strict=False)]

    def add(self, entry: bytes | memoryview) -> None:
        """One more entry."""
        self._entries.append(entry)

    def add_many(self, entries: Sequence[bytes | memoryview]) -> None:
        """More entries."""
        self._entries += entries

    def data(self, index: int) -> memoryview:
        """Entry `index` without a copy; valid until the next receive into this batch."""
        return memoryview(self._entries[index])

    def take(self, index: int) -> bytes:
        """Entry `index` as a copy that may be kept."""
        return bytes(self._entries[index])

    def take_all(self) -> list[bytes]:
        """All entries as copies that may be kept."""
        if self.owned:
            return self._entries[:]  # type: ignore[return-value]
        return list(map(bytes, self._entries))

    def peer(self, index: int) -> Peer | None:
        """Where entry `index` came from; None if the back end does not report peers."""
        return self.peers[index] if self.peers else None


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

    def make_batch(self) -> RxBatch:
        """A batch that suits `recv`."""

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
