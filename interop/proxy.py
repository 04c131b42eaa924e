"""A TCP proxy between two nodes that sees frames: it can lose, hold, repeat, reorder, swallow, slow and record them.

    with FrameProxy(target_port) as proxy:                       # nodes connect to proxy.port
        proxy.to_target.drop_fraction = 0.01                     # what the connecting node sends
        proxy.to_client.drop_nth(is_link_proof, 1)               # what it is sent

Two lanes, one for each direction: `to_target` (from the node that connected) and `to_client` (to it). Frames are cut
out of the HDLC stream, judged and passed on as they were, byte for byte. Predicates get a `Frame`, whose header fields
can be read unless the interface has an access code. Random decisions come from a seed and the number of the frame, so
that the same frames in the same order meet the same fate. Settings may be changed at any time from any thread. The
settings are the proxy's: they hold for all its connections, at once or one after the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

FLAG, ESCAPE, TOGGLE = 0x7E, 0x7D, 0x20
READ = 65536  # bytes a read

DATA, ANNOUNCE, LINK_REQUEST, PROOF = range(4)  # packet types
LINK = 3  # destination type
CHANNEL, KEEPALIVE, IDENTIFY, LINK_CLOSE, LINK_RTT, LINK_PROOF = 0x0E, 0xFA, 0xFB, 0xFC, 0xFE, 0xFF  # contexts


def unescape(body: bytes) -> bytes:
    """The packet inside one frame, given without its flags."""
    if ESCAPE not in body:
        return body
    head, *rest = body.split(bytes((ESCAPE,)))
    return head + b"".join(bytes((piece[0] ^ TOGGLE,)) + piece[1:] for piece in rest if piece)


@dataclass(frozen=True)
class Frame:
    """One packet on its way. The fields are those of the header; None where the packet is too short or masked."""

    number: int  # counted in its lane, from 1
    raw: bytes
    at: float  # seconds since the proxy was started

    @property
    def masked(self) -> bool:
        return bool(self.raw[0] & 0x80)

    @property
    def _start(self) -> int:
        return 18 if self.raw[0] & 0x40 else 2

    @property
    def kind(self) -> int | None:
        """Packet type."""
        return None if self.masked else self.raw[0] & 3

    @property
    def destination_type(self) -> int | None:
        return None if self.masked else (self.raw[0] >> 2) & 3

    @property
    def destination(self) -> bytes | None:
        return None if self.masked else self.raw[self._start : self._start + 16]

    @property
    def context(self) -> int | None:
        place = self._start + 16
        return None if self.masked or len(self.raw) <= place else self.raw[place]


Match = Callable[[Frame], bool]


def any_frame(frame: Frame) -> bool:
    return True


def is_announce(frame: Frame) -> bool:
    return frame.kind == ANNOUNCE


def is_link_request(frame: Frame) -> bool:
    return frame.kind == LINK_REQUEST


def is_link_proof(frame: Frame) -> bool:
    """The responder's answer to a link request."""
    return frame.kind == PROOF and frame.context == LINK_PROOF


def is_link_rtt(frame: Frame) -> bool:
    return frame.kind == DATA and frame.destination_type == LINK and frame.context == LINK_RTT


def is_link_data(frame: Frame) -> bool:
    """A plain packet on a link."""
    return frame.kind == DATA and frame.destination_type == LINK and frame.context == 0


def is_channel(frame: Frame) -> bool:
    return frame.kind == DATA and frame.destination_type == LINK and frame.context == CHANNEL


def is_packet_proof(frame: Frame) -> bool:
    """The proof of a packet on a link, channel messages among them."""
    return frame.kind == PROOF and frame.destination_type == LINK and frame.context == 0


def is_keepalive(frame: Frame) -> bool:
    return frame.kind == DATA and frame.context == KEEPALIVE


def is_link_close(frame: Frame) -> bool:
    return frame.kind == DATA and frame.context == LINK_CLOSE


