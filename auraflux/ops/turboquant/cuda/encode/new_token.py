"""The new token of a decode step inside attention: norm and RoPE, its codes into the cache, and one more split.

Without this, one kernel rotates and encodes and the next attends: between them lies the latency of a kernel boundary, which
at few keys is as long as the work. Here every program rotates its own queries, and the programs of older tokens do not wait
for the new one. Two more programs per key head encode its key and its value: one leaves the scores of the last split, one
its sums.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.gpu.blocks.dependent_launch import gdc_launch_dependents, gdc_wait
from auraflux.ops.gpu.blocks.rope import PER_QUARTER, QUARTER_HIGH, QUARTER_LOW
from auraflux.ops.turboquant.cuda.decode.full_precision import MEAN_BLOCK
from auraflux.ops.turboquant.cuda.decode.lookup import transform


class NewToken(NamedTuple):
    """The new token of a sequence, before norm and RoPE; Triton reserves the name `values` of a tuple.

    k, v           [1, HEADS, D]
    q_norm, k_norm [D]  weights of norms, or None
    inv_freq       [half]
    positions      [1]
    q_pitch        elements from one query head to the next
    calibration    of keys, or None
    """

    k: Any
    v: Any
    q_norm: Any
    k_norm: Any
    eps: float
    inv_freq: Any
    positions: Any
    mscale: float
    half: int
    q_pitch: int
    key_levels: Any
    value_levels: Any
    calibration: Any


@gluon.jit
def _cos_sin(angle):
    """Return cosine and sine of an angle that is not negative, as `gpu/blocks/rope.py` does."""
    wide = angle.to(gl.float64)
    quarters = (wide * PER_QUARTER + 0.5).to(gl.int32)
    count = quarters.to(gl.float64)
    r = ((wide - count * QUARTER_HIGH) - count * QUARTER_LOW).to(gl.float32)
    quadrant = quarters & 3
    z = r * r
    s = ((-1.9515295891e-4 * z + 8.3321608736e-3) * z - 1.6666654611e-1) * z * r + r
    c = ((2.443315711809948e-5 * z - 1.388731625493765e-3) * z + 4.166664568298827e-2) * z * z - 0.5 * z + 1.0
    odd = (quadrant & 1) == 1
    cosine, sine = gl.where(odd, s, c), gl.where(odd, c, s)
    return gl.where((quadrant == 1) | (quadrant == 2), -cosine, cosine), gl.where(quadrant >= 2, -sine, sine)


@gluon.jit
def channels_of(D: gl.constexpr, NW: gl.constexpr):
    """Return the channels [1, D] of a row per warp."""
    LR: gl.constexpr = gl.BlockedLayout([1, D // 32], [1, 32], [NW, 1], [1, 0])
    return gl.arange(0, D, layout=gl.SliceLayout(0, LR))[None, :]


@gluon.jit
def rope_angles(new, channel, INTERLEAVED: gl.constexpr):
    """Return of each channel: itself, its partner, cosine and signed sine, whether it rotates. Nothing waits for a kernel."""
    half = new.half
    if INTERLEAVED:
        pair, first, other = channel // 2, channel % 2 == 0, channel ^ 1
    else:
        first = channel < half
        pair, other = gl.where(first, channel, channel - half), gl.where(first, channel + half, channel - half)
    rotates = channel < 2 * half
    frequency = gl.load(new.inv_freq + pair, mask=rotates, other=0.0)
    cosine, sine = _cos_sin(gl.load(new.positions).to(gl.float32) * frequency)
    return channel, gl.where(rotates, other, channel), cosine * new.mscale, gl.where(first, -sine, sine) * new.mscale, rotates


@gluon.jit
def rotated_rows(x, there, weight, angles, eps, D: gl.constexpr, NW: gl.constexpr):
    """Load rows at x [R, 1], normalise and rotate them, rounded as if stored: [R, D] float32."""
    kind: gl.constexpr = x.dtype.element_ty
    a = gl.load(x + angles[0], mask=there, other=0.0).to(gl.float32)
    b = gl.load(x + angles[1], mask=there, other=0.0).to(gl.float32)
    if weight is not None:
        every = gl.load(x + channels_of(D, NW), mask=there, other=0.0).to(gl.float32)
        factor = 1.0 / gl.sqrt(gl.sum(every * every, 1) / D + eps)
        factor = gl.expand_dims(factor, 1)
        a = (a * factor * gl.load(weight + angles[0]).to(gl.float32)).to(kind).to(gl.float32)
        b = (b * factor * gl.load(weight + angles[1]).to(gl.float32)).to(kind).to(gl.float32)
    return gl.where(angles[4], a * angles[2] + b * angles[3], a).to(kind).to(gl.float32)


@gluon.jit
def query_pointers(q, live, pitch, D: gl.constexpr, NW: gl.constexpr):
    """Return where 8 query heads at q begin, and which of them exist: [8, 1] both."""
    LR: gl.constexpr = gl.BlockedLayout([1, D // 32], [1, 32], [NW, 1], [1, 0])
    g = gl.arange(0, 8, layout=gl.SliceLayout(1, LR))[:, None]
    return q + g * pitch, g < live


@gluon.jit
def rotated_queries(q, live, new, angles, D: gl.constexpr, NW: gl.constexpr):
    """Load 8 query heads at q, of which `live` exist, and normalise and rotate channels of them: [8, D] float32."""
    at, there = query_pointers(q, live, new.q_pitch, D, NW)
    return rotated_rows(at, there, new.q_norm, angles, new.eps, D, NW)


@gluon.jit
def _encoded(wide, sign, levels, D: gl.constexpr, BITS: gl.constexpr, NW: gl.constexpr):
    """Encode a vector [1, D] in float64, as `encode/codec.py` does: codes, levels, norm [1, 1], the rotated vector."""
    LAST: gl.constexpr = (4 << BITS) - 1.0
    length = gl.expand_dims(gl.sqrt(gl.sum(wide * wide, 1)), 1)
    inverse = gl.where(length == 0.0, 0.0, 1.0 / length)
    y = transform((wide * inverse).to(gl.float32) * sign, NW) * D**-0.5
    place = gl.minimum(gl.maximum((y + levels.offset) * levels.factor, 0.0), LAST).to(gl.int32)
    found, ends = gl.load(levels.codes + place), gl.load(levels.levels + place)
    under = found.to(gl.int32).to(gl.float32, bitcast=True) >= y
    code = (found >> 32).to(gl.int32) + gl.where(under, 0, 1)
    level = gl.where(under, ends, ends >> 32).to(gl.int32).to(gl.float32, bitcast=True)
    code = gl.where(y == y, code, (1 << BITS) - 1)
    exactly = level.to(gl.float64)
    rounded = gl.expand_dims(gl.sqrt(gl.sum(exactly * exactly, 1)), 1)
    norm = gl.where(rounded == 0.0, length * 0.0, length / rounded).to(gl.float32)
    return code, level, norm, y * length.to(gl.float32)


@gluon.constexpr_function
def _words_layout(warps):
    return gl.BlockedLayout([1], [32], [warps], [0])


@gluon.jit
def _words(shifted, COUNT: gl.constexpr, NW: gl.constexpr):
    """Join neighbouring codes, shifted to their places, into COUNT words, a thread each."""
    D: gl.constexpr = shifted.shape[1]
    joined = gl.sum(gl.reshape(shifted, [COUNT, D // COUNT]), 1)
    return gl.convert_layout(joined, _words_layout(NW))


@gluon.jit
def _store_full_precision(x, to, rows, d, D: gl.constexpr, FULL: gl.constexpr):
    """Store a rotated vector among recent and among sink tokens; return it as stored."""
    recent, sink = rows
    if FULL.recent_window:
        gl.store(to[0] + recent * D + d, x.to(to[0].dtype.element_ty), mask=(d >= 0) & (recent >= 0))
    if FULL.sink_tokens:
        gl.store(to[1] + sink * D + d, x.to(to[1].dtype.element_ty), mask=(d >= 0) & (sink >= 0))
    return x.to(to[0].dtype.element_ty).to(gl.float32)


@gluon.jit
def _full_precision_places(full, sequence, position, head, SHAPE: gl.constexpr, FULL: gl.constexpr):
    """Return a position's row among recent tokens and among sink tokens; -1 where it has none."""
    recent, sink = (position * 0 - 1).to(gl.int64), (position * 0 - 1).to(gl.int64)
    if FULL.recent_window:
        inside = position < full.recent_width * FULL.page
        page = gl.load(
            full.recent_table + sequence.to(gl.int64) * full.recent_width + position // FULL.page, mask=inside, other=-1
        )
        row = (page.to(gl.int64) * SHAPE.heads + head) * FULL.page + position % FULL.page
        recent = gl.where((page >= 0) & (page < full.recent_pool), row, recent)
    if FULL.sink_tokens:
        page = gl.load(full.sink_table + sequence)
        row = (page.to(gl.int64) * SHAPE.heads + head) * FULL.sink_tokens + position
        sink = gl.where((position < FULL.sink_tokens) & (page >= 0) & (page < full.sink_pool), row, sink)
    return recent, sink


