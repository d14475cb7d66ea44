"""Exact fallback for vectors whose codes float32 cannot decide: a warp recodes one at a time with the reference's arithmetic.

These are about one in 500 at 4 bits and one in 35 at 8: `recode_uncertain` returns their codes to the lanes that hold them.
Zero vectors, very short or long ones, NaN, and values whose pair token is not new, since its codes must survive, are stored
afterwards by `store_one_by_one`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import inline_asm_elementwise as asm

from auraflux.ops.hopper.ptx import from_lane
from auraflux.ops.hopper.shared_memory import word_at
from auraflux.ops.turboquant.cuda.encode.tensor_core_parts import ROW_PITCH, inverse_root, pick, place_of, swap_ptx

SQUARES = gl.constexpr(8)  # offset of squares in a row of words, as in `tables.py`
# float64 matrix product, used with one factor of ones
SUM = gl.constexpr("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {$0,$1}, {$2}, {$3}, {$4,$4};")


@gluon.jit
def _warp_sum(x, zero):
    """Sum float64 over a warp by products with ones, over the lanes of a quad and then over quads."""
    one = zero + 1.0
    a, b = asm(SUM, "=&d,=&d,d,d,d", [one, x, zero], (gl.float64, gl.float64), is_pure=False, pack=1)
    a, b = asm(SUM, "=&d,=&d,d,d,d", [a + b, one, zero], (gl.float64, gl.float64), is_pure=False, pack=1)
    return a


@gluon.jit
def _wide(word, HIGH: gl.constexpr):
    """Convert one of the two bfloat16 of a word to float64."""
    half = word & -65536 if HIGH else word << 16
    return half.to(gl.float32, bitcast=True).to(gl.float64)


@gluon.jit
def _inverse(square):
    """Return a length and its inverse from the squared length."""
    # a 20-bit approximation refined by one third-order step
    r = asm("rsqrt.approx.ftz.f64 $0, $1;", "=d,d", [square], gl.float64, is_pure=True, pack=1)
    e = 1.0 - square * r * r
    inverse = r + (r * e) * (0.5 + 0.375 * e)
    infinite = square == float("inf")
    length = gl.where(infinite, float("inf"), gl.where(square == 0.0, 0.0, square * inverse))
    return length, gl.where((square == 0.0) | infinite, 0.0, inverse)


@gluon.jit
def _hadamard(d, inverse, lane):
    """Apply the Walsh-Hadamard transform, without its factor, to a direction rounded to float32, in the reference's order."""
    u0, u1 = (d[0] * inverse).to(gl.float32), (d[1] * inverse).to(gl.float32)
    u2, u3 = (d[2] * inverse).to(gl.float32), (d[3] * inverse).to(gl.float32)
    a0, a1, a2, a3 = u0 + u1, u0 - u1, u2 + u3, u2 - u3
    z = (a0 + a2, a1 + a3, a0 - a2, a1 - a3)
    for i in gl.static_range(5):
        sign = gl.where((lane >> i) % 2 == 0, 1.0, -1.0)
        sums = ()
        for c in gl.static_range(4):
            args = (z[c], sign)
            sums += (asm(swap_ptx(1 << i, "fma.rn.f32 $0, $1, $2, t;"), "=f,f,f", args, gl.float32, is_pure=False, pack=1),)
        z = sums
    return z


@gluon.jit
def _codes_like_reference(
    base, lowest, sign0, sign1, scale, offset, table, midpoints, zero, lane, BITS: gl.constexpr, BUCKETS: gl.constexpr
):
    """Encode one token, four channels per lane; return codes as bytes of a word, its length, and its place in the tile."""
    place = asm("bfind.u32 $0, $1;", "=r,r", [lowest], gl.int32, is_pure=False, pack=1)
    source = base + place * ROW_PITCH + lane * 8
    w0, w1 = word_at(source) ^ sign0, word_at(source + 4) ^ sign1
    d = (_wide(w0, False), _wide(w0, True), _wide(w1, False), _wide(w1, True))
    length, inverse = _inverse(_warp_sum((d[0] * d[0] + d[1] * d[1]) + (d[2] * d[2] + d[3] * d[3]), zero))
    z = _hadamard(d, inverse, lane)
    codes = 0 * lane
    for c in gl.static_range(4):
        found = place_of(z[c], scale, offset, table, BUCKETS)
        near, code = (found & 0xFFFF00) == 0, (found >> 24) & 255
        below = gl.maximum(code - 1, 0)
        midpoint = from_lane(midpoints, below) if BUCKETS == 32 else word_at(midpoints + below * 4)
        code = gl.where(near & (z[c] <= midpoint.to(gl.float32, bitcast=True)), below, code)
        # NaN gets the last code
        code = gl.where(z[c] == z[c], code, (1 << BITS) - 1)
        codes = codes | (code << (8 * c))
    return codes, length, place


