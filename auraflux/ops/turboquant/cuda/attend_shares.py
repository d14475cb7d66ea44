"""Shares of a row inside `invariant`: whoever has them, they are joined over warps, and follow each other in one order.

A program that has all shares of a row adds each to those before it, in registers. Where programs have one or some of them each,
these are left as parts, and `finish_in_order` adds them up in the same way. Sums are rotated back in the order of the tensor
core's rows, as in `finish_pairs`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from auraflux.ops.turboquant.cuda.attend_merge import LOG2E, joined, leave_joined
from auraflux.ops.turboquant.cuda.attend_parts import NOTHING, transform


@gluon.constexpr_function
def _spare_layout(width, heads, warps, whole):
    """What all warps have of the same sums in one thread, as `join_beside` finds it; or, `whole`, as [warps, width, heads]."""
    rows = width * heads // 32  # of a warp
    # a thread has one head's: weights of warps are few
    first = heads // 4
    mine = [[rows << i, 0] for i in range(warps.bit_length() - 1)] + [
        [first << i, 0] for i in range(first) if first << i < rows
    ]
    lanes = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]]
    left = [[1 << i, 0] for i in range(rows.bit_length() - 1) if [1 << i, 0] not in mine]
    # where sums are fewer than threads, some have the same
    more = left + [[0, 0]] * (warps.bit_length() - 1 - len(left))
    if not whole:
        return gl.DistributedLinearLayout(mine, lanes, more, [], [warps * rows, 32])

    def place(at):
        row, column = at
        return [row // rows, row % rows // first * 8 + column // 4, column % 4 * first + row % rows % first]

    bases = [[place(at) for at in some] for some in (mine, lanes, more)]
    return gl.DistributedLinearLayout(*bases, [], [warps, width, heads])


@gluon.constexpr_function
def _sums_layout(width, heads, warps):
    """Sums [width, heads] that are joined."""
    return gl.SliceLayout(0, _spare_layout(width, heads, warps, True))


@gluon.jit
def join_beside(o, m, l, shared, SPREAD: gl.constexpr, NW: gl.constexpr):  # noqa: E741
    """Join the sums of all warps, in what the table and the queries leave free of shared memory: of 4 heads if SPREAD, or 8.

    One side of the table is that, 128 bytes of each row, where bits of keys and values are equal or the table is done with.
    """
    D: gl.constexpr = o.shape[1]
    H: gl.constexpr = 4 if SPREAD else 8
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    E: gl.constexpr = _spare_layout(D, H, NW, True)
    if SPREAD:
        o, _ = gl.split(gl.reshape(o, [NW, D, H, 2]))
        m, _ = gl.split(gl.reshape(m, [NW, H, 2]))
        l, _ = gl.split(gl.reshape(l, [NW, H, 2]))  # noqa: E741
    spare = shared._reinterpret(gl.float32, [256, 64], FLAT).slice(32, 32, 1).slice(0, NW * D * H // 32, 0)
    beside = shared.index(16)._reinterpret(gl.float32, [1024 // H, H], FLAT)
    highest, sums = beside.slice(0, NW, 0), beside.slice(NW, NW, 0)
    # a lane's sums lie below each other
    o = gl.permute(gl.reshape(o, [NW, D // 8, 8, 4, H // 4]), [0, 1, 4, 2, 3])
    spare.store(gl.reshape(o, [NW * D * H // 32, 32]))
    # as one, since the compiler has warps meet between stores to the same memory
    beside.slice(0, 2 * NW, 0).store(gl.reshape(gl.permute(gl.join(m, l), [2, 0, 1]), [2 * NW, H]))
    gl.thread_barrier()
    o = gl.reshape(spare.load(_spare_layout(D, H, NW, False)), [NW, D // 8, H // 4, 8, 4])
    o = gl.convert_layout(gl.reshape(gl.permute(o, [0, 1, 3, 4, 2]), [NW, D, H]), E, assert_trivial=True)
    m_all, l_all = highest.load(gl.SliceLayout(1, E)), sums.load(gl.SliceLayout(1, E))
    gl.thread_barrier()
    o, m, l = joined(o, m_all, l_all)  # noqa: E741
    L: gl.constexpr = gl.SliceLayout(0, _sums_layout(D, H, NW))
    return o, gl.convert_layout(m, L, assert_trivial=True), gl.convert_layout(l, L, assert_trivial=True)


@gluon.jit
def leave_share(found, parts, left, live, NW: gl.constexpr):
    """Store a share of each row that `join_beside` gave."""
    L: gl.constexpr = _sums_layout(found[0].shape[0], found[0].shape[1], NW)
    leave_joined(found, parts, left, live, L, gl.SliceLayout(0, L))


@gluon.jit
def leave_no_more(parts, left, live, NW: gl.constexpr):
    """Say of all parts of rows from one on that they have seen nothing."""
    MOST: gl.constexpr = 64
    row, first, splits = left
    L: gl.constexpr = gl.BlockedLayout([1, MOST // 32], [1, 32], [NW, 1], [1, 0])
    g = gl.arange(0, 8, layout=gl.SliceLayout(1, L))[:, None]
    s = gl.arange(0, MOST, layout=gl.SliceLayout(0, L))[None, :]
    at, there = (row + g) * splits + s, (g < live) & (s >= first) & (s < splits)
    gl.store(parts.m + at, NOTHING + at * 0.0, mask=there)
    gl.store(parts.l + at, at * 0.0, mask=there)


@gluon.jit
def no_shares(D: gl.constexpr, H: gl.constexpr, NW: gl.constexpr):
    """Sums, maxima and sums of weights of H rows that have no share yet."""
    L: gl.constexpr = _sums_layout(D, H, NW)
    nothing = gl.full([H], 0.0, gl.float32, gl.SliceLayout(0, L))
    return gl.full([D, H], 0.0, gl.float32, L), nothing + NOTHING, nothing


@gluon.jit
def followed(before, share, ROWS: gl.constexpr):
    """Add a share to what those before it are: sums, maxima, sums of weights, of one row, or of ROWS.

    Two kernels do this, and must round alike: so nothing is left to the compiler to fuse.
    """
    o, m, l = before  # noqa: E741
    top = gl.maximum(m, share[1])
    fade, weight = gl.exp2(m - top), gl.exp2(share[1] - top)
    l = gl.fma(l, fade, share[2] * weight)  # noqa: E741
    if ROWS:
        fade, weight = fade[None, :], weight[None, :]
    return gl.fma(o, fade, share[0] * weight), top, l


@gluon.jit
def _over_weights(found, sink, D: gl.constexpr, ROWS: gl.constexpr):
    """Divide sums by those of weights, `sink` being one more logit or None, and by the factors of transform and levels.

    Two kernels do this, as above: a sum of two plain products might be fused in one of them, where nothing lies between.
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
def leave_followed(found, sinks, signs, out, row, live, heads, NW: gl.constexpr):
    """Rotate back and store rows, of which `live` are there, all of whose shares followed each other."""
    D: gl.constexpr = found[0].shape[0]
    H: gl.constexpr = found[0].shape[1]
    LR: gl.constexpr = gl.BlockedLayout([1, D // 32], [1, 32], [NW, 1], [1, 0])
    sink = None
    if sinks is not None:
        g = gl.arange(0, H, layout=gl.SliceLayout(0, _sums_layout(D, H, NW)))
        sink = gl.load(sinks + (row + g) % heads, mask=g < live, other=0.0)
    o = _over_weights(found, sink, D, True)
    y = transform(gl.convert_layout(gl.permute(o, [1, 0]), LR), NW)
    r = gl.arange(0, D, layout=gl.SliceLayout(0, LR))[None, :]
    d, g = r % 8 * (D // 8) + r // 8, gl.arange(0, H, layout=gl.SliceLayout(1, LR))[:, None]
    at = out + (row + g).to(gl.int64) * D + d
    gl.store(at, (y * gl.load(signs + d)).to(out.dtype.element_ty), mask=g < live)


@gluon.jit
def _asked(parts, at, r, there, D: gl.constexpr, C: gl.constexpr):
    """Ask for C shares of a row, of which `there` have a place."""
    found = ()
    for c in gl.static_range(C):
        m = gl.load(parts.m + at + c, mask=c < there, other=NOTHING)
        l = gl.load(parts.l + at + c, mask=c < there, other=0.0)  # noqa: E741
        o = gl.load(parts.o + (at + c) * D + r, mask=(r >= 0) & (c < there), other=0.0)
        found += ((o, m, l),)  # type: ignore[assignment]
    return found


@gluon.jit
def _all_followed(before, shares):
    """Add shares in their order; sums of those that have seen nothing are not there."""
    for c in gl.static_range(len(shares)):
        after = followed(before, shares[c], False)
        seen = shares[c][1] > NOTHING
        before = gl.where(seen, after[0], before[0]), gl.where(seen, after[1], before[1]), gl.where(seen, after[2], before[2])
    return before


@gluon.jit
def finish_in_order(
    parts, sinks, signs, out, heads, splits, D: gl.constexpr, P: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """Add up the shares of a row in their order, C asked for at a time and P at most, and rotate it back; grid (rows,)."""
    LR: gl.constexpr = gl.BlockedLayout([1, D // 32], [1, 32], [1, 1], [1, 0])
    row = gl.program_id(0)
    r = gl.arange(0, D, layout=gl.SliceLayout(0, LR))[None, :]
    d = r % 8 * (D // 8) + r // 8
    sign = gl.load(signs + d)
    # as in `finish_pairs`
    gdc_launch_dependents()
    gdc_wait()
    first = row.to(gl.int64) * splits
    shares = _asked(parts, first, r, splits, D, C)
    s = gl.arange(0, P, layout=gl.BlockedLayout([P // 32], [32], [1], [0]))
    seen = gl.load(parts.m + first + s, mask=s < splits, other=NOTHING) > NOTHING
    count = gl.sum(seen.to(gl.int32), 0)
    zero = (row * 0).to(gl.float32)
    found = _all_followed((gl.full([1, D], 0.0, gl.float32, LR), zero + NOTHING, zero), shares)
    for i in range(1, gl.cdiv(count, C)):
        found = _all_followed(found, _asked(parts, first + i * C, r, splits - i * C, D, C))
    sink = None if sinks is None else gl.load(sinks + row % heads)
    y = transform(_over_weights(found, sink, D, False), 1)
    gl.store(out + row.to(gl.int64) * D + d, (y * sign).to(out.dtype.element_ty))
