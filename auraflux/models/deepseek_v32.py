"""DeepSeek V3.2 and GLM 5: DeepSeek V3's body with sparse attention.

An indexer with small heads scores all positions that a token sees, by keys that it keeps of its own, and the token attends to
the best of them only. In GLM some layers have no indexer and go by the choice of the last layer that has one.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from auraflux.cache import Batch, SparseLatentShape
from auraflux.errors import FormatError
from auraflux.models import deepseek_v3
from auraflux.models.config import Keys
from auraflux.models.decoder import Mixer, Stream
from auraflux.models.deepseek_v3 import LATENT_EPS, LowRank, Projection, rename
from auraflux.models.mtp import Place, after_last
from auraflux.models.rotation import Rotation
from auraflux.ops import Chosen, add_norm_linears, layer_norm
from auraflux.weights.loader import Weights

__all__ = ["Config", "Model", "make_caches", "rename"]

FULL, SHARED = "full", "shared"
KEY_EPS = 1e-6  # of the norm over index keys


@dataclass(frozen=True, eq=False)
class Index:
    """The sizes of the indexer.

    heads, width  of its queries; a token has one key of that width
    most          positions that a token attends to
    rotation      of the first channels
    layers        which have an indexer
    """

    heads: int
    width: int
    most: int
    rotation: Rotation
    layers: tuple[bool, ...]


@dataclass(frozen=True, eq=False)
class Config(deepseek_v3.Config):
    """DeepSeek V3's, and the indexer's."""

    index: Index

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys, base = Keys(config), deepseek_v3.Config.from_hf(config)
        if base.widths.query is None:
            raise FormatError(f"config.json of model_type {keys.kind!r} has no 'q_lora_rank', which the indexer reads.")
        if (rope := base.widths.rope) > (width := keys["index_head_dim"]):
            raise FormatError(f"config.json has index_head_dim {width}, of which qk_rope_head_dim {rope} are to be rotated.")
        # neighbours are rotated together in GLM, halves in DeepSeek, whatever the other heads do
        rotation = replace(base.rotation, interleaved=keys.kind == "glm_moe_dsa")
        sizes = keys["index_n_heads"], keys["index_head_dim"], keys["index_topk"]
        return cls(**vars(base), index=Index(*sizes, rotation, _indexed_layers(keys)))


def _indexed_layers(keys: Keys) -> tuple[bool, ...]:
    """Which layers have an indexer of their own: those the checkpoint lists, or every so many after the first."""
    layers = keys["num_hidden_layers"]
    if "indexer_types" in keys:
        found = tuple(kind == FULL for kind in keys.layer_types(FULL, SHARED, key="indexer_types"))
    elif "index_topk_pattern" in keys:
        found = tuple(kind in ("F", FULL) for kind in keys["index_topk_pattern"])
    else:
        every, offset = keys.get("index_topk_freq", 1), keys.get("index_skip_topk_offset", 2)
        found = tuple(max(i - offset + 1, 0) % every == 0 for i in range(layers))
    if len(found) != layers or not found[0]:
        raise FormatError(
            f"config.json names {len(found)} indexers for num_hidden_layers {layers}; the first must have its own."
        )
    return found


class Model(deepseek_v3.Model):
    """Sparse latent attention, then an MLP in the first layers and experts in the others."""

    config: Config
    # layers go by what earlier ones chose for all tokens of a step
    beside = False

    def __init__(self, config: Config, weights: Weights):
        self.indexer: Indexer | None = None
        if not all(config.index.layers):
            self.whole = "its layers go by positions that earlier ones choose."
        super().__init__(config, weights)

    @classmethod
    def mtp_place(cls, config: Config) -> Place | None:  # type: ignore[override]
        # one that chooses its positions itself
        return after_last(config.layers, config.extra, max(i for i, own in enumerate(config.index.layers) if own))

    def make_mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        config, name = self.config, f"{name}.self_attn"
        own = Indexer(config, weights, f"{name}.indexer") if config.index.layers[index] else None
        self.indexer = own or self.indexer
        assert self.indexer is not None
        return Attention(config, weights, name, self.indexer, own is not None)


class Indexer:
    """What chooses the positions of its own layer, and of those after it that have none.

    chosen  in the step that is being taken; None where all positions are
    """

    def __init__(self, config: Config, weights: Weights, name: str):
        index, rank = config.index, config.widths.query
        assert rank is not None
        self.heads, self.rotation = index.heads, index.rotation.to(weights.device)
        self.query = Projection(weights, f"{name}.wq_b", index.heads * index.width, rank)
        self.key = Projection(weights, f"{name}.wk", index.width, config.hidden)
        self.share = Projection(weights, f"{name}.weights_proj", index.heads, config.hidden)
        self.norm, self.bias = (weights.vector(f"{name}.k_norm.{part}", index.width) for part in ("weight", "bias"))
        self.chosen: Chosen | None = None

    def remember(self, k: Tensor, batch: Batch, store: Any) -> None:
        """Normalise, rotate and store keys, [T, D]."""
        k = layer_norm(k, self.norm, self.bias, KEY_EPS)
        store.append_keys(batch, self.rotation(k[:, None], batch.positions)[:, 0])

    def choose(self, batch: Batch, store: Any, q: Tensor, weights: Tensor) -> None:
        """Choose by queries [T, H * D] and heads' weights [T, H]; what scales all scores alike is left out."""
        self.chosen = store.choose(batch, self.rotation(q.unflatten(1, (self.heads, -1)), batch.positions), weights)


