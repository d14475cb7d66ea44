"""Launches of the kernels of `codec.py`: rotate, encode, decode and append rows."""

import torch
from torch import Tensor

from auraflux.ops._dispatch import is_invariant
from auraflux.ops.gpu.blocks.pages import index_of
from auraflux.ops.gpu.device import INTERPRETED
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv, power_of_two
from auraflux.ops.turboquant.arrangement import Arrangement
from auraflux.ops.turboquant.codebook import Codebook, codebook
from auraflux.ops.turboquant.cuda.arguments import CodeTensors, keys_of, shape_of, values_of
from auraflux.ops.turboquant.cuda.encode.codec import (
    LatentShape,
    append_coded,
    append_coded_latent,
    decode_rows,
    encode_rows,
    rotate_rows,
)
from auraflux.ops.turboquant.cuda.encode.hadamard import levels_for, rotation_for
from auraflux.ops.turboquant.cuda.mla.full_precision import full_precision_latent_shape, full_precision_latents
from auraflux.ops.turboquant.pages import CodePages, LatentCodes, row_words

ROWS_TOGETHER = 16  # rows per program where there are many
MANY_PROGRAMS = 2 if INTERPRETED else 64


def rotated(x: Tensor, seed: int, inverse: bool, dtype: torch.dtype, factor: float = 1.0) -> Tensor:
    out, width = torch.empty(x.shape, dtype=dtype, device=x.device), x.shape[-1]
    rotation, matrix = rotation_for(width, seed, inverse, x.device)
    if x.numel():
        sizes = {**_row(width), "MATRIX": matrix, "INVERSE": inverse}
        launch(rotate_rows, (x.numel() // width,))(x, rotation, out, factor, **sizes)
    return out


def _row(width: int) -> dict[str, int]:
    """Return the launch sizes for one row per program: width, padded width, warps."""
    padded, warps = _padded(width)
    return {"D": width, "P": padded, "num_warps": warps}


def _padded(width: int, rows: int = 1) -> tuple[int, int]:
    """Return the padded width, a power of two that holds whole packing units, and the warps for `rows` rows."""
    padded = max(32, power_of_two(width)) if width & (width - 1) else width
    return padded, 1 if rows * padded <= 256 else 4


def encoded(x: Tensor, bits: int, seed: int, explicit: Codebook | None = None) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    codes = torch.empty(*x.shape[:-1], row_words(bits, width), dtype=torch.int32, device=x.device)
    norms = torch.empty(x.shape[:-1], device=x.device)
    rotation, matrix = rotation_for(width, seed, False, x.device)
    if rows := norms.numel():
        rows_each = _rows_each(rows, matrix)
        padded, warps = _padded(width, rows_each)
        sizes = {"D": width, "P": padded, "BITS": bits, "MATRIX": matrix, "R": rows_each, "num_warps": warps}
        launch(encode_rows, (cdiv(rows, rows_each),))(
            x, rotation, levels_for(bits, width, x.device, explicit), codes, norms, rows, **sizes
        )
    return codes, norms


def _rows_each(rows: int, matrix: bool) -> int:
    """Return the rows per program: several where that leaves enough programs."""
    return 1 if matrix or rows < ROWS_TOGETHER * MANY_PROGRAMS or is_invariant() else ROWS_TOGETHER


def decoded(codes: Tensor, norms: Tensor, bits: int, width: int, seed: int, explicit: Codebook | None = None) -> Tensor:
    out = torch.empty(*norms.shape, width, device=codes.device)
    rotation, matrix = rotation_for(width, seed, True, codes.device)
    if out.numel():
        book = codebook(bits, width, codes.device, explicit)
        launch(decode_rows, (norms.numel(),))(codes, norms, rotation, book, out, BITS=bits, MATRIX=matrix, **_row(width))
    return out


def append(k: Tensor, v: Tensor, pages: CodePages, starts: Tensor) -> None:
    """Encode keys and values into their pages."""
    tokens, heads, width = k.shape
    rotation, matrix = rotation_for(width, pages.seed, False, k.device)
    pairs = pages.arrangement is Arrangement.PAIRS
    # values in pairs are stored token by token: neighbours share words
    rows_each = 1 if pairs else _rows_each(tokens * heads, matrix)
    padded, warps = _padded(width, rows_each)
    groups = tokens // rows_each + (2 * len(pages.lengths) if rows_each > 1 else 0)
    launch(append_coded, (groups, heads, 2))(
        k,
        v,
        keys_of(pages, levels_for(pages.key_bits, width, k.device, pages.key_book)),
        values_of(pages, levels_for(pages.value_bits, width, k.device, pages.value_book)),
        rotation,
        index_of(pages, starts),
        SHAPE=shape_of(pages),
        MATRIX=matrix,
        R=rows_each,
        P=padded,
        num_warps=warps,
    )


def append_latent(latent: Tensor, k_rope: Tensor, pages: LatentCodes, starts: Tensor) -> None:
    """Encode latents into their pages, and store RoPE keys uncompressed."""
    (tokens, width), rope = latent.shape, k_rope.shape[1]
    if not tokens:
        return
    rotation, matrix = rotation_for(width, pages.seed, False, latent.device)
    padded, warps = _padded(width)
    launch(append_coded_latent, (tokens,))(
        latent,
        k_rope,
        CodeTensors(pages.codes, pages.norms, levels_for(pages.bits, width, latent.device, pages.book)),
        pages.rope,
        rotation,
        index_of(pages, starts),
        full_precision_latents(pages),
        SHAPE=LatentShape(
            *(width, padded, rope, power_of_two(rope), pages.bits, matrix, pages.pool[1]),
            power_of_two(pages.table.shape[0]),
            full_precision_latent_shape(pages),
        ),
        num_warps=warps,
    )
