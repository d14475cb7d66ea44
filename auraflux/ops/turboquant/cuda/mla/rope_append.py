"""Norm, RoPE and encoding of new MLA tokens in one launch, like `attention.cuda.mla_rope_append` with quantized latents."""

import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.attention.cuda.mla_rope_append import (
    Rotation,
    launch_sizes,
    normed_latent,
    rope_of,
    rotate_queries,
    split_queries,
    store_rotated_key,
)
from auraflux.ops.gpu.blocks.pages import index_of, place_of, position_of
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import power_of_two
from auraflux.ops.turboquant.cuda.arguments import CodeTensors
from auraflux.ops.turboquant.cuda.encode.codec import encoded_values
from auraflux.ops.turboquant.cuda.encode.hadamard import hadamard, levels_for, rotation_for, store_words
from auraflux.ops.turboquant.cuda.mla.full_precision import (
    FullPrecisionRows,
    full_precision_latent_shape,
    full_precision_latents,
    store_latent,
)
from auraflux.ops.turboquant.pages import LatentCodes


@triton.jit
def rotate_and_encode_latent(
    q, kv, q_out, norm, rope, eps, q_pitch, heads, store, full, signs, index, C: tl.constexpr, R: tl.constexpr,
    P: tl.constexpr, QUERIES: tl.constexpr, BITS: tl.constexpr, PAGE: tl.constexpr, S: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Encode a token's latent and store its RoPE key, or rotate QUERIES queries; grid (tokens, 1 + blocks of queries)."""
    token, block = tl.program_id(0), tl.program_id(1)
    if block > 0:
        rotate_queries(q, q_out, rope, block - 1, heads, q_pitch, R, QUERIES)
        return
    source = kv + token.to(tl.int64) * (C + R)
    y = normed_latent(source, norm, eps, C, P)
    sequence, position = position_of(token, index, S)
    page, slot = place_of(index.table, sequence, position, index.width, index.pool, PAGE)
    row, there = page * PAGE + slot, page >= 0
    store_rotated_key(source + C, rope, token, full.rope, row, there, R, QUERIES)
    found, norm_of_codes = encoded_values(y.to(tl.float64), signs, store.levels, C, BITS)
    rows, here = row + tl.zeros([1], tl.int64), page + tl.zeros([1], tl.int64) >= 0
    store_words(store.codes, rows, here, found, BITS, C, (C * BITS + 31) // 32)
    tl.store(store.norms + rows, norm_of_codes, mask=here)
    if FULL.sink_tokens + FULL.recent_window > 0:
        rotated = hadamard(y * tl.load(signs + tl.arange(0, C)[None, :]), C)
        store_latent(rotated, full.latents, sequence, position, C, C, FULL)


def rope_encode(
    q: Tensor, kv: Tensor, heads: int, nope: int, pages: LatentCodes, starts: Tensor, norm: Tensor, eps: float,
    rotation: Rotation,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Encode latents and store RoPE keys; return the queries' nope part by head, and their rotated RoPE part."""
    nope_queries, rotated, out = split_queries(q, heads, nope)
    grid, sizes = launch_sizes(rotated, kv, rotation)
    launch(rotate_and_encode_latent, grid)(
        *(rotated, kv, out, norm, rope_of(rotation), float(eps), rotated.stride(1), heads),
        CodeTensors(pages.codes, pages.norms, levels_for(pages.bits, pages.width, q.device)),
        FullPrecisionRows(pages.rope, full_precision_latents(pages)),
        *(rotation_for(pages.width, pages.seed, False, q.device)[0], index_of(pages, starts)),
        C=pages.width,
        BITS=pages.bits,
        PAGE=pages.pool[1],
        S=power_of_two(pages.table.shape[0]),
        FULL=full_precision_latent_shape(pages),
        **sizes,
    )
    return nope_queries, out
