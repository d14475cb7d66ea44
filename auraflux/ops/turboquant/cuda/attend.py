"""Decode attention over pages of codes in pairs on Hopper: Gluon, with PTX for look-ups.

- A byte names two neighbouring levels of an operand. A table in shared memory turns it into two float16 numbers, with a column
  for every lane, so that look-ups never share a bank: one `prmt` makes the address, one `ld.shared` two elements. Codes of 2
  bits come four to a byte, and one look-up of two words gives all of them; 8 bits go one by one, 3 and 6 as in
  `attend_3_6_bits`.
- Keys [16 tokens, D] and values [D, 16 tokens] are the first operand of `mma.m16n8k16`, query heads its 8 columns. A lane's
  words of a key, and of 16 values in pairs (`arrangement.py`), hold just what its registers need: nothing is shuffled.
- Codes and norms go through a ring in shared memory, one of its own for each warp, by `cp.async`: registers would not hold what
  must be under way to keep the memory busy. A warp reads back the codes that it asked for itself, so warps wait for nobody.
- Warps are the batch of a 3-D layout: each has its own tokens, maximum and sums, and its own end (`attend_step`). They meet
  only when all are done, and programs that share a row in `attend_merge`.
- Queries are rotated by every program, while its first codes are on their way. Rows of the sums are coordinates in the order
  of the registers; `finish_pairs` undoes that, since the Walsh-Hadamard transform is the same for any order of index bits.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from auraflux.ops.hopper.copy import wait_ptx
from auraflux.ops.hopper.ptx import run
from auraflux.ops.turboquant.cuda.attend_begin import (
    ask_newer,
    ask_older,
    find_token,
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
from auraflux.ops.turboquant.cuda.attend_merge import leave_nothing, leave_part, leave_rotated_back, leave_rows
from auraflux.ops.turboquant.cuda.attend_parts import channel_scales, load_queries, query_layout, table_words, transform
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
    leave_followed,
    leave_no_more,
    leave_share,
    no_shares,
)
from auraflux.ops.turboquant.cuda.attend_split import own_shares, part_of, share_out
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


class Scores(NamedTuple):
    """How products become scores.

    factor  what makes the products of rotated queries and levels logarithms to base 2, or, capped, arguments of the cap
    cap     what capped scores reach, to base 2
    window  how far back queries see
    """

    factor: float
    cap: float
    window: int


class Work(NamedTuple):
    """How the work is cut.

    warps   of a program
    depth   steps whose codes are under way
    blocks  of 16 tokens that a warp takes at a time
    soon    of the steps under way, those asked for before the kernel before this one has ended
    one     a row has one program
    shared  programs share out the texts of a batch: grid (programs, heads * tiles), splits are those that run at once
    each    keys that a part is to have, so that a row may have less than `splits`, one after the other; 0 for equal parts
    apart   a part of a row has no codes, the last, or with `each` the first: it is that of the rows that are kept as they are
    several a program has several parts of `each` keys, or with `one` all: grid (programs of a row, heads * tiles, tokens)
    spread  with `each`: queries are four at most and have every other column of a product, so that their sums are half of a
            lane's
    """

    warps: int
    depth: int
    blocks: int
    soon: int
    one: bool
    shared: bool
    each: int
    apart: bool
    several: bool
    spread: bool


@gluon.jit
def attend_pairs(
    q, signs, keys, values, levels, index, parts, sinks, out, scores, tokens, splits, centres, plain, SHAPE: gl.constexpr,
    KEPT: gl.constexpr, WORK: gl.constexpr, G: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Attend from one token's query heads to the keys of one split; grid (splits, HEADS * tiles of 8 query heads, tokens).

    parts   where the parts of a row are left; or None, with one split
    out      [tokens, query heads, D]  where rows are left that have one part
    centres  what keys leave out; None for nothing
    plain    rows that are kept as they are, read by the last split; None for none
    """
    HEADS: gl.constexpr = SHAPE.heads
    D: gl.constexpr = SHAPE.width
    KEY_BITS: gl.constexpr = SHAPE.key_bits
    VALUE_BITS: gl.constexpr = SHAPE.value_bits
    PAGE: gl.constexpr = SHAPE.page
    S: gl.constexpr = SHAPE.sequences
    NW: gl.constexpr = WORK.warps
    U: gl.constexpr = WORK.blocks
    EACH: gl.constexpr = (G + (G + 7) // 8 - 1) // ((G + 7) // 8)
    STAGE: gl.constexpr = stage_nbytes(D, KEY_BITS, VALUE_BITS, U)
    ROWS: gl.constexpr = ring_begin(D) // 4096 + (NW * WORK.depth * STAGE + 4095) // 4096
    split, token = gl.program_id(0), gl.program_id(2)
    head, tile = gl.program_id(1) // ((G + 7) // 8), gl.program_id(1) % ((G + 7) // 8)
    # all memory is one piece, so the table is where shared memory begins; the compiler does not see the look-ups read it, hence
    # the barriers and _keep_alive
    shared = gl.allocate_shared_memory(gl.int32, [ROWS, 1024], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # a program that shares its multiprocessor has no registers for more
    early = _early(levels, centres if WORK.apart and WORK.each == 0 else None, head, D, KEY_BITS, VALUE_BITS, NW)
    if WORK.shared:
        number = split
        given = share_out(index, splits, scores.window, NW * 16 * U, S, NW)
        sequence, token, position, old, splits, split = part_of(number, given, index.sequences)
        guess = sequence
        if sequence >= index.sequences:
            return
    else:
        guess = gl.minimum(token, index.sequences - 1)
        sequence, position, old = find_token(index, token, guess, tokens, S, NW)
    # codes are read from `low` on and up to `end`; of what is kept as it is, `oldest` on
    LOW: gl.constexpr = WINDOW or KEPT.first > 0
    oldest = gl.maximum(position + 1 - scores.window, 0)
    low = gl.maximum(oldest, KEPT.first) if LOW else 0
    end = gl.minimum(position + 1 - KEPT.newest, index.width * PAGE)
    row, live = (token * HEADS + head) * G + tile * EACH, gl.minimum(EACH, G - tile * EACH)
    # the first part of codes
    FIRST: gl.constexpr = 1 if WORK.each > 0 and plain is not None else 0
    # where parts are left: rows of a program together, or parts of a row
    left = ((number - token) * (HEADS * G) + row, 0, 1) if WORK.shared else (row, split, splits)
    last, begin = split == splits - 1, low // (16 * U) * (16 * U)
    if WORK.each > 0:
        last, begin, stride, end, shares = own_shares(begin, end, split, splits, plain is not None, WORK)
        if WORK.several:
            left = row, shares[1] + FIRST, splits
    else:
        # splits take blocks in turn
        stride = (splits - 1 if WORK.apart else splits) * (NW * 16 * U)
        begin, shares = begin + split * (NW * 16 * U), None
    if not WORK.one:  # noqa: SIM102
        if begin >= end and (plain is None or not last):
            gdc_wait()
            if not WORK.several:
                leave_nothing(parts, left, live, NW)
            elif last:
                leave_no_more(parts, (row, FIRST, splits), live, NW)
            return
    mine, span = (sequence, guess, position, old, head, split, last), (begin, stride, low, end, oldest)
    queries = q + row.to(gl.int64) * D
    if WORK.apart:
        if last:
            o, l, m = _kept(  # noqa: E741
                queries, live, signs, scores, centres, plain, shared, mine, oldest, SHAPE, KEPT, WORK, SOFTCAP
            )
        else:
            o, l, m = _codes(  # noqa: E741
                queries, live, signs, keys, values, early, index, scores, centres, None, shared, mine, span,
                None, SHAPE, KEPT, WORK, LOW, SOFTCAP,
            )  # fmt: skip
    else:
        o, l, m = _codes(  # noqa: E741
            queries, live, signs, keys, values, early, index, scores, centres, plain, shared, mine, span,
            (parts, left, shares) if WORK.several else None, SHAPE, KEPT, WORK, LOW, SOFTCAP,
        )  # fmt: skip
    if WORK.several:
        shared._keep_alive()
        if WORK.one:
            leave_followed((o, m, l), sinks, signs, out, row, live, HEADS * G, NW)
    else:
        gl.thread_barrier()
        if WORK.each > 0 and D <= 128:
            leave_share(join_beside(o, m, sums(l, NW), shared, WORK.spread, NW), parts, left, live, NW)
            shared._keep_alive()
        else:
            shared._keep_alive()
            if WORK.one:
                leave_rows(o, m, sums(l, NW), sinks, signs, out, row, live, HEADS * G, D, NW)
            else:
                _leave(o, m, sums(l, NW), signs, parts, left, live, D, WORK.shared, NW)


@gluon.jit
def _early(levels, centres, head, D: gl.constexpr, KEY_BITS: gl.constexpr, VALUE_BITS: gl.constexpr, NW: gl.constexpr):
    """Load what depends on nothing: the sides of the table, and what centres and queries are made of."""
    found = (_levels(levels, KEY_BITS, VALUE_BITS, NW),)
    if centres is not None:
        more = angle_channels(centres, D, NW), channel_scales(centres.scale + head * D, D, NW)
        found = found + more  # type: ignore[assignment]
    return found


@gluon.jit
def _codes(
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
    rotated, turning = _query_rows(shared, D)
    gdc_wait()
    gdc_launch_dependents()
    x = load_queries(q, signs, live, D, NW, WORK.spread)
    if centres is not None:
        x *= early[2] if len(early) > 1 else channel_scales(centres.scale + head * D, D, NW)
        turning.store((angle_queries(q, weights_of, live, D, NW, WORK.spread) * (scores.factor * D)).to(gl.float16))
    if plain is not None:
        keys_of = plain_keys(plain, places_of, SHAPE, KEPT, NW)
    ask_newer(blocks, to, source, t, stride, old, end, D, KEY_BITS, VALUE_BITS, U, DEEP, WORK.soon)
    qx = _operand(x, rotated, scores.factor, D, KEY_BITS, NW)
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
    if WORK.several:
        parts, left, shares = several
        each, _, many, absent = shares
        if not WORK.one:  # noqa: SIM102
            if absent >= 0:
                leave_no_more(parts, (left[0], left[1] + absent, left[2]), live, NW)
        # what was in shared memory before is read: the compiler would have warps meet for that before every join
        gl.thread_barrier()
        for share in range(many):
            if centres is None:
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
    elif centres is None:
        for i in range(count):
            o, l, m, page, next_page, stage = _step(  # noqa: E741
                i, o, l, m, page, next_page, stage, None, qx, table, index, scores, cut, SHAPE, WORK, LOW, SOFTCAP
            )
    else:
        for first in range(0, count, STEPS):
            for i in range(first, gl.minimum(first + STEPS, count)):
                centre = of_step(found, i)
                o, l, m, page, next_page, stage = _step(  # noqa: E741
                    i, o, l, m, page, next_page, stage, centre, qx, table, index, scores, cut, SHAPE, WORK, LOW, SOFTCAP
                )
            if first + STEPS < count:
                following = row_positions(begin + (first + STEPS) * stride, stride, D, NW, 16 * U)
                found = centre_scores(angles_at(centres, following, D, NW), turning, D, NW)
    run(wait_ptx(0), lane)
    if WORK.several and WORK.one:
        o, m, l = row_of  # noqa: E741
    return o, l, m


@gluon.jit
def _nothing_yet(D: gl.constexpr, NW: gl.constexpr):
    """Sums, sums of weights and maxima of no keys."""
    M: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [NW, 1, 1], [1, 16, 8])
    o = gl.full([NW, D, 8], 0.0, gl.float32, M)
    l = gl.full([NW, 8, 8], 0.0, gl.float32, sum_layout(NW))  # noqa: E741
    return o, l, gl.full([NW, 8], -1e29, gl.float32, gl.SliceLayout(1, M))


@gluon.jit
def _kept(
    q, live, signs, scores, centres, plain, shared, mine, oldest,
    SHAPE: gl.constexpr, KEPT: gl.constexpr, WORK: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Attend to the rows that are kept as they are alone: sums, sums of weights, maxima.

    With few keys a program waits for its instructions more than for anything else, so that those who attend to codes have none
    of this.
    """
    D: gl.constexpr = SHAPE.width
    NW: gl.constexpr = WORK.warps
    sequence, _, position, _, head, _, _ = mine
    places_of = plain_places(plain, sequence, position, head, None, SHAPE, KEPT, NW)
    rotated, _ = _query_rows(shared, D)
    if centres is not None:
        scale = channel_scales(centres.scale + head * D, D, NW)
    gdc_wait()
    gdc_launch_dependents()
    keys_of = plain_keys(plain, places_of, SHAPE, KEPT, NW)
    x = load_queries(q, signs, live, D, NW, WORK.spread)
    if centres is not None:
        x *= scale
    qx = _operand(x, rotated, scores.factor, D, SHAPE.key_bits, NW)
    return attend_plain(keys_of, plain, places_of, qx, oldest, scores.cap, SHAPE, KEPT, SOFTCAP, NW)


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
def _leave(o, m, l, signs, parts, left, live, D: gl.constexpr, SHARED: gl.constexpr, NW: gl.constexpr):  # noqa: E741
    """Leave a part of each row, rotated back where `finish_rotated` merges."""
    if D == 256 and not SHARED:
        leave_rotated_back(o, m, l, signs, parts, left, live, D, NW)
    else:
        leave_part(o, m, l, parts, left, live, D, NW)


@gluon.jit
def _query_rows(shared, D: gl.constexpr):
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
def _operand(x, rotated, factor, D: gl.constexpr, BITS: gl.constexpr, NW: gl.constexpr):
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
def _levels(levels, KEY_BITS: gl.constexpr, VALUE_BITS: gl.constexpr, NW: gl.constexpr):
    """Load the sides of the table: one serves both where bits are equal."""
    keys = table_words(levels, 0, KEY_BITS, NW)
    return (keys,) if KEY_BITS == VALUE_BITS else (keys, table_words(levels, 1, VALUE_BITS, NW))


@gluon.jit
def _fill(shared, sides):
    whole = shared._reinterpret(gl.int32, [256, 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    for i in gl.static_range(len(sides)):
        whole.slice(32 * i, 32, 1).store(sides[i])
