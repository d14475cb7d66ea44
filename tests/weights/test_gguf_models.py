"""GGUF files of every architecture, held to transformers and to llama.cpp."""

import numpy as np
import pytest
import torch

from auraflux.errors import FormatError
from auraflux.ops import use_backend
from auraflux.weights.checkpoint import open_checkpoint
from auraflux.weights.stored import dense
from tests.models.oracles import error, save, scores, tokens, truth
from tests.ops.quick import some
from tests.weights.gguf_files import HEADS, HIDDEN, LAYERS, VOCAB, WIDTH, rounded, write_gguf
from tests.weights.gguf_models import LITTLE_WORDS, WORDS, little, tiny, written

# as llama.cpp keeps it, whatever the type of the others
CONVOLUTION = {"model.layers.0.linear_attn.conv1d.weight": "F32"}


@pytest.mark.parametrize("kind", WORDS)
def test_a_model_says_the_same_as_in_transformers(kind: str, tmp_path):
    model = tiny(kind)
    ids = tokens(model, 40)
    save(model, tmp_path / "hf")
    path = write_gguf(tmp_path / "m.gguf", written(model, kind), "F32", kind, WORDS[kind])
    with use_backend("reference"):
        found = scores(path, ids)
    assert error(found, truth(model, ids)) < 1e-5


@pytest.mark.parametrize("blocks", some(["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"], ("Q4_0", "Q4_1", "Q8_0", "MXFP4")))
def test_blocks_say_what_transformers_says_of_what_they_stand_for(blocks: str, tmp_path):
    model = tiny("llama")
    ids = tokens(model, 40)
    save(model, tmp_path / "hf")
    path = write_gguf(tmp_path / "m.gguf", written(model, "llama"), blocks)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(rounded(parameter.numpy(), blocks))
    assert error(scores(path, ids), truth(model, ids)) < 1e-5


def test_layers_that_predict_further_are_passed_over(tmp_path):
    model = tiny("glm4moe")
    save(model, tmp_path / "hf")
    tensors = written(model, "glm4moe")
    tensors["blk.2.nextn.eh_proj.weight"] = np.zeros((HIDDEN, 2 * HIDDEN), np.float32)
    words = WORDS["glm4moe"] | {"block_count": LAYERS + 1, "nextn_predict_layers": 1}
    path, ids = write_gguf(tmp_path / "m.gguf", tensors, "F32", "glm4moe", words), tokens(model, 20)
    assert open_checkpoint(path).config["num_hidden_layers"] == LAYERS
    assert error(scores(path, ids), truth(model, ids)) < 1e-5


def test_another_scoring_of_experts_is_refused(tmp_path):
    tensors = written(tiny("minimax-m2"), "minimax-m2")
    path = write_gguf(tmp_path / "m.gguf", tensors, "F32", "minimax-m2", WORDS["minimax-m2"] | {"expert_gating_func": 1})
    with pytest.raises(FormatError, match="scoring_func 'softmax'; only 'sigmoid'"):
        scores(path, [1, 2])


def test_deepseek_files_of_before_their_keys_and_values_were_taken_apart(tmp_path):
    model = tiny("deepseek2")
    save(model, tmp_path / "hf")
    kept = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items() if "kv_b_proj" in name}
    apart = ("embed_q.weight", "unembed_out.weight")
    tensors = {name: array for name, array in written(model, "deepseek2").items() if not name.endswith(apart)} | kept
    words = {key: value for key, value in WORDS["deepseek2"].items() if not key.endswith("_mla")}
    words |= {"attention.key_length": WIDTH + 16, "attention.value_length": 64, "attention.head_count_kv": HEADS}
    path, ids = write_gguf(tmp_path / "m.gguf", tensors, "F32", "deepseek2", words), tokens(model, 20)
    with use_backend("reference"):
        assert error(scores(path, ids), truth(model, ids)) < 1e-5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_gating_func": 1}, "scoring_func 'softmax'; only 'sigmoid'"),
        ({"attention.temperature_scale": 0.1}, "whose queries grow with their positions are not supported"),
        ({"attention.key_length_mla": 16}, "rotates 16 of 16 channels of a head; less than all is needed"),
    ],
)
def test_deepseek_files_of_other_bodies_are_refused(tmp_path, changes, message: str):
    tensors = {"model.embed_tokens.weight": np.zeros((VOCAB, HIDDEN), np.float32)}
    path = write_gguf(tmp_path / "m.gguf", tensors, "F32", "deepseek2", WORDS["deepseek2"] | changes)
    with pytest.raises(FormatError, match=message):
        scores(path, [1, 2])


def test_delta_layers_in_blocks_are_put_back_into_their_order(tmp_path):
    model = tiny("qwen35")
    path = write_gguf(tmp_path / "m.gguf", written(model, "qwen35"), "Q8_0", "qwen35", WORDS["qwen35"], kinds=CONVOLUTION)
    found = open_checkpoint(path)
    for part in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"):
        name = f"model.layers.0.linear_attn.{part}.weight"
        # heads are as wide as blocks, so that rounding comes out the same before and after they change places
        assert torch.equal(dense(found.load(name)), rounded(model.state_dict()[name].numpy(), "Q8_0"))
    for name in ("model.layers.0.linear_attn.conv1d.weight", "model.layers.0.linear_attn.dt_bias"):
        assert torch.equal(found.load(name), model.state_dict()[name])