class Attention(deepseek_v3.Attention):
    """Latent attention to the positions an indexer chooses.

    chooses  whether the indexer is its own
    """

    query: LowRank

    def __init__(self, config: Config, weights: Weights, name: str, indexer: Indexer, chooses: bool):
        super().__init__(config, weights, name)
        self.indexer, self.chooses = indexer, chooses

    def __call__(self, stream: Stream, batch: Batch, store: Any) -> tuple[Tensor, Tensor]:
        """Give the stream with all that was to be added to it, and what comes next, both [T, H]."""
        total, q_nope, q_rope, *asked = self.remember(stream, batch, store)
        if asked:
            self.indexer.choose(batch, store, *asked)
        chosen = None if store.sees_all(batch) else self.indexer.chosen
        mixed = store.attend(batch, self.kv_b.query(q_nope), q_rope, self.scale, chosen)
        return total, self.out(self.kv_b.output(mixed).flatten(1))

    def remember(self, stream: Stream, batch: Batch, store: Any) -> tuple[Tensor, ...]:
        """Store latents and index keys: gives the stream with all that was to be added to it, and both parts of the queries;
        then, where there is something to choose, the indexer's queries and weights."""
        indexer, asks = self.indexer, self.chooses and not store.sees_all(batch)
        first = [self.query.first, self.kv_a, *([indexer.key] if self.chooses else []), *([indexer.share] if asks else [])]
        total, (q, kv, *rest) = add_norm_linears(*stream, [each.weight for each in first], [each.bias for each in first])
        second = [self.query.b, *([indexer.query] if asks else [])]
        sides = [each.weight for each in second], [each.bias for each in second]
        _, (q, *asked) = add_norm_linears(q, None, self.query.norm, LATENT_EPS, *sides)
        rotated = store.rope_append(batch, q, kv, self.heads, self.nope, self.rotation, self.latent_norm, LATENT_EPS)
        if self.chooses:
            indexer.remember(rest[0], batch, store)
        return total, *rotated, *asked, *rest[1:]


def make_caches(config: Config) -> list[SparseLatentShape]:
    widths, index = config.widths, config.index
    return [SparseLatentShape(widths.latent, widths.rope, index.width if own else None, index.most) for own in index.layers]
