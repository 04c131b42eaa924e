"""Byte streams on a link, as file objects.  Protocol 05, sections 8 and 9."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from rnsfast.engine.channel import Channel as EngineChannel
from rnsfast.engine.streams import Packed, ReceiveStream, SendStream
from rnsfast.errors import LinkClosed, StreamBroken
from rnsfast.node.waiting import Waitable
from rnsfast.wire.stream import COMPRESSION_TRIES, MAX_CHUNK, compress_chunk

if TYPE_CHECKING:
    from rnsfast.node.link import Link

Compression = Literal["auto", "never", "always"]

GIVE_UP_AFTER: Final = 3  # chunks in a row that did not shrink, before `auto` stops trying
TRY_AGAIN_AFTER: Final = 64  # chunks sent plain, before `auto` tries again


class Compressor:
    """The compression policy of one stream. Runs on the writer's thread, without any lock.

    `auto` stops trying when the data does not shrink and looks again now and then; `always` tries every chunk as the
    reference does; `never` never does. What goes on the wire can be read by every peer in each setting.
    """

    __slots__ = ("_failures", "_policy", "_room", "_skipped")

    def __init__(self, policy: Compression, room: int) -> None:
        if policy not in get_args(Compression):
            raise ValueError(f"compression is 'auto', 'never' or 'always', not {policy!r}")
        self._policy = policy
        self._room = room
        self._failures = self._skipped = 0

    def cut(self, data: memoryview, room: int) -> bytes | memoryview | Packed:
        """The next piece of `data`, at most `room` plain bytes: a compressed chunk, or plain bytes of any length.

        What is left plain is a view if `data` cannot change, a copy else.
        """
        if self._policy == "never":
            return _frozen(data[:room])
        if self._policy == "auto" and self._failures >= GIVE_UP_AFTER:
            plain = _frozen(data[: min(room, MAX_CHUNK * (TRY_AGAIN_AFTER - self._skipped))])
            self._skipped += max(1, len(plain) // MAX_CHUNK)
            if self._skipped >= TRY_AGAIN_AFTER:
                self._failures, self._skipped = GIVE_UP_AFTER - 1, 0
            return plain
        piece = bytes(data[:MAX_CHUNK])
        size, body, compressed = compress_chunk(piece, self._room, COMPRESSION_TRIES)
        if compressed:
            self._failures = 0
            return Packed(body, size)
        self._failures += 1
        return piece[:room]


def _frozen(view: memoryview) -> bytes | memoryview:
    return view if type(view.obj) is bytes else bytes(view)


class _Waiter(Waitable):
    """What the engine's stream tells of its changes."""


