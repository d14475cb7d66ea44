"""Products of 32 codes of a row with inputs in integers, in one thread: PTX for Triton kernels.

A unit is 32 codes. Its inputs, in bf16, become 16-bit integers over a power of two set by the largest of them: those of at
least 1/128 of it are exact, since bf16 has eight bits, and smaller ones are rounded to its 2**-15th. Codes become bytes, four
to a word, and one instruction (`dp2a`) multiplies two of them by two inputs and adds. Sums of a group are exact; its scale and
the power of two multiply them in float32.

- Bytes at the same place of every three (3 and 6 bits) or five (5 bits) have codes at the same bits. They are first collected
  into words, and then a shift and a mask, or two of them, make bytes of four codes.
- The levels of IQ4 are bytes, too: two look-ups among eight, selected by the highest bit. NVFP4's, doubled and plus 12, are
  less than 128: a look-up then gives zero where the highest bit is set, and two make a byte by `or`.
- Codes of a word belong to one group, or its first two to one and the others to the next: so there are groups of 16.
"""

import triton
import triton.language as tl

from auraflux.quant import levels

UNIT = 32
FORMS = ("affine", "centred", "iq4", "nvfp4")  # whose codes are integers
HALVED = tl.constexpr("nvfp4")  # whose levels are doubled
NVFP4_CENTRE = tl.constexpr(12)
TABLES = tl.constexpr(
    {"iq4": levels.IQ4, "nvfp4": tuple(int(2 * level) + NVFP4_CENTRE.value for level in levels.FOUR_BITS["nvfp4"].tolist())}
)


@triton.constexpr_function
def is_signed(form):
    """Return whether bytes of codes are signed."""
    return form == "iq4"


@triton.constexpr_function
def centre_of_bytes(bits, form):
    """Return the offset of bytes of codes over their values; 0 for affine codes, which have biases."""
    return {"centred": 1 << (bits - 1), "nvfp4": NVFP4_CENTRE.value}.get(form, 0)


@triton.constexpr_function
def _masked(word, shift, bits):
    """Return PTX for the bits of every byte from `shift` on, as `f`."""
    mask = ((1 << bits) - 1) * 0x01010101
    if shift == 0:
        return f"and.b32 f,{word},{mask:#x};"
    return f"shr.u32 f,{word},{shift}; and.b32 f,f,{mask:#x};"


@triton.constexpr_function
def _spanning(low, high, shift, bits):
    """Return PTX for the bits of every byte from `shift` on, the last of which are in another word's bytes, as `f`."""
    mine, mask = ((1 << (8 - shift)) - 1) * 0x01010101, ((1 << bits) - 1) * 0x01010101
    text = f"shr.u32 f,{low},{shift}; shl.b32 t,{high},{8 - shift}; lop3.b32 f,f,t,{mine:#x},0xE4;"
    return text + f"and.b32 f,f,{mask:#x};"


