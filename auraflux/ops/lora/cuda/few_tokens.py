"""Adapters of up to 64 tokens on CUDA: both products, for all weights of one input, in one launch.

The first programs (shrink) multiply parts of a token by parts of `a`. The others (expand) wait for a counter of the token to
reach their number, sum the parts and multiply them by columns of `b`. Programs start in the order of their numbers, so those
waited for are running. The programs that wait count on; the last sets the counter to 0 for the next launch.

With programmatic dependent launch all this runs beside the kernel of the linear layers. Its products are read last, after
`gdc_wait`. The tokens are older: that kernel lets this one begin after its own wait for them. They are read from L2, because
L1 may hold what was at their addresses before.
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
from auraflux.ops.gpu.device import launches_early
from auraflux.ops.gpu.launch import launch

MOST_TOKENS = 64
HIGHEST_RANK = 256
PART = tl.constexpr(512)  # inputs of a shrink program
RANKS = tl.constexpr(16)  # rows of `a` of a shrink program
TILE = tl.constexpr(4096)  # numbers of `b` of an expand program


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
    arrived  [T]  int32, the programs of a token that have passed; 0 between launches
    """

    sums: Tensor
    squares: Tensor
    arrived: Tensor


@triton.constexpr_function
def parts_of(width):
    """Return the parts of K."""
    return (width + PART.value - 1) // PART.value


