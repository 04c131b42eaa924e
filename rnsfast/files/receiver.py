"""The receiving end.  docs/file-protocol.md, Course."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Final

from rnsfast.crypto.identity import Identity
from rnsfast.errors import RnsfastError, StreamBroken
from rnsfast.files.errors import NotStored, ProtocolFault, TransferError
from rnsfast.files.messages import APP, ASPECT, VERSION, Accept, Digest, FileMessage, Offer, Refuse, Result
from rnsfast.files.names import REASON_BYTES, name_fault, shorten
from rnsfast.files.store import PartFile, remove_abandoned
from rnsfast.files.talk import Conversation, LinkEnded
from rnsfast.node.link import Link
from rnsfast.node.node import Node
from rnsfast.node.streams import StreamReader

log = logging.getLogger(__name__)

CHUNK: Final = 1 << 20  # bytes taken of the stream at a time, at most
OFFER_WITHIN: Final = 30.0  # seconds for OFFER after the link is up (docs/file-protocol.md)
IDENTITY_WITHIN: Final = 2.0  # seconds a listed sender may take to identify (docs/file-protocol.md)
CLOSE_WITHIN: Final = 10.0  # seconds the sender has to close the link after the result (docs/file-protocol.md)
TRANSFERS: Final = 32  # at the same time; further offers are refused


@dataclass(frozen=True, slots=True)
class Report:
    """What became of one offer. `reason` is one sentence, None if the file was kept."""

    ok: bool
    name: str | None  # as offered
    saved_as: str | None  # in the directory
    size: int  # bytes received
    sha256: bytes | None
    reason: str | None
    seconds: float
    peer: bytes | None  # hash of the sender's identity, if it was revealed


@dataclass(frozen=True, slots=True)
class Arriving:
    """How far a transfer is."""

    name: str
    received: int  # bytes
    size: int | None  # bytes; None if the sender does not know


class Receiver:
    """Takes files into a directory until it is closed. Several at a time, one a link.

    Args:
        node: a running node.
        identity: whose address it is.
        directory: where files go; it must exist.
        allow: hashes of the identities that may send, 16 bytes each; None for everybody.
        max_size: bytes of the largest file taken; None for no limit.
        on_report: called with a Report at the end of each transfer, on that transfer's thread.
        on_progress: called with an Arriving for each piece, on that transfer's thread.

    Raises NotStored if the directory cannot be written to.
    """

    def __init__(
        self,
        node: Node,
        identity: Identity,
        directory: Path,
        *,
        allow: Collection[bytes] | None = None,
        max_size: int | None = None,
        on_report: Callable[[Report], None] = lambda report: None,
        on_progress: Callable[[Arriving], None] = lambda arriving: None,
    ) -> None:
        self._directory, self._max_size = directory, max_size
        self._allow = None if allow is None else frozenset(allow)
        self._on_report, self._on_progress = on_report, on_progress
        PartFile(directory).discard()
        for name in remove_abandoned(directory):
            log.info("%s: removed what an earlier transfer had left: %s", directory, name)
        self._places = threading.BoundedSemaphore(TRANSFERS)
        self._links: set[Link] = set()  # at most TRANSFERS
        self.inbox = node.register(identity, APP, ASPECT)
        self.inbox.on_link(self._on_link)

    @property
    def hash(self) -> bytes:
        """The address to send to, 16 bytes."""
        return self.inbox.hash

    def announce(self) -> bool:
        """Tell the network. False if no interface is up."""
        return self.inbox.announce()

    def close(self) -> None:
        """Take no more; transfers that run go on."""
        self.inbox.close()

    def links(self) -> list[Link]:
        """Those of the transfers that run, or whose senders have not closed yet."""
        return list(self._links)

    def _on_link(self, link: Link) -> None:
        """In the established callback: the types are registered before anything can come."""
        if not self._places.acquire(blocking=False):
            log.warning("a link was closed: %d transfers run already", TRANSFERS)
            link.close()
            return
        self._links.add(link)
        transfer = _Transfer(self, link)
        threading.Thread(target=transfer.run, name=f"rnsfast-files-{link.id.hex()[:8]}", daemon=True).start()


class _Transfer:
    """One link, one file."""

    def __init__(self, receiver: Receiver, link: Link) -> None:
        self._receiver, self._link = receiver, link
        self._offer: Offer | None = None
        self._digest = hashlib.sha256()
        self._received = 0
        self._began = monotonic()
        self._talk = Conversation(link, self._first)

    def _first(self, message: FileMessage) -> bool:
        """On a callback thread: a second offer is refused there and then, and the first goes on."""
        if not isinstance(message, Offer):
            return False
        if self._offer is None:
            self._offer = message
            return False
        try:
            self._talk.send(Refuse("one file a link"), 0)
        except TransferError:
            log.debug("a second offer on link %s could not be refused", self._link)
        return True

    def run(self) -> None:
        """From the offer to the closed link."""
        report: Report | None = None
        try:
            report = self._take()
        except LinkEnded as error:
            if self._offer is not None:
                report = self._failed(f"the sender ended it after {self._received:,} bytes: {error}")
        except (RnsfastError, TimeoutError) as error:
            report = self._failed(str(error)) if self._offer is not None else None
        finally:
            if report is not None:
                self._receiver._on_report(report)
            self._link.wait_closed(CLOSE_WITHIN if report is not None else 0)
            self._link.close()
            self._receiver._links.discard(self._link)
            self._receiver._places.release()

    def _take(self) -> Report:
        offer = self._talk.expect(Offer, OFFER_WITHIN, "offer")
        self._began = monotonic()
        problem = self._objection(offer)
        if problem is not None:
            return self._refuse(problem)
        try:
            part = PartFile(self._receiver._directory)
        except NotStored as error:
            return self._refuse(str(error))
        try:
            reader = self._link.open_reader(offer.stream)
            self._talk.send(Accept())
            try:
                self._content(reader, part, offer)
                saved = self._finish(part, offer)
            except (NotStored, ProtocolFault) as error:
                return self._give_up(reader, part, str(error))
        except StreamBroken as error:
            raise LinkEnded(str(error)) from error
        finally:
            part.discard()
        digest = self._digest.digest()
        self._talk.send(Result(True, self._received, digest, None, saved))
        return Report(True, offer.name, saved, self._received, digest, None, self._seconds(), self._peer())

    def _objection(self, offer: Offer) -> str | None:
        """Why an offer is refused, None if it is not."""
        if offer.v != VERSION:
            return f"version {offer.v} is not known here"
        problem = name_fault(offer.name)
        if problem is not None:
            return problem
        limit = self._receiver._max_size
        if limit is not None and offer.size is not None and offer.size > limit:
            return f"files of more than {limit:,} bytes are not taken here"
        allow = self._receiver._allow
        if allow is not None:
            identity = self._link.wait_identified(IDENTITY_WITHIN)
            if identity is None:
                return "the sender did not identify itself"
            if identity.hash not in allow:
                return f"identity {identity.hash.hex()} may not send here"
        return None

    def _content(self, reader: StreamReader, part: PartFile, offer: Offer) -> None:
        """Everything up to the end of the stream."""
        limit = self._receiver._max_size
        digest, progress = self._digest, self._receiver._on_progress
        while data := reader.read(CHUNK):
            self._received += len(data)
            if offer.size is not None and self._received > offer.size:
                raise ProtocolFault(f"more came than the {offer.size:,} bytes that were offered")
            if limit is not None and self._received > limit:
                raise NotStored(f"files of more than {limit:,} bytes are not taken here")
            digest.update(data)
            part.write(data)
            progress(Arriving(offer.name, self._received, offer.size))

    def _finish(self, part: PartFile, offer: Offer) -> str:
        """Compare, and give the file its name."""
        claimed = self._talk.expect(Digest, None, "digest")
        if claimed.size != self._received or offer.size not in (None, self._received):
            raise ProtocolFault(f"{self._received:,} bytes came, {claimed.size:,} were sent")
        if claimed.sha256 != self._digest.digest():
            raise ProtocolFault("the content differs from what was sent: the digests are not equal")
        return part.keep(offer.name)

    def _refuse(self, reason: str) -> Report:
        self._talk.send(Refuse(shorten(reason, REASON_BYTES)))
        return self._failed(f"refused: {reason}")

    def _give_up(self, reader: StreamReader, part: PartFile, reason: str) -> Report:
        """Say so at once, then throw away what still comes until the sender closes."""
        part.discard()
        report = self._failed(reason)
        self._talk.send(Result(False, self._received, None, shorten(reason, REASON_BYTES), None))
        end = monotonic() + CLOSE_WITHIN
        reader.timeout = CLOSE_WITHIN
        try:
            while monotonic() < end and reader.read(CHUNK):
                pass
        except (StreamBroken, TimeoutError):
            log.debug("link %s: the sender has stopped", self._link)
        return report

    def _failed(self, reason: str) -> Report:
        name = None if self._offer is None else self._offer.name
        return Report(False, name, None, self._received, None, reason, self._seconds(), self._peer())

    def _seconds(self) -> float:
        return monotonic() - self._began

    def _peer(self) -> bytes | None:
        identity = self._link.remote_identity
        return None if identity is None else identity.hash
