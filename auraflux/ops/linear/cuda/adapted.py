"""Adapters (LoRA) in the launch of a product on CUDA: its first programs shrink, and all add the expanded results.

Warps of the first programs multiply parts of the tokens by rows of `a`, before they multiply by weights, and store the sums.
A program that has multiplied waits for all sums and multiplies them by its columns of `b`. So an adapter costs no launch, and
its latency is hidden behind the weights.

A sum is its own signal: until it is stored, its place holds bits that no sum has, which needs neither fences nor counters. Two
buffers alternate between launches, and each launch clears the other one. Every program counts once, and the count says whose
turn it is. No more programs shrink than run at once, and they begin first: all that are waited for are running.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.gpu.sizes import cdiv
from auraflux.ops.hopper.ptx import bf16_at, from_lane
from auraflux.ops.hopper.reduce import sum_over
from auraflux.ops.hopper.shared_memory import four_floats_at, half_at, put_float
from auraflux.ops.linear.adapters import Adapters
from auraflux.ops.linear.cuda.row_copies import select_weight

PART = gl.constexpr(512)  # inputs that a warp shrinks at once, 16 of each lane
CLEARED = gl.constexpr(-1)  # the bits of a sum that is not stored: of a NaN that no instruction returns
HIGHEST_RANK = 64
MOST_SUMS = 4096  # of a weight, parts and padding included: 32 of each thread of four warps


EIGHT_WORDS = gl.constexpr(
    "{.reg .pred p; setp.ne.b32 p,$9,0;"
    + "".join(f"mov.b32 ${i},0;" for i in range(8))
    + "@p ld.global.v4.b32 {$0,$1,$2,$3},[$8]; @p ld.global.v4.b32 {$4,$5,$6,$7},[$8+16];}"
)


class Adapted(NamedTuple):
    """Adapters of a launch, of weights in the order of the product's.

    slots    [T]        int32, the adapter of each token; those outside 0 to adapter_count - 1 mean none
    a        [S, R, K]  of each weight; of one without adapters any, with rank 0
    b        [S, R, N]  likewise
    ranks    R of each weight
    rows     N of each weight
    firsts   ranks of the weights before
    total    ranks of all weights
    sharers  programs that shrink
    sums     float32 [2, ranks of all weights, T, parts_held], the products with `a` of this launch and cleared for the next
    size     of each half of sums
    counter  [1]  int32, counts programs of two launches, and then begins again
    programs of the launch
    """

    slots: Tensor | None
    adapter_count: int | None
    a: tuple[Tensor, ...] | None
    b: tuple[Tensor, ...] | None
    ranks: tuple[int, ...] | None
    rows: tuple[int, ...] | None
    firsts: tuple[int, ...] | None
    total: int | None
    sharers: int | None
    sums: Tensor | None
    size: int | None
    counter: Tensor | None
    programs: int | None


class Share(NamedTuple):
    """Sizes of a launch's adapters, as one constant; the rank is 0 without adapters.

    width    K
    tokens   including padding
    rank     the highest, a multiple of four
    steps    units of shrinking of a warp, at most
    sharing  warps of a program that shrinks; of all programs of a cluster
    warps    of a program
    """

    width: int
    tokens: int
    rank: int
    steps: int
    sharing: int
    warps: int


NOT_ADAPTED = Adapted(*[None] * 13), Share(0, 0, 0, 0, 0, 0)


@gluon.jit
def _word(at):
    """Load 32 bits of device memory."""
    return gl.inline_asm_elementwise("ld.global.b32 $0,[$1];", "=r,l", [at.to(gl.int64)], gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _awaited_ptx(count, step):
    """Return PTX that loads float32 `step` bytes from each other until none of the warp's is cleared. In: address, which."""
    text = f"{{.reg .pred p,more,q<{count}>; .reg .b32 m,v<{count}>;"
    for n in range(count):
        text += f"and.b32 m,${count + 1},{1 << n}; setp.ne.b32 q{n},m,0; mov.b32 v{n},0;"
    text += "AGAIN: mov.b32 m,0;" + "".join(
        f"@q{n} ld.relaxed.gpu.global.b32 v{n},[${count}+{step * n}];" for n in range(count)
    )
    text += "".join(f"max.u32 m,m,v{n};" for n in range(count))
    text += "setp.eq.u32 p,m,0xFFFFFFFF; vote.sync.any.pred more,p,0xffffffff; @more bra AGAIN;"
    return text + "".join(f"mov.b32 ${n},v{n};" for n in range(count)) + "}"


