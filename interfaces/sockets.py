"""Options, addresses and error sentences of TCP sockets.  Protocol 06, sections 4.2 and 4.3."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import struct
import sys
from pathlib import Path
from typing import Any, Final

from rnsfast.errors import InterfaceError
from rnsfast.interfaces.base import Address

#: (user timeout in ms, idle, interval in seconds, count): how fast a dead path is noticed on Linux.
NORMAL_KEEPALIVE: Final = (24_000, 5, 2, 12)
I2P_KEEPALIVE: Final = (45_000, 10, 9, 5)
_TCP_KEEPALIVE_DARWIN: Final = 0x10
_SIOCGIFADDR: Final = 0x8915
_SIOCGIFBRDADDR: Final = 0x8919


def tune(sock: socket.socket, *, i2p: bool) -> None:
    """No Nagle delay, and keep-alive as fast as the platform allows. What the platform refuses is left as it is."""
    timeout, idle, interval, count = I2P_KEEPALIVE if i2p else NORMAL_KEEPALIVE
    options: list[tuple[int, int, int]] = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)]
    if sys.platform in ("linux", "android"):
        options += [
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout),
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, count),
        ]
    elif sys.platform == "darwin":
        options += [
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, _TCP_KEEPALIVE_DARWIN, idle),
        ]
    for level, option, value in options:
        with contextlib.suppress(OSError):
            sock.setsockopt(level, option, value)


def code(error: OSError | int) -> str:
    """`Connection refused (ECONNREFUSED)`; what the resolver says for its own errors."""
    if isinstance(error, socket.gaierror):
        return f"{error.strerror or 'the name cannot be resolved'}"
    number = error if isinstance(error, int) else error.errno
    if number is None:
        return str(error) or "unknown error"
    return f"{os.strerror(number)} ({errno.errorcode.get(number, number)})"


#: What a failed bind means, and whether it may pass by itself.
_BIND: Final[dict[int, tuple[str, bool]]] = {
    errno.EADDRINUSE: ("is in use by another program", True),
    errno.EADDRNOTAVAIL: ("is not an address of this machine", True),
    errno.ENODEV: ("belongs to a device that is not there", True),
    errno.EACCES: ("needs rights this program does not have", False),
    errno.EPERM: ("needs rights this program does not have", False),
    errno.EAFNOSUPPORT: ("belongs to an address family this system does not have", False),
    errno.EMFILE: ("cannot be opened, this process has too many open files", True),
    errno.ENFILE: ("cannot be opened, this system has too many open files", True),
}


def bind_failure(title: str, address: str, error: OSError) -> InterfaceError:
    """`TCPServerInterface[x]: 127.0.0.1:4242 is in use by another program (EADDRINUSE)`."""
    number = error.errno or 0
    if isinstance(error, socket.gaierror):
        return InterfaceError(f"{title}: {address} cannot be resolved: {code(error)}", retryable=True)
    sentence, retryable = _BIND.get(number, (f"cannot be opened: {os.strerror(number)}", False))
    return InterfaceError(f"{title}: {address} {sentence} ({errno.errorcode.get(number, number)})", retryable=retryable)


def listen_addresses(host: str, port: int, *, prefer_ipv6: bool) -> list[Address]:
    """Where `host` can be bound: the preferred family first. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return preferred([(family, address) for family, _, _, _, address in found], prefer_ipv6=prefer_ipv6)


def preferred(addresses: list[Address], *, prefer_ipv6: bool) -> list[Address]:
    """The same addresses, those of the preferred family first, otherwise in order."""
    first = socket.AF_INET6 if prefer_ipv6 else socket.AF_INET
    return sorted(addresses, key=lambda address: address[0] != first)


def open_listener(family: int, address: Any, backlog: int) -> socket.socket:
    """A bound, listening, non-blocking socket. Raises OSError."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        elif hasattr(socket, "SO_EXCLUSIVEADDRUSE"):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        if family == socket.AF_INET6 and hasattr(socket, "IPV6_V6ONLY"):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # `::` takes IPv4 too
        sock.bind(address)
        sock.listen(backlog)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def device_address(device: str, *, prefer_ipv6: bool) -> str:
    """An address of a network device: the first IPv4 one, or IPv6 if preferred or the only kind. Raises OSError."""
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, "addresses of devices can be looked up on Linux only; use listen_ip")
    if device not in [name for _, name in socket.if_nameindex()]:
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
    four, six = _ipv4_of(device), _ipv6_of(device)
    chosen = (six or four) if prefer_ipv6 else (four or six)
    if chosen is None:
        raise OSError(errno.EADDRNOTAVAIL, f"device {device} has no address")
    return chosen


def device_broadcast(device: str) -> str:
    """The IPv4 broadcast address of a network device. Raises OSError."""
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, "addresses of devices can be looked up on Linux only; use listen_ip and forward_ip")
    if device not in [name for _, name in socket.if_nameindex()]:
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
    found = _ipv4_of(device, _SIOCGIFBRDADDR)
    if found is None or found == "0.0.0.0":
        raise OSError(errno.EADDRNOTAVAIL, "it has no IPv4 broadcast address")
    return found


def _ipv4_of(device: str, question: int = _SIOCGIFADDR) -> str | None:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock.fileno(), question, struct.pack("256s", device.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _ipv6_of(device: str) -> str | None:
    """Global addresses before link-local ones, which get the device appended."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, _, _, _, _, name = line.split()
            if name == device:
                address = ipaddress.IPv6Address(int(digits, 16))
                found.append(f"{address}%{device}" if address.is_link_local else str(address))
    found.sort(key=lambda text: "%" in text)
    return found[0] if found else None
