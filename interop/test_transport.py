"""Our transport node between stock nodes, and stock transport nodes between ours.  Protocol 02.

    line      stock - ours - stock, and ours - stock - ours
    square    two routes from one end to the other, one over our relay and one over a stock one

Nothing here waits for the clock: a path is asked for, an announce is an event, a restarted relay says that it is up.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from interop.harness import (
    Section,
    StockPeer,
    Workspace,
    access,
    backbone_client,
    backbone_server,
    free_port,
    tcp_client,
    tcp_server,
    udp,
    workspace,
)
from interop.ours import LIMIT, Duo, connected, drain, join, pour
from interop.proxy import FrameProxy
from interop.seeded import data, digest, random_bytes
from rnsfast import Identity, LinkTimeout, Node, PathNotFound
from rnsfast.wire.pathrequest import PATH_REQUEST_DESTINATION

NAME = "interop.far"
HELLO = b"through the relay"
ACCESS = access("net", "secret")


@dataclass
class Line:
    """Two stock peers with our relay between them."""

    relay: Node
    left: StockPeer
    right: StockPeer

    def destination(self, **options: Any) -> str:
        """A destination on the right that the left has a path to."""
        made = self.right.request("destination", name=NAME, announce=True, **options)
        dest: str = made["dest"]
        assert self.left.request("wait_path", dest=dest)["found"]
        return dest


def sections(way: str, port: int) -> tuple[Section, Section]:
    """What our relay listens with, and how a peer reaches it. Names differ, since both stand in one file."""
    name = f"side {port}"
    if way == "backbone":
        return backbone_server(port, name), backbone_client(port)
    if way == "udp":
        back = free_port()
        return udp(port, back, name), udp(back, port)
    if way == "ifac":
        return tcp_server(port, name, **ACCESS), tcp_client(port, **ACCESS)
    return tcp_server(port, name), tcp_client(port)


def open_wide(section: Section) -> Section:
    return Section(section.name, {**section.options, "ingress_control": False})


@contextmanager
def line(space: Workspace, left: str = "tcp", right: str = "tcp", **options: Any) -> Iterator[Line]:
    """`options` go to the relay's interface sections."""
    # The third new destination within a second would be held for 15 s, by ours and by theirs.
    ends = [[open_wide(section) for section in sections(way, free_port())] for way in (left, right)]
    ours = [Section(near.name, {**near.options, **options}) for near, _ in ends]
    with ExitStack() as stack:
        relay = stack.enter_context(Node(space.config("relay", ours, transport=True), strict=True))
        peers = [
            stack.enter_context(StockPeer(space.config(name, [far])))
            for name, (_, far) in zip(("left", "right"), ends, strict=True)
        ]
        made = Line(relay, *peers)
        made.destination()  # packets pass in both directions
        yield made


WAYS = [("tcp", "tcp"), ("backbone", "tcp"), ("tcp", "backbone"), ("udp", "tcp"), ("ifac", "tcp")]


@pytest.fixture(scope="module", params=WAYS, ids="-".join)
def between(request: pytest.FixtureRequest) -> Iterator[tuple[Line, tuple[str, str]]]:
    with workspace() as space, line(space, *request.param) as made:
        yield made, request.param


# ------------------------------------------------------------ stock, ours, stock
def test_announces_pass_and_say_how_far(between: tuple[Line, tuple[str, str]]) -> None:
    made, _ = between
    dest = made.right.request("destination", name="interop.heard", announce=True, app_data=HELLO.hex())["dest"]
    told = made.left.expect("announce", dest=dest)
    assert told["hops"] == 2 and told["app_data"] == HELLO.hex() and not told["path_response"]
    assert made.relay.hops_to(bytes.fromhex(dest)) == 1


def test_packets_arrive_and_their_proofs_come_back(between: tuple[Line, tuple[str, str]]) -> None:
    made, _ = between
    dest = made.destination(proof="all")
    sent = made.left.request_proof("send", name=NAME, dest=dest, data=HELLO.hex())
    assert sent["status"] == "delivered"
    assert made.right.expect("packet", dest=dest)["data"] == HELLO.hex()


