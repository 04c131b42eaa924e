"""What must hold in a network at any moment, or of everything it has sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rnsfast.engine.destination import Destination
from rnsfast.engine.events import AnnounceHeard
from rnsfast.wire.packet import ANNOUNCE, CTX_NONE, HEADER_2, packet_hash
from tests.sim.network import Network
from tests.virtualnet import SimNode


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


def loops(net: Network, places: Iterable[Destination]) -> Iterator[list[str]]:
    """Ways of the moment that come to a node twice. Each is told once for each destination."""
    for place in places:
        good: set[SimNode] = set()  # from these the way ends
        for source in net.nodes:
            trail: dict[SimNode, None] = {}
            node: SimNode | None = source
            while node is not None and node not in good and node not in trail:
                trail[node] = None
                node = net.next_of(node, place)
            if node is not None and node in trail:
                yield [visited.name for visited in (*trail, node)]
            good.update(trail)


@contextmanager
def only_newer(net: Network) -> Iterator[None]:
    """While this is open no path of any node may move to an older announce.  Protocol 02, section 6.3."""
    newest: dict[tuple[str, bytes], int] = {}

    def check(node: SimNode, event: AnnounceHeard) -> None:
        key = node.name, event.destination
        emitted = node.engine.paths.paths[event.destination].newest
        assert emitted >= newest.get(key, 0), f"{node.name} went back to {emitted}"
        newest[key] = emitted

    net.on_taken = check
    yield
    net.on_taken = None


def passed_on_too_often(net: Network) -> list[str]:
    """Nodes that sent an announce on an interface more than twice for each time that they took it."""
    sent = Counter(
        (raw[2:18], packet_hash(raw), wire.source.name)
        for wire in net.wires
        for raw in wire.sent
        if is_rebroadcast(raw) and raw[34] == CTX_NONE
    )
    return [port for (node, digest, port), times in sent.items() if times > 2 * net.taken[node, digest]]
