"""One link of the stock peer: packets, channel messages, streams, requests and resources over the public API of `rns`.

A link is set up by a `setup` map: on the responder it comes with the destination (`on_link`), on the initiator with
`open`.

    sleep       seconds to block in the established callback before anything else
    packets     false: install no packet handler
    channel     map: open the channel and register message type 0x0101; `echo` sends every message back (from a thread
                of its own), `sleep` blocks in the handler for that many seconds (`sleep_at`: only at that message
                number), `events` reports each message
    readers     list of stream ids, or of maps {stream, chunk, delay}: `delay` seconds between reads of `chunk` bytes
    echoes      list of [receive id, send id]: what comes in on the first goes out on the second, the end mark too
    burst       map {count, size, seed, via: "packet" or "channel"}: sent as soon as the above is in place
    resources   true: accept every resource and report its digest

Message 0x0101 is a number (4 bytes, big endian) and any bytes.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import RNS

from interop.seeded import data, message_bytes

STATES = {0: "pending", 1: "handshake", 2: "active", 3: "stale", 4: "closed"}
REASONS = {1: "timeout", 2: "initiator", 3: "destination"}
POLL = 0.0005  # seconds between looks at readiness: the stock API has nothing to wait on
Emit = Callable[..., None]


class Numbered(RNS.MessageBase):
    MSGTYPE = 0x0101

    def __init__(self, number: int = 0, content: bytes = b"") -> None:
        self.number, self.content = number, content

    def pack(self) -> bytes:
        return self.number.to_bytes(4, "big") + self.content

    def unpack(self, raw: bytes) -> None:
        self.number, self.content = int.from_bytes(raw[:4], "big"), bytes(raw[4:])


class Inbox:
    """Channel messages received: how many, which, in what order."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.size = 0
        self.digest = hashlib.sha256()
        self.first: int | None = None
        self.last: int | None = None
        self.in_order = True

    def add(self, message: Numbered) -> None:
        with self.changed:
            self.count += 1
            self.size += len(message.content)
            self.digest.update(message.pack())
            self.in_order = self.in_order and (self.last is None or message.number == self.last + 1)
            self.first = message.number if self.first is None else self.first
            self.last = message.number
            self.changed.notify_all()

    def report(self) -> dict[str, Any]:
        return {
            "count": self.count,
            "size": self.size,
            "sha256": self.digest.hexdigest(),
            "first": self.first,
            "last": self.last,
            "in_order": self.in_order,
        }


class Incoming:
    """One reader: a thread that takes what has come, whenever the stock reader says that something has."""

    def __init__(
        self, session: Session, stream: int, *, chunk: int = 65536, delay: float = 0.0, back: int | None = None
    ):
        self.session, self.stream, self.chunk, self.delay = session, stream, chunk, delay
        self.changed = threading.Condition()
        self.size, self.digest, self.eof, self.ended = 0, hashlib.sha256(), False, False
        self._bell = threading.Event()
        self._back = None if back is None else Outgoing(session, back, tries=1)
        channel = session.open_channel()
        self._reader = RNS.Buffer.create_reader(stream, channel, lambda ready: self._bell.set())
        threading.Thread(target=self._run, name=f"reader {stream}", daemon=True).start()

    def wake(self) -> None:
        self._bell.set()

    def _run(self) -> None:
        while True:
            self._bell.wait()
            self._bell.clear()
            closed = self.session.closed.is_set()  # looked at before reading, so that nothing is left behind
            while (got := self._reader.read(self.chunk)) is not None:
                if got == b"":
                    self._finish(eof=True)
                    return
                if self._back is not None:
                    self._back.write(got)
                with self.changed:
                    self.size += len(got)
                    self.digest.update(got)
                    self.changed.notify_all()
                if self.delay:
                    time.sleep(self.delay)
            if closed:
                self._finish(eof=False)
                return

    def _finish(self, *, eof: bool) -> None:
        if eof and self._back is not None:
            self._back.end()
        with self.changed:
            self.eof, self.ended = eof, True
            self.changed.notify_all()
        self.session.emit("eof" if eof else "cut", link=self.session.id, stream=self.stream, **self.report())

    def report(self) -> dict[str, Any]:
        return {"size": self.size, "sha256": self.digest.hexdigest(), "eof": self.eof}


