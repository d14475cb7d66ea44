"""Several tokens by the byte dot product, where it takes one lane of a register for all rows (`ISA.by_lane`).

The activations of some tokens are first put side by side, 16 bytes of each in turn: a tile. Its tokens then have one address
between them, however an expert chose them, and the scales of four lie in one register. Many tokens are several tiles, which
meet rows that were unpacked before; few are one, which meets the codes and is filled up with its last token.
"""

from numba.core import cgutils

from auraflux.ops.linear.cpu.forms import BLOCK, BYTES, FLOATS, INTS, Form
from auraflux.ops.linear.cpu.microkernels import add_digit
from auraflux.ops.linear.cpu.unpack import code_vectors, scale_and_bias, spans
from auraflux.ops.simd.jit import LINE
from auraflux.ops.simd.vectors import F32, I64, ISA, at, fma, kernel, load, pick, splat, store, variable, vector
from auraflux.quant.packing import CHUNK

TILE = ISA.tokens
SMALL = (2, 4)  # tokens of tiles for fewer
PIECE = 16  # bytes of a token's activations that lie together
START = BLOCK * 4  # bytes of what a token's sums start from
PANEL_NBYTES = 1 << 19  # of the tiles that rows go over in turn: they stay in the second cache, beside some unpacked rows


