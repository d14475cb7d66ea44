"""Models with towers that are converted and packed."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import auraflux
from auraflux.cli import main
from auraflux.models import family
from auraflux.vision.families import Vision, open_vision, takes_images
from auraflux.weights.formats.checkpoint import open_checkpoint
from tests.vision.qwen_models import chat_folder, make, picture


def embeddings(folder: Path) -> torch.Tensor:
    """Return what a folder's tower makes of a picture."""
    checkpoint = open_checkpoint(folder)
    config = family(checkpoint.config).Config.from_hf(checkpoint.config)
    vision = open_vision(checkpoint, config, torch.device("cpu"), torch.float32)
    assert isinstance(vision, Vision), vision
    return vision.encoder.encode(vision.processor.prepare(picture(61, 40)))


def run(*words: Any) -> str:
    done = CliRunner().invoke(main, [*map(str, words)])
    assert done.exit_code == 0, done.output
    return done.output


def test_a_converted_model_has_its_tower_as_it_was(tmp_path: Path):
    make(tmp_path / "source")
    assert "note:" not in run("convert", tmp_path / "source", tmp_path / "target", "--bits", 4)
    assert takes_images(open_checkpoint(tmp_path / "target"))
    assert torch.equal(embeddings(tmp_path / "target"), embeddings(tmp_path / "source"))
    # and once more, from mlx's layout
    run("convert", tmp_path / "target", tmp_path / "again", "--bits", 4)
    assert torch.equal(embeddings(tmp_path / "again"), embeddings(tmp_path / "source"))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_packed_model_answers_about_images_as_its_source(device: str, tmp_path: Path):
    source, target = tmp_path / "source", tmp_path / "packed"
    run("convert", chat_folder(mixture=True), source)
    printed = run("pack", source, target, "--for", device)
    assert "note:" not in printed
    assert torch.equal(embeddings(target), embeddings(source))
    parts = [{"type": "image", "image": picture(61, 40)}, {"type": "text", "text": "What is this?"}]
    messages = [{"role": "user", "content": parts}]

    def answer(path: Path, **options: Any) -> str:
        model = auraflux.load(path, device, kv="none", exact=True, context=256, **options)
        found = "".join(model.chat(messages, max_tokens=24, temperature=0))
        assert model.engine.vision.encoder.runs == 1
        return found

    fewest = re.search(r"needs --expert-memory (\S+)", printed)
    assert fewest
    streamed = answer(target, expert_memory=fewest[1])
    assert streamed
    assert streamed == answer(source)
