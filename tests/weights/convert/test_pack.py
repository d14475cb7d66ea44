"""`pack` writes the same codes as `convert`, from every source format."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from auraflux.errors import FormatError
from auraflux.ops.simd.isa import ISA
from auraflux.quant import QTensor
from auraflux.quant.super_blocks import FORMATS
from auraflux.weights.experts.packed_files import ExpertFile, ExpertFiles
from auraflux.weights.experts.store import map_experts
from auraflux.weights.formats.checkpoint import open_checkpoint
from tests.models.oracles import error, logits, save
from tests.weights.experts.packed_folders import contents, converted, experts_of, hf_folder, matrices, packed
from tests.weights.formats.gguf_files import HIDDEN, WIDTH, llama_tensors, write_gguf
from tests.weights.formats.gguf_models import METADATA, gguf_tensors
from tests.weights.formats.gguf_models import tiny as tiny_for_gguf

FAMILIES = ["qwen3_moe", "qwen3_next", "qwen3_5_moe", "gpt_oss", "deepseek_v3"]
LATER = ["glm4_moe", "minimax_m2", "gemma4_text"]
OPTIONS = {"bits": 4, "group": 32}


def check_experts(folder: Path, plain: Path) -> None:
    """Check that the experts of a packed folder match those written by `convert`."""
    stacks = open_checkpoint(plain)
    names = {name: name.removeprefix("language_model.") for name in stacks.sizes() if "_proj.weight" in name}
    for file in experts_of(folder).files:
        wanted = {}
        for name, ours in names.items():
            if ours.startswith(file.module) and (".switch_mlp." in ours or ".experts." in ours):
                wanted[ours.split(".")[-2].removesuffix("_proj")] = stacks.load(name)
        for expert in range(file.count):
            for kind, found in matrices(file, expert).items():
                assert found.format[:2] == wanted[kind].format[:2]
                for part in ("packed", "scales", "biases"):
                    same = getattr(found.rows(), part), getattr(wanted[kind][expert], part)
                    assert same == (None, None) or torch.equal(*same)


def check_rest(folder: Path, plain: Path) -> None:
    """Check that all other weights match those written by `convert`."""
    found, wanted = load_file(folder / "model.safetensors"), load_file(plain / "model.safetensors")
    wanted = {
        name: tensor
        for name, tensor in wanted.items()
        if not (re.search(r"(switch_mlp|switch_glu|mlp\.experts)\.", name) and not name.endswith(".bias"))
    }
    assert sorted(found) == sorted(wanted)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert json.loads((folder / "config.json").read_text()) == json.loads((plain / "config.json").read_text())


@pytest.mark.parametrize("kind", [*FAMILIES, *(pytest.param(kind, marks=pytest.mark.slow) for kind in LATER)])
def test_pack_matches_convert(kind: str, tmp_path):
    source = hf_folder(tmp_path / "hf", kind)
    plain, folder = converted(source, tmp_path / "mlx", **OPTIONS), packed(source, tmp_path / "packed", **OPTIONS)
    check_experts(folder, plain)
    check_rest(folder, plain)
    # quantized weights are copied unchanged
    again = packed(plain, tmp_path / "again")
    assert {k: v for k, v in contents(again).items() if k.endswith(".bin")} == {
        k: v for k, v in contents(folder).items() if k.endswith(".bin")
    }
    check_rest(again, plain)
    assert not list(tmp_path.glob("*.partial"))


def test_rows_are_in_order_for_a_gpu(tmp_path):
    source = hf_folder(tmp_path / "hf")
    plain, folder = converted(source, tmp_path / "mlx", **OPTIONS), packed(source, tmp_path / "packed", lanes=1, **OPTIONS)
    assert experts_of(folder).lanes == 1
    check_experts(folder, plain)


@pytest.mark.parametrize("kind", ["qwen3moe", "gpt-oss"])
def test_gguf_codes_are_unchanged(kind: str, tmp_path):
    model = tiny_for_gguf(kind)
    save(model, tmp_path / "hf")
    tensors = gguf_tensors(model, kind)
    metadata = {"expert_count": 5, "expert_used_count": 2, "attention.key_length": WIDTH, "attention.sliding_window": 16}
    metadata |= {"expert_feed_forward_length": 96 if kind == "gpt-oss" else 64}
    # as in published files, some layers' projections have more bits
    kinds = {name: "Q4_1" for name in tensors if "layers.1." in name and "down_proj.weight" in name}
    source = write_gguf(tmp_path / "m.gguf", tensors, "Q8_0", kind, metadata, kinds)
    folder, plain = packed(source, tmp_path / "packed"), converted(source, tmp_path / "mlx", bits=8)
    found = experts_of(folder)
    assert [file.like["down"].bits for file in found.files] == [8, 4]
    assert len({file.stride for file in found.files}) == 2
    check_experts(folder, plain)


@pytest.mark.parametrize(("block", "kinds_packed"), [("IQ4_NL", ["iq4_nl", "iq4_nl"]), ("Q4_0", ["q4_0", "affine"])])
def test_gguf_blocks_are_unchanged_on_any_machine(block: str, kinds_packed: list[str], tmp_path):
    model = tiny_for_gguf("qwen3moe")
    save(model, tmp_path / "hf")
    tensors = gguf_tensors(model, "qwen3moe")
    kinds = {name: block for name in tensors if "switch_mlp" in name or "o_proj" in name}
    source = write_gguf(tmp_path / "m.gguf", tensors, "Q8_0", "qwen3moe", METADATA["qwen3moe"], kinds)
    folder, gpu = packed(source, tmp_path / "packed"), packed(source, tmp_path / "gpu", lanes=1)
    assert [experts_of(each).files[0].like["down"].kind for each in (folder, gpu)] == kinds_packed
    ids = list(range(1, 20))
    assert error(logits(folder, ids), logits(source, ids)) < 1e-6
    assert error(logits(gpu, ids), logits(source, ids)) < 1e-6


def test_gguf_super_blocks_are_unchanged_for_a_cpu(tmp_path):
    model = tiny_for_gguf("qwen3moe", moe_intermediate_size=256)
    tensors, ids = gguf_tensors(model, "qwen3moe"), list(range(1, 20))
    downs = [name for name in tensors if "switch_mlp.down_proj" in name]
    metadata = METADATA["qwen3moe"] | {"expert_feed_forward_length": 256}
    kinds = dict(zip(downs, ("Q4_K", "Q6_K"), strict=True))
    source = write_gguf(tmp_path / "m.gguf", tensors, "Q8_0", "qwen3moe", metadata, kinds)
    folder, gpu = packed(source, tmp_path / "packed"), packed(source, tmp_path / "gpu", lanes=1)
    found = [file.like["down"] for file in experts_of(folder).files]
    assert [each.kind for each in found] == ["q4_k", "q6_k"]
    assert [each.nbytes * 8 / (HIDDEN * 256) for each in found] == [4.625, 6.625]
    assert [file.like["down"].kind for file in experts_of(gpu).files] == ["affine", "centred"]
    wanted = logits(source, ids)
    assert error(logits(folder, ids), wanted) < 1e-6
    assert error(logits(gpu, ids), wanted) < 1e-6
    assert error(logits(packed(folder, tmp_path / "again"), ids), wanted) < 1e-6
    codes = open_checkpoint(converted(source, tmp_path / "mlx", bits=8)).load(downs[0])
    assert isinstance(codes, QTensor)
    assert (codes.kind, codes.bits, codes.group) == ("affine", 4, 32)
    stored = open_checkpoint(source).load(downs[0])
    assert isinstance(stored, QTensor)
    assert torch.equal(codes.dequantize(torch.float32), stored.dequantize(torch.float32))


def test_gguf_grids_take_the_bytes_of_the_file_on_any_machine(tmp_path):
    model = tiny_for_gguf("qwen3moe", moe_intermediate_size=256)
    tensors, ids = gguf_tensors(model, "qwen3moe"), list(range(1, 20))
    downs = [name for name in tensors if "switch_mlp.down_proj" in name]
    metadata = METADATA["qwen3moe"] | {"expert_feed_forward_length": 256}
    kinds = dict(zip(downs, ("IQ2_XXS", "IQ1_M"), strict=True))
    source = write_gguf(tmp_path / "m.gguf", tensors, "Q8_0", "qwen3moe", metadata, kinds)
    wanted = logits(source, ids)
    for lanes in (ISA.lanes, 1):
        folder = packed(source, tmp_path / f"packed-{lanes}", lanes=lanes)
        found = [file.like["down"] for file in experts_of(folder).files]
        assert [each.kind for each in found] == ["iq2_xxs", "iq1_m"]
        assert [each.nbytes * 8 / (HIDDEN * 256) for each in found] == [2.0625, 1.75]
        assert error(logits(folder, ids), wanted) < 1e-6
    # mlx-lm has no grids
    codes = open_checkpoint(converted(source, tmp_path / "mlx", bits=8)).load(downs[0])
    assert isinstance(codes, QTensor)
    assert codes.in_mlx


def test_super_blocks_raise_on_a_gpu():
    form = FORMATS["q4_k"]
    like = QTensor(
        torch.empty(8, 32, dtype=torch.int32, device="meta"),
        torch.empty(8, form.words, dtype=torch.int32, device="meta"),
        None,
        form.bits,
        form.group,
        (8, 256),
    )
    file = ExpertFile("model.layers.0.mlp", Path("layer.bin"), 2, {"up": like, "down": like}, 4096, np.zeros(2, np.uint32))
    files = ExpertFiles(Path("experts"), "qwen3_moe", "", 2, 256, 8, (file,))
    with pytest.raises(FormatError, match=r"experts holds experts in super-blocks \(q4_k\), which GPU kernels do not support"):
        map_experts(files, "cuda")


def test_mxfp4_of_gpt_oss_is_unchanged(tmp_path):
    source = hf_folder(tmp_path / "hf", "gpt_oss")
    tensors = load_file(source / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        count, width, rows = tensors.pop(name).shape
        codes = torch.randint(0, 256, (count, rows, width // 32, 16), generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": codes, f"{name}_scales": torch.full(codes.shape[:3], 120, dtype=torch.uint8)}
    save_file(tensors, source / "model.safetensors")
    folder = packed(source, tmp_path / "packed")
    file = experts_of(folder).files[1]
    assert file.like["gate"].kind == "mxfp4"
    stored = open_checkpoint(source).load("model.layers.1.mlp.experts.gate_up_proj")
    assert isinstance(stored, QTensor)
    for expert in range(file.count):
        found = matrices(file, expert)
        assert torch.equal(found["gate"].dequantize(), stored[expert].dequantize()[0::2])
        assert torch.equal(found["up"].dequantize(), stored[expert].dequantize()[1::2])
    # biases are stored with the other weights
    assert open_checkpoint(folder).shape("model.layers.1.mlp.experts.gate_proj.bias") == (5, 96)


def test_dense_experts_are_refused(tmp_path):
    source = hf_folder(tmp_path / "hf")
    with pytest.raises(FormatError, match=r"are not quantized: model\.layers\.0\.mlp.* is float32\. Give --quantize BITS"):
        packed(source, tmp_path / "packed")
    with pytest.raises(FormatError, match=r"the width 64 of .*down_proj\.weight is not a multiple of 128; try a smaller"):
        packed(source, tmp_path / "packed", bits=4, group=128)
    with pytest.raises(FormatError, match="7 bits in groups of 32 is not a format"):
        packed(source, tmp_path / "packed", bits=7, group=32)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_model_without_experts_is_refused(tmp_path):
    source = write_gguf(tmp_path / "m.gguf", llama_tensors(), "Q8_0")
    with pytest.raises(FormatError, match="has no experts, so there is nothing to pack"):
        packed(source, tmp_path / "packed")


def test_missing_expert_raises_and_nothing_is_written(tmp_path):
    source = converted(hf_folder(tmp_path / "hf"), tmp_path / "mlx", **OPTIONS)
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.2.mlp.switch_mlp.up_proj"
    for part in ("weight", "scales", "biases"):
        del tensors[f"{name}.{part}"]
    save_file(tensors, source / "model.safetensors")
    (source / "model.safetensors.index.json").unlink()
    with pytest.raises(FormatError, match=rf"1 missing: {name}\.weight"):
        packed(source, tmp_path / "packed")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "mlx"]


@pytest.mark.parametrize("kind", ["qwen3_5_moe", "gpt_oss"])
def test_packed_model_can_be_repacked_for_another_machine(kind: str, tmp_path):
    source = hf_folder(tmp_path / "hf", kind)
    folder, wanted = packed(source, tmp_path / "packed", **OPTIONS), packed(source, tmp_path / "rows", **OPTIONS, lanes=1)
    again = contents(packed(folder, tmp_path / "again", lanes=1))
    changed = [name for name, data in contents(wanted).items() if again[name] != data]
    # the manifest differs only in the source's hash
    assert changed == ["experts/manifest.json"]
    with pytest.raises(FormatError, match=r"holds packed experts\. Convert the original model"):
        converted(folder, tmp_path / "plain")


def test_damaged_experts_are_not_repacked(tmp_path):
    folder = packed(hf_folder(tmp_path / "hf"), tmp_path / "packed", **OPTIONS)
    file = experts_of(folder).files[1]
    with file.path.open("r+b") as opened:
        opened.seek(file.offset(3) + 100)
        octet = opened.read(1)[0]
        opened.seek(file.offset(3) + 100)
        opened.write(bytes([octet ^ 1]))
    with pytest.raises(FormatError, match=r"expert 3 of model\.layers\.2\.mlp is damaged: .*layer_002\.bin"):
        packed(folder, tmp_path / "again", lanes=1)
    assert not (tmp_path / "again").exists()


MEASURED = """
import sys
from pathlib import Path
from auraflux.models import family
from auraflux.weights.formats.checkpoint import open_checkpoint
from auraflux.weights.convert.pack import pack

