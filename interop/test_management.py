"""Discovery, remote management, probes and blackhole lists, with a stock node at the other end, both ways round."""

from __future__ import annotations

import queue
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from interop.harness import Section, StockPeer, Workspace, free_port, stock_python, tcp_client, tcp_server
from interop.ours import LIMIT
from rnsfast import Identity, Node
from rnsfast.engine.transport.blackhole import Ban
from rnsfast.node.managementblackhole import request
from rnsfast.node.managementlists import LOCAL, BlackholeFiles
from rnsfast.wire.names import destination_hash, name_hash

COST = 8  # bits of work; 16 are usual
SPAMMER = b"\x5a" * 16


def address(identity: Identity, *aspects: str) -> bytes:
    """Where a node with that transport identity has such a destination."""
    return destination_hash(name_hash("rnstransport", *aspects), identity.hash)


def offered(port: int, name: str, **options: object) -> Section:
    """A listener that tells others of itself."""
    about = {"discoverable": True, "discovery_stamp_value": COST, "reachable_on": "198.51.100.7"}
    return tcp_server(port, name, **{**about, "discovery_name": name, **options})


@dataclass
class Sides:
    """Our node, which listens, and a stock one that is connected to it, with the identities they have."""

    node: Node
    stock: StockPeer
    ours: Identity
    theirs: Identity


@contextmanager
def sides(
    space: Workspace,
    *,
    ours: Identity | None = None,
    theirs: Identity | None = None,
    our_section: dict[str, Any] | None = None,
    their_sections: tuple[Section, ...] = (),
    our_node: dict[str, Any] | None = None,
    stock_node: dict[str, Any] | None = None,
    banned: bytes | None = None,
) -> Iterator[Sides]:
    ours, theirs, port = ours or Identity(), theirs or Identity(), free_port()
    near = tcp_server(port, "ours", ingress_control=False, **(our_section or {}))
    far = [tcp_client(port, ingress_control=False), *their_sections]
    transport = {"transport": True}
    ours_at = with_identity(space.config("ours", [near], **transport, **(our_node or {})), ours)
    stock_at = with_identity(space.config("stock", far, **transport, **(stock_node or {})), theirs)
    if banned is not None:  # as a run before would have left it
        BlackholeFiles(ours_at / "storage" / "blackhole").save(LOCAL, {banned: Ban(ours.hash, None, "spam")})
    with Node(ours_at, strict=True) as node, StockPeer(stock_at, hurry=True) as stock:
        yield Sides(node, stock, ours, theirs)


def with_identity(config: Path, identity: Identity) -> Path:
    """Known before the node starts, since others name it in their configuration."""
    (config / "storage").mkdir()
    identity.save(config / "storage" / "transport_identity")
    return config


# ------------------------------------------------------------------ discovery


#: What our interface says of itself.
ABOUT = {
    "discoverable": True, "discovery_stamp_value": COST, "reachable_on": "198.51.100.7", "discovery_name": "Our node",
}  # fmt: skip


def announce_now(node: Node) -> None:
    """Instead of a minute after the start."""
    assert node._management is not None
    announcer = node._management.discovery.announcer
    announcer._round_at = 0.0
    announcer.wake()


def test_a_stock_listener_takes_our_announce(space: Workspace) -> None:
    with sides(space, our_section={**ABOUT, "latitude": 51.5, "longitude": -0.5}) as both:
        both.stock.request("discover", required=COST)
        announce_now(both.node)
        info = both.stock.expect("discovered")["info"]
        port = both.node.interfaces[0].config.listen_port  # type: ignore[attr-defined]
        assert (info["name"], info["reachable_on"], info["port"]) == ("Our node", "198.51.100.7", port)
        assert (info["type"], info["transport"], info["impl_name"]) == ("TCPServerInterface", True, "rnsfast")
        assert (info["latitude"], info["longitude"], info["height"]) == (51.5, -0.5, None)
        assert info["transport_id"] == info["network_id"] == both.ours.hash.hex()
        (listed,) = both.stock.request("discovered")["interfaces"]
        assert listed["name"] == "Our node" and listed["value"] >= COST


