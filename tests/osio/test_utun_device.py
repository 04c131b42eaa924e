"""Opening and setting up utun devices, by a stand-in for the control socket, the ioctls and the programs."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from rnsfast.osio import device, utun_device
from rnsfast.osio.contract import Kind, TxState
from rnsfast.osio.device import DeviceError
from rnsfast.osio.utun_device import RealCalls, UtunDevice, open_utun
from tests.osio.darwin_fakes import Kernel

pytestmark = pytest.mark.linux  # whose sockets the stand-ins use, and their errors

V4 = struct.pack(">I", 2)


class ControlSocket(socket.socket):
    """One end of a pair that answers like a control socket."""

    system: Any

    def connect(self, address: Any) -> None:
        self.system.fail("connect")
        self.system.connected.append(address)

    def getsockopt(self, level: int, option: int, size: int = 0) -> Any:
        assert level == 2
        if option == 2:
            assert size == 16
            return self.system.name.encode() + b"\0"
        assert (option, size) == (16, 4)
        return struct.pack("=I", self.system.pending)

    def setsockopt(self, level: int, option: int, value: Any) -> None:  # type: ignore[override]
        assert (level, option) == (2, 16)
        self.system.fail("pending")
        (asked,) = struct.unpack("=I", value)
        self.system.pending = min(asked, self.system.most)


class System:
    """As `UtunCalls`. `failures`: what fails, with which errno."""

    def __init__(self, name: str = "utun5", most: int = 10_000, failures: dict[Any, int] | None = None) -> None:
        self.name, self.most, self.failures = name, most, failures or {}
        self.pending, self.mtu, self.flags = 1, 1500, 0x8010
        self.connected: list[Any] = []
        self.ran: list[str] = []
        self.answer = (0, "")
        self.far: socket.socket | None = None

    def fail(self, what: Any) -> None:
        if error := self.failures.get(what):
            raise OSError(error, os.strerror(error))

    def socket(self) -> socket.socket:
        self.fail("socket")
        near, self.far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        control = ControlSocket(near.family, near.type, 0, fileno=near.detach())
        control.system = self
        return control

    def ioctl(self, fd: int, request: int, argument: bytes) -> bytes:
        self.fail(request)
        if request == 0xC0644E03:
            number, name = struct.unpack("=I96s", argument)
            assert (number, name.rstrip(b"\0")) == (0, b"com.apple.net.utun_control")
            return struct.pack("=I96s", 77, name)
        assert len(argument) == 32 and argument[:16].rstrip(b"\0") == self.name.encode()
        number, short = struct.unpack_from("=i", argument, 16)[0], struct.unpack_from("=H", argument, 16)[0]
        if request == 0xC0206933:
            return argument[:16] + struct.pack("=i12x", self.mtu)
        if request == 0xC0206911:
            return argument[:16] + struct.pack("=H14x", self.flags)
        if request == 0x80206934:
            self.mtu = number
        else:
            assert request == 0x80206910
            self.flags = short
        return argument

    def run(self, arguments: Sequence[str]) -> tuple[int, str]:
        self.ran.append(" ".join(arguments))
        return self.answer


@pytest.fixture
def opened(stack: ExitStack) -> Any:
    def make(name: str | None = None, **options: Any) -> tuple[UtunDevice, System]:
        system = System(**{key: options.pop(key) for key in ("most", "failures") if key in options})
        stack.callback(lambda: system.far and system.far.close())
        device = open_utun(name, calls=system, sys=Kernel(), **options)
        stack.callback(device.close)
        return device, system

    return make


def test_without_a_name_the_system_chooses(opened: Any) -> None:
    device, system = opened()
    assert system.connected == ["com.apple.net.utun_control"]
    assert (device.name, device.mtu, device.io.caps.kind) == ("utun5", 1500, Kind.TUN)
    assert device.io.caps.backend == "darwin-utun"


def test_a_number_asks_for_that_unit(opened: Any) -> None:
    _, system = opened("utun5")
    assert system.connected == [(77, 6)]


@pytest.mark.parametrize("name", ["tun0", "utun-1", "utunx", "utun1.5", "utun²", "utun99999999999"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(DeviceError, match="utun0, utun1"):
        open_utun(name, calls=System())


@pytest.mark.parametrize(("options", "asked"), [({}, 128), ({"batch": 32}, 64), ({"queue_length": 500}, 500)])
def test_the_kernel_keeps_two_batches(
    opened: Any, options: dict[str, int], asked: int, caplog: pytest.LogCaptureFixture
) -> None:
    device, system = opened(**options)
    assert system.pending == asked
    assert device.io.caps.max_rx == options.get("batch", 64)
    assert not caplog.records


@pytest.mark.parametrize(("most", "failures"), [(16, {}), (1, {"pending": errno.EINVAL})], ids=["fewer", "refused"])
def test_a_kernel_that_keeps_fewer_is_used_and_says_so_once(
    opened: Any, caplog: pytest.LogCaptureFixture, most: int, failures: dict[str, int]
) -> None:
    for _ in range(2):
        device, _ = opened(most=most, failures=failures)
        assert device.io.caps.max_rx == 64
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("where", "error", "says", "retryable"),
    [
        ("connect", errno.EPERM, "needs root", False),
        ("connect", errno.EBUSY, "in use", True),
        ("socket", errno.EPROTONOSUPPORT, "cannot be opened", True),
        (0xC0644E03, errno.ENOENT, "cannot be opened", True),
        (0xC0206933, errno.ENXIO, "the device is gone", True),
    ],
)
def test_a_failure_closes_everything_and_says_what_it_was(
    stack: ExitStack, where: Any, error: int, says: str, retryable: bool
) -> None:
    system = System(failures={where: error})
    stack.callback(lambda: system.far and system.far.close())
    with pytest.raises(DeviceError, match=says) as caught:
        open_utun("utun5", calls=system)
    assert caught.value.retryable is retryable
    if system.far is not None:
        system.far.setblocking(False)
        with pytest.raises(OSError, match=r"reset|refused|not connected") as gone:
            system.far.send(b"x")  # nobody has the other end any more
        assert gone.value.errno in (errno.ECONNREFUSED, errno.ECONNRESET)


def test_addresses_and_routes_are_given_to_the_programs_of_the_system(opened: Any) -> None:
    device, system = opened()
    device.add_address("10.77.0.1/24")
    device.add_address("fd00::1/64")
    device.add_address("10.78.0.1/32")
    device.add_route("10.79.0.0/16")
    assert system.ran == [
        "/sbin/ifconfig utun5 inet 10.77.0.1/24 10.77.0.1 alias",
        "/sbin/route -q -n add -inet 10.77.0.0/24 -interface utun5",
        "/sbin/ifconfig utun5 inet6 fd00::1/64 alias",
        "/sbin/route -q -n add -inet6 fd00::/64 -interface utun5",
        "/sbin/ifconfig utun5 inet 10.78.0.1/32 10.78.0.1 alias",
        "/sbin/route -q -n add -inet 10.79.0.0/16 -interface utun5",
    ]


@pytest.mark.parametrize("text", ["10.77.0.300/24", "224.0.0.1/4", "0.0.0.0/0", "fe80::1%en0/64", "; rm", "-x"])
def test_what_is_no_address_or_network_runs_nothing(opened: Any, text: str) -> None:
    device, system = opened()
    with pytest.raises(DeviceError):
        device.add_address(text)
    for network in ("10.77.0.1/24", "nowhere", "-x"):
        with pytest.raises(DeviceError):
            device.add_route(network)
    assert system.ran == []


def test_a_program_that_fails_is_quoted(opened: Any) -> None:
    device, system = opened()
    system.answer = (1, "ifconfig: ioctl (SIOCAIFADDR):\n  permission denied\n")
    with pytest.raises(
        DeviceError, match=r"10\.77\.0\.1/24 .* says: ifconfig: ioctl \(SIOCAIFADDR\): permission denied"
    ):
        device.add_address("10.77.0.1/24")
    system.answer = (1, "")
    with pytest.raises(DeviceError, match="status 1"):
        device.add_route("10.77.0.0/24")


def test_a_route_that_is_there_already_is_fine(opened: Any) -> None:
    device, system = opened()
    system.answer = (1, "route: writing to routing socket: File exists\n")
    device.add_route("10.77.0.0/24")


def test_up_and_down_change_that_flag_only(opened: Any) -> None:
    device, system = opened()
    device.up()
    assert (system.flags, device.is_up) == (0x8011, True)
    device.up()
    device.down()
    assert (system.flags, device.is_up) == (0x8010, False)


def test_the_mtu_decides_what_a_packet_may_have(opened: Any) -> None:
    device, system = opened()
    assert device.io.caps.max_packet == 1500
    device.set_mtu(1280)
    assert (device.mtu, system.mtu, device.io.caps.max_packet, device.io.make_batch().slot) == (1280, 1280, 1280, 1281)
    for mtu in (67, 65_536):
        with pytest.raises(DeviceError, match="68"):
            device.set_mtu(mtu)


def test_packets_move_through_an_opened_device(opened: Any) -> None:
    device, system = opened()
    assert system.far is not None
    system.far.send(V4 + b"\x45in")
    batch = device.io.make_batch()
    assert device.io.recv(batch) == 1 and batch.take_all() == [b"\x45in"]
    assert device.io.send([b"\x45a", b"\x45b"]).state is TxState.DONE
    assert [system.far.recv(100) for _ in range(2)] == [V4 + b"\x45a", V4 + b"\x45b"]
    device.close()
    device.close()
    assert device.io.fileno() == -1


def test_programs_are_run_and_quoted() -> None:
    status, said = RealCalls().run(["/bin/sh", "-c", "echo no; exit 3"])
    assert (status, said) == (3, "no\n")


def test_macos_opens_its_own_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(device.sys, "platform", "darwin")
    monkeypatch.setattr(utun_device, "open_utun", lambda name, **options: asked.append((name, options)))
    device.open_tun("utun7", batch=32, queue_length=99, vnet_header=True)
    assert asked == [("utun7", {"batch": 32, "queue_length": 99})]
