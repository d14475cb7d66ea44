"""Adapters of up to 64 tokens on CUDA: both products, for all weights of one input, in one launch.

Some programs (shrink) multiply parts of tokens by parts of `a`, and count on when they are done. The others (expand) load
columns of `b`, wait until all have counted, sum the parts and multiply. All programs of a launch fit on an empty GPU together:
none keeps out one that it waits for. What else runs does not depend on them, because the next kernel may only begin when all of
them have begun. The last that waits sets the counter to 0 for the next launch.

With programmatic dependent launch all this runs together with the kernel of the linear layers, whose products are read last,
after `gdc_wait`. The tokens are older: that kernel lets this one begin after its own wait for them. They are read from L2,
because L1 may hold what was at their addresses before.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from auraflux.ops.gpu.blocks.dependent_launch import gdc_launch_dependents, gdc_wait
from auraflux.ops.gpu.blocks.elementwise import silu
from auraflux.ops.gpu.device import launches_early, multiprocessors
from auraflux.ops.gpu.launch import launch

MOST_TOKENS = 64
HIGHEST_RANK = 256
PART = tl.constexpr(512)  # inputs of a shrink program
RANKS = tl.constexpr(16)  # rows of `a` of a shrink program
TILE = tl.constexpr(4096)  # numbers of `b` of an expand program
WARPS = 4
REGISTERS = 96  # of a thread, at most
TOGETHER = 5  # programs of so many threads and registers that a multiprocessor runs at once


class Product(NamedTuple):
    """One weight of a launch.

    a  [S, R, K]
    b  [S, R, N]
    y  [T, N]
    """

    a: Tensor
    b: Tensor
    y: Tensor


class Norm(NamedTuple):
    """A norm over x + delta that is applied first; all None without one."""

    delta: Tensor | None
    weight: Tensor | None
    eps: float | None


class Scratch(NamedTuple):
    """Memory between the programs of a launch.

    sums     float32, of every token, weight and part of K the products with `a`
    squares  float32, of every token and part of K the sum of squares
    arrived  [1]  int32, the programs that have done their shrinking or waited for it; 0 between launches
    """

    sums: Tensor
    squares: Tensor
    arrived: Tensor


class Shape(NamedTuple):
    """Sizes of a launch, as one constant.

    width    K
    heights  N of each weight
    ranks    R of each weight
    gated    two weights, gate and up, whose columns one program expands
    overlap  x, delta and slots were complete when the previous kernel began
    early    this kernel begins before the previous one has ended
    """

    width: int
    heights: tuple[int, ...]
    ranks: tuple[int, ...]
    gated: bool
    overlap: bool
    early: bool


@triton.constexpr_function
def rounded_up(n):
    """Return the least power of two that is not below n, at least 1."""
    return 1 << max(0, n - 1).bit_length()


# Triton passes tuples to the functions below without the names of their members
WIDTH, HEIGHTS, ALL_RANKS, GATED = range(4)


@triton.constexpr_function
def parts_of(shape):
    """Return the parts of K."""
    return (shape[WIDTH] + PART.value - 1) // PART.value


@triton.constexpr_function
def sums_before(shape, count):
    """Return the sums of the first `count` weights for a token."""
    return parts_of(shape) * sum(shape[ALL_RANKS][:count])


@triton.constexpr_function
def shrinks(shape, count):
    """Return the units of shrinking of the first `count` weights for a token."""
    return parts_of(shape) * sum((rank + RANKS.value - 1) // RANKS.value for rank in shape[ALL_RANKS][:count])


@triton.constexpr_function
def columns(shape):
    """Return the columns of an expand program."""
    return max(32, min(256, TILE.value // rounded_up(max(shape[ALL_RANKS]))))


@triton.constexpr_function
def expands(shape, count):
    """Return the units of expanding of the first `count` weights for a token; gate and up have them together."""
    heights = shape[HEIGHTS][: min(count, 1) if shape[GATED] else count]
    return sum((height + columns(shape) - 1) // columns(shape) for height in heights)


@triton.jit
def _shrink(x, normed, a, scratch, token, slot, unit, SHAPE: tl.constexpr, NUMBER: tl.constexpr):
    """Multiply a part of a token by the same part of up to RANKS rows of `a` of a weight."""
    K: tl.constexpr = SHAPE.width
    R: tl.constexpr = SHAPE.ranks[NUMBER]
    PARTS: tl.constexpr = parts_of(SHAPE)
    ROWS: tl.constexpr = min(RANKS, rounded_up(R))
    part, block = unit % PARTS, unit // PARTS
    k, r, line = part * PART + tl.arange(0, PART), block * ROWS + tl.arange(0, ROWS), token * K
    there, mine = k < K, r < R
    at = (slot.to(tl.int64) * R + r)[:, None] * K + k[None, :]
    rows = tl.load(a + at, mask=mine[:, None] & there[None, :], other=0.0).to(tl.float32)
    wide = tl.load(x + line + k, mask=there, other=0.0, cache_modifier=".cg").to(tl.float32)
    if normed.weight is not None:
        if normed.delta is not None:
            # round as a stored sum would be
            wide += tl.load(normed.delta + line + k, mask=there, other=0.0, cache_modifier=".cg").to(tl.float32)
            wide = wide.to(x.dtype.element_ty).to(tl.float32)
        tl.store(scratch.squares + token * PARTS + part, tl.sum(wide * wide, 0))
        wide *= tl.load(normed.weight + k, mask=there, other=0.0).to(tl.float32)
    to = scratch.sums + token * sums_before(SHAPE, len(SHAPE.ranks)) + sums_before(SHAPE, NUMBER)
    tl.store(to + part * R + r, tl.sum(rows * wide[None, :], 1), mask=mine)


@triton.jit
def _await(arrived, shrinkers):
    """Wait for the programs that shrink; the last that waits sets the counter to 0."""
    while tl.load(arrived, volatile=True) < shrinkers:
        pass
    # no warp may still look when the last program has counted
    tl.debug_barrier()
    before = tl.atomic_add(arrived, 1, sem="acq_rel")
    if before == tl.num_programs(0) - 1:
        tl.store(arrived, 0)
    tl.debug_barrier()


@triton.jit
def _columns_of(b, slot, adapted, n, SHAPE: tl.constexpr, NUMBER: tl.constexpr):
    """Load columns n of an adapter's `b`; zeros without an adapter."""
    N: tl.constexpr = SHAPE.heights[NUMBER]
    R: tl.constexpr = SHAPE.ranks[NUMBER]
    r = tl.arange(0, rounded_up(R))
    at = (slot.to(tl.int64) * R + r)[:, None] * N + n[None, :]
    return tl.load(b + at, mask=adapted & (r < R)[:, None] & (n < N)[None, :], other=0.0)


