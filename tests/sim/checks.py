"""What must hold in a network at any moment, or of everything it has sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rnsfast.engine.destination import Destination
from rnsfast.engine.events import AnnounceHeard
from rnsfast.wire.packet import ANNOUNCE, CTX_NONE, HEADER_2
from tests.sim.network import Network
from tests.virtualnet import SimNode


def is_rebroadcast(raw: bytes) -> bool:
    return raw[0] & 3 == ANNOUNCE and bool(raw[0] & HEADER_2)


def key_of(raw: bytes) -> tuple[bytes, bytes]:
    """Of a rebroadcast: whose transport id, and which announce (destination and random blob)."""
    return raw[2:18], raw[18:34] + raw[109:119]


def rebroadcasts(net: Network) -> dict[tuple[tuple[bytes, bytes], int], int]:
    """How often each node sent each announce on each interface: (key_of, interface)."""
    found: dict[tuple[tuple[bytes, bytes], int], int] = {}
    for number, wire in enumerate(net.wires):
        for raw in wire.sent:
            if is_rebroadcast(raw) and raw[34] == CTX_NONE:
                key = key_of(raw), number
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


def passed_on_too_often(net: Network) -> list[tuple[bytes, bytes]]:
    """Announces that a node sent on an interface more than twice for each time that it took them."""
    return [key for (key, _), times in rebroadcasts(net).items() if times > 2 * net.taken[key]]
