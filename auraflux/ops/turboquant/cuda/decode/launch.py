"""Launch of decode attention over codes in pairs: grid and merge (the split-KV plan is in `plan.py`).

Every new token is a separate program: query heads that share a key head fill the columns of a product.
"""

from functools import lru_cache

import torch
from torch import Tensor

from auraflux.ops._dispatch import is_invariant
from auraflux.ops.gpu.blocks.flash import NO_WINDOW
from auraflux.ops.gpu.blocks.pages import Index, index_of
from auraflux.ops.gpu.blocks.softmax import LOG2E, Partials, empty_partials
from auraflux.ops.gpu.device import multiprocessor_nbytes, multiprocessors
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv, power_of_two
from auraflux.ops.hopper.split_kv import INVARIANT_SPLITS, invariant_split_keys, merge_capacity
from auraflux.ops.hopper.split_kv import splits_for as fixed_splits_for
from auraflux.ops.turboquant.codebook import Codebook, codebook
from auraflux.ops.turboquant.cuda.arguments import full_precision_pages, full_precision_shape, keys_of, shape_of, values_of
from auraflux.ops.turboquant.cuda.decode.attend import attend_pairs
from auraflux.ops.turboquant.cuda.decode.config import Codes, Config, MergeSizes, Output, Scores, Work
from auraflux.ops.turboquant.cuda.decode.full_precision import key_means
from auraflux.ops.turboquant.cuda.decode.invariant_splits import finish_in_order
from auraflux.ops.turboquant.cuda.decode.merge import finish_pairs, finish_rotated
from auraflux.ops.turboquant.cuda.decode.plan import (
    BLOCK,
    EXCLUSIVE,
    MOST_KEYS,
    MULTIPROCESSOR_NBYTES,
    PROGRAM_SHAPES,
    Plan,
    depth,
    plan_for,
    small_program,
)
from auraflux.ops.turboquant.cuda.encode.hadamard import MOST_BOOKS, rotation_for
from auraflux.ops.turboquant.cuda.encode.new_token import NewToken
from auraflux.ops.turboquant.pages import CodePages

MOST_TOKENS = 8  # per sequence on average; each token reads the codes again
COLUMNS = 8  # query heads per program
MOST_FIXED = INVARIANT_SPLITS - 1  # splits of codes inside `invariant`; full-precision tokens may have one more
MOST_FULL_PRECISION = 128  # full-precision tokens: 16 per warp
MOST_BALANCED = 256  # sequences that a warp balances


MORE_REGISTERS = 168  # registers per thread where no multiprocessor has two programs and full-precision tokens have a split
WIDEST_SPARE = 128  # head width whose sums fit next to the table, where keys and values share one side of it
SPLITS_AT_ONCE = 16  # splits loaded at once by `finish_in_order`: most rows have no more
NEW_WIDTHS, NEW_BITS = (64, 128), {2, 4, 8}  # of heads whose new token is encoded by the kernel that attends
ROTATED_COLUMNS = 64  # columns per program of `finish_rotated`: heads are few and their splits many


@lru_cache(MOST_BOOKS)
def level_words(
    key_bits: int,
    value_bits: int,
    width: int,
    device: torch.device,
    key_book: Codebook | None = None,
    value_book: Codebook | None = None,
) -> Tensor:
    """Return two float16 levels of N(0, 1) per byte, as a word for keys and one for values: int32 [256, 2].

    A byte is two codes of 2, 3 or 4 bits, the first in the low bits, or one code of 6 or 8, whose level is repeated.
    """
    sides = (key_bits, key_book), (value_bits, value_book)
    return torch.stack([_pair_words(bits, width, book) for bits, book in sides], 1).to(device)


def _pair_words(bits: int, width: int, explicit: Codebook | None) -> Tensor:
    byte, book, mask = torch.arange(256), (codebook(bits, width, explicit=explicit) * width**0.5).half(), (1 << bits) - 1
    pair = byte & mask, byte >> (bits if bits <= 4 else 0) & mask
    return torch.stack([book[code] for code in pair], 1).view(torch.int32).squeeze(1)


