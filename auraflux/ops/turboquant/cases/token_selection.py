"""Inputs for token selection with quantized keys."""

from functools import partial

import torch

from auraflux.ops._cases import Args, Case
from auraflux.ops.attention._inputs import RAGGED, pairs, starts_of
from auraflux.ops.turboquant.cases.inputs import SEED, coded, page_table
from auraflux.ops.turboquant.codebook import BITS
from auraflux.ops.turboquant.pages import RowCodes
from auraflux.ops.turboquant.reference import append_key_codes, choose_coded_positions


def key_codes(lengths: list[int], width: int, bits: int, page: int) -> RowCodes:
    pool, table = page_table(lengths, page)
    rows = coded(pool, page, bits=bits, width=width)
    return RowCodes(rows["codes"], rows["norms"], table, torch.tensor(lengths, dtype=torch.int32), bits, width, SEED)


def choosing(lengths: list[int], new: list[int], heads: int, width: int, most: int, bits: int = 8, page: int = 16) -> Args:
    return {
        "q": torch.randn(sum(new), heads, width),
        "weights": torch.randn(sum(new), heads),
        "pages": key_codes(lengths, width, bits, page),
        "starts": starts_of(new),
        "most": most,
    }


def new_keys(
    lengths: list[int], new: list[int], width: int, bits: int, page: int = 16, dtype: torch.dtype = torch.float32
) -> Args:
    k = torch.randn(sum(new), width).to(dtype)
    return {"k": k, "pages": key_codes(lengths, width, bits, page), "starts": starts_of(new)}


def choice_flops(args: Args) -> int:
    _, heads, width = args["q"].shape
    return 2 * pairs(args) * heads * width


CHOICE_CASES = [
    Case(
        choose_coded_positions,
        "decode",
        lambda: choosing([4096], [1], 64, 128, 2048, page=64),
        bench=True,
        flops=choice_flops,
    ),
    *(Case(choose_coded_positions, f"b{b}", partial(choosing, *RAGGED, 3, 64, 20, b)) for b in BITS),
    Case(choose_coded_positions, "odd-width", lambda: choosing(*RAGGED, 4, 100, 32, 6, 7)),
    Case(choose_coded_positions, "all", lambda: choosing(*RAGGED, 2, 63, 333, 4)),
    *(Case(append_key_codes, f"b{b}", partial(new_keys, [21, 40], [5, 1], 64, b)) for b in BITS),
    Case(append_key_codes, "odd-width", lambda: new_keys(*RAGGED, 100, 6, 7)),
    Case(append_key_codes, "bf16", lambda: new_keys([9, 20], [2, 3], 128, 4, dtype=torch.bfloat16)),
    Case(append_key_codes, "one-token", lambda: new_keys([700], [1], 128, 8, 64), bench=True),
]
