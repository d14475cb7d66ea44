"""Contenders that run experts from disk: our expert cache, parts of it switched off, and memory-mapped files.

The mapped files get the same memory. A page cache with free memory would hold them whole, so an LRU of the budget's size
decides which experts it may hold, and all other pages are dropped while the clock is stopped.
"""

import itertools
import mmap
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from auraflux.bench.offload.random_experts import Shape
from auraflux.ops.moe.experts import Experts
from auraflux.weights.experts.disk_reader import DEPTH, DiskReader, Read
from auraflux.weights.experts.offloaded import OffloadPolicy
from auraflux.weights.experts.packed_files import ExpertFile, ExpertFiles
from auraflux.weights.experts.page_cache import drop_page_cache
from auraflux.weights.experts.resident import ResidentExperts
from auraflux.weights.experts.settings import ExpertSettings, plan_expert_cache
from auraflux.weights.experts.stats import ExpertCacheCounters, ExpertCacheStats
from auraflux.weights.experts.store import ExpertStore

TRACES = ("uniform", "zipf")
RAW_S = 0.25  # of each measurement of the disk's raw bandwidth
MAX_RAW_NBYTES = 1 << 29  # of memory for that
QUEUED = 4  # times DEPTH reads are submitted
PAGE = 4096
EARLY_ACCURACY = 0.8  # share of the next layer's experts that an early router predicts


@dataclass(frozen=True)
class Mode:
    """Settings of the expert cache.

    hits_first  compute cache hits while misses are read
    ahead       prefetch
    foresee     predict most of the next layer's experts, as a router that runs early would
    """

    name: str
    hits_first: bool = True
    ahead: bool = True
    foresee: bool = False


MODES = (
    Mode("streamed"),
    Mode("without hits first", hits_first=False),
    Mode("without prefetch", ahead=False),
    Mode("with neither", hits_first=False, ahead=False),
    Mode("next router run early", foresee=True),
)


def make_trace(kind: str, shape: Shape, layers: int, tokens: int, seed: int = 0) -> Tensor:
    """Make the expert ids of tokens: int32 [tokens, layers, k], distinct within a token.

    zipf  the n-th most popular expert of a layer has a probability in proportion to 1/n
    """
    random = np.random.default_rng(seed)
    ranks = np.stack([random.permutation(shape.count) + 1 for _ in range(layers)])
    logits = -np.log(ranks) if kind == "zipf" else np.zeros_like(ranks, float)
    # Gumbel top-k: the k largest are k draws without replacement
    scores = logits + random.gumbel(size=(tokens, layers, shape.count))
    chosen = np.argpartition(-scores, shape.k - 1, axis=-1)[..., : shape.k]
    return torch.from_numpy(chosen.astype(np.int32))


