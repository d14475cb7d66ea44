"""The report of a run on a GPU as JSON: the machine, the versions, the command, then every result."""

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import torch

import auraflux
from auraflux.bench.gpu.peaks import Peaks
from auraflux.bench.gpu.run import ROTATED_NBYTES
from auraflux.bench.report import commit, finite, ratio, times
from auraflux.bench.result import PeerResult, Result
from auraflux.machine import this_machine, versions
from auraflux.ops.fake_gpu import VARIABLE

PACKAGES = ("torch", "triton", "numpy", "fla-core", "gemlite")


@dataclass(frozen=True)
class Gpu:
    """The GPU that is there.

    passes_for  the compute capability whose kernels and limits it uses; None for its own
    """

    name: str
    capability: str
    multiprocessors: int
    memory_nbytes: int
    cache_nbytes: int
    cuda: str | None
    passes_for: str | None = None

    @property
    def slug(self) -> str:
        """Return a file name for results."""
        name = "-".join(re.findall(r"[a-z0-9]+", self.name.lower()))
        return name if self.passes_for is None else f"{name}-as-{self.passes_for}"


def this_gpu() -> Gpu:
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    cache = getattr(found, "L2_cache_size", 0)
    capability = f"{found.major}.{found.minor}"
    sizes = found.multi_processor_count, found.total_memory, cache
    return Gpu(found.name, capability, *sizes, torch.version.cuda, os.environ.get(VARIABLE) or None)


def document(command: str, gpu: Gpu, peaks: Peaks, results: Sequence[Result]) -> dict[str, Any]:
    return {
        "machine": asdict(this_machine()),
        "gpu": asdict(gpu),
        "versions": {"auraflux": auraflux.__version__, "python": platform.python_version(), **versions(*PACKAGES)},
        "command": command,
        "commit": commit(),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": "cuda",
        "timing": f"CUDA graphs; operands rotated through {ROTATED_NBYTES >> 20} MB and more; medians",
        "read_ceiling_tb_per_s": peaks.read / 1e12,
        "copy_ceiling_tb_per_s": peaks.copy / 1e12,
        "matmul_ceiling_tflop_per_s": peaks.matmul / 1e12,
        "results": [row(result, peaks) for result in results],
    }


def row(result: Result, peaks: Peaks) -> dict[str, Any]:
    """Return one result as numbers with units in their names; a missing one is null."""
    seconds = result.timing.median_s if result.timing is not None else None
    read, done = (None if seconds is None or count is None else count / seconds for count in (result.nbytes, result.flops))
    shares = {
        "read_share": None if read is None else read / peaks.read,
        "matmul_share": None if done is None else done / peaks.matmul,
    }
    return {
        "op": result.op,
        "case": result.case,
        "state": result.state,
        "note": result.note,
        "error": finite(result.error),
        **times(result.timing),
        "launches": result.launches,
        "copies": result.copies,
        "nbytes": result.nbytes,
        "flops": result.flops,
        "tb_per_s": None if read is None else read / 1e12,
        "tflop_per_s": None if done is None else done / 1e12,
        **shares,
        "bound": bound(**shares),
        "peers": [_peer(peer, seconds) for peer in result.peers],
    }


def bound(read_share: float | None, matmul_share: float | None) -> str | None:
    """Return the measured peak that a kernel is nearer to."""
    if read_share is None and matmul_share is None:
        return None
    return "matmul" if (matmul_share or 0.0) > (read_share or 0.0) else "read"


def _peer(peer: PeerResult, seconds: float | None) -> dict[str, Any]:
    """`ratio` is the peer's time over ours: above 1 we are faster."""
    return {
        "name": peer.name,
        "note": peer.note,
        "error": finite(peer.error),
        **times(peer.timing),
        "ratio": ratio(peer.timing, seconds),
    }
