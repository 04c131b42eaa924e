"""Memory of packet hashes: what was seen is not processed twice.  Protocol 02, section 3.3."""

from __future__ import annotations

from typing import Final

GENERATION: Final = 500_000  # entries; two generations are kept, so a repeat is known for at least this many packets


class HashMemory:
    """A set that forgets: two generations, the older one thrown away when the newer is full."""

    __slots__ = ("_current", "_previous", "_size")

    def __init__(self, size: int = GENERATION) -> None:
        self._size = size
        self._current: set[bytes] = set()
        self._previous: set[bytes] = set()

    def __contains__(self, key: bytes) -> bool:
        return key in self._current or key in self._previous

    def __len__(self) -> int:
        return len(self._current) + len(self._previous)

    def add(self, key: bytes) -> bool:
        """Remember `key`. False if it was known already: check and insert are one step."""
        if key in self._current or key in self._previous:
            return False
        if len(self._current) >= self._size:
            self._previous, self._current = self._current, set()
        self._current.add(key)
        return True

    def recent(self) -> list[bytes]:
        """A copy of the newer generation, in no order."""
        return list(self._current)

    def forget(self, key: bytes) -> None:
        """As if `key` had never been seen."""
        self._current.discard(key)
        self._previous.discard(key)
