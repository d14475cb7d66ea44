"""Triton kernels around the experts: top-k routing, and the sum into the residual stream.

A score and its index make one 64-bit key that orders as the reference does: by score, ties by increasing index. NaN ranks as
-inf, and padding ranks below all keys.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops._dispatch import is_invariant
from auraflux.ops.gpu.blocks.dependent_launch import gdc_launch_dependents
from auraflux.ops.gpu.blocks.elementwise import sigmoid
from auraflux.ops.gpu.device import launches_early
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv, power_of_two
from auraflux.ops.moe.routing import Routing

FEW_TOKENS = 8  # up to here one program per token
SEARCHED = 2048  # scores per program above that
COMBINED = 1024  # elements a program adds

LOWEST = tl.constexpr(-(2**63))
PLACES = tl.constexpr(2**31 - 1)


class RouteShape(NamedTuple):
    """Compile-time settings of `route_kernel`: scoring, tokens of a program, and padded groups, experts per group, and k."""

    scoring: str
    renormalize: bool
    rows: int
    groups: int
    members: int
    k: int


@triton.jit
def _ordered(bits):
    """Map the bits of a float32 to an integer of the same order, or back."""
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def score_keys(score, place, there):
    """Return integers that order scores: by value, ties by increasing index; padding ranks below all."""
    # zeros of both signs are equal
    score = tl.where(score == score, tl.where(score == 0.0, 0.0, score), float("-inf"))
    key = (_ordered(score.to(tl.int32, bitcast=True)).to(tl.int64) << 32) + (-place + PLACES)
    return tl.where(there, key, LOWEST)


@triton.jit
def _place(key):
    return (-(key & 0xFFFFFFFF) + PLACES).to(tl.int32)


@triton.jit
def _score(key):
    return _ordered((key >> 32).to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _best_groups(keys, groups, topk_groups, BG: tl.constexpr):
    """Return which groups have the highest sums of their two best scores: [R, BG, BS] -> [R, BG]."""
    group = tl.arange(0, BG)[None, :]
    best = tl.max(keys, 2)
    second = tl.max(tl.where(keys == best[:, :, None], LOWEST, keys), 2)
    left = score_keys(_score(best) + _score(second), group, group < groups)
    for _ in range(topk_groups):
        left = tl.where(left == tl.max(left, 1)[:, None], LOWEST, left)
    return left == LOWEST


@triton.jit(do_not_specialize_on_alignment=["tokens"])
def route_kernel(
    logits, bias, ids, weights, tokens, experts, groups, topk_groups, k, scale, SHAPE: tl.constexpr
):  # fmt: skip
    SCORING: tl.constexpr = SHAPE.scoring
    R: tl.constexpr = SHAPE.rows
    BG: tl.constexpr = SHAPE.groups
    BS: tl.constexpr = SHAPE.members
    BK: tl.constexpr = SHAPE.k
    token = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    size = experts // groups
    group, member = tl.arange(0, BG)[None, :, None], tl.arange(0, BS)[None, None, :]
    place = group * size + member
    listed = (group < groups) & (member < size)
    there = (token < tokens)[:, None, None] & listed  # [R, BG, BS]
    x = tl.load(logits + token[:, None, None] * experts + place, mask=there, other=float("-inf")).to(tl.float32)
    selection = x
    if SCORING == "sigmoid":
        selection = sigmoid(x)
        if bias is not None:
            selection += tl.load(bias + place, mask=listed, other=0.0).to(tl.float32)
    keys = score_keys(selection, place, there)
    if BG > 1:
        chosen = _best_groups(keys, groups, topk_groups, BG)
        keys = score_keys(tl.where(chosen[:, :, None], selection, float("-inf")), place, there)
    slot = tl.arange(0, BK)[None, :]
    mine = tl.zeros([R, BK], tl.int32)
    for i in range(k):
        top = tl.max(tl.max(keys, 2), 1)
        mine = tl.where(slot == i, _place(top)[:, None], mine)
        keys = tl.where(keys == top[:, None, None], LOWEST, keys)
    there = (token < tokens)[:, None] & (slot < k)  # [R, BK]
    y = tl.load(logits + token[:, None] * experts + mine, mask=there, other=float("-inf")).to(tl.float32)
    if SCORING == "sigmoid":
        weight = sigmoid(y)
        total = tl.sum(tl.where(slot < k, weight, 0.0), 1) + 1e-20
    else:
        if SCORING == "chosen":
            weight = tl.exp(y - tl.max(y, 1)[:, None])
            weight /= tl.sum(tl.where(slot < k, weight, 0.0), 1)[:, None]
        else:
            top = tl.max(tl.max(x, 2), 1)
            every = tl.where(listed, tl.exp(x - top[:, None, None]), 0.0)
            weight = tl.exp(y - top[:, None]) / tl.sum(tl.sum(every, 2), 1)[:, None]
        total = tl.sum(tl.where(slot < k, weight, 0.0), 1)
        total = tl.where(total > 0, total, 1.0)
    if SHAPE.renormalize:
        weight /= total[:, None]
    at = token[:, None] * k + slot
    tl.store(ids + at, mine, mask=there)
    tl.store(weights + at, weight * scale, mask=there)


@triton.jit
def rank_kernel(
    logits, bias, ids, weights, experts, k, scale,
    SCORING: tl.constexpr, RENORMALIZE: tl.constexpr, BE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Route one token: each expert counts the better ones and takes that slot, without a serial loop.

    EARLY  let the next kernel start, which needs Hopper; it waits for the end of this one before it reads the selection
    """
    if EARLY:
        gdc_launch_dependents()
    token, place = tl.program_id(0).to(tl.int64), tl.arange(0, BE)
    listed = place < experts
    x = tl.load(logits + token * experts + place, mask=listed, other=float("-inf")).to(tl.float32)
    selection = x
    if SCORING == "sigmoid":
        selection = sigmoid(x)
        if bias is not None:
            selection += tl.load(bias + place, mask=listed, other=0.0).to(tl.float32)
    keys = score_keys(selection, place, listed)
    slot = tl.sum((keys[None, :] > keys[:, None]).to(tl.int32), 1)
    chosen = slot < k
    if SCORING == "sigmoid":
        weight = sigmoid(x)
        total = tl.sum(tl.where(chosen, weight, 0.0), 0) + 1e-20
    else:
        top = tl.max(tl.where(chosen, x, float("-inf")) if SCORING == "chosen" else x, 0)
        weight = tl.exp(x - top)
        weight /= tl.sum(tl.where(chosen if SCORING == "chosen" else listed, weight, 0.0), 0)
        total = tl.sum(tl.where(chosen, weight, 0.0), 0)
        total = tl.where(total > 0, total, 1.0)
    if RENORMALIZE:
        weight /= total
    tl.store(ids + token * k + slot, place, mask=chosen)
    tl.store(weights + token * k + slot, weight * scale, mask=chosen)


