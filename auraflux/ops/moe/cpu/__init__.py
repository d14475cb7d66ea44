"""Mixture of experts on CPU.

Top-k selection scans one token's scores at a time with a short insertion-sorted list; `routes.py` selects the expert kernels.
"""

import numpy as np
import torch
from torch import Tensor

from auraflux.errors import InputError
from auraflux.ops.moe.cpu.grouped import sum_experts, sum_parts, write_parts
from auraflux.ops.moe.cpu.routes import EXPERTS, MIXTURES, MixtureCall
from auraflux.ops.moe.experts import Experts, SharedExpert
from auraflux.ops.moe.routing import SCORINGS, Routing
from auraflux.ops.simd.jit import (
    Kernel,
    arguments,
    as_float,
    empty,
    error_flag,
    floats,
    int32s,
    int64s,
    jit,
    like,
    real,
    share,
    threads,
)
from auraflux.ops.simd.math import exp, sigmoid

__all__ = ["combine", "expert_mlp", "expert_parts", "mixture", "route", "sum_parts", "weigh_experts"]

PARALLEL_FROM = 1 << 16  # elements; below this, waking the threads costs more than the work
PARALLEL_LOGITS = 1 << 13

LOWEST = np.float32(-np.inf)
SOFTMAX, SIGMOID, CHOSEN, SQRTSOFTPLUS = (SCORINGS.index(name) for name in ("softmax", "sigmoid", "chosen", "sqrtsoftplus"))


@jit
def _topk(scores, k, ids, values):
    """Fill `ids` and `values` with the k highest scores in decreasing order, ties by increasing index."""
    for i in range(len(scores)):
        score = scores[i] if scores[i] == scores[i] else LOWEST
        if i >= k and not score > values[k - 1]:
            continue
        slot = min(i, k - 1)
        while slot > 0 and score > values[slot - 1]:
            values[slot], ids[slot] = values[slot - 1], ids[slot - 1]
            slot -= 1
        values[slot], ids[slot] = score, i


@jit
def _drop_groups(selection, groups, topk_groups, pairs):
    """Set to -inf the scores outside the groups with the highest sum of their two best scores, or without pairs their best."""
    size = len(selection) // groups
    sums, ids, values = np.empty(groups, np.float32), np.empty(topk_groups, np.int32), np.empty(topk_groups, np.float32)
    for g in range(groups):
        first, second = LOWEST, LOWEST
        for score in selection[g * size : (g + 1) * size]:
            if score > first:
                first, second = score, first
            elif score > second:
                second = score
        sums[g] = first + second if pairs else first
    _topk(sums, topk_groups, ids, values)
    for g in range(groups):
        if not np.any(ids == g):
            selection[g * size : (g + 1) * size] = LOWEST


@jit
def _sqrtsoftplus(x):
    return np.float32(np.sqrt(max(x, np.float32(0)) + np.log1p(np.exp(-abs(x)))))


@jit
def _per_expert_scores(logits, bias, groups, topk_groups, scoring, selection):
    if scoring == SIGMOID:
        for i in range(len(logits)):
            selection[i] = sigmoid(logits[i])
    else:
        for i in range(len(logits)):
            selection[i] = _sqrtsoftplus(logits[i])
    for i in range(len(bias)):
        selection[i] += bias[i]
    if groups > 1:
        _drop_groups(selection, groups, topk_groups, True)


@jit
def _weigh_per_expert(logits, ids, scoring, weights):
    """Write each selected expert's score to `weights` and return their sum."""
    # a sum of zeros gives zeros, not NaN
    total = np.float32(1e-20)
    for j in range(len(ids)):
        weights[j] = sigmoid(logits[ids[j]]) if scoring == SIGMOID else _sqrtsoftplus(logits[ids[j]])
        total += weights[j]
    return total


@jit
def _softmax_scores(logits, bias, selection):
    """Write softmax probabilities plus bias to `selection` and return the highest logit."""
    best, denominator = logits[0], np.float32(0)
    for i in range(len(logits)):
        best = max(best, logits[i])
    for i in range(len(logits)):
        selection[i] = exp(logits[i] - best)
        denominator += selection[i]
    for i in range(len(logits)):
        selection[i] = selection[i] / denominator + bias[i]
    return best


@jit
def _weigh_softmax(logits, best, among_all, ids, weights):
    """Write each selected expert's exponential, divided by the sum over all experts if requested; return the sum."""
    denominator, total = np.float32(0 if among_all else 1), np.float32(0)
    for i in range(len(logits) if among_all else 0):
        denominator += exp(logits[i] - best)
    for j in range(len(ids)):
        weights[j] = exp(logits[ids[j]] - best) / denominator
        total += weights[j]
    return total


