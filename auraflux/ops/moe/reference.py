"""Mixture of experts: which experts a token goes to, and how their results join the residual stream.

Scores and weights are float32 whatever the dtype of the logits.
"""

import torch
from torch import Tensor

from auraflux.errors import InputError
from auraflux.ops._dispatch import check_dense, check_dtype, check_shape, op
from auraflux.ops.activation.reference import clamped_swiglu, swiglu
from auraflux.ops.linear.reference import FLOAT_DTYPES, dense
from auraflux.ops.moe.experts import Experts
from auraflux.ops.moe.routing import Routing


def _check_route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> None:
    check_dense(logits=logits, bias=bias)
    check_shape("logits", logits, None, None)
    experts = logits.shape[1]
    if routing.k > experts:
        raise InputError(f"{routing.k} experts per token are wanted; there are {experts}.")
    if bias is not None:
        if routing.scoring != "sigmoid":
            raise InputError(f"a bias for the choice needs 'sigmoid' scoring; this routing has {routing.scoring!r}.")
        check_shape("bias", bias, experts)
    if routing.groups > 1:
        size, rest = divmod(experts, routing.groups)
        if rest or size < 2:
            raise InputError(f"{experts} experts do not divide into {routing.groups} equal groups of at least 2.")
        if routing.k > size * routing.kept_groups:
            raise InputError(f"{routing.k} experts per token are wanted; {routing.kept_groups} groups of {size} are kept.")


@op(origins=("moe_softmax_topk", "moe_normalize_weights"), check=_check_route)
def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose each token's experts and weigh them.

    Experts come by decreasing score, ties by increasing index. A NaN counts as the lowest score, but stays NaN in the weights.

    logits  [T, E]
    bias    [E]     added to sigmoid scores for the choice of experts and groups, not for the weights
    returns (expert indices [T, k] int32, weights [T, k] float32)
    """
    wide = logits.float()
    if routing.scoring == "sigmoid":
        scores = wide.sigmoid()
        ids = _best(_within_best_groups(scores if bias is None else scores + bias.float(), routing), routing.k)
        weights = scores.gather(1, ids)
        # a sum of zeros gives zeros, not NaN; transformers adds the same
        total = weights.sum(-1, keepdim=True) + 1e-20
    else:
        # softmax keeps the order of logits, so they can be compared as they are, without its rounding
        ids = _best(wide, routing.k)
        chosen = wide.gather(1, ids)
        weights = chosen.softmax(-1) if routing.scoring == "chosen" else wide.softmax(-1).gather(1, ids)
        total = weights.sum(-1, keepdim=True)
        total = torch.where(total > 0, total, 1.0)
    if routing.renormalize and routing.scoring != "chosen":
        weights = weights / total
    return ids.int(), weights * routing.scale


def _best(scores: Tensor, k: int) -> Tensor:
    """Indices of the k highest along the last axis, ties by increasing index."""
    comparable = torch.where(scores.isnan(), -torch.inf, scores)
    return comparable.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def _within_best_groups(scores: Tensor, routing: Routing) -> Tensor:
    """Set to -inf the scores outside the groups whose two best sum highest."""
    if routing.groups == 1:
        return scores
    grouped = torch.where(scores.isnan(), -torch.inf, scores).unflatten(-1, (routing.groups, -1))
    kept = _best(grouped.topk(2).values.sum(-1), routing.kept_groups)
    dropped = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, kept, False)
    return grouped.masked_fill(dropped[..., None], -torch.inf).flatten(-2)


def _check_combine(h: Tensor, moe: Tensor, shared: Tensor | None = None, shared_gate: Tensor | None = None) -> None:
    check_dense(h=h, moe=moe, shared=shared, shared_gate=shared_gate)
    check_shape("h", h, None, None)
    check_shape("moe", moe, *h.shape)
    if shared is not None:
        check_shape("shared", shared, *h.shape)
    if shared_gate is not None:
        if shared is None:
            raise InputError("shared_gate is given without shared: there is nothing for it to gate.")
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
    """Add the experts' weighted sum, and the shared expert, to the residual stream.

    h, moe      [T, H]
    shared      [T, H]  result of the expert that every token goes to
    shared_gate [T]     shared is scaled by its sigmoid; None adds it as it is
    returns     [T, H]  in h's dtype
    """
    total = h.float() + moe.float()
    if shared is not None:
        gated = shared.float()
        total = total + (gated if shared_gate is None else shared_gate.float().sigmoid()[:, None] * gated)
    return total.to(h.dtype)


def _check_expert_mlp(x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> None:
    check_dense(x=x, ids=ids, weights=weights)
    check_dtype("x", x, *FLOAT_DTYPES)
    check_shape("x", x, None, experts.hidden)
    check_dtype("ids", ids, torch.int32)
    check_shape("ids", ids, x.shape[0], None)
    check_dtype("weights", weights, torch.float32)
    check_shape("weights", weights, *ids.shape)
    if experts.device != x.device:
        raise InputError(f"the experts are on {experts.device}, 'x' on {x.device}. Move one of them.")


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
    """Sum, for every token, its experts' results times their weights.

    x        [T, H]
    ids      [T, k]  int32, the experts each token goes to
    weights  [T, k]  float32
    returns  [T, H]  in x's dtype
    """
    wide, out = x.float(), torch.zeros_like(x, dtype=torch.float32)
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < experts.count:
        raise InputError(f"ids reach from {int(ids.min())} to {int(ids.max())}; there are {experts.count} experts.")
    for expert in ids.unique().tolist():
        token, slot = (ids == expert).nonzero(as_tuple=True)
        result = _one_expert(wide[token], experts, expert)
        out.index_add_(0, token, result * weights[token, slot, None])
    return out.to(x.dtype)


def _one_expert(x: Tensor, experts: Experts, expert: int) -> Tensor:
    """One expert over its own tokens."""
    gate, up = x @ dense(experts.gate[expert]).T, x @ dense(experts.up[expert]).T
    if experts.gate_bias is not None:
        gate = gate + experts.gate_bias[expert].float()
    if experts.up_bias is not None:
        up = up + experts.up_bias[expert].float()
    clamp = experts.clamp
    hidden = swiglu.reference(gate, up) if clamp is None else clamped_swiglu.reference(gate, up, clamp.alpha, clamp.limit)
    down = hidden @ dense(experts.down[expert]).T
    return down if experts.down_bias is None else down + experts.down_bias[expert].float()
