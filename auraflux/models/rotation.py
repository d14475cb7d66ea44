"""Rotary positions as checkpoints describe them: under `rope_parameters`, or `rope_theta` and `rope_scaling` before that."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.models.config import Keys
from auraflux.ops import grow_queries, linear_frequencies, llama3_frequencies, rope, rope_frequencies, yarn_frequencies


@dataclass(frozen=True, eq=False)
class Rotation:
    """Rotates queries and keys by their positions.

    frequencies  [R/2]  float32
    mscale       multiplies cosine and sine
    interleaved  pairs are neighbours
    """

    frequencies: Tensor
    mscale: float = 1.0
    interleaved: bool = False

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        return rope(x, self.frequencies, positions, self.mscale, self.interleaved)

    def to(self, device: torch.device) -> "Rotation":
        return Rotation(self.frequencies.to(device), self.mscale, self.interleaved)


@dataclass(frozen=True)
class Growth:
    """How queries grow with their positions: see `grow_queries`."""

    slope: float
    span: int

    def __call__(self, q: Tensor, positions: Tensor) -> Tensor:
        return grow_queries(q, positions, self.slope, self.span)


def growth(settings: dict[str, Any]) -> Growth | None:
    """The growth of queries that settings ask for; None where they stay as they are."""
    slope = settings.get("llama_4_scaling_beta")
    if not slope:
        return None
    if "original_max_position_embeddings" not in settings:
        raise FormatError("config.json has llama_4_scaling_beta and does not say 'original_max_position_embeddings'.")
    return Growth(slope, settings["original_max_position_embeddings"])


def rope_settings(keys: Keys, layer_type: str | None = None) -> dict[str, Any]:
    """What a config says about rotation, in the newer form: rope_type, rope_theta and what the type needs."""
    found = dict(keys.get("rope_parameters", {}))
    if layer_type is not None and isinstance(found.get(layer_type), dict):
        found = dict(found[layer_type])
    if not found:
        found = {"rope_theta": keys.get("rope_theta", 10000.0), **keys.get("rope_scaling", {})}
    # null is as good as missing
    found = {"rope_theta": keys.get("rope_theta", 10000.0)} | {key: value for key, value in found.items() if value is not None}
    found["rope_type"] = found.get("rope_type") or found.get("type") or "default"
    return found


def rotation(keys: Keys, width: int, settings: dict[str, Any], interleaved: bool = False) -> Rotation:
    """The rotation of `width` channels that settings ask for."""
    kind, theta = settings["rope_type"], settings["rope_theta"]
    try:
        if kind in ("default", "mrope"):
            return Rotation(rope_frequencies(width, theta), 1.0, interleaved)
        if kind == "proportional":
            return Rotation(_proportional(width, theta, settings), 1.0, interleaved)
        if kind == "linear":
            return Rotation(linear_frequencies(width, theta, settings["factor"]), 1.0, interleaved)
        if kind == "llama3":
            names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
            return Rotation(llama3_frequencies(width, theta, *(settings[name] for name in names)), 1.0, interleaved)
        if kind == "yarn":
            return Rotation(*_yarn(keys, width, theta, settings), interleaved)
    except KeyError as missing:
        raise FormatError(f"config.json asks for {kind!r} rotation and does not say {missing}.") from missing
    raise FormatError(f"config.json asks for {kind!r} rotation; default, linear, llama3, proportional and yarn are supported.")


def _proportional(width: int, theta: float, settings: dict[str, Any]) -> Tensor:
    """The frequencies of a whole head, of which all but the first stand still."""
    found = rope_frequencies(width, theta) / settings.get("factor", 1.0)
    found[int(settings.get("partial_rotary_factor", 1.0) * width // 2) :] = 0
    return found


def _yarn(keys: Keys, width: int, theta: float, settings: dict[str, Any]) -> tuple[Tensor, float]:
    original = settings.get("original_max_position_embeddings") or keys["max_position_embeddings"]
    names = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate")
    given = {name: settings[name] for name in names if settings.get(name) is not None}
    return yarn_frequencies(width, theta, settings["factor"], original, **given)
