"""FP8 of DeepSeek, fbgemm and compressed-tensors: e4m3 codes with a scale per block, per row or per tensor.

weight            float8_e4m3fn [N, K]
weight_scale_inv  [N/R, K/C], or weight_scale: that, [N, 1], [N], [1] or []
weight[n, k] = code[n, k] * scale[n/R, k/C], rounded to float32

DeepSeek V4 calls them `scale`, and other files `qscale_weight`. Its experts may be MXFP4: int8 codes [N, K/2], see `mxfp4`.

The last block of either side may be shorter. `quant_method` fp8 has a weight_block_size, 128 x 128 in all published models;
fbgemm_fp8 has one scale per row. Activation quantization is not supported: activations stay unquantized.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from auraflux.errors import FormatError
from auraflux.quant.fp8 import from_blocks
from auraflux.quant.grouped import DENSE_BITS, group_indexes, kernel_group
from auraflux.weights.fields import NAME, WIDTH, Fields
from auraflux.weights.formats.methods import mxfp4
from auraflux.weights.formats.methods.method import Header, StoredFormat, check_width, group_count, part
from auraflux.weights.formats.stored import Stored
from auraflux.weights.formats.untrusted import list_of, shown

CODES = "F8_E4M3"
SCALES = ("F32", "BF16", "F16", "F8_E8M0")
NAMES = ("weight_scale_inv", "weight_scale", "scale", "qscale_weight")
OCTETS = ("I8", "U8")  # of two four-bit codes each
Block = tuple[int, int]
NOTES = ["Activations are not quantized to FP8, regardless of config.json."]


class Blocks(NamedTuple):
    """Block sizes of a config; `only` if two-dimensional scales must have one of them."""

    sizes: tuple[Block, ...]
    only: bool


def find_block(shape: tuple[int, ...], grid: tuple[int, ...], blocks: Blocks) -> Block:
    """Return the rows and inputs that share a scale: the first candidate block that gives `grid` scales."""
    rows, width = shape
    wanted = (1, 1) if len(grid) == 0 else (grid[0], 1) if len(grid) == 1 else grid
    candidates = blocks.sizes if blocks.only and len(grid) == 2 else (*blocks.sizes, (1, width), (rows, width))
    for block in candidates:
        if (group_count(rows, block[0]), group_count(width, block[1])) == wanted:
            return block
    sizes = ", ".join(f"{rows} x {width}" for rows, width in candidates)
    raise FormatError(
        f"its scales have shape {shown(list(grid))}; a weight of {shown(list(shape))} needs them for blocks of {sizes}."
    )


def plan(headers: Mapping[str, Header], name: str, blocks: Blocks) -> StoredFormat:
    """Return the format of a weight of e4m3 codes with scales under `name`."""
    rows, width = part(headers, "weight", (CODES,))
    check_width(width)
    part(headers, name, SCALES, min(2, len(headers[name].shape)))
    block = find_block((rows, width), headers[name].shape, blocks)
    group = kernel_group(group_indexes(width, block[1]))
    granularity = (
        "one scale" if block == (rows, width) else "whole rows" if block == (1, width) else f"blocks of {block[0]} x {block[1]}"
    )
    if group is None:
        precision = (
            f"exact, but stored as float32: FP8 in {granularity}, which no kernel supports. --quantize 8 requantizes them"
        )
        return StoredFormat((rows, width), f"FP8, {granularity}, as float32", DENSE_BITS, precision)
    return StoredFormat((rows, width), f"FP8, {granularity}", 8 + 32 / group, "bit-exact: code * scale in float32")


def load(codes: Tensor, scales: Tensor, blocks: Blocks) -> Stored:
    block = find_block(tuple(codes.shape), tuple(scales.shape), blocks)
    rows = group_count(codes.shape[0], block[0])
    return from_blocks(codes, scales.float().view(rows, -1), block)


@dataclass(frozen=True)
class FP8:
    """FP8 weights with config.json's block size, or one scale per row or per tensor."""

    blocks: Blocks
    title: ClassVar[str] = "FP8"
    parts: ClassVar[tuple[str, ...]] = ("weight", *NAMES)
    unused: ClassVar[tuple[str, ...]] = ("input_scale", "activation_scale", "input_scale_ub", "output_scale")

    def claims(self, found: Iterable[str]) -> bool:
        return "weight" in found and any(name in found for name in NAMES)

    def plan(self, headers: Mapping[str, Header], read: Callable[[str], Tensor]) -> StoredFormat:
        name = next(name for name in NAMES if name in headers)
        if headers["weight"].dtype in OCTETS:
            return mxfp4.plan(headers, "weight", name, OCTETS)
        return plan(headers, name, self.blocks)

    def load(self, parts: Mapping[str, Tensor]) -> Stored:
        codes, scales = parts["weight"], next(parts[name] for name in NAMES if name in parts)
        return load(codes, scales, self.blocks) if codes.is_floating_point() else mxfp4.load(codes, scales)

    def notes(self) -> list[str]:
        return NOTES


def open_method(config: Fields) -> FP8:
    """Read `quantization_config`."""
    if (kind := config.get("fmt", NAME, "e4m3")) != "e4m3":
        raise FormatError(f"FP8 of kind {shown(kind)} is not supported, only 'e4m3'.")
    if (kind := config.get("expert_dtype", NAME, "fp8")) not in ("fp8", "fp4"):
        raise FormatError(f"FP8 with experts in {shown(kind)} is not supported.")
    block = config.get("weight_block_size", list_of(WIDTH, 2), None)
    if block is not None and len(block) != 2:
        raise FormatError(f"FP8 with weight_block_size {shown(block)} is not supported; rows and inputs of a block are needed.")
    return FP8(Blocks((), False) if block is None else Blocks(((block[0], block[1]),), True))
