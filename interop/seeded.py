"""Test data that both ends of a transfer can make for themselves from a few words. No imports beyond the library."""

from __future__ import annotations

import hashlib

LINE = "{:09d} a line of text that says the same thing as the one before it\n"
LINE_BYTES = len(LINE.format(0))


def random_bytes(seed: int | str, size: int, offset: int = 0) -> bytes:
    """Incompressible bytes. A longer request with the same seed begins with the shorter one."""
    return hashlib.shake_128(f"interop {seed}".encode()).digest(offset + size)[offset:]


def text_bytes(seed: int | str, size: int, offset: int = 0) -> bytes:
    """Bytes that compress about twenty to one: numbered lines, counted from a start that the seed decides."""
    first = int.from_bytes(hashlib.sha256(f"interop {seed}".encode()).digest()[:3], "big")
    start, end = offset // LINE_BYTES, (offset + size) // LINE_BYTES + 1
    text = "".join(LINE.format(first + number) for number in range(start, end)).encode()
    cut = offset - start * LINE_BYTES
    return text[cut : cut + size]


def data(kind: str, seed: int | str, size: int, offset: int = 0) -> bytes:
    """`kind` is "random" or "text"."""
    if kind == "random":
        return random_bytes(seed, size, offset)
    if kind == "text":
        return text_bytes(seed, size, offset)
    raise ValueError(f"kind of data {kind!r} is not one of random, text")


def digest(content: bytes) -> str:
    """SHA-256 as hex."""
    return hashlib.sha256(content).hexdigest()


def message_bytes(seed: int | str, number: int, size: int) -> bytes:
    """Content of channel message `number` of a series."""
    return random_bytes(f"{seed}/{number}", size)


def series_digest(seed: int | str, count: int, size: int, first: int = 0) -> str:
    """SHA-256 over a whole series of channel messages: for each its number (4 bytes, big endian), then its content."""
    total = hashlib.sha256()
    for number in range(first, first + count):
        total.update(number.to_bytes(4, "big") + message_bytes(seed, number, size))
    return total.hexdigest()
