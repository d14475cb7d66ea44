"""DeepSeek V4: a stream of several vectors for each token, compressed attention, experts that tokens choose by name at first.

Keys and values of all heads are one vector, kept for the newest positions only. Of what came before, layers keep an entry for
every few tokens: either many tokens, and all entries are attended to, or few, of which an indexer with keys of its own chooses.
What attention mixes was rotated with its positions, so it is rotated back by the query's.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from auraflux.cache import Batch, CompressedShape
from auraflux.cache.compressed import Learned
from auraflux.errors import FormatError
from auraflux.models.config import Keys
from auraflux.models.decoder import Decoder, FeedForward, Layer, Mixer, Residual, Stream, text_name
from auraflux.models.hyper_connections import Connection, Hyper, HyperLayer, Readout
from auraflux.models.mixture import MixtureConfig
from auraflux.models.rotation import Rotation, rope_settings, rotation
from auraflux.ops import (
    Chosen,
    Limit,
    Routing,
    add_norm_linears,
    add_norm_scores,
    combine,
    latent_output,
    limited_swiglu,
    linear,
    linears,
    norm_rope,
    rms_norm,
    rope,
    route,
    weigh_experts,
)
from auraflux.weights.experts import load_experts
from auraflux.weights.loader import Weights

WINDOW, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
HASHED, SCORED = "hash_moe", "moe"
KINDS = {0: WINDOW, 4: SPARSE, 128: HEAVY}  # by what older configs call compress_ratios
ROPE_SHARE = 64 / 512  # of a head, unless a config says otherwise


@dataclass(frozen=True)
class Widths:
    """The widths of attention.

    query   the queries' low rank
    head    of a query, and of the vector that is key and value
    groups  of heads that are projected apart, each to `out`
    """

    query: int
    head: int
    groups: int
    out: int


@dataclass(frozen=True)
class Index:
    """The sizes of the indexer: heads, their width, and how many entries a token attends to."""

    heads: int
    width: int
    most: int


@dataclass(frozen=True, eq=False)
class Config:
    """hidden, vocab are widths.

    kinds      of layers' attention
    rates      tokens of an entry, by kind
    hashed     which layers choose experts by a table of tokens
    limit      of the experts' activations
    rotations  of heads: of layers with a window alone, and of those with entries
    turns      of the indexer's heads
    """

    hidden: int
    vocab: int
    layers: int
    heads: int
    widths: Widths
    window: int
    kinds: tuple[str, ...]
    rates: dict[str, int]
    index: Index
    hyper: Hyper
    hashed: tuple[bool, ...]
    mixture: MixtureConfig
    limit: float
    eps: float
    tied: bool
    context: int
    rotations: tuple[Rotation, Rotation]
    turns: Rotation

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys = Keys(config)
        for key, accepted in ONLY.items():
            keys.refuse(key, *accepted)
        head, index = keys["head_dim"], Index(keys["index_n_heads"], keys["index_head_dim"], keys["index_topk"])
        turned = keys.get("qk_rope_head_dim", int(head * keys.get("partial_rotary_factor", ROPE_SHARE)))
        widths = Widths(keys["q_lora_rank"], head, keys["o_groups"], keys["o_lora_rank"])
        _check_widths(keys["num_attention_heads"], widths, index, turned)
        plain, stretched = (rotation(keys, turned, each, True) for each in _rope_settings(keys))
        return cls(
            hidden=keys["hidden_size"],
            vocab=keys["vocab_size"],
            layers=keys["num_hidden_layers"],
            heads=keys["num_attention_heads"],
            widths=widths,
            window=keys.window(),
            kinds=_kinds(keys),
            rates=_rates(keys),
            index=index,
            hyper=Hyper(keys["hc_mult"], keys["hc_sinkhorn_iters"], keys["hc_eps"]),
            hashed=_hashed(keys),
            mixture=_mixture(keys),
            limit=keys["swiglu_limit"],
            eps=keys["rms_norm_eps"],
            tied=keys.get("tie_word_embeddings", False),
            context=keys.get("max_position_embeddings", 4096),
            rotations=(_last(plain, head), _last(stretched, head)),
            turns=_last(stretched, index.width),
        )


ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "scoring_func": ("sqrtsoftplus", "sigmoid"),
    "topk_method": ("noaux_tc",),
    "norm_topk_prob": (True,),
    "num_key_value_heads": (1,),
    "n_shared_experts": (1,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
}


def _check_widths(heads: int, widths: Widths, index: Index, turned: int) -> None:
    if turned % 2 or turned > min(widths.head, index.width) or widths.head % 2 or index.width % 2:
        raise FormatError(
            f"config.json rotates {turned} channels of heads of {widths.head} and of index_head_dim {index.width}; "
            "an even number of both is needed."
        )
    if widths.groups < 1 or heads % widths.groups:
        raise FormatError(f"config.json has o_groups {widths.groups}, into which {heads} heads do not divide.")


def _rope_settings(keys: Keys) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a config says of both rotations; YaRN enlarges nothing here, unless it says so."""
    both = keys.get("rope_parameters", {})
    if isinstance(both.get("main"), dict) and isinstance(both.get("compress"), dict):
        return rope_settings(keys, "main"), rope_settings(keys, "compress")
    stretched = rope_settings(keys) | {"rope_theta": keys["compress_rope_theta"]}
    if stretched["rope_type"] == "yarn":
        stretched = {"attention_factor": 1.0} | stretched
    return {"rope_type": "default", "rope_theta": keys.get("rope_theta", 10000.0)}, stretched


