"""Sampling on CUDA: torch sorts the vocabulary, and every filter is then a place in that order.

What the tokens of a piece weigh is summed by a program for each piece. One program for each row finds a cut, or the drawn
token, first among these sums and then inside the one piece where it lies, so no more than four pieces are looked at again.
Weights and sums are float64, as the reference's are.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.hopper.device import ready
from auraflux.ops.hopper.launch import launch
from auraflux.ops.hopper.sizes import cdiv, power_of_two
from auraflux.ops.sample.reference import BELOW_ONE

PIECE = 4096  # tokens of a program
WARPS = 8
LARGEST_BELOW_ONE = tl.constexpr(BELOW_ONE)


@triton.jit
def _comparable(logits, out, size, PIECE: tl.constexpr):
    """Write logits as float32 that sort: NaN as -inf, -0 as 0."""
    token = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
    at = tl.program_id(1).to(tl.int64) * size + token
    x = tl.load(logits + at, mask=token < size, other=0.0).to(tl.float32)
    x = tl.where(x == 0, 0.0, x)
    tl.store(out + at, tl.where(x == x, x, float("-inf")), mask=token < size)


@triton.jit
def _last_kept(ordered, top_k, size):
    """Load the least logit that top_k keeps."""
    return tl.load(ordered + tl.minimum(tl.where(top_k > 0, top_k, size), size) - 1)


@triton.jit
def _weigh(ordered, place, size, best, temperature):
    """Load tokens at their places: their logits, and their weights, which are 0 beyond the end."""
    x = tl.load(ordered + place, mask=place < size, other=float("-inf"))
    apart = (x.to(tl.float64) - best.to(tl.float64)) / temperature.to(tl.float64)
    # equal logits weigh 1, also where both are infinite
    return x, tl.where(place < size, tl.where(x == best, 1.0, tl.exp(apart)), 0.0)


@triton.jit
def _weigh_pieces(ordered, temperatures, top_ks, sums, size, PIECE: tl.constexpr):
    """Sum the weights of a piece's tokens that top_k keeps; grid (pieces, rows)."""
    piece, row = tl.program_id(0), tl.program_id(1)
    ordered += row.to(tl.int64) * size
    x, weight = _weigh(ordered, piece * PIECE + tl.arange(0, PIECE), size, tl.load(ordered), tl.load(temperatures + row))
    kept = x >= _last_kept(ordered, tl.load(top_ks + row), size)
    tl.store(sums + row * tl.num_programs(0) + piece, tl.sum(tl.where(kept, weight, 0.0)))


@triton.jit
def _last_piece(fits, piece):
    """Find the last piece whose beginning fits; the first one always does."""
    return tl.max(tl.where(fits, piece, 0))


@triton.jit
def _draw(
    ordered, ids, sums, uniforms, temperatures, top_ks, top_ps, min_ps, out, size, pieces,
    PIECE: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Cut a row by all filters and draw from what is left; grid (rows,)."""
    row = tl.program_id(0)
    ordered += row.to(tl.int64) * size
    temperature, min_p, top_p = tl.load(temperatures + row), tl.load(min_ps + row), tl.load(top_ps + row).to(tl.float64)
    best, least = tl.load(ordered), _last_kept(ordered, tl.load(top_ks + row), size)
    min_p = tl.minimum(min_p, 1.0).to(tl.float64)
    token, piece = tl.arange(0, PIECE), tl.arange(0, PIECES)
    total = tl.load(sums + row * pieces + piece, mask=piece < pieces, other=0.0)
    before = tl.cumsum(total, 0) - total
    first, first_weight = _weigh(ordered, piece * PIECE, size, best, temperature)
    there = piece < pieces

    # top_k and min_p keep what is no less than something
    begin = _last_piece(there & (first >= least) & (first_weight >= min_p), piece) * PIECE
    x, weight = _weigh(ordered, begin + token, size, best, temperature)
    there_too = begin + token < size
    end = begin + tl.sum((there_too & (x >= least) & (weight >= min_p)).to(tl.int32))
    if top_p < 1:
        limit = top_p * tl.sum(total)
        at = _last_piece(there & (before < limit), piece)
        x, weight = _weigh(ordered, at * PIECE + token, size, best, temperature)
        weight = tl.where(x >= least, weight, 0.0)
        ahead = tl.sum(tl.where(piece == at, before, 0.0)) + tl.cumsum(weight, 0) - weight
        end = tl.minimum(end, at * PIECE + tl.sum((ahead < limit).to(tl.int32)))
    end = tl.maximum(end, 1)

    at = (end - 1) // PIECE
    x, weight = _weigh(ordered, at * PIECE + token, end, best, temperature)
    whole = tl.sum(tl.where(piece == at, before, 0.0)) + tl.sum(weight)
    target = tl.minimum(tl.maximum(tl.load(uniforms + row).to(tl.float64), 0.0), LARGEST_BELOW_ONE) * whole
    at = _last_piece((piece <= at) & (before <= target), piece)
    x, weight = _weigh(ordered, at * PIECE + token, end, best, temperature)
    running = tl.sum(tl.where(piece == at, before, 0.0)) + tl.cumsum(weight, 0)
    place = at * PIECE + tl.sum(((running <= target) & (at * PIECE + token < end)).to(tl.int32))
    place = tl.where(temperature > 0, tl.minimum(place, end - 1), 0)
    tl.store(out + row, tl.load(ids + row.to(tl.int64) * size + place))


def sample(logits: Tensor, uniform: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    ready(logits)
    (rows, size), device = logits.shape, logits.device
    out = torch.empty(rows, dtype=torch.int64, device=device)
    if not rows:
        return out
    pieces = cdiv(size, PIECE)
    comparable = torch.empty(logits.shape, device=device)
    launch(_comparable, (pieces, rows))(logits, comparable, size, PIECE, num_warps=WARPS)
    ordered, ids = comparable.sort(dim=-1, descending=True, stable=True)
    sums = torch.empty(rows, pieces, dtype=torch.float64, device=device)
    launch(_weigh_pieces, (pieces, rows))(ordered, temperature, top_k, sums, size, PIECE, num_warps=WARPS)
    settings = uniform, temperature, top_k, top_p, min_p
    launch(_draw, (rows,))(ordered, ids, sums, *settings, out, size, pieces, PIECE, power_of_two(pieces), num_warps=WARPS)
    return out


@triton.jit
def _lower(logits, mask, counts, repetitions, presences, frequencies, out, size, PIECE: tl.constexpr):
    """Lower the logits of a piece of one row; grid (pieces, rows)."""
    row, token = tl.program_id(1), tl.program_id(0) * PIECE + tl.arange(0, PIECE)
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
        launch(_lower, (cdiv(size, PIECE), rows))(logits, *settings, out, size, PIECE, num_warps=WARPS)
    return out
