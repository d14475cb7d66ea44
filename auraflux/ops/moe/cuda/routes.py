"""Which kernels take tokens through their experts on CUDA: the first below that do not refuse.

A few pairs (a token and one of its experts) read their experts each for itself; for one or two tokens the kernels choose the
experts, too. Hundreds are brought into blocks of 8 or 16 of one expert, thousands into tiles for wgmma. What is not 4 bits in
groups of 64 has a matvec for a few pairs and a grouped GEMM for more.

Inside `invariant` any number of pairs is brought into blocks, which add up as `slots` does where that serves a few pairs; or
goes through the grouped GEMM.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from auraflux.ops._dispatch import is_invariant
from auraflux.ops.hopper.device import multiprocessors, not_hopper
from auraflux.ops.hopper.sizes import once_for_each
from auraflux.ops.linear.cuda.call import Call as Product
from auraflux.ops.linear.cuda.routes import PRODUCTS
from auraflux.ops.moe import reference
from auraflux.ops.moe.cuda import (
    assign,
    grouped_gemm,
    grouped_wgmma_launch,
    matvec,
    matvec_tma_launch,
    persistent,
    routing,
    slots_launch,
)
from auraflux.ops.moe.cuda.call import Choice, Mixture, Pairs
from auraflux.ops.moe.cuda.stacks import Added, gate_of, not_served, summed, summed_by_scores
from auraflux.ops.moe.experts import Experts, SharedExpert, Stack
from auraflux.ops.routes import Route, Routes
from auraflux.quant import QTensor

BF16 = torch.bfloat16
INT4 = (4, 64, 1, BF16)  # the commonest format: 4 bits in groups of 64
WIDEST = 8192
FEW_PAIRS = 32  # up to here each reads its expert for itself
MOST_EXPERTS = 4096  # that a program chooses among
MOST_RANKED = 512  # experts; up to here each is compared with each where tokens are few

NOT_INT4 = "weights are not 4 bits in groups of 64, scales in bf16"
UNALIGNED = "an address is not a multiple of 16 bytes"
NO_ROOM = "its stages do not fit into shared memory"
Next = list[tuple[Routes[Any, Any], Any]]


def _not_few(call: Pairs | Mixture) -> str | None:
    return None if 0 < call.pairs <= FEW_PAIRS else f"{call.pairs} pairs; it is for 1 to {FEW_PAIRS}"


def _not_copied(stack: Stack) -> str | None:
    """Why weights are not copied in pieces of 16 bytes, codes of 16 rows and 256 inputs at a time."""
    return _not_tiled(stack) if isinstance(stack, QTensor) else NOT_INT4


@once_for_each
def _not_tiled(stack: QTensor) -> str | None:
    if stack.format != INT4 or stack.biases is None:
        return NOT_INT4
    rows, width = stack.shape[-2:]
    if rows % 16 or width % 256:
        return f"{rows} x {width} is not whole tiles of 16 x 256"
    if width > WIDEST:
        return f"width {width} is above {WIDEST}"
    packed, scales, biases = parts = stack.packed, stack.scales, stack.biases
    several = len(stack.shape) == 3
    if not all((part[0] if several else part).is_contiguous() for part in parts):
        return "the arrays of one expert are not contiguous"
    # of a single matrix the step from row to row: with less, as 256 inputs have, `slots` gave wrong sums on an H200
    steps = packed.stride(0) * 4 | scales.stride(0) * 2
    if (packed.data_ptr() | scales.data_ptr() | biases.data_ptr() | steps) % 16:
        return "an address, or a step of the first dimension, is not a multiple of 16 bytes"
    return None if scales.stride(0) == biases.stride(0) else "scales and biases do not lie equally far apart"


def _not_int4(x: Tensor, experts: Experts) -> str | None:
    """Why tokens and experts are not in the commonest format."""
    if x.dtype is not BF16:
        return "activations are not bf16"
    if not (experts.activation is experts.gate_bias is experts.up_bias is experts.down_bias is None):
        return "experts have biases or another activation than silu"
    if reason := not_hopper(x.device) or (UNALIGNED if x.data_ptr() % 16 else None):
        return reason
    return _not_copied(gate_of(experts)) or _not_copied(experts.up) or _not_copied(experts.down)


def _not_in_slots(call: Pairs | Mixture) -> str | None:
    """Why the hidden vectors of a token's experts do not lie in shared memory together."""
    if call.k * (call.experts.inner // 64) > slots_launch.MOST_GROUPS:
        return f"{call.k} hidden vectors of {call.experts.inner}; it is for {64 * slots_launch.MOST_GROUPS} elements in all"
    return _not_int4(call.x, call.experts)


def _not_persistent(call: Pairs | Mixture) -> str | None:
    experts = call.experts
    most = persistent.most_pairs(experts.count)
    # inside `invariant` it takes more tokens in pieces
    if (call.tokens > assign.MOST_TOKENS or call.pairs > most) and not is_invariant():
        return f"{call.tokens} tokens, {call.pairs} pairs; it is for up to {assign.MOST_TOKENS}, {most}"
    if call.k > assign.MOST_SLOTS or experts.count > assign.MOST_EXPERTS:
        return f"{call.k} of {experts.count} experts; it is for up to {assign.MOST_SLOTS} of {assign.MOST_EXPERTS}"
    if reason := _not_int4(call.x, experts):
        return reason
    return None if persistent.ring_sizes(experts.inner)[0] and persistent.ring_sizes(experts.hidden)[0] else NO_ROOM


def _refuses_nothing(call: Pairs) -> str | None:
    return "there is something to multiply" if call.pairs * call.experts.hidden else None


def _refuses_slots(call: Pairs) -> str | None:
    return _not_few(call) or _not_in_slots(call) or ("the sums are added to" if call.added.residual is not None else None)


def _refuses_wgmma(call: Pairs) -> str | None:
    made, count = grouped_wgmma_launch, call.experts.count
    least = min(made.TILED_PAIRS, max(made.SOME_PAIRS, made.SOME_EACH * count))
    if call.pairs < least:
        return f"{call.pairs} pairs of {count} experts; it is for {least} and more"
    return _not_int4(call.x, call.experts)


def _never(call: Pairs) -> None:
    return None


def _nothing(call: Pairs) -> Tensor:
    return torch.zeros_like(call.x) if call.parts is None else call.parts


def _slots(call: Pairs) -> Tensor:
    out = torch.empty_like(call.x) if call.parts is None else call.parts
    return slots_launch.multiply(call.x, call.ids, call.weights, call.experts, out)


def _wgmma(call: Pairs) -> Tensor:
    if call.parts is not None:
        grouped_wgmma_launch.write_parts(call.x, call.ids, call.experts, call.parts)
        return call.parts
    found, spots = grouped_wgmma_launch.multiply(call.x, call.ids, call.experts)
    return _summed(call, found, spots)


def _by_parts(
    call: Pairs,
    write_parts: Callable[[Tensor, Tensor, Experts, Tensor], None],
    dtype: torch.dtype = torch.float32,
    early: bool = False,
) -> Tensor:
    parts = call.parts
    if parts is None:
        parts = call.x.new_empty(*call.ids.shape, call.experts.hidden, dtype=dtype)
    write_parts(call.x, call.ids, call.experts, parts)
    return parts if call.parts is not None else _summed(call, parts, None, early)


def _summed(call: Pairs, parts: Tensor, spots: Tensor | None, early: bool = False) -> Tensor:
    assert call.weights is not None
    return summed(parts, spots, call.ids, call.weights, call.experts.count, call.x.dtype, call.added, early)


def _refuses_residual(call: Mixture) -> str | None:
    """Why few pairs are not multiplied and added to the residual stream by one kernel."""
    return _not_few(call) or _other_stream(call)


def _other_stream(call: Mixture) -> str | None:
    return None if call.h.dtype is call.x.dtype else "the residual stream is not in x's dtype"


def _biased_softmax(call: Mixture | Choice) -> str | None:
    """Why a kernel that compares logits does not choose."""
    return "softmax scores have a bias" if call.bias is not None and call.routing.scoring != "sigmoid" else None


def _refuses_mix_tma(call: Mixture) -> str | None:
    if reason := _refuses_residual(call) or _biased_softmax(call):
        return reason
    made, rule, experts = matvec_tma_launch, call.routing, call.experts
    hidden, inner, slots = experts.hidden, experts.inner, call.k + 1
    if hidden * inner < made.LEAST_WEIGHTS:
        return f"experts of {hidden} x {inner} are small: slots has more tiles under way"
    if inner % 512 or inner > 512 * made.DOWN_WARPS:
        return f"inner width {inner} is no multiple of 512, or above {512 * made.DOWN_WARPS}"
    if slots > made.MOST_SLOTS or experts.count > slots_launch.MOST_CHOICES:
        return f"{call.k} of {experts.count} experts; it is for up to {made.MOST_SLOTS - 1} of {slots_launch.MOST_CHOICES}"
    if rule.groups != 1 and experts.count != made.GROUP * rule.groups:
        return f"{experts.count} experts in {rule.groups} groups; it is for groups of {made.GROUP}"
    sizes = hidden, inner, slots, multiprocessors(call.x.device)
    (_, _, up_deep), (_, tiles, down_deep) = made.up_sizes(*sizes), made.down_sizes(*sizes)
    if up_deep < 2 or down_deep < 2 or tiles * 8 > 32 * made.DOWN_WARPS:
        return NO_ROOM
    return _not_int4(call.x, experts)


def _not_ordered(call: Mixture) -> str | None:
    """Why `persistent` does not add up as `slots` does."""
    if call.shared is not None:
        return "there is a shared expert"
    if call.experts.hidden > slots_launch.MOST_ORDERED:
        return f"{call.experts.hidden} inputs; up to {slots_launch.MOST_ORDERED} a warp has one quad of them"
    return _not_persistent(call) or _refuses_mix_slots(call, any_pairs=True)


def _refuses_mix_slots(call: Mixture, any_pairs: bool = False) -> str | None:
    if not any_pairs and is_invariant() and (reason := _not_ordered(call)):
        return reason
    few = None if any_pairs else _not_few(call)
    if reason := few or _other_stream(call) or _biased_softmax(call):
        return reason
    if call.routing.groups != 1 or call.experts.count > slots_launch.MOST_CHOICES:
        most = slots_launch.MOST_CHOICES
        return f"{call.experts.count} experts in {call.routing.groups} groups; it is for up to {most} in one"
    return _not_in_slots(call)


def _refuses_steps(call: Mixture) -> str | None:
    if call.h.dtype is not call.x.dtype or not call.x.numel():
        return None
    return (
        None
        if not is_invariant() and not _not_few(call) and not _not_in_slots(call)
        else "results are added to the residual stream as they are summed"
    )


def _refuses_mix_persistent(call: Mixture) -> str | None:
    if call.pairs <= FEW_PAIRS and not is_invariant():
        return f"{call.pairs} pairs; it is for more than {FEW_PAIRS}"
    if reason := _biased_softmax(call):
        return reason
    return f"experts lie in {call.routing.groups} groups" if call.routing.groups != 1 else _not_persistent(call)


def _refuses_route_first(call: Mixture) -> str | None:
    return not_served(call.experts)


def _not_beside(call: Mixture) -> str | None:
    """Why the shared expert is not one more expert of every token: it is of their width and format."""
    shared, inner = call.shared, call.experts.inner
    if not isinstance(shared, SharedExpert):
        return "there are no weights of a shared expert"
    if shared.gate is None:
        return "the shared expert has no gate"
    if shared.inner != inner:
        return f"the shared expert is {shared.inner} wide inside, the others {inner}"
    return _not_copied(shared.gate) or _not_copied(shared.up) or _not_copied(shared.down)


def _not_in_slot(call: Mixture) -> str | None:
    """Why the shared expert is not in a slot beside the others."""
    if call.k >= slots_launch.MOST_SLOTS or (call.k + 1) * (call.experts.inner // 64) > slots_launch.MOST_GROUPS:
        return f"there is no slot for it beside {call.k} experts"
    return _not_beside(call)


def _shared(call: Mixture, refused: str | None) -> Tensor | SharedExpert | None:
    """The shared expert where it goes along with the others, else its result."""
    return call.shared if refused is None else reference.shared_result(call.x, call.shared)


def _mix_tma(call: Mixture) -> Tensor:
    shared = _shared(call, _not_beside(call))
    return matvec_tma_launch.mix(call.x, call.scores, call.routing, call.bias, call.experts, call.h, shared, call.shared_gate)


def _mix_slots(call: Mixture) -> Tensor:
    shared = _shared(call, _not_in_slot(call))
    return slots_launch.mix(call.x, call.scores, call.routing, call.bias, call.experts, call.h, shared, call.shared_gate)


def _mix_by_steps(call: Mixture) -> Tensor:
    return reference.mixture_by_steps(
        call.x, call.scores, call.routing, call.experts, call.h, call.bias, call.shared, call.shared_gate
    )


def _pieces(call: Pairs | Mixture) -> list[slice]:
    """Tokens that `persistent` takes together."""
    most = min(assign.MOST_TOKENS, max(1, persistent.most_pairs(call.experts.count) // call.k))
    return [slice(first, first + most) for first in range(0, call.tokens, most)]


def _mix_persistent(call: Mixture) -> Tensor:
    added = Added(call.h, reference.shared_result(call.x, call.shared), call.shared_gate)
    parts = call.x.new_empty(call.tokens, call.k, call.experts.hidden, dtype=torch.float32)
    chosen = []
    ordered = slots_launch.order_of(call.experts, call.k) if is_invariant() and not _not_ordered(call) else None
    weights = None if ordered is None else call.scores.new_empty(call.tokens, call.k, dtype=torch.float32)
    for some in _pieces(call):
        octets = 1 if ordered is not None else persistent.octets_for(len(parts[some]) * call.k, call.experts)
        here = None if weights is None else weights[some]
        ids, blocks = assign.assign_chosen(call.scores[some], call.routing, call.bias, octets, here)
        persistent.multiply(call.x[some], call.k, blocks, call.experts, parts[some], ordered or (0, 0))
        chosen.append(ids)
    ids = chosen[0] if len(chosen) == 1 else torch.cat(chosen)
    if weights is not None:
        return summed(parts, None, ids, weights, call.experts.count, call.x.dtype, added, early=True)
    return summed_by_scores(parts, ids, call.scores, call.routing, call.x.dtype, added)


def _persistent(call: Pairs) -> Tensor:
    def write_parts(x: Tensor, ids: Tensor, experts: Experts, parts: Tensor) -> None:
        for some in _pieces(call):
            persistent.write_parts(x[some], ids[some], experts, parts[some])

    return _by_parts(call, write_parts, early=True)


def _route_first(call: Mixture) -> Tensor:
    added = Added(call.h, reference.shared_result(call.x, call.shared), call.shared_gate)
    ids, weights = reference.route(call.scores, call.routing, call.bias)
    return EXPERTS(Pairs(call.x, ids, call.experts, weights=weights, added=added))


def _then_shared(call: Mixture, refused: str | None = "") -> Next:
    """The products of a shared expert that does not go along with the others."""
    shared = call.shared
    if refused is None or not isinstance(shared, SharedExpert):
        return []
    inside = call.x.new_empty(call.tokens, shared.inner)
    first, second = Product(call.x, shared.first, gated=shared.gate is not None), Product(inside, [shared.down])
    return [(PRODUCTS, first), (PRODUCTS, second)]


def _then_experts(call: Mixture, added: Tensor | None = None) -> Next:
    ids = call.x.new_empty(call.tokens, call.k, dtype=torch.int32)
    pairs = Pairs(call.x, ids, call.experts, added=Added(added))
    return [(CHOICES, Choice(call.scores, call.routing, call.bias)), (EXPERTS, pairs), *_then_shared(call)]


def _refuses_no_choice(call: Choice) -> str | None:
    return "there are tokens" if call.logits.shape[0] else None


def _refuses_rank(call: Choice) -> str | None:
    tokens, experts = call.logits.shape
    if tokens > routing.FEW_TOKENS or experts > MOST_RANKED:
        return f"{tokens} tokens, {experts} experts; it is for up to {routing.FEW_TOKENS}, {MOST_RANKED}"
    return _biased_softmax(call) or (None if call.routing.groups == 1 else f"experts lie in {call.routing.groups} groups")


def _refuses_search(call: Choice) -> str | None:
    experts, groups = call.logits.shape[1], call.routing.groups
    if routing.places(experts, groups) > MOST_EXPERTS:
        return f"{experts} experts in {groups} groups, more than {MOST_EXPERTS}"
    return _biased_softmax(call)


def _no_choice(call: Choice) -> tuple[Tensor, Tensor]:
    return routing.chosen(0, call.routing.k, call.logits.device)


CHOICES: Routes[Choice, tuple[Tensor, Tensor]] = Routes(
    Route("nothing to choose", _refuses_no_choice, _no_choice, alike=True),
    Route("rank_kernel", _refuses_rank, lambda call: routing.rank(*call)),
    Route("route_kernel", _refuses_search, lambda call: routing.search(*call), alike=True),
)
EXPERTS: Routes[Pairs, Tensor] = Routes(
    Route("nothing to multiply", _refuses_nothing, _nothing, alike=True),
    Route("slots", _refuses_slots, _slots),
    Route("matvec", _not_few, lambda call: _by_parts(call, matvec.write_parts)),
    Route("persistent", _not_persistent, _persistent, alike=True),
    Route("grouped_wgmma", _refuses_wgmma, _wgmma),
    Route("grouped_gemm", _never, lambda call: _by_parts(call, grouped_gemm.write_parts, call.x.dtype), alike=True),
)
MIXTURES: Routes[Mixture, Tensor] = Routes(
    Route("matvec_tma", _refuses_mix_tma, _mix_tma, lambda call: _then_shared(call, _not_beside(call))),
    Route("slots", _refuses_mix_slots, _mix_slots, lambda call: _then_shared(call, _not_in_slot(call)), alike=True),
    Route("step by step", _refuses_steps, _mix_by_steps, _then_experts, alike=True),
    Route("persistent", _refuses_mix_persistent, _mix_persistent, _then_shared, alike=True),
    Route("route first", _refuses_route_first, _route_first, lambda call: _then_experts(call, call.h), alike=True),
)
ROUTES: dict[str, Routes[Any, Any]] = {
    "route": CHOICES,
    "expert_mlp": EXPERTS,
    "expert_parts": EXPERTS,
    "mixture": MIXTURES,
}
