"""The asyncio face of a link."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Generator, Sequence
from typing import TYPE_CHECKING, Any

from rnsfast.aio.channel import Channel
from rnsfast.aio.streams import StreamReader, StreamWriter
from rnsfast.aio.waiting import Handler, call, until
from rnsfast.crypto.identity import Identity
from rnsfast.engine.linkstate import Reason, State
from rnsfast.engine.receipts import Status
from rnsfast.engine.streams import SEND_BUFFER
from rnsfast.node import link as plain_link
from rnsfast.node.streams import Compression
from rnsfast.node.waiting import Waitable

if TYPE_CHECKING:
    from rnsfast.aio.node import Node


class Receipt(Awaitable[bool]):
    """Tells whether a packet was proved by its receiver: `proved = await receipt`."""

    def __init__(self, receipt: plain_link.Receipt) -> None:
        self.sync = receipt

    @property
    def status(self) -> Status:
        """SENT, DELIVERED, FAILED or CULLED."""
        return self.sync.status

    @property
    def rtt(self) -> float | None:
        """Seconds from sending to the proof; None without one."""
        return self.sync.rtt

    async def wait(self, timeout: float | None = None) -> bool:
        """True when the packet is proved, False if that failed or `timeout` seconds passed."""
        await until(self.sync, lambda: self.sync.status is not Status.SENT, timeout)
        return self.sync.status is Status.DELIVERED

    def __await__(self) -> Generator[Any, None, bool]:
        return self.wait().__await__()


class Link:
    """An encrypted link, see `rnsfast.Link`. With `async with` it is closed at the end of the block."""

    def __init__(self, node: Node, link: plain_link.Link, *, greeted: bool = True) -> None:
        self.sync = link
        self._node = node
        self._channel: Channel | None = None
        self._packet_handler: tuple[asyncio.AbstractEventLoop, Handler] | None = None
        self._greeted = greeted  # the on_link handler has returned: other handlers may run
        self._greeting = Waitable(link._reactor.lock)

    def _greet(self) -> None:
        with self.sync._reactor.lock:
            self._greeted = True
            rings = self._greeting.notify()
        for ring in rings:
            ring()

    async def _until_greeted(self) -> None:
        await until(self._greeting, lambda: self._greeted)

    @property
    def id(self) -> bytes:
        """The link id, 16 bytes, the same at both ends."""
        return self.sync.id

    @property
    def is_initiator(self) -> bool:
        """Whether this end asked for the link."""
        return self.sync.is_initiator

    @property
    def is_active(self) -> bool:
        """Established and not closed."""
        return self.sync.is_active

    @property
    def state(self) -> State:
        """PENDING, HANDSHAKE, ACTIVE, STALE or CLOSED."""
        return self.sync.state

    @property
    def reason(self) -> Reason | None:
        """Why it was closed; None while it is not."""
        return self.sync.reason

    @property
    def closing(self) -> str:
        """Why it was closed, in words."""
        return self.sync.closing

    @property
    def mtu(self) -> int:
        """Bytes of the largest packet on this link."""
        return self.sync.mtu

    @property
    def mdu(self) -> int:
        """The most bytes `send` takes: 431 if the link MTU is 500."""
        return self.sync.mdu

    @property
    def rtt(self) -> float:
        """Seconds of round trip, measured in the handshake."""
        return self.sync.rtt

    @property
    def destination_hash(self) -> bytes:
        """The address the link was asked for, 16 bytes."""
        return self.sync.destination_hash

    @property
    def remote_identity(self) -> Identity | None:
        """Who is at the other end."""
        return self.sync.remote_identity

    def send(self, data: bytes) -> Receipt:
        """Send one packet, at most `mdu` bytes; never waits. The receipt can be awaited."""
        return Receipt(self.sync.send(data))

    def send_many(self, packets: Sequence[bytes]) -> None:
        """Send packets in order, without receipts; never waits. As `rnsfast.Link.send_many`."""
        self.sync.send_many(packets)

    def on_packet(self, handler: Handler) -> None:
        """Have `handler(data)` called for each packet, in order. Up to 1 MiB that came before is delivered now."""
        first, self._packet_handler = self._packet_handler is None, (asyncio.get_running_loop(), handler)
        if first:
            with self.sync._reactor.turn:
                self.sync._packets.pull()
            self._node._tasks.spawn(self._handle_packets())

    async def _handle_packets(self) -> None:
        await self._until_greeted()
        mailbox = self.sync._packets
        while True:
            await until(mailbox, lambda: mailbox.has_items or not self.sync._engine.is_open)
            with self.sync._reactor.lock:
                item = mailbox.take()
            if item is None or self._packet_handler is None:
                return
            self.sync._prove_if_wanted([item])
            await call(*self._packet_handler, item[0])

    @property
    def channel(self) -> Channel:
        """The link's message channel. Opened when first asked for; what arrived before is kept for it."""
        if self._channel is None:
            self._channel = Channel(self, self.sync.channel)
        return self._channel

    def open_writer(
        self, stream_id: int = 0, *, compression: Compression = "auto", buffer: int = SEND_BUFFER
    ) -> StreamWriter:
        """Write a byte stream that the peer reads under the same `stream_id`. As `rnsfast.Link.open_writer`."""
        return StreamWriter(self.sync.open_writer(stream_id, compression=compression, buffer=buffer))

    def open_reader(self, stream_id: int = 0) -> StreamReader:
        """Read the byte stream that the peer writes under `stream_id`. As `rnsfast.Link.open_reader`."""
        return StreamReader(self.sync.open_reader(stream_id))

    def identify(self, identity: Identity) -> None:
        """Reveal `identity` to the responder. As `rnsfast.Link.identify`."""
        self.sync.identify(identity)

    async def wait_identified(self, timeout: float | None = None) -> Identity | None:
        """Wait until the initiator has revealed itself. None if `timeout` seconds pass or the link closes first."""
        engine = self.sync._engine
        await until(self.sync, lambda: engine.remote_identity is not None or not engine.is_open, timeout)
        return engine.remote_identity

    def on_identified(self, handler: Handler) -> None:
        """Have `handler(identity)` called when the initiator reveals itself; at once if it has."""
        self._node._tasks.spawn(self._handle_identified(handler))

    async def _handle_identified(self, handler: Handler) -> None:
        await self._until_greeted()
        identity = await self.wait_identified()
        if identity is not None and not self.is_initiator:
            await call(asyncio.get_running_loop(), handler, identity)

    def on_close(self, handler: Handler) -> None:
        """Have `handler(link)` called once when the link is closed, whoever did it; at once if it is."""
        self._node._tasks.spawn(self._handle_close(handler))

    async def _handle_close(self, handler: Handler) -> None:
        await self._until_greeted()
        await self.wait_closed()
        await call(asyncio.get_running_loop(), handler, self)

    def close(self) -> None:
        """Tell the peer and close. Idempotent, never waits. Close writers, or flush the channel, first."""
        self.sync.close()

    async def wait_closed(self, timeout: float | None = None) -> bool:
        """Wait until the link is closed. False if `timeout` seconds pass first."""
        return await until(self.sync, lambda: not self.sync._engine.is_open, timeout)

    async def __aenter__(self) -> Link:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<aio.{repr(self.sync)[1:]}"

    def __str__(self) -> str:
        return str(self.sync)
