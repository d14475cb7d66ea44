"""Ranks on one GPU: a group of one with collectives through NCCL, and processes that share the GPU and use gloo.

NCCL refuses two ranks on one GPU. So these tests show that steps with NCCL calls are captured and replayed; the results of
several ranks are tested on CPUs, in `test_graphs.py` and the other files.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from auraflux.distributed.comm import collectives
from auraflux.distributed.comm.collectives import Subgroup
from auraflux.distributed.comm.group import Group, open_rendezvous
from auraflux.distributed.comm.mesh import Mesh
from auraflux.distributed.parallel import LOCAL, Parallel
from auraflux.distributed.rank_runner import THROUGH_MEMORY
from auraflux.errors import SettingsError
from auraflux.loading.language_model import LanguageModel
from auraflux.loading.load import load
from tests.distributed.threaded_ranks import OneRank, decoded
from tests.models.oracles import error, save, tokens
from tests.models.test_gpt_oss import gpt_oss
from tests.models.test_llama import llama
from tests.models.test_qwen3_5_moe import qwen3_5_moe
from tests.models.test_qwen3_moe import qwen3_moe

pytestmark = pytest.mark.gpu
# heads of 32: kernels do not quantize narrower ones
MODELS = {"llama": lambda: llama(head_dim=32), "qwen3_moe": qwen3_moe, "qwen3_5_moe": qwen3_5_moe, "gpt_oss": gpt_oss}
OPTIONS: dict[str, Any] = {"context": 256, "chunk": 16, "max_sequences": 4, "calibrate": "off"}
STEPS = 8
ROUNDING = 0.02  # of bf16, where sums are added in another order or by another kernel


@cache
def saved(name: str) -> tuple[Path, list[int]]:
    torch.manual_seed(0)
    model = MODELS[name]()
    return save(model, Path(mkdtemp(prefix="auraflux-ranks-"))), tokens(model, 90)


def alone_on(path: Path, device: str, **options: Any) -> LanguageModel:
    """Load one process that prefills as ranks do, in chunks without padding."""
    made = load(path, device=device, **OPTIONS, **options)
    made.engine.graphs.prefill_refused = "ranks do not"
    return made


@contextmanager
def on_ranks(path: Path, layout: Parallel, device: str, **options: Any) -> Iterator[LanguageModel]:
    made = load(path, device=device, parallel=layout, **OPTIONS, **options)
    try:
        yield made
    finally:
        made.engine.ranks.close()


def recordings(model: LanguageModel) -> int:
    return sum(step.recording is not None for step in model.engine.graphs._steps.values())


def generated(model: LanguageModel, ids: list[int]) -> list[int]:
    return list(model.tokens(ids[:40], max_tokens=24, temperature=0, ignore_eos=True))


def test_an_nccl_call_is_captured_and_replayed():
    place, server = open_rendezvous(LOCAL, 0)
    mesh = Mesh(1, 1, ("tensor",))
    group = Group(place, 1, 0, 1, 15.0)
    group.open_nccl(mesh)
    given = torch.ones(3, 4, device="cuda", dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = Subgroup(group, mesh.peers(0)).all_reduce(2 * given)
    for number in (3.0, 5.0):
        given.fill_(number)
        graph.replay()
        assert (found == 2 * number).all()
    # reset the graph before NCCL, which would wait for it
    del graph
    group.close()
    assert group.devices is None
    del server


@pytest.mark.parametrize(
    ("name", "mode", "kv"),
    [
        ("llama", "tensor", "none"),
        ("llama", "tensor", "k4v4"),
        ("gpt_oss", "tensor", "none"),
        ("qwen3_5_moe", "tensor", "k4v4"),
        ("qwen3_moe", "experts", "none"),
        ("qwen3_moe", "experts", "k4v4"),
    ],
)
def test_steps_with_nccl_calls_are_captured(name: str, mode: str, kv: str, monkeypatch: pytest.MonkeyPatch):
    path, ids = saved(name)
    prompts = [ids[:17], ids[5:12], ids[30:60]]
    calls: list[bool] = []
    nccl_all_gather = collectives.nccl_all_gather

    def count(*given: Any) -> list[torch.Tensor]:
        calls.append(torch.cuda.is_current_stream_capturing())
        return nccl_all_gather(*given)

    monkeypatch.setattr(collectives, "nccl_all_gather", count)
    alone = alone_on(path, "cuda", kv=kv)
    with on_ranks(path, OneRank(mode, 1), "cuda", kv=kv, graphs=False) as ranks:
        plain = decoded(ranks, prompts, STEPS)
        assert calls
        assert not any(calls)
    with on_ranks(path, OneRank(mode, 1), "cuda", kv=kv) as ranks:
        decode, counts = ranks.engine.decode, []
        monkeypatch.setattr(ranks.engine, "decode", lambda *given: [decode(*given), counts.append(len(calls))][0])
        found = decoded(ranks, prompts, STEPS)
        assert ranks.engine.graphs.refused is None
        assert recordings(ranks) == 1
        assert any(calls)
        # the first step runs, the second is captured, and replays run no Python
        assert counts[0] < counts[1] == counts[-1]
        tokens = generated(ranks, ids)
    assert torch.equal(found, plain)
    wanted = decoded(alone, prompts, STEPS)
    if mode == "tensor":
        assert torch.equal(found, wanted)
        assert tokens == generated(alone, ids)
    else:
        # one process runs a mixture in one kernel
        assert error(found, wanted) < ROUNDING


@pytest.mark.parametrize(("name", "kv"), [("llama", "none"), ("qwen3_moe", "k4v4"), ("qwen3_5_moe", "k4v4")])
def test_pipeline_stages_are_captured(name: str, kv: str):
    path, ids = saved(name)
    alone = alone_on(path, "cuda:0", kv=kv)
    batches = [ids[:11]], [ids[:17], ids[5:12], ids[30:60]]
    with on_ranks(path, Parallel("pipeline", 2), "cuda:0", kv=kv) as ranks:
        found = [decoded(ranks, prompts, STEPS) for prompts in batches]
        wanted = [decoded(alone, prompts, STEPS) for prompts in batches]
        if name == "llama":
            # between stages, a sum is stored that one process computes in the next kernel
            assert max(map(error, found, wanted)) < ROUNDING
        else:
            assert all(map(torch.equal, found, wanted))
        assert generated(ranks, ids) == generated(alone, ids)
        assert recordings(ranks) >= 2
        assert ranks.engine.graphs.refused is None
        assert [each["refused"] for each in ranks.engine.ranks.follower_stats()] == [None]


def test_keys_are_calibrated_by_stages_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, ids = saved("llama")
    options = {**OPTIONS, "calibrate": "auto", "kv": "k4v4", "device": "cuda:0"}
    monkeypatch.setenv("AURAFLUX_CACHE", str(tmp_path))
    ranks = load(path, parallel=Parallel("pipeline", 2), **options)
    try:
        found = decoded(ranks, [ids[:17]], STEPS)
    finally:
        ranks.engine.ranks.close()
    # the calibration was saved
    alone = load(path, **options)
    alone.engine.graphs.prefill_refused = "ranks do not"
    assert torch.equal(found, decoded(alone, [ids[:17]], STEPS))


@pytest.mark.parametrize(("name", "mode"), [("llama", "tensor"), ("qwen3_moe", "experts")])
def test_collectives_through_host_memory_are_not_captured(name: str, mode: str):
    path, ids = saved(name)
    alone = alone_on(path, "cuda:0", kv="none")
    with on_ranks(path, Parallel(mode, 2), "cuda:0", kv="none") as ranks:
        prompts = [ids[:17], ids[5:12]]
        assert error(decoded(ranks, prompts, STEPS), decoded(alone, prompts, STEPS)) < ROUNDING
        assert recordings(ranks) == 0
        assert ranks.engine.graphs.refused == THROUGH_MEMORY
        assert ranks.engine.ranks.follower_stats()[0]["refused"] == THROUGH_MEMORY


def test_more_ranks_than_gpus_are_refused():
    count = torch.cuda.device_count() + 1
    with pytest.raises(SettingsError, match=f"pipeline={count} needs {count} GPUs on this machine, which has {count - 1}"):
        load(saved("llama")[0], device="cuda", parallel=f"pipeline={count}")
    with pytest.raises(SettingsError, match="context parallelism runs on CPUs only"):
        load(saved("llama")[0], device="cuda", parallel="context=2")
