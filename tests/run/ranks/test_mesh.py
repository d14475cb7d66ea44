"""Ways to divide a model that are combined: stages of a pipeline whose ranks divide experts or texts, or both."""

import os
import signal
from typing import Any

import pytest
import torch

from auraflux.errors import RankError, SettingsError
from auraflux.run.load import load
from auraflux.run.ranks.mesh import Mesh
from auraflux.run.ranks.parallel import Parallel, parse_parallel
from tests.models.oracles import error
from tests.models.test_streamed import packed
from tests.run.ranks.test_experts import least
from tests.run.ranks.test_failure import TIMEOUT_S, comes_back, fails, written
from tests.run.ranks.test_pipeline import OPTIONS, saved
from tests.run.ranks.together import decoded, together
from tests.run.tiny import tiny

ROUNDING = 1e-6  # of sums in another order
LONG = 140  # tokens: more than two pages


def check(path: Any, ids: list[int], way: str, bound: float, **options: Any) -> None:
    """Hold ranks to one process: scores of a text read in pieces, of one text and of four; with a bound of 0 the bits."""
    ids = (ids * LONG)[:LONG]
    options = {**OPTIONS, "context": 512, **options}
    alone = load(path, **options)
    with together(path, way, **options) as ranks:
        assert error(ranks.logits(ids), alone.logits(ids)) <= bound
        for prompts in ([ids[:70]], [ids[:17], ids[5:12], ids[3:133], ids[7:8]]):
            assert error(decoded(ranks, prompts, 4), decoded(alone, prompts, 4)) <= bound
        first, again = (ranks.logits(ids[:30]) for _ in range(2))
        assert torch.equal(first, again)


def test_stages_whose_ranks_divide_experts():
    check(*saved("qwen3_moe"), "pipeline=2,experts=2", ROUNDING, kv="none", exact=True)


def test_stages_whose_ranks_deal_experts_out_have_the_bits_of_one():
    path, ids = packed("qwen3_moe")
    check(path, ids, "pipeline=2,experts=2", 0.0, kv="k4v4", expert_memory=least(path))


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["none", "k4v4"])
@pytest.mark.parametrize("way", ["pipeline=2,experts=2", "pipeline=2,context=2", "experts=2,context=2"])
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5_moe", "gpt_oss"])
def test_every_kind_of_layer(name: str, way: str, kv: str):
    check(*saved(name), way, ROUNDING, kv=kv, exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["none", "k4v4"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_stages_of_a_dense_model_deal_out_pages(name: str, kv: str):
    check(*saved(name), "context=2,pipeline=2", ROUNDING, kv=kv, exact=True)


@pytest.mark.slow
def test_all_three():
    check(*saved("qwen3_moe"), "pipeline=2,experts=2,context=2", ROUNDING, kv="k4v4", exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5_moe", "gpt_oss", "deepseek_v3"])
def test_experts_read_from_disk_by_four(name: str):
    path, ids = packed(name)
    check(path, ids, "pipeline=2,experts=2", 0.0, kv="none", expert_memory=least(path))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_gone_ends_the_group_and_comes_back(number: int):
    four = Parallel("pipeline", 2, also=(("context", 2),), timeout_s=TIMEOUT_S)
    model = load(tiny(), calibrate="off", context=256, parallel=four)
    try:
        before = written(model)
        assert len(model.engine.ranks._started) == 3
        fails(model, number)
        with pytest.raises(RankError):
            written(model)
        assert comes_back(model) == before
        # one of rank 0's own stage
        os.kill(model.engine.ranks._started[0].pid, signal.SIGKILL)
        with pytest.raises(RankError):
            list(model.tokens([5, 6, 7], max_tokens=200, temperature=0, endless=True))
    finally:
        model.engine.ranks.close()


def test_where_ranks_stand():
    mesh = parse_parallel("experts=3,pipeline=2").mesh
    assert mesh == Mesh(2, 3, ("experts",))
    assert (mesh.size, list(mesh.heads)) == (6, [0, 3])
    assert [mesh.stage(rank) for rank in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [list(mesh.peers(rank)) for rank in (1, 5)] == [[0, 1, 2], [3, 4, 5]]
    assert [mesh.before(rank) for rank in range(6)] == [None, None, None, 0, 1, 2]
    assert [mesh.after(rank) for rank in range(6)] == [3, 4, 5, None, None, None]
    assert parse_parallel("experts=2,context=2").mesh == Mesh(1, 2, ("experts", "context"))
    assert str(parse_parallel("pipeline=2, context=2")) == "pipeline=2,context=2"


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("pipeline=2,tensor=2", "and is not combined"),
        ("experts=2,context=3", "both must have the same number"),
        ("pipeline=2,pipeline=2", "names a way twice"),
        ("pipeline=200,experts=200", "are 40000 ranks"),
        ("pipeline=2,", "does not say how a model is divided"),
    ],
)
def test_what_does_not_go_together(way: str, reason: str):
    with pytest.raises(SettingsError, match=reason):
        parse_parallel(way)
