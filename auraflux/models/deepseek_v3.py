"""DeepSeek V3 and those with its body: latent attention, and experts chosen by sigmoid scores from the best groups.

Kimi K2 is it with other numbers, Kimi K2.5 has it as its text part; GLM 4 Lite lists the layers that have experts. Mistral 4
chooses them by softmax, and its queries grow with their positions.

Keys and values of all heads are rows of `kv_b_proj` times one latent. The matrix is never applied to latents: its key rows go
with the queries, its value rows with what attention has mixed, and the cache holds latents only.
"""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from auraflux.cache import Batch, LatentShape
from auraflux.models.config import Keys
from auraflux.models.decoder import Decoder, FeedForward, Mixer, Stream, text_name
from auraflux.models.mixture import MixtureConfig, biased_mixture
from auraflux.models.mlp import AddedMLP
from auraflux.models.mtp import Place, after_last
from auraflux.models.rotation import Growth, Rotation, growth, rope_settings, rotation
from auraflux.ops import Routing, add_norm_linears, latent_output, latent_query, linear
from auraflux.quant import QTensor
from auraflux.weights.loader import Weights
from auraflux.weights.slices import cut, span
from auraflux.weights.stored import Stored

DENSE, SPARSE = "dense", "sparse"
LATENT_EPS = 1e-6  # of the norms within attention, whatever rms_norm_eps says


@dataclass(frozen=True)
class Widths:
    """The widths of latent attention.

    query        the queries' low rank; None where they have none
    latent       what is kept of keys and values
    nope, rope   of a head's query: the plain part and the rotated one
    value        of a head
    """

    query: int | None
    latent: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True, eq=False)
