"""The thread-facing channel of a link.  Protocol 05."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from time import monotonic
from typing import TYPE_CHECKING, Any

from rnsfast.engine.channel import Channel as EngineChannel
from rnsfast.engine.channel import Ticket
from rnsfast.errors import ChannelFull, LinkClosed, MessageTooLarge
from rnsfast.node.message import Message, check_registrable, type_of
from rnsfast.node.waiting import Waitable
from rnsfast.wire.drop import Drop

if TYPE_CHECKING:
    from rnsfast.node.link import Link

log = logging.getLogger(__name__)

Handler = Callable[[Any], Any]


class Senders:
    """Who waits for room in an asyncio loop, in order of arrival; the owner of their tickets."""

    __slots__ = ("_engine", "_give_back", "_lock", "_ringing", "_rings")

    def __init__(self, engine: EngineChannel, lock: Any, give_back: Callable[[list[Ticket]], object]) -> None:
        self._engine = engine
        self._give_back = give_back
        self._lock = lock  # the node's
        self._ringing = threading.Lock()  # taken before the node's: who was granted room first is rung first
        self._rings: OrderedDict[Ticket, Callable[[], object]] = OrderedDict()

    @property
    def has_waiters(self) -> bool:
        """Under the lock."""
        return bool(self._rings)

    def add(self, ticket: Ticket, ring: Callable[[], object], *, first: bool) -> None:
        """Have `ring` called once when the ticket is granted its room, or the channel is closed. Under the lock.

        One that was here keeps its place. `first` is for one that lost its room again.
        """
        ticket.owner = self
        self._rings[ticket] = ring
        if first:
            self._rings.move_to_end(ticket, last=False)

    def remove(self, tickets: list[Ticket]) -> None:
        """They wait no more. Under the lock."""
        for ticket in tickets:
            self._rings.pop(ticket, None)

    def notify(self) -> list[Callable[[], object]]:
        """What is to be done after the lock is released. Under the lock."""
        return [self._ring]

    def _ring(self) -> None:
        """Room is granted in order of arrival, so it is the first ones that are rung, if any."""
        lost: list[Ticket] = []
        with self._ringing:
            rings = []
            with self._lock:
                while self._rings:
                    ticket = next(iter(self._rings))
                    if not (ticket.granted or self._engine.closed):
                        break
                    rings.append((ticket, self._rings.pop(ticket)))
            for ticket, ring in rings:
                try:
                    ring()
                except RuntimeError:
                    log.debug("link %s: a sender's event loop is closed", self._engine.link)
                    lost.append(ticket)
        if lost:
            self._give_back(lost)


class Channel(Waitable):
    """A reliable, ordered message pipe, `link.channel`. One for each end of a link, the same object every time.

    Messages that arrive are kept until somebody takes them: handlers added with `on_message`, or calls of `receive`.
    Register the types first. Handlers run on a callback thread, one message at a time, and may call anything here.
    """

    __slots__ = ("_delivering", "_engine", "_handlers", "_inbox", "_link", "_reactor", "_senders", "_types")

    def __init__(self, link: Link, engine: EngineChannel) -> None:
        super().__init__(link._reactor.lock)
        self._link = link
        self._reactor = link._reactor
        self._engine = engine
        self._types: dict[int, type] = {}
        self._handlers: list[Handler] = []
        self._inbox: deque[tuple[int, bytes]] = deque()  # bounded by the engine's backlog limit
        self._senders = Senders(engine, self._lock, self._withdraw)
        self._delivering = False  # a batch is in the hands of the handlers, the rest of it may come back
        engine.owner = self

    # ------------------------------------------------------------------ types and handlers

    def register(self, *classes: type) -> None:
        """Make messages of these classes understood when they arrive. A later class of the same number replaces.

        MessageTypeError if one is no message class, its number is reserved, or it cannot be made without arguments.
        """
        for cls in classes:
            number = check_registrable(cls)
            with self._reactor.turn:
                self._types[number] = cls

    def on_message(self, handler: Handler) -> None:
        """Have `handler(message)` called for each message, after the handlers added before it.

        A handler that returns something true ends the chain for this message. One that raises is logged, and the
        chain goes on. Adding a handler twice has no effect. What has arrived already is delivered now.
        """
        with self._reactor.turn:
            if handler not in self._handlers:
                self._handlers.append(handler)
            if self._inbox:
                self._reactor.enqueue(self._link._strand, self._deliver)

    def remove_handler(self, handler: Handler) -> None:
        """Effective from the next message; an unknown handler is ignored."""
        with self._reactor.turn:
            if handler in self._handlers:
                self._handlers.remove(handler)

    def _arrived(self, messages: list[tuple[int, bytes]]) -> None:
        """The engine has messages. Under the lock."""
        waiting = bool(self._inbox)
        self._inbox.extend(messages)
        if self._handlers:
            if not waiting:
                self._reactor.enqueue(self._link._strand, self._deliver)
        else:
            self._reactor.engine.touched.add(self._engine)

    def _deliver(self) -> None:
        """On the link's strand: everything there is, in order, as long as there are handlers."""
        done: list[tuple[int, bytes]] = []
        batch: list[tuple[int, bytes]] = []
        while True:
            with self._reactor.turn:
                self._engine.messages_consumed(done)
                self._inbox.extendleft(reversed(batch[len(done) :]))  # no handler is left: `receive` or the next one
                self._delivering = bool(self._handlers and self._inbox)
                if not self._delivering:
                    self._reactor.engine.touched.add(self._engine)
                    return
                batch, done = list(self._inbox), []
                self._inbox.clear()
            for item in batch:
                if not self._handlers:
                    break
                done.append(item)
                message = self._unpack(*item)
                if message is not None:
                    self._offer(message)

    def _offer(self, message: Any) -> None:
        for handler in tuple(self._handlers):  # a copy: handlers may come and go, effective from the next message
            try:
                if handler(message):
                    return
            except Exception:
                log.exception("a message handler of link %s raised", self._link)

    def _unpack(self, number: int, payload: bytes) -> Any | None:
        """The message, None if its type is unknown or it cannot be read: counted, reported and skipped."""
        cls = self._types.get(number)
        problem, error = Drop.CHANNEL_TYPE, "nobody registered that type"
        if cls is not None:
            try:
                message = cls()
                message.unpack(payload)
                return message
            except Exception as exception:
                problem, error = Drop.CHANNEL_PAYLOAD, f"{cls.__name__}.unpack raised {exception!r}"
        with self._lock:
            drops = self._engine.link.port.drops
            drops[problem] += 1
            first = drops[problem] == 1
        if first:
            log.warning("link %s: a message of type %#06x was skipped: %s", self._link, number, error)
        return None

    def receive(self, timeout: float | None = None) -> Any:
        """Wait for the next message and return it; for programs without handlers.

        Raises:
            TimeoutError: none came within `timeout` seconds; None waits for ever.
            LinkClosed: the link is closed and everything that had arrived has been taken.
        """
        self._reactor.check_may_block()
        end = None if timeout is None else monotonic() + timeout
        while True:
            with self._lock:
                remaining = None if end is None else end - monotonic()
                self.wait_for(self._has_news, remaining)
                item = self._take()
            if item is None:
                raise TimeoutError(f"no message within {timeout} s")
            message = self._unpack(*item)
            if message is not None:
                return message

    def _has_news(self) -> bool:
        return not self._delivering and (bool(self._inbox) or self._engine.closed)

    def _take(self) -> tuple[int, bytes] | None:
        """Under the lock: the oldest message; None if there is none yet."""
        if self._delivering:
            return None
        if self._inbox:
            item = self._inbox.popleft()
            self._engine.messages_consumed([item])
            return item
        if self._engine.closed:
            raise self._closed()
        return None

    # ------------------------------------------------------------------ sending

    @property
    def mdu(self) -> int:
        """The most payload bytes of one message."""
        return self._engine.mdu

    @property
    def is_ready(self) -> bool:
        """Whether a message would leave at once. Never waits, never raises."""
        with self._lock:
            return self._engine.is_ready

    def wait_ready(self, timeout: float | None = None) -> bool:
        """Wait until a message can be sent. False if `timeout` seconds pass first.

        Somebody else may take the room before you do; `send` waits and sends in one step.

        Raises LinkClosed when it can never become ready.
        """
        self._reactor.check_may_block()
        engine = self._engine
        with self._lock:
            self.wait_for(lambda: engine.closed or engine.is_ready, timeout)
            if engine.closed:
                raise self._closed()
            return engine.is_ready

    def send(self, message: Message, timeout: float | None = None) -> Ticket:
        """Send one message; waits for room in the window. Senders that wait are served in order of arrival.

        Messages go out before bytes that streams of the same link have buffered.

        Args:
            message: an object with MSGTYPE and pack().
            timeout: seconds to wait for room; 0 does not wait, None waits for ever.

        Returns:
            A ticket; `flush` waits for the proof of everything sent.

        Raises:
            ChannelFull: no room within `timeout`; nothing was sent.
            LinkClosed: before or while waiting; nothing was sent.
            MessageTooLarge, MessageTypeError: the message cannot be sent at all.

        Protocol: 05, section 4. Threads: any but the reactor's; blocks only its caller.
        """
        return self.send_many((message,), timeout)[0]

    def send_many(self, messages: Iterable[Message], timeout: float | None = None) -> list[Ticket]:
        """As `send` for several messages in a row: sealed together and, as far as the window allows, sent in one go.

        Raises ChannelFull or LinkClosed if not all could be sent: those before the first unsent one are on their way,
        and `unsent` of ChannelFull says how many are not.
        """
        tickets = [self._ticket(message) for message in messages]
        if not tickets:
            return tickets
        engine, last = self._engine, tickets[-1]
        if timeout is None or timeout > 0:
            self._reactor.check_may_block()
        unsent = 0
        try:
            with self._reactor.turn as now:
                if engine.closed:
                    raise self._closed()
                if engine.send_many(tickets, now):
                    return tickets
                last.owner = waiter = Waitable(self._lock)
            with self._lock:
                waiter.wait_for(lambda: last.sent or engine.closed, timeout)
        finally:
            last.owner = None
            if not last.sent:
                unsent = self._withdraw(tickets)
        if not unsent:
            return tickets
        if engine.closed:
            raise self._closed()
        raise ChannelFull(
            f"the window of link {self._link} stayed full for {timeout} s, {_count(unsent)} not sent", unsent
        )

    def _withdraw(self, tickets: list[Ticket]) -> int:
        """Take back what has not been sent; returns how many that are. Room that was kept for it goes to the next."""
        with self._reactor.turn as now:
            unsent = sum([self._engine.cancel(ticket) for ticket in tickets])
            self._senders.remove(tickets)
            self._engine.pump(now)
            return unsent

    def _defer(self, message: Message, ring: Callable[[], object]) -> Ticket:
        """The first half of a send that can be given up until its last moment: `ring` is called when there is room.

        If the ticket is not sent, `_claim` must follow, or `_withdraw`. Raises as `send`.
        """
        ticket = self._ticket(message)
        with self._reactor.turn as now:
            if self._engine.closed:
                raise self._closed()
            if not self._engine.send(ticket, now):
                ticket.deferred = True
                self._senders.add(ticket, ring, first=False)
        return ticket

    def _claim(self, ticket: Ticket, ring: Callable[[], object]) -> bool:
        """The second half, after `ring`. False: the room was gone again, wait for the next `ring`."""
        with self._reactor.turn as now:
            if self._engine.closed:
                raise self._closed()
            had_room = ticket.granted
            if self._engine.claim(ticket, now):
                self._senders.remove([ticket])
                ticket.owner = None
                return True
            self._senders.add(ticket, ring, first=had_room)
            return False

    def _ticket(self, message: Message) -> Ticket:
        number, payload = type_of(message), message.pack()
        if len(payload) > self._engine.mdu:
            raise MessageTooLarge(len(payload), self._engine.mdu)
        return Ticket(number, payload)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until the peer has proved everything that was sent. False if `timeout` seconds pass first.

        A proof says that the peer's node has a message, not that its application has seen it.

        Raises LinkClosed if the link is closed before.
        """
        self._reactor.check_may_block()
        engine = self._engine
        with self._lock:
            self.wait_for(lambda: engine.closed or engine.is_idle, timeout)
            if engine.closed:
                raise self._closed()
            return engine.is_idle

    def _closed(self) -> LinkClosed:
        return LinkClosed(self._engine.link.link_id, self._engine.link.closing)


def _count(unsent: int) -> str:
    return "1 message was" if unsent == 1 else f"{unsent} messages were"
