"""The receiving end: a destination that takes files into a directory.  docs/file-protocol.md, Course."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from time import monotonic
from typing import Final

from rnsfast.crypto.identity import Identity
from rnsfast.files.messages import APP, ASPECT
from rnsfast.files.reception import CLOSE_WITHIN, Arriving, Reception, Report
from rnsfast.files.store import PartFile, remove_abandoned
from rnsfast.node.link import Link
from rnsfast.node.node import Node

log = logging.getLogger(__name__)

MAX_LINKS: Final = 64  # at the same time; a further one is closed at once
MAX_TRANSFERS: Final = 16  # at the same time; a further offer is refused


class Receiver:
    """Takes files on a node's `rnsfast.files` destination, each on a thread of its own.

    Args:
        node: a running node.
        identity: whose destination it is, with its private key.
        directory: where the files go; it exists. Nothing is ever written outside it, and nothing in it replaced.
        allow: identity hashes of those who may send, 16 bytes each; None allows everybody.
        max_size: bytes of the largest file taken; None takes what the disk does.
        max_transfers: at the same time.
        on_report: called with a Report for each offer, on the thread of its transfer.
        on_progress: called with an Arriving for each piece, likewise.

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
        max_transfers: int = MAX_TRANSFERS,
        on_report: Callable[[Report], None] = lambda report: None,
        on_progress: Callable[[Arriving], None] = lambda arriving: None,
    ) -> None:
        self.directory, self.max_size, self.max_transfers = Path(directory), max_size, max_transfers
        self.allow = None if allow is None else frozenset(allow)
        self._on_report, self._on_progress = on_report, on_progress
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()  # at most MAX_LINKS
        self._transfers = 0
        PartFile(self.directory).discard()
        for name in remove_abandoned(self.directory):
            log.info("%s: removed what an earlier transfer had left: %s", self.directory, name)
        self._inbox = node.register(identity, APP, ASPECT)
        self._inbox.on_link(self._on_link)

    @property
    def hash(self) -> bytes:
        """The address to send to, 16 bytes."""
        return self._inbox.hash

    def announce(self) -> bool:
        """Tell the network. False if no interface is up."""
        return self._inbox.announce()

    def close(self, timeout: float = CLOSE_WITHIN + 2.0) -> None:
        """Take no more links, and wait until the transfers that run have ended, at most `timeout` seconds."""
        self._inbox.accepts_links = False
        self._inbox.close()
        end = monotonic() + timeout
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - monotonic()))

    def _on_link(self, link: Link) -> None:
        """On a callback thread; nothing that the sender says is handed over before this returns."""
        with self._lock:
            if len(self._threads) >= MAX_LINKS:
                thread = None
            else:
                reception = Reception(self, link)
                thread = threading.Thread(target=self._run, args=(reception,), name="rnsfast-receive", daemon=True)
                self._threads.add(thread)
        if thread is None:
            link.close()
            log.warning("%d senders are connected already, another one was turned away", MAX_LINKS)
        else:
            thread.start()

    def _run(self, reception: Reception) -> None:
        try:
            reception.run()
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    # ------------------------------------------------------------------ for receptions

    def take_slot(self) -> bool:
        """Whether one more transfer may run; `free_slot` gives it back."""
        with self._lock:
            if self._transfers >= self.max_transfers:
                return False
            self._transfers += 1
            return True

    def free_slot(self) -> None:
        """A transfer has ended."""
        with self._lock:
            self._transfers -= 1

    def report(self, report: Report) -> None:
        """An offer has come to its end."""
        try:
            self._on_report(report)
        except Exception:
            log.exception("the handler of reports raised")

    def progress(self, arriving: Arriving) -> None:
        """A piece has come."""
        try:
            self._on_progress(arriving)
        except Exception:
            log.exception("the handler of progress raised")
