"""A node: interfaces, engine, storage and threads in one object.  DESIGN, sections 5 and 6."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any, Final

from rnsfast.crypto.identity import Identity
from rnsfast.engine.destination import Destination, Direction, ProofStrategy
from rnsfast.engine.disguise import DELTAS
from rnsfast.engine.engine import Engine
from rnsfast.engine.known import Known
from rnsfast.engine.receipts import Status
from rnsfast.errors import ConfigError, InterfaceError, LinkClosed, LinkTimeout, NodeClosed, PathNotFound
from rnsfast.interfaces import registry
from rnsfast.interfaces.base import Interface
from rnsfast.node.config import (
    CheckedSections,
    NodeConfig,
    Section,
    check_sections,
    ensure_layout,
    find_config_dir,
    load_or_create,
)
from rnsfast.node.control import ControlSocket
from rnsfast.node.destinations import Inbox, Outbox
from rnsfast.node.dispatch import Dispatcher, Strand
from rnsfast.node.link import Link
from rnsfast.node.listener import AnnounceHandler, NodeListener
from rnsfast.node.management import Management
from rnsfast.node.managementapi import ManagementApi
from rnsfast.node.paths import PathSearch
from rnsfast.node.reactor import Reactor
from rnsfast.node.storage import Storage
from rnsfast.node.transportstore import TransportStore, slices
from rnsfast.wire.knowndest import KnownDestination
from rnsfast.wire.names import destination_hash, name_hash
from rnsfast.wire.packet import SINGLE

log = logging.getLogger(__name__)

SAVE_INTERVAL: Final = 300.0  # seconds; what is learnt is on disk after this long at the latest
STOP_PATIENCE: Final = 5.0  # seconds `stop` waits for each of its threads
RETRY_INTERFACE: Final = 10.0  # seconds between attempts to open an interface whose address was not free

_serial = 0


class FailedInterface:
    """An interface of the configuration that is not running, and why."""

    __slots__ = ("kind", "name", "reason")

    def __init__(self, name: str, kind: str, reason: str) -> None:
        self.name, self.kind, self.reason = name, kind, reason


class Node(ManagementApi):
    """A Reticulum node inside this process.

        with Node(configdir) as node:
            inbox = node.register(Identity(), "example", "files")
            link = node.connect(destination_hash, "example", "files", timeout=15)

    Args:
        configdir: directory with the file `config`, in the reference's format; None searches /etc/reticulum,
            ~/.config/reticulum and ~/.reticulum. It is created if missing.
        strict: a faulty interface section is an error instead of a listed failure.

    Nothing happens before `start` (or `with`). A node installs no signal handlers, never ends the process and leaves
    logging alone. Several nodes can run in one process. Do not fork after `start`.

    Raises (from `start`): ConfigError, StorageError, InterfaceError (strict only).
    """

    def __init__(self, configdir: str | os.PathLike[str] | None = None, *, strict: bool = False) -> None:
        self.config = NodeConfig()
        self.failed: list[FailedInterface] = []
        self.warnings: list[str] = []
        self.interfaces: list[Interface] = []
        self._configdir: Path | None = find_config_dir(configdir)
        self._strict = strict
        self._given: list[Interface] = []
        self._bootstrap: list[tuple[Section, Callable[[], Interface]]] = []  # interfaces only for finding others
        self._storage: Storage | None = None
        self._transport_store: TransportStore | None = None
        self._control: ControlSocket | None = None
        self._management: Management | None = None
        self._started_at = 0.0  # as the reactor counts
        self._state_changed = threading.Condition()
        self._state = "new"  # then starting, running, stopping, stopped
        self._live: Reactor | None = None  # what `_stop` has to end

    @classmethod
    def from_interfaces(cls, interfaces: Iterable[Interface], config: NodeConfig | None = None) -> Node:
        """A node without files: interfaces made by hand, nothing stored, a new identity every time."""
        node = cls.__new__(cls)
        Node.__init__(node, "")
        node._configdir = None
        node._given = list(interfaces)
        node.config = config or NodeConfig()
        return node

    # ------------------------------------------------------------------ life

    def start(self) -> Node:
        """Read the configuration, open the interfaces and run. A stopped node can be started again."""
        with self._state_changed:
            self._state_changed.wait_for(lambda: self._state not in ("starting", "stopping"))
            if self._state == "running":
                return self
            self._state = "starting"
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        self._enter("running")
        return self

    def _enter(self, state: str) -> None:
        with self._state_changed:
            self._state = state
            self._state_changed.notify_all()

    def _start(self) -> None:
        global _serial
        _serial += 1
        name = f"rnsfast-{_serial}"
        self.failed, self.interfaces, self._bootstrap = [], [], []
        checked: CheckedSections[Callable[[], Interface]] = CheckedSections()
        transport_identity: Identity | None = None
        if self._configdir is not None:
            checked = self._read_config(self._configdir)
            storage = Storage(self._configdir)
            storage.open()
            self._storage = storage
            stored = storage.transport_identity()
            kept = self.config.enable_transport or self.config.static_transport_identity
            kept = kept or any(section.boolean("discoverable", False) for section, _ in checked.good)
            transport_identity = stored if kept else None  # others know a transport node by it
        self._dispatcher = Dispatcher(name)
        self._saving = Strand()  # its own: saving a large table keeps no handler waiting
        reactor = Reactor(name, self._dispatcher)
        self._listener = NodeListener(self, reactor)
        reactor.engine = self._engine = Engine(
            self._listener,
            reactor.now(),
            unix_offset=time.time() - reactor.now(),
            transport_identity=transport_identity,
            link_mtu_discovery=self.config.link_mtu_discovery,
            implicit_proofs=self.config.use_implicit_proof,
            transport=self.config.enable_transport,
            local_hops_delta=random.choice(DELTAS) if self.config.local_hops_delta else 0,
            queue_lengths=self.config.queue_lengths,
        )
        reactor.on_ports_changed = self._listener.port_changed
        self._reactor = self._live = reactor
        if self._storage is not None:
            self._load(self._storage)
        self._management = Management(self)
        self._management.load()  # before the paths: those to blackholed identities are not wanted
        if self._storage is not None and self.config.enable_transport:
            store = TransportStore(self._storage, reactor.lock)
            store.load(self._engine, time.time())
            self._transport_store = store  # from here on, what is loaded may be saved
        self._started_at = reactor.now()
        self._reactor.start()
        for section, make in checked.good:
            if section.boolean("bootstrap_only", False):
                self._bootstrap.append((section, make))
            self._open(make(), section.kind)
        for interface in self._given:
            self._open(interface, interface.kind)
        for section, error in checked.failed:
            self.failed.append(FailedInterface(section.name, _kind_of(section), str(error)))
            log.error("%s", error)
        self._reactor.call_at(self._reactor.now() + SAVE_INTERVAL, self._save_later)
        self._management.start()
        if self._configdir is not None:
            self._control = ControlSocket(self._configdir, reactor, self._look)
            self._control.open()

    def _read_config(self, directory: Path) -> CheckedSections[Callable[[], Interface]]:
        ensure_layout(directory)
        loaded = load_or_create(directory)
        self.config = loaded.config
        defaults = loaded.config.interface_defaults()
        checked = check_sections(
            loaded.sections, lambda section: registry.parse(section, defaults), strict=self._strict
        )
        self.warnings = [*loaded.warnings, *checked.warnings]
        for warning in self.warnings:
            log.warning("%s", warning)
        return checked

    def _open(self, interface: Interface, kind: str) -> None:
        """Start an interface; one that cannot start is listed, and tried again if the obstacle may go away."""
        try:
            interface.start(self._reactor)
        except InterfaceError as error:
            if self._strict:
                raise
            failed = FailedInterface(interface.name, kind, str(error))
            self.failed.append(failed)
            log.error("%s", error)
            if getattr(error, "retryable", True):
                self._retry(interface, failed)
            return
        self._opened(interface)

    def _opened(self, interface: Interface) -> None:
        self.interfaces.append(interface)
        management = self._management
        if management is not None:
            management.discovery.interface_added()

    def _open_bootstrap(self) -> None:
        """Have the interfaces again that are only for finding others."""
        running = {interface.name for interface in self.interfaces} | {failed.name for failed in self.failed}
        for section, make in self._bootstrap:
            if section.name not in running and self._state in ("starting", "running"):
                self._open(make(), section.kind)

    def add_interface(self, interface: Interface) -> None:
        """Open one more interface while the node runs. Raises InterfaceError, NodeClosed."""
        if self._state != "starting":  # the node itself does not wait for the end of its start
            self._check_running()
        interface.start(self._reactor)
        self._opened(interface)
        if self._state not in ("starting", "running"):  # stopped meanwhile
            interface.close()

    def remove_interface(self, interface: Interface) -> None:
        """Close an interface for good; links over it end. One that is not there any more is closed all the same."""
        with suppress(ValueError):
            self.interfaces.remove(interface)
        interface.close()

    def _retry(self, interface: Interface, failed: FailedInterface) -> None:
        def attempt() -> None:
            if failed not in self.failed:
                return
            try:
                interface.start(self._reactor)
            except InterfaceError as error:
                failed.reason = str(error)  # said once; `status` has the latest
                self._retry(interface, failed)
                return
            self._opened(interface)
            if failed in self.failed:
                self.failed.remove(failed)
            log.info("%s: is up now", interface.name)

        self._reactor.call_at(self._reactor.now() + RETRY_INTERFACE, attempt)

    def stop(self, *, linger: float = 0.0) -> None:
        """Close the links, send what is queued, save, close the interfaces, end the threads. Idempotent.

        May be called from anywhere, also from a callback. Waiting calls end with LinkClosed or NodeClosed. If a stop is
        under way already, waits for its end, but not in a callback.

        Args:
            linger: seconds between the last packets and the end of the connections. A stock peer may lose what it has
                read and not yet handled when the connection ends: without the closing of a link, it waits for more.
        """
        mine = self._is_own_thread()
        with self._state_changed:
            self._state_changed.wait_for(lambda: self._state != "starting" and (mine or self._state != "stopping"))
            if self._state != "running":
                return
            self._state = "stopping"
        self._stop(linger)

    def _is_own_thread(self) -> bool:
        thread, reactor = threading.current_thread(), self._live
        return reactor is not None and (reactor.is_mine(thread) or self._dispatcher.is_mine(thread))

    def _stop(self, linger: float = 0.0) -> None:
        reactor = self._live
        control, self._control = self._control, None
        management, self._management = self._management, None
        try:
            if control is not None:
                control.close()
            if management is not None:
                management.stop()
            if reactor is not None:
                self._end_links(reactor)
                if linger and not reactor.is_mine(threading.current_thread()):
                    threading.Event().wait(linger)  # nothing tells when the peer has handled it
                self._save_transport()
                self._close_interfaces()
                reactor.stop(STOP_PATIENCE)
                self._end_links(reactor)  # what has come up meanwhile
                self._close_interfaces()
                self._dispatcher.close(STOP_PATIENCE)
                self._save()
        finally:
            if self._storage is not None:
                self._storage.close()
                self._storage = None
            self._live = None
            self._enter("stopped")

    def _end_links(self, reactor: Reactor) -> None:
        """Nothing new begins, and everything that somebody may be waiting for comes to its end."""
        with reactor.turn as now:
            reactor.closed = True
            for link in list(reactor.engine.links.values()):
                link.close(now, "the node was stopped")
            for receipt in list(reactor.engine.receipts.values()):
                receipt.conclude(Status.FAILED, now)
            self._listener.look_again()

    def _close_interfaces(self) -> None:
        self.failed.clear()  # nobody tries these any more
        interfaces, self.interfaces = self.interfaces, []
        for interface in interfaces:
            try:
                interface.close()
            except Exception:
                log.exception("%s: could not be closed cleanly", interface.name)

    def __enter__(self) -> Node:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def is_running(self) -> bool:
        """Between `start` and `stop`."""
        return self._state == "running"

    def _check_running(self) -> None:
        if self._state != "running":
            raise NodeClosed("the node is not running: use `with Node(...) as node`, or call start() first")

    # ------------------------------------------------------------------ storage

    def _load(self, storage: Storage) -> None:
        unix_time = time.time()
        entries = storage.load_known_destinations()
        entries.reverse()
        while entries:
            entry = entries.pop()
            self._engine.known.put(entry.destination, _known(entry))
        storage.clean_peer_ratchets(self._engine.known.entries.keys(), unix_time)
        self._engine.known.ratchets.update(storage.load_peer_ratchets(unix_time))

    def _save_later(self) -> None:
        """On the reactor: save on a callback thread, and again after the interval."""
        if self._state in ("starting", "running"):  # a slow start must not be the end of it
            with self._reactor.turn:
                self._engine.unix_offset = time.time() - self._reactor.now()  # the clock may have been set
                self._reactor.enqueue(self._saving, self._save)
            self._reactor.call_at(self._reactor.now() + SAVE_INTERVAL, self._save_later)

    def _save(self) -> None:
        storage = self._storage
        if storage is None:
            return
        parts = slices(self._reactor.lock, self._engine.known.entries, _stored_known)
        storage.save_known_destinations(entry for part in parts for entry in part)
        store = self._transport_store
        if store is not None and self._state == "running":
            # Who has not come up by now is gone, or some interface has failed and may be theirs.
            store.save(self._engine, waiting=bool(self.failed))

    def _save_transport(self) -> None:
        """Before the interfaces go, and their paths with them."""
        store, self._transport_store = self._transport_store, None
        if store is not None:
            try:
                store.save(self._engine, hashes=True)
            except Exception:  # whatever it was, the rest of the node has to end
                log.exception("paths and tunnels could not be saved")

    # ------------------------------------------------------------------ destinations

    def register(self, identity: Identity | None, app: str, *aspects: str, kind: int = SINGLE) -> Inbox:
        """Receive under a name: make an IN destination.

        Args:
            identity: whose destination it is, with its private key; None for kind=PLAIN.
            app, aspects: the name's parts, without dots.
            kind: SINGLE (default), GROUP or PLAIN of rnsfast.wire.packet.

        Raises ValueError if the name has dots in a part or the address is registered already.
        """
        self._check_running()
        destination = Destination(identity, Direction.IN, kind, app, *aspects)
        inbox = Inbox(self, destination)
        with self._reactor.turn as now:
            self._engine.register(destination, now)
        return inbox

    def outbox(self, target: Identity | bytes | None, app: str, *aspects: str, kind: int = SINGLE) -> Outbox:
        """Send packets to somebody's destination.

        Args:
            target: the identity, or the destination hash of one whose announce was heard; None for kind=PLAIN.

        Raises PathNotFound if the hash is not known, ValueError if it does not belong to the name.
        """
        self._check_running()
        if isinstance(target, bytes):
            identity: Identity | None = self._identity_of(target)
            self._check_name(target, identity, app, aspects)
        else:
            identity = target
        return Outbox(self, Destination(identity, Direction.OUT, kind, app, *aspects))

    def _identity_of(self, destination: bytes) -> Identity:
        with self._reactor.lock:
            identity = self._engine.recall(destination, time.time())
        if identity is None:
            raise PathNotFound(f"destination {destination.hex()} is not known: no announce of it was heard yet")
        return identity

    def recall(self, destination: bytes) -> Identity | None:
        """The public half of the identity behind an address, if an announce of it was heard."""
        self._check_running()
        with self._reactor.lock:
            return self._engine.recall(destination, time.time())

    def app_data(self, destination: bytes) -> bytes | None:
        """What the destination announced last beside its keys; None if nothing."""
        self._check_running()
        with self._reactor.lock:
            known = self._engine.known.entries.get(destination)
            return None if known is None else known.app_data

    def on_announce(self, handler: AnnounceHandler, name: str | None = None) -> None:
        """Have `handler(event)` called for announces that bring news: of destinations with this full name, or of all.

        The event is an AnnounceHeard. Handlers run on a callback thread, one after the other.
        """
        self._check_running()
        with self._reactor.turn:
            self._listener.add_announce_handler(handler, name)

    def remove_announce_handler(self, handler: AnnounceHandler) -> None:
        """No more calls, but for those that are under way. An unknown handler is ignored."""
        with self._reactor.turn:
            self._listener.remove_announce_handler(handler)

    def on_interface_up(self, handler: Callable[[str], Any]) -> None:
        """Have `handler(name)` called whenever an interface, or a connection of one, comes up: a moment to announce.

        Those that are up are told at once. Handlers run on a callback thread, one after the other.
        """
        self._check_running()
        with self._reactor.turn:
            self._listener.add_interface_handler(handler)

    # ------------------------------------------------------------------ paths and links

    def has_path(self, destination: bytes) -> bool:
        """Whether a path over an interface that is up is known. Looks, never waits."""
        self._check_running()
        with self._reactor.lock:
            return self._engine.paths.usable(destination) is not None

    def hops_to(self, destination: bytes) -> int | None:
        """How far it is; None if no path is known."""
        self._check_running()
        with self._reactor.lock:
            path = self._engine.paths.usable(destination)
            return None if path is None else path.hops

    def request_path(self, destination: bytes, timeout: float | None = 15.0) -> None:
        """Find a path to a destination, waiting for the answer; 0 asks and does not wait.

        Raises PathNotFound if none came within `timeout` seconds, ValueError for a hash that has not 16 bytes.
        """
        self._check_running()
        _check_hash(destination)
        if timeout == 0:
            with self._reactor.turn as now:
                self._engine.announcing.request_path(destination, now)
            return
        self._reactor.check_may_block()
        self._find_path(destination, None if timeout is None else monotonic() + timeout, fresh=True)

    def _search(self, destination: bytes, end: float | None, *, fresh: bool = False) -> PathSearch:
        return PathSearch(self._listener, self._reactor, destination, end, fresh=fresh)

    def _find_path(self, destination: bytes, end: float | None, *, fresh: bool = False) -> None:
        """Wait for a path that is usable and an identity that is known."""
        reactor = self._reactor
        with self._search(destination, end, fresh=fresh) as search:
            while True:
                with reactor.turn as now:
                    if search.ask(now):
                        return
                patience = search.patience()
                with reactor.lock:
                    search.waiter.wait_for(search.has_news, patience)

    def connect(
        self,
        destination: bytes,
        app: str,
        *aspects: str,
        timeout: float | None = 15.0,
        identity: Identity | None = None,
    ) -> Link:
        """Open a link and wait until it can be used. Finds a path first if none is known.

        If a first attempt over a known path fails and there is time left, the path is given up and another one tried.

        Args:
            destination: the 16-byte hash of a SINGLE destination.
            app, aspects: its name; the hash must belong to it.
            timeout: seconds for path and handshake together; None waits for ever.
            identity: reveal this identity to the other end at once.

        Returns:
            An active link. `link.mdu` is the most bytes one packet carries: 431 if the link MTU is 500.

        Raises:
            PathNotFound: no path within `timeout`.
            LinkTimeout: a path, but no valid link proof within `timeout`.
            LinkClosed: the link was established, and closed again before this call could return it.
            ValueError: the hash has not 16 bytes, or does not belong to the name.
            NodeClosed: the node was stopped, before or meanwhile.

        Protocol: 03, sections 2 to 8. Threads: any but the reactor's; blocks only its caller.
        """
        self._check_running()
        _check_hash(destination)
        self._reactor.check_may_block()
        end = None if timeout is None else monotonic() + timeout
        while True:
            self._find_path(destination, end)
            link = self._ask_for_link(destination, app, aspects)
            try:
                with self._reactor.lock:
                    link.wait_for(link._is_decided, None if end is None else end - monotonic())
                if self._is_connected(link, identity):
                    return link
            except BaseException:
                link.close()
                raise
            if end is not None and monotonic() >= end:
                raise LinkTimeout(f"{destination.hex()} did not answer the link request within {timeout:.0f} s")

    def _ask_for_link(self, destination: bytes, app: str, aspects: tuple[str, ...]) -> Link:
        """Send a link request; the link is pending, and its owner's to close."""
        identity = self._identity_of(destination)
        self._check_name(destination, identity, app, aspects)
        target = Destination(identity, Direction.OUT, SINGLE, app, *aspects)
        with self._reactor.turn as now:
            self._check_running()
            return Link(self, self._engine.open_link(target, now))

    def _is_connected(self, link: Link, identity: Identity | None) -> bool:
        """What became of a link request. It is given up if it was not answered."""
        if not link.is_active:
            link.close()
            self._check_running()
            if link._engine.activated_at is not None:
                raise LinkClosed(link.id, link.closing)
            return False
        if identity is not None:
            link.identify(identity)
        return True

    @staticmethod
    def _check_name(destination: bytes, identity: Identity | None, app: str, aspects: tuple[str, ...]) -> None:
        found = destination_hash(name_hash(app, *aspects), None if identity is None else identity.hash)
        if found != destination:
            name = ".".join((app, *aspects))
            raise ValueError(f"destination {destination.hex()} is not named {name!r}: that name has {found.hex()}")

    def _wants_proof(self, destination: Destination, data: bytes) -> bool:
        """Whether the application wants a packet proved. On a callback thread."""
        if destination.proofs is not ProofStrategy.APP or destination.owner is None:
            return False
        decide = destination.owner._handlers.get("proof")
        try:
            return decide is not None and bool(decide(data))
        except Exception:  # the packet is handed over all the same
            log.exception("the proof decision of %r raised; not proved", destination)
            return False

    # ------------------------------------------------------------------ looking

    def status(self) -> dict[str, Any]:
        """What the node is doing now: interfaces with their counters, failed ones with their reasons, table sizes."""
        self._check_running()
        return self._look()

    def _look(self) -> dict[str, Any]:
        from rnsfast import __version__  # here: the package imports this module before it says its version

        interfaces = [{"name": i.name, "type": i.kind, **i.status()} for i in self.interfaces]
        failed = [{"name": f.name, "type": f.kind, "reason": f.reason} for f in self.failed]
        with self._reactor.lock:
            engine = self._engine
            drops = {drop.value: n for drop, n in engine.drops.items()}
            ports = [
                {
                    "name": port.name,
                    "interface": None if port.owner is None else port.owner.name,
                    "online": port.online,
                    "mtu": port.hw_mtu,
                    "rx_packets": port.rx_packets,
                    "rx_bytes": port.rx_bytes,
                    "tx_packets": port.tx_packets,
                    "tx_bytes": port.tx_bytes,
                    "drops": {drop.value: n for drop, n in port.drops.items()},
                }
                for port in engine.ports
            ]
            return {
                "version": __version__,
                "pid": os.getpid(),
                "uptime": self._reactor.now() - self._started_at,  # seconds
                "configdir": None if self._configdir is None else str(self._configdir),
                "interfaces": interfaces,
                "failed": failed,
                "ports": ports,
                "links": len(engine.links),
                "paths": engine.paths.usable_count(engine.ports),
                "known_destinations": len(engine.known.entries),
                "drops": drops,
                "wakeups": self._reactor.wakeups,
            }


def _known(entry: KnownDestination) -> Known:
    return Known(entry.received, entry.packet_hash, entry.public_key, entry.app_data, entry.used)


def _stored_known(destination: bytes, known: Known) -> KnownDestination:
    return KnownDestination(
        destination, known.heard_at, known.packet_hash, known.public_key, known.app_data, known.used_at
    )


def _kind_of(section: Any) -> str:
    try:
        return str(section.kind)
    except ConfigError:
        return "unknown"


def _check_hash(destination: bytes) -> None:
    if len(destination) != 16:
        raise ValueError(f"a destination hash has 16 bytes (32 hex digits), this one has {len(destination)}")
