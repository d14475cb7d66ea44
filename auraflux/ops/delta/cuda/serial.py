"""The delta rule token by token in plain Triton: a program takes some columns of a head through all tokens of a sequence.

A prompt takes several times as long as in chunks, but to the bit what single steps give.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.hopper.launch import launch
from auraflux.ops.hopper.sizes import cdiv, power_of_two

COLUMNS = 16  # of the memory, in a program's registers


@triton.jit
def _serial_delta(
    state, q, k, v, decay, beta, starts, out, tokens, HEADS: tl.constexpr, SHARED: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid (sequences, HEADS, parts of the columns); SHARED heads have one key."""
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
    """Where sequences begin that have a token each."""
    return torch.arange(batch + 1, dtype=torch.int32, device=device)


def take_serially(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, starts: Tensor | None, out: Tensor
) -> None:
    """`gated_delta_prefill` into `out`, or, without `starts`, `gated_delta_step`."""
    batch, heads, key_width, value_width = state.shape
    if starts is None:
        starts = _one_each(batch, state.device)
    sizes = heads, heads // q.shape[1], key_width, value_width, power_of_two(key_width), COLUMNS
    grid = batch, heads, cdiv(value_width, COLUMNS)
    launch(_serial_delta, grid)(state, q, k, v, decay, beta, starts, out, len(v), *sizes, num_warps=4)
