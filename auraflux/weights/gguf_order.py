"""The order in which llama.cpp's converter leaves a tensor, and the way back to Hugging Face's."""

import re
from typing import Any, NamedTuple

import torch
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.quant import QTensor
from auraflux.weights.stored import Stored

DELTA = re.compile(r"\.linear_attn\.(in_proj_\w+|conv1d|A_log|dt_bias|out_proj)")


class Order(NamedTuple):
    """Where the rows of a tensor, or runs of its columns, are to be found.

    rows     the row of the file for each row; None for all in order
    columns  the run of the file for each run of `span` columns; None likewise
    """

    rows: Tensor | None = None
    columns: Tensor | None = None
    span: int = 1

    def restore(self, found: Stored) -> Stored:
        """The tensor in Hugging Face's order."""
        if isinstance(found, QTensor):
            found = found if self.rows is None else found.take(self.rows)
            return found if self.columns is None else found.moved(self.columns, self.span)
        found = found if self.rows is None else found[self.rows]
        return found if self.columns is None else found.unflatten(-1, (-1, self.span))[..., self.columns, :].flatten(-2)


def halves(name: str, config: dict[str, Any], shape: tuple[int, ...]) -> Order:
    """The rows of q and k, of which a file has the two that are rotated together side by side."""
    found = re.search(r"\.([qk])_proj\.", name)
    if found is None:
        return Order()
    rows, heads = shape[0], config["num_attention_heads" if found[1] == "q" else "num_key_value_heads"]
    if rows % (2 * heads):
        raise FormatError(f"{name} has {rows} rows, which {heads} heads cannot share.")
    return Order(torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten())


def grouped(name: str, config: dict[str, Any], shape: tuple[int, ...]) -> Order:
    """The value heads of a delta layer, of which a file has the first of every key head before the second of any."""
    found = DELTA.search(name)
    if found is None:
        return Order()
    keys, values, width = (config[f"linear_{key}"] for key in ("num_key_heads", "num_value_heads", "value_head_dim"))
    heads, part = torch.arange(values).view(-1, keys).T.flatten(), found[1]
    span = 1 if part in ("in_proj_a", "in_proj_b", "A_log", "dt_bias") else width
    # queries and keys come before the values
    first = 2 * keys * config["linear_key_head_dim"] if part in ("in_proj_qkv", "conv1d") else 0
    size, wanted = shape[-1 if part == "out_proj" else 0], first + values * span
    if size != wanted:
        raise FormatError(f"{name} has {size} channels; {wanted} are needed for {keys} key heads and {values} value heads.")
    if part == "out_proj":
        return Order(columns=heads, span=span)
    moved = first + (heads[:, None] * span + torch.arange(span)).flatten()
    return Order(torch.cat([torch.arange(first), moved]))
