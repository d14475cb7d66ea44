"""The two halves of `kv_b_proj` on CPU, straight from its codes.

For a few tokens each row of the weight is unpacked into a few kilobytes and used at once, heads in parallel. For many the rows
of some heads are unpacked together and multiplied as matrices; the whole weight never is.
"""

from functools import cache
from typing import NamedTuple

import numba
import torch
from numba.core import cgutils
from torch import Tensor

from auraflux.ops.attention.cpu.decode_tiles import LANES, SIZES, element_of, raw_bits, size_of, typed, widen
from auraflux.ops.simd.jit import LINE, Kernel, arguments, as_float, floats, jit, share, threads, workspace
from auraflux.ops.simd.softmax import ZERO, fill
from auraflux.ops.simd.vectors import F32, I32, ISA, at, call, fma, load, pick, splat, spread, store, vector
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


@numba.njit(inline="always")
def _unpack_row(bits, group, like, weight, row, width, target):
    codes, scales, biases = weight
    first, groups = codes + row * width // CHUNK * 4 * bits, row * (width // group) * size_of(like)
    _unpack_chunks(like, (bits, first, scales + groups, biases + groups, width // CHUNK, group // CHUNK, target))


@jit
def _add_row(row_at, width, factor, target_at):
    row, target = floats(row_at, width), floats(target_at, width)
    for c in range(width):
        target[c] += factor * row[c]


@jit
def _dot(x_at, y_at, width):
    x, y, total = floats(x_at, width), floats(y_at, width), ZERO
    for c in range(width):
        total += x[c] * y[c]
    return total


@cache
def _query_kernel(bits: int, group: int, dtype: torch.dtype) -> Kernel:
    """Build `latent_query` for few tokens and one weight format."""
    like = element_of(dtype)

    @Kernel
    def query(args, job, jobs):
        codes, scales, biases, q, out, tokens, heads, nope, rows, width, space, nbytes = arguments(args, 12)
        row_at = space + job * nbytes
        for head in share(heads, job, jobs):
            for t in range(tokens):
                fill(out + 4 * (t * heads + head) * width, width, ZERO)
            for i in range(nope):
                _unpack_row(bits, group, like, (codes, scales, biases), head * rows + i, width, row_at)
                for t in range(tokens):
                    factor = floats(q + 4 * ((t * heads + head) * nope + i), 1)[0]
                    _add_row(row_at, width, factor, out + 4 * (t * heads + head) * width)

    return query


@cache
def _output_kernel(bits: int, group: int, dtype: torch.dtype) -> Kernel:
    """Build `latent_output` for few tokens and one weight format."""
    like = element_of(dtype)

    @Kernel
    def output(args, job, jobs):
        codes, scales, biases, v, out, tokens, heads, nope, rows, width, space, nbytes = arguments(args, 12)
        row_at, values = space + job * nbytes, rows - nope
        for head in share(heads, job, jobs):
            for f in range(values):
                _unpack_row(bits, group, like, (codes, scales, biases), head * rows + nope + f, width, row_at)
                for t in range(tokens):
                    total = _dot(v + 4 * (t * heads + head) * width, row_at, width)
                    floats(out + 4 * ((t * heads + head) * values + f), 1)[0] = total

    return output


@cache
def _unpack_kernel(bits: int, group: int, dtype: torch.dtype) -> Kernel:
    """Build the unpacking of rows [offset, offset + count) of each of some heads, to [heads, count, width]."""
    like = element_of(dtype)

    @Kernel
    def unpack(args, job, jobs):
        codes, scales, biases, first, heads, rows, offset, count, width, target = arguments(args, 10)
        for i in share(heads * count, job, jobs):
            row = (first + i // count) * rows + offset + i % count
            _unpack_row(bits, group, like, (codes, scales, biases), row, width, target + 4 * i * width)

    return unpack


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
    """Why no kernel reads a weight."""
    if weight.lanes == 1 and weight.biases is not None:
        return None
    order = f"{weight.lanes} rows side by side" if weight.lanes > 1 else "rows one by one"
    return f"{weight.kind} weight with {order}; affine codes with rows one by one are needed"


def _form(weight: QTensor) -> tuple[int, int, torch.dtype]:
    """What the kernels for a weight are built from."""
    return weight.bits, weight.group, weight.scales.dtype


def _arrays(weight: QTensor) -> tuple[int, int, int]:
    assert weight.biases is not None
    return weight.packed.data_ptr(), weight.scales.data_ptr(), weight.biases.data_ptr()


def multiply_codes(call: HeadProducts) -> Tensor:
    """Multiply a few tokens, each row unpacked when it is used."""
    weight, x = call.weight, call.x
    assert isinstance(weight, QTensor)
    (tokens, heads, _), width = x.shape, weight.shape[1]
    out = x.new_empty(tokens, heads, width if call.query else call.used)
    jobs = threads() if heads * call.used * width >= WEIGHTS_PARALLEL else 1
    nbytes = -(-4 * width // LINE) * LINE
    # without a query, `skip` rows come first; with one, `used` of them do
    sizes = tokens, heads, call.used if call.query else call.skip, call.rows, width, workspace(jobs * nbytes), nbytes
    kernel = (_query_kernel if call.query else _output_kernel)(*_form(weight))
    kernel(jobs, *_arrays(weight), x.data_ptr(), out.data_ptr(), *sizes)
    return out


def _head_rows(weight: Tensor | QTensor, heads: slice, rows: int, offset: int, count: int) -> Tensor:
    """Rows [offset, offset + count) of some heads, in float32: [heads, count, C]."""
    if isinstance(weight, Tensor):
        return as_float(weight.unflatten(0, (-1, rows))[heads, offset : offset + count])
    width, some = weight.shape[1], heads.stop - heads.start
    out = torch.empty(some, count, width)
    kernel = _unpack_kernel(*_form(weight))
    kernel(threads(), *_arrays(weight), heads.start, some, rows, offset, count, width, out.data_ptr())
    return out


def _some_heads(weight: Tensor | QTensor, heads: int) -> list[slice]:
    step = heads if isinstance(weight, Tensor) and weight.dtype is torch.float32 else HEADS
    return [slice(first, min(first + step, heads)) for first in range(0, heads, step)]


def multiply_rows(call: HeadProducts) -> Tensor:
    """Multiply the rows of some heads at a time, unpacked, as matrices."""
    x, (tokens, heads, _) = call.x, call.x.shape
    out = x.new_empty(tokens, heads, call.weight.shape[1] if call.query else call.used)
    for some in _some_heads(call.weight, heads):
        rows = _head_rows(call.weight, some, call.rows, call.skip, call.used)
        part = rows if call.query else rows.transpose(1, 2)
        out[:, some] = torch.bmm(x[:, some].transpose(0, 1), part).transpose(0, 1)
    return out
