"""The part of `Node` that is about other people's nodes: discovered interfaces, unwanted identities, names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rnsfast.crypto.identity import Identity
from rnsfast.engine.transport.blackhole import Ban
from rnsfast.errors import NodeClosed

if TYPE_CHECKING:
    from rnsfast.node.management import Management
    from rnsfast.node.reactor import Reactor


class ManagementApi:
    """Methods of every `Node`; they may be called while it runs, from any thread."""

    _management: Management | None
    _reactor: Reactor

    def _check_running(self) -> None:
        raise NotImplementedError

    def _managed(self) -> Management:
        management = self._management
        self._check_running()
        if management is None:  # it was running a moment ago
            raise NodeClosed("the node is being stopped")
        return management

    # ------------------------------------------------------------------ interfaces of others

    def discovered_interfaces(self) -> list[dict[str, Any]]:
        """Interfaces of other nodes that were heard of, most promising first; none without `discover_interfaces`.

        Each is a map as in the files of other implementations, `config_entry` being the section that connects to it,
        with `status` (available, unknown or stale) and `status_code`. Protocol: 02, section 15.4.
        """
        return self._managed().discovery.interfaces()

    def on_interface_discovered(self, handler: Callable[[dict[str, Any]], Any]) -> None:
        """Have `handler(interface)` called, on a callback thread, whenever an interface of another node is heard of."""
        discovery = self._managed().discovery
        with self._reactor.turn:
            discovery.add_handler(handler)

    # ------------------------------------------------------------------ unwanted identities

    def blackhole(self, identity: bytes, *, until: float | None = None, reason: str | None = None) -> bool:
        """Take no more announces of an identity and give up the paths to its destinations; kept over restarts.

        Args:
            identity: the 16-byte hash of the identity, not of a destination.
            until: unix time; None for ever.
            reason: shown to whoever asks for the list.

        Returns False if it is blackholed already, or the node's own. Protocol: 02, section 14.
        """
        if len(identity) != 16:
            raise ValueError(f"an identity hash has 16 bytes (32 hex digits), this one has {len(identity)}")
        return self._managed().blackholes.ban(identity, until, reason)

    def unblackhole(self, identity: bytes) -> bool:
        """Hear an identity again. False if it is not blackholed. One on a fetched list comes back with that list."""
        return self._managed().blackholes.lift(identity)

    def blackholed(self) -> dict[bytes, Ban]:
        """The identities that are not heard: who said so, until when and why."""
        return self._managed().blackholes.all()

    # ------------------------------------------------------------------ names

    def resolve_identity(self, name: str) -> Identity | None:
        """The identity of a name. There is no way to ask the network yet, so None. Protocol: 02, section 13."""
        self._managed()
        return None
