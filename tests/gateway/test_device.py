"""The device with its addresses and routes."""

from __future__ import annotations

from ipaddress import ip_interface, ip_network
from typing import Any

import pytest

from rnsfast.gateway.device import TunnelDevice
from rnsfast.osio.device import DeviceError


class Recording:
    """Writes down what is done to it. As with a kernel, IPv6 goes when packets become too small for it."""

    name = "tun7"

    def __init__(self, fails: str = "") -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.mtu = 1500
        self.io = object()
        self._fails = fails

    def _note(self, *call: Any) -> None:
        if call[0] == self._fails:
            raise DeviceError("no")
        self.calls.append(call)

    def set_mtu(self, mtu: int) -> None:
        self._note("mtu", mtu)
        self.mtu = mtu

    def add_address(self, address: str) -> None:
        self._note("address", address)

    def add_route(self, network: str) -> None:
        self._note("route", network)

    def up(self) -> None:
        self._note("up")

    def close(self) -> None:
        self.calls.append(("close",))


ADDRESSES = [ip_interface("10.77.0.1/24"), ip_interface("fd77::1/64")]
ROUTES = [ip_network("10.88.0.0/16"), ip_network("fd88::/48")]


def test_routes_come_after_the_device_is_up() -> None:
    device = Recording()
    made = TunnelDevice(device, ADDRESSES, ROUTES, 1400)  # type: ignore[arg-type]
    assert device.calls == [
        ("mtu", 1400), ("address", "10.77.0.1/24"), ("address", "fd77::1/64"), ("up",),
        ("route", "10.88.0.0/16"), ("route", "fd88::/48"),
    ]  # fmt: skip
    assert (made.name, made.mtu, made.io) == ("tun7", 1400, device.io)


def test_ipv6_comes_back_with_the_size() -> None:
    device = Recording()
    made = TunnelDevice(device, ADDRESSES, ROUTES, None)  # type: ignore[arg-type]
    device.calls.clear()
    made.set_mtu(431)
    made.set_mtu(1279)
    assert device.calls == [("mtu", 431), ("mtu", 1279)]
    made.set_mtu(1280)
    assert device.calls[2:] == [("mtu", 1280), ("address", "fd77::1/64"), ("route", "fd88::/48")]
    made.set_mtu(16303)
    assert device.calls[5:] == [("mtu", 16303)]


@pytest.mark.parametrize("step", ["mtu", "address", "up", "route"])
def test_a_step_that_fails_closes_the_device(step: str) -> None:
    device = Recording(step)
    with pytest.raises(DeviceError):
        TunnelDevice(device, ADDRESSES, ROUTES, 1400)  # type: ignore[arg-type]
    assert device.calls[-1] == ("close",)