class StreamWriter(io.RawIOBase):
    """The sending half of a stream. `write` returns when all bytes are accepted into a bounded buffer (512 KiB).

    The buffer empties by itself as proofs arrive. `close` sends the end of file and waits until the peer has proved
    everything; leaving a `with` block does the same, but gives the stream up without an end of file if an exception
    passes.

    `timeout` is seconds that a call waits for progress, None for ever; then it raises TimeoutError.
    All calls raise LinkClosed once the link is closed. Use a writer from one thread at a time.
    """

    def __init__(self, link: Link, channel: EngineChannel, stream: SendStream, compression: Compression) -> None:
        super().__init__()
        self._link, self._reactor = link, link._reactor
        self._channel, self._stream = channel, stream
        self._compressor = Compressor(compression, channel.stream_mdu)
        self._waiter = _Waiter(self._reactor.lock)
        self._finished = False
        self._discarded = 0  # bytes accepted and thrown away by `abort`
        self.timeout: float | None = None
        self.written = 0  # bytes accepted
        self.carried = 0  # what became of them after compression
        stream.owner = self._waiter

    @property
    def stream_id(self) -> int:
        """0 to 16383; the peer reads under the same number."""
        return self._stream.stream_id

    @property
    def buffered(self) -> int:
        """Bytes accepted and not yet handed to the window."""
        return self._stream.buffered

    @property
    def sent(self) -> int:
        """Bytes handed to the window: on their way, or proved."""
        return self.written - self._discarded - self._stream.buffered

    @property
    def room(self) -> int:
        """Bytes that `write` accepts now without waiting."""
        return self._stream.room

    def writable(self) -> bool:
        """Yes."""
        return True

    def wait_writable(self, timeout: float | None = None) -> bool:
        """Wait until at least half of the buffer is free. False if `timeout` seconds pass first. Raises LinkClosed."""
        self._reactor.check_may_block()
        stream = self._stream
        with self._reactor.lock:
            self._waiter.wait_for(self._is_writable, timeout)
            self._check()
            return stream.buffered <= stream.low

    def _is_writable(self) -> bool:
        return self._stream.buffered <= self._stream.low or self._finished or self._channel.closed

    def write(self, data: Any, /) -> int:
        """Accept all of `data` (bytes-like), waiting while the buffer is full. Returns its length in bytes."""
        view = memoryview(data).cast("B")
        at = 0
        while at < len(view):
            at += self._accept(view[at:])
        return len(view)

    def _accept(self, view: memoryview) -> int:
        """Wait for room, then accept what fits. Compression happens here, without the lock."""
        self._reactor.check_may_block()
        with self._reactor.lock:
            self._check()
            if not self._stream.room:
                self._wait(self._is_writable)
            room = self._stream.room
        return self._put(view, room)

    def _put(self, view: memoryview, room: int) -> int:
        piece = self._compressor.cut(view, room)
        with self._reactor.turn as now:
            self._check()
            self._stream.put(piece)
            self._channel.feed(self._stream, now)
        size = piece.size if isinstance(piece, Packed) else len(piece)
        self.written += size
        self.carried += len(piece.body) if isinstance(piece, Packed) else size
        return size

    def _wait(self, done: Any) -> None:
        """Under the lock: wait for `done()` or the end of the link. TimeoutError after `timeout`."""
        if not self._waiter.wait_for(lambda: done() or self._finished or self._channel.closed, self.timeout):
            raise TimeoutError(f"stream {self.stream_id} made no progress for {self.timeout} s")
        self._check()

    def _check(self) -> None:
        """Under the lock."""
        if self._finished:
            raise ValueError(f"stream {self.stream_id} is closed for writing")
        if self._channel.closed:
            raise LinkClosed(self._channel.link.link_id, self._stream.broken or self._channel.link.closing)

    def flush(self) -> None:
        """Wait until everything accepted has been sent (not: proved)."""
        if self._finished or self.closed:
            return
        self._reactor.check_may_block()
        with self._reactor.lock:
            self._check()
            self._wait(lambda: self._stream.is_sent)

    def wait_delivered(self, timeout: float | None = None) -> bool:
        """Wait until the peer's node has proved everything accepted. False if `timeout` seconds pass first.

        Raises LinkClosed if the link is closed before.
        """
        self._reactor.check_may_block()
        with self._reactor.lock:
            self._waiter.wait_for(self._is_settled, timeout)
            return self._is_delivered()

    def _is_settled(self) -> bool:
        return self._stream.is_delivered or self._channel.closed

    def _is_delivered(self) -> bool:
        """Under the lock. LinkClosed if it will never be."""
        stream, link = self._stream, self._channel.link
        if stream.broken or (self._channel.closed and not stream.is_delivered):
            raise LinkClosed(link.link_id, stream.broken or link.closing)
        return stream.is_delivered

    def close(self) -> None:
        """Send the end of file behind the data and wait until the peer has proved everything. Idempotent.

        Raises LinkClosed if the link was closed before that: the peer may lack the end. TimeoutError after `timeout`
        seconds without the proof.
        """
        if self._finished or self.closed:
            super().close()
            return
        try:
            self.finish()
            if not self.wait_delivered(self.timeout):
                raise TimeoutError(f"the end of stream {self.stream_id} was not proved within {self.timeout} s")
        finally:
            self._finished = True
            super().close()

    def finish(self) -> None:
        """Queue the end of file behind the data; never waits. `wait_delivered` tells when the peer has it all."""
        with self._reactor.turn as now:
            self._check()
            self._finished = True
            self._stream.close()
            self._channel.feed(self._stream, now)

    def abort(self) -> None:
        """Give the stream up: what is buffered is thrown away and no end of file is sent. Idempotent, never waits.

        The peer's reader learns of it when the link is closed. A call that waits in another thread raises ValueError.
        """
        with self._reactor.turn:
            self._finished = True
            self._discarded += self._stream.buffered
            self._channel.abandon(self._stream)
        super().close()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def __del__(self) -> None:
        """Nothing is sent for a writer that was merely dropped: an end of file says that the writer meant it."""


