"""One step of decode attention over codes, per warp: U blocks of 16 tokens from shared memory to scores, and from softmax
weights to output sums. Layouts are those of `mma.m16n8k16`, with warps as the batch."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from auraflux.ops.turboquant.cuda.decode.codes_3_6_bits import look_up_units, read_units
from auraflux.ops.turboquant.cuda.decode.lookup import NOTHING, look_up, read, read_norms, side_offset
from auraflux.ops.turboquant.cuda.decode.ring import key_words, pieces

TRANSPOSE = gl.constexpr("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;")


@gluon.constexpr_function
def sum_layout(warps):
    """Return the layout of softmax sums [warps, 8, 8], after adding tokens of one thread."""
    lanes = [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    bases = [[1 << i, 0, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout([[0, 0, 1]], lanes, bases, [], [warps, 8, 8])


@gluon.jit
def halves(p, NW: gl.constexpr):
    """Add the tokens of one thread: [warps, 8, 8]."""
    return gl.convert_layout(gl.sum(gl.reshape(p, [NW, 2, 8, 8]), 1), sum_layout(NW), assert_trivial=True)


@gluon.jit
def sums(parts, NW: gl.constexpr):
    """Reduce softmax sums per head, in the layout of maxima."""
    M: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [NW, 1, 1], [1, 16, 8])
    return gl.convert_layout(gl.sum(parts, 1), gl.SliceLayout(1, M), assert_trivial=True)


@gluon.jit
def halved(decay, NW: gl.constexpr):
    return gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, sum_layout(NW)), assert_trivial=True), 1)


@gluon.jit
def seen_of(key, low, end, WINDOW: gl.constexpr, U: gl.constexpr):
    """Return the attention mask of a step's blocks: [warps, 16] each."""
    blocks = ()
    for u in gl.static_range(U):
        seen = key < end - 16 * u
        if WINDOW:
            seen &= key >= low - 16 * u
        blocks = blocks + (seen,)  # type: ignore[assignment]  # noqa: RUF005
    return blocks


@gluon.jit
def keys_at(at, stage, D: gl.constexpr, BITS: gl.constexpr, U: gl.constexpr, NW: gl.constexpr):
    """Read a step's blocks from the ring: words of keys, norms of keys and of values."""
    LS: gl.constexpr = gl.SliceLayout(2, gl.NVMMADistributedLayout([2, 0], [NW, 1, 1], [1, 16, 8]))
    blocks = ()
    for u in gl.static_range(U):
        words = _read_keys(at[0] + stage + u * (2 * D * BITS), D, BITS, NW)
        kn, vn = read_norms(at[2] + stage + u * 128, LS, NW)
        blocks = blocks + ((words, kn, vn),)  # type: ignore[assignment]  # noqa: RUF005
    return blocks


@gluon.jit
def values_at(at, stage, D: gl.constexpr, BITS: gl.constexpr, U: gl.constexpr, NW: gl.constexpr):
    blocks = ()
    for u in gl.static_range(U):
        words = _read_values(at[1] + stage + u * (2 * D * BITS), D, BITS, NW)
        blocks = blocks + (words,)  # type: ignore[assignment]  # noqa: RUF005
    return blocks


@gluon.jit
def all_logits(keys, seen, m, qx, mean, column, place, cap, CONFIG: gl.constexpr):
    """Return the scores of a step's blocks, which share one mean, and the running maximum."""
    U: gl.constexpr = CONFIG.work.blocks
    highest = _scores(keys[0][0], qx, keys[0][1], seen[0], mean, column, place, cap, CONFIG)
    scores = (highest,)
    for u in gl.static_range(1, U):
        more = _scores(keys[u][0], qx, keys[u][1], seen[u], mean, column, place, cap, CONFIG)
        scores = scores + (more,)  # type: ignore[assignment]  # noqa: RUF005
        highest = gl.maximum(highest, more)
    return scores, gl.maximum(m, gl.max(highest, 1))


@gluon.jit
def _column_of(column, BITS: gl.constexpr):
    """Return the offset of a lane's column in a table row: at 2 bits a column of two words serves two lanes."""
    return (column * 2) & 0x78 if BITS == 2 else column


@gluon.constexpr_function
def _unit_offsets(first, count, rest):
    return tuple(h * first + i * rest for h in range(2) for i in range(count))


@gluon.jit
def _read_keys(at, D: gl.constexpr, BITS: gl.constexpr, NW: gl.constexpr):
    KW: gl.constexpr = key_words(D, BITS)[0]
    CW: gl.constexpr = key_words(D, BITS)[1]
    J: gl.constexpr = KW // 4 // CW
    return read_units(at, _unit_offsets(32 * KW, J, 48)) if BITS % 3 == 0 else read(at, 2 * J, CW, 2 * J, NW)


