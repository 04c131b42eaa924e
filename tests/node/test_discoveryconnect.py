"""Which discovered interfaces a node connects to by itself, when it gives up, and what bootstrap interfaces do."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rnsfast import Node
from rnsfast.interfaces.backbone import BackboneConfig, BackboneInterface
from rnsfast.interfaces.common import CommonConfig
from rnsfast.node.discoveryconnect import DOWN_PATIENCE, NEXT_TRY, Connector, is_elsewhere, qualifies
from rnsfast.wire.discovery import BACKBONE, Offer, endpoint_hash
from rnsfast.wire.discoveryrecord import Record, build_record
from tests.loopback import PATIENCE
from tests.node.errands import FakeWork

OFFER = Offer(
    kind=BACKBONE, transport=True, transport_id=bytes(16), name="n", reachable_on="h.example", port=4242,
    implementation="RNS", version="1.5.7",
)  # fmt: skip


def record(name: str, at: float = 0.0, **offer: Any) -> Record:
    fields = {"name": name, "reachable_on": f"{name}.example", **offer}
    return Record(
        offer=replace(OFFER, **fields), stamp=bytes(32), value=16, network_id=bytes(16), hops=1,
        received=at, discovered=at, last_heard=at,
    )  # fmt: skip


class FakeInterface:
    kind = "BackboneClientInterface"

    def __init__(self, name: str) -> None:
        self.name, self.online = name, False


class FakeNode:
    """A node whose interfaces are up when a test says so."""

    def __init__(self, *known: str) -> None:
        self.work = FakeWork()
        self.known = [record(name) for name in known]
        self.made: list[Any] = []
        self.closed: list[str] = []
        self.boots: list[Any] = [FakeInterface("boot")]
        self.opened = 0
        self.configured: set[bytes] = set()

    def candidates(self) -> Sequence[Record]:
        return self.known

    def endpoints(self) -> Collection[bytes]:
        return self.configured

    def connect(self, found: Record) -> Any:
        self.made.append(FakeInterface(found.name))
        return self.made[-1]

    def disconnect(self, interface: Any) -> None:
        self.closed.append(interface.name)
        if interface in self.boots:
            self.boots.remove(interface)
        else:
            self.made.remove(interface)

    def is_online(self, interface: Any) -> bool:
        return bool(interface.online)

    def bootstrap(self) -> list[Any]:
        return list(self.boots)

    def open_bootstrap(self) -> None:
        self.opened += 1
        self.boots.append(FakeInterface("boot"))

    @property
    def names(self) -> list[str]:
        return [interface.name for interface in self.made]

    def connector(self, limit: int, **options: Any) -> Connector:
        connector = Connector(self.work, self, limit, choose=lambda found: found[0], **options)
        connector.start()
        self.work.advance(0.0)
        return connector


def test_at_start_the_most_promising_are_taken_up_to_the_limit() -> None:
    node = FakeNode("a", "b", "c")
    node.connector(2)
    assert node.names == ["a", "b"]


def test_what_is_down_for_long_is_given_up_and_others_are_tried() -> None:
    node = FakeNode("a", "b")
    node.connector(1)
    assert node.names == ["a"]
    node.work.advance(DOWN_PATIENCE - 0.1)
    assert node.names == ["a"] and not node.closed
    node.work.advance(0.2)
    assert node.closed == ["a"] and len(node.names) == 1
    node.made[0].online = True
    node.work.advance(1000.0)
    assert len(node.names) == 1 and not node.work.planned  # it is content, and sleeps


def test_an_outage_counts_from_when_it_began() -> None:
    node = FakeNode("a")
    connector = node.connector(1)
    node.made[0].online = True
    connector.wake()
    node.work.advance(500.0)
    node.known.clear()
    node.made[0].online = False
    connector.wake()
    node.work.advance(DOWN_PATIENCE - 1)
    assert "a" not in node.closed
    node.work.advance(1.1)
    assert "a" in node.closed


def test_a_newly_discovered_one_is_taken_at_once_if_there_is_room() -> None:
    node = FakeNode()
    connector = node.connector(4)
    for name in "abcde":
        found = record(name)
        node.known.append(found)
        connector.discovered(found)
        connector.discovered(found)
        node.work.advance(0.0)
    assert node.names == ["a", "b", "c", "d"]


def test_the_last_quarter_is_not_filled_by_trying() -> None:
    node = FakeNode()
    connector = node.connector(4)
    node.known = [record(name) for name in "abcdef"]
    connector.wake()
    for _ in range(8):
        for interface in node.made:
            interface.online = True
        node.work.advance(NEXT_TRY)
    assert len(node.names) == 3 and not node.work.planned


def test_nothing_is_planned_without_anybody_to_connect_to() -> None:
    node = FakeNode()
    node.connector(3)
    assert not node.work.planned


def test_what_the_node_connects_to_already_is_left_alone() -> None:
    node = FakeNode("a", "b")
    node.configured.add(endpoint_hash("a.example", 4242))
    node.connector(2)
    assert node.names == ["b"]


def test_bootstrap_interfaces_go_when_there_are_enough_and_come_back_when_there_are_none() -> None:
    node = FakeNode("a")
    connector = node.connector(1)
    assert not node.closed and not node.opened
    node.made[0].online = True
    connector.wake()
    node.work.advance(0.0)
    assert node.closed == ["boot"] and not node.boots
    node.known.clear()
    node.made[0].online = False
    connector.wake()
    node.work.advance(DOWN_PATIENCE + 0.1)
    assert node.opened == 1 and len(node.boots) == 1


def test_one_that_cannot_be_made_does_not_stop_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    node = FakeNode("a", "b")
    make = node.connect

    def connect(found: Record) -> Any:
        if found.name == "a":
            raise OSError("no")
        return make(found)

    monkeypatch.setattr(node, "connect", connect)
    node.connector(2)
    assert node.names == ["b"]


@pytest.mark.parametrize(
    ("fields", "unverified", "verdict"),
    [
        ({}, False, True),
        ({"version": "1.5.2"}, False, True),
        ({"version": "1.5.1"}, False, False),
        ({"version": "1.6"}, False, True),
        ({"version": "2"}, False, True),
        ({"version": "later"}, False, False),
        ({"version": None}, False, False),
        ({"implementation": "rnsfast", "version": "9"}, False, False),
        ({"implementation": "rnsfast", "version": "9"}, True, True),
        ({"implementation": None}, True, True),
        ({"transport": False}, True, False),
        ({"kind": "TCPServerInterface"}, True, False),
        ({"reachable_on": "127.0.0.1"}, True, False),
        ({"reachable_on": "0.0.0.0"}, True, False),
        ({"reachable_on": "200:1234::1"}, True, False),
        ({"reachable_on": "x.onion"}, True, False),
        ({"reachable_on": "192.168.1.4"}, True, True),
    ],
)
def test_who_may_be_connected_to(fields: dict[str, Any], unverified: bool, verdict: bool) -> None:
    assert qualifies(replace(OFFER, **fields), unverified=unverified) is verdict


@pytest.mark.parametrize(
    "host",
    [
        *("127.9.9.9", "::1", "::", "::ffff:127.0.0.1", "localhost", "Localhost.", "a.localhost"),
        *("x.ONION.", "3ff::1", "224.0.0.1", "169.254.1.1", "fe80::1"),
    ],
)
def test_this_machine_and_other_networks_are_not_elsewhere(host: str) -> None:
    assert not is_elsewhere(host)


# ------------------------------------------------------------------ in a node, over sockets


def test_a_node_connects_to_a_discovered_listener_and_gives_up_its_bootstrap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rnsfast.node.discoveryconnect.is_elsewhere", lambda host: True)
    listener = BackboneInterface(BackboneConfig(common=CommonConfig(name="l"), listen_ip="127.0.0.1", listen_port=0))
    other = Node.from_interfaces([listener]).start()
    with other:
        port = listener.address[1]
        found = record("other", time.time(), reachable_on="127.0.0.1", port=port)
        directory = tmp_path / "storage" / "discovery" / "interfaces"
        directory.mkdir(parents=True)
        (directory / found.hash.hex()).write_bytes(build_record(found))
        (tmp_path / "config").write_text(
            "[reticulum]\nshare_instance = no\ndiscover_interfaces = yes\nautoconnect_discovered_interfaces = 1\n"
            "[interfaces]\n[[boot]]\ntype = TCPServerInterface\nenabled = yes\nlisten_ip = 127.0.0.1\n"
            "listen_port = 1024\nbootstrap_only = yes\n".replace("1024", str(free_port()))
        )
        with Node(tmp_path) as node:
            up: queue.SimpleQueue[str] = queue.SimpleQueue()
            node.on_interface_up(up.put)
            assert up.get(timeout=PATIENCE) == f"BackboneInterface[other/127.0.0.1:{port}]"
            management = node._management
            assert management is not None and management.discovery.connector is not None
            settle_errands(management.discovery.connector)
            assert [interface.name for interface in node.interfaces] == ["other"]
            (connected,) = node.interfaces
            assert connected.ports[0].bitrate == 5_000_000 and connected.ports[0].mode == 1


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def settle_errands(connector: Connector) -> None:
    """Return when the connector has looked at what is up now."""
    connector.wake()
    done = threading.Event()
    connector._work.run(done.set)
    assert done.wait(PATIENCE)
