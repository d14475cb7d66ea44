"""What programs leave of a row, and how it is merged: maxima to base 2, coordinates in the order of the matrix unit's rows."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from auraflux.ops.turboquant._hopper_parts import NOTHING, transform

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.constexpr_function
def _joined_layout(width, warps):
    """Give each thread what all warps have of the same sums, and none of them twice."""
    each = max(1, min(4, width // (4 * warps)))
    return gl.BlockedLayout([warps, 1, each], [1, 4 * each, 8 // each], [1, warps, 1], [2, 1, 0])


@gluon.jit
def leave_part(o, m, l, part_o, part_m, part_l, row, live, split, splits, D: gl.constexpr, NW: gl.constexpr):  # noqa: E741
    """Join the sums of all warps, in shared memory where the table was, and store them as one part of each row."""
    E: gl.constexpr = _joined_layout(D, NW)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    o_all = gl.allocate_shared_memory(gl.float32, [NW, D, 8], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]), o)
    m_all = gl.allocate_shared_memory(gl.float32, [NW, 8], FLAT, m)
    l_all = gl.allocate_shared_memory(gl.float32, [NW, 8], FLAT, l).load(gl.SliceLayout(1, E))
    m_all = m_all.load(gl.SliceLayout(1, E))
    top = gl.max(m_all, 0)
    weight = gl.exp2(m_all - top[None, :])
    o = gl.sum(o_all.load(E) * weight[:, None, :], 0)
    g = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(0, E)))[None, :]
    r = gl.arange(0, D, layout=gl.SliceLayout(1, gl.SliceLayout(0, E)))[:, None]
    gl.store(part_o + ((row + g).to(gl.int64) * splits + split) * D + r, o, mask=g < live)
    g = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, E)))
    gl.store(part_m + (row + g) * splits + split, top, mask=g < live)
    gl.store(part_l + (row + g) * splits + split, gl.sum(l_all * weight, 0), mask=g < live)


@gluon.jit
def leave_nothing(part_m, part_l, row, live, split, splits, NW: gl.constexpr):
    """Say of a part that it has seen nothing; its sums are not read."""
    g = gl.arange(0, 8, layout=gl.BlockedLayout([1], [32], [NW], [0]))
    gl.store(part_m + (row + g) * splits + split, NOTHING + g * 0.0, mask=g < live)
    gl.store(part_l + (row + g) * splits + split, g * 0.0, mask=g < live)


@gluon.jit
def leave_rows(o, m, l, sinks, signs, out, row, live, heads, D: gl.constexpr, NW: gl.constexpr):  # noqa: E741
    """Join the sums of all warps, in shared memory where the table was, and turn back rows that have no other part."""
    E: gl.constexpr = _joined_layout(D, NW)
    LR: gl.constexpr = gl.BlockedLayout([1, D // 32], [1, 32], [NW, 1], [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    o_all = gl.allocate_shared_memory(gl.float32, [NW, D, 8], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]), o)
    m_all = gl.allocate_shared_memory(gl.float32, [NW, 8], FLAT, m)
    l_all = gl.allocate_shared_memory(gl.float32, [NW, 8], FLAT, l).load(gl.SliceLayout(1, E))
    m_all = m_all.load(gl.SliceLayout(1, E))
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
    o = gl.sum(o_all.load(E) * weight[:, None, :], 0)
    # rows of the sums are coordinates (x, g) of the matrix unit: g, x in the head
    o = gl.reshape(gl.permute(gl.reshape(o, [D // 8, 8, 8]), [2, 1, 0]), [8, D])
    y = transform(gl.convert_layout(o, LR), NW)
    d = gl.arange(0, D, layout=gl.SliceLayout(0, LR))[None, :]
    g = gl.arange(0, 8, layout=gl.SliceLayout(1, LR))[:, None]
    at = out + (row + g).to(gl.int64) * D + d
    gl.store(at, (y * gl.load(signs + d)).to(out.dtype.element_ty), mask=g < live)


@gluon.jit
def finish_pairs(
    part_o,
    part_m,
    part_l,
    sinks,
    signs,
    out,
    heads,
    splits,
    D: gl.constexpr,
    S: gl.constexpr,
    C: gl.constexpr,
    NW: gl.constexpr,
):
    """Merge the parts of a row, maxima to base 2, C at a time, and turn it back; grid (rows,).

    The transform is the same whichever way index bits are numbered, so that it can be made in the order of the parts.
    """
    LR: gl.constexpr = gl.BlockedLayout([1, D // 32], [1, 32], [NW, 1], [1, 0])
    row = gl.program_id(0)
    r = gl.arange(0, D, layout=gl.SliceLayout(0, LR))
    d = r % 8 * (D // 8) + r // 8
    sign = gl.load(signs + d)
    # what attends let this begin after its own wait: all that the next kernel may read before its wait is there
    gdc_launch_dependents()
    gdc_wait()
    first = row.to(gl.int64) * splits
    s = gl.arange(0, S, layout=gl.SliceLayout(1, LR))
    highest = gl.load(part_m + first + s, mask=s < splits, other=NOTHING)
    sums = gl.load(part_l + first + s, mask=s < splits, other=0.0)
    c = gl.arange(0, C, layout=gl.SliceLayout(1, LR))
    acc = gl.load(part_o + (first + c)[:, None] * D + r[None, :], mask=(c < splits)[:, None], other=0.0)
    top = gl.max(highest, 0)
    if sinks is not None:
        sink = gl.load(sinks + row % heads) * LOG2E
        top = gl.maximum(top, sink)
    total = gl.sum(gl.exp2(highest - top) * sums, 0)
    if sinks is not None:
        total += gl.exp2(sink - top)
    high = gl.load(part_m + first + c, mask=c < splits, other=NOTHING)
    # sums of parts that have seen nothing are not there
    acc = gl.where((high > NOTHING)[:, None], acc, 0.0) * gl.exp2(high - top)[:, None]
    for i in range(C, S, C):
        part = i + c
        high = gl.load(part_m + first + part, mask=part < splits, other=NOTHING)
        o = gl.load(part_o + (first + part)[:, None] * D + r[None, :], mask=(part < splits)[:, None], other=0.0)
        acc += gl.where((high > NOTHING)[:, None], o, 0.0) * gl.exp2(high - top)[:, None]
    # of the transform, and of the levels, which came larger by sqrt(D)
    factor = gl.where(total == 0.0, 0.0, 1.0 / (D * total))
    y = transform(gl.expand_dims(gl.sum(acc, 0), 0), NW) * factor
    gl.store(out + row.to(gl.int64) * D + d[None, :], (y * sign[None, :]).to(out.dtype.element_ty))
