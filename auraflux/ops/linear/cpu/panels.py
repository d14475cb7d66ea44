"""Products of several tokens by a byte dot product that broadcasts one lane of a register to all rows (`ISA.by_lane`).

The activations of several tokens are first interleaved, 16 bytes of each: a tile. Its tokens then share one address, even if
an expert's tokens are scattered, and the scales of four share one register. Many tokens make several tiles, multiplied by
unpacked rows; few make one, multiplied by the codes and padded with its last token.

Where one instruction multiplies two tokens by two rows (`ISA.by_pair`), the widest tiles interleave 8 bytes of each token, so
that 16 are two tokens', and a vector of results is [t, r], [t, r + 1], [t + 1, r], [t + 1, r + 1]. Rows are unpacked in pairs,
too. Sums are integers, and later steps have the same order, so results are bit-identical.
"""

from numba.core import cgutils

from auraflux.ops.linear.cpu.forms import BLOCK, BYTES, FLOATS, INTS, Form
from auraflux.ops.linear.cpu.microkernels import add_digit
from auraflux.ops.linear.cpu.unpack import code_vectors, scale_and_bias, spans
from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.jit import LINE
from auraflux.ops.simd.vectors import F32, I64, at, fma, kernel, load, pick, splat, store, variable, vector
from auraflux.quant.packing import CHUNK

TILE = ISA.tokens
SMALL = (2, 4)  # tokens of the smaller tiles
WHOLE = 16  # contiguous bytes of a token's activations; half as many for tokens in pairs
START = BLOCK * 4  # bytes of a token's initial sums
PANEL_NBYTES = 1 << 19  # of the tiles that a block of rows passes over: they stay in L2, together with some unpacked rows


