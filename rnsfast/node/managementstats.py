"""What a node tells of itself: the tables that management tools show.  Protocol 07, sections 6.3 and 6.5.

Keys and types are the reference's. What is not counted here is 0, and nil where that is allowed.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

from rnsfast.engine.engine import Engine
from rnsfast.engine.known import Path
from rnsfast.engine.port import Port
from rnsfast.engine.transport.rates import Rate
from rnsfast.interfaces.base import Interface
from rnsfast.interfaces.common import SLOW_MTU
from rnsfast.interfaces.listener import StreamListener
from rnsfast.wire.drop import Drop
from rnsfast.wire.mtu import hw_mtu_for_bitrate

if TYPE_CHECKING:
    from rnsfast.node.node import Node

#: Class name of the connections of a listener, by the listener's.
SPAWNED: Final = {"TCPServerInterface": "TCPClientInterface", "BackboneInterface": "BackboneClientInterface"}


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_NOUGHT: Final = _names(
    "arxb atxb prxb ptxb rxs txs arxs atxs prxs ptxs arxf atxf prxf ptxf rxpps txpps rxqt rxqd rxqa rxqp rxqil"
    " rxqtd rxqdd rxqad rxqpd rxqild tqpressure dqpressure aqpressure pqpressure ilqpressure"
)
_INTERFACE_NOUGHT: Final = _names(
    "arxb atxb arxc atxc prxb ptxb prxc ptxc rxs txs arxs atxs prxs ptxs txdrb txbuffered"
    " incoming_announce_frequency outgoing_announce_frequency incoming_pr_frequency outgoing_pr_frequency"
    " burst_activated pr_burst_activated"
)


def interface_stats(node: Node, probe: bytes | None, network: bytes | None) -> dict[str, Any]:
    """The statistics of all interfaces. Without the node's lock."""
    tables: list[dict[str, Any]] = []
    totals = {"rxb": 0, "txb": 0}
    engine, now = node._engine, node._reactor.now()
    with node._reactor.lock:
        for interface in list(node.interfaces):
            ports = [port for port in engine.ports if port.owner is interface]
            own = _listener(interface, ports) if isinstance(interface, StreamListener) else None
            if own is not None:
                tables.append(own)
            for port in ports:
                tables.append(_port(engine, interface, port, own))
                totals["rxb"] += port.rx_bytes
                totals["txb"] += port.tx_bytes
    found: dict[str, Any] = {"interfaces": tables, **dict.fromkeys(_NOUGHT, 0), **totals, "txq": None, "rss": None}
    if engine.carries:
        found |= {
            "transport_id": engine.transport_id,
            "network_id": network,
            "transport_uptime": now - node._started_at,
            "probe_responder": probe,
        }
    return found


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
        "rxb": sum(port.rx_bytes for port in ports),
        "txb": sum(port.tx_bytes for port in ports),
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
        "rxb": port.rx_bytes,
        "txb": port.tx_bytes,
        "txdrp": port.drops[Drop.TX_OFFLINE],
        "held_announces": 0 if intake is None else len(intake.held),
        "protocol_violations": _sum(port, "malformed."),
        "ifac_violations": _sum(port, "ifac."),
        "packet_filter_hits": _sum(port, "filter."),
        "ifac_signature": None if port.ifac is None else port.ifac.signature,
        "ifac_size": None if port.ifac is None else port.ifac.size,
    }
    if parent is not None:
        found |= {"parent_interface_name": parent["name"], "parent_interface_hash": parent["hash"]}
    return found


def _interface(interface: Interface, display: str, kind: str, common: Any) -> dict[str, Any]:
    """What does not depend on the port."""
    return {
        "name": display,
        "short_name": interface.name,
        "type": kind,
        **dict.fromkeys(_INTERFACE_NOUGHT, 0),
        "mode": getattr(common, "mode", 1),
        "gravity": getattr(common, "gravity", 0),
        "announce_rate_target": getattr(common, "announce_rate_target", None),
        "announce_rate_penalty": getattr(common, "announce_rate_penalty", None),
        "announce_rate_grace": getattr(common, "announce_rate_grace", None),
        "announces_to_internal": getattr(common, "announces_to_internal", None),
        "txstalled": False,
        "burst_active": False,
        "burst_count": None,
        "pr_burst_active": False,
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
