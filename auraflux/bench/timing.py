"""Timing of several implementations of the same work against each other.

Contenders run in alternating bursts of calls, so that a busy moment of the machine affects all of them. Between bursts the
process waits until it uses no CPU time: a library's threads may spin after its last call (OpenMP's for 5 ms, on two cores of a
Xeon) and would take cores from the next contender.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

ROUNDS = 5
MIN_SAMPLES = 3
LONG_CALL_S = 50e-3  # waking the threads takes a negligible part of it
SAMPLE_S = 100e-6  # calls shorter than this are timed several at a time
MAX_WAIT_S = 0.1


@dataclass
class Contender:
    """One implementation of the work.

    calls    do the work once each, on different memory; used round-robin
    work     how many times each call does the work
    restore  called after each round of all calls
    """

    calls: Sequence[Callable[[], object]]
    work: int = 1
    restore: Callable[[], None] = lambda: None
    samples_s: list[float] = field(default_factory=list)
    spent_s: float = 0.0
    call_s: float = 0.0
    _next: int = 0

    def sample(self, repeats: int) -> float:
        """Return the mean seconds of `repeats` calls."""
        calls, first = self.calls, self._next
        start = time.perf_counter()
        for number in range(first, first + repeats):
            calls[number % len(calls)]()
        took = time.perf_counter() - start
        if first + repeats >= len(calls):
            self.restore()
        self._next = (first + repeats) % len(calls)
        self.spent_s += took
        return took / repeats

    def burst(self, duration_s: float) -> None:
        """Take samples for the given time, at least one, after an uncounted call that wakes the threads."""
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
        """Return True while the budget lasts; a slow contender may exceed it to get the minimum of samples."""
        return self.spent_s < (budget_s if len(self.samples_s) >= MIN_SAMPLES else MIN_SAMPLES * budget_s)

    def summary(self) -> "Timing":
        ordered = sorted(self.samples_s)
        low, high = ordered[len(ordered) // 10], ordered[len(ordered) - 1 - len(ordered) // 10]
        return Timing(statistics.median(ordered), low, high, len(ordered))


@dataclass(frozen=True)
class Timing:
    """The median time of one call, its p10 and p90, and the number of samples."""

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
    end = time.perf_counter() + MAX_WAIT_S
    while time.perf_counter() < end:
        used, start = time.process_time(), time.perf_counter()
        time.sleep(2e-3)
        if time.process_time() - used < 0.25 * (time.perf_counter() - start):
            return
