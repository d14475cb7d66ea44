"""Layers that predict further tokens against those of transformers, which lets a model's own classes make them."""

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
from auraflux.models import family
from auraflux.models.config import experts_per_token
from auraflux.models.mtp import Place
from auraflux.ops import exact
from auraflux.ops.simd.isa import ISA
from auraflux.run.engine import nbytes
from auraflux.weights.checkpoint import open_checkpoint
from auraflux.weights.convert import convert
from auraflux.weights.expert_settings import share_out
from auraflux.weights.expert_store import ExpertStore
from auraflux.weights.loader import Weights
from auraflux.weights.pack import pack
from tests.cli.test_models import call
from tests.models.mlx_oracle import mlx_scores
from tests.models.oracles import error, save, scores, tokens
from tests.models.test_deepseek_v3 import deepseek, glm_lite
from tests.models.test_deepseek_v32 import deepseek as deepseek_v32
from tests.models.test_glm4_moe import glm
from tests.models.test_qwen3_5_moe import qwen3_5, qwen3_5_moe, qwen3_next
from tests.models.test_qwen3_moe import outspoken

COUNT = 80  # tokens: more than a page


@dataclass
class Both:
    """A model of transformers' with its further layer, and the folder that has both."""

    model: Any
    further: Any
    folder: Path

    def hidden(self, ids: list[int]) -> Tensor:
        """What the model makes of each token, [T, H]."""
        with torch.no_grad():
            return self.model.eval().get_decoder()(torch.tensor([ids])).last_hidden_state[0]

    def predicted(self, ids: list[int], hidden: Tensor) -> Tensor:
        """What the layer makes of tokens and what came before each, [T, H]."""
        places = torch.arange(len(ids))[None]
        with torch.no_grad():
            return self.further.eval().forward_layer(0, hidden[None], places, None, input_ids=torch.tensor([ids]))[0]

    def scores(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            return self.model.get_output_embeddings()(hidden)


def with_mtp(model: Any, folder: Path, joined: Callable[[Tensor], Tensor] | None = None) -> Both:
    """Add a layer that predicts further, as random as the others, and write it as those write it who publish it.

    joined  makes the matrix that joins tokens and results
    """
    config = model.config
    config.num_mtp_layers, config.mtp_layer_types, config.mtp_mlp_layer_types = 1, ["full_attention"], ["sparse"]
    if not hasattr(config, "num_nextn_predict_layers"):
        config.num_nextn_predict_layers = 1
    # a mask that every layer can read
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
    return Both(model, further, folder)


def _published(name: str, qwen: bool, layers: int) -> str:
    name = name.removeprefix("0.")
    if not qwen:
        return f"model.layers.{layers}." + name.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
    if name.startswith("mtp_block."):
        return "mtp.layers.0." + name.removeprefix("mtp_block.")
    part, rest = name.split(".", 1)
    names = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}
    return f"mtp.{names[part]}.{rest}"


def family_of(folder: Path, mtp: bool = True, **options: Any) -> tuple[Any, list[Any], Place]:
    """This package's model of the same folder, the shapes of its layers, and where the further one is."""
    checkpoint = open_checkpoint(folder)
    module = family(checkpoint.config)
    config = module.Config.from_hf(checkpoint.config)
    weights = Weights(checkpoint, module.rename, mtp=mtp, **options)
    model = module.Model(config, weights)
    weights.done()
    return model, module.make_caches(config), module.Model.mtp_place(config)


def predicted(model: Any, shape: Any, ids: list[int], hidden: Tensor, piece: int, kv: str = "none") -> Tensor:
    cache = Cache([shape], CacheSettings(kv), context=len(ids))
    batch = cache.batch([cache.open()])
    found = []
    for start in range(0, len(ids), piece):
        some = torch.tensor(ids[start : start + piece])
        batch.extend([len(some)])
        with exact(True):
            found.append(model.mtp(model.embedded(some), hidden[start : start + piece].contiguous(), batch, cache))
    return torch.cat(found)


