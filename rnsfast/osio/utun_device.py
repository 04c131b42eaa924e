"""Opening and setting up utun devices of macOS.  Protocol 09, section 6.2.

State and MTU are set by ioctl, addresses and routes by the programs of the system, whose interface is documented while
that of the kernel is not. Not verified beyond what `tests/osio/test_native_darwin.py` says when it is run on macOS.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import subprocess
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Interface, IPv6Interface, ip_interface, ip_network
from typing import Final, Protocol

from rnsfast.osio import layouts_darwin as layout
from rnsfast.osio.device import DeviceError
from rnsfast.osio.msgx import DarwinSys
from rnsfast.osio.utun import BATCH, UtunIO
from rnsfast.osio.verdicts import describe, log_once

IFCONFIG, ROUTE = "/sbin/ifconfig", "/sbin/route"
RUN_TIMEOUT: Final = 10.0  # seconds; both answer at once

IFREQ: Final = struct.Struct("=16si12x")
IFREQ_FLAGS: Final = struct.Struct("=16sH14x")
MIN_MTU, MAX_MTU = 68, 65_535
NAME_BYTES: Final = 16


class UtunCalls(Protocol):
    """The system calls and programs that open and set up a device."""

    def socket(self) -> socket.socket:
        """A control socket."""

    def ioctl(self, fd: int, request: int, argument: bytes, /) -> bytes: ...

    def run(self, arguments: Sequence[str], /) -> tuple[int, str]:
        """Run a program: its exit status and what it said."""


class RealCalls:
    def socket(self) -> socket.socket:
        return socket.socket(layout.PF_SYSTEM, socket.SOCK_DGRAM, layout.SYSPROTO_CONTROL)

    def ioctl(self, fd: int, request: int, argument: bytes, /) -> bytes:
        import fcntl

        return fcntl.ioctl(fd, request, argument)

    def run(self, arguments: Sequence[str], /) -> tuple[int, str]:
        try:
            done = subprocess.run(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=RUN_TIMEOUT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return -1, f"no answer within {RUN_TIMEOUT:g} s"
        return done.returncode, done.stdout


class UtunDevice:
    """An open utun device. See `device.TunDevice`. Made by `open_utun`.

    Args:
        sock: the connected control socket; taken over.
        name: of the device.
        batch: packets a call.
        calls: how the device is set up.
        sys: the system calls that move packets; None for the real ones.
    """

    def __init__(
        self, sock: socket.socket, name: str, *, batch: int, calls: UtunCalls, sys: DarwinSys | None = None
    ) -> None:
        self.name = name
        self._calls = calls
        self._control = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            self.io = UtunIO(sock, max_batch=batch, max_packet=self.mtu, sys=sys)
        except BaseException:
            self._control.close()
            raise

    @property
    def mtu(self) -> int:
        with _explained(f"{self.name}: the MTU cannot be read"):
            return int(IFREQ.unpack(self._ioctl(layout.SIOCGIFMTU, IFREQ.pack(self._raw(), 0)))[1])

    def set_mtu(self, mtu: int) -> None:
        """Before the first batch is made: batches have room for packets of the MTU at that time."""
        if not MIN_MTU <= mtu <= MAX_MTU:
            raise DeviceError(f"{self.name}: an MTU of {mtu} bytes is not within {MIN_MTU}..{MAX_MTU}")
        with _explained(f"{self.name}: the MTU cannot be set to {mtu} bytes"):
            self._ioctl(layout.SIOCSIFMTU, IFREQ.pack(self._raw(), mtu))
        self.io.set_max_packet(mtu)

    @property
    def is_up(self) -> bool:
        with _explained(f"{self.name}: its state cannot be read"):
            return bool(self._flags() & layout.IFF_UP)

    def up(self) -> None:
        self._set_up(True)

    def down(self) -> None:
        self._set_up(False)

    def _set_up(self, up: bool) -> None:
        with _explained(f"{self.name}: cannot be brought {'up' if up else 'down'}"):
            flags = self._flags()
            wanted = flags | layout.IFF_UP if up else flags & ~layout.IFF_UP
            if wanted != flags:
                self._ioctl(layout.SIOCSIFFLAGS, IFREQ_FLAGS.pack(self._raw(), wanted))

    def add_address(self, address: str) -> None:
        """Also brings the device up, and routes the network of the address to it, as other systems do by themselves."""
        found = _parse(address)
        if found.version == 4:
            arguments = [IFCONFIG, self.name, "inet", str(found), str(found.ip), "alias"]  # its own far end
        else:
            arguments = [IFCONFIG, self.name, "inet6", str(found), "alias"]
        self._run(f"the address {address} cannot be added", arguments)
        if found.network.num_addresses > 1:
            self.add_route(str(found.network))

    def add_route(self, network: str) -> None:
        try:
            parsed = ip_network(network)
        except ValueError as error:
            raise DeviceError(f"{network!r} is no network, like 10.77.0.0/16 or fd00::/48 ({error})") from error
        family = "-inet" if parsed.version == 4 else "-inet6"
        arguments = [ROUTE, "-q", "-n", "add", family, str(parsed), "-interface", self.name]
        self._run(f"the route to {network} cannot be added", arguments, fine="File exists")

    def close(self) -> None:
        self.io.close()
        self._control.close()

    def _raw(self) -> bytes:
        return self.name.encode()

    def _flags(self) -> int:
        return int(IFREQ_FLAGS.unpack(self._ioctl(layout.SIOCGIFFLAGS, IFREQ_FLAGS.pack(self._raw(), 0)))[1])

    def _ioctl(self, request: int, argument: bytes) -> bytes:
        return self._calls.ioctl(self._control.fileno(), request, argument)

    def _run(self, what: str, arguments: list[str], fine: str = "") -> None:
        with _explained(f"{self.name}: {what}"):
            status, said = self._calls.run(arguments)
        if status and not (fine and fine in said):
            reason = " ".join(said.split()) or f"status {status}"
            raise DeviceError(f"{self.name}: {what}: {arguments[0]} says: {reason}", retryable=True)


def open_utun(
    name: str | None,
    *,
    batch: int | None = None,
    queue_length: int | None = None,
    calls: UtunCalls | None = None,
    sys: DarwinSys | None = None,
) -> UtunDevice:
    """See `device.open_tun`.

    Args:
        name: `utun` and a number, or None for the next number that is free.
        queue_length: packets the kernel keeps for us; None for two batches, which is also the least that makes sense.
        calls, sys: other system calls, for tests.
    """
    unit = _unit(name)
    chosen = BATCH if batch is None else batch
    system: UtunCalls = RealCalls() if calls is None else calls
    shown = name or "a utun device"
    with _explained(f"{shown} cannot be opened"):
        sock = system.socket()
    try:
        with _explained(f"{shown} cannot be opened"):
            _connect(sock, unit, system)
            raw = sock.getsockopt(layout.SYSPROTO_CONTROL, layout.UTUN_OPT_IFNAME, NAME_BYTES)
        _raise_pending(sock, 2 * chosen if queue_length is None else queue_length)
        given = raw.partition(b"\0")[0].decode()
        return UtunDevice(sock, given, batch=chosen, calls=system, sys=sys)
    except BaseException:
        sock.close()
        raise


def _unit(name: str | None) -> int | None:
    if not name or name == "utun":
        return None
    number = name.removeprefix("utun")
    if number == name or not number.isascii() or not number.isdigit() or int(number) > 0x7FFF_FFFF - 1:
        raise DeviceError(f"{name!r} is no name for a device: macOS knows utun0, utun1 and so on")
    return int(number)


def _connect(sock: socket.socket, unit: int | None, calls: UtunCalls) -> None:
    if unit is None:
        sock.connect(layout.UTUN_CONTROL)
        return
    info = layout.CtlInfo()
    info.ctl_name[: len(layout.UTUN_CONTROL)] = layout.UTUN_CONTROL.encode()
    answer = calls.ioctl(sock.fileno(), layout.CTLIOCGINFO, bytes(info))
    sock.connect((layout.CtlInfo.from_buffer_copy(answer).ctl_id, unit + 1))  # 0 is for the next that is free


def _raise_pending(sock: socket.socket, packets: int) -> None:
    """How many packets the kernel keeps for us: 1 by default, so that no batch would ever have more than one."""
    level, option = layout.SYSPROTO_CONTROL, layout.UTUN_OPT_MAX_PENDING_PACKETS
    try:
        sock.setsockopt(level, option, struct.pack("=I", packets))
        (found,) = struct.unpack("=I", sock.getsockopt(level, option, 4))
    except (OSError, struct.error) as error:
        log_once("utun pending", "utun devices keep one packet at a time (%s): batches stay small", error)
        return
    if found < packets:
        log_once("utun pending", "utun devices keep %d packets instead of %d: batches stay small", found, packets)


def _parse(text: str) -> IPv4Interface | IPv6Interface:
    try:
        found = ip_interface(text)
    except ValueError as error:
        raise DeviceError(f"{text!r} is no address with a prefix length, like 10.77.0.1/24 or fd00::1/64") from error
    if found.ip.is_multicast or found.ip.is_unspecified or (found.version == 6 and "%" in text):
        raise DeviceError(f"{text!r} is no address that a device can have")
    return found


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """OSError becomes DeviceError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EACCES):
            raise DeviceError(f"{what}: this needs root") from error
        if error.errno == errno.EBUSY:
            raise DeviceError(f"{what}: it is in use by another program", retryable=True) from error
        gone = error.errno in (errno.ENODEV, errno.ENXIO)
        reason = "the device is gone" if gone else f"{error.strerror} ({describe(error.errno or 0)})"
        raise DeviceError(f"{what}: {reason}", retryable=True) from error
