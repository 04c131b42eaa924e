"""Two nodes joined in memory, with a clock that tests move and threads whose falling asleep they can await."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.loopback import Clock, Pair, Sleepers, install_clock, install_sleepers, joined


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return install_clock(monkeypatch)


@pytest.fixture
def sleepers(monkeypatch: pytest.MonkeyPatch) -> Sleepers:
    return install_sleepers(monkeypatch)


@pytest.fixture
def pair(clock: Clock, sleepers: Sleepers) -> Iterator[Pair]:
    with joined() as pair:
        pair.sleepers = sleepers
        yield pair
