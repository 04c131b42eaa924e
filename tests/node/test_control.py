"""The socket at which a node says what it does, and everything that clients may do to it."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rnsfast import Node
from rnsfast.node import control
from rnsfast.node.control import ControlSocket, control_path, short_address
from tests.loopback import PATIENCE, settle


class FakePolling:
    """A reactor whose descriptors and moments are those the test says."""

    def __init__(self) -> None:
        self.time = 100.0
        self.watched: dict[int, tuple[int, Callable[[int], None]]] = {}
        self.calls: list[Call] = []

    def now(self) -> float:
        return self.time

    def watch(self, fd: int, events: int, callback: Callable[[int], None]) -> None:
        assert fd >= 0 and fd not in self.watched
        self.watched[fd] = events, callback

    def rewatch(self, fd: int, events: int) -> None:
        self.watched[fd] = events, self.watched[fd][1]

    def unwatch(self, fd: int) -> None:
        del self.watched[fd]

    def call_at(self, when: float, fn: Callable[[], None]) -> Call:
        self.calls.append(Call(when, fn))
        return self.calls[-1]

    def ready(self, fd: int) -> None:
        events, callback = self.watched[fd]
        assert events
        callback(events)

    def advance(self, seconds: float) -> None:
        self.time += seconds
        due = [call for call in self.calls if call.when <= self.time]
        self.calls = [call for call in self.calls if call not in due]
        for call in due:
            if not call.cancelled:
                call.fn()


class Call:
    def __init__(self, when: float, fn: Callable[[], None]) -> None:
        self.when, self.fn, self.cancelled = when, fn, False

    def cancel(self) -> None:
        self.cancelled = True


class Served:
    """A control socket on a fake reactor. Its document is as large as the test wants."""

    def __init__(self, directory: Path) -> None:
        (directory / "storage").mkdir(parents=True)
        self.polling = FakePolling()
        self.status: dict[str, Any] = {"links": 1}
        self.asked = 0
        self.takes = 0.0  # seconds of fake time to make a document
        self.control = ControlSocket(directory, self.polling, self._snapshot)
        self.control.open()
        (self.listener,) = self.polling.watched

    def _snapshot(self) -> dict[str, Any]:
        self.asked += 1
        self.polling.time += self.takes
        return self.status

    def connect(self) -> socket.socket:
        sock = connect(self.control.path)
        self.polling.ready(self.listener)
        return sock

    def clients(self) -> list[int]:
        return [fd for fd in self.polling.watched if fd != self.listener]

    def listens(self) -> bool:
        return bool(self.polling.watched[self.listener][0])


def connect(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with short_address(path) as address:
        sock.connect(address)  # without a time limit of Python's, it waits for its turn in the system's queue
    sock.settimeout(PATIENCE)
    return sock


def read(sock: socket.socket) -> bytes:
    with sock, sock.makefile("rb") as file:
        return file.read()


def ask(path: Path) -> dict[str, Any]:
    return dict(json.loads(read(connect(path))))


def mode(path: Path) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path / "node")
    yield made
    made.control.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configuration without interfaces."""
    path = tmp_path / "plain"
    path.mkdir()
    (path / "config").write_text("[reticulum]\n  share_instance = no\n[interfaces]\n")
    return path


# ------------------------------------------------------------------ answering


def test_a_connection_gets_one_document_with_an_end_of_line_and_is_closed(served: Served) -> None:
    assert read(served.connect()) == b'{"links": 1}\n'
    assert served.clients() == [] and served.polling.calls == []


def test_a_slow_reader_gets_all_of_a_large_document(served: Served) -> None:
    served.status = {"big": "x" * 3_000_000}
    sock = served.connect()
    got = bytearray()
    while served.clients():
        got += sock.recv(1 << 20)
        served.polling.ready(*served.clients())
    got += read(sock)
    assert json.loads(got) == served.status
    assert [call.cancelled for call in served.polling.calls] == [True]


def test_one_who_does_not_read_is_dropped_after_a_while(served: Served) -> None:
    served.status = {"big": "x" * 3_000_000}
    sock = served.connect()
    assert len(served.clients()) == 1
    served.polling.advance(control.PATIENCE - 0.1)
    assert len(served.clients()) == 1
    served.polling.advance(0.1)
    assert served.clients() == []
    assert not read(sock).endswith(b"\n")


def test_one_who_leaves_in_the_middle_is_forgotten(served: Served) -> None:
    served.status = {"big": "x" * 3_000_000}
    served.connect().close()
    (client,) = served.clients()
    served.polling.ready(client)
    assert served.clients() == []


def test_one_who_left_before_the_answer_does_no_harm(served: Served) -> None:
    connect(served.control.path).close()
    served.polling.ready(served.listener)
    assert served.clients() == []
    served.polling.ready(served.listener)  # a ready that was none


