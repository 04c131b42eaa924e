"""The connecting end: every wait is a deadline in virtual time, every socket a real one on the loopback."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from rnsfast.interfaces.backbone import BackboneClientConfig, BackboneClientInterface
from rnsfast.interfaces.client import RECONNECT_WAIT, State, StreamClient
from rnsfast.interfaces.common import CommonConfig
from rnsfast.interfaces.framing import HDLC, KISS
from rnsfast.interfaces.stream import STALL_TIME
from rnsfast.interfaces.tcp import TcpClientConfig, TcpClientInterface
from rnsfast.wire.drop import Drop
from tests.fakes import PATIENCE, FakeRuntime

WAIT = RECONNECT_WAIT + 1.0  # with the longest jitter


def config(port: int, host: str = "127.0.0.1", **more: Any) -> TcpClientConfig:
    return TcpClientConfig(common=CommonConfig(name="x"), target_host=host, target_port=port, **more)


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        made.settimeout(PATIENCE)
        yield made


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as made:
        return int(made.getsockname()[1])


def port_of(server: socket.socket) -> int:
    return int(server.getsockname()[1])


def online(client: StreamClient) -> bool:
    return client.state is State.ONLINE


def waiting(client: StreamClient) -> bool:
    return client.state is State.WAITING


def connected(runtime: FakeRuntime, client: StreamClient, server: socket.socket) -> socket.socket:
    runtime.run_until(lambda: online(client))
    accepted, _ = server.accept()
    accepted.settimeout(PATIENCE)
    return accepted


def test_connects_goes_online_and_carries_packets_both_ways(runtime: FakeRuntime, server: socket.socket) -> None:
    client = TcpClientInterface(config(port_of(server)))
    client.start(runtime)
    assert runtime.ports == {client.port: client}
    assert not client.port.online
    with connected(runtime, client, server) as peer:
        assert client.port.online
        assert client.port.wants_tunnel
        assert runtime.reports == []
        client.port.send(b"o" * 40)
        client.flush(client.port)
        assert peer.recv(100) == HDLC.encode(b"o" * 40)
        peer.sendall(HDLC.encode(b"i" * 40))
        runtime.run_until(lambda: runtime.received)
        assert runtime.received == [b"i" * 40]
        client.close()
        assert peer.recv(10) == b""
    assert runtime.detached == [client.port]
    assert runtime.pending_calls == []
    client.close()


def test_what_online_causes_is_the_first_thing_on_the_wire(runtime: FakeRuntime, server: socket.socket) -> None:
    """The tunnel packet: the engine queues it when it is told, before anything is read."""
    client = TcpClientInterface(config(port_of(server)))

    def tunnel(port: Any) -> None:
        if port.online:
            port.send(b"tunnel" * 10)
            client.flush(port)

    runtime.on_changed = tunnel
    client.start(runtime)
    with connected(runtime, client, server) as peer:
        assert peer.recv(100) == HDLC.encode(b"tunnel" * 10)
        client.close()


def test_kiss_wants_no_tunnel_and_frames_differently(runtime: FakeRuntime, server: socket.socket) -> None:
    client = TcpClientInterface(config(port_of(server), kiss_framing=True))
    client.start(runtime)
    assert not client.port.wants_tunnel
    with connected(runtime, client, server) as peer:
        client.port.send(b"\xc0" * 10)
        client.flush(client.port)
        assert peer.recv(100) == KISS.encode(b"\xc0" * 10)
        client.close()


def test_socket_options_notice_dead_paths(runtime: FakeRuntime, server: socket.socket) -> None:
    for i2p, expected in ((False, (24_000, 5, 2, 12)), (True, (45_000, 10, 9, 5))):
        client = TcpClientInterface(config(port_of(server), i2p_tunneled=i2p))
        client.start(runtime)
        with connected(runtime, client, server):
            assert client._connection is not None
            sock = client._connection._io._sock  # type: ignore[attr-defined]
            names = ("TCP_USER_TIMEOUT", "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
            if all(hasattr(socket, name) for name in names):
                found = tuple(sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names)
                assert found == expected
                assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            client.close()


def test_refused_is_reported_once_and_tried_again_every_5_s(runtime: FakeRuntime) -> None:
    client = TcpClientInterface(config(unused_port()))
    client.start(runtime)
    began = runtime.time
    for attempt in range(8):
        runtime.run_until(lambda: waiting(client))
        assert len(runtime.pending_calls) == 1
        assert RECONNECT_WAIT <= runtime.pending_calls[0] - runtime.time <= WAIT
        runtime.advance(WAIT)
        assert attempt < 7 or runtime.time - began == 8 * WAIT
    assert len(runtime.reports) == 1
    assert runtime.reports[0].startswith("TCPClientInterface[x]: 127.0.0.1:")
    assert "ECONNREFUSED" in runtime.reports[0]
    assert "next try in 5 s" in runtime.reports[0]
    assert [line for line in runtime.log if "online" in line] == []
    client.close()
    assert runtime.pending_calls == []


def test_same_port_across_reconnects_and_back_within_6_s(runtime: FakeRuntime, server: socket.socket) -> None:
    client = TcpClientInterface(config(port_of(server)))
    client.start(runtime)
    for round_ in range(3):
        peer = connected(runtime, client, server)
        assert client.connects == round_ + 1
        peer.close()
        runtime.run_until(lambda: waiting(client))
        assert not client.port.online
        runtime.advance(RECONNECT_WAIT - 0.01)
        assert client.state is State.WAITING
        runtime.advance(1.01)
    connected(runtime, client, server).close()
    assert list(runtime.ports) == [client.port]
    assert runtime.detached == []
    assert [line.split()[0] for line in runtime.log] == ["attach", *["online", "offline"] * 3, "online"]
    client.close()


def test_a_connection_that_comes_and_goes_is_not_reported_again_and_again(
    runtime: FakeRuntime, server: socket.socket
) -> None:
    client = TcpClientInterface(config(port_of(server)))
    client.start(runtime)
    for _ in range(20):
        connected(runtime, client, server).close()
        runtime.run_until(lambda: waiting(client))
        runtime.advance(WAIT)
    assert 2 <= len(runtime.reports) <= 6  # two minutes: two lines a minute
    client.close()


def test_partial_frame_of_a_dead_connection_does_not_leak_into_the_next(
    runtime: FakeRuntime, server: socket.socket
) -> None:
    client = TcpClientInterface(config(port_of(server)))
    client.start(runtime)
    with connected(runtime, client, server) as peer:
        peer.sendall(b"~half a frame of an old connection")
    runtime.run_until(lambda: waiting(client))
    runtime.advance(WAIT)
    with connected(runtime, client, server) as peer:
        peer.sendall(b"other half of something~" + HDLC.encode(b"new" * 10))
        runtime.run_until(lambda: runtime.received)
        assert runtime.received == [b"new" * 10]
        client.close()


def test_every_resolved_address_is_tried(runtime: FakeRuntime, server: socket.socket) -> None:
    closed = ("127.0.0.1", unused_port())
    runtime.names["host.example"] = [
        (socket.AF_INET, closed),
        (socket.AF_INET6, ("::1", closed[1])),
        (socket.AF_INET, server.getsockname()),
    ]
    client = TcpClientInterface(config(4242, "host.example"))
    assert client.port.name == "TCPInterface[x/host.example:4242]"
    client.start(runtime)
    with connected(runtime, client, server):
        client.close()


@pytest.mark.parametrize(("prefer", "first"), [(False, socket.AF_INET), (True, socket.AF_INET6)])
def test_backbone_prefers_a_family(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, prefer: bool, first: int
) -> None:
    port = unused_port()
    runtime.names["host.example"] = [
        (socket.AF_INET6, ("::1", port)),
        (socket.AF_INET, ("127.0.0.1", port)),
        (socket.AF_INET6, ("::1", port)),
    ]
    families: list[int] = []
    real = socket.socket

    def noting(family: int = -1, *rest: Any, **more: Any) -> socket.socket:
        families.append(family)
        return real(family, *rest, **more)

    monkeypatch.setattr("rnsfast.interfaces.client.socket.socket", noting)
    client = BackboneClientInterface(
        BackboneClientConfig(
            common=CommonConfig(name="b"), target_host="host.example", target_port=port, prefer_ipv6=prefer
        )
    )
    client.start(runtime)
    runtime.run_until(lambda: waiting(client))
    assert families[0] == first
    assert len(families) == 3
    client.close()


def test_no_answer_is_a_deadline_for_each_address(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(socket.socket):
        """Never gets an answer, as if a firewall swallowed everything."""

        def connect_ex(self, address: Any) -> int:
            return errno.EINPROGRESS

    monkeypatch.setattr("rnsfast.interfaces.client.socket.socket", Silent)
    runtime.names["a"] = [(socket.AF_INET, ("192.0.2.1", 1)), (socket.AF_INET, ("192.0.2.2", 1))]
    client = TcpClientInterface(config(1, "a"))
    client.start(runtime)
    runtime.make_due_calls()
    assert client.state is State.CONNECTING
    runtime.handle_ready(0)  # a hang-up event of an unconnected socket means nothing
    assert client.state is State.CONNECTING
    runtime.advance(4.9)
    assert client.state is State.CONNECTING
    runtime.advance(5.0)
    assert client.state is State.CONNECTING  # the second address
    runtime.advance(0.2)
    assert client.state is State.WAITING
    assert "no answer within 5 s" in runtime.reports[0]
    assert runtime.callbacks == {}
    client.close()


def test_resolver_failure_is_tried_again(runtime: FakeRuntime, server: socket.socket) -> None:
    runtime.names["nowhere.example"] = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    client = TcpClientInterface(config(1, "nowhere.example"))
    client.start(runtime)
    runtime.make_due_calls()
    assert client.state is State.WAITING
    assert "Name or service not known" in runtime.reports[0]
    runtime.names["nowhere.example"] = [(socket.AF_INET, server.getsockname())]
    runtime.advance(WAIT)
    with connected(runtime, client, server):
        assert runtime.reports[-1] == "TCPClientInterface[x]: connected to nowhere.example:1"
        client.close()


@pytest.mark.parametrize("tries", [0, 1, 3])
def test_stays_offline_when_the_tries_are_used_up(runtime: FakeRuntime, tries: int) -> None:
    client = TcpClientInterface(config(unused_port(), max_reconnect_tries=tries))
    client.start(runtime)
    for _ in range(tries):
        runtime.run_until(lambda: waiting(client))
        runtime.advance(WAIT)
    runtime.run_until(lambda: client.state is State.GIVEN_UP)
    runtime.advance(1000)
    assert client.state is State.GIVEN_UP
    assert not client.port.online
    assert f"given up after {tries} tries" in runtime.reports[-1]
    assert client.port in runtime.ports
    client.close()


def test_a_success_gives_all_tries_back(runtime: FakeRuntime, server: socket.socket) -> None:
    client = TcpClientInterface(config(port_of(server), max_reconnect_tries=1))
    client.start(runtime)
    for _ in range(4):
        connected(runtime, client, server).close()
        runtime.run_until(lambda: waiting(client))
        runtime.advance(WAIT)
    connected(runtime, client, server).close()
    client.close()


def test_peer_that_never_reads_is_left_after_12_s_and_met_again_later_each_time(
    runtime: FakeRuntime, server: socket.socket
) -> None:
    client = TcpClientInterface(config(port_of(server)))
    client.start(runtime)
    waits = []
    for _ in range(6):
        with connected(runtime, client, server):
            while client._connection is not None and not client._connection.waiting:
                client.port.send_many([b"x" * 16_000] * 100)
                client.flush(client.port)
            runtime.advance(STALL_TIME)
            assert client.state is State.WAITING
            assert not client.port.online
            assert not client.port.congested
            waits.append(runtime.pending_calls[0] - runtime.time)
            runtime.advance(waits[-1])
    for wait, least in zip(waits, (5, 10, 20, 40, 60, 60), strict=True):
        assert least <= wait <= least + 1
    assert client.port.outgoing
    with connected(runtime, client, server) as peer:  # and after all that it announces again
        client.port.send(b"again" * 10)
        client.flush(client.port)
        assert peer.recv(100) == HDLC.encode(b"again" * 10)
        client.close()


def test_a_socket_connected_to_itself_counts_as_refused(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    free = unused_port()

    class Bound(socket.socket):
        """Gets by design the source port that the system may choose by chance."""

        def connect_ex(self, address: Any) -> int:
            self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.bind(address)
            return super().connect_ex(address)

    monkeypatch.setattr("rnsfast.interfaces.client.socket.socket", Bound)
    client = TcpClientInterface(config(free))
    client.start(runtime)
    runtime.run_until(lambda: waiting(client))
    assert client.connects == 0
    assert "ECONNREFUSED" in runtime.reports[0]
    client.close()


def test_packets_for_an_offline_port_are_counted_not_kept(runtime: FakeRuntime) -> None:
    client = TcpClientInterface(config(unused_port()))
    client.start(runtime)
    client.port.queue.append(b"x" * 40)  # put there an instant before it went offline
    client.flush(client.port)
    assert client.port.queue == []
    assert client.port.drops[Drop.TX_OFFLINE] == 1
    client.close()


def test_close_at_every_stage_leaves_nothing_behind(runtime: FakeRuntime, server: socket.socket) -> None:
    def fresh(port: int) -> TcpClientInterface:
        client = TcpClientInterface(config(port))
        client.start(runtime)
        return client

    unstarted = TcpClientInterface(config(1))
    unstarted.close()
    resolving = fresh(port_of(server))
    assert resolving.state is State.RESOLVING
    resolving.close()
    runtime.make_due_calls()  # the resolver answers a closed interface
    assert resolving.state is State.CLOSED
    connecting = fresh(port_of(server))
    runtime.make_due_calls()
    assert connecting.state is State.CONNECTING
    connecting.close()
    waits = fresh(unused_port())
    runtime.run_until(lambda: waiting(waits))
    waits.close()
    assert runtime.callbacks == {}
    assert runtime.pending_calls == []
    assert runtime.ports == {}
    assert len(runtime.detached) == 3


def test_status_names_target_state_and_reason(runtime: FakeRuntime, server: socket.socket) -> None:
    client = TcpClientInterface(config(port_of(server)))
    assert client.status()["state"] == "not started"
    client.start(runtime)
    peer = connected(runtime, client, server)
    runtime.advance(7)
    status = client.status()
    assert (status["state"], status["state_for"], status["connects"]) == ("online", 7.0, 1)
    assert status["target"] == f"127.0.0.1:{port_of(server)}"
    assert status["connection"]["backend"].startswith("stream-")
    peer.close()
    runtime.run_until(lambda: waiting(client))
    assert client.status()["last_error"] == "closed by the other side"
    runtime.advance(WAIT)
    with connected(runtime, client, server):
        assert client.status()["last_error"] == "closed by the other side", "why the last one ended"
    client.close()
