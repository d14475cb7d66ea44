"""Conversions of FP8 codes (e4m3) by shifts and masks: to half precision, and to float32.

The exponent of e4m3 has four bits, so a code whose bits are moved to the place of a wider format's is too small by a power of
two: 2**8 in half precision, 2**120 in float32. Activations include that factor, or a product restores it.
"""

from llvmlite import ir

from auraflux.ops.linear.cpu.forms import BLOCK, BYTES, FLOATS, HALVES, INTS
from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.vectors import I16, load, pick, splat, vector
from auraflux.quant.packing import CHUNK


def by_parity(b: ir.IRBuilder, word: ir.Value) -> list[ir.Value]:
    """Convert four e4m3 codes of each row, divided by 256: inputs 0 and 2 of half of the rows and of the others, then 1 and 3.

    Bits moved into half precision are the code over 256, denormals too, and one instruction converts that to float32. `eighth`
    multiplies denormal float32 numbers, for which x86 processors take about 150 cycles.
    """
    pairs = vector(I16, HALVES.count)
    high = b.bitcast(word, pairs)
    found = []
    for codes in (b.shl(high, splat(pairs, 8)), high):
        # the sign stays in place; its copy is at the extra exponent bit
        moved = b.bitcast(b.and_(b.ashr(codes, splat(pairs, 1)), splat(pairs, 0xBF80 - 0x10000)), HALVES)
        found += [b.fpext(pick(b, moved, moved, list(range(i, i + BLOCK))), FLOATS) for i in (0, BLOCK)]
    return found


def by_input(b: ir.IRBuilder, pairs: list[ir.Value]) -> list[ir.Value]:
    """Rearrange the results of `by_parity` to one vector for each of the four inputs."""
    even = range(0, 2 * BLOCK, 2)
    return [pick(b, pairs[2 * (i % 2)], pairs[2 * (i % 2) + 1], [n + i // 2 for n in even]) for i in range(4)]


def half_codes(b: ir.IRBuilder, codes: ir.Value) -> list[ir.Value]:
    """Load the e4m3 codes of one chunk, divided by 256: 16 vectors of half precision.

    The first has four inputs of half of the rows, the second those of the others, the third the next four inputs, and so on.
    """
    wide, found = vector(I16, HALVES.count), []
    for word in range(CHUNK // 4):
        octets = b.bitcast(load(b, codes, 4 * BLOCK * word, INTS), BYTES)
        for first in (0, HALVES.count):
            some = pick(b, octets, octets, list(range(first, first + HALVES.count)))
            # the sign's copy is at the extra exponent bit
            moved = b.and_(b.shl(b.sext(some, wide), splat(wide, 7)), splat(wide, 0xBFFF - 0x10000))
            found.append(b.bitcast(moved, HALVES))
    return found


def eighth(b: ir.IRBuilder, word: ir.Value, byte: int) -> ir.Value:
    """Widen e4m3: a product adjusts the exponent bias from 7 to 127, which is correct for denormals.

    With `Form.raw` the activations include that factor, and the result is over 2**120.
    """
    top = b.shl(word, splat(INTS, 24 - 8 * byte)) if byte < 3 else word
    # the sign stays in place; the copies of it above the exponent are masked out
    moved = b.and_(b.ashr(top, splat(INTS, 4)), splat(INTS, 0x87F00000))
    found = b.bitcast(moved, FLOATS)
    return found if ISA.denormals else b.fmul(found, splat(FLOATS, 2.0**120))


def eight_floats(b: ir.IRBuilder, octets: ir.Value) -> list[ir.Value]:
    """Convert eight e4m3 codes to floats over 2**120, four at a time, by shifts alone."""
    wide = vector(I16, 8)
    moved = b.and_(b.shl(b.sext(octets, wide), splat(wide, 4)), splat(wide, 0x87FF - 0x10000))
    places = [[first + n // 2 + (8 if n % 2 else 0) for n in range(8)] for first in (0, 4)]
    return [b.bitcast(pick(b, splat(wide, 0), moved, each), FLOATS) for each in places]
