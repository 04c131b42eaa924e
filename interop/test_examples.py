"""The example peers, stock against stock: what they print is the same whichever node carries it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from interop.harness import HERE, Peer, Workspace, backbone_client, backbone_server, free_port, stock_python


@contextmanager
def example(space: Workspace, program: str) -> Iterator[list[str]]:
    """Run the server role and yield the beginning of the client's command line."""
    port, path = free_port(), str(HERE / "examples" / program)
    here = space.config("server", [backbone_server(port)])
    there = space.config("client", [backbone_client(port)])
    command = [stock_python(), path, "server", "--config", str(here)]
    with Peer(command, here, ready="line", takes_commands=False) as server:
        yield [stock_python(), path, "client", "--config", str(there), server.hello["text"]]


def run(command: list[str], *arguments: str, given: str = "") -> str:
    done = subprocess.run([*command, *arguments], input=given, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_link(space: Workspace) -> None:
    with example(space, "link_peer.py") as client:
        assert run(client, "abc", "xyz") == "stranger cba\nstranger zyx\n"
        name, word = run(client, "abc", "--identify").split()
        assert len(name) == 32 and word == "cba"


def test_channel(space: Workspace) -> None:
    with example(space, "channel_peer.py") as client:
        assert run(client, "1", "2", "39") == "1 1\n2 3\n3 42\n"


@pytest.mark.parametrize("lines", [0, 1, 5000])
def test_buffer(space: Workspace, lines: int) -> None:
    text = "".join(f"line {number} of the text\n" for number in range(lines))
    with example(space, "buffer_peer.py") as client:
        assert run(client, given=text) == text.upper()
