"""One token times four-bit weights on Hopper, bit-identical to each token of `gemm/int4_invariant.py`.

Weights are dequantized to bf16, over 2**64, as in `gemm/wgmma.py`. Tensor cores sum units of 128 inputs, eight products of 16;
units are summed in the order of inputs, and so are shares of several blocks of 256.

- A block has two units. Lane t of four has its t-th group, of which a unit takes half: in a product words v and v + 1 of a lane
  give codes j and j + 4.
- An `mma` has eight columns and one token needs one: column c gets the x of unit c of the two runs of 512 inputs that a warp
  takes in sequence, so that eight units share their x registers. Lanes load x in the order of inputs, and exchange it.
- Codes, scales and the norm are loaded as in `int4.py`.
"""

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.gpu.device import multiprocessors
from auraflux.ops.gpu.launch import launch
from auraflux.ops.hopper.copy import COMMIT, wait_ptx
from auraflux.ops.hopper.mma import MMA
from auraflux.ops.hopper.ptx import SYNC, WAIT_AND_LAUNCH, from_lane, run, shared
from auraflux.ops.hopper.reduce import sum_over
from auraflux.ops.hopper.shared_memory import four_floats_at, four_words_at, put, put_float_pair, put_four_words
from auraflux.ops.linear.cuda.call import NO_NORM, FusedNorm, NoNorm
from auraflux.ops.linear.cuda.gemm.cluster_ptx import load_eight, load_words, paired, store_words, weighed
from auraflux.ops.linear.cuda.gemm.wgmma import BACK
from auraflux.ops.linear.cuda.matvec.int4 import (
    copy_step,
    gated_sum,
    nbytes_of,
    norm_factor,
    operands,
    request,
    tiles_for,
    warp_runs,
)
from auraflux.ops.linear.cuda.row_copies import products_of
from auraflux.quant import QTensor

WARPS, MANY_WARPS = 4, 8
UNIT_REGISTERS = gl.constexpr("=&f," * 4 + "r," * 29 + "r")


@gluon.constexpr_function
def _lines_ptx(pitch):
    """Return PTX that loads what dequantizes codes over 2**64.

    Scales, scales / 16, biases of rows g and g + 8, twice in a word.
    """
    text = "{.reg .b16 h; .reg .b32 d,up,less,down;"
    text += "mov.b32 up,0x62006200; mov.b32 less,0x60006000; mov.b32 down,0x1F801F80;"
    for i in range(4):
        text += f"ld.shared.b16 h,[$6+{8 * i * pitch}]; cvt.u32.u16 d,h; prmt.b32 d,d,d,0x1010;"
        if i < 2:
            text += f"mul.rn.bf16x2 ${i},d,up; mul.rn.bf16x2 ${2 + i},d,less;"
        else:
            text += f"mul.rn.bf16x2 ${2 + i},d,down;"
    return text + "}"


def _unit_ptx() -> str:
    """Return PTX for 16 rows x 128 codes. Out: 4 sums. In.

    4 words of row g, 4 of g + 8, the 6 of `_lines_ptx`, 16 pairs of x.
    """
    text = "{.reg .b32 a<4>,w<4>; .reg .f32 z; mov.f32 z,0f00000000;"
    for n in range(2):
        for i in range(4):
            text += f"mov.b32 w{i},${4 + i % 2 * 4 + 2 * n + i // 2};"
        for j in range(4):
            mask, scales = ("0x000F000F", "0x00F000F0")[j % 2], 12 + j % 2 * 2
            for i in range(4):
                text += f"shr.u32 w{i},w{i},8;" if j == 2 else ""
                text += f"and.b32 a{i},w{i},{mask}; fma.rn.bf16x2 a{i},a{i},${scales + i % 2},${16 + i % 2};"
            x, start = 18 + 8 * n + 2 * j, "$0,$1,$2,$3" if n or j else "z,z,z,z"
            text += f"{MMA} {{$0,$1,$2,$3}},{{a0,a1,a2,a3}},{{${x},${x + 1}}},{{{start}}};"
    return text + "}"


