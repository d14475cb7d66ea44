"""Phases of a long command on stderr: one line that changes on a terminal, one line each elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click


@contextmanager
def phases() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the phase a command is in, with the time it has taken."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda what: click.echo(f"{what} ...", err=True)
        return
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("")

        def show(what: str) -> None:
            progress.reset(task, description=escape(what))

        yield show
