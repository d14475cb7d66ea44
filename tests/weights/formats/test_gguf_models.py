"""Logits of every GGUF architecture compared with transformers."""

import numpy as np
import pytest
import torch

from auraflux.errors import FormatError
from auraflux.models import family
from auraflux.ops import use_backend
from auraflux.weights.formats.checkpoint import open_checkpoint
from auraflux.weights.formats.stored import dense
from tests.models.oracles import error, logits, save, tokens, transformers_logits
from tests.models.test_mtp import family_of, predicted, published, with_mtp
from tests.ops.quick import some
from tests.weights.formats.gguf_files import HEADS, HIDDEN, LAYERS, VOCAB, WIDTH, quantize_round_trip, write_gguf
from tests.weights.formats.gguf_models import (
    METADATA,
    SMALL_GEMMA4_METADATA,
    deepseek_v2,
    gguf_tensors,
    small_gemma4,
    tiny,
    unpacked,
)

# llama.cpp stores it as F32 regardless of the other types
CONVOLUTION = {"model.layers.0.linear_attn.conv1d.weight": "F32"}


@pytest.mark.parametrize("kind", METADATA)
def test_logits_match_transformers(kind: str, tmp_path):
    model = tiny(kind)
    ids = tokens(model, 40)
    save(model, tmp_path / "hf")
    path = write_gguf(tmp_path / "m.gguf", gguf_tensors(model, kind), "F32", kind, METADATA[kind])
    with use_backend("reference"):
        found = logits(path, ids)
    assert error(found, transformers_logits(model, ids)) < 1e-5


@pytest.mark.parametrize("blocks", some(["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"], ("Q4_0", "Q4_1", "Q8_0", "MXFP4")))
def test_quantized_logits_match_transformers(blocks: str, tmp_path):
    model = tiny("llama")
    ids = tokens(model, 40)
    save(model, tmp_path / "hf")
    path = write_gguf(tmp_path / "m.gguf", gguf_tensors(model, "llama"), blocks)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(quantize_round_trip(parameter.numpy(), blocks))
    assert error(logits(path, ids), transformers_logits(model, ids)) < 1e-5


def test_mtp_layers_are_skipped(tmp_path):
    model = tiny("glm4moe")
    save(model, tmp_path / "hf")
    tensors = gguf_tensors(model, "glm4moe")
    tensors["blk.2.nextn.eh_proj.weight"] = np.zeros((HIDDEN, 2 * HIDDEN), np.float32)
    metadata = METADATA["glm4moe"] | {"block_count": LAYERS + 1, "nextn_predict_layers": 1}
    path, ids = write_gguf(tmp_path / "m.gguf", tensors, "F32", "glm4moe", metadata), tokens(model, 20)
    assert open_checkpoint(path).config["num_hidden_layers"] == LAYERS
    assert error(logits(path, ids), transformers_logits(model, ids)) < 1e-5


def test_other_expert_scoring_is_refused(tmp_path):
    tensors = gguf_tensors(tiny("minimax-m2"), "minimax-m2")
    path = write_gguf(tmp_path / "m.gguf", tensors, "F32", "minimax-m2", METADATA["minimax-m2"] | {"expert_gating_func": 1})
    with pytest.raises(FormatError, match="scoring_func 'softmax'; only 'sigmoid'"):
        logits(path, [1, 2])


def test_older_deepseek_files_with_fused_kv_b(tmp_path):
    model = tiny("deepseek2")
    save(model, tmp_path / "hf")
    fused = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items() if "kv_b_proj" in name}
    split = ("embed_q.weight", "unembed_out.weight")
    tensors = {name: array for name, array in gguf_tensors(model, "deepseek2").items() if not name.endswith(split)} | fused
    metadata = {key: value for key, value in METADATA["deepseek2"].items() if not key.endswith("_mla")}
    metadata |= {"attention.key_length": WIDTH + 16, "attention.value_length": 64, "attention.head_count_kv": HEADS}
    path, ids = write_gguf(tmp_path / "m.gguf", tensors, "F32", "deepseek2", metadata), tokens(model, 20)
    with use_backend("reference"):
        assert error(logits(path, ids), transformers_logits(model, ids)) < 1e-5


