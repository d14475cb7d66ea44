"""Loads and stores of shared memory by address: PTX of one thread; every tensor has one element per thread.

Addresses are aligned to the access size. Functions that take `there` do nothing in threads where it is false.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def word_at(at):
    """Load 32 bits as an integer."""
    return gl.inline_asm_elementwise("ld.shared.b32 $0,[$1];", "=r,r,~{memory}", [at], gl.int32, is_pure=False, pack=1)


@gluon.jit
def long_at(at):
    """Load 64 bits as an integer."""
    return gl.inline_asm_elementwise("ld.shared.b64 $0,[$1];", "=l,r,~{memory}", [at], gl.int64, is_pure=False, pack=1)


@gluon.jit
def short_at(at):
    """Load 16 bits, zero-extended."""
    text: gl.constexpr = "{.reg .b16 h; ld.shared.b16 h,[$1]; cvt.u32.u16 $0,h;}"
    return gl.inline_asm_elementwise(text, "=r,r,~{memory}", [at], gl.int32, is_pure=False, pack=1)


@gluon.jit
def half_at(at):
    """Load a bf16 and widen it to float32."""
    text: gl.constexpr = "{.reg .b16 h; .reg .b32 w; ld.shared.b16 h,[$1]; cvt.u32.u16 w,h; shl.b32 $0,w,16;}"
    return gl.inline_asm_elementwise(text, "=f,r,~{memory}", [at], gl.float32, is_pure=False, pack=1)


@gluon.jit
def float_at(at, there):
    """Load a float32; zero in threads where not `there`."""
    text: gl.constexpr = "{.reg .pred p; setp.ne.b32 p,$2,0; mov.b32 $0,0; @p ld.shared.f32 $0,[$1];}"
    return gl.inline_asm_elementwise(text, "=f,r,r,~{memory}", [at, there.to(gl.int32)], gl.float32, is_pure=False, pack=1)


@gluon.jit
def float_pair_at(at):
    """Load two float32."""
    text: gl.constexpr = "ld.shared.v2.f32 {$0,$1},[$2];"
    return gl.inline_asm_elementwise(text, "=f,=f,r,~{memory}", [at], (gl.float32,) * 2, is_pure=False, pack=1)


@gluon.jit
def four_words_at(at):
    """Load 16 bytes as four integers."""
    text: gl.constexpr = "ld.shared.v4.b32 {$0,$1,$2,$3},[$4];"
    return gl.inline_asm_elementwise(text, "=r,=r,=r,=r,r,~{memory}", [at], (gl.int32,) * 4, is_pure=False, pack=1)


@gluon.jit
def four_floats_at(at):
    """Load four float32."""
    text: gl.constexpr = "ld.shared.v4.f32 {$0,$1,$2,$3},[$4];"
    return gl.inline_asm_elementwise(text, "=f,=f,=f,=f,r,~{memory}", [at], (gl.float32,) * 4, is_pure=False, pack=1)


@gluon.jit
def put(at, value):
    """Store a float32."""
    text: gl.constexpr = "st.shared.f32 [$1],$2; mov.b32 $0,0;"
    gl.inline_asm_elementwise(text, "=r,r,f,~{memory}", [at, value], gl.int32, is_pure=False, pack=1)


@gluon.jit
def put_float(at, value, there):
    """Store a float32 where `there`."""
    text: gl.constexpr = "{.reg .pred p; setp.ne.b32 p,$3,0; @p st.shared.f32 [$1],$2; mov.b32 $0,0;}"
    args = [at, value, there.to(gl.int32)]
    gl.inline_asm_elementwise(text, "=r,r,f,r,~{memory}", args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def put_float_pair(at, first, second):
    """Store two float32."""
    text: gl.constexpr = "st.shared.v2.f32 [$1],{$2,$3}; mov.b32 $0,0;"
    gl.inline_asm_elementwise(text, "=r,r,f,f,~{memory}", [at, first, second], gl.int32, is_pure=False, pack=1)


@gluon.jit
def put_four_floats(at, v):
    """Store four float32."""
    text: gl.constexpr = "st.shared.v4.f32 [$1],{$2,$3,$4,$5}; mov.b32 $0,0;"
    args = [at, v[0], v[1], v[2], v[3]]
    gl.inline_asm_elementwise(text, "=r,r,f,f,f,f,~{memory}", args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def put_word(at, value):
    """Store 32 bits."""
    text: gl.constexpr = "st.shared.b32 [$1],$2; mov.b32 $0,0;"
    gl.inline_asm_elementwise(text, "=r,r,r,~{memory}", [at, value], gl.int32, is_pure=False, pack=1)


@gluon.jit
def put_two(at, first, second, there):
    """Store two words side by side where `there`."""
    text: gl.constexpr = "{.reg .pred p; setp.ne.b32 p,$4,0; @p st.shared.v2.b32 [$1],{$2,$3}; mov.b32 $0,0;}"
    args = [at, first, second, there.to(gl.int32)]
    gl.inline_asm_elementwise(text, "=r,r,r,r,r,~{memory}", args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def put_four_words(at, v):
    """Store four words side by side."""
    text: gl.constexpr = "st.shared.v4.b32 [$1],{$2,$3,$4,$5}; mov.b32 $0,0;"
    args = [at, v[0], v[1], v[2], v[3]]
    gl.inline_asm_elementwise(text, "=r,r,r,r,r,r,~{memory}", args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def put_long(at, value, there):
    """Store 64 bits where `there`."""
    text: gl.constexpr = "{.reg .pred p; setp.ne.b32 p,$3,0; @p st.shared.b64 [$1],$2; mov.b32 $0,0;}"
    args = [at, value, there.to(gl.int32)]
    gl.inline_asm_elementwise(text, "=r,r,l,r,~{memory}", args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def atomic_increment(at, there):
    """Add 1 to a counter where `there`, and return its previous value; zero elsewhere."""
    text: gl.constexpr = "{.reg .pred p; setp.ne.b32 p,$2,0; mov.b32 $0,0; @p atom.shared.add.u32 $0,[$1],1;}"
    return gl.inline_asm_elementwise(text, "=r,r,r,~{memory}", [at, there.to(gl.int32)], gl.int32, is_pure=False, pack=1)
