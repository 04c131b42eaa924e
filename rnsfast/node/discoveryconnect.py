"""Connects to discovered interfaces by itself, as many as the operator allows.  Protocol 02, section 15.4; 07, 8.

Nothing polls: it looks when an interface was discovered or changed, and at the moments when a patience ends.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection, Sequence
from ipaddress import ip_address, ip_network
from math import inf
from typing import Final, Protocol

from rnsfast.interfaces.base import Handle, Interface
from rnsfast.node.managementwork import Work
from rnsfast.wire.discovery import BACKBONE, Offer, endpoint_hash
from rnsfast.wire.discoveryrecord import Record

log = logging.getLogger(__name__)

DOWN_PATIENCE: Final = 12.0  # seconds an interface made here may be down before it is given up
NEXT_TRY: Final = 5.0  # seconds between interfaces that are tried
TRUSTED: Final = {"RNS": (1, 5, 2)}  # implementations that are connected to without being asked for, from this version
_YGGDRASIL: Final = ip_network("200::/7")


class Host(Protocol):
    """The node, as far as this needs it. Everything is called on errands of the connector's."""

    def candidates(self) -> Sequence[Record]:
        """Records of interfaces that are probably there."""

    def endpoints(self) -> Collection[bytes]:
        """What the node connects to, as `endpoint_hash`."""

    def connect(self, record: Record) -> Interface:
        """Make an interface that connects to it. Raises OSError."""

    def disconnect(self, interface: Interface) -> None:
        """Close an interface and forget it."""

    def is_online(self, interface: Interface) -> bool:
        """Whether anything comes through it."""

    def bootstrap(self) -> list[Interface]:
        """The interfaces that are there only to find others."""

    def open_bootstrap(self) -> None:
        """Have them again."""


class _Connected:
    """An interface made here."""

    __slots__ = ("down_since", "endpoint", "interface")

    def __init__(self, interface: Interface, endpoint: bytes, now: float) -> None:
        self.interface, self.endpoint = interface, endpoint
        self.down_since: float | None = now


class Connector:
    """Keeps up to `limit` connections to discovered interfaces. Everything but `start`, `wake` and `discovered` runs
    as errands of `work`."""

    def __init__(
        self,
        work: Work,
        host: Host,
        limit: int,
        *,
        unverified: bool = False,
        choose: Callable[[Sequence[Record]], Record] = random.choice,
    ) -> None:
        self._work, self._host, self._limit = work, host, limit
        self._unverified, self._choose = unverified, choose
        self._connected: list[_Connected] = []
        self._try_at = -inf
        self._call: Handle | None = None

    def start(self) -> None:
        """Connect to what is known from before, the most promising first."""
        self._work.run(self._begin)

    def wake(self) -> None:
        """An interface came up or went down."""
        self._work.run(self._look)

    def has_made(self, interface: object) -> bool:
        """Whether it is one of the connector's. Any thread."""
        return any(one.interface is interface for one in self._connected)

    def discovered(self, record: Record) -> None:
        """An interface was heard of: taken at once if there is room."""
        self._work.run(lambda: self._take_if_free(record))

    def _begin(self) -> None:
        for record in self._host.candidates():
            if len(self._connected) >= self._limit:
                break
            if self._is_eligible(record):
                self._connect(record)
        self._look()

    def _take_if_free(self, record: Record) -> None:
        if len(self._connected) < self._limit and self._is_eligible(record):
            self._connect(record)
            self._look()

    def _is_eligible(self, record: Record) -> bool:
        if not qualifies(record.offer, unverified=self._unverified):
            return False
        endpoint = _endpoint(record)
        return endpoint not in self._host.endpoints() and all(one.endpoint != endpoint for one in self._connected)

    def _connect(self, record: Record) -> None:
        now = self._work.now()
        self._try_at = now + NEXT_TRY
        try:
            interface = self._host.connect(record)
        except (OSError, ValueError) as error:
            log.warning("%s: discovered, but cannot be connected to: %s", record.name, error)
            return
        log.info("%s: connecting to a discovered interface", interface.name)
        self._connected.append(_Connected(interface, _endpoint(record), now))

    def _look(self) -> None:
        """Give up what is down for long, see to the bootstrap interfaces, try another one if there is room."""
        now = self._work.now()
        for one in list(self._connected):
            if self._host.is_online(one.interface):
                one.down_since = None
            elif one.down_since is None:
                one.down_since = now
            elif now - one.down_since >= DOWN_PATIENCE:
                self._connected.remove(one)
                log.info("%s: down for %.0f s, given up", one.interface.name, now - one.down_since)
                self._host.disconnect(one.interface)
        self._look_at_bootstrap()
        candidates = self._eligible()
        if candidates and now >= self._try_at:
            self._connect(self._choose(candidates))
            candidates = self._eligible()
        self._set_deadline(bool(candidates))

    def _look_at_bootstrap(self) -> None:
        online = sum(one.down_since is None for one in self._connected)
        if online >= self._limit:
            for interface in self._host.bootstrap():
                log.info("%s: is only for finding others, and there are %d: closed", interface.name, online)
                self._host.disconnect(interface)
        elif not online and not self._host.bootstrap():
            self._host.open_bootstrap()

    def _eligible(self) -> list[Record]:
        """What may be tried, while more than a quarter of the room is left."""
        if self._limit - len(self._connected) <= self._limit / 4:
            return []
        return [record for record in self._host.candidates() if self._is_eligible(record)]

    def _set_deadline(self, more: bool) -> None:
        if self._call is not None:
            self._call.cancel()
        ends = [one.down_since + DOWN_PATIENCE for one in self._connected if one.down_since is not None]
        if more:
            ends.append(self._try_at)
        self._call = self._work.run_at(min(ends), self._look) if ends else None


def _endpoint(record: Record) -> bytes:
    return endpoint_hash(record.offer.reachable_on or "", record.offer.port)


def qualifies(offer: Offer, *, unverified: bool = False) -> bool:
    """Whether a discovered interface may be connected to without anybody having said so."""
    if offer.kind != BACKBONE or not offer.transport or offer.reachable_on is None or offer.port is None:
        return False
    return is_elsewhere(offer.reachable_on) and (unverified or _is_trusted(offer))


def _is_trusted(offer: Offer) -> bool:
    least = TRUSTED.get(offer.implementation or "")
    if least is None or offer.version is None:
        return False
    try:
        version = tuple(int(part) for part in offer.version.split("."))
    except ValueError:
        return False
    return version >= least


def is_elsewhere(host: str) -> bool:
    """False for this machine, for networks that need another program, and for what is no single machine."""
    name = host.lower().removesuffix(".")
    try:
        address = ip_address(name)
    except ValueError:
        return name != "localhost" and not name.endswith((".localhost", ".onion"))
    if address.version == 6:
        mapped = address.ipv4_mapped
        if mapped is not None:
            return is_elsewhere(str(mapped))
        if address in _YGGDRASIL:
            return False
    return not (address.is_loopback or address.is_unspecified or address.is_multicast or address.is_link_local)
