"""`Pair`: the two matrices of all adapters of one weight, as the op `add_lora` reads them."""

from typing import NamedTuple

import torch
from torch import Tensor


class LowRank(NamedTuple):
    """One adapter's change of one weight [N, K]: b @ a.

    a  [R, K]
    b  [N, R]
    """

    a: Tensor
    b: Tensor


class Pair(NamedTuple):
    """All adapters' changes of one weight; shorter ranks, and adapters without one, are filled with zeros.

    a  [S, R, K]
    b  [S, R, N]
    """

    a: Tensor
    b: Tensor


def stack(found: dict[int, LowRank], count: int, device: torch.device, dtype: torch.dtype) -> Pair:
    """Stack the changes of one weight by adapter number; `count` is the number of adapters."""
    rank, first = max(len(each.a) for each in found.values()), next(iter(found.values()))
    a, b = torch.zeros(count, rank, first.a.shape[1]), torch.zeros(count, rank, len(first.b))
    for number, each in found.items():
        a[number, : len(each.a)], b[number, : len(each.a)] = each.a.float(), each.b.float().T
    return Pair(a.to(device, dtype), b.to(device, dtype))
