"""Sums, maxima and counts over the lanes of a warp: PTX of one thread; every tensor has one element per thread.

All 32 lanes take part. Float sums use butterfly shuffles and are bit-identical in all participating lanes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _sum_ptx(lanes):
    masks = [lanes >> i for i in range(1, lanes.bit_length())]
    steps = (f"shfl.sync.bfly.b32 t,$0,{mask},31,0xffffffff; add.f32 $0,$0,t;" for mask in masks)
    return "{.reg .f32 t; mov.f32 $0,$1;" + "".join(steps) + "}"


@gluon.constexpr_function
def _redux_ptx(how):
    return f"redux.sync.{how} $0,$1,0xffffffff;"


ADD_BELOW = gl.constexpr(
    "{.reg .b32 t; .reg .pred p; mov.b32 $0,$1;"
    + "".join(f"shfl.sync.up.b32 t|p,$0,{n},0,0xffffffff; @p add.s32 $0,$0,t;" for n in (1, 2, 4, 8, 16))
    + "}"
)


@gluon.jit
def sum_over(value, LANES: gl.constexpr, PURE: gl.constexpr = True):
    """Sum float32 over each LANES neighbouring lanes, a power of two.

    PURE  whether the compiler may move or repeat it; False where only some lanes use the result
    """
    return gl.inline_asm_elementwise(_sum_ptx(LANES), "=&f,f", [value], gl.float32, is_pure=PURE, pack=1)


@gluon.jit
def sum_four(value):
    """Sum float32 over lanes 4g to 4g + 3."""
    return sum_over(value, 4)


@gluon.jit
def inclusive_scan(value):
    """Sum integers over the lanes of the warp up to and including each."""
    return gl.inline_asm_elementwise(ADD_BELOW, "=&r,r", [value], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _redux(value, HOW: gl.constexpr):
    return gl.inline_asm_elementwise(_redux_ptx(HOW), "=r,r", [value], gl.int32, is_pure=False, pack=1)


@gluon.jit
def highest(value):
    """Return the largest integer of the warp."""
    return _redux(value, "max.s32")


@gluon.jit
def warp_uniform(value):
    """Return an integer that all lanes have in common, as one that the compiler knows to be warp-uniform.

    Branches do not diverge.
    """
    return gl.inline_asm_elementwise(_redux_ptx("max.s32"), "=r,r", [value], gl.int32, is_pure=True, pack=1)


@gluon.jit
def lowest(value):
    """Return the smallest integer of the warp."""
    return _redux(value, "min.s32")


@gluon.jit
def sum_int(value):
    """Sum integers over the warp."""
    return _redux(value, "add.s32")


@gluon.jit
def any_bits(value):
    """Set the bits that any lane of the warp has set."""
    return _redux(value, "or.b32")


@gluon.jit
def count_true(there):
    """Count the lanes of the warp in which `there` is true."""
    text: gl.constexpr = "{.reg .pred p; .reg .b32 m; setp.ne.b32 p,$1,0; vote.sync.ballot.b32 m,p,0xffffffff; popc.b32 $0,m;}"
    return gl.inline_asm_elementwise(text, "=r,r", [there.to(gl.int32)], gl.int32, is_pure=False, pack=1)
