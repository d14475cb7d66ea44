"""Look-up of 3-bit and 6-bit codes in decode attention on Hopper.

A packing unit is three words: 16 pairs of 3-bit codes or 8 pairs of 6-bit codes. Six bits at a time, two codes of 3 bits or one
of 6, are shifted into place as an address in the level table.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _words_ptx(offsets):
    """Return PTX that reads three words at each offset."""
    n = 3 * len(offsets)
    places = [(3 * i + j, o + 4 * j) for i, o in enumerate(offsets) for j in range(3)]
    return " ".join(f"ld.shared.b32 ${k}, [${n} + {at}];" for k, at in places)


@gluon.constexpr_function
def _field(name, bit, base):
    """Return PTX that moves 6 bits of the words at $base, $base + 2, $base + 4 to bits 8 to 13."""
    shift = bit - 8
    if shift < 0:
        return f"shl.b32 {name}, ${base}, {-shift};"
    word, within = divmod(shift, 32)
    low, high = f"${base + 2 * word}", f"${base + 2 * word + 2}"
    if within + 14 > 32 and word < 2:
        return f"shf.r.wrap.b32 {name}, {low}, {high}, {within};"
    return f"shr.u32 {name}, {low}, {within};"


@gluon.constexpr_function
def _unit_ptx(bits, side):
    n = 48 // bits
    text = "{.reg .b32 a, b;"
    for i in range(n):
        names = ("a",) if bits == 3 else ("a", "b")
        for k, name in enumerate(names):
            text += _field(name, 6 * (len(names) * i + k), n)
            # mask the field and merge the lane in one lop3
            text += f"lop3.b32 {name}, {name}, 0x3F00, ${n + 6}, 0xEA; add.u32 {name}, {name}, ${n + 8};"
            target = f"${i}" if bits == 3 else name
            text += f"ld.shared.b32 {target}, [{name} + {side}];"
        if bits == 6:
            text += f"prmt.b32 ${i}, a, b, 0x5410;"
    return text + "}"


@gluon.constexpr_function
def _regs(outs, ins, kind="r"):
    return f"=&{kind}," * outs + ",".join(["r"] * ins) + ",~{memory}"


@gluon.jit
def read_units(at, OFFSETS: gl.constexpr):
    """Read a lane's packing units of three words: a tuple of [warps, 32]."""
    N: gl.constexpr = 3 * len(OFFSETS)
    return gl.inline_asm_elementwise(_words_ptx(OFFSETS), _regs(N, 1), [at], (gl.int32,) * N, is_pure=False, pack=1)


@gluon.jit
def _eight(w, FIRST: gl.constexpr, STEP: gl.constexpr):
    even = gl.join(gl.join(w[FIRST], w[FIRST + 4 * STEP]), gl.join(w[FIRST + 2 * STEP], w[FIRST + 6 * STEP]))
    odd = gl.join(gl.join(w[FIRST + STEP], w[FIRST + 5 * STEP]), gl.join(w[FIRST + 3 * STEP], w[FIRST + 7 * STEP]))
    return gl.join(even, odd)


@gluon.jit
def _unit(w, FIRST: gl.constexpr, lane, table, SIDE: gl.constexpr, BITS: gl.constexpr):
    """Look up a packing unit: [warps, 32, 2, pairs]."""
    N: gl.constexpr = 48 // BITS
    a, b, c = gl.join(w[FIRST], w[FIRST]), gl.join(w[FIRST + 1], w[FIRST + 1]), gl.join(w[FIRST + 2], w[FIRST + 2])
    args = [a, b, c, lane, table]
    f = gl.inline_asm_elementwise(_unit_ptx(BITS, SIDE), _regs(N, 10), args, (gl.float16,) * N, is_pure=False, pack=2)
    found = gl.join(_eight(f, 0, 2), _eight(f, 1, 2)) if N == 16 else _eight(f, 0, 1)
    return gl.reshape(found, [a.shape[0], 32, 2, N])


@gluon.jit
def look_up_units(w, lane, table, SIDE: gl.constexpr, BITS: gl.constexpr, UNITS: gl.constexpr):
    """Look up packing units: [warps, 32 lanes, UNITS, pairs of a unit, 2]."""
    W: gl.constexpr = w[0].shape[0]
    N: gl.constexpr = 48 // BITS
    if UNITS == 2:
        found = gl.join(_unit(w, 0, lane, table, SIDE, BITS), _unit(w, 3, lane, table, SIDE, BITS))
    elif UNITS == 4:
        even = gl.join(_unit(w, 0, lane, table, SIDE, BITS), _unit(w, 6, lane, table, SIDE, BITS))
        found = gl.join(even, gl.join(_unit(w, 3, lane, table, SIDE, BITS), _unit(w, 9, lane, table, SIDE, BITS)))
    else:
        gl.static_assert(UNITS == 8)
        a = gl.join(_unit(w, 0, lane, table, SIDE, BITS), _unit(w, 12, lane, table, SIDE, BITS))
        b = gl.join(_unit(w, 6, lane, table, SIDE, BITS), _unit(w, 18, lane, table, SIDE, BITS))
        c = gl.join(_unit(w, 3, lane, table, SIDE, BITS), _unit(w, 15, lane, table, SIDE, BITS))
        d = gl.join(_unit(w, 9, lane, table, SIDE, BITS), _unit(w, 21, lane, table, SIDE, BITS))
        found = gl.join(gl.join(a, b), gl.join(c, d))
    found = gl.reshape(found, [W, 32, 2, N, UNITS])
    return gl.permute(found, [0, 1, 4, 3, 2])
