"""A node inside somebody else's program.

What concerns the shared instance (one that goes away while its client waits) is not here: there is none yet.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import random
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rnsfast import (
    ConfigError,
    Identity,
    InterfaceError,
    Link,
    LinkClosed,
    Node,
    NodeClosed,
    RnsfastError,
    StorageError,
)
from tests.loopback import PATIENCE, Pair, Worker, joined, settle

CYCLES = 50
MEGABYTE = random.Random(8).randbytes(1_000_000)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_config(folder: Path, kind: str, port: int) -> Path:
    where = "listen_ip = 127.0.0.1\n    listen_port" if kind == "Server" else "target_host = 127.0.0.1\n    target_port"
    folder.mkdir(exist_ok=True)
    (folder / "config").write_text(
        "[reticulum]\n  share_instance = no\n[interfaces]\n  [[it]]\n    enabled = yes\n"
        f"    type = TCP{kind}Interface\n    {where} = {port}\n"
    )
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path, int]:
    port = free_port()
    return write_config(tmp_path / "server", "Server", port), write_config(tmp_path / "client", "Client", port), port


def ours() -> list[str]:
    """Threads of ours."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rnsfast-")]


def descriptors() -> int:
    folder = Path("/proc/self/fd")
    return len(os.listdir(folder)) if folder.exists() else 0


def transfer(server: Node, client: Node, identity: Identity) -> None:
    """One megabyte over a new link."""
    got: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    inbox = server.register(identity, "field", "case")
    inbox.on_link(lambda link: got.put(link.open_reader(1).readall()))
    link = client.connect(inbox.hash, "field", "case", timeout=PATIENCE)
    with link.open_writer(1, compression="never") as writer:
        writer.write(MEGABYTE)
    assert got.get(timeout=PATIENCE) == MEGABYTE


@pytest.fixture
def own_handler() -> Iterator[list[int]]:
    """The program's own SIGINT handler, and when it was called."""
    called: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: called.append(number))
    yield called
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_fifty_lives_in_one_process_leave_nothing(folders: tuple[Path, Path, int], own_handler: list[int]) -> None:
    server_dir, client_dir, port = folders
    identity = Identity()
    logger = logging.getLogger()
    surroundings = (os.getcwd(), list(logger.handlers), logger.level, type(asyncio.get_event_loop_policy()))
    handler = signal.getsignal(signal.SIGINT)
    half_way = threading.Semaphore(0)
    counts: list[tuple[int, int]] = []

    def live() -> None:
        for _ in range(CYCLES):
            with Node(server_dir) as server, Node(client_dir) as client:
                half_way.release()
                transfer(server, client, identity)
            assert ours() == []
            counts.append((threading.active_count(), descriptors()))
            with socket.socket() as probe:  # the port is free again
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))

    worker = Worker(live)
    for cycle in range(CYCLES):
        assert half_way.acquire(timeout=PATIENCE)
        if cycle % 10 == 5:
            signal.raise_signal(signal.SIGINT)  # Ctrl-C in the middle of it
    worker.thread.join(120.0)
    worker.result()
    assert set(counts) == {counts[0]}
    assert len(own_handler) == CYCLES // 10
    assert signal.getsignal(signal.SIGINT) is handler
    assert surroundings == (os.getcwd(), logger.handlers, logger.level, type(asyncio.get_event_loop_policy()))


def test_two_nodes_with_two_configurations_find_each_other(folders: tuple[Path, Path, int]) -> None:
    server_dir, client_dir, _ = folders
    with Node(server_dir) as server, Node(client_dir) as client:
        assert server.config is not client.config
        transfer(server, client, Identity())
        assert server.status()["links"] == 1
    with pytest.raises(NodeClosed, match="not running"):
        server.status()


def test_the_same_node_object_can_be_started_again(folders: tuple[Path, Path, int]) -> None:
    server, client = Node(folders[0]), Node(folders[1])
    identity = Identity()
    for _ in range(3):
        with server, client:
            assert server.start() is server  # a second start is none
            transfer(server, client, identity)
        assert not server.is_running
    assert ours() == []


# ------------------------------------------------------------------ what cannot work


