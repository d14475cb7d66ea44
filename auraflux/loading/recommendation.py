"""The fit of quantizations on a machine, and how fast they would decode: bytes divided by measured bandwidths."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from auraflux.weights.download.quantizations import Mixture, Quantization

RESERVED_NBYTES = 3 << 29  # for the KV cache, activations and the process
GPU_RESERVED_NBYTES = 2 << 30
GPU, BOTH, MEMORY, DISK = "GPU", "GPU + memory", "memory", "disk"


@dataclass(frozen=True)
class Resources:
    """The free memory of a machine, and its measured bandwidths in bytes per second.

    gpu_nbytes, gpu_rate  None without a GPU
    disk_nbytes           free on the disk of downloads
    disk_rate             None where it was not measured
    """

    memory_nbytes: int
    memory_rate: float
    gpu_nbytes: int | None = None
    gpu_rate: float | None = None
    disk_nbytes: int | None = None
    disk_rate: float | None = None


@dataclass(frozen=True)
class Fit:
    """The place of a quantization's weights, and its speed.

    place         GPU, BOTH, MEMORY or DISK; None where it does not fit
    tokens_per_s  at most, for one sequence; None where a bandwidth is not known
    reason        why it does not fit
    """

    quantization: Quantization
    place: str | None
    tokens_per_s: float | None = None
    reason: str = ""


def fit(quantization: Quantization, mixture: Mixture | None, machine: Resources, local: bool) -> Fit:
    """Return how a quantization would run."""
    nbytes = quantization.nbytes
    if not local and machine.disk_nbytes is not None and nbytes > machine.disk_nbytes:
        return Fit(quantization, None, reason="the disk has no room for the download")
    active = nbytes if mixture is None else nbytes * mixture.active
    gpu = 0 if machine.gpu_nbytes is None else max(0, machine.gpu_nbytes - GPU_RESERVED_NBYTES)
    memory = max(0, machine.memory_nbytes - RESERVED_NBYTES)
    if gpu and nbytes <= gpu:
        return Fit(quantization, GPU, _rate(((active, machine.gpu_rate),)))
    if mixture is None:
        if nbytes <= memory:
            return Fit(quantization, MEMORY, _rate(((active, machine.memory_rate),)))
        return Fit(quantization, None, reason="it is larger than the memory, and reads all of its weights for each token")
    experts = nbytes * mixture.experts
    dense, chosen = nbytes - experts, experts * mixture.chosen
    first = gpu if dense <= gpu else 0
    fast, second = (first, memory) if first else (memory, 0)
    # experts of the next tier are read at its bandwidth
    cached = min(1.0, (fast - dense) / experts)
    if cached < 0:
        return Fit(quantization, None, reason="even the weights outside of the experts do not fit")
    hosted = min(1.0 - cached, second / experts)
    left = 1.0 - cached - hosted
    rate = machine.gpu_rate if first else machine.memory_rate
    terms = [(dense + chosen * cached, rate), (chosen * hosted, machine.memory_rate), (chosen * left, machine.disk_rate)]
    place = DISK if left > 0 else BOTH if first else MEMORY
    return Fit(quantization, place, _rate(terms))


def _rate(terms: Sequence[tuple[float, float | None]]) -> float | None:
    """Return tokens per second when each term's bytes are read at its bandwidth; None where one is unknown."""
    seconds = 0.0
    for nbytes, rate in terms:
        if nbytes > 0 and rate is None:
            return None
        seconds += 0 if rate is None else nbytes / rate
    return 1 / seconds if seconds else None


def recommended(fits: Sequence[Fit]) -> Fit | None:
    """Return the largest quantization that needs no disk while it decodes; else the smallest one that fits."""
    in_memory = [each for each in fits if each.place not in (None, DISK)]
    if in_memory:
        return max(in_memory, key=lambda each: each.quantization.nbytes)
    return min(_fitting(fits), key=lambda each: each.quantization.nbytes, default=None)


def _fitting(fits: Sequence[Fit]) -> Iterator[Fit]:
    return (each for each in fits if each.place is not None)
