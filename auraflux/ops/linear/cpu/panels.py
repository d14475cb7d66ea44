"""Many tokens by the byte dot product, where it takes one lane of a register for all rows (`ISA.by_lane`).

The activations of some tokens are first put side by side, 16 bytes of each in turn: a tile. Its tokens then have one address
between them, however an expert chose them, and the scales of four lie in one register.

Where one instruction multiplies two tokens by two rows (`ISA.by_pair`), a tile has 8 bytes of each token in turn, so that 16
are two tokens', and a vector of results is [t, r], [t, r + 1], [t + 1, r], [t + 1, r + 1]. Sums are of whole numbers, and what
follows is done to each number in the same order, so results are the same to the bit.
"""

from numba.core import cgutils

from auraflux.ops.linear.cpu.forms import BLOCK, BYTES, FLOATS, INTS, Form
from auraflux.ops.linear.cpu.microkernels import add_digit
from auraflux.ops.linear.cpu.unpack import scale_and_bias, spans
from auraflux.ops.simd.jit import LINE, jit
from auraflux.ops.simd.vectors import F32, I64, ISA, MAGIC_BITS, at, fma, kernel, load, pick, splat, store, variable, vector

TILE = ISA.tokens
PIECE = 8 if ISA.by_pair else 16  # bytes of a token's activations that lie together
COPIES = 2 if ISA.by_pair else 1  # of a token's scales and sums: one for each of a pair of rows
FOUR = vector(F32, 4)


# tokens that repay unpacking rows first, and tokens that repay a tile which they do not fill: by what llvm-mca says of
# Neoverse-V1 and measurements on Neoverse-N1
PANEL_FROM, TILE_FROM = (5, 5) if ISA.by_pair else (16, 6)
PANEL_NBYTES = 1 << 19  # of the tiles that rows go over in turn: they stay in the second cache, beside some unpacked rows


