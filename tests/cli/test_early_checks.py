"""Typing errors are refused, and names, help and headers are shown, before torch, numba or numpy is imported."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from auraflux.cli import main
from auraflux.defaults import KV_BITS, WEIGHT_BITS

BLOCKED = """
import json, sys
for name in ("torch", "numba", "llvmlite", "triton"):
    sys.modules[name] = None
from click.testing import CliRunner
from auraflux.cli import main
results = []
for words in json.load(sys.stdin):
    done = CliRunner().invoke(main, words)
    results.append([done.exit_code, done.stdout, done.stderr])
print(json.dumps(results))
"""


def run_without_torch(*lines: list[str]) -> list[tuple[int, str, str]]:
    """Run command lines in a process in which torch and numba cannot be imported."""
    done = subprocess.run([sys.executable, "-c", BLOCKED], input=json.dumps(lines), capture_output=True, text=True, check=True)
    return [tuple(each) for each in json.loads(done.stdout)]


def folder(path: Path, config: str, weights: bytes | None = struct.pack("<Q", 2) + b"{}") -> str:
    path.mkdir()
    (path / "config.json").write_text(config)
    if weights is not None:
        (path / "model.safetensors").write_bytes(weights)
    return str(path)


def test_typing_errors_are_refused_without_torch(tmp_path: Path):
    for name, start in (("split-00002-of-00000", b"GGUF"), ("m-00001-of-00002", b"GGUF"), ("empty", b""), ("other", b"hello")):
        (tmp_path / f"{name}.gguf").write_bytes(start)
    (tmp_path / "pointer.gguf").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    (tmp_path / "page.gguf").write_bytes(b"<!DOCTYPE html>")
    (tmp_path / "weights.bin").write_bytes(b"x")
    (tmp_path / "hub" / "snapshots" / "abc").mkdir(parents=True)
    (tmp_path / "hub" / "snapshots" / "abc" / "config.json").write_text("{}")
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text("{}")
    bert = folder(tmp_path / "bert", '{"model_type": "bert"}', None)
    bare = folder(tmp_path / "bare", '{"model_type": "llama"}', None)
    good = folder(tmp_path / "good", '{"model_type": "llama"}')
    (tmp_path / "bare" / "pytorch_model.bin").touch()
    paths = {
        "/nowhere": "there is no model '/nowhere'",
        bert: "model_type 'bert' is not supported",
        bare: "has no .safetensors file. It has pytorch_model.bin",
        f"{good}/model.safetensors": f"is neither a folder nor a .gguf file. Give its folder, {good}.",
        "split-00002-of-00000.gguf": "says that it is file 2 of 0",
        "m-00001-of-00002.gguf": "these are missing: m-00002-of-00002.gguf",
        "empty.gguf": "is empty",
        "other.gguf": "is not a GGUF file: it begins with b'hell'",
        "pointer.gguf": "is a Git LFS pointer",
        "page.gguf": "is a web page",
        "weights.bin": "is neither a folder nor a .gguf file",
        "hub": "Give a folder of its snapshots: snapshots/abc",
        "lora": "merge that into its model first",
        ".": "Give the path of a GGUF file in it: empty.gguf",
    }
    options = {
        ("--kv", "k5v5"): "kv='k5v5' is not supported",
        ("--kv", "q8_0"): "the nearest to q8_0 is k8v8",
        ("--device", "gpu"): "there is no device 'gpu'",
        ("--gpu-memory", "lots"): "--gpu-memory: 'lots' is not a size",
        ("--expert-memory", "lots"): "--expert-memory: 'lots' is not a size",
        ("--context", "0"): "context=0 must be an integer",
        ("--calibrate", "/nowhere"): "/nowhere cannot be read",
        ("--speculate", "/nowhere"): "there is no model '/nowhere'",
        ("--parallel", "pipelines=2"): "'pipelines' is not a parallel mode",
        ("--hosts", "a,b"): "--hosts needs --parallel",
        ("--sparse-v", "2"): "sparse_v=2.0 is a share",
    }
    lines, expected = [], []
    for path, said in paths.items():
        place = path if path.startswith("/") else str(tmp_path / path)
        lines += [["generate", place, "-p", "x"], ["inspect", place]]
        expected += [said, said]
    lines.append(["serve", good, "--target-itl", "fast"])
    expected.append("--target-itl: 'fast' is not a latency. Write it like 20ms or 0.5s.")
    for words, said in options.items():
        lines += [["generate", good, "-p", "x", *words], ["chat", good, *words], ["serve", good, *words]]
        expected += [said] * 3
    for command in (["convert", "/nowhere", "x"], ["pack", "/nowhere", "x"], ["plan", "/nowhere", "--gpu-memory", "8GB"]):
        lines.append(command)
        expected.append("there is no model '/nowhere'")
    lines += [["bench", "model", "/nowhere"], ["doctor", "--compile", "/nowhere"], ["eval", "/nowhere"]]
    expected += ["there is no model '/nowhere'"] * 3
    for line, said, (code, stdout, stderr) in zip(lines, expected, run_without_torch(*lines), strict=True):
        assert (code, stdout) == (1, ""), (line, stderr)
        assert said in stderr, line
        assert stderr.startswith("error: ")
        assert stderr.count("\n") == 1


def test_names_help_and_lists_need_no_torch(tmp_path: Path):
    commands = [[name] for name in main.commands]
    lines = [["--version"], ["--help"], ["list"], *([*words, "--help"] for words in commands)]
    for line, (code, stdout, _) in zip(lines, run_without_torch(*lines), strict=True):
        assert code == 0, line
        assert stdout or line == ["list"], line


def test_bits_are_those_of_the_kernels():
    from auraflux.ops.turboquant.codebook import BITS
    from auraflux.quant import affine

    assert KV_BITS == BITS
    assert WEIGHT_BITS == affine.BITS


@pytest.mark.parametrize("bits", ["7", "99", "four", "-4", "0"])
def test_bits_per_weight(bits: str):
    done = CliRunner().invoke(main, ["generate", "-p", "x", "--quantize", bits])
    assert done.exit_code == 2
    assert "is not one of 2, 3, 4, 5, 6, 8 bits per weight." in done.stderr
