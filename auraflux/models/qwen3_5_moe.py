"""Qwen3-Next and Qwen3.5, dense or with mixtures: Gated DeltaNet in most layers, attention with gated output in the others.

Hugging Face stores the weights of all norms but the delta layer's own as w of (1 + w); mlx-lm adds the 1 on conversion. The
layout of the convolutions, which mlx-lm transposes on conversion too, identifies the format.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from auraflux.adapters.linears import linear
from auraflux.cache import AttentionShape, Batch, RecurrentShape
from auraflux.errors import FormatError
from auraflux.models import llama, qwen3_moe
from auraflux.models.attention import Attention, Heads
from auraflux.models.config import Keys
from auraflux.models.decoder import text_name
from auraflux.models.layer import LayerInput, Mixer, PartMixer, PreparedInput
from auraflux.models.mixture import MixtureConfig
from auraflux.models.mtp import MTPNames
from auraflux.models.qwen3_moe import sparse_layers
from auraflux.models.rotation import rope_settings, rotated_share, rotation
from auraflux.ops import Routing, delta_gates, gated_rms_norm, qk_norm, rms_norm, sigmoid_gate
from auraflux.weights.fields import COUNT, EXPERTS, HEAD, LAYER_INTERVAL, WIDTH_OR_NONE
from auraflux.weights.formats.stored import Stored, dense
from auraflux.weights.formats.untrusted import FLAG
from auraflux.weights.loader import Weights
from auraflux.weights.names import MTP
from auraflux.weights.parallel.tensor_slices import span

TAPS = 4  # of the short convolution
UNIT_EPS = 1e-6  # added to the sum of squares of a delta layer's query or key
DELTA, ATTENTION = "linear_attention", "full_attention"
PAIRS = {"in_proj_qkvz": ("qkv", "z"), "in_proj_ba": ("b", "a")}


@dataclass(frozen=True)
class DeltaConfig:
    """The heads of a delta layer; value head h reads key head h // (value_heads // key_heads)."""

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
        """Return the channels of queries, keys and values."""
        keys = self.key_heads * self.key_width
        return [keys, keys, self.value_heads * self.value_width]


@dataclass(frozen=True, eq=False)
class Config(qwen3_moe.Config):
    """Qwen3's config; kinds names each layer DELTA or ATTENTION."""

    kinds: tuple[str, ...]
    delta: DeltaConfig

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        return read_config(Keys(config))


def read_config(keys: Keys) -> Config:
    """Read the layers, which Qwen4 shares."""
    keys.only("hidden_act", "silu")
    keys.only("linear_conv_kernel_dim", TAPS)
    keys.only("attn_output_gate", True)
    # of a delta layer's result
    keys.only("output_gate_type", "swish", "silu")
    heads, mixture, layers = keys.heads, _mixture(keys), keys.layers
    sparse = frozenset[int]() if mixture is None else sparse_layers(keys)
    width, settings = keys.read("head_dim", HEAD), rope_settings(keys)
    share = rotated_share(keys, settings)
    return Config(
        hidden=keys.hidden,
        inner=keys.inner if len(sparse) < layers else 0,
        vocab=keys.vocab(),
        layers=layers,
        heads=heads,
        kv_heads=keys.kv_heads(heads),
        head_width=width,
        windows=(None,) * layers,
        eps=keys.eps(),
        tied=keys.tied(),
        head_norms=llama.EACH,
        context=keys.context(32768),
        rotation=rotation(keys, int(width * (0.25 if share is None else share)), settings),
        growth=None,
        others={},
        mixture=mixture,
        sparse=sparse,
        home="mlp",
        kinds=_kinds(keys),
        delta=_delta(keys),
    )


def _delta(keys: Keys) -> DeltaConfig:
    return DeltaConfig(
        keys.read("linear_num_key_heads", COUNT),
        keys.read("linear_num_value_heads", COUNT),
        keys.read("linear_key_head_dim", HEAD),
        keys.read("linear_value_head_dim", HEAD),
    )


