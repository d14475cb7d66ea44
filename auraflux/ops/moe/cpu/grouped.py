"""Grouped expert GEMMs on CPU: pairs are sorted by expert and each expert runs once over its tokens.

A (token, slot) pair is one row of the intermediate results. Sorting by expert makes an expert's rows adjacent; gate and up of
all experts form one list of products (`linear/cpu/products.py`), down another.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from auraflux.errors import InputError
from auraflux.ops.activation.cpu import clamped_swiglu, geglu, limited_swiglu, relu_square, swiglu
from auraflux.ops.linear.cpu import linear
from auraflux.ops.linear.cpu.products import (
    BIASES,
    CODES,
    COUNT,
    FIELDS,
    INDEX,
    OUT,
    ROWS,
    SCALES,
    STRIDE,
    padded,
    token_indices,
)
from auraflux.ops.linear.cpu.routes import DRIVERS
from auraflux.ops.moe.experts import Clamp, Experts, Gelu, Limit, ReluSquare, Stack
from auraflux.ops.simd.jit import (
    Kernel,
    arguments,
    as_float,
    empty,
    error_flag,
    floats,
    int32s,
    int64s,
    like,
    share,
    threads,
)
from auraflux.quant import QTensor

TOKENS_AT_ONCE = 512  # bounds the intermediate results: a pair needs 4 * (2 * I + H) bytes
PARALLEL_FROM = 1 << 16  # elements; below this, waking the threads costs more than the work


@Kernel
def _group(args, job, jobs):
    """Sort pairs by expert, stably.

    starts  int64 [experts + 1]   first pair of each expert
    tokens  int64 [pairs]         token of each pair, in sorted order
    places  int64 [tokens, k]     sorted position of each pair; -1 for skipped pairs
    wrong   int64 [1]             1-based number of the first pair whose id is out of range, or 0; no expert has pairs then
    some    skip pairs with a negative id
    """
    ids_at, tokens, k, experts, starts_at, tokens_at, places_at, wrong_at, some = arguments(args, 9)
    pairs = tokens * k
    ids, starts = int32s(ids_at, pairs), int64s(starts_at, experts + 1)
    of, places, wrong = int64s(tokens_at, pairs), int64s(places_at, pairs), int64s(wrong_at, 1)
    starts[:] = 0
    wrong[0] = 0
    for pair in range(pairs):
        if some and ids[pair] < 0:
            continue
        if ids[pair] < 0 or ids[pair] >= experts:
            starts[:] = 0
            wrong[0] = pair + 1
            return
        starts[ids[pair] + 1] += 1
    for expert in range(experts):
        starts[expert + 1] += starts[expert]
    for pair in range(pairs):
        if ids[pair] < 0:
            places[pair] = -1
            continue
        place = starts[ids[pair]]
        of[place], places[pair] = pair // k, place
        starts[ids[pair]] = place + 1
    for expert in range(experts, 0, -1):
        starts[expert] = starts[expert - 1]
    starts[0] = 0


@Kernel
def _list_products(args, job, jobs):
    """Write one product per expert that has tokens, padded with empty products up to `most`; every `step` places of a list.

    codes, scales, biases  addresses of expert 0's arrays, and byte strides between experts
    index                  address of the token of pair 0; out  of its result
    """
    found = arguments(args, 15)
    starts_at, experts, most, codes, scales, biases, codes_step, scales_step, biases_step = found[:9]
    index, out, rows, out_stride, list_at, step = found[9:]
    starts, products = int64s(starts_at, experts + 1), int64s(list_at, FIELDS * (step * (most - 1) + 1))
    at = 0
    for expert in range(experts):
        first, many = starts[expert], starts[expert + 1] - starts[expert]
        if many > 0:
            products[at + CODES], products[at + SCALES] = codes + expert * codes_step, scales + expert * scales_step
            products[at + BIASES] = biases + expert * biases_step
            products[at + INDEX], products[at + COUNT], products[at + OUT] = index + 8 * first, many, out + out_stride * first
            products[at + ROWS], products[at + STRIDE] = rows, out_stride
            at += FIELDS * step
    while at < FIELDS * step * most:
        products[at + COUNT] = 0
        at += FIELDS * step


@Kernel
def _add_biases(args, job, jobs):
    """Add each expert's bias to the results of its pairs."""
    starts_at, experts, biases, width, rows, stride = arguments(args, 6)
    starts = int64s(starts_at, experts + 1)
    for expert in range(experts):
        bias = floats(biases + 4 * expert * width, width)
        for pair in range(starts[expert], starts[expert + 1]):
            row = floats(rows + stride * pair, width)
            for i in range(width):
                row[i] += bias[i]


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


