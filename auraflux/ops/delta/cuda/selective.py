"""Mamba-2's rule in Triton: a program runs some state columns of a head through all tokens, one by one or in chunks.

In a chunk, the contribution of token s to token t decays by exp(log_decay[t] - log_decay[s]), with cumulative logarithms of
decays: all outputs are two matrix products, and so is the update of the state. Products are tf32, more precise than bf16.
"""

import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.delta.cuda.state_tiles import COLUMNS, StateTile, state_tile
from auraflux.ops.delta.reference_scan import groups_of
from auraflux.ops.gpu.blocks.elementwise import softplus
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv

CHUNK = 32  # tokens
LEAST = tl.constexpr(1e-37)  # clamps decays before the logarithm


@triton.jit
def _one_by_one(state, xbc, decay, step, skip, starts, out, tokens, TILE: tl.constexpr):
    HEADS: tl.constexpr = TILE.heads
    K: tl.constexpr = TILE.key_width
    V: tl.constexpr = TILE.value_width
    ROWS: tl.constexpr = TILE.rows
    COLUMNS: tl.constexpr = TILE.columns
    GROUPS: tl.constexpr = TILE.key_heads
    CHANNELS: tl.constexpr = HEADS * V + 2 * GROUPS * K
    b, head = tl.program_id(0), tl.program_id(1)
    i, j = tl.arange(0, ROWS), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    there = (i < K)[:, None] & (j < V)[None, :]
    place = state + ((b.to(tl.int64) * HEADS + head) * K + i[:, None]) * V + j[None, :]
    memory = tl.load(place, mask=there, other=0.0)
    skip_factor = tl.load(skip + head).to(tl.float32)
    keys = HEADS * V + head // (HEADS // GROUPS) * K + i
    first, end = tl.maximum(tl.load(starts + b), 0), tl.minimum(tl.load(starts + b + 1), tokens)
    for n in range(end - first):
        token = first.to(tl.int64) + n
        row, gate = xbc + token * CHANNELS, token * HEADS + head
        value = tl.load(row + head * V + j, mask=j < V, other=0.0).to(tl.float32)
        key = tl.load(row + keys, mask=i < K, other=0.0).to(tl.float32)[:, None]
        query = tl.load(row + GROUPS * K + keys, mask=i < K, other=0.0).to(tl.float32)[:, None]
        written = value * tl.load(step + gate).to(tl.float32)
        memory = memory * tl.load(decay + gate).to(tl.float32) + key * written[None, :]
        tl.store(out + gate * V + j, tl.sum(memory * query, 0) + skip_factor * value, mask=j < V)
    tl.store(place, memory, mask=there)


@triton.jit
def _in_chunks(state, xbc, decay, step, skip, starts, out, tokens, TILE: tl.constexpr, CHUNK: tl.constexpr):
    HEADS: tl.constexpr = TILE.heads
    K: tl.constexpr = TILE.key_width
    V: tl.constexpr = TILE.value_width
    ROWS: tl.constexpr = TILE.rows
    COLUMNS: tl.constexpr = TILE.columns
    GROUPS: tl.constexpr = TILE.key_heads
    CHANNELS: tl.constexpr = HEADS * V + 2 * GROUPS * K
    b, head = tl.program_id(0), tl.program_id(1)
    i, j, t = tl.arange(0, ROWS), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, CHUNK)
    there = (i < K)[:, None] & (j < V)[None, :]
    place = state + ((b.to(tl.int64) * HEADS + head) * K + i[:, None]) * V + j[None, :]
    memory = tl.load(place, mask=there, other=0.0)
    skip_factor = tl.load(skip + head).to(tl.float32)
    keys = HEADS * V + head // (HEADS // GROUPS) * K + i
    first, end = tl.maximum(tl.load(starts + b), 0), tl.minimum(tl.load(starts + b + 1), tokens)
    for begin in range(first, end, CHUNK):
        token = begin + t.to(tl.int64)
        inside = token < end
        row, gate = xbc + token[:, None] * CHANNELS, token * HEADS + head
        wide = inside[:, None] & (i < K)[None, :]
        value = tl.load(row + head * V + j[None, :], mask=inside[:, None] & (j < V)[None, :], other=0.0).to(tl.float32)
        key = tl.load(row + keys[None, :], mask=wide, other=0.0).to(tl.float32)
        query = tl.load(row + GROUPS * K + keys[None, :], mask=wide, other=0.0).to(tl.float32)
        step_log_decay = tl.log(tl.maximum(tl.load(decay + gate, mask=inside, other=1.0).to(tl.float32), LEAST))
        written = value * tl.load(step + gate, mask=inside, other=0.0).to(tl.float32)[:, None]
        log_decay, total_log_decay = tl.cumsum(step_log_decay, 0), tl.sum(step_log_decay, 0)
        scores = tl.where(t[:, None] >= t[None, :], tl.exp(log_decay[:, None] - log_decay[None, :]), 0.0)
        scores *= tl.dot(query, tl.trans(key), input_precision="tf32")
        read = tl.dot(query, memory, input_precision="tf32") * tl.exp(log_decay)[:, None] + skip_factor * value
        read = tl.dot(scores, written, read, input_precision="tf32")
        tl.store(out + (gate * V)[:, None] + j[None, :], read, mask=inside[:, None] & (j < V)[None, :])
        late = key * tl.exp(total_log_decay - log_decay)[:, None]
        memory = tl.dot(tl.trans(late), written, memory * tl.exp(total_log_decay), input_precision="tf32")
    tl.store(place, memory, mask=there)


def _tile(state: Tensor, xbc: Tensor) -> StateTile:
    return state_tile(state, groups_of(state, xbc.shape[1]), least_rows=16)


def scan_one_by_one(state: Tensor, xbc: Tensor, decay: Tensor, step: Tensor, skip: Tensor, starts: Tensor, out: Tensor) -> None:
    """Run `selective_scan` into `out`, token by token."""
    grid = len(state), state.shape[1], cdiv(state.shape[3], COLUMNS)
    launch(_one_by_one, grid)(state, xbc, decay, step, skip, starts, out, len(xbc), _tile(state, xbc), num_warps=4)


def scan_in_chunks(state: Tensor, xbc: Tensor, decay: Tensor, step: Tensor, skip: Tensor, starts: Tensor, out: Tensor) -> None:
    """Run `selective_scan` into `out`, in chunks."""
    grid = len(state), state.shape[1], cdiv(state.shape[3], COLUMNS)
    launch(_in_chunks, grid)(state, xbc, decay, step, skip, starts, out, len(xbc), _tile(state, xbc), CHUNK, num_warps=4)


@triton.jit
def _gates(dt, a_log, dt_bias, decay, step, size, heads, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, head = place < size, place % heads
    rate = tl.exp(tl.load(a_log + head, mask=inside, other=0.0).to(tl.float32))
    x = tl.load(dt + place, mask=inside, other=0.0).to(tl.float32)
    strength = softplus(x + tl.load(dt_bias + head, mask=inside, other=0.0).to(tl.float32))
    tl.store(step + place, strength, mask=inside)
    tl.store(decay + place, tl.exp(-rate * strength), mask=inside)


def make_scan_gates(dt: Tensor, a_log: Tensor, dt_bias: Tensor, decay: Tensor, step: Tensor) -> None:
    """Run `scan_gates` into `decay` and `step`."""
    if size := dt.numel():
        launch(_gates, (cdiv(size, 512),))(dt, a_log, dt_bias, decay, step, size, dt.shape[1], 512, num_warps=4)
