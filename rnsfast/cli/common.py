"""What the commands share: exit codes, sentences, hashes, logging, and stopping on a signal."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

import click

from rnsfast.crypto.identity import Identity
from rnsfast.errors import IdentityError
from rnsfast.files.source import reason
from rnsfast.node import logs
from rnsfast.node.node import Node

# Exit codes; docs/operating.md lists them.
OK: Final = 0
FAILED: Final = 1  # a transfer began and did not succeed
USAGE: Final = 2  # arguments, configuration, files of the user
UNREACHABLE: Final = 3  # no path, or no answer
REFUSED: Final = 4  # the receiver did not want it
NOT_STORED: Final = 5  # the receiver could not keep it
UNKNOWN: Final = 6  # everything was sent, and no result came
INTERRUPTED: Final = 130  # SIGINT, SIGTERM


def fail(message: str, code: int = USAGE) -> NoReturn:
    """One sentence on standard error, and the exit code."""
    click.echo(f"rnsfast: {message}", err=True)
    sys.exit(code)


def parse_hash(text: str, what: str) -> bytes:
    """16 bytes from 32 hex digits, with or without the brackets they are often printed in."""
    digits = text.strip().strip("<>")
    if len(digits) != 32:
        fail(f"{what} {text!r} has {len(digits)} characters; an address has 32 hex digits")
    try:
        return bytes.fromhex(digits)
    except ValueError:
        fail(f"{what} {text!r} has characters that are no hex digits; an address has 32 of them")


def load_identity(path: str) -> Identity:
    """Read an identity file of the user."""
    try:
        return Identity.load(path)
    except IdentityError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{path} cannot be read: {reason(error)}")


def log_to_stderr(node_loglevel: int, verbosity: int) -> None:
    """The configuration's level, moved by -v and -q."""
    logs.set_up(max(-1, min(8, node_loglevel + verbosity)))


def make_node(config: str | None, *, strict: bool = False) -> Node:
    """A node that is not started yet."""
    return Node(None if config is None else Path(config), strict=strict)


@contextmanager
def stopping(on_signal: Callable[[], None]) -> Iterator[threading.Event]:
    """SIGINT and SIGTERM call `on_signal` and set the event; a second one ends the process at once.

    The main thread must do nothing but wait for events inside: a handler runs in the middle of whatever it does.
    """
    stop = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        stop.set()
        on_signal()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