@triton.constexpr_function
def _collected(to, words, octets):
    """Return PTX that collects four bytes of a stream of words into one, in order."""
    text, held, places = "", "", []
    for number in sorted({octet // 4 for octet in octets}):
        mine = [octet % 4 for octet in octets if octet // 4 == number]
        if not held:
            held, places = words[number], mine
            continue
        how = sum(place << 4 * n for n, place in enumerate([*places, *(4 + octet for octet in mine)]))
        text += f"prmt.b32 {to},{held},{words[number]},{how:#x};"
        held, places = to, list(range(len(places) + len(mine)))
    return text


@triton.constexpr_function
def _streamed(bits, words, count):
    """Return PTX for `count` codes of 3, 5 or 6 bits, a quarter of them from every four collected bytes."""
    period, each = count * bits // 32, count // 4  # bytes and codes of a quarter
    text = "".join(_collected(f"g{n}", words, [n + period * b for b in range(4)]) for n in range(period))
    found = []
    for i in range(each):
        at, shift = divmod(bits * i, 8)
        made = _masked(f"g{at}", shift, bits) if shift + bits <= 8 else _spanning(f"g{at}", f"g{at + 1}", shift, bits)
        found.append((text + made, tuple(i + each * b for b in range(4))))
        text = ""
    return found


@triton.constexpr_function
def _looked_up(word, first, table, signed):
    """Return PTX for eight codes of a word by their levels."""
    if signed:
        text = f"and.b32 s,{word},0x77777777; shr.u32 t,{word},1; lop3.b32 t,t,0x44444444,0x32103210,0xEA;"
        look = f"prmt.b32 f,{table[0]},{table[1]},s; prmt.b32 u,{table[2]},{table[3]},s; prmt.b32 f,f,u,t;"
    else:
        text = f"mov.b32 s,{word}; xor.b32 t,{word},0x88888888;"
        look = f"prmt.b32 f,{table[0]},{table[1]},s; prmt.b32 u,{table[2]},{table[3]},t; or.b32 f,f,u;"
    return [
        (text + look, tuple(range(first, first + 4))),
        ("shr.u32 s,s,16; shr.u32 t,t,16;" + look, tuple(range(first + 4, first + 8))),
    ]


@triton.constexpr_function
def quads(bits, form, words, table):
    """Return PTX that unpacks a unit's words four codes at a time, as `f`, with the numbers of these codes."""
    if form in TABLES.value:
        return [quad for i, word in enumerate(words) for quad in _looked_up(word, 8 * i, table, is_signed(form))]
    if bits in (3, 5):
        return _streamed(bits, words, 32)
    if bits == 6:
        halves = [_streamed(6, words[3 * h : 3 * h + 3], 16) for h in range(2)]
        return [(text, tuple(16 * h + code for code in codes)) for h in range(2) for text, codes in halves[h]]
    if bits == 8:
        return [(f"mov.b32 f,{word};", tuple(range(4 * i, 4 * i + 4))) for i, word in enumerate(words)]
    each = 8 // bits  # codes of a byte
    return [
        (_masked(word, bits * n, bits), tuple(4 * each * i + each * b + n for b in range(4)))
        for i, word in enumerate(words)
        for n in range(each)
    ]


@triton.constexpr_function
def pairs(bits, form):
    """Return the pairs of codes in the order of their products."""
    return [codes[n : n + 2] for _, codes in quads(bits, form, ["w"] * bits, ["w"] * 4) for n in (0, 2)]


@triton.constexpr_function
def sums_ptx(bits, form, group):
    """Return PTX for the sums of a unit's groups. In: its words, 16 pairs of inputs, initial sums, the table of levels."""
    outs = 2 if group == 16 else 1
    words = [f"${outs + i}" for i in range(bits)]
    kind = "s32" if is_signed(form) else "u32"
    text = "{.reg .b32 f,t,s,u,g<5>;" + "".join(f"mov.b32 ${n},${outs + bits + 16 + n};" for n in range(outs))
    pair = outs + bits
    table = [f"${2 * outs + bits + 16 + n}" for n in range(4)]
    for made, codes in quads(bits, form, words, table):
        text += made
        for half, mode in enumerate(("lo", "hi")):
            to = codes[2 * half] // 16 if outs == 2 else 0
            text += f"dp2a.{mode}.s32.{kind} ${to},${pair},f,${to};"
            pair += 1
    return text + "}"


@triton.constexpr_function
def inputs_ptx(bits, form):
    """Return PTX for pairs of integers and their factor, NaN where one is not finite. In: 16 pairs of bf16."""
    text = "{.reg .b32 m,e,k,y<32>; .reg .f32 s; .reg .pred p; mov.b32 m,$17;"
    text += "".join(f"max.NaN.xorsign.abs.bf16x2 m,m,${17 + i};" for i in range(1, 16))
    # the larger exponent, 2**-112 at least
    text += "shr.u32 k,m,23; and.b32 k,k,255; shr.u32 e,m,7; and.b32 e,e,255; max.u32 e,e,k; max.u32 e,e,15;"
    text += "sub.u32 k,268,e; shl.b32 k,k,23; mov.b32 s,k;"
    text += f"sub.u32 k,e,{15 if form == HALVED.value else 14}; shl.b32 k,k,23; setp.eq.u32 p,e,255; @p mov.b32 k,0x7FC00000;"
    text += "mov.b32 $16,k;"
    for n in range(32):
        text += f"and.b32 k,${17 + n // 2},0xFFFF0000;" if n % 2 else f"shl.b32 k,${17 + n // 2},16;"
        # the lower half of 1.5 * 2**23 + x
        text += f"fma.rn.f32 y{n},k,s,0f4B400000;"
    for i, pair in enumerate(pairs(bits, form)):
        text += f"prmt.b32 ${i},y{pair[0]},y{pair[1]},0x5410;"
    return text + "}"


@triton.constexpr_function
def totals_ptx(bits, form, group):
    """Return PTX for the sums of the inputs of a unit's groups. In: their pairs."""
    outs = 2 if group == 16 else 1
    text = "".join(f"mov.b32 ${n},0;" for n in range(outs))
    for i, codes in enumerate(pairs(bits, form)):
        to = codes[0] // 16 if outs == 2 else 0
        text += f"dp2a.lo.s32.u32 ${to},${outs + i},0x0101,${to};"
    return text


@triton.constexpr_function
def has_levels(form):
    """Return whether codes are looked up in a table."""
    return form in TABLES.value


@triton.constexpr_function
def table_word(form, n):
    """Return four of a format's levels as bytes of a word."""
    return sum((level & 255) << 8 * i for i, level in enumerate(TABLES.value[form][4 * n : 4 * n + 4]))


@triton.jit
def level_tables(zero, FORM: tl.constexpr, UNITS: tl.constexpr):
    """Return the words of a format's levels, none where codes are numbers; `zero` is not known to the compiler to be zero.

    Constants would be moved to a register again for every look-up.
    """
    found = ()
    if has_levels(FORM):
        for n in tl.static_range(4):
            found += (tl.full([UNITS], table_word(FORM, n), tl.uint32).to(tl.int32, bitcast=True) | zero,)  # type: ignore[assignment]
    return found


@triton.jit
def integer_inputs(words, BITS: tl.constexpr, FORM: tl.constexpr):
    """Return a unit's inputs in bf16, two to a word, as integers: 16 pairs in the order of codes, and their power of two."""
    text: tl.constexpr = inputs_ptx(BITS, FORM)
    regs: tl.constexpr = "=&r," * 16 + "=&f," + "r," * 15 + "r"
    types: tl.constexpr = (tl.int32,) * 16 + (tl.float32,)
    found = tl.inline_asm_elementwise(text, regs, words, types, is_pure=True, pack=1)
    return found[:16], found[16]


@triton.jit
def integer_totals(pairs, BITS: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr):
    """Sum the inputs of each of a unit's groups."""
    COUNT: tl.constexpr = 2 if GROUP == 16 else 1
    text: tl.constexpr = totals_ptx(BITS, FORM, GROUP)
    regs: tl.constexpr = "=&r," * COUNT + "r," * 15 + "r"
    return tl.inline_asm_elementwise(text, regs, pairs, (tl.int32,) * COUNT, is_pure=True, pack=1)


@triton.jit
def integer_sums(words, pairs, starts, tables, BITS: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr):
    """Add the products of codes and inputs to `starts`, one for each of a unit's groups."""
    COUNT: tl.constexpr = 2 if GROUP == 16 else 1
    text: tl.constexpr = sums_ptx(BITS, FORM, GROUP)
    regs: tl.constexpr = "=&r," * COUNT + "r," * (BITS + 15 + COUNT + len(tables)) + "r"
    return tl.inline_asm_elementwise(text, regs, words + pairs + starts + tables, (tl.int32,) * COUNT, is_pure=True, pack=1)
