"""Attention over codes in pairs from few new tokens: which calls it serves, and how the work is cut.

Every new token is attended from on its own: heads that share a key fill the columns of a product, several tokens would not.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from auraflux.ops._dispatch import is_exact
from auraflux.ops._triton import INTERPRETED, cdiv, multiprocessors, power_of_two
from auraflux.ops.attention._flash import EVERYTHING, LOG2E, parts_like
from auraflux.ops.turboquant._hopper import RING, attend_pairs
from auraflux.ops.turboquant._hopper_merge import finish_pairs
from auraflux.ops.turboquant._turn import turn_for
from auraflux.ops.turboquant.arrangement import Arrangement, arrangement_for
from auraflux.ops.turboquant.codebook import codebook
from auraflux.ops.turboquant.pages import CodePages

MOST_TOKENS = 8  # of a sequence on average; the codes are read again for each
COLUMNS = 8  # query heads of a program
BLOCK = 16  # tokens of a warp at a time, or twice as many
MOST_SPLITS = 256
LONG = 16  # steps in all, from which a warp takes two blocks at a time; fewer would leave programs without work


class Cut(NamedTuple):
    """Warps of a program, registers of a thread, and programs that a multiprocessor holds at a time."""

    warps: int
    registers: int
    resident: int


CUTS = {64: Cut(8, 128, 2), 128: Cut(8, 128, 2), 256: Cut(8, 255, 1)}
# a multiprocessor to itself, where programs are no more than those; of width 128
ALONE = Cut(8, 168, 1)
AHEAD = 2  # steps under way of such a program, and one before the kernel before has ended: more delay what is needed first
ENOUGH = 0.7  # of the multiprocessors have work where each has the whole of a row, of so many keys at most:
MOST_KEYS = 8192  # a batch may have one long text among short ones
ENOUGH_WIDE = 0.45  # the same of width 256
WIDE_KEYS = 4096
SHARED_NBYTES = 228 << 10  # of a multiprocessor
RESERVED_NBYTES = 1 << 10  # of these for each program
DEEPEST = 4


def depth(key_bits: int, value_bits: int, width: int, blocks: int = 1, cut: Cut | None = None) -> int:
    """How many times `blocks` of each warp can be under way beside the table, within reason."""
    cut = cut or CUTS[width]
    room = (SHARED_NBYTES // cut.resident - RESERVED_NBYTES) // 4096 * 4096 - RING.value
    return min(DEEPEST, room // (cut.warps * blocks * BLOCK * (width * (key_bits + value_bits) // 8 + 8)))


def serves(q: Tensor, pages: CodePages) -> bool:
    """Whether these are few tokens, in pairs, with products in 16 bits, on a GPU that the kernel is made for."""
    if INTERPRETED or pages.arrangement is not Arrangement.PAIRS or (q.dtype is torch.float32 and is_exact()):
        return False
    shape = pages.key_bits, pages.value_bits, pages.width, pages.pool[1]
    return q.shape[0] <= MOST_TOKENS * len(pages.lengths) and _fits(q.device, *shape)


@cache
def _fits(device: torch.device, *shape: int) -> bool:
    return arrangement_for(device, *shape) is Arrangement.PAIRS


@cache
def level_words(key_bits: int, value_bits: int, width: int, device: torch.device) -> Tensor:
    """Two float16 levels of N(0, 1) for every byte, as a word for keys and one for values: int32 [256, 2].

    A byte is two codes of 2, 3 or 4 bits, the first in its lowest, or one of 6 or 8, whose level comes twice.
    """
    return torch.stack([_pair_words(bits, width) for bits in (key_bits, value_bits)], 1).to(device)


def _pair_words(bits: int, width: int) -> Tensor:
    byte, book, mask = torch.arange(256), (codebook(bits, width) * width**0.5).half(), (1 << bits) - 1
    pair = byte & mask, byte >> (bits if bits <= 4 else 0) & mask
    return torch.stack([book[code] for code in pair], 1).view(torch.int32).squeeze(1)


@cache
def splits_for(programs: int, slots: int, most: int) -> int:
    """Into how many parts to split the keys: as fill the GPU once; of few parts, those that leave least of it idle."""
    wanted = slots // programs
    if wanted < 4:
        shares = [(cdiv(programs * n, slots) * slots / (programs * n), n) for n in range(max(1, wanted), 9)]
        # a part more costs some time of its own
        wanted = min(shares, key=lambda share: share[0] + share[1] / 32)[1]
    wanted = max(1, min(wanted, MOST_SPLITS, most))
    # as few parts as make no more steps
    return cdiv(most, cdiv(most, wanted))


class Plan(NamedTuple):
    """Parts of a row, blocks of a warp at a time, how often these are under way, and the programs' size."""

    splits: int
    blocks: int
    depth: int
    cut: Cut


