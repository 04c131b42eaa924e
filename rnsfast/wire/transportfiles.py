"""The files a transport node keeps its tables in.  Protocol 02, section 17.

destination_table      msgpack list of [destination, timestamp, next hop, hops, expires, [blobs], interface hash,
                       packet hash of the announce]
tunnels                msgpack list of [tunnel id, interface hash or nil, [paths as above, or nil for the
                       interface], expires]
cache/announces/HASH   msgpack [raw announce as received, display name of the interface or nil]
packet_hashlist.raw    32-byte packet hashes, one after the other
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import msgpack

from rnsfast.wire.storedmsgpack import unpack

HASH: Final = 32  # bytes of packet hashes, interface hashes and tunnel ids
BLOB: Final = 10  # bytes of a random blob
MAX_HOPS: Final = 128


@dataclass(frozen=True, slots=True)
class StoredPath:
    """One path. Times are unix seconds."""

    destination: bytes  # 16 bytes
    heard_at: float
    next_hop: bytes  # 16 bytes
    hops: int
    expires_at: float
    blobs: tuple[bytes, ...]
    interface: bytes | None  # 32 bytes; None in tunnels
    packet_hash: bytes  # 32 bytes, of the announce

    def row(self) -> list[object]:
        """As it stands in the file."""
        return [
            self.destination, self.heard_at, self.next_hop, self.hops, self.expires_at, list(self.blobs),
            self.interface, self.packet_hash,
        ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTunnel:
    """One tunnel."""

    id: bytes  # 32 bytes
    interface: bytes | None
    paths: tuple[StoredPath, ...]
    expires_at: float


def parse_paths(file: bytes) -> list[StoredPath] | None:
    """The readable entries of `destination_table`; None if it is damaged."""
    rows = unpack(file)
    return None if not isinstance(rows, list) else _paths(rows)


def parse_tunnels(file: bytes) -> list[StoredTunnel] | None:
    """The readable entries of `tunnels`; None if it is damaged."""
    rows = unpack(file)
    if not isinstance(rows, list):
        return None
    found: list[StoredTunnel] = []
    for row in rows:
        if not isinstance(row, list) or len(row) != 4:
            continue
        identifier, interface, paths, expires = row
        if not _is_hash(identifier) or not (interface is None or _is_hash(interface)) or not isinstance(paths, list):
            continue
        if isinstance(expires, (int, float)):
            found.append(StoredTunnel(identifier, interface, tuple(_paths(paths)), float(expires)))
    return found


def _is_hash(value: object) -> bool:
    return isinstance(value, bytes) and len(value) == HASH


def _paths(rows: list[object]) -> list[StoredPath]:
    """Consumes `rows`, so that a large table is not in memory twice."""
    rows.reverse()
    found: list[StoredPath] = []
    while rows:
        path = _path(rows.pop())
        if path is not None:
            found.append(path)
    return found


def _path(row: object) -> StoredPath | None:
    if not isinstance(row, list) or len(row) != 8:
        return None
    destination, heard, next_hop, hops, expires, blobs, interface, digest = row
    if not isinstance(destination, bytes) or not isinstance(next_hop, bytes) or not isinstance(blobs, list):
        return None
    if len(destination) != 16 or len(next_hop) != 16 or not _is_hash(digest):
        return None
    if not isinstance(hops, int) or not 0 <= hops <= MAX_HOPS or not (interface is None or _is_hash(interface)):
        return None
    if not isinstance(heard, (int, float)) or not isinstance(expires, (int, float)):
        return None
    if not all(isinstance(blob, bytes) and len(blob) == BLOB for blob in blobs):
        return None
    return StoredPath(destination, float(heard), next_hop, hops, float(expires), tuple(blobs[-64:]), interface, digest)


def build_list(parts: Iterable[list[list[object]]], count: int) -> bytes:
    """A msgpack list of `count` rows, which come in parts: nobody else runs while one part is packed."""
    packer = msgpack.Packer(use_bin_type=True)
    head: bytes = packer.pack_array_header(count)
    return head + b"".join(b"".join(map(packer.pack, part)) for part in parts)


def tunnel_row(tunnel: StoredTunnel) -> list[object]:
    """As it stands in the file."""
    return [tunnel.id, tunnel.interface, [path.row() for path in tunnel.paths], tunnel.expires_at]


def parse_announce_file(file: bytes) -> bytes | None:
    """The raw announce; None if the file is damaged."""
    value = unpack(file)
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[0], bytes):
        return None
    return value[0]


def build_announce_file(raw: bytes, interface: str | None) -> bytes:
    """The file of one announce."""
    return bytes(msgpack.packb([raw, interface], use_bin_type=True))


def parse_hashes(file: bytes) -> list[bytes] | None:
    """The hashes of `packet_hashlist.raw`; what is left over at the end is left out. None if it is empty."""
    if not file:
        return None
    return [file[at : at + HASH] for at in range(0, len(file) - HASH + 1, HASH)]
