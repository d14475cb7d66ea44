"""Key calibration: per-channel scale and mean that are removed from keys before quantization.

RoPE rotates the mean of keys from position to position. Over BLOCK positions it hardly moves, so a block has one centre, which
follows from the model's calibration vectors and the block's position: nothing is stored per token. A key is

    key = scale * dequantized + centre,    centre = cosine * along + sine * across

with the cosine and sine of every channel's angle in the middle of the block: 1 and 0 where a channel is not rotated. So a score
is ⟨scale * q, dequantized⟩ + ⟨q, centre⟩, and the second product is shared by the block.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from auraflux.errors import InputError
from auraflux.ops._dispatch import check_dense, check_dtype, check_shape
from auraflux.validation import check_fields

BLOCK = 64  # positions that share a centre


@dataclass(frozen=True, eq=False)
class Calibration:
    """Calibration vectors of one layer's keys.

    scale          [Hkv, D]     float32, above 0
    inverse        [Hkv, D]     float32, 1 / scale
    along, across  [Hkv, D]     float32, factors of the cosine and the sine
    table          [N, 2, D]    float32, cosine and sine in the middle of each block of positions, see `angle_table`
    rotated        number of rotated channels, the first ones; None for all
    interleaved    rotated pairs are neighbours
    """

    scale: Tensor
    inverse: Tensor
    along: Tensor
    across: Tensor
    table: Tensor
    rotated: int | None = None
    interleaved: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        check_dense(**tensors)
        for name, tensor in tensors.items():
            check_dtype(name, tensor, torch.float32)
        check_shape("scale", self.scale, None, None)
        for name in ("inverse", "along", "across"):
            check_shape(name, getattr(self, name), *self.scale.shape)
        check_shape("table", self.table, None, 2, self.scale.shape[1])

    @property
    def reach(self) -> int:
        """Number of positions that have centres."""
        return len(self.table) * BLOCK

    def check(self, heads: int, width: int, capacity: int) -> None:
        """Refuse vectors of another shape."""
        if self.scale.shape != (heads, width):
            raise InputError(f"'calibration' has vectors of shape {list(self.scale.shape)}; [{heads}, {width}] is needed.")
        if self.reach < capacity:
            raise InputError(f"'calibration' covers {self.reach} positions; the page table holds {capacity}.")

    def pairs(self) -> Tensor:
        """Pair the channels that rotate by the same angle: int32 [2, D / 2]; unrotated channels are paired together."""
        width = self.scale.shape[1]
        rotated = width if self.rotated is None else self.rotated
        half = rotated // 2
        turning = torch.arange(rotated).view(half, 2).T if self.interleaved else torch.arange(rotated).view(2, half)
        return torch.cat((turning, torch.arange(rotated, width).view(-1, 2).T), 1).int().contiguous()

    def centres(self, positions: Tensor) -> Tensor:
        """Return the centre removed from each position's key: float64 [..., Hkv, D]."""
        cosine, sine = self.table[positions.long() // BLOCK].double().unsqueeze(-3).unbind(-2)
        return cosine * self.along.double() + sine * self.across.double()

    def scaled(self, k: Tensor) -> Tensor:
        """Remove the scale, but not the centre, from keys [T, Hkv, D]: float32."""
        return (k.double() * self.inverse.double()).float()

    def reduced(self, k: Tensor, positions: Tensor) -> Tensor:
        """Remove centre and scale from keys [T, Hkv, D] at positions [T]: float32, rounded once."""
        return ((k.double() - self.centres(positions)) * self.inverse.double()).float()


def angle_table(frequencies: Tensor, blocks: int, width: int, interleaved: bool = False) -> Tensor:
    """Return cosine and sine of every channel's angle in the middle of each block: float32 [blocks, 2, width].

    frequencies  [R/2]  of the rotated channels, the first R of `width`
    interleaved  channels 2i and 2i + 1 make a pair; else i and i + R/2
    """
    pairs = len(frequencies)
    # always computed on the CPU, so that devices share one table
    with torch.device("cpu"):
        channel = torch.arange(2 * pairs)
        turning = frequencies.double().cpu()[channel // 2 if interleaved else channel % max(pairs, 1)]
        angles = torch.zeros(blocks, width, dtype=torch.float64)
        angles[:, : 2 * pairs] = (torch.arange(blocks).double()[:, None] * BLOCK + (BLOCK - 1) / 2) * turning
    return torch.stack((angles.cos(), angles.sin()), 1).float().to(frequencies.device)
