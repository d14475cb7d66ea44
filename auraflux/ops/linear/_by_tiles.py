"""Products by tiles of tokens on Hopper: which are served, how they are shared out, their launches (`_hopper_tiles.py`)."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from auraflux.ops._triton import INTERPRETED, Build, capability, cdiv, multiprocessors
from auraflux.ops.linear._hopper_tiles import add_shares, multiply_tiles, order_tokens
from auraflux.quant import QTensor

HOPPER = (9, 0)
BITS = (4, 8)
FEW = 16  # tokens that other kernels are for, where they serve
MOST_TOGETHER = 3  # weights of a launch
MOST_TOKENS = 1024  # for more, a weight written out once costs less than taking it apart for every tile of tokens
ROWS = 128  # of a program
MOST_BOX = 256  # rows of a tile that the copy engine takes at once
ORDERED, ADDED = 1024, 32  # inputs of a token, and rows, of the programs before and after
SHARED_NBYTES = 216 << 10  # of a program
WARPS = 8  # that multiply


def fits_tiles(x: Tensor, weights: Sequence[QTensor]) -> bool:
    """Whether the kernels here serve products: 4 or 8 bits, all in bf16, tokens from the second to as many as pay."""
    return (
        not INTERPRETED
        and 1 < x.shape[0] <= MOST_TOKENS
        and x.dtype is torch.bfloat16
        and capability(x.device) == HOPPER
        and not x.data_ptr() % 16
        and all(
            weight.bits in BITS
            and weight.shape[0]
            and weight.biases is not None
            and weight.scales.dtype is torch.bfloat16
            and not weight.packed.data_ptr() % 16
            for weight in weights
        )
    )


def _plan(tokens: int, rows: Sequence[int], width: int, bits: int, device: torch.device) -> tuple[int, int, int, int]:
    """Tokens of a tile, inputs of a block, blocks in flight, programs that share K."""
    tile = next((size for size in (32, 64, 128) if tokens <= size), 256 if bits == 4 else 128)
    block = 256 if tile <= 64 and bits == 4 else 128
    stages = min(6, SHARED_NBYTES // (ROWS * block * bits // 8 + block * tile * 2))
    programs = sum(cdiv(n, ROWS) for n in rows) * cdiv(tokens, tile)
    return tile, block, stages, max(1, min(multiprocessors(device) // programs, cdiv(width, block) // 2))


def tile_layout(kind: str, rows: int, columns: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16 if kind == "bf16" else gl.int32)


def _tiles(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    kind = "bf16" if x.dtype is torch.bfloat16 else "i32"
    return TensorDescriptor.from_tensor(x, [rows, columns], tile_layout(kind, rows, columns))


def multiply_hopper_tiles(
    x: Tensor, weights: Sequence[QTensor], outs: Sequence[Tensor], gated: bool = False, plan: Any = None, R: int = 128
) -> None:
    """Tokens times up to MOST_TOGETHER weights of one format and width; gated: silu(first) * second, into one out."""
    (tokens, width), rows, bits = x.shape, [weight.shape[0] for weight in weights], weights[0].bits
    tile, block, stages, shares = plan or _plan(tokens, rows, width, bits, x.device)
    blocks, tiles = cdiv(width, block), cdiv(tokens, tile)
    share = cdiv(blocks, shares)
    shares = cdiv(blocks, share)
    padded = blocks * block
    ordered = x.new_empty(tiles * padded // 64 * tile, 64)
    grid = tiles * tile, cdiv(padded, ORDERED)
    order_tokens[grid](x, ordered, tokens, width, padded, bits, tile, block, ORDERED, num_warps=4, launch_pdl=True)
    ends = list(accumulate(cdiv(n, R) for n in rows))
    none = [None] * (MOST_TOGETHER - len(weights))
    sizes = [*ends[:-1], *none, *rows, *none]
    part = None
    if shares > 1 or gated:
        part = torch.empty(shares * tiles * ends[-1] * R * tile, dtype=torch.float32, device=x.device)
    passed: list[Any] = []
    for number, weight in enumerate(weights):
        passed += [weight.scales, weight.biases, outs[number] if part is None else None]
    xs, ws = _tiles(ordered, min(MOST_BOX, block // 64 * tile), 64), [_tiles(w.packed, R, block * bits // 32) for w in weights]
    multiply_tiles[ends[-1], shares, tiles](
        xs, *ws, *none, *passed, *none, *none, *none, part, *sizes, width, tokens, blocks, share,
        len(weights), R, tile, block, weights[0].group, stages, WARPS, num_warps=WARPS, launch_pdl=True,
    )  # fmt: skip
    if part is not None:
        grid = (ends[0] if gated else ends[-1]) * (R // ADDED), tiles * cdiv(tile, 64)
        add_shares[grid](
            part, *outs, *[None] * (MOST_TOGETHER - len(outs)), *sizes, tokens, ends[-1], shares,
            1 if gated else len(weights), gated, R, tile, ADDED, min(tile, 64), num_warps=4, launch_pdl=True,
        )  # fmt: skip


def _builds() -> list[Build]:
    """One weight, three of one input, two of an MLP; few tokens and many."""

    def tiles(kind: str, rows: int, columns: int) -> str:
        return f"tensordesc<{kind}[{rows},{columns}],{tile_layout(kind, rows, columns)!r}>".replace(" ", "")

    def product(count: int, tile: int, block: int, stages: int, bits: int, parts: bool) -> Build:
        absent = [f"{name}{number}" for number in range(count, MOST_TOGETHER) for name in ("w", "s", "b", "y", "rows")]
        absent += ["part"] if not parts else [f"y{number}" for number in range(count)]
        absent += [f"end{number}" for number in range(count - 1, MOST_TOGETHER - 1)]
        sizes = {"COUNT": count, "R": ROWS, "T": tile, "KB": block, "G": 64, "ST": stages, "W": WARPS}
        types = [tiles("bf16", min(MOST_BOX, block // 64 * tile), 64)] + [tiles("i32", ROWS, block * bits // 32)] * count
        types += ["*bf16 *bf16" if parts else "*bf16 *bf16 *bf16"] * count + ["*fp32"] * parts + ["i32"] * (count - 1)
        types += ["i32:16"] * count + ["i32:16 i32 i32 i32"]
        constants = {**dict.fromkeys(absent), **sizes}
        return Build(multiply_tiles, " ".join(types), constants, hot=True, options={"num_warps": WARPS})

    three = {"COUNT": 3, "GATED": False, "R": ROWS, "T": 64, "BR": ADDED, "BT": 64}
    gated = {"y1": None, "y2": None, "end1": None, "rows2": None, **three, "COUNT": 1, "GATED": True}
    return [
        Build(
            order_tokens,
            "*bf16 *bf16 i32 i32:16 i32:16",
            {"BITS": 4, "T": 64, "KB": 256, "BLOCK": ORDERED},
            hot=True,
        ),
        product(1, 64, 256, 4, 4, True),
        product(3, 32, 256, 6, 4, True),
        product(2, 128, 128, 5, 4, True),
        product(1, 256, 128, 3, 4, False),
        product(1, 64, 128, 6, 8, True),
        Build(add_shares, "*fp32 *bf16 *bf16 *bf16 i32 i32 i32:16 i32:16 i32:16 i32 i32 i32", three, hot=True),
        Build(add_shares, "*fp32 *bf16 i32 i32:16 i32:16 i32 i32 i32", gated, hot=True),
    ]


TILE_BUILDS = _builds()
