"""Layouts of the delta rule's tiles on Hopper, for warpgroups of four warps."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

C = gl.constexpr(64)  # tokens of a chunk
BF, HF, F32 = gl.bfloat16, gl.float16, gl.float32
# accumulators of 64 columns, the register operands that go with them, their rows and columns
M64 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
A64 = gl.constexpr(gl.DotOperandLayout(0, M64.value, 2))
ROW, COL = gl.constexpr(gl.SliceLayout(1, M64.value)), gl.constexpr(gl.SliceLayout(0, M64.value))
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # for row-wise stores
HALVES = gl.constexpr(gl.NVMMASharedLayout.get_default_for([64, 64], HF))


@gluon.jit
def publish():
    """Make shared-memory writes visible to TMA and the tensor cores."""
    fence_async_shared()
    gl.thread_barrier()
