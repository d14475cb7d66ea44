"""A model with experts on disk below a pool, served to many requests while reads fail."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from auraflux.engine.compile_ahead import compile_ahead
from auraflux.engine.request import Output, Request
from auraflux.engine.sampling import Sampling
from auraflux.loading import load
from auraflux.loading.gpu_plan import plan_gpu, plan_gpu_memory
from auraflux.loading.language_model import LanguageModel
from auraflux.weights.experts.packed_files import stride_of
from auraflux.weights.experts.pool.gpu_pool import GpuExpertPool
from auraflux.weights.experts.settings import ExpertSettings
from tests.models.oracles import save
from tests.models.test_qwen3_moe import qwen3_moe
from tests.weights.experts.packed_folders import converted, packed

# few without a GPU, where the reference runs
REQUESTS, TOKENS = {"cpu": 24, "cuda": 64}, 6
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def model(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LanguageModel:
    source = save(qwen3_moe(), tmp_path / "hf")
    path = packed(converted(source, tmp_path / "mlx", bits=4, group=64), tmp_path / "packed", lanes=1)

    def on_disk(source, device, free, requested, *rest, **more):
        sizes = plan_gpu(source, 10**12, requested).sizes.experts
        assert sizes is not None
        # room for all experts of a layer, so that no step is streamed, which needs a GPU
        slots, host = (sizes.count + more for more in (1, 0))
        settings = ExpertSettings(slots * sizes.nbytes, io="direct", host_memory=host * stride_of(sizes.nbytes))
        return plan_gpu_memory(source, device, 10**12, requested, settings)

    # with a GPU, and without one
    for name in ("plan_gpu_memory", "plan_memory"):
        monkeypatch.setattr(load, name, on_disk)
    options = {"exact": True} if request.param == "cpu" else {"invariant": True}
    return load.load(path, device=request.param, kv="none", max_sequences=4, chunk=4, **options)


@contextmanager
def failing(model: LanguageModel) -> Iterator[None]:
    """Let all reads fail inside the block."""
    assert isinstance(model.experts, GpuExpertPool)
    assert model.experts.tier is not None
    handles = [layer.handle for layer in model.experts.tier._layers]
    kept, other = [os.dup(handle) for handle in handles], os.open(os.devnull, os.O_WRONLY)
    for handle in handles:
        os.dup2(other, handle)
    yield
    for handle, again in zip(handles, kept, strict=True):
        os.dup2(again, handle)
        os.close(again)
    os.close(other)


def run(model: LanguageModel, prompts: list[tuple[int, ...]], faults: float) -> list[Output]:
    """Serve all prompts, a share of the steps with failing reads; return the joined output of each."""
    chance, outputs = random.Random(1), [[] for _ in prompts]
    sampling = Sampling(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    for prompt, each in zip(prompts, outputs, strict=True):
        model.scheduler.submit(Request(prompt, sampling), each.append)
    while not model.scheduler.idle:
        if chance.random() < faults:
            with failing(model):
                model.scheduler.step()
        else:
            model.scheduler.step()
    for each in outputs:
        assert [output.finish_reason for output in each][:-1] == [None] * (len(each) - 1)
    tokens = [tuple(token for output in each for token in output.tokens) for each in outputs]
    return [
        Output(tokens=mine, finish_reason=each[-1].finish_reason, error=each[-1].error)
        for mine, each in zip(tokens, outputs, strict=True)
    ]


def test_requests_survive_the_read_errors_of_others(model: LanguageModel):
    chosen, requests = random.Random(0), REQUESTS[model.engine.device.type]
    prompts = [tuple(chosen.randrange(1, 60) for _ in range(chosen.randrange(1, 9))) for _ in range(requests)]
    with model.engine.graphs.disabled():
        compile_ahead(lambda: run(model, prompts, 0.0), model.engine.device)
    # the prefix cache has what was not computed
    model.reset()
    expected = run(model, prompts, 0.0)
    found = run(model, prompts, 0.05)
    failed = [each for each in found if each.finish_reason == "error"]
    assert 4 <= len(failed) <= requests - 4
    for mine, theirs in zip(found, expected, strict=True):
        if mine.finish_reason == "error":
            assert mine.tokens == theirs.tokens[: len(mine.tokens)]
            assert mine.error is not None
            assert mine.error.count(". ") == 0
            assert "cannot be read: " in mine.error
            assert mine.error.endswith("gives an error (Bad file descriptor).")
        else:
            assert (mine.tokens, mine.finish_reason) == (theirs.tokens, "length")
    assert [each.tokens for each in run(model, prompts[:8], 0.0)] == [each.tokens for each in expected[:8]]
