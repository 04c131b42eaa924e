"""What a node tells of itself: the tables that management tools show.  Protocol 07, sections 6.3 and 6.5.

Keys and types are the reference's. What is not counted here is 0, and nil where that is allowed. Speeds and frequencies
are averages since somebody last looked, over a second at least: nothing runs only to measure them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

from rnsfast.engine.engine import Engine
from rnsfast.engine.inbound import Inbound, TrafficClass
from rnsfast.engine.known import Path
from rnsfast.engine.port import Port
from rnsfast.engine.transport.rates import Rate
from rnsfast.interfaces.base import Interface
from rnsfast.interfaces.common import SLOW_MTU
from rnsfast.interfaces.listener import StreamListener
from rnsfast.wire.mtu import hw_mtu_for_bitrate

if TYPE_CHECKING:
    from rnsfast.node.node import Node

#: Class name of the connections of a listener, by the listener's.
SPAWNED: Final = {"TCPServerInterface": "TCPClientInterface", "BackboneInterface": "BackboneClientInterface"}


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


#: Waiting, dropped, how full; data does not wait.
_QUEUES: Final = {
    TrafficClass.ANNOUNCE: _names("rxqa rxqad aqpressure"),
    TrafficClass.PATH_REQUEST: _names("rxqp rxqpd pqpressure"),
    TrafficClass.INGRESS_LIMITED: _names("rxqil rxqild ilqpressure"),
}

#: What is counted of an interface: received and sent; of all packets, announces, path requests.
_BYTES: Final = _names("rxb txb arxb atxb prxb ptxb")
_SPEEDS: Final = _names("rxs txs arxs atxs prxs ptxs")  # bit/s
_COUNTS: Final = _names("rxc txc arxc atxc prxc ptxc")
_SHOWN_COUNTS: Final = _names("arxc atxc prxc ptxc")
_RATES: Final = _names("rxpps txpps arxf atxf prxf ptxf")  # 1/s, of the counts
_FREQUENCIES: Final = {
    "arxf": "incoming_announce_frequency",
    "atxf": "outgoing_announce_frequency",
    "prxf": "incoming_pr_frequency",
    "ptxf": "outgoing_pr_frequency",
}

SPAN: Final = 1.0  # seconds that an average is over at least


class Pace:
    """How fast counters grow: the average between two looks."""

    def __init__(self, since: float, size: int) -> None:
        self._at = since
        self._counts: Sequence[float] = [0] * size
        self._rates: Sequence[float] = [0.0] * size

    def look(self, counts: Sequence[float], now: float) -> Sequence[float]:
        """Per second. A look too soon after another gets what that one got."""
        span = now - self._at
        if span >= SPAN:
            self._rates = [(count - before) / span for count, before in zip(counts, self._counts, strict=True)]
            self._at, self._counts = now, counts
        return self._rates


class Statistics:
    """What all interfaces of a node carry, and how fast."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._paces: dict[Port, Pace] = {}

    def tables(self, probe: bytes | None, network: bytes | None) -> dict[str, Any]:
        """The answer to `interface_stats`. Without the node's lock."""
        node, engine, now = self._node, self._node._engine, self._node._reactor.now()
        tables: list[dict[str, Any]] = []
        totals: dict[str, Any] = dict.fromkeys((*_BYTES, *_SPEEDS, *_RATES), 0)
        states = {interface: interface.status() for interface in list(node.interfaces)}
        with node._reactor.lock:
            self._paces = {port: pace for port, pace in self._paces.items() if port in engine.ports}
            for interface, state in states.items():
                ports = [port for port in engine.ports if port.owner is interface]
                own = _listener(interface, ports) if isinstance(interface, StreamListener) else None
                carried = [(port, self._carried(port, now)) for port in ports]
                if own is not None:
                    for _, counts in carried:
                        for key in counts.keys() & own.keys():
                            own[key] += counts[key]
                    tables.append(own)
                for port, counts in carried:
                    tables.append(_port(engine, interface, port, own) | counts)
                    tables[-1]["txbuffered"] = _waiting(state, port)
                    for key in totals:
                        totals[key] += counts[key if key in counts else _FREQUENCIES.get(key, key)]
            for table in tables:
                for key in ("rxpps", "txpps"):
                    table.pop(key, None)
            queues = _queues(engine.inbound)
        found: dict[str, Any] = {"interfaces": tables, **totals, **queues, "txq": None, "rss": None}
        if engine.carries:
            found |= {
                "transport_id": engine.transport_id,
                "network_id": network,
                "transport_uptime": now - node._started_at,
                "probe_responder": probe,
            }
        return found

    def _carried(self, port: Port, now: float) -> dict[str, Any]:
        """Bytes and speeds of one interface, counts and frequencies. Under the lock."""
        announces, requests = port.announces, port.requests
        sizes = (port.rx_bytes, port.tx_bytes, announces.rx_bytes, announces.tx_bytes, requests.rx_bytes,
                 requests.tx_bytes)  # fmt: skip
        counts = (port.rx_packets, port.tx_packets, announces.rx_packets, announces.tx_packets, requests.rx_packets,
                  requests.tx_packets)  # fmt: skip
        pace = self._paces.get(port)
        if pace is None:
            pace = self._paces[port] = Pace(self._node._started_at, len(sizes) + len(counts))
        rates = pace.look((*sizes, *counts), now)
        found: dict[str, Any] = dict(zip(_BYTES, sizes, strict=True))
        found |= {key: 8 * rate for key, rate in zip(_SPEEDS, rates, strict=False)}
        found |= {key: count for key, count in zip(_COUNTS, counts, strict=True) if key in _SHOWN_COUNTS}
        for key, rate in zip(_RATES, rates[len(sizes) :], strict=True):
            found[_FREQUENCIES.get(key, key)] = rate
        return found


