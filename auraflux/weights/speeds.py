"""How a checkpoint's weights will be multiplied, by format: what is exact, and which kernels they meet on a CPU and on CUDA."""

import math
from typing import Any, NamedTuple

import torch

from auraflux.ops.assumed import HOPPER, Capability
from auraflux.ops.paces import NO_KERNEL, Pace, pace_of, unfilled
from auraflux.ops.simd.isa import ISA
from auraflux.quant import QTensor
from auraflux.quant.gguf_blocks import LAYOUTS, REQUANTIZED_BITS
from auraflux.weights.folder import Folder
from auraflux.weights.gguf import DENSE, GGUFFile
from auraflux.weights.names import ROUTERS, Rename
from auraflux.weights.plan import format_of, part_of
from auraflux.weights.row_table import BY_ROWS
from auraflux.weights.stored import Checkpoint, Stored, dense

TOKENS = {"one": 1, "prompt": 2048}  # that a step multiplies
BACKENDS = ("cpu", "cuda")
STACKED = 64  # experts, where their number does not matter
# parts of a model whose matrices are multiplied by tokens
MULTIPLIED = ("experts", "shared experts", "attention", "recurrent", "mlp", "embeddings")


class Runs(NamedTuple):
    """How the matrices of a format run.

    format   as `survey` calls it
    experts  whether they are those of a mixture
    kept     what is exact of them
    paces    by backend, of one token and of a prompt's
    """

    format: str
    experts: bool
    kept: str
    paces: dict[str, dict[str, Pace]]

    def told(self) -> dict[str, Any]:
        """The same in plain values."""
        paces = {
            backend: {name: {"does": pace.does, "fast": pace.fast(TOKENS[name])} for name, pace in found.items()}
            for backend, found in self.paces.items()
        }
        return {**self._asdict(), "paces": paces}


def runs(checkpoint: Checkpoint, rename: Rename, bits: int | None = None, gpu: Capability = HOPPER) -> list[Runs]:
    """What becomes of each format's largest matrix, with experts apart, the most weights first.

    bits  to which dense matrices are rounded when they are loaded; None leaves them as they are
    """
    groups: dict[tuple[str, bool], list[str]] = {}
    for name in checkpoint.sizes():
        ours = rename(name)
        if ours is None or len(checkpoint.shape(name)) < 2 or ROUTERS.search(ours) or BY_ROWS.search(ours):
            continue
        if (part := part_of(ours)) in MULTIPLIED:
            groups.setdefault((format_of(checkpoint, name), part == "experts"), []).append(name)

    def weights(names: list[str]) -> int:
        return sum(math.prod(checkpoint.shape(name)) for name in names)

    order = sorted(groups.items(), key=lambda item: -weights(item[1]))
    return [_runs(checkpoint, *key, names, bits, gpu) for key, names in order]


def _runs(checkpoint: Checkpoint, label: str, experts: bool, names: list[str], bits: int | None, gpu: Capability) -> Runs:
    by_size = sorted(names, key=lambda name: math.prod(checkpoint.shape(name)[-2:]))
    kept, example = _kept(checkpoint, by_size[0]), _example(checkpoint, by_size[0])
    *_, rows, width = checkpoint.shape(by_size[-1])
    if bits is not None and isinstance(example, torch.Tensor) and width % 64 == 0:
        kept, example = f"rounded to {bits} bits in groups of 64", _rounded(example, bits)
    shape = (STACKED, rows, width) if experts else (rows, width)
    paces: dict[str, dict[str, Pace]] = {}
    for backend in BACKENDS:
        weight = unfilled(_laid_out(example, backend), shape)
        try:
            paces[backend] = {name: pace_of(weight, count, backend, gpu) for name, count in TOKENS.items()}
        except ModuleNotFoundError as err:
            paces[backend] = dict.fromkeys(TOKENS, Pace("not told", f"{err.name} is not installed"))
    return Runs(label, experts, kept, paces)


def _example(checkpoint: Checkpoint, name: str) -> Stored:
    """A weight as it will be held; of a GGUF file only its first row."""
    if isinstance(checkpoint, GGUFFile):
        return checkpoint.first_row(name)
    return checkpoint.load(name) if len(checkpoint.shape(name)) == 2 else checkpoint.load_one(name, 0)


def _rounded(example: torch.Tensor, bits: int) -> QTensor:
    dtype = example.dtype if example.is_floating_point() else torch.float32
    scales = torch.empty(1, 1, dtype=dtype)
    return QTensor(torch.empty(1, 2 * bits, dtype=torch.int32), scales, scales, bits, 64, (1, 64))


def _laid_out(example: Stored, backend: str) -> Stored:
    """A weight in the form that a backend's kernels get it in."""
    if isinstance(example, QTensor):
        return example.interleave(ISA.lanes) if backend == "cpu" else example.widened()
    bf16 = backend == "cuda" or example.dtype is torch.bfloat16
    return dense(example).to(torch.bfloat16 if bf16 else torch.float32)


def _kept(checkpoint: Checkpoint, name: str) -> str:
    if isinstance(checkpoint, GGUFFile):
        kind = checkpoint.formats[name]
        if kind in DENSE:
            return "kept as it is"
        return "kept to the bit" if kind in LAYOUTS else f"rounded anew to {REQUANTIZED_BITS} bits"
    held = checkpoint.held(name) if isinstance(checkpoint, Folder) else None
    return "kept as it is" if held is None else held.kept_briefly


def advice(found: list[Runs], path: str, weights: int, memory: int, is_packed: bool) -> list[str]:
    """What to do about what runs slowly or not at all, a sentence each.

    weights  bytes of all weights in memory
    memory   bytes that the machine has
    """
    told = []
    for each in found:
        slow = [backend for backend, paces in each.paces.items() if any(pace.does == NO_KERNEL for pace in paces.values())]
        if slow:
            where = " and ".join(slow)
            told.append(
                f"{each.format} has no kernel on {where}: `auraflux convert {path} NEW --bits 8` makes codes that have."
            )
    if weights > memory:
        if any(each.experts for each in found) and not is_packed:
            told.append(
                f"the weights do not fit: `auraflux pack {path} DST` lets experts be read from disk as they are chosen."
            )
        elif not is_packed:
            told.append(f"the weights do not fit: `auraflux convert {path} NEW --bits 4` makes them smaller.")
    return told
