"""The inner loops of attention in float32, as LLVM IR: rows of queries times a block of keys, then its values.

A row's numbers do not depend on the other rows of its tile, so one query alone and many together give the same bits. A score is
summed in four chains, of every fourth coordinate, which are then added in pairs: a vector holds four coordinates of each of
KEYS keys. Weights are summed in as many chains as a vector has lanes. Values are added one position after the other.
"""

from numba.core import cgutils

from auraflux.ops.attention.cpu.dtypes import BYTES, LANES
from auraflux.ops.attention.cpu.panel_tiles import _exp, _larger
from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.jit import jit
from auraflux.ops.simd.softmax import SMALL, T0, T1, T2, T3, T4
from auraflux.ops.simd.vectors import F32, I32, at, fma, kernel, load, pick, splat, spread, store, variable, vector
from auraflux.ops.simd.vectors import _add_neighbours as add_neighbours

BLOCK = 64  # positions whose weights are made together; blocks begin at multiples of it
PART = 512  # positions summed separately and then merged in order; parts begin at multiples of it
LOOPED = BLOCK // LANES > 8  # a block has more vectors than registers can hold
KEYS = LANES // 4
TALL = 3 if LANES == 8 else 6  # rows of a tile, whose sums stay in registers
ODD = 3 if LANES == 4 else 0  # rows of a tile for an odd number: faster than a tile of one row and one of two; 0 for none
WIDE = 2 if LANES == 8 else 4  # vectors of a value
COLUMN = WIDE * BYTES


def quarters(b, rows):
    """Transpose KEYS vectors of a key each into KEYS vectors of four coordinates of every key."""
    if KEYS == 1:
        return rows

    def take(x, y, *places):
        return pick(b, x, y, [4 * place + i for place in places for i in range(4)])

    if KEYS == 2:
        return [take(*rows, 0, 2), take(*rows, 1, 3)]
    low, high = ([take(x, y, *places) for x, y in (rows[:2], rows[2:])] for places in ((0, 1, 4, 5), (2, 3, 6, 7)))
    return [take(*pair, *places) for pair in (low, high) for places in ((0, 2, 4, 6), (1, 3, 5, 7))]


def four_chains(b, sums):
    """Add the chains of LANES scores: vector i of four holds those of keys i, i + 4, i + 8 …"""
    return add_neighbours(b, add_neighbours(b, *sums[:2]), add_neighbours(b, *sums[2:]))


@kernel(constants=0)
def lay_quarters(b, keys, step, batches, target):
    """Lay rows of keys with a stride of `step` bytes out as `score_tile` takes them; a batch is LANES keys."""
    with cgutils.for_range(b, batches) as batch:
        first = b.mul(batch.index, b.mul(step, at(LANES)))
        source, here = b.add(keys, first), b.add(target, first)
        with cgutils.for_range(b, b.sdiv(step, at(BYTES))) as loop:
            column = b.add(source, b.mul(loop.index, at(BYTES)))
            to = b.add(here, b.mul(loop.index, at(KEYS * 4 * BYTES)))
            for i in range(4):
                rows = [load(b, column, b.mul(step, at(i + 4 * g)), ISA.floats) for g in range(KEYS)]
                for m, found in enumerate(quarters(b, rows)):
                    store(b, found, to, (4 * m + i) * BYTES)


@jit
def laid_keys(keys, step, batches, target):
    """Lay rows of keys out as `score_tile` takes them, unless they are: where they lie then."""
    if KEYS == 1:
        return keys
    lay_quarters((keys, step, batches, target))
    return target


