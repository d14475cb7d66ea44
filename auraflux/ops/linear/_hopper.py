"""Four-bit affine products for few tokens on Hopper: Gluon, with PTX for what a thread does.

y[m, n] = Σ_k x[m, k] (code[n, k] scale[n, k/64] + bias[n, k/64]); codes eight to a word, low nibble first. Every tensor below
has one element per thread.

- A warp multiplies 16 rows by 64 codes, one group, with four `mma.m16n8k16`. Step j takes nibbles j and j + 4 of each word:
  `(word >> 4j) & 0x000F000F | 0x43004300` is a bf16 pair 128 + code, and x is paired (j, j + 4) to match.
- The accumulator starts at -128 Σ x (an mma with ones puts Σ x in the right lanes), so it ends at Σ code x.
- One token needs one column of eight, so `matvec` gives column c the x of group c: eight groups share their x registers.
- Warps split K and never wait for each other: each fills its own ring in shared memory by `cp.async`, 16-byte chunks
  xor-swizzled by row against bank conflicts.
- Weights are requested before `griddepcontrol.wait`, x after it: the gap between launches disappears behind the kernel before.
"""

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops._triton import INTERPRETED, capability
from auraflux.quant import QTensor

MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
CHUNK = 16  # tokens of a launch
MOST_CHUNKS = 4  # at 64 tokens, four launches take 68 µs on an H200, a weight of 8192 x 8192 written out 103
WIDEST = 16384  # inputs of one token that its threads hold
WARPS = 8
SHARED_NBYTES = 227 << 10  # of a program
HOPPER = (9, 0)


def _group_ptx(tiles: int) -> Any:
    """16 rows x 64 codes. Out: 4 sums a tile of 8 tokens. In: codes of rows g and g + 8, 8 pairs of x and 2 starts a tile."""
    w = 4 * tiles
    text = f"{{.reg .b32 u0,u1,v0,v1,a0,a1,a2,a3; mov.b64 {{u0,u1}},${w}; mov.b64 {{v0,v1}},${w + 1};"
    for j in range(4):
        for a, r in (("a0", "u0"), ("a1", "v0"), ("a2", "u1"), ("a3", "v1")):
            text += (f"shr.u32 {r},{r},4;" if j else "") + f"lop3.b32 {a},{r},0x000F000F,0x43004300,0xEA;"
        for m in range(tiles):
            c, x, n = ",".join(f"${4 * m + i}" for i in range(4)), w + 2 + 8 * m + j, w + 2 + 8 * tiles + 2 * m
            start = c if j else f"${n},${n + 1},${n},${n + 1}"
            text += f"{MMA} {{{c}}},{{a0,a1,a2,a3}},{{${x},${x + 4}}},{{{start}}};"
    return gl.constexpr(text + "}")


def _x_ptx(load: str) -> Any:
    """Two 16-byte loads of x, as pairs (j, j + 4) of each eight."""
    text = f"{{.reg .b32 r<8>; {load}.v4.b32 {{r0,r1,r2,r3}},[$8]; {load}.v4.b32 {{r4,r5,r6,r7}},[$9];"
    for i, a in enumerate((0, 1, 4, 5)):
        text += f"prmt.b32 ${2 * i},r{a},r{a + 2},0x5410; prmt.b32 ${2 * i + 1},r{a},r{a + 2},0x7632;"
    return gl.constexpr(text + "}")


def _copy_ptx(how: str, size: int) -> Any:
    copy = f"@p cp.async.{how}.shared.global [$1],[$2],{size};"
    return gl.constexpr(f"{{.reg .pred p; setp.ne.b32 p,$3,0; {copy} mov.b32 $0,0;}}")


def _sum_ptx() -> Any:
    step = f"{MMA} {{$0,$1,d0,d1}},{{one,one,one,one}},"
    text = "{.reg .b32 one; .reg .f32 z,d0,d1; mov.b32 one,0x3F803F80; mov.f32 z,0f00000000;" + step + "{$2,$6},{z,z,z,z};"
    return gl.constexpr(text + "".join(f"{step}{{${2 + j},${6 + j}}},{{$0,$1,d0,d1}};" for j in (1, 2, 3)) + "}")


def _registers(tiles: int) -> Any:
    return gl.constexpr("=&f," * 4 * tiles + "l,l," + "r," * 8 * tiles + "f," * (2 * tiles - 1) + "f")


