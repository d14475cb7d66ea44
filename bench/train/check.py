"""Compare the training forward pass of a folder with transformers and auraflux: same tokens, float32.

python -m bench.train.check FOLDER
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from bench.train.forward import forward
from bench.train.shapes import Config, Parameters

TOKENS = 300


def ours(config: Config, tensors: Parameters, ids: list[int]) -> Tensor:
    p = {name: value.float() for name, value in stacked(config, tensors).items()}
    hidden, _ = forward(config, p, torch.tensor([ids]))
    return F.linear(hidden[0], p["model.embed_tokens.weight"])


def stacked(config: Config, tensors: Parameters) -> Parameters:
    """Stack the experts of a checkpoint; the inverse of `checkpoint`."""
    made = {name: value for name, value in tensors.items() if ".experts." not in name}
    for index in range(config["num_hidden_layers"]):
        name = f"model.layers.{index}.mlp.experts"
        if f"{name}.0.gate_proj.weight" in tensors:
            count = sum(1 for each in tensors if each.startswith(f"{name}.") and each.endswith("gate_proj.weight"))
            for part in ("gate", "up", "down"):
                made[f"{name}.{part}"] = torch.stack([tensors[f"{name}.{i}.{part}_proj.weight"] for i in range(count)])
        elif f"{name}.gate_up_proj_bias" in tensors:
            both, biases = tensors[f"{name}.gate_up_proj"].mT, tensors[f"{name}.gate_up_proj_bias"]
            made[f"{name}.gate"], made[f"{name}.up"] = both[:, 0::2], both[:, 1::2]
            made[f"{name}.gate_bias"], made[f"{name}.up_bias"] = biases[:, 0::2], biases[:, 1::2]
            made[f"{name}.down"], made[f"{name}.down_bias"] = tensors[f"{name}.down_proj"].mT, tensors[f"{name}.down_proj_bias"]
        elif f"{name}.gate_up_proj" in tensors:
            made[f"{name}.gate"], made[f"{name}.up"] = tensors[f"{name}.gate_up_proj"].chunk(2, 1)
            made[f"{name}.down"] = tensors[f"{name}.down_proj"]
    return made


def theirs(folder: Path, ids: list[int]) -> Tensor:
    from transformers import AutoModelForCausalLM

    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    return model.eval()(torch.tensor([ids])).logits[0].float()


def products(folder: Path, ids: list[int]) -> Tensor:
    from auraflux.cache import CacheSettings
    from auraflux.engine.engine import Engine
    from auraflux.models import family
    from auraflux.weights.formats.checkpoint import open_checkpoint
    from auraflux.weights.loader import Weights

    opened = open_checkpoint(folder)
    module = family(opened.config)
    config = module.Config.from_hf(opened.config)
    weights = Weights(opened, module.rename)
    model = module.Model(config, weights)
    weights.check_loaded()
    engine = Engine(model, module.make_caches(config), CacheSettings("none"), context=len(ids), exact=True)
    return engine.all_logits(engine.cache.open(), ids)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("folder", type=Path)
    folder = options.parse_args().folder
    config = json.loads((folder / "config.json").read_text())
    ids = np.random.default_rng(0).integers(5, config["vocab_size"], TOKENS).tolist()
    with torch.no_grad():
        wanted = theirs(folder, ids)
        found = {"training": ours(config, load_file(folder / "model.safetensors"), ids), "auraflux": products(folder, ids)}
    for name, scores in found.items():
        error = float((scores - wanted).norm() / wanted.norm())
        same = float((scores.argmax(-1) == wanted.argmax(-1)).float().mean())
        print(f"{name}: relative error {error:.2e}, same top token {same:.3f}")


if __name__ == "__main__":
    main()
