"""How a program of `attend` goes through codes: it prepares its queries while the first are on their way, then takes steps."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from auraflux.ops.hopper.copy import wait_ptx
from auraflux.ops.hopper.ptx import run
from auraflux.ops.turboquant.cuda.attend_begin import (
    ask_newer,
    ask_older,
    first_blocks,
    first_pages,
    lanes_of,
    steps_of,
)
from auraflux.ops.turboquant.cuda.attend_kept import (
    STEPS,
    angle_channels,
    angle_queries,
    angle_weights,
    angles_at,
    attend_plain,
    centre_scores,
    of_step,
    plain_keys,
    plain_places,
    row_positions,
)
from auraflux.ops.turboquant.cuda.attend_parts import channel_scales, load_queries, query_layout, transform
from auraflux.ops.turboquant.cuda.attend_ring import (
    block_of,
    copy_keys,
    copy_values,
    key_words,
    page_of,
    places,
    sources,
    stage_nbytes,
)
from auraflux.ops.turboquant.cuda.attend_shares import (
    followed,
    join_beside,
    leave_no_more,
    leave_share,
    no_shares,
)
from auraflux.ops.turboquant.cuda.attend_step import (
    all_scores,
    halved,
    halves,
    keys_at,
    seen_of,
    sum_layout,
    sums,
    value_tile,
    values_at,
    weights,
)

LANE = gl.constexpr("mov.u32 $0, %laneid; shl.b32 $0, $0, 2; // $1")


@gluon.constexpr_function
def ring_begin(width):
    """Where the ring begins in shared memory: after the table and 8 queries, both as keys and as centres are multiplied."""
    return 16 * 4096 + max(4096, 32 * width)


@gluon.jit
def attend_codes(
    q, live, signs, keys, values, early, index, scores, centres, plain, shared, mine, span, several,
    SHAPE: gl.constexpr, KEPT: gl.constexpr, WORK: gl.constexpr, LOW: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Attend to codes, where `plain` is given to rows kept as they are before: sums, sums of weights, maxima.

    several  where the parts of a program go and what they are, if it has several: these are left one after the other, or,
             where they are all, added up: sums, maxima, sums of weights
    """
    D: gl.constexpr = SHAPE.width
    KEY_BITS: gl.constexpr = SHAPE.key_bits
    VALUE_BITS: gl.constexpr = SHAPE.value_bits
    PAGE: gl.constexpr = SHAPE.page
    NW: gl.constexpr = WORK.warps
    DEEP: gl.constexpr = WORK.depth
    U: gl.constexpr = WORK.blocks
    UNITS: gl.constexpr = KEY_BITS % 3 == 0 or VALUE_BITS % 3 == 0
    sequence, guess, position, old, head, split, last = mine
    begin, stride, low, end, oldest = span
    warp, lane, key, t = lanes_of(begin, index.pool, U, NW)
    source = sources(keys, values, lane, D, KEY_BITS, VALUE_BITS)
    place, to, at = places(split, warp, lane, ring_begin(D), DEEP, U, D, KEY_BITS, VALUE_BITS, NW)
    # codes of earlier steps, levels and signs are older than the kernel before this one; what it may have written is asked for
    # when it has ended, and ends the groups
    pages = first_pages(index, sequence, guess, t, stride, PAGE)
    if plain is not None:
        places_of = plain_places(plain, sequence, position, head, None if WORK.several and WORK.one else last, SHAPE, KEPT, NW)
    if centres is not None:
        channels = early[1] if len(early) > 1 else angle_channels(centres, D, NW)
        weights_of = angle_weights(centres, channels, head, D, NW)
        angles = angles_at(centres, row_positions(begin, stride, D, NW, 16 * U), D, NW)
    blocks, page, next_page, table = first_blocks(
        pages, t, stride, head, index.pool, index.width, SHAPE.heads, PAGE, UNITS, DEEP
    )
    ask_older(blocks, to, source, t, stride, old, D, KEY_BITS, VALUE_BITS, U, WORK.soon)
    _fill(shared, early[0])
    # neither depend on the kernel before
    rotated, turning = query_places(shared, D)
    gdc_wait()
    gdc_launch_dependents()
    x = load_queries(q, signs, live, D, NW, WORK.spread)
    if centres is not None:
        x *= early[2] if len(early) > 1 else channel_scales(centres.scale + head * D, D, NW)
        turning.store((angle_queries(q, weights_of, live, D, NW, WORK.spread) * (scores.factor * D)).to(gl.float16))
    if plain is not None:
        keys_of = plain_keys(plain, places_of, SHAPE, KEPT, NW)
    ask_newer(blocks, to, source, t, stride, old, end, D, KEY_BITS, VALUE_BITS, U, DEEP, WORK.soon)
    qx = query_operand(x, rotated, scores.factor, D, KEY_BITS, NW)
    if centres is not None:
        found = centre_scores(angles, turning, D, NW)
    column = gl.inline_asm_elementwise(LANE, "=r,r", [split], dtype=gl.int32, is_pure=True, pack=1)

    o, l, m = _nothing_yet(D, NW)  # noqa: E741
    row_of = no_shares(D, 4 if WORK.spread else 8, NW) if WORK.several else (o, m, l)
    if plain is not None:  # noqa: SIM102
        if last:
            o, l, m = attend_plain(  # noqa: E741
                keys_of, plain, places_of, qx, oldest, scores.cap, SHAPE, KEPT, SOFTCAP, NW
            )
            if WORK.several:
                parts, left, _ = several
                joined = join_beside(o, m, sums(l, NW), shared, WORK.spread, NW)
                if WORK.one:
                    row_of = followed(row_of, joined, True)
                else:
                    leave_share(joined, parts, (left[0], 0, left[2]), live, NW)
                o, l, m = _nothing_yet(D, NW)  # noqa: E741
    stage = split * 0
    count = steps_of(begin, end, stride, U)
    cut = at, to, source, lane, t, key, stride, low, end, head, column, place
    ring = page, next_page, table
    known = (centres, found, turning, begin) if centres is not None else None
    if WORK.several:
        row_of = _share_after_share(
            ring,
            known,
            row_of,
            (o, l, m, stage),
            qx,
            index,
            scores,
            cut,
            count,
            several,
            live,
            shared,
            SHAPE,
            WORK,
            LOW,
            SOFTCAP,
        )
    else:
        o, l, m = _step_after_step(  # noqa: E741
            ring, known, (o, l, m, stage), qx, index, scores, cut, count, SHAPE, WORK, LOW, SOFTCAP
        )
    run(wait_ptx(0), lane)
    if WORK.several and WORK.one:
        o, m, l = row_of  # noqa: E741
    return o, l, m


