"""The sending end.  docs/file-protocol.md, Course."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Final, NoReturn

from rnsfast.crypto.identity import Identity
from rnsfast.errors import LinkClosed, NodeClosed
from rnsfast.files.errors import (
    Interrupted,
    NotAReceiver,
    NotStored,
    OutcomeUnknown,
    ProtocolFault,
    Refused,
    SourceFault,
    TransferError,
)
from rnsfast.files.messages import APP, ASPECT, Accept, Digest, FileMessage, Offer, Refuse, Result
from rnsfast.files.source import Source
from rnsfast.files.talk import Conversation, LinkEnded
from rnsfast.node.link import Link
from rnsfast.node.node import Node
from rnsfast.node.streams import Compression, StreamWriter

CHUNK: Final = 1 << 20  # bytes read of the source at a time
STREAM: Final = 1
ANSWER_WITHIN: Final = 60.0  # seconds for ACCEPT or REFUSE (docs/file-protocol.md)
RESULT_WITHIN: Final = 60.0  # seconds for RESULT after DIGEST (docs/file-protocol.md)
REPORT_EVERY: Final = 0.25  # seconds; a wait for the window is interrupted so often to report progress
ALMOST: Final = 0.999  # the most a fraction is before the receiver has confirmed


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a transfer is. Sizes are bytes of the file, before compression."""

    sent: int  # handed to the link's window
    size: int | None  # None if it is not known before the end
    confirmed: bool = False  # the receiver has the file, with the same digest

    @property
    def fraction(self) -> float | None:
        """0 to 1, and 1 only if `confirmed`; None if the size is not known."""
        if self.confirmed:
            return 1.0
        if self.size is None:
            return None
        return min(self.sent / self.size, ALMOST) if self.size else 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """A file that arrived."""

    size: int  # bytes
    sha256: bytes  # as the receiver and the sender computed it
    saved_as: str | None  # the name the receiver gave it
    seconds: float  # from the offer to the result
    carried: int  # bytes of content that crossed the link, after compression


