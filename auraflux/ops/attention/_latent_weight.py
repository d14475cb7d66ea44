"""The two halves of `kv_b_proj` on CPU, straight from its codes.

For a few tokens each row of the weight is unpacked into a few kilobytes and used at once, heads in parallel. For many the rows
of some heads are unpacked together and multiplied as matrices; the whole weight never is.
"""

from functools import lru_cache

import numpy as np
import torch
from numba import prange
from numba.core import cgutils
from torch import Tensor

from auraflux.ops._dispatch import Declined
from auraflux.ops._jit import as_float, floats, jit, jit_parallel, like
from auraflux.ops._simd import F32, I32, ISA, at, call, fma, load, pick, splat, spread, store, vector
from auraflux.ops.attention._calls import address_of, call_at
from auraflux.ops.attention._softmax import ZERO, fill
from auraflux.ops.attention._tiles import LANES, SIZES, element_of, raw_bits, typed, widen
from auraflux.quant import QTensor

CHUNK = 32  # codes; they fill exactly `bits` words
FEW = 8  # tokens up to which rows are used one by one
HEADS = 8  # whose rows are unpacked together for more tokens
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
    """LANES codes of a chunk, from `first` on."""
    bit = [bits * (first + lane) for lane in range(LANES)]
    shift = ISA.ints([n % 32 for n in bit])
    found = pick(b, words, words, [n // 32 for n in bit])
    if 32 % bits == 0:
        found = b.lshr(found, shift)
    else:
        after = pick(b, words, words, [min(n // 32 + 1, bits - 1) for n in bit])
        found = call(b, f"llvm.fshr.v{LANES}i32", ISA.ints, after, found, shift)
    return b.and_(found, splat(ISA.ints, 2**bits - 1))


@lru_cache
def _unpacker(bits, like):
    @jit
    def unpack(codes, scales, biases, chunks, per_group, target):
        _unpack_chunks(like, (bits, codes, scales, biases, chunks, per_group, target))

    return unpack


@lru_cache
def _format(bits: int, group: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """(address of the unpacking, bits, group, bytes of a scale) of a weight format."""
    return address_of(_unpacker(bits, element_of(dtype)), 6), bits, group, dtype.itemsize


@jit
def _unpack_row(weight, row, width, target):
    unpack, bits, group, size, codes, scales, biases = weight
    groups = row * (width // group) * size
    call_at(
        unpack,
        (codes + row * width // CHUNK * 4 * bits, scales + groups, biases + groups, width // CHUNK, group // CHUNK, target),
    )


@jit
def _query_head(weight, head, q, out, tokens, heads, nope, rows, width):
    memory = np.empty(width, np.float32)
    row_at = np.int64(memory.ctypes.data)
    for t in range(tokens):
        fill(out + 4 * (t * heads + head) * width, width, ZERO)
    for i in range(nope):
        _unpack_row(weight, head * rows + i, width, row_at)
        for t in range(tokens):
            factor = floats(q + 4 * ((t * heads + head) * nope + i), 1)[0]
            target = floats(out + 4 * (t * heads + head) * width, width)
            for c in range(width):
                target[c] += factor * memory[c]


@jit
def _query(unpack, bits, group, size, codes, scales, biases, q, out, tokens, heads, nope, rows, width):
    for head in range(heads):
        _query_head((unpack, bits, group, size, codes, scales, biases), head, q, out, tokens, heads, nope, rows, width)


@jit_parallel
def _query_parallel(unpack, bits, group, size, codes, scales, biases, q, out, tokens, heads, nope, rows, width):
    for head in prange(heads):
        _query_head((unpack, bits, group, size, codes, scales, biases), head, q, out, tokens, heads, nope, rows, width)


@jit
def _output_head(weight, head, v, out, tokens, heads, nope, rows, width):
    memory = np.empty(width, np.float32)
    row_at = np.int64(memory.ctypes.data)
    values = rows - nope
    for f in range(values):
        _unpack_row(weight, head * rows + nope + f, width, row_at)
        for t in range(tokens):
            source = floats(v + 4 * (t * heads + head) * width, width)
            total = ZERO
            for c in range(width):
                total += source[c] * memory[c]
            floats(out + 4 * ((t * heads + head) * values + f), 1)[0] = total


@jit
def _output(unpack, bits, group, size, codes, scales, biases, v, out, tokens, heads, nope, rows, width):
    for head in range(heads):
        _output_head((unpack, bits, group, size, codes, scales, biases), head, v, out, tokens, heads, nope, rows, width)


@jit_parallel
def _output_parallel(unpack, bits, group, size, codes, scales, biases, v, out, tokens, heads, nope, rows, width):
    for head in prange(heads):
        _output_head((unpack, bits, group, size, codes, scales, biases), head, v, out, tokens, heads, nope, rows, width)


@jit_parallel
def _unpack_heads(unpack, bits, group, size, codes, scales, biases, first, heads, rows, offset, count, width, target):
    """Rows [offset, offset + count) of each of some heads: [heads, count, width]."""
    for i in prange(heads * count):
        weight = unpack, bits, group, size, codes, scales, biases
        _unpack_row(weight, (first + i // count) * rows + offset + i % count, width, target + 4 * i * width)


def _arrays(weight: QTensor) -> tuple[int, ...]:
    if weight.lanes != 1 or weight.biases is None:
        order = f"{weight.lanes} rows side by side" if weight.lanes > 1 else "rows one by one"
        raise Declined(f"{weight.kind} weight with {order}; affine codes with rows one by one are needed")
    form = _format(weight.bits, weight.group, weight.scales.dtype)
    return *form, weight.packed.data_ptr(), weight.scales.data_ptr(), weight.biases.data_ptr()


def _head_rows(weight: Tensor | QTensor, heads: slice, rows: int, offset: int, count: int) -> Tensor:
    """Rows [offset, offset + count) of some heads, in float32: [heads, count, C]."""
    if isinstance(weight, Tensor):
        return as_float(weight.unflatten(0, (-1, rows))[heads, offset : offset + count])
    width, some = weight.shape[1], heads.stop - heads.start
    out = torch.empty(some, count, width)
    _unpack_heads(*_arrays(weight), heads.start, some, rows, offset, count, width, out.data_ptr())
    return out


def _some_heads(weight: Tensor | QTensor, heads: int) -> list[slice]:
    step = heads if isinstance(weight, Tensor) and weight.dtype is torch.float32 else HEADS
    return [slice(first, min(first + step, heads)) for first in range(0, heads, step)]


def latent_query(q_nope: Tensor, weight: Tensor | QTensor, rows: int) -> Tensor:
    tokens, heads, nope = q_nope.shape
    width = weight.shape[1]
    queries = as_float(q_nope)
    out = queries.new_empty(tokens, heads, width)
    if isinstance(weight, QTensor) and tokens <= FEW:
        run = _query_parallel if heads * nope * width >= WEIGHTS_PARALLEL else _query
        run(*_arrays(weight), queries.data_ptr(), out.data_ptr(), tokens, heads, nope, rows, width)
        return like(out, q_nope)
    for some in _some_heads(weight, heads):
        keys = _head_rows(weight, some, rows, 0, nope)
        out[:, some] = torch.bmm(queries[:, some].transpose(0, 1), keys).transpose(0, 1)
    return like(out, q_nope)


def latent_output(v: Tensor, weight: Tensor | QTensor, nope: int) -> Tensor:
    tokens, heads, width = v.shape
    rows = weight.shape[0] // heads
    latents = as_float(v)
    out = latents.new_empty(tokens, heads, rows - nope)
    if isinstance(weight, QTensor) and tokens <= FEW:
        run = _output_parallel if heads * (rows - nope) * width >= WEIGHTS_PARALLEL else _output
        run(*_arrays(weight), latents.data_ptr(), out.data_ptr(), tokens, heads, nope, rows, width)
        return like(out, v)
    for some in _some_heads(weight, heads):
        values = _head_rows(weight, some, rows, nope, rows - nope)
        out[:, some] = torch.bmm(latents[:, some].transpose(0, 1), values.transpose(1, 2)).transpose(0, 1)
    return like(out, v)
