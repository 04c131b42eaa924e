"""Requests and responses on links, in both roles, as far as they fit one packet.  Protocol 03, section 15.

What is larger travels as a resource.  There are none yet: asking or answering with more raises MessageTooLarge, and a
peer that advertises such a request or response is refused at once instead of being left to its timeout.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import IntEnum
from math import inf
from typing import TYPE_CHECKING, Any, Final

from rnsfast.crypto.identity import Identity
from rnsfast.engine.linkstate import TRAFFIC_TIMEOUT_FACTOR
from rnsfast.errors import MessageTooLarge
from rnsfast.wire.drop import Drop
from rnsfast.wire.packet import CTX_REQUEST, CTX_RESOURCE_RCL, CTX_RESPONSE, packet_hash
from rnsfast.wire.requests import (
    FLAG_REQUEST,
    FLAG_RESPONSE,
    ID_SIZE,
    Request,
    build_request,
    build_response,
    parse_request,
    parse_response,
    path_hash,
    response_size,
)

if TYPE_CHECKING:
    from rnsfast.engine.link import Link

PENDING_LIMIT: Final = 1024  # requests of one link that wait for their responses; more are not sent
RESPONSE_GRACE: Final = 11.25  # seconds beside six round trips; local, the reference's value


class Policy(IntEnum):
    """Who may ask. Numbers are public API (protocol 03, section 1)."""

    NONE = 0
    ALL = 1
    LIST = 2  # identities that have said who they are


class RequestStatus(IntEnum):
    """Numbers are public API (protocol 03, section 1). Never goes back (trap T3)."""

    FAILED = 0
    SENT = 1
    DELIVERED = 2  # a request sent as a resource has arrived
    RECEIVING = 3  # the response comes as a resource
    READY = 4


class RequestHandler:
    """What answers one path. `on_request` is called under the node's lock: it notes the request and returns."""

    __slots__ = ("allowed", "on_request", "owner", "path", "policy")

    def __init__(
        self,
        path: str,
        on_request: Callable[[RequestArrived], None],
        policy: Policy = Policy.NONE,
        allowed: Collection[bytes] = (),
    ) -> None:
        if not path:
            raise ValueError("a request handler needs a path")
        self.path = path
        self.on_request = on_request
        self.policy = Policy(policy)
        self.allowed = frozenset(allowed)  # hashes of identities, 16 bytes each, not of destinations (trap T12)
        self.owner: Any = None  # for the runtime

    def admits(self, identity: Identity | None) -> bool:
        """Whether the peer, as far as it has said who it is, may ask."""
        if self.policy is Policy.LIST:
            return identity is not None and identity.hash in self.allowed
        return self.policy is Policy.ALL


class RequestHandlers:
    """The handlers of a destination, by path, and the largest request they take."""

    __slots__ = ("by_hash", "max_size")

    def __init__(self) -> None:
        self.by_hash: dict[bytes, RequestHandler] = {}
        self.max_size: int | None = None  # bytes of a packed request, None for any

    def register(self, handler: RequestHandler) -> None:
        """Another handler of the same path is replaced."""
        self.by_hash[path_hash(handler.path)] = handler

    def deregister(self, path: str) -> bool:
        """False if the path had none."""
        return self.by_hash.pop(path_hash(path), None) is not None

    def find(self, request: Request, size: int, identity: Identity | None) -> RequestHandler | Drop:
        """Who answers. A refusal is silence: there is no error response."""
        if self.max_size is not None and size > self.max_size:
            return Drop.REQUEST_TOO_LARGE
        handler = self.by_hash.get(request.path_hash)
        if handler is None:
            return Drop.REQUEST_NO_HANDLER
        return handler if handler.admits(identity) else Drop.REQUEST_REFUSED


class RequestArrived:
    """A request that a handler admits. `respond` answers it; not answering lets the asker time out."""

    __slots__ = ("data", "handler", "link", "remote_identity", "request_id", "requested_at")

    def __init__(self, link: Link, handler: RequestHandler, request_id: bytes, request: Request) -> None:
        self.link, self.handler, self.request_id = link, handler, request_id
        self.data = request.data
        self.requested_at = request.requested_at  # unix time by the asker's clock
        self.remote_identity = link.remote_identity


