"""FP8 as DeepSeek, fbgemm and compressed-tensors write it: e4m3 codes, and scales of blocks, rows or the whole weight.

weight            float8_e4m3fn [N, K]
weight_scale_inv  [N/R, K/C], or weight_scale: that, [N, 1], [N], [1] or []
weight[n, k] = code[n, k] * scale[n/R, k/C], rounded to float32

The last block of either side may be shorter. `quant_method` fp8 has a weight_block_size, 128 x 128 in all that is published;
fbgemm_fp8 a scale for each row. What a config asks to do to activations is not done: they are not rounded.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from auraflux.errors import FormatError
from auraflux.quant.fp8 import from_blocks
from auraflux.quant.grouped import DENSE_BITS, held_group, owners_of
from auraflux.weights.boundary import shown
from auraflux.weights.methods.method import Header, Held, check_width, group_count, part
from auraflux.weights.stored import Stored

CODES = "F8_E4M3"
SCALES = ("F32", "BF16", "F16", "F8_E8M0")
NAMES = ("weight_scale_inv", "weight_scale")
Block = tuple[int, int]
NOTES = ["Activations are not rounded to FP8, whatever config.json asks for."]


class Blocks(NamedTuple):
    """Those that a config has; `only` where nothing but they may have scales of two dimensions."""

    sizes: tuple[Block, ...]
    only: bool


def find_block(shape: tuple[int, ...], grid: tuple[int, ...], blocks: Blocks) -> Block:
    """The rows and inputs that share a scale: the first of the likely ones of which `grid` scales cover a weight."""
    rows, width = shape
    wanted = (1, 1) if len(grid) == 0 else (grid[0], 1) if len(grid) == 1 else grid
    likely = blocks.sizes if blocks.only and len(grid) == 2 else (*blocks.sizes, (1, width), (rows, width))
    for block in likely:
        if (group_count(rows, block[0]), group_count(width, block[1])) == wanted:
            return block
    sizes = ", ".join(f"{rows} x {width}" for rows, width in likely)
    raise FormatError(
        f"its scales have shape {shown(list(grid))}; a weight of {shown(list(shape))} has them for blocks of {sizes}."
    )


def plan(headers: Mapping[str, Header], name: str, blocks: Blocks) -> Held:
    """How a weight of e4m3 codes with scales under `name` is held."""
    rows, width = part(headers, "weight", (CODES,))
    check_width(width)
    part(headers, name, SCALES, min(2, len(headers[name].shape)))
    block = find_block((rows, width), headers[name].shape, blocks)
    group = held_group(owners_of(width, block[1]))
    spread = (
        "one scale" if block == (rows, width) else "whole rows" if block == (1, width) else f"blocks of {block[0]} x {block[1]}"
    )
    if group is None:
        kept = f"exact, but held in float32: {spread} of FP8, which no kernel has groups for. --quantize 8 rounds them anew"
        return Held((rows, width), f"FP8, {spread}, as float32", DENSE_BITS, kept)
    return Held((rows, width), f"FP8, {spread}", 8 + 32 / group, "kept to the bit: code * scale in float32")


def load(codes: Tensor, scales: Tensor, blocks: Blocks) -> Stored:
    block = find_block(tuple(codes.shape), tuple(scales.shape), blocks)
    rows = group_count(codes.shape[0], block[0])
    return from_blocks(codes, scales.float().view(rows, -1), block)


@dataclass(frozen=True)
class FP8:
    """Weights whose blocks are those that config.json names, or with none rows or the whole weight."""

    blocks: Blocks
    title: ClassVar[str] = "FP8"
    parts: ClassVar[tuple[str, ...]] = ("weight", *NAMES)
    unused: ClassVar[tuple[str, ...]] = ("input_scale", "activation_scale", "input_scale_ub", "output_scale")

    def claims(self, found: Iterable[str]) -> bool:
        return "weight" in found and any(name in found for name in NAMES)

    def plan(self, headers: Mapping[str, Header], read: Callable[[str], Tensor]) -> Held:
        return plan(headers, next(name for name in NAMES if name in headers), self.blocks)

    def load(self, parts: Mapping[str, Tensor]) -> Stored:
        return load(parts["weight"], next(parts[name] for name in NAMES if name in parts), self.blocks)

    def notes(self) -> list[str]:
        return NOTES


def open_method(config: dict[str, Any]) -> FP8:
    """Read `quantization_config`."""
    if config.get("fmt", "e4m3") not in (None, "e4m3"):
        raise FormatError(f"FP8 of kind {shown(config['fmt'])} is not read, only 'e4m3'.")
    if config.get("expert_dtype", "fp8") not in (None, "fp8"):
        raise FormatError(f"FP8 with experts in {shown(config['expert_dtype'])} is not read.")
    block = config.get("weight_block_size")
    if block is not None and len(block) != 2:
        raise FormatError(f"FP8 with weight_block_size {shown(block)} is not read; rows and inputs of a block are needed.")
    return FP8(Blocks((), False) if block is None else Blocks(((block[0], block[1]),), True))
