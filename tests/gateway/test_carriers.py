"""A tunnel over carriers other than a TCP connection, and through a node that forwards for others: real devices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.support import Running, free_port, section, write_config
from tests.gateway.test_netns import MB, Machine, Site, Transfer, ping
from tests.namespaces import Namespace, join, namespace, need_devices

LEFT, RIGHT = "192.168.77.1", "192.168.77.2"
FAR_LEFT, FAR_RIGHT = "192.168.78.1", "192.168.78.2"  # the second cable, where there is one


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    need_devices()
    with contextlib.ExitStack() as made:
        yield made


def spaces(stack: contextlib.ExitStack, count: int) -> list[Namespace]:
    return [stack.enter_context(namespace()) for _ in range(count)]


def two_machines(stack: contextlib.ExitStack, tmp_path: Path, left_section: str, right_section: str) -> Site:
    """Each with its section, a cable between them."""
    left, right = spaces(stack, 2)
    join(left, right, f"{LEFT}/24", f"{RIGHT}/24")
    a = Machine(left, write_config(tmp_path / "a", left_section), "10.77.0.1")
    b = Machine(right, write_config(tmp_path / "b", right_section), "10.77.0.2")
    return Site(stack, a, b)


def check(site: Site, mtu: int) -> None:
    """Echoes up to what needs fragments, and five megabytes each way."""
    site.up()
    assert f"mtu {mtu}" in site.a.space.ip("link", "show", "rf0")
    assert len(ping(site.a, "10.77.0.2")) == 56
    assert len(ping(site.b, "10.77.0.1", mtu - 28)) == mtu - 28
    assert len(ping(site.a, "10.77.0.2", 2 * mtu)) == 2 * mtu
    Transfer(site.a, site.b, 5 * MB).check()
    Transfer(site.b, site.a, 5 * MB).check()
    summary = site.a.end()
    assert "in." not in summary and "out.too_big" not in summary
    site.b.line("retrying: the peer was shut down")
    site.b.end()


def udp(here: str, there: str, port: int) -> str:
    return section("Datagrams", "UDPInterface", listen_ip=here, listen_port=port, forward_ip=there, forward_port=port)


@pytest.mark.slow
def test_over_datagrams(stack: contextlib.ExitStack, tmp_path: Path) -> None:
    port = free_port()
    check(two_machines(stack, tmp_path, udp(LEFT, RIGHT, port), udp(RIGHT, LEFT, port)), 431)


@pytest.mark.slow
def test_over_a_backbone(stack: contextlib.ExitStack, tmp_path: Path) -> None:
    port = free_port()
    door = section("Door", "BackboneInterface", listen_on=LEFT, port=port)
    line = section("Line", "BackboneInterface", remote=LEFT, target_port=port)
    check(two_machines(stack, tmp_path, door, line), 32687)


class Relay:
    """Three machines in a row: ends that know only the one between them, which forwards for others."""

    def __init__(self, stack: contextlib.ExitStack, tmp_path: Path) -> None:
        left, middle, right = spaces(stack, 3)
        join(left, middle, f"{LEFT}/24", f"{RIGHT}/24")
        middle.ip("link", "set", "wire", "down")
        middle.ip("link", "set", "wire", "name", "wire0")
        middle.ip("link", "set", "wire0", "up")
        join(middle, right, f"{FAR_LEFT}/24", f"{FAR_RIGHT}/24")
        self.middle, self.stack, port = middle, stack, free_port()
        self.config = write_config(
            tmp_path / "relay",
            section("Near", "TCPServerInterface", listen_ip=RIGHT, listen_port=port),
            section("Far", "TCPServerInterface", listen_ip=FAR_LEFT, listen_port=port),
        )
        file = Path(self.config, "config")
        file.write_text(file.read_text().replace("[reticulum]", "[reticulum]\nenable_transport = yes"))
        near = section("Line", "TCPClientInterface", target_host=RIGHT, target_port=port)
        far = section("Line", "TCPClientInterface", target_host=FAR_LEFT, target_port=port)
        a = Machine(left, write_config(tmp_path / "a", near), "10.77.0.1")
        b = Machine(right, write_config(tmp_path / "b", far), "10.77.0.2")
        self.site = Site(stack, a, b)

    def start(self) -> Running:
        class Inside(Running):
            COMMAND = (*self.middle.command(), *Running.COMMAND)  # type: ignore[assignment]

        process = Inside("node", "--config", self.config)
        self.stack.callback(process.end)
        process.line("running")
        return process


@pytest.mark.slow
def test_through_a_relay(stack: contextlib.ExitStack, tmp_path: Path) -> None:
    relay = Relay(stack, tmp_path)
    relay.start()
    check(relay.site, 16303)


@pytest.mark.slow
def test_a_relay_that_begins_anew_brings_the_tunnel_back(stack: contextlib.ExitStack, tmp_path: Path) -> None:
    relay = Relay(stack, tmp_path)
    process = relay.start()
    site = relay.site
    site.up()
    transfer = Transfer(site.a, site.b, 5 * MB, halfway=1)
    assert transfer.halfway.wait(60)
    process.end()
    site.a.line("retrying: the link is closed: the interface")
    relay.start()
    site.a.line("up: ")
    transfer.check()
