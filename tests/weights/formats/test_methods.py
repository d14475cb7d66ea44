"""AWQ, GPTQ, compressed-tensors, ModelOpt and FP8 folders: bit-exact weights, model logits and errors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.models import family
from auraflux.ops import embed, exact, linear
from auraflux.ops.simd.isa import ISA
from auraflux.quant import QTensor
from auraflux.quant.fp8 import from_blocks
from auraflux.weights.convert.mlx_folder import convert
from auraflux.weights.convert.pack import pack
from auraflux.weights.formats.checkpoint import open_checkpoint
from auraflux.weights.formats.folder import Folder
from auraflux.weights.formats.methods import Header, nvfp4
from auraflux.weights.formats.stored import dense
from auraflux.weights.loader import Weights
from tests.models.oracles import error, logits, save, tokens, transformers_logits
from tests.ops.quick import some
from tests.weights.formats.quantized_folders import (
    E2M1,
    FOLDERS,
    Codes,
    ct_config,
    draw,
    gptq,
    gptq_folder,
    nvfp4_expected,
    packed,
    rewrite,
)
from tests.weights.formats.quantized_folders import nvfp4 as some_nvfp4

F16, BF16 = torch.float16, torch.bfloat16
LLAMA = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA |= {"num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 256}
MIXTURE = {**LLAMA, "head_dim": 32, "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}


def make_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**LLAMA))


def make_mixture() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**MIXTURE))


@pytest.fixture(scope="session")
def llama(tmp_path_factory) -> Path:
    return save(make_llama(), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def mixture(tmp_path_factory) -> Path:
    return save(make_mixture(), tmp_path_factory.mktemp("mixture"))


def plain(folder: Path, target: Path, expected: dict[str, Tensor]) -> Path:
    """Write the expected weights as a float32 folder."""
    target.mkdir()
    save_file(
        {name: weight.float().contiguous() for name, weight in expected.items()}, target / "model.safetensors", {"format": "pt"}
    )
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    return target


@pytest.mark.parametrize("kind", FOLDERS)
def test_weights_are_bit_exact(kind: str, llama: Path, tmp_path: Path):
    expected = rewrite(llama, tmp_path / "q", *FOLDERS[kind])
    checkpoint = open_checkpoint(tmp_path / "q")
    assert set(checkpoint.sizes()) == set(expected)
    for name, wanted in expected.items():
        found = checkpoint.load(name)
        assert tuple(found.shape) == checkpoint.shape(name) == tuple(wanted.shape)
        assert torch.equal(dense(found).double(), wanted.double()), name


@pytest.mark.parametrize(
    ("kind", "group", "dtype"),
    [
        ("awq", 32, torch.float32),
        ("awq-rows", 64, torch.float32),
        ("gptq-4", 64, F16),
        ("gptq-8", 32, F16),
        ("ct-4", 64, BF16),
        ("ct-4-zeros", 32, torch.float32),
        ("ct-int8", 64, BF16),
        ("ct-w4a8", 64, BF16),
        ("fp8", 64, torch.float32),
        ("ct-fp8-rows", 64, torch.float32),
        ("nvfp4", 16, torch.float32),
        ("ct-nvfp4", 16, torch.float32),
        ("modelopt-fp8", 64, torch.float32),
    ],
)
def test_weights_stay_quantized(kind: str, group: int, dtype: torch.dtype, llama: Path, tmp_path: Path):
    rewrite(llama, tmp_path / "q", *FOLDERS[kind])
    checkpoint = open_checkpoint(tmp_path / "q")
    assert isinstance(checkpoint, Folder)
    name = "model.layers.0.mlp.down_proj.weight"
    found, stored_format = checkpoint.load(name), checkpoint.stored_format(name)
    assert isinstance(found, QTensor)
    assert (found.group, found.scales.dtype) == (group, dtype)
    assert stored_format is not None
    assert stored_format.bits == found.nbytes * 8 / (128 * 192)


MODELS = ["awq", "gptq-4", "gptq-8-zeros-rows", "gptq-act-order", "ct-4-zeros", "ct-int8", "fp8", "ct-fp8-rows", "nvfp4"]


# other kinds would compile kernels of their own; the test above checks all weights exactly
@pytest.mark.parametrize("kind", some(MODELS, set(MODELS) - {"gptq-4", "gptq-8-zeros-rows", "ct-int8"}))
@pytest.mark.parametrize("model", ["llama", "mixture"])
def test_logits_match_transformers(kind: str, model: str, request, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    source = request.getfixturevalue(model)
    expected = rewrite(source, tmp_path / "q", *FOLDERS[kind])
    other = AutoModelForCausalLM.from_pretrained(plain(source, tmp_path / "plain", expected), dtype=torch.float32)
    ids = tokens(other, 40)
    wanted = transformers_logits(other, ids)
    assert error(logits(tmp_path / "q", ids), wanted) < 1e-5
    assert error(logits(tmp_path / "q", ids, chunk=1), wanted) < 1e-5


@pytest.mark.parametrize(
    "kind", ["ct-4", "ct-4-zeros", "ct-8", "ct-int8-zeros", "ct-fp8-rows", "ct-fp8-blocks", "ct-mxfp4", "ct-nvfp4"]
)
def test_weights_match_compressed_tensors(kind: str, llama: Path, tmp_path: Path):
    pytest.importorskip("compressed_tensors", reason="the package compressed-tensors is not installed")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    rewrite(llama, tmp_path / "q", *FOLDERS[kind])
    config, checkpoint = FOLDERS[kind][0], open_checkpoint(tmp_path / "q")
    scheme = QuantizationScheme(**config["config_groups"]["group_0"])
    files, module = load_file(tmp_path / "q" / "model.safetensors"), "model.layers.1.self_attn.k_proj."
    parts = {name.removeprefix(module): tensor for name, tensor in files.items() if name.startswith(module)}
    theirs = BaseCompressor.load_from_registry(config["format"]).decompress(parts, scheme)["weight"]
    mine = dense(checkpoint.load(f"{module}weight"))
    # compressed-tensors multiplies in the scales' dtype, which rounds the product once
    assert torch.equal(mine.to(theirs.dtype), theirs)


@pytest.mark.parametrize("kind", some(["ct-4", "ct-8-zeros", "fp8-bf16-scales", "fp8-powers"], ("ct-4", "fp8-powers")))
def test_logits_match_transformers_readers(kind: str, llama: Path, tmp_path: Path):
    """Compare with transformers' readers of such folders."""
    for needed in ("accelerate", "compressed_tensors"):
        pytest.importorskip(needed, reason=f"transformers reads such folders with {needed}, which is not installed")
    from transformers import AutoModelForCausalLM

    rewrite(llama, tmp_path / "q", *FOLDERS[kind])
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.float32)
    ids = tokens(other, 40)
    assert error(logits(tmp_path / "q", ids), transformers_logits(other, ids)) < 1e-5


