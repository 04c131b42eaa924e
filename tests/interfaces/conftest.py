"""A runtime with virtual time, and every variant of the back end."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from rnsfast.osio.stream import LinuxCalls
from tests.fakes import FakeRuntime, pair

VARIANTS = ["portable", *(["linux"] if LinuxCalls.usable() else [])]


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("RNSFAST_OSIO", request.param)
    return str(request.param)


@pytest.fixture
def runtime(variant: str) -> Iterator[FakeRuntime]:
    made = FakeRuntime()
    yield made
    made.close()


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    yield from pair()
