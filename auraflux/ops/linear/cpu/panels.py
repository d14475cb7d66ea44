"""Many tokens by the byte dot product, where it takes one lane of a register for all rows (`ISA.by_lane`).

The activations of some tokens are first put side by side, 16 bytes of each in turn: a tile. Its tokens then have one address
between them, however an expert chose them, and the scales of four lie in one register.
"""

from numba.core import cgutils

from auraflux.ops.linear.cpu.forms import BLOCK, BYTES, FLOATS, INTS, Form
from auraflux.ops.linear.cpu.microkernels import add_digit
from auraflux.ops.linear.cpu.unpack import scale_and_bias, spans
from auraflux.ops.simd.jit import LINE
from auraflux.ops.simd.vectors import F32, I64, ISA, at, fma, kernel, load, pick, splat, store, variable, vector

TILE = ISA.tokens
PIECE = 16  # bytes of a token's activations that lie together
FOUR = vector(F32, 4)


PANEL_NBYTES = 1 << 19  # of the tiles that rows go over in turn: they stay in the second cache, beside some unpacked rows


def tile_nbytes(form: Form, width: int) -> int:
    """Of a tile's activations, and then of its scales and of its sums; a multiple of cache lines."""
    return -(-TILE * (width * form.digits + 8 * (width // form.group)) // LINE) * LINE


def has_panels(form: Form) -> bool:
    """Whether many tokens are put side by side."""
    return ISA.by_lane and form.digits > 0


def panel_tiles(form: Form, width: int) -> int:
    """How many tiles rows go over in turn."""
    return max(1, PANEL_NBYTES // tile_nbytes(form, width)) if has_panels(form) else 0


@kernel(constants=1)
def gather_tile(b, form, acts, stride, act_scales, act_sums, index, groups, tile):
    """Put TILE tokens' activations, scales and sums side by side.

    acts, stride, act_scales, act_sums, index  as `rows_times_tokens` takes them
    tile  [bytes / PIECE, TILE, PIECE]; then scales, and then sums, [groups, TILE]
    """
    form = Form.parse(form)
    nbytes = b.mul(groups, at(form.group * form.digits))
    scales_at = b.add(tile, b.mul(nbytes, at(TILE)))
    sums_at = b.add(scales_at, b.mul(groups, at(4 * TILE)))
    piece = vector(INTS.element, PIECE // 4)
    for t in range(TILE):
        token = load(b, index, 8 * t, I64)
        mine, meta = b.add(acts, b.mul(stride, token)), b.mul(b.mul(groups, at(4)), token)
        with cgutils.for_range(b, b.sdiv(nbytes, at(PIECE))) as loop:
            to = b.add(b.mul(loop.index, at(TILE * PIECE)), at(PIECE * t))
            store(b, load(b, mine, b.mul(loop.index, at(PIECE)), piece), tile, to)
        for source, target in ((act_scales, scales_at), (act_sums, sums_at)):
            with cgutils.for_range(b, groups) as loop:
                value = load(b, b.add(source, meta), b.mul(loop.index, at(4)), F32)
                store(b, value, target, b.add(b.mul(loop.index, at(4 * TILE)), at(4 * t)))


@kernel(constants=1)
def rows_times_tile(b, form, codes, scales, biases, tile, groups, out, out_stride):
    """Multiply one block of rows, unpacked (see `rows_times_tokens`), with a tile of tokens."""
    form = Form.parse(form)
    totals = [variable(b, splat(FLOATS, 0.0)) for _ in range(TILE)]
    scales_at = b.add(tile, b.mul(groups, at(form.group * form.digits * TILE)))
    sums_at = b.add(scales_at, b.mul(groups, at(4 * TILE)))
    with cgutils.for_range(b, spans(b, form, groups)) as loop:
        code_at = b.add(codes, b.mul(loop.index, at(form.span * BLOCK)))
        acts_at = b.add(tile, b.mul(loop.index, at(form.span * form.digits * TILE)))
        for part in range(form.parts):
            group = b.add(b.mul(loop.index, at(form.parts)), at(part))
            dots = _dots(b, form, part, code_at, acts_at)
            scale, bias = scale_and_bias(b, form, scales, biases, group)
            where = b.mul(group, at(4 * TILE))
            for t, (dot, total) in enumerate(zip(dots, totals, strict=True)):
                act_scale, act_sum = (
                    _lane(b, address, b.add(where, at(t // 4 * 16)), t % 4) for address in (scales_at, sums_at)
                )
                value = fma(b, b.fmul(dot, scale), act_scale, b.load(total))
                b.store(value if bias is None else fma(b, bias, act_sum, value), total)
    for t, total in enumerate(totals):
        store(b, b.load(total), out, b.mul(out_stride, at(t)))


def _lane(b, address, offset, lane):
    found = load(b, address, offset, FOUR)
    return pick(b, found, found, [lane] * BLOCK)


def _dots(b, form, part, codes, acts):
    """Sums of codes times activations of one group of a span, for each token."""
    found = [None] * TILE
    for digit in reversed(range(form.digits)):
        sums = _dots_of_digit(b, form, part, codes, b.add(acts, at(form.span * TILE * digit)))
        found = [add_digit(b, form, lower, total) for lower, total in zip(found, sums, strict=True)]
        if digit:
            # registers suffice for the sums of one digit at a time, not for codes that wait for the next
            codes, acts = ISA.after(b, codes, found), ISA.after(b, acts, found)
    return found


def _dots_of_digit(b, form, part, codes, acts):
    sums = [splat(INTS, form.magic[0])] * TILE
    for piece in range(part * form.group // PIECE, (part + 1) * form.group // PIECE):
        values = [b.bitcast(load(b, codes, 4 * BLOCK * (piece * 4 + i), INTS), BYTES) for i in range(4)]
        quads = [ISA.quads(b, b.add(acts, at((piece * TILE + t) * PIECE)), 4) for t in range(TILE)]
        for i, v in enumerate(values):
            sums = [ISA.dot_unpacked(b, sums[t], v, quads[t][i], form.value_bits) for t in range(TILE)]
    return sums
