"""Carrier mode across a routed network: our nodes behind TUN devices, and a stock UDPInterface on an ordinary socket.

Two machines, as network namespaces joined by a cable, each routing to the host behind the other's device. Our nodes
stay in the test process: what a thread opens belongs to the namespace that the thread was in.

    node 10.77.0.2 - rf0 - machine a 192.0.2.1 --- 192.0.2.2 machine b - rf0 - node 10.78.0.2
                                                   stock node
"""

from __future__ import annotations

import hashlib
import queue
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from interop.harness import Section, StockPeer, workspace
from interop.ours import LIMIT, OUR_NAME, ROLES, Duo, Role, Task, drain, pour
from interop.ours import join as join_link
from interop.seeded import random_bytes
from rnsfast import AnnounceHeard, Identity, Link, Node
from tests.namespaces import Namespace, join, namespace, need_devices

pytestmark = pytest.mark.xdist_group("tun carrier")

PORT = 4242
#: For each family: the cable's ends, the networks behind the devices, kernels and nodes in them.
CABLE = {4: ("192.0.2.1/24", "192.0.2.2/24"), 6: ("fd00:2::1/64", "fd00:2::2/64")}
NETWORKS = {4: ("10.77.0.0/24", "10.78.0.0/24"), 6: ("fd77::/64", "fd78::/64")}
KERNELS = {4: ("10.77.0.1/24", "10.78.0.1/24"), 6: ("fd77::1/64", "fd78::1/64")}
NODES = {4: ("10.77.0.2", "10.78.0.2"), 6: ("fd77::2", "fd78::2")}


def carrier(version: int, side: int, *others: str, **options: object) -> Section:
    base = {
        "type": "TUNInterface",
        "enabled": True,
        "device": "rf0",
        "address": NODES[version][side],
        "host_address": KERNELS[version][side],
        "peers": ", ".join((NODES[version][1 - side], *others)),
        "ingress_control": False,
    }
    return Section("overlay", {**base, **options})


def route(version: int, a: Namespace, b: Namespace) -> None:
    """Each machine forwards, and knows the way to what is behind the other."""
    for side, space in enumerate((a, b)):
        space.set("ipv4/ip_forward" if version == 4 else "ipv6/conf/all/forwarding", "1")
        there = CABLE[version][1 - side].partition("/")[0]
        space.ip(f"-{version}", "route", "add", NETWORKS[version][1 - side], "via", there)


class Party:
    def __init__(self, version: int, nodes: list[Node], peer: StockPeer | None, space: Any) -> None:
        self.version, self.nodes, self.peer, self.space = version, nodes, peer, space

    def duo(self) -> Duo:
        """Node a and the stock peer."""
        if self.peer is None:
            pytest.skip("a stock UDPInterface has no IPv6")
        return Duo(self.space, self.nodes[0], self.peer)


@pytest.fixture(scope="module", params=[4, 6], ids=["IPv4", "IPv6"])
def party(request: pytest.FixtureRequest) -> Iterator[Party]:
    need_devices()
    version: int = request.param
    with workspace() as space, ExitStack() as stack:
        machines = [stack.enter_context(namespace(ipv6=version == 6)) for _ in range(2)]
        with ExitStack() as ready:
            if version == 6:
                for side, machine in enumerate(machines):
                    ready.enter_context(machine.taking(CABLE[6][side].partition("/")[0]))
            join(*machines, *CABLE[version])
        route(version, *machines)
        stock_address = CABLE[4][1].partition("/")[0]
        nodes: list[Node] = []
        for side, machine in enumerate(machines):
            others = [stock_address] if version == 4 and side == 0 else []
            section = carrier(version, side, *others, batch=(16, 128)[side])
            with ExitStack() as ready:
                if version == 6:
                    ready.enter_context(machine.taking(KERNELS[6][side].partition("/")[0]))
                ready.enter_context(machine.inside())
                nodes.append(stack.enter_context(Node(space.config(f"node{side}", [section]), strict=True)))
        peer = None
        if version == 4:
            section = Section(
                "UDP",
                {
                    "type": "UDPInterface",
                    "enabled": True,
                    "listen_ip": stock_address,
                    "listen_port": PORT,
                    "forward_ip": NODES[4][0],
                    "forward_port": PORT,
                    "ingress_control": False,
                },
            )
            peer = StockPeer(space.config("stock", [section]))
            peer.command = machines[1].command(*peer.command)
            stack.enter_context(peer)
        made = Party(version, nodes, peer, space)
        if peer is not None:
            made.duo().meet()
        yield made


