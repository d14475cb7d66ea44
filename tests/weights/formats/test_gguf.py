"""GGUF files: names, values, row order, config and errors."""

import numpy as np
import pytest
import torch

from auraflux.errors import FormatError
from auraflux.models.gemma3_text import Config as Gemma3
from auraflux.models.llama import Config as Llama
from auraflux.ops import llama3_frequencies, rope_frequencies
from auraflux.ops.simd.isa import ISA
from auraflux.quant import QTensor, grids
from auraflux.quant.gguf_layouts import LAYOUTS, NOT_IN_MLX
from auraflux.weights.formats.checkpoint import open_checkpoint
from auraflux.weights.formats.gguf import GGUFFile
from auraflux.weights.formats.stored import dense
from auraflux.weights.loader import Weights
from tests.models.oracles import error, logits
from tests.ops.quick import some
from tests.weights.formats.gguf_files import (
    HEADS,
    HIDDEN,
    INNER,
    LAYERS,
    VOCAB,
    WIDTH,
    any_blocks,
    decoded,
    llama_tensors,
    quantize_round_trip,
    write_gguf,
)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0", "MXFP4"])
def test_tensors_round_trip(tmp_path, kind: str):
    tensors = llama_tensors(tied=False)
    found = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors, kind))
    assert found.form == "gguf"
    assert sorted(found.sizes()) == sorted(tensors)
    assert found.notes == []
    for name, array in tensors.items():
        stored = found.load(name)
        assert found.shape(name) == tuple(stored.shape) == array.shape
        matrix_of_codes = array.ndim > 1 and kind not in ("F32", "F16", "BF16")
        assert isinstance(stored, QTensor) == matrix_of_codes
        # quantization groups run along rows, so permuting rows does not change the values
        assert torch.equal(dense(stored).float(), quantize_round_trip(array, kind if array.ndim > 1 else "F32"))
        found.release(name)
        assert torch.equal(dense(found.load(name)).float(), dense(stored).float())


def test_config_has_hugging_face_keys(tmp_path):
    config = open_checkpoint(write_gguf(tmp_path / "m.gguf", llama_tensors())).config
    assert config == {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": WIDTH,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 256,
        "vocab_size": VOCAB,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "hidden_act": "silu",
        "eos_token_id": 0,
    }


def test_metadata_are_plain_values(tmp_path):
    metadata = GGUFFile(write_gguf(tmp_path / "m.gguf", llama_tensors())).metadata
    assert metadata["tokenizer.ggml.tokens"][:3] == ["<s>", "é", "ab"]
    assert metadata["tokenizer.ggml.token_type"][:2] == [3, 1]
    assert metadata["llama.block_count"] == 2
    assert metadata["general.architecture"] == "llama"


# other kinds would compile kernels that no other quick test needs
@pytest.mark.parametrize("kind", some(sorted(NOT_IN_MLX), ("IQ4_NL", "IQ4_XS", "Q6_K")))
def test_blocks_without_mlx_format_are_exact(tmp_path, kind: str):
    inner, names = 256, [f"model.layers.{i}.mlp.down_proj.weight" for i in range(LAYERS)]
    wide = {f"model.layers.{i}.mlp.{part}_proj.weight": (inner, HIDDEN) for i in range(LAYERS) for part in ("gate", "up")}
    tensors = llama_tensors(**wide, **dict.fromkeys(names, (HIDDEN, inner)))
    metadata = {"feed_forward_length": inner}
    path = write_gguf(tmp_path / "m.gguf", tensors, metadata=metadata, kinds=dict.fromkeys(names, kind))
    found = open_checkpoint(path)
    assert found.notes == []
    expected = decoded(any_blocks((HIDDEN, inner), kind), kind)
    assert np.array_equal(dense(found.load(names[0])).numpy(), expected)
    plain = write_gguf(tmp_path / "plain.gguf", tensors | dict.fromkeys(names, expected), metadata=metadata)
    ids = list(range(1, 40))
    wanted = logits(plain, ids)
    assert error(logits(path, ids), wanted) < 1e-5
    assert error(logits(path, ids, exact=False), wanted) < 0.02
    weights = Weights(found, lambda name: name)
    weights.layout = "cuda"
    on_gpu = weights.to_kernel_layout(found.load(names[0]))
    assert isinstance(on_gpu, QTensor)
    assert on_gpu.lanes == 1
    assert np.array_equal(dense(on_gpu).numpy(), expected)


