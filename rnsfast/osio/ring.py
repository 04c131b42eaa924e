"""Which slots of a transmit ring are in use.  Protocol 09, section 4.3.

Two counters run free in 32 bits: `tail` counts what was pushed, `head` what is free again. Everything else is derived
from them, so nothing can disagree. The ring does no I/O and takes no lock; the holder of the transmit lock uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

WRAP: Final = 0xFFFFFFFF


class RingBroken(Exception):
    """The system reported completions that cannot be, or more was pushed than fits: the ring cannot be trusted."""


class Ring:
    """`size` slots, a power of two, handed out and given back in order."""

    __slots__ = ("_early", "_order", "head", "mask", "size", "tail")

    def __init__(self, size: int, start: int = 0) -> None:
        if size < 1 or size & (size - 1):
            raise ValueError(f"a ring of {size} slots: the number is not a power of two")
        self.size, self.mask = size, size - 1
        self.head = self.tail = start & WRAP
        self._early: set[int] = set()  # slots that completed before an older one did
        self._order = [*range(size), *range(size)]

    @property
    def used(self) -> int:
        return (self.tail - self.head) & WRAP

    @property
    def free(self) -> int:
        return self.size - self.used

    @property
    def is_full(self) -> bool:
        return self.used == self.size

    def has_room(self, count: int) -> bool:
        """Whether `count` slots can be pushed now."""
        return self.free >= count

    def push(self) -> int:
        """Take the next slot."""
        if self.is_full:
            raise RingBroken(f"all {self.size} slots are in use")
        slot = self.tail & self.mask
        self.tail = (self.tail + 1) & WRAP
        return slot

    def undo(self) -> None:
        """Give back the slot taken last, which was never submitted."""
        if self.head == self.tail:
            raise RingBroken("no slot is in use")
        self.tail = (self.tail - 1) & WRAP

    def reap(self, count: int) -> None:
        """Free the `count` oldest slots."""
        if count > self.used:
            raise RingBroken(f"{count} completions for {self.used} slots in use")
        self.head = (self.head + count) & WRAP

    def settle(self, slots: Sequence[int]) -> None:
        """Free the slots of as many completions. One that overtook an older one is free when the older one is."""
        count, at = len(slots), self.head & self.mask
        if count > self.used - len(self._early):
            raise RingBroken(f"{count} completions for {self.used - len(self._early)} slots in use")
        if not self._early and self._order[at : at + count] == slots:
            self.head = (self.head + count) & WRAP
            return
        early, used = self._early, self.used
        for slot in slots:
            if not 0 <= slot < self.size or (slot - at) & self.mask >= used or slot in early:
                raise RingBroken(f"a completion for slot {slot}, which is not in use")
            early.add(slot)
        while self.head & self.mask in early:
            early.remove(self.head & self.mask)
            self.reap(1)
