"""Rows of an embedding table on CPU: codes are dequantized in place, in any row layout."""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from auraflux.ops.linear.cpu.forms import BLOCK, Form
from auraflux.ops.linear.cpu.grid_codes import of_form
from auraflux.ops.linear.cpu.unpack import unpack_rows, unpacked_places, widen_scales
from auraflux.ops.linear.reference import Weight
from auraflux.ops.simd.jit import (
    Kernel,
    arguments,
    empty,
    floats,
    halves,
    int32s,
    int64s,
    jit,
    octets,
    share,
    threads,
    workspace,
)
from auraflux.ops.simd.math import float_of_bits
from auraflux.quant import QTensor, affine, levels, mxfp4
from auraflux.quant.packing import CHUNK, LANE_FIELDS
from auraflux.quant.super_blocks import SIZE, ZERO, SuperBlock

PARALLEL_FROM = 1 << 16  # elements; below this, waking the threads costs more than the work

BF16, F16, F32, E8M0, NIBBLES, BYTES, STEPS, FP8 = range(8)
SCALES = {torch.bfloat16: BF16, torch.float16: F16, torch.int16: F16, torch.float32: F32, torch.uint8: E8M0}
# value of a code before its group's scale
LEVELS = {
    **{("affine", bits): torch.arange(2.0**bits) for bits in affine.BITS},
    ("mxfp4", mxfp4.BITS): mxfp4.levels(),
    ("fp8", 8): torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float(),
    **{("centred", bits): levels.levels("centred", bits) for bits in levels.CENTRED_BITS},
    ("q4_0", 4): levels.levels("q4_0", 4),
    **{(kind, 4): found for kind, found in levels.FOUR_BITS.items()},
}
RAISED = np.float32(2.0**112)
SMALLEST = np.uint32(1 << 22)


@jit
def _half(bits):
    """Widen a float16: a product adjusts the exponent bias from 15 to 127, which is correct for denormals."""
    wide = np.uint32(bits)
    size = float_of_bits((wide & np.uint32(0x7FFF)) << np.uint32(13)) * RAISED
    if wide & np.uint32(0x7C00) == np.uint32(0x7C00):
        size = float_of_bits(np.uint32(0x7F800000) | ((wide & np.uint32(0x3FF)) << np.uint32(13)))
    return -size if wide & np.uint32(0x8000) else size


@jit
def _scale(address, kind, i):
    if kind == BF16:
        return float_of_bits(np.uint32(halves(address, i + 1)[i]) << np.uint32(16))
    if kind == F16:
        return _half(halves(address, i + 1)[i])
    if kind == F32:
        return floats(address, i + 1)[i]
    exponent = np.uint32(octets(address, i + 1)[i])
    if exponent == np.uint32(255):
        return np.float32(np.nan)
    return float_of_bits(exponent << np.uint32(23) if exponent else SMALLEST)