def _mixture(keys: Keys) -> MixtureConfig | None:
    if not keys.get("num_experts", EXPERTS, 0):
        return None
    count, chosen = keys.experts("num_experts")
    routing = Routing(chosen, "softmax", renormalize=keys.get("norm_topk_prob", FLAG, True))
    shared = keys.get("shared_expert_intermediate_size", WIDTH_OR_NONE, 0) or None
    return MixtureConfig(count, keys.expert_inner, routing, shared)


def _kinds(keys: Keys) -> tuple[str, ...]:
    if "layer_types" in keys:
        return keys.layer_types(DELTA, ATTENTION)
    every = keys.get("full_attention_interval", LAYER_INTERVAL, 4)
    return tuple(DELTA if (i + 1) % every else ATTENTION for i in range(keys.layers))


class Model(qwen3_moe.Model):
    """Qwen3's model with Gated DeltaNet in most layers."""

    config: Config

    def __init__(self, config: Config, weights: Weights):
        self.shift = _norm_shift(config, weights)
        super().__init__(config, weights)

    @classmethod
    def mtp_names(cls, config: Config) -> MTPNames | None:  # type: ignore[override]
        like = max((index for index, kind in enumerate(config.kinds) if kind == ATTENTION), default=None)
        if like is None:
            return None
        norms = "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"
        return MTPNames("mtp.layers.0", like, *norms, "mtp.fc", "mtp.norm", ("mtp.",))

    def make_mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        config = self.config
        if config.kinds[index] == DELTA:
            return Delta(weights, f"{name}.linear_attn", config.hidden, config.delta, config.eps)
        heads, rotation = Heads(config.heads, config.kv_heads, config.head_width), config.rotation.to(weights.device)
        options: dict[str, Any] = {"gated": True, "shift": self.shift}
        return Attention(weights, f"{name}.self_attn", config.hidden, heads, rotation, config.eps, **options)


def _norm_shift(config: Config, weights: Weights) -> float:
    """Return the shift of the norms' weights: 1 in Hugging Face's format, 0 in mlx-lm's."""
    names = [f"model.layers.{i}.linear_attn.conv1d.weight" for i, kind in enumerate(config.kinds) if kind == DELTA]
    found = [weights.shape(name) for name in names if weights.has(name)]
    turned = found[0][-1] == 1 if found else weights.checkpoint.form == "mlx"
    return 0.0 if turned else 1.0


class Delta(PartMixer):
    """Gated DeltaNet: a short convolution, then a recurrent state with a delta rule.

    gate  the output gate: "silu" or "sigmoid"
    """

    def __init__(self, weights: Weights, name: str, hidden: int, config: DeltaConfig, eps: float, gate: str = "silu"):
        self.eps, self.gate, self.join = eps, gate, weights.slices.all_reduce
        heads, values = config.value_heads, config.parts[2]
        rows = {"qkv": sum(config.parts), "z": values, "b": heads, "a": heads}
        mine, shared = weights.slices.heads(config.key_heads), heads // config.key_heads
        some = None if weights.slices.unsliced else head_rows(config, mine)
        self.projections = _projections(weights, name, hidden, config, rows, some)
        self.taps = taps_of(weights, f"{name}.conv1d.weight", rows["qkv"])
        self.a_log, self.dt_bias = weights.vector(f"{name}.A_log", heads), weights.vector(f"{name}.dt_bias", heads)
        self.norm = weights.vector(f"{name}.norm.weight", config.value_width)
        columns = span(mine, shared * config.value_width)
        self.out = weights.column_shard(f"{name}.out_proj", hidden, values, columns)
        self.config = config if some is None else replace(config, key_heads=len(mine), value_heads=shared * len(mine))
        self.parts = self.config.parts
        if some is not None:
            self.taps, shard = self.taps[:, some["qkv"].to(weights.device)].contiguous(), span(mine, shared)
            self.a_log, self.dt_bias = (each[shard.start : shard.stop] for each in (self.a_log, self.dt_bias))

    def mix(self, inputs: LayerInput | PreparedInput, batch: Batch, store: Any) -> tuple[Tensor, Tensor]:
        """Return the residual stream with its delta added, and the next delta, both [T, H]."""
        config, tokens = self.config, len(inputs.x)
        total, (qkv, z, b, a) = inputs.linears(self.projections)
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


