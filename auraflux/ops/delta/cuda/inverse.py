"""Triangular inverses and running sums of a chunk of 64 tokens, as PTX on the accumulators of a warpgroup of four warps.

Warp w holds rows 16 w to 16 w + 15 of a [64, 64] as eight tiles of 8 columns; a lane has, of every tile, two neighbours in row
lane / 4 and two in the row 8 below it. So each warp holds the diagonal block of its rows, and inverts it with warp-level MMAs,
without synchronizing with the others.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from auraflux.ops.delta.cuda.layouts import A64, F32, HF, M64, publish
from auraflux.ops.hopper.mma import MMA_F16, MMA_F16_K8, TRANSPOSE

WARP = "mov.u32 w,%tid.x; shr.u32 w,w,5; and.b32 w,w,3;"


def _block(names: tuple[str, ...], places: tuple[int, ...]) -> str:
    """Return PTX that selects blocks of 8 of a warp's diagonal block of 16, by a lane's pair indices."""
    text = "".join(f"setp.eq.u32 d{n},w,{n};" for n in range(4))
    for name, place in zip(names, places, strict=True):
        text += f"mov.b32 {name},${16 + place};"
        text += "".join(f"selp.b32 {name},${16 + 4 * n + place},{name},d{n};" for n in (1, 2, 3))
    return text


def _doubled(mask: str) -> str:
    """Return PTX that doubles the inverted blocks in both blocks of 8: x + (x a, masked to joining entries) x."""
    return (
        f"{MMA_F16} {{y0,y1,y2,y3}},{{x0,z,z,x3}},{{at0,at3}},{{n,n,n,n}};"
        f"{TRANSPOSE} xt0,x0; {TRANSPOSE} xt3,x3; cvt.rn.f16x2.f32 y,y1,y0; selp.b32 s0,y,0,{mask};"
        f"cvt.rn.f16x2.f32 y,y3,y2; selp.b32 s3,y,0,{mask};"
        f"{MMA_F16} {{f0,f1,f6,f7}},{{s0,z,z,s3}},{{xt0,xt3}},{{f0,f1,f6,f7}};"
        "cvt.rn.f16x2.f32 x0,f1,f0; cvt.rn.f16x2.f32 x3,f7,f6;"
    )


def _diagonal() -> str:
    """Return PTX for (I - a)⁻¹ of the diagonal 16-blocks of a strictly lower triangular a in float16 pairs; zero elsewhere."""
    start = "".join(
        f"and.b32 x{k},a{k},0xffff; or.b32 x{k},x{k},0x3c000000; selp.b32 x{k},x{k},0x3c00,odd; selp.b32 x{k},x{k},0,same;"
        f"mov.b32 {{lo,hi}},x{k}; cvt.f32.f16 f{2 * k},lo; cvt.f32.f16 f{2 * k + 1},hi;"
        for k in (0, 3)
    )
    # lower left block: inverse of its lower right neighbour, times it, times the inverse of its upper left neighbour
    join = (
        f"{MMA_F16_K8} {{y0,y1,y2,y3}},{{z,x3}},{{at1}},{{n,n,n,n}}; {TRANSPOSE} xt0,x0; cvt.rn.f16x2.f32 y,y3,y2;"
        f"{MMA_F16_K8} {{y0,y1,y2,y3}},{{z,y}},{{xt0}},{{n,n,n,n}}; cvt.rn.f16x2.f32 x1,y3,y2;"
    )
    spread = "".join(
        f"selp.b32 ${4 * n},x0,0,d{n}; selp.b32 ${4 * n + 1},x1,0,d{n}; mov.b32 ${4 * n + 2},0;selp.b32 ${4 * n + 3},x3,0,d{n};"
        for n in range(4)
    )
    return (
        "{.reg .b32 w,v,m,z,y,a0,a1,a3,at0,at1,at3,x0,x1,x3,xt0,xt3,s0,s3; .reg .b16 lo,hi;"
        ".reg .f32 n,f0,f1,f6,f7,y0,y1,y2,y3; .reg .pred odd,same,next,far,d0,d1,d2,d3; mov.b32 z,0; mov.f32 n,0f00000000;"
        # distance of a lane's pair from the diagonal, in pairs of rows
        "mov.u32 w,%tid.x; shr.u32 v,w,3; xor.b32 m,w,v; and.b32 m,m,3; shr.u32 v,w,2; and.b32 v,v,1; setp.eq.u32 odd,v,1;"
        f"setp.eq.u32 same,m,0; setp.eq.u32 next,m,1; setp.ge.u32 far,m,2; {WARP} {_block(('a0', 'a1', 'a3'), (0, 1, 3))}"
        f"{TRANSPOSE} at0,a0; {TRANSPOSE} at1,a1; {TRANSPOSE} at3,a3;"
        f"{start} {_doubled('next')} {_doubled('far')} {join} {spread}}}"
    )


def _joining(level: int) -> str:
    """Return PTX that masks to the entries joining two blocks of 1 << level rows, in float16 pairs."""
    text = f"{{.reg .b32 w,v,h; .reg .pred p; {WARP}"
    for block in range(4):
        text += f"xor.b32 v,w,{block}; shr.u32 v,v,{level - 4}; setp.eq.u32 p,v,1;"
        for n in range(4 * block, 4 * block + 4):
            text += f"cvt.rn.f16x2.f32 h,${17 + 2 * n},${16 + 2 * n}; selp.b32 ${n},h,0,p;"
    return text + "}"


def _sums() -> str:
    """Return PTX for running sums of 64 numbers, two a lane, and their total."""
    up = "".join(f"shfl.sync.up.b32 t|p,s,{d},0,-1; @p add.f32 s,s,t;" for d in (1, 2, 4, 8, 16))
    return (
        f"{{.reg .f32 a,b,s,t; .reg .pred p; mov.f32 a,$4; mov.f32 b,$5; add.f32 s,a,b; {up} shfl.sync.up.b32 t|p,s,1,0,-1;"
        "selp.f32 t,t,0f00000000,p; add.f32 a,a,t; add.f32 b,a,b; shfl.sync.idx.b32 t,b,31,31,-1;"
        "mov.f32 $0,a; mov.f32 $1,b; mov.f32 $2,t; mov.f32 $3,t;}"
    )


DIAGONAL, SUMS = gl.constexpr(_diagonal()), gl.constexpr(_sums())
JOIN16, JOIN32 = gl.constexpr(_joining(4)), gl.constexpr(_joining(5))
PAIRS = gl.constexpr(",".join(["=r"] * 16 + ["r"] * 16))
ROUNDED = gl.constexpr(",".join(["=&r"] * 16 + ["f"] * 32))
LINE = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))  # argument layout of `running_sums`: each warp holds all of it


@gluon.jit
def exp2(x):
    """Return 2**x, zero where it is subnormal."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0,$1;", "=f,f", [x], F32, is_pure=True, pack=1)


