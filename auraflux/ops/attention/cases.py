"""Inputs for attention: decode and prefill, ragged batches, odd widths and pages, 16-bit caches, windows, sinks, softcap."""

from functools import partial
from typing import Any

import torch

from auraflux.ops._cases import Args, Case
from auraflux.ops.attention._inputs import BF16, F16, F32, RAGGED, index, pairs, starts_of
from auraflux.ops.attention._latent_cases import LATENT_CASES
from auraflux.ops.attention._token_selection_cases import TOKEN_SELECTION_CASES
from auraflux.ops.attention.pages import KVPages
from auraflux.ops.attention.reference import append_kv, attention, attention_partials, merge_partials


def kv_pages(
    lengths: list[int], heads: int, width: int, value_width: int | None = None, page: int = 16, dtype: torch.dtype = F32
) -> KVPages:
    count, table, lengths_ = index(lengths, page)
    k, v = torch.randn(count, heads, page, width), torch.randn(count, heads, page, value_width or width)
    return KVPages(k.to(dtype), v.to(dtype), table, lengths_)


def queries(
    lengths: list[int],
    new: list[int],
    heads: tuple[int, int],
    width: int,
    value_width: int | None = None,
    page: int = 16,
    dtype: torch.dtype = F32,
    cache: torch.dtype | None = None,
    window: int | None = None,
    sinks: bool = False,
    softcap: float | None = None,
) -> Args:
    pages = kv_pages(lengths, heads[1], width, value_width, page, cache or dtype)
    return {
        "q": torch.randn(sum(new), heads[0], width).to(dtype),
        "pages": pages,
        "starts": starts_of(new),
        "scale": width**-0.5,
        "window": window,
        "sinks": torch.randn(heads[0]) if sinks else None,
        "softcap": softcap,
    }


def decode_at(thousands: int) -> Args:
    return queries([1024 * thousands], [1], (32, 8), 128, page=64)


def stale_pages() -> Args:
    args = queries([50, 3], [2, 1], (4, 2), 64, page=7, window=10)
    args["pages"].table[0, :5] = -1
    return args


def not_finite() -> Args:
    """Place NaN and infinity where only late queries see them, and beyond the end where none does."""
    args = queries([40], [40], (4, 2), 32, page=16)
    pages = args["pages"]
    last = pages.table[0, 2]
    pages.v[last, :, 3] = torch.nan
    pages.v[last, 0, 5, 7] = torch.inf
    pages.k[last, :, 8:] = torch.nan
    pages.v[last, :, 8:] = torch.nan
    return args


