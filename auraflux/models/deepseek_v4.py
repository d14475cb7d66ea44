"""DeepSeek V4: hyper-connections, compressed attention, and hash-routed experts in the first layers."""

import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from auraflux.adapters.linears import add_norm_scores, linear, linears, run_experts
from auraflux.cache import CompressedShape
from auraflux.errors import FormatError
from auraflux.models.compressed_attention import HEAVY, SPARSE, WINDOW, Attention, AttentionConfig, Index, Widths
from auraflux.models.config import Keys
from auraflux.models.decoder import Decoder, text_name
from auraflux.models.hyper_connections import Hyper, HyperLayer, Readout
from auraflux.models.layer import FeedForward, Layer, LayerInput, Mixer, Residual
from auraflux.models.mixture import MixtureConfig
from auraflux.models.rotation import RopeSettings, Rotation, rope_settings, rotation
from auraflux.ops import Limit, Routing, combine, limited_swiglu, rms_norm, route, start_streams, weigh_experts
from auraflux.weights.experts.load_layer import load_experts
from auraflux.weights.fields import (
    COUNT,
    EPS,
    FACTOR,
    FRACTION,
    HEAD,
    LAYERS,
    MOST_LAYERS,
    NAME,
    STREAMS,
    THETA,
    TOKEN_COUNT,
    WIDTH,
)
from auraflux.weights.formats.untrusted import integer, list_of, mapping_of
from auraflux.weights.loader import Weights

HASHED, SCORED = "hash_moe", "moe"
KINDS = {0: WINDOW, 4: SPARSE, 128: HEAVY}  # by the compress_ratios of older configs
ROPE_SHARE = 64 / 512  # of a head, unless a config says otherwise


@dataclass(frozen=True, eq=False)
class Config(AttentionConfig):
    """Attention, hyper-connections and experts.

    hashed  the layers with hash routing: a table gives each token id's experts
    limit   clamps the experts' activations
    """

    vocab: int
    layers: int
    window: int
    hyper: Hyper
    hashed: tuple[bool, ...]
    mixture: MixtureConfig
    limit: float
    tied: bool
    context: int

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys = Keys(config)
        for key, accepted in ONLY.items():
            keys.only(key, *accepted)
        widths, index = _widths(keys), _index(keys)
        head, turned = widths.head, keys.get("qk_rope_head_dim", HEAD, None)
        if turned is None:
            turned = int(head * keys.get("partial_rotary_factor", FRACTION, ROPE_SHARE))
        _check_widths(keys.heads, widths, index, turned)
        plain, stretched = (rotation(keys, turned, each, True) for each in _rope_settings(keys))
        return cls(
            hidden=keys.hidden,
            vocab=keys.vocab(),
            layers=keys.layers,
            heads=keys.heads,
            widths=widths,
            window=keys.window(),
            kinds=_kinds(keys),
            rates=_rates(keys),
            index=index,
            hyper=Hyper(
                keys.read("hc_mult", STREAMS), keys.read("hc_sinkhorn_iters", integer(1, 1000)), keys.read("hc_eps", EPS)
            ),
            hashed=_hashed(keys),
            mixture=_mixture(keys),
            limit=keys.read("swiglu_limit", FACTOR),
            eps=keys.eps(),
            tied=keys.tied(),
            context=keys.context(4096),
            rotations=(_last(plain, head), _last(stretched, head)),
            index_rotation=_last(stretched, index.width),
        )