def tile_nbytes(form: Form, width: int) -> int:
    """Of a tile's activations, and then of its scales and of its sums; a multiple of cache lines."""
    return -(-TILE * (width * form.digits + 8 * COPIES * (width // form.group)) // LINE) * LINE


def has_panels(form: Form) -> bool:
    """Whether many tokens are put side by side."""
    return ISA.by_lane and form.digits > 0


def panel_tiles(form: Form, width: int) -> int:
    """How many tiles rows go over in turn."""
    return max(1, PANEL_NBYTES // tile_nbytes(form, width)) if has_panels(form) else 0


@jit
def tiles_of(tokens, most):
    """How many tiles so many tokens fill, the last one perhaps in part; at most `most`."""
    return min((tokens + TILE - TILE_FROM) // TILE, most) if tokens >= PANEL_FROM else 0


def _meta_at(b, form, tile, groups):
    """Where a tile's scales and its sums lie."""
    scales = b.add(tile, b.mul(groups, at(form.group * form.digits * TILE)))
    return scales, b.add(scales, b.mul(groups, at(4 * COPIES * TILE)))


@kernel(constants=1)
def gather_tile(b, form, acts, stride, act_scales, act_sums, index, groups, tile, count):
    """Put TILE tokens' activations, scales and sums side by side; of fewer, the last is there several times.

    acts, stride, act_scales, act_sums, index  as `rows_times_tokens` takes them
    count  how many tokens there are, at least 1
    tile  [bytes / PIECE, TILE, PIECE]; then scales, and then sums, [groups, TILE, COPIES]
    """
    form = Form.parse(form)
    nbytes = b.mul(groups, at(form.group * form.digits))
    piece = vector(INTS.element, PIECE // 4)
    for t in range(TILE):
        here = b.icmp_signed("<", at(t), count)
        token = load(b, index, b.mul(b.select(here, at(t), b.sub(count, at(1))), at(8)), I64)
        mine, meta = b.add(acts, b.mul(stride, token)), b.mul(b.mul(groups, at(4)), token)
        with cgutils.for_range(b, b.sdiv(nbytes, at(PIECE))) as loop:
            to = b.add(b.mul(loop.index, at(TILE * PIECE)), at(PIECE * t))
            store(b, load(b, mine, b.mul(loop.index, at(PIECE)), piece), tile, to)
        for source, target in zip((act_scales, act_sums), _meta_at(b, form, tile, groups), strict=True):
            with cgutils.for_range(b, groups) as loop:
                value = load(b, b.add(source, meta), b.mul(loop.index, at(4)), F32)
                to = b.add(b.mul(loop.index, at(4 * COPIES * TILE)), at(4 * COPIES * t))
                for copy in range(COPIES):
                    store(b, value, target, b.add(to, at(4 * copy)))


@kernel(constants=1)
def rows_times_tile(b, form, codes, scales, biases, tile, groups, out, out_stride, count):
    """Multiply one block of rows, unpacked (see `rows_times_tokens`), with a tile of tokens; results of `count` are written."""
    form = Form.parse(form)
    totals = [variable(b, splat(FLOATS, 0.0)) for _ in range(TILE)]
    metas = _meta_at(b, form, tile, groups)
    with cgutils.for_range(b, spans(b, form, groups)) as loop:
        code_at = b.add(codes, b.mul(loop.index, at(form.span * BLOCK)))
        acts_at = b.add(tile, b.mul(loop.index, at(form.span * form.digits * TILE)))
        for part in range(form.parts):
            group = b.add(b.mul(loop.index, at(form.parts)), at(part))
            dots = _dots(b, form, part, code_at, acts_at)
            scale, bias = scale_and_bias(b, form, scales, biases, group)
            for i, (dot, total) in enumerate(zip(dots, totals, strict=True)):
                act_scale, act_sum = (_of_tokens(b, address, group, i) for address in metas)
                value = fma(b, b.fmul(dot, _of_rows(b, scale, i)), act_scale, b.load(total))
                b.store(value if bias is None else fma(b, _of_rows(b, bias, i), act_sum, value), total)
    found = [b.load(total) for total in totals]
    for t, value in enumerate(_by_token(b, found) if ISA.by_pair else found):
        with b.if_then(b.icmp_signed("<", at(t), count)):
            store(b, value, out, b.mul(out_stride, at(t)))


def _of_rows(b, values, i):
    """A number of each row of the block, for the i-th vector of results."""
    if not ISA.by_pair:
        return values
    first = i % 2 * 2
    return pick(b, values, values, [first, first + 1] * 2)


def _of_tokens(b, address, group, i):
    """A number of each token of the tile, for the i-th vector of results."""
    here = b.mul(group, at(4 * COPIES * TILE))
    if ISA.by_pair:
        return load(b, address, b.add(here, at(i // 2 * 16)), FOUR)
    found = load(b, address, b.add(here, at(i // 4 * 16)), FOUR)
    return pick(b, found, found, [i % 4] * BLOCK)


def _by_token(b, pairs):
    """Results of four rows for each token, from those of two tokens and two rows."""
    return [pick(b, *pairs[i : i + 2], lanes) for i in range(0, len(pairs), 2) for lanes in ([0, 1, 4, 5], [2, 3, 6, 7])]


def _dots(b, form, part, codes, acts):
    """Sums of codes times activations of one group of a span, for each vector of results."""
    found = [None] * TILE
    of_digit = _pairs_of_digit if ISA.by_pair else _dots_of_digit
    for digit in reversed(range(form.digits)):
        sums = of_digit(b, form, part, codes, b.add(acts, at(form.span * TILE * digit)))
        found = [add_digit(b, lower, total) for lower, total in zip(found, sums, strict=True)]
        if digit:
            # registers suffice for the sums of one digit at a time, not for codes that wait for the next
            codes, acts = ISA.after(b, codes, found), ISA.after(b, acts, found)
    return found


def _pieces(form, part):
    return range(part * form.group // PIECE, (part + 1) * form.group // PIECE)


def _dots_of_digit(b, form, part, codes, acts):
    sums = [splat(INTS, MAGIC_BITS)] * TILE
    for piece in _pieces(form, part):
        values = [b.bitcast(load(b, codes, 4 * BLOCK * (piece * 4 + i), INTS), BYTES) for i in range(4)]
        quads = [ISA.quads(b, b.add(acts, at((piece * TILE + t) * PIECE)), 4) for t in range(TILE)]
        for i, v in enumerate(values):
            sums = [ISA.dot_unpacked(b, sums[t], v, quads[t][i], form.value_bits) for t in range(TILE)]
    return sums


def _pairs_of_digit(b, form, part, codes, acts):
    sums = [splat(INTS, MAGIC_BITS)] * TILE
    for piece in _pieces(form, part):
        rows = [load(b, codes, PIECE * (piece * BLOCK + r), BYTES) for r in (0, 2)]
        tokens = [load(b, acts, PIECE * (piece * TILE + t), BYTES) for t in range(0, TILE, 2)]
        sums = [ISA.dot_pairs(b, total, tokens[i // 2], rows[i % 2]) for i, total in enumerate(sums)]
    return sums
