"""`rnsfast node`: a node in the foreground."""

from __future__ import annotations

from pathlib import Path

import click

from rnsfast import __version__
from rnsfast.cli.common import LINGER, Events, config_directory, set_up_logging, start_node, state_of
from rnsfast.cli.exits import printable
from rnsfast.node.node import Node


@click.command()
@click.option("--config", metavar="DIR", help="Configuration directory; it is made if it does not exist.")
@click.option("--strict", is_flag=True, help="Do not start if a section of the configuration has a fault.")
@click.option("-v", "--verbose", count=True, help="Log more; may be repeated.")
@click.option("-q", "--quiet", count=True, help="Log less; may be repeated.")
def node(config: str | None, strict: bool, verbose: int, quiet: int) -> None:
    """Run a node until SIGINT or SIGTERM; a second signal ends it at once. The log goes to standard error."""
    directory = config_directory(config)
    set_up_logging(directory, verbose - quiet)
    events = Events()
    with events.listening():
        running = start_node(config, strict=strict)
        try:
            _introduce(running, directory)
            events.get()
        finally:
            running.stop(linger=LINGER)
    click.echo("stopped")


def _introduce(running: Node, directory: Path) -> None:
    """What is up and what is not."""
    click.echo(f"rnsfast {__version__}, configuration {printable(str(directory))}")
    status = running.status()
    for interface in status["interfaces"]:
        click.echo(printable(f"{interface['name']} ({interface['type']}): {state_of(interface)}"))
    for failed in status["failed"]:
        click.echo(printable(f"{failed['name']} ({failed['type']}): failed: {failed['reason']}"))
    if not status["interfaces"] and not status["failed"]:
        click.echo(f"no interface is enabled in {printable(str(directory / 'config'))}")
    click.echo("running")
