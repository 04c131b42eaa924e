"""Waiting for a condition of the engine: in a thread, or in an asyncio loop.

A predicate is tested and the wait begins under the node's lock, so a change between the two cannot be lost.  Whoever
waits is told once a batch, after the batch's packets have been flushed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import Any


class Waitable:
    """Something of the engine that others wait for. Put into the engine object's `owner`."""

    __slots__ = ("__weakref__", "_condition", "_lock", "_sleepers", "_watchers")

    def __init__(self, lock: Any) -> None:
        self._lock = lock  # the node's
        self._condition: threading.Condition | None = None
        self._sleepers = 0
        self._watchers: dict[Callable[[], object], None] = {}  # in order of arrival

    @property
    def has_waiters(self) -> bool:
        """Whether `notify` would reach anybody. Under the lock."""
        return bool(self._sleepers or self._watchers)

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None) -> bool:
        """Wait, the lock held, until `predicate()` is true. False if `timeout` seconds pass first; None: no limit."""
        if predicate():
            return True
        if timeout is not None and timeout <= 0:
            return False
        end = None if timeout is None else monotonic() + timeout
        if self._condition is None:
            self._condition = threading.Condition(self._lock)
        condition = self._condition
        self._sleepers += 1
        try:
            while True:
                remaining = None if end is None else end - monotonic()
                if remaining is not None and remaining <= 0:
                    return bool(predicate())
                condition.wait(None if remaining is None else min(remaining, threading.TIMEOUT_MAX))
                if predicate():
                    return True
        finally:
            self._sleepers -= 1

    def watch(self, ring: Callable[[], object]) -> None:
        """Have `ring` called once, without the lock, after the next change. Under the lock.

        Look, then watch, both in one critical section; when it has rung, look again. `ring` must not block.
        """
        self._watchers[ring] = None

    def unwatch(self, ring: Callable[[], object]) -> None:
        """No more. Under the lock; harmless if it has rung."""
        self._watchers.pop(ring, None)

    def notify(self) -> list[Callable[[], object]]:
        """Wake the threads; return what must be rung after the lock is released. Under the lock."""
        if self._sleepers and self._condition is not None:
            self._condition.notify_all()
        rings = list(self._watchers)
        self._watchers.clear()
        return rings
