"""Rows of a `QTensor` interleaved for the CPU kernels."""

from dataclasses import replace
from functools import cache

from torch import Tensor

from auraflux.ops.layout.memory import empty
from auraflux.ops.layout.words import LANES, columns, lane_words, separate_codes, valid_lanes
from auraflux.ops.simd.jit import Kernel, arguments, halves, int64s, jit, octets, share, threads, workspace
from auraflux.ops.simd.vectors import kernel, store
from auraflux.quant import QTensor
from auraflux.quant.packing import LANE_FIELDS

PARALLEL_FROM = 1 << 18  # bytes; below this, waking the threads costs more than the work
JOBS_PER_THREAD = 4  # a thread that is interrupted leaves its jobs to others
ROWS_NBYTES = 8 * LANES  # of the rows' addresses


@kernel(constants=2, outlined=True)
def interleave_words(b, bits, count, rows, offset, present, target):
    """Transpose `count` words of LANES rows, of which `present` exist; move codes of 3, 5 and 6 bits to the lane layout."""
    words, valid = columns(b, rows, offset, count), valid_lanes(b, present)
    if bits in LANE_FIELDS:
        words = lane_words(b, separate_codes(b, words, bits), bits)
    for i, word in enumerate(words):
        store(b, b.and_(word, valid), target, 4 * LANES * i)


@jit
def _interleave_small(source, target, count, present):
    """Transpose numbers of fewer bytes than a word."""
    for lane in range(LANES):
        for i in range(count):
            target[i * LANES + lane] = source[lane * count + i] if lane < present else 0


@cache
def _words_kernel(bits: int) -> Kernel:
    """Compile the interleaving of words; `bits` of their codes, or 0 where words stay as they are."""
    step = bits or LANES

    @Kernel
    def interleave(args, job, jobs):
        source, count, rows, blocks, target, space = arguments(args, 6)
        space += job * ROWS_NBYTES
        addresses = int64s(space, LANES)
        for place in share(blocks, job, jobs):
            # a stack's matrices each end in a full block
            each = (rows + LANES - 1) // LANES
            matrix, block = place // each, place % each
            present = min(LANES, rows - block * LANES)
            for lane in range(LANES):
                addresses[lane] = source + 4 * count * (matrix * rows + block * LANES + min(lane, present - 1))
            out = target + 4 * count * place * LANES
            full = count // step * step
            for first in range(0, full, step):
                interleave_words((bits, step, space, 4 * first, present, out + 4 * LANES * first))
            for first in range(full, count):
                interleave_words((0, 1, space, 4 * first, present, out + 4 * LANES * first))

    return interleave


@Kernel
def _interleave_parts(args, job, jobs):
    """Interleave numbers of one or two bytes."""
    source, count, rows, blocks, target, nbytes = arguments(args, 6)
    each = (rows + LANES - 1) // LANES
    for place in share(blocks, job, jobs):
        matrix, block = place // each, place % each
        present = min(LANES, rows - block * LANES)
        start = source + nbytes * count * (matrix * rows + block * LANES)
        out = target + nbytes * count * place * LANES
        if nbytes == 2:
            _interleave_small(halves(start, count * present), halves(out, count * LANES), count, present)
        else:
            _interleave_small(octets(start, count * present), octets(out, count * LANES), count, present)


def interleave(weight: QTensor, lanes: int) -> QTensor:
    """Return the weight with `lanes` rows interleaved, bit-identical to `QTensor.interleave`."""
    parts = [part for part in (weight.packed, weight.scales, weight.biases) if part is not None]
    dense = all(part.is_cpu and part.numel() and part[..., :1, :].is_contiguous() for part in parts)
    if weight.lanes != 1 or lanes != LANES or not dense:
        return weight.interleave(lanes)
    bits = weight.bits if weight.bits in LANE_FIELDS and weight.grid is None else 0
    packed, scales = _interleaved(weight.packed, bits), _interleaved(weight.scales, 0)
    biases = None if weight.biases is None else _interleaved(weight.biases, 0)
    return replace(weight, packed=packed, scales=scales, biases=biases, lanes=lanes)


def _interleaved(part: Tensor, bits: int) -> Tensor:
    """Interleave the rows of one array [..., N, count]."""
    part = part.contiguous()
    *stack, rows, count = part.shape
    out = empty(*stack, -(-rows // LANES), count, LANES, dtype=part.dtype)
    blocks = out.numel() // (count * LANES)
    jobs = min(JOBS_PER_THREAD * threads(), blocks) if part.nbytes >= PARALLEL_FROM else 1
    sizes = part.data_ptr(), count, rows, blocks, out.data_ptr()
    if part.dtype.itemsize < 4:
        _interleave_parts(jobs, *sizes, part.dtype.itemsize)
    else:
        _words_kernel(bits)(jobs, *sizes, workspace(jobs * ROWS_NBYTES))
    return out
