"""Packets: header and data.  Protocol 01, sections 4 and 5.

offset  size  field         (access codes are taken off before and put on after, in `wire.ifac`)
0       1     flags         bits: 6 header type, 5 context flag, 4 transport, 3-2 destination type, 1-0 packet type
1       1     hops          0..127
2       16    transport id  only if flags bit 6 is set; if not, everything below stands 16 bytes earlier
18      16    destination
34      1     context
35      >= 1  data
"""

from __future__ import annotations

from hashlib import sha256
from typing import Final

from rnsfast.crypto.hashes import PIECE, truncated, update_long
from rnsfast.wire.drop import Drop
from rnsfast.wire.value import value

# Bits of the flags byte.
IFAC_FLAG: Final = 0x80  # an access code follows the hops byte; only on the wire of an interface that has one
HEADER_2: Final = 0x40  # a transport id follows the hops byte
CONTEXT_FLAG: Final = 0x20  # in an announce: it carries a ratchet
TRANSPORT: Final = 0x10  # set together with HEADER_2 by all senders; readers go by HEADER_2
DESTINATION_TYPE_MASK: Final = 0x0C
PACKET_TYPE_MASK: Final = 0x03
HASHED_FLAGS: Final = 0x0F  # what stays the same along a route, and is under the packet hash

# Packet types, flags & PACKET_TYPE_MASK.
DATA: Final = 0
ANNOUNCE: Final = 1
LINKREQUEST: Final = 2
PROOF: Final = 3

# Destination types, (flags & DESTINATION_TYPE_MASK) >> 2.
SINGLE: Final = 0
GROUP: Final = 1
PLAIN: Final = 2
LINK: Final = 3

# Contexts (protocol 01, 4.2).
CTX_NONE: Final = 0x00
CTX_RESOURCE: Final = 0x01
CTX_RESOURCE_ADV: Final = 0x02
CTX_RESOURCE_REQ: Final = 0x03
CTX_RESOURCE_HMU: Final = 0x04
CTX_RESOURCE_PRF: Final = 0x05
CTX_RESOURCE_ICL: Final = 0x06
CTX_RESOURCE_RCL: Final = 0x07
CTX_CACHE_REQUEST: Final = 0x08
CTX_REQUEST: Final = 0x09
CTX_RESPONSE: Final = 0x0A
CTX_PATH_RESPONSE: Final = 0x0B
CTX_COMMAND: Final = 0x0C
CTX_COMMAND_STATUS: Final = 0x0D
CTX_CHANNEL: Final = 0x0E
CTX_KEEPALIVE: Final = 0xFA
CTX_LINKIDENTIFY: Final = 0xFB
CTX_LINKCLOSE: Final = 0xFC
CTX_LINKPROOF: Final = 0xFD
CTX_LRRTT: Final = 0xFE
CTX_LRPROOF: Final = 0xFF

# Sizes in bytes (protocol 01, 4.3).
MTU: Final = 500  # largest packet outside links, without access code
HEADER_1_SIZE: Final = 19
HEADER_2_SIZE: Final = 35
HASH_SIZE: Final = 16  # of addresses
NAME_HASH_SIZE: Final = 10
IFAC_MIN_SIZE: Final = 1
TOKEN_OVERHEAD: Final = 48  # IV 16 and HMAC 32, padding not counted
KEY_SIZE: Final = 32  # of one X25519 or Ed25519 key
SIGNATURE_SIZE: Final = 64
PLAIN_MDU: Final = MTU - HEADER_2_SIZE - IFAC_MIN_SIZE  # 464
ENCRYPTED_MDU: Final = (PLAIN_MDU - TOKEN_OVERHEAD - KEY_SIZE) // 16 * 16 - 1  # 383, to a SINGLE destination
LINK_MDU: Final = (MTU - IFAC_MIN_SIZE - HEADER_1_SIZE - TOKEN_OVERHEAD) // 16 * 16 - 1  # 431, link MTU 500
IMPLICIT_PROOF_SIZE: Final = 64  # signature
EXPLICIT_PROOF_SIZE: Final = 96  # packet hash and signature

MAX_HOPS: Final = 128  # a packet read with this many hops is malformed, one to be sent with as many is not sent

