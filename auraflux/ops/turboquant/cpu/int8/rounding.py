"""Rounding to two bytes: queries to signed ones, softmax weights to two of seven bits with one scale per row and block.

The softmax of a block of scores is LLVM IR; everything else is jitted Python.
"""

import math

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.jit import floats, int32s, jit
from auraflux.ops.simd.math import bits_of_float, exp, float_of_bits, rint
from auraflux.ops.simd.softmax import NOTHING, ZERO, fill, softcapped
from auraflux.ops.simd.vectors import I8, I16, I32, MAGIC, at, fma, kernel, load, pick, splat, spread, store, variable, vector
from auraflux.ops.turboquant.cpu.int8.codebook import HIGH, REST
from auraflux.ops.turboquant.cpu.int8.tiles import BLOCK, BYTES, LANES, PLUS, STRAIGHT, WAYS

MOST = 127 * HIGH + 64  # of a weight; an approximate exponential may be a little above
MOST_Q = 127 * HIGH  # of a query's coordinate
TINY, INFINITE = np.float32(1e-30), np.float32(np.inf)
BIAS = 127.0  # of a float's exponent
# the polynomial of this degree that is nearest to 2**x from -1/2 to 1/2: within 3e-6 of it
POWERS = (0.0095701, 0.05591786, 0.24024745, 0.69312181, 0.99999926)


def _across(b, combine, x):
    """Combine all lanes to one float."""
    while x.type.count > 1:
        half = x.type.count // 2
        x = combine(b, pick(b, x, x, list(range(half))), pick(b, x, x, list(range(half, 2 * half))))
    return b.extract_element(x, ir.Constant(I32, 0))


def _larger(b, x, y):
    # passes over not-a-number in x, which the sums of weights keep
    return ISA.larger(b, x, y)


def _sum(b, x, y):
    return b.fadd(x, y)


