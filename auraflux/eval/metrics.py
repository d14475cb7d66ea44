"""Differences between two runs of the same tokens: per predicted token, and summarized."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Differences:
    """Differences of a setting from the reference, for every predicted token.

    kl    Kullback-Leibler divergence of the setting's distribution from the reference's, in nats
    nll   negative log-likelihood of the target token, in nats
    same  1 where the most likely token is the same, else 0
    """

    kl: list[float]
    nll: list[float]
    same: list[int]

    def __add__(self, other: "Differences") -> "Differences":
        return Differences(self.kl + other.kl, self.nll + other.nll, self.same + other.same)


NONE = Differences([], [], [])


def compare(wanted: Tensor, found: Tensor, targets: Tensor) -> Differences:
    """Compare logits of the same tokens.

    wanted, found  [T, V]  logits of the reference and of the setting
    targets        [T]     target tokens
    """
    # in float64: torch's float32 logarithm is off by 1e-5 on ARM
    reference, log = torch.log_softmax(wanted.double(), -1), torch.log_softmax(found.double(), -1)
    # rounding may make the computed divergence negative
    kl = (reference.exp() * (reference - log)).sum(-1).clamp_min(0)
    nll = -log.gather(-1, targets.to(log.device)[:, None]).squeeze(-1)
    return Differences(kl.tolist(), nll.tolist(), (reference.argmax(-1) == log.argmax(-1)).int().tolist())


def probability_among(likelihoods: list[float], right: int) -> float:
    """Return the probability of one alternative among several, from log-likelihoods."""
    peak = max(likelihoods)
    weights = [math.exp(each - peak) for each in likelihoods]
    return weights[right] / sum(weights)


def summary(found: Differences) -> dict[str, Any]:
    """Return perplexity, mean and percentiles of the divergence, and the rate of equal most likely tokens."""
    if not found.kl:
        return {}
    median, p99, p999 = np.percentile(found.kl, [50, 99, 99.9])
    return {
        "tokens": len(found.kl),
        "perplexity": float(np.exp(np.mean(found.nll))),
        "kl_mean": float(np.mean(found.kl)),
        "kl_median": float(median),
        "kl_p99": float(p99),
        "kl_p99_9": float(p999),
        "same_top": float(np.mean(found.same)),
    }
