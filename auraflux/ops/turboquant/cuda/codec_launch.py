"""Rows rotated, coded and decoded on CUDA, one or a few to a program: launches of what `codec` holds."""

import torch
from torch import Tensor

from auraflux.ops._dispatch import is_invariant
from auraflux.ops.hopper.device import INTERPRETED
from auraflux.ops.hopper.launch import launch
from auraflux.ops.hopper.pages import index_of
from auraflux.ops.hopper.sizes import cdiv, power_of_two
from auraflux.ops.turboquant.arrangement import Arrangement
from auraflux.ops.turboquant.codebook import Codebook, codebook
from auraflux.ops.turboquant.cuda.arguments import Coded, keys_of, shape_of, values_of
from auraflux.ops.turboquant.cuda.codec import append_coded, append_coded_latent, decode_rows, encode_rows, rotate_rows
from auraflux.ops.turboquant.cuda.hadamard import levels_for, rotation_for
from auraflux.ops.turboquant.cuda.mla_kept import kept_latents, kept_shape
from auraflux.ops.turboquant.pages import CodePages, LatentCodes, row_words

ROWS_TOGETHER = 16  # encoded by one program where there are many
MANY_PROGRAMS = 2 if INTERPRETED else 64


def rotated(x: Tensor, seed: int, inverse: bool, dtype: torch.dtype, factor: float = 1.0) -> Tensor:
    out, width = torch.empty(x.shape, dtype=dtype, device=x.device), x.shape[-1]
    rotation, matrix = rotation_for(width, seed, inverse, x.device)
    if x.numel():
        sizes = {**_row(width), "MATRIX": matrix, "INVERSE": inverse}
        launch(rotate_rows, (x.numel() // width,))(x, rotation, out, factor, **sizes)
    return out


def _row(width: int) -> dict[str, int]:
    """How rows are laid out one by one: their width, that with padding, and warps."""
    padded, warps = _padded(width)
    return {"D": width, "P": padded, "num_warps": warps}


def _padded(width: int, rows: int = 1) -> tuple[int, int]:
    """The power of two that holds a width and whole groups of codes, and warps for so many rows of it."""
    padded = max(32, power_of_two(width)) if width & (width - 1) else width
    return padded, 1 if rows * padded <= 256 else 4


def encoded(x: Tensor, bits: int, seed: int, given: Codebook | None = None) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    codes = torch.empty(*x.shape[:-1], row_words(bits, width), dtype=torch.int32, device=x.device)
    norms = torch.empty(x.shape[:-1], device=x.device)
    rotation, matrix = rotation_for(width, seed, False, x.device)
    if rows := norms.numel():
        together = _together(rows, matrix)
        padded, warps = _padded(width, together)
        sizes = {"D": width, "P": padded, "BITS": bits, "MATRIX": matrix, "R": together, "num_warps": warps}
        launch(encode_rows, (cdiv(rows, together),))(
            x, rotation, levels_for(bits, width, x.device, given), codes, norms, rows, **sizes
        )
    return codes, norms


def _together(rows: int, matrix: bool) -> int:
    """How many rows one program encodes: several where that leaves enough programs."""
    return 1 if matrix or rows < ROWS_TOGETHER * MANY_PROGRAMS or is_invariant() else ROWS_TOGETHER


def decoded(codes: Tensor, norms: Tensor, bits: int, width: int, seed: int, given: Codebook | None = None) -> Tensor:
    out = torch.empty(*norms.shape, width, device=codes.device)
    rotation, matrix = rotation_for(width, seed, True, codes.device)
    if out.numel():
        book = codebook(bits, width, codes.device, given)
        launch(decode_rows, (norms.numel(),))(codes, norms, rotation, book, out, BITS=bits, MATRIX=matrix, **_row(width))
    return out


def append(k: Tensor, v: Tensor, pages: CodePages, starts: Tensor) -> None:
    """Code keys and values into their pages."""
    tokens, heads, width = k.shape
    rotation, matrix = rotation_for(width, pages.seed, False, k.device)
    pairs = pages.arrangement is Arrangement.PAIRS
    # values in pairs are stored token by token: neighbours change bits of the same words
    together = 1 if pairs else _together(tokens * heads, matrix)
    padded, warps = _padded(width, together)
    groups = tokens // together + (2 * len(pages.lengths) if together > 1 else 0)
    launch(append_coded, (groups, heads, 2))(
        k,
        v,
        keys_of(pages, levels_for(pages.key_bits, width, k.device, pages.key_book)),
        values_of(pages, levels_for(pages.value_bits, width, k.device, pages.value_book)),
        rotation,
        index_of(pages, starts),
        SHAPE=shape_of(pages),
        MATRIX=matrix,
        R=together,
        P=padded,
        num_warps=warps,
    )


def append_latent(latent: Tensor, k_rope: Tensor, pages: LatentCodes, starts: Tensor) -> None:
    """Code latents into their pages, and store rotated keys as they are."""
    (tokens, width), rope = latent.shape, k_rope.shape[1]
    if not tokens:
        return
    rotation, matrix = rotation_for(width, pages.seed, False, latent.device)
    launch(append_coded_latent, (tokens,))(
        latent,
        k_rope,
        Coded(pages.codes, pages.norms, levels_for(pages.bits, width, latent.device, pages.book)),
        pages.rope,
        rotation,
        index_of(pages, starts),
        kept_latents(pages),
        R=rope,
        PR=power_of_two(rope),
        BITS=pages.bits,
        MATRIX=matrix,
        PAGE=pages.pool[1],
        S=power_of_two(pages.table.shape[0]),
        KEPT=kept_shape(pages),
        **_row(width),
    )
