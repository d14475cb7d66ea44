"""DeepSeek V3 and models with its architecture: latent attention (MLA), and group-limited experts with sigmoid scores.

Kimi K2 has other sizes, Kimi K2.5 has it as its text model; GLM 4 Lite lists the layers with experts. DeepSeek V2 routes by
softmax, and so does Mistral 4, which scales queries by their positions.

Keys and values of all heads are rows of `kv_b_proj` times one latent. The matrix is absorbed: its key rows apply to queries and
its value rows to the attention output, so the KV cache holds latents only.
"""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from auraflux.adapters.linears import add_norm_linears, linear
from auraflux.cache import Batch, LatentShape
from auraflux.models.config import Keys
from auraflux.models.decoder import Decoder, text_name
from auraflux.models.layer import FeedForward, LayerInput, Mixer, PartMixer
from auraflux.models.mixture import MixtureConfig, biased_mixture
from auraflux.models.mlp import AddedMLP
from auraflux.models.mtp import MTPNames, after_last
from auraflux.models.output_norms import NormedMixture
from auraflux.models.rotation import Growth, RopeSettings, Rotation, growth, rope_settings, rotation
from auraflux.ops import Routing, gate_heads, latent_output, latent_query
from auraflux.quant import QTensor
from auraflux.weights.fields import COUNT, EXPERTS, FACTOR, HEAD, LATENT, LAYER_INTERVAL, LAYERS, NAME, SHARED_EXPERTS, WIDTH
from auraflux.weights.formats.stored import Stored
from auraflux.weights.formats.untrusted import FLAG
from auraflux.weights.loader import Weights
from auraflux.weights.parallel.tensor_slices import cut, span

DENSE, SPARSE = "dense", "sparse"
SIGMOID, SOFTMAX = "sigmoid", "softmax"
# how experts are scored and chosen, where not as in DeepSeek V3
GREEDY, BY_GROUPS = "greedy", "group_limited_greedy"
ACCEPTED: dict[str, dict[str, tuple[bool | str, ...]]] = {
    "deepseek_v2": {"topk_method": (GREEDY, BY_GROUPS), "scoring_func": (SOFTMAX,), "norm_topk_prob": (False,)},
}
LIKE_V3: dict[str, tuple[bool | str, ...]] = {"topk_method": ("noaux_tc",), "scoring_func": (SIGMOID,)}
LATENT_EPS = 1e-6  # of the norms within attention, independent of rms_norm_eps


@dataclass(frozen=True)
class Widths:
    """The widths of latent attention.

    query        the queries' low rank; None for full rank
    latent       the cached latent of keys and values
    nope, rope   the unrotated and the rotated part of a head's query
    value        a head's value
    """

    query: int | None
    latent: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True, eq=False)
class Config:
    """hidden, inner, vocab are widths.

    sparse    the layers with experts
    extra     MTP heads after the last layer
    scale     of the attention scores
    growth    scales queries by their positions
    output_norm  outputs of mixtures are normalised
    """

    hidden: int
    inner: int
    vocab: int
    layers: int
    extra: int
    heads: int
    widths: Widths
    scale: float
    growth: Growth | None
    sparse: tuple[bool, ...]
    mixture: MixtureConfig
    eps: float
    tied: bool
    context: int
    rotation: Rotation
    output_norm: bool

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        return read_config(Keys(config))


def read_config(keys: Keys) -> Config:
    """Read the body, which other families share."""
    keys.only("hidden_act", "silu")
    for key, accepted in ACCEPTED.get(keys.kind or "", LIKE_V3).items():
        keys.only(key, *accepted)
    settings, widths = rope_settings(keys), _widths(keys)
    return Config(
        hidden=keys.hidden,
        inner=keys.inner,
        vocab=keys.vocab(),
        layers=keys.layers,
        extra=keys.get("num_nextn_predict_layers", LAYERS, 0),
        heads=keys.heads,
        widths=widths,
        scale=(widths.nope + widths.rope) ** -0.5 * _enlargement(settings) ** 2,
        growth=growth(settings),
        sparse=sparse_layers(keys),
        mixture=mixture(keys, SOFTMAX if keys.kind in ("mistral4", "deepseek_v2") else SIGMOID),
        eps=keys.eps(),
        tied=keys.tied_outside(False),
        context=keys.context(4096),
        rotation=rotation(keys, widths.rope, settings, keys.get("rope_interleave", FLAG, True)),
        output_norm=keys.kind == "axk1",
    )


def _widths(keys: Keys) -> Widths:
    return Widths(
        query=keys.get("q_lora_rank", WIDTH, None),
        latent=keys.read("kv_lora_rank", LATENT),
        nope=keys.read("qk_nope_head_dim", HEAD),
        rope=keys.read("qk_rope_head_dim", HEAD),
        value=keys.read("v_head_dim", HEAD),
    )


