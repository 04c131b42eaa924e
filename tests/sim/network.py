"""Many transport nodes in one process and in virtual time: only the nodes that something happens to are looked at.

    net = Network(seed=7)
    nodes = net.relays(9)
    net.ring(nodes)
    places = {node: net.announce(node) for node in nodes}
    net.settle()

Wires have delay, jitter, loss, duplication and a cut, as in `tests.virtualnet`, and a rate by their port's bitrate when
`paced`. Everything random comes from one seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from itertools import pairwise
from math import inf
from typing import Any

from rnsfast.engine.destination import Destination, ProofStrategy
from rnsfast.engine.port import Policy, Port
from rnsfast.engine.receipts import Status
from rnsfast.wire.packet import ANNOUNCE, HEADER_2
from tests.virtualnet import SimNode, VirtualNet, Wire

#: Nothing is held and nothing limited: what is looked at is the protocol. Scenarios about limits say so.
OPEN = Policy(ingress_control=False, announce_cap=1.0)


class Network(VirtualNet):
    def __init__(self, seed: int = 1) -> None:
        super().__init__(seed)
        self._due: list[tuple[float, int, SimNode]] = []
        self._armed: dict[SimNode, float] = {}
        self._wire_of: dict[Port, Wire] = {}
        self.announces_sent = 0

    # -- building -------------------------------------------------------------------------------------------------

    def relay(self, name: str) -> SimNode:
        return self.node(name, transport=True)

    def relays(self, count: int) -> list[SimNode]:
        return [self.relay(f"n{i}") for i in range(count)]

    def join(self, a: SimNode, b: SimNode, *, delay: float = 0.010, **options: Any) -> tuple[Wire, Wire]:
        options.setdefault("policy", OPEN)
        wires = super().join(a, b, delay=delay, **options)
        for wire in wires:
            self._wire_of[wire.source] = wire
        return wires

    def line(self, nodes: Sequence[SimNode], **options: Any) -> list[tuple[Wire, Wire]]:
        return [self.join(a, b, **options) for a, b in pairwise(nodes)]

    def ring(self, nodes: Sequence[SimNode], **options: Any) -> list[tuple[Wire, Wire]]:
        return [*self.line(nodes, **options), self.join(nodes[-1], nodes[0], **options)]

    def star(self, centre: SimNode, others: Iterable[SimNode], **options: Any) -> list[tuple[Wire, Wire]]:
        return [self.join(centre, other, **options) for other in others]

    def grid(self, nodes: Sequence[SimNode], width: int, **options: Any) -> None:
        for i, node in enumerate(nodes):
            if (i + 1) % width and i + 1 < len(nodes):
                self.join(node, nodes[i + 1], **options)
            if i + width < len(nodes):
                self.join(node, nodes[i + width], **options)

    def tangle(self, nodes: Sequence[SimNode], extra: int, **options: Any) -> None:
        """A random tree and `extra` edges more."""
        for i in range(1, len(nodes)):
            self.join(nodes[i], nodes[self.random.randrange(i)], delay=self.random.uniform(0.002, 0.08), **options)
        for _ in range(extra):
            a, b = self.random.sample(range(len(nodes)), 2)
            self.join(nodes[a], nodes[b], delay=self.random.uniform(0.002, 0.08), **options)

    def cut(self, wires: tuple[Wire, Wire], *, down: bool = True) -> None:
        """The cable is out, and with `down` both ends notice."""
        for wire in wires:
            wire.cut = True
            if down:
                self._set_online(wire.source, self._node_of(wire.source), False)

    def mend(self, wires: tuple[Wire, Wire]) -> None:
        for wire in wires:
            wire.cut = False
            self._set_online(wire.source, self._node_of(wire.source), True)

    def _set_online(self, port: Port, node: SimNode, online: bool) -> None:
        if port.online != online:
            port.online = online
            node.engine.changed(port, self.now)
            self._look_after(node)

    def _node_of(self, port: Port) -> SimNode:
        return next(node for node in self.nodes if port in node.engine.ports)

    def remove(self, node: SimNode) -> None:
        """Its power is off: whoever was connected notices."""
        self.nodes.remove(node)
        self._armed.pop(node, None)
        for wire in [wire for wire in self.wires if wire.node is node or wire.source in node.engine.ports]:
            self.wires.remove(wire)
            self._wire_of.pop(wire.source, None)
            if wire.node is node:
                other = self._node_of(wire.source)
                other.engine.detach(wire.source, self.now)
                self._look_after(other)

    # -- acting ---------------------------------------------------------------------------------------------------

    def announce(self, node: SimNode, *aspects: str, destination: Destination | None = None) -> Destination:
        """A destination of `node`, proved always, and its announce."""
        made = node.inbound(*(aspects or (node.name,))) if destination is None else destination
        made.proofs = ProofStrategy.ALL
        node.engine.announcing.announce(made, node.name.encode(), self.now)
        self._look_after(node)
        return made

    def delivers(self, source: SimNode, target: Destination, patience: float = 30.0) -> bool:
        """Whether a packet arrives and its proof comes back."""
        receipt = source.engine.send_packet(source.outbound(target), b"are you there", self.now)
        assert receipt is not None
        self._look_after(source)
        self.run(patience, lambda: receipt.status is not Status.SENT)
        return receipt.status is Status.DELIVERED

    def ask(self, node: SimNode, target: Destination, patience: float = 20.0) -> bool:
        """Whether a path request brings a path."""
        node.engine.announcing.request_path(target.hash, self.now)
        self._look_after(node)
        self.run(patience, lambda: node.engine.paths.usable(target.hash) is not None)
        return node.engine.paths.usable(target.hash) is not None

    def way(self, source: SimNode, target: Destination) -> list[SimNode]:
        """The nodes that a packet would visit, by the tables alone; ends where nobody knows on or at the owner."""
        found, node = [source], source
        while (target.hash, target.kind) not in node.engine.destinations and len(found) <= len(self.nodes) + 1:
            path = node.engine.paths.usable(target.hash)
            if path is None or path.port not in self._wire_of:
                break
            node = self._wire_of[path.port].node
            found.append(node)
        return found

    # -- time -----------------------------------------------------------------------------------------------------

    def _look_after(self, node: SimNode) -> None:
        """Something was done to `node`: carry what it sends, and note when it wants to be called."""
        engine = node.engine
        while engine.unverified:
            items = engine.unverified.take()
            engine.verified(items, engine.verify(items), self.now)
        for port in list(engine.dirty):
            wire = self._wire_of.get(port)
            packets = port.take()
            if wire is None:
                continue
            for raw in packets:
                self.announces_sent += raw[0] & 3 == ANNOUNCE
                wire.carry(raw)
        engine.dirty.clear()
        engine.touched.clear()
        due = engine.timers.deadline
        if due < self._armed.get(node, inf):
            self._armed[node] = due
            heappush(self._due, (due, next(self._numbers), node))

    def flush(self) -> None:
        for node in self.nodes:
            self._look_after(node)

    def run_until(self, end: float, stop: Callable[[], bool] | None = None) -> None:
        self.flush()
        alive = set(self.nodes)
        while stop is None or not stop():
            now = min(self._flying[0][0] if self._flying else inf, self._due[0][0] if self._due else inf)
            if now > end:
                self.now = end
                return
            self.now = max(now, self.now)
            batches: dict[Port, tuple[Wire, list[bytes]]] = {}
            while self._flying and self._flying[0][0] <= self.now:
                _, _, wire, raw = heappop(self._flying)
                if wire.node in alive and not wire.cut:
                    batches.setdefault(wire.sink, (wire, []))[1].append(raw)
            busy: dict[SimNode, None] = {}
            for port, (wire, packets) in batches.items():
                if port.online:
                    wire.node.engine.receive(port, packets, self.now)
                    busy[wire.node] = None
            while self._due and self._due[0][0] <= self.now:
                when, _, node = heappop(self._due)
                if self._armed.get(node) == when:
                    del self._armed[node]
                    node.engine.run_timers(self.now)
                    busy[node] = None
            for node in busy:
                self._look_after(node)

    def settle(self, quiet: float = 7.0, limit: float = 600.0) -> float:
        """Run until no path changes any more for `quiet` seconds; returns when the last one did, from now."""
        began, last, known = self.now, self.now, self._paths()
        while self.now < began + limit:
            self.run(0.25)
            now_known = self._paths()
            if now_known != known:
                known, last = now_known, self.now
            elif self.now - last > quiet:
                break
        return last - began

    def _paths(self) -> int:
        return sum(len(node.engine.paths.paths) for node in self.nodes)


def is_rebroadcast(raw: bytes) -> bool:
    return raw[0] & 3 == ANNOUNCE and bool(raw[0] & HEADER_2)


def rebroadcasts(net: Network) -> dict[tuple[bytes, bytes, int], int]:
    """How often each node sent each announce on each interface: (node's transport id, announce body, interface)."""
    found: dict[tuple[bytes, bytes, int], int] = {}
    for wire in net.wires:
        for raw in wire.sent:
            if is_rebroadcast(raw) and not raw[34]:
                key = raw[2:18], raw[18:34] + raw[109:119], id(wire)
                found[key] = found.get(key, 0) + 1
    return found
