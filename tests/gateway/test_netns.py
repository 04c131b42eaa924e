"""A tunnel between two machines: network namespaces, real devices, a process at each end, TCP over a cable between."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from ipaddress import ip_interface, ip_network
from pathlib import Path

import pytest

from rnsfast.cli.exits import Exit
from rnsfast.gateway.device import TunnelDevice
from rnsfast.osio.device import open_tun
from tests.cli.support import Running, free_port, section, write_config
from tests.gateway.support import checksum
from tests.loopback import Worker
from tests.namespaces import Namespace, join, namespace, need_devices

PATIENCE = 60.0  # real seconds
MB = 1_000_000


class Machine:
    """A namespace, a configuration in it, and its end of the tunnel."""

    def __init__(self, space: Namespace, config: str, address: str) -> None:
        self.space, self.config, self.address = space, config, address
        self.process: Running | None = None
        made = subprocess.run(
            [*Running.COMMAND, "tun", "id", "--config", config], capture_output=True, text=True, check=True, timeout=60
        )
        self.hash = made.stdout.strip()

    def start(self, stack: contextlib.ExitStack, peer: str, *arguments: str) -> Running:
        class Inside(Running):
            COMMAND = (*self.space.command(), *Running.COMMAND)  # type: ignore[assignment]

        process = Inside(
            "tun", "up", "--config", self.config, "--peer", peer, "--address", f"{self.address}/24", "--device", "rf0",
            *arguments,
        )  # fmt: skip
        self.process = process
        stack.callback(process.end)
        assert process.line().startswith(f"{self.hash} on rf0: {self.address}/24")
        return process

    def line(self, begins: str) -> str:
        assert self.process is not None
        return self.process.line(contains=begins)

    def socket(self, family: int, kind: int, protocol: int = 0) -> socket.socket:
        """A socket of this machine."""
        with self.space.inside():
            made = socket.socket(family, kind, protocol)
        made.settimeout(PATIENCE)
        return made

    def end(self) -> str:
        """Stop it in good order; its summary."""
        assert self.process is not None
        self.process.signal(signal.SIGINT)
        assert self.process.wait() == 0, self.process.err
        return self.process.out[-1]


class Site:
    def __init__(self, stack: contextlib.ExitStack, a: Machine, b: Machine) -> None:
        self.stack, self.a, self.b = stack, a, b

    def up(self, *arguments: str) -> None:
        """The tunnel, both ends agreed."""
        self.a.start(self.stack, self.b.hash, *arguments)
        self.b.start(self.stack, self.a.hash, *arguments)
        self.a.line("up: ")
        self.b.line("up: ")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    need_devices()
    port = free_port()
    door = section("Door", "TCPServerInterface", listen_ip="192.168.77.1", listen_port=port)
    line = section("Line", "TCPClientInterface", target_host="192.168.77.1", target_port=port)
    with contextlib.ExitStack() as stack:
        left, right = stack.enter_context(namespace(ipv6=True)), stack.enter_context(namespace(ipv6=True))
        join(left, right, "192.168.77.1/24", "192.168.77.2/24")
        a = Machine(left, write_config(tmp_path / "a", door), "10.77.0.1")
        b = Machine(right, write_config(tmp_path / "b", line), "10.77.0.2")
        yield Site(stack, a, b)


def ping(machine: Machine, address: str, size: int = 56) -> bytes:
    """One echo request; the data that came back."""
    with machine.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as raw:
        raw.connect((address, 0))
        body = struct.pack("!HH", os.getpid() & 0xFFFF, 1) + os.urandom(size)
        head = checksum(b"\x08\x00\x00\x00" + body)
        raw.send(b"\x08\x00" + head.to_bytes(2, "big") + body)
        while True:
            answer = raw.recv(70_000)[20:]
            if answer[0] == 0 and answer[4:8] == body[:4]:
                assert answer[4:] == body
                return answer[8:]


class Transfer:
    """A TCP connection through the tunnel, and what went in against what came out."""

    def __init__(self, sender: Machine, receiver: Machine, size: int, *, halfway: int = 0) -> None:
        self.size = size
        self.halfway = threading.Event()
        self._mark = halfway
        with receiver.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.bind((receiver.address, 0))
            listener.listen(1)
            self._out = sender.socket(socket.AF_INET, socket.SOCK_STREAM)
            self._out.connect(listener.getsockname())
            self._in, _ = listener.accept()
        self._in.settimeout(PATIENCE)
        self._workers = Worker(self._send), Worker(self._receive)

    def _send(self) -> str:
        digest, left = hashlib.sha256(), self.size
        with self._out:
            while left:
                chunk = os.urandom(min(left, 256 << 10))
                digest.update(chunk)
                self._out.sendall(chunk)
                left -= len(chunk)
        return digest.hexdigest()

    def _receive(self) -> str:
        digest, got = hashlib.sha256(), 0
        with self._in:
            while chunk := self._in.recv(256 << 10):
                digest.update(chunk)
                got += len(chunk)
                if got >= self._mark:
                    self.halfway.set()
        assert got == self.size
        return digest.hexdigest()

    def check(self) -> None:
        for worker in self._workers:
            worker.thread.join(PATIENCE)
        assert self._workers[0].result() == self._workers[1].result()


@pytest.mark.slow
def test_echo_and_tcp_cross_the_tunnel(site: Site) -> None:
    site.up()
    assert len(ping(site.a, "10.77.0.2")) == 56
    assert len(ping(site.b, "10.77.0.1", 16_000)) == 16_000
    assert len(ping(site.a, "10.77.0.2", 40_000)) == 40_000  # the kernel cuts it for the device
    Transfer(site.a, site.b, 8 * MB).check()
    Transfer(site.b, site.a, 8 * MB).check()
    assert "mtu 16303" in site.a.space.ip("link", "show", "rf0")
    summary = site.a.end()
    assert summary.startswith("sent ") and "in.source" not in summary and "too_big" not in summary
    site.b.line("retrying: the peer was shut down")
    site.b.end()


@pytest.mark.slow
def test_a_hundred_megabytes_arrive_as_they_were(site: Site) -> None:
    site.up()
    Transfer(site.a, site.b, 100 * MB).check()


@pytest.mark.slow
def test_a_connection_survives_an_outage_of_the_carrier(site: Site) -> None:
    """The cable is out until both ends have given the link up, which takes ten seconds of traffic without an answer."""
    site.up()
    transfer = Transfer(site.a, site.b, 40 * MB, halfway=4 * MB)
    assert transfer.halfway.wait(PATIENCE)
    site.b.space.ip("link", "set", "wire", "down")
    site.a.line("retrying: ")
    site.b.space.ip("link", "set", "wire", "up")
    site.a.line("up: ")
    transfer.check()
    assert len(ping(site.b, "10.77.0.1")) == 56
    assert "link.silent" in site.a.end()


@pytest.mark.slow
def test_a_carrier_that_reconnects_brings_the_tunnel_back(site: Site) -> None:
    if shutil.which("ss") is None:
        pytest.skip("the command ss is not installed")
    site.up()
    transfer = Transfer(site.a, site.b, 20 * MB, halfway=2 * MB)
    assert transfer.halfway.wait(PATIENCE)
    kill = site.a.space.command("ss", "-KH", "dst", "192.168.77.2")  # every connection of the carrier ends at once
    if not subprocess.run(kill, check=True, capture_output=True, timeout=PATIENCE).stdout:
        pytest.skip("this kernel ends no connections for ss")
    site.a.line("up: ")
    transfer.check()


@pytest.mark.slow
def test_a_device_that_is_removed_is_the_end_with_a_sentence(site: Site) -> None:
    site.up()
    site.a.space.ip("link", "del", "rf0")
    assert site.a.process is not None
    assert site.a.process.wait() == Exit.DEVICE
    assert site.a.process.err[-1].startswith("rnsfast: the device rf0 is gone")
    site.b.line("retrying: the peer was shut down")


@pytest.mark.slow
def test_a_peer_that_is_not_allowed_stays_outside(site: Site) -> None:
    site.a.start(site.stack, "00" * 16)
    site.b.start(site.stack, site.a.hash)
    site.b.line(f"retrying: {site.a.hash} closed the link: it may not allow this end")
    assert "link.not_allowed" in site.a.end()
    assert site.a.process is not None
    assert any(f"link from {site.b.hash} refused" in line for line in site.a.process.err)


@pytest.mark.slow
def test_networks_behind_the_peer_and_ipv6(site: Site) -> None:
    site.a.space.ip("addr", "add", "10.88.0.1/24", "dev", "lo")
    site.a.start(site.stack, site.b.hash, "--address", "fd77::1/64")
    site.b.start(site.stack, site.a.hash, "--address", "fd77::2/64", "--route", "10.88.0.0/24")
    site.a.line("up: ")
    site.b.line("up: ")
    assert len(ping(site.b, "10.88.0.1")) == 56
    with (
        site.a.socket(socket.AF_INET6, socket.SOCK_DGRAM) as inbox,
        site.b.socket(socket.AF_INET6, socket.SOCK_DGRAM) as out,
    ):
        inbox.bind(("fd77::1", 0))
        out.sendto(b"hello", inbox.getsockname())
        assert inbox.recv(100) == b"hello"


def test_ipv6_comes_back_with_the_size_of_packets() -> None:
    need_devices()
    with namespace(ipv6=True) as space:
        with space.inside():
            device = TunnelDevice(
                open_tun("rf0"),
                [ip_interface("10.77.0.1/24"), ip_interface("fd77::1/64")],
                [ip_network("fd88::/48"), ip_network("10.88.0.0/16")],
                None,
            )
        try:
            device.set_mtu(431)
            assert "10.77.0.1" in space.ip("addr", "show", "rf0") and "fd77::1" not in space.ip("addr", "show", "rf0")
            device.set_mtu(16303)
            assert "fd77::1/64" in space.ip("addr", "show", "rf0")
            assert "fd88::/48 dev rf0" in space.ip("-6", "route", "show")
            assert "10.88.0.0/16 dev rf0" in space.ip("route", "show")
        finally:
            device.close()
