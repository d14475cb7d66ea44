"""Tensor names: mapping from checkpoint to model, and patterns that select special tensors."""

import re
from collections.abc import Callable

Rename = Callable[[str], str | None]

MTP = re.compile(r"(?:^|\.)(mtp\..*)")  # Qwen's MTP head
# routers and shared-expert gates stay dense; mlx-lm stores some of them at 8 bits
ROUTERS = re.compile(r"((mlp|block_sparse_moe)\.gate|shared_expert_gate|router(\.proj)?)\.weight$")


def ours(stored: str, rename: Rename, mtp: bool) -> str | None:
    """Return the model's name for a checkpoint tensor; None if the model does not use it."""
    name = rename(stored)
    if name is None and mtp and (found := MTP.search(stored)):
        return found[1]
    return name
