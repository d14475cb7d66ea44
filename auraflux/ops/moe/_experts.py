"""The experts of a mixture on CPU: tokens are grouped by expert, and each expert runs once over its own.

A (token, slot) pair is a row of intermediate results. Pairs are put in the order of their experts, so that an expert's rows
are adjacent; gate and up of all experts are one list of products (`linear/products.py`), down another.
"""

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from auraflux.errors import InputError
from auraflux.ops._dispatch import Declined
from auraflux.ops._jit import Kernel, arguments, as_float, floats, int32s, int64s, jit, like, share, threads
from auraflux.ops.activation.cpu import clamped_swiglu, swiglu
from auraflux.ops.linear.cpu import multiply_dense, same_format
from auraflux.ops.linear.products import BLOCK, FIELDS, driver_for, padded, token_indices
from auraflux.ops.moe.experts import Experts
from auraflux.quant import QTensor

TOKENS_AT_ONCE = 512  # bounds the intermediate results: a pair needs 4 * (2 * I + H) bytes
PARALLEL_FROM = 1 << 16  # elements; below this, waking the threads costs more than the work


@jit
def _group(ids_at, tokens, k, experts, starts_at, tokens_at, places_at):
    """Sort pairs by expert, stably.

    starts  int64 [experts + 1]   where each expert's pairs begin
    tokens  int64 [pairs]         the token of each pair, in the new order
    places  int64 [tokens, k]     where a token's pair went
    returns the first id out of range, or -1
    """
    pairs = tokens * k
    ids, starts = int32s(ids_at, pairs), int64s(starts_at, experts + 1)
    of, places = int64s(tokens_at, pairs), int64s(places_at, pairs)
    starts[:] = 0
    for pair in range(pairs):
        if ids[pair] < 0 or ids[pair] >= experts:
            return pair
        starts[ids[pair] + 1] += 1
    for expert in range(experts):
        starts[expert + 1] += starts[expert]
    for pair in range(pairs):
        place = starts[ids[pair]]
        of[place], places[pair] = pair // k, place
        starts[ids[pair]] = place + 1
    for expert in range(experts, 0, -1):
        starts[expert] = starts[expert - 1]
    starts[0] = 0
    return -1


@jit
def _list_products(starts_at, experts, weight, strides, index, out, out_stride, list_at):
    """Write a product for every expert that has tokens; returns how many.

    weight, strides  addresses of codes, scales and biases of expert 0, and bytes from one expert to the next
    index            address of the tokens of pair 0; out  of its result
    """
    starts, products = int64s(starts_at, experts + 1), int64s(list_at, FIELDS * experts)
    count = 0
    for expert in range(experts):
        first, many = starts[expert], starts[expert + 1] - starts[expert]
        if many > 0:
            at = FIELDS * count
            for i in range(3):
                products[at + i] = weight[i] + expert * strides[i]
            products[at + 3], products[at + 4], products[at + 5] = index + 8 * first, many, out + out_stride * first
            count += 1
    return count


def _strides(stack: QTensor) -> tuple[int, int, int]:
    """Bytes from one expert's codes, scales and biases to the next expert's."""
    arrays = (stack.packed, stack.scales, stack.biases)
    packed, scales, biases = (0 if a is None else a.stride(0) * a.element_size() for a in arrays)
    return packed, scales, biases


@Kernel
def _weighted_sum(args, job, jobs):
    results, stride, places_at, weights_at, tokens, k, width, out = arguments(args, 8)
    places, weights = int64s(places_at, tokens * k), floats(weights_at, tokens * k)
    for token in share(tokens, job, jobs):
        total = floats(out + 4 * token * width, width)
        total[:] = np.float32(0)
        for slot in range(token * k, token * k + k):
            result, weight = floats(results + stride * places[slot], width), weights[slot]
            for i in range(width):
                total[i] += weight * result[i]


