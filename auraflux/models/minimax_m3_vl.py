"""MiniMax M3, the text model: block-sparse attention with a selection for each KV head, and gpt-oss's activation.

All norms have weights w of (1 + w). An indexer scores tokens; a token attends to the blocks of the best ones.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from auraflux.cache import AttentionShape, Batch, HeadBlocksShape
from auraflux.errors import FormatError
from auraflux.models import attention, llama, qwen3_moe
from auraflux.models.attention import Heads
from auraflux.models.config import Keys
from auraflux.models.deepseek_v3 import DENSE, SPARSE
from auraflux.models.layer import FeedForward, LayerInput, Mixer
from auraflux.models.mixture import MixtureConfig, activated_mixture
from auraflux.models.mlp import ActivatedMLP
from auraflux.models.rotation import rope_settings, rotated_share, rotation
from auraflux.ops import Clamp, Routing, rms_norm
from auraflux.weights.fields import COUNT, FACTOR, HEAD, LAYERS, MOST_LAYERS, TOKEN_COUNT, WIDTH, WIDTH_OR_NONE
from auraflux.weights.formats.untrusted import integer, list_of
from auraflux.weights.loader import Weights

BLOCKS = "minimax_m3_sparse"
BIAS = "gate.e_score_correction_bias"
FLAGS = list_of(integer(0, 1), MOST_LAYERS)
# names in files -> ours
NAMES = {".block_sparse_moe.e_score": ".mlp.gate.e_score", ".block_sparse_moe.": ".mlp.", ".indexer.": ".index_"}


@dataclass(frozen=True)
class Index:
    """The sizes of the indexer: heads and their width, tokens of a block, blocks that a token attends to, and local ones."""

    heads: int
    width: int
    block: int
    most: int
    local: int


@dataclass(frozen=True, eq=False)
class Config(qwen3_moe.Config):
    """Qwen3's config; `inner` is the width of MLPs.

    selects     the layers that attend to blocks
    index       of these layers
    activation  of experts and MLPs
    """

    selects: tuple[bool, ...]
    index: Index
    activation: Clamp

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys = Keys(config)
        keys.only("hidden_act", "silu", "swigluoai")
        plain = llama.Config.from_hf(keys.changed({"hidden_act": None}).found)
        index, settings = _index(keys, plain.kv_heads), rope_settings(keys)
        width, share = plain.head_width, rotated_share(keys, settings)
        turned = keys.get("rotary_dim", integer(0, 1 << 16), width) if share is None else int(width * share)
        if turned > index.width:
            raise FormatError(f"{keys.title} rotates {turned} channels of a head, more than index_head_dim {index.width}.")
        count, chosen = keys.experts("num_local_experts")
        routing = Routing(chosen, "sigmoid", renormalize=True, scale=keys.get("routed_scaling_factor", FACTOR, 2.0))
        own = {
            "inner": keys.get("dense_intermediate_size", WIDTH, 12288),
            "rotation": rotation(keys, turned, settings, by_context=True),
        }
        return cls(
            **vars(plain) | own,
            mixture=MixtureConfig(count, plain.inner, routing, _shared(keys)),
            sparse=_sparse(keys),
            home="mlp",
            selects=_selects(keys),
            index=index,
            activation=Clamp(keys.get("swiglu_alpha", FACTOR, 1.702), keys.get("swiglu_limit", FACTOR, 7.0), bare=True),
        )


def _shared(keys: Keys) -> int:
    if (found := keys.get("shared_intermediate_size", WIDTH_OR_NONE, 3072)) < 1:
        raise FormatError(f"{keys.title} has shared_intermediate_size 0, which is not supported.")
    return found


def _index(keys: Keys, kv_heads: int) -> Index:
    """Return the sizes of the indexer, which published files have in a section of their own."""
    own = keys.section("sparse_attention_config")
    found = Index(
        own.get("sparse_num_index_heads", COUNT, keys.get("index_n_heads", COUNT, 4)),
        own.get("sparse_index_dim", HEAD, keys.get("index_head_dim", HEAD, 128)),
        own.get("sparse_block_size", TOKEN_COUNT, keys.get("index_block_size", TOKEN_COUNT, 128)),
        own.get("sparse_topk_blocks", TOKEN_COUNT, keys.get("index_topk_blocks", TOKEN_COUNT, 16)),
        own.get("sparse_local_block", LAYERS, keys.get("index_local_blocks", LAYERS, 1)),
    )
    if kv_heads % found.heads:
        raise FormatError(f"{keys.title} has {found.heads} heads of the indexer, which do not divide {kv_heads} KV heads.")
    return found


def _selects(keys: Keys) -> tuple[bool, ...]:
    if "layer_types" in keys:
        return tuple(kind == BLOCKS for kind in keys.layer_types(BLOCKS, llama.FULL))
    listed = keys.section("sparse_attention_config").get("sparse_attention_freq", FLAGS, [0] * keys.layers)
    return tuple(bool(each) for each in _of_all(keys, listed, "sparse_attention_freq"))


def _sparse(keys: Keys) -> frozenset[int]:
    if "mlp_layer_types" in keys:
        kinds = keys.layer_types(DENSE, SPARSE, key="mlp_layer_types")
        return frozenset(index for index, kind in enumerate(kinds) if kind == SPARSE)
    listed = keys.get("moe_layer_freq", FLAGS, [1] * keys.layers)
    return frozenset(index for index, each in enumerate(_of_all(keys, listed, "moe_layer_freq")) if each)


def _of_all(keys: Keys, listed: list[int], name: str) -> list[int]:
    if len(listed) != keys.layers:
        raise FormatError(f"{keys.title} lists {len(listed)} {name} for num_hidden_layers {keys.layers}.")
    return listed


class Model(qwen3_moe.Model):
    """Attention, of some layers to blocks, then an MLP or experts."""

    config: Config
    shift = 1.0

    @classmethod
    def no_tensor_parallel(cls, config: Config) -> str | None:  # type: ignore[override]
        return "its indexer selects blocks for each KV head." if any(config.selects) else None

    def make_mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        kind = BlockAttention if self.config.selects[index] else Attention
        return kind(self.config, weights, f"{name}.self_attn", self.shift)

    def make_mlp(self, weights: Weights, name: str, index: int) -> FeedForward:
        config, name, activation = self.config, f"{name}.mlp", self.config.activation
        if config.mixture is None or index not in config.sparse:
            return ActivatedMLP(weights, name, config.hidden, config.inner, activation)
        return activated_mixture(weights, name, config.hidden, config.mixture, BIAS, activation, activation)


class Attention(attention.Attention):
    """Attention to all positions."""

    def __init__(self, config: Config, weights: Weights, name: str, shift: float):
        heads, turned = Heads(config.heads, config.kv_heads, config.head_width), config.rotation.to(weights.device)
        super().__init__(weights, name, config.hidden, heads, turned, config.eps, shift=shift)


class BlockAttention(Attention):
    """Attention to blocks of positions that an indexer selects for each group of KV heads."""

    supports_mixed_batch = False

    def __init__(self, config: Config, weights: Weights, name: str, shift: float):
        super().__init__(config, weights, name, shift)
        self.index = index = config.index
        self.index_q = weights.matrix(f"{name}.index_q_proj", index.heads * index.width, config.hidden)
        self.index_k = weights.matrix(f"{name}.index_k_proj", index.width, config.hidden)
        self.index_norms = [weights.vector(f"{name}.index_{kind}_norm.weight", index.width, shift=shift) for kind in "qk"]

    def __call__(self, inputs: LayerInput, batch: Batch, store: Any) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return the residual stream with its delta added, and the next delta, both [T, H]."""
        total, q, index_q = self._append(inputs, batch, store)
        chosen = None
        if not store.sees_all(batch):
            index_q = rms_norm(index_q.view(len(q), self.index.heads, -1), self.index_norms[0], self.eps)
            chosen = store.select_blocks(batch, self.rotation.at(batch.context)(index_q, batch.positions))
        return total, self.projected(store.attend(batch, q, self.scale, chosen))

    def update_cache(self, inputs: LayerInput, batch: Batch, store: Any) -> None:
        """Append keys, values and index keys of new tokens to the cache."""
        self._append(inputs, batch, store)

    def _append(self, inputs: LayerInput, batch: Batch, store: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Append keys, values and index keys; return the residual stream, queries and index queries [T, H * D]."""
        heads, tokens, turned = self.heads, len(inputs.x), self.rotation.at(batch.context)
        weights = [*self.qkv, self.index_q, self.index_k]
        total, (q, k, v, index_q, index_k) = inputs.linears(weights, [*self.qkv_bias, None, None])
        q, k, v = (each.view(tokens, -1, heads.width) for each in (q, k, v))
        q = store.rope_append(batch, q, k, v, turned, self.norms, self.eps)
        index_k = rms_norm(index_k, self.index_norms[1], self.eps)
        store.append_keys(batch, turned(index_k[:, None], batch.positions)[:, 0].contiguous())
        return total, q, index_q


def rename(name: str) -> str | None:
    if name.startswith(("patch_merge_mlp.", "model.patch_merge_mlp.")):
        return None
    ours = qwen3_moe.rename(name)
    for theirs, mine in NAMES.items():
        ours = ours and ours.replace(theirs, mine)
    return ours


def make_caches(config: Config) -> list[AttentionShape | HeadBlocksShape]:
    index, full = config.index, AttentionShape(config.kv_heads, config.head_width)
    blocks = HeadBlocksShape(config.kv_heads, config.head_width, index.block, index.heads, index.width, index.most, index.local)
    return [blocks if selects else full for selects in config.selects]
