"""Mixture of experts: routing, expert MLPs, and the sum into the residual stream.

Scores and weights are float32 whatever the dtype of the logits.
"""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from auraflux.errors import InputError
from auraflux.ops._dispatch import check_dense, check_dtype, check_floating, check_shape, op
from auraflux.ops.activation.reference import clamped_swiglu, geglu, limited_swiglu, relu_square, swiglu
from auraflux.ops.linear.reference import FLOAT_DTYPES, dense, gate_up_swiglu, linear
from auraflux.ops.moe.experts import Clamp, Experts, Gelu, Limit, ReluSquare, SharedExpert
from auraflux.ops.moe.pool import ExpertPool, check_fetch, fetch_experts
from auraflux.ops.moe.routing import Routing

# scores that do not depend on the other experts' logits
PER_EXPERT_SCORES = {"sigmoid": torch.sigmoid, "sqrtsoftplus": lambda logits: softplus(logits).sqrt()}
SUM_EPSILON = 1e-20


def _check_route(logits: Tensor, routing: Routing, bias: Tensor | None = None, gain: Tensor | None = None) -> None:
    check_dense(logits=logits, bias=bias, gain=gain)
    check_shape("logits", logits, None, None)
    experts = logits.shape[1]
    if routing.k > experts:
        raise InputError(f"{routing.k} experts per token are requested; there are {experts}.")
    if bias is not None:
        if routing.scoring == "chosen":
            raise InputError(
                "a selection bias needs 'sigmoid', 'softmax' or 'sqrtsoftplus' scoring; this routing has 'chosen'."
            )
        check_shape("bias", bias, experts)
    if gain is not None:
        check_shape("gain", gain, experts)
    if routing.groups > 1:
        size, rest = divmod(experts, routing.groups)
        if rest or size < 2:
            raise InputError(f"{experts} experts do not divide into {routing.groups} equal groups of at least 2.")
        if routing.k > size * routing.topk_groups:
            raise InputError(
                f"{routing.k} experts per token are requested; the top groups have {routing.topk_groups} x {size}."
            )


