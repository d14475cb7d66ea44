"""Warp-level PTX for quads of 4-bit codes and a block's vectors, for `persistent`.

A quad is four groups of 64 codes of 16 rows, with their scales and biases; more of its PTX is in `hopper.mma_int4`. Every
tensor has one element per thread.

- Integers below 256, read as bf16 bits, are themselves times 2**-133, see `hopper.mma_int4_groups`.
- Vectors are in shared memory as operands of `mma.m16n8k16`, prepared once for all rows: an octet of them takes 17 bytes per
  input, and a block's second octet follows its first.
- A group's bias times its sum of inputs is an MMA too, of four inputs a quad. Sums of inputs are float32, so each is split
  into three bf16 terms.
- ORDERED: inputs and products are summed in the order of `slots`, bit for bit: there lane t of four has group t of a quad.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.hopper.mma import MMA
from auraflux.ops.hopper.mma_int4 import codes_at
from auraflux.ops.hopper.mma_int4_groups import OF_CODES, load_16, pair_16, scaled_sum, sums_16
from auraflux.ops.hopper.reduce import sum_four
from auraflux.ops.hopper.shared_memory import float_pair_at, put_two, word_at

W = gl.constexpr(8)  # warps of a program
TILE = gl.constexpr(2048 + 256)  # bytes of a quad: codes, then scales, then biases


def _codes_ptx(groups: int, octets: int) -> str:
    """Return PTX for products of codes.

    Out: 4 sums per group and octet. In: codes of rows g and g + 8 of each group, 8 pairs of x per group and octet.
    """
    text = "{.reg .b32 a0,a1,a2,a3,u0,v0,w0,z0,u1,v1,w1,z1; .reg .f32 o; mov.f32 o,0f00000000;"
    first = 4 * groups * octets
    for j in range(groups):
        text += f"mov.b64 {{u{j},w{j}}},${first + 2 * j}; mov.b64 {{v{j},z{j}}},${first + 2 * j + 1};"
    for step in range(4):
        for j in range(groups):
            for i, word in enumerate("uvwz"):
                text += f"shr.u32 {word}{j},{word}{j},8;" if step == 2 else ""
                text += f"and.b32 a{i},{word}{j},{hex(0xF000F << step % 2 * 4)};"
            for n in range(j * octets, (j + 1) * octets):
                c, x = ",".join(f"${4 * n + i}" for i in range(4)), first + 2 * groups + 8 * n + 2 * step
                text += f"{MMA} {{{c}}},{{a0,a1,a2,a3}},{{${x},${x + 1}}},{{{c if step else 'o,o,o,o'}}};"
    return text + "}"


# two groups of one octet, or one of two: exactly the registers that the MMAs need
CODES, CODES_REGISTERS = gl.constexpr(_codes_ptx(2, 1)), gl.constexpr("=&f," * 8 + "l," * 4 + "r," * 15 + "r")
CODES_2, CODES_2_REGISTERS = gl.constexpr(_codes_ptx(1, 2)), gl.constexpr("=&f," * 8 + "l," * 2 + "r," * 15 + "r")
BIASES = gl.constexpr(MMA + " {$0,$1,$2,$3},{$4,$5,$4,$5},{$6,$7},{$8,$9,$10,$11};")
BIASES_REGISTERS = gl.constexpr("=&f," * 4 + "r," * 4 + "f,f,f,f")


@gluon.constexpr_function
def _fetch_ptx(row_nbytes, halves):
    """Return PTX that copies 128 bytes of each of 16 rows and 8 of scales or biases; `halves`: rows 8 to 15 begin at $4."""
    text = "{.reg .pred p; setp.ne.b32 p,$7,0; mov.b32 $0,0;"
    for i in range(4):
        half, row = (i // 2, i % 2 * 4) if halves else (0, 4 * i)
        source = f"[${3 + half}+{row * row_nbytes}]"
        text += f"@p cp.async.cg.shared.global.L2::256B [${1 + i % 2}+{512 * i}],{source},16;"
    return text + "@p cp.async.ca.shared.global [$5],[$6],8;}"


@gluon.jit
def fetch_quad(to, lane, source, there, K: gl.constexpr, HALVES: gl.constexpr):
    """Copy a quad of 16 rows asynchronously; `source`: a lane's first codes, those of row 8, its first scales or biases."""
    r, chunk = lane // 8, lane % 8
    even, odd = to + r * 128 + (chunk ^ r) * 16, to + r * 128 + (chunk ^ (r + 4)) * 16
    args = [even, odd, source[0], source[1], to + 2048 + lane * 8, source[2], there.to(gl.int32)]
    text: gl.constexpr = _fetch_ptx(K // 2, HALVES)
    gl.inline_asm_elementwise(text, "=r,r,r,l,l,r,l,r,~{memory}", args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def _pack(low, high):
    text: gl.constexpr = "cvt.rn.bf16x2.f32 $0,$2,$1;"
    return gl.inline_asm_elementwise(text, "=r,f,f", [low, high], gl.int32, is_pure=True, pack=1)


@gluon.jit
def _low(word):
    return (word << 16).to(gl.float32, bitcast=True)


@gluon.jit
def _high(word):
    return (word & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def _put_four(at, words, there):
    text: gl.constexpr = "{.reg .pred p; setp.ne.b32 p,$6,0; @p st.shared.v4.b32 [$1],{$2,$3,$4,$5}; mov.b32 $0,0;}"
    args = [at, words[0], words[1], words[2], words[3], there.to(gl.int32)]
    gl.inline_asm_elementwise(text, "=r,r,r,r,r,r,r,~{memory}", args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def _eight_at(at):
    text: gl.constexpr = "ld.shared.v4.b32 {$0,$1,$2,$3},[$8]; ld.shared.v4.b32 {$4,$5,$6,$7},[$8+512];"
    registers: gl.constexpr = "=r,=r,=r,=r,=r,=r,=r,=r,r,~{memory}"
    return gl.inline_asm_elementwise(text, registers, [at], (gl.int32,) * 8, is_pure=False, pack=1)


@gluon.jit
def _two_at(at):
    text: gl.constexpr = "ld.shared.v2.b32 {$0,$1},[$2];"
    return gl.inline_asm_elementwise(text, "=r,=r,r,~{memory}", [at], (gl.int32,) * 2, is_pure=False, pack=1)


@gluon.jit
def load_inputs(x, pair, pairs, k, quad, lane, K: gl.constexpr):
    """Load a lane's part of a quad of a block's vectors.

    Values of missing pairs do not matter: columns of a product are independent.
    """
    row = x + (gl.minimum(pair, pairs - 1) // k).to(gl.int64) * K + gl.minimum(quad, K // 256 - 1) * 256 + lane % 4 * 16
    raw = ()
    for j in gl.static_range(4):
        raw += (load_16(row + j * 64),)  # type: ignore[assignment]
    return raw


@gluon.jit
def put_inputs(to, raw, quad, lane, K: gl.constexpr, ORDERED: gl.constexpr):
    """Store a quad of a block's vectors as MMA operands: 1 KB per group, and 256 bytes of sums after all quads."""
    t, there = lane % 4, quad < K // 256
    sums = ()
    for j in gl.static_range(4):
        words = raw[j]
        if ORDERED:
            # of vectors 2t and 2t + 1
            a, b = sums_16(pair_16(words))
            a, b = a.to(gl.int32, bitcast=True), b.to(gl.int32, bitcast=True)
            put_two(to + K * 16 + quad * 256 + j * 32 + t * 8, a, b, there & (lane < 4))
        total = _low(words[0]) + _high(words[0])
        for i in gl.static_range(1, 8):
            total += _low(words[i]) + _high(words[i])
        sums += (sum_four(total),)  # type: ignore[assignment]
        v, at = pair_16(words), to + quad * 4096 + j * 1024 + lane * 16
        # operands of one MMA are adjacent
        _put_four(at, (v[0], v[4], v[1], v[5]), there)
        _put_four(at + 512, (v[2], v[6], v[3], v[7]), there)
    if not ORDERED:
        # inputs 2t and 2t + 1 of the operand are groups 2 (t % 2) and the next
        a, b = gl.where(t % 2 == 0, sums[0], sums[2]), gl.where(t % 2 == 0, sums[1], sums[3])  # type: ignore[misc]
        first = _pack(a, b)
        a, b = a - _low(first), b - _high(first)
        second = _pack(a, b)
        third = _pack(a - _low(second), b - _high(second))
        put_two(to + K * 16 + quad * 256 + lane * 8, gl.where(t < 2, first, second), gl.where(t < 2, third, 0), there)


@gluon.jit
def quad_at(at, lane, ORDERED: gl.constexpr):
    """Load codes of rows g and g + 8, four groups; their scales; their biases, as an operand unless ORDERED."""
    g, t = lane // 4, lane % 4
    mine = g * 128 + ((t // 2) ^ (g % 2)) * 16 + (t % 2) * 8 + (g // 2) * 32
    words = ()
    for j in gl.static_range(4):
        words += codes_at(at + (mine ^ (32 * j)))
    lines = at + 2048 + g * 8
    if ORDERED:
        found = (words, _two_at(lines), _two_at(lines + 64), _two_at(lines + 128), _two_at(lines + 192))
    else:
        biases = lines + 128 + t % 2 * 4
        found = (words, _two_at(lines), _two_at(lines + 64), word_at(biases), word_at(biases + 64))
    return found


@gluon.jit
def add_quad(acc, total, quad, inputs, sums, K: gl.constexpr, OCTETS: gl.constexpr):
    """Add products of codes to `acc` and of biases to `total`: per octet, rows g and g + 8 at vectors 2t and 2t + 1."""
    GROUPS: gl.constexpr = 2 // OCTETS  # per inline PTX block
    text: gl.constexpr = CODES if OCTETS == 1 else CODES_2
    registers: gl.constexpr = CODES_REGISTERS if OCTETS == 1 else CODES_2_REGISTERS
    words = quad[0]
    for first in gl.static_range(0, 4, GROUPS):
        args = []
        for i in gl.static_range(2 * GROUPS):
            args += [words[2 * first + i]]
        for n in gl.static_range(GROUPS * OCTETS):
            x = _eight_at(inputs + n % OCTETS * (17 * K) + (first + n // OCTETS) * 1024)
            for i in gl.static_range(8):
                args += [x[i]]
        c = gl.inline_asm_elementwise(text, registers, args, (gl.float32,) * 8, is_pure=True, pack=1)
        for j in gl.static_range(GROUPS):
            s0 = _low(quad[1][first // 2]) if (first + j) % 2 == 0 else _high(quad[1][first // 2])
            s1 = _low(quad[2][first // 2]) if (first + j) % 2 == 0 else _high(quad[2][first // 2])
            more = ()
            for n in gl.static_range(4 * OCTETS):
                more += (gl.fma(s0 if n % 4 < 2 else s1, c[4 * OCTETS * j + n], acc[n]),)  # type: ignore[assignment]
            acc = more
    rest = ()
    for n in gl.static_range(OCTETS):
        x0, x1 = _two_at(sums + n * (17 * K))
        args = [quad[3], quad[4], x0, x1, total[4 * n], total[4 * n + 1], total[4 * n + 2], total[4 * n + 3]]
        rest += gl.inline_asm_elementwise(BIASES, BIASES_REGISTERS, args, (gl.float32,) * 4, is_pure=True, pack=1)
    return acc, rest


@gluon.jit
def _half(words, j: gl.constexpr):
    """Return the j-th of four bf16 in two words."""
    return _low(words[j // 2]) if j % 2 == 0 else _high(words[j // 2])


@gluon.jit
def four_lanes(chains):
    """Sum the four lanes' chains in the order of `slots`: rows g and g + 8 at vectors 2t and 2t + 1."""
    found = ()
    for n in gl.static_range(4):
        found += ((chains[n] + chains[8 + n]) + (chains[4 + n] + chains[12 + n]),)
    return found


@gluon.jit
def add_quad_ordered(chains, total, quad, inputs, sums, lane, CHAINED: gl.constexpr):
    """Add products of one octet in the order of `slots`: to four lane chains, or, not CHAINED, all four to `total`."""
    words = quad[0]
    terms = ()
    for first in gl.static_range(0, 4, 2):
        args = []
        for i in gl.static_range(4):
            args += [words[2 * first + i]]
        for n in gl.static_range(2):
            x = _eight_at(inputs + (first + n) * 1024)
            for i in gl.static_range(8):
                args += [x[i]]
        c = gl.inline_asm_elementwise(CODES, CODES_REGISTERS, args, (gl.float32,) * 8, is_pure=True, pack=1)
        for n in gl.static_range(8):
            found = float_pair_at(sums + (first + n // 4) * 32 + lane % 4 * 8)
            scale, bias = _half(quad[1], first + n // 4), _half(quad[3], first + n // 4)
            if n % 4 >= 2:
                scale, bias = _half(quad[2], first + n // 4), _half(quad[4], first + n // 4)
            terms += (scaled_sum(scale, bias, c[n], found[n % 2]),)  # type: ignore[assignment]
    new = ()
    if CHAINED:
        for n in gl.static_range(16):
            new += (chains[n] + terms[n],)  # type: ignore[assignment]
        chains = new
    else:
        four = four_lanes(terms)
        for n in gl.static_range(4):
            new += (total[n] + four[n],)  # type: ignore[assignment]
        total = new
    return chains, total


@gluon.jit
def both(acc, total, OCTETS: gl.constexpr):
    """Return the sum of code products and bias products."""
    found = ()
    for n in gl.static_range(4 * OCTETS):
        found += (gl.fma(acc[n], OF_CODES, total[n]),)  # type: ignore[assignment]
    return found
