"""The command `rnsfast`.  docs/commands.md."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import click

from rnsfast import __version__
from rnsfast.cli.exits import CommandError, Exit
from rnsfast.cli.identity import identity
from rnsfast.cli.node import node
from rnsfast.cli.receive import receive
from rnsfast.cli.send import send
from rnsfast.cli.status import status
from rnsfast.cli.tun import tun

NO_ARGUMENTS: Final[Any] = getattr(click.exceptions, "NoArgsIsHelpError", ())  # from click 8.2 on; it shows the help


@contextmanager
def _one_sentence() -> Iterator[None]:
    """What click says about wrong arguments, in the form that all other complaints have."""
    try:
        yield
    except NO_ARGUMENTS:
        raise
    except click.UsageError as error:
        command = "rnsfast" if error.ctx is None else error.ctx.command_path
        sentence = " ".join(error.format_message().split()).removesuffix(".")
        raise CommandError(f"{sentence} (see `{command} -h`)", Exit.USAGE) from error


class Commands(click.Group):
    """Every complaint is one sentence: docs/commands.md, Exit status."""

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        """Called by click."""
        with _one_sentence():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: click.Context) -> Any:
        """Called by click."""
        with _one_sentence():
            return super().invoke(ctx)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="rnsfast", message="%(prog)s %(version)s")
def main() -> None:
    """A fast Reticulum node, and files and IP tunnels over its links.

    Exit status: 0 done; 1 transfer failed; 2 wrong arguments; 3 a file here; 4 no path; 5 no answer; 6 refused;
    7 the node cannot start, or does not run for status; 8 outcome not known; 9 the TUN device; 128 + n signal n.
    """


main.add_command(node)
main.add_command(identity)
main.add_command(receive)
main.add_command(send)
main.add_command(tun)
main.add_command(status)