def _queues(inbound: Inbound) -> dict[str, float]:
    """What waits for its turn. Under the lock."""
    found: dict[str, float] = dict.fromkeys(_names("rxqt rxqtd rxqd rxqdd dqpressure tqpressure"), 0)
    for kind, (height, dropped, pressure) in _QUEUES.items():
        lines = inbound.lines[kind]
        found |= {height: len(lines), dropped: lines.dropped, pressure: lines.pressure}
        found["rxqt"] += len(lines)
        found["rxqtd"] += lines.dropped
        found["tqpressure"] = max(found["tqpressure"], lines.pressure)
    return found


def _waiting(state: Mapping[str, Any], port: Port) -> int:
    """Bytes that an interface has not been able to send yet, as its state tells."""
    of_port = state.get("connections", {}).get(port.name) or state.get("connection") or state
    return int(of_port.get("waiting_bytes", 0))


def _listener(interface: StreamListener, ports: list[Port]) -> dict[str, Any]:
    common = interface.settings.common
    bitrate = common.bitrate or interface.settings.medium.bitrate
    display = interface.display
    return {
        **_interface(interface, display, interface.kind, common),
        "hash": sha256(display.encode()).digest(),
        "status": interface.address is not None,
        "mtu": hw_mtu_for_bitrate(bitrate) or SLOW_MTU,
        "bitrate": bitrate,
        "clients": len(ports),
        **dict.fromkeys((*_BYTES, *_SPEEDS, *_SHOWN_COUNTS, *_FREQUENCIES.values()), 0),
        "txdrp": 0,
        "held_announces": 0,
        "protocol_violations": 0,
        "ifac_violations": 0,
        "packet_filter_hits": 0,
        "ifac_signature": None,
        "ifac_size": None,
    }


def _port(engine: Engine, interface: Interface, port: Port, parent: dict[str, Any] | None) -> dict[str, Any]:
    config = getattr(interface, "config", None)
    kind = interface.kind if parent is None else SPAWNED.get(interface.kind, interface.kind)
    intake = None if engine.transport is None else engine.transport.intakes.get(port)
    found = {
        **_interface(interface, port.name, kind, getattr(config, "common", None)),
        "hash": port.hash,
        "status": port.online,
        "mode": int(port.mode),
        "gravity": port.gravity,
        "mtu": port.hw_mtu,
        "bitrate": port.bitrate,
        "clients": None,
        "txdrp": _sum(port, "tx."),
        "held_announces": 0 if intake is None else len(intake.held),
        "protocol_violations": _sum(port, "malformed.") + _sum(port, "violation."),
        "ifac_violations": _sum(port, "ifac."),
        "packet_filter_hits": _sum(port, "filter."),
        "ifac_signature": None if port.ifac is None else port.ifac.signature,
        "ifac_size": None if port.ifac is None else port.ifac.size,
    }
    if intake is not None:
        for name, burst in (("burst", intake.announce_burst), ("pr_burst", intake.request_burst)):
            found[f"{name}_active"] = burst.active
            found[f"{name}_activated"] = burst.began_at + engine.unix_offset if burst.active else 0
    if parent is not None:
        found |= {"parent_interface_name": parent["name"], "parent_interface_hash": parent["hash"]}
    return found


def _interface(interface: Interface, display: str, kind: str, common: Any) -> dict[str, Any]:
    """What does not depend on the port."""
    return {
        "name": display,
        "short_name": interface.name,
        "type": kind,
        "txdrb": 0,
        "txbuffered": 0,
        "mode": getattr(common, "mode", 1),
        "gravity": getattr(common, "gravity", 0),
        "announce_rate_target": getattr(common, "announce_rate_target", None),
        "announce_rate_penalty": getattr(common, "announce_rate_penalty", None),
        "announce_rate_grace": getattr(common, "announce_rate_grace", None),
        "announces_to_internal": getattr(common, "announces_to_internal", None),
        "txstalled": False,
        "burst_active": False,
        "burst_activated": 0,
        "burst_count": None,
        "pr_burst_active": False,
        "pr_burst_activated": 0,
        "pr_burst_count": None,
        "ifac_netname": getattr(common, "network_name", None),
        "autoconnect_source": None,
    }


def _sum(port: Port, prefix: str) -> int:
    return sum(count for drop, count in port.drops.items() if drop.value.startswith(prefix))


def link_count(engine: Engine) -> int:
    """Links that run through this node. Under the lock."""
    links = None if engine.transport is None else engine.transport.links
    return 0 if links is None else len(links.unproved) + len(links.proved)


def path_table(paths: dict[bytes, Path], destination: bytes | None, max_hops: int | None) -> list[dict[str, Any]]:
    """Paths as tools know them: to one destination, or all within so many hops. `paths` is nobody else's."""
    wanted = paths.items() if destination is None else [(d, p) for d, p in paths.items() if d == destination]
    return [
        {
            "hash": destination_,
            "timestamp": path.heard_at,
            "via": path.next_hop,
            "hops": path.hops,
            "expires": path.expires_at,
            "interface": path.port.name,
        }
        for destination_, path in wanted
        if max_hops is None or path.hops <= max_hops
    ]


def rate_table(rates: dict[bytes, Rate], destination: bytes | None) -> list[dict[str, Any]]:
    """Announce rates as tools know them. `rates` is nobody else's."""
    wanted = rates.items() if destination is None else [(d, r) for d, r in rates.items() if d == destination]
    return [
        {
            "hash": destination_,
            "last": rate.last,
            "rate_violations": rate.violations,
            "blocked_until": rate.blocked_until,
            "timestamps": [rate.last],
        }
        for destination_, rate in wanted
    ]
