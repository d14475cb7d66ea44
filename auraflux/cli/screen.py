"""Where tables go."""

from rich.console import Console

PIPE_WIDTH = 160


def stdout() -> Console:
    """The terminal as wide as it is; a pipe or file wide enough that tables do not wrap."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)