UNIT = gl.constexpr(_unit_ptx())


@gluon.jit
def load_runs(x, normed, further, warp, lane, squares, stores, i: gl.constexpr, K: gl.constexpr, W: gl.constexpr):
    """Load a warp's i-th two runs, eight inputs of each quarter per lane, with delta and norm applied if any.

    further  offset of the token in delta and in the sum
    returns  pairs (j, j + 4) of each eight, and `squares` with theirs added
    """
    PARTS: gl.constexpr = 4 if 2 * i + 1 < warp_runs(K, W) else 2
    zero = lane * 0
    words, more, norms, found = (), (), (), ()
    # issue all loads before the first use
    for c in gl.static_range(PARTS):
        at = gl.minimum(first_input(warp, lane, i, c, W), K - 8)
        words += (load_words(x + at),)  # type: ignore[assignment]
        if normed.weight is not None:
            norms += (load_eight(normed.weight + at),)  # type: ignore[assignment]
            if normed.delta is None:
                more += ((zero, zero, zero, zero),)  # type: ignore[assignment]
            else:
                more += (load_words(normed.delta + further + at),)  # type: ignore[assignment]
    for c in gl.static_range(PARTS):
        if normed.weight is None:
            found += (paired(words[c]),)  # type: ignore[assignment]
        else:
            at = first_input(warp, lane, i, c, W)
            made = weighed(words[c], more[c], norms[c], True)
            if normed.delta is not None:
                sums = (made[4], made[5], made[6], made[7])
                store_words(normed.total + further + gl.minimum(at, K - 8), sums, (at < K) & stores)
            squares += gl.where(at < K, made[8], 0.0)
            found += ((made[0], made[1], made[2], made[3]),)  # type: ignore[assignment]
    return found, squares


