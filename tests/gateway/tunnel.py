"""Gateways in tests: the kernel's side of a device is the other end of a datagram socket pair."""

from __future__ import annotations

import queue
import socket
import threading
from ipaddress import ip_interface, ip_network
from typing import Any

from rnsfast import Identity, Node
from rnsfast.gateway import Gateway, GatewayConfig, State, tunnel_hash
from rnsfast.osio.device import DeviceError
from rnsfast.osio.tun import TunIO
from tests.gateway.support import ipv4
from tests.loopback import PATIENCE, Clock, Pair, settle


class FakeDevice:
    """A device's other side. `kernel` is what the system would read and write."""

    def __init__(self, name: str) -> None:
        self.name, self.mtu = name, 1500
        self.sizes: list[int] = []
        self.refuses = False
        ours, self.kernel = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.kernel.settimeout(PATIENCE)
        self.io = TunIO(ours.detach())
        self.closed = threading.Event()

    def set_mtu(self, mtu: int) -> None:
        if self.refuses:
            raise DeviceError(f"{self.name}: the MTU cannot be set")
        self.mtu = mtu
        self.sizes.append(mtu)

    def close(self) -> None:
        self.io.close()
        self.closed.set()

    def put(self, *packets: bytes) -> None:
        """As if the system had routed these into the device."""
        for packet in packets:
            self.kernel.send(packet)

    def take(self, count: int = 1) -> list[bytes]:
        return [self.kernel.recv(70_000) for _ in range(count)]

    def is_silent(self) -> bool:
        self.kernel.setblocking(False)
        try:
            self.kernel.recv(70_000)
        except BlockingIOError:
            return True
        finally:
            self.kernel.settimeout(PATIENCE)
        return False


class Side:
    """One gateway, its device and what it said."""

    def __init__(self, node: Node, identity: Identity, address: str, peer: bytes, **options: Any) -> None:
        self.node, self.identity = node, identity
        self.device = FakeDevice(f"tun-{address}")
        self.news: queue.SimpleQueue[tuple[State, str]] = queue.SimpleQueue()
        self.heard: list[tuple[State, str]] = []
        options.setdefault("addresses", (ip_interface(address),))
        routes = tuple(ip_network(route) for route in options.pop("routes", ()))
        self.gateway = Gateway(
            node,
            self.device.io,
            self.device,
            GatewayConfig(identity=identity, peer=peer, routes=routes, **options),
            on_change=lambda state, sentence: self.news.put((state, sentence)),
        )

    @property
    def links(self) -> Any:
        return self.gateway._links

    def until(self, wanted: State) -> str:
        """Wait for a state; its sentence."""
        while True:
            self.heard.append(self.news.get(timeout=PATIENCE))
            if self.heard[-1][0] is wanted:
                return self.heard[-1][1]

    @property
    def drops(self) -> dict[str, int]:
        drops: dict[str, int] = self.gateway.status()["drops"]
        return drops


class Tunnel:
    """Two sides on two nodes. The first has the smaller tunnel address."""

    def __init__(self, pair: Pair, clock: Clock) -> None:
        self.pair, self.clock = pair, clock
        self.sides: list[Side] = []
        first, second = sorted((Identity(), Identity()), key=tunnel_hash)
        self.identities = first, second

    def make(self, *, a: dict[str, Any] | None = None, b: dict[str, Any] | None = None) -> tuple[Side, Side]:
        first, second = self.identities
        one = Side(self.pair.a, first, "10.77.0.1/24", tunnel_hash(second), **(a or {}))
        two = Side(self.pair.b, second, "10.77.0.2/24", tunnel_hash(first), **(b or {}))
        self.sides += [one, two]
        return one, two

    def up(self, **options: Any) -> tuple[Side, Side]:
        """Both started and agreed."""
        one, two = self.make(**options)
        one.gateway.start()
        two.gateway.start()
        one.until(State.UP)
        two.until(State.UP)
        self.agree(one, two)
        for side in (one, two):  # both asked for a link, and each was told of either
            while not side.news.empty():
                side.heard.append(side.news.get())
        return one, two

    def both_ask(self) -> tuple[Side, Side]:
        """Both sides have established a link; their identities and hellos are held on the way."""
        one, two = self.make()
        wires = [self.pair.to_a, self.pair.to_b]
        for wire in wires:
            wire.hold(lambda raw: raw[0] & 3 == 2)  # link requests
        one.gateway.start()
        two.gateway.start()
        self.pass_time(1.1)
        for wire in wires:
            wire.wait_held(1)
            wire.hold(lambda raw: raw[0] & 0x0F == 0x0C)  # data on links
        for wire in wires:
            wire.release()
        for wire in wires:
            wire.wait_held(3)  # RTT, identity, hello
        return one, two

    def agree(self, one: Side, two: Side) -> None:
        """Wait until both use the same link and no other is left."""
        for _ in range(500):
            settle(self.pair.a)
            settle(self.pair.b)
            ends = [*one.links.ends, *two.links.ends]
            used = {side.links.current and side.links.current.link.id for side in (one, two)}
            if len(ends) == 2 and len(used) == 1 and None not in used:
                return
        raise AssertionError(f"no agreement: {one.links.ends} {two.links.ends}")

    def side(self, node: Node, identity: Identity, address: str, peer: bytes, **options: Any) -> Side:
        made = Side(node, identity, address, peer, **options)
        self.sides.append(made)
        return made

    def pass_time(self, seconds: float) -> None:
        """In steps so small that keepalives have their turn."""
        self.settle()
        while seconds > 0:
            self.clock.advance(min(seconds, 1.7), self.pair.a, self.pair.b)
            self.settle()
            seconds -= 1.7

    def settle(self) -> None:
        """Let everything that is under way arrive."""
        for _ in range(6):
            settle(self.pair.a)
            settle(self.pair.b)

    def close(self) -> None:
        for side in self.sides:
            side.gateway.close()
            side.device.close()
            side.device.kernel.close()


def there(i: int, size: int = 20) -> bytes:
    """From the first side to the second."""
    return ipv4("10.77.0.1", "10.77.0.2", i.to_bytes(4, "big") + bytes(size))


def back(i: int, size: int = 20) -> bytes:
    return ipv4("10.77.0.2", "10.77.0.1", i.to_bytes(4, "big") + bytes(size))
