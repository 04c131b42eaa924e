"""HDLC framing of packets on byte streams.  Protocol 01, section 11.1.

    7e | packet with 7d -> 7d 5d and 7e -> 7d 5e | 7e

Each frame has both flags of its own.  The decoder lets frames share them and so finds back by itself after damage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from rnsfast.wire.drop import Drop

FLAG: Final = b"\x7e"
ESCAPE: Final = b"\x7d"
KEEPALIVE: Final = FLAG + FLAG  # an empty frame: some peers send it, everybody ignores it
MIN_FRAME: Final = 20  # bytes: no packet is smaller

#: By the byte that follows an escape: what the two stand for. An escape before another byte than 5d and 5e stays.
_PAIRS: Final = tuple({0x5D: b"\x7d", 0x5E: b"\x7e"}.get(i, b"\x7d" + bytes((i,))) for i in range(256))


def encode(packet: bytes) -> bytes:
    """The frame of one packet."""
    return b"~" + packet.replace(b"}", b"}]").replace(b"~", b"}^") + b"~"


def encode_many(packets: Iterable[bytes]) -> bytes:
    """The frames of many packets, one behind the other: one write."""
    body = b"~~".join([packet.replace(b"}", b"}]").replace(b"~", b"}^") for packet in packets])
    return b"~" + body + b"~" if body else b""


def unescape(frame: bytes) -> bytes:
    """What stands between two flags, unescaped."""
    pieces = frame.split(b"}")
    if len(pieces) == 1:
        return frame
    if len(pieces) << 5 > len(frame):  # so dense that pieces in Python would cost more
        return frame.replace(b"}^", b"~").replace(b"}]", b"}")
    # Encrypted packets have an escape in 128 bytes. To look for one byte is far quicker than for two: 20 us for 16 KiB
    # where replacing the two pairs takes 47; 1.0 us and 1.6 for all that is done to a packet of 500.
    pairs = _PAIRS
    for i in range(1, len(pieces)):
        piece = pieces[i]
        pieces[i] = pairs[piece[0]] + piece[1:] if piece else b"}"
    return b"".join(pieces)


class HdlcDecoder:
    """Takes a stream apart into frames, in chunks of any size. Linear in the bytes fed; never raises.

    Frames of more than `max_frame` bytes (hardware MTU and access code) or fewer than 20 are dropped and counted in
    `drops`. Holds at most `buffer_limit` bytes of an unfinished frame, by default twice `max_frame`: what a frame has
    when every byte is escaped. Not safe for threads.
    """

    __slots__ = ("_inside", "_parts", "_size", "buffer_limit", "drops", "max_frame")

    def __init__(self, max_frame: int, *, buffer_limit: int | None = None) -> None:
        self.max_frame = max_frame
        self.buffer_limit = 2 * max_frame if buffer_limit is None else buffer_limit
        self.drops: Counter[Drop] = Counter()
        self._inside = False  # a flag was seen, and what follows it is in _parts
        self._parts: list[bytes] = []  # joined only when the frame ends, so that many small chunks cost no more
        self._size = 0

    def reset(self) -> None:
        """Forget an unfinished frame: the stream begins anew."""
        self._inside, self._size = False, 0
        self._parts.clear()

    def feed(self, chunk: bytes | bytearray | memoryview) -> list[bytes]:
        """The packets that `chunk` completes."""
        first, *rest = bytes(chunk).split(b"~")
        if first and self._inside:
            self._parts.append(first)
            self._size += len(first)
        frames: list[bytes] = []
        if rest:
            if self._size:
                rest.insert(0, b"".join(self._parts))
                self._parts.clear()
            self._inside = True
            last = rest.pop()
            self._size = len(last)
            if last:
                self._parts.append(last)
            longest = self.max_frame
            for frame in rest:
                if frame:
                    frame = unescape(frame)
                    if 20 <= len(frame) <= longest:
                        frames.append(frame)
                    else:
                        self.drops[Drop.FRAME_SHORT if len(frame) < 20 else Drop.FRAME_LONG] += 1
        if self._size >= self.buffer_limit:
            self.drops[Drop.FRAME_UNFINISHED] += 1
            self.reset()
        return frames