MODELS = {
    "qwen3_5_moe": lambda: outspoken(qwen3_5_moe()),
    "deepseek_v3": lambda: deepseek(),
    "qwen3_5": lambda: outspoken(qwen3_5(tie_word_embeddings=True)),
    "qwen3_next": lambda: outspoken(qwen3_next()),
    "glm4_moe": lambda: glm(num_mtp_layers=1),
    "glm4_moe_lite": lambda: glm_lite(),
    "deepseek_v32": lambda: deepseek_v32(),
}
QUICK = ("qwen3_5_moe", "deepseek_v3")
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]


@pytest.mark.parametrize("name", NAMES)
def test_a_further_layer_is_that_of_transformers(name: str, tmp_path: Path):
    torch.manual_seed(0)
    both = with_mtp(MODELS[name](), tmp_path)
    ids = tokens(both.model, COUNT + 1)
    hidden = both.hidden(ids[:-1])
    wanted = both.predicted(ids[1:], hidden)
    model, shapes, place = family_of(tmp_path)
    shape = shapes[place.like]
    whole = predicted(model, shape, ids[1:], hidden, COUNT)
    assert error(whole, wanted) < 2e-4
    with exact(True):
        assert error(model.logits(whole), both.scores(wanted)) < 2e-4
    for piece in (37, 1):
        assert torch.equal(predicted(model, shape, ids[1:], hidden, piece), whole)
    # coded keys and values
    assert error(predicted(model, shape, ids[1:], hidden, COUNT, "k8v8"), wanted) < 0.03


@pytest.mark.parametrize("name", [name if name in QUICK[:1] else pytest.param(name, marks=pytest.mark.slow) for name in MODELS])
def test_a_further_layer_is_converted_and_packed(name: str, tmp_path: Path):
    torch.manual_seed(0)
    both = with_mtp(MODELS[name](), tmp_path / "source")
    ids = tokens(both.model, COUNT + 1)
    hidden = both.hidden(ids[:-1])
    checkpoint = open_checkpoint(both.folder)
    kind = family(checkpoint.config)
    whole = convert(checkpoint, kind, tmp_path / "whole", bits=8, group=32)
    model, shapes, place = family_of(whole)
    # mlx-lm reads the files that are called model, and wants no tensors it does not know there
    assert (whole / "mtp.safetensors").exists()
    assert not any(place.joint in each for each in load_file(whole / "model.safetensors"))
    if name not in ("deepseek_v32", "glm4_moe", "glm4_moe_lite"):
        assert error(mlx_scores(whole, ids), scores(whole, ids)) < 2e-2
    found = predicted(model, shapes[place.like], ids[1:], hidden, COUNT)
    assert error(found, both.predicted(ids[1:], hidden)) < 0.05
    assert family_of(whole, mtp=False)[0].mtp is None
    if name == "qwen3_5":
        return
    packed = pack(open_checkpoint(whole), kind, tmp_path / "packed", lanes=ISA.lanes)
    files = open_checkpoint(packed).experts
    k = experts_per_token(open_checkpoint(packed).config)
    share = share_out(files, k, k * sum(file.stride for file in files.files), "direct")
    streamed = family_of(packed, experts=ExpertStore(files, share))[0]
    assert torch.equal(predicted(streamed, shapes[place.like], ids[1:], hidden, 7), found)
    # without it, its experts are left out, too
    rest = files.without(place.beyond)
    assert len(rest.files) == len(files.files) - 1
    assert family_of(packed, mtp=False, experts=ExpertStore(rest, share))[0].mtp is None


@pytest.mark.parametrize("name", QUICK)
def test_a_further_layer_is_counted_by_itself(name: str, tmp_path: Path):
    torch.manual_seed(0)
    both = with_mtp(MODELS[name](), tmp_path)
    if name == "deepseek_v3":
        # published with copies of what it shares with the model
        file = tmp_path / "model.safetensors"
        copy = {"model.layers.3.embed_tokens.weight": both.model.get_input_embeddings().weight.detach().clone()}
        save_file(load_file(file) | copy, file, metadata={"format": "pt"})
    found = json.loads(call("inspect", tmp_path, "--json").stdout)
    without, further = (nbytes(family_of(tmp_path, mtp)[0]) for mtp in (False, True))
    # a model also holds its rotary frequencies
    assert 0 <= without - found["total"]["memory_nbytes"] <= 1024
    assert further - without == found["mtp"]["memory_nbytes"]
    assert "a layer that predicts further tokens" in call("inspect", tmp_path).stdout
