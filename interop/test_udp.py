"""Broadcast: three of our nodes and a stock peer on one bridge, each in a network namespace of its own.

Everybody hears everything, itself too. Our nodes stay in the test process: a socket belongs to the namespace that the
thread was in when it made it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from interop.harness import Section, StockPeer, workspace
from interop.ours import LIMIT, OUR_NAME, ROLES, Duo, Role, Task, drain, join, pour
from interop.seeded import random_bytes
from rnsfast import Identity, Link, Node, StreamReader

PORT = 4242
NETWORK = "192.0.2"
CLONE_NEWNET = 0x40000000


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=LIMIT)


@contextmanager
def inside(space: str) -> Iterator[None]:
    """This thread, and threads it starts meanwhile, are in that namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as home, open(f"/run/netns/{space}") as there:
        assert libc.setns(there.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        try:
            yield
        finally:
            assert libc.setns(home.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())


@pytest.fixture(scope="module")
def bridge() -> Iterator[list[str]]:
    """Four namespaces; in each a device `lan` with the address .1 to .4, all on one bridge."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need Linux, the rights of root, and the program ip")
    hub, *spaces = (f"rnsfast-{os.getpid()}-{name}" for name in ("hub", "a", "b", "c", "stock"))
    made: list[str] = []
    try:
        try:
            for space in (hub, *spaces):
                ip("netns", "add", space)
                made.append(space)
            ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"namespaces and bridges cannot be made here: {error.stderr.strip()}")
        ip("-n", hub, "link", "set", "bridge", "up")
        for number, space in enumerate(spaces, 1):
            ip("link", "add", f"port{number}", "netns", hub, "type", "veth", "peer", "name", "lan", "netns", space)
            ip("-n", hub, "link", "set", f"port{number}", "master", "bridge", "up")
            ip("-n", space, "address", "add", f"{NETWORK}.{number}/24", "broadcast", f"{NETWORK}.255", "dev", "lan")
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "link", "set", "lan", "up")
        yield spaces
    finally:
        for space in made:
            ip("netns", "delete", space)


def broadcast(**options: object) -> Section:
    """By default a stock interface holds announces back that come faster than three a second."""
    base = {"type": "UDPInterface", "enabled": True, "listen_ip": "0.0.0.0", "forward_ip": f"{NETWORK}.255"}
    return Section("LAN", {**base, "port": PORT, "ingress_control": False, **options})


BY_DEVICE = Section("LAN", {"type": "UDPInterface", "enabled": True, "device": "lan", "port": PORT})
SECTIONS = {"addresses": broadcast(), "one by one": broadcast(batch=1), "device": BY_DEVICE}


class Ear:
    """The announces a node was told of."""

    def __init__(self, node: Node) -> None:
        self.changed = threading.Condition()
        self.heard: list[bytes] = []
        node.on_announce(self._hear)

    def _hear(self, event: Any) -> None:
        with self.changed:
            self.heard.append(event.destination)
            self.changed.notify_all()

    def wait(self, destination: bytes) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: destination in self.heard, LIMIT), "the announce was not heard"


class Party:
    def __init__(self, nodes: list[Node], peer: StockPeer, space: Any) -> None:
        self.nodes, self.peer, self.space = nodes, peer, space
        self.ears = [Ear(node) for node in nodes]

    def duo(self, number: int) -> Duo:
        return Duo(self.space, self.nodes[number], self.peer)


@pytest.fixture(scope="module")
def party(bridge: list[str]) -> Iterator[Party]:
    with workspace() as space, ExitStack() as stack:
        nodes: list[Node] = []
        for (name, section), where in zip(SECTIONS.items(), bridge, strict=False):
            with inside(where):
                nodes.append(stack.enter_context(Node(space.config(name, [section]), strict=True)))
        peer = StockPeer(space.config("stock", [broadcast()]))
        peer.command = ["ip", "netns", "exec", bridge[3], *peer.command]
        made = Party(nodes, stack.enter_context(peer), space)
        for number in range(len(nodes)):
            made.duo(number).meet()
        yield made


def test_an_announce_is_heard_by_all_but_by_who_sent_it(party: Party) -> None:
    inboxes = [node.register(Identity(), "interop", "everybody") for node in party.nodes]
    for inbox in inboxes:
        assert inbox.announce()
        party.peer.expect("announce", dest=inbox.hash.hex())
        for node, ear in zip(party.nodes, party.ears, strict=True):
            if node is not party.nodes[inboxes.index(inbox)]:
                ear.wait(inbox.hash)
    theirs = bytes.fromhex(party.peer.request("destination", name="interop.theirs", announce=True)["dest"])
    for ear in party.ears:
        ear.wait(theirs)  # and what the node heard of itself came before
    for inbox, ear, node in zip(inboxes, party.ears, party.nodes, strict=True):
        assert inbox.hash not in ear.heard
        assert not node.has_path(inbox.hash)
        assert all(node.hops_to(other.hash) == 1 for other in inboxes if other is not inbox)
        assert not [name for name in node.status()["ports"][0]["drops"] if name.startswith(("violation", "malformed"))]
        inbox.close()


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("number", range(len(SECTIONS)), ids=list(SECTIONS))
def test_a_link_with_the_stock_peer_carries_a_stream_each_way(party: Party, number: int, role: Role) -> None:
    """A link for each way: a stock node takes its own channel messages, heard again, for those of its peer."""
    pair = party.duo(number)
    content = random_bytes(f"broadcast {number}", 40_000)
    joint = join(pair, role, stock={"readers": [1]})
    with joint.link:
        assert joint.link.mtu == 500
        pour(joint.link.open_writer(1), content)
        arrived = joint.stock("received", stream=1)
        assert (arrived["size"], arrived["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())
    readers: list[StreamReader] = []
    joint = join(pair, role, ours=lambda link: readers.append(link.open_reader(2)))
    with joint.link:
        written = joint.stock_begin("write", stream=2, size=40_000, seed="back")
        assert drain(readers[0]) == (40_000, written()["sha256"])


@pytest.mark.parametrize("role", ROLES)
def test_packets_of_a_link_go_both_ways(party: Party, role: Role) -> None:
    arrived: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    joint = join(party.duo(0), role, ours=lambda link: link.on_packet(arrived.put))
    with joint.link:
        for number in range(10):
            joint.link.send(b"from us %d" % number)
            assert joint.expect("link_packet")["data"] == (b"from us %d" % number).hex()
            joint.stock("link_send", data=(b"to us %d" % number).hex())
            assert arrived.get(timeout=LIMIT) == b"to us %d" % number
        assert arrived.empty()


@pytest.mark.parametrize(("asks", "answers"), [(0, 1), (1, 2), (2, 0)])
def test_a_link_between_two_of_ours(party: Party, asks: int, answers: int) -> None:
    arrived: queue.SimpleQueue[Link] = queue.SimpleQueue()
    inbox = party.nodes[answers].register(Identity(), *OUR_NAME)
    inbox.on_link(arrived.put)
    node = party.nodes[asks]
    node.request_path(inbox.hash, LIMIT)
    content = random_bytes("ours", 100_000)
    expected = (len(content), hashlib.sha256(content).hexdigest())
    with node.connect(inbox.hash, *OUR_NAME, timeout=LIMIT) as link, arrived.get(timeout=LIMIT) as other:
        received = [Task(drain, end.open_reader(1)) for end in (link, other)]  # both ways at once
        sent = [Task(pour, end.open_writer(1), content) for end in (link, other)]
        for task in sent:
            task.result()
        assert [task.result() for task in received] == [expected, expected]
    inbox.close()
