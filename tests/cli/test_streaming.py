"""Packed models on the command line: budgets, figures of what was read, what `inspect` says, faults in one sentence."""

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
from auraflux.weights.checkpoint import open_checkpoint
from tests.models.oracles import save
from tests.models.test_qwen3_moe import qwen3_moe
from tests.run.toy_tokenizers import CHATML, byte_level, folder

KEEP = ["--context", "64", "--device", "cpu", "-n", "6", "-t", "0"]


@cache
def packed() -> Path:
    torch.manual_seed(0)
    path = Path(mkdtemp(prefix="auraflux-cli-packed-"))
    save(qwen3_moe(vocab_size=byte_level().get_vocab_size()), path / "source")
    folder(path / "source", byte_level(), tokenizer_config={"chat_template": CHATML, "eos_token": "<|im_end|>"})
    done = run("pack", path / "source", path / "packed", "--quantize", "4", "--group", "32")
    assert done.exit_code == 0, done.output
    return path / "packed"


def run(*words: str | Path, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words], input=stdin)


def least() -> int:
    files = open_checkpoint(packed()).experts
    assert files is not None
    return 3 * sum(file.stride for file in files.files)


def test_generate_shows_what_was_read():
    whole = run("generate", packed(), "-p", "one two three", *KEEP)
    done = run("generate", packed(), "-p", "one two three", *KEEP, "--expert-memory", str(least()), "--stats")
    assert done.exit_code == 0, done.output
    assert done.stdout == whole.stdout
    assert "of experts" in done.stderr
    assert "granted: 3 of 8 a layer are held, the others read as they are chosen" in done.stderr
    assert "model.layers.2.mlp" in done.stderr
    assert "GB read" in done.stderr
    assert "GB read" not in whole.stderr


def test_figures_in_json():
    words = ["--expert-memory", str(least()), "--expert-io", "direct", "--no-verify", "--json"]
    found = json.loads(run("generate", packed(), "-p", "one", *KEEP, *words).stdout)["stats"]["experts"]
    assert found["total"]["misses"] > 0
    assert found["total"]["nbytes"] == sum(layer["nbytes"] for layer in found["layers"].values())


def test_chat_shows_what_was_read():
    words = ["--expert-memory", str(least()), "--stats"]
    done = run("chat", packed(), *KEEP, *words, stdin="hello\n/stats\n/exit\n")
    assert done.exit_code == 0, done.output
    assert done.stderr.count("model.layers.0.mlp") == 2


def test_inspect_explains_budgets():
    done = run("inspect", packed(), "--expert-memory", "20kB")
    assert done.exit_code == 0, done.output
    assert "experts: 3 layers x 8" in done.stdout
    assert "GB/s of experts read directly" in done.stdout
    assert "refused: too little" in done.stdout
    found = json.loads(run("inspect", packed(), "--json").stdout)["experts"]
    assert found["least_nbytes"] == least()
    by_name = {row["name"]: row for row in found["budgets"]}
    assert by_name["least"]["slots"] == 3
    assert by_name["by default"]["mapped"]
    assert found["read_nbytes_per_s"]["direct"] > 0


def spoil(folder: Path) -> Path:
    shutil.copytree(packed(), folder)
    return folder


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--expert-memory", "9kB"],
            "9.00 kB for experts is too little: a layer gets 0 of 8, and a token uses 3. The least that",
        ),
        (["--expert-memory", "big"], "'big' is not a size. Write it like 4GB, 512MiB or 1.5G."),
    ],
)
def test_budgets_that_cannot_be_are_refused_in_one_sentence(words: list[str], message: str):
    done = run("generate", packed(), "-p", "one", *KEEP, *words)
    assert done.exit_code == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_cut_short_is_refused_in_one_sentence(tmp_path: Path):
    path = spoil(tmp_path / "model")
    file = sorted((path / "experts").glob("*.bin"))[1]
    os.truncate(file, file.stat().st_size - 4096)
    for command in (["generate", path, "-p", "one", *KEEP, "--expert-memory", str(least())], ["inspect", path]):
        done = run(*command)
        assert done.exit_code == 1
        assert f"{file.name} with the experts of model.layers.1.mlp has" in done.stderr


def test_a_flipped_byte_is_told_in_one_sentence(tmp_path: Path):
    path = spoil(tmp_path / "model")
    for file in (path / "experts").glob("*.bin"):
        whole = bytearray(file.read_bytes())
        for start in range(0, len(whole), 4096):
            whole[start] ^= 1
        file.write_bytes(whole)
    done = run("generate", path, "-p", "one", *KEEP, "--expert-memory", str(least()))
    assert done.exit_code == 1
    assert "holds other bytes than were packed" in done.stderr


def test_a_model_that_is_not_packed_takes_no_budget():
    done = run("generate", packed().parent / "source", "-p", "one", *KEEP, "--expert-memory", "4GB")
    assert done.exit_code == 1
    assert "is not packed" in done.stderr
