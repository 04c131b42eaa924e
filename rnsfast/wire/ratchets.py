"""Files that hold ratchets: the ring of an owner, and the ratchet heard from a peer.  Protocol 01, section 7.

ring  msgpack map   "signature" bin 64, "ratchets" bin: a msgpack array of 32-byte private keys, newest first;
                    the signature, by the destination's identity, is over exactly these inner bytes
peer  msgpack map   "ratchet" bin 32, "received" unix time
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rnsfast.crypto.ed25519 import SigningKey, VerifyKey
from rnsfast.crypto.hashes import short
from rnsfast.wire.storedmsgpack import pack, unpack

RATCHET_SIZE: Final = 32
RATCHET_COUNT: Final = 512  # keys an owner keeps
RATCHET_INTERVAL: Final = 1800.0  # seconds between rotations, which happen only when announcing
RATCHET_EXPIRY: Final = 2592000.0  # seconds after it was received until a stored peer ratchet is not used any more


def ratchet_id(public: bytes) -> bytes:
    """The 10 bytes by which a ratchet is shown; never sent."""
    return short(public)


def parse_ring(file: bytes, owner: VerifyKey) -> list[bytes] | None:
    """The private keys of a ring file, newest first; None if the file is damaged or not signed by its owner."""
    ring = unpack(file)
    if not isinstance(ring, dict):
        return None
    signature, inner = ring.get("signature"), ring.get("ratchets")
    if not (isinstance(signature, bytes) and isinstance(inner, bytes) and owner.verify(signature, inner)):
        return None
    keys = unpack(inner)
    if not isinstance(keys, list) or not all(isinstance(key, bytes) and len(key) == RATCHET_SIZE for key in keys):
        return None
    return keys


def build_ring(keys: Sequence[bytes], owner: SigningKey) -> bytes:
    """The ring file of private keys, newest first."""
    inner = pack(list(keys))
    return pack({"signature": owner.sign(inner), "ratchets": inner})


def parse_peer_ratchet(file: bytes) -> tuple[bytes, float] | None:
    """(public key, unix time it was received); None if the file is damaged."""
    record = unpack(file)
    if not isinstance(record, dict):
        return None
    ratchet, received = record.get("ratchet"), record.get("received")
    if not isinstance(ratchet, bytes) or len(ratchet) != RATCHET_SIZE:
        return None
    if not isinstance(received, (int, float)) or isinstance(received, bool):
        return None
    return ratchet, float(received)


def build_peer_ratchet(ratchet: bytes, received: float) -> bytes:
    """The file of a ratchet heard from a peer at a unix time."""
    return pack({"ratchet": ratchet, "received": float(received)})


def is_expired(received: float, unix_time: float) -> bool:
    """Whether a stored peer ratchet is too old to be used."""
    return unix_time >= received + RATCHET_EXPIRY
