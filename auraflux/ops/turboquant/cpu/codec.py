"""Rows of vectors to codes and back: the kernels that rotate, encode, decode, and encode into pages, one build per width.

Codes must equal those of the reference to the last bit, so these functions keep the order of its float32 operations: they are
compiled without reassociation, except for sums in float64, which give the same float32 in any order.
"""

from functools import cache
from typing import NamedTuple

import numba
import numpy as np
import torch
from llvmlite import ir
from torch import Tensor

from auraflux.ops.attention.cpu.launch_args import flatten, read_args
from auraflux.ops.attention.cpu.page_index import PageIndex, index_of
from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.jit import (
    LINE,
    Kernel,
    arguments,
    as_float,
    doubles,
    floats,
    int32s,
    int64s,
    jit,
    share,
    strict,
    threads,
    workspace,
)
from auraflux.ops.simd.softmax import fill
from auraflux.ops.simd.vectors import F32, I32, call, fma, kernel, load, pick, splat, spread, store, vector
from auraflux.ops.turboquant.codebook import Codebook, _tables, explicit_codebook
from auraflux.ops.turboquant.cpu.dequantize import unpack_row
from auraflux.ops.turboquant.cpu.full_precision import NO_ROWS, FullPrecision, row_address, size_of, store_row
from auraflux.ops.turboquant.cpu.int8_tiles import prefetch_bytes
from auraflux.ops.turboquant.cpu.key_calibration import NOT_CALIBRATED, KeyCalibration, normalize_row, unscale_row
from auraflux.ops.turboquant.cpu.quantize import CHUNK, F64, quantize_row, search_table
from auraflux.ops.turboquant.pages import CodePages, LatentCodes, RowCodes
from auraflux.ops.turboquant.rotation import rotation

BLOCK = 8  # rows encoded together
# coordinates; below these, waking the threads costs more than the work
PARALLEL_FROM = 1 << 12
ENCODE_PARALLEL_FROM = 1 << 10
CPU = torch.device("cpu")
NOT_A_NUMBER = np.float32(np.nan)


def threads_for(coordinates: int, enough: int = PARALLEL_FROM) -> int:
    """Return the number of threads that repay for a number of coordinates."""
    return threads() if coordinates >= enough else 1


