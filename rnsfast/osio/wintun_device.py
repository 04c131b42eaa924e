"""The adapter behind a Wintun session: its addresses, routes and MTU, set by `netsh`.  Protocol 09, section 10.3.

Everything is set in the active store only and is gone with the adapter. `netsh` tells its reasons in the language of
the system and always fails with 1, so its text goes into the error and is never interpreted.

Not verified on Windows beyond what `tests/osio/test_native_windows.py` says when it is run there.
"""

from __future__ import annotations

import ipaddress
import os
import subprocess
import sys as system
from collections.abc import Callable, Sequence
from typing import Final

from rnsfast.osio.contract import BatchIO
from rnsfast.osio.device import DeviceError
from rnsfast.osio.wintun import BATCH, WintunIO, WintunSys

NAME: Final = "rnsfast"
MTU: Final = 1500  # bytes, set when an adapter is made: Wintun itself begins with 65,535
LIMIT: Final = 30.0  # seconds for one command
LARGEST: Final = 127  # characters of a name

Run = Callable[[Sequence[str]], tuple[int, str]]  # exit status and what was printed


def run_netsh(arguments: Sequence[str]) -> tuple[int, str]:
    """Run `netsh` of this system, and no other program of that name."""
    program = os.path.join(os.environ.get("SYSTEMROOT", r"C:\Windows"), "System32", "netsh.exe")
    flags = getattr(subprocess, "CREATE_NO_WINDOW", 0)
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, timeout=LIMIT, check=False, creationflags=flags
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, " ".join(done.stdout.decode("utf-8", "replace").split())


class WintunDevice:
    """One adapter. See `device.TunDevice`."""

    def __init__(self, name: str, io: BatchIO, run: Run = run_netsh) -> None:
        self.name = name
        self._io = io
        self._run = run
        self._mtu = 0
        self._is_up = True  # with a session it is
        self._done: set[str] = set()  # addresses and routes there are already
        self.set_mtu(MTU)

    @property
    def io(self) -> BatchIO:
        return self._io

    @property
    def mtu(self) -> int:
        return self._mtu

    @property
    def is_up(self) -> bool:
        return self._is_up

    def set_mtu(self, mtu: int) -> None:
        self._netsh("ipv4", "set", "subinterface", f"interface={self.name}", f"mtu={mtu}", "store=active")
        if mtu >= 1280:  # IPv6 does not exist below
            self._netsh("ipv6", "set", "subinterface", f"interface={self.name}", f"mtu={mtu}", "store=active")
        self._mtu = mtu

    def add_address(self, address: str) -> None:
        try:
            found = ipaddress.ip_interface(address)
        except ValueError as error:
            raise DeviceError(f"{self.name}: {address!r} is no address with a prefix length") from error
        key = f"address {found}"
        if key in self._done:
            return
        if found.version == 4:
            mask = f"mask={found.netmask}"
            self._netsh("ipv4", "add", "address", f"name={self.name}", f"address={found.ip}", mask, "store=active")
        else:
            self._netsh("ipv6", "add", "address", f"interface={self.name}", f"address={found}", "store=active")
        self._done.add(key)

    def add_route(self, network: str) -> None:
        try:
            found = ipaddress.ip_network(network)
        except ValueError as error:
            raise DeviceError(f"{self.name}: {network!r} is no network") from error
        key = f"route {found}"
        if key not in self._done:
            family = f"ipv{found.version}"
            self._netsh(family, "add", "route", f"prefix={found}", f"interface={self.name}", "store=active")
            self._done.add(key)

    def up(self) -> None:
        """An adapter with a session is up; this undoes `down`."""
        self._netsh("set", "interface", f"name={self.name}", "admin=enabled")
        self._is_up = True

    def down(self) -> None:
        self._netsh("set", "interface", f"name={self.name}", "admin=disabled")
        self._is_up = False

    def close(self) -> None:
        self._io.close()

    def _netsh(self, *arguments: str) -> None:
        status, text = self._run(("interface", *arguments))
        if status:
            raise DeviceError(f"{self.name}: netsh interface {' '.join(arguments)} failed: {text or status}")


def open_wintun(
    name: str | None, *, batch: int | None = None, sys: WintunSys | None = None, run: Run = run_netsh
) -> WintunDevice:
    """Make the adapter `name`, `rnsfast` if None. DeviceError says why it cannot be made."""
    chosen = NAME if name is None else name
    if not 0 < len(chosen) <= LARGEST or '"' in chosen or not chosen.isprintable():
        raise DeviceError(f"{chosen!r} is no name of an adapter: 1 to {LARGEST} printable characters without quotes")
    if sys is None and system.platform != "win32":
        raise DeviceError(f"Wintun does not exist on this system ({system.platform})")
    io = WintunIO(chosen, max_batch=BATCH if batch is None else batch, sys=sys)
    try:
        return WintunDevice(chosen, io, run)
    except DeviceError:
        io.close()
        raise