def test_what_clients_send_is_not_read_and_soon_refused(served: Served) -> None:
    served.status = {"big": "x" * 3_000_000}
    sock = connect(served.control.path)
    sock.send(b"GET / HTTP/1.1\r\n\r\n" * 50)
    served.polling.ready(served.listener)
    with pytest.raises(BrokenPipeError):
        sock.send(b"more")
    while served.clients():
        sock.recv(1 << 20)
        served.polling.ready(*served.clients())
    sock.close()


def test_no_more_than_so_many_are_answered_at_a_time_and_the_others_wait(served: Served) -> None:
    served.status = {"big": "x" * 3_000_000}
    socks = [served.connect() for _ in range(control.MAX_CLIENTS)]
    assert len(served.clients()) == control.MAX_CLIENTS and not served.listens()
    waiting = connect(served.control.path)  # in the system's queue
    served.polling.advance(control.PATIENCE)
    assert served.clients() == [] and served.listens()
    served.status = {"links": 2}
    served.polling.time += control.MAX_REUSE
    served.polling.ready(served.listener)
    assert read(waiting) == b'{"links": 2}\n'
    for sock in socks:
        sock.close()


def test_a_document_that_took_long_is_used_again_for_a_while(served: Served) -> None:
    served.takes = 0.01
    assert read(served.connect()) == b'{"links": 1}\n'
    served.status = {"links": 2}
    served.polling.time += 0.19
    assert read(served.connect()) == b'{"links": 1}\n'
    served.polling.time += 0.02
    assert read(served.connect()) == b'{"links": 2}\n'
    served.takes = 1000.0  # the machine slept
    served.polling.time += 1
    read(served.connect())
    served.polling.time += control.MAX_REUSE
    asked = served.asked
    read(served.connect())
    assert served.asked == asked + 1


