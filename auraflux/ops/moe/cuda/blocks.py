"""Four-bit experts for some tokens on Hopper: each expert is read once for every block of its pairs.

A block is of 8 or 16 pairs (token, slot) of one expert, see `grouped_gemm`. A program multiplies 128 rows of the expert with a
block: their x lie in shared memory for all of it, and each of eight warps has 16 rows and streams their codes by itself, as in
`hopper.mma_int4`. Half of the warps of `up_block` have rows of gate, the others the same ones of up. `down_block` starts
early and asks for its first codes while `up_block` still works: which experts are met has been known since before that.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.hopper.copy import COMMIT, COPY8, COPY16, copy, wait_ptx
from auraflux.ops.hopper.launch import launch
from auraflux.ops.hopper.mma_int4 import X_SHARED, codes_at, copy_codes, group_sums, load_x, sum_x
from auraflux.ops.hopper.ptx import AWAIT, SYNC, bf16_at, run, shared
from auraflux.ops.hopper.shared_memory import float_pair_at, long_at, put, put_float_pair, word_at
from auraflux.ops.moe.cuda.group import MOST_GROUPED, grouped_at_once
from auraflux.ops.moe.cuda.grouped_gemm import grouped
from auraflux.ops.moe.cuda.stacks import passed
from auraflux.ops.moe.experts import Experts

WARPS = 8
BLOCKS = (8, 16)  # pairs
MOST_PAIRS = 2048  # 16 for each of 128 experts
RING = 3  # quads of 16 rows that a warp has in flight
X_REGISTERS = gl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r,r")


@gluon.jit
def _code_bytes(pointer):
    return pointer.to(gl.pointer_type(gl.int8), bitcast=True)


@gluon.jit
def _copy_block(to, x, placed, warp, lane, pairs, k, K: gl.constexpr, TILES: gl.constexpr):
    """The x of a block's pairs: quad by quad, 512 bytes of each pair, 16-byte chunks swizzled by pair. Warp v has pair v."""
    for m in gl.static_range(TILES):
        pair = gl.load(placed + m * 8 + warp)
        row = x + (gl.minimum(pair, pairs - 1) // k).to(gl.int64) * K + lane * 8
        for q in gl.static_range(K // 256):
            at = to + q * 4096 * TILES + (m * 8 + warp) * 512 + (lane ^ warp) * 16
            copy(COPY16, at, row + q * 256, pair < pairs)
    run(COMMIT, lane)


@gluon.jit
def _rows_of_block(
    tid, base_x, sums_x, base, codes, scales, biases, x, placed, pairs, k,
    K: gl.constexpr, TILES: gl.constexpr, D: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Products of a warp's 16 rows with a block's vectors: for each 8 of them, rows g and g + 8 at vectors 2t and 2t + 1."""
    QUADS: gl.constexpr = K // 256
    warp, lane = tid // 32, tid % 32
    g, t = lane // 4, lane % 4
    lines = base + D * 2048
    for n in gl.static_range((16 * QUADS + 31) // 32):
        e = lane + 32 * n
        there = e < 16 * QUADS
        copy(COPY8, lines + e * 8, scales + e * 4, there)
        copy(COPY8, lines + (16 * QUADS + e) * 8, biases + e * 4, there)
    if not EARLY:
        _copy_block(base_x, x, placed, warp, lane, pairs, k, K, TILES)
    for d in gl.static_range(D):
        if d < QUADS:
            copy_codes(base + d * 2048, lane, codes + d * 128, lane >= 0, K, 16)
        run(COMMIT, lane)
    if EARLY:
        # x is being made by the kernel before
        run(AWAIT, lane)
        _copy_block(base_x, x, placed, warp, lane, pairs, k, K, TILES)
    run(wait_ptx(0 if EARLY else D), lane)
    gl.thread_barrier()
    x_mine = g * 512 + ((2 * t) ^ g) * 16
    # sums over groups, [group, pair]: each warp makes some
    for n in gl.static_range((QUADS * 4 * TILES + 7) // 8):
        piece = gl.minimum(n * 8 + warp, QUADS * 4 * TILES - 1)
        group = piece // TILES
        tile = base_x + group // 4 * 4096 * TILES + piece % TILES * 4096 + group % 4 * 128
        # a group begins at a multiple of 8 chunks, so the swizzle stays within it
        X = sum_x(load_x(X_SHARED, X_REGISTERS, tile + x_mine, tile + (x_mine ^ 16)))
        put_float_pair(sums_x + piece * 32 + t * 8, X[0], X[1])
    gl.thread_barrier()
    zero = (tid * 0).to(gl.float32)
    acc = (zero,) * (4 * TILES)
    mine = g * 128 + ((t // 2) ^ (g % 2)) * 16 + (t % 2) * 8 + (g // 2) * 32
    for q in gl.static_range(QUADS):
        slot = base + q % D * 2048
        run(wait_ptx(D - 1), lane)
        s0, s1 = long_at(lines + (g * QUADS + q) * 8), long_at(lines + ((g + 8) * QUADS + q) * 8)
        b0, b1 = long_at(lines + ((g + 16) * QUADS + q) * 8), long_at(lines + ((g + 24) * QUADS + q) * 8)
        ws = ()
        for j in gl.static_range(4):
            ws += (codes_at(slot + (mine ^ (32 * j))),)  # type: ignore[assignment]
        if q + D < QUADS:
            run(SYNC, lane)
            copy_codes(slot, lane, codes + (q + D) * 128, lane >= 0, K, 16)
        run(COMMIT, lane)
        for j in gl.static_range(4):
            xs = ()
            X = ()
            for m in gl.static_range(TILES):
                tile = base_x + q * 4096 * TILES + m * 4096 + j * 128
                xs += load_x(X_SHARED, X_REGISTERS, tile + x_mine, tile + (x_mine ^ 16))
                X += float_pair_at(sums_x + ((q * 4 + j) * TILES + m) * 32 + t * 8)
            c = group_sums(ws[j], xs, X, TILES)
            new = ()
            for n in gl.static_range(4 * TILES):
                a = acc[n] + bf16_at(s0 if n // 2 % 2 == 0 else s1, j) * c[n]
                new += (a + bf16_at(b0 if n // 2 % 2 == 0 else b1, j) * X[n // 4 * 2 + n % 2],)  # type: ignore[assignment]
            acc = new
    return acc


@gluon.jit
def up_block(
    x, placed, owner, gate, gate_scales, gate_biases, gate_step, gate_scale_step,
    up, up_scales, up_biases, up_step, up_scale_step, out, experts, pairs, k, inner,
    H: gl.constexpr, TILES: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """silu(gate x) * up x of a block's pairs, 64 elements; grid (inner / 64, blocks)."""
    PER: gl.constexpr = D * 2048 + H
    tid = gl.arange(0, 256, gl.BlockedLayout([1], [32], [8], [0]))
    run(AWAIT, tid)
    expert = gl.load(owner + gl.program_id(1)).to(gl.int64)
    if expert >= experts:
        return
    warp, lane = tid // 32, tid % 32
    g, t = lane // 4, lane % 4
    memory, base_x = shared(TILES * 17 * H + 8 * PER, tid)
    sums_x = base_x + TILES * 16 * H
    placed += gl.program_id(1) * (8 * TILES)
    row0 = gl.program_id(0).to(gl.int64) * 64
    row = row0 + warp % 4 * 16
    first = warp < 4
    codes = gl.where(first, _code_bytes(gate) + expert * gate_step * 4, _code_bytes(up) + expert * up_step * 4) + row * (H // 2)
    at = gl.where(first, expert * gate_scale_step, expert * up_scale_step) + row * (H // 64)
    scales, biases = gl.where(first, gate_scales + at, up_scales + at), gl.where(first, gate_biases + at, up_biases + at)
    base = sums_x + TILES * H + warp * PER
    acc = _rows_of_block(tid, base_x, sums_x, base, codes, scales, biases, x, placed, pairs, k, H, TILES, D, False)
    gl.thread_barrier()
    # [half, pair, row of 64]
    for n in gl.static_range(4 * TILES):
        pair = n // 4 * 8 + 2 * t + n % 2
        put(base_x + (((warp // 4) * 8 * TILES + pair) * 64 + warp % 4 * 16 + g + n // 2 % 2 * 8) * 4, acc[n])
    gl.thread_barrier()
    for n in gl.static_range(2 * TILES):
        pair = gl.load(placed + n * 4 + tid // 64)
        at = base_x + (n * 256 + tid) * 4
        a, b = word_at(at).to(gl.float32, bitcast=True), word_at(at + 2048 * TILES).to(gl.float32, bitcast=True)
        result = a / (1.0 + gl.exp(-a)) * b
        gl.store(out + pair.to(gl.int64) * inner + row0 + tid % 64, result.to(out.dtype.element_ty), pair < pairs)
    memory._keep_alive()


@gluon.jit
def down_block(
    x, placed, owner, down, scales, biases, step, scale_step, out, experts, pairs, hidden,
    INNER: gl.constexpr, TILES: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """128 elements of the results of a block's pairs; grid (hidden / 128, blocks)."""
    PER: gl.constexpr = D * 2048 + INNER
    expert = gl.load(owner + gl.program_id(1)).to(gl.int64)
    if expert >= experts:
        return
    tid = gl.arange(0, 256, gl.BlockedLayout([1], [32], [8], [0]))
    warp, lane = tid // 32, tid % 32
    g, t = lane // 4, lane % 4
    memory, base_x = shared(TILES * 17 * INNER + 8 * PER, tid)
    sums_x = base_x + TILES * 16 * INNER
    placed += gl.program_id(1) * (8 * TILES)
    row0 = gl.program_id(0).to(gl.int64) * 128
    row = row0 + warp * 16
    codes = _code_bytes(down) + expert * step * 4 + row * (INNER // 2)
    at = expert * scale_step + row * (INNER // 64)
    base = sums_x + TILES * INNER + warp * PER
    acc = _rows_of_block(tid, base_x, sums_x, base, codes, scales + at, biases + at, x, placed, pairs, 1, INNER, TILES, D, True)
    for n in gl.static_range(4 * TILES):
        pair = gl.load(placed + n // 4 * 8 + 2 * t + n % 2)
        gl.store(out + pair.to(gl.int64) * hidden + row + g + n // 2 % 2 * 8, acc[n], pair < pairs)
    memory._keep_alive()


def _tiles(pairs: int) -> int:
    """Of 8 pairs, in a block."""
    return 1 if pairs <= MOST_PAIRS // 2 else 2


def nbytes(experts: Experts, pairs: int) -> int:
    """Of shared memory for a program."""
    width, tiles = max(experts.inner, experts.hidden), _tiles(pairs)
    return tiles * 17 * width + WARPS * (RING * 2048 + width) + 2048


def write_parts(x: Tensor, ids: Tensor, experts: Experts, parts: Tensor) -> None:
    """`expert_parts` for some tokens."""
    k, pairs, inner, hidden = ids.shape[1], ids.numel(), experts.inner, experts.hidden
    tiles = _tiles(pairs)
    group = grouped_at_once if experts.count <= MOST_GROUPED else grouped
    placed, owner = group(ids, experts.count, 8 * tiles)
    between = x.new_empty(pairs, inner)
    launch(up_block, (inner // 64, len(owner)))(
        x, placed, owner, *passed(experts.gate), *passed(experts.up), between, experts.count, pairs, k, inner, hidden, tiles,
        RING, num_warps=WARPS, launch_pdl=True,
    )  # fmt: skip
    launch(down_block, (hidden // 128, len(owner)))(
        between, placed, owner, *passed(experts.down), parts, experts.count, pairs, hidden, inner, tiles, RING,
        num_warps=WARPS, launch_pdl=True,
    )  # fmt: skip
