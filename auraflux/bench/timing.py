"""Timing several ways of doing the same work against each other.

Each contender gets a burst of calls in turn, over and over, so that a busy moment of the machine meets all of them. Between
bursts the process is left alone until it uses no processor time: the threads of a library may spin on after its last call
(OpenMP's for 5 ms, on two cores of a Xeon) and would take the cores from whoever comes next.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

ROUNDS = 5
FEWEST_SAMPLES = 3
LONG_CALL_S = 50e-3  # beside which waking the threads is nothing
SAMPLE_S = 100e-6  # calls shorter than this are timed several at a time
LONGEST_WAIT_S = 0.1


@dataclass
class Contender:
    """One way of doing the work.

    calls    do it once each, on different memory; used in turn
    work     how many times the work each call does
    restore  called whenever all calls have had their turn
    """

    calls: Sequence[Callable[[], object]]
    work: int = 1
    restore: Callable[[], None] = lambda: None
    samples_s: list[float] = field(default_factory=list)
    spent_s: float = 0.0
    call_s: float = 0.0
    _turn: int = 0

    def sample(self, repeats: int) -> float:
        """Seconds for each of `repeats` calls, on the average."""
        calls, turn = self.calls, self._turn
        start = time.perf_counter()
        for number in range(turn, turn + repeats):
            calls[number % len(calls)]()
        took = time.perf_counter() - start
        if turn + repeats >= len(calls):
            self.restore()
        self._turn = (turn + repeats) % len(calls)
        self.spent_s += took
        return took / repeats

    def burst(self, duration_s: float) -> None:
        """Take samples for the given time, at least one; a call that is not counted wakes the threads first."""
        end = time.perf_counter() + duration_s
        if self.call_s < LONG_CALL_S:
            self.call_s = self.sample(1)
        repeats = max(1, int(SAMPLE_S / max(self.call_s, 1e-9)))
        while True:
            self.call_s = self.sample(repeats)
            self.samples_s.append(self.call_s / self.work)
            if time.perf_counter() >= end:
                return

    def needs_more(self, budget_s: float) -> bool:
        """Whether there is time left, or some overdrawn time for the few samples of a slow one."""
        return self.spent_s < (budget_s if len(self.samples_s) >= FEWEST_SAMPLES else FEWEST_SAMPLES * budget_s)

    def summary(self) -> "Timing":
        ordered = sorted(self.samples_s)
        low, high = ordered[len(ordered) // 10], ordered[len(ordered) - 1 - len(ordered) // 10]
        return Timing(statistics.median(ordered), low, high, len(ordered))


@dataclass(frozen=True)
class Timing:
    """The median time of one call, the tenth and ninetieth of a hundred, and how many samples there were."""

    median_s: float
    low_s: float
    high_s: float
    samples: int


def race(contenders: Sequence[Contender], budget_s: float) -> list[Timing]:
    """Time contenders in alternating bursts, each for about `budget_s` in all; slow ones get fewer bursts."""
    for _ in range(ROUNDS):
        for contender in contenders:
            if contender.needs_more(budget_s):
                wait_until_idle()
                contender.burst(budget_s / ROUNDS)
    return [contender.summary() for contender in contenders]


def wait_until_idle() -> None:
    """Sleep until no thread of this process spins."""
    end = time.perf_counter() + LONGEST_WAIT_S
    while time.perf_counter() < end:
        used, start = time.process_time(), time.perf_counter()
        time.sleep(2e-3)
        if time.process_time() - used < 0.25 * (time.perf_counter() - start):
            return
