"""`auraflux pull`, `inspect` and `convert`: output and errors."""

import json
import os
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner, Result

from auraflux.cli import main
from auraflux.loading import gpu_plan
from auraflux.tokenizer.tokenizer import Tokenizer
from auraflux.weights.download import pull as fetching
from tests.engine.tiny import tiny
from tests.weights.experts.packed_folders import converted, hf_folder, packed
from tests.weights.formats.gguf_files import llama_tensors, write_gguf
from tests.weights.formats.quantized_folders import FOLDERS, rewrite


def call(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


@pytest.fixture
def model(tmp_path) -> Path:
    return write_gguf(tmp_path / "m.gguf", llama_tensors(), "Q8_0")


def test_pull_prints_the_path(model: Path, monkeypatch):
    monkeypatch.setattr(fetching, "_built_in", lambda name, report: model)
    for words in ([], ["smollm2-135m-instruct"]):
        done = call("pull", *words)
        assert (done.exit_code, done.stdout) == (0, f"{model}\n")


def test_pull_prints_a_path_that_is_not_valid_text(tmp_path):
    folder = tmp_path / "\udc80"
    folder.mkdir()
    assert call("pull", folder).stdout_bytes == os.fsencode(folder) + b"\n"


def test_pull_of_an_unknown_model_fails_in_one_sentence():
    done = call("pull", "no-such-model")
    assert done.exit_code == 1
    assert done.stderr.startswith("error: there is no model 'no-such-model': no such folder or file")
    assert done.stderr.count("\n") == 1


def test_inspect_shows_parts_formats_and_memory(model: Path):
    done = call("inspect", model)
    assert done.exit_code == 0, done.output
    for words in ("llama (gguf); 2 x full attention; context 256", "embeddings", "Q8_0", "k8v4", "this machine has"):
        assert words in done.stdout


def test_inspect_in_json(model: Path):
    found = json.loads(call("inspect", model, "--json").stdout)
    assert (found["model_type"], found["family"], found["form"], found["context"]) == ("llama", "llama", "gguf", 256)
    assert found["layers"] == {"full attention": 2}
    assert [setting["kv"] for setting in found["memory"]] == ["none", "k8v8", "k8v4", "k4v4", "k4v2", "k3v3"]
    need = found["memory"][0]["contexts"][0]
    assert need["nbytes"] == found["total"]["memory_nbytes"] + need["cache_nbytes"]
    assert need["fits"] == "now"


@pytest.mark.parametrize(
    ("kind", "label", "note"),
    [
        ("awq", "AWQ 4 bits, groups of 32", "AWQ: 14 weights are bit-exact: scale * (code - zero)."),
        (
            "gptq-act-order",
            "GPTQ 4 bits, groups of 32, as float32",
            "with act-order. --quantize 8",
        ),
        ("fp8", "FP8, blocks of 128 x 128", "FP8: 14 weights are bit-exact: code * scale in float32."),
    ],
)
def test_inspect_notes_quantized_formats(kind: str, label: str, note: str, tmp_path: Path):
    rewrite(tiny(text=False), tmp_path / "q", *FOLDERS[kind])
    found = json.loads(call("inspect", tmp_path / "q", "--json").stdout)
    assert found["form"] == "hf"
    assert found["formats"][label]["tensors"] == 14
    assert note in " ".join(found["notes"])
    printed = " ".join(call("inspect", tmp_path / "q").stdout.split())
    assert label in printed
    assert printed.count(note) == 1


@pytest.mark.parametrize(
    ("kind", "label", "precision", "cpu"),
    [
        ("awq", "AWQ 4 bits, groups of 32", "bit-exact", "dequantized in registers"),
        (
            "gptq-act-order",
            "GPTQ 4 bits, groups of 32, as float32",
            "exact, but stored as float32",
            "dense, 16 or 32 bits",
        ),
        ("nvfp4", "NVFP4", "bit-exact", "dequantized in registers"),
    ],
)
def test_inspect_shows_the_kernels_of_formats(kind: str, label: str, precision: str, cpu: str, tmp_path: Path):
    rewrite(tiny(text=False), tmp_path / "q", *FOLDERS[kind])
    found = json.loads(call("inspect", tmp_path / "q", "--device", "cuda", "--json").stdout)
    run = next(each for each in found["runs"] if each["format"] == label)
    assert run["precision"] == precision
    assert not run["experts"]
    assert run["speeds"]["cpu"]["one"]["method"].startswith(cpu)
    assert set(run["speeds"]) == {"cpu", "cuda"}
    assert all(speed["method"] and speed["speed"] for speeds in run["speeds"].values() for speed in speeds.values())
    assert found["advice"] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_inspect_shows_no_gpu_kernels_without_a_gpu(model: Path):
    found = json.loads(call("inspect", model, "--json").stdout)
    assert found["gpu"] is None
    assert all(set(run["speeds"]) == {"cpu"} for run in found["runs"])
    assert "H200" not in call("inspect", model).stdout


def test_inspect_shows_dense_weights_as_quantized(tmp_path: Path):
    dense, quantized = (
        json.loads(call("inspect", tiny(text=False), "--json", *words).stdout)["runs"][0] for words in ([], ["--quantize", 4])
    )
    assert (dense["precision"], quantized["precision"]) == ("unquantized", "quantized to 4 bits in groups of 64")
    assert quantized["speeds"]["cpu"]["one"]["method"].startswith("dequantized in registers")


def test_inspect_advises_when_weights_do_not_fit(model: Path, monkeypatch):
    small = SimpleNamespace(memory_nbytes=1)
    monkeypatch.setattr("auraflux.machine.this_machine", lambda: small)
    found = json.loads(call("inspect", model, "--json").stdout)
    assert found["advice"] == [f"the weights do not fit: `auraflux convert {model} NEW --bits 4` makes them smaller."]
    assert "advice" in call("inspect", model).stdout


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"},
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"},
        {"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {"a": {"weights": {"num_bits": 4}}}},
        {"quant_method": "fp8", "fmt": "e5m2"},
        {"quant_method": "modelopt", "quant_algo": "MXFP8"},
    ],
    ids=lambda config: config["quant_method"],
)
def test_an_unsupported_format_suggests_alternatives(config: dict, tmp_path: Path):
    rewrite(tiny(text=False), tmp_path / "q", config, lambda weight, number: ({"weight": weight}, weight))
    done = call("inspect", tmp_path / "q")
    assert done.exit_code == 1
    assert "Or use a bf16 or MLX folder, or a GGUF file of the model." in done.stderr
    assert done.stderr.count("\n") == 1