class Outgoing:
    """One writer. Kind: it asks whether the channel is ready before it offers a chunk, its end mark is sure to go."""

    def __init__(self, session: Session, stream: int, *, tries: int = 1) -> None:
        self.session, self.stream = session, stream
        self.tries = tries  # tries - 1 attempts to compress for each chunk; the last to begin decides for the process
        self.channel = session.open_channel()
        self.raw = RNS.RawChannelWriter(stream, self.channel)
        session.keep.append(self.raw)  # a writer that is collected sends end marks of its own

    def write(self, content: bytes) -> None:
        RNS.RawChannelWriter.COMPRESSION_TRIES = self.tries  # the writer looks only at its class
        view, at = memoryview(content), 0
        while at < len(content):
            self.session.wait_ready()
            at += self.raw.write(bytes(view[at : at + RNS.RawChannelWriter.MAX_CHUNK_LEN]))

    def write_buffered(self, content: bytes) -> None:
        """As a program does that knows nothing: the standard library's buffered layer, which turns in circles."""
        RNS.RawChannelWriter.COMPRESSION_TRIES = self.tries
        writer = RNS.Buffer.create_writer(self.stream, self.channel)
        self.session.keep.append(writer)
        view = memoryview(content)
        for at in range(0, len(content), 65536):
            writer.write(view[at : at + 65536])
        writer.flush()

    def end(self) -> None:
        from RNS.Buffer import StreamDataMessage

        self.session.send_message(StreamDataMessage(self.stream, b"", eof=True))


