"""The channel of one transfer: messages wait in a queue for the thread that leads it."""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final, TypeVar

from rnsfast.errors import ChannelFull, LinkClosed
from rnsfast.files.errors import ProtocolFault, TransferError
from rnsfast.files.messages import MESSAGES, FileMessage
from rnsfast.node.link import Link

MAX_WAITING: Final = 16  # messages nobody has taken yet; a transfer has three. Then the link is closed
SEND_WITHIN: Final = 60.0  # seconds for a message to find room in the window
LAST_WORDS: Final = 5.0  # seconds for messages that came before a link's end to be handed over

M = TypeVar("M", bound=FileMessage)


class LinkEnded(TransferError):
    """The link was closed while a message was expected."""


class Conversation:
    """Registers the five types on a link; made before the first message can come.

    Args:
        link: an active link.
        first: called with each message on a callback thread before it is queued; if it answers True, it is not.
        ended: called on a callback thread when the link has ended.
    """

    def __init__(
        self,
        link: Link,
        first: Callable[[FileMessage], bool] = lambda message: False,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self.link = link
        self._first, self._ended = first, ended
        self._messages: SimpleQueue[FileMessage | None] = SimpleQueue()  # None: the link has ended
        link.channel.register(*MESSAGES)
        link.channel.on_message(self._on_message)
        link.on_close(self._on_close)

    def _on_close(self, link: Link) -> None:
        self._messages.put(None)
        self._ended()

    def _on_message(self, message: FileMessage) -> None:
        if self._first(message):
            return
        if self._messages.qsize() >= MAX_WAITING:
            self.link.close()
            return
        self._messages.put(message)

    def send(self, message: FileMessage, within: float = SEND_WITHIN) -> None:
        """Send, waiting for room. TransferError if the link has ended or the other side takes nothing."""
        try:
            self.link.channel.send(message, timeout=within)
        except LinkClosed as error:
            raise LinkEnded(f"the link ended: {error.reason}") from error
        except ChannelFull as error:
            raise TransferError(f"the other side took nothing for {within:.0f} s") from error

    def next(self, within: float | None, what: str) -> FileMessage:
        """The next message. LinkEnded if the link ends first, TimeoutError after `within` seconds."""
        try:
            message = self._messages.get(timeout=within)
        except Empty:
            raise TimeoutError(f"no {what} came within {within:.0f} s") from None
        if message is None:
            self._messages.put(None)
            raise LinkEnded(f"the link ended before the {what}: {self.link.closing}")
        if message.fault is not None:
            raise ProtocolFault(message.fault)
        return message

    def expect(self, kind: type[M], within: float | None, what: str) -> M:
        """As `next`, and ProtocolFault if it is of another kind."""
        message = self.next(within, what)
        if not isinstance(message, kind):
            raise ProtocolFault(f"the other side sent {type(message).__name__.upper()} where the {what} was due")
        return message

    def last_words(self) -> FileMessage | None:
        """After the link's end: the first message that came before it and nobody has taken."""
        try:
            message = self._messages.get(timeout=LAST_WORDS)
        except Empty:
            return None
        if message is None:
            self._messages.put(None)
        return message
