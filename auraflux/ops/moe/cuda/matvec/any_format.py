"""Matvec of few tokens with their experts, any weight format: one program per (token, slot) pair and rows, no grouping.

A program of `up_few` computes some elements of one pair's hidden vector, one of `down_few` some elements of its result.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.gpu.blocks.codes import weights_at
from auraflux.ops.gpu.blocks.dot_codes import program_shape, row_sums
from auraflux.ops.gpu.device import INTERPRETED
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv, power_of_two
from auraflux.ops.moe.cuda.stacks import activate, activation_of, add_bias, biased_stack_args, form, gate_of, of_expert, rows_of
from auraflux.ops.moe.experts import Experts, Stack
from auraflux.quant import QTensor

# a program takes milliseconds in the interpreter, so there all weights are read in tiles of many rows
TILED = tl.constexpr(INTERPRETED)
TILE_ROWS, TILE_COLUMNS = 128 if INTERPRETED else 8, 128


@triton.jit
def _sums(
    x, codes, row, rows, K, BITS: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr, EVEN: tl.constexpr,
    UNITS: tl.constexpr, ROWS: tl.constexpr, HOPPER: tl.constexpr,
):  # fmt: skip
    """Return weight rows times one vector, float32 [ROWS]; a dense weight (`BITS` 0) is read UNITS columns at a time."""
    if BITS != 0 and not TILED:
        sums = row_sums(x, codes, row, rows, K, BITS, GROUP, FORM, EVEN, UNITS, ROWS, HOPPER, False)
    else:
        line = tl.minimum(row + tl.arange(0, ROWS), rows - 1).to(tl.int64)[:, None]
        total = tl.zeros([ROWS, UNITS], tl.float32)
        for start in range(0, K, UNITS):
            k = start + tl.arange(0, UNITS)[None, :]
            value = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
            if BITS == 0:
                weight = tl.load(codes.packed + line * K + k, mask=k < K, other=0.0).to(tl.float32)
            else:
                weight = weights_at(codes.packed, codes.scales, codes.biases, line, k, k < K, K, BITS, GROUP, FORM)
            total += value * weight
        sums = tl.sum(total, 1)
    return sums


@triton.jit
def up_few(
    x, ids, gate, up, out, experts, k, inner, hidden, alpha, limit, KIND: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr, EVEN: tl.constexpr, UNITS: tl.constexpr, ROWS: tl.constexpr,
    HOPPER: tl.constexpr,
):  # fmt: skip
    first, pair = tl.program_id(0) * ROWS, tl.program_id(1)
    row, expert = first + tl.arange(0, ROWS), tl.load(ids + pair).to(tl.int64)
    there = (row < inner) & (expert >= 0) & (expert < experts)
    # results of experts that do not exist are not stored
    expert = tl.maximum(tl.minimum(expert, experts - 1), 0)
    x += (pair // k).to(tl.int64) * hidden
    u = _sums(x, of_expert(up, expert, FORM), first, inner, hidden, BITS, GROUP, FORM, EVEN, UNITS, ROWS, HOPPER)
    g = u
    if KIND != "relu2":
        g = _sums(x, of_expert(gate, expert, FORM), first, inner, hidden, BITS, GROUP, FORM, EVEN, UNITS, ROWS, HOPPER)
    g = add_bias(g, gate.bias, expert * gate.bias_step + row, there)
    u = add_bias(u, up.bias, expert * up.bias_step + row, there)
    tl.store(out + pair.to(tl.int64) * inner + row, activate(g, u, alpha, limit, KIND), mask=row < inner)


@triton.jit
def down_few(
    x, ids, down, out, experts, inner, hidden,
    BITS: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr, EVEN: tl.constexpr, UNITS: tl.constexpr, ROWS: tl.constexpr,
    HOPPER: tl.constexpr,
):  # fmt: skip
    first, pair = tl.program_id(0) * ROWS, tl.program_id(1).to(tl.int64)
    row, expert = first + tl.arange(0, ROWS), tl.load(ids + pair).to(tl.int64)
    there = (row < hidden) & (expert >= 0) & (expert < experts)
    expert = tl.maximum(tl.minimum(expert, experts - 1), 0)
    x += pair * inner
    total = _sums(x, of_expert(down, expert, FORM), first, hidden, inner, BITS, GROUP, FORM, EVEN, UNITS, ROWS, HOPPER)
    total = add_bias(total, down.bias, expert * down.bias_step + row, there)
    tl.store(out + pair * hidden + row, total, mask=there)


def _shape(stack: Stack, rows: int) -> dict[str, int | bool]:
    """Return the program shape for `row_sums`."""
    if isinstance(stack, QTensor) and not INTERPRETED:
        return program_shape(rows, stack, stack.device)
    columns = min(TILE_COLUMNS, power_of_two(stack.shape[-1]))
    return {"EVEN": False, "UNITS": columns, "ROWS": TILE_ROWS, "HOPPER": False, "num_warps": 4}


def write_parts(x: Tensor, ids: Tensor, experts: Experts, parts: Tensor) -> None:
    tokens, k = ids.shape
    inner, hidden, pairs, ids = experts.inner, experts.hidden, tokens * k, rows_of(ids, experts)
    between, gate = torch.empty(pairs, inner, dtype=torch.float32, device=x.device), gate_of(experts)
    shape = _shape(gate, pairs * inner)
    launch(up_few, (cdiv(inner, shape["ROWS"]), pairs))(
        x, ids, biased_stack_args(gate, experts.gate_bias), biased_stack_args(experts.up, experts.up_bias), between,
        experts.rows, k, inner, hidden, *activation_of(experts), **form(gate), **shape,
    )  # fmt: skip
    shape = _shape(experts.down, pairs * hidden)
    launch(down_few, (cdiv(hidden, shape["ROWS"]), pairs))(
        between, ids, biased_stack_args(experts.down, experts.down_bias), parts, experts.rows, inner, hidden,
        **form(experts.down), **shape,
    )  # fmt: skip
