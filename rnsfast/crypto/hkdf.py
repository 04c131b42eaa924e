"""HKDF with SHA-256, whose block counter wraps.  Protocol 01, section 1.

RFC 5869 ends at 255 blocks (8160 bytes), and libraries refuse more.  Here the counter byte goes on from 255 to 0: masks
of interface access codes are as long as the packet.
"""

from __future__ import annotations

from typing import Final

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from rnsfast.crypto.hashes import hmac_sha256, hmac_states

STANDARD_LIMIT: Final = 8160  # bytes: 255 blocks

_SHA256: Final = SHA256()
_NO_SALT: Final = bytes(32)
_BYTE: Final = tuple(bytes((i,)) for i in range(256))


def hkdf(length: int, ikm: bytes, salt: bytes | None = None, info: bytes = b"") -> bytes:
    """`length` bytes derived from `ikm`, which may be empty. ValueError if `length` is not positive."""
    if length < 1:
        raise ValueError(f"a derived key has at least 1 byte, not {length}")
    if length <= STANDARD_LIMIT:
        return HKDF(_SHA256, length, salt or _NO_SALT, info).derive(ikm)
    prk = hmac_sha256(hmac_states(salt or _NO_SALT), ikm)
    blocks = [HKDFExpand(_SHA256, STANDARD_LIMIT, info).derive(prk)]
    block = blocks[0][-32:]
    fresh_inner, fresh_outer = (state.copy for state in hmac_states(prk))
    for i in range(STANDARD_LIMIT // 32 + 1, (length + 31) // 32 + 1):
        inner, outer = fresh_inner(), fresh_outer()
        inner.update(block + info + _BYTE[i & 255])
        outer.update(inner.digest())
        block = outer.digest()
        blocks.append(block)
    return b"".join(blocks)[:length]
