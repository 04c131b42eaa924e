"""One end of a link: handshake, packets, proofs, keepalive, close.  Protocol 03.

`receive` takes a batch of packets; a proof opens the channel's window in `settle`, which fills it again, once a batch.
States and moves are in `linkstate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, Final

from rnsfast.crypto.ed25519 import SigningKey, VerifyKey
from rnsfast.crypto.hashes import full
from rnsfast.crypto.hkdf import hkdf
from rnsfast.crypto.identity import Identity
from rnsfast.crypto.token import TokenKey
from rnsfast.crypto.x25519 import X25519Key
from rnsfast.engine.channel import Channel, Envelope
from rnsfast.engine.control import HANDLERS, receive_data
from rnsfast.engine.linkstate import (
    GRACE_RTT_FACTOR,
    KEEPALIVE_MAX,
    MOVES,
    PER_HOP_TIMEOUT,
    STALE_FACTOR,
    STALE_GRACE,
    TRAFFIC_TIMEOUT_FACTOR,
    TRAFFIC_TIMEOUT_MIN,
    Cause,
    Do,
    Reason,
    State,
    keepalive_for,
)
from rnsfast.engine.receipts import LIMIT as RECEIPT_LIMIT
from rnsfast.engine.receipts import Receipt, Status
from rnsfast.engine.requests import PendingRequest
from rnsfast.engine.settling import Settlement
from rnsfast.wire.drop import Drop
from rnsfast.wire.handshake import (
    LinkProof,
    build_identify,
    build_rtt,
    identify_signed_data,
    link_proof_signed_data,
)
from rnsfast.wire.packet import (
    CTX_CHANNEL,
    CTX_KEEPALIVE,
    CTX_LINKCLOSE,
    CTX_LINKIDENTIFY,
    CTX_LRPROOF,
    CTX_LRRTT,
    CTX_NONE,
    CTX_RESOURCE_PRF,
    DATA,
    LINK,
    MTU,
    PROOF,
    link_mdu,
    make_raw,
)
from rnsfast.wire.proof import link_proof_packet

if TYPE_CHECKING:
    from rnsfast.engine.destination import Destination
    from rnsfast.engine.engine import Engine
    from rnsfast.engine.port import Port

PING: Final = b"\xff"
PONG: Final = b"\xfe"
EARLY_PACKETS: Final = 48  # channel packets held, unproved, until the channel is opened (protocol 05, section 10)

_DATA_FLAGS: Final = LINK << 2 | DATA


class Link:
    """Made by the engine: `Engine.open_link` for an initiator, on a link request for a responder."""

    def __init__(
        self,
        engine: Engine,
        link_id: bytes,
        destination: Destination,
        port: Port,
        *,
        initiator: bool,
        exchange: X25519Key,
        signing: SigningKey,
        mode: int,
        timeout: float,
        now: float,
    ) -> None:
        self.engine = engine
        self.link_id = link_id  # 16 bytes
        self.destination = destination
        self.port = port  # the one interface this link is bound to; for an initiator known with the proof
        self.initiator = initiator
        self.mode = mode
        self.state = State.PENDING if initiator else State.HANDSHAKE
        self.reason: Reason | None = None
        self.closing = "it is open"  # in words, once closed
        self.mtu = MTU
        self.mdu = link_mdu(MTU)
        self.hops = 0
        self.remote_identity: Identity | None = None
        self.requested_at = now
        self.establishment_timeout = timeout
        self.activated_at: float | None = None
        self.rtt = 0.0  # seconds; the initiator's own measurement, the larger of two at the responder
        self.keepalive = KEEPALIVE_MAX
        self.stale_time = KEEPALIVE_MAX * STALE_FACTOR
        self.last_inbound = self.last_outbound = self.last_data = self.last_proof = 0.0
        self.last_keepalive = 0.0
        self.tx_packets = self.rx_packets = self.tx_bytes = self.rx_bytes = 0
        #: Packet hash of everything that waits for a proof. Channel envelopes: at most 48, twenty copies each.
        #: Receipts: at most receipts.LIMIT, oldest culled.
        self.outstanding: dict[bytes, Envelope | Receipt] = {}
        self.pending_requests: dict[bytes, PendingRequest] = {}  # by request id; at most PENDING_LIMIT
        self.channel: Channel | None = None
        self.owner: Any = None  # the facade, for the runtime
        self.armed = inf
        self._receipts: dict[bytes, Receipt] = {}
        self._exchange: X25519Key | None = exchange
        self._signing: SigningKey | None = signing  # proves packets: ephemeral at the initiator, the identity's else
        self._peer_key: VerifyKey | None = None
        self._key: TokenKey | None = None
        self._early: list[bytes] = []
        self._stale_at = inf
        self.rtt_told = False  # the initiator's RTT packet has been taken
        self._pending: Settlement | None = None
        self._unsettled: list[Settlement] = []  # signatures of these are being computed

    # ------------------------------------------------------------------ what others ask

    @property
    def key(self) -> TokenKey:
        """The session key. RuntimeError before the handshake and after the end: nobody may ask then."""
        if self._key is None:
            raise RuntimeError(f"link {self.link_id.hex()} has no key in state {self.state.name}")
        return self._key

    @property
    def is_sendable(self) -> bool:
        """Active, and its interface up."""
        return self.state is State.ACTIVE and self.port.online

    @property
    def is_open(self) -> bool:
        """Not closed."""
        return self.state is not State.CLOSED

    @property
    def packet_timeout(self) -> float:
        """Seconds that the proof of a packet may take.  Protocol 03, section 12."""
        return max(self.rtt * TRAFFIC_TIMEOUT_FACTOR, TRAFFIC_TIMEOUT_MIN)

    # ------------------------------------------------------------------ states

    def apply(self, cause: Cause, now: float) -> bool:
        """The one place where the state changes. False: no such move, nothing happened."""
        move = MOVES.get((self.state, cause))
        if move is None:
            return False
        before, (self.state, actions) = self.state, move
        if self.state is State.ACTIVE and before is not State.STALE:
            self.activated_at = now
            self._keep_alive_by_rtt()
            self.arm(self._next_check())
        for do in actions:
            if do is Do.SEND_RTT:
                self.send_sealed(CTX_LRRTT, build_rtt(self.rtt), now)
            elif do is Do.SEND_CLOSE:
                self.send_sealed(CTX_LINKCLOSE, self.link_id, now)
            elif do is Do.TELL_ESTABLISHED:
                self.engine.link_established(self)
            else:
                self._end(cause, now)
        self.engine.touched.add(self)
        if self.channel is not None:
            self.engine.touched.add(self.channel)
            self.channel.pump(now)
        return True

    def _keep_alive_by_rtt(self) -> None:
        self.keepalive = keepalive_for(self.rtt)
        self.stale_time = self.keepalive * STALE_FACTOR
        if self.initiator:
            self.stale_time = max(self.stale_time, self.engine.initiator_stale_floor)

    def _end(self, cause: Cause, now: float) -> None:
        """Closed, whatever the reason: tell the waiting, wipe the keys."""
        own, other = Reason.DESTINATION_CLOSED, Reason.INITIATOR_CLOSED
        if self.initiator:
            own, other = other, own
        if cause is Cause.CLOSE_LOCAL:
            self.reason = own
        elif cause is Cause.CLOSE_REMOTE:
            self.reason = other
        else:
            self.reason = Reason.TIMEOUT
        if self.closing == "it is open":
            self.closing = {
                Cause.CLOSE_LOCAL: "it was closed on this side",
                Cause.CLOSE_REMOTE: "the peer closed it",
                Cause.ESTABLISHMENT_TIMEOUT: "the handshake was not completed in time",
                Cause.PORT_LOST: f"the interface {self.port.name} it ran over is down",
            }.get(cause, "the peer was silent for too long")
        if self.channel is not None:
            self.channel.close()
        for receipt in list(self._receipts.values()):
            receipt.conclude(Status.FAILED, now)
        for pending in list(self.pending_requests.values()):
            pending.fail(self.closing, now)
        self.outstanding.clear()
        self._early.clear()
        self._key = self._exchange = self._signing = None
        self.engine.timers.disarm(self)
        self.engine.link_closed(self, now)

    def close(self, now: float, why: str | None = None) -> None:
        """Tear down from this side; no-op if closed.  Protocol 03, section 13.3."""
        if why is not None and self.is_open:
            self.closing = why
        self._prove_unsettled()
        self.apply(Cause.CLOSE_LOCAL, now)

    def arm(self, when: float) -> None:
        """Have `advance` called at `when`."""
        self.engine.timers.arm(self, when)

    def advance(self, now: float) -> float:
        """Handshake timeout, pings, silence.  Protocol 03, sections 8 and 13."""
        if self.state in (State.PENDING, State.HANDSHAKE):
            due = self.requested_at + self.establishment_timeout
            if now < due:
                return due
            self.apply(Cause.ESTABLISHMENT_TIMEOUT, now)
        elif self.state is State.ACTIVE:
            self._ping_if_due(now)
            if now >= self._last_sign_of_life() + self.stale_time:
                self._stale_at = now
                self.apply(Cause.SILENCE, now)
            return self._next_check()
        elif self.state is State.STALE:
            if now < self._next_check():
                return self._next_check()
            self.apply(Cause.GRACE_OVER, now)
        return inf

    def _last_sign_of_life(self) -> float:
        return max(self.last_inbound, self.last_proof, self.activated_at or 0.0)

    def _ping_due(self) -> float:
        """When the initiator pings next, if nothing happens."""
        quiet_since = min(self._last_sign_of_life(), max(self.last_outbound, self.activated_at or 0.0))
        return max(quiet_since + self.keepalive, self.last_keepalive + self.keepalive)

    def _ping_if_due(self, now: float) -> None:
        if self.initiator and now >= self._ping_due():
            self.last_keepalive = now
            self._send_plain(CTX_KEEPALIVE, PING, now)

    def _next_check(self) -> float:
        if self.state is State.STALE:
            return self._stale_at + GRACE_RTT_FACTOR * self.rtt + STALE_GRACE
        silence = self._last_sign_of_life() + self.stale_time
        return min(silence, self._ping_due()) if self.initiator else silence

    def heard(self, now: float, *, data: bool) -> None:
        """An authentic packet has arrived."""
        self.last_inbound = now
        if data:
            self.last_data = now
        if self.state is State.STALE:
            self.apply(Cause.HEARD, now)
            self.arm(self._next_check())
        elif self.state is State.HANDSHAKE:
            # The RTT packet was lost: whoever has the key is there all the same (protocol 03, section 7). Who speaks
            # only after a while does not measure the round trip; what a handshake may take on this path bounds it.
            self._activate(min(now - self.requested_at, PER_HOP_TIMEOUT * max(1, self.hops)), now)

    # ------------------------------------------------------------------ handshake

    def answer(self, peer_x25519: bytes, peer_ed25519: bytes, now: float) -> bool:
        """Responder: agree on keys. False if the request's keys cannot be used."""
        return self._agree(peer_x25519, VerifyKey(peer_ed25519))

    def _agree(self, peer_x25519: bytes, peer_key: VerifyKey) -> bool:
        """Derive the session key.  Protocol 03, section 6."""
        assert self._exchange is not None
        shared = self._exchange.exchange(peer_x25519)
        if shared is None:
            return False
        self._key = TokenKey(hkdf(64, shared, self.link_id), self.engine.entropy)
        self._peer_key = peer_key
        self._exchange = None
        return True

    def receive_proof(self, port: Port, proof: LinkProof, hops: int, now: float) -> Drop | None:
        """Initiator: the responder's proof. Checked whole before anything changes; a bad one changes nothing.

        `hops` is the incremented count. One that differs from the path's is taken, as the signature is right.
        """
        identity = self.destination.identity
        if self.state is not State.PENDING or identity is None:
            return Drop.LINK_UNEXPECTED
        if proof.mode != self.mode:
            return Drop.LINK_MODE
        key = identity.verifying
        if not key.verify(
            proof.signature, link_proof_signed_data(self.link_id, proof.x25519, key.public, proof.signalling)
        ):
            return Drop.LINK_SIGNATURE
        if not self._agree(proof.x25519, key):
            return Drop.LINK_KEYS
        self.port, self.hops = port, hops
        self.set_mtu(proof.mtu or MTU)
        self.remote_identity = identity
        self.rtt = max(now - self.requested_at, 0.0)
        self.last_inbound = self.last_data = now
        self.apply(Cause.PROOF_VALID, now)
        return None

    def set_mtu(self, mtu: int) -> None:
        """The MTU both ends agreed on, as far as this end's interface carries it."""
        self.mtu = max(MTU, min(mtu, self.port.hw_mtu))
        self.mdu = link_mdu(self.mtu)

    def _activate(self, rtt: float, now: float) -> None:
        self.rtt = max(rtt, 0.0)
        self.apply(Cause.ROUND_TRIP_KNOWN, now)

    def take_rtt(self, rtt: float | None, now: float) -> None:
        """Responder: what the initiator has measured, in seconds; None if it was no duration."""
        self.last_inbound = self.last_data = now
        self.rtt_told = True
        if self.state is State.HANDSHAKE:
            self._activate(max(now - self.requested_at, rtt or 0.0), now)
        elif rtt is not None and rtt > self.rtt:  # late, after another packet had activated the link
            self.rtt = rtt
            self._keep_alive_by_rtt()

    # ------------------------------------------------------------------ receiving

    def receive(self, packets: list[bytes], now: float) -> None:
        """Take one batch of packets of this link, all from its interface. Order is kept within each kind."""
        if self.state is State.CLOSED:  # by something earlier in the batch
            self.port.drops[Drop.NO_SUCH_LINK] += len(packets)
            return
        messages: list[bytes] = []
        plain: list[bytes] = []
        proofs: list[bytes] = []
        self.rx_packets += len(packets)
        for raw in packets:
            context = raw[18]
            kind = raw[0] & 3
            self.rx_bytes += len(raw) - 19
            if kind == DATA and context == CTX_CHANNEL:
                messages.append(raw)
            elif kind == DATA and context == CTX_NONE:
                plain.append(raw)
            elif kind == PROOF and context != CTX_LRPROOF and context != CTX_RESOURCE_PRF:
                proofs.append(raw)
            else:
                if messages:
                    self._receive_messages(messages, now)
                    messages = []
                if plain:
                    receive_data(self, plain, now)
                    plain = []
                if proofs:
                    self._receive_proofs(proofs)
                    proofs = []
                self.engine.settle_now(now)  # what came before a close still counts
                self._receive_other(raw, context, now)
            if self._key is None:
                return  # closed in the middle of the batch
        if messages:
            self._receive_messages(messages, now)
        if plain:
            receive_data(self, plain, now)
        if proofs:
            self._receive_proofs(proofs)

    def _receive_messages(self, packets: list[bytes], now: float) -> None:
        if self.channel is not None:
            self.channel.receive(packets, now)
            return
        # Only what opens is kept: whoever fills the room with anything else keeps the peer's first messages out.
        opened = self.key.open_many([raw[19:] for raw in packets])
        early = [raw for raw, plain in zip(packets, opened, strict=True) if plain is not None]
        if len(early) < len(packets):
            self.port.drops[Drop.CHANNEL_TOKEN] += len(packets) - len(early)
        if not early:
            return
        self.heard(now, data=True)
        room = max(0, EARLY_PACKETS - len(self._early))
        self._early += early[:room]
        if len(early) > room:
            self.port.drops[Drop.CHANNEL_NOT_OPEN] += len(early) - room

    def _settlement(self) -> Settlement:
        """This link's part of the signatures of the batch."""
        settlement = self._pending
        if settlement is None:
            assert self._signing is not None and self._peer_key is not None
            settlement = self._pending = Settlement(self, self._signing, self._peer_key)
            self.engine.settlements.append(settlement)
        return settlement

    def _receive_proofs(self, packets: list[bytes]) -> None:
        """Proofs of packets on this link: find what waits for them; `settle` has the outcome."""
        outstanding, drops = self.outstanding, self.port.drops
        settlement = self._settlement()
        found, pairs = settlement.found, settlement.pairs
        for raw in packets:
            if len(raw) < 115:
                drops[Drop.PROOF_SIZE] += 1
                continue
            packet_hash = raw[19:51]
            waiting = outstanding.get(packet_hash)
            if waiting is None:
                drops[Drop.PROOF_UNEXPECTED] += 1
                continue
            found.append(waiting)
            pairs.append((raw[51:115], packet_hash))

    def begin_settling(self) -> None:
        """The signatures noted so far are being computed."""
        if self._pending is not None:
            self._unsettled.append(self._pending)
            self._pending = None

    def _prove_unsettled(self) -> None:
        """The application has its data and closes before the proofs are made: they go out before the close all the
        same, so that the peer knows that its last messages arrived.
        """
        if self.is_open:
            waiting = [*self._unsettled, *([] if self._pending is None else [self._pending])]
            for settlement in waiting:
                signatures = settlement.signing.sign_many(settlement.hashes)
                self._send_proofs(settlement.hashes, signatures)
            if self.channel is not None:
                self.channel.prove_repeated(inf)

    def _send_proofs(self, hashes: list[bytes], signatures: list[bytes]) -> None:
        link_id, made = self.link_id, zip(hashes, signatures, strict=True)
        self.port.send_many([link_proof_packet(link_id, packet_hash, signature) for packet_hash, signature in made])

    def settle(self, settlement: Settlement, now: float) -> None:
        """Send the proofs made; take the proofs verified, each of which frees what waited for it.  03, section 12."""
        if settlement in self._unsettled:
            self._unsettled.remove(settlement)
        if self.state is State.CLOSED:
            return
        if settlement.signatures:
            self._send_proofs(settlement.hashes, settlement.signatures)
            self.last_data = self.last_outbound = now
        envelopes: list[Envelope] = []
        for waiting, (_, proved), valid in zip(settlement.found, settlement.pairs, settlement.valid, strict=True):
            if not valid:
                self.port.drops[Drop.PROOF_SIGNATURE] += 1
                continue
            self.last_proof = now
            if isinstance(waiting, Envelope):
                waiting.proved = proved
                envelopes.append(waiting)
            else:
                waiting.conclude(Status.DELIVERED, now)
        if self.state is State.STALE and any(settlement.valid):
            self.apply(Cause.HEARD, now)
            self.arm(self._next_check())
        if self.channel is not None:
            if envelopes:
                self.channel.proved(envelopes, now)
            self.channel.pump(now)

    def _receive_other(self, raw: bytes, context: int, now: float) -> None:
        """Everything that is not a channel packet, a packet for the application or a packet proof."""
        if raw[0] & 3 != DATA:
            self.port.drops[Drop.LINK_UNEXPECTED] += 1  # a repeated link proof, or one of a resource
            return
        if context == CTX_KEEPALIVE:
            self._receive_keepalive(raw, now)
            return
        handler = HANDLERS.get(context)
        if handler is None:
            self.port.drops[Drop.LINK_CONTEXT] += 1
            return
        if not self.engine.seen.add(full(bytes((raw[0] & 0x0F,)) + raw[2:])):
            self.port.drops[Drop.FILTERED] += 1
            return
        plain = self.key.open(raw[19:])
        if plain is None:
            self.port.drops[Drop.LINK_TOKEN] += 1
            return
        handler(self, raw, plain, now)

    def _receive_keepalive(self, raw: bytes, now: float) -> None:
        """The responder answers every ping; the initiator takes a pong as a sign of life.  Protocol 03, 13.2."""
        if raw[19:] != (PONG if self.initiator else PING):
            self.port.drops[Drop.LINK_UNEXPECTED] += 1
            return
        self.last_inbound = now
        if self.state is State.STALE:
            self.apply(Cause.HEARD, now)
            self.arm(self._next_check())
        if not self.initiator:
            self._send_plain(CTX_KEEPALIVE, PONG, now)

    # ------------------------------------------------------------------ sending

    def open_channel(self, now: float, opened: Callable[[Channel], None] | None = None) -> Channel:
        """The link's channel, the same object every time; what came before it was opened is processed now.

        `opened` is called with a new channel before that. RuntimeError while the handshake is under way: sizes and
        round trip time are not known yet.
        """
        if self.channel is None:
            if self.state in (State.PENDING, State.HANDSHAKE):
                raise RuntimeError(f"link {self.link_id.hex()} is {self.state.name}: wait until it is established")
            self.channel = Channel(self)
            if opened is not None:
                opened(self.channel)
            if self.state is State.CLOSED:
                self.channel.close()
            elif self._early:
                early, self._early = self._early, []
                self.channel.receive(early, now)
                self.engine.settle_now(now)
        return self.channel

    def prove(self, hashes: list[bytes]) -> None:
        """Have packets received proved, with the others of the batch.  Protocol 03, section 12."""
        if self._signing is not None:
            self._settlement().hashes.extend(hashes)

    def prove_now(self, hashes: list[bytes]) -> None:
        """Prove packets that came earlier, outside of a batch."""
        if self._signing is not None and self.is_open:
            self._send_proofs(hashes, self._signing.sign_many(hashes))

    def send_data(self, plain: bytes, now: float) -> Receipt | None:
        """One packet for the application, and its receipt. None if it could not be sent. Size is the caller's."""
        if self.state not in (State.ACTIVE, State.STALE):
            return None
        raw = make_raw(_DATA_FLAGS, self.link_id, CTX_NONE, self.key.seal(plain))
        packet_hash = full(bytes((_DATA_FLAGS,)) + raw[2:])
        receipts = self._receipts
        if len(receipts) >= RECEIPT_LIMIT:
            next(iter(receipts.values())).conclude(Status.CULLED, now)
        receipt = Receipt(
            self.engine, (self.outstanding, receipts), packet_hash, self._peer_key, now, self.packet_timeout
        )
        self.outstanding[packet_hash] = receipts[packet_hash] = receipt  # before it is sent: a proof may be fast
        if not self.port.send(raw):
            del self.outstanding[packet_hash], receipts[packet_hash]
            return None
        self.engine.timers.arm(receipt, now + receipt.timeout)
        self._sent(raw, now)
        return receipt

    def send_data_many(self, plains: Sequence[bytes], now: float) -> int:
        """Packets for the application, sealed together, in order, without receipts. Sizes are the caller's.

        Returns how many were queued: all of them, or 0 if the link is not active or its interface is down.
        """
        if not plains or self.state not in (State.ACTIVE, State.STALE):
            return 0
        link_id = self.link_id
        raws = [make_raw(_DATA_FLAGS, link_id, CTX_NONE, token) for token in self.key.seal_many(plains)]
        if not self.port.send_many(raws):
            return 0
        self._count_sent(raws, now)
        return len(raws)

    def identify(self, identity: Identity, now: float) -> bool:
        """Reveal who we are: initiators of active links only. False if nothing was sent."""
        if not self.initiator or self.state is not State.ACTIVE:
            return False
        signature = identity.sign(identify_signed_data(self.link_id, identity.public_key))
        return self.send_sealed(CTX_LINKIDENTIFY, build_identify(identity.public_key, signature), now)

    def send_sealed(self, context: int, plain: bytes, now: float) -> bool:
        """One sealed packet without receipt. False if it could not be sent."""
        self.last_data = now
        return self.send_raw(self.seal(context, plain), now)

    def seal(self, context: int, plain: bytes) -> bytes:
        """A packet of this link, to be sent with `send_raw`."""
        return make_raw(_DATA_FLAGS, self.link_id, context, self.key.seal(plain))

    def send_raw(self, raw: bytes, now: float) -> bool:
        """Queue a packet of this link. False if it could not be sent."""
        if not self.port.send(raw):
            return False
        self._sent(raw, now)
        return True

    def _send_plain(self, context: int, data: bytes, now: float) -> None:
        raw = make_raw(_DATA_FLAGS, self.link_id, context, data)
        if self.port.send(raw):
            self._sent(raw, now)

    def _sent(self, raw: bytes, now: float) -> None:
        self.last_outbound = now
        self.tx_packets += 1
        self.tx_bytes += len(raw) - 19

    def count_sent(self, frames: list[bytes], now: float) -> None:
        """Queue the channel's packets and account for them."""
        self.port.send_many(frames)
        self._count_sent(frames, now)

    def _count_sent(self, frames: list[bytes], now: float) -> None:
        self.last_outbound = now
        self.tx_packets += len(frames)
        self.tx_bytes += sum(map(len, frames)) - 19 * len(frames)

    def __repr__(self) -> str:
        return f"<{self.link_id.hex()}>"
