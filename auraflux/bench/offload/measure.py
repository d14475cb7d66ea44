"""Speed of experts that are read from disk: tokens through the MoE layers of a model, and nothing else.

Contenders alternate, a few tokens each. The disk's raw read bandwidth is measured with the same reader before and after each of
them, without compute, so that other load on the machine affects both.
"""

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from auraflux.bench.offload.contenders import MODES, Contender, Mapping, Streaming, make_trace
from auraflux.bench.offload.random_experts import Shape
from auraflux.weights.experts.packed_files import ExpertFiles
from auraflux.weights.experts.stats import ExpertCacheStats

MAPPED = "mapped"
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Sample:
    """The traffic of some tokens in one round, and the disk's raw read bandwidth in bytes per second."""

    tokens: int
    took_s: float
    traffic: ExpertCacheStats
    raw_rate: float | None = None

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.took_s

    @property
    def read_rate(self) -> float:
        """Return bytes read per second of the whole time, compute included."""
        return self.traffic.nbytes / self.took_s

    @property
    def raw_share(self) -> float | None:
        return None if self.raw_rate is None else self.read_rate / self.raw_rate


@dataclass(frozen=True)
class Run:
    """The samples of one contender on one trace, over all rounds."""

    who: str
    trace: str
    samples: Sequence[Sample]

    def median(self, name: str) -> float | None:
        values = [getattr(sample, name) for sample in self.samples]
        return None if None in values else statistics.median(values)

    def rate(self, name: str) -> float:
        """Return the share of expert requests that were cache hits or prefetched."""
        asked = sum(each.traffic.hits + each.traffic.prefetched + each.traffic.misses for each in self.samples)
        return sum(getattr(each.traffic, name) for each in self.samples) / asked

    def row(self, mapped: "Run") -> dict[str, Any]:
        """Return numbers with units in their names: median and best of the rounds. Ratios are to the mapped files."""
        speeds, shares = [each.tokens_per_s for each in self.samples], [each.raw_share for each in self.samples]
        read, raw = self.median("read_rate"), self.median("raw_rate")
        ratios = [mine / each.tokens_per_s for mine, each in zip(speeds, mapped.samples, strict=True)]
        return {
            "who": self.who,
            "trace": self.trace,
            "tokens_per_s": statistics.median(speeds),
            "best_tokens_per_s": max(speeds),
            "read_gb_per_s": None if read is None else read / 1e9,
            "raw_gb_per_s": None if raw is None else raw / 1e9,
            "raw_share": self.median("raw_share"),
            "best_raw_share": max((share for share in shares if share is not None), default=None),
            "hit_rate": self.rate("hits"),
            "ahead_rate": self.rate("prefetched"),
            "stall": None if raw is None else statistics.median(each.traffic.stall_s / each.took_s for each in self.samples),
            "mapped_ratio": statistics.median(ratios),
        }


def measure(
    files: ExpertFiles,
    shape: Shape,
    budget: int,
    tokens: int,
    traces: Sequence[str],
    repeat: int,
    progress: Callable[[str], None],
) -> Iterator[Run]:
    """Run every contender over every trace alternately, `tokens` at a time."""
    warm = warm_up(files, shape, budget)
    for kind in traces:
        ids = make_trace(kind, shape, len(files.files), warm + repeat * len(MODES) * tokens)
        with closing(Streaming(files, shape, budget)) as ours, closing(Mapping(files, budget)) as theirs:
            progress(f"{kind}: warming up")
            ours_at, theirs_at = Runner(ours, shape, ids), Runner(theirs, shape, ids)
            ours_at.run(warm)
            theirs_at.run(warm)
            rounds: dict[str, list[Sample]] = {name: [] for name in (*(mode.name for mode in MODES), MAPPED)}
            for number in range(repeat):
                progress(f"{kind}: round {number + 1} of {repeat}")
                raw = ours.raw_rate()
                for mode in MODES:
                    ours.use(mode)
                    sample, before = ours_at.run(tokens), raw
                    raw = ours.raw_rate()
                    rounds[mode.name].append(replace(sample, raw_rate=max(before, raw)))
                rounds[MAPPED].append(theirs_at.run(tokens))
        yield from (Run(name, kind, samples) for name, samples in rounds.items())


def warm_up(files: ExpertFiles, shape: Shape, budget: int) -> int:
    """Return the number of tokens after which the expert cache is full."""
    slots = budget // sum(file.stride for file in files.files)
    return 2 + 2 * min(slots, shape.count) // shape.k


class Runner:
    """Feeds a contender with a trace [tokens, layers, k]."""

    def __init__(self, contender: Contender, shape: Shape, ids: Tensor):
        torch.manual_seed(0)
        self.contender, self.left = contender, iter(ids)
        self.x, self.weights = torch.randn(1, shape.hidden), torch.full((1, shape.k), 1 / shape.k)

    def run(self, count: int) -> Sample:
        before = self.contender.traffic()
        took = sum(self.contender.token(self.x, ids, self.weights) for ids in itertools.islice(self.left, count))
        return Sample(count, took, self.contender.traffic() - before)


def rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return all runs as numbers, each compared with the mapped files on the same trace."""
    mapped = {run.trace: run for run in runs if run.who == MAPPED}
    return [run.row(mapped[run.trace]) for run in runs]
