"""Streams run with every variant this system has; the back ends of macOS run on stand-ins."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from rnsfast.osio.darwin import DarwinDatagramIO
from rnsfast.osio.stream import LinuxCalls
from rnsfast.osio.verdicts import forget_what_was_logged
from tests.fakes import pair
from tests.osio.darwin_fakes import DONTWAIT, Kernel, Scripted

VARIANTS = ["portable", *(["linux"] if LinuxCalls.usable() else [])]


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("RNSFAST_OSIO", request.param)
    return str(request.param)


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    yield from pair()


@pytest.fixture(autouse=True)
def fresh_log() -> Iterator[None]:
    forget_what_was_logged()
    yield
    forget_what_was_logged()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as closing:
        yield closing


@pytest.fixture
def scripted_darwin(stack: ExitStack) -> Callable[..., tuple[DarwinDatagramIO, Scripted]]:
    """Makes back ends whose calls follow a script: on UDP sockets that never see a packet."""

    def make(
        *,
        connected: bool = True,
        family: int = socket.AF_INET,
        missing: tuple[str, ...] = (),
        options: Any = None,
        **steps: Any,
    ) -> tuple[DarwinDatagramIO, Scripted]:
        sock = socket.socket(family, socket.SOCK_DGRAM)
        if connected:
            sock.connect(("127.0.0.1", 9) if family == socket.AF_INET else ("::1", 9))
        calls = Scripted(missing=missing, **steps)
        io = DarwinDatagramIO(sock, sys=calls, **(options or {}))
        locks = {"recvmsg_x": io._rx_lock, "recvfrom": io._rx_lock, "sendmsg_x": io._tx_lock, "sendto": io._tx_lock}
        calls.lock_of = lambda name: locks[name].locked()
        stack.callback(check, calls)
        stack.callback(io.close)
        return io, calls

    def check(calls: Scripted) -> None:
        assert calls.done(), f"the script was not followed to its end: {calls.steps}"
        assert all(calls.locked), "a call without the lock"
        assert set(calls.flags) <= {DONTWAIT}, "a call that may block"

    return make


@pytest.fixture
def darwin_pair(stack: ExitStack) -> Callable[..., tuple[DarwinDatagramIO, DarwinDatagramIO, Kernel]]:
    """Makes two back ends over a connected AF_UNIX pair, moved by the stand-in kernel."""

    def make(limit: int | None = None, plain: bool = False, **options: Any) -> Any:
        kernel = Kernel(limit)
        if plain:
            kernel.recvmsg_x = kernel.sendmsg_x = None
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        ios = [DarwinDatagramIO(sock, sys=kernel, **options) for sock in (left, right)]
        for io in ios:
            stack.callback(io.close)
        return ios[0], ios[1], kernel

    return make
