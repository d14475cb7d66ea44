"""Products of several tokens by AMX (`ISA.matrix_tiles`): one instruction multiplies 16 tokens by 16 rows, 64 inputs of each.

The activations of several tokens are first interleaved to tiles, as in `panels`. A block of rows is unpacked for some inputs,
which stay in the L1 cache while the tiles pass. Sums of a group are integers, and the float32 steps that follow have the order
of `rows_times_tokens`, so results are bit-identical.
"""

from functools import reduce
from typing import NamedTuple

import numba
from llvmlite import ir
from numba.core import cgutils

from auraflux.ops.linear.cpu.forms import BLOCK, FLOATS, INTS, Form
from auraflux.ops.linear.cpu.unpack import scale_and_bias, unpack_rows, widen_scales
from auraflux.ops.simd import amx
from auraflux.ops.simd.jit import int64s
from auraflux.ops.simd.processor import LINE
from auraflux.ops.simd.vectors import F32, I8, at, fma, kernel, load, splat, spread, store, variable, vector

FULL, HALF = 16, 8  # tokens of a tile
MATRIX_FROM = 5  # tokens from which tiles pay off
INPUTS = 1024  # unpacked at a time
SUMS_NBYTES = FULL * BLOCK * 4  # sums of a group
PANEL_NBYTES = 1 << 19  # of the tiles that a block of rows passes over: they stay in L2, also with another thread on the core
# tile registers: sums and tokens by the size of the tile, and rows
SUMS, TOKENS, ROWS = {FULL: 0, HALF: 1}, {FULL: 2, HALF: 3}, 4


