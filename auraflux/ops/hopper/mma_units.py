"""Products of codes of 2 and 4 bits in groups of 16 inputs and more with one token in bf16: PTX for what a thread does.

A unit is 16 codes of a row, and a tile eight units. Of a tile each lane (g, t) has 32 codes of rows g and g + 8, units 2t and
2t + 1, which lie side by side. One `mma` sums over all lanes' inputs, and sums of units must stay apart: so column n of b has
the inputs of the n-th lane's first unit and zeros for other lanes', and column 4 + n those of its second one. Products with
first units are then in columns 0 to 3, and with second ones in columns 4 to 7: lane (g, t) ends up with those of two units.

Affine codes become pairs of bf16 as in `mma_bits.py`, and what they were added to is taken out where sums begin. IQ4's levels
are looked up, low bytes and high ones.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.hopper.mma import MMA
from auraflux.ops.hopper.mma_bits import affine_ptx, offsets
from auraflux.quant import levels

TILE = gl.constexpr(128)  # inputs
WORDS_2 = gl.constexpr("ld.global.L1::no_allocate.v2.b32 {$0,$1},[$2];")
WORDS_4 = gl.constexpr("ld.global.L1::no_allocate.v4.b32 {$0,$1,$2,$3},[$4];")


@gluon.constexpr_function
def bf16_bits(number):
    """The bits of a whole number that bf16 holds."""
    length = abs(number).bit_length()
    return (0x8000 if number < 0 else 0) | (126 + length << 7) | ((abs(number) << 8) >> length & 0x7F)


# low bytes of IQ4's levels in bf16, and high ones, four to a word
IQ4_TABLES = gl.constexpr(
    tuple(
        tuple(sum((bf16_bits(levels.IQ4[4 * i + n]) >> shift & 255) << 8 * n for n in range(4)) for i in range(4))
        for shift in (0, 8)
    )
)


@gluon.constexpr_function
def _iq4_ptx(r, w):
    """Two look-ups among eight levels, of which the highest bit takes one, for low bytes and for high ones."""
    result = [""]
    for word in w:
        text = f"and.b32 {r}p0,{word},0x77777777; shr.u32 {r}p1,{word},1;"
        text += f"lop3.b32 {r}p1,{r}p1,0x44444444,0x32103210,0xEA;"
        for half in range(2):
            if half:
                text = f"shr.u32 {r}p0,{r}p0,16; shr.u32 {r}p1,{r}p1,16;"
            for to, table in zip(("lo", "hi"), IQ4_TABLES.value, strict=True):
                a, b, c, d = (f"{each:#x}" for each in table)
                # the tables are too many for operands
                text += f"mov.b32 {r}a,{a}; mov.b32 {r}b,{b}; prmt.b32 {r}p2,{r}a,{r}b,{r}p0;"
                text += f"mov.b32 {r}a,{c}; mov.b32 {r}b,{d}; prmt.b32 {r}a,{r}a,{r}b,{r}p0; prmt.b32 {r}{to},{r}p2,{r}a,{r}p1;"
            n = len(result) - 1
            result.append(text + f"prmt.b32 {r}f{n},{r}lo,{r}hi,0x5140;")
            result.append(f"prmt.b32 {r}f{n + 1},{r}lo,{r}hi,0x7362;")
    return result


@gluon.constexpr_function
def tile_ptx(bits, form, unit):
    """16 rows times one unit of each lane. In: words of row g, of row g + 8, pairs of x, where sums begin."""
    x, c = 4 + 2 * bits, 12 + 2 * bits
    made, text = [], "{.reg .b32 " + ",".join(f"{r}f<8>,{r}p<3>,{r}a,{r}b,{r}lo,{r}hi" for r in "uv") + ";"
    for n, r in enumerate("uv"):
        w = [f"${4 + bits * n + i}" for i in range(unit * bits // 2, (unit + 1) * bits // 2)]
        made.append(affine_ptx(bits, 8, r, w) if form == "affine" else _iq4_ptx(r, w))
    text += made[0][0] + made[1][0]
    begin = ",".join(f"${c + k}" for k in range(4))
    for i in range(0, 8, 2):
        text += "".join(row[1 + i] + row[2 + i] for row in made)
        a = ",".join(f"{r}f{k}" for k in (i, i + 1) for r in "uv")
        text += f"{MMA} {{$0,$1,$2,$3}},{{{a}}},{{${x + i},${x + i + 1}}},{{{begin}}};"
        begin = "$0,$1,$2,$3"
    return text + "}"


@gluon.constexpr_function
def tile_regs(bits):
    """Constraints of `tile_ptx`."""
    return "=&f," * 4 + "r," * (2 * bits + 8) + "f,f,f,f"


@gluon.constexpr_function
def starts_ptx(bits):
    """Minus the sums of offset * x of two units, then the sums of x."""
    text = "{.reg .b32 one,m<8>; .reg .f32 z; mov.b32 one,0x3F803F80; mov.f32 z,0f00000000;"
    begin = "z,z,z,z"
    for k, offset in enumerate(offsets(bits, 8)):
        text += f"mov.b32 m{k},{bf16_bits(-offset) * 0x10001:#x};"
    for i in range(0, 8, 2):
        text += f"{MMA} {{$0,$1,$2,$3}},{{m{i},one,m{i + 1},one}},{{${4 + i},${5 + i}}},{{{begin}}};"
        begin = "$0,$1,$2,$3"
    return text + "}"


@gluon.constexpr_function
def x_ptx(bits, form):
    """16 inputs as the pairs of a lane's codes, or zeros. $8: where they lie, $9: whether they are this lane's."""
    text = "{.reg .pred p; .reg .b32 r<8>; setp.ne.b32 p,$9,0;"
    text += "".join(f"mov.b32 r{i},0;" for i in range(8))
    text += "@p ld.global.v4.b32 {r0,r1,r2,r3},[$8]; @p ld.global.v4.b32 {r4,r5,r6,r7},[$8+16];"
    apart = 0 if form == "iq4" else 2 if bits == 4 else 4
    if apart == 0:
        text += "".join(f"mov.b32 ${i},r{i};" for i in range(8))
    else:
        for n, i in enumerate([i for i in range(8) if not i & apart]):
            text += f"prmt.b32 ${2 * n},r{i},r{i + apart},0x5410; prmt.b32 ${2 * n + 1},r{i},r{i + apart},0x7632;"
    return text + "}"


@gluon.constexpr_function
def scales_ptx(nbytes, group):
    """Scales of two units as float32, in single or half precision; $3: whether they are the first and third of four."""
    if nbytes == 4 and group > 32:
        return "ld.global.b32 $0,[$2]; mov.f32 $1,$0; // $3"
    if nbytes == 4 and group == 32:
        return "ld.global.v2.b32 {$0,$1},[$2]; // $3"
    if group > 32:
        return "{.reg .b16 a; ld.global.b16 a,[$2]; cvt.f32.f16 $0,a; mov.f32 $1,$0;}"
    if group == 32:
        return "{.reg .b16 a,b; ld.global.v2.b16 {a,b},[$2]; cvt.f32.f16 $0,a; cvt.f32.f16 $1,b;}"
    text = "{.reg .pred p; .reg .b32 a,b,c,d; setp.ne.b32 p,$3,0; ld.global.v4.b32 {a,b,c,d},[$2];"
    return text + "selp.b32 $0,a,b,p; selp.b32 $1,c,d,p;}"


@gluon.jit
def ask_words(at, BITS: gl.constexpr):
    """Load a lane's 32 codes of a row from an address (int64) on, as words."""
    text: gl.constexpr = WORDS_2 if BITS == 2 else WORDS_4
    regs: gl.constexpr = "=r," * BITS + "l"
    return gl.inline_asm_elementwise(text, regs, [at], (gl.int32,) * BITS, is_pure=False, pack=1)


