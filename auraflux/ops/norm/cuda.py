"""Norms on CUDA: a program per row, the row in registers, sums in float32."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops._dispatch import Declined
from auraflux.ops.gpu.blocks.elementwise import silu
from auraflux.ops.gpu.device import ready
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv, power_of_two

WIDEST = 1 << 15  # elements of a row that a program holds
SMALL = 256  # rows up to this width share a program
ELEMENTS = 1024  # of rows that share a program


@triton.jit
def _unit_rows(x, rows, width, scale, inside, ROWS: tl.constexpr, WIDTH: tl.constexpr, pid):
    """Return a program's rows over sqrt(scale * sum of squares + inside), their offsets and the mask."""
    row = pid * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    there = (row < rows)[:, None] & (column < width)[None, :]
    at = row[:, None].to(tl.int64) * width + column[None, :]
    wide = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(wide * wide, 1) * scale + inside)
    return wide * factor[:, None], at, there


@triton.jit(do_not_specialize_on_alignment=["rows"])
def _rms(x, weight, z, out, rows, width, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    unit, at, there = _unit_rows(x, rows, width, 1.0 / width, eps, ROWS, WIDTH, tl.program_id(0))
    column = tl.arange(0, WIDTH)
    unit *= tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    if z is not None:
        unit *= silu(tl.load(z + at, mask=there, other=0.0).to(tl.float32))
    tl.store(out + at, unit, mask=there)


@triton.jit
def _group(x, z, weight, out, groups, width, eps, WIDTH: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    there, at = column < width, row * width + column
    gate = tl.load(z + at, mask=there, other=0.0).to(tl.float32)
    gated = tl.load(x + at, mask=there, other=0.0).to(tl.float32) * silu(gate)
    unit = gated / tl.sqrt(tl.sum(gated * gated, 0) / width + eps)
    unit *= tl.load(weight + row % groups * width + column, mask=there, other=0.0).to(tl.float32)
    tl.store(out + at, unit, mask=there)


@triton.jit
def _layer(x, weight, bias, out, rows, width, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    there = (row < rows)[:, None] & (column < width)[None, :]
    at = row[:, None].to(tl.int64) * width + column[None, :]
    wide = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
    centred = tl.where(there, wide - (tl.sum(wide, 1) / width)[:, None], 0.0)
    factor = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / width + eps)
    scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    shift = tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, centred * factor[:, None] * scale + shift, mask=there)


@triton.jit
def _add_rms(x, residual, weight, out, total, width, eps, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)
    there = column < width
    at = tl.program_id(0).to(tl.int64) * width + column
    both = tl.load(x + at, mask=there, other=0.0).to(tl.float32) + tl.load(residual + at, mask=there, other=0.0).to(tl.float32)
    # the sum is rounded to the narrow type before it is normalised, as the next layer reads it
    narrow = both.to(total.dtype.element_ty)
    tl.store(total + at, narrow, mask=there)
    wide = narrow.to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / width + eps)
    tl.store(out + at, wide * factor * tl.load(weight + column, mask=there, other=0.0).to(tl.float32), mask=there)


@triton.jit(do_not_specialize_on_alignment=["q_rows", "k_rows", "q_programs"])
def _qk(q, k, q_out, k_out, q_rows, k_rows, width, inside, q_length, q_programs, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    pid = tl.program_id(0)
    if pid < q_programs:
        unit, at, there = _unit_rows(q, q_rows, width, 1.0, inside, ROWS, WIDTH, pid)
        tl.store(q_out + at, unit * q_length, mask=there)
    else:
        unit, at, there = _unit_rows(k, k_rows, width, 1.0, inside, ROWS, WIDTH, pid - q_programs)
        tl.store(k_out + at, unit, mask=there)


def _block(x: Tensor) -> tuple[int, int, int]:
    """Return rows per program, their padded width and the number of warps."""
    ready(x)
    wide = power_of_two(x.shape[-1])
    if wide > WIDEST:
        raise Declined(f"rows of {x.shape[-1]} are wider than {WIDEST}")
    rows = max(1, ELEMENTS // wide) if wide <= SMALL else 1
    return rows, wide, min(16, max(1, rows * wide // 256))


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[-1]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _rms_norm(x, weight, None, eps)


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _rms_norm(x, weight, z, eps)


def _rms_norm(x: Tensor, weight: Tensor, z: Tensor | None, eps: float) -> Tensor:
    block, wide, warps = _block(x)
    out, rows = torch.empty_like(x), _rows(x)
    if rows:
        launch(_rms, (cdiv(rows, block),))(x, weight, z, out, rows, x.shape[-1], eps, block, wide, num_warps=warps)
    return out


def group_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    _, wide, warps = _block(x)
    out, rows = torch.empty_like(x), _rows(x)
    if rows:
        launch(_group, (rows,))(x, z, weight, out, x.shape[1], x.shape[2], eps, wide, num_warps=warps)
    return out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    block, wide, warps = _block(x)
    out, rows = torch.empty_like(x), _rows(x)
    if rows:
        launch(_layer, (cdiv(rows, block),))(x, weight, bias, out, rows, x.shape[-1], eps, block, wide, num_warps=warps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    _, wide, _ = _block(x)
    out, total, rows = torch.empty_like(x), torch.empty_like(x), _rows(x)
    if rows:
        launch(_add_rms, (rows,))(
            x, residual, weight, out, total, x.shape[-1], eps, wide, num_warps=min(16, max(1, wide // 256))
        )
    return out, total


def qk_norm(q: Tensor, k: Tensor, eps: float, mean: bool = False) -> tuple[Tensor, Tensor]:
    block, wide, warps = _block(q)
    q_out, k_out, width = torch.empty_like(q), torch.empty_like(k), q.shape[-1]
    q_programs, k_programs = cdiv(_rows(q), block), cdiv(_rows(k), block)
    if q_programs + k_programs:
        sizes = _rows(q), _rows(k), width, eps * width if mean else eps, width**-0.5, q_programs
        launch(_qk, (q_programs + k_programs,))(q, k, q_out, k_out, *sizes, block, wide, num_warps=warps)
    return q_out, k_out


@triton.jit
def _layer_rows(projected, embedded, weight, out, tokens, layers, width, eps, share, WIDTH: tl.constexpr):
    token, layer, column = tl.program_id(0), tl.program_id(1), tl.arange(0, WIDTH)
    there = column < width
    at = (token.to(tl.int64) * layers + layer) * width + column
    wide = tl.load(projected + at, mask=there, other=0.0).to(tl.float32)
    wide *= 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / width + eps)
    wide *= tl.load(weight + column, mask=there, other=0.0).to(tl.float32)
    wide += share * tl.load(embedded + at, mask=there, other=0.0).to(tl.float32)
    tl.store(out + (layer.to(tl.int64) * tokens + token) * width + column, wide, mask=there)


def per_layer_inputs(projected: Tensor, embedded: Tensor, weight: Tensor, eps: float, share: float) -> Tensor:
    ready(projected)
    (tokens, row), width = projected.shape, len(weight)
    if width > WIDEST:
        raise Declined(f"parts of {width} are wider than {WIDEST}")
    out = projected.new_empty(row // width, tokens, width)
    if out.numel():
        sizes = tokens, row // width, width, float(eps), float(share), power_of_two(width)
        launch(_layer_rows, (tokens, row // width))(projected, embedded, weight, out, *sizes, num_warps=1)
    return out
