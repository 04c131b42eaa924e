"""The asyncio face of a node."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Callable, Coroutine, Iterable
from time import monotonic
from typing import Any, Final

from rnsfast.aio.destinations import Inbox, Outbox
from rnsfast.aio.link import Link
from rnsfast.aio.waiting import Handler, Tasks, call, in_thread, until
from rnsfast.crypto.identity import Identity
from rnsfast.engine.events import AnnounceHeard
from rnsfast.errors import LinkTimeout
from rnsfast.interfaces.base import Interface
from rnsfast.node import node as plain_node
from rnsfast.node.config import NodeConfig
from rnsfast.node.dispatch import Strand
from rnsfast.node.mailbox import Mailbox
from rnsfast.wire.packet import SINGLE

ANNOUNCE_COST: Final = 65536  # bytes an announce counts for: about 1000 may wait for whoever iterates


class Node:
    """A node inside this process, see `rnsfast.Node`. Start it with `async with`, or `await node.start()`."""

    def __init__(self, configdir: str | os.PathLike[str] | None = None, *, strict: bool = False) -> None:
        self._adopt(plain_node.Node(configdir, strict=strict))

    @classmethod
    def from_interfaces(cls, interfaces: Iterable[Interface], config: NodeConfig | None = None) -> Node:
        """A node without files: interfaces made by hand, nothing stored, a new identity every time."""
        return cls.wrap(plain_node.Node.from_interfaces(interfaces, config))

    @classmethod
    def wrap(cls, node: plain_node.Node) -> Node:
        """The asyncio face of a node that exists."""
        self = cls.__new__(cls)
        self._adopt(node)
        return self

    def _adopt(self, node: plain_node.Node) -> None:
        self.sync = node
        self._tasks = Tasks()

    async def start(self) -> Node:
        """As `rnsfast.Node.start`, in a thread: it reads files. If it is cancelled, the node is stopped again."""
        try:
            await in_thread(self.sync.start)
        except asyncio.CancelledError:
            await in_thread(self.sync.stop)
            raise
        return self

    async def stop(self) -> None:
        """As `rnsfast.Node.stop`; waits for the handlers of this loop, which are cancelled if they take too long.

        May be awaited in a handler. If the wait is cancelled, the node stops all the same.
        """
        await in_thread(self.sync.stop)
        await self._tasks.finish()

    async def __aenter__(self) -> Node:
        return await self.start()

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    @property
    def is_running(self) -> bool:
        """Between `start` and `stop`."""
        return self.sync.is_running

    def register(self, identity: Identity | None, app: str, *aspects: str, kind: int = SINGLE) -> Inbox:
        """Receive under a name. As `rnsfast.Node.register`."""
        return Inbox(self, self.sync.register(identity, app, *aspects, kind=kind))

    def outbox(self, target: Identity | bytes | None, app: str, *aspects: str, kind: int = SINGLE) -> Outbox:
        """Send packets to somebody's destination. As `rnsfast.Node.outbox`."""
        return Outbox(self.sync.outbox(target, app, *aspects, kind=kind))

    def recall(self, destination: bytes) -> Identity | None:
        """The public half of the identity behind an address, if an announce of it was heard."""
        return self.sync.recall(destination)

    def app_data(self, destination: bytes) -> bytes | None:
        """What the destination announced last beside its keys; None if nothing."""
        return self.sync.app_data(destination)

    def has_path(self, destination: bytes) -> bool:
        """Whether a path over an interface that is up is known."""
        return self.sync.has_path(destination)

    def hops_to(self, destination: bytes) -> int | None:
        """How far it is; None if no path is known."""
        return self.sync.hops_to(destination)

    def status(self) -> dict[str, Any]:
        """What the node is doing now. As `rnsfast.Node.status`."""
        return self.sync.status()

    def announces(self, name: str | None = None) -> Announces:
        """Announces that bring news, of destinations with this full name or of all: `async for event in ...`.

        From the moment of this call to the end of the node.
        """
        return Announces(self.sync, name)

    def on_announce(self, handler: Handler, name: str | None = None) -> None:
        """Have `handler(event)` called for announces that bring news, one after the other."""
        self._tasks.spawn(self._handle_announces(self.announces(name), handler))

    async def _handle_announces(self, announces: Announces, handler: Handler) -> None:
        loop = asyncio.get_running_loop()
        async for event in announces:
            await call(loop, handler, event)

    def on_interface_up(self, handler: Handler) -> None:
        """Have `handler(name)` called whenever an interface, or a connection of one, comes up."""
        self.sync.on_interface_up(self._soon(lambda name: call(asyncio.get_running_loop(), handler, name)))

    def _soon(self, work: Callable[[Any], Coroutine[Any, Any, None]]) -> Callable[[Any], None]:
        """A plain handler that starts `work(argument)` in the current loop."""
        loop = asyncio.get_running_loop()

        def handler(argument: Any) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(lambda: self._tasks.spawn(work(argument)))

        return handler

    async def request_path(self, destination: bytes, timeout: float | None = 15.0) -> None:
        """Find a path to a destination; 0 asks and does not wait. As `rnsfast.Node.request_path`."""
        if timeout == 0:
            self.sync.request_path(destination, 0)
            return
        self.sync._check_running()
        plain_node._check_hash(destination)
        await self._find_path(destination, None if timeout is None else monotonic() + timeout, fresh=True)

    async def _find_path(self, destination: bytes, end: float | None, *, fresh: bool = False) -> None:
        reactor = self.sync._reactor
        with self.sync._search(destination, end, fresh=fresh) as search:
            while True:
                with reactor.turn as now:
                    if search.ask(now):
                        return
                await until(search.waiter, search.has_news, search.patience())

    async def connect(
        self,
        destination: bytes,
        app: str,
        *aspects: str,
        timeout: float | None = 15.0,
        identity: Identity | None = None,
    ) -> Link:
        """Open a link and wait until it can be used. As `rnsfast.Node.connect`."""
        node = self.sync
        node._check_running()
        plain_node._check_hash(destination)
        end = None if timeout is None else monotonic() + timeout
        while True:
            await self._find_path(destination, end)
            link = node._ask_for_link(destination, app, aspects)
            try:
                await until(link, link._is_decided, None if end is None else end - monotonic())
                if node._is_connected(link, identity):
                    return Link(self, link)
            except BaseException:
                link.close()
                raise
            if end is not None and monotonic() >= end:
                raise LinkTimeout(f"{destination.hex()} did not answer the link request within {timeout:.0f} s")


