"""Attention over codes in pairs from few new tokens: which calls it serves, and how the work is cut.

Every new token is attended from on its own: heads that share a key fill the columns of a product, several tokens would not.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from auraflux.ops._dispatch import is_exact
from auraflux.ops._triton import INTERPRETED, cdiv, multiprocessors, power_of_two
from auraflux.ops.attention._flash import EVERYTHING, LOG2E, parts_like
from auraflux.ops.turboquant._hopper import RING, attend_pairs, finish_pairs
from auraflux.ops.turboquant._turn import turn_for
from auraflux.ops.turboquant.arrangement import Arrangement, arrangement_for
from auraflux.ops.turboquant.codebook import codebook
from auraflux.ops.turboquant.pages import CodePages

MOST_TOKENS = 8  # of a sequence on average; the codes are read again for each
COLUMNS = 8  # query heads of a program
BLOCK = 16  # tokens of a warp at a time
MOST_SPLITS = 256
FINISHERS = 8  # warps that merge the parts of a row


class Cut(NamedTuple):
    """Warps of a program, registers of a thread, and programs that a multiprocessor holds at a time."""

    warps: int
    registers: int
    resident: int


CUTS = {64: Cut(8, 128, 2), 128: Cut(8, 128, 2), 256: Cut(8, 255, 1)}
SHARED_NBYTES = 228 << 10  # of a multiprocessor
RESERVED_NBYTES = 1 << 10  # of these for each program
DEEPEST = 4


def depth(key_bits: int, value_bits: int, width: int) -> int:
    """How many blocks of each warp are under way: as many as fit beside the table, within reason."""
    cut = CUTS[width]
    room = (SHARED_NBYTES // cut.resident - RESERVED_NBYTES) // 4096 * 4096 - RING.value
    block = BLOCK * (width * (key_bits + value_bits) // 8 + 8)
    return max(1, min(DEEPEST, room // (cut.warps * block)))


def serves(q: Tensor, pages: CodePages) -> bool:
    """Whether these are few tokens, in pairs, with products in 16 bits, on a GPU that the kernel is made for."""
    if INTERPRETED or pages.arrangement is not Arrangement.PAIRS or (q.dtype is torch.float32 and is_exact()):
        return False
    shape = pages.key_bits, pages.value_bits, pages.width, pages.pool[1]
    return q.shape[0] <= MOST_TOKENS * len(pages.lengths) and _fits(q.device, *shape)


@lru_cache
def _fits(device: torch.device, *shape: int) -> bool:
    return arrangement_for(device, *shape) is Arrangement.PAIRS


@lru_cache
def level_words(key_bits: int, value_bits: int, width: int, device: torch.device) -> Tensor:
    """Two float16 levels of N(0, 1) for every byte, as a word for keys and one for values: int32 [256, 2].

    A byte is two codes of 4 bits, or one of 8, whose level comes twice; a nibble is two of 2 bits.
    """
    return torch.stack([_pair_words(bits, width) for bits in (key_bits, value_bits)], 1).to(device)


def _pair_words(bits: int, width: int) -> Tensor:
    byte, book = torch.arange(256), (codebook(bits, width) * width**0.5).half()
    pair = (byte, byte) if bits == 8 else (byte & ((1 << bits) - 1), byte >> bits & ((1 << bits) - 1))
    return torch.stack([book[code] for code in pair], 1).view(torch.int32).squeeze(1)


@lru_cache
def splits_for(programs: int, slots: int, most: int) -> int:
    """Into how many parts to split the keys: as fill the GPU once; of few parts, those that leave least of it idle."""
    wanted = slots // programs
    if wanted < 4:
        shares = [(cdiv(programs * n, slots) * slots / (programs * n), n) for n in range(max(1, wanted), 9)]
        # a part more costs some time of its own
        wanted = min(shares, key=lambda share: share[0] + share[1] / 32)[1]
    return max(1, min(wanted, MOST_SPLITS, most))


def attend_few(
    q: Tensor,
    pages: CodePages,
    starts: Tensor,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
    softcap: float | None,
) -> Tensor:
    (tokens, heads, width), (sequences, table_width) = q.shape, pages.table.shape
    group, cut, device = heads // pages.heads, CUTS[width], q.device
    tiles = pages.heads * cdiv(group, COLUMNS)
    slots = cut.resident * multiprocessors(device)
    splits = splits_for(tokens * tiles, slots, cdiv(pages.capacity, cut.warps * BLOCK))
    parts = parts_like(tokens * heads, splits, width, device)
    signs, _ = turn_for(width, pages.seed, False, device)
    # of the transform and of the levels, which come larger by sqrt(D); then to base 2
    factor = scale / width * LOG2E.value
    attend_pairs[(splits, tiles, tokens)](
        *(q, signs, pages.key_codes, pages.key_norms, pages.value_codes, pages.value_norms),
        level_words(pages.key_bits, pages.value_bits, width, device),
        *(pages.table, pages.lengths, starts, *parts),
        factor * 2 / softcap if softcap else factor,
        softcap * LOG2E.value if softcap else 1.0,
        EVERYTHING if window is None else window,
        *(tokens, sequences, table_width, pages.pool[0], splits),
        G=group,
        HEADS=pages.heads,
        D=width,
        PAGE=pages.pool[1],
        S=power_of_two(sequences),
        NW=cut.warps,
        DEEP=depth(pages.key_bits, pages.value_bits, width),
        KEY_BITS=pages.key_bits,
        VALUE_BITS=pages.value_bits,
        WINDOW=window is not None,
        SOFTCAP=softcap is not None,
        num_warps=cut.warps,
        maxnreg=cut.registers,
        launch_pdl=True,
    )
    out, padded = torch.empty_like(q), power_of_two(splits)
    sizes = {"D": width, "S": padded, "C": min(padded, 8192 // width), "NW": FINISHERS}
    finish_pairs[(tokens * heads,)](*parts, sinks, signs, out, heads, splits, **sizes, num_warps=FINISHERS, launch_pdl=True)
    return out
