"""Memory plans of a tiny mixture on a GPU, and a model with its experts in a pool."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from auraflux.cache import CacheSettings
from auraflux.errors import SettingsError
from auraflux.loading import gpu_plan, load
from auraflux.loading.gpu_plan import GpuPlan, plan_gpu, plan_gpu_memory
from auraflux.loading.memory_budget import RequestedSizes
from auraflux.loading.model_source import ModelSource
from auraflux.weights.experts.packed_files import stride_of
from auraflux.weights.experts.pool.gpu_pool import GpuExpertPool
from auraflux.weights.experts.settings import ExpertSettings
from tests.weights.experts.packed_folders import converted, hf_folder, packed

CPU = torch.device("cpu")
SIZES = RequestedSizes(None, None, 2, None, default_chunk=8192)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_folder(tmp_path_factory.mktemp("hf"), "qwen3_moe")


@pytest.fixture(scope="module")
def packed_mixture(mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    return packed(converted(mixture, folder / "mlx", bits=4, group=32), folder / "packed", lanes=1)


def source_of(path: Path) -> ModelSource:
    return ModelSource.open(path, CacheSettings("none"), mtp=False, ranks=None)


@pytest.fixture(autouse=True)
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stream experts for one chunk at a time: the tiny mixture's take less memory than the tokens of several."""
    monkeypatch.setattr("auraflux.loading.gpu_sizes.STREAM_TOKENS", 4096)


def too_small(path: Path) -> int:
    """Return a GPU's memory into which only some experts fit."""
    source = source_of(path)
    sizes = plan_gpu(source, 10**12, SIZES).sizes
    assert sizes.experts is not None
    cache = gpu_plan._CachePlanner(source, SIZES, torch.bfloat16).min_nbytes(4096)
    return sizes.weights + sizes.streaming_workspace(4096) + cache + sizes.experts.total // 2


def parts(plan: GpuPlan) -> int:
    division = plan.division
    return division.weights + division.workspace + division.cache + (division.slots or 0)


def test_all_is_resident_where_it_fits(mixture: Path):
    plan = plan_gpu(source_of(mixture), 10**12, SIZES)
    assert plan.slots is None
    assert plan.pooled is None
    assert plan.engine.context == 256
    assert plan.engine.tokens == 512
    assert plan.engine.chunk == 8192


@pytest.mark.parametrize("spare", [1.0, 1.1, 1.5, 4.0])
def test_parts_of_a_resident_model_fit(spare: float, mixture: Path):
    """The recent tokens of all sequences and a chunk's take memory, too, however short the context is."""
    source = ModelSource.open(mixture, CacheSettings("k4v4"), mtp=False, ranks=None)
    source = replace(source, config=replace(source.config, context=1 << 17))
    requested = RequestedSizes(None, None, 8, None, 8192)
    sizes, planner = plan_gpu(source, 10**12, requested).sizes, gpu_plan._CachePlanner(source, requested, torch.bfloat16)
    total = sizes.total + sizes.workspace(8192) + int(spare * planner.min_nbytes(8192))
    plan = plan_gpu(source, total, requested)
    assert plan.slots is None
    assert parts(plan) <= total


def test_some_experts_in_slots(mixture: Path):
    total = too_small(mixture)
    plan = plan_gpu(source_of(mixture), total, SIZES)
    assert plan.slots is not None
    assert 4 <= plan.slots < 10
    assert parts(plan) <= total
    assert plan.engine.chunk == 4096
    assert plan.pooled is not None


def test_context_and_cache_memory_are_respected(mixture: Path):
    total = too_small(mixture) + 10**6
    assert plan_gpu(source_of(mixture), total, RequestedSizes(100, None, 2, None, 8192)).engine.context == 100
    plan = plan_gpu(source_of(mixture), total, RequestedSizes(100, 512, 2, 10**6, 8192), ExpertSettings(3 * 10**5))
    assert plan.engine.chunk == 512
    assert plan.engine.tokens == 500
    assert plan.division.cache <= 10**6
    with pytest.raises(SettingsError, match="is too little"):
        plan_gpu(source_of(mixture), total, RequestedSizes(10**7, None, 2, None, 8192))


