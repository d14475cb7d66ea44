"""Chunked delta rule over a prompt on Hopper, in two Gluon kernels for heads of 128 channels in bf16; see README.md.

`chunk_tiles`, all chunks of 64 tokens at once: X = (I + A)⁻¹ strength and P = (decay * q kᵀ) X, so that with the residual at
the keys, R = v - decay * k S, a chunk's new values are X R and its results decay * q S + P R. This does not involve v and
leaves two tiles of 64 x 64.

`scan_tiles`, one program per value head and half of V, walks a sequence's chunks with the transposed state, [V, K], in
accumulators. An accumulator has the layout of a register operand, so state, R, X R and the new state never go through shared
memory. A producer warp loads the tiles.

A long sequence is split into segments. The scan of one runs on a side stream while the chunks of the next are computed: 32
value heads occupy 64 multiprocessors, and its inputs are still in the L2 cache.

Slots of a ragged batch's chunks are those of `chunks`. A sequence's last chunk reads tokens of the next sequence; these have
strength 0 and are not written.
"""

from functools import cache
from typing import NamedTuple

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

from auraflux.ops.delta.cuda.inverse import LINE, exp2, inverse, log2, running_sums
from auraflux.ops.delta.cuda.layouts import BF, COL, F32, HALVES, HF, M64, ROW, C, publish
from auraflux.ops.delta.cuda.scan import Recurrence, ScanShape, scan_tiles
from auraflux.ops.gpu.device import multiprocessors
from auraflux.ops.gpu.launch import launch, tensor_descriptor
from auraflux.ops.gpu.sizes import cdiv
from auraflux.ops.gpu.streams import side_stream

WIDTH = 128  # channels of keys and values
STAGES = 3
# with these, a `chunk_tiles` program fits a multiprocessor together with a `scan_tiles` one, and four fit without
CHUNK_REGISTERS, SCAN_REGISTERS = 112, 144


class Segments(NamedTuple):
    """Segments of a single sequence of at least so many chunks."""

    chunks: int
    segments: int


# measured with 32 value heads on an H200
SEGMENTS = (
    Segments(512, 8),
    Segments(32, 2),  # 8192 tokens: 179 µs in 2 segments, 198 in 1, 179 in 4, 199 in 8
    Segments(0, 1),
)


def segments_for(tokens: int, heads: int, device: torch.device) -> int:
    """Return the number of segments: one is scanned while the next one's chunks are computed on idle multiprocessors."""
    if 2 * heads >= multiprocessors(device) * 3 // 4:
        return 1
    return next(row.segments for row in SEGMENTS if tokens >= row.chunks * C.value)


@gluon.jit
def sequence_at(slot, starts, sequences):
    """Return the sequence of a slot: the last whose first slot is not past it."""
    low, high = slot * 0, slot * 0 + sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        before = gl.load(starts + middle) // C + middle <= slot
        low = gl.where(before, middle, low)
        high = gl.where(before, high, middle - 1)
    return low


@gluon.jit
def store_gates(decay, beta, gates, line, at, live, HEADS: gl.constexpr):
    """Store sums of log2 decays and strengths in `line`, decays to the chunk's end and from its start in `gates`."""
    token = gl.arange(0, 64, LINE)
    step = gl.load(decay + at + token * HEADS, mask=token < live, other=1.0)
    strength = gl.load(beta + at + token * HEADS, mask=token < live, other=0.0)
    # a closed gate counts as 1e-30
    till, last = running_sums(log2(gl.maximum(step, 1e-30)))
    line.index(0).store(till)
    line.index(1).store(strength)
    gl.store(gates + token, exp2(last - till))
    gl.store(gates + 64 + token, exp2(till))


