"""A packet back end that follows a script, and that keeps the rules of the contract."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from rnsfast.osio.contract import Caps, IOClosed, Kind, Peer, RxBatch, Stats, TxResult, TxState


@dataclass(frozen=True)
class Outcome:
    """What becomes of one submission: how far it gets, what is refused on the way, and how it ends."""

    state: TxState = TxState.DONE
    taken: int | None = None  # None: all
    rejected: tuple[tuple[int, int], ...] = ()
    errno: int = 0


@dataclass(frozen=True)
class Fill:
    """What one receive brings."""

    packets: tuple[bytes, ...] = ()
    dropped: int = 0


DONE = Outcome()


def blocked(taken: int = 0) -> Outcome:
    return Outcome(TxState.BLOCKED, taken)


class ScriptedIO:
    """A submission beyond the script is taken whole; a receive beyond it finds nothing.

    A step of `receives` is a Fill or an exception. A pollable one has a real descriptor: `ring` makes it readable, and
    the next receive ends that, whatever it brings, since a back end may hold more than the system does.
    """

    def __init__(
        self,
        *outcomes: Outcome,
        receives: Sequence[Fill | OSError] = (),
        pollable: bool = True,
        capacity: int = 4,
    ) -> None:
        self.caps = Caps(Kind.DATAGRAM, "scripted", capacity, 64, 1080, False, 1, pollable)
        self.stats = Stats()
        self.outcomes = deque(outcomes)
        self.receives = deque(receives)
        self.calls: list[tuple[str, list[bytes]]] = []  # of sending
        self.peers: list[object] = []
        self.wire: list[bytes] = []
        self.recv_calls = 0
        self.recv_threads: set[threading.Thread] = set()
        self.closes = 0
        self._steps: queue.SimpleQueue[Fill | OSError] = queue.SimpleQueue()  # for the thread of one without descriptor
        self._near, self._far = socket.socketpair()
        self._near.setblocking(False)
        if not pollable:
            for step in receives:
                self._steps.put(step)

    def fileno(self) -> int:
        return self._near.fileno() if self.caps.pollable else -1

    def make_batch(self) -> RxBatch:
        return RxBatch(self.caps.max_rx, 0)

    # receiving

    def ring(self) -> None:
        self._far.send(b".")

    def bring(self, *steps: Fill | OSError) -> None:
        """More receives, and the descriptor becomes readable."""
        if self.caps.pollable:
            self.receives += steps
            self.ring()
        else:
            for step in steps:
                self._steps.put(step)

    def recv(self, into: RxBatch, timeout: float | None = 0.0) -> int:
        self.recv_calls += 1
        self.recv_threads.add(threading.current_thread())
        into.clear()
        if not self.caps.pollable:
            assert timeout is None
            step: Fill | OSError = self._steps.get()
        else:
            assert timeout == 0.0
            if self.closes:
                raise IOClosed
            with contextlib.suppress(BlockingIOError):
                self._near.recv(64)
            if not self.receives:
                return 0
            step = self.receives.popleft()
        if isinstance(step, OSError):
            raise step
        assert len(step.packets) <= into.capacity
        into.add_many(step.packets)
        into.dropped = step.dropped
        return len(step.packets)

    # sending

    def send_one(self, item: bytes, peer: Peer | None = None) -> TxResult:
        return self._send("send_one", [item], peer)

    def send(
        self, items: Sequence[bytes], peers: Sequence[Peer] | Peer | None = None, start: int = 0, offset: int = 0
    ) -> TxResult:
        assert start == offset == 0
        return self._send("send", list(items), peers)

    def _send(self, name: str, items: list[bytes], peers: object) -> TxResult:
        assert items
        self.calls.append((name, items))
        self.peers.append(peers)
        if self.closes:
            return TxResult(0, 0, (), 0, TxState.CLOSED)
        step = self.outcomes.popleft() if self.outcomes else DONE
        taken = len(items) if step.taken is None else step.taken
        refused = {index for index, _ in step.rejected}
        sent = [item for index, item in enumerate(items[:taken]) if index not in refused]
        self.wire += sent
        return TxResult(taken, len(sent), step.rejected, 0, step.state, step.errno)

    def wait(self, timeout: float | None, read: bool = True, write: bool = False) -> int:
        raise AssertionError("nobody waits on a back end that is polled")

    def wake(self) -> None:
        raise AssertionError("nothing needs this")

    def close(self) -> None:
        if not self.closes:
            self._steps.put(IOClosed())
            self._near.close()
            self._far.close()
        self.closes += 1
