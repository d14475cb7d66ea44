"""One decode step of a complete delta layer in one Gluon kernel, for heads of 128 channels in bf16.

Both products use the old state, so one pass suffices: with S' = g S + k dᵀ, S'ᵀ q = g Sᵀ q + d (k . q). The norms of q and k
are factors of the two results.

A cluster of programs serves a key head and the value heads that share it. They all read the key head's last inputs, which are
overwritten only when every program has loaded them. With few heads a value head's columns are split among several programs,
which exchange one number each for the norm of the result: by `st.async` with transaction counts, before the state is written,
as a cluster barrier would wait for that write. On GPUs without clusters a program serves a value head; of those that share a
key head, the last to have read its inputs overwrites them.

The state is read before `gdc_wait`, while the preceding kernel still runs, which may not be one that writes it: a step right
after another of the same sequences is launched without PDL.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.fake_gpu import fake_capability
from auraflux.ops.gpu.blocks.dependent_launch import gdc_launch_dependents, gdc_wait
from auraflux.ops.gpu.device import not_clusters
from auraflux.ops.gpu.launch import launch
from auraflux.ops.hopper.ptx import CLUSTER_ARRIVE, CLUSTER_WAIT, run

WIDTH = 128  # channels of keys and values
MOST_PROGRAMS = 8  # of a cluster
ALONE_WARPS = 8  # of a program on GPUs without clusters
MOST_KEY_HEADS = 1 << 16  # of all sequences, on GPUs without clusters

# by device, the state that the last step wrote, and how many programs have read the inputs of each key head: 0 between steps
_latest: dict[torch.device, int] = {}
_readers: dict[torch.device, Tensor] = {}


class Split(NamedTuple):
    """Programs of a value head and warps of each, for so many heads of all sequences at most."""

    heads: int
    programs: int
    warps: int


# 32 value heads of 1 / 8 / 32 sequences, H200
SPLITS = (
    Split(128, 4, 4),  # 3.05 / 12.4 / 45.8 µs
    Split(1 << 31, 1, 8),  # 3.6 / 11.2 / 42.8 µs; with 16 warps 4.0 / 13.3 / 51.3
)


def split_for(heads: int, shared: int) -> Split:
    """Return the split of `heads` heads of all sequences, of which `shared` share a key head and a cluster."""
    return next(row for row in SPLITS if heads <= row.heads and (row.programs == 1 or row.programs * shared <= MOST_PROGRAMS))


class Weights(NamedTuple):
    """Weights of a delta layer, see `delta_layer_step`."""

    taps: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor


class Kept(NamedTuple):
    """Tensors that a step updates: the convolution's last inputs, the state, and without clusters `readers_of`."""

    conv: Tensor
    state: Tensor
    readers: Tensor | None


class StepShape(NamedTuple):
    """Compile-time shape: key heads, value heads per key head, programs per value head, and programs of a cluster, or 1."""

    key_heads: int
    group: int
    programs: int
    cluster: int


