"""The announce bandwidth of an interface, and the queue of announces that wait for it.  Protocol 02, section 8.3."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Final

from rnsfast.engine.port import Port

QUEUE_LIMIT: Final = 4096  # announces; newer ones are dropped
AHEAD: Final = 0.05  # seconds of bandwidth that may be used in advance: on a fast interface many leave together
QUEUE_LIFETIME: Final = 10_800.0  # seconds


@dataclass(slots=True)
class Waiting:
    """One queued announce."""

    raw: bytes
    hops: int
    emitted: int
    since: float


class Outlet:
    """One interface's announce bandwidth. A deadline, not a thread: `advance` sends what may go."""

    __slots__ = ("_heap", "_numbers", "allowed_at", "dropped", "port", "queue")

    def __init__(self, port: Port) -> None:
        self.port = port
        self.allowed_at = 0.0  # monotonic seconds
        self.queue: dict[bytes, Waiting] = {}  # by destination, at most QUEUE_LIMIT
        self.dropped = 0
        self._heap: list[tuple[int, int, bytes, Waiting]] = []  # nearest first, then oldest; replaced ones are skipped
        self._numbers = count()

    def cost(self, size: int) -> float:
        """Seconds of silence that `size` bytes buy; 0 without a known bitrate."""
        bitrate, cap = self.port.bitrate, self.port.policy.announce_cap
        return size * 8 / bitrate / cap if bitrate > 0 and cap > 0 else 0.0

    def offer(self, destination: bytes, raw: bytes, hops: int, emitted: int, now: float) -> bool:
        """Send an announce now if that is allowed, else queue it. Whether it was sent."""
        if self.has_room(now):
            self.spend(len(raw), now)
            return self.port.send(raw)
        before = self.queue.get(destination)
        if before is not None:
            if emitted <= before.emitted:
                return False
        elif len(self.queue) >= QUEUE_LIMIT:
            self.dropped += 1
            return False
        waiting = self.queue[destination] = Waiting(raw, hops, emitted, now)  # behind the others as near
        heappush(self._heap, (hops, next(self._numbers), destination, waiting))
        if len(self._heap) > 2 * QUEUE_LIMIT:
            self._heap = sorted(entry for entry in self._heap if self.queue.get(entry[2]) is entry[3])
        return False

    def has_room(self, now: float) -> bool:
        """Whether something of the same bandwidth may go out at once."""
        return not self.queue and now + AHEAD >= self.allowed_at

    def spend(self, size: int, now: float) -> None:
        """`size` bytes went out on this bandwidth."""
        self.allowed_at = max(self.allowed_at, now) + self.cost(size)

    def advance(self, now: float) -> None:
        """Send the nearest, of several the oldest, if its time has come."""
        queue, heap = self.queue, self._heap
        while queue and now + AHEAD >= self.allowed_at:
            _, _, destination, waiting = heappop(heap)
            if queue.get(destination) is not waiting:
                continue
            del queue[destination]
            if now - waiting.since <= QUEUE_LIFETIME:
                self.spend(len(waiting.raw), now)
                self.port.send(waiting.raw)

    @property
    def due(self) -> float:
        """When `advance` has something to do; infinity if nothing waits."""
        return self.allowed_at if self.queue else inf
