"""Triton kernels for the delta layer. Whatever depends on `starts` is read on the device: wrappers look at shapes only."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops._dispatch import Declined
from auraflux.ops.delta.cuda.chunks import chunk_kernel, scan_kernel
from auraflux.ops.delta.cuda.decode import fits_step, layer_step, step_hopper
from auraflux.ops.delta.cuda.prefill import (
    CHUNK_REGISTERS,
    SCAN_REGISTERS,
    STAGES,
    chunk_tiles,
    fits_hopper,
    prefill_hopper,
    tile_layout,
)
from auraflux.ops.delta.cuda.scan import scan_tiles
from auraflux.ops.delta.reference import LAYER_STEPS, layer_step_by
from auraflux.ops.hopper.build import Build
from auraflux.ops.hopper.device import ready
from auraflux.ops.hopper.elementwise import sigmoid, silu
from auraflux.ops.hopper.sizes import cdiv, power_of_two

NARROW_FROM = 128  # channels; with 32 and 16-bit products, Triton 3.6 gave wrong sums on an H200 from the 17th token on
WIDEST_KEY = 256
SCANNED, SCAN_WARPS = 32, 8  # columns of the memory that a program carries through a prompt
SERIAL_TOKENS = 16  # per sequence; up to here one program convolves a sequence's tokens one by one

TL_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _step_kernel(state, q, k, v, decay, beta, out, heads, shared, K, V, BK: tl.constexpr, BV: tl.constexpr):
    # both products are taken of the old memory, so it is read once: q S' = g (q S) + (q k) d
    head = tl.program_id(0).to(tl.int64)
    row, column = tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    memory = state + head * K * V + row[:, None] * V + column[None, :]
    inside = (row < K)[:, None] & (column < V)[None, :]
    s = tl.load(memory, mask=inside, other=0.0)
    where = (head // heads * (heads // shared) + head % heads // shared) * K + row
    key = tl.load(k + where, mask=row < K, other=0.0).to(tl.float32)
    query = tl.load(q + where, mask=row < K, other=0.0).to(tl.float32)
    g, strength = tl.load(decay + head).to(tl.float32), tl.load(beta + head).to(tl.float32)
    value = tl.load(v + head * V + column, mask=column < V, other=0.0).to(tl.float32)
    new = (value - tl.sum(s * key[:, None], 0) * g) * strength
    read = tl.sum(s * query[:, None], 0) * g + new * tl.sum(key * query, 0)
    tl.store(memory, s * g + key[:, None] * new[None, :], mask=inside)
    tl.store(out + head * V + column, read.to(out.dtype.element_ty), mask=column < V)


def gated_delta_step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    ready(state)
    batch, heads, K, V = state.shape
    if K > 2 * WIDEST_KEY:
        raise Declined(f"keys of {K} channels, wider than {2 * WIDEST_KEY}")
    out = torch.empty_like(v)
    if not state.numel():
        return out.zero_()
    # few heads are cut finer, to give every multiprocessor a part
    width = min(power_of_two(V), 16 if batch * heads * V <= 64 * 128 else 32)
    grid = (batch * heads, cdiv(V, width))
    shared = heads // q.shape[1]
    _step_kernel[grid](state, q, k, v, decay, beta, out, heads, shared, K, V, power_of_two(K), width, num_warps=4)
    return out


def gated_delta_prefill(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, starts: Tensor) -> Tensor:
    ready(state)
    batch, heads, K, V = state.shape
    tokens, shared = v.shape[0], heads // q.shape[1]
    if K > WIDEST_KEY:
        raise Declined(f"keys of {K} channels, wider than {WIDEST_KEY}")
    out = torch.empty_like(v)
    if not out.numel():
        return out
    starts = starts.to(v.device, non_blocking=True)
    if fits_hopper(state, q, k, v, decay, beta):
        prefill_hopper(state, q, k, v, decay, beta, starts, out)
        return out
    alike = q.dtype == k.dtype == v.dtype and min(K, V) >= NARROW_FROM
    dtype = v.dtype if alike else torch.float32
    wide = dtype == torch.float32
    C, levels = (32, 5) if wide else (64, 6)
    BK, BV = (max(16, power_of_two(n)) for n in (K, V))
    slots = tokens // C + batch
    w, u, p = (torch.empty(slots, heads, C, n, dtype=dtype, device=v.device) for n in (BK, V, C))
    gates = torch.empty(slots, heads, 2, C, dtype=torch.float32, device=v.device)
    # float16 holds the inverse, whose entries are at most 1, better than bfloat16
    inverse = tl.float32 if wide else tl.float16
    chunk_kernel[slots, heads](
        q, k, v, decay, beta, starts, w, u, p, gates, batch, tokens, heads, shared, K, V,
        C, levels, BK, min(BV, 128), TL_DTYPES[dtype], inverse, num_warps=4,
    )  # fmt: skip
    width = min(BV, SCANNED)
    scan_kernel[cdiv(V, width), heads, batch](
        state, q, k, w, u, p, gates, out, starts, tokens, heads, shared, K, V, C, BK, width, TL_DTYPES[dtype],
        num_warps=SCAN_WARPS, num_stages=2,
    )  # fmt: skip
    return out


@triton.jit
def _convolve(x0, x1, x2, x3, weight, column, inside, channels):
    total = x0.to(tl.float32) * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    total += x1.to(tl.float32) * tl.load(weight + channels + column, mask=inside, other=0.0).to(tl.float32)
    total += x2.to(tl.float32) * tl.load(weight + 2 * channels + column, mask=inside, other=0.0).to(tl.float32)
    total += x3.to(tl.float32) * tl.load(weight + 3 * channels + column, mask=inside, other=0.0).to(tl.float32)
    return silu(total)


@triton.jit
def _serial_kernel(x, state, weight, starts, out, tokens, channels, BC: tl.constexpr):
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
        y = _convolve(x0, x1, x2, x3, weight, column, inside, channels)
        tl.store(out + where, y.to(out.dtype.element_ty), mask=inside)
        x0, x1, x2 = x1, x2, x3
        where += channels
    tl.store(memory, x0, mask=inside)
    tl.store(memory + channels, x1, mask=inside)
    tl.store(memory + 2 * channels, x2, mask=inside)


@triton.jit
def _input(x, state, b, age, token, start, column, inside, channels):
    """The input `age` tokens before one: of x, or of the state where the sequence does not reach back so far."""
    back = token - age
    ours = (back >= start)[:, None]
    where = back.to(tl.int64)[:, None] * channels + column[None, :]
    older = (b.to(tl.int64) * 3 + 3 + back - start)[:, None] * channels + column[None, :]
    new = tl.load(x + where, mask=inside & ours, other=0.0)
    return tl.where(ours, new, tl.load(state + older, mask=inside & ~ours, other=0.0))


@triton.jit
def _tile_kernel(
    x, state, weight, starts, out, sequences, tokens, channels, STEPS: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr
):
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (token < tokens)[:, None] & (column < channels)[None, :]
    b = _sequence_of(token, starts, sequences, STEPS)
    start = tl.load(starts + b)
    x0 = _input(x, state, b, 3, token, start, column, inside, channels)
    x1 = _input(x, state, b, 2, token, start, column, inside, channels)
    x2 = _input(x, state, b, 1, token, start, column, inside, channels)
    x3 = _input(x, state, b, 0, token, start, column, inside, channels)
    y = _convolve(x0, x1, x2, x3, weight, column[None, :], (column < channels)[None, :], channels)
    where = token.to(tl.int64)[:, None] * channels + column[None, :]
    tl.store(out + where, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _sequence_of(token, starts, sequences, STEPS: tl.constexpr):
    """The last sequence that begins at or before each token: the one that has it, as those before it are empty."""
    low, high = token * 0, token * 0 + sequences - 1
    for _ in tl.static_range(STEPS):
        middle = (low + high + 1) // 2
        before = tl.load(starts + middle) <= token
        low = tl.where(before, middle, low)
        high = tl.where(before, high, tl.maximum(middle - 1, low))
    return low


@triton.jit
def _keep_kernel(x, state, starts, tokens, channels, BC: tl.constexpr):
    """Move the last three inputs of a sequence to its state."""
    b, column = tl.program_id(0), tl.program_id(1) * BC + tl.arange(0, BC)
    inside, place = column < channels, tl.arange(0, 4)
    start, end = tl.load(starts + b), tl.minimum(tl.load(starts + b + 1), tokens)
    last = _input(x, state, b + place * 0, 2, end - 1 + place, start, column, (place < 3)[:, None] & inside[None, :], channels)
    where = (b.to(tl.int64) * 3 + place)[:, None] * channels + column[None, :]
    tl.debug_barrier()
    tl.store(state + where, last, mask=(place < 3)[:, None] & inside[None, :])


def short_conv(x: Tensor, state: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
    ready(x)
    tokens, channels = x.shape
    batch = state.shape[0]
    out = torch.empty_like(x)
    if not x.numel():
        return out
    starts = starts.to(x.device, non_blocking=True)
    if tokens <= SERIAL_TOKENS * batch:
        _serial_kernel[batch, cdiv(channels, 256)](x, state, weight, starts, out, tokens, channels, 256, num_warps=2)
        return out
    grid = (cdiv(tokens, 16), cdiv(channels, 128))
    steps = (batch - 1).bit_length()
    _tile_kernel[grid](x, state, weight, starts, out, batch, tokens, channels, steps, 16, 128, num_warps=4)
    _keep_kernel[batch, cdiv(channels, 256)](x, state, starts, tokens, channels, 256, num_warps=4)
    return out


@triton.jit
def _gates_kernel(a, b, a_log, dt_bias, decay, beta, size, heads, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, head = place < size, place % heads
    rate = tl.exp(tl.load(a_log + head, mask=inside, other=0.0).to(tl.float32))
    x = tl.load(a + place, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(dt_bias + head, mask=inside, other=0.0).to(tl.float32)
    # log(1 + e) keeps the digits of a small e when what was lost in 1 + e is put right
    e = tl.exp(-tl.abs(x))
    sum = 1.0 + e
    softplus = tl.maximum(x, 0.0) + tl.where(sum == 1.0, e, tl.log(sum) * (e / tl.where(sum == 1.0, 1.0, sum - 1.0)))
    tl.store(decay + place, tl.exp(-rate * softplus), mask=inside)
    y = tl.load(b + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(beta + place, sigmoid(y), mask=inside)


def delta_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    ready(a)
    decay, beta = (torch.empty(a.shape, dtype=torch.float32, device=a.device) for _ in range(2))
    if size := a.numel():
        _gates_kernel[(cdiv(size, 512),)](a, b, a_log, dt_bias, decay, beta, size, a.shape[1], 512, num_warps=4)
    return decay, beta


def delta_layer_step(
    qkv: Tensor, z: Tensor, a: Tensor, b: Tensor, conv: Tensor, state: Tensor, taps: Tensor, a_log: Tensor, dt_bias: Tensor,
    norm: Tensor, starts: Tensor, unit_eps: float, eps: float,
) -> Tensor:  # fmt: skip
    ready(qkv)
    if not fits_step(qkv, z, a, b, conv, state):
        return layer_step_by(LAYER_STEPS, qkv, z, a, b, conv, state, taps, a_log, dt_bias, norm, starts, unit_eps, eps)
    out = torch.empty_like(z)
    if out.numel():
        step_hopper(qkv, z, a, b, conv, state, taps, a_log, dt_bias, norm, unit_eps, eps, out)
    return out


def _tiles_type(columns: int) -> str:
    return f"tensordesc<bf16[64,{columns}],{tile_layout(columns)!r}>".replace(" ", "")


STEP = "*bf16 *bf16 *bf16 *bf16 *bf16 *fp32 *fp32 *fp32 *fp32 *fp32 *bf16 fp32 fp32 fp32"
WIDE, NARROW = _tiles_type(128), _tiles_type(64)
CHUNKS = {"K": 128, "V": 128, "C": 64, "BK": 128, "DOT": tl.bfloat16}
KERNELS = [
    Build(_step_kernel, "*fp32 *bf16 *bf16 *bf16 *fp32 *fp32 *bf16 i32:16 i32 i32:16 i32:16", {"BK": 128, "BV": 16}, hot=True),
    Build(_step_kernel, "*fp32 *bf16 *bf16 *bf16 *fp32 *fp32 *bf16 i32:16 i32 i32:16 i32:16", {"BK": 128, "BV": 32}, hot=True),
    Build(
        chunk_kernel,
        "*bf16 *bf16 *bf16 *fp32 *fp32 *i32 *bf16 *bf16 *bf16 *fp32 i32 i32:16 i32:16 i32",
        {**CHUNKS, "LEVELS": 6, "BV": 128, "INVERSE": tl.float16},
        hot=True,
    ),
    Build(
        chunk_kernel,
        "*fp32 *fp32 *fp32 *fp32 *fp32 *i32 *fp32 *fp32 *fp32 *fp32 i32 i32:16 i32:16 i32",
        {**CHUNKS, "C": 32, "DOT": tl.float32, "LEVELS": 5, "BV": 128, "INVERSE": tl.float32},
    ),
    Build(
        scan_kernel,
        "*fp32 *bf16 *bf16 *bf16 *bf16 *bf16 *fp32 *bf16 *i32 i32:16 i32:16 i32",
        {**CHUNKS, "BV": 32},
        hot=True,
        options={"num_warps": 8, "num_stages": 2},
    ),
    Build(
        scan_kernel,
        "*fp32 *fp32 *fp32 *fp32 *fp32 *fp32 *fp32 *fp32 *i32 i32:16 i32:16 i32",
        {**CHUNKS, "C": 32, "DOT": tl.float32, "BV": 32},
        options={"num_warps": 8, "num_stages": 2},
    ),
    *(
        Build(
            chunk_tiles,
            f"{WIDE} {WIDE} {NARROW} {NARROW} *fp32 *fp32 *fp32 *i32 i32 i32:16 i32",
            {"HEADS": 32, "SHARED": 2, "SINGLE": single},
            hot=True,
            options={"maxnreg": CHUNK_REGISTERS},
        )
        for single in (True, False)
    ),
    *(
        Build(
            scan_tiles,
            f"{WIDE} {WIDE} {' '.join([NARROW] * 4)} *bf16 *fp32 *fp32 *i32 i32:16 i32",
            {"HEADS": 32, "SHARED": 2, "SINGLE": single, "ST": STAGES},
            hot=True,
            options={"maxnreg": SCAN_REGISTERS},
        )
        for single in (True, False)
    ),
    Build(layer_step, STEP, {"KEYS": 16, "G": 2, "NS": 4}, hot=True, options={"num_ctas": 8}),
    Build(layer_step, STEP, {"KEYS": 16, "G": 2, "NS": 1}, hot=True, options={"num_warps": 8, "num_ctas": 2}),
    Build(layer_step, STEP, {"KEYS": 16, "G": 4, "NS": 1}, hot=True, options={"num_warps": 8, "num_ctas": 4}),
    Build(layer_step, STEP, {"KEYS": 16, "G": 1, "NS": 1}, hot=True, options={"num_warps": 8}),
    Build(_serial_kernel, "*bf16 *bf16 *bf16 *i32 *bf16 i32 i32:16", {"BC": 256}, hot=True, options={"num_warps": 2}),
    Build(_tile_kernel, "*bf16 *bf16 *bf16 *i32 *bf16 i32 i32:16", {"sequences": 1, "STEPS": 0, "BT": 16, "BC": 128}, hot=True),
    Build(_keep_kernel, "*bf16 *bf16 *i32 i32 i32:16", {"BC": 256}, hot=True),
    Build(_gates_kernel, "*bf16 *bf16 *fp32 *fp32 *fp32 *fp32 i32:16 i32:16", {"BLOCK": 512}, hot=True),
]