@pytest.mark.parametrize("kind", ["awq", "gptq-4", "ct-8-zeros"])
def test_convert_preserves_codes(kind: str, llama: Path, tmp_path: Path):
    expected = rewrite(llama, tmp_path / "q", *FOLDERS[kind])
    checkpoint = open_checkpoint(tmp_path / "q")
    target = convert(checkpoint, family(checkpoint.config), tmp_path / "mlx", bits=8, group=32)
    written = open_checkpoint(target)
    assert written.form == "mlx"
    for name in (name for name, weight in expected.items() if ".layers." in name and weight.dim() > 1):
        assert torch.equal(dense(written.load(name)).double(), expected[name])


@pytest.mark.parametrize("kind", ["awq", "gptq-8", "ct-4", "fp8", "nvfp4"])
def test_packed_experts_match(kind: str, mixture: Path, tmp_path: Path):
    rewrite(mixture, tmp_path / "q", *FOLDERS[kind])
    checkpoint = open_checkpoint(tmp_path / "q")
    target = pack(checkpoint, family(checkpoint.config), tmp_path / "packed", lanes=ISA.lanes)
    ids = list(range(1, 30))
    assert error(logits(target, ids), logits(tmp_path / "q", ids)) < 1e-6


@pytest.mark.parametrize("kind", ["fp8", "nvfp4"])
def test_packed_codes_for_a_gpu_match(kind: str, mixture: Path, tmp_path: Path):
    expected = rewrite(mixture, tmp_path / "q", *FOLDERS[kind])
    checkpoint, name = open_checkpoint(tmp_path / "q"), "model.layers.0.self_attn.o_proj.weight"
    weights = Weights(checkpoint, lambda name: name)
    weights.layout = "cuda"
    found = weights.to_kernel_layout(checkpoint.load(name))
    assert isinstance(found, QTensor)
    assert (found.kind, found.lanes) == (kind, 1)
    assert torch.equal(dense(found).double(), expected[name].double())
    packed = pack(checkpoint, family(checkpoint.config), tmp_path / "gpu", lanes=1)
    ids = list(range(1, 20))
    assert error(logits(packed, ids), logits(tmp_path / "q", ids)) < 1e-6


