"""Choosing a token's experts inside a Gluon kernel, one at a time: the highest score, and of equal ones the lowest place.

A score is compared by its bits, as integers of the same order. NaN takes the place of -inf, and what is past the end lies
below all scores. Scores of 16 bits share a word with their places, and one warp chooses for its program; others are
chosen by every warp for itself, with a few scores in each lane.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.linear._nibbles import word_at

LOWEST = gl.constexpr(-(2**31))
PAST = gl.constexpr(2**30)
ADD_LANES = gl.constexpr(
    "{.reg .f32 t; mov.f32 $0,$1;"
    + "".join(f"shfl.sync.bfly.b32 t,$0,{n},31,0xffffffff; add.f32 $0,$0,t;" for n in (16, 8, 4, 2, 1))
    + "}"
)


@gluon.constexpr_function
def _choose_ptx(count):
    """The first warp ($1 is 0) finds slots 0 to $4 and leaves them from $3 on; keys from $5 on, E / 32 in each lane."""
    keys = [f"k{i}" for i in range(count)]
    text = f"{{.reg .pred p,q,e; .reg .b32 at,end,m,top,low; .reg .b32 {','.join(keys)}; mov.b32 $0,0; setp.ne.b32 p,$1,0;"
    text += "@p bra.uni DONE; setp.eq.b32 e,$2,0; mov.b32 low,0x80000000; mov.b32 at,$3; shl.b32 end,$4,2; add.u32 end,end,at;"
    text += "".join(f"mov.b32 {key},${5 + i};" for i, key in enumerate(keys)) + "NEXT: mov.b32 m,k0;"
    text += (
        "".join(f"max.s32 m,m,{key};" for key in keys[1:]) + "redux.sync.max.s32 top,m,0xffffffff; @e st.shared.b32 [at],top;"
    )
    text += "".join(f"setp.eq.b32 q,{key},top; selp.b32 {key},low,{key},q;" for key in keys)
    return text + "add.u32 at,at,4; setp.le.u32 p,at,end; @p bra.uni NEXT; DONE: }"


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
def _ordered(choice):
    """A score's bits as an integer; zeros of both signs are equal."""
    choice = gl.where(choice == choice, gl.where(choice == 0.0, 0.0, choice), float("-inf"))
    bits = choice.to(gl.int32, bitcast=True)
    return gl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@gluon.jit
def _choose_wide(xs, bias, lane, experts, last, E: gl.constexpr, SIGMOID: gl.constexpr):
    keys = ()
    for i in gl.static_range(E // 32):
        place, choice = lane + 32 * i, xs[i]
        if SIGMOID:
            choice = _sigmoid(choice)
            if bias is not None:
                choice += gl.load(bias + place, mask=place < experts, other=0.0).to(gl.float32)
        keys += (gl.where(place < experts, _ordered(choice), LOWEST),)  # type: ignore[assignment]
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
def choose(xs, bias, tid, box, experts, last, E: gl.constexpr, SIGMOID: gl.constexpr, NARROW: gl.constexpr):
    """Lane n gets the expert of slot n, for slots up to `last`.

    NARROW  scores have 16 bits; `box` are 128 bytes of shared memory for them
    """
    lane = tid % 32
    if NARROW and not SIGMOID:
        args = [tid // 32, lane, box, lane * 0 + last]
        for i in gl.static_range(E // 32):
            place = lane + 32 * i
            key = (_ordered(xs[i]) & -65536) | (0xFFFF - place)
            args += [gl.where(place < experts, key, LOWEST)]
        registers: gl.constexpr = "=r" + ",r" * (4 + E // 32) + ",~{memory}"
        gl.inline_asm_elementwise(_choose_ptx(E // 32), registers, args, gl.int32, is_pure=False, pack=1)
        gl.thread_barrier()
        chosen = 0xFFFF - (word_at(box + gl.minimum(lane, last) * 4) & 0xFFFF)
    else:
        chosen = _choose_wide(xs, bias, lane, experts, last, E, SIGMOID)
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
