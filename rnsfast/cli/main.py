"""`rnsfast`: the console script."""

from __future__ import annotations

import click

from rnsfast import __version__
from rnsfast.cli.identity import identity
from rnsfast.cli.node import node
from rnsfast.cli.receive import receive
from rnsfast.cli.send import send


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="rnsfast")
def main() -> None:
    """A fast node of the Reticulum network, and files over its links."""


main.add_command(node)
main.add_command(identity)
main.add_command(receive)
main.add_command(send)
