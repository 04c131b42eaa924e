"""Finding a path to a destination: ask, wait for the answer, ask again.  Protocol 02, section 7."""

from __future__ import annotations

import time
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Final

from rnsfast.errors import NodeClosed, PathNotFound

if TYPE_CHECKING:
    from rnsfast.node.listener import NodeListener
    from rnsfast.node.reactor import Reactor

ASK_AGAIN: Final = 5.0  # seconds after which a path request that brought nothing is repeated


class PathSearch:
    """One caller's wait for a path that is usable and an identity that is known. A context manager.

    The caller alternates `ask` and a wait on `waiter` for `has_news`, at most `patience()` seconds, until one is true.
    With `fresh`, a path that is known already does not count.
    """

    def __init__(
        self, listener: NodeListener, reactor: Reactor, destination: bytes, end: float | None, *, fresh: bool
    ) -> None:
        self._listener, self._reactor, self._destination = listener, reactor, destination
        self._end = inf if end is None else end
        self._started = monotonic()
        self._interfaces = 0
        self.waiter = listener.path_waiter(destination)
        with reactor.lock:
            self._before = self._mark() if fresh else None

    def _mark(self) -> tuple[bytes, int] | None:
        path = self._reactor.engine.paths.usable(self._destination)
        return None if path is None else (path.packet_hash, path.confirmed)

    def found(self) -> bool:
        """Under the lock. NodeClosed if the node was stopped."""
        if self._reactor.closed:
            raise NodeClosed("the node was stopped while a path was looked for")
        mark = self._mark()
        if mark is None or mark == self._before:
            return False
        return self._reactor.engine.recall(self._destination, time.time()) is not None

    def ask(self, now: float) -> bool:
        """In a turn: true if there is a path now; else it has been asked for."""
        if self.found():
            return True
        self._interfaces = self._reactor.port_generation
        self._reactor.engine.announcing.request_path(self._destination, now)
        return False

    def has_news(self) -> bool:
        """Under the lock: there is a path, or another interface to ask on, or no node any more."""
        return self._reactor.closed or self._interfaces != self._reactor.port_generation or self.found()

    def patience(self) -> float:
        """Seconds to wait for news before asking again. PathNotFound when the time is over."""
        remaining = self._end - monotonic()
        if remaining <= 0:
            waited = monotonic() - self._started
            raise PathNotFound(
                f"no path to {self._destination.hex()} within {waited:.0f} s: nobody reachable has heard of it"
            )
        return min(ASK_AGAIN, remaining)

    def __enter__(self) -> PathSearch:
        return self

    def __exit__(self, *exc: object) -> None:
        self._listener.drop_path_waiter(self._destination, self.waiter)
