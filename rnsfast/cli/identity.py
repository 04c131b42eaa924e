"""`rnsfast identity`: make and show identity files."""

from __future__ import annotations

import os

import click

from rnsfast.cli.common import fail, load_identity
from rnsfast.crypto.identity import Identity
from rnsfast.files.source import reason


@click.group()
def identity() -> None:
    """Make and show identity files (64 bytes, private)."""


@identity.command()
@click.argument("file")
def new(file: str) -> None:
    """Make a new identity and write it to FILE, which must not exist."""
    if os.path.lexists(file):
        fail(f"{file} exists already, and an identity is never overwritten; choose another name or remove it")
    made = Identity()
    try:
        made.save(file)
    except OSError as error:
        fail(f"{file} cannot be written: {reason(error)}")
    click.echo(made.hash.hex())


@identity.command()
@click.argument("file")
def show(file: str) -> None:
    """Print hash and public key of the identity in FILE, never the private key."""
    found = load_identity(file)
    click.echo(f"hash        {found.hash.hex()}")
    click.echo(f"public key  {found.public_key.hex()}")
