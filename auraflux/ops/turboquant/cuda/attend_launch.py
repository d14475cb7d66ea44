"""Attention over codes in pairs from few new tokens: how the work is cut.

Every new token is attended from on its own: heads that share a key fill the columns of a product, several tokens would not.
"""

from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from auraflux.ops._dispatch import is_invariant
from auraflux.ops.hopper.device import MULTIPROCESSOR_NBYTES, multiprocessors
from auraflux.ops.hopper.flash import EVERYTHING
from auraflux.ops.hopper.launch import launch
from auraflux.ops.hopper.pages import Index, index_of
from auraflux.ops.hopper.sizes import cdiv, power_of_two
from auraflux.ops.hopper.softmax import LOG2E, Parts, parts_like
from auraflux.ops.hopper.split_kv import ALIKE_SPLITS, keys_each, merged_at_once
from auraflux.ops.hopper.split_kv import splits_for as fixed_splits_for
from auraflux.ops.turboquant.codebook import Codebook, codebook
from auraflux.ops.turboquant.cuda.arguments import kept_of, keys_of, plain_of, shape_of, values_of
from auraflux.ops.turboquant.cuda.attend import Scores, Work, attend_pairs
from auraflux.ops.turboquant.cuda.attend_codes import ring_begin
from auraflux.ops.turboquant.cuda.attend_kept import centres_of
from auraflux.ops.turboquant.cuda.attend_merge import finish_pairs, finish_rotated
from auraflux.ops.turboquant.cuda.attend_shares import finish_in_order
from auraflux.ops.turboquant.cuda.hadamard import MOST_BOOKS, rotation_for
from auraflux.ops.turboquant.pages import CodePages

MOST_TOKENS = 8  # of a sequence on average; the codes are read again for each
COLUMNS = 8  # query heads of a program
BLOCK = 16  # tokens of a warp at a time, or twice as many
MOST_SPLITS = 256
MOST_FIXED = ALIKE_SPLITS - 1  # of codes inside `invariant`, where rows that are kept as they are may have one more
MOST_PLAIN = 128  # positions kept as they are: 16 for every warp
MOST_SHARED = 256  # texts that a warp shares out
LONG = 16  # steps in all, from which a warp takes more blocks at a time; fewer would leave programs without work


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
# keys of a part for which a multiprocessor to itself is faster: of two blocks at a time, and of one with 8 bits
FEW_KEYS, FEWER_KEYS = range(1024, 2305), range(512, 1024)
ROOMY = 168  # registers of a thread, where no multiprocessor has two programs and some rows have a part of their own
RESERVED_NBYTES = 1 << 10  # of these for each program
DEEPEST = 4
WIDEST_BESIDE = 128  # whose sums fit beside the table, where keys and values share one side of it
AT_ONCE = 16  # shares that a program asks for where they follow each other: most rows have no more
ROTATED_COLUMNS = 64  # columns that a program merges where parts come rotated back: heads are few, and their parts many


