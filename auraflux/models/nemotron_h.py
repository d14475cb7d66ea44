"""Nemotron-H and Nemotron 3: blocks of Mamba-2, of attention without RoPE, and of MLPs or mixtures without gates.

A block has one norm and one mixer or MLP. A layer here is a Mamba or attention block and the MLP or mixture block that may
follow it; tensors keep the numbers of their blocks.
"""

import math
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from auraflux.adapters.linears import add_norm_linears, linear
from auraflux.cache import AttentionShape, Batch, ScanShape
from auraflux.errors import FormatError
from auraflux.models import decoder
from auraflux.models.attention import Attention, Heads
from auraflux.models.config import Keys
from auraflux.models.deepseek_v3 import mixture
from auraflux.models.layer import FeedForward, Layer, LayerInput, Mixer, PartMixer
from auraflux.models.mixture import MixtureConfig, biased_mixture
from auraflux.models.mlp import NoMLP, SquareMLP
from auraflux.models.qwen3_5_moe import TAPS, taps_of
from auraflux.models.rotation import no_rotation
from auraflux.ops import ReluSquare, group_rms_norm, scan_gates
from auraflux.weights.fields import COUNT, EPS, HEAD, LAYER_COUNT, MOST_LAYERS, NAMES, WIDTH
from auraflux.weights.formats.untrusted import OBJECT, either, list_of, listed, number, shown, string
from auraflux.weights.loader import Weights