@triton.jit
def _product(normed, scratch, token, adapted, some, SHAPE: tl.constexpr, NUMBER: tl.constexpr):
    """Return a token's products with some columns of `b`."""
    R: tl.constexpr = SHAPE.ranks[NUMBER]
    PARTS: tl.constexpr = parts_of(SHAPE)
    p, r = tl.arange(0, rounded_up(PARTS)), tl.arange(0, rounded_up(R))
    at = scratch.sums + token * sums_before(SHAPE, len(SHAPE.ranks)) + sums_before(SHAPE, NUMBER)
    there = adapted & (p < PARTS)[:, None] & (r < R)[None, :]
    inner = tl.sum(tl.load(at + p[:, None] * R + r[None, :], mask=there, other=0.0, cache_modifier=".cg"), 0)
    if normed.weight is not None:
        squares = tl.load(scratch.squares + token * PARTS + p, mask=adapted & (p < PARTS), other=0.0, cache_modifier=".cg")
        inner *= 1.0 / tl.sqrt(tl.sum(squares, 0) / SHAPE.width + normed.eps)
    return tl.sum(some.to(tl.float32) * inner[:, None], 0)


@triton.jit
def _added(y, token, found, n, SHAPE: tl.constexpr, NUMBER: tl.constexpr):
    """Add what is found for columns n of a token of y, and return the sums in float32."""
    N: tl.constexpr = SHAPE.heights[NUMBER]
    at = y + token * N + n
    total = (tl.load(at, mask=n < N, other=0.0, cache_modifier=".cg").to(tl.float32) + found).to(y.dtype.element_ty)
    tl.store(at, total, mask=n < N)
    return total.to(tl.float32)


@triton.jit
def _expand(normed, product, scratch, token, slot, adapted, unit, waits, SHAPE: tl.constexpr, NUMBER: tl.constexpr):
    """Add a token's products to some columns of a weight; `waits` for this many programs first, if any."""
    BN: tl.constexpr = columns(SHAPE)
    n = unit * BN + tl.arange(0, BN)
    mine = _columns_of(product.b, slot, adapted, n, SHAPE, NUMBER)
    if waits > 0:
        _await(scratch.arrived, waits)
    found = _product(normed, scratch, token, adapted, mine, SHAPE, NUMBER)
    # the next kernel waits for this one alone, so this one waits for the previous one, also without an adapter
    if SHAPE.early:
        gdc_wait()
    if adapted:
        _added(product.y, token, found, n, SHAPE, NUMBER)


