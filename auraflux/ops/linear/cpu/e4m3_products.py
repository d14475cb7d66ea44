"""Sums of products of FP8 codes (e4m3) with activations.

On x86 codes are converted to float32 by way of half precision. On ARM they are multiplied in half precision, or in exact
products as float32 with their own exponents.
"""

from auraflux.ops.linear.cpu.e4m3 import by_parity, eight_floats, half_codes
from auraflux.ops.linear.cpu.forms import BLOCK, BYTES, FLOATS, HALVES, INTS
from auraflux.ops.linear.cpu.unpack import chunks
from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.vectors import F32, I64, at, call, fma, load, pick, prefetch, splat, spread, sum_four, variable, vector
from auraflux.quant.packing import CHUNK


def dots_by_parity(b, form, unpacked, codes, acts, begin=None):
    """Sum products directly from codes, two inputs of a row in neighbouring lanes.

    Four sums of each row, of every fourth input, are added in pairs, like those of unpacked rows.
    """
    dots = [variable(b, splat(FLOATS, 0.0)) for _ in acts]
    even = list(range(0, 2 * BLOCK, 2))
    with chunks(b, form) as chunk:
        code_at = b.add(codes, b.mul(chunk, at(4 * BLOCK * form.bits)))
        if len(acts) == 1:
            # a chunk at a time: the lines of a group at once would wait for each other
            prefetch(b, [b.add(code_at, at(ISA.prefetch_nbytes))], 4 * BLOCK * form.bits)
        where = [b.add(address, b.mul(chunk, at(4 * CHUNK))) for address in acts]
        sums = [[splat(FLOATS, 0.0)] * 4 for _ in acts]
        for word in range(form.bits):
            values = by_parity(b, load(b, code_at, 4 * BLOCK * word, INTS))
            for t, address in enumerate(where):
                pairs = [spread(b, load(b, address, 16 * word + 8 * i, I64), BLOCK // 2) for i in (0, 0, 1, 1)]
                x = [b.bitcast(pair, FLOATS) for pair in pairs]
                sums[t] = [fma(b, *each) for each in zip(values, x, sums[t], strict=True)]
        for (low, high, odd_low, odd_high), total in zip(sums, dots, strict=True):
            both = [b.fadd(low, odd_low), b.fadd(high, odd_high)]
            found = b.fadd(pick(b, *both, even), pick(b, *both, [n + 1 for n in even]))
            b.store(b.fadd(b.load(total), found), total)
    return [[b.load(dot) for dot in dots]]


def dots_of_halves(b, form, unpacked, codes, acts, begin=None):
    """Sum products in half precision, over a group.

    A row has eight sums, each of one input of four in every other word. They are added in pairs, twice before the conversion to
    float32.
    """
    found = []
    for first in range(0, len(acts), 4):
        # registers hold the sums of four tokens
        found += _half_sums(b, form, unpacked, codes, acts[first : first + 4])
    return [found]


def _half_sums(b, form, unpacked, codes, acts):
    dots = [[variable(b, splat(HALVES, 0.0)) for _ in range(4)] for _ in acts]
    with chunks(b, form) as chunk:
        if unpacked:
            code_at = b.add(codes, b.mul(chunk, at(2 * BLOCK * CHUNK)))
            values = [load(b, code_at, 4 * BLOCK * i, HALVES) for i in range(CHUNK // 2)]
        else:
            values = half_codes(b, b.add(codes, b.mul(chunk, at(BLOCK * CHUNK))))
        where = [b.add(address, b.mul(chunk, at(4 * CHUNK))) for address in acts]
        for slots, address in zip(dots, where, strict=True):
            sums = [b.load(slot) for slot in slots]
            for i, v in enumerate(values):
                x = load(b, address, 16 * (i // 2), HALVES)
                sums[i % 4] = call(b, "llvm.fma.v8f16", HALVES, v, x, sums[i % 4])
            for value, slot in zip(sums, slots, strict=True):
                b.store(value, slot)
    even = list(range(0, 2 * HALVES.count, 2))
    odd = [n + 1 for n in even]
    found = []
    for slots in dots:
        sums = [b.load(slot) for slot in slots]
        both = [b.fadd(sums[i], sums[i + 2]) for i in range(2)]
        wide = b.fpext(b.fadd(pick(b, *both, even), pick(b, *both, odd)), vector(F32, HALVES.count))
        found.append(b.fadd(pick(b, wide, wide, even[:BLOCK]), pick(b, wide, wide, odd[:BLOCK])))
    return found


def dots_of_eighths(b, form, unpacked, codes, acts, begin=None):
    """Sum products directly from e4m3 codes, without rescaling them.

    Lanes are the four inputs of a row that share a word: the sums that `_add_products` adds in pairs.
    """
    dots = [variable(b, splat(FLOATS, 0.0)) for _ in acts]
    with chunks(b, form) as chunk:
        code_at = b.add(codes, b.mul(chunk, at(4 * BLOCK * form.bits)))
        where = [b.add(address, b.mul(chunk, at(4 * CHUNK))) for address in acts]
        sums = [[splat(FLOATS, 0.0)] * BLOCK for _ in acts]
        for word in range(form.bits):
            octets = b.bitcast(load(b, code_at, 4 * BLOCK * word, INTS), BYTES)
            pieces = (pick(b, octets, octets, list(range(first, first + 8))) for first in (0, 8))
            rows = [row for eight in pieces for row in eight_floats(b, eight)]
            for t, address in enumerate(where):
                x = load(b, address, 16 * word, FLOATS)
                sums[t] = [fma(b, row, x, total) for row, total in zip(rows, sums[t], strict=True)]
        for found, total in zip(sums, dots, strict=True):
            b.store(b.fadd(b.load(total), sum_four(b, found)), total)
    return [[b.load(dot) for dot in dots]]