def _plan(programs: int, pages: CodePages, windowed: bool) -> Plan:
    bits, width, device = (pages.key_bits, pages.value_bits), pages.width, pages.lengths.device
    nbytes = multiprocessor_nbytes(device)
    if is_invariant():
        program, stages = PROGRAM_SHAPES[width], max(1, depth(*bits, width))
        if nbytes < MULTIPROCESSOR_NBYTES:
            found = small_program(bits, width, nbytes, exact=True)
            assert found is not None
            program, stages, _ = found
        return Plan(min(fixed_splits_for(1, pages.capacity), MOST_FIXED), 1, stages, program, stages)
    return plan_for(programs, multiprocessors(device), pages.capacity, pages.pool[1], *bits, width, windowed, nbytes)


def fits(pages: CodePages) -> bool:
    """Return whether the level table and a stage of codes fit into the GPU's shared memory."""
    nbytes = multiprocessor_nbytes(pages.lengths.device)
    return (
        nbytes >= MULTIPROCESSOR_NBYTES
        or small_program((pages.key_bits, pages.value_bits), pages.width, nbytes, is_invariant()) is not None
    )


def attend_decode(
    q: Tensor,
    pages: CodePages,
    starts: Tensor,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
    softcap: float | None,
    new: NewToken | None = None,
    interleaved: bool = False,
) -> Tensor:
    """Attend from new tokens to their sequences; `new` is the only one and not in the cache yet, see `new_token.py`."""
    (tokens, heads, width), sequences = q.shape, len(pages.lengths)
    group, bits, device = heads // pages.heads, (pages.key_bits, pages.value_bits), q.device
    tiles = pages.heads * cdiv(group, COLUMNS)
    plan = _plan(tokens * tiles, pages, window is not None)
    program = plan.program
    # resident programs of a head, where sequences of different lengths are balanced over them
    resident = max(1, program.resident * multiprocessors(device) // tiles)
    balanced = resident if uses_balanced_splits(plan, sequences, pages.capacity) else None
    split_keys, window_keys, full = invariant_split_keys(), NO_WINDOW if window is None else window, full_precision_pages(pages)
    row_programs = _programs_of_row(plan, tiles * tokens, pages, full is not None, device) if split_keys else None
    out, one = q.new_empty(q.shape), row_programs == 1 if split_keys else plan.splits == 1 and width > 64 and balanced is None
    extra_split = not one and balanced is None and _fits_another_split(plan, tiles * tokens, device)
    full_split = full is not None and (bool(split_keys) or extra_split)
    splits = plan.splits + full_split + (new is not None)
    # the new token's split has two programs
    programs = row_programs or splits + (new is not None)
    grid = (programs, tiles, tokens) if balanced is None else (max(balanced, balanced // 2 + tokens), tiles, 1)
    rows, row_parts = (tokens * heads, splits) if balanced is None else (grid[0] * heads, 1)
    partials, index = None if one else empty_partials(rows, row_parts, width, device), index_of(pages, starts)
    signs, _ = rotation_for(width, pages.seed, False, device)
    work = Work(
        *(program.warps, plan.depth, plan.blocks, plan.prefetch),
        single_split=one,
        balanced=balanced is not None,
        split_keys=split_keys,
        full_split=full_split and row_programs is None,
        multi_split=row_programs is not None,
        even_columns=bool(split_keys) and width <= WIDEST_SPARE and cdiv(group, cdiv(group, COLUMNS)) <= COLUMNS // 2,
        compact=plan.compact,
        new_split=new is not None,
        interleaved=interleaved,
    )
    roomy = full_split and not split_keys and splits * tiles * tokens <= multiprocessors(device)
    # factors of the transform and of the levels, which are scaled by sqrt(D); then to base 2
    factor = scale / width * LOG2E.value
    launch(attend_pairs, grid)(
        *(q, signs, Codes(keys_of(pages), values_of(pages), new)),
        *(level_words(*bits, width, device, pages.key_book, pages.value_book), index),
        Output(partials, *((sinks, out) if one else (None, None))),
        Scores(factor * 2 / softcap if softcap else factor, softcap * LOG2E.value if softcap else 1.0, window_keys),
        *(tokens, balanced or splits, key_means(pages.calibration), full),
        CONFIG=Config(shape_of(pages), full_precision_shape(pages), work, group, window is not None, softcap is not None),
        num_warps=program.warps,
        maxnreg=max(MORE_REGISTERS, program.registers) if roomy else program.registers,
        launch_pdl=True,
    )
    if partials is not None:
        _finish(partials, plan, splits, balanced, index, sinks, signs, window_keys, out)
    return out


def refuses_new(q: Tensor, pages: CodePages, window: int | None) -> str | None:
    """Return why the new token of a sequence cannot be encoded by the kernel that attends; None if it can."""
    (tokens, heads, width), stored, bits = q.shape, pages.full_precision, {pages.key_bits, pages.value_bits}
    if tokens != 1 or len(pages.lengths) != 1:
        return f"{tokens} new tokens of {len(pages.lengths)} sequences; the route serves one"
    if is_invariant():
        return "inside `invariant` splits have a fixed number of keys"
    if width not in NEW_WIDTHS or not bits <= NEW_BITS:
        served = f"the route serves {NEW_WIDTHS} and {NEW_BITS}"
        return f"heads of {width} channels, {pages.key_bits} and {pages.value_bits} bits; {served}"
    if stored is not None and stored.sink_tokens and not stored.recent_window:
        return "there are sink tokens without a recent window"
    plan = _plan(pages.heads * cdiv(heads // pages.heads, COLUMNS), pages, window is not None)
    return "a row has one split" if plan.splits == 1 else None


def _programs_of_row(plan: Plan, programs: int, pages: CodePages, full: bool, device: torch.device) -> int | None:
    """Return the programs over which the splits of a row are distributed; None for one program per split."""
    slots = plan.program.resident * multiprocessors(device)
    if programs * (plan.splits + full) <= slots or pages.key_bits != pages.value_bits or pages.width > WIDEST_SPARE:
        return None
    return max(1, slots // programs)


def _fits_another_split(plan: Plan, programs: int, device: torch.device) -> bool:
    """Return whether one more split of every row is resident at the same time."""
    return programs * (plan.splits + 1) <= plan.program.resident * multiprocessors(device)


def _finish(
    partials: Partials,
    plan: Plan,
    splits: int,
    balanced: int | None,
    index: Index,
    sinks: Tensor | None,
    signs: Tensor,
    window: int,
    out: Tensor,
) -> None:
    tokens, heads, width = out.shape
    if width == 256 and balanced is None:
        padded = merge_capacity(splits)
        launch(finish_rotated, (tokens * heads, width // ROTATED_COLUMNS))(
            *(partials, sinks, out, heads, splits),
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
            *(partials, sinks, signs, out, heads, splits),
            D=width,
            P=merge_capacity(splits),
            C=SPLITS_AT_ONCE,
            num_warps=1,
            launch_pdl=True,
        )
        return
    sizes = merge_sizes(balanced or splits, width, balanced is not None)._replace(
        step=plan.program.warps * plan.blocks * BLOCK, sequences=power_of_two(index.sequences)
    )
    launch(finish_pairs, (tokens * heads,))(
        *(partials, sinks, signs, out, None if balanced is None else index, heads, balanced or splits, window),
        SIZES=sizes,
        num_warps=sizes.warps,
        launch_pdl=True,
    )


def uses_balanced_splits(plan: Plan, sequences: int, capacity: int) -> bool:
    """Return whether programs are balanced over the sequences of a batch: where lengths may differ much."""
    return not is_invariant() and 1 < sequences <= MOST_BALANCED and plan.program is not EXCLUSIVE and capacity > MOST_KEYS


def merge_sizes(splits: int, width: int, balanced: bool = False) -> MergeSizes:
    """Return the sizes of `finish_pairs`: few warps finish sooner, as long as registers hold the partial results.

    balanced  `splits` is the maximum of a row: most rows have fewer
    """
    padded, lane = merge_capacity(splits), 2048 // width
    if balanced:
        return MergeSizes(width, max(lane, padded), lane, 2, balanced=True)
    warps = 1 if padded <= lane else 2 if padded <= 64 else 4 if padded <= 128 else 8
    return MergeSizes(width, padded, min(padded, lane * warps), warps)