@pytest.mark.parametrize("kind", some(["Q4_K", "Q6_K", "Q2_K"], ("Q4_K", "Q6_K")))
def test_super_block_scales_are_expanded_with_enough_memory(tmp_path, monkeypatch, kind: str):
    name, inner = "model.layers.1.mlp.down_proj.weight", 256
    wide = {f"model.layers.{i}.mlp.{part}_proj.weight": (inner, HIDDEN) for i in range(LAYERS) for part in ("gate", "up")}
    tensors = llama_tensors(**wide, **{f"model.layers.{i}.mlp.down_proj.weight": (HIDDEN, inner) for i in range(LAYERS)})
    path = write_gguf(tmp_path / "m.gguf", tensors, metadata={"feed_forward_length": inner}, kinds={name: kind})
    ids, found, layouts = list(range(1, 40)), [], []
    monkeypatch.setattr("auraflux.weights.kernel_layout.LANES_THAT_EXPAND", ISA.lanes)
    for free in (1 << 40, 0):
        monkeypatch.setattr("auraflux.weights.loader.free_nbytes", lambda free=free: free)
        ready = Weights(open_checkpoint(path), lambda each: each).to_kernel_layout(open_checkpoint(path).load(name))
        assert isinstance(ready, QTensor)
        layouts.append(ready)
        found.append(logits(path, ids))
    assert (layouts[0].super_block, layouts[1].kind) == (None, kind.lower())
    assert layouts[1].nbytes < layouts[0].nbytes
    assert torch.equal(*found)


def test_requantized_types_are_noted(tmp_path, monkeypatch):
    # a type that only the package knows
    monkeypatch.delitem(LAYOUTS, "NVFP4")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors = llama_tensors() | {name: np.zeros((HIDDEN, 256), np.float32)}
    found = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors, "Q8_0", kinds={name: "NVFP4"}))
    assert found.notes == [f"GGUF type NVFP4 (1 of {len(tensors)} tensors) is requantized to 8 bits in groups of 64."]
    stored = found.load(name)
    assert isinstance(stored, QTensor)
    assert (stored.bits, stored.group) == (8, 64)


@pytest.mark.parametrize("kind", sorted(map(str.upper, grids.FORMATS)))
def test_grids_take_the_bytes_of_the_file(tmp_path, kind: str):
    name = "model.layers.1.mlp.down_proj.weight"
    tensors = llama_tensors() | {name: np.zeros((HIDDEN, 256), np.float32)}
    found = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors, "Q8_0", kinds={name: kind}))
    assert found.notes == []
    rows, lanes = found.load(name), found.load_interleaved(name, ISA.lanes, True)
    assert isinstance(rows, QTensor)
    assert isinstance(lanes, QTensor)
    assert rows.kind == lanes.kind == kind.lower()
    assert rows.nbytes == lanes.nbytes == found.sizes()[name]
    wanted = torch.from_numpy(decoded(any_blocks((HIDDEN, 256), kind), kind))
    assert torch.equal(rows.dequantize(), wanted)
    assert torch.equal(lanes.dequantize(), wanted)


def test_split_files(tmp_path):
    tensors = llama_tensors()
    names = list(tensors)
    first = write_gguf(tmp_path / "m-00001-of-00002.gguf", {name: tensors[name] for name in names[:5]})
    with pytest.raises(FormatError, match=r"is one of 2 files, and these are missing: m-00002-of-00002\.gguf"):
        open_checkpoint(first)
    write_gguf(tmp_path / "m-00002-of-00002.gguf", {name: tensors[name] for name in names[5:]})
    found = open_checkpoint(first)
    assert sorted(found.sizes()) == sorted(tensors)
    assert torch.equal(found.load(names[-1]), torch.from_numpy(tensors[names[-1]]))


