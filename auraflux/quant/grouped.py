"""AWQ, GPTQ and compressed-tensors weights, scale * (code - zero), as `QTensor`s.

With bias = -scale * zero this is MLX's code * scale + bias. A 16-bit scale times a code or zero of at most 8 bits fits float32
without rounding, and so does their difference, so the conversion is exact. The bias also fits 16 bits where the zero is a power
of two, as in all symmetric formats.
"""

import torch
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.quant import affine
from auraflux.quant.packing import unpack
from auraflux.quant.qtensor import QTensor

DENSE_BITS = 32


def kernel_group(group_index: Tensor) -> int | None:
    """Return the largest kernel group size whose groups each have one scale; None if there is none.

    group_index  [K]  scale group of each input
    """
    for group in sorted(affine.GROUPS, reverse=True):
        if len(group_index) % group == 0 and bool((group_index.view(-1, group) == group_index[::group, None]).all()):
            return group
    return None


def group_indexes(width: int, group: int) -> Tensor:
    """Return the group of each input for consecutive groups, the last of which may be shorter."""
    return torch.arange(width) // group


def unpack_first(words: Tensor, bits: int, count: int) -> Tensor:
    """Unpack the first `count` codes of a bit stream along the last axis, see `packing`; any number of words.

    words   [..., W]      int32
    returns [..., count]  uint8
    """
    missing = -words.shape[-1] % bits
    if missing:
        words = torch.cat([words, words.new_zeros(*words.shape[:-1], missing)], -1)
    return unpack(words, bits)[..., :count]


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack 4-bit codes into words: uint8 [N, K] -> int32 [N, K/8]."""
    return (codes[:, 0::2] | codes[:, 1::2] << 4).contiguous().view(torch.int32)


def from_codes(
    packed: Tensor, scales: Tensor, zeros: Tensor, bits: int, group_index: Tensor, symmetric: bool
) -> QTensor | Tensor:
    """Return scale * (code - zero) as a QTensor, or in float32 where groups match no kernel group size.

    packed       int32 [N, ceil(K*bits/32)]
    scales       [N, G]  bf16, f16 or f32
    zeros        [N, G]  integers
    group_index  [K]     scale group of each input, below G
    """
    if scales.dtype not in affine.SCALE_DTYPES:
        raise FormatError(f"its scales have dtype {scales.dtype}; bfloat16, float16 or float32 is needed.")
    if not bool(torch.isfinite(scales.float() * 2**bits).all()):
        raise FormatError("some of its scales are not finite, or too large.")
    rows, width = packed.shape[0], len(group_index)
    group = kernel_group(group_index)
    if group is None:
        codes = unpack_first(packed, bits, width).float()
        return (codes - zeros.float()[:, group_index]) * scales.float()[:, group_index]
    selected = group_index[::group]
    scales = scales[:, selected].contiguous()
    biases = scales.float() * -zeros[:, selected].float()
    # asymmetric formats always use float32 biases: otherwise experts of one layer could differ in dtype
    if symmetric and torch.equal(biases.to(scales.dtype).float(), biases):
        biases = biases.to(scales.dtype)
    return QTensor(packed.contiguous(), scales.to(biases.dtype), biases, bits, group, (rows, width))


def memory_bits(bits: int, group: int | None, scale_dtype: torch.dtype, symmetric: bool) -> float:
    """Return the bits per weight of `from_codes`, scales and biases included."""
    if group is None:
        return DENSE_BITS
    return bits + 2 * (scale_dtype.itemsize * 8 if symmetric else 32) / group
