"""What stands in the packets of a tunnel's link.  docs/tun.md, Gateway mode.

    first byte   payload
    0x4_ 0x6_    one IP packet, as it is
    0x01         several: for each its length (2 bytes, big-endian) and the packet
    0x02         a message between the gateways, see below

    0x02 kind    kind  follows
                 1     hello: version 1, MTU 2, number of addresses 1, for each: family (4 or 6) 1, prefix length 1,
                       address 4 or 16
                 2     ping: 4 bytes
                 3     pong: the 4 bytes of the ping
                 4     bye: reason 1

Numbers are big-endian. What follows beyond that is ignored, so later versions can say more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from ipaddress import IPv4Interface, IPv6Interface
from typing import Final

from rnsfast.gateway.lost import Lost

BUNDLE: Final = 0x01
CONTROL: Final = 0x02
VERSION: Final = 1
HELLO, PING, PONG, BYE = 1, 2, 3, 4
MAX_ADDRESSES: Final = 16  # in a hello, which with these still fits the smallest link: 294 of 431 bytes
LENGTH: Final = 2  # bytes before each packet of a bundle
MAX_PACKET: Final = 65_535  # bytes: no IP packet is larger

Address = IPv4Interface | IPv6Interface


class Reason(IntEnum):
    """Why a gateway sends no more on a link."""

    OTHER_LINK = 0  # both ends have asked for one; the other is kept
    SHUT_DOWN = 1
    BUSY = 2  # it has a tunnel with somebody else
    VERSION = 3


@dataclass(frozen=True, slots=True)
class Hello:
    """Who begins says this, and the other answers with the same."""

    version: int
    mtu: int  # bytes of the largest IP packet its device takes
    addresses: tuple[Address, ...]


@dataclass(frozen=True, slots=True)
class Ping:
    token: bytes  # 4 bytes


@dataclass(frozen=True, slots=True)
class Pong:
    token: bytes  # 4 bytes


@dataclass(frozen=True, slots=True)
class Bye:
    """The sender sends no more on this link."""

    reason: int


Control = Hello | Ping | Pong | Bye


def build_control(message: Control) -> bytes:
    """The payload for `message`."""
    if isinstance(message, Hello):
        body = bytearray((CONTROL, HELLO, message.version))
        body += message.mtu.to_bytes(2, "big")
        addresses = message.addresses[:MAX_ADDRESSES]
        body.append(len(addresses))
        for address in addresses:
            body += bytes((address.version, address.network.prefixlen)) + address.ip.packed
        return bytes(body)
    if isinstance(message, Bye):
        return bytes((CONTROL, BYE, message.reason))
    return bytes((CONTROL, PING if isinstance(message, Ping) else PONG)) + message.token


def parse_control(payload: bytes) -> Control | None:
    """The message in a payload that begins with 0x02. None for what no version we know can have sent; never raises."""
    kind, body = payload[1:2], payload[2:]
    if kind == b"\x01":
        return _parse_hello(body)
    if kind in (b"\x02", b"\x03") and len(body) >= 4:
        return Ping(body[:4]) if kind == b"\x02" else Pong(body[:4])
    if kind == b"\x04" and body:
        return Bye(body[0])
    return None


def _parse_hello(body: bytes) -> Hello | None:
    if len(body) < 4:
        return None
    version, mtu, count = body[0], int.from_bytes(body[1:3], "big"), body[3]
    if version != VERSION:
        return Hello(version, mtu, ())
    addresses: list[Address] = []
    at = 4
    for _ in range(min(count, MAX_ADDRESSES)):
        head = body[at : at + 2]
        size = {4: 4, 6: 16}.get(head[0]) if len(head) == 2 else None
        if size is None or head[1] > size * 8 or len(body) < at + 2 + size:
            return None
        raw = body[at + 2 : at + 2 + size]
        addresses.append(IPv4Interface((raw, head[1])) if size == 4 else IPv6Interface((raw, head[1])))
        at += 2 + size
    return Hello(version, mtu, tuple(addresses))


def bundle(packets: Sequence[bytes], mdu: int) -> list[bytes]:
    """Payloads of at most `mdu` bytes for IP packets of at most as many, in order.

    As many packets as fit share a payload; one that shares with nobody goes as it is.
    """
    payloads: list[bytes] = []
    parts: list[bytes] = []
    room = mdu - 1
    for packet in packets:
        need = LENGTH + len(packet)
        if need > room:
            if parts:
                payloads.append(parts[1] if len(parts) == 2 else b"\x01" + b"".join(parts))
                parts = []
                room = mdu - 1
            if need > room:  # it fills a payload alone
                payloads.append(packet)
                continue
        parts += (len(packet).to_bytes(2, "big"), packet)
        room -= need
    if parts:
        payloads.append(parts[1] if len(parts) == 2 else b"\x01" + b"".join(parts))
    return payloads


def unbundle(payload: bytes, into: list[bytes]) -> Lost | None:
    """Add the packets of a payload that begins with 0x01 to `into`. What is whole counts, whatever comes after it."""
    at, end = 1, len(payload)
    while at < end:
        start = at + LENGTH
        if start > end:
            return Lost.IN_BUNDLE
        at = start + (payload[start - 2] << 8 | payload[start - 1])
        if at > end or at == start:
            return Lost.IN_BUNDLE
        into.append(payload[start:at])
    return None