def test_convert_requantizes_nvfp4(llama: Path, tmp_path: Path):
    expected = rewrite(llama, tmp_path / "q", *FOLDERS["nvfp4"])
    checkpoint, name = open_checkpoint(tmp_path / "q"), "model.layers.0.self_attn.o_proj.weight"
    found = open_checkpoint(convert(checkpoint, family(checkpoint.config), tmp_path / "mlx", bits=8, group=32)).load(name)
    assert isinstance(found, QTensor)
    assert (found.kind, found.bits) == ("affine", 8)
    assert 1e-4 < error(dense(found), expected[name]) < 1e-2


def test_modelopt_config_in_a_separate_file(llama: Path, tmp_path: Path):
    config, make = FOLDERS["nvfp4"]
    expected = rewrite(llama, tmp_path / "q", config, make)
    found = json.loads((tmp_path / "q" / "config.json").read_text())
    (tmp_path / "q" / "config.json").write_text(json.dumps({**found, "quantization_config": None}))
    modelopt_config = tmp_path / "q" / "hf_quant_config.json"
    modelopt_config.write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}})
    )
    checkpoint = open_checkpoint(tmp_path / "q")
    assert modelopt_config in checkpoint.files()
    assert all(torch.equal(dense(checkpoint.load(name)).double(), weight.double()) for name, weight in expected.items())
    modelopt_config.write_text(json.dumps({"quantization": {"quant_algo": 7}}))
    with pytest.raises(FormatError, match="has quant_algo = 7"):
        open_checkpoint(tmp_path / "q")


def test_modelopt_fused_experts_and_kv_scales(tmp_path: Path):
    from tests.models.test_qwen3_5_moe import qwen3_5_moe

    source = save(qwen3_5_moe(), tmp_path / "hf")
    files = load_file(source / "model.safetensors")
    make, fused = FOLDERS["nvfp4"][1], {}
    expected = dict(files)
    for name in [name for name in files if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        made = [make(matrix, number) for number, matrix in enumerate(files[name])]
        parts = {part: torch.stack([parts[part] for parts, _ in made]) for part in made[0][0]}
        expected[name] = torch.stack([weight for _, weight in made])
        files[name] = parts.pop("weight")
        fused |= {f"{name}_{part}": tensor for part, tensor in parts.items()}
    scale = next(name for name in files if name.endswith("self_attn.k_proj.weight")).removesuffix("weight") + "k_scale"
    target = tmp_path / "q"
    target.mkdir()
    save_file(files | fused | {scale: torch.tensor(1.0)}, target / "model.safetensors", {"format": "pt"})
    found = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**found, "quantization_config": FOLDERS["nvfp4"][0]}))
    checkpoint = open_checkpoint(target)
    assert set(checkpoint.sizes()) == set(expected)
    assert all(torch.equal(dense(checkpoint.load(name)).double(), weight.double()) for name, weight in expected.items())
    ids = list(range(1, 30))
    assert error(logits(target, ids), logits(plain(source, tmp_path / "plain", expected), ids)) < 1e-5


