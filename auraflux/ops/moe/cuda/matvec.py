"""A few tokens through their experts: programs over (token, slot) pairs, nothing counted or sorted.

A program of `up_few` makes some elements of one pair's hidden vector, one of `down_few` some elements of its result.
Activations lie with the first elements of all units first, then the second ones, so that threads
beside each other read what lies side by side.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.hopper.codes import HALF_SHIFT, code_value, unit_bits, weight_line
from auraflux.ops.hopper.device import INTERPRETED
from auraflux.ops.hopper.launch import launch
from auraflux.ops.hopper.sizes import cdiv, power_of_two
from auraflux.ops.moe.cuda.stacks import activate, activation_of, add_bias, form, gate_of, passed, unit
from auraflux.ops.moe.experts import Experts

# of a tile; a program of the interpreter takes milliseconds, so there they are few
UP_ROWS, UP_UNITS = 128 if INTERPRETED else 8, 128
DOWN_ROWS, DOWN_UNITS = 128 if INTERPRETED else 16, 32


@triton.jit
def _sums(
    x, stack, expert, row, there, K,
    BITS: tl.constexpr, GROUP: tl.constexpr, AFFINE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Products of rows of an expert with one vector, whose first elements of all units come first; float32 [ROWS]."""
    UNIT: tl.constexpr = 1 if BITS == 0 else 4 if BITS == 6 or BITS == 8 else 16 if BITS == 2 else 8
    line, packed = expert * stack.scale_step, stack.packed + expert * stack.step
    scales, biases = stack.scales + line, stack.biases + line
    row = row[:, None]
    units = K // UNIT
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, units, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        inside = there[:, None] & (column < units)
        if BITS == 0:
            value = tl.load(x + column, mask=column < units, other=0.0).to(tl.float32)
            total += value * tl.load(packed + row * K + column, mask=inside, other=0.0).to(tl.float32)
        else:
            low, high = unit_bits(packed + row * (K // 32 * BITS), column, inside, BITS)
            at = row * (K // GROUP) + column * UNIT // GROUP
            slope, intercept = weight_line(scales, biases, at, inside, BITS, AFFINE)
            part, sum_x = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([1, COLUMNS], tl.float32)
            for j in tl.static_range(UNIT):
                value = tl.load(x + (j * units + column), mask=column < units, other=0.0).to(tl.float32)
                sum_x += value
                part += code_value(low, high, j, BITS, AFFINE) * value
            if AFFINE:
                total += part * slope + intercept * sum_x
            else:
                total += part * HALF_SHIFT * slope
    return tl.sum(total, 1)


@triton.jit
def up_few(
    x, ids, gate, up, out, experts, k, inner, hidden, alpha, limit, KIND: tl.constexpr, UNIT: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, AFFINE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    expert = tl.load(ids + pair).to(tl.int64)
    there = (row < inner) & (expert >= 0) & (expert < experts)
    x += (pair // k).to(tl.int64) * hidden
    u = _sums(x, up, expert, row, there, hidden, BITS, GROUP, AFFINE, ROWS, COLUMNS)
    g = u
    if KIND != "relu2":
        g = _sums(x, gate, expert, row, there, hidden, BITS, GROUP, AFFINE, ROWS, COLUMNS)
    g = add_bias(g, gate.bias, expert * inner + row, there)
    u = add_bias(u, up.bias, expert * inner + row, there)
    # in the order of down's units
    at = pair.to(tl.int64) * inner + row % UNIT * (inner // UNIT) + row // UNIT
    tl.store(out + at, activate(g, u, alpha, limit, KIND), mask=row < inner)


@triton.jit
def down_few(
    x, ids, down, out, experts, inner, hidden,
    BITS: tl.constexpr, GROUP: tl.constexpr, AFFINE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1).to(tl.int64)
    expert = tl.load(ids + pair).to(tl.int64)
    there = (row < hidden) & (expert >= 0) & (expert < experts)
    total = _sums(x + pair * inner, down, expert, row, there, inner, BITS, GROUP, AFFINE, ROWS, COLUMNS)
    total = add_bias(total, down.bias, expert * hidden + row, there)
    tl.store(out + pair * hidden + row, total, mask=there)


def write_parts(x: Tensor, ids: Tensor, experts: Experts, parts: Tensor) -> None:
    tokens, k = ids.shape
    inner, hidden = experts.inner, experts.hidden
    between = torch.empty(tokens * k, inner, dtype=torch.float32, device=x.device)
    gate = gate_of(experts)
    ordered = x.view(tokens, -1, unit(gate)).transpose(1, 2).contiguous()
    launch(up_few, (cdiv(inner, UP_ROWS), tokens * k))(
        ordered, ids, passed(gate, experts.gate_bias), passed(experts.up, experts.up_bias), between,
        experts.count, k, inner, hidden, *activation_of(experts), unit(experts.down),
        **form(gate), ROWS=UP_ROWS, COLUMNS=min(UP_UNITS, power_of_two(hidden // unit(gate))),
    )  # fmt: skip
    launch(down_few, (cdiv(hidden, DOWN_ROWS), tokens * k))(
        between, ids, passed(experts.down, experts.down_bias), parts, experts.count, inner, hidden,
        **form(experts.down), ROWS=DOWN_ROWS, COLUMNS=min(DOWN_UNITS, power_of_two(inner // unit(experts.down))),
    )  # fmt: skip
