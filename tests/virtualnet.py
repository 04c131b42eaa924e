"""Engines joined by lists: networks in one process and in virtual time, with faults, seeded and repeatable."""

from __future__ import annotations

import random
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any

from rnsfast.crypto.identity import Identity
from rnsfast.engine.destination import Destination, Direction
from rnsfast.engine.engine import Engine
from rnsfast.engine.link import Link
from rnsfast.engine.port import Port
from rnsfast.wire.packet import SINGLE

UNIX = 1_700_000_000.0


class Recorder:
    """A listener that keeps everything it is told, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.on: dict[str, Callable[..., None]] = {}

    def _note(self, name: str, *args: Any) -> None:
        self.events.append((name, *args))
        if name in self.on:
            self.on[name](*args)

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args: self._note(name, *args)

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [event[1:] for event in self.events if event[0] == name]


class SimNode:
    """One engine, its recorder and its ports."""

    def __init__(self, net: VirtualNet, name: str, **options: Any) -> None:
        self.net, self.name = net, name
        self.recorder = Recorder()
        options.setdefault("entropy", net.random.randbytes)
        self.engine = Engine(self.recorder, net.now, unix_offset=UNIX, **options)  # type: ignore[arg-type]
        self.links: list[Link] = []

    def port(self, name: str, **options: Any) -> Port:
        port = Port(f"{self.name}/{name}", **options)
        port.online = True
        self.engine.attach(port, self.net.now)
        return port

    def inbound(self, *aspects: str) -> Destination:
        destination = Destination(Identity(entropy=self.net.random.randbytes), Direction.IN, SINGLE, "test", *aspects)
        self.engine.register(destination, self.net.now)
        return destination

    def outbound(self, destination: Destination) -> Destination:
        public = Identity.from_public(destination.identity.public_key)  # type: ignore[union-attr]
        app, *aspects = destination.name.split(".")
        return Destination(public, Direction.OUT, SINGLE, app, *aspects)


Fault = Callable[[bytes], bool]


class Wire:
    """One direction between two ports."""

    def __init__(self, net: VirtualNet, source: Port, sink: Port, node: SimNode, delay: float) -> None:
        self.net, self.source, self.sink, self.node, self.delay = net, source, sink, node, delay
        self.loss = self.duplication = 0.0
        self.jitter = 0.0
        self.drop: Fault | None = None
        self.cut = False
        self.sent: list[bytes] = []
        self.dropped = 0

    def carry(self, raw: bytes) -> None:
        self.sent.append(raw)
        draw = self.net.random.random
        if self.cut or (self.drop is not None and self.drop(raw)) or (self.loss and draw() < self.loss):
            self.dropped += 1
            return
        for _ in range(2 if self.duplication and draw() < self.duplication else 1):
            self.net.later(self.delay + self.jitter * draw(), self, raw)


class VirtualNet:
    """All nodes, all wires and the clock."""

    def __init__(self, seed: int = 1) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 1000.0
        self.nodes: list[SimNode] = []
        self.wires: list[Wire] = []
        self._flying: list[tuple[float, int, Wire, bytes]] = []
        self._numbers = count()

    def node(self, name: str, **options: Any) -> SimNode:
        node = SimNode(self, name, **options)
        self.nodes.append(node)
        return node

    def join(self, a: SimNode, b: SimNode, *, delay: float = 0.010, **options: Any) -> tuple[Wire, Wire]:
        pa, pb = a.port(f"to-{b.name}", **options), b.port(f"to-{a.name}", **options)
        wires = Wire(self, pa, pb, b, delay), Wire(self, pb, pa, a, delay)
        self.wires += wires
        return wires

    def later(self, delay: float, wire: Wire, raw: bytes) -> None:
        heappush(self._flying, (self.now + delay, next(self._numbers), wire, raw))

    def flush(self) -> None:
        for wire in self.wires:
            if wire.source.queue:
                for raw in wire.source.take():
                    wire.carry(raw)
        for node in self.nodes:
            node.engine.dirty.clear()
            node.engine.touched.clear()

    def run_until(self, end: float, stop: Callable[[], bool] | None = None) -> None:
        """Move time forward to `end`, or until `stop` says so after some event."""
        self.flush()
        while stop is None or not stop():
            deadlines = [node.engine.timers.deadline for node in self.nodes]
            now = min(self._flying[0][0] if self._flying else inf, *deadlines)
            if now > end:
                break
            self.now = max(now, self.now)
            batches: dict[tuple[int, int], tuple[Wire, list[bytes]]] = {}
            while self._flying and self._flying[0][0] <= self.now:
                _, _, wire, raw = heappop(self._flying)
                batches.setdefault((id(wire.node), id(wire.sink)), (wire, []))[1].append(raw)
            for wire, packets in batches.values():  # all that arrives at one moment is one batch
                wire.node.engine.receive(wire.sink, packets, self.now)
            for node in self.nodes:
                node.engine.run_timers(self.now)
            self.flush()
        else:
            return
        self.now = end

    def run(self, seconds: float, stop: Callable[[], bool] | None = None) -> None:
        self.run_until(self.now + seconds, stop)

    def pair(self, **options: Any) -> tuple[SimNode, SimNode, Wire, Wire]:
        a, b = self.node("a"), self.node("b")
        to_b, to_a = self.join(a, b, **options)
        return a, b, to_b, to_a

    def linked(self, **options: Any) -> tuple[Link, Link, Wire, Wire]:
        """Two nodes with an active link: the initiator's end, the responder's end, the wires."""
        a, b, to_b, to_a = self.pair(**options)
        inbox = b.inbound("inbox")
        b.engine.announcing.announce(inbox, None, self.now)
        self.run(1.0)
        link = a.engine.open_link(a.outbound(inbox), self.now)
        self.run(5.0, lambda: bool(b.recorder.named("link_established")))
        (peer,) = b.recorder.named("link_established")[-1]
        return link, peer, to_b, to_a
