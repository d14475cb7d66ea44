"""Latents that are kept as they are beside codes on CUDA: storing them, and a query's share of them.

Latents are kept rotated, as codes stand for them; their rotated keys are those beside the codes. What a query finds among them
is one more share of its results, which the merge joins with those of the codes.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.hopper.pages import Index, index_of, place_of, position_of
from auraflux.ops.hopper.sizes import power_of_two
from auraflux.ops.hopper.softmax import LOG2E
from auraflux.ops.turboquant.cuda.hadamard import hadamard
from auraflux.ops.turboquant.pages import LatentCodes


class KeptLatents(NamedTuple):
    """Pages of the first positions' latents, and of recent ones. Where one of the two is not kept, they are the other's."""

    head: Tensor
    head_table: Tensor
    head_width: int
    head_pool: int
    rows: Tensor
    table: Tensor
    width: int
    pool: int


class Beside(NamedTuple):
    """What lies beside the codes of latents: rotated keys, and latents that are kept as they are, if any."""

    rope: Tensor
    kept: KeptLatents | None


class KeptShape(NamedTuple):
    """How many first and newest positions are kept as they are, and tokens of a page of each; all 0 where none are."""

    first: int
    newest: int
    head_page: int
    page: int


MOST_KEPT = 128  # positions, which one program goes over for each head
NOTHING_KEPT = KeptShape(0, 0, 1, 1)


def kept_latents(pages: LatentCodes) -> KeptLatents | None:
    plain = pages.plain
    if plain is None or (one := plain.head or plain.recent) is None:
        return None
    head, recent = plain.head or one, plain.recent or one
    heads = head.rows, head.table, head.table.shape[1], head.pool[0]
    return KeptLatents(*heads, recent.rows, recent.table, recent.table.shape[1], recent.pool[0])


def kept_shape(pages: LatentCodes) -> KeptShape:
    plain = pages.plain
    if plain is None:
        return NOTHING_KEPT
    head, recent = (1 if each is None else each.pool[1] for each in (plain.head, plain.recent))
    return KeptShape(plain.first, plain.newest, head, recent)


class Asking(NamedTuple):
    """What queries need to attend to kept latents: themselves, both parts, and where all lies."""

    q: Tensor
    q_rope: Tensor
    kept: KeptLatents
    rope: Tensor
    step: Index
    heads: int
    scale: float


class AskingShape(NamedTuple):
    """What that is compiled for: tokens in a page of codes, channels of a rotated key, sequences.

    newest, first  positions at a time
    """

    page: int
    rope: int
    sequences: int
    newest: int
    first: int


class Question(NamedTuple):
    """All that the share of kept latents takes; None, and what does not matter, where none are kept."""

    who: Asking | None
    shape: AskingShape
    kept: KeptShape


def asking(q: Tensor, q_rope: Tensor, pages: LatentCodes, starts: Tensor, scale: float, most: int) -> Question:
    """Give what the share of kept latents takes; registers hold those of `most` positions at a time."""
    kept, shape = kept_latents(pages), kept_shape(pages)
    if kept is None:
        return NO_QUESTION
    at_once = (min(most, power_of_two(max(1, count))) for count in (shape.newest, shape.first))
    sizes = pages.pool[1], pages.rope.shape[2], power_of_two(pages.table.shape[0])
    who = Asking(q, q_rope, kept, pages.rope, index_of(pages, starts), q.shape[1], scale * LOG2E.value)
    return Question(who, AskingShape(*sizes, *at_once), shape)


NO_QUESTION = Question(None, AskingShape(1, 1, 1, 1, 1), NOTHING_KEPT)


@triton.jit
def share_of_kept(asking, signs, line, D: tl.constexpr, SHAPE: tl.constexpr, KEPT: tl.constexpr):
    """Rotate the query of one token and head, and attend from it to what is kept: see `kept_share`; and the query [1, D]."""
    d, r = tl.arange(0, D)[None, :], tl.arange(0, SHAPE.rope)[None, :]
    sequence, position = position_of((line // asking.heads).to(tl.int32), asking.step, SHAPE.sequences)
    x = hadamard(tl.load(asking.q + line * D + d).to(tl.float32) * tl.load(signs + d), D)
    q_rope = tl.load(asking.q_rope + line * SHAPE.rope + r).to(tl.float32)
    found = kept_share(
        x, q_rope, asking.kept, asking.rope, asking.step, sequence, position, asking.scale, D, SHAPE.rope, KEPT,
        SHAPE.page, SHAPE.newest, SHAPE.first,
    )  # fmt: skip
    return found[0], found[1], found[2], x


@triton.jit
def store_latent(x, kept, sequence, position, D: tl.constexpr, P: tl.constexpr, KEPT: tl.constexpr):
    """Keep a rotated latent [1, P] among the newest, and among the first if it is one of them."""
    d = tl.arange(0, P)[None, :]
    if KEPT.newest:
        page, slot = place_of(kept.table, sequence, position, kept.width, kept.pool, KEPT.page)
        at = kept.rows + (page * KEPT.page + slot) * D + d
        tl.store(at, x.to(kept.rows.dtype.element_ty), mask=(d < D) & (page >= 0))
    if KEPT.first:  # noqa: SIM102
        if position < KEPT.first:
            page, slot = place_of(kept.head_table, sequence, position, kept.head_width, kept.head_pool, KEPT.head_page)
            at = kept.head + (page * KEPT.head_page + slot) * D + d
            tl.store(at, x.to(kept.head.dtype.element_ty), mask=(d < D) & (page >= 0))


@triton.jit
def place_kept(kept, sequence, position, wanted, FIRST: tl.constexpr, KEPT: tl.constexpr):
    """Find the rows of positions among the first ones or, unless FIRST, the newest: base, rows, and which of them are there."""
    if FIRST:
        page, slot = place_of(kept.head_table, sequence, position, kept.head_width, kept.head_pool, KEPT.head_page)
        row, base = page * KEPT.head_page + slot, kept.head
    else:
        page, slot = place_of(kept.table, sequence, position, kept.width, kept.pool, KEPT.page)
        row, base = page * KEPT.page + slot, kept.rows
    return base, row, wanted & (page >= 0)


@triton.jit
def _take(
    x, q_rope, m, l, acc, kept, rope, index, sequence, position, wanted, scale, FIRST: tl.constexpr, D: tl.constexpr,  # noqa: E741
    R: tl.constexpr, KEPT: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Take some positions into a query's softmax."""
    d, r = tl.arange(0, D)[None, :], tl.arange(0, R)[None, :]
    base, row, there = place_kept(kept, sequence, position, wanted, FIRST, KEPT)
    page, slot = place_of(index.table, sequence, position, index.width, index.pool, PAGE)
    there = there & (page >= 0)
    rows = tl.load(base + row[:, None] * D + d, mask=there[:, None] & (d < D), other=0.0).to(tl.float32)
    keys = tl.load(rope + (page * PAGE + slot)[:, None] * R + r, mask=there[:, None] & (r < R), other=0.0).to(tl.float32)
    s = (tl.sum(rows * x, 1) + tl.sum(keys * q_rope, 1)) * scale
    s = tl.where(there, s, float("-inf"))
    top = tl.maximum(m, tl.max(s, 0))
    safe = tl.where(top == float("-inf"), 0.0, top)
    p, fade = tl.exp2(s - safe), tl.exp2(m - safe)
    return top, l * fade + tl.sum(p, 0), acc * fade + tl.sum(p[:, None] * rows, 0)


