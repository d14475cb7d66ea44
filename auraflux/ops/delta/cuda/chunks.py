"""Triton kernels of the chunked delta rule over a prompt, see README.md.

`chunk_kernel` does everything independent of the state, for all chunks at once: W = X (strength * decay * k),
U = X (strength * v) and P = decay * q kᵀ, with X the inverse of I + A. `scan_kernel` then walks a sequence's chunks with the
transposed state in registers: D = U - W S, out = decay * q S + P D, S = decay * S + kᵀ (decay * D).

Chunks of a ragged batch take slots in scratch memory: those of sequence b begin at `starts[b] // C + b`, which leaves room
for every sequence's last, partial chunk and needs no count that only the device knows.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv, power_of_two

NARROW_FROM = 128  # channels; with 32 and 16-bit products, Triton 3.6 gave wrong sums on an H200 from the 17th token on
SCANNED, SCAN_WARPS = 32, 8  # state columns of a program
TL_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Chunks(NamedTuple):
    """Outputs of `chunk_kernel`; `gates` are decays since a chunk's start and until its end."""

    w: Tensor
    u: Tensor
    p: Tensor
    gates: Tensor


class Tokens(NamedTuple):
    """Inputs of `gated_delta_prefill` per token."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor


class ChunkShape(NamedTuple):
    """Compile-time shape: widths, tokens of a chunk, padded tile widths, and doublings of the inverse's blocks."""

    key_width: int
    value_width: int
    chunk: int
    keys: int
    values: int
    levels: int


@triton.jit
def sequence_at(slot, starts, sequences, C: tl.constexpr):
    """Return the sequence of a slot: the last whose first slot is not past it."""
    low, high = slot * 0, slot * 0 + sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        before = tl.load(starts + middle) // C + middle <= slot
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle - 1)
    return low


@triton.jit
def inverse(a, C: tl.constexpr, LEVELS: tl.constexpr, DOT: tl.constexpr):
    """Return (I + a)⁻¹ of a strictly lower triangular a [C, C].

    With x inverting the diagonal blocks of some size, x - x L x inverts those twice as large, L being the blocks of a that join
    pairs of them. Unlike a power series of a, this is stable for equal keys.
    """
    i = tl.arange(0, C)
    distance = i[:, None] ^ i[None, :]
    x = tl.where(distance == 0, 1.0, tl.where(distance == 1, -a, 0.0))
    right = a.to(DOT)
    for level in tl.static_range(1, LEVELS):
        y = tl.dot(x.to(DOT), right, input_precision="tf32x3")
        y = tl.where(distance >> level == 1, -y, 0.0)
        x += tl.dot(y.to(DOT), x.to(DOT), input_precision="tf32x3")
    return x


