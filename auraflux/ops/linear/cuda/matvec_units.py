"""One token times weights of 2 and 4 bits on Hopper: groups of 16 inputs and more, scales in single or half precision.

How a warp multiplies codes is in `hopper/mma_units.py`. Warps share the tiles of a row in turns. Each loads its codes and
scales straight into registers, those of the next tile before it multiplies this one's, the first ones before the kernel before
has ended.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.hopper.launch import launch
from auraflux.ops.hopper.mma_units import TILE, ask_inputs, ask_scales, ask_words, unit_starts, unit_sums
from auraflux.ops.hopper.ptx import AWAIT, run, shared
from auraflux.ops.hopper.shared_memory import put
from auraflux.ops.hopper.sizes import cdiv, power_of_two
from auraflux.ops.linear.cuda.matvec_bits_warp import added
from auraflux.ops.linear.cuda.row_copies import chosen, products_of
from auraflux.quant import QTensor

MOST_WEIGHTS = 4  # that one launch multiplies one token by
# warps of a program: with many rows there are enough programs of few. Measured on an H200, 4096 x 14336 and 14336 x 4096
WARPS, MANY_ROWS, FEW_WARPS = 16, 8192, 4


@gluon.jit
def _ask_words(
    w, w1, tile, t, row0, g, K: gl.constexpr, BITS: gl.constexpr, GATED: gl.constexpr, R: gl.constexpr
):  # fmt: skip
    """A tile's words of every row of a lane."""
    ROW: gl.constexpr = K // 8 * BITS
    found = ()
    for r in gl.static_range(R):
        at = (row0 + r * (8 if GATED else 16) + g) * ROW + tile * (16 * BITS) + t * (4 * BITS)
        found += (ask_words((w + at).to(gl.int64), BITS),)  # type: ignore[assignment]
        found += (ask_words((w1 + (at if GATED else at + 8 * ROW)).to(gl.int64), BITS),)  # type: ignore[assignment]
    return found


@gluon.jit
def _ask_scales(
    s, s1, tile, t, row0, g, K: gl.constexpr, GROUP: gl.constexpr, NBYTES: gl.constexpr, GATED: gl.constexpr, R: gl.constexpr
):  # fmt: skip
    """A tile's scales or biases of every row of a lane."""
    ROW: gl.constexpr = K // GROUP * NBYTES
    found, first = (), (t < 2).to(gl.int32)
    for r in gl.static_range(R):
        at = (row0 + r * (8 if GATED else 16) + g) * ROW + (tile * 128 + t % 2 * 64) // GROUP * NBYTES
        found += (ask_scales((s + at).to(gl.int64), first, NBYTES, GROUP),)  # type: ignore[assignment]
        more = (s1 + (at if GATED else at + 8 * ROW)).to(gl.int64)
        found += (ask_scales(more, first, NBYTES, GROUP),)  # type: ignore[assignment]
    return found