ONLY: dict[str, tuple[bool | int | str, ...]] = {
    "hidden_act": ("silu",),
    "scoring_func": ("sqrtsoftplus", "sigmoid"),
    "topk_method": ("noaux_tc",),
    "norm_topk_prob": (True,),
    "num_key_value_heads": (1,),
    "n_shared_experts": (1,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
}


def _widths(keys: Keys) -> Widths:
    head, query = keys.read("head_dim", HEAD), keys.read("q_lora_rank", WIDTH)
    return Widths(query, head, keys.read("o_groups", COUNT), keys.read("o_lora_rank", WIDTH))


def _index(keys: Keys) -> Index:
    heads, width = keys.read("index_n_heads", COUNT), keys.read("index_head_dim", HEAD)
    return Index(heads, width, keys.read("index_topk", TOKEN_COUNT))


def _check_widths(heads: int, widths: Widths, index: Index, turned: int) -> None:
    if turned % 2 or turned > min(widths.head, index.width) or widths.head % 2 or index.width % 2:
        raise FormatError(
            f"config.json rotates {turned} channels of heads of {widths.head} and of index_head_dim {index.width}; "
            "an even number of both is needed."
        )
    if widths.groups < 1 or heads % widths.groups:
        raise FormatError(f"config.json has o_groups {widths.groups}, into which {heads} heads do not divide.")


def _rope_settings(keys: Keys) -> tuple[RopeSettings, RopeSettings]:
    """Return the settings of both rotations; YaRN does not scale attention unless the config says so."""
    if {"main", "compress"} <= {*keys.section("rope_parameters").sections()}:
        return rope_settings(keys, "main"), rope_settings(keys, "compress")
    stretched = replace(rope_settings(keys), rope_theta=keys.read("compress_rope_theta", THETA))
    if stretched.rope_type == "yarn" and stretched.attention_factor is None:
        stretched = replace(stretched, attention_factor=1.0)
    return RopeSettings(rope_theta=keys.theta()), stretched


def _last(rotation: Rotation, width: int) -> Rotation:
    """Apply a rotation to the last channels of `width`; the channels before stay unrotated."""
    still = torch.zeros(width // 2 - len(rotation.frequencies))
    return Rotation(torch.cat([still, rotation.frequencies]), rotation.mscale, True)


def _kinds(keys: Keys) -> tuple[str, ...]:
    if "layer_types" in keys or "compress_ratios" not in keys:
        return keys.layer_types(WINDOW, SPARSE, HEAVY)
    # a further one is of the layer that predicts further tokens
    ratios, layers = keys.read("compress_ratios", list_of(integer(0, 1 << 24), MOST_LAYERS)), keys.layers
    if len(ratios) < layers or not set(ratios) <= set(KINDS):
        raise FormatError(f"config.json has {len(ratios)} compress_ratios for {layers} layers; 0, 4 and 128 are supported.")
    return tuple(KINDS[ratio] for ratio in ratios[:layers])


def _rates(keys: Keys) -> dict[str, int]:
    listed = keys.get("compress_rates", mapping_of(TOKEN_COUNT, 16), {})
    usual = {
        SPARSE: keys.get("compress_rate_csa", TOKEN_COUNT, 4),
        HEAVY: keys.get("compress_rate_hca", TOKEN_COUNT, 128),
    }
    return usual | {kind: rate for kind, rate in listed.items() if kind in usual}


def _hashed(keys: Keys) -> tuple[bool, ...]:
    """Return for each layer if its routing is by hash: those that the checkpoint lists, or the first."""
    if "mlp_layer_types" in keys:
        return tuple(kind == HASHED for kind in keys.layer_types(HASHED, SCORED, key="mlp_layer_types"))
    first = keys.get("num_hash_layers", LAYERS, 3)
    return tuple(i < first for i in range(keys.layers))


def _mixture(keys: Keys) -> MixtureConfig:
    count, chosen = keys.experts("n_routed_experts")
    scoring, scale = keys.get("scoring_func", NAME, "sqrtsoftplus"), keys.get("routed_scaling_factor", FACTOR, 1.0)
    return MixtureConfig(count, keys.expert_inner, Routing(chosen, scoring, True, scale=scale), keys.expert_inner)


class Model(Decoder[Config]):
    """Compressed attention, then experts, with hyper-connections."""

    def __init__(self, config: Config, weights: Weights):
        self.tokens = Tokens()
        super().__init__(config, weights)
        self.read = Readout(config.hyper, config.hidden, config.eps, weights, "model.hc_head")

    @classmethod
    def no_pipeline_parallel(cls, config: Config) -> str | None:
        return "a token has several residual streams between layers, and some layers read token ids."

    def make_mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        return Attention(self.config, weights, f"{name}.self_attn", index)

    def make_mlp(self, weights: Weights, name: str, index: int) -> FeedForward:
        return Mixture(self.config, weights, f"{name}.mlp", self.tokens if self.config.hashed[index] else None)

    def _layer(self, weights: Weights, name: str, index: int) -> Layer:
        made = super()._layer(weights, name, index)
        return HyperLayer.around_parts(made, self.config.hyper, self.config.hidden, weights, name)

    def embed_tokens(self, ids: Tensor) -> Tensor:
        """Start the residual streams, all with the same embedding: [T] -> [T, N, H]."""
        self.tokens.ids = ids
        return start_streams(super().embed_tokens(ids), self.config.hyper.count)

    def final_norm(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """Collapse and normalise the output of the last layer: [T, N, H] -> [T, H]."""
        return rms_norm(self.read(x), self.norm, self.config.eps)


class Tokens:
    """The token ids of the current step, [T]."""

    ids: Tensor


class Mixture(FeedForward):
    """Routed experts and a shared expert; their sum is the next delta.

    tokens  of a step, for hash routing; None for routing by scores
    """

    def __init__(self, config: Config, weights: Weights, name: str, tokens: Tokens | None):
        mixture, hidden, inner = config.mixture, config.hidden, config.mixture.inner
        self.routing, self.limit, self.tokens = mixture.routing, config.limit, tokens
        self.router = weights.matrix(f"{name}.gate", mixture.count, hidden)
        self.experts = load_experts(weights, name, mixture.count, hidden, inner, Limit(float(config.limit)))
        self.first = [weights.matrix(f"{name}.shared_experts.{part}_proj", inner, hidden) for part in ("gate", "up")]
        self.down = weights.matrix(f"{name}.shared_experts.down_proj", hidden, inner)
        if tokens is None:
            self.bias = weights.vector(f"{name}.gate.e_score_correction_bias", mixture.count)
        else:
            self.table = weights.indices(f"{name}.gate.tid2eid", config.vocab, mixture.routing.k, below=mixture.count)

    def __call__(self, inputs: LayerInput) -> Residual:
        """Return the residual stream and the next delta, both [T, H]."""
        h, residual, (scores,) = add_norm_scores(*inputs, (self.router,), (None,))
        found = run_experts(self.experts, h, *self._chosen(scores))
        gate, up = linears(h, self.first)
        return residual, combine(found, linear(limited_swiglu(gate, up, self.limit), self.down))

    def _chosen(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        if self.tokens is None:
            return route(scores, self.routing, self.bias)
        ids = self.table[self.tokens.ids.long()]
        return ids, weigh_experts(scores, ids, self.routing)


# published names -> transformers' names
NAMES = [
    (r"^(?=layers\.|norm\.|hc_head)", "model."),
    (r"^embed\.", "model.embed_tokens."),
    (r"^head\.", "lm_head."),
    (r"hc_head_", "hc_head.hc_"),
    (r"\.hc_(attn|ffn)_", r".\1_hc."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.", ".mlp."),
    (r"\.attn_sink$", ".sinks"),
    (r"\.self_attn\.indexer\.compressor\.", ".self_attn.compressor.indexer."),
    (r"\.self_attn\.indexer\.weights_proj\.", ".self_attn.compressor.indexer.scorer.weights_proj."),
    (r"\.self_attn\.indexer\.", ".self_attn.compressor.indexer."),
    (r"(\.self_attn\.(?:compressor\.(?:indexer\.)?)?)norm\.", r"\1kv_norm."),
    (r"\.ape$", ".position_bias"),
    (r"\.q_norm\.", ".q_a_norm."),
    (r"\.w(q_a|q_b|kv|o_a|o_b)\.", r".\1_proj."),
    (r"\.wgate\.", ".gate_proj."),
    (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
    (r"(experts\.(?:\d+\.)?)w1\.", r"\1gate_proj."),
    (r"(experts\.(?:\d+\.)?)w2\.", r"\1down_proj."),
    (r"(experts\.(?:\d+\.)?)w3\.", r"\1up_proj."),
]


def rename(name: str) -> str | None:
    """Return our name for a tensor; None for unused tensors and MTP heads."""
    found = text_name(name)
    if found is None or re.search(r"(^|\.)mtp\.", found):
        return None
    for pattern, ours in NAMES:
        found = re.sub(pattern, ours, found)
    return found


def make_caches(config: Config) -> list[CompressedShape]:
    width, index = config.widths.head, config.index
    shapes = {
        WINDOW: CompressedShape(width, config.window),
        SPARSE: CompressedShape(width, config.window, config.rates[SPARSE], True, index.width, index.most),
        HEAVY: CompressedShape(width, config.window, config.rates[HEAVY]),
    }
    return [shapes[kind] for kind in config.kinds]
