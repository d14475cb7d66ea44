"""Products of groups of four-bit codes with tokens in bf16: PTX of one thread, for Gluon kernels.

Every tensor has one element per thread.

- A warp multiplies 16 rows by 64 codes, one group, with four `mma.m16n8k16`. Step j takes nibbles j and j + 4 of each word:
  `(word >> 4j) & 0x000F000F | 0x43004300` is a bf16 pair 128 + code, and x is paired (j, j + 4) to match.
- The accumulator starts at -128 Σ x (an mma with ones puts Σ x in the right lanes), so it ends at Σ code x.
- Codes go to a ring in shared memory by `cp.async`, 16-byte chunks xor-swizzled by row against shared-memory conflicts.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.hopper.mma import MMA


def _group_ptx(tiles: int) -> Any:
    """Return PTX for 16 rows x 64 codes.

    Out: 4 sums per tile of 8 tokens. In: codes of rows g and g + 8, 8 pairs of x and 2 starts per tile.
    """
    w = 4 * tiles
    text = f"{{.reg .b32 u0,u1,v0,v1,a0,a1,a2,a3; mov.b64 {{u0,u1}},${w}; mov.b64 {{v0,v1}},${w + 1};"
    for j in range(4):
        for a, r in (("a0", "u0"), ("a1", "v0"), ("a2", "u1"), ("a3", "v1")):
            text += (f"shr.u32 {r},{r},4;" if j else "") + f"lop3.b32 {a},{r},0x000F000F,0x43004300,0xEA;"
        for m in range(tiles):
            c, x, n = ",".join(f"${4 * m + i}" for i in range(4)), w + 2 + 8 * m + j, w + 2 + 8 * tiles + 2 * m
            start = c if j else f"${n},${n + 1},${n},${n + 1}"
            text += f"{MMA} {{{c}}},{{a0,a1,a2,a3}},{{${x},${x + 4}}},{{{start}}};"
    return gl.constexpr(text + "}")


def _x_ptx(load: str) -> Any:
    """Return PTX for two 16-byte loads of x, as pairs (j, j + 4) of each eight."""
    text = f"{{.reg .b32 r<8>; {load}.v4.b32 {{r0,r1,r2,r3}},[$8]; {load}.v4.b32 {{r4,r5,r6,r7}},[$9];"
    for i, a in enumerate((0, 1, 4, 5)):
        text += f"prmt.b32 ${2 * i},r{a},r{a + 2},0x5410; prmt.b32 ${2 * i + 1},r{a},r{a + 2},0x7632;"
    return gl.constexpr(text + "}")


def _normed_x_ptx(added: bool) -> Any:
    """Return PTX for 16 values of x + delta times a norm's weights, as pairs (j, j + 4) of each eight.

    Out: 8 pairs, the sum of the squares. In: addresses of values, weights, addends and sums; whether to store the sums.
    """
    text = "{.reg .pred p; .reg .b32 r<8>,d<8>; .reg .f32 n<16>,f<16>,a,b; setp.ne.b32 p,$13,0; mov.f32 $8,0f00000000;"
    text += "ld.global.v4.b32 {r0,r1,r2,r3},[$9]; ld.global.v4.b32 {r4,r5,r6,r7},[$9+16];"
    if added:
        text += "ld.global.v4.b32 {d0,d1,d2,d3},[$11]; ld.global.v4.b32 {d4,d5,d6,d7},[$11+16];"
    for i in range(4):
        text += f"ld.global.nc.v4.f32 {{n{4 * i},n{4 * i + 1},n{4 * i + 2},n{4 * i + 3}}},[$10+{16 * i}];"

    def split(word: str, low: str, high: str) -> str:
        return f"shl.b32 {low},{word},16; and.b32 {high},{word},0xffff0000;"

    for i in range(8):
        low, high = f"f{2 * i}", f"f{2 * i + 1}"
        text += split(f"r{i}", low, high)
        if added:
            text += split(f"d{i}", "a", "b") + f"add.f32 {low},{low},a; add.f32 {high},{high},b;"
            text += f"cvt.rn.bf16x2.f32 r{i},{high},{low};" + split(f"r{i}", low, high)
        text += f"fma.rn.f32 $8,{low},{low},$8; fma.rn.f32 $8,{high},{high},$8;"
        text += f"mul.f32 {low},{low},n{2 * i}; mul.f32 {high},{high},n{2 * i + 1};"
    if added:
        text += "@p st.global.v4.b32 [$12],{r0,r1,r2,r3}; @p st.global.v4.b32 [$12+16],{r4,r5,r6,r7};"
    for i, a in enumerate((0, 1, 4, 5)):
        text += f"cvt.rn.bf16x2.f32 ${2 * i},f{2 * a + 4},f{2 * a}; cvt.rn.bf16x2.f32 ${2 * i + 1},f{2 * a + 5},f{2 * a + 1};"
    return gl.constexpr(text + "}")


def _sum_ptx() -> Any:
    """Return PTX for the sums of x over 64 inputs, by a product with ones. Out: columns 2t and 2t + 1. In: 8 pairs of x."""
    step = f"{MMA} {{$0,$1,d0,d1}},{{one,one,one,one}},"
    text = "{.reg .b32 one; .reg .f32 z,d0,d1; mov.b32 one,0x3F803F80; mov.f32 z,0f00000000;" + step + "{$2,$6},{z,z,z,z};"
    return gl.constexpr(text + "".join(f"{step}{{${2 + j},${6 + j}}},{{$0,$1,d0,d1}};" for j in (1, 2, 3)) + "}")


def _registers(tiles: int) -> Any:
    """Return the register constraints of `_group_ptx`."""
    return gl.constexpr("=&f," * 4 * tiles + "l,l," + "r," * 8 * tiles + "f," * (2 * tiles - 1) + "f")


def _weights_ptx() -> Any:
    """Return PTX for the weights of rows g and g + 8 as operands of four steps, in bf16 times 2**-33.

    Out: 16 pairs. In: codes of both rows; their factors of even and of odd steps and their biases, see `scaled_line`. Integers
    below 256, reinterpreted as bf16 bits, are themselves times 2**-133.
    """
    text = "{.reg .b32 u0,u1,v0,v1; mov.b64 {u0,u1},$16; mov.b64 {v0,v1},$17;"
    for j in range(4):
        for i, r in enumerate(("u0", "v0", "u1", "v1")):
            text += (f"shr.u32 {r},{r},8;" if j == 2 else "") + f"and.b32 ${4 * j + i},{r},{hex(0xF000F << j % 2 * 4)};"
            text += f"fma.rn.bf16x2 ${4 * j + i},${4 * j + i},${18 + 3 * (i % 2) + j % 2},${20 + 3 * (i % 2)};"
    return gl.constexpr(text + "}")


def _half_weights_ptx() -> Any:
    """Return PTX like `_weights_ptx` for half a group: eight codes of each row, two steps; words of x as `_half_x_ptx` has."""
    text = "{.reg .b32 u,v; mov.b32 u,$8; mov.b32 v,$9;"
    for i in range(4):
        text += "shr.u32 u,u,8; shr.u32 v,v,8;" if i == 2 else ""
        for j, r in enumerate("uv"):
            n = i // 2 * 4 + i % 2 * 2 + j
            text += (
                f"and.b32 ${n},{r},{hex(0xF000F << i % 2 * 4)}; fma.rn.bf16x2 ${n},${n},${10 + 3 * j + i % 2},${12 + 3 * j};"
            )
    return gl.constexpr(text + "}")


@gluon.constexpr_function
def _line_ptx(offset):
    """Return PTX for a scale at $3 times 2**100 and 2**96, and the bias `offset` bytes on times 2**-33, each twice."""
    text = "{.reg .b16 h; .reg .b32 w,c,z; mov.b32 z,0x80008000; "
    for out, at, factor in ((0, "$3", 0x7180), (1, "", 0x6F80), (2, f"$3+{offset}", 0x2F00)):
        text += f"ld.shared.b16 h,[{at}]; cvt.u32.u16 w,h; prmt.b32 w,w,w,0x1010;" if at else ""
        text += f"mov.b32 c,{hex(factor * 0x10001)}; fma.rn.bf16x2 ${out},w,c,z;"
    return text + "}"


WEIGHTS_SCALE = gl.constexpr(2.0**33)  # undoes that of `weight_pairs`
WEIGHTS, WEIGHTS_REGS = _weights_ptx(), gl.constexpr("=&r," * 16 + "l,l,r,r,r,r,r,r")
GROUP8, GROUP16, REGS8, REGS16 = _group_ptx(1), _group_ptx(2), _registers(1), _registers(2)
X_GLOBAL, X_SHARED, SUM_X = _x_ptx("ld.global"), _x_ptx("ld.shared"), _sum_ptx()
HALF_WEIGHTS, HALF_WEIGHTS_REGS = _half_weights_ptx(), gl.constexpr("=&r," * 8 + "r,r,r,r,r,r,r,r")
HALF_X = gl.constexpr(
    "{.reg .b32 r<4>; ld.shared.v4.b32 {r0,r1,r2,r3},[$4]; prmt.b32 $0,r0,r2,0x5410; prmt.b32 $1,r0,r2,0x7632;"
    "prmt.b32 $2,r1,r3,0x5410; prmt.b32 $3,r1,r3,0x7632;}"
)
NORMED_X, ADDED_X = _normed_x_ptx(False), _normed_x_ptx(True)


@gluon.constexpr_function
def _halves_ptx(row_nbytes, rows):
    """Return PTX that copies 128 bytes of each row: a lane copies 16 bytes of rows r, r + 4, r + 8 ...

    $1 is the destination of even fours, $2 of odd fours; the first half of the rows begins at $3, the second at $4.
    """
    text = "{.reg .pred p; setp.ne.b32 p,$5,0; mov.b32 $0,0;"
    for i in range(rows // 4):
        half, at = divmod(4 * i, rows // 2)
        text += f"@p cp.async.cg.shared.global.L2::256B [${1 + i % 2}+{512 * i}],[${3 + half}+{at * row_nbytes}],16;"
    return text + "}"


@gluon.jit
def copy_halves(slot, lane, first, second, there, K: gl.constexpr, ROWS: gl.constexpr):
    """Copy 128 bytes of each of ROWS rows to a slot, chunks swizzled by row; half begin at `first`, half at `second`."""
    r, chunk = lane // 8, lane % 8
    even, odd = slot + r * 128 + (chunk ^ r) * 16, slot + r * 128 + (chunk ^ (r + 4)) * 16
    mine = r * (K // 2) + chunk * 16
    args = [even, odd, (first + mine).to(gl.int64), (second + mine).to(gl.int64), there.to(gl.int32)]
    gl.inline_asm_elementwise(_halves_ptx(K // 2, ROWS), "=r,r,r,l,l,r,~{memory}", args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def codes_at(at):
    """Load 16 codes of row g and of row g + 8 of one group."""
    text: gl.constexpr = "ld.shared.b64 $0,[$2]; ld.shared.b64 $1,[$2+1024];"
    return gl.inline_asm_elementwise(text, "=l,=l,r,~{memory}", [at], (gl.int64,) * 2, is_pure=False, pack=1)


@gluon.constexpr_function
def _codes_ptx(offset):
    return f"ld.shared.b64 $0,[$2]; ld.shared.b64 $1,[$2+{offset}];"


@gluon.jit
def scaled_line(at, OFFSET: gl.constexpr):
    """Load a row's scale of a group, and the bias OFFSET bytes on, as factors and addend of `weight_pairs`."""
    text: gl.constexpr = _line_ptx(OFFSET)
    return gl.inline_asm_elementwise(text, "=&r,=&r,=&r,r,~{memory}", [at], (gl.int32,) * 3, is_pure=False, pack=1)


