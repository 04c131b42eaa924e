"""The thread-facing link.  Protocol 03."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rnsfast.crypto.identity import Identity
from rnsfast.engine.link import Link as EngineLink
from rnsfast.engine.linkstate import Reason, State
from rnsfast.engine.receipts import Receipt as EngineReceipt
from rnsfast.engine.receipts import Status
from rnsfast.engine.streams import SEND_BUFFER, SendStream
from rnsfast.errors import LinkClosed, MessageTooLarge
from rnsfast.node.channel import Channel
from rnsfast.node.dispatch import Strand
from rnsfast.node.mailbox import Mailbox
from rnsfast.node.streams import Compression, StreamReader, StreamWriter
from rnsfast.node.waiting import Waitable
from rnsfast.wire.drop import Drop

if TYPE_CHECKING:
    from rnsfast.node.node import Node

Sink = Callable[[list[bytes]], None]


class Receipt(Waitable):
    """Tells whether a packet was proved by its receiver."""

    __slots__ = ("_engine", "_reactor")

    def __init__(self, node: Node, engine: EngineReceipt) -> None:
        super().__init__(node._reactor.lock)
        self._engine = engine
        self._reactor = node._reactor
        engine.owner = self

    @property
    def status(self) -> Status:
        """SENT, DELIVERED, FAILED or CULLED."""
        return self._engine.status

    @property
    def rtt(self) -> float | None:
        """Seconds from sending to the proof; None without one."""
        return self._engine.rtt

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the outcome: True if the packet was proved, False if that failed or `timeout` seconds passed."""
        self._reactor.check_may_block()
        with self._lock:
            self.wait_for(lambda: self._engine.status is not Status.SENT, timeout)
            return self._engine.status is Status.DELIVERED