def test_inspect_of_an_unknown_method_lists_the_known(tmp_path: Path):
    rewrite(tiny(text=False), tmp_path / "q", {"quant_method": "quip"}, lambda weight, number: ({"weight": weight}, weight))
    done = call("inspect", tmp_path / "q")
    assert done.exit_code == 1
    assert "quantized by 'quip', which is not supported. Supported: awq, gptq" in done.stderr
    assert done.stderr.count("\n") == 1


def test_inspect_counts_quantized_bytes(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", llama_tensors(), "F32")
    dense, quantized = (
        json.loads(call("inspect", path, "--json", *words).stdout)["total"]["memory_nbytes"]
        for words in ([], ["--quantize", 4])
    )
    assert quantized < dense / 5
    assert "'7' is not one of 2, 3, 4, 5, 6, 8 bits per weight." in call("inspect", path, "--quantize", 7).stderr


def test_memory_that_does_not_fit_is_shown(model: Path, monkeypatch):
    monkeypatch.setattr("auraflux.machine.free_nbytes", lambda: 1)
    assert "~ " in call("inspect", model).stdout
    found = json.loads(call("inspect", model, "--json").stdout)
    assert {need["fits"] for setting in found["memory"] for need in setting["contexts"]} == {"alone"}


def write_config(folder: Path, text: str | None) -> Path:
    folder.mkdir()
    if text is not None:
        (folder / "config.json").write_text(text)
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    return folder


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "has no config.json"),
        ("{", "cannot be read as JSON"),
        ('{"model_type": "bert"}', "model_type 'bert' is not supported. Those that are: afmoe, "),
        ('{"model_type": "llama"}', "has no 'num_attention_heads'. The keys it has: model_type"),
    ],
)
def test_inspect_fails_in_one_sentence(tmp_path, config: str | None, message: str):
    done = call("inspect", write_config(tmp_path / "model", config))
    assert done.exit_code == 1
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_convert_writes_a_folder(model: Path, tmp_path):
    done = call("convert", model, tmp_path / "mlx", "--bits", 4, "--group-size", 32)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(f"{tmp_path / 'mlx'}: 0.")
    assert json.loads(call("inspect", tmp_path / "mlx", "--json").stdout)["form"] == "mlx"
    done = call("convert", model, tmp_path / "mlx")
    assert (done.exit_code, done.stderr) == (1, f"error: {tmp_path / 'mlx'} already exists. Use --force to replace it.\n")
    assert call("convert", model, tmp_path / "mlx", "--force").exit_code == 0


