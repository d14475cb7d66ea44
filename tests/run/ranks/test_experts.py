"""Experts dealt out to ranks give what they give in one process, but for the order in which they are added."""

from typing import Any

import pytest
import torch

from auraflux.errors import SettingsError
from auraflux.run.load import load
from auraflux.weights.expert_settings import ExpertSettings
from tests.models.oracles import error
from tests.models.test_streamed import packed
from tests.run.ranks.test_pipeline import OPTIONS, saved
from tests.run.ranks.together import decoded, together

ROUNDING = 1e-6  # of sums in another order


def check(path: Any, ids: list[int], size: int, bound: float, **options: Any) -> None:
    alone = load(path, **OPTIONS, **options)
    with together(path, "experts", size, **OPTIONS, **options) as ranks:
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
    few = ExpertSettings(memory=1 << 20, io=io)
    check(path, [*ids, *ids], 2, ROUNDING, kv="none", exact=True, expert_memory=few)


def test_a_model_without_experts_is_refused():
    with pytest.raises(SettingsError, match="has no experts to divide"):
        load(saved("llama")[0], parallel="experts=2")