def test_links_have_the_mtu_of_the_narrowest_hop(between: tuple[Line, tuple[str, str]]) -> None:
    made, ways = between
    dest = made.destination()
    opened = made.left.request("open", dest=dest, name=NAME)
    assert opened["mtu"] == (500 if "udp" in ways else 16384)
    made.left.request("link_send", link=opened["link"], data=HELLO.hex())
    assert made.right.expect("link_packet", link=opened["link"])["data"] == HELLO.hex()
    made.left.request("teardown", link=opened["link"])
    assert made.right.expect("closed", link=opened["link"])


@pytest.mark.parametrize("size", [100, 100_000, 1_000_000])
def test_streams_pass_both_ways(between: tuple[Line, tuple[str, str]], size: int) -> None:
    made, _ = between
    dest = made.destination(on_link={"readers": [1]})
    opened = made.left.request("open", dest=dest, name=NAME, setup={"readers": [2]})
    link = opened["link"]
    made.right.expect("link", link=link)
    wanted = digest(data("random", "s", size))
    for source, sink, stream in ((made.left, made.right, 1), (made.right, made.left, 2)):
        source.request("write", link=link, stream=stream, seed="s", size=size, timeout=60)
        assert sink.request("received", link=link, stream=stream, timeout=60)["sha256"] == wanted
    made.left.request("teardown", link=link)


def test_resources_pass(between: tuple[Line, tuple[str, str]]) -> None:
    made, _ = between
    dest = made.destination(on_link={"resources": True})
    opened = made.left.request("open", dest=dest, name=NAME)
    made.right.expect("link", link=opened["link"])
    sent = made.left.request("resource", link=opened["link"], seed="r", size=300_000, timeout=60)
    told = made.right.expect("resource", link=opened["link"])
    assert told["complete"] and told["sha256"] == sent["sha256"] == digest(data("random", "r", 300_000))
    made.left.request("teardown", link=opened["link"])


def test_nothing_forbidden_was_seen(between: tuple[Line, tuple[str, str]]) -> None:
    """After all of the above, no packet of an honest peer was counted as a violation."""
    made, _ = between
    status = made.relay.status()
    bad = {d for port in status["ports"] for d in port["drops"] if d.startswith(("violation", "malformed", "ifac"))}
    assert not bad, status["ports"]


# ------------------------------------------------------------ path requests
def test_a_gateway_asks_on_for_what_it_does_not_know() -> None:
    with workspace() as space, line(space, mode="gateway") as made:
        dest = made.right.request("destination", name="interop.unknown")["dest"]
        found = made.left.request("wait_path", dest=dest, timeout=LIMIT)
        assert found["found"] and found["hops"] == 2


def test_a_full_interface_does_not() -> None:
    with workspace() as space, line(space) as made:
        dest = made.right.request("destination", name="interop.unknown")["dest"]
        assert not made.left.request("wait_path", dest=dest, timeout=2)["found"]


def test_a_known_path_is_answered_for_a_newcomer() -> None:
    port, other = free_port(), free_port()
    with workspace() as space, ExitStack() as stack:
        config = space.config("relay", [tcp_server(port, "one"), tcp_server(other, "two")], transport=True)
        relay = stack.enter_context(Node(config, strict=True))
        right = stack.enter_context(StockPeer(space.config("right", [tcp_client(other)])))
        dest = bytes.fromhex(right.request("destination", name=NAME, proof="all")["dest"])
        relay.request_path(dest, LIMIT)
        left = stack.enter_context(StockPeer(space.config("left", [tcp_client(port)])))
        assert left.request("wait_path", dest=dest.hex())["found"]
        assert left.expect("announce", dest=dest.hex())["path_response"]
        assert left.request_proof("send", name=NAME, dest=dest.hex(), data="00")["status"] == "delivered"


# ------------------------------------------------------------ ours, stock, ours
@pytest.fixture(scope="module", params=["tcp", "backbone"])
def ours_at_the_ends(request: pytest.FixtureRequest) -> Iterator[tuple[Node, Node]]:
    server, client = (tcp_server, tcp_client) if request.param == "tcp" else (backbone_server, backbone_client)
    one, two = free_port(), free_port()
    with workspace() as space, ExitStack() as stack:
        stack.enter_context(StockPeer(space.config("relay", [server(one, "one"), server(two, "two")], transport=True)))
        yield (
            connected(stack.enter_context(Node(space.config("left", [client(one)]), strict=True))),
            connected(stack.enter_context(Node(space.config("right", [client(two)]), strict=True))),
        )