@jit
def _of_super_block(words, kind, lanes, group, groups):
    """Return scale and bias of a super-block's group; its words have a stride of `lanes`, see `quant/super_blocks.py`."""
    first = np.uint32(words[0])
    word = np.uint32(words[(1 + group // 4) * lanes])
    step = word >> np.uint32(8 * (group % 4)) & np.uint32(255)
    if kind == FP8:
        # its bits are those of half precision with a smaller exponent
        wide = (step & np.uint32(127)) << np.uint32(7) | (step & np.uint32(128)) << np.uint32(8)
        return _half(wide) * np.float32(256) * float_of_bits(first), np.float32(0)
    if kind == STEPS:
        return float_of_bits(first) * (np.float32(step) - np.float32(ZERO)), np.float32(0)
    scale, bias = _half(first & np.uint32(0xFFFF)), _half(first >> np.uint32(16))
    if kind == NIBBLES:
        return scale * np.float32(step & np.uint32(15)), bias * np.float32(step >> np.uint32(4))
    word = np.uint32(words[(1 + (groups + group) // 4) * lanes])
    return scale * np.float32(step), bias * np.float32(word >> np.uint32(8 * (group % 4)) & np.uint32(255))


@cache
def _places(bits: int, side_by_side: bool) -> Tensor:
    """Return the bit fields of a chunk's codes: for each field of a code its word, shift, mask and shift back.

    returns int32 [CHUNK, fields, 4]; codes with fewer fields have empty masks
    """
    rows = []
    for i in range(CHUNK):
        word, shift = divmod(i * bits, 32)
        if side_by_side and bits in LANE_FIELDS:
            pieces, left = LANE_FIELDS[bits][i // 4], bits
            row = []
            for piece in pieces:
                left -= piece.size
                row.append((piece.word, 8 * (i % 4) + piece.low, 2**piece.size - 1, left))
        else:
            here = min(bits, 32 - shift)
            row = [(word, shift, 2**here - 1, 0)]
            if here < bits:
                row.append((word + 1, 0, 2 ** (bits - here) - 1, here))
        rows.append(row)
    most = max(map(len, rows))
    return torch.tensor([row + [(0, 0, 0, 0)] * (most - len(row)) for row in rows], dtype=torch.int32)


@jit
def _code(codes, i, bits, lanes, places, pieces):
    """Return the i-th code of a row whose words have a stride of `lanes`."""
    first, code = (i // CHUNK) * bits, np.uint32(0)
    for p in range(i % CHUNK * pieces * 4, (i % CHUNK + 1) * pieces * 4, 4):
        word = np.uint32(codes[(first + places[p]) * lanes])
        code |= (word >> np.uint32(places[p + 1]) & np.uint32(places[p + 2])) << np.uint32(places[p + 3])
    return code


@jit
def _place_of(ids, long, place, lanes):
    """Return the block of an id's row and the row within it: `lanes` rows are interleaved element by element."""
    row = int64s(ids, place + 1)[place] if long else np.int64(int32s(ids, place + 1)[place])
    return row // lanes, row % lanes


@Kernel
def _rows(args, job, jobs):
    ids, long, packed, scales, biases, levels_at, kind, bits, group, lanes, width, places_at, pieces, count, target = arguments(
        args, 15
    )
    words, groups, levels = width * bits // 32, width // group, floats(levels_at, 1 << bits)
    places = int32s(places_at, 4 * CHUNK * pieces)
    for place in share(count, job, jobs):
        block, lane = _place_of(ids, long, place, lanes)
        codes = int32s(packed + 4 * (block * words * lanes + lane), words * lanes)
        out = floats(target + 4 * place * width, width)
        for g in range(groups):
            at = (block * groups + g) * lanes + lane
            scale, bias = _scale(scales, kind, at), _scale(biases, kind, at) if biases else np.float32(0)
            for i in range(g * group, g * group + group):
                out[i] = levels[_code(codes, i, bits, lanes, places, pieces)] * scale + bias


@Kernel
def _super_rows(args, job, jobs):
    """Dequantize rows of super-blocks: `each` words of a super-block take the place of scales."""
    ids, long, packed, scales, each, levels_at, kind, bits, group, lanes, width, places_at, pieces, count, target = arguments(
        args, 15
    )
    words, groups, levels = width * bits // 32, SIZE // group, floats(levels_at, 1 << bits)
    places = int32s(places_at, 4 * CHUNK * pieces)
    for place in share(count, job, jobs):
        block, lane = _place_of(ids, long, place, lanes)
        codes = int32s(packed + 4 * (block * words * lanes + lane), words * lanes)
        out = floats(target + 4 * place * width, width)
        for g in range(width // group):
            at = (block * (width // SIZE) + g // groups) * each * lanes + lane
            scale, bias = _of_super_block(int32s(scales + 4 * at, each * lanes), kind, lanes, g % groups, groups)
            for i in range(g * group, g * group + group):
                out[i] = levels[_code(codes, i, bits, lanes, places, pieces)] * scale + bias


@cache
def _grid_kernel(spec: Form) -> tuple[Kernel, int, Tensor]:
    """Return the look-up of rows of a grid, the scratch memory of a job for each input, and the place of unpacked values.

    All rows of a block are unpacked for one of them, as for products.
    """
    form, group, bits, words, zero = spec.text, spec.group, spec.bits, spec.words, spec.zero
    # of an input: unpacked bytes and scales; then the words and halves of a block
    unpacked_nbytes, scale_nbytes = BLOCK, -(-4 * BLOCK // group)
    code_nbytes, half_nbytes = -(-BLOCK * bits // 8), -(-2 * BLOCK * words // SIZE)
    nbytes = unpacked_nbytes + scale_nbytes + code_nbytes + half_nbytes
    unit = np.float32(of_form(spec).unit)

    @Kernel
    def rows(args, job, jobs):
        ids, long, packed, parts, lanes, width, places_at, count, target, space = arguments(args, 10)
        code_words, halves_each = width * bits // 32, width // SIZE * words
        unpacked = space + job * width * nbytes
        scales = unpacked + width * unpacked_nbytes
        codes_copy = scales + width * scale_nbytes
        halves_copy = codes_copy + width * code_nbytes
        places = int32s(places_at, CHUNK * BLOCK)
        for place in share(count, job, jobs):
            block, lane = _place_of(ids, long, place, lanes)
            codes, some = packed + 4 * code_words * block * lanes, parts + 2 * halves_each * block * lanes
            if lanes == 1:
                _repeat(int32s(codes, code_words), int32s(codes_copy, code_words * BLOCK), code_words)
                _repeat(halves(some, halves_each), halves(halves_copy, halves_each * BLOCK), halves_each)
                codes, some = codes_copy, halves_copy
            unpack_rows((form, codes, some, width // group, unpacked))
            widen_scales((form, codes, some, width // group, scales, scales))
            found, factors = octets(unpacked, width * BLOCK), floats(scales, width // group * BLOCK)
            out = floats(target + 4 * place * width, width)
            for i in range(width):
                value = np.int8(found[i // CHUNK * CHUNK * BLOCK + places[i % CHUNK * BLOCK + lane]]) - np.int8(zero)
                out[i] = np.float32(value) * (factors[i // group * BLOCK + lane] * unit)

    return rows, nbytes, unpacked_places(spec)


@jit
def _repeat(source, target, count):
    for i in range(count):
        for lane in range(BLOCK):
            target[i * BLOCK + lane] = source[i]


def _embed_grid(jobs: int, given: tuple[int, bool], table: QTensor, count: int, out: Tensor) -> None:
    grid, width = table.grid, table.shape[1]
    assert grid is not None
    rows, nbytes, places = _grid_kernel(Form(8, table.bits, table.group, table.kind, grid.halves))
    space = workspace(jobs * width * nbytes)
    rows(jobs, *given, *table.addresses[:2], table.lanes, width, places.data_ptr(), count, out.data_ptr(), space)


@Kernel
def _dense_rows(args, job, jobs):
    ids, long, table, nbytes, count, target = arguments(args, 6)
    for place in share(count, job, jobs):
        row, _ = _place_of(ids, long, place, 1)
        source, out = octets(table + row * nbytes, nbytes), octets(target + place * nbytes, nbytes)
        for i in range(nbytes):
            out[i] = source[i]


def _steps_of(form: SuperBlock) -> int:
    if not form.has_biases:
        return FP8 if form.has_floats else STEPS
    return NIBBLES if form.has_nibbles else BYTES


def embed(ids: Tensor, table: Weight) -> Tensor:
    count, width = ids.numel(), table.shape[1]
    jobs, given = threads() if count * width >= PARALLEL_FROM else 1, (ids.data_ptr(), ids.dtype is torch.int64)
    if not isinstance(table, QTensor):
        rows = table.new_empty(*ids.shape, width)
        _dense_rows(jobs, *given, table.data_ptr(), width * table.itemsize, count, rows.data_ptr())
        return rows
    out = empty(*ids.shape, width)
    if table.grid is not None:
        _embed_grid(jobs, given, table, count, out)
        return out
    found, places = table.super_block, _places(table.bits, table.lanes > 1)
    sizes = table.bits, table.group, table.lanes, width, places.data_ptr(), places.shape[1], count, out.data_ptr()
    if found is None:
        _rows(jobs, *given, *table.addresses, LEVELS[table.kind, table.bits].data_ptr(), SCALES[table.scales.dtype], *sizes)
    else:
        meant = LEVELS[found.expanded, table.bits].data_ptr()
        _super_rows(jobs, *given, *table.addresses[:2], found.words, meant, _steps_of(found), *sizes)
    return out
