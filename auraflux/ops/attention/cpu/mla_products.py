"""The two halves of `kv_b_proj` on CPU, straight from its codes, or from a dense weight.

Rows of a head are unpacked into scratch memory, a few for a few tokens and all for many, and used at once, heads in parallel.
The order of sums does not depend on how many there are; the whole weight is never unpacked.
"""

from functools import cache
from typing import NamedTuple

import numba
import numpy as np
import torch
from numba.core import cgutils
from torch import Tensor

from auraflux.ops.attention.cpu.dtypes import LANES, SIZES, element_of, number_of, raw_bits, size_of, typed, widen, widen_row
from auraflux.ops.attention.cpu.row_blocks import copy_row
from auraflux.ops.attention.cpu.row_tiles import add_values
from auraflux.ops.linear.cpu.dense import TILE_SPACE, multiply_floats
from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.jit import LINE, Kernel, arguments, jit, share, threads, workspace
from auraflux.ops.simd.softmax import ZERO, fill
from auraflux.ops.simd.vectors import F32, I32, at, call, fma, load, pick, splat, spread, store, vector
from auraflux.quant import QTensor

ONE = np.float32(1)
CHUNK = 32  # codes; they fill exactly `bits` words
FEW = 8  # tokens for which rows are unpacked a few at a time, and stay in the first cache
SOME = 8  # rows
WEIGHTS_PARALLEL = 1 << 16  # below this, waking the threads costs more than the work


@typed(1)
def _unpack_chunks(b, element, bits, codes, scales, biases, chunks, per_group, target):
    """Write the numbers of `chunks` chunks of codes; `per_group` chunks share a scale and a bias."""
    with cgutils.for_range(b, chunks) as loop:
        group = b.mul(b.sdiv(loop.index, per_group), at(SIZES[element]))
        pair = [load(b, base, group, raw_bits(element)) for base in (scales, biases)]
        scale, bias = (spread(b, widen(b, element, raw, F32), LANES) for raw in pair)
        words = load(b, codes, b.mul(loop.index, at(4 * bits)), vector(I32, bits))
        for first in range(0, CHUNK, LANES):
            found = b.sitofp(_codes(b, bits, words, first), ISA.floats)
            store(b, fma(b, found, scale, bias), target, b.add(b.mul(loop.index, at(4 * CHUNK)), at(4 * first)))


