"""Manifests of packed experts: contents, and hostile ones that are refused."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from auraflux.errors import FormatError
from auraflux.ops.simd.isa import ISA
from auraflux.quant import quantize
from auraflux.weights.experts.packed_files import ALIGNMENT, open_experts, write_format
from auraflux.weights.formats.checkpoint import open_checkpoint
from tests.weights.experts.packed_folders import experts_of, hf_folder, packed


@pytest.fixture(scope="module")
def packed_model(tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("packed")
    return packed(hf_folder(base / "hf"), base / "packed", bits=4, group=32)


@pytest.fixture
def folder(packed_model: Path, tmp_path) -> Path:
    """Copy of the packed model that a test may change."""
    made = tmp_path / "packed"
    (made / "experts").mkdir(parents=True)
    for path in packed_model.rglob("*"):
        if path.is_file():
            (made / path.relative_to(packed_model)).write_bytes(path.read_bytes())
    return made


def rewrite(folder: Path, change: Callable[[Any], Any]) -> None:
    path = folder / "experts" / "manifest.json"
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


def test_files_checksums_and_shapes(packed_model: Path):
    found = experts_of(packed_model)
    assert (found.count, found.hidden, found.inner, found.model_type) == (5, 128, 64, "qwen3_moe")
    assert [file.module for file in found.files] == ["model.layers.0.mlp", "model.layers.2.mlp"]
    assert found.source.startswith("sha256:")
    for file in found.files:
        assert file.stride % ALIGNMENT == 0
        assert 0 <= file.stride - file.nbytes < ALIGNMENT
        data = file.path.read_bytes()
        assert len(data) == file.file_nbytes
        for expert in range(found.count):
            start = file.offset(expert)
            assert zlib.crc32(data[start : start + file.nbytes]) == file.checksum(expert)
            assert not any(data[start + file.nbytes : start + file.stride])


def test_a_packed_folder_is_a_checkpoint(packed_model: Path):
    checkpoint = open_checkpoint(packed_model)
    assert checkpoint.experts is not None
    assert checkpoint.form == "mlx"
    assert not any("switch_mlp" in name for name in checkpoint.sizes())


def test_each_mixture_has_its_file(packed_model: Path):
    found = experts_of(packed_model)
    assert found.file_of("model.layers.2.mlp", 5, 128, 64).path.name == "layer_002.bin"
    with pytest.raises(FormatError, match=r"names no file with the experts of model\.layers\.1\.mlp"):
        found.file_of("model.layers.1.mlp", 5, 128, 64)
    with pytest.raises(FormatError, match="holds 5 experts per layer of widths 128 and 64; the model has 8 of 128 and 64"):
        found.file_of("model.layers.2.mlp", 8, 128, 64)


def test_a_truncated_file_is_named(folder: Path):
    path = folder / "experts" / "layer_002.bin"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - 1)
    with pytest.raises(
        FormatError, match=rf"layer_002\.bin .*model\.layers\.2\.mlp has {size - 1} bytes, not the expected {size}"
    ):
        open_experts(folder).check()


def test_a_missing_file_is_named(folder: Path):
    (folder / "experts" / "layer_000.bin").unlink()
    with pytest.raises(FormatError, match=r"layer_000\.bin .*cannot be read: No such file"):
        open_experts(folder).check()


def set_to(*keys: Any, to: Any) -> Callable[[Any], None]:
    def change(found: Any) -> None:
        for key in keys[:-1]:
            found = found[key]
        found[keys[-1]] = to

    return change


HOSTILE = {
    "other-format": (set_to("format", to="zip"), "'format' is 'zip'"),
    "later-version": (set_to("version", to=3), "its version is 3; this auraflux reads version 2"),
    "absolute-path": (
        set_to("layers", 0, "file", to="/etc/passwd"),
        "must be the name of a .bin file in the manifest's folder",
    ),
    "path-upwards": (set_to("layers", 0, "file", to="../config.bin"), "must be the name of a .bin file"),
    "path-with-nul": (set_to("layers", 0, "file", to="a\0.bin"), "must be the name of a .bin file"),
    "number-as-file": (set_to("layers", 0, "file", to=7), "'file' is 7, not a string"),
    "same-file-twice": (set_to("layers", 1, "file", to="layer_000.bin"), "two layers have the same 'file'"),
    "module-of-no-layer": (set_to("layers", 0, "module", to="model.layer.0.mlp"), "must be in a layer"),
    "same-module-twice": (set_to("layers", 1, "module", to="model.layers.0.mlp"), "two layers have the same 'module'"),
    "huge-count": (set_to("count", to=1 << 60), "'count' is .*; it must be an integer from 1 to 65536"),
    "huge-width": (set_to("hidden", to=1 << 40), "'hidden' is"),
    "no-width": (set_to("inner", to=0), "'inner' is 0"),
    "negative-lanes": (set_to("lanes", to=-16), "'lanes' is -16"),
    "bool-for-a-number": (set_to("lanes", to=True), "'lanes' is True"),
    "string-for-a-number": (set_to("count", to="5"), "'count' is '5'"),
    "other-width": (set_to("hidden", to=256), "'nbytes' of a format is"),
    "odd-width": (set_to("inner", to=63), "cannot be stored in groups of 32"),
    "no-such-bits": (set_to("formats", 0, "gate", "bits", to=7), "7 bits in groups of 32 is not a format"),
    "no-such-dtype": (set_to("formats", 0, "gate", "scales", to="complex64"), "scales are 'complex64'"),
    "bytes-for-scales": (set_to("formats", 0, "up", "scales", to="uint8"), "scales have dtype torch.uint8"),
    "short-stride": (set_to("formats", 0, "stride", to=4096), "'stride' of a format is 4096"),
    "other-offsets": (set_to("formats", 0, "down", "offsets", "packed", to=0), "'down' of a format is"),
    "no-matrix": (set_to("formats", 0, "down", to=None), "'down' is None, not an object"),
    "no-formats": (set_to("formats", to=[]), "'formats' must be a list of 1 to 4096 objects"),
    "layers-as-object": (set_to("layers", to={}), "'layers' must be a list"),
    "no-such-format": (set_to("layers", 0, "format", to=3), "'format' of model.layers.0.mlp is 3; there are 1 formats"),
    "format-from-the-end": (set_to("layers", 0, "format", to=-1), "is -1; there are 1 formats"),
    "few-checksums": (set_to("layers", 0, "crc32", to="00000000"), "has checksums of 1 experts, not of 5"),
    "short-checksum": (set_to("layers", 0, "crc32", to="000000"), "'crc32' of model.layers.0.mlp is not hexadecimal"),
    "no-checksums": (set_to("layers", 0, "crc32", to=None), "'crc32' is None, not a string"),
    "words-for-checksums": (set_to("layers", 0, "crc32", to="x" * 40), "is not hexadecimal"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_manifest_is_refused(name: str, folder: Path):
    change, message = HOSTILE[name]
    rewrite(folder, change)
    with pytest.raises(FormatError, match=f"manifest.json is not an expert manifest: .*{message}"):
        open_checkpoint(folder)


def test_codes_in_the_layout_of_an_earlier_version_are_refused(folder: Path):
    rewrite(folder, set_to("version", to=1))
    assert open_experts(folder).lanes == ISA.lanes
    shapes = {"gate": (64, 128), "up": (64, 128), "down": (128, 64)}
    like = {kind: quantize(torch.zeros(shape), 6, 64).interleave(ISA.lanes) for kind, shape in shapes.items()}
    rewrite(folder, set_to("formats", to=[write_format(like)]))
    with pytest.raises(FormatError, match=r"packed 6-bit codes in another layout\. Pack the model again"):
        open_experts(folder)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"count": ' + "9" * 5000 + "}", "\xff", "[" * 100_000])
def test_invalid_json_is_refused(text: str, folder: Path):
    (folder / "experts" / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(
        FormatError, match=r"manifest\.json (cannot be read as JSON|holds list|is not text|has objects or lists nested)"
    ):
        open_checkpoint(folder)


def test_a_manifest_of_gigabytes_is_not_read(folder: Path):
    with (folder / "experts" / "manifest.json").open("r+b") as file:
        file.truncate(1 << 32)
    with pytest.raises(FormatError, match=r"manifest\.json has more than 67,108,864 bytes"):
        open_checkpoint(folder)
