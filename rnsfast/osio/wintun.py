"""TUN devices on Windows by Wintun.  Protocol 09, section 10.3.

    receive     packets lie in a ring: each is copied out and released at once, until there are no more
    send        room is asked for, filled and given; a full ring costs the packet that met it, and no other

Not verified on Windows beyond what `tests/osio/test_native_windows.py` says when it is run there.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
from collections.abc import Sequence
from typing import Final, Protocol

from rnsfast.osio.contract import Caps, IOClosed, Kind, Peer, RxBatch
from rnsfast.osio.device import DeviceError
from rnsfast.osio.layouts_windows import (
    ERROR_BUFFER_OVERFLOW,
    ERROR_HANDLE_EOF,
    ERROR_INVALID_DATA,
    ERROR_NO_MORE_ITEMS,
    WINTUN_CAPACITY,
    WINTUN_MAX_PACKET,
)
from rnsfast.osio.packets import Peers
from rnsfast.osio.signals import EventSys, SignalIO
from rnsfast.osio.verdicts import Verdict

BATCH: Final = 32  # packets; protocol 09, section 11
MAX_BATCH: Final = 64
VERSIONS: Final = frozenset({4, 6})
ENDED: Final = frozenset({ERROR_HANDLE_EOF, ERROR_INVALID_DATA})


class WintunSys(EventSys, Protocol):
    """Wintun and events. Adapters, sessions and addresses are integers; 0 is failure and leaves an error number."""

    def create_adapter(self, name: str) -> int: ...
    def close_adapter(self, adapter: int) -> None: ...
    def start_session(self, adapter: int, capacity: int) -> int: ...
    def end_session(self, session: int) -> None: ...
    def read_event(self, session: int) -> int:
        """Set while there is something to read. It belongs to the session and is never closed."""

    def receive(self, session: int) -> tuple[int, int]:
        """Address and size of the next packet."""

    def get_last_error(self) -> int: ...
    def release(self, session: int, address: int, /) -> object: ...
    def allocate_packet(self, session: int, size: int, /) -> int: ...
    def send_packet(self, session: int, address: int, /) -> object: ...


class WintunIO(SignalIO):
    """The packets of one adapter, which is made for it and vanishes with it. DeviceError if it cannot be made.

    Not pollable: a thread calls `recv(batch, timeout=None)` until IOClosed.

    Args:
        name: of the adapter.
        max_batch: packets a batch, 1..64.
        max_packet: bytes of the largest packet; larger ones are dropped.
        sys: other system calls, for tests.
    """

    def __init__(
        self,
        name: str,
        *,
        max_batch: int = BATCH,
        max_packet: int = WINTUN_MAX_PACKET,
        sys: WintunSys | None = None,
    ) -> None:
        if not 1 <= max_batch <= MAX_BATCH:
            raise ValueError(f"a batch of {max_batch} packets is not within 1..{MAX_BATCH}")
        limit = min(max_packet, WINTUN_MAX_PACKET)
        system = self._sys = _windows() if sys is None else sys
        self._ended = False  # the driver ended the session
        # The first try fails if an adapter was left behind by a process that did not close it.
        self._adapter = system.create_adapter(name) or system.create_adapter(name)
        if not self._adapter:
            code = system.get_last_error()
            hint = "; administrator rights are needed" if code == 5 else ""
            raise DeviceError(f"the Wintun adapter {name!r} cannot be made (error {code}){hint}")
        self._session = system.start_session(self._adapter, WINTUN_CAPACITY)
        if not self._session:
            code = system.get_last_error()
            system.close_adapter(self._adapter)
            raise DeviceError(f"the Wintun adapter {name!r} cannot be started (error {code})")
        with contextlib.ExitStack() as undo:
            undo.callback(self._free)
            self._event = system.read_event(self._session)
            caps = Caps(Kind.TUN, "win-wintun", max_batch, max_batch, limit, False, 1, pollable=False)
            super().__init__(caps, None, system)
            undo.pop_all()

    def _free(self) -> None:
        self._sys.end_session(self._session)
        self._sys.close_adapter(self._adapter)

    def _arm_read(self) -> int:
        return self._event

    # Receiving

    def make_batch(self) -> RxBatch:
        return RxBatch(self.caps.max_rx, 0)  # packets come as bytes of their own

    def _take(self, into: RxBatch) -> int:
        if self._ended:
            raise IOClosed
        receive, release, session = self._sys.receive, self._sys.release, self._session
        limit, error = self.caps.max_packet, 0
        found: list[bytes] = []
        self.stats.rx_calls += 1
        for _ in range(min(self.caps.max_rx, into.capacity)):
            address, size = receive(session)
            if not address:
                code = self._sys.get_last_error()
                if code == ERROR_HANDLE_EOF:
                    self._ended = True  # told after what came before it
                else:
                    error = errno.EAGAIN if code == ERROR_NO_MORE_ITEMS else errno.EIO
                break
            if 0 < size <= limit:
                found.append(ctypes.string_at(address, size))
            else:
                into.dropped += 1
            release(session, address)
        into.add_many(found)
        kinds = {packet[0] >> 4 for packet in found}
        into.uniform = kinds.pop() if len(kinds) == 1 and kinds <= VERSIONS else None
        return error

    # Sending

    def _is_valid(self, item: bytes) -> bool:
        return 0 < len(item) <= self.caps.max_packet and item[0] >> 4 in VERSIONS

    def _submit_one(self, item: bytes, peer: Peer | None) -> int:
        address = self._sys.allocate_packet(self._session, len(item))
        if not address:
            code = self._sys.get_last_error()
            return errno.ENOBUFS if code == ERROR_BUFFER_OVERFLOW else code or errno.EIO
        ctypes.memmove(address, item, len(item))
        self._sys.send_packet(self._session, address)
        return 0

    def _submit(self, items: Sequence[bytes], peers: Peers, first: int, stop: int) -> tuple[int, int]:
        for at in range(first, stop):
            if error := self._submit_one(items[at], None):
                return at - first, error
        return stop - first, 0

    def _judge(self, error: int, items: Sequence[bytes], at: int) -> tuple[Verdict, int]:
        # Above all the full ring: nothing tells when there is room again, so nobody waits and nothing is repeated.
        return Verdict.BROKEN if error in ENDED else Verdict.REJECT, 1


def _windows() -> WintunSys:
    from rnsfast.osio.windows import WintunWindows

    try:
        return WintunWindows()
    except OSError as error:
        raise DeviceError(f"Wintun cannot be loaded: {error.strerror or error}") from error
