"""Two nodes joined in memory, their reactors' clock, and gateways on them whose devices are socket pairs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gateway.tunnel import Tunnel
from tests.loopback import Clock, install_clock, joined


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return install_clock(monkeypatch)


@pytest.fixture
def tunnel(clock: Clock) -> Iterator[Tunnel]:
    with joined() as pair:
        made = Tunnel(pair, clock)
        try:
            yield made
        finally:
            made.close()