@gluon.jit
def _scatter_codes(C, codes, mine, lane, NEAR: gl.constexpr):
    """Move the codes of a token, bytes of four neighbours per lane, to the lanes that hold it."""
    found = ()
    for j in gl.static_range(4):
        a, b = from_lane(codes, lane % 4 * 8 + 2 * j), from_lane(codes, lane % 4 * 8 + 2 * j + 1)
        if not NEAR:
            a, b = pick(a, b, 0x6420), pick(a, b, 0x7531)
        found += (gl.where(mine, a, C[2 * j]), gl.where(mine, b, C[2 * j + 1]))  # type: ignore[assignment]
    return found


@gluon.jit
def recode_uncertain(
    base, C, D, search, mask, lane, BITS: gl.constexpr, BUCKETS: gl.constexpr, NEAR: gl.constexpr
):  # fmt: skip
    """Recode the tokens at `base` whose bits are set in `mask`.

    search  scale and offset of buckets, signs of the rotation, bucket table, midpoints
    """
    scale, offset, signs, table, midpoints = search
    sign0, sign1 = gl.load(signs + 2 * lane), gl.load(signs + 2 * lane + 1)
    zero = (0 * lane).to(gl.float64)
    while gl.max(mask, 0) > 0:
        lowest = mask & (0 - mask)
        mask = mask ^ lowest
        codes, _, place = _codes_like_reference(
            base, lowest, sign0, sign1, scale, offset, table, midpoints, zero, lane, BITS, BUCKETS
        )
        C = _scatter_codes(C, codes, place == lane // 4 * 2, lane, NEAR)
        D = _scatter_codes(D, codes, place == lane // 4 * 2 + 1, lane, NEAR)
    return C, D


@gluon.jit
def store_one_by_one(
    base, store, search, squares, mask, dest, lane,
    HEADS: gl.constexpr, BITS: gl.constexpr, BUCKETS: gl.constexpr, PAIRS: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Encode and store the tokens at `base` whose bits are set in `mask`.

    search  as in `recode_uncertain`
    dest    page, position of the first token, head
    """
    scale, offset, signs, table, midpoints = search
    page, tile, head = dest
    STRIDE: gl.constexpr = 2 * BITS if PAIRS else BITS
    # holds four codes, and with PAIRS those of the pair token
    KIND: gl.constexpr = gl.int64 if STRIDE == 16 else gl.int32 if STRIDE == 8 else gl.int16
    WIDE: gl.constexpr = gl.int64 if STRIDE == 16 else gl.int32
    out = store.codes.to(gl.pointer_type(KIND), bitcast=True)
    sign0, sign1 = gl.load(signs + 2 * lane), gl.load(signs + 2 * lane + 1)
    zero = (0 * lane).to(gl.float64)
    while gl.max(mask, 0) > 0:
        lowest = mask & (0 - mask)
        mask = mask ^ lowest
        found, length, place = _codes_like_reference(
            base, lowest, sign0, sign1, scale, offset, table, midpoints, zero, lane, BITS, BUCKETS
        )
        row = (page.to(gl.int64) * HEADS + head) * PAGE + (tile + place) % PAGE
        unit, total = (0 * lane).to(WIDE), (0 * lane).to(gl.float32)
        for c in gl.static_range(4):
            code = (found >> (8 * c)) & 255
            unit = unit | (code.to(WIDE) << (STRIDE * c))
            square = from_lane(squares, code + SQUARES) if BUCKETS == 32 else word_at(squares + code * 4)
            total += square.to(gl.float32, bitcast=True)
        for i in gl.static_range(5):
            total = asm(swap_ptx(1 << i, "add.rn.f32 $0, $1, t;"), "=f,f", [total], gl.float32, is_pure=False, pack=1)
        norm = (length * inverse_root(total).to(gl.float64)).to(gl.float32)
        gl.store(store.norms + row, norm, mask=lane == 0)
        if PAIRS:
            at = out + ((row // 8 * 8 + lane // 4) * 4 + row % 8 // 2) * 4 + lane % 4
            old = gl.load(at, volatile=True).to(WIDE)
            MINE: gl.constexpr = ((1 << 4 * STRIDE) - 1) // ((1 << STRIDE) - 1) * ((1 << BITS) - 1)
            shift = (place % 2 * BITS).to(WIDE)
            mine = ((0 * lane).to(WIDE) + MINE) << shift
            unit = (old & ~mine) | ((unit << shift) & mine)
        else:
            at = out + (row * 32 + lane)
        gl.store(at, unit.to(KIND), mask=lane >= 0)
