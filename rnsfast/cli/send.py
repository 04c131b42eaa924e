"""`rnsfast send`: send a file to a receiver."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from queue import Empty
from typing import Any, Final, cast

import click

from rnsfast.cli.common import (
    LINGER,
    SEND_LOGLEVEL,
    Events,
    Stopped,
    config_directory,
    load_identity,
    no_way_out,
    parse_hash,
    set_up_logging,
    start_node,
)
from rnsfast.cli.exits import CommandError, Exit, code_for, printable
from rnsfast.cli.progress import choose_display, size_text, time_text
from rnsfast.errors import PathNotFound, RnsfastError
from rnsfast.files.errors import Interrupted, SourceFault
from rnsfast.files.sender import Outcome, Sender
from rnsfast.files.source import DescriptorSource, open_source
from rnsfast.node.node import Node
from rnsfast.node.streams import Compression

FIND_WITHIN: Final = 30.0  # seconds for path and link
LEAVE_WITHIN: Final = 5.0  # seconds for an interrupted transfer to end


@click.command()
@click.argument("file")
@click.argument("hash", metavar="HASH")
@click.option("--config", metavar="DIR", help="Configuration directory; it is made if it does not exist.")
@click.option("--identity", metavar="FILE", help="Identify with this identity file, for receivers with an allow list.")
@click.option("--name", help="The name to offer, instead of the file's own.")
@click.option(
    "--timeout",
    metavar="S",
    type=click.FloatRange(0, min_open=True),
    default=FIND_WITHIN,
    show_default=True,
    help="Seconds to find a path and open a link.",
)
@click.option(
    "--compression",
    type=click.Choice(["auto", "never", "always"]),
    default="auto",
    show_default=True,
    help="Compress the content on the way.",
)
@click.option("--no-progress", is_flag=True, help="Show no progress.")
@click.option("-v", "--verbose", count=True, help="Log more; may be repeated.")
def send(
    file: str,
    hash: str,
    config: str | None,
    identity: str | None,
    name: str | None,
    timeout: float,
    compression: str,
    no_progress: bool,
    verbose: int,
) -> None:
    """Send FILE, or standard input for -, to the receiver with the address HASH.

    Ends with status 0 only if the receiver has kept the file and its SHA-256 is that of what was sent.
    """
    destination = parse_hash(hash, "destination hash")
    whose = None if identity is None else load_identity(identity)
    try:
        source = open_source(file)
    except SourceFault as error:
        raise CommandError(str(error), Exit.FILE) from error
    home = config_directory(config)
    set_up_logging(home, verbose, most=SEND_LOGLEVEL)
    display = choose_display(sys.stderr, wanted=not no_progress)
    events = Events()
    with events.listening():
        node = start_node(config)
        try:
            sender = Sender(
                node,
                destination,
                source,
                name=name,
                identity=whose,
                compression=cast(Compression, compression),
                on_progress=display.show,
            )
            outcome = _run(sender, node, home, timeout, events, display.close)
        finally:
            node.stop(linger=LINGER)
    _print(source, outcome)


def _run(sender: Sender, node: Node, home: Path, timeout: float, events: Events, close_display: Any) -> Outcome:
    """The transfer on a thread of its own: a signal interrupts this one, which holds nothing."""

    def work() -> None:
        try:
            events.put(sender.run(timeout))
        except BaseException as error:
            events.put(error)

    threading.Thread(target=work, name="rnsfast-send", daemon=True).start()
    event = events.get()
    stopped = event if isinstance(event, Stopped) else None
    if stopped is not None:
        if not sender.cancel():
            node.stop()  # ends the search for a path
        try:
            event = events.get(timeout=LEAVE_WITHIN)
        except Empty:
            event = Interrupted("interrupted")
    close_display()
    if isinstance(event, Outcome):
        return event  # it was faster than the signal
    if not isinstance(event, RnsfastError):
        raise event
    sentence, code = str(event), int(code_for(event))
    if stopped is not None:
        code = stopped.exit_code
        sentence = sentence if isinstance(event, Interrupted) else f"interrupted ({sentence})"
    elif isinstance(event, PathNotFound) and (problem := no_way_out(node, home)) is not None:
        sentence = f"{sentence.split(':')[0]}: {problem}"
    raise CommandError(sentence, code)


def _print(source: DescriptorSource, outcome: Outcome) -> None:
    name = source.name if outcome.saved_as is None else f"{source.name} as {outcome.saved_as}"
    rate = f", {size_text(outcome.size / outcome.seconds)}/s" if outcome.size and outcome.seconds > 0 else ""
    click.echo(printable(f"sent {name}"))
    click.echo(f"{outcome.size:,} bytes in {time_text(outcome.seconds)}{rate}")
    if outcome.carried < outcome.size:
        click.echo(f"{outcome.carried:,} bytes crossed the link: compressed on the way")
    click.echo(f"sha256 {outcome.sha256.hex()}, the same at the receiver")
