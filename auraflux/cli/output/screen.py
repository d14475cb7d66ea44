"""The console that tables are printed to."""

from rich.console import Console

PIPE_WIDTH = 160


def stdout() -> Console:
    """Return a console of the terminal's width; for a pipe or file, wide enough that tables do not wrap."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)