@triton.jit
def _expand_gated(normed, products, out, scratch, token, slot, adapted, unit, waits, SHAPE: tl.constexpr):
    """Add a token's products to some columns of gate and up, and store silu(gate) * up; `waits` as in `_expand`."""
    N: tl.constexpr = SHAPE.heights[0]
    BN: tl.constexpr = columns(SHAPE)
    n = unit * BN + tl.arange(0, BN)
    first = _columns_of(products[0].b, slot, adapted, n, SHAPE, 0)
    second = _columns_of(products[1].b, slot, adapted, n, SHAPE, 1)
    if waits > 0:
        _await(scratch.arrived, waits)
    gate = _product(normed, scratch, token, adapted, first, SHAPE, 0)
    up = _product(normed, scratch, token, adapted, second, SHAPE, 1)
    if SHAPE.early:
        gdc_wait()
    gate = _added(products[0].y, token, gate, n, SHAPE, 0)
    up = _added(products[1].y, token, up, n, SHAPE, 1)
    tl.store(out + token * N + n, silu(gate) * up, mask=n < N)


@triton.jit
def _within(unit, first, end):
    return (unit >= first) & (unit < end)


@triton.jit
def _slot_of(slots, token, adapters):
    """Return the adapter of a token, and whether it has one."""
    slot = tl.load(slots + token)
    return slot, (slot >= 0) & (slot < adapters)


@triton.jit(do_not_specialize_on_alignment=["tokens", "adapters", "shrinkers"])
def add_few(x, normed, slots, products, out, scratch, tokens, adapters, shrinkers, SHAPE: tl.constexpr):
    """Add the adapters' products; where gated, store silu(first) * second in `out`. The first programs shrink."""
    COUNT: tl.constexpr = len(SHAPE.ranks)
    if SHAPE.early:
        gdc_launch_dependents()
        if not SHAPE.overlap:
            gdc_wait()
    program = tl.program_id(0)
    if program < shrinkers:
        for at in range(program, tokens * shrinks(SHAPE, COUNT), shrinkers):
            token, unit = (at % tokens).to(tl.int64), at // tokens
            slot, adapted = _slot_of(slots, token, adapters)
            for i in tl.static_range(COUNT):
                if adapted & _within(unit, shrinks(SHAPE, i), shrinks(SHAPE, i + 1)):
                    _shrink(x, normed, products[i].a, scratch, token, slot, unit - shrinks(SHAPE, i), SHAPE, i)
        tl.debug_barrier()
        tl.atomic_add(scratch.arrived, 1, sem="release")
        return
    program -= shrinkers
    waits = shrinkers
    for at in range(program, tokens * expands(SHAPE, COUNT), tl.num_programs(0) - shrinkers):
        token, unit = (at % tokens).to(tl.int64), at // tokens
        slot, adapted = _slot_of(slots, token, adapters)
        if SHAPE.gated:
            _expand_gated(normed, products, out, scratch, token, slot, adapted, unit, waits, SHAPE)
        else:
            for i in tl.static_range(COUNT):
                if _within(unit, expands(SHAPE, i), expands(SHAPE, i + 1)):
                    _expand(normed, products[i], scratch, token, slot, adapted, unit - expands(SHAPE, i), waits, SHAPE, i)
        waits = 0


# by the first matrix of a launch, so that models do not share them, and the number of tokens
_scratches: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _scratch(a: Tensor, tokens: int, sums: int, squares: int) -> Scratch:
    """Return the memory between the programs of a launch; it never moves, because graphs refer to it."""
    known = _scratches.setdefault(a, {})
    found = known.get((tokens, sums))
    if found is None:
        parts, lengths = (a.new_empty(tokens * n, dtype=torch.float32) for n in (sums, squares))
        found = known[tokens, sums] = Scratch(parts, lengths, a.new_zeros(1, dtype=torch.int32))
        if a.is_cuda and not torch.cuda.is_current_stream_capturing():
            # the launch does not wait for the previous kernel, which fills the counter
            torch.cuda.current_stream(a.device).synchronize()
    return found


def multiply(x: Tensor, products: Sequence[Product], slots: Tensor, normed: Norm, out: Tensor | None, overlap: bool) -> None:
    """Add the adapters' products with x [T, K] to the ys; with `out`, store silu(first) * second there."""
    (tokens, width), count = x.shape, len(products)
    heights, ranks = tuple(each.y.shape[1] for each in products), tuple(each.a.shape[1] for each in products)
    shape = Shape(width, heights, ranks, out is not None, overlap, launches_early(x.device))
    scratch = _scratch(products[0].a, tokens, sums_before(shape, count), parts_of(shape))
    most = TOGETHER * multiprocessors(x.device)
    shrinkers = min(tokens * shrinks(shape, count), most // 3)
    programs = shrinkers + min(tokens * expands(shape, count), most - shrinkers)
    launch(add_few, (programs,))(
        x,
        normed,
        slots,
        tuple(products),
        out,
        scratch,
        tokens,
        len(products[0].a),
        shrinkers,
        shape,
        num_warps=WARPS,
        maxnreg=REGISTERS,
        launch_pdl=True,
    )
