"""TUNInterface in carrier mode: packets travel in UDP datagrams that are written to, and read from, a TUN device.

To the kernel this node is a host of its own behind the device, with an address of its own; whatever routes to that
address carries Reticulum. At the other end stands another TUNInterface, or a UDPInterface on an ordinary socket. What
the options mean and how to route is in docs/tun.md.
"""

from __future__ import annotations

import ipaddress
import threading
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Interface, IPv6Address, IPv6Interface
from typing import Any, Final

from rnsfast.engine.port import Port
from rnsfast.errors import InterfaceError
from rnsfast.interfaces.base import Handle, Runtime, Section
from rnsfast.interfaces.common import BUILT_IN, UDP, CommonConfig, Defaults, bracketed, ifac_key, make_port
from rnsfast.interfaces.datagrams import HEADERS, Flow, Host, build_datagrams, receive
from rnsfast.interfaces.packets import PacketConnection
from rnsfast.interfaces.sockets import code
from rnsfast.osio.backend import bounds
from rnsfast.osio.contract import Kind
from rnsfast.osio.device import DeviceError, TunDevice, open_tun
from rnsfast.wire.drop import Drop

PORT: Final = 4242
RETRY_WAIT: Final = 5.0  # seconds until a device that is gone or down is looked at again
MIN_MTU: Final = {4: 576, 6: 1280}  # bytes; what every IP network carries

Address = IPv4Address | IPv6Address


@dataclass(frozen=True, slots=True, kw_only=True)
class TunConfig:
    """One `[[name]]` section with `type = TUNInterface`."""

    common: CommonConfig
    device: str
    address: Address  # of this node
    host_address: IPv4Interface | IPv6Interface | None = None  # of the kernel's side; None: somebody else sets it up
    peers: tuple[Address, ...] = ()  # every packet goes to each
    anybody: bool = False  # whether others are heard, too
    port: int = PORT
    mtu: int | None = None  # bytes; None: as the device has it, 1500 if it is new
    batch: int | None = None  # packets a receive; None: as the system's back end prefers

    @classmethod
    def from_section(cls, section: Section, defaults: Defaults = BUILT_IN) -> TunConfig:
        """Raises ConfigError."""
        common = CommonConfig.from_section(section, defaults)
        address = _address(section, "address", section.text("address"))
        _, low, high = bounds(Kind.TUN)
        words = section.words("peers")
        if not words:
            raise section.fail("peers", "is missing: addresses of the other nodes, or any")
        peers = tuple(dict.fromkeys(_address(section, "peers", word) for word in words if word.lower() != "any"))
        for peer in peers:
            if peer == address:
                raise section.fail("peers", f"{peer} is the address of this node itself")
            if peer.version != address.version:
                raise section.fail("peers", f"{peer} and {address} are not of one family: one is IPv4, the other IPv6")
        return cls(
            common=common,
            device=section.text("device"),
            address=address,
            host_address=_host_address(section, address),
            peers=peers,
            anybody=any(word.lower() == "any" for word in words),
            port=section.integer("port", 1, 65_535, default=PORT),
            mtu=section.integer("mtu", MIN_MTU[address.version], 65_535, default=None),
            batch=section.integer("batch", low, high, default=None),
        )


def _address(section: Section, key: str, text: str) -> Address:
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        raise section.fail(key, f"{text!r} is no IP address") from None
    if found.is_multicast or found.is_unspecified or found.is_loopback or str(found) == "255.255.255.255":
        raise section.fail(key, f"{text} is not the address of one host in a network")
    if isinstance(found, IPv6Address) and found.scope_id:
        raise section.fail(key, f"{text}: addresses with a zone cannot be routed")
    return found


def _host_address(section: Section, address: Address) -> IPv4Interface | IPv6Interface | None:
    text = section.text("host_address", None)
    if text is None:
        return None
    try:
        found = ipaddress.ip_interface(text)
    except ValueError:
        found = None
    if found is None or "/" not in text:
        raise section.fail("host_address", f"{text!r} is no address with a prefix length, like 10.77.0.1/24")
    if found.version != address.version:
        raise section.fail("host_address", f"{text} and {address} are not of one family: one is IPv4, the other IPv6")
    if found.ip == address:
        raise section.fail("host_address", f"{found.ip} is the address of the node: the kernel needs another one")
    return found