@dataclass
class Lane:
    """What happens to frames in one direction. All settings are off until they are set."""

    name: str
    seed: int
    drop_fraction: float = 0.0  # of the frames that `drop_match` accepts
    drop_match: Match = any_frame
    duplicate_fraction: float = 0.0
    reorder_fraction: float = 0.0  # a frame changes places with the one after it
    delay: float = 0.0  # seconds, for every frame
    rate: float = 0.0  # bytes per second, 0: no limit
    swallow: bool = False  # everything vanishes, the connection stays
    counts: Counter[str] = field(default_factory=Counter)  # frames by fate

    def __post_init__(self) -> None:
        self._planned: list[tuple[str, Match, set[int], list[int]]] = []
        self._number = 0
        self._held: tuple[Frame, bytes] | None = None
        self._free_at = 0.0  # when the last frame will have left, under a rate
        self._watches: list[tuple[Match, list[int], threading.Event]] = []
        self._lock = threading.Lock()

    def drop_nth(self, match: Match, *which: int) -> None:
        """Lose exactly these frames among those that match, counted from 1 and from now on."""
        self._plan("dropped", match, which)

    def repeat_nth(self, match: Match, *which: int) -> None:
        """Pass exactly these on twice."""
        self._plan("duplicated", match, which)

    def swap_nth(self, match: Match, *which: int) -> None:
        """Let exactly these change places with whatever frame comes next."""
        self._plan("held", match, which)

    def _plan(self, fate: str, match: Match, which: tuple[int, ...]) -> None:
        with self._lock:
            self._planned.append((fate, match, set(which), [0]))

    def watch(self, match: Match, count: int = 1) -> threading.Event:
        """An event that is set when `count` matching frames have come in from now on, whatever became of them."""
        event = threading.Event()
        with self._lock:
            self._watches.append((match, [count], event))
        return event

    def calm(self) -> None:
        """Back to passing everything on at once."""
        with self._lock:
            self.drop_fraction = self.duplicate_fraction = self.reorder_fraction = self.delay = self.rate = 0.0
            self.swallow = False
            self._planned.clear()

    # -- used by the proxy's own thread
    def judge(self, raw: bytes, body: bytes, at: float) -> tuple[Frame, str, list[tuple[Frame, bytes]]]:
        """Returns the frame, its fate, and what to pass on now, in order."""
        with self._lock:
            self._number += 1
            frame = Frame(self._number, raw, at)
            self._notice(frame)
            fate, passed = self._decide(frame, body)
            self.counts[fate] += 1
        return frame, fate, passed

    def _notice(self, frame: Frame) -> None:
        for match, left, event in self._watches:
            if left[0] > 0 and match(frame):
                left[0] -= 1
                if left[0] == 0:
                    event.set()

    def _decide(self, frame: Frame, body: bytes) -> tuple[str, list[tuple[Frame, bytes]]]:
        if self.swallow:
            return "swallowed", []
        planned = ""
        for fate, match, which, seen in self._planned:
            if match(frame):
                seen[0] += 1
                if seen[0] in which:
                    planned = fate
        if planned == "dropped":
            return "dropped", self._release()
        chance = random.Random(f"{self.seed} {self.name} {frame.number}")
        lose, repeat, swap = chance.random(), chance.random(), chance.random()
        if lose < self.drop_fraction and self.drop_match(frame):
            return "dropped", self._release()
        if self._held is None and (planned == "held" or swap < self.reorder_fraction):
            self._held = (frame, body)
            return "held", []
        now = [(frame, body), *self._release()]
        if planned == "duplicated" or repeat < self.duplicate_fraction:
            return "duplicated", [now[0], *now]
        return "passed", now

    def _release(self) -> list[tuple[Frame, bytes]]:
        held, self._held = self._held, None
        return [] if held is None else [held]

    def release_held(self) -> list[tuple[Frame, bytes]]:
        """The frame that waits for a successor, for when none has come."""
        with self._lock:
            return self._release()

    def wait_for(self, size: int, now: float) -> float:
        """Seconds a frame of `size` bytes has to wait before it goes out."""
        wait = self.delay
        if self.rate > 0:
            self._free_at = max(self._free_at, now) + size / self.rate
            wait += self._free_at - now
        return wait