def test_all_nvfp4_scales_and_codes():
    """Check all 254 finite scales with all 16 codes, times factors of every size, in each kernel layout."""
    numbers = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
    scales = torch.nn.functional.pad(numbers, (0, 2)).view(torch.float8_e4m3fn).repeat(ISA.lanes, 1)
    nibbles = torch.arange(16, dtype=torch.uint8).repeat(ISA.lanes, 256)
    octets = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
    for factor in (1.0, 0.0113, 3e-30, 1e-40, 1e35, 0.0):
        wide = torch.from_numpy((scales.double().numpy() * np.float64(np.float32(factor))).astype(np.float32))
        wanted = torch.from_numpy((E2M1[nibbles] * np.repeat(wide.numpy().astype(np.float64), 16, 1)).astype(np.float32))
        made = nvfp4.load(octets, scales, torch.tensor(factor))
        assert isinstance(made, QTensor)
        assert torch.equal(made.dequantize().view(torch.int32), wanted.view(torch.int32))
        assert torch.equal(embed(torch.arange(ISA.lanes), made.interleave(ISA.lanes)), wanted)


@pytest.mark.parametrize("width", [48, 64])
def test_nvfp4_of_odd_widths_is_stored_as_float32(width: int):
    octets, scales, levels = some_nvfp4((100, width), 0)
    made = nvfp4.load(octets, scales, torch.ones(()))
    assert isinstance(made, QTensor) == (width == 64)
    assert torch.equal(dense(made), nvfp4_expected(levels, scales.float()))
    headers = {"w": Header(tuple(octets.shape), "U8"), "s": Header(tuple(scales.shape), "F8_E4M3"), "f": Header((), "F32")}
    stored_format = nvfp4.plan(headers, nvfp4.Names("w", "s", "f"))
    assert (stored_format.shape, stored_format.bits) == (tuple(made.shape), 6 if width == 64 else 32)


def test_mlx_nvfp4_without_a_factor(tmp_path: Path):
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
    config = {"model_type": "llama", "quantization": {"bits": 4, "group_size": 16, "mode": "nvfp4"}}
    codes, scales = mx.quantize(mx.random.normal((40, 96)), group_size=16, bits=4, mode="nvfp4")
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"a.weight": codes, "a.scales": scales})
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = open_checkpoint(tmp_path).load("a.weight")
    assert isinstance(found, QTensor)
    assert found.kind == "nvfp4"
    theirs = np.array(mx.dequantize(codes, scales, None, 16, 4, "nvfp4").astype(mx.float32))
    assert np.array_equal(dense(found).numpy(), theirs)


def test_convert_requantizes_fp8(llama: Path, tmp_path: Path):
    expected = rewrite(llama, tmp_path / "q", *FOLDERS["fp8"])
    checkpoint = open_checkpoint(tmp_path / "q")
    written = open_checkpoint(convert(checkpoint, family(checkpoint.config), tmp_path / "mlx", bits=8, group=32))
    name = "model.layers.0.mlp.up_proj.weight"
    found = written.load(name)
    assert isinstance(found, QTensor)
    assert (found.kind, found.bits, found.scales.dtype) == ("affine", 8, BF16)
    assert 1e-4 < error(dense(found), expected[name]) < 1e-2


