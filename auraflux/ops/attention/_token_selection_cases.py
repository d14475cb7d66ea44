"""Inputs for token selection: small integers, whose sums are exact, so that ties are ties on every backend."""

import torch

from auraflux.ops._cases import Args, Case
from auraflux.ops.attention._inputs import BF16, F16, F32, RAGGED, index, pairs, starts_of
from auraflux.ops.attention.pages import RowPages
from auraflux.ops.attention.reference import append_keys, choose_positions


def key_pages(lengths: list[int], width: int, page: int = 16, dtype: torch.dtype = F32) -> RowPages:
    count, table, lengths_ = index(lengths, page)
    return RowPages(torch.randint(-3, 4, (count, page, width)).to(dtype), table, lengths_)


def selection_inputs(
    lengths: list[int],
    new: list[int],
    heads: int,
    width: int,
    most: int,
    page: int = 16,
    dtype: torch.dtype = F32,
    cache: torch.dtype | None = None,
) -> Args:
    return {
        "q": torch.randint(-3, 4, (sum(new), heads, width)).to(dtype),
        "weights": torch.randint(-4, 5, (sum(new), heads)).to(dtype),
        "pages": key_pages(lengths, width, page, cache or dtype),
        "starts": starts_of(new),
        "most": most,
    }


def non_finite(args: Args) -> Args:
    """Insert zeros of both signs, NaN and infinity."""
    args["weights"][0] = -0.0
    args["q"][1, 0, 0], args["q"][2, 0, 0] = float("nan"), float("inf")
    return args


def new_keys(lengths: list[int], new: list[int], width: int, page: int, dtype: torch.dtype = F32) -> Args:
    return {"k": torch.randn(sum(new), width), "pages": key_pages(lengths, width, page, dtype), "starts": starts_of(new)}


def selection_flops(args: Args) -> int:
    _, heads, width = args["q"].shape
    return 2 * pairs(args) * heads * width


TOKEN_SELECTION_CASES = [
    Case(
        choose_positions, "decode", lambda: selection_inputs([4096], [1], 64, 128, 2048, 64), bench=True, flops=selection_flops
    ),
    Case(
        choose_positions,
        "prefill",
        lambda: selection_inputs([2304], [64], 64, 128, 2048, 64),
        bench=True,
        flops=selection_flops,
    ),
    Case(choose_positions, "ragged", lambda: selection_inputs(*RAGGED, 3, 63, 20, 7)),
    Case(choose_positions, "one", lambda: selection_inputs(*RAGGED, 5, 16, 1)),
    Case(choose_positions, "all", lambda: selection_inputs(*RAGGED, 2, 100, 333)),
    Case(choose_positions, "many", lambda: selection_inputs([700, 130], [90, 130], 4, 32, 64)),
    Case(choose_positions, "non-finite", lambda: non_finite(selection_inputs(*RAGGED, 3, 16, 20))),
    Case(choose_positions, "bf16", lambda: selection_inputs(*RAGGED, 4, 64, 32, dtype=BF16)),
    Case(choose_positions, "f16-cache", lambda: selection_inputs(*RAGGED, 4, 64, 32, cache=F16)),
    Case(append_keys, "one-token", lambda: new_keys([700], [1], 128, 64), bench=True),
    Case(append_keys, "ragged", lambda: new_keys(*RAGGED, 63, 7)),
    Case(append_keys, "narrower", lambda: new_keys(*RAGGED, 64, 16, BF16)),
]