def test_older_files_of_qwen3next(tmp_path):
    """Their projections are as in Hugging Face's, and what weighs the shared expert has one axis."""
    model = tiny("qwen3next")
    save(model, tmp_path / "hf")
    apart = ("in_proj_qkv.weight", "in_proj_z.weight")
    tensors = {name: array for name, array in written(model, "qwen3next").items() if not name.endswith(apart)}
    name = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    tensors[name] = model.state_dict()[name].numpy()
    tensors |= {name: array[0] for name, array in tensors.items() if name.endswith("shared_expert_gate.weight")}
    path, ids = write_gguf(tmp_path / "m.gguf", tensors, "F32", "qwen3next", WORDS["qwen3next"]), tokens(model, 20)
    with use_backend("reference"):
        assert error(scores(path, ids), truth(model, ids)) < 1e-5


def test_the_layer_of_qwen35_that_predicts_further_is_passed_over(tmp_path):
    model = tiny("qwen35")
    save(model, tmp_path / "hf")
    tensors = written(model, "qwen35")
    last = f"model.layers.{LAYERS - 1}."
    tensors |= {name.replace(last, f"model.layers.{LAYERS}."): tensors[name] for name in list(tensors) if name.startswith(last)}
    tensors[f"blk.{LAYERS}.nextn.eh_proj.weight"] = np.zeros((HIDDEN, 2 * HIDDEN), np.float32)
    words = WORDS["qwen35"] | {"block_count": LAYERS + 1, "nextn_predict_layers": 1}
    path, ids = write_gguf(tmp_path / "m.gguf", tensors, "F32", "qwen35", words), tokens(model, 20)
    with use_backend("reference"):
        assert error(scores(path, ids), truth(model, ids)) < 1e-5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ssm.group_count": 4}, "6 value heads, which 4 key heads cannot share"),
        ({"ssm.inner_size": 100}, "values of 100 channels, which 6 heads cannot share"),
        ({"ssm.state_size": 16}, r"in_proj_qkv\.weight has 320 channels; 256 are needed"),
    ],
)
def test_delta_layers_of_other_sizes_are_refused(tmp_path, changes, message: str):
    tensors = written(tiny("qwen35"), "qwen35")
    path = write_gguf(tmp_path / "m.gguf", tensors, "F32", "qwen35", WORDS["qwen35"] | changes)
    with pytest.raises(FormatError, match=message):
        open_checkpoint(path).load("model.layers.0.linear_attn.in_proj_qkv.weight")


def test_gemma4_whose_layers_are_fed_and_read_others(tmp_path):
    model = little()
    save(model, tmp_path / "hf")
    path, ids = write_gguf(tmp_path / "m.gguf", written(model, "gemma4"), "F32", "gemma4", LITTLE_WORDS), tokens(model, 40)
    with use_backend("reference"):
        assert error(scores(path, ids), truth(model, ids)) < 1e-5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention.head_count_kv": [2, 2, 2]}, "gemma4.attention.head_count_kv for 3 layers, and 4 layers"),
        ({"feed_forward_length": [64, 96, 64, 64]}, "has MLPs of several widths"),
        ({"rope.dimension_count_swa": 16}, "rotates 16 of 32 channels of a head"),
        ({"attention.key_length": 32}, r"rotates 64 of 32 channels of a head"),
        ({"rope.dimension_count": 32, "attention.key_length": 32}, r"rope_freqs\.weight in the GGUF file is not what Gemma 4"),
    ],
)
def test_gemma4_of_other_layers_is_refused(tmp_path, changes, message: str):
    tensors = {"model.embed_tokens.weight": np.zeros((VOCAB, HIDDEN), np.float32)}
    tensors["rope_freqs.weight"] = np.repeat(np.float32([1.0, 1e30]), [8, 24])
    with pytest.raises(FormatError, match=message):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors, "F32", "gemma4", LITTLE_WORDS | changes))


def test_gemma4_with_gate_and_up_apart_is_refused(tmp_path):
    tensors = written(tiny("gemma4"), "gemma4")
    both = {name: tensors.pop(name) for name in list(tensors) if name.endswith("experts.gate_up_proj")}
    for layer, array in enumerate(both.values()):
        gate, up = np.split(array, 2, axis=1)
        tensors |= {f"blk.{layer}.ffn_gate_exps.weight": gate.copy(), f"blk.{layer}.ffn_up_exps.weight": up.copy()}
    with pytest.raises(FormatError, match=r"that the model does not know: .*blk\.0\.ffn_gate_exps\.weight"):
        scores(write_gguf(tmp_path / "m.gguf", tensors, "F32", "gemma4", WORDS["gemma4"]), [1, 2])