def test_all_fp8_codes():
    """Check all 254 finite codes, including subnormals and both zeros, in each kernel layout."""
    octets = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8).repeat(1, 2)
    codes = torch.nn.functional.pad(octets, (0, 4)).view(torch.float8_e4m3fn).repeat(ISA.lanes, 1)
    scales = torch.logspace(-30, 30, ISA.lanes, 2).view(-1, 1) * 1.1
    made = from_blocks(codes, scales, (1, 512))
    assert isinstance(made, QTensor)
    wanted = codes.float() * scales
    assert torch.equal(made.dequantize(), wanted)
    weight = made.interleave(ISA.lanes)
    for count in (1, 4, 32):
        # one input at a time, so nothing is summed
        x = torch.eye(512)[37 : 37 + count]
        with exact():
            assert torch.equal(linear(x, weight), wanted.t()[37 : 37 + count])
    assert torch.equal(embed(torch.arange(ISA.lanes), weight), wanted)


def test_deepseek_fp8(tmp_path: Path):
    from tests.models.test_deepseek_v3 import deepseek

    model = deepseek()
    source = save(model, tmp_path / "hf")
    expected = rewrite(source, tmp_path / "q", *FOLDERS["fp8"])
    other = type(model).from_pretrained(plain(source, tmp_path / "plain", expected), dtype=torch.float32)
    ids = tokens(other, 20)
    assert error(logits(tmp_path / "q", ids), transformers_logits(other, ids)) < 1e-5


def test_fp8_matches_transformers(llama: Path, tmp_path: Path):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    for kind in ("fp8-bf16-scales", "fp8-powers"):
        rewrite(llama, tmp_path / kind, *FOLDERS[kind])
        files = load_file(tmp_path / kind / "model.safetensors")
        name = "model.layers.1.self_attn.q_proj.weight"
        theirs = Fp8Dequantize(None)._dequantize_one(files[name], files[f"{name}_scale_inv"], torch.float32)
        assert torch.equal(dense(open_checkpoint(tmp_path / kind).load(name)), theirs)


def test_act_order_experts_need_quantize(mixture: Path, tmp_path: Path):
    rewrite(mixture, tmp_path / "q", *FOLDERS["gptq-act-order"])
    checkpoint = open_checkpoint(tmp_path / "q")
    with pytest.raises(FormatError, match=r"not quantized: .* is float32\. Give --quantize BITS"):
        pack(checkpoint, family(checkpoint.config), tmp_path / "packed", lanes=1)


def test_notes_describe_precision(llama: Path, tmp_path: Path):
    for kind, notes in {
        "awq": ["AWQ: 14 weights are bit-exact: scale * (code - zero)."],
        "gptq-16": ["GPTQ: 14 weights are exact, but stored as float32: 4 bits in groups of 16 which no kernel supports."],
        "nvfp4": ["ModelOpt: 14 weights are bit-exact: level * scale", "Activations are not quantized"],
        "modelopt-fp8": ["bit-exact", "Activations are not", "not quantized to FP8 as in the config"],
        "ct-int8": ["bit-exact", "quantizes activations, which is not supported"],
    }.items():
        rewrite(llama, tmp_path / kind, *FOLDERS[kind])
        found = open_checkpoint(tmp_path / kind).notes
        assert len(found) == len(notes)
        assert all(want in have for want, have in zip(notes, found, strict=True))


def test_mixed_formats_are_inferred_from_tensors(llama: Path, tmp_path: Path):
    """Mix 8-bit and 4-bit layers with a dense one; the format is inferred from a weight's tensors."""
    four, eight = FOLDERS["ct-4"], FOLDERS["ct-8"]

    def make(weight: Tensor, number: int) -> tuple[dict[str, Tensor], Tensor]:
        return ({"weight": weight}, weight) if number == 5 else (four if number % 2 else eight)[1](weight, number)

    config = ct_config(4, 64, True)
    config["config_groups"]["group_1"] = ct_config(8, 32, True)["config_groups"]["group_0"]
    expected = rewrite(llama, tmp_path / "q", config, make)
    checkpoint = open_checkpoint(tmp_path / "q")
    assert all(torch.equal(dense(checkpoint.load(name)).double(), weight.double()) for name, weight in expected.items())


