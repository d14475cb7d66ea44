"""GGUF blocks to `QTensor`s: straight from the mapped file to interleaved rows, or to rows in order."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numpy.typing import NDArray
from torch import Tensor

from auraflux.ops.layout.blocks import SPLITS, Rows, expanded
from auraflux.ops.layout.memory import empty
from auraflux.ops.layout.words import LANES, packed_chunk, valid_lanes
from auraflux.ops.simd.jit import Kernel, arguments, halves, int32s, int64s, jit, octets, share, threads, workspace
from auraflux.ops.simd.vectors import I8, I16, kernel, load, store, vector
from auraflux.quant import QTensor, grids, super_blocks
from auraflux.quant.gguf_layouts import LAYOUTS
from auraflux.quant.packing import CHUNK

PARALLEL_FROM = 1 << 18  # bytes; below this, waking the threads costs more than the work
JOBS_PER_THREAD = 4  # a thread that is interrupted leaves its jobs to others
STEP_NBYTES = 1 << 24  # of blocks that are converted at a time
SCALES = {2: torch.float16, 1: torch.uint8}
NARROW = {1: I8, 2: I16}
Done = Callable[[int, int], None]


class BlockForm(NamedTuple):
    """A block type and its layout in memory.

    kind        GGUF's name of the type
    is_expanded whether a super-block's scales are expanded
    in_lanes    whether rows are interleaved; otherwise they stay in order
    """

    kind: str
    is_expanded: bool
    in_lanes: bool

    @property
    def text(self) -> str:
        return f"{self.kind} {int(self.is_expanded)} {int(self.in_lanes)}"

    @classmethod
    def parse(cls, text: str) -> "BlockForm":
        kind, is_expanded, in_lanes = text.split()
        return cls(kind, is_expanded == "1", in_lanes == "1")

    @property
    def grid(self) -> grids.Grid | None:
        return grids.FORMATS.get(self.kind.lower())

    @property
    def words(self) -> int:
        """Words of a block's codes."""
        return LAYOUTS[self.kind].size * LAYOUTS[self.kind].bits // 32

    @property
    def scales(self) -> tuple[int, int]:
        """Number of scales or words of a super-block, and the bytes of each."""
        layout, found = LAYOUTS[self.kind], super_blocks.FORMATS.get(self.kind.lower())
        if self.grid is not None:
            return self.grid.halves, 2
        if found is not None and not self.is_expanded:
            return found.words, 4
        if self.kind == "MXFP4":
            return 1, 1
        return layout.size // layout.group, 2 if found is None else 4

    @property
    def scale_dtype(self) -> torch.dtype:
        if self.grid is not None or self.kind == "Q4_0":
            return torch.int16
        if self.scales[1] < 4:
            return SCALES[self.scales[1]]
        is_super = self.kind.lower() in super_blocks.FORMATS
        return torch.int32 if is_super and not self.is_expanded else torch.float32

    @property
    def has_biases(self) -> bool:
        found = super_blocks.FORMATS.get(self.kind.lower())
        if found is not None:
            return self.is_expanded and found.has_biases
        return self.kind not in ("MXFP4", "IQ4_NL", "Q4_0") and self.grid is None