@gluon.constexpr_function
def _tile(programs, warps, columns):
    """Return a layout of [K, value heads * V]: 16 bytes a thread, columns split among programs and warps, K within a warp."""
    across = min(32, columns // warps // 4)
    bases = [[0, 1 << i] for i in range(programs.bit_length() - 1)]
    return gl.BlockedLayout([1, 4], [32 // across, across], [1, warps], [1, 0], bases)


@gluon.constexpr_function
def _channels(programs, warps, split):
    """Return a layout of one channel a thread; every program has all channels, or they are split."""
    return gl.BlockedLayout([1], [32], [warps], [0], [[split << i] for i in range(programs.bit_length() - 1)])


@gluon.constexpr_function
def _open_ptx(programs):
    """Return PTX that allocates a slot per program and a barrier counting their bytes, and arrives at the cluster barrier."""
    return (
        f"{{.shared .align 16 .b64 box[{programs // 2 + 1}]; .reg .b32 la,i; .reg .b64 s; .reg .pred z; mov.u32 la,box;"
        "mov.u32 i,%tid.x; setp.eq.u32 z,i,0; @z mbarrier.init.shared::cta.b64 [la],1;"
        f"@z mbarrier.arrive.expect_tx.shared::cta.b64 s,[la],{4 * programs}; fence.mbarrier_init.release.cluster;"
        "barrier.cluster.arrive.release.aligned; add.u32 $0,la,8; // $1\n}"
    )


@gluon.constexpr_function
def _send_ptx(programs):
    """Return PTX with which thread i sends this program's number $2 to program i."""
    return (
        "{.reg .b32 ra,rb,r,i; .reg .pred w; mov.u32 r,%cluster_ctarank; shl.b32 r,r,2; mov.u32 i,%tid.x;"
        f"setp.lt.u32 w,i,{programs}; barrier.cluster.wait.acquire.aligned; @w mapa.shared::cluster.u32 ra,$1,i;"
        "@w sub.u32 rb,ra,8; @w add.u32 ra,ra,r;"
        "@w st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [ra],$2,[rb]; mov.b32 $0,$1;}"
    )


@gluon.constexpr_function
def _take_ptx(split):
    """Return PTX that sums over the programs of a head, when all of the cluster have sent theirs."""
    add = "".join(f"ld.shared.f32 t,[la+{4 * i}]; add.f32 $0,$0,t;" for i in range(1, split))
    return (
        "{.reg .b32 la,r; .reg .f32 t; .reg .pred p; sub.u32 la,$1,8;"
        "MORE: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p,[la],0; @!p bra MORE; mov.u32 r,%cluster_ctarank;"
        f"shl.b32 r,r,2; and.b32 r,r,{-4 * split}; add.u32 la,$1,r; ld.shared.f32 $0,[la]; {add}}}"
    )


@gluon.jit
def _inputs(conv, taps, channel, C: gl.constexpr):
    """Load the last three inputs of channels, oldest first, and their taps."""
    last = (gl.load(conv + channel), gl.load(conv + C + channel), gl.load(conv + 2 * C + channel))
    ours = (
        gl.load(taps + channel),
        gl.load(taps + C + channel),
        gl.load(taps + 2 * C + channel),
        gl.load(taps + 3 * C + channel),
    )
    return last, ours


@gluon.jit
def _convolved(x, last, taps):
    y = x.to(gl.float32) * taps[3].to(gl.float32)
    for i in gl.static_range(3):
        y += last[i].to(gl.float32) * taps[i].to(gl.float32)
    return y / (1.0 + gl.exp(-y))


@gluon.jit
def _shift_inputs(conv, channel, x, last, C: gl.constexpr, mine):
    """Shift the stored inputs by one token."""
    gl.store(conv + channel, last[1], mask=mine)
    gl.store(conv + C + channel, last[2], mask=mine)
    gl.store(conv + 2 * C + channel, x, mask=mine)


# count a program in; the first thread gets how many were before it
COUNT_IN = gl.constexpr("{.reg .pred p; setp.eq.u32 p,$2,0; mov.b32 $0,-1; @p atom.acq_rel.gpu.global.add.u32 $0,[$1],1;}")


@gluon.jit
def layer_step(qkv, z, a, b, kept, weights, out, unit_eps, eps, scale, SHAPE: gl.constexpr):
    """Run a key head of a sequence and its G value heads, each split among NS programs, in a cluster; or one value head."""
    KEYS: gl.constexpr = SHAPE.key_heads
    G: gl.constexpr = SHAPE.group
    NS: gl.constexpr = SHAPE.programs
    NC: gl.constexpr = SHAPE.cluster
    NW: gl.constexpr = gl.num_warps()
    # value heads of a cluster; the programs of a key head where there is none
    HEADS: gl.constexpr = G if NC > 1 else 1
    APART: gl.constexpr = G // HEADS
    L: gl.constexpr = _tile(NC, NW, HEADS * 128 // NC)
    LK: gl.constexpr = gl.SliceLayout(1, L)
    LV: gl.constexpr = gl.SliceLayout(0, L)
    C: gl.constexpr = (2 + G) * KEYS * 128
    both, apart = gl.program_id(0) // APART, gl.program_id(0) % APART
    n, key_head = both // KEYS, both % KEYS
    rank = n * 0
    if NC > 1:
        rank = gl.inline_asm_elementwise("mov.u32 $0,%cluster_ctarank; // $1", "=r,r", [n], gl.int32, is_pure=True, pack=1)
    if NS > 1:
        box = gl.inline_asm_elementwise(_open_ptx(NC), "=r,r,~{memory}", [rank], gl.int32, is_pure=False, pack=1)
    first = both * G + apart
    head = first + rank // NS
    row, column = gl.arange(0, 128, LK), gl.arange(0, HEADS * 128, LV)
    memory = kept.state + first.to(gl.int64) * 16384 + ((column // 128 * 16384 + column % 128)[None, :] + row[:, None] * 128)
    cq = key_head * 128 + gl.arange(0, 128, _channels(NC, NW, 0))
    cv = (2 * KEYS + key_head * G + apart) * 128 + gl.arange(0, HEADS * 128, _channels(NC, NW, 1))
    ck = cq + KEYS * 128
    conv = kept.conv + n.to(gl.int64) * 3 * C
    at = head % (KEYS * G)
    S = gl.load(memory, eviction_policy="evict_first")
    rate, shift = gl.exp(gl.load(weights.a_log + at).to(gl.float32)), gl.load(weights.dt_bias + at).to(gl.float32)
    w = gl.load(weights.norm + column % 128).to(gl.float32)
    last_q, taps_q = _inputs(conv, weights.taps, cq, C)
    last_k, taps_k = _inputs(conv, weights.taps, ck, C)
    last_v, taps_v = _inputs(conv, weights.taps, cv, C)
    gdc_launch_dependents()
    gdc_wait()
    xs = qkv + n.to(gl.int64) * C
    xq, xk, xv = gl.load(xs + cq), gl.load(xs + ck), gl.load(xs + cv)
    forget, strength = gl.load(a + head).to(gl.float32) + shift, gl.load(b + head).to(gl.float32)
    gate = gl.load(z + first.to(gl.int64) * 128 + column).to(gl.float32)
    q = gl.convert_layout(_convolved(xq, last_q, taps_q), LK)
    k = gl.convert_layout(_convolved(xk, last_k, taps_k), LK)
    v = gl.convert_layout(_convolved(xv, last_v, taps_v), LV)
    if NC > 1 and NS == 1:
        run(CLUSTER_ARRIVE, n)
    if APART > 1:
        tid = gl.arange(0, 32 * NW, gl.BlockedLayout([1], [32], [NW], [0]))
        gl.thread_barrier()
        args = [kept.readers + (tid * 0 + both), tid]
        before = gl.inline_asm_elementwise(COUNT_IN, "=r,l,r,~{memory}", args, gl.int32, is_pure=False, pack=1)
    kq, unit_k, unit_q = gl.sum(k * q, 0), gl.rsqrt(gl.sum(k * k, 0) + unit_eps), gl.rsqrt(gl.sum(q * q, 0) + unit_eps) * scale
    g = gl.exp(-rate * gl.where(forget > 20.0, forget, gl.log(1.0 + gl.exp(forget))))
    at_k, at_q = gl.sum(S * k[:, None], 0), gl.sum(S * q[:, None], 0)
    d = (v - at_k * (g * unit_k)) / (1.0 + gl.exp(-strength))
    o = at_q * (g * unit_q) + d * (kq * unit_k * unit_q)
    if NS == 1:
        gl.store(memory, S * g + (d * unit_k)[None, :] * k[:, None], eviction_policy="evict_first")
    o2 = gl.reshape(o, [HEADS * NS, 128 // NS])  # a row for each program of a value head
    total = gl.sum(o2 * o2, 1)
    if NS > 1:
        args = [box + gl.zeros_like(total).to(gl.int32), total]
        box = gl.inline_asm_elementwise(_send_ptx(NC), "=r,r,f,~{memory}", args, gl.int32, is_pure=False, pack=1)
        gl.store(memory, S * g + (d * unit_k)[None, :] * k[:, None], eviction_policy="evict_first")
        total = gl.inline_asm_elementwise(_take_ptx(NS), "=f,r,~{memory}", [box], gl.float32, is_pure=False, pack=1)
    o2 = o2 * gl.rsqrt(total * (1.0 / 128) + eps)[:, None]
    o = gl.convert_layout(gl.reshape(o2, [HEADS * 128]), LV, assert_trivial=True) * w * (gate / (1.0 + gl.exp(-gate)))
    gl.store(out + first.to(gl.int64) * 128 + column, o.to(out.dtype.element_ty))
    if NC > 1 and NS == 1:
        run(CLUSTER_WAIT, n)
    mine = rank == 0
    if APART > 1:
        mine = gl.max(before, 0) == APART - 1
        gl.store(kept.readers + both, 0, mask=mine)
    _shift_inputs(conv, cq, xq, last_q, C, mine)
    _shift_inputs(conv, ck, xk, last_k, C, mine)
    _shift_inputs(conv, cv, xv, last_v, C, cv >= 0)


def key_heads_of(qkv: Tensor, state: Tensor) -> int:
    _, heads, key_width, value_width = state.shape
    return (qkv.shape[1] - heads * value_width) // (2 * key_width)


def readers_of(device: torch.device) -> Tensor:
    """Return a device's counters, all zero between steps."""
    if fake_capability():
        return torch.zeros(MOST_KEY_HEADS, dtype=torch.int32, device=device)
    if device not in _readers:
        _readers[device] = torch.zeros(MOST_KEY_HEADS, dtype=torch.int32, device=device)
    return _readers[device]


def run_layer_step(
    qkv: Tensor, z: Tensor, a: Tensor, b: Tensor, conv: Tensor, state: Tensor, taps: Tensor, a_log: Tensor, dt_bias: Tensor,
    norm: Tensor, unit_eps: float, eps: float, out: Tensor,
) -> None:  # fmt: skip
    """Run `delta_layer_step` into `out`."""
    (batch, heads), key_heads = state.shape[:2], key_heads_of(qkv, state)
    shared = heads // key_heads
    _, programs, warps = split_for(batch * heads, shared)
    cluster = shared * programs
    apart, kept = 1, Kept(conv, state, None)
    if not_clusters(state.device):
        programs, cluster, warps, apart, kept = 1, 1, ALONE_WARPS, shared, Kept(conv, state, readers_of(state.device))
    early = _latest.get(state.device) != state.data_ptr()
    _latest[state.device] = state.data_ptr()
    launch(layer_step, (batch * key_heads * apart,))(
        qkv, z, a, b, kept, Weights(taps, a_log, dt_bias, norm), out, unit_eps, eps, WIDTH**-0.5,
        StepShape(key_heads, shared, programs, cluster), num_warps=warps, num_ctas=cluster, launch_pdl=early,
    )  # fmt: skip
