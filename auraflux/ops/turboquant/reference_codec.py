"""The codec: vectors as a norm and one code per rotated coordinate, and back."""

import torch
from torch import Tensor

from auraflux.errors import InputError
from auraflux.ops._dispatch import check_dense, check_dtype, check_shape, op
from auraflux.ops.attention.pages import DTYPES
from auraflux.ops.turboquant.codebook import Codebook, check_bits, codebook, nearest
from auraflux.ops.turboquant.pages import pack, row_words, unpack
from auraflux.ops.turboquant.rotation import check_rotation, hadamard, rotation


def _check_rotate(x: Tensor, seed: int, inverse: bool = False) -> None:
    check_dense(x=x)
    check_dtype("x", x, *DTYPES)
    if x.ndim == 0:
        raise InputError("'x' has no axes; [..., D] is needed.")
    check_rotation(x.shape[-1], seed)


@op(origins=("fwht_shared",), check=_check_rotate)
def rotate(x: Tensor, seed: int, inverse: bool = False) -> Tensor:
    """Rotate vectors by the rotation of a seed, or back.

    x       [..., D]  D from 8 to 1024
    returns [..., D]  in x's dtype
    """
    found = rotation(x.shape[-1], seed, x.device)
    if found.signs is not None:
        rotated = hadamard(x.float()) * found.signs if inverse else hadamard(x.float() * found.signs)
    else:
        assert found.matrix is not None
        matrix = found.matrix if inverse else found.matrix.T
        # sums in float64, rounded once: the result's codes do not depend on the order of summation
        rotated = (x.double() @ matrix.double()).float()
    return rotated.to(x.dtype)


def _check_encode(x: Tensor, bits: int, seed: int, levels: Codebook | None = None) -> None:
    _check_rotate(x, seed)
    check_bits("bits", bits)
    if levels is not None:
        levels.check("levels", bits, x)


@op(check=_check_encode)
def encode(x: Tensor, bits: int, seed: int, levels: Codebook | None = None) -> tuple[Tensor, Tensor]:
    """Quantize the rotated direction of each vector, and return the norm that restores its length.

    x       [..., D]
    levels  explicit codebook; None for the default one
    returns (codes int32 [..., ceil(D * bits / 32)], norms float32 [...]); a vector of zeros has norm 0
    """
    # float64 holds the squares of every float32, and its sums do not depend on their order once rounded
    wide = x.double()
    length = wide.square().sum(-1, keepdim=True).sqrt()
    unit = torch.where(length == 0, 0.0, wide * (1 / length)).float()
    codes, length = nearest(rotate.reference(unit, seed), bits, levels), length.squeeze(-1)
    rounded = codebook(bits, x.shape[-1], x.device, levels)[codes].double().square().sum(-1).sqrt()
    # all levels of a row may be 0 with an explicit codebook
    return pack(codes, bits), torch.where(rounded == 0, length * 0, length / rounded).float()


def _check_decode(codes: Tensor, norms: Tensor, bits: int, width: int, seed: int, levels: Codebook | None = None) -> None:
    check_dense(codes=codes, norms=norms)
    check_bits("bits", bits)
    check_rotation(width, seed)
    check_dtype("codes", codes, torch.int32)
    check_dtype("norms", norms, torch.float32)
    check_shape("codes", codes, *norms.shape, row_words(bits, width))
    if levels is not None:
        levels.check("levels", bits, codes)


@op(check=_check_decode)
def decode(codes: Tensor, norms: Tensor, bits: int, width: int, seed: int, levels: Codebook | None = None) -> Tensor:
    """Dequantize codes and norms to vectors.

    codes   [..., words]  int32
    norms   [...]         float32
    levels  explicit codebook; None for the default one
    returns [..., D]      float32
    """
    rows = codebook(bits, width, codes.device, levels)[unpack(codes, bits, width)]
    return rotate.reference(rows, seed, inverse=True) * norms.unsqueeze(-1)
