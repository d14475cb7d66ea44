"""Compiled drivers around the inner loops: a list of products, distributed over the threads.

A product is one weight times some tokens. All products of a list have weights of one width and format and take their tokens
from one stack, whose activations are converted first. `linear` is a list of one, gate and up are a list of two, the experts
of a mixture a longer one. The list is divided among the threads by cost: each takes neighbouring rows of few products, so it
reads long runs of codes and interleaves the tokens of few products.
"""

from array import array
from collections.abc import Sequence
from functools import cache

import numba
import torch
from torch import Tensor

from auraflux.ops.linear.cpu.activations import prepare_token
from auraflux.ops.linear.cpu.blocks import (
    WIDEST,
    Span,
    gather_panel,
    multiply_blocks,
    multiply_blocks_by_panel,
    transpose,
    transpose_scales,
)
from auraflux.ops.linear.cpu.forms import BLOCK, Form
from auraflux.ops.linear.cpu.matrix_tiles import (
    FULL,
    INPUTS,
    MATRIX_FROM,
    configure_tiles,
    gather_matrix_panel,
    matrix_panel_tiles,
    matrix_tile_nbytes,
    multiply_blocks_by_matrix,
    place_in_tile,
    release_tiles,
)
from auraflux.ops.linear.cpu.panels import has_panels, panel_tiles, tile_nbytes
from auraflux.ops.linear.cpu.unpack import place_codes
from auraflux.ops.simd.atomics import compare_exchange, fetch_add, load
from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.jit import (
    LINE,
    Kernel,
    address_of,
    arguments,
    empty,
    int32s,
    int64s,
    jit,
    several_jobs,
    share,
    threads,
    workspace,
)
from auraflux.quant import QTensor, grids, levels, super_blocks
from auraflux.quant.packing import LANE_FIELDS

# jobs of a thread, and those whose threads interleave tokens for themselves: some processors are slower than others for a while
JOBS_PER_THREAD, GATHERING_JOBS_PER_THREAD = 4, 2
MOST_SLOTS = 62  # bits of a positive word
SLOTS_TAKEN = 8 * 12  # offset of that word in the arguments of `multiply`
TOGETHER = max(1, 16 // BLOCK)  # blocks unpacked before the tokens pass: amortizes reading the activations
# below these, waking the threads costs more than the work
PARALLEL_FROM = 1 << 16  # weights times tokens
SEVERAL_FROM = 1 << 24  # the same; 48 more jobs cost 5 us on 16 threads
PREPARE_PARALLEL_FROM = 1 << 12 if ISA.lanes == 4 else 1 << 13  # activations; fewer are converted by every thread redundantly

KINDS: dict[torch.dtype | str, str] = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.uint8: "e8m0",
    "fp8": "e4m3",
    **{kind: kind for kind in levels.KINDS},
}
# of super-block formats after widening
PLAIN = {"affine": "f32", **{kind: kind for kind in levels.KINDS}}

# a product is eight integers: addresses of codes, scales, biases and token indices, number of tokens, address of results, rows
# of the weight, stride of a token's results in bytes
FIELDS = 8
CODES, SCALES, BIASES, INDEX, COUNT, OUT, ROWS, STRIDE = range(FIELDS)
# cost of reading and unpacking a block of rows, in tokens that are multiplied with it: with AMX, without
UNPACKING_BY_TILES, UNPACKING = 32, 8