def tile_nbytes(form: Form, width: int) -> int:
    """Of a tile's activations, of their scales and sums, and of where sums start; a multiple of cache lines."""
    return -(-TILE * (width * form.digits + 8 * (width // form.group) + START) // LINE) * LINE


def has_panels(form: Form) -> bool:
    """Whether many tokens are put side by side."""
    return ISA.by_lane and form.digits > 0


def panel_tiles(form: Form, width: int) -> int:
    """How many tiles rows go over in turn."""
    return max(1, PANEL_NBYTES // tile_nbytes(form, width)) if has_panels(form) else 0


@kernel(constants=2)
def gather_tile(b, form, size, acts, stride, act_scales, act_sums, index, groups, tile, last):
    """Put `size` tokens' activations, scales and sums side by side; those after the one at `last` are that one again.

    acts, stride, act_scales, act_sums, index  as `rows_times_tokens` takes them
    tile  [bytes / PIECE, size, PIECE]; then scales, and then sums, [groups, size]; then what sums start from, [size, BLOCK]
    """
    form = Form.parse(form)
    nbytes = b.mul(groups, at(form.group * form.digits))
    scales_at, sums_at, starts_at = _parts(b, form, size, groups, tile)
    piece = vector(INTS.element, PIECE // 4)
    for t in range(size):
        token = load(b, index, b.mul(_at_most(b, t, last), at(8)), I64)
        mine, meta = b.add(acts, b.mul(stride, token)), b.mul(b.mul(groups, at(4)), token)
        with cgutils.for_range(b, b.sdiv(nbytes, at(PIECE))) as loop:
            to = b.add(b.mul(loop.index, at(size * PIECE)), at(PIECE * t))
            store(b, load(b, mine, b.mul(loop.index, at(PIECE)), piece), tile, to)
        store(b, splat(INTS, form.magic[0]), starts_at, START * t)
        for source, target in ((act_scales, scales_at), (act_sums, sums_at)):
            with cgutils.for_range(b, groups) as loop:
                value = load(b, b.add(source, meta), b.mul(loop.index, at(4)), F32)
                store(b, value, target, b.add(b.mul(loop.index, at(4 * size)), at(4 * t)))


@kernel(constants=3)
def rows_times_tile(b, form, size, ready, codes, scales, biases, tile, groups, out, out_stride, last):
    """Multiply one block of rows, unpacked or not (see `rows_times_tokens`), with a tile of `size` tokens; the one at `last` is
    the last that has results."""
    form = Form.parse(form)
    totals = [variable(b, splat(FLOATS, 0.0)) for _ in range(size)]
    scales_at, sums_at, starts_at = _parts(b, form, size, groups, tile)
    code_bits = 8 if ready else form.bits
    with cgutils.for_range(b, spans(b, form, groups)) as loop:
        code_at = b.add(codes, b.mul(loop.index, at(form.span * BLOCK * code_bits // 8)))
        acts_at = b.add(tile, b.mul(loop.index, at(form.span * form.digits * size)))
        for part in range(form.parts):
            group = b.add(b.mul(loop.index, at(form.parts)), at(part))
            dots = _dots(b, form, size, ready, part, code_at, acts_at, starts_at)
            scale, bias = scale_and_bias(b, form, scales, biases, group)
            where = b.mul(group, at(4 * size))
            for t, (dot, total) in enumerate(zip(dots, totals, strict=True)):
                act_scale, act_sum = (_lane(b, address, where, t, size) for address in (scales_at, sums_at))
                value = fma(b, b.fmul(dot, scale), act_scale, b.load(total))
                b.store(value if bias is None else fma(b, bias, act_sum, value), total)
    for t, total in enumerate(totals):
        store(b, b.load(total), out, b.mul(out_stride, _at_most(b, t, last)))


def _parts(b, form, size, groups, tile):
    """Where a tile's scales, sums and starts are."""
    scales = b.add(tile, b.mul(groups, at(form.group * form.digits * size)))
    sums = b.add(scales, b.mul(groups, at(4 * size)))
    return scales, sums, b.add(sums, b.mul(groups, at(4 * size)))


def _at_most(b, number, last):
    return b.select(b.icmp_signed("<", at(number), last), at(number), last)


def _lane(b, address, offset, lane, size):
    together = min(size, 4)
    found = load(b, address, b.add(offset, at(lane // together * 16)), vector(F32, together))
    return pick(b, found, found, [lane % together] * BLOCK)


def _dots(b, form, size, ready, part, codes, acts, starts):
    """Sums of codes times activations of one group of a span, for each token."""
    found = [None] * size
    for digit in reversed(range(form.digits)):
        sums = _dots_of_digit(b, form, size, ready, part, codes, b.add(acts, at(form.span * size * digit)), starts)
        found = [add_digit(b, form, lower, total) for lower, total in zip(found, sums, strict=True)]
        if digit:
            # registers suffice for the sums of one digit at a time, not for codes that wait for the next
            codes, acts = ISA.after(b, codes, found), ISA.after(b, acts, found)
    return found


def _dots_of_digit(b, form, size, ready, part, codes, acts, starts):
    # loaded anew each time: copies of a register take an instruction that dot products wait for
    here = ISA.after(b, starts, [])
    sums = [load(b, here, START * t, INTS) for t in range(size)]
    pieces = range(part * form.group // PIECE, (part + 1) * form.group // PIECE)
    for piece in pieces:
        if piece > pieces[0] and size > 4:
            # one piece at a time, else registers do not suffice
            codes, acts = ISA.after(b, codes, sums), ISA.after(b, acts, sums)
        values = _piece_ready(b, codes, piece) if ready else _piece_of_codes(b, form, codes, piece)
        for first in range(0, size, 4):
            some = range(first, min(first + 4, size))
            x = [load(b, acts, (piece * size + t) * PIECE, INTS) for t in some]
            sums[first : first + 4] = ISA.dot_lanes(b, [sums[t] for t in some], values, x)
    return sums


def _piece_ready(b, codes, piece):
    return [b.bitcast(load(b, codes, 4 * BLOCK * (piece * 4 + i), INTS), BYTES) for i in range(4)]


def _piece_of_codes(b, form, codes, piece):
    chunk, within = divmod(piece * PIECE, CHUNK)
    found = code_vectors(b, form, b.add(codes, at(chunk * 4 * BLOCK * form.bits)))
    return [ISA.unpacked(b, v, form.value_bits) for v in found[within // 4 : within // 4 + 4]]
