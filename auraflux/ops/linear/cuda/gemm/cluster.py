"""Tens of tokens times small four-bit weights on Hopper, optionally with residual add and norm.

One launch, no partial sums in memory.

- A cluster of programs multiplies some rows by all tokens. Its programs split K, so that every multiprocessor reads even where
  rows are few, and send their sums to the one that reduces those rows: the order of additions is fixed.
- A program's codes fit its shared memory, and are all requested before the previous kernel has ended.
- Weights are dequantized in registers to bf16, over 2**64 as in `wgmma.py`, and multiplied by `wgmma`. Pair j of a word is
  codes j and j + 4, 16 bits from each other; lane t of four has words t and t + 4 of each eight. Tokens lie in shared memory in
  that order: by 64 inputs, by pair, by the word's half, by token, by the word's number.
- A norm costs no launch: a cluster loads all of every token, multiplies it by the norm's weight, and its results by the factor
  that the squares give.
"""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.gpu.device import multiprocessors, shared_nbytes
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv, power_of_two
from auraflux.ops.hopper.copy import COMMIT, COPY8, COPY16, copy, wait_ptx
from auraflux.ops.hopper.ptx import CLUSTER_ARRIVE, CLUSTER_WAIT, FENCE, WAIT_AND_LAUNCH, run
from auraflux.ops.linear.cuda.call import NO_NORM, FusedNorm, NoNorm
from auraflux.ops.linear.cuda.gemm.cluster_parts import load_tokens, send_squares, send_unit, sizes_of, store_sums
from auraflux.ops.linear.cuda.gemm.cluster_ptx import room, threads
from auraflux.ops.linear.cuda.row_copies import products_of, select_weight
from auraflux.quant import QTensor

MOST_TOKENS = 64
MOST_WEIGHTS = 4  # per launch
MOST_PROGRAMS = 8  # per cluster
CHUNK = 512  # inputs of a program, or twice as many
WARPS = 8
EARLY = 32  # tokens up to which sums and codes of two programs fit a multiprocessor's shared memory
# (tokens up to, programs per multiprocessor up to): beyond, other kernels are as fast on an H200
PROGRAMS_EACH = ((16, 3), (32, 2), (64, 1))


