"""How programs share out a batch of texts of any lengths: each finds its part of one of them by itself, as only the GPU knows
the lengths."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.hopper.reduce import same


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def shares(index, room, window, STEP: gl.constexpr, S: gl.constexpr, NW: gl.constexpr):
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
