"""Embeddings of images, which take the place of those of their tokens in a step."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Embeddings:
    """The embeddings of a step.

    rows    [N]     int64, tokens of the step, in host memory
    values  [N, H]
    """

    rows: Tensor
    values: Tensor

    @classmethod
    def joined(cls, parts: Sequence["Embeddings"]) -> "Embeddings | None":
        """Return the embeddings of several images together; None for none."""
        if len(parts) < 2:
            return parts[0] if parts else None
        return cls(torch.cat([part.rows for part in parts]), torch.cat([part.values for part in parts]))

    def put(self, x: Tensor) -> Tensor:
        """Put them in place of the embeddings of their tokens: [T, H]."""
        return x.index_copy(0, self.rows.to(x.device), self.values.to(x.device, x.dtype))


class EmbeddingBuffers:
    """Embeddings at fixed addresses, which a recorded step of T tokens reads.

    present  [T, 1]  bool, tokens with an embedding
    values   [T, H]
    """

    def __init__(self, present: Tensor, values: Tensor):
        self.present, self.values = present, values

    @classmethod
    def empty(cls, tokens: int, like: Embeddings, device: torch.device) -> "EmbeddingBuffers":
        """Make buffers for steps of up to so many tokens."""
        values = like.values.new_zeros(tokens, like.values.shape[1], device=device)
        return cls(torch.zeros(tokens, 1, dtype=torch.bool, device=device), values)

    def first(self, tokens: int) -> "EmbeddingBuffers":
        """Return the same memory for a step of so many tokens."""
        return EmbeddingBuffers(self.present[:tokens], self.values[:tokens])

    def write(self, found: Embeddings) -> None:
        """Set the embeddings of the next step."""
        rows = found.rows.to(self.values.device)
        self.present.zero_().index_fill_(0, rows, True)
        self.values.index_copy_(0, rows, found.values.to(self.values))

    def put(self, x: Tensor) -> Tensor:
        """Put them in place of the embeddings of their tokens: [T, H]."""
        return torch.where(self.present, self.values.to(x.dtype), x)
