"""TUNInterface: packets ride in datagrams through a device; what the device does to them is counted and survived.

The device is a pair of datagram sockets; real ones are in `test_tun_devices`.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from rnsfast.errors import ConfigError, InterfaceError
from rnsfast.interfaces import registry
from rnsfast.interfaces import tun as module
from rnsfast.interfaces.tun import RETRY_WAIT, TunConfig, TunInterface
from rnsfast.node.config import parse_config
from rnsfast.osio.device import DeviceError
from rnsfast.osio.tun import PlainCalls, TunIO
from rnsfast.osio.verdicts import EBADFD
from rnsfast.wire.drop import Drop
from tests.fakes import FakeRuntime
from tests.osio.ip_packets import parse, udp4

OURS, PEER, OTHER = "10.77.0.2", "10.78.0.2", "10.79.0.2"
BASE = {"type": "TUNInterface", "device": "rf0", "address": OURS, "peers": PEER}


def section(**options: str) -> Any:
    lines = "".join(f"    {key} = {value}\n" for key, value in (BASE | options).items() if value)
    return parse_config(f"[interfaces]\n  [[x]]\n{lines}".encode()).sections[0]


def config(**options: str) -> TunConfig:
    return TunConfig.from_section(section(**options))


# -- configuration ------------------------------------------------------------------------------------------------


def test_options_and_their_defaults() -> None:
    read = config()
    assert (read.device, str(read.address), read.port, read.mtu, read.batch) == ("rf0", OURS, 4242, None, None)
    assert ([str(peer) for peer in read.peers], read.anybody, read.host_address) == ([PEER], False, None)
    read = config(host_address="10.77.0.1/24", peers=f"{PEER}, {OTHER}, any, {PEER}", port="7", mtu="1280", batch="128")
    assert [str(peer) for peer in read.peers] == [PEER, OTHER]
    assert (str(read.host_address), read.port, read.mtu, read.batch) == ("10.77.0.1/24", 7, 1280, 128)
    assert read.anybody


def test_the_port_is_like_that_of_udp() -> None:
    made = registry.parse(section())()
    assert isinstance(made, TunInterface)
    port = made.port
    assert (port.name, port.hw_mtu, port.upgradable) == ("TUNInterface[x/rf0]", 1064, False)
    assert (port.bitrate, port.ifac_size, port.outgoing) == (10_000_000, 16, True)
    assert not TunInterface(config(peers="any")).port.outgoing
    read = section(host_address="10.77.0.1/24", port="4", mtu="1400", batch="1", mode="gw", passphrase="p")
    registry.parse(read)
    assert read.unknown() == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"address": ""}, "address: is missing"),
        ({"address": "x"}, "address: 'x' is no IP address"),
        ({"address": "224.0.0.1"}, "address: 224.0.0.1 is not the address of one host"),
        ({"address": "127.0.0.1"}, "is not the address of one host"),
        ({"device": ""}, "device: is missing"),
        ({"peers": ""}, "peers: is missing"),
        ({"peers": "host.example"}, "peers: 'host.example' is no IP address"),
        ({"peers": OURS}, "is the address of this node itself"),
        ({"peers": "fd00::1"}, "one is IPv4, the other IPv6"),
        ({"host_address": "10.77.0.1"}, "is no address with a prefix length"),
        ({"host_address": "fd00::1/64"}, "one is IPv4, the other IPv6"),
        ({"host_address": f"{OURS}/24"}, "the kernel needs another one"),
        ({"mtu": "575"}, "mtu: '575' is not within 576..65535"),
        ({"address": "fd00::2", "peers": "fd00::3", "mtu": "1279"}, "mtu: '1279' is not within 1280"),
        ({"batch": "129"}, "batch: '129'"),
        ({"port": "0"}, "port: '0'"),
    ],
)
def test_faults_name_the_option(options: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError) as failure:
        config(**options)
    assert words in str(failure.value)


# -- with a pair instead of a device ------------------------------------------------------------------------------


class PairDevice:
    """What `open_tun` gives, over a pair of sockets: `far` is where the kernel would be."""

    def __init__(self, name: str, batch: int | None) -> None:
        self.name, self.mtu, self.is_up, self.gone = name, 1500, False, False
        self.asked: list[str] = []
        near, self.far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.far.setblocking(False)
        self.io = TunIO(near.detach(), max_batch=64 if batch is None else batch, calls=self)
        self.plain = PlainCalls()
        self.writes: list[int] = []  # packets a call
        self.reads = 0

    def set_mtu(self, mtu: int) -> None:
        self.mtu = mtu
        self.asked.append(f"mtu {mtu}")

    def add_address(self, address: str) -> None:
        self.asked.append(f"address {address}")

    def add_route(self, network: str) -> None:
        self.asked.append(f"route {network}")

    def up(self) -> None:
        self.is_up = True
        self.asked.append("up")

    def down(self) -> None:
        self.is_up = False

    def close(self) -> None:
        self.io.close()
        self.far.close()

    # as system calls

    backend = "pair"

    def read_many(self, fd: int, count: int, budget: int) -> tuple[list[bytes], int]:
        self.reads += 1
        return ([], EBADFD) if self.gone else self.plain.read_many(fd, count, budget)

    def write(self, fd: int, packet: bytes) -> int:
        return self.write_many(fd, [packet])[1]

    def write_many(self, fd: int, packets: Sequence[bytes]) -> tuple[int, int]:
        self.writes.append(len(packets))
        if self.gone:
            return 0, EBADFD
        return self.plain.write_many(fd, packets) if self.is_up else (0, errno.EIO)

    # for tests

    def sent(self) -> list[bytes]:
        found = []
        while True:
            try:
                found.append(self.far.recv(70_000))
            except BlockingIOError:
                return found


class World:
    """One interface and the devices it has opened."""

    def __init__(self, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runtime = runtime
        self.devices: list[PairDevice] = []
        self.obstacle: DeviceError | None = None
        self.made: list[TunInterface] = []
        monkeypatch.setattr(module, "open_tun", self.open)

    def open(self, name: str | None, *, batch: int | None = None) -> PairDevice:
        if self.obstacle is not None:
            raise self.obstacle
        assert name is not None
        self.devices.append(PairDevice(name, batch))
        return self.devices[-1]

    def start(self, **options: str) -> TunInterface:
        made = TunInterface(config(**options))
        self.made.append(made)
        made.start(self.runtime)
        return made

    @property
    def device(self) -> PairDevice:
        return self.devices[-1]

    def send(self, interface: TunInterface, *packets: bytes) -> list[bytes]:
        """Queue, flush, and see what came out of the device."""
        with self.runtime.lock:
            interface.port.queue += packets
        interface.flush(interface.port)
        return self.device.sent()

    def close(self) -> None:
        for interface in self.made:
            interface.close()
            interface.close()
        for device in self.devices:
            device.close()


@pytest.fixture
def world(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(runtime, monkeypatch)
    yield made
    made.close()


def test_the_device_is_set_up_as_configured(world: World) -> None:
    world.start(host_address="10.77.0.1/24", mtu="1400")
    assert world.device.asked == ["mtu 1400", "address 10.77.0.1/24", "up", f"route {OURS}/32"]
    world.start(address="fd00::2", peers="fd00::3")
    assert world.device.asked == ["up", "route fd00::2/128"]


def test_who_set_the_device_up_has_seen_to_the_route(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: PairDevice, network: str) -> None:
        raise DeviceError("no permission")

    monkeypatch.setattr(PairDevice, "add_route", refuse)
    assert world.start().port.online
    with pytest.raises(InterfaceError, match=r"TUNInterface\[x\]: no permission"):
        world.start(host_address="10.77.0.1/24")
    assert world.device.io.fileno() == -1


def test_every_packet_goes_to_every_peer_in_one_call(world: World) -> None:
    interface = world.start(peers=f"{PEER}, {OTHER}")
    packets = [bytes((i,)) * (19 + i) for i in range(5)]
    sent = [parse(raw) for raw in world.send(interface, *packets)]
    assert world.device.writes == [10]
    for index, peer in enumerate((PEER, OTHER)):
        assert [item.payload for item in sent[index::2]] == packets
        assert {socket.inet_ntoa(item.destination) for item in sent[index::2]} == {peer}
    assert {(item.ports, item.fragment) for item in sent} == {((4242, 4242), 0x4000)}
    port = interface.port
    assert (port.tx_packets, port.tx_bytes) == (10, 2 * sum(map(len, packets)))


def test_a_packet_that_is_too_large_is_dropped_alone(world: World) -> None:
    interface = world.start(mtu="576")
    packets = [bytes(500), bytes(548), bytes(549), bytes(19)]
    assert [parse(raw).payload for raw in world.send(interface, *packets)] == [packets[0], packets[1], packets[3]]
    port = interface.port
    assert port.drops == {Drop.TX_TOO_LARGE: 1}
    assert (port.tx_packets, port.tx_bytes) == (3, 1067)
    assert world.send(interface, bytes(549)) == []
    wide = world.start()
    assert len(world.send(wide, bytes(1080), bytes(1081))) == 1
    assert wide.port.drops == {Drop.TX_TOO_LARGE: 1}


def test_what_arrives_is_handed_over_at_once(world: World, runtime: FakeRuntime) -> None:
    interface = world.start()
    bodies = [bytes((i,)) * 30 for i in range(10)]
    for body in bodies:
        world.device.far.send(udp4(PEER, OURS, 999, 4242, body))
    world.device.far.send(udp4(OTHER, OURS, 999, 4242, b"from a stranger"))
    world.device.far.send(udp4(PEER, OURS, 999, 4242, bytes(1081)))
    world.device.far.send(b"\x45\0\0")
    runtime.run_until(lambda: runtime.received)
    assert runtime.batches == [(interface.port, bodies)]
    assert interface.port.drops == {Drop.IP_UNKNOWN_PEER: 1, Drop.RX_REFUSED: 1, Drop.IP_MALFORMED: 1}


def test_anybody_may_be_heard(world: World, runtime: FakeRuntime) -> None:
    world.start(peers=f"{PEER}, any")
    world.device.far.send(udp4(OTHER, OURS, 999, 4242, b"hello"))
    runtime.run_until(lambda: runtime.received == [b"hello"])


def test_batches_are_as_large_as_configured(world: World, runtime: FakeRuntime) -> None:
    interface = world.start(batch="2")
    for i in range(5):
        world.device.far.send(udp4(PEER, OURS, 999, 4242, bytes((i,))))
    runtime.run_until(lambda: len(runtime.received) == 5)
    assert [len(packets) for _, packets in runtime.batches] == [2, 2, 1]
    assert interface.status()["connection"]["batch"] == 2


def test_echo_requests_are_answered(world: World, runtime: FakeRuntime) -> None:
    from tests.interfaces.test_datagrams import icmp

    interface = world.start(address="10.77.0.2")
    world.device.far.send(icmp(4, 8, 0, b"\0\1\0\1data"))
    runtime.run_until(lambda: interface.status()["echo_answers"] == 1)
    (answer,) = world.device.sent()
    assert (answer[20], answer[16:20]) == (0, socket.inet_aton("10.77.0.4"))
    assert not runtime.received


def test_a_full_device_keeps_the_rest_in_order(world: World, runtime: FakeRuntime) -> None:
    interface = world.start()
    packets = [i.to_bytes(2, "big") * 400 for i in range(900)]
    found = [parse(raw).payload for raw in world.send(interface, *packets)]
    assert 0 < len(found) < 900
    assert interface.port.congested
    assert runtime.log[-1].startswith("online congested")

    def drained() -> bool:
        found.extend(parse(raw).payload for raw in world.device.sent())
        return len(found) == 900

    runtime.run_until(drained)
    assert found == packets
    assert not interface.port.congested
    assert interface.port.drops == {}
    assert runtime.events[world.device.io.fileno()] == 1, "writability is still watched"


def test_what_waits_is_bounded(world: World) -> None:
    interface = world.start()
    sent = world.send(interface, *[bytes(1000)] * 2000)
    waiting = interface.status()["connection"]["waiting_bytes"]
    assert waiting <= 1 << 20
    lost = interface.port.drops[Drop.TX_QUEUE_FULL]
    assert lost == 2000 - len(sent) - waiting // 1028
    assert interface.port.tx_packets == 2000 - lost


# -- trouble ------------------------------------------------------------------------------------------------------


def test_no_device_is_an_error_that_says_whether_it_may_pass(world: World) -> None:
    for retryable in (True, False):
        world.obstacle = DeviceError("rf0 is in use by another program", retryable=retryable)
        with pytest.raises(InterfaceError, match=r"TUNInterface\[x\]: rf0 is in use") as failure:
            world.start()
        assert failure.value.retryable is retryable


def test_a_device_that_goes_down_is_reported_once_and_looked_at_again(world: World, runtime: FakeRuntime) -> None:
    interface = world.start()
    world.device.is_up = False
    assert world.send(interface, bytes(30), bytes(30)) == []
    port = interface.port
    assert (port.online, port.drops, port.tx_packets) == (False, {Drop.TX_DEVICE_DOWN: 2}, 0)
    assert interface.status()["state"] == "device is down"
    runtime.advance(3 * RETRY_WAIT)
    assert len(runtime.reports) == 1
    assert "rf0 is down" in runtime.reports[0]
    world.device.is_up = True
    runtime.advance(RETRY_WAIT)
    assert port.online
    assert runtime.pending_calls == []
    assert len(world.send(interface, bytes(30))) == 1
    world.device.is_up = False
    world.send(interface, bytes(30))
    assert len(runtime.reports) == 2
    assert not port.online


@pytest.mark.parametrize("how", ["reading", "writing"])
def test_a_device_that_is_gone_is_made_anew(world: World, runtime: FakeRuntime, how: str) -> None:
    interface = world.start()
    first = world.device
    first.gone = True
    if how == "writing":
        world.send(interface, bytes(30), bytes(30))
    else:
        first.far.send(bytes(30))
    runtime.run_until(lambda: not interface.port.online)
    assert first.io.fileno() == -1
    assert interface.status()["state"] == "waiting for the next try"
    world.obstacle = DeviceError("there is no /dev/net/tun", retryable=True)
    runtime.advance(3 * RETRY_WAIT)
    assert len(runtime.reports) == 1
    assert "rf0 is gone" in runtime.reports[0]
    world.obstacle = None
    runtime.advance(RETRY_WAIT)
    assert interface.port.online
    assert len(world.devices) == 2
    assert len(world.send(interface, bytes(30))) == 1
    assert [entry for entry in runtime.log if entry.startswith("attach")] == [f"attach {interface.port}"]


def test_closing_while_a_device_is_awaited_ends_the_waiting(world: World, runtime: FakeRuntime) -> None:
    for trouble in ("gone", "is_up"):
        interface = world.start()
        setattr(world.device, trouble, trouble == "gone")
        world.send(interface, bytes(30))
        runtime.run_until(lambda at=interface: not at.port.online)
        interface.close()
        assert runtime.pending_calls == []
        assert interface.ports == []
        assert interface.status()["state"] == "closed"
        with runtime.lock:
            interface.port.queue.append(bytes(30))
        interface.flush(interface.port)
