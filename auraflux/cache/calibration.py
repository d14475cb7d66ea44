"""What is known of a model's keys before any is seen: a scale for every channel, and the mean around which they turn.

The vectors belong to a model and to positions, not to a text: sequences that share pages share them. What the codes make of
them is in `ops/turboquant/calibration.py`, how they are found in `run/calibrate.py`.
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
class LayerVectors:
    """What is known of one layer's keys.

    scale          [Hkv, D]  float32, above 0
    along, across  [Hkv, D]  float32, what meets the cosine and the sine of a block's angle
    frequencies    [R/2]     float32, of the channels that turn with the position
    interleaved    pairs of them are neighbours
    """

    scale: Tensor
    along: Tensor
    across: Tensor
    frequencies: Tensor
    interleaved: bool = False

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def between(self, heads: range) -> "LayerVectors":
        """The same for some heads."""
        parts = {name: getattr(self, name)[heads.start : heads.stop] for name in PER_HEAD}
        return replace(self, **parts)

    def refusal(self, heads: int, width: int) -> str | None:
        """Say why they cannot be those of a layer of this shape; None if they can."""
        for name in PER_HEAD:
            found = list(getattr(self, name).shape)
            if found != [heads, width]:
                return f"'{name}' has shape {found}, and the layer's keys have [{heads}, {width}]"
        if self.frequencies.ndim != 1 or 2 * len(self.frequencies) > width:
            return f"{2 * self.frequencies.numel()} channels would turn of {width}"
        if not all(bool(tensor.isfinite().all()) for tensor in self.tensors.values()):
            return "there are values that are no numbers"
        if not bool((self.scale > 0).all()):
            return "there are scales that are not above 0"
        return None

    @property
    def turning(self) -> tuple[Hashable, ...]:
        """What the table of angles depends on."""
        return tuple(self.frequencies.tolist()), self.scale.shape[1], self.interleaved

    def angles(self, reach: int) -> Tensor:
        """The table of angles for so many positions."""
        return angle_table(self.frequencies, -(-reach // BLOCK), self.scale.shape[1], self.interleaved)

    def made_ready(self, angles: Tensor) -> Calibration:
        """The same as the ops take them, on the device of the table of angles."""
        scale, along, across = (part.to(angles.device).contiguous() for part in (self.scale, self.along, self.across))
        return Calibration(scale, 1 / scale, along, across, angles, 2 * len(self.frequencies), self.interleaved)


@dataclass(frozen=True, eq=False)
class ModelVectors:
    """The vectors of all layers that have some, by their number."""

    layers: Mapping[int, LayerVectors]

    @cached_property
    def digest(self) -> str:
        """A name for what codes made with them leave out."""
        found = hashlib.sha256()
        for number, layer in sorted(self.layers.items()):
            found.update(repr((number, layer.interleaved)).encode())
            for name, tensor in layer.tensors.items():
                found.update(name.encode() + tensor.float().cpu().numpy().tobytes())
        return found.hexdigest()[:32]

    def centres_only(self) -> "ModelVectors":
        """The same without scales."""
        return self._changed(lambda layer: replace(layer, scale=torch.ones_like(layer.scale)))

    def scales_only(self) -> "ModelVectors":
        """The same without centres."""
        return self._changed(
            lambda layer: replace(layer, along=torch.zeros_like(layer.along), across=torch.zeros_like(layer.across))
        )

    def _changed(self, change: Callable[[LayerVectors], LayerVectors]) -> "ModelVectors":
        return ModelVectors({number: change(layer) for number, layer in self.layers.items()})

    def sliced(self, share: Callable[[int], range]) -> "ModelVectors":
        """Those of a rank's heads, where ranks have some heads each."""
        return self._changed(lambda layer: layer.between(share(len(layer.scale))))

    @staticmethod
    def joined(parts: Sequence["ModelVectors"]) -> "ModelVectors":
        """Those of all heads, of which each part has some, in their order."""
        first = parts[0]
        found = {}
        for number, layer in first.layers.items():
            each: dict[str, Any] = {
                name: torch.cat([getattr(part.layers[number], name) for part in parts]) for name in PER_HEAD
            }
            found[number] = replace(layer, **each)
        return ModelVectors(found)

    def of(self, number: int, heads: int, width: int) -> LayerVectors:
        """The vectors of a layer; refuse what cannot be its own."""
        if number not in self.layers:
            raise InputError(f"the calibration has no vectors for layer {number}: it is of another model.")
        if (reason := self.layers[number].refusal(heads, width)) is not None:
            raise InputError(f"the calibration does not fit layer {number}: {reason}.")
        return self.layers[number]
