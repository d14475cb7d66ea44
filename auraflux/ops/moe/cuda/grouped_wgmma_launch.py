"""How the kernels of `grouped_wgmma` are launched."""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from auraflux.ops.hopper.launch import described, launch
from auraflux.ops.hopper.sizes import cdiv
from auraflux.ops.moe.cuda import assign
from auraflux.ops.moe.cuda.grouped_gemm import grouped
from auraflux.ops.moe.cuda.grouped_wgmma import Lines, expert_tiles, find_places, order_pairs, spread_parts
from auraflux.ops.moe.cuda.stacks import gate_of
from auraflux.ops.moe.experts import Experts, Stack

INPUTS, GROUP, STAGES = 256, 64, 2  # of a block of K, of a scale; blocks in flight
MOVED, PLACES = 1024, 16  # elements or places that a program of the small kernels has; places whose inputs one orders
SOME_PAIRS, SOME_EACH = 1024, 4  # from so many on, if there are so many for each expert
TILED_PAIRS = 8192  # in any case


class Tile(NamedTuple):
    """What a program multiplies: rows of an expert's weights by so many of its pairs; registers of a thread, None for all."""

    pairs: int
    rows: int
    warps: int
    registers: int | None


# where experts have at most so many pairs each; three and two programs of the smaller ones share a multiprocessor
SMALLER = ((24, Tile(32, 128, 4, 80)), (64, Tile(64, 128, 4, 104)))
LARGEST = Tile(128, 256, 8, None)


def tile_for(pairs: int, experts: int) -> Tile:
    return next((tile for most, tile in SMALLER if pairs <= most * experts), LARGEST)


@cache
def _layout(kind: gl.dtype, *shape: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(shape), kind)


def _inputs(x: Tensor, tile: Tile) -> TensorDescriptor:
    half = tile.pairs // 2
    return described(x, [half, 64], _layout(gl.bfloat16, half, 64))


def _codes(stack: Stack, rows: int) -> TensorDescriptor:
    codes, block = stack.packed, [1, rows, INPUTS // 8]  # type: ignore[union-attr]
    return described(codes, block, _layout(gl.int32, *block))


def _multiplied(
    x: Tensor, owner: Tensor, placed: Tensor, pairs: int, stacks: tuple[Stack, ...], out: Tensor, tile: Tile
) -> None:
    """Blocks in order, [blocks, width / 64, T, 64], times a stack of their experts, to [places, rows]; two gated, in order."""
    experts, rows, width = stacks[0].shape
    each, sizes = tile.rows // len(stacks), (tile.rows, tile.pairs, INPUTS, GROUP, STAGES, tile.warps)
    codes: list[TensorDescriptor | None] = [None, None]
    lines: list[Lines | None] = [None, None]
    for n, stack in enumerate(stacks):
        codes[n] = _codes(stack, each)
        lines[n] = Lines(stack.scales, stack.biases, stack.scales.stride(0))  # type: ignore[union-attr, arg-type]
    launch(expert_tiles, (cdiv(rows, each), len(placed) // tile.pairs))(
        _inputs(x, tile), *codes, owner, placed, pairs, *lines, out, experts, rows, width, *sizes,
        _layout(gl.int32, each, INPUTS // 8), num_warps=tile.warps, maxnreg=tile.registers,
    )  # fmt: skip


def _placed(ids: Tensor, experts: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs by blocks of one expert's, each block's expert, and each pair's place; by one program if it can."""
    spots = torch.empty_like(ids)
    (tokens, k), pairs = ids.shape, ids.numel()
    if tokens <= assign.MOST_TOKENS and k <= assign.MOST_SLOTS and experts <= assign.MOST_EXPERTS:
        placed, owner, _ = assign.assign_given(ids, experts, size // 8, spots)
    else:
        placed, owner = grouped(ids, experts, size)
        launch(find_places, (cdiv(len(placed), MOVED),))(placed, spots, len(placed), pairs, MOVED)
    return placed, owner, spots


def _placed_results(x: Tensor, ids: Tensor, experts: Experts) -> tuple[Tensor, Tensor, Tensor]:
    """The results of pairs by the places of their blocks, [places, hidden], the pairs of places, and the places of pairs."""
    k, pairs, inner, hidden = ids.shape[1], ids.numel(), experts.inner, experts.hidden
    tile = tile_for(pairs, experts.count)
    placed, owner, spots = _placed(ids, experts.count, tile.pairs)
    places, sizes = len(placed), (tile.pairs, INPUTS, PLACES)
    ordered = x.new_empty(places * hidden // 64, 64)
    launch(order_pairs, (places // PLACES, hidden // INPUTS))(x, placed, ordered, pairs, k, hidden, *sizes, num_warps=4)
    between = x.new_empty(places * inner // 64, 64)
    _multiplied(ordered, owner, placed, pairs, (gate_of(experts), experts.up), between, tile)
    # what was read for gate and up is no longer needed
    found = ordered.view(places, hidden)
    _multiplied(between, owner, placed, pairs, (experts.down,), found, tile)
    return found, placed, spots


def multiply(x: Tensor, ids: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """The results of pairs, [places, hidden], and the place of each pair."""
    found, _, spots = _placed_results(x, ids, experts)
    return found, spots


def write_parts(x: Tensor, ids: Tensor, experts: Experts, parts: Tensor) -> None:
    """`expert_parts` for thousands of pairs."""
    found, placed, _ = _placed_results(x, ids, experts)
    launch(spread_parts, (len(placed), cdiv(experts.hidden, MOVED)))(found, placed, parts, ids.numel(), experts.hidden, MOVED)