@gluon.jit
def _step_after_step(
    ring, known, so_far, qx, index, scores, cut, count,
    SHAPE: gl.constexpr, WORK: gl.constexpr, LOW: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Take all steps of a program that has one part of a row.

    known  centres of keys, scores of the first, the queries they are of, and where codes begin; None where keys have no centres
    """
    D: gl.constexpr = SHAPE.width
    NW: gl.constexpr = WORK.warps
    U: gl.constexpr = WORK.blocks
    page, next_page, table = ring
    if known is not None:
        centres, found, turning, begin = known
    o, l, m, stage = so_far  # noqa: E741
    if known is None:
        for i in range(count):
            o, l, m, page, next_page, stage = _step(  # noqa: E741
                i, o, l, m, page, next_page, stage, None, qx, table, index, scores, cut, SHAPE, WORK, LOW, SOFTCAP
            )
    else:
        stride = cut[6]
        for first in range(0, count, STEPS):
            for i in range(first, gl.minimum(first + STEPS, count)):
                centre = of_step(found, i)
                o, l, m, page, next_page, stage = _step(  # noqa: E741
                    i, o, l, m, page, next_page, stage, centre, qx, table, index, scores, cut, SHAPE, WORK, LOW, SOFTCAP
                )
            if first + STEPS < count:
                following = row_positions(begin + (first + STEPS) * stride, stride, D, NW, 16 * U)
                found = centre_scores(angles_at(centres, following, D, NW), turning, D, NW)
    return o, l, m


@gluon.jit
def _share_after_share(
    ring, known, row_of, so_far, qx, index, scores, cut, count, several, live, shared,
    SHAPE: gl.constexpr, WORK: gl.constexpr, LOW: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Take the steps of a program that has several parts of a row: each is left, or, where they are all, added to `row_of`."""
    D: gl.constexpr = SHAPE.width
    NW: gl.constexpr = WORK.warps
    U: gl.constexpr = WORK.blocks
    page, next_page, table = ring
    if known is not None:
        centres, found, turning, begin = known
    o, l, m, stage = so_far  # noqa: E741
    stride = cut[6]
    parts, left, shares = several
    each, _, many, absent = shares
    if not WORK.one:  # noqa: SIM102
        if absent >= 0:
            leave_no_more(parts, (left[0], left[1] + absent, left[2]), live, NW)
    # what was in shared memory before is read: the compiler would have warps meet for that before every join
    gl.thread_barrier()
    for share in range(many):
        if known is None:
            for i in range(share * each, gl.minimum(share * each + each, count)):
                o, l, m, page, next_page, stage = _step(  # noqa: E741
                    i, o, l, m, page, next_page, stage, None, qx, table, index, scores, cut, SHAPE, WORK, LOW, SOFTCAP
                )
        else:
            for i in range(share * each, gl.minimum(share * each + each, count)):
                if (i > 0) & (i % STEPS == 0):
                    following = row_positions(begin + i * stride, stride, D, NW, 16 * U)
                    found = centre_scores(angles_at(centres, following, D, NW), turning, D, NW)
                centre = of_step(found, i)
                o, l, m, page, next_page, stage = _step(  # noqa: E741
                    i, o, l, m, page, next_page, stage, centre, qx, table, index, scores, cut, SHAPE, WORK, LOW, SOFTCAP
                )
        joined = join_beside(o, m, sums(l, NW), shared, WORK.spread, NW)
        if WORK.one:
            row_of = followed(row_of, joined, True)
        else:
            leave_share(joined, parts, (left[0], left[1] + share, left[2]), live, NW)
        o, l, m = _nothing_yet(D, NW)  # noqa: E741
    return row_of


@gluon.jit
def _nothing_yet(D: gl.constexpr, NW: gl.constexpr):
    """Sums, sums of weights and maxima of no keys."""
    M: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [NW, 1, 1], [1, 16, 8])
    o = gl.full([NW, D, 8], 0.0, gl.float32, M)
    l = gl.full([NW, 8, 8], 0.0, gl.float32, sum_layout(NW))  # noqa: E741
    return o, l, gl.full([NW, 8], -1e29, gl.float32, gl.SliceLayout(1, M))


