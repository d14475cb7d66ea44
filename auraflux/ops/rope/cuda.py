"""RoPE on CUDA: a program rotates some heads of one token (`gpu/blocks/rope.py`)."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.gpu.blocks.rope import Rope, rotate_heads
from auraflux.ops.gpu.device import ready
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv, power_of_two

HEADS, LONG = 4, 4096  # heads per program, doubled from this many tokens
GROWN = 1024  # elements per program


@triton.jit
def _rotate(
    x, turning, out, heads, width, half,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    rotate_heads(
        x, None, turning.inv_freq, turning.positions, out, block, heads, width, width, half, turning.mscale, 0.0,
        INTERLEAVED, HEADS, HALF, REST, EACH,
    )  # fmt: skip


class QKTensors(NamedTuple):
    """Tensors of `_rotate_both`, see `norm_rope`."""

    q: Tensor
    k: Tensor
    q_weight: Tensor | None
    k_weight: Tensor | None
    inv_freq: Tensor
    positions: Tensor
    q_out: Tensor
    k_out: Tensor


class QKShape(NamedTuple):
    """Sizes of `_rotate_both`; `q_pitch` is the stride of the queries' heads."""

    q_heads: int
    k_heads: int
    q_blocks: int
    q_pitch: int
    width: int
    half: int
    mscale: float
    eps: float


@triton.jit
def _rotate_both(
    t, shape,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    if block < shape.q_blocks:
        rotate_heads(
            t.q, t.q_weight, t.inv_freq, t.positions, t.q_out, block, shape.q_heads, shape.q_pitch, shape.width, shape.half,
            shape.mscale, shape.eps, INTERLEAVED, HEADS, HALF, REST, EACH,
        )  # fmt: skip
    else:
        block -= shape.q_blocks
        rotate_heads(
            t.k, t.k_weight, t.inv_freq, t.positions, t.k_out, block, shape.k_heads, shape.width, shape.width, shape.half,
            shape.mscale, shape.eps, INTERLEAVED, HEADS, HALF, REST, EACH,
        )  # fmt: skip


def rope(x: Tensor, inv_freq: Tensor, positions: Tensor, mscale: float = 1.0, interleaved: bool = False) -> Tensor:
    ready(x)
    out = torch.empty_like(x)
    (tokens, heads, width), half = x.shape, inv_freq.shape[0]
    if x.numel():
        block = min(HEADS, power_of_two(heads))
        sizes = heads, width, half, interleaved, block, *_blocks(width, half), positions.dim() == 2
        turning = Rope(inv_freq, positions, float(mscale))
        launch(_rotate, (tokens, cdiv(heads, block)))(x, turning, out, *sizes, num_warps=2)
    return out


@triton.jit
def _grow(q, positions, out, row, width, pitch, span, ahead, slope, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    spans = (tl.load(positions + token) + ahead) // span
    size = 1.0 + slope * tl.log(1.0 + spans.to(tl.float32))
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = (token.to(tl.int64) * (row // width) + at // width) * pitch + at % width
    found = tl.load(q + source, mask=at < row, other=0.0).to(tl.float32)
    tl.store(out + token.to(tl.int64) * row + at, found * size, mask=at < row)


def grow_queries(q: Tensor, positions: Tensor, slope: float, span: int, ahead: int = 0) -> Tensor:
    ready(q)
    out, row = q.new_empty(q.shape), q.shape[1] * q.shape[2]
    if q.numel():
        sizes = row, q.shape[2], q.stride(1), span, ahead, float(slope), GROWN
        launch(_grow, (q.shape[0], cdiv(row, GROWN)))(q, positions, out, *sizes)
    return out


def norm_rope(
    q: Tensor,
    k: Tensor,
    inv_freq: Tensor,
    positions: Tensor,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    mscale: float = 1.0,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    ready(q)
    q_out, k_out = q.new_empty(q.shape), torch.empty_like(k)
    (tokens, q_heads, width), k_heads, half = q.shape, k.shape[1], inv_freq.shape[0]
    if q.numel():
        block = min(HEADS if tokens < LONG else 2 * HEADS, power_of_two(max(q_heads, k_heads)))
        q_blocks, k_blocks = cdiv(q_heads, block), cdiv(k_heads, block)
        shape = QKShape(q_heads, k_heads, q_blocks, q.stride(1), width, half, float(mscale), float(eps))
        q_weight, k_weight = norms or (None, None)
        tensors = QKTensors(q, k, q_weight, k_weight, inv_freq, positions, q_out, k_out)
        constants = interleaved, block, *_blocks(width, half), positions.dim() == 2
        launch(_rotate_both, (tokens, q_blocks + k_blocks))(tensors, shape, *constants, num_warps=2)
    return q_out, k_out


def _blocks(width: int, half: int) -> tuple[int, int]:
    """Return the padded widths of the tiles: of one element of each pair, and of the channels that are not rotated."""
    return power_of_two(max(1, half)), power_of_two(width - 2 * half) if width > 2 * half else 0
