"""Products with dense weights, such as routers and unquantized layers: read row by row, 16-bit ones widened on the fly.

A vector holds neighbouring inputs. A result is accumulated per lane along the inputs, then reduced across lanes: the same
order for one token and for many. A tile of tokens shares the loads of four rows.
"""

import torch
from llvmlite import ir
from numba.core import cgutils
from torch import Tensor

from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.jit import LINE, Kernel, arguments, as_float, empty, floats, int64s, jit, share, threads, workspace
from auraflux.ops.simd.softmax import ZERO, fill
from auraflux.ops.simd.vectors import (
    F32,
    I16,
    I32,
    I64,
    at,
    call,
    fma,
    kernel,
    load,
    splat,
    spread,
    store,
    sum_four,
    variable,
    vector,
)

ROWS = 4  # of a weight, whose lane reductions are shared
TOKENS = 3 if ISA.lanes == 8 else 6  # accumulators of a tile stay in registers
LANES = ISA.lanes
GROUP = 32  # rows that all tokens pass over while in L2
INPUTS = 512  # of them at a time: a tile's then stay in L1
TILE_BYTES = 4 * LANES * ROWS
TILE_SPACE = 8 * ROWS + TOKENS * TILE_BYTES + LINE  # scratch bytes of `multiply_floats`
SCRATCH = 8 * GROUP + LINE + GROUP // ROWS * TOKENS * TILE_BYTES
PARALLEL_FROM = 1 << 16  # weights times tokens; below this, waking the threads costs more than the work


def _some(b: ir.IRBuilder, address: ir.Value, offset: ir.Value, kind: ir.VectorType, mask: ir.Value) -> ir.Value:
    """Load the lanes of the mask; the others are zero."""
    where = b.inttoptr(b.add(address, offset), kind.as_pointer())
    element = {I16: "i16", F32: "f32"}[kind.element]
    zeros = ir.Constant(kind, [0] * LANES)
    return call(b, f"llvm.masked.load.v{LANES}{element}.p0", kind, where, ir.Constant(I32, 1), mask, zeros)


def _widen(b: ir.IRBuilder, raw: ir.Value) -> ir.Value:
    """Return float32 unchanged, and bf16 bits widened."""
    if raw.type.element == F32:
        return raw
    return b.bitcast(b.shl(b.zext(raw, ISA.ints), splat(ISA.ints, 16)), ISA.floats)


@kernel(constants=2)
def _tile(b, nbytes, tokens, weights, x, x_step, offset, count, rest, sums_at):
    """Add products of ROWS rows with `tokens` tokens to sums [tokens][ROWS] of a vector each.

    weights  [ROWS]  addresses of rows, whose elements have `nbytes`
    x        tokens have a stride of `x_step` bytes
    offset   of the first input; `count` vectors of them are multiplied, and `rest` more
    """
    kind = vector(F32 if nbytes == 4 else I16, LANES)
    place, input_at = b.mul(offset, at(nbytes)), b.mul(offset, at(4))
    rows = [b.add(load(b, weights, 8 * r, I64), place) for r in range(ROWS)]
    acts = [b.add(b.add(x, b.mul(x_step, at(t))), input_at) for t in range(tokens)]
    slots = [[4 * LANES * (t * ROWS + r) for r in range(ROWS)] for t in range(tokens)]
    sums = [[variable(b, load(b, sums_at, slot, ISA.floats)) for slot in row] for row in slots]

    def add(values, inputs):
        for r, value in enumerate(values):
            for t, those in enumerate(inputs):
                b.store(fma(b, value, those, b.load(sums[t][r])), sums[t][r])

    with cgutils.for_range(b, count) as loop:
        here, there = b.mul(loop.index, at(LANES * nbytes)), b.mul(loop.index, at(4 * LANES))
        add([_widen(b, load(b, row, here, kind)) for row in rows], [load(b, a, there, ISA.floats) for a in acts])
    with b.if_then(b.icmp_signed(">", rest, at(0))):
        lanes = ir.Constant(ISA.ints, list(range(LANES)))
        mask = b.icmp_signed("<", lanes, spread(b, b.trunc(rest, I32), LANES))
        here, there = b.mul(count, at(LANES * nbytes)), b.mul(count, at(4 * LANES))
        values = [_widen(b, _some(b, row, here, kind, mask)) for row in rows]
        add(values, [_some(b, a, there, ISA.floats, mask) for a in acts])
    for row, places in zip(sums, slots, strict=True):
        for total, slot in zip(row, places, strict=True):
            store(b, b.load(total), sums_at, slot)


