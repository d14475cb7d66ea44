"""Short convolution of a delta layer's inputs, four taps and SiLU, in Triton."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.gpu.blocks.elementwise import silu
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv


class Tile(NamedTuple):
    """Compile-time settings of `_tile_kernel`: its sizes, steps of the search for a sequence, and whether SiLU is left out."""

    tokens: int
    channels: int
    steps: int
    plain: bool


@triton.jit
def _convolve(x0, x1, x2, x3, weight, bias, column, inside, channels, PLAIN: tl.constexpr):
    total = x0.to(tl.float32) * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    total += x1.to(tl.float32) * tl.load(weight + channels + column, mask=inside, other=0.0).to(tl.float32)
    total += x2.to(tl.float32) * tl.load(weight + 2 * channels + column, mask=inside, other=0.0).to(tl.float32)
    total += x3.to(tl.float32) * tl.load(weight + 3 * channels + column, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    return total if PLAIN else silu(total)


@triton.jit
def _serial_kernel(x, state, weight, bias, starts, out, tokens, channels, PLAIN: tl.constexpr, BC: tl.constexpr):
    b, column = tl.program_id(0), tl.program_id(1) * BC + tl.arange(0, BC)
    inside = column < channels
    start, end = tl.load(starts + b), tl.minimum(tl.load(starts + b + 1), tokens)
    memory = state + b.to(tl.int64) * 3 * channels + column
    x0 = tl.load(memory, mask=inside, other=0.0)
    x1 = tl.load(memory + channels, mask=inside, other=0.0)
    x2 = tl.load(memory + 2 * channels, mask=inside, other=0.0)
    where = start.to(tl.int64) * channels + column
    for _ in range(start, end):
        x3 = tl.load(x + where, mask=inside, other=0.0)
        y = _convolve(x0, x1, x2, x3, weight, bias, column, inside, channels, PLAIN)
        tl.store(out + where, y.to(out.dtype.element_ty), mask=inside)
        x0, x1, x2 = x1, x2, x3
        where += channels
    tl.store(memory, x0, mask=inside)
    tl.store(memory + channels, x1, mask=inside)
    tl.store(memory + 2 * channels, x2, mask=inside)


@triton.jit
def _input(x, state, b, age, token, start, column, inside, channels):
    """Load the input `age` tokens before each token: from x, or from the state before the sequence's first token."""
    back = token - age
    ours = (back >= start)[:, None]
    where = back.to(tl.int64)[:, None] * channels + column[None, :]
    older = (b.to(tl.int64) * 3 + 3 + back - start)[:, None] * channels + column[None, :]
    new = tl.load(x + where, mask=inside & ours, other=0.0)
    return tl.where(ours, new, tl.load(state + older, mask=inside & ~ours, other=0.0))


@triton.jit(do_not_specialize_on_alignment=["tokens"])
def _tile_kernel(x, state, weight, bias, starts, out, sequences, tokens, channels, TILE: tl.constexpr):
    BT: tl.constexpr = TILE.tokens
    BC: tl.constexpr = TILE.channels
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (token < tokens)[:, None] & (column < channels)[None, :]
    b = _sequence_of(token, starts, sequences, TILE.steps)
    start = tl.load(starts + b)
    x0 = _input(x, state, b, 3, token, start, column, inside, channels)
    x1 = _input(x, state, b, 2, token, start, column, inside, channels)
    x2 = _input(x, state, b, 1, token, start, column, inside, channels)
    x3 = _input(x, state, b, 0, token, start, column, inside, channels)
    y = _convolve(x0, x1, x2, x3, weight, bias, column[None, :], (column < channels)[None, :], channels, TILE.plain)
    where = token.to(tl.int64)[:, None] * channels + column[None, :]
    tl.store(out + where, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _sequence_of(token, starts, sequences, STEPS: tl.constexpr):
    """Return the sequence of each token: the last that begins at or before it, as those before it are empty."""
    low, high = token * 0, token * 0 + sequences - 1
    for _ in tl.static_range(STEPS):
        middle = (low + high + 1) // 2
        before = tl.load(starts + middle) <= token
        low = tl.where(before, middle, low)
        high = tl.where(before, high, tl.maximum(middle - 1, low))
    return low


@triton.jit(do_not_specialize_on_alignment=["tokens"])
def _state_kernel(x, state, starts, tokens, channels, BC: tl.constexpr):
    """Copy the last three inputs of a sequence to its state."""
    b, column = tl.program_id(0), tl.program_id(1) * BC + tl.arange(0, BC)
    inside, place = column < channels, tl.arange(0, 4)
    start, end = tl.load(starts + b), tl.minimum(tl.load(starts + b + 1), tokens)
    last = _input(x, state, b + place * 0, 2, end - 1 + place, start, column, (place < 3)[:, None] & inside[None, :], channels)
    where = (b.to(tl.int64) * 3 + place)[:, None] * channels + column[None, :]
    tl.debug_barrier()
    tl.store(state + where, last, mask=(place < 3)[:, None] & inside[None, :])


def convolve_serially(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor, out: Tensor, plain: bool
) -> None:
    """Convolve with one program per sequence that walks its tokens."""
    (tokens, channels), batch = x.shape, len(state)
    launch(_serial_kernel, (batch, cdiv(channels, 256)))(
        x, state, weight, bias, starts, out, tokens, channels, plain, 256, num_warps=2
    )


def convolve_tiles(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor, out: Tensor, plain: bool
) -> None:
    """Convolve all tokens at once; a second launch updates the state."""
    (tokens, channels), batch = x.shape, len(state)
    grid = (cdiv(tokens, 16), cdiv(channels, 128))
    steps = (batch - 1).bit_length()
    tile = Tile(16, 128, steps, plain)
    launch(_tile_kernel, grid)(x, state, weight, bias, starts, out, batch, tokens, channels, tile, num_warps=4)
    launch(_state_kernel, (batch, cdiv(channels, 256)))(x, state, starts, tokens, channels, 256, num_warps=4)