@triton.jit
def kept_share(
    x, q_rope, kept, rope, index, sequence, position, scale, D: tl.constexpr, R: tl.constexpr, KEPT: tl.constexpr,
    PAGE: tl.constexpr, N: tl.constexpr, NH: tl.constexpr,
):  # fmt: skip
    """Attend from a rotated query x [1, D], whose other part is q_rope [1, R], to what it reads as it is.

    scale    of scores, to base 2
    N, NH    positions at a time, of the newest and of the first
    returns  the largest score, the sum of weights, and values summed by these: [D], still rotated
    """
    m, l = float("-inf"), 0.0  # noqa: E741
    acc = tl.zeros([D], tl.float32)
    if KEPT.newest:
        for first in range(0, KEPT.newest, N):
            at = position - (KEPT.newest - 1) + first + tl.arange(0, N)
            near = (at >= KEPT.first) & (at <= position)
            m, l, acc = _take(  # noqa: E741
                x, q_rope, m, l, acc, kept, rope, index, sequence, at, near, scale, False, D, R, KEPT, PAGE
            )
    if KEPT.first:
        for first in range(0, KEPT.first, NH):
            at = first + tl.arange(0, NH)
            seen = (at < KEPT.first) & (at <= position)
            m, l, acc = _take(  # noqa: E741
                x, q_rope, m, l, acc, kept, rope, index, sequence, at, seen, scale, True, D, R, KEPT, PAGE
            )
    return m, l, acc


@triton.jit
def mixed(acc, own, LOW: tl.constexpr, D: tl.constexpr):
    """Apply the Walsh-Hadamard transform, without its factor, over three bits of a channel from that worth LOW on, at `own`.

    own      [G]  values of these three bits
    returns  [D / (8 * LOW), G, LOW]
    """
    G: tl.constexpr = own.shape[0]
    HIGH: tl.constexpr = D // (8 * LOW)
    other = own[:, None] & tl.arange(0, 8)[None, :]
    odd = (other ^ (other >> 1) ^ (other >> 2)) & 1
    sign = tl.where(odd == 1, -1.0, 1.0)
    apart = tl.reshape(acc, [HIGH, 1, 8, LOW]) * tl.reshape(sign, [1, G, 8, 1])
    return tl.sum(apart, 2)
