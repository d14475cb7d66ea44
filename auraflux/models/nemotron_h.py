"""Nemotron-H and Nemotron 3: blocks of Mamba-2, of attention without positions, and of MLPs or mixtures without gates.

A block has one norm and one part. Here a layer is a block of Mamba or attention and the MLP or mixture that follows it, if one
does; tensors keep the numbers of their blocks.
"""

import math
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from auraflux.cache import AttentionShape, Batch, ScanShape
from auraflux.errors import FormatError
from auraflux.models import decoder
from auraflux.models.attention import Attention, Heads
from auraflux.models.config import Keys
from auraflux.models.decoder import FeedForward, Layer, Mixer, Stream
from auraflux.models.deepseek_v3 import mixture
from auraflux.models.mixture import MixtureConfig, biased_mixture
from auraflux.models.mlp import NoMLP, SquareMLP
from auraflux.models.qwen3_5_moe import TAPS, taps_of
from auraflux.models.rotation import Rotation
from auraflux.ops import ReluSquare, add_norm_linears, group_rms_norm, linear, scan_gates
from auraflux.weights.boundary import listed, shown
from auraflux.weights.loader import Weights

SCAN, ATTENTION, MIXTURE, DENSE = "linear_attention", "full_attention", "moe", "mlp"
# how a config may name blocks
KINDS = {"M": SCAN, "*": ATTENTION, "E": MIXTURE, "-": DENSE, "mamba": SCAN, "attention": ATTENTION}
KINDS |= {kind: kind for kind in (SCAN, ATTENTION, MIXTURE, DENSE)}
UNLIMITED = 1e9  # of a step's size
PLAIN = {"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "conv_kernel": TAPS}
UNBIASED = ("use_bias", "mlp_bias", "attention_bias", "mamba_proj_bias")
# parts of a block, by where families have such parts
HOMES = {
    "self_attn": r"[qkvo]_proj",
    "linear_attn": r"A_log|D|dt_bias|conv1d|in_proj|out_proj|norm",
    "mlp": r"gate|experts|shared_experts|switch_mlp|up_proj|down_proj|fc[12]_latent_proj",
}


class Blocks(NamedTuple):
    """The blocks of a layer: kind and number of the first, and of the second if there is one."""

    mixer: str
    number: int
    mlp: str | None = None
    second: int | None = None


class Scan(NamedTuple):
    """Mamba-2's heads of values, and groups of heads that share keys and queries."""

    heads: int
    width: int
    groups: int
    state: int

    @property
    def wide(self) -> int:
        return self.heads * self.width

    @property
    def channels(self) -> int:
        """Channels of values, keys and queries, which are convolved."""
        return self.wide + 2 * self.groups * self.state


@dataclass(frozen=True, eq=False)
class Config:
    """blocks  of each layer; inner  of MLPs."""

    hidden: int
    inner: int
    vocab: int
    blocks: tuple[Blocks, ...]
    heads: Heads
    scan: Scan
    mixture: MixtureConfig | None
    eps: float
    tied: bool
    context: int

    @property
    def layers(self) -> int:
        return len(self.blocks)

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys = Keys(config)
        for key, accepted in {**PLAIN, **dict.fromkeys(UNBIASED, False)}.items():
            keys.refuse(key, accepted)
        _check_limit(keys)
        hidden, heads = keys["hidden_size"], keys["num_attention_heads"]
        width = keys.get("head_dim", keys.get("attention_head_dim", hidden // heads))
        blocks = _layers(keys)
        return cls(
            hidden=hidden,
            inner=keys.get("intermediate_size", hidden),
            vocab=keys["vocab_size"],
            blocks=blocks,
            heads=Heads(heads, keys.get("num_key_value_heads", heads), width),
            scan=_scan(keys),
            mixture=_mixture(keys) if any(each.mlp == MIXTURE for each in blocks) else None,
            eps=keys["layer_norm_epsilon"],
            tied=keys.get("tie_word_embeddings", False),
            context=keys.get("max_position_embeddings", 4096),
        )


def _check_limit(keys: Keys) -> None:
    """Refuse steps of limited size; transformers writes what is infinite as an object."""
    limit = [*keys.get("time_step_limit", (0.0, math.inf))]
    if len(limit) != 2 or limit[0] != 0 or (isinstance(limit[1], int | float) and limit[1] < UNLIMITED):
        raise FormatError(f"config.json has time_step_limit {shown(limit)}; only steps without limits are supported.")


def _scan(keys: Keys) -> Scan:
    found = Scan(keys["mamba_num_heads"], keys["mamba_head_dim"], keys["n_groups"], keys["ssm_state_size"])
    if found.heads % found.groups:
        raise FormatError(f"config.json has {found.heads} mamba_num_heads, which {found.groups} n_groups cannot share.")
    return found


def _mixture(keys: Keys) -> MixtureConfig:
    found = mixture(keys)
    shared, latent = keys["moe_shared_expert_intermediate_size"], keys.get("moe_latent_size", None)
    return MixtureConfig(found.count, found.inner, found.routing, shared, latent)


def _layers(keys: Keys) -> tuple[Blocks, ...]:
    """Blocks in pairs, from the checkpoint's own list or its pattern of letters."""
    named = keys.get("layers_block_type", None) or keys["hybrid_override_pattern"]
    strange = sorted({each for each in named if each not in KINDS})
    if strange:
        raise FormatError(f"config.json has blocks {listed(strange)}; {', '.join(KINDS)} are supported.")
    if len(named) != keys.get("num_hidden_layers", len(named)):
        raise FormatError(f"config.json lists {len(named)} blocks for num_hidden_layers {keys['num_hidden_layers']}.")
    made: list[Blocks] = []
    for number, kind in enumerate(KINDS[each] for each in named):
        if kind in (SCAN, ATTENTION):
            made.append(Blocks(kind, number))
        elif made and made[-1].mlp is None:
            made[-1] = made[-1]._replace(mlp=kind, second=number)
        else:
            raise FormatError(f"block {number} in config.json is {kind} and follows no block of Mamba or attention.")
    return tuple(made)


class Model(decoder.Decoder[Config]):
    """One norm before each block, nothing rotated."""

    beside = True
    whole = "its layers are pairs of blocks, which have numbers of their own."

    def make_mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        config = self.config
        if config.blocks[index].mixer == SCAN:
            return Mamba(weights, f"{name}.linear_attn", config)
        # a rotation by nothing
        still = Rotation(torch.zeros(config.heads.width // 2, device=weights.device))
        return Attention(weights, f"{name}.self_attn", config.hidden, config.heads, still)

    def make_mlp(self, weights: Weights, name: str, index: int) -> FeedForward:
        config = self.config
        if config.blocks[index].mlp == DENSE:
            return SquareMLP(weights, f"{name}.mlp", config.hidden, config.inner)
        assert config.mixture is not None
        return biased_mixture(
            weights, f"{name}.mlp", config.hidden, config.mixture, "gate.e_score_correction_bias", ReluSquare()
        )

    def _layer(self, weights: Weights, name: str, index: int) -> Layer:
        first, second = (f"model.layers.{number}" for number in self.config.blocks[index][1::2])
        norm, mixer = self.make_norm(weights, f"{first}.norm"), self.make_mixer(weights, first, index)
        if self.config.blocks[index].mlp is None:
            return Layer(norm, mixer, norm, NoMLP(), self.config.eps)
        return Layer(
            norm, mixer, self.make_norm(weights, f"{second}.norm"), self.make_mlp(weights, second, index), self.config.eps
        )


class Mamba(Mixer):
    """A short convolution of values, keys and queries, then a memory that fades and is written to at every token."""

    def __init__(self, weights: Weights, name: str, config: Config):
        scan, self.eps = config.scan, config.eps
        parts = torch.arange(scan.wide + scan.channels + scan.heads).split([scan.wide, scan.channels, scan.heads])
        self.projections = [weights.matrix(f"{name}.in_proj", len(part), config.hidden, take=part) for part in parts]
        self.taps = taps_of(weights, f"{name}.conv1d.weight", scan.channels)
        self.taps_bias = weights.bias(f"{name}.conv1d", scan.channels)
        self.a_log, self.dt_bias, self.skip = (
            weights.vector(f"{name}.{part}", scan.heads) for part in ("A_log", "dt_bias", "D")
        )
        self.norm = weights.vector(f"{name}.norm.weight", scan.wide).view(scan.groups, -1)
        self.out = weights.matrix(f"{name}.out_proj", config.hidden, scan.wide)

    def __call__(self, stream: Stream, batch: Batch, store: Any) -> tuple[Tensor, Tensor]:
        """Give the stream with all that was to be added to it, and what comes next, both [T, H]."""
        total, (gate, xbc, dt) = add_norm_linears(*stream, self.projections)
        decay, step = scan_gates(dt, self.a_log, self.dt_bias)
        xbc = store.convolve(batch, xbc, self.taps, self.taps_bias)
        shape = len(dt), *self.norm.shape
        out = store.scan(batch, xbc, decay, step, self.skip).view(shape)
        out = group_rms_norm(out, gate.view(shape), self.norm, self.eps)
        return total, linear(out.flatten(1), self.out)

    remember = __call__  # a memory is what its result is made of


def rename(name: str) -> str | None:
    if name.startswith("mtp."):
        return None
    name = re.sub(r"^(backbone|model)\.", "model.", name)
    name = name.replace("model.embeddings.", "model.embed_tokens.").replace("model.norm_f.", "model.norm.")
    for home, parts in HOMES.items():
        name = re.sub(rf"\.mixer\.({parts})(?=\.|$)", rf".{home}.\1", name)
    return name


def make_caches(config: Config) -> list[AttentionShape | ScanShape]:
    scan = config.scan
    attention = AttentionShape(config.heads.kv, config.heads.width)
    memory = ScanShape(scan.channels, scan.heads, scan.state, scan.width)
    return [attention if each.mixer == ATTENTION else memory for each in config.blocks]
