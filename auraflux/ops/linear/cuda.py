"""Products with weights on CUDA, by the number of tokens.

One is bound by reading codes (`_one.py`). For several, the weight is written out in the activations' dtype, and cuBLAS does the
rest. The commonest format has kernels of its own on Hopper (`_hopper.py`), which read codes also for several tokens; up to a
thousand, codes of 4 and 8 bits become operands of the matrix units there (`_by_tiles.py`). Other formats and widths have
kernels for one token (`_hopper_one.py`) and up to 16 (`_hopper_some.py`). Dense weights go to cuBLAS at once.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops._dispatch import Declined
from auraflux.ops._triton import Build, cdiv, power_of_two, ready
from auraflux.ops.activation.cuda import swiglu
from auraflux.ops.linear._builds import STREAM_BUILDS
from auraflux.ops.linear._by_tiles import FEW, MOST_TOGETHER, TILE_BUILDS, fits_tiles, multiply_hopper_tiles
from auraflux.ops.linear._codes import check_order, constants, operands, weights_at
from auraflux.ops.linear._hopper import fits_hopper, matmul16, multiply_hopper
from auraflux.ops.linear._hopper_one import ONE_BUILDS, fits_codes_one, multiply_codes_one
from auraflux.ops.linear._hopper_some import SOME_BUILDS, fits_some, multiply_some
from auraflux.ops.linear._hopper_stream import MOST_WEIGHTS, multiply_stream
from auraflux.ops.linear._normed import NORMED_BUILDS, WIDEST, multiply_normed
from auraflux.ops.linear._one import (
    multiply_one,
    multiply_one_gated,
    multiply_one_three,
    one_token,
    one_token_gated,
    one_token_three,
    order_x,
)
from auraflux.ops.linear._written import WRITTEN_BUILDS, fits_written, written
from auraflux.ops.linear.reference import Weight
from auraflux.ops.norm.cuda import add_rms_norm, rms_norm
from auraflux.quant import QTensor

BLOCK = 1024  # elements a program dequantizes
DENSE_COLUMNS = 2048
DENSE_BATCH = 4096  # rows of dense weights; for more, cuBLAS is as good at one token


@triton.jit
def _dequantize(
    packed, scales, biases, ids, out, rows, K,
    BITS: tl.constexpr, GROUP: tl.constexpr, AFFINE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write out rows of a weight: those of `ids`, or all. An id out of range gives NaN."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source, good = row, True
    if ids is not None:
        source = tl.load(ids + row).to(tl.int64)
        good = (source >= 0) & (source < rows)
    there = k < K
    weight = weights_at(packed, scales, biases, source, k, there & good, K, BITS, GROUP, AFFINE)
    tl.store(out + row * K + k, tl.where(good, weight, float("nan")), mask=there)


@triton.jit
def _take(table, ids, out, rows, K, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(ids + row).to(tl.int64)
    good = (source >= 0) & (source < rows)
    tl.store(out + row * K + k, tl.load(table + source * K + k, mask=(k < K) & good, other=float("nan")), mask=k < K)


@triton.jit
def _dense_one(x, weight, weight1, out, out1, rows, K, COLUMNS: tl.constexpr):
    """One token times one row of a dense weight, or of a second one after the first; of any dtype, widened as it is read."""
    row = tl.program_id(0)
    if weight1 is not None:  # noqa: SIM102 - the first is decided when the kernel is compiled
        if row >= rows:
            weight, out, row = weight1, out1, row - rows
    weight += row.to(tl.int64) * K
    total = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, K, COLUMNS):
        k = start + tl.arange(0, COLUMNS)
        value = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
        total += tl.load(weight + k, mask=k < K, other=0.0).to(tl.float32) * value
    tl.store(out + row, tl.sum(total, 0))


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    return linears(x, [weight], [bias])[0]


def linears(x: Tensor, weights: Sequence[Weight], biases: Sequence[Tensor | None] | None = None) -> tuple[Tensor, ...]:
    _check(x, weights)
    flat = x.view(-1, x.shape[-1])
    added = list(biases or [None] * len(weights))
    alike, plain = _one_format(weights), _small_and_dense(weights)
    if len(flat) == 1 and 1 < len(alike) <= MOST_WEIGHTS and not any(b is not None for b in added) and _fit(flat, alike):
        outs = [x.new_empty(1, weight.shape[0]) for weight in weights]
        multiply_stream(flat, alike, outs)
    elif _by_codes(flat, alike, added):
        outs = [x.new_empty(1, weight.shape[0]) for weight in weights]
        multiply_codes_one(flat, alike, outs, added)
    elif len(flat) == 1 and len(alike) == 3 and not fits_hopper(flat, alike[0]):
        outs = [x.new_empty(1, weight.shape[0]) for weight in weights]
        multiply_one_three(flat, alike, added, outs)
    elif len(flat) == 1 and len(plain) == 2 and not any(b is not None for b in added):
        outs = _dense_products(flat, plain[0], plain[1])
    elif _by_tiles(flat, alike):
        outs = _tiled(flat, alike, added)
    else:
        outs = [_product(flat, weight, bias) for weight, bias in zip(weights, added, strict=True)]
    return tuple(out.view(*x.shape[:-1], out.shape[-1]) for out in outs)


def add_norm_linears(
    x: Tensor,
    delta: Tensor | None,
    norm: Tensor,
    eps: float,
    weights: Sequence[Weight],
    biases: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    _check(x, weights)
    flat, alike = x.view(-1, x.shape[-1]), _one_format(weights)
    added = any(bias is not None for bias in biases or ())
    if len(flat) == 1 and 0 < len(alike) <= MOST_WEIGHTS and not added and _fit(flat, alike) and norm.dtype is torch.float32:
        outs = [x.new_empty(*x.shape[:-1], weight.shape[0]) for weight in weights]
        total = x if delta is None else torch.empty_like(x)
        multiply_stream(flat, alike, outs, normed=(delta, norm, total, eps))
        return total, tuple(outs)
    h, total = _normed(x, delta, norm, eps)
    return total, linears(h, weights, biases)


def add_norm_scores(
    x: Tensor,
    delta: Tensor | None,
    norm: Tensor,
    eps: float,
    weights: Sequence[Weight],
    biases: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    _check(x, weights)
    plain, added = _small_and_dense(weights), any(bias is not None for bias in biases or ())
    width = x.shape[-1]
    if x.numel() == width <= WIDEST and len(plain) in (1, 2) and not added:
        h, total, outs = multiply_normed(x, delta, norm, eps, plain)
        return h, total, tuple(out.view(*x.shape[:-1], -1) for out in outs)
    h, total = _normed(x, delta, norm, eps)
    return h, total, linears(h, weights, biases)


def add_norm_gate_up(
    x: Tensor, delta: Tensor | None, norm: Tensor, eps: float, gate: Weight, up: Weight
) -> tuple[Tensor, Tensor]:
    _check(x, (gate, up))
    flat, alike = x.view(-1, x.shape[-1]), _one_format((gate, up))
    if len(flat) == 1 and alike and _fit(flat, alike) and norm.dtype is torch.float32:
        out = x.new_empty(*x.shape[:-1], gate.shape[0])
        total = x if delta is None else torch.empty_like(x)
        multiply_stream(flat, alike, [out], gated=True, normed=(delta, norm, total, eps))
        return total, out
    h, total = _normed(x, delta, norm, eps)
    return total, gate_up_swiglu(h, gate, up)


def _normed(x: Tensor, delta: Tensor | None, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of a stream to which delta is added, and their sum."""
    return (rms_norm(x, norm, eps), x) if delta is None else add_rms_norm(delta, x, norm, eps)


