"""Launch of the `grouped_wgmma` kernels."""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from auraflux.ops.gpu.launch import launch, tensor_descriptor
from auraflux.ops.gpu.sizes import cdiv
from auraflux.ops.moe.cuda.gemm.grouped import grouped
from auraflux.ops.moe.cuda.gemm.grouped_wgmma import Lines, TileShape, expert_tiles, find_places, order_pairs, spread_parts
from auraflux.ops.moe.cuda.routing import assign as routing_assign
from auraflux.ops.moe.cuda.stacks import gate_of, rows_of
from auraflux.ops.moe.experts import Experts, Stack

INPUTS, GROUP, STAGES = 256, 64, 2  # inputs of a K block, inputs per scale, blocks in flight
MOVED, PLACES = 1024, 16  # elements or places per program of the small kernels; places per program of `order_pairs`
SOME_PAIRS, SOME_EACH = 1024, 4  # minimum of pairs, and of pairs per expert
TILED_PAIRS = 8192  # minimum of pairs whatever the number of experts


class Tile(NamedTuple):
    """Tile of a program: pairs, rows of an expert's weights, warps, and registers per thread (None for no limit)."""

    pairs: int
    rows: int
    warps: int
    registers: int | None


# (pairs per expert at most, tile); three and two programs of the smaller tiles share a multiprocessor
SMALLER = ((24, Tile(32, 128, 4, 80)), (64, Tile(64, 128, 4, 104)))
LARGEST = Tile(128, 256, 8, None)


def tile_for(pairs: int, experts: int) -> Tile:
    return next((tile for most, tile in SMALLER if pairs <= most * experts), LARGEST)


@cache
def _layout(kind: gl.dtype, *shape: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(shape), kind)


def _inputs(x: Tensor, tile: Tile) -> TensorDescriptor:
    half = tile.pairs // 2
    return tensor_descriptor(x, [half, 64], _layout(gl.bfloat16, half, 64))


def _codes(stack: Stack, rows: int) -> TensorDescriptor:
    codes, block = stack.packed, [1, rows, INPUTS // 8]  # type: ignore[union-attr]
    return tensor_descriptor(codes, block, _layout(gl.int32, *block))


def _multiplied(
    x: Tensor, owner: Tensor, placed: Tensor, pairs: int, stacks: tuple[Stack, ...], out: Tensor, tile: Tile
) -> None:
    """Multiply permuted blocks, [blocks, width / 64, T, 64], by their experts' stack, to [places, rows]; two are gated."""
    experts, rows, width = stacks[0].shape
    each, shape = tile.rows // len(stacks), TileShape(tile.rows, tile.pairs, INPUTS, GROUP, STAGES, tile.warps)
    codes: list[TensorDescriptor | None] = [None, None]
    lines: list[Lines | None] = [None, None]
    for n, stack in enumerate(stacks):
        codes[n] = _codes(stack, each)
        lines[n] = Lines(stack.scales, stack.biases, stack.scales.stride(0))  # type: ignore[union-attr, arg-type]
    launch(expert_tiles, (cdiv(rows, each), len(placed) // tile.pairs))(
        _inputs(x, tile), *codes, owner, placed, pairs, *lines, out, (experts, rows, width), shape,
        _layout(gl.int32, each, INPUTS // 8), num_warps=tile.warps, maxnreg=tile.registers,
    )  # fmt: skip


def _placed(ids: Tensor, experts: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return pairs by blocks of one expert, each block's expert, and each pair's place; by one program where possible."""
    spots = torch.empty_like(ids)
    (tokens, k), pairs = ids.shape, ids.numel()
    if tokens <= routing_assign.MOST_TOKENS and k <= routing_assign.MOST_SLOTS and experts <= routing_assign.MOST_EXPERTS:
        placed, owner, _ = routing_assign.assign_given(ids, experts, size // 8, spots)
    else:
        placed, owner = grouped(ids, experts, size)
        launch(find_places, (cdiv(len(placed), MOVED),))(placed, spots, len(placed), pairs, MOVED)
    return placed, owner, spots


def _placed_results(x: Tensor, ids: Tensor, experts: Experts) -> tuple[Tensor, Tensor, Tensor]:
    """Return pair results by place, [places, hidden], the pairs of places, and the places of pairs."""
    k, pairs, inner, hidden = ids.shape[1], ids.numel(), experts.inner, experts.hidden
    tile = tile_for(pairs, experts.count)
    placed, owner, spots = _placed(ids, experts.count, tile.pairs)
    blocks = owner[: len(placed) // tile.pairs]
    rows_of(blocks, experts, out=blocks)
    places, sizes = len(placed), (tile.pairs, INPUTS, PLACES)
    ordered = x.new_empty(places * hidden // 64, 64)
    launch(order_pairs, (places // PLACES, hidden // INPUTS))(x, placed, ordered, pairs, k, hidden, *sizes, num_warps=4)
    between = x.new_empty(places * inner // 64, 64)
    _multiplied(ordered, owner, placed, pairs, (gate_of(experts), experts.up), between, tile)
    # reuses the inputs of gate and up
    found = ordered.view(places, hidden)
    _multiplied(between, owner, placed, pairs, (experts.down,), found, tile)
    return found, placed, spots


def multiply(x: Tensor, ids: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """Return pair results by place, [places, hidden], and the place of each pair."""
    found, _, spots = _placed_results(x, ids, experts)
    return found, spots


def write_parts(x: Tensor, ids: Tensor, experts: Experts, parts: Tensor) -> None:
    """Run `expert_parts` for thousands of pairs."""
    found, placed, _ = _placed_results(x, ids, experts)
    launch(spread_parts, (len(placed), cdiv(experts.hidden, MOVED)))(found, placed, parts, ids.numel(), experts.hidden, MOVED)
