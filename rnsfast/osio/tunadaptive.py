"""Reading and writing a TUN device with or without the GIL, whichever is better now.

`os.read` lets go of the GIL at every packet. Alone that is the faster way; beside a thread that computes, each packet
may wait a switch interval to get it back. So a batch begins by `os.read`, a few packets at a time with a look at the
clock. When a few take far too long, the rest of the batch goes through calls that keep the GIL. That may have been an
accident of the scheduler; if the next batch meets with the same, somebody else has the interpreter, and the batches
after it keep the GIL from the start. After some of them the other way is tried again; each time that fails, it is tried
half as often.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from itertools import repeat
from time import perf_counter
from typing import Final

from rnsfast.osio.tun import LibcCalls, TunSys
from rnsfast.osio.virtio import ROOM

GROUP: Final = 16  # packets between two looks at the clock
SLOW: Final = 0.001  # seconds for a group: eighty times what it takes alone, a fifth of the switch interval
FIRST: Final = 64  # batches that keep the GIL after the first slow group
MOST: Final = 65_536  # batches at most

_ROOMS: Final = repeat(ROOM)  # as many as are asked for


class Mood:
    """Whether to keep the GIL now. One for each direction, since they run on different threads."""

    __slots__ = ("clock", "keeping", "slow", "span", "suspects")

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.keeping = 0  # batches for which the GIL is still kept
        self.span = FIRST
        self.slow = 0  # groups that took too long, so far
        self.suspects = False  # the last batch that was tried had one

    def keeps(self) -> bool:
        """At the beginning of a batch."""
        if not self.keeping:
            return False
        self.keeping -= 1
        return True

    def waited(self) -> None:
        """A group took too long."""
        self.slow += 1
        if self.suspects:
            self.keeping = self.span
            self.span = min(2 * self.span, MOST)
        self.suspects = True

    def went_well(self) -> None:
        """A batch did not."""
        self.suspects = False
        self.span = max(self.span // 2, FIRST)


class AdaptiveCalls(LibcCalls):
    """The system calls of a TUN device on Linux; see the module. One reader and one writer at a time."""

    def __init__(
        self,
        sys: TunSys | None = None,
        *,
        read: Callable[[int, int], bytes] = os.read,
        write: Callable[[int, bytes], int] = os.write,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        super().__init__(sys)
        self._os_read, self._os_write = read, write
        self.reading, self.writing = Mood(clock), Mood(clock)

    def read_many(self, fd: int, count: int, budget: int) -> tuple[list[bytes], int]:
        mood = self.reading
        if mood.keeps():
            return super().read_many(fd, count, budget)
        read, clock, room = self._os_read, mood.clock, ROOM
        found: list[bytes] = []
        done, used, group = 0, 0, 1 + budget // room
        began = clock()
        try:
            while done < count and budget > 0:
                # What has been read stands in the list when a later read raises.
                found.extend(map(read, repeat(fd, min(GROUP, count - done, group)), _ROOMS))
                if not all(found):
                    return list(filter(None, found)), errno.EAGAIN
                now = clock()
                size = sum(map(len, found[done:]))
                used += size
                budget -= size
                done = len(found)
                group = 1 + budget * done // used  # as many as fit if they go on like this
                if now - began > SLOW:
                    mood.waited()
                    if done < count and budget > 0:
                        more, error = super().read_many(fd, count - done, budget)
                        return found + more, error
                    return found, 0
                began = now
        except OSError as error:
            if clock() - began > SLOW:
                mood.waited()
            elif found:
                mood.went_well()
            return found, error.errno or errno.EIO
        mood.went_well()
        return found, 0

    def write_many(self, fd: int, packets: Sequence[bytes]) -> tuple[int, int]:
        mood = self.writing
        if mood.keeps():
            return super().write_many(fd, packets)
        write, clock = self._os_write, mood.clock
        done, began = 0, clock()
        try:
            for packet in packets:
                if not write(fd, packet):
                    return done, errno.ENXIO
                done += 1
                if not done % GROUP:
                    now = clock()
                    if now - began > SLOW:
                        mood.waited()
                        more, error = super().write_many(fd, packets[done:])
                        return done + more, error
                    began = now
        except OSError as error:
            return done, error.errno or errno.EIO
        mood.went_well()
        return done, 0