def _reduced(b, combine, vectors):
    """Combine one, two or four vectors."""
    while len(vectors) > 1:
        vectors = [combine(b, x, y) for x, y in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


def _seven_bits(b, found):
    """Return the upper and the lower seven of the last 14 bits of several vectors of words, as bytes."""
    if len(found) == 4:
        # narrowed to halves of words once for both
        halves = [b.bitcast(each, vector(I16, 2 * LANES)) for each in found]
        first, second = (_even(b, *halves[i : i + 2]) for i in (0, 2))
        upper = [b.lshr(each, splat(each.type, 7)) for each in (first, second)]
        high, low = (_even(b, *(b.bitcast(each, ISA.bytes) for each in pair)) for pair in (upper, (first, second)))
        return high, b.and_(low, splat(low.type, 127))
    while len(found) > 1:
        lanes = list(range(2 * found[0].type.count))
        found = [pick(b, x, y, lanes) for x, y in zip(found[::2], found[1::2], strict=True)]
    steps = found[0]
    parts = [b.and_(b.lshr(steps, splat(steps.type, shift)), splat(steps.type, 127)) for shift in (7, 0)]
    return [b.trunc(part, vector(I8, steps.type.count)) for part in parts]


def _even(b, x, y):
    return pick(b, x, y, list(range(0, 2 * x.type.count, 2)))


def _exp(b, vectors):
    """Return e**x for x up to 0, to 3e-6; exactly 0 where the exponent would pass that of a float, and not-a-number stays."""
    kind = vectors[0].type
    powers = [ISA.at_least(b, b.fmul(x, splat(kind, 1 / math.log(2))), splat(kind, -BIAS)) for x in vectors]
    # the low bits hold the exponent of a float
    wholes = [b.fadd(power, splat(kind, MAGIC + BIAS)) for power in powers]
    rests = [b.fsub(power, b.fsub(whole, splat(kind, MAGIC + BIAS))) for power, whole in zip(powers, wholes, strict=True)]
    found = [splat(kind, POWERS[0])] * len(vectors)
    for c in POWERS[1:]:
        found = [fma(b, y, rest, splat(kind, c)) for y, rest in zip(found, rests, strict=True)]
    # a product: adding to the exponent could make a number of not-a-number
    scales = [b.bitcast(b.shl(b.bitcast(whole, ISA.ints), splat(ISA.ints, 23)), kind) for whole in wholes]
    return [b.fmul(y, scale) for y, scale in zip(found, scales, strict=True)]


@kernel(constants=0)
def block_top(b, scores, groups, out):
    """Find the highest of LANES * `groups` scores; groups are a multiple of WAYS."""
    tops = [variable(b, splat(ISA.floats, -float("inf"))) for _ in range(WAYS)]
    with cgutils.for_range(b, b.sdiv(groups, at(WAYS))) as loop:
        for i, top in enumerate(tops):
            place = b.add(b.mul(loop.index, at(WAYS * BYTES)), at(i * BYTES))
            b.store(_larger(b, load(b, scores, place, ISA.floats), b.load(top)), top)
    store(b, _across(b, _larger, _reduced(b, _larger, [b.load(top) for top in tops])), out, 0)


@kernel(constants=0)
def block_weights(b, scores, groups, base, least, norms, factor, high, low, out):
    """Convert scores into weights exp(score - base), and those times norms and `factor` into 14 bits, upper and lower seven.

    groups   of LANES scores, a multiple of WAYS
    least    weights up to this are counted, but become 0
    out [2]  the sum of the weights, and that of their products with norms
    """
    zero = splat(ISA.floats, 0.0)
    wide, gain, bound = (spread(b, x, LANES) for x in (base, factor, least))
    total, products = (variable(b, zero) for _ in range(2))

    with cgutils.for_range(b, b.sdiv(groups, at(WAYS))) as loop:
        places = [b.add(b.mul(loop.index, at(WAYS * BYTES)), at(i * BYTES)) for i in range(WAYS)]
        weights = _exp(b, [b.fsub(load(b, scores, place, ISA.floats), wide) for place in places])
        parts = [b.fmul(weight, load(b, norms, place, ISA.floats)) for weight, place in zip(weights, places, strict=True)]
        # 0 times not-a-number: a value without weight must not be seen
        unseen = [b.fcmp_ordered("<=", weight, bound) for weight in weights]
        parts = [b.select(here, zero, part) for here, part in zip(unseen, parts, strict=True)]
        found = [b.bitcast(fma(b, part, gain, splat(ISA.floats, MAGIC)), ISA.ints) for part in parts]
        b.store(b.fadd(b.load(total), _reduced(b, _sum, weights)), total)
        b.store(b.fadd(b.load(products), _reduced(b, _sum, parts)), products)
        for address, part in zip((high, low), _seven_bits(b, found), strict=True):
            store(b, part, address, b.mul(loop.index, at(WAYS * LANES)))
    for i, slot in enumerate((total, products)):
        store(b, _across(b, _sum, b.load(slot)), out, 4 * i)


@jit
def _round_query(q_at, width, rounded_at):
    """Round one query to numbers of two bytes; return what a step is worth, and the sums of numbers and of upper bytes.

    rounded  [2, width] int32  upper and lower bytes, each in the lowest of its word
    """
    q, top = floats(q_at, width), np.int32(0)
    for d in range(width):
        # sizes order like their bits, not-a-number above all
        size = bits_of_float(q[d]) & np.int32(0x7FFFFFFF)
        top = size if size > top else top
    largest, total, upper = float_of_bits(top), np.int32(0), np.int32(0)
    highs, lows = int32s(rounded_at, width), int32s(rounded_at + 4 * width, width)
    if TINY < largest < INFINITE:
        factor = np.float32(MOST_Q) / largest
        for d in range(width):
            n = np.int32(rint(q[d] * factor))
            high = np.int32(np.int32(n + np.int32(HIGH // 2)) >> np.int32(7))
            total, upper = np.int32(total + n), np.int32(upper + high)
            highs[d], lows[d] = high & np.int32(255), np.int32(n - np.int32(HIGH) * high) & np.int32(255)
    else:
        fill(rounded_at, 2 * width, ZERO)
    return largest / np.float32(MOST_Q), np.int64(total), np.int64(upper)


@jit
def _four_bytes(bytes_at, step):
    """Join the lowest bytes of four words with a stride of `step`, to one word."""
    words = int32s(bytes_at, 3 * step + 1)
    return words[0] | words[step] << np.int32(8) | words[2 * step] << np.int32(16) | words[3 * step] << np.int32(24)


@jit
def spread_query(q_at, width, bits, room, h, target_at, rounded_at):
    """Round one query to two bytes and lay it out for `key_scores`; return what a step is worth, and the excess to subtract."""
    worth, total, upper = _round_query(q_at, width, rounded_at)
    target, vectors = int32s(target_at, width * room // 2), 2 if bits == 4 else 1
    for word in range(width // (4 * vectors)):
        # low halves of bytes first, then high halves
        for half in range(vectors):
            at, source = 2 * ((word * vectors + half) * room + h), rounded_at + 4 * (4 * word * vectors + half)
            target[at], target[at + 1] = _four_bytes(source, vectors), _four_bytes(source + 4 * width, vectors)
    if bits == 8 and STRAIGHT:
        # levels are half a step above their bytes, and their rest half of one
        return worth, -((total >> 1) + upper * HIGH // (2 * REST))
    # where levels have two bytes, the low ones are multiplied by the query's high bytes
    return worth, (total if bits == 4 else total + upper) * PLUS


@jit
def largest_norm(norms_at, low, high):
    """Return the largest norm of some positions."""
    norms, largest = floats(norms_at, BLOCK), ZERO
    for j in range(low, high):
        largest = norms[j] if norms[j] > largest else largest
    return largest


@jit
def round_weights(scores_at, low, high, groups, norms, largest, softcap, threshold, state_at, found_at, target):
    """Convert a block's scores [low, high) of one row into rounded weights of values, whose norms are `largest` at most.

    Update its (maximum, sum); return the factor for earlier sums and what a step of the weights is worth.
    """
    scores, state, found = floats(scores_at, BLOCK), floats(state_at, 2), floats(found_at, 2)
    if softcap > ZERO:
        for j in range(BLOCK):
            scores[j] = softcapped(scores[j], softcap)
    for j in range(low):
        scores[j] = NOTHING
    for j in range(high, groups * LANES):
        scores[j] = NOTHING
    block_top((scores_at, groups, found_at))
    before, top = state[0], found[0]
    peak = top if top > before else before
    base = peak if peak != NOTHING else ZERO
    rescale, best = exp(before - base), exp(top - base)
    most = best * largest
    usable = TINY < most < INFINITE
    factor = np.float32(MOST) / most if usable else ZERO
    # the sum of all weights will be no less than its value so far
    least = threshold * (state[1] * rescale + best)
    block_weights((scores_at, groups, base, least, norms, factor, target, target + BLOCK, found_at))
    total, products = found[0], found[1]
    state[0], state[1] = peak, state[1] * rescale + total
    # sums that are no numbers, or infinite, must not vanish in the rounding
    return rescale, most / np.float32(MOST) if usable and abs(products) < INFINITE else products


@jit
def live_groups(heads, rounded, groups):
    """Return the first and the last group of tokens that any head gives a weight, the last excluded; multiples of WAYS."""
    first, last = groups, 0
    for row in range(2 * heads):
        weights = int32s(rounded + row * BLOCK, groups * LANES // 4)
        for i in range(len(weights)):
            if weights[i] != 0:
                block = 4 * i // (WAYS * LANES)
                first, last = min(first, block * WAYS), max(last, (block + 1) * WAYS)
    return first, last
