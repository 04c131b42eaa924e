"""The Internet checksum (RFC 1071) at the speed of one division.

Adding 16-bit words with end-around carry is arithmetic modulo 65,535. Dividing the whole as one number takes 1 us for
1400 bytes, adding 700 words 11 us.
"""

from __future__ import annotations


def word_sum(data: bytes | memoryview) -> int:
    """The sum of the 16-bit words of `data`, modulo 65,535; an odd byte at the end counts as the high half of one."""
    total = int.from_bytes(data, "big")
    return (total << 8 if len(data) & 1 else total) % 65_535


def complement(total: int) -> int:
    """The checksum for a sum of `word_sum`s. What is summed is not all zeros: headers never are."""
    return 65_535 - (total % 65_535 or 65_535)


def udp_complement(total: int) -> int:
    """The same for UDP, where 0 would say that there is no checksum."""
    return complement(total) or 65_535
