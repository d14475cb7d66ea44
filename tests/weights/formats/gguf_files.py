"""Tiny GGUF files, written by the `gguf` package from Hugging Face's tensors like llama.cpp's converter."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, quants

from auraflux.quant.gguf_layouts import LAYOUTS, NOT_IN_MLX
from auraflux.weights.formats.gguf_architectures import ARCHITECTURES, ENDS
from auraflux.weights.formats.gguf_names import NEXTN
from tests.quant.test_gguf_blocks import set_scales_of_iq1_m
from tests.tested import external_oracle

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, WIDTH, VOCAB = 128, 192, 2, 4, 2, 32, 96

# a type whose scales are not one number
OTHERS = {"NVFP4": np.dtype([("scales", "V4"), ("codes", "V32")])}
# types that the package cannot quantize to
UNWRITTEN = {*NOT_IN_MLX, *OTHERS, "Q4_K", "Q5_K"}


def llama_tensors(tied: bool = True, **extra: tuple[int, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.{kind}_layernorm.weight": (HIDDEN,) for kind in ("input", "post_attention")}
        shapes |= {f"{layer}.self_attn.q_proj.weight": (HEADS * WIDTH, HIDDEN)}
        shapes |= {f"{layer}.self_attn.{kind}_proj.weight": (KV_HEADS * WIDTH, HIDDEN) for kind in "kv"}
        shapes |= {f"{layer}.self_attn.o_proj.weight": (HIDDEN, HEADS * WIDTH)}
        shapes |= {f"{layer}.mlp.{kind}_proj.weight": (INNER, HIDDEN) for kind in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj.weight": (HIDDEN, INNER)}
    return {name: rng.standard_normal(shape).astype(np.float32) * 0.1 for name, shape in (shapes | extra).items()}


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Permute the rows of q and k to llama.cpp's order, with rotated pairs adjacent."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def gguf_name(name: str, architecture: str) -> str:
    stem, dot, part = name.rpartition(".")
    ends = {theirs: ours for ours, theirs in ENDS.items()}
    # Ollama's files of EmbeddingGemma keep the names of Dense modules
    if stem in ends and not (architecture == "gemma3" and stem.startswith("dense.")):
        return ends[stem] + dot + part
    if not name.startswith("model.layers."):
        return name
    _, _, layer, rest = name.split(".", 3)
    arch, module = ARCHITECTURES[architecture], rest.removesuffix(f".{part}")
    vectors = {theirs: ours for ours, theirs in arch.vectors.items()}
    if rest in vectors:
        return f"blk.{layer}.{vectors[rest]}"
    names = {theirs: ours for ours, theirs in (arch.layer | NEXTN).items()}
    return f"blk.{layer}.{names[module]}.{part}"


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray],
    kind: str = "F32",
    architecture: str = "llama",
    metadata: dict[str, Any] | None = None,
    kinds: dict[str, str] | None = None,
    tokenizer: bool = False,
    most: int = 0,
) -> Path:
    """Write a file; matrices have the type `kind`, or the one given for their name.

    most  tensors per file of a split model, whose first file has all metadata; 0 for one file
    """
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=most)
    given = {
        "block_count": LAYERS,
        "context_length": 256,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    } | (metadata or {})
    for key, value in given.items():
        if isinstance(value, list):
            writer.add_array(f"{architecture}.{key}", value)
        else:
            kinds_of = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            add = kinds_of[type(value)]
            add(f"{architecture}.{key}", value)
    writer.add_token_list(["<s>", "é", "ab", "a", "b", "Ġ", *map(str, range(VOCAB - 6))])
    if tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_merges(["a b"])
        writer.add_chat_template("{{ messages[0]['content'] }}")
    writer.add_token_types([3] + [1] * (VOCAB - 1))
    writer.add_eos_token_id(0)
    for name, array in tensors.items():
        if architecture == "llama" and "q_proj" in name:
            array = permuted(array, HEADS)
        if architecture == "llama" and "k_proj" in name:
            array = permuted(array, KV_HEADS)
        if architecture in ("gemma3", "gemma-embedding") and name.endswith("norm.weight"):
            array = array + 1
        wanted = (kinds or {}).get(name, kind if array.ndim > 1 else "F32")
        add_tensor(writer, gguf_name(name, architecture), array, wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tensor(writer: gguf.GGUFWriter, name: str, array: np.ndarray, kind: str) -> None:
    which = GGMLQuantizationType[kind]
    if kind in ("F32", "F16"):
        writer.add_tensor(name, array.astype({"F32": np.float32, "F16": np.float16}[kind]))
    elif kind in UNWRITTEN:
        writer.add_tensor(name, any_blocks(array.shape, kind), raw_dtype=which)
    else:
        writer.add_tensor(name, quants.quantize(array, which), raw_dtype=which)


def any_blocks(shape: tuple[int, ...], kind: str) -> np.ndarray:
    """Return random blocks with small scales, of a type that the package only decodes."""
    octets = np.random.default_rng(0).integers(
        0, 256, gguf.quant_shape_to_byte_shape(shape, GGMLQuantizationType[kind]), dtype=np.uint8
    )
    blocks = octets.reshape(-1).view(OTHERS[kind] if kind in OTHERS else LAYOUTS[kind].record)
    for name in {"scale", "least"} & set(blocks.dtype.names or ()):
        blocks[name] = 1e-4
    if kind == "IQ1_M":
        set_scales_of_iq1_m(blocks, np.full(len(blocks), 1e-4, np.float16))
    return octets


@external_oracle("gguf")
def decoded(octets: np.ndarray, kind: str) -> np.ndarray:
    """Dequantize blocks with the package."""
    return quants.dequantize(octets, GGMLQuantizationType[kind])


def quantize_round_trip(array: np.ndarray, kind: str) -> torch.Tensor:
    """Quantize a tensor to `kind` and dequantize it."""
    which = GGMLQuantizationType[kind]
    return torch.from_numpy(decoded(quants.quantize(array, which), kind).reshape(array.shape).copy())
