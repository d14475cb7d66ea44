"""Parts of `prefill`: rows of a tile, their visible keys, TMA loads, and the online softmax."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from auraflux.ops.gpu.blocks.softmax import LOG2E
from auraflux.ops.hopper.reduce import warp_uniform
from auraflux.ops.hopper.split_kv import LIST, columns

F32 = gl.float32
SCORES = gl.constexpr(columns(64))
ROW, KEY = gl.constexpr(gl.SliceLayout(1, SCORES.value)), gl.constexpr(gl.SliceLayout(0, SCORES.value))
LINES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


class Rows(NamedTuple):
    """Rows of a program, and the keys that they see.

    start, new, length  of their sequence: first new token, number of new tokens, and all positions
    first               row of the program
    begin, end          keys that some of them see
    full, edge          keys that all of them see
    masked, tiles       tiles of keys that not all of them see, and all tiles
    recent              tiles of recent keys, see `tile_position`
    pool                number of pages
    """

    start: Any
    new: Any
    length: Any
    first: Any
    begin: Any
    end: Any
    full: Any
    edge: Any
    masked: Any
    tiles: Any
    recent: Any
    pool: Any


@gluon.jit
def advance(stage, phase, ST: gl.constexpr):
    stage = stage + 1
    phase = gl.where(stage == ST, phase ^ 1, phase)
    return gl.where(stage == ST, 0, stage), phase


@gluon.jit
def rows_of_tile(tile, index, M: gl.constexpr, G: gl.constexpr, S: gl.constexpr):
    """Return a tile's sequence, its first token, new tokens, length, and the first of its rows in the tile."""
    b = gl.arange(0, S, LIST)
    start = gl.load(index.starts + b, mask=b < index.sequences, other=0)
    first = gl.where(b < index.sequences, start * G // M + b, 1 << 30)
    sequence = gl.sum((first <= tile).to(gl.int32), 0) - 1
    if S > 1:
        sequence = warp_uniform(sequence)
    start = gl.load(index.starts + sequence)
    new = gl.load(index.starts + sequence + 1) - start
    return sequence, start, new, gl.load(index.lengths + sequence), (tile - start * G // M - sequence) * M


@gluon.jit
def keys_of_rows(first, last, window):
    """Return the keys [begin, end) that rows at positions [first, last] see, and those [full, edge) that all of them see."""
    begin = gl.maximum(0, first - window + 1) // 64 * 64
    end = gl.maximum(last + 1, begin)
    full = begin + (gl.maximum(last - window + 1 - begin, 0) + 63) // 64 * 64
    edge = begin + gl.maximum(gl.minimum(first + 1, end) - begin, 0) // 64 * 64
    return begin, end, full, gl.maximum(full, edge)


@gluon.jit
def visible_rows(tile, index, scores, far, M: gl.constexpr, SHAPE: gl.constexpr):
    """Return the sequence of a tile of M rows, and its rows; tiles without rows have no keys."""
    G: gl.constexpr = SHAPE.group
    sequence, start, new, length, first_row = rows_of_tile(tile, index, M, G, SHAPE.sequences)
    last = length - new + gl.minimum((first_row + (M - 1)) // G, new - 1)
    first = length - new + first_row // G
    if SHAPE.recent:
        begin, end, full, edge = keys_of_rows(first - scores.newest, last - scores.newest, scores.window - scores.newest)
        nearest = gl.maximum(first - gl.minimum(scores.newest, scores.window) + 1, 0) // 64 * 64
        recent_tiles = gl.where(first_row < new * G, (last - nearest + 64) // 64, 0)
        recent = (recent_tiles, nearest, far - gl.maximum(length - new - scores.newest + 1, 0) // SHAPE.page)
    else:
        begin, end, full, edge = keys_of_rows(first, last, scores.window)
        recent_tiles, recent = 0, (0, 0, 0)
    count = gl.where(first_row < new * G, (end - begin + 63) // 64 + recent_tiles, 0)
    masked = gl.where(first_row < new * G, count - (edge - full) // 64, 0)
    return sequence, Rows(start, new, length, first_row, begin, end, full, edge, masked, count, recent, index.pool)


@gluon.jit
def tile_at(i, masked, begin, full, edge):
    """Return the first position of the i-th tile: the `masked` partially visible ones come first."""
    first = begin + i * 64
    first += gl.where(first >= full, edge - full, 0)
    return gl.where(i < masked, first, full + (i - masked) * 64)


@gluon.jit
def tile_position(i, recent, masked, begin, full, edge, RECENT: gl.constexpr):
    """Return the first position of the i-th tile, and the offset of its page from its regular place in the table.

    recent  number of tiles of recent keys, which come first, their first position, and their page offset
    """
    if not RECENT:
        return tile_at(i, masked, begin, full, edge), 0
    count, first, shift = recent
    others = tile_at(i - count, masked - count, begin, full, edge)
    return gl.where(i < count, first + i * 64, others), gl.where(i < count, shift, 0)


@gluon.jit
def visible_range(i, position, scores, rows, RECENT: gl.constexpr):
    """Return each row's latest key in the i-th tile, its window from there, and the end of all keys."""
    if not RECENT:
        return position, scores.window, rows.end
    recent = i < rows.recent[0]
    latest = position - gl.where(recent, 0, scores.newest)
    window = gl.where(recent, gl.minimum(scores.newest, scores.window), scores.window - scores.newest)
    return latest, window, gl.where(recent, rows.length, rows.end)


@gluon.jit
def feed(keys, values, memory, table, rows, head, SHAPE: gl.constexpr):
    PAGE: gl.constexpr = SHAPE.page
    ST: gl.constexpr = SHAPE.stages
    RECENT: gl.constexpr = SHAPE.recent
    NBYTES: gl.constexpr = 64 * SHAPE.width * 2
    bars, count = memory.bars, rows.tiles
    recent, masked, begin, full, edge = rows.recent, rows.masked, rows.begin, rows.full, rows.edge
    stage, phase = 0, 1
    first, shift = tile_position(0, recent, masked, begin, full, edge, RECENT)
    following = gl.load(table + gl.where(count > 0, first // PAGE + shift, 0))
    for i in range(count):
        first, page = tile_position(i, recent, masked, begin, full, edge, RECENT)[0], following
        after, shift = tile_position(gl.minimum(i + 1, count - 1), recent, masked, begin, full, edge, RECENT)
        following = gl.load(table + after // PAGE + shift)
        row = (gl.where((page >= 0) & (page < rows.pool), page, 0) * SHAPE.key_heads + head) * PAGE + first % PAGE
        mbarrier.wait(bars.index(2 * ST + stage), phase)
        mbarrier.expect(bars.index(stage), NBYTES)
        tma.async_copy_global_to_shared(keys, [row, 0], bars.index(stage), memory.K.index(stage))
        mbarrier.wait(bars.index(3 * ST + stage), phase)
        mbarrier.expect(bars.index(ST + stage), NBYTES)
        tma.async_copy_global_to_shared(values, [row, 0], bars.index(ST + stage), memory.V.index(stage))
        stage, phase = advance(stage, phase, ST)


@gluon.jit
def softcap_log2(s, scale, softcap, SOFTCAP: gl.constexpr):
    """Apply the softcap; without one `online_softmax` scales the scores."""
    if SOFTCAP:
        # tanh by one exponential; only its absolute error matters here
        s = softcap * (1.0 - 2.0 / (gl.exp(2.0 * (s * scale / softcap)) + 1.0))
    return s


@gluon.jit
def online_softmax(s, m, l, factor, SUMS: gl.constexpr):  # noqa: E741
    """Update the running softmax by a tile of scores; return weights, rescaling of earlier sums, maximum and sum."""
    top = gl.maximum(m, gl.max(s, 1) * factor)
    safe = gl.where(top == float("-inf"), 0.0, top)
    p = gl.exp2(s * factor - safe[:, None])
    rescale = gl.exp2(m - safe)
    return p, gl.convert_layout(rescale, gl.SliceLayout(1, SUMS)), top, l * rescale + gl.sum(p, 1)


@gluon.jit
def normalised(acc, m, l, sinks, head, row, G: gl.constexpr, SUMS: gl.constexpr, DTYPE: gl.constexpr):  # noqa: E741
    """Return results from sums of values, sinks included."""
    sink = gl.full(m.shape, float("-inf"), F32, m.type.layout)
    if sinks is not None:
        sink = gl.load(sinks + head * G + row % G) * LOG2E
    top = gl.maximum(m, sink)
    top = gl.where(top == float("-inf"), 0.0, top)
    rescale = gl.exp2(m - top)
    total = l * rescale + gl.exp2(sink - top)
    part = gl.convert_layout(gl.where(total == 0.0, 0.0, rescale / total), gl.SliceLayout(1, SUMS))
    return (acc * part[:, None]).to(DTYPE)


@gluon.jit
def mix_by_rows(acc, p, lines, first, end, position, window, D: gl.constexpr, SCORES: gl.constexpr, SUMS: gl.constexpr):
    """Accumulate a tile's values, at `lines`, key by key for the rows that see it: 0 times NaN must not reach the others."""
    d, key = gl.arange(0, D, gl.SliceLayout(0, SUMS)), gl.arange(0, p.shape[1], gl.SliceLayout(0, SCORES))
    position = gl.convert_layout(position, gl.SliceLayout(1, SUMS))
    for i in range(gl.minimum(p.shape[1], end - first)):
        weight = gl.convert_layout(gl.sum(gl.where((key == i)[None, :], p, 0.0), 1), gl.SliceLayout(1, SUMS))
        sees = (first + i <= position) & (first + i > position - window)
        line = gl.load(lines + i * D + d).to(F32)
        acc += gl.where(sees[:, None], weight[:, None] * line[None, :], 0.0)
    return acc


@gluon.jit
def lines_of(first, start, new, heads, head, G: gl.constexpr, D: gl.constexpr):
    """Return offsets of 64 rows in queries and results, and which of them exist."""
    r = first + gl.arange(0, 64, gl.SliceLayout(1, LINES))
    at = ((start + gl.minimum(r // G, new - 1)).to(gl.int64) * heads + head * G + r % G)[:, None] * D
    at = at + gl.arange(0, D, gl.SliceLayout(0, LINES))[None, :]
    return at, (r < new * G)[:, None] & (at >= 0)