def _enlargement(settings: RopeSettings) -> float:
    """Return the factor by which YaRN scales queries and keys, in addition to their RoPE dimensions."""
    slope, factor = settings.mscale_all_dim, settings.factor
    if settings.rope_type == "default" or not slope or factor is None or factor <= 1:
        return 1.0
    return 0.1 * slope * math.log(factor) + 1.0


def sparse_layers(keys: Keys) -> tuple[bool, ...]:
    """Return the layers with experts: those the checkpoint lists, or those after the first dense ones."""
    layers = range(keys.layers)
    if "mlp_layer_types" in keys:
        return tuple(kind == SPARSE for kind in keys.layer_types(DENSE, SPARSE, key="mlp_layer_types"))
    first, every = keys.get("first_k_dense_replace", LAYERS, 0), keys.get("moe_layer_freq", LAYER_INTERVAL, 1)
    return tuple(keys.get("n_routed_experts", EXPERTS, 0) > 0 and i >= first and i % every == 0 for i in layers)


def mixture(keys: Keys, scoring: str = SIGMOID) -> MixtureConfig:
    """The experts of a layer and how they are chosen."""
    inner, (count, chosen) = keys.expert_inner, keys.experts("n_routed_experts", default=0)
    groups, best = _groups(keys, scoring), keys.get("topk_group", COUNT, 1)
    routing = Routing(
        k=chosen,
        scoring=scoring,
        renormalize=keys.get("norm_topk_prob", FLAG, keys.kind != "deepseek_v2"),
        groups=groups,
        topk_groups=best if groups > 1 else 1,
        scale=keys.get("routed_scaling_factor", FACTOR, 1.0),
    )
    return MixtureConfig(count, inner, routing, inner * keys.get("n_shared_experts", SHARED_EXPERTS, 0) or None)


def _groups(keys: Keys, scoring: str) -> int:
    if keys.kind == "deepseek_v2":
        found = keys.get("n_group", COUNT, 1)
        return found if keys.get("topk_method", NAME, GREEDY) == BY_GROUPS else 1
    if scoring == SOFTMAX:
        keys.only("n_group", 1)
    return keys.get("n_group", COUNT, 1)


class Model(Decoder[Config]):
    """Latent attention, then an MLP in the first layers and experts in the others."""

    @classmethod
    def mtp_names(cls, config: Config) -> MTPNames | None:
        return after_last(config.layers, config.extra, config.layers - 1)

    def make_mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        return Attention(self.config, weights, f"{name}.self_attn")

    def make_mlp(self, weights: Weights, name: str, index: int) -> FeedForward:
        config, name = self.config, f"{name}.mlp"
        if not config.sparse[index]:
            return AddedMLP(weights, name, config.hidden, config.inner)
        bias = "gate.e_score_correction_bias" if config.mixture.routing.scoring == SIGMOID else None
        made = biased_mixture(weights, name, config.hidden, config.mixture, bias)
        if not config.output_norm:
            return made
        norm = self.make_norm(weights, f"{name.removesuffix('.mlp')}.post_mlp_layernorm")
        return NormedMixture(**vars(made), norm=norm, eps=config.eps, join=weights.slices.all_reduce)


class Attention(PartMixer):
    """Latent attention over the cache; a `gate` is a projection to one gate per head."""

    def __init__(self, config: Config, weights: Weights, name: str):
        mine = weights.slices.heads(config.heads)
        self.heads, self.nope, self.scale, self.growth = len(mine), config.widths.nope, config.scale, config.growth
        self.rotation = config.rotation.to(weights.device)
        hidden, widths = config.hidden, config.widths
        self.query = self.make_query(config, weights, name, mine)
        self.kv_a = Projection(weights, f"{name}.kv_a_proj_with_mqa", widths.latent + widths.rope, hidden)
        self.latent_norm = weights.vector(f"{name}.kv_a_layernorm.weight", widths.latent)
        # mlx-lm's layout
        halves = weights.has(f"{name}.embed_q.weight")
        self.gate: Projection | None = None
        self.kv_b = (Halves if halves else Rows)(weights, name, config.heads, mine, widths)
        self.out = Output(weights, f"{name}.o_proj", hidden, config.heads * widths.value, span(mine, widths.value))

    def make_query(self, config: Config, weights: Weights, name: str, mine: range) -> "FullRank | LowRank":
        """Load the projection of queries, of some heads."""
        widths = config.widths
        each = widths.nope + widths.rope
        rows = config.heads * each, span(mine, each)
        if widths.query is None:
            return FullRank(weights, f"{name}.q", *rows, config.hidden)
        return LowRank(weights, f"{name}.q", *rows, widths.query, config.hidden)

    def mix(self, inputs: LayerInput, batch: Batch, store: Any) -> tuple[Tensor, Tensor]:
        """Return the residual stream with its delta added, and the next delta, both [T, H]."""
        total, q_nope, q_rope, *gates = self.append(inputs, batch, store)
        if self.growth is not None:
            q_nope, q_rope = (self.growth(part, batch.positions) for part in (q_nope, q_rope))
        mixed = store.attend(batch, self.kv_b.query(q_nope), q_rope, self.scale)
        found = self.kv_b.output(mixed)
        return total, self.out((gate_heads(found, gates[0]) if gates else found).flatten(1))

    def update_cache(self, inputs: LayerInput, batch: Batch, store: Any) -> None:
        """Append the latents of new tokens to the cache."""
        self.append(inputs, batch, store)

    def append(self, inputs: LayerInput, batch: Batch, store: Any) -> tuple[Tensor, ...]:
        """Append latents to the cache; return the residual stream with its delta added, both parts of queries, and gates."""
        first = [self.query.first, self.kv_a, *([] if self.gate is None else [self.gate])]
        total, (q, kv, *gates) = inputs.linears([each.weight for each in first], [each.bias for each in first])
        sizes = self.heads, self.nope
        rotated = store.rope_append(batch, self.query.rest(q), kv, *sizes, self.rotation, self.latent_norm, LATENT_EPS)
        return total, *rotated, *gates


