"""The delta rule token by token in Triton: a program runs some state columns of a head through all tokens of a sequence.

Prefill takes several times as long as in chunks, but is bit-identical to single steps.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.delta.cuda.state_tiles import COLUMNS, state_tile
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv


@triton.jit
def _serial_delta(state, q, k, v, decay, beta, starts, out, tokens, TILE: tl.constexpr):
    """Run the recurrence; grid (sequences, heads, column blocks)."""
    HEADS: tl.constexpr = TILE.heads
    K: tl.constexpr = TILE.key_width
    V: tl.constexpr = TILE.value_width
    ROWS: tl.constexpr = TILE.rows
    COLUMNS: tl.constexpr = TILE.columns
    SHARED: tl.constexpr = TILE.heads // TILE.key_heads
    b, head = tl.program_id(0), tl.program_id(1)
    i, j = tl.arange(0, ROWS), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    there = (i < K)[:, None] & (j < V)[None, :]
    place = state + ((b.to(tl.int64) * HEADS + head) * K + i[:, None]) * V + j[None, :]
    memory = tl.load(place, mask=there, other=0.0)
    first, end = tl.maximum(tl.load(starts + b), 0), tl.minimum(tl.load(starts + b + 1), tokens)
    for n in range(end - first):
        token = first.to(tl.int64) + n
        row, where = token * HEADS + head, (token * (HEADS // SHARED) + head // SHARED) * K + i
        key = tl.load(k + where, mask=i < K, other=0.0).to(tl.float32)[:, None]
        query = tl.load(q + where, mask=i < K, other=0.0).to(tl.float32)[:, None]
        value = tl.load(v + row * V + j, mask=j < V, other=0.0).to(tl.float32)
        memory *= tl.load(decay + row).to(tl.float32)
        change = (value - tl.sum(memory * key, 0)) * tl.load(beta + row).to(tl.float32)
        memory = tl.fma(key + tl.zeros_like(memory), change[None, :] + tl.zeros_like(memory), memory)
        tl.store(out + row * V + j, tl.sum(memory * query, 0).to(out.dtype.element_ty), mask=j < V)
    tl.store(place, memory, mask=there)


@lru_cache
def _one_each(batch: int, device: torch.device) -> Tensor:
    """Return `starts` of sequences with one token each."""
    return torch.arange(batch + 1, dtype=torch.int32, device=device)


def run_serial(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, starts: Tensor | None, out: Tensor
) -> None:
    """Run `gated_delta_prefill` into `out`, or, without `starts`, `gated_delta_step`."""
    batch, heads, _, value_width = state.shape
    if starts is None:
        starts = _one_each(batch, state.device)
    tile = state_tile(state, q.shape[1])
    grid = batch, heads, cdiv(value_width, COLUMNS)
    launch(_serial_delta, grid)(state, q, k, v, decay, beta, starts, out, len(v), tile, num_warps=4)
