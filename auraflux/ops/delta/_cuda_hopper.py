"""The delta rule over a prompt on Hopper, in two Gluon kernels for heads of 128 channels in bf16. README.md has the algebra.

`chunk_tiles`, all chunks of 64 tokens at once: X = (I + A)⁻¹, W = -X (strength * decay * k), U = X (strength * v) and
P = decay * q kᵀ. Tiles go from the copy engine straight to the matrix units; every factor is applied to a 64 x 64 accumulator.
X comes from products alone: with x inverting the diagonal blocks of some size, x - x L x inverts those twice as large, L being
the part of A that joins pairs of them. Its operands are float16, which is as exact as tf32 here, as entries are small.

`scan_tiles`, one program for each value head and half of V, walks a sequence's chunks with the memory transposed, [V, K], in
accumulators. An accumulator lies as a register operand does, so memory, W S, new values and memory again never touch
shared memory. One more warp feeds the tiles.

A long sequence goes in parts. The walk of one, on a stream of its own, runs beside the chunks of the next: 32 value heads
occupy 64 multiprocessors, and what it reads is still in the second cache.

Slots of a ragged batch's chunks are those of `_cuda_chunks`. A sequence's last chunk reads into the tokens of the next one;
those count for nothing, as their strength is taken as 0, and are not written.
"""

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents

from auraflux.ops._launch import described
from auraflux.ops._triton import INTERPRETED, capability, cdiv, multiprocessors
from auraflux.ops.delta._cuda_scan import scan_tiles
from auraflux.ops.delta._cuda_tiles import A64, A128, BF, COL, F32, HALVES, HF, M64, M128, ROW, C, publish

HOPPER = (9, 0)
WIDTH = 128  # channels of keys and values
STAGES = 3
# chunks from which on a single sequence goes in so many parts, and what they were measured with: 32 value heads on an H200
PARTS = ((256, 4), (32, 2), (0, 1))


