"""Takes announces of interfaces of other nodes: who may say so, whether the work was done, what it says.

Protocol 02, section 15.4.  Stamps are checked one at a time, on a callback thread: a flood of announces costs one
thread a tenth of a millisecond each, and beyond a short queue nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final

from rnsfast.crypto.identity import Identity
from rnsfast.crypto.stamp import is_valid, stamp_value, work_block
from rnsfast.engine.events import AnnounceHeard
from rnsfast.node.managementwork import Work
from rnsfast.wire.discovery import (
    ENCRYPTED,
    MIN_APP_DATA,
    Offer,
    info_hash,
    parse_info,
    payload_hash,
    split_payload,
)
from rnsfast.wire.discoveryrecord import TYPE_FIELDS, Record
from rnsfast.wire.drop import Drop

ASPECT: Final = "rnstransport.discovery.interface"
REMEMBERED: Final = 2048  # payloads that were looked at, of the good ones and of the bad ones
WAITING: Final = 16  # announces that may wait for the one that is looked at; more are dropped


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a good payload says."""

    offer: Offer
    stamp: bytes
    value: int


class DiscoveryListener:
    """`heard` is called for every announce of the aspect, `found` for every record it makes."""

    def __init__(
        self,
        work: Work,
        found: Callable[[Record], None],
        count: Callable[[Drop], None],
        *,
        required: int,
        sources: Collection[bytes] = (),
        network: Identity | None = None,
    ) -> None:
        self._work, self._found, self._count = work, found, count
        self._required, self._sources, self._network = required, frozenset(sources), network
        self._good: dict[bytes, Verdict] = {}  # by payload; at most REMEMBERED, as the next
        self._bad: dict[bytes, None] = {}
        self._lock = threading.Lock()
        self._waiting = 0

    def is_source(self, identity: bytes) -> bool:
        """Whether what that identity announces is of interest."""
        return not self._sources or identity in self._sources

    def heard(self, event: AnnounceHeard) -> None:
        """Any thread, one at a time. Cheap: what costs is done later."""
        app_data = event.app_data
        if not self.is_source(event.identity.hash):
            self._count(Drop.DISCOVERY_SOURCE)
        elif app_data is None or len(app_data) < MIN_APP_DATA:
            self._count(Drop.DISCOVERY_UNREADABLE)
        elif self._enter():
            self._work.run(lambda: self._look(event, app_data))
        else:
            self._count(Drop.DISCOVERY_BUSY)

    def _enter(self) -> bool:
        with self._lock:
            if self._waiting > WAITING:
                return False
            self._waiting += 1
            return True

    def _look(self, event: AnnounceHeard, app_data: bytes) -> None:
        try:
            verdict = self._verdict(app_data)
        finally:
            with self._lock:
                self._waiting -= 1
        if isinstance(verdict, Drop):
            self._count(verdict)
        elif verdict.offer.kind in TYPE_FIELDS:  # others can be announced, but nobody could connect to them
            now = self._work.unix_time()
            record = Record(
                offer=verdict.offer,
                stamp=verdict.stamp,
                value=verdict.value,
                network_id=event.identity.hash,
                hops=event.hops,
                received=now,
                discovered=now,
                last_heard=now,
            )
            self._found(record)

    def _verdict(self, app_data: bytes) -> Verdict | Drop:
        """The same bytes are looked at once. Whether they are called encrypted belongs to them here: else a copy of a
        good payload with the wrong flag would have the good one refused."""
        key = payload_hash(app_data) + bytes((app_data[0] & ENCRYPTED,))
        if key in self._bad:
            return Drop.DISCOVERY_REPEATED
        verdict = self._good.get(key)
        if verdict is not None:
            return verdict
        found = self._examine(app_data)
        if isinstance(found, Verdict):
            _remember(self._good, key, found)
        else:
            _remember(self._bad, key, None)
        return found

    def _examine(self, app_data: bytes) -> Verdict | Drop:
        payload = app_data[1:]
        if app_data[0] & ENCRYPTED:
            opened = None if self._network is None else self._network.decrypt(payload)
            if opened is None:
                return Drop.DISCOVERY_SEALED
            payload = opened[0]
        packed, stamp = split_payload(payload)
        block = work_block(info_hash(packed))
        if not is_valid(block, stamp, self._required):
            return Drop.DISCOVERY_STAMP
        offer = parse_info(packed)
        return offer if isinstance(offer, Drop) else Verdict(offer, stamp, stamp_value(block, stamp))


def _remember(table: dict[bytes, Any], key: bytes, value: Verdict | None) -> None:
    if len(table) >= REMEMBERED:
        del table[next(iter(table))]
    table[key] = value