class Announces:
    """An endless iteration over announces. Ends with the node, or with `close`; `async with` closes it."""

    def __init__(self, node: plain_node.Node, name: str | None) -> None:
        node._check_running()
        reactor, listener = node._reactor, node._listener
        self._reactor = reactor
        self._mailbox = mailbox = Mailbox(reactor, Strand(), lambda item: None)

        def heard(event: AnnounceHeard) -> None:
            with reactor.turn:
                mailbox.put(event, ANNOUNCE_COST)

        def leave() -> None:
            with reactor.turn:
                listener.remove_announce_handler(heard)
                listener.mailboxes.discard(mailbox)
                reactor.engine.touched.add(mailbox)

        with reactor.turn:
            mailbox.pull()
            listener.add_announce_handler(heard, name)
            listener.mailboxes.add(mailbox)
        self._listener = listener
        self._finalizer = weakref.finalize(self, leave)
        self._finalizer.atexit = False

    def close(self) -> None:
        """Listen no more. Idempotent."""
        self._finalizer()

    def __aiter__(self) -> Announces:
        return self

    async def __anext__(self) -> AnnounceHeard:
        mailbox = self._mailbox
        await until(mailbox, lambda: mailbox.has_items or self._reactor.closed or not self._finalizer.alive)
        with self._reactor.lock:
            event: AnnounceHeard | None = mailbox.take()
        if event is None:
            raise StopAsyncIteration
        return event

    async def __aenter__(self) -> Announces:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()
