"""Single Hopper instructions for Gluon kernels: PTX of one thread.

Every tensor has one element per thread. PTX without a result ends in `mov.b32 $0,0`, since Triton requires one, and names its
operand in a comment; `run` executes it. Loads and stores of shared memory are in `shared_memory.py`, copies in `copy.py`,
reductions over lanes in `reduce.py`, products in `mma.py`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.gpu.blocks.dependent_launch import launches_early

# synchronise the lanes of a warp
SYNC = gl.constexpr("bar.warp.sync 0xffffffff; mov.b32 $0,0; // $1")
# programmatic dependent launch: wait for the previous kernel, let the next one begin, or both
WAIT = gl.constexpr("griddepcontrol.wait; mov.b32 $0,0; // $1")
LAUNCH = gl.constexpr("griddepcontrol.launch_dependents; mov.b32 $0,0; // $1")
# x may be read after this; the next kernel may start at once, since before its own wait it reads only weights
WAIT_AND_LAUNCH = gl.constexpr("griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0,0; // $1")
# arrive at the barrier of a cluster, and wait there for all its programs
CLUSTER_ARRIVE = gl.constexpr("barrier.cluster.arrive.release.aligned; mov.b32 $0,0; // $1")
CLUSTER_WAIT = gl.constexpr("barrier.cluster.wait.acquire.aligned; mov.b32 $0,0; // $1")
# make stores to shared memory visible to TMA and wgmma
FENCE = gl.constexpr("fence.proxy.async.shared::cta; mov.b32 $0,0; // $1")
# the address of the dynamic shared memory
SHARED_BASE = gl.constexpr("mov.u32 $0,global_smem; // $1")


@gluon.constexpr_function
def _controls_launch(ptx):
    return ptx.startswith("griddepcontrol")


@gluon.constexpr_function
def with_older_instructions(ptx, early):
    """Return PTX without packed 16-bit products and comparisons, unless the GPU launches kernels early: Hopper has both."""
    if early:
        return ptx
    statements = []
    for each in ptx.split(";"):
        before, product, operands = each.partition("mul.rn.bf16x2 ")
        if product:
            each = f"{before}fma.rn.bf16x2 {operands},minus"
        for name in ("min", "max"):
            before, found, operands = each.partition(f"{name}.u16x2 ")
            if found:
                each = f"{before}v{name}2.u32.u32.u32 {operands},zero"
        statements.append(each)
    return "{.reg .b32 minus,zero; mov.b32 minus,0x80008000; mov.b32 zero,0;" + ";".join(statements) + "}"


@gluon.jit
def run(PTX: gl.constexpr, lane):
    """Execute PTX without a result, such as SYNC or WAIT_AND_LAUNCH, in every thread.

    GPUs that launch kernels one after the other need no WAIT and LAUNCH, and have no instruction for them.
    """
    if launches_early() or not _controls_launch(PTX):
        gl.inline_asm_elementwise(PTX, "=r,r,~{memory}", [lane], gl.int32, is_pure=False, pack=1)


@gluon.jit
def shared(NBYTES: gl.constexpr, tid):
    """Allocate the kernel's only shared memory, which the caller must hold alive, and return its address.

    As the only allocation it begins where the dynamic segment does; the store makes Triton declare it.
    """
    memory = gl.allocate_shared_memory(gl.int8, [NBYTES // 1024 + 2, 1024], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    memory.index(NBYTES // 1024 + 1).slice(0, tid.shape[0]).store(tid.to(gl.int8))
    return memory, gl.inline_asm_elementwise(SHARED_BASE, "=r,r", [tid], gl.int32, is_pure=False, pack=1)


@gluon.jit
def from_lane(value, lane):
    """Return the word of another lane of the warp."""
    text: gl.constexpr = "shfl.sync.idx.b32 $0,$1,$2,31,0xffffffff;"
    return gl.inline_asm_elementwise(text, "=r,r,r", [value, lane], gl.int32, is_pure=False, pack=1)


@gluon.jit
def bf16_at(value, j: gl.constexpr):
    """Widen the j-th bf16 of a word or of eight bytes to float32."""
    return ((value >> (16 * j)).to(gl.int32) << 16).to(gl.float32, bitcast=True)
