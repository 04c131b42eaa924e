"""How commands end. docs/commands.md lists these codes for users: they do not change."""

from __future__ import annotations

import sys
from enum import IntEnum
from typing import IO, Any

import click

from rnsfast.errors import LinkTimeout, NodeClosed, PathNotFound, RnsfastError
from rnsfast.files.errors import Interrupted, NotAReceiver, OutcomeUnknown, Refused, SourceFault


class Exit(IntEnum):
    """Exit status of the process. A command that a signal ended has 128 plus the signal's number."""

    OK = 0
    FAILED = 1  # the transfer began and did not succeed
    USAGE = 2  # wrong arguments
    FILE = 3  # a file or directory on this computer
    NO_PATH = 4  # nobody reachable knows the destination
    NO_ANSWER = 5  # there is a path, but the destination does not answer
    REFUSED = 6  # the receiver does not want the file
    NODE = 7  # the node cannot start with this configuration; for `status`: none runs, or none that answers
    UNKNOWN = 8  # everything was sent, the receiver did not say what became of it
    DEVICE = 9  # the TUN device cannot be opened or set up, or it is gone


class CommandError(click.ClickException):
    """One sentence on standard error, and the exit status."""

    def __init__(self, sentence: str, code: int) -> None:
        super().__init__(sentence)
        self.__dict__["exit_code"] = code  # click reads it; its stub calls it a class variable

    def show(self, file: IO[Any] | None = None) -> None:
        """Called by click."""
        click.echo(f"rnsfast: {printable(self.message)}", file=sys.stderr if file is None else file)


def printable(text: str) -> str:
    """`text` without anything that moves cursors or turns the direction: names and reasons come from the network."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


#: In this order: the first class that fits decides.
CODES = (
    (PathNotFound, Exit.NO_PATH),
    (LinkTimeout, Exit.NO_ANSWER),
    (NotAReceiver, Exit.USAGE),
    (Refused, Exit.REFUSED),
    (SourceFault, Exit.FILE),
    (OutcomeUnknown, Exit.UNKNOWN),
    (Interrupted, Exit.FAILED),  # if no signal did it
    (NodeClosed, Exit.NODE),
)


def code_for(error: RnsfastError) -> Exit:
    """The exit status for what a transfer raised."""
    return next((code for kind, code in CODES if isinstance(error, kind)), Exit.FAILED)
