"""Grouped expert GEMM for many tokens: (token, slot) pairs are grouped by expert on the device, then run on tensor cores.

`count_pairs` counts each expert's pairs. `plan_blocks` gives every expert full blocks of them, and every block its expert;
there are at most pairs / block + experts blocks, so the host knows a bound and nothing else. `place_pairs` puts the pairs into
their blocks, in any order: pair results are independent, and the sum over a token's slots is in slot order.
"""

from typing import NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.gpu.blocks.tiles import columns_of, tokens_tile, weights_tile
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv, power_of_two
from auraflux.ops.moe.cuda.stacks import activate, activation_of, add_bias, biased_stack_args, form, gate_of, of_expert, rows_of
from auraflux.ops.moe.experts import Experts, Stack

COUNTED = 1024  # pairs a program counts or places
PLANNED = 32  # blocks a program plans
BLOCKS = (16, 32, 64, 128)  # pairs of one expert in a tile
USUAL = 128  # experts assumed in the block size, so that it depends on the number of pairs alone
UP_TILE, DOWN_TILE = (64, 4), (64, 4)  # rows and warps
STAGES = 3


class GroupedShape(NamedTuple):
    """Compile-time format and tile of the GEMMs.

    activation            see `activate`; none in `down_many`
    bits, group, form     of the weights
    rows, tokens, columns of a tile
    """

    activation: str
    bits: int
    group: int
    form: str
    rows: int
    tokens: int
    columns: int


@triton.jit(do_not_specialize_on_alignment=["pairs"])
def count_pairs(ids, counts, pairs, experts, BLOCK: tl.constexpr):
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + pair, mask=pair < pairs, other=-1)
    tl.atomic_add(counts + expert, 1, mask=(expert >= 0) & (expert < experts), sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=["blocks"])
def plan_blocks(counts, cursor, owner, blocks, experts, SIZE: tl.constexpr, BE: tl.constexpr, BLOCK: tl.constexpr):
    expert, block = tl.arange(0, BE), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    needed = tl.cdiv(tl.load(counts + expert, mask=expert < experts, other=0), SIZE)
    end = tl.cumsum(needed, 0)
    # the number of experts that end at or before a block is its expert's index
    mine = tl.sum(((end[None, :] <= block[:, None]) & (expert < experts)[None, :]).to(tl.int32), 1)
    tl.store(owner + block, mine, mask=block < blocks)
    if tl.program_id(0) == 0:
        tl.store(cursor + expert, (end - needed) * SIZE, mask=expert < experts)


@triton.jit(do_not_specialize_on_alignment=["pairs"])
def place_pairs(ids, cursor, placed, pairs, experts, BLOCK: tl.constexpr):
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + pair, mask=pair < pairs, other=-1)
    good = (expert >= 0) & (expert < experts)
    at = tl.atomic_add(cursor + expert, 1, mask=good, sem="relaxed")
    tl.store(placed + at, pair, mask=good)