@gluon.jit
def weight_pairs(at, OFFSET: gl.constexpr, first, second):
    """Load 16 codes of a row of one group, and of the row OFFSET bytes on, as weights times 2**-33: `a` of four steps."""
    text: gl.constexpr = _codes_ptx(OFFSET)
    codes = gl.inline_asm_elementwise(text, "=l,=l,r,~{memory}", [at], (gl.int64,) * 2, is_pure=False, pack=1)
    args = [codes[0], codes[1], first[0], first[1], first[2], second[0], second[1], second[2]]
    return gl.inline_asm_elementwise(WEIGHTS, WEIGHTS_REGS, args, (gl.int32,) * 16, is_pure=True, pack=1)


@gluon.jit
def half_weight_pairs(u, v, first, second):
    """Return eight codes of each of two rows as weights times 2**-33: `a` of two steps of inputs (0, 4, 1, 5), (2, 6, 3, 7)."""
    args = [u, v, first[0], first[1], first[2], second[0], second[1], second[2]]
    return gl.inline_asm_elementwise(HALF_WEIGHTS, HALF_WEIGHTS_REGS, args, (gl.int32,) * 8, is_pure=True, pack=1)


@gluon.jit
def load_half_x(at):
    """Load eight values of x from shared memory as four pairs, `b` of the steps of `half_weight_pairs`."""
    return gl.inline_asm_elementwise(HALF_X, "=r,=r,=r,=r,r,~{memory}", [at], (gl.int32,) * 4, is_pure=False, pack=1)


