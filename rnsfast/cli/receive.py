"""`rnsfast receive`: take files that others send."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from math import inf
from pathlib import Path
from queue import Empty
from time import monotonic
from typing import Final

import click

from rnsfast.cli.common import (
    LINGER,
    RECEIVE_LOGLEVEL,
    Events,
    Stopped,
    config_directory,
    load_identity,
    no_way_out,
    parse_hash,
    set_up_logging,
    start_node,
)
from rnsfast.cli.exits import CommandError, Exit, printable
from rnsfast.cli.identity import own_identity
from rnsfast.cli.progress import choose_display, size_text, time_text
from rnsfast.files.errors import NotStored
from rnsfast.files.receiver import MAX_TRANSFERS, Receiver
from rnsfast.files.reception import Arriving, Report
from rnsfast.files.sender import Progress

ANNOUNCE_INTERVAL: Final = 1800.0  # seconds
ANNOUNCE_PAUSE: Final = 5.0  # seconds between announces, at least, however many connections come up
ANNOUNCE_AFTER: Final = 0.5  # seconds from a connection to the announce: a stock client drops one that speaks at once
OWN_IDENTITY: Final = "storage/identities/rnsfast-receive"  # below the configuration directory


class InterfaceUp:
    """An interface, or a connection of one, came up."""


@click.command()
@click.option("--config", metavar="DIR", help="Configuration directory; it is made if it does not exist.")
@click.option("--identity", metavar="FILE", help="Identity file of the address; without it, the node's own is used.")
@click.option(
    "--dir", "target", metavar="DIR", default=".", help="Where the files go; the current directory if not given."
)
@click.option("--once", is_flag=True, help="Leave after one transfer, with exit status 0 if it succeeded.")
@click.option("--allow", metavar="HASH", multiple=True, help="Identity hash of one who may send; may be repeated.")
@click.option("--max-size", metavar="BYTES", type=click.IntRange(0), help="Refuse larger files.")
@click.option(
    "--announce-interval",
    metavar="S",
    type=click.FloatRange(0),
    default=ANNOUNCE_INTERVAL,
    show_default=True,
    help="Seconds between announces; 0 announces only when an interface comes up.",
)
@click.option("--no-progress", is_flag=True, help="Show no progress; without --once none is shown anyway.")
@click.option("-v", "--verbose", count=True, help="Log more; may be repeated.")
def receive(
    config: str | None,
    identity: str | None,
    target: str,
    once: bool,
    allow: Sequence[str],
    max_size: int | None,
    announce_interval: float,
    no_progress: bool,
    verbose: int,
) -> None:
    """Take files that others send to the address printed first. Nothing is ever overwritten."""
    allowed = {parse_hash(text, "identity hash") for text in allow} or None
    directory = Path(target)
    _check_directory(directory)
    home = config_directory(config)
    set_up_logging(home, verbose, most=RECEIVE_LOGLEVEL)
    events = Events()
    display = choose_display(sys.stderr, wanted=once and not no_progress)  # several transfers have no one bar

    def progress(news: Arriving) -> None:
        display.show(Progress(news.received, news.size))

    def report(news: Report) -> None:
        if news.ok:
            display.show(Progress(news.size, news.size, confirmed=True))
        if news.accepted:
            display.close()
        events.put(news)

    with events.listening():
        node = start_node(config)
        try:
            receiver = Receiver(
                node,
                load_identity(identity) if identity is not None else own_identity(home / OWN_IDENTITY),
                directory,
                allow=allowed,
                max_size=max_size,
                max_transfers=1 if once else MAX_TRANSFERS,
                on_report=report,
                on_progress=progress,
            )
            click.echo(receiver.hash.hex())
            node.on_interface_up(lambda name: events.put(InterfaceUp()))
            if not node.interfaces and (problem := no_way_out(node, home)) is not None:
                click.echo(f"rnsfast: {printable(problem)}; waiting for one", err=True)
            code = _serve(receiver, events, once, announce_interval)
            if once and code in (Exit.OK, Exit.FAILED):
                receiver.close()  # the sender has the last word
        except NotStored as error:
            raise CommandError(f"{directory}: {error}", Exit.FILE) from error
        finally:
            node.stop(linger=LINGER)
        receiver.close()
    raise SystemExit(code)


def _check_directory(directory: Path) -> None:
    if not directory.is_dir():
        raise CommandError(f"{directory} is not a directory", Exit.FILE)
    if not os.access(directory, os.W_OK | os.X_OK):
        raise CommandError(f"{directory} cannot be written to", Exit.FILE)


def _serve(receiver: Receiver, events: Events, once: bool, interval: float) -> int:
    """Announce when it is due and print what happens, until a signal or, with `once`, the end of a transfer."""
    announced, due = -inf, monotonic()
    while True:
        now = monotonic()
        if now >= due:
            due = inf  # without an interface: until one comes up
            if receiver.announce():
                announced = now
                due = now + interval if interval else due
        try:
            event = events.get(timeout=None if due == inf else max(0.0, due - monotonic()))
        except Empty:
            continue
        if isinstance(event, InterfaceUp):
            due = min(due, max(monotonic() + ANNOUNCE_AFTER, announced + ANNOUNCE_PAUSE))
        elif isinstance(event, Report):
            _print(event)
            if once and event.accepted:
                return Exit.OK if event.ok else Exit.FAILED
        elif isinstance(event, Stopped):
            return event.exit_code


def _print(report: Report) -> None:
    """A line for each transfer: on standard output if it succeeded, else on standard error."""
    sender = "" if report.peer is None else f" from {report.peer.hex()}"
    name = "something" if report.name is None else report.name
    if report.ok and report.sha256 is not None:
        rate = f", {size_text(report.size / report.seconds)}/s" if report.size and report.seconds > 0 else ""
        click.echo(
            printable(
                f"received {report.saved_as}{sender}: {report.size:,} bytes in {time_text(report.seconds)}{rate},"
                f" sha256 {report.sha256.hex()}"
            )
        )
    elif report.accepted:
        click.echo(f"rnsfast: {printable(f'{name}{sender} did not arrive: {report.reason}')}", err=True)
    else:
        click.echo(f"rnsfast: {printable(f'{name}{sender} was refused: {report.reason}')}", err=True)
