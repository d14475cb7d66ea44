"""The projector types of mmproj files: llama.cpp's names and metadata mapped to Hugging Face's."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from auraflux.errors import FormatError
from auraflux.weights.fields import COUNT, EPS, LAYER_COUNT, WIDTH, Fields
from auraflux.weights.formats.untrusted import FLAG, Kind, integer, list_of

T = TypeVar("T")
D = TypeVar("D")

TokenID = Callable[[str], int | None]
EDGE, SIDE = integer(1, 1 << 16), integer(1, 256)
LAYERS = list_of(FLAG, 1024)
# of Gemma's towers where the file does not say
POOLING = {"gemma3": 4, "gemma4v": 3}


class TowerMetadata:
    """The metadata of a tower, under keys without their prefix.

    fields  all metadata of the file
    shapes  of its tensors
    text    config of the language model
    """

    def __init__(self, fields: Fields, shapes: Mapping[str, tuple[int, ...]], text: Mapping[str, Any]):
        self.fields, self.shapes, self.text = fields, shapes, text

    @property
    def title(self) -> str:
        return self.fields.title

    def read(self, key: str, kind: Kind[T]) -> T:
        """Return the value of a required key."""
        return self.fields.read(f"clip.vision.{key}", kind)

    def get(self, key: str, kind: Kind[T], default: D) -> T | D:
        """Return the value of a key, or the default if it is missing."""
        return self.fields.get(f"clip.vision.{key}", kind, default)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        if name not in self.shapes:
            raise FormatError(f"{self.title} has no {name}.")
        return self.shapes[name]

    @property
    def heads(self) -> int:
        return self.read("attention.head_count", COUNT)

    @property
    def eps(self) -> float:
        return self.read("attention.layer_norm_epsilon", EPS)

    @property
    def sizes(self) -> dict[str, Any]:
        """Keys of config.json that all towers have."""
        return {
            "hidden_size": self.read("embedding_length", WIDTH),
            "intermediate_size": self.read("feed_forward_length", WIDTH),
            "num_hidden_layers": self.read("block_count", LAYER_COUNT),
            "num_attention_heads": self.heads,
            "patch_size": self.read("patch_size", SIDE),
        }


class Projector(NamedTuple):
    """Mapping of one value of clip.projector_type.

    model_types  of the language model, and of the whole one
    prefix       of the names of layers
    layer        names of modules within a layer
    others       full names of other tensors, or of modules
    config       config.json's keys of the tower, and those around it
    """

    model_types: Mapping[str, str]
    prefix: str
    layer: Mapping[str, str]
    others: Mapping[str, str]
    config: Callable[[TowerMetadata, TokenID], tuple[dict[str, Any], dict[str, Any]]]


def _token(token_id: TokenID, name: str) -> int:
    found = token_id(name)
    if found is None:
        raise FormatError(f"the vocabulary of the language model has no {name}.")
    return found


def _qwen(meta: TowerMetadata, token_id: TokenID) -> tuple[dict[str, Any], dict[str, Any]]:
    if any(meta.get("is_deepstack_layers", LAYERS, [])):
        raise FormatError(f"{meta.title} has clip.vision.is_deepstack_layers, which are not supported.")
    found = meta.sizes
    vision = {
        **found,
        "depth": found["num_hidden_layers"],
        "num_heads": found["num_attention_heads"],
        "spatial_merge_size": meta.get("spatial_merge_size", SIDE, 2),
        "temporal_patch_size": 2,
        "out_hidden_size": meta.read("projection_dim", WIDTH),
        "num_position_embeddings": meta.shape("v.position_embd.weight")[0],
        "hidden_act": "gelu_pytorch_tanh",
    }
    return vision, {"image_token_id": _token(token_id, "<|image_pad|>")}


def _gemma3(meta: TowerMetadata, token_id: TokenID) -> tuple[dict[str, Any], dict[str, Any]]:
    edge, found = meta.read("image_size", EDGE), meta.sizes
    pooled = meta.get("projector.scale_factor", SIDE, POOLING["gemma3"])
    vision = {**found, "image_size": edge, "layer_norm_eps": meta.eps, "hidden_act": "gelu_pytorch_tanh"}
    outer = {
        "mm_tokens_per_image": (edge // found["patch_size"] // pooled) ** 2,
        "boi_token_index": _token(token_id, "<start_of_image>"),
        "eoi_token_index": _token(token_id, "<end_of_image>"),
        # GGUF vocabularies end before it: embeddings take its place
        "image_token_index": token_id("<image_soft_token>") or 0,
    }
    return vision, outer


def _gemma4(meta: TowerMetadata, token_id: TokenID) -> tuple[dict[str, Any], dict[str, Any]]:
    width = meta.shape("v.blk.0.attn_q_norm.weight")[0]
    vision = {
        **meta.sizes,
        "head_dim": width,
        "num_key_value_heads": meta.shape("v.blk.0.attn_k.weight")[0] // width,
        "pooling_kernel_size": meta.get("projector.scale_factor", SIDE, POOLING["gemma4v"]),
        "position_embedding_size": meta.shape("v.position_embd.weight")[1],
        "rms_norm_eps": meta.eps,
        "use_clipped_linears": "v.blk.0.attn_q.input_max" in meta.shapes,
        "standardize": "v.std_bias" in meta.shapes,
    }
    names = {"image_token_id": "<|image|>", "boi_token_id": "<|image>", "eoi_token_id": "<image|>"}
    outer: dict[str, Any] = {key: _token(token_id, name) for key, name in names.items()}
    # not in the file: the models with per-layer inputs have causal attention only
    outer["use_bidirectional_attention"] = None if meta.text.get("hidden_size_per_layer_input") else "vision"
    return vision, outer


def _pixtral(meta: TowerMetadata, token_id: TokenID) -> tuple[dict[str, Any], dict[str, Any]]:
    vision = {
        **meta.sizes,
        "image_size": meta.read("image_size", EDGE),
        "hidden_act": "silu" if meta.fields.get("clip.use_silu", FLAG, False) else "gelu",
        "rope_theta": 10000.0,
    }
    outer = {
        "image_token_index": _token(token_id, "[IMG]"),
        "spatial_merge_size": meta.get("spatial_merge_size", SIDE, 1),
        "multimodal_projector_bias": "mm.1.bias" in meta.shapes,
        "projector_hidden_act": "gelu",
    }
    return vision, outer


def _kimi(meta: TowerMetadata, token_id: TokenID) -> tuple[dict[str, Any], dict[str, Any]]:
    rows, columns, _ = meta.shape("v.position_embd.weight")
    merge = meta.get("projector.scale_factor", SIDE, 2)
    vision = {
        **meta.sizes,
        "pos_emb_height": rows,
        "pos_emb_width": columns,
        "merge_kernel_size": [merge, merge],
        "hidden_act": "gelu_pytorch_tanh",
    }
    return vision, {"image_token_id": _token(token_id, "<|media_pad|>"), "projection_layer_norm_eps": meta.eps}


SIGLIP = "vision_tower.vision_model."
PROJECTORS = {
    "qwen3vl_merger": Projector(
        {"qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"},
        "model.visual.blocks.",
        {
            "ln1": "norm1",
            "ln2": "norm2",
            "attn_qkv": "attn.qkv",
            "attn_out": "attn.proj",
            "ffn_up": "mlp.linear_fc1",
            "ffn_down": "mlp.linear_fc2",
        },
        {
            "v.patch_embd": "model.visual.patch_embed.proj",
            "v.position_embd": "model.visual.pos_embed",
            "v.post_ln": "model.visual.merger.norm",
            "mm.0": "model.visual.merger.linear_fc1",
            "mm.2": "model.visual.merger.linear_fc2",
        },
        _qwen,
    ),
    "gemma3": Projector(
        {"gemma3_text": "gemma3"},
        f"{SIGLIP}encoder.layers.",
        {
            "ln1": "layer_norm1",
            "ln2": "layer_norm2",
            **{f"attn_{part}": f"self_attn.{part}_proj" for part in ("q", "k", "v", "out")},
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
        {
            "v.patch_embd": f"{SIGLIP}embeddings.patch_embedding",
            "v.position_embd": f"{SIGLIP}embeddings.position_embedding",
            "v.post_ln": f"{SIGLIP}post_layernorm",
            "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
            "mm.input_projection.weight": "multi_modal_projector.mm_input_projection_weight",
        },
        _gemma3,
    ),
    "gemma4v": Projector(
        {"gemma4_text": "gemma4"},
        "model.vision_tower.encoder.layers.",
        {
            "ln1": "input_layernorm",
            "attn_post_norm": "post_attention_layernorm",
            "ln2": "pre_feedforward_layernorm",
            "ffn_post_norm": "post_feedforward_layernorm",
            **{f"attn_{part}": f"self_attn.{part}_proj.linear" for part in ("q", "k", "v")},
            "attn_out": "self_attn.o_proj.linear",
            **{f"attn_{part}_norm": f"self_attn.{part}_norm" for part in ("q", "k")},
            **{f"ffn_{part}": f"mlp.{part}_proj.linear" for part in ("gate", "up", "down")},
        },
        {
            "v.patch_embd": "model.vision_tower.patch_embedder.input_proj",
            "v.position_embd.weight": "model.vision_tower.patch_embedder.position_embedding_table",
            "v.std_bias": "model.vision_tower.std_bias",
            "v.std_scale": "model.vision_tower.std_scale",
            "mm.input_projection": "model.embed_vision.embedding_projection",
        },
        _gemma4,
    ),
    "pixtral": Projector(
        {"llama": "mistral3", "mistral": "mistral3"},
        "vision_tower.transformer.layers.",
        {
            "ln1": "attention_norm",
            "ln2": "ffn_norm",
            **{f"attn_{part}": f"attention.{part}_proj" for part in ("q", "k", "v")},
            "attn_out": "attention.o_proj",
            **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
        },
        {
            "v.patch_embd": "vision_tower.patch_conv",
            "v.pre_ln": "vision_tower.ln_pre",
            "mm.input_norm": "multi_modal_projector.norm",
            "mm.patch_merger": "multi_modal_projector.patch_merger.merging_layer",
            "mm.1": "multi_modal_projector.linear_1",
            "mm.2": "multi_modal_projector.linear_2",
        },
        _pixtral,
    ),
    "kimik25": Projector(
        {"deepseek_v3": "kimi_k25"},
        "vision_tower.encoder.blocks.",
        {"ln1": "norm0", "ln2": "norm1", "attn_qkv": "wqkv", "attn_out": "wo", "ffn_up": "mlp.fc0", "ffn_down": "mlp.fc1"},
        {
            "v.patch_embd": "vision_tower.patch_embed.proj",
            "v.position_embd": "vision_tower.patch_embed.pos_emb",
            "v.post_ln": "vision_tower.encoder.final_layernorm",
            "mm.input_norm": "mm_projector.pre_norm",
            "mm.1": "mm_projector.proj.0",
            "mm.2": "mm_projector.proj.2",
        },
        _kimi,
    ),
}
