"""What a warp does with a quad of codes, four groups of 64 inputs, of an expert's 16 rows, and what becomes of its sums.

PTX for what a thread does, for `_cuda_slots`; more of it, and how codes become numbers, is in `linear._nibbles`. Every tensor
has one element per thread.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.linear._nibbles import MMA, bf16_at, codes_at, codes_ptx, word_at
from auraflux.ops.moe._cuda_choose import from_lane

ADD_FOUR = gl.constexpr(
    "{.reg .f32 t; mov.f32 $0,$1;"
    + "".join(f"shfl.sync.bfly.b32 t,$0,{n},31,0xffffffff; add.f32 $0,$0,t;" for n in (1, 2))
    + "}"
)


def _quad_ptx() -> str:
    """16 rows x 4 groups of 64 codes. Out: 4 sums a group. In: codes of rows g and g + 8 of each group, 8 pairs of x."""
    names = [[f"{n}{j}" for n in "uvwz"] for j in range(4)]
    text = (
        "{.reg .b32 a0,a1,a2,a3; .reg .f32 o; mov.f32 o,0f00000000; .reg .b32 "
        + ",".join(name for group in names for name in group)
        + ";"
    )
    for j, (u, v, w, z) in enumerate(names):
        text += f"mov.b64 {{{u},{w}}},${16 + 2 * j}; mov.b64 {{{v},{z}}},${17 + 2 * j};"
    for step in range(4):
        for j, regs in enumerate(names):
            for a, r in zip(("a0", "a1", "a2", "a3"), regs, strict=True):
                text += (f"shr.u32 {r},{r},4;" if step else "") + f"lop3.b32 {a},{r},0x000F000F,0x43004300,0xEA;"
            c = ",".join(f"${4 * j + i}" for i in range(4))
            text += f"{MMA} {{{c}}},{{a0,a1,a2,a3}},{{${24 + step},${28 + step}}},{{{c if step else 'o,o,o,o'}}};"
    return text + "}"


QUAD = gl.constexpr(_quad_ptx())
QUAD_REGISTERS = gl.constexpr("=&f," * 16 + "l," * 8 + "r," * 7 + "r")


@gluon.jit
def code_bytes(pointer):
    return pointer.to(gl.pointer_type(gl.int8), bitcast=True)


@gluon.jit
def made(value):
    """A number that is computed here and not later, where it is used."""
    return gl.inline_asm_elementwise("mov.b64 $0,$1;", "=l,l", [value], gl.int64, is_pure=False, pack=1)


@gluon.jit
def copy_quad(slot, lane, source, there, K: gl.constexpr):
    """As `copy_codes`, from where a lane's own part begins."""
    r, chunk = lane // 8, lane % 8
    even, odd = slot + r * 128 + (chunk ^ r) * 16, slot + r * 128 + (chunk ^ (r + 4)) * 16
    args = [even, odd, source, there.to(gl.int32)]
    gl.inline_asm_elementwise(codes_ptx(K // 2, 16), "=r,r,r,l,r,~{memory}", args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def sum_quad(slot, x, t, mine, h: gl.constexpr, r):
    """Σ (128 + code) x of a quad's four groups, kept by the lanes whose columns are theirs."""
    args = []
    for j in gl.static_range(4):
        w = codes_at(slot + (mine ^ (32 * j)))
        args += [w[0], w[1]]
    for j in gl.static_range(8):
        args += [x[j]]
    c = gl.inline_asm_elementwise(QUAD, QUAD_REGISTERS, args, (gl.float32,) * 16, is_pure=True, pack=1)
    r0, r1, r2, r3 = r
    for j in gl.static_range(4):
        keep = t == 2 * h + j // 2
        if j % 2 == 0:
            r0, r2 = gl.where(keep, c[4 * j], r0), gl.where(keep, c[4 * j + 2], r2)
        else:
            r1, r3 = gl.where(keep, c[4 * j + 1], r1), gl.where(keep, c[4 * j + 3], r3)
    return r0, r1, r2, r3


@gluon.jit
def scaled(at, PITCH: gl.constexpr, r, X):
    """Rows g and g + 8 of two groups, from their sums of 128 + codes and of x."""
    s0, s1, b0, b1 = word_at(at), word_at(at + 8 * PITCH), word_at(at + 16 * PITCH), word_at(at + 24 * PITCH)
    X0, X1 = X[0] * 128.0, X[1] * 128.0
    sum0 = bf16_at(s0, 0) * (r[0] - X0) + bf16_at(s0, 1) * (r[1] - X1) + bf16_at(b0, 0) * X[0] + bf16_at(b0, 1) * X[1]
    sum1 = bf16_at(s1, 0) * (r[2] - X0) + bf16_at(s1, 1) * (r[3] - X1) + bf16_at(b1, 0) * X[0] + bf16_at(b1, 1) * X[1]
    return sum0, sum1


@gluon.jit
def _add_four(value):
    """The sum over four neighbouring lanes."""
    return gl.inline_asm_elementwise(ADD_FOUR, "=&f,f", [value], gl.float32, is_pure=False, pack=1)


@gluon.jit
def put_rows(at, lane, first, second):
    """A warp's 16 sums: lane 4 g has rows g and g + 8."""
    text: gl.constexpr = (
        "{.reg .pred p; setp.eq.b32 p,$4,0; @p st.shared.f32 [$1],$2; @p st.shared.f32 [$1+32],$3; mov.b32 $0,0;}"
    )
    args = [at + lane // 4 * 4, _add_four(first), _add_four(second), lane % 4]
    gl.inline_asm_elementwise(text, "=r,r,f,f,r,~{memory}", args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def float_at(at, there):
    text: gl.constexpr = "{.reg .pred p; setp.ne.b32 p,$2,0; mov.b32 $0,0; @p ld.shared.f32 $0,[$1];}"
    return gl.inline_asm_elementwise(text, "=f,r,r,~{memory}", [at, there.to(gl.int32)], gl.float32, is_pure=False, pack=1)


@gluon.jit
def sum_runs(at, there, RUNS: gl.constexpr):
    total = float_at(at, there)
    for n in gl.static_range(1, RUNS):
        total += float_at(at + 64 * n, there)
    return total


@gluon.jit
def expert_of(chosen, slot, experts, K: gl.constexpr):
    """Whether a slot has an expert that is there, and which; lane n knows that of slot n."""
    expert = from_lane(chosen, gl.minimum(slot, K - 1))
    return (slot < K) & (expert >= 0) & (expert < experts), gl.minimum(gl.maximum(expert, 0), experts - 1).to(gl.int64)


@gluon.jit
def down_of(
    slot, chosen, down, scales, biases, step, scale_step, own, own_scales, own_biases, experts, K: gl.constexpr
):  # fmt: skip
    """Whether a slot has weights, and where its codes, scales and biases begin."""
    there, expert = expert_of(chosen, slot, experts, K)
    codes = code_bytes(down) + expert * step * 4
    slopes, intercepts = scales + expert * scale_step, biases + expert * scale_step
    if own is not None:
        last = slot == K
        there = there | last
        codes = gl.where(last, code_bytes(own), codes)
        slopes, intercepts = gl.where(last, own_scales, slopes), gl.where(last, own_biases, intercepts)
    return there, codes, slopes, intercepts
