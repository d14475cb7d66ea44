"""Sampling on CPU without sorting the vocabulary.

Tokens fall into buckets by the distance of their logit from the best, 64 buckets to a factor e of weight. Buckets are in
order, so a cut or the sampled token is found from the sums of the buckets, and only the bucket that contains it is sorted.
Beyond 64 factors of e a token is negligible in the float64 sum of a vocabulary: such tokens are in no bucket.

A token of a bucket is one int64: its logit as an integer of inverted order, above its index. Sorting these integers sorts by
decreasing logit, ties by increasing index. Every filter selects a prefix of that order, so a cut is the last selected token.
"""

import math

import numpy as np
import torch
from torch import Tensor

from auraflux.ops.sample.reference import BELOW_ONE
from auraflux.ops.simd.jit import Kernel, arguments, as_float, floats, int32s, int64s, jit, like, octets, share, threads
from auraflux.ops.simd.math import bits_of_float, float_of_bits

PARALLEL_FROM = 1 << 16  # elements; below this, waking the threads costs more than the work

BLOCK = 1 << 12  # tokens reduced to their maximum before it is compared with other blocks
PER_FACTOR, BUCKETS = 64, 64 * 64
# weight at the start of a bucket relative to the best: integer powers of e, and fractions of one
FACTORS, PARTS = np.exp(-np.arange(64.0)), np.exp(-np.arange(64.0) / PER_FACTOR)
P1, P2, P3, P4, P5, P6 = ((-1 / PER_FACTOR) ** n / math.factorial(n) for n in range(1, 7))
AT_ONCE = 512  # tokens whose weights are computed before they are summed
NEIGHBOURS = 64  # tokens that are scanned together
LOWEST = np.float32(-np.inf)
MAGNITUDE = np.int32(0x7FFFFFFF)
LOWEST_ORDER = np.int32(~0x7F800000)  # of -inf, see `_ascending`
LAST = np.iinfo(np.int64).max  # after all tokens
LEAST = 5e-324  # above 0


@jit
def _within(place):
    """Return the relative weight at a position within a bucket, from 0 to 1."""
    return (((((P6 * place + P5) * place + P4) * place + P3) * place + P2) * place + P1) * place + 1.0


@jit
def _of_bucket(b):
    """Return the weight of a token at the start of a bucket."""
    return FACTORS[b // PER_FACTOR] * PARTS[b % PER_FACTOR]


@jit
def _ascending(x):
    """Return an int32 that compares like the float32: NaN as -inf, -0 as 0."""
    bits = bits_of_float(x)
    order = np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & MAGNITUDE))
    # select integers: loops that select floats here are not vectorized
    order = np.int32(0) if order == np.int32(-1) else order
    return order if x == x else LOWEST_ORDER


@jit
def _logit(token):
    """Return the logit of a token in a bucket."""
    order = np.int32(~np.int32(token >> 32))
    return float_of_bits(np.int32(order ^ np.int32(np.int32(order >> np.int32(31)) & MAGNITUDE)))


@jit
def _highest(logits):
    """Return the highest logit in `_ascending` form, and its first index."""
    best, block = np.int32(-MAGNITUDE), 0
    for start in range(0, len(logits), BLOCK):
        # an array that starts at index 0: otherwise Numba checks for negative indices, and the loop is not vectorized
        some, highest = logits[start : start + BLOCK], np.int32(-MAGNITUDE)
        for i in range(len(some)):
            order = _ascending(some[i])
            highest = order if order > highest else highest
        if highest > best:
            best, block = highest, start
    for i in range(block, len(logits)):
        if _ascending(logits[i]) == best:
            return best, i
    return best, 0


@jit
def _levelled(logits, best):
    """Replace logits equal to an infinite best by 0, and others by -inf."""
    levels = np.empty_like(logits)
    for i in range(len(logits)):
        levels[i] = np.float32(0) if (logits[i] if logits[i] == logits[i] else LOWEST) == best else LOWEST
    return levels


@jit
def _distance(x, best, scale):
    """Return the distance of a logit from the best, in buckets."""
    distance = (np.float64(best) - np.float64(x)) * scale
    # NaN falls beyond the last bucket, like -inf
    return distance if distance < BUCKETS else np.float64(BUCKETS)


@jit
def _number(logits, best, scale, buckets):
    """Find every token's bucket."""
    for i in range(len(logits)):
        buckets[i] = np.uint16(_distance(logits[i], best, scale))


@jit
def _number_and_weigh(logits, best, scale, buckets, within):
    """Find every token's bucket, and its relative weight within it."""
    for i in range(len(logits)):
        distance = _distance(logits[i], best, scale)
        buckets[i] = np.uint16(distance)
        within[i] = _within(distance - np.floor(distance))


@jit
def _sum_all(logits, best, scale, buckets, sums):
    """Find every token's bucket, and sum the relative weights within each bucket."""
    within = np.empty(AT_ONCE)
    for start in range(0, len(logits), AT_ONCE):
        some = buckets[start : start + AT_ONCE]
        _number_and_weigh(logits[start : start + AT_ONCE], best, scale, some, within)
        for i in range(len(some)):
            sums[some[i]] += within[i]


@jit
def _sum_first(logits, best, scale, buckets, sums, count):
    """Sum only the top `count` tokens and others of the last one's bucket; return that bucket and its number of tokens."""
    _number(logits, best, scale, buckets)
    counts = np.zeros(BUCKETS + 1, np.int64)
    for i in range(len(buckets)):
        counts[buckets[i]] += 1
    b, left = 0, count
    while b < BUCKETS and counts[b] < left:
        left -= counts[b]
        b += 1
    for i in range(len(buckets)):
        if buckets[i] <= b:
            sums[buckets[i]] += _within(_distance(logits[i], best, scale) - buckets[i])
    return b, left


