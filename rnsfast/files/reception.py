"""One link to a receiver: an offer, its content, and what is said about it.  docs/file-protocol.md, Course."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Final

from rnsfast.errors import LinkClosed, StreamBroken
from rnsfast.files.errors import NotStored, ProtocolFault, TransferError
from rnsfast.files.messages import VERSION, Accept, Digest, FileMessage, Offer, Refuse, Result
from rnsfast.files.names import REASON_BYTES, name_fault, shorten
from rnsfast.files.store import PartFile, free_space
from rnsfast.files.talk import Conversation, LinkEnded
from rnsfast.node.link import Link
from rnsfast.node.streams import StreamReader

if TYPE_CHECKING:
    from rnsfast.files.receiver import Receiver

log = logging.getLogger(__name__)

MAX_SECOND_OFFERS: Final = 4  # refused on one link; then it is closed
OFFER_WITHIN: Final = 30.0  # seconds (docs/file-protocol.md, Limits in time)
IDENTITY_WITHIN: Final = 2.0  # seconds (docs/file-protocol.md, Course 2)
CLOSE_WITHIN: Final = 10.0  # seconds (docs/file-protocol.md, Course 9)
REFUSAL_WITHIN: Final = 5.0  # seconds for the refusal of a second offer to find room in the window
CHUNK: Final = 1 << 20  # bytes taken of the stream at a time, if they are there
WRITE_AT: Final = 1 << 18  # bytes; so much is collected before it is digested and written in one go


@dataclass(frozen=True, slots=True)
class Report:
    """What became of one offer."""

    ok: bool
    accepted: bool  # False: it was refused, nothing was transferred
    name: str | None  # as offered; None if there was no proper offer
    saved_as: str | None  # the name it has in the directory
    size: int  # bytes received
    sha256: bytes | None  # of a file that is whole
    reason: str | None  # one sentence; None if ok
    seconds: float  # from the offer on
    peer: bytes | None  # identity hash of the sender, if it showed one


@dataclass(frozen=True, slots=True)
class Arriving:
    """How far a transfer is. The first one, with nothing received, says that the offer was accepted."""

    name: str
    received: int  # bytes
    size: int | None  # bytes; None if the sender does not know


class Refusal(Exception):
    """The offer is not taken; one sentence."""


class Reception:
    """What happens on one link. Made inside the established callback, run on a thread of its own."""

    def __init__(self, receiver: Receiver, link: Link) -> None:
        self._receiver, self._link = receiver, link
        self._offered = False
        self._second_offers = 0
        self._reader: StreamReader | None = None
        self._digest = hashlib.sha256()
        self._size = 0
        self._began = monotonic()
        self._talk = Conversation(link, self._first)

    def _first(self, message: FileMessage) -> bool:
        """On a callback thread: a second offer is refused while the first goes on."""
        if not isinstance(message, Offer):
            return False
        if not self._offered:
            self._offered = True
            return False
        self._second_offers += 1
        if self._second_offers > MAX_SECOND_OFFERS:
            self._link.close()
            return True
        try:
            self._talk.send(Refuse("one file a link"), REFUSAL_WITHIN)
        except TransferError:
            self._link.close()
        return True

    # ------------------------------------------------------------------ the thread of the transfer

    def run(self) -> None:
        """From the offer to the end of the link."""
        try:
            offer = self._talk.expect(Offer, OFFER_WITHIN, "offer")
        except (LinkEnded, TimeoutError):
            self._link.close()  # somebody connected and said nothing: that is no transfer
            return
        except ProtocolFault as error:
            self._refuse(None, str(error))
            self._see_off()
            return
        self._began = monotonic()
        if self._receiver.take_slot():
            try:
                self._answer(offer)
            finally:
                self._receiver.free_slot()
        else:
            self._refuse(offer.name, f"as many transfers run here as can ({self._receiver.max_transfers}), try later")
        self._see_off()

    def _answer(self, offer: Offer) -> None:
        try:
            self._check(offer)
            part = PartFile(self._receiver.directory)
        except (Refusal, NotStored) as error:
            self._refuse(offer.name, str(error))
            return
        try:
            saved = self._receive(offer, part)
        except (TransferError, StreamBroken, LinkClosed) as error:
            part.discard()
            self._fail(offer, error)
            return
        finally:
            part.discard()
        self._report(True, offer.name, True, saved, None)
        self._say(Result(True, self._size, self._digest.digest(), None, saved))

    def _check(self, offer: Offer) -> None:
        """Raises Refusal. docs/file-protocol.md, Course 7."""
        if offer.v != VERSION:
            raise Refusal(f"version {offer.v} is not known here")
        if fault := name_fault(offer.name):
            raise Refusal(fault)
        self._check_sender()
        limit = self._receiver.max_size
        if limit is not None and offer.size is not None and offer.size > limit:
            raise Refusal(f"{offer.size:,} bytes are more than the {limit:,} taken here")
        free = free_space(self._receiver.directory)
        if free is not None and offer.size is not None and offer.size > free:
            raise Refusal(f"the disk has no room for {offer.size:,} bytes")

    def _check_sender(self) -> None:
        if self._receiver.allow is None:
            return
        who = self._link.wait_identified(IDENTITY_WITHIN)
        if who is None:
            raise Refusal("only those on a list may send here, and the sender did not identify itself")
        if who.hash not in self._receiver.allow:
            raise Refusal("the sender is not on the list of those who may send here")

    def _receive(self, offer: Offer, part: PartFile) -> str:
        """The content, the comparison, the name: returns the name."""
        reader = self._reader = self._link.open_reader(offer.stream)
        self._talk.send(Accept())
        self._progress(offer, 0)
        self._content(offer, part, reader)
        told = self._talk.expect(Digest, None, "digest")
        if told.size != self._size or (offer.size is not None and offer.size != self._size):
            offered = "" if offer.size is None else f", {offer.size:,} were offered"
            raise TransferError(f"{self._size:,} bytes arrived, {told.size:,} were sent{offered}")
        if told.sha256 != self._digest.digest():
            raise TransferError("the content is not what was sent: the digests differ")
        return part.keep(offer.name)

    def _content(self, offer: Offer, part: PartFile, reader: StreamReader) -> None:
        """Everything up to the end of the stream. Pieces are small on slow links: they are collected."""
        limit = self._receiver.max_size if offer.size is None else offer.size
        pieces: list[bytes] = []
        collected = 0
        while True:
            piece = reader.read(CHUNK)
            pieces.append(piece)
            collected += len(piece)
            if limit is not None and self._size + collected > limit:
                raise TransferError(f"more than {limit:,} bytes came")
            self._progress(offer, self._size + collected)
            if not piece or collected >= WRITE_AT:
                data = b"".join(pieces) if len(pieces) > 1 else piece
                self._digest.update(data)
                part.write(data)
                self._size += collected
                pieces.clear()
                collected = 0
            if not piece:
                return

    # ------------------------------------------------------------------ how it ends

    def _progress(self, offer: Offer, received: int) -> None:
        self._receiver.progress(Arriving(offer.name, received, offer.size))

    def _report(self, accepted: bool, name: str | None, ok: bool, saved: str | None, reason: str | None) -> None:
        who = self._link.remote_identity
        self._receiver.report(
            Report(
                ok,
                accepted,
                name,
                saved,
                self._size,
                self._digest.digest() if ok else None,
                reason,
                monotonic() - self._began,
                None if who is None else who.hash,
            )
        )

    def _refuse(self, name: str | None, reason: str) -> None:
        reason = shorten(reason, REASON_BYTES)
        self._say(Refuse(reason))
        self._report(False, name, False, None, reason)

    def _fail(self, offer: Offer, error: Exception) -> None:
        reason = str(error)
        if isinstance(error, (LinkClosed, LinkEnded)) or not self._link.is_active:
            reason = f"the link ended before the whole file was here: {self._link.closing}"
        reason = shorten(reason, REASON_BYTES)
        self._say(Result(False, self._size, None, reason, None))
        self._report(True, offer.name, False, None, reason)

    def _say(self, message: FileMessage) -> None:
        """The last message. Whether it can still be sent changes nothing here."""
        try:
            self._talk.send(message)
        except TransferError as error:
            log.debug("link %s: the sender was not told: %s", self._link, error)

    def _see_off(self) -> None:
        """Throw away what still comes until the sender closes; close if it does not."""
        end = monotonic() + CLOSE_WITHIN
        try:
            while self._reader is not None and self._reader.wait_readable(end - monotonic()):
                if not self._reader.read_available():
                    break
        except StreamBroken:
            log.debug("link %s: the sender has gone", self._link)
        self._link.wait_closed(max(0.0, end - monotonic()))
        self._link.close()
