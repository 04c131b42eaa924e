"""Stream data messages of channels.  Protocol 05, section 2.3 and 8.

2 bytes  bit 15 end of file, bit 14 compressed, bits 13-0 stream id
rest     the chunk; if compressed one bz2 stream of at most 16384 plain bytes
"""

from __future__ import annotations

import bz2
from typing import Final

from rnsfast.wire.drop import Drop
from rnsfast.wire.value import value

STREAM_TYPE: Final = 0xFF00  # message type in the channel envelope
STREAM_HEADER_SIZE: Final = 2
MAX_STREAM_ID: Final = 0x3FFF
MAX_CHUNK: Final = 16384  # plain bytes in one message, compressed or not
COMPRESSION_TRIES: Final = 3  # over all, a half and a third of the data
COMPRESSION_FLOOR: Final = 32  # bytes; this many or fewer are not tried

_EOF: Final = 0x8000
_COMPRESSED: Final = 0x4000


@value
class StreamData:
    """One chunk of a stream, plain. The id belongs to the receiver."""

    stream_id: int
    eof: bool
    data: bytes


def pack_stream(stream_id: int, data: bytes, eof: bool, compressed: bool) -> bytes:
    """The payload of a stream message. ValueError if the id has more than 14 bits."""
    if not 0 <= stream_id <= MAX_STREAM_ID:
        raise ValueError(f"stream id {stream_id} is not within 0..{MAX_STREAM_ID}")
    return (stream_id | (_EOF if eof else 0) | (_COMPRESSED if compressed else 0)).to_bytes(2, "big") + data


def parse_stream(payload: bytes) -> StreamData | Drop:
    """Read the payload of a stream message; the chunk comes decompressed."""
    if len(payload) < STREAM_HEADER_SIZE:
        return Drop.STREAM_SIZE
    head = payload[0] << 8 | payload[1]
    data: bytes | None = payload[2:]
    if head & _COMPRESSED:
        data = decompress(payload[2:], MAX_CHUNK)
        if data is None:
            return Drop.STREAM_COMPRESSION
    assert data is not None
    return StreamData(head & MAX_STREAM_ID, head >= _EOF, data)


def decompress(compressed: bytes, limit: int) -> bytes | None:
    """The plain bytes of one complete bz2 stream, None if it is damaged, unfinished or longer than `limit` bytes.

    Bytes behind the end of the stream are ignored. Never holds more than `limit` + 1 plain bytes.
    """
    decompressor = bz2.BZ2Decompressor()
    try:
        plain = decompressor.decompress(compressed, limit + 1)
    except (OSError, ValueError, EOFError):
        return None
    return plain if decompressor.eof and len(plain) <= limit else None


def compress_chunk(data: bytes, room: int, tries: int = COMPRESSION_TRIES) -> tuple[int, bytes, bool]:
    """Cut the next chunk off `data` for a message with `room` bytes after the stream header.

    Returns (bytes of `data` consumed, body of the message, whether it is compressed). Compression is tried over ever
    smaller parts and taken only if it fits the message and is smaller than what it stands for; `tries` 0 turns it off.
    """
    size = min(len(data), MAX_CHUNK)
    if size > COMPRESSION_FLOOR:
        for divisor in range(1, tries + 1):
            part = size // divisor
            body = bz2.compress(data[:part], 9)
            if len(body) < min(room, part):
                return part, body, True
    body = data[: min(size, room)]
    return len(body), bytes(body), False