def test_our_ends_meet_over_a_stock_relay(ours_at_the_ends: tuple[Node, Node]) -> None:
    left, right = ours_at_the_ends
    content = random_bytes("over", 500_000)
    inbox = right.register(Identity(), "interop", "far")
    got: list[tuple[int, str]] = []
    arrived = threading.Event()

    def read(link: Any) -> None:
        got.append(drain(link.open_reader(1)))
        arrived.set()

    inbox.on_link(read)
    inbox.set_proofs("all")
    inbox.announce()
    left.request_path(inbox.hash, LIMIT)
    assert left.hops_to(inbox.hash) == 2
    receipt = left.outbox(inbox.hash, "interop", "far").send(HELLO)
    assert receipt is not None and receipt.wait(LIMIT)
    with left.connect(inbox.hash, "interop", "far", timeout=LIMIT) as link:
        pour(link.open_writer(1), content)
        assert arrived.wait(LIMIT)
    assert got == [(len(content), digest(content))]


# ------------------------------------------------------------ two routes
@contextmanager
def square(
    space: Workspace, proxies: dict[str, FrameProxy] | None = None
) -> Iterator[tuple[Node, StockPeer, dict[str, StockPeer]]]:
    """Our endpoint, two stock relays, one stock destination.  Field case F6.

    `proxies` gets one for each of our connections.
    """
    near = {name: free_port() for name in ("north", "south")}
    far = free_port()
    with ExitStack() as stack:
        target = stack.enter_context(StockPeer(space.config("target", [tcp_server(far)])))
        relays = {
            name: stack.enter_context(
                StockPeer(space.config(name, [tcp_server(port), tcp_client(far, "onward")], transport=True))
            )
            for name, port in near.items()
        }
        if proxies is not None:
            for name, port in near.items():
                proxies[name] = stack.enter_context(FrameProxy(port))
            near = {name: proxy.port for name, proxy in proxies.items()}
        clients = [tcp_client(port, name) for name, port in near.items()]
        yield stack.enter_context(Node(space.config("ours", clients), strict=True)), target, relays


def relay_in_use(node: Node, dest: bytes) -> str:
    """Which of the two interfaces the path leads over."""
    with node._reactor.lock:
        path = node._engine.paths.usable(dest)
    assert path is not None
    return "north" if "north" in path.port.name else "south"


@pytest.mark.slow
def test_the_relay_of_the_path_dies_and_the_other_one_is_used() -> None:
    with workspace() as space, square(space) as (node, target, relays):
        dest = bytes.fromhex(target.request("destination", name=NAME, announce=True)["dest"])
        node.request_path(dest, LIMIT)
        used = relay_in_use(node, dest)
        relays[used].kill()
        with node.connect(dest, *NAME.split("."), timeout=30) as link:
            assert link.is_active and relay_in_use(node, dest) != used
        relays[used].start()
        for _ in range(10):
            node.connect(dest, *NAME.split("."), timeout=LIMIT).close()


@pytest.mark.slow
@pytest.mark.parametrize("attempts", ["one call", "two calls"])
def test_a_connection_that_swallows_everything_is_given_up_for_the_other(attempts: str) -> None:
    """The connection stays up, so that only the unanswered request tells."""
    proxies: dict[str, FrameProxy] = {}
    with workspace() as space, square(space, proxies) as (node, target, _):
        dest = bytes.fromhex(target.request("destination", name=NAME, announce=True)["dest"])
        node.request_path(dest, LIMIT)
        used = relay_in_use(node, dest)
        other = "south" if used == "north" else "north"
        asked = [
            proxy.to_target.watch(lambda frame: frame.destination == PATH_REQUEST_DESTINATION and dest in frame.raw)
            for proxy in proxies.values()
        ]  # the proxy sees also what it swallows
        proxies[used].swallow()
        if attempts == "two calls":
            with pytest.raises(LinkTimeout):
                node.connect(dest, *NAME.split("."), timeout=2.0)
            assert not node.has_path(dest) or relay_in_use(node, dest) == other
            assert all(event.wait(LIMIT) for event in asked), "another path was not asked for on both interfaces"
        with node.connect(dest, *NAME.split("."), timeout=30) as link:
            assert link.is_active and relay_in_use(node, dest) == other
            assert all(event.wait(LIMIT) for event in asked), "another path was not asked for on both interfaces"
        for state in node.status()["interfaces"]:
            assert state["state"] == "online", state


