"""Rotation frequencies: plain, and the ways checkpoints stretch them to contexts longer than they were trained on.

`width` is the number of channels that are rotated, R; every function gives R/2 frequencies in radians per position, float32,
the fastest first. They are computed as transformers computes them, so that the angles of a long context agree.
"""

import math

import torch
from torch import Tensor

from auraflux.errors import InputError


def rope_frequencies(width: int, theta: float) -> Tensor:
    """Give the frequencies theta ** (-2i / width)."""
    if width < 2 or width % 2:
        raise InputError(f"{width} channels cannot be rotated in pairs; an even number is needed.")
    return 1.0 / _periods(width, theta)


def linear_frequencies(width: int, theta: float, factor: float) -> Tensor:
    """Slow every frequency down by `factor`."""
    return rope_frequencies(width, theta) / factor


def llama3_frequencies(
    width: int, theta: float, factor: float, low_freq_factor: float, high_freq_factor: float, original_context: int
) -> Tensor:
    """Slow down by `factor` the frequencies that turn less than `low_freq_factor` times in the original context.

    Those that turn more than `high_freq_factor` times stay; between the two the slow-down fades out.
    """
    plain = rope_frequencies(width, theta)
    turns = original_context / (2 * math.pi / plain)
    kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return (1 - kept) * plain / factor + kept * plain


def yarn_frequencies(
    width: int,
    theta: float,
    factor: float,
    original_context: int,
    beta_fast: float = 32,
    beta_slow: float = 1,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
    attention_factor: float | None = None,
    truncate: bool = True,
) -> tuple[Tensor, float]:
    """Slow down by `factor` the frequencies that turn less than `beta_slow` times in the original context.

    Those that turn more than `beta_fast` times stay; between the two the slow-down grows with the channel.

    mscale, mscale_all_dim, attention_factor  what the checkpoint says about the size of cosine and sine, if anything
    truncate                                  whether the two borders are rounded outwards to whole channels
    returns                                   (frequencies, mscale: what `rope` multiplies cosine and sine by)
    """
    if not theta > 1:
        raise InputError(f"YaRN slows rotations of a base above 1 down; it is {theta:g}.")
    plain = rope_frequencies(width, theta)
    low, high = (_channel_turning(turns, width, theta, original_context) for turns in (beta_fast, beta_slow))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    # equal borders: a step, made with a ramp of a thousandth of a channel
    ramp = (torch.arange(width // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    slow = 1.0 / (factor * _periods(width, theta))
    if attention_factor is None:
        attention_factor = _attention_factor(factor, mscale, mscale_all_dim)
    return slow * (1 - kept) + plain * kept, attention_factor


def _periods(width: int, theta: float) -> Tensor:
    return theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)


def _channel_turning(turns: float, width: int, theta: float, context: int) -> float:
    """The channel, not rounded, whose frequency turns that many times within the context."""
    return width * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))


def _attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    def growth(slope: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * slope * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return growth(mscale) / growth(mscale_all_dim)
    return growth(1.0)