@gluon.jit
def load_x(PTX: gl.constexpr, REGS: gl.constexpr, first, second):
    """Load 16 values of x as 8 pairs (j, j + 4), from global (X_GLOBAL) or shared memory (X_SHARED)."""
    return gl.inline_asm_elementwise(PTX, REGS, [first, second], (gl.int32,) * 8, is_pure=False, pack=1)


@gluon.jit
def load_normed_x(PTX: gl.constexpr, x, norm, delta, total, stores):
    """Load 16 values of x + delta times a norm's weights, and the sum of squares of x + delta, which is stored if `stores`."""
    args = [x, norm, delta, total, stores.to(gl.int32)]
    REGS: gl.constexpr = "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&f,l,l,l,l,r,~{memory}"
    return gl.inline_asm_elementwise(PTX, REGS, args, (gl.int32,) * 8 + (gl.float32,), is_pure=False, pack=1)


@gluon.jit
def sum_x(x):
    """Sum x over a group: columns 2t and 2t + 1."""
    args = [x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]]
    return gl.inline_asm_elementwise(SUM_X, "=&f,=&f,r,r,r,r,r,r,r,r", args, (gl.float32,) * 2, is_pure=True, pack=1)


@gluon.jit
def group_sums(w, x, X, TILES: gl.constexpr):
    """Sum code * x over one group: rows g and g + 8, tokens 2t and 2t + 1 (and those plus 8 when TILES is 2)."""
    if TILES == 1:
        args = [w[0], w[1], x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], X[0] * -128.0, X[1] * -128.0]
        sums = gl.inline_asm_elementwise(GROUP8, REGS8, args, (gl.float32,) * 4, is_pure=True, pack=1)
    else:
        args = [
            w[0], w[1], x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8], x[9], x[10], x[11], x[12], x[13], x[14], x[15],
            X[0] * -128.0, X[1] * -128.0, X[2] * -128.0, X[3] * -128.0,
        ]  # fmt: skip
        sums = gl.inline_asm_elementwise(GROUP16, REGS16, args, (gl.float32,) * 8, is_pure=True, pack=1)
    return sums
