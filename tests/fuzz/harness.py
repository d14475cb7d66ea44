"""Inputs by chance, and what must hold of each: it is taken, or refused by one of this package's errors in a few words, soon.

An input is made from its target's name and a number, so that the two say all there is to know of a finding.
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

LONGEST = 2000  # characters of an error
MOST_LINES = 3
WAITING = 20  # times as long as it may compute an input may take where others use the machine
MEMORY = 256 << 20  # bytes; the files have less than 1 MiB


@dataclass(frozen=True)
class Target:
    """Something that takes input from strangers.

    attempt  makes an input by chance and lets it be taken; an AurafluxError refuses it
    short    how many inputs the short form tries
    limit_s  in which an input must be dealt with
    every    of so many numbers one is tried: slow targets leave the time to the others
    memory   bytes by which an input may raise the peak of the process
    """

    name: str
    attempt: Callable[[random.Random], Any]
    short: int = 20
    limit_s: float = 10.0
    every: int = 1
    memory: int = MEMORY


@dataclass(frozen=True)
class Tried:
    """What became of an input.

    what     is wrong: it was neither taken nor refused as it should; None if all is well
    refused  by one of this package's errors
    nbytes   by which it raised the memory of the process while it was dealt with
    peak     bytes that the process had at most meanwhile
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
    """Stop what takes longer: of the processor's time, since others may have it meanwhile, and in all many times as long."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Hang(f"it took more than {seconds:g} seconds")

    clocks = ((signal.SIGPROF, signal.ITIMER_PROF, seconds), (signal.SIGALRM, signal.ITIMER_REAL, WAITING * seconds))
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
    """The most memory this process has had, on Linux since `forget_peak`."""
    if sys.platform.startswith("linux"):
        with open(STATUS) as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def forget_peak() -> None:
    """Let the peak be what the process has now, so that one input does not hide what the next one takes."""
    if sys.platform.startswith("linux"):
        with suppress(OSError), open(PEAK, "w") as file:
            file.write("5")


def attempt(target: Target, number: int, patience: float = 1.0) -> Tried:
    """Try one input; `patience` is by how much it may take longer."""
    forget_peak()
    before, begun, what, refused = peak_nbytes(), time.perf_counter(), None, False
    try:
        with _limited(target.limit_s * patience), warnings.catch_warnings():
            # of numbers that are none: a user would see lines of source
            warnings.simplefilter("error", RuntimeWarning)
            target.attempt(random.Random(f"{target.name}/{number}"))
    except AurafluxError as err:
        said, refused = str(err), True
        if not said or said.count("\n") >= MOST_LINES or len(said) > LONGEST:
            what = f"its error has {len(said)} characters: {said[:200]!r}"
    except KeyboardInterrupt:
        raise
    # a panic of a package in Rust is no Exception
    except BaseException as err:
        what = f"{type(err).__name__}: {err}"[:400]
    seconds, peak = time.perf_counter() - begun, peak_nbytes()
    nbytes = max(0, peak - before)
    # a target's first input compiles and loads what all of them need
    if what is None and number and nbytes > target.memory:
        what = f"it took {nbytes >> 20} MiB of memory"
    return Tried(target.name, number, what, refused, seconds, nbytes, peak)


@dataclass(frozen=True)
class Share:
    """Which inputs a process tries: every `step`-th number from `first` on, until the time is over or there were enough.

    inputs  of all targets together
    each    of every target, also of those that are tried seldom
    """

    first: int = 0
    step: int = 1
    seconds: float = float("inf")
    inputs: float = float("inf")
    each: float = float("inf")


def turns(targets: list[Target], share: Share) -> Iterator[tuple[Target, int]]:
    """The inputs of a share, all targets in turn."""
    end, made = time.monotonic() + share.seconds, 0
    for turn in itertools.count():
        for target in targets:
            if turn >= share.each or made >= share.inputs or time.monotonic() > end:
                return
            if turn % target.every == 0 or share.each < float("inf"):
                made += 1
                yield target, share.first + turn * share.step