def _codes(b, bits, words, first):
    """Return LANES codes of a chunk, from `first` on."""
    bit = [bits * (first + lane) for lane in range(LANES)]
    shift = ISA.ints([n % 32 for n in bit])
    found = pick(b, words, words, [n // 32 for n in bit])
    if 32 % bits == 0:
        found = b.lshr(found, shift)
    else:
        after = pick(b, words, words, [min(n // 32 + 1, bits - 1) for n in bit])
        found = call(b, f"llvm.fshr.v{LANES}i32", ISA.ints, after, found, shift)
    return b.and_(found, splat(ISA.ints, 2**bits - 1))


@numba.njit(inline="always")
def _unpack_row(bits, group, like, weight, row, width, target):
    codes, scales, biases = weight
    first, groups = codes + row * width // CHUNK * 4 * bits, row * (width // group) * size_of(like)
    _unpack_chunks(like, (bits, first, scales + groups, biases + groups, width // CHUNK, group // CHUNK, target))


@jit
def _room(width):
    return (width + LANES - 1) // LANES * LANES


@jit
def _scratch(tokens, used, width):
    """Return the scratch bytes of a thread: rows of a weight, sums of all tokens, factors, and a tile."""
    rows = used if tokens > FEW else SOME
    return (4 * _room(width) * (rows + tokens) + 4 * tokens + TILE_SPACE + 2 * LINE) // LINE * LINE


def _build(unpack, query):
    """Build one half from what unpacks row `row` of a weight of `width` columns to an address."""

    @Kernel
    def multiply(args, job, jobs):
        codes, scales, biases, x, out, tokens, heads, rows, skip, used, width, space, nbytes = arguments(args, 13)
        room, many = _room(width), used if tokens > FEW else SOME
        unpacked = space + job * nbytes
        sums = unpacked + 4 * room * many
        ones = sums + 4 * room * tokens
        tile = (ones + 4 * tokens + 63) // 64 * 64
        fill(ones, tokens, ONE)
        for head in share(heads, job, jobs):
            fill(sums, room * tokens, ZERO)
            for first in range(0, used, many):
                some = min(many, used - first)
                for i in range(some):
                    here = unpacked + 4 * i * room
                    unpack((codes, scales, biases), head * rows + skip + first + i, width, here)
                    fill(here + 4 * width, room - width, ZERO)
                if query:
                    weights, line = x + 4 * (head * used + first), 4 * heads * used
                    add_values(tokens, weights, line, unpacked, 4 * room, some, sums, 4 * room, ones)
                else:
                    mine, step = x + 4 * head * width, 4 * heads * width
                    target = out + 4 * (head * used + first)
                    multiply_floats(unpacked, 4 * room, some, mine, step, tokens, width, target, 4 * heads * used, tile)
            if query:
                for t in range(tokens):
                    copy_row(sums + 4 * t * room, width, ONE, out + 4 * (t * heads + head) * width, width)

    return multiply


@cache
def _coded_kernel(bits: int, group: int, dtype: torch.dtype, query: bool) -> Kernel:
    """Build one half for a weight of codes."""
    like = element_of(dtype)

    @jit
    def unpack(weight, row, width, target):
        _unpack_row(bits, group, like, weight, row, width, target)

    return _build(unpack, query)


@cache
def _dense_kernel(dtype: torch.dtype, query: bool) -> Kernel:
    """Build one half for a dense weight."""
    element, size = number_of(dtype), dtype.itemsize

    @jit
    def widen(weight, row, width, target):
        widen_row((element, weight[0] + size * row * width, width, target))

    return _build(widen, query)


class HeadProducts(NamedTuple):
    """Tokens [T, H, A] times a part of each head's rows of a weight: `used` of `rows`, after `skip`.

    query  carried into the latent space, [T, H, C]; else brought back from it, [T, H, used]
    """

    x: Tensor
    weight: Tensor | QTensor
    rows: int
    skip: int
    used: int
    query: bool


def misplaced(weight: QTensor) -> str | None:
    """Return why no kernel reads a weight, or None."""
    if weight.lanes == 1 and weight.biases is not None and weight.in_mlx:
        return None
    order = f"{weight.lanes} rows side by side" if weight.lanes > 1 else "rows one by one"
    return f"{weight.kind} weight in groups of {weight.group} with {order}; affine codes with rows one by one are needed"


def _form(weight: QTensor) -> tuple[int, int, torch.dtype]:
    """Return the constants that the kernels of a weight are built from."""
    return weight.bits, weight.group, weight.scales.dtype


def _arrays(weight: QTensor) -> tuple[int, int, int]:
    assert weight.biases is not None
    return weight.packed.data_ptr(), weight.scales.data_ptr(), weight.biases.data_ptr()


def _multiply(call: HeadProducts, kernel: Kernel, arrays: tuple[int, int, int]) -> Tensor:
    x, width = call.x, call.weight.shape[1]
    tokens, heads, _ = x.shape
    out = x.new_empty(tokens, heads, width if call.query else call.used)
    jobs = threads() if tokens * heads * call.used * width >= WEIGHTS_PARALLEL else 1
    nbytes = _scratch(tokens, call.used, width)
    sizes = tokens, heads, call.rows, call.skip, call.used, width, workspace(jobs * nbytes), nbytes
    kernel(jobs, *arrays, x.data_ptr(), out.data_ptr(), *sizes)
    return out


def multiply_codes(call: HeadProducts) -> Tensor:
    """Multiply by rows of codes, unpacked when they are used."""
    weight = call.weight
    assert isinstance(weight, QTensor)
    return _multiply(call, _coded_kernel(*_form(weight), call.query), _arrays(weight))


def multiply_dense(call: HeadProducts) -> Tensor:
    """Multiply by rows of a dense weight, widened when they are used."""
    assert isinstance(call.weight, Tensor)
    return _multiply(call, _dense_kernel(call.weight.dtype, call.query), (call.weight.data_ptr(), 0, 0))
