"""MTP layers against the same layers built from transformers' own classes."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_layers import MtpModel

from auraflux.cache import Cache, CacheSettings
from auraflux.engine.engine import nbytes
from auraflux.models import family
from auraflux.models.config import experts_per_token
from auraflux.models.mtp import MTPNames
from auraflux.ops import exact
from auraflux.ops.simd.isa import ISA
from auraflux.weights.convert.mlx_folder import convert
from auraflux.weights.convert.pack import pack
from auraflux.weights.experts.settings import plan_expert_cache
from auraflux.weights.experts.store import ExpertStore
from auraflux.weights.formats.checkpoint import open_checkpoint
from auraflux.weights.loader import Weights
from tests.cli.test_models import call
from tests.models.mlx_oracle import mlx_logits
from tests.models.oracles import error, logits, save, tokens
from tests.models.test_deepseek_v3 import deepseek, glm_lite
from tests.models.test_deepseek_v32 import deepseek as deepseek_v32
from tests.models.test_glm4_moe import glm
from tests.models.test_qwen3_5_moe import qwen3_5, qwen3_5_moe, qwen3_next
from tests.models.test_qwen3_moe import scale_embeddings

COUNT = 80  # tokens: more than a page


@dataclass
class ModelWithMtp:
    """A transformers model, its MTP layer, and the folder with both."""

    model: Any
    further: Any
    folder: Path

    def hidden(self, ids: list[int]) -> Tensor:
        """Return the final hidden states of the model, [T, H]."""
        with torch.no_grad():
            return self.model.eval().get_decoder()(torch.tensor([ids])).last_hidden_state[0]

    def predicted(self, ids: list[int], hidden: Tensor) -> Tensor:
        """Return the MTP layer's output for tokens and the hidden states before them, [T, H]."""
        places = torch.arange(len(ids))[None]
        with torch.no_grad():
            return self.further.eval().forward_layer(0, hidden[None], places, None, input_ids=torch.tensor([ids]))[0]

    def logits(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            return self.model.get_output_embeddings()(hidden)


def with_mtp(model: Any, folder: Path, joined: Callable[[Tensor], Tensor] | None = None) -> ModelWithMtp:
    """Add a random MTP layer to a model and save both under published names.

    joined  makes the projection of concatenated embeddings and hidden states
    """
    config = model.config
    config.num_mtp_layers, config.mtp_layer_types, config.mtp_mlp_layer_types = 1, ["full_attention"], ["sparse"]
    if not hasattr(config, "num_nextn_predict_layers"):
        config.num_nextn_predict_layers = 1
    # a mask that every layer accepts
    model.set_attn_implementation("eager")
    torch.manual_seed(1)
    further = MtpModel(model, 1)
    with torch.no_grad():
        for name, tensor in [*further.layers.named_parameters(), *further.layers.named_buffers()]:
            if tensor.dim() > 1:
                tensor.normal_(0, 0.2 if name.endswith("gate.weight") else 0.04)
            elif "bias" in name:
                tensor.uniform_(0, 0.2)
            else:
                tensor.add_(0.2 * torch.randn(tensor.shape))
        if joined is not None:
            joint = further.layers[0].eh_proj.weight
            joint.copy_(joined(joint))
    save(model, folder)
    qwen = config.model_type.startswith("qwen")
    named = {_published(name, qwen, config.num_hidden_layers): value for name, value in further.layers.state_dict().items()}
    file = folder / "model.safetensors"
    save_file(load_file(file) | named, file, metadata={"format": "pt"})
    return ModelWithMtp(model, further, folder)


def published(name: str) -> str:
    """Return the name of a tensor within an MTP layer that is numbered on from the last."""
    return name.removeprefix("0.").removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")


def _published(name: str, qwen: bool, layers: int) -> str:
    if not qwen:
        return f"model.layers.{layers}.{published(name)}"
    name = name.removeprefix("0.")
    if name.startswith("mtp_block."):
        return "mtp.layers.0." + name.removeprefix("mtp_block.")
    part, rest = name.split(".", 1)
    names = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}
    return f"mtp.{names[part]}.{rest}"


def family_of(folder: Path, mtp: bool = True, **options: Any) -> tuple[Any, list[Any], MTPNames]:
    """Return this package's model of a folder, its cache shapes, and the names of its MTP layer."""
    checkpoint = open_checkpoint(folder)
    module = family(checkpoint.config)
    config = module.Config.from_hf(checkpoint.config)
    weights = Weights(checkpoint, module.rename, mtp=mtp, **options)
    model = module.Model(config, weights)
    weights.check_loaded()
    return model, module.make_caches(config), module.Model.mtp_names(config)