@kernel(constants=1)
def score_tile(b, rows, q, q_step, keys, step, batches, out, out_step):
    """Multiply `rows` queries with `batches` of LANES keys, laid out by `laid_keys` from rows of `step` bytes."""
    with cgutils.for_range(b, batches) as batch:
        source = b.add(keys, b.mul(batch.index, b.mul(step, at(LANES))))
        sums = [[variable(b, splat(ISA.floats, 0.0)) for _ in range(4)] for _ in range(rows)]
        with cgutils.for_range(b, b.sdiv(step, at(16))) as loop:
            here = b.add(source, b.mul(loop.index, at(4 * BYTES)))
            if KEYS == 1:
                here = b.add(source, b.mul(loop.index, at(BYTES)))
                found = [load(b, here, b.mul(step, at(i)), ISA.floats) for i in range(4)]
            else:
                found = [load(b, here, i * BYTES, ISA.floats) for i in range(4)]
            for r in range(rows):
                four = load(b, q, b.add(b.mul(q_step, at(r)), b.mul(loop.index, at(16))), vector(F32, 4))
                query = pick(b, four, four, list(range(4)) * KEYS)
                for i in range(4):
                    b.store(fma(b, query, found[i], b.load(sums[r][i])), sums[r][i])
        for r in range(rows):
            total = four_chains(b, [b.load(s) for s in sums[r]])
            store(b, total, out, b.add(b.mul(out_step, at(r)), b.mul(batch.index, at(BYTES))))


@kernel(constants=2)
def value_tile(b, rows, wide, weights, weight_step, values, step, count, sums, sum_step, rescales):
    """Scale `wide` vectors of the sums of `rows` rows by their `rescales`, and add those of `count` values by their weights."""
    slots = {(r, v): b.add(b.mul(sum_step, at(r)), at(BYTES * v)) for r in range(rows) for v in range(wide)}
    totals = {}
    for (r, v), slot in slots.items():
        rescale = spread(b, load(b, rescales, 4 * r, F32), LANES)
        totals[r, v] = variable(b, b.fmul(load(b, sums, slot, ISA.floats), rescale))
    with cgutils.for_range(b, count) as loop:
        here = b.add(values, b.mul(loop.index, step))
        value = [load(b, here, BYTES * v, ISA.floats) for v in range(wide)]
        for r in range(rows):
            place = b.add(b.mul(weight_step, at(r)), b.mul(loop.index, at(4)))
            weight = spread(b, load(b, weights, place, F32), LANES)
            for v in range(wide):
                b.store(fma(b, weight, value[v], b.load(totals[r, v])), totals[r, v])
    for key, slot in slots.items():
        store(b, b.load(totals[key]), sums, slot)


def across(b, combine, x):
    """Combine all lanes, halves first; the result is in every lane."""
    count = x.type.count
    half = count // 2
    while half:
        x = combine(b, x, pick(b, x, x, [i ^ half for i in range(count)]))
        half //= 2
    return x


def _sum(b, x, y):
    return b.fadd(x, y)


def _over_block(b, begin, end, act):
    """Call act(offset in bytes, positions) for all vectors of a block: unrolled, or if there are many, four per iteration and
    only the iterations from position `begin` to `end`."""
    here = ISA.ints(list(range(LANES)))
    if not LOOPED:
        for place in range(0, BLOCK, LANES):
            act(4 * place, b.add(here, splat(ISA.ints, place)))
        return
    stride = at(4 * LANES)
    with cgutils.for_range_slice(b, b.mul(b.sdiv(begin, stride), stride), end, stride) as (first, _):
        for place in range(0, 4 * LANES, LANES):
            number = b.add(first, at(place))
            act(b.mul(number, at(4)), b.add(here, spread(b, b.trunc(number, I32), LANES)))