def test_deepseek_v2_files_route_by_softmax(tmp_path):
    model = deepseek_v2()
    save(model, tmp_path / "hf")
    left_out = "expert_gating_func", "expert_weights_norm"
    metadata = {key: value for key, value in METADATA["deepseek2"].items() if key not in left_out}
    path, ids = (
        write_gguf(tmp_path / "m.gguf", gguf_tensors(model, "deepseek2"), "F32", "deepseek2", metadata),
        tokens(model, 20),
    )
    with use_backend("reference"):
        assert error(logits(path, ids), transformers_logits(model, ids)) < 1e-5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_gating_func": 1}, "norm_topk_prob True; only False"),
        ({"expert_gating_func": 3}, "scoring_func '3'; only 'sigmoid'"),
        ({"attention.temperature_scale": 0.1}, "with attention temperature scaling are not supported"),
        ({"attention.key_length_mla": 16}, "rotates 16 of 16 channels of a head; fewer than all are expected"),
    ],
)
def test_unsupported_deepseek_files_are_refused(tmp_path, changes, message: str):
    tensors = {"model.embed_tokens.weight": np.zeros((VOCAB, HIDDEN), np.float32)}
    path = write_gguf(tmp_path / "m.gguf", tensors, "F32", "deepseek2", METADATA["deepseek2"] | changes)
    with pytest.raises(FormatError, match=message):
        logits(path, [1, 2])


def test_quantized_delta_layers_are_reordered(tmp_path):
    model = tiny("qwen35")
    path = write_gguf(
        tmp_path / "m.gguf", gguf_tensors(model, "qwen35"), "Q8_0", "qwen35", METADATA["qwen35"], kinds=CONVOLUTION
    )
    found = open_checkpoint(path)
    for part in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"):
        name = f"model.layers.0.linear_attn.{part}.weight"
        # heads are as wide as blocks, so permuting heads does not change the quantized values
        assert torch.equal(dense(found.load(name)), quantize_round_trip(model.state_dict()[name].numpy(), "Q8_0"))
    for name in ("model.layers.0.linear_attn.conv1d.weight", "model.layers.0.linear_attn.dt_bias"):
        assert torch.equal(found.load(name), model.state_dict()[name])


def test_older_qwen3next_files(tmp_path):
    """Older files fuse projections as Hugging Face does, and have a one-dimensional shared expert gate."""
    model = tiny("qwen3next")
    save(model, tmp_path / "hf")
    split = ("in_proj_qkv.weight", "in_proj_z.weight")
    tensors = {name: array for name, array in gguf_tensors(model, "qwen3next").items() if not name.endswith(split)}
    name = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    tensors[name] = model.state_dict()[name].numpy()
    tensors |= {name: array[0] for name, array in tensors.items() if name.endswith("shared_expert_gate.weight")}
    path, ids = write_gguf(tmp_path / "m.gguf", tensors, "F32", "qwen3next", METADATA["qwen3next"]), tokens(model, 20)
    with use_backend("reference"):
        assert error(logits(path, ids), transformers_logits(model, ids)) < 1e-5


@pytest.mark.parametrize("kind", ["glm4moe", "qwen3next", "qwen35", "qwen35moe"])
def test_mtp_layers_predict_as_those_of_transformers(kind: str, tmp_path):
    reference = with_mtp(tiny(kind), tmp_path / "hf")
    # the converter numbers Qwen's MTP layers, too
    further = {
        f"model.layers.{LAYERS}.{published(name)}": each.numpy() for name, each in reference.further.layers.state_dict().items()
    }
    tensors = gguf_tensors(reference.model, kind)
    for name, array in further.items():
        tensors |= unpacked(name, array, kind)
    metadata = METADATA[kind] | {"block_count": LAYERS + 1, "nextn_predict_layers": 1}
    path, ids = write_gguf(tmp_path / "m.gguf", tensors, "F32", kind, metadata), tokens(reference.model, 40)
    model, shapes, place = family_of(path)
    hidden = reference.hidden(ids[:-1])
    with use_backend("reference"):
        found = predicted(model, shapes[place.like], ids[1:], hidden, 20)
    assert error(found, reference.predicted(ids[1:], hidden)) < 1e-5
    assert place.is_in(open_checkpoint(path), family(open_checkpoint(path).config).rename)


