"""Table look-ups of codes and the rotation of queries in decode attention on Hopper."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

NOTHING = gl.constexpr(-1e30)  # score of a masked key, below the initial maximum


# a compact table has 32 columns of one side, or 16 of each: rows of 128 bytes, for GPUs with little shared memory
COLUMNS_OF_TWO = gl.constexpr(16)


@gluon.constexpr_function
def table_rows(compact):
    """Return the size of the level table, in 4096 bytes."""
    return 8 if compact else 16


@gluon.constexpr_function
def side_offset(compact, same):
    """Return the offset in a table row of the levels of values; keys and values of the same bits share theirs."""
    return 0 if same else 4 * COLUMNS_OF_TWO.value if compact else 128


@gluon.constexpr_function
def column_ptx(compact, same):
    """Return PTX for the offset of a lane's column in a table row; in a compact table twice that, as a byte's offset is."""
    if not compact:
        return "mov.u32 $0, %laneid; shl.b32 $0, $0, 2; // $1"
    mask = "" if same else f"and.b32 $0, $0, {COLUMNS_OF_TWO.value - 1}; "
    return f"mov.u32 $0, %laneid; {mask}shl.b32 $0, $0, 3; // $1"


@gluon.constexpr_function
def _place(name, byte, compact):
    """Return PTX for the address of a byte's row in a lane's column: table + 256 * byte + 4 * lane, or half of both."""
    half = f"shr.u32 {name}, {name}, 1; " if compact else ""
    return f"prmt.b32 {name}, $1, $3, {0x5504 + 16 * byte}; {half}add.u32 {name}, {name}, $5;"


@gluon.constexpr_function
def _pair_ptx(byte, side, compact):
    """Return PTX that looks up two levels by one byte, with the side in the load's offset."""
    return "{.reg .b32 a;" + _place("a", byte, compact) + f" ld.shared.b32 $0, [a + {side}];" + "}"


@gluon.constexpr_function
def _two_ptx(pair, side, compact):
    """Return PTX that looks up two levels by a byte each."""
    text = "{.reg .b32 a, b;"
    for name, byte in (("a", 2 * pair), ("b", 2 * pair + 1)):
        text += _place(name, byte, compact)
        text += f"ld.shared.b32 {name}, [{name} + {side}];"
    return text + "prmt.b32 $0, a, b, 0x5410;}"


@gluon.constexpr_function
def _four_ptx(byte, side):
    """Return PTX that looks up four levels by one byte: v2 loads serve half a warp at a time, so 16 columns suffice."""
    look = f"prmt.b32 a, $2, $4, {0x5504 + 16 * byte}; add.u32 a, a, $6; ld.shared.v2.b32 {{$0, $1}}, [a + {side}];"
    return "{.reg .b32 a;" + look + "}"


@gluon.constexpr_function
def _read_ptx(pieces, each, swizzled=1):
    """Return PTX that reads a lane's words in vectors of `each`, at a stride of 128 * each bytes, XOR-swizzled."""
    n, text = pieces * each, ""
    for i in range(pieces):
        regs = ", ".join(f"${i * each + j}" for j in range(each))
        regs, vector = (f"{{{regs}}}", f".v{each}") if each > 1 else (regs, "")
        if part := i % swizzled:
            text += f"xor.b32 a, ${n}, {part * 128 // swizzled}; "
        text += f"ld.shared{vector}.b32 {regs}, [{'a' if part else f'${n}'} + {i * 128 * each}]; "
    return "{.reg .b32 a; " + text + "}"


@gluon.constexpr_function
def _read_regs(count, kind):
    return f"=&{kind}," * count + "r,~{memory}"


@gluon.constexpr_function
def _butterfly_ptx(span):
    return f"shfl.sync.bfly.b32 $0, $1, {span}, 31, -1;"


@gluon.constexpr_function
def per_warp(regs, lanes, shape):
    """Return a layout of [warps, ...] in which each warp has one index of the first axis."""
    warps = [[1 << i, 0, 0] for i in range(shape[0].bit_length() - 1)]
    return gl.DistributedLinearLayout(regs, lanes, warps, [], shape)


@gluon.constexpr_function
def query_layout(warps, width, chunk):
    # a lane's channels of a query are those of its words of a key: `chunk` neighbours of every 4 * chunk
    regs = [[0, 0, 1 << i] for i in range(width.bit_length() - 1) if 1 << i not in (chunk, 2 * chunk)]
    return per_warp(regs, [[0, 0, chunk], [0, 0, 2 * chunk], [0, 1, 0], [0, 2, 0], [0, 4, 0]], [warps, 8, width])


