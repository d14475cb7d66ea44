"""Asynchronous copies to shared memory, by cp.async and by TMA: PTX of one thread; one element per thread.

- cp.async: a thread copies 4 to 16 bytes. Its copies since the last COMMIT are a group, and `wait_ptx` waits until few of its
  groups are pending.
- TMA: one thread requests any multiple of 16 bytes. An mbarrier counts the bytes that arrive, `expect` announces how many will,
  and any thread can wait for them. A stage that is refilled flips the parity of its mbarrier with every phase.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def copy_ptx(nbytes):
    """Return PTX that copies 4, 8 or 16 bytes, for `copy`; only 16 can bypass L1."""
    how = "cg" if nbytes == 16 else "ca"
    return f"{{.reg .pred p; setp.ne.b32 p,$3,0; @p cp.async.{how}.shared.global [$1],[$2],{nbytes}; mov.b32 $0,0;}}"


COPY4, COPY8, COPY16 = gl.constexpr(copy_ptx(4)), gl.constexpr(copy_ptx(8)), gl.constexpr(copy_ptx(16))
# end a thread's group of copies; wait for all of its copies
COMMIT = gl.constexpr("cp.async.commit_group; mov.b32 $0,0; // $1")
WAIT_ALL = gl.constexpr("cp.async.wait_all; mov.b32 $0,0; // $1")


@gluon.constexpr_function
def wait_ptx(pending):
    """Return PTX that waits until each lane has at most `pending` groups in flight and synchronises the warp, for `run`."""
    return f"cp.async.wait_group {pending}; bar.warp.sync 0xffffffff; mov.b32 $0,0; // $1"


@gluon.jit
def copy(PTX: gl.constexpr, to, source, there):
    """Copy a thread's COPY4, COPY8 or COPY16 bytes from global to shared memory, where `there`."""
    args = [to, source.to(gl.int64), there.to(gl.int32)]
    gl.inline_asm_elementwise(PTX, "=r,r,l,r,~{memory}", args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def copy_together(to, source, tid, NBYTES: gl.constexpr, THREADS: gl.constexpr):
    """Copy a multiple of 16 bytes by cp.async with all threads of a program, unless the source is null."""
    for first in gl.static_range(0, NBYTES, 16 * THREADS):
        at = tid * 16 + first
        copy(COPY16, to + at, source + at, (source != 0) & (at < NBYTES))


@gluon.jit
def init_barriers(at, tid, COUNT: gl.constexpr):
    """Initialise COUNT mbarriers of 8 bytes, each with one arrival: that of the thread that calls `expect`."""
    text: gl.constexpr = (
        "{.reg .pred p; setp.ne.b32 p,$2,0; @p mbarrier.init.shared::cta.b64 [$1],1;"
        "@p fence.proxy.async.shared::cta; mov.b32 $0,0;}"
    )
    args = [at + tid * 8, (tid < COUNT).to(gl.int32)]
    gl.inline_asm_elementwise(text, "=r,r,r,~{memory}", args, gl.int32, is_pure=False, pack=1)
    gl.thread_barrier()


@gluon.jit
def expect(barrier, nbytes, there):
    """Arrive at an mbarrier and announce the bytes that will arrive, where `there`."""
    text: gl.constexpr = (
        "{.reg .pred p; setp.ne.b32 p,$3,0; @p mbarrier.arrive.expect_tx.shared::cta.b64 _,[$1],$2; mov.b32 $0,0;}"
    )
    args = [barrier, nbytes, there.to(gl.int32)]
    gl.inline_asm_elementwise(text, "=r,r,r,r,~{memory}", args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def tma_copy(to, source, nbytes, barrier, there):
    """Have TMA copy `nbytes`, counted on `barrier`, where `there`; addresses and sizes are multiples of 16."""
    text: gl.constexpr = (
        "{.reg .pred p; setp.eq.b32 p,$5,0; mov.b32 $0,0; @p bra SKIP;"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$1],[$2],$3,[$4]; SKIP: }"
    )
    args = [to, source, nbytes, barrier, there.to(gl.int32)]
    gl.inline_asm_elementwise(text, "=r,r,l,r,r,r,~{memory}", args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_bytes(barrier):
    """Wait until the bytes of an mbarrier's first phase have arrived."""
    text: gl.constexpr = (
        "{.reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p,[$1],0; @!p bra AGAIN; mov.b32 $0,0;}"
    )
    gl.inline_asm_elementwise(text, "=r,r,~{memory}", [barrier], gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_stage(barrier, phase, there):
    """Wait until the bytes of a stage's phase have arrived, where `there`."""
    text: gl.constexpr = (
        "{.reg .pred p,q; setp.eq.b32 q,$3,0; @q bra DONE;"
        "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p,[$1],$2; @!p bra AGAIN; DONE: mov.b32 $0,0;}"
    )
    args = [barrier, phase & 1, there.to(gl.int32)]
    gl.inline_asm_elementwise(text, "=r,r,r,r,~{memory}", args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def count_read(at, lane, there):
    """Count a warp that has read its part of a stage; return how many had before it, -1 where not `there`.

    The last warp may refill the stage.
    """
    text: gl.constexpr = (
        "{.reg .pred p; .reg .b32 n; setp.ne.b32 p,$2,0; mov.b32 n,-1; bar.warp.sync 0xffffffff;"
        "@p atom.acq_rel.cta.shared::cta.add.u32 n,[$1],1; shfl.sync.idx.b32 $0,n,0,31,0xffffffff;}"
    )
    args = [at, (there & (lane == 0)).to(gl.int32)]
    return gl.inline_asm_elementwise(text, "=r,r,r,~{memory}", args, gl.int32, is_pure=False, pack=1)
