"""Qwen3-Next and Qwen3.5, dense or with mixtures: Gated DeltaNet in most layers, attention with gated output in the others.

Hugging Face stores the weights of all norms but the delta layer's own as w of (1 + w); mlx-lm adds the 1 when it converts.
As mlx-lm does, we tell the two apart by the layout of the convolutions, which it turns at the same time.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from auraflux.cache import AttentionShape, Batch, RecurrentShape
from auraflux.errors import FormatError
from auraflux.models import llama, qwen3_moe
from auraflux.models.attention import Attention, Heads
from auraflux.models.config import Keys
from auraflux.models.decoder import Given, Mixer, Stream, text_name
from auraflux.models.mixture import MixtureConfig
from auraflux.models.mtp import Place
from auraflux.models.qwen3_moe import sparse_layers
from auraflux.models.rotation import rope_settings, rotation
from auraflux.ops import Routing, delta_gates, gated_rms_norm, linear, qk_norm, rms_norm, sigmoid_gate
from auraflux.weights.loader import Weights
from auraflux.weights.names import MTP
from auraflux.weights.slices import span
from auraflux.weights.stored import Stored, dense

TAPS = 4  # of the short convolution
UNIT_EPS = 1e-6  # added to the sum of squares of a delta layer's query or key
DELTA, ATTENTION = "linear_attention", "full_attention"
PAIRS = {"in_proj_qkvz": ("qkv", "z"), "in_proj_ba": ("b", "a")}


@dataclass(frozen=True)
class DeltaConfig:
    """Heads of a delta layer; value head h reads key head h // (value_heads // key_heads)."""

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise FormatError(
                f"config.json has linear_num_key_heads {self.key_heads}, which {self.value_heads} value heads cannot share."
            )

    @property
    def parts(self) -> list[int]:
        """Channels of queries, keys and values."""
        keys = self.key_heads * self.key_width
        return [keys, keys, self.value_heads * self.value_width]


@dataclass(frozen=True, eq=False)
class Config(qwen3_moe.Config):
    """kinds says of each layer whether it is DELTA or ATTENTION."""

    kinds: tuple[str, ...]
    delta: DeltaConfig

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys = Keys(config)
        keys.refuse("hidden_act", "silu")
        keys.refuse("linear_conv_kernel_dim", TAPS)
        keys.refuse("attn_output_gate", True)
        # of a delta layer's result
        keys.refuse("output_gate_type", "swish", "silu")
        heads, mixture = keys["num_attention_heads"], _mixture(keys)
        sparse = frozenset[int]() if mixture is None else sparse_layers(keys)
        layers, width, settings = keys["num_hidden_layers"], keys["head_dim"], rope_settings(keys)
        turned = settings.get("partial_rotary_factor", keys.get("partial_rotary_factor", 0.25))
        return cls(
            hidden=keys["hidden_size"],
            inner=keys["intermediate_size"] if len(sparse) < layers else 0,
            vocab=keys["vocab_size"],
            layers=layers,
            heads=heads,
            kv_heads=keys.get("num_key_value_heads", heads),
            head_width=width,
            windows=(None,) * layers,
            eps=keys["rms_norm_eps"],
            tied=keys.get("tie_word_embeddings", False),
            head_norms=llama.EACH,
            context=keys.get("max_position_embeddings", 32768),
            rotation=rotation(keys, int(width * turned), settings),
            growth=None,
            mixture=mixture,
            sparse=sparse,
            home="mlp",
            kinds=_kinds(keys),
            delta=DeltaConfig(
                keys["linear_num_key_heads"],
                keys["linear_num_value_heads"],
                keys["linear_key_head_dim"],
                keys["linear_value_head_dim"],
            ),
        )


def _mixture(keys: Keys) -> MixtureConfig | None:
    count = keys.get("num_experts", 0)
    if not count:
        return None
    routing = Routing(keys["num_experts_per_tok"], "softmax", renormalize=keys.get("norm_topk_prob", True))
    return MixtureConfig(count, keys["moe_intermediate_size"], routing, keys.get("shared_expert_intermediate_size", 0) or None)


