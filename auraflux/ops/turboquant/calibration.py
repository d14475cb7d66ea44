"""What the codes of keys leave out: a scale for every channel, and the mean of keys over a block of positions.

Rotary positions turn a key's mean from position to position. Over BLOCK positions it hardly moves, so a block has one centre,
and it follows from the vectors of the model and from where the block lies: nothing is stored with a token. A key is

    key = scale * (what its code stands for) + centre,    centre = cosine * along + sine * across

with the cosine and sine of every channel's angle in the middle of the block; both are 1 and 0 where a channel does not turn.
So a score is ⟨scale * q, code⟩ + ⟨q, centre⟩, and the second product is one for the whole block.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from auraflux.errors import InputError
from auraflux.kinds import check_fields
from auraflux.ops._dispatch import check_dense, check_dtype, check_shape

BLOCK = 64  # positions that have one centre


@dataclass(frozen=True, eq=False)
class Calibration:
    """The vectors of one layer's keys.

    scale          [Hkv, D]     float32, above 0
    inverse        [Hkv, D]     float32, 1 / scale
    along, across  [Hkv, D]     float32, what meets the cosine and the sine
    table          [N, 2, D]    float32, cosine and sine in the middle of each block of positions, see `angle_table`
    rotated        how many channels turn, the first ones; None for all
    interleaved    whether neighbours turn together
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
        """Positions for which there are centres."""
        return len(self.table) * BLOCK

    def check(self, heads: int, width: int, capacity: int) -> None:
        """Refuse vectors of another layer's shape."""
        if self.scale.shape != (heads, width):
            raise InputError(f"'calibration' has vectors of shape {list(self.scale.shape)}; [{heads}, {width}] is needed.")
        if self.reach < capacity:
            raise InputError(f"'calibration' reaches {self.reach} positions; the page table has room for {capacity}.")

    def pairs(self) -> Tensor:
        """Pair the channels that turn by the same angle: int32 [2, D / 2]; those that do not turn with each other."""
        width = self.scale.shape[1]
        rotated = width if self.rotated is None else self.rotated
        half = rotated // 2
        turning = torch.arange(rotated).view(half, 2).T if self.interleaved else torch.arange(rotated).view(2, half)
        return torch.cat((turning, torch.arange(rotated, width).view(-1, 2).T), 1).int().contiguous()

    def centres(self, positions: Tensor) -> Tensor:
        """Give the centre that each position's key is coded around: float64 [..., Hkv, D]."""
        cosine, sine = self.table[positions.long() // BLOCK].double().unsqueeze(-3).unbind(-2)
        return cosine * self.along.double() + sine * self.across.double()

    def scaled(self, k: Tensor) -> Tensor:
        """Take the scale, and no centre, out of keys [T, Hkv, D]: float32."""
        return (k.double() * self.inverse.double()).float()

    def reduced(self, k: Tensor, positions: Tensor) -> Tensor:
        """Give what is coded of keys [T, Hkv, D] at positions [T], float32: rounded once, whatever the order of sums."""
        return ((k.double() - self.centres(positions)) * self.inverse.double()).float()


def angle_table(frequencies: Tensor, blocks: int, width: int, interleaved: bool = False) -> Tensor:
    """Give cosine and sine of every channel's angle in the middle of each block: float32 [blocks, 2, width].

    frequencies  [R/2]  of the rotated channels, the first R of `width`
    interleaved  channels 2i and 2i + 1 make a pair; else i and i + R/2
    """
    pairs = len(frequencies)
    # always by the same processor, so that devices share one table
    with torch.device("cpu"):
        channel = torch.arange(2 * pairs)
        turning = frequencies.double().cpu()[channel // 2 if interleaved else channel % max(pairs, 1)]
        angles = torch.zeros(blocks, width, dtype=torch.float64)
        angles[:, : 2 * pairs] = (torch.arange(blocks).double()[:, None] * BLOCK + (BLOCK - 1) / 2) * turning
    return torch.stack((angles.cos(), angles.sin()), 1).float().to(frequencies.device)
