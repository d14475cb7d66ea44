"""Main loop of decode attention over codes: prepare queries while the first codes are in flight, then step through blocks."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from auraflux.ops.gpu.blocks.dependent_launch import gdc_launch_dependents, gdc_wait
from auraflux.ops.hopper.copy import wait_ptx
from auraflux.ops.hopper.ptx import run
from auraflux.ops.turboquant.cuda.decode.full_precision import (
    STEPS,
    angle_channels,
    angle_queries,
    angle_weights,
    angles_at,
    attend_full_precision,
    full_precision_keys,
    full_precision_rows,
    mean_scores,
    mean_scores_of_step,
    row_positions,
)
from auraflux.ops.turboquant.cuda.decode.invariant_splits import (
    accumulate,
    empty_accumulator,
    reduce_in_spare_memory,
    store_empty_splits,
    store_split,
)
from auraflux.ops.turboquant.cuda.decode.lookup import (
    channel_scales,
    column_ptx,
    load_queries,
    query_layout,
    table_rows,
    transform,
)
from auraflux.ops.turboquant.cuda.decode.prologue import (
    copy_new_blocks,
    copy_old_blocks,
    first_blocks,
    first_pages,
    lanes_of,
    padded_batch_size,
)
from auraflux.ops.turboquant.cuda.decode.ring import (
    block_of,
    copy_keys,
    copy_values,
    key_words,
    page_of,
    places,
    sources,
    stage_nbytes,
)
from auraflux.ops.turboquant.cuda.decode.step import (
    all_logits,
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
from auraflux.ops.turboquant.cuda.encode.new_token import channels_of, rope_angles, rotated_queries


@gluon.constexpr_function
def ring_begin(width, compact=False):
    """Return the offset of the ring in shared memory: after the level table and 8 queries, for keys and for means."""
    return table_rows(compact) * 4096 + max(4096, 32 * width)


@gluon.constexpr_function
def has_low(config):
    """Return whether codes begin after position 0: with a sliding window or sink tokens."""
    return config.window or config.full.sink_tokens > 0


@gluon.jit
def attend_codes(
    queries, keys, values, early, index, scores, means, full, shared, task, multi, CONFIG: gl.constexpr
):  # fmt: skip
    """Attend to full-precision tokens where `full` is given, then to codes; return output sums, softmax sums, maxima.

    multi  with several splits: partial results, their destination, the splits of this program. They are stored one by one, or
           accumulated where the program has all of them
    """
    SHAPE: gl.constexpr = CONFIG.shape
    FULL: gl.constexpr = CONFIG.full
    WORK: gl.constexpr = CONFIG.work
    D: gl.constexpr = SHAPE.width
    KEY_BITS: gl.constexpr = SHAPE.key_bits
    VALUE_BITS: gl.constexpr = SHAPE.value_bits
    PAGE: gl.constexpr = SHAPE.page
    NW: gl.constexpr = WORK.warps
    DEEP: gl.constexpr = WORK.depth
    U: gl.constexpr = WORK.blocks
    UNITS: gl.constexpr = KEY_BITS % 3 == 0 or VALUE_BITS % 3 == 0
    q, live, signs, new = queries
    sequence, expected, position, old, head, split, last, begin, stride, low, end, oldest = task
    warp, lane, key, t = lanes_of(begin, index.pool, U, NW)
    source = sources(keys, values, lane, D, KEY_BITS, VALUE_BITS)
    place, to, at = places(split, warp, lane, ring_begin(D, WORK.compact), DEEP, U, D, KEY_BITS, VALUE_BITS, NW)
    # codes of earlier steps, levels and signs are older than the previous kernel (PDL); what it may have written is copied
    # after gdc_wait, which also commits the cp.async groups
    pages = first_pages(index, sequence, expected, t, stride, PAGE)
    if full is not None:
        wanted = None if WORK.multi_split and WORK.single_split else last
        newest = position - 1 if WORK.new_split else position
        full_rows = full_precision_rows(full, sequence, position, newest, head, wanted, SHAPE, FULL, NW)
    if means is not None:
        channels = early[1] if len(early) > 1 else angle_channels(means, D, NW)
        angle_w = angle_weights(means, channels, head, D, NW)
        angles = angles_at(means, row_positions(begin, stride, D, NW, 16 * U), D, NW)
    blocks, page, next_page, table = first_blocks(
        pages, t, stride, head, index.pool, index.width, SHAPE.heads, PAGE, UNITS, DEEP
    )
    copy_old_blocks(blocks, to, source, t, stride, old, CONFIG)
    _fill_table(shared, early[0], WORK.compact)
    if WORK.new_split:
        turn = rope_angles(new, channels_of(D, NW), WORK.interleaved)
        if means is not None:
            angle_turns = rope_angles(new, channels[0], WORK.interleaved), rope_angles(new, channels[1], WORK.interleaved)
    # neither depends on the previous kernel
    rotated, angle_q = query_places(shared, D, WORK.compact)
    gdc_wait()
    gdc_launch_dependents()
    if WORK.new_split:
        x = rotated_queries(q, live, new, turn, D, NW) * gl.load(signs + channels_of(D, NW))
    else:
        x = load_queries(q, signs, live, D, NW, WORK.even_columns)
    if means is not None:
        x *= early[2] if len(early) > 1 else channel_scales(means.scale + head * D, D, NW)
        if WORK.new_split:
            along = rotated_queries(q, live, new, angle_turns[0], D, NW) * angle_w[0][1]
            along += rotated_queries(q, live, new, angle_turns[1], D, NW) * angle_w[1][1]
        else:
            along = angle_queries(q, angle_w, live, D, NW, WORK.even_columns)
        angle_q.store((along * (scores.factor * D)).to(gl.float16))
    if full is not None:
        full_keys = full_precision_keys(full, full_rows, SHAPE, FULL, NW)
    copy_new_blocks(blocks, to, source, t, stride, old, end, CONFIG)
    qx = query_operand(x, rotated, scores.factor, D, KEY_BITS, NW)
    if means is not None:
        found = mean_scores(angles, angle_q, D, NW)
    COLUMN: gl.constexpr = column_ptx(WORK.compact, KEY_BITS == VALUE_BITS)
    column = gl.inline_asm_elementwise(COLUMN, "=r,r", [split], dtype=gl.int32, is_pure=True, pack=1)

    o, l, m = _empty_softmax(D, NW)  # noqa: E741
    acc = empty_accumulator(D, 4 if WORK.even_columns else 8, NW) if WORK.multi_split else (o, m, l)
    if full is not None:  # noqa: SIM102
        if last:
            o, l, m = attend_full_precision(  # noqa: E741
                full_keys, full, full_rows, qx, oldest, scores.cap, SHAPE, FULL, CONFIG.softcap, NW
            )
            if WORK.multi_split:
                partials, dest, _ = multi
                reduced = reduce_in_spare_memory(o, m, sums(l, NW), shared, WORK.even_columns, NW)
                if WORK.single_split:
                    acc = accumulate(acc, reduced, True)
                else:
                    store_split(reduced, partials, (dest[0], 0, dest[2]), live, NW)
                o, l, m = _empty_softmax(D, NW)  # noqa: E741
    stage = split * 0
    count = padded_batch_size(begin, end, stride, U)
    step_args = at, to, source, lane, t, key, stride, low, end, head, column, place
    ring = page, next_page, table
    mean_state = (means, found, angle_q, begin) if means is not None else None
    if WORK.multi_split:
        own = (multi[0], multi[1], multi[2], live)
        acc = _loop_over_splits(
            ring, mean_state, acc, (o, l, m, stage), qx, index, scores, step_args, count, own, shared, CONFIG
        )  # fmt: skip
    else:
        o, l, m = _loop_over_steps(  # noqa: E741
            ring, mean_state, (o, l, m, stage), qx, index, scores, step_args, count, CONFIG
        )
    run(wait_ptx(0), lane)
    if WORK.multi_split and WORK.single_split:
        o, m, l = acc  # noqa: E741
    return o, l, m


@gluon.jit
def _loop_over_steps(
    ring, mean_state, softmax, qx, index, scores, step_args, count, CONFIG: gl.constexpr
):  # fmt: skip
    """Run all steps of a program that has one split of a row.

    mean_state  key means, their first scores, the queries for them, first position; None without calibration
    """
    WORK: gl.constexpr = CONFIG.work
    D: gl.constexpr = CONFIG.shape.width
    NW: gl.constexpr = WORK.warps
    U: gl.constexpr = WORK.blocks
    page, next_page, table = ring
    if mean_state is not None:
        means, found, angle_q, begin = mean_state
    o, l, m, stage = softmax  # noqa: E741
    if mean_state is None:
        for i in range(count):
            o, l, m, page, next_page, stage = _step(  # noqa: E741
                i, (o, l, m, page, next_page, stage), None, qx, table, index, scores, step_args, CONFIG
            )
    else:
        stride = step_args[6]
        for first in range(0, count, STEPS):
            for i in range(first, gl.minimum(first + STEPS, count)):
                mean = mean_scores_of_step(found, i)
                o, l, m, page, next_page, stage = _step(  # noqa: E741
                    i, (o, l, m, page, next_page, stage), mean, qx, table, index, scores, step_args, CONFIG
                )
            if first + STEPS < count:
                next_positions = row_positions(begin + (first + STEPS) * stride, stride, D, NW, 16 * U)
                found = mean_scores(angles_at(means, next_positions, D, NW), angle_q, D, NW)
    return o, l, m


@gluon.jit
def _loop_over_splits(
    ring, mean_state, acc, softmax, qx, index, scores, step_args, count, own, shared, CONFIG: gl.constexpr
):  # fmt: skip
    """Run the steps of a program that has several splits of a row: store each, or accumulate them if it has all."""
    WORK: gl.constexpr = CONFIG.work
    D: gl.constexpr = CONFIG.shape.width
    NW: gl.constexpr = WORK.warps
    U: gl.constexpr = WORK.blocks
    page, next_page, table = ring
    if mean_state is not None:
        means, found, angle_q, begin = mean_state
    o, l, m, stage = softmax  # noqa: E741
    stride = step_args[6]
    partials, dest, assigned, live = own
    steps_each, _, count_own, empty_from = assigned
    if not WORK.single_split:  # noqa: SIM102
        if empty_from >= 0:
            store_empty_splits(partials, (dest[0], dest[1] + empty_from, dest[2]), live, NW)
    # one barrier here, or the compiler inserts one before every reduction to protect earlier reads of shared memory
    gl.thread_barrier()
    for part in range(count_own):
        if mean_state is None:
            for i in range(part * steps_each, gl.minimum(part * steps_each + steps_each, count)):
                o, l, m, page, next_page, stage = _step(  # noqa: E741
                    i, (o, l, m, page, next_page, stage), None, qx, table, index, scores, step_args, CONFIG
                )
        else:
            for i in range(part * steps_each, gl.minimum(part * steps_each + steps_each, count)):
                if (i > 0) & (i % STEPS == 0):
                    next_positions = row_positions(begin + i * stride, stride, D, NW, 16 * U)
                    found = mean_scores(angles_at(means, next_positions, D, NW), angle_q, D, NW)
                mean = mean_scores_of_step(found, i)
                o, l, m, page, next_page, stage = _step(  # noqa: E741
                    i, (o, l, m, page, next_page, stage), mean, qx, table, index, scores, step_args, CONFIG
                )
        reduced = reduce_in_spare_memory(o, m, sums(l, NW), shared, WORK.even_columns, NW)
        if WORK.single_split:
            acc = accumulate(acc, reduced, True)
        else:
            store_split(reduced, partials, (dest[0], dest[1] + part, dest[2]), live, NW)
        o, l, m = _empty_softmax(D, NW)  # noqa: E741
    return acc


@gluon.jit
def _empty_softmax(D: gl.constexpr, NW: gl.constexpr):
    """Return output sums, softmax sums and maxima of no keys."""
    M: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [NW, 1, 1], [1, 16, 8])
    o = gl.full([NW, D, 8], 0.0, gl.float32, M)
    l = gl.full([NW, 8, 8], 0.0, gl.float32, sum_layout(NW))  # noqa: E741
    return o, l, gl.full([NW, 8], -1e29, gl.float32, gl.SliceLayout(1, M))


@gluon.jit
def _step(
    i, state, mean, qx, table, index, scores, step_args, CONFIG: gl.constexpr
):  # fmt: skip
    """Attend to a warp's i-th blocks, and copy the blocks that replace them in the ring; return the new state.

    state  output sums, softmax sums, maxima, this and the next page, offset of the stage
    """
    SHAPE: gl.constexpr = CONFIG.shape
    WORK: gl.constexpr = CONFIG.work
    D: gl.constexpr = SHAPE.width
    KEY_BITS: gl.constexpr = SHAPE.key_bits
    VALUE_BITS: gl.constexpr = SHAPE.value_bits
    PAGE: gl.constexpr = SHAPE.page
    NW: gl.constexpr = WORK.warps
    DEEP: gl.constexpr = WORK.depth
    U: gl.constexpr = WORK.blocks
    UNITS: gl.constexpr = KEY_BITS % 3 == 0 or VALUE_BITS % 3 == 0
    STAGE: gl.constexpr = stage_nbytes(D, KEY_BITS, VALUE_BITS, U)
    o, l, m, page, next_page, stage = state  # noqa: E741
    at, to, source, lane, t, key, stride, low, end, head, column, place = step_args
    run(wait_ptx(2 * DEEP - 1), lane)
    mine = keys_at(at, stage, D, KEY_BITS, U, NW)
    # this stage is free again; page indices are loaded two steps ahead of their codes
    block = block_of(page, t + (i + DEEP) * stride, head, index.pool, SHAPE.heads, PAGE, UNITS)
    needed = t < end - (i + DEEP) * stride
    copy_keys(to, source, stage, block, needed, D, KEY_BITS, U, True)
    page, next_page = next_page, page_of(table, t + (i + DEEP + 2) * stride, index.width, PAGE)
    seen = seen_of(key, low - i * stride, end - i * stride, has_low(CONFIG), U)
    logits, top = all_logits(mine, seen, m, qx, mean, column, place, scores.cap, CONFIG)
    run(wait_ptx(2 * DEEP - 1), lane)
    words = values_at(at, stage, D, VALUE_BITS, U, NW)
    copy_values(to, source, stage, block, needed, D, VALUE_BITS, U, True)
    decay = gl.exp2(m - top)
    o, l = o * decay[:, None, :], l * halved(decay, NW)  # noqa: E741
    for u in gl.static_range(U):
        p = gl.exp2(logits[u] - top[:, None, :])
        l += halves(p, NW)  # noqa: E741
        vx = value_tile(words[u], column, place, CONFIG)
        o = mma_v2(vx, weights(p, mine[u][2], seen[u], NW), o)
    stage = gl.where(stage == (DEEP - 1) * STAGE, 0, stage + STAGE)
    return o, l, top, page, next_page, stage


@gluon.jit
def query_places(shared, D: gl.constexpr, COMPACT: gl.constexpr):
    """Return the shared memory of 8 queries: rotated for keys, and for means."""
    ROW: gl.constexpr = table_rows(COMPACT)
    LQ: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    if D > 128:
        rotated = shared.index(ROW)._reinterpret(gl.float16, [8, D], LQ)
        angle_q = shared.index(ROW + 1)._reinterpret(gl.float16, [8, D], LQ)
    else:
        both = shared.index(ROW)._reinterpret(gl.float16, [16, D], LQ)
        rotated, angle_q = both.slice(0, 8, 0), both.slice(8, 8, 0)
    return rotated, angle_q


@gluon.jit
def query_operand(x, rotated, factor, D: gl.constexpr, BITS: gl.constexpr, NW: gl.constexpr):
    """Rotate queries, and broadcast them to every warp as the second operand of scores."""
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
def _fill_table(shared, sides, COMPACT: gl.constexpr):
    rows = shared._reinterpret(gl.int32, [256, 32 if COMPACT else 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    for i in gl.static_range(len(sides)):
        rows.slice(sides[0].shape[1] * i, sides[0].shape[1], 1).store(sides[i])
