"""UDPInterface on the loopback: real sockets, virtual time, the batching back end and the plain one."""

from __future__ import annotations

import errno
import itertools
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rnsfast.errors import ConfigError, InterfaceError
from rnsfast.interfaces import registry
from rnsfast.interfaces import udp as udp_module
from rnsfast.interfaces.common import CommonConfig
from rnsfast.interfaces.udp import REOPEN_WAIT, UdpConfig, UdpInterface
from rnsfast.node.config import parse_config
from rnsfast.wire.drop import Drop
from tests.fakes import PATIENCE, FakeRuntime
from tests.interfaces.test_config import section
from tests.vectors_support import unhex, vectors

LIMIT = 1064 + 16  # bytes of a packet with an access code

BASE = {"type": "UDPInterface", "listen_ip": "127.0.0.1", "listen_port": "4242"}
FULL = {**BASE, "forward_ip": "127.0.0.1", "forward_port": "4243"}


def read(**options: str | None) -> UdpConfig:
    return UdpConfig.from_section(section({key: value for key, value in {**FULL, **options}.items() if value}))


def config(forward: int | None = None, *, listen: int = 0, name: str = "x", **options: Any) -> UdpConfig:
    values: dict[str, Any] = {"listen_ip": "127.0.0.1", "listen_port": listen}
    if forward is not None:
        values |= {"forward_ip": "127.0.0.1", "forward_port": forward}
    return UdpConfig(common=CommonConfig(name=name), **(values | options))


# -- configuration ------------------------------------------------------------------------------------------------


def test_every_option_is_read() -> None:
    found = read(batch="7", segmentation="no", mode="gateway", bitrate="1000", ifac_size="64")
    assert (found.listen_ip, found.listen_port) == ("127.0.0.1", 4242)
    assert (found.forward_ip, found.forward_port) == ("127.0.0.1", 4243)
    assert (found.device, found.batch, found.segmentation) == (None, 7, False)
    assert (found.common.mode, found.common.bitrate, found.common.ifac_size) == (6, 1000, 8)


def test_defaults() -> None:
    found = read(forward_ip=None, forward_port=None)
    assert (found.forward_ip, found.forward_port, found.batch, found.segmentation) == (None, None, None, True)


def test_port_fills_in_whichever_is_not_given() -> None:
    assert (read(listen_port=None, port="9").listen_port, read(listen_port=None, port="9").forward_port) == (9, 4243)
    found = read(listen_port=None, forward_port=None, port="9")
    assert (found.listen_port, found.forward_port) == (9, 9)
    assert (read(port="9").listen_port, read(port="9").forward_port) == (4242, 4243)


def test_a_device_stands_for_the_addresses_that_are_not_given() -> None:
    found = read(listen_ip=None, forward_ip=None, listen_port=None, forward_port=None, device="eth0", port="9")
    assert (found.listen_ip, found.forward_ip, found.device) == (None, None, "eth0")
    assert (found.listen_port, found.forward_port) == (9, 9)
    found = read(device="eth0")
    assert (found.listen_ip, found.forward_ip) == ("127.0.0.1", "127.0.0.1")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"listen_ip": None}, "listen_ip: is missing"),
        ({"listen_port": None}, "listen_port: is missing"),
        ({"forward_port": None}, "forward_port: is missing: forward_ip needs a port"),
        ({"listen_port": "0"}, "listen_port: '0' is not within 1..65535"),
        ({"listen_port": "65536"}, "listen_port: '65536' is not within"),
        ({"forward_port": "many"}, "forward_port: 'many'"),
        ({"port": "-1"}, "port: '-1'"),
        ({"forward_ip": "::1"}, "forward_ip: ::1 cannot be reached from 127.0.0.1: one is IPv4, the other IPv6"),
        ({"listen_ip": "::"}, "forward_ip: 127.0.0.1 cannot be reached from ::"),
        ({"batch": "0"}, "batch: '0' is not within 1..128"),
        ({"batch": "129"}, "batch: '129' is not within 1..128"),
        ({"batch": "many"}, "batch: 'many'"),
        ({"segmentation": "perhaps"}, "segmentation: 'perhaps'"),
    ],
)
def test_faults_name_file_line_section_and_option(options: dict[str, str | None], words: str) -> None:
    with pytest.raises(ConfigError) as failure:
        read(**options)
    assert words in str(failure.value)
    file, line, where, _ = str(failure.value).split(":", 3)
    assert file == "config"
    written = [key for key, value in {**FULL, **options}.items() if value]
    option = words.split(":")[0]
    assert int(line) == (3 + written.index(option) if option in written else 2)
    assert where == " [[x]]"


