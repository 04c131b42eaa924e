"""The envelope of channel messages.  Protocol 05, sections 1 and 2.1.

offset  size  field
0       2     message type
2       2     sequence
4       2     length of the payload; written, not believed: the payload is everything after it
6       n     payload
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from rnsfast.wire.drop import Drop

ENVELOPE_SIZE: Final = 6  # bytes before the payload
SEQUENCE_MODULUS: Final = 65536
ACCEPTANCE_SPAN: Final = 48  # accepted: next expected sequence up to this many after it, inclusive; never send further
APPLICATION_TYPES: Final = range(0xF000)
SYSTEM_TYPES: Final = range(0xF000, 0x10000)
MAX_PAYLOAD: Final = 0xFFFF  # what the length field can express

_HEADER: Final = Struct(">HHH")
_pack: Final = _HEADER.pack
pack_header: Final = _HEADER.pack  # (message type, sequence, payload length), for code that joins the payload itself
_unpack: Final = _HEADER.unpack_from


def channel_mdu(link_mdu: int) -> int:
    """The most payload bytes one message carries on a link of this MDU."""
    return min(link_mdu - ENVELOPE_SIZE, MAX_PAYLOAD)


def pack_envelope(msgtype: int, sequence: int, payload: bytes) -> bytes:
    """The plaintext of a channel packet. struct.error if a number has more than 16 bits: our own mistake."""
    return _pack(msgtype, sequence, len(payload)) + payload


def parse_envelope(plain: bytes) -> tuple[int, int, bytes] | Drop:
    """(message type, sequence, payload)."""
    if len(plain) < ENVELOPE_SIZE:
        return Drop.ENVELOPE_SIZE
    msgtype, sequence, _ = _unpack(plain)
    return msgtype, sequence, plain[6:]


def is_acceptable(sequence: int, expected: int) -> bool:
    """Whether a receiver that waits for `expected` takes `sequence`.  Protocol 05, section 3.3."""
    return (sequence - expected) % SEQUENCE_MODULUS <= ACCEPTANCE_SPAN
