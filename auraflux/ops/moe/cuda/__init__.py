"""Mixture of experts on CUDA. Which experts are met is known on the device alone: wrappers look at shapes only."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from auraflux.ops._dispatch import Declined
from auraflux.ops.hopper.build import Build
from auraflux.ops.hopper.device import INTERPRETED, ready
from auraflux.ops.hopper.sizes import cdiv, power_of_two
from auraflux.ops.moe import reference
from auraflux.ops.moe.cuda.assign import ASSIGN_BUILDS, assign_chosen
from auraflux.ops.moe.cuda.blocks import down_block, fits_blocks, some_hopper, up_block
from auraflux.ops.moe.cuda.group import group_pairs
from auraflux.ops.moe.cuda.grouped_gemm import count_pairs, down_many, many, place_pairs, plan_blocks, up_many
from auraflux.ops.moe.cuda.grouped_wgmma_launch import TILE_BUILDS, fits_tiles, tiled, tiled_parts
from auraflux.ops.moe.cuda.matvec import down_few, few, up_few
from auraflux.ops.moe.cuda.matvec_tma_launch import RING_BUILDS, fits_first, fits_ring, ring_hopper
from auraflux.ops.moe.cuda.persistent import STREAM_BUILDS, fits_stream, streamed, streamed_parts
from auraflux.ops.moe.cuda.routing import combine_kernel, rank_kernel, route_kernel
from auraflux.ops.moe.cuda.slots_launch import (
    MOST_CHOICES,
    SLOT_BUILDS,
    chosen_hopper,
    few_hopper,
    fits_few,
    fits_hopper,
    fits_slot,
)
from auraflux.ops.moe.cuda.stacks import SUMMED, Added, check_stacks, sum_slots, summed, summed_by_scores
from auraflux.ops.moe.experts import Experts, SharedExpert
from auraflux.ops.moe.routing import Routing

MOST_EXPERTS = 4096
FEW_PAIRS = 32  # (token, slot) pairs; up to here each reads its expert for itself
FEW_ROUTED = 8  # tokens; up to here one program chooses for one token
MOST_RANKED = 512  # experts; up to here each is compared with each where tokens are few
ROUTED = 2048  # scores a program looks through
COMBINED = 1024  # elements a program adds


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    ready(logits)
    tokens, experts = logits.shape
    groups, k = routing.groups, routing.k
    size = power_of_two(groups) * power_of_two(experts // groups)
    if size > MOST_EXPERTS:
        raise Declined(f"{experts} experts in {groups} groups, more than {MOST_EXPERTS}")
    ids = torch.empty(tokens, k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, k, dtype=torch.float32, device=logits.device)
    if 0 < tokens <= FEW_ROUTED and groups == 1 and experts <= MOST_RANKED:
        rank_kernel[(tokens,)](
            logits, bias, ids, weights, experts, k, float(routing.scale), routing.scoring,
            routing.renormalize and routing.scoring != "chosen", size, not INTERPRETED, num_warps=max(1, size // 32),
        )  # fmt: skip
    elif tokens:
        rows = 1 if tokens <= FEW_ROUTED else max(1, ROUTED // size)
        route_kernel[(cdiv(tokens, rows),)](
            logits, bias, ids, weights, tokens, experts, groups, routing.kept_groups, k, float(routing.scale),
            routing.scoring, routing.renormalize and routing.scoring != "chosen",
            rows, power_of_two(groups), power_of_two(experts // groups), power_of_two(k), num_warps=max(1, rows * size // 512),
        )  # fmt: skip
    return ids, weights


def combine(h: Tensor, moe: Tensor, shared: Tensor | None = None, shared_gate: Tensor | None = None) -> Tensor:
    ready(h)
    out = torch.empty_like(h)
    tokens, width = h.shape
    if h.numel():
        combine_kernel[tokens, cdiv(width, COMBINED)](h, moe, shared, shared_gate, out, width, COMBINED, num_warps=4)
    return out


def expert_mlp(x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
    """An id out of range gives NaN: only the device knows it."""
    ready(x)
    check_stacks(experts)
    if not ids.numel() or not x.numel():
        return torch.zeros_like(x)
    if ids.numel() <= FEW_PAIRS and fits_few(x, ids.shape[1], experts):
        return few_hopper(x, ids, weights, experts, torch.empty_like(x))
    return _summed(x, ids, weights, experts, (None, None, None))


def _summed(x: Tensor, ids: Tensor, weights: Tensor, experts: Experts, added: Added) -> Tensor:
    if fits_tiles(x, ids, experts):
        found, spots = tiled(x, ids, experts)
        return summed(found, spots, ids, weights, experts.count, x.dtype, added)
    path = _path(x, ids, experts)
    parts = x.new_empty(*ids.shape, experts.hidden, dtype=x.dtype if path is many else torch.float32)
    path(x, ids, experts, parts)
    return summed(parts, None, ids, weights, experts.count, x.dtype, added, early=path is streamed_parts)


def expert_parts(x: Tensor, ids: Tensor, experts: Experts, parts: Tensor) -> None:
    ready(x)
    check_stacks(experts)
    if not parts.numel():
        return
    if ids.numel() <= FEW_PAIRS and fits_few(x, ids.shape[1], experts):
        few_hopper(x, ids, None, experts, parts)
    else:
        _path(x, ids, experts)(x, ids, experts, parts)


def _path(x: Tensor, ids: Tensor, experts: Experts) -> Callable[[Tensor, Tensor, Experts, Tensor], None]:
    """What writes the parts of pairs: of shapes alone, so that calls for some of the experts agree with one for all."""
    if ids.numel() <= FEW_PAIRS:
        return few
    if fits_tiles(x, ids, experts):
        return tiled_parts
    if not fits_hopper(x, experts):
        return many
    if fits_stream(x, ids.shape[1], experts):
        return streamed_parts
    return some_hopper if fits_blocks(ids, experts) else many


def sum_parts(parts: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    ready(parts)
    if not parts.numel():
        return torch.zeros(parts.shape[0], parts.shape[2], dtype=dtype, device=parts.device)
    return summed(parts, None, None, weights, 0, dtype)


def mixture(
    x: Tensor, scores: Tensor, routing: Routing, experts: Experts, h: Tensor,
    bias: Tensor | None = None, shared: Tensor | SharedExpert | None = None, shared_gate: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Few tokens choose their experts inside the kernels that multiply with them, two in all; some more in one before those."""
    ready(x)
    few_pairs, fits = 0 < x.shape[0] * routing.k <= FEW_PAIRS, h.dtype is x.dtype and fits_few(x, routing.k, experts)
    if few_pairs and h.dtype is x.dtype and fits_ring(x, routing, experts):
        if isinstance(shared, SharedExpert) and not fits_first(shared, experts):
            shared = reference.shared_result(x, shared)
        return ring_hopper(x, scores, routing, bias, experts, h, shared, shared_gate)
    if few_pairs and fits and routing.groups == 1 and experts.count <= MOST_CHOICES:
        if isinstance(shared, SharedExpert) and not fits_slot(shared, routing.k, experts):
            shared = reference.shared_result(x, shared)
        return chosen_hopper(x, scores, routing, bias, experts, h, shared, shared_gate)
    if (few_pairs and fits) or h.dtype is not x.dtype or not x.numel():
        return reference.mixture_by_steps(x, scores, routing, experts, h, bias, shared, shared_gate)
    check_stacks(experts)
    added = h, reference.shared_result(x, shared), shared_gate
    if not few_pairs and routing.groups == 1 and fits_stream(x, routing.k, experts) and fits_hopper(x, experts):
        ids, placed, owner = assign_chosen(scores, routing, bias)
        parts = x.new_empty(*ids.shape, experts.hidden, dtype=torch.float32)
        streamed(x, routing.k, placed, owner, experts, parts)
        return summed_by_scores(parts, ids, scores, routing, x.dtype, added)
    ids, weights = reference.route(scores, routing, bias)
    return _summed(x, ids, weights, experts, added)


