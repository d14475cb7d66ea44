"""Per-warp ring buffers in shared memory that stream codes by `cp.async` in decode attention on Hopper.

A block is 16 tokens of a head: keys, values in pairs, and the norms of both. A stage of the ring has U neighbouring blocks. A
lane reads back the words that it copied itself, or, where its own are fewer than 16 bytes, words copied by its warp.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.hopper.ptx import SHARED_BASE
from auraflux.ops.turboquant.cuda.decode.lookup import norm_layout


@gluon.constexpr_function
def key_words(width, bits):
    """Return the words of a key, and how many consecutive ones a lane has."""
    words = width * bits // 32
    return words, 3 if bits % 3 == 0 else min(4, words // 4)


@gluon.constexpr_function
def pieces(words):
    """Split a lane's neighbouring words into vector copies: their number, and words of each."""
    each = min(4, words)
    return words // each, each


@gluon.constexpr_function
def linear_keys(width, bits):
    """Return whether a block of keys is copied linearly: a lane's neighbouring words do not fill a 16-byte copy."""
    return bits % 3 == 0 or width * bits // 32 < 16


@gluon.constexpr_function
def linear_values(width, bits):
    """Return whether a block of values is copied linearly; with wider heads the extra address would spill registers."""
    return bits % 3 == 0 or (width == 64 and bits < 8)