SCAN, ATTENTION, MIXTURE, DENSE = "linear_attention", "full_attention", "moe", "mlp"
# block names in configs
KINDS = {"M": SCAN, "*": ATTENTION, "E": MIXTURE, "-": DENSE, "mamba": SCAN, "attention": ATTENTION}
KINDS |= {kind: kind for kind in (SCAN, ATTENTION, MIXTURE, DENSE)}
UNLIMITED = 1e9  # of a step's size
PLAIN: dict[str, bool | int | str] = {"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "conv_kernel": TAPS}
UNBIASED = ("use_bias", "mlp_bias", "attention_bias", "mamba_proj_bias")
# tensors of a block, by the module that other families have them in
HOMES = {
    "self_attn": r"[qkvo]_proj",
    "linear_attn": r"A_log|D|dt_bias|conv1d|in_proj|out_proj|norm",
    "mlp": r"gate|experts|shared_experts|switch_mlp|up_proj|down_proj|fc[12]_latent_proj",
}


class Blocks(NamedTuple):
    """The blocks of a layer: kind and number of the first, and of the second or None."""

    mixer: str
    number: int
    mlp: str | None = None
    second: int | None = None


class Scan(NamedTuple):
    """The sizes of Mamba-2: value heads, and groups of heads that share B and C."""

    heads: int
    width: int
    groups: int
    state: int

    @property
    def wide(self) -> int:
        return self.heads * self.width

    @property
    def channels(self) -> int:
        """Return the convolved channels: x, B and C."""
        return self.wide + 2 * self.groups * self.state

    @property
    def cache(self) -> ScanShape:
        return ScanShape(self.channels, self.heads, self.state, self.width)


@dataclass(frozen=True, eq=False)
class Config:
    """hidden, inner, vocab are widths, inner that of MLPs; blocks has those of each layer."""

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
            keys.only(key, accepted)
        check_step_limit(keys)
        hidden, heads = keys.hidden, keys.heads
        width = keys.get("head_dim", HEAD, keys.get("attention_head_dim", HEAD, hidden // heads))
        blocks = _layers(keys)
        return cls(
            hidden=hidden,
            inner=keys.get("intermediate_size", WIDTH, hidden),
            vocab=keys.vocab(),
            blocks=blocks,
            heads=Heads(heads, keys.kv_heads(heads), width),
            scan=_scan(keys),
            mixture=_mixture(keys) if any(each.mlp == MIXTURE for each in blocks) else None,
            eps=keys.read("layer_norm_epsilon", EPS),
            tied=keys.tied(),
            context=keys.context(4096),
        )


def check_step_limit(keys: Keys) -> None:
    """Refuse a limited time step; transformers writes infinity as an object."""
    limit = keys.get("time_step_limit", list_of(either(number(0, math.inf), OBJECT), 2), [0.0, math.inf])
    if len(limit) != 2 or limit[0] != 0 or (isinstance(limit[1], int | float) and limit[1] < UNLIMITED):
        raise FormatError(f"config.json has time_step_limit {shown(limit)}; only steps without limits are supported.")


def _scan(keys: Keys) -> Scan:
    heads, width = keys.read("mamba_num_heads", COUNT), keys.read("mamba_head_dim", HEAD)
    found = Scan(heads, width, keys.read("n_groups", COUNT), keys.read("ssm_state_size", HEAD))
    if found.heads % found.groups:
        raise FormatError(f"config.json has {found.heads} mamba_num_heads, which {found.groups} n_groups cannot share.")
    return found


def _mixture(keys: Keys) -> MixtureConfig:
    found = mixture(keys)
    shared, latent = keys.read("moe_shared_expert_intermediate_size", WIDTH), keys.get("moe_latent_size", WIDTH, None)
    return MixtureConfig(found.count, found.inner, found.routing, shared, latent)


def _layers(keys: Keys) -> tuple[Blocks, ...]:
    """Blocks in pairs, from the checkpoint's own list or its pattern of letters."""
    named: list[str] | str | None = keys.get("layers_block_type", NAMES, None)
    named = named or keys.read("hybrid_override_pattern", string(MOST_LAYERS))
    strange = sorted({each for each in named if each not in KINDS})
    if strange:
        raise FormatError(f"config.json has blocks {listed(strange)}; {', '.join(KINDS)} are supported.")
    if len(named) != keys.get("num_hidden_layers", LAYER_COUNT, len(named)):
        raise FormatError(f"config.json lists {len(named)} blocks for num_hidden_layers {keys.layers}.")
    made: list[Blocks] = []
    for index, kind in enumerate(KINDS[each] for each in named):
        if kind in (SCAN, ATTENTION):
            made.append(Blocks(kind, index))
        elif made and made[-1].mlp is None:
            made[-1] = made[-1]._replace(mlp=kind, second=index)
        else:
            raise FormatError(f"block {index} in config.json is {kind} and follows no block of Mamba or attention.")
    return tuple(made)


class Model(decoder.Decoder[Config]):
    """One norm before each block, and no RoPE."""

    @classmethod
    def no_pipeline_parallel(cls, config: Config) -> str | None:
        return "its layers are pairs of blocks, and tensors are named after blocks."

    def make_mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        config = self.config
        if config.blocks[index].mixer == SCAN:
            return Mamba(weights, f"{name}.linear_attn", config.hidden, config.scan, config.eps)
        still = no_rotation(config.heads.width).to(weights.device)
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


class Mamba(PartMixer):
    """Mamba-2: a short convolution of x, B and C, then a selective scan over a recurrent state.

    norm_groups  channels are normalised in so many groups; None for those of B and C
    """

    def __init__(self, weights: Weights, name: str, hidden: int, scan: Scan, eps: float, norm_groups: int | None = None):
        self.eps = eps
        parts = torch.arange(scan.wide + scan.channels + scan.heads).split([scan.wide, scan.channels, scan.heads])
        self.projections = [weights.matrix(f"{name}.in_proj", len(part), hidden, take=part) for part in parts]
        self.taps = taps_of(weights, f"{name}.conv1d.weight", scan.channels)
        self.taps_bias = weights.bias(f"{name}.conv1d", scan.channels)
        self.a_log, self.dt_bias, self.skip = (
            weights.vector(f"{name}.{part}", scan.heads) for part in ("A_log", "dt_bias", "D")
        )
        self.norm = weights.vector(f"{name}.norm.weight", scan.wide).view(norm_groups or scan.groups, -1)
        self.out = weights.matrix(f"{name}.out_proj", hidden, scan.wide)

    def mix(self, inputs: LayerInput, batch: Batch, store: Any) -> tuple[Tensor, Tensor]:
        """Return the residual stream with its delta added, and the next delta, both [T, H]."""
        total, (gate, xbc, dt) = add_norm_linears(*inputs, self.projections)
        decay, step = scan_gates(dt, self.a_log, self.dt_bias)
        xbc = store.convolve(batch, xbc, self.taps, self.taps_bias)
        shape = len(dt), *self.norm.shape
        out = store.scan(batch, xbc, decay, step, self.skip).view(shape)
        out = group_rms_norm(out, gate.view(shape), self.norm, self.eps)
        return total, linear(out.flatten(1), self.out)


def rename(name: str) -> str | None:
    if name.startswith("mtp."):
        return None
    name = re.sub(r"^(backbone|model)\.", "model.", name)
    name = name.replace("model.embeddings.", "model.embed_tokens.").replace("model.norm_f.", "model.norm.")
    for home, parts in HOMES.items():
        name = re.sub(rf"\.mixer\.({parts})(?=\.|$)", rf".{home}.\1", name)
    return name


def make_caches(config: Config) -> list[AttentionShape | ScanShape]:
    attention, memory = AttentionShape(config.heads.kv, config.heads.width), config.scan.cache
    return [attention if each.mixer == ATTENTION else memory for each in config.blocks]