# the compiler's memory is not part of what grows
import torch
from auraflux.ops.layout.rows import interleave
from auraflux.quant import quantize
interleave(quantize(torch.zeros(512, 512), 8, 64), 16)

def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) << 10

seen = []
checkpoint = open_checkpoint(sys.argv[1])
note = lambda what, done, total: seen.append((what, anonymous()))
pack(checkpoint, family(checkpoint.config), Path(sys.argv[2]), lanes=16, report=note)
experts = [size for what, size in seen if what == "experts"]
print(max(experts) - experts[0])
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="there is no /proc")
def test_memory_is_bounded_by_a_few_experts(tmp_path):
    import transformers as hf

    shapes = {"hidden_size": 512, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    mixture = {"moe_intermediate_size": 512, "num_experts": 64, "num_experts_per_tok": 2, "vocab_size": 96}
    model = hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**shapes, **mixture, intermediate_size=64)).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "hf")
    source = converted(tmp_path / "hf", tmp_path / "mlx", bits=8)
    command = [sys.executable, "-c", MEASURED, str(source), str(tmp_path / "packed")]
    # freed blocks return to the system at once: what an allocator retains is not what packing needs
    env = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "2", "MALLOC_MMAP_THRESHOLD_": str(1 << 16)}
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout)
    file = experts_of(tmp_path / "packed").files[0]
    workers, constant = 2, 8 << 20
    assert file.file_nbytes > 4 * (2 * workers * file.stride + constant)
    assert grown < 2 * workers * file.stride + constant
