"""Network namespaces for tests that need real devices: made and removed by the test, entered by the calling thread.

What a thread opens inside belongs to the namespace for ever; the thread itself comes back out.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_CLONE_NEWNET = 0x40000000
_PATIENCE = 20.0  # seconds for a command
_IPV6_ROUTES = 0x400  # group of netlink messages
_NEW_ROUTE, _LOCAL = 24, 2  # type of message, type of route


@functools.cache
def obstacle() -> str:
    """Why real devices cannot be tested here; empty if they can."""
    if sys.platform != "linux":
        return "TUN devices and network namespaces are tested on Linux"
    if os.geteuid() != 0:
        return "TUN devices and network namespaces need root"
    if not os.path.exists("/dev/net/tun"):
        return "there is no /dev/net/tun"
    if shutil.which("ip") is None:
        return "the command ip is not installed"
    name = _new_name()
    try:
        _ip("netns", "add", name)
        _ip("netns", "del", name)
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made: {error.stderr.strip()}"
    return ""


#: Ask only when such a test is about to run, not when it is collected.
def need_devices() -> None:
    if reason := obstacle():
        pytest.skip(reason)


def _new_name() -> str:
    return f"rf-{os.getpid()}-{os.urandom(3).hex()}"


def _ip(*arguments: str) -> str:
    command = ["ip", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=True).stdout


def _is_local_route(message: bytes, address: bytes) -> bool:
    """Whether a netlink message says that packets for `address` are now taken in."""
    return message[4] == _NEW_ROUTE and message[23] == _LOCAL and address in message[28:]


class Namespace:
    def __init__(self, name: str) -> None:
        self.name = name

    def ip(self, *arguments: str) -> str:
        """Run `ip` in here."""
        return _ip("-n", self.name, *arguments)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """The calling thread works in here."""
        libc = ctypes.CDLL(None, use_errno=True)
        back = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        there = os.open(f"/run/netns/{self.name}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if libc.setns(there, _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
            try:
                yield
            finally:
                assert libc.setns(back, _CLONE_NEWNET) == 0
        finally:
            os.close(there)
            os.close(back)

    def set(self, key: str, value: str) -> None:
        """A `sysctl` of the network, like `ipv4/ip_forward`."""
        with self.inside():
            Path("/proc/sys/net", key).write_text(value)

    @contextlib.contextmanager
    def taking(self, address: str) -> Iterator[None]:
        """Inside, the IPv6 `address` is given to a device; afterwards the kernel takes packets for it.

        It begins to do so some time after it has said yes, without any sign but the route that it makes then.
        """
        with self.inside():
            ear = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        with ear:
            ear.bind((0, _IPV6_ROUTES))
            ear.settimeout(_PATIENCE)
            yield
            wanted = socket.inet_pton(socket.AF_INET6, address)
            while not _is_local_route(ear.recv(65_536), wanted):
                pass

    def command(self, *arguments: str) -> list[str]:
        """What runs a program in here."""
        return ["ip", "netns", "exec", self.name, *arguments]


@contextlib.contextmanager
def namespace(*, ipv6: bool = False) -> Iterator[Namespace]:
    """A new namespace with its loopback up. Without IPv6 the kernel sends nothing by itself."""
    made = Namespace(_new_name())
    _ip("netns", "add", made.name)
    try:
        made.ip("link", "set", "lo", "up")
        if Path("/proc/sys/net/ipv6").exists():
            for key, value in (("addr_gen_mode", "1"), ("router_solicitations", "0")):
                made.set(f"ipv6/conf/default/{key}", value)
            if not ipv6:
                made.set("ipv6/conf/all/disable_ipv6", "1")
                made.set("ipv6/conf/default/disable_ipv6", "1")
        yield made
    finally:
        _ip("netns", "del", made.name)


def join(left: Namespace, right: Namespace, left_address: str, right_address: str) -> None:
    """A cable between two namespaces: `wire` in each."""
    left.ip("link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", right.name)
    for end, address, local in ((left, left_address, "fe80::1/64"), (right, right_address, "fe80::2/64")):
        if ":" in address:  # who forwards asks for neighbours from a link-local address
            end.ip("addr", "add", local, "dev", "wire", "nodad")
        end.ip("addr", "add", address, "dev", "wire", *(["nodad"] if ":" in address else []))
        end.ip("link", "set", "wire", "up")
