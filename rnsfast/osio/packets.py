"""Receiving and sending packets in batches, whatever the system call.  Protocol 09, sections 4.1, 4.2 and 4.5.

    receive   take what is there; only if nothing is there wait for the first packet; never wait for a second
    send      one packet by the plain call; several in chunks, each one kick; a refused packet costs only itself

A back end supplies `_take`, `_submit` and `_submit_one`; what its errors mean is `_judge`.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from typing import Final

from rnsfast.osio.contract import Caps, IOBroken, IOClosed, Peer, RxBatch, Stats, TxResult, TxState
from rnsfast.osio.descriptor import Descriptor
from rnsfast.osio.verdicts import PASSING_RECEIVE, REPEATS, SEND, Verdict

Peers = Sequence[Peer] | Peer | None

EMPTY_FILLS: Final = 8  # fills in a row of which nothing was left, until the caller gets its turn back
EAGAIN: Final = frozenset({errno.EAGAIN, errno.EWOULDBLOCK})


class PacketIO(Descriptor):
    """One datagram socket or TUN device. See `contract.BatchIO`.

    Args:
        caps: what the back end found out about itself.
        family: the address family of peers; None if packets carry none.
    """

    def __init__(self, caps: Caps, family: int | None) -> None:
        super().__init__()
        self.caps = caps
        self.stats = Stats()
        self._family = family
        self._kept = 0  # an error that came after a packet, for the next receive

    # What a back end supplies

    def _take(self, into: RxBatch) -> int:
        """Add what is there, without waiting, up to `into.capacity`. 0, or the errno that ended it."""
        raise NotImplementedError

    def _submit(self, items: Sequence[bytes], peers: Peers, first: int, stop: int) -> tuple[int, int]:
        """Offer `items[first:stop]`, at least two. How many were taken, and the errno that stopped it, 0 if none."""
        raise NotImplementedError

    def _submit_one(self, item: bytes, peer: Peer | None) -> int:
        """Offer one packet by the plain call. 0, or an errno."""
        raise NotImplementedError

    def _judge(self, error: int, items: Sequence[bytes], at: int) -> tuple[Verdict, int]:
        """What `error` says about the packets from `at` on, and about how many of them."""
        return SEND.get(error, Verdict.REJECT), 1

    def _is_valid(self, item: bytes) -> bool:
        """Whether a packet may be offered at all (protocol 09, R14)."""
        return 0 < len(item) <= self.caps.max_packet

    def _all_valid(self, items: Sequence[bytes]) -> bool:
        """`_is_valid` for many, at least one; a back end that can tell faster does."""
        return all(map(self._is_valid, items))

    # Receiving

    def make_batch(self) -> RxBatch:
        return RxBatch(self.caps.max_rx, self.caps.max_packet)

    def recv(self, into: RxBatch, timeout: float | None = 0.0) -> int:
        deadline: float | None = None
        first = True
        into.dropped = 0
        while True:
            count = self._fill(into)
            if count or timeout == 0.0:
                return count
            if first and timeout is not None:
                deadline = time.monotonic() + timeout
            first = False
            if not self._wait_readable(deadline):
                return 0

    def _fill(self, into: RxBatch) -> int:
        stats, dropped = self.stats, into.dropped  # what was refused counts on until something is handed over
        with self._rx_lock:
            for _ in range(EMPTY_FILLS):
                if self._closing:
                    raise IOClosed
                if self._kept:
                    error, self._kept = self._kept, 0
                    raise IOBroken(error, os.strerror(error))
                into.clear()
                error = self._take(into)
                stats.rx_dropped += into.dropped
                dropped = into.dropped = dropped + into.dropped
                fatal = error != 0 and error not in EAGAIN and error not in PASSING_RECEIVE
                if count := into.count:
                    stats.rx_packets += count
                    stats.rx_bytes += into.size
                    if fatal:
                        self._kept = error
                    return count
                if fatal:
                    if self._is_closing():
                        raise IOClosed
                    raise IOBroken(error, os.strerror(error))
                if error in EAGAIN:
                    return 0
        return 0  # all of it was refused: there may be more

    # Sending

    def send_one(self, item: bytes, peer: Peer | None = None) -> TxResult:
        with self._tx_lock:
            return self._send_one(item, peer, 0)

    def send(self, items: Sequence[bytes], peers: Peers = None, start: int = 0, offset: int = 0) -> TxResult:
        with self._tx_lock:
            if len(items) - start == 1:
                peer = peers if peers is None or isinstance(peers, Peer) else peers[start]
                return self._send_one(items[start], peer, start)
            return self._send_many(items, peers, start)

    def _send_one(self, item: bytes, peer: Peer | None, index: int) -> TxResult:
        stats = self.stats
        if self._closing:
            return TxResult(index, 0, (), 0, TxState.CLOSED)
        if not self._is_valid(item):
            return self._rejected_one(index, self._invalidity(item))
        if peer is not None and peer.family != self._family:
            return self._rejected_one(index, errno.EAFNOSUPPORT)
        for repeat in range(REPEATS + 1):
            error = errno.EINTR
            while error == errno.EINTR:
                stats.tx_calls += 1
                error = self._submit_one(item, peer)
            if not error:
                stats.tx_packets += 1
                stats.tx_bytes += len(item)
                return TxResult(index + 1, 1, (), 0, TxState.DONE)
            if self._is_closing():
                return TxResult(index, 0, (), 0, TxState.CLOSED)
            verdict, _ = self._judge(error, (item,), 0)
            if verdict is Verdict.AGAIN or (verdict is Verdict.REPEAT and repeat < REPEATS):
                continue
            break
        if verdict in _ENDS:
            return self._end(verdict, error, index, 0, (), 1)
        return self._rejected_one(index, error)

    def _rejected_one(self, index: int, error: int) -> TxResult:
        self.stats.tx_rejected += 1
        return TxResult(index + 1, 0, ((index, error),), 0, TxState.DONE)

    def _invalidity(self, item: bytes) -> int:
        """Why `item` is not offered to the system."""
        return errno.EMSGSIZE if len(item) > self.caps.max_packet else errno.EINVAL

    def _send_many(self, items: Sequence[bytes], peers: Peers, start: int) -> TxResult:
        # `order` says where the entries of `valid` stand in `items`: those that are left out make holes.
        valid, to, order, refused = self._sort_out(items, peers, start)
        stats, max_tx, end = self.stats, self.caps.max_tx, len(valid)
        rejected = list(refused)
        at = sent = repeats = 0
        while at < end:
            if self._closing:
                return self._finish(TxState.CLOSED, 0, order[at], sent, rejected)
            stop = min(end, at + max_tx)
            stats.tx_calls += 1
            if stop - at == 1:
                error = self._submit_one(valid[at], to if to is None or isinstance(to, Peer) else to[at])
                taken = 0 if error else 1
            else:
                taken, error = self._submit(valid, to, at, stop)
            if taken:
                stats.tx_packets += taken
                stats.tx_bytes += sum(map(len, valid[at : at + taken]))
                at += taken
                sent += taken
                repeats = 0
                if at == stop or not error:  # a short count: the next call says why
                    stats.tx_short += at < stop
                    continue
            if not error:
                return self._finish(TxState.BROKEN, errno.EIO, order[at], sent, rejected)  # no progress: never loop
            if self._is_closing():  # whatever it says, it is about that
                return self._finish(TxState.CLOSED, 0, order[at], sent, rejected)
            verdict, span = self._judge(error, valid, at)
            if verdict is Verdict.REPEAT:
                repeats += 1
                verdict = Verdict.RETRY if repeats <= REPEATS else Verdict.REJECT
            if verdict is Verdict.REJECT:
                rejected += [(order[j], error) for j in range(at, min(end, at + span))]
                at = min(end, at + span)
                repeats = 0
            elif verdict in _ENDS:
                return self._end(verdict, error, order[at], sent, rejected, len(items) - order[at])
        return self._finish(TxState.DONE, 0, len(items), sent, rejected)

    def _end(
        self, verdict: Verdict, error: int, taken: int, sent: int, rejected: Sequence[tuple[int, int]], left: int
    ) -> TxResult:
        if verdict is Verdict.BLOCKED:
            self.stats.tx_blocked += 1
        elif verdict is Verdict.UNKNOWN:
            self.stats.tx_unknown += left
        return self._finish(_ENDS[verdict], error, taken, sent, rejected)

    def _finish(
        self, state: TxState, error: int, taken: int, sent: int, rejected: Sequence[tuple[int, int]]
    ) -> TxResult:
        # What was refused beyond `taken` is offered, and refused, again.
        settled = tuple(sorted(entry for entry in rejected if entry[0] < taken))
        self.stats.tx_rejected += len(settled)
        return TxResult(taken, sent, settled, 0, state, error)

    def _sort_out(
        self, items: Sequence[bytes], peers: Peers, start: int
    ) -> tuple[Sequence[bytes], Peers, Sequence[int], list[tuple[int, int]]]:
        """What may be offered, where it stands in `items`, and what may not with the reason."""
        one = peers if isinstance(peers, Peer) else None
        each = None if peers is None or one is not None else peers
        family = self._family
        families_fit = (one is None or one.family == family) and (
            each is None or all(peer.family == family for peer in each)  # type: ignore[union-attr]
        )
        if families_fit and items and self._all_valid(items):
            if not start:
                return items, peers, range(len(items)), []
            rest = each[start:] if each is not None else peers  # type: ignore[index]
            return items[start:], rest, range(start, len(items)), []
        order: list[int] = []
        refused: list[tuple[int, int]] = []
        for i in range(start, len(items)):
            peer = one if each is None else each[i]  # type: ignore[index]
            if not self._is_valid(items[i]):
                refused.append((i, self._invalidity(items[i])))
            elif peer is not None and peer.family != family:
                refused.append((i, errno.EAFNOSUPPORT))
            else:
                order.append(i)
        to = peers if each is None else [each[i] for i in order]  # type: ignore[index]
        return [items[i] for i in order], to, order, refused


_ENDS: Final = {
    Verdict.BLOCKED: TxState.BLOCKED,
    Verdict.UNKNOWN: TxState.UNKNOWN,
    Verdict.BROKEN: TxState.BROKEN,
}
