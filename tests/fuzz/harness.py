"""Random inputs, each of which is accepted or refused by one of this package's errors, within limits of time and memory.

An input is generated from its target's name and a number, so that the two reproduce a finding.
"""

import itertools
import random
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from auraflux.errors import AurafluxError

MAX_MESSAGE_LENGTH = 2000  # characters of an error
MAX_MESSAGE_LINES = 3
WALL_CLOCK_FACTOR = 20  # wall-clock limit over CPU-time limit, for busy machines
MEMORY = 256 << 20  # bytes; input files are smaller than 1 MiB


@dataclass(frozen=True)
class Target:
    """A function that processes untrusted input.

    attempt  generates and processes an input; an AurafluxError refuses it
    short    number of inputs in the short run
    limit_s  time limit of an input
    every    only every n-th number is run, for slow targets
    memory   bytes by which an input may raise the peak memory of the process
    """

    name: str
    attempt: Callable[[random.Random], Any]
    short: int = 20
    limit_s: float = 10.0
    every: int = 1
    memory: int = MEMORY


@dataclass(frozen=True)
class Attempt:
    """The outcome of an input.

    what     description of a finding, None if the input was accepted or properly refused
    refused  by one of this package's errors
    nbytes   increase of the peak memory during the input
    peak     peak memory of the process during the input, in bytes
    """

    target: str
    number: int
    what: str | None
    refused: bool
    seconds: float
    nbytes: int
    peak: int


class Hang(BaseException):
    """An input took too long."""


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Interrupt a block after a limit of CPU time, and after a multiple of it in wall-clock time."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Hang(f"it took more than {seconds:g} seconds")

    clocks = ((signal.SIGPROF, signal.ITIMER_PROF, seconds), (signal.SIGALRM, signal.ITIMER_REAL, WALL_CLOCK_FACTOR * seconds))
    before = [signal.signal(number, stop) for number, _, _ in clocks]
    for _, clock, limit in clocks:
        signal.setitimer(clock, limit)
    try:
        yield
    finally:
        for (number, clock, _), handler in zip(clocks, before, strict=True):
            signal.setitimer(clock, 0)
            signal.signal(number, handler)


STATUS, PEAK = "/proc/self/status", "/proc/self/clear_refs"


def peak_nbytes() -> int:
    """Return the peak memory of this process, on Linux since `reset_peak`."""
    if sys.platform.startswith("linux"):
        with open(STATUS) as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def reset_peak() -> None:
    """Reset the peak memory to the current memory, so that one input does not hide another."""
    if sys.platform.startswith("linux"):
        with suppress(OSError), open(PEAK, "w") as file:
            file.write("5")


def attempt(target: Target, number: int, patience: float = 1.0) -> Attempt:
    """Run one input; `patience` multiplies its time limit."""
    reset_peak()
    before, begun, what, refused = peak_nbytes(), time.perf_counter(), None, False
    try:
        with _limited(target.limit_s * patience), warnings.catch_warnings():
            # numpy warns of invalid values with lines of source, which a user would see
            warnings.simplefilter("error", RuntimeWarning)
            target.attempt(random.Random(f"{target.name}/{number}"))
    except AurafluxError as err:
        message, refused = str(err), True
        if not message or message.count("\n") >= MAX_MESSAGE_LINES or len(message) > MAX_MESSAGE_LENGTH:
            what = f"its error has {len(message)} characters: {message[:200]!r}"
    except KeyboardInterrupt:
        raise
    # a Rust panic is not an Exception
    except BaseException as err:
        what = f"{type(err).__name__}: {err}"[:400]
    seconds, peak = time.perf_counter() - begun, peak_nbytes()
    nbytes = max(0, peak - before)
    # a target's first input compiles and loads
    if what is None and number and nbytes > target.memory:
        what = f"it took {nbytes >> 20} MiB of memory"
    return Attempt(target.name, number, what, refused, seconds, nbytes, peak)


@dataclass(frozen=True)
class Share:
    """The inputs of one process: every `step`-th number from `first` on, up to limits of time and number.

    inputs  of all targets together
    each    of every target, ignoring `every`
    """

    first: int = 0
    step: int = 1
    seconds: float = float("inf")
    inputs: float = float("inf")
    each: float = float("inf")


def inputs_of(targets: list[Target], share: Share) -> Iterator[tuple[Target, int]]:
    """Yield the inputs of a share, round-robin over the targets."""
    end, made = time.monotonic() + share.seconds, 0
    for round_number in itertools.count():
        for target in targets:
            if round_number >= share.each or made >= share.inputs or time.monotonic() > end:
                return
            if round_number % target.every == 0 or share.each < float("inf"):
                made += 1
                yield target, share.first + round_number * share.step
