"""RoPE as configs describe it: under `rope_parameters`, or under `rope_theta` and `rope_scaling` in older configs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.models.config import Keys
from auraflux.ops import (
    divided_frequencies,
    dynamic_frequencies,
    grow_queries,
    linear_frequencies,
    llama3_frequencies,
    longrope_mscale,
    rope,
    rope_frequencies,
    yarn_frequencies,
)
from auraflux.weights.fields import FACTOR, FACTORS, FRACTION, NAME, POSITIONS, THETA, Fields
from auraflux.weights.formats.untrusted import FLAG, listed, number

SLOPE = number(0, 1e6)
# what YaRN may be given
YARN = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate")
# types that go by the context before it was extended, and types whose frequencies depend on the context of the KV cache
EXTENDED, BY_CONTEXT = ("llama3", "yarn", "longrope"), ("dynamic", "longrope")
KNOWN = ("default", "linear", "llama3", "proportional", "yarn")


@dataclass(frozen=True, eq=False)
class Rotation:
    """RoPE: a rotation of queries and keys by their positions.

    frequencies  [R/2]  float32
    mscale       multiplies cosine and sine
    interleaved  pairs are neighbours
    by_context   computes the frequencies for the context of a KV cache; None where they do not depend on it
    known        the rotations of the contexts asked for
    """

    frequencies: Tensor
    mscale: float = 1.0
    interleaved: bool = False
    by_context: Callable[[int], Tensor] | None = None
    known: dict[int, "Rotation"] = field(default_factory=dict)

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        return rope(x, self.frequencies, positions, self.mscale, self.interleaved)

    def to(self, device: torch.device) -> "Rotation":
        return replace(self, frequencies=self.frequencies.to(device), known={})

    def at(self, context: int) -> "Rotation":
        """Return the rotation for a KV cache of so many tokens per sequence.

        All tokens of a cache rotate by the same frequencies, so that results do not depend on prefill chunks.
        """
        if self.by_context is None:
            return self
        if context not in self.known:
            frequencies = self.by_context(context).to(self.frequencies.device)
            self.known[context] = Rotation(frequencies, self.mscale, self.interleaved)
        return self.known[context]


def no_rotation(width: int) -> Rotation:
    """Return the rotation by no angle, for heads without RoPE."""
    return Rotation(torch.zeros(width // 2))


@dataclass(frozen=True)
class Growth:
    """A scale of queries by their positions, see `grow_queries`."""

    slope: float
    span: int
    ahead: int = 0

    def __call__(self, q: Tensor, positions: Tensor) -> Tensor:
        return grow_queries(q, positions, self.slope, self.span, self.ahead)


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
    short_factor: list[float] | None = None
    long_factor: list[float] | None = None

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
    kind = found.get("rope_type", NAME, None) or found.get("type", NAME, None) or "default"
    # some files have it around the settings, which transformers reads first
    original = keys.get("original_max_position_embeddings", POSITIONS, None) if kind in EXTENDED else None
    return RopeSettings(
        rope_type=kind,
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
        original_max_position_embeddings=original or found.get("original_max_position_embeddings", POSITIONS, None),
        partial_rotary_factor=found.get("partial_rotary_factor", FRACTION, None),
        truncate=found.get("truncate", FLAG, None),
        short_factor=found.get("short_factor", FACTORS, None),
        long_factor=found.get("long_factor", FACTORS, None),
    )


def rotations(keys: Keys, width: int, usual: Mapping[str, RopeSettings]) -> dict[str, Rotation]:
    """Return the rotation of each kind of layer, of a share of a head's channels; `usual` has what a config may leave out."""
    made = {}
    for kind, default in usual.items():
        settings = rope_settings(keys, kind) if "rope_parameters" in keys else default
        found, known = settings.partial_rotary_factor, default.partial_rotary_factor
        share = (1.0 if known is None else known) if found is None else found
        made[kind] = rotation(keys, int(width * share), settings, by_context=True)
    return made


def rotated_share(keys: Keys, settings: RopeSettings) -> float | None:
    """Return the part of a head's channels that is rotated; None where a config does not say."""
    found = settings.partial_rotary_factor
    return keys.get("partial_rotary_factor", FRACTION, None) if found is None else found


def rotation(keys: Keys, width: int, settings: RopeSettings, interleaved: bool = False, by_context: bool = False) -> Rotation:
    """Return the rotation of `width` channels that settings ask for.

    by_context  the family's attention asks for the rotation of a batch's context, see `Rotation.at`
    """
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
    if by_context and kind in BY_CONTEXT:
        found, mscale = (_dynamic if kind == "dynamic" else _longrope)(keys, width, theta, settings)
        return Rotation(found(1), mscale, interleaved, found)
    known = (*KNOWN, *BY_CONTEXT) if by_context else KNOWN
    raise FormatError(f"{keys.title} has {kind!r} RoPE; {listed(known)} are supported.")


def _dynamic(keys: Keys, width: int, theta: float, settings: RopeSettings) -> tuple[Callable[[int], Tensor], float]:
    factor, trained = settings.need("factor"), keys.read("max_position_embeddings", POSITIONS)
    if width < 4:
        raise FormatError(f"{keys.title} has 'dynamic' RoPE of {width} channels; 4 or more are needed.")
    if factor < 1:
        raise FormatError(f"{keys.title} has 'dynamic' RoPE with factor {factor:g}; 1 or more is needed.")
    return lambda context: dynamic_frequencies(width, theta, factor, trained, context), 1.0


def _longrope(keys: Keys, width: int, theta: float, settings: RopeSettings) -> tuple[Callable[[int], Tensor], float]:
    short, long = settings.need("short_factor"), settings.need("long_factor")
    for name, factors in (("short_factor", short), ("long_factor", long)):
        if len(factors) != width // 2:
            raise FormatError(f"{keys.title} has {len(factors)} values of {name} for {width // 2} frequencies.")
    trained = keys.read("max_position_embeddings", POSITIONS)
    original = settings.original_max_position_embeddings or trained
    factor = trained / original if settings.factor is None else settings.factor
    mscale = longrope_mscale(factor, original) if settings.attention_factor is None else settings.attention_factor
    return lambda context: divided_frequencies(width, theta, long if context > original else short), mscale


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
