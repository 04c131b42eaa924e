"""Programs behind a shared instance, theirs behind ours and ours behind theirs.  Protocol 02, section 12; 07, 5.

The sockets of a shared instance and its RPC are not part of the product yet. Here TCP interfaces stand in for the
packet socket, whose frames are the same, and a few lines for the RPC, whose answers a stock program waits for.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Listener
from typing import Any

import msgpack
import pytest

from interop.harness import StockPeer, Workspace, free_port, tcp_client, tcp_server, workspace
from interop.ours import LIMIT, drain, pour
from interop.seeded import digest, random_bytes
from rnsfast import Identity, Link, Node
from rnsfast.engine.engine import Engine
from rnsfast.engine.port import Local
from rnsfast.interfaces import common

NAME = "interop.shared"
KEY = bytes(range(32))
CONTENT = random_bytes("shared", 200_000)


class Rpc:
    """Answers what a stock program asks its instance in the middle of packet handling."""

    def __init__(self, port: int) -> None:
        self._listener = Listener(("127.0.0.1", port), family="AF_INET", authkey=KEY)
        self._closed = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._closed:
            try:
                connection = self._listener.accept()
            except (OSError, EOFError, AuthenticationError):
                continue  # who leaves at once, or has another key
            with connection, suppress(EOFError, OSError):
                asked = msgpack.unpackb(connection.recv_bytes())
                connection.send_bytes(msgpack.packb(self._answer(asked)))

    @staticmethod
    def _answer(asked: dict[str, Any]) -> Any:
        answers = {"first_hop_timeout": 6, "is_blackholed": False, "interface_stats": {"interfaces": []}}
        return True if "destination_data" in asked else answers.get(asked.get("get", ""))

    def close(self) -> None:
        self._closed = True
        socket.create_connection(self._listener.address).close()  # wakes who accepts
        self._thread.join(LIMIT)
        self._listener.close()
        assert not self._thread.is_alive()


def local_ports(monkeypatch: pytest.MonkeyPatch, module: str, word: str, local: Local) -> None:
    """Have interfaces with this word in their name lead to a program of this machine."""

    def make_port(display: str, *rest: Any) -> Any:
        port = common.make_port(display, *rest)
        if word in display:
            port.local, port.hop, port.hw_mtu, port.bitrate = local, 0, 262_144, 1_000_000_000
        return port

    monkeypatch.setattr(f"rnsfast.interfaces.{module}.make_port", make_port)


def arrivals(node: Node) -> tuple[Any, queue.SimpleQueue[bytes], queue.SimpleQueue[Link]]:
    """A destination of ours, its packets and its links."""
    inbox = node.register(Identity(), *NAME.split("."))
    packets: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    links: queue.SimpleQueue[Link] = queue.SimpleQueue()
    inbox.set_proofs("all")
    inbox.on_packet(packets.put)
    inbox.on_link(links.put)
    return inbox, packets, links


@contextmanager
def our_house(
    space: Workspace, monkeypatch: pytest.MonkeyPatch, *, transport: bool
) -> Iterator[tuple[Node, list[StockPeer], StockPeer]]:
    """Our instance, two stock programs behind it, and a stock node in the network."""
    network, local, control = free_port(), free_port(), free_port()
    local_ports(monkeypatch, "listener", "Client on local/", Local.CLIENT)
    monkeypatch.setattr("rnsfast.node.node.Engine", partial(Engine, shared_instance=True))
    sections = [tcp_server(network, "network", ingress_control="no"), tcp_server(local, "local", ingress_control="no")]
    shared = {
        "share_instance": True,
        "shared_instance_type": "tcp",
        "shared_instance_port": local,
        "instance_control_port": control,
        "rpc_key": KEY.hex(),
    }
    with ExitStack() as stack:
        rpc = Rpc(control)
        stack.callback(rpc.close)
        node = stack.enter_context(Node(space.config("instance", sections, transport=transport), strict=True))
        programs = [stack.enter_context(StockPeer(space.config(name, [], **shared))) for name in ("one", "two")]
        far = stack.enter_context(StockPeer(space.config("far", [tcp_client(network, ingress_control="no")])))
        yield node, programs, far


@pytest.mark.slow
@pytest.mark.parametrize("transport", [True, False], ids=["transport", "plain"])
def test_stock_programs_behind_our_instance(monkeypatch: pytest.MonkeyPatch, transport: bool) -> None:
    with workspace() as space, our_house(space, monkeypatch, transport=transport) as (node, programs, far):
        one, two = programs
        peers = {"one": one, "two": two, "far": far}
        inbox, packets, links = arrivals(node)
        ours = inbox.hash.hex()
        options = {"name": NAME, "proof": "all", "on_link": {"resources": True}}
        places = {name: peer.request("destination", **options)["dest"] for name, peer in peers.items()}
        for name in ("one", "two"):  # introduced and not announced: who asks finds them
            assert found(far, places[name]) == 1
        assert found(one, places["far"]) == 1 and found(one, places["two"]) == 0 and found(two, ours) == 0
        assert found(two, places["far"]) == 1 and found(one, ours) == 0
        ways = [("far", "one"), ("one", "far"), ("one", "two"), ("two", "far")]
        for source, target in ways:
            sent = peers[source].request_proof("send", name=NAME, dest=places[target], data="0102")
            assert sent["status"] == "delivered"
            assert peers[target].expect("packet", dest=places[target])["data"] == "0102"
        for source, target in ways:
            opened = peers[source].request("open", dest=places[target], name=NAME)
            assert opened["status"] == "active"
            told = peers[target].expect("link", link=opened["link"])
            assert told["mtu"] == opened["mtu"] == (16_384 if "far" in (source, target) else 262_144)
            sent = peers[source].request("resource", link=opened["link"], size=60_000)
            assert sent["complete"], (source, target, sent)
            peers[source].request("teardown", link=opened["link"])
        sent = one.request_proof("send", name=NAME, dest=ours, data="03")
        assert sent["status"] == "delivered" and packets.get(timeout=LIMIT) == b"\x03"
        with node.connect(bytes.fromhex(places["two"]), *NAME.split("."), timeout=LIMIT) as link:
            assert link.is_active
        assert one.request("open", dest=ours, name=NAME)["status"] == "active"
        assert links.get(timeout=LIMIT).is_active


def found(peer: StockPeer, dest: str) -> int | None:
    """After how many hops."""
    for _ in range(10):
        told = peer.request("wait_path", dest=dest, timeout=2.0)
        if told["found"]:
            hops: int = told["hops"]
            return hops
    return None


@pytest.mark.slow
@pytest.mark.parametrize("transport", [True, False], ids=["transport", "plain"])
def test_our_program_behind_a_stock_instance(monkeypatch: pytest.MonkeyPatch, transport: bool) -> None:
    network, local, control = free_port(), free_port(), free_port()
    local_ports(monkeypatch, "client", "[instance/", Local.INSTANCE)
    monkeypatch.setattr("rnsfast.node.node.Engine", partial(Engine, behind_instance=True))
    shared = {
        "share_instance": True,
        "shared_instance_type": "tcp",
        "shared_instance_port": local,
        "instance_control_port": control,
    }
    with workspace() as space, ExitStack() as stack:
        sections = [tcp_server(network, ingress_control="no")]
        config = space.config("stock", sections, transport=transport, **shared)
        instance = stack.enter_context(StockPeer(config))
        far = stack.enter_context(StockPeer(space.config("far", [tcp_client(network, ingress_control="no")])))
        node = stack.enter_context(Node(space.config("ours", [tcp_client(local, "instance")]), strict=True))
        inbox, packets, links = arrivals(node)
        dest = inbox.hash.hex()
        assert found(far, dest) == 1 and found(instance, dest) == 0  # introduced, and asked for
        for peer in (far, instance):
            place = peer.request("destination", name=NAME, proof="all")["dest"]
            node.request_path(bytes.fromhex(place), LIMIT)
            assert node.hops_to(bytes.fromhex(place)) == (1 if peer is far else 0)
            receipt = node.outbox(bytes.fromhex(place), *NAME.split(".")).send(b"\x01")
            assert receipt is not None and receipt.wait(LIMIT)
            sent = peer.request_proof("send", name=NAME, dest=dest, data="0202")
            assert sent["status"] == "delivered" and packets.get(timeout=LIMIT) == b"\x02\x02"
            opened = peer.request("open", dest=dest, name=NAME, setup={"echoes": [[1, 2]]})
            link = links.get(timeout=LIMIT)
            assert opened["status"] == "active" and link.is_active
            reader = link.open_reader(2)
            pour(link.open_writer(1), CONTENT)
            assert drain(reader) == (len(CONTENT), digest(CONTENT))
            with node.connect(bytes.fromhex(place), *NAME.split("."), timeout=LIMIT) as ours:
                assert ours.is_active
