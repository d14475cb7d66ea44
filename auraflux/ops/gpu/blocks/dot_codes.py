"""Rows of codes times one vector in Triton: a thread has 16 codes of each of a program's rows, sums are in float32.

Every tensor has one element per thread, or one row of a tile per thread: codes, scales and inputs are used by the thread that
loaded them, and nothing is exchanged before the final sums. On a GPU, codes are unpacked in PTX: by a mask and an exponent each
(`PLACE`), or several at a time.
"""

import torch
import triton
import triton.language as tl

from auraflux.ops.gpu.blocks.codes import bias_value, centre_of, form_of, half_value, scale_value, shift_of
from auraflux.ops.gpu.blocks.dependent_launch import gdc_launch_dependents, gdc_wait
from auraflux.ops.gpu.blocks.grids import grid_scale, grid_values, grid_words, is_grid
from auraflux.ops.gpu.device import INTERPRETED, launches_early, multiprocessors
from auraflux.ops.gpu.sizes import cdiv, power_of_two
from auraflux.quant import QTensor, levels

UNIT = 16  # codes per thread
# (rows, warps) per program, below MANY_ROWS and from it on. Fastest of those measured on an H200, 4096 x 14336 and 14336 x 4096
MANY_ROWS = 8192
DEFAULT_SHAPE = (4, 4), (8, 4)
SHAPES = {("nvfp4", 4): ((8, 4), (8, 2)), ("centred", 6): ((2, 4), (4, 2))}
LEAST_PROGRAMS = 4  # per multiprocessor; below, programs take fewer rows
PTX = tl.constexpr(not INTERPRETED)
# bits of a word as the mantissa of a float: (word & mask) | exponent
PLACE = tl.constexpr("lop3.b32 $0,$1,$2,$3,0xEA;")
# two halves as floats
WIDEN = tl.constexpr("{.reg .b16 l,h; mov.b32 {l,h},$2; cvt.f32.f16 $0,l; cvt.f32.f16 $1,h;}")
# four codes of FP8 as two pairs of halves
FP8 = tl.constexpr("{.reg .b16 l,h; mov.b32 {l,h},$2; cvt.rn.f16x2.e4m3x2 $0,l; cvt.rn.f16x2.e4m3x2 $1,h;}")


def _iq4_ptx() -> str:
    """Return PTX for eight codes as bytes, each the level plus 128.

    Two look-ups among eight levels, selected by the highest bit.
    """
    octets = [level + 128 for level in levels.IQ4]
    words = [hex(sum(octets[4 * i + n] << 8 * n for n in range(4))) for i in range(4)]
    text = "{.reg .b32 s,t,a,b; and.b32 s,$2,0x77777777; shr.u32 t,$2,1; lop3.b32 t,t,0x44444444,0x32103210,0xEA;"
    for to in range(2):
        text += f"prmt.b32 a,{words[0]},{words[1]},s; prmt.b32 b,{words[2]},{words[3]},s; prmt.b32 ${to},a,b,t;"
        text += "shr.u32 s,s,16; shr.u32 t,t,16;" if to == 0 else "}"
    return text


IQ4 = tl.constexpr(_iq4_ptx())
# a byte of a word as 2**23 + itself
OCTETS = tl.constexpr(tuple(f"prmt.b32 $0,$1,0x4B000000,{0x7650 + n:#x};" for n in range(4)))


@triton.constexpr_function
def unit_shift(form, hopper):
    """Return the factor to apply to `unit_values`: `shift_of`, except that Hopper converts FP8 itself."""
    return 1.0 if form == "fp8" and hopper else shift_of(form)


