"""How the command line says no: one sentence on stderr and exit code 1."""

from typing import IO, Any

import click


class Failure(click.ClickException):
    """A reason to stop, told without a traceback."""

    exit_code = 1

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"error: {self.message}", file=file, err=file is None)
