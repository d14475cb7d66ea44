"""Mixture of experts on CUDA. Which experts are met is known on the device alone: wrappers look at shapes only."""

import torch
from torch import Tensor

from auraflux.ops._dispatch import Declined
from auraflux.ops._triton import Build, cdiv, power_of_two, ready
from auraflux.ops.moe._cuda_few import down_few, few, up_few
from auraflux.ops.moe._cuda_many import count_pairs, down_many, many, place_pairs, plan_blocks, up_many
from auraflux.ops.moe._cuda_route import combine_kernel, route_kernel
from auraflux.ops.moe._cuda_stacks import check_stacks, sum_slots
from auraflux.ops.moe.experts import Experts
from auraflux.ops.moe.routing import Routing

MOST_EXPERTS = 4096
FEW_PAIRS = 32  # (token, slot) pairs; up to here each reads its expert for itself
FEW_ROUTED = 8  # tokens; up to here one program chooses for one token
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
    if tokens:
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
    return (few if ids.numel() <= FEW_PAIRS else many)(x, ids, weights, experts)


def _builds() -> list[Build]:
    one = {"R": 1, "BG": 1, "BS": 128, "BK": 8, "bias": None, "groups": 1, "kept": 1, "SCORING": "softmax", "RENORMALIZE": True}
    grouped = {"R": 1, "BG": 8, "BS": 32, "BK": 8, "SCORING": "sigmoid", "RENORMALIZE": True}
    four, mx = {"BITS": 4, "GROUP": 64, "AFFINE": True}, {"BITS": 4, "GROUP": 32, "AFFINE": False}
    codes, mx_codes, ints = "*i32 *bf16 *bf16 i32:16 i32:16", "*i32 *u8 *u8 i32:16 i32:16", "i32:16 i32:16"
    plain, up = {"gate_bias": None, "up_bias": None, "CLAMP": False}, {"UNIT": 8, "ROWS": 8, "COLUMNS": 128}
    down, tile = {"ROWS": 16, "COLUMNS": 32}, {"ROWS": 64, "TOKENS": 128, "BK": 64}
    biased = f"{mx_codes} {mx_codes} *bf16 *bf16"
    return [
        Build(route_kernel, "*bf16 *i32 *fp32 i32 i32:16 i32 fp32", one, hot=True, options={"num_warps": 1}),
        Build(route_kernel, "*bf16 *fp32 *i32 *fp32 i32 i32:16 i32 i32 i32 fp32", grouped, hot=True, options={"num_warps": 1}),
        Build(combine_kernel, "*bf16 *bf16 *bf16 *bf16 *bf16 i32:16", {"BLOCK": COMBINED}, hot=True),
        Build(combine_kernel, "*bf16 *bf16 *bf16 i32:16", {"BLOCK": COMBINED, "shared": None, "gate": None}, hot=True),
        Build(up_few, f"*bf16 *i32 {codes} {codes} *fp32 i32 i32 {ints} fp32 fp32", {**plain, **four, **up}, hot=True),
        Build(up_few, f"*bf16 *i32 {biased} *fp32 i32 i32 {ints} fp32 fp32", {"CLAMP": True, **mx, **up}, hot=True),
        Build(down_few, f"*fp32 *i32 {codes} *fp32 i32 {ints}", {"bias": None, **four, **down}, hot=True),
        Build(count_pairs, "*i32 *i32 i32 i32", {"BLOCK": 1024}, hot=True),
        Build(plan_blocks, "*i32 *i32 *i32 i32 i32", {"SIZE": 64, "BE": 512, "BLOCK": 32}, hot=True),
        Build(place_pairs, "*i32 *i32 *i32 i32 i32", {"BLOCK": 1024}, hot=True),
        Build(
            up_many,
            f"*bf16 *i32 *i32 {codes} {codes} *bf16 i32 i32 i32 {ints} fp32 fp32",
            {**plain, **four, **tile},
            hot=True,
        ),
        Build(down_many, f"*bf16 *i32 *i32 {codes} *bf16 i32 i32 {ints}", {"bias": None, **four, **tile}, hot=True),
        Build(sum_slots, "*bf16 *i32 *fp32 *bf16 i32 i32 i32:16", {"BLOCK": 1024}, hot=True),
    ]


KERNELS = _builds()
