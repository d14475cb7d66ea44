"""Routing and expert kernels on CUDA: the first route below that does not refuse a call.

With few (token, expert) pairs each pair reads its expert separately. Hundreds of pairs are grouped into blocks of 8 or 16 of
one expert, thousands into wgmma tiles. Formats other than 4 bits in groups of 64 have a matvec for few pairs and a grouped
GEMM for more.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from auraflux.ops import route_speed as speed
from auraflux.ops.gpu.device import not_wgmma
from auraflux.ops.moe.cuda.call import ExpertCall, MixtureCall, RouteCall
from auraflux.ops.moe.cuda.gemm import grouped as gemm_grouped
from auraflux.ops.moe.cuda.gemm import grouped_mma as gemm_grouped_mma
from auraflux.ops.moe.cuda.gemm import grouped_wgmma_launch as gemm_grouped_wgmma_launch
from auraflux.ops.moe.cuda.gemm import persistent as gemm_persistent
from auraflux.ops.moe.cuda.matvec import any_format as matvec_any_format
from auraflux.ops.moe.cuda.matvec import few_tokens_launch
from auraflux.ops.moe.cuda.refusals import biased_softmax, not_few, not_in_slots, not_int4, not_mma, not_persistent
from auraflux.ops.moe.cuda.routing import assign as routing_assign
from auraflux.ops.moe.cuda.routing import kernels as routing_kernels
from auraflux.ops.moe.cuda.stacks import summed
from auraflux.ops.moe.experts import Experts
from auraflux.ops.routes import Route, Routes

MOST_EXPERTS = 4096  # that a program selects from
MOST_RANKED = 512  # experts; up to here all pairs of scores are compared where tokens are few


def _refuses_nothing(call: ExpertCall) -> str | None:
    return "the call is not empty" if call.pairs * call.experts.hidden else None


def _refuses_slots(call: ExpertCall) -> str | None:
    return not_few(call) or not_in_slots(call) or ("the sums have an epilogue" if call.epilogue.residual is not None else None)


def _refuses_wgmma(call: ExpertCall) -> str | None:
    made, count = gemm_grouped_wgmma_launch, call.experts.count
    least = min(made.TILED_PAIRS, max(made.SOME_PAIRS, made.SOME_EACH * count))
    if call.pairs < least:
        return f"{call.pairs} pairs of {count} experts; it is for {least} and more"
    return not_wgmma(call.x.device) or not_int4(call.x, call.experts)


def _never(call: ExpertCall) -> None:
    return None


def _nothing(call: ExpertCall) -> Tensor:
    return torch.zeros_like(call.x) if call.parts is None else call.parts


def _slots(call: ExpertCall) -> Tensor:
    out = torch.empty_like(call.x) if call.parts is None else call.parts
    return few_tokens_launch.multiply(call.x, call.ids, call.weights, call.experts, out)


def _wgmma(call: ExpertCall) -> Tensor:
    if call.parts is not None:
        gemm_grouped_wgmma_launch.write_parts(call.x, call.ids, call.experts, call.parts)
        return call.parts
    found, spots = gemm_grouped_wgmma_launch.multiply(call.x, call.ids, call.experts)
    return _summed(call, found, spots)


def _by_parts(
    call: ExpertCall,
    write_parts: Callable[[Tensor, Tensor, Experts, Tensor], None],
    dtype: torch.dtype = torch.float32,
    early: bool = False,
) -> Tensor:
    parts = call.parts
    if parts is None:
        parts = call.x.new_empty(*call.ids.shape, call.experts.hidden, dtype=dtype)
    write_parts(call.x, call.ids, call.experts, parts)
    return parts if call.parts is not None else _summed(call, parts, None, early)


def _summed(call: ExpertCall, parts: Tensor, spots: Tensor | None, early: bool = False) -> Tensor:
    assert call.weights is not None
    return summed(parts, spots, call.ids, call.weights, call.experts.count, call.x.dtype, call.epilogue, early)


def token_slices(call: ExpertCall | MixtureCall) -> list[slice]:
    """Return slices of tokens that `persistent` handles in one launch."""
    most = min(routing_assign.MOST_TOKENS, max(1, gemm_persistent.most_pairs(call.experts.count) // call.k))
    return [slice(first, first + most) for first in range(0, call.tokens, most)]


def _persistent(call: ExpertCall) -> Tensor:
    def write_parts(x: Tensor, ids: Tensor, experts: Experts, parts: Tensor) -> None:
        for some in token_slices(call):
            gemm_persistent.write_parts(x[some], ids[some], experts, parts[some])

    return _by_parts(call, write_parts, early=True)


def _refuses_any_token(call: RouteCall) -> str | None:
    return "the call has tokens" if call.logits.shape[0] else None


def _refuses_rank(call: RouteCall) -> str | None:
    tokens, experts = call.logits.shape
    if tokens > routing_kernels.FEW_TOKENS or experts > MOST_RANKED:
        return f"{tokens} tokens, {experts} experts; it is for up to {routing_kernels.FEW_TOKENS}, {MOST_RANKED}"
    return biased_softmax(call) or (None if call.routing.groups == 1 else f"experts are in {call.routing.groups} groups")


def _refuses_search(call: RouteCall) -> str | None:
    experts, groups = call.logits.shape[1], call.routing.groups
    if routing_kernels.padded_experts(experts, groups) > MOST_EXPERTS:
        return f"{experts} experts in {groups} groups, more than {MOST_EXPERTS}"
    return biased_softmax(call)


def _no_tokens(call: RouteCall) -> tuple[Tensor, Tensor]:
    return routing_kernels.chosen(0, call.routing.k, call.logits.device)


ROUTERS: Routes[RouteCall, tuple[Tensor, Tensor]] = Routes(
    Route("nothing to choose", _refuses_any_token, _no_tokens, invariant=True),
    Route("rank_kernel", _refuses_rank, lambda call: routing_kernels.rank(*call)),
    Route("route_kernel", _refuses_search, lambda call: routing_kernels.search(*call), invariant=True),
)
EXPERTS: Routes[ExpertCall, Tensor] = Routes(
    Route("nothing to multiply", _refuses_nothing, _nothing, invariant=True),
    Route("slots", _refuses_slots, _slots, speed=speed.MATVEC),
    Route("matvec", not_few, lambda call: _by_parts(call, matvec_any_format.write_parts), speed=speed.MATVEC_SLOWER),
    Route("persistent", not_persistent, _persistent, invariant=True, speed=speed.GEMM),
    Route("grouped_wgmma", _refuses_wgmma, _wgmma, speed=speed.GEMM),
    Route(
        "grouped_mma",
        not_mma,
        lambda call: _by_parts(call, gemm_grouped_mma.write_parts, call.x.dtype),
        speed=speed.GEMM,
    ),
    Route(
        "grouped_gemm",
        _never,
        lambda call: _by_parts(call, gemm_grouped.write_parts, call.x.dtype),
        invariant=True,
        speed=speed.GEMM_TILED,
    ),
)
