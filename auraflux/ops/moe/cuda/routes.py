"""Expert kernels on CUDA: the first route below that does not refuse a call.

With few (token, expert) pairs each pair reads its expert separately; for one or two tokens these kernels also select the
experts. Hundreds of pairs are grouped into blocks of 8 or 16 of one expert, thousands into wgmma tiles. Formats other than
4 bits in groups of 64 have a matvec for few pairs and a grouped GEMM for more.

Inside `invariant` any number of pairs is grouped into blocks that sum in the same order as `slots`, where that serves few
pairs; otherwise the grouped GEMM runs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from auraflux.ops import route_speed as speed
from auraflux.ops._dispatch import is_invariant
from auraflux.ops.gpu.device import multiprocessors, not_hopper
from auraflux.ops.gpu.sizes import cached_per_weight
from auraflux.ops.linear.cuda.call import Call as Product
from auraflux.ops.linear.cuda.routes import PRODUCTS
from auraflux.ops.moe import reference
from auraflux.ops.moe.cuda.call import ExpertCall, MixtureCall, RouteCall
from auraflux.ops.moe.cuda.gemm import grouped as gemm_grouped
from auraflux.ops.moe.cuda.gemm import grouped_wgmma_launch as gemm_grouped_wgmma_launch
from auraflux.ops.moe.cuda.gemm import persistent as gemm_persistent
from auraflux.ops.moe.cuda.matvec import any_format as matvec_any_format
from auraflux.ops.moe.cuda.matvec import few_tokens_launch
from auraflux.ops.moe.cuda.matvec import tma_launch as matvec_tma_launch
from auraflux.ops.moe.cuda.routing import assign as routing_assign
from auraflux.ops.moe.cuda.routing import kernels as routing_kernels
from auraflux.ops.moe.cuda.stacks import Epilogue, gate_of, summed, summed_by_scores, unsupported
from auraflux.ops.moe.experts import Experts, SharedExpert, Stack
from auraflux.ops.routes import Route, Routes
from auraflux.quant import QTensor

BF16 = torch.bfloat16
INT4 = (4, 64, 1, BF16)  # the most common format: 4 bits in groups of 64
WIDEST = 8192
FEW_PAIRS = 32  # up to here each pair reads its expert separately
MOST_EXPERTS = 4096  # that a program selects from
MOST_RANKED = 512  # experts; up to here all pairs of scores are compared where tokens are few

NOT_INT4 = "weights are not 4 bits in groups of 64, scales in bf16"
UNALIGNED = "an address is not a multiple of 16 bytes"
NO_ROOM = "its stages do not fit into shared memory"
Next = list[tuple[Routes[Any, Any], Any]]


def _not_few(call: ExpertCall | MixtureCall) -> str | None:
    return None if 0 < call.pairs <= FEW_PAIRS else f"{call.pairs} pairs; it is for 1 to {FEW_PAIRS}"


def _not_copied(stack: Stack) -> str | None:
    """Return why weights cannot be copied in 16-byte units, codes of 16 rows and 256 inputs at a time."""
    return _not_tiled(stack) if isinstance(stack, QTensor) else NOT_INT4


@cached_per_weight
def _not_tiled(stack: QTensor) -> str | None:
    if stack.format != INT4 or stack.biases is None:
        return NOT_INT4
    rows, width = stack.shape[-2:]
    if rows % 16 or width % 256:
        return f"{rows} x {width} is not a multiple of 16 x 256 tiles"
    if width > WIDEST:
        return f"width {width} is above {WIDEST}"
    packed, scales, biases = parts = stack.packed, stack.scales, stack.biases
    several = len(stack.shape) == 3
    if not all((part[0] if several else part).is_contiguous() for part in parts):
        return "the arrays of one expert are not contiguous"
    # for a single matrix this is the row stride: with less, as with 256 inputs, `slots` gave wrong sums on an H200
    steps = packed.stride(0) * 4 | scales.stride(0) * 2
    if (packed.data_ptr() | scales.data_ptr() | biases.data_ptr() | steps) % 16:
        return "an address or the first dimension's stride is not a multiple of 16 bytes"
    return None if scales.stride(0) == biases.stride(0) else "scales and biases have different strides"


def _not_int4(x: Tensor, experts: Experts) -> str | None:
    """Return why tokens and experts are not bf16 with 4-bit weights in groups of 64."""
    if x.dtype is not BF16:
        return "activations are not bf16"
    if not (experts.activation is experts.gate_bias is experts.up_bias is experts.down_bias is None):
        return "experts have biases or an activation other than silu"
    if reason := not_hopper(x.device) or (UNALIGNED if x.data_ptr() % 16 else None):
        return reason
    return _not_copied(gate_of(experts)) or _not_copied(experts.up) or _not_copied(experts.down)


def _not_in_slots(call: ExpertCall | MixtureCall) -> str | None:
    """Return why the hidden vectors of a token's experts do not fit shared memory together."""
    if call.k * (call.experts.inner // 64) > few_tokens_launch.MOST_GROUPS:
        return (
            f"{call.k} hidden vectors of {call.experts.inner}; it is for {64 * few_tokens_launch.MOST_GROUPS} elements in all"
        )
    return _not_int4(call.x, call.experts)


def _not_persistent(call: ExpertCall | MixtureCall) -> str | None:
    experts = call.experts
    most = gemm_persistent.most_pairs(experts.count)
    # inside `invariant` more tokens are split over several launches
    if (call.tokens > routing_assign.MOST_TOKENS or call.pairs > most) and not is_invariant():
        return f"{call.tokens} tokens, {call.pairs} pairs; it is for up to {routing_assign.MOST_TOKENS}, {most}"
    if call.k > routing_assign.MOST_SLOTS or experts.count > routing_assign.MOST_EXPERTS:
        return (
            f"{call.k} of {experts.count} experts; it is for up to {routing_assign.MOST_SLOTS} of {routing_assign.MOST_EXPERTS}"
        )
    if reason := _not_int4(call.x, experts):
        return reason
    return None if gemm_persistent.ring_sizes(experts.inner)[0] and gemm_persistent.ring_sizes(experts.hidden)[0] else NO_ROOM


def _refuses_nothing(call: ExpertCall) -> str | None:
    return "the call is not empty" if call.pairs * call.experts.hidden else None


def _refuses_slots(call: ExpertCall) -> str | None:
    return (
        _not_few(call) or _not_in_slots(call) or ("the sums have an epilogue" if call.epilogue.residual is not None else None)
    )


def _refuses_wgmma(call: ExpertCall) -> str | None:
    made, count = gemm_grouped_wgmma_launch, call.experts.count
    least = min(made.TILED_PAIRS, max(made.SOME_PAIRS, made.SOME_EACH * count))
    if call.pairs < least:
        return f"{call.pairs} pairs of {count} experts; it is for {least} and more"
    return _not_int4(call.x, call.experts)


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


def _refuses_residual(call: MixtureCall) -> str | None:
    """Return why few pairs are not multiplied and added to the residual stream in one kernel."""
    return _not_few(call) or _other_stream(call)


def _other_stream(call: MixtureCall) -> str | None:
    return None if call.h.dtype is call.x.dtype else "the residual stream is not in x's dtype"


def _biased_softmax(call: MixtureCall | RouteCall) -> str | None:
    """Return why a kernel that compares logits cannot select experts."""
    return "softmax scores have a bias" if call.bias is not None and call.routing.scoring != "sigmoid" else None


def _refuses_mix_tma(call: MixtureCall) -> str | None:
    if reason := _refuses_residual(call) or _biased_softmax(call):
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
    sizes = hidden, inner, slots, multiprocessors(call.x.device)
    (_, _, up_deep), (_, tiles, down_deep) = made.up_sizes(*sizes), made.down_sizes(*sizes)
    if up_deep < 2 or down_deep < 2 or tiles * 8 > 32 * made.DOWN_WARPS:
        return NO_ROOM
    return _not_int4(call.x, experts)


def _not_ordered(call: MixtureCall) -> str | None:
    """Return why `persistent` cannot sum in the order of `slots`."""
    if call.shared is not None:
        return "there is a shared expert"
    if call.experts.hidden > few_tokens_launch.MOST_ORDERED:
        return f"{call.experts.hidden} inputs; a warp has one quad of up to {few_tokens_launch.MOST_ORDERED}"
    return _not_persistent(call) or _refuses_mix_slots(call, any_pairs=True)


def _refuses_mix_slots(call: MixtureCall, any_pairs: bool = False) -> str | None:
    if not any_pairs and is_invariant() and (reason := _not_ordered(call)):
        return reason
    few = None if any_pairs else _not_few(call)
    if reason := few or _other_stream(call) or _biased_softmax(call):
        return reason
    if call.routing.groups != 1 or call.experts.count > few_tokens_launch.MOST_CHOICES:
        most = few_tokens_launch.MOST_CHOICES
        return f"{call.experts.count} experts in {call.routing.groups} groups; it is for up to {most} in one"
    return _not_in_slots(call)


def _refuses_steps(call: MixtureCall) -> str | None:
    if call.h.dtype is not call.x.dtype or not call.x.numel():
        return None
    return (
        None
        if not is_invariant() and not _not_few(call) and not _not_in_slots(call)
        else "a fused kernel adds the results to the residual stream"
    )


def _refuses_mix_persistent(call: MixtureCall) -> str | None:
    if call.pairs <= FEW_PAIRS and not is_invariant():
        return f"{call.pairs} pairs; it is for more than {FEW_PAIRS}"
    if reason := _biased_softmax(call):
        return reason
    return f"experts are in {call.routing.groups} groups" if call.routing.groups != 1 else _not_persistent(call)


def _refuses_route_first(call: MixtureCall) -> str | None:
    return unsupported(call.experts)


def _not_extra_expert(call: MixtureCall) -> str | None:
    """Return why the shared expert cannot be one more expert of every token, of their width and format."""
    shared, inner = call.shared, call.experts.inner
    if not isinstance(shared, SharedExpert):
        return "no shared expert's weights are given"
    if shared.gate is None:
        return "the shared expert has no gate"
    if shared.inner != inner:
        return f"the shared expert's inner width is {shared.inner}, the others' {inner}"
    return _not_copied(shared.gate) or _not_copied(shared.up) or _not_copied(shared.down)


def _not_in_slot(call: MixtureCall) -> str | None:
    """Return why the shared expert cannot take a slot of the `slots` kernels."""
    if call.k >= few_tokens_launch.MOST_SLOTS or (call.k + 1) * (call.experts.inner // 64) > few_tokens_launch.MOST_GROUPS:
        return f"{call.k} experts leave no slot for it"
    return _not_extra_expert(call)


def _shared(call: MixtureCall, refused: str | None) -> Tensor | SharedExpert | None:
    """Return the shared expert's weights where the kernel handles them, else its output."""
    return call.shared if refused is None else reference.shared_result(call.x, call.shared)


def _mix_tma(call: MixtureCall) -> Tensor:
    shared = _shared(call, _not_extra_expert(call))
    return matvec_tma_launch.mix(call.x, call.scores, call.routing, call.bias, call.experts, call.h, shared, call.shared_gate)


def _mix_slots(call: MixtureCall) -> Tensor:
    shared = _shared(call, _not_in_slot(call))
    return few_tokens_launch.mix(call.x, call.scores, call.routing, call.bias, call.experts, call.h, shared, call.shared_gate)


def _mix_by_steps(call: MixtureCall) -> Tensor:
    return reference.mixture_by_steps(
        call.x, call.scores, call.routing, call.experts, call.h, call.bias, call.shared, call.shared_gate
    )


def _token_slices(call: ExpertCall | MixtureCall) -> list[slice]:
    """Return slices of tokens that `persistent` handles in one launch."""
    most = min(routing_assign.MOST_TOKENS, max(1, gemm_persistent.most_pairs(call.experts.count) // call.k))
    return [slice(first, first + most) for first in range(0, call.tokens, most)]


def _mix_persistent(call: MixtureCall) -> Tensor:
    epilogue = Epilogue(call.h, reference.shared_result(call.x, call.shared), call.shared_gate)
    parts = call.x.new_empty(call.tokens, call.k, call.experts.hidden, dtype=torch.float32)
    chosen = []
    ordered = few_tokens_launch.order_of(call.experts, call.k) if is_invariant() and not _not_ordered(call) else None
    weights = None if ordered is None else call.scores.new_empty(call.tokens, call.k, dtype=torch.float32)
    for some in _token_slices(call):
        octets = 1 if ordered is not None else gemm_persistent.octets_for(len(parts[some]) * call.k, call.experts)
        here = None if weights is None else weights[some]
        ids, blocks = routing_assign.assign_chosen(call.scores[some], call.routing, call.bias, octets, here)
        gemm_persistent.multiply(call.x[some], call.k, blocks, call.experts, parts[some], ordered or (0, 0))
        chosen.append(ids)
    ids = chosen[0] if len(chosen) == 1 else torch.cat(chosen)
    if weights is not None:
        return summed(parts, None, ids, weights, call.experts.count, call.x.dtype, epilogue, early=True)
    return summed_by_scores(parts, ids, call.scores, call.routing, call.x.dtype, epilogue)


def _persistent(call: ExpertCall) -> Tensor:
    def write_parts(x: Tensor, ids: Tensor, experts: Experts, parts: Tensor) -> None:
        for some in _token_slices(call):
            gemm_persistent.write_parts(x[some], ids[some], experts, parts[some])

    return _by_parts(call, write_parts, early=True)


def _route_first(call: MixtureCall) -> Tensor:
    epilogue = Epilogue(call.h, reference.shared_result(call.x, call.shared), call.shared_gate)
    ids, weights = reference.route(call.scores, call.routing, call.bias)
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


def _refuses_any_token(call: RouteCall) -> str | None:
    return "the call has tokens" if call.logits.shape[0] else None


def _refuses_rank(call: RouteCall) -> str | None:
    tokens, experts = call.logits.shape
    if tokens > routing_kernels.FEW_TOKENS or experts > MOST_RANKED:
        return f"{tokens} tokens, {experts} experts; it is for up to {routing_kernels.FEW_TOKENS}, {MOST_RANKED}"
    return _biased_softmax(call) or (None if call.routing.groups == 1 else f"experts are in {call.routing.groups} groups")


def _refuses_search(call: RouteCall) -> str | None:
    experts, groups = call.logits.shape[1], call.routing.groups
    if routing_kernels.padded_experts(experts, groups) > MOST_EXPERTS:
        return f"{experts} experts in {groups} groups, more than {MOST_EXPERTS}"
    return _biased_softmax(call)


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
    Route("matvec", _not_few, lambda call: _by_parts(call, matvec_any_format.write_parts), speed=speed.MATVEC_SLOWER),
    Route("persistent", _not_persistent, _persistent, invariant=True, speed=speed.GEMM),
    Route("grouped_wgmma", _refuses_wgmma, _wgmma, speed=speed.GEMM),
    Route(
        "grouped_gemm",
        _never,
        lambda call: _by_parts(call, gemm_grouped.write_parts, call.x.dtype),
        invariant=True,
        speed=speed.GEMM_TILED,
    ),
)
MIXTURES: Routes[MixtureCall, Tensor] = Routes(
    Route("matvec_tma", _refuses_mix_tma, _mix_tma, lambda call: _then_shared(call, _not_extra_expert(call))),
    Route("slots", _refuses_mix_slots, _mix_slots, lambda call: _then_shared(call, _not_in_slot(call)), invariant=True),
    Route("step by step", _refuses_steps, _mix_by_steps, _then_experts, invariant=True),
    Route("persistent", _refuses_mix_persistent, _mix_persistent, _then_shared, invariant=True),
    Route("route first", _refuses_route_first, _route_first, lambda call: _then_experts(call, call.h), invariant=True),
)
ROUTES: dict[str, Routes[Any, Any]] = {
    "route": ROUTERS,
    "expert_mlp": EXPERTS,
    "expert_parts": EXPERTS,
    "mixture": MIXTURES,
}
