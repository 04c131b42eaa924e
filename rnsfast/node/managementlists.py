"""Lists of blackholed identities: how they are sent, read and kept.  Protocol 02, section 14; 07, sections 7.3 and 9.

    identity hash 16 -> {"source": identity hash 16, "until": unix time or nil, "reason": text or nil}

One's own list is `storage/blackhole/local`; those of others are named by the identity they came from. Who said so is
never taken from a list: it is the file's name, or whom it was fetched from.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any, Final

from rnsfast.engine.transport.blackhole import LIMIT, Ban
from rnsfast.errors import StorageError
from rnsfast.node.files import atomic_write, read_or_set_aside
from rnsfast.wire.storedmsgpack import pack, unpack

log = logging.getLogger(__name__)

LOCAL: Final = "local"
MAX_REASON: Final = 256  # characters; the rest is cut off


def as_map(bans: Mapping[bytes, Ban]) -> dict[bytes, dict[str, Any]]:
    """The list as it is sent and stored."""
    return {
        identity: {"source": ban.source, "until": ban.until, "reason": ban.reason} for identity, ban in bans.items()
    }


def fitting(bans: Mapping[bytes, Ban], size: int) -> dict[bytes, dict[str, Any]]:
    """The first entries of the list, as many as `size` bytes hold when they are packed."""
    chosen: dict[bytes, dict[str, Any]] = {}
    left = size - 5  # of the map itself
    for identity, entry in as_map(bans).items():
        left -= 18 + len(pack(entry))
        if left < 0:
            break
        chosen[identity] = entry
    return chosen


def read_list(found: Any, source: bytes, unix_time: float, *, limit: int = LIMIT) -> dict[bytes, Ban] | None:
    """What a list that was sent or stored says, `source` having said so. None if it is no list.

    Entries that are not as they should be, and those that are over, are left out; at most `limit` are taken.
    """
    if not isinstance(found, dict):
        return None
    bans: dict[bytes, Ban] = {}
    for identity, entry in found.items():
        if len(bans) >= limit:
            break
        if not isinstance(identity, bytes) or len(identity) != 16 or not isinstance(entry, dict):
            continue
        until, reason = entry.get("until"), entry.get("reason")
        if not _is_time(until) or not isinstance(reason, str | None) or (until is not None and until <= unix_time):
            continue
        bans[identity] = Ban(source, until, None if reason is None else _shown(reason))
    return bans


def _is_time(value: Any) -> bool:
    if value is None:
        return True
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return isinstance(value, int) or isfinite(value)


def _shown(reason: str) -> str:
    """As it may stand in a log or a terminal."""
    return "".join(character if character.isprintable() else " " for character in reason[:MAX_REASON])


class BlackholeFiles:
    """The directory `storage/blackhole`. Loading never raises; saving says whether it worked."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._failing = False

    def load(self, own: bytes, sources: Iterable[bytes], unix_time: float) -> dict[bytes, Ban]:
        """One's own entries, which count as said by `own`, and those of `sources`; the earlier take precedence."""
        bans: dict[bytes, Ban] = {}
        for name, source in ((LOCAL, own), *((source.hex(), source) for source in sources)):

            def parse(data: bytes, source: bytes = source) -> dict[bytes, Ban] | None:
                return read_list(unpack(data), source, unix_time)

            found = read_or_set_aside(self._directory / name, parse, lost="the identities on that list")
            bans = {**(found or {}), **bans}
        return bans

    def save(self, name: str, bans: Mapping[bytes, Ban]) -> bool:
        """Replace a list: `local`, or the hex of a source."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            atomic_write(self._directory / name, pack(as_map(bans)))
        except (OSError, StorageError) as error:
            if not self._failing:
                log.warning("%s; further failures are not reported until saving works again", error)
            self._failing = True
            return False
        self._failing = False
        return True
