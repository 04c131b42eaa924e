"""Reading msgpack that may be damaged."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from typing import Any, Final

import msgpack

READ_SIZE: Final = 1 << 16  # bytes decoded ahead
UNREADABLE: Final = (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException)


def unpack(data: bytes) -> Any:
    """The one object in `data`, None if there is none, more than one, or something unreadable."""
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=False)
    except UNREADABLE:
        return None


def unpack_rows(data: bytes, most: int) -> Iterator[Any]:
    """The elements of the one list in `data`, only the last `most` of them, one at a time.

    Raises ValueError where that is no list, becomes unreadable, or goes on after its end.
    """
    unpacker = msgpack.Unpacker(
        BytesIO(data), read_size=READ_SIZE, max_buffer_size=max(len(data), READ_SIZE), raw=False, strict_map_key=False
    )
    try:
        count = unpacker.read_array_header()
        for _ in range(count - most):
            unpacker.skip()
        for _ in range(min(count, most)):
            yield unpacker.unpack()
    except UNREADABLE as error:
        raise ValueError(f"unreadable after {unpacker.tell()} of {len(data)} bytes") from error
    if unpacker.tell() != len(data):
        raise ValueError("bytes after the end")


def pack(value: object) -> bytes:
    """The bytes of `value`: str as str, bytes as bin, floats with 64 bits, integers in the shortest form."""
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed
