"""Copies of TMA to shared memory, and the barriers that know when their bytes have come.

PTX for what a thread does; every tensor has one element per thread.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def begin_barriers(at, tid, COUNT: gl.constexpr):
    """Barriers of 8 bytes each, of one arrival: that of the thread which says how many bytes will come."""
    text: gl.constexpr = (
        "{.reg .pred p; setp.ne.b32 p,$2,0; @p mbarrier.init.shared::cta.b64 [$1],1;"
        "@p fence.proxy.async.shared::cta; mov.b32 $0,0;}"
    )
    args = [at + tid * 8, (tid < COUNT).to(gl.int32)]
    gl.inline_asm_elementwise(text, "=r,r,r,~{memory}", args, gl.int32, is_pure=False, pack=1)
    gl.thread_barrier()


@gluon.jit
def expect(barrier, nbytes, there):
    text: gl.constexpr = (
        "{.reg .pred p; setp.ne.b32 p,$3,0; @p mbarrier.arrive.expect_tx.shared::cta.b64 _,[$1],$2; mov.b32 $0,0;}"
    )
    args = [barrier, nbytes, there.to(gl.int32)]
    gl.inline_asm_elementwise(text, "=r,r,r,r,~{memory}", args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def fetch(to, source, nbytes, barrier, there):
    """A thread's own piece; places and sizes are multiples of 16."""
    text: gl.constexpr = (
        "{.reg .pred p; setp.eq.b32 p,$5,0; mov.b32 $0,0; @p bra SKIP;"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$1],[$2],$3,[$4]; SKIP: }"
    )
    args = [to, source, nbytes, barrier, there.to(gl.int32)]
    gl.inline_asm_elementwise(text, "=r,r,l,r,r,r,~{memory}", args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_bytes(barrier):
    text: gl.constexpr = (
        "{.reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p,[$1],0; @!p bra AGAIN; mov.b32 $0,0;}"
    )
    gl.inline_asm_elementwise(text, "=r,r,~{memory}", [barrier], gl.int32, is_pure=False, pack=1)


@gluon.jit
def count_true(there):
    """In how many lanes of the warp it holds."""
    text: gl.constexpr = "{.reg .pred p; .reg .b32 m; setp.ne.b32 p,$1,0; vote.sync.ballot.b32 m,p,0xffffffff; popc.b32 $0,m;}"
    return gl.inline_asm_elementwise(text, "=r,r", [there.to(gl.int32)], gl.int32, is_pure=False, pack=1)


@gluon.jit
def put_long(at, value, there):
    text: gl.constexpr = "{.reg .pred p; setp.ne.b32 p,$3,0; @p st.shared.b64 [$1],$2; mov.b32 $0,0;}"
    args = [at, value, there.to(gl.int32)]
    gl.inline_asm_elementwise(text, "=r,r,l,r,~{memory}", args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def long_at(at):
    return gl.inline_asm_elementwise("ld.shared.b64 $0,[$1];", "=l,r,~{memory}", [at], gl.int64, is_pure=False, pack=1)


@gluon.jit
def put_two(at, first, second, there):
    text: gl.constexpr = "{.reg .pred p; setp.ne.b32 p,$4,0; @p st.shared.v2.b32 [$1],{$2,$3}; mov.b32 $0,0;}"
    args = [at, first, second, there.to(gl.int32)]
    gl.inline_asm_elementwise(text, "=r,r,r,r,r,~{memory}", args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def put_float(at, value, there):
    text: gl.constexpr = "{.reg .pred p; setp.ne.b32 p,$3,0; @p st.shared.f32 [$1],$2; mov.b32 $0,0;}"
    args = [at, value, there.to(gl.int32)]
    gl.inline_asm_elementwise(text, "=r,r,f,r,~{memory}", args, gl.int32, is_pure=False, pack=1)
