"""`StateTile`: compile-time shape of kernels that run some state columns of a head through all tokens of a sequence."""

from typing import NamedTuple

from torch import Tensor

from auraflux.ops.gpu.sizes import power_of_two

COLUMNS = 16  # of the state, in a program's registers


class StateTile(NamedTuple):
    """Heads and widths of a state, and the tile of a program.

    heads, key_heads        value heads, and key heads that they share
    key_width, value_width  channels of a head
    rows, columns           of the tile: all key channels, padded, and some value channels
    """

    heads: int
    key_heads: int
    key_width: int
    value_width: int
    rows: int
    columns: int


def state_tile(state: Tensor, key_heads: int, least_rows: int = 1) -> StateTile:
    """Return the tile of a state [B, H, K, V]."""
    _, heads, key_width, value_width = state.shape
    return StateTile(heads, key_heads, key_width, value_width, max(least_rows, power_of_two(key_width)), COLUMNS)
