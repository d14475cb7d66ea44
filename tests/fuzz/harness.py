"""Inputs by chance, and what must hold of each: it is taken, or refused by one of this package's errors in a few words, soon.

An input is made from its target's name and a number, so that the two say all there is to know of a finding.
"""

import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from auraflux.errors import AurafluxError

LONGEST = 2000  # characters of an error
MOST_LINES = 3


@dataclass(frozen=True)
class Target:
    """Something that takes input from strangers.

    attempt  makes an input by chance and lets it be taken; an AurafluxError refuses it
    short    how many inputs the short form tries
    limit_s  in which an input must be dealt with
    """

    name: str
    attempt: Callable[[random.Random], Any]
    short: int = 20
    limit_s: float = 10.0


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
    def stop(number: int, frame: FrameType | None) -> None:
        raise Hang(f"it took more than {seconds:g} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def attempt(target: Target, number: int, patience: float = 1.0) -> Finding | None:
    """Try one input; `patience` is by how much a machine with other work may take longer."""
    try:
        with _limited(target.limit_s * patience):
            target.attempt(random.Random(f"{target.name}/{number}"))
    except AurafluxError as err:
        said = str(err)
        if not said or said.count("\n") >= MOST_LINES or len(said) > LONGEST:
            return Finding(target.name, number, f"its error has {len(said)} characters: {said[:200]!r}")
    except (Exception, Hang) as err:
        return Finding(target.name, number, f"{type(err).__name__}: {err}"[:400])
    return None


def attempts(targets: list[Target], seconds: float, first: int) -> Iterator[tuple[str, Finding | None]]:
    """Try inputs of all targets in turn until the time is over."""
    end, number = time.monotonic() + seconds, first
    while time.monotonic() < end:
        for target in targets:
            yield target.name, attempt(target, number)
        number += 1
