"""The commands as processes: transfers over TCP, signals, terminals, full disks."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rnsfast import Identity
from rnsfast.cli.exits import Exit
from tests.cli.support import (
    PATIENCE,
    Running,
    client,
    free_port,
    no_control_characters,
    receiving,
    run,
    running,
    section,
    server,
    terminal,
    wait_for_part,
    write_config,
)

pytestmark = pytest.mark.slow
NUMBER = r"[0-9.]+"


def made_file(path: Path, size: int, seed: int = 1) -> str:
    path.write_bytes(random.Random(seed).randbytes(size))
    return str(path)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# ------------------------------------------------------------------ transfers


def test_a_file_goes_from_one_process_to_the_other(tmp_path: Path) -> None:
    file = made_file(tmp_path / "a.bin", 4_000_000)
    digest = sha256(tmp_path / "a.bin")
    with receiving(tmp_path, "--once") as (receiver, address, config, inbox):
        assert re.fullmatch("[0-9a-f]{32}", address)
        code, out, err = run("send", "--config", config, file, address)
        assert code == 0, err
        assert out[0] == f"sent {file} as a.bin"
        assert re.fullmatch(rf"4,000,000 bytes in {NUMBER} s, {NUMBER} (kB|MB)/s", out[1])
        assert out[2] == f"sha256 {digest}, the same at the receiver"
        assert no_control_characters([*out, *err])
        assert err[-1] == "100 %   4.0 MB of 4.0 MB"
        assert receiver.line("received a.bin: 4,000,000 bytes").endswith(f"sha256 {digest}")
        assert receiver.wait() == 0
        assert sha256(inbox / "a.bin") == digest
        assert no_control_characters([*receiver.out, *receiver.err])


def test_progress_can_be_switched_off(tmp_path: Path) -> None:
    file = made_file(tmp_path / "a.bin", 100_000)
    with receiving(tmp_path) as (_, address, config, _):
        code, out, err = run("send", "--no-progress", "--config", config, file, address)
        assert (code, err, len(out)) == (0, [], 3)


def test_an_empty_file_arrives_and_has_no_rate(tmp_path: Path) -> None:
    file = made_file(tmp_path / "empty", 0)
    with receiving(tmp_path) as (receiver, address, config, inbox):
        code, out, err = run("send", "--config", config, file, address)
        assert code == 0, err
        assert re.fullmatch(rf"0 bytes in {NUMBER} s", out[1])
        receiver.line("received empty: 0 bytes")
        assert (inbox / "empty").read_bytes() == b""


def test_what_compression_saved_is_said_separately(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"a line of text that repeats itself\n" * 100_000)
    with receiving(tmp_path) as (_, address, config, _):
        code, out, err = run("send", "--config", config, str(tmp_path / "text"), address)
        assert code == 0, err
        assert out[1].startswith("3,500,000 bytes in ")
        assert re.fullmatch(r"[0-9,]{4,7} bytes crossed the link: compressed on the way", out[2])
        assert err[-1] == "100 %   3.5 MB of 3.5 MB"


def test_standard_input_is_sent_to_its_end(tmp_path: Path) -> None:
    with receiving(tmp_path) as (receiver, address, config, inbox):
        with running("send", "--config", config, "-", address, stdin=subprocess.PIPE) as sender:
            assert sender.process.stdin is not None
            sender.process.stdin.write("one\n")
            sender.process.stdin.flush()
            sender.process.stdin.write("two\n")
            sender.process.stdin.close()
            assert sender.wait() == 0, sender.err
        receiver.line("received stdin: 8 bytes")
        assert (inbox / "stdin").read_text() == "one\ntwo\n"


def test_a_bar_is_drawn_on_a_terminal(tmp_path: Path) -> None:
    file = made_file(tmp_path / "a.bin", 1_000_000)
    ours, theirs = terminal()
    try:
        with receiving(tmp_path) as (_, address, config, _):
            process = subprocess.Popen(
                [*Running.COMMAND, "send", "--config", config, file, address],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=theirs,
                env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
            )
            os.close(theirs)
            drawn = b""
            try:
                while piece := os.read(ours, 65536):
                    drawn += piece
            except OSError:  # the other end of the terminal was closed
                pass
            assert process.stdout is not None
            with process.stdout:
                summary = process.stdout.read().decode()
            assert process.wait(PATIENCE) == 0
    finally:
        os.close(ours)
    text = drawn.decode()
    assert "\x1b[" in text and "━" in text
    percents = [int(found) for found in re.findall(r"(\d+) %", text)]
    assert percents == sorted(percents) and percents[0] == 0 and percents[-1] == 100
    assert "1.0 MB of 1.0 MB" in text
    assert "\x1b" not in summary and "the same at the receiver" in summary


def test_the_address_stays_the_same(tmp_path: Path) -> None:
    with receiving(tmp_path) as (first, address, _, _):
        first.signal()
        assert first.wait() == 128 + signal.SIGINT
    with receiving(tmp_path) as (_, again, _, _):
        assert again == address


# ------------------------------------------------------------------ who may send


def test_only_those_on_the_list_may_send(tmp_path: Path) -> None:
    file = made_file(tmp_path / "a.bin", 1000)
    me = tmp_path / "me"
    identity = Identity()
    identity.save(me)
    with receiving(tmp_path, "--allow", identity.hash.hex(), "--once") as (receiver, address, config, inbox):
        code, _, err = run("send", "--config", config, "--no-progress", file, address)
        assert code == Exit.REFUSED
        assert err == [
            "rnsfast: the receiver refused: only those on a list may send here, and the sender did not identify itself"
        ]
        receiver.line("rnsfast: a.bin was refused: only those on a list", "err")
        code, _, err = run("send", "--config", config, "--identity", str(me), "--no-progress", file, address)
        assert code == 0, err
        receiver.line(f"received a.bin from {identity.hash.hex()}: 1,000 bytes")
        assert receiver.wait() == 0
        assert os.listdir(inbox) == ["a.bin"]


def test_once_ends_with_a_failure_if_the_transfer_failed(tmp_path: Path) -> None:
    with receiving(tmp_path, "--once", "--max-size", "10") as (receiver, address, config, inbox):
        with running("send", "--config", config, "-", address, "--no-progress", stdin=subprocess.PIPE) as sender:
            assert sender.process.stdin is not None
            sender.process.stdin.write("more than ten bytes")
            sender.process.stdin.close()
            assert sender.wait() == Exit.FAILED
            assert sender.err == ["rnsfast: the receiver could not keep the file: more than 10 bytes came"]
        assert receiver.wait() == 1
        assert "rnsfast: stdin did not arrive: more than 10 bytes came" in receiver.err
        assert os.listdir(inbox) == []


def test_an_address_of_something_else_is_wrong(tmp_path: Path) -> None:
    with receiving(tmp_path) as (_, address, config, _):
        file = made_file(tmp_path / "a.bin", 10)
        wrong = f"{int(address, 16) ^ 1:032x}"
        code, _, err = run("send", "--config", config, "--timeout", "0.3", file, wrong)
        assert (code, err) == (
            Exit.NO_PATH,
            [f"rnsfast: no path to {wrong} within 0 s: nobody reachable has heard of it"],
        )


# ------------------------------------------------------------------ interrupted


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_sender_says_one_sentence_and_nothing_is_left(tmp_path: Path, number: int) -> None:
    with receiving(tmp_path) as (receiver, address, config, inbox):
        with running("send", "--config", config, "--no-progress", "-", address, stdin=subprocess.PIPE) as sender:
            assert sender.process.stdin is not None
            sender.process.stdin.write("x" * 100_000)
            sender.process.stdin.flush()
            wait_for_part(inbox)
            sender.signal(number)
            assert sender.wait() == 128 + number
            (sentence,) = sender.err
            assert sentence.startswith("rnsfast: interrupted ")
            assert sender.out == []
        receiver.line("stdin did not arrive: the link ended before the whole file was here", "err")
        assert os.listdir(inbox) == []


def test_an_interrupted_search_ends_at_once(tmp_path: Path) -> None:
    port = free_port()
    config = write_config(tmp_path / "node", client(port))
    file = made_file(tmp_path / "a.bin", 10)
    with socket.create_server(("127.0.0.1", port)) as listener:
        listener.settimeout(PATIENCE)
        with running("send", "--config", config, "--timeout", "600", file, "00" * 16) as sender:
            listener.accept()[0].close()
            sender.signal()
            assert sender.wait() == 128 + signal.SIGINT
            assert sender.err[-1] == "rnsfast: interrupted before anything was sent"


def test_an_interrupted_receiver_leaves_nothing(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        receiver, address, config, inbox = stack.enter_context(receiving(tmp_path))
        sender = stack.enter_context(
            running("send", "--config", config, "--no-progress", "-", address, stdin=subprocess.PIPE)
        )
        if sender.process.stdin is not None:
            sender.process.stdin.write("x" * 100_000)
            sender.process.stdin.flush()
            wait_for_part(inbox)
            receiver.signal()
            assert receiver.wait() == 128 + signal.SIGINT
            assert os.listdir(inbox) == []
            assert sender.wait() == Exit.FAILED
            (sentence,) = sender.err
            assert sentence.startswith("rnsfast: the link to the receiver ended after ")


def test_a_killed_sender_leaves_nothing(tmp_path: Path) -> None:
    with receiving(tmp_path, "--once") as (receiver, address, config, inbox):
        with running("send", "--config", config, "--no-progress", "-", address, stdin=subprocess.PIPE) as sender:
            assert sender.process.stdin is not None
            sender.process.stdin.write("x" * 100_000)
            sender.process.stdin.flush()
            wait_for_part(inbox)
            sender.process.kill()
        assert receiver.wait() == 1
        assert os.listdir(inbox) == []


# ------------------------------------------------------------------ full disks


@contextmanager
def small_disk(path: Path) -> Iterator[Path]:
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "rnsfast-test", str(path)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("file systems cannot be mounted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_full_disk_is_said_to_both_and_leaves_nothing(tmp_path: Path) -> None:
    big = made_file(tmp_path / "big", 8_000_000)
    with small_disk(tmp_path / "inbox"), receiving(tmp_path, "--once") as (receiver, address, config, inbox):
        with subprocess.Popen(["cat", big], stdout=subprocess.PIPE) as pipe:  # so that the size is not known
            code, _, err = run("send", "--config", config, "--no-progress", "-", address, stdin=pipe.stdout)
        assert code == Exit.FAILED
        assert err == ["rnsfast: the receiver could not keep the file: the disk is full"]
        assert receiver.wait() == 1
        assert "rnsfast: stdin did not arrive: the disk is full" in receiver.err
        assert os.listdir(inbox) == []


def test_a_file_that_cannot_fit_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    file = made_file(tmp_path / "big", 8_000_000)
    with small_disk(tmp_path / "inbox"), receiving(tmp_path) as (_, address, config, inbox):
        code, _, err = run("send", "--config", config, "--no-progress", file, address)
        assert (code, err) == (
            Exit.REFUSED,
            ["rnsfast: the receiver refused: the disk has no room for 8,000,000 bytes"],
        )
        assert os.listdir(inbox) == []


# ------------------------------------------------------------------ the node


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_node_says_what_is_up_and_ends_in_order(tmp_path: Path, number: int) -> None:
    port, taken = free_port(), free_port()
    config = write_config(
        tmp_path / "node",
        server(port, "Good"),
        server(taken, "One"),
        server(taken, "Two"),
        section("Odd", "TCPServerInterface", listen_ip="127.0.0.1", listen_port=1, mode="gatway"),
    )
    with running("node", "--config", config) as node:
        node.line("running")
        assert "Good (TCPServerInterface): listening" in node.out
        assert any(line.startswith("Two (TCPServerInterface): failed: ") and str(taken) in line for line in node.out)
        (odd,) = [line for line in node.out if line.startswith("Odd (TCPServerInterface): failed: config:")]
        assert "'gatway'" in odd and "gateway" in odd and "boundary" in odd
        node.signal(number)
        assert node.wait() == 0
        assert node.out[-1] == "stopped"


def test_signals_that_arrive_together_end_a_node_at_once(tmp_path: Path) -> None:
    config = write_config(tmp_path / "node", server(free_port()))
    with running("node", "--config", config) as node:
        node.line("running")
        node.signal(signal.SIGSTOP)
        os.waitid(os.P_PID, node.process.pid, os.WSTOPPED)
        node.signal(signal.SIGINT)
        node.signal(signal.SIGTERM)
        node.signal(signal.SIGCONT)
        assert node.wait() in (128 + signal.SIGINT, 128 + signal.SIGTERM)  # which comes second is the system's choice
        assert node.err == []


def test_a_signal_to_a_stopped_node_is_not_lost(tmp_path: Path) -> None:
    config = write_config(tmp_path / "node", server(free_port()))
    with running("node", "--config", config) as node:
        node.line("running")
        node.signal(signal.SIGSTOP)
        os.waitid(os.P_PID, node.process.pid, os.WSTOPPED)
        node.signal(signal.SIGTERM)
        node.signal(signal.SIGCONT)
        assert node.wait() == 0
        assert node.out[-1] == "stopped"


def test_two_nodes_in_one_directory_are_refused(tmp_path: Path) -> None:
    config = write_config(tmp_path / "node", server(free_port()))
    with running("node", "--config", config) as node:
        node.line("running")
        code, _, err = run("node", "--config", config)
        assert code == Exit.NODE
        assert err[-1].startswith(
            f"rnsfast: {config}: another node (process {node.process.pid}) is using this directory"
        )