@gluon.jit
def _step(
    i, o, l, m, page, next_page, stage, centre, qx, table, index, scores, cut,  # noqa: E741
    SHAPE: gl.constexpr, WORK: gl.constexpr, LOW: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Attend to a warp's i-th blocks, and ask for those that take their place in the ring."""
    D: gl.constexpr = SHAPE.width
    KEY_BITS: gl.constexpr = SHAPE.key_bits
    VALUE_BITS: gl.constexpr = SHAPE.value_bits
    PAGE: gl.constexpr = SHAPE.page
    NW: gl.constexpr = WORK.warps
    DEEP: gl.constexpr = WORK.depth
    U: gl.constexpr = WORK.blocks
    UNITS: gl.constexpr = KEY_BITS % 3 == 0 or VALUE_BITS % 3 == 0
    STAGE: gl.constexpr = stage_nbytes(D, KEY_BITS, VALUE_BITS, U)
    at, to, source, lane, t, key, stride, low, end, head, column, place = cut
    run(wait_ptx(2 * DEEP - 1), lane)
    mine = keys_at(at, stage, D, KEY_BITS, U, NW)
    # this part of the ring is free again; a page is asked for two steps before its codes
    block = block_of(page, t + (i + DEEP) * stride, head, index.pool, SHAPE.heads, PAGE, UNITS)
    needed = t < end - (i + DEEP) * stride
    copy_keys(to, source, stage, block, needed, D, KEY_BITS, U, True)
    page, next_page = next_page, page_of(table, t + (i + DEEP + 2) * stride, index.width, PAGE)
    seen = seen_of(key, low - i * stride, end - i * stride, LOW, U)
    logits, top = all_scores(mine, seen, m, qx, centre, column, place, scores.cap, D, KEY_BITS, SOFTCAP, U, NW)
    run(wait_ptx(2 * DEEP - 1), lane)
    words = values_at(at, stage, D, VALUE_BITS, U, NW)
    copy_values(to, source, stage, block, needed, D, VALUE_BITS, U, True)
    fade = gl.exp2(m - top)
    o, l = o * fade[:, None, :], l * halved(fade, NW)  # noqa: E741
    for u in gl.static_range(U):
        p = gl.exp2(logits[u] - top[:, None, :])
        l += halves(p, NW)  # noqa: E741
        vx = value_tile(words[u], column, place, KEY_BITS, VALUE_BITS, D, NW)
        o = mma_v2(vx, weights(p, mine[u][2], seen[u], NW), o)
    stage = gl.where(stage == (DEEP - 1) * STAGE, 0, stage + STAGE)
    return o, l, top, page, next_page, stage


@gluon.jit
def query_places(shared, D: gl.constexpr):
    """Where 8 queries lie before the ring, as keys and as centres are multiplied."""
    LQ: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    if D > 128:
        rotated = shared.index(16)._reinterpret(gl.float16, [8, D], LQ)
        turning = shared.index(17)._reinterpret(gl.float16, [8, D], LQ)
    else:
        both = shared.index(16)._reinterpret(gl.float16, [16, D], LQ)
        rotated, turning = both.slice(0, 8, 0), both.slice(8, 8, 0)
    return rotated, turning


@gluon.jit
def query_operand(x, rotated, factor, D: gl.constexpr, BITS: gl.constexpr, NW: gl.constexpr):
    """Rotate queries, and give them to every warp as the second operand of scores."""
    CHUNK: gl.constexpr = 32 * key_words(D, BITS)[1] // BITS  # neighbouring coordinates of a lane's keys
    LQ: gl.constexpr = query_layout(NW, D, CHUNK)
    B: gl.constexpr = gl.DotOperandLayout(1, gl.NVMMADistributedLayout([2, 0], [NW, 1, 1], [1, 16, 8]), 2)
    rotated.store((transform(x, NW) * factor).to(gl.float16))
    gl.thread_barrier()
    warps = gl.arange(0, NW, layout=gl.SliceLayout(1, gl.SliceLayout(2, LQ)))[:, None, None]
    qx = gl.expand_dims(rotated.load(gl.SliceLayout(0, LQ)), 0) + (warps * 0).to(gl.float16)
    qx = gl.reshape(qx, [NW, 8, D // (4 * CHUNK), 4, CHUNK // 2, 2])
    qx = gl.reshape(gl.permute(qx, [0, 2, 4, 3, 5, 1]), [NW, D, 8])  # j, word and pair, c, e | head
    return gl.convert_layout(qx, B, assert_trivial=True)


@gluon.jit
def _fill(shared, sides):
    whole = shared._reinterpret(gl.int32, [256, 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    for i in gl.static_range(len(sides)):
        whole.slice(32 * i, 32, 1).store(sides[i])
