"""Choosing the experts of some tokens on Hopper and bringing their pairs into blocks, in one program.

A pair is a token and one of its slots; a block is of one or two octets of pairs of one expert. A warp chooses for one token at
a time, and pairs are counted in shared memory.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.hopper.launch import launch
from auraflux.ops.hopper.ptx import AWAIT, from_lane, run, shared
from auraflux.ops.hopper.reduce import add_below
from auraflux.ops.hopper.shared_memory import count_in, put_word, word_at
from auraflux.ops.hopper.sizes import cdiv
from auraflux.ops.moe.cuda.topk import choose, load_scores, weights_of
from auraflux.ops.moe.routing import Routing

W = gl.constexpr(32)  # warps
MOST_TOKENS = 512  # sixteen for each warp
MOST_SLOTS = 32  # of a token, one for each lane
MOST_EXPERTS = 512  # that the lanes of a warp hold the scores of


class Blocks(NamedTuple):
    """Pairs by their experts.

    placed  [8 octets most]  the pairs of each block, the number of pairs where there is none
    owner   [2 most + 1]     each block's expert; then how many blocks there are; then zeros, for `persistent` to count in
    octets  of a block
    """

    placed: Tensor
    owner: Tensor
    octets: int


@gluon.jit(do_not_specialize_on_alignment=["tokens"])
def assign_pairs(
    scores, bias, ids, weights, placed, owner, spots, scale, tokens, experts, most, K: gl.constexpr, E: gl.constexpr,
    SCORING: gl.constexpr, RENORMALIZE: gl.constexpr, PASSES: gl.constexpr, SIZE: gl.constexpr,
):  # fmt: skip
    """Choose by `scores` and leave the choice in `ids`, or, where scores are None, take what is there.

    weights  where to leave what slots weigh, as `slots` has it; or None
    spots    where to leave the place of each pair; or None
    SIZE     pairs of a block
    """
    T: gl.constexpr = 32 * W
    tid = gl.arange(0, T, gl.BlockedLayout([1], [32], [W], [0]))
    warp, lane = tid // 32, tid % 32
    memory, counts = shared(8 * T + 4 * W, tid)
    bases, totals = counts + 4 * T, counts + 8 * T
    put_word(counts + tid * 4, tid * 0)
    run(AWAIT, tid)
    for start in range(0, most * SIZE, T):
        gl.store(placed + start + tid, tid * 0 + tokens * K, start + tid < most * SIZE)
    gl.store(owner + tid, tid * 0 + experts, tid < most)
    gl.store(owner + most + 1 + tid, tid * 0, tid < most)
    gl.thread_barrier()
    mine = ()
    ranks = ()
    for n in gl.static_range(PASSES):
        token = n * W + warp
        row, there = gl.minimum(token, tokens - 1).to(gl.int64), (token < tokens) & (lane < K)
        if scores is None:
            chosen = gl.load(ids + row * K + gl.minimum(lane, K - 1))
            there = there & (chosen >= 0) & (chosen < experts)
        else:
            found = load_scores(scores + row * experts, lane, experts, E)
            chosen = choose(found, bias, lane, experts, K - 1, E, SCORING == "sigmoid", scores.dtype.element_ty == gl.bfloat16)
            gl.store(ids + row * K + lane, chosen, there)
            if weights is not None:
                share = weights_of(found, scores + row * experts, chosen, lane, scale, K, E, SCORING, RENORMALIZE)
                gl.store(weights + row * K + lane, share, there)
        mine += (gl.where(there, chosen, -1),)  # type: ignore[assignment]
        ranks += (count_in(counts + chosen * 4, there),)  # type: ignore[assignment]
    gl.thread_barrier()
    # thread n has expert n
    needed = (word_at(counts + tid * 4) + SIZE - 1) // SIZE
    end = add_below(needed)
    put_word(gl.where(lane == 31, totals + warp * 4, bases + tid * 4), end)
    gl.thread_barrier()
    before = from_lane(add_below(word_at(totals + lane * 4)), gl.maximum(warp - 1, 0))
    end += gl.where(warp > 0, before, 0)
    put_word(bases + tid * 4, end - needed)
    gl.store(owner + most + tid * 0, end, tid == T - 1)
    gl.thread_barrier()
    for n in gl.static_range(PASSES):
        there = mine[n] >= 0
        base = word_at(bases + gl.where(there, mine[n], 0) * 4)
        pair, place = (n * W + warp) * K + lane, base * SIZE + ranks[n]
        gl.store(placed + place, pair, there)
        if spots is not None:
            gl.store(spots + pair, place, there)
        gl.store(owner + base + ranks[n] // SIZE, mine[n], there & (ranks[n] % SIZE == 0))
    memory._keep_alive()


def _launch(
    scores: Tensor | None, rule: tuple[int, str, bool], bias: Tensor | None, ids: Tensor, experts: int, octets: int,
    weights: Tensor | None = None, scale: float = 1.0, spots: Tensor | None = None,
) -> Blocks:  # fmt: skip
    (tokens, k), size = ids.shape, 8 * octets
    most = min(tokens * k, tokens * k // size + experts)
    placed, owner = ids.new_empty(most * size), ids.new_empty(2 * most + 1)
    launch(assign_pairs, (1,))(
        scores, bias, ids, weights, placed, owner, spots, scale, tokens, experts, most, k, *rule, cdiv(tokens, W.value), size,
        num_warps=W.value, launch_pdl=True,
    )  # fmt: skip
    return Blocks(placed, owner, octets)


def assign_given(ids: Tensor, experts: int, octets: int, spots: Tensor | None = None) -> Blocks:
    """Blocks of pairs whose experts are given; an id that is none of an expert has no place in them.

    spots  where each pair's place goes
    """
    return _launch(None, (0, "", False), None, ids, experts, octets, spots=spots)


def assign_chosen(
    scores: Tensor, routing: Routing, bias: Tensor | None, octets: int, weights: Tensor | None = None
) -> tuple[Tensor, Blocks]:
    """The choice of each token, and the blocks of its pairs; `weights` where it is to be left what they weigh."""
    tokens, experts = scores.shape
    ids = torch.empty(tokens, routing.k, dtype=torch.int32, device=scores.device)
    rule = cdiv(experts, 32) * 32, routing.scoring, routing.renormalize
    return ids, _launch(scores, rule, bias, ids, experts, octets, weights, float(routing.scale))
