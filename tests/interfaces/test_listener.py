"""The listening end: a port for every connection, and no way to make it spin, grow or fall over."""

from __future__ import annotations

import errno
import os
import random
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from rnsfast.errors import InterfaceError
from rnsfast.interfaces.backbone import BackboneConfig, BackboneInterface, FlappingGuard, FlappingRules
from rnsfast.interfaces.common import CommonConfig
from rnsfast.interfaces.framing import HDLC
from rnsfast.interfaces.listener import PAUSE, StreamListener
from rnsfast.interfaces.tcp import TcpServerConfig, TcpServerInterface
from rnsfast.wire.drop import Drop
from tests.fakes import PATIENCE, FakeRuntime
from tests.vectors_support import Case, vectors


def config(host: str = "127.0.0.1", port: int = 0, **more: Any) -> TcpServerConfig:
    return TcpServerConfig(common=CommonConfig(name="s"), listen_ip=host, listen_port=port, **more)


@pytest.fixture
def server(runtime: FakeRuntime) -> Iterator[TcpServerInterface]:
    made = TcpServerInterface(config())
    made.start(runtime)
    yield made
    made.close()


def connect(listener: StreamListener) -> socket.socket:
    return socket.create_connection(listener.address[:2], PATIENCE)


def test_each_connection_is_a_port_attached_before_it_is_read_and_detached_at_its_end(
    runtime: FakeRuntime, server: TcpServerInterface
) -> None:
    assert server.ports == []
    with connect(server) as one, connect(server) as two:
        one.sendall(HDLC.encode(b"1" * 30))  # there before the connection is accepted
        runtime.run_until(lambda: len(server.ports) == 2 and runtime.received)
        first, _ = server.ports
        assert first.name == "TCPInterface[Client on s/127.0.0.1:%d]" % one.getsockname()[1]  # noqa: UP031
        assert first.online
        assert not first.wants_tunnel
        assert set(runtime.ports) == set(server.ports)
        for port in server.ports:
            port.send(port.name.encode())
            server.flush(port)
        for sock, port in zip((one, two), server.ports, strict=True):
            assert sock.recv(200) == HDLC.encode(port.name.encode())
        one.close()
        runtime.run_until(lambda: len(server.ports) == 1)
        assert runtime.detached == [first]
        assert not first.online
        server.flush(first)  # late, and harmless
    runtime.run_until(lambda: not server.ports)
    assert runtime.ports == {}
    assert runtime.reports == []


def test_close_ends_everything_and_frees_the_port(runtime: FakeRuntime, server: TcpServerInterface) -> None:
    address = server.address
    with connect(server) as client:
        runtime.run_until(lambda: server.ports)
        server.ports[0].send(b"bye" * 10)
        server.close()
        server.close()
        assert client.recv(100) == HDLC.encode(b"bye" * 10)
        assert client.recv(100) == b""
    assert runtime.ports == {}
    assert runtime.callbacks == {}
    again = TcpServerInterface(config(port=address[1]))
    again.start(runtime)
    again.close()


def test_names_of_listeners_and_their_connections() -> None:
    four = TcpServerInterface(config("0.0.0.0", 4242))
    assert four.display == "TCPServerInterface[s/0.0.0.0:4242]"
    assert TcpServerInterface(config("::", 35681)).display == "TCPServerInterface[s/[::]:35681]"
    backbone = BackboneInterface(BackboneConfig(common=CommonConfig(name="b"), listen_ip="10.0.0.1", listen_port=1))
    assert backbone.display == "BackboneInterface[b/10.0.0.1:1]"


# -- refusals -----------------------------------------------------------------------------------------------------


def test_port_in_use_is_one_sentence_and_may_be_tried_again(runtime: FakeRuntime) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        listener = TcpServerInterface(config(port=port))
        with pytest.raises(InterfaceError) as failure:
            listener.start(runtime)
        expected = f"TCPServerInterface[s]: 127.0.0.1:{port} is in use by another program (EADDRINUSE)"
        assert str(failure.value) == expected
        assert failure.value.retryable
        assert runtime.callbacks == {}
    listener.start(runtime)  # the obstacle is gone
    with connect(listener):
        runtime.run_until(lambda: listener.ports)
    listener.close()


@pytest.mark.parametrize(
    ("host", "port", "words"),
    [
        ("192.0.2.77", 4242, "192.0.2.77:4242 is not an address of this machine (EADDRNOTAVAIL)"),
        ("no-such-host.invalid", 4242, "no-such-host.invalid:4242 cannot be resolved"),
    ],
)
def test_wrong_addresses_are_one_sentence_each(runtime: FakeRuntime, host: str, port: int, words: str) -> None:
    with pytest.raises(InterfaceError) as failure:
        TcpServerInterface(config(host, port)).start(runtime)
    assert words in str(failure.value)
    assert failure.value.retryable
    assert "\n" not in str(failure.value)


@pytest.mark.skipif(not os.path.exists("/sys/class/net/lo"), reason="needs Linux device names")
def test_device_decides_the_address(runtime: FakeRuntime) -> None:
    listener = TcpServerInterface(config(device="lo"))
    listener.start(runtime)
    assert listener.address[0] == "127.0.0.1"
    assert listener.display == "TCPServerInterface[s/127.0.0.1:0]"
    listener.close()
    with pytest.raises(InterfaceError, match="there is no network device nosuch0") as failure:
        TcpServerInterface(config(device="nosuch0")).start(runtime)
    assert failure.value.retryable


