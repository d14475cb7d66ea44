"""Launches of the kernels of `flash_codes.py`, which serve codes of any kind.

Every value is read: a threshold permits skipping small weights but does not require it.
"""

from typing import Any

import torch
from torch import Tensor

from auraflux.ops.gpu.blocks.flash import NO_WINDOW, shape_for
from auraflux.ops.gpu.blocks.pages import index_of
from auraflux.ops.gpu.blocks.softmax import Partials, empty_partials, launch_merge
from auraflux.ops.gpu.device import INTERPRETED, multiprocessors
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv, power_of_two
from auraflux.ops.turboquant.codebook import Codebook, codebook
from auraflux.ops.turboquant.cuda.arguments import CodeShape, CodeTensors, keys_of, shape_of, values_of
from auraflux.ops.turboquant.cuda.encode.codec import finish_rows
from auraflux.ops.turboquant.cuda.encode.codec_launch import rotated
from auraflux.ops.turboquant.cuda.encode.hadamard import book_for, rotation_for
from auraflux.ops.turboquant.cuda.mla.full_precision import (
    NO_FULL_PRECISION,
    full_precision_latent_shape,
    full_precision_latents,
)
from auraflux.ops.turboquant.cuda.prefill.flash_codes import Config, Latents, Scores, Splits, Tile, attend_codes, sum_coded
from auraflux.ops.turboquant.pages import CodePages, LatentCodes


def attend(
    q: Tensor,
    pages: CodePages,
    starts: Tensor,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
    softcap: float | None,
) -> Tensor:
    return _finish(_attend(q, None, pages, starts, scale, window, softcap), sinks, pages.seed, q)


def attend_latent(
    q: Tensor, q_rope: Tensor, pages: LatentCodes, starts: Tensor, scale: float, sinks: Tensor | None = None
) -> Tensor:
    return _finish(_attend(q, q_rope, pages, starts, scale), sinks, pages.seed, q)


def attend_in_blocks(
    q: Tensor,
    pages: CodePages,
    starts: Tensor,
    scale: float,
    block: int,
    window: int | None,
    sinks: Tensor | None,
    softcap: float | None,
) -> Partials:
    """Return a partial result per `block` of positions, and one for the sinks; outputs stay rotated."""
    (tokens, heads, width), blocks = q.shape, max(1, -(-pages.capacity // block))
    partials = empty_partials(tokens * heads, blocks + (sinks is not None), width, q.device)
    if tokens:
        _attend(q, None, pages, starts, scale, window, softcap, block, blocks, partials)
    if sinks is not None:
        o, m, l = partials  # noqa: E741
        o[:, -1], l[:, -1] = 0.0, 1.0
        m.view(tokens, heads, -1)[..., -1] = sinks
    return partials


def sum_values(
    weights: Tensor, codes: Tensor, norms: Tensor, bits: int, width: int, threshold: float, explicit: Codebook | None = None
) -> Tensor:
    """Sum quantized values by their weights."""
    (heads, tokens), rows = norms.shape, weights.shape[0]
    if not tokens:
        return weights.new_zeros(rows, width)
    group, padded = rows // heads, power_of_two(width)
    tiles, keys = cdiv(group, 16), max(16, min(64, 8192 // padded))
    programs = 8 if INTERPRETED else 4 * multiprocessors(weights.device)
    splits_count = max(1, min(cdiv(programs, tiles * heads), cdiv(tokens, keys)))
    share = cdiv(cdiv(tokens, splits_count), keys) * keys
    splits_count = cdiv(tokens, share)
    partials = torch.empty(splits_count, rows, width, device=weights.device)
    values = CodeTensors(codes, norms, codebook(bits, width, weights.device, explicit))
    sizes = {"D": width, "P": padded, "BITS": bits, "M": 16, "N": keys}
    launch(sum_coded, (tiles, heads, splits_count))(weights, values, partials, threshold, tokens, share, group, **sizes)
    return partials.sum(0).to(weights.dtype)


def _attend(
    q: Tensor,
    q_rope: Tensor | None,
    pages: Any,
    starts: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    block: int = 0,
    blocks: int = 0,
    partials: Partials | None = None,
) -> Partials:
    """Attend in splits of `block` positions each, or in as many as fill the GPU."""
    (tokens, heads, width), latent = q.shape, q_rope is not None
    wide, padded, rope = q.dtype is torch.float32, power_of_two(width), 0 if q_rope is None else q_rope.shape[2]
    if latent:
        keys = values = CodeTensors(pages.codes, pages.norms, book_for(pages.bits, width, not wide, q.device, pages.book))
        sequences = power_of_two(pages.table.shape[0])
        shape = CodeShape(1, width, pages.bits, pages.bits, pages.pool[1], False, sequences)
    else:
        keys = keys_of(pages, book_for(pages.key_bits, width, not wide, q.device, pages.key_book))
        values = values_of(pages, book_for(pages.value_bits, width, not wide, q.device, pages.value_book))
        shape = shape_of(pages)
    key_heads = shape.heads
    sequences, table_width = pages.table.shape
    page, group = pages.pool[1], heads // key_heads
    read = padded if latent else 2 * padded
    cut = shape_for(
        tokens, sequences, group, key_heads, (read, padded), wide, table_width * page, q.device, 32 if latent else 64
    )
    splits = blocks or cut.splits
    partials = partials or empty_partials(tokens * heads, splits, width, q.device)
    # in 16 bits the levels are scaled by sqrt(D), and float16 holds scaled queries best
    factor, unit = (1.0, 1.0) if wide or latent else (scale, width**-0.5)
    if latent and not wide:
        unit = width**-0.5
    rotated_q = rotated(q, pages.seed, False, torch.float32 if wide else torch.float16, factor)
    launch(attend_codes, (cut.tiles, key_heads, splits))(
        *(rotated_q, keys, values, None if q_rope is None else Latents(q_rope, pages.rope, full_precision_latents(pages))),
        *(index_of(pages, starts), partials),
        Scores(scale / factor, unit, softcap or 1.0, NO_WINDOW if window is None else window),
        Splits(block, splits, partials.m.shape[1]),
        heads,
        CONFIG=Config(
            shape,
            Tile(cut.rows, cut.keys, padded, max(16, power_of_two(rope)) if latent else 0),
            group,
            rope,
            wide,
            softcap is not None,
            page % cut.keys == 0 and block % cut.keys == 0,
            full_precision_latent_shape(pages) if latent else NO_FULL_PRECISION,
        ),
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
    return partials


def _finish(partials: Partials, sinks: Tensor | None, seed: int, like: Tensor) -> Tensor:
    """Merge splits and undo the rotation, in the shape and dtype of `like`."""
    out, (rows, blocks, width) = torch.empty_like(like), partials[0].shape
    rotation, matrix = rotation_for(width, seed, True, like.device)
    if matrix:
        merged = torch.empty(like.shape, device=like.device)
        launch_merge(partials, sinks, merged, like.shape[1])
        return rotated(merged, seed, True, like.dtype)
    sizes = {"D": width, "S": power_of_two(blocks), "C": min(32, power_of_two(blocks))}
    launch(finish_rows, (rows,))(partials, sinks, rotation, out, like.shape[1], blocks, **sizes)
    return out
