"""One token of the delta rule in Triton: the state is read and written once."""

import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv, power_of_two


@triton.jit
def _step_kernel(state, q, k, v, decay, beta, out, heads, shared, K, V, TILE: tl.constexpr):
    BK: tl.constexpr = TILE[0]
    BV: tl.constexpr = TILE[1]
    # both products use the old state, so it is read once: q S' = g (q S) + (q k) d
    head = tl.program_id(0).to(tl.int64)
    row, column = tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    memory = state + head * K * V + row[:, None] * V + column[None, :]
    inside = (row < K)[:, None] & (column < V)[None, :]
    s = tl.load(memory, mask=inside, other=0.0)
    where = (head // heads * (heads // shared) + head % heads // shared) * K + row
    key = tl.load(k + where, mask=row < K, other=0.0).to(tl.float32)
    query = tl.load(q + where, mask=row < K, other=0.0).to(tl.float32)
    g, strength = tl.load(decay + head).to(tl.float32), tl.load(beta + head).to(tl.float32)
    value = tl.load(v + head * V + column, mask=column < V, other=0.0).to(tl.float32)
    new = (value - tl.sum(s * key[:, None], 0) * g) * strength
    read = tl.sum(s * query[:, None], 0) * g + new * tl.sum(key * query, 0)
    tl.store(memory, s * g + key[:, None] * new[None, :], mask=inside)
    tl.store(out + head * V + column, read.to(out.dtype.element_ty), mask=column < V)


def run_step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, out: Tensor) -> None:
    """Run `gated_delta_step` into `out`."""
    batch, heads, K, V = state.shape
    # with few heads programs take fewer columns, to occupy every multiprocessor
    width = min(power_of_two(V), 16 if batch * heads * V <= 64 * 128 else 32)
    grid = (batch * heads, cdiv(V, width))
    shared = heads // q.shape[1]
    launch(_step_kernel, grid)(state, q, k, v, decay, beta, out, heads, shared, K, V, (power_of_two(K), width), num_warps=4)
