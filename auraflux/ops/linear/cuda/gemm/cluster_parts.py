"""Steps of the programs of a cluster, for tens of tokens on Hopper: load tokens, exchange partial sums, store (`cluster.py`).

Every tensor has one element per thread of the cluster, and shared memory is addressed by number. Sums come in units of 16 rows
and eight tokens: lane (g, t) has tokens 2t and 2t + 1 of rows g and g + 8.
"""

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.hopper.reduce import sum_over
from auraflux.ops.hopper.shared_memory import four_floats_at, put_float, put_four_floats, put_four_words, word_at
from auraflux.ops.linear.cuda.gemm.cluster_ptx import (
    load_eight,
    load_words,
    paired,
    put_pairs,
    send,
    send_sums,
    store_words,
    unit_of,
    weighed,
)

BACK = gl.constexpr(2.0**64)  # undoes the scale of dequantized weights
AT_ONCE = gl.constexpr(8)  # loads of 16 bytes in flight per thread


@dataclass(frozen=True)
class Sizes:
    """Division of a product among programs, and layout of their shared memory in bytes.

    width, chunk     inputs in all, and of a program
    blocks           blocks of 16 rows per cluster
    tiles, tokens    tiles of eight tokens; tokens including padding
    warps, across    warps per program, and how many of them split its inputs
    programs         per cluster
    dense            whether weights are in bf16
    row, part, pitch of a row: in memory, of a program, from row to row in shared memory
    line             a row's scales of a program
    half, group      tokens: from eight inputs to the next, from 64 to the next; with dense weights half is from token to token
    tokens_at        offset of tokens
    units, mine      units per cluster, per program
    box, lengths     offsets of received sums, of sums of squares
    parts            partial sums of squares of a token in a program
    """

    width: int
    chunk: int
    blocks: int
    tiles: int
    tokens: int
    warps: int
    across: int
    programs: int
    dense: bool
    row: int
    part: int
    pitch: int
    line: int
    half: int
    group: int
    tokens_at: int
    units: int
    mine: int
    box: int
    lengths: int
    parts: int
    nbytes: int


