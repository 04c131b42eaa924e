"""What a node announces and answers by itself, beside what applications do with it.  Protocol 02, section 13.

Destinations of the node's own are made at start, announced a quarter of a minute later and then every two hours.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rnsfast.crypto.identity import Identity
from rnsfast.engine.destination import Destination, Direction, ProofStrategy
from rnsfast.errors import IdentityError, StorageError
from rnsfast.node import managementblackhole, managementremote
from rnsfast.node.discovery import Discovery
from rnsfast.node.managementblackhole import Blackholes
from rnsfast.node.managementremote import RemoteManagement
from rnsfast.node.managementwork import Errands
from rnsfast.wire.packet import SINGLE

if TYPE_CHECKING:
    from rnsfast.node.node import Node

log = logging.getLogger(__name__)

FIRST_ANNOUNCE: Final = 15.0  # seconds after the start (protocol 02, section 13)
ANNOUNCE_INTERVAL: Final = 7200.0  # seconds
APP: Final = "rnstransport"


class Management:
    """The node's own destinations and errands. Made at every start of the node, stopped with it.

    Raises StorageError if the network identity cannot be read or made.
    """

    def __init__(self, node: Node) -> None:
        config = node.config
        self._node, self._reactor = node, node._reactor
        self.network_identity = None if config.network_identity is None else network_identity(config.network_identity)
        self.destinations: list[Destination] = []
        self.probe: bytes | None = None  # address of the probe responder
        self._errands = [Errands(self._reactor)]
        self._owed = False  # the last announces reached nobody
        self.discovery = Discovery(node, self)
        self.blackholes = Blackholes(node, self)

    def load(self) -> None:
        """What must be known before anything is heard."""
        self.blackholes.load()

    def start(self) -> None:
        """Make the destinations and set the deadlines."""
        self._make_destinations()
        self.blackholes.start()
        self.discovery.start()
        if not self.destinations:
            return
        self._errands[0].run_at(self._reactor.now() + FIRST_ANNOUNCE, self._announce_in_turn)
        with self._reactor.turn:
            self._node._listener.add_interface_handler(self._interface_up)

    def stop(self) -> None:
        """Nothing begins any more, and what takes long ends. Idempotent; the reactor still runs."""
        for errands in self._errands:
            errands.stop()

    def errands(self) -> Errands:
        """For one more concern; stopped with the rest."""
        made = Errands(self._reactor)
        self._errands.append(made)
        return made

    # ------------------------------------------------------------------ destinations

    def _make_destinations(self) -> None:
        config, own = self._node.config, self._reactor.engine.transport_identity
        if config.enable_transport and config.respond_to_probes:
            probe = self.add(own, "probe")
            probe.accepts_links = False
            probe.proofs = ProofStrategy.ALL
            self.probe = probe.hash
            log.info("probes to %s are answered", probe.hash.hex())
        if config.enable_remote_management:
            self.add(own, *managementremote.ASPECTS, setup=RemoteManagement(self._node, self).prepare)
            if not config.remote_management_allowed:
                log.warning("remote management is enabled, and remote_management_allowed lists nobody who may ask")
        if config.publish_blackhole:
            self.add(own, *managementblackhole.NAME[1:], setup=self.blackholes.publish)
        if self.network_identity is not None:
            self.add(self.network_identity, "network")
            self.add(self.network_identity, "network", "instance", self.network_identity.hash.hex())

    def add(self, identity: Identity, *aspects: str, setup: Callable[[Destination], Any] | None = None) -> Destination:
        """A destination of the node's own: registered, and announced with the others."""
        destination = Destination(identity, Direction.IN, SINGLE, APP, *aspects)
        if setup is not None:
            setup(destination)
        with self._reactor.turn as now:
            self._reactor.engine.register(destination, now)
        self.destinations.append(destination)
        return destination

    def _announce_in_turn(self) -> None:
        self._errands[0].run_at(self._reactor.now() + ANNOUNCE_INTERVAL, self._announce_in_turn)
        self._announce()

    def _announce(self) -> None:
        with self._reactor.turn as now:
            if self._reactor.closed:
                return
            announcing = self._reactor.engine.announcing
            sent = [announcing.announce(destination, None, now) for destination in self.destinations]
        self._owed = not any(sent)

    def _interface_up(self, name: str) -> None:
        """Announces that reached nobody are made up for as soon as there is somebody."""
        if self._owed:
            self._announce()


def network_identity(path: Path) -> Identity:
    """The identity that the nodes of one operator share, made if there is none. Raises StorageError.

    Protocol: 07, section 7.4.
    """
    advice = "the file of `network_identity` is 64 bytes of private key, the same on all nodes of a network"
    try:
        return Identity.load(path)
    except IdentityError as error:
        raise StorageError(f"{error}; {advice}") from error
    except FileNotFoundError:
        pass
    except OSError as error:
        raise StorageError(f"{path}: the network identity cannot be read ({error.strerror}); {advice}") from error
    identity = Identity()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        identity.save(path)
    except OSError as error:
        raise StorageError(f"{path}: the network identity cannot be made ({error.strerror})") from error
    log.info("%s: there was no network identity, made %s", path, identity.hash.hex())
    return identity
