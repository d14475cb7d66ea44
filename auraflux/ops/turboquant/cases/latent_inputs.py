"""Arguments for the ops on quantized latents (MLA), and their memory traffic and FLOPs."""

from typing import Any

import torch

from auraflux.ops._cases import Args
from auraflux.ops.attention.pages import KVPages
from auraflux.ops.rope.frequencies import rope_frequencies
from auraflux.ops.turboquant.cases.inputs import (
    BF16,
    SEED,
    causal_pairs,
    coded,
    edges,
    full_precision_pages,
    page_table,
    vectors,
)
from auraflux.ops.turboquant.full_precision import FullPrecisionLatents, RowPages
from auraflux.ops.turboquant.pages import LatentCodes


def latent_codes(
    lengths: list[int],
    width: int,
    rope: int,
    bits: int = 4,
    page: int = 16,
    cache: torch.dtype = torch.float32,
    full_precision: tuple[int, int] | None = None,
) -> LatentCodes:
    """Fill a pool with random codes and RoPE keys; `full_precision` is (sink tokens, recent window), or None."""
    pool, table = page_table(lengths, page)
    rows = coded(pool, page, bits=bits, width=width)
    keys, sizes = vectors(pool, page, rope, dtype=cache), torch.tensor(lengths, dtype=torch.int32)
    stored = None if full_precision is None else full_precision_latents(lengths, width, *full_precision, cache)
    return LatentCodes(rows["codes"], rows["norms"], keys, table, sizes, bits, width, SEED, stored)


def full_precision_latents(
    lengths: list[int], width: int, sink_tokens: int, recent_window: int, dtype: torch.dtype = torch.float32, page: int = 16
) -> FullPrecisionLatents:
    """Return random rows with the norms of the codes; table entries of pages that are not read are invalid."""
    like = full_precision_pages(lengths, 1, width, sink_tokens, recent_window, dtype, page)
    return FullPrecisionLatents(_latent_rows(like.head), _latent_rows(like.recent), recent_window)


def _latent_rows(pages: KVPages | None) -> RowPages | None:
    return None if pages is None else RowPages(pages.k[:, 0].contiguous(), pages.table, pages.lengths)


def append_latent(
    lengths: list[int], counts: list[int], width: int, rope: int, dtype: torch.dtype = torch.float32, **options: Any
) -> Args:
    latent, k_rope = vectors(sum(counts), width, dtype=dtype), vectors(sum(counts), rope, dtype=dtype)
    pages = latent_codes(lengths, width, rope, **options)
    return {"latent": latent, "k_rope": k_rope, "pages": pages, "starts": edges(counts)}


def rope_appended_latent(
    lengths: list[int],
    counts: list[int],
    heads: int,
    widths: tuple[int, int, int],
    dtype: torch.dtype = torch.float32,
    interleaved: bool = True,
    **options: Any,
) -> Args:
    """Return projections of new tokens; `widths` are those of a query's unrotated part, its rotated part and a latent."""
    nope, rope, width = widths
    spans = [torch.arange(length - new, length) for length, new in zip(lengths, counts, strict=True)]
    return {
        "q": vectors(sum(counts), heads * (nope + rope), dtype=dtype),
        "kv": vectors(sum(counts), width + rope, dtype=dtype),
        "heads": heads,
        "nope": nope,
        "pages": latent_codes(lengths, width, rope, **options),
        "starts": edges(counts),
        "norm": 1 + 0.1 * torch.randn(width),
        "eps": 1e-6,
        "inv_freq": rope_frequencies(rope, 1e4),
        "positions": torch.cat(spans).int(),
        "mscale": 1.2,
        "interleaved": interleaved,
    }


def attend_latent(
    lengths: list[int],
    counts: list[int],
    heads: int,
    width: int,
    rope: int,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Args:
    return {
        "q_latent": vectors(sum(counts), heads, width, dtype=dtype),
        "q_rope": vectors(sum(counts), heads, rope, dtype=dtype),
        "pages": latent_codes(lengths, width, rope, **options),
        "starts": edges(counts),
        "scale": (width + rope) ** -0.5 * 2,
    }


def narrow_latent(
    heads: int,
    bits: int,
    lengths: list[int] | None = None,
    counts: list[int] | None = None,
    page: int = 64,
    full_precision: tuple[int, int] | None = None,
) -> Args:
    """Return bf16 arguments as wide as models; the rows past the end of a sequence in its last page are NaN."""
    lengths, counts = lengths or [200, 64, 5], counts or [1, 1, 2]
    args = attend_latent(
        lengths, counts, heads, 512, 64, dtype=BF16, bits=bits, page=page, cache=BF16, full_precision=full_precision
    )
    pages: LatentCodes = args["pages"]
    for b, length in enumerate(lengths):
        last = int(pages.table[b, (length - 1) // page])
        pages.norms[last, (length - 1) % page + 1 :] = float("nan")
        pages.rope[last, (length - 1) % page + 1 :] = float("nan")
    return args


def append_latent_nbytes(args: Args) -> int:
    """Count the latents and RoPE keys, and the rows they are encoded to."""
    pages: LatentCodes = args["pages"]
    row = 4 * pages.codes.shape[-1] + 4 + pages.rope.shape[-1] * pages.rope.element_size()
    return args["latent"].nbytes + args["k_rope"].nbytes + args["latent"].shape[0] * row


def attend_latent_nbytes(args: Args) -> int:
    """Count the codes, norms and RoPE keys of every position, the queries and the outputs."""
    pages: LatentCodes = args["pages"]
    row = 4 * pages.codes.shape[-1] + 4 + pages.rope.shape[-1] * pages.rope.element_size()
    return int(pages.lengths.sum()) * row + 2 * args["q_latent"].nbytes + args["q_rope"].nbytes


def attend_latent_flops(args: Args) -> int:
    _, heads, width = args["q_latent"].shape
    return 2 * causal_pairs(args) * heads * (2 * width + args["q_rope"].shape[2])


def with_sinks(args: Args) -> Args:
    return {**args, "sinks": torch.randn(args["q_latent"].shape[1])}