def _projections(
    weights: Weights, name: str, hidden: int, config: DeltaConfig, rows: dict[str, int], some: dict[str, Tensor] | None
) -> list[Stored]:
    """Load the projections of qkv, z, b and a; qwen3_next has them in pairs, its GGUF files only the second pair.

    some  rows of each; None for all
    """
    made: list[Stored] = []
    for pair, parts in PAIRS.items():
        whole = sum(rows[part] for part in parts)
        if not weights.has(f"{name}.{pair}.weight"):
            take = {part: None if some is None else some[part] for part in parts}
            made += [weights.matrix(f"{name}.in_proj_{part}", rows[part], hidden, take=take[part]) for part in parts]
        elif weights.shape(f"{name}.{pair}.weight")[0] == whole:
            order = grouped_rows(config)
            order = order if some is None else {part: order[part][some[part]] for part in order}
            made += [weights.matrix(f"{name}.{pair}", rows[part], hidden, take=order[part]) for part in parts]
        else:
            # an order of missing rows would take memory; the loader reports tensors of the wrong shape at the end
            made += [weights.stored(f"{name}.{pair}.weight", whole, hidden)]
    return made


def head_rows(config: DeltaConfig, mine: range) -> dict[str, Tensor]:
    """Return the rows of each projection that belong to some key heads."""
    shared = config.value_heads // config.key_heads
    q, k, v = (part.view(config.key_heads, -1)[mine.start : mine.stop].flatten() for part in _numbered(config.parts))
    heads = torch.arange(mine.start * shared, mine.stop * shared)
    return {"qkv": torch.cat([q, k, v]), "z": v - 2 * config.parts[0], "b": heads, "a": heads}


def _numbered(parts: list[int]) -> tuple[Tensor, ...]:
    return torch.arange(sum(parts)).split(parts)


def grouped_rows(config: DeltaConfig) -> dict[str, Tensor]:
    """Return the rows of each projection in qwen3_next's pairs, grouped by key head: q, k, v, z, and b, a."""
    shared = config.value_heads // config.key_heads
    wide, values = torch.arange(2 * sum(config.parts[1:])).view(config.key_heads, -1), shared * config.value_width
    q, k, v, z = (part.flatten() for part in wide.split([config.key_width, config.key_width, values, values], 1))
    b, a = torch.arange(2 * config.value_heads).view(config.key_heads, 2, shared).transpose(0, 1).flatten(1)
    return {"qkv": torch.cat([q, k, v]), "z": z, "b": b, "a": a}


def taps_of(weights: Weights, name: str, channels: int) -> Tensor:
    """Load a short convolution, [C, 1, 4] or mlx-lm's [C, 4, 1], in the layout of `short_conv`."""
    turned = weights.has(name) and weights.shape(name)[-1] == 1
    found = dense(weights.stored(name, channels, *((TAPS, 1) if turned else (1, TAPS)))).reshape(channels, TAPS, 1)
    taps = weights.complete(name, found).to(weights.device, torch.float32)
    return taps.view(channels, TAPS).T.contiguous()


def rename(name: str) -> str | None:
    return None if MTP.search(name) else text_name(name)


def make_caches(config: Config) -> list[AttentionShape | RecurrentShape]:
    delta = config.delta
    attention = AttentionShape(config.kv_heads, config.head_width)
    recurrent = RecurrentShape(sum(delta.parts), delta.value_heads, delta.key_width, delta.value_width)
    return [attention if kind == ATTENTION else recurrent for kind in config.kinds]