@Kernel
def _route(args, job, jobs):
    found = arguments(args, 13)
    logits_at, bias_at, gain_at, ids_at, weights_at, tokens, experts, k = found[:8]
    scoring, renormalize, groups, topk_groups, scale = found[8:]
    bias, selection = floats(bias_at, experts if bias_at else 0), np.empty(experts, np.float32)
    gain = floats(gain_at, experts if gain_at else 0)
    for token in share(tokens, job, jobs):
        logits = floats(logits_at + 4 * token * experts, experts)
        ids, weights = int32s(ids_at + 4 * token * k, k), floats(weights_at + 4 * token * k, k)
        if scoring in (SIGMOID, SQRTSOFTPLUS):
            _per_expert_scores(logits, bias, groups, topk_groups, scoring, selection)
            _topk(selection, k, ids, weights)
            total = _weigh_per_expert(logits, ids, scoring, weights)
        else:
            if len(bias):
                highest = _softmax_scores(logits, bias, selection)
            else:
                selection[:] = logits
            if groups > 1:
                _drop_groups(selection, groups, topk_groups, scoring != SOFTMAX)
            _topk(selection, k, ids, weights)
            if not len(bias):
                # the best group has the highest of all
                highest = weights[0]
            total = _weigh_softmax(logits, highest, scoring == SOFTMAX, ids, weights)
        if not renormalize or total <= 0:
            total = np.float32(1)
        for j in range(k):
            weights[j] = weights[j] / total * real(scale)
            if len(gain):
                weights[j] *= gain[ids[j]]


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None, gain: Tensor | None = None) -> tuple[Tensor, Tensor]:
    wide, (offset, factors) = as_float(logits), (None if each is None else as_float(each) for each in (bias, gain))
    tokens, experts = logits.shape
    ids = torch.empty(tokens, routing.k, dtype=torch.int32, device=logits.device)
    weights = torch.empty_like(ids, dtype=torch.float32)
    scoring, groups, topk_groups = SCORINGS.index(routing.scoring), routing.groups, routing.topk_groups
    rule = scoring, routing.renormalize or scoring == CHOSEN, groups, topk_groups, float(routing.scale)
    jobs = threads() if tokens > 1 and tokens * experts >= PARALLEL_LOGITS else 1
    optional = (0 if each is None else each.data_ptr() for each in (offset, factors))
    _route(jobs, wide.data_ptr(), *optional, ids.data_ptr(), weights.data_ptr(), tokens, experts, routing.k, *rule)
    return ids, weights


@Kernel
def _weigh(args, job, jobs):
    logits_at, ids_at, weights_at, tokens, experts, k, scoring, renormalize, scale, wrong_at = arguments(args, 10)
    wrong = int64s(wrong_at, 1)
    for token in share(tokens, job, jobs):
        logits = floats(logits_at + 4 * token * experts, experts)
        ids, weights = int32s(ids_at + 4 * token * k, k), floats(weights_at + 4 * token * k, k)
        if ids.min() < 0 or ids.max() >= experts:
            wrong[0] = 1
            continue
        total = _weigh_per_expert(logits, ids, scoring, weights)
        if not renormalize:
            total = np.float32(1)
        for j in range(k):
            weights[j] = weights[j] / total * real(scale)


def weigh_experts(logits: Tensor, ids: Tensor, routing: Routing) -> Tensor:
    wide, (tokens, experts), wrong = as_float(logits), logits.shape, torch.zeros(1, dtype=torch.int64)
    weights = torch.empty(tokens, routing.k)
    rule = SCORINGS.index(routing.scoring), routing.renormalize, float(routing.scale), wrong.data_ptr()
    _weigh(1, wide.data_ptr(), ids.data_ptr(), weights.data_ptr(), tokens, experts, routing.k, *rule)
    if error_flag(wrong.data_ptr()):
        raise InputError(f"ids range from {int(ids.min())} to {int(ids.max())}; there are {experts} experts.")
    return weights


@Kernel
def _combine(args, job, jobs):
    h_at, moe_at, shared_at, gates_at, out_at, rows, width = arguments(args, 7)
    gates = floats(gates_at, rows)
    for row in share(rows, job, jobs):
        at = 4 * row * width
        h, moe, out = floats(h_at + at, width), floats(moe_at + at, width), floats(out_at + at, width)
        if shared_at:
            shared, gate = floats(shared_at + at, width), sigmoid(gates[row]) if gates_at else np.float32(1)
            for i in range(width):
                out[i] = h[i] + moe[i] + gate * shared[i]
        else:
            for i in range(width):
                out[i] = h[i] + moe[i]


def combine(h: Tensor, moe: Tensor, shared: Tensor | None = None, shared_gate: Tensor | None = None) -> Tensor:
    wide, routed = as_float(h), as_float(moe)
    shared_output = None if shared is None else as_float(shared)
    gates = None if shared_gate is None else as_float(shared_gate)
    out = empty(*wide.shape)
    jobs = threads() if wide.numel() >= PARALLEL_FROM else 1
    optional = 0 if shared_output is None else shared_output.data_ptr(), 0 if gates is None else gates.data_ptr()
    _combine(jobs, wide.data_ptr(), routed.data_ptr(), *optional, out.data_ptr(), *h.shape)
    return like(out, h)


def expert_mlp(x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
    return sum_experts(EXPERTS(experts), x, ids, weights, experts)


def expert_parts(x: Tensor, ids: Tensor, experts: Experts, parts: Tensor) -> None:
    write_parts(EXPERTS(experts), x, ids, experts, parts)


def mixture(
    x: Tensor,
    scores: Tensor,
    routing: Routing,
    experts: Experts,
    h: Tensor,
    bias: Tensor | None = None,
    shared: Tensor | SharedExpert | None = None,
    shared_gate: Tensor | None = None,
) -> Tensor:
    return MIXTURES(MixtureCall(x, scores, routing, experts, h, bias, shared, shared_gate))