def test_files_split_by_the_gguf_package(tmp_path):
    """Only the first file has metadata; any of them may be opened."""
    tensors = llama_tensors()
    write_gguf(tmp_path / "m.gguf", tensors, most=8)
    parts = sorted(tmp_path.glob("m-*-of-*.gguf"))
    assert len(parts) == -(-len(tensors) // 8)
    for part in (parts[0], parts[-1]):
        found = open_checkpoint(part)
        assert sorted(found.sizes()) == sorted(tensors)
        assert torch.equal(found.load("model.norm.weight"), torch.from_numpy(tensors["model.norm.weight"]))


def experts(count: int) -> dict[str, tuple[int, ...]]:
    name = "model.layers.0.mlp.switch_mlp"
    return {
        f"{name}.gate_proj.weight": (count, 64, HIDDEN),
        f"{name}.up_proj.weight": (count, 64, HIDDEN),
        f"{name}.down_proj.weight": (count, HIDDEN, 64),
        "model.layers.0.mlp.gate.weight": (count, HIDDEN),
        "model.layers.0.self_attn.q_norm.weight": (WIDTH,),
    }


def test_qwen3moe_has_stacked_experts_and_unpermuted_rows(tmp_path):
    tensors = {name: array for name, array in llama_tensors(**experts(5)).items() if ".mlp.gate_proj" not in name}
    tensors = {n: a for n, a in tensors.items() if ".mlp.up_proj" not in n and ".mlp.down_proj" not in n}
    metadata = {"expert_count": 5, "expert_used_count": 2, "expert_feed_forward_length": 64, "attention.key_length": WIDTH}
    found = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors, "Q8_0", "qwen3moe", metadata))
    assert sorted(found.sizes()) == sorted(tensors)
    config = found.config
    assert (config["model_type"], config["num_experts"], config["num_experts_per_tok"]) == ("qwen3_moe", 5, 2)
    for name in ("model.layers.0.mlp.switch_mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight"):
        stored = found.load(name)
        assert isinstance(stored, QTensor)
        assert torch.equal(stored.dequantize(torch.float32), quantize_round_trip(tensors[name], "Q8_0"))


def llama3_factors(factor: float) -> np.ndarray:
    slowed = llama3_frequencies(WIDTH, 500000.0, factor, 1.0, 4.0, 8192)
    return (rope_frequencies(WIDTH, 500000.0) / slowed).numpy()


def test_llama3_scaling_is_inferred_from_factors(tmp_path):
    tensors = llama_tensors() | {"rope_freqs.weight": llama3_factors(32.0)}
    found = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors, metadata={"rope.freq_base": 500000.0}))
    assert found.config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert "rope_freqs.weight" not in found.sizes()


def test_yarn_and_linear_scaling(tmp_path):
    metadata = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    found = open_checkpoint(write_gguf(tmp_path / "m.gguf", llama_tensors(), metadata=metadata))
    assert found.config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    metadata = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
    found = open_checkpoint(write_gguf(tmp_path / "y.gguf", llama_tensors(), metadata=metadata))
    assert found.config["rope_scaling"]["original_max_position_embeddings"] == 64


def gemma_tensors() -> dict[str, np.ndarray]:
    norms = {
        f"model.layers.{i}.{side}_feedforward_layernorm.weight": (HIDDEN,) for i in range(LAYERS) for side in ("pre", "post")
    }
    heads = {f"model.layers.{i}.self_attn.{kind}_norm.weight": (WIDTH,) for i in range(LAYERS) for kind in "qk"}
    return llama_tensors(**norms, **heads)


