"""A packed model on a GPU with its experts on disk gives the logits of the same model with all of them on the GPU."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from auraflux.engine.request import Output, Request
from auraflux.engine.sampling import Sampling
from auraflux.loading import load
from auraflux.loading.language_model import LanguageModel
from auraflux.weights.experts.packed_files import open_experts
from auraflux.weights.experts.pool.gpu_pool import GpuExpertPool
from auraflux.weights.experts.settings import ExpertSettings
from tests.weights.experts.packed_folders import converted, hf_folder, packed

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("model")
    return packed(converted(hf_folder(home / "hf"), home / "mlx", bits=4, group=32), home / "packed", lanes=1)


def on_disk(folder: Path) -> LanguageModel:
    files = open_experts(folder)
    each = max(file.stride for file in files.files)
    # slots for more than a layer's experts, host memory for fewer
    slots, host = (files.count + 1) * each, (files.count - 1) * each
    settings = ExpertSettings(slots, io="direct", host_memory=host)
    model = load.load(folder, device="cuda", kv="none", expert_memory=settings, max_sequences=4)
    assert isinstance(model.experts, GpuExpertPool)
    assert model.experts.tier is not None
    return model


def logits(model: LanguageModel, prompt: list[int], following: list[int]) -> Tensor:
    engine = model.engine
    sequence = engine.cache.open()
    try:
        engine.prefill([sequence], [prompt])
        batch = engine.decode_batch([sequence])
        return torch.cat([engine.decode(batch, [token]).clone() for token in following])
    finally:
        sequence.close()


def test_logits_equal_those_of_resident_experts(folder: Path):
    prompt, following = torch.randint(1, 60, (100,)).tolist(), torch.randint(1, 60, (24,)).tolist()
    expected = logits(load.load(folder, device="cuda", kv="none", max_sequences=4), prompt, following)
    model = on_disk(folder)
    assert torch.equal(logits(model, prompt, following), expected)
    assert model.engine.graphs.refused is None
    assert model.experts is not None
    assert model.experts.cache_stats().total.from_disk > 0


def test_requests_survive_a_corrupt_expert(folder: Path):
    model = on_disk(folder)

    def run() -> list[Output]:
        outputs: list[list[Output]] = [[] for _ in range(8)]
        for number, each in enumerate(outputs):
            sampling = Sampling(temperature=0, max_tokens=8, ignore_eos=True)
            model.scheduler.submit(Request((3 + number, 7, 11 * number + 1), sampling), each.append)
        while not model.scheduler.idle:
            model.scheduler.step()
        return [each[-1] for each in outputs]

    assert all(each.finish_reason == "length" for each in run())
    files = [file.path for file in open_experts(folder).files]
    data = [path.read_bytes() for path in files]
    for path, each in zip(files, data, strict=True):
        path.write_bytes(bytes(len(each)))
    failed = [each.error for each in run() if each.finish_reason == "error"]
    assert failed
    assert all(error is not None and "does not match its checksum" in error for error in failed)
    for path, each in zip(files, data, strict=True):
        path.write_bytes(each)
    assert all(each.finish_reason == "length" for each in run())