@jit
def _running(sums):
    """Return the total weight of the tokens before each bucket, and at the end of all tokens."""
    before, total = np.empty(BUCKETS + 1), 0.0
    for b in range(BUCKETS):
        before[b] = total
        total += sums[b] * _of_bucket(b)
    before[BUCKETS] = total
    return before


@jit
def _weight(token, b, best, scale):
    return _of_bucket(b) * _within(_distance(_logit(token), best, scale) - b)


@jit
def _first_from(ascending, value):
    """Return the first index whose element is not below the value."""
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
    """Sift the number at `root` down a heap."""
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
def _sort(heap):
    """Sort with heapsort: Numba's own sort makes the kernel compile half as long again."""
    for root in range(len(heap) // 2 - 1, -1, -1):
        _sift(heap, root, len(heap))
    for last in range(len(heap) - 1, 0, -1):
        heap[0], heap[last] = heap[last], heap[0]
        _sift(heap, 0, last)


@jit
def _has(buckets, wanted):
    distance = np.uint16(BUCKETS)
    for i in range(len(buckets)):
        other = np.uint16(buckets[i] ^ wanted)
        distance = other if other < distance else distance
    return distance == 0


@jit
def _tokens(logits, buckets, b):
    """Return the tokens of a bucket, sorted."""
    wanted, count = np.uint16(b), 0
    tokens = np.empty(NEIGHBOURS, np.int64)
    for start in range(0, len(logits), NEIGHBOURS):
        some = buckets[start : start + NEIGHBOURS]
        if not _has(some, wanted):
            continue
        if count + NEIGHBOURS > len(tokens):
            more = np.empty(2 * len(tokens), np.int64)
            more[:count] = tokens[:count]
            tokens = more
        for i in range(len(some)):
            # overwritten unless it belongs there: no branch to mispredict
            tokens[count] = (np.int64(~_ascending(logits[start + i])) << 32) | (start + i)
            count += some[i] == wanted
    _sort(tokens[:count])
    return tokens[:count]


@jit
def _cut_at_count(logits, buckets, before, b, count, best, scale):
    """Select `count` tokens of a bucket and ties of the last; return the last selected token and the total weight."""
    tokens, total = _tokens(logits, buckets, b), before[b]
    least, final = _logit(tokens[count - 1]), tokens[0]
    for token in tokens:
        if _logit(token) < least:
            break
        final, total = token, total + _weight(token, b, best, scale)
    return final, total


@jit
def _cut_at_sum(logits, buckets, before, limit, final, best, scale):
    """Select tokens up to `final` while the weight before them is below `limit`."""
    b = min(max(_first_from(before, limit) - 1, 0), BUCKETS - 1)
    while b > 0 and before[b + 1] == before[b]:
        b -= 1
    tokens, total = _tokens(logits, buckets, b), before[b]
    last_token = tokens[0]
    for token in tokens:
        if total >= limit or token > final:
            break
        last_token, total = token, total + _weight(token, b, best, scale)
    return min(last_token, final), total


@jit
def _cut_at_weight(logits, buckets, before, least, final, total, best, scale):
    """Select tokens up to `final`, of total weight `total`, that weigh at least `least`."""
    nearest = -np.log(least) * PER_FACTOR
    # one bucket earlier, because the logarithm is rounded
    first = max(int(nearest) - 1, 0) if nearest < BUCKETS else BUCKETS
    for b in range(first, BUCKETS):
        if before[b + 1] == before[b]:
            continue
        summed = before[b]
        for token in _tokens(logits, buckets, b):
            if token > final:
                return final, total
            weight = _weight(token, b, best, scale)
            if weight < least:
                return token - 1, summed
            summed += weight
    return final, total


@jit
def _draw(logits_at, size, uniform, temperature, top_k, top_p, min_p):
    logits = floats(logits_at, size)
    order, first = _highest(logits)
    if not temperature > 0:
        return first
    best, scale = _logit(np.int64(~order) << 32), PER_FACTOR / np.float64(temperature)
    if not abs(best) < np.inf:
        logits, best = _levelled(logits, best), np.float32(0)
    buckets, sums = np.empty(size, np.uint16), np.zeros(BUCKETS + 1)
    last, count = BUCKETS, 0
    if 0 < top_k < size:
        last, count = _sum_first(logits, best, scale, buckets, sums, top_k)
    else:
        _sum_all(logits, best, scale, buckets, sums)
    before = _running(sums)
    final, total = LAST, before[BUCKETS]
    if last < BUCKETS:
        final, total = _cut_at_count(logits, buckets, before, last, count, best, scale)
    if not top_p >= 1:
        limit = max(np.float64(top_p) * total, LEAST)
        final, total = _cut_at_sum(logits, buckets, before, limit, final, best, scale)
    if not min_p <= 0:
        least = np.float64(min_p) if min_p < 1 else 1.0
        final, total = _cut_at_weight(logits, buckets, before, least, final, total, best, scale)
    target = (min(np.float64(uniform), BELOW_ONE) if uniform > 0 else 0.0) * total
    # the sampled token is the last whose predecessors weigh no more than the target
    drawn, _ = _cut_at_sum(logits, buckets, before, np.nextafter(target, np.inf), final, best, scale)
    return drawn & 0xFFFFFFFF


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
    """Take the best token of each row, for temperature 0: a kernel of its own, because sampling takes seconds to compile."""
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