@gluon.constexpr_function
def norm_layout(warps):
    bases = [[1 << i, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout([], [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]], bases, [], [warps, 8])


@gluon.jit
def _look(words, lane, table, PLACE: gl.constexpr, SIDE: gl.constexpr, BITS: gl.constexpr, COMPACT: gl.constexpr):
    PTX: gl.constexpr = _two_ptx(PLACE, SIDE, COMPACT) if BITS == 8 else _pair_ptx(PLACE, SIDE, COMPACT)
    twice = gl.join(words, words)  # the two results occupy these two elements
    return gl.inline_asm_elementwise(PTX, "=r,r,r,r,r,r,r", [twice, lane, table], gl.float16, is_pure=False, pack=2)


@gluon.jit
def look_up(w, lane, table, SIDE: gl.constexpr, BITS: gl.constexpr, COMPACT: gl.constexpr):
    """Look up words [W, R, C]: [W, R, C, pairs of a word, 2]."""
    W: gl.constexpr = w.shape[0]
    R: gl.constexpr = w.shape[1]
    C: gl.constexpr = w.shape[2]
    if BITS == 8:
        found = gl.join(_look(w, lane, table, 0, SIDE, 8, COMPACT), _look(w, lane, table, 1, SIDE, 8, COMPACT))
        found = gl.permute(found, [0, 1, 2, 4, 3])
    elif BITS == 4:
        found = _four_bytes(w, lane, table, SIDE, COMPACT)
    else:
        found = gl.join(_two_bytes(w, lane, table, 0, SIDE), _two_bytes(w, lane, table, 1, SIDE))  # ..., e, pair, b0, b1
        found = gl.reshape(gl.permute(found, [0, 1, 2, 6, 5, 4, 3]), [W, R, C, 8, 2])
    return found


@gluon.jit
def _four_levels(words, lane, table, BYTE: gl.constexpr, SIDE: gl.constexpr):
    args = [gl.join(words, words), lane, table]
    PTX: gl.constexpr = _four_ptx(BYTE, SIDE)
    f = gl.inline_asm_elementwise(PTX, "=r,=r,r,r,r,r,r,r", args, (gl.float16,) * 2, is_pure=False, pack=2)
    return gl.join(f[0], f[1])


@gluon.jit
def _two_bytes(w, lane, table, HALF: gl.constexpr, SIDE: gl.constexpr):
    """Look up the lower or the upper two bytes of words [..., W]: [..., 2 levels, 2 pairs, 2 bytes]."""
    return gl.join(_four_levels(w, lane, table, 2 * HALF, SIDE), _four_levels(w, lane, table, 2 * HALF + 1, SIDE))


@gluon.jit
def _four_bytes(w, lane, table, SIDE: gl.constexpr, COMPACT: gl.constexpr):
    low = gl.join(_look(w, lane, table, 0, SIDE, 4, COMPACT), _look(w, lane, table, 1, SIDE, 4, COMPACT))
    high = gl.join(_look(w, lane, table, 2, SIDE, 4, COMPACT), _look(w, lane, table, 3, SIDE, 4, COMPACT))
    found = gl.permute(gl.join(low, high), [0, 1, 2, 5, 4, 3])  # ..., b1, b0, e
    return gl.reshape(found, [w.shape[0], w.shape[1], w.shape[2], 4, 2])


@gluon.jit
def _four(a, b, c, d):
    return gl.join(gl.join(a, c), gl.join(b, d))


@gluon.jit
def _eight(w, FIRST: gl.constexpr, STEP: gl.constexpr):
    low = _four(w[FIRST], w[FIRST + 2 * STEP], w[FIRST + 4 * STEP], w[FIRST + 6 * STEP])
    high = _four(w[FIRST + STEP], w[FIRST + 3 * STEP], w[FIRST + 5 * STEP], w[FIRST + 7 * STEP])
    return gl.join(low, high)


@gluon.jit
def read(at, PIECES: gl.constexpr, EACH: gl.constexpr, ROWS: gl.constexpr, NW: gl.constexpr, SWIZZLED: gl.constexpr = 1):
    """Read a warp's words from its ring as [warps, ROWS, words of all lanes]."""
    N: gl.constexpr = PIECES * EACH
    w = gl.inline_asm_elementwise(
        _read_ptx(PIECES, EACH, SWIZZLED), _read_regs(N, "r"), [at], (gl.int32,) * N, is_pure=False, pack=1
    )
    if N == 2:
        all_words = gl.join(w[0], w[1])
    elif N == 4:
        all_words = _four(w[0], w[1], w[2], w[3])
    elif N == 8:
        all_words = _eight(w, 0, 1)
    elif N == 16:
        all_words = gl.join(_eight(w, 0, 2), _eight(w, 1, 2))
    else:
        gl.static_assert(N == 32)
        even = gl.join(_eight(w, 0, 4), _eight(w, 2, 4))
        all_words = gl.join(even, gl.join(_eight(w, 1, 4), _eight(w, 3, 4)))
    all_words = gl.permute(gl.reshape(all_words, [NW, 32, ROWS, N // ROWS]), [0, 2, 1, 3])
    return gl.reshape(all_words, [NW, ROWS, 32 * (N // ROWS)])


@gluon.jit
def read_norms(at, LAYOUT: gl.constexpr, NW: gl.constexpr):
    """Read the norms of a warp's 16 keys and of its values, [warps, 16] both."""
    w = gl.inline_asm_elementwise(_read_ptx(1, 4), _read_regs(4, "f"), [at], (gl.float32,) * 4, is_pure=False, pack=1)
    kn = gl.reshape(gl.permute(gl.join(w[0], w[1]), [0, 2, 1]), [NW, 16])
    vn = gl.reshape(gl.permute(gl.join(w[2], w[3]), [0, 2, 1]), [NW, 16])
    return gl.convert_layout(kn, LAYOUT, assert_trivial=True), gl.convert_layout(vn, LAYOUT, assert_trivial=True)


@gluon.jit
def table_words(levels, SIDE: gl.constexpr, BITS: gl.constexpr, COLUMNS: gl.constexpr, NW: gl.constexpr):
    """Load one side of the table: equal columns of words by byte; at 2 bits columns alternate between low and high half."""
    LT: gl.constexpr = gl.BlockedLayout([1, 4], [128 // COLUMNS, COLUMNS // 4], [NW, 1], [1, 0])
    byte = gl.arange(0, 256, layout=gl.SliceLayout(1, LT))
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LT))[None, :]
    if BITS == 2:
        low, high = gl.load(levels + (byte & 15) * 2 + SIDE), gl.load(levels + (byte >> 4) * 2 + SIDE)
        words = gl.where(column % 2 == 0, low[:, None], high[:, None])
    else:
        words = gl.load(levels + byte * 2 + SIDE)[:, None] + column * 0
    return words


@gluon.jit
def query_rows(live, EVEN_COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the query of each of 8 columns and the mask; EVEN_COLUMNS: up to four queries have every other column."""
    column = gl.arange(0, 8, layout=LAYOUT)
    row = column // 2 if EVEN_COLUMNS else column
    there = row < live
    if EVEN_COLUMNS:
        there &= column % 2 == 0
    return row, there


@gluon.jit
def load_queries(q, signs, live, D: gl.constexpr, NW: gl.constexpr, EVEN_COLUMNS: gl.constexpr):
    """Load 8 rows at q, of which `live` exist, times the signs of the rotation."""
    LR: gl.constexpr = gl.BlockedLayout([1, D // 32], [1, 32], [NW, 1], [1, 0])
    d = gl.arange(0, D, layout=gl.SliceLayout(0, LR))[None, :]
    row, there = query_rows(live, EVEN_COLUMNS, gl.SliceLayout(1, LR))
    return gl.load(q + row[:, None] * D + d, mask=there[:, None], other=0.0).to(gl.float32) * gl.load(signs + d)


@gluon.jit
def channel_scales(scale, D: gl.constexpr, NW: gl.constexpr):
    """Load the per-channel key scales that queries are multiplied by."""
    LR: gl.constexpr = gl.BlockedLayout([1, D // 32], [1, 32], [NW, 1], [1, 0])
    return gl.load(scale + gl.arange(0, D, layout=gl.SliceLayout(0, LR))[None, :])


@gluon.jit
def transform(x, NW: gl.constexpr):
    """Apply the Walsh-Hadamard transform, without its factor, to rows [R, D], one row per warp."""
    R: gl.constexpr = x.shape[0]
    D: gl.constexpr = x.shape[1]
    PER: gl.constexpr = D // 32
    LR: gl.constexpr = gl.BlockedLayout([1, PER], [1, 32], [NW, 1], [1, 0])
    d = gl.arange(0, D, layout=gl.SliceLayout(0, LR))[None, :]
    for i in gl.static_range(3):
        if 1 << i < PER:
            a, b = gl.split(gl.permute(gl.reshape(x, [R, D >> (i + 1), 2, 1 << i]), [0, 1, 3, 2]))
            x = gl.reshape(gl.permute(gl.join(a + b, a - b), [0, 1, 3, 2]), [R, D])
    x = gl.convert_layout(x, LR, assert_trivial=True)
    for i in gl.static_range(5):
        other = gl.inline_asm_elementwise(_butterfly_ptx(1 << i), "=r,r", [x], gl.float32, is_pure=False, pack=1)
        x = gl.where((d // (PER << i)) % 2 == 0, x, -x) + other
    return x
