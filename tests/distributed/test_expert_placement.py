"""Placement of experts by usage, at the start or between two steps, does not change results."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from auraflux.distributed.expert_usage import usage_path
from auraflux.distributed.parallel import Parallel, parse_parallel
from auraflux.errors import FormatError, InputError, RankError, SettingsError
from auraflux.loading.language_model import LanguageModel
from auraflux.loading.load import load
from auraflux.weights.experts.resident import ResidentExperts
from auraflux.weights.experts.settings import ExpertSettings
from auraflux.weights.parallel.expert_placement import Placement
from tests.distributed.test_experts import left
from tests.distributed.test_failure import TIMEOUT_S
from tests.distributed.test_pipeline import OPTIONS, saved
from tests.distributed.threaded_ranks import decoded, threaded_ranks
from tests.models.oracles import error
from tests.models.test_offloaded import packed

ROUNDING = 1e-6  # of another order of summation
PLAIN: dict[str, Any] = {**OPTIONS, "kv": "none", "exact": True}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save usage files in a temporary folder."""
    monkeypatch.setattr("auraflux.distributed.expert_usage.cache_folder", lambda: tmp_path)


class Rows:
    """Counter of the rows that the experts of each rank have run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self._made: dict[int, int] = {}
        partial_sum = ResidentExperts.partial_sum

        def counted(resident: ResidentExperts, x: Any, ids: Any, weights: Any) -> Any:
            self._made[id(resident)] = self._made.get(id(resident), 0) + int((ids >= 0).sum())
            return partial_sum(resident, x, ids, weights)

        monkeypatch.setattr(ResidentExperts, "partial_sum", counted)

    def taken(self, model: LanguageModel) -> tuple[int, int]:
        """Return the rows of rank 0 and of the other ranks since the last call."""
        here = {id(layer.experts) for layer in model.engine.ranks.placement.layers.values()}
        found, self._made = self._made, {}
        return sum(n for who, n in found.items() if who in here), sum(n for who, n in found.items() if who not in here)


def test_placement_by_usage_balances_rows(monkeypatch: pytest.MonkeyPatch):
    path, ids = saved("qwen3_moe")
    # a few repeated tokens choose few experts
    text = (ids[:3] * 30)[:80]
    alone, rows = load(path, **PLAIN), Rows(monkeypatch)
    with threaded_ranks(path, "experts=2", **PLAIN) as ranks:
        wanted = alone.logits(text)
        before = ranks.logits(text)
        first = rows.taken(ranks)
        placed = ranks.place_experts()
        after = ranks.logits(text)
        second = rows.taken(ranks)
        assert placed.rows == sum(first) == sum(second)
        assert placed.moved > 0
        assert placed.after < placed.before
        assert abs(second[0] - second[1]) < abs(first[0] - first[1])
        for found in (before, after):
            assert error(found, wanted) < ROUNDING
        assert error(decoded(ranks, [text[:11]], 4), decoded(alone, [text[:11]], 4)) < ROUNDING
    # a new group starts with the same placement and results, bit for bit
    with threaded_ranks(path, "experts=2", **PLAIN) as again:
        assert again.notes[-1].startswith("experts: placed by usage, the busiest of 2 ranks runs ")
        assert torch.equal(again.logits(text), after)


def skewed(path: Path, text: list[int], layout: str, **options: Any) -> None:
    """Compare ranks with one process before and after a placement, and a new group with this placement bit for bit."""
    alone = load(path, **{**PLAIN, **options}).logits(text)
    with threaded_ranks(path, layout, **{**PLAIN, **options}) as ranks:
        assert error(ranks.logits(text), alone) < ROUNDING
        assert ranks.place_experts().moved > 0
        after = ranks.logits(text)
        assert error(after, alone) < ROUNDING
    with threaded_ranks(path, layout, **{**PLAIN, **options}) as again:
        assert torch.equal(again.logits(text), after)


@pytest.mark.parametrize("layout", [pytest.param("experts=3", marks=pytest.mark.slow), "pipeline=2,experts=2"])
def test_every_stage_places_its_experts(layout: str):
    path, ids = saved("qwen3_moe")
    skewed(path, (ids[:3] * 30)[:80], layout)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "quantize"), [("gpt_oss", None), ("qwen3_5_moe", None), ("deepseek_v3", 4), ("qwen3_moe", 4)])
def test_every_layout_of_experts(name: str, quantize: int | None):
    path, ids = saved(name)
    skewed(path, (ids[:3] * 30)[:80], "experts=2", quantize=quantize)


@pytest.mark.parametrize("io", ["mapped", pytest.param("direct", marks=pytest.mark.slow)])
def test_packed_files(io: str):
    path, ids = packed("gpt_oss")
    skewed(path, (ids[:3] * 30)[:80], "experts=2", expert_memory=ExpertSettings(memory=1 << 20, io=io, balance="off"))


def test_running_sequences_continue_after_a_placement():
    path, ids = saved("qwen3_moe")
    sampling: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
    wanted = list(load(path, **PLAIN).tokens(ids[:20], **sampling))
    with threaded_ranks(path, "experts=2", **PLAIN) as ranks:
        stream, found = ranks.tokens(ids[:20], **sampling), []
        for token in stream:
            found.append(token)
            if len(found) in (5, 6, 15):
                ranks.place_experts()
        assert found == wanted


@pytest.mark.slow
def test_restarted_ranks_have_the_placement():
    path, ids = saved("qwen3_moe")
    ranks = load(path, **PLAIN, parallel=Parallel("experts", 2, timeout_s=TIMEOUT_S))
    try:
        ranks.logits(ids[:60])
        ranks.place_experts()
        before = ranks.logits(ids[:30])
        os.kill(ranks.engine.ranks.launcher.processes[0].pid, signal.SIGKILL)
        with pytest.raises(RankError):
            ranks.logits(ids[:30])
        ranks.scheduler.fail_all(RankError("lost."))
        ranks.engine.restart(lambda: False)
        assert torch.equal(ranks.logits(ids[:30]), before)
    finally:
        ranks.engine.ranks.close()


def test_a_rank_that_cannot_load_experts_ends_the_group(monkeypatch: pytest.MonkeyPatch):
    path, ids = saved("qwen3_moe")
    apply = Placement.apply

    def broken(placement: Placement, owners: Any) -> None:
        if placement.rank == 1:
            raise InputError("its disk is gone")
        apply(placement, owners)

    monkeypatch.setattr(Placement, "apply", broken)
    failures: list[Exception] = []

    def follows(host: str, port: int, path: Path) -> None:
        try:
            left(host, port, path)
        except InputError as err:
            failures.append(err)

    with threaded_ranks(path, "experts=2", run_follower=follows, **PLAIN) as ranks:
        ranks.logits(ids[:30])
        with pytest.raises(RankError, match="rank 1 could not load its experts: its disk is gone"):
            ranks.place_experts()
        with pytest.raises(RankError):
            ranks.logits(ids[:30])
    assert [str(err) for err in failures] == ["its disk is gone"]


def test_placements_that_are_refused():
    path, ids = saved("qwen3_moe")
    with pytest.raises(SettingsError, match="the model runs in one process"):
        load(path, **PLAIN).place_experts()
    with threaded_ranks(path, "pipeline=2", **PLAIN) as ranks, pytest.raises(SettingsError, match="has no expert parallelism"):
        ranks.place_experts()
    with threaded_ranks(path, "experts=2", **PLAIN) as ranks:
        with pytest.raises(InputError, match="no expert usage yet"):
            ranks.place_experts()
        ranks.logits(ids[:9])
        ranks.place_experts()
        with pytest.raises(InputError, match="no expert usage yet"):
            ranks.place_experts()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "holds list, not an object"),
        ("{}", "is not an expert usage file"),
        ({"model": "x"}, "expert usage of another model"),
        ({"layers": [1]}, "must hold a list of counts"),
        ({"layers": {"a": [1, -1]}}, "must hold a list of counts"),
        ({"layers": {"a": [1, True]}}, "must hold a list of counts"),
        ({"layers": {"a": [1, 1 << 80]}}, "must hold a list of counts"),
        ({"layers": {"model.layers.0.mlp": [1, 2]}}, "the use counts of model.layers.0.mlp have 2 experts"),
    ],
)
def test_invalid_usage_files_are_refused(content: Any, reason: str, tmp_path: Path):
    path, ids = saved("qwen3_moe")
    with threaded_ranks(path, "experts=2", **PLAIN) as ranks:
        ranks.logits(ids[:9])
        ranks.place_experts()
        saved_usage = usage_path(ranks.engine.ranks._name)
    file = tmp_path / "use.json"
    file.write_text(content if isinstance(content, str) else json.dumps({**json.loads(saved_usage.read_text()), **content}))
    parallel = replace(parse_parallel("experts=2"), expert_counts=str(file))
    with pytest.raises((FormatError, InputError), match=reason):
        load(path, **PLAIN, parallel=parallel)


def test_usage_files_need_expert_parallelism(tmp_path: Path):
    with pytest.raises(SettingsError, match="needs expert parallelism"):
        parse_parallel("pipeline=2", expert_counts="use.json")
    with pytest.raises(FormatError, match=r"nowhere.json cannot be read: No such file"):
        load(saved("qwen3_moe")[0], parallel=replace(parse_parallel("experts=2"), expert_counts=str(tmp_path / "nowhere.json")))
