"""Back ends over the fake Registered I/O, with its eyes on their locks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rnsfast.osio.contract import Peer
from rnsfast.osio.peers import make_peer
from rnsfast.osio.rio import RioDatagramIO
from tests.osio.fake_rio import FakeRio

ALICE = make_peer("10.0.0.1", 4242, flavour="windows")
BOB = make_peer("10.0.0.2", 4243, flavour="windows")


@contextmanager
def opened(rio: FakeRio, **options: Any) -> Iterator[RioDatagramIO]:
    """A back end that is closed afterwards, when everything must have been given back."""
    io = RioDatagramIO(rio.socket(), sys=rio, **options)
    rio.locked = io._post_lock.locked
    rio.read_locked = io._rx_lock.locked
    rio.write_locked = io._tx_lock.locked
    try:
        yield io
    finally:
        io.close()
    assert not rio.events, "events were left open"
    assert not rio.queues
    assert not rio.open_sockets


def packets(count: int, size: int = 40) -> list[bytes]:
    return [bytes([i % 256]) * size for i in range(count)]


def name28(peer: Peer) -> bytes:
    return peer.raw.ljust(28, b"\0")


def sent(rio: FakeRio) -> list[bytes]:
    return [data for data, _ in rio.wire]
