"""Row and column permutations that undo those of llama.cpp's converter."""

import re
from typing import Any, NamedTuple

import torch
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.quant import QTensor
from auraflux.weights.formats.stored import Stored

DELTA = re.compile(r"\.linear_attn\.(in_proj_\w+|conv1d|A_log|dt_bias|out_proj)")


class Order(NamedTuple):
    """Permutation of a tensor's rows or column runs.

    rows     row in the file for each row; None for the file's order
    columns  run in the file for each run of `span` columns; None for the file's order
    """

    rows: Tensor | None = None
    columns: Tensor | None = None
    span: int = 1

    def restore(self, found: Stored) -> Stored:
        """Return the tensor in Hugging Face's order."""
        if isinstance(found, QTensor):
            found = found if self.rows is None else found.take(self.rows)
            return found if self.columns is None else found.permute_columns(self.columns, self.span)
        found = found if self.rows is None else found[self.rows]
        return found if self.columns is None else found.unflatten(-1, (-1, self.span))[..., self.columns, :].flatten(-2)


def rope_half_rows(name: str, config: dict[str, Any], shape: tuple[int, ...]) -> Order:
    """Return the row order of q and k, whose rotated pairs are adjacent in the file."""
    found = re.search(r"\.([qk])_proj\.", name)
    if found is None:
        return Order()
    rows, heads = shape[0], config["num_attention_heads" if found[1] == "q" else "num_key_value_heads"]
    if rows % (2 * heads):
        raise FormatError(f"{name} has {rows} rows, which is not a multiple of {heads} heads.")
    return Order(torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten())


def grouped_value_heads(name: str, config: dict[str, Any], shape: tuple[int, ...]) -> Order:
    """Return the value-head order of a gated delta layer, which the file interleaves across key heads."""
    found = DELTA.search(name)
    if found is None:
        return Order()
    keys, values, width = (config[f"linear_{key}"] for key in ("num_key_heads", "num_value_heads", "value_head_dim"))
    heads, part = torch.arange(values).view(-1, keys).T.flatten(), found[1]
    span = 1 if part in ("in_proj_a", "in_proj_b", "A_log", "dt_bias") else width
    # queries and keys precede the values
    first = 2 * keys * config["linear_key_head_dim"] if part in ("in_proj_qkv", "conv1d") else 0
    size, wanted = shape[-1 if part == "out_proj" else 0], first + values * span
    if size != wanted:
        raise FormatError(f"{name} has {size} channels; {wanted} are needed for {keys} key heads and {values} value heads.")
    if part == "out_proj":
        return Order(columns=heads, span=span)
    value_rows = first + (heads[:, None] * span + torch.arange(span)).flatten()
    return Order(torch.cat([torch.arange(first), value_rows]))
