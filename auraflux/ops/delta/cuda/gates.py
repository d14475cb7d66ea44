"""Decay and write strength of each head of a delta layer, in Triton."""

import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.gpu.blocks.elementwise import sigmoid, softplus
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv


@triton.jit
def _gates_kernel(a, b, a_log, dt_bias, decay, beta, size, heads, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, head = place < size, place % heads
    rate = tl.exp(tl.load(a_log + head, mask=inside, other=0.0).to(tl.float32))
    x = tl.load(a + place, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(dt_bias + head, mask=inside, other=0.0).to(tl.float32)
    tl.store(decay + place, tl.exp(-rate * softplus(x)), mask=inside)
    y = tl.load(b + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(beta + place, sigmoid(y), mask=inside)


def make_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, decay: Tensor, beta: Tensor) -> None:
    """Run `delta_gates` into `decay` and `beta`."""
    if size := a.numel():
        launch(_gates_kernel, (cdiv(size, 512),))(a, b, a_log, dt_bias, decay, beta, size, a.shape[1], 512, num_warps=4)
