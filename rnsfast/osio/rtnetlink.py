"""Addresses and routes of a Linux network device by messages to the kernel: no command is run.

    0   4   length, with this header        nlmsghdr
    4   2   type
    6   2   flags
    8   4   sequence number
    12  4   port, 0 for the kernel
    16  8   ifaddrmsg: family u8, prefix length u8, flags u8, scope u8, device u32
    16  12  rtmsg: family, destination bits, source bits, tos, table, protocol, scope, type (u8 each), flags u32
    then attributes: length u16 (with these 4 bytes), type u16, value, up to a multiple of 4

A message that asks for it is answered by an errno, 0 for done (type 2: errno i32, then the message again).
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from typing import Final

NLMSGHDR: Final = struct.Struct("=IHHII")
IFADDRMSG: Final = struct.Struct("=BBBBI")
RTMSG: Final = struct.Struct("=BBBBBBBBI")
RTATTR: Final = struct.Struct("=HH")
ERROR: Final = struct.Struct("=i")

_ERROR, _DONE = 2, 3  # message types
_NEW_ADDRESS, _GET_ADDRESS, _NEW_ROUTE = 20, 22, 24
_REQUEST, _ACK, _DUMP = 1, 4, 0x300  # flags
_EXCLUSIVE, _CREATE = 0x200, 0x400

_ADDRESS, _LOCAL, _BROADCAST = 1, 2, 4  # attributes of addresses
_DESTINATION, _OUT_DEVICE = 1, 4  # attributes of routes
_NO_DUPLICATE_CHECK: Final = 0x02  # IFA_F_NODAD: nobody else is on a point-to-point device
_TABLE_MAIN, _PROTOCOL_STATIC, _SCOPE_LINK, _UNICAST = 254, 4, 253, 1

Address = IPv4Address | IPv6Address


class RtNetlink:
    """A socket to the kernel's routing tables, of the network namespace in which it was made. OSError on refusal."""

    def __init__(self) -> None:
        self._sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        self._sock.settimeout(5.0)  # seconds; the kernel answers within the call
        self._sequence = 0

    def close(self) -> None:
        self._sock.close()

    def add_address(self, device: int, interface: IPv4Interface | IPv6Interface) -> None:
        """EEXIST if the device has it."""
        address, bits = interface.ip.packed, interface.network.prefixlen
        flags = _NO_DUPLICATE_CHECK if interface.version == 6 else 0
        body = IFADDRMSG.pack(_family(interface.ip), bits, flags, 0, device)
        body += _attribute(_LOCAL, address) + _attribute(_ADDRESS, address)
        if isinstance(interface, IPv4Interface) and bits < 31:
            body += _attribute(_BROADCAST, interface.network.broadcast_address.packed)
        self._request(_NEW_ADDRESS, _CREATE | _EXCLUSIVE, body)

    def add_route(self, device: int, network: IPv4Network | IPv6Network) -> None:
        """EEXIST if there is such a route, whatever it says."""
        scope = _SCOPE_LINK if network.version == 4 else 0
        family = _family(network.network_address)
        body = RTMSG.pack(family, network.prefixlen, 0, 0, _TABLE_MAIN, _PROTOCOL_STATIC, scope, _UNICAST, 0)
        body += _attribute(_DESTINATION, network.network_address.packed)
        body += _attribute(_OUT_DEVICE, struct.pack("=I", device))
        self._request(_NEW_ROUTE, _CREATE | _EXCLUSIVE, body)

    def addresses(self) -> list[tuple[int, Address]]:
        """All addresses of this machine, each with the number of its device."""
        sequence = self._send(_GET_ADDRESS, _DUMP, IFADDRMSG.pack(0, 0, 0, 0, 0))
        found: list[tuple[int, Address]] = []
        while True:
            for kind, number, body in _messages(self._sock.recv(65_536)):
                if number != sequence:
                    continue
                if kind == _DONE:
                    return found
                if kind == _ERROR:
                    _raise(body)
                if kind == _NEW_ADDRESS:
                    family, _, _, _, device = IFADDRMSG.unpack_from(body)
                    values = dict(_attributes(body[IFADDRMSG.size :]))
                    raw = values.get(_LOCAL) or values.get(_ADDRESS)
                    if raw is not None and family in (socket.AF_INET, socket.AF_INET6):
                        found.append((device, IPv4Address(raw) if len(raw) == 4 else IPv6Address(raw)))

    def _send(self, kind: int, flags: int, body: bytes) -> int:
        self._sequence += 1
        self._sock.send(NLMSGHDR.pack(NLMSGHDR.size + len(body), kind, flags | _REQUEST, self._sequence, 0) + body)
        return self._sequence

    def _request(self, kind: int, flags: int, body: bytes) -> None:
        sequence = self._send(kind, flags | _ACK, body)
        while True:
            for answer, number, content in _messages(self._sock.recv(65_536)):
                if answer == _ERROR and number == sequence:
                    _raise(content)
                    return


def _family(address: Address) -> int:
    return int(socket.AF_INET if address.version == 4 else socket.AF_INET6)


def _raise(body: bytes) -> None:
    """OSError unless the answer is 0."""
    (code,) = ERROR.unpack_from(body)
    if code:
        raise OSError(-code, os.strerror(-code))


def _attribute(kind: int, value: bytes) -> bytes:
    return RTATTR.pack(RTATTR.size + len(value), kind) + value + bytes(-len(value) % 4)


def _messages(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Type, sequence number and body of each message."""
    at = 0
    while at + NLMSGHDR.size <= len(data):
        length, kind, _, number, _ = NLMSGHDR.unpack_from(data, at)
        if not NLMSGHDR.size <= length <= len(data) - at:
            raise OSError(errno.EPROTO, os.strerror(errno.EPROTO))
        yield kind, number, data[at + NLMSGHDR.size : at + length]
        at += length + 3 & ~3


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + RTATTR.size <= len(data):
        length, kind = RTATTR.unpack_from(data, at)
        if not RTATTR.size <= length <= len(data) - at:
            return
        yield kind, data[at + RTATTR.size : at + length]
        at += length + 3 & ~3
