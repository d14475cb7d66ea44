"""Products of codes of 2 to 8 bits, and of MXFP4, with tokens in bf16: PTX of one thread, for Gluon kernels.

Every tensor has one element per thread. A column of codes is summed by one `mma` column: a group, or half of a group of 128.
Lane (g, t) has some codes of a column, of rows g and g + 8, and their x.

- Two codes 16 bits from each other become a pair of bf16 by one `lop3`: a code of n bits at bit p of a half word, where
  p + n <= 7, is the mantissa of (128 >> p) + code. A row's bit stream of 3, 5 or 6 bits is first permuted to line up such
  halves; there, and at 2 bits, code i pairs with the one half of the stream further on.
- Eight bits are two planes, the lower seven and the highest: 128 + low and 128 + high add up to 256 + code.
- MXFP4's sign and three bits are moved to bf16's sign, lowest exponent bits and highest mantissa bit: value / 2**126. x is
  multiplied by 2**64, so that sums stay clear of float32 denormals.
- The accumulator starts at minus the sum of offset * x. One `mma` computes it in its last rows, and in its first rows the sum
  of x for the biases.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.gpu.blocks.dependent_launch import launches_early
from auraflux.ops.hopper.mma import MMA
from auraflux.ops.hopper.ptx import with_older_instructions

MX_SHIFT = gl.constexpr(2.0**62)  # 2**126 less the 2**64 applied to x


@gluon.constexpr_function
def word_count(bits, column):
    """Return the words of a row that a lane reads for a column; words of 3 and 5 bits are shared with neighbouring lanes."""
    return 4 if bits in (3, 5) else bits * column // 128


@gluon.constexpr_function
def _select_ptx(to, low, high, split):
    """Return PTX that takes bits `split` from the low word and the others from the high one, in both halves."""
    return f"lop3.b32 {to},{low},{high},{split * 0x10001:#x},0xE4;"


@gluon.constexpr_function
def _place_ptx(to, source, bits, at):
    """Return PTX that makes bits `at` and up of both halves the mantissas of bf16."""
    return f"lop3.b32 {to},{source},{(((1 << bits) - 1) << at) * 0x10001:#x},{(0x4300 - 0x80 * at) * 0x10001:#x},0xEA;"


@gluon.constexpr_function
def field_places(bits, fields):
    """Return the source of each code of a stream of halves: half, shift, bit after the shift.

    Bit None where it spans two halves.
    """
    found = []
    shift, half = 0, 0
    for i in range(fields):
        where, at = divmod(bits * i, 16)
        if at + bits > 16:
            found.append((where, at, None))
            continue
        # one shift covers as many fields as fit the mantissa
        if where != half or at - shift + bits > 7:
            half, shift = where, 0 if at + bits <= 7 else at
        found.append((where, shift, at - shift))
    return found


@gluon.constexpr_function
def offsets(bits, fields):
    """Return the offset that each code of a column carries as a bf16."""
    return [256 if bits == 8 else 128 >> (place or 0) for _, _, place in field_places(bits, fields)]


@gluon.constexpr_function
def _halves_ptx(bits, r, w):
    """Return PTX that makes of words w of row r the halves {r}p0, ... of its stream and of the one it is paired with."""
    p = [f"{r}p{i}" for i in range(3)]
    if bits == 6:
        text = f"prmt.b32 {p[0]},{w[0]},{w[1]},0x7610; prmt.b32 {p[1]},{w[0]},{w[2]},0x5432;"
        return text + f"prmt.b32 {p[2]},{w[1]},{w[2]},0x7610;"
    text = ""
    if bits in (3, 5):
        for to, low, high in ((f"{r}a", w[0], w[1]), (f"{r}b", w[2], w[3])):
            text += f"shf.r.wrap.b32 {to},{low},{high},shift; shr.u32 {to}h,{high},shift;"
        text += f"prmt.b32 {p[0]},{r}a,{r}b,0x5410; prmt.b32 {p[1]},{r}a,{r}b,0x7632; prmt.b32 {p[2]},{r}ah,{r}bh,0x5410;"
        return text
    return "".join(f"mov.b32 {to},{word};" for to, word in zip(p, w, strict=False))


@gluon.constexpr_function
def affine_ptx(bits, fields, r, w):
    """Return PTX that prepares the fields of a row, then one string per field {r}f0, {r}f1, ..."""
    found = [_halves_ptx(bits, r, w)]
    made = set()
    for i, where in enumerate(field_places(bits, fields)):
        half, shift, place = where
        to, source, text = f"{r}f{i}", f"{r}p{half}", ""
        if place is None:
            text += f"shr.u32 {r}lo,{source},{shift}; shl.b32 {r}hi,{r}p{half + 1},{16 - shift};"
            text += _select_ptx(f"{r}lo", f"{r}lo", f"{r}hi", (1 << (16 - shift)) - 1)
            source, place = f"{r}lo", 0
        elif shift:
            if (half, shift) not in made:
                text += f".reg .b32 {r}s{half}_{shift}; shr.u32 {r}s{half}_{shift},{source},{shift};"
                made.add((half, shift))
            source = f"{r}s{half}_{shift}"
        found.append(text + _place_ptx(to, source, bits, place))
    return found


@gluon.constexpr_function
def _eight_ptx(r, w):
    """Return PTX for the lower seven bits of each field as {r}f0, ..., the highest as {r}h0, ..."""
    found = [""]
    for n, word in enumerate(w):
        for i, source, text in ((2 * n, word, ""), (2 * n + 1, f"{r}p{n % 3}", f"shr.u32 {r}p{n % 3},{word},8;")):
            text += f"lop3.b32 {r}f{i},{source},0x007F007F,0x43004300,0xEA;"
            found.append(text + f"lop3.b32 {r}h{i},{source},0x00800080,0x43004300,0xEA;")
    return found


@gluon.constexpr_function
def _mx_ptx(fields, r, w):
    """Return PTX for MXFP4.

    A multiplication copies four bits to both places, a mask selects the sign of one, the rest of the other.
    """
    found = [""]
    for i in range(fields):
        source, text = w[i // 4], ""
        if i % 4 > 1:
            text, source = f"shr.u32 {r}lo,{source},8;" if i % 4 == 2 else "", f"{r}lo"
        mask, factor = (0x00F000F0, 0x104) if i % 2 else (0x000F000F, 0x1040)
        text += f"and.b32 {r}hi,{source},{mask:#x}; mul.lo.u32 {r}hi,{r}hi,{factor:#x};"
        found.append(text + f"and.b32 {r}f{i},{r}hi,0x81C081C0;")
    return found


@gluon.constexpr_function
def column_ptx(bits, column, affine, tiles, gang):
    """Return PTX for 16 rows times `interleave` columns that share x, interleaved so that dependent `mma` do not stall.

    Out: 4 sums per column and tile of eight tokens. In: words of row g and of row g + 8 for each column, pairs of x, a stream's
    shift.
    """
    words, fields = word_count(bits, column), column // 8
    x = 4 * tiles * gang + 2 * words * gang
    rows = [f"{r}{n}" for n in range(gang) for r in "uv"]
    text = "{.reg .b32 " + ",".join(f"{r}f<8>,{r}h<8>,{r}p<3>,{r}a,{r}b,{r}ah,{r}bh,{r}lo,{r}hi" for r in rows)
    text += f",shift; .reg .f32 z; mov.f32 z,0f00000000; mov.b32 shift,${x + fields * tiles};"
    made = []
    for n, r in enumerate(rows):
        w = [f"${4 * tiles * gang + words * n + i}" for i in range(words)]
        made.append(_eight_ptx(r, w) if bits == 8 else affine_ptx(bits, fields, r, w) if affine else _mx_ptx(fields, r, w))
    text += "".join(row[0] for row in made)
    for i in range(0, fields, 2):
        text += "".join(row[1 + i] + row[2 + i] for row in made)
        for plane in "fh" if bits == 8 else "f":
            for n in range(gang):
                a = ",".join(f"{r}{n}{plane}{k}" for k in (i, i + 1) for r in "uv")
                for m in range(tiles):
                    c, b = ",".join(f"${4 * (tiles * n + m) + k}" for k in range(4)), x + fields * m + i
                    text += f"{MMA} {{{c}}},{{{a}}},{{${b},${b + 1}}},{{{c if i or plane == 'h' else 'z,z,z,z'}}};"
    return text + "}"


@gluon.constexpr_function
def column_regs(bits, column, tiles, gang):
    """Return the register constraints of `column_ptx`."""
    return "=&f," * (4 * tiles * gang) + "r," * (2 * word_count(bits, column) * gang + column // 8 * tiles) + "r"


@gluon.constexpr_function
def words_ptx(bits, column, place, pitch):
    """Return PTX that loads words of rows g and g + 8 of the column at byte `place`.

    $n is a lane's first word, $n+1 the next word of a stream.
    """
    words = word_count(bits, column)
    at, text = 2 * words, ""
    for row in range(2):
        out, byte = [f"${words * row + i}" for i in range(words)], place + 8 * pitch * row
        if bits in (3, 5):
            for half in range(2):
                for i in range(2):
                    text += f"ld.shared.b32 {out[2 * half + i]},[${at + i}+{byte + half * bits * 4}];"
        elif words in (2, 4):
            text += f"ld.shared.v{words}.b32 {{{','.join(out)}}},[${at}+{byte}];"
        else:
            text += "".join(f"ld.shared.b32 {to},[${at}+{byte + 4 * i}];" for i, to in enumerate(out))
    return text


@gluon.constexpr_function
def words_regs(bits, column):
    """Return the register constraints of `words_ptx`."""
    return "=r," * (2 * word_count(bits, column)) + "r,r,~{memory}"


@gluon.constexpr_function
def x_ptx(bits, column, affine, place):
    """Return PTX that loads 8 or 16 values of x, paired like a lane's codes; `place` is global or shared."""
    fields = column // 8
    text = "{.reg .b32 r<8>,big;" + ("" if affine else "mov.b32 big,0x5F805F80;")
    for i in range(fields // 4):
        text += f"ld.{place}.v4.b32 {{{','.join(f'r{4 * i + k}' for k in range(4))}}},[${fields + i}];"
    stride = 1 if bits == 8 else 2 if bits == 4 else 4
    for n, i in enumerate([i for i in range(fields) if not i & stride]):
        text += f"prmt.b32 ${2 * n},r{i},r{i + stride},0x5410; prmt.b32 ${2 * n + 1},r{i},r{i + stride},0x7632;"
    if not affine:
        text += "".join(f"mul.rn.bf16x2 ${n},${n},big;" for n in range(fields))
    return text + "}"


@gluon.constexpr_function
def x_regs(column, place):
    """Return the register constraints of `x_ptx`."""
    return "=&r," * (column // 8) + ("l,l" if place == "global" else "r,r,~{memory}")


@gluon.constexpr_function
def sums_ptx(bits, column):
    """Return PTX for the sums of x of two columns, then minus their sums of offset * x."""
    text, fields = "{.reg .b32 one; .reg .f32 z; mov.b32 one,0x3F803F80; mov.f32 z,0f00000000;", column // 8
    found, begin = offsets(bits, fields), "z,z,z,z"
    for i in range(0, fields, 2):
        a = []
        for k in (i, i + 1):
            # minus a power of two: sign and exponent bits
            exponent = 0x8000 | ((126 + int(found[k]).bit_length()) << 7)
            text += f".reg .b32 m{k}; mov.b32 m{k},{exponent * 0x10001:#x};"
            a += ["one", f"m{k}"]
        text += f"{MMA} {{$0,$1,$2,$3}},{{{','.join(a)}}},{{${4 + i},${5 + i}}},{{{begin}}};"
        begin = "$0,$1,$2,$3"
    return text + "}"


@gluon.constexpr_function
def sums_regs(column):
    """Return the register constraints of `sums_ptx`."""
    return "=&f," * 4 + ",".join("r" * (column // 8))


@gluon.constexpr_function
def copy_part_ptx(row_nbytes, part_nbytes, pitch, even):
    """Return PTX that copies part of 16 rows into a slot.

    $1 is the destination of a lane's chunk, $2 and $3 its source in the first and the last eight rows, $4 the bytes left of the
    row from there; with `even` parts, whether any are left.
    """
    line = min(part_nbytes & -part_nbytes, 128)
    rows = 32 * 16 // line
    text = "{.reg .pred p; mov.b32 $0,0;"
    for place in range(0, part_nbytes, line):
        if place == 0 or not even:
            text += f"setp.gt.s32 p,$4,{place};"
        for row in range(0, 16, rows):
            half, at = divmod(row, 8)
            to, source = row * pitch + place, at * row_nbytes + place
            text += f"@p cp.async.cg.shared.global.L2::256B [$1+{to}],[${2 + half}+{source}],16;"
    return text + "}"


@gluon.jit
def load_x(x, t, BITS: gl.constexpr, COLUMN: gl.constexpr, AFFINE: gl.constexpr, PLACE: gl.constexpr):
    """Load the x of a lane's codes of a column that begins at address `x`."""
    SPLIT: gl.constexpr = BITS == 3 or BITS == 5
    at = x + t * (16 if SPLIT else COLUMN // 2)
    args = [at, at + (64 if SPLIT else 16)]
    text: gl.constexpr = with_older_instructions(x_ptx(BITS, COLUMN, AFFINE, PLACE), launches_early())
    return gl.inline_asm_elementwise(text, x_regs(COLUMN, PLACE), args, (gl.int32,) * (COLUMN // 8), is_pure=False, pack=1)


@gluon.jit
def column_starts(x, BITS: gl.constexpr, COLUMN: gl.constexpr, AFFINE: gl.constexpr):
    """Sum x over columns 2t and 2t + 1, and return minus their sums of offset * x."""
    if AFFINE:
        text: gl.constexpr = sums_ptx(BITS, COLUMN)
        sums = gl.inline_asm_elementwise(text, sums_regs(COLUMN), x, (gl.float32,) * 4, is_pure=True, pack=1)
    else:
        sums = ((x[0] * 0).to(gl.float32),) * 4
    return sums


@gluon.jit
def words_at(at, after, PLACE: gl.constexpr, BITS: gl.constexpr, COLUMN: gl.constexpr, PITCH: gl.constexpr):
    """Load a lane's words of rows g and g + 8 of the column at byte PLACE; `after` is the next word of a stream."""
    text: gl.constexpr = words_ptx(BITS, COLUMN, PLACE, PITCH)
    COUNT: gl.constexpr = 2 * word_count(BITS, COLUMN)
    return gl.inline_asm_elementwise(text, words_regs(BITS, COLUMN), [at, after], (gl.int32,) * COUNT, is_pure=False, pack=1)


@gluon.jit
def column_sums(
    words, x, shift, BITS: gl.constexpr, COLUMN: gl.constexpr, AFFINE: gl.constexpr, TILES: gl.constexpr, GANG: gl.constexpr
):
    """Sum (offset + code) * x over GANG columns: rows g and g + 8, columns 2t and 2t + 1 of each tile of x."""
    text: gl.constexpr = column_ptx(BITS, COLUMN, AFFINE, TILES, GANG)
    args = words + x + (shift,)
    regs: gl.constexpr = column_regs(BITS, COLUMN, TILES, GANG)
    return gl.inline_asm_elementwise(text, regs, args, (gl.float32,) * (4 * TILES * GANG), is_pure=True, pack=1)
