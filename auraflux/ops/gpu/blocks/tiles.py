"""Tiles of weights and of tokens for Triton's tensor-core products: rows of any format, tokens as columns."""

import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.gpu.blocks.codes import bias_value, scale_value, value_of, weight_value
from auraflux.ops.gpu.blocks.dot_codes import joined, unit_values
from auraflux.ops.gpu.blocks.grids import grid_scale, grid_values, grid_words, is_grid
from auraflux.quant import QTensor

COLUMNS = 64  # inputs per product


def columns_of(weight: Tensor | QTensor) -> int:
    """Return the columns of a `weights_tile`: at most a group, so that a row has one scale, except for groups of 16."""
    return COLUMNS if not isinstance(weight, QTensor) or weight.group == 16 else min(COLUMNS, weight.group)


@triton.jit
def weights_tile(
    codes, row, rows, start, K, BITS: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Load weights [ROWS, BK] from column `start` on; dense ones where BITS is 0."""
    k = start + tl.arange(0, BK)
    there = (row < rows)[:, None]
    wide = row.to(tl.int64)[:, None]
    if BITS == 0:
        return tl.load(codes.packed + wide * K + k[None, :], mask=there & (k < K)[None, :], other=0.0)
    elif is_grid(FORM):  # noqa: RET505
        unit = start // 16 + tl.arange(0, BK // 16)[None, :]
        words = grid_words(codes.packed, codes.scales, wide, unit, there & (unit * 16 < K), K, FORM)
        scale, values, found = grid_scale(words, unit, FORM), grid_values(words, unit, codes.biases, FORM), ()
        for j in tl.static_range(16):
            found += (values[j] * scale,)  # type: ignore[assignment]
        return tl.reshape(joined(found, 0, 1, 16), [row.shape[0], BK])
    elif GROUP < BK or BITS == 3 or BITS == 5 or BITS == 6:
        unit = start // 16 + tl.arange(0, BK // 16)[None, :]
        inside = there & (unit * 16 < K)
        words, found = (), ()
        for i in tl.static_range((BITS + 1) // 2):
            at = wide * (K // 32 * BITS) + unit * BITS // 2 + i
            words += (tl.load(codes.packed + at, mask=inside, other=0),)
        at = wide * (K // GROUP) + unit * 16 // GROUP
        scale, bias = scale_value(codes.scales, at, inside, FORM), bias_value(codes.biases, at, inside, FORM)
        values = unit_values(words, unit, codes.biases, BITS, FORM, False)
        for j in tl.static_range(16):
            found += (weight_value(values[j], scale, bias, FORM),)  # type: ignore[assignment]
        return tl.reshape(joined(found, 0, 1, 16), [row.shape[0], BK])
    else:
        WORDS: tl.constexpr = BK * BITS // 32
        word = start * BITS // 32 + tl.arange(0, WORDS)
        bits = tl.load(codes.packed + wide * (K // 32 * BITS) + word[None, :], mask=there, other=0).to(tl.uint32, bitcast=True)
        # code j of a word is shifted down by BITS * j: highest binary digit of j first, as the last axis varies fastest
        bits = tl.join(bits, bits >> 16)
        bits = tl.join(bits, bits >> 8)
        if BITS < 8:
            bits = tl.join(bits, bits >> 4)
        if BITS < 4:
            bits = tl.join(bits, bits >> 2)
        value = value_of(tl.reshape(bits, [row.shape[0], BK]) & ((1 << BITS) - 1), codes.biases, BITS, FORM)
        at = wide * (K // GROUP) + start // GROUP
        return weight_value(value, scale_value(codes.scales, at, there, FORM), bias_value(codes.biases, at, there, FORM), FORM)


@triton.jit
def tokens_tile(x, token, tokens, start, K, BK: tl.constexpr):
    """Load columns of tokens, [BK, TOKENS]."""
    k = start + tl.arange(0, BK)
    return tl.load(x + token[None, :] * K + k[:, None], mask=(token < tokens)[None, :] & (k < K)[:, None], other=0.0)
