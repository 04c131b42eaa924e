"""A reliable, ordered channel on a link, both directions.  Protocol 05.

Where things happen: `receive` takes a batch of channel packets, proves and delivers it; `proved` takes a batch of
proofs and opens the window; `pump` fills the window from waiting messages and streams; `advance` retransmits, and
proves what was repeated.
"""

from __future__ import annotations

from collections import deque
from hashlib import sha256
from math import inf
from typing import TYPE_CHECKING, Any, Final

from rnsfast.crypto.hashes import PIECE, update_long
from rnsfast.engine.roundtrip import RoundTrip
from rnsfast.engine.streams import ReceiveStream, SendStream
from rnsfast.engine.window import BACKOFF, TRIES, Window, timeout
from rnsfast.wire.channel import ACCEPTANCE_SPAN, ENVELOPE_SIZE, channel_mdu, pack_envelope, pack_header
from rnsfast.wire.drop import Drop
from rnsfast.wire.packet import CTX_CHANNEL
from rnsfast.wire.stream import STREAM_HEADER_SIZE, STREAM_TYPE, parse_stream

if TYPE_CHECKING:
    from rnsfast.engine.link import Link

PATIENCE: Final = 1.0  # seconds, floor of a counted timeout: five tries last at least 5 s (protocol 05, 5.3)
FAST_AFTER: Final = 3  # later messages proved before one is taken for lost; local
FAST_TRIES: Final = 3  # fast retransmissions within one counted try, each waiting twice as long as the one before
BEYOND: Final = 2 * ACCEPTANCE_SPAN  # messages this far ahead are dropped; closer ones wait, unproved, for the gap
BACKLOG: Final = 64 * 1024 * 1024  # bytes delivered and not consumed; beyond, packets are dropped unproved
UNOPENED: Final = 1024 * 1024  # bytes kept for stream ids nobody reads yet; beyond, the stream is cut off
UNOPENED_STREAMS: Final = 64  # stream ids nobody reads yet; beyond, data is dropped and counted
REPEAT_WAIT: Final = 0.01  # seconds until a repeated message is proved; local, see `_prove_later`
REFILL: Final = 6  # streams refill the window when a part of it this small is free
MESSAGE_COST: Final = 64  # bytes each waiting message counts for beside its payload

_STREAM_LOW: Final = STREAM_TYPE & 0xFF
_STREAM_HIGH: Final = STREAM_TYPE >> 8


class Envelope:
    """One message in the ring: transmitted, not proved."""

    __slots__ = (
        "fast", "first_at", "hashes", "order", "plain", "proved", "sent_at", "sequence", "source", "timeout", "tries",
    )  # fmt: skip

    def __init__(self, sequence: int, plain: bytes, source: Ticket | SendStream) -> None:
        self.sequence = sequence
        self.plain = plain  # the same bytes in every transmission, sealed anew each time
        self.source = source  # what is told of the proof
        self.tries = 1
        self.fast = 0  # fast retransmissions of this try
        self.hashes: list[bytes] = []  # of all copies: a proof of any of them counts
        self.proved = b""  # the hash of the copy whose proof came
        self.order = 0  # transmissions are numbered along the channel
        self.first_at = 0.0  # the first copy was sent
        self.sent_at = 0.0  # the last one
        self.timeout = 0.0  # seconds after sent_at


class Ticket:
    """A message on its way: waiting for room, then sent, then delivered.

    One with `deferred` set is not sent when its turn comes: it is granted its room, and sent when `Channel.claim` says
    so. Whoever can still change his mind between being woken and going on needs that.
    """

    __slots__ = ("deferred", "delivered", "granted", "msgtype", "owner", "payload", "sent")

    def __init__(self, msgtype: int, payload: bytes) -> None:
        self.msgtype, self.payload = msgtype, payload
        self.sent = False
        self.delivered = False
        self.deferred = self.granted = False
        self.owner: Any = None  # whoever waits for it, for the runtime


