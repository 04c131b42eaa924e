"""`rnsfast receive`: take files into a directory."""

from __future__ import annotations

import threading
from pathlib import Path

import click

from rnsfast.cli.common import (
    FAILED,
    INTERRUPTED,
    OK,
    USAGE,
    fail,
    load_identity,
    log_to_stderr,
    make_node,
    parse_hash,
    stopping,
)
from rnsfast.cli.progress import display
from rnsfast.crypto.identity import Identity
from rnsfast.errors import RnsfastError
from rnsfast.files.receiver import Arriving, Receiver, Report


@click.command()
@click.option("--config", metavar="DIR", help="Configuration directory; without it the usual places are searched.")
@click.option("--identity", "identity_file", metavar="FILE", help="Keep an address; without it a new one each time.")
@click.option("--dir", "directory", metavar="DIR", default=".", help="Where files go; by default where you are.")
@click.option("--once", is_flag=True, help="Leave after one transfer: 0 if the file was kept.")
@click.option(
    "--allow", metavar="IDENTITY_HASH", multiple=True, help="Take files of this sender only; may be repeated."
)
@click.option("--max-size", type=click.IntRange(0), metavar="BYTES", help="Refuse larger files.")
@click.option("--announce-interval", type=click.FloatRange(1.0), default=1800.0, show_default=True, metavar="SECONDS")
@click.option("--no-progress", is_flag=True, help="Print results only.")
@click.option("-v", "--verbose", count=True, help="Log more; may be repeated.")
def receive(
    config: str | None,
    identity_file: str | None,
    directory: str,
    once: bool,
    allow: tuple[str, ...],
    max_size: int | None,
    announce_interval: float,
    no_progress: bool,
    verbose: int,
) -> None:
    """Print an address, and take files that are sent to it. Nothing is ever overwritten."""
    log_to_stderr(2, verbose)
    senders = {parse_hash(text, "the identity") for text in allow} if allow else None
    identity = Identity() if identity_file is None else load_identity(identity_file)
    target = Path(directory)
    if not target.is_dir():
        fail(f"{directory} is no directory; create it, or name another with --dir")
    node = make_node(config)
    reports: list[Report] = []
    finished = threading.Event()
    said = threading.Lock()
    shown = display("receive", wanted=not no_progress)

    def report(news: Report) -> None:
        with said:
            shown.end(complete=news.ok)
            click.echo(sentence(news), err=not news.ok)
            reports.append(news)
        if once:
            finished.set()

    def progress(news: Arriving) -> None:
        if once:  # several transfers at a time have no one bar
            shown.show(news.received, news.size)

    with stopping(finished.set) as stop:
        try:
            node.start()
            receiver = Receiver(
                node, identity, target, allow=senders, max_size=max_size, on_report=report, on_progress=progress
            )
            click.echo(receiver.hash.hex())
            for failed in node.status()["failed"]:
                click.echo(f"rnsfast: {failed['reason']}", err=True)
            node.on_interface_up(lambda name: receiver.announce())
            receiver.announce()
            while not finished.wait(announce_interval):
                receiver.announce()
        except RnsfastError as error:
            fail(str(error), USAGE)
        finally:
            if once and reports and not stop.is_set():
                receiver.close()
                for link in receiver.links():
                    link.wait_closed(10.0)  # the sender closes when it has the result
            node.stop()
    if once:
        code = INTERRUPTED if stop.is_set() and not reports else OK if reports and reports[0].ok else FAILED
        raise SystemExit(code)


def sentence(report: Report) -> str:
    """One line for each transfer."""
    sender = f" from {report.peer.hex()}" if report.peer is not None else ""
    if not report.ok:
        return f"failed: {report.name}{sender}: {report.reason}"
    rate = report.size / max(report.seconds, 1e-6) / 1e6
    digest = report.sha256.hex() if report.sha256 is not None else ""
    return f"received {report.saved_as}{sender}: {report.size:,} bytes, {rate:.1f} MB/s, sha256 {digest}"
