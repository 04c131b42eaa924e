"""Opening and setting up TUN devices of Linux: layouts, one clear sentence for each obstacle, and real devices."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections import deque
from collections.abc import Iterator
from ipaddress import ip_address
from typing import Any

import pytest

from rnsfast.osio import linux_tun, rtnetlink, virtio
from rnsfast.osio.device import DeviceError, open_tun
from rnsfast.osio.linux_tun import LinuxTun, check_name, open_linux_tun, parse_interface, parse_network
from rnsfast.osio.verdicts import forget_what_was_logged
from tests.fakes import PATIENCE
from tests.namespaces import Namespace, namespace, need_devices

# -- layouts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "values", "raw"),
    [
        (linux_tun.IFREQ_FLAGS, (b"tun7", 0x1001), b"tun7" + bytes(12) + b"\x01\x10" + bytes(22)),
        (linux_tun.IFREQ_NUMBER, (b"tun7", 0x01020304), b"tun7" + bytes(12) + b"\x04\x03\x02\x01" + bytes(20)),
        (virtio.HEADER, (1, 4, 0x0203, 0x0405, 0x0607, 0x0809), bytes((1, 4, 3, 2, 5, 4, 7, 6, 9, 8))),
        (
            rtnetlink.NLMSGHDR,
            (24, 20, 0x405, 9, 0),
            bytes((24, 0, 0, 0, 20, 0, 5, 4, 9, 0, 0, 0, 0, 0, 0, 0)),
        ),
        (rtnetlink.IFADDRMSG, (2, 24, 0, 253, 7), bytes((2, 24, 0, 253, 7, 0, 0, 0))),
        (rtnetlink.RTMSG, (10, 64, 0, 0, 254, 4, 253, 1, 8), bytes((10, 64, 0, 0, 254, 4, 253, 1, 8, 0, 0, 0))),
        (rtnetlink.RTATTR, (8, 2), bytes((8, 0, 2, 0))),
    ],
    ids=["ifreq flags", "ifreq number", "virtio", "nlmsghdr", "ifaddrmsg", "rtmsg", "rtattr"],
)
def test_layout(layout: struct.Struct, values: tuple[Any, ...], raw: bytes) -> None:
    assert layout.pack(*values) == raw


def test_sizes_and_numbers() -> None:
    sizes = {linux_tun.IFREQ_FLAGS: 40, linux_tun.IFREQ_NUMBER: 40, virtio.HEADER: 10, rtnetlink.NLMSGHDR: 16}
    sizes |= {rtnetlink.IFADDRMSG: 8, rtnetlink.RTMSG: 12, rtnetlink.RTATTR: 4, rtnetlink.ERROR: 4}
    assert all(layout.size == size for layout, size in sizes.items())
    assert (linux_tun.TUNSETIFF, linux_tun.TUNSETOFFLOAD) == (0x400454CA, 0x400454D0)
    flags = (linux_tun.IFF_TUN, linux_tun.IFF_NO_PI, linux_tun.IFF_VNET_HDR, linux_tun.IFF_TUN_EXCL)
    assert flags == (0x1, 0x1000, 0x4000, 0x8000)
    assert linux_tun.OFFLOADS == (0x6F, 0x0F)


# -- names, addresses, networks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tun0", "a", "x" * 15, "mesh.0", "größe"])
def test_good_names(name: str) -> None:
    assert check_name(name) == name.encode()


@pytest.mark.parametrize("name", ["", "x" * 16, "ü" * 8, "a/b", "..", ".", "a b", "a:1", "tun%d", "a\n", "\0"])
def test_bad_names(name: str) -> None:
    with pytest.raises(DeviceError, match="is no name for a device"):
        check_name(name)


@pytest.mark.parametrize("text", ["", "10.0.0.300/8", "10.0.0.1/33", "x", "224.0.0.1/8", "0.0.0.0/8", "fe80::1%1/64"])
def test_bad_addresses(text: str) -> None:
    with pytest.raises(DeviceError, match="is no address"):
        parse_interface(text)


@pytest.mark.parametrize("text", ["", "10.0.0.1/8", "fd00::1/64", "all"])
def test_bad_networks(text: str) -> None:
    with pytest.raises(DeviceError, match="is no network"):
        parse_network(text)


def test_other_systems_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "freebsd14")
    with pytest.raises(DeviceError, match=r"not available on this system \(freebsd14\)"):
        open_tun("tun0")


# -- obstacles, by script -----------------------------------------------------------------------------------------


class ScriptedCalls:
    """`opens` and `ioctls` are errnos, 0 for success. `kind` is the hardware type of a device that is found."""

    def __init__(self, *ioctls: tuple[int, int], opens: int = 0, found: bool = False, kind: int = 0xFFFE) -> None:
        self.ioctls, self.opens, self.found, self.kind = deque(ioctls), opens, found, kind
        self.asked: list[tuple[int, Any]] = []
        self.made: list[int] = []

    def open(self) -> int:
        if self.opens:
            raise OSError(self.opens, os.strerror(self.opens))
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        far.close()
        self.made.append(near.detach())
        return self.made[-1]

    def ioctl(self, fd: int, request: int, argument: bytes | int, /) -> Any:
        if request == linux_tun.SIOCGIFHWADDR:
            assert isinstance(argument, bytes)
            if not self.found:
                raise OSError(errno.ENODEV, "no device")
            return argument[:16] + struct.pack("=H22x", self.kind)
        assert self.ioctls, f"ioctl {request:#x} beyond the script"
        expected, error = self.ioctls.popleft()
        assert request == expected, f"{request:#x} instead of {expected:#x}"
        self.asked.append((request, argument))
        if error:
            raise OSError(error, os.strerror(error))
        return argument

    def all_closed(self) -> bool:
        for fd in self.made:
            try:
                os.fstat(fd)
            except OSError:
                continue
            return False
        return True


IFF, OFFLOAD = linux_tun.TUNSETIFF, linux_tun.TUNSETOFFLOAD
QUEUE = [(linux_tun.SIOCGIFTXQLEN, 0), (linux_tun.SIOCSIFTXQLEN, 0)]


@pytest.mark.parametrize(
    ("calls", "words", "retryable"),
    [
        (ScriptedCalls(opens=errno.ENOENT), "modprobe tun", True),
        (ScriptedCalls(opens=errno.ENODEV), "modprobe tun", True),
        (ScriptedCalls(opens=errno.EACCES), "root or CAP_NET_ADMIN", False),
        (ScriptedCalls(opens=errno.EMFILE), "EMFILE", True),
        (ScriptedCalls((IFF, errno.EPERM)), "root or CAP_NET_ADMIN", False),
        (ScriptedCalls((IFF, errno.EBUSY)), "in use by another program", True),
        (ScriptedCalls((IFF, errno.EINVAL), found=True), "in use by another program", True),
        (ScriptedCalls((IFF, errno.EINVAL)), "EINVAL", True),
        (ScriptedCalls(found=True, kind=1), "is no TUN device", False),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_obstacle_has_a_sentence(calls: ScriptedCalls, words: str, retryable: bool) -> None:
    with pytest.raises(DeviceError) as failure:
        open_linux_tun("tun0", calls=calls)
    assert words in str(failure.value)
    assert failure.value.retryable is retryable
    assert not isinstance(failure.value, OSError)
    assert calls.all_closed()


@pytest.mark.parametrize(("found", "exclusive"), [(False, 0x8000), (True, 0)])
def test_a_new_device_is_asked_for_exclusively(found: bool, exclusive: int) -> None:
    calls = ScriptedCalls((IFF, 0), (OFFLOAD, 0), *QUEUE, found=found)
    device = open_linux_tun("tun0", calls=calls)
    (_, asked), (_, offloads) = calls.asked[:2]
    assert linux_tun.IFREQ_FLAGS.unpack(asked) == (b"tun0" + bytes(12), 0x1001 | exclusive)
    assert offloads == 0  # what a former owner asked for is undone
    device.close()


@pytest.mark.parametrize("name", [None, ""])
def test_the_system_may_choose_the_name(name: str | None) -> None:
    calls = ScriptedCalls((IFF, 0), (OFFLOAD, 0), *QUEUE)
    device = open_linux_tun(name, calls=calls)
    assert linux_tun.IFREQ_FLAGS.unpack(calls.asked[0][1]) == (bytes(16), 0x1001)
    device.close()


def test_offloads_are_asked_for_with_and_without_udp_and_then_not_at_all() -> None:
    forget_what_was_logged()
    calls = ScriptedCalls((IFF, 0), (OFFLOAD, errno.EINVAL), (OFFLOAD, 0), *QUEUE)
    device = open_linux_tun("tun0", vnet_header=True, calls=calls)
    assert [asked for request, asked in calls.asked if request == OFFLOAD] == [0x6F, 0x0F]
    assert linux_tun.IFREQ_FLAGS.unpack(calls.asked[0][1])[1] & 0x4000
    assert device.io.caps.backend.endswith("-vnet")
    device.close()

    refused = (OFFLOAD, errno.EINVAL)
    calls = ScriptedCalls((IFF, 0), refused, refused, (IFF, 0), (OFFLOAD, 0), *QUEUE)
    device = open_linux_tun("tun0", vnet_header=True, calls=calls)
    assert not linux_tun.IFREQ_FLAGS.unpack(calls.asked[3][1])[1] & 0x4000
    assert not device.io.caps.backend.endswith("-vnet")
    assert len(calls.made) == 2
    device.close()
    assert calls.all_closed()


def test_a_queue_that_may_not_be_set_is_left_unless_it_was_asked_for() -> None:
    forget_what_was_logged()
    refused = [QUEUE[0], (linux_tun.SIOCSIFTXQLEN, errno.EPERM)]
    open_linux_tun("tun0", calls=ScriptedCalls((IFF, 0), (OFFLOAD, 0), *refused)).close()
    calls = ScriptedCalls((IFF, 0), (OFFLOAD, 0), refused[1])
    with pytest.raises(DeviceError, match="CAP_NET_ADMIN"):
        open_linux_tun("tun0", queue_length=9, calls=calls)
    assert calls.all_closed()


def test_a_batch_out_of_bounds_opens_nothing() -> None:
    calls = ScriptedCalls()
    with pytest.raises(ValueError, match=r"1\.\.128"):
        open_linux_tun("tun0", batch=129, calls=calls)
    assert not calls.made


# -- real devices -------------------------------------------------------------------------------------------------


@pytest.fixture
def space() -> Iterator[Namespace]:
    need_devices()
    with namespace(ipv6=True) as made:
        yield made


@pytest.fixture
def device(space: Namespace) -> Iterator[LinuxTun]:
    with space.inside():
        made = open_linux_tun("rf0")
    yield made
    made.close()


def shown(space: Namespace, *words: str) -> str:
    return " ".join(space.ip("-o", *words).split())


def test_addresses_of_both_families_stand_side_by_side(space: Namespace, device: LinuxTun) -> None:
    for address in ("10.77.0.1/24", "10.77.1.1/32", "fd77::1/64", "fd77::2/128"):
        device.add_address(address)
        device.add_address(address)  # it is there: fine
    found = shown(space, "addr", "show", "dev", "rf0")
    for text in ("inet 10.77.0.1/24 brd 10.77.0.255", "inet 10.77.1.1/32", "inet6 fd77::1/64", "inet6 fd77::2/128"):
        assert text in found
    assert "tentative" not in found


def test_an_address_of_another_device_is_refused(space: Namespace, device: LinuxTun) -> None:
    with pytest.raises(DeviceError, match="already used by another device"):
        device.add_address("127.0.0.1/8")
    with pytest.raises(DeviceError, match="already used by another device"):
        device.add_address("::1/128")


def test_addresses_without_ipv6_say_so(space: Namespace, device: LinuxTun) -> None:
    space.set("ipv6/conf/rf0/disable_ipv6", "1")
    with pytest.raises(DeviceError, match="IPv6 is switched off"):
        device.add_address("fd77::1/64")


def test_routes_lead_to_the_device(space: Namespace, device: LinuxTun) -> None:
    with pytest.raises(DeviceError, match="up"):
        device.add_route("10.9.0.0/16")
    device.up()
    for network in ("10.9.0.0/16", "10.8.8.8/32", "0.0.0.0/0", "fd09::/48"):
        device.add_route(network)
        device.add_route(network)
    assert "10.9.0.0/16 dev rf0" in shown(space, "route")
    assert "default dev rf0" in shown(space, "route")
    assert "fd09::/48 dev rf0" in shown(space, "-6", "route")


def test_state_mtu_and_queue(space: Namespace, device: LinuxTun) -> None:
    assert not device.is_up
    device.up()
    device.up()
    assert device.is_up
    device.down()
    assert not device.is_up
    device.set_mtu(1280)
    assert device.mtu == 1280
    assert "mtu 1280" in shown(space, "link", "show", "rf0")
    for bad in (67, 65_536):
        with pytest.raises(DeviceError, match=r"68\.\.65535"):
            device.set_mtu(bad)
    assert "qlen 1024" in shown(space, "link", "show", "rf0")


def test_the_queue_is_never_made_shorter_unless_asked_for(space: Namespace) -> None:
    space.ip("tuntap", "add", "dev", "kept", "mode", "tun")
    space.ip("link", "set", "kept", "txqueuelen", "5000")
    with space.inside():
        open_linux_tun("kept").close()
        assert "qlen 5000" in shown(space, "link", "show", "kept")
        open_linux_tun("kept", queue_length=300).close()
        assert "qlen 300" in shown(space, "link", "show", "kept")


def test_a_persistent_device_is_taken_over_and_left(space: Namespace) -> None:
    space.ip("tuntap", "add", "dev", "kept", "mode", "tun")
    with space.inside():
        for headers in (False, True, False):
            device = open_linux_tun("kept", vnet_header=headers)
            assert device.name == "kept"
            with pytest.raises(DeviceError, match="in use by another program"):
                open_linux_tun("kept")
            device.close()
    assert "kept" in space.ip("link")


def test_a_new_device_vanishes_with_its_descriptor(space: Namespace) -> None:
    with space.inside():
        device = open_linux_tun(None)
    assert device.name in space.ip("link")
    device.close()
    device.close()
    assert device.name not in space.ip("link")


def test_names_of_other_devices_are_taken(space: Namespace) -> None:
    space.ip("tuntap", "add", "dev", "ether", "mode", "tap")
    with space.inside():
        for name in ("lo", "ether"):
            with pytest.raises(DeviceError, match="no TUN device"):
                open_linux_tun(name)


def test_a_device_belongs_to_the_namespace_it_was_opened_in(space: Namespace, device: LinuxTun) -> None:
    device.add_address("10.77.0.1/24")  # the thread is outside again
    device.up()
    device.add_route("10.9.0.0/16")
    assert "10.77.0.1/24" in shown(space, "addr")
    with pytest.raises(OSError):
        socket.if_nametoindex("rf0")


def test_packets_for_a_route_come_to_the_device(space: Namespace, device: LinuxTun) -> None:
    device.add_address("10.77.0.1/24")
    device.up()
    device.add_route("10.9.0.0/16")
    with space.inside(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"x", ("10.9.1.2", 9))
    batch = device.io.make_batch()
    assert device.io.recv(batch, PATIENCE) == 1
    assert ip_address(batch.take(0)[16:20]) == ip_address("10.9.1.2")
