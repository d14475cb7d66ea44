"""Tiles of latents for attention by cp.async and mma.sync, in Gluon: a quarter of the channels of a latent for each warp.

Heads are rows of a product, positions its columns. Four warps have 16 heads of a tile's half, and as many more have other heads
or the other half.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

# rows of 128 or 16 channels for `ldmatrix` without bank conflicts
TILE = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0]))
NARROW = gl.constexpr(gl.SwizzledSharedLayout(8, 4, 2, [2, 1, 0]))


class Tiling(NamedTuple):
    """Tiling of the heads of a token.

    heads      of a program
    halves     of a tile, each with four warps for 16 heads
    positions  of a half
    stages     tiles in shared memory
    """

    heads: int
    halves: int
    positions: int
    stages: int


@gluon.constexpr_function
def warps_of(tiling):
    heads, halves, _, _ = tiling
    return heads // 4 * halves


@gluon.constexpr_function
def products(tiling):
    """Return the layout of products [4 * halves, heads, positions or channels], with a quarter of the channels for a warp."""
    heads, halves, _, _ = tiling
    return gl.NVMMADistributedLayout([2, 0], [4 * halves, heads // 16, 1], [1, 16, 8])


@gluon.constexpr_function
def four_parts(tiling, inside, dims):
    """Return a layout of [halves, 4, heads, positions], or [4 * halves, ...] if `dims` is 3, as in `products`.

    inside  all quarters are in each thread, and not in a warp each
    """
    heads, halves, positions, _ = tiling

    def base(half, quarter, head, position):
        return [half, quarter, head, position] if dims == 4 else [4 * half + quarter, head, position]

    own = [base(0, 1, 0, 0), base(0, 2, 0, 0)]
    regs = [base(0, 0, 0, 1), base(0, 0, 8, 0), *(base(0, 0, 0, 8 << i) for i in range((positions // 8).bit_length() - 1))]
    lanes = [base(0, 0, 0, 2), base(0, 0, 0, 4), *(base(0, 0, 1 << i, 0) for i in range(3))]
    warps = [base(0, 0, 16 << i, 0) for i in range((heads // 16).bit_length() - 1)]
    warps += [base(0, 0, 0, 0)] * 2 if inside else own
    warps += [base(1 << i, 0, 0, 0) for i in range(halves.bit_length() - 1)]
    shape = [halves, 4, heads, positions] if dims == 4 else [4 * halves, heads, positions]
    return gl.DistributedLinearLayout([*regs, *own] if inside else regs, lanes, warps, [], shape)


@gluon.constexpr_function
def scores_layout(tiling):
    """Return the layout of scores and weights [halves, heads, positions], the same in the warps of all quarters."""
    return gl.SliceLayout(1, four_parts(tiling, False, 4))


@gluon.constexpr_function
def exchange(positions):
    """Return the shared-memory layout of parts of scores, without bank conflicts between rows."""
    return gl.SwizzledSharedLayout(8, max(1, 32 // positions), min(4, positions // 8), [2, 1, 0])


@gluon.constexpr_function
def rows_of_quarters(width, tiling):
    """Return a layout whose threads have 16 bytes of a row of `width` channels of their warp's quarter."""
    heads, halves, _, _ = tiling
    lanes = width // 8
    return gl.BlockedLayout([1, 1, 8], [1, 32 // lanes, lanes], [4 * halves, heads // 16, 1], [2, 1, 0])


@gluon.jit
def offsets(COUNT: gl.constexpr, WIDTH: gl.constexpr, HALVES: gl.constexpr, L: gl.constexpr):
    """Return row numbers [4 * HALVES, COUNT, 1] and channels [4 * HALVES, 1, WIDTH] of four quarters of COUNT rows."""
    row = gl.arange(0, COUNT, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    part = gl.arange(0, 4 * HALVES, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    channel = gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    return part // 4 * COUNT + row, part % 4 * WIDTH + channel


@gluon.jit
def fetch_quarters(to, source, left, WIDTH: gl.constexpr, TILING: gl.constexpr, L: gl.constexpr):
    """Begin copying a tile of rows of four times WIDTH numbers; those beyond `left` become zeros."""
    row, channel = offsets(TILING.positions, WIDTH, TILING.halves, L)
    async_copy.async_copy_global_to_shared(to, source + row * (4 * WIDTH) + channel, mask=(row < left) & (channel >= 0))


@gluon.jit
def load_queries(q, heads, WIDTH: gl.constexpr, TILING: gl.constexpr):
    """Load queries of a quarter as operands; rows beyond `heads` are zeros."""
    row, channel = offsets(TILING.heads, WIDTH, TILING.halves, gl.DotOperandLayout(0, products(TILING), 2))
    row = row % TILING.heads
    return gl.load(q + row * (4 * WIDTH) + channel, mask=(row < heads) & (channel >= 0), other=0.0)


@gluon.jit
def tile_positions(TILING: gl.constexpr):
    """Return the positions of scores in a tile: [halves, 1, positions]."""
    L: gl.constexpr = scores_layout(TILING)
    half = gl.arange(0, TILING.halves, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    return half * TILING.positions + gl.arange(0, TILING.positions, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]


@gluon.jit
def sum_of_parts(s, X, TILING: gl.constexpr):
    """Add the scores of the four quarters: [halves, heads, positions]."""
    X.store(s)
    H: gl.constexpr = TILING.halves
    M: gl.constexpr = TILING.heads
    N: gl.constexpr = TILING.positions
    parts = gl.reshape(X.load(four_parts(TILING, True, 3)), [H, 4, M, N])
    return gl.convert_layout(gl.sum(parts, 1), scores_layout(TILING), assert_trivial=True)


@gluon.jit
def weights_of(s, m, l):  # noqa: E741
    """Return softmax weights of scores to base 2, the rescaling of earlier sums, and the new maxima and sums."""
    top = gl.maximum(m, gl.max(s, 2))
    safe = gl.where(top == float("-inf"), 0.0, top)
    p, fade = gl.exp2(s - safe[:, :, None]), gl.exp2(m - safe)
    return p, fade, top, l * fade + gl.sum(p, 2)


@gluon.jit
def for_quarters(x, TILING: gl.constexpr):
    """Return a number of each half and head [halves, heads] for the rows of products: [4 * halves, heads, 1]."""
    L: gl.constexpr = four_parts(TILING, False, 4)
    H: gl.constexpr = TILING.halves
    M: gl.constexpr = TILING.heads
    x = gl.convert_layout(x, gl.SliceLayout(1, gl.SliceLayout(3, L)), assert_trivial=True)
    every = gl.zeros([H, 4, M], gl.float32, gl.SliceLayout(3, L)) + gl.expand_dims(x, 1)
    rows = gl.reshape(every, [4 * H, M])
    return gl.expand_dims(gl.convert_layout(rows, gl.SliceLayout(2, products(TILING)), assert_trivial=True), 2)


@gluon.jit
def mix(acc, p, fade, tile, TILING: gl.constexpr):
    """Accumulate a tile's latents by their weights."""
    L: gl.constexpr = products(TILING)
    WIDE: gl.constexpr = four_parts(TILING, False, 4)
    H: gl.constexpr = TILING.halves
    M: gl.constexpr = TILING.heads
    N: gl.constexpr = TILING.positions
    every = gl.zeros([H, 4, M, N], gl.float32, WIDE) + gl.expand_dims(p, 1)
    weights = gl.reshape(every.to(tile.dtype), [4 * H, M, N])
    weights = gl.convert_layout(weights, gl.DotOperandLayout(0, L, 2), assert_trivial=True)
    return mma_v2(weights, tile.load(gl.DotOperandLayout(1, L, 2)), acc * for_quarters(fade, TILING))


@gluon.jit
def add_halves(acc, m, l, TILING: gl.constexpr):  # noqa: E741
    """Return the mean of a program's latents [4, heads, 128], its largest scores and its sums of weights [heads]."""
    top = gl.max(m, 0)
    fade = gl.exp2(m - gl.where(top == float("-inf"), 0.0, top)[None, :])
    total = gl.sum(l * fade, 0)
    share = fade * gl.where(total == 0.0, 0.0, 1.0 / total)[None, :]
    H: gl.constexpr = TILING.halves
    M: gl.constexpr = TILING.heads
    return gl.sum(gl.reshape(acc * for_quarters(share, TILING), [H, 4, M, 128]), 0), top, total


@gluon.jit
def store_part(parts, at, splits, room, acc, m, l, TILING: gl.constexpr):  # noqa: E741
    """Store the mean of a program's latents, its largest scores and its sums of weights."""
    M: gl.constexpr = TILING.heads
    L: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 2, 16], [4, warps_of(TILING) // 4, 1], [2, 1, 0])
    found, m, l = add_halves(acc, m, l, TILING)  # noqa: E741
    if parts.m is not None:
        rows: gl.constexpr = m.type.layout
        head = gl.arange(0, M, rows)
        gl.store(parts.m + at + head * splits, m, mask=head < room)
        gl.store(parts.l + at + head * splits, l, mask=head < room)
    row, channel = offsets(M, 128, 1, L)
    found = gl.convert_layout(found.to(parts.o.dtype.element_ty), L)
    gl.store(parts.o + at * 512 + row * (splits * 512) + channel, found, mask=(row < room) & (channel >= 0))
