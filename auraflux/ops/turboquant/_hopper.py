"""Decode attention over pages of codes in pairs on Hopper: Gluon, with PTX for look-ups.

- A byte names two neighbouring levels of an operand. A table in shared memory turns it into two float16 numbers, with a column
  for every lane, so that look-ups never share a bank: one `prmt` makes the address, one `ld.shared` two elements. Codes of 2
  bits come four to a byte and are looked up by its halves, codes of 8 bits one by one, of 3 and 6 bits as in `_hopper_units`.
- Keys [16 tokens, D] and values [D, 16 tokens] are the first operand of `mma.m16n8k16`, query heads its 8 columns. A lane's
  words of a key, and of 16 values in pairs (`arrangement.py`), hold just what its registers need: nothing is shuffled.
- Codes and norms go through a ring in shared memory, one of its own for each warp, by `cp.async`: registers would not hold what
  must be under way to keep the memory busy. A warp reads back the codes that it asked for itself, so warps wait for nobody.
- Warps are the batch of a 3-D layout: each has its own tokens, maximum and sums. They meet only at the end, and programs that
  share a row in `_hopper_merge`.
- Queries are rotated by every program, while its first codes are on their way. Rows of the sums are coordinates in the order
  of the registers; `finish_pairs` undoes that, since the Walsh-Hadamard transform is the same for any order of index bits.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from auraflux.ops.turboquant._hopper_merge import leave_part
from auraflux.ops.turboquant._hopper_parts import (
    NOTHING,
    load_queries,
    look_up,
    query_layout,
    read,
    read_norms,
    table_words,
    transform,
)
from auraflux.ops.turboquant._hopper_ring import (
    block_of,
    copy,
    key_ptx,
    key_words,
    page_of,
    pieces,
    places,
    run,
    sources,
    value_ptx,
    wait_ptx,
)
from auraflux.ops.turboquant._hopper_units import look_up_units, read_units

TRANSPOSE = gl.constexpr("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;")
RING = gl.constexpr(17 * 4096)  # where it begins in shared memory, after the table and the queries; of 2 bits 4096 later
LANE = gl.constexpr("mov.u32 $0, %laneid; shl.b32 $0, $0, 2; // $1")
MASKED_LANE = gl.constexpr("{.reg .b32 l; mov.u32 l, %laneid; and.b32 $0, l, $1;}")


@gluon.jit
def attend_pairs(
    q, signs, k_codes, k_norms, v_codes, v_norms, levels, table, lengths, starts, part_o, part_m, part_l,
    factor, cap, window, tokens, sequences, table_width, pool, splits,
    G: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, S: gl.constexpr, NW: gl.constexpr,
    DEEP: gl.constexpr, U: gl.constexpr, KEY_BITS: gl.constexpr, VALUE_BITS: gl.constexpr,
    WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Attend from one token's query heads to the keys of one split; grid (splits, HEADS * tiles of 8 query heads, tokens).

    factor  what makes the products of rotated queries and levels logarithms to base 2, or, capped, arguments of the cap
    cap     what capped scores reach, to base 2
    DEEP    steps whose codes are under way
    U       blocks of 16 tokens that a warp takes at a time
    """
    EACH: gl.constexpr = (G + (G + 7) // 8 - 1) // ((G + 7) // 8)
    M: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [NW, 1, 1], [1, 16, 8])
    LL: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [NW, 1], [1, 0])
    LS: gl.constexpr = gl.SliceLayout(2, M)
    # bytes of a block, and of a warp's stage of the ring: keys, values, norms
    K_NBYTES: gl.constexpr = 2 * D * KEY_BITS
    V_NBYTES: gl.constexpr = 2 * D * VALUE_BITS
    STAGE: gl.constexpr = U * (K_NBYTES + V_NBYTES + 128)
    START: gl.constexpr = RING + 4096 * (min(KEY_BITS, VALUE_BITS) == 2)
    ROWS: gl.constexpr = START // 4096 + (NW * DEEP * STAGE + 4095) // 4096
    K_COPY: gl.constexpr = key_ptx(D, KEY_BITS, U, True)
    V_COPY: gl.constexpr = value_ptx(D, VALUE_BITS, U, True)

    split, token = gl.program_id(0), gl.program_id(2)
    head, tile = gl.program_id(1) // ((G + 7) // 8), gl.program_id(1) % ((G + 7) // 8)
    # all memory is one piece, so the table is where shared memory begins; the compiler does not see the look-ups read it, hence
    # the barriers and _keep_alive
    shared = gl.allocate_shared_memory(gl.int32, [ROWS, 1024], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    table, position, old = _find(table, lengths, starts, token, tokens, sequences, table_width, S, NW)
    low = gl.maximum(position + 1 - window, 0) if WINDOW else 0
    end = gl.minimum(position + 1, table_width * PAGE)
    # splits take blocks in turn
    stride = splits * (NW * 16 * U)
    begin = low // (16 * U) * (16 * U) + split * (NW * 16 * U)
    key = gl.arange(0, NW, layout=gl.SliceLayout(1, LS))[:, None] * (16 * U) + begin
    key += gl.arange(0, 16, layout=gl.SliceLayout(0, LS))[None, :]
    # one of everything for each lane
    warp = gl.arange(0, NW, layout=gl.SliceLayout(1, LL))[:, None]
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, LL))[None, :] + warp * 0
    # 0 in all lanes, but the compiler does not know: pages that it knew to be equal it would wait for at once, to hold them
    # in a register of the warp
    zero = gl.inline_asm_elementwise(MASKED_LANE, "=r,r", [lane * 0 + (pool >> 31)], gl.int32, is_pure=True, pack=1)
    t = warp * (16 * U) + begin + zero
    page, next_page = page_of(table, t, table_width, PAGE), page_of(table, t + stride, table_width, PAGE)
    k_from, v_from, n_from = sources(k_codes, v_codes, k_norms, v_norms, lane, D, KEY_BITS, VALUE_BITS)
    place, to, at = places(split, warp, lane, START, DEEP, U, D, KEY_BITS, VALUE_BITS, NW)
    k_to, v_to, n_to = to
    k_at, v_at, quad = at
    # codes of earlier steps, levels and signs are older than the kernel before this one; what it may have written is asked for
    # when it has ended, and ends the groups
    blocks = ()
    for d in gl.static_range(DEEP):
        block = block_of(page, t + d * stride, head, pool, HEADS, PAGE)
        blocks = blocks + (block,)  # type: ignore[assignment]  # noqa: RUF005
        older = t + d * stride + 16 * U <= old
        copy(key_ptx(D, KEY_BITS, U, False), k_to + d * STAGE, n_to + d * STAGE, k_from, n_from, block, older, K_NBYTES)
        copy(value_ptx(D, VALUE_BITS, U, False), v_to + d * STAGE, n_to, v_from, n_from, block, older, V_NBYTES)
        page, next_page = next_page, page_of(table, t + (d + 2) * stride, table_width, PAGE)
    _fill(shared, levels, KEY_BITS, VALUE_BITS, NW)
    gdc_wait()
    gdc_launch_dependents()
    row = (token * HEADS + head) * G + tile * EACH
    live = gl.minimum(EACH, G - tile * EACH)
    x = load_queries(q + row.to(gl.int64) * D, signs, live, D, NW)
    for d in gl.static_range(DEEP):
        newer = t + d * stride + 16 * U > old
        copy(K_COPY, k_to + d * STAGE, n_to + d * STAGE, k_from, n_from, blocks[d], newer, K_NBYTES)
        copy(V_COPY, v_to + d * STAGE, n_to, v_from, n_from, blocks[d], newer, V_NBYTES)
    qx = _operand(x, shared, factor, D, KEY_BITS, NW)
    column = gl.inline_asm_elementwise(LANE, "=r,r", [split], dtype=gl.int32, is_pure=True, pack=1)

    o = gl.full([NW, D, 8], 0.0, gl.float32, M)
    l = gl.full([NW, 16, 8], 0.0, gl.float32, M)  # noqa: E741
    m = gl.full([NW, 8], -1e29, gl.float32, gl.SliceLayout(1, M))
    stage = split * 0
    for i in range(gl.cdiv(gl.maximum(end - begin, 0), stride)):
        run(wait_ptx(2 * DEEP - 1), lane)
        kw = _read_keys(k_at + stage, D, KEY_BITS, NW)
        kn, vn = read_norms(quad + stage, LS, NW)
        if U == 2:
            kw1 = _read_keys(k_at + stage + K_NBYTES, D, KEY_BITS, NW)
            kn1, vn1 = read_norms(quad + stage + 128, LS, NW)
        # this part of the ring is free again; a page is asked for two steps before its codes
        block = block_of(page, t + (i + DEEP) * stride, head, pool, HEADS, PAGE)
        needed = t < end - (i + DEEP) * stride
        copy(K_COPY, k_to + stage, n_to + stage, k_from, n_from, block, needed, K_NBYTES)
        page, next_page = next_page, page_of(table, t + (i + DEEP + 2) * stride, table_width, PAGE)

        seen = _seen(key, low - i * stride, end - i * stride, WINDOW)
        s = _scores(kw, qx, kn, seen, column, place, cap, D, KEY_BITS, SOFTCAP, NW)
        top = gl.maximum(m, gl.max(s, 1))
        if U == 2:
            seen1 = _seen(key, low - i * stride - 16, end - i * stride - 16, WINDOW)
            s1 = _scores(kw1, qx, kn1, seen1, column, place, cap, D, KEY_BITS, SOFTCAP, NW)
            top = gl.maximum(m, gl.max(gl.maximum(s, s1), 1))
        run(wait_ptx(2 * DEEP - 1), lane)
        vw = _read_values(v_at + stage, D, VALUE_BITS, NW)
        if U == 2:
            vw1 = _read_values(v_at + stage + V_NBYTES, D, VALUE_BITS, NW)
        copy(V_COPY, v_to + stage, n_to, v_from, n_from, block, needed, V_NBYTES)
        fade = gl.exp2(m - top)
        m = top
        p = gl.exp2(s - top[:, None, :])
        l = l * fade[:, None, :] + p  # noqa: E741
        vx = _values(vw, column, place, KEY_BITS, VALUE_BITS, D, NW)
        o = mma_v2(vx, _weights(p, vn, seen, NW), o * fade[:, None, :])
        if U == 2:
            p = gl.exp2(s1 - top[:, None, :])
            l += p  # noqa: E741
            vx = _values(vw1, column, place, KEY_BITS, VALUE_BITS, D, NW)
            o = mma_v2(vx, _weights(p, vn1, seen1, NW), o)
        stage = gl.where(stage == (DEEP - 1) * STAGE, 0, stage + STAGE)
    run(wait_ptx(0), lane)
    shared._keep_alive()
    gl.thread_barrier()
    leave_part(o, m, gl.sum(l, 1), part_o, part_m, part_l, row, live, split, splits, D, NW)


