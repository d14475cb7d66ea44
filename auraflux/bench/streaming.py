"""Ways to have experts that are on disk: streamed as the package does it, with parts of it left out, and mapped files.

The mapped files get the memory that the others have. A machine with plenty of it would keep them whole; so which experts a page
cache of the budget's size would still hold is worked out, and all other pages are dropped, while the clock stands still.
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

from auraflux.bench.synthetic import Shape
from auraflux.ops.moe.experts import Experts
from auraflux.weights.disk import forget
from auraflux.weights.expert_files import ExpertFile, ExpertFiles
from auraflux.weights.expert_settings import ExpertSettings, share_out
from auraflux.weights.expert_store import ExpertStore
from auraflux.weights.reader import DEPTH, Read, Reader
from auraflux.weights.streamed import Overlap, Resident
from auraflux.weights.traffic import Meter, Traffic

TRACES = ("uniform", "zipf")
RAW_S = 0.25  # time for each look at the disk's own speed
MOST_RAW = 1 << 29  # bytes of memory for that
WAITING = 4
PAGE = 4096
FORESEEN = 0.8  # of the next layer's experts that a router run early gets right


@dataclass(frozen=True)
class Mode:
    """A way to stream experts.

    foresee  tell each layer most of the next one's experts, as a router that is run early would
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
    """Which experts tokens go to: int32 [tokens, layers, k], all of a token's different.

    zipf  the n-th most popular expert of a layer is chosen in proportion to 1/n
    """
    random = np.random.default_rng(seed)
    ranks = np.stack([random.permutation(shape.count) + 1 for _ in range(layers)])
    liking = -np.log(ranks) if kind == "zipf" else np.zeros_like(ranks, float)
    # the k largest of scores with this noise are k draws without putting back
    scores = liking + random.gumbel(size=(tokens, layers, shape.count))
    chosen = np.argpartition(-scores, shape.k - 1, axis=-1)[..., : shape.k]
    return torch.from_numpy(chosen.astype(np.int32))


class RawReads:
    """Whole experts from anywhere to anywhere, with as many reads under way as the reader makes at once.

    They go to as much memory as the experts have, up to more than caches hold: a few buffers would be faster than any bank.
    """

    def __init__(self, files: ExpertFiles, reader: Reader, budget: int):
        self.files, self.reader = files, reader
        stride = max(file.stride for file in files.files)
        count = max(2 * WAITING * DEPTH, min(budget, MOST_RAW) // stride)
        memory = mmap.mmap(-1, count * stride, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        np.frombuffer(memory, np.uint8)[::PAGE] = 1
        whole = memoryview(memory)
        self._places = itertools.cycle([whole[place * stride : (place + 1) * stride] for place in range(count)])
        self._random = np.random.default_rng(0)

    def _begin(self) -> Read:
        file = self.files.files[self._random.integers(len(self.files.files))]
        return self.reader.read(file, int(self._random.integers(file.count)), next(self._places)[: file.stride], Meter())

    def rate(self, seconds: float) -> float:
        """Bytes per second."""
        before, began = self.reader.meter.traffic(), time.perf_counter()
        # the reader takes DEPTH at a time; the others wait there, so that it never waits for us
        reads = [self._begin() for _ in range(WAITING * DEPTH)]
        while time.perf_counter() - began < seconds:
            self.reader.wait(lambda: any(read.done for read in reads))
            for place, read in enumerate(reads):
                if read.done:
                    reads[place] = self._begin()
        self.reader.wait(lambda: all(read.done for read in reads))
        return (self.reader.meter.traffic() - before).nbytes / (time.perf_counter() - began)


class Contender(Protocol):
    """Some way to have experts."""

    def token(self, x: Tensor, ids: Tensor, weights: Tensor) -> float:
        """Run one token through all layers: x [1, H], ids [layers, k], weights [1, k]; gives the seconds it took."""

    def traffic(self) -> Traffic: ...

    def close(self) -> None:
        """Let go of threads and files."""


class Streaming:
    """Experts read as they are chosen, one way or another: all ways share the memory and what is in it."""

    def __init__(self, files: ExpertFiles, shape: Shape, budget: int):
        self.files, self.mode = files, MODES[0]
        self.store = ExpertStore(files, share_out(files, shape.k, budget, "direct"), ExpertSettings(verify=False))
        sizes = shape.count, shape.hidden, shape.inner
        self.layers: list[Any] = [self.store.layer(file.module, *sizes, {}, None) for file in files.files]
        self._random = np.random.default_rng(1)
        assert self.store.reader is not None
        self.reader = self.store.reader
        self.raw = RawReads(files, self.reader, budget)

    def use(self, mode: Mode) -> None:
        self.mode = mode
        for layer in self.layers:
            layer.overlap = Overlap(mode.hits_first, mode.ahead)

    def token(self, x: Tensor, ids: Tensor, weights: Tensor) -> float:
        began = time.perf_counter()
        for number, layer in enumerate(self.layers):
            chosen = ids[number : number + 1]
            layer.fetch(chosen)
            if self.mode.foresee and number + 1 < len(self.layers):
                self.layers[number + 1].expect(self._guess(ids[number + 1].tolist()))
            layer(x, chosen, weights)
        return time.perf_counter() - began

    def _guess(self, ids: list[int]) -> list[int]:
        return [expert if self._random.random() < FORESEEN else int(self._random.integers(self.files.count)) for expert in ids]

    def traffic(self) -> Traffic:
        return self.store.traffic().total

    def raw_rate(self) -> float:
        return self.raw.rate(RAW_S)

    def close(self) -> None:
        self.reader.close()


class Mapping:
    """Experts in mapped files, of which as many stay in memory as the budget holds: those used last."""

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

    def traffic(self) -> Traffic:
        return Traffic(hits=self._hits, misses=self._misses, nbytes=self._nbytes)

    def close(self) -> None:
        for layer in self.layers:
            layer.close()


class MappedLayer:
    """All experts of a layer over its file, none of it in memory at first."""

    def __init__(self, file: ExpertFile):
        self.file = file
        self._opened = file.path.open("rb")
        forget(self._opened.fileno())
        self._memory = mmap.mmap(self._opened.fileno(), 0, access=mmap.ACCESS_COPY)
        whole = torch.frombuffer(self._memory, dtype=torch.uint8).view(file.count, file.stride)
        self._experts = Resident(Experts.from_blobs(whole, file.like))

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self._experts(x, ids, weights)

    def forget(self, kept: list[int]) -> None:
        """Have the system drop all pages but those of some experts, also what it has read ahead."""
        borders = [-1, *sorted(kept), self.file.count]
        for before, after in itertools.pairwise(borders):
            start, nbytes = self.file.offset(before + 1), (after - before - 1) * self.file.stride
            if nbytes:
                self._memory.madvise(mmap.MADV_DONTNEED, start, nbytes)
                forget(self._opened.fileno(), start, nbytes)

    def close(self) -> None:
        self._opened.close()
