"""KV cache quantization of other engines, as functions that quantize and dequantize vectors.

Scales are rounded to 16 bits, as those engines store them; the arithmetic is float32.
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
    """The KV cache of another engine.

    title          its name in tables
    round          quantize and dequantize vectors [..., D] independently
    bits           per coordinate, scales included
    group          the head width must be a multiple of this
    over           tokens per group of per-channel key quantization; None for per-token quantization
    recent_window  most recent tokens in full precision
    """

    title: str
    round: Callable[[Tensor], Tensor]
    bits: float
    group: int = 1
    over: int | None = None
    recent_window: int = 0

    def refusal(self, width: int) -> str | None:
        """Return why heads of this width are not supported; None if they are."""
        return f"its heads are {width} wide, and groups of {self.group} do not divide that." if width % self.group else None


def fp8(x: Tensor) -> Tensor:
    """Round to e4m3 floats without a scale; larger values saturate."""
    return x.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).to(x.dtype)


def q4_0(x: Tensor) -> Tensor:
    """Round to llama.cpp's q4_0: 32 numbers share a scale, and the one of largest magnitude becomes code -8."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scale = largest / -8
    inverse = torch.where(scale == 0, 0.0, 1 / scale)
    codes = (blocks * inverse + 8.5).trunc().clamp(0, 15) - 8
    return (codes * scale.half().float()).flatten(-2).to(x.dtype)


def hadamard(x: Tensor) -> Tensor:
    """Apply the normalised Walsh-Hadamard transform, an involution, over the largest power of two that divides the width."""
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
    """Return the rounding of KIVI: uniform steps from the minimum to the maximum of 32 numbers."""

    def rounded(x: Tensor) -> Tensor:
        groups = x.float().unflatten(-1, (-1, BLOCK))
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        low, step = low.half().float(), ((high - low) / (2**bits - 1)).half().float()
        codes = ((groups - low) / torch.where(step == 0, 1.0, step)).clamp(0, 2**bits - 1).round()
        return (codes * step + low).flatten(-2).to(x.dtype)

    return rounded


def mlx(bits: int) -> Callable[[Tensor], Tensor]:
    """Return the rounding of mlx: affine groups of 64."""

    def rounded(x: Tensor) -> Tensor:
        codes = quantize(x.flatten(0, -2).half(), bits, MLX_GROUP)
        return codes.dequantize(torch.float32).view(x.shape).to(x.dtype)

    return rounded


def _kivi_peer(bits: int) -> Peer:
    scales = 32 / BLOCK  # a step and a minimum of 16 bits each
    return Peer(f"KIVI, {bits} bits", kivi(bits), bits + scales, BLOCK, over=BLOCK, recent_window=BLOCK)


PEERS = {
    "fp8": Peer("FP8 e4m3", fp8, 8),
    "q4_0": Peer("llama.cpp q4_0", q4_0, 4.5, BLOCK),
    "q4_0-hadamard": Peer("llama.cpp q4_0, Hadamard", q4_0_hadamard, 4.5, BLOCK),
    "kivi4": _kivi_peer(4),
    "kivi2": _kivi_peer(2),
    "mlx4": Peer("mlx, 4 bits, groups of 64", mlx(4), 4.5, MLX_GROUP),
}
