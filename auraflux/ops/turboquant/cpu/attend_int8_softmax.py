"""The softmax of a block of scores, as LLVM IR: its maximum, and its weights rounded to two bytes of seven bits."""

import math

from llvmlite import ir
from numba.core import cgutils

from auraflux.ops.simd.vectors import I8, I32, ISA, MAGIC, at, fma, kernel, load, pick, splat, spread, store, variable, vector
from auraflux.ops.turboquant.cpu.attend_int8_tiles import BYTES, LANES, WAYS

LOWEST = -87.0  # exponents below this give 0


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


def _added(b, vectors):
    """The sum of one, two or four vectors."""
    while len(vectors) > 1:
        vectors = [b.fadd(x, y) for x, y in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


def _joined(b, vectors):
    """One vector of several."""
    while len(vectors) > 1:
        lanes = list(range(2 * vectors[0].type.count))
        vectors = [pick(b, x, y, lanes) for x, y in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


def _exp(b, x):
    """e**x for x from LOWEST to 0, to 4e-5; not-a-number stays."""
    kind = x.type
    power = fma(b, x, splat(kind, 1 / math.log(2)), splat(kind, MAGIC))
    rest = fma(b, b.fsub(power, splat(kind, MAGIC)), splat(kind, -math.log(2)), x)
    y = splat(kind, 1 / 24)
    for c in (1 / 6, 1 / 2, 1.0, 1.0):
        y = fma(b, y, rest, splat(kind, c))
    shift = b.shl(b.bitcast(power, ISA.ints), splat(ISA.ints, 23))
    raised = b.bitcast(b.add(b.bitcast(y, ISA.ints), shift), kind)
    return b.select(b.fcmp_unordered("uno", x, x), x, raised)


@kernel(constants=0)
def block_top(b, scores, groups, out):
    """Find the highest of LANES * `groups` scores."""
    top = variable(b, splat(ISA.floats, -float("inf")))
    with cgutils.for_range(b, groups) as loop:
        b.store(_larger(b, load(b, scores, b.mul(loop.index, at(BYTES)), ISA.floats), b.load(top)), top)
    store(b, _across(b, _larger, b.load(top)), out, 0)


@kernel(constants=0)
def block_weights(b, scores, groups, base, least, norms, factor, high, low, out):
    """Turn scores into weights exp(score - base), and those times norms and `factor` into 14 bits, upper and lower seven.

    groups   of LANES scores, a multiple of WAYS
    least    weights below are counted, but become 0
    out [2]  the sum of the weights, and that of their products with norms
    """
    lowest, zero = splat(ISA.floats, LOWEST), splat(ISA.floats, 0.0)
    wide, gain, bound = (spread(b, x, LANES) for x in (base, factor, least))
    total, products = (variable(b, zero) for _ in range(2))

    def weighed(place):
        x = b.fsub(load(b, scores, place, ISA.floats), wide)
        nothing = b.fcmp_ordered("<", x, lowest)
        weight = b.select(nothing, zero, _exp(b, x))
        # 0 times not-a-number: a value without weight must not be seen
        unseen = b.or_(nothing, b.fcmp_ordered("<", weight, bound))
        product = b.select(unseen, zero, b.fmul(weight, load(b, norms, place, ISA.floats)))
        return weight, product, b.bitcast(fma(b, product, gain, splat(ISA.floats, MAGIC)), ISA.ints)

    with cgutils.for_range(b, b.sdiv(groups, at(WAYS))) as loop:
        place = b.mul(loop.index, at(WAYS * BYTES))
        weights, parts, found = zip(*(weighed(b.add(place, at(i * BYTES))) for i in range(WAYS)), strict=True)
        b.store(b.fadd(b.load(total), _added(b, weights)), total)
        b.store(b.fadd(b.load(products), _added(b, parts)), products)
        steps = _joined(b, found)
        for address, shift in ((high, 7), (low, 0)):
            part = b.and_(b.lshr(steps, splat(steps.type, shift)), splat(steps.type, 127))
            store(b, b.trunc(part, vector(I8, steps.type.count)), address, b.mul(loop.index, at(WAYS * LANES)))
    for i, slot in enumerate((total, products)):
        store(b, _across(b, _sum, b.load(slot)), out, 4 * i)
