"""Arguments for the ops on codes of keys and values, and their memory traffic and FLOPs; used by `cases` and by tests."""

from collections.abc import Callable
from dataclasses import fields, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from auraflux.ops._cases import Args
from auraflux.ops.attention.pages import KVPages, places_of
from auraflux.ops.rope.frequencies import rope_frequencies
from auraflux.ops.turboquant.arrangement import Arrangement
from auraflux.ops.turboquant.calibration import BLOCK, Calibration, angle_table
from auraflux.ops.turboquant.codebook import BITS, Codebook
from auraflux.ops.turboquant.full_precision import FullPrecisionKV
from auraflux.ops.turboquant.pages import Codebooks, CodePages, LatentCodes, row_words
from auraflux.ops.turboquant.reference_new_token import AttentionOptions, NormRope

BF16 = torch.bfloat16
WIDTHS = (64, 80, 96, 128, 256, 512)
SEED = 7
PAIRS = list(product(BITS, BITS))


def vectors(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).to(dtype)


def encoded(*shape: int, bits: int = 4, dtype: torch.dtype = torch.float32) -> Args:
    return {"x": vectors(*shape, dtype=dtype), "bits": bits, "seed": SEED}


def awkward(width: int, book: Callable[[int, int], Codebook] | None = None) -> Args:
    """Return vectors of zeros, with a single channel, with a large outlier, very short, very long, and ordinary ones."""
    args = encoded(6, width, bits=3)
    x = args["x"]
    x[0] = 0.0
    x[1] = torch.eye(width)[3]
    x[2, 5] = 100.0
    x[3] *= 1e-30
    x[4] *= 1e30
    return args if book is None else {**args, "levels": book(3, width)}


def coded(*shape: int, bits: int, width: int, **options: int) -> Args:
    codes = torch.randint(-(1 << 31), 1 << 31, (*shape, row_words(bits, width))).int()
    return {"codes": codes, "norms": torch.rand(shape) + 0.5, "bits": bits, "width": width, **options}


def values(query_heads: int, heads: int, tokens: int, bits: int, width: int, dtype: torch.dtype = torch.float32) -> Args:
    weights = torch.softmax(2 * torch.randn(query_heads, tokens), -1).to(dtype)
    return {"weights": weights, **coded(heads, tokens, bits=bits, width=width)}


def random_book(bits: int, width: int) -> Codebook:
    """Return random levels, neither symmetric nor evenly spaced, about as large as the default ones."""
    steps = torch.rand(1 << bits) + 0.05
    levels = steps.cumsum(0) - steps.sum() * (0.4 + 0.2 * torch.rand(()))
    return Codebook(levels * (5.0 / steps.sum()) * width**-0.5)


def with_zero(bits: int, width: int) -> Codebook:
    """Return levels that include 0, as in tables for weights."""
    return Codebook((torch.arange(1 << bits) - (1 << bits - 1)) * (4.0 / (1 << bits)) * width**-0.5)


def with_codebooks(make: Callable[..., Args], *args: Any, **options: Any) -> Args:
    """Return arguments with random codebooks."""
    made = make(*args, **options)
    if (pages := made.get("pages")) is None:
        made["levels"] = random_book(made["bits"], made["x"].shape[-1] if "x" in made else made["width"])
    elif isinstance(pages, LatentCodes):
        made["pages"] = replace(pages, levels=random_book(pages.bits, pages.width))
    else:
        books = Codebooks(random_book(pages.key_bits, pages.width), random_book(pages.value_bits, pages.width))
        made["pages"] = replace(pages, codebooks=books)
    return made


def with_shared_codebook(make: Callable[..., Args], *args: Any, **options: Any) -> Args:
    """Return arguments with a random codebook that keys and values share."""
    made = with_codebooks(make, *args, **options)
    book = made["pages"].key_book
    made["pages"] = replace(made["pages"], codebooks=Codebooks(book, book))
    return made


