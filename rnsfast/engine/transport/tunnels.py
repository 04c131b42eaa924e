"""Tunnels: paths that survive the reconnection of a stream.  Protocol 02, section 9."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from rnsfast.crypto.hashes import truncated
from rnsfast.crypto.identity import Identity
from rnsfast.engine.filter import HashMemory
from rnsfast.engine.known import Path
from rnsfast.wire.drop import Drop
from rnsfast.wire.tunnel import parse_synthesis, synthesis_signed_data, tunnel_id

if TYPE_CHECKING:
    from rnsfast.engine.port import Port
    from rnsfast.engine.transport.transport import Transport

LIFETIME: Final = 28_800.0  # seconds after the last synthesis or announce
LIMIT: Final = 4096  # tunnels; the one longest silent gives way
PATHS: Final = 16_384  # paths a tunnel; the oldest gives way
BLOBS: Final = 32  # random blobs a stored path keeps
HEARD: Final = 4096  # synthesis packets remembered, two generations of this many
CLEANED: Final = 2048  # paths looked at in a cleaning, and the rest of a tunnel that was begun
VERIFIED_AT_ONCE: Final = 8  # signatures an interface may have verified in a row,
VERIFIED_EVERY: Final = 1.0  # seconds after which there is one more: a peer sends one a connection


@dataclass(slots=True)
class Tunnel:
    """One other end."""

    id: bytes  # 32 bytes
    port: Port | None
    expires_at: float  # unix time
    paths: dict[bytes, Path] = field(default_factory=dict)  # by destination; their `port` is that of last time


class Tunnels:
    """Tunnel id to tunnel, the longest silent first."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.tunnels: dict[bytes, Tunnel] = {}  # at most LIMIT
        self._by_port: dict[Port, Tunnel] = {}
        self._cleaning: list[bytes] = []  # tunnels that this round has not looked at yet
        self._heard = HashMemory(HEARD)
        self._verified: dict[Port, float] = {}  # up to when an interface has used up its verifications

    def _may_verify(self, port: Port, now: float) -> bool:
        used = max(self._verified.get(port, now), now)
        if used > now + (VERIFIED_AT_ONCE - 1) * VERIFIED_EVERY:
            return False
        self._verified[port] = used + VERIFIED_EVERY
        return True

    def receive(self, port: Port, data: bytes, now: float) -> None:
        """A synthesis packet: the other end of `port` says which tunnel this is."""
        synthesis = parse_synthesis(data)
        if isinstance(synthesis, Drop):
            port.drops[synthesis] += 1
            return
        digest = truncated(data)
        if digest in self._heard:  # a repeat must not take the tunnel back, or elsewhere
            port.drops[Drop.FILTERED] += 1
            return
        if not self._may_verify(port, now):
            port.drops[Drop.TUNNEL_OVERLOAD] += 1
            return
        signed = synthesis_signed_data(synthesis.public_key, synthesis.interface_hash, synthesis.random)
        if not Identity.from_public(synthesis.public_key).verify(synthesis.signature, signed):
            port.drops[Drop.TUNNEL_SIGNATURE] += 1
            return
        self._heard.add(digest)
        unix_time = now + self._transport.engine.unix_offset
        identifier = tunnel_id(synthesis.public_key, synthesis.interface_hash)
        tunnel = self.tunnels.pop(identifier, None)
        if tunnel is None:
            if len(self.tunnels) >= LIMIT:
                self._drop(next(iter(self.tunnels)))
            tunnel = Tunnel(identifier, port, 0.0)
        elif tunnel.port is not None:
            self._by_port.pop(tunnel.port, None)
        self.tunnels[identifier] = tunnel
        before = self._by_port.get(port)
        if before is not None and before is not tunnel:
            before.port = None
        tunnel.port, tunnel.expires_at = port, unix_time + LIFETIME
        self._by_port[port] = tunnel
        self._restore(tunnel, port, unix_time)

    def _drop(self, identifier: bytes) -> None:
        tunnel = self.tunnels.pop(identifier)
        if tunnel.port is not None:
            self._by_port.pop(tunnel.port, None)

    def _restore(self, tunnel: Tunnel, port: Port, unix_time: float) -> None:
        paths = self._transport.engine.paths
        for destination, stored in list(tunnel.paths.items()):
            path = paths.paths.get(destination)
            if path is not None and not path.port.online:
                path = None
            if path is None:
                restored = unix_time < stored.expires_at
            else:
                nearer = stored.hops <= path.hops or unix_time > path.expires_at
                restored = nearer and stored.newest >= path.newest
            if restored:
                paths.put(destination, replace(stored, port=port, heard_at=unix_time, unresponsive=False))
            else:
                del tunnel.paths[destination]

    def forget(self, destination: bytes) -> None:
        """Have no tunnel bring a path to this destination back."""
        for tunnel in self.tunnels.values():
            tunnel.paths.pop(destination, None)

    def restore(self, identifier: bytes, paths: dict[bytes, Path], expires_at: float) -> None:
        """A tunnel that was stored: its interface comes with the next synthesis."""
        if len(self.tunnels) < LIMIT:
            self.tunnels[identifier] = Tunnel(identifier, None, expires_at, paths)

    def path_taken(self, port: Port, destination: bytes, path: Path, unix_time: float) -> None:
        """A path was learnt from an announce on `port`: it is the tunnel's, too."""
        tunnel = self._by_port.get(port)
        if tunnel is None:
            return
        tunnel.paths.pop(destination, None)
        if len(tunnel.paths) >= PATHS:
            del tunnel.paths[next(iter(tunnel.paths))]
        tunnel.paths[destination] = replace(path, blobs=path.blobs[-BLOBS:])
        tunnel.expires_at = unix_time + LIFETIME

    def leave(self, port: Port) -> None:
        """`port` is gone or down; the tunnel waits for its return."""
        tunnel = self._by_port.pop(port, None)
        if tunnel is not None:
            tunnel.port = None

    def detach(self, port: Port) -> None:
        """`port` is gone for good."""
        self._verified.pop(port, None)

    def clean(self, unix_time: float) -> None:
        """Forget what is over: silent tunnels, old paths, paths older than the active ones. A part each time."""
        active, looked = self._transport.engine.paths.paths, 0
        if not self._cleaning:
            self._cleaning = list(self.tunnels)
        while self._cleaning and looked < CLEANED:
            identifier = self._cleaning.pop()
            tunnel = self.tunnels.get(identifier)
            if tunnel is None:
                continue
            looked += 1 + len(tunnel.paths)
            if unix_time > tunnel.expires_at or tunnel.expires_at > unix_time + 2 * LIFETIME:
                self._drop(identifier)
                continue
            for destination, stored in list(tunnel.paths.items()):
                path = active.get(destination)
                if unix_time > stored.heard_at + LIFETIME or (path is not None and path.newest > stored.newest):
                    del tunnel.paths[destination]
