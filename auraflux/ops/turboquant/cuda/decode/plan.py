"""Split-KV plan of decode attention over codes in pairs: splits of a row, blocks per step, stages, shape of a program."""

from functools import cache
from typing import NamedTuple

from auraflux.ops.gpu.sizes import cdiv
from auraflux.ops.turboquant.codebook import BITS
from auraflux.ops.turboquant.cuda.decode.code_loop import ring_begin

BLOCK = 16  # tokens per warp and step, times `blocks`
MOST_SPLITS = 256
LONG = 16  # steps from which a warp takes several blocks per step; below, programs would run out of work
MULTIPROCESSOR_NBYTES = 228 << 10  # of shared memory, on the GPU where these plans were measured
RESERVED_NBYTES = 1 << 10  # of shared memory per program
MOST_STAGES = 4
SMALL_PROGRAMS = ((8, 168), (4, 168))  # warps and registers where one program per multiprocessor fits
COMPACT_BITS = {4, 8}  # that a compact table serves
# pipeline stages of an exclusive program, one of them prefetched before gdc_wait: more would delay the first codes
FEW_STAGES = 2
MOST_KEYS = 8192  # of an unsplit row: a batch may have one long sequence among short ones


class ProgramShape(NamedTuple):
    """Warps per program, registers per thread, and resident programs per multiprocessor."""

    warps: int
    registers: int
    resident: int


PROGRAM_SHAPES = {64: ProgramShape(8, 128, 2), 128: ProgramShape(8, 128, 2), 256: ProgramShape(8, 255, 1)}
EXCLUSIVE = ProgramShape(8, 168, 1)  # one program per multiprocessor, where programs are no more than those; width 128


class Unsplit(NamedTuple):
    """Condition under which unsplit rows are faster, with one program per multiprocessor, and how they run.

    width, most_keys  of a head, of a row
    busy              least share of multiprocessors with work
    program           warps, registers, residency
    stages, prefetch  pipeline stages at most, and how many of them are prefetched before gdc_wait
    """

    width: int
    most_keys: int
    busy: float
    program: ProgramShape
    stages: int
    prefetch: int


class Split(NamedTuple):
    """Condition under which splits of width 128 are faster with one program per multiprocessor.

    bits    of a key and of a value: any of these pairs
    keys    of a split
    blocks  of 16 tokens per warp and step; several must divide a page
    """

    bits: tuple[tuple[int, int], ...]
    keys: range
    blocks: int


UNSPLIT = (
    # 32 x 1024 tokens, 4 key heads, k8v4, H200: 11.0 µs; two programs per multiprocessor 16.9, 4 stages 13.0
    Unsplit(128, MOST_KEYS, 0.7, EXCLUSIVE, FEW_STAGES, 1),
    Unsplit(256, 4096, 0.45, PROGRAM_SHAPES[256], MOST_STAGES, MOST_STAGES),
)
SPLIT = (
    # 32768 tokens, H200: k4v4 14.0 µs, k4v2 13.1; two programs per multiprocessor 14.3 and 14.0, 4 stages 15.2 and 14.4
    Split(((2, 2), (2, 4), (4, 2), (4, 4)), range(1024, 2305), 2),
    # 8 x 1024 tokens, k8v4: 8.3 µs; two programs per multiprocessor 11.0. With 2048 keys: 18.6 and 18.1
    Split(tuple((8, bits) for bits in BITS) + tuple((bits, 8) for bits in BITS), range(512, 1024), 1),
)


