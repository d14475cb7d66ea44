"""Sampling on CUDA: torch sorts the vocabulary, and every filter is then a cut in that order.

One program per block sums the weights of its tokens. One program per row finds a cut, or the sampled token, first among these
sums and then inside the block that contains it, so no more than four blocks are read again. Weights and sums are float64, as
in the reference.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.gpu.device import ready
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv, power_of_two
from auraflux.ops.sample.reference import BELOW_ONE

BLOCK = 4096  # tokens of a block
WARPS = 8
LARGEST_BELOW_ONE = tl.constexpr(BELOW_ONE)


@triton.jit
def _comparable(logits, out, size, BLOCK: tl.constexpr):
    """Store logits as sortable float32: NaN as -inf, -0 as 0."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(1).to(tl.int64) * size + token
    x = tl.load(logits + at, mask=token < size, other=0.0).to(tl.float32)
    x = tl.where(x == 0, 0.0, x)
    tl.store(out + at, tl.where(x == x, x, float("-inf")), mask=token < size)


@triton.jit
def _least_of_top_k(ordered, top_k, size):
    """Load the lowest logit within the top k."""
    return tl.load(ordered + tl.minimum(tl.where(top_k > 0, top_k, size), size) - 1)


@triton.jit
def _weigh(ordered, place, size, best, temperature):
    """Load the logits and weights of tokens at places of the order; weights are 0 past the end."""
    x = tl.load(ordered + place, mask=place < size, other=float("-inf"))
    distance = (x.to(tl.float64) - best.to(tl.float64)) / temperature.to(tl.float64)
    # equal logits weigh 1, even if both are infinite
    return x, tl.where(place < size, tl.where(x == best, 1.0, tl.exp(distance)), 0.0)


@triton.jit
def _weigh_blocks(ordered, temperatures, top_ks, sums, size, BLOCK: tl.constexpr):
    """Sum the weights of a block's tokens within the top k; grid (blocks, rows)."""
    block, row = tl.program_id(0), tl.program_id(1)
    ordered += row.to(tl.int64) * size
    x, weight = _weigh(ordered, block * BLOCK + tl.arange(0, BLOCK), size, tl.load(ordered), tl.load(temperatures + row))
    selected = x >= _least_of_top_k(ordered, tl.load(top_ks + row), size)
    tl.store(sums + row * tl.num_programs(0) + block, tl.sum(tl.where(selected, weight, 0.0)))


@triton.jit
def _last_block(fits, block):
    """Find the last block whose start satisfies the condition; the first one always does."""
    return tl.max(tl.where(fits, block, 0))


class Settings(NamedTuple):
    """Random numbers and sampling settings of a batch, [B] each."""

    uniform: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


@triton.jit
def _draw(ordered, ids, sums, settings, out, size, blocks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Apply all filters to a row and sample from the rest; grid (rows,)."""
    row = tl.program_id(0)
    ordered += row.to(tl.int64) * size
    temperature, min_p = tl.load(settings.temperature + row), tl.load(settings.min_p + row)
    top_p = tl.load(settings.top_p + row).to(tl.float64)
    best, least = tl.load(ordered), _least_of_top_k(ordered, tl.load(settings.top_k + row), size)
    min_p = tl.minimum(min_p, 1.0).to(tl.float64)
    token, block = tl.arange(0, BLOCK), tl.arange(0, BLOCKS)
    total = tl.load(sums + row * blocks + block, mask=block < blocks, other=0.0)
    before = tl.cumsum(total, 0) - total
    first, first_weight = _weigh(ordered, block * BLOCK, size, best, temperature)
    there = block < blocks

    # top_k and min_p are lower bounds
    begin = _last_block(there & (first >= least) & (first_weight >= min_p), block) * BLOCK
    x, weight = _weigh(ordered, begin + token, size, best, temperature)
    there_too = begin + token < size
    end = begin + tl.sum((there_too & (x >= least) & (weight >= min_p)).to(tl.int32))
    if top_p < 1:
        limit = top_p * tl.sum(total)
        at = _last_block(there & (before < limit), block)
        x, weight = _weigh(ordered, at * BLOCK + token, size, best, temperature)
        weight = tl.where(x >= least, weight, 0.0)
        ahead = tl.sum(tl.where(block == at, before, 0.0)) + tl.cumsum(weight, 0) - weight
        end = tl.minimum(end, at * BLOCK + tl.sum((ahead < limit).to(tl.int32)))
    end = tl.maximum(end, 1)

    at = (end - 1) // BLOCK
    x, weight = _weigh(ordered, at * BLOCK + token, end, best, temperature)
    whole = tl.sum(tl.where(block == at, before, 0.0)) + tl.sum(weight)
    target = tl.minimum(tl.maximum(tl.load(settings.uniform + row).to(tl.float64), 0.0), LARGEST_BELOW_ONE) * whole
    at = _last_block((block <= at) & (before <= target), block)
    x, weight = _weigh(ordered, at * BLOCK + token, end, best, temperature)
    running = tl.sum(tl.where(block == at, before, 0.0)) + tl.cumsum(weight, 0)
    place = at * BLOCK + tl.sum(((running <= target) & (at * BLOCK + token < end)).to(tl.int32))
    place = tl.where(temperature > 0, tl.minimum(place, end - 1), 0)
    tl.store(out + row, tl.load(ids + row.to(tl.int64) * size + place))


def sample(logits: Tensor, uniform: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    ready(logits)
    (rows, size), device = logits.shape, logits.device
    out = torch.empty(rows, dtype=torch.int64, device=device)
    if not rows:
        return out
    blocks = cdiv(size, BLOCK)
    comparable = torch.empty(logits.shape, device=device)
    launch(_comparable, (blocks, rows))(logits, comparable, size, BLOCK, num_warps=WARPS)
    ordered, ids = comparable.sort(dim=-1, descending=True, stable=True)
    sums = torch.empty(rows, blocks, dtype=torch.float64, device=device)
    launch(_weigh_blocks, (blocks, rows))(ordered, temperature, top_k, sums, size, BLOCK, num_warps=WARPS)
    settings = Settings(uniform, temperature, top_k, top_p, min_p)
    launch(_draw, (rows,))(ordered, ids, sums, settings, out, size, blocks, BLOCK, power_of_two(blocks), num_warps=WARPS)
    return out


@triton.jit
def _lower(logits, mask, counts, repetitions, presences, frequencies, out, size, BLOCK: tl.constexpr):
    """Lower the logits of a block of one row; grid (blocks, rows)."""
    row, token = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at, there = row.to(tl.int64) * size + token, token < size
    x = tl.load(logits + at, mask=there, other=0.0).to(tl.float32)
    count = tl.load(counts + at, mask=there, other=0)
    factor, seen = tl.load(repetitions + row), tl.load(mask + at, mask=there, other=0) != 0
    x = tl.where(seen | (count > 0), tl.where(x < 0, x * factor, tl.div_rn(x, factor)), x)
    x -= tl.load(frequencies + row) * count.to(tl.float32)
    tl.store(out + at, x - tl.where(count > 0, tl.load(presences + row), 0.0), mask=there)


def penalize(
    logits: Tensor, prompt_mask: Tensor, output_counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    ready(logits)
    (rows, size), out = logits.shape, torch.empty_like(logits)
    if out.numel():
        settings = prompt_mask.view(torch.uint8), output_counts, repetition, presence, frequency
        launch(_lower, (cdiv(size, BLOCK), rows))(logits, *settings, out, size, BLOCK, num_warps=WARPS)
    return out