@gluon.jit
def first_input(warp, lane, i: gl.constexpr, c: gl.constexpr, W: gl.constexpr):
    """Return the first of a lane's eight inputs, of the c-th block of a warp's i-th two runs."""
    return (warp + (2 * i + c // 2) * W) * 512 + c % 2 * 256 + lane * 8


@gluon.jit
def _units_of(box, lane, pairs):
    """Exchange pairs loaded in the order of inputs, so that each lane has the 16 pairs of its column.

    Of two lanes the first takes pairs 0 and 1 of both their eights, the second the others: the two pairs of a product are
    adjacent, as its registers must be.

    box  2 KB of the warp's shared memory, 16 bytes swizzled by group
    """
    g, t, even = lane // 4, lane % 4, lane % 2 == 0
    for c in gl.static_range(len(pairs)):
        p = pairs[c]
        a, b = from_lane(gl.where(even, p[2], p[0]), lane ^ 1), from_lane(gl.where(even, p[3], p[1]), lane ^ 1)
        mine = gl.where(even, p[0], a), gl.where(even, a, p[2]), gl.where(even, p[1], b), gl.where(even, b, p[3])
        put_four_words(box + c * 512 + (lane ^ (lane // 8)) * 16, mine)
    run(SYNC, lane)
    at = box + g // 2 * 512 + t * 128 + g % 2 * 64
    found = ()
    for k in gl.static_range(4):
        found += four_words_at(at + ((16 * k) ^ (t * 16)))
    run(SYNC, lane)
    return found


@gluon.jit
def _unit(words, more, lines, x, FIRST: gl.constexpr):
    args = [
        words[FIRST], words[FIRST + 1], words[FIRST + 2], words[FIRST + 3],
        more[FIRST], more[FIRST + 1], more[FIRST + 2], more[FIRST + 3],
        lines[0], lines[1], lines[2], lines[3], lines[4], lines[5],
        x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8], x[9], x[10], x[11], x[12], x[13], x[14], x[15],
    ]  # fmt: skip
    return gl.inline_asm_elementwise(UNIT, UNIT_REGISTERS, args, (gl.float32,) * 4, is_pure=True, pack=1)


@gluon.jit
def _block(
    base, lane, warp, first, second, scales, x, STEP: gl.constexpr, TILES: gl.constexpr, MINE: gl.constexpr,
    ROWS: gl.constexpr, K: gl.constexpr, W: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Multiply the codes of one of a program's blocks and refill its slot; return the sums of both units."""
    g, t = lane // 4, lane % 4
    # 16 bytes of a row, swizzled by row
    mine = base + STEP % D * 2048 + g * 128 + ((2 * t) ^ g) * 16
    run(wait_ptx(D - 1), lane)
    words = four_words_at(mine) + four_words_at(mine ^ 16)
    more = four_words_at(mine + 1024) + four_words_at((mine ^ 16) + 1024)
    if STEP + D < 2 * MINE * TILES:
        run(SYNC, lane)
        copy_step(base, lane, warp, first, second, STEP + D, MINE, ROWS, K, W, D)
    run(COMMIT, lane)
    lines = _lines(scales + STEP // (2 * MINE) * (512 * MINE) + STEP % (2 * MINE) * 8, 16 * MINE)
    return _unit(words, more, lines, x, 0), _unit(words, more, lines, x, 4)


@gluon.jit
def _units_at(at, r: gl.constexpr, W: gl.constexpr):
    """Load the four units of run r of a row, where the warps stored them."""
    PLACE: gl.constexpr = (r // W // 2 * W + r % W) * 512 + r // W % 2 * 16
    return four_floats_at(at + PLACE)


@gluon.jit
def _sum_warps(at, K: gl.constexpr, W: gl.constexpr, SHARE: gl.constexpr):
    """Sum a row's units in the order of inputs: units of a share, then shares."""
    BLOCKS: gl.constexpr = K // 256
    zero = (at * 0).to(gl.float32)
    found, some = zero, zero
    for r in gl.static_range((BLOCKS + 1) // 2):
        u = _units_at(at, r, W)
        for h in gl.static_range(2):
            if 2 * r + h < BLOCKS:
                some = (some + u[2 * h]) + u[2 * h + 1]
                if (2 * r + h + 1) % SHARE == 0 or 2 * r + h + 1 == BLOCKS:
                    found, some = found + some, zero
    return found * BACK


@gluon.jit
def matvec_units(
    x, normed, products, ends, GATED: gl.constexpr, K: gl.constexpr, TILES: gl.constexpr, W: gl.constexpr, D: gl.constexpr,
    SHARE: gl.constexpr,
):  # fmt: skip
    """Multiply as `int4.matvec` does, in the summation order of `multiply_invariant`.

    SHARE  blocks of 256 inputs summed separately
    """
    MINE: gl.constexpr = warp_runs(K, W)
    PAIRS: gl.constexpr = (MINE + 1) // 2
    PITCH: gl.constexpr = 16 * MINE
    USED: gl.constexpr = nbytes_of(K, TILES, W, D)
    PER: gl.constexpr = max(USED + 2048, 512 * PAIRS * TILES + 16)
    ROWS: gl.constexpr = 8 if GATED else 16
    tid = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    warp, lane = tid // 32, tid % 32
    g, t = lane // 4, lane % 4
    memory, ring = shared(PER * W, tid)
    base = ring + warp * PER
    scales = base + D * 2048 + g * PITCH + t * 2
    y, row0, first, second = request(base, lane, warp, products, ends, GATED, K, TILES, W, D)
    run(WAIT_AND_LAUNCH, lane)
    zero = (tid * 0).to(gl.float32)
    xs, squares = (), zero
    for i in gl.static_range(PAIRS):
        pairs, squares = load_runs(x, normed, 0, warp, lane, squares, gl.program_id(0) == 0, i, K, W)
        xs += (_units_of(base + USED, lane, pairs),)  # type: ignore[assignment]
    found = ()
    for n in gl.static_range(TILES):
        for i in gl.static_range(2 * MINE):
            if i % 4 == 0:
                u0, u1, u2, u3 = zero, zero, zero, zero
            a, b = _block(base, lane, warp, first, second, scales, xs[i // 4], n * 2 * MINE + i, TILES, MINE, ROWS, K, W, D)
            # columns 2t and 2t + 1 are the units of this block
            owned = t == i % 4
            u0, u1 = gl.where(owned, a[0], u0), gl.where(owned, b[1], u1)
            u2, u3 = gl.where(owned, a[2], u2), gl.where(owned, b[3], u3)
            if i % 4 == 3 or i == 2 * MINE - 1:
                found += ((u0, u1, u2, u3),)  # type: ignore[assignment]
    gl.thread_barrier()
    for n in gl.static_range(TILES * PAIRS):
        at = ring + (n * W + warp) * 512 + lane * 8
        put_float_pair(at, found[n][0], found[n][1])
        put_float_pair(at + 256, found[n][2], found[n][3])
    if normed.weight is not None:
        put(ring + TILES * PAIRS * W * 512 + warp * 4, sum_over(squares, 32))
    gl.thread_barrier()
    tile_at = ring + tid // ROWS % TILES * (PAIRS * W * 512) + tid % ROWS * 32
    out = _sum_warps(tile_at, K, W, SHARE)
    factor = out
    if normed.weight is not None:
        factor = norm_factor(ring + TILES * PAIRS * W * 512, tid, normed.eps, K, W)
        out *= factor
    if GATED:
        up = _sum_warps(tile_at + 256, K, W, SHARE)
        if normed.weight is not None:
            up *= factor
        out = gated_sum(out, up)
    gl.store(y + row0 + tid, out.to(gl.bfloat16), tid < ROWS * TILES)
    memory._keep_alive()


@gluon.jit
def _lines(at, PITCH: gl.constexpr):
    text: gl.constexpr = _lines_ptx(PITCH)
    REGS: gl.constexpr = "=&r,=&r,=&r,=&r,=&r,=&r,r,~{memory}"
    return gl.inline_asm_elementwise(text, REGS, [at], (gl.int32,) * 6, is_pure=False, pack=1)


def launch_shape(rows: Sequence[int], width: int, processors: int) -> tuple[int, int, int | None]:
    """Choose warps per program, blocks of each in flight, and a cap on registers."""
    if width > 8192 or (sum(rows) <= 16 * processors and width > 4096):
        # dependent products stall, so that few programs per multiprocessor need eight warps each
        return MANY_WARPS, 2, 128
    # as in `int4.py`
    return WARPS, 3, None if width % (512 * WARPS) else 128


def multiply(
    x: Tensor,
    weights: Sequence[QTensor],
    outs: Sequence[Tensor],
    share: int,
    gated: bool = False,
    normed: FusedNorm | NoNorm = NO_NORM,
) -> None:
    """Multiply one token by up to MOST_WEIGHTS weights of one width in one launch; gated: silu(first) * second, into one out.

    share   blocks of 256 inputs summed separately
    normed  residual add and norm applied to x first
    """
    width, processors = weights[0].shape[1], multiprocessors(x.device)
    rows = [weight.shape[0] for weight in weights]
    warps, deep, cap = launch_shape(rows, width, processors)
    tiles = tiles_for(rows, width, gated)
    ends = tuple(accumulate(count // (16 * tiles) for count in rows))
    splits, grid = ((), rows[0] // (8 * tiles)) if gated else (ends[:-1], ends[-1])
    products, sizes = products_of(weights, outs, codes=operands), (gated, width, tiles, warps, deep, share)
    launch(matvec_units, (grid,))(x, normed, products, splits, *sizes, num_warps=warps, maxnreg=cap, launch_pdl=True)
