"""The device of a tunnel with what belongs to it: addresses and routes, which IPv6 loses with small packets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rnsfast.gateway.ip import Network
from rnsfast.gateway.messages import Address
from rnsfast.osio.contract import BatchIO
from rnsfast.osio.device import TunDevice

IPV6_MTU: Final = 1280  # bytes of packets that every IPv6 link carries (RFC 8200)


class TunnelDevice:
    """A TUN device that has been given its addresses and routes, and is up. See `gateway.Device`.

    Raises DeviceError, and closes the device then.
    """

    def __init__(
        self, device: TunDevice, addresses: Sequence[Address], routes: Sequence[Network], mtu: int | None
    ) -> None:
        self._device, self._addresses, self._routes = device, addresses, routes
        try:
            if mtu is not None:
                device.set_mtu(mtu)
            for address in addresses:
                device.add_address(str(address))
            device.up()
            for route in routes:
                device.add_route(str(route))
        except BaseException:
            device.close()
            raise

    @property
    def name(self) -> str:
        return self._device.name

    @property
    def io(self) -> BatchIO:
        return self._device.io

    @property
    def mtu(self) -> int:
        return self._device.mtu

    def set_mtu(self, mtu: int) -> None:
        """A kernel takes IPv6 off a device with smaller packets than IPv6 needs: it comes back with the size."""
        before = self._device.mtu
        self._device.set_mtu(mtu)
        if before < IPV6_MTU <= mtu:
            for address in self._addresses:
                if address.version == 6:
                    self._device.add_address(str(address))
            for route in self._routes:
                if route.version == 6:
                    self._device.add_route(str(route))

    def close(self) -> None:
        self._device.close()