@gluon.jit
def log2(x):
    return gl.inline_asm_elementwise("lg2.approx.f32 $0,$1;", "=f,f", [x], F32, is_pure=True, pack=1)


@gluon.jit
def running_sums(x):
    """Return the inclusive prefix sums of 64 elements, and their total."""
    return gl.inline_asm_elementwise(SUMS, "=&f,=&f,=&f,=&f,f,f", [x], (F32, F32), is_pure=True, pack=2)


@gluon.jit
def inverse(a, As, Xs, Ys):
    """Return (I - a)⁻¹ of a strictly lower triangular a; entries above its blocks' diagonals are ignored.

    With x inverting the diagonal blocks of some size, x + x L x inverts those twice as large, L being the blocks of a that join
    pairs of them; x L is x a in those places.
    """
    zero = gl.full([64, 64], 0.0, F32, M64)
    x = gl.inline_asm_elementwise(DIAGONAL, PAIRS, [a], HF, is_pure=True, pack=32)
    gl.thread_barrier()
    As.store(a)
    Xs.store(x)
    publish()
    y = warpgroup_mma(gl.convert_layout(x, A64), As, zero, use_acc=False)
    y = gl.inline_asm_elementwise(JOIN16, ROUNDED, [y], HF, is_pure=True, pack=32)
    joined = warpgroup_mma(gl.convert_layout(y, A64), Xs, x.to(F32))
    half = joined.to(HF)
    y = warpgroup_mma(gl.convert_layout(half, A64), As, zero, use_acc=False, is_async=True)
    Ys.store(half)
    publish()
    y = warpgroup_mma_wait(0, deps=[y])
    y = gl.inline_asm_elementwise(JOIN32, ROUNDED, [y], HF, is_pure=True, pack=32)
    return warpgroup_mma(gl.convert_layout(y, A64), Ys, joined)