def _builds() -> list[Build]:
    four, mx = {"BITS": 4, "GROUP": 64, "AFFINE": True}, {"BITS": 4, "GROUP": 32, "AFFINE": False}
    codes, mx_codes, ints = "*i32 *bf16 *bf16 i32:16 i32:16", "*i32 *u8 *u8 i32:16 i32:16", "i32:16 i32:16"
    plain, up = {"gate_bias": None, "up_bias": None, "CLAMP": False}, {"UNIT": 8, "ROWS": 8, "COLUMNS": 128}
    tile, wide, staged = {"ROWS": 64, "TOKENS": 128, "BK": 64}, {"num_warps": 8}, {"num_stages": 3}
    biased, block = f"{mx_codes} {mx_codes} *bf16 *bf16", {"TILES": 2, "D": 3}
    some: list[tuple[Any, str, dict[str, Any], dict[str, Any]]] = [
        (up_few, f"*bf16 *i32 {codes} {codes} *fp32 i32 i32 {ints} fp32 fp32", plain | four | up, {}),
        (up_few, f"*bf16 *i32 {biased} *fp32 i32 i32 {ints} fp32 fp32", {"CLAMP": True} | mx | up, {}),
        (down_few, f"*fp32 *i32 {codes} *fp32 i32 {ints}", {"bias": None, "ROWS": 16, "COLUMNS": 32} | four, {}),
        (up_block, f"*bf16 *i32 *i32 {codes} {codes} *bf16 i32:16 i32 i32 i32:16", {"H": 2048} | block, wide),
        (down_block, f"*bf16 *i32 *i32 {codes} *fp32 i32:16 i32 i32:16", {"INNER": 768} | block, wide),
        (group_pairs, "*i32 *i32 *i32 i32 i32 i32", {"SIZE": 16, "PIECES": 4, "W": 16}, {"num_warps": 16}),
        (count_pairs, "*i32 *i32 i32 i32", {"BLOCK": 1024}, {}),
        (plan_blocks, "*i32 *i32 *i32 i32 i32", {"SIZE": 64, "BE": 512, "BLOCK": 32}, {}),
        (place_pairs, "*i32 *i32 *i32 i32 i32", {"BLOCK": 1024}, {}),
        (
            up_many,
            f"*bf16 *i32 *i32 {codes} {codes} *bf16 i32 i32 i32 {ints} fp32 fp32",
            plain | four | tile,
            staged,
        ),
        (down_many, f"*bf16 *i32 *i32 {codes} *bf16 i32 i32 {ints}", {"bias": None} | four | tile, staged),
    ]
    return [Build(kernel, types, constants, hot=True, options=options) for kernel, types, constants, options in some]


