"""SHA-256 at its three lengths; truncation keeps the first bytes.  Protocol 01, section 1."""

from __future__ import annotations

from hashlib import sha256


def full(data: bytes) -> bytes:
    """32 bytes."""
    return sha256(data).digest()


def truncated(data: bytes) -> bytes:
    """16 bytes: addresses and identity hashes."""
    return sha256(data).digest()[:16]


def short(data: bytes) -> bytes:
    """10 bytes: name hashes and ratchet ids."""
    return sha256(data).digest()[:10]
