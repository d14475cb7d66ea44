"""2 to 16 tokens times a four-bit affine weight on Hopper; the instructions of a warp are in `hopper/mma_int4.py`.

y[m, n] = Σ_k x[m, k] (code[n, k] scale[n, k/64] + bias[n, k/64]); codes eight to a word, low nibble first. As in
`matvec/int4.py` for one token, each warp has its own ring, here of codes and tokens.
"""

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.gpu.device import not_wgmma, shared_nbytes
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv
from auraflux.ops.hopper.copy import COMMIT, COPY8, COPY16, copy, wait_ptx
from auraflux.ops.hopper.mma_int4 import X_SHARED, codes_at, copy_halves, group_sums, load_x, sum_x
from auraflux.ops.hopper.ptx import SYNC, WAIT_AND_LAUNCH, bf16_at, run, shared
from auraflux.ops.hopper.shared_memory import long_at, put, word_at
from auraflux.ops.linear.cuda.matvec.int4 import operands
from auraflux.quant import QTensor

MOST_TOKENS = 16
TILE_TOKENS = 8
WARPS = 8


@gluon.jit
def _copy_x(slot, lane, source, there, M, K: gl.constexpr, TILES: gl.constexpr):
    """Copy 256 values of x of each token, 16-byte chunks swizzled by token."""
    for token in gl.static_range(8 * TILES):
        copy(COPY16, slot + token * 512 + ((lane ^ (token % 8)) * 16), source + lane * 8 + token * K, there & (token < M))


