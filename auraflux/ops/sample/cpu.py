"""Sampling on CPU without sorting the vocabulary.

Tokens fall into buckets by how far their logit lies below the best, 64 buckets to a factor e of weight. Buckets are in order
already, so a cut or the drawn token is found from the buckets' sums, and only the bucket it lies in is sorted. Beyond 64
factors of e a token weighs nothing in the float64 sum of a vocabulary: such tokens are counted, never looked at.

A token in a bucket is one int64: its logit as an integer that orders the other way, above its index. Sorting these numbers
sorts by decreasing logit, ties by increasing index.
"""

import math

import numpy as np
import torch
from torch import Tensor

from auraflux.ops.sample.reference import BELOW_ONE
from auraflux.ops.simd.jit import Kernel, arguments, as_float, floats, int32s, int64s, jit, like, octets, share, strict, threads
from auraflux.ops.simd.math import bits_of_float, float_of_bits

PARALLEL_FROM = 1 << 16  # elements; below this, waking the threads costs more than the work

BLOCK = 1 << 12

PER_FACTOR, BUCKETS = 64.0, 4096
LOWEST = np.float32(-np.inf)
MAGNITUDE = np.int32(0x7FFFFFFF)
LOG2E, LN2_HIGH, LN2_LOW = 1.4426950408889634, 6.93147180369123816490e-01, 1.90821492927058770002e-10
T3, T4, T5, T6, T7, T8, T9, T10, T11, T12, T13 = (1 / math.factorial(n) for n in range(3, 14))


# of the fast-math flags only contraction: reassociation would merge the steps of the range reduction
@strict
def _decay(x):
    """exp(-x) in float64, for x from 0 to 64."""
    n = np.floor(0.5 - x * LOG2E)
    r = (-x - n * LN2_HIGH) - n * LN2_LOW
    y = (((T13 * r + T12) * r + T11) * r + T10) * r + T9
    y = (((y * r + T8) * r + T7) * r + T6) * r + T5
    y = ((((y * r + T4) * r + T3) * r + 0.5) * r + 1.0) * r + 1.0
    return y * np.float64(float_of_bits((np.int32(n) + np.int32(127)) << np.int32(23)))


@jit
def _ascending(x):
    """An int32 that compares as the float32 does: NaN as -inf, -0 as 0."""
    bits = np.int32(0) if x == 0 else bits_of_float(x if x == x else LOWEST)
    return np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & MAGNITUDE))


@jit
def _logit(token):
    """The logit of a token in a bucket."""
    order = np.int32(~np.int32(token >> 32))
    return float_of_bits(np.int32(order ^ np.int32(np.int32(order >> np.int32(31)) & MAGNITUDE)))


@jit
def _highest(logits):
    """The highest logit in `_ascending` form, and the first index that has it."""
    best, block = np.int32(-MAGNITUDE), 0
    for start in range(0, len(logits), BLOCK):
        highest = np.int32(-MAGNITUDE)
        for i in range(start, min(start + BLOCK, len(logits))):
            order = _ascending(logits[i])
            highest = order if order > highest else highest
        if highest > best:
            best, block = highest, start
    for i in range(block, len(logits)):
        if _ascending(logits[i]) == best:
            return best, i
    return best, 0


@jit
def _number_buckets(logits, best, scale, buckets):
    for i in range(len(logits)):
        x = logits[i] if logits[i] == logits[i] else LOWEST
        # equal logits are 0 apart, also where both are infinite; what is NaN after that lies beyond the last bucket
        apart = 0.0 if x == best else (np.float64(best) - np.float64(x)) * scale
        buckets[i] = np.int16(apart if apart < BUCKETS else BUCKETS)


@jit
def _count(buckets, starts):
    """Make `starts` say where each bucket begins when they lie one after the other."""
    for bucket in buckets:
        starts[bucket + 1] += 1
    for b in range(1, len(starts)):
        starts[b] += starts[b - 1]


