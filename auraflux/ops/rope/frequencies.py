"""RoPE frequencies: the default ones, and the scalings that extend checkpoints to longer contexts.

`width` is the number of rotated channels, R; every function returns R/2 frequencies in radians per position, float32,
the fastest first. They are computed as transformers computes them, so that the angles of a long context agree.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from auraflux.errors import InputError


def rope_frequencies(width: int, theta: float) -> Tensor:
    """Return the frequencies theta ** (-2i / width)."""
    if width < 2 or width % 2:
        raise InputError(f"{width} channels cannot be rotated in pairs; an even number is needed.")
    return 1.0 / _periods(width, theta)


def linear_frequencies(width: int, theta: float, factor: float) -> Tensor:
    """Divide every frequency by `factor`."""
    return rope_frequencies(width, theta) / factor


def dynamic_frequencies(width: int, theta: float, factor: float, trained_context: int, context: int) -> Tensor:
    """Raise theta so far that a context beyond the trained one is covered (NTK); within it, return the default frequencies."""
    if width < 4:
        raise InputError(f"dynamic RoPE needs at least 4 rotated channels; there are {width}.")
    stretch = factor * max(context, trained_context) / trained_context - (factor - 1)
    return rope_frequencies(width, theta * stretch ** (width / (width - 2)))


def divided_frequencies(width: int, theta: float, factors: Sequence[float]) -> Tensor:
    """Divide each frequency by its factor (LongRoPE)."""
    if len(factors) != width // 2:
        raise InputError(f"{len(factors)} factors divide {width // 2} frequencies; one each is needed.")
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * _periods(width, theta))


def longrope_mscale(factor: float, original_context: int) -> float:
    """Return the factor of cosine and sine of a model that LongRoPE extended `factor` times."""
    return 1.0 if factor <= 1 or original_context < 2 else math.sqrt(1 + math.log(factor) / math.log(original_context))


def llama3_frequencies(
    width: int, theta: float, factor: float, low_freq_factor: float, high_freq_factor: float, original_context: int
) -> Tensor:
    """Divide by `factor` the frequencies with fewer than `low_freq_factor` periods in the original context.

    Those with more than `high_freq_factor` periods stay; in between the division fades out.
    """
    base = rope_frequencies(width, theta)
    periods = original_context / (2 * math.pi / base)
    unscaled = ((periods - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return (1 - unscaled) * base / factor + unscaled * base


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
    """Divide by `factor` the frequencies with fewer than `beta_slow` periods in the original context.

    Those with more than `beta_fast` periods stay; in between the division grows with the channel.

    mscale, mscale_all_dim, attention_factor  the checkpoint's settings for the scale of cosine and sine, or None
    truncate                                  round the two borders outwards to integer channels
    returns                                   (frequencies, mscale: the factor of cosine and sine in `rope`)
    """
    if not theta > 1:
        raise InputError(f"YaRN needs a RoPE base above 1; it is {theta:g}.")
    base = rope_frequencies(width, theta)
    low, high = (_channel_of(periods, width, theta, original_context) for periods in (beta_fast, beta_slow))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    # equal borders: a step, approximated by a ramp of a thousandth of a channel
    ramp = (torch.arange(width // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)
    unscaled = 1 - ramp.clamp(0, 1)
    slow = 1.0 / (factor * _periods(width, theta))
    if attention_factor is None:
        attention_factor = _attention_factor(factor, mscale, mscale_all_dim)
    return slow * (1 - unscaled) + base * unscaled, attention_factor


def _periods(width: int, theta: float) -> Tensor:
    return theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)


def _channel_of(periods: float, width: int, theta: float, context: int) -> float:
    """Return the channel, not rounded, whose frequency has that many periods in the context."""
    return width * math.log(context / (periods * 2 * math.pi)) / (2 * math.log(theta))


def _attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    def growth(slope: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * slope * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return growth(mscale) / growth(mscale_all_dim)
    return growth(1.0)