def _kinds(keys: Keys) -> tuple[str, ...]:
    if "layer_types" in keys:
        return keys.layer_types(DELTA, ATTENTION)
    every = keys.get("full_attention_interval", 4)
    return tuple(DELTA if (i + 1) % every else ATTENTION for i in range(keys["num_hidden_layers"]))


class Model(qwen3_moe.Model):
    """Qwen3's, with Gated DeltaNet in place of most attention."""

    config: Config

    def __init__(self, config: Config, weights: Weights):
        self.shift = _norm_shift(config, weights)
        super().__init__(config, weights)

    @classmethod
    def mtp_place(cls, config: Config) -> Place | None:  # type: ignore[override]
        like = max((index for index, kind in enumerate(config.kinds) if kind == ATTENTION), default=None)
        if like is None:
            return None
        norms = "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"
        return Place("mtp.layers.0", like, *norms, "mtp.fc", "mtp.norm", ("mtp.",))

    def make_mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        config = self.config
        if config.kinds[index] == DELTA:
            return Delta(weights, f"{name}.linear_attn", config.hidden, config.delta, config.eps)
        heads, rotation = Heads(config.heads, config.kv_heads, config.head_width), config.rotation.to(weights.device)
        options: dict[str, Any] = {"gated": True, "shift": self.shift}
        return Attention(weights, f"{name}.self_attn", config.hidden, heads, rotation, config.eps, **options)


def _norm_shift(config: Config, weights: Weights) -> float:
    """What the weights of the norms lack."""
    names = [f"model.layers.{i}.linear_attn.conv1d.weight" for i, kind in enumerate(config.kinds) if kind == DELTA]
    found = [weights.shape(name) for name in names if weights.has(name)]
    turned = found[0][-1] == 1 if found else weights.checkpoint.form == "mlx"
    return 0.0 if turned else 1.0


class Delta(Mixer):
    """Gated DeltaNet: a short convolution, then a memory that is corrected at every token.

    gate  what its result is gated by: "silu" or "sigmoid"
    """

    def __init__(self, weights: Weights, name: str, hidden: int, config: DeltaConfig, eps: float, gate: str = "silu"):
        self.eps, self.gate, self.join = eps, gate, weights.slices.join
        heads, values = config.value_heads, config.parts[2]
        rows = {"qkv": sum(config.parts), "z": values, "b": heads, "a": heads}
        mine, shared = weights.slices.heads(config.key_heads), heads // config.key_heads
        some = None if weights.slices.whole else head_rows(config, mine)
        self.projections = _projections(weights, name, hidden, config, rows, some)
        self.taps = taps_of(weights, f"{name}.conv1d.weight", rows["qkv"])
        self.a_log, self.dt_bias = weights.vector(f"{name}.A_log", heads), weights.vector(f"{name}.dt_bias", heads)
        self.norm = weights.vector(f"{name}.norm.weight", config.value_width)
        columns = span(mine, shared * config.value_width)
        self.out = weights.some_columns(f"{name}.out_proj", hidden, values, columns)
        self.config = config if some is None else replace(config, key_heads=len(mine), value_heads=shared * len(mine))
        self.parts = self.config.parts
        if some is not None:
            self.taps, kept = self.taps[:, some["qkv"].to(weights.device)].contiguous(), span(mine, shared)
            self.a_log, self.dt_bias = (each[kept.start : kept.stop] for each in (self.a_log, self.dt_bias))

    def __call__(self, stream: Stream | Given, batch: Batch, store: Any) -> tuple[Tensor, Tensor]:
        """Give the stream with all that was to be added to it, and what comes next, both [T, H]."""
        config, tokens = self.config, len(stream.x)
        total, (qkv, z, b, a) = stream.linears(self.projections)
        z = z.view(tokens, config.value_heads, config.value_width)
        if batch.single and self.gate == "silu":
            weights = self.taps, self.a_log, self.dt_bias, self.norm
            out = store.step(batch, qkv, z, a, b, weights, UNIT_EPS, self.eps)
            return total, self.join(linear(out.view(tokens, -1), self.out))
        decay, beta = delta_gates(a, b, self.a_log, self.dt_bias)
        parts = store.convolve(batch, qkv, self.taps).split_with_sizes(self.parts, 1)
        q, k = (part.contiguous().view(tokens, config.key_heads, config.key_width) for part in parts[:2])
        v = parts[2].contiguous().view(tokens, config.value_heads, config.value_width)
        q, k = qk_norm(q, k, UNIT_EPS)
        out = store.update(batch, q, k, v, decay, beta)
        if self.gate == "silu":
            out = gated_rms_norm(out, z, self.norm, self.eps)
        else:
            out = sigmoid_gate(rms_norm(out, self.norm, self.eps), z)
        return total, self.join(linear(out.view(tokens, -1), self.out))

    remember = __call__  # a memory is what its result is made of


