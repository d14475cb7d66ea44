"""Products of codes of 2 to 8 bits with one token's x in integers: PTX of one thread, for Gluon kernels.

Every tensor has one element per thread. A column of codes is summed by one `mma` column: a group, or half of a group of 128.
Lane (g, t) has some codes of a column, of rows g and g + 8, and their x.

- A register holds four codes, one per byte. A code may sit above the lowest bits of its byte, so that one mask extracts it; its
  x is scaled down to match.
- x is rounded to 16 bits relative to the largest of its column, and split into two bytes: x = (256 high + low) * factor.
  Columns of an `mma` are the high bytes of four columns of codes and the low bytes of the same four, whose sums are added in
  the end.
- Lanes accumulate columns 4u to 4u + 3, u = t % 2: the high bytes where t < 2, otherwise the low ones.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.gpu.blocks.dependent_launch import launches_early
from auraflux.ops.hopper.mma import MMA_U8_S8
from auraflux.ops.hopper.ptx import with_older_instructions


@gluon.constexpr_function
def words_of_row(bits, column):
    """Return the words that hold a lane's codes of a column and a row; of 3 and 5 bits, they may begin within the first."""
    return {3: 2, 5: 3}.get(bits, bits * column // 128)


@gluon.constexpr_function
def place_of(bits, q, b):
    """Return which of a lane's codes of a column byte b of register q has, and how many bits above the lowest one it begins."""
    if bits == 8:
        return 4 * q + b, 0
    if bits == 4:
        return 8 * (q // 2) + 2 * b + q % 2, 0
    if bits == 2:
        return 4 * b + q, 2 * (q % 2)
    if bits == 6:
        return 8 * (q % 2) + ((0, 3, 4, 7), (1, 2, 5, 6))[q // 2][b], ((0, 2, 0, 2), (2, 0, 2, 0))[q // 2][b]
    codes = {3: ((0, 3, 6, 1), (2, 4, 5, 7)), 5: ((0, 2, 5, 7), (1, 3, 4, 6))}[bits]
    higher = {3: ((0, 1, 2, 3), (2, 0, 3, 1)), 5: ((0, 2, 1, 3), (1, 3, 0, 2))}[bits]
    return 8 * (q // 2) + codes[q % 2][b], higher[q % 2][b]


@gluon.constexpr_function
def in_place(bits, q, value):
    """Return `value` at the bits of each byte of register q where its code is."""
    return sum(value << (8 * b + place_of(bits, q, b)[1]) for b in range(4))


@gluon.constexpr_function
def _unpack_ptx(bits, r, w, shift):
    """Return PTX that unpacks words w of row r to registers {r}f0, ... of four codes; $shift: byte selectors and shifts."""
    f, t = [f"{r}f{q}" for q in range(4)], [f"{r}t{n}" for n in range(7)]

    def mask(q, source):
        return f"and.b32 {f[q]},{source},{in_place(bits, q, (1 << bits) - 1):#x};"

    def pick(to, a, b, how):
        return f"prmt.b32 {to},{a},{b},{how};"

    text = ""
    if bits == 8:
        text += "".join(f"mov.b32 {to},{word};" for to, word in zip(f, w, strict=False))
    elif bits == 4:
        for i, word in enumerate(w):
            text += mask(2 * i, word) + f"shr.u32 {t[i]},{word},4;" + mask(2 * i + 1, t[i])
    elif bits == 2:
        text += mask(0, w[0]) + mask(1, w[0]) + f"shr.u32 {t[0]},{w[0]},4;" + mask(2, t[0]) + mask(3, t[0])
    elif bits == 6:
        # codes 0 and 3 of four lie within bytes; 1 and 2 do after a shift by four bits
        text += pick(t[0], w[0], w[1], 0x5320) + pick(t[1], w[1], w[2], 0x7542) + mask(0, t[0]) + mask(1, t[1])
        text += f"shf.r.wrap.b32 {t[2]},{w[0]},{w[1]},4; shf.r.wrap.b32 {t[3]},{w[1]},{w[2]},4; shr.u32 {t[4]},{w[2]},4;"
        text += pick(t[5], t[2], t[3], 0x4310) + pick(t[6], t[3], t[4], 0x6532) + mask(2, t[5]) + mask(3, t[6])
    else:
        # half of eight codes lie within bytes; the others do after a shift by four bits
        for h in range(2):
            low, high, near, far = w[h if bits == 5 else 0], w[h + 1 if bits == 5 else 1], t[2 * h], t[2 * h + 1]
            text += pick(near, low, high, shift[h]) + mask(2 * h, near)
            if bits == 5:
                text += f"shf.r.wrap.b32 {far},{low},{high},{shift[2 + h]};"
            else:
                text += f"shr.u32 {far},{near},4;" + pick(far, far, far, 0x2110)
            text += mask(2 * h + 1, far)
    return text


@gluon.constexpr_function
def _columns_ptx(bits, column, gang, first):
    """Return PTX for 16 rows times `interleave` columns, interleaved so that dependent `mma` do not stall.

    Out: 4 sums per column. In: words of row g and of row g + 8 for each column, x of both sets, and the shifts of 3 and 5 bits.
    `first` is the number of the first column.
    """
    words, regs = words_of_row(bits, column), column // 16
    x = 4 * gang + 2 * words * gang
    rows = [f"{r}{n}" for n in range(gang) for r in "uv"]
    text = "{.reg .b32 " + ",".join(f"{r}f<4>,{r}t<7>" for r in rows) + ";"
    shift = [f"${x + 2 * regs + i}" for i in range(4)]
    for n, r in enumerate(rows):
        text += _unpack_ptx(bits, r, [f"${4 * gang + words * n + i}" for i in range(words)], shift)
    for i in range(0, regs, 2):
        for n in range(gang):
            c, b = ",".join(f"${4 * n + k}" for k in range(4)), x + regs * ((first + n) // 2 % 2) + i
            a = ",".join(f"{r}{n}f{k}" for k in (i, i + 1) for r in "uv")
            text += f"{MMA_U8_S8} {{{c}}},{{{a}}},{{${b},${b + 1}}},{{{c if i else '0,0,0,0'}}};"
    return text + "}"


@gluon.constexpr_function
def _columns_regs(bits, column, gang):
    """Return the register constraints of `_columns_ptx`."""
    more = {3: 2, 5: 4}.get(bits, 0)
    return "=&r," * (4 * gang) + ",".join("r" * (2 * words_of_row(bits, column) * gang + column // 8 + more))


@gluon.constexpr_function
def _load_ptx(column):
    """Return PTX that loads a lane's x of a column, two bf16 to a word."""
    pairs, text = column // 8, ""
    for i in range(pairs // 4):
        text += f"ld.global.v4.b32 {{{','.join(f'${4 * i + k}' for k in range(4))}}},[${pairs}+{16 * i}];"
    return text


@gluon.constexpr_function
def _words_ptx(bits, column, place, pitch):
    """Return PTX that loads words of rows g and g + 8 of the column at byte `place`."""
    words, text = words_of_row(bits, column), ""
    size = words if words in (2, 4) and bits != 3 else 1
    for row in range(2):
        for i in range(0, words, size):
            out = ",".join(f"${words * row + i + k}" for k in range(size))
            to, kind = (f"{{{out}}}", f"v{size}.b32") if size > 1 else (out, "b32")
            text += f"ld.shared.{kind} {to},[${2 * words}+{place + 8 * pitch * row + 4 * i}];"
    return text


@gluon.constexpr_function
def _rounded_ptx(bits, column):
    """Return PTX that rounds x. Out: x of both sets of columns, four factors. In.

    Pairs of x, the lane, lanes of the factors.
    """
    pairs, regs = column // 8, column // 16
    o = 2 * regs + 4
    text = "{.reg .b32 m,k,e,a<8>,y<16>,s<8>,v,w,f; .reg .pred p;"
    for i in range(pairs):
        text += f"and.b32 a{i},${o + i},0x7FFF7FFF;" + (f"max.u16x2 m,m,a{i};" if i else "mov.b32 m,a0;")
    for lane in (1, 2):
        text += f"shfl.sync.bfly.b32 k,m,{lane},31,0xffffffff; max.u16x2 m,m,k;"
    text += "shr.u32 k,m,16; max.u16x2 m,m,k; and.b32 m,m,0xFFFF; shr.u32 e,m,7; max.u32 e,e,16;"
    places = {place_of(bits, q, b)[0]: (q, b, place_of(bits, q, b)[1]) for q in range(regs) for b in range(4)}
    # 255/256 of 2**(14 - exponent), less for codes that lie higher; and 1 over it, or NaN where x is not finite
    for higher in sorted({higher for _, _, higher in places.values()}):
        text += f"sub.u32 k,{267 - higher},e; shl.b32 s{higher},k,23; or.b32 s{higher},s{higher},0x7F0000;"
    text += "sub.u32 k,e,14; shl.b32 f,k,23; or.b32 f,f,0x8081; setp.eq.u32 p,e,255; @p mov.b32 f,0x7FC00000;"
    for n in range(2 * pairs):
        text += f"and.b32 v,${o + n // 2},0xFFFF0000;" if n % 2 else f"shl.b32 v,${o + n // 2},16;"
        # the lowest bits of 1.5 * 2**23 + 128 + x: high, then low + 128
        text += f"fma.rn.f32 y{n},v,s{places[n][2]},0f4B400080;"
    for q in range(regs):
        y = [f"y{place_of(bits, q, b)[0]}" for b in range(4)]
        text += f"prmt.b32 v,{y[0]},{y[1]},0x5140; prmt.b32 w,{y[2]},{y[3]},0x5140;"
        text += f"prmt.b32 ${q},v,w,0x7632; prmt.b32 ${regs + q},v,w,0x5410; xor.b32 ${regs + q},${regs + q},0x80808080;"
    # lanes below 16 hold the high bytes of both halves of the warp, lanes above the low bytes
    text += f"setp.lt.u32 p,${o + pairs},16;"
    for q in range(regs):
        text += f"selp.b32 v,${regs + q},${q},p; shfl.sync.bfly.b32 w,v,16,31,0xffffffff;"
        text += f"selp.b32 ${q},${q},w,p; selp.b32 ${regs + q},w,${regs + q},p;"
    for i in range(4):
        text += f"shfl.sync.idx.b32 ${2 * regs + i},f,${o + pairs + 1 + i},31,0xffffffff;"
    return text + "}"


@gluon.constexpr_function
def _sums_ptx(bits, column):
    """Return PTX for the sums of x of both sets, by a product with codes of 1."""
    regs = column // 16
    text = "{.reg .b32 o<4>,d<4>;" + "".join(f"mov.b32 o{q},{in_place(bits, q, 1):#x};" for q in range(regs))
    for half in range(2):
        c = f"${2 * half},${2 * half + 1},d{2 * half},d{2 * half + 1}"
        for i in range(0, regs, 2):
            b = 4 + regs * half + i
            text += f"{MMA_U8_S8} {{{c}}},{{o{i},o{i},o{i + 1},o{i + 1}}},{{${b},${b + 1}}},{{{c if i else '0,0,0,0'}}};"
    return text + "}"


@gluon.jit
def column_of(lane):
    """Return which of eight columns a lane rounds x of: 0, 1, 4, 5 are the first set of the `mma`, 2, 3, 6, 7 the second."""
    g = lane // 4
    return g // 2 % 2 * 4 + g // 4 * 2 + g % 2


@gluon.jit
def raw_x(x, t, COLUMN: gl.constexpr):
    """Load the x of a lane's codes of a column that begins at address `x`."""
    regs: gl.constexpr = "=r," * (COLUMN // 8) + "l"
    at = x + t * (COLUMN // 2)
    return gl.inline_asm_elementwise(_load_ptx(COLUMN), regs, [at], (gl.int32,) * (COLUMN // 8), is_pure=False, pack=1)


@gluon.jit
def shifts(t, BITS: gl.constexpr):
    """Return byte selectors of two words that unpack 3 and 5 bits, for either eight codes, and the shifts of 5 bits."""
    byte = 2 * BITS * t % 4
    found = ()
    if BITS == 3:
        found = (byte * 0x1111 + 0x0210, byte * 0x1111 + 0x3543)  # type: ignore[assignment]
    elif BITS == 5:
        found = (byte * 0x1111 + 0x4310, byte * 0x1111 + 0x5421, byte * 8 + 4, byte * 8 + 12)  # type: ignore[assignment]
    return found


@gluon.jit
def byte_words_at(at, PLACE: gl.constexpr, BITS: gl.constexpr, COLUMN: gl.constexpr, PITCH: gl.constexpr):
    """Load a lane's words of rows g and g + 8 of the column at byte PLACE."""
    COUNT: gl.constexpr = 2 * words_of_row(BITS, COLUMN)
    text: gl.constexpr = _words_ptx(BITS, COLUMN, PLACE, PITCH)
    regs: gl.constexpr = "=r," * COUNT + "r,~{memory}"
    return gl.inline_asm_elementwise(text, regs, [at], (gl.int32,) * COUNT, is_pure=False, pack=1)


@gluon.jit
def rounded(x, lane, BITS: gl.constexpr, COLUMN: gl.constexpr):
    """Round x to 16 bits; return x of two sets of columns, then the factors of this lane's columns."""
    at = lane % 2 * 8
    regs: gl.constexpr = "=&r," * (COLUMN // 8) + "=&f," * 4 + "r," * (COLUMN // 8) + "r,r,r,r,r"
    types: gl.constexpr = (gl.int32,) * (COLUMN // 8) + (gl.float32,) * 4
    args = x + (lane, at, at + 4, at + 16, at + 20)  # noqa: RUF005 - tuples of tensors are not unpacked in kernels
    text: gl.constexpr = with_older_instructions(_rounded_ptx(BITS, COLUMN), launches_early())
    return gl.inline_asm_elementwise(text, regs, args, types, is_pure=False, pack=1)


@gluon.jit
def sums_of_x(x, BITS: gl.constexpr, COLUMN: gl.constexpr):
    """Sum x over columns 4u to 4u + 3."""
    regs: gl.constexpr = "=&r," * 4 + ",".join("r" * (COLUMN // 8))
    return gl.inline_asm_elementwise(_sums_ptx(BITS, COLUMN), regs, x, (gl.int32,) * 4, is_pure=True, pack=1)


@gluon.jit
def byte_sums(words, x, BITS: gl.constexpr, COLUMN: gl.constexpr, GANG: gl.constexpr, FIRST: gl.constexpr):
    """Sum code * x over GANG columns from number FIRST on: rows g (2) and g + 8 (2), two columns each."""
    text: gl.constexpr = _columns_ptx(BITS, COLUMN, GANG, FIRST)
    regs: gl.constexpr = _columns_regs(BITS, COLUMN, GANG)
    return gl.inline_asm_elementwise(text, regs, words + x, (gl.int32,) * (4 * GANG), is_pure=True, pack=1)