def _port_in_use(server_dir: Path, port: int) -> tuple[type[RnsfastError], str, Callable[[], Any]]:
    other = socket.create_server(("127.0.0.1", port))
    return InterfaceError, rf"{port} is in use", other.close


def _not_a_folder(server_dir: Path, port: int) -> tuple[type[RnsfastError], str, Callable[[], Any]]:
    (server_dir / "config").unlink()
    server_dir.rmdir()
    server_dir.write_text("in the way")

    def repair() -> None:
        server_dir.unlink()
        write_config(server_dir, "Server", port)

    return RnsfastError, str(server_dir), repair


def _broken_file(server_dir: Path, port: int) -> tuple[type[RnsfastError], str, Callable[[], Any]]:
    (server_dir / "config").write_text("[interfaces\nno end")
    return ConfigError, "config", lambda: write_config(server_dir, "Server", port)


def _bad_option(server_dir: Path, port: int) -> tuple[type[RnsfastError], str, Callable[[], Any]]:
    text = (server_dir / "config").read_text()
    (server_dir / "config").write_text(text.replace(str(port), "65536000"))
    return ConfigError, "listen_port", lambda: write_config(server_dir, "Server", port)


def _directory_taken(server_dir: Path, port: int) -> tuple[type[RnsfastError], str, Callable[[], Any]]:
    other = Node(server_dir).start()
    return StorageError, "another", other.stop


@pytest.mark.parametrize("obstacle", [_port_in_use, _not_a_folder, _broken_file, _bad_option, _directory_taken])
def test_what_cannot_work_says_why_and_works_once_it_is_repaired(
    folders: tuple[Path, Path, int], obstacle: Callable[..., Any]
) -> None:
    server_dir, client_dir, port = folders
    error, words, repair = obstacle(server_dir, port)
    before = descriptors()
    node = Node(server_dir, strict=True)
    for _ in range(3):
        with pytest.raises(error, match=words) as caught:
            node.start()
        assert "\n" not in str(caught.value)
        assert not node.is_running
        with pytest.raises(NodeClosed):
            node.register(Identity(), "x")
    assert descriptors() == before
    repair()
    with node, Node(client_dir) as client:
        transfer(node, client, Identity())
    assert ours() == []