def gate_up_swiglu(x: Tensor, gate: Weight, up: Weight) -> Tensor:
    _check(x, (gate, up))
    flat = x.view(-1, x.shape[-1])
    tokens = len(flat)
    alike = _one_format((gate, up))
    if alike and tokens == 1:
        out = x.new_empty(tokens, gate.shape[0])
        if _fit(flat, alike):
            multiply_stream(flat, alike, [out], gated=True)
        elif _by_codes(flat, alike, ()):
            multiply_codes_one(flat, alike, [out], gated=True)
        else:
            multiply_one_gated(flat, alike[0], alike[1], out)
    elif _by_tiles(flat, alike):
        out = x.new_empty(tokens, gate.shape[0])
        multiply_hopper_tiles(flat, alike, [out], gated=True)
    else:
        out = swiglu(_product(flat, gate, None), _product(flat, up, None))
    return out.view(*x.shape[:-1], out.shape[-1])


def embed(ids: Tensor, table: Weight) -> Tensor:
    ready(ids)
    tokens, (rows, width) = len(ids), table.shape
    if isinstance(table, QTensor):
        check_order(table)
        return _dequantized(table, torch.float32, ids)
    out = table.new_empty(tokens, width)
    if out.numel():
        if not table.dtype.is_floating_point:
            raise Declined(f"a table of {table.dtype}")
        block = min(BLOCK, power_of_two(width))
        _take[(tokens, cdiv(width, block))](table, ids, out, rows, width, block)
    return out


