"""A node with a good interface and a faulty one: it runs, says what is wrong, and repairs itself where it can."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rnsfast import ConfigError, InterfaceError, Node
from tests.cli.support import PATIENCE, client, free_port, section, server, write_config


class Awaited(logging.Handler):
    """Says when a line with certain words was logged, and keeps all."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._changed = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self._changed:
            self.lines.append(record.getMessage())
            self._changed.notify_all()

    def wait_for(self, words: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: any(words in line for line in self.lines), PATIENCE), self.lines


@pytest.fixture
def logged() -> Iterator[Awaited]:
    handler, logger = Awaited(), logging.getLogger("rnsfast")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


def failed(node: Node) -> dict[str, Any]:
    (only,) = node.status()["failed"]
    return dict(only)


def names(node: Node) -> list[str]:
    return [interface["name"] for interface in node.status()["interfaces"]]


def test_a_port_in_use_is_listed_and_comes_up_by_itself_when_it_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: Awaited
) -> None:
    monkeypatch.setattr("rnsfast.node.node.RETRY_INTERFACE", 0.02)
    tried = threading.Semaphore(0)
    retry = Node._retry

    def counted(self: Node, *arguments: Any) -> None:
        tried.release()
        retry(self, *arguments)

    monkeypatch.setattr(Node, "_retry", counted)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        config = write_config(tmp_path / "node", server(free_port(), "Good"), server(port, "Taken"))
        with Node(config) as node:
            assert names(node) == ["Good"]
            assert failed(node)["name"] == "Taken"
            assert f"{port} is in use" in failed(node)["reason"]
            for _ in range(4):  # at first, and three more attempts
                assert tried.acquire(timeout=PATIENCE)
            assert sum(f"{port} is in use" in line for line in logged.lines) == 1  # nothing is logged again and again
            up = threading.Event()
            other.close()
            logged.wait_for("Taken: is up now")
            assert node.status()["failed"] == []
            assert names(node) == ["Good", "Taken"]
            node.on_interface_up(lambda name: up.set())
            with socket.create_connection(("127.0.0.1", port), PATIENCE):
                assert up.wait(PATIENCE)


def test_an_address_of_another_machine_is_listed_with_its_reason(tmp_path: Path) -> None:
    other = section("Other", "TCPServerInterface", listen_ip="192.0.2.1", listen_port=4242)
    config = write_config(tmp_path / "node", server(free_port(), "Good"), other)
    with Node(config) as node:
        assert names(node) == ["Good"]
        assert "192.0.2.1" in failed(node)["reason"]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        pytest.param(client(4242, "Odd", fixed_mtu=485), ["fixed_mtu", "485"], id="a"),
        pytest.param(server(4242, "Odd", interface_mode="gatway"), ["gatway", "gateway", "boundary", "full"], id="g"),
        pytest.param(section("Odd", "TCPSeverInterface"), ["TCPSeverInterface", "TCPServerInterface"], id="h-type"),
        pytest.param("  [[Odd]]\n    enabled = yes", ["type"], id="h-no-type"),
        pytest.param(server("none", "Odd"), ["listen_port"], id="f-none"),
    ],
)
def test_a_faulty_section_is_listed_with_line_option_and_what_is_accepted(
    fault: str, words: list[str], tmp_path: Path, logged: Awaited
) -> None:
    config = write_config(tmp_path / "node", server(free_port(), "Good"), fault)
    with Node(config) as node:
        assert names(node) == ["Good"]
        reason = failed(node)["reason"]
        assert reason.startswith("config:") and "[[Odd]]" in reason
        assert all(word in reason for word in words), reason
        assert logged.lines.count(reason) == 1
    with pytest.raises((ConfigError, InterfaceError)) as caught:
        Node(config, strict=True).start()
    assert str(caught.value) == reason


def test_a_mode_that_exists_is_taken(tmp_path: Path) -> None:
    config = write_config(tmp_path / "node", server(free_port(), "Door", interface_mode="gateway"))
    with Node(config, strict=True) as node:
        assert names(node) == ["Door"]


def test_a_misspelt_option_is_a_warning_with_a_suggestion(tmp_path: Path, logged: Awaited) -> None:
    config = write_config(tmp_path / "node", server(free_port(), "Door", listen_prt=1))
    with Node(config) as node:
        assert names(node) == ["Door"]
        (warning,) = [line for line in logged.lines if "listen_prt" in line]
        assert warning in node.warnings
        assert "listen_port" in warning and warning.startswith("config:")


def test_a_fault_in_a_disabled_section_is_none(tmp_path: Path) -> None:
    off = server(4242, "Off", bitrate="fast").replace("enabled = yes", "enabled = no")
    config = write_config(tmp_path / "node", server(free_port(), "Good"), off)
    with Node(config, strict=True) as node:
        assert names(node) == ["Good"]


def test_the_file_is_never_rewritten(tmp_path: Path) -> None:
    config = write_config(tmp_path / "node", server(free_port(), "Good"), section("Odd", "None"))
    before = (tmp_path / "node" / "config").read_bytes()
    with Node(config):
        pass
    assert (tmp_path / "node" / "config").read_bytes() == before