@pytest.mark.parametrize("side", [0, 1])
def test_announces_of_our_nodes_are_heard(party: Party, side: int) -> None:
    heard: queue.SimpleQueue[AnnounceHeard] = queue.SimpleQueue()
    party.nodes[1 - side].on_announce(heard.put)
    inbox = party.nodes[side].register(Identity(), *OUR_NAME)
    assert inbox.announce(b"over the overlay")
    while (event := heard.get(timeout=LIMIT)).destination != inbox.hash:
        pass
    assert (event.app_data, event.hops) == (b"over the overlay", 1)
    inbox.close()


@pytest.mark.parametrize("asks", [0, 1])
def test_a_link_between_our_nodes_carries_streams_both_ways(party: Party, asks: int) -> None:
    arrived: queue.SimpleQueue[Link] = queue.SimpleQueue()
    inbox = party.nodes[1 - asks].register(Identity(), *OUR_NAME)
    inbox.on_link(arrived.put)
    node = party.nodes[asks]
    node.request_path(inbox.hash, LIMIT)
    content = random_bytes("carrier", 200_000)
    expected = (len(content), hashlib.sha256(content).hexdigest())
    with node.connect(inbox.hash, *OUR_NAME, timeout=LIMIT) as link, arrived.get(timeout=LIMIT) as other:
        assert link.mtu == 500
        received = [Task(drain, end.open_reader(1)) for end in (link, other)]
        sent = [Task(pour, end.open_writer(1), content) for end in (link, other)]
        for task in sent:
            task.result()
        assert [task.result() for task in received] == [expected, expected]
    inbox.close()


def test_a_stock_node_and_ours_hear_each_other(party: Party) -> None:
    pair = party.duo()
    inbox = pair.node.register(Identity(), *OUR_NAME)
    assert inbox.announce(b"ours")
    assert pair.peer.expect("announce", dest=inbox.hash.hex())["app_data"] == b"ours".hex()
    heard: queue.SimpleQueue[AnnounceHeard] = queue.SimpleQueue()
    pair.node.on_announce(heard.put)
    theirs = bytes.fromhex(pair.peer.request("destination", name="interop.theirs", announce=True)["dest"])
    while heard.get(timeout=LIMIT).destination != theirs:
        pass
    inbox.close()


@pytest.mark.parametrize("role", ROLES)
def test_a_link_with_a_stock_node_carries_a_stream_each_way(party: Party, role: Role) -> None:
    pair = party.duo()
    content = random_bytes("stock", 60_000)
    readers: list[Any] = []
    joint = join_link(pair, role, stock={"readers": [1]}, ours=lambda link: readers.append(link.open_reader(2)))
    with joint.link:
        assert joint.link.mtu == 500
        pour(joint.link.open_writer(1), content)
        arrived = joint.stock("received", stream=1)
        assert (arrived["size"], arrived["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())
        written = joint.stock_begin("write", stream=2, size=60_000, seed="back")
        assert drain(readers[0]) == (60_000, written()["sha256"])


def test_nothing_was_lost_on_the_way(party: Party) -> None:
    """Last in this file: what all of the above has left in the counters."""
    for side, node in enumerate(party.nodes):
        status = node.status()
        (port,) = status["ports"]
        unexpected = {name: n for name, n in port["drops"].items() if name.startswith(("ip.", "icmp.", "tx.", "rx."))}
        unexpected.pop("ip.other_address", None)  # what a kernel says by itself over IPv6
        assert not unexpected
        (interface,) = status["interfaces"]
        assert interface["state"] == "up"
        connection = interface["connection"]
        assert (connection["backend"], connection["batch"]) in (
            ("linux-tun", (16, 128)[side]),
            ("portable", (16, 128)[side]),
        )
        assert connection["tx_calls"] <= port["tx_packets"]
