"""The figures of a process that tries inputs, in a file that outlives it: a crash loses nothing, and is told by its input."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.fuzz.harness import Target, Tried

COLUMNS = ("inputs", "refused", "findings", "seconds", "longest_s", "longest_number", "nbytes", "nbytes_number", "peak", "at")
AT = COLUMNS.index("at")


class Board:
    """A row for each target; `at` is 1 + the number of the input that it is just dealing with."""

    def __init__(self, path: Path, targets: Sequence[Target]):
        self.names = [target.name for target in targets]
        shape = len(targets), len(COLUMNS)
        self.rows = np.memmap(path, np.float64, "r+" if path.exists() else "w+", shape=shape)

    def begin(self, target: Target, number: int) -> None:
        self.rows[self.names.index(target.name), AT] = number + 1

    def end(self, tried: Tried) -> None:
        """Count an input; the first of a target compiles and loads, so it is neither long nor large."""
        row = self.rows[self.names.index(tried.target)]
        row[:4] += 1, tried.refused, tried.what is not None, tried.seconds
        if tried.number and tried.seconds > row[4]:
            row[4:6] = tried.seconds, tried.number
        if tried.number and tried.nbytes > row[6]:
            row[6:8] = tried.nbytes, tried.number
        row[8], row[AT] = max(row[8], tried.peak), 0

    def broken_off(self) -> tuple[str, int] | None:
        """The input that a process has not come back from; it counts as one that was tried."""
        found = np.flatnonzero(self.rows[:, AT])
        if not len(found):
            return None
        row = self.rows[found[0]]
        name, number = self.names[found[0]], int(row[AT]) - 1
        row[[0, 2]] += 1
        row[AT] = 0
        return name, number


def table(boards: Sequence[Board]) -> str:
    """All figures, added up."""
    lines = [f"{'target':20}{'inputs':>10}{'refused':>10}{'findings':>10}{'ms each':>9}{'longest':>24}{'memory':>24}"]
    for at, name in enumerate(boards[0].names):
        rows = np.stack([board.rows[at] for board in boards])
        counts = rows[:, :4].sum(0)
        longest, largest = rows[rows[:, 4].argmax()], rows[rows[:, 6].argmax()]
        if counts[0]:
            long = f"{longest[4]:.2f} s /{int(longest[5])}"
            large = f"{largest[6] / 2**20:.0f} MiB /{int(largest[7])}"
            figures = f"{int(counts[0]):10,}{int(counts[1]):10,}{int(counts[2]):10,}{counts[3] / counts[0] * 1e3:9.1f}"
            lines.append(f"{name:20}{figures}{long:>24}{large:>24}")
    return "\n".join(lines)


def total(boards: Sequence[Board], column: str) -> int:
    return int(sum(board.rows[:, COLUMNS.index(column)].sum() for board in boards))


def peak_nbytes(boards: Sequence[Board]) -> int:
    """The most that any of the processes had."""
    return int(max(board.rows[:, COLUMNS.index("peak")].max() for board in boards))