class RawReads:
    """Random reads of whole experts without compute, at the reader's queue depth.

    They go to as much memory as the expert cache has, up to a limit above CPU caches: a few buffers would stay in those.
    """

    def __init__(self, files: ExpertFiles, reader: DiskReader, budget: int):
        self.files, self.reader = files, reader
        stride = max(file.stride for file in files.files)
        count = max(2 * QUEUED * DEPTH, min(budget, MAX_RAW_NBYTES) // stride)
        memory = mmap.mmap(-1, count * stride, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        np.frombuffer(memory, np.uint8)[::PAGE] = 1
        whole = memoryview(memory)
        self._buffers = itertools.cycle([whole[place * stride : (place + 1) * stride] for place in range(count)])
        self._random = np.random.default_rng(0)

    def _begin(self) -> Read:
        file = self.files.files[self._random.integers(len(self.files.files))]
        return self.reader.read(
            file, int(self._random.integers(file.count)), next(self._buffers)[: file.stride], ExpertCacheCounters()
        )

    def rate(self, seconds: float) -> float:
        """Return bytes per second."""
        before, began = self.reader.counters.snapshot(), time.perf_counter()
        # the reader takes DEPTH at a time; more are queued, so that it never waits for this thread
        reads = [self._begin() for _ in range(QUEUED * DEPTH)]
        while time.perf_counter() - began < seconds:
            self.reader.wait(lambda: any(read.done for read in reads))
            for place, read in enumerate(reads):
                if read.done:
                    reads[place] = self._begin()
        self.reader.wait(lambda: all(read.done for read in reads))
        return (self.reader.counters.snapshot() - before).nbytes / (time.perf_counter() - began)


class Contender(Protocol):
    """An implementation of experts on disk."""

    def token(self, x: Tensor, ids: Tensor, weights: Tensor) -> float:
        """Run one token through all layers: x [1, H], ids [layers, k], weights [1, k]; return its seconds."""

    def traffic(self) -> ExpertCacheStats: ...

    def close(self) -> None:
        """Close threads and files."""


class Streaming:
    """Our expert cache; all modes share its memory and its contents."""

    def __init__(self, files: ExpertFiles, shape: Shape, budget: int):
        self.files, self.mode = files, MODES[0]
        self.store = ExpertStore(files, plan_expert_cache(files, shape.k, budget, "direct"), ExpertSettings(verify=False))
        sizes = shape.count, shape.hidden, shape.inner
        self.layers: list[Any] = [self.store.layer(file.module, *sizes, {}, None) for file in files.files]
        self._random = np.random.default_rng(1)
        assert self.store.reader is not None
        self.reader = self.store.reader
        self.raw = RawReads(files, self.reader, budget)

    def use(self, mode: Mode) -> None:
        self.mode = mode
        for layer in self.layers:
            layer.policy = OffloadPolicy(mode.hits_first, mode.ahead)

    def token(self, x: Tensor, ids: Tensor, weights: Tensor) -> float:
        began = time.perf_counter()
        for number, layer in enumerate(self.layers):
            chosen = ids[number : number + 1]
            layer.fetch(chosen)
            if self.mode.foresee and number + 1 < len(self.layers):
                self.layers[number + 1].prefetch(self._predict(ids[number + 1].tolist()))
            layer(x, chosen, weights)
        return time.perf_counter() - began

    def _predict(self, ids: list[int]) -> list[int]:
        return [
            expert if self._random.random() < EARLY_ACCURACY else int(self._random.integers(self.files.count)) for expert in ids
        ]

    def traffic(self) -> ExpertCacheStats:
        return self.store.cache_stats().total

    def raw_rate(self) -> float:
        return self.raw.rate(RAW_S)

    def close(self) -> None:
        self.reader.close()


class Mapping:
    """Experts in memory-mapped files, of which an LRU of the budget's size stays in memory."""

    def __init__(self, files: ExpertFiles, budget: int):
        self.layers = [MappedLayer(file) for file in files.files]
        self.room = budget // files.files[0].stride
        self._held: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._hits = self._misses = self._nbytes = 0

    def token(self, x: Tensor, ids: Tensor, weights: Tensor) -> float:
        took = 0.0
        for number, layer in enumerate(self.layers):
            began = time.perf_counter()
            layer(x, ids[number : number + 1], weights)
            took += time.perf_counter() - began
            self._note(number, ids[number].tolist())
        return took

    def _note(self, number: int, experts: list[int]) -> None:
        for expert in experts:
            key = (number, expert)
            known = key in self._held
            self._hits, self._misses = self._hits + known, self._misses + (not known)
            self._nbytes += 0 if known else self.layers[number].file.stride
            self._held[key] = None
            self._held.move_to_end(key)
        stale = {number}
        while len(self._held) > self.room:
            stale.add(self._held.popitem(last=False)[0][0])
        for layer in stale:
            self.layers[layer].forget([expert for each, expert in self._held if each == layer])

    def traffic(self) -> ExpertCacheStats:
        return ExpertCacheStats(hits=self._hits, misses=self._misses, nbytes=self._nbytes)

    def close(self) -> None:
        for layer in self.layers:
            layer.close()


class MappedLayer:
    """All experts of a layer in its mapped file, none of it in memory at first."""

    def __init__(self, file: ExpertFile):
        self.file = file
        self._opened = file.path.open("rb")
        drop_page_cache(self._opened.fileno())
        self._memory = mmap.mmap(self._opened.fileno(), 0, access=mmap.ACCESS_COPY)
        whole = torch.frombuffer(self._memory, dtype=torch.uint8).view(file.count, file.stride)
        self._experts = ResidentExperts(Experts.from_blobs(whole, file.like))

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self._experts(x, ids, weights)

    def forget(self, resident: list[int]) -> None:
        """Drop all pages but those of the resident experts, also pages from readahead."""
        borders = [-1, *sorted(resident), self.file.count]
        for before, after in itertools.pairwise(borders):
            start, nbytes = self.file.offset(before + 1), (after - before - 1) * self.file.stride
            if nbytes:
                self._memory.madvise(mmap.MADV_DONTNEED, start, nbytes)
                drop_page_cache(self._opened.fileno(), start, nbytes)

    def close(self) -> None:
        self._opened.close()
