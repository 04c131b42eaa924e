"""Our node inside the test process, next to a stock peer in a process of its own.

    with duo(space, "tcp", ours="listener") as pair:
        joint = join(pair, "initiator", stock={"readers": [1]})
        with joint.link.open_writer(1) as writer: ...
        joint.stock("received", stream=1)

`ours` says who listens, the role who asks for the link. Nothing here sleeps: what has to be waited for is an event of
the peer, a condition of our node, or an item of a queue, each with a deadline.
"""

from __future__ import annotations

import hashlib
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from interop.harness import CLIENTS, SERVERS, Event, Section, StockPeer, Workspace, free_port, udp
from interop.proxy import FrameProxy, Lane
from interop.seeded import message_bytes
from rnsfast import Identity, Inbox, Link, LinkClosed, Node, StreamReader, StreamWriter

Side = Literal["listener", "connector"]
Role = Literal["initiator", "responder"]

STOCK_NAME = "interop.stock"
OUR_NAME = ("interop", "ours")
ROLES: tuple[Role, ...] = ("initiator", "responder")
WAYS: list[tuple[str, Side]] = [
    ("tcp", "listener"), ("tcp", "connector"), ("backbone", "listener"), ("backbone", "connector"), ("udp", "listener"),
]  # fmt: skip
LIMIT = 25.0  # seconds for anything that is expected to happen at once


class Numbered:
    """Message 0x0101 of the stock peer: a number and any bytes."""

    MSGTYPE = 0x0101

    def __init__(self, number: int = 0, content: bytes = b"") -> None:
        self.number, self.content = number, content

    def pack(self) -> bytes:
        return self.number.to_bytes(4, "big") + self.content

    def unpack(self, raw: bytes) -> None:
        self.number, self.content = int.from_bytes(raw[:4], "big"), bytes(raw[4:])


class Collector:
    """Messages or packets received: how many, in what order, one digest over all. A handler for either."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.numbers: list[int] = []
        self.digest = hashlib.sha256()

    def message(self, message: Numbered) -> bool:
        with self.changed:
            self.numbers.append(message.number)
            self.digest.update(message.pack())
            self.changed.notify_all()
        return True

    def packet(self, data: bytes) -> None:
        self.message(Numbered(int.from_bytes(data[:4], "big"), data[4:]))

    def wait(self, count: int, timeout: float = LIMIT) -> str:
        """The digest when there are `count`; AssertionError if they do not come, or not in order, each once."""
        with self.changed:
            self.changed.wait_for(lambda: len(self.numbers) >= count, timeout)
            assert self.numbers == list(range(count)), f"{len(self.numbers)} of {count}: {self.numbers[:40]}"
            return self.digest.hexdigest()


@dataclass
class Duo:
    """The two nodes."""

    space: Workspace
    node: Node
    peer: StockPeer
    proxy: FrameProxy | None = None
    ours: Side = "listener"

    @property
    def from_us(self) -> Lane:
        """The proxy's lane for what our node sends."""
        assert self.proxy is not None
        return self.proxy.to_target if self.ours == "connector" else self.proxy.to_client

    @property
    def from_stock(self) -> Lane:
        assert self.proxy is not None
        return self.proxy.to_client if self.ours == "connector" else self.proxy.to_target

    def stock_destination(self, **options: Any) -> bytes:
        """A new destination of the stock peer's, which we have a path to."""
        dest = bytes.fromhex(self.peer.request("destination", **{"name": STOCK_NAME, **options})["dest"])
        self.node.request_path(dest, LIMIT)
        return dest

    def meet(self) -> None:
        """Return when packets pass in both directions.

        A listener is up before anybody has connected, and what it says until then reaches nobody.
        """
        self.stock_destination(name="interop.probe")

    def our_destination(self, *name: str) -> Inbox:
        """A new destination of ours, which the stock peer has a path to."""
        inbox = self.node.register(Identity(), *(name or OUR_NAME))
        assert self.peer.request("wait_path", dest=inbox.hash.hex())["found"]
        return inbox


def connected(node: Node) -> Node:
    """Return it when one of its interfaces is up: what it says before that reaches nobody."""
    up = threading.Event()
    node.on_interface_up(lambda name: up.set())
    assert up.wait(LIMIT), node.status()
    return node