class Config:
    """hidden, inner, vocab are widths.

    sparse    which layers have experts
    extra     layers after the last, which predict further tokens
    scale     of the scores
    growth    of queries with their positions
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

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys = Keys(config)
        for key, accepted in {"hidden_act": "silu", "topk_method": "noaux_tc", "scoring_func": "sigmoid"}.items():
            keys.refuse(key, accepted)
        settings, rope = rope_settings(keys), keys["qk_rope_head_dim"]
        widths = Widths(keys.get("q_lora_rank", None), keys["kv_lora_rank"], keys["qk_nope_head_dim"], rope, keys["v_head_dim"])
        return cls(
            hidden=keys["hidden_size"],
            inner=keys["intermediate_size"],
            vocab=keys["vocab_size"],
            layers=keys["num_hidden_layers"],
            extra=keys.get("num_nextn_predict_layers", 0),
            heads=keys["num_attention_heads"],
            widths=widths,
            scale=(widths.nope + rope) ** -0.5 * _enlargement(settings) ** 2,
            growth=growth(settings),
            sparse=sparse_layers(keys),
            mixture=mixture(keys, "softmax" if keys.kind == "mistral4" else "sigmoid"),
            eps=keys["rms_norm_eps"],
            tied=config.get("tie_word_embeddings", keys.get("tie_word_embeddings", False)),
            context=keys.get("max_position_embeddings", 4096),
            rotation=rotation(keys, rope, settings, keys.get("rope_interleave", True)),
        )


def _enlargement(settings: dict[str, Any]) -> float:
    """How much YaRN enlarges queries and keys, beyond what it does to their rotated parts."""
    slope, factor = settings.get("mscale_all_dim"), settings.get("factor", 1.0)
    if settings["rope_type"] == "default" or not slope or factor <= 1:
        return 1.0
    return 0.1 * slope * math.log(factor) + 1.0


def sparse_layers(keys: Keys) -> tuple[bool, ...]:
    """Which layers have experts: those the checkpoint lists, or those after the first."""
    layers = range(keys["num_hidden_layers"])
    if "mlp_layer_types" in keys:
        return tuple(kind == SPARSE for kind in keys.layer_types(DENSE, SPARSE, key="mlp_layer_types"))
    first, every = keys.get("first_k_dense_replace", 0), keys.get("moe_layer_freq", 1)
    return tuple(keys.get("n_routed_experts", 0) > 0 and i >= first and i % every == 0 for i in layers)


def mixture(keys: Keys, scoring: str = "sigmoid") -> MixtureConfig:
    """The experts of a layer and how they are chosen."""
    inner = keys["moe_intermediate_size"]
    routing = Routing(
        k=keys["num_experts_per_tok"],
        scoring=scoring,
        renormalize=keys.get("norm_topk_prob", True),
        groups=_groups(keys, scoring),
        kept_groups=keys.get("topk_group", 1),
        scale=keys.get("routed_scaling_factor", 1.0),
    )
    return MixtureConfig(keys.get("n_routed_experts", 0), inner, routing, inner * keys.get("n_shared_experts", 0) or None)


def _groups(keys: Keys, scoring: str) -> int:
    if scoring == "softmax":
        keys.refuse("n_group", 1)
    return keys.get("n_group", 1)


class Model(Decoder[Config]):
    """Latent attention, then an MLP in the first layers and experts in the others."""

    beside = True

    @classmethod
    def mtp_place(cls, config: Config) -> Place | None:
        return after_last(config.layers, config.extra, config.layers - 1)

    def make_mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        return Attention(self.config, weights, f"{name}.self_attn")

    def make_mlp(self, weights: Weights, name: str, index: int) -> FeedForward:
        config, name = self.config, f"{name}.mlp"
        if not config.sparse[index]:
            return AddedMLP(weights, name, config.hidden, config.inner)
        bias = "gate.e_score_correction_bias" if config.mixture.routing.scoring == "sigmoid" else None
        return biased_mixture(weights, name, config.hidden, config.mixture, bias)


class Attention(Mixer):
    """Latent attention over the cache."""

    def __init__(self, config: Config, weights: Weights, name: str):
        mine = weights.slices.heads(config.heads)
        self.heads, self.nope, self.scale, self.growth = len(mine), config.widths.nope, config.scale, config.growth
        self.rotation = config.rotation.to(weights.device)
        hidden, widths = config.hidden, config.widths
        self.query = _queries(config, weights, name, mine)
        self.kv_a = Projection(weights, f"{name}.kv_a_proj_with_mqa", widths.latent + widths.rope, hidden)
        self.latent_norm = weights.vector(f"{name}.kv_a_layernorm.weight", widths.latent)
        # how mlx-lm writes it
        halves = weights.has(f"{name}.embed_q.weight")
        self.kv_b = (Halves if halves else Rows)(weights, name, config.heads, mine, widths)
        self.out = Output(weights, f"{name}.o_proj", hidden, config.heads * widths.value, span(mine, widths.value))

    def __call__(self, stream: Stream, batch: Batch, store: Any) -> tuple[Tensor, Tensor]:
        """Give the stream with all that was to be added to it, and what comes next, both [T, H]."""
        total, q_nope, q_rope = self.remember(stream, batch, store)
        if self.growth is not None:
            q_nope, q_rope = (self.growth(part, batch.positions) for part in (q_nope, q_rope))
        mixed = store.attend(batch, self.kv_b.query(q_nope), q_rope, self.scale)
        return total, self.out(self.kv_b.output(mixed).flatten(1))

    def remember(self, stream: Stream, batch: Batch, store: Any) -> tuple[Tensor, ...]:
        """Store latents: gives the stream with all that was to be added to it, and both parts of the queries."""
        both = self.query.first, self.kv_a
        total, (q, kv) = add_norm_linears(*stream, [each.weight for each in both], [each.bias for each in both])
        sizes = self.heads, self.nope
        rotated = store.rope_append(batch, self.query.rest(q), kv, *sizes, self.rotation, self.latent_norm, LATENT_EPS)
        return total, *rotated


class Projection:
    """A matrix and its bias, if it has one; `some` of their rows, by default all."""

    def __init__(self, weights: Weights, name: str, rows: int, width: int, some: range | None = None):
        self.weight = weights.matrix(name, rows, width) if some is None else weights.some_rows(name, rows, width, some)
        self.bias = weights.bias(name, rows, some)

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Output:
    """What leads from some heads back to the stream."""

    def __init__(self, weights: Weights, name: str, rows: int, width: int, columns: range):
        self.weight, self.bias = weights.some_columns(name, rows, width, columns), weights.bias_once(name, rows)
        self.join = weights.slices.join

    def __call__(self, x: Tensor) -> Tensor:
        return self.join(linear(x, self.weight, self.bias))


class FullRank:
    """Queries are the first product."""

    def __init__(self, weights: Weights, name: str, rows: int, some: range, width: int):
        self.first = Projection(weights, f"{name}_proj", rows, width, some)

    def rest(self, q: Tensor) -> Tensor:
        return q


class LowRank:
    """Queries are b(norm(a x)), a the first product."""

    def __init__(self, weights: Weights, name: str, rows: int, some: range, rank: int, width: int):
        self.first = Projection(weights, f"{name}_a_proj", rank, width)
        self.norm = weights.vector(f"{name}_a_layernorm.weight", rank)
        self.b = Projection(weights, f"{name}_b_proj", rows, rank, some)

    def rest(self, q: Tensor) -> Tensor:
        return add_norm_linears(q, None, self.norm, LATENT_EPS, [self.b.weight], [self.b.bias])[1][0]


def _queries(config: Config, weights: Weights, name: str, mine: range) -> FullRank | LowRank:
    widths = config.widths
    each = widths.nope + widths.rope
    rows = config.heads * each, span(mine, each)
    if widths.query is None:
        return FullRank(weights, f"{name}.q", *rows, config.hidden)
    return LowRank(weights, f"{name}.q", *rows, widths.query, config.hidden)


class Rows:
    """kv_b_proj as it is: for each head the rows for keys, then those for values."""

    def __init__(self, weights: Weights, name: str, heads: int, mine: range, widths: Widths):
        self.nope, self.rows = widths.nope, widths.nope + widths.value
        some = span(mine, self.rows)
        self.weight = weights.some_rows(f"{name}.kv_b_proj", heads * self.rows, widths.latent, some, in_order=True)

    def query(self, q_nope: Tensor) -> Tensor:
        """Carry queries into the latent space: [T, H, nope] -> [T, H, latent]."""
        return latent_query(q_nope, self.weight, self.rows)

    def output(self, mixed: Tensor) -> Tensor:
        """Make values of mixed latents: [T, H, latent] -> [T, H, value]."""
        return latent_output(mixed, self.weight, self.nope)


class Halves:
    """kv_b_proj as mlx-lm keeps it: a stack of the heads' key rows, turned over, and one of their value rows."""

    def __init__(self, weights: Weights, name: str, heads: int, mine: range, widths: Widths):
        self.keys = _stack(weights, f"{name}.embed_q.weight", heads, mine, widths.latent, widths.nope)
        self.values = _stack(weights, f"{name}.unembed_out.weight", heads, mine, widths.value, widths.latent)

    def query(self, q_nope: Tensor) -> Tensor:
        """Carry queries into the latent space: [T, H, nope] -> [T, H, latent]."""
        # turned over, key rows are used like value rows
        return latent_output(q_nope, self.keys, 0)

    def output(self, mixed: Tensor) -> Tensor:
        """Make values of mixed latents: [T, H, latent] -> [T, H, value]."""
        return latent_output(mixed, self.values, 0)


def _stack(weights: Weights, name: str, heads: int, mine: range, rows: int, width: int) -> Stored:
    """One matrix of some heads' rows, [heads * rows, width]."""
    found = weights.rounded(weights.stored(name, heads, rows, width), name)
    kept = weights.keep(name, weights.ready(found, in_order=True))
    return cut(kept.joined() if isinstance(kept, QTensor) else kept.flatten(0, 1), span(mine, rows), None)


rename = text_name


def make_caches(config: Config) -> list[LatentShape]:
    return [LatentShape(config.widths.latent, config.widths.rope)] * config.layers
