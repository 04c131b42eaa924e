"""The data of tunnel synthesis packets.  Protocol 02, section 9.

size  field
64    public key of the transport identity
32    interface hash
16    random
64    signature over the 112 bytes before it
"""

from __future__ import annotations

from typing import Final

from rnsfast.crypto.hashes import full
from rnsfast.wire.drop import Drop
from rnsfast.wire.names import destination_hash, name_hash
from rnsfast.wire.value import value

#: The PLAIN destination that synthesis packets are sent to.
TUNNEL_DESTINATION: Final = destination_hash(name_hash("rnstransport", "tunnel", "synthesize"), None)
SIZE: Final = 176


@value
class Synthesis:
    """A request to join a connection to a tunnel. The signature is not verified by `parse_synthesis`."""

    public_key: bytes  # 64 bytes
    interface_hash: bytes  # 32 bytes
    random: bytes  # 16 bytes
    signature: bytes  # 64 bytes


def parse_synthesis(data: bytes) -> Synthesis | Drop:
    """Read the data of a synthesis packet."""
    if len(data) != SIZE:
        return Drop.TUNNEL_SIZE
    return Synthesis(data[:64], data[64:96], data[96:112], data[112:])


def synthesis_signed_data(public_key: bytes, interface_hash: bytes, random: bytes) -> bytes:
    """The bytes that the transport identity signs. ValueError if a field has the wrong size."""
    sizes = (len(public_key), len(interface_hash), len(random))
    if sizes != (64, 32, 16):
        raise ValueError(f"sizes of public key, interface hash and random bytes are {sizes}, not (64, 32, 16)")
    return public_key + interface_hash + random


def build_synthesis(synthesis: Synthesis) -> bytes:
    """The data of the packet. ValueError if a field has the wrong size."""
    s = synthesis
    if len(s.signature) != 64:
        raise ValueError(f"a signature has 64 bytes, not {len(s.signature)}")
    return synthesis_signed_data(s.public_key, s.interface_hash, s.random) + s.signature


def tunnel_id(public_key: bytes, interface_hash: bytes) -> bytes:
    """The 32-byte id of the tunnel."""
    return full(public_key + interface_hash)