def test_convert_writes_the_tokenizer_of_a_gguf_file(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", llama_tensors(), "Q8_0", tokenizer=True)
    done = call("convert", path, tmp_path / "mlx")
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    tokenizer = Tokenizer.from_folder(tmp_path / "mlx")
    assert tokenizer is not None
    assert tokenizer.encode("ab a") == [2, 5, 3]
    assert tokenizer.apply_template([{"role": "user", "content": "hi"}]) == "hi"


def test_convert_notes_a_missing_tokenizer(model: Path, tmp_path):
    done = call("convert", model, tmp_path / "mlx")
    assert done.exit_code == 0
    assert done.stderr.startswith("note: the tokenizer was not converted.")
    assert not (tmp_path / "mlx" / "tokenizer.json").exists()


def test_inspect_shows_experts_on_disk_below_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = packed(converted(hf_folder(tmp_path / "hf"), tmp_path / "mlx", bits=4, group=32), tmp_path / "packed", lanes=1)
    options = "inspect", folder, "--gpu-memory", "8GB", "--expert-memory", "90kB"
    assert json.loads(call(*options, "--json").stdout)["gpu_memory"]["disk_cache_nbytes"] is None
    monkeypatch.setattr(gpu_plan, "free_nbytes", lambda: 10**9 + 10**5)
    found = json.loads(call(*options, "--json").stdout)["gpu_memory"]
    assert found["disk_cache_nbytes"] == 90_000
    printed = " ".join(call(*options).stdout.split())
    assert "runs with experts on disk" in printed
    assert "expert cache" in printed
    assert "% of all experts" in printed
    monkeypatch.setattr(gpu_plan, "free_nbytes", lambda: 10**9 + 10**4)
    assert "Give --expert-host-memory" in call(*options).stdout.replace("\n", " ")


def test_inspect_and_plan_divide_gpu_memory(tmp_path: Path):
    folder = hf_folder(tmp_path / "hf")
    found = json.loads(call("inspect", folder, "--gpu-memory", "8GB", "--json").stdout)["gpu_memory"]
    assert found["refused"] is None
    assert found["slots"] is None
    assert found["experts"] == 10
    found = json.loads(call("inspect", folder, "--gpu-memory", "8GB", "--expert-memory", "300kB", "--json").stdout)[
        "gpu_memory"
    ]
    assert found["slots"] == 6
    assert found["host_nbytes"] > found["experts_nbytes"] > found["slots_nbytes"]
    printed = " ".join(call("inspect", folder, "--gpu-memory", "8GB", "--expert-memory", "300kB").stdout.split())
    assert "6 of 10 experts" in printed
    planned = call("plan", folder, "--gpu-memory", "1MB")
    assert planned.exit_code == 0
    assert "does not run: 1.00 MB of GPU memory is too little" in planned.stdout
    assert "give --hosts, or --gpu-memory" in call("plan", folder).stderr
