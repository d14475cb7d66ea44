"""Prologue of decode attention: locate the token, index the lanes, and copy the first blocks of codes."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.hopper.reduce import warp_uniform
from auraflux.ops.turboquant.cuda.decode.ring import block_of, copy_keys, copy_values, page_of, stage_nbytes

WARP = gl.constexpr("mov.u32 $0, %tid.x; shr.u32 $0, $0, 5; // $1")
MASKED_LANE = gl.constexpr("{.reg .b32 l; mov.u32 l, %laneid; and.b32 $0, l, $1;}")


@gluon.jit
def lanes_of(begin, pool, U: gl.constexpr, NW: gl.constexpr):
    """Return warp and lane indices, one element per lane, the tokens of a warp's first block, and its first position."""
    LL: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [NW, 1], [1, 0])
    LS: gl.constexpr = gl.SliceLayout(2, gl.NVMMADistributedLayout([2, 0], [NW, 1, 1], [1, 16, 8]))
    key = gl.arange(0, NW, layout=gl.SliceLayout(1, LS))[:, None] * (16 * U) + begin
    key += gl.arange(0, 16, layout=gl.SliceLayout(0, LS))[None, :]
    warp = gl.arange(0, NW, layout=gl.SliceLayout(1, LL))[:, None]
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, LL))[None, :] + warp * 0
    # 0 in all lanes, but opaque to the compiler: page indices known to be uniform would be moved to uniform registers, which
    # waits for the load at once
    zero = gl.inline_asm_elementwise(MASKED_LANE, "=r,r", [lane * 0 + (pool >> 31)], gl.int32, is_pure=True, pack=1)
    return warp, lane, key, warp * (16 * U) + begin + zero


@gluon.jit
def first_pages(index, sequence, expected, t, stride, PAGE: gl.constexpr):
    """Load the pages of a warp's first two steps and the table row; the expected sequence's pages load without waiting."""
    mine = index.table + sequence.to(gl.int64) * index.width
    table = index.table + expected.to(gl.int64) * index.width
    page, next_page = page_of(table, t, index.width, PAGE), page_of(table, t + stride, index.width, PAGE)
    other = t * 0 + sequence != expected
    page = gl.load(mine + gl.minimum(t // PAGE, index.width - 1), mask=other, other=page)
    next_page = gl.load(mine + gl.minimum((t + stride) // PAGE, index.width - 1), mask=other, other=next_page)
    return page, next_page, mine


@gluon.jit
def first_blocks(
    pages, t, stride, head, pool, table_width,
    HEADS: gl.constexpr, PAGE: gl.constexpr, UNITS: gl.constexpr, DEEP: gl.constexpr,
):  # fmt: skip
    """Return a warp's first DEEP blocks, and the pages of the next two steps."""
    page, next_page, table = pages
    blocks = ()
    for d in gl.static_range(DEEP):
        block = block_of(page, t + d * stride, head, pool, HEADS, PAGE, UNITS)
        blocks = blocks + (block,)  # type: ignore[assignment]  # noqa: RUF005
        page, next_page = next_page, page_of(table, t + (d + 2) * stride, table_width, PAGE)
    return blocks, page, next_page, table


@gluon.jit
def copy_old_blocks(blocks, to, source, t, stride, old, CONFIG: gl.constexpr):
    """Copy those of a warp's first blocks to prefetch that hold no new tokens."""
    D: gl.constexpr = CONFIG.shape.width
    KEY_BITS: gl.constexpr = CONFIG.shape.key_bits
    VALUE_BITS: gl.constexpr = CONFIG.shape.value_bits
    U: gl.constexpr = CONFIG.work.blocks
    STAGE: gl.constexpr = stage_nbytes(D, KEY_BITS, VALUE_BITS, U)
    PREFETCH: gl.constexpr = CONFIG.work.prefetch
    for d in gl.static_range(PREFETCH):
        older = t + d * stride + 16 * U <= old
        copy_keys(to, source, d * STAGE, blocks[d], older, D, KEY_BITS, U, False)
        copy_values(to, source, d * STAGE, blocks[d], older, D, VALUE_BITS, U, False)


@gluon.jit
def copy_new_blocks(blocks, to, source, t, stride, old, end, CONFIG: gl.constexpr):
    """Copy the rest of a warp's first blocks, and commit the groups."""
    D: gl.constexpr = CONFIG.shape.width
    KEY_BITS: gl.constexpr = CONFIG.shape.key_bits
    VALUE_BITS: gl.constexpr = CONFIG.shape.value_bits
    U: gl.constexpr = CONFIG.work.blocks
    STAGE: gl.constexpr = stage_nbytes(D, KEY_BITS, VALUE_BITS, U)
    DEEP: gl.constexpr = CONFIG.work.depth
    for d in gl.static_range(DEEP):
        newer = t + d * stride < end
        if d < CONFIG.work.prefetch:
            newer &= t + d * stride + 16 * U > old
        copy_keys(to, source, d * STAGE, blocks[d], newer, D, KEY_BITS, U, True)
        copy_values(to, source, d * STAGE, blocks[d], newer, D, VALUE_BITS, U, True)


@gluon.jit
def padded_batch_size(begin, end, stride, U: gl.constexpr):
    """Count a warp's steps: warps are independent, and each stops at its own end."""
    warp = gl.inline_asm_elementwise(WARP, "=r,r", [begin], dtype=gl.int32, is_pure=True, pack=1)
    return gl.cdiv(gl.maximum(end - begin - warp * (16 * U), 0), stride)


@gluon.jit
def find_token(index, token, expected, tokens, S: gl.constexpr, NW: gl.constexpr):
    """Return a token's sequence, its position, and the cached length before this step."""
    if S == 1:
        sequence = expected
        old = gl.load(index.lengths) - tokens
        position = old + token
    else:
        # replicated in every warp: a sum across warps would need shared memory
        b = gl.arange(0, S, layout=gl.BlockedLayout([max(1, S // 32)], [32], [NW], [0]))
        before = gl.load(index.starts + b, mask=b < index.sequences, other=1 << 30) <= token
        sequence = warp_uniform(gl.sum(before.to(gl.int32), 0)) - 1
        position = gl.load(index.lengths + sequence) - gl.load(index.starts + sequence + 1) + token
        old = position - token + gl.load(index.starts + sequence)
    return sequence, position, old
