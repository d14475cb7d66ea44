"""How programs share out keys: a batch of texts of any lengths, or a row in shares of so many keys.

Each finds its part by itself, as only the GPU knows the lengths."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.hopper.reduce import same


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def share_out(index, room, window, STEP: gl.constexpr, S: gl.constexpr, NW: gl.constexpr):
    """Share out `room` programs, by whole steps: of every text the first token, how many these are, its keys, the parts of each
    token, and all parts up to the text's end. More than room / 2 + tokens are never made."""
    # every warp has all of it: a sum across warps would want shared memory
    b = gl.arange(0, S, layout=gl.BlockedLayout([max(1, S // 32)], [32], [NW], [0]))
    start = gl.load(index.starts + b, mask=b < index.sequences, other=0)
    tokens = gl.load(index.starts + b + 1, mask=b < index.sequences, other=0) - start
    keys = gl.load(index.lengths + b, mask=b < index.sequences, other=0)
    steps = gl.cdiv(gl.maximum(gl.minimum(keys, window), 1), STEP)
    most = gl.maximum(gl.cdiv(gl.sum(tokens * steps, 0), room), 1)
    # an eighth more at a time, to twice as many
    for _ in gl.static_range(6):
        most = gl.where(gl.sum(tokens * gl.cdiv(steps, most), 0) > room, most + gl.cdiv(most, 8), most)
    parts = gl.cdiv(steps, most)
    return b, start, tokens, keys, parts, gl.associative_scan(tokens * parts, 0, _add)


@gluon.jit
def _of(numbers, mine):
    return same(gl.sum(gl.where(mine, numbers, 0), 0))


@gluon.jit
def part_of(number, given, sequences):
    """Find a program's text, token, position, how many positions were there before this step, the parts and which it is.

    Beyond the last part the text is none.
    """
    b, start, tokens, keys, parts, ends = given
    sequence = same(gl.sum(((ends <= number) & (b < sequences)).to(gl.int32), 0))
    mine = b == sequence
    count = gl.maximum(_of(parts, mine), 1)
    within = number - _of(ends - tokens * parts, mine)
    first, old = _of(start, mine), _of(keys - tokens, mine)
    return sequence, first + within // count, old + within // count, old, count, within % count


@gluon.jit
def parts_of(token, given, sequences):
    """Find the parts of a token: the first, and how many."""
    b, start, tokens, _, parts, ends = given
    mine = b == same(gl.sum(((start <= token) & (b < sequences)).to(gl.int32), 0)) - 1
    count = _of(parts, mine)
    return _of(ends - (tokens + start) * parts, mine) + token * count, count


@gluon.jit
def own_shares(begin, end, split, splits, KEPT: gl.constexpr, WORK: gl.constexpr):
    """Find the shares of a row that a program has: one, or several that follow each other.

    A share is some steps of all warps, by how many keys there are, so that a row has no more than `splits`. KEPT: the first is
    that of the rows that are kept as they are.

    Gives whether the program has that one, where its codes begin, how far apart steps are, where its codes end; and the steps
    of a share, the first share, how many, and how many the row has if this program is to say that there are no more, or -1.
    """
    STEP: gl.constexpr = WORK.warps * 16 * WORK.blocks
    LEAST: gl.constexpr = max(WORK.each // STEP, 1)
    room = splits - 1 if KEPT else splits
    steps = gl.cdiv(gl.maximum(end - begin, 0), STEP)
    each = gl.maximum(gl.cdiv(steps, room), LEAST)
    count = gl.cdiv(steps, each)
    kept = split == 0
    if WORK.several:
        many = gl.cdiv(count, gl.num_programs(0))
        first = split * many
        many = gl.maximum(gl.minimum(many, count - first), 0)
        absent = gl.where(kept, count, -1)
    else:
        first = split - 1 if KEPT else split
        many, absent = 0 * split + 1, 0 * split - 1
    begin += first * each * STEP
    return (True if WORK.one else kept), begin, STEP, gl.minimum(end, begin + many * each * STEP), (each, first, many, absent)
