"""Progress of downloads, loading and compilation: a bar on a terminal, nothing elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# description, amount done, total; bytes, or a count of items if the description reads "doing: item"
Report = Callable[[str, int, int], None]


@contextmanager
def on_terminal(report: Report | None = None) -> Iterator[Report]:
    """Yield the report function: the given one, or one that draws a bar on stderr if that is a terminal."""
    if report is not None:
        yield report
        return
    if not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, Task, TextColumn, TransferSpeedColumn
    from rich.text import Text

    class Amount(DownloadColumn):
        def render(self, task: Task) -> Text:
            return Text(f"{task.completed:.0f} of {task.total:.0f}") if ":" in task.description else super().render(task)

    class Speed(TransferSpeedColumn):
        def render(self, task: Task) -> Text:
            return Text("") if ":" in task.description else super().render(task)

    columns = (TextColumn("{task.description}"), BarColumn(), Amount(), Speed())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        tasks: dict[str, object] = {}

        def draw(what: str, done: int, total: int) -> None:
            doing = what.partition(":")[0]
            if doing not in tasks:
                tasks[doing] = progress.add_task(what, total=total)
            progress.update(tasks[doing], description=what, completed=done, total=total)  # type: ignore[arg-type]

        yield draw
