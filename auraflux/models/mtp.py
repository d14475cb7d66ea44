"""Multi-token prediction: a layer after the last that guesses the token after the next.

It is given what the model made of a token, as its head reads it, and the token that came next. Both are normed and joined by a
matrix, go through a layer like the others, and a norm; the model's own head then scores the token after. Given that result and
its own guess, it guesses on. Only distances between positions count, so a text may be given to it from anywhere on.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from auraflux.cache import Batch, Cache
from auraflux.ops import combine, linear, rms_norm
from auraflux.weights.names import Rename, ours
from auraflux.weights.stored import Checkpoint, Stored


@dataclass(frozen=True)
class Place:
    """Where a checkpoint has it; all that is below `beyond`, and not named here, is left out.

    layer   like the layer of number `like`
    """

    layer: str
    like: int
    token_norm: str
    hidden_norm: str
    joint: str
    norm: str
    beyond: tuple[str, ...]

    def is_in(self, checkpoint: Checkpoint, rename: Rename) -> bool:
        """Whether a checkpoint has it: many are published without."""
        return any(ours(name, rename, True) == f"{self.joint}.weight" for name in checkpoint.sizes())


def after_last(layers: int, extra: int, like: int) -> Place | None:
    """Where DeepSeek V3 and those after it have `extra` of them: numbered on from the last layer. The first is used."""
    if not extra:
        return None
    name = f"model.layers.{layers}"
    token_norm, hidden_norm, joint, norm = (f"{name}.{part}" for part in ("enorm", "hnorm", "eh_proj", "shared_head.norm"))
    beyond = tuple(f"model.layers.{number}." for number in range(layers, layers + extra))
    return Place(name, like, token_norm, hidden_norm, joint, norm, beyond)


@dataclass(frozen=True, eq=False)
class MTP:
    """The layer and what is around it.

    token_norm, hidden_norm, norm  [H]
    joint                          [H, 2 H]
    """

    token_norm: Tensor
    hidden_norm: Tensor
    joint: Stored
    layer: Callable[[Tensor, Tensor | None, Batch, Any], tuple[Tensor, Tensor | None]]
    norm: Tensor
    eps: float

    def __call__(self, embedded: Tensor, hidden: Tensor, batch: Batch, cache: Cache) -> Tensor:
        """Run pairs of a batch, a token's result and the next token's embedding, both [T, H]: what the head scores, [T, H]."""
        return self.through(self.side_by_side(embedded, hidden), batch, cache)

    def side_by_side(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Norm both parts of pairs: [T, 2 H]."""
        return torch.cat([rms_norm(embedded, self.token_norm, self.eps), rms_norm(hidden, self.hidden_norm, self.eps)], 1)

    def through(self, pairs: Tensor, batch: Batch, cache: Cache) -> Tensor:
        """[T, 2 H] -> [T, H]."""
        x, delta = self.layer(linear(pairs, self.joint), None, batch, cache.layers[0])
        return rms_norm(x if delta is None else combine(x, delta), self.norm, self.eps)
