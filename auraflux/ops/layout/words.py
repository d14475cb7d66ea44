"""LLVM IR of weight layouts: vectors hold the same 32-bit word of `ISA.lanes` rows."""

from llvmlite import ir

from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.vectors import I32, I64, load, pick, splat, spread, vector
from auraflux.quant.packing import LANE_FIELDS

LANES = ISA.lanes
WORDS = vector(I32, LANES)
FLOATS = ISA.floats
HALF_EXPONENT = 0x7C00
RAISED = 2.0**112  # adjusts the exponent bias of float16 to that of float32, also for denormals


def columns(b: ir.IRBuilder, rows: ir.Value, offset: ir.Value, count: int) -> list[ir.Value]:
    """Load `count` adjacent words of every row.

    rows    address of LANES int64 addresses
    offset  of the first word in bytes
    """
    starts = [b.add(load(b, rows, 8 * lane, I64), offset) for lane in range(LANES)]
    found: list[ir.Value] = []
    while len(found) < count:
        size = min(LANES, 1 << (count - len(found)).bit_length() - 1)
        found += _transposed(b, [load(b, start, 4 * len(found), vector(I32, size)) for start in starts])
    return found


def _transposed(b: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """Transpose vectors by repeated interleaving, which ends with all words of the first column, then of the second …"""
    count = rows[0].type.count
    while len(rows) > 1:
        half, size = len(rows) // 2, rows[0].type.count
        order = [i // 2 + i % 2 * size for i in range(2 * size)]
        rows = [pick(b, rows[i], rows[i + half], order) for i in range(half)]
    return [pick(b, rows[0], rows[0], list(range(i * LANES, (i + 1) * LANES))) for i in range(count)]


def column(b: ir.IRBuilder, rows: ir.Value, offset: ir.Value, kind: ir.Type) -> ir.Value:
    """Load one byte or half word of every row, zero-extended."""
    found = ir.Constant(WORDS, ir.Undefined)
    for lane in range(LANES):
        number = load(b, load(b, rows, 8 * lane, I64), offset, kind)
        found = b.insert_element(found, b.zext(number, I32), ir.Constant(I32, lane))
    return found


def valid_lanes(b: ir.IRBuilder, count: ir.Value) -> ir.Value:
    """Return a mask of the first `count` lanes."""
    numbers = ir.Constant(WORDS, list(range(LANES)))
    return b.sext(b.icmp_signed("<", numbers, spread(b, b.trunc(count, I32), LANES)), WORDS)


def masked(b: ir.IRBuilder, words: ir.Value, octet: int) -> ir.Value:
    """Keep the bits of `octet` in every byte."""
    return b.and_(words, splat(WORDS, octet * 0x01010101))


def shifted(b: ir.IRBuilder, words: ir.Value, right: int) -> ir.Value:
    """Shift right, or left where `right` is negative."""
    if right == 0:
        return words
    return b.lshr(words, splat(WORDS, right)) if right > 0 else b.shl(words, splat(WORDS, -right))


def field(b: ir.IRBuilder, words: ir.Value, low: int, bits: int) -> ir.Value:
    """Return the `bits` bits of every byte that begin at bit `low`."""
    return masked(b, shifted(b, words, low), 2**bits - 1)


def packed_chunk(b: ir.IRBuilder, codes: list[ir.Value], bits: int, in_lanes: bool) -> list[ir.Value]:
    """Pack the codes of a chunk, four in the bytes of each word, to `bits` words; in the lane layout or as a bit stream."""
    if bits == 8:
        return codes
    if bits in LANE_FIELDS:
        return lane_words(b, codes, bits) if in_lanes else _stream(b, codes, bits)
    quads = [_adjacent(b, four, bits) for four in codes]
    joined, each = [], 8 // bits
    for i in range(0, len(quads), each):
        word = quads[i]
        for j in range(1, each):
            word = b.or_(word, shifted(b, quads[i + j], -4 * bits * j))
        joined.append(word)
    return joined


def lane_words(b: ir.IRBuilder, codes: list[ir.Value], bits: int) -> list[ir.Value]:
    """Distribute codes over the bit fields of the lane layout, see `quant/packing.py`."""
    made: list[ir.Value | None] = [None] * bits
    for four, fields in zip(codes, LANE_FIELDS[bits], strict=True):
        left = bits
        for each in fields:
            left -= each.size
            piece = four if len(fields) == 1 else masked(b, four, 2**each.size - 1 << left)
            piece, before = shifted(b, piece, left - each.low), made[each.word]
            made[each.word] = piece if before is None else b.or_(before, piece)
    return made


def _adjacent(b: ir.IRBuilder, four: ir.Value, bits: int) -> ir.Value:
    """Move four codes, one in each byte, to the lowest bits of their word."""
    one, two = 2**bits - 1, 2 ** (2 * bits) - 1
    high = b.and_(shifted(b, four, 8 - bits), splat(WORDS, (one << bits) * 0x10001))
    pair = b.or_(b.and_(four, splat(WORDS, one * 0x10001)), high)
    high = b.and_(shifted(b, pair, 16 - 2 * bits), splat(WORDS, two << 2 * bits))
    return b.or_(b.and_(pair, splat(WORDS, two)), high)


def _stream(b: ir.IRBuilder, codes: list[ir.Value], bits: int) -> list[ir.Value]:
    made: list[ir.Value | None] = [None] * bits
    for number, four in enumerate(codes):
        quad, (word, shift) = _adjacent(b, four, bits), divmod(4 * bits * number, 32)
        for place, right in ((word, -shift), (word + 1, 32 - shift)):
            # the second word gets what the first one has no room for
            if place == word or shift + 4 * bits > 32:
                piece, before = shifted(b, quad, right), made[place]
                made[place] = piece if before is None else b.or_(before, piece)
    return made


def separate_codes(b: ir.IRBuilder, words: list[ir.Value], bits: int) -> list[ir.Value]:
    """Take the codes of a chunk from a bit stream: eight vectors with four codes, one in each byte of a word."""
    found = []
    for number in range(8):
        word, shift = divmod(4 * bits * number, 32)
        quad = shifted(b, words[word], shift)
        if shift + 4 * bits > 32:
            quad = b.or_(quad, shifted(b, words[word + 1], shift - 32))
        pair = 2 ** (2 * bits) - 1
        quad = b.or_(b.and_(quad, splat(WORDS, pair)), b.and_(shifted(b, quad, 2 * bits - 16), splat(WORDS, pair << 16)))
        found.append(masked(b, b.or_(b.and_(quad, splat(WORDS, (2**bits - 1) * 0x10001)), _second(b, quad, bits)), 2**bits - 1))
    return found


def _second(b: ir.IRBuilder, quad: ir.Value, bits: int) -> ir.Value:
    """Return the second code of each half word, moved to its upper byte."""
    return b.and_(shifted(b, quad, bits - 8), splat(WORDS, ((2**bits - 1) << 8) * 0x10001))


def widened_halves(b: ir.IRBuilder, halves: ir.Value) -> ir.Value:
    """Convert float16 numbers in the low half of each word to float32, exactly; NaN stays NaN."""
    size = b.and_(halves, splat(WORDS, 0x7FFF))
    wide = b.fmul(b.bitcast(shifted(b, size, -13), FLOATS), splat(FLOATS, RAISED))
    finite = b.icmp_unsigned("<", size, splat(WORDS, HALF_EXPONENT))
    infinite = b.or_(shifted(b, size, -13), splat(WORDS, 0x7F800000))
    bits = b.select(finite, b.bitcast(wide, WORDS), infinite)
    return b.bitcast(b.or_(bits, shifted(b, b.and_(halves, splat(WORDS, 0x8000)), -16)), FLOATS)


def narrowed(b: ir.IRBuilder, floats: ir.Value) -> ir.Value:
    """Convert float32 numbers that float16 can represent, in the low half of each word."""
    bits = b.bitcast(floats, WORDS)
    size = b.and_(bits, splat(WORDS, 0x7FFFFFFF))
    normal = b.sub(shifted(b, size, 13), splat(WORDS, 112 << 10))
    denormal = b.fptosi(b.fmul(b.bitcast(size, FLOATS), splat(FLOATS, 2.0**24)), WORDS)
    is_normal = b.icmp_unsigned(">=", size, splat(WORDS, 113 << 23))
    sign = b.and_(shifted(b, bits, 16), splat(WORDS, 0x8000))
    return b.or_(b.select(is_normal, normal, denormal), sign)
