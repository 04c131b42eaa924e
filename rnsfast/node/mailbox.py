"""Packets on their way to the application: in order, bounded, kept until somebody wants them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from rnsfast.node.dispatch import Strand
from rnsfast.node.waiting import Waitable

if TYPE_CHECKING:
    from rnsfast.node.reactor import Reactor

HELD: Final = 1024 * 1024  # bytes kept until a handler is set; beyond, packets are dropped and counted
BACKLOG: Final = 64 * 1024 * 1024  # bytes waiting for a handler that is busy; beyond, packets are dropped and counted
COST: Final = 64  # bytes each counts for beside its data


class Mailbox(Waitable):
    """What has arrived and has not been handed over. `offer(item)` is called on the strand once `open` was.

    In batches, once `open_batches` was: then `offer_many(items)` is called with everything there is.
    """

    __slots__ = (
        "_called",
        "_items",
        "_many",
        "_offer",
        "_offer_many",
        "_open",
        "_pulled",
        "_reactor",
        "_size",
        "_strand",
    )

    def __init__(
        self,
        reactor: Reactor,
        strand: Strand,
        offer: Callable[[Any], None],
        offer_many: Callable[[list[Any]], None] | None = None,
    ) -> None:
        super().__init__(reactor.lock)
        self._reactor, self._strand, self._offer, self._offer_many = reactor, strand, offer, offer_many
        self._items: deque[tuple[Any, int]] = deque()  # bounded in `put`
        self._size = 0
        self._open = self._pulled = self._many = False
        self._called = False  # in batches: a call that takes everything is on its way

    @property
    def owner(self) -> Mailbox:
        """Itself, so that the engine's `touched` can hold it."""
        return self

    @property
    def has_items(self) -> bool:
        """Whether `take` would return something. Under the lock."""
        return bool(self._items)

    def put(self, item: Any, size: int) -> bool:
        """Something has arrived. False if there is no room for it. Under the lock."""
        if self._size + size + COST > (BACKLOG if self._open or self._pulled else HELD):
            return False
        self._items.append((item, size + COST))
        self._size += size + COST
        if self._many:
            self._call()
        elif self._open:
            self._reactor.enqueue(self._strand, self._deliver)
        else:
            self._reactor.engine.touched.add(self)
        return True

    def _call(self) -> None:
        if not self._called:
            self._called = True
            self._reactor.enqueue(self._strand, self._deliver_all)

    def open(self) -> None:
        """From now on everything is offered, first of all what has been kept. Under the lock."""
        self._open, self._many = True, False
        for _ in self._items:
            self._reactor.enqueue(self._strand, self._deliver)

    def open_batches(self) -> None:
        """From now on everything is offered in batches, first of all what has been kept. Under the lock."""
        self._open = self._many = True
        if self._items:
            self._call()

    def pull(self) -> None:
        """From now on somebody calls `take`, who is told by `watch`. Under the lock."""
        self._pulled, self._open, self._many = True, False, False

    def take(self) -> Any | None:
        """The oldest, None if there is none. Under the lock."""
        if not self._items:
            return None
        item, size = self._items.popleft()
        self._size -= size
        return item

    def take_all(self) -> list[Any]:
        """Everything, oldest first. Under the lock."""
        items = [item for item, _ in self._items]
        self._items.clear()
        self._size = 0
        return items

    def _deliver(self) -> None:
        """On the strand: one call for each item, whichever it is."""
        with self._lock:
            item = self.take() if self._open and not self._many else None
        if item is not None:
            self._offer(item)

    def _deliver_all(self) -> None:
        """On the strand: one call for everything that has come since the last."""
        with self._lock:
            self._called = False
            items = self.take_all() if self._many else []
        if items and self._offer_many is not None:
            self._offer_many(items)
