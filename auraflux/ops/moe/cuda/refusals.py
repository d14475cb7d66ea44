"""Why a kernel does not serve a call of an expert op; the predicates of the route tables."""

import torch
from torch import Tensor

from auraflux.ops._dispatch import is_invariant
from auraflux.ops.gpu.device import not_gluon, not_wgmma
from auraflux.ops.gpu.sizes import cached_per_weight
from auraflux.ops.moe.cuda.call import ExpertCall, MixtureCall, RouteCall
from auraflux.ops.moe.cuda.gemm import grouped_mma as gemm_grouped_mma
from auraflux.ops.moe.cuda.gemm import persistent as gemm_persistent
from auraflux.ops.moe.cuda.matvec import few_tokens_launch
from auraflux.ops.moe.cuda.routing import assign as routing_assign
from auraflux.ops.moe.cuda.stacks import gate_of
from auraflux.ops.moe.experts import Experts, SharedExpert, Stack
from auraflux.quant import QTensor

BF16 = torch.bfloat16
INT4 = (4, 64, 1, BF16)  # the most common format: 4 bits in groups of 64
WIDEST = 8192
FEW_PAIRS = 32  # up to here each pair reads its expert separately

NOT_INT4 = "weights are not 4 bits in groups of 64, scales in bf16"
UNALIGNED = "an address is not a multiple of 16 bytes"
NO_ROOM = "its stages do not fit into shared memory"


def not_few(call: ExpertCall | MixtureCall) -> str | None:
    return None if 0 < call.pairs <= FEW_PAIRS else f"{call.pairs} pairs; it is for 1 to {FEW_PAIRS}"


def not_copied(stack: Stack) -> str | None:
    """Return why weights cannot be copied in 16-byte units, codes of 16 rows and 256 inputs at a time."""
    return not_tiled(stack) if isinstance(stack, QTensor) else NOT_INT4


@cached_per_weight
def not_tiled(stack: QTensor) -> str | None:
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


def not_int4(x: Tensor, experts: Experts) -> str | None:
    """Return why tokens and experts are not bf16 with 4-bit weights in groups of 64."""
    if x.dtype is not BF16:
        return "activations are not bf16"
    if not (experts.activation is experts.gate_bias is experts.up_bias is experts.down_bias is None):
        return "experts have biases or an activation other than silu"
    if reason := not_gluon(x.device) or (UNALIGNED if x.data_ptr() % 16 else None):
        return reason
    return not_copied(gate_of(experts)) or not_copied(experts.up) or not_copied(experts.down)