@triton.jit
def columns(tile, UNITS: tl.constexpr, WIDE: tl.constexpr):
    """Return the columns of a tile [UNITS, WIDE] with one row per thread; 4 or 8."""
    if WIDE == 4:
        even, odd = tl.split(tl.reshape(tile, [UNITS, 2, 2]))
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
        found = (x0, x1, x2, x3)
    else:
        even, odd = tl.split(tl.reshape(tile, [UNITS, 4, 2]))
        x0, x2, x4, x6 = columns(even, UNITS, 4)
        x1, x3, x5, x7 = columns(odd, UNITS, 4)
        found = (x0, x1, x2, x3, x4, x5, x6, x7)  # type: ignore[assignment]
    return found


@triton.jit
def unit_words(row, unit, there, BITS: tl.constexpr):
    """Load the words of a unit of 16 codes of one row; those of odd bits may begin mid-word.

    row    a pointer to its first word
    unit   [UNITS], one per thread; there, whether it exists
    """
    policy: tl.constexpr = "evict_first"
    if BITS == 8 or BITS == 4:
        EACH: tl.constexpr = BITS // 2
        at = unit[:, None] * EACH + tl.arange(0, EACH)[None, :]
        inside = there if len(there.shape) == 0 else there[:, None]
        tile = tl.load(row + at, mask=inside, other=0, eviction_policy=policy)
        words = columns(tile, unit.shape[0], 4) if BITS == 8 else tl.split(tile)
    elif BITS == 2:
        words = (tl.load(row + unit, mask=there, other=0, eviction_policy=policy),)
    else:
        first = unit * BITS // 2
        words = ()
        for i in tl.static_range((BITS + 1) // 2):
            words += (tl.load(row + first + i, mask=there, other=0, eviction_policy=policy),)
    return words


@triton.jit
def _placed(word, AT: tl.constexpr, BITS: tl.constexpr, FORM: tl.constexpr):
    """Return the float of a code at bit AT of the lower 23 bits of a word."""
    MASK: tl.constexpr = ((1 << BITS) - 1) << AT
    EXPONENT: tl.constexpr = (150 - AT) << 23
    if PTX:
        mask, exponent = tl.full(word.shape, MASK, tl.int32), tl.full(word.shape, EXPONENT, tl.int32)
        value = tl.inline_asm_elementwise(PLACE, "=f,r,n,n", [word, mask, exponent], tl.float32, is_pure=True, pack=1)
    else:
        value = ((word & MASK) | EXPONENT).to(tl.float32, bitcast=True)
    return value - (2.0 ** (23 - AT) + centre_of(BITS, FORM))


@triton.jit
def _widened(pair):
    """Return two halves as floats."""
    if PTX:
        low, high = tl.inline_asm_elementwise(WIDEN, "=f,=f,r", [pair], (tl.float32,) * 2, is_pure=True, pack=1)
    else:
        low, high = half_value(pair & 0xFFFF), half_value(pair >> 16)
    return low, high


@triton.jit
def _fp8_values(word, HOPPER: tl.constexpr):
    """Return four codes of FP8 as floats; over 2**8 where the GPU has no conversion."""
    if HOPPER:
        first, second = tl.inline_asm_elementwise(FP8, "=r,=r,r", [word], (tl.int32,) * 2, is_pure=True, pack=1)
        a, b = _widened(first)
        c, d = _widened(second)
    else:
        a, c = _widened(((word << 7) & 0x3F803F80) | ((word << 8) & 0x80008000))
        b, d = _widened(((word >> 1) & 0x3F803F80) | (word & 0x80008000))
    return a, b, c, d


@triton.jit
def _fp4_values(word):
    """Return eight codes of four-bit floats, over 2**14: first as bytes, each the upper byte of a half."""
    even = ((word << 1) & 0x0E0E0E0E) | ((word << 4) & 0x80808080)
    odd = ((word >> 3) & 0x0E0E0E0E) | (word & 0x80808080)
    v0, v4 = _widened((even << 8) & 0xFF00FF00)
    v1, v5 = _widened((odd << 8) & 0xFF00FF00)
    v2, v6 = _widened(even & 0xFF00FF00)
    v3, v7 = _widened(odd & 0xFF00FF00)
    return v0, v1, v2, v3, v4, v5, v6, v7


@triton.jit
def _iq4_values(word, table):
    """Return eight levels of IQ4."""
    found = ()
    if PTX:
        halves = tl.inline_asm_elementwise(IQ4, "=&r,=&r,r", [word], (tl.int32,) * 2, is_pure=True, pack=1)
        for j in tl.static_range(8):
            value = tl.inline_asm_elementwise(OCTETS[j % 4], "=f,r", [halves[j // 4]], tl.float32, is_pure=True, pack=1)
            found += (value - (2.0**23 + 128),)
    else:
        for j in tl.static_range(8):
            found += (tl.load(table + ((word >> (4 * j)) & 15)),)
    return found


@triton.jit
def _cut(words, AT: tl.constexpr, SIZE: tl.constexpr):
    """Return SIZE bits of a stream of words from bit AT on, with arbitrary bits above."""
    word = words[AT // 32]
    if AT % 32 != 0:
        word = word >> (AT % 32)
        if AT % 32 + SIZE > 32:
            word |= words[AT // 32 + 1] << (32 - AT % 32)
    return word


@triton.jit
def _bits_value(words, j: tl.constexpr, BITS: tl.constexpr, FORM: tl.constexpr):
    """Return code j of a stream; one extracted word covers as many codes as fit the mantissa of a float."""
    ROOM: tl.constexpr = 23 // BITS
    SOME: tl.constexpr = min(ROOM, 16 - j // ROOM * ROOM)
    return _placed(_cut(words, j // ROOM * ROOM * BITS, SOME * BITS), j % ROOM * BITS, BITS, FORM)


@triton.jit
def unit_values(words, unit, table, BITS: tl.constexpr, FORM: tl.constexpr, HOPPER: tl.constexpr):
    """Return the floats of a unit's 16 codes, to be multiplied by `unit_shift`."""
    stream = ()
    for i in tl.static_range(len(words)):
        stream += (words[i].to(tl.uint32, bitcast=True),)  # type: ignore[assignment]
    if BITS == 3 or BITS == 5:
        # every second unit begins mid-word
        aligned = stream
        stream = ()
        for i in tl.static_range(len(words)):
            later = aligned[i] >> 16
            if i + 1 < len(words):
                later |= aligned[i + 1] << 16
            stream += (tl.where(unit % 2 == 1, later, aligned[i]),)  # type: ignore[assignment]
    found = ()
    if FORM == "fp8":
        for i in tl.static_range(4):
            found += _fp8_values(stream[i], HOPPER)
    elif FORM == "mxfp4" or FORM == "nvfp4":
        found = _fp4_values(stream[0]) + _fp4_values(stream[1])  # type: ignore[misc]
    elif FORM == "iq4":
        found = _iq4_values(stream[0], table) + _iq4_values(stream[1], table)  # type: ignore[misc]
    else:
        for j in tl.static_range(16):
            found += (_bits_value(stream, j, BITS, FORM),)  # type: ignore[assignment]
    return found


@triton.jit
def _inputs(x, unit, there, UNITS: tl.constexpr):
    """Load the 16 inputs of units in float32, and their sum."""
    WIDE: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    found, total = (), tl.zeros([UNITS], tl.float32)
    for part in tl.static_range(16 // WIDE):
        at = unit[:, None] * 16 + (WIDE * part + tl.arange(0, WIDE))[None, :]
        tile = tl.load(x + at) if there is None else tl.load(x + at, mask=there[:, None], other=0.0)
        found += columns(tile.to(tl.float32), UNITS, WIDE)
    for j in tl.static_range(16):
        total += found[j]
    return found, total


@triton.jit
def _requested(
    codes, row, rows, unit, there, K, BITS: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr, ROWS: tl.constexpr
):
    """Load words, scale and bias of units of every row; past the end, the last row again."""
    found = ()
    for r in tl.static_range(ROWS):
        line = tl.minimum(row + r, rows - 1).to(tl.int64)
        if is_grid(FORM):
            found += (grid_words(codes.packed, codes.scales, line, unit, there, K, FORM),)  # type: ignore[assignment]
        else:
            at = line * (K // GROUP) + unit * 16 // GROUP
            words = unit_words(codes.packed + line * (K // 32 * BITS), unit, there, BITS)
            scale, bias = scale_value(codes.scales, at, there, FORM), bias_value(codes.biases, at, there, FORM)
            found += ((words, scale, bias),)  # type: ignore[assignment]
    return found


@triton.jit
def joined(several, FIRST: tl.constexpr, STEP: tl.constexpr, COUNT: tl.constexpr):
    """Join every STEP-th of several tensors from FIRST on along new axes; COUNT is a power of two."""
    if STEP == COUNT:
        found = several[FIRST]
    else:
        found = tl.join(joined(several, FIRST, 2 * STEP, COUNT), joined(several, FIRST + STEP, 2 * STEP, COUNT))
    return found


@triton.jit
def added(totals, UNITS: tl.constexpr, ROWS: tl.constexpr):
    """Return the sums over all threads, [ROWS]."""
    return tl.sum(tl.reshape(joined(totals, 0, 1, ROWS), [UNITS, ROWS]), 0)


@triton.jit
def row_sums(
    x, codes, row, rows, K, BITS: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr, EVEN: tl.constexpr,
    UNITS: tl.constexpr, ROWS: tl.constexpr, HOPPER: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Multiply x by ROWS rows of a weight from `row` on; float32 [ROWS].

    The codes of the next step are requested before those of this one are multiplied.

    codes   see `Codes`
    EVEN    K is a multiple of 16 * UNITS; UNITS, one per thread
    EARLY   the previous kernel may still write x
    """
    units = K // 16
    unit = tl.arange(0, UNITS)
    next = _requested(codes, row, rows, unit, units > 0 if EVEN else unit < units, K, BITS, GROUP, FORM, ROWS)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    totals = (tl.zeros([UNITS], tl.float32),) * ROWS
    for start in range(0, units, UNITS):
        unit = start + tl.arange(0, UNITS)
        later, mine = unit + UNITS, next
        next = _requested(codes, row, rows, later, start + UNITS < units if EVEN else later < units, K, BITS, GROUP, FORM, ROWS)
        xs, sum_x = _inputs(x, unit, None if EVEN else unit < units, UNITS)
        new = ()
        for r in tl.static_range(ROWS):
            if is_grid(FORM):
                values, scale = grid_values(mine[r], unit, codes.biases, FORM), grid_scale(mine[r], unit, FORM)
            else:
                words, scale, bias = mine[r]
                values = unit_values(words, unit, codes.biases, BITS, FORM, HOPPER)
            part = values[0] * xs[0]
            for j in tl.static_range(1, 16):
                part = tl.fma(values[j], xs[j], part)
            total = totals[r] + part * unit_shift(FORM, HOPPER) * scale
            if FORM == "affine":
                total += sum_x * bias
            new += (total,)  # type: ignore[assignment]
        totals = new
    return added(totals, UNITS, ROWS)


def program_shape(rows: int, weight: QTensor, device: torch.device) -> dict[str, int | bool]:
    """Choose units, rows and warps per program: fewer rows where the GPU would not be filled."""
    width, many = weight.shape[-1], rows >= MANY_ROWS
    block, warps = SHAPES.get((form_of(weight), weight.bits), DEFAULT_SHAPE)[many]
    warps = min(warps, power_of_two(cdiv(width, 32 * UNIT)))
    block = max(1, min(block, power_of_two(rows // (LEAST_PROGRAMS * multiprocessors(device)) or 1)))
    even = width % (32 * warps * UNIT) == 0
    return {"EVEN": even, "UNITS": 32 * warps, "ROWS": block, "HOPPER": launches_early(device), "num_warps": warps}
