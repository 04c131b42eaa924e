"""A program behind a shared instance: others own the interfaces, and must know what to pass on to us.

Protocol 02, section 12.4.
"""

from __future__ import annotations

from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Final

from rnsfast.wire.packet import SINGLE

if TYPE_CHECKING:
    from rnsfast.engine.destination import Destination
    from rnsfast.engine.engine import Engine
    from rnsfast.engine.port import Port

SETTLE: Final = 0.25  # seconds until the instance is told of a new destination: its first announce may come before


class Membership:
    """Tells the shared instance which destinations are here. A deadline, not a thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._to_tell: dict[Destination, None] = {}
        self._due = inf
        self.armed = inf

    def introduce(self, destination: Destination, now: float) -> None:
        """A new destination of ours. Only SINGLE ones have announces; the others get what everybody gets."""
        if destination.kind == SINGLE:
            self._to_tell[destination] = None
            self._due = min(self._due, now + SETTLE)
            self._engine.timers.arm(self, self._due)

    def joined(self, now: float) -> None:
        """The instance is there, perhaps anew: it knows none of ours."""
        for destination in self._engine.destinations.values():
            self.introduce(destination, now)

    def lost(self, port: Port) -> None:
        """The instance is gone, and with it every path; the next one has its own."""
        engine = self._engine
        engine.paths.paths.clear()
        engine.inbound.leave(port)
        engine.announcing.forget_requests()

    def advance(self, now: float) -> float:
        """Say it, as answers that nobody has asked for: they are noted and go no further."""
        if now < self._due:
            return self._due
        self._due = inf
        engine = self._engine
        port = next((port for port in engine.ports if port.online), None)
        if port is None:
            return inf  # `joined` tells everything
        told, self._to_tell = self._to_tell, {}
        for destination in told:
            if engine.destinations.get((destination.hash, SINGLE)) is destination:
                with suppress(ValueError):  # it cannot be announced, and whoever tries to is told why
                    engine.announcing.announce(destination, None, now, port=port, is_path_response=True)
        return inf