class Projection:
    """A matrix and its bias or None; `some` of their rows, by default all; or all, in the order `take`."""

    def __init__(
        self, weights: Weights, name: str, rows: int, width: int, some: range | None = None, take: Tensor | None = None
    ):
        self.weight = weights.matrix(name, rows, width, take) if some is None else weights.row_shard(name, rows, width, some)
        self.bias = weights.bias(name, rows, some)

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Output:
    """The output projection of some heads, summed over ranks."""

    def __init__(self, weights: Weights, name: str, rows: int, width: int, columns: range):
        self.weight, self.bias = weights.column_shard(name, rows, width, columns), weights.bias_on_first_rank(name, rows)
        self.join = weights.slices.all_reduce

    def __call__(self, x: Tensor) -> Tensor:
        return self.join(linear(x, self.weight, self.bias))


class FullRank:
    """Full-rank queries: one projection."""

    def __init__(self, weights: Weights, name: str, rows: int, some: range, width: int):
        self.first = Projection(weights, f"{name}_proj", rows, width, some)

    def rest(self, q: Tensor) -> Tensor:
        return q


class LowRank:
    """Low-rank queries: b(norm(a x)); b may have more `inputs` than the rank."""

    def __init__(self, weights: Weights, name: str, rows: int, some: range, rank: int, width: int, inputs: int | None = None):
        self.first = Projection(weights, f"{name}_a_proj", rank, width)
        self.norm = weights.vector(f"{name}_a_layernorm.weight", rank)
        self.b = Projection(weights, f"{name}_b_proj", rows, rank if inputs is None else inputs, some)

    def rest(self, q: Tensor) -> Tensor:
        return add_norm_linears(q, None, self.norm, LATENT_EPS, [self.b.weight], [self.b.bias])[1][0]


class Rows:
    """kv_b_proj in transformers' layout: for each head the key rows, then the value rows."""

    def __init__(self, weights: Weights, name: str, heads: int, mine: range, widths: Widths):
        self.nope, self.rows = widths.nope, widths.nope + widths.value
        some = span(mine, self.rows)
        self.weight = weights.row_shard(f"{name}.kv_b_proj", heads * self.rows, widths.latent, some, in_order=True)

    def query(self, q_nope: Tensor) -> Tensor:
        """Project queries into the latent space: [T, H, nope] -> [T, H, latent]."""
        return latent_query(q_nope, self.weight, self.rows)

    def output(self, mixed: Tensor) -> Tensor:
        """Project attended latents to values: [T, H, latent] -> [T, H, value]."""
        return latent_output(mixed, self.weight, self.nope)


class Halves:
    """kv_b_proj in mlx-lm's layout: a stack of the heads' transposed key rows, and one of their value rows."""

    def __init__(self, weights: Weights, name: str, heads: int, mine: range, widths: Widths):
        self.keys = _stack(weights, f"{name}.embed_q.weight", heads, mine, widths.latent, widths.nope)
        self.values = _stack(weights, f"{name}.unembed_out.weight", heads, mine, widths.value, widths.latent)

    def query(self, q_nope: Tensor) -> Tensor:
        """Project queries into the latent space: [T, H, nope] -> [T, H, latent]."""
        # transposed key rows are used like value rows
        return latent_output(q_nope, self.keys, 0)

    def output(self, mixed: Tensor) -> Tensor:
        """Project attended latents to values: [T, H, latent] -> [T, H, value]."""
        return latent_output(mixed, self.values, 0)


def _stack(weights: Weights, name: str, heads: int, mine: range, rows: int, width: int) -> Stored:
    """Load some heads' rows as one matrix, [heads * rows, width]."""
    found = weights.quantized(weights.stored(name, heads, rows, width), name)
    loaded = weights.complete(name, weights.to_kernel_layout(found, in_order=True))
    return cut(loaded.flatten_stack() if isinstance(loaded, QTensor) else loaded.flatten(0, 1), span(mine, rows), None)


rename = text_name


def make_caches(config: Config) -> list[LatentShape]:
    return [LatentShape(config.widths.latent, config.widths.rope)] * config.layers
