"""Takes the engine's events and queues what applications are to be told.  Everything here is called under the lock."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rnsfast.engine.channel import Channel as EngineChannel
from rnsfast.engine.destination import Destination
from rnsfast.engine.events import AnnounceHeard, PacketArrived
from rnsfast.engine.link import Link as EngineLink
from rnsfast.engine.port import Port
from rnsfast.engine.receipts import Receipt as EngineReceipt
from rnsfast.node.dispatch import Strand
from rnsfast.node.link import Link
from rnsfast.node.mailbox import Mailbox
from rnsfast.node.waiting import Waitable
from rnsfast.wire.names import destination_hash, name_hash, split_name

if TYPE_CHECKING:
    from rnsfast.node.node import Node
    from rnsfast.node.reactor import Reactor

log = logging.getLogger(__name__)

AnnounceHandler = Callable[[AnnounceHeard], Any]
InterfaceHandler = Callable[[str], Any]


class NodeListener:
    """The runtime's end of `rnsfast.engine.events.Listener`."""

    def __init__(self, node: Node, reactor: Reactor) -> None:
        self._node, self._reactor = node, reactor
        self.strand = Strand()  # announces, saving: everything that belongs to no link and no inbox
        self._announce_handlers: list[tuple[AnnounceHandler, bytes | None]] = []
        self._path_waiters: dict[bytes, list[_PathWaiter]] = {}
        self.mailboxes: set[Mailbox] = set()  # whoever takes from these is told when the node is going down
        self._interface_handlers: list[InterfaceHandler] = []
        self._online: set[Port] = set()  # as they were last seen
        self.on_port_change: Callable[[Port], None] = lambda port: None  # of the node itself; under the lock

    def add_announce_handler(self, handler: AnnounceHandler, name: str | None) -> None:
        """`name` None means all."""
        wanted = None if name is None else name_hash(split_name(name)[0], *split_name(name)[1])
        self._announce_handlers.append((handler, wanted))

    def remove_announce_handler(self, handler: AnnounceHandler) -> None:
        """Under the lock."""
        self._announce_handlers = [entry for entry in self._announce_handlers if entry[0] != handler]

    def path_waiter(self, destination: bytes) -> _PathWaiter:
        """Somebody is going to wait for a path. Without the lock."""
        waiter = _PathWaiter(self._reactor.lock)
        with self._reactor.lock:
            self._path_waiters.setdefault(destination, []).append(waiter)
        return waiter

    def drop_path_waiter(self, destination: bytes, waiter: _PathWaiter) -> None:
        """Waits no more. Without the lock."""
        with self._reactor.lock:
            waiters = self._path_waiters.get(destination, [])
            if waiter in waiters:
                waiters.remove(waiter)
            if not waiters:
                self._path_waiters.pop(destination, None)

    def add_interface_handler(self, handler: InterfaceHandler) -> None:
        """Told each time an interface, or a connection of one, comes up; at once for those that are."""
        self._interface_handlers.append(handler)
        for port in self._online:
            self._reactor.enqueue(self.strand, lambda name=port.name: handler(name))  # type: ignore[misc]

    def port_changed(self, port: Port) -> None:
        """An interface came up or went down."""
        if not port.online:
            self._online.discard(port)
        elif port not in self._online:
            self._online.add(port)
            for handler in self._interface_handlers:
                self._reactor.enqueue(self.strand, lambda h=handler: h(port.name))  # type: ignore[misc]
        self.on_port_change(port)
        self.look_again()

    def look_again(self) -> None:
        """An interface changed, or the node is going down: whoever waits for a path looks again."""
        for waiters in self._path_waiters.values():
            self._reactor.engine.touched.update(waiters)
        self._reactor.engine.touched.update(self.mailboxes)

    # ------------------------------------------------------------------ the engine's events

    def announce_heard(self, event: AnnounceHeard) -> None:
        self._reactor.engine.touched.update(self._path_waiters.get(event.destination, ()))
        for handler, wanted in self._announce_handlers:
            if wanted is None or destination_hash(wanted, event.identity.hash) == event.destination:
                self._reactor.enqueue(self.strand, lambda h=handler: h(event))  # type: ignore[misc]

    def path_confirmed(self, destination: bytes) -> None:
        """Somebody answered for a destination with an announce that is no newer than the one we have."""
        self._reactor.engine.touched.update(self._path_waiters.get(destination, ()))

    def ratchets_rotated(self, destination: Destination) -> None:
        """An answer to a path request rotated the ratchets: save them soon."""
        inbox = destination.owner
        if inbox is not None:
            self._reactor.enqueue(self.strand, inbox._save_ring)

    def ratchet_learnt(self, destination: bytes, ratchet: bytes, unix_time: float) -> None:
        storage = self._node._storage
        if storage is not None:
            save = storage.save_peer_ratchet
            self._reactor.enqueue(self.strand, lambda: _discard(save(destination, ratchet, unix_time)))

    def packet_arrived(self, event: PacketArrived) -> None:
        if event.destination.owner is not None:
            event.destination.owner._packet(event)

    def receipt_concluded(self, receipt: EngineReceipt) -> None:
        """Who waits for it is told through `touched`."""

    def link_established(self, link: EngineLink) -> None:
        if link.initiator:
            return  # `connect` waits for it
        facade = Link(self._node, link)
        inbox = link.destination.owner
        if inbox is not None:
            inbox._link(facade)

    def link_closed(self, link: EngineLink) -> None:
        if link.owner is not None:
            link.owner._closed()

    def link_data(self, link: EngineLink, packets: list[bytes], hashes: list[bytes]) -> None:
        if link.owner is not None:
            link.owner._data(packets, hashes)

    def peer_identified(self, link: EngineLink) -> None:
        self._reactor.engine.touched.add(link)
        if link.owner is not None:
            link.owner._identified()

    def messages_arrived(self, channel: EngineChannel, messages: list[tuple[int, bytes]]) -> None:
        if channel.owner is not None:
            channel.owner._arrived(messages)


class _PathWaiter(Waitable):
    """Waits for an announce; its own owner, so that `touched` can hold it."""

    __slots__ = ()

    @property
    def owner(self) -> _PathWaiter:
        """Itself."""
        return self


def _discard(_: object) -> None:
    """For calls whose answer nobody needs."""