@gluon.constexpr_function
def _multiply_ptx(tiles, groups, pitch, line, biases, half, group):
    """Return PTX for a warp's 16 rows times all tokens. In: addresses of a lane's codes, scales and tokens."""
    n, chains = 4 * tiles, max(1, min(4, 16 // tiles))
    codes, lines = f"${n}", f"${n + 1}"
    # a product depends on the previous one of its chain, so several chains are interleaved
    sums = [[f"${m}" if c == 0 else f"f{n * c + m}" for m in range(n)] for c in range(chains)]
    text = f"{{.reg .f32 f<{n * chains}>; .reg .b32 d,r,up,less,down,u<8>,w<4>,s<2>,o<2>,b<2>,a<16>; .reg .b64 at,x;"
    text += ".reg .pred p,z;"
    text += "setp.eq.u32 p,0,0; setp.ne.u32 z,0,0; mov.b32 up,0x62006200; mov.b32 less,0x60006000; mov.b32 down,0x1F801F80;"
    # matrices of eight tokens by eight inputs, 128 bytes each, contiguous; stride `half` along K
    text += f"and.b32 d,${n + 2},0x3FFFF; shr.u32 d,d,4; cvt.u64.u32 x,d; or.b64 x,x,{hex(half >> 4 << 16 | 8 << 32)};"
    for q in range(groups + 1):
        # prefetch words of one group and scales of two groups: rows g and g + 8
        if q < groups:
            ahead = "".join(
                f"ld.shared.b32 u{q % 2 * 4 + i},[{codes}+{i % 2 * 8 * pitch + q * 32 + i // 2 * 16}];" for i in range(4)
            )
            if q % 2 == 0:
                ahead += "".join(
                    f"ld.shared.b32 w{i},[{lines}+{i // 2 * biases + i % 2 * 8 * line + 2 * q}];" for i in range(4)
                )
        if q == 0:
            text += ahead
            continue
        k, how = q - 1, ("0x1010", "0x3232")[(q - 1) % 2]
        for i in range(2):
            text += f"prmt.b32 d,w{i},w{i},{how}; mul.rn.bf16x2 s{i},d,up; mul.rn.bf16x2 o{i},d,less;"
            text += f"prmt.b32 d,w{2 + i},w{2 + i},{how}; mul.rn.bf16x2 b{i},d,down;"
        text += ahead if q < groups else ""
        for j in range(4):
            a, mask = j * 4, ("0x000F000F", "0x00F000F0")[j % 2]
            for i in range(4):
                word = f"u{k % 2 * 4 + i}"
                text += f"shr.u32 {word},{word},8;" if j == 2 else ""
                text += f"and.b32 r,{word},{mask}; fma.rn.bf16x2 a{a + i},r,{'so'[j % 2]}{i % 2},b{i % 2};"
            text += f"add.s64 at,x,{k * group + 2 * j * half >> 4}; wgmma.fence.sync.aligned;"
            text += f"wgmma.mma_async.sync.aligned.m64n{8 * tiles}k16.f32.bf16.bf16 {{{','.join(sums[j % chains])}}},"
            text += f"{{a{a},a{a + 1},a{a + 2},a{a + 3}}},at,{'p' if 4 * k + j >= chains else 'z'},1,1,0;"
            text += "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 3;"
    text += "wgmma.wait_group.sync.aligned 0;"
    for more in sums[1:]:
        text += "".join(f"add.f32 {first},{first},{second};" for first, second in zip(sums[0], more, strict=True))
    return text + "}"


@gluon.constexpr_function
def _multiply_registers(tiles):
    return "=&f," * 4 * tiles + "r,r,r,~{memory}"


@gluon.jit
def _multiply(base, lane, warp, S: gl.constexpr):
    SUMS: gl.constexpr = 4 * S.tiles
    PTX: gl.constexpr = _multiply_ptx(S.tiles, S.chunk // 64, S.pitch, S.line, 16 * S.blocks * S.line, S.half, S.group)
    row = warp * 16 + lane // 4
    args = [base + row * S.pitch + lane % 4 * 4, base + 16 * S.blocks * S.pitch + row * S.line, base + S.tokens_at]
    return gl.inline_asm_elementwise(PTX, _multiply_registers(S.tiles), args, (gl.float32,) * SUMS, is_pure=False, pack=1)


@gluon.jit
def _request(base, tid, codes, row0, rows, rank, S: gl.constexpr):
    """Request a program's codes, scales and biases; past the end, the last row again."""
    EACH: gl.constexpr = S.part // 16
    THREADS: gl.constexpr = 32 * S.warps
    for n in gl.static_range(16 * S.blocks * EACH // THREADS):
        e = tid + THREADS * n
        r, c = e // EACH, e % EACH
        at = gl.minimum(row0 + r, rows - 1).to(gl.int64) * S.row + rank * S.part + c * 16
        copy(COPY16, base + r * S.pitch + c * 16, codes.packed + at, tid >= 0)
    SIZE: gl.constexpr = min(S.line, 16)
    LINES: gl.constexpr = 16 * S.blocks * S.line // SIZE
    for n in gl.static_range((2 * LINES + THREADS - 1) // THREADS):
        e = tid + THREADS * n
        r, c = e % LINES // (S.line // SIZE), e % (S.line // SIZE)
        at = gl.minimum(row0 + r, rows - 1).to(gl.int64) * (S.width // 32) + rank * S.line + c * SIZE
        source = gl.where(e < LINES, (codes.scales + at).to(gl.int64), (codes.biases + at).to(gl.int64))
        # all biases lie after all scales
        copy(COPY16 if SIZE == 16 else COPY8, base + 16 * S.blocks * S.pitch + e * SIZE, source, e < 2 * LINES)


@gluon.jit(do_not_specialize_on_alignment=["tokens"])
def matmul_batch(
    x, normed, products, rows, ends, clusters, tokens, K: gl.constexpr, TILES: gl.constexpr, W: gl.constexpr, C: gl.constexpr,
    LATE: gl.constexpr,
):  # fmt: skip
    """Multiply up to 8 TILES tokens by 16 rows for each of W warps of a cluster's C programs, which split K.

    Clusters of the weights follow each other, see `select_weight`. With a norm, x is the residual stream and delta, if any,
    is added to it; the sum goes to `total`. LATE: shared memory is used twice, for codes and then for sums.
    """
    S: gl.constexpr = sizes_of(K, W, TILES, W, 1, C, False, LATE)
    NORMED: gl.constexpr = normed.weight is not None
    everyone = gl.arange(0, 32 * W * C, threads(W, C))
    rank, tid = everyone // (32 * W), everyone % (32 * W)
    warp, lane = tid // 32, tid % 32
    program = gl.program_id(0)
    own, number = select_weight(program, ends, [(each.codes, each.out) for each in products])
    codes, y = own
    # tensors, even where the compiler knows the numbers
    rows, _ = select_weight(program, ends, [0 * program + count for count in rows])
    row0 = number * (16 * W)
    memory, base = room(S.nbytes, everyone, C)
    _request(base, tid, codes, row0, rows, rank, S)
    run(COMMIT, lane)
    if C > 1 and not LATE:
        run(CLUSTER_ARRIVE, lane)
    run(WAIT_AND_LAUNCH, lane)
    load_tokens(base, tid, x, normed, tokens, rank, program, clusters, S)
    # make stores to shared memory visible to the tensor cores
    run(FENCE, lane)
    run(wait_ptx(0), lane)
    gl.thread_barrier()
    acc = _multiply(base, lane, warp, S)
    if C > 1:
        if LATE:
            run(CLUSTER_ARRIVE, lane)
        # all programs of the cluster have started, or, if LATE, have multiplied
        run(CLUSTER_WAIT, lane)
    elif LATE:
        gl.thread_barrier()
    for n in gl.static_range(TILES):
        send_unit((acc[4 * n], acc[4 * n + 1], acc[4 * n + 2], acc[4 * n + 3]), base, lane, rank, warp * TILES + n, S)
    if NORMED:
        send_squares(base, tid, rank, S)
    if C > 1:
        run(CLUSTER_ARRIVE, lane)
        run(CLUSTER_WAIT, lane)
    else:
        gl.thread_barrier()
    store_sums(y, base, warp, lane, rank, row0, rows, tokens, normed.eps if NORMED else 0.0, NORMED, S)
    memory._keep_alive()


@cache
def _programs(tokens: int, rows: tuple[int, ...], width: int, processors: int, most_nbytes: int) -> int | None:
    """Return how many programs split K; None where K does not split evenly, or where other kernels are as fast."""
    programs = min(MOST_PROGRAMS, width // CHUNK)
    if not programs or width // programs not in (CHUNK, 2 * CHUNK) or width % programs or programs & (programs - 1):
        return None
    sizes = sizes_of(width, WARPS, _tiles(tokens), WARPS, 1, programs, False, tokens > EARLY)
    each = next(count for most, count in PROGRAMS_EACH if tokens <= most)
    many = sum(cdiv(count, 16 * WARPS) for count in rows) * programs > each * processors
    return None if many or sizes.nbytes + 2048 > most_nbytes else programs


def refuses(x: Tensor, weights: Sequence[QTensor]) -> str | None:
    """Return why other kernels are as fast or this one does not run; None if it takes the call."""
    return None if _programs_of(x, weights) is not None else "the width does not split evenly, or there are too many rows"


def _programs_of(x: Tensor, weights: Sequence[QTensor]) -> int | None:
    rows, device = tuple(weight.shape[0] for weight in weights), x.device
    return _programs(x.shape[0], rows, x.shape[1], multiprocessors(device), shared_nbytes(device))


def _tiles(tokens: int) -> int:
    return power_of_two(cdiv(tokens, 8))


def multiply(x: Tensor, weights: Sequence[QTensor], outs: Sequence[Tensor], normed: FusedNorm | NoNorm = NO_NORM) -> None:
    """Multiply tokens by up to MOST_WEIGHTS weights of one width in one launch.

    normed  residual add and norm applied to x first
    """
    (tokens, width), programs = x.shape, _programs_of(x, weights)
    assert programs is not None
    rows = tuple(out.shape[-1] for out in outs)
    ends = tuple(accumulate(cdiv(count, 16 * WARPS) for count in rows))
    launch(matmul_batch, (ends[-1],))(
        x, normed, products_of(weights, outs), rows, ends[:-1], ends[-1], tokens,
        width, _tiles(tokens), WARPS, programs, tokens > EARLY, num_warps=WARPS, num_ctas=programs, launch_pdl=True,
    )  # fmt: skip