@contextmanager
def duo(
    space: Workspace,
    kind: str = "tcp",
    ours: Side = "listener",
    *,
    proxied: bool | FrameProxy = False,
    both: dict[str, Any] | None = None,
    our_section: dict[str, Any] | None = None,
    our_node: dict[str, Any] | None = None,
    stock_node: dict[str, Any] | None = None,
    label: str = "",
    meet: bool = True,
) -> Iterator[Duo]:
    """Start both, the listener first, and with `meet` wait until packets pass in both directions.

    `both` goes to both interface sections, `our_section` to ours alone, the others to the node sections.
    """
    datagrams = kind == "udp"
    port, proxy = free_port(socket.SOCK_DGRAM if datagrams else socket.SOCK_STREAM), None
    other = free_port(socket.SOCK_DGRAM)  # with datagrams both listen
    if proxied:
        proxy = proxied if isinstance(proxied, FrameProxy) else FrameProxy(port)
        port = proxy.target_port
    with ExitStack() as stack:

        def start(side: Side) -> Node | StockPeer:
            if side == "connector" and proxy is not None:
                stack.enter_context(proxy)
            near = proxy.port if proxy is not None and side == "connector" else port
            extra = {**(both or {}), **((our_section or {}) if side == ours else {})}
            section: Section
            if datagrams:
                section = udp(near, other, **extra) if side == "listener" else udp(other, near, **extra)
            else:
                section = (SERVERS if side == "listener" else CLIENTS)[kind](near, **extra)
            if side == ours:
                config = space.config(f"ours{label}", [section], **(our_node or {}))
                return stack.enter_context(Node(config, strict=True))
            return stack.enter_context(StockPeer(space.config(f"stock{label}", [section], **(stock_node or {}))))

        first, second = start("listener"), start("connector")
        node, peer = (first, second) if ours == "listener" else (second, first)
        assert isinstance(node, Node) and isinstance(peer, StockPeer)
        made = Duo(space, node, peer, proxy, ours)
        if meet:
            made.meet()
        yield made


@dataclass
class Joint:
    """One link: our end, and the peer that has the other."""

    pair: Duo
    link: Link
    stock_info: Event

    @property
    def id(self) -> str:
        return self.link.id.hex()

    def stock(self, do: str, **arguments: Any) -> Event:
        """A command to the peer about this link."""
        return self.pair.peer.request(do, link=self.id, **arguments)

    def stock_begin(self, do: str, **arguments: Any) -> Callable[[], Event]:
        """The same, without waiting; the answer is what the returned function returns."""
        number = self.pair.peer.begin(do, link=self.id, **arguments)
        return lambda: self.pair.peer.finish(number, arguments.get("timeout", 60.0) + 5)

    def expect(self, event: str, **values: Any) -> Event:
        return self.pair.peer.expect(event, link=self.id, **values)


def join(
    pair: Duo,
    role: Role,
    *,
    stock: dict[str, Any] | None = None,
    ours: Callable[[Link], Any] | None = None,
    dest: bytes | None = None,
    **options: Any,
) -> Joint:
    """A new link in which our node has that role. `stock` sets up the peer's end; `ours` is called with our end, as
    responder inside the established handler. Further options: of the peer's destination, or of its `open` command."""
    if role == "initiator":
        target = dest or pair.stock_destination(on_link=stock, **options)
        link = pair.node.connect(target, *STOCK_NAME.split("."), timeout=LIMIT)
        if ours is not None:
            ours(link)
        return Joint(pair, link, pair.peer.expect("link", link=link.id.hex()))
    arrived: queue.SimpleQueue[Link] = queue.SimpleQueue()

    def established(link: Link) -> None:
        if ours is not None:
            ours(link)
        arrived.put(link)

    inbox = pair.our_destination()
    inbox.on_link(established)
    opened = pair.peer.request("open", dest=inbox.hash.hex(), name=".".join(OUR_NAME), setup=stock, **options)
    link = arrived.get(timeout=LIMIT)
    assert link.id.hex() == opened["link"]
    inbox.close()
    return Joint(pair, link, opened)


def take_messages(collector: Collector) -> Callable[[Link], None]:
    """For `ours` of `join`: the channel opened, the type registered, the handler in place."""

    def prepare(link: Link) -> None:
        link.channel.register(Numbered)
        link.channel.on_message(collector.message)

    return prepare


def send_messages(link: Link, count: int, size: int, seed: str = "m", timeout: float = LIMIT) -> None:
    """The series whose digest `seeded.series_digest` knows."""
    for number in range(count):
        link.channel.send(Numbered(number, message_bytes(seed, number, size)), timeout=timeout)


def drain(reader: StreamReader, timeout: float = LIMIT) -> tuple[int, str]:
    """Read to the end; size and SHA-256."""
    reader.timeout = timeout
    size, total = 0, hashlib.sha256()
    while part := reader.read(1 << 20):
        size += len(part)
        total.update(part)
    return size, total.hexdigest()


def pour(writer: StreamWriter, content: bytes, timeout: float = LIMIT, piece: int = 1 << 18) -> None:
    """Write all, the end mark too, and wait until it is proved."""
    writer.timeout = timeout
    view = memoryview(content)
    with writer:
        for at in range(0, len(view), piece):
            writer.write(view[at : at + piece])


class Task:
    """A call on a thread of its own; `result` waits for it and raises what it raised."""

    def __init__(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        self._outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                self._outcome.put((call(*arguments, **options), None))
            except BaseException as error:
                self._outcome.put((None, error))

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def result(self, timeout: float = LIMIT) -> Any:
        value, error = self._outcome.get(timeout=timeout)
        self._thread.join(timeout)
        if error is not None:
            raise error
        return value


def is_broken(call: Callable[[], Any]) -> bool:
    """Whether a call ends in LinkClosed or StreamBroken."""
    try:
        call()
    except (LinkClosed, ConnectionError):
        return True
    return False