@jit
def _place(logits, buckets, starts, last):
    """The tokens of the buckets up to `last`, one bucket after the other."""
    tokens, ends = np.empty(starts[last + 1], np.int64), starts.copy()
    for i in range(len(buckets)):
        bucket = buckets[i]
        if bucket <= last:
            tokens[ends[bucket]] = (np.int64(~_ascending(logits[i])) << 32) | i
            ends[bucket] += 1
    return tokens


@jit
def _weight(token, best, rate):
    x = _logit(token)
    return 1.0 if x == best else _decay((np.float64(best) - np.float64(x)) * rate)


@jit
def _sums(tokens, starts, last, best, rate):
    """How much the tokens before each bucket weigh."""
    before = np.zeros(last + 2)
    for b in range(last + 1):
        total = 0.0
        for i in range(starts[b], starts[b + 1]):
            total += _weight(tokens[i], best, rate)
        before[b + 1] = before[b] + total
    return before


@jit
def _first_from(ascending, value):
    """The first index whose element is not below the value."""
    low, high = 0, len(ascending)
    while low < high:
        middle = (low + high) // 2
        if ascending[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low


@jit
def _sift(heap, root, count):
    """Let the number at `root` sink to where none below is larger."""
    value = heap[root]
    child = 2 * root + 1
    while child < count:
        if child + 1 < count and heap[child + 1] > heap[child]:
            child += 1
        if heap[child] <= value:
            break
        heap[root] = heap[child]
        root, child = child, 2 * child + 1
    heap[root] = value


@jit
def _sort(tokens, starts, bucket):
    """Sort a bucket by heap: with Numba's own sort the kernel takes half as long again to compile."""
    heap = tokens[starts[bucket] : starts[bucket + 1]]
    for root in range(len(heap) // 2 - 1, -1, -1):
        _sift(heap, root, len(heap))
    for last in range(len(heap) - 1, 0, -1):
        heap[0], heap[last] = heap[last], heap[0]
        _sift(heap, 0, last)


@jit
def _cut_at_sum(tokens, starts, before, end, limit, best, rate):
    """Keep tokens while those before weigh less than `limit`: where that ends, and what is kept weighs."""
    b = max(_first_from(before[:-1], limit) - 1, 0)
    _sort(tokens, starts, b)
    i, total, stop = starts[b], before[b], min(starts[b + 1], end)
    while i < stop and total < limit:
        total += _weight(tokens[i], best, rate)
        i += 1
    return i, total


@jit
def _cut_at_weight(tokens, starts, before, end, total, least, best, rate):
    """Keep tokens that weigh at least `least`."""
    nearest = -np.log(least) * PER_FACTOR
    # one bucket earlier, as the logarithm is rounded
    first = max(int(nearest) - 1, 0) if nearest < BUCKETS else BUCKETS
    for b in range(first, len(before) - 1):
        if starts[b] >= end:
            break
        _sort(tokens, starts, b)
        kept = before[b]
        for i in range(starts[b], min(starts[b + 1], end)):
            weight = _weight(tokens[i], best, rate)
            if weight < least:
                return i, kept
            kept += weight
    return end, total


@jit
def _draw(logits_at, size, uniform, temperature, top_k, top_p, min_p):
    logits = floats(logits_at, size)
    order, first = _highest(logits)
    if not temperature > 0:
        return first
    best, rate = _logit(np.int64(~order) << 32), 1 / np.float64(temperature)

    buckets, starts = np.empty(size, np.int16), np.zeros(BUCKETS + 2, np.int64)
    _number_buckets(logits, best, rate * PER_FACTOR, buckets)
    _count(buckets, starts)
    last = BUCKETS - 1
    if top_k > 0:
        last = min(_first_from(starts[1:], top_k), last)
    tokens = _place(logits, buckets, starts, last)
    before = _sums(tokens, starts, last, best, rate)

    end, total = len(tokens), before[last + 1]
    if 0 < top_k <= end:
        _sort(tokens, starts, last)
        worst, end = _logit(tokens[top_k - 1]), starts[last]
        total = before[last]
        while end < len(tokens) and _logit(tokens[end]) >= worst:
            total += _weight(tokens[end], best, rate)
            end += 1
    if not top_p >= 1:
        limit = np.float64(top_p) * total
        end, total = _cut_at_sum(tokens, starts, before, end, limit, best, rate) if limit > 0 else (1, 1.0)
    if not min_p <= 0:
        least = np.float64(min_p) if min_p < 1 else 1.0
        end, total = _cut_at_weight(tokens, starts, before, end, total, least, best, rate)
    target = (min(np.float64(uniform), BELOW_ONE) if uniform > 0 else 0.0) * total
    # the drawn token is the last whose predecessors weigh no more than the target
    after, _ = _cut_at_sum(tokens, starts, before, end, np.nextafter(target, np.inf), best, rate)
    return tokens[after - 1] & 0xFFFFFFFF


@Kernel
def _draw_rows(args, job, jobs):
    logits, uniform, temperature, top_k, top_p, min_p, out, rows, size = arguments(args, 9)
    uniforms, temperatures, top_ks = floats(uniform, rows), floats(temperature, rows), int32s(top_k, rows)
    top_ps, min_ps, drawn = floats(top_p, rows), floats(min_p, rows), int64s(out, rows)
    for row in share(rows, job, jobs):
        settings = uniforms[row], temperatures[row], top_ks[row], top_ps[row], min_ps[row]
        drawn[row] = _draw(logits + 4 * row * size, size, *settings)


@Kernel
def _first_rows(args, job, jobs):
    """Take the first token of each row, as temperature 0 does: drawing takes seconds to compile."""
    logits, out, rows, size = arguments(args, 4)
    found = int64s(out, rows)
    for row in share(rows, job, jobs):
        found[row] = _highest(floats(logits + 4 * row * size, size))[1]


def sample(logits: Tensor, uniform: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    wide = as_float(logits)
    rows, size = logits.shape
    out = torch.empty_like(top_k, dtype=torch.int64)
    settings = uniform.data_ptr(), temperature.data_ptr(), top_k.data_ptr(), top_p.data_ptr(), min_p.data_ptr()
    jobs = threads() if rows > 1 and rows * size >= PARALLEL_FROM else 1
    if not any(temperature.tolist()):
        _first_rows(jobs, wide.data_ptr(), out.data_ptr(), rows, size)
        return out
    _draw_rows(jobs, wide.data_ptr(), *settings, out.data_ptr(), rows, size)
    return out


@jit
def _penalize_part(logits_at, mask_at, counts_at, repetition, presence, frequency, out_at, n):
    logits, out = floats(logits_at, n), floats(out_at, n)
    mask, counts = octets(mask_at, n), int32s(counts_at, n)
    for i in range(n):
        x, count = logits[i], counts[i]
        lowered = x * repetition if x < 0 else x / repetition
        x = lowered if (mask[i] != 0) | (count > 0) else x
        out[i] = x - frequency * np.float32(count) - (presence if count > 0 else np.float32(0))


@Kernel
def _penalize(args, job, jobs):
    logits, mask, counts, repetition, presence, frequency, out, rows, size = arguments(args, 9)
    repetitions, presences, frequencies = floats(repetition, rows), floats(presence, rows), floats(frequency, rows)
    part = share(size, job, jobs)
    for row in range(rows):
        at, settings = row * size + part.start, (repetitions[row], presences[row], frequencies[row])
        _penalize_part(logits + 4 * at, mask + at, counts + 4 * at, *settings, out + 4 * at, len(part))


def penalize(
    logits: Tensor, prompt_mask: Tensor, output_counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    wide = as_float(logits)
    out = torch.empty_like(wide)
    settings = repetition.data_ptr(), presence.data_ptr(), frequency.data_ptr()
    jobs = threads() if wide.numel() >= PARALLEL_FROM else 1
    _penalize(jobs, wide.data_ptr(), prompt_mask.data_ptr(), output_counts.data_ptr(), *settings, out.data_ptr(), *logits.shape)
    return like(out, logits)
