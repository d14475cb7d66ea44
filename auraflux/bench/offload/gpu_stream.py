"""Speed of experts on disk below a GPU: tokens through MoE layers that are replayed as one CUDA graph.

The disk's raw bandwidth is measured with the same reads before and after each round, without a GPU.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from auraflux.bench.offload.contenders import RAW_S, RawReads, make_trace
from auraflux.bench.offload.random_experts import Shape
from auraflux.ops import Routing
from auraflux.weights.experts.disk_reader import DiskReader
from auraflux.weights.experts.packed_files import ExpertFiles
from auraflux.weights.experts.pool.gpu_pool import GpuExpertPool, PoolPlan
from auraflux.weights.experts.resident import MixtureInput
from auraflux.weights.experts.stats import ExpertCacheStats


@dataclass(frozen=True)
class GpuRun:
    """Memory of a run.

    slots      bytes of expert slots on the GPU
    host       bytes of the cache in host memory
    bandwidth  bytes per second of a simulated disk; None for the real one
    """

    slots: int
    host: int
    bandwidth: int | None = None


@dataclass(frozen=True)
class Round:
    """The traffic of some tokens, and the disk's raw bandwidth in bytes per second."""

    tokens: int
    took_s: float
    traffic: ExpertCacheStats
    raw_rate: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.took_s

    @property
    def read_rate(self) -> float:
        return self.traffic.nbytes / self.took_s

    @property
    def raw_share(self) -> float:
        return self.read_rate / self.raw_rate


class GraphedLayers:
    """MoE layers of a pool, replayed as a CUDA graph for one token."""

    def __init__(self, files: ExpertFiles, shape: Shape, run: GpuRun, device: torch.device):
        plan = PoolPlan(
            len(files.files), shape.count, shape.k, run.slots, run.host, cpu=False, verify=False, disk=True,
            disk_bandwidth=run.bandwidth,
        )  # fmt: skip
        self.store = GpuExpertPool(plan, device)
        layers = [self.store.add_disk_layer(file, file.like, None, {}) for file in files.files]
        self.store.finish()
        torch.manual_seed(0)
        x = torch.randn(1, shape.hidden, device=device).bfloat16()
        self.scores = torch.zeros(len(layers), 1, shape.count, dtype=torch.bfloat16, device=device)
        routing = Routing(shape.k, "softmax", True)
        inputs = [MixtureInput(x, scores, routing, None, x, None, None) for scores in self.scores]

        def work() -> list[Tensor]:
            return [layer.forward(each) for layer, each in zip(layers, inputs, strict=True)]

        work()
        self._graph: torch.cuda.CUDAGraph | None = None
        if self.store.pinned:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self.results = work()
        self._work = work

    def token(self, ids: Tensor) -> None:
        """Run a token with the experts of each layer, int32 [layers, k]."""
        chosen = torch.zeros(len(ids), 1, self.scores.shape[2])
        chosen.scatter_(2, ids[:, None].long(), 4.0)
        self.scores.copy_(chosen)
        self.store.before_step(1)
        if self._graph is None:
            self.results = self._work()
        else:
            self._graph.replay()
        self.store.check()

    def stop(self) -> None:
        """Stop the reader threads."""
        if self.store.tier is not None:
            self.store.tier.stop()


def measure(
    files: ExpertFiles, shape: Shape, run: GpuRun, tokens: int, traces: list[str], repeat: int,
    progress: Callable[[str], None],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Run rounds of tokens over every trace; return a row of numbers for each."""
    reader = DiskReader(verify=False, bandwidth=run.bandwidth)
    raw, layers = RawReads(files, reader, run.host), len(files.files)
    # until the caches are full
    warm = 2 + 2 * min((run.slots + run.host) // shape.expert_nbytes, layers * shape.count) // (layers * shape.k)
    for kind in traces:
        ids = iter(make_trace(kind, shape, layers, warm + repeat * tokens))
        ours = GraphedLayers(files, shape, run, torch.device("cuda"))
        progress(f"{kind}: warming up")
        for _ in range(warm):
            ours.token(next(ids))
        rounds, rate = [], raw.rate(RAW_S)
        for number in range(repeat):
            progress(f"{kind}: round {number + 1} of {repeat}")
            chosen = [next(ids) for _ in range(tokens)]
            before, began, previous = ours.store.cache_stats().total, time.perf_counter(), rate
            for each in chosen:
                ours.token(each)
            took = time.perf_counter() - began
            traffic, rate = ours.store.cache_stats().total - before, raw.rate(RAW_S)
            rounds.append(Round(tokens, took, traffic, max(previous, rate)))
        ours.stop()
        yield _row(kind, rounds, len(ours.store.pool.memory), 0 if ours.store.tier is None else ours.store.tier.slots)
    reader.close()


def _row(trace: str, rounds: list[Round], slots: int, host: int) -> dict[str, Any]:
    """Return numbers with units in their names: medians, and the best of the rounds."""
    tokens = sum(each.tokens for each in rounds)
    total = {name: sum(getattr(each.traffic, name) for each in rounds) for name in ("hits", "misses", "from_disk", "nbytes")}

    def median(name: str) -> float:
        return statistics.median(getattr(each, name) for each in rounds)

    return {
        "who": "gpu",
        "trace": trace,
        "gpu_slots": slots,
        "host_slots": host,
        "tokens_per_s": median("tokens_per_s"),
        "best_tokens_per_s": max(each.tokens_per_s for each in rounds),
        "misses_per_token": total["misses"] / tokens,
        "disk_reads_per_token": total["from_disk"] / tokens,
        "read_mb_per_token": total["nbytes"] / tokens / 1e6,
        "read_gb_per_s": median("read_rate") / 1e9,
        "raw_gb_per_s": median("raw_rate") / 1e9,
        "raw_share": median("raw_share"),
        "best_raw_share": max(each.raw_share for each in rounds),
    }
