"""Split-KV scheduling on the device: sequences of any lengths balanced over programs, or a row in splits of fixed size.

Every program computes its own assignment, since only the GPU knows the lengths."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.hopper.reduce import warp_uniform


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def balance_splits(index, programs, window, STEP: gl.constexpr, S: gl.constexpr, NW: gl.constexpr):
    """Distribute programs over sequences in units of STEP keys; never makes more than programs / 2 + tokens splits.

    Returns, per sequence: index, first token, new tokens, keys, splits per token, and the running total of splits.
    """
    # replicated in every warp: a sum across warps would need shared memory
    b = gl.arange(0, S, layout=gl.BlockedLayout([max(1, S // 32)], [32], [NW], [0]))
    start = gl.load(index.starts + b, mask=b < index.sequences, other=0)
    tokens = gl.load(index.starts + b + 1, mask=b < index.sequences, other=0) - start
    keys = gl.load(index.lengths + b, mask=b < index.sequences, other=0)
    steps = gl.cdiv(gl.maximum(gl.minimum(keys, window), 1), STEP)
    most = gl.maximum(gl.cdiv(gl.sum(tokens * steps, 0), programs), 1)
    # grow splits by an eighth at a time, up to twice the size, until they fit
    for _ in gl.static_range(6):
        most = gl.where(gl.sum(tokens * gl.cdiv(steps, most), 0) > programs, most + gl.cdiv(most, 8), most)
    splits_each = gl.cdiv(steps, most)
    return b, start, tokens, keys, splits_each, gl.associative_scan(tokens * splits_each, 0, _add)


@gluon.jit
def _of(numbers, mine):
    return warp_uniform(gl.sum(gl.where(mine, numbers, 0), 0))


@gluon.jit
def locate_program(number, schedule, sequences):
    """Return a program's sequence, token, position, cached length before this step, number of splits, and split index.

    Beyond the last split, sequence >= sequences.
    """
    b, start, tokens, keys, splits_each, ends = schedule
    sequence = warp_uniform(gl.sum(((ends <= number) & (b < sequences)).to(gl.int32), 0))
    mine = b == sequence
    count = gl.maximum(_of(splits_each, mine), 1)
    within = number - _of(ends - tokens * splits_each, mine)
    first, old = _of(start, mine), _of(keys - tokens, mine)
    return sequence, first + within // count, old + within // count, old, count, within % count


@gluon.jit
def splits_of_token(token, schedule, sequences):
    """Return the first split of a token, and their number."""
    b, start, tokens, _, splits_each, ends = schedule
    mine = b == warp_uniform(gl.sum(((start <= token) & (b < sequences)).to(gl.int32), 0)) - 1
    count = _of(splits_each, mine)
    return _of(ends - (tokens + start) * splits_each, mine) + token * count, count


@gluon.jit
def own_splits(begin, end, split, splits, FULL: gl.constexpr, WORK: gl.constexpr):
    """Return the splits of a row that a program has: one, or several consecutive ones.

    A split is a number of steps of all warps that depends on the keys only, so that a row has at most `splits`. FULL: the first
    split holds the full-precision tokens.

    Returns whether the program has that split, first position of its codes, stride of steps, end of its codes; and (steps per
    split, first split, number of splits, splits of the row if this program must mark the rest empty, else -1).
    """
    STEP: gl.constexpr = WORK.warps * 16 * WORK.blocks
    LEAST: gl.constexpr = max(WORK.split_keys // STEP, 1)
    most = splits - 1 if FULL else splits
    steps = gl.cdiv(gl.maximum(end - begin, 0), STEP)
    steps_each = gl.maximum(gl.cdiv(steps, most), LEAST)
    count = gl.cdiv(steps, steps_each)
    has_full = split == 0
    if WORK.multi_split:
        count_own = gl.cdiv(count, gl.num_programs(0))
        first = split * count_own
        count_own = gl.maximum(gl.minimum(count_own, count - first), 0)
        empty_from = gl.where(has_full, count, -1)
    else:
        first = split - 1 if FULL else split
        count_own, empty_from = 0 * split + 1, 0 * split - 1
    begin += first * steps_each * STEP
    end = gl.minimum(end, begin + count_own * steps_each * STEP)
    return (True if WORK.single_split else has_full), begin, STEP, end, (steps_each, first, count_own, empty_from)
