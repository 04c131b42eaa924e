"""Datagram sockets by the standard library, one call a packet, on every system.  Protocol 09, section 11.

The same contract and the same tests as the fast ways: drained until nothing is left, a refused packet costs itself.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Sequence
from typing import Any, Final, Protocol

from rnsfast.osio.contract import Caps, Kind, Peer, RxBatch
from rnsfast.osio.packets import PacketIO, Peers
from rnsfast.osio.peers import make_peer

BATCH: Final = 32  # packets
MAX_BATCH: Final = 128
SLOT: Final = 2048  # bytes

#: Windows: a datagram that was larger than the buffer, and an ICMP answer to an earlier one.
_WSAEMSGSIZE: Final = 10_040


class PortableSys(Protocol):
    """The calls of one socket. They raise OSError."""

    def recvfrom(self, size: int, /) -> tuple[bytes, Any]: ...
    def sendto(self, data: bytes, address: Any, /) -> int: ...
    def send(self, data: bytes, /) -> int: ...


class PortableDatagramIO(PacketIO):
    """One datagram socket, connected or not; takes it over. Arguments as for `LinuxDatagramIO`."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        max_batch: int = BATCH,
        max_packet: int = SLOT,
        peers: bool = True,
        sys: PortableSys | None = None,
    ) -> None:
        if not 1 <= max_batch <= MAX_BATCH:
            raise ValueError(f"a batch of {max_batch} packets is not within 1..{MAX_BATCH}")
        sock.setblocking(False)
        self._sock = sock
        self._sys: PortableSys = sock if sys is None else sys
        super().__init__(
            Caps(Kind.DATAGRAM, "portable", max_batch, max_batch, max_packet, peers, 1, True), int(sock.family)
        )

    def _number(self) -> int:
        return self._sock.fileno()

    def _shut(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _release(self) -> None:
        self._sock.close()

    def make_batch(self) -> RxBatch:
        return RxBatch(self.caps.max_rx, 0)  # packets come as bytes of their own

    def _take(self, into: RxBatch) -> int:
        error = take_plainly(self._sys, into, self.caps)
        # A call that found nothing was one, too.
        self.stats.rx_calls += into.count + into.dropped + (error != 0)
        return error

    def _submit_one(self, item: bytes, peer: Peer | None) -> int:
        try:
            if peer is None:
                self._sys.send(item)
            else:
                self._sys.sendto(item, peer.address)
        except OSError as error:
            return error.errno or errno.EIO
        return 0

    def _submit(self, items: Sequence[bytes], peers: Peers, first: int, stop: int) -> tuple[int, int]:
        for at in range(first, stop):
            error = self._submit_one(items[at], peers if peers is None or isinstance(peers, Peer) else peers[at])
            if error:
                return at - first, error
        return stop - first, 0


def take_plainly(sys: PortableSys | socket.socket, into: RxBatch, caps: Caps) -> int:
    """One packet a call, until there are no more or the batch is full. 0, or the errno that ended it."""
    error = _read_plainly(sys, into, caps)
    peers = into.peers
    if peers and all(peer == peers[0] for peer in peers):
        into.uniform = peers[0]
    return error


def _read_plainly(sys: PortableSys | socket.socket, into: RxBatch, caps: Caps) -> int:
    limit = caps.max_packet
    while into.count + into.dropped < into.capacity:
        try:
            data, address = sys.recvfrom(limit + 1)
        except OSError as error:
            if error.errno == _WSAEMSGSIZE:
                into.dropped += 1
                continue
            return error.errno or errno.EIO
        if not 0 < len(data) <= limit:
            into.dropped += 1
            continue
        into.add(data)
        if caps.peers:
            into.peers.append(_peer_of(address))
    return 0


def _peer_of(address: Any) -> Peer | None:
    """From an address of the `socket` module; None for senders without one."""
    if not isinstance(address, tuple):
        return None
    host = str(address[0]).partition("%")[0]
    return make_peer(host, address[1], scope=address[3] if len(address) == 4 else 0)
