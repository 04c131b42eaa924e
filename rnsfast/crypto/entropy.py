"""Where random bytes come from: a function from a size to that many bytes, so that tests can repeat themselves."""

from __future__ import annotations

from collections.abc import Callable

from rnsfast.crypto.provider import provider

Entropy = Callable[[int], bytes]


def system_entropy(size: int) -> bytes:
    """`size` random bytes from the operating system, fit for keys.

    Not `os.urandom`, if libsodium can be reached: that releases the GIL for every call, and beside a thread that
    computes 16 bytes take 190 us instead of 2.
    """
    return provider().random(size)