class Driver:
    """The compiled steps for one weight format.

    by_tiles  several tokens are multiplied by AMX
    """

    def __init__(self, form: Form, by_tiles: bool = False):
        self.form, self.by_tiles = form, by_tiles
        self.prepare_tiles = build_prepare_tiles(form)
        self.prepare, self.multiply = build_prepare(form), build_multiply(form, by_tiles)
        self.act_nbytes = form.act_nbytes
        self.tile_nbytes, self.panel_tiles = (
            (matrix_tile_nbytes, matrix_panel_tiles) if by_tiles else (tile_nbytes, panel_tiles)
        )
        self._sizes: dict[int, tuple[int, int, int]] = {}

    def __call__(self, x: int, tokens: int, weight: QTensor, products: int, count: int, in_order: bool = False) -> None:
        """Work through a list of products, all with weights of the format and width of `weight`.

        x         address of float32 [tokens, K]
        products  address of int64 [count, FIELDS]
        in_order  each product takes all tokens, in their order
        """
        rows, width = weight.shape[-2:]
        work = tokens * count * rows * width
        workers = threads() if work >= PARALLEL_FROM else 1
        token_nbytes, scratch_nbytes, tile_nbytes = self.sizes(width)
        tiles = self.panel_tiles(self.form, width, tokens)
        few = tokens * width < PREPARE_PARALLEL_FROM
        share_tiles = in_order and self.by_tiles and tiles > 0 and not few
        each = GATHERING_JOBS_PER_THREAD if tiles and not share_tiles else JOBS_PER_THREAD
        jobs, slots = _jobs_of(workers, each if work >= SEVERAL_FROM else 1)
        sizes = tokens, width, products, count, weight.lanes == 1
        if share_tiles:
            shared, line = -(-tokens // FULL) * tile_nbytes, -(-token_nbytes // LINE) * LINE
            # a thread's token, then its blocks of rows
            ready = workspace(shared + max(workers * line, slots * scratch_nbytes))
            self.prepare_tiles(min(workers, tokens), x, tokens, width, ready, ready + shared, tile_nbytes, line)
            self.multiply(jobs, 0, *sizes, ready + shared, tiles, tile_nbytes, 0, ready, slots, 0)
            return
        panels, acts_nbytes = slots * tiles * tile_nbytes, -(-tokens * token_nbytes // LINE) * LINE
        space = workspace(panels + (slots if few else 1) * acts_nbytes + slots * scratch_nbytes)
        if not few:
            self.prepare(min(workers, tokens), x, tokens, width, space + panels)
        self.multiply(jobs, x if few else 0, *sizes, space, tiles, tile_nbytes, acts_nbytes, 0, slots, 0)

    def sizes(self, width: int) -> tuple[int, int, int]:
        """Return the bytes per token, per thread and per tile of tokens."""
        found = self._sizes.get(width)
        if found is None:
            sizes = self.token_nbytes(width), self.scratch_nbytes(width)
            found = self._sizes[width] = *sizes, self.tile_nbytes(self.form, width)
        return found

    def token_nbytes(self, width: int) -> int:
        """Return the bytes of a token's activations, scales and sums, plus padding: power-of-two strides share cache sets."""
        return width * self.act_nbytes + 8 * (width // self.form.group) + 2 * LINE

    def scratch_nbytes(self, width: int) -> int:
        """Return the bytes of a thread's blocks of rows: unpacked and interleaved."""
        form, (count, inputs) = self.form, self.form.scales_of
        scales = 2 * (width // inputs) * count * form.scale_nbytes
        if form.words:
            scales += 8 * (width // form.group)
        return TOGETHER * (BLOCK * (width * form.unpacked_nbytes + width * form.bits // 8 + scales) + LINE)


def _jobs_of(workers: int, each: int) -> tuple[int, int]:
    """Return the jobs of a launch, and the slots of scratch memory: no more jobs than slots run at a time."""
    if workers == 1 or workers > MOST_SLOTS:
        return workers, workers
    jobs = several_jobs(each)
    return jobs, min(jobs, MOST_SLOTS)


@cache
def driver(activation_bits: int, bits: int, group: int, storage: torch.dtype | str, by_tiles: bool = False) -> Driver:
    """Return the driver for a weight format, see `QTensor.format`; and `Form` for `activation_bits`."""
    if isinstance(storage, str) and storage in grids.FORMATS:
        return Driver(Form(activation_bits, bits, group, storage, grids.FORMATS[storage].halves))
    if isinstance(storage, str) and (found := super_blocks.FORMATS.get(storage)) is not None:
        return Driver(Form(activation_bits, bits, group, PLAIN[found.expanded], found.words), by_tiles)
    return Driver(Form(activation_bits, bits, group, KINDS[storage]), by_tiles)


def padded(rows: int) -> int:
    """Round rows of a result up to a multiple of the block."""
    return -(-rows // BLOCK) * BLOCK


@jit
def _cost_per_block(tokens, unpacking):
    """Return the cost of a block of rows times some tokens."""
    return tokens + unpacking if tokens > 0 else 0


@jit
def _cost_of_list(table, count, unpacking):
    total = 0
    for p in range(0, count * FIELDS, FIELDS):
        total += (table[p + ROWS] + BLOCK - 1) // BLOCK * _cost_per_block(table[p + COUNT], unpacking)
    return total


@jit
def _blocks_of(blocks, each, before, first, last):
    """Return the blocks of a product, `each` of the same cost, that begin in the interval [first, last) of the list's cost.

    before  cost of the products before
    """
    start = (max(first - before, 0) + each - 1) // each
    stop = (max(last - before, 0) + each - 1) // each
    return min(start, blocks), min(stop, blocks)


@jit
def _take_slot(taken):
    """Take the first free slot of scratch memory; bits of the word at `taken` are slots in use."""
    while True:
        before, slot = load(taken), 0
        while before >> slot & 1:
            slot += 1
        if compare_exchange(taken, before, before | 1 << slot):
            return slot


@numba.njit(inline="always")
def _acts(space, tokens, width, groups, act_nbytes):
    """Return the address of converted activations, their stride, and the addresses of their scales and sums."""
    stride = width * act_nbytes + LINE
    scales = space + tokens * stride
    return space, stride, scales, scales + 4 * tokens * groups


@numba.njit(inline="always")
def _prepare(form, x, some, width, groups, acts):
    space, stride, scales, sums = acts
    for t in some:
        prepare_token((form, x + 4 * t * width, groups, space + t * stride, scales + 4 * t * groups, sums + 4 * t * groups))


def build_prepare(spec: Form) -> Kernel:
    """Compile the conversion of activations."""
    form, group, act_nbytes = spec.text, spec.group, spec.act_nbytes

    @Kernel
    def prepare(args, job, jobs):
        x, tokens, width, space = arguments(args, 4)
        groups = width // group
        _prepare(form, x, share(tokens, job, jobs), width, groups, _acts(space, tokens, width, groups, act_nbytes))

    return prepare


def build_prepare_tiles(spec: Form) -> Kernel:
    """Compile the conversion of activations straight to the tiles of AMX, which all threads share."""
    form, group, act_nbytes = spec.text, spec.group, spec.act_nbytes

    @Kernel
    def prepare_tiles(args, job, jobs):
        x, tokens, width, tiles, lines, tile_step, line = arguments(args, 7)
        groups = width // group
        acts = _acts(lines + job * line, 1, width, groups, act_nbytes)
        for t in share(tokens, job, jobs):
            _prepare(form, x + 4 * t * width, range(1), width, groups, acts)
            mine = (acts[0], acts[2], acts[3])
            place_in_tile(form, mine, groups, tiles + t // FULL * tile_step, t % FULL, tokens - t // FULL * FULL)

    return prepare_tiles


def build_multiply(spec: Form, by_tiles: bool) -> Kernel:
    """Compile the driver for one weight format, with AMX or without."""
    form, group, has_biases = spec.text, spec.group, int(spec.has_biases and not spec.words)
    act_nbytes, code_nbytes, scale_nbytes, bits = spec.act_nbytes, spec.unpacked_nbytes, spec.scale_nbytes, spec.bits
    # a constant, so that one branch is compiled; closures over functions would change the kernel's cache key per process
    by_panel, by_matrix = has_panels(spec), int(by_tiles)
    in_places = spec.grid is None and spec.bits in LANE_FIELDS
    piece = INPUTS // group, group * BLOCK * bits // 8
    words, (scale_count, scale_inputs) = spec.words, spec.scales_of
    # few tokens would decode a grid's entries again for each tile
    whole = int(spec.grid is not None)
    unpacking = UNPACKING_BY_TILES if by_tiles else UNPACKING

    @Kernel
    def multiply(args, job, jobs):
        x, tokens, width, products, count, by_rows, space, most, tile_step, acts_nbytes, ready, slots = arguments(args, 12)
        groups, code_words, scales_each = width // group, width * bits // 32, width // scale_inputs * scale_count
        slot = job if slots == jobs else _take_slot(args + SLOTS_TAKEN)
        panel_nbytes = 0 if ready else most * tile_step
        panels, space = space + slot * panel_nbytes, space + slots * panel_nbytes
        acts = _acts(space + (slot * acts_nbytes if x else 0), tokens, width, groups, act_nbytes)
        if x:
            _prepare(form, x, range(tokens), width, groups, acts)
        table = int64s(products, count * FIELDS)
        codes_nbytes, scales_nbytes, unpacked_nbytes = (
            4 * BLOCK * code_words,
            BLOCK * scales_each * scale_nbytes,
            BLOCK * width * code_nbytes,
        )
        wide_nbytes = 4 * BLOCK * groups if words else 0
        scratch_size = (unpacked_nbytes + codes_nbytes + 2 * (scales_nbytes + wide_nbytes) + LINE) // LINE * LINE
        unpacked = space + (slots if x else 1) * acts_nbytes + slot * TOGETHER * scratch_size
        gathered = (0, 0)
        if by_matrix and most:
            configure_tiles((form,))
        mine, before = share(_cost_of_list(table, count, unpacking), job, jobs), 0
        for p in range(0, count * FIELDS, FIELDS):
            rows, each = table[p + ROWS], _cost_per_block(table[p + COUNT], unpacking)
            blocks = (rows + BLOCK - 1) // BLOCK
            before += blocks * each
            if before <= mine.start:
                continue
            if before - blocks * each >= mine.stop:
                break
            start, stop = _blocks_of(blocks, each, before - blocks * each, mine.start, mine.stop)
            if start == stop:
                continue
            index, left, out = table[p + INDEX], table[p + COUNT], table[p + OUT]
            while left > 0:
                # the remainder is a separate tile
                tiles = max(1, min(left // WIDEST, most))
                some_tokens = left
                if by_panel:
                    # a single token has no tile, even if an expert gets it twice
                    some_tokens = min(tiles * WIDEST, left) if most else 1
                if by_matrix:
                    some_tokens = min(most * FULL, left) if ready or left >= MATRIX_FROM else left
                    if ready:
                        panels = ready + (table[p + COUNT] - left) // FULL * tile_step
                    elif left >= MATRIX_FROM and gathered != (index, some_tokens):
                        gather_matrix_panel(form, (panels, tile_step), acts, index, some_tokens, groups)
                        gathered = (index, some_tokens)
                panel = (panels, tile_step, tiles)
                if by_panel and gathered != (index, some_tokens):
                    # consecutive weights often have the same tokens
                    gather_panel(form, whole, panel, acts, index, some_tokens, groups)
                    gathered = (index, some_tokens)
                for block in range(start, stop, TOGETHER):
                    some = min(TOGETHER, stop - block)
                    codes = table[p + CODES] + block * codes_nbytes
                    scales = table[p + SCALES] + block * scales_nbytes
                    biases = table[p + BIASES] + block * scales_nbytes
                    steps = (codes_nbytes, scales_nbytes, scratch_size)
                    if by_rows:
                        codes = unpacked + unpacked_nbytes
                        scales = codes + codes_nbytes
                        biases = scales + scales_nbytes
                        steps = (scratch_size, scratch_size, scratch_size)
                        for i in range(some):
                            first, here = (block + i) * BLOCK, i * scratch_size
                            transpose(
                                int32s(table[p + CODES], rows * code_words),
                                int32s(codes + here, code_words * BLOCK),
                                first,
                                rows,
                                code_words,
                            )
                            if in_places:
                                place_codes((form, codes + here, groups))
                            transpose_scales(table[p + SCALES], scales + here, first, rows, scales_each, scale_nbytes)
                            if has_biases:
                                transpose_scales(table[p + BIASES], biases + here, first, rows, groups, scale_nbytes)
                    wide = (scales, biases, steps[1])
                    if words:
                        first_wide = unpacked + unpacked_nbytes + codes_nbytes + 2 * scales_nbytes
                        wide = (first_wide, first_wide + wide_nbytes, scratch_size)
                    span = Span(codes, scales, biases, unpacked, out + 4 * block * BLOCK, steps, wide, some)
                    step = table[p + STRIDE]
                    if by_matrix:
                        if ready or some_tokens >= MATRIX_FROM:
                            tiled = (panels, tile_step)
                            multiply_blocks_by_matrix(form, words, piece, span, tiled, some_tokens, groups, step)
                        else:
                            multiply_blocks(form, words, span, acts, panel, index, some_tokens, groups, step)
                    elif by_panel:
                        multiply_blocks_by_panel(form, words, whole, span, acts, panel, index, some_tokens, groups, step)
                    else:
                        multiply_blocks(form, words, span, acts, panel, index, some_tokens, groups, step)
                index, left, out = index + 8 * some_tokens, left - some_tokens, out + some_tokens * table[p + STRIDE]
        if by_matrix and most:
            release_tiles(())
        if slots != jobs:
            fetch_add(args + SLOTS_TAKEN, -(1 << slot))

    return multiply


# the longest last; recordings hold addresses of the others
_counting = [array("q", range(64))]


def token_indices(tokens: int) -> int:
    """Return a permanent address of the indices 0, 1, 2 … up to at least `tokens`."""
    if len(_counting[-1]) < tokens:
        _counting.append(array("q", range(2 * tokens)))
    return _counting[-1].buffer_info()[0]


def multiply(steps: Driver, x: Tensor, weights: Sequence[QTensor]) -> list[Tensor]:
    """Multiply one stack of tokens by weights of the driver's format and of one width.

    x       [T, K]  float32
    returns [T, N] for each weight
    """
    tokens = x.shape[0]
    index, products, results, is_padded = token_indices(tokens), array("q"), [], False
    for weight in weights:
        rows = weight.shape[0]
        wide = padded(rows)
        out = empty(tokens, wide)
        products.extend((*weight.addresses, index, tokens, out.data_ptr(), rows, 4 * wide))
        if wide != rows:
            out, is_padded = out[:, :rows], True
        results.append(out)
    steps(x.data_ptr(), tokens, weights[0], address_of(products), len(weights), in_order=True)
    return [out.contiguous() for out in results] if is_padded else results
