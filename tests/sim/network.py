"""Many transport nodes in one process and in virtual time: only the nodes that something happens to are looked at.

    net = Network(seed=7)
    nodes = net.relays(9)
    net.ring(nodes)
    places = {node: net.announce(node) for node in nodes}
    net.settle()

Wires have delay, jitter (which reorders), loss, duplication and a cut, as in `tests.virtualnet`. A wire that is `paced`
carries no more than its port's bitrate, behind a bounded queue; one that is `stalled` as well is a peer that accepts
and never reads. Everything random comes from one seed.

With `verify_seconds` an announce costs its node that much time, as the reactor spends it: a few at a time, and whatever
has arrived meanwhile comes first. Without, nodes are infinitely fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from itertools import pairwise
from math import inf
from typing import Any

from rnsfast.engine.destination import Destination, ProofStrategy
from rnsfast.engine.engine import Engine
from rnsfast.engine.events import AnnounceHeard
from rnsfast.engine.inbound import Item, Unverified
from rnsfast.engine.port import Local, Policy, Port
from rnsfast.engine.receipts import Status
from rnsfast.wire.packet import ANNOUNCE
from tests.virtualnet import UNIX, Recorder, SimNode, VirtualNet, Wire

#: Nothing is held and nothing limited: what is looked at is the protocol. Scenarios about limits say so.
OPEN = Policy(ingress_control=False, announce_cap=1.0)

BACKLOG = 4 << 20  # bytes that wait for a paced wire; packets beyond are dropped whole, as an interface does
CONGESTED = 256 << 10  # bytes of backlog from which the port says so


class PacedWire(Wire):
    """A wire with a rate: what is offered faster waits, up to a bound."""

    def __init__(self, net: Network, source: Port, sink: Port, node: SimNode, delay: float) -> None:
        super().__init__(net, source, sink, node, delay)
        self.network = net
        self.stalled = False  # the far end does not read
        self.limit = BACKLOG
        self.backlog = 0  # bytes
        self.most = 0  # bytes of backlog there have been
        self.overflowed = 0  # packets
        self._waiting: list[bytes] = []
        self._free_at = 0.0

    def carry(self, raw: bytes) -> None:
        if self.backlog + len(raw) > self.limit:
            self.overflowed += 1
            return
        self.backlog += len(raw)
        self.most = max(self.most, self.backlog)
        self.source.congested = self.backlog > CONGESTED
        if self.stalled:
            self._waiting.append(raw)
            return
        self._free_at = max(self._free_at, self.net.now) + 8 * len(raw) / self.source.bitrate
        self.network.call_at(self._free_at, lambda: self._leaves(raw))

    def _leaves(self, raw: bytes) -> None:
        self.backlog -= len(raw)
        super().carry(raw)
        if self.source.congested and self.backlog <= CONGESTED:
            self.source.congested = False
            self.network.port_changed(self.source)

    def resume(self) -> None:
        """The far end reads again."""
        self.stalled = False
        waiting, self._waiting = self._waiting, []
        self.backlog -= sum(map(len, waiting))
        for raw in waiting:
            self.carry(raw)


class Network(VirtualNet):
    def __init__(self, seed: int = 1, *, verify_seconds: float = 0.0, policy: Policy = OPEN) -> None:
        super().__init__(seed)
        self.policy = policy  # of all cables that do not have their own
        self._due: list[tuple[float, int, SimNode | Callable[[], object]]] = []
        self._armed: dict[SimNode, float] = {}
        self._wire_of: dict[Port, Wire] = {}
        self._owner: dict[Port, SimNode] = {}
        self._verify_seconds = verify_seconds
        self._verifying: dict[SimNode, list[tuple[Port, list[bytes]]]] = {}  # nodes at it, and what arrived meanwhile
        self.announces_sent = 0
        self.taken_at = self.now  # when an announce was last taken anywhere
        self.taken: dict[tuple[bytes, bytes], int] = {}  # how often a node took an announce, see `key_of`
        self.on_taken: Callable[[SimNode, AnnounceHeard], object] | None = None

    # -- building -------------------------------------------------------------------------------------------------

    def node(self, name: str, **options: Any) -> SimNode:
        options.setdefault("entropy", self.random.randbytes)
        node = super().node(name, **options)
        node.options = options  # type: ignore[attr-defined]
        self._listen(node)
        return node

    def _listen(self, node: SimNode) -> None:
        node.recorder.on["announce_heard"] = lambda event: self._taken(node, event)

    def _taken(self, node: SimNode, event: AnnounceHeard) -> None:
        self.taken_at = self.now
        key = node.engine.transport_id, event.destination + node.engine.paths.paths[event.destination].blobs[-1]
        self.taken[key] = self.taken.get(key, 0) + 1
        if self.on_taken is not None:
            self.on_taken(node, event)

    def relay(self, name: str) -> SimNode:
        return self.node(name, transport=True)

    def relays(self, count: int) -> list[SimNode]:
        return [self.relay(f"n{i}") for i in range(count)]

    def join(
        self, a: SimNode, b: SimNode, *, delay: float = 0.010, paced: bool = False, **options: Any
    ) -> tuple[Wire, Wire]:
        """A cable. `options` are those of both its ports."""
        options.setdefault("policy", self.policy)
        number = f"-{len(self.wires) // 2}"  # two nodes may have several cables between them
        pa, pb = a.port(f"to-{b.name}{number}", **options), b.port(f"to-{a.name}{number}", **options)
        return self._wired(a, b, pa, pb, delay, PacedWire if paced else Wire)

    def behind(self, instance: SimNode, program: SimNode) -> tuple[Wire, Wire]:
        """The connection between a shared instance and a program of the same machine."""
        options: dict[str, Any] = {"hw_mtu": 262_144, "bitrate": 1_000_000_000, "policy": self.policy}
        theirs = instance.port(f"from-{program.name}", local=Local.CLIENT, **options)
        ours = program.port("instance", local=Local.INSTANCE, **options)
        return self._wired(instance, program, theirs, ours, 0.0001, Wire)

    def _wired(self, a: SimNode, b: SimNode, pa: Port, pb: Port, delay: float, kind: type[Wire]) -> tuple[Wire, Wire]:
        wires = kind(self, pa, pb, b, delay), kind(self, pb, pa, a, delay)  # type: ignore[arg-type]
        for wire, owner in zip(wires, (a, b), strict=True):
            self.wires.append(wire)
            self._wire_of[wire.source] = wire
            self._owner[wire.source] = owner
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
                self._set_online(wire.source, self._owner[wire.source], False)

    def mend(self, wires: tuple[Wire, Wire]) -> None:
        for wire in wires:
            wire.cut = False
            self._set_online(wire.source, self._owner[wire.source], True)

    def _set_online(self, port: Port, node: SimNode, online: bool) -> None:
        if port.online != online:
            port.online = online
            self.port_changed(port)

    def port_changed(self, port: Port) -> None:
        """`online` or `congested` has another value."""
        node = self._owner[port]
        node.engine.changed(port, self.now)
        self._look_after(node)

    def unplug(self, wire: Wire) -> None:
        """The interface at the wire's source is taken away at run time."""
        node = self._owner[wire.source]
        wire.cut = True
        node.engine.detach(wire.source, self.now)
        self._look_after(node)

    def remove(self, node: SimNode) -> None:
        """Its power is off: whoever was connected notices."""
        self.nodes.remove(node)
        self._armed.pop(node, None)
        for wire in [wire for wire in self.wires if wire.node is node or wire.source in node.engine.ports]:
            self.wires.remove(wire)
            self._wire_of.pop(wire.source, None)
            if wire.node is node:
                other = self._owner[wire.source]
                other.engine.detach(wire.source, self.now)
                self._look_after(other)

    def restart(
        self, node: SimNode, prepare: Callable[[Engine], object] | None = None, *, noticed: bool = True
    ) -> None:
        """The program is ended and started again: a new engine on the old cables, with the same identities.

        Args:
            prepare: called with the new engine before it has interfaces, as for what was stored.
            noticed: its connections go down and up again; otherwise nobody is told.
        """
        old = node.engine
        wires = [wire for wire in self.wires if wire.source in old.ports]
        if noticed:
            for wire in wires:
                self._set_online(self._back(wire).source, wire.node, False)
        options = dict(node.options, transport_identity=old.transport_identity)  # type: ignore[attr-defined]
        node.recorder = Recorder()
        self._listen(node)
        node.engine = Engine(node.recorder, self.now, unix_offset=UNIX, **options)  # type: ignore[arg-type]
        self._armed.pop(node, None)
        if prepare is not None:
            prepare(node.engine)
        for destination in old.destinations.values():
            node.engine.register(destination)
        for wire in wires:
            back, before = self._back(wire), wire.source
            port = Port(
                before.name, interface_hash=before.hash, mode=before.mode, bitrate=before.bitrate, hw_mtu=before.hw_mtu,
                upgradable=before.upgradable, outgoing=before.outgoing, gravity=before.gravity, policy=before.policy,
                local=before.local,
            )  # fmt: skip
            port.online = True
            del self._wire_of[before], self._owner[before]
            self._wire_of[port], self._owner[port] = wire, node
            wire.source = back.sink = port
            node.engine.attach(port, self.now)
            if noticed:
                self._set_online(back.source, wire.node, True)
        self._look_after(node)

    def _back(self, wire: Wire) -> Wire:
        return self._wire_of[wire.sink]

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
        found = [source]
        while len(found) <= len(self.nodes) + 1 and (node := self.next_of(found[-1], target)) is not None:
            found.append(node)
        return found

    def next_of(self, node: SimNode, target: Destination) -> SimNode | None:
        """Where `node` would send a packet for `target`; None if it is its own, or it knows no way."""
        if (target.hash, target.kind) in node.engine.destinations:
            return None
        path = node.engine.paths.usable(target.hash)
        wire = None if path is None else self._wire_of.get(path.port)
        return None if wire is None else wire.node

    def relayed(self) -> int:
        """Packets that relays have sent on so far."""
        return sum(node.engine.transport.relay.forwarded for node in self.nodes if node.engine.transport is not None)

    # -- time -----------------------------------------------------------------------------------------------------

    def call_at(self, when: float, what: Callable[[], object]) -> None:
        """Have `what` called at a moment."""
        heappush(self._due, (when, next(self._numbers), what))

    def every(self, seconds: float, times: int, what: Callable[[int], object]) -> None:
        """Have `what` called `times` times, with the number of the call."""
        for n in range(times):
            self.call_at(self.now + n * seconds, lambda n=n: what(n))  # type: ignore[misc]

    def _look_after(self, node: SimNode) -> None:
        """Something was done to `node`: carry what it sends, and note when it wants to be called."""
        engine = node.engine
        if not self._verify_seconds:
            while engine.inbound:
                items = engine.inbound.take()
                engine.verified(items, engine.verify(items), self.now)
        elif engine.inbound and node not in self._verifying:
            self._start_verifying(node)
        for port in sorted(engine.dirty, key=str):  # in an order that is the same in every run
            wire = self._wire_of.get(port)
            packets = port.take()
            if wire is None:
                continue
            for raw in packets:
                assert len(raw) <= port.hw_mtu, f"{port} was given {len(raw)} bytes"
                self.announces_sent += raw[0] & 3 == ANNOUNCE
                wire.carry(raw)
        engine.dirty.clear()
        engine.touched.clear()
        due = engine.timers.deadline
        if due < self._armed.get(node, inf):
            self._armed[node] = due
            heappush(self._due, (due, next(self._numbers), node))

    def _start_verifying(self, node: SimNode) -> None:
        items = node.engine.inbound.take()
        self._verifying[node] = []
        announces = sum(isinstance(item, Unverified) for item in items)
        self.call_at(self.now + self._verify_seconds * announces, lambda: self._end_verifying(node, items))

    def _end_verifying(self, node: SimNode, items: list[Item]) -> None:
        waiting, engine = self._verifying.pop(node), node.engine
        engine.verified(items, engine.verify(items), self.now)
        for port, packets in waiting:
            self._receive(node, port, packets)
        self._look_after(node)

    def _receive(self, node: SimNode, port: Port, packets: list[bytes]) -> None:
        engine = node.engine
        if node in self._verifying:
            self._verifying[node].append((port, packets))
        elif self._verify_seconds:
            packets = engine.relay(port, packets, self.now)
            if packets:
                engine.intake(port, packets, self.now)
                engine.settle_now(self.now)
        else:
            engine.receive(port, packets, self.now)

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
                    self._receive(wire.node, port, packets)
                    busy[wire.node] = None
            while self._due and self._due[0][0] <= self.now:
                when, _, what = heappop(self._due)
                if not isinstance(what, SimNode):
                    what()
                elif self._armed.get(what) == when:
                    del self._armed[what]
                    what.engine.run_timers(self.now)
                    busy[what] = None
            for node in busy:
                self._look_after(node)

    def settle(self, quiet: float = 7.0, limit: float = 600.0) -> float:
        """Run until no announce has been taken for `quiet` seconds; returns how long after now the last one was."""
        began = self.taken_at = self.now
        while self.now < min(self.taken_at + quiet, began + limit):
            self.run_until(min(self.taken_at + quiet, began + limit))
        return self.taken_at - began