def expert_mlp(x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
    quantized = [isinstance(stack, QTensor) for stack in (experts.gate, experts.up, experts.down)]
    if any(quantized) and not all(quantized):
        raise Declined("some projections are quantized, others dense")
    for stack in (experts.gate, experts.up, experts.down):
        if isinstance(stack, QTensor) and stack.lanes not in (1, BLOCK):
            raise Declined(f"rows lie {stack.lanes} side by side; these kernels take 1 or {BLOCK}")
    wide = as_float(x)
    out = torch.empty_like(wide)
    for first in range(0, len(x), TOKENS_AT_ONCE):
        part = slice(first, first + TOKENS_AT_ONCE)
        _some_tokens(wide[part], ids[part], weights[part], experts, out[part])
    return like(out, x)


def _some_tokens(x: Tensor, ids: Tensor, weights: Tensor, experts: Experts, out: Tensor) -> None:
    tokens, k = ids.shape
    pairs, count = tokens * k, experts.count
    plan = torch.empty(count + 1 + 2 * pairs, dtype=torch.int64)
    starts = plan.data_ptr()
    index = starts + 8 * (count + 1)
    places = index + 8 * pairs
    wrong = _group(ids.data_ptr(), tokens, k, count, starts, index, places)
    if wrong >= 0:
        raise InputError(f"ids[{wrong // k}, {wrong % k}] is {int(ids.view(-1)[wrong])}; there are {count} experts.")
    of_pair = plan[count + 1 : count + 1 + pairs]
    owner = None
    if experts.gate_bias is not None or experts.down_bias is not None:
        owner = torch.repeat_interleave(torch.arange(count), plan[: count + 1].diff())
    hidden = _hidden(x, experts, plan, starts, index, of_pair, owner)
    results = _down(hidden, experts, plan, starts, owner)
    jobs = threads() if pairs * experts.hidden >= PARALLEL_FROM else 1
    arrays = (results.data_ptr(), 4 * results.shape[1], places, weights.data_ptr())
    _weighted_sum(jobs, *arrays, tokens, k, experts.hidden, out.data_ptr())


def _hidden(
    x: Tensor, experts: Experts, plan: Tensor, starts: int, index: int, of_pair: Tensor, owner: Tensor | None
) -> Tensor:
    """The gated product of each pair, in the order of experts: [pairs, I]."""
    inner, pairs = experts.inner, len(of_pair)
    if isinstance(experts.gate, QTensor) and isinstance(experts.up, QTensor):
        wide = padded(inner)
        both = torch.empty(2, pairs, wide)
        most = min(experts.count, pairs)
        products = torch.empty(2, most * FIELDS, dtype=torch.int64)
        used = 0
        for number, stack in enumerate((experts.gate, experts.up)):
            to = products.data_ptr() + 8 * FIELDS * used
            where = (index, both[number].data_ptr(), 4 * wide, to)
            made = _list_products(starts, experts.count, stack.addresses, _strides(stack), *where)
            if same_format(experts.gate, experts.up):
                used += made
            else:
                driver_for(stack)(x.data_ptr(), len(x), stack, to, made, 4 * wide)
        if used:
            driver_for(experts.gate)(x.data_ptr(), len(x), experts.gate, products.data_ptr(), used, 4 * wide)
        gate, up = both if wide == inner else both[..., :inner].contiguous()
    else:
        gate, up = _dense(x[of_pair], experts.gate, plan), _dense(x[of_pair], experts.up, plan)
    for product, bias in ((gate, experts.gate_bias), (up, experts.up_bias)):
        if bias is not None:
            product += bias[owner]
    return swiglu(gate, up) if experts.clamp is None else clamped_swiglu(gate, up, experts.clamp.alpha, experts.clamp.limit)


def _down(hidden: Tensor, experts: Experts, plan: Tensor, starts: int, owner: Tensor | None) -> Tensor:
    """Each pair's result: [pairs, H], or wider where rows are padded."""
    pairs = len(hidden)
    if isinstance(experts.down, QTensor):
        wide = padded(experts.hidden)
        results = torch.empty(pairs, wide)
        products = torch.empty(min(experts.count, pairs) * FIELDS, dtype=torch.int64)
        where = (token_indices(pairs), results.data_ptr(), 4 * wide, products.data_ptr())
        made = _list_products(starts, experts.count, experts.down.addresses, _strides(experts.down), *where)
        driver_for(experts.down)(hidden.data_ptr(), pairs, experts.down, products.data_ptr(), made, 4 * wide)
    else:
        results = _dense(hidden, experts.down, plan)
    if experts.down_bias is not None:
        results[:, : experts.hidden] += experts.down_bias[owner]
    return results


def _dense(rows: Tensor, stack: Any, plan: Tensor) -> Tensor:
    """Each expert's dense matrix over its own rows."""
    out = torch.empty(len(rows), stack.shape[1])
    starts = plan[: stack.shape[0] + 1].tolist()
    for expert, (first, last) in enumerate(pairwise(starts)):
        if last > first:
            out[first:last] = multiply_dense(rows[first:last], stack[expert])
    return out