def test_mtp_layer_of_qwen35_is_skipped(tmp_path):
    model = tiny("qwen35")
    save(model, tmp_path / "hf")
    tensors = gguf_tensors(model, "qwen35")
    last = f"model.layers.{LAYERS - 1}."
    tensors |= {name.replace(last, f"model.layers.{LAYERS}."): tensors[name] for name in list(tensors) if name.startswith(last)}
    tensors[f"blk.{LAYERS}.nextn.eh_proj.weight"] = np.zeros((HIDDEN, 2 * HIDDEN), np.float32)
    metadata = METADATA["qwen35"] | {"block_count": LAYERS + 1, "nextn_predict_layers": 1}
    path, ids = write_gguf(tmp_path / "m.gguf", tensors, "F32", "qwen35", metadata), tokens(model, 20)
    with use_backend("reference"):
        assert error(logits(path, ids), transformers_logits(model, ids)) < 1e-5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ssm.group_count": 4}, "6 value heads, which is not a multiple of 4 key heads"),
        ({"ssm.inner_size": 100}, "values of 100 channels, which is not a multiple of 6 heads"),
        ({"ssm.state_size": 16}, r"in_proj_qkv\.weight has 320 channels; 256 are needed"),
    ],
)
def test_invalid_delta_layers_are_refused(tmp_path, changes, message: str):
    tensors = gguf_tensors(tiny("qwen35"), "qwen35")
    path = write_gguf(tmp_path / "m.gguf", tensors, "F32", "qwen35", METADATA["qwen35"] | changes)
    with pytest.raises(FormatError, match=message):
        open_checkpoint(path).load("model.layers.0.linear_attn.in_proj_qkv.weight")


def test_gemma4_with_per_layer_inputs_and_shared_kv(tmp_path):
    model = small_gemma4()
    save(model, tmp_path / "hf")
    path, ids = (
        write_gguf(tmp_path / "m.gguf", gguf_tensors(model, "gemma4"), "F32", "gemma4", SMALL_GEMMA4_METADATA),
        tokens(model, 40),
    )
    with use_backend("reference"):
        assert error(logits(path, ids), transformers_logits(model, ids)) < 1e-5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention.head_count_kv": [2, 2, 2]}, "gemma4.attention.head_count_kv for 3 layers, and 4 layers"),
        ({"feed_forward_length": [64, 96, 64, 64]}, "has MLPs of several widths"),
        ({"rope.dimension_count_swa": 16}, "rotates 16 of 32 channels of a head"),
        ({"attention.key_length": 32}, r"rotates 64 of 32 channels of a head"),
        (
            {"rope.dimension_count": 32, "attention.key_length": 32},
            r"rope_freqs\.weight in the GGUF file does not match Gemma 4",
        ),
    ],
)
def test_unsupported_gemma4_layers_are_refused(tmp_path, changes, message: str):
    tensors = {"model.embed_tokens.weight": np.zeros((VOCAB, HIDDEN), np.float32)}
    tensors["rope_freqs.weight"] = np.repeat(np.float32([1.0, 1e30]), [8, 24])
    with pytest.raises(FormatError, match=message):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors, "F32", "gemma4", SMALL_GEMMA4_METADATA | changes))


def test_gemma4_with_separate_gate_and_up_is_refused(tmp_path):
    tensors = gguf_tensors(tiny("gemma4"), "gemma4")
    both = {name: tensors.pop(name) for name in list(tensors) if name.endswith("experts.gate_up_proj")}
    for layer, array in enumerate(both.values()):
        gate, up = np.split(array, 2, axis=1)
        tensors |= {f"blk.{layer}.ffn_gate_exps.weight": gate.copy(), f"blk.{layer}.ffn_up_exps.weight": up.copy()}
    with pytest.raises(FormatError, match=r"that the model does not know: .*blk\.0\.ffn_gate_exps\.weight"):
        logits(write_gguf(tmp_path / "m.gguf", tensors, "F32", "gemma4", METADATA["gemma4"]), [1, 2])
