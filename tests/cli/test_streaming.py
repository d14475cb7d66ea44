"""Packed models on the command line: expert cache sizes and statistics, `inspect`, errors in one sentence."""

import json
import os
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from click.testing import CliRunner, Result

from auraflux.cli import main
from auraflux.weights.formats.checkpoint import open_checkpoint
from tests.models.oracles import save
from tests.models.test_qwen3_moe import qwen3_moe
from tests.tokenizer.toy_tokenizers import CHATML, byte_level, folder

SMALL = ["--context", "64", "--device", "cpu", "-n", "6", "-t", "0"]


@cache
def packed() -> Path:
    torch.manual_seed(0)
    path = Path(mkdtemp(prefix="auraflux-cli-packed-"))
    save(qwen3_moe(vocab_size=byte_level().get_vocab_size()), path / "source")
    folder(path / "source", byte_level(), tokenizer_config={"chat_template": CHATML, "eos_token": "<|im_end|>"})
    done = run("pack", path / "source", path / "packed", "--quantize", "4", "--group-size", "32")
    assert done.exit_code == 0, done.output
    return path / "packed"


def run(*words: str | Path, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words], input=stdin)


def least() -> int:
    files = open_checkpoint(packed()).experts
    assert files is not None
    return 3 * sum(file.stride for file in files.files)


def test_generate_shows_expert_cache_statistics():
    resident = run("generate", packed(), "-p", "one two three", *SMALL)
    done = run("generate", packed(), "-p", "one two three", *SMALL, "--expert-memory", str(least()), "--stats")
    assert done.exit_code == 0, done.output
    assert done.stdout == resident.stdout
    assert "of experts" in done.stderr
    assert "budget: 3 of 8 per layer are cached, the others are read on demand" in done.stderr
    assert "model.layers.2.mlp" in done.stderr
    assert "GB read" in done.stderr
    assert "GB read" not in resident.stderr


def test_expert_cache_statistics_in_json():
    words = ["--expert-memory", str(least()), "--expert-io", "direct", "--no-verify", "--json"]
    found = json.loads(run("generate", packed(), "-p", "one", *SMALL, *words).stdout)["stats"]["experts"]
    assert found["total"]["misses"] > 0
    assert found["total"]["nbytes"] == sum(layer["nbytes"] for layer in found["layers"].values())


def test_chat_shows_expert_cache_statistics():
    words = ["--expert-memory", str(least()), "--stats"]
    done = run("chat", packed(), *SMALL, *words, stdin="hello\n/stats\n/exit\n")
    assert done.exit_code == 0, done.output
    assert done.stderr.count("model.layers.0.mlp") == 2


def test_inspect_shows_cache_sizes():
    done = run("inspect", packed(), "--expert-memory", "20kB")
    assert done.exit_code == 0, done.output
    assert "experts: 3 layers x 8" in done.stdout
    assert "GB/s for direct expert reads" in done.stdout
    assert "refused: too small" in done.stdout
    found = json.loads(run("inspect", packed(), "--json").stdout)["experts"]
    assert found["least_nbytes"] == least()
    by_name = {row["name"]: row for row in found["budgets"]}
    assert by_name["minimum"]["slots"] == 3
    assert by_name["default"]["mapped"]
    assert found["read_nbytes_per_s"]["direct"] > 0


def copy_of_packed(folder: Path) -> Path:
    shutil.copytree(packed(), folder)
    return folder


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--expert-memory", "9kB"],
            "9.00 kB for experts is too little: a layer gets 0 of 8, and a token uses 3. The minimum is",
        ),
        (["--expert-memory", "big"], "'big' is not a size. Write it like 4GB, 512MiB or 1.5G."),
    ],
)
def test_invalid_cache_sizes_are_refused_in_one_sentence(words: list[str], message: str):
    done = run("generate", packed(), "-p", "one", *SMALL, *words)
    assert done.exit_code == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_cut_short_is_refused_in_one_sentence(tmp_path: Path):
    path = copy_of_packed(tmp_path / "model")
    file = sorted((path / "experts").glob("*.bin"))[1]
    os.truncate(file, file.stat().st_size - 4096)
    for command in (["generate", path, "-p", "one", *SMALL, "--expert-memory", str(least())], ["inspect", path]):
        done = run(*command)
        assert done.exit_code == 1
        assert f"{file.name} with the experts of model.layers.1.mlp has" in done.stderr


def test_a_flipped_byte_is_reported_in_one_sentence(tmp_path: Path):
    path = copy_of_packed(tmp_path / "model")
    for file in (path / "experts").glob("*.bin"):
        content = bytearray(file.read_bytes())
        for start in range(0, len(content), 4096):
            content[start] ^= 1
        file.write_bytes(content)
    done = run("generate", path, "-p", "one", *SMALL, "--expert-memory", str(least()))
    assert done.exit_code == 1
    assert "does not match its checksum" in done.stderr


def test_a_model_that_is_not_packed_refuses_expert_memory():
    done = run("generate", packed().parent / "source", "-p", "one", *SMALL, "--expert-memory", "4GB")
    assert done.exit_code == 1
    assert "is not packed" in done.stderr
