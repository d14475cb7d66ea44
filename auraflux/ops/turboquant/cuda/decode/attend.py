"""Decode attention over quantized pages with values in pairs on Hopper: Gluon, with PTX for table look-ups.

- A byte of codes holds two neighbouring elements of an operand. A table in shared memory maps it to two float16 levels, with a
  column per lane, so that look-ups have no bank conflicts: one `prmt` forms the address, one `ld.shared` loads two elements.
  Codes of 2 bits pack four to a byte, and one look-up of two words decodes all of them; codes of 8 bits take one look-up each,
  3 and 6 bits see `codes_3_6_bits.py`.
- Keys [16 tokens, D] and values [D, 16 tokens] are the first operand of `mma.m16n8k16`, query heads its 8 columns. A lane's
  words of a key, and of 16 values in pairs (`arrangement.py`), hold exactly the elements its registers need: no shuffles.
- Codes and norms stream through a per-warp ring buffer in shared memory by `cp.async`: registers could not hold the bytes in
  flight that saturate memory bandwidth. A warp reads back only codes that it copied itself, so the loop needs no barriers.
- Warps are the batch of a 3-D layout: each has its own tokens, running maximum and sums, and its own loop count (`step.py`).
  They synchronize only after the loop, and splits of a row are combined in `merge.py`.
- Every program rotates its queries while its first codes are in flight. Rows of the accumulator are channels in register
  order; `finish_pairs` undoes that, since the Walsh-Hadamard transform is the same for any order of index bits.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.gpu.blocks.dependent_launch import gdc_launch_dependents, gdc_wait
from auraflux.ops.turboquant.cuda.decode.code_loop import attend_codes, has_low, query_operand, query_places, ring_begin
from auraflux.ops.turboquant.cuda.decode.full_precision import (
    angle_channels,
    attend_full_precision,
    full_precision_keys,
    full_precision_rows,
)
from auraflux.ops.turboquant.cuda.decode.invariant_splits import (
    reduce_in_spare_memory,
    store_accumulated,
    store_empty_splits,
    store_split,
)
from auraflux.ops.turboquant.cuda.decode.lookup import COLUMNS_OF_TWO, channel_scales, load_queries, table_words
from auraflux.ops.turboquant.cuda.decode.merge import (
    store_empty_partial,
    store_output_rows,
    store_partial,
    store_unrotated_partial,
)
from auraflux.ops.turboquant.cuda.decode.prologue import (
    find_token,
)
from auraflux.ops.turboquant.cuda.decode.ring import (
    stage_nbytes,
)
from auraflux.ops.turboquant.cuda.decode.split_kv import balance_splits, locate_program, own_splits
from auraflux.ops.turboquant.cuda.decode.step import (
    sums,
)
from auraflux.ops.turboquant.cuda.encode.new_token import append_key, append_value, channels_of, rope_angles, rotated_queries


@gluon.jit
def attend_pairs(
    q, signs, codes, levels, index, output, scores, tokens, splits, means, full, CONFIG: gl.constexpr,
):  # fmt: skip
    """Attend from one token's query heads to the keys of one split; grid (splits, HEADS * tiles of 8 query heads, tokens).

    means  key calibration; None without
    full   full-precision sink and recent tokens, read by the last split; None without
    """
    SHAPE: gl.constexpr = CONFIG.shape
    FULL: gl.constexpr = CONFIG.full
    WORK: gl.constexpr = CONFIG.work
    G: gl.constexpr = CONFIG.group
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
    ROWS: gl.constexpr = ring_begin(D, WORK.compact) // 4096 + (NW * WORK.depth * STAGE + 4095) // 4096
    split, token, new = gl.program_id(0), gl.program_id(2), codes.new
    head, tile = gl.program_id(1) // ((G + 7) // 8), gl.program_id(1) % ((G + 7) // 8)
    # one allocation, so that the table begins at the shared-memory base; the compiler does not see the PTX look-ups read it,
    # hence the barriers and _keep_alive
    shared = gl.allocate_shared_memory(gl.int32, [ROWS, 1024], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # early loads need registers that programs sharing a multiprocessor do not have
    early = _load_early(levels, means if WORK.full_split and WORK.split_keys == 0 else None, head, CONFIG)
    if WORK.balanced:
        number = split
        schedule = balance_splits(index, splits, scores.window, NW * 16 * U, S, NW)
        sequence, token, position, old, splits, split = locate_program(number, schedule, index.sequences)
        expected = sequence
        if sequence >= index.sequences:
            return
    else:
        expected = gl.minimum(token, index.sequences - 1)
        sequence, position, old = find_token(index, token, expected, tokens, S, NW)
    # splits of older tokens, and of these tokens the newest
    counted = splits - 1 if WORK.new_split else splits
    if WORK.new_split:
        # all blocks with older tokens can be copied before the previous kernel has ended
        old = position + 16 * U - 1
    # codes cover positions [low, end); full-precision tokens start at `oldest`
    oldest = gl.maximum(position + 1 - scores.window, 0)
    low = gl.maximum(oldest, FULL.sink_tokens) if has_low(CONFIG) else 0
    unseen: gl.constexpr = max(FULL.recent_window, 1 if WORK.new_split else 0)
    end = gl.minimum(position + 1 - unseen, index.width * PAGE)
    row, live = (token * HEADS + head) * G + tile * EACH, gl.minimum(EACH, G - tile * EACH)
    # index of the first split of codes
    FIRST: gl.constexpr = 1 if WORK.split_keys > 0 and full is not None else 0
    # destination of partial results: by program, or by row and split
    dest = ((number - token) * (HEADS * G) + row, 0, 1) if WORK.balanced else (row, split, splits)
    if WORK.new_split:  # noqa: SIM102
        if split >= counted:
            placed, last_split = (sequence, position, head), (row, counted, splits)
            if split == counted:
                mine = q + (head * G + tile * EACH) * new.q_pitch, live, signs
                append_key(mine, codes, new, index, scores, full, placed, output.partials, last_split, CONFIG)
            else:
                append_value(live, signs, codes, new, index, full, placed, output.partials, last_split, CONFIG)
            return
    last, begin = split == counted - 1, low // (16 * U) * (16 * U)
    if WORK.split_keys > 0:
        last, begin, stride, end, assigned = own_splits(begin, end, split, splits, full is not None, WORK)
        if WORK.multi_split:
            dest = row, assigned[1] + FIRST, splits
    else:
        # blocks are interleaved over splits
        stride = (counted - 1 if WORK.full_split else counted) * (NW * 16 * U)
        begin, assigned = begin + split * (NW * 16 * U), None
    if not WORK.single_split:  # noqa: SIM102
        if begin >= end and (full is None or not last):
            gdc_wait()
            if not WORK.multi_split:
                store_empty_partial(output.partials, dest, live, NW)
            elif last:
                store_empty_splits(output.partials, (row, FIRST, splits), live, NW)
            return
    task = sequence, expected, position, old, head, split, last, begin, stride, low, end, oldest
    if WORK.new_split:
        queries = (q + (head * G + tile * EACH) * new.q_pitch, live, signs, new)
    else:
        queries = (q + row.to(gl.int64) * D, live, signs, None)
    if WORK.full_split:
        if last:
            o, l, m = _attend_full_precision(queries, scores, means, full, shared, task, CONFIG)  # noqa: E741
        else:
            o, l, m = attend_codes(  # noqa: E741
                queries, codes.k, codes.v, early, index, scores, means, None, shared, task, None, CONFIG
            )
    else:
        multi = (output.partials, dest, assigned) if WORK.multi_split else None
        o, l, m = attend_codes(  # noqa: E741
            queries, codes.k, codes.v, early, index, scores, means, full, shared, task, multi, CONFIG
        )
    _store_result((o, m, l), output, signs, dest, row, live, shared, CONFIG)


@gluon.jit
def _load_early(levels, means, head, CONFIG: gl.constexpr):
    """Load what does not depend on the previous kernel: the level table, channels of the means, key scales."""
    D: gl.constexpr = CONFIG.shape.width
    NW: gl.constexpr = CONFIG.work.warps
    found = (_load_levels(levels, CONFIG.shape.key_bits, CONFIG.shape.value_bits, CONFIG.work.compact, NW),)
    if means is not None:
        more = angle_channels(means, D, NW), channel_scales(means.scale + head * D, D, NW)
        found = found + more  # type: ignore[assignment]
    return found


@gluon.jit
def _attend_full_precision(queries, scores, means, full, shared, task, CONFIG: gl.constexpr):
    """Attend to full-precision tokens only; return output sums, softmax sums, maxima.

    With few keys a program is bound by instruction fetch, so programs that attend to codes skip this code path.
    """
    SHAPE: gl.constexpr = CONFIG.shape
    FULL: gl.constexpr = CONFIG.full
    D: gl.constexpr = SHAPE.width
    NW: gl.constexpr = CONFIG.work.warps
    q, live, signs, new = queries
    sequence, _, position, _, head, _, _, _, _, _, _, oldest = task
    newest = position - 1 if CONFIG.work.new_split else position
    rows = full_precision_rows(full, sequence, position, newest, head, None, SHAPE, FULL, NW)
    rotated, _ = query_places(shared, D, CONFIG.work.compact)
    if means is not None:
        scale = channel_scales(means.scale + head * D, D, NW)
    if CONFIG.work.new_split:
        turn = rope_angles(new, channels_of(D, NW), CONFIG.work.interleaved)
    gdc_wait()
    gdc_launch_dependents()
    keys = full_precision_keys(full, rows, SHAPE, FULL, NW)
    if CONFIG.work.new_split:
        x = rotated_queries(q, live, new, turn, D, NW) * gl.load(signs + channels_of(D, NW))
    else:
        x = load_queries(q, signs, live, D, NW, CONFIG.work.even_columns)
    if means is not None:
        x *= scale
    qx = query_operand(x, rotated, scores.factor, D, SHAPE.key_bits, NW)
    return attend_full_precision(keys, full, rows, qx, oldest, scores.cap, SHAPE, FULL, CONFIG.softcap, NW)


@gluon.jit
def _store_result(softmax, output, signs, dest, row, live, shared, CONFIG: gl.constexpr):
    """Store the final rows of a program that has all their keys, or its partial result."""
    WORK: gl.constexpr = CONFIG.work
    D: gl.constexpr = CONFIG.shape.width
    NW: gl.constexpr = WORK.warps
    HEADS: gl.constexpr = CONFIG.shape.heads * CONFIG.group
    o, m, l = softmax  # noqa: E741
    if WORK.multi_split:
        shared._keep_alive()
        if WORK.single_split:
            store_accumulated((o, m, l), output.sinks, signs, output.out, row, live, HEADS, NW)
    else:
        gl.thread_barrier()
        if WORK.split_keys > 0 and D <= 128:
            reduced = reduce_in_spare_memory(o, m, sums(l, NW), shared, WORK.even_columns, NW)
            store_split(reduced, output.partials, dest, live, NW)
            shared._keep_alive()
        else:
            shared._keep_alive()
            if WORK.single_split:
                store_output_rows(o, m, sums(l, NW), output.sinks, signs, output.out, row, live, HEADS, D, NW)
            else:
                _store_partial(o, m, sums(l, NW), signs, output.partials, dest, live, D, WORK.balanced, NW)


@gluon.jit
def _store_partial(o, m, l, signs, partials, dest, live, D: gl.constexpr, BALANCED: gl.constexpr, NW: gl.constexpr):  # noqa: E741
    """Store a partial result of each row, with the rotation undone where `finish_rotated` merges."""
    if D == 256 and not BALANCED:
        store_unrotated_partial(o, m, l, signs, partials, dest, live, D, NW)
    else:
        store_partial(o, m, l, partials, dest, live, D, NW)


@gluon.jit
def _load_levels(levels, KEY_BITS: gl.constexpr, VALUE_BITS: gl.constexpr, COMPACT: gl.constexpr, NW: gl.constexpr):
    """Load the level tables of keys and values: one serves both where bits are equal."""
    COLUMNS: gl.constexpr = COLUMNS_OF_TWO if COMPACT and KEY_BITS != VALUE_BITS else 32
    keys = table_words(levels, 0, KEY_BITS, COLUMNS, NW)
    return (keys,) if KEY_BITS == VALUE_BITS else (keys, table_words(levels, 1, VALUE_BITS, COLUMNS, NW))