def test_gemma3_metadata(tmp_path):
    metadata = {"attention.sliding_window": 512, "attention.key_length": WIDTH, "rope.freq_base": 1000000.0}
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    tensors = gemma_tensors()
    found = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors, "Q8_0", "gemma3", metadata | linear))
    assert sorted(found.sizes()) == sorted(tensors)
    for name in ("model.norm.weight", "model.layers.1.self_attn.k_norm.weight"):
        assert np.abs(found.load(name).numpy() - tensors[name]).max() < 1e-6
    config = Gemma3.from_hf(found.config)
    assert (config.window, config.scale, config.tied, config.final_softcap) == (512, WIDTH**-0.5, True, None)
    first = {kind: float(rope.frequencies[1]) for kind, rope in config.rotations.items()}
    assert first == pytest.approx({"sliding_attention": 1e4 ** (-2 / WIDTH), "full_attention": 1e6 ** (-2 / WIDTH) / 8})
    # only the largest model scales queries by something other than the head width
    large = open_checkpoint(
        write_gguf(tmp_path / "l.gguf", tensors, "Q8_0", "gemma3", metadata | {"block_count": 62, "attention.key_length": 64})
    ).config
    assert Gemma3.from_hf(large).scale == (HIDDEN // HEADS) ** -0.5
    assert [kind[:4] for kind in Gemma3.from_hf(large).kinds[:7]] == ["slid"] * 5 + ["full", "slid"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "bert"}, "GGUF architecture 'bert' is not supported. Supported: llama, llama4, qwen2, qwen3"),
        ({"metadata": {"expert_count": 8}}, r"with experts \(Mixtral\) are not supported"),
        ({"metadata": {"rope.dimension_count": 16}}, "rotates 16 of 32 channels of a head"),
        ({"metadata": {"rope.scaling.type": "longrope"}}, "has rope scaling 'longrope'"),
        ({"metadata": {"attention.head_count_kv": [1, 2]}}, r"llama.attention.head_count_kv = \[1, 2\]; an integer"),
    ],
)
def test_unsupported_files_are_refused(tmp_path, options, message: str):
    tensors = llama_tensors() if options.get("architecture") != "bert" else {}
    with pytest.raises(FormatError, match=message):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors, **options))


def test_frequencies_are_divided_by_the_factors_of_the_file(tmp_path):
    factors = np.linspace(1, 3, WIDTH // 2, dtype=np.float32)
    found = open_checkpoint(write_gguf(tmp_path / "m.gguf", llama_tensors() | {"rope_freqs.weight": factors})).config
    for context in (8, 1 << 20):
        rotation = Llama.from_hf(found).rotation.at(context)
        torch.testing.assert_close(rotation.frequencies, rope_frequencies(WIDTH, 10000.0) / torch.from_numpy(factors))
        assert rotation.mscale == 1


@pytest.mark.parametrize("factors", [np.ones(WIDTH // 2 - 1), np.zeros(WIDTH // 2), np.full(WIDTH // 2, np.nan)])
def test_invalid_frequency_factors_are_refused(tmp_path, factors: np.ndarray):
    tensors = llama_tensors() | {"rope_freqs.weight": factors.astype(np.float32)}
    with pytest.raises(FormatError, match=rf"must have {WIDTH // 2} positive factors"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors))


def test_truncated_file_raises_format_error(tmp_path):
    whole = write_gguf(tmp_path / "m.gguf", llama_tensors()).read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(4, 3000, 97), len(whole) // 2, len(whole) - 40]:
        cut.write_bytes(whole[:length])
        with pytest.raises(FormatError, match="cannot be read as GGUF"):
            open_checkpoint(cut)


def test_damaged_file_raises_only_format_error(tmp_path):
    whole = bytearray(write_gguf(tmp_path / "m.gguf", llama_tensors()).read_bytes())
    broken = tmp_path / "broken.gguf"
    rng = np.random.default_rng(0)
    for place in rng.integers(4, 2500, 60):
        damaged = bytearray(whole)
        damaged[place] ^= 0xFF
        broken.write_bytes(damaged)
        try:
            found = open_checkpoint(broken)
            for name in found.sizes():
                found.load(name)
        except FormatError:
            pass


@pytest.mark.parametrize(
    ("content", "said"), [(b"", "is empty"), (b"PK\x03\x04 not a model", "is not a GGUF file: it begins with")]
)
def test_other_file_types_are_refused(tmp_path, content: bytes, said: str):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(FormatError, match=said):
        open_checkpoint(tmp_path / "m.gguf")
