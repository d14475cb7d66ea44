"""Mixture of experts on CUDA; `routes.py` selects the kernels.

The selected experts are known only on the device, so wrappers depend on shapes alone.
"""

import torch
from torch import Tensor

from auraflux.ops._dispatch import Declined
from auraflux.ops.gpu.device import ready
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv
from auraflux.ops.moe.cuda import fetch, fetch_disk
from auraflux.ops.moe.cuda import prefetch as prefetch_kernels
from auraflux.ops.moe.cuda.call import ExpertCall, MixtureCall, RouteCall
from auraflux.ops.moe.cuda.expert_routes import EXPERTS, ROUTERS
from auraflux.ops.moe.cuda.routes import MIXTURES
from auraflux.ops.moe.cuda.routing.kernels import COMBINED, combine_kernel
from auraflux.ops.moe.cuda.stacks import summed, unsupported
from auraflux.ops.moe.experts import Experts, SharedExpert
from auraflux.ops.moe.pool import ExpertPool
from auraflux.ops.moe.routing import Routing

__all__ = [
    "combine",
    "expert_mlp",
    "expert_parts",
    "fetch_experts",
    "mixture",
    "pooled_mixture",
    "prefetch_expert",
    "route",
    "sum_parts",
]


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None, gain: Tensor | None = None) -> tuple[Tensor, Tensor]:
    ready(logits)
    _check_scoring(routing)
    ids, weights = ROUTERS(RouteCall(logits, routing, bias))
    if gain is None:
        return ids, weights
    # ids are uninitialized where launches are only recorded
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
    """Return the weighted sum of expert outputs; an id out of range gives NaN, since only the device knows it."""
    _check(x, experts)
    return EXPERTS(ExpertCall(x, ids, experts, weights=weights))


def expert_parts(x: Tensor, ids: Tensor, experts: Experts, parts: Tensor) -> None:
    _check(x, experts)
    EXPERTS(ExpertCall(x, ids, experts, parts=parts))


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
    return MIXTURES(MixtureCall(x, scores, routing, experts, h, bias, shared, shared_gate))


def fetch_experts(ids: Tensor, pool: ExpertPool, layer: int) -> Tensor:
    ready(ids)
    _check_fetch(pool, ids.numel())
    return fetch_disk.fetch(pool, layer, ids)


def prefetch_expert(ids: Tensor, pool: ExpertPool, layer: int) -> Tensor:
    ready(ids)
    _check_fetch(pool, ids.numel())
    return prefetch_kernels.prefetch(ids, pool, layer)


def pooled_mixture(
    x: Tensor, scores: Tensor, routing: Routing, pool: ExpertPool, layer: int, h: Tensor,
    bias: Tensor | None = None, shared: Tensor | SharedExpert | None = None, shared_gate: Tensor | None = None,
) -> Tensor:  # fmt: skip
    ready(x)
    _check_scoring(routing)
    _check_fetch(pool, x.shape[0] * routing.k)
    return MIXTURES(MixtureCall(x, scores, routing, pool.layers[layer], h, bias, shared, shared_gate, pool, layer))


def _check_fetch(pool: ExpertPool, pairs: int) -> None:
    if reason := fetch.refuses(pool, pairs):
        raise Declined(reason)


def _check_scoring(routing: Routing) -> None:
    if routing.scoring == "sqrtsoftplus":
        raise Declined("no kernel supports 'sqrtsoftplus' scoring")


def _check(x: Tensor, experts: Experts) -> None:
    ready(x)
    if reason := unsupported(experts):
        raise Declined(reason)
