"""`python -m auraflux` is the same as the command `auraflux`."""

from auraflux.cli import main

main(prog_name="auraflux")