class Outlet:
    """What goes out to one node, in order, each frame when it is due."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sink: asyncio.StreamWriter) -> None:
        self.sink = sink
        self._loop = loop
        self._queue: deque[tuple[float, bytes]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._last = False

    def put(self, wire: bytes, wait: float) -> None:
        due = self._loop.time() + wait
        if self._queue:
            due = max(due, self._queue[-1][0])  # a delay that was shortened lets nobody overtake
        self._queue.append((due, wire))
        if self._timer is None:
            self._pump()

    def finish(self) -> None:
        """Close once everything has gone out."""
        self._last = True
        if self._timer is None:
            self._pump()

    def _pump(self) -> None:
        self._timer = None
        now = self._loop.time()
        while self._queue and self._queue[0][0] <= now:
            wire = self._queue.popleft()[1]
            if not self.sink.is_closing():
                self.sink.write(wire)
        if self.sink.is_closing():
            self._queue.clear()
        if self._queue:
            self._timer = self._loop.call_at(self._queue[0][0], self._pump)
        elif self._last:
            self.sink.close()


class FrameProxy:
    """Listens on `port` and joins every connection to `target_port`. Context manager; runs on a thread of its own."""

    HELD_AT_MOST = 0.05  # seconds a frame waits for the one it is to change places with

    def __init__(self, target_port: int, *, seed: int = 1, transcript: Path | None = None, host: str = "127.0.0.1"):
        self.host, self.target_port, self.port = host, target_port, 0
        self.to_target = Lane("to_target", seed)
        self.to_client = Lane("to_client", seed)
        self.connections = 0  # accepted since the start
        self._path = transcript
        self._transcript: TextIO | None = None
        self._recording = threading.Lock()
        self._began = time.monotonic()
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="frame proxy", daemon=True)

    # -- for scenarios
    def __enter__(self) -> Self:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._transcript = self._path.open("w", encoding="utf-8")
        self._thread.start()
        self._ask(self._listen())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ask(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
        with self._recording:
            if self._transcript is not None:
                self._transcript.close()
                self._transcript = None

    def cut(self) -> None:
        """Break every connection at once, without farewell. New ones are accepted."""
        self._ask(self._cut())

    def refuse(self) -> None:
        """Break every connection and accept no more until `accept`."""
        self._ask(self._refuse())

    def accept(self) -> None:
        """Listen again, on the same port."""
        self._ask(self._listen())

    def swallow(self, on: bool = True) -> None:
        """Both directions vanish while the connections stay up; or no longer."""
        self.to_target.swallow = self.to_client.swallow = on

    def calm(self) -> None:
        self.to_target.calm()
        self.to_client.calm()

    # -- its own thread
    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _ask(self, what: Any) -> None:
        asyncio.run_coroutine_threadsafe(what, self._loop).result(10)

    async def _listen(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._join, self.host, self.port)
            self.port = self._server.sockets[0].getsockname()[1]

    async def _cut(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _refuse(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        await self._cut()

    async def _close(self) -> None:
        await self._refuse()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # lets aborted transports finish their last callback

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            far_reader, far_writer = await asyncio.open_connection(self.host, self.target_port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, far_writer}
        for lane, source, sink in (
            (self.to_target, reader, far_writer),
            (self.to_client, far_reader, writer),
        ):
            task = self._loop.create_task(self._carry(lane, source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry(self, lane: Lane, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        outlet, rest = Outlet(self._loop, sink), b""
        with contextlib.suppress(OSError):
            while chunk := await source.read(READ):
                *bodies, rest = (rest + chunk).split(bytes((FLAG,)))
                for body in bodies:
                    if body:
                        self._handle(lane, body, outlet)
                if not sink.is_closing():
                    await sink.drain()
        outlet.finish()  # what is delayed still goes out; the sink stays listed, for whoever closes in between

    def _handle(self, lane: Lane, body: bytes, outlet: Outlet) -> None:
        frame, fate, passed = lane.judge(unescape(body), body, time.monotonic() - self._began)
        self._record(lane, frame, fate)
        if fate == "held":
            self._loop.call_later(self.HELD_AT_MOST, lambda: self._pass(lane, lane.release_held(), outlet))
        self._pass(lane, passed, outlet)

    def _pass(self, lane: Lane, frames: list[tuple[Frame, bytes]], outlet: Outlet) -> None:
        for _frame, body in frames:
            wire = bytes((FLAG,)) + body + bytes((FLAG,))
            outlet.put(wire, lane.wait_for(len(wire), self._loop.time()))

    def _record(self, lane: Lane, frame: Frame, fate: str) -> None:
        if self._transcript is not None:
            row = {"t": round(frame.at, 6), "dir": lane.name, "n": frame.number, "fate": fate, "frame": frame.raw.hex()}
            with self._recording:
                if self._transcript is not None:
                    self._transcript.write(json.dumps(row) + "\n")
