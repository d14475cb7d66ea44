"""Decode attention over pages of codes in pairs on Hopper: Gluon, with PTX for look-ups.

- A byte names two neighbouring levels of an operand. A table in shared memory turns it into two float16 numbers, with a column
  for every lane, so that look-ups never share a bank: one `prmt` makes the address, one `ld.shared` two elements. Codes of 2
  bits come four to a byte and are looked up as nibbles, codes of 8 bits one by one.
- Keys [16 tokens, D] and values [D, 16 tokens] are the first operand of `mma.m16n8k16`, query heads its 8 columns. A lane's
  words of a key, and of 16 values in pairs (`arrangement.py`), hold just what its registers need: nothing is shuffled.
- Codes and norms go through a ring in shared memory, one of its own for each warp, by `cp.async`: registers would not hold what
  must be under way to keep the memory busy. A lane reads back the codes that it asked for itself, so warps wait for nobody.
- Warps are the batch of a 3-D layout: each has its own tokens, maximum and sums. They meet only at the end.
- Queries are rotated by every program, while its first codes are on their way. Rows of the sums are coordinates in the order
  of the registers; `finish_pairs` undoes that, since the Walsh-Hadamard transform is the same for any order of index bits.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from auraflux.ops.turboquant._hopper_parts import (
    block_of,
    copy,
    copy_ptx,
    load_queries,
    look_up,
    norm_layout,
    page_of,
    pieces,
    query_layout,
    read,
    read_norms,
    run,
    table_words,
    transform,
    wait_ptx,
)

NOTHING = gl.constexpr(-1e30)  # a score of what is not seen; below the maximum at the start
TRANSPOSE = gl.constexpr("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;")
SHARED_BASE = gl.constexpr("mov.u32 $0, global_smem; // $1")
RING = gl.constexpr(17 * 4096)  # where it begins in shared memory, after the table and the queries
LOG2E = gl.constexpr(1.4426950408889634)
LANE = gl.constexpr("mov.u32 $0, %laneid; shl.b32 $0, $0, 2; // $1")
MASKED_LANE = gl.constexpr("{.reg .b32 l; mov.u32 l, %laneid; and.b32 $0, l, $1;}")


@gluon.jit
def attend_pairs(
    q, signs, k_codes, k_norms, v_codes, v_norms, levels, table, lengths, starts, part_o, part_m, part_l,
    factor, cap, window, tokens, sequences, table_width, pool, splits,
    G: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, S: gl.constexpr, NW: gl.constexpr,
    DEEP: gl.constexpr, KEY_BITS: gl.constexpr, VALUE_BITS: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Attend from one token's query heads to the keys of one split; grid (splits, HEADS * tiles of 8 query heads, tokens).

    factor  what makes the products of rotated queries and levels logarithms to base 2, or, capped, arguments of the cap
    cap     what capped scores reach, to base 2
    """
    TILES: gl.constexpr = (G + 7) // 8
    EACH: gl.constexpr = (G + TILES - 1) // TILES
    KW: gl.constexpr = D * KEY_BITS // 32
    CW: gl.constexpr = min(4, KW // 4)
    J: gl.constexpr = KW // 4 // CW
    VW: gl.constexpr = D * VALUE_BITS // 128  # words of a lane, of 8 tokens
    M: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [NW, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, M, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, M, 2)
    LL: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [NW, 1], [1, 0])
    LN: gl.constexpr = norm_layout(NW)
    LQ: gl.constexpr = query_layout(NW, D, 32 // KEY_BITS * CW)
    LS: gl.constexpr = gl.SliceLayout(2, M)
    STEP: gl.constexpr = NW * 16
    V_SIDE: gl.constexpr = 0 if KEY_BITS == VALUE_BITS else 1
    VPIECES: gl.constexpr = 2 * pieces(VW)[0]
    VEACH: gl.constexpr = pieces(VW)[1]
    # bytes of a warp's stage of the ring: words of keys, of values, norms
    K_NBYTES: gl.constexpr = 64 * KW
    V_NBYTES: gl.constexpr = 256 * VW
    STAGE: gl.constexpr = K_NBYTES + V_NBYTES + 128
    COPY: gl.constexpr = copy_ptx(2 * J, 4 * CW, KW, CW, VW)

    gdc_wait()
    split, token = gl.program_id(0), gl.program_id(2)
    head, tile = gl.program_id(1) // TILES, gl.program_id(1) % TILES
    if S == 1:
        position = gl.load(lengths) - tokens + token
    else:
        # every warp has all of it: a sum across warps would want shared memory
        b = gl.arange(0, S, layout=gl.BlockedLayout([max(1, S // 32)], [32], [NW], [0]))
        before = gl.load(starts + b, mask=b < sequences, other=1 << 30) <= token
        sequence = gl.sum(before.to(gl.int32), 0) - 1
        table += sequence.to(gl.int64) * table_width
        position = gl.load(lengths + sequence) - gl.load(starts + sequence + 1) + token
    low = gl.maximum(position + 1 - window, 0) if WINDOW else 0
    # splits take blocks in turn: without a window the first are known before the length is
    stride = splits * STEP
    begin = low // 16 * 16 + split * STEP
    key = gl.arange(0, NW, layout=gl.SliceLayout(1, LS))[:, None] * 16 + begin
    key += gl.arange(0, 16, layout=gl.SliceLayout(0, LS))[None, :]
    # one of everything for each lane
    warp = gl.arange(0, NW, layout=gl.SliceLayout(1, LL))[:, None]
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, LL))[None, :] + warp * 0
    # 0 in all lanes, but the compiler does not know: pages that it knew to be equal it would wait for at once, to hold them
    # in a register of the warp
    zero = gl.inline_asm_elementwise(MASKED_LANE, "=r,r", [lane * 0 + (pool >> 31)], gl.int32, is_pure=True, pack=1)
    t = warp * 16 + begin + zero
    page, next_page = page_of(table, t, table_width, PAGE), page_of(table, t + stride, table_width, PAGE)
    k_from = k_codes + (lane // 4 * KW + lane % 4 * CW)
    v_from = v_codes + lane * VW
    # a lane in four has a key's norm, or that of the key 8 later, or the same of values
    n_from = gl.where(lane % 4 < 2, k_norms.to(gl.int64), v_norms.to(gl.int64)) + (lane // 4 + lane % 2 * 8) * 4
    row = (token * HEADS + head) * G + tile * EACH
    live = gl.minimum(EACH, G - tile * EACH)
    x = load_queries(q + row.to(gl.int64) * D, signs, live, D, NW)
    k_words = table_words(levels, 0, 16 if KEY_BITS == 2 else 256, NW)
    v_words = table_words(levels, 1, 16 if VALUE_BITS == 2 else 256, NW) if V_SIDE else k_words
    # all memory is one piece, so the table is where shared memory begins; the compiler does not see the look-ups read it, hence
    # the barriers and _keep_alive
    ROWS: gl.constexpr = RING // 4096 + (NW * DEEP * STAGE + 4095) // 4096
    shared = gl.allocate_shared_memory(gl.int32, [ROWS, 1024], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    place = gl.inline_asm_elementwise(SHARED_BASE, "=r,r", [split], dtype=gl.int32, is_pure=True, pack=1)
    ring = place + RING + (warp + lane * 0) * (DEEP * STAGE)
    k_to, v_to, n_to = ring + lane * (4 * CW), ring + K_NBYTES + lane * (4 * VEACH), ring + (K_NBYTES + V_NBYTES) + lane * 4
    quad = gl.arange(0, NW, layout=gl.SliceLayout(1, LN))[:, None] * (DEEP * STAGE)
    quad += place + RING + (K_NBYTES + V_NBYTES) + gl.arange(0, 8, layout=gl.SliceLayout(0, LN))[None, :] * 16
    for d in gl.static_range(DEEP):
        block = block_of(page, t + d * stride, head, pool, HEADS, PAGE)
        copy(COPY, k_to + d * STAGE, v_to + d * STAGE, n_to + d * STAGE, k_from, v_from, n_from, block, t >= 0, KW, VW)
        page, next_page = next_page, page_of(table, t + (d + 2) * stride, table_width, PAGE)
    looked = shared._reinterpret(gl.int32, [256, 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    looked.slice(0, k_words.shape[0], 0).slice(0, 32, 1).store(k_words)
    if V_SIDE:
        looked.slice(0, v_words.shape[0], 0).slice(32, 32, 1).store(v_words)
    turned = shared.index(16)._reinterpret(gl.float16, [8, D], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    turned.store((transform(x, NW) * factor).to(gl.float16))
    gl.thread_barrier()
    warps = gl.arange(0, NW, layout=gl.SliceLayout(1, gl.SliceLayout(2, LQ)))[:, None, None]
    qx = gl.expand_dims(turned.load(gl.SliceLayout(0, LQ)), 0) + (warps * 0).to(gl.float16)
    PAIRS: gl.constexpr = 16 // KEY_BITS  # of a word
    qx = gl.reshape(qx, [NW, 8, J, 4, CW * PAIRS, 2])
    qx = gl.reshape(gl.permute(qx, [0, 2, 4, 3, 5, 1]), [NW, D, 8])  # j, word and pair, c, e | head
    qx = gl.convert_layout(qx, B, assert_trivial=True)
    column = gl.inline_asm_elementwise(LANE, "=r,r", [split], dtype=gl.int32, is_pure=True, pack=1)

    o = gl.full([NW, D, 8], 0.0, gl.float32, M)
    l = gl.full([NW, 16, 8], 0.0, gl.float32, M)  # noqa: E741
    m = gl.full([NW, 8], -1e29, gl.float32, gl.SliceLayout(1, M))
    end = gl.minimum(position + 1, table_width * PAGE)
    for i in range(gl.cdiv(gl.maximum(end - begin, 0), stride)):
        run(wait_ptx(DEEP - 1), lane)
        stage = i % DEEP * STAGE
        kw = read(k_to + stage, 2 * J, CW, 2 * J, NW)
        vw = read(v_to + stage, VPIECES, VEACH, 2, NW)
        kn, vn = read_norms(quad + stage, LS, NW)
        # this part of the ring is free again; a page is asked for two steps before its codes
        block = block_of(page, t + (i + DEEP) * stride, head, pool, HEADS, PAGE)
        needed = t < end - (i + DEEP) * stride
        copy(COPY, k_to + stage, v_to + stage, n_to + stage, k_from, v_from, n_from, block, needed, KW, VW)
        page, next_page = next_page, page_of(table, t + (i + DEEP + 2) * stride, table_width, PAGE)

        kx = gl.reshape(look_up(kw, column, place, 0, KEY_BITS), [NW, 2, J, 8, 4, CW * PAIRS, 2])
        kx = gl.reshape(gl.permute(kx, [0, 1, 3, 2, 5, 4, 6]), [NW, 16, D])  # h, g | j, word and pair, c, e
        s = mma_v2(gl.convert_layout(kx, A, assert_trivial=True), qx, gl.full([NW, 16, 8], 0.0, gl.float32, M))
        s *= kn[:, :, None]
        if SOFTCAP:
            # tanh by one exponential; its absolute error is what counts here
            s = cap - 2.0 * cap / (gl.exp2(s) + 1.0)
        seen = key < end - i * stride
        if WINDOW:
            seen &= key >= low - i * stride
        s = gl.where(seen[:, :, None], s, NOTHING)
        top = gl.maximum(m, gl.max(s, 1))
        fade = gl.exp2(m - top)
        p = gl.exp2(s - top[:, None, :])
        l = l * fade[:, None, :] + p  # noqa: E741
        m = top
        # norms need not be finite where nothing is seen
        weights = (p * gl.where(seen, vn, 0.0)[:, :, None]).to(gl.float16)
        # tokens are the rows of the scores and of the next operand's columns: 8x8 blocks are transposed inside the warp
        px = gl.inline_asm_elementwise(TRANSPOSE, "=r,r", [weights], dtype=gl.float16, is_pure=False, pack=2)
        px = gl.reshape(gl.permute(gl.reshape(px, [NW, 2, 8, 8]), [0, 1, 3, 2]), [NW, 16, 8])
        px = gl.convert_layout(px, B, assert_trivial=True)
        vx = gl.reshape(look_up(vw, column, place, 128 * V_SIDE, VALUE_BITS), [NW, 2, 8, 4, D // 8, 2])
        vx = gl.reshape(gl.permute(vx, [0, 4, 2, 1, 3, 5]), [NW, D, 16])  # x, g | h, c, e
        o = mma_v2(gl.convert_layout(vx, A, assert_trivial=True), px, o * fade[:, None, :])
    gdc_launch_dependents()
    run(wait_ptx(0), lane)
    shared._keep_alive()
    gl.thread_barrier()
    _leave(o, m, gl.sum(l, 1), part_o, part_m, part_l, row, live, split, splits, D, NW)


@gluon.jit
def _leave(o, m, l, part_o, part_m, part_l, row, live, split, splits, D: gl.constexpr, NW: gl.constexpr):  # noqa: E741
    """Join the sums of all warps, in shared memory where the table was, and store them as one part of each row."""
    E: gl.constexpr = gl.BlockedLayout([NW, 1, 4], [1, 16, 2], [1, NW, 1], [2, 1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    o_all = gl.allocate_shared_memory(gl.float32, [NW, D, 8], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]), o)
    m_all = gl.allocate_shared_memory(gl.float32, [NW, 8], FLAT, m).load(gl.SliceLayout(1, E))
    l_all = gl.allocate_shared_memory(gl.float32, [NW, 8], FLAT, l).load(gl.SliceLayout(1, E))
    top = gl.max(m_all, 0)
    weight = gl.exp2(m_all - top[None, :])
    o = gl.sum(o_all.load(E) * weight[:, None, :], 0)
    g = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(0, E)))[None, :]
    r = gl.arange(0, D, layout=gl.SliceLayout(1, gl.SliceLayout(0, E)))[:, None]
    gl.store(part_o + ((row + g).to(gl.int64) * splits + split) * D + r, o, mask=g < live)
    g = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, E)))
    gl.store(part_m + (row + g) * splits + split, top, mask=g < live)
    gl.store(part_l + (row + g) * splits + split, gl.sum(l_all * weight, 0), mask=g < live)


@gluon.jit
def finish_pairs(
    part_o,
    part_m,
    part_l,
    sinks,
    signs,
    out,
    heads,
    splits,
    D: gl.constexpr,
    S: gl.constexpr,
    C: gl.constexpr,
    NW: gl.constexpr,
):
    """Merge the parts of a row, maxima to base 2, C at a time, and turn it back; grid (rows,).

    The transform is the same whichever way index bits are numbered, so that it can be made in the order of the parts.
    """
    LR: gl.constexpr = gl.BlockedLayout([1, D // 32], [1, 32], [NW, 1], [1, 0])
    row = gl.program_id(0)
    r = gl.arange(0, D, layout=gl.SliceLayout(0, LR))
    d = r % 8 * (D // 8) + r // 8
    sign = gl.load(signs + d)
    gdc_wait()
    first = row.to(gl.int64) * splits
    s = gl.arange(0, S, layout=gl.SliceLayout(1, LR))
    highest = gl.load(part_m + first + s, mask=s < splits, other=NOTHING)
    sums = gl.load(part_l + first + s, mask=s < splits, other=0.0)
    c = gl.arange(0, C, layout=gl.SliceLayout(1, LR))
    acc = gl.load(part_o + (first + c)[:, None] * D + r[None, :], mask=(c < splits)[:, None], other=0.0)
    top = gl.max(highest, 0)
    if sinks is not None:
        sink = gl.load(sinks + row % heads) * LOG2E
        top = gl.maximum(top, sink)
    total = gl.sum(gl.exp2(highest - top) * sums, 0)
    if sinks is not None:
        total += gl.exp2(sink - top)
    high = gl.load(part_m + first + c, mask=c < splits, other=NOTHING)
    acc *= gl.exp2(high - top)[:, None]
    for i in range(C, S, C):
        part = i + c
        high = gl.load(part_m + first + part, mask=part < splits, other=NOTHING)
        o = gl.load(part_o + (first + part)[:, None] * D + r[None, :], mask=(part < splits)[:, None], other=0.0)
        acc += o * gl.exp2(high - top)[:, None]
    # of the transform, and of the levels, which came larger by sqrt(D)
    factor = gl.where(total == 0.0, 0.0, 1.0 / (D * total))
    y = transform(gl.expand_dims(gl.sum(acc, 0), 0), NW) * factor
    gl.store(out + row.to(gl.int64) * D + d[None, :], (y * sign[None, :]).to(out.dtype.element_ty))