@gluon.jit(do_not_specialize_on_alignment=["begin", "tokens"])
def chunk_tiles(
    qs, ks, xs, ps, decay, beta, gates, starts, sequences, begin, tokens, SHAPE: gl.constexpr,
):  # fmt: skip
    HEADS: gl.constexpr = SHAPE.heads
    SHARED: gl.constexpr = SHAPE.group
    SINGLE: gl.constexpr = SHAPE.single
    head, place = gl.program_id(0), gl.program_id(1)
    if SINGLE:
        place += begin // C
        first, end = place * C, tokens
    else:
        b = sequence_at(place, starts, sequences)
        start, end = gl.load(starts + b), gl.minimum(gl.load(starts + b + 1), tokens)
        first = start + (place - start // C - b) * C
    if first >= end:
        return
    wide = gl.allocate_shared_memory(BF, [2, 64, 128], ks.layout)
    line = gl.allocate_shared_memory(F32, [2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    # these reuse the memory of keys and queries
    halves = wide._reinterpret(HF, [4, 64, 64], HALVES)
    tiles = wide._reinterpret(BF, [4, 64, 64], ps.layout)
    K, Q, P, X = wide.index(0), wide.index(1), tiles.index(2), tiles.index(1)
    mbarrier.init(bar, count=1)
    publish()
    mbarrier.expect(bar, 2 * 64 * 128 * 2)
    tma.async_copy_global_to_shared(ks, [first, head // SHARED * 128], bar, K)
    tma.async_copy_global_to_shared(qs, [first, head // SHARED * 128], bar, Q)
    slot = place * HEADS + head
    store_gates(decay, beta, gates + slot * 128, line, first.to(gl.int64) * HEADS + head, end - first, HEADS)
    i, j = gl.arange(0, 64, ROW), gl.arange(0, 64, COL)
    between = line.index(0).load(ROW)[:, None] - line.index(0).load(COL)[None, :]
    between = exp2(gl.where(i[:, None] >= j[None, :], between, -1e30))
    zero = gl.full([64, 64], 0.0, F32, M64)
    mbarrier.wait(bar, 0)
    qk = warpgroup_mma(Q, K.permute((1, 0)), zero, use_acc=False)
    kk = warpgroup_mma(K, K.permute((1, 0)), zero, use_acc=False, is_async=True)
    gl.thread_barrier()
    P.store((qk * between).to(BF))
    strength = -line.index(1).load(ROW)
    kk = warpgroup_mma_wait(0, deps=[kk])
    x = inverse((kk * strength[:, None] * between).to(HF), halves.index(0), halves.index(1), halves.index(3))
    X.store((x * line.index(1).load(COL)[None, :]).to(BF))
    publish()
    tma.async_copy_shared_to_global(xs, [slot * 64, 0], X)
    px = warpgroup_mma(P, X, zero, use_acc=False)
    tiles.index(0).store(px.to(BF))
    publish()
    tma.async_copy_shared_to_global(ps, [slot * 64, 0], tiles.index(0))
    tma.store_wait(0)


@cache
def tile_layout(columns: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([64, columns], BF)


def _tiles(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return tensor_descriptor(x.view(rows, -1), [64, columns], tile_layout(columns))


def prefill_hopper(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, starts: Tensor, out: Tensor
) -> None:
    """Run `gated_delta_prefill` into `out`."""
    (batch, heads), tokens, shared = state.shape[:2], v.shape[0], state.shape[1] // q.shape[1]
    slots, single = tokens // C.value + batch, batch == 1
    x, p = (v.new_empty(slots * heads * C.value, C.value) for _ in range(2))
    gates = torch.empty(slots * heads * 128, dtype=torch.float32, device=v.device)
    qs, ks, vs, os = _tiles(q, tokens, 128), _tiles(k, tokens, 128), _tiles(v, tokens, 64), _tiles(out, tokens, 64)
    xs, ps = _tiles(x, len(x), 64), _tiles(p, len(p), 64)
    segments = segments_for(tokens, heads, v.device) if single else 1
    size = cdiv(cdiv(tokens, C.value), segments) * C.value
    shape = ScanShape(heads, shared, single, STAGES)
    side = side_stream(v.device, segments > 1)
    for begin in range(0, tokens, size):
        end = min(tokens, begin + size)
        launch(chunk_tiles, (heads, cdiv(end - begin, C.value) if single else slots))(
            qs, ks, xs, ps, decay, beta, gates, starts, batch, begin, end, shape,
            num_warps=4, maxnreg=CHUNK_REGISTERS,
        )  # fmt: skip
        with side:
            launch(scan_tiles, (2, heads, batch))(
                qs, ks, vs, xs, ps, os, out, Recurrence(gates, state, starts), begin, end, shape,
                num_warps=4, maxnreg=SCAN_REGISTERS,
            )  # fmt: skip
    side.join()
