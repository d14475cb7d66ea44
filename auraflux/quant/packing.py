"""Codes in 32-bit words: a continuous little-endian bit stream along the last axis.

Code i of a row takes bits [i*bits, (i+1)*bits). With 2, 4 and 8 bits a word holds whole codes; with 3, 5 and 6 a code may
begin in one word and end in the next. Words are int32 here: only their bits matter, and torch can shift them.
"""

import torch
from torch import Tensor

CHUNK = 32  # codes; they fill exactly `bits` words


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