@gluon.constexpr_function
def sizes_of(width, blocks, tiles, warps, across, programs, dense, late=False):
    """Return the sizes of a product; late: sums replace codes in shared memory after all programs have multiplied."""
    chunk, tokens, units = width // programs, 8 * tiles, blocks * tiles
    part = chunk * 2 if dense else chunk // 2
    # 16 bytes of padding avoid bank conflicts: of rows, of tokens where loaded, of inputs where stored
    pitch, line = part + 16, 0 if dense else chunk // 32
    half = 2 * chunk + 16 if dense else 16 * tokens + 16
    group = 128 if dense else 8 * half + 32
    tokens_at = 16 * blocks * (pitch + 2 * line)
    end = tokens_at + (tokens * half if dense else chunk // 64 * group)
    mine, box = max(1, units // programs), max(end, across * units * 512 if across > 1 else 0)
    if late:
        box = 0
    lengths, parts = max(end, box + mine * programs * 512), max(1, chunk // 256)
    return Sizes(
        width, chunk, blocks, tiles, tokens, warps, across, programs, dense, width * 2 if dense else width // 2, part,
        pitch, line, half, group, tokens_at, units, mine, box, lengths, parts, lengths + 4 * tokens * (parts + programs),
    )  # fmt: skip


@gluon.jit
def load_tokens(base, tid, x, normed, tokens, rank, cluster, clusters, S: gl.constexpr):
    """Load a program's inputs of all tokens to shared memory; past the end, the last token again.

    With a norm, delta, if any, is added and the norm's weight applied first. Cluster number token % clusters stores the sum.
    Returns the words of the sums.
    """
    EACH: gl.constexpr = S.chunk // 8
    STEP: gl.constexpr = 32 * S.warps // EACH
    COUNT: gl.constexpr = S.tokens // STEP
    SOME: gl.constexpr = min(AT_ONCE, COUNT)
    LANES: gl.constexpr = min(32, EACH)
    c, token = tid % EACH, tid // EACH
    k = rank * S.chunk + c * 8
    if normed.weight is not None:
        weights = load_eight(normed.weight + k)
    sums = ()
    for n in gl.static_range(COUNT):
        if n % SOME == 0:
            first, second = (), ()
            for m in gl.static_range(SOME):
                at = gl.minimum(token + (n + m) * STEP, tokens - 1) * S.width + k
                first += (load_words(x + at),)  # type: ignore[assignment]
                second += ((tid * 0,) * 4 if normed.delta is None else load_words(normed.delta + at),)  # type: ignore[assignment]
        mine = token + n * STEP
        if normed.weight is None:
            found = paired(first[n % SOME])
        else:
            found = weighed(first[n % SOME], second[n % SOME], weights, not S.dense)
            words = (found[4], found[5], found[6], found[7])
            if normed.delta is not None:
                store_words(normed.total + (mine * S.width + k), words, (mine < tokens) & (mine % clusters == cluster))
            put_float(base + S.lengths + (mine * S.parts + c // LANES) * 4, sum_over(found[8], LANES), c % LANES == 0)
            sums += (words,)  # type: ignore[assignment]
        if S.dense:
            put_four_words(base + S.tokens_at + mine * S.half + c * 16, found)
        else:
            to = base + S.tokens_at + c // 8 * S.group + c % 8 // 4 * S.half + mine * 16 + c % 4 * 4
            put_pairs(to, found, 2 * S.half)
    return sums


@gluon.jit
def _sum_programs(at, COUNT: gl.constexpr, STEP: gl.constexpr):
    a0, a1, a2, a3 = four_floats_at(at)
    for v in gl.static_range(1, COUNT):
        b0, b1, b2, b3 = four_floats_at(at + v * STEP)
        a0, a1, a2, a3 = a0 + b0, a1 + b1, a2 + b2, a3 + b3
    return a0, a1, a2, a3


@gluon.jit
def send_unit(found, base, lane, rank, unit, S: gl.constexpr):
    """Send sums to the program that reduces this unit."""
    to = base + S.box + (rank * S.mine + unit % S.mine) * 512 + lane * 16
    if S.programs > 1:
        send_sums(to, unit // S.mine, found)
    else:
        put_four_floats(to, found)


@gluon.jit
def send_partial_sums(base, warp, lane, rank, S: gl.constexpr):
    """Sum what warps with different inputs have stored at `base`, and send it on."""
    for n in gl.static_range((S.units + S.warps - 1) // S.warps):
        # with more warps than units, two send the same
        unit = (warp + n * S.warps) % S.units
        send_unit(_sum_programs(base + unit * 512 + lane * 16, S.across, S.units * 512), base, lane, rank, unit, S)


@gluon.jit
def send_squares(base, tid, rank, S: gl.constexpr):
    """Send every program the sums of squares of this one's inputs."""
    PARTS: gl.constexpr = S.parts
    STEP: gl.constexpr = 32 * S.warps // S.tokens
    found = (tid * 0).to(gl.float32)
    for v in gl.static_range(PARTS):
        found += word_at(base + S.lengths + (tid % S.tokens * PARTS + v) * 4).to(gl.float32, bitcast=True)
    to = base + (S.lengths + 4 * S.tokens * PARTS) + (rank * S.tokens + tid % S.tokens) * 4
    for n in gl.static_range((S.programs + STEP - 1) // STEP):
        other = tid // S.tokens + n * STEP
        if S.programs > 1:
            send(to, other % S.programs, found, other < S.programs)
        else:
            put_float(to, found, other < 1)


@gluon.jit
def _factor(base, token, eps, S: gl.constexpr):
    """Return the norm's factor of a token."""
    PROGRAMS: gl.constexpr = S.programs
    squares = (token * 0).to(gl.float32)
    at = base + (S.lengths + 4 * S.tokens * S.parts) + token * 4
    for v in gl.static_range(PROGRAMS):
        squares += word_at(at + v * (4 * S.tokens)).to(gl.float32, bitcast=True)
    return 1.0 / gl.sqrt(squares / S.width + eps)


@gluon.jit
def store_normed(h, sums, norm, base, tid, tokens, rank, cluster, clusters, eps, S: gl.constexpr):
    """Store a program's inputs of the normalised tokens that this cluster stores."""
    EACH: gl.constexpr = S.chunk // 8
    STEP: gl.constexpr = 32 * S.warps // EACH
    k = rank * S.chunk + tid % EACH * 8
    weights = load_eight(norm + k)
    COUNT: gl.constexpr = S.tokens // STEP
    for n in gl.static_range(COUNT):
        token = tid // EACH + n * STEP
        unit = unit_of(sums[n], _factor(base, token, eps, S), weights)
        store_words(h + (token * S.width + k), unit, (token < tokens) & (token % clusters == cluster))


@gluon.jit
def store_sums(y, base, warp, lane, rank, row0, rows, tokens, eps, NORMED: gl.constexpr, S: gl.constexpr):
    """Sum what the programs have sent of this one's units, and store it, [tokens, rows]."""
    g, t = lane // 4, lane % 4
    for n in gl.static_range((S.mine + S.warps - 1) // S.warps):
        mine = warp + n * S.warps
        c0, c1, c2, c3 = _sum_programs(base + S.box + mine % S.mine * 512 + lane * 16, S.programs, S.mine * 512)
        unit = rank * S.mine + mine
        row, token = row0 + unit // S.tiles * 16 + g, unit % S.tiles * 8 + 2 * t
        if NORMED:
            f0, f1 = _factor(base, token, eps, S), _factor(base, token + 1, eps, S)
            c0, c1, c2, c3 = c0 * f0, c1 * f1, c2 * f0, c3 * f1
        if not S.dense:
            c0, c1, c2, c3 = c0 * BACK, c1 * BACK, c2 * BACK, c3 * BACK
        there = (mine < S.mine) & (unit < S.units)
        to, first, second = y + token.to(gl.int64) * rows + row, there & (token < tokens), there & (token + 1 < tokens)
        gl.store(to, c0.to(gl.bfloat16), first & (row < rows))
        gl.store(to + rows, c1.to(gl.bfloat16), second & (row < rows))
        gl.store(to + 8, c2.to(gl.bfloat16), first & (row + 8 < rows))
        gl.store(to + (rows + 8), c3.to(gl.bfloat16), second & (row + 8 < rows))
