"""RoPE as configs describe it: under `rope_parameters`, or under `rope_theta` and `rope_scaling` in older configs."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.models.config import Keys
from auraflux.ops import grow_queries, linear_frequencies, llama3_frequencies, rope, rope_frequencies, yarn_frequencies
from auraflux.weights.fields import FACTOR, FRACTION, NAME, POSITIONS, THETA, Fields
from auraflux.weights.formats.untrusted import FLAG, number

SLOPE = number(0, 1e6)
# what YaRN may be given
YARN = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate")


@dataclass(frozen=True, eq=False)
class Rotation:
    """RoPE: a rotation of queries and keys by their positions.

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
    """A scale of queries by their positions, see `grow_queries`."""

    slope: float
    span: int

    def __call__(self, q: Tensor, positions: Tensor) -> Tensor:
        return grow_queries(q, positions, self.slope, self.span)


@dataclass(frozen=True)
class RopeSettings:
    """Return the RoPE settings of a config in the newer form; None if it has none."""

    rope_type: str = "default"
    rope_theta: float = 10000.0
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    llama_4_scaling_beta: float | None = None
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float | None = None
    truncate: bool | None = None

    def need(self, name: str) -> Any:
        """Return a value that the type of rotation cannot do without."""
        if (found := getattr(self, name)) is None:
            raise FormatError(f"config.json has {self.rope_type!r} RoPE without {name!r}.")
        return found


def growth(settings: RopeSettings) -> Growth | None:
    """Return the growth of queries that settings ask for; None for none."""
    if not settings.llama_4_scaling_beta:
        return None
    if settings.original_max_position_embeddings is None:
        raise FormatError("config.json has llama_4_scaling_beta and does not say 'original_max_position_embeddings'.")
    return Growth(settings.llama_4_scaling_beta, settings.original_max_position_embeddings)


def rope_settings(keys: Keys, layer_type: str | None = None) -> RopeSettings:
    """Return the rotation of all layers, or of those of one type."""
    newer, older = keys.section("rope_parameters"), keys.section("rope_scaling")
    # a file is refused for what it says of other types of layers too
    for found in (newer, older, *newer.sections().values(), *older.sections().values()):
        _read(keys, found)
    chosen = newer.section(layer_type) if layer_type is not None and layer_type in newer else newer
    return _read(keys, chosen or older)


def _read(keys: Keys, found: Fields) -> RopeSettings:
    return RopeSettings(
        rope_type=found.get("rope_type", NAME, None) or found.get("type", NAME, None) or "default",
        rope_theta=found.get("rope_theta", THETA, keys.theta()),
        factor=found.get("factor", FACTOR, None),
        low_freq_factor=found.get("low_freq_factor", FACTOR, None),
        high_freq_factor=found.get("high_freq_factor", FACTOR, None),
        attention_factor=found.get("attention_factor", FACTOR, None),
        beta_fast=found.get("beta_fast", FACTOR, None),
        beta_slow=found.get("beta_slow", FACTOR, None),
        mscale=found.get("mscale", SLOPE, None),
        mscale_all_dim=found.get("mscale_all_dim", SLOPE, None),
        llama_4_scaling_beta=found.get("llama_4_scaling_beta", SLOPE, None),
        original_max_position_embeddings=found.get("original_max_position_embeddings", POSITIONS, None),
        partial_rotary_factor=found.get("partial_rotary_factor", FRACTION, None),
        truncate=found.get("truncate", FLAG, None),
    )


def rotated_share(keys: Keys, settings: RopeSettings) -> float | None:
    """Return the part of a head's channels that is rotated; None where a config does not say."""
    found = settings.partial_rotary_factor
    return keys.get("partial_rotary_factor", FRACTION, None) if found is None else found


def rotation(keys: Keys, width: int, settings: RopeSettings, interleaved: bool = False) -> Rotation:
    """Return the rotation of `width` channels that settings ask for."""
    kind, theta = settings.rope_type, settings.rope_theta
    if width < 2 or width % 2:
        raise FormatError(f"{keys.title} rotates {width} channels of a head in pairs; an even number is needed.")
    if kind in ("default", "mrope"):
        return Rotation(rope_frequencies(width, theta), 1.0, interleaved)
    if kind == "proportional":
        return Rotation(_proportional(width, theta, settings), 1.0, interleaved)
    if kind == "linear":
        return Rotation(linear_frequencies(width, theta, settings.need("factor")), 1.0, interleaved)
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        return Rotation(llama3_frequencies(width, theta, *(settings.need(name) for name in names)), 1.0, interleaved)
    if kind == "yarn":
        return Rotation(*_yarn(keys, width, theta, settings), interleaved)
    raise FormatError(f"config.json has {kind!r} RoPE; default, linear, llama3, proportional and yarn are supported.")


def _proportional(width: int, theta: float, settings: RopeSettings) -> Tensor:
    """Return the frequencies of a whole head, of which all but the first stand still."""
    share = 1.0 if settings.partial_rotary_factor is None else settings.partial_rotary_factor
    found = rope_frequencies(width, theta) / (1.0 if settings.factor is None else settings.factor)
    found[int(share * width // 2) :] = 0
    return found


def _yarn(keys: Keys, width: int, theta: float, settings: RopeSettings) -> tuple[Tensor, float]:
    original = settings.original_max_position_embeddings or keys.read("max_position_embeddings", POSITIONS)
    given = {name: found for name in YARN if (found := getattr(settings, name)) is not None}
    return yarn_frequencies(width, theta, settings.need("factor"), original, **given)
