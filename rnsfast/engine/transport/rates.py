"""How often a destination may have its announces rebroadcast.  Protocol 02, section 8.4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rnsfast.engine.port import Policy

LIMIT: Final = 65536  # destinations; the one longest unheard gives way


@dataclass(slots=True)
class Rate:
    """One destination. Times are unix seconds, as `rnpath -r` shows them."""

    last: float
    violations: int = 0
    blocked_until: float = 0.0


class Rates:
    """Announce rates by destination, least recently heard first."""

    def __init__(self) -> None:
        self.entries: dict[bytes, Rate] = {}  # at most LIMIT

    def is_blocked(self, destination: bytes, policy: Policy, unix_time: float) -> bool:
        """Account for an announce that was taken; whether it must not be rebroadcast."""
        target = policy.announce_rate_target
        if not target:
            return False
        entry = self.entries.pop(destination, None)
        if entry is None:
            if len(self.entries) >= LIMIT:
                del self.entries[next(iter(self.entries))]
            self.entries[destination] = Rate(unix_time)
            return False
        self.entries[destination] = entry
        if unix_time <= entry.blocked_until:
            return True
        if unix_time - entry.last < target:
            entry.violations += 1
        else:
            entry.violations = max(0, entry.violations - 1)
        if entry.violations > (policy.announce_rate_grace or 0):
            entry.blocked_until = entry.last + target + (policy.announce_rate_penalty or 0)
            return True
        entry.last = unix_time
        return False
