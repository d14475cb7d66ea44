"""Codes in 32-bit words: a continuous little-endian bit stream along the last axis.

Code i of a row takes bits [i*bits, (i+1)*bits). With 2, 4 and 8 bits a word holds whole codes; with 3, 5 and 6 a code may
begin in one word and end in the next. Words are int32 here: only their bits matter, and torch can shift them.

Where rows lie side by side (`QTensor.lanes`) no code of 3, 5 or 6 bits lies across words: those of a chunk are in the same
words, but byte c of these holds bits of codes c, c + 4, c + 8 … only. `PLACES` says where, so that one mask, or a shift or two,
takes as many codes out as a vector has bytes.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 32  # codes; they fill exactly `bits` words
SLAB = 1 << 18  # words that are rearranged at a time: what they need besides input and output stays in the processor's cache


class Piece(NamedTuple):
    """Adjacent bits of a code: in which word of its chunk, the lowest of them in a byte, and how many."""

    word: int
    low: int
    size: int


def _whole(words: range, bits: int, low: int = 0) -> list[tuple[Piece, ...]]:
    return [(Piece(word, low, bits),) for word in words]


# bits -> for each four of the 32 codes of a chunk, one in each byte of a word, their pieces from the highest bits down.
# As many codes as fit are whole; the bits above them make the others
PLACES: dict[int, tuple[tuple[Piece, ...], ...]] = {
    3: (
        *(whole for word in range(3) for low in (0, 3) for whole in _whole(range(word, word + 1), 3, low)),
        (Piece(0, 6, 2), Piece(1, 7, 1)),
        (Piece(2, 6, 2), Piece(1, 6, 1)),
    ),
    5: (
        *_whole(range(5), 5),
        (Piece(0, 5, 3), Piece(1, 6, 2)),
        (Piece(2, 5, 3), Piece(3, 6, 2)),
        (Piece(4, 5, 3), Piece(1, 5, 1), Piece(3, 5, 1)),
    ),
    6: (
        *_whole(range(3), 6),
        tuple(Piece(word, 6, 2) for word in range(3)),
        *_whole(range(3, 6), 6),
        tuple(Piece(word, 6, 2) for word in range(3, 6)),
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
    """Give the codes of packed words.

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


def placed(words: Tensor, bits: int) -> Tensor:
    """Move codes to their `PLACES`; words whose codes have none are given as they are.

    words  int32 [..., W], W a multiple of `bits`
    """
    return _by_slabs(words, bits, _place) if bits in PLACES else words


def unplaced(words: Tensor, bits: int) -> Tensor:
    """Undo `placed`."""
    return _by_slabs(words, bits, _unplace) if bits in PLACES else words


def _by_slabs(words: Tensor, bits: int, change: Callable[[Tensor, int], Tensor]) -> Tensor:
    out = torch.empty_like(words, memory_format=torch.contiguous_format)
    if not words.is_meta:
        chunks, to = (t.reshape(-1, bits) for t in (words, out))
        step = SLAB // bits
        for first in range(0, len(chunks), step):
            to[first : first + step] = change(chunks[first : first + step].T.contiguous(), bits).T
    return out


def _place(chunks: Tensor, bits: int) -> Tensor:
    """[bits, N] words of streams -> as many with codes in their places."""
    made = torch.zeros_like(chunks)
    for number, pieces in enumerate(PLACES[bits]):
        codes, left = _four(chunks, bits, number), bits
        for piece in pieces:
            left -= piece.size
            made[piece.word] |= _moved(codes & _bytes(piece.size, left) if len(pieces) > 1 else codes, piece.low - left)
    return made


def _unplace(chunks: Tensor, bits: int) -> Tensor:
    made = torch.zeros_like(chunks)
    for number, pieces in enumerate(PLACES[bits]):
        codes, left = torch.zeros_like(chunks[0]), bits
        for piece in pieces:
            left -= piece.size
            codes |= _moved(chunks[piece.word] & _bytes(piece.size, piece.low), left - piece.low)
        _put_four(made, bits, number, codes)
    return made


def _bytes(count: int, low: int) -> int:
    """So many bits of every byte of a word, as int32."""
    mask = (2**count - 1 << low) * 0x01010101
    return mask - (mask >> 31 << 32)


def _moved(words: Tensor, by: int) -> Tensor:
    """Words shifted to the left, or to the right where less than 0; no set bit leaves its byte."""
    return words << by if by >= 0 else words >> -by & _bytes(8 + by, 0)


def _four(chunks: Tensor, bits: int, number: int) -> Tensor:
    """Four adjacent codes of a stream, one in each byte."""
    word, shift = divmod(4 * bits * number, 32)
    field = chunks[word] >> shift
    if shift + 4 * bits > 32:
        field = field & (2 ** (32 - shift) - 1) | chunks[word + 1] << (32 - shift)
    pair, one = 2 ** (2 * bits) - 1, 2**bits - 1
    field = field & pair | (field & pair << 2 * bits) << 16 - 2 * bits
    return field & one * 0x10001 | (field & (one << bits) * 0x10001) << 8 - bits


def _put_four(chunks: Tensor, bits: int, number: int, codes: Tensor) -> None:
    """Undo `_four`, in words that are 0 there."""
    pair, one = 2 ** (2 * bits) - 1, 2**bits - 1
    field = codes & one * 0x10001 | codes >> 8 - bits & (one << bits) * 0x10001
    field = field & pair | field >> 16 - 2 * bits & pair << 2 * bits
    word, shift = divmod(4 * bits * number, 32)
    chunks[word] |= field << shift
    if shift + 4 * bits > 32:
        chunks[word + 1] |= field >> 32 - shift