def predicted(model: Any, shape: Any, ids: list[int], hidden: Tensor, chunk: int, kv: str = "none") -> Tensor:
    cache = Cache([shape], CacheSettings(kv), context=len(ids))
    batch = cache.batch([cache.open()])
    found = []
    for start in range(0, len(ids), chunk):
        some = torch.tensor(ids[start : start + chunk])
        batch.extend([len(some)])
        with exact(True):
            found.append(model.mtp(model.embed_tokens(some), hidden[start : start + chunk].contiguous(), batch, cache))
    return torch.cat(found)


MODELS = {
    "qwen3_5_moe": lambda: scale_embeddings(qwen3_5_moe()),
    "deepseek_v3": lambda: deepseek(),
    "qwen3_5": lambda: scale_embeddings(qwen3_5(tie_word_embeddings=True)),
    "qwen3_next": lambda: scale_embeddings(qwen3_next()),
    "glm4_moe": lambda: glm(num_mtp_layers=1),
    "glm4_moe_lite": lambda: glm_lite(),
    "deepseek_v32": lambda: deepseek_v32(),
}
QUICK = ("qwen3_5_moe", "deepseek_v3")
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]


@pytest.mark.parametrize("name", NAMES)
def test_mtp_layer_matches_transformers(name: str, tmp_path: Path):
    torch.manual_seed(0)
    reference = with_mtp(MODELS[name](), tmp_path)
    ids = tokens(reference.model, COUNT + 1)
    hidden = reference.hidden(ids[:-1])
    expected = reference.predicted(ids[1:], hidden)
    model, shapes, place = family_of(tmp_path)
    shape = shapes[place.like]
    single_chunk = predicted(model, shape, ids[1:], hidden, COUNT)
    assert error(single_chunk, expected) < 2e-4
    with exact(True):
        assert error(model.logits(single_chunk), reference.logits(expected)) < 2e-4
    for chunk in (37, 1):
        assert torch.equal(predicted(model, shape, ids[1:], hidden, chunk), single_chunk)
    # quantized KV cache
    assert error(predicted(model, shape, ids[1:], hidden, COUNT, "k8v8"), expected) < 0.03


@pytest.mark.parametrize("name", [name if name in QUICK[:1] else pytest.param(name, marks=pytest.mark.slow) for name in MODELS])
def test_mtp_layer_is_converted_and_packed(name: str, tmp_path: Path):
    torch.manual_seed(0)
    reference = with_mtp(MODELS[name](), tmp_path / "source")
    ids = tokens(reference.model, COUNT + 1)
    hidden = reference.hidden(ids[:-1])
    checkpoint = open_checkpoint(reference.folder)
    kind = family(checkpoint.config)
    converted = convert(checkpoint, kind, tmp_path / "converted", bits=8, group=32)
    model, shapes, place = family_of(converted)
    # mlx-lm loads model*.safetensors and rejects unknown tensors in them
    assert (converted / "mtp.safetensors").exists()
    assert not any(place.projection in each for each in load_file(converted / "model.safetensors"))
    if name not in ("deepseek_v32", "glm4_moe", "glm4_moe_lite"):
        assert error(mlx_logits(converted, ids), logits(converted, ids)) < 2e-2
    found = predicted(model, shapes[place.like], ids[1:], hidden, COUNT)
    assert error(found, reference.predicted(ids[1:], hidden)) < 0.05
    assert family_of(converted, mtp=False)[0].mtp is None
    if name == "qwen3_5":
        return
    packed = pack(open_checkpoint(converted), kind, tmp_path / "packed", lanes=ISA.lanes)
    files = open_checkpoint(packed).experts
    k = experts_per_token(open_checkpoint(packed).config)
    share = plan_expert_cache(files, k, k * sum(file.stride for file in files.files), "direct")
    streamed = family_of(packed, experts=ExpertStore(files, share))[0]
    assert torch.equal(predicted(streamed, shapes[place.like], ids[1:], hidden, 7), found)
    # without MTP its experts are skipped, too
    rest = files.without(place.prefixes)
    assert len(rest.files) == len(files.files) - 1
    assert family_of(packed, mtp=False, experts=ExpertStore(rest, share))[0].mtp is None


@pytest.mark.parametrize("name", QUICK)
def test_mtp_layer_is_counted_separately(name: str, tmp_path: Path):
    torch.manual_seed(0)
    reference = with_mtp(MODELS[name](), tmp_path)
    if name == "deepseek_v3":
        # published with copies of tensors shared with the model
        file = tmp_path / "model.safetensors"
        copy = {"model.layers.3.embed_tokens.weight": reference.model.get_input_embeddings().weight.detach().clone()}
        save_file(load_file(file) | copy, file, metadata={"format": "pt"})
    found = json.loads(call("inspect", tmp_path, "--json").stdout)
    without, further = (nbytes(family_of(tmp_path, mtp)[0]) for mtp in (False, True))
    # a model also has rotary frequencies
    assert 0 <= without - found["total"]["memory_nbytes"] <= 1024
    assert further - without == found["mtp"]["memory_nbytes"]
    assert "MTP head: " in call("inspect", tmp_path).stdout