@triton.jit(do_not_specialize_on_alignment=["tokens"])
def up_many(
    x, blocks, gate, up, out, experts, tokens, k, inner, hidden, activation, SHAPE: tl.constexpr
):  # fmt: skip
    KIND: tl.constexpr = SHAPE.activation
    BITS: tl.constexpr = SHAPE.bits
    GROUP: tl.constexpr = SHAPE.group
    FORM: tl.constexpr = SHAPE.form
    ROWS: tl.constexpr = SHAPE.rows
    TOKENS: tl.constexpr = SHAPE.tokens
    BK: tl.constexpr = SHAPE.columns
    placed, owner = blocks
    alpha, limit = activation
    expert = tl.load(owner + tl.program_id(1)).to(tl.int64)
    if expert >= experts:
        return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pair = tl.load(placed + tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    token = pair // k
    first, second = of_expert(gate, expert, FORM), of_expert(up, expert, FORM)
    PRECISION: tl.constexpr = "tf32x3" if x.dtype.element_ty == tl.float32 else "tf32"
    g, u = tl.zeros([ROWS, TOKENS], tl.float32), tl.zeros([ROWS, TOKENS], tl.float32)
    for start in range(0, hidden, BK):
        value = tokens_tile(x, token, tokens, start, hidden, BK)
        if KIND != "relu2":
            w = weights_tile(first, row, inner, start, hidden, BITS, GROUP, FORM, BK)
            g = tl.dot(w.to(value.dtype), value, g, input_precision=PRECISION)
        w = weights_tile(second, row, inner, start, hidden, BITS, GROUP, FORM, BK)
        u = tl.dot(w.to(value.dtype), value, u, input_precision=PRECISION)
    g = add_bias(g, gate.bias, (expert * gate.bias_step + row)[:, None], (row < inner)[:, None])
    u = add_bias(u, up.bias, (expert * up.bias_step + row)[:, None], (row < inner)[:, None])
    there = (row < inner)[:, None] & (pair < tokens * k)[None, :]
    result = activate(g, u, alpha, limit, KIND)
    tl.store(out + pair[None, :] * inner + row[:, None], result.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize_on_alignment=["pairs"])
def down_many(
    x, blocks, down, out, experts, pairs, inner, hidden, SHAPE: tl.constexpr
):  # fmt: skip
    BITS: tl.constexpr = SHAPE.bits
    GROUP: tl.constexpr = SHAPE.group
    FORM: tl.constexpr = SHAPE.form
    ROWS: tl.constexpr = SHAPE.rows
    TOKENS: tl.constexpr = SHAPE.tokens
    BK: tl.constexpr = SHAPE.columns
    placed, owner = blocks
    expert = tl.load(owner + tl.program_id(1)).to(tl.int64)
    if expert >= experts:
        return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pair = tl.load(placed + tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    codes = of_expert(down, expert, FORM)
    PRECISION: tl.constexpr = "tf32x3" if x.dtype.element_ty == tl.float32 else "tf32"
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in range(0, inner, BK):
        value = tokens_tile(x, pair, pairs, start, inner, BK)
        w = weights_tile(codes, row, hidden, start, inner, BITS, GROUP, FORM, BK)
        total = tl.dot(w.to(value.dtype), value, total, input_precision=PRECISION)
    total = add_bias(total, down.bias, (expert * down.bias_step + row)[:, None], (row < hidden)[:, None])
    there = (row < hidden)[:, None] & (pair < pairs)[None, :]
    # rounded to x's dtype whatever the dtype of the results
    total = total.to(x.dtype.element_ty).to(out.dtype.element_ty)
    tl.store(out + pair[None, :] * hidden + row[:, None], total, mask=there)


def grouped(ids: Tensor, experts: int, size: int) -> tuple[Tensor, Tensor]:
    """Return pairs by blocks of one expert, and each block's expert; unused blocks have the id `experts`."""
    pairs = ids.numel()
    blocks = min(pairs, pairs // size + experts)
    counts = torch.zeros(experts, dtype=torch.int32, device=ids.device)
    cursor, owner = torch.empty_like(counts), counts.new_empty(blocks)
    placed = counts.new_full((blocks * size,), pairs)
    programs = (cdiv(pairs, COUNTED),)
    launch(count_pairs, programs)(ids, counts, pairs, experts, COUNTED)
    launch(plan_blocks, (cdiv(blocks, PLANNED),))(counts, cursor, owner, blocks, experts, size, power_of_two(experts), PLANNED)
    launch(place_pairs, programs)(ids, cursor, placed, pairs, experts, COUNTED)
    return placed, owner


def _shape(activation: str, stack: Stack, rows: int, tokens: int) -> GroupedShape:
    bits, group, layout = cast("tuple[int, int, str]", tuple(form(stack).values()))
    return GroupedShape(activation, bits, group, layout, rows, tokens, columns_of(stack))


def write_parts(x: Tensor, ids: Tensor, experts: Experts, parts: Tensor) -> None:
    tokens, k = ids.shape
    inner, hidden, pairs = experts.inner, experts.hidden, tokens * k
    size = next((block for block in BLOCKS if block * USUAL >= pairs), BLOCKS[-1])
    placed, owner = grouped(ids, experts.count, size)
    owner = rows_of(owner, experts, out=owner)
    between = x.new_empty(pairs, inner)
    rows, warps = UP_TILE
    alpha, limit, kind = activation_of(experts)
    gate, down = gate_of(experts), experts.down
    launch(up_many, (cdiv(inner, rows), len(owner)))(
        x, (placed, owner), biased_stack_args(gate, experts.gate_bias), biased_stack_args(experts.up, experts.up_bias), between,
        experts.rows, tokens, k, inner, hidden, (alpha, limit),
        _shape(kind, gate, rows, size), num_warps=warps, num_stages=STAGES,
    )  # fmt: skip
    rows, warps = DOWN_TILE
    launch(down_many, (cdiv(hidden, rows), len(owner)))(
        between, (placed, owner), biased_stack_args(down, experts.down_bias), parts, experts.rows, pairs, inner, hidden,
        _shape("", down, rows, size), num_warps=warps, num_stages=STAGES,
    )  # fmt: skip
