"""Mamba-2's rule in plain Triton: a program takes some columns of a head through all tokens, one by one or in chunks.

In a chunk, what token t reads of what s wrote fades by exp(reach[t] - reach[s]), where reach sums the logarithms of decays: the
reads of all tokens are two products, and so is what the chunk leaves in the memory. Products are of ten bits, more
than bf16's eight.
"""

import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.delta.cuda.gates import softplus
from auraflux.ops.delta.reference_scan import groups_of
from auraflux.ops.hopper.launch import launch
from auraflux.ops.hopper.sizes import cdiv, power_of_two

COLUMNS = 16  # of the state, in a program's registers
CHUNK = 32  # tokens
LEAST = tl.constexpr(1e-37)  # of a decay that has a logarithm


@triton.jit
def _one_by_one(
    state, xbc, decay, step, skip, starts, out, tokens, HEADS: tl.constexpr, GROUPS: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    CHANNELS: tl.constexpr = HEADS * V + 2 * GROUPS * K
    b, head = tl.program_id(0), tl.program_id(1)
    i, j = tl.arange(0, ROWS), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    there = (i < K)[:, None] & (j < V)[None, :]
    place = state + ((b.to(tl.int64) * HEADS + head) * K + i[:, None]) * V + j[None, :]
    memory = tl.load(place, mask=there, other=0.0)
    kept = tl.load(skip + head).to(tl.float32)
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
        tl.store(out + gate * V + j, tl.sum(memory * query, 0) + kept * value, mask=j < V)
    tl.store(place, memory, mask=there)


@triton.jit
def _in_chunks(
    state, xbc, decay, step, skip, starts, out, tokens, HEADS: tl.constexpr, GROUPS: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    CHANNELS: tl.constexpr = HEADS * V + 2 * GROUPS * K
    b, head = tl.program_id(0), tl.program_id(1)
    i, j, t = tl.arange(0, ROWS), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, CHUNK)
    there = (i < K)[:, None] & (j < V)[None, :]
    place = state + ((b.to(tl.int64) * HEADS + head) * K + i[:, None]) * V + j[None, :]
    memory = tl.load(place, mask=there, other=0.0)
    kept = tl.load(skip + head).to(tl.float32)
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
        fading = tl.log(tl.maximum(tl.load(decay + gate, mask=inside, other=1.0).to(tl.float32), LEAST))
        written = value * tl.load(step + gate, mask=inside, other=0.0).to(tl.float32)[:, None]
        reach, whole = tl.cumsum(fading, 0), tl.sum(fading, 0)
        seen = tl.where(t[:, None] >= t[None, :], tl.exp(reach[:, None] - reach[None, :]), 0.0)
        seen *= tl.dot(query, tl.trans(key), input_precision="tf32")
        read = tl.dot(query, memory, input_precision="tf32") * tl.exp(reach)[:, None] + kept * value
        read = tl.dot(seen, written, read, input_precision="tf32")
        tl.store(out + (gate * V)[:, None] + j[None, :], read, mask=inside[:, None] & (j < V)[None, :])
        late = key * tl.exp(whole - reach)[:, None]
        memory = tl.dot(tl.trans(late), written, memory * tl.exp(whole), input_precision="tf32")
    tl.store(place, memory, mask=there)


def _sizes(state: Tensor, xbc: Tensor) -> tuple[int, ...]:
    _, heads, key_width, value_width = state.shape
    return heads, groups_of(state, xbc.shape[1]), key_width, value_width, max(16, power_of_two(key_width)), COLUMNS


def scan_one_by_one(state: Tensor, xbc: Tensor, decay: Tensor, step: Tensor, skip: Tensor, starts: Tensor, out: Tensor) -> None:
    """`selective_scan` into `out`, as it is defined."""
    grid = len(state), state.shape[1], cdiv(state.shape[3], COLUMNS)
    launch(_one_by_one, grid)(state, xbc, decay, step, skip, starts, out, len(xbc), *_sizes(state, xbc), num_warps=4)


def scan_in_chunks(state: Tensor, xbc: Tensor, decay: Tensor, step: Tensor, skip: Tensor, starts: Tensor, out: Tensor) -> None:
    """`selective_scan` into `out`, tokens of a chunk together."""
    grid = len(state), state.shape[1], cdiv(state.shape[3], COLUMNS)
    sizes = *_sizes(state, xbc), CHUNK
    launch(_in_chunks, grid)(state, xbc, decay, step, skip, starts, out, len(xbc), *sizes, num_warps=4)


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
    """`scan_gates` into `decay` and `step`."""
    if size := dt.numel():
        launch(_gates, (cdiv(size, 512),))(dt, a_log, dt_bias, decay, step, size, dt.shape[1], 512, num_warps=4)
