"""TUN devices of Linux, by ioctl and rtnetlink.  Protocol 09, section 5.5."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from ipaddress import IPv4Interface, IPv4Network, IPv6Interface, IPv6Network, ip_interface, ip_network
from typing import Any, Final, Protocol

from rnsfast.osio.device import DeviceError
from rnsfast.osio.rtnetlink import RtNetlink
from rnsfast.osio.tun import BATCH, MAX_BATCH, TunIO
from rnsfast.osio.verdicts import describe, log_once

PATH: Final = "/dev/net/tun"

TUNSETIFF: Final = 0x400454CA
TUNSETOFFLOAD: Final = 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR, IFF_TUN_EXCL = 0x1, 0x1000, 0x4000, 0x8000
OFFLOAD_CSUM, OFFLOAD_TSO4, OFFLOAD_TSO6, OFFLOAD_ECN = 0x1, 0x2, 0x4, 0x8
OFFLOAD_USO4, OFFLOAD_USO6 = 0x20, 0x40  # Linux 6.2
OFFLOADS: Final = (
    OFFLOAD_CSUM | OFFLOAD_TSO4 | OFFLOAD_TSO6 | OFFLOAD_ECN | OFFLOAD_USO4 | OFFLOAD_USO6,
    OFFLOAD_CSUM | OFFLOAD_TSO4 | OFFLOAD_TSO6 | OFFLOAD_ECN,
)

SIOCGIFFLAGS, SIOCSIFFLAGS = 0x8913, 0x8914
SIOCGIFMTU, SIOCSIFMTU = 0x8921, 0x8922
SIOCGIFHWADDR: Final = 0x8927
SIOCGIFINDEX: Final = 0x8933
SIOCGIFTXQLEN, SIOCSIFTXQLEN = 0x8942, 0x8943
IFF_UP: Final = 0x1
ARPHRD_NONE: Final = 0xFFFE  # devices without link-layer addresses, as TUN is

IFREQ_FLAGS: Final = struct.Struct("=16sH22x")  # 40 bytes; name, flags
IFREQ_NUMBER: Final = struct.Struct("=16si20x")  # name, one number
NAME_BYTES: Final = 15  # and a zero

QUEUE: Final = 1024  # packets at least; the usual 500 lose bursts silently (protocol 09, 5.5)
MIN_MTU, MAX_MTU = 68, 65_535


class DeviceCalls(Protocol):
    """The system calls that open and set up a device. They raise OSError."""

    def open(self) -> int: ...
    def ioctl(self, fd: int, request: int, argument: bytes | int, /) -> Any: ...


class RealCalls:
    def open(self) -> int:
        return os.open(PATH, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def ioctl(self, fd: int, request: int, argument: bytes | int, /) -> Any:
        return fcntl.ioctl(fd, request, argument)


class LinuxTun:
    """An open TUN device. See `device.TunDevice`. Made by `open_linux_tun`.

    Args:
        fd: the descriptor, attached to the device; taken over.
        name: of the device.
        batch: packets a call.
        vnet_header: whether packets carry virtio-net headers.
    """

    def __init__(self, fd: int, name: str, *, batch: int, vnet_header: bool, calls: DeviceCalls) -> None:
        self.name = name
        self._calls = calls
        self.io = TunIO(fd, max_batch=batch, vnet_header=vnet_header)
        # Both belong to the network namespace of this moment, as the device does.
        self._control = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._netlink = RtNetlink()

    def _number(self, request: int, value: int = 0) -> int:
        """One ioctl of an `ifreq` with a number; the number that came back."""
        return _number(self._calls, self._control, request, self.name, value)

    @property
    def mtu(self) -> int:
        with _explained(f"{self.name}: the MTU cannot be read"):
            return self._number(SIOCGIFMTU)

    def set_mtu(self, mtu: int) -> None:
        if not MIN_MTU <= mtu <= MAX_MTU:
            raise DeviceError(f"{self.name}: an MTU of {mtu} bytes is not within {MIN_MTU}..{MAX_MTU}")
        with _explained(f"{self.name}: the MTU cannot be set to {mtu} bytes"):
            self._number(SIOCSIFMTU, mtu)

    def set_queue_length(self, packets: int, *, at_least: bool = False) -> None:
        """How many packets the kernel keeps until we read them; with `at_least` never fewer than it keeps already."""
        with _explained(f"{self.name}: the queue cannot be set to {packets} packets"):
            if not at_least or self._number(SIOCGIFTXQLEN) < packets:
                self._number(SIOCSIFTXQLEN, packets)

    @property
    def is_up(self) -> bool:
        with _explained(f"{self.name}: its state cannot be read"):
            return bool(self._number(SIOCGIFFLAGS) & IFF_UP)

    def up(self) -> None:
        self._set_up(True)

    def down(self) -> None:
        self._set_up(False)

    def _set_up(self, up: bool) -> None:
        with _explained(f"{self.name}: cannot be brought {'up' if up else 'down'}"):
            flags = self._number(SIOCGIFFLAGS) & 0xFFFF
            wanted = flags | IFF_UP if up else flags & ~IFF_UP
            if wanted != flags:
                self._calls.ioctl(self._control.fileno(), SIOCSIFFLAGS, IFREQ_FLAGS.pack(self.name.encode(), wanted))

    def add_address(self, address: str) -> None:
        interface = parse_interface(address)
        with _explained(f"{self.name}: the address {address} cannot be added"):
            index = self._number(SIOCGIFINDEX)
            netlink = self._netlink
            owners = {device for device, known in netlink.addresses() if known == interface.ip}
            if index in owners:
                return
            if owners:
                raise DeviceError(f"{self.name}: {interface.ip} is already used by another device of this machine")
            try:
                netlink.add_address(index, interface)
            except OSError as error:
                if interface.version == 6 and error.errno in (errno.EACCES, errno.EOPNOTSUPP):
                    raise DeviceError(f"{self.name}: {address}: IPv6 is switched off for this device") from error
                raise

    def add_route(self, network: str) -> None:
        parsed = parse_network(network)
        with _explained(f"{self.name}: the route to {network} cannot be added"):
            try:
                self._netlink.add_route(self._number(SIOCGIFINDEX), parsed)
            except OSError as error:
                if error.errno == errno.ENETDOWN:
                    raise DeviceError(f"{self.name}: the route to {network} needs the device to be up") from error
                if error.errno != errno.EEXIST:
                    raise

    def close(self) -> None:
        self.io.close()
        self._control.close()
        self._netlink.close()


def parse_interface(text: str) -> IPv4Interface | IPv6Interface:
    """ADDRESS/BITS. Raises DeviceError."""
    try:
        found = ip_interface(text)
    except ValueError as error:
        raise DeviceError(f"{text!r} is no address with a prefix length, like 10.77.0.1/24 or fd00::1/64") from error
    unusable = found.ip.is_multicast or found.ip.is_unspecified or str(found.ip) == "255.255.255.255"
    if unusable or "%" in text:
        raise DeviceError(f"{text!r} is no address that a device can have")
    return found


def parse_network(text: str) -> IPv4Network | IPv6Network:
    """ADDRESS/BITS without host bits. Raises DeviceError."""
    try:
        return ip_network(text)
    except ValueError as error:
        raise DeviceError(f"{text!r} is no network, like 10.77.0.0/16 or fd00::/48 ({error})") from error


def check_name(name: str) -> bytes:
    """The name as the kernel takes it. Raises DeviceError."""
    raw = name.encode()
    if not 0 < len(raw) <= NAME_BYTES:
        raise DeviceError(f"{name!r} is no name for a device: it has {len(raw)} bytes, allowed are 1..{NAME_BYTES}")
    if name in (".", "..") or any(char in "/:%" or char.isspace() or not char.isprintable() for char in name):
        raise DeviceError(
            f"{name!r} is no name for a device: slashes, colons, percent signs and spaces are not allowed"
        )
    return raw


def open_linux_tun(
    name: str | None,
    *,
    batch: int | None = None,
    queue_length: int | None = None,
    vnet_header: bool = False,
    calls: DeviceCalls | None = None,
) -> LinuxTun:
    """See `device.open_tun`. `calls`: other system calls, for tests."""
    chosen = BATCH if batch is None else batch
    if not 1 <= chosen <= MAX_BATCH:
        raise ValueError(f"a batch of {chosen} packets is not within 1..{MAX_BATCH}")
    system = RealCalls() if calls is None else calls
    raw = check_name(name) if name else b""
    fd, given, headers = _attach(system, raw, vnet_header)
    device = LinuxTun(fd, given, batch=chosen, vnet_header=headers, calls=system)
    try:
        if queue_length is None:
            device.set_queue_length(max(QUEUE, 4 * chosen), at_least=True)
        else:
            device.set_queue_length(queue_length)
    except DeviceError as error:
        # Whoever may open a persistent device that was made for him may not set it up: then it is as it is.
        if queue_length is not None:
            device.close()
            raise
        log_once("tun queue", "%s", error)
    return device


def _attach(calls: DeviceCalls, raw: bytes, vnet_header: bool) -> tuple[int, str, bool]:
    """Open the device: descriptor, name, and whether packets have headers."""
    found = _find(calls, raw)
    shown = raw.decode()
    if found is not None and found != ARPHRD_NONE:
        raise DeviceError(f"{shown} is taken by a network device that is no TUN device")
    fd = _open(calls)
    try:
        flags = IFF_TUN | IFF_NO_PI | (IFF_VNET_HDR if vnet_header else 0)
        if raw and found is None:
            flags |= IFF_TUN_EXCL
        try:
            answer = calls.ioctl(fd, TUNSETIFF, IFREQ_FLAGS.pack(raw, flags))
        except OSError as error:
            raise _refused(shown, error, found is not None) from error
        name = IFREQ_FLAGS.unpack(answer)[0].rstrip(b"\0").decode()
        if not vnet_header:
            with contextlib.suppress(OSError):  # what a former owner of a persistent device asked for
                calls.ioctl(fd, TUNSETOFFLOAD, 0)
            return fd, name, False
        for offloads in OFFLOADS:
            try:
                calls.ioctl(fd, TUNSETOFFLOAD, offloads)
            except OSError as error:
                refusal = error
            else:
                return fd, name, True
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    log_once("tun offloads", "TUN offloads are refused (%s): packets come one by one", describe(refusal.errno or 0))
    return _attach(calls, raw, False)


def _open(calls: DeviceCalls) -> int:
    try:
        return calls.open()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENODEV, errno.ENXIO):
            raise DeviceError(
                f"there is no {PATH}: load the module (modprobe tun), or give the container the device", retryable=True
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM):
            raise DeviceError(f"no permission to open {PATH}: TUN devices need root or CAP_NET_ADMIN") from error
        raise DeviceError(f"{PATH} cannot be opened ({describe(error.errno or 0)})", retryable=True) from error


def _refused(name: str, error: OSError, existed: bool) -> DeviceError:
    """Why TUNSETIFF failed."""
    shown = name or "a new device"
    if error.errno in (errno.EPERM, errno.EACCES):
        return DeviceError(f"no permission to open {shown}: TUN devices need root or CAP_NET_ADMIN")
    if error.errno == errno.EBUSY:
        return DeviceError(f"{shown} is in use by another program", retryable=True)
    if existed and error.errno == errno.EINVAL:
        return DeviceError(f"{shown} is in use by another program, or is no TUN device", retryable=True)
    return DeviceError(f"{shown} cannot be opened ({describe(error.errno or 0)})", retryable=True)


def _find(calls: DeviceCalls, raw: bytes) -> int | None:
    """The hardware type of the device of that name; None if there is none."""
    if not raw:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        try:
            answer = calls.ioctl(control.fileno(), SIOCGIFHWADDR, IFREQ_FLAGS.pack(raw, 0))
        except OSError:
            return None
    kind: int = IFREQ_FLAGS.unpack(answer)[1]
    return kind


def _number(calls: DeviceCalls, control: socket.socket, request: int, name: str, value: int = 0) -> int:
    answer = calls.ioctl(control.fileno(), request, IFREQ_NUMBER.pack(name.encode(), value))
    found: int = IFREQ_NUMBER.unpack(answer)[1]
    return found


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """OSError becomes DeviceError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EACCES):
            raise DeviceError(f"{what}: this needs root or CAP_NET_ADMIN") from error
        gone = error.errno in (errno.ENODEV, errno.ENXIO)
        reason = "the device is gone" if gone else f"{error.strerror} ({describe(error.errno or 0)})"
        raise DeviceError(f"{what}: {reason}", retryable=True) from error
