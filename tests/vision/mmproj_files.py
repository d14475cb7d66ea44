"""mmproj files of random models, written as llama.cpp's converter writes them, with the tensor names of the gguf package."""

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

from tests.weights.formats.gguf_files import add_tensor, permuted

TYPES = {"qwen3_5": "qwen3vl_merger", "gemma3": "gemma3", "gemma4": "gemma4v", "mistral3": "pixtral", "kimi_k25": "kimik25"}
SUFFIXES = ".weight", ".bias", ".input_max", ".input_min", ".output_max", ".output_min"


def write_mmproj(folder: Path, path: Path, kind: str = "F32", **metadata: Any) -> Path:
    """Write the tower of a folder of safetensors; matrices have the type `kind`."""
    config = json.loads((folder / "config.json").read_text())
    vision, projector = config["vision_config"], TYPES[config["model_type"]]
    depth = vision.get("depth", vision.get("num_hidden_layers"))
    # projectors number their layers like blocks, up to 2
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, depth + 3)
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_string("clip.projector_type", projector)
    writer.add_bool("clip.has_vision_encoder", True)
    given = {
        "embedding_length": vision["hidden_size"],
        "feed_forward_length": vision["intermediate_size"],
        "block_count": depth,
        "attention.head_count": vision.get("num_heads", vision.get("num_attention_heads")),
        "attention.layer_norm_epsilon": 1e-5 if projector in ("pixtral", "kimik25") else 1e-6,
        "patch_size": vision["patch_size"],
        "image_size": vision.get("image_size", 224),
        "projection_dim": config["text_config"]["hidden_size"],
        **metadata,
    }
    for key, value in given.items():
        name = f"clip.vision.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        else:
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(name, value)
    if vision.get("hidden_act") == "silu":
        writer.add_bool("clip.use_silu", True)
    for name, array in _tensors(folder, projector, given["attention.head_count"]).items():
        renamed = _renamed(name, names)
        add_tensor(writer, renamed, array, kind if array.ndim == 2 and not array.shape[1] % 32 else "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _renamed(name: str, names: Any) -> str:
    """Return llama.cpp's name of a tensor as its converter prepares it."""
    if name.startswith(("v.", "mm.")):
        return name
    suffix = next((each for each in SUFFIXES if name.endswith(each)), "")
    found = names.get_name(name.removesuffix(suffix))
    assert found is not None, name
    return found + suffix


def _tensors(folder: Path, projector: str, heads: int) -> dict[str, np.ndarray]:
    found = {name: tensor.float().numpy() for name, tensor in load_file(folder / "model.safetensors").items()}
    made = {"qwen3vl_merger": _qwen, "gemma3": _gemma3, "gemma4v": _gemma4, "pixtral": _pixtral, "kimik25": _kimi}
    return made[projector](found, heads)


def _qwen(found: dict[str, np.ndarray], heads: int) -> dict[str, np.ndarray]:
    made = {}
    others = {"merger.linear_fc1": "mm.0", "merger.linear_fc2": "mm.2", "merger.norm": "v.post_ln"}
    for name, array in found.items():
        short = name.removeprefix("model.")
        if not short.startswith("visual."):
            continue
        module, _, part = short.removeprefix("visual.").rpartition(".")
        if short == "visual.patch_embed.proj.weight":
            made |= {"v.patch_embd.weight": array[:, :, 0], "v.patch_embd.weight.1": array[:, :, 1]}
        elif module == "patch_embed.proj":
            made[f"v.patch_embd.{part}"] = array
        else:
            made[f"{others[module]}.{part}" if module in others else short] = array
    return made


def _gemma3(found: dict[str, np.ndarray], heads: int) -> dict[str, np.ndarray]:
    made = {}
    for name, array in found.items():
        short = name.removeprefix("model.").replace("vision_tower.", "vision_tower.vision_model.")
        short = short.replace("vision_model.vision_model.", "vision_model.").replace("_weight", ".weight")
        if short.startswith(("vision_tower.", "multi_modal_projector.")) and ".head." not in short:
            made[short] = array + 1 if "soft_emb_norm" in short else array
    return made


def _gemma4(found: dict[str, np.ndarray], heads: int) -> dict[str, np.ndarray]:
    made = {}
    for name, array in found.items():
        if "vision_tower" not in name and "embed_vision" not in name:
            continue
        short = name.replace("model.vision_tower.encoder.", "vision_model.model.")
        short = short.replace(".linear.weight", ".weight")
        if short.endswith("position_embedding_table"):
            short += ".weight"
        if short.endswith("input_proj.weight"):
            side = int((array.shape[1] // 3) ** 0.5)
            array = np.ascontiguousarray(array.reshape(-1, side, side, 3).transpose(0, 3, 1, 2))
        if short.endswith("embedding_projection.weight"):
            short = "mm.input_projection.weight"
        if re.search(r"std_(bias|scale)$", short):
            short = "v." + short.rpartition(".")[2]
        made[short] = array.reshape(1) if array.ndim == 0 else array
    return made


def _pixtral(found: dict[str, np.ndarray], heads: int) -> dict[str, np.ndarray]:
    made = {}
    for name, array in found.items():
        short = name.removeprefix("model.")
        if not short.startswith(("vision_tower.", "multi_modal_projector.")):
            continue
        if "attention.q_proj" in short or "attention.k_proj" in short:
            array = permuted(array, heads)
        made[short] = array
    made["v.token_embd.img_break"] = next(array for name, array in found.items() if "embed_tokens" in name)[101]
    return made


def _kimi(found: dict[str, np.ndarray], heads: int) -> dict[str, np.ndarray]:
    made = {}
    for name, array in found.items():
        short = name.removeprefix("model.").replace("encoder.patch_embed", "patch_embed")
        if not short.startswith(("vision_tower.", "mm_projector.")):
            continue
        if ".wqkv." in short:
            # rows and columns turn alternate pairs; afterwards the pairs of columns come first
            apart = [each.reshape(heads, -1, 2, 2, *array.shape[1:]).swapaxes(1, 2) for each in np.split(array, 3)[:2]]
            array = np.concatenate([*(each.reshape(-1, *array.shape[1:]) for each in apart), np.split(array, 3)[2]])
        made[short.replace("proj.0.", "proj.linear_1.").replace("proj.2.", "proj.linear_2.")] = array
    return made
