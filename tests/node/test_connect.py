"""A link request that nobody answers: the path is given up, asked for anew, and the same call tries again.

Field case F6, step 2, for the loops of `Node.connect` and its asyncio twin; what the engine does is in `tests/sim`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rnsfast import Identity, Inbox, LinkTimeout, aio
from rnsfast.engine.linkstate import initiator_timeout
from rnsfast.wire.packet import LINKREQUEST
from rnsfast.wire.pathrequest import PATH_REQUEST_DESTINATION
from tests.loopback import PATIENCE, Clock, Pair, Worker, install_clock, joined

ATTEMPT = initiator_timeout(1, None) + 1.0  # seconds after which an attempt over one hop has failed


def is_request(raw: bytes) -> bool:
    return raw[0] & 3 == LINKREQUEST


def is_question(raw: bytes) -> bool:
    return raw[2:18] == PATH_REQUEST_DESTINATION


class Known:
    """Two nodes, one of which knows a path to the other; and what the first has sent since."""

    def __init__(self, pair: Pair, clock: Clock) -> None:
        self.pair, self.clock = pair, clock
        self.inbox: Inbox = pair.b.register(Identity(), "test", "far")
        pair.a.request_path(self.inbox.hash, PATIENCE)
        self.sent: list[bytes] = []
        self._requested = threading.Semaphore(0)
        pair.to_b.on_carry = self._note

    def _note(self, packets: list[bytes]) -> None:
        self.sent += packets
        for _ in filter(is_request, packets):
            self._requested.release()

    def await_request(self) -> None:
        """Wait until a link request has been sent that nobody has waited for yet."""
        assert self._requested.acquire(timeout=PATIENCE), "no link request"

    def count(self, match: Callable[[bytes], bool]) -> int:
        return sum(map(match, self.sent))

    def lose_requests(self, count: int) -> None:
        """The first `count` link requests vanish."""
        self.pair.to_b.drop = lambda raw: is_request(raw) and self.count(is_request) <= count

    def connect(self, timeout: float) -> Any:
        return self.pair.a.connect(self.inbox.hash, "test", "far", timeout=timeout)

    def connect_in_a_loop(self, timeout: float) -> Any:
        async def call() -> Any:
            return await aio.Node.wrap(self.pair.a).connect(self.inbox.hash, "test", "far", timeout=timeout)

        return asyncio.run(call())


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Iterator[Known]:
    clock = install_clock(monkeypatch)
    with joined() as pair:
        yield Known(pair, clock)


FACES = pytest.mark.parametrize("face", [Known.connect, Known.connect_in_a_loop], ids=["threads", "asyncio"])


@FACES
@pytest.mark.parametrize("lost", [1, 2])
def test_one_call_tries_again_over_a_path_asked_for_anew(known: Known, face: Any, lost: int) -> None:
    known.lose_requests(lost)
    call = Worker(face, known, PATIENCE)
    for attempt in range(lost):
        known.await_request()
        asked = known.count(is_question)
        assert attempt > 0 or not asked, "a path that is known is used"
        known.clock.advance(ATTEMPT, known.pair.a)
        assert known.count(is_question) > asked, "at the very moment the path is given up"
    assert call.result().is_active
    assert known.count(is_request) == lost + 1


@FACES
def test_a_limit_for_one_attempt_allows_one(known: Known, face: Any) -> None:
    known.lose_requests(1)
    with pytest.raises(LinkTimeout):
        face(known, 0.05)
    assert known.count(is_request) == 1
    assert not known.pair.a._reactor.engine.links
    assert face(known, PATIENCE).is_active
