"""Announces that are to be passed on, and answers to path requests.  Protocol 02, sections 7.3, 8.1 and 8.2."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count
from math import ceil, inf
from typing import TYPE_CHECKING, Final

from rnsfast.engine.transport.modes import Passage, passage
from rnsfast.wire.announce import emission_time
from rnsfast.wire.drop import Drop
from rnsfast.wire.packet import (
    ANNOUNCE,
    CONTEXT_FLAG,
    CTX_NONE,
    CTX_PATH_RESPONSE,
    HEADER_2,
    MAX_HOPS,
    MTU,
    SINGLE,
    TRANSPORT,
)

if TYPE_CHECKING:
    from rnsfast.engine.port import Port
    from rnsfast.engine.transport.transport import Transport

WINDOW: Final = 0.5  # seconds; the first transmission happens within this time, at random
AGAIN: Final = 5.5  # seconds between two transmissions
TRANSMISSIONS: Final = 2
LOCAL_REBROADCASTS: Final = 2  # neighbours at our distance that make ours unnecessary
ASIDE: Final = 2.0  # seconds after an answer until what was set aside for it goes on
TICK: Final = 0.25  # seconds; what falls due within one is sent together: a call for each interface costs more
LIMIT: Final = 16_384  # announces; the one longest in the table gives way
ANSWERS_LIMIT: Final = 16_384  # answers; the one longest in the table goes out early

_BLOB_AT: Final = 74  # offset of the random blob in an announce's data


class Entry:
    """One announce. `hops` as they are told: those of our path."""

    __slots__ = (
        "askers", "context_flag", "data", "destination", "due", "hops", "is_response", "local_rebroadcasts",
        "received_from", "retries", "ticket", "was_aside",
    )  # fmt: skip

    def __init__(
        self, destination: bytes, received_from: bytes, hops: int, context_flag: int, data: bytes, due: float
    ) -> None:
        self.destination, self.received_from, self.hops = destination, received_from, hops
        self.context_flag, self.data = context_flag, data
        self.due = due
        self.ticket = -1  # which place in the queue counts
        self.retries = 0
        self.local_rebroadcasts = 0
        self.is_response = False
        self.askers: list[Port] = []  # an answer goes to whoever asked only
        self.was_aside = False  # it has waited for an answer since it was sent last


def packet_of(own_id: bytes, destination: bytes, hops: int, context_flag: int, context: int, data: bytes) -> bytes:
    """A rebroadcast announce."""
    flags = HEADER_2 | TRANSPORT | context_flag | SINGLE << 2 | ANNOUNCE
    return bytes((flags, hops)) + own_id + destination + bytes((context,)) + data


def payload_of(raw: bytes) -> tuple[int, bytes]:
    """Context flag and data of an announce as it was received."""
    return raw[0] & CONTEXT_FLAG, raw[35:] if raw[0] & HEADER_2 else raw[19:]


class AnnounceTable:
    """What is waiting to be sent, by destination. A deadline, not a thread.

    Answers stand beside the announces that are to be passed on, and an announce waits once for an answer to the same
    question: whoever asks again and again must keep neither others from their answer nor the announce from going on.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.entries: dict[bytes, Entry] = {}  # to be passed on; at most LIMIT, oldest first
        self.answers: dict[bytes, Entry] = {}  # to path requests; at most ANSWERS_LIMIT, oldest first
        self._heap: list[tuple[float, int, Entry]] = []  # entries that were replaced are skipped
        self._numbers = count()

    def _enter(self, entry: Entry) -> None:
        self.entries.pop(entry.destination, None)
        if len(self.entries) >= LIMIT:
            del self.entries[next(iter(self.entries))]
        self.entries[entry.destination] = entry
        self._schedule(entry)

    def _schedule(self, entry: Entry) -> None:
        entry.due = ceil(entry.due / TICK) * TICK
        entry.ticket = next(self._numbers)
        heappush(self._heap, (entry.due, entry.ticket, entry))

    def rebroadcast(
        self, destination: bytes, received_from: bytes, hops: int, raw: bytes, now: float, jitter: float
    ) -> None:
        """Pass an announce on, twice unless others do. `jitter` is 0..1."""
        if hops >= MAX_HOPS:
            return
        flag, data = payload_of(raw)
        self._enter(Entry(destination, received_from, hops, flag, data, now + WINDOW * jitter))

    def rebroadcast_once(self, destination: bytes, hops: int, raw: bytes, now: float) -> None:
        """Pass on the announce of a program behind us: at once, and it is ours to repeat."""
        flag, data = payload_of(raw)
        entry = Entry(destination, destination, hops, flag, data, now)
        entry.retries = TRANSMISSIONS - 1
        self._enter(entry)

    def answer(self, destination: bytes, hops: int, raw: bytes, port: Port, due: float) -> None:
        """Tell `port` about a path of ours, once. What waits for the same destination waits on."""
        if hops >= MAX_HOPS:
            return  # nobody would take it
        flag, data = payload_of(raw)
        answer = self.answers.get(destination)
        if answer is not None:  # somebody has asked before and waits already
            answer.hops, answer.context_flag, answer.data = hops, flag, data
            if port not in answer.askers:
                answer.askers.append(port)
            return
        if len(self.answers) >= ANSWERS_LIMIT:
            self._tell(self.answers.pop(next(iter(self.answers))))
        answer = self.answers[destination] = Entry(destination, b"", hops, flag, data, due)
        answer.retries, answer.is_response, answer.askers = TRANSMISSIONS - 1, True, [port]
        self._schedule(answer)
        entry = self.entries.get(destination)
        if entry is not None and not entry.was_aside:
            entry.was_aside = True
            if entry.due < answer.due + ASIDE:
                entry.due = answer.due + ASIDE
                self._schedule(entry)

    def overheard(self, destination: bytes, hops: int, now: float) -> None:
        """A neighbour sent the same announce; `hops` counts its last hop."""
        entry = self.entries.get(destination)
        if entry is None or destination in self.answers:
            return
        if hops - 1 == entry.hops:
            entry.local_rebroadcasts += 1
            if entry.retries > 0 and entry.local_rebroadcasts >= LOCAL_REBROADCASTS:
                del self.entries[destination]
        elif hops - 1 == entry.hops + 1 and entry.retries > 0 and now < entry.due:
            del self.entries[destination]

    def forget(self, destination: bytes) -> None:
        """Send no more of it."""
        self.entries.pop(destination, None)
        self.answers.pop(destination, None)

    def leave(self, port: Port) -> None:
        """`port` is gone, and waits for nothing."""
        for answer in self.answers.values():
            if port in answer.askers:
                answer.askers.remove(port)

    @property
    def due(self) -> float:
        """When `advance` has something to do."""
        heap = self._heap
        while heap:
            due, ticket, entry = heap[0]
            table = self.answers if entry.is_response else self.entries
            if entry.ticket == ticket and table.get(entry.destination) is entry:
                return due
            heappop(heap)
        return inf

    def advance(self, now: float) -> None:
        """Send what is due, the nearest first."""
        ready: list[Entry] = []
        while self.due <= now:
            ready.append(heappop(self._heap)[2])
        for entry in sorted(ready, key=lambda entry: entry.hops):
            if entry.is_response:
                del self.answers[entry.destination]
                self._tell(entry)
                continue
            self._send(entry, now)
            entry.retries += 1
            if entry.retries >= TRANSMISSIONS:
                del self.entries[entry.destination]
                continue
            entry.was_aside = False
            entry.due = now + AGAIN
            self._schedule(entry)

    def _packet(self, entry: Entry, context: int) -> bytes | None:
        """What goes out for `entry`, if it is still known and small enough."""
        engine = self._transport.engine
        if entry.destination not in engine.known.entries:
            return None  # forgotten meanwhile
        raw = packet_of(engine.transport_id, entry.destination, entry.hops, entry.context_flag, context, entry.data)
        if len(raw) > MTU:
            engine.drops[Drop.ANNOUNCE_TOO_LONG] += 1  # taken, but it does not fit with a transport id (trap T1)
            return None
        return raw

    def _tell(self, answer: Entry) -> None:
        raw = self._packet(answer, CTX_PATH_RESPONSE)
        if raw is not None:
            for port in answer.askers:
                port.send(raw)

    def _send(self, entry: Entry, now: float) -> None:
        raw = self._packet(entry, CTX_NONE)
        if raw is None:
            return
        transport = self._transport
        engine = transport.engine
        path = engine.paths.paths.get(entry.destination)
        source = None if path is None else path.port
        emitted = emission_time(entry.data[_BLOB_AT : _BLOB_AT + 10])
        for port in engine.ports:
            if not port.online or not port.outgoing:
                continue
            way = passage(port, source, entry.hops, local=False)
            if way is Passage.FREE:
                port.send(raw)
            elif way is Passage.CAPPED:
                transport.outlets[port].offer(entry.destination, raw, entry.hops, emitted, now)
