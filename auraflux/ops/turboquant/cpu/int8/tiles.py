"""Tiles of decode attention in int8: rows of packed words side by side in registers, by shuffles within 128 bits.

Keys: a lane holds four coordinates of one token, so that a dot product adds to the scores of LANES tokens. Values: a lane holds
one coordinate of four tokens, so that a dot product sums over those.
"""

from numba.core import cgutils

from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.vectors import (
    I32,
    I64,
    at,
    kernel,
    load,
    pick,
    prefetch,
    spread,
    store,
    vector,
)

BLOCK = 128  # positions that are attended to together
LANES = ISA.lanes
BYTES = 4 * LANES  # of a vector, and how many bytes it holds
TILES = (4, 3, 2, 1) if ISA.by_lane else (4, 2, 1)  # heads that share each load
PLUS = 0 if ISA.signed_codes else 128
STRAIGHT = ISA.small_tables
WAYS = 16 // LANES  # groups of tokens per loop iteration: short iterations stall on their first loads


def room_of(tile):
    """Return for how many heads the queries and weights of a tile are laid out: three take the registers of four."""
    return 4 if tile == 3 else tile


def per_tile(b, heads, build):
    """Emit a variant for each number of heads."""
    for tile in TILES:
        with b.if_then(b.icmp_signed("==", heads, at(tile))):
            build(tile)


def load_quads(b, address, count):
    """Load `count` times four bytes, each repeated in all lanes."""
    if count % 4 == 0:
        return ISA.quads(b, address, count)
    return [b.bitcast(spread(b, load(b, address, 4 * i, I32), LANES), ISA.bytes) for i in range(count)]


def side_by_side(b, rows, offset, kind):
    """Load 16 bytes of each of LANES rows: vector i holds row i of every four, 128 bits each."""
    pieces = [load(b, row, offset, vector(kind, 128 // kind.width)) for row in rows]
    while len(pieces) > 4:
        count, half = pieces[0].type.count, len(pieces) // 2
        pieces = [pick(b, x, y, list(range(2 * count))) for x, y in _neighbours(pieces, half)]
    return pieces


def _neighbours(pieces, half):
    # rows i and i + 4 are joined first, then pairs at a distance of 8
    if half == 8:
        return [(pieces[i + 8 * k], pieces[i + 8 * k + 4]) for k in range(2) for i in range(4)]
    return [(pieces[i], pieces[i + 4]) for i in range(4)]


def zip_runs(b, x, y, per, unit):
    """Interleave runs of `unit` elements within every `per`: the lower halves, the upper halves."""
    count = x.type.count
    found = []
    for half in (0, per // 2):
        starts = [base + half + i for base in range(0, count, per) for i in range(0, per // 2, unit)]
        found.append(pick(b, x, y, [n for s in starts for side in (0, count) for n in range(side + s, side + s + unit)]))
    return found


def transpose(b, rows, per):
    """Transpose four vectors of rows to four with an element of each row together, `per` elements in 128 bits."""
    low, high = zip_runs(b, rows[0], rows[1], per, 1)
    low2, high2 = zip_runs(b, rows[2], rows[3], per, 1)
    return [*zip_runs(b, low, low2, per, 2), *zip_runs(b, high, high2, per, 2)]


def group_rows(b, rows, group):
    return [load(b, rows, b.add(b.mul(group, at(8 * LANES)), at(8 * t)), I64) for t in range(LANES)]


@kernel(constants=0)
def list_rows(b, source, step, count, out):
    """Write the addresses of `count` rows with a stride of `step` bytes."""
    with cgutils.for_range(b, count) as loop:
        store(b, b.add(source, b.mul(loop.index, step)), out, b.mul(loop.index, at(8)))


@kernel(constants=0)
def prefetch_bytes(b, address, nbytes):
    """Prefetch a range of bytes."""
    prefetch(b, [address], nbytes)
