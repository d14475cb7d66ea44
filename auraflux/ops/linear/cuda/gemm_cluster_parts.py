"""What the programs of a cluster share out for tens of tokens on Hopper: take in a stream, add up, store (`gemm_cluster.py`).

Every tensor has one element per thread of the cluster, and shared memory is addressed by number. Sums come in units of 16 rows
and eight tokens: lane (g, t) has tokens 2t and 2t + 1 of rows g and g + 8.
"""

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.hopper.reduce import sum_over
from auraflux.ops.hopper.shared_memory import four_floats_at, put_float, put_four_floats, put_four_words, word_at
from auraflux.ops.linear.cuda.gemm_cluster_ptx import (
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

BACK = gl.constexpr(2.0**64)  # what weights made of codes are too small by
AT_ONCE = gl.constexpr(8)  # 16 bytes of the stream that a thread has asked for


@dataclass(frozen=True)
class Sizes:
    """How a product is shared out among programs, and where in their shared memory things are; in bytes there.

    width, chunk     inputs in all, and of a program
    blocks           of 16 rows, of a cluster
    tiles, tokens    of eight tokens; tokens with those that are not there
    warps, across    of a program, and how many of them share its inputs
    programs         of a cluster
    dense            whether weights are in bf16
    row, part, pitch of a row: in memory, of a program, from row to row in shared memory
    line             a row's scales of a program
    half, group      tokens: from eight inputs to the next, from 64 to the next; of dense weights half is from token to token
    tokens_at        where tokens begin
    units, mine      of a cluster, of a program
    box, lengths     where sums come in, where squares are summed
    parts            sums of squares of a token in a program
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
    """Late: sums come in where codes were, when all programs have multiplied."""
    chunk, tokens, units = width // programs, 8 * tiles, blocks * tiles
    part = chunk * 2 if dense else chunk // 2
    # 16 bytes more: eight rows lie in different banks, or tokens where they are read, or inputs where they are written
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
def take_tokens(base, tid, x, normed, tokens, rank, turn, turns, S: gl.constexpr):
    """Bring a program's inputs of all tokens to shared memory; the last token again where there are no more.

    With a norm, delta, if any, is added and all is weighed first. One in `turns` stores the sum, by token. Gives the words of
    the sums.
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
                store_words(normed.total + (mine * S.width + k), words, (mine < tokens) & (mine % turns == turn))
            put_float(base + S.lengths + (mine * S.parts + c // LANES) * 4, sum_over(found[8], LANES), c % LANES == 0)
            sums += (words,)  # type: ignore[assignment]
        if S.dense:
            put_four_words(base + S.tokens_at + mine * S.half + c * 16, found)
        else:
            to = base + S.tokens_at + c // 8 * S.group + c % 8 // 4 * S.half + mine * 16 + c % 4 * 4
            put_pairs(to, found, 2 * S.half)
    return sums


@gluon.jit
def _added(at, COUNT: gl.constexpr, STEP: gl.constexpr):
    a0, a1, a2, a3 = four_floats_at(at)
    for v in gl.static_range(1, COUNT):
        b0, b1, b2, b3 = four_floats_at(at + v * STEP)
        a0, a1, a2, a3 = a0 + b0, a1 + b1, a2 + b2, a3 + b3
    return a0, a1, a2, a3


@gluon.jit
def pass_unit(found, base, lane, rank, unit, S: gl.constexpr):
    """Leave sums with the program that adds up this unit."""
    to = base + S.box + (rank * S.mine + unit % S.mine) * 512 + lane * 16
    if S.programs > 1:
        send_sums(to, unit // S.mine, found)
    else:
        put_four_floats(to, found)


@gluon.jit
def pass_left(base, warp, lane, rank, S: gl.constexpr):
    """Add up what warps that share inputs have left at `base`, and pass it on."""
    for n in gl.static_range((S.units + S.warps - 1) // S.warps):
        # where there are more warps than units, two pass on the same
        unit = (warp + n * S.warps) % S.units
        pass_unit(_added(base + unit * 512 + lane * 16, S.across, S.units * 512), base, lane, rank, unit, S)


@gluon.jit
def pass_lengths(base, tid, rank, S: gl.constexpr):
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
    """What a token of the stream is multiplied by to be of length one."""
    PROGRAMS: gl.constexpr = S.programs
    squares = (token * 0).to(gl.float32)
    at = base + (S.lengths + 4 * S.tokens * S.parts) + token * 4
    for v in gl.static_range(PROGRAMS):
        squares += word_at(at + v * (4 * S.tokens)).to(gl.float32, bitcast=True)
    return 1.0 / gl.sqrt(squares / S.width + eps)


@gluon.jit
def store_normed(h, sums, norm, base, tid, tokens, rank, turn, turns, eps, S: gl.constexpr):
    """Store a program's inputs of the normalised stream, of the tokens whose turn it is."""
    EACH: gl.constexpr = S.chunk // 8
    STEP: gl.constexpr = 32 * S.warps // EACH
    k = rank * S.chunk + tid % EACH * 8
    weights = load_eight(norm + k)
    COUNT: gl.constexpr = S.tokens // STEP
    for n in gl.static_range(COUNT):
        token = tid // EACH + n * STEP
        unit = unit_of(sums[n], _factor(base, token, eps, S), weights)
        store_words(h + (token * S.width + k), unit, (token < tokens) & (token % turns == turn))


@gluon.jit
def store_sums(y, base, warp, lane, rank, row0, rows, tokens, eps, NORMED: gl.constexpr, S: gl.constexpr):
    """Add up what programs have left of this one's units, and store it, [tokens, rows]."""
    g, t = lane // 4, lane % 4
    for n in gl.static_range((S.mine + S.warps - 1) // S.warps):
        mine = warp + n * S.warps
        c0, c1, c2, c3 = _added(base + S.box + mine % S.mine * 512 + lane * 16, S.programs, S.mine * 512)
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
