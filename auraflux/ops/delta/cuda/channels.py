"""Kimi Linear's delta rule in Triton: a program runs some state columns of a head through all tokens."""

import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.delta.cuda.state_tiles import COLUMNS, state_tile
from auraflux.ops.gpu.blocks.elementwise import sigmoid, softplus
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv, power_of_two


@triton.jit
def _channel_delta(state, q, k, v, decay, beta, starts, out, tokens, TILE: tl.constexpr):
    HEADS: tl.constexpr = TILE.heads
    K: tl.constexpr = TILE.key_width
    V: tl.constexpr = TILE.value_width
    ROWS: tl.constexpr = TILE.rows
    COLUMNS: tl.constexpr = TILE.columns
    b, head = tl.program_id(0), tl.program_id(1)
    i, j = tl.arange(0, ROWS), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    there = (i < K)[:, None] & (j < V)[None, :]
    place = state + ((b.to(tl.int64) * HEADS + head) * K + i[:, None]) * V + j[None, :]
    memory = tl.load(place, mask=there, other=0.0)
    first, end = tl.maximum(tl.load(starts + b), 0), tl.minimum(tl.load(starts + b + 1), tokens)
    for n in range(end - first):
        row = (first.to(tl.int64) + n) * HEADS + head
        key = tl.load(k + row * K + i, mask=i < K, other=0.0).to(tl.float32)[:, None]
        query = tl.load(q + row * K + i, mask=i < K, other=0.0).to(tl.float32)[:, None]
        value = tl.load(v + row * V + j, mask=j < V, other=0.0).to(tl.float32)
        memory *= tl.load(decay + row * K + i, mask=i < K, other=0.0).to(tl.float32)[:, None]
        change = (value - tl.sum(memory * key, 0)) * tl.load(beta + row).to(tl.float32)
        memory += key * change[None, :]
        tl.store(out + row * V + j, tl.sum(memory * query, 0), mask=j < V)
    tl.store(place, memory, mask=there)


def run_channels(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, starts: Tensor, out: Tensor
) -> None:
    """Run `channel_delta` into `out`."""
    batch, heads, _, value_width = state.shape
    grid = batch, heads, cdiv(value_width, COLUMNS)
    launch(_channel_delta, grid)(state, q, k, v, decay, beta, starts, out, len(v), state_tile(state, heads), num_warps=4)


@triton.jit
def _channel_gates(
    f, b, a_log, dt_bias, decay, beta, floor, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    head, inside = row % HEADS, i < WIDTH
    x = tl.load(f + row * WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(dt_bias + head * WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    found = -rate * softplus(x) if floor is None else floor * sigmoid(rate * x)
    tl.store(decay + row * WIDTH + i, tl.exp(found), mask=inside)
    tl.store(beta + row, sigmoid(tl.load(b + row).to(tl.float32)))


def make_channel_gates(
    f: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, decay: Tensor, beta: Tensor, floor: float | None
) -> None:
    """Run `channel_gates` into `decay` and `beta`."""
    tokens, heads, width = f.shape
    if f.numel():
        sizes = heads, width, power_of_two(width)
        launch(_channel_gates, (tokens * heads,))(f, b, a_log, dt_bias, decay, beta, floor, *sizes, num_warps=1)
