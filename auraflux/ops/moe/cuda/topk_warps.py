"""Choosing a token's experts inside a Gluon kernel by all of its warps: each finds the best of 32, the first one merges.

Where one warp has all scores (`topk`), the others do as much work on nothing, or wait. Scores are compared by their
bits, as there: NaN takes the place of -inf, of equal scores the lowest place comes first, what is past the end lies below all.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.hopper.shared_memory import put_two, word_at
from auraflux.ops.moe.cuda.topk import LOWEST, ordered, sigmoid

NEGATIVE = -2139095041  # -inf, as an integer of the order of scores
# of the warp's keys the highest one, and its first lane; that lane (q) takes part no more
NEXT = (
    "NEXT: redux.sync.max.s32 top,key,0xffffffff; setp.eq.s32 q,key,top; vote.sync.ballot.b32 m,q,0xffffffff;"
    "brev.b32 m,m; clz.b32 who,m; setp.eq.s32 q,{lane},who;"
)
AGAIN = "add.u32 n,n,1; setp.lt.u32 p,n,{count}; @p bra.uni NEXT; DONE: }}"


def _best_ptx(count: int) -> str:
    text = "{.reg .pred p,q,e; .reg .b32 n,m,top,who,key,low; mov.b32 low,0x80000000; mov.b32 $0,low; mov.b32 $1,0;"
    text += "setp.ge.s32 p,$3,$5; @p bra.uni DONE; mov.b32 key,$2; mov.b32 n,0;" + NEXT.format(lane="$4")
    text += "selp.b32 key,low,key,q; setp.eq.s32 e,n,$4; selp.b32 $0,top,$0,e; selp.b32 $1,who,$1,e;"
    return text + AGAIN.format(count=count)


def _kept_ptx(count: int) -> str:
    text = "{.reg .pred p,q; .reg .b32 n,m,top,who,key,low; mov.b32 low,0x80000000; mov.b32 $0,0;"
    text += "setp.ne.b32 p,$2,0; @p bra.uni DONE; mov.b32 key,$1; mov.b32 n,0;" + NEXT.format(lane="$3")
    return text + "selp.b32 key,low,key,q; selp.b32 $0,1,$0,q;" + AGAIN.format(count=count)


def _merged_ptx(count: int) -> str:
    text = "{.reg .pred p,q,e,l,t; .reg .b32 n,m,top,who,key,mine,low,h,x,a; mov.b32 low,0x80000000; mov.b32 $0,0;"
    text += "setp.ne.b32 p,$2,0; @p bra.uni DONE; mov.b32 n,0; mov.b32 h,0; mov.b32 a,$1;"
    text += "setp.ne.b32 l,$5,0; setp.ne.b32 t,$4,0; mov.b32 key,low; mov.b32 mine,0; @t ld.shared.v2.b32 {key,mine},[a];"
    text += f"@!l mov.b32 key,{NEGATIVE}; @!l mov.b32 mine,0; selp.b32 key,key,low,t;" + NEXT.format(lane="$3")
    text += "shl.b32 x,$3,5; add.u32 x,x,mine; shfl.sync.idx.b32 x,x,who,31,0xffffffff; setp.eq.s32 e,n,$3; selp.b32 $0,x,$0,e;"
    text += "@q add.u32 a,a,8; @q add.u32 h,h,1; and.pred e,q,l; @e ld.shared.v2.b32 {key,mine},[a]; @!l mov.b32 mine,h;"
    return text + AGAIN.format(count=count)


MOST_CHOSEN = 32  # one lane for each
BEST, KEPT_BEST, MERGED = ([made(count) for count in range(MOST_CHOSEN + 1)] for made in (_best_ptx, _kept_ptx, _merged_ptx))


@gluon.constexpr_function
def _best_of(count):
    return BEST[count]


@gluon.constexpr_function
def _kept_of(count):
    return KEPT_BEST[count]


@gluon.constexpr_function
def _merged_of(count):
    return MERGED[count]


@gluon.jit
def _best(key, warp, lane, warps, K: gl.constexpr):
    """A warp's K highest keys, and the lanes they are of: the n-th in lane n. Warps from `warps` on do nothing."""
    args = [key, warp, lane, lane * 0 + warps]
    return gl.inline_asm_elementwise(_best_of(K), "=&r,=&r,r,r,r,r", args, (gl.int32,) * 2, is_pure=False, pack=1)


@gluon.jit
def _kept(key, warp, lane, KEPT: gl.constexpr):
    """Whether a lane of the first warp has one of the KEPT highest keys."""
    return gl.inline_asm_elementwise(_kept_of(KEPT), "=&r,r,r,r", [key, warp, lane], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _merged(at, warp, lane, there, live, K: gl.constexpr):
    """The experts of lists in falling order, the n-th in lane n of the first warp; a list of keys and places for each lane.

    A list that is there but not live has only -inf.
    """
    text: gl.constexpr = _merged_of(K)
    args = [at, warp, lane, there.to(gl.int32), live.to(gl.int32)]
    return gl.inline_asm_elementwise(text, "=&r,r,r,r,r,r,~{memory}", args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def _float(key):
    """The score that a key was made of."""
    return gl.where(key < 0, key ^ 0x7FFFFFFF, key).to(gl.float32, bitcast=True)


@gluon.constexpr_function
def _listed(count):
    """Of a warp's experts; a group's two best are needed to judge it."""
    return max(count, 2)


@gluon.constexpr_function
def list_nbytes(count, experts):
    return 8 * _listed(count) * (experts // 32)


@gluon.jit
def load_keys(scores, bias, tid, experts, E: gl.constexpr, SCORING: gl.constexpr, W: gl.constexpr):
    """What experts are compared by, 32 of them in each warp at a time."""
    keys = ()
    for r in gl.static_range((E // 32 + W - 1) // W):
        place = tid + r * 32 * W
        there = place < experts
        choice = gl.load(scores + place, mask=there, other=float("-inf")).to(gl.float32)
        if SCORING == "sigmoid":
            choice = sigmoid(choice)
            if bias is not None:
                choice += gl.load(bias + place, mask=there, other=0.0).to(gl.float32)
        keys += (gl.where(there, ordered(choice), LOWEST),)  # type: ignore[assignment]
    return keys


@gluon.jit
def pick(keys, tid, lists, K: gl.constexpr, E: gl.constexpr, KEPT: gl.constexpr, W: gl.constexpr):
    """Lane n of the first warp gets the expert of slot n; `lists` are `list_nbytes` of shared memory.

    KEPT  only experts of this many best groups of 32 may be chosen; 0 for any
    """
    G: gl.constexpr = E // 32
    L: gl.constexpr = _listed(K)
    warp, lane = tid // 32, tid % 32
    for r in gl.static_range((G + W - 1) // W):
        key, who = _best(keys[r], warp, lane, G - r * W, L)
        put_two(lists + ((warp + r * W) * L + lane) * 8, key, who, (lane < L) & (warp + r * W < G))
    gl.thread_barrier()
    mine, there, live = lists + gl.minimum(lane, G - 1) * (L * 8), lane < G, lane >= 0
    if KEPT > 0:
        # a group is as good as its two best
        both = ordered(_float(word_at(mine)) + _float(word_at(mine + 8)))
        live = _kept(gl.where(there, both, LOWEST), warp, lane, KEPT) > 0
    return _merged(mine, warp, lane, there, live, K)
