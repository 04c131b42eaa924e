"""The asyncio face of a channel."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from time import monotonic
from typing import TYPE_CHECKING, Any

from rnsfast.aio.waiting import Handler, bell, call, until, wake
from rnsfast.engine.channel import Ticket
from rnsfast.errors import ChannelFull, LinkClosed
from rnsfast.node import channel as plain_channel
from rnsfast.node.message import Message

if TYPE_CHECKING:
    from rnsfast.aio.link import Link


class Channel:
    """A reliable, ordered message pipe, `link.channel`, see `rnsfast.Channel`.

        channel.register(Note)
        await channel.send(Note("hello"))
        async for message in channel: ...

    The iteration ends when the link is closed and everything that had arrived has been taken; `link.reason` and
    `link.closing` say why it was.
    """

    def __init__(self, link: Link, channel: plain_channel.Channel) -> None:
        self.sync = channel
        self.link = link
        self._handlers: list[tuple[asyncio.AbstractEventLoop, Handler]] = []
        self._handling = False

    @property
    def mdu(self) -> int:
        """The most payload bytes of one message."""
        return self.sync.mdu

    @property
    def is_ready(self) -> bool:
        """Whether a message would leave at once."""
        return self.sync.is_ready

    def register(self, *classes: type) -> None:
        """Make messages of these classes understood when they arrive. As `rnsfast.Channel.register`."""
        self.sync.register(*classes)

    async def ready(self) -> None:
        """Wait until a message can be sent. Raises LinkClosed when it can never become so."""
        await self.wait_ready()

    async def wait_ready(self, timeout: float | None = None) -> bool:
        """As `ready`. False if `timeout` seconds pass first."""
        engine = self.sync._engine
        await until(self.sync, lambda: engine.closed or engine.is_ready, timeout)
        with self.sync._lock:
            if engine.closed:
                raise self.sync._closed()
            return engine.is_ready

    async def send(self, message: Message, timeout: float | None = None) -> Ticket:
        """Send one message; waits for room in the window. If it is cancelled, nothing was queued.

        Tasks of one loop are served in order of arrival.

        Raises as `rnsfast.Channel.send`: ChannelFull, LinkClosed, MessageTooLarge, MessageTypeError.
        """
        loop, channel = asyncio.get_running_loop(), self.sync
        if timeout is not None and timeout <= 0:
            return channel.send(message, timeout=0)
        waiter, ring = bell(loop)
        ticket = channel._defer(message, ring)
        if ticket.sent:
            return ticket
        end = None if timeout is None else loop.time() + timeout
        try:
            while True:
                timer = None if end is None else loop.call_at(end, wake, waiter)
                try:
                    await waiter
                finally:
                    if timer is not None:
                        timer.cancel()
                waiter, ring = bell(loop)
                if channel._claim(ticket, ring):
                    return ticket
                if end is not None and loop.time() >= end:
                    raise ChannelFull(f"the window of link {self.link} stayed full for {timeout} s, nothing was sent")
        except BaseException:
            channel._withdraw([ticket])
            raise

    async def send_many(self, messages: Iterable[Message]) -> None:
        """Send messages in a row, as many in one go as the window allows. If it is cancelled, the first are sent."""
        rest = list(messages)
        while rest:
            try:
                self.sync.send_many(rest, timeout=0)
                return
            except ChannelFull as full:
                rest = rest[len(rest) - full.unsent :]
            await self.send(rest.pop(0))

    async def flush(self, timeout: float | None = None) -> bool:
        """Wait until the peer has proved everything that was sent. False if `timeout` seconds pass first."""
        engine = self.sync._engine
        await until(self.sync, lambda: engine.closed or engine.is_idle, timeout)
        with self.sync._lock:
            if engine.closed:
                raise self.sync._closed()
            return engine.is_idle

    async def receive(self, timeout: float | None = None) -> Any:
        """Wait for the next message. TimeoutError; LinkClosed once everything that had arrived has been taken."""
        end = None if timeout is None else monotonic() + timeout
        while True:
            remaining = None if end is None else end - monotonic()
            news = await until(self.sync, self.sync._has_news, remaining)
            with self.sync._reactor.turn:
                item = self.sync._take()  # None: another task was faster
            if item is not None:
                message = self.sync._unpack(*item)
                if message is not None:
                    return message
            elif not news:
                raise TimeoutError(f"no message within {timeout} s")

    def __aiter__(self) -> Channel:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self.receive()
        except LinkClosed:
            raise StopAsyncIteration from None

    def on_message(self, handler: Handler) -> None:
        """Have `handler(message)` called for each message, after the handlers added before it.

        One that returns something true ends the chain for this message. Adding a handler twice has no effect. On the
        responder's side the first message is delivered when the on_link handler has returned.
        """
        entry = (asyncio.get_running_loop(), handler)
        if entry not in self._handlers:
            self._handlers.append(entry)
        if not self._handling:
            self._handling = True
            self.link._node._tasks.spawn(self._handle_messages())

    def remove_handler(self, handler: Handler) -> None:
        """Effective from the next message; an unknown handler is ignored."""
        self._handlers = [entry for entry in self._handlers if entry[1] != handler]

    async def _handle_messages(self) -> None:
        channel = self.sync
        try:
            await self.link._until_greeted()
            while True:
                await until(channel, channel._has_news)
                if not self._handlers:
                    return  # the last one has gone: kept for `receive`, or for the next one
                with channel._reactor.turn:
                    try:
                        item = channel._take()
                    except LinkClosed:
                        return
                message = None if item is None else channel._unpack(*item)
                if message is not None:
                    await self._offer(message)
        finally:
            self._handling = False

    async def _offer(self, message: Any) -> None:
        for loop, handler in tuple(self._handlers):
            if await call(loop, handler, message):
                return
