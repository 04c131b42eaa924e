"""What the engine tells its runtime.

The methods are called under the node's lock, in the middle of processing a batch: they note what has happened and
return.  Whoever waits is told after the batch, and callbacks of applications run elsewhere (DESIGN, section 6).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rnsfast.crypto.identity import Identity

if TYPE_CHECKING:
    from rnsfast.engine.channel import Channel
    from rnsfast.engine.destination import Destination
    from rnsfast.engine.link import Link
    from rnsfast.engine.port import Port
    from rnsfast.engine.receipts import Receipt


@dataclass(frozen=True, slots=True)
class AnnounceHeard:
    """An announce that changed the path table."""

    destination: bytes  # 16 bytes
    name_hash: bytes  # 10 bytes
    identity: Identity  # public half
    app_data: bytes | None
    packet_hash: bytes  # 32 bytes
    hops: int
    ratchet: bytes | None  # 32 bytes, public
    is_path_response: bool


@dataclass(frozen=True, slots=True)
class PacketArrived:
    """A packet off links, opened."""

    destination: Destination
    data: bytes
    packet_hash: bytes  # 32 bytes
    ratchet_id: bytes | None  # 10 bytes, None if the identity's own key opened it
    port: Port


class Listener(Protocol):
    """Implemented by the runtime."""

    def announce_heard(self, event: AnnounceHeard) -> None: ...
    def path_confirmed(self, destination: bytes) -> None: ...
    def ratchets_rotated(self, destination: Destination) -> None: ...
    def ratchet_learnt(self, destination: bytes, ratchet: bytes, unix_time: float) -> None: ...
    def packet_arrived(self, event: PacketArrived) -> None: ...
    def receipt_concluded(self, receipt: Receipt) -> None: ...
    def link_established(self, link: Link) -> None: ...
    def link_closed(self, link: Link) -> None: ...
    def link_data(self, link: Link, packets: list[bytes], hashes: list[bytes]) -> None: ...
    def peer_identified(self, link: Link) -> None: ...
    def messages_arrived(self, channel: Channel, messages: list[tuple[int, bytes]]) -> None: ...
