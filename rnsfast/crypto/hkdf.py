"""HKDF with SHA-256, whose block counter wraps.  Protocol 01, section 1.

RFC 5869 ends at 255 blocks (8160 bytes), and libraries refuse more.  Here the counter byte goes on from 255 to 0: masks
of interface access codes are as long as the packet.
"""

from __future__ import annotations

from hmac import digest
from typing import Final

_NO_SALT: Final = bytes(32)
_BYTE: Final = tuple(bytes((i,)) for i in range(256))


def hkdf(length: int, ikm: bytes, salt: bytes | None = None, info: bytes = b"") -> bytes:
    """`length` bytes derived from `ikm`, which may be empty. ValueError if `length` is not positive."""
    if length < 1:
        raise ValueError(f"a derived key has at least 1 byte, not {length}")
    prk = digest(salt or _NO_SALT, ikm, "sha256")
    blocks = [b""]
    block = b""
    for i in range(1, (length + 31) // 32 + 1):
        block = digest(prk, block + info + _BYTE[i & 255], "sha256")
        blocks.append(block)
    return b"".join(blocks)[:length]
