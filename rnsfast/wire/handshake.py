"""Link requests, link request proofs, and what follows them.  Protocol 03, sections 2, 4, 7 and 14.

link request        X25519 32 | Ed25519 32 | [signalling 3]
link request proof  signature 64 | X25519 32 | [signalling 3]
signalling          mode << 21 | mtu, big-endian
round trip time     one msgpack number, seconds
identify            public key 64 | signature 64
"""

from __future__ import annotations

from math import inf, isfinite
from struct import Struct
from typing import Final

from rnsfast.wire.drop import Drop
from rnsfast.wire.value import value

MODE_AES256_CBC: Final = 1  # the only mode in use
ENABLED_MODES: Final = frozenset((MODE_AES256_CBC,))
SIGNALLING_SIZE: Final = 3
MTU_MASK: Final = 0x1FFFFF  # 21 bits
MODE_SHIFT: Final = 21
REQUEST_SIZES: Final = (64, 67)  # without and with signalling
PROOF_SIZES: Final = (96, 99)

_F32: Final = Struct(">f")
_F64: Final = Struct(">d")
#: msgpack's fixed-size integers: first byte -> bytes that follow, signed.
_INTEGERS: Final = {0xCC: (1, False), 0xCD: (2, False), 0xCE: (4, False), 0xCF: (8, False)} | {
    0xD0: (1, True),
    0xD1: (2, True),
    0xD2: (4, True),
    0xD3: (8, True),
}


@value
class LinkRequest:
    """The initiator's fresh keys and what it offers. `mtu` None or 0: no offer, the link will have 500."""

    x25519: bytes  # 32 bytes, public
    ed25519: bytes  # 32 bytes, public
    mtu: int | None
    mode: int


@value
class LinkProof:
    """The responder's answer. `mtu` None or 0: the link has 500. The signature is not verified by the parser."""

    signature: bytes  # 64 bytes
    x25519: bytes  # 32 bytes, public
    signalling: bytes  # 3 bytes, or empty: it is signed as it stands
    mtu: int | None
    mode: int


@value
class Identify:
    """An initiator says who it is. The signature is not verified by the parser."""

    public_key: bytes  # 64 bytes
    signature: bytes  # 64 bytes


def encode_signalling(mtu: int, mode: int) -> bytes:
    """The three bytes. ValueError if `mtu` needs more than 21 bits or `mode` more than 3; any mode can be expressed."""
    if not (0 <= mtu <= MTU_MASK and 0 <= mode <= 7):
        raise ValueError(f"mtu {mtu} and mode {mode} do not fit 21 and 3 bits")
    return (mode << MODE_SHIFT | mtu).to_bytes(3, "big")


def decode_signalling(signalling: bytes) -> tuple[int, int]:
    """(mtu, mode) of three bytes."""
    number = int.from_bytes(signalling, "big")
    return number & MTU_MASK, number >> MODE_SHIFT


def parse_link_request(data: bytes) -> LinkRequest | Drop:
    """Read the data of a link request. Says nothing of whether the mode is enabled."""
    if len(data) == 67:
        return LinkRequest(data[:32], data[32:64], *decode_signalling(data[64:]))
    if len(data) == 64:
        return LinkRequest(data[:32], data[32:], None, MODE_AES256_CBC)
    return Drop.LINK_REQUEST_SIZE


def build_link_request(request: LinkRequest) -> bytes:
    """The data of a link request; 64 bytes if `mtu` is None. ValueError for wrong sizes or a mode not enabled."""
    if len(request.x25519) != 32 or len(request.ed25519) != 32:
        raise ValueError(f"public keys have 32 bytes, not {len(request.x25519)} and {len(request.ed25519)}")
    if request.mode not in ENABLED_MODES:
        raise ValueError(f"link mode {request.mode} is not enabled")
    signalling = b"" if request.mtu is None else encode_signalling(request.mtu, request.mode)
    return request.x25519 + request.ed25519 + signalling


def parse_link_proof(data: bytes) -> LinkProof | Drop:
    """Read the data of a link request proof. Says nothing of whether the mode is enabled."""
    if len(data) == 99:
        return LinkProof(data[:64], data[64:96], data[96:], *decode_signalling(data[96:]))
    if len(data) == 96:
        return LinkProof(data[:64], data[64:], b"", None, MODE_AES256_CBC)
    return Drop.LINK_PROOF_SIZE


def build_link_proof(signature: bytes, x25519: bytes, signalling: bytes) -> bytes:
    """The data of a link request proof. ValueError if a part has the wrong size."""
    if (len(signature), len(x25519)) != (64, 32) or len(signalling) not in (0, SIGNALLING_SIZE):
        raise ValueError(f"sizes are {len(signature)}, {len(x25519)} and {len(signalling)}, not 64, 32 and 3 or 0")
    return signature + x25519 + signalling


def link_proof_signed_data(link_id: bytes, x25519: bytes, ed25519: bytes, signalling: bytes) -> bytes:
    """What the destination's identity signs: link id, the responder's fresh key, its own Ed25519 key, signalling."""
    return link_id + x25519 + ed25519 + signalling


def build_rtt(rtt: float) -> bytes:
    """The plaintext of the round trip time packet."""
    return b"\xcb" + _F64.pack(rtt)


def parse_rtt(plain: bytes) -> float | Drop | None:
    """Seconds; None for a number that is no duration (NaN, infinite, negative); the Drop if it is no number at all.

    Reads msgpack floats of both sizes and integers. Bytes behind the number are ignored.
    """
    if not plain:
        return Drop.RTT_UNREADABLE
    kind, rest = plain[0], plain[1:]
    rtt = inf
    if kind == 0xCB and len(rest) >= 8:
        rtt = _F64.unpack_from(rest)[0]
    elif kind == 0xCA and len(rest) >= 4:
        rtt = _F32.unpack_from(rest)[0]
    elif kind < 0x80:
        rtt = float(kind)
    elif kind >= 0xE0:
        rtt = float(kind - 256)
    elif kind in _INTEGERS and len(rest) >= _INTEGERS[kind][0]:
        size, signed = _INTEGERS[kind]
        rtt = float(int.from_bytes(rest[:size], "big", signed=signed))
    else:
        return Drop.RTT_UNREADABLE
    return rtt if isfinite(rtt) and rtt >= 0 else None


def parse_identify(plain: bytes) -> Identify | Drop:
    """Read the plaintext of an identify packet."""
    return Identify(plain[:64], plain[64:]) if len(plain) == 128 else Drop.IDENTIFY_SIZE


def build_identify(public_key: bytes, signature: bytes) -> bytes:
    """The plaintext of an identify packet. ValueError if a part has the wrong size."""
    if len(public_key) != 64 or len(signature) != 64:
        raise ValueError(f"public key and signature have 64 bytes each, not {len(public_key)} and {len(signature)}")
    return public_key + signature


def identify_signed_data(link_id: bytes, public_key: bytes) -> bytes:
    """What an identity signs to be known on a link."""
    return link_id + public_key
