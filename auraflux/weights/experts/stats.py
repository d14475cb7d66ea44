"""Statistics of the expert cache: hits, misses, bytes read and stall time, per layer and in total."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

_draft_rows: ContextVar[frozenset[int]] = ContextVar("draft_rows", default=frozenset())


@contextmanager
def draft_rows(rows: Iterable[int]) -> Iterator[None]:
    """Declare rows of a step to be draft tokens inside the block: misses that only they cause are counted separately."""
    token = _draft_rows.set(frozenset(rows))
    try:
        yield
    finally:
        _draft_rows.reset(token)


def current_draft_rows() -> frozenset[int]:
    """Return the rows of the current step that are draft tokens."""
    return _draft_rows.get()


@dataclass(frozen=True)
class ExpertCacheStats:
    """Expert requests of one layer or of all.

    hits          requested experts that were cached
    prefetched    requested experts that were prefetched, or being prefetched
    misses        requested experts that were read on demand
    nbytes        bytes read, unused prefetches included
    read_s        seconds with at least one read in flight
    stall_s       seconds in which computation waited for experts
    draft_misses  misses caused by draft tokens alone
    on_cpu        misses that CPU threads computed for a GPU, instead of a fetch
    from_disk     misses of a GPU's slots that host memory had not either
    """

    hits: int = 0
    prefetched: int = 0
    misses: int = 0
    nbytes: int = 0
    read_s: float = 0.0
    stall_s: float = 0.0
    draft_misses: int = 0
    on_cpu: int = 0
    from_disk: int = 0

    @property
    def hit_rate(self) -> float:
        requests = self.hits + self.prefetched + self.misses
        return self.hits / requests if requests else 0.0

    @property
    def bandwidth(self) -> float:
        """Bytes per second while reads were in flight."""
        return self.nbytes / self.read_s if self.read_s else 0.0

    def __sub__(self, before: "ExpertCacheStats") -> "ExpertCacheStats":
        return ExpertCacheStats(
            *(mine - theirs for mine, theirs in zip(vars(self).values(), vars(before).values(), strict=True))
        )


@dataclass(frozen=True)
class ExpertCacheStatsByLayer:
    """Statistics of all layers together, and of each by its module name. Reads of layers overlap: `read_s` is not a sum."""

    total: ExpertCacheStats = ExpertCacheStats()
    layers: dict[str, ExpertCacheStats] = field(default_factory=dict)

    def __sub__(self, before: "ExpertCacheStatsByLayer") -> "ExpertCacheStatsByLayer":
        none = ExpertCacheStats()
        layers = {name: stats - before.layers.get(name, none) for name, stats in self.layers.items()}
        return ExpertCacheStatsByLayer(self.total - before.total, layers)


class ExpertCacheCounters:
    """Running counters of a layer. Reader threads call `begin_read` and `end_read` under their lock."""

    def __init__(self) -> None:
        self.hits = self.prefetched = self.misses = self.draft_misses = self.nbytes = 0
        self.stall_s = 0.0
        self._read_s = 0.0
        self._in_flight = 0
        self._since = 0.0

    def begin_read(self) -> None:
        """Count a read that starts."""
        if self._in_flight == 0:
            self._since = time.perf_counter()
        self._in_flight += 1

    def end_read(self, nbytes: int) -> None:
        """Count a read that has finished."""
        self._in_flight -= 1
        self.nbytes += nbytes
        if self._in_flight == 0:
            self._read_s += time.perf_counter() - self._since

    def snapshot(self) -> ExpertCacheStats:
        """Return the statistics so far."""
        unfinished = time.perf_counter() - self._since if self._in_flight else 0.0
        times = self._read_s + unfinished, self.stall_s
        return ExpertCacheStats(self.hits, self.prefetched, self.misses, self.nbytes, *times, self.draft_misses)