def _builds_around() -> list[Build]:
    """Routing, and what adds up parts."""
    rule = {"SCORING": "softmax", "RENORMALIZE": True}
    one = {"R": 1, "BG": 1, "BS": 128, "BK": 8, "bias": None, "groups": 1, "kept": 1, **rule}
    grouped = {"R": 1, "BG": 8, "BS": 32, "BK": 8, "SCORING": "sigmoid", "RENORMALIZE": True}
    apart, warp = dict.fromkeys(("spots", "scores", "residual", "beside", "beside_gate")), {"num_warps": 1}
    given = {"K": 8, "SCORING": "", "RENORMALIZE": False, "BE": 1, "BLOCK": 2 * SUMMED, "EARLY": False}
    by_scores = {"K": 8, "BE": 128, "BLOCK": SUMMED, "EARLY": True, "spots": None, "weights": None, **rule}
    alone = {"beside": None, "beside_gate": None}
    return [
        Build(route_kernel, "*bf16 *i32 *fp32 i32 i32:16 i32 fp32", one, hot=True, options=warp),
        Build(route_kernel, "*bf16 *fp32 *i32 *fp32 i32 i32:16 i32 i32 i32 fp32", grouped, hot=True, options=warp),
        Build(rank_kernel, "*bf16 *i32 *fp32 i32:16 i32 fp32", {"bias": None, "BE": 128, "EARLY": True, **rule}, hot=True),
        Build(combine_kernel, "*bf16 *bf16 *bf16 *bf16 *bf16 i32:16", {"BLOCK": COMBINED}, hot=True),
        Build(combine_kernel, "*bf16 *bf16 *bf16 i32:16", {"BLOCK": COMBINED, "shared": None, "gate": None}, hot=True),
        Build(sum_slots, "*bf16 *i32 *fp32 *bf16 i32 i32:16 fp32", apart | given, hot=True),
        Build(sum_slots, "*fp32 *i32 *fp32 *bf16 i32 i32:16 fp32", apart | given | {"BLOCK": SUMMED, "EARLY": True}, hot=True),
        Build(sum_slots, "*fp32 *i32 *i32 *fp32 *bf16 *bf16 *bf16 *bf16 i32 i32:16 fp32", given | {"scores": None}, hot=True),
        Build(sum_slots, "*fp32 *fp32 *bf16 i32 i32:16 fp32", {"ids": None, **apart, **given}),
        Build(sum_slots, "*fp32 *i32 *bf16 *bf16 *bf16 i32 i32:16 fp32", by_scores | alone, hot=True),
        Build(sum_slots, "*fp32 *i32 *bf16 *bf16 *bf16 *bf16 *bf16 i32 i32:16 fp32", by_scores, hot=True),
    ]


KERNELS = _builds() + _builds_around() + SLOT_BUILDS + RING_BUILDS + ASSIGN_BUILDS + STREAM_BUILDS + TILE_BUILDS