def tile_nbytes(form: Form, width: int) -> int:
    """Return the bytes of a tile's activations, scales, sums and initial sums; a multiple of cache lines."""
    return -(-TILE * (width * form.digits + 8 * _copies(TILE) * (width // form.group) + START) // LINE) * LINE


def _in_pairs(size: int) -> bool:
    return ISA.by_pair and size == TILE


def _copies(size: int) -> int:
    """Return the copies of a token's scales and sums: one for each of a pair of rows."""
    return 2 if _in_pairs(size) else 1


def has_panels(form: Form) -> bool:
    """Return whether many tokens are interleaved."""
    return ISA.by_lane and form.digits > 0


def panel_tiles(form: Form, width: int, tokens: int) -> int:
    """Return the number of tiles that a block of rows passes over; 0 for a single token."""
    most = max(1, PANEL_NBYTES // tile_nbytes(form, width)) if has_panels(form) else 0
    return min(-(-tokens // TILE), most) if tokens > 1 else 0


@kernel(constants=2, outlined=True)
def gather_tile(b, form, size, acts, stride, act_scales, act_sums, index, groups, tile, last):
    """Interleave the activations, scales and sums of `size` tokens; those past `last` repeat it.

    acts, stride, act_scales, act_sums, index  see `rows_times_tokens`
    tile  [bytes / n, size, n] with n neighbours of a token; then scales, and then sums, [groups, size, copies]; then initial
          sums, [size, BLOCK]
    """
    form, copies = Form.parse(form), _copies(size)
    together = WHOLE // copies
    nbytes = b.mul(groups, at(form.group * form.digits))
    scales_at, sums_at, starts_at = _parts(b, form, size, groups, tile)
    piece = vector(INTS.element, together // 4)
    for t in range(size):
        token = load(b, index, b.mul(_at_most(b, t, last), at(8)), I64)
        mine, meta = b.add(acts, b.mul(stride, token)), b.mul(b.mul(groups, at(4)), token)
        with cgutils.for_range(b, b.sdiv(nbytes, at(together))) as loop:
            to = b.add(b.mul(loop.index, at(size * together)), at(together * t))
            store(b, load(b, mine, b.mul(loop.index, at(together)), piece), tile, to)
        store(b, splat(INTS, form.magic[0]), starts_at, START * t)
        for source, target in ((act_scales, scales_at), (act_sums, sums_at)):
            with cgutils.for_range(b, groups) as loop:
                value = load(b, b.add(source, meta), b.mul(loop.index, at(4)), F32)
                to = b.add(b.mul(loop.index, at(4 * copies * size)), at(4 * copies * t))
                for copy in range(copies):
                    store(b, value, target, b.add(to, at(4 * copy)))


@kernel(constants=3, outlined=True)
def rows_times_tile(b, form, size, unpacked, codes, scales, biases, tile, groups, out, out_stride, last):
    """Multiply one block of rows, unpacked or not (see `rows_times_tokens`), with a tile of `size` tokens; those past `last`
    are padding."""
    form = Form.parse(form)
    if form.grid is not None and not unpacked:
        # compiled, but never called: grids have whole tiles
        return
    totals = [variable(b, splat(FLOATS, 0.0)) for _ in range(size)]
    scales_at, sums_at, starts_at = _parts(b, form, size, groups, tile)
    code_bits = 8 if unpacked else form.bits
    with cgutils.for_range(b, spans(b, form, groups)) as loop:
        code_at = b.add(codes, b.mul(loop.index, at(form.span * BLOCK * code_bits // 8)))
        acts_at = b.add(tile, b.mul(loop.index, at(form.span * form.digits * size)))
        for part in range(form.parts):
            group = b.add(b.mul(loop.index, at(form.parts)), at(part))
            dots = _dots(b, form, size, unpacked, part, code_at, acts_at, starts_at)
            scale, bias = scale_and_bias(b, form, scales, biases, group)
            for i, (dot, total) in enumerate(zip(dots, totals, strict=True)):
                act_scale, act_sum = (_of_tokens(b, address, group, i, size) for address in (scales_at, sums_at))
                value = fma(b, b.fmul(dot, _of_rows(b, scale, i, size)), act_scale, b.load(total))
                b.store(value if bias is None else fma(b, _of_rows(b, bias, i, size), act_sum, value), total)
    found = [b.load(total) for total in totals]
    for t, value in enumerate(_by_token(b, found) if _in_pairs(size) else found):
        store(b, value, out, b.mul(out_stride, _at_most(b, t, last)))


def _parts(b, form, size, groups, tile):
    """Return the addresses of a tile's scales, sums and initial sums."""
    scales = b.add(tile, b.mul(groups, at(form.group * form.digits * size)))
    sums = b.add(scales, b.mul(groups, at(4 * _copies(size) * size)))
    return scales, sums, b.add(sums, b.mul(groups, at(4 * _copies(size) * size)))


def _at_most(b, number, last):
    return b.select(b.icmp_signed("<", at(number), last), at(number), last)


def _of_rows(b, values, i, size):
    """Return the per-row values for the i-th vector of results."""
    if not _in_pairs(size):
        return values
    first = i % 2 * 2
    return pick(b, values, values, [first, first + 1] * 2)


def _of_tokens(b, address, group, i, size):
    """Return the per-token values for the i-th vector of results."""
    here, together = b.mul(group, at(4 * _copies(size) * size)), min(size, 4)
    if _in_pairs(size):
        return load(b, address, b.add(here, at(i // 2 * 16)), vector(F32, 4))
    found = load(b, address, b.add(here, at(i // together * 16)), vector(F32, together))
    return pick(b, found, found, [i % together] * BLOCK)


def _by_token(b, pairs):
    """Rearrange results of two tokens and two rows to four rows of each token."""
    return [pick(b, *pairs[i : i + 2], lanes) for i in range(0, len(pairs), 2) for lanes in ([0, 1, 4, 5], [2, 3, 6, 7])]


def _dots(b, form, size, unpacked, part, codes, acts, starts):
    """Sum codes times activations of one group of a span, for each vector of results."""
    found = [None] * size
    for digit in reversed(range(form.digits)):
        here = b.add(acts, at(form.span * size * digit))
        if _in_pairs(size):
            sums = _pairs_of_digit(b, form, part, codes, here)
        elif unpacked and form.digits > 1:
            sums = _dots_in_any_order(b, form, part, codes, here)
        else:
            sums = _dots_of_digit(b, form, size, unpacked, part, codes, here, starts)
        found = [add_digit(b, form, lower, total) for lower, total in zip(found, sums, strict=True)]
        if digit:
            # registers hold the sums of one digit at a time, but not codes for the next
            codes, acts = ISA.ordered_after(b, codes, found), ISA.ordered_after(b, acts, found)
    return found


def _dots_of_digit(b, form, size, unpacked, part, codes, acts, starts):
    # reloaded each time: register copies would compete with dot products
    here = ISA.ordered_after(b, starts, [])
    sums = [load(b, here, START * t, INTS) for t in range(size)]
    pieces = range(part * form.group // WHOLE, (part + 1) * form.group // WHOLE)
    for piece in pieces:
        if piece > pieces[0] and size > 4:
            # one piece at a time, or registers spill
            codes, acts = ISA.ordered_after(b, codes, sums), ISA.ordered_after(b, acts, sums)
        values = _piece_ready(b, codes, piece) if unpacked else _piece_of_codes(b, form, codes, piece)
        for first in range(0, size, 4):
            some = range(first, min(first + 4, size))
            x = [load(b, acts, (piece * size + t) * WHOLE, INTS) for t in some]
            sums[first : first + 4] = ISA.dot_lanes(b, [sums[t] for t in some], values, x)
    return sums


def _dots_in_any_order(b, form, part, codes, acts):
    """Sum over unpacked rows in LLVM's order, which is a tenth faster with several digits."""
    sums = [splat(INTS, form.magic[0])] * TILE
    for piece in range(part * form.group // WHOLE, (part + 1) * form.group // WHOLE):
        quads = [ISA.quads(b, b.add(acts, at((piece * TILE + t) * WHOLE)), 4) for t in range(TILE)]
        for i, v in enumerate(_piece_ready(b, codes, piece)):
            sums = [ISA.dot_unpacked(b, sums[t], v, quads[t][i], form.value_bits) for t in range(TILE)]
    return sums


def _pairs_of_digit(b, form, part, codes, acts):
    half, sums = WHOLE // 2, [splat(INTS, form.magic[0])] * TILE
    for piece in range(part * form.group // half, (part + 1) * form.group // half):
        rows = [load(b, codes, half * (piece * BLOCK + r), BYTES) for r in (0, 2)]
        tokens = [load(b, acts, half * (piece * TILE + t), BYTES) for t in range(0, TILE, 2)]
        sums = [ISA.dot_pairs(b, total, tokens[i // 2], rows[i % 2]) for i, total in enumerate(sums)]
    return sums


def _piece_ready(b, codes, piece):
    return [b.bitcast(load(b, codes, 4 * BLOCK * (piece * 4 + i), INTS), BYTES) for i in range(4)]


def _piece_of_codes(b, form, codes, piece):
    chunk, within = divmod(piece * WHOLE, CHUNK)
    found = code_vectors(b, form, b.add(codes, at(chunk * 4 * BLOCK * form.bits)))
    return [ISA.unpacked(b, v, form.value_bits) for v in found[within // 4 : within // 4 + 4]]
