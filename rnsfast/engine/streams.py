"""Byte streams over a channel: what is waiting to be sent, and what has arrived.  Protocol 05, sections 8 and 9.

Streams pull.  A writer puts bytes into a bounded buffer; the channel takes the next chunk from it when a proof has made
room, on the thread that handled the proof.  A reader finds everything that has arrived in one piece.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from rnsfast.wire.stream import MAX_CHUNK, MAX_STREAM_ID

SEND_BUFFER: Final = 524288  # bytes a writer may be ahead of the window
JOINED: Final = 256  # bytes; received chunks shorter than this are joined with their neighbours
EOF_BIT: Final = 0x8000
COMPRESSED_BIT: Final = 0x4000


class Packed:
    """A compressed chunk, ready to be one message. It stands for `size` plain bytes."""

    __slots__ = ("body", "size")

    def __init__(self, body: bytes, size: int) -> None:
        self.body, self.size = body, size


class SendStream:
    """The sending half of one stream id. All sizes are plain bytes, before compression."""

    __slots__ = (
        "_chunks",
        "_head",
        "_offset",
        "broken",
        "buffered",
        "closed",
        "eof_sent",
        "limit",
        "low",
        "owner",
        "stream_id",
        "unproved",
    )

    def __init__(self, stream_id: int, limit: int = SEND_BUFFER) -> None:
        if not 0 <= stream_id <= MAX_STREAM_ID:
            raise ValueError(f"stream id {stream_id} is not within 0..{MAX_STREAM_ID}")
        self.stream_id = stream_id
        self.limit = limit
        self.low = limit // 2  # a waiting writer is woken when the buffer falls to this
        self.buffered = 0
        self.closed = False  # end of file is queued behind the data
        self.eof_sent = False
        self.unproved = 0  # messages in the window
        self.broken: str | None = None  # why nothing can be sent any more
        self.owner: Any = None  # the writer, for the runtime
        self._chunks: deque[memoryview | Packed] = deque()  # views of what the writers gave, not copied
        self._offset = 0  # of the first chunk, if it is plain
        self._head = stream_id.to_bytes(2, "big")

    @property
    def room(self) -> int:
        """Bytes that `put` accepts now."""
        return max(0, self.limit - self.buffered)

    @property
    def has_work(self) -> bool:
        """Something is waiting for the window: data, or the end of file."""
        return bool(self._chunks) or (self.closed and not self.eof_sent)

    @property
    def is_sent(self) -> bool:
        """Everything put in, and the end of file if queued, has been handed to the window."""
        return not self.has_work

    @property
    def is_delivered(self) -> bool:
        """Everything put in, and the end of file if queued, has been proved by the peer."""
        return not self.has_work and not self.unproved

    def put(self, data: bytes | memoryview | Packed) -> None:
        """Append. The caller has looked at `room`; a compressed chunk may exceed it, by less than MAX_CHUNK.

        Plain data is not copied: a view must be one of something that does not change.
        """
        size = data.size if isinstance(data, Packed) else len(data)
        if size:
            self._chunks.append(data if isinstance(data, Packed) else memoryview(data))
            self.buffered += size

    def close(self) -> None:
        """Queue the end of file behind the data."""
        self.closed = True

    def clear(self) -> None:
        """Throw away what has not been handed to the window, the end of file too."""
        self._chunks.clear()
        self._offset = self.buffered = 0
        self.closed = self.eof_sent

    def take(self, room: int) -> tuple[bytes, bytes | memoryview]:
        """The next message's stream header, and its body of at most `room` bytes. Only if `has_work`."""
        chunks = self._chunks
        if not chunks:
            self.eof_sent = True
            return self._header(EOF_BIT), b""
        first = chunks[0]
        if isinstance(first, Packed):
            chunks.popleft()
            self.buffered -= first.size
            return self._header(COMPRESSED_BIT | self._eof_if_last()), first.body
        room = min(room, MAX_CHUNK)
        data: bytes | memoryview
        end = self._offset + room
        if end < len(first):
            data = first[self._offset : end]
            self._offset = end
        else:
            data = rest = first[self._offset :] if self._offset else first
            chunks.popleft()
            self._offset = 0
            if len(rest) < room and chunks and type(chunks[0]) is memoryview:
                data = self._gather(rest, room)
        self.buffered -= len(data)
        if chunks or not self.closed:
            return self._head, data
        return self._header(self._eof_if_last()), data

    def _gather(self, data: memoryview, room: int) -> bytes:
        """Small writes share a message."""
        parts = [data]
        have = len(data)
        chunks = self._chunks
        while have < room and chunks:
            chunk = chunks[0]
            if isinstance(chunk, Packed):
                break
            if len(chunk) > room - have:
                self._offset = room - have
                parts.append(chunk[: self._offset])
                break
            parts.append(chunk)
            have += len(chunk)
            chunks.popleft()
        return b"".join(parts)

    def _eof_if_last(self) -> int:
        if self._chunks or not self.closed:
            return 0
        self.eof_sent = True
        return EOF_BIT

    def _header(self, bits: int) -> bytes:
        return (self.stream_id | bits).to_bytes(2, "big") if bits else self._head


class ReceiveStream:
    """The receiving half of one stream id: chunks in order, an end, or an error that is not an end."""

    __slots__ = ("_chunks", "_offset", "broken", "buffered", "eof", "owner", "stream_id")

    def __init__(self, stream_id: int) -> None:
        self.stream_id = stream_id
        self.buffered = 0
        self.eof = False  # the peer closed its writer; data after it is tolerated and can be read
        self.broken: str | None = None  # why the stream is cut off
        self.owner: Any = None  # the reader, for the runtime
        self._chunks: deque[bytes] = deque()
        self._offset = 0

    def put(self, data: bytes) -> None:
        """A chunk has arrived. Small ones are joined, so that memory is bounded by bytes and not by messages."""
        if data:
            chunks = self._chunks
            if chunks and len(data) < JOINED and len(chunks[-1]) < JOINED:
                chunks[-1] += data
            else:
                chunks.append(data)
            self.buffered += len(data)

    def put_back(self, data: bytes) -> None:
        """What was taken last is given back: it stands before everything else again."""
        if data:
            chunks = self._chunks
            if self._offset:
                chunks[0] = chunks[0][self._offset :]
                self._offset = 0
            chunks.appendleft(data)
            self.buffered += len(data)

    def take(self, size: int = -1) -> bytes | None:
        """Up to `size` bytes (all for -1); None if there is nothing yet, b"" at the end of the stream."""
        chunks = self._chunks
        if not chunks:
            return b"" if self.eof or size == 0 else None
        if size < 0 or size >= self.buffered:
            if self._offset:
                chunks[0] = chunks[0][self._offset :]
                self._offset = 0
            data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
            chunks.clear()
        else:
            data = self._take_some(size)
        self.buffered -= len(data)
        return data

    def _take_some(self, size: int) -> bytes:
        parts: list[bytes] = []
        chunks = self._chunks
        while size:
            first, start = chunks[0], self._offset
            part = first[start : start + size]
            parts.append(part)
            size -= len(part)
            if start + len(part) == len(first):
                chunks.popleft()
                self._offset = 0
            else:
                self._offset = start + len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)