def depth(key_bits: int, value_bits: int, width: int, blocks: int = 1, cut: Cut | None = None) -> int:
    """How many times `blocks` of each warp can be under way beside the table, within reason."""
    cut = cut or CUTS[width]
    room = (MULTIPROCESSOR_NBYTES // cut.resident - RESERVED_NBYTES) // 4096 * 4096 - ring_begin(width)
    return min(DEEPEST, room // (cut.warps * blocks * BLOCK * (width * (key_bits + value_bits) // 8 + 8)))


@lru_cache(MOST_BOOKS)
def level_words(
    key_bits: int,
    value_bits: int,
    width: int,
    device: torch.device,
    key_book: Codebook | None = None,
    value_book: Codebook | None = None,
) -> Tensor:
    """Two float16 levels of N(0, 1) for every byte, as a word for keys and one for values: int32 [256, 2].

    A byte is two codes of 2, 3 or 4 bits, the first in its lowest, or one of 6 or 8, whose level comes twice.
    """
    sides = (key_bits, key_book), (value_bits, value_book)
    return torch.stack([_pair_words(bits, width, book) for bits, book in sides], 1).to(device)


def _pair_words(bits: int, width: int, given: Codebook | None) -> Tensor:
    byte, book, mask = torch.arange(256), (codebook(bits, width, given=given) * width**0.5).half(), (1 << bits) - 1
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
    """Parts of a row, blocks of a warp at a time, how often these are under way, and the programs' size.

    soon  of the steps under way, those asked for before the kernel before has ended
    """

    splits: int
    blocks: int
    depth: int
    cut: Cut
    soon: int


@cache
def plan_for(
    programs: int,
    multiprocessors: int,
    capacity: int,
    page: int,
    key_bits: int,
    value_bits: int,
    width: int,
    windowed: bool = False,
) -> Plan:
    cut, bits = CUTS[width], (key_bits, value_bits)
    alone = _alone_for(programs, multiprocessors, capacity, page, bits, width)
    if alone:
        return alone
    slots = cut.resident * multiprocessors
    if width == 256 and bits == (4, 4) and cdiv(capacity, cut.warps * 2 * BLOCK) >= LONG:
        # more under way delays the kernels that merge
        return Plan(splits_for(programs, slots, cdiv(capacity, cut.warps * BLOCK)), 1, AHEAD, cut, 1)
    # four blocks of 3, 6 or 8 bits are too much for the registers, and a window may have few
    for blocks in (4, 2) if width == 64 and {*bits} <= {2, 4} and not windowed else (2,):
        steps, deep = cdiv(capacity, cut.warps * blocks * BLOCK), depth(*bits, width, blocks)
        if page % (blocks * BLOCK) == 0 and deep and steps >= LONG:
            return Plan(splits_for(programs, slots, steps), blocks, deep, cut, deep)
    deep = max(1, depth(*bits, width))
    return Plan(splits_for(programs, slots, cdiv(capacity, cut.warps * BLOCK)), 1, deep, cut, deep)


def _alone_for(programs: int, multiprocessors: int, capacity: int, page: int, bits: tuple[int, int], width: int) -> Plan | None:
    """Plan programs that have a multiprocessor each, where that is faster: for whole rows, or parts of some keys."""
    share = programs / multiprocessors
    if width == 256 and capacity <= WIDE_KEYS and ENOUGH_WIDE <= share <= 1:
        deep = depth(*bits, width)
        return Plan(1, 1, deep, CUTS[width], deep)
    if width != 128 or share > 1:
        return None
    if share >= ENOUGH and capacity <= MOST_KEYS:
        return Plan(1, 1, min(AHEAD, depth(*bits, width, 1, ALONE)), ALONE, 1)
    parts = multiprocessors // programs
    keys, blocks = cdiv(capacity, parts), 2 if page % (2 * BLOCK) == 0 and {*bits} <= {2, 4} else 1
    if parts > 1 and (keys in FEW_KEYS if blocks == 2 else max(bits) == 8 and keys in FEWER_KEYS):
        return Plan(parts, blocks, min(AHEAD, depth(*bits, width, blocks, ALONE)), ALONE, 1)
    return None


def _plan(programs: int, pages: CodePages, windowed: bool) -> Plan:
    bits, width = (pages.key_bits, pages.value_bits), pages.width
    if is_invariant():
        deep = max(1, depth(*bits, width))
        return Plan(min(fixed_splits_for(1, pages.capacity), MOST_FIXED), 1, deep, CUTS[width], deep)
    processors = multiprocessors(pages.lengths.device)
    return plan_for(programs, processors, pages.capacity, pages.pool[1], *bits, width, windowed)


def attend_few(
    q: Tensor,
    pages: CodePages,
    starts: Tensor,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
    softcap: float | None,
) -> Tensor:
    (tokens, heads, width), sequences = q.shape, len(pages.lengths)
    group, bits, device = heads // pages.heads, (pages.key_bits, pages.value_bits), q.device
    tiles = pages.heads * cdiv(group, COLUMNS)
    plan = _plan(tokens * tiles, pages, window is not None)
    cut = plan.cut
    # programs of a head that run at once, where they share out texts that may differ in length
    room = max(1, cut.resident * multiprocessors(device) // tiles) if shares_out(plan, sequences, pages.capacity) else None
    fixed, window_keys, kept, plain = keys_each(), EVERYTHING if window is None else window, kept_of(pages), plain_of(pages)
    several = _several(plan, tiles * tokens, pages, plain is not None, device) if fixed else None
    out, one = torch.empty_like(q), several == 1 if fixed else plan.splits == 1 and width > 64 and room is None
    beside = not one and room is None and _beside(plan, tiles * tokens, device)
    apart = plain is not None and (bool(fixed) or beside)
    splits = plan.splits + apart
    grid = (several or splits, tiles, tokens) if room is None else (max(room, room // 2 + tokens), tiles, 1)
    rows, together = (tokens * heads, splits) if room is None else (grid[0] * heads, 1)
    parts, index = None if one else parts_like(rows, together, width, device), index_of(pages, starts)
    signs, _ = rotation_for(width, pages.seed, False, device)
    # of the transform and of the levels, which come larger by sqrt(D); then to base 2
    factor = scale / width * LOG2E.value
    launch(attend_pairs, grid)(
        *(
            q,
            signs,
            keys_of(pages),
            values_of(pages),
            level_words(*bits, width, device, pages.key_book, pages.value_book),
            index,
            parts,
        ),
        *((sinks, out) if one else (None, None)),
        Scores(factor * 2 / softcap if softcap else factor, softcap * LOG2E.value if softcap else 1.0, window_keys),
        *(tokens, room or splits, centres_of(pages.calibration), plain),
        SHAPE=shape_of(pages),
        KEPT=kept,
        WORK=Work(
            cut.warps,
            plan.depth,
            plan.blocks,
            plan.soon,
            one,
            room is not None,
            fixed,
            apart and several is None,
            several is not None,
            bool(fixed) and width <= WIDEST_BESIDE and cdiv(group, cdiv(group, COLUMNS)) <= COLUMNS // 2,
        ),
        G=group,
        WINDOW=window is not None,
        SOFTCAP=softcap is not None,
        num_warps=cut.warps,
        maxnreg=ROOMY if apart and not fixed and splits * tiles * tokens <= multiprocessors(device) else cut.registers,
        launch_pdl=True,
    )
    if parts is not None:
        _finish(parts, plan, splits, room, index, sinks, signs, window_keys, out)
    return out


def _several(plan: Plan, programs: int, pages: CodePages, plain: bool, device: torch.device) -> int | None:
    """How many programs have the shares of a row; None where each has one, as they all run at once, or must."""
    slots = plan.cut.resident * multiprocessors(device)
    if programs * (plan.splits + plain) <= slots or pages.key_bits != pages.value_bits or pages.width > WIDEST_BESIDE:
        return None
    return max(1, slots // programs)


def _beside(plan: Plan, programs: int, device: torch.device) -> bool:
    """Whether one part more of every row runs beside the others."""
    return programs * (plan.splits + 1) <= plan.cut.resident * multiprocessors(device)


def _finish(
    parts: Parts,
    plan: Plan,
    splits: int,
    room: int | None,
    index: Index,
    sinks: Tensor | None,
    signs: Tensor,
    window: int,
    out: Tensor,
) -> None:
    tokens, heads, width = out.shape
    if width == 256 and room is None:
        padded = merged_at_once(splits)
        launch(finish_rotated, (tokens * heads, width // ROTATED_COLUMNS))(
            *(parts, sinks, out, heads, splits),
            D=width,
            P=padded,
            C=min(padded, 32),
            N=ROTATED_COLUMNS,
            num_warps=1,
            launch_pdl=True,
        )
        return
    if is_invariant():
        launch(finish_in_order, (tokens * heads,))(
            *(parts, sinks, signs, out, heads, splits),
            D=width,
            P=merged_at_once(splits),
            C=AT_ONCE,
            num_warps=1,
            launch_pdl=True,
        )
        return
    sizes = finish_sizes(room or splits, width, room is not None)
    launch(finish_pairs, (tokens * heads,))(
        *(parts, sinks, signs, out, None if room is None else index, heads, room or splits, window),
        **sizes,
        STEP=plan.cut.warps * plan.blocks * BLOCK,
        S=power_of_two(index.sequences),
        SHARED=room is not None,
        num_warps=sizes["NW"],
        launch_pdl=True,
    )


def shares_out(plan: Plan, sequences: int, capacity: int) -> bool:
    """Whether programs share out the texts of a batch by their lengths: where these may differ much."""
    return not is_invariant() and 1 < sequences <= MOST_SHARED and plan.cut is not ALONE and capacity > MOST_KEYS


def finish_sizes(splits: int, width: int, shared: bool = False) -> dict[str, int]:
    """How the parts of a row are merged: few warps end sooner, as long as their registers hold what they read.

    shared  `splits` are the most that one row may have: most have fewer
    """
    padded, lane = merged_at_once(splits), 2048 // width
    if shared:
        return {"D": width, "P": max(lane, padded), "C": lane, "NW": 2}
    warps = 1 if padded <= lane else 2 if padded <= 64 else 4 if padded <= 128 else 8
    return {"D": width, "P": padded, "C": min(padded, lane * warps), "NW": warps}
