"""PTX for the threads of a cluster of programs on Hopper (`cluster_parts.py`).

Every tensor has one element per thread of the cluster, and shared memory is addressed by number.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.hopper.ptx import SHARED_BASE

F32, I32 = gl.float32, gl.int32


def _split(word: str, low: str, high: str) -> str:
    return f"shl.b32 {low},{word},16; and.b32 {high},{word},0xffff0000;"


def _weighed_ptx(paired: bool) -> Any:
    """Return PTX for eight values plus addends, times a norm's weights.

    Out: 4 pairs, 4 words of the sums, the sum of their squares. In: values, addends, weights. Paired: (j, j + 4), as codes are.
    """
    text = "{.reg .f32 f<8>; mov.f32 $8,0f00000000;"
    for i in range(4):
        low, high = f"f{2 * i}", f"f{2 * i + 1}"
        # rounded once, as a stored float32 sum would be: in float32 the sum of two bf16 is exact, or equals one of them
        text += f"add.rn.bf16x2 ${4 + i},${9 + i},${13 + i};" + _split(f"${4 + i}", low, high)
        text += f"fma.rn.f32 $8,{low},{low},$8; fma.rn.f32 $8,{high},{high},$8;"
        text += f"mul.f32 {low},{low},${17 + 2 * i}; mul.f32 {high},{high},${18 + 2 * i};"
    for i in range(4):
        low, high = (f"f{i}", f"f{i + 4}") if paired else (f"f{2 * i}", f"f{2 * i + 1}")
        text += f"cvt.rn.bf16x2.f32 ${i},{high},{low};"
    return gl.constexpr(text + "}")


def _unit_ptx() -> Any:
    """Return PTX for four words times a factor and a norm's weights: $4.. words, $8 the factor, $9.. weights."""
    text = "{.reg .f32 a,b;"
    for i in range(4):
        text += _split(f"${4 + i}", "a", "b") + "mul.f32 a,a,$8; mul.f32 b,b,$8;"
        text += f"mul.f32 a,a,${9 + 2 * i}; mul.f32 b,b,${10 + 2 * i}; cvt.rn.bf16x2.f32 ${i},b,a;"
    return gl.constexpr(text + "}")


UNIT = _unit_ptx()
WEIGHED_ROW, WEIGHED_PAIRS = _weighed_ptx(False), _weighed_ptx(True)


@gluon.constexpr_function
def threads(warps, programs):
    """Return the layout with one element per thread, over all programs of a cluster."""
    return gl.BlockedLayout([1], [32], [warps], [0], [[1 << i] for i in range(programs.bit_length() - 1)])


@gluon.constexpr_function
def _bytes(programs):
    return gl.SwizzledSharedLayout(1, 1, 1, [0], [[1 << i] for i in range(programs.bit_length() - 1)])


@gluon.jit
def room(NBYTES: gl.constexpr, tid, PROGRAMS: gl.constexpr):
    """Allocate the kernel's only shared memory, at the start of the dynamic segment; the store makes Triton declare it."""
    ROWS: gl.constexpr = NBYTES // (tid.shape[0] // PROGRAMS) + 2
    memory = gl.allocate_shared_memory(gl.int8, [ROWS, tid.shape[0]], _bytes(PROGRAMS))
    memory.index(ROWS - 1).store(tid.to(gl.int8))
    return memory, gl.inline_asm_elementwise(SHARED_BASE, "=r,r", [tid], I32, is_pure=False, pack=1)


@gluon.jit
def load_words(at):
    text: gl.constexpr = "ld.global.v4.b32 {$0,$1,$2,$3},[$4];"
    return gl.inline_asm_elementwise(text, "=r,=r,=r,=r,l,~{memory}", [at.to(gl.int64)], (I32,) * 4, is_pure=False, pack=1)


@gluon.jit
def load_eight(at):
    """Load eight float32 that no kernel writes."""
    text: gl.constexpr = "ld.global.nc.v4.f32 {$0,$1,$2,$3},[$8]; ld.global.nc.v4.f32 {$4,$5,$6,$7},[$8+16];"
    REGS: gl.constexpr = "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,l,~{memory}"
    return gl.inline_asm_elementwise(text, REGS, [at.to(gl.int64)], (F32,) * 8, is_pure=False, pack=1)


