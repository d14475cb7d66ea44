"""What tensors are called: in a checkpoint, in a model, and which of them are treated apart by their names."""

import re
from collections.abc import Callable

Rename = Callable[[str], str | None]

MTP = re.compile(r"(?:^|\.)(mtp\..*)")  # what Qwen calls what predicts further tokens
# small matrices that choose experts or weigh them; mlx-lm holds some of them at 8 bits, and reads them dense everywhere
ROUTERS = re.compile(r"((mlp|block_sparse_moe)\.gate|shared_expert_gate|router(\.proj)?)\.weight$")


def ours(stored: str, rename: Rename, mtp: bool) -> str | None:
    """The model's name for a tensor of the checkpoint; None for those it has no use for."""
    name = rename(stored)
    if name is None and mtp and (found := MTP.search(stored)):
        return found[1]
    return name
