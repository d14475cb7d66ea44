"""How other engines round keys and values before they keep them, as functions from vectors to what would be read back.

Scales are rounded to the 16 bits in which those engines hold them; the arithmetic is float32.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from auraflux.quant import quantize

E4M3_MAX = 448.0
BLOCK = 32  # of q4_0, and the tokens or channels of one scale of KIVI
MLX_GROUP = 64


@dataclass(frozen=True)
class Peer:
    """A cache of another engine.

    title   what it is
    round   vectors [..., D] -> what is read back, each vector by itself
    bits    of one coordinate, its share of the scales included
    group   what a head's width must be a multiple of
    over    tokens over which keys are rounded, channel by channel; None where each key is rounded by itself
    newest  positions nearest to a query that it reads uncompressed
    """

    title: str
    round: Callable[[Tensor], Tensor]
    bits: float
    group: int = 1
    over: int | None = None
    newest: int = 0

    def refusal(self, width: int) -> str | None:
        """Say why heads of this width cannot be rounded so; None if they can."""
        return f"its heads are {width} wide, and groups of {self.group} do not divide that." if width % self.group else None


def fp8(x: Tensor) -> Tensor:
    """Round to 8-bit floats with 4 bits of exponent, without a scale; what is too large becomes the largest."""
    return x.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).to(x.dtype)


def q4_0(x: Tensor) -> Tensor:
    """Round to llama.cpp's q4_0: 32 numbers share a scale, and the largest of them in size becomes code -8."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scale = largest / -8
    inverse = torch.where(scale == 0, 0.0, 1 / scale)
    codes = (blocks * inverse + 8.5).trunc().clamp(0, 15) - 8
    return (codes * scale.half().float()).flatten(-2).to(x.dtype)


def hadamard(x: Tensor) -> Tensor:
    """Apply the normalised Walsh-Hadamard transform, its own inverse, over the largest power of two that divides the width."""
    size = x.shape[-1] & -x.shape[-1]
    parts = x.float().unflatten(-1, (-1, size))
    step = 1
    while step < size:
        pairs = parts.unflatten(-1, (-1, 2, step))
        low, high = pairs.unbind(-2)
        parts = torch.stack([low + high, low - high], -2).flatten(-3)
        step *= 2
    return (parts * size**-0.5).flatten(-2).to(x.dtype)


def q4_0_hadamard(x: Tensor) -> Tensor:
    """Round to q4_0 after a Hadamard transform, and transform back."""
    return hadamard(q4_0(hadamard(x)))


def kivi(bits: int) -> Callable[[Tensor], Tensor]:
    """Make the rounding of KIVI: from the least to the largest of 32 numbers in equal steps."""

    def rounded(x: Tensor) -> Tensor:
        groups = x.float().unflatten(-1, (-1, BLOCK))
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        low, step = low.half().float(), ((high - low) / (2**bits - 1)).half().float()
        codes = ((groups - low) / torch.where(step == 0, 1.0, step)).clamp(0, 2**bits - 1).round()
        return (codes * step + low).flatten(-2).to(x.dtype)

    return rounded


def mlx(bits: int) -> Callable[[Tensor], Tensor]:
    """Make the rounding of mlx: affine groups of 64."""

    def rounded(x: Tensor) -> Tensor:
        codes = quantize(x.flatten(0, -2).half(), bits, MLX_GROUP)
        return codes.dequantize(torch.float32).view(x.shape).to(x.dtype)

    return rounded


def _kivi_peer(bits: int) -> Peer:
    scales = 32 / BLOCK  # a step and a least number of 16 bits each
    return Peer(f"KIVI, {bits} bits", kivi(bits), bits + scales, BLOCK, over=BLOCK, newest=BLOCK)


PEERS = {
    "fp8": Peer("FP8 e4m3", fp8, 8),
    "q4_0": Peer("llama.cpp q4_0", q4_0, 4.5, BLOCK),
    "q4_0-hadamard": Peer("llama.cpp q4_0, Hadamard", q4_0_hadamard, 4.5, BLOCK),
    "kivi4": _kivi_peer(4),
    "kivi2": _kivi_peer(2),
    "mlx4": Peer("mlx, 4 bits, groups of 64", mlx(4), 4.5, MLX_GROUP),
}