@kernel(constants=0)
def weigh_row(b, scores, begin, end, low, high, more, threshold, state, rescale):
    """Convert a block's scores [begin, end) of one row into weights, zero but for positions [low, high).

    more       added to each score
    threshold  weights below this share become zero too, but count in the sum
    state [2]  the highest score and the sum of weights, updated
    rescale  [1]  multiplied by the correction of earlier sums
    """
    kind, nothing = ISA.floats, splat(ISA.floats, -float("inf"))
    first, last = (spread(b, b.trunc(x, I32), LANES) for x in (low, high))
    added, top, sums, found = spread(b, more, LANES), variable(b, nothing), variable(b, splat(kind, 0.0)), []

    def mask(place, number):
        seen = b.and_(b.icmp_signed(">=", number, first), b.icmp_signed("<", number, last))
        score = b.select(seen, b.fadd(load(b, scores, place, kind), added), nothing)
        if LOOPED:
            store(b, score, scores, place)
        else:
            found.append(score)
        b.store(ISA.larger(b, score, b.load(top)), top)

    _over_block(b, begin, end, mask)
    highest = across(b, ISA.larger, b.load(top))
    before, total = (spread(b, load(b, state, 4 * i, F32), LANES) for i in range(2))
    peak = ISA.larger(b, highest, before)
    # where nothing was seen yet any finite base gives weights of 0
    base = b.select(b.fcmp_ordered(">", peak, nothing), peak, splat(kind, 0.0))
    correction = _exp(b, b.fsub(before, base))
    # the sum of all weights will be no less than its value so far
    least = b.fmul(spread(b, threshold, LANES), fma(b, total, correction, _exp(b, b.fsub(highest, base))))

    def weigh(place, number):
        weight = _exp(b, b.fsub(load(b, scores, place, kind) if LOOPED else found.pop(0), base))
        b.store(b.fadd(b.load(sums), weight), sums)
        store(b, b.select(b.fcmp_ordered("<", weight, least), splat(kind, 0.0), weight), scores, place)

    _over_block(b, begin, end, weigh)
    total = fma(b, total, correction, across(b, _sum, b.load(sums)))
    _first(b, peak, state, 0)
    _first(b, total, state, 4)
    _first(b, b.fmul(correction, spread(b, load(b, rescale, 0, F32), LANES)), rescale, 0)


@kernel(constants=0)
def cap_row(b, scores, more, cap):
    """Add `more` to a block's scores of one row, and cap them: cap * tanh(score / cap)."""
    kind, signs = ISA.floats, splat(ISA.ints, -(2**31))
    added, limit = spread(b, more, LANES), spread(b, cap, LANES)
    for place in range(0, BLOCK, LANES):
        x = b.fdiv(b.fadd(load(b, scores, 4 * place, kind), added), limit)
        bits = b.bitcast(x, ISA.ints)
        size, sign = b.bitcast(b.and_(bits, b.not_(signs)), kind), b.and_(bits, signs)
        # a polynomial near 0, where the exponential form cancels
        square = b.fmul(x, x)
        series = splat(kind, float(T0))
        for c in (T1, T2, T3, T4):
            series = fma(b, series, square, splat(kind, float(c)))
        near = fma(b, b.fmul(x, square), series, x)
        e = _exp(b, b.fmul(size, splat(kind, -2.0)))
        far = b.fdiv(b.fsub(splat(kind, 1.0), e), b.fadd(splat(kind, 1.0), e))
        far = b.bitcast(b.or_(b.bitcast(far, ISA.ints), sign), kind)
        small = b.fcmp_ordered("<", size, splat(kind, float(SMALL)))
        store(b, b.fmul(limit, b.select(small, near, far)), scores, 4 * place)


def _first(b, x, address, offset):
    store(b, b.extract_element(x, at(0)), address, offset)


@kernel(constants=0)
def fold_row(b, part, rescale, top, share, width, out, peak_at, total_at):
    """Merge a part's sums [width], still to be multiplied by `rescale`, into those of the parts before it.

    top, share  the part's highest score, and its sum of weights
    """
    kind, nothing = ISA.floats, splat(ISA.floats, -float("inf"))
    before, old = (spread(b, load(b, address, 0, F32), LANES) for address in (peak_at, total_at))
    mine, new = (spread(b, x, LANES) for x in (top, share))
    peak = _larger(b, mine, before)
    base = b.select(b.fcmp_ordered(">", peak, nothing), peak, splat(kind, 0.0))
    correction, weight = _exp(b, b.fsub(before, base)), _exp(b, b.fsub(mine, base))
    total = fma(b, new, weight, b.fmul(old, correction))
    whole = b.mul(b.sdiv(width, at(LANES)), at(BYTES))
    for start, end, some in ((at(0), whole, kind), (whole, b.mul(width, at(4)), vector(F32, 1))):
        narrow = [spread(b, b.extract_element(x, at(0)), some.count) for x in (correction, weight)]
        scale = spread(b, rescale, some.count)
        with cgutils.for_range_slice(b, start, end, at(4 * some.count)) as (place, _):
            value = b.fmul(load(b, part, place, some), scale)
            joined = fma(b, value, narrow[1], b.fmul(load(b, out, place, some), narrow[0]))
            store(b, joined, out, place)
    _first(b, peak, peak_at, 0)
    _first(b, total, total_at, 0)


