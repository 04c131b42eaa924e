"""Interface discovery: the node's end of announcing, listening and connecting.  Protocol 02, section 15; 07, 8."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Final

from rnsfast.engine.destination import Destination, Direction
from rnsfast.engine.port import Port
from rnsfast.interfaces.backbone import BackboneClientConfig, BackboneClientInterface
from rnsfast.interfaces.base import Interface
from rnsfast.interfaces.common import FULL, GATEWAY, CommonConfig
from rnsfast.interfaces.discovery import Published, published
from rnsfast.node.discoveryannounce import Announcer
from rnsfast.node.discoveryconnect import Connector
from rnsfast.node.discoverylisten import ASPECT, DiscoveryListener
from rnsfast.node.discoverystore import Discovered, DiscoveryStore, RecordStatus
from rnsfast.wire.discovery import endpoint_hash
from rnsfast.wire.discoveryrecord import Record, as_map
from rnsfast.wire.drop import Drop
from rnsfast.wire.packet import SINGLE

if TYPE_CHECKING:
    from rnsfast.node.management import Management
    from rnsfast.node.node import Node

log = logging.getLogger(__name__)

DIRECTORY: Final = "discovery/interfaces"  # in `storage`
CONNECTED_BITRATE: Final = 5_000_000  # bit/s of interfaces that are made by themselves
MAX_CONNECTED: Final = 128  # of them, whatever the configuration says

FoundHandler = Callable[[dict[str, Any]], Any]


class Discovery:
    """All of it, in one node."""

    def __init__(self, node: Node, management: Management) -> None:
        from rnsfast import __version__  # here: the package imports this module before it says its version

        self._node, self._reactor = node, node._reactor
        self._handlers: list[FoundHandler] = []
        config, engine = node.config, node._reactor.engine
        network = management.network_identity
        self._announcements = Destination(network or engine.transport_identity, Direction.IN, SINGLE, *_split(ASPECT))
        self._announcements.accepts_links = False
        # The destination of a network belongs to all its nodes, and they listen to each other: a node that took it for
        # its own would hear nothing of the others.
        self._is_shared = network is not None
        self.announcer = Announcer(
            management.errands(),
            self._published,
            self._announce,
            transport_id=engine.transport_id,
            transport=config.enable_transport,
            network=network,
            version=__version__,
        )
        self.store: DiscoveryStore | None = None
        self.listener: DiscoveryListener | None = None
        self.connector: Connector | None = None
        if config.discover_interfaces:
            self._work = work = management.errands()
            storage = node._storage
            self.store = DiscoveryStore(None if storage is None else storage.root / DIRECTORY, self._is_welcome)
            self.listener = DiscoveryListener(
                work,
                self._found,
                self._count,
                required=config.required_discovery_value,
                sources=config.interface_discovery_sources,
                network=network,
            )
            limit = min(config.autoconnect_discovered_interfaces, MAX_CONNECTED)
            if limit:
                unverified = config.autoconnect_unverified_implementations
                self.connector = Connector(management.errands(), self, limit, unverified=unverified)

    def start(self) -> None:
        """Load what is known, listen, and set the deadlines."""
        if self._published() and not self._is_shared:
            with self._reactor.turn as now:
                self._reactor.engine.register(self._announcements, now)
        self.announcer.start()
        if self.listener is not None:
            self._work.run(self._load)
            with self._reactor.turn:
                self._node._listener.add_announce_handler(self.listener.heard, ASPECT)
        with self._reactor.turn:
            self._node._listener.on_port_change = self._port_changed

    def _load(self) -> None:
        assert self.store is not None
        self.store.load(self._work.unix_time())
        if self.connector is not None:
            self.connector.start()

    def interface_added(self) -> None:
        """A new interface of the node."""
        self.announcer.wake()

    def _port_changed(self, port: Port) -> None:
        """Under the lock: something came up or went down."""
        if port.online and self.announcer.is_waiting:
            self.announcer.wake()
        if self.connector is not None and self.connector.has_made(port.owner):
            self.connector.wake()

    # ------------------------------------------------------------------ announcing

    def _published(self) -> list[Published]:
        return [one for interface in list(self._node.interfaces) if (one := published(interface)) is not None]

    def _announce(self, app_data: bytes) -> bool:
        with self._reactor.turn as now:
            if self._reactor.closed:
                return False
            return self._reactor.engine.announcing.announce(self._announcements, app_data, now)

    # ------------------------------------------------------------------ listening

    def _is_welcome(self, identity: bytes) -> bool:
        assert self.listener is not None
        with self._reactor.lock:
            banned = self._reactor.engine.blackhole.is_banned(identity, self._work.unix_time())
        return not banned and self.listener.is_source(identity)

    def _count(self, drop: Drop) -> None:
        with self._reactor.lock:
            self._reactor.engine.drops[drop] += 1

    def _found(self, record: Record) -> None:
        assert self.store is not None
        if record.offer.transport_id == self._reactor.engine.transport_id:
            return  # one's own, come back
        kept = self.store.heard(record)
        log.debug("heard of %s for the %d. time", kept.name, kept.heard_count + 1)
        if self.connector is not None:
            self.connector.discovered(kept)
        if self._handlers:
            shown = _shown(Discovered(kept, RecordStatus.AVAILABLE))
            with self._reactor.turn:
                for handler in self._handlers:
                    self._reactor.enqueue(self._node._listener.strand, lambda h=handler: h(shown))  # type: ignore[misc]

    def add_handler(self, handler: FoundHandler) -> None:
        """Under the lock."""
        self._handlers.append(handler)

    def interfaces(self) -> list[dict[str, Any]]:
        """What is known of others' interfaces, most promising first."""
        return [] if self.store is None else [_shown(one) for one in self.store.all(self._work.unix_time())]

    # ------------------------------------------------------------------ connecting

    def candidates(self) -> Sequence[Record]:
        assert self.store is not None
        found = self.store.all(self._work.unix_time())
        return [one.record for one in found if one.status is RecordStatus.AVAILABLE]

    def endpoints(self) -> Collection[bytes]:
        found = set()
        for interface in list(self._node.interfaces):
            settings = getattr(interface, "settings", None)
            if settings is not None and getattr(settings, "host", None) is not None:
                found.add(endpoint_hash(settings.host, settings.port))
        return found

    def connect(self, record: Record) -> Interface:
        offer, config = record.offer, self._node.config
        assert offer.reachable_on is not None and offer.port is not None
        values: dict[str, Any] = {
            "mode": config.autoconnect_interface_mode or (GATEWAY if config.enable_transport else FULL),
            "bitrate": CONNECTED_BITRATE,
            "network_name": offer.network_name or None,
            "passphrase": offer.passphrase or None,
            "announces_to_internal": config.autoconnect_announces_to_internal,
        }
        if config.autoconnect_interface_gravity is not None:
            values["gravity"] = config.autoconnect_interface_gravity
        common = CommonConfig.by_defaults(self._free_name(record.name), config.interface_defaults(), **values)
        interface = BackboneClientInterface(
            BackboneClientConfig(common=common, target_host=offer.reachable_on, target_port=offer.port)
        )
        self._node.add_interface(interface)
        return interface

    def _free_name(self, name: str) -> str:
        taken = {interface.name for interface in list(self._node.interfaces)}
        number, free = 1, name
        while free in taken:
            number += 1
            free = f"{name} ({number})"
        return free

    def disconnect(self, interface: Interface) -> None:
        self._node.remove_interface(interface)

    def is_online(self, interface: Interface) -> bool:
        return any(port.online for port in interface.ports)

    def bootstrap(self) -> list[Interface]:
        return [interface for interface in list(self._node.interfaces) if is_bootstrap(interface)]

    def open_bootstrap(self) -> None:
        self._node._open_bootstrap()


def is_bootstrap(interface: Interface) -> bool:
    """Whether an interface is there only until others are found."""
    return bool(getattr(getattr(getattr(interface, "config", None), "common", None), "bootstrap_only", False))


def _shown(found: Discovered) -> dict[str, Any]:
    """A record as programs know it, and its status in words and numbers."""
    return {**as_map(found.record), "status": found.status.name.lower(), "status_code": int(found.status)}


def _split(name: str) -> tuple[str, ...]:
    return tuple(name.split("."))
