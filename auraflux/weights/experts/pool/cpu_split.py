"""Missing experts of single tokens, shared between the GPU, which fetches them, and CPU threads, which compute them.

How many of n missing experts are fetched is measured when the model is loaded: a decode layer is replayed with n experts that
are missing, for every split, while both sides run. Some are always fetched, since the cache learns from that alone.
"""

import os
import statistics
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from auraflux.ops import ExpertPool, Routing, pooled_mixture
from auraflux.ops.moe.experts import Stack
from auraflux.ops.moe.pool import NEVER_USED, CpuMailbox
from auraflux.weights.experts.cpu_worker import CpuExpertWorker
from auraflux.weights.experts.pool.host_memory import MAPPED

MOST_PAIRS, MOST_TOKENS = 32, 4
TRIALS = 5
THREAD_SHARE = 0.75  # of the cores: a thread that waits for a core delays all others
LEAST_FETCHED = 1 / 8  # of the missing experts
CLOSE = 0.97  # of the time of fetching all: the CPU must save more than the rest to be used


def refuses_cpu(like: Mapping[str, Stack]) -> str | None:
    """Return why CPU threads cannot compute experts of a format; None if they can."""
    if any(isinstance(matrix, Tensor) for matrix in like.values()):
        return "they are dense, or have biases"
    return CpuExpertWorker.refuses({name: matrix for name, matrix in like.items() if not isinstance(matrix, Tensor)})


class CpuSplit:
    """CPU threads that compute missing experts, their mailbox, and the measured split."""

    def __init__(self, blobs: list[Tensor], like: dict[str, Any], device: torch.device, threads: int | None = None):
        inner, hidden = like["up"].shape
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        threads = threads or max(1, int(THREAD_SHARE * cores))
        self.worker = CpuExpertWorker(blobs, like, hidden, inner, threads, MOST_PAIRS, MOST_TOKENS)
        box, runtime = self.worker.mailbox, torch.cuda.cudart()
        if int(runtime.cudaHostRegister(box.memory.data_ptr(), box.memory.nbytes, MAPPED)) != 0:
            raise RuntimeError("the mailbox could not be pinned")
        weakref.finalize(self, runtime.cudaHostUnregister, box.memory.data_ptr())
        header = box.memory[box.offsets["layer"] :][:8].view(torch.int32)
        state = torch.zeros(3 + MOST_PAIRS, dtype=torch.int32, device=device)
        fetched = torch.arange(MOST_PAIRS + 1, dtype=torch.float32, device=device)
        views = box.request_seq, box.done_seq, header, box.pairs, box.experts, box.x, box.result
        self.mailbox = CpuMailbox(*views, state, fetched)
        self.worker.start()

    def measure(self, pool: ExpertPool, k: int) -> str | None:
        """Measure the split for every number of missing experts; return why the CPU is not used, None if it is."""
        trial = _Trial(self, pool, k)
        if not trial.asks_the_cpu():
            return "no kernel joins the CPU's experts for this format"
        counts = [count for count in (1, 2, 4, 6, 8) if count <= min(k, pool.slots.shape[1] // 2)]
        shares = {}
        for count in counts:
            times = {number: trial.seconds(count, number) for number in range(count + 1)}
            best = min(times, key=times.__getitem__)
            shares[count] = 1.0 if times[best] > CLOSE * times[count] else best / count
        if all(share == 1.0 for share in shares.values()):
            return "fetching all missing experts is as fast"
        table = [number * max(LEAST_FETCHED, _share(shares, number)) for number in range(MOST_PAIRS + 1)]
        self.mailbox.fetched.copy_(torch.tensor(table))
        return None

    def stop(self) -> None:
        """Stop the threads."""
        self.worker.stop()


def _share(shares: dict[int, float], count: int) -> float:
    """Return the share of `count` missing experts that is fetched, interpolated between the measured counts."""
    below = max((each for each in shares if each <= count), default=min(shares))
    above = min((each for each in shares if each >= count), default=max(shares))
    if below == above:
        return shares[below]
    return shares[below] + (shares[above] - shares[below]) * (count - below) / (above - below)


class _Layer:
    """A decode layer that is replayed with its first k experts, of which a known number is missing."""

    def __init__(self, pool: ExpertPool, layer: int, k: int, hidden: int):
        self.pool, self.slots = pool, pool.slots[layer, :k]
        x = torch.randn(1, hidden, device=pool.memory.device).bfloat16()
        scores = torch.full((1, pool.slots.shape[1]), -10.0, device=pool.memory.device).bfloat16()
        scores[0, :k] = 1.0
        run = lambda: pooled_mixture(x, scores, Routing(k, "softmax", True), pool, layer, x)  # noqa: E731
        run()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            run()

    def drop(self, count: int) -> None:
        """Drop experts from the cache, all of which a replay has fetched."""
        freed = self.slots[:count].long()
        self.pool.owners[freed] = -1
        self.pool.uses[freed] = NEVER_USED
        self.slots[:count] = -1


class _Trial:
    """Two layers, of which the second is timed: the first keeps the GPU busy until it is launched."""

    def __init__(self, split: CpuSplit, pool: ExpertPool, k: int):
        self.split, last = split, pool.slots.shape[0] - 1
        self.first, self.second = (_Layer(pool, each, k, split.mailbox.x.shape[1]) for each in (0, last))
        self.fetch_all = torch.arange(MOST_PAIRS + 1, dtype=torch.float32, device=pool.memory.device)

    def seconds(self, missing: int, fetched: int) -> float:
        """Return the median time of a layer with so many missing experts, some of them fetched."""
        return statistics.median(self._run(missing, fetched) for _ in range(TRIALS))

    def asks_the_cpu(self) -> bool:
        """Return whether the kernels for these experts hand any to the CPU."""
        before = int(self.split.worker.mailbox.request_seq)
        self._run(1, 0)
        return int(self.split.worker.mailbox.request_seq) != before

    def _run(self, missing: int, fetched: int) -> float:
        table = self.split.mailbox.fetched
        table.copy_(self.fetch_all)
        for layer, dropped in (self.first, 1 if missing == 2 else 2), (self.second, missing):
            layer.graph.replay()
            layer.drop(dropped)
        table[missing] = float(fetched)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        self.split.worker.wake()
        self.first.graph.replay()
        begin.record()
        self.second.graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3