class TunInterface:
    """One port for ever, one device at a time."""

    kind = "TUNInterface"

    def __init__(self, config: TunConfig) -> None:
        common = config.common
        self.config = config
        self.name = common.name
        self.title = f"{self.kind}[{self.name}]"
        self.port: Port = make_port(f"{self.kind}[{self.name}/{config.device}]", common, UDP, ifac_key(common, UDP))
        if not config.peers:
            self.port.outgoing = False  # nobody to send to
        self._flows = [Flow(config.address, config.port, peer, config.port) for peer in config.peers]
        largest = self.port.hw_mtu + self.port.ifac_size
        self._host = Host(config.address, config.port, None if config.anybody else config.peers, largest)
        self._room = largest  # bytes of the largest packet sent; less on a device with a small MTU
        self._mtu = 0
        self._runtime: Runtime | None = None
        self._lock = threading.Lock()  # device and state
        self._device: TunDevice | None = None
        self._connection: PacketConnection | None = None
        self._retry: Handle | None = None
        self._since = 0.0
        self._attached = False
        self._closed = False
        self._down = False  # the device is there, but was found down
        self._refusals = 0  # writes that it refused because it was down
        self._last_error = ""
        self._answered = 0  # echo requests

    @property
    def ports(self) -> list[Port]:
        return [self.port] if self._attached else []

    # -- opening --------------------------------------------------------------------------------------------------

    def start(self, runtime: Runtime) -> None:
        """Open the device. Raises InterfaceError, and may then be called again."""
        try:
            device = open_tun(self.config.device, batch=self.config.batch)
        except DeviceError as error:
            raise InterfaceError(f"{self.title}: {error}", retryable=error.retryable) from error
        try:
            self._set_up(device)
            self._mtu = device.mtu
        except DeviceError as error:
            device.close()
            raise InterfaceError(f"{self.title}: {error}", retryable=error.retryable) from error
        self._runtime = runtime
        self._go_online(runtime, device)

    def _set_up(self, device: TunDevice) -> None:
        config = self.config
        if config.mtu is not None and config.mtu != device.mtu:
            device.set_mtu(config.mtu)
        if config.host_address is not None:
            device.add_address(str(config.host_address))
        device.up()
        try:
            device.add_route(f"{config.address}/{config.address.max_prefixlen}")
        except DeviceError:
            if config.host_address is not None:
                raise  # otherwise whoever set the device up has seen to it

    def _go_online(self, runtime: Runtime, device: TunDevice) -> None:
        port = self.port
        connection = PacketConnection(
            runtime,
            port,
            device.io,
            None,
            self._on_broken,
            wrap=self._wrap,
            unwrap=self._unwrap,
            overhead=HEADERS[self.config.address.version],
        )
        with self._lock:
            if self._closed:
                device.close()
                return
            self._device, self._connection = device, connection
            self._room = min(port.hw_mtu + port.ifac_size, self._mtu - HEADERS[self.config.address.version])
            self._since, self._last_error, self._down = runtime.now(), "", False
            self._refusals = port.drops[Drop.TX_DEVICE_DOWN]
            first, self._attached = not self._attached, True
        with runtime.lock:
            port.online = True
        if first:
            runtime.attach(port, self)
        else:
            runtime.changed(port)
        connection.watch()

    # -- packets and datagrams ------------------------------------------------------------------------------------

    def _wrap(self, packets: list[bytes]) -> list[bytes]:
        """Datagrams, under the transmit lock of the connection. What is too large is dropped by itself."""
        port, flows, room = self.port, self._flows, self._room
        if max(map(len, packets)) > room:
            fitting = [packet for packet in packets if len(packet) <= room]
            lost = len(packets) - len(fitting)
            assert self._runtime is not None
            with self._runtime.lock:
                port.drops[Drop.TX_TOO_LARGE] += lost
            port.tx_packets -= lost
            port.tx_bytes -= sum(map(len, packets)) - sum(map(len, fitting))
            packets = fitting
        more = len(flows) - 1  # every datagram is counted
        port.tx_packets += more * len(packets)
        port.tx_bytes += more * sum(map(len, packets))
        return build_datagrams(packets, flows)

    def _unwrap(self, datagrams: list[bytes]) -> list[bytes]:
        """Packets, on the thread that reads."""
        found = receive(datagrams, self._host)
        device, runtime = self._device, self._runtime
        if found.drops and runtime is not None:
            with runtime.lock:
                self.port.drops.update(found.drops)
        if found.answers and device is not None:
            self._answered += device.io.send(found.answers).sent  # what does not go now is not worth waiting for
        return found.payloads

    # -- trouble --------------------------------------------------------------------------------------------------

    def _on_broken(self, error: int) -> None:
        """The device is gone: wait for it, or make it anew."""
        runtime = self._runtime
        assert runtime is not None
        with self._lock:
            self._connection = None
            device, self._device = self._device, None
        if device is not None:
            device.close()
        self._go_offline(runtime)
        self._wait(f"the device {self.config.device} is gone: {code(error)}", self._reopen)

    def _reopen(self) -> None:
        runtime = self._runtime
        with self._lock:
            self._retry = None
            if self._closed or runtime is None:
                return
        try:
            self.start(runtime)
        except InterfaceError as error:
            self._wait(str(error), self._reopen)

    def _note_down(self) -> None:
        """A write was refused because the device is down."""
        runtime = self._runtime
        assert runtime is not None
        with self._lock:
            if self._down or self._closed or self._device is None:
                return
            self._down = True
        self._go_offline(runtime)
        self._wait(f"the device {self.config.device} is down", self._look_again)

    def _look_again(self) -> None:
        """Whether the device is up again."""
        runtime = self._runtime
        with self._lock:
            self._retry = None
            device = self._device
            if self._closed or device is None or runtime is None:
                return
        try:
            up = device.is_up
        except DeviceError:
            up = False  # it is gone, and reading will say so
        if not up:
            self._wait(self._last_error, self._look_again)
            return
        with self._lock:
            self._down, self._last_error, self._since = False, "", runtime.now()
            self._refusals = self.port.drops[Drop.TX_DEVICE_DOWN]
        with runtime.lock:
            self.port.online = True
        runtime.changed(self.port)

    def _go_offline(self, runtime: Runtime) -> None:
        with runtime.lock:
            self.port.online = False
        runtime.changed(self.port)

    def _wait(self, reason: str, then: Any) -> None:
        runtime = self._runtime
        assert runtime is not None
        with self._lock:
            if self._closed:
                return
            first, self._last_error = not self._last_error, reason
            if self._retry is not None:
                self._retry.cancel()
            self._retry = runtime.call_at(runtime.now() + RETRY_WAIT, then)
        if first:
            runtime.report(self, f"{self.title}: {reason}; looking again every {RETRY_WAIT:.0f} s")

    # -- any thread -----------------------------------------------------------------------------------------------

    def flush(self, port: Port) -> None:
        connection = self._connection
        if connection is None:
            return
        connection.flush()
        if port.drops[Drop.TX_DEVICE_DOWN] != self._refusals:
            self._note_down()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            connection, self._connection = self._connection, None
            device, self._device = self._device, None
            retry, self._retry = self._retry, None
            attached, self._attached = self._attached, False
        if retry is not None:
            retry.cancel()
        if connection is not None:
            connection.close()
        if device is not None:
            device.close()
        if attached and self._runtime is not None:
            with self._runtime.lock:
                self.port.online = False
            self._runtime.detach(self.port)

    def status(self) -> dict[str, Any]:
        config, runtime = self.config, self._runtime
        connection = self._connection
        if connection is not None:
            state = "device is down" if self._down else "up"
        elif self._closed or runtime is None:
            state = "closed"
        else:
            state = "waiting for the next try"
        found: dict[str, Any] = {
            "type": self.kind,
            "name": self.name,
            "device": config.device,
            "mtu": self._mtu,
            "address": bracketed(str(config.address), config.port),
            "peers": [*map(str, config.peers), *(["any"] if config.anybody else [])],
            "state": state,
            "state_for": runtime.now() - self._since if runtime is not None and connection is not None else 0.0,
            "last_error": self._last_error,
            "echo_answers": self._answered,
        }
        if connection is not None:
            found["connection"] = connection.status()
        return found
