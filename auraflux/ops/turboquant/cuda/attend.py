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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from auraflux.ops.turboquant.cuda.attend_begin import (
    find_token,
)
from auraflux.ops.turboquant.cuda.attend_codes import attend_codes, query_operand, query_places, ring_begin
from auraflux.ops.turboquant.cuda.attend_kept import (
    angle_channels,
    attend_plain,
    plain_keys,
    plain_places,
)
from auraflux.ops.turboquant.cuda.attend_merge import leave_nothing, leave_part, leave_rotated_back, leave_rows
from auraflux.ops.turboquant.cuda.attend_parts import channel_scales, load_queries, table_words
from auraflux.ops.turboquant.cuda.attend_ring import (
    stage_nbytes,
)
from auraflux.ops.turboquant.cuda.attend_shares import (
    join_beside,
    leave_followed,
    leave_no_more,
    leave_share,
)
from auraflux.ops.turboquant.cuda.attend_split import own_shares, part_of, share_out
from auraflux.ops.turboquant.cuda.attend_step import (
    sums,
)


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
            o, l, m = attend_codes(  # noqa: E741
                queries, live, signs, keys, values, early, index, scores, centres, None, shared, mine, span,
                None, SHAPE, KEPT, WORK, LOW, SOFTCAP,
            )  # fmt: skip
    else:
        o, l, m = attend_codes(  # noqa: E741
            queries, live, signs, keys, values, early, index, scores, centres, plain, shared, mine, span,
            (parts, left, shares) if WORK.several else None, SHAPE, KEPT, WORK, LOW, SOFTCAP,
        )  # fmt: skip
    _leave(o, m, l, sinks, signs, out, parts, left, row, live, shared, SHAPE, WORK, G)


@gluon.jit
def _early(levels, centres, head, D: gl.constexpr, KEY_BITS: gl.constexpr, VALUE_BITS: gl.constexpr, NW: gl.constexpr):
    """Load what depends on nothing: the sides of the table, and what centres and queries are made of."""
    found = (_levels(levels, KEY_BITS, VALUE_BITS, NW),)
    if centres is not None:
        more = angle_channels(centres, D, NW), channel_scales(centres.scale + head * D, D, NW)
        found = found + more  # type: ignore[assignment]
    return found


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
    rotated, _ = query_places(shared, D)
    if centres is not None:
        scale = channel_scales(centres.scale + head * D, D, NW)
    gdc_wait()
    gdc_launch_dependents()
    keys_of = plain_keys(plain, places_of, SHAPE, KEPT, NW)
    x = load_queries(q, signs, live, D, NW, WORK.spread)
    if centres is not None:
        x *= scale
    qx = query_operand(x, rotated, scores.factor, D, SHAPE.key_bits, NW)
    return attend_plain(keys_of, plain, places_of, qx, oldest, scores.cap, SHAPE, KEPT, SOFTCAP, NW)


@gluon.jit
def _leave(
    o, m, l, sinks, signs, out, parts, left, row, live, shared,  # noqa: E741
    SHAPE: gl.constexpr, WORK: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    """Leave the rows of a program that has all their keys, or its part of them; several parts were left one by one."""
    D: gl.constexpr = SHAPE.width
    NW: gl.constexpr = WORK.warps
    if WORK.several:
        shared._keep_alive()
        if WORK.one:
            leave_followed((o, m, l), sinks, signs, out, row, live, SHAPE.heads * G, NW)
    else:
        gl.thread_barrier()
        if WORK.each > 0 and D <= 128:
            leave_share(join_beside(o, m, sums(l, NW), shared, WORK.spread, NW), parts, left, live, NW)
            shared._keep_alive()
        else:
            shared._keep_alive()
            if WORK.one:
                leave_rows(o, m, sums(l, NW), sinks, signs, out, row, live, SHAPE.heads * G, D, NW)
            else:
                _leave_part(o, m, sums(l, NW), signs, parts, left, live, D, WORK.shared, NW)


@gluon.jit
def _leave_part(o, m, l, signs, parts, left, live, D: gl.constexpr, SHARED: gl.constexpr, NW: gl.constexpr):  # noqa: E741
    """Leave a part of each row, rotated back where `finish_rotated` merges."""
    if D == 256 and not SHARED:
        leave_rotated_back(o, m, l, signs, parts, left, live, D, NW)
    else:
        leave_part(o, m, l, parts, left, live, D, NW)


@gluon.jit
def _levels(levels, KEY_BITS: gl.constexpr, VALUE_BITS: gl.constexpr, NW: gl.constexpr):
    """Load the sides of the table: one serves both where bits are equal."""
    keys = table_words(levels, 0, KEY_BITS, NW)
    return (keys,) if KEY_BITS == VALUE_BITS else (keys, table_words(levels, 1, VALUE_BITS, NW))
