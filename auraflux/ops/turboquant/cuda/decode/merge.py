"""Partial results of split-KV and their merge: maxima to base 2, channels in the order of the tensor core's rows."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.gpu.blocks.dependent_launch import gdc_launch_dependents, gdc_wait
from auraflux.ops.turboquant.cuda.decode.lookup import NOTHING, transform
from auraflux.ops.turboquant.cuda.decode.split_kv import balance_splits, splits_of_token

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.constexpr_function
def _warp_sum_layout(width, warps):
    """Return the layout in which a thread holds the same sums of all warps, without replication."""
    each = max(1, min(4, width // (4 * warps)))
    return gl.BlockedLayout([warps, 1, each], [1, 4 * each, 8 // each], [1, warps, 1], [2, 1, 0])


@gluon.jit
def _of_all_warps(o, m, l, D: gl.constexpr, NW: gl.constexpr):  # noqa: E741
    """Store sums to shared memory, over the table, and load the maxima and softmax sums of all warps."""
    E: gl.constexpr = _warp_sum_layout(D, NW)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    o_all = gl.allocate_shared_memory(gl.float32, [NW, D, 8], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]), o)
    m_all = gl.allocate_shared_memory(gl.float32, [NW, 8], FLAT, m)
    l_all = gl.allocate_shared_memory(gl.float32, [NW, 8], FLAT, l).load(gl.SliceLayout(1, E))
    return o_all, m_all.load(gl.SliceLayout(1, E)), l_all


@gluon.jit
def _store_softmax_stats(top, total, partials, dest, live, LAYOUT: gl.constexpr):
    row, split, splits = dest
    g = gl.arange(0, top.shape[0], layout=LAYOUT)
    gl.store(partials.m + (row + g) * splits + split, top, mask=g < live)
    gl.store(partials.l + (row + g) * splits + split, total, mask=g < live)


@gluon.jit
def store_partial(o, m, l, partials, dest, live, D: gl.constexpr, NW: gl.constexpr):  # noqa: E741
    """Reduce the sums of all warps and store them as one partial result of each row."""
    E: gl.constexpr = _warp_sum_layout(D, NW)
    o_all, m_all, l_all = _of_all_warps(o, m, l, D, NW)
    found = reduce_warps(o_all.load(E), m_all, l_all)
    store_reduced(found, partials, dest, live, gl.SliceLayout(0, E), gl.SliceLayout(0, gl.SliceLayout(1, E)))


@gluon.jit
def reduce_warps(o, m_all, l_all):
    """Reduce the sums [warps, D, 8] of all warps: output sums, maxima and softmax sums."""
    top = gl.max(m_all, 0)
    weight = gl.exp2(m_all - top[None, :])
    return gl.sum(o * weight[:, None, :], 0), top, gl.sum(l_all * weight, 0)


@gluon.jit
def store_reduced(found, partials, dest, live, SUMS: gl.constexpr, HEADS: gl.constexpr):
    """Store reduced sums as one partial result of each row; SUMS and HEADS are the layouts of sums and of statistics."""
    o, top, total = found
    D: gl.constexpr = o.shape[0]
    row, split, splits = dest
    g = gl.arange(0, o.shape[1], layout=gl.SliceLayout(0, SUMS))[None, :]
    r = gl.arange(0, D, layout=gl.SliceLayout(1, SUMS))[:, None]
    gl.store(partials.o + ((row + g).to(gl.int64) * splits + split) * D + r, o, mask=g < live)
    _store_softmax_stats(top, total, partials, dest, live, HEADS)


@gluon.jit
def store_unrotated_partial(o, m, l, signs, partials, dest, live, D: gl.constexpr, NW: gl.constexpr):  # noqa: E741
    """Reduce the sums of all warps, undo the rotation, and store them as one partial result of each row."""
    E: gl.constexpr = _warp_sum_layout(D, NW)
    row, split, splits = dest
    o_all, m_all, l_all = _of_all_warps(o, m, l, D, NW)
    top = gl.max(m_all, 0)
    weight = gl.exp2(m_all - top[None, :])
    _store_softmax_stats(top, gl.sum(l_all * weight, 0), partials, dest, live, gl.SliceLayout(0, gl.SliceLayout(1, E)))
    y, g, d = _unrotated(gl.sum(o_all.load(E) * weight[:, None, :], 0), D, NW)
    # factors of the transform and of the levels, which are scaled by sqrt(D)
    at = partials.o + ((row + g).to(gl.int64) * splits + split) * D + d
    gl.store(at, y * (gl.load(signs + d) / D), mask=g < live)


@gluon.jit
def _unrotated(o, D: gl.constexpr, NW: gl.constexpr):
    """Undo the rotation of 8 rows, without factor and signs; return them with row and channel indices."""
    LR: gl.constexpr = gl.BlockedLayout([1, D // 32], [1, 32], [NW, 1], [1, 0])
    # rows of the sums are channels (x, g) of the tensor core: (g, x) in the head
    o = gl.reshape(gl.permute(gl.reshape(o, [D // 8, 8, 8]), [2, 1, 0]), [8, D])
    y = transform(gl.convert_layout(o, LR), NW)
    d = gl.arange(0, D, layout=gl.SliceLayout(0, LR))[None, :]
    g = gl.arange(0, 8, layout=gl.SliceLayout(1, LR))[:, None]
    return y, g, d


@gluon.jit
def store_empty_partial(partials, dest, live, NW: gl.constexpr):
    """Mark a partial result as empty; its sums are not read."""
    row, split, splits = dest
    g = gl.arange(0, 8, layout=gl.BlockedLayout([1], [32], [NW], [0]))
    gl.store(partials.m + (row + g) * splits + split, NOTHING + g * 0.0, mask=g < live)
    gl.store(partials.l + (row + g) * splits + split, g * 0.0, mask=g < live)


@gluon.jit
def store_output_rows(o, m, l, sinks, signs, out, row, live, heads, D: gl.constexpr, NW: gl.constexpr):  # noqa: E741
    """Reduce the sums of all warps, undo the rotation, and store rows that have one split."""
    E: gl.constexpr = _warp_sum_layout(D, NW)
    o_all, m_all, l_all = _of_all_warps(o, m, l, D, NW)
    g = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, E)))
    top = gl.max(m_all, 0)
    if sinks is not None:
        sink = gl.load(sinks + (row + g) % heads, mask=g < live, other=0.0) * LOG2E
        top = gl.maximum(top, sink)
    weight = gl.exp2(m_all - top[None, :])
    total = gl.sum(l_all * weight, 0)
    if sinks is not None:
        total += gl.exp2(sink - top)
    # factors of the transform and of the levels, which are scaled by sqrt(D)
    weight *= gl.where(total == 0.0, 0.0, 1.0 / (D * total))[None, :]
    y, g, d = _unrotated(gl.sum(o_all.load(E) * weight[:, None, :], 0), D, NW)
    at = out + (row + g).to(gl.int64) * D + d
    gl.store(at, (y * gl.load(signs + d)).to(out.dtype.element_ty), mask=g < live)


@gluon.jit
def _load_stats(partials, first, stride, count, P: gl.constexpr, NW: gl.constexpr):
    """Load maxima and softmax sums of the splits of a row."""
    s = gl.arange(0, P, layout=gl.BlockedLayout([max(1, P // 32)], [32], [NW], [0]))
    maxima = gl.load(partials.m + first + s * stride, mask=s < count, other=NOTHING)
    return maxima, gl.load(partials.l + first + s * stride, mask=s < count, other=0.0)


@gluon.jit
def _weights(maxima, sums, sinks, head):
    """Return the weight of each split, 0 for empty ones, and the softmax denominator."""
    top = gl.max(maxima, 0)
    if sinks is not None:
        sink = gl.load(sinks + head) * LOG2E
        top = gl.maximum(top, sink)
    weight = gl.where(maxima > NOTHING, gl.exp2(maxima - top), 0.0)
    total = gl.sum(weight * sums, 0)
    if sinks is not None:
        total += gl.exp2(sink - top)
    return weight, total


@gluon.jit
def _shared_weights(weight, C: gl.constexpr):
    """Store weights to shared memory, C at a time."""
    P: gl.constexpr = weight.shape[0]
    weights = gl.allocate_shared_memory(gl.float32, [P // C, C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    weights._reinterpret(gl.float32, [P], gl.SwizzledSharedLayout(1, 1, 1, [0])).store(weight)
    return weights


@gluon.jit
def _weighted(o, weights, i, LAYOUT: gl.constexpr):
    """Multiply splits by their weights; empty splits have no valid sums."""
    w = weights.index(i).load(gl.SliceLayout(1, LAYOUT))[:, None]
    return gl.where(w > 0.0, o, 0.0) * w


@gluon.jit
def finish_pairs(partials, sinks, signs, out, index, heads, splits, window, SIZES: gl.constexpr):
    """Merge the splits of a row and undo the rotation; grid (rows,).

    splits  splits of every row; or, where balanced, programs per head
    SIZES   see `MergeSizes`

    The transform is the same for any order of index bits, so that it runs in the order of the partial results.
    """
    D: gl.constexpr = SIZES.width
    C: gl.constexpr = SIZES.at_once
    NW: gl.constexpr = SIZES.warps
    LR: gl.constexpr = gl.BlockedLayout([1, D // 32], [1, 32], [NW, 1], [1, 0])
    row = gl.program_id(0)
    r = gl.arange(0, D, layout=gl.SliceLayout(0, LR))
    d = r % 8 * (D // 8) + r // 8
    sign = gl.load(signs + d)
    if SIZES.balanced:
        schedule = balance_splits(index, splits, window, SIZES.step, SIZES.sequences, NW)
        first, count = splits_of_token(row // heads, schedule, index.sequences)
        first, stride = first.to(gl.int64) * heads + row % heads, heads
    else:
        first, count, stride = row.to(gl.int64) * splits, splits, 1
    # the attention kernel launched this one after its own wait: all that the next kernel reads before its wait is complete
    gdc_launch_dependents()
    gdc_wait()
    maxima, sums = _load_stats(partials, first, stride, count, SIZES.splits, NW)
    c = gl.arange(0, C, layout=gl.SliceLayout(1, LR))
    at = partials.o + (first + c * stride)[:, None] * D + r[None, :]
    o = gl.load(at, mask=(c < count)[:, None], other=0.0)
    weight, total = _weights(maxima, sums, sinks, row % heads)
    weights = _shared_weights(weight, C)
    acc = _weighted(o, weights, 0, LR)
    for i in range(1, gl.cdiv(count, C)):
        o = gl.load(at + i * C * stride * D, mask=(i * C + c < count)[:, None], other=0.0)
        acc += _weighted(o, weights, i, LR)
    # factors of the transform and of the levels, which are scaled by sqrt(D)
    factor = gl.where(total == 0.0, 0.0, 1.0 / (D * total))
    y = transform(gl.expand_dims(gl.sum(acc, 0), 0), NW) * factor
    gl.store(out + row.to(gl.int64) * D + d[None, :], (y * sign[None, :]).to(out.dtype.element_ty))


@gluon.jit
def finish_rotated(partials, sinks, out, heads, splits, D: gl.constexpr, P: gl.constexpr, C: gl.constexpr, N: gl.constexpr):
    """Merge N columns of the splits of a row, whose rotation is undone already, C at a time; grid (rows, D // N)."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [128 // N, N // 4], [1, 1], [1, 0])
    row = gl.program_id(0)
    # as in `finish_pairs`
    gdc_launch_dependents()
    gdc_wait()
    first = row.to(gl.int64) * splits
    maxima, sums = _load_stats(partials, first, 1, splits, P, 1)
    c = gl.arange(0, C, layout=gl.SliceLayout(1, L))
    n = gl.arange(0, N, layout=gl.SliceLayout(0, L)) + gl.program_id(1) * N
    at = partials.o + (first + c)[:, None] * D + n[None, :]
    o = gl.load(at, mask=(c < splits)[:, None], other=0.0)
    weight, total = _weights(maxima, sums, sinks, row % heads)
    weights = _shared_weights(weight, C)
    acc = _weighted(o, weights, 0, L)
    for i in gl.static_range(1, P // C):
        o = gl.load(at + i * C * D, mask=(i * C + c < splits)[:, None], other=0.0)
        acc += _weighted(o, weights, i, L)
    y = gl.sum(acc, 0) * gl.where(total == 0.0, 0.0, 1.0 / total)
    gl.store(out + row.to(gl.int64) * D + n, y.to(out.dtype.element_ty))
