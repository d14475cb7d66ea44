"""Fused append of latent attention on CUDA: norm of the latent, RoPE of key and queries, and the cache write, in one launch.

One program of a token handles latent and key, the others some of its queries.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops._dispatch import is_invariant
from auraflux.ops.attention.pages import LatentPages
from auraflux.ops.gpu.blocks.pages import index_of, place_token
from auraflux.ops.gpu.blocks.rope import Rope, cos_sin, rotate_heads
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv, power_of_two

MOST_FUSED = 64  # tokens; more are split, rotated and stored by separate kernels
QUERIES = 8  # heads of a program


@triton.jit
def normed_latent(kv, norm, eps, C: tl.constexpr, P: tl.constexpr):
    """Load a latent and normalise it: [1, P] float32, rounded as if stored."""
    c = tl.arange(0, P)[None, :]
    wide = tl.load(kv + c, mask=c < C, other=0.0).to(tl.float32)
    wide *= 1.0 / tl.sqrt(tl.sum(wide * wide, 1, keep_dims=True) * (1.0 / C) + eps)
    wide *= tl.load(norm + c, mask=c < C, other=0.0).to(tl.float32)
    return wide.to(kv.dtype.element_ty).to(tl.float32)


@triton.jit
def rotate_queries(q, q_out, rope, block, heads, pitch, R: tl.constexpr, QUERIES: tl.constexpr):
    """Rotate a block of the heads of a token's queries, R wide."""
    rotate_heads(
        q, None, rope.inv_freq, rope.positions, q_out, block, heads, pitch, R, R // 2, rope.mscale, 0.0,
        QUERIES.interleaved, QUERIES.heads, QUERIES.half, 0,
    )  # fmt: skip


@triton.jit
def store_rotated_key(k, rope, token, rows, row, there, R: tl.constexpr, QUERIES: tl.constexpr):
    """Rotate a token's key, R wide, and store it in its row of a page."""
    i = tl.arange(0, QUERIES.half)
    inside = 2 * i < R
    position = tl.load(rope.positions + token)
    cosine, sine = cos_sin(position.to(tl.float32) * tl.load(rope.inv_freq + i, mask=inside, other=0.0))
    cosine, sine = cosine * rope.mscale, sine * rope.mscale
    if QUERIES.interleaved:
        first, second = 2 * i, 2 * i + 1
    else:
        first, second = i, i + R // 2
    a = tl.load(k + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(k + second, mask=inside, other=0.0).to(tl.float32)
    kind: tl.constexpr = k.dtype.element_ty
    x, y = (a * cosine - b * sine).to(kind), (b * cosine + a * sine).to(kind)
    tl.store(rows + row * R + first, x.to(rows.dtype.element_ty), mask=inside & there)
    tl.store(rows + row * R + second, y.to(rows.dtype.element_ty), mask=inside & there)


@triton.jit
def rotate_and_append_latent(
    q, kv, q_out, norm, rope, eps, q_pitch, heads, latent, k_rope, index, C: tl.constexpr, R: tl.constexpr, P: tl.constexpr,
    QUERIES: tl.constexpr, PAGE: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Store a token's latent and key, or rotate HEADS of its queries; grid (tokens, 1 + blocks of queries)."""
    token, block = tl.program_id(0), tl.program_id(1)
    if block > 0:
        rotate_queries(q, q_out, rope, block - 1, heads, q_pitch, R, QUERIES)
        return
    source = kv + token.to(tl.int64) * (C + R)
    y = normed_latent(source, norm, eps, C, P)
    page, slot = place_token(token, index, PAGE, S)
    row, there, c = page * PAGE + slot, page >= 0, tl.arange(0, P)[None, :]
    tl.store(latent + row * C + c, y.to(latent.dtype.element_ty), mask=(c < C) & there)
    store_rotated_key(source + C, rope, token, k_rope, row, there, R, QUERIES)


Rotation = tuple[Tensor, Tensor, float, bool]


class Queries(NamedTuple):
    """Rotation of queries: heads per program, pairs of a head up to a power of two, and whether neighbours are pairs."""

    heads: int
    half: int
    interleaved: bool


def not_fused(q: Tensor, heads: int, nope: int, inv_freq: Tensor) -> str | None:
    """Return why norm, RoPE and append are not one launch, or None if they are."""
    if not len(q) > 0 or (len(q) > MOST_FUSED and not is_invariant()):
        return f"{len(q)} tokens; it is for up to {MOST_FUSED}"
    return None if 2 * len(inv_freq) == q.shape[1] // heads - nope else "not all of a key's channels are rotated"


def rope_of(rotation: Rotation) -> Rope:
    """Return a rotation as kernel argument."""
    return Rope(rotation[0], rotation[1], float(rotation[2]))


def split_queries(q: Tensor, heads: int, nope: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of the queries' two parts, and an output for the rotated one."""
    both = q.unflatten(1, (heads, -1))
    nope_part, rotated = both[..., :nope], both[..., nope:]
    return nope_part, rotated, q.new_empty(rotated.shape)


def launch_sizes(q_rope: Tensor, kv: Tensor, rotation: Rotation) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return the grid, and the constants shared by full-precision and quantized append."""
    (tokens, heads, rope), latent = q_rope.shape, kv.shape[1] - q_rope.shape[2]
    padded = max(32, power_of_two(latent))
    block = min(QUERIES, power_of_two(heads))
    queries = Queries(block, power_of_two(rope // 2), rotation[3])
    sizes = {"R": rope, "P": padded, "QUERIES": queries, "num_warps": 1 if padded <= 256 else 4}
    return (tokens, 1 + cdiv(heads, block)), sizes


def rope_append(
    q: Tensor, kv: Tensor, heads: int, nope: int, pages: LatentPages, starts: Tensor, norm: Tensor, eps: float,
    rotation: Rotation,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Append latents and keys in full precision; return the strided nope part of the queries and the rotated part."""
    nope_part, rotated, out = split_queries(q, heads, nope)
    grid, sizes = launch_sizes(rotated, kv, rotation)
    launch(rotate_and_append_latent, grid)(
        *(rotated, kv, out, norm, rope_of(rotation), float(eps), rotated.stride(1), heads),
        *(pages.latent, pages.rope, index_of(pages, starts)),
        C=pages.latent.shape[2],
        PAGE=pages.pool[1],
        S=power_of_two(pages.table.shape[0]),
        **sizes,
    )
    return nope_part, out
