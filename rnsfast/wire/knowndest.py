"""The file `known_destinations`.  Protocol 01, section 2.3.

msgpack map  destination hash bin 16 -> [received, packet hash, public key, app data, use mark]
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import msgpack

from rnsfast.wire.storedmsgpack import unpack

NEVER_USED: Final = 0
RETAINED: Final = -1  # for ever


@dataclass(frozen=True, slots=True)
class KnownDestination:
    """What is remembered of a destination that announced itself."""

    destination: bytes  # 16 bytes
    received: float  # unix time
    packet_hash: bytes  # 32 bytes, of the announce
    public_key: bytes  # 64 bytes
    app_data: bytes | None
    used: float  # NEVER_USED, RETAINED, or the unix time of the last use


def parse_known_destinations(file: bytes) -> list[KnownDestination] | None:
    """The readable entries of the file, in its order; None if the file is damaged. Bad entries are left out.

    Entries with four values are of an older release: they count as never used.
    """
    table = unpack(file)
    if not isinstance(table, dict):
        return None
    found: list[KnownDestination] = []
    for key in list(table):  # consumed on the way, so that a large table is not in memory twice
        entry = _entry(key, table.pop(key))
        if entry is not None:
            found.append(entry)
    return found


def _entry(key: object, fields: object) -> KnownDestination | None:
    if not isinstance(key, bytes) or len(key) != 16 or not isinstance(fields, list) or len(fields) not in (4, 5):
        return None
    received, packet_hash, public_key, app_data = fields[:4]
    used = fields[4] if len(fields) == 5 else NEVER_USED
    if not isinstance(received, (int, float)) or not isinstance(used, (int, float)):
        return None
    if not isinstance(packet_hash, bytes) or not isinstance(public_key, bytes) or len(public_key) != 64:
        return None
    if app_data is not None and not isinstance(app_data, bytes):
        return None
    return KnownDestination(key, received, packet_hash, public_key, app_data, used)


def build_known_destinations(entries: Iterable[KnownDestination]) -> bytes:
    """The file. ValueError if a key has not 16 bytes or a public key not 64.

    Each entry is packed by itself: one call for all would keep every other thread waiting for 30 ms with 100,000.
    """
    packer = msgpack.Packer(use_bin_type=True)
    parts = [b""]
    for e in entries:
        if len(e.destination) != 16 or len(e.public_key) != 64:
            raise ValueError(f"destination {e.destination.hex()} with a public key of {len(e.public_key)} bytes")
        fields = packer.pack([e.received, e.packet_hash, e.public_key, e.app_data, e.used])
        parts.append(packer.pack(e.destination) + fields)
    parts[0] = packer.pack_map_header(len(parts) - 1)
    return b"".join(parts)
