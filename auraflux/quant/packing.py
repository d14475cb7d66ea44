"""Codes in 32-bit words: a continuous little-endian bit stream along the last axis.

Code i of a row takes bits [i*bits, (i+1)*bits). With 2, 4 and 8 bits no code crosses a word boundary; with 3, 5 and 6 a code
may begin in one word and end in the next. Words are int32: only their bits matter, and torch can shift them.

In the lane layout (`QTensor.lanes`) no code of 3, 5 or 6 bits crosses bytes of different codes: byte c of a chunk's words holds
bits of codes c, c + 4, c + 8 … only. `LANE_FIELDS` gives their positions, so that one mask, or a shift or two, extracts as many
codes as a vector has bytes.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 32  # codes; they fill exactly `bits` words
SLAB = 1 << 18  # words that are rearranged at a time: temporaries fit the CPU cache


class BitField(NamedTuple):
    """Adjacent bits of a code: the word of its chunk, the lowest bit within a byte, and the number of bits."""

    word: int
    low: int
    size: int


def _one_field(words: range, bits: int, low: int = 0) -> list[tuple[BitField, ...]]:
    return [(BitField(word, low, bits),) for word in words]


# bits -> for each four of the 32 codes of a chunk, one in each byte of a word, their fields from the highest bits down.
# As many codes as fit have one field; the remaining bits of bytes hold the others
LANE_FIELDS: dict[int, tuple[tuple[BitField, ...], ...]] = {
    3: (
        *(field for word in range(3) for low in (0, 3) for field in _one_field(range(word, word + 1), 3, low)),
        (BitField(0, 6, 2), BitField(1, 7, 1)),
        (BitField(2, 6, 2), BitField(1, 6, 1)),
    ),
    5: (
        *_one_field(range(5), 5),
        (BitField(0, 5, 3), BitField(1, 6, 2)),
        (BitField(2, 5, 3), BitField(3, 6, 2)),
        (BitField(4, 5, 3), BitField(1, 5, 1), BitField(3, 5, 1)),
    ),
    6: (
        *_one_field(range(3), 6),
        tuple(BitField(word, 6, 2) for word in range(3)),
        *_one_field(range(3, 6), 6),
        tuple(BitField(word, 6, 2) for word in range(3, 6)),
    ),
}


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes into words.

    codes   [..., K]            integers in [0, 2**bits), K a multiple of 32
    returns [..., K*bits/32]    int32
    """
    # eight codes are `bits` whole bytes
    eights = codes.to(torch.int64).unflatten(-1, (-1, 8))
    joined = (eights << (bits * torch.arange(8, device=codes.device))).sum(-1)
    return joined[..., None].view(torch.uint8)[..., :bits].flatten(-2).contiguous().view(torch.int32)


def unpack(words: Tensor, bits: int) -> Tensor:
    """Unpack words to codes.

    words   [..., W]           int32, W a multiple of `bits`
    returns [..., W*32/bits]   uint8
    """
    chunks = words.unflatten(-1, (-1, bits)).to(torch.int64) & 0xFFFFFFFF
    codes = torch.empty(*chunks.shape[:-1], CHUNK, dtype=torch.uint8, device=words.device)
    for i in range(CHUNK):
        word, shift = divmod(i * bits, 32)
        value = chunks[..., word] >> shift
        if shift + bits > 32:
            value = value | chunks[..., word + 1] << (32 - shift)
        codes[..., i] = (value & (2**bits - 1)).to(torch.uint8)
    return codes.flatten(-2)


def to_lane_layout(words: Tensor, bits: int) -> Tensor:
    """Rearrange codes of 3, 5 and 6 bits to the lane layout; return words of other widths unchanged.

    words  int32 [..., W], W a multiple of `bits`
    """
    return _by_slabs(words, bits, _to_lanes) if bits in LANE_FIELDS else words


def from_lane_layout(words: Tensor, bits: int) -> Tensor:
    """Undo `to_lane_layout`."""
    return _by_slabs(words, bits, _from_lanes) if bits in LANE_FIELDS else words


def _by_slabs(words: Tensor, bits: int, change: Callable[[Tensor, int], Tensor]) -> Tensor:
    out = torch.empty_like(words, memory_format=torch.contiguous_format)
    if not words.is_meta:
        chunks, to = (t.reshape(-1, bits) for t in (words, out))
        step = SLAB // bits
        for first in range(0, len(chunks), step):
            to[first : first + step] = change(chunks[first : first + step].T.contiguous(), bits).T
    return out


def _to_lanes(chunks: Tensor, bits: int) -> Tensor:
    """Rearrange words of bit streams, [bits, N], to the lane layout."""
    made = torch.zeros_like(chunks)
    for number, fields in enumerate(LANE_FIELDS[bits]):
        codes, left = _take_four(chunks, bits, number), bits
        for field in fields:
            left -= field.size
            made[field.word] |= _shift(codes & _byte_mask(field.size, left) if len(fields) > 1 else codes, field.low - left)
    return made


def _from_lanes(chunks: Tensor, bits: int) -> Tensor:
    made = torch.zeros_like(chunks)
    for number, fields in enumerate(LANE_FIELDS[bits]):
        codes, left = torch.zeros_like(chunks[0]), bits
        for field in fields:
            left -= field.size
            codes |= _shift(chunks[field.word] & _byte_mask(field.size, field.low), left - field.low)
        _put_four(made, bits, number, codes)
    return made


def _byte_mask(count: int, low: int) -> int:
    """Return a mask of `count` bits of every byte of a word, as int32."""
    mask = (2**count - 1 << low) * 0x01010101
    return mask - (mask >> 31 << 32)


def _shift(words: Tensor, by: int) -> Tensor:
    """Shift words left, or right where `by` is negative; no set bit leaves its byte."""
    return words << by if by >= 0 else words >> -by & _byte_mask(8 + by, 0)


def _take_four(chunks: Tensor, bits: int, number: int) -> Tensor:
    """Extract four adjacent codes of a stream, one in each byte."""
    word, shift = divmod(4 * bits * number, 32)
    field = chunks[word] >> shift
    if shift + 4 * bits > 32:
        field = field & (2 ** (32 - shift) - 1) | chunks[word + 1] << (32 - shift)
    pair, one = 2 ** (2 * bits) - 1, 2**bits - 1
    field = field & pair | (field & pair << 2 * bits) << 16 - 2 * bits
    return field & one * 0x10001 | (field & (one << bits) * 0x10001) << 8 - bits


def _put_four(chunks: Tensor, bits: int, number: int, codes: Tensor) -> None:
    """Undo `_take_four`, in words that are 0 there."""
    pair, one = 2 ** (2 * bits) - 1, 2**bits - 1
    field = codes & one * 0x10001 | codes >> 8 - bits & (one << bits) * 0x10001
    field = field & pair | field >> 16 - 2 * bits & pair << 2 * bits
    word, shift = divmod(4 * bits * number, 32)
    chunks[word] |= field << shift
    if shift + 4 * bits > 32:
        chunks[word + 1] |= field >> 32 - shift
