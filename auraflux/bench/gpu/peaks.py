"""The measured peaks of this GPU: read bandwidth, and bfloat16 tensor core FLOP/s."""

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from auraflux.bench.gpu.graph_timing import Contender, Record, race
from auraflux.errors import DeviceMemoryError

READ_NBYTES = 2 << 30
COPIED_NBYTES = 1 << 30
SIDE = 8192  # of the matrices
BUDGET_S = 0.05
WIDENED = 1 << 26  # words in a part of the check
BLOCK, STEPS = 4096, 16  # words of a load, loads of a program


@dataclass(frozen=True)
class Peaks:
    """Measured peaks in bytes and operations per second; a copy counts its reads and its writes."""

    read: float
    copy: float
    matmul: float

    def best(self, other: "Peaks") -> "Peaks":
        """Return the higher of each: the GPU may have been slower in one run than in another."""
        return Peaks(max(self.read, other.read), max(self.copy, other.copy), max(self.matmul, other.matmul))


@triton.jit
def _add_up(words, sums, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK * STEPS
    total = tl.zeros([BLOCK], tl.int32)
    for step in range(STEPS):
        total += tl.load(words + first + step * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


def measure(record: Record, device: str = "cuda") -> Peaks:
    try:
        read, copy = memory_peaks(record, device)
        found = Peaks(max(read, copy), copy, matmul_peak(record, device))
    except torch.OutOfMemoryError as err:
        needed = (READ_NBYTES + COPIED_NBYTES) / 1e9
        raise DeviceMemoryError(
            f"the GPU has no {needed:.1f} GB left to measure how fast it reads. Others may be using it."
        ) from err
    torch.cuda.empty_cache()
    return found


def memory_peaks(record: Record, device: str = "cuda", nbytes: int = READ_NBYTES) -> tuple[float, float]:
    """Measure a sum over one large buffer, and a copy of a part of it."""
    # the largest values whose sum in a program does not overflow
    words = torch.randint(0, 2**31 // (BLOCK * STEPS), (nbytes // 4,), dtype=torch.int32, device=device)
    programs = words.numel() // (BLOCK * STEPS)
    sums = torch.zeros(programs, dtype=torch.int32, device=device)

    def add_up() -> None:
        _add_up[(programs,)](words, sums, BLOCK, STEPS, num_warps=8)

    half = words[: COPIED_NBYTES // 4]
    other = torch.empty_like(half)
    added, copied = race([Contender(record([add_up])), Contender(record([lambda: other.copy_(half)]))], BUDGET_S)
    # in parts: torch would convert all words to int64 first
    if int(sums.sum()) != sum(int(part.sum()) for part in words.split(WIDENED)):
        raise AssertionError("the read kernel did not add up all words")
    return nbytes / added.median_s, 2 * half.nbytes / copied.median_s


def matmul_peak(record: Record, device: str = "cuda", side: int = SIDE) -> float:
    """Measure cuBLAS on two random square bfloat16 matrices."""
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    out: Tensor = torch.empty_like(a)
    (timing,) = race([Contender(record([partial(torch.mm, a, b, out=out)] * 4))], BUDGET_S)
    return 2 * side**3 / timing.median_s
