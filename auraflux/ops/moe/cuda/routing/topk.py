"""Top-k selection inside a Gluon kernel by one warp, one expert at a time: highest score, ties by lowest index.

Scores are compared by their bits, as integers of the same order. NaN ranks as -inf, and padding ranks below all scores. The
first warp of a program selects, with a few scores in each lane; 16-bit scores share a word with their index.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.hopper.ptx import from_lane
from auraflux.ops.hopper.reduce import highest, lowest, sum_over

LOWEST = gl.constexpr(-(2**31))
PAST = gl.constexpr(2**30)


MOST_SORTED = 8  # keys of a lane


def _sort_ptx(keys: list[str]) -> str:
    """Return PTX that sorts a lane's keys in decreasing order, by Batcher's odd-even merge sort."""
    text, count, p = "", len(keys), 1
    while p < count:
        k = p
        while k:
            for j in range(k % p, count - k, 2 * k):
                for i in range(j, min(j + k, count - k)):
                    if i // (2 * p) == (i + k) // (2 * p):
                        high, low = keys[i], keys[i + k]
                        text += f"max.s32 m,{high},{low}; min.s32 {low},{high},{low}; mov.b32 {high},m;"
            k //= 2
        p *= 2
    return text


def _choose_ptx(count: int) -> str:
    """Return PTX: lane n ($2) of the first warp ($1 is 0) gets the n-th highest key, n <= $3; `count` keys a lane from $4."""
    keys = [f"k{i}" for i in range(count)]
    text = f"{{.reg .pred p,q,e; .reg .b32 n,m,top,low; .reg .b32 {','.join(keys)}; mov.b32 $0,0; setp.ne.b32 p,$1,0;"
    text += "@p bra.uni DONE; mov.b32 low,0x80000000; mov.b32 n,0;"
    text += "".join(f"mov.b32 {key},${4 + i};" for i, key in enumerate(keys))
    if count <= MOST_SORTED:
        text += _sort_ptx(keys) + "NEXT: redux.sync.max.s32 top,k0,0xffffffff; setp.eq.b32 q,k0,top;"
        text += "".join(f"selp.b32 {key},{after},{key},q;" for key, after in zip(keys, [*keys[1:], "low"], strict=True))
    else:
        text += "NEXT: mov.b32 m,k0;" + "".join(f"max.s32 m,m,{key};" for key in keys[1:])
        text += "redux.sync.max.s32 top,m,0xffffffff;"
        text += "".join(f"setp.eq.b32 q,{key},top; selp.b32 {key},low,{key},q;" for key in keys)
    text += "setp.eq.b32 e,n,$2; selp.b32 $0,top,$0,e;"
    return text + "add.u32 n,n,1; setp.le.u32 p,n,$3; @p bra.uni NEXT; DONE: }"


CHOOSE = [_choose_ptx(count) for count in range(1, 17)]


@gluon.constexpr_function
def _chosen_ptx(count):
    return CHOOSE[count - 1]


@gluon.jit
def sigmoid(x):
    return 1.0 / (1.0 + gl.exp(-x))


@gluon.jit
def load_scores(scores, tid, experts, E: gl.constexpr):
    """Load the first warp's scores, E / 32 in each lane."""
    xs = ()
    for i in gl.static_range(E // 32):
        place = tid % 32 + 32 * i
        there = (place < experts) & (tid < 32)
        xs += (gl.load(scores + place, mask=there, other=float("-inf")).to(gl.float32),)  # type: ignore[assignment]
    return xs


@gluon.jit
def ordered(score):
    """Return a score's bits as an integer of the same order; zeros of both signs are equal."""
    score = gl.where(score == score, gl.where(score == 0.0, 0.0, score), float("-inf"))
    bits = score.to(gl.int32, bitcast=True)
    return gl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@gluon.jit
def _choose_wide(xs, bias, lane, experts, last, E: gl.constexpr, SIGMOID: gl.constexpr):
    keys = ()
    for i in gl.static_range(E // 32):
        place, score = lane + 32 * i, xs[i]
        if SIGMOID:
            score = sigmoid(score)
            if bias is not None:
                score += gl.load(bias + place, mask=place < experts, other=0.0).to(gl.float32)
        keys += (gl.where(place < experts, ordered(score), LOWEST),)  # type: ignore[assignment]
    chosen = lane * 0
    for n in range(last + 1):
        best = lane * 0 + LOWEST
        for i in gl.static_range(E // 32):
            best = gl.maximum(best, keys[i])
        top = highest(best)
        mine = lane * 0 + PAST
        for i in gl.static_range(E // 32):
            mine = gl.minimum(mine, gl.where(keys[i] == top, lane + 32 * i, PAST))
        found = lowest(mine)
        chosen = gl.where(lane == n, found, chosen)
        left = ()
        for i in gl.static_range(E // 32):
            left += (gl.where(lane + 32 * i == found, LOWEST, keys[i]),)  # type: ignore[assignment]
        keys = left
    return chosen


@gluon.jit
def choose(xs, bias, tid, experts, last, E: gl.constexpr, SIGMOID: gl.constexpr, NARROW: gl.constexpr):
    """Return the expert of slot n in lane n of the first warp, for slots up to `last`; 0 elsewhere. NARROW: 16-bit scores."""
    lane = tid % 32
    if NARROW and not SIGMOID:
        args = [tid // 32, lane, lane * 0 + last]
        for i in gl.static_range(E // 32):
            place = lane + 32 * i
            key = (ordered(xs[i]) & -65536) | (0xFFFF - place)
            args += [gl.where(place < experts, key, LOWEST)]
        registers: gl.constexpr = "=&r" + ",r" * (3 + E // 32)
        top = gl.inline_asm_elementwise(_chosen_ptx(E // 32), registers, args, gl.int32, is_pure=False, pack=1)
        chosen = gl.where(lane <= last, 0xFFFF - (top & 0xFFFF), 0)
    else:
        chosen = _choose_wide(xs, bias, lane, experts, last, E, SIGMOID)
    return gl.where(tid < 32, chosen, 0)


@gluon.jit
def weights_of(
    xs, scores, chosen, lane, scale, K: gl.constexpr, E: gl.constexpr, SCORING: gl.constexpr, RENORMALIZE: gl.constexpr
):
    """Return the weight of slot n in lane n of the first warp."""
    y = gl.load(scores + chosen).to(gl.float32)
    if SCORING == "sigmoid":
        weight = sigmoid(y)
    else:
        # the first slot has the highest score
        top = from_lane(y.to(gl.int32, bitcast=True), lane * 0).to(gl.float32, bitcast=True)
        weight = gl.exp(y - top)
        if SCORING == "softmax" and not RENORMALIZE:
            every = weight * 0.0
            for i in gl.static_range(E // 32):
                every += gl.exp(xs[i] - top)
            weight /= sum_over(every, 32, False)
    if RENORMALIZE or SCORING == "chosen":
        total = sum_over(gl.where(lane < K, weight, 0.0), 32, False)
        weight /= gl.where(total > 0.0, total, 1.0)
    return weight * scale
