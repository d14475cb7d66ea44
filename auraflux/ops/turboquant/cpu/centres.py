"""What the codes of keys leave out: keys before they are coded, and the products of queries with centres.

A block of SPAN positions has one centre. Its product with a query is made once, and added to the scores of the block's keys.
"""

from typing import NamedTuple

import numpy as np
from numba.core import cgutils

from auraflux.kinds import told_once
from auraflux.ops.attention.cpu.row_tiles import laid_keys, score_rows
from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.jit import floats, jit, jit_with
from auraflux.ops.simd.softmax import ZERO, fill
from auraflux.ops.simd.vectors import F32, at, fma, kernel, load, spread, store, vector
from auraflux.ops.turboquant.calibration import BLOCK
from auraflux.ops.turboquant.pages import CodePages

SPAN = BLOCK
RUN = 16  # centres that queries are multiplied with at a time
LINE = 4 * (RUN + 4)  # bytes of a row's products; one behind the last may be read
LANES = ISA.lanes


class Vectors(NamedTuple):
    """The vectors of one layer's keys: addresses, as in `Calibration`; all 0 where codes leave nothing out."""

    scale: int
    inverse: int
    along: int
    across: int
    table: int


class Centres(NamedTuple):
    """The centres of one head's keys: addresses of what meets cosine and sine, and of these; `table` is 0 for none."""

    along: int
    across: int
    table: int


NO_VECTORS = Vectors(0, 0, 0, 0, 0)


@told_once
def vectors_of(pages: CodePages) -> Vectors:
    found = pages.calibration
    if found is None:
        return NO_VECTORS
    return Vectors(*(vector.data_ptr() for vector in (found.scale, found.inverse, found.along, found.across, found.table)))


# no sum and product may be contracted: codes are those of the reference to the last bit
@jit_with("nsz")
def reduce_row(x_at, vectors, head, position, width, target):
    """Take the centre and the scale off a key, in float64."""
    here, row = 4 * head * width, vectors.table + 8 * (position // SPAN) * width
    x, inverse, reduced = floats(x_at, width), floats(vectors.inverse + here, width), floats(target, width)
    along, across = floats(vectors.along + here, width), floats(vectors.across + here, width)
    cosine, sine = floats(row, width), floats(row + 4 * width, width)
    for d in range(width):
        centre = np.float64(cosine[d]) * np.float64(along[d]) + np.float64(sine[d]) * np.float64(across[d])
        reduced[d] = np.float32((np.float64(x[d]) - centre) * np.float64(inverse[d]))


@jit
def scale_row(x_at, vectors, head, width, target):
    """Take the scale off a key, in float64."""
    x, inverse, scaled = floats(x_at, width), floats(vectors.inverse + 4 * head * width, width), floats(target, width)
    for d in range(width):
        scaled[d] = np.float32(np.float64(x[d]) * np.float64(inverse[d]))


@kernel(constants=0)
def lay_centres(b, along, across, table, width, count, target, stride):
    """Lay out the centres of `count` blocks from `table` on, in rows `stride` bytes apart."""
    row = b.mul(width, at(4))
    whole = b.mul(b.sdiv(width, at(LANES)), at(4 * LANES))
    with cgutils.for_range(b, count) as block:
        cosine, here = b.add(table, b.mul(block.index, b.mul(row, at(2)))), b.add(target, b.mul(block.index, stride))
        for first, last, kind in ((at(0), whole, ISA.floats), (whole, row, vector(F32, 1))):
            with cgutils.for_range_slice(b, first, last, at(4 * kind.count)) as (column, _):
                turned = b.fmul(load(b, b.add(cosine, row), column, kind), load(b, across, column, kind))
                centre = fma(b, load(b, cosine, column, kind), load(b, along, column, kind), turned)
                store(b, centre, here, column)


@kernel(constants=0)
def _add_whole(b, rows, scores, step, blocks, products, line):
    """Add to the scores of whole blocks their products."""
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
    """Bytes that `meet_centres` works in."""
    return rows * LINE + 8 * RUN * room + 64


@jit
def meet_centres(centres, q, rows, room, width, block, last, begun, work):
    """Multiply queries with the centres of a run of blocks, unless the products of this block are there.

    q      rows of `room` floats, zero from `width` on
    last   the last block that will be asked for
    begun  the first block whose products are there, -1 for none
    returns `begun` after the call; row r's products lie at work + r * LINE
    """
    if begun < 0 or block >= begun + RUN:
        begun = block
        laid = (work + rows * LINE + 63) // 64 * 64
        # stale centres past the last would do, but for not-a-number in what pads them
        fill(laid, RUN * room, ZERO)
        some = min(RUN, last - begun + 1)
        lay_centres((centres.along, centres.across, centres.table + 8 * begun * width, width, some, laid, 4 * room))
        batches = (some + LANES - 1) // LANES
        keys = laid_keys(laid, 4 * room, batches, laid + 4 * RUN * room)
        score_rows(rows, q, 4 * room, keys, 4 * room, batches, work, LINE)
    return begun


@jit
def add_centres(rows, block, count, begun, scores, step, work):
    """Add to scores [rows][.] of `count` blocks' positions the products that `meet_centres` left."""
    _add_whole((rows, scores, step, count, work + 4 * (block - begun), LINE))
