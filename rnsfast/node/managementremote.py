"""Answers questions about the node from identities that may ask.  Protocol 02, section 13; 07, section 7.1.

Who is not listed, asks for something else or asks wrongly gets no answer at all; the link stays up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from rnsfast.engine.destination import Destination
from rnsfast.engine.requests import Policy, RequestArrived, RequestHandler, respond
from rnsfast.node.managementstats import Statistics, link_count, path_table, rate_table
from rnsfast.node.managementwork import Errands
from rnsfast.wire.requests import build_response

if TYPE_CHECKING:
    from rnsfast.node.management import Management
    from rnsfast.node.node import Node

log = logging.getLogger(__name__)

ASPECTS: Final = ("remote", "management")
WAITING: Final = 64  # requests that may wait for their answers; more are not answered


class Responder:
    """Answers requests away from the reactor, one after the other.

    An answer that does not fit a packet is shortened, or not sent; that is said once.
    """

    def __init__(self, node: Node, errands: Errands) -> None:
        self._reactor, self._errands = node._reactor, errands
        self._waiting = 0
        self._lock = Lock()
        self._said = False

    def handler(
        self,
        path: str,
        answer: Callable[[Any], Any],
        policy: Policy,
        allowed: Collection[bytes] = (),
        shorten: Callable[[RequestArrived], Any] | None = None,
    ) -> RequestHandler:
        """What answers `path` with what `answer(data)` returns; None is no answer.

        `shorten(request)` is the answer in its place if that is too large.
        """

        def arrived(request: RequestArrived) -> None:
            with self._lock:
                if self._waiting >= WAITING:
                    return
                self._waiting += 1
            self._errands.run(lambda: self._answer(path, answer, shorten, request))

        return RequestHandler(path, arrived, policy, allowed)

    def _answer(
        self,
        path: str,
        answer: Callable[[Any], Any],
        shorten: Callable[[RequestArrived], Any] | None,
        request: RequestArrived,
    ) -> None:
        try:
            response = answer(request.data)
            # Found out before the lock is taken: a large table takes a while to pack.
            size, limit = len(build_response(request.request_id, response)), request.link.mdu
            if size > limit:
                self._say(path, size, limit, "shortened" if shorten else "not answered")
                if shorten is None:
                    return
                response = shorten(request)
            with self._reactor.turn as now:
                respond(request, response, now)
        finally:
            with self._lock:
                self._waiting -= 1

    def _say(self, path: str, size: int, limit: int, done: str) -> None:
        if not self._said:
            self._said = True
            log.warning(
                "the answer to a request for %s has %d bytes, a packet of the link carries %d: %s; this is said once",
                *(path, size, limit, done),
            )


class RemoteManagement:
    """`/status` and `/path`."""

    def __init__(self, node: Node, management: Management) -> None:
        self._node, self._reactor, self._management = node, node._reactor, management
        self._responder = Responder(node, management.errands())
        self._statistics = Statistics(node)

    def prepare(self, destination: Destination) -> None:
        """Have the destination answer."""
        allowed = self._node.config.remote_management_allowed
        for path, answer in (("/status", self._status), ("/path", self._path)):
            destination.requests.register(self._responder.handler(path, answer, Policy.LIST, allowed))

    def _status(self, data: Any) -> list[Any] | None:
        network = self._management.network_identity
        return answer_status(
            data,
            lambda: self._statistics.tables(self._management.probe, None if network is None else network.hash),
            self._links,
        )

    def _links(self) -> int:
        with self._reactor.lock:
            return link_count(self._reactor.engine)

    def _path(self, data: Any) -> list[Any] | None:
        engine = self._reactor.engine
        with self._reactor.lock:
            paths = dict(engine.paths.paths)
            rates = {} if engine.transport is None else dict(engine.transport.rates.entries)
        paths = {destination: path for destination, path in paths.items() if path.port.online}
        return answer_path(data, lambda dest, hops: path_table(paths, dest, hops), lambda dest: rate_table(rates, dest))


def answer_status(data: Any, stats: Callable[[], dict[str, Any]], links: Callable[[], int]) -> list[Any] | None:
    """The response to `/status`: statistics, then as wanted the number of links and the profiling results, which there
    are none of."""
    if not isinstance(data, list) or not data:
        return None
    answer: list[Any] = [stats()]
    if data[0] is True:
        answer.append(links())
    if len(data) > 1 and data[1] is True:
        answer.append(None)
    return answer


def answer_path(
    data: Any,
    table: Callable[[bytes | None, int | None], list[dict[str, Any]]],
    rates: Callable[[bytes | None], list[dict[str, Any]]],
) -> list[Any] | None:
    """The response to `/path`: paths, or announce rates."""
    if not isinstance(data, list) or not data:
        return None
    command, destination, hops = (*data, None, None)[:3]
    if not isinstance(destination, bytes | None) or not isinstance(hops, int | None) or isinstance(hops, bool):
        return None
    if command == "table":
        return table(destination, hops)
    return rates(destination) if command == "rates" else None
