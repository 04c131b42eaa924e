"""Errands with a clock that tests move, on the test's own thread."""

from __future__ import annotations

import heapq
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count


class FakeHandle:
    def __init__(self, fn: Callable[[], None]) -> None:
        self.fn: Callable[[], None] | None = fn

    def cancel(self) -> None:
        self.fn = None


class FakeWork:
    """Implements `Work`. `advance` makes errands in order, each at its time."""

    def __init__(self) -> None:
        self.began = self.time = 1000.0
        self.stopping = threading.Event()
        self._soon: deque[Callable[[], None]] = deque()
        self._calls: list[tuple[float, int, FakeHandle]] = []
        self._numbers = count()

    @property
    def planned(self) -> int:
        """Deadlines that are set."""
        return sum(call.fn is not None for _, _, call in self._calls)

    def now(self) -> float:
        return self.time

    def unix_time(self) -> float:
        return self.time + 1_700_000_000.0

    def run(self, errand: Callable[[], None]) -> None:
        self._soon.append(errand)

    def run_at(self, when: float, errand: Callable[[], None]) -> FakeHandle:
        call = FakeHandle(errand)
        heapq.heappush(self._calls, (when, next(self._numbers), call))
        return call

    def run_program(self, command: Sequence[str]) -> str:
        done = subprocess.run(list(command), capture_output=True, text=True, timeout=10, check=False)
        if done.returncode:
            raise OSError(f"{command[0]} ended with status {done.returncode}")
        return done.stdout.strip()

    def advance(self, seconds: float) -> None:
        end = self.time + seconds
        while True:
            while self._soon:
                self._soon.popleft()()
            if not self._calls or self._calls[0][0] > end:
                break
            when, _, call = heapq.heappop(self._calls)
            self.time = max(self.time, when)
            if call.fn is not None:
                self.run(call.fn)
        self.time = end