class Sender:
    """Sends one file; `run` once, on a thread that may wait. `cancel` from any other.

    Args:
        node: a running node.
        destination: the receiver's hash, 16 bytes.
        source: what to send, see `open_source`. It is not closed.
        name: the name to offer; None takes the source's.
        identity: whom to identify as, for receivers with an allow list.
        compression: `auto`, `never` or `always`.
        on_progress: called with a Progress on the thread of `run`, several times a second.
    """

    def __init__(
        self,
        node: Node,
        destination: bytes,
        source: Source,
        *,
        name: str | None = None,
        identity: Identity | None = None,
        compression: Compression = "auto",
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        self._node, self._destination, self._source = node, destination, source
        self._name = source.offered_name if name is None else name
        self._identity, self._compression = identity, compression
        self._on_progress = on_progress
        self._digest = hashlib.sha256()
        self._lock = threading.Lock()
        self._cancelled = False
        self._answered = False  # to the offer
        self._told = False  # the digest
        self._link: Link | None = None
        self.sent = 0  # bytes read of the source and given to the stream

    # ------------------------------------------------------------------ any thread

    def cancel(self) -> bool:
        """Give up: `run` raises Interrupted soon. False if it still looks for a path: then stop the node to end it."""
        with self._lock:
            self._cancelled = True
            link = self._link
        self._source.interrupt()
        if link is not None:
            link.close()
        return link is not None

    # ------------------------------------------------------------------ the thread of `run`

    def run(self, timeout: float | None = 30.0) -> Outcome:
        """Send the file. `timeout` is seconds for path and link together.

        Raises:
            PathNotFound, LinkTimeout, NodeClosed: as `Node.connect`.
            NotAReceiver: the address has another name than rnsfast.files.
            Refused: the receiver did not want the file.
            NotStored: the receiver could not keep it.
            SourceFault: the source cannot be read, or changed its size.
            OutcomeUnknown: everything was sent, and no result came.
            Interrupted: `cancel` was called.
            ProtocolFault, TransferError: anything else; the message says what.
        """
        link = self._connect(timeout)
        with self._lock:
            self._link = link
        try:
            return self._transfer(link, Conversation(link, self._first, self._source.interrupt))
        finally:
            with self._lock:
                self._link = None
            link.close()

    def _connect(self, timeout: float | None) -> Link:
        self._check_cancelled()
        try:
            return self._node.connect(self._destination, APP, ASPECT, timeout=timeout, identity=self._identity)
        except ValueError as error:
            raise NotAReceiver(f"{self._destination.hex()} is no address of a file receiver ({error})") from error
        except NodeClosed:
            self._check_cancelled()
            raise

    def _check_cancelled(self) -> None:
        if self._cancelled:
            raise Interrupted("interrupted before anything was sent")

    def _first(self, message: FileMessage) -> bool:
        """On a callback thread. What comes between answer and digest means that sending the rest is pointless."""
        if not self._answered:
            self._answered = True
        elif not self._told:
            with self._lock:
                link = self._link
            if link is not None:
                link.close()
            self._source.interrupt()
        return False

    def _transfer(self, link: Link, talk: Conversation) -> Outcome:
        began = monotonic()
        try:
            self._check_cancelled()
            self._offer(talk)
            writer = link.open_writer(STREAM, compression=self._compression)
            try:
                self._content(writer)
            finally:
                writer.abort()  # has no effect on one that was finished
            digest = self._digest.digest()
            self._told = True
            talk.send(Digest(self.sent, digest))
        except (LinkClosed, LinkEnded) as error:
            self._ended(talk, error)
        result = self._result(talk)
        if not result.ok:
            raise NotStored(f"the receiver could not keep the file: {result.reason or 'it did not say why'}")
        if result.sha256 != digest or result.size != self.sent:
            raise TransferError("the receiver kept something else than what was sent: the digests differ")
        self._on_progress(Progress(self.sent, self._source.size, confirmed=True))
        return Outcome(self.sent, digest, result.saved_as, monotonic() - began, writer.carried)

    def _offer(self, talk: Conversation) -> None:
        talk.send(Offer(self._name, self._source.size, STREAM))
        try:
            answer = talk.next(ANSWER_WITHIN, "answer to the offer")
        except TimeoutError as error:
            raise TransferError(f"the receiver did not answer the offer within {ANSWER_WITHIN:.0f} s") from error
        if isinstance(answer, Refuse):
            raise Refused(answer.reason)
        if not isinstance(answer, Accept):
            raise ProtocolFault("the receiver answered the offer with neither yes nor no")

    def _content(self, writer: StreamWriter) -> None:
        """Read, digest and write everything, then wait until the other node has proved it."""
        source, digest, size = self._source, self._digest, self._source.size
        self._report(writer)
        while data := source.read(CHUNK):
            self.sent += len(data)
            if size is not None and self.sent > size:
                raise self._changed()
            digest.update(data)
            self._write(writer, memoryview(data))
        self._check_running()
        if size is not None and self.sent != size:
            raise self._changed()
        writer.finish()
        while not writer.wait_delivered(REPORT_EVERY):
            self._report(writer)
        self._report(writer)

    def _check_running(self) -> None:
        """The end of the source may be the end of the transfer instead."""
        link = self._link
        if self._cancelled or link is None or not link.is_active:
            raise LinkEnded("the link ended")

    def _changed(self) -> SourceFault:
        return SourceFault(
            f"{self._source.name} changed its size while it was sent: it had {self._source.size:,} bytes, then "
            f"{'more' if self.sent > (self._source.size or 0) else f'{self.sent:,}'}"
        )

    def _write(self, writer: StreamWriter, view: memoryview) -> None:
        """Give the stream what it has room for, and report each time."""
        while view:
            if writer.wait_writable(REPORT_EVERY):
                view = view[writer.write(view[: writer.room]) :]
            self._report(writer)

    def _report(self, writer: StreamWriter) -> None:
        self._on_progress(Progress(writer.sent, self._source.size))

    def _result(self, talk: Conversation) -> Result:
        try:
            return talk.expect(Result, RESULT_WITHIN, "result")
        except TimeoutError as error:
            raise OutcomeUnknown(
                f"everything was sent, but no word came within {RESULT_WITHIN:.0f} s whether the receiver kept the file"
            ) from error
        except LinkEnded as error:
            if self._cancelled:
                raise Interrupted(
                    "interrupted after everything was sent: the receiver may have kept the file"
                ) from error
            raise OutcomeUnknown(
                "everything was sent, but the link ended before the receiver said whether it kept the file"
            ) from error

    def _ended(self, talk: Conversation, error: Exception) -> NoReturn:
        """The link is gone in the middle: the receiver may have said why."""
        if self._cancelled:
            raise Interrupted(f"interrupted after {self.sent:,} bytes: the receiver keeps nothing") from error
        message = talk.last_words()
        if isinstance(message, Refuse):
            raise Refused(message.reason) from error
        if isinstance(message, Result) and message.fault is None and not message.ok:
            raise NotStored(
                f"the receiver could not keep the file: {message.reason or 'it did not say why'}"
            ) from error
        if message is not None:
            raise ProtocolFault(message.fault or "the receiver spoke out of turn") from error
        link = talk.link
        raise TransferError(f"the link to the receiver ended after {self.sent:,} bytes: {link.closing}") from error
