"""Make the back ends of macOS on stand-ins; everything is closed, and the scripts checked, when the stack is left."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from typing import Any

from rnsfast.osio.darwin import DarwinDatagramIO
from rnsfast.osio.msgx import MsgxIO
from rnsfast.osio.utun import UtunIO
from tests.osio.darwin_fakes import DONTWAIT, Kernel, Make, Scripted


def _follow(stack: ExitStack, io: MsgxIO, calls: Scripted) -> None:
    receives = ("recvmsg_x", "recvfrom", "readv")
    calls.lock_of = lambda name: (io._rx_lock if name in receives else io._tx_lock).locked()

    def check() -> None:
        assert calls.done(), f"the script was not followed to its end: {calls.steps}"
        assert all(calls.locked), "a call without the lock"
        assert set(calls.flags) <= {DONTWAIT}, "a call that may block"

    stack.callback(check)
    stack.callback(io.close)


def scripted_datagrams(stack: ExitStack) -> Make:
    """Back ends whose calls follow a script: on UDP sockets that never see a packet."""

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
        _follow(stack, io, calls)
        return io, calls

    return make


def datagram_pairs(stack: ExitStack) -> Make:
    """Two back ends over a connected AF_UNIX pair, moved by the stand-in kernel."""

    def make(
        limit: int | None = None, plain: bool = False, **options: Any
    ) -> tuple[DarwinDatagramIO, DarwinDatagramIO, Kernel]:
        kernel = _kernel(limit, plain)
        left, right = (
            DarwinDatagramIO(sock, sys=kernel, **options)
            for sock in socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        )
        stack.callback(left.close)
        stack.callback(right.close)
        return left, right, kernel

    return make


def scripted_devices(stack: ExitStack) -> Make:
    """utun back ends whose calls follow a script."""

    def make(*, missing: tuple[str, ...] = (), options: Any = None, **steps: Any) -> tuple[UtunIO, Scripted]:
        calls = Scripted(missing=missing, **steps)
        io = UtunIO(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM), sys=calls, **(options or {}))
        _follow(stack, io, calls)
        return io, calls

    return make


def devices(stack: ExitStack) -> Make:
    """A utun back end, the far end of its socket, and the kernel between them."""

    def make(limit: int | None = None, plain: bool = False, **options: Any) -> tuple[UtunIO, socket.socket, Kernel]:
        kernel = _kernel(limit, plain)
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        io = UtunIO(near, sys=kernel, **options)
        far.setblocking(False)
        stack.callback(io.close)
        stack.callback(far.close)
        return io, far, kernel

    return make


def _kernel(limit: int | None, plain: bool) -> Kernel:
    kernel = Kernel(limit)
    if plain:
        kernel.recvmsg_x = kernel.sendmsg_x = None
    return kernel
