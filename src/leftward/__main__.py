"""`python -m leftward`, as torchrun starts it."""

from leftward.cli.main import run

run()
