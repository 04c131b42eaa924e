"""IP packets made and checked the plain way: words added one by one, by the RFCs and not by the product's functions."""

from __future__ import annotations

import ipaddress
import struct
from dataclasses import dataclass


def checksum(data: bytes) -> int:
    """RFC 1071: the complement of the one's complement sum of all 16-bit words."""
    if len(data) % 2:
        data += b"\0"
    total = 0
    for at in range(0, len(data), 2):
        total += data[at] * 256 + data[at + 1]
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def pseudo(source: bytes, destination: bytes, protocol: int, size: int) -> bytes:
    if len(source) == 4:
        return source + destination + struct.pack(">BBH", 0, protocol, size)
    return source + destination + struct.pack(">IHBB", size, 0, 0, protocol)


def ip4(
    source: str, destination: str, protocol: int, body: bytes, *, identifier: int = 0, fragment: int = 0x4000
) -> bytes:
    addresses = ipaddress.IPv4Address(source).packed + ipaddress.IPv4Address(destination).packed
    head = struct.pack(">BBHHHBBH", 0x45, 0, 20 + len(body), identifier, fragment, 64, protocol, 0) + addresses
    return head[:10] + struct.pack(">H", checksum(head)) + head[12:] + body


def ip6(source: str, destination: str, protocol: int, body: bytes) -> bytes:
    addresses = ipaddress.IPv6Address(source).packed + ipaddress.IPv6Address(destination).packed
    return struct.pack(">IHBB", 0x60000000, len(body), protocol, 64) + addresses + body


def udp(source: bytes, destination: bytes, sport: int, dport: int, body: bytes) -> bytes:
    size = 8 + len(body)
    bare = struct.pack(">HHHH", sport, dport, size, 0) + body
    found = checksum(pseudo(source, destination, 17, size) + bare) or 0xFFFF
    return bare[:6] + struct.pack(">H", found) + body


def udp4(source: str, destination: str, sport: int, dport: int, body: bytes) -> bytes:
    left, right = ipaddress.IPv4Address(source).packed, ipaddress.IPv4Address(destination).packed
    return ip4(source, destination, 17, udp(left, right, sport, dport, body))


def udp6(source: str, destination: str, sport: int, dport: int, body: bytes) -> bytes:
    left, right = ipaddress.IPv6Address(source).packed, ipaddress.IPv6Address(destination).packed
    return ip6(source, destination, 17, udp(left, right, sport, dport, body))


@dataclass(frozen=True)
class Parsed:
    """An IP packet whose lengths and checksums are right."""

    version: int
    source: bytes
    destination: bytes
    protocol: int
    identifier: int
    fragment: int
    header: bytes  # of the transport, with its checksum taken out
    payload: bytes

    @property
    def ports(self) -> tuple[int, int]:
        return struct.unpack(">HH", self.header[:4])  # type: ignore[return-value]

    @property
    def sequence(self) -> int:
        return int.from_bytes(self.header[4:8], "big")

    @property
    def flags(self) -> int:
        return self.header[13]


def parse(packet: bytes) -> Parsed:
    """Read a TCP or UDP packet; AssertionError if a length or checksum is wrong."""
    version = packet[0] >> 4
    if version == 4:
        at = (packet[0] & 15) * 4
        total, identifier, fragment = struct.unpack(">HHH", packet[2:8])
        assert total == len(packet), "total length"
        assert checksum(packet[:at]) == 0, "header checksum"
        protocol, source, destination = packet[9], packet[12:16], packet[16:20]
    else:
        at, identifier, fragment = 40, 0, 0
        assert struct.unpack(">H", packet[4:6])[0] + 40 == len(packet), "payload length"
        protocol, source, destination = packet[6], packet[8:24], packet[24:40]
    body = packet[at:]
    assert checksum(pseudo(source, destination, protocol, len(body)) + body) == 0, "transport checksum"
    if protocol == 17:
        assert struct.unpack(">H", body[4:6])[0] == len(body), "UDP length"
        assert body[6:8] != b"\0\0"
        size = 8
        header = body[:6]
    else:
        size = (body[12] >> 4) * 4
        header = body[:16] + body[18:size]
    return Parsed(version, source, destination, protocol, identifier, fragment, header, body[size:])
