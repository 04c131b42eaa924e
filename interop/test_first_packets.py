"""The first packets and messages of a new link: field case F1, with a stock peer at the other end.

Not here: our responder speaking first to a stock initiator. A stock initiator installs its handlers on a thread of its
own after the link is up, so what comes at once is lost at its end whoever sends it (05 section 3.5).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import pytest

from interop.harness import Section, StockPeer, Workspace, free_port, tcp_client, tcp_server, workspace
from interop.ours import LIMIT, OUR_NAME, STOCK_NAME, Collector, Duo, Numbered, Side, duo
from interop.seeded import digest, message_bytes
from rnsfast import Identity, Link, Node

COUNT, SIZE, LINKS = 20, 40, 50
BLOCK = 0.05  # seconds a responder's handler blocks before it installs anything

Via = Literal["packet", "channel"]
EXPECTED = digest(b"".join(n.to_bytes(4, "big") + message_bytes("burst", n, SIZE - 4) for n in range(COUNT)))


@pytest.fixture(scope="module", params=["listener", "connector"])
def pair(request: pytest.FixtureRequest) -> Iterator[Duo]:
    side: Side = request.param
    with workspace() as space, duo(space, ours=side) as made:
        yield made


@contextmanager
def relayed(space: Workspace) -> Iterator[Duo]:
    """Ours, two stock transport nodes in a row, the stock peer."""
    one, two, three = free_port(), free_port(), free_port()

    def relay(name: str, listen: int, onward: int) -> StockPeer:
        sections: list[Section] = [tcp_server(listen), tcp_client(onward, "onward")]
        return StockPeer(space.config(name, sections, transport=True))

    with ExitStack() as stack:
        peer = stack.enter_context(StockPeer(space.config("stock", [tcp_server(one)])))
        stack.enter_context(relay("first", two, one))
        stack.enter_context(relay("second", three, two))
        node = stack.enter_context(Node(space.config("ours", [tcp_client(three)]), strict=True))
        yield Duo(space, node, peer, ours="connector")


def send_burst(link: Link, via: Via) -> None:
    for number in range(COUNT):
        content = message_bytes("burst", number, SIZE - 4)
        if via == "packet":
            link.send(number.to_bytes(4, "big") + content)
        else:
            link.channel.send(Numbered(number, content), timeout=LIMIT)


def collect(link: Link, via: Via) -> Collector:
    collector = Collector()
    if via == "packet":
        link.on_packet(collector.packet)
    else:
        link.channel.register(Numbered)
        link.channel.on_message(collector.message)
    return collector


def we_start_and_speak(pair: Duo, via: Via, links: int, dest: bytes | None = None) -> None:
    """We send on the line after `connect`; the peer's handler blocks before it installs its own."""
    setup: dict[str, Any] = {"sleep": BLOCK, **({"channel": {}} if via == "channel" else {})}
    target = dest or pair.stock_destination(on_link=setup)
    for _ in range(links):
        with pair.node.connect(target, *STOCK_NAME.split("."), timeout=LIMIT) as link:
            send_burst(link, via)
            name = link.id.hex()
            if via == "packet":
                got = sorted(event["data"] for event in pair.peer.collect("link_packet", COUNT, link=name))
                assert digest(b"".join(map(bytes.fromhex, got))) == EXPECTED  # the peer has a thread for each packet
                assert not pair.peer.seen("link_packet", link=name)
            else:
                pair.peer.expect("link", link=name)
                got = pair.peer.request("messages", link=name, count=COUNT)
                assert got["in_order"] and got["count"] == COUNT and got["sha256"] == EXPECTED


def the_peer_starts_and_speaks(pair: Duo, via: Via, links: int, announced: bool = False) -> None:
    """The peer sends as soon as its link is up; our handler blocks before it installs its own."""
    arrived: queue.SimpleQueue[Collector] = queue.SimpleQueue()
    never = threading.Event()

    def established(link: Link) -> None:
        never.wait(BLOCK)
        arrived.put(collect(link, via))

    inbox = pair.node.register(Identity(), *OUR_NAME)
    inbox.on_link(established)
    if announced:
        assert inbox.announce()
        pair.peer.expect("announce", dest=inbox.hash.hex())
    else:
        assert pair.peer.request("wait_path", dest=inbox.hash.hex())["found"]
    burst = {"burst": {"count": COUNT, "size": SIZE, "via": via}}
    for _ in range(links):
        opened = pair.peer.request("open", dest=inbox.hash.hex(), name=".".join(OUR_NAME), setup=burst)
        collector = arrived.get(timeout=LIMIT)
        assert collector.wait(COUNT) == EXPECTED
        pair.peer.request("teardown", link=opened["link"])
    inbox.close()


def we_start_and_the_peer_speaks(pair: Duo, via: Via, links: int, dest: bytes | None = None) -> None:
    """The peer, responder, sends from its established handler; we install ours after `connect` has returned."""
    target = dest or pair.stock_destination(on_link={"burst": {"count": COUNT, "size": SIZE, "via": via}})
    for _ in range(links):
        with pair.node.connect(target, *STOCK_NAME.split("."), timeout=LIMIT) as link:
            assert collect(link, via).wait(COUNT) == EXPECTED


CASES: dict[str, Callable[..., None]] = {
    "we start and speak": we_start_and_speak,
    "the peer starts and speaks": the_peer_starts_and_speaks,
    "we start, the peer speaks": we_start_and_the_peer_speaks,
}


@pytest.mark.slow
@pytest.mark.parametrize("via", ["packet", "channel"])
@pytest.mark.parametrize("case", CASES)
def test_all_arrive_once_and_in_order(pair: Duo, case: str, via: Via) -> None:
    CASES[case](pair, via, LINKS)


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("via", ["packet", "channel"])
@pytest.mark.parametrize("case", CASES)
def test_all_arrive_on_two_hundred_links(pair: Duo, case: str, via: Via) -> None:
    CASES[case](pair, via, 200)


@pytest.mark.slow
def test_all_arrive_over_two_transport_nodes() -> None:
    with workspace() as space, relayed(space) as pair:
        heard: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        pair.node.on_announce(lambda event: heard.put(event.destination))
        for via in ("packet", "channel"):
            listening: dict[str, Any] = {"sleep": BLOCK, **({"channel": {}} if via == "channel" else {})}
            speaking = {"burst": {"count": COUNT, "size": SIZE, "via": via}}
            for setup, case in ((listening, we_start_and_speak), (speaking, we_start_and_the_peer_speaks)):
                made = pair.peer.request("destination", name=STOCK_NAME, announce=True, on_link=setup)
                dest = heard.get(timeout=LIMIT)
                assert dest.hex() == made["dest"] and pair.node.hops_to(dest) == 3
                case(pair, via, 5, dest)
            the_peer_starts_and_speaks(pair, via, 5, announced=True)