def _check(x: Tensor, weights: Sequence[Weight]) -> None:
    ready(x)
    check_order(*(weight for weight in weights if isinstance(weight, QTensor)))


def _one_format(weights: Sequence[Weight]) -> list[QTensor]:
    """The weights where they are quantized alike, else none."""
    held = [weight for weight in weights if isinstance(weight, QTensor)]
    return held if len(held) == len(weights) and len({weight.format for weight in held}) == 1 else []


def _small_and_dense(weights: Sequence[Weight]) -> list[Tensor]:
    """The weights where they are dense, small and of one dtype, else none."""
    found = [weight for weight in weights if isinstance(weight, Tensor) and 0 < weight.shape[0] <= DENSE_BATCH]
    return found if len(found) == len(weights) and len({weight.dtype for weight in found}) == 1 else []


def _fit(x: Tensor, weights: Sequence[QTensor]) -> bool:
    return all(fits_hopper(x, weight) for weight in weights)


def _by_codes(x: Tensor, weights: Sequence[QTensor], added: Sequence[Tensor | None]) -> bool:
    """Whether one token goes to the kernel for every format: not where that for the commonest one serves."""
    bare = all(vector is None for vector in added)
    return fits_codes_one(x, weights, added) and not (bare and _fit(x, weights))


def _by_tiles(x: Tensor, weights: Sequence[QTensor]) -> bool:
    """Whether weights of one format are multiplied by tiles of tokens: not where the kernel for few tokens serves."""
    return bool(weights) and fits_tiles(x, weights) and not (len(x) <= FEW and _fit(x, weights))


