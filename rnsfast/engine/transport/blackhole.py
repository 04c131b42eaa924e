"""Identities whose announces are not wanted.  Protocol 02, section 14."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

LIMIT: Final = 65_536  # identities; no more are taken in from others


@dataclass(frozen=True, slots=True)
class Ban:
    """Why, by whom, until when."""

    source: bytes  # 16 bytes, identity hash of who said so
    until: float | None = None  # unix time; None for ever
    reason: str | None = None


@dataclass(slots=True)
class Blackhole:
    """Identity hash to ban."""

    bans: dict[bytes, Ban] = field(default_factory=dict)

    def is_banned(self, identity: bytes, unix_time: float) -> bool:
        """Whether announces of `identity` are dropped now."""
        ban = self.bans.get(identity)
        return ban is not None and (ban.until is None or unix_time < ban.until)

    def clean(self, unix_time: float) -> list[bytes]:
        """Forget what has expired; returns the identities."""
        over = [i for i, ban in self.bans.items() if ban.until is not None and unix_time >= ban.until]
        for identity in over:
            del self.bans[identity]
        return over
