"""The files a transport node keeps its tables in.  Protocol 02, section 17.

destination_table      msgpack list of [destination, timestamp, next hop, hops, expires, [blobs], interface hash,
                       packet hash of the announce]
tunnels                msgpack list of [tunnel id, interface hash or nil, [paths as above, or nil for the
                       interface], expires]
cache/announces/HASH   msgpack [raw announce as received, display name of the interface or nil]
packet_hashlist.raw    32-byte packet hashes, one after the other
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import isfinite
from typing import Final, TypeGuard

import msgpack

from rnsfast.wire.storedmsgpack import unpack, unpack_rows

HASH: Final = 32  # bytes of packet hashes, interface hashes and tunnel ids
BLOB: Final = 10  # bytes of a random blob
BLOBS: Final = 64  # random blobs of a path that are read: the newest
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


def read_paths(file: bytes, most: int) -> Iterator[StoredPath]:
    """The readable entries of `destination_table`, the last `most` rows of it, one by one.

    Raises ValueError where the file turns out to be damaged, or at its end if it holds something else altogether.
    """
    total = found = 0
    for row in unpack_rows(file, most):
        total += 1
        path = _path(row)
        if path is not None:
            found += 1
            yield path
    if total and not found:
        raise ValueError("none of its entries is a path")


def parse_tunnels(file: bytes) -> list[StoredTunnel] | None:
    """The readable entries of `tunnels`; None if it is damaged, or holds something else altogether."""
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
        if _is_time(expires):
            found.append(
                StoredTunnel(
                    identifier, interface, tuple(path for p in paths if (path := _path(p)) is not None), float(expires)
                )
            )
    return found if found or not rows else None


def _is_hash(value: object) -> TypeGuard[bytes]:
    return isinstance(value, bytes) and len(value) == HASH


def _is_time(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and isfinite(value)


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
    if not _is_time(heard) or not _is_time(expires):
        return None
    if not all(isinstance(blob, bytes) and len(blob) == BLOB for blob in blobs):
        return None
    return StoredPath(
        destination, float(heard), next_hop, hops, float(expires), tuple(blobs[-BLOBS:]), interface, digest
    )


def pack_paths(paths: Iterable[StoredPath]) -> bytes:
    """Rows of `destination_table`, one after the other, without the head of the list."""
    pack = msgpack.Packer(use_bin_type=True).pack
    return b"".join([pack(path.row()) for path in paths])


def pack_tunnel(identifier: bytes, interface: bytes | None, rows: Iterable[bytes], count: int, expires: float) -> bytes:
    """A row of `tunnels`. `rows` are `count` paths as `pack_paths` makes them."""
    packer = msgpack.Packer(use_bin_type=True)
    head = packer.pack_array_header(4) + packer.pack(identifier) + packer.pack(interface)
    return b"".join([head, packer.pack_array_header(count), *rows, packer.pack(expires)])


def build_list(rows: Iterable[bytes], count: int) -> bytes:
    """A file: the list of `count` rows that are packed already, in pieces of any size."""
    head: bytes = msgpack.Packer().pack_array_header(count)
    return b"".join([head, *rows])


def parse_announce_file(file: bytes) -> bytes | None:
    """The raw announce; None if the file is damaged."""
    value = unpack(file)
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[0], bytes):
        return None
    return value[0]


def build_announce_file(raw: bytes, interface: str | None) -> bytes:
    """The file of one announce."""
    return bytes(msgpack.packb([raw, interface], use_bin_type=True))


def parse_hashes(file: bytes, most: int) -> list[bytes]:
    """The hashes of `packet_hashlist.raw`, at most `most`; what is left over at the end is none."""
    size = min(len(file) // HASH, most) * HASH
    return [file[at : at + HASH] for at in range(0, size, HASH)]