GROUP8, GROUP16, REGS8, REGS16 = _group_ptx(1), _group_ptx(2), _registers(1), _registers(2)
X_GLOBAL, X_SHARED, SUM_X = _x_ptx("ld.global"), _x_ptx("ld.shared"), _sum_ptx()
COPY8, COPY16 = _copy_ptx("ca", 8), _copy_ptx("cg", 16)
COMMIT = gl.constexpr("cp.async.commit_group; mov.b32 $0,0; // $1")
SYNC = gl.constexpr("bar.warp.sync 0xffffffff; mov.b32 $0,0; // $1")
# after this x may be read; the next kernel may start at once, since all it reads early is weights
AWAIT = gl.constexpr("griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0,0; // $1")


@gluon.constexpr_function
def _codes_ptx(row_nbytes, rows):
    """128 bytes of each row; a lane copies 16 bytes of rows r, r + 4, r + 8 ... ($1: to even fours, $2: to odd fours)."""
    text = "{.reg .pred p; setp.ne.b32 p,$4,0; mov.b32 $0,0;"
    for i in range(rows // 4):
        text += f"@p cp.async.cg.shared.global.L2::256B [${1 + i % 2}+{512 * i}],[$3+{4 * i * row_nbytes}],16;"
    return text + "}"


@gluon.constexpr_function
def _wait_ptx(pending):
    return f"cp.async.wait_group {pending}; bar.warp.sync 0xffffffff; mov.b32 $0,0; // $1"


@gluon.jit
def _run(PTX: gl.constexpr, lane):
    gl.inline_asm_elementwise(PTX, "=r,r,~{memory}", [lane], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _copy(PTX: gl.constexpr, to, source, there):
    args = [to, source.to(gl.int64), there.to(gl.int32)]
    gl.inline_asm_elementwise(PTX, "=r,r,l,r,~{memory}", args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def _copy_codes(slot, lane, source, there, K: gl.constexpr, ROWS: gl.constexpr):
    r, chunk = lane // 8, lane % 8
    even, odd = slot + r * 128 + (chunk ^ r) * 16, slot + r * 128 + (chunk ^ (r + 4)) * 16
    args = [even, odd, (source + r * (K // 2) + chunk * 16).to(gl.int64), there.to(gl.int32)]
    gl.inline_asm_elementwise(_codes_ptx(K // 2, ROWS), "=r,r,r,l,r,~{memory}", args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def _codes_at(at):
    """Rows g and g + 8 of one group, 16 codes each."""
    text: gl.constexpr = "ld.shared.b64 $0,[$2]; ld.shared.b64 $1,[$2+1024];"
    return gl.inline_asm_elementwise(text, "=l,=l,r,~{memory}", [at], (gl.int64,) * 2, is_pure=False, pack=1)


@gluon.jit
def _four_at(at):
    return gl.inline_asm_elementwise("ld.shared.b64 $0,[$1];", "=l,r,~{memory}", [at], gl.int64, is_pure=False, pack=1)


@gluon.jit
def _word(at):
    return gl.inline_asm_elementwise("ld.shared.b32 $0,[$1];", "=r,r,~{memory}", [at], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _put(at, value):
    text: gl.constexpr = "st.shared.f32 [$1],$2; mov.b32 $0,0;"
    gl.inline_asm_elementwise(text, "=r,r,f,~{memory}", [at, value], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _load_x(PTX: gl.constexpr, REGS: gl.constexpr, first, second):
    return gl.inline_asm_elementwise(PTX, REGS, [first, second], (gl.int32,) * 8, is_pure=False, pack=1)


@gluon.jit
def _sum_x(x):
    args = [x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]]
    return gl.inline_asm_elementwise(SUM_X, "=&f,=&f,r,r,r,r,r,r,r,r", args, (gl.float32,) * 2, is_pure=True, pack=1)


@gluon.jit
def _group(w, x, X, TILES: gl.constexpr):
    """Σ code x of one group: rows g and g + 8, tokens 2t and 2t + 1 (and those plus 8 when TILES is 2)."""
    if TILES == 1:
        args = [w[0], w[1], x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], X[0] * -128.0, X[1] * -128.0]
        sums = gl.inline_asm_elementwise(GROUP8, REGS8, args, (gl.float32,) * 4, is_pure=True, pack=1)
    else:
        args = [
            w[0], w[1], x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8], x[9], x[10], x[11], x[12], x[13], x[14], x[15],
            X[0] * -128.0, X[1] * -128.0, X[2] * -128.0, X[3] * -128.0,
        ]  # fmt: skip
        sums = gl.inline_asm_elementwise(GROUP16, REGS16, args, (gl.float32,) * 8, is_pure=True, pack=1)
    return sums


@gluon.jit
def _bf16_at(value, j: gl.constexpr):
    return ((value >> (16 * j)).to(gl.int32) << 16).to(gl.float32, bitcast=True)


@gluon.jit
def _shared(NBYTES: gl.constexpr, tid):
    """The kernel's only shared allocation, so it begins where the dynamic segment does; the store makes Triton declare it."""
    memory = gl.allocate_shared_memory(gl.int8, [NBYTES // 1024 + 2, 1024], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    memory.index(NBYTES // 1024 + 1).slice(0, tid.shape[0]).store(tid.to(gl.int8))
    text: gl.constexpr = "mov.u32 $0,global_smem; // $1"
    return memory, gl.inline_asm_elementwise(text, "=r,r", [tid], gl.int32, is_pure=False, pack=1)


@gluon.jit
def matvec(x, w, s, b, y, K: gl.constexpr, W: gl.constexpr, D: gl.constexpr):
    """One token, 16 rows a program. Warp v takes runs v, v + W, ... of eight groups; D half runs of codes are in flight."""
    RUNS: gl.constexpr = K // 512
    MINE: gl.constexpr = (RUNS + W - 1) // W
    PITCH: gl.constexpr = 16 * MINE
    PER: gl.constexpr = D * 2048 + 32 * PITCH
    tid = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    warp, lane = tid // 32, tid % 32
    g, t = lane // 4, lane % 4
    row0 = gl.program_id(0).to(gl.int64) * 16
    memory, ring = _shared(PER * W, tid)
    base = ring + warp * PER
    scales = base + D * 2048
    source = w + row0 * (K // 2) + warp * 256
    for d in gl.static_range(D):
        _copy_codes(base + d * 2048, lane, source + (d // 2 * W * 256 + d % 2 * 128), warp + d // 2 * W < RUNS, K, 16)
        if d == 0:
            for k in gl.static_range(MINE):
                e = lane + 32 * k
                quad = (warp + e % (2 * MINE) // 2 * W) * 2 + e % 2
                at = (row0 + e // (2 * MINE)) * (2 * RUNS) + quad
                _copy(COPY8, scales + e * 8, s + at, quad < 2 * RUNS)
                _copy(COPY8, scales + 16 * PITCH + e * 8, b + at, quad < 2 * RUNS)
        _run(COMMIT, lane)
    _run(AWAIT, lane)
    xs = ()
    for i in gl.static_range(MINE):
        x_at = (x + gl.minimum(warp + i * W, RUNS - 1) * 512 + g * 64 + t * 16).to(gl.int64)
        xs += (_load_x(X_GLOBAL, "=r,=r,=r,=r,=r,=r,=r,=r,l,l", x_at, x_at + 16),)  # type: ignore[assignment]
    total0 = (tid * 0).to(gl.float32)
    total1 = total0
    mine = g * 128 + ((t // 2) ^ (g % 2)) * 16 + (t % 2) * 8 + (g // 2) * 32
    for i in gl.static_range(MINE):
        X = _sum_x(xs[i])
        r0, r1, r2, r3 = X[0], X[0], X[0], X[0]
        for h in gl.static_range(2):
            slot = base + (2 * i + h) % D * 2048
            _run(_wait_ptx(D - 1), lane)
            ws = ()
            for j in gl.static_range(4):
                ws += (_codes_at(slot + (mine ^ (32 * j))),)  # type: ignore[assignment]
            if 2 * i + h + D < 2 * MINE:
                _run(SYNC, lane)
                ahead = (2 * i + h + D) // 2
                _copy_codes(slot, lane, source + (ahead * W * 256 + (h + D) % 2 * 128), warp + ahead * W < RUNS, K, 16)
            _run(COMMIT, lane)
            for j in gl.static_range(4):
                c = _group(ws[j], xs[i], X, 1)
                keep = t == 2 * h + j // 2
                if j % 2 == 0:
                    r0, r2 = gl.where(keep, c[0], r0), gl.where(keep, c[2], r2)
                else:
                    r1, r3 = gl.where(keep, c[1], r1), gl.where(keep, c[3], r3)
        at = scales + g * PITCH + i * 16 + t * 4
        s0, s1, b0, b1 = _word(at), _word(at + 8 * PITCH), _word(at + 16 * PITCH), _word(at + 24 * PITCH)
        live = warp + i * W < RUNS
        sum0 = _bf16_at(s0, 0) * r0 + _bf16_at(s0, 1) * r1 + _bf16_at(b0, 0) * X[0] + _bf16_at(b0, 1) * X[1]
        sum1 = _bf16_at(s1, 0) * r2 + _bf16_at(s1, 1) * r3 + _bf16_at(b1, 0) * X[0] + _bf16_at(b1, 1) * X[1]
        total0 += gl.where(live, sum0, 0.0)
        total1 += gl.where(live, sum1, 0.0)
    gl.thread_barrier()
    _put(ring + warp * 256 + lane * 4, total0)
    _put(ring + warp * 256 + lane * 4 + 128, total1)
    gl.thread_barrier()
    out = (tid * 0).to(gl.float32)
    for k in gl.static_range(4 * W):
        out += _word(ring + k // 4 * 256 + tid % 16 * 16 + k % 4 * 4).to(gl.float32, bitcast=True)
    gl.store(y + row0 + tid, out.to(gl.bfloat16), tid < 16)
    memory._keep_alive()


@gluon.jit
def _copy_x(slot, lane, source, there, M, K: gl.constexpr, TILES: gl.constexpr):
    """256 values of x of each token, 16-byte chunks swizzled by token."""
    for token in gl.static_range(8 * TILES):
        _copy(COPY16, slot + token * 512 + ((lane ^ (token % 8)) * 16), source + lane * 8 + token * K, there & (token < M))


@gluon.jit
def matmul16(x, w, s, b, y, M, N, K: gl.constexpr, R: gl.constexpr, TILES: gl.constexpr, W: gl.constexpr, D: gl.constexpr):
    """Up to 8 TILES tokens, 16R rows a program. Warp v takes quads v, v + W, ... of four groups; a slot holds codes and x."""
    QUADS: gl.constexpr = K // 256
    MINE: gl.constexpr = (QUADS + W - 1) // W
    CODES: gl.constexpr = 2048 * R
    SLOT: gl.constexpr = CODES + 4096 * TILES
    SUMS: gl.constexpr = 4 * R * TILES
    BIASES: gl.constexpr = 128 * R * MINE
    PER: gl.constexpr = D * SLOT + 2 * BIASES
    tid = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    warp, lane = tid // 32, tid % 32
    g, t = lane // 4, lane % 4
    row0 = gl.program_id(0).to(gl.int64) * (16 * R)
    memory, ring = _shared(PER * W, tid)
    base = ring + warp * PER
    scales = base + D * SLOT
    source = w + row0 * (K // 2)
    for d in gl.static_range(D):
        _copy_codes(base + d * SLOT, lane, source + (warp + d * W) * 128, warp + d * W < QUADS, K, 16 * R)
    for n in gl.static_range((16 * R * MINE + 31) // 32):
        e = lane + 32 * n
        quad = warp + e % MINE * W
        there = (e < 16 * R * MINE) & (quad < QUADS)
        _copy(COPY8, scales + e * 8, s + (row0 + e // MINE) * QUADS + quad, there)
        _copy(COPY8, scales + BIASES + e * 8, b + (row0 + e // MINE) * QUADS + quad, there)
    _run(AWAIT, lane)
    for d in gl.static_range(D):
        _copy_x(base + d * SLOT + CODES, lane, x + (warp + d * W) * 256, warp + d * W < QUADS, M, K, TILES)
        _run(COMMIT, lane)
    acc = ((tid * 0).to(gl.float32),) * SUMS
    mine, x_mine = g * 128 + ((t // 2) ^ (g % 2)) * 16 + (t % 2) * 8 + (g // 2) * 32, g * 512 + ((2 * t) ^ g) * 16
    slot = base
    for i in range(MINE):
        q = warp + i * W
        _run(_wait_ptx(D - 1), lane)
        ss = ()
        bs = ()
        for r in gl.static_range(2 * R):
            at = scales + ((g + 8 * r) * MINE + i) * 8
            ss += (_four_at(at),)  # type: ignore[assignment]
            bs += (_four_at(at + BIASES),)  # type: ignore[assignment]
        for j in gl.static_range(4):
            xs = ()
            X = ()
            new = ()
            for m in gl.static_range(TILES):
                tile = slot + (CODES + m * 4096 + j * 128)
                xm = _load_x(X_SHARED, "=r,=r,=r,=r,=r,=r,=r,=r,r,r", tile + x_mine, tile + (x_mine ^ 16))
                xs, X = xs + xm, X + _sum_x(xm)
            for r in gl.static_range(R):
                c = _group(_codes_at(slot + r * 2048 + (mine ^ (32 * j))), xs, X, TILES)
                for k in gl.static_range(4 * TILES):
                    a = acc[r * 4 * TILES + k] + _bf16_at(ss[2 * r + k // 2 % 2], j) * c[k]
                    a += _bf16_at(bs[2 * r + k // 2 % 2], j) * X[k // 4 * 2 + k % 2]
                    new += (gl.where(q < QUADS, a, acc[r * 4 * TILES + k]) if QUADS % W else a,)  # type: ignore[assignment]
            acc = new
        _run(SYNC, lane)
        _copy_codes(slot, lane, source + (q + D * W) * 128, q + D * W < QUADS, K, 16 * R)
        _copy_x(slot + CODES, lane, x + (q + D * W) * 256, q + D * W < QUADS, M, K, TILES)
        _run(COMMIT, lane)
        slot = gl.where(slot == base + (D - 1) * SLOT, base, slot + SLOT)
    gl.thread_barrier()
    for k in gl.static_range(SUMS):
        _put(ring + (warp * SUMS + k) * 128 + lane * 4, acc[k])
    gl.thread_barrier()
    for p in gl.static_range((SUMS + W - 1) // W):
        k2 = warp + p * W
        out = (tid * 0).to(gl.float32)
        for v2 in gl.static_range(W):
            out += _word(ring + (v2 * SUMS + k2 % SUMS) * 128 + lane * 4).to(gl.float32, bitcast=True)
        row, token2 = row0 + k2 // (4 * TILES) * 16 + g + k2 % 4 // 2 * 8, k2 // 4 % TILES * 8 + 2 * t + k2 % 2
        gl.store(y + token2 * N + row, out.to(gl.bfloat16), (token2 < M) & (k2 < SUMS))
    memory._keep_alive()


def _plan(tokens: int, rows: int, width: int) -> tuple[int, int, int | None] | None:
    """Blocks of rows a program, slots of a ring, a cap on registers; None where a shape does not go."""
    if tokens == 1:
        # 128 registers: four programs of four warps on each multiprocessor
        deep, cap = (3, 128) if width <= 8192 else (2, None)
        return (1, deep, cap) if rows % 16 == 0 and width % 512 == 0 and width <= WIDEST else None
    if rows % 64 or width % 256:
        return None
    if rows >= 8192 and tokens <= 8 and width <= 8192:
        # two programs on each multiprocessor
        return 2, 1, 128
    block = 4 if rows >= 8192 else 2 if rows >= 4096 else 1
    deep = 2 if width > 2048 and rows < 8192 else 1
    tiles, mine = 1 if tokens <= 8 else 2, -(-width // 256 // WARPS)
    while WARPS * (deep * (2048 * block + 4096 * tiles) + 256 * block * mine) + 2048 > SHARED_NBYTES:
        if (block, deep) == (1, 1):
            return None
        block, deep = (block, 1) if deep == 2 else (block // 2, 1)
    return block, deep, None


def fits_hopper(x: Tensor, weight: QTensor) -> bool:
    """Whether the kernels here serve a product: 4 bits in groups of 64, all in bf16, whole runs of groups and of rows."""
    return (
        not INTERPRETED
        and x.shape[0] <= MOST_CHUNKS * CHUNK
        and weight.format == (4, 64, 1, torch.bfloat16)
        and x.dtype is torch.bfloat16
        and capability(x.device) == HOPPER
        and not (x.data_ptr() | weight.packed.data_ptr() | weight.scales.data_ptr()) % 16
        and _plan(min(x.shape[0], CHUNK), *weight.shape) is not None
        # the rest of the last chunk may be a single token
        and (x.shape[0] % CHUNK != 1 or _plan(1, *weight.shape) is not None)
    )


def multiply_hopper(x: Tensor, weight: QTensor, out: Tensor) -> None:
    """Tokens times a weight, into bf16 [T, N]."""
    for first in range(0, x.shape[0], CHUNK):
        _multiply_chunk(x[first : first + CHUNK], weight, out[first : first + CHUNK])


def _multiply_chunk(x: Tensor, weight: QTensor, out: Tensor) -> None:
    tokens, (rows, width) = x.shape[0], weight.shape
    scales, biases, plan = weight.scales, weight.biases, _plan(tokens, rows, width)
    assert biases is not None
    assert plan is not None
    block, deep, cap = plan
    args = x, weight.packed.view(torch.int8), scales.view(torch.int64), biases.view(torch.int64), out
    grid = (rows // (16 * block),)
    if tokens == 1:
        matvec[grid](*args, width, 4, deep, num_warps=4, maxnreg=cap, launch_pdl=True)
    else:
        sizes = tokens, rows, width, block, 1 if tokens <= 8 else 2, WARPS, deep
        matmul16[grid](*args, *sizes, num_warps=WARPS, maxnreg=cap, launch_pdl=True)