@op(origins=("moe_softmax_topk", "moe_normalize_weights"), check=_check_route)
def route(logits: Tensor, routing: Routing, bias: Tensor | None = None, gain: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Select each token's top-k experts and compute their weights.

    Experts come by decreasing score, ties by increasing index. NaN ranks as the lowest score, but stays NaN in the weights.

    logits  [T, E]
    bias    [E]     added to scores when experts and groups are selected, not in the weights
    gain    [E]     factor of the final weights, per expert
    returns (expert indices [T, k] int32, weights [T, k] float32)
    """
    wide = logits.float()
    if routing.scoring in PER_EXPERT_SCORES:
        scores = PER_EXPERT_SCORES[routing.scoring](wide)
        ids = _best(_within_best_groups(scores if bias is None else scores + bias.float(), routing), routing.k)
        weights = scores.gather(1, ids)
        # a sum of zeros gives zeros, not NaN; transformers adds the same
        total = weights.sum(-1, keepdim=True) + SUM_EPSILON
    else:
        # softmax is monotonic: comparing the logits avoids its rounding
        choice = wide if bias is None else wide.softmax(-1) + bias.float()
        ids = _best(_within_best_groups(choice, routing), routing.k)
        chosen = wide.gather(1, ids)
        weights = chosen.softmax(-1) if routing.scoring == "chosen" else wide.softmax(-1).gather(1, ids)
        total = weights.sum(-1, keepdim=True)
        total = torch.where(total > 0, total, 1.0)
    if routing.renormalize and routing.scoring != "chosen":
        weights = weights / total
    weights = weights * routing.scale
    return ids.int(), weights if gain is None else weights * gain.float()[ids]


def _check_weigh_experts(logits: Tensor, ids: Tensor, routing: Routing) -> None:
    check_dense(logits=logits, ids=ids)
    check_shape("logits", logits, None, None)
    check_dtype("ids", ids, torch.int32)
    check_shape("ids", ids, logits.shape[0], routing.k)
    if routing.scoring not in PER_EXPERT_SCORES:
        raise InputError(f"expert weights need {' or '.join(map(repr, PER_EXPERT_SCORES))} scoring, not {routing.scoring!r}.")


@op(check=_check_weigh_experts)
def weigh_experts(logits: Tensor, ids: Tensor, routing: Routing) -> Tensor:
    """Weigh experts that were selected by something other than their scores, as `route` weighs its selection.

    logits   [T, E]
    ids      [T, k]  int32
    returns  [T, k]  float32
    """
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < logits.shape[1]:
        raise InputError(f"ids range from {int(ids.min())} to {int(ids.max())}; there are {logits.shape[1]} experts.")
    weights = PER_EXPERT_SCORES[routing.scoring](logits.float()).gather(1, ids.long())
    if routing.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + SUM_EPSILON)
    return weights * routing.scale


def _best(scores: Tensor, k: int) -> Tensor:
    """Return the indices of the k highest scores along the last axis, ties by increasing index."""
    comparable = torch.where(scores.isnan(), -torch.inf, scores)
    return comparable.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def _within_best_groups(scores: Tensor, routing: Routing) -> Tensor:
    """Set to -inf the scores outside the best groups: by the sum of their two best scores, with softmax by their best."""
    if routing.groups == 1:
        return scores
    grouped = torch.where(scores.isnan(), -torch.inf, scores).unflatten(-1, (routing.groups, -1))
    counted = 1 if routing.scoring == "softmax" else 2
    selected = _best(grouped.topk(counted).values.sum(-1), routing.topk_groups)
    dropped = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, selected, False)
    return grouped.masked_fill(dropped[..., None], -torch.inf).flatten(-2)


def _check_combine(h: Tensor, moe: Tensor, shared: Tensor | None = None, shared_gate: Tensor | None = None) -> None:
    check_dense(h=h, moe=moe, shared=shared, shared_gate=shared_gate)
    check_floating(h=h, moe=moe, shared=shared, shared_gate=shared_gate)
    check_shape("h", h, None, None)
    check_shape("moe", moe, *h.shape)
    if shared is not None:
        check_shape("shared", shared, *h.shape)
    if shared_gate is not None:
        if shared is None:
            raise InputError("shared_gate is given without shared.")
        check_shape("shared_gate", shared_gate, h.shape[0])


@op(
    origins=(
        "moe_combine_residual",
        "moe_combine_residual_flat",
        "moe_combine_residual_unscaled",
        "moe_combine_residual_n_tokens",
    ),
    check=_check_combine,
)
def combine(h: Tensor, moe: Tensor, shared: Tensor | None = None, shared_gate: Tensor | None = None) -> Tensor:
    """Add the experts' weighted sum and the shared expert's output to the residual stream.

    h, moe      [T, H]
    shared      [T, H]  output of the shared expert
    shared_gate [T]     its sigmoid scales `shared`; None leaves it unscaled
    returns     [T, H]  in h's dtype
    """
    total = h.float() + moe.float()
    if shared is not None:
        gated = shared.float()
        total = total + (gated if shared_gate is None else shared_gate.float().sigmoid()[:, None] * gated)
    return total.to(h.dtype)


def _check_routed(x: Tensor, ids: Tensor, experts: Experts) -> None:
    check_dtype("x", x, *FLOAT_DTYPES)
    check_shape("x", x, None, experts.hidden)
    check_dtype("ids", ids, torch.int32)
    check_shape("ids", ids, x.shape[0], None)
    if experts.device != x.device:
        raise InputError(f"the experts are on {experts.device}, 'x' on {x.device}. Move one of them.")


def _check_expert_mlp(x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> None:
    check_dense(x=x, ids=ids, weights=weights)
    _check_routed(x, ids, experts)
    check_dtype("weights", weights, torch.float32)
    check_shape("weights", weights, *ids.shape)


@op(
    origins=(
        "dequant_matvec_4bit_batched",
        "dequant_matvec_4bit_v3_experts",
        "swiglu_fused_batched",
        "weighted_sum",
        "moe_bucket_accumulate",
    ),
    check=_check_expert_mlp,
)
def expert_mlp(x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
    """Sum every token's expert outputs times their weights; bit-identical to `expert_parts` followed by `sum_parts`.

    x        [T, H]
    ids      [T, k]  int32, the experts each token goes to
    weights  [T, k]  float32
    returns  [T, H]  in x's dtype
    """
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < experts.count:
        raise InputError(f"ids range from {int(ids.min())} to {int(ids.max())}; there are {experts.count} experts.")
    parts = x.new_empty(*ids.shape, experts.hidden, dtype=torch.float32)
    expert_parts.reference(x, ids, experts, parts)
    return sum_parts.reference(parts, weights, x.dtype)


def _check_expert_parts(x: Tensor, ids: Tensor, experts: Experts, parts: Tensor) -> None:
    check_dense(x=x, ids=ids, parts=parts)
    _check_routed(x, ids, experts)
    check_dtype("parts", parts, torch.float32)
    check_shape("parts", parts, *ids.shape, experts.hidden)


@op(check=_check_expert_parts)
def expert_parts(x: Tensor, ids: Tensor, experts: Experts, parts: Tensor) -> None:
    """Write the output of each (token, expert) pair to its slot; slots of other experts are not modified.

    An expert's output does not depend on which other experts are in the same call.

    x      [T, H]
    ids    [T, k]     int32, the experts of each token; negative ids are skipped
    parts  [T, k, H]  float32, updated in place
    """
    if ids.numel() and int(ids.max()) >= experts.count:
        raise InputError(f"the highest id is {int(ids.max())}; there are {experts.count} experts.")
    wide = x.float()
    for expert in ids[ids >= 0].unique().tolist():
        token, slot = (ids == expert).nonzero(as_tuple=True)
        row = expert if experts.slots is None else int(experts.slots[expert])
        parts[token, slot] = _one_expert(wide[token], experts, row)


def _check_sum_parts(parts: Tensor, weights: Tensor, dtype: torch.dtype) -> None:
    check_dense(parts=parts, weights=weights)
    check_dtype("parts", parts, torch.float32)
    check_shape("parts", parts, None, None, None)
    check_dtype("weights", weights, torch.float32)
    check_shape("weights", weights, *parts.shape[:2])


@op(check=_check_sum_parts)
def sum_parts(parts: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum each token's expert outputs times their weights, in slot order.

    parts    [T, k, H]  float32
    weights  [T, k]     float32
    returns  [T, H]     in `dtype`
    """
    tokens, k, hidden = parts.shape
    total = parts.new_zeros(tokens, hidden)
    for slot in range(k):
        total += parts[:, slot] * weights[:, slot, None]
    return total.to(dtype)


def _check_mixture(
    x: Tensor, scores: Tensor, routing: Routing, experts: Experts, h: Tensor,
    bias: Tensor | None = None, shared: Tensor | SharedExpert | None = None, shared_gate: Tensor | None = None,
) -> None:  # fmt: skip
    check_dense(x=x, scores=scores, h=h)
    check_dtype("x", x, *FLOAT_DTYPES)
    check_shape("x", x, None, experts.hidden)
    check_shape("scores", scores, x.shape[0], experts.count)
    _check_route(scores, routing, bias)
    if isinstance(shared, SharedExpert):
        inner, hidden = shared.inner, experts.hidden
        for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            found = getattr(shared, name)
            if found is not None and tuple(found.shape) != shape:
                raise InputError(f"'{name}' of shared has shape {list(found.shape)}; {list(shape)} is needed.")
        _check_combine(h, x, x, shared_gate)
    else:
        _check_combine(h, x, shared, shared_gate)
    if experts.device != x.device:
        raise InputError(f"the experts are on {experts.device}, 'x' on {x.device}. Move one of them.")


@op(check=_check_mixture)
def mixture(
    x: Tensor, scores: Tensor, routing: Routing, experts: Experts, h: Tensor,
    bias: Tensor | None = None, shared: Tensor | SharedExpert | None = None, shared_gate: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Route tokens by their scores, run the experts and add the results to the residual stream.

    x           [T, H]
    scores      [T, E]  router logits
    h           [T, H]  residual stream
    bias        [E]     or None, see `route`
    shared      [T, H]  see `combine`; or the shared expert's weights
    shared_gate [T]     see `combine`
    returns     [T, H]  in h's dtype
    """
    ids, weights = route.reference(scores, routing, bias)
    if isinstance(shared, SharedExpert):
        between = (
            relu_square.reference(linear.reference(x, shared.up))
            if shared.gate is None
            else gate_up_swiglu.reference(x, shared.gate, shared.up)
        )
        shared = linear.reference(between, shared.down)
    return combine.reference(h, expert_mlp.reference(x, ids, weights, experts), shared, shared_gate)


def mixture_by_steps(
    x: Tensor, scores: Tensor, routing: Routing, experts: Experts, h: Tensor,
    bias: Tensor | None = None, shared: Tensor | SharedExpert | None = None, shared_gate: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Run `mixture` as separate ops: `route`, `expert_mlp`, `combine`."""
    ids, weights = route(scores, routing, bias)
    return combine(h, expert_mlp(x, ids, weights, experts), shared_result(x, shared), shared_gate)


def _check_pooled_mixture(
    x: Tensor, scores: Tensor, routing: Routing, pool: ExpertPool, layer: int, h: Tensor,
    bias: Tensor | None = None, shared: Tensor | SharedExpert | None = None, shared_gate: Tensor | None = None,
) -> None:  # fmt: skip
    check_fetch(torch.empty(x.shape[0], routing.k, dtype=torch.int32), pool, layer)
    _check_mixture(x, scores, routing, pool.layers[layer], h, bias, shared, shared_gate)


@op(check=_check_pooled_mixture)
def pooled_mixture(
    x: Tensor, scores: Tensor, routing: Routing, pool: ExpertPool, layer: int, h: Tensor,
    bias: Tensor | None = None, shared: Tensor | SharedExpert | None = None, shared_gate: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Run `mixture` with the experts of a pool's layer, after `fetch_experts` of those that are not in its slots."""
    fetch_experts.reference(route.reference(scores, routing, bias)[0], pool, layer)
    return mixture.reference(x, scores, routing, pool.layers[layer], h, bias, shared, shared_gate)


def shared_result(x: Tensor, shared: Tensor | SharedExpert | None) -> Tensor | None:
    """Return the shared expert's output, computed from x where its weights are given."""
    if isinstance(shared, SharedExpert):
        if shared.gate is None:
            return linear(relu_square(linear(x, shared.up)), shared.down)
        return linear(gate_up_swiglu(x, shared.gate, shared.up), shared.down)
    return shared


def _one_expert(x: Tensor, experts: Experts, expert: int) -> Tensor:
    """Apply the expert in one row of the stacks to its tokens."""
    up = x @ dense(experts.up[expert]).T
    gate = up if experts.gate is None else x @ dense(experts.gate[expert]).T
    if experts.gate_bias is not None:
        gate = gate + experts.gate_bias[expert].float()
    if experts.up_bias is not None:
        up = up + experts.up_bias[expert].float()
    match experts.activation:
        case Clamp(alpha, limit):
            hidden = clamped_swiglu.reference(gate, up, alpha, limit)
        case Limit(limit, gate_limit):
            hidden = limited_swiglu.reference(gate, up, limit, gate_limit)
        case Gelu():
            hidden = geglu.reference(gate, up)
        case ReluSquare():
            hidden = relu_square.reference(up)
        case None:
            hidden = swiglu.reference(gate, up)
    down = hidden @ dense(experts.down[expert]).T
    return down if experts.down_bias is None else down + experts.down_bias[expert].float()
