"""PTX of `mla_products_codes`: every tensor has one element per thread.

The bits of a code, alone in half a word, are a subnormal bf16, n * 2^-133; in the upper nibble of a byte 16 times that. The
other factors are scaled up to match.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.gpu.blocks.dependent_launch import launches_early
from auraflux.ops.hopper.mma import MMA
from auraflux.ops.hopper.ptx import with_older_instructions

STEP_NBYTES = 288  # of the factors of 16 rows: 256, padded so that eight steps are stored without bank conflicts


@gluon.constexpr_function
def pitch_of(row_nbytes, step):
    """Return the row stride in shared memory, padded so that neighbouring rows are `step` bytes from each other modulo 128."""
    return row_nbytes + (step - row_nbytes) % 128


@gluon.constexpr_function
def _rows_ptx(count, pitch, stride):
    text = "mov.b32 $0,0;"
    for i in range(count):
        text += f"cp.async.cg.shared.global.L2::256B [$1+{i * pitch}],[$2+{i * stride}],16;"
    return text


@gluon.jit
def copy_rows(to, source, COUNT: gl.constexpr, PITCH: gl.constexpr, STRIDE: gl.constexpr):
    """Copy 16 bytes of each of COUNT rows asynchronously."""
    text: gl.constexpr = _rows_ptx(COUNT, PITCH, STRIDE)
    gl.inline_asm_elementwise(text, "=r,r,l,~{memory}", [to, source.to(gl.int64)], gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _halves_ptx(stride, read_only):
    load = "ld.global.nc.b16" if read_only else "ld.global.b16"
    text = "{.reg .b16 h<4>;" + "".join(f"{load} h{i},[$4+{i * stride}];" for i in range(4))
    return text + "".join(f"cvt.u32.u16 ${i},h{i};" for i in range(4)) + "}"


@gluon.jit
def four_halves(at, STRIDE: gl.constexpr, READ_ONLY: gl.constexpr):
    """Load four bf16 numbers at a stride of STRIDE bytes, as bits. READ_ONLY: no kernel writes them."""
    text: gl.constexpr = _halves_ptx(STRIDE, READ_ONLY)
    kinds: gl.constexpr = (gl.int32,) * 4
    return gl.inline_asm_elementwise(text, "=r,=r,=r,=r,l,~{memory}", [at.to(gl.int64)], kinds, is_pure=False, pack=1)


PUT_FOUR = gl.constexpr(
    "{.reg .pred p; .reg .b32 a,b; setp.ne.b32 p,$6,0; cvt.rn.bf16x2.f32 a,$3,$2; cvt.rn.bf16x2.f32 b,$5,$4;"
    "@p st.shared.v2.b32 [$1],{a,b}; mov.b32 $0,0;}"
)


@gluon.jit
def put_four(to, values, there):
    """Store four numbers as bf16 to shared memory."""
    args = [to, values[0], values[1], values[2], values[3], there.to(gl.int32)]
    gl.inline_asm_elementwise(PUT_FOUR, "=r,r,f,f,f,f,r,~{memory}", args, gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _channels_ptx(bits, steps, pitch):
    """Return PTX for rows 16s + 4e + t of the codes at $16 (row t), factors at $17; words of two rows are combined to pairs."""
    text = "{.reg .b32 u<4>,v<4>,a<4>,b<2>,p,q;" + "".join(f"mov.f32 ${i},0f00000000;" for i in range(16))
    for step in range(steps):
        for e in range(4):
            at = f"[$16+{(16 * step + 4 * e) * pitch}]"
            text += f"ld.shared.b32 u{e},{at};" if bits == 4 else f"ld.shared.v2.b32 {{u{e},v{e}}},{at};"
        text += f"ld.shared.v2.b32 {{b0,b1}},[$17+{STEP_NBYTES * step}];"
        for j in range(4):
            c = ",".join(f"${4 * j + i}" for i in range(4))
            if bits == 4:
                pick = 0x4400 + 0x1111 * j
                text += f"prmt.b32 p,u0,u1,{pick:#x}; prmt.b32 q,u2,u3,{pick:#x};"
                text += "and.b32 a0,p,0x000F000F; and.b32 a1,p,0x00F000F0; and.b32 a2,q,0x000F000F; and.b32 a3,q,0x00F000F0;"
            else:
                w = "uv"[j // 2]
                for i in range(4):
                    pick = 0x4400 + 0x1111 * (2 * (j % 2) + i % 2)
                    text += f"prmt.b32 p,{w}{i // 2 * 2},{w}{i // 2 * 2 + 1},{pick:#x}; and.b32 a{i},p,0x00FF00FF;"
            text += f"{MMA} {{{c}}},{{a0,a1,a2,a3}},{{b0,b1}},{{{c}}};"
    return text + "}"


CHANNELS_REGS = gl.constexpr("=&f," * 16 + "r,r,~{memory}")


@gluon.jit
def channel_sums(codes, factors, BITS: gl.constexpr, STEPS: gl.constexpr, PITCH: gl.constexpr):
    """Return sums over rows for channels 8g to 8g + 7 in pairs: the even one for columns 2t and 2t + 1, then the odd one."""
    text: gl.constexpr = _channels_ptx(BITS, STEPS, PITCH)
    kinds: gl.constexpr = (gl.float32,) * 16
    return gl.inline_asm_elementwise(text, CHANNELS_REGS, [codes, factors], kinds, is_pure=False, pack=1)


STORE_EIGHT = gl.constexpr(
    "{.reg .pred p; .reg .b32 r<4>; setp.ne.b32 p,$10,0;"
    + "".join(f"cvt.rn.bf16x2.f32 r{i},${3 + 2 * i},${2 + 2 * i};" for i in range(4))
    + "@p st.global.v4.b32 [$1],{r0,r1,r2,r3}; mov.b32 $0,0;}"
)


@gluon.jit
def store_eight(to, v, there):
    """Store eight adjacent numbers as bf16."""
    args = [to.to(gl.int64), v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], there.to(gl.int32)]
    gl.inline_asm_elementwise(STORE_EIGHT, "=r,l,f,f,f,f,f,f,f,f,r,~{memory}", args, gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _words_ptx(count):
    names = ",".join(f"${i}" for i in range(count))
    return f"ld.global.nc.v{count}.b32 {{{names}}},[${count}];" if count > 1 else "ld.global.nc.b32 $0,[$1];"


@gluon.jit
def words_at(at, COUNT: gl.constexpr):
    """Load COUNT words of a weight: 1, 2 or 4."""
    text: gl.constexpr = _words_ptx(COUNT)
    place = at.to(gl.int64)
    if COUNT == 1:
        found = (gl.inline_asm_elementwise(text, "=r,l,~{memory}", [place], gl.int32, is_pure=False, pack=1),)
    elif COUNT == 2:
        found = gl.inline_asm_elementwise(text, "=r,=r,l,~{memory}", [place], (gl.int32,) * 2, is_pure=False, pack=1)
    else:
        found = gl.inline_asm_elementwise(text, "=r,=r,=r,=r,l,~{memory}", [place], (gl.int32,) * 4, is_pure=False, pack=1)
    return found


SIXTEEN = gl.constexpr(
    "{.reg .pred p; setp.ne.b32 p,$9,0;"
    + "".join(f"mov.b32 ${i},0;" for i in range(8))
    + "@p ld.global.v4.b32 {$0,$1,$2,$3},[$8]; @p ld.global.v4.b32 {$4,$5,$6,$7},[$8+16];}"
)
SIXTEEN_REGS = gl.constexpr("=&r," * 8 + "l,r,~{memory}")


@gluon.jit
def sixteen_at(at, there):
    """Load 16 values of a token, two per word; zeros where masked."""
    args = [at.to(gl.int64), there.to(gl.int32)]
    return gl.inline_asm_elementwise(SIXTEEN, SIXTEEN_REGS, args, (gl.int32,) * 8, is_pure=False, pack=1)


def _total_ptx() -> Any:
    step = f"{MMA} {{$0,$1,d0,d1}},{{one,one,one,one}},"
    text = "{.reg .b32 one; .reg .f32 d0,d1,z; mov.b32 one,0x3F803F80; mov.f32 z,0f00000000;" + step + "{$2,$3},{z,z,z,z};"
    return gl.constexpr(text + "".join(f"{step}{{${2 + 2 * j},${3 + 2 * j}}},{{$0,$1,d0,d1}};" for j in (1, 2, 3)) + "}")


TOTAL, TOTAL_REGS = _total_ptx(), gl.constexpr("=&f,=&f" + ",r" * 8)
PUT_PAIR = gl.constexpr("{.reg .pred p; setp.ne.b32 p,$4,0; @p st.shared.v2.f32 [$1],{$2,$3}; mov.b32 $0,0;}")


@gluon.jit
def put_totals(to, x, there):
    """Store the sums of a group of 64 values of tokens 2t and 2t + 1 to shared memory."""
    args = [x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]]
    total = gl.inline_asm_elementwise(TOTAL, TOTAL_REGS, args, (gl.float32,) * 2, is_pure=True, pack=1)
    put = [to, total[0], total[1], there.to(gl.int32)]
    gl.inline_asm_elementwise(PUT_PAIR, "=r,r,f,f,r,~{memory}", put, gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _group_ptx(bits, pitch):
    """Return PTX for 16 rows x 64 codes at $4 (row g; row g + 8 is eight rows further); 16 values of x in $5 to $12."""
    text = "{.reg .b32 u<4>,v<4>,a<4>,b<2>,large,less; mov.b32 large,0x5F805F80; mov.b32 less,0x5D805D80;"
    text += "".join(f"mov.f32 ${i},0f00000000;" for i in range(4))
    width = 2 if bits == 4 else 4
    for r, offset in (("u", 0), ("v", 8 * pitch)):
        text += f"ld.shared.v{width}.b32 {{{','.join(f'{r}{k}' for k in range(width))}}},[$4+{offset}];"
    for j in range(4):
        # in a word of 4-bit codes n and n + 4 are a pair, of 8-bit codes n and n + 2
        word, odd = (0, j // 2) if bits == 4 else (j // 2 * 2, j % 2)
        mask, size = ("0x00FF00FF", "large") if bits == 8 else (("0x000F000F", "large"), ("0x00F000F0", "less"))[j % 2]
        if odd and (bits == 8 or j == 2):
            text += "".join(f"shr.u32 {r}{k},{r}{k},8;" for k in (word, word + 1) for r in "uv")
        for a, r in enumerate((f"u{word}", f"v{word}", f"u{word + 1}", f"v{word + 1}")):
            text += f"and.b32 a{a},{r},{mask};"
        for i in range(2):
            first, other = (5 + 4 * i + j // 2, 2) if bits == 4 else (5 + 2 * (word + i), 1)
            halves = ("0x5410", "0x7632")[j % 2]
            text += f"prmt.b32 b{i},${first},${first + other},{halves}; mul.rn.bf16x2 b{i},b{i},{size};"
        text += f"{MMA} {{$0,$1,$2,$3}},{{a0,a1,a2,a3}},{{b0,b1}},{{$0,$1,$2,$3}};"
    return text + "}"


GROUP_REGS = gl.constexpr("=&f,=&f,=&f,=&f,r" + ",r" * 8 + ",~{memory}")


@gluon.jit
def group_products(codes, x, BITS: gl.constexpr, PITCH: gl.constexpr):
    """Return rows g and g + 8 times a group of tokens 2t and 2t + 1."""
    text: gl.constexpr = with_older_instructions(_group_ptx(BITS, PITCH), launches_early())
    args = [codes, x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]]
    return gl.inline_asm_elementwise(text, GROUP_REGS, args, (gl.float32,) * 4, is_pure=False, pack=1)