_LINK_REQUEST_KEYS: Final = 64  # bytes of a link request's data that are under the link id
_BYTE: Final = tuple(bytes((i,)) for i in range(256))
_HASHED: Final = tuple(bytes((i & HASHED_FLAGS,)) for i in range(256))
_STATES: Final = tuple(sha256(bytes((i,))) for i in range(16))  # the hash of each first byte, to go on from


@value
class Packet:
    """One packet, its header taken apart. `data` still encrypted if the packet's kind is."""

    flags: int
    hops: int  # as on the wire, not yet incremented
    transport_id: bytes | None  # 16 bytes
    destination: bytes  # 16 bytes
    context: int
    data: bytes  # at least 1 byte


def link_mdu(mtu: int) -> int:
    """The most plaintext bytes that one packet carries on a link of `mtu` bytes.  Protocol 01, 4.3."""
    return (mtu - IFAC_MIN_SIZE - HEADER_1_SIZE - TOKEN_OVERHEAD) // 16 * 16 - 1


def parse_packet(raw: bytes) -> Packet | Drop:
    """Read one packet. Never raises: what is wrong with `raw` comes back as the Drop to count.  Protocol 01, 4.4."""
    size = len(raw)
    if size < 2:
        return Drop.TOO_SHORT
    flags, hops = raw[0], raw[1]
    if hops >= MAX_HOPS:
        return Drop.TOO_MANY_HOPS
    if flags & HEADER_2:
        if size > 35:
            return Packet(flags, hops, raw[2:18], raw[18:34], raw[34], raw[35:])
        return Drop.NO_DATA if size == 35 else Drop.TOO_SHORT
    if size > 19:
        return Packet(flags, hops, None, raw[2:18], raw[18], raw[19:])
    return Drop.NO_DATA if size == 19 else Drop.TOO_SHORT


def build_packet(packet: Packet) -> bytes:
    """The bytes of `packet`. ValueError if its fields cannot make a packet: that would be our own mistake."""
    if bool(packet.flags & HEADER_2) != (packet.transport_id is not None):
        raise ValueError(f"flags {packet.flags:#04x} and transport id {packet.transport_id!r} disagree")
    if not 0 <= packet.hops < MAX_HOPS:
        raise ValueError(f"a packet is not sent with {packet.hops} hops, the limit is {MAX_HOPS - 1}")
    via = packet.transport_id or b""
    if len(packet.destination) != HASH_SIZE or len(via) not in (0, HASH_SIZE):
        raise ValueError(f"addresses have 16 bytes, not {len(packet.destination)} and {len(via)}")
    return b"%c%c%b%b%c%b" % (packet.flags, packet.hops, via, packet.destination, packet.context, packet.data)


def make_raw(flags: int, destination: bytes, context: int, data: bytes, hops: int = 0) -> bytes:
    """The bytes of a packet without transport id, unchecked: for code that makes one per message."""
    return _BYTE[flags] + _BYTE[hops] + destination + _BYTE[context] + data


def hashable_part(raw: bytes) -> bytes:
    """What of a packet stays the same along its whole route.  Protocol 01, section 5."""
    return _HASHED[raw[0]] + (raw[18:] if raw[0] & HEADER_2 else raw[2:])


def packet_hash(raw: bytes) -> bytes:
    """The 32-byte hash of a packet that parses, the same on every hop; its first 16 bytes are its proof's address."""
    flags = raw[0]
    state = _STATES[flags & HASHED_FLAGS].copy()  # 0.49 us for 500 bytes, 0.58 with the byte put before a copy of them
    if len(raw) <= PIECE:
        state.update(raw[18:] if flags & HEADER_2 else raw[2:])
    else:
        update_long(state, raw[18:] if flags & HEADER_2 else raw[2:])
    return state.digest()


def link_id(raw: bytes) -> bytes:
    """The id of the link that the link request packet `raw` asks for.  Protocol 03, section 2.

    The signalling bytes behind the two keys are left out, because relays may change or remove them.
    """
    at = 18 if raw[0] & HEADER_2 else 2
    return truncated(_HASHED[raw[0]] + raw[at : at + 17 + _LINK_REQUEST_KEYS])
