"""Command A+: attention and experts side by side, both reading one norm; only layers with a window have RoPE."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from auraflux.adapters.linears import shared_output
from auraflux.cache import Batch, MixedBatch
from auraflux.errors import FormatError
from auraflux.models import llama, qwen3_moe
from auraflux.models.config import Keys
from auraflux.models.deepseek_v3 import DENSE, SPARSE
from auraflux.models.layer import Layer, LayerInput, Mixer, PreparedInput, Residual
from auraflux.models.mixture import Mixture, MixtureConfig, biased_mixture
from auraflux.models.mlp import MLP, NoMLP
from auraflux.models.qwen3_moe import rename
from auraflux.models.rotation import no_rotation, rope_settings, rotation
from auraflux.ops import Routing, SharedExpert, combine, layer_norm
from auraflux.weights.experts.resident import ExpertPredictor
from auraflux.weights.fields import EPS, FACTOR, HEAD, LAYER_INTERVAL, LAYERS, NAME, SHARED_EXPERTS, WIDTH
from auraflux.weights.formats.untrusted import FLAG
from auraflux.weights.loader import Weights

__all__ = ["Config", "Model", "make_caches", "rename"]

# the scores of experts, by the config's name
SCORINGS = {"softmax": "chosen", "sigmoid": "sigmoid"}
AVERAGE = "average"


@dataclass(frozen=True, eq=False)
class Config(qwen3_moe.Config):
    """Qwen3's config; `inner` is the width of MLPs.

    centred      norms subtract the mean
    logit_scale  of logits
    share        of experts and the shared expert in their sum
    """

    centred: bool
    logit_scale: float
    share: float

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys = Keys(config)
        keys.only("expert_selection_fn", *SCORINGS)
        keys.only("shared_expert_combination_strategy", AVERAGE, "sum")
        eps = keys.get("rms_norm_eps", EPS, None)
        usual = {
            "rms_norm_eps": keys.get("layer_norm_eps", EPS, 1e-5) if eps is None else eps,
            "head_dim": keys.get("head_dim", HEAD, 128),
            "tie_word_embeddings": keys.tied(True),
        }
        plain = llama.Config.from_hf(keys.changed(usual).found)
        kinds, sparse = _kinds(keys)
        turned = rotation(keys, plain.head_width, rope_settings(keys), interleaved=True, by_context=True)
        shared = plain.inner * keys.get("num_shared_experts", SHARED_EXPERTS, 0)
        averaged = shared and keys.get("shared_expert_combination_strategy", NAME, AVERAGE) == AVERAGE
        dense = keys.get("prefix_dense_intermediate_size", WIDTH, None)
        if dense is None and len(sparse) < keys.layers:
            raise keys.missing("prefix_dense_intermediate_size", WIDTH)
        own = {
            "inner": dense or plain.inner,
            "rotation": turned,
            "windows": llama.windows_of(keys, kinds),
            "others": dict.fromkeys(_still(keys, kinds, sparse), no_rotation(plain.head_width)),
        }
        return cls(
            **vars(plain) | own,
            mixture=MixtureConfig(keys.experts("num_experts")[0], plain.inner, _routing(keys), shared or None),
            sparse=sparse,
            home="mlp",
            centred=eps is None,
            logit_scale=keys.get("logit_scale", FACTOR, 0.0625),
            share=0.5 if averaged else 1.0,
        )


def _routing(keys: Keys) -> Routing:
    scoring = SCORINGS[keys.get("expert_selection_fn", NAME, "softmax")]
    return Routing(keys.experts("num_experts")[1], scoring, renormalize=keys.get("norm_topk_prob", FLAG, True))


def _kinds(keys: Keys) -> tuple[tuple[str, ...], frozenset[int]]:
    """Return the kind of each layer and the layers with experts; some files have rules in place of lists."""
    first, layers = keys.get("first_k_dense_replace", LAYERS, 0), range(keys.layers)
    before = keys.get("prefix_dense_sliding_window_pattern", LAYER_INTERVAL, 1)
    every = keys.get("sliding_window_pattern", LAYER_INTERVAL, 4)
    windowed = [(index + 1) % before if index < first else (index - first + 1) % every for index in layers]
    by_rule = tuple(llama.SLIDING if each else llama.FULL for each in windowed)
    kinds = keys.layer_types(llama.SLIDING, llama.FULL) if "layer_types" in keys else by_rule
    if "mlp_layer_types" in keys:
        listed = keys.layer_types(DENSE, SPARSE, key="mlp_layer_types")
        return kinds, frozenset(index for index in layers if listed[index] == SPARSE)
    return kinds, frozenset(layers[first:])


def _still(keys: Keys, kinds: tuple[str, ...], sparse: frozenset[int]) -> list[int]:
    """Return the layers without RoPE."""
    if any(kind == llama.SLIDING for kind in kinds) and not keys.sliding_window():
        raise FormatError(f"{keys.title} has layers with a window and no sliding_window.")
    forced = keys.get("prefix_dense_sliding_window_pattern", LAYER_INTERVAL, 1) == 1
    return [index for index, kind in enumerate(kinds) if kind == llama.FULL and not (forced and index not in sparse)]


class Model(qwen3_moe.Model):
    """Attention and an MLP or experts side by side."""

    config: Config

    @classmethod
    def no_tensor_parallel(cls, config: Config) -> str | None:  # type: ignore[override]
        return "its attention and experts read one norm, which was not tried."

    def _layer(self, weights: Weights, name: str, index: int) -> Layer:
        config, norm = self.config, self.make_norm(weights, f"{name}.input_layernorm")
        mixer: Mixer = self.make_mixer(weights, name, index)
        dense: SharedExpert | None = None
        experts: Mixture | None = None
        if index in config.sparse:
            assert config.mixture is not None
            experts = biased_mixture(weights, f"{name}.mlp", config.hidden, config.mixture, None)
        else:
            dense = MLP(weights, f"{name}.mlp", config.hidden, config.inner).as_expert()
        options: dict[str, Any] = {"dense": dense, "experts": experts, "share": config.share, "centred": config.centred}
        return Parallel(norm, mixer, norm, NoMLP(), config.eps, **options)

    def _link_prefetch(self) -> None:
        predictor: ExpertPredictor | None = None
        for layer in reversed(self.layers):
            if layer.experts is not None:  # type: ignore[attr-defined]
                predictor = layer.experts.link_prefetch(predictor, layer.mlp_norm, layer.eps)  # type: ignore[attr-defined]

    def final_norm(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        return normed(x if delta is None else combine(x, delta), self.norm, self.config.eps, self.config.centred)

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) * self.config.logit_scale


def normed(x: Tensor, norm: Tensor, eps: float, centred: bool) -> Tensor:
    """Normalise rows, [T, H], and subtract their mean before if they are `centred`."""
    return layer_norm(x, norm, torch.zeros_like(norm), eps) if centred else LayerInput(x, None, norm, eps).normed()[1]


@dataclass(frozen=True, eq=False, kw_only=True)
class Parallel(Layer):
    """Attention and an MLP, `dense`, or experts, all of which read one norm."""

    dense: SharedExpert | None
    experts: Mixture | None
    share: float
    centred: bool

    def __call__(self, x: Tensor, delta: Tensor | None, batch: Batch | MixedBatch, store: Any) -> Residual:
        h = self._normed(x)
        _, attended = self.mixer(PreparedInput(h), batch, store)
        found = shared_output(h, self.dense)
        if self.experts is not None:
            found = self.experts(PreparedInput(h))[0]
            found = found if self.share == 1 else found * self.share
        assert found is not None
        return combine(x, attended, found), None

    def update_cache(self, x: Tensor, delta: Tensor | None, batch: Batch, store: Any) -> None:
        """Append new tokens to the cache; the output is not needed."""
        self.mixer.update_cache(PreparedInput(self._normed(x)), batch, store)

    def _normed(self, x: Tensor) -> Tensor:
        return normed(x, self.mixer_norm, self.eps, self.centred)


make_caches = qwen3_moe.make_caches
