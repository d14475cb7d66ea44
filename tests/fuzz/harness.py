"""Inputs by chance, and what must hold of each: it is taken, or refused by one of this package's errors in a few words, soon.

An input is made from its target's name and a number, so that the two say all there is to know of a finding.
"""

import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
class Finding:
    """An input that was neither taken nor refused as it should."""

    target: str
    number: int
    what: str


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


def peak_nbytes() -> int:
    """The most memory this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def attempt(target: Target, number: int, patience: float = 1.0) -> Finding | None:
    """Try one input; `patience` is by how much it may take longer."""
    before = peak_nbytes()
    try:
        with _limited(target.limit_s * patience):
            target.attempt(random.Random(f"{target.name}/{number}"))
    except AurafluxError as err:
        said = str(err)
        if not said or said.count("\n") >= MOST_LINES or len(said) > LONGEST:
            return Finding(target.name, number, f"its error has {len(said)} characters: {said[:200]!r}")
    except (Exception, Hang) as err:
        return Finding(target.name, number, f"{type(err).__name__}: {err}"[:400])
    # a target's first input compiles and loads what all of them need
    if number and (grown := peak_nbytes() - before) > target.memory:
        return Finding(target.name, number, f"it took {grown >> 20} MiB of memory")
    return None


def attempts(targets: list[Target], seconds: float, first: int) -> Iterator[tuple[str, int, Finding | None]]:
    """Try inputs of all targets in turn until the time is over; gives what was tried and what was found."""
    end, number = time.monotonic() + seconds, first
    while time.monotonic() < end:
        for target in targets:
            if number % target.every == 0:
                yield target.name, number, attempt(target, number)
        number += 1