def _projections(
    weights: Weights, name: str, hidden: int, config: DeltaConfig, rows: dict[str, int], some: dict[str, Tensor] | None
) -> list[Stored]:
    """The matrices for qkv, z, b and a; qwen3_next has them in pairs, its GGUF files only the second.

    some  rows of each; None for all
    """
    made: list[Stored] = []
    for pair, parts in PAIRS.items():
        whole = sum(rows[part] for part in parts)
        if not weights.has(f"{name}.{pair}.weight"):
            kept = {part: None if some is None else some[part] for part in parts}
            made += [weights.matrix(f"{name}.in_proj_{part}", rows[part], hidden, take=kept[part]) for part in parts]
        elif weights.shape(f"{name}.{pair}.weight")[0] == whole:
            order = grouped_rows(config)
            order = order if some is None else {part: order[part][some[part]] for part in order}
            made += [weights.matrix(f"{name}.{pair}", rows[part], hidden, take=order[part]) for part in parts]
        else:
            # the order of rows that are not there would take memory; which tensors do not fit is told at the end
            made += [weights.stored(f"{name}.{pair}.weight", whole, hidden)]
    return made


def head_rows(config: DeltaConfig, mine: range) -> dict[str, Tensor]:
    """The rows of each projection that belong to some heads of keys."""
    shared = config.value_heads // config.key_heads
    q, k, v = (part.view(config.key_heads, -1)[mine.start : mine.stop].flatten() for part in _numbered(config.parts))
    heads = torch.arange(mine.start * shared, mine.stop * shared)
    return {"qkv": torch.cat([q, k, v]), "z": v - 2 * config.parts[0], "b": heads, "a": heads}


def _numbered(parts: list[int]) -> tuple[Tensor, ...]:
    return torch.arange(sum(parts)).split(parts)


def grouped_rows(config: DeltaConfig) -> dict[str, Tensor]:
    """The rows of each projection in qwen3_next's two, which lie by key head: q, k, v, z of each, and b, a of each."""
    shared = config.value_heads // config.key_heads
    wide, values = torch.arange(2 * sum(config.parts[1:])).view(config.key_heads, -1), shared * config.value_width
    q, k, v, z = (part.flatten() for part in wide.split([config.key_width, config.key_width, values, values], 1))
    b, a = torch.arange(2 * config.value_heads).view(config.key_heads, 2, shared).transpose(0, 1).flatten(1)
    return {"qkv": torch.cat([q, k, v]), "z": z, "b": b, "a": a}


def taps_of(weights: Weights, name: str, channels: int) -> Tensor:
    """A short convolution, [C, 1, 4] or mlx-lm's [C, 4, 1], as `short_conv` has it."""
    turned = weights.has(name) and weights.shape(name)[-1] == 1
    found = dense(weights.stored(name, channels, *((TAPS, 1) if turned else (1, TAPS)))).reshape(channels, TAPS, 1)
    kept = weights.keep(name, found).to(weights.device, torch.float32)
    return kept.view(channels, TAPS).T.contiguous()


def rename(name: str) -> str | None:
    return None if MTP.search(name) else text_name(name)


def make_caches(config: Config) -> list[AttentionShape | RecurrentShape]:
    delta = config.delta
    attention = AttentionShape(config.kv_heads, config.head_width)
    recurrent = RecurrentShape(sum(delta.parts), delta.value_heads, delta.key_width, delta.value_width)
    return [attention if kind == ATTENTION else recurrent for kind in config.kinds]