@gluon.constexpr_function
def _awaited_registers(count):
    return "=&f," * count + "l,r,~{memory}"


@gluon.jit
def _awaited(at, which, COUNT: gl.constexpr, STEP: gl.constexpr):
    """Load COUNT float32, STEP places from each other, once other programs of this launch have stored them.

    which  bit n for the n-th, which is otherwise zero
    """
    args = [at.to(gl.int64), which]
    text: gl.constexpr = _awaited_ptx(COUNT, 4 * STEP)
    outs: gl.constexpr = _awaited_registers(COUNT)
    return gl.inline_asm_elementwise(text, outs, args, (gl.float32,) * COUNT, is_pure=False, pack=1)


@gluon.jit
def _store_float(at, value, there):
    text: gl.constexpr = "{.reg .pred p; setp.ne.b32 p,$3,0; @p st.relaxed.gpu.global.b32 [$1],$2; mov.b32 $0,0;}"
    args = [at.to(gl.int64), value, there.to(gl.int32)]
    gl.inline_asm_elementwise(text, "=r,l,f,r,~{memory}", args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def _prefetch(at, there):
    """Request a sector of device memory for L2, where `there`."""
    text: gl.constexpr = "{.reg .pred p; setp.ne.b32 p,$2,0; @p prefetch.global.L2 [$1]; mov.b32 $0,0;}"
    gl.inline_asm_elementwise(text, "=r,l,r", [at, there.to(gl.int32)], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _eight_words(at, there):
    """Load 16 bf16 as eight words; zeros where not `there`."""
    outs: gl.constexpr = "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,l,r,~{memory}"
    args = [at, there.to(gl.int32)]
    return gl.inline_asm_elementwise(EIGHT_WORDS, outs, args, (gl.int32,) * 8, is_pure=False, pack=1)


@gluon.jit
def _four_floats(at):
    text: gl.constexpr = "ld.global.nc.v4.f32 {$0,$1,$2,$3},[$4];"
    return gl.inline_asm_elementwise(text, "=f,=f,=f,=f,l", [at.to(gl.int64)], (gl.float32,) * 4, is_pure=False, pack=1)


@gluon.jit
def count_up(adapted, lane, there):
    """Count a program, whose warps have all loaded their sums."""
    text: gl.constexpr = "{.reg .pred p; setp.ne.b32 p,$3,0; @p red.relaxed.gpu.global.inc.u32 [$1],$2; mov.b32 $0,0;}"
    args = [adapted.counter.to(gl.int64), lane * 0 + (2 * adapted.programs - 1), there.to(gl.int32)]
    gl.inline_asm_elementwise(text, "=r,l,r,r,~{memory}", args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def _half(adapted, lane):
    """Return 1 where a launch has the second half of `sums`, otherwise 0: no program has counted twice."""
    text: gl.constexpr = "ld.relaxed.gpu.global.b32 $0,[$1];"
    count = gl.inline_asm_elementwise(
        text, "=r,l,~{memory}", [adapted.counter.to(gl.int64) + lane * 0], gl.int32, is_pure=False, pack=1
    )
    return gl.where(count >= adapted.programs, 1, 0)


@gluon.jit
def _copy_or_zero(to, source, filled, there):
    """Request 16 bytes of device memory for shared memory, zeros unless `filled`, where `there`."""
    text: gl.constexpr = "{.reg .pred p; setp.ne.b32 p,$4,0; @p cp.async.cg.shared.global [$1],[$2],16,$3; mov.b32 $0,0;}"
    args = [to, source.to(gl.int64), gl.where(filled, 16, 0), there.to(gl.int32)]
    gl.inline_asm_elementwise(text, "=r,r,l,r,r,~{memory}", args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def slots_of(adapted, tokens, lane, T: gl.constexpr):
    """Return the adapter of token lane % T; those past the end have the last token's."""
    return _word(adapted.slots + gl.minimum(lane % T, tokens - 1))


@gluon.jit
def _inputs(x, delta, norm, line, k, there):
    """Load 16 inputs of a token, times a norm's weights if there is one; its factor is applied to the product."""
    words = _eight_words((x + (line + k)).to(gl.int64), there)
    if delta is not None:
        more = _eight_words((delta + (line + k)).to(gl.int64), there)
    found = ()
    for i in gl.static_range(16):
        value = bf16_at(words[i // 2], i % 2)
        if delta is not None:
            # round as a stored sum would be
            value = (value + bf16_at(more[i // 2], i % 2)).to(gl.bfloat16).to(gl.float32)
        found += (value,)
    if norm is not None:
        weighed = ()
        for i in gl.static_range(4):
            four = _four_floats(norm + (k + 4 * i))
            for j in gl.static_range(4):
                weighed += (found[4 * i + j] * four[j],)
        found = weighed
    return found


@gluon.constexpr_function
def parts_of(width):
    """Return the parts of K."""
    return (width + PART.value - 1) // PART.value


@gluon.constexpr_function
def parts_held(width):
    """Return the places of a token's parts, a power of two."""
    return 1 << (parts_of(width) - 1).bit_length()


@gluon.jit
def _part_of(adapted, slots, tokens, warp, lane, STEP: gl.constexpr, S: gl.constexpr):
    """Return what a warp shrinks in one of its steps.

    The token, a lane's inputs, the address of its row of `a`, whether the token has an adapter, the place of the sum, whether
    there is such a place.
    """
    K: gl.constexpr = S.width
    T: gl.constexpr = S.tokens
    PARTS: gl.constexpr = parts_of(K)
    unit = gl.program_id(0) + adapted.sharers * (warp + STEP * S.sharing)
    token, part, r = unit % T, unit // T % PARTS, unit // (T * PARTS)
    a, rank, first = adapted.a[0].to(gl.int64) + lane * 0, lane * 0 + adapted.ranks[0], lane * 0
    for i in gl.static_range(1, len(adapted.a)):
        further = r >= adapted.firsts[i]
        a, rank = gl.where(further, adapted.a[i].to(gl.int64), a), gl.where(further, adapted.ranks[i], rank)
        first = gl.where(further, adapted.firsts[i], first)
    there, slot = (r < adapted.total) & (token < tokens), from_lane(slots, token)
    has = there & (slot >= 0) & (slot < adapted.adapter_count)
    k = part * PART + lane * 16
    line = (gl.where(has, slot * rank + r - first, 0)).to(gl.int64) * K + gl.minimum(k, K - 16)
    return token, k, a + line * 2, has, (r * T + token) * parts_held(K) + part, r < adapted.total


@gluon.jit
def request_rows(adapted, slots, tokens, warp, lane, S: gl.constexpr):
    """Request the rows of `a` that a program shrinks with, before its tokens are there."""
    STEPS: gl.constexpr = S.steps
    if gl.program_id(0) < adapted.sharers:
        for n in gl.static_range(STEPS):
            _, k, at, has, _, _ = _part_of(adapted, slots, tokens, warp, lane, n, S)
            _prefetch(at, has & (k < S.width))


@gluon.jit
def shrink(x, delta, norm, adapted, slots, tokens, warp, lane, S: gl.constexpr):
    """Multiply parts of all tokens by rows of `a`; return where this launch's sums begin."""
    K: gl.constexpr = S.width
    STEPS: gl.constexpr = S.steps
    mine = _half(adapted, lane) * adapted.size
    if gl.program_id(0) < adapted.sharers:
        totals = ()
        for n in gl.static_range(STEPS):
            token, k, at, has, _, _ = _part_of(adapted, slots, tokens, warp, lane, n, S)
            within = has & (k < K)
            words = _eight_words(at, within)
            xs = _inputs(x, delta, norm, token * K, gl.minimum(k, K - 16), within)
            total = (lane * 0).to(gl.float32)
            for i in gl.static_range(16):
                total = gl.fma(bf16_at(words[i // 2], i % 2), xs[i], total)
            totals += (total,)  # type: ignore[assignment]
        for n in gl.static_range(STEPS):
            # a token without an adapter has zeros
            token, _, _, _, place, there = _part_of(adapted, slots, tokens, warp, lane, n, S)
            stores, total = (lane == 0) & there, sum_over(totals[n], 32)
            _store_float(adapted.sums + (mine + place), total, stores & (token < tokens))
            cleared = (lane * 0 + CLEARED).to(gl.float32, bitcast=True)
            _store_float(adapted.sums + (adapted.size - mine + place), cleared, stores)
    return mine


@gluon.constexpr_function
def expand_nbytes(columns, rank, tokens, weights):
    """Return the shared memory for columns of `b` and sums of every token."""
    return weights * tokens * rank * (2 * columns + 4)


@gluon.jit
def _owned(adapted, ends, GATED: gl.constexpr, lane):
    """Return `b`, the rank, the rows and the ranks before of the weight that a program works on, or of both if GATED."""
    several = ()
    for i in gl.static_range(len(adapted.b)):
        each = (adapted.b[i], lane * 0 + adapted.ranks[i], lane * 0 + adapted.rows[i], lane * 0 + adapted.firsts[i])
        several += (each,)  # type: ignore[assignment]
    if GATED:
        owned = several
    else:
        own, _ = select_weight(gl.program_id(0), ends, several)
        owned = (own,)  # type: ignore[assignment]
    return owned


@gluon.jit
def request_columns(
    at, adapted, slots, ends, row0, tokens, tid, GATED: gl.constexpr, COLUMNS: gl.constexpr, S: gl.constexpr
):  # fmt: skip
    """Request a program's columns of `b` of each token's adapter; the copies belong to the thread's next group.

    at       shared memory of `expand_nbytes`
    returns  what the functions below need to know of the program's weights
    """
    T: gl.constexpr = S.tokens
    RANK: gl.constexpr = S.rank
    THREADS: gl.constexpr = 32 * S.warps
    CHUNKS: gl.constexpr = COLUMNS // 8
    owned = _owned(adapted, ends, GATED, tid)
    for i in gl.static_range(len(owned)):
        b, rank, rows, _ = owned[i]
        for n in gl.static_range((T * RANK * CHUNKS + THREADS - 1) // THREADS):
            e = tid + n * THREADS
            column, r, token = row0 + e % CHUNKS * 8, e // CHUNKS % RANK, e // (CHUNKS * RANK)
            slot = from_lane(slots, token % T)
            there = (slot >= 0) & (slot < adapted.adapter_count) & (r < rank) & (token < tokens) & (column < rows)
            source = b + ((slot * rank + r).to(gl.int64) * rows + column)
            _copy_or_zero(at + i * T * (RANK * COLUMNS * 2) + e * 16, source, there, token < T)
    return owned


@gluon.jit
def sum_parts(at, adapted, mine, owned, tokens, warp, lane, COLUMNS: gl.constexpr, S: gl.constexpr):
    """Wait for the sums of a program's weights, and sum their parts into shared memory; then the program must `count_up`."""
    T: gl.constexpr = S.tokens
    RANK: gl.constexpr = S.rank
    W: gl.constexpr = S.warps
    HELD: gl.constexpr = parts_held(S.width)
    STEPS: gl.constexpr = (T * RANK * HELD + 32 * W - 1) // (32 * W)
    for i in gl.static_range(len(owned)):
        _, rank, _, first = owned[i]
        which = lane * 0
        for n in gl.static_range(STEPS):
            e = warp * 32 + lane + n * (32 * W)
            part, token, r = e % HELD, e // HELD % T, e // (HELD * T)
            which |= gl.where((part < parts_of(S.width)) & (token < tokens) & (r < rank), 1, 0) << n
        # sums of a weight follow each other as threads do
        place = mine + first * (T * HELD) + warp * 32 + lane
        found = _awaited(adapted.sums + place, which, STEPS, 32 * W)
        to = at + len(owned) * T * RANK * COLUMNS * 2 + i * T * RANK * 4
        for n in gl.static_range(STEPS):
            e = warp * 32 + lane + n * (32 * W)
            part, token, r = e % HELD, e // HELD % T, e // (HELD * T)
            put_float(to + (token * RANK + r) * 4, sum_over(found[n], HELD), (part == 0) & (r < RANK))


@gluon.jit
def expanded(at, token, column, WEIGHT: gl.constexpr, WEIGHTS: gl.constexpr, COLUMNS: gl.constexpr, S: gl.constexpr):
    """Return a column's product of `b` with a token's sums, of one of the program's weights; zero without an adapter."""
    T: gl.constexpr = S.tokens
    RANK: gl.constexpr = S.rank
    mine = WEIGHT * T + token
    columns, sums = at + mine * (RANK * COLUMNS * 2) + column * 2, at + WEIGHTS * T * RANK * COLUMNS * 2 + mine * (RANK * 4)
    found = (column * 0).to(gl.float32)
    for r in gl.static_range(0, RANK, 4):
        four = four_floats_at(sums + r * 4)
        for i in gl.static_range(4):
            found = gl.fma(half_at(columns + (r + i) * COLUMNS * 2), four[i], found)
    return found


# by the first matrix of a launch, so that models do not share them, and the number of tokens
_scratches: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _scratch(a: Tensor, size: int, tokens: int, programs: int) -> tuple[Tensor, Tensor]:
    """Return sums and a counter; they never move, because graphs refer to them."""
    known, key = _scratches.setdefault(a, {}), (size, tokens, programs)
    if key not in known:
        sums = torch.full((2 * size,), CLEARED.value, dtype=torch.int32, device=a.device).view(torch.float32)
        known[key] = sums, a.new_zeros(1, dtype=torch.int32)
        if a.is_cuda and not torch.cuda.is_current_stream_capturing():
            # a launch may begin before the previous kernel, which fills them, has ended
            torch.cuda.current_stream(a.device).synchronize()
    return known[key]


def refuses(x: Tensor, adapters: Adapters) -> str | None:
    """Return why no product multiplies adapters in its launch; None if some do."""
    tokens, rank = 1 if len(x) == 1 else cdiv(len(x), 8) * 8, padded_rank(adapters)
    if x.dtype is not torch.bfloat16:
        return "activations are not bf16"
    if rank > HIGHEST_RANK or tokens * rank * parts_held(x.shape[1]) > MOST_SUMS:
        return f"a rank of {adapters.rank}: the sums of a token's parts are too many"
    aligned = not any(each.data_ptr() % 16 for pair in adapters.pairs for each in pair)
    return None if aligned else "an address is not a multiple of 16 bytes"


def padded_rank(adapters: Adapters) -> int:
    """Return the highest rank as kernels take it, a multiple of four."""
    return cdiv(adapters.rank, 4) * 4


def adapted_of(
    adapters: Adapters | None,
    rows: Sequence[int],
    width: int,
    tokens: int,
    warps: int,
    programs: int,
    clusters: tuple[int, int],
) -> tuple[Adapted, Share]:
    """Return a launch's operands and constants.

    tokens    including padding
    warps     of a program
    clusters  that shrink, all of which run at once, and programs of each
    """
    if adapters is None:
        return NOT_ADAPTED
    pairs, (sharers, each) = adapters.pairs, clusters
    ranks = tuple(0 if a is None else a.shape[1] for a in adapters.a)
    filled = [(a, b) if a is not None and b is not None else pairs[0] for a, b in zip(adapters.a, adapters.b, strict=True)]
    firsts, total = tuple(accumulate(ranks[:-1], initial=0)), sum(ranks)
    size = total * tokens * parts_held(width)
    sums, counter = _scratch(pairs[0][0], size, tokens, programs)
    a, b = (tuple(some) for some in zip(*filled, strict=True))
    adapted = Adapted(
        adapters.slots, len(a[0]), a, b, ranks, tuple(rows), firsts, total, sharers, sums, size, counter, programs
    )
    steps = cdiv(total * tokens * parts_of(width), sharers * warps * each)
    return adapted, Share(width, tokens, padded_rank(adapters), steps, warps * each, warps)
