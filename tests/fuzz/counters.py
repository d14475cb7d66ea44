"""Counters of a fuzzing process in a memory-mapped file, which survives a crash and names the input that caused it."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.fuzz.harness import Attempt, Target

COLUMNS = ("inputs", "refused", "findings", "seconds", "longest_s", "longest_number", "nbytes", "nbytes_number", "peak", "at")
AT = COLUMNS.index("at")


class Counters:
    """One row per target; `at` is 1 + the number of the running input, or 0."""

    def __init__(self, path: Path, targets: Sequence[Target]):
        self.names = [target.name for target in targets]
        shape = len(targets), len(COLUMNS)
        self.rows = np.memmap(path, np.float64, "r+" if path.exists() else "w+", shape=shape)

    def begin(self, target: Target, number: int) -> None:
        self.rows[self.names.index(target.name), AT] = number + 1

    def end(self, attempted: Attempt) -> None:
        """Count an input; ignore time and memory of a target's first one, which compiles and loads."""
        row = self.rows[self.names.index(attempted.target)]
        row[:4] += 1, attempted.refused, attempted.what is not None, attempted.seconds
        if attempted.number and attempted.seconds > row[4]:
            row[4:6] = attempted.seconds, attempted.number
        if attempted.number and attempted.nbytes > row[6]:
            row[6:8] = attempted.nbytes, attempted.number
        row[8], row[AT] = max(row[8], attempted.peak), 0

    def interrupted_input(self) -> tuple[str, int] | None:
        """Return and count the input during which the process ended, None if there is none."""
        found = np.flatnonzero(self.rows[:, AT])
        if not len(found):
            return None
        row = self.rows[found[0]]
        name, number = self.names[found[0]], int(row[AT]) - 1
        row[[0, 2]] += 1
        row[AT] = 0
        return name, number


def table(all_counters: Sequence[Counters]) -> str:
    """Format the sums over all processes as a table."""
    lines = [f"{'target':20}{'inputs':>10}{'refused':>10}{'findings':>10}{'ms each':>9}{'longest':>24}{'memory':>24}"]
    for at, name in enumerate(all_counters[0].names):
        rows = np.stack([counters.rows[at] for counters in all_counters])
        counts = rows[:, :4].sum(0)
        longest, largest = rows[rows[:, 4].argmax()], rows[rows[:, 6].argmax()]
        if counts[0]:
            long = f"{longest[4]:.2f} s /{int(longest[5])}"
            large = f"{largest[6] / 2**20:.0f} MiB /{int(largest[7])}"
            figures = f"{int(counts[0]):10,}{int(counts[1]):10,}{int(counts[2]):10,}{counts[3] / counts[0] * 1e3:9.1f}"
            lines.append(f"{name:20}{figures}{long:>24}{large:>24}")
    return "\n".join(lines)


def total(all_counters: Sequence[Counters], column: str) -> int:
    return int(sum(counters.rows[:, COLUMNS.index(column)].sum() for counters in all_counters))


def peak_nbytes(all_counters: Sequence[Counters]) -> int:
    """Return the peak memory of the largest process."""
    return int(max(counters.rows[:, COLUMNS.index("peak")].max() for counters in all_counters))
