"""The command `rnsfast`.  docs/commands.md."""

from __future__ import annotations

import click

from rnsfast import __version__
from rnsfast.cli.identity import identity
from rnsfast.cli.node import node
from rnsfast.cli.receive import receive
from rnsfast.cli.send import send
from rnsfast.cli.status import status
from rnsfast.cli.tun import tun


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="rnsfast", message="%(prog)s %(version)s")
def main() -> None:
    """A fast Reticulum node, and files and IP tunnels over its links.

    Exit status: 0 done; 1 transfer failed; 2 wrong arguments; 3 a file here; 4 no path; 5 no answer; 6 refused;
    7 the node cannot start, or does not run for status; 8 outcome not known; 128 + n ended by signal n.
    """


main.add_command(node)
main.add_command(identity)
main.add_command(receive)
main.add_command(send)
main.add_command(tun)
main.add_command(status)
