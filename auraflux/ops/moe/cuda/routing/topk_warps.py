"""Top-k selection inside a Gluon kernel by all warps: each finds the best of 32 experts, the first one merges.

With all scores in one warp (`topk`), the other warps idle. Scores are compared by their bits, as there: NaN ranks as -inf,
ties by lowest index, padding ranks below all.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.hopper.shared_memory import put_two, word_at
from auraflux.ops.moe.cuda.routing.topk import LOWEST, ordered, sigmoid

NEGATIVE = -2139095041  # -inf, as an integer of the order of scores
# the warp's highest key and its first lane; that lane (q) drops out
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


def _best_lanes_ptx(count: int) -> str:
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
BEST, BEST_LANES, MERGED = (
    [made(count) for count in range(MOST_CHOSEN + 1)] for made in (_best_ptx, _best_lanes_ptx, _merged_ptx)
)


@gluon.constexpr_function
def _best_of(count):
    return BEST[count]


@gluon.constexpr_function
def _best_lanes_of(count):
    return BEST_LANES[count]


@gluon.constexpr_function
def _merged_of(count):
    return MERGED[count]


@gluon.jit
def _best(key, warp, lane, warps, K: gl.constexpr):
    """Return a warp's K highest keys and their lanes: the n-th in lane n. Warps from `warps` on do nothing."""
    args = [key, warp, lane, lane * 0 + warps]
    return gl.inline_asm_elementwise(_best_of(K), "=&r,=&r,r,r,r,r", args, (gl.int32,) * 2, is_pure=False, pack=1)


@gluon.jit
def _best_lanes(key, warp, lane, COUNT: gl.constexpr):
    """Return whether a lane of the first warp has one of the COUNT highest keys."""
    return gl.inline_asm_elementwise(_best_lanes_of(COUNT), "=&r,r,r,r", [key, warp, lane], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _merged(at, warp, lane, there, live, K: gl.constexpr):
    """Merge the lanes' lists, sorted in decreasing order: the n-th expert in lane n of the first warp.

    A list that exists but is not live holds only -inf.
    """
    text: gl.constexpr = _merged_of(K)
    args = [at, warp, lane, there.to(gl.int32), live.to(gl.int32)]
    return gl.inline_asm_elementwise(text, "=&r,r,r,r,r,r,~{memory}", args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def _float(key):
    """Return the score of a key."""
    return gl.where(key < 0, key ^ 0x7FFFFFFF, key).to(gl.float32, bitcast=True)


@gluon.constexpr_function
def _listed(count):
    """Return the length of a warp's list; ranking a group needs its two best."""
    return max(count, 2)


@gluon.constexpr_function
def list_nbytes(count, experts):
    return 8 * _listed(count) * (experts // 32)


@gluon.jit
def load_keys(scores, bias, tid, experts, E: gl.constexpr, SCORING: gl.constexpr, W: gl.constexpr):
    """Load the comparison keys of experts, 32 per warp at a time."""
    keys = ()
    for r in gl.static_range((E // 32 + W - 1) // W):
        place = tid + r * 32 * W
        there = place < experts
        score = gl.load(scores + place, mask=there, other=float("-inf")).to(gl.float32)
        if SCORING == "sigmoid":
            score = sigmoid(score)
            if bias is not None:
                score += gl.load(bias + place, mask=there, other=0.0).to(gl.float32)
        keys += (gl.where(there, ordered(score), LOWEST),)  # type: ignore[assignment]
    return keys


@gluon.jit
def pick(keys, tid, lists, K: gl.constexpr, E: gl.constexpr, TOPK_GROUPS: gl.constexpr, W: gl.constexpr):
    """Return the expert of slot n in lane n of the first warp; `lists` are `list_nbytes` of shared memory.

    TOPK_GROUPS  number of best groups of 32 that experts are selected from; 0 for all experts
    """
    G: gl.constexpr = E // 32
    L: gl.constexpr = _listed(K)
    warp, lane = tid // 32, tid % 32
    for r in gl.static_range((G + W - 1) // W):
        key, who = _best(keys[r], warp, lane, G - r * W, L)
        put_two(lists + ((warp + r * W) * L + lane) * 8, key, who, (lane < L) & (warp + r * W < G))
    gl.thread_barrier()
    mine, there, live = lists + gl.minimum(lane, G - 1) * (L * 8), lane < G, lane >= 0
    if TOPK_GROUPS > 0:
        # a group ranks by the sum of its two best scores
        both = ordered(_float(word_at(mine)) + _float(word_at(mine + 8)))
        live = _best_lanes(gl.where(there, both, LOWEST), warp, lane, TOPK_GROUPS) > 0
    return _merged(mine, warp, lane, there, live, K)
