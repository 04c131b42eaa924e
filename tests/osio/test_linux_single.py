"""A packet that goes alone after a batch that went in runs."""

from __future__ import annotations

import errno
import socket

import pytest

from rnsfast.osio.contract import TxState
from rnsfast.osio.linux import Libc, LinuxDatagramIO
from rnsfast.osio.peers import make_peer

pytestmark = pytest.mark.skipif(not Libc.usable(), reason="the structures are those of 64-bit little-endian Linux")


class RefusesSingly(Libc):
    """Every plain send fails with `error`; everything else is real."""

    def __init__(self, error: int) -> None:
        super().__init__()
        self.error, self.plain = error, 0
        self.sendto = self._refuse
        self.get_errno = lambda: error

    def _refuse(self, *arguments: object) -> int:
        self.plain += 1
        return -1


@pytest.mark.parametrize("error", [errno.EIO, errno.EINVAL, errno.EMSGSIZE, errno.EPERM])
def test_its_failure_says_nothing_about_the_runs_before_it(error: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as far:
        far.bind(("127.0.0.1", 0))
        peer = make_peer(*far.getsockname())
        calls = RefusesSingly(error)
        io = LinuxDatagramIO(socket.socket(socket.AF_INET, socket.SOCK_DGRAM), sys=calls)
        if not io.segmentation:
            io.close()
            pytest.skip("this kernel cuts no runs")
        try:
            assert io.send([b"x" * 500] * 10, peer).sent == 10
            result = io.send_one(b"y" * 500, peer)
            assert (result.state, result.rejected) == (TxState.DONE, ((0, error),))
            assert calls.plain == 1
            assert io.segmentation
            before = io.stats.tx_calls
            assert io.send([b"x" * 500] * 10, peer).sent == 10
            assert io.stats.tx_calls == before + 1
        finally:
            io.close()


@pytest.mark.parametrize("count", [2, 63, 64, 127, 128])
def test_runs_as_long_as_this_kernel_takes_them(count: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as far:
        far.bind(("127.0.0.1", 0))
        far.settimeout(5)
        peer = make_peer(*far.getsockname())
        io = LinuxDatagramIO(socket.socket(socket.AF_INET, socket.SOCK_DGRAM), max_batch=128)
        could = io.segmentation
        try:
            items = [bytes((n,)) * 64 for n in range(count)]
            assert io.send(items, peer).sent == count and io.stats.tx_calls == 1
            assert [far.recv(100) for _ in range(count)] == items
            assert io.segmentation is could, "the kernel refused what its release promises"
        finally:
            io.close()
