"""What makes a node a transport node or a shared instance: the control plane around the relay.

Protocol 02, sections 5 to 9 and 12.

The engine shows it every batch before it looks itself, every packet that passed the filter, every announce that is
valid and every one that was taken. It answers by filling the tables of the relay and by queueing packets.

Programs behind a shared instance are clients: ports with `Local.CLIENT`. What comes from them or is for them goes on
whether or not the node is a transport node; a path of 0 hops leads to one of them.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import TYPE_CHECKING, Final

from rnsfast.engine.inbound import Asked
from rnsfast.engine.known import Path
from rnsfast.engine.linktable import LinkEntry, LinkTable
from rnsfast.engine.port import Local, Mode, Port
from rnsfast.engine.transport.ingress import Intake
from rnsfast.engine.transport.outlets import Outlet
from rnsfast.engine.transport.rates import Rates
from rnsfast.engine.transport.rebroadcast import AnnounceTable, packet_of, payload_of
from rnsfast.engine.transport.relay import Relay
from rnsfast.engine.transport.search import Searches
from rnsfast.engine.transport.tunnels import Tunnels
from rnsfast.wire.announce import Announce
from rnsfast.wire.drop import Drop
from rnsfast.wire.packet import (
    CTX_LRPROOF,
    CTX_NONE,
    CTX_PATH_RESPONSE,
    DATA,
    HEADER_2,
    LINK,
    LINKREQUEST,
    MAX_HOPS,
    MTU,
    PLAIN,
    PROOF,
    SINGLE,
    TRANSPORT,
    Packet,
)
from rnsfast.wire.pathrequest import PathRequest
from rnsfast.wire.tunnel import TUNNEL_DESTINATION

if TYPE_CHECKING:
    from rnsfast.engine.engine import Engine

CLEANING: Final = 5.0  # seconds between looks at what may be over, while there is anything
REQUEST_SPACING: Final = 0.5  # seconds between path requests that the node makes by itself
REQUEST_QUEUE: Final = 32  # of these; more are not made
REQUESTED_RECENTLY: Final = 20.0  # seconds for which a request for the same destination is not repeated


class Transport:
    """The forwarding part of an engine. Everything is called under the node's lock.

    `carries` is what a transport node does: going on with what is neither from nor for a program of this machine.
    """

    def __init__(self, engine: Engine, *, carries: bool) -> None:
        self.engine = engine
        self.carries = carries
        self.clients: list[Port] = []
        self.links = LinkTable()
        self.relay = Relay(engine, self.links)
        self.announces = AnnounceTable(self)
        self.searches = Searches(self)
        self.tunnels = Tunnels(self)
        self.rates = Rates()
        self.outlets: dict[Port, Outlet] = {}
        self.intakes: dict[Port, Intake] = {}
        self.armed = inf
        self._cleaned_at = 0.0
        self._requests: deque[tuple[bytes, Port | None]] = deque()  # destination and where not to ask
        self._request_at = 0.0

    # ------------------------------------------------------------------ ports

    def attach(self, port: Port, now: float) -> None:
        """A new interface."""
        if port.local is Local.CLIENT:
            self.clients.append(port)
        self.outlets[port] = Outlet(port)
        self.intakes[port] = Intake(port, now)

    def detach(self, port: Port) -> None:
        """An interface is gone for good."""
        self.lost(port)
        if port in self.clients:
            self.clients.remove(port)
        self.tunnels.detach(port)
        self.outlets.pop(port, None)
        self.intakes.pop(port, None)

    def lost(self, port: Port) -> None:
        """An interface is down, or gone: what runs over it ends here."""
        self.links.leave(port)
        self.searches.leave(port)
        self.announces.leave(port)
        self.tunnels.leave(port)

    # ------------------------------------------------------------------ packets

    def handles(self, port: Port, packet: Packet, raw: bytes, now: float) -> bool:
        """A packet that the relay left and the filter let through. True if that is all that happens to it."""
        kind = packet.flags & 3
        if kind == LINKREQUEST:
            return packet.flags >> 2 & 3 == SINGLE and self._link_request(port, packet, raw, now)
        if kind == PROOF:
            is_of_link = packet.context == CTX_LRPROOF and packet.flags >> 2 & 3 == LINK
            if is_of_link and packet.destination in self.links:
                self._link_proof(port, packet, raw, now)
                return True
            return False
        if kind == DATA and packet.flags >> 2 & 3 == PLAIN:
            return self._broadcast(port, packet, raw, now)
        if kind == DATA and packet.transport_id is not None and packet.flags >> 2 & 3 == SINGLE:
            if (packet.destination, SINGLE) in self.engine.destinations:
                return False
            path = self.engine.paths.usable(packet.destination)
            if path is not None:  # else the relay would have sent it on
                port.drops[Drop.TOO_MANY_HOPS if self._goes_on(port, path) else Drop.NOT_FORWARDED] += 1
                return True
            port.drops[Drop.NO_PATH] += 1
            self.no_way(packet.destination, port, now)
            return True
        return False

    def _goes_on(self, port: Port, path: Path) -> bool:
        """Whether a packet from `port` along `path` is ours to forward."""
        return self.carries or port.local is Local.CLIENT or path.hops == 0

    def _broadcast(self, port: Port, packet: Packet, raw: bytes, now: float) -> bool:
        """A PLAIN packet: between the network and the programs behind us it is passed on as it is, counted nowhere."""
        if packet.destination == TUNNEL_DESTINATION:
            if self.carries and port.local is Local.NO:
                self.tunnels.receive(port, packet.data, now)
                self.wake(now + CLEANING)
            return True
        if self.clients and not packet.flags & (HEADER_2 | TRANSPORT):
            for out in self.engine.ports if port.local is Local.CLIENT else self.clients:
                if out is port or not out.online or not out.outgoing:
                    continue
                if len(raw) > out.hw_mtu:
                    port.drops[Drop.TX_TOO_LARGE] += 1
                else:
                    out.send(raw)
        return False

    def _link_request(self, port: Port, packet: Packet, raw: bytes, now: float) -> bool:
        """A link that runs through this node, if the request is for us to forward."""
        engine = self.engine
        if (packet.destination, SINGLE) in engine.destinations:
            return False
        path = engine.paths.usable(packet.destination)
        if packet.transport_id is None and (path is None or path.hops):
            return False
        if path is None:
            port.drops[Drop.NO_PATH] += 1
            self.no_way(packet.destination, port, now)
            return True
        if not self._goes_on(port, path):
            port.drops[Drop.NOT_FORWARDED] += 1
            return True
        if len(raw) > MTU:
            port.drops[Drop.LINK_REQUEST_SIZE] += 1
            return True
        onward = self.links.enter(port, packet, raw, path, now)
        if isinstance(onward, Drop):
            port.drops[onward] += 1
            return True
        path.heard_at = now + engine.unix_offset
        path.port.send(onward)
        self.relay.forwarded += 1
        self.wake(now + CLEANING)
        return True

    def _link_proof(self, port: Port, packet: Packet, raw: bytes, now: float) -> None:
        engine = self.engine
        entry = self.links.get(packet.destination)
        assert entry is not None
        known = engine.known.entries.get(entry.destination)
        identity = None if known is None else known.identity()
        path = engine.paths.paths.get(entry.destination)
        onward = self.links.prove(port, raw, identity, path, now)
        if isinstance(onward, Drop):
            port.drops[onward] += 1
            return
        onward[0].send(onward[1])
        self.relay.forwarded += 1

    # ------------------------------------------------------------------ announces

    def announce_counted(self, port: Port, announce: Announce, raw: bytes, now: float, *, released: bool) -> bool:
        """A valid announce, before anything is made of it. True if it is held for later."""
        intake = self.intakes[port]
        if released or not self.carries or port.local is Local.CLIENT:
            return False
        intake.announces.note(now)
        burst = intake.is_announce_burst(now)
        destination = announce.destination
        engine = self.engine
        if not burst or destination in engine.paths.paths or (destination, 0) in engine.destinations:
            return False
        if engine.announcing.is_requested(destination, now) or self.searches.is_requested(destination, now):
            return False
        if not intake.hold(destination, raw):
            return False
        self.wake(intake.due)
        return True

    def announce_heard(self, packet: Packet, now: float) -> None:
        """A valid announce that came by way of another transport node, whether or not it is taken."""
        self.announces.overheard(packet.destination, packet.hops + 1, now)

    def announce_taken(self, port: Port, packet: Packet, raw: bytes, path: Path, now: float) -> None:
        """An announce changed the path table: pass it on, answer who waits for it."""
        path.is_answer = packet.context == CTX_PATH_RESPONSE
        if port.local is Local.CLIENT:
            if self.searches.is_awaited(packet.destination, now) or not path.is_answer:
                self.announces.rebroadcast_once(packet.destination, path.hops, raw, now)
        elif self.carries and not path.is_answer:
            self._pass_on(port, packet, raw, path, now)
        if self.clients:
            self._tell_clients(port, packet.destination, path, raw)
        self.searches.found(packet.destination, path, now)
        if self.carries:
            self.tunnels.path_taken(port, packet.destination, path, now + self.engine.unix_offset)
        self.wake(self.announces.due)

    def _tell_clients(self, source: Port, destination: bytes, path: Path, announce: bytes) -> None:
        """At once, and as an announce even if it was the answer to somebody's question.  Protocol 02, section 12.3."""
        if path.hops >= MAX_HOPS:
            return  # nobody would take it
        flag, data = payload_of(announce)
        raw = packet_of(self.engine.transport_id, destination, path.hops, flag, CTX_NONE, data)
        if len(raw) > MTU:
            self.engine.drops[Drop.ANNOUNCE_TOO_LONG] += 1
            return
        for client in self.clients:
            if client is not source and client.online:
                client.send(raw)

    def announce_follows(
        self, port: Port, packet: Packet, announce: Announce, raw: bytes, path: Path, now: float
    ) -> None:
        """The announce itself, after the answer to a path request has brought the path: it is passed on after all.

        A neighbour that knows we wait answers before it passes on. If the answer were all that counts (as in the
        reference), nobody behind us would hear of this announce.
        """
        if self.carries and announce.random_blob == path.blobs[-1]:
            path.is_answer = False
            self._pass_on(port, packet, raw, path, now)
            self.wake(self.announces.due)

    def _pass_on(self, port: Port, packet: Packet, raw: bytes, path: Path, now: float) -> None:
        if self.rates.is_blocked(packet.destination, port.policy, now + self.engine.unix_offset):
            return
        jitter = int.from_bytes(self.engine.entropy(2), "big") / 65536
        received_from = packet.transport_id or packet.destination
        self.announces.rebroadcast(packet.destination, received_from, path.hops, raw, now, jitter)

    # ------------------------------------------------------------------ path requests

    def path_requested(self, port: Port, request: PathRequest, tag: bytes, now: float) -> None:
        """Somebody looks for a destination that is not ours."""
        self.searches.receive(port, request, tag, now)

    def path_asked(self, asked: Asked, now: float) -> None:
        """Its turn has come."""
        self.searches.handle(asked, now)
        self.wake(min(self.announces.due, now + CLEANING))

    def no_way(self, destination: bytes, port: Port, now: float) -> None:
        """Somebody behind `port` sends to a destination whose path is gone or leads over an interface that is down.

        Whoever sends learns nothing of it (protocol 02, 5.1) and goes on; so that this does not last until an announce
        comes by, the node asks its other neighbours, once in a while and only for destinations it has heard of.
        """
        engine = self.engine
        if not (self.carries or port.local is Local.CLIENT):
            return
        if destination not in engine.known.entries or any(asked == destination for asked, _ in self._requests):
            return
        if not engine.announcing.was_requested(destination, now, REQUESTED_RECENTLY):
            self._ask(destination, port, now)
            self.wake(self._request_at)

    def _ask(self, destination: bytes, except_for: Port | None, now: float) -> None:
        """Have a path request made, not too many at once."""
        if len(self._requests) < REQUEST_QUEUE:
            self._requests.append((destination, except_for))
            self._request_at = max(self._request_at, now)

    def _unproved(self, entry: LinkEntry, now: float) -> None:
        """A link request that nobody answered: the path may be wrong.  Protocol 02, section 5.4."""
        engine, destination = self.engine, entry.destination
        path = engine.paths.paths.get(destination)
        if path is None:
            self._ask(destination, None, now)
            return
        if engine.announcing.was_requested(destination, now, REQUESTED_RECENTLY):
            return
        if entry.taken == 0:  # a program behind us waits
            self._ask(destination, None, now)
        elif path.hops == 1 or entry.taken == 1:
            if self.carries and entry.previous_port.mode is not Mode.BOUNDARY:
                path.unresponsive = True
            self._ask(destination, entry.previous_port, now)
        else:
            return
        if not self.carries:
            engine.paths.drop(destination)

    # ------------------------------------------------------------------ time

    def wake(self, when: float) -> None:
        """Something was added that falls due then."""
        self.engine.timers.arm(self, when)

    def _next(self) -> float:
        due = min(
            self.announces.due,
            min((outlet.due for outlet in self.outlets.values() if outlet.queue), default=inf),
            min((intake.due for intake in self.intakes.values()), default=inf),
        )
        if self._requests:
            due = min(due, self._request_at)
        if self._has_something_to_clean():
            due = min(due, self._cleaned_at + CLEANING)
        return due

    def _has_something_to_clean(self) -> bool:
        searches, links = self.searches, self.links
        asked = searches.in_flight or searches.waiting or searches.awaited
        return bool(asked or links.unproved or links.proved or self.tunnels.tunnels)

    def advance(self, now: float) -> float:
        """Do what is due, called by the engine's timers."""
        self.announces.advance(now)
        for outlet in self.outlets.values():
            if outlet.queue:
                outlet.advance(now)
        for port, intake in list(self.intakes.items()):
            if intake.due <= now:
                intake.is_request_burst(now)
                raw = intake.release(now)
                if raw is not None:
                    self.engine.announcing.release(port, raw, now)
        if now >= self._cleaned_at + CLEANING:
            self._clean(now)
        while self._requests and now >= self._request_at:
            destination, except_for = self._requests.popleft()
            self._request_at = now + REQUEST_SPACING
            self.engine.announcing.request_path(destination, now, except_for=except_for)
        return self._next()

    def _clean(self, now: float) -> None:
        self._cleaned_at = now
        self.searches.clean(now)
        for entry in self.links.clean(now):
            self._unproved(entry, now)
        self.tunnels.clean(now + self.engine.unix_offset)