@gluon.jit
def _find(table, lengths, starts, token, tokens, sequences, table_width, S: gl.constexpr, NW: gl.constexpr):
    """Find a token's line of the table and its position, and how many positions were there before this step."""
    if S == 1:
        old = gl.load(lengths) - tokens
        position = old + token
    else:
        # every warp has all of it: a sum across warps would want shared memory
        b = gl.arange(0, S, layout=gl.BlockedLayout([max(1, S // 32)], [32], [NW], [0]))
        before = gl.load(starts + b, mask=b < sequences, other=1 << 30) <= token
        sequence = gl.sum(before.to(gl.int32), 0) - 1
        table += sequence.to(gl.int64) * table_width
        position = gl.load(lengths + sequence) - gl.load(starts + sequence + 1) + token
        old = position - token + gl.load(starts + sequence)
    return table, position, old


@gluon.jit
def _operand(x, shared, factor, D: gl.constexpr, BITS: gl.constexpr, NW: gl.constexpr):
    """Turn queries, and give them to every warp as the second operand of scores."""
    CHUNK: gl.constexpr = 32 * key_words(D, BITS)[1] // BITS  # neighbouring coordinates of a lane's keys
    LQ: gl.constexpr = query_layout(NW, D, CHUNK)
    B: gl.constexpr = gl.DotOperandLayout(1, gl.NVMMADistributedLayout([2, 0], [NW, 1, 1], [1, 16, 8]), 2)
    turned = shared.index(16)._reinterpret(gl.float16, [8, D], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    turned.store((transform(x, NW) * factor).to(gl.float16))
    gl.thread_barrier()
    warps = gl.arange(0, NW, layout=gl.SliceLayout(1, gl.SliceLayout(2, LQ)))[:, None, None]
    qx = gl.expand_dims(turned.load(gl.SliceLayout(0, LQ)), 0) + (warps * 0).to(gl.float16)
    qx = gl.reshape(qx, [NW, 8, D // (4 * CHUNK), 4, CHUNK // 2, 2])
    qx = gl.reshape(gl.permute(qx, [0, 2, 4, 3, 5, 1]), [NW, D, 8])  # j, word and pair, c, e | head
    return gl.convert_layout(qx, B, assert_trivial=True)


@gluon.jit
def _seen(key, low, end, WINDOW: gl.constexpr):
    seen = key < end
    if WINDOW:
        seen &= key >= low
    return seen


@gluon.jit
def _fill(shared, levels, KEY_BITS: gl.constexpr, VALUE_BITS: gl.constexpr, NW: gl.constexpr):
    _fill_side(shared, levels, 0, KEY_BITS, NW)
    if KEY_BITS != VALUE_BITS:
        _fill_side(shared, levels, 1, VALUE_BITS, NW)


@gluon.jit
def _fill_side(shared, levels, SIDE: gl.constexpr, BITS: gl.constexpr, NW: gl.constexpr):
    """Fill one side of the table; of 2 bits by the upper half of a byte, and a small one by the lower half."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    whole = shared._reinterpret(gl.int32, [256, 64], FLAT)
    whole.slice(32 * SIDE, 32, 1).store(table_words(levels, SIDE, 256, 4 if BITS == 2 else 0, NW))
    if BITS == 2:
        small = shared.index(17)._reinterpret(gl.int32, [16, 64], FLAT)
        small.slice(32 * SIDE, 32, 1).store(table_words(levels, SIDE, 16, 0, NW))


@gluon.constexpr_function
def _unit_offsets(first, count, rest):
    return tuple(h * first + i * rest for h in range(2) for i in range(count))


@gluon.jit
def _read_keys(at, D: gl.constexpr, BITS: gl.constexpr, NW: gl.constexpr):
    KW: gl.constexpr = key_words(D, BITS)[0]
    CW: gl.constexpr = key_words(D, BITS)[1]
    J: gl.constexpr = KW // 4 // CW
    return read_units(at, _unit_offsets(32 * KW, J, 48)) if BITS % 3 == 0 else read(at, 2 * J, CW, 2 * J, NW)


@gluon.jit
def _read_values(at, D: gl.constexpr, BITS: gl.constexpr, NW: gl.constexpr):
    VW: gl.constexpr = D * BITS // 128  # words of a lane, of 8 tokens
    PIECES: gl.constexpr = pieces(VW)
    return read_units(at, _unit_offsets(128 * VW, VW // 3, 12)) if BITS % 3 == 0 else read(at, 2 * PIECES[0], PIECES[1], 2, NW)


@gluon.jit
def _scores(
    kw, qx, kn, seen, column, place, cap,
    D: gl.constexpr, BITS: gl.constexpr, SOFTCAP: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """Scores [warps, 16 tokens, 8 heads] of a block of keys."""
    CHUNK: gl.constexpr = 32 * key_words(D, BITS)[1] // BITS
    J: gl.constexpr = D // (4 * CHUNK)
    M: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [NW, 1, 1], [1, 16, 8])
    if BITS % 3 == 0:
        kx = gl.reshape(look_up_units(kw, column, place, 0, BITS, 2 * J), [NW, 8, 4, 2, J, CHUNK // 2, 2])
        kx = gl.permute(kx, [0, 3, 1, 4, 5, 2, 6])
    else:
        kx = gl.reshape(look_up(kw, column, place, 0, BITS), [NW, 2, J, 8, 4, CHUNK // 2, 2])
        kx = gl.permute(kx, [0, 1, 3, 2, 5, 4, 6])
    kx = gl.convert_layout(
        gl.reshape(kx, [NW, 16, D]), gl.DotOperandLayout(0, M, 2), assert_trivial=True
    )  # h, g | j, pair, c, e
    s = mma_v2(kx, qx, gl.full([NW, 16, 8], 0.0, gl.float32, M)) * kn[:, :, None]
    if SOFTCAP:
        # tanh by one exponential; its absolute error is what counts here
        s = cap - 2.0 * cap / (gl.exp2(s) + 1.0)
    return gl.where(seen[:, :, None], s, NOTHING)


@gluon.jit
def _weights(p, vn, seen, NW: gl.constexpr):
    """Weights of a block's values as the second operand of their sum."""
    B: gl.constexpr = gl.DotOperandLayout(1, gl.NVMMADistributedLayout([2, 0], [NW, 1, 1], [1, 16, 8]), 2)
    # norms need not be finite where nothing is seen
    weights = (p * gl.where(seen, vn, 0.0)[:, :, None]).to(gl.float16)
    # tokens are the rows of the scores and of the next operand's columns: 8x8 blocks are transposed inside the warp
    px = gl.inline_asm_elementwise(TRANSPOSE, "=r,r", [weights], dtype=gl.float16, is_pure=False, pack=2)
    px = gl.reshape(gl.permute(gl.reshape(px, [NW, 2, 8, 8]), [0, 1, 3, 2]), [NW, 16, 8])
    return gl.convert_layout(px, B, assert_trivial=True)


@gluon.jit
def _values(vw, column, place, KEY_BITS: gl.constexpr, BITS: gl.constexpr, D: gl.constexpr, NW: gl.constexpr):
    """Values [warps, D, 16 tokens] of a block as the first operand of their sum."""
    SIDE: gl.constexpr = 0 if KEY_BITS == BITS else 1
    A: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([2, 0], [NW, 1, 1], [1, 16, 8]), 2)
    if BITS % 3 == 0:
        vx = gl.reshape(look_up_units(vw, column, place, 128 * SIDE, BITS, D * BITS // 192), [NW, 8, 4, 2, D // 8, 2])
        vx = gl.permute(vx, [0, 4, 1, 3, 2, 5])
    else:
        vx = gl.reshape(look_up(vw, column, place, 128 * SIDE, BITS), [NW, 2, 8, 4, D // 8, 2])
        vx = gl.permute(vx, [0, 4, 2, 1, 3, 5])
    return gl.convert_layout(gl.reshape(vx, [NW, D, 16]), A, assert_trivial=True)  # x, g | h, c, e
