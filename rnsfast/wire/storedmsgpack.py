"""Reading msgpack that may be damaged: a value or None, never an exception."""

from __future__ import annotations

from typing import Any

import msgpack


def unpack(data: bytes) -> Any:
    """The one object in `data`, None if there is none, more than one, or something unreadable."""
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=False)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException):
        return None


def pack(value: object) -> bytes:
    """The bytes of `value`: str as str, bytes as bin, floats with 64 bits, integers in the shortest form."""
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed
