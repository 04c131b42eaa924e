"""Socket addresses as bytes.  Protocol 09, sections 5.1, 6.1 and 10.1.

Linux and Windows begin with the family in 16 bits, macOS with a length byte and the family in 8; AF_INET6 has another
number on each. Everything else is the same.
"""

from __future__ import annotations

import socket
import struct
import sys
from typing import Final

from rnsfast.osio.contract import Peer

FLAVOUR: Final = "windows" if sys.platform == "win32" else "darwin" if sys.platform == "darwin" else "linux"

#: AF_INET6 on the wire of each system. AF_INET is 2 everywhere.
INET6: Final = {"linux": 10, "darwin": 30, "windows": 23}
SIZES: Final = {4: 16, 6: 28}  # bytes of a socket address


def make_peer(host: str, port: int, *, scope: int = 0, flavour: str | None = None) -> Peer:
    """A peer from a numeric address. ValueError if it is none, or the port is not within 0..65535."""
    if not 0 <= port <= 65535:
        raise ValueError(f"port {port} is not within 0..65535")
    kind = FLAVOUR if flavour is None else flavour
    try:
        if ":" in host:
            address, name = socket.inet_pton(socket.AF_INET6, host), INET6[kind]
            size, tail = SIZES[6], struct.pack("=I16sI", 0, address, scope)
        else:
            address, name = socket.inet_pton(socket.AF_INET, host), 2
            size, tail = SIZES[4], struct.pack("=4s8x", address)
    except OSError as error:
        raise ValueError(f"{host!r} is no numeric address") from error
    head = bytes((size, name)) if kind == "darwin" else struct.pack("<H", name)
    family = int(socket.AF_INET6 if size == SIZES[6] else socket.AF_INET)
    return Peer(family, host, port, scope, head + struct.pack(">H", port) + tail)


def parse_peer(raw: bytes, flavour: str | None = None) -> Peer | None:
    """The peer behind an address of the system; None if its length and its family do not belong together."""
    kind = FLAVOUR if flavour is None else flavour
    if len(raw) not in (16, 28) or (kind == "darwin" and raw[0] != len(raw)):
        return None
    name = raw[1] if kind == "darwin" else raw[0] | raw[1] << 8
    (port,) = struct.unpack_from(">H", raw, 2)
    if len(raw) == 16 and name == 2:
        return Peer(int(socket.AF_INET), socket.inet_ntop(socket.AF_INET, raw[4:8]), port, 0, bytes(raw))
    if len(raw) == 28 and name == INET6[kind]:
        (scope,) = struct.unpack_from("=I", raw, 24)
        host = socket.inet_ntop(socket.AF_INET6, raw[8:24])
        return Peer(int(socket.AF_INET6), host, port, scope, bytes(raw))
    return None
