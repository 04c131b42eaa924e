"""The example peers, written for the stock API, with our node in the other role."""

from __future__ import annotations

import queue
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from interop.harness import CLIENTS, HERE, SERVERS, Peer, Workspace, free_port, stock_python
from interop.ours import LIMIT, Task, pour
from rnsfast import Identity, Inbox, Link, Node

APP = "interopexample"
KINDS = ["tcp", "backbone"]


class Term:
    MSGTYPE = 0x0201

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def pack(self) -> bytes:
        return struct.pack(">q", self.value)

    def unpack(self, raw: bytes) -> None:
        (self.value,) = struct.unpack(">q", raw[:8])


class Sum:
    MSGTYPE = 0x0202

    def __init__(self, count: int = 0, total: int = 0) -> None:
        self.count, self.total = count, total

    def pack(self) -> bytes:
        return struct.pack(">Iq", self.count, self.total)

    def unpack(self, raw: bytes) -> None:
        self.count, self.total = struct.unpack(">Iq", raw[:12])


@contextmanager
def their_server(space: Workspace, kind: str, program: str, aspect: str) -> Iterator[Link]:
    """Our link to the example's server."""
    port = free_port()
    config = space.config("server", [SERVERS[kind](port)])
    command = [stock_python(), str(HERE / "examples" / program), "server", "--config", str(config)]
    with (
        Peer(command, config, ready="line", takes_commands=False) as server,
        Node(space.config("ours", [CLIENTS[kind](port)]), strict=True) as node,
        node.connect(bytes.fromhex(server.hello["text"]), APP, aspect, timeout=LIMIT) as link,
    ):
        yield link


@contextmanager
def our_server(space: Workspace, kind: str, program: str, aspect: str) -> Iterator[tuple[Inbox, list[str]]]:
    """Our destination, and the beginning of the example client's command line."""
    port = free_port()
    there = space.config("client", [CLIENTS[kind](port)])
    with Node(space.config("ours", [SERVERS[kind](port)]), strict=True) as node:
        inbox = node.register(Identity(), APP, aspect)
        command = [stock_python(), str(HERE / "examples" / program), "client", "--config", str(there)]
        yield inbox, [*command, inbox.hash.hex()]


def run(command: list[str], *arguments: str, given: str = "") -> str:
    done = subprocess.run([*command, *arguments], input=given, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ------------------------------------------------------------ link
@pytest.mark.parametrize("kind", KINDS)
def test_our_client_of_the_link_example(space: Workspace, kind: str) -> None:
    answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    with their_server(space, kind, "link_peer.py", "link") as link:
        link.on_packet(answers.put)
        link.send(b"abc")
        assert answers.get(timeout=LIMIT) == b"stranger cba"
        who = Identity()
        link.identify(who)
        link.send(b"xyz")
        assert answers.get(timeout=LIMIT) == who.hash.hex().encode() + b" zyx"


@pytest.mark.parametrize("kind", KINDS)
def test_our_server_of_the_link_example(space: Workspace, kind: str) -> None:
    def joined(link: Link) -> None:
        def answer(data: bytes) -> None:
            who = link.remote_identity
            link.send((who.hash.hex() if who else "stranger").encode() + b" " + data[::-1])

        link.on_packet(answer)

    with our_server(space, kind, "link_peer.py", "link") as (inbox, client):
        inbox.on_link(joined)
        assert run(client, "abc", "xyz") == "stranger cba\nstranger zyx\n"
        name, word = run(client, "abc", "--identify").split()
        assert len(name) == 32 and word == "cba"


# ------------------------------------------------------------ channel
@pytest.mark.parametrize("kind", KINDS)
def test_our_client_of_the_channel_example(space: Workspace, kind: str) -> None:
    with their_server(space, kind, "channel_peer.py", "channel") as link:
        link.channel.register(Sum)
        total = 0
        for count, value in enumerate((1, 2, 39, -5), start=1):
            total += value
            link.channel.send(Term(value), timeout=LIMIT)
            answer = link.channel.receive(LIMIT)
            assert (answer.count, answer.total) == (count, total)


@pytest.mark.parametrize("kind", KINDS)
def test_our_server_of_the_channel_example(space: Workspace, kind: str) -> None:
    def joined(link: Link) -> None:
        terms: list[int] = []

        def reckon(message: Any) -> bool:
            terms.append(message.value)
            link.channel.send(Sum(len(terms), sum(terms)), timeout=LIMIT)
            return True

        link.channel.register(Term)
        link.channel.on_message(reckon)

    with our_server(space, kind, "channel_peer.py", "channel") as (inbox, client):
        inbox.on_link(joined)
        assert run(client, "1", "2", "39") == "1 1\n2 3\n3 42\n"


# ------------------------------------------------------------ buffer
def text(lines: int) -> str:
    return "".join(f"line {number} of the text\n" for number in range(lines))


@pytest.mark.parametrize("lines", [0, 1, 5000])
@pytest.mark.parametrize("kind", KINDS)
def test_our_client_of_the_buffer_example(space: Workspace, kind: str, lines: int) -> None:
    with their_server(space, kind, "buffer_peer.py", "buffer") as link:
        reader, content = link.open_reader(0), text(lines)
        reader.timeout = LIMIT
        giving = Task(pour, link.open_writer(0), content.encode())
        assert reader.readall().decode() == content.upper()
        giving.result()


@pytest.mark.parametrize("lines", [0, 1, 5000])
@pytest.mark.parametrize("kind", KINDS)
def test_our_server_of_the_buffer_example(space: Workspace, kind: str, lines: int) -> None:
    def joined(link: Link) -> None:
        reader, writer = link.open_reader(0), link.open_writer(0)

        def work() -> None:
            while part := reader.read(65536):
                writer.write(part.upper())
            writer.finish()

        Task(work)

    with our_server(space, kind, "buffer_peer.py", "buffer") as (inbox, client):
        inbox.on_link(joined)
        assert run(client, given=text(lines)) == text(lines).upper()
