"""`auraflux pack`: output and errors."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from auraflux.cli import main
from auraflux.engine import calibration
from auraflux.loading.load import load
from auraflux.tokenizer.tokenizer import Tokenizer
from auraflux.weights.convert import expert_packer
from auraflux.weights.experts.packed_files import open_experts
from tests.weights.formats.gguf_files import HIDDEN, WIDTH, llama_tensors, write_gguf


def call(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


@pytest.fixture
def model(tmp_path) -> Path:
    """A tiny mixture-of-experts model with a tokenizer."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in (f"model.layers.{i}" for i in range(2)):
        shapes |= {f"{layer}.mlp.switch_mlp.{kind}_proj.weight": (5, 64, HIDDEN) for kind in ("gate", "up")}
        shapes |= {f"{layer}.mlp.switch_mlp.down_proj.weight": (5, HIDDEN, 64), f"{layer}.mlp.gate.weight": (5, HIDDEN)}
        shapes |= {f"{layer}.self_attn.{kind}_norm.weight": (WIDTH,) for kind in "qk"}
    plain = (".mlp.gate_proj", ".mlp.up_proj", ".mlp.down_proj")
    tensors = {name: array for name, array in llama_tensors(**shapes).items() if not any(part in name for part in plain)}
    words = {"expert_count": 5, "expert_used_count": 2, "expert_feed_forward_length": 64, "attention.key_length": WIDTH}
    return write_gguf(tmp_path / "m.gguf", tensors, "Q8_0", "qwen3moe", words, tokenizer=True)


def test_it_writes_a_folder_with_its_tokenizer(model: Path, tmp_path):
    done = call("pack", model, tmp_path / "packed")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{tmp_path / 'packed'}: 10 experts in 2 layers, 0.")
    assert "needs --expert-memory 114.69kB or more" in done.stdout
    tokenizer = Tokenizer.from_folder(tmp_path / "packed")
    assert tokenizer is not None
    assert tokenizer.encode("ab a") == [2, 5, 3]
    assert json.loads((tmp_path / "packed" / "config.json").read_text())["quantization"]["bits"] == 8


def test_fewer_bits_and_the_gpu_layout(model: Path, tmp_path):
    done = call("pack", model, tmp_path / "packed", "--quantize", 4, "--group-size", 32, "--for", "cuda")
    assert done.exit_code == 0, done.output
    found = open_experts(tmp_path / "packed")
    assert found.lanes == 1
    assert {file.like["gate"].bits for file in found.files} == {4}


def test_an_interruption_says_how_to_resume(model: Path, tmp_path, monkeypatch):
    write, calls = expert_packer._write_all, []

    def stop(*args) -> None:
        calls.append(args)
        if len(calls) == 8:
            raise KeyboardInterrupt
        write(*args)

    monkeypatch.setattr(expert_packer, "_write_all", stop)
    done = call("pack", model, tmp_path / "packed")
    assert done.exit_code == 130
    kept = f"Progress is saved in {tmp_path / 'packed'}.partial; run the same command again to resume."
    assert done.stderr == f"Interrupted. {kept}\n"
    assert call("pack", model, tmp_path / "packed").exit_code == 0
    assert not (tmp_path / "packed.partial").exists()


def test_failures_are_one_sentence(model: Path, tmp_path):
    assert call("pack", model, tmp_path / "packed").exit_code == 0
    dense = write_gguf(tmp_path / "plain.gguf", llama_tensors(), "Q8_0")
    for words, message in (
        ([tmp_path / "nothing", tmp_path / "x"], "there is no model"),
        ([dense, tmp_path / "x"], "has no experts, so there is nothing to pack"),
        ([model, tmp_path / "packed"], "already exists. Use --force to replace it"),
        ([tmp_path / "packed", tmp_path / "packed", "--force"], "is the source model"),
    ):
        done = call("pack", *words)
        assert done.exit_code == 1
        assert message in done.stderr
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
    done = call("pack", model, tmp_path / "x", "--quantize", 7)
    assert done.exit_code == 2
    assert "'7' is not one of 2, 3, 4, 5, 6, 8 bits per weight" in done.stderr
    assert not (tmp_path / "x").exists()


def test_key_calibration_is_copied(model: Path, tmp_path, monkeypatch: pytest.MonkeyPatch):
    cached = tmp_path / "cached"
    monkeypatch.setattr(calibration, "folder", lambda: cached)
    options = {"kv": "k4v4", "context": 64, "device": "cpu"}
    wanted = load(model, **options).engine.cache.key_calibration
    assert call("pack", model, tmp_path / "packed").exit_code == 0
    cached.rename(tmp_path / "gone")
    found = load(tmp_path / "packed", **options).engine.cache.key_calibration
    assert found.digest == wanted.digest
    assert not cached.exists()
    # requantized weights have other keys
    (tmp_path / "gone").rename(cached)
    assert call("pack", model, tmp_path / "fewer", "--quantize", 4, "--group-size", 32).exit_code == 0
    assert not (tmp_path / "fewer" / calibration.MODEL_FILE).exists()
