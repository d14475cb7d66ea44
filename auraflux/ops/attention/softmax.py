"""Masked softmax shared by the reference implementations."""

import torch
from torch import Tensor


def visible(
    new: int, length: int, first: int, last: int, window: int | None, device: torch.device, ends: Tensor | None = None
) -> Tensor:
    """Return which of the positions [first, last) each of the last `new` tokens of a sequence sees: [new, last - first].

    ends  [new]  the position before which each token sees; None for the one after its own
    """
    position = torch.arange(length - new, length, device=device)[:, None]
    key = torch.arange(first, last, device=device)
    seen = key <= position if ends is None else key < ends[:, None]
    return seen if window is None else seen & (key > position - window)


def weigh(scores: Tensor, values: Tensor, seen: Tensor, sink: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return sums of exp(score - largest score) * value, the largest score, and the sums of weights.

    scores   [.., n, L]
    values   [.., L, D]
    seen     [n, L]      from `visible`
    sink     [.., 1, 1]  score of one more key whose value is 0
    returns  ([.., n, D], [.., n, 1], [.., n, 1])
    """
    scores = scores.masked_fill(~seen, -torch.inf)
    lowest = scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    peak = torch.cat([scores, lowest if sink is None else sink.expand_as(lowest)], -1).amax(-1, keepdim=True)
    base = peak.masked_fill(peak == -torch.inf, 0)
    weights = torch.exp(scores - base)
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - base)
    if torch.isfinite(values).all():
        mixed = weights @ values
    else:
        # a weight of 0 times NaN is NaN: a value that a query does not see must not reach it
        mixed = (weights[..., None] * values[..., None, :, :]).masked_fill(~seen[..., None], 0).sum(-2)
    return mixed, peak, total


def mean(mixed: Tensor, total: Tensor) -> Tensor:
    """Divide weighted sums of values by the sums of weights; zeros where nothing is visible."""
    return (mixed / total).masked_fill(total == 0, 0)
