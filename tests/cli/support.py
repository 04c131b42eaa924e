"""The commands as processes, their output read line by line; and configuration directories for them."""

from __future__ import annotations

import ctypes
import os
import queue
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PATIENCE = 20.0  # real seconds after which a test that waits for a process fails
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def write_config(directory: Path, *sections: str, loglevel: int = 2) -> str:
    """A configuration directory with these sections; returns it as an argument."""
    directory.mkdir(parents=True, exist_ok=True)
    head = f"[reticulum]\nshare_instance = no\n[logging]\nloglevel = {loglevel}\n[interfaces]\n"
    (directory / "config").write_text(head + "\n".join(sections) + "\n")
    return str(directory)


def server(port: int, name: str = "Door", **options: Any) -> str:
    return section(name, "TCPServerInterface", listen_ip="127.0.0.1", listen_port=port, **options)


def client(port: int, name: str = "Line", **options: Any) -> str:
    return section(name, "TCPClientInterface", target_host="127.0.0.1", target_port=port, **options)


def section(name: str, kind: str, **options: Any) -> str:
    lines = [f"  [[{name}]]", f"    type = {kind}", "    enabled = yes"]
    return "\n".join([*lines, *(f"    {key} = {value}" for key, value in options.items())])


class Running:
    """A command that runs. Its lines are taken as they come, with a deadline."""

    COMMAND = (sys.executable, "-m", "rnsfast.cli")

    def __init__(self, *arguments: str, stdin: Any = subprocess.DEVNULL, **options: Any) -> None:
        self.process = subprocess.Popen(
            [*self.COMMAND, *arguments],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )
        self._lines: dict[str, queue.SimpleQueue[str | None]] = {"out": queue.SimpleQueue(), "err": queue.SimpleQueue()}
        self.out: list[str] = []
        self.err: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=(self.process.stdout, "out", self.out), daemon=True),
            threading.Thread(target=self._read, args=(self.process.stderr, "err", self.err), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: Any, which: str, lines: list[str]) -> None:
        for line in stream:
            lines.append(line.rstrip("\n"))
            self._lines[which].put(line.rstrip("\n"))
        self._lines[which].put(None)

    def line(self, contains: str = "", which: str = "out") -> str:
        """The next line with that text; earlier ones are skipped."""
        while True:
            line = self._lines[which].get(timeout=PATIENCE)
            assert line is not None, f"ended without {contains!r}: {self.out} {self.err}"
            if contains in line:
                return line

    def signal(self, number: int = signal.SIGINT) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        code = self.process.wait(PATIENCE)
        for reader in self._readers:
            reader.join(PATIENCE)
        return code

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE)
        for reader in self._readers:
            reader.join(PATIENCE)
        for stream in (self.process.stdout, self.process.stderr, self.process.stdin):
            if stream is not None:
                stream.close()


@contextmanager
def running(*arguments: str, **options: Any) -> Iterator[Running]:
    made = Running(*arguments, **options)
    try:
        yield made
    finally:
        made.end()


@contextmanager
def receiving(tmp_path: Path, *arguments: str) -> Iterator[tuple[Running, str, str, Path]]:
    """A receiver: the process, its address, the configuration for a sender, and where files go."""
    port = free_port()
    inbox = tmp_path / "inbox"
    inbox.mkdir(exist_ok=True)
    config = write_config(tmp_path / "receiver", server(port))
    sender = write_config(tmp_path / "sender", client(port))
    with running("receive", "--config", config, "--dir", str(inbox), *arguments) as process:
        yield process, process.line(), sender, inbox


def run(*arguments: str, **options: Any) -> tuple[int, list[str], list[str]]:
    """A command to its end: exit status, output, errors."""
    with running(*arguments, **options) as process:
        code = process.wait()
        return code, process.out, process.err


def no_control_characters(lines: Sequence[str]) -> bool:
    return not any(CONTROL.search(line) for line in lines)


def terminal() -> tuple[int, int]:
    """Both ends of a pseudo terminal: ours, and the one for the process."""
    return os.openpty()


def wait_for_part(inbox: Path) -> None:
    """Wait until a transfer has begun to write: told by the directory itself."""
    with watching(inbox) as created:
        if not any(inbox.iterdir()):
            created.get(timeout=PATIENCE)


@contextmanager
def watching(directory: Path) -> Iterator[queue.SimpleQueue[bytes]]:
    """Events of the directory as the kernel tells them."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(os.O_CLOEXEC)
    assert descriptor >= 0
    assert libc.inotify_add_watch(descriptor, os.fsencode(directory), 0x100) >= 0  # IN_CREATE
    events: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    stop_reader, stop_writer = os.pipe()

    def read() -> None:
        while True:
            ready, _, _ = select.select([descriptor, stop_reader], [], [])
            if stop_reader in ready:
                return
            events.put(os.read(descriptor, 4096))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield events
    finally:
        os.write(stop_writer, b"!")
        thread.join(PATIENCE)
        for each in (descriptor, stop_reader, stop_writer):
            os.close(each)
