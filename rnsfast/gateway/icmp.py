"""Telling a sender that its packet is larger than what the tunnel carries.  RFC 792, 1191, 1812, 4443.

    IPv4   destination unreachable (3), fragmentation needed (4): MTU in the last 2 of the 4 bytes after the checksum
    IPv6   packet too big (2): MTU in those 4 bytes

The answer comes from the address the packet was for: one that the kernel expects to hear from through this device.
"""

from __future__ import annotations

from typing import Final

from rnsfast.osio.checksum import complement, word_sum

ICMP, ICMPV6 = 1, 58
QUOTED_4: Final = 576 - 20 - 8  # bytes of the packet that the answer quotes
QUOTED_6: Final = 1280 - 40 - 8
ERRORS_4: Final = frozenset((3, 4, 5, 11, 12))  # types that are never answered
RATE: Final = 50.0  # answers a second
BURST: Final = 50.0


class Bucket:
    """How many answers may still be sent now."""

    def __init__(self, rate: float = RATE, burst: float = BURST) -> None:
        self._rate, self._burst = rate, burst
        self._level, self._filled = burst, 0.0

    def take(self, now: float) -> bool:
        """One more? `now` is in seconds."""
        self._level = min(self._burst, self._level + (now - self._filled) * self._rate)
        self._filled = now
        if self._level < 1:
            return False
        self._level -= 1
        return True


def too_big(packet: bytes, mtu: int) -> bytes | None:
    """The answer to a packet with a sound header; None if it must not be answered."""
    return _too_big_4(packet, mtu) if packet[0] >> 4 == 4 else _too_big_6(packet, mtu)


def _too_big_4(packet: bytes, mtu: int) -> bytes | None:
    header = (packet[0] & 15) * 4
    source, destination = packet[12:16], packet[16:20]
    if (packet[6] & 0x1F or packet[7]) or source[0] >= 0xE0 or source[0] == 0 or destination[0] >= 0xE0:
        return None  # a later fragment; or nobody one can answer to
    if packet[9] == ICMP and packet[header : header + 1] and packet[header] in ERRORS_4:
        return None
    rest = mtu.to_bytes(4, "big") + packet[:QUOTED_4]
    message = b"\x03\x04" + complement(word_sum(b"\x03\x04\x00\x00" + rest)).to_bytes(2, "big") + rest
    head = b"\x45\xc0" + (20 + len(message)).to_bytes(2, "big") + b"\x00\x00\x00\x00\x40\x01"
    both = destination + source
    return head + complement(word_sum(head + b"\x00\x00" + both)).to_bytes(2, "big") + both + message


def _too_big_6(packet: bytes, mtu: int) -> bytes | None:
    source, destination = packet[8:24], packet[24:40]
    if source[0] == 0xFF or destination[0] == 0xFF or not any(source):
        return None
    if packet[6] == ICMPV6 and packet[40:41] and packet[40] < 128:
        return None
    rest = mtu.to_bytes(4, "big") + packet[:QUOTED_6]
    both = destination + source
    pseudo = both + (4 + len(rest)).to_bytes(4, "big") + b"\x00\x00\x00" + bytes((ICMPV6,))
    checksum = complement(word_sum(pseudo + b"\x02\x00\x00\x00" + rest)).to_bytes(2, "big")
    message = b"\x02\x00" + checksum + rest
    return b"\x60\x00\x00\x00" + len(message).to_bytes(2, "big") + bytes((ICMPV6, 64)) + both + message
