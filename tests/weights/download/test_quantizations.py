"""Which files are one quantization, and which quantization fits a machine."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from auraflux.cli import main
from auraflux.errors import FetchError, FormatError
from auraflux.loading.recommendation import BOTH, DISK, GPU, MEMORY, Resources, fit, recommended
from auraflux.weights.download.hub import split_names
from auraflux.weights.download.quantizations import Mixture, Quantization, find_quantizations, group_files, sizes_in_name
from auraflux.weights.formats.headers import chosen_share
from tests.weights.formats.gguf_files import llama_tensors, write_gguf

GB = 10**9
MIXTURE = Mixture(experts=0.9, chosen=0.05)


def test_files_are_grouped():
    files = [
        ("Q4_K_M/big-Q4_K_M-00001-of-00002.gguf", 40),
        ("Q4_K_M/big-Q4_K_M-00002-of-00002.gguf", 30),
        ("big-UD-IQ1_S.gguf", 20),
        ("mmproj-F16.gguf", 5),
        ("imatrix.gguf", 1),
        ("README.md", 2),
    ]
    assert group_files(files, "org/big") == [
        Quantization("org/big/Q4_K_M/big-Q4_K_M-00001-of-00002.gguf", "Q4_K_M", 2, 70),
        Quantization("org/big/big-UD-IQ1_S.gguf", "UD-IQ1_S", 1, 20),
    ]
    shards = [(f"model-{i:05d}-of-00003.safetensors", 10) for i in (1, 2, 3)]
    assert group_files(shards, "org/big") == [Quantization("org/big", "safetensors", 3, 30)]


@pytest.mark.parametrize(
    ("name", "parameters", "active"),
    [
        ("org/Qwen3-30B-A3B-GGUF", 30 * GB, 3 * GB),
        ("org/Kimi-1T-A32B", 1000 * GB, 32 * GB),
        ("org/gemma-3-270m", None, None),
        ("org/Llama-3.1-8B-Instruct", 8 * GB, None),
    ],
)
def test_sizes_in_names(name: str, parameters: int | None, active: int | None):
    assert sizes_in_name(name) == (parameters, active)


def test_a_split_model_has_all_its_files():
    assert split_names("a/b-00002-of-00003.gguf") == [f"a/b-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert split_names("b.gguf") == ["b.gguf"]


def quantization(gigabytes: float) -> Quantization:
    return Quantization(f"q{gigabytes}", f"q{gigabytes}", 1, int(gigabytes * GB))


PC = Resources(memory_nbytes=34 * GB, memory_rate=50e9, gpu_nbytes=12 * GB, gpu_rate=500e9, disk_rate=5e9)


@pytest.mark.parametrize(
    ("gigabytes", "mixture", "place"),
    [(8, None, GPU), (8, MIXTURE, GPU), (25, None, MEMORY), (35, MIXTURE, BOTH), (70, MIXTURE, DISK), (70, None, None)],
)
def test_places(gigabytes: float, mixture: Mixture | None, place: str | None):
    found = fit(quantization(gigabytes), mixture, PC, local=True)
    assert found.place == place
    assert (found.tokens_per_s is None) == (place is None)


def test_speed_is_bytes_by_bandwidth():
    dense = fit(quantization(25), None, PC, local=True)
    assert dense.tokens_per_s == pytest.approx(2.0)
    mixture = fit(quantization(8), MIXTURE, PC, local=True)
    assert mixture.tokens_per_s == pytest.approx(500e9 / (8e9 * (0.1 + 0.9 * 0.05)))
    # more bytes are never faster
    rates = [fit(quantization(size), MIXTURE, PC, local=True).tokens_per_s or 0 for size in (4, 8, 16, 32, 64, 90)]
    assert rates == sorted(rates, reverse=True)


def test_the_largest_that_needs_no_disk_is_recommended():
    fits = [fit(quantization(size), MIXTURE, PC, local=True) for size in (90, 35, 20, 8)]
    chosen = recommended(fits)
    assert chosen is not None
    assert chosen.quantization.nbytes == 35 * GB
    only = [fit(quantization(size), MIXTURE, PC, local=True) for size in (90, 70)]
    assert recommended(only) is only[1]
    assert recommended([fit(quantization(70), None, PC, local=True)]) is None


def test_a_download_needs_room_on_the_disk():
    machine = Resources(memory_nbytes=64 * GB, memory_rate=50e9, disk_nbytes=10 * GB)
    assert "no room for the download" in fit(quantization(20), None, machine, local=False).reason
    assert fit(quantization(20), None, machine, local=True).place == MEMORY


def test_files_of_the_hub(monkeypatch: pytest.MonkeyPatch):
    def about(repository: str, files_metadata: bool) -> Any:
        assert files_metadata
        files = {"x-Q8_0.gguf": 32 * GB, "x-Q4_K_M.gguf": 18 * GB, "README.md": 1}
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name, size=size) for name, size in files.items()])

    monkeypatch.setattr("huggingface_hub.model_info", about)
    offer = find_quantizations("org/x-30B-A3B-GGUF")
    assert [each.label for each in offer.quantizations] == ["Q8_0", "Q4_K_M"]
    assert offer.mixture is not None
    assert offer.mixture.active == pytest.approx(0.1)
    monkeypatch.setattr("huggingface_hub.model_info", lambda *_, **__: (_ for _ in ()).throw(OSError("offline")))
    with pytest.raises(FetchError, match="could not be listed on the Hugging Face hub: offline"):
        find_quantizations("org/x")


def test_a_path_that_does_not_exist_is_refused():
    with pytest.raises(FormatError, match="there is no folder"):
        find_quantizations("/no/such/folder")


def test_the_command_chooses_from_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_gguf(tmp_path / "tiny-Q8_0.gguf", llama_tensors())
    monkeypatch.setattr("auraflux.ops.simd.peak_bandwidth.peak_read_bandwidth", lambda: {"all_threads": 10e9})
    run = CliRunner().invoke(main, ["recommend", str(tmp_path), "--json"])
    assert run.exit_code == 0, run.output
    found = json.loads(run.output)
    assert found["recommended"] == str(tmp_path / "tiny-Q8_0.gguf")
    table = CliRunner().invoke(main, ["recommend", str(tmp_path)]).output
    assert "→ Q8_0" in table
    assert "Recommended: Q8_0" in table


@pytest.mark.parametrize(
    ("config", "share"),
    [
        ({"num_experts": 128, "num_experts_per_tok": 8}, 1 / 16),
        ({"text_config": {"n_routed_experts": 64, "num_experts_per_tok": 4}}, 1 / 16),
        ({"num_experts": None}, None),
        ({"num_experts": 2, "num_experts_per_tok": 8}, None),
    ],
)
def test_chosen_share(config: dict[str, Any], share: float | None):
    assert chosen_share(config) == share
