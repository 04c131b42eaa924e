"""Proofs of packets.  Protocol 01, section 8.1.

    implicit  signature 64                     address: first 16 bytes of the packet's hash, flags 0x03
    explicit  packet hash 32 | signature 64    the same address, or a link id with flags 0x0f

The signature is over all 32 bytes of the packet's hash.  Length alone tells the two forms apart.
"""

from __future__ import annotations

from typing import Final

from rnsfast.wire.drop import Drop
from rnsfast.wire.packet import CTX_NONE, EXPLICIT_PROOF_SIZE, IMPLICIT_PROOF_SIZE, LINK, PROOF, make_raw
from rnsfast.wire.value import value

_LINK_PROOF_FLAGS: Final = LINK << 2 | PROOF
_LINK_PROOF_HEAD: Final = bytes((_LINK_PROOF_FLAGS, 0))


@value
class PacketProof:
    """A proof, not verified yet. `packet_hash` is None in an implicit one: its address has the first 16 bytes."""

    packet_hash: bytes | None  # 32 bytes
    signature: bytes  # 64 bytes


def parse_proof(data: bytes) -> PacketProof | Drop:
    """Read the data of a proof that is not on a link: exactly 64 or 96 bytes."""
    if len(data) == IMPLICIT_PROOF_SIZE:
        return PacketProof(None, data)
    if len(data) == EXPLICIT_PROOF_SIZE:
        return PacketProof(data[:32], data[32:])
    return Drop.PROOF_SIZE


def parse_proof_on_link(data: bytes) -> PacketProof | Drop:
    """Read the data of a proof on a link: always explicit, bytes behind the first 96 are ignored."""
    return PacketProof(data[:32], data[32:96]) if len(data) >= EXPLICIT_PROOF_SIZE else Drop.PROOF_SIZE


def proof_packet(packet_hash: bytes, signature: bytes, *, explicit: bool = False) -> bytes:
    """The proof packet for a packet that was not on a link."""
    return make_raw(PROOF, packet_hash[:16], CTX_NONE, packet_hash + signature if explicit else signature)


def link_proof_packet(link_id: bytes, packet_hash: bytes, signature: bytes) -> bytes:
    """The proof packet for a packet on a link."""
    return _LINK_PROOF_HEAD + link_id + b"\x00" + packet_hash + signature
