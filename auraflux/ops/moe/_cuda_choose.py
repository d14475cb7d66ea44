"""Choosing a token's experts inside a Gluon kernel: every warp does it for itself, with a few scores in each lane.

An expert is found at a time: the highest score of the warp, and of those that have it the lowest place. A score is compared by
its bits, as integers of the same order. NaN takes the place of -inf, and what is past the end lies below all scores.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LOWEST = gl.constexpr(-(2**31))
PAST = gl.constexpr(2**30)
ADD_LANES = gl.constexpr(
    "{.reg .f32 t; mov.f32 $0,$1;"
    + "".join(f"shfl.sync.bfly.b32 t,$0,{n},31,0xffffffff; add.f32 $0,$0,t;" for n in (16, 8, 4, 2, 1))
    + "}"
)


@gluon.jit
def _highest(value):
    text: gl.constexpr = "redux.sync.max.s32 $0,$1,0xffffffff;"
    return gl.inline_asm_elementwise(text, "=r,r", [value], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _lowest(value):
    text: gl.constexpr = "redux.sync.min.s32 $0,$1,0xffffffff;"
    return gl.inline_asm_elementwise(text, "=r,r", [value], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _add_lanes(value):
    return gl.inline_asm_elementwise(ADD_LANES, "=&f,f", [value], gl.float32, is_pure=False, pack=1)


@gluon.jit
def from_lane(value, lane):
    """What another lane of the warp has."""
    text: gl.constexpr = "shfl.sync.idx.b32 $0,$1,$2,31,0xffffffff;"
    return gl.inline_asm_elementwise(text, "=r,r,r", [value, lane], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _sigmoid(x):
    return 1.0 / (1.0 + gl.exp(-x))


@gluon.jit
def load_scores(scores, lane, experts, E: gl.constexpr):
    xs = ()
    for i in gl.static_range(E // 32):
        place = lane + 32 * i
        xs += (gl.load(scores + place, mask=place < experts, other=float("-inf")).to(gl.float32),)  # type: ignore[assignment]
    return xs


@gluon.jit
def choose(xs, bias, lane, experts, last, E: gl.constexpr, SIGMOID: gl.constexpr):
    """Lane n gets the expert of slot n, for slots up to `last`."""
    keys = ()
    for i in gl.static_range(E // 32):
        place, choice = lane + 32 * i, xs[i]
        if SIGMOID:
            choice = _sigmoid(choice)
            if bias is not None:
                choice += gl.load(bias + place, mask=place < experts, other=0.0).to(gl.float32)
        # zeros of both signs are equal
        choice = gl.where(choice == choice, gl.where(choice == 0.0, 0.0, choice), float("-inf"))
        bits = choice.to(gl.int32, bitcast=True)
        key = gl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        keys += (gl.where(place < experts, key, LOWEST),)  # type: ignore[assignment]
    chosen = lane * 0
    for n in range(last + 1):
        best = lane * 0 + LOWEST
        for i in gl.static_range(E // 32):
            best = gl.maximum(best, keys[i])
        top = _highest(best)
        mine = lane * 0 + PAST
        for i in gl.static_range(E // 32):
            mine = gl.minimum(mine, gl.where(keys[i] == top, lane + 32 * i, PAST))
        found = _lowest(mine)
        chosen = gl.where(lane == n, found, chosen)
        left = ()
        for i in gl.static_range(E // 32):
            left += (gl.where(lane + 32 * i == found, LOWEST, keys[i]),)  # type: ignore[assignment]
        keys = left
    return chosen


@gluon.jit
def weights_of(
    xs, scores, chosen, lane, scale, K: gl.constexpr, E: gl.constexpr, SCORING: gl.constexpr, RENORMALIZE: gl.constexpr
):
    """Lane n gets the weight of slot n."""
    y = gl.load(scores + chosen).to(gl.float32)
    if SCORING == "sigmoid":
        weight = _sigmoid(y)
    else:
        # the first slot has the highest score
        top = from_lane(y.to(gl.int32, bitcast=True), lane * 0).to(gl.float32, bitcast=True)
        weight = gl.exp(y - top)
        if SCORING == "softmax" and not RENORMALIZE:
            every = weight * 0.0
            for i in gl.static_range(E // 32):
                every += gl.exp(xs[i] - top)
            weight /= _add_lanes(every)
    if RENORMALIZE or SCORING == "chosen":
        total = _add_lanes(gl.where(lane < K, weight, 0.0))
        weight /= gl.where(total > 0.0, total, 1.0)
    return weight * scale
