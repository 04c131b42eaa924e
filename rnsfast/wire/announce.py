"""The data of announce packets.  Protocol 02, section 2.1.

    size  field
    64    public key     X25519, Ed25519
    10    name hash
    10    random blob    5 random bytes, 5 bytes emission time
    32    ratchet        only if the header's context flag is set
    64    signature      over destination | public key | name hash | random blob | ratchet | app data
    rest  app data       may be absent

Whoever builds one makes an `Announce` with an empty signature, signs `signed_data` of it, and puts the signature in
with `build_announce`.
"""

from __future__ import annotations

from typing import Final

from rnsfast.wire.drop import Drop
from rnsfast.wire.packet import CONTEXT_FLAG, Packet
from rnsfast.wire.value import value

SIZE: Final = 148  # bytes of the fields before the app data, without ratchet
RATCHET_SIZE: Final = 32
#: The most app data that still fits 500 bytes after a relay has put its transport id in; 32 fewer with a ratchet.
APP_DATA_MAX: Final = 317
_TIME_MAX: Final = (1 << 40) - 1


@value
class Announce:
    """What an announce says. Nothing in it is verified yet when it comes from `parse_announce`."""

    destination: bytes  # 16 bytes, from the header
    public_key: bytes  # 64 bytes
    name_hash: bytes  # 10 bytes
    random_blob: bytes  # 10 bytes
    ratchet: bytes | None  # 32 bytes
    signature: bytes  # 64 bytes
    app_data: bytes | None  # absent: None without ratchet, empty with one, as applications of the reference see it


def parse_announce(packet: Packet) -> Announce | Drop:
    """Take the data of an announce packet apart. Checks sizes only: key, name and signature are the caller's."""
    data = packet.data
    if packet.flags & CONTEXT_FLAG:
        if len(data) < SIZE + RATCHET_SIZE:
            return Drop.ANNOUNCE_SIZE
        return Announce(
            packet.destination, data[:64], data[64:74], data[74:84], data[84:116], data[116:180], data[180:]
        )
    if len(data) < SIZE:
        return Drop.ANNOUNCE_SIZE
    return Announce(
        packet.destination, data[:64], data[64:74], data[74:84], None, data[84:148], data[148:] if data[148:] else None
    )


def signed_data(announce: Announce) -> bytes:
    """The bytes that the announced identity signs."""
    a = announce
    return b"".join((a.destination, a.public_key, a.name_hash, a.random_blob, a.ratchet or b"", a.app_data or b""))


def build_announce(announce: Announce, signature: bytes | None = None) -> bytes:
    """The data of the announce packet. `signature` replaces the one in `announce`.

    The caller sets CONTEXT_FLAG in the header if and only if `announce.ratchet` is there.
    ValueError if a field has the wrong size.
    """
    a = announce
    signature = a.signature if signature is None else signature
    sizes = (len(a.public_key), len(a.name_hash), len(a.random_blob), len(signature))
    if sizes != (64, 10, 10, 64) or (a.ratchet is not None and len(a.ratchet) != RATCHET_SIZE):
        raise ValueError(f"sizes of key, name hash, random blob and signature are {sizes}, not (64, 10, 10, 64)")
    return b"".join((a.public_key, a.name_hash, a.random_blob, a.ratchet or b"", signature, a.app_data or b""))


def random_blob(entropy: bytes, unix_time: float) -> bytes:
    """The random blob from 5 random bytes and the emission time, of which whole seconds are kept."""
    if len(entropy) != 5:
        raise ValueError(f"a random blob takes 5 random bytes, not {len(entropy)}")
    return entropy + min(max(int(unix_time), 0), _TIME_MAX).to_bytes(5, "big")


def emission_time(blob: bytes) -> int:
    """The emission time in a 10-byte random blob, in unix seconds."""
    return int.from_bytes(blob[5:10], "big")
