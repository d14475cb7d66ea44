"""Inputs for RoPE: full and partial rotation, both pairings, one token and many, large positions."""

import torch

from auraflux.ops._cases import Args, Case
from auraflux.ops.rope.frequencies import rope_frequencies, yarn_frequencies
from auraflux.ops.rope.reference import grow_queries, norm_rope, rope

BF16 = torch.bfloat16


def heads(
    tokens: int, heads: int, width: int, rotated: int | None = None, *, start: int = 0, theta: float = 1e6, dtype=torch.float32
) -> Args:
    x = torch.randn(tokens, heads, width).to(dtype)
    return {
        "x": x,
        "inv_freq": rope_frequencies(rotated or width, theta),
        "positions": torch.arange(start, start + tokens, dtype=torch.int32),
    }


def yarn(tokens: int, start: int, interleaved: bool) -> Args:
    args = heads(tokens, 5, 64, start=start)
    args["inv_freq"], args["mscale"] = yarn_frequencies(64, 1e4, 40.0, 4096)
    return {**args, "interleaved": interleaved}


def scattered(tokens: int) -> Args:
    args = heads(tokens, 3, 128)
    return {**args, "positions": torch.randint(0, 1 << 20, (tokens,))}


def per_frequency(args: Args, kind=torch.int32) -> Args:
    """Give each frequency of a token its own position."""
    shape = len(args["positions"]), len(args["inv_freq"])
    return {**args, "positions": torch.randint(0, 1 << 16, shape, dtype=kind)}


def both(tokens: int, q_heads: int, k_heads: int, width: int, rotated: int | None = None, *, normed=True, **options) -> Args:
    args = heads(tokens, q_heads, width, rotated, **options)
    q = args.pop("x")
    norms = (1 + 0.1 * torch.randn(width), 1 + 0.1 * torch.randn(width)) if normed else None
    return {"q": q, "k": torch.randn(tokens, k_heads, width).to(q.dtype), **args, "norms": norms, "eps": 1e-6}


def growing(tokens: int, heads: int, width: int, span: int, *, start: int = 0, dtype=torch.float32, kind=torch.int32) -> Args:
    q, positions = torch.randn(tokens, heads, width).to(dtype), torch.arange(start, start + tokens, dtype=kind)
    return {"q": q, "positions": positions, "slope": 0.1, "span": span}


CASES = [
    Case(rope, "one-token", lambda: heads(1, 32, 128, start=4000), bench=True),
    Case(rope, "many-tokens", lambda: heads(128, 32, 128), bench=True),
    Case(rope, "partial", lambda: heads(3, 16, 256, 64, start=100, theta=1e7)),
    Case(rope, "odd-width", lambda: heads(7, 3, 63, 42)),
    Case(rope, "odd-half", lambda: heads(5, 2, 100, 66)),
    Case(rope, "one-pair", lambda: heads(2, 1, 2)),
    Case(rope, "no-tokens", lambda: heads(0, 4, 64)),
    Case(rope, "far", lambda: heads(3, 4, 128, start=130_000)),
    Case(rope, "farther", lambda: heads(333, 4, 64, start=1_000_000)),
    Case(rope, "scattered", lambda: scattered(63)),
    Case(rope, "interleaved", lambda: {**heads(1, 128, 64, start=9000), "interleaved": True}, bench=True),
    Case(rope, "interleaved-many", lambda: {**heads(100, 16, 64), "interleaved": True}),
    Case(rope, "interleaved-partial", lambda: {**heads(3, 5, 63, 30), "interleaved": True}),
    Case(rope, "yarn", lambda: yarn(3, 100_000, False)),
    Case(rope, "yarn-interleaved", lambda: yarn(3, 100_000, True)),
    Case(rope, "per-frequency", lambda: per_frequency(heads(7, 3, 100, 66))),
    Case(rope, "per-frequency-int64", lambda: per_frequency({**heads(2, 5, 64), "interleaved": True}, torch.int64)),
    Case(rope, "bf16", lambda: heads(3, 4, 64, dtype=BF16), tol=4e-3),
    Case(grow_queries, "one-token", lambda: growing(1, 32, 128, 8192, start=100_000), bench=True),
    Case(grow_queries, "many-tokens", lambda: growing(128, 32, 128, 16, start=3), bench=True),
    Case(grow_queries, "before-the-first-span", lambda: growing(7, 3, 63, 8192)),
    Case(grow_queries, "every-position", lambda: growing(5, 3, 333, 1, start=1 << 20, kind=torch.int64)),
    Case(grow_queries, "apart", lambda: {**growing(3, 4, 64, 2), "q": torch.randn(3, 4, 96)[..., :64]}),
    Case(grow_queries, "ahead", lambda: {**growing(20, 3, 64, 8), "ahead": 1}),
    Case(grow_queries, "no-tokens", lambda: growing(0, 4, 64, 8)),
    Case(grow_queries, "bf16", lambda: growing(3, 4, 100, 2, dtype=BF16), tol=4e-3),
    Case(norm_rope, "one-token", lambda: both(1, 32, 4, 128, start=4000), bench=True),
    Case(norm_rope, "apart", lambda: {**both(3, 4, 2, 64), "q": torch.randn(3, 4, 2, 64)[:, :, 0]}),
    Case(norm_rope, "no-norms", lambda: both(3, 8, 2, 64, normed=False)),
    Case(norm_rope, "partial", lambda: both(2, 16, 2, 256, 64, start=100, theta=1e7)),
    Case(norm_rope, "odd-width", lambda: both(7, 5, 3, 63, 42)),
    Case(norm_rope, "interleaved", lambda: {**both(5, 3, 1, 64), "interleaved": True}),
    Case(norm_rope, "no-tokens", lambda: both(0, 4, 2, 64)),
    Case(norm_rope, "per-frequency", lambda: per_frequency(both(5, 4, 2, 64, 16))),
    Case(norm_rope, "bf16", lambda: both(3, 8, 2, 128, dtype=BF16), tol=4e-3),
]
