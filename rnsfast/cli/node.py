"""`rnsfast node`: a node in the foreground."""

from __future__ import annotations

import click

from rnsfast.cli.common import INTERRUPTED, fail, log_to_stderr, make_node, stopping
from rnsfast.errors import RnsfastError


@click.command()
@click.option("--config", metavar="DIR", help="Configuration directory; without it the usual places are searched.")
@click.option("--strict", is_flag=True, help="A faulty interface section ends the node instead of being listed.")
@click.option("-v", "--verbose", count=True, help="Log more; may be repeated.")
@click.option("-q", "--quiet", count=True, help="Log less; may be repeated.")
def node(config: str | None, strict: bool, verbose: int, quiet: int) -> None:
    """Run a node until SIGINT or SIGTERM."""
    log_to_stderr(3, verbose - quiet)
    running = make_node(config, strict=strict)
    with stopping(lambda: None) as stop:
        try:
            running.start()
        except RnsfastError as error:
            fail(str(error))
        except KeyboardInterrupt:
            fail("interrupted while starting", INTERRUPTED)
        try:
            log_to_stderr(running.config.loglevel, verbose - quiet)
            status = running.status()
            for interface in status["interfaces"]:
                click.echo(f"up      {interface['type']} {interface['name']}")
            for failed in status["failed"]:
                click.echo(f"failed  {failed['type']} {failed['name']}: {failed['reason']}")
            click.echo("running; interrupt to stop")
            stop.wait()
        finally:
            running.stop()
    click.echo("stopped")
