"""Key calibration and full-precision tokens (sink and recent window) in decode attention.

Key means. The product of a query with the mean of a block of positions depends on the RoPE angles in the block's middle:
channels of equal angle are summed first, so a query has one coefficient per cosine and per sine. Tensor cores multiply them by
16 blocks at a time, those of a warp's next 16 steps.

Full-precision tokens. They are stored rotated like codes, so they are one more step without a look-up, 16 per warp. They are a
separate split where another program fits on the GPU; otherwise the last warps of a row's last split, which have the fewest
codes, take them before their first step. Layouts are those of `step.py`.
"""

import weakref
from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from auraflux.ops.turboquant.calibration import BLOCK, Calibration
from auraflux.ops.turboquant.cuda.decode.lookup import NOTHING, per_warp, query_layout, query_rows
from auraflux.ops.turboquant.cuda.decode.ring import key_words
from auraflux.ops.turboquant.cuda.decode.step import halves, sum_layout, weights

STEPS = gl.constexpr(16)  # steps of a warp whose means are scored at once
MEAN_BLOCK = gl.constexpr(BLOCK)
ANGLE_CHUNK = gl.constexpr(8)  # neighbouring angles per lane
# lanes 4g to 4g + 3 hold rows g and g + 8 of a product, two columns of each: select row $8 % 16
ROW = gl.constexpr(
    "{.reg .pred p; .reg .b32 c, l, h; .reg .f32 a, b; mov.u32 c, %laneid; and.b32 c, c, 3;"
    "shl.b32 l, $8, 2; and.b32 l, l, 28; or.b32 l, l, c; and.b32 h, $8, 8; setp.ne.u32 p, h, 0;"
    "selp.f32 a, $6, $4, p; selp.f32 b, $7, $5, p;"
    "shfl.sync.idx.b32 a, a, l, 31, -1; shfl.sync.idx.b32 b, b, l, 31, -1;"
    "mov.f32 $0, a; mov.f32 $1, b; mov.f32 $2, a; mov.f32 $3, b;}"
)


class KeyMeans(NamedTuple):
    """Key calibration as decode attention takes it.

    scale, along, across  see `Calibration`
    pairs   [2, D / 2]    int32, channels rotated by the same RoPE angle
    angles  [blocks, D]   float16, cosines of these angles in the middle of each block, then sines
    blocks                number of blocks
    """

    scale: Tensor
    along: Tensor
    across: Tensor
    pairs: Tensor
    angles: Tensor
    blocks: int


_angles: dict[int, tuple[Any, tuple[Tensor, Tensor]]] = {}


def _angles_of(calibration: Calibration) -> tuple[Tensor, Tensor]:
    """Return `pairs` and `angles`, computed once for all layers that share a table."""
    table = calibration.table
    key = id(table)
    known = _angles.get(key)
    reference, found = (lambda: None, None) if known is None else known
    if found is None or reference() is not table:
        pairs = calibration.pairs().to(table.device)
        found = pairs, table[:, :, pairs[0].long()].flatten(1).half().contiguous()
        # dropped with the table, before another tensor can reuse its id
        _angles[key] = weakref.ref(table, lambda _: _angles.pop(key, None)), found
    return found


def key_means(calibration: Calibration | None) -> KeyMeans | None:
    if calibration is None:
        return None
    vectors = calibration.scale, calibration.along, calibration.across
    return KeyMeans(*vectors, *_angles_of(calibration), len(calibration.table))