@kernel(constants=0)
def close_row(b, out, width, peak_at, total_at, sink, divided):
    """Merge a sink (-inf for none) into a row's sums, and divide them by the sum of weights where `divided`; 0 for none."""
    kind, nothing = ISA.floats, splat(ISA.floats, -float("inf"))
    before, old = (spread(b, load(b, address, 0, F32), LANES) for address in (peak_at, total_at))
    one = spread(b, sink, LANES)
    peak = _larger(b, one, before)
    base = b.select(b.fcmp_ordered(">", peak, nothing), peak, splat(kind, 0.0))
    correction = _exp(b, b.fsub(before, base))
    total = b.fadd(b.fmul(old, correction), _exp(b, b.fsub(one, base)))
    empty = b.fcmp_ordered("==", total, splat(kind, 0.0))
    share = b.select(b.or_(empty, spread(b, b.icmp_signed("==", divided, at(0)), LANES)), splat(kind, 1.0), total)
    whole = b.mul(b.sdiv(width, at(LANES)), at(BYTES))
    for start, end, some in ((at(0), whole, kind), (whole, b.mul(width, at(4)), vector(F32, 1))):
        factor, by = (spread(b, b.extract_element(x, at(0)), some.count) for x in (correction, share))
        with cgutils.for_range_slice(b, start, end, at(4 * some.count)) as (place, _):
            store(b, b.fdiv(b.fmul(load(b, out, place, some), factor), by), out, place)
    _first(b, peak, peak_at, 0)
    _first(b, total, total_at, 0)


@jit
def score_rows(rows, q, q_step, keys, step, batches, scores, line):
    """Multiply rows of queries with keys that are laid out, to rows of scores with a stride of `line` bytes."""
    r = 0
    while r + TALL <= rows:
        score_tile((TALL, q + r * q_step, q_step, keys, step, batches, scores + r * line, line))
        r += TALL
    if ODD and (rows - r) % 2 and r + ODD <= rows:
        score_tile((ODD, q + r * q_step, q_step, keys, step, batches, scores + r * line, line))
        r += ODD
    while r + 2 <= rows:
        score_tile((2, q + r * q_step, q_step, keys, step, batches, scores + r * line, line))
        r += 2
    if r < rows:
        score_tile((1, q + r * q_step, q_step, keys, step, batches, scores + r * line, line))


@jit
def _add_columns(rows, first, weights, line, values, step, count, sums, sum_step, rescales):
    """Run `add_values` for the vectors of a row that do not fill a wide tile."""
    for r in range(rows):
        place, rescale = sums + r * sum_step, rescales + 4 * r
        for column in range(first, step, BYTES):
            value_tile((1, 1, weights + r * line, line, values + column, step, count, place + column, sum_step, rescale))


@jit
def add_wide_column(rows, weights, line, values, step, count, sums, sum_step, rescales):
    """Run `add_values` for WIDE vectors of every row."""
    r = 0
    while r + TALL <= rows:
        value_tile((TALL, WIDE, weights + r * line, line, values, step, count, sums + r * sum_step, sum_step, rescales + 4 * r))
        r += TALL
    if ODD and (rows - r) % 2 and r + ODD <= rows:
        value_tile((ODD, WIDE, weights + r * line, line, values, step, count, sums + r * sum_step, sum_step, rescales + 4 * r))
        r += ODD
    while r + 2 <= rows:
        value_tile((2, WIDE, weights + r * line, line, values, step, count, sums + r * sum_step, sum_step, rescales + 4 * r))
        r += 2
    if r < rows:
        value_tile((1, WIDE, weights + r * line, line, values, step, count, sums + r * sum_step, sum_step, rescales + 4 * r))


@jit
def add_values(rows, weights, line, values, step, count, sums, sum_step, rescales):
    """Scale the sums of rows by `rescales`, and add values, rows of `step` bytes, by their weights."""
    whole = step // COLUMN * COLUMN
    for column in range(0, whole, COLUMN):
        add_wide_column(rows, weights, line, values + column, step, count, sums + column, sum_step, rescales)
    _add_columns(rows, whole, weights, line, values, step, count, sums, sum_step, rescales)