@gluon.jit
def matvec_tiles(
    x, products, ends, GATED: gl.constexpr, K: gl.constexpr, BITS: gl.constexpr, GROUP: gl.constexpr, FORM: gl.constexpr,
    NBYTES: gl.constexpr, R: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """One token, 16R rows a program. Warp v takes tiles v, v + W, ...

    Weights have their programs one after the other, see `chosen`; products may be added to. GATED takes eight rows of each of
    two weights, and stores silu(first) * second.

    NBYTES  of a scale
    """
    TILES: gl.constexpr = K // TILE
    MINE: gl.constexpr = (TILES + W - 1) // W
    ROWS: gl.constexpr = 8 if GATED else 16
    AFFINE: gl.constexpr = FORM == "affine"
    tid = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    warp, lane = tid // 32, tid % 32
    g, t = lane // 4, lane % 4
    program = gl.program_id(0)
    own, number = chosen(program, ends, [(each.codes.packed, each.codes.scales, each.out) for each in products])
    w, s, y = own
    # apart, since a function cannot return None
    b = chosen(program, ends, [each.codes.biases for each in products])[0] if AFFINE else None
    a = chosen(program, ends, [each.added for each in products])[0] if products[0].added is not None else None
    also = products[1 if GATED else 0].codes
    w1, s1 = also.packed if GATED else w, also.scales if GATED else s
    row0 = number.to(gl.int64) * (ROWS * R)
    memory, ring = shared(W * R * 256, tid)
    begin = gl.minimum(warp, TILES - 1)
    next_w = _ask_words(w, w1, begin, t, row0, g, K, BITS, GATED, R)
    next_s = _ask_scales(s, s1, begin, t, row0, g, K, GROUP, NBYTES, GATED, R)
    if AFFINE:
        b1 = also.biases if GATED else b
        next_b = _ask_scales(b, b1, begin, t, row0, g, K, GROUP, NBYTES, GATED, R)
    run(AWAIT, lane)
    # of the inputs a lane has those of one unit, or none
    part = gl.where(g == t, 2 * t, 2 * t + 1)
    totals = ((tid * 0).to(gl.float32),) * (2 * R)
    for i in range(MINE):
        tile, later = warp + i * W, gl.minimum(warp + (i + 1) * W, TILES - 1)
        words, next_w = next_w, _ask_words(w, w1, later, t, row0, g, K, BITS, GATED, R)
        scales, next_s = next_s, _ask_scales(s, s1, later, t, row0, g, K, GROUP, NBYTES, GATED, R)
        if AFFINE:
            biases, next_b = next_b, _ask_scales(b, b1, later, t, row0, g, K, GROUP, NBYTES, GATED, R)
        here = (g % 4 == t) & (tile < TILES)
        xs = ask_inputs((x + gl.minimum(tile, TILES - 1) * TILE + part * 16).to(gl.int64), here.to(gl.int32), BITS, FORM)
        X = unit_starts(xs, BITS) if AFFINE else ((tid * 0).to(gl.float32),) * 4
        new = ()
        for r in gl.static_range(R):
            sums = unit_sums(words[2 * r], words[2 * r + 1], xs, X[0], X[1], t, BITS, FORM)
            for half in gl.static_range(2):
                scale, total = scales[2 * r + half], totals[2 * r + half]
                total += sums[2 * half] * scale[0] + sums[2 * half + 1] * scale[1]
                if AFFINE:
                    total += X[2] * biases[2 * r + half][0] + X[3] * biases[2 * r + half][1]
                new += (total,)  # type: ignore[assignment]
        totals = new
    for r in gl.static_range(2 * R):
        put(ring + (warp * (2 * R) + r) * 128 + lane * 4, totals[r])
    gl.thread_barrier()
    # results of eight rows of the first half lie before those of the second
    row = tid % 8 + tid % (8 * R) // 8 * 16 if GATED else tid % (16 * R)
    out = added(ring, row, W, R)
    if GATED:
        up = added(ring, row + 8, W, R)
        # as two products stored in bf16 would have it
        out, up = out.to(gl.bfloat16).to(gl.float32), up.to(gl.bfloat16).to(gl.float32)
        out = out / (1.0 + gl.exp(-out)) * up
    if a is not None:
        out += gl.load(a + row0 + tid, tid < ROWS * R, 0.0).to(gl.float32)
    gl.store(y + row0 + tid, out.to(gl.bfloat16), tid < ROWS * R)
    memory._keep_alive()


def _warps(weights: Sequence[QTensor]) -> int:
    many = sum(weight.shape[0] for weight in weights) >= MANY_ROWS
    return min(FEW_WARPS if many else WARPS, max(2, power_of_two(cdiv(weights[0].shape[1], TILE.value))))


def multiply(
    x: Tensor,
    weights: Sequence[QTensor],
    outs: Sequence[Tensor],
    added: Sequence[Tensor | None] = (),
    gated: bool = False,
) -> None:
    """One token times up to MOST_WEIGHTS weights of one width and format in one launch, into bf16 [1, N] each.

    added   vectors to add, one for each weight, or none at all
    gated   silu(first product) * second, into one out
    """
    first = weights[0]
    warps, rows = _warps(weights), 8 if gated else 16
    ends = list(accumulate(weight.shape[0] // rows for weight in weights[: len(outs)]))
    products = products_of(weights, outs, added)
    sizes = gated, first.shape[1], first.bits, first.group, first.kind, first.scales.element_size(), 1, warps
    launch(matvec_tiles, (ends[-1],))(x, products, tuple(ends[:-1]), *sizes, num_warps=warps, launch_pdl=True)


def not_served(x: Tensor, weight: QTensor) -> str | None:
    """Why one token is not multiplied by a weight here."""
    rows, width = weight.shape
    if weight.kind not in ("affine", "iq4") or weight.bits not in (2, 4):
        return f"{weight.bits} bits of {weight.kind}; it is for 2 and 4 bits, affine and IQ4"
    if x.dtype is not torch.bfloat16 or weight.scales.dtype not in (torch.float32, torch.float16):
        return "activations are not bf16, or scales are neither in single nor in half precision"
    if rows == 0 or rows % 16 or width % TILE.value:
        return f"{rows} x {width} is not whole tiles of 16 x {TILE.value}"
    return None