@Kernel
def _scatter(args, job, jobs):
    """Scatter results to their pairs; skipped pairs are not modified."""
    results, stride, places_at, pairs, width, out = arguments(args, 6)
    places = int64s(places_at, pairs)
    for pair in share(pairs, job, jobs):
        if places[pair] >= 0:
            part, result = floats(out + 4 * pair * width, width), floats(results + stride * places[pair], width)
            for i in range(width):
                part[i] = result[i]


class Steps(NamedTuple):
    """Implementation of the two GEMMs of an expert layer.

    gate_up  (tokens, experts, plan, pair count) -> gate and up products, [pairs, I] each; up twice without a gate
    down     (hidden vectors, experts, plan) -> results [pairs, H], wider where rows are padded
    """

    gate_up: Callable[[Tensor, Experts, Tensor, int], tuple[Tensor, Tensor]]
    down: Callable[[Tensor, Experts, Tensor], Tensor]


def sum_experts(steps: Steps, x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
    """Run `expert_mlp` in chunks of TOKENS_AT_ONCE tokens."""
    wide = as_float(x)
    out = empty(*wide.shape)
    for first in range(0, len(x), TOKENS_AT_ONCE):
        part = slice(first, first + TOKENS_AT_ONCE)
        _sum_chunk(steps, wide[part], ids[part], weights[part], experts, out[part])
    return like(out, x)


def write_parts(steps: Steps, x: Tensor, ids: Tensor, experts: Experts, parts: Tensor) -> None:
    """Run `expert_parts` in chunks of TOKENS_AT_ONCE tokens."""
    wide = as_float(x)
    # same chunks as `sum_experts`: the kernel of an expert depends on its token count
    for first in range(0, len(x), TOKENS_AT_ONCE):
        part = slice(first, first + TOKENS_AT_ONCE)
        _write_chunk(steps, wide[part], ids[part], experts, parts[part])


def sum_parts(parts: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    tokens, k, hidden = parts.shape
    out = empty(tokens, hidden)
    jobs = threads() if parts.numel() >= PARALLEL_FROM else 1
    arrays = (parts.data_ptr(), 4 * hidden, token_indices(tokens * k), weights.data_ptr())
    _weighted_sum(jobs, *arrays, tokens, k, hidden, out.data_ptr())
    return out.to(dtype)


def _plan(ids: Tensor, count: int, some: bool) -> tuple[Tensor, int]:
    """Return the pairs sorted by expert, as `_group` writes them, and the address of their positions."""
    tokens, k = ids.shape
    plan = torch.empty(count + 1 + 2 * tokens * k + 1, dtype=torch.int64)
    starts = plan.data_ptr()
    index = starts + 8 * (count + 1)
    places = index + 8 * tokens * k
    _group(1, ids.data_ptr(), tokens, k, count, starts, index, places, places + 8 * tokens * k, some)
    if number := error_flag(places + 8 * tokens * k):
        token, slot = divmod(number - 1, k)
        raise InputError(f"ids[{token}, {slot}] is {int(ids[token, slot])}; there are {count} experts.")
    return plan, places


def _sum_chunk(steps: Steps, x: Tensor, ids: Tensor, weights: Tensor, experts: Experts, out: Tensor) -> None:
    tokens, k = ids.shape
    plan, places = _plan(ids, experts.count, some=False)
    results = _run_experts(steps, x, experts, plan, tokens * k)
    jobs = threads() if tokens * k * experts.hidden >= PARALLEL_FROM else 1
    arrays = (results.data_ptr(), 4 * results.shape[1], places, weights.data_ptr())
    _weighted_sum(jobs, *arrays, tokens, k, experts.hidden, out.data_ptr())


def _write_chunk(steps: Steps, x: Tensor, ids: Tensor, experts: Experts, parts: Tensor) -> None:
    plan, places = _plan(ids, experts.count, some=True)
    found = int(plan[experts.count])
    if found == 0:
        return
    results = _run_experts(steps, x, experts, plan, found)
    jobs = threads() if found * experts.hidden >= PARALLEL_FROM else 1
    arrays = (results.data_ptr(), 4 * results.shape[1], places)
    _scatter(jobs, *arrays, ids.numel(), experts.hidden, parts.data_ptr())


def _run_experts(steps: Steps, x: Tensor, experts: Experts, plan: Tensor, pairs: int) -> Tensor:
    """Return each pair's result in expert order: [pairs, H], wider where rows are padded."""
    gate, up = steps.gate_up(x, experts, plan, pairs)
    _add(experts.gate_bias, gate, experts, plan)
    _add(experts.up_bias, up, experts, plan)
    results = steps.down(_activated(gate, up, experts), experts, plan)
    _add(experts.down_bias, results, experts, plan)
    return results


def _activated(gate: Tensor, up: Tensor, experts: Experts) -> Tensor:
    match experts.activation:
        case Clamp(alpha, limit):
            return clamped_swiglu(gate, up, alpha, limit)
        case Limit(limit, gate_limit):
            return limited_swiglu(gate, up, limit, gate_limit)
        case Gelu():
            return geglu(gate, up)
        case ReluSquare():
            return relu_square(up)
    return swiglu(gate, up)


def _add(bias: Tensor | None, products: Tensor, experts: Experts, plan: Tensor) -> None:
    if bias is not None:
        sizes = bias.shape[1], products.data_ptr(), 4 * products.shape[1]
        _add_biases(1, plan.data_ptr(), experts.count, bias.data_ptr(), *sizes)


def _quantized_gate_up(x: Tensor, experts: Experts, plan: Tensor, pairs: int, one_list: bool) -> tuple[Tensor, Tensor]:
    inner, count, starts = experts.inner, experts.count, plan.data_ptr()
    index, wide, most = starts + 8 * (count + 1), padded(inner), min(count, pairs)
    names = ("up",) if experts.gate is None else ("gate", "up")
    found = empty(len(names), pairs, wide)
    products = torch.empty(len(names) * most * FIELDS, dtype=torch.int64)
    # gate and up of an expert are neighbours, because they have the same tokens
    step, apart = (len(names), 1) if one_list else (1, most)
    for number, name in enumerate(names):
        stack, to = quantized(getattr(experts, name)), products.data_ptr() + 8 * FIELDS * apart * number
        where = (index, found.data_ptr() + 4 * number * pairs * wide, inner, 4 * wide, to, step)
        _list_products(1, starts, count, most, *stack.addresses, *experts.strides[name], *where)
        if not one_list:
            DRIVERS(stack)(x.data_ptr(), len(x), stack, to, most)
    if one_list:
        up = quantized(experts.up)
        DRIVERS(up)(x.data_ptr(), len(x), up, products.data_ptr(), len(names) * most)
    results = found if wide == inner else found[..., :inner].contiguous()
    return results[0], results[-1]


def gate_up_one_list(x: Tensor, experts: Experts, plan: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
    """Multiply gate and up of all experts as one list of products."""
    return _quantized_gate_up(x, experts, plan, pairs, one_list=True)


def gate_up_two_lists(x: Tensor, experts: Experts, plan: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
    """Multiply gate of all experts as one list of products and up as a second."""
    return _quantized_gate_up(x, experts, plan, pairs, one_list=False)


def quantized_down(hidden: Tensor, experts: Experts, plan: Tensor) -> Tensor:
    """Multiply down of all experts as one list of products."""
    stack, pairs, count = quantized(experts.down), len(hidden), experts.count
    wide, most = padded(experts.hidden), min(count, pairs)
    results = empty(pairs, wide)
    products = torch.empty(most * FIELDS, dtype=torch.int64)
    where = (token_indices(pairs), results.data_ptr(), experts.hidden, 4 * wide, products.data_ptr(), 1)
    _list_products(1, plan.data_ptr(), count, most, *stack.addresses, *experts.strides["down"], *where)
    DRIVERS(stack)(hidden.data_ptr(), pairs, stack, products.data_ptr(), most)
    return results


def quantized(stack: Stack) -> QTensor:
    assert isinstance(stack, QTensor)
    return stack


def dense_gate_up(x: Tensor, experts: Experts, plan: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
    """Multiply gate and up, one expert after the other."""
    rows = x[plan[experts.count + 1 : experts.count + 1 + pairs]]
    up = _dense(rows, experts.up, plan)
    return up if experts.gate is None else _dense(rows, experts.gate, plan), up


def dense_down(hidden: Tensor, experts: Experts, plan: Tensor) -> Tensor:
    """Multiply down, one expert after the other."""
    return _dense(hidden, experts.down, plan)


def _dense(rows: Tensor, stack: Stack, plan: Tensor) -> Tensor:
    """Multiply each expert's rows by its dense matrix."""
    out = torch.empty(len(rows), stack.shape[1])
    starts = plan[: stack.shape[0] + 1].tolist()
    for expert, (first, last) in enumerate(pairwise(starts)):
        if last > first:
            out[first:last] = linear(rows[first:last], stack[expert])
    return out
