"""Key calibration: the mean and the scale per channel that are removed from keys before quantization.

A block of SPAN positions has one mean. Its product with a query is computed once, and added to the scores of the block's keys.
"""

from typing import NamedTuple

import numpy as np
from numba.core import cgutils

from auraflux.ops.attention.cpu.row_tiles import laid_keys, score_rows
from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.jit import floats, jit, jit_with
from auraflux.ops.simd.softmax import ZERO, fill
from auraflux.ops.simd.vectors import F32, at, fma, kernel, load, spread, store, vector
from auraflux.ops.turboquant.calibration import BLOCK
from auraflux.ops.turboquant.pages import CodePages
from auraflux.validation import cached_on_instance

SPAN = BLOCK
RUN = 16  # means that queries are multiplied with at a time
LINE = 4 * (RUN + 4)  # bytes of a row's products; one behind the last may be read
LANES = ISA.lanes


class KeyCalibration(NamedTuple):
    """The calibration of one layer's keys: addresses of the tensors of `Calibration`; all 0 where keys are not calibrated."""

    scale: int
    inverse: int
    along: int
    across: int
    table: int


class KeyMeans(NamedTuple):
    """The means of one head's keys: addresses of the factors of cosine and sine, and of the table of these; 0 for none."""

    along: int
    across: int
    table: int


NOT_CALIBRATED = KeyCalibration(0, 0, 0, 0, 0)


@cached_on_instance
def calibration_of(pages: CodePages) -> KeyCalibration:
    """Return the addresses of a cache's key calibration."""
    found = pages.calibration
    if found is None:
        return NOT_CALIBRATED
    return KeyCalibration(
        *(vector.data_ptr() for vector in (found.scale, found.inverse, found.along, found.across, found.table))
    )


# no sum and product may be contracted: codes are those of the reference to the last bit
@jit_with("nsz")
def normalize_row(x_at, calibration, head, position, width, target):
    """Remove mean and scale from a key, in float64."""
    here, row = 4 * head * width, calibration.table + 8 * (position // SPAN) * width
    x, inverse, normalized = floats(x_at, width), floats(calibration.inverse + here, width), floats(target, width)
    along, across = floats(calibration.along + here, width), floats(calibration.across + here, width)
    cosine, sine = floats(row, width), floats(row + 4 * width, width)
    for d in range(width):
        centre = np.float64(cosine[d]) * np.float64(along[d]) + np.float64(sine[d]) * np.float64(across[d])
        normalized[d] = np.float32((np.float64(x[d]) - centre) * np.float64(inverse[d]))


@jit
def unscale_row(x_at, calibration, head, width, target):
    """Remove the scale from a key, in float64."""
    x, inverse, scaled = floats(x_at, width), floats(calibration.inverse + 4 * head * width, width), floats(target, width)
    for d in range(width):
        scaled[d] = np.float32(np.float64(x[d]) * np.float64(inverse[d]))


@kernel(constants=0)
def write_means(b, along, across, table, width, count, target, stride):
    """Write the means of `count` blocks from `table` on, in rows with a stride of `stride` bytes."""
    row = b.mul(width, at(4))
    whole = b.mul(b.sdiv(width, at(LANES)), at(4 * LANES))
    with cgutils.for_range(b, count) as block:
        cosine, here = b.add(table, b.mul(block.index, b.mul(row, at(2)))), b.add(target, b.mul(block.index, stride))
        for first, last, kind in ((at(0), whole, ISA.floats), (whole, row, vector(F32, 1))):
            with cgutils.for_range_slice(b, first, last, at(4 * kind.count)) as (column, _):
                rotated = b.fmul(load(b, b.add(cosine, row), column, kind), load(b, across, column, kind))
                centre = fma(b, load(b, cosine, column, kind), load(b, along, column, kind), rotated)
                store(b, centre, here, column)


@kernel(constants=0)
def _add_whole(b, rows, scores, step, blocks, products, line):
    """Add the products of whole blocks to their scores."""
    with cgutils.for_range(b, rows) as row:
        mine, theirs = b.add(scores, b.mul(row.index, step)), b.add(products, b.mul(row.index, line))
        with cgutils.for_range(b, blocks) as block:
            product = spread(b, load(b, theirs, b.mul(block.index, at(4)), F32), LANES)
            first = b.add(mine, b.mul(block.index, at(4 * SPAN)))
            for i in range(SPAN // LANES):
                _add(b, product, first, at(4 * LANES * i))


def _add(b, x, address, offset):
    store(b, b.fadd(load(b, address, offset, ISA.floats), x), address, offset)


@jit
def products_nbytes(rows, room):
    """Return the bytes that `multiply_means` works in."""
    return rows * LINE + 8 * RUN * room + 64


@jit
def multiply_means(means, q, rows, room, width, block, last, begun, work):
    """Multiply queries with the means of a run of blocks, unless the products of this block are there.

    q      rows of `room` floats, zero from `width` on
    last   the last block that will be needed
    begun  the first block whose products are there, -1 for none
    returns `begun` after the call; row r's products lie at work + r * LINE
    """
    if begun < 0 or block >= begun + RUN:
        begun = block
        laid = (work + rows * LINE + 63) // 64 * 64
        # stale means past the last would do, but for not-a-number in their padding
        fill(laid, RUN * room, ZERO)
        some = min(RUN, last - begun + 1)
        write_means((means.along, means.across, means.table + 8 * begun * width, width, some, laid, 4 * room))
        batches = (some + LANES - 1) // LANES
        keys = laid_keys(laid, 4 * room, batches, laid + 4 * RUN * room)
        score_rows(rows, q, 4 * room, keys, 4 * room, batches, work, LINE)
    return begun


@jit
def add_means(rows, block, count, begun, scores, step, work):
    """Add the products that `multiply_means` left to the scores [rows][.] of `count` blocks."""
    _add_whole((rows, scores, step, count, work + 4 * (block - begun), LINE))
