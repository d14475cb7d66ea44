"""Pooling: one vector of a prompt's hidden states or logits, collected while its chunks are prefilled."""

from torch import Tensor


class Pooling:
    """The pooled hidden states of one prompt.

    kind  "last", "mean" or "cls"
    """

    def __init__(self, kind: str):
        self.kind = kind
        self._sum: Tensor | None = None
        self._tokens = 0

    def reset(self) -> None:
        """Forget all chunks: the prompt is computed from its start."""
        self._sum, self._tokens = None, 0

    def add(self, hidden: Tensor) -> None:
        """Add the next chunk's final hidden states, [T, H]."""
        if self.kind == "mean":
            total = hidden.float().sum(0)
            self._sum = total if self._sum is None else self._sum + total
        elif self.kind == "last" or self._sum is None:
            self._sum = hidden[-1 if self.kind == "last" else 0].float()
        self._tokens += len(hidden)

    def replace(self, logits: Tensor) -> None:
        """Take logits of the whole prompt in place of its hidden states."""
        self._sum, self._tokens = logits.float(), 1

    def vector(self) -> bytes:
        """Return the pooled vector as float32 bytes."""
        assert self._sum is not None, "no chunk was computed"
        pooled = self._sum / self._tokens if self.kind == "mean" else self._sum
        return pooled.cpu().numpy().astype("<f4").tobytes()
