"""`rnsfast identity`: make and look at identity files."""

from __future__ import annotations

import os
from pathlib import Path

import click

from rnsfast.cli.common import load_identity
from rnsfast.cli.exits import CommandError, Exit
from rnsfast.crypto.identity import Identity


@click.group()
def identity() -> None:
    """Make and look at identity files."""


@identity.command()
@click.argument("file")
def new(file: str) -> None:
    """Make an identity and write it to FILE, which must not exist. It is the private key: keep it to yourself."""
    made = Identity()
    try:
        write_new(file, made.private_key)
    except FileExistsError as error:
        raise CommandError(f"{file} exists already and is left as it is", Exit.FILE) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CommandError(f"{file} cannot be written: {reason}", Exit.FILE) from error
    _show(made)


@identity.command()
@click.argument("file")
def show(file: str) -> None:
    """Print hash and public key of the identity in FILE."""
    _show(load_identity(file))


def _show(shown: Identity) -> None:
    click.echo(f"hash        {shown.hash.hex()}")
    click.echo(f"public key  {shown.public_key.hex()}")


def own_identity(path: Path) -> Identity:
    """The identity of a service of the node that is given none: made once, kept with the node's files."""
    if not path.exists():
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_new(str(path), Identity().private_key)
        except OSError as error:
            raise CommandError(f"{path} cannot be written: {error.strerror}", Exit.FILE) from error
    return load_identity(path)


def write_new(path: str, data: bytes) -> None:
    """A new file that only its owner can read. FileExistsError if there is one; nothing is left if writing fails."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        os.unlink(path)
        raise
