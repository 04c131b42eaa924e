"""Deadlines of everything in the engine, in one heap.

A target is armed for the earliest moment it asked for.  Asking for a later one does nothing: the target is called at
the earlier moment, finds nothing due, and says when it wants to be called again.  So work that moves a deadline back
with every packet costs nothing per packet.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Protocol


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
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._heap)

    def arm(self, target: Target, when: float) -> None:
        """Have `target` called at `when`, if it is not called earlier anyway."""
        if when < target.armed:
            target.armed = when
            heappush(self._heap, (when, next(self._numbers), target))

    def advance(self, now: float) -> float:
        """Call everything that is due. Returns the next deadline, infinity for none."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            when, _, target = heappop(heap)
            if target.armed == when:  # else an earlier entry has done its work
                target.armed = inf
                self.arm(target, target.advance(now))
        return heap[0][0] if heap else inf

    @property
    def deadline(self) -> float:
        """When to call `advance` next."""
        return self._heap[0][0] if self._heap else inf
