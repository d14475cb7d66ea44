"""Progress of downloads, loading and compilation: a bar on a terminal, elsewhere a line every ten seconds."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# description, amount done, total; bytes, or a count of items if the description reads "doing: item"
Report = Callable[[str, int, int], None]
LINE_EVERY_S = 10.0  # off a terminal; what takes less time leaves no line


class Lines:
    """Progress as lines of text, for logs.

    write  prints a line
    clock  returns seconds
    """

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        self._write, self._clock = write, clock
        self._begun: dict[str, tuple[float, int]] = {}
        self._last = clock()

    def __call__(self, what: str, done: int, total: int) -> None:
        now, doing = self._clock(), what.partition(":")[0]
        start, before = self._begun.setdefault(doing, (now, done))
        if now - self._last < LINE_EVERY_S:
            return
        self._last = now
        amount = f"{done} of {total}" if ":" in what else f"{_size(done)} of {_size(total)}"
        rate = (done - before) / (now - start) if now > start else 0.0
        left = f", {_duration((total - done) / rate)} left" if done - before >= total / 100 and rate > 0 else ""
        self._write(f"{what}: {amount}{left}" if ":" not in what else f"{what}, {amount}{left}")


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(max(1, round(seconds)), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


@contextmanager
def on_terminal(report: Report | None = None) -> Iterator[Report]:
    """Yield the report function: the given one, or one that draws a bar on stderr; off a terminal it writes lines."""
    if report is not None:
        yield report
        return
    if not sys.stderr.isatty():
        yield Lines(lambda line: print(line, file=sys.stderr, flush=True))
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, Task, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.text import Text

    class Amount(DownloadColumn):
        def render(self, task: Task) -> Text:
            return Text(f"{task.completed:.0f} of {task.total:.0f}") if ":" in task.description else super().render(task)

    class Speed(TransferSpeedColumn):
        def render(self, task: Task) -> Text:
            return Text("") if ":" in task.description else super().render(task)

    columns = (TextColumn("{task.description}"), BarColumn(), Amount(), Speed(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        tasks: dict[str, object] = {}

        def draw(what: str, done: int, total: int) -> None:
            doing = what.partition(":")[0]
            if doing not in tasks:
                tasks[doing] = progress.add_task(what, total=total)
            progress.update(tasks[doing], description=what, completed=done, total=total)  # type: ignore[arg-type]

        yield draw
