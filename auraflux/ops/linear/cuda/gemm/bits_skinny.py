"""2 to 16 tokens times a quantized weight on Hopper; the instructions of a warp are in `hopper/mma_bits.py`.

As in `matvec/bits.py`, warps split K and each streams codes into its own ring, here together with their x. A column of an `mma`
is a token.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.gpu.device import shared_nbytes
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv
from auraflux.ops.hopper.copy import COMMIT, COPY16, copy, wait_ptx
from auraflux.ops.hopper.mma_bits import MX_SHIFT, column_starts, column_sums, load_x, word_count, words_at
from auraflux.ops.hopper.ptx import SYNC, WAIT_AND_LAUNCH, run, shared
from auraflux.ops.hopper.shared_memory import put, word_at
from auraflux.ops.linear.cuda.row_copies import (
    copy_part,
    copy_scales,
    in_bytes,
    row_pitch,
    scale_piece,
    scale_pitch,
    scales_at,
)
from auraflux.quant import QTensor

MOST_TOKENS = 16
WARPS = 8


@gluon.jit
def _copy_x(slot, lane, x, there_from, M, K: gl.constexpr, TOKENS: gl.constexpr, WIDTH: gl.constexpr):
    """Copy WIDTH values of each token from `there_from` on; 16 bytes of padding put two tokens' chunks into different banks."""
    CHUNKS: gl.constexpr = WIDTH // 8
    for n in gl.static_range(TOKENS * CHUNKS // 32):
        e = lane + 32 * n
        token, at = e // CHUNKS, e % CHUNKS * 8 + there_from
        to = slot + token * (2 * WIDTH + 16) + e % CHUNKS * 16
        copy(COPY16, to, x + (token * K + at), (token < M) & (at < K))


@gluon.jit
def _request(slot, lane, first, ahead, left, R: gl.constexpr, ROW: gl.constexpr, PART: gl.constexpr, PITCH: gl.constexpr):
    """Request a part of the codes of each block of 16 rows, `left` bytes before their rows' end."""
    for r in gl.static_range(R):
        source = first + (16 * r * ROW + ahead)
        copy_part(slot + 16 * r * PITCH, lane, source, source + 8 * ROW, left, ROW, PART, PITCH)


@gluon.jit
def _add_column(
    acc, lines, words, after, shift, tile, t, there, HALF: gl.constexpr, BITS: gl.constexpr, COLUMN: gl.constexpr,
    AFFINE: gl.constexpr, R: gl.constexpr, TILES: gl.constexpr, PITCH: gl.constexpr, X_PITCH: gl.constexpr,
):  # fmt: skip
    """Add one column of all rows and tokens to their sums, if it is `there`; HALF selects one of two scales."""
    xs = ()
    X = ()
    new = ()
    for m in gl.static_range(TILES):
        xm = load_x(tile + 8 * m * X_PITCH, t, BITS, COLUMN, AFFINE, "shared")
        xs += xm
        X += column_starts(xm, BITS, COLUMN, AFFINE)
    for r in gl.static_range(R):
        ws = words_at(words, after, 16 * r * PITCH, BITS, COLUMN, PITCH)
        c = column_sums(ws, xs, shift, BITS, COLUMN, AFFINE, TILES, 1)
        for k in gl.static_range(4 * TILES):
            line, a = lines[2 * r + k // 2 % 2], acc[r * 4 * TILES + k]
            if AFFINE:
                a += line[HALF] * (c[k] + X[k // 4 * 4 + k % 2 + 2])
                a += line[2 + HALF] * X[k // 4 * 4 + k % 2]
            else:
                a += line[HALF] * (c[k] * MX_SHIFT)
            if there is not None:
                a = gl.where(there, a, acc[r * 4 * TILES + k])
            new += (a,)  # type: ignore[assignment]
    return new


@gluon.jit
def _store(acc, ring, warp, lane, y, row0, M, N, R: gl.constexpr, TILES: gl.constexpr, W: gl.constexpr):
    """Sum over the warps, and store."""
    SUMS: gl.constexpr = 4 * R * TILES
    g, t = lane // 4, lane % 4
    gl.thread_barrier()
    for k in gl.static_range(SUMS):
        put(ring + (warp * SUMS + k) * 128 + lane * 4, acc[k])
    gl.thread_barrier()
    for p in gl.static_range((SUMS + W - 1) // W):
        n = warp + p * W
        out = (lane * 0).to(gl.float32)
        for v in gl.static_range(W):
            out += word_at(ring + (v * SUMS + n % SUMS) * 128 + lane * 4).to(gl.float32, bitcast=True)
        row, token = row0 + n // (4 * TILES) * 16 + g + n % 4 // 2 * 8, n // 4 % TILES * 8 + 2 * t + n % 2
        gl.store(y + token * N + row, out.to(gl.bfloat16), (token < M) & (n < SUMS))


@gluon.jit
def matmul_codes(
    x, w, s, b, y, M, N, K: gl.constexpr, BITS: gl.constexpr, GROUP: gl.constexpr,
    PARTS: gl.constexpr, R: gl.constexpr, TILES: gl.constexpr, W: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Multiply up to 8 TILES tokens by 16R rows per program; warp v takes parts v, v + W, ...

    Of 8 / PARTS columns, D in flight.
    """
    AFFINE: gl.constexpr = b is not None
    COLUMN: gl.constexpr = min(GROUP, 64)
    COLUMNS: gl.constexpr = K // COLUMN
    HELD: gl.constexpr = 8 // PARTS
    WIDTH: gl.constexpr = HELD * COLUMN
    MINE: gl.constexpr = ((COLUMNS + HELD - 1) // HELD + W - 1) // W
    ROW: gl.constexpr = K // 8 * BITS
    PART: gl.constexpr = WIDTH * BITS // 8
    PITCH: gl.constexpr = row_pitch(PART, BITS, COLUMN)
    X_PITCH: gl.constexpr = 2 * WIDTH + 16
    CODES: gl.constexpr = 16 * R * PITCH
    SLOT: gl.constexpr = CODES + 8 * TILES * X_PITCH
    SIZE: gl.constexpr = 2 if AFFINE else 1
    S_ROW: gl.constexpr = K // GROUP * SIZE
    S_PART: gl.constexpr = WIDTH // GROUP * SIZE
    WHOLE: gl.constexpr = scale_piece(S_ROW, S_PART) > 0
    S_HELD: gl.constexpr = S_PART if WHOLE else S_PART + 4
    S_PITCH: gl.constexpr = scale_pitch(MINE, S_HELD)
    SCALES: gl.constexpr = 16 * R * S_PITCH
    PER: gl.constexpr = D * SLOT + SIZE * SCALES
    tid = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    warp, lane = tid // 32, tid % 32
    g, t = lane // 4, lane % 4
    row0 = gl.program_id(0).to(gl.int64) * (16 * R)
    memory, ring = shared(PER * W, tid)
    base = ring + warp * PER
    place, start = base + D * SLOT, warp * PART
    first = w + row0 * ROW + start
    for d in gl.static_range(D):
        _request(base + d * SLOT, lane, first, d * W * PART, ROW - d * W * PART - start, R, ROW, PART, PITCH)
    for r in gl.static_range(R):
        to, row = place + 16 * r * S_PITCH, (row0 + 16 * r) * S_ROW
        copy_scales(to, s + row, s + (row + 8 * S_ROW), warp, lane, MINE, W, S_ROW, S_PART, S_HELD, S_PITCH)
        if AFFINE:
            copy_scales(to + SCALES, b + row, b + (row + 8 * S_ROW), warp, lane, MINE, W, S_ROW, S_PART, S_HELD, S_PITCH)
    run(WAIT_AND_LAUNCH, lane)
    for d in gl.static_range(D):
        _copy_x(base + (d * SLOT + CODES), lane, x, (warp + d * W) * WIDTH, M, K, 8 * TILES, WIDTH)
        run(COMMIT, lane)
    acc = ((tid * 0).to(gl.float32),) * (4 * R * TILES)
    word = 24 * t // 32 if BITS == 3 else t if BITS == 5 else word_count(BITS, COLUMN) * t
    mine = g * PITCH + word * 4
    after, shift = mine, mine
    if BITS == 3 or BITS == 5:
        after, shift = g * PITCH + gl.minimum(word + 1, BITS - 1) * 4, 8 * BITS * t % 32
    place += g * S_PITCH
    if not WHOLE:
        place += g * S_ROW % 4
    slot = base
    for i in range(MINE):
        run(wait_ptx(D - 1), lane)
        for c in gl.static_range(HELD):
            if c % 2 == 0:
                lines = ()
                for r in gl.static_range(2 * R):
                    at = place + (8 * r * S_PITCH + c * S_PART // HELD)
                    lines += (scales_at(at, SCALES, AFFINE, WHOLE, GROUP == 128),)  # type: ignore[assignment]
            at, tile = slot + c * (COLUMN * BITS // 8), slot + (CODES + c * (2 * COLUMN)) + g * X_PITCH
            there = None if COLUMNS % (HELD * W) == 0 else (warp + i * W) * HELD + c < COLUMNS
            acc = _add_column(
                acc, lines, at + mine, at + after, shift, tile, t, there,
                c % 2, BITS, COLUMN, AFFINE, R, TILES, PITCH, X_PITCH,
            )  # fmt: skip
        run(SYNC, lane)
        ahead = (i + D) * (W * PART)
        _request(slot, lane, first, ahead, ROW - ahead - start, R, ROW, PART, PITCH)
        _copy_x(slot + CODES, lane, x, (warp + (i + D) * W) * WIDTH, M, K, 8 * TILES, WIDTH)
        run(COMMIT, lane)
        slot = gl.where(slot == base + (D - 1) * SLOT, base, slot + SLOT)
        place += S_HELD
    _store(acc, ring, warp, lane, y, row0, M, N, R, TILES, W)
    memory._keep_alive()


def choose_tile(x: Tensor, weight: QTensor) -> tuple[int, int, int | None] | None:
    """Choose parts of eight columns, blocks of 16 rows per program, a cap on registers.

    None where shared memory is too small.
    """
    tokens, rows, most = x.shape[0], weight.shape[0], shared_nbytes(x.device)
    parts = 4 if weight.bits == 8 and weight.group < 128 else 2
    if weight.group == 32:
        parts //= 2
    wanted = 2 if tokens <= 8 else 4
    if rows < 8192:
        wanted //= 2
    for block in (4, 2, 1):
        if block <= wanted and rows % (16 * block) == 0 and _shared_nbytes(tokens, weight, parts, block) <= most:
            return parts, block, 128 if block == 2 and tokens <= 8 else None
    return None


def _shared_nbytes(tokens: int, weight: QTensor, parts: int, block: int) -> int:
    column, size = min(weight.group, 64), 1 if weight.biases is None else 2
    width = column * 8 // parts
    mine, held = cdiv(cdiv(weight.shape[1], width), WARPS), width // weight.group * size
    held += 0 if scale_piece(weight.shape[1] // weight.group * size, held) else 4
    codes = 16 * block * row_pitch(width * weight.bits // 8, weight.bits, column)
    x = (8 if tokens <= 8 else 16) * (2 * width + 16)
    return WARPS * (codes + x + 16 * size * block * scale_pitch(mine, held)) + 2048


def multiply(x: Tensor, weight: QTensor, out: Tensor) -> None:
    """Multiply up to MOST_TOKENS tokens by a weight, into bf16 [T, N]."""
    tokens, (rows, width) = x.shape[0], weight.shape
    plan = choose_tile(x, weight)
    assert plan is not None
    parts, block, cap = plan
    sizes = tokens, rows, width, weight.bits, weight.group, parts, block, 1 if tokens <= 8 else 2, WARPS, 1
    grid = (rows // (16 * block),)
    launch(matmul_codes, grid)(x, *in_bytes(weight), out, *sizes, num_warps=WARPS, maxnreg=cap, launch_pdl=True)