def beyond_the_end(lengths: list[int], new: list[int], **options: Any) -> Args:
    """Place NaN beyond the end, and an infinity that only later queries see, in bf16."""
    args = queries(lengths, new, (8, 2), 128, page=64, dtype=BF16, **options)
    pages = args["pages"]
    for b, length in enumerate(lengths):
        last = pages.table[b, length // 64]
        pages.k[last, :, length % 64 :] = torch.nan
        pages.v[last, :, length % 64 :] = torch.nan
        pages.v[last, 1, length % 64 - 1, 7] = torch.inf
    return args


def not_finite_decode() -> Args:
    args = queries([38], [1], (4, 2), 64)
    args["pages"].v[args["pages"].table[0, 2], 1, 5] = torch.inf
    return args


def new_rows(
    lengths: list[int], new: list[int], heads: int, width: int, page: int, dtype: torch.dtype = F32, cache: torch.dtype = F32
) -> Args:
    pages = kv_pages(lengths, heads, width, width + 1, page, cache)
    k, v = torch.randn(sum(new), heads, width), torch.randn(sum(new), heads, width + 1)
    return {"k": k.to(dtype), "v": v.to(dtype), "pages": pages, "starts": starts_of(new)}


def partials(rows: int, blocks: int, width: int, empty: float = 0.2) -> Args:
    o, m, total = torch.randn(rows, blocks, width), torch.randn(rows, blocks) * 5, torch.rand(rows, blocks) + 0.5
    gone = torch.rand(rows, blocks) < empty
    gone[0] = rows > 1
    total[gone] = 0
    o[gone], m[gone] = torch.nan, torch.tensor([torch.nan, -torch.inf, torch.inf])[torch.randint(3, (int(gone.sum()),))]
    return {"o": o, "m": m, "l": total}


def attention_flops(args: Args) -> int:
    pages = args["pages"]
    return 2 * pairs(args) * args["q"].shape[1] * (pages.k.shape[3] + pages.v.shape[3])


CASES = [
    *(
        Case(attention, f"decode-{n}k-none", partial(decode_at, n), bench=True, flops=attention_flops, slow=n > 8)
        for n in (1, 8, 32)
    ),
    Case(
        attention,
        "decode-4k-bf16",
        lambda: queries([4096], [1], (32, 8), 128, page=64, cache=BF16),
        bench=True,
        flops=attention_flops,
    ),
    Case(
        attention, "prefill-512-of-512", lambda: queries([512], [512], (32, 8), 128, page=64), bench=True, flops=attention_flops
    ),
    Case(attention, "batch", lambda: queries([300, 64, 700, 1], [1] * 4, (8, 2), 128)),
    Case(attention, "ragged", lambda: queries(*RAGGED, (8, 2), 64)),
    Case(attention, "one-token", lambda: queries([1], [1], (4, 4), 64)),
    Case(attention, "grouped-by-7", lambda: queries([100], [1], (14, 2), 96)),
    Case(attention, "one-key-head", lambda: queries([100], [1], (40, 1), 64)),
    Case(attention, "window", lambda: queries(*RAGGED, (8, 2), 80, page=7, window=17)),
    Case(attention, "window-decode", lambda: queries([333, 5], [1, 1], (8, 2), 80, page=7, window=100)),
    Case(attention, "no-window-left", lambda: queries(*RAGGED, (8, 2), 64, window=0)),
    Case(attention, "stale-pages", stale_pages),
    Case(attention, "sinks", lambda: queries(*RAGGED, (16, 2), 64, sinks=True, window=32)),
    Case(attention, "softcap", lambda: queries(*RAGGED, (4, 2), 256, softcap=2.0)),
    Case(attention, "everything", lambda: queries(*RAGGED, (6, 2), 100, 33, 7, sinks=True, window=20, softcap=5.0)),
    Case(attention, "width-63", lambda: queries([333, 40], [1, 3], (6, 2), 63, page=7)),
    Case(attention, "width-512", lambda: queries([100, 40], [1, 3], (4, 1), 512)),
    Case(attention, "narrow-heads", lambda: queries([100, 40], [1, 3], (4, 2), 8, 5)),
    Case(attention, "not-finite", not_finite),
    Case(attention, "not-finite-decode", not_finite_decode),
    Case(attention, "long-decode", lambda: queries([2000, 3], [1, 1], (4, 1), 64, sinks=True)),
    Case(attention, "long-chunk", lambda: queries([1500, 3], [3, 1], (4, 1), 64, sinks=True)),
    Case(attention, "bf16", lambda: queries(*RAGGED, (8, 2), 64, dtype=BF16), tol=4e-3),
    Case(attention, "bf16-decode", lambda: queries([700, 40], [1, 1], (8, 2), 128, page=64, dtype=BF16), tol=4e-3),
    Case(
        attention, "bf16-decode-batch", lambda: queries([70] * 34, [1] * 34, (6, 2), 64, None, 64, BF16, sinks=True), tol=4e-3
    ),
    Case(
        attention,
        "bf16-decode-window",
        lambda: queries([700, 9], [2, 1], (6, 2), 64, None, 64, BF16, None, 100, True),
        tol=4e-3,
    ),
    Case(
        attention, "bf16-decode-softcap", lambda: queries([300], [1], (16, 1), 256, page=64, dtype=BF16, softcap=3.0), tol=4e-3
    ),
    Case(attention, "f16-decode", lambda: queries([500], [1], (32, 1), 128, page=128, dtype=F16, sinks=True), tol=1e-3),
    Case(attention, "bf16-decode-not-finite", lambda: beyond_the_end([300, 130], [1, 2], window=100), tol=4e-3),
    Case(attention, "bf16-prefill", lambda: queries([333, 100, 7], [300, 100, 0], (8, 2), 128, page=64, dtype=BF16), tol=4e-3),
    Case(
        attention,
        "bf16-prefill-long",
        lambda: queries([900, 3, 520], [300, 1, 260], (8, 2), 128, page=64, dtype=BF16),
        tol=4e-3,
        slow=True,
    ),
    Case(
        attention, "bf16-prefill-window", lambda: queries([400], [300], (6, 2), 64, None, 128, BF16, None, 70, True), tol=4e-3
    ),
    Case(
        attention,
        "bf16-prefill-softcap",
        lambda: queries([200], [130], (4, 2), 256, page=64, dtype=BF16, softcap=3.0),
        tol=4e-3,
    ),
    Case(attention, "f16-prefill", lambda: queries([200], [200], (4, 4), 128, page=64, dtype=F16), tol=1e-3),
    Case(attention, "bf16-prefill-not-finite", lambda: beyond_the_end([300, 130], [200, 130]), tol=4e-3),
    Case(attention, "bf16-cache", lambda: queries(*RAGGED, (8, 2), 100, page=7, cache=BF16)),
    Case(attention, "f16-cache", lambda: queries(*RAGGED, (8, 2), 100, page=7, cache=F16)),
    Case(attention_partials, "decode", lambda: queries([1000, 300], [1, 1], (8, 2), 128, page=64, window=128), bench=True),
    Case(attention_partials, "everything", lambda: queries(*RAGGED, (6, 2), 100, 33, 7, sinks=True, window=20, softcap=5.0)),
    Case(attention_partials, "long-decode", lambda: queries([2000, 3], [1, 1], (4, 1), 64)),
    Case(attention_partials, "nothing-visible", lambda: queries(*RAGGED, (4, 2), 63, window=0)),
    Case(attention_partials, "only-sinks", lambda: queries(*RAGGED, (4, 2), 63, window=0, sinks=True)),
    Case(attention_partials, "bf16", lambda: queries(*RAGGED, (8, 2), 64, dtype=BF16), tol=4e-3),
    Case(append_kv, "one-token", lambda: new_rows([700], [1], 8, 128, 64), bench=True),
    Case(append_kv, "many-tokens", lambda: new_rows([900, 1], [512, 0], 8, 128, 64), bench=True),
    Case(append_kv, "ragged", lambda: new_rows(*RAGGED, 3, 63, 7)),
    Case(append_kv, "narrower", lambda: new_rows(*RAGGED, 2, 64, 16, cache=BF16)),
    Case(append_kv, "wider", lambda: new_rows(*RAGGED, 2, 64, 16, dtype=F16)),
    Case(merge_partials, "long-context", lambda: partials(32, 64, 128), bench=True),
    *(Case(merge_partials, f"width-{d}", partial(partials, 5, 7, d)) for d in (64, 80, 96, 128, 256, 512, 63)),
    Case(merge_partials, "one-block", lambda: partials(3, 1, 64, 0.0)),
    Case(merge_partials, "nothing-live", lambda: partials(3, 4, 64, 1.0)),
    Case(merge_partials, "many-rows", lambda: partials(300, 5, 100)),
    *LATENT_CASES,
    *TOKEN_SELECTION_CASES,
]
