"""Products of four groups of 64 four-bit codes of 16 rows with one token, one group per lane of four, and their sums.

PTX of one thread, for Gluon kernels; every tensor has one element per thread. `mma_int4.py` has one group for several tokens.

- Four `mma.m16n8k16` multiply a group: step j takes nibbles j and j + 4 of each word, and x is paired (j, j + 4) to match.
  Columns 2n and 2n + 1 have the x of group n, so lane t of four has the sums of group t.
- Integers below 256, reinterpreted as bf16 bits, are themselves times 2**-133. So a mask makes a pair of codes, those of odd
  steps 16 times as large, and x is scaled by 2**60 to match, or by 2**56.
- Rows lie in shared memory as in the weight, at a stride of 128 bytes or more. Row g reads group j ^ g % 4 as its j-th, so that
  four rows do not conflict.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.hopper.mma import MMA
from auraflux.ops.hopper.reduce import sum_four
from auraflux.ops.hopper.shared_memory import float_at, half_at

OF_CODES, OF_X = gl.constexpr(2.0**73), gl.constexpr(2.0**-60)  # factors that undo the scales of codes and of x


def _pair_ptx() -> str:
    """Return PTX for 16 inputs as pairs (j, j + 4) of each eight, even j times 2**60, odd j times 2**56."""
    text = "{.reg .b32 even,odd,zero; mov.b32 even,0x5D805D80; mov.b32 odd,0x5B805B80; mov.b32 zero,0x80008000;"
    for i, a in enumerate((8, 9, 12, 13)):
        text += f"prmt.b32 ${2 * i},${a},${a + 2},0x5410; prmt.b32 ${2 * i + 1},${a},${a + 2},0x7632;"
    return text + "".join(f"fma.rn.bf16x2 ${i},${i},{'odd' if i % 2 else 'even'},zero;" for i in range(8)) + "}"


def _sum_ptx() -> str:
    """Return PTX for Σ x of columns 2t and 2t + 1."""
    text = "{.reg .b32 one,more; .reg .f32 z,d0,d1; mov.b32 one,0x3F803F80; mov.b32 more,0x41804180; mov.f32 z,0f00000000;"
    for j in range(4):
        a, c = ("more" if j % 2 else "one"), ("$0,$1,d0,d1" if j else "z,z,z,z")
        text += f"{MMA} {{$0,$1,d0,d1}},{{{a},{a},{a},{a}}},{{${2 + j},${6 + j}}},{{{c}}};"
    return text + "}"


def _groups_ptx() -> str:
    """Return PTX for four groups. Out: 4 sums per group. In: codes of rows g and g + 8 of each group, 8 pairs of x."""
    names = [[f"{n}{j}" for n in "uvwz"] for j in range(4)]
    text = "{.reg .b32 a0,a1,a2,a3; .reg .f32 o; mov.f32 o,0f00000000; .reg .b32 "
    text += ",".join(name for group in names for name in group) + ";"
    for j, (u, v, w, z) in enumerate(names):
        text += f"mov.b64 {{{u},{w}}},${16 + 2 * j}; mov.b64 {{{v},{z}}},${17 + 2 * j};"
    for step in range(4):
        for j, words in enumerate(names):
            for i, word in enumerate(words):
                text += (
                    f"shr.u32 {word},{word},8;" if step == 2 else ""
                ) + f"and.b32 a{i},{word},{hex(0xF000F << step % 2 * 4)};"
            c = ",".join(f"${4 * j + i}" for i in range(4))
            text += f"{MMA} {{{c}}},{{a0,a1,a2,a3}},{{${24 + step},${28 + step}}},{{{c if step else 'o,o,o,o'}}};"
    return text + "}"


LOAD = gl.constexpr("ld.global.v4.b32 {$0,$1,$2,$3},[$8]; ld.global.v4.b32 {$4,$5,$6,$7},[$8+16];")
PAIR, SUM, GROUPS = gl.constexpr(_pair_ptx()), gl.constexpr(_sum_ptx()), gl.constexpr(_groups_ptx())
LOAD_REGISTERS, PAIR_REGISTERS = gl.constexpr("=&r," * 8 + "l,~{memory}"), gl.constexpr("=&r," * 8 + "r," * 7 + "r")
GROUPS_REGISTERS = gl.constexpr("=&f," * 16 + "l," * 8 + "r," * 7 + "r")


@gluon.jit
def load_16(at):
    """Load 16 inputs of a lane's column from global memory: already its x if `paired` stored them."""
    return gl.inline_asm_elementwise(LOAD, LOAD_REGISTERS, [at.to(gl.int64)], (gl.int32,) * 8, is_pure=False, pack=1)


