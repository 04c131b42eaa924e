"""A model of Wintun: rings of byte strings, and every rule about who may use what.  Protocol 09, section 14.2."""

from __future__ import annotations

import ctypes
from collections import deque
from typing import Any

from tests.osio.fake_events import FakeEvents

INVALID_DATA, HANDLE_EOF, BUFFER_OVERFLOW, NO_MORE_ITEMS = 13, 38, 111, 259


class FakeWintun(FakeEvents):
    def __init__(self, room: int = 1 << 20) -> None:
        super().__init__()
        self.incoming: deque[bytes | int] = deque()  # packets; a number is an error, told once or, as 38 and 13, always
        self.room = room  # packets the send ring has room for
        self.sent: list[bytes] = []
        self.error = 0
        self.adapter_errors: list[int] = []  # of the next tries to make one
        self.session_error = 0
        self.adapter = self.session = 0
        self.event = 0
        self.out: dict[int, Any] = {}  # received and not yet released
        self.filling: dict[int, Any] = {}  # allocated and not yet sent
        self.released = self.received = 0
        self.allocations: list[int] = []
        self.send_errors: dict[int, int] = {}  # the k-th allocation: error

    # Adapter and session

    def create_adapter(self, name: str) -> int:
        self.log.append(f"create {name}")
        if self.adapter_errors and (error := self.adapter_errors.pop(0)):
            self.error = error
            return 0
        self.adapter = self.new_handle()
        return self.adapter

    def close_adapter(self, adapter: int) -> None:
        assert adapter == self.adapter != 0
        assert not self.session, "the adapter was closed before its session"
        self.adapter = 0
        self.log.append("close adapter")

    def start_session(self, adapter: int, capacity: int) -> int:
        assert adapter == self.adapter != 0
        assert 0x20000 <= capacity <= 0x4000000
        assert capacity & (capacity - 1) == 0
        if self.session_error:
            self.error = self.session_error
            return 0
        self.session = self.new_handle()
        self.event = self.create_event(False)
        return self.session

    def end_session(self, session: int) -> None:
        self._check(session)
        assert not self.out, "packets were not released"
        assert not self.filling, "packets were allocated and not sent"
        self.session = 0
        del self.events[self.event]  # it belongs to the session
        self.log.append("end session")

    def _check(self, session: int) -> None:
        assert session == self.session != 0, "the session is not open"

    def read_event(self, session: int) -> int:
        self._check(session)
        return self.event

    def get_last_error(self) -> int:
        return self.error

    # Receiving

    def arrive(self, *packets: bytes | int) -> None:
        with self.changed:
            self.incoming.extend(packets)
            self.set_event(self.event)

    def receive(self, session: int) -> tuple[int, int]:
        self._check(session)
        with self.changed:
            if not self.incoming:
                self.error = NO_MORE_ITEMS
                return 0, 0xDEAD
            entry = self.incoming[0]
            if isinstance(entry, int):
                self.error = entry
                if entry not in (HANDLE_EOF, INVALID_DATA):
                    self.incoming.popleft()
                return 0, 0xDEAD
            self.incoming.popleft()
            memory = ctypes.create_string_buffer(entry, len(entry))
            address = ctypes.addressof(memory)
            self.out[address] = memory
            self.received += 1
            assert len(self.out) == 1, "a packet is kept while the next one is taken"
            return address, len(entry)

    def release(self, session: int, address: int, /) -> None:
        self._check(session)
        memory = self.out.pop(address)  # KeyError: released twice, or never received
        ctypes.memset(address, 0xDD, len(memory))
        self.released += 1

    # Sending

    def allocate_packet(self, session: int, size: int, /) -> int:
        self._check(session)
        assert 0 < size <= 0xFFFF
        with self.changed:
            self.allocations.append(size)
            if error := self.send_errors.pop(len(self.allocations), 0):
                self.error = error
                return 0
            if len(self.sent) >= self.room:
                self.error = BUFFER_OVERFLOW
                return 0
            memory = ctypes.create_string_buffer(size)
            address = ctypes.addressof(memory)
            self.filling[address] = memory
            return address

    def send_packet(self, session: int, address: int, /) -> None:
        self._check(session)
        self.sent.append(self.filling.pop(address).raw)
