"""Device functions of the Hopper kernel that encodes prefill tokens: WHT on tensor cores, code look-up, squared levels.

Tensors have one element per thread of a warp. Lane (g, q), g = lane // 4, has two neighbours of the warp's 16 tokens, 2g and
2g + 1, and 32 neighbouring channels of each, from 32q on.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import inline_asm_elementwise as asm

from auraflux.ops.gpu.blocks.dependent_launch import launches_early
from auraflux.ops.hopper.mma import MMA, MMA_U8_U8
from auraflux.ops.hopper.ptx import from_lane, with_older_instructions
from auraflux.ops.hopper.reduce import sum_four

BOTH_SIGNS = gl.constexpr(0x80008000 - (1 << 32))
ONES = gl.constexpr(0x3F803F80)  # two bfloat16
ROW_PITCH = gl.constexpr(288)  # bytes per token in shared memory, free of bank conflicts for eight lanes
# by number of buckets: the factor from place to bucket index, and the addend that rounds it to an integer. For tables in shared
# memory both are scaled by 2 ** -22, since the bits of 2.0 times 4 overflow to 0
NUMBER = gl.constexpr({32: "0f42000000, 0f4B000000", 512: "0f38FF8000, 0f40000000"})
LIFT = gl.constexpr(64)  # 2 ** lift of `tables.SEARCH`


@gluon.constexpr_function
def operands(results, kind, args):
    """Return the constraints of early-clobber results and of arguments."""
    return ",".join([f"=&{kind}"] * results + [args])


@gluon.constexpr_function
def load_ptx(kind, rows):
    """Return PTX that loads the first 16 of every 64 bytes, four times per row; the address follows the results."""
    text = ""
    for i in range(4 * rows):
        words = ",".join(f"${4 * i + j}" for j in range(4))
        text += f"ld.{kind}.v4.b32 {{{words}}}, [${16 * rows}+{i // 4 * ROW_PITCH.value + i % 4 * 64}];"
    return text


@gluon.constexpr_function
def _transform_ptx():
    """Return PTX that transforms two tokens, $0-$15, from words $16-$19 and $20-$23; $24 on: signs, $28 on: factors."""
    text = "{.reg .b32 a0, a1, a2, a3, b0, b1, b2, b3; .reg .f32 z; mov.f32 z, 0f00000000;"
    for h in range(4):
        text += f"xor.b32 a{h}, ${16 + h}, ${24 + h}; xor.b32 b{h}, ${20 + h}, ${24 + h};"
    for s in range(2):
        for j in range(4):
            sums, f = "{" + ",".join(f"${4 * j + i}" for i in range(4)) + "}", 28 + 4 * j + 2 * s
            text += f"{MMA} "
            text += f"{sums},{{a{2 * s},b{2 * s},a{2 * s + 1},b{2 * s + 1}}},{{${f},${f + 1}}},{sums if s else '{z,z,z,z}'};"
    return text + "}"


@gluon.constexpr_function
def _place_ptx(t, table, buckets, out):
    """Return PTX that writes the code of place t to the upper byte of `out`, above zeros if it is uncertain.

    table  a lane's word where there are as many buckets as lanes, else the table's address
    """
    text = f"fma.rn.f32 u, {t}, {NUMBER.value[buckets]}; mov.b32 a, u;"
    if buckets == 32:
        text += f"mov.b32 n, {t}; shfl.sync.idx.b32 e, {table}, a, 31, -1;"
    else:
        text += f"add.rn.f32 u, {t}, 0f3F800000; mov.b32 n, u; mad.lo.u32 a, a, 4, {table}; ld.shared.b32 e, [a];"
    return text + f"mad.lo.u32 {out}, n, {LIFT.value}, e;"


@gluon.constexpr_function
def _find_ptx(buckets):
    """Return PTX that finds four codes, bytes of $0; $1: zeros in a half if uncertain; $2: nonzero if out of range.

    Arguments: four places, table, uncertainty so far, out of range so far.
    """
    text = "{.reg .f32 u; .reg .b32 n, a, e, s0, s1, s2, s3, p, q;"
    for i in range(4):
        text += _place_ptx(f"${3 + i}", "$7", buckets, f"s{i}")
    text += "prmt.b32 p, s0, s1, 0x6521; min.u16x2 $1, $8, p; prmt.b32 q, s2, s3, 0x6521; min.u16x2 $1, $1, q;"
    text += "prmt.b32 p, s0, s1, 0x0073; prmt.b32 q, s2, s3, 0x0073; prmt.b32 $0, p, q, 0x5410;"
    return text + ("and.b32 p, $0, 0xF0F0F0F0; or.b32 $2, $9, p;}" if buckets == 32 else "mov.b32 $2, $9;}")


@gluon.constexpr_function
def _place_of_ptx(buckets):
    """Return PTX that finds the code of any coordinate $1 as `_place_ptx` does; $2: scale, $3: offset, $4: table."""
    text = "{.reg .f32 t, u; .reg .b32 n, a, e;"
    if buckets == 32:
        text += "fma.rn.f32 t, $1, $2, $3; max.f32 t, t, 0f3F800000; min.f32 t, t, 0f3FFC0000;"
    else:
        text += "fma.rn.sat.f32 t, $1, $2, $3;"
    return text + _place_ptx("t", "$4", buckets, "$0") + "}"


@gluon.constexpr_function
def _join_ptx(saturate):
    """Return PTX that finishes four coordinates $0-$3 from sums $4-$7: times $8 plus $9, clamped to [0, 1] if `saturate`."""
    last = "fma.rn.sat.f32" if saturate else "fma.rn.f32"
    text = (
        "{.reg .f32 a, e, f, g, h, m; neg.f32 m, $8; fma.rn.f32 a, $4, $8, $9; fma.rn.f32 e, $5, $8, a; fma.rn.f32 f, $5, m, a;"
    )
    text += f"add.rn.f32 g, $6, $7; sub.rn.f32 h, $6, $7; {last} $0, g, $8, e; {last} $1, h, $8, f;"
    return text + f"{last} $2, g, m, e; {last} $3, h, m, f;}}"


@gluon.constexpr_function
def _four_squares_ptx():
    """Return PTX that sums the squares, at $2 on, of four codes, bytes of $1."""
    text = "{.reg .f32 t; .reg .b32 a;"
    for i in range(4):
        text += f"prmt.b32 a, $1, 0, 0x444{i}; mad.lo.u32 a, a, 4, $2; ld.shared.b32 {'t' if i else '$0'}, [a];"
        text += "add.rn.f32 $0, $0, t;" if i else ""
    return text + "}"


@gluon.constexpr_function
def _squares_ptx(bits):
    """Return PTX that sums two tokens' integer squared levels, $0, $1; $2-$5, $6-$9: words of eight codes, $10 on: planes.

    `prmt` looks up byte planes, and tensor cores sum the bytes of all lanes of a token.
    """
    text = "{.reg .b32 m, u, w0, w1, w2, w3, one, zero, a0, a1, a2, a3, "
    text += ",".join(f"c{p}{i}" for p in range(3) for i in range(4)) + "; mov.b32 one, 0x01010101; mov.b32 zero, 0;"
    for j in range(4):
        for r in range(2):
            word = f"${2 + 4 * r + j}"
            if bits == 4:
                # magnitude of a level: the lower three bits, inverted for negative levels
                text += f"shr.u32 m, {word}, 3; and.b32 m, m, 0x11111111; mul.lo.u32 m, m, 7; xor.b32 m, m, {word};"
                text += f"not.b32 m, m; and.b32 w{r}, m, 0x77777777; shr.u32 w{r + 2}, w{r}, 16;"
            else:
                text += f"mov.b32 w{r}, {word}; shr.u32 w{r + 2}, w{r}, 16;"
        for p in range(3):
            text += "".join(f"prmt.b32 a{i}, ${10 + 2 * p}, ${11 + 2 * p}, w{i};" for i in range(4))
            sums = "{" + ",".join(f"c{p}{i}" for i in range(4)) + "}"
            text += f"{MMA_U8_U8} "
            text += f"{sums},{{a0,a1,a2,a3}},{{one,one}},{sums if j else '{zero,zero,zero,zero}'};"
    for r in range(2):
        text += f"mad.lo.u32 u, c2{2 * r}, 256, c1{2 * r}; mad.lo.u32 ${r}, u, 256, c0{2 * r};"
    return text + "}"


@gluon.constexpr_function
def _store_ptx(count):
    words = ",".join(f"${3 + i}" for i in range(count))
    return f"{{.reg .pred p; setp.ne.b32 p, $2, 0; @p st.global.v{count}.b32 [$1],{{{words}}}; mov.b32 $0, 0;}}"


@gluon.constexpr_function
def hex_of(number):
    return hex(number)


@gluon.constexpr_function
def swap_ptx(span, combine):
    """Return PTX that combines $1 with t, the value of the lane `span` away."""
    return f"{{.reg .f32 t; shfl.sync.bfly.b32 t, $1, {span}, 31, -1; {combine}}}"


@gluon.jit
def pick(a, b, BYTES: gl.constexpr):
    """Select four of the eight bytes of two words."""
    PTX: gl.constexpr = "prmt.b32 $0, $1, $2, " + hex_of(BYTES) + ";"
    return asm(PTX, "=r,r,r", [a, b], gl.int32, is_pure=True, pack=1)


@gluon.jit
def inverse_root(a):
    r = asm("rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [a], gl.float32, is_pure=True, pack=1)
    return r * (1.5 - 0.5 * ((a * r) * r))


@gluon.jit
def place_of(z, scale, offset, table, BUCKETS: gl.constexpr):
    args = [z, scale, offset, table]
    return asm(_place_of_ptx(BUCKETS), "=&r,f,f,f,r", args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def store4(at, there, a, b, c, d):
    args = [at, there.to(gl.int32), a, b, c, d]
    asm(_store_ptx(4), "=r,l,r,r,r,r,r,~{memory}", args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def store2(at, there, a, b):
    asm(_store_ptx(2), "=r,l,r,r,r,~{memory}", [at, there.to(gl.int32), a, b], gl.int32, is_pure=False, pack=1)


@gluon.jit
def factors(g, q):
    """Return a lane's factors of the transform over channel bits 6, 5, 4, 3 and 0: sixteen words of two factors."""
    last = ONES ^ gl.where(g % 2 == 1, -2147483648, 0)
    bit3, bit4 = gl.where(q % 2 == 1, BOTH_SIGNS, 0), gl.where(q // 2 == 1, BOTH_SIGNS, 0)
    bit5, bit6 = gl.where(g // 2 % 2 == 1, BOTH_SIGNS, 0), gl.where(g // 4 == 1, BOTH_SIGNS, 0)
    found = ()
    for j in gl.static_range(4):
        word = last
        if j % 2 == 1:
            word = word ^ bit3
        if j // 2 == 1:
            word = word ^ bit4
        found += (word, word ^ bit5, word ^ bit6, word ^ bit5 ^ bit6)
    return found


@gluon.jit
def transformed(w, signs, F):
    """Transform the words of two tokens, 16 each: four groups of 16 sums, with channel bits 2 and 1 left to combine.

    A group has, by channel bits 4 and 3, two sums of the first token and two of the second.
    """
    REGS: gl.constexpr = operands(16, "f", ",".join("r" * 28))
    S = ()
    for o in gl.static_range(4):
        args = [
            w[o], w[4 + o], w[8 + o], w[12 + o], w[16 + o], w[20 + o], w[24 + o], w[28 + o],
            signs[o], signs[4 + o], signs[8 + o], signs[12 + o],
            F[0], F[1], F[2], F[3], F[4], F[5], F[6], F[7], F[8], F[9], F[10], F[11], F[12], F[13], F[14], F[15],
        ]  # fmt: skip
        S += (asm(_transform_ptx(), REGS, args, (gl.float32,) * 16, is_pure=True, pack=1),)
    return S


@gluon.jit
def finish_coordinates(S, PLACE: gl.constexpr, scale, offset, BUCKETS: gl.constexpr):
    """Finish the transform of four coordinates and scale them to bucket places."""
    args = [S[0][PLACE], S[1][PLACE], S[2][PLACE], S[3][PLACE], scale, offset]
    REGS: gl.constexpr = operands(4, "f", ",".join("f" * 6))
    return asm(_join_ptx(BUCKETS > 32), REGS, args, (gl.float32,) * 4, is_pure=True, pack=1)


@gluon.jit
def squared_length(S, TOKEN: gl.constexpr):
    """Return 32 times the squared length of a token."""
    a, b, c, d = _eight(S[0], TOKEN), _eight(S[1], TOKEN), _eight(S[2], TOKEN), _eight(S[3], TOKEN)
    return sum_four((a + b) + (c + d))


@gluon.jit
def _eight(sums, TOKEN: gl.constexpr):
    total = sums[2 * TOKEN] * sums[2 * TOKEN]
    for i in gl.static_range(1, 8):
        x = sums[i // 2 * 4 + 2 * TOKEN + i % 2]
        total += x * x
    return total


@gluon.jit
def four_codes(a, b, c, d, table, uncertain, beyond, BUCKETS: gl.constexpr):
    """Return the codes of four places as bytes of a word, with accumulated uncertainty and out-of-range flags."""
    args = [a, b, c, d, table, uncertain, beyond]
    REGS: gl.constexpr = operands(3, "r", "f,f,f,f,r,r,r")
    text: gl.constexpr = with_older_instructions(_find_ptx(BUCKETS), launches_early())
    return asm(text, REGS, args, (gl.int32, gl.int32, gl.int32), is_pure=False, pack=1)


@gluon.jit
def squares_at(C, squares):
    """Sum the squared levels of a token's codes, looked up in shared memory."""
    total = ()
    for i in gl.static_range(8):
        total += (asm(_four_squares_ptx(), "=&f,r,r", [C[i], squares], gl.float32, is_pure=False, pack=1),)
    return ((total[0] + total[1]) + (total[2] + total[3])) + ((total[4] + total[5]) + (total[6] + total[7]))


@gluon.jit
def squares_of(w, planes, BITS: gl.constexpr):
    """Sum the integer squared levels of two tokens, four words of eight codes each."""
    zero = w[0] * 0
    a, b, c = from_lane(planes, zero), from_lane(planes, zero + 1), from_lane(planes, zero + 2)
    d, e, f = from_lane(planes, zero + 3), from_lane(planes, zero + 4), from_lane(planes, zero + 5)
    args = [w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], a, b, c, d, e, f]
    REGS: gl.constexpr = operands(2, "r", ",".join("r" * 14))
    return asm(_squares_ptx(BITS), REGS, args, (gl.int32, gl.int32), is_pure=True, pack=1)
