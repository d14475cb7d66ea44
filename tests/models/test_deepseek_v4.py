"""DeepSeek V4 with compressed attention against transformers."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from auraflux.cache import CacheSettings
from auraflux.engine.engine import Engine
from auraflux.errors import FormatError, SettingsError
from auraflux.models import family
from auraflux.models.deepseek_v4 import Config
from auraflux.ops.simd.isa import ISA
from auraflux.quant import QTensor, mxfp4
from auraflux.weights.convert.mlx_folder import convert
from auraflux.weights.convert.pack import pack
from auraflux.weights.formats.checkpoint import open_checkpoint
from auraflux.weights.loader import Weights
from tests.models.oracles import error, logits, prefill, save, tokens, transformers_logits
from tests.models.test_deepseek_v3 import rewrite
from tests.weights.formats.quantized_folders import fp8

WINDOW, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
SMALL: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 96,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "head_dim": 48,
    "q_lora_rank": 40,
    "partial_rotary_factor": 1 / 3,
    "num_experts_per_tok": 2,
    "n_routed_experts": 7,
    "layer_types": [HEAVY, SPARSE, WINDOW, SPARSE],
    "compress_rates": {SPARSE: 4, HEAVY: 32},
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    "swiglu_limit": 0.5,
    "sliding_window": 20,
    "o_groups": 3,
    "o_lora_rank": 24,
    "index_n_heads": 12,
    "index_head_dim": 32,
    "index_topk": 9,
    "max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}


def deepseek(**changes: Any) -> DeepseekV4ForCausalLM:
    """Return a model with wide indexer margins and random hash-routed experts, so that every part affects the logits."""
    torch.manual_seed(0)
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**{**SMALL, **changes}))
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "indexer" in name and name.endswith("_proj.weight"):
                tensor.normal_(0, 0.3)
            elif name.endswith(("position_bias", "_hc.base", "hc_base", "sinks")):
                tensor.normal_()
            elif name.endswith(("_hc.fn", "hc_fn", "gate.weight")):
                tensor.normal_(0, 0.1)
            elif name.endswith("e_score_correction_bias"):
                tensor.normal_(0, 0.3)
            elif name.endswith("tid2eid"):
                tensor.copy_(torch.rand(len(tensor), model.config.n_routed_experts).argsort(1)[:, : tensor.shape[1]])
    return model


MODELS: dict[str, Any] = {
    "deepseek_v4": deepseek,
    "yarn": lambda: deepseek(rope_parameters=YARN),
    "long-entries": lambda: deepseek(compress_rates={SPARSE: 8, HEAVY: 128}),
    "odd": lambda: deepseek(hc_mult=3, o_groups=2, index_n_heads=11, index_head_dim=20, head_dim=30, partial_rotary_factor=0.2),
    "one-entry": lambda: deepseek(index_topk=1),
    "all-entries": lambda: deepseek(index_topk=500),
    "sigmoid": lambda: deepseek(scoring_func="sigmoid", tie_word_embeddings=True, mlp_layer_types=["moe"] * 4),
}
QUICK = {"deepseek_v4"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in MODELS])
def test_logits_match_transformers(name: str, tmp_path: Path):
    model = MODELS[name]()
    save(model, tmp_path)
    ids = tokens(model)
    expected = transformers_logits(model, ids)
    for chunk in (512, 37, 1):
        assert error(logits(tmp_path, ids, chunk=chunk), expected) < 2e-4


def engine_of(folder: Path, **options: Any) -> Engine:
    checkpoint = open_checkpoint(folder)
    module = family(checkpoint.config)
    config = module.Config.from_hf(checkpoint.config)
    weights = Weights(checkpoint, module.rename)
    model = module.Model(config, weights)
    weights.check_loaded()
    return Engine(model, module.make_caches(config), CacheSettings("none"), context=256, sequences=4, exact=True, **options)


def test_decode_is_exact_in_a_batch_after_fork_and_truncate(tmp_path: Path):
    model = deepseek()
    engine, ids = engine_of(save(model, tmp_path)), tokens(model, 90)
    expected = engine.all_logits(engine.cache.open(), ids)
    long, short = engine.cache.open(), engine.cache.open()
    prefill(engine, long, ids[:61])
    prefill(engine, short, ids[:5])
    batch = engine.cache.batch([long, short])
    for at, token in enumerate(ids[61:75]):
        found = engine.decode(batch, [token, ids[5 + at]])
        assert torch.equal(found, expected[[61 + at, 5 + at]])
    other = long.fork()
    engine.all_logits(other, ids[::-1][:9])
    assert torch.equal(engine.all_logits(long, ids[75:]), expected[75:])
    recomputed = other.truncate(70)
    assert torch.equal(engine.all_logits(other, ids[70 - recomputed :])[recomputed:], expected[70:])


def test_selected_entries_and_hash_experts_change_the_logits(tmp_path: Path):
    """Check that more selected entries and other hash experts change the logits, entries from the first affected token on."""
    model = deepseek()
    ids = tokens(model, 60)
    save(model, tmp_path)
    expected = logits(tmp_path, ids)
    rewrite(tmp_path, load_file(tmp_path / "model.safetensors"), index_topk=500)
    # the tenth entry is complete at the 40th token
    found = logits(tmp_path, ids)
    assert torch.equal(found[:39], expected[:39])
    assert error(found[39:], expected[39:]) > 0.01
    files = load_file(tmp_path / "model.safetensors")
    name = next(name for name in files if name.endswith("tid2eid"))
    rewrite(tmp_path, {**files, name: (files[name] + 1) % 7}, index_topk=9)
    assert error(logits(tmp_path, ids), expected) > 0.01


def test_experts_are_packed_and_converted(tmp_path: Path):
    model = deepseek()
    ids = tokens(model, 40)
    checkpoint = open_checkpoint(save(model, tmp_path / "hf"))
    module = family(checkpoint.config)
    rounded = {"bits": 8, "group": 32}
    expected = logits(tmp_path / "hf", ids, **rounded)
    assert error(expected, transformers_logits(model, ids)) < 0.05
    converted = convert(checkpoint, module, tmp_path / "mlx", **rounded)
    assert error(logits(converted, ids), expected) < 1e-5
    packed = pack(open_checkpoint(converted), module, tmp_path / "packed", lanes=ISA.lanes)
    assert error(logits(packed, ids), expected) < 1e-5


def test_quantized_kv_cache_is_refused(tmp_path: Path):
    model = deepseek()
    save(model, tmp_path)
    with pytest.raises(SettingsError, match="in layer 0: compressed attention cannot be quantized; use kv='none'"):
        logits(tmp_path, [1, 2], kv="k8v8")


def test_hash_table_with_unknown_experts_is_refused(tmp_path: Path):
    save(deepseek(), tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    name = next(name for name in files if name.endswith("tid2eid"))
    rewrite(tmp_path, {**files, name: files[name] + 5})
    with pytest.raises(FormatError, match=r"tid2eid must hold integers from 0 to 6"):
        logits(tmp_path, [1, 2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index_topk": None}, "has no 'index_topk'"),
        ({"o_groups": 4}, "has o_groups 4, into which 6 heads do not divide"),
        ({"index_head_dim": 8}, "rotates 16 channels of heads of 48 and of index_head_dim 8"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax'; only 'sqrtsoftplus' or 'sigmoid'"),
        ({"n_shared_experts": 2}, "n_shared_experts 2; only 1"),
        ({"layer_types": [WINDOW] * 3}, "lists 3 layer_types for num_hidden_layers 4"),
        ({"layer_types": None, "compress_ratios": [4, 128]}, "has 2 compress_ratios for 4 layers"),
        ({"layer_types": None, "compress_ratios": [4, 128, 0, 7]}, "0, 4 and 128 are supported"),
    ],
)
def test_unsupported_configs_are_refused(change: dict[str, Any], message: str):
    with pytest.raises(FormatError, match=message):
        Config.from_hf({**DeepseekV4Config(**SMALL).to_dict(), **change})


def test_compress_rates_that_do_not_divide_a_page_are_refused(tmp_path: Path):
    save(deepseek(compress_rates={SPARSE: 3, HEAVY: 32}), tmp_path)
    with pytest.raises(SettingsError, match="entries of 3 tokens do not fit pages of 64"):
        logits(tmp_path, [1, 2])


def test_published_config_keys_are_equivalent():
    new = DeepseekV4Config(**{**SMALL, "compress_rates": None, "rope_parameters": dict(YARN)}).to_dict()
    gone = ("layer_types", "mlp_layer_types", "compress_rates", "rope_parameters", "partial_rotary_factor")
    old = {key: value for key, value in new.items() if key not in gone}
    old |= {"compress_ratios": [128, 4, 0, 4, 0], "num_hash_layers": 1, "qk_rope_head_dim": 16, "rope_scaling": YARN}
    mine, theirs = Config.from_hf(old), Config.from_hf(new)
    for name in ("kinds", "rates", "hashed", "widths", "index", "hyper", "mixture"):
        assert getattr(mine, name) == getattr(theirs, name)
    for one, other in zip((*mine.rotations, mine.index_rotation), (*theirs.rotations, theirs.index_rotation), strict=True):
        assert torch.equal(one.frequencies, other.frequencies)
        assert one.mscale == other.mscale == 1


def as_released(folder: Path, model: Any) -> None:
    """Rewrite a folder as DeepSeek releases it, FP8 and four-bit experts with scales called `scale`; round the model alike."""
    tensors, rounded = load_file(folder / "model.safetensors"), {}
    for name in list(tensors):
        kind = re.search(r"\.(experts\.\d+\.w[123]|shared_experts\.w[123]|wq_a|wq_b|wkv|wo_b)\.weight$", name)
        if kind is None or "indexer" in name:
            continue
        weight, stem = tensors.pop(name), name.removesuffix("weight")
        if kind[1].startswith("experts"):
            packed, scales = mxfp4.encode(weight)
            tensors[name] = packed.view(torch.int8)
            tensors[f"{stem}scale"] = scales.view(torch.float8_e8m0fnu)
            rounded[name] = QTensor(packed, scales, None, 4, 32, tuple(weight.shape)).dequantize(torch.float32)
        else:
            tensors[name], tensors[f"{stem}scale"], rounded[name] = fp8(weight, (128, 128), torch.float8_e8m0fnu)
    assert {name.rsplit(".", 2)[1] for name in rounded} == {"w1", "w2", "w3", "wq_a", "wq_b", "wkv", "wo_b"}
    plain = load_file(folder / "model.safetensors") | rounded
    rewrite(folder, plain)
    model.load_state_dict(DeepseekV4ForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict())
    method = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
        "expert_dtype": "fp4",
    }
    rewrite(folder, tensors, quantization_config=method)


def test_released_files_match_transformers(tmp_path: Path):
    model = deepseek(q_lora_rank=64, o_lora_rank=32)
    as_released(save(model, tmp_path), model)
    formats = {each.label for each in map(open_checkpoint(tmp_path).stored_format, open_checkpoint(tmp_path).sizes()) if each}
    assert formats == {"MXFP4", "FP8, blocks of 128 x 128"}
    ids = tokens(model)
    assert error(logits(tmp_path, ids), transformers_logits(model, ids)) < 1e-5