@kernel(constants=0)
def _across(b, sums, out):
    """Reduce ROWS vectors across their lanes."""
    store(b, sum_four(b, [load(b, sums, 4 * LANES * r, ISA.floats) for r in range(ROWS)]), out, 0)


@jit
def multiply_floats(weight, step, rows, x, x_step, tokens, width, out, out_step, space):
    """Multiply float32 rows with tokens; `step`, `x_step` and `out_step` are strides in bytes. Needs TILE_SPACE of scratch."""
    addresses, sums, spare = int64s(space, ROWS), space + 8 * ROWS, space + 8 * ROWS + TOKENS * TILE_BYTES
    for first in range(0, rows, ROWS):
        for r in range(ROWS):
            addresses[r] = weight + step * min(first + r, rows - 1)
        for token in range(0, tokens, TOKENS):
            some, mine = min(TOKENS, tokens - token), x + token * x_step
            fill(sums, some * ROWS * LANES, ZERO)
            if some == TOKENS:
                _tile((4, TOKENS, space, mine, x_step, 0, width // LANES, width % LANES, sums))
            else:
                for t in range(some):
                    here = sums + t * TILE_BYTES
                    _tile((4, 1, space, mine + t * x_step, x_step, 0, width // LANES, width % LANES, here))
            for t in range(some):
                _across((sums + t * TILE_BYTES, spare))
                target = floats(out + (token + t) * out_step, rows)
                for r in range(first, min(first + ROWS, rows)):
                    target[r] = floats(spare, ROWS)[r - first]


def _build(nbytes: int) -> Kernel:
    @jit
    def add(weights, x, x_step, tokens, width, first, sums):
        """Add the products of a run of inputs; the last run may be shorter."""
        last = min(width, first + INPUTS)
        count, rest = (last - first) // LANES, (last - first) % LANES
        if tokens == TOKENS:
            _tile((nbytes, TOKENS, weights, x, x_step, first, count, rest, sums))
        else:
            for t in range(tokens):
                here = sums + t * TILE_BYTES
                _tile((nbytes, 1, weights, x + t * x_step, x_step, first, count, rest, here))

    @Kernel
    def multiply(args, job, jobs):
        x, tokens, width, weight, rows, out, space, scratch = arguments(args, 8)
        addresses, spare = space + job * scratch, space + job * scratch + 8 * GROUP
        sums = spare + LINE
        groups = (rows + GROUP - 1) // GROUP
        # few rows alone would be too few parts for the threads
        runs = max(1, min((jobs + groups - 1) // groups, tokens // TOKENS))
        for part in share(groups * runs, job, jobs):
            group, those = part // runs, share(tokens, part % runs, runs)
            first, tiles = group * GROUP, (min(GROUP, rows - group * GROUP) + ROWS - 1) // ROWS
            for r in range(tiles * ROWS):
                int64s(addresses, GROUP)[r] = weight + nbytes * width * min(first + r, rows - 1)
            for token in range(those.start, those.stop, TOKENS):
                some, mine = min(TOKENS, those.stop - token), x + 4 * token * width
                fill(sums, tiles * TOKENS * ROWS * LANES, ZERO)
                for start in range(0, width, INPUTS):
                    for tile in range(tiles):
                        here = sums + tile * TOKENS * TILE_BYTES
                        add(addresses + 8 * ROWS * tile, mine, 4 * width, some, width, start, here)
                for tile in range(tiles):
                    for t in range(some):
                        _across((sums + (tile * TOKENS + t) * TILE_BYTES, spare))
                        here = first + tile * ROWS
                        target = floats(out + 4 * (token + t) * rows, rows)
                        for r in range(here, min(here + ROWS, rows)):
                            target[r] = floats(spare, ROWS)[r - here]

    return multiply


ROWS_OF = {torch.bfloat16: _build(2), torch.float32: _build(4)}


def multiply_rows(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x [T, K] float32 by a weight [N, K]: [T, N]."""
    found = weight if weight.dtype in ROWS_OF else as_float(weight)
    out = empty(x.shape[0], weight.shape[0])
    jobs = threads() if weight.numel() * len(x) >= PARALLEL_FROM else 1
    space = workspace(jobs * SCRATCH)
    sizes = found.data_ptr(), weight.shape[0], out.data_ptr(), space, SCRATCH
    ROWS_OF[found.dtype](jobs, x.data_ptr(), *x.shape, *sizes)
    return out
