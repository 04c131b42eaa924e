"""Keeps, publishes and fetches lists of blackholed identities.  Protocol 02, section 14; 07, section 7.3."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from rnsfast.engine.destination import Destination
from rnsfast.engine.requests import PendingRequest, Policy, RequestArrived, RequestStatus, ask
from rnsfast.engine.transport.blackhole import LIMIT, Ban
from rnsfast.errors import RnsfastError
from rnsfast.node.link import Link
from rnsfast.node.managementlists import LOCAL, BlackholeFiles, as_map, fitting, read_list
from rnsfast.node.managementremote import Responder
from rnsfast.node.managementwork import Errands
from rnsfast.node.waiting import Waitable
from rnsfast.wire.names import destination_hash, name_hash
from rnsfast.wire.requests import build_response

if TYPE_CHECKING:
    from rnsfast.node.management import Management
    from rnsfast.node.node import Node

log = logging.getLogger(__name__)

NAME: Final = ("rnstransport", "info", "blackhole")
FIRST_FETCH: Final = 20.0  # seconds after the start
RETRY: Final = 300.0  # seconds after which a source that did not answer is asked again
CONNECT_TIMEOUT: Final = 30.0  # seconds for path and link


class Blackholes:
    """The bans of a node. Public methods: any thread, without the lock; they may block on the disk."""

    def __init__(self, node: Node, management: Management) -> None:
        self._node, self._reactor = node, node._reactor
        self._work: Errands = management.errands()
        self._responder = Responder(node, management.errands())
        self._sources = node.config.blackhole_sources
        self._interval = node.config.blackhole_update_interval
        storage = node._storage
        self._files = None if storage is None else BlackholeFiles(storage.root / "blackhole")
        self._network = management.network_identity
        self._silent: set[bytes] = set()  # sources whose failure was said

    @property
    def _own(self) -> bytes:
        return self._reactor.engine.transport_id

    def load(self) -> None:
        """Apply what was stored."""
        if self._files is not None:
            stored = self._files.load(self._own, self._sources, self._work.unix_time())
            self._add({identity: ban for identity, ban in stored.items() if ban.source == self._own}, {self._own})
            self._take_list(stored)

    def start(self) -> None:
        """Set the deadlines of fetching."""
        for source in self._sources:
            self._fetch_at(self._work.now() + FIRST_FETCH, source)

    # ------------------------------------------------------------------ the list

    def ban(self, identity: bytes, until: float | None = None, reason: str | None = None) -> bool:
        """Take no more announces of an identity. False if it is banned already, or one's own."""
        if not self._add({identity: Ban(self._own, until, reason)}, {self._own}):
            return False
        self._save(self._own)
        return True

    def lift(self, identity: bytes) -> bool:
        """Hear an identity again. False if it is not banned. A ban of others comes back with their list."""
        with self._reactor.turn:
            ban = self._reactor.engine.blackhole.bans.pop(identity, None)
        if ban is None:
            return False
        self._save(ban.source)
        return True

    def all(self) -> dict[bytes, Ban]:
        """The bans that are in force, one's own first."""
        unix_time = self._work.unix_time()
        with self._reactor.lock:
            bans = dict(self._reactor.engine.blackhole.bans)
        valid = {identity: ban for identity, ban in bans.items() if ban.until is None or ban.until > unix_time}
        return dict(sorted(valid.items(), key=lambda item: item[1].source != self._own))

    def _add(self, bans: Mapping[bytes, Ban], spared: Collection[bytes], limit: int | None = None) -> int:
        """Take on what is new, up to `limit` altogether; bans in force stay as they are. Returns how many were new."""
        engine = self._reactor.engine
        with self._reactor.turn as now:
            unix_time = now + engine.unix_offset
            is_banned = engine.blackhole.is_banned
            new = {i: ban for i, ban in bans.items() if i not in spared and not is_banned(i, unix_time)}
            if limit is not None:
                new = dict(islice(new.items(), max(0, limit - len(engine.blackhole.bans))))
            engine.ban_all(new, now)
        return len(new)

    def _take_list(self, bans: Mapping[bytes, Ban]) -> int:
        """What others say: never about this node, nor about those it listens to."""
        network = () if self._network is None else (self._network.hash,)
        return self._add(bans, {self._own, *network, *self._sources}, LIMIT)

    def _save(self, source: bytes) -> None:
        if self._files is not None and source in (self._own, *self._sources):
            bans = {identity: ban for identity, ban in self.all().items() if ban.source == source}
            self._files.save(LOCAL if source == self._own else source.hex(), bans)

    # ------------------------------------------------------------------ publishing

    def publish(self, destination: Destination) -> None:
        """Have the destination answer `/list`, whoever asks."""
        handler = self._responder.handler("/list", lambda data: as_map(self.all()), Policy.ALL, shorten=self._shorten)
        destination.requests.register(handler)

    def _shorten(self, request: RequestArrived) -> Any:
        """As much of the list as a packet of the link holds, one's own entries first."""
        return fitting(self.all(), request.link.mdu - len(build_response(request.request_id, None)))

    # ------------------------------------------------------------------ fetching

    def _fetch_at(self, when: float, source: bytes) -> None:
        self._work.run_at(when, lambda: self._fetch_and_again(source))

    def _fetch_and_again(self, source: bytes) -> None:
        try:
            added = self._fetch(source)
        except (RnsfastError, OSError, ValueError) as error:
            if self._work.stopping.is_set():
                return
            if source not in self._silent:
                self._silent.add(source)
                log.warning("the blackhole list of %s was not fetched: %s; tried again", source.hex(), error)
            self._fetch_at(self._work.now() + min(RETRY, self._interval), source)
            return
        self._silent.discard(source)
        if added:
            log.info("%d identities more are blackholed by the list of %s", added, source.hex())
            self._save(source)
        self._fetch_at(self._work.now() + self._interval, source)

    def _fetch(self, source: bytes) -> int:
        """Ask a source for its list and apply it. Returns how many entries were new."""
        target = destination_hash(name_hash(*NAME), source)
        with self._node.connect(target, *NAME, timeout=CONNECT_TIMEOUT) as link:
            bans = read_list(request(self._node, link, "/list"), source, self._work.unix_time())
        if bans is None:
            raise OSError("the answer is no list")
        return self._take_list(bans)


class _Answer(Waitable):
    """Waits for the end of a request."""

    __slots__ = ()


def request(node: Node, link: Link, path: str, data: Any = None) -> Any:
    """Ask the other end of a link and wait for its answer. Raises OSError: there was none; NodeClosed."""
    answer = _Answer(node._reactor.lock)
    with node._reactor.turn as now:
        pending = ask(link._engine, path, data, now)
        if pending is not None:
            pending.owner = answer
    if pending is None:
        raise OSError(f"the link was closed: {link.closing}")
    with node._reactor.lock:
        answer.wait_for(lambda: pending.is_concluded, None)
    return _outcome(pending)


def _outcome(pending: PendingRequest) -> Any:
    if pending.status is not RequestStatus.READY:
        raise OSError(pending.why or "no answer")
    return pending.response
