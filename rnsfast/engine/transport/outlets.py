"""The announce bandwidth of an interface, and the queue of announces that wait for it.  Protocol 02, section 8.3."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final

from rnsfast.engine.port import Port

QUEUE_LIMIT: Final = 4096  # announces; newer ones are dropped
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

    __slots__ = ("allowed_at", "dropped", "port", "queue")

    def __init__(self, port: Port) -> None:
        self.port = port
        self.allowed_at = 0.0  # monotonic seconds
        self.queue: dict[bytes, Waiting] = {}  # by destination, at most QUEUE_LIMIT
        self.dropped = 0

    def cost(self, size: int) -> float:
        """Seconds of silence that `size` bytes buy; 0 without a known bitrate."""
        bitrate, cap = self.port.bitrate, self.port.policy.announce_cap
        return size * 8 / bitrate / cap if bitrate > 0 and cap > 0 else 0.0

    def offer(self, destination: bytes, raw: bytes, hops: int, emitted: int, now: float) -> bool:
        """Send an announce now if that is allowed, else queue it. Whether it was sent."""
        if not self.queue and now >= self.allowed_at:
            self.allowed_at = now + self.cost(len(raw))
            return self.port.send(raw)
        before = self.queue.get(destination)
        if before is not None:
            if emitted > before.emitted:
                del self.queue[destination]  # to the back
                self.queue[destination] = Waiting(raw, hops, emitted, now)
        elif len(self.queue) < QUEUE_LIMIT:
            self.queue[destination] = Waiting(raw, hops, emitted, now)
        else:
            self.dropped += 1
        return False

    def has_room(self, now: float) -> bool:
        """Whether something of the same bandwidth may go out at once."""
        return not self.queue and now >= self.allowed_at

    def spend(self, size: int, now: float) -> None:
        """`size` bytes went out on this bandwidth."""
        self.allowed_at = now + self.cost(size)

    def advance(self, now: float) -> None:
        """Send the nearest, of several the oldest, if its time has come."""
        queue = self.queue
        if queue and now >= self.allowed_at:
            for destination in [d for d, w in queue.items() if now - w.since > QUEUE_LIFETIME]:
                del queue[destination]
        while queue and now >= self.allowed_at:
            destination = min(queue, key=lambda d: (queue[d].hops, queue[d].since))
            waiting = queue.pop(destination)
            self.allowed_at = now + self.cost(len(waiting.raw))
            self.port.send(waiting.raw)

    @property
    def due(self) -> float:
        """When `advance` has something to do; infinity if nothing waits."""
        return self.allowed_at if self.queue else inf
