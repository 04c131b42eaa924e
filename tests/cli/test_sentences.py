"""What the commands say when they cannot do what was asked: one sentence on standard error, and the exit status."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rnsfast import (
    Identity,
    LinkClosed,
    LinkTimeout,
    NodeClosed,
    PathNotFound,
    RnsfastError,
    __version__,
)
from rnsfast.cli.exits import Exit, code_for, printable
from rnsfast.cli.main import main
from rnsfast.files import (
    NotAReceiver,
    NotStored,
    OutcomeUnknown,
    ProtocolFault,
    Refused,
    SourceFault,
    TransferError,
)
from tests.cli.support import client, free_port, section, server, write_config

HASH = "00" * 16


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def complaint(result: Result, code: int) -> str:
    """The one sentence."""
    assert result.exit_code == code, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("rnsfast: ")
    return line.removeprefix("rnsfast: ")


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "a.bin"
    path.write_bytes(b"abc")
    return str(path)


@pytest.fixture
def config(tmp_path: Path) -> str:
    return write_config(tmp_path / "node")


def test_version() -> None:
    assert call("--version").stdout == f"rnsfast {__version__}\n"


@pytest.mark.parametrize("command", [[], ["node"], ["identity"], ["identity", "new"], ["receive"], ["send"]])
def test_every_command_has_help(command: Sequence[str]) -> None:
    result = call(*command, "-h")
    assert result.exit_code == 0 and "Usage:" in result.stdout


# ------------------------------------------------------------------ identity


def test_a_new_identity_is_for_its_owner_only_and_can_be_shown(tmp_path: Path) -> None:
    path = tmp_path / "me"
    made = call("identity", "new", str(path))
    assert made.exit_code == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    identity = Identity.load(path)
    shown = call("identity", "show", str(path))
    assert shown.stdout == made.stdout
    assert identity.hash.hex() in shown.stdout and identity.public_key.hex() in shown.stdout
    assert identity.private_key[:32].hex() not in shown.stdout
    assert identity.private_key[32:].hex() not in shown.stdout


def test_an_identity_is_never_overwritten(file: str) -> None:
    result = call("identity", "new", file)
    assert complaint(result, Exit.FILE) == f"{file} exists already and is left as it is"
    assert Path(file).read_bytes() == b"abc"


def test_a_dangling_link_is_no_place_for_a_new_identity(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    assert "exists already" in complaint(call("identity", "new", str(tmp_path / "link")), Exit.FILE)
    assert not (tmp_path / "elsewhere").exists()


def test_a_place_that_does_not_exist_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none" / "me"
    assert complaint(call("identity", "new", str(path)), Exit.FILE) == (
        f"{path} cannot be written: No such file or directory"
    )


def test_an_identity_that_does_not_exist_comes_with_advice(tmp_path: Path) -> None:
    path = tmp_path / "me"
    assert complaint(call("identity", "show", str(path)), Exit.FILE) == (
        f"{path} does not exist: `rnsfast identity new {path}` makes an identity file"
    )


def test_a_file_that_is_no_identity_is_said_to_be_none(file: str) -> None:
    assert "is not an identity file" in complaint(call("identity", "show", file), Exit.FILE)
    assert "is not an identity file" in complaint(call("send", "--identity", file, file, HASH), Exit.FILE)
    assert "is not an identity file" in complaint(
        call("receive", "--identity", file, "--dir", str(Path(file).parent), "--config", str(Path(file).parent / "c")),
        Exit.FILE,
    )


# ------------------------------------------------------------------ send


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("ab", "'ab' is no destination hash: it has 2 hexadecimal digits instead of 32"),
        (HASH + "00", f"'{HASH}00' is no destination hash: it has 34 hexadecimal digits instead of 32"),
        ("z" * 32, f"'{'z' * 32}' is no destination hash: it must have 32 hexadecimal digits"),
        ("", "'' is no destination hash: it has 0 hexadecimal digits instead of 32"),
    ],
)
def test_what_is_no_hash_is_said_to_be_none(file: str, text: str, sentence: str) -> None:
    assert complaint(call("send", file, text), Exit.USAGE) == sentence


def test_an_allow_list_takes_identity_hashes_only(tmp_path: Path) -> None:
    assert complaint(call("receive", "--allow", "12"), Exit.USAGE) == (
        "'12' is no identity hash: it has 2 hexadecimal digits instead of 32"
    )


def test_a_file_that_does_not_exist(tmp_path: Path) -> None:
    path = tmp_path / "none"
    assert complaint(call("send", str(path), HASH), Exit.FILE) == f"{path} cannot be read: no such file or directory"


def test_a_directory_instead_of_a_file(tmp_path: Path) -> None:
    assert complaint(call("send", str(tmp_path), HASH), Exit.FILE) == (
        f"{tmp_path} is a directory; one file is sent at a time"
    )


def test_a_file_without_permission(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", refuse)
    assert complaint(call("send", file, HASH), Exit.FILE) == f"{file} cannot be read: permission denied"


def test_no_interface_at_all_is_the_reason_for_no_path(file: str, config: str) -> None:
    assert complaint(call("send", "--config", config, "--timeout", "0.05", file, HASH), Exit.NO_PATH) == (
        f"no path to {HASH} within 0 s: no interface is enabled in {config}/config"
    )


def test_a_peer_that_is_down_is_the_reason_for_no_path(file: str, tmp_path: Path) -> None:
    config = write_config(tmp_path / "node", client(free_port()), loglevel=0)
    sentence = complaint(call("send", "--config", config, "--timeout", "0.05", file, HASH), Exit.NO_PATH)
    assert sentence.startswith(f"no path to {HASH} within 0 s: no interface is up (Line: ")


def test_a_door_nobody_came_through_is_the_reason_for_no_path(file: str, tmp_path: Path) -> None:
    config = write_config(tmp_path / "node", server(free_port()))
    sentence = complaint(call("send", "--config", config, "--timeout", "0.05", file, HASH), Exit.NO_PATH)
    assert sentence.endswith("nobody is connected (Door: listening)")


def test_a_time_that_is_none_is_refused(file: str) -> None:
    assert call("send", "--timeout", "0", file, HASH).exit_code == Exit.USAGE


# ------------------------------------------------------------------ receive and node


def test_a_place_for_files_that_is_no_directory(file: str) -> None:
    assert complaint(call("receive", "--dir", file), Exit.FILE) == f"{file} is not a directory"


def test_a_place_for_files_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert complaint(call("receive", "--dir", str(tmp_path)), Exit.FILE) == f"{tmp_path} cannot be written to"


@pytest.mark.parametrize("command", [["node"], ["receive"], ["send", "FILE", HASH]])
def test_a_broken_configuration_names_file_and_line(command: list[str], file: str, tmp_path: Path) -> None:
    directory = tmp_path / "node"
    directory.mkdir()
    (directory / "config").write_text("[reticulum]\nenable_transport = perhaps\n")
    arguments = [file if argument == "FILE" else argument for argument in command]
    sentence = complaint(call(*arguments, "--config", str(directory)), Exit.NODE)
    assert sentence.startswith("config:2: [reticulum]: enable_transport: 'perhaps'")


def test_a_directory_that_cannot_be_made(file: str) -> None:
    assert f"{file}/sub" in complaint(call("node", "--config", f"{file}/sub"), Exit.NODE)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (section("Odd", "TCPServerInterface", listen_ip="127.0.0.1", listen_port=1, interface_mode="gatway"), "gatway"),
        (section("Odd", "NoSuchInterface"), "NoSuchInterface"),
        (section("Odd", "TCPClientInterface", target_host="127.0.0.1"), "target_port"),
        (client(4242, "Odd", fixed_mtu=485), "485"),
        ("  [[Odd]]\n    enabled = yes", "type"),
    ],
)
def test_strict_makes_a_faulty_section_fatal_with_the_same_sentence(broken: str, words: str, tmp_path: Path) -> None:
    config = write_config(tmp_path / "node", broken)
    sentence = complaint(call("node", "--strict", "--config", config), Exit.NODE)
    assert "[[Odd]]" in sentence and words in sentence


def test_strict_makes_a_port_in_use_fatal(tmp_path: Path) -> None:
    port = free_port()
    config = write_config(tmp_path / "node", server(port, "One"), server(port, "Two"))
    assert str(port) in complaint(call("node", "--strict", "--config", config), Exit.NODE)


def test_what_comes_from_the_network_cannot_move_the_cursor() -> None:
    assert printable("a\x1b[2Jb\n\u202e") == "a\\x1b[2Jb\\n\\u202e"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PathNotFound(""), 4),
        (LinkTimeout(""), 5),
        (LinkClosed(bytes(16), ""), 1),
        (Refused(""), 6),
        (NotStored(""), 1),
        (ProtocolFault(""), 1),
        (TransferError(""), 1),
        (SourceFault(""), 3),
        (NotAReceiver(""), 2),
        (OutcomeUnknown(""), 8),
        (NodeClosed(""), 7),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_cause_has_the_exit_status_of_the_documentation(error: RnsfastError, code: int) -> None:
    assert code_for(error) == code