def test_port_in_use_is_a_listed_failure_and_tried_again(
    folders: tuple[Path, Path, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server_dir, client_dir, port = folders
    monkeypatch.setattr("rnsfast.node.node.RETRY_INTERFACE", 0.01)
    other = socket.create_server(("127.0.0.1", port))
    up = threading.Event()
    logger, handler = logging.getLogger("rnsfast.node.node"), logging.Handler()
    handler.emit = lambda record: up.set() if "is up now" in record.getMessage() else None  # type: ignore[method-assign]
    logger.addHandler(handler)
    caplog.set_level(logging.INFO, logger.name)
    try:
        with Node(server_dir) as server:
            (failed,) = server.status()["failed"]
            assert f"{port} is in use" in failed["reason"]
            other.close()
            assert up.wait(PATIENCE)
            assert server.status()["failed"] == []
            with Node(client_dir) as client:
                transfer(server, client, Identity())
    finally:
        logger.removeHandler(handler)


def test_interface_that_comes_up_while_the_node_stops_is_closed(
    folders: tuple[Path, Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    server_dir, _, port = folders
    monkeypatch.setattr("rnsfast.node.node.RETRY_INTERFACE", 0.0)
    other = socket.create_server(("127.0.0.1", port))
    node = Node(server_dir).start()
    other.close()
    node.stop()
    assert ours() == []
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))


# ------------------------------------------------------------------ stopping


def test_exception_in_a_callback_is_logged_and_harms_nothing(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    logged = threading.Event()

    def on_link(link: Link) -> None:
        link.on_close(lambda link: logged.set())  # after this call, on the same strand
        raise ArithmeticError("in the program's own code")

    link, _ = pair.link(lambda link: None)
    inbox = pair.b.register(Identity(), "test", "raises")
    inbox.on_link(on_link)
    other = pair.a.connect(inbox.hash, "test", "raises", timeout=PATIENCE)
    assert other.is_active
    other.close()
    assert logged.wait(PATIENCE)
    pair.link()
    assert link.is_active
    assert "in the program's own code" in caplog.text


@pytest.mark.parametrize("where", ["on_link", "on_message", "on_close", "on_announce", "the reactor thread"])
def test_node_can_be_stopped_inside_any_callback(where: str) -> None:
    with joined() as pair:
        from tests.loopback import Note, number

        stopped = threading.Event()
        node = pair.b

        def stop(*args: Any) -> None:
            node.stop()
            node.stop()
            stopped.set()

        if where == "on_announce":
            node.on_announce(stop)
            pair.a.register(Identity(), "test", "announced").announce()
        elif where == "the reactor thread":
            node._reactor.call_at(0.0, stop)
        else:
            inbox = node.register(Identity(), "test", "stop")

            def on_link(link: Link) -> None:
                link.channel.register(Note)
                if where == "on_link":
                    stop()
                elif where == "on_message":
                    link.channel.on_message(stop)
                else:
                    link.on_close(stop)

            inbox.on_link(on_link)
            try:
                link = pair.a.connect(inbox.hash, "test", "stop", timeout=PATIENCE)
                if where == "on_message":
                    link.channel.send(number(1), timeout=PATIENCE)
                elif where == "on_close":
                    link.close()
                assert link.wait_closed(PATIENCE)
            except LinkClosed:
                assert where == "on_link"  # it was over before it had begun here
        assert stopped.wait(PATIENCE)
        assert not node.is_running
        node.start()
        pair.link()
    assert ours() == []


def test_stop_from_many_threads_returns_when_it_is_done(pair: Pair) -> None:
    pair.link()
    workers = [Worker(pair.a.stop) for _ in range(8)]
    for worker in workers:
        worker.result()
        assert pair.a._state == "stopped"
    pair.a.stop()
    assert [name for name in ours() if name.startswith(pair.a._reactor.name + "-")] == []


def test_stop_does_not_wait_for_ever_for_a_callback_that_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rnsfast.node.node.STOP_PATIENCE", 0.01)
    go, blocked = threading.Event(), threading.Event()
    with joined() as pair:
        pair.link(lambda link: None)
        inbox = pair.b.register(Identity(), "test", "blocks")
        inbox.on_link(lambda link: (blocked.set(), go.wait(PATIENCE)))
        pair.a.connect(inbox.hash, "test", "blocks", timeout=PATIENCE)
        assert blocked.wait(PATIENCE)
        pair.b.stop()
        assert not pair.b.is_running
        go.set()


def test_callback_that_waits_is_woken_by_the_stop(pair: Pair) -> None:
    errors: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    waiting = threading.Event()

    def on_link(link: Link) -> None:
        channel = link.channel
        waiting.set()
        try:
            channel.receive()
        except LinkClosed as error:
            errors.put(error)

    inbox = pair.b.register(Identity(), "test", "waits")
    inbox.on_link(on_link)
    pair.a.connect(inbox.hash, "test", "waits", timeout=PATIENCE)
    assert waiting.wait(PATIENCE)
    pair.b.stop()
    assert "the node was stopped" in str(errors.get(timeout=PATIENCE))


def test_on_close_is_called_once_however_much_was_queued_before(pair: Pair) -> None:
    closed: queue.SimpleQueue[Link] = queue.SimpleQueue()
    packets: list[bytes] = []
    go = threading.Event()

    def on_link(link: Link) -> None:
        link.on_packet(packets.append)
        link.on_close(closed.put)
        go.wait(PATIENCE)

    inbox = pair.b.register(Identity(), "test", "queued")
    inbox.on_link(on_link)
    link = pair.a.connect(inbox.hash, "test", "queued", timeout=PATIENCE)
    for i in range(300):
        link.send(b"%d" % i)
    settle(pair.a)
    settle(pair.b)
    stopping = Worker(pair.b.stop)
    assert link.wait_closed(PATIENCE)
    go.set()
    stopping.result()
    assert closed.get(timeout=PATIENCE).closing == "the node was stopped"
    assert closed.empty()
    assert packets == [b"%d" % i for i in range(300)]
