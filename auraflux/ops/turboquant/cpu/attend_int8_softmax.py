"""The softmax of a block of scores, as LLVM IR: its maximum, and its weights rounded to two bytes of seven bits."""

import math

from llvmlite import ir
from numba.core import cgutils

from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.vectors import I8, I16, I32, MAGIC, at, fma, kernel, load, pick, splat, spread, store, variable, vector
from auraflux.ops.turboquant.cpu.attend_int8_tiles import BYTES, LANES, WAYS

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
    """The upper and the lower seven of 14 bits that several vectors of words end with, as bytes."""
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
    """e**x for x up to 0, to 3e-6; exactly 0 where the exponent would pass that of a float, and not-a-number stays."""
    kind = vectors[0].type
    powers = [ISA.at_least(b, b.fmul(x, splat(kind, 1 / math.log(2))), splat(kind, -BIAS)) for x in vectors]
    # the low bits hold the exponent of a float
    wholes = [b.fadd(power, splat(kind, MAGIC + BIAS)) for power in powers]
    rests = [b.fsub(power, b.fsub(whole, splat(kind, MAGIC + BIAS))) for power, whole in zip(powers, wholes, strict=True)]
    found = [splat(kind, POWERS[0])] * len(vectors)
    for c in POWERS[1:]:
        found = [fma(b, y, rest, splat(kind, c)) for y, rest in zip(found, rests, strict=True)]
    # a product, where adding to the exponent could make a number of what is none
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
    """Turn scores into weights exp(score - base), and those times norms and `factor` into 14 bits, upper and lower seven.

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
