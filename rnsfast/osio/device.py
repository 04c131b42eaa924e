"""Opening TUN devices: one function and one contract, whatever the system.  Protocol 09, sections 5.5, 6.2 and 10.3."""

from __future__ import annotations

import sys
from typing import Protocol

from rnsfast.osio.contract import BatchIO


class DeviceError(Exception):
    """A device could not be opened or set up. The message is one sentence for the operator.

    `retryable` says whether it may work later without anybody changing the configuration.
    """

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable


class TunDevice(Protocol):
    """An open TUN device. Addresses, routes and state are the kernel's side of it; all may raise DeviceError."""

    name: str  # as the system calls it

    @property
    def io(self) -> BatchIO:
        """Its packets."""

    @property
    def mtu(self) -> int:
        """Bytes of the largest packet, now."""

    def set_mtu(self, mtu: int) -> None: ...

    def add_address(self, address: str) -> None:
        """Give this machine an address on the device: `10.77.0.1/24`, `fd00::1/64`. One it has already is fine."""

    def add_route(self, network: str) -> None:
        """Send what is for `network` through the device, which must be up. A route there is already is fine."""

    @property
    def is_up(self) -> bool:
        """Whether it takes packets."""

    def up(self) -> None: ...

    def down(self) -> None: ...

    def close(self) -> None:
        """Close the descriptor; a device that is not persistent vanishes with it. Idempotent."""


def open_tun(
    name: str | None,
    *,
    batch: int | None = None,
    queue_length: int | None = None,
    vnet_header: bool = False,
) -> TunDevice:
    """Open the TUN device `name`, made if there is none; None lets the system choose a name. It comes as it is: down.

    Args:
        name: at most 15 bytes. A persistent device of that name is taken over if nobody has it open.
        batch: packets a call; None for the default of the back end.
        queue_length: packets the kernel keeps for us until they are read; None for at least 1024 and 4 batches.
        vnet_header: ask for super-packets, where the kernel has them.

    Raises DeviceError.
    """
    system: str = sys.platform
    if system == "linux":
        from rnsfast.osio.linux_tun import open_linux_tun

        return open_linux_tun(name, batch=batch, queue_length=queue_length, vnet_header=vnet_header)
    if system == "darwin":
        from rnsfast.osio.utun_device import open_utun

        return open_utun(name, batch=batch, queue_length=queue_length)
    if system == "win32":
        from rnsfast.osio.wintun_device import open_wintun

        return open_wintun(name, batch=batch)
    raise DeviceError(f"TUN devices are not available on this system ({system})")