@gluon.jit
def ask_scales(at, first, NBYTES: gl.constexpr, GROUP: gl.constexpr):
    """Load the scales of a lane's two units: of four that begin at an address (int64) the `first` and third, or the others."""
    text: gl.constexpr = scales_ptx(NBYTES, GROUP)
    return gl.inline_asm_elementwise(text, "=&f,=&f,l,r", [at, first], (gl.float32,) * 2, is_pure=False, pack=1)


@gluon.jit
def ask_inputs(at, mine, BITS: gl.constexpr, FORM: gl.constexpr):
    """Load the inputs of a lane's column, zeros where it has none."""
    text: gl.constexpr = x_ptx(BITS, FORM)
    regs: gl.constexpr = "=&r," * 8 + "l,r"
    return gl.inline_asm_elementwise(text, regs, [at, mine], (gl.int32,) * 8, is_pure=False, pack=1)


@gluon.jit
def unit_starts(x, BITS: gl.constexpr):
    """Give minus the sums of offset * x of a lane's two units, and the sums of x."""
    text: gl.constexpr = starts_ptx(BITS)
    regs: gl.constexpr = "=&f," * 4 + "r,r,r,r,r,r,r,r"
    return gl.inline_asm_elementwise(text, regs, x, (gl.float32,) * 4, is_pure=True, pack=1)


@gluon.jit
def unit_sums(u, v, x, begin0, begin1, t, BITS: gl.constexpr, FORM: gl.constexpr):
    """Multiply words of rows g and g + 8; sums of a lane's two units of row g (2) and of row g + 8 (2)."""
    regs: gl.constexpr = tile_regs(BITS)
    args = u + v + x + (begin0, begin1, begin0, begin1)
    first: gl.constexpr = tile_ptx(BITS, FORM, 0)
    second: gl.constexpr = tile_ptx(BITS, FORM, 1)
    a = gl.inline_asm_elementwise(first, regs, args, (gl.float32,) * 4, is_pure=True, pack=1)
    b = gl.inline_asm_elementwise(second, regs, args, (gl.float32,) * 4, is_pure=True, pack=1)
    found = ()
    for i in gl.static_range(4):
        found += (gl.where(t < 2, a[i], b[i]),)  # type: ignore[assignment]
    return found
