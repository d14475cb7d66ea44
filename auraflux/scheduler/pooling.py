"""Pooling: one vector of a prompt's hidden states, collected while its chunks are prefilled."""

from torch import Tensor


class Pooling:
    """The pooled hidden states of one prompt.

    kind    "last", "mean" or "cls"
    result  the prompt's embedding, once all chunks are computed
    """

    def __init__(self, kind: str):
        self.kind = kind
        self.result: Tensor | None = None
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

    def pooled(self) -> Tensor:
        """Return the pooled hidden states, [H] float32."""
        assert self._sum is not None, "no chunk was computed"
        return self._sum / self._tokens if self.kind == "mean" else self._sum

    def vector(self) -> bytes:
        """Return the embedding as float32 bytes."""
        assert self.result is not None, "the prompt is not computed"
        return self.result.float().cpu().numpy().astype("<f4").tobytes()