def test_gptq_dynamic_layers(llama: Path, tmp_path: Path):
    four, eight = gptq_folder(4, 64, True), gptq_folder(8, 32, True)
    config = {**four[0], "dynamic": {"+:.*down.*": {"bits": 8, "group_size": 32}}}
    expected = rewrite(llama, tmp_path / "q", config, lambda weight, number: (four if number % 2 else eight)[1](weight, number))
    checkpoint = open_checkpoint(tmp_path / "q")
    assert all(torch.equal(dense(checkpoint.load(name)).double(), weight.double()) for name, weight in expected.items())


def test_largest_smallest_and_zero_scales(llama: Path, tmp_path: Path):
    for dtype in (F16, BF16):
        info = torch.finfo(dtype)
        odd = [0.0, info.smallest_normal, info.smallest_normal * info.eps, -info.smallest_normal]
        odd += [info.max if dtype is F16 else info.max / 1024, 1.0]

        def make(weight: Tensor, number: int, odd=odd, dtype=dtype) -> tuple[dict[str, Tensor], Tensor]:
            made = draw(weight, 8, 32, symmetric=False, dtype=dtype, seed=number)
            made = made._replace(
                scales=torch.tensor(odd, dtype=dtype).repeat(made.scales.numel())[: made.scales.numel()].view_as(made.scales)
            )
            return packed(made, False), torch.from_numpy(made.values())

        folder = tmp_path / str(dtype)
        expected = rewrite(llama, folder, ct_config(8, 32, False), make)
        checkpoint = open_checkpoint(folder)
        for name, wanted in expected.items():
            assert torch.equal(dense(checkpoint.load(name)).double(), wanted.double())


NAME = "model.layers.0.mlp.up_proj"


def broken(kind: str, source: Path, folder: Path, change: Callable[[dict[str, Tensor]], Any], **config: Any) -> None:
    """Load a weight after modifying its folder."""
    rewrite(source, folder, {**FOLDERS[kind][0], **config}, FOLDERS[kind][1])
    files = load_file(folder / "model.safetensors")
    change(files)
    save_file({name: tensor.contiguous() for name, tensor in files.items()}, folder / "model.safetensors", {"format": "pt"})
    open_checkpoint(folder).load(f"{NAME}.weight")


