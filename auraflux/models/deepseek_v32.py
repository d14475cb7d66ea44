"""DeepSeek V3.2 and GLM 5: DeepSeek V3's architecture with sparse attention (DSA).

An indexer with small heads scores all visible positions with index keys of its own, and the token attends to the top k only. In
GLM some layers have no indexer and use the selection of the last layer that has one.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from auraflux.adapters.linears import add_norm_linears
from auraflux.cache import Batch, SparseLatentShape
from auraflux.errors import FormatError
from auraflux.models import deepseek_v3
from auraflux.models.config import Keys
from auraflux.models.deepseek_v3 import LATENT_EPS, LowRank, Projection, rename
from auraflux.models.layer import LayerInput, Mixer
from auraflux.models.mtp import MTPNames, after_last
from auraflux.models.rotation import Rotation
from auraflux.ops import TokenSelection, layer_norm, sigmoid_gate
from auraflux.weights.fields import COUNT, HEAD, LAYERS, MOST_LAYERS, NAMES, TOKEN_COUNT
from auraflux.weights.formats.untrusted import either, string
from auraflux.weights.loader import Weights

__all__ = ["Config", "Model", "make_caches", "rename"]

FULL, SHARED = "full", "shared"
PATTERN = either(string(MOST_LAYERS), NAMES)  # a letter for each layer, or a name
KEY_EPS = 1e-6  # of the norm over index keys


@dataclass(frozen=True, eq=False)
class Index:
    """The sizes of the indexer.

    heads, width  of its queries; a token has one index key of that width
    most          positions that a token attends to (top k)
    rotation      of the first channels
    layers        those with an indexer
    eps           of the norm over index keys
    rotates_last  checkpoints have the rotated channels last
    """

    heads: int
    width: int
    most: int
    rotation: Rotation
    layers: tuple[bool, ...]
    eps: float = KEY_EPS
    rotates_last: bool = False

    def order(self, heads: int) -> Tensor | None:
        """Return the rows of `heads` heads with the rotated channels first; None where they are."""
        if not self.rotates_last:
            return None
        each = torch.arange(self.width).roll(2 * len(self.rotation.frequencies))
        return (torch.arange(heads)[:, None] * self.width + each).flatten()


@dataclass(frozen=True, eq=False)
class Config(deepseek_v3.Config):
    """DeepSeek V3's config with the indexer's."""

    index: Index

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys, base = Keys(config), deepseek_v3.Config.from_hf(config)
        if base.widths.query is None:
            raise FormatError(f"config.json of model_type {keys.kind!r} has no 'q_lora_rank', which the indexer reads.")
        if (rope := base.widths.rope) > (width := keys.read("index_head_dim", HEAD)):
            raise FormatError(f"config.json has index_head_dim {width}, of which qk_rope_head_dim {rope} are to be rotated.")
        # rotation pairs neighbours in GLM and halves in DeepSeek, independent of the other heads
        rotation = replace(base.rotation, interleaved=keys.kind == "glm_moe_dsa")
        heads, most = keys.read("index_n_heads", COUNT), keys.read("index_topk", TOKEN_COUNT)
        return cls(**vars(base), index=Index(heads, width, most, rotation, _indexed_layers(keys)))


def _indexed_layers(keys: Keys) -> tuple[bool, ...]:
    """Return the layers with an indexer: those the checkpoint lists, or every n-th after the first."""
    layers = keys.layers
    if "indexer_types" in keys:
        found = tuple(kind == FULL for kind in keys.layer_types(FULL, SHARED, key="indexer_types"))
    elif "index_topk_pattern" in keys:
        found = tuple(kind in ("F", FULL) for kind in keys.read("index_topk_pattern", PATTERN))
    else:
        every, offset = keys.get("index_topk_freq", COUNT, 1), keys.get("index_skip_topk_offset", LAYERS, 2)
        found = tuple(max(i - offset + 1, 0) % every == 0 for i in range(layers))
    if len(found) != layers or not found[0]:
        raise FormatError(
            f"config.json names {len(found)} indexers for num_hidden_layers {layers}; the first must have its own."
        )
    return found


class Model(deepseek_v3.Model):
    """Sparse latent attention, then an MLP in the first layers and experts in the others."""

    config: Config

    def __init__(self, config: Config, weights: Weights):
        self.indexer: Indexer | None = None
        super().__init__(config, weights)

    @classmethod
    def no_pipeline_parallel(cls, config: Config) -> str | None:  # type: ignore[override]
        return None if all(config.index.layers) else "some layers attend to positions that earlier layers select."

    @classmethod
    def mtp_names(cls, config: Config) -> MTPNames | None:  # type: ignore[override]
        # a layer with an indexer of its own
        return after_last(config.layers, config.extra, max(i for i, own in enumerate(config.index.layers) if own))

    def make_mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        config, name = self.config, f"{name}.self_attn"
        own = Indexer(config, weights, f"{name}.indexer") if config.index.layers[index] else None
        self.indexer = own or self.indexer
        assert self.indexer is not None
        return self.make_attention(weights, name, self.indexer, own is not None)

    def make_attention(self, weights: Weights, name: str, indexer: "Indexer", chooses: bool) -> Mixer:
        """Make the attention of a layer under a name such as model.layers.3.self_attn."""
        return Attention(self.config, weights, name, indexer, chooses)


class Indexer:
    """The indexer: it selects the positions of its own layer and of the layers after it that have none.

    chosen  in the current step; None where all positions are
    """

    def __init__(self, config: Config, weights: Weights, name: str):
        index, rank = config.index, config.widths.query
        assert rank is not None
        self.heads, self.rotation, self.eps = index.heads, index.rotation.to(weights.device), index.eps
        self.query = Projection(weights, f"{name}.wq_b", index.heads * index.width, rank, take=index.order(index.heads))
        self.key = Projection(weights, f"{name}.wk", index.width, config.hidden, take=index.order(1))
        self.share = Projection(weights, f"{name}.weights_proj", index.heads, config.hidden)
        norm = [weights.vector(f"{name}.k_norm.{part}", index.width) for part in ("weight", "bias")]
        self.norm, self.bias = norm if (order := index.order(1)) is None else [each[order.to(each.device)] for each in norm]
        self.chosen: TokenSelection | None = None

    def append(self, k: Tensor, batch: Batch, store: Any) -> None:
        """Normalise, rotate and append index keys, [T, D]."""
        k = layer_norm(k, self.norm, self.bias, self.eps)
        store.append_keys(batch, self.rotation(k[:, None], batch.positions)[:, 0])

    def choose(self, batch: Batch, store: Any, q: Tensor, weights: Tensor) -> None:
        """Select positions by queries [T, H * D] and head weights [T, H]; factors common to all scores are omitted."""
        self.chosen = store.select_tokens(batch, self.rotation(q.unflatten(1, (self.heads, -1)), batch.positions), weights)


class Attention(deepseek_v3.Attention):
    """Latent attention to the positions that an indexer selects.

    chooses  the indexer is its own
    sinks    [H], the heads' attention sinks, or None
    gates    [T, H * value], of the current step's output, where there is a `gate`
    """

    # later layers read the positions that it selects for all tokens of a step
    supports_mixed_batch = False
    query: LowRank
    sinks: Tensor | None = None
    gates: Tensor

    def __init__(self, config: Config, weights: Weights, name: str, indexer: Indexer, chooses: bool):
        super().__init__(config, weights, name)
        self.indexer, self.chooses = indexer, chooses

    def mix(self, inputs: LayerInput, batch: Batch, store: Any) -> tuple[Tensor, Tensor]:
        """Return the residual stream with its delta added, and the next delta, both [T, H]."""
        total, q_nope, q_rope, *index_inputs = self.append(inputs, batch, store)
        if index_inputs:
            self.indexer.choose(batch, store, *index_inputs)
        chosen = None if store.sees_all(batch) else self.indexer.chosen
        mixed = store.attend(batch, self.kv_b.query(q_nope), q_rope, self.scale, chosen, self.sinks)
        return total, self.out(self.output(mixed))

    def output(self, mixed: Tensor) -> Tensor:
        """Return the output of all heads of attended latents: [T, H, latent] -> [T, H * value]."""
        found = self.kv_b.output(mixed).flatten(1)
        return found if self.gate is None else sigmoid_gate(found, self.gates)

    def append(self, inputs: LayerInput, batch: Batch, store: Any) -> tuple[Tensor, ...]:
        """Append latents and index keys; return the residual stream with its delta added and both parts of the queries, then,
        where a selection is due, the indexer's queries and weights."""
        indexer, selects = self.indexer, self.chooses and not store.sees_all(batch)
        first = [self.query.first, self.kv_a, *([] if self.gate is None else [self.gate])]
        first += [*([indexer.key] if self.chooses else []), *([indexer.share] if selects else [])]
        total, (q, kv, *rest) = inputs.linears([each.weight for each in first], [each.bias for each in first])
        if self.gate is not None:
            self.gates = rest.pop(0)
        q, index_inputs = self.queries(q, selects)
        rotated = store.rope_append(batch, q, kv, self.heads, self.nope, self.rotation, self.latent_norm, LATENT_EPS)
        if self.chooses:
            indexer.append(rest[0], batch, store)
        return total, *rotated, *index_inputs, *rest[1:]

    def queries(self, q: Tensor, selects: bool) -> tuple[Tensor, list[Tensor]]:
        """Return the queries, and those of the indexer if it is to select, of the low-rank ones."""
        second = [self.query.b, *([self.indexer.query] if selects else [])]
        sides = [each.weight for each in second], [each.bias for each in second]
        _, (q, *index_inputs) = add_norm_linears(q, None, self.query.norm, LATENT_EPS, *sides)
        return q, index_inputs


def make_caches(config: Config) -> list[SparseLatentShape]:
    widths, index = config.widths, config.index
    return [SparseLatentShape(widths.latent, widths.rope, index.width if own else None, index.most) for own in index.layers]