def test_a_snapshot_that_raises_ends_that_connection_only(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(served.control, "_snapshot", lambda: 1 / 0)
        sock = connect(served.control.path)
        with pytest.raises(ZeroDivisionError):  # the reactor logs it
            served.polling.ready(served.listener)
        assert read(sock) == b""
    assert read(served.connect()) == b'{"links": 1}\n'


def test_without_descriptors_it_does_not_spin(served: Served) -> None:
    real = served.control._listener

    class Exhausted:
        def accept(self) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

        def fileno(self) -> int:
            return served.listener

    waiting = connect(served.control.path)
    served.control._listener = Exhausted()  # type: ignore[assignment]
    served.polling.ready(served.listener)
    served.control._listener = real
    assert not served.listens()
    served.polling.advance(control.ACCEPT_AGAIN)
    served.polling.ready(served.listener)
    assert read(waiting) == b'{"links": 1}\n'


def test_closing_ends_open_connections_and_removes_the_socket(served: Served) -> None:
    served.status = {"big": "x" * 3_000_000}
    sock = served.connect()
    (client,) = served.clients()
    _, late = served.polling.watched[client]
    served.control.close()
    served.control.close()
    assert served.polling.watched == {} and not os.path.lexists(served.control.path)
    late(2)  # an event that was under way
    served.polling.advance(control.PATIENCE)
    assert not read(sock).endswith(b"\n")


def test_a_socket_that_took_the_place_of_ours_is_left_alone(served: Served) -> None:
    os.rename(served.control.path, served.control.path.with_name("moved"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(served.control.path))
        served.control.close()
    assert served.control.path.is_socket()


# ------------------------------------------------------------------ the socket


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_only_the_owner_can_connect_whatever_the_umask(umask: int, tmp_path: Path) -> None:
    (tmp_path / "storage").mkdir()
    made = ControlSocket(tmp_path, FakePolling(), dict)
    before = os.umask(umask)
    try:
        made.open()
    finally:
        os.umask(before)
    assert mode(made.path) == 0o600
    made.close()


def test_the_mode_is_right_where_that_of_the_descriptor_has_no_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: Any) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fchmod", refused)
    made = Served(tmp_path / "node")
    assert mode(made.control.path) == 0o600
    made.control.close()


@pytest.mark.parametrize("proc", [True, False], ids=["through proc", "through a link"])
def test_a_path_longer_than_a_socket_address_works(proc: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not proc:
        monkeypatch.setattr("rnsfast.node.control.os.path.isdir", lambda path: False)
        monkeypatch.setattr("tempfile.tempdir", "/tmp")
    before = set(os.listdir("/tmp")) if not proc else set()
    made = Served(tmp_path / ("long" * 30) / ("longer" * 30))
    assert len(str(made.control.path)) > 300
    assert read(made.connect()) == b'{"links": 1}\n'
    assert mode(made.control.path) == 0o600
    assert os.listdir(made.control.path.parent) == ["control.sock"]
    made.control.close()
    assert os.listdir(made.control.path.parent) == []
    if not proc:
        assert not [name for name in set(os.listdir("/tmp")) - before if name.startswith("rnsfast-")]


def test_what_a_dead_node_left_is_replaced(tmp_path: Path) -> None:
    path = control_path(tmp_path)
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
    made = ControlSocket(tmp_path, polling := FakePolling(), lambda: {"links": 3})
    made.open()
    sock = connect(path)
    polling.ready(*polling.watched)
    assert read(sock) == b'{"links": 3}\n'
    made.close()
    assert os.listdir(path.parent) == []


def test_what_is_not_a_socket_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = control_path(tmp_path)
    (path / "inside").mkdir(parents=True)
    made = ControlSocket(tmp_path, FakePolling(), dict)
    made.open()
    assert path.is_socket() and (path.parent / "control.sock.damaged-1" / "inside").is_dir()
    assert "not a socket" in caplog.text
    made.close()


# ------------------------------------------------------------------ a node


def test_a_running_node_answers_and_removes_the_socket_when_it_stops(folder: Path) -> None:
    path = control_path(folder)
    with Node(folder) as node:
        said = ask(path)
        assert said["pid"] == os.getpid() and said["configdir"] == str(folder) and said["uptime"] >= 0
        assert said.keys() == node.status().keys()
        assert mode(path) == 0o600
    assert not os.path.lexists(path)
    with node:
        assert ask(path)["links"] == 0
    assert not os.path.lexists(path)


def test_a_node_that_does_not_start_leaves_no_socket(folder: Path) -> None:
    with Node(folder):
        with pytest.raises(OSError):
            Node(folder).start()
        assert ask(control_path(folder))["pid"] == os.getpid()  # the running one's is untouched


def test_a_node_without_directory_has_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ControlSocket, "open", lambda self: pytest.fail("opened"))
    with Node.from_interfaces([]) as node:
        assert node.status()["configdir"] is None


def fail_with(number: int) -> Callable[..., Any]:
    def failing(*arguments: Any) -> None:
        raise OSError(number, os.strerror(number))

    return failing


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EOPNOTSUPP])
@pytest.mark.parametrize("call", ["bind", "listen"])
def test_a_socket_that_cannot_be_made_is_one_warning_and_the_node_runs(
    call: str, number: int, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing = type("Failing", (socket.socket,), {call: fail_with(number)})
    monkeypatch.setattr("rnsfast.node.control.socket.socket", failing)
    with caplog.at_level(logging.WARNING, "rnsfast"), Node(folder) as node:
        assert node.is_running and node.status()["links"] == 0
        (record,) = caplog.records
        assert os.strerror(number) in record.getMessage() and "control.sock" in record.getMessage()
    assert not [name for name in os.listdir(folder / "storage") if "control" in name]


def test_a_node_runs_on_a_system_without_such_sockets(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "is_available", lambda: False)
    with Node(folder) as node:
        assert node.is_running
        assert not os.path.lexists(control_path(folder))


def test_thousands_of_connections_leave_the_node_at_work(folder: Path) -> None:
    """From several threads, some reading, some not, some sending what nobody wants."""
    before = threading.active_count()
    with Node(folder) as node:
        path = control_path(folder)
        failures: list[BaseException] = []
        held: list[socket.socket] = []

        def storm(kind: int) -> None:
            try:
                for _ in range(500):
                    sock = connect(path)
                    if kind == 0:
                        read(sock)
                    elif kind == 1:
                        with contextlib.suppress(BrokenPipeError):
                            sock.send(os.urandom(100))
                        sock.close()
                    elif kind == 2:
                        sock.close()
                    else:
                        held.append(sock)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=storm, args=(kind,)) for kind in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE * 3)
        assert failures == []
        settle(node)
        assert node._control is not None and node._control._clients == set()
        assert ask(path)["links"] == 0
        for sock in held:
            sock.close()
    assert threading.active_count() == before


def test_many_who_do_not_read_are_bounded_and_stopping_does_not_wait_for_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = {"big": "x" * 2_000_000}
    monkeypatch.setattr(Node, "_look", lambda self: big)
    with Node(folder) as node:
        socks = [connect(control_path(folder)) for _ in range(control.MAX_CLIENTS + 5)]
        settle(node)
        settle(node)
        assert node._control is not None
        wakeups = node._reactor.wakeups
        settle(node)
        assert node._reactor.wakeups - wakeups < 10  # those who wait in the queue do not keep it awake
        assert len(node._control._clients) <= control.MAX_CLIENTS
    for sock in socks:
        sock.close()
