"""New tokens on CUDA: queries and keys are normalised and rotated by RoPE, keys and values coded into their pages, all in
one launch. A program takes a head of a token: decoding has few of them, and each is short."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from auraflux.ops.hopper.device import not_hopper
from auraflux.ops.hopper.launch import launch
from auraflux.ops.hopper.pages import place_token
from auraflux.ops.hopper.rope import cos_sin
from auraflux.ops.turboquant.arrangement import Arrangement
from auraflux.ops.turboquant.cuda.codec import encoded_values
from auraflux.ops.turboquant.cuda.codec_launch import index_of, page_sizes
from auraflux.ops.turboquant.cuda.hadamard import (
    half_of_pair,
    levels_for,
    rotation_for,
    store_half,
    store_half_units,
    store_words,
)
from auraflux.ops.turboquant.pages import CodePages

MOST_TOKENS = 64  # that are rotated and coded in one launch


@triton.jit
def begin_next(EARLY: tl.constexpr):
    """Wait for the kernel before this one, which has made q, k and v, and let the next one begin."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def rotated_row(
    x, weight, inv_freq, position, half, mscale, eps,
    kind: tl.constexpr, D: tl.constexpr, INTERLEAVED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Load a head, normalise it where it has a weight, and rotate it: [1, D] float32, rounded to `kind` as if stored."""
    d = tl.arange(0, D)[None, :]
    if INTERLEAVED:
        pair, first, other = d // 2, d % 2 == 0, d ^ 1
    else:
        first = d < half
        pair, other = tl.where(first, d, d - half), tl.where(first, d + half, d - half)
    turns = d < 2 * half
    other = tl.where(turns, other, d)
    frequency = tl.load(inv_freq + pair, mask=turns, other=0.0)
    cosine, sine = cos_sin(position.to(tl.float32) * frequency)
    begin_next(EARLY)
    a, b = tl.load(x + d).to(tl.float32), tl.load(x + other).to(tl.float32)
    if weight is not None:
        factor = 1.0 / tl.sqrt(tl.sum(a * a, 1, keep_dims=True) / D + eps)
        a = (a * factor * tl.load(weight + d).to(tl.float32)).to(kind).to(tl.float32)
        b = (b * factor * tl.load(weight + other).to(tl.float32)).to(kind).to(tl.float32)
    rotated = a * (cosine * mscale) + tl.where(first, -b, b) * (sine * mscale)
    return tl.where(turns, rotated, a).to(kind).to(tl.float32)


@triton.jit
def rotate_and_append(
    q, k, v, q_out, q_weight, k_weight, inv_freq, positions, half, mscale, eps, q_pitch,
    k_codes, k_norms, k_places, k_levels, k_offset, k_factor, v_codes, v_norms, v_places, v_levels, v_offset, v_factor,
    signs, table, lengths, starts, sequences, table_width, pool, Q_HEADS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr, PAGE: tl.constexpr,
    S: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Turn a query, or code a key or a value; grid (HEADS keys, HEADS values, Q_HEADS queries; tokens).

    EARLY  launched before the kernel before has ended; positions and pages are older than that
    """
    head, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    kind: tl.constexpr = k.dtype.element_ty
    d = tl.arange(0, D)[None, :]
    if head >= 2 * HEADS:
        row = token * Q_HEADS + head - 2 * HEADS
        position = tl.load(positions + token)
        y = rotated_row(q + row * q_pitch, q_weight, inv_freq, position, half, mscale, eps, kind, D, INTERLEAVED, EARLY)
        tl.store(q_out + row * D + d, y.to(kind))
        return
    page, slot = place_token(tl.program_id(1), table, lengths, starts, sequences, table_width, pool, PAGE, S)
    there = page + tl.zeros([1], tl.int64) >= 0
    row = (page * HEADS + head % HEADS) * PAGE + slot + tl.zeros([1], tl.int64)
    source = (token * HEADS + head % HEADS) * D
    if head < HEADS:
        position = tl.load(positions + token)
        y = rotated_row(k + source, k_weight, inv_freq, position, half, mscale, eps, kind, D, INTERLEAVED, EARLY)
        codes, norm = encoded_values(y.to(tl.float64), signs, k_places, k_levels, k_offset, k_factor, D, KEY_BITS)
        store_words(k_codes, row, there, codes, KEY_BITS, D, (D * KEY_BITS + 31) // 32)
        tl.store(k_norms + row, norm, mask=there)
        return
    begin_next(EARLY)
    if PAIRS and VALUE_BITS % 3:
        # asked for now, needed at the end
        at, mine, shift = half_of_pair(v_codes, row, VALUE_BITS, D)
        old = tl.load(at, mask=there, other=0)
    y = tl.load(v + source + d).to(tl.float64)
    codes, norm = encoded_values(y, signs, v_places, v_levels, v_offset, v_factor, D, VALUE_BITS)
    tl.store(v_norms + row, norm, mask=there)
    if not PAIRS:
        store_words(v_codes, row, there, codes, VALUE_BITS, D, (D * VALUE_BITS + 31) // 32)
    elif VALUE_BITS % 3 == 0:
        store_half_units(v_codes, row, there, codes, VALUE_BITS, D)
    else:
        store_half(at, mine, shift, there, old, codes, VALUE_BITS, D)


def append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: CodePages,
    starts: Tensor,
    inv_freq: Tensor,
    positions: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    mscale: float,
    interleaved: bool,
) -> Tensor:
    """Code keys and values into their pages; gives the rotated queries."""
    tokens, heads, width = k.shape
    out, early = q.new_empty(q.shape), not_hopper(q.device) is None
    launch(rotate_and_append, (2 * heads + q.shape[1], tokens))(
        *(q, k, v, out, *(norms or (None, None)), inv_freq, positions),
        *(inv_freq.shape[0], float(mscale), float(eps), q.stride(1)),
        *(pages.key_codes, pages.key_norms, *levels_for(pages.key_bits, width, k.device)),
        *(pages.value_codes, pages.value_norms, *levels_for(pages.value_bits, width, k.device)),
        rotation_for(width, pages.seed, False, k.device)[0],
        *index_of(pages, starts),
        Q_HEADS=q.shape[1],
        HEADS=heads,
        D=width,
        KEY_BITS=pages.key_bits,
        VALUE_BITS=pages.value_bits,
        INTERLEAVED=interleaved,
        PAIRS=pages.arrangement is Arrangement.PAIRS,
        EARLY=early,
        num_warps=1,
        launch_pdl=early,
        **page_sizes(pages),
    )
    return out
