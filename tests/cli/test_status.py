"""`rnsfast status` beside nodes that run, have stopped, were killed, or behave badly."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rnsfast import Node, __version__
from rnsfast.cli import status as command
from rnsfast.cli.exits import Exit
from rnsfast.cli.main import main
from rnsfast.cli.status import render
from rnsfast.node.control import control_path
from tests.cli.support import (
    PATIENCE,
    Running,
    client,
    free_port,
    no_control_characters,
    run,
    running,
    section,
    server,
    write_config,
)


def status(directory: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["status", "--config", str(directory), *arguments])


def complaint(result: Result) -> str:
    """The one sentence."""
    assert result.exit_code == Exit.NODE, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("rnsfast: ")
    return line.removeprefix("rnsfast: ")


def value(lines: list[str], name: str) -> list[str]:
    """What stands behind a name, wherever it occurs."""
    return [found[1] for line in lines if (found := re.fullmatch(rf" *{re.escape(name)}  +(.*)", line))]


def below(lines: list[str], header: str) -> list[str]:
    """The lines of a block."""
    at = next(number for number, line in enumerate(lines) if line.startswith(header))
    end = lines.index("", at) if "" in lines[at:] else len(lines)
    return lines[at:end]


def looks(directory: Path) -> dict[Path, tuple[int, ...]]:
    """Everything in a directory, as far as a change would show."""
    found = {path: path.lstat() for path in [directory, *directory.rglob("*")]}
    return {path: (is_.st_ino, is_.st_mode, is_.st_size, is_.st_mtime_ns) for path, is_ in found.items()}


@contextmanager
def node(config: str, **options: Any) -> Iterator[Running]:
    with running("node", "--config", config, **options) as process:
        process.line("running")
        yield process


# ------------------------------------------------------------------ processes


@pytest.mark.slow
def test_two_nodes_in_two_directories_each_say_what_they_do(tmp_path: Path) -> None:
    port, taken = free_port(), free_port()
    with socket.create_server(("127.0.0.1", taken)):
        door = write_config(tmp_path / "door", server(port), server(taken, "Taken"), section("Odd", "TCPSever"))
        line = write_config(tmp_path / "line", client(port), loglevel=7)
        with node(door) as first, node(line) as second:
            second.line("connected to", which="err")
            code, out, err = run("status", "--config", door)
            assert (code, err) == (0, [])
            assert out[0].startswith(f"rnsfast {__version__}, process {first.process.pid}, running for ")
            assert value(out, "configuration") == [door]
            assert value(out, "links") == value(out, "paths") == value(out, "known destinations") == ["0"]
            assert int(value(out, "wakeups")[0]) > 0
            assert below(out, "Door (TCPServerInterface): listening for ")
            (failed,) = [entry for entry in out if entry.startswith("Taken (TCPServerInterface): failed: ")]
            assert f"{taken} is in use" in failed
            assert any(entry.startswith("Odd (TCPSever): failed: config:") for entry in out)
            code, out, err = run("status", "--config", line)
            assert (code, err) == (0, [])
            assert f"process {second.process.pid}," in out[0]
            block = below(out, "Line (TCPClientInterface): online for ")
            assert value(block, "backend")[0].startswith("stream-")
            assert value(block, "target") == [f"127.0.0.1:{port}"]
            assert value(block, "received") == ["0 packets, 0 bytes"]
            assert no_control_characters(out)
            first.signal()
            assert first.wait() == 0
            code, out, err = run("status", "--config", door)
            assert (code, out) == (Exit.NODE, [])
            assert err == [f"rnsfast: no node is running with the configuration directory {door}"]
            assert not os.path.lexists(control_path(door))


@pytest.mark.slow
def test_json_is_everything_and_nothing_else(tmp_path: Path) -> None:
    config = write_config(tmp_path / "node", server(free_port()))
    with node(config) as process:
        code, out, err = run("status", "--json", "--config", config)
        assert (code, err) == (0, [])
        said = json.loads("\n".join(out))
        assert said["pid"] == process.process.pid and said["version"] == __version__
        assert [interface["name"] for interface in said["interfaces"]] == ["Door"]
        assert {"links", "paths", "known_destinations", "wakeups", "uptime", "failed", "drops", "ports"} <= said.keys()


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 40], ids=["short path", "long path"])
def test_after_a_kill_nobody_runs_and_a_restart_replaces_the_socket(length: int, tmp_path: Path) -> None:
    config = write_config(tmp_path / ("n" * length) / ("o" * length * 2), server(free_port()))
    path = control_path(config)
    with node(config) as process:
        process.signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert path.is_socket()  # left over
    code, out, err = run("status", "--config", config)
    assert (code, out) == (Exit.NODE, [])
    assert err == [f"rnsfast: no node is running with the configuration directory {config}"]
    with node(config, umask=0) as process:
        assert stat.S_IMODE(path.lstat().st_mode) == 0o600
        code, out, err = run("status", "--config", config)
        assert (code, err) == (0, []) and f"process {process.process.pid}," in out[0]
        process.signal()
        assert process.wait() == 0
    assert not os.path.lexists(path)


@pytest.mark.slow
def test_the_node_works_on_beside_clients_that_misbehave(tmp_path: Path) -> None:
    port = free_port()
    config = write_config(tmp_path / "node", server(port))
    with node(config) as process, contextlib.ExitStack() as stack:
        for number in range(300):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            sock.connect(str(control_path(config)))
            if number % 3 == 0:
                with contextlib.suppress(BrokenPipeError):
                    sock.send(os.urandom(1000))
            elif number % 3 == 1:
                sock.close()
        code, out, err = run("status", "--config", config)
        assert (code, err) == (0, []) and f"process {process.process.pid}," in out[0]
        process.signal()
        assert process.wait() == 0
        assert process.err == []  # nothing was worth a line


# ------------------------------------------------------------------ nobody there


def test_a_directory_that_does_not_exist_is_not_made(tmp_path: Path) -> None:
    directory = tmp_path / "nowhere"
    assert complaint(status(directory)) == f"no node is running with the configuration directory {directory}"
    assert complaint(status(directory, "--json")).startswith("no node is running")
    assert not directory.exists()
    assert "no node is running" in complaint(status(tmp_path / ("x" * 200) / ("y" * 200)))
    assert os.listdir(tmp_path) == []


def test_a_file_in_the_place_of_the_directory_is_no_node(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "no node is running" in complaint(status(tmp_path / "file"))
    path = control_path(tmp_path)
    path.parent.mkdir()
    path.write_text("")
    assert "no node is running" in complaint(status(tmp_path))
    assert path.read_text() == ""


def test_nothing_in_the_directory_of_a_stopped_node_is_touched(tmp_path: Path) -> None:
    config = Path(write_config(tmp_path / "node"))
    with Node(config):
        assert status(config).exit_code == 0
    before = looks(config)
    complaint(status(config))
    assert looks(config) == before


def test_a_system_without_such_sockets_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "is_available", lambda: False)
    assert "not available on this system" in complaint(status(tmp_path))


@contextmanager
def answering(directory: Path, answer: bytes | None) -> Iterator[None]:
    """A node that gives this answer, or none and does not end the connection."""
    path = control_path(directory)
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen(1)
        listener.settimeout(PATIENCE)
        done = threading.Event()

        def serve() -> None:
            sock, _ = listener.accept()
            with sock:
                if answer is None:
                    done.wait(PATIENCE)
                else:
                    sock.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        done.set()
        thread.join(PATIENCE)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "without an answer"),
        (b'{"links": ', "damaged or incomplete"),
        (b"\xff\xfe\x00", "damaged or incomplete"),
        (b"[" * 100_000, "damaged or incomplete"),
        (b"[]\n", "no status"),
        (None, "did not answer within"),
        (b" " * 3000, "longer than"),
    ],
    ids=["nothing", "half", "binary", "deep", "list", "silence", "endless"],
)
def test_an_answer_that_is_none_is_one_sentence(
    answer: bytes | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "PATIENCE", 0.05 if answer is None else PATIENCE)
    if answer is not None and words == "longer than":
        monkeypatch.setattr(command, "MAX_ANSWER", 2000)
    with answering(tmp_path, answer):
        assert words in complaint(status(tmp_path))


@pytest.mark.linux
def test_a_node_that_takes_no_more_connections_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "PATIENCE", 0.05)
    path = control_path(tmp_path)
    path.parent.mkdir()
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(str(path))
        listener.listen(0)
        with contextlib.suppress(BlockingIOError):
            for _ in range(10):
                sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                sock.setblocking(False)
                sock.connect(str(path))
        assert "did not answer within" in complaint(status(tmp_path))


# ------------------------------------------------------------------ showing


def test_keys_nobody_has_heard_of_are_shown_and_outside_words_made_harmless() -> None:
    lines = render(
        {
            "version": "9",
            "pid": 1,
            "uptime": 4000.0,
            "new_thing": 1234567,
            "drops": {"malformed.short": 2, "filter.duplicate": 0},
            "interfaces": [
                {
                    "name": "Air\x1b[2J\u202e",
                    "type": "TUNInterface",
                    "state": "up",
                    "state_for": 65.0,
                    "last_error": "of long ago",
                    "device": "rns0",
                    "peers": ["a", "b"],
                    "none": [],
                    "empty": "",
                    "unset": None,
                    "ready": True,
                    "share": 0.123456,
                    "deep": {"er": {"still": 1}},
                    "connection": {"backend": "tun-linux", "batch": 64},
                }
            ],
            "ports": [
                {
                    "name": "Air/1",
                    "interface": "Air\x1b[2J\u202e",
                    "online": True,
                    "rx_packets": 1,
                    "rx_bytes": 1500,
                    "tx_packets": 2000,
                    "drops": {"ifac.invalid": 3, "a.zero": 0, "tx.queue_full": 1},
                },
                {"name": "Stray", "interface": None, "online": False},
            ],
            "failed": [{"name": "F", "type": "T", "reason": "two\nlines"}],
        }
    )
    assert no_control_characters(lines) and all(line.isprintable() for line in lines)
    assert lines[0] == "rnsfast 9, process 1, running for 1:06 h"
    assert value(lines, "new thing") == ["1,234,567"]
    assert "F (T): failed: two\\nlines" in lines
    block = below(lines, r"Air\x1b[2J\u202e (TUNInterface): up for 1:05 min")
    assert value(block, "device") == ["rns0"] and value(block, "peers") == ["a, b"] and value(block, "none") == ["none"]
    assert value(block, "ready") == ["yes"] and value(block, "share") == ["0.123"] and value(block, "still") == ["1"]
    assert value(block, "backend") == ["tun-linux"] and value(block, "batch") == ["64"]
    assert value(block, "received") == ["1 packet, 1,500 bytes"] and value(block, "sent") == ["2,000 packets, 0 bytes"]
    assert value(block, "dropped") == ["3 ifac.invalid"] and "1 tx.queue_full" in block[-1]
    assert not any("zero" in line or "filter.duplicate" in line or "unset" in line for line in lines)
    assert "of long ago" not in "\n".join(lines)
    assert value(below(lines, "other ports"), "state") == ["offline"]


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"interfaces": 1, "ports": {}, "failed": None, "drops": []},
        {"interfaces": [1, {}], "ports": [None, {}], "failed": ["x", {}]},
        {"interfaces": [{"connections": {"a": 1, "b": {"c": []}}, "connection": []}], "uptime": "soon"},
        {"interfaces": [{"name": ["a"], "state": {}, "state_for": -1}], "ports": [{"name": [], "interface": {}}]},
    ],
    ids=range(5),
)
def test_a_document_of_another_version_is_shown_as_far_as_it_goes(document: dict[str, Any]) -> None:
    lines = render(document)
    assert lines[0].startswith("rnsfast ") and all(line.isprintable() for line in lines)
