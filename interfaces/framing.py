"""The framings of byte streams, in one shape.  Protocol 06, section 3."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from rnsfast.interfaces.base import Framing
from rnsfast.wire import hdlc, kiss


class HdlcFraming:
    """Both flags on every frame, escapes for both. The default of every stream."""

    encode = staticmethod(hdlc.encode)
    encode_many = staticmethod(hdlc.encode_many)

    @staticmethod
    def decoder(max_frame: int) -> hdlc.HdlcDecoder:
        return hdlc.HdlcDecoder(max_frame)


class KissFraming:
    """For external TNC programs behind a TCP port."""

    @staticmethod
    def encode(packet: bytes) -> bytes:
        return kiss.encode(packet)

    @staticmethod
    def encode_many(packets: Iterable[bytes]) -> bytes:
        return b"".join([kiss.encode(packet) for packet in packets])

    @staticmethod
    def decoder(max_frame: int) -> kiss.KissDecoder:
        return kiss.KissDecoder(max_frame)


HDLC: Final[Framing] = HdlcFraming()
KISS: Final[Framing] = KissFraming()
