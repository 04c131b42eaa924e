"""IP packets for tests, made by hand."""

from __future__ import annotations

import struct
from ipaddress import ip_address


def checksum(data: bytes) -> int:
    """Word by word, as RFC 1071 has it: the oracle."""
    if len(data) % 2:
        data += b"\0"
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def ipv4(source: str, destination: str, payload: bytes = b"", *, protocol: int = 17, flags: int = 0) -> bytes:
    head = struct.pack(
        "!BBHHHBBH4s4s", 0x45, 0, 20 + len(payload), 1, flags, 64, protocol, 0,
        ip_address(source).packed, ip_address(destination).packed,
    )  # fmt: skip
    return head[:10] + checksum(head).to_bytes(2, "big") + head[12:] + payload


def ipv6(source: str, destination: str, payload: bytes = b"", *, protocol: int = 17) -> bytes:
    return (
        struct.pack("!IHBB", 0x60000000, len(payload), protocol, 64)
        + ip_address(source).packed
        + ip_address(destination).packed
        + payload
    )
