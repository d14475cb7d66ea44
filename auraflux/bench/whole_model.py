"""Decode rate of a whole mixture, predicted from some of its layers that were measured.

A layer of a decode step takes the time of copying its missing experts, and a rest that the whole model has too, in each layer.
The whole model has more experts for the same GPU memory, so fewer of them have slots and more are missing: in proportion, as
with routing that chooses all experts equally often.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from auraflux.bench.random_weights import divide_memory
from auraflux.cache import CacheSettings
from auraflux.engine.device import activation_dtype, chunk_for
from auraflux.loading.gpu_division import GpuRequest
from auraflux.models import family_name


@dataclass(frozen=True)
class Share:
    """Layers of a mixture, and the share of their experts that has a slot."""

    layers: int
    share: float


@dataclass(frozen=True)
class Whole:
    """Prediction for a whole model: mixture layers, share of the experts with a slot, missing experts, tokens per second."""

    layers: int
    slot_share: float
    misses_per_token: float
    decode_rate: float


def predict(measured: Share, whole: Share, seconds: float, misses: float, copy_s: float) -> Whole:
    """Predict a token of the whole model.

    seconds, misses  of a token, measured: its time, and its missing experts
    copy_s           of one expert, at the measured peak
    """
    # never less than nothing: CPU threads take their part of the missing experts
    rest = max(0.0, seconds - misses * copy_s) / measured.layers
    each = seconds / measured.layers - rest
    factor = 1.0 if measured.share >= 1.0 else (1 - whole.share) / (1 - measured.share)
    return Whole(
        whole.layers, whole.share, misses / measured.layers * whole.layers * factor, 1 / (whole.layers * (rest + factor * each))
    )


def whole_share(
    config: dict[str, Any],
    bits: int | None,
    request: GpuRequest,
    settings: CacheSettings,
    device: torch.device,
    context: int,
    sequences: int,
) -> Share:
    """Divide a GPU's memory for the whole model; refuse a GPU that is too small for it."""
    settings = settings.for_family(family_name(config)).for_device(device.type)
    chunk = chunk_for(device, invariant=False)
    sizes = {"context": context, "sequences": sequences + 1, "dtype": activation_dtype(device), "chunk": chunk}
    request = replace(request, chunk=chunk)
    division, experts = divide_memory(config, bits, request, settings, sizes)
    assert experts is not None
    return Share(experts.layers, 1.0 if division.slots is None else min(1.0, division.slots / experts.total))
