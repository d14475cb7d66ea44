"""Many new tokens of bfloat16 coded into their pages on Hopper: Gluon, with PTX for exact sums and look-ups.

Codes are those of the reference to the bit, without its float64 numbers one by one:

- *Squares* of bfloat16 are exact in float32; a shift and a sum make the bits of a float64 of them, and those are added up.
- *Directions* are x / length rounded once. The inverse length is held in two float32, and x times the first is corrected by its
  own rounding error and x times the second before the final rounding: off by 2 ** -48 before it, the reference by 2 ** -53.
- *The transform* adds in the order of the reference: an eighth of a vector in a lane, the rest by shuffles.
- *Places*: a table in shared memory gives a bucket's midpoint, the code below and the squares of both levels (`_places.py`),
  with a column for every lane where there is room, so that look-ups never share a bank.

A lane has the same coordinates of two tokens, which is what the words of values in pairs hold. Tiles begin at positions that
are multiples of their length, so that no word of two tokens is written by two programs.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops._triton import INTERPRETED, capability
from auraflux.ops.turboquant._places import places_for, step
from auraflux.ops.turboquant._turn import turn_for
from auraflux.ops.turboquant.arrangement import HOPPER, Arrangement
from auraflux.ops.turboquant.pages import CodePages

MANY = 8192  # vectors; fewer are coded as soon one by one
WARPS = 4
# for which a GPU has judged the kernel
WIDTH, KEY_BITS, VALUE_BITS = 128, (4, 8), (2, 4)

SHARED_BASE = gl.constexpr("mov.u32 $0, global_smem; // $1")
LANE = gl.constexpr("mov.u32 $0, %laneid; // $1")
SQUARE = gl.constexpr(
    "{.reg .f32 p; .reg .b32 h; mul.rn.f32 p, $1, $1; mov.b32 h, p; shr.u32 h, h, 3; add.u32 h, h, 0x38000000;"
    "mov.b64 $0, {0, h};}"
)
DIRECTION = gl.constexpr(
    "{.reg .f32 p, e; mul.rn.f32 p, $1, $2; neg.f32 e, p; fma.rn.f32 e, $1, $2, e; fma.rn.f32 e, $1, $3, e;"
    "add.rn.f32 $0, p, e;}"
)
# squares of lengths outside of which a square or an inverse may leave float32
SHORTEST = gl.constexpr(1e-18)
LONGEST = gl.constexpr(1e36)


@gluon.constexpr_function
def _find_ptx(pitch):
    """Find the code of $2 and the square of its level. $3: table of `pitch` bytes a row; $4, $5, $6: scale, offset, buckets."""
    return (
        "{.reg .f32 t, m; .reg .b32 a, x, y; .reg .pred p;"
        "fma.rn.sat.f32 t, $2, $4, $5; fma.rz.f32 t, t, $6, 0f4B000000; mov.b32 a, t;"
        f"mad.lo.u32 a, a, {pitch}, $3; ld.shared.v4.b32 {{x, $0, y, $1}}, [a]; mov.b32 m, x;"
        "setp.gt.f32 p, $2, m; @!p mov.b32 $1, y; @p add.u32 $0, $0, 1;}"
    )


@gluon.constexpr_function
def _shuffle_ptx(span):
    return f"{{.reg .f32 t; shfl.sync.bfly.b32 t, $1, {span}, 31, -1; fma.rn.f32 $0, $1, $2, t;}}"


@gluon.constexpr_function
def row_layout(warps, width):
    """Of [tokens, width]: a lane has an eighth of two tokens."""
    regs = [[0, 1 << i] for i in range((width // 8).bit_length() - 1)] + [[1, 0]]
    lanes = [[0, (width // 8) << i] for i in range(3)] + [[2, 0], [4, 0]]
    bases = [[8 << i, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(regs, lanes, bases, [], [8 * warps, width])


@gluon.jit
def _inverse_root(s):
    """1 / sqrt of float64 numbers that float32 holds: an approximation to 22 bits, and one step of third order."""
    r = gl.rsqrt(s.to(gl.float32)).to(gl.float64)
    e = 1.0 - s * r * r
    return r * (1.0 + e * (0.5 + 0.375 * e))


@gluon.jit
def _turned(x, D: gl.constexpr, NW: gl.constexpr):
    """Apply the Walsh-Hadamard transform without its factor."""
    L: gl.constexpr = row_layout(NW, D)
    R: gl.constexpr = 8 * NW
    for i in gl.static_range(5):
        if 1 << i < D // 8:
            a, b = gl.split(gl.permute(gl.reshape(x, [R, D >> (i + 1), 2, 1 << i]), [0, 1, 3, 2]))
            x = gl.reshape(gl.permute(gl.join(a + b, a - b), [0, 1, 3, 2]), [R, D])
    x = gl.convert_layout(x, L, assert_trivial=True)
    d = gl.arange(0, D, layout=gl.SliceLayout(0, L))[None, :]
    for i in gl.static_range(3):
        sign = gl.where((d // (D // 8 << i)) % 2 == 0, 1.0, -1.0)
        x = gl.inline_asm_elementwise(_shuffle_ptx(1 << i), "=f,f,f", [x, sign], gl.float32, is_pure=False, pack=1)
    return x


@gluon.jit
def _encoded(
    f, signs, base, scale, offset, buckets, D: gl.constexpr, NW: gl.constexpr, PITCH: gl.constexpr, STEP: gl.constexpr
):  # fmt: skip
    """Encode rows [R, D] of float32 that bfloat16 holds: codes int32 [R, D] and norms [R]."""
    square = gl.sum(gl.inline_asm_elementwise(SQUARE, "=d,f", [f], gl.float64, is_pure=True, pack=1), 1)
    inverse = _inverse_root(square)
    length = square * inverse
    high = inverse.to(gl.float32)
    low = (inverse - high.to(gl.float64)).to(gl.float32)
    u = gl.inline_asm_elementwise(DIRECTION, "=f,f,f,f", [f, high[:, None], low[:, None]], gl.float32, is_pure=True, pack=1)
    # very short or long, zeros, or no numbers
    unusual = gl.max(((square < SHORTEST) | (square > LONGEST)).to(gl.int32), 0) > 0
    if unusual:
        wide = f.to(gl.float64)
        length = gl.sqrt(gl.sum(wide * wide, 1))
        inverse = gl.where(length == 0, 0.0, 1.0 / length)
        u = (wide * inverse[:, None]).to(gl.float32)
    z = _turned(u * signs, D, NW)
    if unusual:
        # what is no number has the last code
        z = gl.where(z == z, z, float("inf"))
    args = [z, base, scale, offset, buckets]
    codes, squares = gl.inline_asm_elementwise(
        _find_ptx(PITCH), "=&r,=&r,f,r,f,f,f", args, (gl.int32, gl.int32), is_pure=False, pack=1
    )  # fmt: skip
    total = gl.sum(squares, 1).to(gl.float64) * STEP
    return codes, (length * _inverse_root(total)).to(gl.float32)


@gluon.jit
def _filled(places, ROWS: gl.constexpr, COLUMNS: gl.constexpr, NW: gl.constexpr):
    """Fill shared memory with ROWS places, COLUMNS times each."""
    LT: gl.constexpr = gl.BlockedLayout([1, 1, 4], [32 // COLUMNS, COLUMNS, 1], [NW, 1, 1], [2, 1, 0])
    shared = gl.allocate_shared_memory(gl.int32, [ROWS, COLUMNS, 4], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LT)))[:, None, None]
    c = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LT)))[None, :, None]
    w = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, LT)))[None, None, :]
    shared.store(gl.load(places + r * 4 + w + c * 0))
    return shared


@gluon.jit
def _found(f, signs, places, scale, offset, buckets, BITS: gl.constexpr, STEP: gl.constexpr, D: gl.constexpr, NW: gl.constexpr):
    """Encode rows with a table of their own."""
    COLUMNS: gl.constexpr = 1 if BITS == 8 else 32
    PITCH: gl.constexpr = 16 * COLUMNS
    shared = _filled(places, 2 << BITS, COLUMNS, NW)
    gl.thread_barrier()
    lane = gl.inline_asm_elementwise(LANE, "=r,r", [buckets], gl.int32, is_pure=True, pack=1)
    base = gl.inline_asm_elementwise(SHARED_BASE, "=r,r", [buckets], gl.int32, is_pure=True, pack=1)
    if COLUMNS == 32:
        base += lane * 16
    # a bucket n comes as the bits of 2 ** 23 + n, which are more than n
    MORE: gl.constexpr = (0x4B000000 * PITCH) % (1 << 32)
    base = (base.to(gl.uint32) - MORE).to(gl.int32, bitcast=True)
    codes, norms = _encoded(f, signs, base, scale, offset, buckets, D, NW, PITCH, STEP)
    shared._keep_alive()
    return codes, norms


@gluon.jit
def _halves(x, BITS: gl.constexpr):
    a, b = gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    return a + (b << BITS)


@gluon.jit
def _packed(x, FROM: gl.constexpr):
    """Join neighbours, FROM bits each, until they fill words."""
    if FROM < 4:
        x = _halves(x, FROM)
    if FROM < 8:
        x = _halves(x, max(FROM, 4))
    if FROM < 16:
        x = _halves(x, max(FROM, 8))
    return _halves(x, 16)


@gluon.jit
def _store_rows(out, row, there, codes, BITS: gl.constexpr, D: gl.constexpr):
    words = _packed(codes, BITS)
    W: gl.constexpr = D * BITS // 32
    LW: gl.constexpr = words.type.layout
    w = gl.arange(0, W, layout=gl.SliceLayout(0, LW))[None, :]
    row = gl.convert_layout(row, gl.SliceLayout(1, LW), assert_trivial=True)
    there = gl.convert_layout(there, gl.SliceLayout(1, LW), assert_trivial=True)
    gl.store(out + row[:, None] * W + w, words, mask=there[:, None])


@gluon.jit
def _store_pairs(out, row, there, codes, BITS: gl.constexpr, D: gl.constexpr):
    R: gl.constexpr = codes.shape[0]
    PER: gl.constexpr = D * BITS // 128
    even, odd = gl.split(gl.permute(gl.reshape(codes, [R // 2, 2, D]), [0, 2, 1]))
    words = _packed(even + (odd << BITS), 2 * BITS) if BITS < 8 else _halves(even + (odd << 8), 16)
    LW: gl.constexpr = words.type.layout
    w = gl.arange(0, 8 * PER, layout=gl.SliceLayout(0, LW))[None, :]
    a, b = gl.split(gl.reshape(there.to(gl.int32), [R // 2, 2]))
    a_row, b_row = gl.split(gl.reshape(row, [R // 2, 2]))
    a = gl.convert_layout(a, gl.SliceLayout(1, LW))[:, None]
    b = gl.convert_layout(b, gl.SliceLayout(1, LW))[:, None]
    at = gl.convert_layout(gl.maximum(a_row, b_row), gl.SliceLayout(1, LW))[:, None]
    at = out + (at // 8 * 8 + w // PER) * (4 * PER) + at % 8 // 2 * PER + w % PER
    # of a pair that is half new the other half stays
    EVEN: gl.constexpr = 0xFFFFFFFF // ((1 << 2 * BITS) - 1) * ((1 << BITS) - 1)
    old = gl.load(at, mask=(a + b == 1) & (w >= 0), other=0)
    mine = gl.where(a > 0, EVEN, EVEN ^ 0xFFFFFFFF).to(gl.uint32).to(gl.int32, bitcast=True)
    words = gl.where(a + b == 2, words, (old & ~mine) | (words & mine))
    gl.store(at, words, mask=(a + b > 0) & (w >= 0))


@gluon.jit
def append_many(
    k, v, k_codes, k_norms, k_places, k_scale, k_offset, k_buckets, v_codes, v_norms, v_places, v_scale, v_offset, v_buckets,
    signs, table, lengths, tokens, table_width, pool,
    HEADS: gl.constexpr, D: gl.constexpr, KEY_BITS: gl.constexpr, KEY_STEP: gl.constexpr, VALUE_BITS: gl.constexpr,
    VALUE_STEP: gl.constexpr, PAGE: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """Encode the keys or values of one head, 8 NW neighbouring tokens, into their pages; grid (tiles, HEADS, 2)."""
    R: gl.constexpr = 8 * NW
    L: gl.constexpr = row_layout(NW, D)
    tile, head = gl.program_id(0), gl.program_id(1)
    end = gl.load(lengths)
    first = end - tokens
    position = (first // R + tile) * R + gl.arange(0, R, layout=gl.SliceLayout(1, L))
    new = (position >= first) & (position < end)
    inside = (position >= gl.maximum(first, 0)) & (position < gl.minimum(end, table_width * PAGE))
    page = gl.load(table + position // PAGE, mask=inside, other=-1)
    there = inside & (page >= 0) & (page < pool)
    token = position - first
    d = gl.arange(0, D, layout=gl.SliceLayout(0, L))
    source = (token.to(gl.int64) * HEADS + head)[:, None] * D + d[None, :]
    sign = gl.load(signs + d)[None, :]
    row = (page.to(gl.int64) * HEADS + head) * PAGE + position % PAGE
    if gl.program_id(2) == 0:
        f = gl.load(k + source, mask=new[:, None], other=0.0).to(gl.float32)
        codes, norm = _found(f, sign, k_places, k_scale, k_offset, k_buckets, KEY_BITS, KEY_STEP, D, NW)
        gl.store(k_norms + row, norm, mask=there)
        _store_rows(k_codes, row, there, codes, KEY_BITS, D)
    else:
        f = gl.load(v + source, mask=new[:, None], other=0.0).to(gl.float32)
        codes, norm = _found(f, sign, v_places, v_scale, v_offset, v_buckets, VALUE_BITS, VALUE_STEP, D, NW)
        gl.store(v_norms + row, norm, mask=there)
        _store_pairs(v_codes, row, there, codes, VALUE_BITS, D)


def appends(k: Tensor, v: Tensor, pages: CodePages) -> bool:
    """Whether these are many tokens of one sequence, of a kind that the kernel takes."""
    if pages.arrangement is not Arrangement.PAIRS or {k.dtype, v.dtype} != {torch.bfloat16} or len(pages.lengths) > 1:
        return False
    fits = pages.width == WIDTH and pages.key_bits in KEY_BITS and pages.value_bits in VALUE_BITS
    return fits and k.numel() >= MANY * WIDTH and not INTERPRETED and capability(k.device)[0] == HOPPER


def append_at_once(k: Tensor, v: Tensor, pages: CodePages) -> None:
    (tokens, heads, width), device = k.shape, k.device
    signs, _ = turn_for(width, pages.seed, False, device)
    append_many[(tokens // (8 * WARPS) + 2, heads, 2)](
        *(k, v),
        *(pages.key_codes, pages.key_norms, *places_for(pages.key_bits, width, device)),
        *(pages.value_codes, pages.value_norms, *places_for(pages.value_bits, width, device)),
        *(signs, pages.table, pages.lengths, tokens, pages.table.shape[1], pages.pool[0]),
        HEADS=heads,
        D=width,
        KEY_BITS=pages.key_bits,
        KEY_STEP=step(pages.key_bits),
        VALUE_BITS=pages.value_bits,
        VALUE_STEP=step(pages.value_bits),
        PAGE=pages.pool[1],
        NW=WARPS,
        num_warps=WARPS,
    )
