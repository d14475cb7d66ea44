"""Rows of codes times one vector in bf16 in Triton, in integers: a thread has 32 codes of each of a program's rows.

The arithmetic is in `integer_products.py`. As in `dot_codes.py`, every tensor has one element per thread, or one row of a tile
per thread, and nothing is exchanged before the final sums. The width is a constant: rows of a program are then at constant
offsets, and one address covers the loads of all.
"""

import triton
import triton.language as tl

from auraflux.ops.gpu.blocks.dependent_launch import gdc_launch_dependents, gdc_wait
from auraflux.ops.gpu.blocks.dot_codes import added, columns
from auraflux.ops.gpu.blocks.integer_products import centre_of_bytes, integer_inputs, integer_sums, integer_totals, level_tables


@triton.jit
def _at(base, place, WIDE: tl.constexpr):
    """Return pointers to 1, 2 or 4 elements per thread."""
    return base + place if WIDE == 1 else (base + place)[:, None] + tl.arange(0, WIDE)[None, :]


@triton.jit
def _elements(at, there, WIDE: tl.constexpr):
    """Load the elements of `_at`; a cache policy would cost five more instructions per load."""
    tile = tl.load(at) if there is None else tl.load(at, there if WIDE == 1 else there[:, None], 0)
    if WIDE == 1:
        found = (tile,)
    elif WIDE == 2:
        found = tl.split(tile)
    else:
        found = columns(tile, tile.shape[0], WIDE)
    return found


@triton.jit
def _requested(
    codes, row, unit, there, K: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Load words, scales and biases of units of every row: the address common to all rows, then a constant offset."""
    WIDE: tl.constexpr = 1 if BITS % 2 == 1 else 2 if BITS % 4 == 2 else 4
    PER: tl.constexpr = 2 if GROUP == 16 else 1  # scales of a unit
    line = row.to(tl.int64)
    words_at = _at(codes.packed + line * (K // 32 * BITS), unit * BITS, WIDE)
    place = unit * 32 // GROUP if GROUP > 32 else unit * PER
    scales_at = _at(codes.scales + line * (K // GROUP), place, PER)
    biases_at = _at(codes.biases + line * (K // GROUP), place, PER) if FORM == "affine" else scales_at
    found = ()
    for r in tl.static_range(ROWS):
        words, scales, biases = (), (), ()
        for part in tl.static_range(BITS // WIDE):
            words += _elements(words_at + (r * (K // 32 * BITS) + part * WIDE), there, WIDE)
        scales = _elements(scales_at + r * (K // GROUP), there, PER)
        if FORM == "affine":
            biases = _elements(biases_at + r * (K // GROUP), there, PER)
        found += ((words, scales, biases),)  # type: ignore[assignment]
    return found


@triton.jit
def _request_inputs(x, unit, there, UNITS: tl.constexpr):
    """Load the inputs of units, two to a word."""
    words, base = (), x.to(tl.pointer_type(tl.int32))
    for part in tl.static_range(4):
        at = unit[:, None] * 16 + (4 * part + tl.arange(0, 4))[None, :]
        tile = tl.load(base + at) if there is None else tl.load(base + at, mask=there[:, None], other=0)
        words += columns(tile, UNITS, 4)
    return words


@triton.jit
def _inputs(words, BITS: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr, UNITS: tl.constexpr):
    """Return the integers of units' inputs, their power of two, initial sums, and the sums of inputs."""
    pairs, factor = integer_inputs(words, BITS, FORM)
    CENTRE: tl.constexpr = centre_of_bytes(BITS, FORM)
    starts, sums = (), ()
    if FORM == "affine" or CENTRE != 0:
        totals = integer_totals(pairs, BITS, FORM, GROUP)
    for n in tl.static_range(2 if GROUP == 16 else 1):
        start = tl.zeros([UNITS], tl.int32)
        if CENTRE != 0:
            start -= totals[n] * CENTRE
        starts += (start,)  # type: ignore[assignment]
        if FORM == "affine":
            sums += (totals[n].to(tl.float32) * factor,)  # type: ignore[assignment]
    return pairs, factor, starts, sums


@triton.jit
def _accumulate(
    totals, mine, inputs, tables, BITS: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr, UNITS: tl.constexpr
):  # fmt: skip
    """Add the products of units to the sums of every row."""
    pairs, factor, starts, sums_x = _inputs(inputs, BITS, GROUP, FORM, UNITS)
    new = ()
    for r in tl.static_range(len(totals)):
        words, scales, biases = mine[r]
        sums, total = integer_sums(words, pairs, starts, tables, BITS, FORM, GROUP), totals[r]
        for n in tl.static_range(len(scales)):
            total = tl.fma(sums[n].to(tl.float32) * factor, scales[n].to(tl.float32), total)
            if FORM == "affine":
                total = tl.fma(sums_x[n], biases[n].to(tl.float32), total)
        new += (total,)  # type: ignore[assignment]
    return new


@triton.jit
def integer_row_sums(
    x, codes, row, rows, K: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr, EVEN: tl.constexpr,
    UNITS: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Multiply x by ROWS rows of a weight from `row` on, all of which exist; float32 [ROWS].

    Codes and inputs of the next step are requested before those of this one are multiplied.

    codes   see `Codes`
    EVEN    K is a multiple of 32 * UNITS; UNITS, one per thread
    EARLY   the previous kernel may still write x
    """
    units: tl.constexpr = K // 32
    LAST: tl.constexpr = (units - 1) // UNITS * UNITS
    unit = tl.arange(0, UNITS)
    next = _requested(codes, row, unit, None if EVEN else unit < units, K, BITS, GROUP, FORM, ROWS)
    # always zero, but the compiler does not know it
    tables = level_tables(rows >> 31, FORM, UNITS)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    totals = (tl.zeros([UNITS], tl.float32),) * ROWS
    next_x = _request_inputs(x, unit, None if EVEN else unit < units, UNITS)
    for start in range(0, LAST, UNITS):
        later = start + UNITS + tl.arange(0, UNITS)
        mine, inputs = next, next_x
        next_x = _request_inputs(x, later, None if EVEN else later < units, UNITS)
        next = _requested(codes, row, later, None if EVEN else later < units, K, BITS, GROUP, FORM, ROWS)
        totals = _accumulate(totals, mine, inputs, tables, BITS, GROUP, FORM, UNITS)
    totals = _accumulate(totals, next, next_x, tables, BITS, GROUP, FORM, UNITS)
    return added(totals, UNITS, ROWS)