@kernel(constants=1, outlined=True)
def convert_blocks(b, form, rows, offset, count, codes, scales, biases, overflow):
    """Convert the blocks at one offset of `LANES` rows, of which `count` exist; the others become zeros.

    rows      address of the rows' addresses
    codes     [words, LANES]
    scales    [n, LANES], and biases likewise
    overflow  [LANES] int32, nonzero where a bias does not fit in half precision
    """
    form = BlockForm.parse(form)
    layout, valid = LAYOUTS[form.kind], valid_lanes(b, count)
    found, each = SPLITS[form.kind](Rows(b, rows, offset)), CHUNK // 4
    for chunk in range(layout.size // CHUNK):
        if form.grid is None:
            packed = packed_chunk(b, found.codes[chunk * each : (chunk + 1) * each], layout.bits, form.in_lanes)
        else:
            packed = found.codes[chunk * layout.bits : (chunk + 1) * layout.bits]
        for i, word in enumerate(packed):
            store(b, b.and_(word, valid), codes, 4 * LANES * (chunk * layout.bits + i))
    numbers = (found.scales, found.biases)
    if form.is_expanded:
        numbers = expanded(b, form.kind, found.scales)
    nbytes = form.scales[1]
    for words, target in zip(numbers, (scales, biases), strict=True):
        for i, word in enumerate(words):
            _store_narrow(b, b.and_(word, valid), nbytes, target, nbytes * LANES * i)
    if found.overflow is not None:
        store(b, b.or_(load(b, overflow, 0, valid.type), found.overflow), overflow, 0)


def _store_narrow(b: ir.IRBuilder, words: ir.Value, nbytes: int, target: ir.Value, offset: int) -> None:
    store(b, words if nbytes == 4 else b.trunc(words, vector(NARROW[nbytes], LANES)), target, offset)


@jit
def _scatter(tile, target, place, present, count, nbytes):
    """Copy a tile [count, LANES] to consecutive blocks [LANES, count]; `nbytes` of a number."""
    start = target + nbytes * count * place * LANES
    if nbytes == 4:
        _transpose(int32s(tile, count * LANES), int32s(start, count * LANES), present, count)
    elif nbytes == 2:
        _transpose(halves(tile, count * LANES), halves(start, count * LANES), present, count)
    else:
        _transpose(octets(tile, count * LANES), octets(start, count * LANES), present, count)


@jit
def _transpose(source, target, present, count):
    for lane in range(present):
        for i in range(count):
            target[lane * count + i] = source[i * LANES + lane]


@cache
def _kernel(spec: BlockForm) -> tuple[Kernel, int]:
    """Return the conversion of a block type, and the scratch memory of a job in bytes."""
    form, words, (count, nbytes), in_lanes = spec.text, spec.words, spec.scales, spec.in_lanes
    block_nbytes = LAYOUTS[spec.kind].record.itemsize
    has_biases = int(spec.has_biases)
    # of a tile: addresses of rows, overflow, codes, scales and biases
    overflow_at, codes_at = 8 * LANES, 12 * LANES
    scales_at = codes_at + 4 * LANES * words
    biases_at = scales_at + nbytes * LANES * count
    space_nbytes = biases_at + nbytes * LANES * count

    @Kernel
    def convert(args, job, jobs):
        source, row_nbytes, blocks, rows, order, packed, scales, biases, overflow, space = arguments(args, 10)
        space += job * space_nbytes
        addresses, flags = int64s(space, LANES), int32s(space + overflow_at, LANES)
        for lane in range(LANES):
            flags[lane] = 0
        for tile in share((rows + LANES - 1) // LANES, job, jobs):
            present = min(LANES, rows - tile * LANES)
            for lane in range(LANES):
                row = tile * LANES + min(lane, present - 1)
                addresses[lane] = source + row_nbytes * (int64s(order, rows)[row] if order else row)
            for block in range(blocks):
                place, offset = tile * blocks + block, block * block_nbytes
                if in_lanes:
                    targets = (
                        packed + 4 * LANES * words * place,
                        scales + nbytes * LANES * count * place,
                        biases + nbytes * LANES * count * place * has_biases,
                    )
                else:
                    targets = space + codes_at, space + scales_at, space + biases_at
                convert_blocks((form, space, offset, present, targets, space + overflow_at))
                if not in_lanes:
                    _scatter(space + codes_at, packed, place, present, words, 4)
                    _scatter(space + scales_at, scales, place, present, count, nbytes)
                    if has_biases:
                        _scatter(space + biases_at, biases, place, present, count, nbytes)
        for lane in range(LANES):
            if flags[lane]:
                int64s(overflow, 1)[0] = 1

    return convert, space_nbytes


def convert_rows(
    octets: NDArray[np.uint8],
    kind: str,
    lanes: int = 1,
    expands_scales: bool = False,
    order: Tensor | None = None,
    done: Done = lambda first, last: None,
) -> QTensor | None:
    """Convert blocks to a QTensor, bit-identical to `gguf_blocks.from_blocks`; None if no kernel can.

    octets          [N, bytes] or [E, N, bytes], rows of full blocks
    lanes           rows to interleave: 1 or LANES; a stack of matrices has its rows in order
    expands_scales  of super-blocks, as `QTensor.expand_scales`
    order           [N]  row of `octets` for each row; None for their order
    done            called with the first and last offset of the bytes of `octets` that were converted
    """
    in_lanes = lanes > 1
    if kind not in SPLITS or lanes not in (1, LANES) or octets.size == 0 or (in_lanes and octets.ndim != 2):
        return None
    layout, form = LAYOUTS[kind], BlockForm(kind, expands_scales and kind.lower() in super_blocks.FORMATS, in_lanes)
    blocks, rest = divmod(octets.shape[-1], layout.record.itemsize)
    if rest or (order is not None and not (in_lanes and _is_permutation(order, octets.shape[0]))):
        return None
    shape = (*octets.shape[:-1], blocks * layout.size)
    made = _empty(form, shape)
    if not _convert(np.ascontiguousarray(octets), form, made, order, done):
        return None
    return QTensor(*made, layout.bits, layout.group, shape, lanes)


def _is_permutation(order: Tensor, rows: int) -> bool:
    return order.dtype is torch.int64 and torch.equal(order.sort().values, torch.arange(rows))


def _empty(form: BlockForm, shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Allocate codes, scales and biases of a weight."""
    *stack, rows, width = shape
    blocks, (count, _) = width // LAYOUTS[form.kind].size, form.scales

    def array(each: int, dtype: torch.dtype) -> Tensor:
        sizes = (-(-rows // LANES), blocks * each, LANES) if form.in_lanes else (*stack, rows, blocks * each)
        return empty(*sizes, dtype=dtype)

    biases = array(count, form.scale_dtype) if form.has_biases else None
    return array(form.words, torch.int32), array(count, form.scale_dtype), biases


def _convert(
    octets: NDArray[np.uint8],
    form: BlockForm,
    made: tuple[Tensor, Tensor, Tensor | None],
    order: Tensor | None,
    done: Done,
) -> bool:
    """Fill the arrays, some rows at a time; return False if some biases do not fit in half precision."""
    run, space_nbytes = _kernel(form)
    block_nbytes = LAYOUTS[form.kind].record.itemsize
    rows, row_nbytes = octets.size // octets.shape[-1], octets.shape[-1]
    # where rows stay in order, each block is a row of its own: the lanes of a vector are adjacent blocks
    if not form.in_lanes:
        rows, row_nbytes = octets.size // block_nbytes, block_nbytes
    blocks, overflow = row_nbytes // block_nbytes, torch.zeros(1, dtype=torch.int64)
    order = None if order is None else order.contiguous()
    step = max(1, STEP_NBYTES // (row_nbytes * LANES)) * LANES if order is None else rows
    words, (count, nbytes) = form.words, form.scales
    for first in range(0, rows, step):
        last = min(rows, first + step)
        jobs = min(JOBS_PER_THREAD * threads(), -(-(last - first) // LANES)) if octets.size >= PARALLEL_FROM else 1
        targets = [
            0 if array is None else array.data_ptr() + first * blocks * each
            for array, each in zip(made, (4 * words, nbytes * count, nbytes * count), strict=True)
        ]
        source = octets.ctypes.data + first * row_nbytes
        addresses = 0 if order is None else order.data_ptr(), *targets, overflow.data_ptr(), workspace(jobs * space_nbytes)
        run(jobs, source, row_nbytes, blocks, last - first, *addresses)
        done(first * row_nbytes, last * row_nbytes)
    return not overflow.item()
