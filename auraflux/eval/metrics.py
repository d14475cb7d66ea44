"""How two runs of the same text differ: per predicted token, and summed up."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Differences:
    """How a setting differs from the reference, for every predicted token.

    kl    Kullback-Leibler divergence of the setting's distribution from the reference's, in nats
    nll   negative log-likelihood of the token that came, in nats
    same  1 where both find the same token likeliest, else 0
    """

    kl: list[float]
    nll: list[float]
    same: list[int]

    def __add__(self, other: "Differences") -> "Differences":
        return Differences(self.kl + other.kl, self.nll + other.nll, self.same + other.same)


NONE = Differences([], [], [])


def compare(wanted: Tensor, found: Tensor, targets: Tensor) -> Differences:
    """Compare scores of the same tokens.

    wanted, found  [T, V]  scores of the reference and of what is measured
    targets        [T]     the tokens that came
    """
    # in float64: torch's float32 logarithm is off by 1e-5 on ARM
    reference, log = torch.log_softmax(wanted.double(), -1), torch.log_softmax(found.double(), -1)
    # a difference of two roundings may come out below zero, the divergence does not
    kl = (reference.exp() * (reference - log)).sum(-1).clamp_min(0)
    nll = -log.gather(-1, targets.to(log.device)[:, None]).squeeze(-1)
    return Differences(kl.tolist(), nll.tolist(), (reference.argmax(-1) == log.argmax(-1)).int().tolist())


def share(likelihoods: list[float], right: int) -> float:
    """The probability of one among several, from logarithms."""
    peak = max(likelihoods)
    weights = [math.exp(each - peak) for each in likelihoods]
    return weights[right] / sum(weights)


def summary(found: Differences) -> dict[str, Any]:
    """Perplexity, mean and percentiles of the divergence, and how often the likeliest token is the same."""
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
