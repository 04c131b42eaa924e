"""The asyncio face of destinations and receipts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from rnsfast.aio.link import Link, Receipt
from rnsfast.aio.waiting import Handler, call, in_thread, until
from rnsfast.crypto.identity import Identity
from rnsfast.node import destinations as plain_destinations
from rnsfast.node import link as plain_link

if TYPE_CHECKING:
    from rnsfast.aio.node import Node


class Inbox:
    """A destination of ours that receives, see `rnsfast.Inbox`."""

    def __init__(self, node: Node, inbox: plain_destinations.Inbox) -> None:
        self.sync = inbox
        self._node = node
        self._packet_handler: tuple[asyncio.AbstractEventLoop, Handler] | None = None

    @property
    def hash(self) -> bytes:
        """The address, 16 bytes."""
        return self.sync.hash

    @property
    def name(self) -> str:
        """The dotted name."""
        return self.sync.name

    @property
    def identity(self) -> Identity | None:
        """Whose it is; None for PLAIN destinations."""
        return self.sync.identity

    def on_link(self, handler: Handler) -> None:
        """Have `handler(link)` called for each link that is established to this destination, each in its own task.

        Packets and messages that arrive before it has returned are kept until then: 1 MiB of packets, 48 messages if it
        has not asked for the channel. Set the link's own handlers inside it.
        """
        loop = asyncio.get_running_loop()

        async def greet(link: plain_link.Link) -> None:
            wrapped = Link(self._node, link, greeted=False)
            try:
                await call(loop, handler, wrapped)
            finally:
                wrapped._greet()

        self.sync.on_link(self._node._soon(greet))

    def on_packet(self, handler: Handler) -> None:
        """Have `handler(data)` called for each packet that comes to this destination outside links, in order."""
        first, self._packet_handler = self._packet_handler is None, (asyncio.get_running_loop(), handler)
        if first:
            with self.sync._reactor.turn:
                self.sync._packets.pull()
                self._node.sync._listener.mailboxes.add(self.sync._packets)
            self._node._tasks.spawn(self._handle_packets())

    async def _handle_packets(self) -> None:
        mailbox, reactor = self.sync._packets, self.sync._reactor
        while True:
            await until(mailbox, lambda: mailbox.has_items or reactor.closed)
            with reactor.lock:
                event = mailbox.take()
            if event is None or self._packet_handler is None:
                return
            self.sync._prove_if_wanted(event)
            await call(*self._packet_handler, event.data)

    @property
    def accepts_links(self) -> bool:
        """Whether link requests are answered. True by default."""
        return self.sync.accepts_links

    @accepts_links.setter
    def accepts_links(self, value: bool) -> None:
        self.sync.accepts_links = value

    @property
    def app_data(self) -> bytes | None:
        """Announced when an announce brings none of its own, also in answers to path requests."""
        return self.sync.app_data

    @app_data.setter
    def app_data(self, value: bytes | None) -> None:
        self.sync.app_data = value

    def set_proofs(self, strategy: str, decide: Callable[[bytes], bool] | None = None) -> None:
        """What is proved of packets received. As `rnsfast.Inbox.set_proofs`; `decide` is a plain function."""
        self.sync.set_proofs(strategy, decide)

    def set_group_key(self, key: bytes) -> None:
        """The shared key of a GROUP destination, 64 bytes (32 accepted)."""
        self.sync.set_group_key(key)

    async def enable_ratchets(self, path: str | os.PathLike[str], *, enforce: bool = False) -> None:
        """As `rnsfast.Inbox.enable_ratchets`, in a thread: it writes a file."""
        await in_thread(partial(self.sync.enable_ratchets, path, enforce=enforce))

    async def announce(self, app_data: bytes | None = None) -> bool:
        """Tell the network that this destination is here. False if no interface is up.

        In a thread if there are ratchets, which may have to be written to their file first.
        """
        if self.sync._destination.ratchets is None:
            return self.sync.announce(app_data)
        return bool(await in_thread(partial(self.sync.announce, app_data)))

    def close(self) -> None:
        """Receive no more. Links that exist go on."""
        self.sync.close()

    def __repr__(self) -> str:
        return f"<aio.{repr(self.sync)[1:]}"


class Outbox:
    """A destination of somebody else that packets are sent to, see `rnsfast.Outbox`."""

    def __init__(self, outbox: plain_destinations.Outbox) -> None:
        self.sync = outbox

    @property
    def hash(self) -> bytes:
        """The address, 16 bytes."""
        return self.sync.hash

    @property
    def mdu(self) -> int:
        """The most bytes `send` takes."""
        return self.sync.mdu

    def set_group_key(self, key: bytes) -> None:
        """The shared key of a GROUP destination, 64 bytes (32 accepted)."""
        self.sync.set_group_key(key)

    def send(self, data: bytes) -> Receipt | None:
        """Send one packet; never waits. Its receipt can be awaited; PLAIN destinations prove nothing and give None."""
        receipt = self.sync.send(data)
        return None if receipt is None else Receipt(receipt)
