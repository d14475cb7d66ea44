"""Mixture kernels on CUDA: the first route below that does not refuse a call.

For one or two tokens the kernels that multiply also select the experts. Inside `invariant` any number of pairs is grouped into
blocks that sum in the same order as `slots`, where that serves few pairs; otherwise the grouped GEMM runs.

Experts in the slots of a pool are multiplied by the same kernels, after a kernel that fetches the missing ones (`fetch.py`).
"""

from typing import Any

import torch
from torch import Tensor

from auraflux.ops._dispatch import is_invariant
from auraflux.ops.gpu.device import not_tma
from auraflux.ops.linear.cuda.call import Call as Product
from auraflux.ops.linear.cuda.routes import PRODUCTS
from auraflux.ops.moe import reference
from auraflux.ops.moe.cuda import fetch, fetch_disk
from auraflux.ops.moe.cuda.call import ExpertCall, MixtureCall, RouteCall
from auraflux.ops.moe.cuda.expert_routes import EXPERTS, ROUTERS, token_slices
from auraflux.ops.moe.cuda.gemm import persistent as gemm_persistent
from auraflux.ops.moe.cuda.matvec import few_tokens_launch
from auraflux.ops.moe.cuda.matvec import tma_launch as matvec_tma_launch
from auraflux.ops.moe.cuda.refusals import (
    NO_ROOM,
    biased_softmax,
    not_added,
    not_extra_expert,
    not_few,
    not_in_slot,
    not_in_slots,
    not_int4,
    not_ordered,
    refuses_mix_persistent,
    refuses_mix_slots,
)
from auraflux.ops.moe.cuda.routing import assign as routing_assign
from auraflux.ops.moe.cuda.stacks import Epilogue, rows_of, summed, summed_by_scores, unsupported
from auraflux.ops.moe.experts import SharedExpert
from auraflux.ops.routes import Route, Routes

Next = list[tuple[Routes[Any, Any], Any]]


def _refuses_mix_tma(call: MixtureCall) -> str | None:
    if call.experts.slots is not None:
        return "experts are in the slots of a pool"
    if reason := not_added(call) or biased_softmax(call):
        return reason
    made, rule, experts = matvec_tma_launch, call.routing, call.experts
    hidden, inner, slots = experts.hidden, experts.inner, call.k + 1
    if hidden * inner < made.LEAST_WEIGHTS:
        return f"experts of {hidden} x {inner} are small: slots has more tiles in flight"
    if inner % 512 or inner > 512 * made.DOWN_WARPS:
        return f"inner width {inner} is not a multiple of 512, or above {512 * made.DOWN_WARPS}"
    if slots > made.MOST_SLOTS or experts.count > few_tokens_launch.MOST_CHOICES:
        return f"{call.k} of {experts.count} experts; it is for up to {made.MOST_SLOTS - 1} of {few_tokens_launch.MOST_CHOICES}"
    if rule.groups != 1 and experts.count != made.GROUP * rule.groups:
        return f"{experts.count} experts in {rule.groups} groups; it is for groups of {made.GROUP}"
    if reason := not_tma(call.x.device):
        return reason
    sizes = hidden, inner, slots, call.x.device
    (_, _, up_deep), (_, tiles, down_deep) = made.up_sizes(*sizes), made.down_sizes(*sizes)
    if up_deep < 2 or down_deep < 2 or tiles * 8 > 32 * made.DOWN_WARPS:
        return NO_ROOM
    return not_int4(call.x, experts)


def _refuses_steps(call: MixtureCall) -> str | None:
    if call.h.dtype is not call.x.dtype or not call.x.numel():
        return None
    return (
        None
        if not is_invariant() and not not_few(call) and not not_in_slots(call)
        else "a fused kernel adds the results to the residual stream"
    )


def _refuses_route_first(call: MixtureCall) -> str | None:
    return unsupported(call.experts)


def _shared(call: MixtureCall, refused: str | None) -> Tensor | SharedExpert | None:
    """Return the shared expert's weights where the kernel handles them, else its output."""
    return call.shared if refused is None else reference.shared_result(call.x, call.shared)


def _mix_tma(call: MixtureCall) -> Tensor:
    shared = _shared(call, not_extra_expert(call))
    return matvec_tma_launch.mix(call.x, call.scores, call.routing, call.bias, call.experts, call.h, shared, call.shared_gate)


def _mix_slots(call: MixtureCall) -> Tensor:
    shared = _shared(call, not_in_slot(call))
    given = call.x, call.scores, call.routing, call.bias, call.experts, call.h, shared, call.shared_gate
    return few_tokens_launch.mix(*given, chosen=_fetch_chosen(call))