def not_in_slots(call: ExpertCall | MixtureCall) -> str | None:
    """Return why the hidden vectors of a token's experts do not fit shared memory together."""
    if call.k * (call.experts.inner // 64) > few_tokens_launch.MOST_GROUPS:
        return (
            f"{call.k} hidden vectors of {call.experts.inner}; it is for {64 * few_tokens_launch.MOST_GROUPS} elements in all"
        )
    if reason := not_int4(call.x, call.experts):
        return reason
    return None if few_tokens_launch.fits(call.experts.hidden, call.experts.inner, call.k, call.x.device) else NO_ROOM


def not_mma(call: ExpertCall | MixtureCall) -> str | None:
    """Return why blocks of pairs are not multiplied by `mma.sync`."""
    device = call.x.device
    if not_wgmma(device) is None:
        return "it is for GPUs without wgmma"
    return not_int4(call.x, call.experts) or (None if gemm_grouped_mma.stages_for(device) >= 2 else NO_ROOM)


def not_persistent(call: ExpertCall | MixtureCall) -> str | None:
    experts = call.experts
    if call.pairs >= gemm_grouped_mma.LEAST_EACH * experts.count and not (is_invariant() or not_mma(call)):
        return f"{call.pairs} pairs of {experts.count} experts: grouped_mma is faster"
    most = gemm_persistent.most_pairs(experts.count)
    # inside `invariant` more tokens are split over several launches
    if (call.tokens > routing_assign.MOST_TOKENS or call.pairs > most) and not is_invariant():
        return f"{call.tokens} tokens, {call.pairs} pairs; it is for up to {routing_assign.MOST_TOKENS}, {most}"
    if call.k > routing_assign.MOST_SLOTS or experts.count > routing_assign.MOST_EXPERTS:
        return (
            f"{call.k} of {experts.count} experts; it is for up to {routing_assign.MOST_SLOTS} of {routing_assign.MOST_EXPERTS}"
        )
    if reason := not_int4(call.x, experts):
        return reason
    fits = all(gemm_persistent.ring_sizes(width, 1, call.x.device)[0] for width in (experts.inner, experts.hidden))
    return None if fits else NO_ROOM


def not_added(call: MixtureCall) -> str | None:
    """Return why few pairs are not multiplied and added to the residual stream in one kernel."""
    return not_few(call) or other_stream(call)


def other_stream(call: MixtureCall) -> str | None:
    return None if call.h.dtype is call.x.dtype else "the residual stream is not in x's dtype"


def biased_softmax(call: MixtureCall | RouteCall) -> str | None:
    """Return why a kernel that compares logits cannot select experts."""
    if call.routing.scoring == "softmax" and call.routing.groups > 1:
        return "softmax scores have groups"
    return "softmax scores have a bias" if call.bias is not None and call.routing.scoring != "sigmoid" else None


def not_ordered(call: MixtureCall) -> str | None:
    """Return why `persistent` cannot sum in the order of `slots`."""
    if call.shared is not None:
        return "there is a shared expert"
    if call.experts.hidden > few_tokens_launch.MOST_ORDERED:
        return f"{call.experts.hidden} inputs; a warp has one quad of up to {few_tokens_launch.MOST_ORDERED}"
    return not_persistent(call) or refuses_mix_slots(call, any_pairs=True)


def refuses_mix_slots(call: MixtureCall, any_pairs: bool = False) -> str | None:
    if not any_pairs and is_invariant() and (reason := not_ordered(call)):
        return reason
    few = None if any_pairs else not_few(call)
    if reason := few or other_stream(call) or biased_softmax(call):
        return reason
    if call.routing.groups != 1 or call.experts.count > few_tokens_launch.MOST_CHOICES:
        most = few_tokens_launch.MOST_CHOICES
        return f"{call.experts.count} experts in {call.routing.groups} groups; it is for up to {most} in one"
    return not_in_slots(call)


def not_extra_expert(call: MixtureCall) -> str | None:
    """Return why the shared expert cannot be one more expert of every token, of their width and format."""
    shared, inner = call.shared, call.experts.inner
    if not isinstance(shared, SharedExpert):
        return "no shared expert's weights are given"
    if shared.gate is None:
        return "the shared expert has no gate"
    if shared.inner != inner:
        return f"the shared expert's inner width is {shared.inner}, the others' {inner}"
    return not_copied(shared.gate) or not_copied(shared.up) or not_copied(shared.down)


def not_in_slot(call: MixtureCall) -> str | None:
    """Return why the shared expert cannot take a slot of the `slots` kernels."""
    if call.k >= few_tokens_launch.MOST_SLOTS or (call.k + 1) * (call.experts.inner // 64) > few_tokens_launch.MOST_GROUPS:
        return f"{call.k} experts leave no slot for it"
    if not few_tokens_launch.fits(call.experts.hidden, inner := call.experts.inner, call.k + 1, call.x.device):
        return f"its slot of {inner} does not fit into shared memory"
    return not_extra_expert(call)


def refuses_mix_persistent(call: MixtureCall) -> str | None:
    if call.pairs <= FEW_PAIRS and not is_invariant():
        return f"{call.pairs} pairs; it is for more than {FEW_PAIRS}"
    if reason := biased_softmax(call):
        return reason
    return f"experts are in {call.routing.groups} groups" if call.routing.groups != 1 else not_persistent(call)