def put(part: str, make: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    def change(files: dict[str, Tensor]) -> None:
        files[f"{NAME}.{part}"] = make(files[f"{NAME}.{part}"])

    return change


def drop(part: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda files: files.pop(f"{NAME}.{part}")


def poisoned(found: Tensor) -> Tensor:
    found = found.clone()
    found.view(-1)[3] = float("nan")
    return found


def poisoned_first(found: Tensor) -> Tensor:
    return torch.full_like(found, float("inf"))


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("awq", drop("qzeros"), "it has no qzeros"),
        ("awq", drop("scales"), "it has no scales"),
        ("awq", put("scales", lambda t: t[1:]), r"scales has shape \[3, 192\]; \[4, 192\] is needed"),
        ("awq", put("qweight", lambda t: t[:, 1:]), r"qzeros has shape \[4, 24\]; \[4, 23\] is needed"),
        ("awq", put("qweight", lambda t: t.float()), "qweight is F32; I32 is needed"),
        ("awq", put("qweight", lambda t: t[None]), "2 non-empty dimensions are needed"),
        ("awq", put("scales", poisoned), "some of its scales are not finite"),
        ("gptq-4", drop("qzeros"), "it has no qzeros"),
        ("gptq-4", put("qzeros", lambda t: t[:, 1:]), "qzeros have 23 columns; 24 are needed for 4 bits and 192 outputs"),
        ("gptq-4", put("g_idx", lambda t: t + 1), "g_idx has indexes from 1 to 2; it has 2 groups"),
        ("gptq-4", put("g_idx", lambda t: t - 1), "g_idx has indexes from -1 to 0; it has 2 groups"),
        ("gptq-4", put("g_idx", lambda t: t[1:]), r"g_idx has shape \[127\]; \[128\] is needed"),
        ("gptq-4", put("scales", lambda t: t.to(torch.int32)), "scales is I32; BF16 or F16 or F32 is needed"),
        ("gptq-3", put("qweight", lambda t: t[1:]), "11 rows, which do not hold a whole number of 3-bit inputs"),
        ("ct-4", drop("weight_scale"), "weight_scale is missing"),
        ("ct-4", drop("weight_shape"), "it has no weight_shape"),
        ("ct-4", put("weight_shape", lambda t: t * 1000), r"does not hold \[192000, 128000\] at \[4\] bits"),
        ("ct-4", put("weight_shape", lambda t: -t), r"does not hold \[-192, -128\] at \[4\] bits"),
        ("ct-4", put("weight_scale", lambda t: t[:, :1].expand(-1, 7)), "128 inputs have 7 scales"),
        ("ct-4", put("weight_scale", poisoned), "some of its scales are not finite"),
        ("ct-4-zeros", put("weight_zero_point", lambda t: t[1:]), r"weight_zero_point has shape \[23, 4\]; \[24, 4\]"),
        ("ct-act-order", put("weight_g_idx", lambda t: t + 9), "weight_g_idx has indexes from 9 to 12; it has 4 groups"),
        ("ct-int8", put("weight", lambda t: t.to(torch.int16)), "weight is I16; I8 is needed"),
        ("ct-mxfp4", put("weight_scale", lambda t: t[1:]), r"weight_scale has shape \[191, 4\]; \[192, 4\] is needed"),
        ("ct-mxfp4", put("weight_scale", lambda t: torch.full_like(t, 255)), "some of its scales are NaN"),
        ("ct-mxfp4", put("weight_packed", lambda t: t[:, 1:]), "126 inputs; MXFP4 needs groups of 32"),
        ("nvfp4", drop("weight_scale_2"), "its weight_scale_2 is missing; one F32 for the weight is needed"),
        ("nvfp4", put("weight_scale_2", lambda t: t.expand(3)), r"weight_scale_2 is F32 of shape \[3\]; one F32"),
        ("nvfp4", put("weight_scale_2", lambda t: t * float("inf")), "some of its scales are not finite"),
        ("nvfp4", put("weight_scale_2", lambda t: t * 0 + 3e38), "some of its scales are not finite, or too large"),
        ("nvfp4", put("weight_scale", lambda t: t[:, 1:]), r"weight_scale has shape \[192, 7\]; \[192, 8\] is needed"),
        ("nvfp4", put("weight_scale", lambda t: torch.full_like(t, float("nan"))), "some of its scales are not finite"),
        ("nvfp4", put("weight_scale", lambda t: t.float()), "weight_scale is F32; F8_E4M3 is needed"),
        ("nvfp4", put("weight", lambda t: t[:, 1:]), "126 inputs; NVFP4 needs groups of 16"),
        ("nvfp4", put("weight", lambda t: t[0]), "2 non-empty dimensions are needed"),
        ("nvfp4", lambda files: files.update({f"{NAME}.pre_quant_scale": torch.ones(128)}), "scaled by a pre_quant_scale"),
        ("ct-nvfp4", put("weight_global_scale", lambda t: t * 0), "some of its scales are not finite"),
        (
            "ct-nvfp4",
            lambda files: files.update({f"{NAME}.weight_zero_point": torch.ones(3)}),
            "is not valid for four-bit floats",
        ),
        ("modelopt-fp8-blocks", put("weight_scale", lambda t: torch.cat([t, t])), r"scales have shape \[4, 1\]"),
        ("fp8", put("weight_scale_inv", lambda t: t[None].expand(3, -1, -1)), "weight_scale_inv has shape"),
        ("fp8", put("weight_scale_inv", lambda t: t[:1]), r"scales have shape \[1, 1\]; a weight of \[192, 128\]"),
        ("fp8", put("weight_scale_inv", poisoned_first), "some of its scales are not finite"),
        ("fp8", put("weight", lambda t: t.to(torch.float8_e5m2)), "weight is F8_E5M2; F8_E4M3 is needed"),
        ("fp8", put("weight", lambda t: torch.full_like(t, float("nan"))), "some of its codes are NaN"),
        ("fp8", put("weight_scale_inv", lambda t: t.double()), "weight_scale_inv is F64; F32 or BF16"),
    ],
)
def test_invalid_weights_are_refused(kind: str, change, message: str, llama: Path, tmp_path: Path):
    with pytest.raises(FormatError, match=message) as refused:
        broken(kind, llama, tmp_path / "q", change)
    assert "\n" not in str(refused.value)
    assert NAME in str(refused.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quantized by 'bitsandbytes', which is not supported. Supported: awq, gptq"),
        (
            {"quant_method": "hqq"},
            "in HQQ's own layout, which is not read: take the model's bf16 folder, which auraflux convert",
        ),
        ({"quant_method": "exl3", "bits": 3.0}, "in EXL3's own layout, which is not read: take the model's bf16 folder"),
        ({"quant_method": 7}, "has quant_method = 7; a string"),
        ({"quant_method": "awq", "bits": 3}, "AWQ with 3 bits is not supported"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ in layout 'gemv' is not supported, only 'gemm'"),
        ({"quant_method": "awq", "bits": 4, "group_size": 0}, "has group_size = 0"),
        ({"quant_method": "gptq"}, "GPTQ with None bits is not supported"),
        ({"quant_method": "gptq", "bits": 5}, "GPTQ with 5 bits is not supported. Supported: 2, 3, 4, 8"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "FP8 of kind 'e5m2' is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size \[128\] is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "has weight_block_size"),
        ({"quant_method": "fp8", "expert_dtype": "int4"}, "experts in 'int4' is not supported"),
        (ct_config(4, 32, True, "mxfp8-quantized"), "in format 'mxfp8-quantized' is not supported"),
        ({"quant_method": "modelopt"}, "ModelOpt with quant_algo None is not supported. Supported: NVFP4"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ' is not supported"),
        ({"quant_algo": "NVFP4", "group_size": 32}, "NVFP4 in groups of 32 is not supported"),
        ({"quant_method": "compressed-tensors"}, "without weights in its config_groups"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": 1}}, "config_groups"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": "4"}}}}, "has num_bits = '4'"),
        (ct_config(4, 32, True, "marlin-24"), "in format 'marlin-24' is not supported"),
    ],
)
def test_unsupported_configs_are_refused_at_open(config: dict[str, Any], message: str, llama: Path, tmp_path: Path):
    found = json.loads((llama / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**found, "quantization_config": config}))
    with pytest.raises(FormatError, match=message):
        open_checkpoint(tmp_path)