def code_pages(
    lengths: list[int],
    heads: int,
    width: int,
    bits: tuple[int, int] = (4, 4),
    page: int = 16,
    freed: list[int] | None = None,
    arrangement: Arrangement = Arrangement.ROWS,
    calibrated: bool = False,
    full_precision: tuple[int, int] | None = None,
    full_precision_dtype: torch.dtype = torch.float32,
) -> CodePages:
    """Fill a pool with random codes and shuffled pages. Table entries past a length, or among the first `freed`, are invalid.

    full_precision  sink tokens and recent window or None
    """
    pool, table = page_table(lengths, page, freed)
    keys, vals = (coded(pool, heads, page, bits=b, width=width) for b in bits)
    return CodePages(
        keys["codes"],
        keys["norms"],
        vals["codes"],
        vals["norms"],
        table,
        torch.tensor(lengths, dtype=torch.int32),
        *bits,
        width,
        SEED,
        arrangement,
        calibration(heads, width, table.shape[1] * page) if calibrated else None,
        None if full_precision is None else full_precision_pages(lengths, heads, width, *full_precision, full_precision_dtype),
    )


def calibration(heads: int, width: int, capacity: int, rotated: int | None = None, interleaved: bool = False) -> Calibration:
    """Return calibration vectors typical of keys: some channels large and far from 0; those from `rotated` on do not rotate."""
    scale = torch.exp(0.5 * torch.randn(heads, width))
    along, across = (torch.randn(heads, width) * scale for _ in range(2))
    table = angle_table(rope_frequencies(rotated or width, 1e4), -(-capacity // BLOCK), width, interleaved)
    return Calibration(scale, 1 / scale, along, across, table, rotated, interleaved)


def full_precision_pages(
    lengths: list[int],
    heads: int,
    width: int,
    sink_tokens: int,
    recent_window: int,
    dtype: torch.dtype = torch.float32,
    page: int = 16,
) -> FullPrecisionKV:
    """Return random rows with the norms of the codes; table entries of pages that are not read are invalid."""
    sizes = torch.tensor(lengths, dtype=torch.int32)

    def allocate(pool: int, table: Tensor, page: int) -> KVPages:
        k, v = (vectors(pool, heads, page, width, dtype=dtype, scale=width**-0.5) for _ in range(2))
        return KVPages(k, v, table, sizes)

    head = (
        allocate(len(lengths) + 1, torch.randperm(len(lengths) + 1)[: len(lengths), None].int(), sink_tokens)
        if sink_tokens
        else None
    )
    recent = allocate(*page_table(lengths, page), page) if recent_window else None
    if head is not None and recent is not None:
        # a position that is both sink token and recent has one row
        for b, length in enumerate(lengths):
            to, at = (places_of(pages, b, 0, min(sink_tokens, length)) for pages in (recent, head))
            recent.k[to[0], :, to[1]], recent.v[to[0], :, to[1]] = head.k[at[0], :, at[1]], head.v[at[0], :, at[1]]
    return FullPrecisionKV(head, recent, recent_window)


def page_table(lengths: list[int], page: int, freed: list[int] | None = None) -> tuple[int, Tensor]:
    """Return the number of pages of a pool with one spare, and a table of them."""
    counts = [-(-length // page) for length in lengths]
    pool = sum(counts) + 1
    free = torch.randperm(pool).int().tolist()
    table = torch.full((len(lengths), max(counts) + 1), -12345, dtype=torch.int32)
    for b, count in enumerate(counts):
        skipped = 0 if freed is None else freed[b]
        table[b, skipped:count] = torch.tensor([free.pop() for _ in range(skipped, count)], dtype=torch.int32)
    return pool, table


def edges(counts: list[int]) -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int()


def append(
    lengths: list[int], counts: list[int], heads: int, width: int, dtype: torch.dtype = torch.float32, **options: Any
) -> Args:
    k, v = vectors(sum(counts), heads, width, dtype=dtype), vectors(sum(counts), heads, width, dtype=dtype)
    return {"k": k, "v": v, "pages": code_pages(lengths, heads, width, **options), "starts": edges(counts)}


def rope_appended(
    lengths: list[int],
    counts: list[int],
    heads: tuple[int, int],
    width: int,
    rotated: int | None = None,
    normed: bool = True,
    strided: bool = False,
    mscale: float = 1.0,
    interleaved: bool = False,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Args:
    """Return new tokens at the end of their sequences; `strided` queries are interleaved with gates."""
    made = append(lengths, counts, heads[1], width, dtype, **options)
    q = vectors(sum(counts), heads[0], 2, width, dtype=dtype)
    spans = [torch.arange(length - new, length) for length, new in zip(lengths, counts, strict=True)]
    return {
        "q": q[:, :, 0] if strided else q[:, :, 0].contiguous(),
        **made,
        "inv_freq": rope_frequencies(rotated or width, 1e6),
        "positions": torch.cat(spans).int(),
        "norms": (1 + 0.1 * torch.randn(width), 1 + 0.1 * torch.randn(width)) if normed else None,
        "eps": 1e-6,
        "mscale": mscale,
        "interleaved": interleaved,
    }


def appended_and_attended(
    length: int,
    heads: tuple[int, int],
    width: int,
    bits: tuple[int, int] = (8, 4),
    window: int | None = None,
    sinks: bool = False,
    softcap: float | None = None,
    **options: Any,
) -> Args:
    """Return the new token of a sequence, whose older tokens are in pages for the fastest kernel, and options of attention."""
    made = in_pairs(rope_appended, [length], [1], heads, width, bits=bits, page=64, **options)
    older = attend([length], [1], heads, width, bits, 64, arrangement=Arrangement.PAIRS, **{
        name: value for name, value in options.items() if name in ("calibrated", "full_precision")
    })  # fmt: skip
    rotation = NormRope(**{field.name: made.pop(field.name) for field in fields(NormRope)})
    attention = AttentionOptions(width**-0.5, window, torch.randn(heads[0]) if sinks else None, softcap)
    return {**made, "pages": older["pages"], "rotation": rotation, "options": attention}


def attend(
    lengths: list[int],
    counts: list[int],
    heads: tuple[int, int],
    width: int,
    bits: tuple[int, int] = (4, 4),
    page: int = 16,
    freed: list[int] | None = None,
    dtype: torch.dtype = torch.float32,
    block: int | None = None,
    window: int | None = None,
    sinks: bool = False,
    softcap: float | None = None,
    threshold: float | None = None,
    **more: Any,
) -> Args:
    """Return queries of the last `counts` tokens of sequences of the given lengths; heads are (query heads, key heads)."""
    args = {
        "q": vectors(sum(counts), heads[0], width, dtype=dtype, scale=2.0),
        "pages": code_pages(lengths, heads[1], width, bits, page, freed, **more),
        "starts": edges(counts),
        "scale": width**-0.5,
    }
    options = {
        "block": block,
        "window": window,
        "sinks": torch.randn(heads[0]) if sinks else None,
        "softcap": softcap,
        "threshold": threshold,
    }
    return args | {name: value for name, value in options.items() if value is not None}


def in_pairs(make: Callable[..., Args], *args: Any, **options: Any) -> Args:
    """Return arguments whose values are arranged in pairs."""
    return make(*args, **options, arrangement=Arrangement.PAIRS)


def decode_at(thousands: int, key_bits: int, value_bits: int, **options: Any) -> Args:
    return attend([1024 * thousands], [1], (32, 8), 128, (key_bits, value_bits), page=64, **options)


def prefill_of(tokens: int, key_bits: int, **options: Any) -> Args:
    return attend([tokens], [512], (32, 8), 128, (key_bits, 4), page=64, **options)


def append_nbytes(args: Args) -> int:
    """Count the keys and values, and the rows they are encoded to."""
    pages: CodePages = args["pages"]
    row = 4 * (pages.key_codes.shape[-1] + pages.value_codes.shape[-1] + 2)
    return 2 * args["k"].nbytes + args["k"].shape[0] * pages.heads * row


def attend_nbytes(args: Args) -> int:
    """Count the codes and norms of every position of every sequence, the queries and the outputs."""
    pages: CodePages = args["pages"]
    row = 4 * (pages.key_codes.shape[-1] + pages.value_codes.shape[-1] + 2)
    return int(pages.lengths.sum()) * pages.heads * row + 2 * args["q"].nbytes


def attend_flops(args: Args) -> int:
    """Count the scores and values of the visible pairs: causal, without a window."""
    return 4 * causal_pairs(args) * args["q"].shape[1] * args["q"].shape[2]


def causal_pairs(args: Args) -> int:
    counts = args["starts"].diff().tolist()
    return sum(n * length - n * (n - 1) // 2 for n, length in zip(counts, args["pages"].lengths.tolist(), strict=True))


# queries, weights and levels are quantized to bytes, or on a GPU rounded to float16
FAST: dict[str, Any] = {"exact": False, "tol": 1e-2}
ROUNDED: dict[str, Any] = {"tol": 6e-3, "slow": True}
PROMPT: dict[str, Any] = {"page": 64, "dtype": BF16}
BENCH: dict[str, Any] = {"bench": True, "nbytes": attend_nbytes, "flops": attend_flops}
