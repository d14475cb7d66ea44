"""Dense transformers with grouped-query attention: Llama and its close relatives Mistral, Ministral 3, Qwen2 and Qwen3."""

from dataclasses import dataclass
from typing import Any

from auraflux.cache import AttentionShape
from auraflux.errors import FormatError
from auraflux.models.attention import Attention, Heads
from auraflux.models.config import Keys
from auraflux.models.decoder import Decoder, text_name
from auraflux.models.layer import FeedForward, Mixer
from auraflux.models.mlp import MLP
from auraflux.models.rotation import Growth, RopeSettings, Rotation, growth, rope_settings, rotation, rotations
from auraflux.weights.fields import HEAD
from auraflux.weights.formats.untrusted import FLAG, integer
from auraflux.weights.loader import Weights

EACH, ALL = "each", "all"
NORMED = "qwen3", "qwen3_moe", "dots1", "hy_v3", "exaone_moe", "mellum", "afmoe", "laguna", "step3p7", "lfm2_moe"
NORMS = {**dict.fromkeys(NORMED, EACH), **dict.fromkeys(("olmoe", "minimax_m2", "flex_olmo"), ALL)}
SLIDING, FULL = "sliding_attention", "full_attention"
# with a window in every layer, and with one where use_sliding_window says so
WINDOWED, SWITCHED = ("mistral", "ministral3", "mixtral", "phimoe", "minimax"), ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")


@dataclass(frozen=True, eq=False)
class Config:
    """hidden, inner, vocab are widths; heads of queries, kv_heads of keys; context is the trained context length.

    windows     the sliding window of each layer; None for full attention
    head_norms  QK norms over EACH head or over ALL heads at once; None for no QK norms
    growth      scales queries by their positions
    others      layer -> its rotation, where that is not `rotation`
    """

    hidden: int
    inner: int
    vocab: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    windows: tuple[int | None, ...]
    eps: float
    tied: bool
    head_norms: str | None
    context: int
    rotation: Rotation
    growth: Growth | None
    others: dict[int, Rotation]

    def rotation_of(self, index: int) -> Rotation:
        """Return the rotation of a layer."""
        return self.others.get(index, self.rotation)

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys = Keys(config)
        keys.only("hidden_act", "silu")
        heads, hidden = keys.heads, keys.hidden
        width, settings = keys.get("head_dim", HEAD, hidden // heads), rope_settings(keys)
        return cls(
            hidden=hidden,
            inner=keys.inner,
            vocab=keys.vocab(),
            layers=keys.layers,
            heads=heads,
            kv_heads=keys.kv_heads(heads),
            head_width=width,
            windows=_windows(keys),
            eps=keys.eps(),
            tied=keys.tied(),
            head_norms=NORMS.get(keys.kind or ""),
            context=keys.context(2048),
            rotation=rotation(keys, width, settings, by_context=True),
            growth=growth(settings),
            others={},
        )


def listed_kinds(keys: Keys, every: int) -> tuple[str, ...]:
    """Return the kind of each layer, from the checkpoint's list, or with full attention in every so many layers."""
    if "layer_types" in keys:
        return keys.layer_types(SLIDING, FULL)
    return tuple(SLIDING if (index + 1) % every else FULL for index in range(keys.layers))


def windows_of(keys: Keys, kinds: tuple[str, ...]) -> tuple[int | None, ...]:
    """Return the sliding window of each layer."""
    return tuple(keys.window() if kind == SLIDING else None for kind in kinds)


def by_kind(keys: Keys, width: int, usual: dict[str, RopeSettings]) -> dict[str, Any]:
    """Return the windows and rotations of layers whose kind decides both; without a list they are full-attention layers."""
    kinds = keys.layer_types(SLIDING, FULL) if "layer_types" in keys else (FULL,) * keys.layers
    found = rotations(keys, width, usual)
    return {"windows": windows_of(keys, kinds), "others": {index: found[kind] for index, kind in enumerate(kinds)}}


def _windows(keys: Keys) -> tuple[int | None, ...]:
    window = keys.sliding_window()
    if keys.kind in WINDOWED:
        return (window,) * keys.layers
    if keys.kind == "dots1":
        last = keys.get("max_window_layers", integer(0, 1 << 16), 62)
        listed = keys.layer_types(SLIDING, FULL) if "layer_types" in keys else None
        kinds = listed or tuple(SLIDING if window is not None and i >= last else FULL for i in range(keys.layers))
        return windows_of(keys, kinds)
    kinds = _layer_types(keys) if keys.kind in SWITCHED else (FULL,) * keys.layers
    if SLIDING in kinds and not keys.get("use_sliding_window", FLAG, False):
        raise FormatError(f"{keys.title} has layer_types {SLIDING} and use_sliding_window false. Make one fit the other.")
    return windows_of(keys, kinds)


def _layer_types(keys: Keys) -> tuple[str, ...]:
    """Return the kind of each of Qwen's layers, from the checkpoint's list or by the rule of its model_type."""
    given = keys.layer_types(SLIDING, FULL) if "layer_types" in keys else None
    last = keys.get("max_window_layers", integer(0, 1 << 16), 28)
    if not keys.get("use_sliding_window", FLAG, False):
        return given or (FULL,) * keys.layers
    if keys.kind == "qwen3_moe":
        # transformers does not read its list
        return (SLIDING,) * keys.layers
    if given is not None:
        return given
    if keys.kind == "qwen2_moe":
        return tuple(SLIDING if i % 2 == 0 and i < last else FULL for i in range(keys.layers))
    return tuple(FULL if i < last else SLIDING for i in range(keys.layers))


class Model(Decoder[Config]):
    """Attention and an MLP in every layer."""

    idempotent_append = True

    @classmethod
    def no_tensor_parallel(cls, config: Config) -> str | None:
        return "its norms of queries and keys are over all heads at once." if config.head_norms == ALL else None

    def make_mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        config = self.config
        heads = Heads(config.heads, config.kv_heads, config.head_width)
        rotation = config.rotation_of(index).to(weights.device)
        eps, across = config.eps if config.head_norms else None, config.head_norms == ALL
        options: dict[str, Any] = {"across": across, "growth": config.growth}
        return Attention(weights, f"{name}.self_attn", config.hidden, heads, rotation, eps, **options)

    def make_mlp(self, weights: Weights, name: str, index: int) -> FeedForward:
        return MLP(weights, f"{name}.mlp", self.config.hidden, self.config.inner)


rename = text_name


def make_caches(config: Config) -> list[AttentionShape]:
    return [AttentionShape(config.kv_heads, config.head_width, window=window) for window in config.windows]
