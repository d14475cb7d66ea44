"""Combined layouts: pipeline stages that are expert or context parallel, or both."""

import os
import signal
from typing import Any

import pytest
import torch

from auraflux.distributed.comm.mesh import Mesh
from auraflux.distributed.parallel import Parallel, parse_parallel
from auraflux.errors import RankError, SettingsError
from auraflux.loading.load import load
from tests.distributed.test_experts import least
from tests.distributed.test_failure import TIMEOUT_S, fails, generated, restarted
from tests.distributed.test_pipeline import OPTIONS, saved
from tests.distributed.threaded_ranks import decoded, threaded_ranks
from tests.engine.tiny import tiny
from tests.models.oracles import error
from tests.models.test_offloaded import packed

ROUNDING = 1e-6  # of sums in another order
LONG = 140  # tokens: more than two pages


def check(path: Any, ids: list[int], layout: str, bound: float, **options: Any) -> None:
    """Compare ranks with one process: logits of chunked prefill, of one sequence and of four; a bound of 0 compares bits."""
    ids = (ids * LONG)[:LONG]
    options = {**OPTIONS, "context": 512, **options}
    alone = load(path, **options)
    with threaded_ranks(path, layout, **options) as ranks:
        assert error(ranks.logits(ids), alone.logits(ids)) <= bound
        for prompts in ([ids[:70]], [ids[:17], ids[5:12], ids[3:133], ids[7:8]]):
            assert error(decoded(ranks, prompts, 4), decoded(alone, prompts, 4)) <= bound
        first, again = (ranks.logits(ids[:30]) for _ in range(2))
        assert torch.equal(first, again)


def test_expert_parallel_stages():
    check(*saved("qwen3_moe"), "pipeline=2,experts=2", ROUNDING, kv="none", exact=True)


def test_stages_with_balanced_experts_are_bit_exact():
    path, ids = packed("qwen3_moe")
    check(path, ids, "pipeline=2,experts=2", 0.0, kv="k4v4", expert_memory=least(path))


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["none", "k4v4"])
@pytest.mark.parametrize("layout", ["pipeline=2,experts=2", "pipeline=2,context=2", "experts=2,context=2"])
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5_moe", "gpt_oss"])
def test_every_kind_of_layer(name: str, layout: str, kv: str):
    check(*saved(name), layout, ROUNDING, kv=kv, exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["none", "k4v4"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_context_parallel_stages_of_a_dense_model(name: str, kv: str):
    check(*saved(name), "context=2,pipeline=2", ROUNDING, kv=kv, exact=True)


@pytest.mark.slow
def test_pipeline_experts_and_context():
    check(*saved("qwen3_moe"), "pipeline=2,experts=2,context=2", ROUNDING, kv="k4v4", exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5_moe", "gpt_oss", "deepseek_v3"])
def test_offloaded_experts_on_four_ranks(name: str):
    path, ids = packed(name)
    check(path, ids, "pipeline=2,experts=2", 0.0, kv="none", expert_memory=least(path))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_ends_the_group_until_it_restarts(number: int):
    four = Parallel("pipeline", 2, also=(("context", 2),), timeout_s=TIMEOUT_S)
    model = load(tiny(), calibrate="off", context=256, parallel=four)
    try:
        before = generated(model)
        assert len(model.engine.ranks.launcher.processes) == 3
        fails(model, number)
        with pytest.raises(RankError):
            generated(model)
        assert restarted(model) == before
        # a peer in rank 0's stage
        os.kill(model.engine.ranks.launcher.processes[0].pid, signal.SIGKILL)
        with pytest.raises(RankError):
            list(model.tokens([5, 6, 7], max_tokens=200, temperature=0, ignore_eos=True))
    finally:
        model.engine.ranks.close()


def test_positions_of_ranks():
    mesh = parse_parallel("experts=3,pipeline=2").mesh
    assert mesh == Mesh(2, 3, ("experts",))
    assert (mesh.size, list(mesh.first_ranks)) == (6, [0, 3])
    assert [mesh.stage(rank) for rank in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [list(mesh.peers(rank)) for rank in (1, 5)] == [[0, 1, 2], [3, 4, 5]]
    assert [mesh.previous_rank(rank) for rank in range(6)] == [None, None, None, 0, 1, 2]
    assert [mesh.next_rank(rank) for rank in range(6)] == [3, 4, 5, None, None, None]
    assert parse_parallel("experts=2,context=2").mesh == Mesh(1, 2, ("experts", "context"))
    assert str(parse_parallel("pipeline=2, context=2")) == "pipeline=2,context=2"


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ("pipeline=2,tensor=2", "cannot be combined"),
        ("experts=2,context=3", "their sizes must be equal"),
        ("pipeline=2,pipeline=2", "names a mode twice"),
        ("pipeline=200,experts=200", "needs 40000 ranks"),
        ("pipeline=2,", "is not a parallel layout"),
    ],
)
def test_invalid_layouts_are_refused(layout: str, reason: str):
    with pytest.raises(SettingsError, match=reason):
        parse_parallel(layout)