def test_we_take_the_announce_of_a_stock_node(space: Workspace) -> None:
    port = free_port()
    listening = {"discover_interfaces": True, "required_discovery_value": COST}
    section = offered(port, "Stock node", height=12.5, networkname="net", passphrase="word", publish_ifac=True)
    with sides(space, our_node=listening, their_sections=(section,)) as both:
        heard: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        both.node.on_interface_discovered(heard.put)
        if not both.node.discovered_interfaces():
            heard.get(timeout=LIMIT)
        (found,) = both.node.discovered_interfaces()
        assert (found["name"], found["type"], found["port"]) == ("Stock node", "TCPServerInterface", port)
        assert (found["ifac_netname"], found["ifac_netkey"], found["height"]) == ("net", "word", 12.5)
        assert found["network_id"] == both.theirs.hash.hex() and found["status"] == "available"


def test_an_announce_of_ours_to_a_network_is_read_by_a_stock_node_of_it(space: Workspace) -> None:
    network, path = Identity(), space.root / "network"
    network.save(path)
    same = {"network_identity": path}
    section = {**ABOUT, "discovery_encrypt": True}
    with sides(space, our_section=section, our_node=same, stock_node=same) as both:
        both.stock.request("discover", required=COST)
        announce_now(both.node)
        info = both.stock.expect("discovered")["info"]
        assert (info["name"], info["network_id"]) == ("Our node", network.hash.hex())


def test_an_announce_of_a_stock_node_to_a_network_is_read_by_ours_that_announces_too(space: Workspace) -> None:
    network, path = Identity(), space.root / "network"
    network.save(path)
    same = {"network_identity": path}
    theirs = offered(free_port(), "Theirs", discovery_encrypt=True)
    ours = {**same, "discover_interfaces": True, "required_discovery_value": COST}
    with sides(space, our_section=ABOUT, their_sections=(theirs,), our_node=ours, stock_node=same) as both:
        heard: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        both.node.on_interface_discovered(heard.put)
        if not both.node.discovered_interfaces():
            heard.get(timeout=LIMIT)
        (found,) = both.node.discovered_interfaces()
        assert (found["name"], found["network_id"]) == ("Theirs", network.hash.hex())


def test_nodes_of_a_network_have_the_same_names(space: Workspace) -> None:
    network, path = Identity(), space.root / "network"
    network.save(path)
    with sides(space, stock_node={"network_identity": path}) as both:
        for aspects in (("network",), ("network", "instance", network.hash.hex())):
            both.node.request_path(address(network, *aspects), LIMIT)


# ------------------------------------------------------------------ probes


def test_probes_are_answered_both_ways(space: Workspace) -> None:
    answering = {"respond_to_probes": True}
    with sides(space, our_node=answering, stock_node=answering) as both:
        here, there = address(both.ours, "probe"), address(both.theirs, "probe")
        assert both.stock.request("wait_path", dest=here.hex())["found"]
        sent = both.stock.request("send", dest=here.hex(), name="rnstransport.probe", data="00" * 16)
        assert sent["status"] == "delivered"
        both.node.request_path(there, LIMIT)
        receipt = both.node.outbox(there, "rnstransport", "probe").send(bytes(16))
        assert receipt is not None and receipt.wait(LIMIT)


# ------------------------------------------------------------------ remote management

MANAGEMENT = ("remote", "management")


def test_a_stock_node_asks_us(space: Workspace) -> None:
    operator = Identity()
    allowed = {"enable_remote_management": True, "remote_management_allowed": operator.hash.hex()}
    with sides(space, our_node=allowed) as both:
        here = address(both.ours, *MANAGEMENT).hex()
        assert both.stock.request("wait_path", dest=here)["found"]
        known = both.stock.request("identity", private=operator.private_key.hex())["identity"]
        stranger = both.stock.request("identity")["identity"]
        for who in (None, stranger):
            link = both.stock.request("open", dest=here, name="rnstransport.remote.management")["link"]
            if who is not None:
                both.stock.request("identify", link=link, identity=who)
            refused = both.stock.request("ask", link=link, path="/status", data=[True], timeout=1.0)
            assert refused["status"] == "failed"
        link = both.stock.request("open", dest=here, name="rnstransport.remote.management")["link"]
        both.stock.request("identify", link=link, identity=known)
        stats, links = both.stock.request("ask", link=link, path="/status", data=[True])["data"]
        assert stats["transport_id"] == {"hex": both.ours.hash.hex()} and links == 0
        assert [one["short_name"] for one in stats["interfaces"]] == ["ours", "ours"]
        dest = both.stock.request("destination", name="interop.x", announce=True)["dest"]
        both.node.request_path(bytes.fromhex(dest), LIMIT)
        asked = both.stock.request("ask", link=link, path="/path", data=["table", {"hex": dest}, None])
        (path,) = asked["data"]
        assert path["hash"] == path["via"] == {"hex": dest} and path["hops"] == 1
        assert both.stock.request("ask", link=link, path="/path", data=["rates", None])["status"] == "ready"


