"""What programs leave of a row, and how it is merged: maxima to base 2, coordinates in the order of the tensor core's rows."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from auraflux.ops.turboquant.cuda.attend_parts import NOTHING, transform
from auraflux.ops.turboquant.cuda.attend_split import parts_of, share_out

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.constexpr_function
def _joined_layout(width, warps):
    """Give each thread what all warps have of the same sums, and none of them twice."""
    each = max(1, min(4, width // (4 * warps)))
    return gl.BlockedLayout([warps, 1, each], [1, 4 * each, 8 // each], [1, warps, 1], [2, 1, 0])


@gluon.jit
def _of_all_warps(o, m, l, D: gl.constexpr, NW: gl.constexpr):  # noqa: E741
    """Put sums into shared memory, where the table was, and give every thread the maxima and sums of weights of all warps."""
    E: gl.constexpr = _joined_layout(D, NW)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    o_all = gl.allocate_shared_memory(gl.float32, [NW, D, 8], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]), o)
    m_all = gl.allocate_shared_memory(gl.float32, [NW, 8], FLAT, m)
    l_all = gl.allocate_shared_memory(gl.float32, [NW, 8], FLAT, l).load(gl.SliceLayout(1, E))
    return o_all, m_all.load(gl.SliceLayout(1, E)), l_all


@gluon.jit
def _leave_weights(top, total, parts, left, live, LAYOUT: gl.constexpr):
    row, split, splits = left
    g = gl.arange(0, top.shape[0], layout=LAYOUT)
    gl.store(parts.m + (row + g) * splits + split, top, mask=g < live)
    gl.store(parts.l + (row + g) * splits + split, total, mask=g < live)


@gluon.jit
def leave_part(o, m, l, parts, left, live, D: gl.constexpr, NW: gl.constexpr):  # noqa: E741
    """Join the sums of all warps and store them as one part of each row."""
    E: gl.constexpr = _joined_layout(D, NW)
    o_all, m_all, l_all = _of_all_warps(o, m, l, D, NW)
    found = joined(o_all.load(E), m_all, l_all)
    leave_joined(found, parts, left, live, gl.SliceLayout(0, E), gl.SliceLayout(0, gl.SliceLayout(1, E)))


@gluon.jit
def joined(o, m_all, l_all):
    """Join the sums [warps, D, 8] of all warps: sums, maxima and sums of weights."""
    top = gl.max(m_all, 0)
    weight = gl.exp2(m_all - top[None, :])
    return gl.sum(o * weight[:, None, :], 0), top, gl.sum(l_all * weight, 0)


@gluon.jit
def leave_joined(found, parts, left, live, SUMS: gl.constexpr, HEADS: gl.constexpr):
    """Store what was joined as one part of each row; SUMS and HEADS are the layouts of sums and of the others."""
    o, top, total = found
    D: gl.constexpr = o.shape[0]
    row, split, splits = left
    g = gl.arange(0, o.shape[1], layout=gl.SliceLayout(0, SUMS))[None, :]
    r = gl.arange(0, D, layout=gl.SliceLayout(1, SUMS))[:, None]
    gl.store(parts.o + ((row + g).to(gl.int64) * splits + split) * D + r, o, mask=g < live)
    _leave_weights(top, total, parts, left, live, HEADS)


@gluon.jit
def leave_rotated_back(o, m, l, signs, parts, left, live, D: gl.constexpr, NW: gl.constexpr):  # noqa: E741
    """Join the sums of all warps, rotate them back, and store them as one part of each row."""
    E: gl.constexpr = _joined_layout(D, NW)
    row, split, splits = left
    o_all, m_all, l_all = _of_all_warps(o, m, l, D, NW)
    top = gl.max(m_all, 0)
    weight = gl.exp2(m_all - top[None, :])
    _leave_weights(top, gl.sum(l_all * weight, 0), parts, left, live, gl.SliceLayout(0, gl.SliceLayout(1, E)))
    y, g, d = _rotated_back(gl.sum(o_all.load(E) * weight[:, None, :], 0), D, NW)
    # of the transform, and of the levels, which came larger by sqrt(D)
    at = parts.o + ((row + g).to(gl.int64) * splits + split) * D + d
    gl.store(at, y * (gl.load(signs + d) / D), mask=g < live)


@gluon.jit
def _rotated_back(o, D: gl.constexpr, NW: gl.constexpr):
    """Turn back 8 rows, without the factor and the signs; which rows, and which coordinates."""
    LR: gl.constexpr = gl.BlockedLayout([1, D // 32], [1, 32], [NW, 1], [1, 0])
    # rows of the sums are coordinates (x, g) of the tensor core: g, x in the head
    o = gl.reshape(gl.permute(gl.reshape(o, [D // 8, 8, 8]), [2, 1, 0]), [8, D])
    y = transform(gl.convert_layout(o, LR), NW)
    d = gl.arange(0, D, layout=gl.SliceLayout(0, LR))[None, :]
    g = gl.arange(0, 8, layout=gl.SliceLayout(1, LR))[:, None]
    return y, g, d


@gluon.jit
def leave_nothing(parts, left, live, NW: gl.constexpr):
    """Say of a part that it has seen nothing; its sums are not read."""
    row, split, splits = left
    g = gl.arange(0, 8, layout=gl.BlockedLayout([1], [32], [NW], [0]))
    gl.store(parts.m + (row + g) * splits + split, NOTHING + g * 0.0, mask=g < live)
    gl.store(parts.l + (row + g) * splits + split, g * 0.0, mask=g < live)


@gluon.jit
def leave_rows(o, m, l, sinks, signs, out, row, live, heads, D: gl.constexpr, NW: gl.constexpr):  # noqa: E741
    """Join the sums of all warps and rotate back rows that have no other part."""
    E: gl.constexpr = _joined_layout(D, NW)
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
    # of the transform, and of the levels, which came larger by sqrt(D)
    weight *= gl.where(total == 0.0, 0.0, 1.0 / (D * total))[None, :]
    y, g, d = _rotated_back(gl.sum(o_all.load(E) * weight[:, None, :], 0), D, NW)
    at = out + (row + g).to(gl.int64) * D + d
    gl.store(at, (y * gl.load(signs + d)).to(out.dtype.element_ty), mask=g < live)


@gluon.jit
def _heights(parts, first, apart, count, P: gl.constexpr, NW: gl.constexpr):
    """Load maxima and sums of weights of the parts of a row."""
    s = gl.arange(0, P, layout=gl.BlockedLayout([max(1, P // 32)], [32], [NW], [0]))
    highest = gl.load(parts.m + first + s * apart, mask=s < count, other=NOTHING)
    return highest, gl.load(parts.l + first + s * apart, mask=s < count, other=0.0)


@gluon.jit
def _weights(highest, sums, sinks, head):
    """Weigh parts, and add up all weights; parts that have seen nothing weigh nothing."""
    top = gl.max(highest, 0)
    if sinks is not None:
        sink = gl.load(sinks + head) * LOG2E
        top = gl.maximum(top, sink)
    weight = gl.where(highest > NOTHING, gl.exp2(highest - top), 0.0)
    total = gl.sum(weight * sums, 0)
    if sinks is not None:
        total += gl.exp2(sink - top)
    return weight, total


@gluon.jit
def _shared_weights(weight, C: gl.constexpr):
    """Put weights where every thread finds those of its parts, C at a time."""
    P: gl.constexpr = weight.shape[0]
    weights = gl.allocate_shared_memory(gl.float32, [P // C, C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    weights._reinterpret(gl.float32, [P], gl.SwizzledSharedLayout(1, 1, 1, [0])).store(weight)
    return weights


@gluon.jit
def _weighed(o, weights, i, LAYOUT: gl.constexpr):
    """Weigh some parts; sums of those that have seen nothing are not there."""
    w = weights.index(i).load(gl.SliceLayout(1, LAYOUT))[:, None]
    return gl.where(w > 0.0, o, 0.0) * w


@gluon.jit
def finish_pairs(
    parts, sinks, signs, out, index, heads, splits, window, D: gl.constexpr, P: gl.constexpr, C: gl.constexpr,
    STEP: gl.constexpr, S: gl.constexpr, NW: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """Merge the parts of a row, maxima to base 2, C at a time and P at most, and rotate it back; grid (rows,).

    splits  parts of every row; or, SHARED, programs of each head, which share out texts in steps of STEP keys

    The transform is the same whichever way index bits are numbered, so that it can be made in the order of the parts.
    """
    LR: gl.constexpr = gl.BlockedLayout([1, D // 32], [1, 32], [NW, 1], [1, 0])
    row = gl.program_id(0)
    r = gl.arange(0, D, layout=gl.SliceLayout(0, LR))
    d = r % 8 * (D // 8) + r // 8
    sign = gl.load(signs + d)
    if SHARED:
        given = share_out(index, splits, window, STEP, S, NW)
        first, count = parts_of(row // heads, given, index.sequences)
        first, apart = first.to(gl.int64) * heads + row % heads, heads
    else:
        first, count, apart = row.to(gl.int64) * splits, splits, 1
    # what attends let this begin after its own wait: all that the next kernel may read before its wait is there
    gdc_launch_dependents()
    gdc_wait()
    highest, sums = _heights(parts, first, apart, count, P, NW)
    c = gl.arange(0, C, layout=gl.SliceLayout(1, LR))
    at = parts.o + (first + c * apart)[:, None] * D + r[None, :]
    o = gl.load(at, mask=(c < count)[:, None], other=0.0)
    weight, total = _weights(highest, sums, sinks, row % heads)
    weights = _shared_weights(weight, C)
    acc = _weighed(o, weights, 0, LR)
    for i in range(1, gl.cdiv(count, C)):
        o = gl.load(at + i * C * apart * D, mask=(i * C + c < count)[:, None], other=0.0)
        acc += _weighed(o, weights, i, LR)
    # of the transform, and of the levels, which came larger by sqrt(D)
    factor = gl.where(total == 0.0, 0.0, 1.0 / (D * total))
    y = transform(gl.expand_dims(gl.sum(acc, 0), 0), NW) * factor
    gl.store(out + row.to(gl.int64) * D + d[None, :], (y * sign[None, :]).to(out.dtype.element_ty))


@gluon.jit
def finish_rotated(parts, sinks, out, heads, splits, D: gl.constexpr, P: gl.constexpr, C: gl.constexpr, N: gl.constexpr):
    """Merge N columns of the parts of a row, which are rotated back already, C parts at a time; grid (rows, D // N)."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [128 // N, N // 4], [1, 1], [1, 0])
    row = gl.program_id(0)
    # as in `finish_pairs`
    gdc_launch_dependents()
    gdc_wait()
    first = row.to(gl.int64) * splits
    highest, sums = _heights(parts, first, 1, splits, P, 1)
    c = gl.arange(0, C, layout=gl.SliceLayout(1, L))
    n = gl.arange(0, N, layout=gl.SliceLayout(0, L)) + gl.program_id(1) * N
    at = parts.o + (first + c)[:, None] * D + n[None, :]
    o = gl.load(at, mask=(c < splits)[:, None], other=0.0)
    weight, total = _weights(highest, sums, sinks, row % heads)
    weights = _shared_weights(weight, C)
    acc = _weighed(o, weights, 0, L)
    for i in gl.static_range(1, P // C):
        o = gl.load(at + i * C * D, mask=(i * C + c < splits)[:, None], other=0.0)
        acc += _weighed(o, weights, i, L)
    y = gl.sum(acc, 0) * gl.where(total == 0.0, 0.0, 1.0 / total)
    gl.store(out + row.to(gl.int64) * D + n, y.to(out.dtype.element_ty))