def matrix_tile_nbytes(form: Form, width: int) -> int:
    """Return the bytes of a tile's activations, scales and sums; a multiple of cache lines."""
    return -(-FULL * (width * form.digits + 8 * (width // form.group)) // LINE) * LINE


def matrix_panel_tiles(form: Form, width: int, tokens: int) -> int:
    """Return the number of tiles that a block of rows passes over; 0 for too few tokens."""
    most = max(1, PANEL_NBYTES // matrix_tile_nbytes(form, width))
    return min(-(-tokens // FULL), most) if tokens >= MATRIX_FROM else 0


def _inputs_at_once(form: Form) -> int:
    """Return the inputs that one instruction multiplies."""
    return min(form.group, amx.ROW_NBYTES)


@kernel(constants=1)
def configure_tiles(b, form):
    """Configure this thread's tiles."""
    together = _inputs_at_once(Form.parse(form))
    shapes = {ROWS: (together // 4, 4 * BLOCK)}
    for size in (FULL, HALF):
        shapes |= {SUMS[size]: (size, 4 * BLOCK), TOKENS[size]: (size, together)}
    amx.configure(b, shapes)


@kernel(constants=0)
def release_tiles(b):
    """Release this thread's tiles, so that context switches do not save them."""
    amx.release(b)


def _parts(b, form, size, groups, tile):
    """Return the addresses of a tile's scales and sums."""
    scales = b.add(tile, b.mul(groups, at(form.group * form.digits * size)))
    return scales, b.add(scales, b.mul(groups, at(4 * size)))


def _at_most(b, number, last):
    return b.select(b.icmp_signed("<", at(number), last), at(number), last)


@kernel(constants=2, outlined=True)
def _place_token(b, form, size, acts, scales, sums, groups, tile, place):
    """Copy a token's activations, scales and sums to its place in a tile of `size` tokens.

    tile  [bytes / n, size, n] with n bytes of a token that are multiplied at once; then scales, and then sums, [groups, size]
    """
    form = Form.parse(form)
    together = _inputs_at_once(form)
    first, nbytes = b.add(tile, b.mul(place, at(together))), b.mul(groups, at(form.group * form.digits))
    with cgutils.for_range(b, b.sdiv(nbytes, at(together))) as loop:
        piece = load(b, acts, b.mul(loop.index, at(together)), vector(I8, together))
        store(b, piece, first, b.mul(loop.index, at(size * together)))
    for source, target in zip((scales, sums), _parts(b, form, size, groups, tile), strict=True):
        with cgutils.for_range(b, groups) as loop:
            value = load(b, source, b.mul(loop.index, at(4)), F32)
            store(b, value, target, b.mul(b.add(b.mul(loop.index, at(size)), place), at(4)))


class Pass(NamedTuple):
    """A tile of tokens that passes over the unpacked codes of one block of rows.

    unpacked    codes of the groups `first` to `stop`
    scales, biases, tile  of all groups
    out         float32, a token every `out_stride` bytes, BLOCK rows added; overwritten where `first` is 0
    last        tokens of the tile past it are padding
    """

    unpacked: ir.Value
    scales: ir.Value
    biases: ir.Value
    tile: ir.Value
    groups: ir.Value
    first: ir.Value
    stop: ir.Value
    out: ir.Value
    out_stride: ir.Value
    last: ir.Value


@kernel(constants=2, outlined=True)
def rows_times_matrix_tile(b, form, size, *addresses):
    """Add the products of one block of rows with a tile of `size` tokens for some groups; for the addresses see `Pass`."""
    form, this = Form.parse(form), Pass(*addresses)
    scales_at, sums_at = _parts(b, form, size, this.groups, this.tile)
    room = amx.room(b, form.digits * SUMS_NBYTES)
    outs = [b.add(this.out, b.mul(this.out_stride, _at_most(b, t, this.last))) for t in range(size)]
    totals = [variable(b, splat(FLOATS, 0.0)) for _ in range(size)]
    with b.if_then(b.icmp_signed(">", this.first, at(0))):
        for total, address in zip(totals, outs, strict=True):
            b.store(load(b, address, 0, FLOATS), total)
    with cgutils.for_range(b, b.sub(this.stop, this.first)) as loop:
        group = b.add(this.first, loop.index)
        _multiply_group(b, form, size, this.unpacked, loop.index, this.tile, group, room)
        scale, bias = scale_and_bias(b, form, this.scales, this.biases, group)
        meta = b.mul(group, at(4 * size))
        for t, total in enumerate(totals):
            act_scale, act_sum = (spread(b, load(b, b.add(each, meta), 4 * t, F32), BLOCK) for each in (scales_at, sums_at))
            value = fma(b, b.fmul(_dot(b, form, room, t), scale), act_scale, b.load(total))
            b.store(value if bias is None else fma(b, bias, act_sum, value), total)
    for total, address in zip(totals, outs, strict=True):
        store(b, b.load(total), address, 0)


def _multiply_group(b, form, size, unpacked, number, tile, group, room):
    """Store the integer sums of a group for each digit of the activations; `number` counts groups of `unpacked`."""
    together = _inputs_at_once(form)
    codes = b.add(unpacked, b.mul(number, at(form.group * BLOCK)))
    # digits are apart by a span of groups
    span = b.mul(b.sdiv(group, at(form.parts)), at(form.span * form.digits))
    place = b.add(span, b.mul(b.srem(group, at(form.parts)), at(form.group)))
    for digit in range(form.digits):
        acts = b.add(tile, b.mul(b.add(place, at(form.span * digit)), at(size)))
        amx.zero(b, SUMS[size])
        for inputs in range(0, form.group, together):
            amx.load(b, TOKENS[size], b.add(acts, at(inputs * size)), together)
            amx.load(b, ROWS, b.add(codes, at(inputs * BLOCK)), 4 * BLOCK)
            amx.multiply(b, SUMS[size], TOKENS[size], ROWS)
        amx.store(b, SUMS[size], b.add(room, at(SUMS_NBYTES * digit)), 4 * BLOCK)


def _dot(b, form, room, t):
    """Load the sums of a token and convert them to floats, the digits joined as by `add_digit`."""

    def joined(lower: ir.Value | None, digit: int) -> ir.Value:
        found = b.sitofp(load(b, room, SUMS_NBYTES * digit + 4 * BLOCK * t, INTS), FLOATS)
        return found if lower is None else fma(b, lower, splat(FLOATS, 1 / 256), found)

    return reduce(joined, reversed(range(form.digits)), None)


@numba.njit(inline="always")
def place_in_tile(form, acts, groups, tile, place, left):
    """Copy a token to its place in a tile. The last of the `left` tokens from the tile's first on fills a smaller tile or all
    of it.

    acts  addresses of the token's activations, scales and sums
    """
    last = min(left, FULL) - 1
    for each in range(place, (FULL if left > HALF else HALF) if place == last else place + 1):
        if left > HALF:
            _place_token((form, FULL, acts, groups, tile, each))
        else:
            _place_token((form, HALF, acts, groups, tile, each))


@numba.njit(inline="always")
def gather_matrix_panel(form, panel, acts, index, left, groups):
    """Fill the tiles with `left` tokens."""
    (tile, tile_step), (space, stride, scales, sums) = panel, acts
    tokens = int64s(index, left)
    for t in range(left):
        token, first = tokens[t], t // FULL * FULL
        mine = (space + stride * token, scales + 4 * groups * token, sums + 4 * groups * token)
        place_in_tile(form, mine, groups, tile + t // FULL * tile_step, t - first, left - first)


@numba.njit(inline="always")
def multiply_blocks_by_matrix(form, words, piece, span, panel, tokens, groups, out_stride):
    """Multiply blocks of rows with interleaved tokens.

    piece  groups unpacked at a time, and bytes of the codes of a group
    panel  address of the first tile, and bytes from one to the next
    """
    code_step, scale_step, _ = span.steps
    scales, biases, wide_step = span.wide
    at_once, code_nbytes = piece
    for i in range(span.size):
        codes, some = span.codes + i * code_step, span.scales + i * scale_step
        if words:
            widen_scales((form, codes, some, groups, scales + i * wide_step, biases + i * wide_step))
        for first in range(0, groups, at_once):
            stop = min(first + at_once, groups)
            unpack_rows((form, codes + first * code_nbytes, some, stop - first, span.unpacked))
            unpacked = (span.unpacked, scales + i * wide_step, biases + i * wide_step)
            (tile, tile_step), out, left = panel, span.out + 4 * BLOCK * i, tokens
            while left > HALF:
                last = min(left, FULL) - 1
                rows_times_matrix_tile((form, FULL, unpacked, tile, groups, first, stop, out, out_stride, last))
                tile, out, left = tile + tile_step, out + FULL * out_stride, left - FULL
            if left > 0:
                rows_times_matrix_tile((form, HALF, unpacked, tile, groups, first, stop, out, out_stride, left - 1))
