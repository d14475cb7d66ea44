"""Multi-token prediction (MTP): a decoder layer after the last that predicts the token after the next.

Its input is a token's final hidden state and the embedding of the next token. Both are normalised, projected together to the
hidden width, and run through a layer and a norm; the model's own head then gives the logits of the token after. From its output
and its own draft token it predicts the next one. Only distances between positions matter, so a sequence may start anywhere.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from auraflux.adapters.linears import linear
from auraflux.cache import Batch, Cache
from auraflux.ops import combine, rms_norm
from auraflux.weights.formats.stored import Checkpoint, Stored
from auraflux.weights.names import Rename, ours


@dataclass(frozen=True)
class MTPNames:
    """The names of an MTP head in a checkpoint.

    layer     its layer, built as the layer of number `like`
    prefixes  of all MTP tensors; those not named here are skipped
    """

    layer: str
    like: int
    token_norm: str
    hidden_norm: str
    projection: str
    norm: str
    prefixes: tuple[str, ...]

    def is_in(self, checkpoint: Checkpoint, rename: Rename) -> bool:
        """Return True if a checkpoint has the MTP head: many are published without."""
        return any(ours(name, rename, True) == f"{self.projection}.weight" for name in checkpoint.sizes())


def after_last(layers: int, extra: int, like: int) -> MTPNames | None:
    """Return the names of the first of `extra` MTP heads that DeepSeek V3 and its relatives number on from the last layer."""
    if not extra:
        return None
    name = f"model.layers.{layers}"
    token_norm, hidden_norm, projection, norm = (f"{name}.{part}" for part in ("enorm", "hnorm", "eh_proj", "shared_head.norm"))
    prefixes = tuple(f"model.layers.{number}." for number in range(layers, layers + extra))
    return MTPNames(name, like, token_norm, hidden_norm, projection, norm, prefixes)


@dataclass(frozen=True, eq=False)
class MTPHead:
    """An MTP head: input norms, projection, decoder layer and output norm.

    token_norm, hidden_norm, norm  [H]
    projection                     [H, 2 H]
    """

    token_norm: Tensor
    hidden_norm: Tensor
    projection: Stored
    layer: Callable[[Tensor, Tensor | None, Batch, Any], tuple[Tensor, Tensor | None]]
    norm: Tensor
    eps: float

    def __call__(self, embedded: Tensor, hidden: Tensor, batch: Batch, cache: Cache) -> Tensor:
        """Run hidden states and the next tokens' embeddings, both [T, H] -> the head's input, [T, H]."""
        return self.forward(self.join_inputs(embedded, hidden), batch, cache)

    def join_inputs(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Normalise and concatenate embeddings and hidden states: [T, 2 H]."""
        return torch.cat([rms_norm(embedded, self.token_norm, self.eps), rms_norm(hidden, self.hidden_norm, self.eps)], 1)

    def forward(self, joined: Tensor, batch: Batch, cache: Cache) -> Tensor:
        """Run joined inputs: [T, 2 H] -> [T, H]."""
        x, delta = self.layer(linear(joined, self.projection), None, batch, cache.layers[0])
        return rms_norm(x if delta is None else combine(x, delta), self.norm, self.eps)