@gluon.constexpr_function
def _pairs_ptx(step):
    return "".join(f"st.shared.b32 [$1+{j * step}],${2 + j};" for j in range(4)) + " mov.b32 $0,0;"


@gluon.jit
def put_pairs(at, v, STEP: gl.constexpr):
    """Store four words, STEP bytes from each other."""
    args = [at, v[0], v[1], v[2], v[3]]
    gl.inline_asm_elementwise(_pairs_ptx(STEP), "=r,r,r,r,r,r,~{memory}", args, I32, is_pure=False, pack=1)


@gluon.jit
def paired(v):
    """Return eight values as pairs (j, j + 4)."""
    text: gl.constexpr = (
        "prmt.b32 $0,$4,$6,0x5410; prmt.b32 $1,$4,$6,0x7632; prmt.b32 $2,$5,$7,0x5410; prmt.b32 $3,$5,$7,0x7632;"
    )
    args = [v[0], v[1], v[2], v[3]]
    return gl.inline_asm_elementwise(text, "=&r,=&r,=&r,=&r,r,r,r,r", args, (I32,) * 4, is_pure=True, pack=1)


@gluon.jit
def send_sums(at, rank, v):
    """Store four numbers at `at` of another program of the cluster."""
    text: gl.constexpr = (
        "{.reg .b32 a; mapa.shared::cluster.u32 a,$1,$2; st.shared::cluster.v4.f32 [a],{$3,$4,$5,$6}; mov.b32 $0,0;}"
    )
    args = [at, rank, v[0], v[1], v[2], v[3]]
    gl.inline_asm_elementwise(text, "=r,r,r,f,f,f,f,~{memory}", args, I32, is_pure=False, pack=1)


@gluon.jit
def send(at, rank, value, there):
    text: gl.constexpr = (
        "{.reg .b32 a; .reg .pred p; setp.ne.b32 p,$4,0; mapa.shared::cluster.u32 a,$1,$2;"
        "@p st.shared::cluster.f32 [a],$3; mov.b32 $0,0;}"
    )
    args = [at, rank, value, there.to(I32)]
    gl.inline_asm_elementwise(text, "=r,r,r,f,r,~{memory}", args, I32, is_pure=False, pack=1)


@gluon.jit
def store_words(at, v, there):
    text: gl.constexpr = "{.reg .pred p; setp.ne.b32 p,$6,0; @p st.global.v4.b32 [$1],{$2,$3,$4,$5}; mov.b32 $0,0;}"
    args = [at.to(gl.int64), v[0], v[1], v[2], v[3], there.to(I32)]
    gl.inline_asm_elementwise(text, "=r,l,r,r,r,r,r,~{memory}", args, I32, is_pure=False, pack=1)


@gluon.jit
def weighed(x, d, n, PAIRS: gl.constexpr):
    """Return eight values plus d times a norm's weights (4 words), the sums (4 words), the sum of their squares."""
    REGS: gl.constexpr = "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&f,r,r,r,r,r,r,r,r,f,f,f,f,f,f,f,f"
    PTX: gl.constexpr = WEIGHED_PAIRS if PAIRS else WEIGHED_ROW
    args = [x[0], x[1], x[2], x[3], d[0], d[1], d[2], d[3], n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7]]
    return gl.inline_asm_elementwise(PTX, REGS, args, (I32,) * 8 + (F32,), is_pure=True, pack=1)


@gluon.jit
def unit_of(words, factor, n):
    """Return four words times a factor and a norm's weights."""
    args = [words[0], words[1], words[2], words[3], factor, n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7]]
    REGS: gl.constexpr = "=&r,=&r,=&r,=&r,r,r,r,r,f,f,f,f,f,f,f,f,f"
    return gl.inline_asm_elementwise(UNIT, REGS, args, (I32,) * 4, is_pure=True, pack=1)