@gluon.jit
def _mean_of(calibration, head, position, d, D: gl.constexpr):
    """Load the mean of keys at a position, and the inverse scale: float64 [1, D]."""
    at, block = head * D + d, calibration.table + (position // MEAN_BLOCK).to(gl.int64) * (2 * D) + d
    mean = gl.load(block).to(gl.float64) * gl.load(calibration.along + at).to(gl.float64)
    mean += gl.load(block + D).to(gl.float64) * gl.load(calibration.across + at).to(gl.float64)
    return mean, gl.load(calibration.inverse + at).to(gl.float64)


@gluon.jit
def _row_of(index, sequence, position, head, SHAPE: gl.constexpr):
    """Return a position's row in the pools of codes and norms, and whether it has one."""
    inside = position < index.width * SHAPE.page
    page = gl.load(index.table + sequence.to(gl.int64) * index.width + position // SHAPE.page, mask=inside, other=-1)
    row = (page.to(gl.int64) * SHAPE.heads + head) * SHAPE.page + position % SHAPE.page
    return row, (page >= 0) & (page < index.pool)


@gluon.jit
def _parts_of(dest, D: gl.constexpr, NW: gl.constexpr):
    """Return the partial results of 8 rows for a split."""
    row, split, splits = dest
    g = gl.arange(0, 8, layout=gl.SliceLayout(1, gl.BlockedLayout([1, D // 32], [1, 32], [NW, 1], [1, 0])))
    return g, (row + g) * splits + split


@gluon.jit
def append_key(queries, codes, new, index, scores, full, task, partials, dest, CONFIG: gl.constexpr):
    """Store the new key of a head, and the scores of its queries for this token."""
    SHAPE: gl.constexpr = CONFIG.shape
    FULL: gl.constexpr = CONFIG.full
    D: gl.constexpr = SHAPE.width
    NW: gl.constexpr = CONFIG.work.warps
    BITS: gl.constexpr = SHAPE.key_bits
    WORDS: gl.constexpr = D * BITS // 32
    EACH: gl.constexpr = 32 // BITS
    q, live, signs = queries
    sequence, position, head = task
    d = channels_of(D, NW)
    sign = gl.load(signs + d)
    angles = rope_angles(new, d, CONFIG.work.interleaved)
    row, good = _row_of(index, sequence, position, head, SHAPE)
    if full is not None:
        rows = _full_precision_places(full, sequence, position, head, SHAPE, FULL)
    if new.calibration is not None:
        mean, inverse = _mean_of(new.calibration, head, position, d, D)
        scale = gl.load(new.calibration.scale + head * D + d)
        rotated_mean = transform((mean * inverse).to(gl.float32) * sign, NW) * D**-0.5
    gdc_wait()
    gdc_launch_dependents()
    key = rotated_rows(new.k + head * D + gl.sum(d * 0, 1)[:, None], d >= 0, new.k_norm, angles, new.eps, D, NW)
    x = rotated_queries(q, live, new, angles, D, NW)
    wide = key.to(gl.float64)
    if new.calibration is not None:
        wide = ((wide - mean) * inverse).to(gl.float32).to(gl.float64)
    code, level, norm, rotated = _encoded(wide, sign, new.key_levels, D, BITS, NW)
    words, word = _words(code << (d % EACH * BITS), WORDS, NW), gl.arange(0, WORDS, layout=_words_layout(NW))
    gl.store(codes.k.codes + row * WORDS + word, words, mask=good & (word >= 0))
    gl.store(codes.k.norms + row + d * 0, norm + sign * 0.0, mask=good & (d == 0))
    read = level * norm
    if full is not None:
        with_mean = rotated
        if new.calibration is not None:
            with_mean = rotated + rotated_mean
        stored = _store_full_precision(with_mean, (full.recent_k, full.sink_k), rows, d, D, FULL)
        if FULL.recent_window:
            read = stored
    scaled = x * sign
    if new.calibration is not None:
        scaled *= scale
    s = gl.sum(transform(scaled, NW) * read, 1) * (scores.factor * D**0.5)
    if new.calibration is not None and FULL.recent_window == 0:
        s += gl.sum(x * mean.to(gl.float32), 1) * (scores.factor * D)
    if CONFIG.softcap:
        s = scores.cap - 2.0 * scores.cap / (gl.exp2(s) + 1.0)
    g, part = _parts_of(dest, D, NW)
    gl.store(partials.m + part, s, mask=g < live)
    gl.store(partials.l + part, s * 0.0 + 1.0, mask=g < live)


@gluon.jit
def append_value(live, signs, codes, new, index, full, task, partials, dest, CONFIG: gl.constexpr):
    """Store the new value of a head, also as the sums of its queries for this token: weights of 1."""
    SHAPE: gl.constexpr = CONFIG.shape
    FULL: gl.constexpr = CONFIG.full
    D: gl.constexpr = SHAPE.width
    NW: gl.constexpr = CONFIG.work.warps
    BITS: gl.constexpr = SHAPE.value_bits
    PER: gl.constexpr = D * BITS // 128
    HALF: gl.constexpr = 16 // BITS
    EVEN: gl.constexpr = 0xFFFFFFFF // ((1 << 2 * BITS) - 1) * ((1 << BITS) - 1)
    sequence, position, head = task
    d = channels_of(D, NW)
    sign = gl.load(signs + d)
    row, good = _row_of(index, sequence, position, head, SHAPE)
    # values of two tokens share their words: the other's bits stay
    w = gl.arange(0, 8 * PER, layout=_words_layout(NW))
    at = codes.v.codes + (row // 8 * 8 + w // PER) * (4 * PER) + row % 8 // 2 * PER + w % PER
    before = gl.load(at, mask=good & (w >= 0), other=0)
    if full is not None:
        rows = _full_precision_places(full, sequence, position, head, SHAPE, FULL)
    gdc_wait()
    gdc_launch_dependents()
    wide = gl.load(new.v + head * D + d).to(gl.float64)
    code, level, norm, rotated = _encoded(wide, sign, new.value_levels, D, BITS, NW)
    shift = (position % 2) * BITS
    words = _words(code << (d % HALF * (2 * BITS) + shift), 8 * PER, NW)
    mine = (gl.full([8 * PER], EVEN, gl.int64, _words_layout(NW)) << shift).to(gl.int32)
    gl.store(at, before ^ ((before ^ words) & mine), mask=good & (w >= 0))
    gl.store(codes.v.norms + row + d * 0, norm + sign * 0.0, mask=good & (d == 0))
    read = level * norm
    if full is not None:
        stored = _store_full_precision(rotated, (full.recent_v, full.sink_v), rows, d, D, FULL)
        if FULL.recent_window:
            read = stored
    g, part = _parts_of(dest, D, NW)
    # in the order of the tensor core's rows, see `finish_pairs`
    place = d % (D // 8) * 8 + d // (D // 8)
    gl.store(
        partials.o + gl.expand_dims(part, 1).to(gl.int64) * D + place,
        read * D**0.5 + gl.expand_dims(g * 0, 1).to(gl.float32),
        mask=gl.expand_dims(g < live, 1),
    )
