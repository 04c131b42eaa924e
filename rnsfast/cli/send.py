"""`rnsfast send`: stream a file to a receiver."""

from __future__ import annotations

import threading
from typing import Any, Final, cast

import click

from rnsfast.cli.common import (
    FAILED,
    INTERRUPTED,
    NOT_STORED,
    REFUSED,
    UNKNOWN,
    UNREACHABLE,
    USAGE,
    fail,
    load_identity,
    log_to_stderr,
    make_node,
    parse_hash,
    stopping,
)
from rnsfast.cli.progress import display
from rnsfast.errors import LinkTimeout, PathNotFound, RnsfastError
from rnsfast.files.errors import Interrupted, NotAReceiver, NotStored, OutcomeUnknown, Refused, SourceFault
from rnsfast.files.sender import Outcome, Progress, Sender
from rnsfast.files.source import open_source
from rnsfast.node.streams import Compression

CODES: Final[tuple[tuple[type[Exception], int], ...]] = (
    (Refused, REFUSED),
    (NotStored, NOT_STORED),
    (OutcomeUnknown, UNKNOWN),
    (Interrupted, INTERRUPTED),
    (NotAReceiver, USAGE),
    (SourceFault, FAILED),
    (PathNotFound, UNREACHABLE),
    (LinkTimeout, UNREACHABLE),
)


@click.command()
@click.argument("file")
@click.argument("address")
@click.option("--config", metavar="DIR", help="Configuration directory; without it the usual places are searched.")
@click.option("--identity", "identity_file", metavar="FILE", help="Show the receiver who is sending.")
@click.option("--name", help="The name to offer instead of the file's own.")
@click.option(
    "--timeout", type=click.FloatRange(0.1), default=30.0, show_default=True, help="Seconds for path and link."
)
@click.option("--compression", type=click.Choice(["auto", "never", "always"]), default="auto", show_default=True)
@click.option("--no-progress", is_flag=True, help="Print the result only.")
@click.option("-v", "--verbose", count=True, help="Log more; may be repeated.")
def send(
    file: str,
    address: str,
    config: str | None,
    identity_file: str | None,
    name: str | None,
    timeout: float,
    compression: str,
    no_progress: bool,
    verbose: int,
) -> None:
    """Send FILE (- for standard input) to the receiver at ADDRESS, 32 hex digits."""
    log_to_stderr(1, verbose)
    destination = parse_hash(address, "the address")
    identity = None if identity_file is None else load_identity(identity_file)
    try:
        source = open_source(file)
    except SourceFault as error:
        fail(str(error))
    node = make_node(config)
    shown = display(f"send {source.offered_name}", wanted=not no_progress)
    outcome: list[Any] = []

    def progress(news: Progress) -> None:
        shown.show(news.sent, news.size)

    try:
        node.start()
        sender = Sender(
            node, destination, source, name=name, identity=identity,
            compression=cast(Compression, compression), on_progress=progress,
        )  # fmt: skip

        def work() -> None:
            try:
                outcome.append(sender.run(timeout))
            except (RnsfastError, OSError) as error:
                outcome.append(error)
            finally:
                done.set()

        done = threading.Event()

        def interrupt() -> None:
            sender.cancel()
            threading.Thread(target=node.stop, daemon=True).start()  # ends a search for a path

        with stopping(interrupt):
            threading.Thread(target=work, name="rnsfast-send", daemon=True).start()
            done.wait()
    except RnsfastError as error:
        outcome.append(error)
    finally:
        result = outcome[0] if outcome else None
        shown.end(complete=isinstance(result, Outcome))
        node.stop()
        source.close()
    if isinstance(result, Outcome):
        click.echo(summary(result))
        return
    fail(str(result), next((code for kind, code in CODES if isinstance(result, kind)), FAILED if outcome else USAGE))


def summary(outcome: Outcome) -> str:
    """What arrived, how fast, and that both ends computed the same digest."""
    rate = outcome.size / max(outcome.seconds, 1e-6) / 1e6
    lines = [
        f"sent {outcome.size:,} bytes in {outcome.seconds:.2f} s, {rate:.1f} MB/s",
        f"sha256 {outcome.sha256.hex()}, the same at the receiver, who saved it as {outcome.saved_as}",
    ]
    if outcome.carried < outcome.size:
        lines.insert(1, f"{outcome.carried:,} bytes of content crossed the link, compressed")
    return "\n".join(lines)
