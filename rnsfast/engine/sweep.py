"""Looking through whole tables without anybody waiting for it: a slice, a pause, the next slice."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from math import inf
from typing import Final

from rnsfast.engine.timers import Timers

SLICE: Final = 1024  # entries looked at in one go: at most two milliseconds
PAUSE: Final = 0.01  # seconds in between

Look = Callable[[list[bytes], float], None]


class Round:
    """One table and what is to be done with its entries. `look` gets keys of entries that may be gone by now."""

    __slots__ = ("again", "at", "keys", "look", "table")

    def __init__(self, table: Callable[[], Mapping[bytes, object]], look: Look) -> None:
        self.table, self.look = table, look
        self.keys: list[bytes] | None = None  # of the round that is under way
        self.at = 0
        self.again = False  # something has changed since it began


class Sweeper:
    """Does rounds one after the other. A deadline, not a thread.

    Whoever begins a round that is under way gets another one after it, and that is all: however often somebody has
    a reason, the work is bounded. Small tables are done at once.
    """

    def __init__(self, timers: Timers) -> None:
        self.armed = inf
        self._timers = timers
        self._rounds: deque[Round] = deque()
        self._due = inf

    def begin(self, round_: Round, now: float) -> None:
        """Look through the table of `round_`."""
        if round_.keys is not None:
            round_.again = True
            return
        self._start(round_)
        self._rounds.append(round_)
        if len(self._rounds) == 1:
            self._step(now)

    def _start(self, round_: Round) -> None:
        round_.keys, round_.at, round_.again = list(round_.table()), 0, False

    def _step(self, now: float) -> None:
        round_ = self._rounds[0]
        assert round_.keys is not None
        part = round_.keys[round_.at : round_.at + SLICE]
        round_.at += SLICE
        round_.look(part, now)
        if round_.at >= len(round_.keys):
            self._rounds.popleft()
            round_.keys = None
            if round_.again:
                self._start(round_)
                self._rounds.append(round_)
        self._due = now + PAUSE if self._rounds else inf
        self._timers.arm(self, self._due)

    def advance(self, now: float) -> float:
        """One more slice."""
        if now >= self._due:
            self._step(now)
        return self._due
