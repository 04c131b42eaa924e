"""Path requests of others: answered from the table, joined, or passed on.  Protocol 02, sections 3.4, 7 and 12.4."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Final

from rnsfast.engine.inbound import Asked, TrafficClass
from rnsfast.engine.known import Path
from rnsfast.engine.port import Local, Mode
from rnsfast.engine.transport.rebroadcast import packet_of, payload_of
from rnsfast.wire.packet import CTX_NONE, CTX_PATH_RESPONSE, DATA, MAX_HOPS, MTU, PLAIN, make_raw
from rnsfast.wire.pathrequest import PATH_REQUEST_DESTINATION, PathRequest, build_path_request

if TYPE_CHECKING:
    from rnsfast.engine.port import Port
    from rnsfast.engine.transport.transport import Transport

IN_FLIGHT: Final = 45.0  # seconds for which an unanswered request is only joined
IN_FLIGHT_LIMIT: Final = 16_384  # destinations; the oldest gives way
GRACE: Final = 0.4  # seconds: who is nearer answers first
ROAMING_GRACE: Final = 1.5  # seconds more, where others come and go
PATIENCE: Final = 15.0  # seconds a search waits for its answer, at least
WAITING_LIMIT: Final = 16_384  # searches; the oldest gives way

_EVERYWHERE: Final = frozenset((Mode.ACCESS_POINT, Mode.GATEWAY, Mode.ROAMING, Mode.INTERNAL))
_BORDERS: Final = frozenset((Mode.BOUNDARY, Mode.GATEWAY))


@dataclass(slots=True)
class Waiting:
    """Interfaces that wait for a path to one destination."""

    deadline: float
    engaged: bool = False  # a search was sent; otherwise they were only noted
    ports: list[Port] = field(default_factory=list)


class Searches:
    """Who asked for what and has no answer yet."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.in_flight: dict[bytes, float] = {}  # destination to when it was asked for, oldest first
        self.waiting: dict[bytes, Waiting] = {}  # oldest first
        self.awaited: dict[bytes, float] = {}  # of programs behind us, asked for by others: destination to when

    def is_requested(self, destination: bytes, now: float) -> bool:
        """Whether somebody waits for it, so that its announce must not be held."""
        waiting = self.waiting.get(destination)
        return waiting is not None and now <= waiting.deadline

    def receive(self, port: Port, request: PathRequest, tag: bytes, now: float) -> None:
        """A request that is new, for a destination that is not ours: cheap things at once, the rest in its turn."""
        intake = self._transport.intakes[port]
        intake.requests.note(now)
        limited = intake.is_request_burst(now)
        if not self._is_joined(port, request.destination, limited, now):
            kind = TrafficClass.INGRESS_LIMITED if limited else TrafficClass.PATH_REQUEST
            self._transport.engine.inbound.put(kind, port, Asked(port, request, tag, limited))
            self._transport.wake(intake.due)

    def _is_joined(self, port: Port, destination: bytes, limited: bool, now: float) -> bool:
        """Whether the same was asked a short while ago and has no answer yet: then all wait for that one."""
        asked_at = self.in_flight.get(destination)
        is_client = port.local is Local.CLIENT
        if asked_at is None or now - asked_at >= (PATIENCE if is_client else IN_FLIGHT):
            return False
        can_answer = is_client or self._transport.carries
        if can_answer and self._transport.engine.paths.usable(destination) is not None:
            return False
        if can_answer and not limited:
            self._join(port, destination, now)
        return True

    def handle(self, asked: Asked, now: float) -> None:
        """Answer it, or ask others."""
        port, request, tag, limited = asked.port, asked.request, asked.tag, asked.limited
        transport, destination = self._transport, request.destination
        path = transport.engine.paths.usable(destination)
        is_client = port.local is Local.CLIENT
        if path is not None and path.hops == 0 and not is_client:
            self.awaited[destination] = now  # bounded by the paths there are
        if path is not None and (is_client or transport.carries):
            self.in_flight.pop(destination, None)
            self._answer(port, request, path, now)
            return
        if self._is_joined(port, destination, limited, now):
            return
        self.in_flight.pop(destination, None)
        if len(self.in_flight) >= IN_FLIGHT_LIMIT:
            del self.in_flight[next(iter(self.in_flight))]
        self.in_flight[destination] = now
        if is_client:
            self._ask(destination, [out for out in transport.engine.ports if out is not port])
        elif not limited and not (transport.carries and self._search(port, destination, tag, now)):
            self._ask(destination, transport.clients)

    def is_awaited(self, destination: bytes, now: float) -> bool:
        """Whether others have asked for a destination of a program behind us lately. That is over once it is said."""
        return now - self.awaited.pop(destination, -inf) < IN_FLIGHT

    def _ask(self, destination: bytes, ports: list[Port]) -> None:
        """Ask on each of `ports`, as if it were our own question."""
        announcing = self._transport.engine.announcing
        for out in ports:
            if out.online and out.outgoing:
                out.send(announcing.path_request(destination))

    def _join(self, port: Port, destination: bytes, now: float) -> None:
        waiting = self.waiting.get(destination)
        if waiting is None or now > waiting.deadline:
            waiting = self._wait(destination, now)
        if port not in waiting.ports:
            waiting.ports.append(port)

    def _wait(self, destination: bytes, now: float) -> Waiting:
        self.waiting.pop(destination, None)
        if len(self.waiting) >= WAITING_LIMIT:
            del self.waiting[next(iter(self.waiting))]
        waiting = self.waiting[destination] = Waiting(now + self._patience())
        return waiting

    def _patience(self) -> float:
        rates = [port.bitrate for port in self._transport.engine.ports if port.online and port.bitrate > 0]
        slowest = max(min(rates, default=1_000_000), 5)
        return max(PATIENCE, 2 * 8 * MTU / slowest + 6)

    def _answer(self, port: Port, request: PathRequest, path: Path, now: float) -> None:
        """From the table, after a moment. Not back to where the path leads."""
        roaming = port.mode is Mode.ROAMING
        if not path.announce or (roaming and path.port is port) or request.transport_id == path.next_hop:
            return
        due = now + GRACE + (ROAMING_GRACE if roaming else 0.0)
        if port.local is Local.CLIENT or path.hops == 0:
            due = now  # nobody can be nearer
        self._transport.announces.answer(request.destination, path.hops, path.announce, port, due)

    def _search(self, port: Port, destination: bytes, tag: bytes, now: float) -> bool:
        """Ask the others. False if `port` is not one for which that is done."""
        mode, policy = port.mode, port.policy
        if mode is not Mode.BOUNDARY and not policy.recursive_prs and mode not in _EVERYWHERE:
            return False
        waiting = self.waiting.get(destination)
        if waiting is not None and waiting.engaged and now <= waiting.deadline:
            return True
        if waiting is None or now > waiting.deadline:
            waiting = self._wait(destination, now)
        waiting.engaged = True
        waiting.deadline = now + self._patience()
        if port not in waiting.ports:
            waiting.ports.append(port)
        borders_only = mode is Mode.BOUNDARY and not policy.recursive_prs
        transport = self._transport
        data = build_path_request(PathRequest(destination, transport.engine.transport_id, tag))
        raw = make_raw(PLAIN << 2 | DATA, PATH_REQUEST_DESTINATION, CTX_NONE, data)
        for out in transport.engine.ports:
            if out is port or not out.online or not out.outgoing or (borders_only and out.mode not in _BORDERS):
                continue
            intake, outlet = transport.intakes[out], transport.outlets[out]
            if intake.is_egress_limited(now) or not outlet.has_room(now):
                continue
            outlet.spend(len(raw), now)
            intake.outgoing_requests.note(now)
            out.send(raw)
        return True

    def found(self, destination: bytes, path: Path, now: float) -> None:
        """An announce was taken: tell who waits for it, at once."""
        self.in_flight.pop(destination, None)
        waiting = self.waiting.pop(destination, None)
        if waiting is None or now > waiting.deadline or path.hops >= MAX_HOPS:
            return
        flag, data = payload_of(path.announce)
        own = self._transport.engine.transport_id
        raw = packet_of(own, destination, path.hops, flag, CTX_PATH_RESPONSE, data)
        if len(raw) > MTU:
            return
        for port in waiting.ports:
            if port.online:
                port.send(raw)

    def leave(self, port: Port) -> None:
        """`port` is gone."""
        for waiting in self.waiting.values():
            if port in waiting.ports:
                waiting.ports.remove(port)

    def clean(self, now: float) -> None:
        """Forget what is over."""
        for destination in [d for d, at in self.in_flight.items() if now - at >= IN_FLIGHT]:
            del self.in_flight[destination]
        for destination in [d for d, waiting in self.waiting.items() if now > waiting.deadline]:
            del self.waiting[destination]
        for destination in [d for d, at in self.awaited.items() if now - at >= IN_FLIGHT]:
            del self.awaited[destination]