@gluon.constexpr_function
def _key_copies(rows, span, pitch, words):
    """List a lane's copies of a block of keys, `rows` of `words` each: (to, from, nbytes, predicate)."""
    parts = rows // 2
    return [(128 * r * words, 4 * (r // parts * 8 * pitch + r % parts * span), 4 * words, "p") for r in range(rows)]


@gluon.constexpr_function
def _value_copies(words):
    """List the copies of a block of values, up to 512 neighbouring bytes at a time: 16 tokens in pairs, `words` per lane of 8.

    A lane with several copies finds each 512 bytes after the previous one.
    """
    count, each = pieces(words)
    places = [(h, i) for h in range(2) for i in range(count)]
    return [(128 * words * h + 512 // count * i, 128 * words * h + 512 * i, 4 * each, "p") for h, i in places]


@gluon.constexpr_function
def _linear_copies(nbytes):
    """List linear copies of a block, 16 bytes per lane at a time, by half of the lanes at the end."""
    return [(at, at, 16, "p" if nbytes - at >= 512 else "q") for at in range(0, nbytes, 512)]


@gluon.constexpr_function
def _copy_ptx(copies, nbytes, blocks, norms, end):
    """Return PTX that copies neighbouring blocks of `nbytes`, and with `norms` one norm per lane and block.

    end     commit the copies as a group
    $1, $2: to; $3, $4: from (words, norms); $5: predicate
    """
    text = "{.reg .pred p, q; .reg .b32 l; setp.ne.b32 p, $5, 0; mov.u32 l, %laneid; setp.lt.and.u32 q, l, 16, p; "
    text += "bar.warp.sync 0xffffffff; "
    for b in range(blocks):
        for to, source, size, who in copies:
            how = "cg" if size == 16 else "ca"
            text += f"@{who} cp.async.{how}.shared.global [$1 + {b * nbytes + to}], [$3 + {b * nbytes + source}], {size}; "
        if norms:
            text += f"@p cp.async.ca.shared.global [$2 + {b * 128}], [$4 + {b * 64}], 4; "
    return text + ("cp.async.commit_group; " if end else "") + "mov.b32 $0, 0;}"


@gluon.constexpr_function
def key_ptx(width, bits, blocks, end):
    words, each = key_words(width, bits)
    copies = _linear_copies(64 * words) if linear_keys(width, bits) else _key_copies(words // 2 // each, 4 * each, words, each)
    return _copy_ptx(copies, 64 * words, blocks, True, end)


@gluon.constexpr_function
def value_ptx(width, bits, blocks, end):
    words = width * bits // 128
    copies = _linear_copies(256 * words) if linear_values(width, bits) else _value_copies(words)
    return _copy_ptx(copies, 256 * words, blocks, False, end)


@gluon.constexpr_function
def _block_ptx(page):
    return f"bfe.u32 $0, $1, 4, {page.bit_length() - 5};"


@gluon.jit
def page_of(table, token, table_width, PAGE: gl.constexpr):
    # tokens are never negative, which the compiler cannot know: unsigned division by PAGE is a shift
    return gl.load(table + gl.minimum((token.to(gl.uint32) // PAGE).to(gl.int32), table_width - 1))


@gluon.jit
def block_of(page, token, head, pool, HEADS: gl.constexpr, PAGE: gl.constexpr, UNITS: gl.constexpr):
    """Return the pool's block of 16 tokens that begins at `token`; for a missing page any block, since its scores are masked.

    UNITS  codes have 3 or 6 bits: each form avoids register spills in its own loop
    """
    page = gl.where(page.to(gl.uint32) < pool, page, 0)
    if UNITS or PAGE & (PAGE - 1) != 0:
        within = (token.to(gl.uint32) % PAGE // 16).to(gl.int32)
    else:
        within = gl.inline_asm_elementwise(_block_ptx(PAGE), "=r,r", [token], gl.int32, is_pure=True, pack=1)
    return (page * HEADS + head) * (PAGE // 16) + within


@gluon.constexpr_function
def stage_nbytes(width, key_bits, value_bits, blocks):
    """Return the bytes of a ring stage of a warp: keys, values, norms."""
    return blocks * (2 * width * (key_bits + value_bits) + 128)


@gluon.jit
def _copy(PTX: gl.constexpr, to, n_to, codes, source, n_from, block, there, NBYTES: gl.constexpr):
    """Copy a lane's words of blocks of NBYTES and their norms, where `there`."""
    block = block.to(gl.int64)
    args = [to, n_to, codes.to(gl.int64) + (block * NBYTES + source), n_from + block * 64, there.to(gl.int32)]
    gl.inline_asm_elementwise(PTX, "=r,r,r,l,l,r,~{memory}", args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def copy_keys(to, source, stage, block, there, D: gl.constexpr, BITS: gl.constexpr, U: gl.constexpr, END: gl.constexpr):
    """Copy a stage's keys and all norms; END commits them as a group."""
    k_codes, _, k_from, _, n_from = source
    _copy(key_ptx(D, BITS, U, END), to[0] + stage, to[2] + stage, k_codes, k_from, n_from, block, there, 2 * D * BITS)


@gluon.jit
def copy_values(to, source, stage, block, there, D: gl.constexpr, BITS: gl.constexpr, U: gl.constexpr, END: gl.constexpr):
    _, v_codes, _, v_from, n_from = source
    _copy(value_ptx(D, BITS, U, END), to[1] + stage, to[2], v_codes, v_from, n_from, block, there, 2 * D * BITS)


@gluon.jit
def sources(keys, values, lane, D: gl.constexpr, KEY_BITS: gl.constexpr, VALUE_BITS: gl.constexpr):
    """Return the base of keys and values, a lane's offsets in a block of each, and the address of its norms."""
    KW: gl.constexpr = key_words(D, KEY_BITS)[0]
    CW: gl.constexpr = key_words(D, KEY_BITS)[1]
    key = lane * 16 if linear_keys(D, KEY_BITS) else (lane // 4 * KW + lane % 4 * CW) * 4
    # each of four lanes copies one of: the norm of key g, of key g + 8, and the same of values
    norms = gl.where(lane % 4 < 2, keys.norms.to(gl.int64), values.norms.to(gl.int64)) + (lane // 4 + lane % 2 * 8) * 4
    value = lane * (16 if linear_values(D, VALUE_BITS) else 4 * pieces(D * VALUE_BITS // 128)[1])
    return keys.codes, values.codes, key, value, norms


@gluon.jit
def places(
    split, warp, lane, START: gl.constexpr, DEEP: gl.constexpr, U: gl.constexpr, D: gl.constexpr, KEY_BITS: gl.constexpr,
    VALUE_BITS: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """Return the shared-memory base, and where a lane copies to and reads from in the first stage: keys, values, norms."""
    LN: gl.constexpr = norm_layout(NW)
    KW: gl.constexpr = key_words(D, KEY_BITS)[0]
    CW: gl.constexpr = key_words(D, KEY_BITS)[1]
    VW: gl.constexpr = D * VALUE_BITS // 128
    VALUES: gl.constexpr = U * 64 * KW
    NORMS: gl.constexpr = VALUES + U * 256 * VW
    WHOLE: gl.constexpr = DEEP * (NORMS + U * 128)
    base = gl.inline_asm_elementwise(SHARED_BASE, "=r,r", [split], dtype=gl.int32, is_pure=True, pack=1)
    ring = base + START + (warp + lane * 0) * WHOLE
    k_at = ring + (lane // 4 * KW + lane % 4 * 3) * 4 if KEY_BITS % 3 == 0 else ring + lane * (4 * CW)
    v_at = ring + VALUES + lane * (4 * VW if VALUE_BITS % 3 == 0 else 4 * pieces(VW)[1])
    v_to = v_at
    if linear_values(D, VALUE_BITS):
        v_to = ring + VALUES + lane * 16
    elif VW > 4:
        # a lane's copies are adjacent in global memory; swizzle them so that a copy has no bank conflicts
        PARTS: gl.constexpr = VW // 4
        v_to = ring + VALUES + (lane % PARTS * 32 + ((lane // PARTS) ^ (lane % PARTS * (8 // PARTS)))) * 16
    quad = gl.arange(0, NW, layout=gl.SliceLayout(1, LN))[:, None] * WHOLE
    quad += base + START + NORMS + gl.arange(0, 8, layout=gl.SliceLayout(0, LN))[None, :] * 16
    return base, (ring + lane * 16, v_to, ring + NORMS + lane * 4), (k_at, v_at, quad)