class Link(Waitable):
    """An encrypted link. `node.connect` returns the initiator's end, `Inbox.on_link` hands out the responder's.

    As a context manager it is closed at the end of the block.
    """

    __slots__ = ("_arrived", "_channel", "_engine", "_handlers", "_node", "_packets", "_reactor", "_sink", "_strand")

    def __init__(self, node: Node, engine: EngineLink) -> None:
        super().__init__(node._reactor.lock)
        self._node = node
        self._reactor = node._reactor
        self._engine = engine
        self._strand = Strand()
        self._channel: Channel | None = None
        self._handlers: dict[str, Callable[..., Any]] = {}
        self._packets = Mailbox(self._reactor, self._strand, self._offer, self._offer_many)
        self._sink: Sink | None = None
        self._arrived: list[bytes] = []  # for the sink, in this turn
        engine.owner = self

    # ------------------------------------------------------------------ what it is

    @property
    def id(self) -> bytes:
        """The link id, 16 bytes, the same at both ends."""
        return self._engine.link_id

    @property
    def is_initiator(self) -> bool:
        """Whether this end asked for the link."""
        return self._engine.initiator

    @property
    def is_active(self) -> bool:
        """Established and not closed. Looks, never waits."""
        return self._engine.state in (State.ACTIVE, State.STALE)

    def _is_decided(self) -> bool:
        """Established, or closed. Under the lock."""
        return self._engine.state not in (State.PENDING, State.HANDSHAKE)

    @property
    def state(self) -> State:
        """PENDING, HANDSHAKE, ACTIVE, STALE or CLOSED."""
        return self._engine.state

    @property
    def reason(self) -> Reason | None:
        """Why it was closed; None while it is not."""
        return self._engine.reason

    @property
    def closing(self) -> str:
        """Why it was closed, in words."""
        return self._engine.closing

    @property
    def mtu(self) -> int:
        """Bytes of the largest packet on this link, agreed in the handshake: at least 500."""
        return self._engine.mtu

    @property
    def mdu(self) -> int:
        """The most bytes `send` takes: 431 if the link MTU is 500."""
        return self._engine.mdu

    @property
    def rtt(self) -> float:
        """Seconds of round trip, measured in the handshake."""
        return self._engine.rtt

    @property
    def destination_hash(self) -> bytes:
        """The address the link was asked for, 16 bytes."""
        return self._engine.destination.hash

    @property
    def remote_identity(self) -> Identity | None:
        """Who is at the other end: at the initiator the destination's identity, at the responder who identified."""
        return self._engine.remote_identity

    # ------------------------------------------------------------------ packets

    def send(self, data: bytes) -> Receipt:
        """Send one packet, at most `mdu` bytes. Whether the peer proves it depends on its proof strategy.

        Raises LinkClosed, MessageTooLarge. Protocol: 03, sections 11 and 12.
        """
        if len(data) > self._engine.mdu:
            raise MessageTooLarge(len(data), self._engine.mdu)
        with self._reactor.turn as now:
            engine = self._engine.send_data(bytes(data), now)
            receipt = None if engine is None else Receipt(self._node, engine)
        if receipt is None:
            raise LinkClosed(self.id, self.closing)
        return receipt

    def send_many(self, packets: Sequence[bytes]) -> None:
        """Send packets in order, at most `mdu` bytes each: sealed together, written together, without receipts.

        Raises LinkClosed, MessageTooLarge (its `index` says which; nothing was sent). Protocol: 03, section 11.
        """
        mdu = self._engine.mdu
        if packets and len(max(packets, key=len)) > mdu:
            index, size = next((i, len(packet)) for i, packet in enumerate(packets) if len(packet) > mdu)
            raise MessageTooLarge(size, mdu, index)
        with self._reactor.turn as now:
            sent = self._engine.send_data_many(packets, now)
        if sent < len(packets):
            raise LinkClosed(self.id, self.closing)

    def on_packet(self, handler: Callable[[bytes], Any]) -> None:
        """Have `handler(data)` called for each packet, in order, on a callback thread.

        Up to 1 MiB of packets that came before a handler was set are delivered now. Replaces `on_packets`.
        """
        with self._reactor.turn:
            self._handlers["packet"] = handler
            self._packets.open()

    def on_packets(self, handler: Callable[[list[bytes]], Any]) -> None:
        """Have `handler(packets)` called with everything that has arrived, in order, on a callback thread.

        It is called once for all packets that came in together, or while the handler was busy. Replaces `on_packet`.
        """
        with self._reactor.turn:
            self._handlers["packets"] = handler
            self._packets.open_batches()

    def _forward_to(self, sink: Sink | None) -> None:
        """For forwarders of ours: have `sink(packets)` called once a turn with what the turn brought.

        It is called on the thread that took the turn (the reactor's), without the lock, after the turn's own packets
        were flushed; it must not block, and packets that come this way are proved by nothing but `set_proofs("all")`.
        What came before is handed over at the end of this call. None: as if there had been none.
        """
        with self._reactor.turn:
            self._sink = sink
            if sink is not None:
                self._arrived += [data for data, _ in self._packets.take_all()]
                if self._arrived:
                    self._reactor.sinks.append(self)

    def _hand_over(self, packets: list[bytes]) -> None:
        """By the reactor, without the lock."""
        sink = self._sink
        if sink is not None:
            sink(packets)

    def _data(self, packets: list[bytes], hashes: list[bytes]) -> None:
        """Under the lock, from the engine."""
        if self._sink is not None:
            if not self._arrived:
                self._reactor.sinks.append(self)
            self._arrived += packets
            return
        put, refused = self._packets.put, 0
        for item in zip(packets, hashes, strict=True):
            refused += not put(item, len(item[0]))
        if refused:
            self._engine.port.drops[Drop.PACKET_NO_HANDLER] += refused

    def _offer(self, item: tuple[bytes, bytes]) -> None:
        """On the link's strand, so after the established handler has returned."""
        self._prove_if_wanted([item])
        self._handlers["packet"](item[0])

    def _offer_many(self, items: list[tuple[bytes, bytes]]) -> None:
        """As `_offer`."""
        self._prove_if_wanted(items)
        self._handlers["packets"]([data for data, _ in items])

    def _prove_if_wanted(self, items: list[tuple[bytes, bytes]]) -> None:
        wanted = [digest for data, digest in items if self._node._wants_proof(self._engine.destination, data)]
        if wanted:
            with self._reactor.turn as now:
                self._engine.prove(wanted)
                self._reactor.engine.settle_now(now)

    # ------------------------------------------------------------------ channel and streams

    @property
    def channel(self) -> Channel:
        """The link's message channel. Opened when first asked for; what arrived before is kept for it (48 messages)."""
        if self._channel is None:
            with self._reactor.turn as now:
                if self._channel is None:
                    self._engine.open_channel(now, self._attach)
        assert self._channel is not None
        return self._channel

    def _attach(self, engine: Any) -> None:
        """The engine's channel exists, and has not yet processed anything. Under the lock."""
        self._channel = Channel(self, engine)

    def open_writer(
        self, stream_id: int = 0, *, compression: Compression = "auto", buffer: int = SEND_BUFFER
    ) -> StreamWriter:
        """Write a byte stream that the peer reads under the same `stream_id` (0..16383).

        Args:
            compression: `auto` tries while it helps, `never`, or `always`. The peer can read each.
            buffer: bytes that may wait for the window.

        Raises LinkClosed, ValueError. Protocol: 05, section 8.
        """
        if buffer < 1:
            raise ValueError(f"a writer's buffer has at least one byte, not {buffer}")
        channel = self.channel._engine
        stream = SendStream(stream_id, buffer)
        if channel.closed:
            raise LinkClosed(self.id, self.closing)
        return StreamWriter(self, channel, stream, compression)

    def open_reader(self, stream_id: int = 0) -> StreamReader:
        """Read the byte stream that the peer writes under `stream_id`, from its beginning.

        Up to 1 MiB that arrived before is kept. ValueError if the stream has a reader already.
        Protocol: 05, section 9.
        """
        channel = self.channel._engine
        with self._reactor.turn:
            stream = channel.open_reader(stream_id)
        return StreamReader(self, channel, stream)

    # ------------------------------------------------------------------ identity, end

    def identify(self, identity: Identity) -> None:
        """Reveal `identity` to the responder. Only the initiator of an active link can.

        Raises LinkClosed, IdentityError (public half only), ValueError (responder). Protocol: 03, section 14.
        """
        if not self._engine.initiator:
            raise ValueError("only a link's initiator identifies itself; the responder is known by its destination")
        with self._reactor.turn as now:
            done = self._engine.identify(identity, now)
        if not done:
            raise LinkClosed(self.id, self.closing)

    def on_identified(self, handler: Callable[[Identity], Any]) -> None:
        """Have `handler(identity)` called when the initiator reveals itself; at once if it has."""
        with self._reactor.turn:
            self._handlers["identified"] = handler
            if not self._engine.initiator and self._engine.remote_identity is not None:
                self._identified()

    def wait_identified(self, timeout: float | None = None) -> Identity | None:
        """Wait until the initiator has revealed itself. None if `timeout` seconds pass or the link closes first."""
        self._reactor.check_may_block()
        engine = self._engine
        with self._lock:
            self.wait_for(lambda: engine.remote_identity is not None or not engine.is_open, timeout)
            return engine.remote_identity

    def _identified(self) -> None:
        """Under the lock, from the engine."""
        handler, identity = self._handlers.get("identified"), self._engine.remote_identity
        if handler is not None:
            self._reactor.enqueue(self._strand, lambda: handler(identity))

    def on_close(self, handler: Callable[[Link], Any]) -> None:
        """Have `handler(link)` called once when the link is closed, whoever did it; at once if it is."""
        with self._reactor.turn:
            if self._engine.is_open:
                self._handlers["close"] = handler
            else:
                self._reactor.enqueue(self._strand, lambda: handler(self))

    def _closed(self) -> None:
        """Under the lock, from the engine."""
        self._reactor.engine.touched.add(self._packets)
        handler = self._handlers.pop("close", None)
        if handler is not None:
            self._reactor.enqueue(self._strand, lambda: handler(self))

    def close(self) -> None:
        """Tell the peer and close. Idempotent, never waits.

        What was sent and is not proved may be lost: close writers, or `channel.flush()`, first.
        """
        with self._reactor.turn as now:
            self._engine.close(now)

    def wait_closed(self, timeout: float | None = None) -> bool:
        """Wait until the link is closed. False if `timeout` seconds pass first."""
        self._reactor.check_may_block()
        with self._lock:
            return self.wait_for(lambda: not self._engine.is_open, timeout)

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Link {self.id.hex()} {self.state.name.lower()}>"

    def __str__(self) -> str:
        return self.id.hex()
