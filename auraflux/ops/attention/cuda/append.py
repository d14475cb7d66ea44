"""Kernels that copy rows: new ones into pages, and the projections of latent attention into separate tensors."""

import triton
import triton.language as tl

from auraflux.ops.gpu.blocks.pages import place_token


@triton.jit
def append_rows(
    a, b, pool_a, pool_b, index, HEADS: tl.constexpr, A: tl.constexpr, B: tl.constexpr, PAGE: tl.constexpr, P: tl.constexpr,
    S: tl.constexpr,
):  # fmt: skip
    """Copy a token's rows of two kinds, of widths A and B, to the pages; grid (tokens, HEADS)."""
    token, head = tl.program_id(0), tl.program_id(1)
    page, slot = place_token(token, index, PAGE, S)
    d = tl.arange(0, P)
    source, target = token.to(tl.int64) * HEADS + head, (page * HEADS + head) * PAGE + slot
    x = tl.load(a + source * A + d, mask=d < A)
    y = tl.load(b + source * B + d, mask=d < B)
    tl.store(pool_a + target * A + d, x.to(pool_a.dtype.element_ty), mask=(d < A) & (page >= 0))
    tl.store(pool_b + target * B + d, y.to(pool_b.dtype.element_ty), mask=(d < B) & (page >= 0))


@triton.jit
def split_rows(
    q,
    kv,
    q_nope,
    q_rope,
    latent,
    k_rope,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Split a token's projections; grid (tokens, blocks of the wider one)."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    HEAD: tl.constexpr = NOPE + ROPE
    x = tl.load(q + token * (HEADS * HEAD) + i, mask=i < HEADS * HEAD)
    head, d = i // HEAD, i % HEAD
    there = i < HEADS * HEAD
    tl.store(q_nope + (token * HEADS + head) * NOPE + d, x, mask=there & (d < NOPE))
    tl.store(q_rope + (token * HEADS + head) * ROPE + d - NOPE, x, mask=there & (d >= NOPE))
    y = tl.load(kv + token * (LATENT + ROPE) + i, mask=i < LATENT + ROPE)
    tl.store(latent + token * LATENT + i, y, mask=i < LATENT)
    tl.store(k_rope + token * ROPE + i - LATENT, y, mask=(i >= LATENT) & (i < LATENT + ROPE))
