"""Vectors whose codes float32 cannot tell, coded with the numbers of the reference: a warp takes one at a time.

These are about one of 500 at 4 bits and one of 35 at 8; vectors of zeros, very short or long ones, and what is no number; and
values whose neighbour in the pair is not new, since its codes are kept.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import inline_asm_elementwise as asm

from auraflux.ops.turboquant._append_parts import ROW_PITCH, inverse_root, place_of, swap_ptx, word_at, word_of

SQUARES = gl.constexpr(8)  # where squares begin in a row of words, as in `_places`


@gluon.constexpr_function
def _add_wide_ptx(span):
    text = "{.reg .b32 l, h; .reg .f64 t; mov.b64 {l,h}, $1;"
    for half in "lh":
        text += f"shfl.sync.bfly.b32 {half}, {half}, {span}, 31, -1;"
    return text + "mov.b64 t, {l,h}; add.rn.f64 $0, $1, t;}"


@gluon.jit
def _directions(d0, d1, d2, d3):
    """Give the length of a row, four coordinates in each lane, and its direction rounded to float32."""
    square = (d0 * d0 + d1 * d1) + (d2 * d2 + d3 * d3)
    for i in gl.static_range(5):
        square = asm(_add_wide_ptx(1 << i), "=d,d", (square,), gl.float64, is_pure=False, pack=1)
    # an approximation to 20 bits, and one step of third order
    r = asm("rsqrt.approx.ftz.f64 $0, $1;", "=d,d", [square], gl.float64, is_pure=True, pack=1)
    e = 1.0 - square * r * r
    inverse = r * (1.0 + e * (0.5 + 0.375 * e))
    endless = square == float("inf")
    length = gl.where(endless, float("inf"), gl.where(square == 0.0, 0.0, square * inverse))
    inverse = gl.where((square == 0.0) | endless, 0.0, inverse)
    units = (
        (d0 * inverse).to(gl.float32),
        (d1 * inverse).to(gl.float32),
        (d2 * inverse).to(gl.float32),
        (d3 * inverse).to(gl.float32),
    )
    return length, units


@gluon.jit
def _turned(u, lane):
    """Apply the Walsh-Hadamard transform, without its factor, in the order of the reference."""
    a0, a1, a2, a3 = u[0] + u[1], u[0] - u[1], u[2] + u[3], u[2] - u[3]
    z = (a0 + a2, a1 + a3, a0 - a2, a1 - a3)
    for i in gl.static_range(5):
        sign = gl.where((lane >> i) % 2 == 0, 1.0, -1.0)
        turned = ()
        for c in gl.static_range(4):
            turned += (
                asm(
                    swap_ptx(1 << i, "fma.rn.f32 $0, $1, $2, t;"),
                    "=f,f,f",
                    (
                        z[c],
                        sign,
                    ),
                    gl.float32,
                    is_pure=False,
                    pack=1,
                ),
            )
        z = turned
    return z


@gluon.jit
def _wide(word, HIGH: gl.constexpr):
    """Take one of the two bfloat16 of a word."""
    half = word & -65536 if HIGH else word << 16
    return half.to(gl.float32, bitcast=True).to(gl.float64)


@gluon.jit
def settle(
    base, codes, norms, scale, offset, signs, table, squares, middles, mask, page, tile, head, lane,
    HEADS: gl.constexpr, BITS: gl.constexpr, BUCKETS: gl.constexpr, PAIRS: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Encode those tokens from position `tile` on that bits of `mask` name; they lie at `base`. A lane has four coordinates."""
    STRIDE: gl.constexpr = 2 * BITS if PAIRS else BITS
    KIND: gl.constexpr = gl.int32 if STRIDE == 8 else gl.int16  # holds four codes, and room for those of another token
    codes = codes.to(gl.pointer_type(KIND), bitcast=True)
    sign0, sign1 = gl.load(signs + 2 * lane), gl.load(signs + 2 * lane + 1)
    while gl.max(mask, 0) > 0:
        lowest = mask & (0 - mask)
        mask = mask ^ lowest
        place = asm("bfind.u32 $0, $1;", "=r,r", [lowest], gl.int32, is_pure=False, pack=1)
        position = tile + place
        row = (page.to(gl.int64) * HEADS + head) * PAGE + position % PAGE
        if PAIRS:
            at = codes + ((row // 8 * 8 + lane // 4) * 4 + row % 8 // 2) * 4 + lane % 4
            old = gl.load(at, volatile=True).to(gl.int32)
        else:
            at = codes + (row * 32 + lane)
        source = base + place * ROW_PITCH + lane * 8
        w0, w1 = word_at(source) ^ sign0, word_at(source + 4) ^ sign1
        length, units = _directions(_wide(w0, False), _wide(w0, True), _wide(w1, False), _wide(w1, True))
        z = _turned(units, lane)
        unit, total = 0 * lane, (0 * lane).to(gl.float32)
        for c in gl.static_range(4):
            found = place_of(z[c], scale, offset, table, BUCKETS)
            near, code = (found & 0xFFFF00) == 0, (found >> 24) & 255
            below = gl.maximum(code - 1, 0)
            middle = word_of(middles, below) if BUCKETS == 32 else word_at(middles + below * 4)
            code = gl.where(near & (z[c] <= middle.to(gl.float32, bitcast=True)), below, code)
            # what is no number has the last code
            code = gl.where(z[c] == z[c], code, (1 << BITS) - 1)
            unit = unit | (code << (STRIDE * c))
            square = word_of(squares, code + SQUARES) if BUCKETS == 32 else word_at(squares + code * 4)
            total += square.to(gl.float32, bitcast=True)
        for i in gl.static_range(5):
            total = asm(swap_ptx(1 << i, "add.rn.f32 $0, $1, t;"), "=f,f", [total], gl.float32, is_pure=False, pack=1)
        norm = (length * inverse_root(total).to(gl.float64)).to(gl.float32)
        gl.store(norms + row, norm, mask=lane == 0)
        if PAIRS:
            MINE: gl.constexpr = ((1 << 4 * STRIDE) - 1) // ((1 << STRIDE) - 1) * ((1 << BITS) - 1)
            shift = position % 2 * BITS
            mine = (MINE + 0 * lane) << shift
            unit = (old & ~mine) | ((unit << shift) & mine)
        gl.store(at, unit.to(KIND), mask=lane >= 0)
