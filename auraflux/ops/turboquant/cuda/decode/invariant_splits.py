"""Batch-invariant split-KV: splits of a row are reduced over warps and accumulated in a fixed order in every schedule.

A program that has all splits of a row accumulates them in registers. Otherwise programs store partial results, and
`finish_in_order` accumulates them with the same operations in the same order. The rotation is undone in the order of the tensor
core's rows, as in `finish_pairs`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.gpu.blocks.dependent_launch import gdc_launch_dependents, gdc_wait
from auraflux.ops.turboquant.cuda.decode.lookup import NOTHING, transform
from auraflux.ops.turboquant.cuda.decode.merge import LOG2E, reduce_warps, store_reduced


@gluon.constexpr_function
def _spare_layout(width, heads, warps, logical):
    """Return the layout in which a thread holds the same sums of all warps: of memory, or `logical` [warps, width, heads]."""
    rows = width * heads // 32  # per warp
    # a thread has one head, so that it needs few weights of warps
    first = heads // 4
    register_bases = [[rows << i, 0] for i in range(warps.bit_length() - 1)] + [
        [first << i, 0] for i in range(first) if first << i < rows
    ]
    lanes = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]]
    dest = [[1 << i, 0] for i in range(rows.bit_length() - 1) if [1 << i, 0] not in register_bases]
    # where sums are fewer than threads, some threads replicate them
    warp_bases = dest + [[0, 0]] * (warps.bit_length() - 1 - len(dest))
    if not logical:
        return gl.DistributedLinearLayout(register_bases, lanes, warp_bases, [], [warps * rows, 32])

    def place(at):
        row, column = at
        return [row // rows, row % rows // first * 8 + column // 4, column % 4 * first + row % rows % first]

    bases = [[place(at) for at in some] for some in (register_bases, lanes, warp_bases)]
    return gl.DistributedLinearLayout(*bases, [], [warps, width, heads])


@gluon.constexpr_function
def _sums_layout(width, heads, warps):
    """Return the layout of reduced sums [width, heads]."""
    return gl.SliceLayout(0, _spare_layout(width, heads, warps, True))


@gluon.jit
def reduce_in_spare_memory(o, m, l, shared, EVEN_COLUMNS: gl.constexpr, NW: gl.constexpr):  # noqa: E741
    """Reduce the sums of all warps in spare shared memory, for 4 heads if EVEN_COLUMNS, else 8.

    Spare is the values' side of the level table, 128 bytes of each row: unused where key and value bits are equal, or after the
    last look-up.
    """
    D: gl.constexpr = o.shape[1]
    H: gl.constexpr = 4 if EVEN_COLUMNS else 8
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    E: gl.constexpr = _spare_layout(D, H, NW, True)
    if EVEN_COLUMNS:
        o, _ = gl.split(gl.reshape(o, [NW, D, H, 2]))
        m, _ = gl.split(gl.reshape(m, [NW, H, 2]))
        l, _ = gl.split(gl.reshape(l, [NW, H, 2]))  # noqa: E741
    spare = shared._reinterpret(gl.float32, [256, 64], FLAT).slice(32, 32, 1).slice(0, NW * D * H // 32, 0)
    stats = shared.index(16)._reinterpret(gl.float32, [1024 // H, H], FLAT)
    maxima, sums = stats.slice(0, NW, 0), stats.slice(NW, NW, 0)
    # a lane's sums lie in one column, free of bank conflicts
    o = gl.permute(gl.reshape(o, [NW, D // 8, 8, 4, H // 4]), [0, 1, 4, 2, 3])
    spare.store(gl.reshape(o, [NW * D * H // 32, 32]))
    # one store, since the compiler inserts a barrier between stores to the same memory
    stats.slice(0, 2 * NW, 0).store(gl.reshape(gl.permute(gl.join(m, l), [2, 0, 1]), [2 * NW, H]))
    gl.thread_barrier()
    o = gl.reshape(spare.load(_spare_layout(D, H, NW, False)), [NW, D // 8, H // 4, 8, 4])
    o = gl.convert_layout(gl.reshape(gl.permute(o, [0, 1, 3, 4, 2]), [NW, D, H]), E, assert_trivial=True)
    m_all, l_all = maxima.load(gl.SliceLayout(1, E)), sums.load(gl.SliceLayout(1, E))
    gl.thread_barrier()
    o, m, l = reduce_warps(o, m_all, l_all)  # noqa: E741
    L: gl.constexpr = gl.SliceLayout(0, _sums_layout(D, H, NW))
    return o, gl.convert_layout(m, L, assert_trivial=True), gl.convert_layout(l, L, assert_trivial=True)


@gluon.jit
def store_split(found, partials, dest, live, NW: gl.constexpr):
    """Store the reduced split of each row."""
    L: gl.constexpr = _sums_layout(found[0].shape[0], found[0].shape[1], NW)
    store_reduced(found, partials, dest, live, L, gl.SliceLayout(0, L))


@gluon.jit
def store_empty_splits(partials, dest, live, NW: gl.constexpr):
    """Mark all splits of rows from `first` on as empty."""
    MOST: gl.constexpr = 64
    row, first, splits = dest
    L: gl.constexpr = gl.BlockedLayout([1, MOST // 32], [1, 32], [NW, 1], [1, 0])
    g = gl.arange(0, 8, layout=gl.SliceLayout(1, L))[:, None]
    s = gl.arange(0, MOST, layout=gl.SliceLayout(0, L))[None, :]
    at, there = (row + g) * splits + s, (g < live) & (s >= first) & (s < splits)
    gl.store(partials.m + at, NOTHING + at * 0.0, mask=there)
    gl.store(partials.l + at, at * 0.0, mask=there)


@gluon.jit
def empty_accumulator(D: gl.constexpr, H: gl.constexpr, NW: gl.constexpr):
    """Return output sums, maxima and softmax sums of H rows without splits."""
    L: gl.constexpr = _sums_layout(D, H, NW)
    nothing = gl.full([H], 0.0, gl.float32, gl.SliceLayout(0, L))
    return gl.full([D, H], 0.0, gl.float32, L), nothing + NOTHING, nothing


@gluon.jit
def accumulate(before, part, ROWS: gl.constexpr):
    """Accumulate a split into output sums, maxima, softmax sums, of one row or of ROWS.

    Two kernels do this and must round identically: explicit fma leaves the compiler nothing to contract.
    """
    o, m, l = before  # noqa: E741
    top = gl.maximum(m, part[1])
    fade, weight = gl.exp2(m - top), gl.exp2(part[1] - top)
    l = gl.fma(l, fade, part[2] * weight)  # noqa: E741
    if ROWS:
        fade, weight = fade[None, :], weight[None, :]
    return gl.fma(o, fade, part[0] * weight), top, l


@gluon.jit
def _normalize(found, sink, D: gl.constexpr, ROWS: gl.constexpr):
    """Divide output sums by softmax sums, with `sink` as one more logit, and by the factors of transform and levels.

    Two kernels do this and must round identically, as above.
    """
    o, m, l = found  # noqa: E741
    fade = 1.0
    if sink is not None:
        top = gl.maximum(m, sink * LOG2E)
        fade = gl.exp2(m - top)
        l = gl.fma(l, fade, gl.exp2(gl.fma(sink, LOG2E, -top)))  # noqa: E741
    factor = gl.where(l == 0.0, 0.0, fade / (D * l))
    return gl.fma(o, factor[None, :] if ROWS else factor, 0.0)


@gluon.jit
def store_accumulated(found, sinks, signs, out, row, live, heads, NW: gl.constexpr):
    """Undo the rotation of fully accumulated rows, and store `live` of them."""
    D: gl.constexpr = found[0].shape[0]
    H: gl.constexpr = found[0].shape[1]
    LR: gl.constexpr = gl.BlockedLayout([1, D // 32], [1, 32], [NW, 1], [1, 0])
    sink = None
    if sinks is not None:
        g = gl.arange(0, H, layout=gl.SliceLayout(0, _sums_layout(D, H, NW)))
        sink = gl.load(sinks + (row + g) % heads, mask=g < live, other=0.0)
    o = _normalize(found, sink, D, True)
    y = transform(gl.convert_layout(gl.permute(o, [1, 0]), LR), NW)
    r = gl.arange(0, D, layout=gl.SliceLayout(0, LR))[None, :]
    d, g = r % 8 * (D // 8) + r // 8, gl.arange(0, H, layout=gl.SliceLayout(1, LR))[:, None]
    at = out + (row + g).to(gl.int64) * D + d
    gl.store(at, (y * gl.load(signs + d)).to(out.dtype.element_ty), mask=g < live)


@gluon.jit
def _load_splits(partials, at, r, there, D: gl.constexpr, C: gl.constexpr):
    """Load C splits of a row, of which `there` exist."""
    found = ()
    for c in gl.static_range(C):
        m = gl.load(partials.m + at + c, mask=c < there, other=NOTHING)
        l = gl.load(partials.l + at + c, mask=c < there, other=0.0)  # noqa: E741
        o = gl.load(partials.o + (at + c) * D + r, mask=(r >= 0) & (c < there), other=0.0)
        found += ((o, m, l),)  # type: ignore[assignment]
    return found


@gluon.jit
def _accumulate_all(before, splits_of_row):
    """Accumulate splits in order; empty splits have no valid sums."""
    for c in gl.static_range(len(splits_of_row)):
        after = accumulate(before, splits_of_row[c], False)
        seen = splits_of_row[c][1] > NOTHING
        before = gl.where(seen, after[0], before[0]), gl.where(seen, after[1], before[1]), gl.where(seen, after[2], before[2])
    return before


@gluon.jit
def finish_in_order(
    partials, sinks, signs, out, heads, splits, D: gl.constexpr, P: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """Accumulate the splits of a row in order, C loaded at a time and P at most, and undo the rotation; grid (rows,)."""
    LR: gl.constexpr = gl.BlockedLayout([1, D // 32], [1, 32], [1, 1], [1, 0])
    row = gl.program_id(0)
    r = gl.arange(0, D, layout=gl.SliceLayout(0, LR))[None, :]
    d = r % 8 * (D // 8) + r // 8
    sign = gl.load(signs + d)
    # as in `finish_pairs`
    gdc_launch_dependents()
    gdc_wait()
    first = row.to(gl.int64) * splits
    splits_of_row = _load_splits(partials, first, r, splits, D, C)
    s = gl.arange(0, P, layout=gl.BlockedLayout([P // 32], [32], [1], [0]))
    seen = gl.load(partials.m + first + s, mask=s < splits, other=NOTHING) > NOTHING
    count = gl.sum(seen.to(gl.int32), 0)
    zero = (row * 0).to(gl.float32)
    found = _accumulate_all((gl.full([1, D], 0.0, gl.float32, LR), zero + NOTHING, zero), splits_of_row)
    for i in range(1, gl.cdiv(count, C)):
        found = _accumulate_all(found, _load_splits(partials, first + i * C, r, splits - i * C, D, C))
    sink = None if sinks is None else gl.load(sinks + row % heads)
    y = transform(_normalize(found, sink, D, False), 1)
    gl.store(out + row.to(gl.int64) * D + d, (y * sign).to(out.dtype.element_ty))
