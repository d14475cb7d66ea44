"""Top-k selection for up to 512 tokens on Hopper and grouping of their pairs into blocks, in one program.

A pair is a token and one of its slots; a block is one or two octets of pairs of one expert. A warp selects for one token at a
time, and pairs are counted in shared memory.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv
from auraflux.ops.hopper.ptx import WAIT_AND_LAUNCH, from_lane, run, shared
from auraflux.ops.hopper.reduce import inclusive_scan
from auraflux.ops.hopper.shared_memory import atomic_increment, put_word, word_at
from auraflux.ops.moe.cuda.routing.topk import choose, load_scores, weights_of
from auraflux.ops.moe.routing import Routing

W = gl.constexpr(32)  # warps
MOST_TOKENS = 512  # sixteen for each warp
MOST_SLOTS = 32  # of a token, one for each lane
MOST_EXPERTS = 512  # whose scores fit the lanes of a warp


class Blocks(NamedTuple):
    """Pairs grouped by expert.

    placed  [8 octets most]  the pairs of each block; the number of pairs in empty places
    owner   [2 most + 1]     each block's expert; then the number of blocks; then zeroed counters for `persistent`
    octets  per block
    """

    placed: Tensor
    owner: Tensor
    octets: int

    @property
    def most(self) -> int:
        """Most blocks that there may be."""
        return len(self.placed) // (8 * self.octets)


class AssignShape(NamedTuple):
    """Compile-time shape: `Routing` and padded experts, tokens per warp, and pairs per block."""

    k: int
    experts: int
    scoring: str
    renormalize: bool
    passes: int
    size: int


@gluon.jit(do_not_specialize_on_alignment=["tokens"])
def assign_pairs(
    scores, bias, ids, weights, placed, owner, spots, scale, tokens, experts, most, SHAPE: gl.constexpr
):  # fmt: skip
    """Select experts by `scores` and store them in `ids`, or, where scores are None, use the given ids; then group the pairs.

    weights  receives the slots' weights, in the arithmetic of `slots`; or None
    spots    receives the place of each pair; or None
    """
    K: gl.constexpr = SHAPE.k
    E: gl.constexpr = SHAPE.experts
    SCORING: gl.constexpr = SHAPE.scoring
    RENORMALIZE: gl.constexpr = SHAPE.renormalize
    PASSES: gl.constexpr = SHAPE.passes
    SIZE: gl.constexpr = SHAPE.size
    T: gl.constexpr = 32 * W
    tid = gl.arange(0, T, gl.BlockedLayout([1], [32], [W], [0]))
    warp, lane = tid // 32, tid % 32
    memory, counts = shared(8 * T + 4 * W, tid)
    bases, totals = counts + 4 * T, counts + 8 * T
    put_word(counts + tid * 4, tid * 0)
    run(WAIT_AND_LAUNCH, tid)
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
        ranks += (atomic_increment(counts + chosen * 4, there),)  # type: ignore[assignment]
    gl.thread_barrier()
    # thread n handles expert n
    needed = (word_at(counts + tid * 4) + SIZE - 1) // SIZE
    end = inclusive_scan(needed)
    put_word(gl.where(lane == 31, totals + warp * 4, bases + tid * 4), end)
    gl.thread_barrier()
    before = from_lane(inclusive_scan(word_at(totals + lane * 4)), gl.maximum(warp - 1, 0))
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
        scores, bias, ids, weights, placed, owner, spots, scale, tokens, experts, most,
        AssignShape(k, *rule, cdiv(tokens, W.value), size), num_warps=W.value, launch_pdl=True,
    )  # fmt: skip
    return Blocks(placed, owner, octets)


def assign_given(ids: Tensor, experts: int, octets: int, spots: Tensor | None = None) -> Blocks:
    """Return blocks of pairs whose experts are given; ids out of range are skipped.

    spots  receives the place of each pair
    """
    return _launch(None, (0, "", False), None, ids, experts, octets, spots=spots)


def assign_chosen(
    scores: Tensor, routing: Routing, bias: Tensor | None, octets: int, weights: Tensor | None = None
) -> tuple[Tensor, Blocks]:
    """Select each token's experts and return their ids and blocks; `weights` receives the slots' weights."""
    tokens, experts = scores.shape
    ids = torch.empty(tokens, routing.k, dtype=torch.int32, device=scores.device)
    rule = cdiv(experts, 32) * 32, routing.scoring, routing.renormalize
    return ids, _launch(scores, rule, bias, ids, experts, octets, weights, float(routing.scale))