def _last(rotation: Rotation, width: int) -> Rotation:
    """Have a rotation act on the last channels of `width`: those before stand still."""
    still = torch.zeros(width // 2 - len(rotation.frequencies))
    return Rotation(torch.cat([still, rotation.frequencies]), rotation.mscale, True)


def _kinds(keys: Keys) -> tuple[str, ...]:
    if "layer_types" in keys or "compress_ratios" not in keys:
        return keys.layer_types(WINDOW, SPARSE, HEAVY)
    # a further one is of the layer that predicts further tokens
    ratios, layers = keys["compress_ratios"], keys["num_hidden_layers"]
    if len(ratios) < layers or not set(ratios) <= set(KINDS):
        raise FormatError(f"config.json has {len(ratios)} compress_ratios for {layers} layers; 0, 4 and 128 are supported.")
    return tuple(KINDS[ratio] for ratio in ratios[:layers])


def _rates(keys: Keys) -> dict[str, int]:
    found = {SPARSE: keys.get("compress_rate_csa", 4), HEAVY: keys.get("compress_rate_hca", 128)}
    found |= {kind: rate for kind, rate in keys.get("compress_rates", {}).items() if kind in found}
    if any(not isinstance(rate, int) or rate < 1 for rate in found.values()):
        raise FormatError(f"config.json has compress_rates {found}; whole numbers of tokens are needed.")
    return found


def _hashed(keys: Keys) -> tuple[bool, ...]:
    """Which layers choose experts by a table of tokens: those the checkpoint lists, or the first."""
    if "mlp_layer_types" in keys:
        return tuple(kind == HASHED for kind in keys.layer_types(HASHED, SCORED, key="mlp_layer_types"))
    first = keys.get("num_hash_layers", 3)
    return tuple(i < first for i in range(keys["num_hidden_layers"]))


def _mixture(keys: Keys) -> MixtureConfig:
    scoring, inner = keys.get("scoring_func", "sqrtsoftplus"), keys["moe_intermediate_size"]
    routing = Routing(keys["num_experts_per_tok"], scoring, True, scale=keys.get("routed_scaling_factor", 1.0))
    return MixtureConfig(keys["n_routed_experts"], inner, routing, inner)


class Model(Decoder[Config]):
    """Compressed attention, then experts, around a stream of several vectors."""

    whole = "a token has several vectors between its layers, and some of them go by its number."

    def __init__(self, config: Config, weights: Weights):
        self.tokens = Tokens()
        super().__init__(config, weights)
        self.read = Readout(config.hyper, config.hidden, config.eps, weights, "model.hc_head")

    def make_mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        return Attention(self.config, weights, f"{name}.self_attn", index)

    def make_mlp(self, weights: Weights, name: str, index: int) -> FeedForward:
        return Mixture(self.config, weights, f"{name}.mlp", self.tokens if self.config.hashed[index] else None)

    def _layer(self, weights: Weights, name: str, index: int) -> Layer:
        made = super()._layer(weights, name, index)
        sizes = self.config.hyper, self.config.hidden, self.config.eps
        around = (Connection(*sizes, weights, f"{name}.{part}_hc") for part in ("attn", "ffn"))
        return HyperLayer(**vars(made), around=(next(around), next(around)))

    def embedded(self, ids: Tensor) -> Tensor:
        """Begin the stream, all of its vectors alike: [T] -> [T, N, H]."""
        self.tokens.ids = ids
        return super().embedded(ids).unsqueeze(1).repeat(1, self.config.hyper.count, 1)

    def normed(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """What comes out of the last layer, [T, N, H], as one vector after the last norm: [T, H]."""
        return rms_norm(self.read(x), self.norm, self.config.eps)


class Tokens:
    """The tokens of the step that is being taken, [T]."""

    ids: Tensor


class Compressor:
    """What makes entries of windows.

    projections  of values and of gates
    """

    def __init__(self, config: Config, weights: Weights, name: str, kind: str, width: int, rotation: Rotation):
        wide = width * (1 + (kind == SPARSE))
        self.projections = [weights.matrix(f"{name}.{part}_proj", wide, config.hidden) for part in ("kv", "gate")]
        bias = weights.vector(f"{name}.position_bias", config.rates[kind], wide)
        norm = weights.vector(f"{name}.kv_norm.weight", width)
        self.learned = Learned(bias, norm, config.eps, rotation.frequencies.to(weights.device))


class Indexer:
    """What chooses entries: keys are entries of its own."""

    def __init__(self, config: Config, weights: Weights, name: str, kind: str):
        index = config.index
        self.heads, self.rotation = index.heads, config.turns.to(weights.device)
        self.compressor = Compressor(config, weights, name, kind, index.width, config.turns)
        self.query = weights.matrix(f"{name}.q_b_proj", index.heads * index.width, config.widths.query)
        self.share = weights.matrix(f"{name}.scorer.weights_proj", index.heads, config.hidden)

    def choose(self, batch: Batch, store: Any, q: Tensor, weights: Tensor) -> Chosen:
        """Choose by queries [T, H * D] and heads' weights [T, H]; what scales all scores alike is left out."""
        return store.choose(batch, self.rotation(q.unflatten(1, (self.heads, -1)), batch.positions), weights)


class Attention(Mixer):
    """Attention to a window and to entries, of heads that share one vector for keys and values."""

    def __init__(self, config: Config, weights: Weights, name: str, index: int):
        widths, kind, hidden, heads = config.widths, config.kinds[index], config.hidden, config.heads
        self.heads, self.groups, self.scale, self.eps = heads, widths.groups, widths.head**-0.5, config.eps
        self.rotation = config.rotations[kind != WINDOW].to(weights.device)
        self.query_a = weights.matrix(f"{name}.q_a_proj", widths.query, hidden)
        self.query_norm = weights.vector(f"{name}.q_a_norm.weight", widths.query)
        self.query_b = weights.matrix(f"{name}.q_b_proj", heads * widths.head, widths.query)
        self.kv = weights.matrix(f"{name}.kv_proj", widths.head, hidden)
        # queries are normalised without a weight
        self.norms = torch.ones(widths.head, device=weights.device), weights.vector(f"{name}.kv_norm.weight", widths.head)
        self.out_a = weights.matrix(
            f"{name}.o_a_proj", widths.groups * widths.out, heads * widths.head // widths.groups, in_order=True
        )
        self.out_b = weights.matrix(f"{name}.o_b_proj", hidden, widths.groups * widths.out)
        self.sinks = weights.vector(f"{name}.sinks", heads)
        self.compressor = self.indexer = None
        if kind != WINDOW:
            self.compressor = Compressor(config, weights, f"{name}.compressor", kind, widths.head, config.rotations[1])
        if kind == SPARSE:
            self.indexer = Indexer(config, weights, f"{name}.compressor.indexer", kind)

    def __call__(self, stream: Stream, batch: Batch, store: Any) -> tuple[Tensor, Tensor]:
        """Give the stream with all that was to be added to it, and what comes next, both [T, H]."""
        total, q, *asked = self.remember(stream, batch, store)
        options = [self.indexer.choose(batch, store, *asked)] if self.indexer is not None and asked else []
        mixed = store.attend(batch, q, self.scale, self.sinks, *options)
        back = rope(mixed, -self.rotation.frequencies, batch.positions, self.rotation.mscale, True)
        parts = latent_output(back.view(len(q), self.groups, -1), self.out_a, 0)
        return total, linear(parts.flatten(1), self.out_b)

    def remember(self, stream: Stream, batch: Batch, store: Any) -> tuple[Tensor, ...]:
        """Store vectors and entries: gives the stream with all that was to be added to it, and the queries; then, where there
        is something to choose, the indexer's queries and weights."""
        indexer = self.indexer
        asks = indexer is not None and not store.sees_all(batch)
        first, second = [self.query_a, self.kv], [self.query_b]
        inner = None if indexer is None else indexer.compressor
        makers = [each for each in (self.compressor, inner) if each is not None]
        first += [weight for maker in makers for weight in maker.projections]
        if indexer is not None and asks:
            first, second = [*first, indexer.share], [*second, indexer.query]
        total, (q, kv, *rest) = add_norm_linears(*stream, first, [None] * len(first))
        _, (q, *asked) = add_norm_linears(q, None, self.query_norm, self.eps, second, [None] * len(second))
        rotating = self.rotation.frequencies, batch.positions, self.norms, self.eps, self.rotation.mscale, True
        q, kv = norm_rope(q.unflatten(1, (self.heads, -1)), kv.unsqueeze(1), *rotating)
        store.append(batch, kv.squeeze(1))
        for number, (maker, entries) in enumerate(zip(makers, store.made if makers else (), strict=True)):
            entries.append(batch, torch.cat(rest[2 * number : 2 * number + 2], 1), maker.learned)
        return total, q, *asked, *rest[2 * len(makers) :]


class Mixture(FeedForward):
    """Experts, and one that all tokens go to; it gives what they found and adds it to nothing.

    tokens  of a step, where experts are chosen by a table of them
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

    def __call__(self, stream: Stream) -> Residual:
        """Give the stream, and what comes next, both [T, H]."""
        h, residual, (scores,) = add_norm_scores(*stream, (self.router,), (None,))
        found = self.experts(h, *self._chosen(scores))
        gate, up = linears(h, self.first)
        return residual, combine(found, linear(limited_swiglu(gate, up, self.limit), self.down))

    def _chosen(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        if self.tokens is None:
            return route(scores, self.routing, self.bias)
        ids = self.table[self.tokens.ids.long()]
        return ids, weigh_experts(scores, ids, self.routing)


# as published -> as transformers calls it
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
    """Our name for a tensor; None for those of the layers that predict further tokens, too."""
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