@cache
def _side(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


def _parts(tokens: int, heads: int, device: torch.device) -> int:
    """How many parts a sequence goes in: one is walked while the next one's chunks are made, on multiprocessors left over."""
    if 2 * heads >= multiprocessors(device) * 3 // 4:
        return 1
    return next(parts for chunks, parts in PARTS if tokens >= chunks * C.value)


@gluon.jit
def _sequence_at(slot, starts, sequences):
    """The sequence that a slot belongs to: the last whose first slot is not past it."""
    low, high = slot * 0, slot * 0 + sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        before = gl.load(starts + middle) // C + middle <= slot
        low = gl.where(before, middle, low)
        high = gl.where(before, high, middle - 1)
    return low


@gluon.jit
def _inverse(a, As, Xs, i, j):
    """(I + a)⁻¹ of a strictly lower triangular a, which As holds."""
    zero = gl.full([64, 64], 0.0, F32, M64)
    x = gl.where(i[:, None] == j[None, :], 1.0, gl.where((i[:, None] ^ j[None, :]) == 1, -a.to(F32), 0.0))
    for level in gl.static_range(1, 6):
        half = x.to(HF)
        y = warpgroup_mma(gl.convert_layout(half, A64), As, zero, use_acc=False, is_async=True)
        gl.thread_barrier()
        Xs.store(half)
        publish()
        y = warpgroup_mma_wait(0, deps=[y])
        y = gl.where(((i[:, None] ^ j[None, :]) >> level) == 1, -y, 0.0)
        x = warpgroup_mma(gl.convert_layout(y.to(HF), A64), Xs, x, is_async=True)
        x = warpgroup_mma_wait(0, deps=[x])
    return x


@gluon.jit
def chunk_tiles(
    qs, ks, vs, ws, us, ps, decay, beta, gates, starts, sequences, begin, tokens,
    HEADS: gl.constexpr, SHARED: gl.constexpr, SINGLE: gl.constexpr,
):  # fmt: skip
    gdc_launch_dependents()
    head, place = gl.program_id(0), begin // C + gl.program_id(1)
    if SINGLE:
        first, end = place * C, tokens
    else:
        b = _sequence_at(place, starts, sequences)
        start, end = gl.load(starts + b), gl.minimum(gl.load(starts + b + 1), tokens)
        first = start + (place - start // C - b) * C
    if first >= end:
        return
    K = gl.allocate_shared_memory(BF, [64, 128], ks.layout)
    Q = gl.allocate_shared_memory(BF, [64, 128], qs.layout)  # v follows when q is done with
    As = gl.allocate_shared_memory(HF, [64, 64], HALVES)
    Xs = gl.allocate_shared_memory(HF, [64, 64], HALVES)
    Ps = Xs._reinterpret(BF, [64, 64], ps.layout)
    bar = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bar.index(0), count=1)
    mbarrier.init(bar.index(1), count=1)
    publish()
    mbarrier.expect(bar.index(0), 2 * 64 * 128 * 2)
    tma.async_copy_global_to_shared(ks, [first, head // SHARED * 128], bar.index(0), K)
    tma.async_copy_global_to_shared(qs, [first, head // SHARED * 128], bar.index(0), Q)
    i, j = gl.arange(0, 64, ROW), gl.arange(0, 64, COL)
    slot = place * HEADS + head
    at, live = first.to(gl.int64) * HEADS + head, first + j < end
    # a closed gate counts as 1e-30
    step = gl.log(gl.maximum(gl.load(decay + at + j * HEADS, mask=live, other=1.0), 1e-30))
    strength = gl.load(beta + at + i * HEADS, mask=first + i < end, other=0.0)
    till = gl.sum(gl.where(i[:, None] >= j[None, :], step[None, :], 0.0), 1)
    last, till_j = gl.sum(step, 0), gl.convert_layout(till, COL)
    zero = gl.full([64, 64], 0.0, F32, M64)
    mbarrier.wait(bar.index(0), 0)
    kk = warpgroup_mma(K, K.permute((1, 0)), zero, use_acc=False, is_async=True)
    between = gl.exp(gl.where(i[:, None] >= j[None, :], till[:, None] - till_j[None, :], -1e30))
    kk = warpgroup_mma_wait(0, deps=[kk])
    a = gl.where(i[:, None] == j[None, :], 0.0, kk * strength[:, None] * between).to(HF)
    As.store(a)
    qk = warpgroup_mma(Q, K.permute((1, 0)), zero, use_acc=False, is_async=True)
    gl.store(gates + slot * 192 + i, gl.exp(last - till))
    gl.store(gates + slot * 192 + 64 + i, gl.exp(till))
    gl.store(gates + slot * 192 + 128 + i, gl.exp(last + i * 0.0))
    since = gl.exp(till_j)
    qk = warpgroup_mma_wait(0, deps=[qk])
    Ps.store((qk * between).to(BF))
    publish()
    tma.async_copy_shared_to_global(ps, [slot * 64, 0], Ps)
    mbarrier.expect(bar.index(1), 64 * 128 * 2)
    tma.async_copy_global_to_shared(vs, [first, head * 128], bar.index(1), Q)
    tma.store_wait(0)
    x = _inverse(a, As, Xs, i, j)
    wide = gl.full([64, 128], 0.0, F32, M128)
    x = x * gl.load(beta + at + j * HEADS, mask=live, other=0.0)[None, :]
    for_w = gl.convert_layout((x * -since[None, :]).to(BF), A128)
    for_u = gl.convert_layout(x.to(BF), A128)
    w = warpgroup_mma(for_w, K, wide, use_acc=False)
    mbarrier.wait(bar.index(1), 0)
    gl.thread_barrier()
    K.store(w.to(BF))
    publish()
    tma.async_copy_shared_to_global(ws, [slot * 64, 0], K)
    u = warpgroup_mma(for_u, Q, wide, use_acc=False)
    gl.thread_barrier()
    Q.store(u.to(BF))
    publish()
    tma.async_copy_shared_to_global(us, [slot * 64, 0], Q)
    tma.store_wait(0)


def fits_hopper(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> bool:
    """Whether the kernels here serve a prompt: bf16 heads of 128 channels, gates in float32, at least one whole chunk."""
    return (
        not INTERPRETED
        and state.shape[2:] == (WIDTH, WIDTH)
        and v.shape[0] >= C.value
        and q.dtype == k.dtype == v.dtype == torch.bfloat16
        and decay.dtype == beta.dtype == torch.float32
        and capability(v.device) == HOPPER
        and not (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16
    )


@cache
def tile_layout(columns: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([64, columns], BF)


def _tiles(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return described(x.view(rows, -1), [64, columns], tile_layout(columns))


def prefill_hopper(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, starts: Tensor, out: Tensor
) -> None:
    """`gated_delta_prefill` into `out`."""
    (batch, heads), tokens, shared = state.shape[:2], v.shape[0], state.shape[1] // q.shape[1]
    slots = tokens // C.value + batch
    w, u, p = (v.new_empty(slots * heads * C.value, n) for n in (WIDTH, WIDTH, C.value))
    gates = torch.empty(slots * heads * 192, dtype=torch.float32, device=v.device)
    qs, ks, vs, os = _tiles(q, tokens, 128), _tiles(k, tokens, 128), _tiles(v, tokens, 128), _tiles(out, tokens, 64)
    ws, ps = _tiles(w, len(w), 128), _tiles(p, len(p), 64)
    wide, narrow, single = _tiles(u, len(u), 128), _tiles(u, len(u), 64), batch == 1
    parts = _parts(tokens, heads, v.device) if single else 1
    size = cdiv(cdiv(tokens, C.value), parts) * C.value
    main = torch.cuda.current_stream(v.device)
    side = _side(v.device) if parts > 1 else main
    for begin in range(0, tokens, size):
        end = min(tokens, begin + size)
        chunk_tiles[heads, cdiv(end - begin, C.value) if single else slots](
            qs, ks, vs, ws, wide, ps, decay, beta, gates, starts, batch, begin, end, heads, shared, single,
            num_warps=4, maxnreg=168,
        )  # fmt: skip
        if parts > 1:
            side.wait_stream(main)
        with torch.cuda.stream(side):
            scan_tiles[2, heads, batch](
                qs, ks, ws, narrow, ps, os, out, gates, state, starts, begin, end, heads, shared, single, STAGES,
                num_warps=4,
            )  # fmt: skip
    if parts > 1:
        main.wait_stream(side)
