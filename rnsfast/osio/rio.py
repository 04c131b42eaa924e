"""Datagram sockets on Windows by Registered I/O.  Protocol 09, sections 4.3 and 10.1.

    memory      one block, registered once: slots of 2,048 bytes to receive into, as many to send from
    slot        32 bytes for the address (28 are used), 2,016 for the packet
    receive     all slots are posted from the start; one dequeue a batch, copy out, post again: deferred, one commit
    send        one dequeue of completions, room for all of the batch, post: deferred, one commit; a single one at once

Queues are not safe to use from two threads: all posts hold `_post_lock`, a dequeue the lock of its direction.

Not verified on Windows beyond what `tests/osio/test_native_windows.py` says when it is run there.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

from rnsfast.osio.contract import Caps, IOBroken, Kind, Peer, RxBatch
from rnsfast.osio.layouts_windows import (
    RIO_INVALID_BUFFERID,
    RIO_MSG_COMMIT_ONLY,
    RIO_MSG_DEFER,
    WSAEBADF,
    WSAECONNRESET,
    WSAEFAULT,
    WSAEMSGSIZE,
    WSAENOBUFS,
    WSAENOTSOCK,
    WSAEWOULDBLOCK,
)
from rnsfast.osio.packets import Peers
from rnsfast.osio.peers import parse_peer
from rnsfast.osio.ring import Ring, RingBroken
from rnsfast.osio.rio_queues import (
    CONTEXT,
    DATA_AT,
    LENGTH,
    MAX_PACKET,
    NAME,
    NAME_STEP,
    PAIR,
    RESULT,
    SLOT,
    SLOTS,
    STATUS,
    TRANSFERRED,
    Lane,
    RioSys,
)
from rnsfast.osio.signals import SignalIO, until
from rnsfast.osio.verdicts import Verdict, log_once

log = logging.getLogger(__name__)

BATCH: Final = 32  # packets; protocol 09, section 11
MAX_BATCH: Final = 64
PATIENCE: Final = 0.002  # seconds a send waits for completions when the ring is full, before it is BLOCKED
SENDERS: Final = 1024  # addresses remembered


SEND: Final = {
    WSAEWOULDBLOCK: Verdict.BLOCKED,
    WSAENOBUFS: Verdict.REPEAT,  # non-paged memory is short; the queue itself has room, that was counted
    WSAEBADF: Verdict.BROKEN,
    WSAENOTSOCK: Verdict.BROKEN,
    WSAEFAULT: Verdict.BROKEN,
}

#: Receives that end with one of these say something about one datagram. Others do so too, but not for ever.
PASSING: Final = frozenset({WSAEMSGSIZE, WSAECONNRESET})


class RioDatagramIO(SignalIO):
    """One datagram socket from `open_socket`, bound; takes it over once it is made. `OSError` leaves the socket alone.

    Not pollable: a thread calls `recv(batch, timeout=None)` until IOClosed.

    Args:
        sock: of AF_INET or AF_INET6.
        max_batch: packets a batch, 1..64.
        max_packet: bytes of the largest packet, at most 2,016.
        peers: whether received packets say where they come from.
        slots: a direction, a power of two.
        sys: other system calls, for tests.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        max_batch: int = BATCH,
        max_packet: int = MAX_PACKET,
        peers: bool = True,
        slots: int = SLOTS,
        sys: RioSys | None = None,
    ) -> None:
        if not 1 <= max_batch <= min(MAX_BATCH, slots):
            raise ValueError(f"a batch of {max_batch} packets is not within 1..{min(MAX_BATCH, slots)}")
        system = _windows() if sys is None else sys
        system.load(sock.fileno())
        caps = Caps(
            Kind.DATAGRAM, "win-rio", max_batch, max_batch, min(max_packet, MAX_PACKET), peers, 1, pollable=False
        )
        super().__init__(caps, int(sock.family), system)
        self._sock, self._sys, self._slots = sock, system, slots
        self._ring = Ring(slots)
        self._post_lock = threading.Lock()
        self._key = 8 if self._family == int(socket.AF_INET) else NAME  # bytes of an address that tell senders apart
        self._senders: dict[bytes, Peer] = {}  # at most SENDERS, then all are forgotten
        self._posted = bytearray(slots)  # 1: the system may write into this slot
        self._idle: list[int] = []  # slots that could not be posted; tried again with the next batch
        self._failures = 0  # receives in a row that failed for no known reason
        self._rx_dead = self._tx_dead = False
        self._owed = False  # deferred sends whose commit failed
        self._lost = False  # the batch just submitted may have gone out: tells `_judge`
        with contextlib.ExitStack() as undo:
            undo.callback(self._close_events)
            self._build(undo)
            undo.pop_all()

    def _build(self, undo: contextlib.ExitStack) -> None:
        sys, slots = self._sys, self._slots
        self._memory = sys.allocate(2 * slots * SLOT)
        undo.callback(self._free_memory)
        self._export: Any = ctypes.c_char.from_buffer(self._memory)  # while it lives the memory stays mapped
        self._buffer = sys.register_buffer(ctypes.addressof(self._export), 2 * slots * SLOT)
        if self._buffer == RIO_INVALID_BUFFERID:
            raise OSError(sys.get_last_error(), "RIORegisterBuffer")
        undo.callback(sys.deregister_buffer, self._buffer)
        self._rx = Lane(sys, slots)
        undo.callback(self._rx.close_event)
        undo.callback(self._rx.close_queue)
        self._tx = Lane(sys, slots)
        undo.callback(self._tx.close_event)
        undo.callback(self._tx.close_queue)
        self._rx.aim(self._buffer, 0)
        self._tx.aim(self._buffer, slots * SLOT)
        number = self._sock.fileno()
        self._requests = sys.create_request_queue(number, slots, 1, slots, 1, self._rx.queue, self._tx.queue, 0)
        if not self._requests:
            raise OSError(sys.get_last_error(), "RIOCreateRequestQueue")
        sys.ignore_unreachable(number)
        # The first alone, at once: it tells whether receiving works at all.
        if not sys.receive_ex(self._requests, self._rx.bufs_at, 1, 0, self._rx.bufs_at + NAME_STEP, 0, 0, 0, 0):
            raise OSError(sys.get_last_error(), "RIOReceiveEx")
        self._posted[0] = 1
        self._post(list(range(1, slots)))

    # Receiving

    def make_batch(self) -> RxBatch:
        return RxBatch(self.caps.max_rx, 0)  # packets come as bytes of their own

    def _take(self, into: RxBatch) -> int:
        if self._rx_dead:
            return errno.EIO
        words, limit = self._rx.words, min(self.caps.max_rx, into.capacity)
        self.stats.rx_calls += 1
        count = self._sys.dequeue(self._rx.queue, self._rx.results_at, limit)
        if not count:
            return errno.EAGAIN
        if count > limit:  # RIO_CORRUPT_CQ is, too
            return self._give_up_receiving("RIODequeueCompletion returned %d for %d results", count, limit)
        end = RESULT * count
        slots = words[CONTEXT:end:RESULT].tolist()
        statuses = words[STATUS:end:RESULT].tolist()
        sizes = words[TRANSFERRED:end:RESULT].tolist()
        posted = self._posted
        for slot, size in zip(slots, sizes, strict=True):
            if slot >= self._slots or not posted[slot] or size > MAX_PACKET:
                return self._give_up_receiving("a receive of %d bytes came back for slot %d", size, slot)
            posted[slot] = 0
        self._copy_out(into, slots, statuses, sizes)
        return self._post(slots + self._idle)

    def _copy_out(self, into: RxBatch, slots: list[int], statuses: list[int], sizes: list[int]) -> None:
        memory, limit, peers = self._memory, self.caps.max_packet, self.caps.peers
        senders: list[Peer | None] = []
        entries: list[bytes] = []
        for slot, status, size in zip(slots, statuses, sizes, strict=True):
            if status:
                self._failures = self._failures + 1 if status not in PASSING else 0
                continue
            self._failures = 0
            if not 0 < size <= limit:
                continue
            at = slot * SLOT
            if peers:
                sender = self._sender(memory[at : at + NAME])
                if sender is None:  # a foreign address: nothing of this batch can be trusted
                    log_once("rio address", "Registered I/O: received from an address of another family")
                    into.dropped += len(slots)
                    return
                senders.append(sender)
            entries.append(memory[at + DATA_AT : at + DATA_AT + size])
        into.add_many(entries)
        into.dropped += len(slots) - len(entries)
        if senders:
            into.peers = senders
            if all(sender is senders[0] for sender in senders):
                into.uniform = senders[0]

    def _sender(self, name: bytes) -> Peer | None:
        """The peer behind an address; None if it is none of this socket's family."""
        key = name[: self._key]
        known = self._senders.get(key)
        if known is not None:
            return known
        peer = parse_peer(key if self._key == NAME else key + bytes(8), "windows")
        if peer is None or peer.family != self._family:
            return None
        if len(self._senders) >= SENDERS:
            self._senders.clear()
        self._senders[key] = peer
        return peer

    def _post(self, slots: list[int]) -> int:
        """Let the system receive into `slots`. 0, or an errno if nothing can be received any more."""
        sys, queue, posted, at = self._sys, self._requests, self._posted, self._rx.bufs_at
        flag = RIO_MSG_DEFER if len(slots) > 1 else 0
        done = error = 0
        with self._post_lock:
            for slot in slots:
                data = at + PAIR * slot
                if not sys.receive_ex(queue, data, 1, 0, data + NAME_STEP, 0, 0, flag, slot):
                    error = sys.get_last_error()
                    break
                posted[slot] = 1
                done += 1
        self._idle = slots[done:]
        if error:
            log_once(
                "RIOReceiveEx", "RIOReceiveEx failed (%d), %d of %d slots wait", error, len(slots) - done, len(slots)
            )
        if flag and done and not sys.receive_ex(queue, 0, 0, 0, 0, 0, 0, RIO_MSG_COMMIT_ONLY, 0):
            return self._give_up_receiving("the commit of %d receives failed (%d)", done, sys.get_last_error())
        if len(self._idle) == self._slots:
            return self._give_up_receiving("no receive can be posted (%d)%s", error, "")
        if self._failures >= self._slots:
            return self._give_up_receiving("%d receives in a row failed%s", self._failures, "")
        return 0

    def _give_up_receiving(self, message: str, *args: object) -> int:
        if not self._closing:
            log.error("Registered I/O: " + message, *args)
        self._rx_dead = True
        return errno.EIO

    def _arm_read(self) -> int:
        if error := errno.EIO if self._rx_dead else self._rx.arm():
            raise IOBroken(error, "RIONotify")
        return self._rx.event

    # Sending

    def _submit_one(self, item: bytes, peer: Peer | None) -> int:
        _, error = self._submit((item,), peer, 0, 1)
        return error

    def _submit(self, items: Sequence[bytes], peers: Peers, first: int, stop: int) -> tuple[int, int]:
        count = stop - first
        if not 1 <= count <= self.caps.max_tx:
            raise ValueError(f"a batch of {count} packets is not within 1..{self.caps.max_tx}")
        if error := self._make_room(count):
            return 0, error
        slots = [self._load(items[i], _one(peers, i)) for i in range(first, stop)]
        sys, queue, at = self._sys, self._requests, self._tx.bufs_at
        named = peers is not None
        flag = RIO_MSG_DEFER if count > 1 else 0
        done = error = 0
        with self._post_lock:
            for slot in slots:
                data = at + PAIR * slot
                if not sys.send_ex(queue, data, 1, 0, data + NAME_STEP if named else 0, 0, 0, flag, slot):
                    error = sys.get_last_error()
                    break
                done += 1
        for _ in range(count - done):
            self._ring.undo()
        if flag and done and (failure := self._commit()):
            # The deferred ones may have gone out, or may with the next commit; their slots stay taken until they do.
            log.error("RIOSendEx: the commit of %d packets failed (%d)", done, failure)
            if error:
                log.error("RIOSendEx: before that, packet %d of %d was refused (%d)", done, count, error)
            self._lost = self._owed = True
            return 0, failure
        if done:
            self._owed = False  # what is not deferred, and a commit, starts the older ones
        return done, error

    def _load(self, item: bytes, peer: Peer | None) -> int:
        """Copy one packet into the next slot."""
        slot, memory = self._ring.push(), self._memory
        at = (self._slots + slot) * SLOT
        if peer is not None:
            memory[at : at + len(peer.raw)] = peer.raw
        size = len(item)
        memory[at + DATA_AT : at + DATA_AT + size] = item
        self._tx.lengths[slot * (PAIR // 4) + LENGTH] = size
        return slot

    def _commit(self) -> int:
        """Start what was deferred. 0, or an error number. Needs no lock."""
        if self._sys.send_ex(self._requests, 0, 0, 0, 0, 0, 0, RIO_MSG_COMMIT_ONLY, 0):
            return 0
        return self._sys.get_last_error()

    def _make_room(self, count: int) -> int:
        """Take completions, and wait a little for more if the ring is full. 0, or an error number."""
        if error := self._reap():
            return error
        if self._ring.has_room(count):
            return 0
        if self._owed:  # nobody waits for completions while something deferred is not committed
            if failure := self._commit():
                return self._give_up_sending("the commit failed again (%d)", failure)
            self._owed = False
        deadline = time.monotonic() + PATIENCE
        index = 0
        while index >= 0 and not self._is_closing():
            if failure := self._tx.arm():
                return self._give_up_sending("RIONotify failed (%d)", failure)
            index = self._sys.wait_any((self._stop, self._tx.event), until(deadline))
            if error := self._reap():
                return error
            if self._ring.has_room(count):
                return 0
        return WSAEWOULDBLOCK

    def _reap(self) -> int:
        """Take all completions in one call. A packet that failed is a drop, it is never offered again."""
        if self._tx_dead:
            return errno.EIO
        lane = self._tx
        count = self._sys.dequeue(lane.queue, lane.results_at, self._slots)
        if not count:
            return 0
        if count > self._slots:
            return self._give_up_sending("RIODequeueCompletion returned %d", count)
        end = RESULT * count
        try:
            self._ring.settle(lane.words[CONTEXT:end:RESULT].tolist())
        except RingBroken as error:
            return self._give_up_sending("%s", error)
        statuses = lane.words[STATUS:end:RESULT].tolist()
        self.stats.tx_rejected += count - statuses.count(0)
        return 0

    def _give_up_sending(self, message: str, *args: object) -> int:
        if not self._closing:
            log.error("Registered I/O: " + message, *args)
        self._tx_dead = True
        return errno.EIO

    def _judge(self, error: int, items: Sequence[bytes], at: int) -> tuple[Verdict, int]:
        if self._lost:
            self._lost = False
            return Verdict.UNKNOWN, 1
        return Verdict.BROKEN if self._tx_dead else SEND.get(error, Verdict.REJECT), 1

    def _arm_write(self) -> int:
        if self._reap() or self._ring.has_room(self.caps.max_tx):
            return 0  # if it is broken, the next send says so
        if self._owed and not self._commit():
            self._owed = False
        return self._tx.event if not self._owed and not self._tx.arm() else 0

    # Closing

    def _free(self) -> None:
        # Closing the socket ends its requests. Only then the memory they point at may go.
        try:
            self._sock.close()
        except OSError as error:
            log.error("Registered I/O: the socket could not be closed (%s), its memory is kept", error)
            _kept.append((self._memory, self._export))
            return
        self._rx.close_queue()
        self._tx.close_queue()
        self._sys.deregister_buffer(self._buffer)
        self._free_memory()
        self._rx.close_event()
        self._tx.close_event()

    def _free_memory(self) -> None:
        self._export = None
        self._memory.close()


_kept: Final[list[object]] = []  # what the system may still write into


def _one(peers: Peers, index: int) -> Peer | None:
    return peers if peers is None or isinstance(peers, Peer) else peers[index]


def _windows() -> RioSys:
    from rnsfast.osio.windows import RioWindows

    return RioWindows()


def open_socket(family: int, sys: RioSys | None = None) -> socket.socket:
    """A datagram socket that Registered I/O can take over; an ordinary one where there is no Registered I/O.

    The functions work on either: `socket.bind`, options, and the portable back end.
    """
    with contextlib.suppress(OSError):
        return (_windows() if sys is None else sys).open_socket(family)
    return socket.socket(family, socket.SOCK_DGRAM)


def why_not(sys: RioSys | None = None) -> str | None:
    """Why Registered I/O cannot be used here; None if it can.

    Having the functions proves nothing: some security software lets the making of queues fail. So they are made once.
    """
    try:
        system = _windows() if sys is None else sys
        with system.open_socket(socket.AF_INET) as sock:
            system.load(sock.fileno())
            lane = Lane(system, 1)
            try:
                if not system.create_request_queue(sock.fileno(), 1, 1, 1, 1, lane.queue, lane.queue, 0):
                    return f"RIOCreateRequestQueue failed ({system.get_last_error()})"
            finally:
                sock.close()
                lane.close_queue()
                lane.close_event()
    except OSError as error:
        return f"{error.strerror or error} ({error.errno})"
    return None


def open_rio(
    sock: socket.socket,
    *,
    max_batch: int = BATCH,
    max_packet: int = MAX_PACKET,
    peers: bool = True,
    sys: RioSys | None = None,
) -> RioDatagramIO | None:
    """A back end for `sock`; None if Registered I/O cannot be used, which is logged once. Then `sock` is as before."""
    reason = why_not(sys)
    if reason is None:
        try:
            return RioDatagramIO(sock, max_batch=max_batch, max_packet=max_packet, peers=peers, sys=sys)
        except OSError as error:
            reason = f"{error.strerror or error} ({error.errno})"
    log_once("win-rio", "Registered I/O is not used: %s", reason)
    return None
