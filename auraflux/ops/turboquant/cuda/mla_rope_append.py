"""New tokens of latent attention on CUDA, as in `attention.cuda.mla_rope_append`, whose latents are kept as codes."""

import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.attention.cuda.mla_rope_append import (
    Rotation,
    launch_sizes,
    normed_latent,
    queries_apart,
    rope_of,
    rotate_queries,
    store_rotated_key,
)
from auraflux.ops.hopper.launch import launch
from auraflux.ops.hopper.pages import index_of, place_of, position_of
from auraflux.ops.hopper.sizes import power_of_two
from auraflux.ops.turboquant.cuda.arguments import Coded
from auraflux.ops.turboquant.cuda.codec import encoded_values
from auraflux.ops.turboquant.cuda.hadamard import hadamard, levels_for, rotation_for, store_words
from auraflux.ops.turboquant.cuda.mla_kept import Beside, kept_latents, kept_shape, store_latent
from auraflux.ops.turboquant.pages import LatentCodes


@triton.jit
def rotate_and_encode_latent(
    q, kv, q_out, norm, rope, eps, q_pitch, heads, store, beside, signs, index, C: tl.constexpr, R: tl.constexpr,
    P: tl.constexpr, QUERIES: tl.constexpr, BITS: tl.constexpr, PAGE: tl.constexpr, S: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Encode a token's latent and store its key, or rotate HEADS of its queries; grid (tokens, 1 + blocks of queries)."""
    token, block = tl.program_id(0), tl.program_id(1)
    if block > 0:
        rotate_queries(q, q_out, rope, block - 1, heads, q_pitch, R, QUERIES)
        return
    source = kv + token.to(tl.int64) * (C + R)
    y = normed_latent(source, norm, eps, C, P)
    sequence, position = position_of(token, index, S)
    page, slot = place_of(index.table, sequence, position, index.width, index.pool, PAGE)
    row, there = page * PAGE + slot, page >= 0
    store_rotated_key(source + C, rope, token, beside.rope, row, there, R, QUERIES)
    found, norm_of_codes = encoded_values(y.to(tl.float64), signs, store.levels, C, BITS)
    rows, here = row + tl.zeros([1], tl.int64), page + tl.zeros([1], tl.int64) >= 0
    store_words(store.codes, rows, here, found, BITS, C, (C * BITS + 31) // 32)
    tl.store(store.norms + rows, norm_of_codes, mask=here)
    if KEPT.first + KEPT.newest > 0:
        rotated = hadamard(y * tl.load(signs + tl.arange(0, C)[None, :]), C)
        store_latent(rotated, beside.kept, sequence, position, C, C, KEPT)


def rope_encode(
    q: Tensor, kv: Tensor, heads: int, nope: int, pages: LatentCodes, starts: Tensor, norm: Tensor, eps: float,
    rotation: Rotation,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Store latents as codes and keys as they are; gives the plain parts of the queries, heads apart, and the rotated ones."""
    plain, rotated, out = queries_apart(q, heads, nope)
    grid, sizes = launch_sizes(rotated, kv, rotation)
    launch(rotate_and_encode_latent, grid)(
        *(rotated, kv, out, norm, rope_of(rotation), float(eps), rotated.stride(1), heads),
        Coded(pages.codes, pages.norms, levels_for(pages.bits, pages.width, q.device)),
        Beside(pages.rope, kept_latents(pages)),
        *(rotation_for(pages.width, pages.seed, False, q.device)[0], index_of(pages, starts)),
        C=pages.width,
        BITS=pages.bits,
        PAGE=pages.pool[1],
        S=power_of_two(pages.table.shape[0]),
        KEPT=kept_shape(pages),
        **sizes,
    )
    return plain, out