@pytest.mark.slow
def test_an_interface_that_is_closed_at_run_time_takes_its_paths_along() -> None:
    with workspace() as space, square(space) as (node, target, _):
        dest = bytes.fromhex(target.request("destination", name=NAME, announce=True)["dest"])
        node.request_path(dest, LIMIT)
        used = relay_in_use(node, dest)
        next(interface for interface in node.interfaces if interface.name == used).close()
        assert not node.has_path(dest) or relay_in_use(node, dest) != used
        with node.connect(dest, *NAME.split("."), timeout=30) as link:
            assert link.is_active and relay_in_use(node, dest) != used


# ------------------------------------------------------------ restart, roaming
@pytest.mark.slow
def test_our_relay_is_restarted_and_the_ends_find_each_other_again() -> None:
    one, two = free_port(), free_port()
    with workspace() as space, ExitStack() as stack:
        config = space.config("relay", [tcp_server(one, "one"), tcp_server(two, "two")], transport=True)
        relay = Node(config, strict=True)
        stack.callback(relay.stop)
        relay.start()
        left = stack.enter_context(StockPeer(space.config("left", [tcp_client(one)])))
        right = stack.enter_context(StockPeer(space.config("right", [tcp_client(two)])))
        made = Line(relay, left, right)
        dest = made.destination(proof="all")
        assert left.request_proof("send", name=NAME, dest=dest, data="00")["status"] == "delivered"
        relay.stop()
        relay.start()
        right.request("announce", dest=dest)  # reaches nobody before its connection is back
        node = Duo(space, relay, right)
        node.meet()
        right.request("announce", dest=dest)
        left.expect("announce", dest=dest)
        assert left.request_proof("send", name=NAME, dest=dest, data="01")["status"] == "delivered"


@pytest.mark.slow
def test_a_node_that_moves_from_one_relay_to_another_is_reached_there() -> None:
    """The moving node is ours; relays are ours and stock, joined with each other; who looks for it is stock."""
    first, second, between_relays = free_port(), free_port(), free_port()
    with workspace() as space, ExitStack() as stack:
        ours = space.config("ours", [tcp_server(first, "first"), tcp_server(between_relays, "joint")], transport=True)
        stack.enter_context(Node(ours, strict=True))
        stock = [tcp_server(second, "second"), tcp_client(between_relays, "joint")]
        relay = stack.enter_context(StockPeer(space.config("stock", stock, transport=True)))
        seeker = stack.enter_context(StockPeer(space.config("seeker", [tcp_client(second)])))
        identity = Identity()
        for port, hops in ((first, 3), (second, 2)):
            config = space.config(f"moving{port}", [tcp_client(port)])
            with Node(config, strict=True) as moving:
                inbox = moving.register(identity, *NAME.split("."))
                inbox.set_proofs("all")
                probe = relay.request("destination", name=f"probe.at{port}", announce=True)["dest"]
                moving.request_path(bytes.fromhex(probe), LIMIT)  # it is connected
                inbox.announce()
                told = seeker.expect("announce", dest=inbox.hash.hex())
                assert told["hops"] == hops
                sent = seeker.request_proof("send", name=NAME, dest=inbox.hash.hex(), data=HELLO.hex())
                assert sent["status"] == "delivered"
                opened = seeker.request("open", dest=inbox.hash.hex(), name=NAME)
                assert opened["status"] == "active"


# ------------------------------------------------------------ what is not forwarded
def test_nobody_is_forwarded_to_without_a_path() -> None:
    with workspace() as space, line(space) as made:
        with pytest.raises(PathNotFound):
            made.relay.request_path(bytes(16), 0.5)
        joint = Duo(space, made.relay, made.right)
        assert join(joint, "initiator").link.is_active  # the relay is an endpoint, too