class Session:
    """One link, either end."""

    def __init__(self, emit: Emit, setup: dict[str, Any] | None, dest: str) -> None:
        self.emit, self.setup, self.dest = emit, setup or {}, dest
        self.link: Any = None
        self.id = ""
        self.up, self.closed = threading.Event(), threading.Event()
        self.inbox = Inbox()
        self.readers: dict[int, Incoming] = {}
        self.writers: dict[int, Outgoing] = {}
        self.keep: list[object] = []
        self.packets = 0
        self._channel: Any = None
        self._registered = False
        self._options: dict[str, Any] = {}
        self._echo: queue.Queue[Numbered] = queue.Queue()
        self._opening = threading.Lock()

    # -- life
    def established(self, link: Any) -> None:
        self.link, self.id = link, link.link_id.hex()
        setup = self.setup
        if setup.get("sleep"):
            time.sleep(setup["sleep"])
        link.set_link_closed_callback(self.on_closed)
        link.set_remote_identified_callback(
            lambda _link, who: self.emit("identified", link=self.id, identity=who.hash.hex())
        )
        if setup.get("packets", True):
            link.set_packet_callback(self.on_packet)
        if setup.get("resources"):
            link.set_resource_strategy(RNS.Link.ACCEPT_ALL)
            link.set_resource_concluded_callback(self.on_resource)
        if "channel" in setup:
            self.open_messages(**(setup["channel"] or {}))
        for reader in setup.get("readers", ()):
            self.open_reader(**(reader if isinstance(reader, dict) else {"stream": reader}))
        for receive, send in setup.get("echoes", ()):
            self.open_reader(receive, back=send)
        if setup.get("burst"):
            threading.Thread(target=self.burst, kwargs=setup["burst"], daemon=True).start()
        self.up.set()
        self.emit("link", **self.describe())

    def describe(self) -> dict[str, Any]:
        link = self.link
        return {
            "link": self.id,
            "dest": self.dest,
            "initiator": bool(link.initiator),
            "status": STATES.get(link.status, link.status),
            "rtt": link.rtt,
            "mtu": link.mtu,
            "mdu": link.mdu,
            "reason": REASONS.get(getattr(link, "teardown_reason", None) or 0),
            "packets": self.packets,
            "no_inbound_for": link.no_inbound_for(),
        }

    def on_closed(self, link: Any) -> None:
        self.closed.set()
        for reader in list(self.readers.values()):
            reader.wake()
        with self.inbox.changed:
            self.inbox.changed.notify_all()
        reason = REASONS.get(getattr(link, "teardown_reason", None) or 0)
        self.emit("closed", link=link.link_id.hex(), dest=self.dest, reason=reason)

    def on_packet(self, content: bytes, packet: Any) -> None:
        self.packets += 1
        self.emit("link_packet", link=self.id, data=content.hex())

    def on_resource(self, resource: Any) -> None:
        whole = resource.status == RNS.Resource.COMPLETE
        content = resource.data.read() if whole else b""
        sha256 = hashlib.sha256(content).hexdigest()
        self.emit("resource", link=self.id, complete=whole, size=len(content), sha256=sha256, status=resource.status)

    def burst(self, count: int, size: int, seed: str = "burst", via: str = "packet") -> None:
        for number in range(count):
            content = number.to_bytes(4, "big") + message_bytes(seed, number, size - 4)
            if via == "packet":
                RNS.Packet(self.link, content).send()
            else:
                self.send_message(Numbered(number, content[4:]))

    # -- channel
    def open_channel(self) -> Any:
        with self._opening:
            if self._channel is None:
                self._channel = self.link.get_channel()
            return self._channel

    def open_messages(self, **options: Any) -> None:
        """Register the message type and the handler; called again it only changes the options."""
        channel = self.open_channel()
        self._options = options
        if not self._registered:
            self._registered = True
            channel.register_message_type(Numbered)
            channel.add_message_handler(self.on_message)
            threading.Thread(target=self._send_back, name="echo", daemon=True).start()

    def on_message(self, message: Any) -> bool:
        if not isinstance(message, Numbered):
            return False
        options = self._options
        if options.get("sleep") and options.get("sleep_at", message.number) == message.number:
            time.sleep(options["sleep"])
        self.inbox.add(message)
        if options.get("events"):
            self.emit("message", link=self.id, number=message.number, data=message.content.hex())
        if options.get("echo"):
            self._echo.put(message)  # sending from in here can block the whole node
        return True

    def _send_back(self) -> None:
        while not self.closed.is_set():
            try:
                message = self._echo.get(timeout=1)
            except queue.Empty:
                continue
            try:
                self.send_message(message)
            except (ConnectionError, TimeoutError) as error:
                self.emit("trouble", link=self.id, error=str(error))

    def wait_ready(self, limit: float = 120.0) -> None:
        """Return when the channel takes a message. The stock channel can only be asked, so this asks."""
        channel, end = self.open_channel(), time.monotonic() + limit
        while self.link.status != RNS.Link.CLOSED:
            if self.link.status == RNS.Link.ACTIVE and channel.is_ready_to_send():
                return
            if time.monotonic() > end:
                raise TimeoutError(f"channel was not ready within {limit} s")
            time.sleep(POLL)
        raise ConnectionError("link is closed")

    def send_message(self, message: Any, limit: float = 120.0) -> None:
        channel = self.open_channel()
        while True:
            self.wait_ready(limit)
            try:
                channel.send(message)
                return
            except RNS.Channel.ChannelException as error:
                if error.type != RNS.Channel.CEType.ME_LINK_NOT_READY:
                    raise
                time.sleep(POLL)

    def send_series(self, count: int, size: int, seed: str, first: int, timeout: float) -> dict[str, Any]:
        digest, begun = hashlib.sha256(), time.monotonic()
        for number in range(first, first + count):
            message = Numbered(number, message_bytes(seed, number, size))
            digest.update(message.pack())
            self.send_message(message, timeout)
        return {"count": count, "sha256": digest.hexdigest(), "seconds": time.monotonic() - begun}

    def wait_messages(self, count: int, timeout: float) -> dict[str, Any]:
        """Messages received so far, when there are `count` of them."""
        with self.inbox.changed:
            self.inbox.changed.wait_for(lambda: self.inbox.count >= count or self.closed.is_set(), timeout)
            return self.inbox.report()

    # -- streams
    def open_reader(self, stream: int, chunk: int = 65536, delay: float = 0.0, back: int | None = None) -> None:
        self.readers[stream] = Incoming(self, stream, chunk=chunk, delay=delay, back=back)

    def wait_received(self, stream: int, size: int | None, timeout: float) -> dict[str, Any]:
        """What the reader has, when it has `size` bytes or, without a size, when the stream has ended."""
        reader = self.readers[stream]
        with reader.changed:
            reader.changed.wait_for(lambda: reader.ended or (size is not None and reader.size >= size), timeout)
            return {"stream": stream, "ended": reader.ended, **reader.report()}

    def write(
        self, stream: int, content: bytes | None, kind: str, seed: str, size: int, tries: int, how: str, end: bool
    ) -> dict[str, Any]:
        if content is None:
            content = data(kind, seed, size)
        writer = self.writers.get(stream)
        if writer is None:
            writer = self.writers[stream] = Outgoing(self, stream)
        writer.tries = tries
        begun = time.monotonic()
        (writer.write_buffered if how == "buffered" else writer.write)(content)
        if end:
            writer.end()
        spent = time.monotonic() - begun
        return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest(), "seconds": spent}
