"""Rates of experts computed on the CPU for a GPU: `python -m bench.lab.cpu_experts --threads 16`.

A thread in place of the GPU writes requests into the mailbox of a `CpuExpertWorker` and waits for the answers, in jitted code.
Requests go round all experts of several layers, more bytes than the caches hold, so weights come from main memory. The read
bandwidth of main memory is measured in the same run.
"""

import argparse
import ctypes
import statistics
import time
from typing import Any

import numba
import numpy as np
import torch
from numba import types

from auraflux.machine import last_cache_nbytes, usable_cores
from auraflux.ops.moe.cpu.row_form import HAS_BF16
from auraflux.ops.simd.atomics import call_libc, load_int32, pause, store_int32
from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.jit import int32s
from auraflux.ops.simd.peak_bandwidth import peak_read_bandwidth
from auraflux.ops.simd.threads import set_threads
from auraflux.quant import QTensor
from auraflux.weights.experts.cpu_worker import CpuExpertWorker

SECONDS = 0.5  # of each measurement


def _ask(header, experts, request, done, give_way, layers, count, first, total, rounds):
    """Send `rounds` requests for `count` experts each, one after another; return the next expert.

    give_way  address of sched_yield, for machines with fewer cores than threads
    """
    for _ in range(rounds):
        fields, ids = int32s(header, 2), int32s(experts, count)
        fields[0], fields[1] = first // total % layers, count
        for i in range(count):
            ids[i] = (first % total + i) % total
        first += count
        number = load_int32(request) + 1
        store_int32(request, number)
        polls = 0
        while load_int32(done) != number:
            pause()
            polls += 1
            if polls % 256 == 0:
                call_libc(give_way, 0, 0, 0)
    return first


# jitted functions take other arguments than type checkers see
ask: Any = numba.njit(nogil=True)(_ask)


def random_layers(
    hidden: int, inner: int, experts: int, bits: int, group: int
) -> tuple[list[torch.Tensor], dict[str, QTensor]]:
    """Return blobs of as many layers as exceed the caches, and the shapes of an expert."""

    def matrix(rows: int, width: int) -> QTensor:
        scales = torch.zeros(rows, width // group, dtype=torch.bfloat16)
        return QTensor(torch.zeros(rows, width * bits // 32, dtype=torch.int32), scales, scales, bits, group, (rows, width))

    like = {"gate": matrix(inner, hidden), "up": matrix(inner, hidden), "down": matrix(hidden, inner)}
    nbytes = sum(each.nbytes for each in like.values())
    layers = max(1, -(-4 * last_cache_nbytes() // (nbytes * experts)))
    # small codes as scales are small numbers: 0x1010 is 2.8e-29 in bf16
    blobs = [torch.empty(experts, nbytes, dtype=torch.uint8).fill_(0x10) for _ in range(layers)]
    return blobs, like


class Device:
    """A thread in place of the GPU."""

    def __init__(self, worker: CpuExpertWorker, experts: int, layers: int):
        box = worker.mailbox
        self.fields = [box.address(name) for name in ("layer", "experts", "request_seq", "done_seq")]
        self.fields.append(ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0)
        self.experts, self.layers, self.next = experts, layers, 0
        ask.compile((types.int64,) * 10)

    def send(self, count: int, rounds: int) -> float:
        """Send requests for `count` experts of one token; return the seconds of each."""
        start = time.perf_counter()
        self.next = ask(*self.fields, self.layers, count, self.next, self.experts, rounds)
        return (time.perf_counter() - start) / rounds

    def median(self, count: int) -> float:
        """Return the median seconds of a request over batches of a few."""
        self.send(count, 4)
        found: list[float] = []
        end = time.perf_counter() + SECONDS
        while time.perf_counter() < end or len(found) < 5:
            found.append(self.send(count, 8))
        return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    cores = max(1, usable_cores() - 1)  # one is for the thread in place of the GPU
    parser.add_argument("--threads", type=int, nargs="+", default=[cores], help="of the worker; all cores but one by default")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=768)
    parser.add_argument("--experts", type=int, default=128, help="of a layer")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--counts", type=int, nargs="+", default=list(range(1, 9)), help="experts of a request")
    options = parser.parse_args()
    blobs, like = random_layers(options.hidden, options.inner, options.experts, options.bits, options.group)
    nbytes = sum(each.nbytes for each in like.values())
    print(f"{ISA.name}{' with AVX512-BF16' if HAS_BF16 else ''}, {nbytes / 1e6:.2f} MB per expert, {len(blobs)} layers")
    for threads in options.threads:
        set_threads(threads)
        peak = peak_read_bandwidth()
        with CpuExpertWorker(blobs, like, options.hidden, options.inner, threads) as worker:
            device = Device(worker, options.experts, len(blobs))
            empty = device.median(0)
            print(
                f"\n{threads} threads: measured peak {peak['all_threads'] / 1e9:.1f} GB/s "
                f"({peak['one_thread'] / 1e9:.1f} with one); an empty request takes {empty * 1e6:.1f} us"
            )
            for count in options.counts:
                seconds = device.median(count)
                rate = count * nbytes / seconds
                share = rate / peak["all_threads"]
                print(f"{count:3d} experts  {seconds * 1e6:8.1f} us  {rate / 1e9:6.1f} GB/s  {share:4.0%} of the peak")
            if worker.error or not np.isfinite(worker.mailbox.numpy("result")).all():
                raise SystemExit(f"the results are wrong: {worker.error}")


if __name__ == "__main__":
    main()
