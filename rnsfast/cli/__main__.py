"""`python -m rnsfast.cli`: the same as the console script."""

from rnsfast.cli.main import main

main(prog_name="rnsfast")