@gluon.jit
def matmul16(x, w, s, b, y, M, N, K: gl.constexpr, R: gl.constexpr, TILES: gl.constexpr, W: gl.constexpr, D: gl.constexpr):
    """Multiply up to 8 TILES tokens by 16R rows per program; warp v takes quads v, v + W, ... of four groups.

    A slot holds codes and x.
    """
    QUADS: gl.constexpr = K // 256
    MINE: gl.constexpr = (QUADS + W - 1) // W
    CODES: gl.constexpr = 2048 * R
    SLOT: gl.constexpr = CODES + 4096 * TILES
    SUMS: gl.constexpr = 4 * R * TILES
    BIASES: gl.constexpr = 128 * R * MINE
    PER: gl.constexpr = D * SLOT + 2 * BIASES
    tid = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    warp, lane = tid // 32, tid % 32
    g, t = lane // 4, lane % 4
    row0 = gl.program_id(0).to(gl.int64) * (16 * R)
    memory, ring = shared(PER * W, tid)
    base = ring + warp * PER
    scales = base + D * SLOT
    first, second = w + row0 * (K // 2), w + (row0 + 8 * R) * (K // 2)
    for d in gl.static_range(D):
        ahead = (warp + d * W) * 128
        copy_halves(base + d * SLOT, lane, first + ahead, second + ahead, warp + d * W < QUADS, K, 16 * R)
    for n in gl.static_range((16 * R * MINE + 31) // 32):
        e = lane + 32 * n
        quad = warp + e % MINE * W
        there = (e < 16 * R * MINE) & (quad < QUADS)
        copy(COPY8, scales + e * 8, s + (row0 + e // MINE) * QUADS + quad, there)
        copy(COPY8, scales + BIASES + e * 8, b + (row0 + e // MINE) * QUADS + quad, there)
    run(WAIT_AND_LAUNCH, lane)
    for d in gl.static_range(D):
        _copy_x(base + d * SLOT + CODES, lane, x + (warp + d * W) * 256, warp + d * W < QUADS, M, K, TILES)
        run(COMMIT, lane)
    acc = ((tid * 0).to(gl.float32),) * SUMS
    mine, x_mine = g * 128 + ((t // 2) ^ (g % 2)) * 16 + (t % 2) * 8 + (g // 2) * 32, g * 512 + ((2 * t) ^ g) * 16
    slot = base
    for i in range(MINE):
        q = warp + i * W
        run(wait_ptx(D - 1), lane)
        ss = ()
        bs = ()
        for r in gl.static_range(2 * R):
            at = scales + ((g + 8 * r) * MINE + i) * 8
            ss += (long_at(at),)  # type: ignore[assignment]
            bs += (long_at(at + BIASES),)  # type: ignore[assignment]
        for j in gl.static_range(4):
            xs = ()
            X = ()
            new = ()
            for m in gl.static_range(TILES):
                tile = slot + (CODES + m * 4096 + j * 128)
                xm = load_x(X_SHARED, "=r,=r,=r,=r,=r,=r,=r,=r,r,r", tile + x_mine, tile + (x_mine ^ 16))
                xs, X = xs + xm, X + sum_x(xm)
            for r in gl.static_range(R):
                c = group_sums(codes_at(slot + r * 2048 + (mine ^ (32 * j))), xs, X, TILES)
                for k in gl.static_range(4 * TILES):
                    a = acc[r * 4 * TILES + k] + bf16_at(ss[2 * r + k // 2 % 2], j) * c[k]
                    a += bf16_at(bs[2 * r + k // 2 % 2], j) * X[k // 4 * 2 + k % 2]
                    new += (gl.where(q < QUADS, a, acc[r * 4 * TILES + k]) if QUADS % W else a,)  # type: ignore[assignment]
            acc = new
        run(SYNC, lane)
        further = (q + D * W) * 128
        copy_halves(slot, lane, first + further, second + further, q + D * W < QUADS, K, 16 * R)
        _copy_x(slot + CODES, lane, x + (q + D * W) * 256, q + D * W < QUADS, M, K, TILES)
        run(COMMIT, lane)
        slot = gl.where(slot == base + (D - 1) * SLOT, base, slot + SLOT)
    gl.thread_barrier()
    for k in gl.static_range(SUMS):
        put(ring + (warp * SUMS + k) * 128 + lane * 4, acc[k])
    gl.thread_barrier()
    for p in gl.static_range((SUMS + W - 1) // W):
        k2 = warp + p * W
        out = (tid * 0).to(gl.float32)
        for v2 in gl.static_range(W):
            out += word_at(ring + (v2 * SUMS + k2 % SUMS) * 128 + lane * 4).to(gl.float32, bitcast=True)
        row, token2 = row0 + k2 // (4 * TILES) * 16 + g + k2 % 4 // 2 * 8, k2 // 4 % TILES * 8 + 2 * t + k2 % 2
        gl.store(y + token2 * N + row, out.to(gl.bfloat16), (token2 < M) & (k2 < SUMS))
    memory._keep_alive()


class Tile(NamedTuple):
    """Blocks of 16 rows of a program, slots of a warp's ring, warps, and a cap on registers."""

    blocks: int
    slots: int
    warps: int = WARPS
    registers: int | None = None

    def nbytes(self, tiles: int, width: int) -> int:
        """Return the shared memory for tiles of eight tokens."""
        scales = 256 * self.blocks * cdiv(width // 256, self.warps)
        return self.warps * (self.slots * (2048 * self.blocks + 4096 * tiles) + scales) + 2048


# where Tile(block, deep) does not fit
SMALL_TILES = (Tile(4, 1, 4), Tile(2, 1, 4), Tile(1, 1, 4))


def choose_tile(x: Tensor, weight: QTensor) -> Tile | None:
    """Choose a tile for up to MOST_TOKENS tokens; None where the shape is not supported."""
    tokens, (rows, width), most = x.shape[0], weight.shape, shared_nbytes(x.device)
    if rows % 64 or width % 256:
        return None
    tiles = 1 if tokens <= TILE_TOKENS else 2
    # 128 registers fit two programs on each multiprocessor
    if rows >= 8192 and tokens <= 8 and width <= 8192 and (tile := Tile(2, 1, registers=128)).nbytes(1, width) <= most:
        return tile
    block = 4 if rows >= 8192 else 2 if rows >= 4096 else 1
    deep = 2 if width > 2048 and rows < 8192 else 1
    if not_wgmma(x.device) and tiles == 2 and block > 1 and Tile(block, deep).nbytes(tiles, width) > most:
        # programs with fewer rows would load the tokens more often; with fewer warps the rows fit
        return next((tile for tile in SMALL_TILES if tile.blocks <= block and tile.nbytes(tiles, width) <= most), None)
    while Tile(block, deep).nbytes(tiles, width) > most:
        if (block, deep) == (1, 1):
            return None
        block, deep = (block, 1) if deep == 2 else (block // 2, 1)
    return Tile(block, deep)


def multiply(x: Tensor, weight: QTensor, out: Tensor) -> None:
    """Multiply up to MOST_TOKENS tokens by a weight, into bf16 [T, N]."""
    tokens, (rows, width) = x.shape[0], weight.shape
    tile = choose_tile(x, weight)
    assert tile is not None
    sizes = tokens, rows, width, tile.blocks, 1 if tokens <= 8 else 2, tile.warps, tile.slots
    grid, options = (rows // (16 * tile.blocks),), {"num_warps": tile.warps, "maxnreg": tile.registers}
    launch(matmul16, grid)(x, *operands(weight), out, *sizes, **options, launch_pdl=True)
