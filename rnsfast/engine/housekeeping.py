"""What nobody needs any more is forgotten: old paths and destinations, and those that led to somebody or over something
that is not wanted now.  Protocol 02, sections 6.2, 14 and 16.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final

from rnsfast.crypto.hashes import truncated
from rnsfast.engine.sweep import Round, Sweeper

if TYPE_CHECKING:
    from rnsfast.engine.engine import Engine

INTERVAL: Final = 300.0  # seconds between looks at everything


class Housekeeping:
    """Rounds through the engine's large tables. A deadline, not a thread."""

    def __init__(self, engine: Engine, now: float) -> None:
        self._engine = engine
        self._sweeper = Sweeper(engine.timers)
        self._paths = Round(lambda: engine.paths.paths, self._clean_paths)
        self._known = Round(lambda: engine.known.entries, self._clean_known)
        self._banned = Round(lambda: engine.known.entries, self._drop_banned)
        self.armed = inf
        self._due = now + INTERVAL
        engine.timers.arm(self, self._due)

    def advance(self, now: float) -> float:
        """Look at everything, once in a while."""
        if now >= self._due:
            self._due = now + INTERVAL
            self._sweeper.begin(self._paths, now)
            self._sweeper.begin(self._known, now)
            self._engine.announcing.clean(now)
            self._engine.blackhole.clean(now + self._engine.unix_offset)
        return self._due

    def port_gone(self, now: float) -> None:
        """An interface was detached. Until its paths are found they are not used: it is not online."""
        self._sweeper.begin(self._paths, now)

    def identity_banned(self, now: float) -> None:
        """Find the paths to its destinations."""
        self._sweeper.begin(self._banned, now)

    def is_banned(self, destination: bytes) -> bool:
        """Whether it belongs to a banned identity, as far as that is known."""
        known = self._engine.known.entries.get(destination)
        return known is not None and truncated(known.public_key) in self._engine.blackhole.bans

    def _clean_paths(self, destinations: list[bytes], now: float) -> None:
        self._engine.paths.clean(now + self._engine.unix_offset, destinations)

    def _clean_known(self, destinations: list[bytes], now: float) -> None:
        engine = self._engine
        engine.known.clean(now + engine.unix_offset, engine.paths.paths, destinations)

    def _drop_banned(self, destinations: list[bytes], now: float) -> None:
        engine = self._engine
        for destination in filter(self.is_banned, destinations):
            engine.paths.drop(destination)
            if engine.transport is not None:
                engine.transport.announces.forget(destination)
                engine.transport.tunnels.forget(destination)