@cache
def plan_for(programs: int, multiprocessors: int, capacity: int, page: int, key_bits: int, value_bits: int, width: int) -> Plan:
    cut, bits = CUTS[width], (key_bits, value_bits)
    alone = _alone_for(programs, multiprocessors, capacity, page, bits, width)
    if alone:
        return alone
    slots, steps, deep = cut.resident * multiprocessors, cdiv(capacity, cut.warps * 2 * BLOCK), depth(*bits, width, 2)
    if page % (2 * BLOCK) == 0 and deep and steps >= LONG:
        return Plan(splits_for(programs, slots, steps), 2, deep, cut)
    splits = splits_for(programs, slots, cdiv(capacity, cut.warps * BLOCK))
    return Plan(splits, 1, max(1, depth(*bits, width)), cut)


def _alone_for(programs: int, multiprocessors: int, capacity: int, page: int, bits: tuple[int, int], width: int) -> Plan | None:
    """Plan programs that have a multiprocessor each, where that is faster: for whole rows, or parts of some keys."""
    share = programs / multiprocessors
    if width == 256 and capacity <= WIDE_KEYS and ENOUGH_WIDE <= share <= 1:
        return Plan(1, 1, depth(*bits, width), CUTS[width])
    if width != 128 or share > 1:
        return None
    if share >= ENOUGH and capacity <= MOST_KEYS:
        return Plan(1, 1, min(AHEAD, depth(*bits, width, 1, ALONE)), ALONE)
    parts = multiprocessors // programs
    keys, blocks = cdiv(capacity, parts), 2 if page % (2 * BLOCK) == 0 and {*bits} <= {2, 4} else 1
    if parts > 1 and (1024 <= keys <= 2048 if blocks == 2 else max(bits) == 8 and 512 <= keys < 1024):
        splits = splits_for(1, parts, cdiv(capacity, ALONE.warps * blocks * BLOCK))
        return Plan(splits, blocks, min(AHEAD, depth(*bits, width, blocks, ALONE)), ALONE)
    return None


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
    group, bits, device = heads // pages.heads, (pages.key_bits, pages.value_bits), q.device
    tiles = pages.heads * cdiv(group, COLUMNS)
    plan = plan_for(tokens * tiles, multiprocessors(device), pages.capacity, pages.pool[1], *bits, width)
    out, one, cut = torch.empty_like(q), plan.splits == 1 and width > 64, plan.cut
    parts = (None,) * 3 if one else parts_like(tokens * heads, plan.splits, width, device)
    signs, _ = turn_for(width, pages.seed, False, device)
    # of the transform and of the levels, which come larger by sqrt(D); then to base 2
    factor = scale / width * LOG2E.value
    attend_pairs[(plan.splits, tiles, tokens)](
        *(q, signs, pages.key_codes, pages.key_norms, pages.value_codes, pages.value_norms),
        level_words(*bits, width, device),
        *(pages.table, pages.lengths, starts, *parts),
        *((sinks, out) if one else (None, None)),
        factor * 2 / softcap if softcap else factor,
        softcap * LOG2E.value if softcap else 1.0,
        EVERYTHING if window is None else window,
        *(tokens, sequences, table_width, pages.pool[0], plan.splits),
        G=group,
        HEADS=pages.heads,
        D=width,
        PAGE=pages.pool[1],
        S=power_of_two(sequences),
        NW=cut.warps,
        DEEP=plan.depth,
        U=plan.blocks,
        KEY_BITS=pages.key_bits,
        VALUE_BITS=pages.value_bits,
        WINDOW=window is not None,
        SOFTCAP=softcap is not None,
        ONE=one,
        SOON=1 if cut is ALONE else plan.depth,
        num_warps=cut.warps,
        maxnreg=cut.registers,
        launch_pdl=True,
    )
    if not one:
        sizes = finish_sizes(plan.splits, width)
        rest = {"num_warps": sizes["NW"], "launch_pdl": True}
        finish_pairs[(tokens * heads,)](*parts, sinks, signs, out, heads, plan.splits, **sizes, **rest)
    return out


def finish_sizes(splits: int, width: int) -> dict[str, int]:
    """How the parts of a row are merged: few warps end sooner, as long as their registers hold what they read."""
    padded = power_of_two(splits)
    warps = 2 if padded <= 64 else 4 if padded <= 128 else 8
    return {"D": width, "S": padded, "C": min(padded, 2048 // width * warps), "NW": warps}
