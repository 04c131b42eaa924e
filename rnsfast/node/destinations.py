"""Destinations as applications hold them: an Inbox receives, an Outbox sends.  Protocol 01, sections 3 and 8."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rnsfast.crypto.identity import Identity
from rnsfast.engine.destination import Destination, ProofStrategy, RatchetRing
from rnsfast.engine.events import PacketArrived
from rnsfast.errors import MessageTooLarge
from rnsfast.node.dispatch import Strand
from rnsfast.node.link import Link, Receipt
from rnsfast.node.mailbox import Mailbox
from rnsfast.node.storage import load_ring, save_ring
from rnsfast.wire.drop import Drop
from rnsfast.wire.packet import ENCRYPTED_MDU, GROUP, PLAIN, PLAIN_MDU, SINGLE

if TYPE_CHECKING:
    from rnsfast.node.node import Node

log = logging.getLogger(__name__)

GROUP_MDU: Final = (PLAIN_MDU - 48) // 16 * 16 - 1  # 415
PROOF_STRATEGIES: Final = {"none": ProofStrategy.NONE, "app": ProofStrategy.APP, "all": ProofStrategy.ALL}
MDU: Final = {SINGLE: ENCRYPTED_MDU, GROUP: GROUP_MDU, PLAIN: PLAIN_MDU}


class Inbox:
    """A destination of ours that receives; made by `Node.register`. Callbacks run on a callback thread, in order."""

    def __init__(self, node: Node, destination: Destination) -> None:
        self._node, self._reactor = node, node._reactor
        self._destination = destination
        self._strand = Strand()
        self._handlers: dict[str, Callable[..., Any]] = {}
        self._packets = Mailbox(self._reactor, self._strand, self._offer)
        self._ring_path: Path | None = None
        destination.owner = self

    @property
    def hash(self) -> bytes:
        """The address, 16 bytes."""
        return self._destination.hash

    @property
    def name(self) -> str:
        """The dotted name."""
        return self._destination.name

    @property
    def identity(self) -> Identity | None:
        """Whose it is; None for PLAIN destinations."""
        return self._destination.identity

    def on_link(self, handler: Callable[[Link], Any]) -> None:
        """Have `handler(link)` called for each link that is established to this destination.

        The handler may block. Packets and messages that arrive meanwhile are kept until it has returned: 1 MiB of
        packets, 48 messages if it has not asked for the channel. Set the link's own handlers inside it.
        """
        with self._reactor.turn:
            self._handlers["link"] = handler

    def on_packet(self, handler: Callable[[bytes], Any]) -> None:
        """Have `handler(data)` called for each packet that comes to this destination outside links."""
        with self._reactor.turn:
            self._handlers["packet"] = handler
            self._packets.open()

    @property
    def accepts_links(self) -> bool:
        """Whether link requests are answered. True by default."""
        return self._destination.accepts_links

    @accepts_links.setter
    def accepts_links(self, value: bool) -> None:
        with self._reactor.turn:
            self._destination.accepts_links = value

    def set_proofs(self, strategy: str, decide: Callable[[bytes], bool] | None = None) -> None:
        """What is proved of packets received: "none" (default), "all", or "app": what `decide(data)` says yes to."""
        if strategy not in PROOF_STRATEGIES:
            raise ValueError(f"a proof strategy is 'none', 'app' or 'all', not {strategy!r}")
        with self._reactor.turn:
            self._destination.proofs = PROOF_STRATEGIES[strategy]
            if decide is not None:
                self._handlers["proof"] = decide

    def set_group_key(self, key: bytes) -> None:
        """The shared key of a GROUP destination, 64 bytes (32 accepted)."""
        with self._reactor.turn:
            self._destination.set_group_key(key, self._reactor.engine.entropy)

    def enable_ratchets(self, path: str | os.PathLike[str], *, enforce: bool = False) -> None:
        """Announce ratchets, fresh keys that packets to this destination are encrypted to; kept in the file `path`.

        With `enforce`, packets encrypted to the identity's own key are dropped. Raises StorageError if the file
        cannot be written. Protocol: 01, section 7.1.
        """
        identity = self._destination.identity
        if self._destination.kind != SINGLE or identity is None:
            raise ValueError(f"{self._destination!r}: only SINGLE destinations have ratchets")
        self._ring_path = Path(path)
        keys = load_ring(self._ring_path, identity)
        save_ring(self._ring_path, keys, identity)
        with self._reactor.turn:
            self._destination.ratchets = RatchetRing(keys)
            self._destination.enforce_ratchets = enforce

    def announce(self, app_data: bytes | None = None) -> bool:
        """Tell the network that this destination is here. False if no interface is up.

        `app_data` is at most 317 bytes, 285 with ratchets; None means what was set as default.
        Protocol: 02, section 2.2.
        """
        if self._destination.ratchets is not None:
            with self._reactor.lock:
                unix_time = self._reactor.now() + self._reactor.engine.unix_offset
                rotated = self._destination.ratchets.rotate(unix_time, self._reactor.engine.entropy)
            if rotated:  # on disk before anybody can use it
                self._save_ring()
        with self._reactor.turn as now:
            return self._reactor.engine.announcing.announce(self._destination, app_data, now)

    @property
    def app_data(self) -> bytes | None:
        """Announced when an announce brings none of its own, also in answers to path requests."""
        return self._destination.app_data

    @app_data.setter
    def app_data(self, value: bytes | None) -> None:
        with self._reactor.turn:
            self._destination.app_data = value

    def close(self) -> None:
        """Receive no more. Links that are established go on."""
        with self._reactor.turn as now:
            self._reactor.engine.deregister(self._destination, now)

    def _save_ring(self) -> None:
        ring, identity, path = self._destination.ratchets, self._destination.identity, self._ring_path
        if ring is not None and identity is not None and path is not None:
            with self._reactor.lock:
                keys = list(ring.keys)
            save_ring(path, keys, identity)

    def _packet(self, event: PacketArrived) -> None:
        """Under the lock, from the engine."""
        if not self._packets.put(event, len(event.data)):
            event.port.drops[Drop.PACKET_NO_HANDLER] += 1

    def _offer(self, event: PacketArrived) -> None:
        """On the strand."""
        self._prove_if_wanted(event)
        self._handlers["packet"](event.data)

    def _prove_if_wanted(self, event: PacketArrived) -> None:
        if self._node._wants_proof(self._destination, event.data):
            with self._reactor.turn:
                self._reactor.engine.prove(self._destination, event.packet_hash, event.port)

    def _link(self, link: Link) -> None:
        """Under the lock, from the engine: the first call on the link's strand, so everything waits for it."""
        handler = self._handlers.get("link")
        if handler is not None:
            self._reactor.enqueue(link._strand, lambda: handler(link))

    def __repr__(self) -> str:
        return f"<Inbox {self.name} {self.hash.hex()}>"


class Outbox:
    """A destination of somebody else that packets are sent to; made by `Node.outbox`."""

    def __init__(self, node: Node, destination: Destination) -> None:
        self._node, self._reactor = node, node._reactor
        self._destination = destination

    @property
    def hash(self) -> bytes:
        """The address, 16 bytes."""
        return self._destination.hash

    @property
    def mdu(self) -> int:
        """The most bytes `send` takes: 383 to SINGLE, 415 to GROUP, 464 to PLAIN destinations."""
        return MDU[self._destination.kind]

    def set_group_key(self, key: bytes) -> None:
        """The shared key of a GROUP destination, 64 bytes (32 accepted)."""
        with self._reactor.turn:
            self._destination.set_group_key(key, self._reactor.engine.entropy)

    def send(self, data: bytes) -> Receipt | None:
        """Send one packet. Returns its receipt; None for PLAIN destinations, which prove nothing.

        Raises MessageTooLarge; ConnectionError if no interface is up; ValueError for a GROUP without its key.
        """
        if len(data) > self.mdu:
            raise MessageTooLarge(len(data), self.mdu)
        with self._reactor.turn as now:
            engine = self._reactor.engine.send_packet(self._destination, bytes(data), now)
            return None if engine is None else Receipt(self._node, engine)