def test_experts_with_different_formats_are_refused(mixture: Path, tmp_path: Path):
    config, make = FOLDERS["gptq-4"]

    def asymmetric(weight: Tensor, number: int) -> tuple[dict[str, Tensor], Tensor]:
        parts, expected = make(weight, number)
        if number % 2 == 0:
            # an asymmetric zero point needs float32
            parts["qzeros"] = parts["qzeros"] & 0x22222222
        return parts, expected

    rewrite(mixture, tmp_path / "q", config, asymmetric)
    with pytest.raises(FormatError, match=r"expert 1 in .* with scales in torch\.float16, and expert 0 is .* torch\.float32"):
        logits(tmp_path / "q", [1, 2, 3])


def test_duplicate_weight_is_refused(llama: Path, tmp_path: Path):
    def twice(files: dict[str, Tensor]) -> None:
        files[f"{NAME}.weight"] = torch.zeros(192, 128)

    with pytest.raises(FormatError, match=f"has {NAME}.weight twice, dense and quantized"):
        broken("awq", llama, tmp_path / "q", twice)


def test_gptq_zeros_wrap():
    made = Codes(np.zeros((8, 32), np.uint8), np.zeros((8, 1), int), torch.ones(8, 1), np.zeros(32, int), 4)
    assert gptq(made)["qzeros"].item() == -1