def test_we_ask_a_stock_node(space: Workspace) -> None:
    operator = Identity()
    allowed = {"enable_remote_management": True, "remote_management_allowed": operator.hash.hex()}
    with sides(space, stock_node=allowed) as both:
        there = address(both.theirs, *MANAGEMENT)
        with both.node.connect(there, "rnstransport", *MANAGEMENT, timeout=LIMIT, identity=operator) as link:
            stats, links = request(both.node, link, "/status", [True])
            assert stats["transport_id"] == both.theirs.hash and links == 0
            inbox = both.node.register(Identity(), "interop", "y")
            assert both.stock.request("wait_path", dest=inbox.hash.hex())["found"]
            (path,) = request(both.node, link, "/path", ["table", inbox.hash, None])
            assert (path["hash"], path["hops"]) == (inbox.hash, 1)


def run_tool(config: Path, tool: str, *arguments: str, tries: int = 5) -> str:
    """What a stock command line tool prints, standing alone on its own configuration.

    `rnstatus` and `rnpath` ask for a link first and say what to do with it afterwards: a fast answer finds nothing to
    call, and the tool waits for ever. So it is given several tries.
    """
    command = [stock_python(), "-m", f"RNS.Utilities.{tool}", "--config", str(config), *arguments]
    for _ in range(tries - 1):
        with suppress(subprocess.TimeoutExpired):
            return _output(command, 6.0)
    return _output(command, 20.0)


def _output(command: list[str], timeout: float) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    return done.stdout + done.stderr


def test_the_stock_tools_show_what_we_say(space: Workspace) -> None:
    operator, key, port = Identity(), space.root / "operator", free_port()
    operator.save(key)
    ours = Identity()
    allowed = {"enable_remote_management": True, "remote_management_allowed": operator.hash.hex()}
    section = tcp_server(port, "The interface")
    config = space.config("ours", [section], transport=True, respond_to_probes=True, **allowed)
    with Node(with_identity(config, ours), strict=True):
        tools = space.config("tools", [tcp_client(port)])
        remote = ("-R", ours.hash.hex(), "-i", str(key))
        status = run_tool(tools, "rnstatus", "-l", *remote)
        assert f"TCPServerInterface[The interface/127.0.0.1:{port}]" in status, status
        assert f"Transport Instance <{ours.hash.hex()}> running" in status, status
        paths = run_tool(tools, "rnpath", "-t", *remote)
        assert "hop" in paths or "authentication" in paths, paths  # an empty table is shown as a failure
        probed = run_tool(tools, "rnprobe", "rnstransport.probe", address(ours, "probe").hex())
        assert "packet loss 0.0%" in probed, probed


# ------------------------------------------------------------------ blackhole lists


def test_a_stock_node_fetches_our_list(space: Workspace) -> None:
    ours = Identity()
    listening = {"blackhole_sources": ours.hash.hex()}
    publishing = {"publish_blackhole": True}
    with sides(space, ours=ours, our_node=publishing, stock_node=listening, banned=SPAMMER) as both:
        # It asks 20 s after its start; if that comes to nothing, a minute later.
        ban = both.stock.request("wait_banned", identity=SPAMMER.hex(), timeout=95)["ban"]
        assert ban == {"source": {"hex": ours.hash.hex()}, "until": None, "reason": "spam"}


def test_we_fetch_the_list_of_a_stock_node(space: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = Identity()
    taken: queue.SimpleQueue[int] = queue.SimpleQueue()
    monkeypatch.setattr(
        "rnsfast.node.managementblackhole.Blackholes._save", lambda self, source: taken.put(len(self.all()))
    )
    listening = {"blackhole_sources": theirs.hash.hex()}
    monkeypatch.setattr("rnsfast.node.managementblackhole.FIRST_FETCH", 3.0)
    with sides(space, theirs=theirs, our_node=listening, stock_node={"publish_blackhole": True}) as both:
        both.stock.request("ban", identity=SPAMMER.hex(), reason="spam")
        assert taken.get(timeout=LIMIT) == 1
        (ban,) = both.node.blackholed().items()
        assert (ban[0], ban[1].source, ban[1].reason) == (SPAMMER, theirs.hash, "spam")
