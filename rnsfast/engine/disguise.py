"""Packets of our own that look as if they came from further away.  Protocol 02, section 11.

Whatever goes on from others has been counted up, so no hops yet means: made here, or by a program behind us.
"""

from __future__ import annotations

from typing import Final

from rnsfast.wire.packet import ANNOUNCE, GROUP, HEADER_2, PLAIN, TRANSPORT

DELTAS: Final = range(2, 8)  # hops to choose from, once for each run

_BROADCAST: Final = (PLAIN << 2, GROUP << 2)  # never counted beyond their first hop


class Disguise:
    """Makes a raw packet without hops one with `hops`; announces also get a transport id, ours."""

    __slots__ = ("_head", "hops")

    def __init__(self, hops: int, transport_id: bytes) -> None:
        self.hops = hops
        self._head = bytes((hops,)) + transport_id

    def __call__(self, raw: bytes) -> bytes:
        flags = raw[0]
        if raw[1] or flags & 0x0C in _BROADCAST:
            return raw
        if flags & 3 == ANNOUNCE and not flags & HEADER_2:
            return bytes((flags | HEADER_2 | TRANSPORT,)) + self._head + raw[2:]
        return raw[:1] + self._head[:1] + raw[2:]
