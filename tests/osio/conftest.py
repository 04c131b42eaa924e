"""Streams run with every variant this system has; the back ends of macOS run on stand-ins."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from rnsfast.osio.stream import LinuxCalls
from rnsfast.osio.verdicts import forget_what_was_logged
from tests.fakes import pair
from tests.osio.darwin_fakes import Make
from tests.osio.darwin_makers import datagram_pairs, devices, scripted_datagrams, scripted_devices

VARIANTS = ["portable", *(["linux"] if LinuxCalls.usable() else [])]


#: Markers of tests that need one system. They are skipped elsewhere, and say why.
PLATFORMS = {"linux": "linux", "darwin": "darwin", "darwin_root": "darwin", "windows": "win32"}
HERE = sys.platform


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, platform in PLATFORMS.items():
        if item.get_closest_marker(marker) and platform != HERE:
            pytest.skip(f"runs on {platform} only, this is {HERE}")
    if item.get_closest_marker("darwin_root") and os.geteuid() != 0:
        pytest.skip("needs root")


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
def scripted_darwin(stack: ExitStack) -> Make:
    return scripted_datagrams(stack)


@pytest.fixture
def darwin_pair(stack: ExitStack) -> Make:
    return datagram_pairs(stack)


@pytest.fixture
def scripted_utun(stack: ExitStack) -> Make:
    return scripted_devices(stack)


@pytest.fixture
def utun(stack: ExitStack) -> Make:
    return devices(stack)