@kernel(constants=2)
def hadamard_row(b, width, inverse, x, signs, y):
    """Apply the signs and the Walsh-Hadamard transform, or undo them. Emit nothing where the width is no power of two."""
    if width & (width - 1):
        return
    lanes = min(ISA.lanes, width)
    kind = vector(F32, lanes)
    rows = [load(b, x, 4 * lanes * i, kind) for i in range(width // lanes)]
    sign = [load(b, signs, 4 * lanes * i, kind) for i in range(width // lanes)]
    if inverse:
        rows = [b.fmul(v, s) for v, s in zip(_hadamard(b, rows), sign, strict=True)]
    else:
        rows = _hadamard(b, [b.fmul(v, s) for v, s in zip(rows, sign, strict=True)])
    for i, v in enumerate(rows):
        store(b, v, y, 4 * lanes * i)


@kernel(constants=1)
def _length_row(b, width, x, length_at):
    """Write the length of a row, summed in float64."""
    lanes = min(ISA.lanes, width)
    kind, wide = vector(F32, lanes), vector(F64, lanes)
    sums = [splat(wide, 0.0)] * 2
    for i in range(width // lanes):
        v = b.fpext(load(b, x, 4 * lanes * i, kind), wide)
        sums[i % 2] = call(b, f"llvm.fma.v{lanes}f64", wide, v, v, sums[i % 2])
    total = b.fadd(*sums)
    while total.type.count > 2:
        n = total.type.count // 2
        total = b.fadd(pick(b, total, total, list(range(n))), pick(b, total, total, list(range(n, 2 * n))))
    total = b.fadd(*(b.extract_element(total, ir.Constant(I32, i)) for i in range(2)))
    store(b, call(b, "llvm.sqrt.f64", F64, total), length_at, 0)


@kernel(constants=1)
def _unit_hadamard_row(b, width, x, length_at, signs, y):
    """Rotate the direction of a row of known length, as `hadamard_row` does. A row of zeros stays one."""
    if width & (width - 1):
        return
    lanes = min(ISA.lanes, width)
    kind, wide, length = vector(F32, lanes), vector(F64, lanes), load(b, length_at, 0, F64)
    zero, one = ir.Constant(F64, 0.0), ir.Constant(F64, 1.0)
    inverse = spread(b, b.select(b.fcmp_ordered("==", length, zero), zero, b.fdiv(one, length)), lanes)
    rows = []
    for i in range(width // lanes):
        v = b.fptrunc(b.fmul(b.fpext(load(b, x, 4 * lanes * i, kind), wide), inverse), kind)
        rows.append(b.fmul(v, load(b, signs, 4 * lanes * i, kind)))
    for i, v in enumerate(_hadamard(b, rows)):
        store(b, v, y, 4 * lanes * i)


def _hadamard(b, rows):
    """Return the Walsh-Hadamard transform of a row in registers, divided by the square root of the width."""
    kind, lanes = rows[0].type, rows[0].type.count
    width = lanes * len(rows)
    span = 1
    while span < lanes:
        # the second of a pair becomes partner - itself
        butterfly = ir.Constant(kind, [-1.0 if i & span else 1.0 for i in range(lanes)])
        rows = [fma(b, v, butterfly, pick(b, v, v, [i ^ span for i in range(lanes)])) for v in rows]
        span *= 2
    span = 1
    while span < len(rows):
        pairs = [(rows[i & ~span], rows[i | span]) for i in range(len(rows))]
        rows = [b.fsub(*pair) if i & span else b.fadd(*pair) for i, pair in enumerate(pairs)]
        span *= 2
    factor = splat(kind, float(np.float32(width**-0.5)))
    return [b.fmul(v, factor) for v in rows]


@strict
def matrix_row(x_at, table, y_at, width, sums_at):
    """Write y = x @ table, summed in float64."""
    x, y, sums = floats(x_at, width), floats(y_at, width), doubles(sums_at, width)
    for d in range(width):
        sums[d] = 0.0
    for k in range(width):
        factor, row = np.float64(x[k]), doubles(table + 8 * k * width, width)
        for d in range(width):
            sums[d] += factor * row[d]
    for d in range(width):
        y[d] = np.float32(sums[d])


@numba.njit(inline="always")
def rotate_row(width, inverse, x, table, y, sums):
    """Rotate one row; `width` and `inverse` are known when this is compiled."""
    if width & (width - 1):
        matrix_row(x, table, y, width, sums)
    else:
        hadamard_row((width, inverse, x, table, y))


@jit
def _sum_of_squares(x):
    total = 0.0
    for i in range(len(x)):
        total += np.float64(x[i]) * np.float64(x[i])
    return total


@strict
def _unit_row(x_at, unit_at, width):
    """Return the length of a row, and write its direction to `unit_at`."""
    x, unit = floats(x_at, width), floats(unit_at, width)
    length = np.sqrt(_sum_of_squares(x))
    inverse = 1.0 / length if length != 0 else 0.0
    for i in range(width):
        unit[i] = np.float32(np.float64(x[i]) * inverse)
    return length


def scratch_nbytes(width: int) -> int:
    """Return the scratch bytes of a thread: lists of a block's rows, and the rows in whole chunks, one of them in float64."""
    return 4 * (BLOCK + 3) * (width + CHUNK) + 64 * BLOCK


@numba.njit(inline="always")
def encode_block(width, bits, rotation, levels, count, work):
    """Encode up to BLOCK rows; `width` is known when this is compiled.

    Step by step for all of them: each row is a chain of long latencies, and the processor works on several at once.
    work  three lists [BLOCK] of addresses, of rows, their codes and their norms; then memory to work in
    """
    room = (width + CHUNK - 1) // CHUNK * CHUNK
    rows, codes, norms = int64s(work, BLOCK), int64s(work + 8 * BLOCK, BLOCK), int64s(work + 16 * BLOCK, BLOCK)
    lengths_at, totals_at, words = work + 24 * BLOCK, work + 32 * BLOCK, work + 40 * BLOCK
    y, unit = work + 64 * BLOCK, work + 64 * BLOCK + 4 * BLOCK * room
    lengths, totals = doubles(lengths_at, BLOCK), doubles(totals_at, BLOCK)
    if width & (width - 1):
        for r in range(count):
            lengths[r] = _unit_row(rows[r], unit, width)
            matrix_row(unit, rotation, y + 4 * r * room, width, unit + 4 * room)
    else:
        for r in range(count):
            _length_row((width, rows[r], lengths_at + 8 * r))
        for r in range(count):
            _unit_hadamard_row((width, rows[r], lengths_at + 8 * r, rotation, y + 4 * r * room))
    for r in range(count):
        if not lengths[r] < np.inf:
            # of one sign, which quantizing looks at
            fill(y + 4 * r * room, width, NOT_A_NUMBER)
    for r in range(count):
        quantize_row(y + 4 * r * room, width, bits, levels, codes[r], totals_at + 8 * r, words)
    for r in range(count):
        # all levels of a row may be 0 where they are given
        floats(norms[r], 1)[0] = np.float32(lengths[r] / np.sqrt(totals[r]) if totals[r] != 0 else lengths[r] * 0)


class Rotation(NamedTuple):
    """A rotation as kernels take it: addresses of its table and of its inverse, and the tensors that hold them."""

    forward: int
    back: int
    held: tuple[Tensor, ...]


@cache
def rotation_for(width: int, seed: int) -> Rotation:
    """Return the rotation of a width and a seed."""
    found = rotation(width, seed)
    if found.signs is not None:
        return Rotation(found.signs.data_ptr(), found.signs.data_ptr(), (found.signs,))
    assert found.matrix is not None
    back = found.matrix.double().contiguous()
    forward = back.T.contiguous()
    return Rotation(forward.data_ptr(), back.data_ptr(), (forward, back))


class Levels(NamedTuple):
    """A codebook as kernels take it: addresses of its levels by code, of a search table, and of the code of each level.

    search   the search table of the default levels; the midpoints of given ones
    order    0 for given levels: codes are then ranks
    ordered  1 where codes are numbered as their levels ascend
    """

    book: int
    search: int
    order: int
    ordered: int


def levels_for(bits: int, width: int, given: Codebook | None = None) -> Levels:
    """Return the codebook of a number of bits."""
    if (given := explicit_codebook(given, width)) is not None:
        return Levels(given.levels.data_ptr(), given.middles.data_ptr(), 0, 1)
    # `codebook` caches these tensors and replaces them when they change
    tables = _tables(bits, width, CPU)
    known = _known.get((bits, width))
    if known is None or known[0] is not tables:
        book, _, order = tables
        ordered = torch.equal(order, torch.arange(1 << bits))
        found = Levels(book.data_ptr(), search_table(bits, width).ctypes.data, order.data_ptr(), int(ordered))
        known = _known[bits, width] = tables, found
    return known[1]


_known: dict[tuple[int, int], tuple[tuple[Tensor, Tensor, Tensor], Levels]] = {}


@cache
def build_rotate(width: int, inverse: int) -> Kernel:
    @Kernel
    def rotate_rows(args, job, jobs):
        x, rows, table, y, space, scratch = arguments(args, 6)
        for row in share(rows, job, jobs):
            at = 4 * row * width
            rotate_row(width, inverse, x + at, table, y + at, space + job * scratch)

    return rotate_rows


@cache
def build_encode(width: int) -> Kernel:
    @Kernel
    def encode_rows(args, job, jobs):
        x, rows, table, bits, book, search, order, ordered, codes, norms, space, scratch = arguments(args, 12)
        levels, words, work = Levels(book, search, order, ordered), (width * bits + 31) // 32, space + job * scratch
        lists, mine = int64s(work, 3 * BLOCK), share(rows, job, jobs)
        for first in range(mine.start, mine.stop, BLOCK):
            count = min(BLOCK, mine.stop - first)
            for r in range(count):
                lists[r] = x + 4 * (first + r) * width
                lists[BLOCK + r], lists[2 * BLOCK + r] = codes + 4 * (first + r) * words, norms + 4 * (first + r)
            encode_block(width, bits, table, levels, count, work)

    return encode_rows


@cache
def build_decode(width: int) -> Kernel:
    room = (width + CHUNK - 1) // CHUNK * CHUNK

    @Kernel
    def decode_rows(args, job, jobs):
        codes, norms, rows, table, bits, book, out, space, scratch = arguments(args, 9)
        words = (width * bits + 31) // 32
        sums = space + job * scratch
        levels = sums + 8 * room
        for row in share(rows, job, jobs):
            unpack_row(bits, codes + 4 * row * words, width, book, levels)
            rotate_row(width, 1, levels, table, out + 4 * row * width, sums)
            vector, norm = floats(out + 4 * row * width, width), floats(norms, rows)[row]
            for d in range(width):
                vector[d] *= norm

    return decode_rows


def _encode_nbytes(width: int) -> int:
    return -(-scratch_nbytes(width) // LINE) * LINE


class NewRows(NamedTuple):
    """New tokens, the address of their rotation, scratch memory, and its bytes per thread; `sides`: 2 for keys and values."""

    sides: int
    tokens: int
    heads: int
    rotation: int
    scratch: int
    nbytes: int


class NewSide(NamedTuple):
    """New keys or values: addresses of their rows and of the pools of codes and norms, their bits, and `Levels`."""

    x: int
    codes: int
    norms: int
    bits: int
    book: int
    search: int
    order: int
    ordered: int


class AppendArgs(NamedTuple):
    """The launch arguments of an append."""

    new: NewRows
    pages: PageIndex
    calibration: KeyCalibration
    sinks: FullPrecision
    recent: FullPrecision
    keys: NewSide
    values: NewSide


Side = tuple[Tensor, Tensor, Tensor, int, Codebook | None]


def launch_append(
    sides: list[Side],
    pages: CodePages | LatentCodes | RowCodes,
    starts: Tensor,
    calibration: KeyCalibration = NOT_CALIBRATED,
    full_precision: tuple[FullPrecision, FullPrecision] = (NO_ROWS, NO_ROWS),
) -> None:
    """Encode new rows into pages, and copy them to sink tokens and recent window.

    sides  of keys and values, or of keys alone: new rows [tokens, (heads,) width], codes, norms, bits, given levels
    """
    first = sides[0][0]
    tokens, width, heads = first.shape[0], first.shape[-1], first.shape[1] if first.dim() == 3 else 1
    jobs, nbytes = threads_for(len(sides) * first.numel(), ENCODE_PARALLEL_FROM), _append_nbytes(width)
    rows = [as_float(x) for x, *_ in sides]
    new = [
        NewSide(x.data_ptr(), codes.data_ptr(), norms.data_ptr(), bits, *levels_for(bits, width, book))
        for x, (_, codes, norms, bits, book) in zip(rows, sides, strict=True)
    ]
    args = AppendArgs(
        NewRows(len(sides), tokens, heads, rotation_for(width, pages.seed).forward, workspace(jobs * nbytes), nbytes),
        index_of(pages, starts),
        calibration,
        *full_precision,
        keys=new[0],
        # where there are keys alone, the kernel does not look at values
        values=new[-1],
    )
    build_append(width)(jobs, *flatten(args))


def _append_nbytes(width: int) -> int:
    """Return the bytes of a thread: encoding, a block's normalized rows, an unscaled row, a rotated row with its sums."""
    return _encode_nbytes(width) + (4 * BLOCK + 16) * width


@cache
def build_append(width: int) -> Kernel:
    """Build the kernel that appends rows of one width."""
    encoding = _encode_nbytes(width)

    @Kernel
    def append_rows(args_at, job, jobs):
        """Encode new keys and values into their pages, and copy them to sink tokens and recent window."""
        args = read_args(AppendArgs, args_at)
        new, index, sinks, recent, heads = args.new, args.pages, args.sinks, args.recent, args.new.heads
        starts, lengths = int32s(index.starts, index.sequences + 1), int32s(index.lengths, index.sequences)
        work, mine = new.scratch + job * new.nbytes, share(new.tokens * heads, job, jobs)
        lists, normalized = int64s(work, 3 * BLOCK), work + encoding
        unscaled, rotated = normalized + 4 * BLOCK * width, normalized + 4 * (BLOCK + 1) * width
        for side in range(new.sides):
            rows = args.keys if side == 0 else args.values
            levels, words, b = Levels(rows.book, rows.search, rows.order, rows.ordered), (width * rows.bits + 31) // 32, 0
            for first in range(mine.start, mine.stop, BLOCK):
                count = min(BLOCK, mine.stop - first)
                for r in range(count):
                    row, token, head = first + r, (first + r) // heads, (first + r) % heads
                    while starts[b + 1] <= token:
                        b += 1
                    position = np.int64(lengths[b]) - starts[b + 1] + token
                    page = int32s(index.table + 4 * b * index.table_width, index.table_width)[position // index.page]
                    target = (np.int64(page) * heads + head) * index.page + position % index.page
                    source, codes, norm = rows.x + 4 * row * width, rows.codes + 4 * target * words, rows.norms + 4 * target
                    # nothing has read these lines for a step, and stores would wait for them
                    prefetch_bytes((codes, 4 * words))
                    prefetch_bytes((norm, 4))
                    if recent.positions:
                        prefetch_bytes(
                            (row_address(recent, side, b, position, heads, head, width), width * size_of(recent.element))
                        )
                    encoded, calibrated = source, side == 0 and args.calibration.table != 0
                    if calibrated:
                        encoded = normalized + 4 * r * width
                        normalize_row(source, args.calibration, head, position, width, encoded)
                    lists[r], lists[BLOCK + r], lists[2 * BLOCK + r] = encoded, codes, norm
                    if position < sinks.positions or recent.positions:
                        if calibrated:
                            unscale_row(source, args.calibration, head, width, unscaled)
                            source = unscaled
                        rotate_row(width, 0, source, new.rotation, rotated, rotated + 4 * width)
                        if position < sinks.positions:
                            store_row(sinks, side, b, position, heads, head, rotated, width)
                        if recent.positions:
                            store_row(recent, side, b, position, heads, head, rotated, width)
                encode_block(width, rows.bits, new.rotation, levels, count, work)

    return append_rows
