"""What reading experts from disk took: how often they were there, how much was read, how long anyone waited."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

_guesses: ContextVar[frozenset[int]] = ContextVar("guesses", default=frozenset())


@contextmanager
def guessing(rows: Iterable[int]) -> Iterator[None]:
    """Inside the block these rows of a step are guesses: experts that only they ask for are counted."""
    token = _guesses.set(frozenset(rows))
    try:
        yield
    finally:
        _guesses.reset(token)


def guesses() -> frozenset[int]:
    """The rows of the step that are guesses."""
    return _guesses.get()


@dataclass(frozen=True)
class Traffic:
    """Experts that tokens asked for, of one layer or of all.

    hits     that were in memory
    ahead    that were read, or being read, before anyone asked
    misses   that had to be read
    nbytes   read, those that nobody then asked for too
    read_s   in which at least one read was under way
    stall_s  in which nothing could be computed for want of experts
    guessed  of the misses those that only guesses asked for, see `run/speculate.py`
    """

    hits: int = 0
    ahead: int = 0
    misses: int = 0
    nbytes: int = 0
    read_s: float = 0.0
    stall_s: float = 0.0
    guessed: int = 0

    @property
    def hit_rate(self) -> float:
        asked = self.hits + self.ahead + self.misses
        return self.hits / asked if asked else 0.0

    @property
    def bandwidth(self) -> float:
        """Bytes per second while reads were under way."""
        return self.nbytes / self.read_s if self.read_s else 0.0

    def __sub__(self, before: "Traffic") -> "Traffic":
        return Traffic(*(mine - theirs for mine, theirs in zip(vars(self).values(), vars(before).values(), strict=True)))


@dataclass(frozen=True)
class ExpertTraffic:
    """All layers together, and each by the name of its mixture. Reads of several layers overlap: `read_s` is no sum."""

    total: Traffic = Traffic()
    layers: dict[str, Traffic] = field(default_factory=dict)

    def __sub__(self, before: "ExpertTraffic") -> "ExpertTraffic":
        none = Traffic()
        layers = {name: traffic - before.layers.get(name, none) for name, traffic in self.layers.items()}
        return ExpertTraffic(self.total - before.total, layers)


class Meter:
    """Counts the traffic of a layer. The reader's threads call `begin` and `end`, under a lock of theirs."""

    def __init__(self) -> None:
        self.hits = self.ahead = self.misses = self.guessed = self.nbytes = 0
        self.stall_s = 0.0
        self._read_s = 0.0
        self._flying = 0
        self._since = 0.0

    def begin(self) -> None:
        """Note that a read is under way."""
        if self._flying == 0:
            self._since = time.perf_counter()
        self._flying += 1

    def end(self, nbytes: int) -> None:
        self._flying -= 1
        self.nbytes += nbytes
        if self._flying == 0:
            self._read_s += time.perf_counter() - self._since

    def traffic(self) -> Traffic:
        going = time.perf_counter() - self._since if self._flying else 0.0
        times = self._read_s + going, self.stall_s
        return Traffic(self.hits, self.ahead, self.misses, self.nbytes, *times, self.guessed)
