"""What the commands share: arguments, logging, signals, starting a node."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty
from time import monotonic
from types import FrameType
from typing import Any, Final

from rnsfast.cli.exits import CommandError, Exit
from rnsfast.crypto.identity import Identity
from rnsfast.errors import ConfigError, IdentityError, InterfaceError, StorageError
from rnsfast.node import logs
from rnsfast.node.config import CONFIG_NAME, NodeConfig, find_config_dir, read_config
from rnsfast.node.node import Node

ENDING: Final = tuple(number for name in ("SIGINT", "SIGTERM") if (number := getattr(signal, name, None)) is not None)
SEND_LOGLEVEL: Final = 1  # `send` shows errors only, whatever the configuration says: it ends with a sentence anyway
RECEIVE_LOGLEVEL: Final = 2  # `receive` shows warnings, too
LINGER: Final = 0.1  # seconds before connections end: stock peers lose what comes right before their end


class Stopped:
    """A signal that asks for the end."""

    def __init__(self, number: int) -> None:
        self.number = number

    @property
    def exit_code(self) -> int:
        """As shells report it."""
        return 128 + self.number


class Events:
    """What the main thread waits for: any thread and signal handlers put, the main thread gets.

    It waits for a socket that signals write to as well. A lock would not do: a signal that another thread takes, or
    that arrives just before the wait, does not wake who waits for a lock.
    """

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def put(self, item: Any) -> None:
        """Never waits."""
        self._items.append(item)
        with suppress(OSError):  # full: then it is readable anyway; closed: nobody waits any more
            self._writer.send(b"\0")

    def get(self, timeout: float | None = None) -> Any:
        """The oldest item. Raises queue.Empty if none comes within `timeout` seconds."""
        end = None if timeout is None else monotonic() + timeout
        while not self._items:
            remaining = None if end is None else end - monotonic()
            if remaining is not None and remaining <= 0:
                raise Empty
            if select.select([self._reader], [], [], remaining)[0]:
                with suppress(BlockingIOError):
                    self._reader.recv(4096)
        return self._items.popleft()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, the first SIGINT or SIGTERM puts a Stopped, and a second one ends the process at once."""
        first: list[int] = []

        def handler(number: int, frame: FrameType | None) -> None:
            if first:
                os._exit(128 + number)
            first.append(number)
            signal.signal(number, signal.SIG_DFL)  # also when the process is stuck and runs no handlers
            self.put(Stopped(number))

        before = {number: signal.signal(number, handler) for number in ENDING}
        wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, action in before.items():
                signal.signal(number, action)
            self._reader.close()
            self._writer.close()


class LateStderr:
    """Standard error as it is at the moment of writing: a progress bar puts itself in between."""

    def write(self, text: str) -> int:
        """Called by the log."""
        return sys.stderr.write(text)

    def flush(self) -> None:
        """Called by the log."""
        sys.stderr.flush()


def set_up_logging(directory: Path, verbosity: int, *, most: int = 8) -> None:
    """Log to standard error at the level of the configuration in `directory`, at `most` so much, plus `verbosity`."""
    config = NodeConfig()
    with suppress(ConfigError, OSError):  # starting the node says what is wrong with it
        config = read_config(directory / CONFIG_NAME).config
    level = min(config.effective_loglevel(), most) + verbosity
    logs.set_up(max(-1, level), timestamps=config.logtimestamps, stream=LateStderr())  # type: ignore[arg-type]


def start_node(config: str | None, *, strict: bool = False) -> Node:
    """A running node, or CommandError."""
    node = Node(config, strict=strict)
    try:
        return node.start()
    except (ConfigError, StorageError, InterfaceError) as error:
        raise CommandError(str(error), Exit.NODE) from error


def config_directory(config: str | None) -> Path:
    """The directory that `start_node` uses."""
    return find_config_dir(config)


def parse_hash(text: str, what: str) -> bytes:
    """The 16 bytes of a hash in hexadecimal, with or without the pointed brackets some programs print."""
    digits = text.strip().removeprefix("<").removesuffix(">")
    try:
        value = bytes.fromhex(digits)
    except ValueError as error:
        raise CommandError(f"{text!r} is no {what}: it must have 32 hexadecimal digits", Exit.USAGE) from error
    if len(value) != 16:
        raise CommandError(f"{text!r} is no {what}: it has {len(digits)} hexadecimal digits instead of 32", Exit.USAGE)
    return value


def load_identity(path: str | Path) -> Identity:
    """The identity in that file, or CommandError."""
    try:
        return Identity.load(path)
    except FileNotFoundError as error:
        raise CommandError(
            f"{path} does not exist: `rnsfast identity new {path}` makes an identity file", Exit.FILE
        ) from error
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}", Exit.FILE) from error
    except IdentityError as error:
        raise CommandError(str(error), Exit.FILE) from error


def no_way_out(node: Node, directory: Path) -> str | None:
    """Why nothing can be reached at all; None if an interface is up."""
    status = node.status()
    if any(port["online"] for port in status["ports"]):
        return None
    for failed in status["failed"]:
        return f"no interface is up ({failed['reason']})"
    for interface in status["interfaces"]:
        if interface.get("state") == "listening":
            return f"nobody is connected ({interface['name']}: listening)"
        return f"no interface is up ({interface['name']}: {state_of(interface)})"
    return f"no interface is enabled in {directory / CONFIG_NAME}"


def state_of(interface: dict[str, Any]) -> str:
    """State of an interface, and what went wrong last if it is not up."""
    state, problem = interface.get("state", "unknown"), interface.get("last_error")
    return f"{state}, {problem}" if problem and state not in ("connected", "listening", "online", "up") else str(state)
