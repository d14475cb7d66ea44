"""When the kernels of `_cuda_tiles` serve a mixture, and how they are launched."""

from functools import cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from auraflux.ops._launch import described
from auraflux.ops._triton import Build, cdiv
from auraflux.ops.moe._cuda_hopper import fits_hopper
from auraflux.ops.moe._cuda_many import grouped
from auraflux.ops.moe._cuda_tiles import expert_tiles, find_places, order_hidden, order_pairs, spread_parts
from auraflux.ops.moe.experts import Experts, Stack

PAIRS, INPUTS, ROWS, STAGES, WARPS = 128, 256, 256, 2, 8  # of a program, of a block of K; blocks in flight
GROUP = 64
HALF = PAIRS // 2
TILED_PAIRS = 8192  # from so many on: 64 for each of 128 experts
MOVED = 1024  # elements or places that a program of the small kernels has


def fits_tiles(x: Tensor, ids: Tensor, experts: Experts) -> bool:
    return ids.numel() >= TILED_PAIRS and fits_hopper(x, experts)


@cache
def _layout(kind: gl.dtype, *shape: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(shape), kind)


def _inputs(x: Tensor) -> TensorDescriptor:
    return described(x, [HALF, 64], _layout(gl.bfloat16, HALF, 64))


def _codes(stack: Stack) -> TensorDescriptor:
    codes, block = stack.packed, [1, ROWS, INPUTS // 8]  # type: ignore[union-attr]
    return described(codes, block, _layout(gl.int32, *block))


def _multiplied(
    x: Tensor, owner: Tensor, placed: Tensor, pairs: int, stacks: tuple[Stack, ...], outs: tuple[Tensor, ...]
) -> None:
    """Blocks in order, [blocks, width / 64, PAIRS, 64], times one or two stacks of their experts, to [places, rows] each."""
    experts, rows, width = stacks[0].shape
    tiles, sizes = cdiv(rows, ROWS), (ROWS, PAIRS, INPUTS, GROUP, STAGES, WARPS)
    codes, steps, lines = [], [], []
    for stack, out in zip(stacks, outs, strict=True):
        codes.append(_codes(stack))
        lines += [stack.scales, stack.biases, out]  # type: ignore[union-attr]
        steps.append(stack.scales.stride(0))  # type: ignore[union-attr]
    if len(stacks) == 1:
        codes, lines, steps = [*codes, None], [*lines, None, None, None], [*steps, None]
    expert_tiles[tiles * len(stacks), len(owner)](
        _inputs(x), *codes, owner, placed, pairs, *lines, *steps, experts, rows, width, tiles, len(stacks), *sizes,
        _layout(gl.int32, ROWS, INPUTS // 8), num_warps=WARPS,
    )  # fmt: skip


def _placed_results(x: Tensor, ids: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """The results of pairs by the places of their blocks, [places, hidden], and the pairs of places."""
    k, pairs, inner, hidden = ids.shape[1], ids.numel(), experts.inner, experts.hidden
    placed, owner = grouped(ids, experts.count, PAIRS)
    places, sizes = len(placed), (PAIRS, INPUTS, MOVED)
    ordered = x.new_empty(places * hidden // 64, 64)
    order_pairs[places, cdiv(hidden, MOVED)](x, placed, ordered, pairs, k, hidden, *sizes, num_warps=4)
    gate, up, between = x.new_empty(places, inner), x.new_empty(places, inner), x.new_empty(places * inner // 64, 64)
    _multiplied(ordered, owner, placed, pairs, (experts.gate, experts.up), (gate, up))
    order_hidden[places, cdiv(inner, MOVED)](gate, up, placed, between, pairs, inner, *sizes, num_warps=4)
    # what was read for gate and up is no longer needed
    found = ordered.view(places, hidden)
    _multiplied(between, owner, placed, pairs, (experts.down,), (found,))
    return found, placed


def tiled(x: Tensor, ids: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """The results of pairs, [places, hidden], and the place of each pair."""
    found, placed = _placed_results(x, ids, experts)
    spots = torch.empty_like(ids)
    find_places[(cdiv(len(placed), MOVED),)](placed, spots, len(placed), ids.numel(), MOVED)
    return found, spots


def tiled_parts(x: Tensor, ids: Tensor, experts: Experts, parts: Tensor) -> None:
    """`expert_parts` for thousands of pairs."""
    found, placed = _placed_results(x, ids, experts)
    spread_parts[len(placed), cdiv(experts.hidden, MOVED)](found, placed, parts, ids.numel(), experts.hidden, MOVED)


def _descriptor(kind: str, shape: list[int], layout: gl.NVMMASharedLayout) -> str:
    return f"tensordesc<{kind}[{','.join(map(str, shape))}],{layout!r}>".replace(" ", "")


def _builds() -> list[Build]:
    inputs, block = _descriptor("bf16", [HALF, 64], _layout(gl.bfloat16, HALF, 64)), [1, ROWS, INPUTS // 8]
    codes, ints = _descriptor("i32", block, _layout(gl.int32, *block)), "i32:16 i32:16"
    sizes = {"R": ROWS, "T": PAIRS, "KB": INPUTS, "G": GROUP, "ST": STAGES, "W": WARPS}
    sizes |= {"CODES": _layout(gl.int32, ROWS, INPUTS // 8)}
    one, moved = dict.fromkeys(("w1", "s1", "b1", "y1", "step1")), {"T": PAIRS, "KB": INPUTS, "BLOCK": MOVED}
    line, wide = "*bf16 *bf16 *bf16", {"num_warps": WARPS}
    two_types = f"{inputs} {codes} {codes} *i32 *i32 i32:16 {line} {line} {ints} i32 {ints} i32"
    one_types = f"{inputs} {codes} *i32 *i32 i32:16 {line} i32:16 i32 {ints} i32"
    return [
        Build(expert_tiles, two_types, {"COUNT": 2, **sizes}, hot=True, options=wide),
        Build(expert_tiles, one_types, {"COUNT": 1, **sizes, **one}, hot=True, options=wide),
        Build(order_pairs, "*bf16 *i32 *bf16 i32:16 i32 i32:16", moved, hot=True),
        Build(order_hidden, "*bf16 *bf16 *i32 *bf16 i32:16 i32:16", moved, hot=True),
        Build(find_places, f"*i32 *i32 {ints}", {"BLOCK": MOVED}, hot=True),
        Build(spread_parts, f"*bf16 *i32 *fp32 {ints}", {"BLOCK": MOVED}, hot=True),
    ]


TILE_BUILDS = _builds()
