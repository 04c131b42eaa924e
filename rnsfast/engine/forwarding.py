"""The place of transport: forwarding packets for others.  Protocol 02, sections 5 to 9.

An endpoint has none.  A transport node sets `Engine.forwarding`; the engine then shows it every packet that passed the
filter, before local delivery, and every announce that was taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from rnsfast.wire.packet import Packet

if TYPE_CHECKING:
    from rnsfast.engine.events import AnnounceHeard
    from rnsfast.engine.port import Port


class Forwarding(Protocol):
    """What a transport node does for others."""

    def handles(self, port: Port, packet: Packet, raw: bytes, now: float) -> bool:
        """Forward `packet` if it is for somebody else. True if that is all that happens to it."""
        ...

    def announce_taken(self, port: Port, packet: Packet, event: AnnounceHeard, now: float) -> None:
        """An announce changed the path table: rebroadcast it, answer who waits for it."""
        ...

    def path_requested(
        self, port: Port, destination: bytes, transport_id: bytes | None, tag: bytes, now: float
    ) -> None:
        """Somebody looks for a destination that is not local."""
        ...
