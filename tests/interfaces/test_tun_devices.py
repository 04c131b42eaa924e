"""TUNInterface on a real device in a network namespace, with the kernel at its other side."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator

import pytest

from rnsfast.interfaces.tun import RETRY_WAIT, TunInterface
from rnsfast.wire.drop import Drop
from tests.fakes import PATIENCE, FakeRuntime
from tests.interfaces.test_tun import PEER, config
from tests.namespaces import Namespace, namespace, need_devices


@pytest.fixture
def space() -> Iterator[Namespace]:
    need_devices()
    with namespace(ipv6=True) as made:
        yield made


REAL = {
    4: {"address": "10.77.0.2", "peers": "10.77.0.1", "host_address": "10.77.0.1/24"},
    6: {"address": "fd77::2", "peers": "fd77::1", "host_address": "fd77::1/64"},
}


@pytest.fixture
def real(space: Namespace, runtime: FakeRuntime) -> Iterator[Callable[..., TunInterface]]:
    made: list[TunInterface] = []

    def start(**options: str) -> TunInterface:
        made.append(TunInterface(config(**options)))
        with space.inside():
            made[-1].start(runtime)
        return made[-1]

    yield start
    for interface in made:
        interface.close()


def kernel_socket(space: Namespace, version: int) -> socket.socket:
    """What a UDPInterface would have: bound to the peer's address."""
    with space.inside():
        sock = socket.socket(socket.AF_INET if version == 4 else socket.AF_INET6, socket.SOCK_DGRAM)
    sock.bind((REAL[version]["peers"], 4242))
    sock.settimeout(PATIENCE)
    return sock


@pytest.mark.parametrize("version", [4, 6])
def test_packets_pass_to_and_from_an_ordinary_socket(
    space: Namespace, real: Callable[..., TunInterface], runtime: FakeRuntime, version: int
) -> None:
    with space.taking(REAL[6]["peers"]) if version == 6 else contextlib.nullcontext():
        interface = real(**REAL[version])
    packets = [os.urandom(20 + 17 * i) for i in range(60)]
    with kernel_socket(space, version) as sock:
        with runtime.lock:
            interface.port.queue += packets
        interface.flush(interface.port)
        assert [sock.recv(2000) for _ in packets] == packets
        for packet in packets:
            sock.sendto(packet, (REAL[version]["address"], 4242))
    runtime.run_until(lambda: len(runtime.received) >= len(packets))
    assert runtime.received == packets
    unexpected = {drop: n for drop, n in interface.port.drops.items() if drop is not Drop.IP_OTHER_ADDRESS}
    assert not unexpected


def test_the_kernel_takes_our_answer_to_its_echo_request(
    space: Namespace, real: Callable[..., TunInterface], runtime: FakeRuntime
) -> None:
    interface = real(**REAL[4])
    with space.inside():
        sock = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    with sock:
        sock.settimeout(PATIENCE)
        sock.sendto(bytes((8, 0, 0xF7, 0xFD, 0, 1, 0, 1)), ("10.77.0.2", 0))  # sum 0x0802
        runtime.run_until(lambda: interface.status()["echo_answers"])
        answer, source = sock.recvfrom(100)
    assert (answer[20], source[0]) == (0, "10.77.0.2")


def test_an_unreachable_port_is_counted(
    space: Namespace, real: Callable[..., TunInterface], runtime: FakeRuntime
) -> None:
    interface = real(**REAL[4])
    with runtime.lock:
        interface.port.queue.append(bytes(30))
    interface.flush(interface.port)
    runtime.run_until(lambda: interface.port.drops[Drop.ICMP_UNREACHABLE] == 1)


def test_a_way_that_is_too_narrow_is_counted(
    space: Namespace, real: Callable[..., TunInterface], runtime: FakeRuntime
) -> None:
    """Nothing is fragmented: the router before the narrow place says so."""
    space.set("ipv4/ip_forward", "1")
    space.ip("link", "add", "narrow", "mtu", "400", "type", "veth", "peer", "name", "nowhere")
    space.ip("address", "add", "10.78.0.1/24", "dev", "narrow")
    space.ip("link", "set", "narrow", "up")
    interface = real(**REAL[4] | {"peers": PEER})
    with runtime.lock:
        interface.port.queue += [bytes(500), bytes(100)]
    interface.flush(interface.port)
    runtime.run_until(lambda: interface.port.drops[Drop.ICMP_TOO_BIG] == 1)


def test_a_real_device_goes_down_and_up_and_away(
    space: Namespace, real: Callable[..., TunInterface], runtime: FakeRuntime
) -> None:
    interface = real(**REAL[4])
    port = interface.port
    space.ip("link", "set", "rf0", "down")
    with runtime.lock:
        port.queue.append(bytes(30))
    interface.flush(port)
    assert (port.online, port.drops[Drop.TX_DEVICE_DOWN]) == (False, 1)
    space.ip("link", "set", "rf0", "up")
    runtime.advance(RETRY_WAIT)
    assert port.online
    space.ip("link", "del", "rf0")
    runtime.run_until(lambda: not port.online)
    with space.inside():
        runtime.advance(RETRY_WAIT)
    assert port.online
    assert "rf0" in space.ip("link")
    assert len(runtime.reports) == 2
