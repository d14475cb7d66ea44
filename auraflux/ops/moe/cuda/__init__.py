"""Mixture of experts on CUDA; `routes.py` says which kernels multiply.

Which experts are met is known on the device alone: wrappers look at shapes only.
"""

import torch
from torch import Tensor

from auraflux.ops._dispatch import Declined
from auraflux.ops.hopper.device import ready
from auraflux.ops.hopper.launch import launch
from auraflux.ops.hopper.sizes import cdiv
from auraflux.ops.moe.cuda.call import Choice, Mixture, Pairs
from auraflux.ops.moe.cuda.routes import CHOICES, EXPERTS, MIXTURES
from auraflux.ops.moe.cuda.routing import COMBINED, combine_kernel
from auraflux.ops.moe.cuda.stacks import not_served, summed
from auraflux.ops.moe.experts import Experts, SharedExpert
from auraflux.ops.moe.routing import Routing

__all__ = ["combine", "expert_mlp", "expert_parts", "mixture", "route", "sum_parts"]


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None, gain: Tensor | None = None) -> tuple[Tensor, Tensor]:
    ready(logits)
    _check_scoring(routing)
    ids, weights = CHOICES(Choice(logits, routing, bias))
    if gain is None:
        return ids, weights
    # where launches are only noted, ids are anything
    within = ids.view(-1).clamp(0, len(gain) - 1)
    return ids, weights * gain.float().index_select(0, within).view(ids.shape)


def combine(h: Tensor, moe: Tensor, shared: Tensor | None = None, shared_gate: Tensor | None = None) -> Tensor:
    ready(h)
    out = torch.empty_like(h)
    tokens, width = h.shape
    if h.numel():
        launch(combine_kernel, (tokens, cdiv(width, COMBINED)))(h, moe, shared, shared_gate, out, width, COMBINED, num_warps=4)
    return out


def expert_mlp(x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
    """An id out of range gives NaN: only the device knows it."""
    _check(x, experts)
    return EXPERTS(Pairs(x, ids, experts, weights=weights))


def expert_parts(x: Tensor, ids: Tensor, experts: Experts, parts: Tensor) -> None:
    _check(x, experts)
    EXPERTS(Pairs(x, ids, experts, parts=parts))


def sum_parts(parts: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    ready(parts)
    if not parts.numel():
        return torch.zeros(parts.shape[0], parts.shape[2], dtype=dtype, device=parts.device)
    return summed(parts, None, None, weights, 0, dtype)


def mixture(
    x: Tensor, scores: Tensor, routing: Routing, experts: Experts, h: Tensor,
    bias: Tensor | None = None, shared: Tensor | SharedExpert | None = None, shared_gate: Tensor | None = None,
) -> Tensor:  # fmt: skip
    ready(x)
    _check_scoring(routing)
    return MIXTURES(Mixture(x, scores, routing, experts, h, bias, shared, shared_gate))


def _check_scoring(routing: Routing) -> None:
    if routing.scoring == "sqrtsoftplus":
        raise Declined("no kernel scores experts by the root of softplus")


def _check(x: Tensor, experts: Experts) -> None:
    ready(x)
    if reason := not_served(experts):
        raise Declined(reason)
