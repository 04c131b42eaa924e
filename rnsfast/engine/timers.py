"""Deadlines of everything in the engine, in one heap.

A target is armed for the earliest moment it asked for.  Asking for a later one does nothing: the target is called at
the earlier moment, finds nothing due, and says when it wants to be called again.  So work that moves a deadline back
with every packet costs nothing per packet.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import Final, Protocol

SLACK: Final = 16  # dead entries that are not worth cleaning up; each keeps its target in memory


class Target(Protocol):
    """Something with deadlines. `armed` belongs to Timers and starts as infinity."""

    armed: float

    def advance(self, now: float) -> float:
        """Do what is due; return the next deadline, infinity for none. Early, late and repeated calls are harmless."""
        ...


class Timers:
    """The heap. One entry a target, plus those that were replaced by an earlier one and not yet reached."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Target]] = []
        self._dead = 0  # entries that were replaced or disarmed; at most half of the heap, and SLACK
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._heap)

    def arm(self, target: Target, when: float) -> None:
        """Have `target` called at `when`, if it is not called earlier anyway."""
        if when < target.armed:
            if target.armed != inf:
                self._bury()
            target.armed = when
            heappush(self._heap, (when, next(self._numbers), target))

    def disarm(self, target: Target) -> None:
        """`target` has come to its end: it is not called any more, nor kept."""
        if target.armed != inf:
            target.armed = inf
            self._bury()

    def _bury(self) -> None:
        self._dead += 1
        if self._dead > SLACK and self._dead > len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if entry[2].armed == entry[0]]
            heapify(self._heap)
            self._dead = 0

    def advance(self, now: float) -> float:
        """Call everything that is due. Returns the next deadline, infinity for none."""
        while self._heap and self._heap[0][0] <= now:
            when, _, target = heappop(self._heap)
            if target.armed == when:  # else an earlier entry has done its work
                target.armed = inf
                self.arm(target, target.advance(now))
            else:
                self._dead -= 1
        return self.deadline

    @property
    def deadline(self) -> float:
        """When to call `advance` next."""
        return self._heap[0][0] if self._heap else inf