@triton.jit
def combine_kernel(h, moe, shared, gate, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < width
    at = row * width + column
    total = tl.load(h + at, mask=there, other=0.0).to(tl.float32) + tl.load(moe + at, mask=there, other=0.0).to(tl.float32)
    if shared is not None:
        more = tl.load(shared + at, mask=there, other=0.0).to(tl.float32)
        if gate is not None:
            more *= sigmoid(tl.load(gate + row).to(tl.float32))
        total += more
    tl.store(out + at, total.to(out.dtype.element_ty), mask=there)


def padded_experts(experts: int, groups: int) -> int:
    """Return the padded scores of a token in `search`: groups times experts per group, powers of two."""
    return power_of_two(groups) * power_of_two(experts // groups)


def chosen(tokens: int, k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Allocate the outputs of routing: expert ids and weights."""
    ids = torch.empty(tokens, k, dtype=torch.int32, device=device)
    return ids, torch.empty(tokens, k, dtype=torch.float32, device=device)


def rank(logits: Tensor, routing: Routing, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run `route` for few tokens and a single expert group."""
    tokens, experts = logits.shape
    ids, weights = chosen(tokens, routing.k, logits.device)
    size, early = power_of_two(experts), launches_early(logits.device)
    launch(rank_kernel, (tokens,))(
        logits, bias, ids, weights, experts, routing.k, float(routing.scale), routing.scoring,
        routing.renormalize and routing.scoring != "chosen", size, early, num_warps=max(1, size // 32),
    )  # fmt: skip
    return ids, weights


def search(logits: Tensor, routing: Routing, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run `route` by k rounds of argmax."""
    (tokens, experts), groups, k = logits.shape, routing.groups, routing.k
    ids, weights = chosen(tokens, k, logits.device)
    shape = power_of_two(groups), power_of_two(experts // groups), power_of_two(k)
    size = shape[0] * shape[1]
    rows = 1 if tokens <= FEW_TOKENS or is_invariant() else max(1, SEARCHED // size)
    launch(route_kernel, (cdiv(tokens, rows),))(
        logits, bias, ids, weights, tokens, experts, groups, routing.topk_groups, k, float(routing.scale),
        RouteShape(routing.scoring, routing.renormalize and routing.scoring != "chosen", rows, *shape),
        num_warps=max(1, rows * size // 512),
    )  # fmt: skip
    return ids, weights