def _tiled(x: Tensor, weights: Sequence[QTensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    outs = [x.new_empty(len(x), weight.shape[0]) for weight in weights]
    for first in range(0, len(outs), MOST_TOGETHER):
        some = slice(first, first + MOST_TOGETHER)
        multiply_hopper_tiles(x, weights[some], outs[some])
    return [out if bias is None else (out + bias).to(x.dtype) for out, bias in zip(outs, biases, strict=True)]


def _product(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """x [T, K] times a weight, [T, N] in x's dtype."""
    tokens, rows = x.shape[0], weight.shape[0]
    if not tokens or not rows or not x.shape[1]:
        return x.new_zeros(tokens, rows) + (0 if bias is None else bias.to(x.dtype))
    if isinstance(weight, QTensor):
        out = x.new_empty(tokens, rows)
        if bias is None and fits_hopper(x, weight):
            multiply_hopper(x, weight, out)
            return out
        if _by_codes(x, [weight], [bias]):
            multiply_codes_one(x, [weight], [out], [bias])
            return out
        if fits_some(x, weight):
            multiply_some(x, weight, out)
            return out if bias is None else (out + bias).to(x.dtype)
        if tokens == 1:
            multiply_one(x, weight, bias, out)
            return out
        weight = written(weight) if fits_written(weight, x.dtype) else _dequantized(weight, x.dtype)
    out = _dense(x, weight)
    return (out if bias is None else out + bias).to(x.dtype)


def _dense(x: Tensor, weight: Tensor) -> Tensor:
    if x.shape[0] == 1 and (x.dtype != weight.dtype or weight.shape[0] <= DENSE_BATCH):
        return _dense_products(x, weight)[0]
    return x @ weight.T if x.dtype == weight.dtype else x.float() @ weight.float().T


def _dense_products(x: Tensor, weight: Tensor, second: Tensor | None = None) -> list[Tensor]:
    """One token times one or two dense weights, in x's dtype."""
    (rows, width), more = weight.shape, 0 if second is None else second.shape[0]
    outs = [x.new_empty(1, count) for count in (rows, more)]
    block = min(DENSE_COLUMNS, power_of_two(width))
    out1 = None if second is None else outs[1]
    _dense_one[(rows + more,)](x, weight, second, outs[0], out1, rows, width, block, num_warps=4)
    return outs[: 1 if second is None else 2]


def _dequantized(weight: QTensor, dtype: torch.dtype, ids: Tensor | None = None) -> Tensor:
    rows, width = weight.shape
    count = rows if ids is None else len(ids)
    out = torch.empty(count, width, dtype=dtype, device=weight.device)
    if out.numel():
        block = min(BLOCK, power_of_two(width))
        grid = (count, cdiv(width, block))
        _dequantize[grid](*operands(weight), ids, out, rows, width, **constants(weight), BLOCK=block)
    return out


def _builds() -> list[Build]:
    four = {"BITS": 4, "GROUP": 64, "AFFINE": True}
    one = {"EVEN": True, "COLUMNS": 128, "ROWS": 4}
    codes, mx = "*i32 *bf16 *bf16", "*i32 *u8 *u8"
    each = f"{codes} *bf16 i32"
    none, warp = {"bias": None}, {"num_warps": 1}
    return [
        Build(order_x, "*bf16 *fp32 i32:16", {"UNIT": 8, "BLOCK": 64}, hot=True, options={"num_warps": 2}),
        Build(one_token, f"*fp32 {codes} *bf16 i32 i32:16", {**none, **four, **one}, hot=True, options=warp),
        Build(one_token, f"*fp32 {codes} *bf16 i32 i32:16", {**none, **four, "BITS": 5, **one, "COLUMNS": 64}, hot=True),
        Build(
            one_token,
            f"*fp32 {mx} *bf16 *bf16 i32 i32:16",
            {"BITS": 4, "GROUP": 32, "AFFINE": False, **one},
            hot=True,
            options=warp,
        ),
        Build(one_token_gated, f"*fp32 {codes} {codes} *bf16 i32 i32:16", {**four, **one}, hot=True, options=warp),
        Build(
            one_token_three,
            f"*fp32 {each} {each} {each} i32:16",
            {"bias0": None, "bias1": None, "bias2": None, **four, **one},
            hot=True,
            options=warp,
        ),
        *STREAM_BUILDS,
        Build(
            matmul16,
            "*bf16 *i8 *i64 *i64 *bf16 i32 i32:16",
            {"K": 8192, "R": 4, "TILES": 2, "W": 8, "D": 1},
            hot=True,
            options={"num_warps": 8},
        ),
        Build(_dequantize, f"{codes} *bf16 i32:16 i32:16", {"ids": None, **four, "BLOCK": BLOCK}, hot=True),
        Build(_take, "*bf16 *i64 *bf16 i32 i32:16", {"BLOCK": BLOCK}),
        Build(
            _dense_one,
            "*bf16 *bf16 *bf16 i32 i32:16",
            {"weight1": None, "out1": None, "COLUMNS": DENSE_COLUMNS},
            hot=True,
            options={"num_warps": 4},
        ),
        Build(_dense_one, "*bf16 *bf16 *bf16 *bf16 *bf16 i32 i32:16", {"COLUMNS": DENSE_COLUMNS}, hot=True),
    ]


KERNELS = [*_builds(), *NORMED_BUILDS, *TILE_BUILDS, *WRITTEN_BUILDS, *ONE_BUILDS, *SOME_BUILDS]