@pytest.mark.parametrize("batch", [1, 2, 64, 128])
def test_batches_within_the_bounds_are_accepted(batch: int) -> None:
    assert read(batch=str(batch)).batch == batch


def test_an_unusable_choice_of_back_ends_is_said_with_the_section(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RNSFAST_OSIO", "fastest")
    with pytest.raises(ConfigError, match=r"config:\d+: \[\[x\]\]: .*RNSFAST_OSIO is 'fastest'"):
        read()


STOCK = """
[interfaces]
  [[Everybody here]]
    enabled = yes
    type = UDPInterface
    forward_ip = 255.255.255.255
    forward_port = 4242
    outgoing = yes
    listen_port = 4242
    listen_ip = 0.0.0.0
  [[One device]]
    type = UDPInterface
    interface_enabled = True
    device = eth0
    port = 4242
    mode = gw
    passphrase = a word
"""


def test_sections_of_stock_files_load_and_nothing_in_them_is_unknown() -> None:
    for loaded in parse_config(STOCK.encode()).sections:
        made = registry.parse(loaded)()
        assert isinstance(made, UdpInterface)
        assert loaded.unknown() == []


# -- the port -----------------------------------------------------------------------------------------------------


def test_the_port_is_that_of_a_datagram_interface() -> None:
    port = UdpInterface(read()).port
    assert port.name == "UDPInterface[x/127.0.0.1:4242]"
    assert (port.hw_mtu, port.upgradable, port.offered_mtu) == (1064, False, 500)
    assert (port.ifac, port.ifac_size, port.bitrate, port.wants_tunnel) == (None, 16, 10_000_000, False)
    slow = UdpInterface(read(bitrate="1000")).port
    assert (slow.hw_mtu, slow.bitrate) == (1064, 1000)
    closed = UdpInterface(read(passphrase="a word", ifac_size="64")).port
    assert closed.ifac is not None
    assert closed.ifac_size == 8


@pytest.mark.parametrize(
    "case",
    [case for case in vectors("interfaces", "names") if case["class"] == "UDPInterface"],
    ids=lambda c: c["case"],
)
def test_name_and_hash(case: Any) -> None:
    made = case["attributes"]
    port = UdpInterface(
        UdpConfig(common=CommonConfig(name=made["name"]), listen_ip=made["bind_ip"], listen_port=made["bind_port"])
    ).port
    assert (port.name, port.hash) == (case["str"], unhex(case["hash"]))


# -- live ---------------------------------------------------------------------------------------------------------

Start = Callable[..., UdpInterface]


@pytest.fixture
def start(runtime: FakeRuntime) -> Iterator[Start]:
    made: list[UdpInterface] = []

    def begin(settings: UdpConfig) -> UdpInterface:
        made.append(UdpInterface(settings))
        made[-1].start(runtime)
        return made[-1]

    yield begin
    for interface in made:
        interface.close()
    assert runtime.ports == {}
    assert runtime.pending_calls == []


@pytest.fixture
def far() -> Iterator[socket.socket]:
    """The other side: a plain socket."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        made.bind(("127.0.0.1", 0))
        made.settimeout(PATIENCE)
        yield made


def port_of(sock: socket.socket) -> int:
    return int(sock.getsockname()[1])


def send(interface: UdpInterface, *packets: bytes) -> bool:
    taken = interface.port.send_many(list(packets))
    interface.flush(interface.port)
    return taken


def test_a_datagram_is_a_packet_both_ways(runtime: FakeRuntime, start: Start, far: socket.socket) -> None:
    interface = start(config(port_of(far)))
    assert runtime.ports == {interface.port: interface}
    assert interface.ports == [interface.port]
    assert interface.port.online
    assert runtime.log == [f"attach {interface.port}", f"online {interface.port}"]
    send(interface, b"out" * 10)
    assert far.recvfrom(2000) == (b"out" * 10, interface.address)
    far.sendto(b"in" * 10, interface.address)
    runtime.run_until(lambda: runtime.received)
    assert runtime.received == [b"in" * 10]
    assert runtime.reports == []
    interface.close()
    assert runtime.detached == [interface.port]
    assert not interface.port.online
    interface.close()


@pytest.mark.parametrize("batch", [1, 2, None])
def test_what_is_flushed_together_arrives_whole_and_in_order(
    runtime: FakeRuntime, start: Start, far: socket.socket, batch: int | None
) -> None:
    receiver = start(config(port_of(far), batch=batch))
    sender = start(config(receiver.address[1]))
    sizes = itertools.cycle([500, 500, 500, 19, 1064, 1080, 20, 20])
    packets = [number.to_bytes(2, "big") + b"p" * (size - 2) for number, size in zip(range(80), sizes, strict=False)]
    send(sender, *packets)
    runtime.run_until(lambda: len(runtime.received) >= len(packets))
    assert runtime.received == packets
    assert sender.port.drops == receiver.port.drops == {}


def test_one_buffer_of_the_system_is_more_than_an_event_may_read(
    runtime: FakeRuntime, start: Start, far: socket.socket
) -> None:
    """60 joined datagrams, two a batch, four batches an event: the rest comes although nothing else arrives."""
    receiver = start(config(port_of(far), batch=2))
    sender = start(config(receiver.address[1]))
    packets = [bytes([number]) * 100 for number in range(60)]
    send(sender, *packets)
    runtime.run_until(lambda: len(runtime.received) >= len(packets))
    assert runtime.received == packets
    assert {len(batch) for _, batch in runtime.batches} == {2}


def test_what_is_too_large_for_the_interface_costs_itself(
    runtime: FakeRuntime, start: Start, far: socket.socket
) -> None:
    interface = start(config(port_of(far)))
    send(interface, b"a" * 100, b"b" * (LIMIT + 1), b"c" * LIMIT)
    assert [far.recv(2000) for _ in range(2)] == [b"a" * 100, b"c" * LIMIT]
    assert interface.port.drops == {Drop.TX_TOO_LARGE: 1}
    assert (interface.port.tx_packets, interface.port.tx_bytes) == (2, 100 + LIMIT)


def test_1080_bytes_are_accepted_and_1081_refused_and_counted(
    runtime: FakeRuntime, start: Start, far: socket.socket
) -> None:
    interface = start(config())
    far.sendto(b"l" * (LIMIT + 1), interface.address)
    runtime.run_until(lambda: interface.port.drops)
    assert interface.port.drops == {Drop.RX_REFUSED: 1}
    far.sendto(b"l" * LIMIT, interface.address)
    runtime.run_until(lambda: runtime.received)
    assert runtime.received == [b"l" * LIMIT]
    assert interface.port.drops == {Drop.RX_REFUSED: 1}
    assert interface.status()["connection"]["rx_refused"] == 1


def test_large_and_empty_datagrams_and_garbage_are_harmless(
    runtime: FakeRuntime, start: Start, far: socket.socket
) -> None:
    interface = start(config())
    bad = [b"", b"x" * 9000, b"y" * 65_000, b"x" * 2047, b"x" * 2049]
    garbage = [bytes([first]) * size for first in (0, 0x7E, 0xC0, 0xFF) for size in (1, 2, 18, 19, 500)]
    for datagram in bad + garbage:
        far.sendto(datagram, interface.address)
    runtime.run_until(lambda: len(runtime.received) >= len(garbage))
    assert runtime.received == garbage  # for the engine to judge
    assert interface.port.drops == {Drop.RX_REFUSED: len(bad)}
    assert interface.port.online


@pytest.mark.slow
def test_a_flood_of_tiny_datagrams_is_bounded_and_what_the_system_dropped_is_in_the_status(
    runtime: FakeRuntime, start: Start, far: socket.socket
) -> None:
    interface = start(config())
    count = 100_000
    for _ in range(count):
        far.sendto(b"t", interface.address)
    status = interface.status()
    lost = status["dropped_by_system"]
    if sys.platform == "linux":
        assert 0 < lost < count
        runtime.run_until(lambda: len(runtime.received) >= count - lost)
        assert len(runtime.received) == count - lost
        assert interface.status()["dropped_by_system"] == lost
    else:
        runtime.run_until(lambda: runtime.received)
    largest = status["connection"]["batch"]
    assert max(len(batch) for _, batch in runtime.batches) <= largest
    assert interface.port.drops == {}


def test_without_a_place_to_send_to_it_only_receives(runtime: FakeRuntime, start: Start, far: socket.socket) -> None:
    interface = start(config())
    assert interface.port.online
    assert not interface.port.outgoing
    assert not send(interface, b"nowhere")
    assert interface.port.drops == {Drop.TX_OFFLINE: 1}
    far.sendto(b"heard", interface.address)
    runtime.run_until(lambda: runtime.received)
    assert runtime.received == [b"heard"]
    assert interface.status()["forward"] is None


def test_any_sender_is_accepted(runtime: FakeRuntime, start: Start, far: socket.socket) -> None:
    interface = start(config(port_of(far)))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.sendto(b"stranger", interface.address)
    runtime.run_until(lambda: runtime.received)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_ipv6(runtime: FakeRuntime, start: Start) -> None:
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as far:
        far.bind(("::1", 0))
        far.settimeout(PATIENCE)
        interface = start(config(listen_ip="::1", forward_ip="::1", forward_port=port_of(far)))
        assert interface.port.name == "UDPInterface[x/[::1]:0]"
        send(interface, *(b"%d" % number * 100 for number in range(5)))
        assert [far.recv(2000)[:1] for _ in range(5)] == [b"0", b"1", b"2", b"3", b"4"]
        far.sendto(b"back", interface.address)
        runtime.run_until(lambda: runtime.received)


def test_no_segmentation_when_the_file_says_so(runtime: FakeRuntime, start: Start, far: socket.socket) -> None:
    for segmentation in (True, False):
        interface = start(config(port_of(far), segmentation=segmentation))
        io: Any = interface._connection._io  # type: ignore[union-attr]
        assert io.caps.run_tx == 1 or segmentation
        assert not getattr(io, "_gro", False) or segmentation
        send(interface, *(bytes([number]) * 300 for number in range(30)))
        assert [far.recv(2000)[0] for _ in range(30)] == list(range(30))


def test_the_batch_of_the_file_is_that_of_the_back_end(start: Start) -> None:
    assert start(config(batch=5)).status()["connection"]["batch"] == 5


def test_status(runtime: FakeRuntime, start: Start, far: socket.socket, variant: str) -> None:
    interface = UdpInterface(config(port_of(far)))
    assert interface.status()["state"] == "closed"
    interface = start(config(port_of(far)))
    runtime.advance(3.0)
    status = interface.status()
    assert (status["type"], status["name"], status["state"], status["state_for"]) == ("UDPInterface", "x", "up", 3.0)
    assert (status["listen"], status["forward"]) == ("127.0.0.1:0", f"127.0.0.1:{port_of(far)}")
    assert status["last_error"] == ""
    assert status["connection"]["backend"] == {"linux": "linux-mmsg"}.get(variant, variant)
    interface.close()
    assert interface.status()["state"] == "closed"


# -- failures -----------------------------------------------------------------------------------------------------


def refusal(runtime: FakeRuntime, settings: UdpConfig) -> InterfaceError:
    interface = UdpInterface(settings)
    with pytest.raises(InterfaceError) as failure:
        interface.start(runtime)
    assert runtime.ports == {}
    assert runtime.callbacks == {}
    interface.close()
    return failure.value


def test_a_port_in_use_is_said_and_may_be_tried_again(runtime: FakeRuntime, far: socket.socket) -> None:
    interface = UdpInterface(config(listen=port_of(far)))
    with pytest.raises(InterfaceError) as failure:
        interface.start(runtime)
    where = f"127.0.0.1:{port_of(far)}"
    assert str(failure.value) == f"UDPInterface[x]: {where} is in use by another program (EADDRINUSE)"
    assert failure.value.retryable
    far.close()
    interface.start(runtime)
    assert interface.port.online
    interface.close()


def test_an_address_of_another_machine(runtime: FakeRuntime) -> None:
    error = refusal(runtime, config(listen_ip="192.0.2.7"))
    assert str(error) == "UDPInterface[x]: 192.0.2.7:0 is not an address of this machine (EADDRNOTAVAIL)"
    assert error.retryable


def test_no_rights(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(socket.socket):
        def bind(self, address: Any) -> None:
            raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(udp_module.socket, "socket", Refused)
    error = refusal(runtime, config(listen=80))
    assert str(error) == "UDPInterface[x]: 127.0.0.1:80 needs rights this program does not have (EACCES)"
    assert not error.retryable


def test_a_listening_name_that_is_none(runtime: FakeRuntime) -> None:
    assert "cannot be" in str(refusal(runtime, config(listen_ip="no such name.invalid")))


def test_an_address_of_the_wrong_family_leaves_no_socket(runtime: FakeRuntime) -> None:
    error = refusal(runtime, config(listen_ip="127.0.0.1", forward_ip="::1", forward_port=1))
    assert "::1 cannot be reached from 127.0.0.1: one is IPv4, the other IPv6" in str(error)
    assert not error.retryable


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_a_zone_that_is_no_device(runtime: FakeRuntime) -> None:
    error = refusal(runtime, config(listen_ip="::", forward_ip="fe80::1%nosuch0", forward_port=1))
    assert "there is no network device nosuch0" in str(error)
    assert error.retryable


@pytest.mark.skipif(sys.platform != "linux", reason="addresses of devices are looked up on Linux")
def test_devices_that_are_missing_or_have_no_broadcast_address(runtime: FakeRuntime) -> None:
    error = refusal(runtime, config(listen_ip=None, device="nosuch0", listen=4242))
    assert str(error) == "UDPInterface[x]: there is no network device nosuch0"
    assert error.retryable
    error = refusal(runtime, config(listen_ip=None, device="lo", listen=4242))
    assert str(error) == "UDPInterface[x]: device lo: it has no IPv4 broadcast address"


def test_a_name_is_resolved_and_tried_again_until_it_is(runtime: FakeRuntime, start: Start, far: socket.socket) -> None:
    runtime.names["peer.example"] = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    interface = start(config(forward_ip="peer.example", forward_port=port_of(far)))
    assert interface.ports == [interface.port]
    for _ in range(3):
        runtime.make_due_calls()
        assert not interface.port.online
        assert runtime.pending_calls == [runtime.time + REOPEN_WAIT]
        runtime.advance(REOPEN_WAIT)
    assert runtime.reports == [
        "UDPInterface[x]: peer.example Name or service not known; trying again every 5 s",
    ]
    assert interface.status()["state"] == "waiting for the next try"
    runtime.names["peer.example"] = [
        (int(socket.AF_INET6), ("::1", port_of(far), 0, 0)),
        (int(socket.AF_INET), ("127.0.0.1", port_of(far))),
    ]
    runtime.make_due_calls()
    runtime.advance(REOPEN_WAIT)
    runtime.make_due_calls()
    assert interface.port.online
    assert interface.status()["last_error"] == ""
    send(interface, b"there")
    assert far.recv(100) == b"there"


def test_a_name_with_addresses_of_the_other_family_only(runtime: FakeRuntime, start: Start) -> None:
    runtime.names["peer.example"] = [(int(socket.AF_INET6), ("::1", 9, 0, 0))]
    interface = start(config(forward_ip="peer.example", forward_port=9))
    runtime.make_due_calls()
    assert not interface.port.online
    assert "has no address of the family that this interface listens on" in runtime.reports[0]


def test_closed_while_a_name_is_being_resolved(runtime: FakeRuntime) -> None:
    interface = UdpInterface(config(forward_ip="127.0.0.1.example", forward_port=9))
    runtime.names["127.0.0.1.example"] = [(int(socket.AF_INET), ("127.0.0.1", 9))]
    interface.start(runtime)
    interface.close()
    runtime.make_due_calls()
    assert not interface.port.online
    assert runtime.callbacks == {}
    assert runtime.detached == [interface.port]


def replace_by_nothing(interface: UdpInterface) -> None:
    """Make its descriptor one that is no socket."""
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), interface._sock.fileno())  # type: ignore[union-attr]


def test_a_broken_socket_is_opened_again(runtime: FakeRuntime, start: Start, far: socket.socket) -> None:
    interface = start(config(port_of(far)))
    port = interface.port
    for round_ in range(2):
        runtime.log.clear()
        replace_by_nothing(interface)
        send(interface, b"one", b"two")
        assert port.drops[Drop.TX_CONNECTION_LOST] == 2 * (round_ + 1)
        runtime.run_until(lambda: not port.online)
        assert interface.status()["state"] == "waiting for the next try"
        assert len(runtime.reports) == round_ + 1
        assert runtime.reports[-1].endswith("(ENOTSOCK); trying again every 5 s")
        assert not send(interface, b"offline")
        runtime.advance(REOPEN_WAIT)
        assert port.online
        assert runtime.log == [f"offline {port}", f"online {port}"]
        send(interface, b"again")
        assert far.recv(100) == b"again"
        far.sendto(b"back", interface.address)
        runtime.run_until(lambda: runtime.received)
        runtime.received.clear()
    assert runtime.ports == {port: interface}
    assert interface.status()["last_error"] == ""


def test_a_socket_that_cannot_be_opened_again_is_tried_every_5_s(
    runtime: FakeRuntime, start: Start, far: socket.socket
) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        listen = port_of(probe)
    interface = start(config(port_of(far), listen=listen))
    replace_by_nothing(interface)
    send(interface, b"x")
    runtime.run_until(lambda: not interface.port.online)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", listen))
        for _ in range(3):
            runtime.advance(REOPEN_WAIT)
            assert not interface.port.online
        assert "is in use by another program" in interface.status()["last_error"]
    assert len(runtime.reports) == 1
    runtime.advance(REOPEN_WAIT)
    assert interface.port.online


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="descriptors are counted in /proc")
def test_close_during_traffic_leaves_no_descriptor(runtime: FakeRuntime, start: Start, far: socket.socket) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        interface = start(config(port_of(far)))
        to = interface.address
        going = threading.Event()

        def send_on(interface: UdpInterface = interface, going: threading.Event = going) -> None:
            for number in itertools.count():
                with runtime.lock:
                    interface.port.send_many([b"out" * 100] * 5)
                interface.flush(interface.port)
                if number == 3:
                    going.set()
                if not interface.port.online:
                    return

        sender = threading.Thread(target=send_on)
        sender.start()
        for _ in range(200):
            far.sendto(b"in" * 50, to)
        assert going.wait(PATIENCE)
        runtime.handle_ready()
        interface.close()
        sender.join(PATIENCE)
        assert not sender.is_alive()
        assert len(os.listdir("/proc/self/fd")) == before
    assert runtime.callbacks == {}