@triton.constexpr_function
def shrinks(width, ranks, count):
    """Return the shrink programs of the first `count` weights for a token."""
    return parts_of(width) * sum((rank + RANKS.value - 1) // RANKS.value for rank in ranks[:count])


@triton.constexpr_function
def ranks_before(ranks, count):
    return sum(ranks[:count])


@triton.constexpr_function
def rounded_up(n):
    """Return the least power of two that is not below n, at least 1."""
    return 1 << max(0, n - 1).bit_length()


@triton.constexpr_function
def columns(ranks):
    """Return the columns of an expand program."""
    return max(32, min(256, TILE.value // rounded_up(max(ranks))))


@triton.constexpr_function
def expands(heights, ranks, count):
    """Return the expand programs of the first `count` weights for a token."""
    return sum((height + columns(ranks) - 1) // columns(ranks) for height in heights[:count])


@triton.jit
def _shrink_part(x, normed, a, sums, squares, line, slot, unit, K: tl.constexpr, R: tl.constexpr):
    """Multiply a part of a token by the same part of up to RANKS rows of `a`."""
    PARTS: tl.constexpr = parts_of(K)
    ROWS: tl.constexpr = min(RANKS, rounded_up(R))
    part, block = unit % PARTS, unit // PARTS
    k, r = part * PART + tl.arange(0, PART), block * ROWS + tl.arange(0, ROWS)
    there, mine = k < K, r < R
    at = (slot.to(tl.int64) * R + r)[:, None] * K + k[None, :]
    rows = tl.load(a + at, mask=mine[:, None] & there[None, :], other=0.0).to(tl.float32)
    wide = tl.load(x + line + k, mask=there, other=0.0, cache_modifier=".cg").to(tl.float32)
    if normed.weight is not None:
        if normed.delta is not None:
            # round as a stored sum would be
            wide += tl.load(normed.delta + line + k, mask=there, other=0.0, cache_modifier=".cg").to(tl.float32)
            wide = wide.to(x.dtype.element_ty).to(tl.float32)
        tl.store(squares + part, tl.sum(wide * wide, 0))
        wide *= tl.load(normed.weight + k, mask=there, other=0.0).to(tl.float32)
    tl.store(sums + part * R + r, tl.sum(rows * wide[None, :], 1), mask=mine)


@triton.jit
def _shrink(x, normed, a, sums, squares, line, slot, unit, K: tl.constexpr, RANK: tl.constexpr, NUMBER: tl.constexpr):
    """Multiply a part of a token by the same part of up to RANKS rows of `a` of weight NUMBER, if the unit is one of its."""
    R: tl.constexpr = RANK[NUMBER]
    FIRST: tl.constexpr = shrinks(K, RANK, NUMBER)
    if (unit >= FIRST) & (unit < shrinks(K, RANK, NUMBER + 1)):
        _shrink_part(x, normed, a, sums + parts_of(K) * ranks_before(RANK, NUMBER), squares, line, slot, unit - FIRST, K, R)


@triton.jit
def _await(arrived, K: tl.constexpr, HEIGHTS: tl.constexpr, RANK: tl.constexpr, COUNT: tl.constexpr):
    """Wait for a token's shrink programs; the last of its expand programs, of COUNT weights, sets the counter to 0."""
    SHRINKS: tl.constexpr = shrinks(K, RANK, len(RANK))
    while tl.load(arrived, volatile=True) < SHRINKS:
        pass
    before = tl.atomic_add(arrived, 1, sem="acq_rel")
    if before == SHRINKS + expands(HEIGHTS, RANK, COUNT) - 1:
        tl.store(arrived, 0)
    tl.debug_barrier()


@triton.jit
def _columns_of(b, slot, n, N: tl.constexpr, R: tl.constexpr):
    """Load columns n of an adapter's `b`."""
    r = tl.arange(0, rounded_up(R))
    at = (slot.to(tl.int64) * R + r)[:, None] * N + n[None, :]
    return tl.load(b + at, mask=(r < R)[:, None] & (n < N)[None, :], other=0.0)


@triton.jit
def _product(normed, columns, sums, squares, K: tl.constexpr, R: tl.constexpr):
    """Return a token's products with columns of `b`."""
    PARTS: tl.constexpr = parts_of(K)
    p, r = tl.arange(0, rounded_up(PARTS)), tl.arange(0, rounded_up(R))
    there = (p < PARTS)[:, None] & (r < R)[None, :]
    inner = tl.sum(tl.load(sums + p[:, None] * R + r[None, :], mask=there, other=0.0, cache_modifier=".cg"), 0)
    if normed.weight is not None:
        length = tl.sum(tl.load(squares + p, mask=p < PARTS, other=0.0, cache_modifier=".cg"), 0)
        inner *= 1.0 / tl.sqrt(length / K + normed.eps)
    return tl.sum(columns.to(tl.float32) * inner[:, None], 0)


@triton.jit
def _added(y, found, n, N: tl.constexpr):
    """Add what is found for a token's columns n of y, and return the sums in float32."""
    wide = tl.load(y + n, mask=n < N, other=0.0, cache_modifier=".cg").to(tl.float32)
    total = (wide + found).to(y.dtype.element_ty)
    tl.store(y + n, total, mask=n < N)
    return total.to(tl.float32)


@triton.jit
def _expand(
    product, normed, sums, squares, arrived, slot, adapted, token, unit, K: tl.constexpr, HEIGHTS: tl.constexpr,
    RANK: tl.constexpr, NUMBER: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Add a token's products to columns of weight NUMBER, if the unit is one of its."""
    R: tl.constexpr = RANK[NUMBER]
    N: tl.constexpr = HEIGHTS[NUMBER]
    BN: tl.constexpr = columns(RANK)
    FIRST: tl.constexpr = expands(HEIGHTS, RANK, NUMBER)
    if (unit >= FIRST) & (unit < expands(HEIGHTS, RANK, NUMBER + 1)):
        n = (unit - FIRST) * BN + tl.arange(0, BN)
        if adapted:
            mine = _columns_of(product.b, slot, n, N, R)
            _await(arrived, K, HEIGHTS, RANK, len(RANK))
            found = _product(normed, mine, sums + parts_of(K) * ranks_before(RANK, NUMBER), squares, K, R)
            if EARLY:
                gdc_wait()
            _added(product.y + token * N, found, n, N)
        elif EARLY:
            # the next kernel waits for this one alone, so this one waits for the previous one
            gdc_wait()


@triton.jit(do_not_specialize_on_alignment=["tokens", "adapters"])
def add_few(
    x, normed, slots, products, out, scratch, tokens, adapters, K: tl.constexpr, HEIGHTS: tl.constexpr, RANK: tl.constexpr,
    OVERLAP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Add the adapters' products; with `out`, store silu(first) * second there. Programs of a token are `tokens` apart.

    OVERLAP  x, delta and slots were complete when the previous kernel began
    EARLY    this kernel begins before the previous one has ended
    """
    COUNT: tl.constexpr = len(RANK)
    PARTS: tl.constexpr = parts_of(K)
    BN: tl.constexpr = columns(RANK)
    SHRINKS: tl.constexpr = shrinks(K, RANK, COUNT)
    if EARLY:
        gdc_launch_dependents()
        if not OVERLAP:
            gdc_wait()
    token, unit = (tl.program_id(0) % tokens).to(tl.int64), tl.program_id(0) // tokens
    sums, squares = scratch.sums + token * (PARTS * ranks_before(RANK, COUNT)), scratch.squares + token * PARTS
    arrived = scratch.arrived + token
    slot = tl.load(slots + token)
    adapted = (slot >= 0) & (slot < adapters)
    if unit < SHRINKS:
        if adapted:
            for i in tl.static_range(COUNT):
                _shrink(x, normed, products[i].a, sums, squares, token * K, slot, unit, K, RANK, i)
            tl.debug_barrier()
            tl.atomic_add(arrived, 1, sem="release")
        return
    unit -= SHRINKS
    if out is None:
        for i in tl.static_range(COUNT):
            _expand(products[i], normed, sums, squares, arrived, slot, adapted, token, unit, K, HEIGHTS, RANK, i, EARLY)
    else:
        N: tl.constexpr = HEIGHTS[0]
        n = unit * BN + tl.arange(0, BN)
        gate, up = tl.zeros([BN], tl.float32), tl.zeros([BN], tl.float32)
        if adapted:
            first, second = _columns_of(products[0].b, slot, n, N, RANK[0]), _columns_of(products[1].b, slot, n, N, RANK[1])
            _await(arrived, K, HEIGHTS, RANK, 1)
            gate = _product(normed, first, sums, squares, K, RANK[0])
            up = _product(normed, second, sums + PARTS * RANK[0], squares, K, RANK[1])
        if EARLY:
            gdc_wait()
        gate = _added(products[0].y + token * N, gate, n, N)
        up = _added(products[1].y + token * N, up, n, N)
        tl.store(out + token * N + n, silu(gate) * up, mask=n < N)


# by the first matrix of a launch, so that models do not share them, and the number of tokens
_scratches: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _scratch(a: Tensor, tokens: int, sums: int, squares: int) -> Scratch:
    """Return the memory between the programs of a launch; it never moves, because graphs refer to it."""
    known = _scratches.setdefault(a, {})
    found = known.get((tokens, sums))
    if found is None:
        buffers = (a.new_empty(tokens * n, dtype=torch.float32) for n in (sums, squares))
        found = known[tokens, sums] = Scratch(*buffers, a.new_zeros(tokens, dtype=torch.int32))
    return found


def multiply(x: Tensor, products: Sequence[Product], slots: Tensor, normed: Norm, out: Tensor | None, overlap: bool) -> None:
    """Add the adapters' products with x [T, K] to the ys; with `out`, store silu(first) * second there."""
    tokens, width = x.shape
    heights, ranks = tuple(each.y.shape[1] for each in products), tuple(each.a.shape[1] for each in products)
    parts, count = parts_of(width), len(products)
    programs = shrinks(width, ranks, count) + expands(heights, ranks, count if out is None else 1)
    scratch = _scratch(products[0].a, tokens, parts * sum(ranks), parts)
    sizes = width, heights, ranks, overlap, launches_early(x.device)
    adapters = len(products[0].a)
    launch(add_few, (programs * tokens,))(
        x, normed, slots, tuple(products), out, scratch, tokens, adapters, *sizes, num_warps=4, launch_pdl=True
    )
