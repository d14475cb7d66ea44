"""Expert parallelism equals one process up to the order of summation; with balanced experts, bit for bit."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from auraflux.distributed import follower
from auraflux.distributed.comm.identity import numeric_environment
from auraflux.errors import RankError, SettingsError
from auraflux.loading.load import load
from auraflux.models.config import experts_per_token
from auraflux.weights.experts.settings import ExpertSettings, plan_expert_cache
from auraflux.weights.formats.checkpoint import open_checkpoint
from auraflux.weights.parallel.balanced_experts import MIN_SHARDED_TOKENS
from tests.distributed.test_pipeline import OPTIONS, saved
from tests.distributed.threaded_ranks import decoded, threaded_ranks
from tests.models.oracles import error
from tests.models.test_offloaded import packed

ROUNDING = 1e-6  # of another order of summation


def check(path: Any, ids: list[int], size: int, bound: float, **options: Any) -> None:
    alone = load(path, **OPTIONS, **options)
    with threaded_ranks(path, f"experts={size}", **OPTIONS, **options) as ranks:
        assert error(ranks.logits(ids[:60]), alone.logits(ids[:60])) < bound
        for prompts in ([ids[:11]], [ids[:17], ids[5:12], ids[30:60], ids[7:8]]):
            assert error(decoded(ranks, prompts, 4), decoded(alone, prompts, 4)) < bound
        first, again = (ranks.logits(ids[:30]) for _ in range(2))
        assert torch.equal(first, again)


def test_experts_of_two_ranks():
    check(*saved("qwen3_moe"), 2, ROUNDING, kv="none", exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5_moe", "deepseek_v3", "gpt_oss"])
def test_every_family_with_experts(name: str, size: int):
    check(*saved(name), size, ROUNDING, kv="none", exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_quantized_cache_and_activations_may_round_either_way(name: str):
    check(*saved(name), 2, 0.02, kv="k4v4")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("io", ["direct", "mapped"])
def test_each_rank_reads_its_own_experts(name: str, io: str):
    path, ids = packed(name)
    few = ExpertSettings(memory=1 << 20, io=io, balance="off")
    check(path, [*ids, *ids], 2, ROUNDING, kv="none", exact=True, expert_memory=few)


def least(path: Path, **settings: Any) -> ExpertSettings:
    """Return settings with memory for one token's experts of every layer."""
    checkpoint = open_checkpoint(path)
    assert checkpoint.experts is not None
    k = experts_per_token(checkpoint.config)
    plan = plan_expert_cache(checkpoint.experts, k, 1 << 40, "mapped")
    return ExpertSettings(memory=plan.min_nbytes, io="direct", **settings)


def same(path: Path, ids: list[int], size: int, **options: Any) -> None:
    """Compare ranks with one process bit for bit, with balanced experts."""
    # prefill chunks in which each rank sums a share of the tokens, and shorter ones
    options = {**OPTIONS, "chunk": MIN_SHARDED_TOKENS + 9, **options}
    alone = load(path, **options)
    with threaded_ranks(path, f"experts={size}", **options) as ranks:
        assert ranks.notes[-1] == f"experts: cache misses are balanced over {size} ranks."
        assert torch.equal(ranks.logits(ids[:90]), alone.logits(ids[:90]))
        for prompts in ([ids[:11]], [ids[:17], ids[5:12], ids[30:60], ids[7:8]]):
            assert torch.equal(decoded(ranks, prompts, 4), decoded(alone, prompts, 4))
        assert ranks.experts is not None
        here, others = ranks.experts.cache_stats().total.nbytes, ranks.engine.ranks.read_nbytes()
        assert abs(others / (size - 1) - here) < 0.2 * here


def test_balanced_experts_are_bit_exact():
    path, ids = packed("gpt_oss")
    same(path, [*ids, *ids], 2, kv="none", expert_memory=least(path))


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["none", "k4v4"])
@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_moe", "deepseek_v3", "gpt_oss", "gemma4", "nemotron_h"])
def test_balanced_experts_of_every_family(name: str, size: int, prefetch: bool, kv: str):
    path, ids = packed(name)
    same(path, [*ids, *ids], size, kv=kv, expert_memory=least(path, prefetch=prefetch))


def test_balance_is_refused_where_impossible(monkeypatch: pytest.MonkeyPatch):
    path, ids = packed("qwen3_moe")
    with pytest.raises(SettingsError, match="needs expert parallelism"):
        load(path, expert_memory=ExpertSettings(balance="on"))
    with pytest.raises(SettingsError, match=r"expert_balance=.* is unknown"):
        ExpertSettings(balance="odd")
    monkeypatch.setattr(follower, "numeric_environment", lambda: {**numeric_environment(), "processor": "another"})
    few = least(path)
    with (
        pytest.raises(SettingsError, match="its processor is another"),
        threaded_ranks(path, "experts=2", run_follower=left, expert_memory=replace(few, balance="on")),
    ):
        pass
    with threaded_ranks(path, "experts=2", kv="none", expert_memory=few, **OPTIONS) as ranks:
        assert "each rank runs a fixed share, because ranks round differently" in ranks.notes[-1]
        ranks.logits(ids[:20])


def left(host: str, port: int, path: Path) -> None:
    """Follow until the group ends or is lost."""
    with suppress(RankError):
        follower.follow(host, port, path)


def test_a_model_without_experts_is_refused():
    with pytest.raises(SettingsError, match="has no experts to distribute"):
        load(saved("llama")[0], parallel="experts=2")