class PendingRequest:
    """A request of ours. Ends READY with `response`, or FAILED with `why`."""

    __slots__ = (
        "armed",
        "concluded_at",
        "link",
        "max_response_size",
        "owner",
        "request_id",
        "request_size",
        "response",
        "response_size",
        "sent_at",
        "status",
        "timeout",
        "why",
    )

    def __init__(
        self, link: Link, request_id: bytes, size: int, now: float, timeout: float, max_response_size: int | None
    ) -> None:
        self.link, self.request_id, self.request_size = link, request_id, size
        self.sent_at, self.timeout = now, timeout
        self.max_response_size = max_response_size
        self.status = RequestStatus.SENT
        self.response: Any = None
        self.response_size: int | None = None
        self.concluded_at: float | None = None
        self.why: str | None = None
        self.owner: Any = None  # whoever waits for it, for the runtime
        self.armed = inf

    @property
    def is_concluded(self) -> bool:
        """READY or FAILED."""
        return self.concluded_at is not None

    def take(self, response: Any, now: float) -> None:
        """The response has come."""
        size = response_size(response)
        if self.max_response_size is not None and size > self.max_response_size:
            self.fail(f"the response has {size} bytes, the limit is {self.max_response_size}", now)
        elif not self.is_concluded:
            self.response, self.response_size = response, size
            self._conclude(RequestStatus.READY, now)

    def fail(self, why: str, now: float) -> None:
        """There will be no response."""
        if not self.is_concluded:
            self.why = why
            self._conclude(RequestStatus.FAILED, now)

    def _conclude(self, status: RequestStatus, now: float) -> None:
        self.status = status
        self.concluded_at = now
        self.link.pending_requests.pop(self.request_id, None)
        self.link.engine.timers.disarm(self)
        self.link.engine.touched.add(self)

    def advance(self, now: float) -> float:
        """Fail when the time is up."""
        due = self.sent_at + self.timeout
        if now < due or self.is_concluded:
            return inf if self.is_concluded else due
        self.fail(f"no response within {self.timeout:.1f} s", now)
        return inf


def ask(
    link: Link, path: str, data: Any, now: float, *, timeout: float | None = None, max_response_size: int | None = None
) -> PendingRequest | None:
    """Ask the peer of `link`. None if nothing could be sent; the request is sent once and never repeated.

    `timeout` is seconds, by default six round trips and 11.25 s. MessageTooLarge if the request does not fit a packet,
    TypeError if msgpack cannot express `data`.
    """
    if not link.is_sendable or len(link.pending_requests) >= PENDING_LIMIT:
        return None
    packed = build_request(now + link.engine.unix_offset, path_hash(path), data)
    if len(packed) > link.mdu:
        raise MessageTooLarge(len(packed), link.mdu)
    if timeout is None:
        timeout = link.rtt * TRAFFIC_TIMEOUT_FACTOR + RESPONSE_GRACE
    raw = link.seal(CTX_REQUEST, packed)
    pending = PendingRequest(link, packet_hash(raw)[:ID_SIZE], len(packed), now, timeout, max_response_size)
    link.pending_requests[pending.request_id] = pending  # before it is sent: a response may be fast (trap T1)
    if not link.send_raw(raw, now):
        del link.pending_requests[pending.request_id]
        return None
    link.engine.timers.arm(pending, now + timeout)
    return pending


def respond(request: RequestArrived, response: Any, now: float) -> bool:
    """Answer. False if nothing could be sent; None is no answer, the asker times out.

    MessageTooLarge if the response does not fit one packet, TypeError if msgpack cannot express it.
    """
    link = request.link
    if response is None or not link.is_sendable:
        return False
    packed = build_response(request.request_id, response)
    if len(packed) > link.mdu:
        raise MessageTooLarge(len(packed), link.mdu)
    return link.send_raw(link.seal(CTX_RESPONSE, packed), now)


def receive_request(link: Link, raw: bytes, plain: bytes, now: float) -> None:
    """The peer asks. Answered by `respond`, or with silence.  Protocol 03, section 15.2."""
    link.heard(now, data=True)
    request = parse_request(plain)
    if isinstance(request, Drop):
        link.port.drops[request] += 1
        return
    handler = link.destination.requests.find(request, len(plain), link.remote_identity)
    if isinstance(handler, Drop):
        link.port.drops[handler] += 1
    else:
        handler.on_request(RequestArrived(link, handler, packet_hash(raw)[:ID_SIZE], request))


def receive_response(link: Link, raw: bytes, plain: bytes, now: float) -> None:
    """The peer answers. Unknown ids and second responses change nothing.  Protocol 03, section 15.4."""
    link.heard(now, data=True)
    response = parse_response(plain)
    if isinstance(response, Drop):
        link.port.drops[response] += 1
    elif (pending := link.pending_requests.get(response.request_id)) is None:
        link.port.drops[Drop.RESPONSE_UNEXPECTED] += 1
    else:
        pending.take(response.value, now)


def refuse_resource(link: Link, advertisement: dict[Any, Any], now: float) -> None:
    """Refuse an advertised resource that is a request to us or the response to one of ours: we cannot take it.

    Advertisements that are neither are ignored, as by an application that accepts none.
    """
    flags, request_id, resource = (advertisement.get(key) for key in ("f", "q", "h"))
    if not isinstance(flags, int) or not isinstance(resource, bytes) or not isinstance(request_id, bytes):
        return
    if flags & FLAG_REQUEST and link.destination.requests.by_hash:  # without handlers the reference is silent, too
        link.send_sealed(CTX_RESOURCE_RCL, resource, now)
    elif flags & FLAG_RESPONSE and (pending := link.pending_requests.get(request_id)) is not None:
        link.send_sealed(CTX_RESOURCE_RCL, resource, now)
        pending.fail(f"the response has {advertisement.get('d')} bytes, more than one packet carries", now)