@gluon.jit
def _read_values(at, D: gl.constexpr, BITS: gl.constexpr, NW: gl.constexpr):
    VW: gl.constexpr = D * BITS // 128  # words per lane of 8 tokens
    PIECES: gl.constexpr = pieces(VW)
    return (
        read_units(at, _unit_offsets(128 * VW, VW // 3, 12))
        if BITS % 3 == 0
        else read(at, 2 * PIECES[0], PIECES[1], 2, NW, PIECES[0])
    )


@gluon.jit
def _scores(kw, qx, kn, seen, mean, column, place, cap, CONFIG: gl.constexpr):
    """Return scores [warps, 16 tokens, 8 heads] of a block of keys, plus `mean`, the scores of the key mean, if given."""
    D: gl.constexpr = CONFIG.shape.width
    BITS: gl.constexpr = CONFIG.shape.key_bits
    NW: gl.constexpr = CONFIG.work.warps
    CHUNK: gl.constexpr = 32 * key_words(D, BITS)[1] // BITS
    J: gl.constexpr = D // (4 * CHUNK)
    M: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [NW, 1, 1], [1, 16, 8])
    if BITS % 3 == 0:
        kx = gl.reshape(look_up_units(kw, column, place, 0, BITS, 2 * J), [NW, 8, 4, 2, J, CHUNK // 2, 2])
        kx = gl.permute(kx, [0, 3, 1, 4, 5, 2, 6])
    else:
        kx = gl.reshape(
            look_up(kw, _column_of(column, BITS), place, 0, BITS, CONFIG.work.compact), [NW, 2, J, 8, 4, CHUNK // 2, 2]
        )
        kx = gl.permute(kx, [0, 1, 3, 2, 5, 4, 6])
    kx = gl.convert_layout(
        gl.reshape(kx, [NW, 16, D]), gl.DotOperandLayout(0, M, 2), assert_trivial=True
    )  # h, g | j, pair, c, e
    s = mma_v2(kx, qx, gl.full([NW, 16, 8], 0.0, gl.float32, M)) * kn[:, :, None]
    if mean is not None:
        s += mean
    if CONFIG.softcap:
        # tanh by one exponential: only its absolute error matters here
        s = cap - 2.0 * cap / (gl.exp2(s) + 1.0)
    return gl.where(seen[:, :, None], s, NOTHING)


@gluon.jit
def weights(p, vn, seen, NW: gl.constexpr):
    """Return softmax weights times value norms as the second operand of the output product."""
    B: gl.constexpr = gl.DotOperandLayout(1, gl.NVMMADistributedLayout([2, 0], [NW, 1, 1], [1, 16, 8]), 2)
    # masked tokens may have norms that are not finite
    weights = (p * gl.where(seen, vn, 0.0)[:, :, None]).to(gl.float16)
    # tokens are rows of the scores and columns of the next operand: transpose 8x8 blocks inside the warp
    px = gl.inline_asm_elementwise(TRANSPOSE, "=r,r", [weights], dtype=gl.float16, is_pure=False, pack=2)
    px = gl.reshape(gl.permute(gl.reshape(px, [NW, 2, 8, 8]), [0, 1, 3, 2]), [NW, 16, 8])
    return gl.convert_layout(px, B, assert_trivial=True)


@gluon.jit
def value_tile(vw, column, place, CONFIG: gl.constexpr):
    """Decode values [warps, D, 16 tokens] of a block as the first operand of the output product."""
    BITS: gl.constexpr = CONFIG.shape.value_bits
    D: gl.constexpr = CONFIG.shape.width
    NW: gl.constexpr = CONFIG.work.warps
    COMPACT: gl.constexpr = CONFIG.work.compact
    SIDE: gl.constexpr = side_offset(COMPACT, CONFIG.shape.key_bits == BITS)
    A: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([2, 0], [NW, 1, 1], [1, 16, 8]), 2)
    if BITS % 3 == 0:
        vx = gl.reshape(look_up_units(vw, column, place, SIDE, BITS, D * BITS // 192), [NW, 8, 4, 2, D // 8, 2])
        vx = gl.permute(vx, [0, 4, 1, 3, 2, 5])
    else:
        vx = gl.reshape(look_up(vw, _column_of(column, BITS), place, SIDE, BITS, COMPACT), [NW, 2, 8, 4, D // 8, 2])
        vx = gl.permute(vx, [0, 4, 2, 1, 3, 5])
    return gl.convert_layout(gl.reshape(vx, [NW, D, 16]), A, assert_trivial=True)  # x, g | h, c, e
