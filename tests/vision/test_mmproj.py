"""mmproj files: towers in GGUF against the same weights in a folder, their choice, and what is refused."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from auraflux.errors import FormatError, SettingsError
from auraflux.models import family
from auraflux.vision.families import NoVision, Vision, open_vision, takes_images
from auraflux.weights.formats.checkpoint import open_checkpoint
from tests.models.oracles import error
from tests.vision import test_gemma3, test_gemma4, test_kimi, test_pixtral
from tests.vision.mmproj_files import write_mmproj
from tests.vision.qwen_models import PREPROCESSOR, make, picture

CPU = torch.device("cpu")
NAMES = {
    "<|image_pad|>": 250,
    "<start_of_image>": 250,
    "<end_of_image>": 251,
    "<image_soft_token>": 252,
    "<|image|>": 252,
    "<|image>": 250,
    "<image|>": 251,
    "<|media_pad|>": 250,
    "[IMG]": 100,
    "[IMG_BREAK]": 101,
    "[IMG_END]": 102,
}
PIXELS = {"image_min_pixels": 256, "image_max_pixels": 8192}
SETTINGS = {"image_mean": PREPROCESSOR["image_mean"], "image_std": PREPROCESSOR["image_std"]}
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
# how a family's folder is made, model_type of its GGUF files, metadata beside the sizes
MODELS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "qwen": (lambda path: make(path), "qwen3_5_text", {"spatial_merge_size": 2, **PIXELS, **SETTINGS}),
    "gemma3": (
        lambda path: test_gemma3.Made(path, *test_gemma3.SIZES["even"]),
        "gemma3_text",
        {"projector.scale_factor": 2, **HALF},
    ),
    "gemma4": (
        lambda path: test_gemma4.Made(path, *test_gemma4.VARIANTS["mixture"]),
        "gemma4_text",
        {"projector.scale_factor": 2},
    ),
    "gemma4 small": (lambda path: test_gemma4.Made(path, *test_gemma4.VARIANTS["small"]), "gemma4_text", {}),
    "kimi": (
        lambda path: test_kimi.make(path),
        "deepseek_v3",
        {"projector.scale_factor": 2, "image_max_pixels": 128 * 16, "image_mean": test_kimi.MEAN, "image_std": test_kimi.STD},
    ),
    "pixtral": (lambda path: test_pixtral.make(path, "mistral"), "llama", {"spatial_merge_size": 2}),
}


class Pair:
    """The tower of a folder, and the GGUF model that it belongs to, of which only the config is there."""

    def __init__(self, folder: Path, name: str):
        self.folder, (make_folder, kind, self.metadata) = folder, MODELS[name]
        made = make_folder(folder)
        self.model = made
        checkpoint = open_checkpoint(folder)
        self.language = family(checkpoint.config).Config.from_hf(checkpoint.config)
        found = open_vision(checkpoint, self.language, CPU, torch.float32, NAMES.get)
        assert isinstance(found, Vision), found
        self.vision = found
        text = {**checkpoint.config["text_config"], "model_type": kind}
        if name == "qwen":
            # as read from a GGUF file
            text["mrope_section"] = text.pop("rope_parameters")["mrope_section"]
        self.gguf: Any = SimpleNamespace(form="gguf", path=folder / "model.gguf", config=text)

    def open(self, projector: Path | None = None) -> Vision | NoVision:
        return open_vision(self.gguf, self.language, CPU, torch.float32, NAMES.get, None, projector)


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"), request.param)


def test_embeddings_are_those_of_the_folder(pair, tmp_path):
    found = pair.open(write_mmproj(pair.folder, tmp_path / "mmproj.gguf", **pair.metadata))
    assert isinstance(found, Vision), found
    wanted = pair.vision.processor
    if hasattr(wanted, "most_side"):
        # the file has no limit on sides
        wanted = replace(wanted, most_side=512)
    if hasattr(wanted, "most_tokens"):
        # the file has no number of tokens
        assert found.processor.most_tokens == 280
        wanted = replace(wanted, most_tokens=280)
        assert found.both_ways == (pair.vision.both_ways and replace(pair.vision.both_ways, most_tokens=280))
    else:
        assert found.both_ways == pair.vision.both_ways
    assert found.processor == wanted
    assert (found.axes is None) == (pair.vision.axes is None)
    if found.axes is not None:
        assert (found.axes == pair.vision.axes).all()
    for size in ((37, 91), (200, 31), (8, 8)):
        image = pair.vision.processor.prepare(picture(*size))
        assert error(found.encoder.encode(image), pair.vision.encoder.encode(image)) < 1e-6


@pytest.mark.parametrize(("kind", "most"), [("F16", 1e-3), ("BF16", 1e-2), ("Q8_0", 2e-2)])
def test_other_formats(tmp_path_factory, kind, most):
    vision = {"hidden_size": 96, "intermediate_size": 64}
    folder = tmp_path_factory.mktemp("wide")
    make(folder, vision)
    checkpoint = open_checkpoint(folder)
    language = family(checkpoint.config).Config.from_hf(checkpoint.config)
    wanted = open_vision(checkpoint, language, CPU, torch.float32, NAMES.get)
    gguf: Any = SimpleNamespace(
        form="gguf", path=folder / "m.gguf", config={**checkpoint.config["text_config"], "model_type": "qwen3_5_text"}
    )
    path = write_mmproj(folder, folder / "mmproj.gguf", kind, **PIXELS, **SETTINGS)
    found = open_vision(gguf, language, CPU, torch.float32, NAMES.get, None, path)
    assert isinstance(wanted, Vision)
    assert isinstance(found, Vision), found
    image = wanted.processor.prepare(picture(37, 91))
    assert 0 < error(found.encoder.encode(image), wanted.encoder.encode(image)) < most


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Pair:
    return Pair(tmp_path_factory.mktemp("qwen"), "qwen")


@pytest.fixture(scope="module")
def gemma(tmp_path_factory) -> Pair:
    return Pair(tmp_path_factory.mktemp("gemma"), "gemma3")


def test_a_file_beside_the_model_is_found(qwen, gemma, tmp_path):
    qwen.gguf.path = tmp_path / "model.gguf"
    assert isinstance(found := qwen.open(), NoVision)
    assert "--mmproj" in found.reason
    assert not takes_images(qwen.gguf)
    # of another model
    write_mmproj(gemma.folder, tmp_path / "mmproj-BF16.gguf", **gemma.metadata)
    assert isinstance(found := qwen.open(), NoVision)
    assert "gemma3" in found.reason
    assert not takes_images(qwen.gguf)
    (tmp_path / "mmproj-damaged.gguf").write_bytes(b"GGUF")
    write_mmproj(qwen.folder, tmp_path / "model.mmproj-f16.gguf", "F16", **qwen.metadata)
    write_mmproj(qwen.folder, tmp_path / "mmproj-q.gguf", "Q8_0", **{**qwen.metadata, "image_max_pixels": 4096})
    assert isinstance(found := qwen.open(), Vision)
    assert found.processor.max_pixels == 8192
    assert takes_images(qwen.gguf)


def refused(pair: Pair, path: Path, said: str) -> None:
    with pytest.raises(FormatError, match=said) as caught:
        pair.open(path)
    assert "\n" not in str(caught.value)


def test_files_that_do_not_fit_are_refused(qwen, gemma, tmp_path):
    gguf = lambda **metadata: write_mmproj(qwen.folder, tmp_path / "mmproj.gguf", **{**qwen.metadata, **metadata})  # noqa: E731
    refused(qwen, tmp_path / "none.gguf", "there is no")
    refused(qwen, write_mmproj(gemma.folder, tmp_path / "other.gguf", **gemma.metadata), "not one of a qwen3_5_text model")
    refused(qwen, gguf(projection_dim=64), "projects to 64 channels")
    refused(qwen, gguf(embedding_length=96), "shape")
    refused(qwen, gguf(block_count=3), "missing")
    refused(qwen, gguf(**{"attention.head_count": 7}), "heads")
    refused(qwen, gguf(patch_size=1 << 30), "patch_size")
    (tmp_path / "mmproj.gguf").write_bytes(b"GGUF" + bytes(30))
    refused(qwen, tmp_path / "mmproj.gguf", "cannot be read")
    with pytest.raises(SettingsError, match="its own tower"):
        open_vision(open_checkpoint(qwen.folder), qwen.language, CPU, torch.float32, projector=tmp_path / "mmproj.gguf")


def test_older_files_of_gemma_have_the_linear_layers_the_other_way_around(gemma, tmp_path, monkeypatch):
    swap = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
    from tests.vision import mmproj_files

    renamed = mmproj_files._renamed

    def older(name: str, names: Any) -> str:
        found = renamed(name, names)
        module = found.split(".")[-2]
        return found.replace(module, swap.get(module, module))

    monkeypatch.setattr(mmproj_files, "_renamed", older)
    found = gemma.open(write_mmproj(gemma.folder, tmp_path / "mmproj.gguf", **gemma.metadata))
    assert isinstance(found, Vision), found
    image = gemma.vision.processor.prepare(picture(37, 91))
    assert error(found.encoder.encode(image), gemma.vision.encoder.encode(image)) < 1e-6


def test_other_projectors_are_named(qwen, tmp_path):
    path = write_mmproj(qwen.folder, tmp_path / "mmproj.gguf", **qwen.metadata)
    path.write_bytes(path.read_bytes().replace(b"qwen3vl_merger", b"qwen9vl_merger"))
    refused(qwen, path, "qwen9vl_merger.*are supported")