class Channel:
    """Both directions of a link's channel. Driven by its link, always under the node's lock."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.window = Window(link.rtt)
        self.ring: dict[int, Envelope] = {}  # by sequence, oldest first; at most 48
        self.outbox: deque[Ticket] = deque()  # messages whose senders wait for room; each has a waiter, so bounded
        self.granted = 0  # deferred messages whose room is kept for them
        self.next_tx = 0
        self.next_rx = 0
        self.held: dict[int, bytes] = {}  # early messages by sequence; at most 48
        self.beyond: dict[int, tuple[bytes, bytes]] = {}  # too early to be accepted, with their hashes; at most 47
        self.reach = BEYOND
        self.repeated: deque[tuple[float, bytes]] = deque()  # hashes to prove, and when; at most BEYOND
        self.readers: dict[int, ReceiveStream] = {}
        self.backlog = 0  # bytes handed up and not consumed
        self.backlog_limit = BACKLOG
        self.closed = False
        self.mdu = channel_mdu(link.mdu)
        self.stream_mdu = self.mdu - STREAM_HEADER_SIZE
        self.retransmissions = 0
        self.owner: Any = None  # the facade, for the runtime
        self.armed = inf
        self._streams: deque[SendStream] = deque()  # those with something to send, served in turn
        self._unopened: dict[int, ReceiveStream] = {}
        self._unopened_bytes = 0
        self._order = 0  # number of the last transmission
        self._proved_order = 0  # highest one proved
        self._round_trip = RoundTrip(link.rtt)
        self._timed_for = 0  # every timeout in the ring was computed for at least this length
        self._rtt = link.rtt  # the timeouts were computed with this
        self._head = b"\x0c\x00" + link.link_id + bytes((CTX_CHANNEL,))
        self._hash_base = sha256(b"\x0c" + link.link_id + bytes((CTX_CHANNEL,)))

    # ------------------------------------------------------------------ sending

    @property
    def room(self) -> int:
        """Messages that can be sent now: the window and the range rule.  Protocol 05, sections 4 and 4.1."""
        ring = self.ring
        room = self.window.size - len(ring)
        if room > 0 and ring:
            ahead = (self.next_tx - next(iter(ring))) & 0xFFFF
            room = min(room, ACCEPTANCE_SPAN + 1 - ahead)
        return max(room - self.granted, 0)

    @property
    def is_ready(self) -> bool:
        """Whether `send` would transmit at once."""
        return not self.closed and not self.outbox and self.link.is_sendable and self.room > 0

    @property
    def is_idle(self) -> bool:
        """Nothing waits and everything sent has been proved."""
        return not (self.ring or self.outbox or self.granted or self._streams)

    def send(self, ticket: Ticket, now: float) -> bool:
        """Transmit the message if there is room, else keep it waiting in order of arrival. True if it is sent.

        ValueError if it cannot be expressed: one such message in the queue would take the others with it.
        """
        return self.send_many([ticket], now)

    def send_many(self, tickets: list[Ticket], now: float) -> bool:
        """As `send`, for messages in a row. True if all are sent."""
        for ticket in tickets:
            if not 0 <= ticket.msgtype <= 0xFFFF or len(ticket.payload) > self.mdu:
                size = len(ticket.payload)
                raise ValueError(f"message of type {ticket.msgtype:#x}, {size} bytes; the limit is {self.mdu}")
        self.outbox.extend(tickets)
        self.pump(now)
        return tickets[-1].sent

    def cancel(self, ticket: Ticket) -> bool:
        """Take a waiting message back. False if it has been sent."""
        if ticket.sent:
            return False
        self.link.engine.touched.add(self)  # it may be idle now, or ready for others
        if ticket.granted:
            self._take_grant(ticket)
        elif ticket in self.outbox:
            self.outbox.remove(ticket)
        return True

    def claim(self, ticket: Ticket, now: float) -> bool:
        """Send a granted message. False if the room is gone meanwhile: then it waits again, before all others."""
        if not ticket.granted:
            return ticket.sent
        self._take_grant(ticket)
        self.outbox.appendleft(ticket)
        ticket.deferred = False
        self.pump(now)
        ticket.deferred = not ticket.sent
        return ticket.sent

    def _take_grant(self, ticket: Ticket) -> None:
        ticket.granted = False
        if not self.closed:
            self.granted -= 1

    def abandon(self, stream: SendStream) -> None:
        """Give a stream up: what waits for the window is thrown away, and no end of file follows."""
        if stream in self._streams:
            self._streams.remove(stream)
        stream.clear()
        self.link.engine.touched.update((stream, self))

    def feed(self, stream: SendStream, now: float) -> None:
        """`stream` has got something to send."""
        if stream.has_work and stream not in self._streams:
            self._streams.append(stream)
        self.pump(now)

    def pump(self, now: float) -> None:
        """Fill the window: messages first, then the streams in turn.  The one place where sequences are given out."""
        streams, outbox, link = self._streams, self.outbox, self.link
        if not (outbox or streams) or self.closed or not link.is_sendable:
            return
        room = self.room
        congested = link.port.congested  # messages pass all the same, streams wait in their buffers
        if not room or (congested and not outbox):
            return
        if room < self.window.size // REFILL and not outbox and len(self.ring) >= room:
            return  # more proofs are on their way; a fuller batch costs both ends less, and the pipe is not empty
        touched = link.engine.touched
        batch: list[Envelope] = []
        sequence, stream_mdu = self.next_tx, self.stream_mdu
        while room:
            if outbox:
                ticket = outbox.popleft()
                touched.add(ticket)
                if ticket.deferred:
                    ticket.granted = True
                    self.granted += 1
                    room -= 1
                    continue
                ticket.sent = True
                batch.append(Envelope(sequence, pack_envelope(ticket.msgtype, sequence, ticket.payload), ticket))
                ticket.payload = b""
            elif streams and not congested:
                stream = streams[0]
                header, body = stream.take(stream_mdu)
                plain = b"".join((pack_header(STREAM_TYPE, sequence, len(body) + STREAM_HEADER_SIZE), header, body))
                batch.append(Envelope(sequence, plain, stream))
                stream.unproved += 1
                if not stream.has_work:
                    streams.popleft()
                    touched.add(stream)
                elif len(streams) > 1:
                    streams.rotate(-1)
                if stream.buffered <= stream.low:
                    touched.add(stream)
            else:
                break
            sequence = (sequence + 1) & 0xFFFF
            room -= 1
        if not batch:
            return
        self.next_tx = sequence
        ring = self.ring
        for envelope in batch:
            ring[envelope.sequence] = envelope
        self._transmit(batch, now)

    def _transmit(self, batch: list[Envelope], now: float) -> None:
        """Seal, remember the hashes, then queue: a proof can never come before its envelope is known."""
        link = self.link
        outstanding = link.outstanding
        head, hashed = self._head, self._hash
        order = self._order
        frames: list[bytes] = []
        for envelope, token in zip(batch, link.key.seal_many([e.plain for e in batch]), strict=True):
            packet_hash = hashed(token)
            if not envelope.hashes:
                envelope.first_at = now
            envelope.hashes.append(packet_hash)
            outstanding[packet_hash] = envelope
            order += 1
            envelope.order = order
            envelope.sent_at = now
            frames.append(head + token)
        self._order = order
        self._raise_timeouts(batch)
        link.count_sent(frames, now)
        self._arm(now)

    def _raise_timeouts(self, batch: list[Envelope]) -> None:
        """Timeouts follow the length of the ring upwards, never down.  Protocol 05, section 4.

        Only a ring that has grown, or another round trip time, can raise those of envelopes that were there before.
        """
        ring, rtt = self.ring, self.link.rtt
        length = len(ring)
        for envelope in ring.values() if length > self._timed_for or rtt != self._rtt else batch:
            envelope.timeout = max(envelope.timeout, timeout(envelope.tries, rtt, length))
        self._timed_for, self._rtt = length, rtt

    def _arm(self, now: float) -> None:
        """Have `advance` called for the oldest transmission at the latest."""
        when = now + PATIENCE
        if when < self.armed:
            self.link.engine.timers.arm(self, when)

    # ------------------------------------------------------------------ proofs and time

    def proved(self, envelopes: list[Envelope], now: float) -> None:
        """Valid proofs of these have arrived: the window opens.  Protocol 05, section 5.1."""
        ring, window, rtt, outstanding = self.ring, self.window, self.link.rtt, self.link.outstanding
        touched = self.link.engine.touched
        highest = self._proved_order
        for envelope in envelopes:
            if ring.pop(envelope.sequence, None) is None:
                continue
            for packet_hash in envelope.hashes:
                outstanding.pop(packet_hash, None)
            if envelope.order > highest and envelope.proved in (envelope.hashes[-1], b""):
                highest = envelope.order
            window.delivered(rtt)
            source = envelope.source
            if isinstance(source, SendStream):
                source.unproved -= 1
                if not source.unproved:
                    touched.add(source)
            else:
                source.delivered = True
                touched.add(source)
        self._proved_order = highest
        touched.add(self)
        first = envelopes[0]
        if first.proved == first.hashes[0]:
            self._round_trip.measured(now - first.first_at)
        elif first.proved == first.hashes[-1]:
            self._round_trip.measured(now - first.sent_at)
        if ring:
            oldest = next(iter(ring.values()))
            if oldest.fast or oldest.order + FAST_AFTER <= highest:
                self._repair(now)

    def _repair(self, now: float) -> float:
        """Repeat what later proofs show to be lost, uncounted. Returns when to look again."""
        wait = max(self.link.rtt, self._round_trip.patience)
        again = inf
        lost: list[Envelope] = []
        for envelope in self.ring.values():
            fast = envelope.fast
            if fast >= FAST_TRIES or (not fast and envelope.order + FAST_AFTER > self._proved_order):
                continue
            due = envelope.sent_at + wait * (1 << fast)
            if now >= due:
                lost.append(envelope)
            else:
                again = min(again, due)
        if lost and self.link.is_sendable:
            self.retransmissions += len(lost)
            self._transmit(lost, now)
            for envelope in lost:
                envelope.fast += 1
                if envelope.fast < FAST_TRIES:
                    again = min(again, now + wait * (1 << envelope.fast))
        if again < self.armed:
            self.link.engine.timers.arm(self, again)
        return again

    def expire(self, envelope: Envelope, now: float) -> bool:
        """A counted timeout of `envelope`. False if that was its last try.  Protocol 05, section 5.4."""
        if envelope.sequence not in self.ring:
            return True
        if envelope.tries >= TRIES:
            return False
        envelope.tries += 1
        envelope.timeout = 0.0
        envelope.fast = 0
        self.window.timed_out()
        self.retransmissions += 1
        self._transmit([envelope], now)
        return True

    def advance(self, now: float) -> float:
        """Retransmit what has waited too long; tear the link down after the last try. Returns the next deadline."""
        if self.closed:
            return inf
        again = min(self._repair(now), self.prove_repeated(now))
        for envelope in list(self.ring.values()):
            due = self._due(envelope)
            if now >= due:
                if not self.link.is_sendable:
                    due = now + PATIENCE  # nothing can be sent: the try is not used up, the link's own timers decide
                elif not self.expire(envelope, now):
                    self.link.close(now, f"message {envelope.sequence} was not proved in {TRIES} tries")
                    return inf
                else:
                    due = self._due(envelope)
            again = min(again, due)
        return again

    def _due(self, envelope: Envelope) -> float:
        """When the current try counts as failed: never before proofs have had the time that they take at present."""
        patience = self._round_trip.patience * BACKOFF ** (envelope.tries - 1)
        return float(envelope.sent_at + max(PATIENCE, envelope.timeout, patience))

    def close(self) -> None:
        """The link is closed or the channel given up: nothing waits any more, streams are cut off."""
        if self.closed:
            return
        self.closed = True
        self.link.engine.timers.disarm(self)
        touched = self.link.engine.touched
        touched.add(self)
        touched.update(self.outbox)
        for stream in self._streams:
            stream.broken = self.link.closing
            touched.add(stream)
        for envelope in self.ring.values():
            if isinstance(envelope.source, SendStream):
                envelope.source.broken = self.link.closing
            touched.add(envelope.source)
            for packet_hash in envelope.hashes:
                self.link.outstanding.pop(packet_hash, None)
        self.ring.clear()
        self.outbox.clear()
        self.granted = 0
        self._streams.clear()
        self.held.clear()
        self.beyond.clear()
        self.repeated.clear()
        reason = self.link.closing
        for reader in (*self.readers.values(), *self._unopened.values()):
            if not reader.eof and reader.broken is None:
                reader.broken = reason
            touched.add(reader)

    # ------------------------------------------------------------------ receiving

    def receive(self, packets: list[bytes], now: float) -> None:
        """Take one batch of channel packets: authenticate all, decide on each, prove, deliver.  Protocol 05, 3.6."""
        link = self.link
        drops = link.port.drops
        if self.backlog > self.backlog_limit:  # unproved: the peer repeats them, and the reader may have caught up
            drops[Drop.CHANNEL_BACKLOG] += len(packets)
            return
        expected, held = self.next_rx, self.held
        hashed = self._hash
        hashes: list[bytes] = []
        repeated: list[bytes] = []
        ready: list[bytes] = []
        tokens = [raw[19:] for raw in packets]
        authentic = False
        for token, plain in zip(tokens, link.key.open_many(tokens), strict=True):
            if plain is None:
                drops[Drop.CHANNEL_TOKEN] += 1
                continue
            authentic = True
            if len(plain) < ENVELOPE_SIZE:
                drops[Drop.ENVELOPE_SIZE] += 1
                continue
            ahead = ((plain[2] << 8 | plain[3]) - expected) & 0xFFFF
            if ahead == 0:
                ready.append(plain)
                expected = (expected + 1) & 0xFFFF
                if held:
                    expected = self._close_gap(expected, ready)
            elif ahead <= ACCEPTANCE_SPAN:
                if held.setdefault((expected + ahead) & 0xFFFF, plain) is not plain:
                    repeated.append(token)
                    continue
            elif ahead < 0x8000:
                drops[Drop.CHANNEL_TOO_FAR] += 1
                if ahead < self.reach:
                    self.beyond[(expected + ahead) & 0xFFFF] = plain, hashed(token)
                continue
            else:
                repeated.append(token)
                continue
            hashes.append(hashed(token))
        if self.beyond and expected != self.next_rx:
            expected = self._admit(expected, ready, hashes)
        self.next_rx = expected
        if authentic:
            link.heard(now, data=True)
        if ready:
            self._deliver(ready)
        if hashes:
            link.prove(hashes)
        if repeated:
            drops[Drop.CHANNEL_DUPLICATE] += len(repeated)
            self._prove_later(list(map(hashed, repeated)), now)

    def _prove_later(self, hashes: list[bytes], now: float) -> None:
        """Prove repeated messages, but not at once: the peer may have missed the first proof because it was too fast.

        A reference node begins to wait for a proof only after it has sent (protocol 03, T2), and every repeat would
        meet the same fate until it gives the link up.
        """
        self.repeated += [(now + REPEAT_WAIT, each) for each in hashes]
        while len(self.repeated) > BEYOND:
            self.repeated.popleft()  # somebody floods; the peer repeats what it needs
        self.link.engine.timers.arm(self, self.repeated[0][0])

    def prove_repeated(self, now: float) -> float:
        """Send the proofs that are due; returns when the next ones are."""
        repeated = self.repeated
        due: list[bytes] = []
        while repeated and repeated[0][0] <= now:
            due.append(repeated.popleft()[1])
        if due:
            self.link.prove_now(due)
        return repeated[0][0] if repeated else inf

    def _hash(self, token: bytes) -> bytes:
        """The packet hash of a channel packet of this link, sent or received."""
        digest = self._hash_base.copy()
        if len(token) <= PIECE:
            digest.update(token)
        else:
            update_long(digest, token)
        return digest.digest()

    def _close_gap(self, expected: int, ready: list[bytes]) -> int:
        """Take what was held for the sequences from `expected` on. Returns the sequence expected next."""
        while (early := self.held.pop(expected, None)) is not None:
            ready.append(early)
            expected = (expected + 1) & 0xFFFF
        return expected

    def _admit(self, expected: int, ready: list[bytes], hashes: list[bytes]) -> int:
        """Accept what was too far ahead and is no longer. Returns the sequence expected next."""
        beyond, held = self.beyond, self.held
        for sequence in sorted(beyond, key=lambda s: (s - expected + 0x8000) & 0xFFFF):
            ahead = (sequence - expected) & 0xFFFF
            if ACCEPTANCE_SPAN < ahead < 0x8000:
                break  # the others are further ahead
            plain, packet_hash = beyond.pop(sequence)
            hashes.append(packet_hash)
            if ahead == 0:
                ready.append(plain)
                expected = (expected + 1) & 0xFFFF
                if held:
                    expected = self._close_gap(expected, ready)
            elif ahead <= ACCEPTANCE_SPAN:
                held.setdefault(sequence, plain)
        return expected

    def _deliver(self, plains: list[bytes]) -> None:
        """Hand over messages that are in order: chunks to their streams, the rest to the application in one batch."""
        engine = self.link.engine
        messages: list[tuple[int, bytes]] = []
        for plain in plains:
            if plain[0] == _STREAM_HIGH and plain[1] == _STREAM_LOW:
                self._deliver_chunk(plain)
            else:
                payload = plain[ENVELOPE_SIZE:]
                self.backlog += len(payload) + MESSAGE_COST
                messages.append((plain[0] << 8 | plain[1], payload))
        if messages:
            engine.messages_arrived(self, messages)

    def _deliver_chunk(self, plain: bytes) -> None:
        """One stream message, in order.  Protocol 05, sections 2.3 and 9."""
        link = self.link
        if len(plain) >= 8 and not plain[6] & 0x40:  # the common case without its value object: not compressed
            stream_id = (plain[6] << 8 | plain[7]) & 0x3FFF
            eof, data, problem = plain[6] >= 0x80, plain[8:], None
        else:
            chunk = parse_stream(plain[ENVELOPE_SIZE:])
            if not isinstance(chunk, Drop):
                stream_id, eof, data, problem = chunk.stream_id, chunk.eof, chunk.data, None
            elif len(plain) < 8:
                link.port.drops[chunk] += 1
                return
            else:
                stream_id, eof, data = (plain[6] << 8 | plain[7]) & 0x3FFF, False, b""
                problem = "a chunk of it could not be decompressed"
                link.port.drops[chunk] += 1
        stream = self.readers.get(stream_id) or self._unopened.get(stream_id)
        if stream is None:
            if len(self._unopened) >= UNOPENED_STREAMS:
                link.port.drops[Drop.STREAM_NO_READER] += 1
                return
            stream = self._unopened[stream_id] = ReceiveStream(stream_id)
        if stream_id in self._unopened:
            self._unopened_bytes += len(data)
            if self._unopened_bytes > UNOPENED and problem is None:
                self._unopened_bytes -= len(data)
                link.port.drops[Drop.STREAM_NO_READER] += 1
                data, problem = b"", f"more than {UNOPENED} bytes came before anybody read it"
        if stream.broken is not None:
            return
        if problem is not None:
            stream.broken = problem
        stream.put(data)
        self.backlog += len(data)
        if eof:
            stream.eof = True
        link.engine.touched.add(stream)

    def open_reader(self, stream_id: int) -> ReceiveStream:
        """The receiving half of `stream_id`, with what has arrived for it already. ValueError if it is open."""
        if stream_id in self.readers:
            raise ValueError(f"stream {stream_id} has a reader already; two would take each other's data")
        stream = self._unopened.pop(stream_id, None)
        if stream is None:
            stream = ReceiveStream(stream_id)
            if self.closed:
                stream.broken = self.link.closing
        else:
            self._unopened_bytes -= stream.buffered
        self.readers[stream_id] = stream
        return stream

    def close_reader(self, stream: ReceiveStream) -> None:
        """Nobody reads `stream` any more; what it holds is given up."""
        if self.readers.get(stream.stream_id) is stream:
            del self.readers[stream.stream_id]
        self.backlog -= stream.buffered
        stream.take()

    def consumed(self, size: int) -> None:
        """The application has taken `size` bytes of what was handed up."""
        self.backlog -= size

    def messages_consumed(self, messages: list[tuple[int, bytes]]) -> None:
        """The application has taken these messages."""
        self.backlog -= sum(len(payload) for _, payload in messages) + MESSAGE_COST * len(messages)
