"""Key calibration: the per-channel mean and scale removed from a model's keys before they are quantized.

Calibration belongs to a model and to positions, not to a sequence: sequences that share pages share it. Its use by the codec is
in `ops/turboquant/calibration.py`, its measurement in `engine/calibrate.py`.
"""

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from auraflux.errors import InputError
from auraflux.ops.turboquant.calibration import BLOCK, Calibration, angle_table

PER_HEAD = ("scale", "along", "across")


@dataclass(frozen=True, eq=False)
class KeyCalibration:
    """The calibration of one layer's keys.

    scale          [Hkv, D]  float32, above 0
    along, across  [Hkv, D]  float32, coefficients of the cosine and the sine of a block's RoPE angle in the mean
    frequencies    [R/2]     float32, of the channels that RoPE rotates
    interleaved    RoPE pairs are adjacent channels
    """

    scale: Tensor
    along: Tensor
    across: Tensor
    frequencies: Tensor
    interleaved: bool = False

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def for_heads(self, heads: range) -> "KeyCalibration":
        """Return the calibration of some heads."""
        parts = {name: getattr(self, name)[heads.start : heads.stop] for name in PER_HEAD}
        return replace(self, **parts)

    def refusal(self, heads: int, width: int) -> str | None:
        """Return why the calibration does not fit a layer of this shape; None if it does."""
        for name in PER_HEAD:
            found = list(getattr(self, name).shape)
            if found != [heads, width]:
                return f"'{name}' has shape {found}, and the layer's keys have [{heads}, {width}]"
        if self.frequencies.ndim != 1 or 2 * len(self.frequencies) > width:
            return f"RoPE would rotate {2 * self.frequencies.numel()} of {width} channels"
        if not all(bool(tensor.isfinite().all()) for tensor in self.tensors.values()):
            return "some values are not finite"
        if not bool((self.scale > 0).all()):
            return "some scales are not above 0"
        return None

    @property
    def rope_key(self) -> tuple[Hashable, ...]:
        """Key of the angle table: layers with the same key share one."""
        return tuple(self.frequencies.tolist()), self.scale.shape[1], self.interleaved

    def angles(self, positions: int) -> Tensor:
        """Return the table of RoPE angles for the first `positions` positions."""
        return angle_table(self.frequencies, -(-positions // BLOCK), self.scale.shape[1], self.interleaved)

    def prepare(self, angles: Tensor) -> Calibration:
        """Return the calibration as ops take it, on the device of the angle table."""
        scale, along, across = (part.to(angles.device).contiguous() for part in (self.scale, self.along, self.across))
        return Calibration(scale, 1 / scale, along, across, angles, 2 * len(self.frequencies), self.interleaved)


@dataclass(frozen=True, eq=False)
class ModelCalibration:
    """The key calibration of a model, by layer number."""

    layers: Mapping[int, KeyCalibration]

    @cached_property
    def digest(self) -> str:
        """Digest of all values: codes made with different digests are incompatible."""
        found = hashlib.sha256()
        for number, layer in sorted(self.layers.items()):
            found.update(repr((number, layer.interleaved)).encode())
            for name, tensor in layer.tensors.items():
                found.update(name.encode() + tensor.float().cpu().numpy().tobytes())
        return found.hexdigest()[:32]

    def means_only(self) -> "ModelCalibration":
        """Return the calibration with all scales 1."""
        return self._map(lambda layer: replace(layer, scale=torch.ones_like(layer.scale)))

    def scales_only(self) -> "ModelCalibration":
        """Return the calibration with all means 0."""
        return self._map(
            lambda layer: replace(layer, along=torch.zeros_like(layer.along), across=torch.zeros_like(layer.across))
        )

    def _map(self, change: Callable[[KeyCalibration], KeyCalibration]) -> "ModelCalibration":
        return ModelCalibration({number: change(layer) for number, layer in self.layers.items()})

    def sliced(self, share: Callable[[int], range]) -> "ModelCalibration":
        """Return the calibration of a tensor-parallel rank's heads."""
        return self._map(lambda layer: layer.for_heads(share(len(layer.scale))))

    @staticmethod
    def joined(parts: Sequence["ModelCalibration"]) -> "ModelCalibration":
        """Concatenate the calibrations of tensor-parallel ranks along the heads, in rank order."""
        first = parts[0]
        found = {}
        for number, layer in first.layers.items():
            each: dict[str, Any] = {
                name: torch.cat([getattr(part.layers[number], name) for part in parts]) for name in PER_HEAD
            }
            found[number] = replace(layer, **each)
        return ModelCalibration(found)

    def for_layer(self, number: int, heads: int, width: int) -> KeyCalibration:
        """Return the calibration of a layer; refuse one that does not fit its shape."""
        if number not in self.layers:
            raise InputError(f"the calibration has no entry for layer {number}: it belongs to another model.")
        if (reason := self.layers[number].refusal(heads, width)) is not None:
            raise InputError(f"the calibration does not fit layer {number}: {reason}.")
        return self.layers[number]