def test_unpacked_model_needs_host_memory(mixture: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_plan, "free_nbytes", lambda: 10**9)
    with pytest.raises(SettingsError, match=r"0 B can be used. Run 'auraflux pack'"):
        plan_gpu_memory(source_of(mixture), CPU, too_small(mixture), SIZES, ExpertSettings())


def test_settings_of_packed_experts_are_refused(mixture: Path):
    with pytest.raises(SettingsError, match="is not packed"):
        plan_gpu_memory(source_of(mixture), CPU, 10**12, SIZES, ExpertSettings(io="direct"))


def test_packed_model(packed_mixture: Path, monkeypatch: pytest.MonkeyPatch):
    source, total = source_of(packed_mixture), too_small(packed_mixture)
    resident = plan_gpu_memory(source, CPU, 10**12, SIZES, ExpertSettings())
    assert resident.pool is None
    assert resident.experts is not None
    assert resident.experts.resident
    pooled = plan_gpu_memory(source, CPU, total, SIZES, ExpertSettings())
    assert pooled.experts is None
    assert pooled.pool is not None
    assert pooled.pool.tier is None
    sizes = plan_gpu(source, 10**12, SIZES).sizes.experts
    assert sizes is not None
    direct = plan_gpu_memory(source, CPU, 10**12, SIZES, ExpertSettings(sizes.total // 2, io="direct"))
    assert direct.pool is not None
    assert direct.pool.tier is not None
    monkeypatch.setattr(gpu_plan, "free_nbytes", lambda: 10**9 + 10**5)
    disk = plan_gpu_memory(source, CPU, total, SIZES, ExpertSettings())
    assert disk.pool is not None
    assert disk.pool.tier is not None
    assert disk.experts is None
    assert disk.pool.plan.host == 9 * 10**4
    asked = plan_gpu_memory(source, CPU, total, SIZES, ExpertSettings(host_memory=10**5))
    assert asked.pool is not None
    assert asked.pool.plan.host == 10**5
    with pytest.raises(SettingsError, match=r"a token uses 2 experts of .* Give --expert-host-memory .* or more"):
        plan_gpu_memory(source, CPU, total, SIZES, ExpertSettings(host_memory=10**3))


def test_gpu_memory_needs_a_gpu(mixture: Path):
    with pytest.raises(SettingsError, match="the model runs on cpu"):
        load.load(mixture, device="cpu", gpu_memory="8GB")


@pytest.mark.parametrize("kind", ["hf", "packed", "disk"])
def test_model_with_pooled_experts(kind: str, mixture: Path, packed_mixture: Path, monkeypatch: pytest.MonkeyPatch):
    path = {"hf": mixture, "packed": packed_mixture, "disk": packed_mixture}[kind]
    options = {"device": "cpu", "kv": "none", "exact": True, "max_sequences": 2}
    ids = [5, 17]
    expected = load.load(path, **options).logits(ids)
    # a CPU holds dense experts in float32
    slots = {"hf": 9, "packed": 6, "disk": 6}[kind]
    sizes = plan_gpu(source_of(path), 10**12, SIZES).sizes.experts
    assert sizes is not None

    def pooled(source, device, free, requested, experts, leader):
        settings = ExpertSettings(slots * sizes.nbytes)
        if kind == "disk":
            settings = replace(settings, io="direct", host_memory=4 * stride_of(sizes.nbytes))
        return plan_gpu_memory(source, device, 10**12, requested, settings)

    monkeypatch.setattr(load, "plan_memory", pooled)
    model = load.load(path, **options)
    assert isinstance(model.experts, GpuExpertPool)
    assert any("experts:" in note for note in model.notes)
    found = model.logits(ids)
    assert (found - expected).norm() / expected.norm() < 2e-2
    assert model.experts.cache_stats().total.misses > 0
    assert len(list(model.tokens(ids, max_tokens=4, ignore_eos=True))) == 4
    assert model.stats.experts is not None
    assert (model.experts.cache_stats().total.from_disk > 0) == (kind == "disk")
