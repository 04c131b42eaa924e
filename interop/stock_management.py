"""Commands of the stock peer about management: discovery, blackhole lists, and requests with any data.

    transport_id                                   -> transport_id, network_id
    discover     required                          has it listen; each interface heard of is an event
    discovered                                     -> interfaces
    ban          identity, until?, reason?         wait_banned  identity -> ban, null if it does not come
    ask          link, path, data (JSON)           -> status, data

Event: discovered(info). Bytes in JSON are {"hex": text}, keys too: "hex:…".
"""

from __future__ import annotations

import threading
import time
from typing import Any, Protocol

import RNS


class Peer(Protocol):
    """What these commands need of the stock node."""

    reticulum: Any

    def emit(self, event: str, **values: Any) -> None: ...
    def _session(self, link: str) -> Any: ...


def hurry() -> None:
    """Have the stock package's jobs look every second instead of every minute."""
    RNS.Discovery.InterfaceAnnouncer.JOB_INTERVAL = 1
    RNS.Discovery.BlackholeUpdater.INITIAL_WAIT = 1
    RNS.Discovery.BlackholeUpdater.JOB_INTERVAL = 1


def to_json(value: Any) -> Any:
    """Any msgpack value, without loss."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, dict):
        return {f"hex:{k.hex()}" if isinstance(k, bytes) else str(k): to_json(v) for k, v in value.items()}
    return [to_json(item) for item in value] if isinstance(value, list | tuple) else value


def from_json(value: Any) -> Any:
    """What `to_json` was made from."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"hex"}:
        return bytes.fromhex(value["hex"])
    return {bytes.fromhex(k[4:]) if k.startswith("hex:") else k: from_json(v) for k, v in value.items()}


class ManagementCommands:
    """One method each, named `do_…`."""

    def do_transport_id(self: Peer) -> dict[str, Any]:
        network = RNS.Transport.network_identity if RNS.Transport.has_network_identity() else None
        own: str = RNS.Transport.identity.hash.hex()
        return {"transport_id": own, "network_id": network.hash.hex() if network else None}

    def do_discover(self: Peer, required: int) -> None:
        RNS.Discovery.InterfaceDiscovery(
            required_value=required, callback=lambda info: self.emit("discovered", info=to_json(info))
        )

    def do_discovered(self: Peer) -> dict[str, Any]:
        listing = RNS.Discovery.InterfaceDiscovery(discover_interfaces=False)
        return {"interfaces": to_json(listing.list_discovered_interfaces())}

    def do_ban(self: Peer, identity: str, until: float | None = None, reason: str | None = None) -> dict[str, Any]:
        done = self.reticulum.blackhole_identity(bytes.fromhex(identity), until=until, reason=reason)
        return {"banned": done}

    def do_wait_banned(self: Peer, identity: str, timeout: float = 15.0) -> dict[str, Any]:
        end, target, pause = time.monotonic() + timeout, bytes.fromhex(identity), threading.Event()
        while time.monotonic() < end:  # the stock package tells nobody
            bans = self.reticulum.get_blackholed_identities()
            if target in bans:
                return {"ban": to_json(bans[target])}
            pause.wait(0.05)
        return {"ban": None}

    def do_ask(self: Peer, link: str, path: str, data: Any = None, timeout: float = 15.0) -> dict[str, Any]:
        done = threading.Event()
        receipt = self._session(link).link.request(
            path, from_json(data), lambda r: done.set(), lambda r: done.set(), timeout=timeout
        )
        if receipt is False or not done.wait(timeout + 5):
            return {"status": "unsent" if receipt is False else "waiting", "data": None}
        ready = receipt.get_status() == RNS.RequestReceipt.READY
        return {"status": "ready" if ready else "failed", "data": to_json(receipt.get_response())}
