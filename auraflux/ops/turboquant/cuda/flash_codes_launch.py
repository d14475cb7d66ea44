"""Attention over codes of any kind on CUDA: launches of what `flash_codes` holds.

A pass over the keys reads every value: a threshold only ever allows some to be left out.
"""

from typing import Any

import torch
from torch import Tensor

from auraflux.ops.hopper.device import INTERPRETED, multiprocessors
from auraflux.ops.hopper.flash import EVERYTHING, shape_for
from auraflux.ops.hopper.launch import launch
from auraflux.ops.hopper.pages import index_of
from auraflux.ops.hopper.sizes import cdiv, power_of_two
from auraflux.ops.hopper.softmax import Parts, launch_merge, parts_like
from auraflux.ops.turboquant.codebook import Codebook, codebook
from auraflux.ops.turboquant.cuda.arguments import Coded, CodeShape, keys_of, shape_of, values_of
from auraflux.ops.turboquant.cuda.codec import finish_rows
from auraflux.ops.turboquant.cuda.codec_launch import rotated
from auraflux.ops.turboquant.cuda.flash_codes import Latents, Splits, Tile, attend_codes, sum_coded
from auraflux.ops.turboquant.cuda.hadamard import book_for, rotation_for
from auraflux.ops.turboquant.cuda.mla_kept import NOTHING_KEPT, kept_latents, kept_shape
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


def attend_latent(q: Tensor, q_rope: Tensor, pages: LatentCodes, starts: Tensor, scale: float) -> Tensor:
    return _finish(_attend(q, q_rope, pages, starts, scale), None, pages.seed, q)


def attend_in_blocks(
    q: Tensor,
    pages: CodePages,
    starts: Tensor,
    scale: float,
    block: int,
    window: int | None,
    sinks: Tensor | None,
    softcap: float | None,
) -> Parts:
    """Attend to each `block` of positions apart, and to the sinks as one more; results stay rotated."""
    (tokens, heads, width), blocks = q.shape, max(1, -(-pages.capacity // block))
    parts = parts_like(tokens * heads, blocks + (sinks is not None), width, q.device)
    if tokens:
        _attend(q, None, pages, starts, scale, window, softcap, block, blocks, parts)
    if sinks is not None:
        o, m, l = parts  # noqa: E741
        o[:, -1], l[:, -1] = 0.0, 1.0
        m.view(tokens, heads, -1)[..., -1] = sinks
    return parts


def sum_values(
    weights: Tensor, codes: Tensor, norms: Tensor, bits: int, width: int, threshold: float, given: Codebook | None = None
) -> Tensor:
    """Sum coded values by their weights."""
    (heads, tokens), rows = norms.shape, weights.shape[0]
    if not tokens:
        return weights.new_zeros(rows, width)
    group, padded = rows // heads, power_of_two(width)
    tiles, keys = cdiv(group, 16), max(16, min(64, 8192 // padded))
    programs = 8 if INTERPRETED else 4 * multiprocessors(weights.device)
    shares = max(1, min(cdiv(programs, tiles * heads), cdiv(tokens, keys)))
    share = cdiv(cdiv(tokens, shares), keys) * keys
    shares = cdiv(tokens, share)
    parts = torch.empty(shares, rows, width, device=weights.device)
    source = weights, codes, norms, codebook(bits, width, weights.device, given), parts, threshold
    sizes = {"D": width, "P": padded, "BITS": bits, "M": 16, "N": keys}
    launch(sum_coded, (tiles, heads, shares))(*source, tokens, share, group, **sizes)
    return parts.sum(0).to(weights.dtype)


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
    parts: Parts | None = None,
) -> Parts:
    """Attend in parts: blocks of `block` positions each, or as many as fill the GPU."""
    (tokens, heads, width), latent = q.shape, q_rope is not None
    wide, padded, rope = q.dtype is torch.float32, power_of_two(width), 0 if q_rope is None else q_rope.shape[2]
    if latent:
        keys = values = Coded(pages.codes, pages.norms, book_for(pages.bits, width, not wide, q.device, pages.book))
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
    parts = parts or parts_like(tokens * heads, splits, width, q.device)
    # in 16 bits the levels are larger by sqrt(D), and float16 holds queries best once they are scaled
    factor, unit = (1.0, 1.0) if wide or latent else (scale, width**-0.5)
    if latent and not wide:
        unit = width**-0.5
    rotated_q = rotated(q, pages.seed, False, torch.float32 if wide else torch.float16, factor)
    launch(attend_codes, (cut.tiles, key_heads, splits))(
        *(rotated_q, keys, values, None if q_rope is None else Latents(q_rope, pages.rope, kept_latents(pages))),
        *(index_of(pages, starts), parts),
        *(scale / factor, unit, softcap or 1.0, EVERYTHING if window is None else window),
        Splits(block, splits, parts.m.shape[1]),
        heads,
        SHAPE=shape,
        TILE=Tile(cut.rows, cut.keys, padded, max(16, power_of_two(rope)) if latent else 0),
        G=group,
        R=rope,
        WIDE=wide,
        SOFTCAP=softcap is not None,
        ALIGNED=page % cut.keys == 0 and block % cut.keys == 0,
        KEPT=kept_shape(pages) if latent else NOTHING_KEPT,
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
    return parts


def _finish(parts: Parts, sinks: Tensor | None, seed: int, like: Tensor) -> Tensor:
    """Merge parts and rotate the rows back, into the shape and dtype of `like`."""
    out, (rows, blocks, width) = torch.empty_like(like), parts[0].shape
    rotation, matrix = rotation_for(width, seed, True, like.device)
    if matrix:
        merged = torch.empty(like.shape, device=like.device)
        launch_merge(parts, sinks, merged, like.shape[1])
        return rotated(merged, seed, True, like.dtype)
    sizes = {"D": width, "S": power_of_two(blocks), "C": min(32, power_of_two(blocks))}
    launch(finish_rows, (rows,))(parts, sinks, rotation, out, like.shape[1], blocks, **sizes)
    return out
