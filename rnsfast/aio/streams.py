"""The asyncio face of streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rnsfast.aio.waiting import let_others_run, until
from rnsfast.node import streams as plain_streams


class StreamWriter:
    """The sending half of a stream, see `rnsfast.StreamWriter`. `async with` closes it, or gives it up on an exception.

    `timeout` is seconds that a call waits for progress, None for ever; then it raises TimeoutError. Use a writer from
    one task at a time. Compression runs in the loop's thread, at most 16 KiB in a row.
    """

    def __init__(self, writer: plain_streams.StreamWriter) -> None:
        self.sync = writer
        self.timeout: float | None = None

    @property
    def stream_id(self) -> int:
        """0 to 16383; the peer reads under the same number."""
        return self.sync.stream_id

    @property
    def buffered(self) -> int:
        """Bytes accepted and not yet handed to the window."""
        return self.sync.buffered

    @property
    def written(self) -> int:
        """Bytes accepted, also by a `write` that was cancelled."""
        return self.sync.written

    @property
    def sent(self) -> int:
        """Bytes handed to the window: on their way, or proved."""
        return self.sync.sent

    @property
    def room(self) -> int:
        """Bytes that `write` accepts now without waiting."""
        return self.sync.room

    @property
    def closed(self) -> bool:
        """Whether it was closed or given up."""
        return self.sync.closed

    async def write(self, data: Any) -> int:
        """Accept all of `data` (bytes-like), waiting while the buffer is full. Returns its length in bytes.

        If it is cancelled, the first part may have been accepted: `written` says how much.
        """
        writer, view, at = self.sync, memoryview(data).cast("B"), 0
        self._check()
        while at < len(view):
            if not writer.room:
                await self._wait(writer._is_writable)
            at += writer._put(view[at:], writer.room)
            if at < len(view):
                await let_others_run()
        return at

    async def drain(self) -> None:
        """Wait until at least half of the buffer is free."""
        self._check()
        await self._wait(self.sync._is_writable)

    async def flush(self) -> None:
        """Wait until everything accepted has been sent (not: proved)."""
        stream = self.sync._stream
        self._check()
        await self._wait(lambda: stream.is_sent or self.sync._finished or self.sync._channel.closed)

    async def _wait(self, predicate: Callable[[], Any]) -> None:
        if not await until(self.sync._waiter, predicate, self.timeout):
            raise TimeoutError(f"stream {self.stream_id} made no progress for {self.timeout} s")
        self._check()

    def _check(self) -> None:
        with self.sync._reactor.lock:
            self.sync._check()

    async def wait_delivered(self, timeout: float | None = None) -> bool:
        """Wait until the peer's node has proved everything accepted. False if `timeout` seconds pass first."""
        await until(self.sync._waiter, self.sync._is_settled, timeout)
        with self.sync._reactor.lock:
            return self.sync._is_delivered()

    def finish(self) -> None:
        """Queue the end of file behind the data; never waits."""
        self.sync.finish()

    async def close(self) -> None:
        """Send the end of file behind the data and wait until the peer has proved everything. Idempotent.

        If it is cancelled, data and end of file still go out. Raises LinkClosed if the link was closed before that,
        TimeoutError after `timeout` seconds without the proof.
        """
        writer = self.sync
        try:
            if not (writer._finished or writer.closed):
                writer.finish()
                if not await self.wait_delivered(self.timeout):
                    raise TimeoutError(f"the end of stream {self.stream_id} was not proved within {self.timeout} s")
        finally:
            writer._finished = True
            writer.close()

    def abort(self) -> None:
        """Give the stream up: what is buffered is thrown away and no end of file is sent. Idempotent."""
        self.sync.abort()

    async def __aenter__(self) -> StreamWriter:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:
            await self.close()
        else:
            self.abort()


class StreamReader:
    """The receiving half of a stream, see `rnsfast.StreamReader`. `async for` gives lines.

    If the link ends before the end of file, what has arrived can be read, and the next read raises StreamBroken. A read
    that is cancelled, that times out or that does not find what it wants leaves what has arrived to the next one.
    `timeout` is seconds that a read waits, None for ever; then it raises TimeoutError. Use a reader from one task at a
    time.
    """

    def __init__(self, reader: plain_streams.StreamReader) -> None:
        self.sync = reader
        self.timeout: float | None = None
        self._taken = bytearray()  # by a read that wanted more than there was

    @property
    def stream_id(self) -> int:
        """0 to 16383; the peer writes under the same number."""
        return self.sync.stream_id

    @property
    def available(self) -> int:
        """Bytes that a read returns without waiting."""
        return len(self._taken) + self.sync.available

    async def read(self, size: int = -1) -> bytes:
        """At least one and at most `size` bytes; everything up to the end for -1; b"" at the end."""
        if size < 0:
            return await self.readall()
        if self._taken and size:
            return self._cut(size)
        return await self._next(size)

    def _cut(self, size: int) -> bytes:
        data = bytes(self._taken[:size])
        del self._taken[:size]
        return data

    async def _next(self, size: int = -1) -> bytes:
        """What is there, waiting if there is nothing; b"" at the end."""
        reader = self.sync
        while (data := reader.read_available(size)) is None:
            if not await until(reader._waiter, reader._has_news, self.timeout):
                raise TimeoutError(f"nothing arrived on stream {self.stream_id} for {self.timeout} s")
        return data

    async def readexactly(self, size: int) -> bytes:
        """Exactly `size` bytes. asyncio.IncompleteReadError with what there was if the stream ends before."""
        while len(self._taken) < size:
            data = await self._next()
            if not data:
                raise asyncio.IncompleteReadError(self._cut(size), size)
            self._taken += data
        return self._cut(size)

    async def readline(self) -> bytes:
        """Up to and with the next newline; the rest of the stream if there is none; b"" at the end."""
        searched = 0
        while (end := self._taken.find(b"\n", searched)) < 0:
            searched = len(self._taken)
            data = await self._next()
            if not data:
                return self._cut(searched)
            self._taken += data
        return self._cut(end + 1)

    async def readall(self) -> bytes:
        """Everything up to the end of the stream."""
        while data := await self._next():
            self._taken += data
        return self._cut(len(self._taken))

    def read_available(self) -> bytes | None:
        """What is there now; None if there is nothing yet, b"" at the end. Never waits."""
        if self._taken:
            return self._cut(len(self._taken))
        return self.sync.read_available()

    async def wait_readable(self, timeout: float | None = None) -> bool:
        """Wait until a read would not wait. False if `timeout` seconds pass first."""
        return bool(self._taken) or await until(self.sync._waiter, self.sync._has_news, timeout)

    def __aiter__(self) -> StreamReader:
        return self

    async def __anext__(self) -> bytes:
        line = await self.readline()
        if not line:
            raise StopAsyncIteration
        return line

    def close(self) -> None:
        """Read no more; what has arrived is given up. The peer is not told. Idempotent."""
        self._taken.clear()
        self.sync.close()

    async def __aenter__(self) -> StreamReader:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()