@gluon.constexpr_function
def _row_layout(warps, width, chunk):
    """Return the layout of rows [warps, 16, width] as loaded: a lane has `chunk` neighbours of every 4 * chunk, of two rows."""
    regs = [[0, 0, 1 << i] for i in range(width.bit_length() - 1) if 1 << i not in (chunk, 2 * chunk)] + [[0, 8, 0]]
    lanes = [[0, 0, chunk], [0, 0, 2 * chunk], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return per_warp(regs, lanes, [warps, 16, width])


@gluon.constexpr_function
def _value_layout(warps, width):
    """Return the layout of rows [warps, 16, width] for the output product: a lane has an eighth of four rows."""
    eighth = width // 8
    regs = [[0, 0, 1 << i] for i in range(eighth.bit_length() - 1)] + [[0, 1, 0], [0, 8, 0]]
    lanes = [[0, 2, 0], [0, 4, 0], [0, 0, eighth], [0, 0, 2 * eighth], [0, 0, 4 * eighth]]
    return per_warp(regs, lanes, [warps, 16, width])


@gluon.jit
def _first_operand(x, CHUNK: gl.constexpr, NW: gl.constexpr):
    """Convert rows [warps, 16, D] in `_row_layout` to the first operand of products with queries."""
    D: gl.constexpr = x.shape[2]
    A: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([2, 0], [NW, 1, 1], [1, 16, 8]), 2)
    x = gl.permute(gl.reshape(x, [NW, 16, D // (4 * CHUNK), 4, CHUNK // 2, 2]), [0, 1, 2, 4, 3, 5])
    return gl.convert_layout(gl.reshape(x, [NW, 16, D]), A, assert_trivial=True)


@gluon.jit
def angle_channels(means, D: gl.constexpr, NW: gl.constexpr):
    """Load, for each cosine and each sine, the two channels rotated by its angle."""
    LR: gl.constexpr = gl.BlockedLayout([1, D // 32], [1, 32], [NW, 1], [1, 0])
    j = gl.arange(0, D, layout=gl.SliceLayout(0, LR))[None, :]
    return gl.load(means.pairs + j % (D // 2)), gl.load(means.pairs + D // 2 + j % (D // 2))


@gluon.jit
def angle_weights(means, channels, head, D: gl.constexpr, NW: gl.constexpr):
    """Load the mean coefficients that queries are multiplied by at these channels."""
    LR: gl.constexpr = gl.BlockedLayout([1, D // 32], [1, 32], [NW, 1], [1, 0])
    j = gl.arange(0, D, layout=gl.SliceLayout(0, LR))[None, :]
    found = ()
    for i in gl.static_range(2):
        at = head * D + channels[i]
        along, across = gl.load(means.along + at), gl.load(means.across + at)
        found = found + ((channels[i], gl.where(j < D // 2, along, across)),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@gluon.jit
def angle_queries(q, weights, live, D: gl.constexpr, NW: gl.constexpr, EVEN_COLUMNS: gl.constexpr):
    """Return the coefficients of 8 queries for each cosine and each sine: [8, D]."""
    LR: gl.constexpr = gl.BlockedLayout([1, D // 32], [1, 32], [NW, 1], [1, 0])
    row, there = query_rows(live, EVEN_COLUMNS, gl.SliceLayout(1, LR))
    x = gl.full([8, D], 0.0, gl.float32, LR)
    for i in gl.static_range(2):
        channel, weight = weights[i]
        x += gl.load(q + row[:, None] * D + channel, mask=there[:, None], other=0.0).to(gl.float32) * weight
    return x


@gluon.jit
def angles_at(means, position, D: gl.constexpr, NW: gl.constexpr):
    """Load the angles [warps, 16, D] of the blocks of positions [warps, 16], in `_row_layout`."""
    LT: gl.constexpr = _row_layout(NW, D, ANGLE_CHUNK)
    block = gl.minimum(gl.maximum(position, 0) // MEAN_BLOCK, means.blocks - 1)
    d = gl.arange(0, D, layout=gl.SliceLayout(0, gl.SliceLayout(1, LT)))[None, None, :]
    return gl.load(means.angles + gl.expand_dims(block, 2) * D + d)


@gluon.jit
def mean_scores(angles, stored, D: gl.constexpr, NW: gl.constexpr):
    """Return scores [warps, 16, 8 heads] of the means at given angles; `stored` has the queries of `angle_queries`."""
    LQ: gl.constexpr = query_layout(NW, D, ANGLE_CHUNK)
    M: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [NW, 1, 1], [1, 16, 8])
    B: gl.constexpr = gl.DotOperandLayout(1, M, 2)
    angles = _first_operand(angles, ANGLE_CHUNK, NW)
    warps = gl.arange(0, NW, layout=gl.SliceLayout(1, gl.SliceLayout(2, LQ)))[:, None, None]
    x = gl.expand_dims(stored.load(gl.SliceLayout(0, LQ)), 0) + (warps * 0).to(gl.float16)
    x = gl.reshape(x, [NW, 8, D // (4 * ANGLE_CHUNK), 4, ANGLE_CHUNK // 2, 2])
    x = gl.convert_layout(gl.reshape(gl.permute(x, [0, 2, 4, 3, 5, 1]), [NW, D, 8]), B, assert_trivial=True)
    return mma_v2(angles, x, gl.full([NW, 16, 8], 0.0, gl.float32, M))


@gluon.jit
def row_positions(first, stride, D: gl.constexpr, NW: gl.constexpr, EACH: gl.constexpr):
    """Return positions [warps, 16]: `first` + EACH per warp + `stride` per row."""
    LP: gl.constexpr = gl.SliceLayout(2, _row_layout(NW, D, ANGLE_CHUNK))
    warp = gl.arange(0, NW, layout=gl.SliceLayout(1, LP))[:, None]
    return first + warp * EACH + gl.arange(0, 16, layout=gl.SliceLayout(0, LP))[None, :] * stride


@gluon.jit
def mean_scores_of_step(found, i):
    """Broadcast the mean score of a warp's i-th step among those of 16 steps [warps, 16, 8] to all 16 rows."""
    return gl.inline_asm_elementwise(ROW, "=f,=f,=f,=f,f,f,f,f,r,r,r,r", [found, i], gl.float32, is_pure=False, pack=4)


@gluon.jit
def _places(
    full,
    sequence,
    position,
    newest,
    head,
    last,
    LAYOUT: gl.constexpr,
    HEADS: gl.constexpr,
    FULL: gl.constexpr,
    NW: gl.constexpr,
):
    """Return the positions of full-precision tokens, 16 per warp, and their rows among sink and among recent tokens."""
    n = (NW - 1 - gl.arange(0, NW, layout=gl.SliceLayout(1, LAYOUT))[:, None]) * 16
    n += gl.arange(0, 16, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    oldest = gl.maximum(position + 1 - FULL.recent_window, FULL.sink_tokens)
    at = gl.where(n < FULL.sink_tokens, n, oldest + n - FULL.sink_tokens)
    sink_row, recent = (n * 0).to(gl.int64), (n * 0).to(gl.int64)
    there = at <= newest
    if last is not None:
        there &= last
    if FULL.sink_tokens:
        page = gl.load(full.sink_table + sequence)
        there &= (n >= FULL.sink_tokens) | ((page >= 0) & (page < full.sink_pool))
        sink_row = (page.to(gl.int64) * HEADS + head) * FULL.sink_tokens + gl.minimum(n, FULL.sink_tokens - 1)
    if FULL.recent_window:
        here = there & (n >= FULL.sink_tokens) & (at < full.recent_width * FULL.page)
        page = gl.load(full.recent_table + sequence.to(gl.int64) * full.recent_width + at // FULL.page, mask=here, other=0)
        there &= (n < FULL.sink_tokens) | (here & (page >= 0) & (page < full.recent_pool))
        recent = (page.to(gl.int64) * HEADS + head) * FULL.page + at % FULL.page
    else:
        there &= n < FULL.sink_tokens
    return n, at, there, sink_row, recent


@gluon.jit
def _rows(sink_row, recent, places, D: gl.constexpr, LAYOUT: gl.constexpr, FULL: gl.constexpr):
    """Load full-precision rows [warps, 16, D] as float16, zeros where masked."""
    n, _, there, first, other = places
    d = gl.arange(0, D, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    x = gl.full([there.shape[0], 16, D], 0.0, gl.float16, LAYOUT)
    if FULL.recent_window:
        x = gl.load(
            recent + gl.expand_dims(other * D, 2) + d, mask=gl.expand_dims(there & (n >= FULL.sink_tokens), 2), other=0.0
        )
        x = x.to(gl.float16)
    if FULL.sink_tokens:
        more = gl.load(
            sink_row + gl.expand_dims(first * D, 2) + d, mask=gl.expand_dims(there & (n < FULL.sink_tokens), 2), other=0.0
        )
        x = gl.where(gl.expand_dims(n < FULL.sink_tokens, 2), more.to(gl.float16), x)
    return x


@gluon.jit
def full_precision_rows(
    full, sequence, position, newest, head, last, SHAPE: gl.constexpr, FULL: gl.constexpr, NW: gl.constexpr
):
    """Locate the full-precision rows of a token, in the layouts of keys and of values, if `last` or it is None.

    newest  the last position: the token's own, or the one before
    """
    D: gl.constexpr = SHAPE.width
    CHUNK: gl.constexpr = 32 * key_words(D, SHAPE.key_bits)[1] // SHAPE.key_bits
    LK: gl.constexpr = gl.SliceLayout(2, _row_layout(NW, D, CHUNK))
    LV: gl.constexpr = gl.SliceLayout(2, _value_layout(NW, D))
    keys = _places(full, sequence, position, newest, head, last, LK, SHAPE.heads, FULL, NW)
    return keys, _places(full, sequence, position, newest, head, last, LV, SHAPE.heads, FULL, NW)


@gluon.jit
def full_precision_keys(full, places, SHAPE: gl.constexpr, FULL: gl.constexpr, NW: gl.constexpr):
    """Load the full-precision keys that a token attends to."""
    D: gl.constexpr = SHAPE.width
    CHUNK: gl.constexpr = 32 * key_words(D, SHAPE.key_bits)[1] // SHAPE.key_bits
    return _rows(full.sink_k, full.recent_k, places[0], D, _row_layout(NW, D, CHUNK), FULL)


@gluon.jit
def full_precision_values(full, places, SHAPE: gl.constexpr, FULL: gl.constexpr, NW: gl.constexpr):
    """Load the full-precision values that a token attends to."""
    return _rows(full.sink_v, full.recent_v, places[1], SHAPE.width, _value_layout(NW, SHAPE.width), FULL)


@gluon.jit
def attend_full_precision(
    keys_of, full, places, qx, low, cap,
    SHAPE: gl.constexpr, FULL: gl.constexpr, SOFTCAP: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """Attend to full-precision tokens; return output sums, softmax sums and maxima, as after a step."""
    D: gl.constexpr = SHAPE.width
    ROOT: gl.constexpr = D**0.5  # levels are scaled by as much
    M: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [NW, 1, 1], [1, 16, 8])
    LS: gl.constexpr = gl.SliceLayout(2, M)
    CHUNK: gl.constexpr = 32 * key_words(D, SHAPE.key_bits)[1] // SHAPE.key_bits
    A: gl.constexpr = gl.DotOperandLayout(0, M, 2)
    keys = places[0]
    kx = _first_operand(keys_of, CHUNK, NW)
    vx = full_precision_values(full, places, SHAPE, FULL, NW)
    vx = gl.permute(gl.reshape(vx, [NW, 2, 4, 2, 8, D // 8]), [0, 5, 4, 1, 2, 3])  # x, g | h, c, e
    vx = gl.convert_layout(gl.reshape(vx, [NW, D, 16]), A, assert_trivial=True)
    s = mma_v2(kx, qx, gl.full([NW, 16, 8], 0.0, gl.float32, M)) * ROOT
    if SOFTCAP:
        s = cap - 2.0 * cap / (gl.exp2(s) + 1.0)
    seen = gl.convert_layout(keys[2] & (keys[1] >= low), LS)
    s = gl.where(gl.expand_dims(seen, 2), s, NOTHING)
    m = gl.maximum(gl.max(s, 1), -1e29)
    p = gl.exp2(s - gl.expand_dims(m, 1))
    l = halves(p, NW)  # noqa: E741
    vn = gl.full([NW, 16], ROOT, gl.float32, LS)
    o = mma_v2(vx, weights(p, vn, seen, NW), gl.full([NW, D, 8], 0.0, gl.float32, M))
    return o, gl.convert_layout(l, sum_layout(NW), assert_trivial=True), m