def depth(
    key_bits: int,
    value_bits: int,
    width: int,
    blocks: int = 1,
    program: ProgramShape | None = None,
    nbytes: int = MULTIPROCESSOR_NBYTES,
    compact: bool = False,
) -> int:
    """Return the pipeline stages that fit shared memory next to the table, at most MOST_STAGES.

    nbytes   of shared memory of a multiprocessor
    compact  the table has half the bytes
    """
    program = program or PROGRAM_SHAPES[width]
    balanced = (nbytes // program.resident - RESERVED_NBYTES) // 4096 * 4096 - ring_begin(width, compact)
    return min(MOST_STAGES, balanced // (program.warps * blocks * BLOCK * (width * (key_bits + value_bits) // 8 + 8)))


@cache
def splits_for(programs: int, slots: int, most: int) -> int:
    """Return the number of splits that fills the GPU once; among few splits, the one with the least idle time."""
    wanted = slots // programs
    if wanted < 4:
        candidates = [(cdiv(programs * n, slots) * slots / (programs * n), n) for n in range(max(1, wanted), 9)]
        # each further split has a fixed cost
        wanted = min(candidates, key=lambda busy: busy[0] + busy[1] / 32)[1]
    wanted = max(1, min(wanted, MOST_SPLITS, most))
    # the fewest splits with the same number of steps
    return cdiv(most, cdiv(most, wanted))


class Plan(NamedTuple):
    """Split-KV plan.

    splits    splits of a row
    blocks    blocks of 16 tokens per warp and step
    depth     pipeline stages
    program   warps, registers, residency
    prefetch  stages copied before the previous kernel has ended
    compact   the level table has half the bytes
    """

    splits: int
    blocks: int
    depth: int
    program: ProgramShape
    prefetch: int
    compact: bool = False


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
    nbytes: int = MULTIPROCESSOR_NBYTES,
) -> Plan:
    """Plan a row; `nbytes` of shared memory has a multiprocessor."""
    bits = key_bits, value_bits
    if nbytes < MULTIPROCESSOR_NBYTES:
        found = _small_plan(programs, multiprocessors, capacity, page, bits, width, nbytes)
        assert found is not None
        return found
    program = PROGRAM_SHAPES[width]
    exclusive = _exclusive_plan(programs, multiprocessors, capacity, page, bits, width)
    if exclusive:
        return exclusive
    slots = program.resident * multiprocessors
    if width == 256 and bits == (4, 4) and cdiv(capacity, program.warps * 2 * BLOCK) >= LONG:
        # a deeper pipeline delays the merge kernels
        return Plan(splits_for(programs, slots, cdiv(capacity, program.warps * BLOCK)), 1, FEW_STAGES, program, 1)
    # four blocks of 3, 6 or 8 bits would spill registers, and a sliding window may have few
    for blocks in (4, 2) if width == 64 and {*bits} <= {2, 4} and not windowed else (2,):
        steps, stages = cdiv(capacity, program.warps * blocks * BLOCK), depth(*bits, width, blocks)
        if page % (blocks * BLOCK) == 0 and stages and steps >= LONG:
            return Plan(splits_for(programs, slots, steps), blocks, stages, program, stages)
    stages = max(1, depth(*bits, width))
    return Plan(splits_for(programs, slots, cdiv(capacity, program.warps * BLOCK)), 1, stages, program, stages)


def _small_plan(
    programs: int, multiprocessors: int, capacity: int, page: int, bits: tuple[int, int], width: int, nbytes: int
) -> Plan | None:
    """Plan programs on a GPU with little shared memory: one per multiprocessor, with as many stages as fit."""
    if (found := small_program(bits, width, nbytes)) is None:
        return None
    program, stages, compact = found
    blocks = 2 if page % (2 * BLOCK) == 0 and stages >= 2 * FEW_STAGES else 1
    steps, stages = cdiv(capacity, program.warps * blocks * BLOCK), stages // blocks
    return Plan(splits_for(programs, multiprocessors, steps), blocks, stages, program, stages, compact)


def small_program(bits: tuple[int, int], width: int, nbytes: int, exact: bool = False) -> tuple[ProgramShape, int, bool] | None:
    """Return the program with the most warps for a multiprocessor with little shared memory, its stages, and compactness.

    None where no stage fits. `exact` keeps the table's spare columns, which batch invariance needs.
    """
    compact = not exact and set(bits) <= COMPACT_BITS
    for warps, registers in SMALL_PROGRAMS:
        program = ProgramShape(warps, 255 if width == 256 else registers, 1)
        if stages := depth(*bits, width, 1, program, nbytes, compact):
            return program, stages, compact
    return None


def _exclusive_plan(
    programs: int, multiprocessors: int, capacity: int, page: int, bits: tuple[int, int], width: int
) -> Plan | None:
    """Plan one program per multiprocessor where that is faster: for unsplit rows, or splits of a suitable size."""
    for row in UNSPLIT:
        if width == row.width and capacity <= row.most_keys and row.busy <= programs / multiprocessors <= 1:
            stages = min(row.stages, depth(*bits, width, 1, row.program))
            return Plan(1, 1, stages, row.program, min(row.prefetch, stages))
    splits = multiprocessors // programs
    if width != 128 or splits < 2:
        return None
    for split in SPLIT:
        fits = split.blocks == 1 or page % (split.blocks * BLOCK) == 0
        if fits and bits in split.bits and cdiv(capacity, splits) in split.keys:
            stages = min(FEW_STAGES, depth(*bits, width, split.blocks, EXCLUSIVE))
            return Plan(splits, split.blocks, stages, EXCLUSIVE, 1)
    return None