def _fetch_chosen(call: MixtureCall) -> few_tokens_launch.Chosen | None:
    """Select the experts of few tokens and bring them into the pool; None where experts have no slots."""
    if call.experts.slots is None:
        return None
    if call.pool is None:
        ids = ROUTERS(RouteCall(call.scores, call.routing, call.bias))[0]
        return few_tokens_launch.Chosen(ids, rows_of(ids, call.experts))
    if call.tokens <= fetch.MOST_RANKED_TOKENS and call.experts.count <= fetch.MOST_RANKED:
        found = fetch_disk.fetch_chosen(call.pool, call.layer, call.x, call.scores, call.routing, call.bias)
        return few_tokens_launch.Chosen(*found)
    ids = ROUTERS(RouteCall(call.scores, call.routing, call.bias))[0]
    return few_tokens_launch.Chosen(ids, fetch_disk.fetch(call.pool, call.layer, ids))


def _mix_by_steps(call: MixtureCall) -> Tensor:
    ids, weights = reference.route(call.scores, call.routing, call.bias)
    _fetch(call, ids)
    found = reference.expert_mlp(call.x, ids, weights, call.experts)
    return reference.combine(call.h, found, reference.shared_result(call.x, call.shared), call.shared_gate)


def _fetch(call: MixtureCall, ids: Tensor, owner: Tensor | None = None) -> None:
    """Bring experts into the pool, if there is one, and replace the blocks' owners by slots."""
    if call.pool is not None:
        fetch_disk.fetch(call.pool, call.layer, ids, owner)
    elif owner is not None:
        rows_of(owner, call.experts, out=owner)


def _mix_persistent(call: MixtureCall) -> Tensor:
    epilogue = Epilogue(call.h, reference.shared_result(call.x, call.shared), call.shared_gate)
    parts = call.x.new_empty(call.tokens, call.k, call.experts.hidden, dtype=torch.float32)
    chosen = []
    ordered = few_tokens_launch.order_of(call.experts, call.k) if is_invariant() and not not_ordered(call) else None
    weights = None if ordered is None else call.scores.new_empty(call.tokens, call.k, dtype=torch.float32)
    for some in token_slices(call):
        octets = (
            1 if ordered is not None else gemm_persistent.octets_for(len(parts[some]) * call.k, call.experts, call.x.device)
        )
        here = None if weights is None else weights[some]
        ids, blocks = routing_assign.assign_chosen(call.scores[some], call.routing, call.bias, octets, here)
        _fetch(call, ids, blocks.owner[: blocks.most])
        gemm_persistent.multiply(call.x[some], call.k, blocks, call.experts, parts[some], ordered or (0, 0))
        chosen.append(ids)
    ids = chosen[0] if len(chosen) == 1 else torch.cat(chosen)
    if weights is not None:
        return summed(parts, None, ids, weights, call.experts.count, call.x.dtype, epilogue, early=True)
    return summed_by_scores(parts, ids, call.scores, call.routing, call.x.dtype, epilogue)


def _route_first(call: MixtureCall) -> Tensor:
    epilogue = Epilogue(call.h, reference.shared_result(call.x, call.shared), call.shared_gate)
    ids, weights = reference.route(call.scores, call.routing, call.bias)
    _fetch(call, ids)
    return EXPERTS(ExpertCall(call.x, ids, call.experts, weights=weights, epilogue=epilogue))


def _then_shared(call: MixtureCall, refused: str | None = "") -> Next:
    """Return the products of a shared expert that runs separately."""
    shared = call.shared
    if refused is None or not isinstance(shared, SharedExpert):
        return []
    inside = call.x.new_empty(call.tokens, shared.inner)
    first, second = Product(call.x, shared.first, gated=shared.gate is not None), Product(inside, [shared.down])
    return [(PRODUCTS, first), (PRODUCTS, second)]


def _then_experts(call: MixtureCall, epilogue: Tensor | None = None) -> Next:
    ids = call.x.new_empty(call.tokens, call.k, dtype=torch.int32)
    pairs = ExpertCall(call.x, ids, call.experts, epilogue=Epilogue(epilogue))
    return [(ROUTERS, RouteCall(call.scores, call.routing, call.bias)), (EXPERTS, pairs), *_then_shared(call)]


MIXTURES: Routes[MixtureCall, Tensor] = Routes(
    Route("matvec_tma", _refuses_mix_tma, _mix_tma, lambda call: _then_shared(call, not_extra_expert(call))),
    Route("slots", refuses_mix_slots, _mix_slots, lambda call: _then_shared(call, not_in_slot(call)), invariant=True),
    Route("step by step", _refuses_steps, _mix_by_steps, _then_experts, invariant=True),
    Route("persistent", refuses_mix_persistent, _mix_persistent, _then_shared, invariant=True),
    Route("route first", _refuses_route_first, _route_first, lambda call: _then_experts(call, call.h), invariant=True),
)
ROUTES: dict[str, Routes[Any, Any]] = {
    "route": ROUTERS,
    "expert_mlp": EXPERTS,
    "expert_parts": EXPERTS,
    "mixture": MIXTURES,
    "pooled_mixture": MIXTURES,
}
