"""KISS framing of packets on byte streams.  Protocol 01, section 11.3.

c0 | command, 00 is data | packet with db -> db dd and c0 -> db dc | c0
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from rnsfast.wire.drop import Drop

FEND: Final = b"\xc0"
FESC: Final = b"\xdb"
FEND_ESCAPED: Final = b"\xdb\xdc"
FESC_ESCAPED: Final = b"\xdb\xdd"
COMMAND_DATA: Final = 0x00
COMMAND_READY: Final = 0x0F  # from a device: it can take the next packet


def encode(packet: bytes, command: int = COMMAND_DATA) -> bytes:
    """The frame of one packet."""
    return b"\xc0%c%b\xc0" % (command, packet.replace(b"\xdb", b"\xdb\xdd").replace(b"\xc0", b"\xdb\xdc"))


def unescape(escaped: bytes) -> bytes:
    """The bytes of a frame. An escape before any other byte than dc and dd is left out, the byte stays."""
    first, *rest = escaped.split(b"\xdb")
    parts = [first]
    for part in rest:
        if part[:1] == b"\xdc":
            parts += (b"\xc0", part[1:])
        elif part[:1] == b"\xdd":
            parts += (b"\xdb", part[1:])
        else:
            parts.append(part)
    return b"".join(parts)


class KissDecoder:
    """Takes a stream apart into frames, in chunks of any size. Linear in the bytes fed; never raises.

    Frames are cut at `max_frame` bytes (hardware MTU) and delivered, as the reference does; there is no minimum. Holds
    about `2 * max_frame` bytes. `ready` counts the device's answers that it can take the next packet. Not safe for
    threads.
    """

    __slots__ = ("_dangling", "_inside", "_parts", "_room", "drops", "max_frame", "ready")

    def __init__(self, max_frame: int) -> None:
        self.max_frame = max_frame
        self.drops: Counter[Drop] = Counter()
        self.ready = 0
        self.reset()

    def reset(self) -> None:
        """Forget an unfinished frame: the stream begins anew."""
        self._dangling = False  # the last data frame ended in an escape: it holds for the next one, as in the reference
        self._begin(False)

    def _begin(self, inside: bool) -> None:
        self._inside = inside  # a delimiter opened a frame, and what follows it is in _parts
        self._parts: list[bytes] = []
        self._room = 2 * self.max_frame + 1  # what is beyond the command and max_frame escaped bytes is never used

    def feed(self, chunk: bytes | bytearray | memoryview) -> list[bytes]:
        """The packets that `chunk` completes."""
        frames: list[bytes] = []
        first, *rest = bytes(chunk).split(b"\xc0")
        self._collect(first)
        for part in rest:
            # A delimiter stands before each part. It ends an open data frame and then opens none; else it opens one.
            if self._inside and self._finish(frames):
                self._begin(False)
            else:
                self._begin(True)
                self._collect(part)
        return frames

    def _collect(self, part: bytes) -> None:
        if part and self._inside and self._room:
            part = part[: self._room]
            self._room -= len(part)
            self._parts.append(part)

    def _finish(self, frames: list[bytes]) -> bool:
        """Whether the open frame, which a delimiter follows, is one with data. It may have none."""
        escaped = b"".join(self._parts)
        if not escaped:
            return False
        command = escaped[0] & 0x0F
        if command == COMMAND_READY:
            self.ready += 1
        if command != COMMAND_DATA:
            return False
        escaped = b"\xdb" + escaped[1:] if self._dangling and len(escaped) > 1 else escaped[1:]
        frame = unescape(escaped)
        self._dangling = (self._dangling and not escaped) or (escaped[-1:] == b"\xdb" and len(frame) < self.max_frame)
        if len(frame) > self.max_frame:
            self.drops[Drop.FRAME_LONG] += 1
            frame = frame[: self.max_frame]
        if frame:
            frames.append(frame)
        return True
