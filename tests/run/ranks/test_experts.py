"""Experts dealt out to ranks give what they give in one process, but for the order in which they are added."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from auraflux.errors import RankError, SettingsError
from auraflux.models.config import experts_per_token
from auraflux.run.load import load
from auraflux.run.ranks import follow
from auraflux.run.ranks.identity import rounding
from auraflux.weights.balanced import MANY
from auraflux.weights.checkpoint import open_checkpoint
from auraflux.weights.expert_settings import ExpertSettings, share_out
from tests.models.oracles import error
from tests.models.test_streamed import packed
from tests.run.ranks.test_pipeline import OPTIONS, saved
from tests.run.ranks.together import decoded, together

ROUNDING = 1e-6  # of sums in another order


def check(path: Any, ids: list[int], size: int, bound: float, **options: Any) -> None:
    alone = load(path, **OPTIONS, **options)
    with together(path, f"experts={size}", **OPTIONS, **options) as ranks:
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
def test_codes_and_rounded_activations_may_fall_to_either_side(name: str):
    check(*saved(name), 2, 0.02, kv="k4v4")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("io", ["direct", "mapped"])
def test_each_rank_reads_its_own_experts(name: str, io: str):
    path, ids = packed(name)
    few = ExpertSettings(memory=1 << 20, io=io, balance="off")
    check(path, [*ids, *ids], 2, ROUNDING, kv="none", exact=True, expert_memory=few)


def least(path: Path, **settings: Any) -> ExpertSettings:
    """Memory for one token's experts of every layer."""
    checkpoint = open_checkpoint(path)
    assert checkpoint.experts is not None
    k = experts_per_token(checkpoint.config)
    return ExpertSettings(memory=share_out(checkpoint.experts, k, 1 << 40, "mapped").least_nbytes, io="direct", **settings)


def same(path: Path, ids: list[int], size: int, **options: Any) -> None:
    """Hold ranks to one process, to the bit, whatever they hold."""
    # pieces in which each rank adds up a share, and shorter ones
    options = {**OPTIONS, "chunk": MANY + 9, **options}
    alone = load(path, **options)
    with together(path, f"experts={size}", **options) as ranks:
        assert ranks.notes[-1] == f"experts: those that no rank holds are dealt out evenly to {size}."
        assert torch.equal(ranks.logits(ids[:90]), alone.logits(ids[:90]))
        for prompts in ([ids[:11]], [ids[:17], ids[5:12], ids[30:60], ids[7:8]]):
            assert torch.equal(decoded(ranks, prompts, 4), decoded(alone, prompts, 4))
        assert ranks.experts is not None
        here, others = ranks.experts.traffic().total.nbytes, ranks.engine.ranks.read_nbytes()
        assert abs(others / (size - 1) - here) < 0.2 * here


def test_what_is_read_is_dealt_out_evenly_and_gives_the_bits_of_one_process():
    path, ids = packed("gpt_oss")
    same(path, [*ids, *ids], 2, kv="none", expert_memory=least(path))


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["none", "k4v4"])
@pytest.mark.parametrize("guess", [False, True])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_moe", "deepseek_v3", "gpt_oss", "gemma4", "nemotron_h"])
def test_every_family_deals_evenly(name: str, size: int, guess: bool, kv: str):
    path, ids = packed(name)
    same(path, [*ids, *ids], size, kv=kv, expert_memory=least(path, guess=guess))


def test_balance_is_refused_where_it_cannot_be(monkeypatch: pytest.MonkeyPatch):
    path, ids = packed("qwen3_moe")
    with pytest.raises(SettingsError, match="is for ranks that divide experts"):
        load(path, expert_memory=ExpertSettings(balance="on"))
    with pytest.raises(SettingsError, match="no way to deal experts out"):
        ExpertSettings(balance="odd")
    monkeypatch.setattr(follow, "rounding", lambda: {**rounding(), "processor": "another"})
    few = least(path)
    with (
        pytest.raises(SettingsError, match="its processor is another"),
        together(path, "experts=2", take_part=left, expert_memory=replace(few, balance="on")),
    ):
        pass
    with together(path, "experts=2", kv="none", expert_memory=few, **OPTIONS) as ranks:
        assert "each rank has its own, since ranks round differently" in ranks.notes[-1]
        ranks.logits(ids[:20])


def left(host: str, port: int, path: Path) -> None:
    """Take part until the group is given up."""
    with suppress(RankError):
        follow.follow(host, port, path)


def test_a_model_without_experts_is_refused():
    with pytest.raises(SettingsError, match="has no experts to divide"):
        load(saved("llama")[0], parallel="experts=2")