class StreamReader(io.RawIOBase):
    """The receiving half of a stream. Reads return what is there, wait if there is nothing, and b"" at the end.

    Usable with io.BufferedReader, io.TextIOWrapper and shutil.copyfileobj. If the link ends before the end of file,
    what has arrived can be read, and the next read raises StreamBroken: the data is cut off.

    `timeout` is seconds that a read waits, None for ever; then it raises TimeoutError.
    """

    def __init__(self, link: Link, channel: EngineChannel, stream: ReceiveStream) -> None:
        super().__init__()
        self._link, self._reactor = link, link._reactor
        self._channel, self._stream = channel, stream
        self._waiter = _Waiter(self._reactor.lock)
        self.timeout: float | None = None
        stream.owner = self._waiter

    @property
    def stream_id(self) -> int:
        """0 to 16383; the peer writes under the same number."""
        return self._stream.stream_id

    @property
    def available(self) -> int:
        """Bytes that a read returns without waiting."""
        return self._stream.buffered

    def readable(self) -> bool:
        """Yes."""
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        """At least one and at most `size` bytes; everything up to the end for -1; b"" at the end."""
        if size is None or size < 0:
            return self.readall()
        return self._read_some(size)

    def _read_some(self, size: int) -> bytes:
        if self.closed:
            raise ValueError(f"stream {self.stream_id} is closed for reading")
        self._reactor.check_may_block()
        with self._reactor.lock:
            while (data := self._take(size)) is None:
                if not self._waiter.wait_for(self._has_news, self.timeout):
                    raise TimeoutError(f"nothing arrived on stream {self.stream_id} for {self.timeout} s")
        return data

    def _has_news(self) -> bool:
        stream = self._stream
        return bool(stream.buffered or stream.eof or stream.broken)

    def _take(self, size: int) -> bytes | None:
        """Under the lock. None if there is nothing yet."""
        stream = self._stream
        data = stream.take(size)
        if data:
            self._channel.consumed(len(data))
        elif data is None and stream.broken:
            raise StreamBroken(f"stream {stream.stream_id} was cut off before its end: {stream.broken}")
        return data

    def readall(self) -> bytes:
        """Everything up to the end of the stream. If that does not come, what has arrived can still be read."""
        parts: list[bytes] = []
        try:
            while part := self._read_some(-1):
                parts.append(part)
        except BaseException:
            with self._reactor.turn:
                self._put_back(b"".join(parts))
            raise
        return b"".join(parts)

    def _put_back(self, data: bytes) -> None:
        """Under the lock."""
        if not self.closed:
            self._stream.put_back(data)
            self._channel.consumed(-len(data))

    def read_available(self, size: int = -1) -> bytes | None:
        """Up to `size` bytes of what is there now; None if there is nothing yet, b"" at the end. Never waits."""
        if self.closed:
            raise ValueError(f"stream {self.stream_id} is closed for reading")
        with self._reactor.lock:
            return self._take(size)

    def readinto(self, buffer: Any, /) -> int:
        """Fill the front of `buffer`; 0 at the end."""
        view = memoryview(buffer).cast("B")
        data = self._read_some(len(view))
        view[: len(data)] = data
        return len(data)

    def wait_readable(self, timeout: float | None = None) -> bool:
        """Wait until a read would not wait. False if `timeout` seconds pass first."""
        self._reactor.check_may_block()
        with self._reactor.lock:
            return self._waiter.wait_for(self._has_news, timeout)

    def close(self) -> None:
        """Read no more; what has arrived is given up. The peer is not told. Idempotent."""
        if not self.closed:
            with self._reactor.turn:
                self._channel.close_reader(self._stream)
                self._stream.broken = self._stream.broken or "it was closed for reading"
                self._reactor.engine.touched.add(self._stream)
        super().close()

    def __del__(self) -> None:
        """A reader that was dropped is not closed: the link's end does that."""