def test_ipv6_wildcard_takes_ipv4_too(runtime: FakeRuntime) -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("no IPv6 here")
    listener = TcpServerInterface(config("::"))
    listener.start(runtime)
    with socket.create_connection(("127.0.0.1", listener.address[1]), PATIENCE):
        runtime.run_until(lambda: listener.ports)
        assert "[::ffff:127.0.0.1]:" in listener.ports[0].name
    listener.close()


# -- accepting ----------------------------------------------------------------------------------------------------


class Exhausted(TcpServerInterface):
    """Out of descriptors for a while."""

    def __init__(self, code: int, times: int) -> None:
        super().__init__(config())
        self.code, self.times, self.asked = code, times, 0

    def accept(self, listener: socket.socket) -> tuple[socket.socket, Any]:
        self.asked += 1
        if self.times > 0:
            self.times -= 1
            raise OSError(self.code, os.strerror(self.code))
        return super().accept(listener)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS])
def test_out_of_descriptors_pauses_instead_of_spinning(runtime: FakeRuntime, code: int) -> None:
    listener = Exhausted(code, times=3)
    listener.start(runtime)
    with connect(listener):
        runtime.run_until(lambda: listener.asked)
        for paused in range(1, 4):
            assert listener.asked == paused
            assert runtime.handle_ready(0) == 0  # nothing is reported although the connection still waits
            runtime.advance(PAUSE)
            runtime.run_until(lambda paused=paused: listener.asked > paused)
        runtime.run_until(lambda: listener.ports)
    assert len(runtime.reports) == 1
    assert errno.errorcode[code] in runtime.reports[0]
    listener.close()
    assert runtime.pending_calls == []


def test_close_while_paused(runtime: FakeRuntime) -> None:
    listener = Exhausted(errno.EMFILE, times=100)
    listener.start(runtime)
    with connect(listener):
        runtime.run_until(lambda: listener.asked)
        listener.close()
        runtime.advance(10)
    assert runtime.pending_calls == []


def test_connection_that_ended_before_it_was_accepted_is_skipped(runtime: FakeRuntime) -> None:
    listener = Exhausted(errno.ECONNABORTED, times=1)
    listener.start(runtime)
    with connect(listener):
        runtime.run_until(lambda: listener.ports)
    assert runtime.reports == []
    listener.close()


def test_a_thousand_connections_with_garbage_leave_nothing(runtime: FakeRuntime, server: TcpServerInterface) -> None:
    rng = random.Random(11)
    for _ in range(100):
        clients = [connect(server) for _ in range(10)]
        for number, client in enumerate(clients):
            client.sendall((b"", b"~", rng.randbytes(500), b"~half a frame", b"~" * 1000)[number % 5])
        runtime.run_until(lambda: len(server.ports) == 10)
        for number, client in enumerate(clients):
            if number % 3 == 0:  # a reset instead of an end
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            client.close()
        runtime.run_until(lambda: not server.ports)
    assert server.accepted == 1000
    assert runtime.ports == {}
    assert runtime.pending_calls == []


def test_a_silent_reader_does_not_hold_up_the_others(runtime: FakeRuntime, server: TcpServerInterface) -> None:
    with connect(server) as silent, connect(server) as healthy:
        runtime.run_until(lambda: len(server.ports) == 2)
        stuck, fine = server.ports
        assert str(silent.getsockname()[1]) in stuck.name
        got = bytearray()
        for _ in range(900):
            for port in (stuck, fine):
                port.send_many([b"x" * 10_000] * 2)
                server.flush(port)
            got += healthy.recv(1 << 20)
        while len(got) < 900 * 2 * 10_002:
            got += healthy.recv(1 << 20)
            runtime.handle_ready(0)
        assert stuck.congested
        assert stuck.drops[Drop.TX_QUEUE_FULL] > 0
        assert not fine.drops
        runtime.advance(12)
        assert server.ports == [fine]
        assert runtime.detached == [stuck]


# -- fast flapping ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", vectors("interfaces", "fast_flapping"), ids=lambda case: case["case"])
def test_fast_flapping_counts_as_the_reference_counts(case: Case) -> None:
    options = case["options"]
    guard = FlappingGuard(
        FlappingRules(
            enabled=options["block_fast_flapping"],
            threshold=options["fast_flap_threshold"],
            grace=options["fast_flap_grace"],
            block_time=options["fast_flap_expiry"],
        )
    )
    for row in case["log"]:
        if row["closed_after_s"] is not None:
            guard.ended(row["ip"], row["closed_after_s"], row["t"])
        assert guard.admits(row["ip"], row["t"]) is not row["blocked"]
        assert guard.blocked == row["blocked_count"]


def test_flapping_table_is_bounded() -> None:
    guard = FlappingGuard(FlappingRules())
    for number in range(10_000):
        guard.ended(f"2001:db8::{number:x}", 1.0, float(number))
    assert len(guard._counts) == 4096
    assert "2001:db8::270f" in guard._counts


def test_seventh_short_connection_gets_an_immediate_end(runtime: FakeRuntime) -> None:
    listener = BackboneInterface(BackboneConfig(common=CommonConfig(name="b"), listen_ip="127.0.0.1", listen_port=0))
    listener.start(runtime)
    for _ in range(6):
        with connect(listener):
            runtime.run_until(lambda: listener.ports)
            assert listener.ports[0].name.startswith("BackboneInterface[Client on b/127.0.0.1:")
            assert listener.ports[0].hw_mtu == 32768
        runtime.run_until(lambda: not listener.ports)
    with connect(listener) as seventh:
        runtime.run_until(lambda: listener.refused)
        assert seventh.recv(10) == b""
    assert listener.ports == []
    runtime.time += 43_201
    with connect(listener):
        runtime.run_until(lambda: listener.ports)
    listener.close()