@gluon.jit
def pair_16(x):
    """Return a lane's x from 16 inputs in natural order."""
    args = [x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]]
    return gl.inline_asm_elementwise(PAIR, PAIR_REGISTERS, args, (gl.int32,) * 8, is_pure=True, pack=1)


@gluon.jit
def paired(value, row):
    """Return the number that `pair_16` makes of one row's input, and its place among 16."""
    j = row % 4
    return gl.where(j % 2 == 0, value * 2.0**60, value * 2.0**56), row // 8 * 8 + j * 2 + row // 4 % 2


@gluon.jit
def sums_16(x):
    """Sum x of columns 2t and 2t + 1."""
    args = [x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]]
    a, b = gl.inline_asm_elementwise(SUM, "=&f,=&f" + ",r" * 8, args, (gl.float32,) * 2, is_pure=True, pack=1)
    return a * OF_X, b * OF_X


@gluon.constexpr_function
def _two_ptx(offset):
    return f"ld.shared.b64 $0,[$2]; ld.shared.b64 $1,[$2+{offset}];"


@gluon.jit
def codes_two(base, lane, ROW: gl.constexpr, OFFSET: gl.constexpr):
    """Load a lane's codes of four groups of row g, here and OFFSET bytes on, in the group order of row g."""
    g, t = lane // 4, lane % 4
    text: gl.constexpr = _two_ptx(OFFSET)
    words = ()
    for j in gl.static_range(4):
        at = base + g * ROW + (g % 4 ^ j) * 32 + t * 8
        words += gl.inline_asm_elementwise(text, "=l,=l,r,~{memory}", [at], (gl.int64,) * 2, is_pure=False, pack=1)
    return words


@gluon.jit
def scales_two(base, lane, LINE: gl.constexpr, OFFSET: gl.constexpr, ROWS: gl.constexpr):
    """Load the scale of row g and group t, the one OFFSET bytes on, and the biases of both.

    Rows are LINE bytes long; biases follow ROWS rows of scales.
    """
    at = base + lane // 4 * LINE + lane % 4 * 2
    return half_at(at), half_at(at + OFFSET), half_at(at + ROWS * LINE), half_at(at + (ROWS * LINE + OFFSET))


@gluon.jit
def scaled_sum(scale, bias, codes, inputs):
    """Return scale * codes + bias * inputs for a group's sums of codes, over 2**73, and of inputs."""
    return gl.fma(bias, inputs, scale * (codes * OF_CODES))


@gluon.jit
def row_products(words, lines, x, sums, lane, SECOND: gl.constexpr):
    """Multiply a lane's two rows by group t, whose x is in column 2t and, for the second row, in 2t + SECOND.

    words, lines  of `codes_two` and `scales_two`
    sums          of `sums_16`, or None to compute them here, which leaves registers to the products
    """
    args = []
    for j in gl.static_range(8):
        args += [words[j]]
    for j in gl.static_range(8):
        args += [x[j]]
    c = gl.inline_asm_elementwise(GROUPS, GROUPS_REGISTERS, args, (gl.float32,) * 16, is_pure=True, pack=1)
    mine, r0, r1 = lane % 4 ^ lane // 4 % 4, c[0], c[2 + SECOND]
    for j in gl.static_range(1, 4):
        r0, r1 = gl.where(mine == j, c[4 * j], r0), gl.where(mine == j, c[4 * j + 2 + SECOND], r1)
    if sums is None:
        sums = sums_16(x)
    return scaled_sum(lines[0], lines[2], r0, sums[0]), scaled_sum(lines[1], lines[3], r1, sums[SECOND])


@gluon.jit
def put_rows(at, lane, first, second):
    """Sum two numbers over each four lanes, and store them as rows g and g + 8 of 16."""
    text: gl.constexpr = (
        "{.reg .pred p; setp.eq.b32 p,$4,0; @p st.shared.f32 [$1],$2; @p st.shared.f32 [$1+32],$3; mov.b32 $0,0;}"
    )
    args = [at + lane // 4 * 4, sum_four(first), sum_four(second), lane % 4]
    gl.inline_asm_elementwise(text, "=r,r,f,f,r,~{memory}", args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def sum_at(at, there, COUNT: gl.constexpr):
    """Sum COUNT numbers at a stride of 64 bytes, where `there`."""
    total = float_at(at, there)
    for n in gl.static_range(1, COUNT):
        total += float_at(at + 64 * n, there)
    return total