@triton.jit(do_not_specialize_on_alignment=["tokens"])
def chunk_kernel(
    tokens_in, starts, made, sequences, tokens, heads, shared, SHAPE: tl.constexpr, DOT: tl.constexpr, INVERSE: tl.constexpr
):
    K: tl.constexpr = SHAPE.key_width
    V: tl.constexpr = SHAPE.value_width
    C: tl.constexpr = SHAPE.chunk
    BK: tl.constexpr = SHAPE.keys
    BV: tl.constexpr = SHAPE.values
    LEVELS: tl.constexpr = SHAPE.levels
    slot, head = tl.program_id(0), tl.program_id(1)
    b = sequence_at(slot, starts, sequences, C)
    start, end = tl.load(starts + b), tl.minimum(tl.load(starts + b + 1), tokens)
    first = start + (slot - start // C - b) * C
    if first >= end:
        return
    i, column = tl.arange(0, C), tl.arange(0, BK)
    token = (first + i).to(tl.int64)
    live = token < end
    # differences of cumulative logarithms, in float64 since a closed gate adds -69 to them
    step = tl.log(tl.maximum(tl.load(tokens_in.decay + token * heads + head, mask=live, other=1.0).to(tl.float32), 1e-30))
    log = tl.cumsum(step.to(tl.float64), 0)
    strength = tl.load(tokens_in.beta + token * heads + head, mask=live, other=0.0).to(tl.float32)
    inside = live[:, None] & (column < K)[None, :]
    where = (token * (heads // shared) + head // shared)[:, None] * K + column[None, :]
    key = tl.load(tokens_in.k + where, mask=inside, other=0.0).to(DOT)
    query = tl.load(tokens_in.q + where, mask=inside, other=0.0).to(DOT)

    below = i[:, None] - i[None, :]
    between = tl.exp(tl.minimum((log[:, None] - log[None, :]).to(tl.float32), 0.0))
    between = tl.where(below >= 0, between, 0.0)
    a = tl.dot(key, tl.trans(key), input_precision="tf32x3") * strength[:, None] * between
    x = inverse(tl.where(below > 0, a, 0.0), C, LEVELS, INVERSE) * strength[None, :]
    base = slot.to(tl.int64) * heads + head
    square = i[:, None] * C + i[None, :]
    tl.store(made.p + base * C * C + square, (tl.dot(query, tl.trans(key), input_precision="tf32x3") * between).to(DOT))
    since_start = tl.exp(log.to(tl.float32))
    tl.store(made.gates + base * 2 * C + i, since_start)
    tl.store(made.gates + (base * 2 + 1) * C + i, tl.exp((tl.sum(step.to(tl.float64), 0) - log).to(tl.float32)))
    read = tl.dot((x * since_start[None, :]).to(DOT), key, input_precision="tf32x3")
    tl.store(made.w + base * C * BK + i[:, None] * BK + column[None, :], read.to(DOT))
    x = x.to(DOT)
    for left in range(0, V, BV):
        place = left + tl.arange(0, BV)
        values = tokens_in.v + (token * heads + head)[:, None] * V + place[None, :]
        value = tl.load(values, mask=live[:, None] & (place < V)[None, :], other=0.0).to(DOT)
        new = tl.dot(x, value, input_precision="tf32x3").to(DOT)
        tl.store(made.u + base * C * V + i[:, None] * V + place[None, :], new, mask=(place < V)[None, :])


@triton.jit(do_not_specialize_on_alignment=["tokens"])
def scan_kernel(state, q, k, made, out, starts, tokens, heads, shared, SHAPE: tl.constexpr, DOT: tl.constexpr):
    K: tl.constexpr = SHAPE.key_width
    V: tl.constexpr = SHAPE.value_width
    C: tl.constexpr = SHAPE.chunk
    BK: tl.constexpr = SHAPE.keys
    BV: tl.constexpr = SHAPE.values
    head, b = tl.program_id(1), tl.program_id(2)
    row, column, i = tl.program_id(0) * BV + tl.arange(0, BV), tl.arange(0, BK), tl.arange(0, C)
    start, end = tl.load(starts + b), tl.minimum(tl.load(starts + b + 1), tokens)
    memory = state + (b * heads + head).to(tl.int64) * K * V + column[None, :] * V + row[:, None]
    inside = (row < V)[:, None] & (column < K)[None, :]
    s = tl.load(memory, mask=inside, other=0.0)  # [BV, BK]
    # 64-bit scalars for a chunk's base, 32-bit offsets within it
    base = (start // C + b).to(tl.int64) * heads + head
    token, left = start.to(tl.int64), end - start
    key_heads = heads // shared
    where = i[:, None] * (key_heads * K) + column[None, :]
    for _ in range(start, end, C):
        there = (i < left)[:, None] & (column < K)[None, :]
        shift = (token * key_heads + head // shared) * K
        read = tl.load(made.w + base * C * BK + (i[:, None] * BK + column[None, :]))
        new = tl.load(made.u + base * C * V + (i[:, None] * V + row[None, :]), mask=(row < V)[None, :], other=0.0)
        query = tl.load(q + shift + where, mask=there, other=0.0).to(DOT)
        key = tl.load(k + shift + where, mask=there, other=0.0).to(DOT)
        within = tl.load(made.p + base * C * C + (i[:, None] * C + i[None, :]))
        since_start = tl.load(made.gates + base * 2 * C + i)
        till_end = tl.load(made.gates + (base * 2 + 1) * C + i)
        rounded = s.to(DOT)
        new = tl.trans(new).to(tl.float32) - tl.dot(rounded, tl.trans(read), input_precision="tf32x3")
        o = tl.dot(rounded, tl.trans(query), input_precision="tf32x3") * since_start[None, :]
        o = tl.dot(new.to(DOT), tl.trans(within), o, input_precision="tf32x3")
        there = (i < left)[None, :] & (row < V)[:, None]
        results = out + (token * heads + head) * V + (i[None, :] * (heads * V) + row[:, None])
        tl.store(results, o.to(out.dtype.element_ty), mask=there)
        s *= tl.load(made.gates + base * 2 * C + C - 1)
        s = tl.dot((new * till_end[None, :]).to(DOT), key, s, input_precision="tf32x3")
        base, token, left = base + heads, token + C, left - C
    tl.store(memory, s, mask=inside)


def run_chunks(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, starts: Tensor, out: Tensor
) -> None:
    """Run `gated_delta_prefill` into `out`."""
    batch, heads, K, V = state.shape
    tokens, shared = v.shape[0], heads // q.shape[1]
    narrow = q.dtype == k.dtype == v.dtype and min(K, V) >= NARROW_FROM
    dtype = v.dtype if narrow else torch.float32
    wide = dtype == torch.float32
    C, levels = (32, 5) if wide else (64, 6)
    BK, BV = (max(16, power_of_two(n)) for n in (K, V))
    slots = tokens // C + batch
    w, u, p = (torch.empty(slots, heads, C, n, dtype=dtype, device=v.device) for n in (BK, V, C))
    made = Chunks(w, u, p, torch.empty(slots, heads, 2, C, dtype=torch.float32, device=v.device))
    # float16 holds the inverse, whose entries are at most 1, better than bfloat16
    inverse = tl.float32 if wide else tl.float16
    shape = ChunkShape(K, V, C, BK, min(BV, 128), levels)
    launch(chunk_kernel, (slots, heads))(
        Tokens(q, k, v, decay, beta), starts, made, batch, tokens, heads, shared, shape, TL_DTYPES[dtype], inverse, num_warps=4
    )
    width = min(BV, SCANNED)
    launch(scan_kernel, (cdiv(V, width), heads, batch))(
        state, q, k, made, out, starts, tokens, heads, shared, shape._replace(values=width), TL_DTYPES[dtype],
        num_warps=SCAN_WARPS, num_stages=2,
    )  # fmt: skip
