"""Chunks of work of a request for a few experts: rows of gate and up first, then rows of down.

Several threads compute one request, each with a plan and scratch memory of its own: a plan groups the request's pairs of token
and expert by expert, so that tokens of one expert read its weights once. Chunks of the first phase write bf16 hidden vectors
that all threads share; a chunk of the second phase may start once all of those are written.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from auraflux.ops.moe.cpu.row_form import RowForm
from auraflux.ops.moe.cpu.row_major import PREFETCH_NBYTES, arrange, rows_times_tokens
from auraflux.ops.simd.jit import Kernel, arguments, floats, halves, int32s, int64s, jit
from auraflux.ops.simd.math import bits_of_float, silu
from auraflux.ops.simd.vectors import copy, kernel, prefetch

# a thread that starts late delays the others by at most one chunk, and claiming one costs a fraction of a microsecond
CHUNK_NBYTES = 1 << 15
MOST_CHUNKS_PER_THREAD = 16
HEAD_NBYTES = 1 << 14  # of a chunk of the second phase, prefetched while other threads finish the first

# words of the setup, which all threads read. Addresses of the request: layer and count, tokens, experts, x, results
HEADER, TOKENS, EXPERTS, X, RESULT = range(5)
TABLE, LAYERS, HIDDEN, INNER, MAX_PAIRS, MAX_TOKENS, THREADS, BETWEEN = range(5, 13)
# offsets in a blob: codes, scales and biases of each projection
GATE, UP, DOWN = 13, 16, 19
# offsets and sizes in a thread's scratch memory
X_AT, X_NBYTES, X_SUMS, BETWEEN_AT, BETWEEN_NBYTES, BETWEEN_SUMS, OUT_AT, PADDED_AT = range(22, 30)
SETUP_WORDS = 30
# words of a layer in the table
BASE, STRIDE, COUNT, LAYER_WORDS = range(4)

# words of a plan, then its arrays
TOTAL, FIRST_PHASE, ERROR, PLAN_BASE, PLAN_STRIDE, PAIRS, GROUPS, PLAN_ARRAYS = range(8)
BAD_LAYER, BAD_COUNT, BAD_TOKEN, BAD_EXPERT = range(1, 5)


def plan_words(max_pairs: int, max_tokens: int) -> int:
    """Return the size of a plan."""
    return PLAN_ARRAYS + 5 * max_pairs + 1 + max_tokens


@jit
def _arrays(scratch, max_pairs, max_tokens):
    """Return a plan's arrays: the expert of each group, its first place, the pair at each place, the token of each pair, and
    flags of arranged tokens and pairs."""
    at = scratch + 8 * PLAN_ARRAYS
    experts, starts = int64s(at, max_pairs), int64s(at + 8 * max_pairs, max_pairs + 1)
    at += 8 * (2 * max_pairs + 1)
    order, tokens = int64s(at, max_pairs), int64s(at + 8 * max_pairs, max_pairs)
    at += 8 * 2 * max_pairs
    return experts, starts, order, tokens, int64s(at, max_pairs), int64s(at + 8 * max_pairs, max_tokens)


@jit
def _chunk_count(blocks, nbytes, threads):
    """Return how many chunks a phase has: the same number for each thread."""
    each = (nbytes + threads * CHUNK_NBYTES // 2) // (threads * CHUNK_NBYTES)
    return min(blocks, threads * min(max(each, 1), MOST_CHUNKS_PER_THREAD))


@jit
def make_plan(args, scratch):
    """Copy and check the request, group its pairs by expert, and divide its rows into chunks: none if it is wrong.

    Everything is checked after it was copied: the plan of a thread that is too late may come from a request half written.
    """
    setup = arguments(args, SETUP_WORDS)
    max_pairs, max_tokens = setup[MAX_PAIRS], setup[MAX_TOKENS]
    plan, header = int64s(scratch, PLAN_ARRAYS), int32s(setup[HEADER], 2)
    experts, starts, order, tokens, pair_ready, token_ready = _arrays(scratch, max_pairs, max_tokens)
    layer, count = np.int64(header[0]), np.int64(header[1])
    plan[TOTAL], plan[FIRST_PHASE], plan[ERROR], plan[PAIRS], plan[GROUPS] = 0, 0, 0, 0, 0
    if count < 0 or count > max_pairs:
        plan[ERROR] = BAD_COUNT
        return
    plan[PAIRS] = count
    if layer < 0 or layer >= setup[LAYERS]:
        plan[ERROR] = BAD_LAYER
        return
    table = int64s(setup[TABLE] + 8 * LAYER_WORDS * layer, LAYER_WORDS)
    plan[PLAN_BASE], plan[PLAN_STRIDE] = table[BASE], table[STRIDE]
    given_tokens, given = int32s(setup[TOKENS], max_pairs), int32s(setup[EXPERTS], max_pairs)
    groups = 0
    for i in range(count):
        tokens[i], order[i], pair_ready[i] = given_tokens[i], given[i], 0
        if tokens[i] < 0 or tokens[i] >= max_tokens:
            plan[ERROR] = BAD_TOKEN
        if order[i] < 0 or order[i] >= table[COUNT]:
            plan[ERROR] = BAD_EXPERT
        group = 0
        while group < groups and experts[group] != order[i]:
            group += 1
        if group == groups:
            experts[group] = order[i]
            groups += 1
    if plan[ERROR]:
        return
    _order_by_expert(count, groups, experts, starts, order, pair_ready)
    for t in range(max_tokens):
        token_ready[t] = 0
    plan[GROUPS] = groups
    # down is half as large as gate and up
    plan[FIRST_PHASE] = _chunk_count(groups * (setup[INNER] // 2), groups * setup[DOWN], setup[THREADS])
    plan[TOTAL] = plan[FIRST_PHASE] + _chunk_count(groups * (setup[HIDDEN] // 4), groups * setup[DOWN] // 2, setup[THREADS])


@jit
def _order_by_expert(count, groups, experts, starts, order, expert_of):
    """Replace the expert of each pair in `order` by the pairs in the order of their experts."""
    for i in range(count):
        expert_of[i] = order[i]
    place = 0
    for group in range(groups):
        starts[group] = place
        for i in range(count):
            if expert_of[i] == experts[group]:
                order[place] = i
                place += 1
    starts[groups] = place
    for i in range(count):
        expert_of[i] = 0


@jit
def fail(args, scratch):
    """Fill the results of a wrong request with NaN."""
    setup = arguments(args, SETUP_WORDS)
    plan = int64s(scratch, PLAN_ARRAYS)
    result = floats(setup[RESULT], plan[PAIRS] * setup[HIDDEN])
    for i in range(len(result)):
        result[i] = np.float32(np.nan)


@kernel(constants=1)
def _fetch(b, nbytes, *addresses):
    prefetch(b, list(addresses), nbytes)


@kernel(constants=0)
def _fetch_some(b, address, nbytes):
    prefetch(b, [address], nbytes)


@jit
def _bf16(value):
    """Round to bf16, to nearest even; return the bits."""
    bits = np.int64(bits_of_float(value)) & 0xFFFFFFFF
    if value != value:
        return np.uint16(0x7FC0)
    return np.uint16((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)


@jit
def _zeros(address, count):
    values = halves(address, count)
    for i in range(count):
        values[i] = 0


class _RowFunctions(NamedTuple):
    """Jitted functions of a format."""

    prepare: Any
    row_addresses: Any
    multiply: Any


@cache
def _row_functions(form: RowForm) -> _RowFunctions:
    text, group, unit, bits, scale_nbytes = form.text, form.group, form.unit, form.bits, form.scale_nbytes

    @jit
    def prepare(source, width, target, sums_offset, padded):
        """Arrange the activations of a token."""
        if width % unit:
            copy((source, 2 * width, padded))
            _zeros(padded + 2 * width, unit - width % unit)
            source = padded
        arrange((text, source, width // group, target, target + sums_offset))

    @jit
    def row_addresses(blob, setup, projection, row, width):
        """Return the addresses of a row's codes, scales and biases."""
        scales = row * (width // group * scale_nbytes)
        codes = blob + setup[projection] + row * (width * bits // 8)
        return codes, blob + setup[projection + 1] + scales, blob + setup[projection + 2] + scales

    @jit
    def multiply(first, second, width, sums_offset, x, x2, out):
        """Multiply four rows by one token, or by two if the second is given."""
        if x2:
            rows_times_tokens((text, 2, width // group, sums_offset, out, first, second, x, x2))
        else:
            rows_times_tokens((text, 1, width // group, sums_offset, out, first, second, x))

    return _RowFunctions(prepare, row_addresses, multiply)


def _up_function(form: RowForm) -> Any:
    prepare, row_addresses, multiply = _row_functions(form)

    @jit
    def up_chunk(setup, scratch, chunk):
        """Compute some rows of silu(gate x) * up x."""
        plan, hidden, inner = int64s(scratch, PLAN_ARRAYS), setup[HIDDEN], setup[INNER]
        experts, starts, order, tokens, _, ready = _arrays(scratch, setup[MAX_PAIRS], setup[MAX_TOKENS])
        blocks, chunks, xs = plan[GROUPS] * (inner // 2), plan[FIRST_PHASE], scratch + setup[X_AT]
        block, end, out_at = chunk * blocks // chunks, (chunk + 1) * blocks // chunks, scratch + setup[OUT_AT]
        out = floats(out_at, 8)
        while block < end:
            number, row = block // (inner // 2), block % (inner // 2) * 2
            blob = plan[PLAN_BASE] + experts[number] * plan[PLAN_STRIDE]
            stop = min(end, (number + 1) * (inner // 2))
            gate, up = (row_addresses(blob, setup, GATE, row, hidden), row_addresses(blob, setup, UP, row, hidden))
            _fetch((PREFETCH_NBYTES, gate[0], up[0]))
            for i in range(starts[number], starts[number + 1]):
                t = tokens[order[i]]
                if not ready[t]:
                    ready[t] = 1
                    prepare(
                        setup[X] + 2 * t * hidden, hidden, xs + t * setup[X_NBYTES], setup[X_SUMS], scratch + setup[PADDED_AT]
                    )
            while block < stop:
                gate, up = (row_addresses(blob, setup, GATE, row, hidden), row_addresses(blob, setup, UP, row, hidden))
                i = starts[number]
                while i < starts[number + 1]:
                    some = min(starts[number + 1] - i, 2)
                    x, x2 = xs + tokens[order[i]] * setup[X_NBYTES], xs + tokens[order[i + some - 1]] * setup[X_NBYTES]
                    multiply(gate, up, hidden, setup[X_SUMS], x, x2 if some == 2 else 0, out_at)
                    for n in range(some):
                        between = halves(setup[BETWEEN] + 2 * (order[i + n] * inner + row), 2)
                        between[0] = _bf16(silu(out[4 * n]) * out[4 * n + 2])
                        between[1] = _bf16(silu(out[4 * n + 1]) * out[4 * n + 3])
                    i += some
                block += 1
                row += 2

    return up_chunk


def _down_function(form: RowForm) -> Any:
    prepare, row_addresses, multiply = _row_functions(form)

    @jit
    def down_chunk(setup, scratch, chunk):
        """Compute some rows of down times the hidden vectors."""
        plan, hidden, inner = int64s(scratch, PLAN_ARRAYS), setup[HIDDEN], setup[INNER]
        experts, starts, order, _, ready, _ = _arrays(scratch, setup[MAX_PAIRS], setup[MAX_TOKENS])
        blocks, chunks, xs = plan[GROUPS] * (hidden // 4), plan[TOTAL] - plan[FIRST_PHASE], scratch + setup[BETWEEN_AT]
        block, end, out_at = chunk * blocks // chunks, (chunk + 1) * blocks // chunks, scratch + setup[OUT_AT]
        while block < end:
            number, row = block // (hidden // 4), block % (hidden // 4) * 4
            blob = plan[PLAN_BASE] + experts[number] * plan[PLAN_STRIDE]
            stop = min(end, (number + 1) * (hidden // 4))
            for i in range(starts[number], starts[number + 1]):
                p = order[i]
                if not ready[p]:
                    ready[p] = 1
                    source, target = setup[BETWEEN] + 2 * p * inner, xs + p * setup[BETWEEN_NBYTES]
                    prepare(source, inner, target, setup[BETWEEN_SUMS], scratch + setup[PADDED_AT])
            while block < stop:
                first = row_addresses(blob, setup, DOWN, row, inner)
                second = row_addresses(blob, setup, DOWN, row + 2, inner)
                i = starts[number]
                while i < starts[number + 1]:
                    some = min(starts[number + 1] - i, 2)
                    x, x2 = xs + order[i] * setup[BETWEEN_NBYTES], xs + order[i + some - 1] * setup[BETWEEN_NBYTES]
                    multiply(first, second, inner, setup[BETWEEN_SUMS], x, x2 if some == 2 else 0, out_at)
                    for n in range(some):
                        copy((out_at + 16 * n, 16, setup[RESULT] + 4 * (order[i + n] * hidden + row)))
                    i += some
                block += 1
                row += 4

    return down_chunk


def _fetch_function(form: RowForm) -> Any:
    row_addresses, bits = _row_functions(form).row_addresses, form.bits

    @jit
    def fetch_down(setup, scratch, chunk):
        """Prefetch the start of a chunk's codes."""
        plan, hidden, inner = int64s(scratch, PLAN_ARRAYS), setup[HIDDEN], setup[INNER]
        experts = int64s(scratch + 8 * PLAN_ARRAYS, setup[MAX_PAIRS])
        blocks, chunks = plan[GROUPS] * (hidden // 4), plan[TOTAL] - plan[FIRST_PHASE]
        block, end = chunk * blocks // chunks, (chunk + 1) * blocks // chunks
        blob = plan[PLAN_BASE] + experts[block // (hidden // 4)] * plan[PLAN_STRIDE]
        codes, _, _ = row_addresses(blob, setup, DOWN, block % (hidden // 4) * 4, inner)
        _fetch_some((codes, min((end - block) * (4 * inner * bits // 8), HEAD_NBYTES)))

    return fetch_down


@cache
def chunk_kernel(form: RowForm) -> Kernel:
    """Return the kernel that computes a chunk, `compute(setup, chunk, scratch)`.

    Chunk -1 - n stands for a prefetch of the start of chunk n, which is in the second phase.
    """
    up_chunk, down_chunk, fetch_down = _up_function(form), _down_function(form), _fetch_function(form)

    @Kernel
    def compute(args, chunk, scratch):
        setup, first = arguments(args, SETUP_WORDS), int64s(scratch, PLAN_ARRAYS)[FIRST_PHASE]
        if chunk < 0:
            fetch_down(setup, scratch, -1 - chunk - first)
        elif chunk < first:
            up_chunk(setup, scratch, chunk)
        else:
            down_chunk(setup, scratch, chunk - first)

    return compute
