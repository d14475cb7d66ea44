"""Measured peak read bandwidth of main memory, the limit of every kernel that streams weights.

Each thread sums its own slice of one large buffer. The loop is vector IR with more accumulators than an addition has cycles of
latency, so only the loads can be the bottleneck.
"""

import time
from collections.abc import Sequence

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from auraflux.machine import free_nbytes, last_cache_nbytes
from auraflux.ops.simd.jit import Kernel, arguments, int64s, several_jobs, threads
from auraflux.ops.simd.threads import set_threads

ACCUMULATORS = 16
VECTOR_NBYTES = 64
STEP_NBYTES = ACCUMULATORS * VECTOR_NBYTES
PASSES = 5
JOBS_PER_THREAD = 4  # some threads are slower than others for a while


@intrinsic
def _sum_words(typingctx, address, steps):
    """Sum all 64-bit words of `steps` blocks of STEP_NBYTES bytes."""

    def codegen(context, b, signature, args):
        kind = ir.VectorType(ir.IntType(64), VECTOR_NBYTES // 8)
        base = b.inttoptr(args[0], kind.as_pointer())
        sums = [cgutils.alloca_once_value(b, ir.Constant(kind, [0] * kind.count)) for _ in range(ACCUMULATORS)]
        with cgutils.for_range(b, args[1]) as loop:
            first = b.mul(loop.index, ir.Constant(loop.index.type, ACCUMULATORS))
            for number, place in enumerate(sums):
                word = b.gep(base, [b.add(first, ir.Constant(first.type, number))])
                b.store(b.add(b.load(place), b.load(word, align=8)), place)
        total = b.load(sums[0])
        for place in sums[1:]:
            total = b.add(total, b.load(place))
        result = ir.Constant(ir.IntType(64), 0)
        for lane in range(kind.count):
            result = b.add(result, b.extract_element(total, ir.Constant(ir.IntType(32), lane)))
        return result

    return types.int64(address, steps), codegen


@Kernel
def _read(args, job, jobs):
    address, steps, totals = arguments(args, 3)
    first, last = steps * job // jobs, steps * (job + 1) // jobs
    int64s(totals, jobs)[job] = _sum_words(address + first * STEP_NBYTES, last - first)


def peak_read_bandwidth(nbytes: int | None = None) -> dict[str, float]:
    """Measure the read bandwidth in bytes per second, with all threads and with one."""
    found = read_bandwidths([threads(), 1], nbytes)
    return {"all_threads": found[threads()], "one_thread": found[1]}


def read_bandwidths(counts: Sequence[int], nbytes: int | None = None) -> dict[int, float]:
    """Measure the read bandwidth in bytes per second with several numbers of threads."""
    if nbytes is None:
        nbytes = min(max(1 << 30, 4 * last_cache_nbytes()), free_nbytes() // 2)
    buffer = torch.ones(nbytes // 8, dtype=torch.int64)
    steps = buffer.numel() * 8 // STEP_NBYTES
    found, before = {}, threads()
    try:
        for count in counts:
            set_threads(count)
            jobs = {count, several_jobs(JOBS_PER_THREAD if count > 1 else 1)}
            found[count] = max(_best(buffer, steps, each) for each in jobs)
    finally:
        set_threads(before)
    return found


def _best(buffer: torch.Tensor, steps: int, jobs: int) -> float:
    expected = steps * STEP_NBYTES // 8
    best, totals = float("inf"), torch.zeros(jobs, dtype=torch.int64)
    for _ in range(PASSES + 1):
        start = time.perf_counter()
        _read(jobs, buffer.data_ptr(), steps, totals.data_ptr())
        best = min(best, time.perf_counter() - start)
        if totals.sum() != expected:
            raise AssertionError(f"the read kernel summed to {int(totals.sum())}; expected {expected}")
    return steps * STEP_NBYTES / best
