"""Experts that ranks hold are dealt out by how often they are chosen, at the start or between two steps; results stay."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from auraflux.errors import FormatError, InputError, RankError, SettingsError
from auraflux.run.language import LanguageModel
from auraflux.run.load import load
from auraflux.run.ranks.parallel import Parallel, parse_parallel
from auraflux.run.ranks.use import kept_at
from auraflux.weights.expert_settings import ExpertSettings
from auraflux.weights.placement import Placement
from auraflux.weights.streamed import Resident
from tests.models.oracles import error
from tests.models.test_streamed import packed
from tests.run.ranks.test_experts import left
from tests.run.ranks.test_failure import TIMEOUT_S
from tests.run.ranks.test_pipeline import OPTIONS, saved
from tests.run.ranks.together import decoded, together

ROUNDING = 1e-6  # of sums in another order
PLAIN: dict[str, Any] = {**OPTIONS, "kv": "none", "exact": True}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep uses where no other test looks for them."""
    monkeypatch.setattr("auraflux.run.ranks.use.cache_folder", lambda: tmp_path)


class Rows:
    """Rows that the experts of each rank have run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self._made: dict[int, int] = {}
        some = Resident.some

        def counted(resident: Resident, x: Any, ids: Any, weights: Any) -> Any:
            self._made[id(resident)] = self._made.get(id(resident), 0) + int((ids >= 0).sum())
            return some(resident, x, ids, weights)

        monkeypatch.setattr(Resident, "some", counted)

    def taken(self, model: LanguageModel) -> tuple[int, int]:
        """Those of rank 0, and of the others, since it was asked last."""
        here = {id(layer.experts) for layer in model.engine.ranks.placement.layers.values()}
        found, self._made = self._made, {}
        return sum(n for who, n in found.items() if who in here), sum(n for who, n in found.items() if who not in here)


def test_ranks_run_equally_many_rows_after_a_deal(monkeypatch: pytest.MonkeyPatch):
    path, ids = saved("qwen3_moe")
    # a few tokens again and again choose few experts
    text = (ids[:3] * 30)[:80]
    alone, rows = load(path, **PLAIN), Rows(monkeypatch)
    with together(path, "experts=2", **PLAIN) as ranks:
        wanted = alone.logits(text)
        before = ranks.logits(text)
        taken = rows.taken(ranks)
        dealt = ranks.deal_experts()
        after = ranks.logits(text)
        evened = rows.taken(ranks)
        assert dealt.rows == sum(taken) == sum(evened)
        assert dealt.moved > 0
        assert dealt.after < dealt.before
        assert abs(evened[0] - evened[1]) < abs(taken[0] - taken[1])
        for found in (before, after):
            assert error(found, wanted) < ROUNDING
        assert error(decoded(ranks, [text[:11]], 4), decoded(alone, [text[:11]], 4)) < ROUNDING
    # who comes later begins as these ended, to the bit
    with together(path, "experts=2", **PLAIN) as again:
        assert again.notes[-1].startswith("experts: dealt out by use, the busiest of 2 ranks has ")
        assert torch.equal(again.logits(text), after)


def skewed(path: Path, text: list[int], way: str, **options: Any) -> None:
    """Hold ranks to one process, and to themselves after a deal, and those that begin with it to the bit."""
    alone = load(path, **{**PLAIN, **options}).logits(text)
    with together(path, way, **{**PLAIN, **options}) as ranks:
        assert error(ranks.logits(text), alone) < ROUNDING
        assert ranks.deal_experts().moved > 0
        after = ranks.logits(text)
        assert error(after, alone) < ROUNDING
    with together(path, way, **{**PLAIN, **options}) as again:
        assert torch.equal(again.logits(text), after)


@pytest.mark.parametrize("way", [pytest.param("experts=3", marks=pytest.mark.slow), "pipeline=2,experts=2"])
def test_every_stage_deals_its_own(way: str):
    path, ids = saved("qwen3_moe")
    skewed(path, (ids[:3] * 30)[:80], way)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "quantize"), [("gpt_oss", None), ("qwen3_5_moe", None), ("deepseek_v3", 4), ("qwen3_moe", 4)])
def test_every_layout_of_experts(name: str, quantize: int | None):
    path, ids = saved(name)
    skewed(path, (ids[:3] * 30)[:80], "experts=2", quantize=quantize)


@pytest.mark.parametrize("io", ["mapped", pytest.param("direct", marks=pytest.mark.slow)])
def test_files_that_all_have(io: str):
    path, ids = packed("gpt_oss")
    skewed(path, (ids[:3] * 30)[:80], "experts=2", expert_memory=ExpertSettings(memory=1 << 20, io=io, balance="off"))


def test_a_text_that_is_being_written_goes_on():
    path, ids = saved("qwen3_moe")
    asked: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "endless": True}
    wanted = list(load(path, **PLAIN).tokens(ids[:20], **asked))
    with together(path, "experts=2", **PLAIN) as ranks:
        writing, found = ranks.tokens(ids[:20], **asked), []
        for token in writing:
            found.append(token)
            if len(found) in (5, 6, 15):
                ranks.deal_experts()
        assert found == wanted


@pytest.mark.slow
def test_ranks_that_come_back_have_what_was_dealt():
    path, ids = saved("qwen3_moe")
    ranks = load(path, **PLAIN, parallel=Parallel("experts", 2, timeout_s=TIMEOUT_S))
    try:
        ranks.logits(ids[:60])
        ranks.deal_experts()
        before = ranks.logits(ids[:30])
        os.kill(ranks.engine.ranks._started[0].pid, signal.SIGKILL)
        with pytest.raises(RankError):
            ranks.logits(ids[:30])
        ranks.scheduler.lose(RankError("lost."))
        ranks.engine.restart(lambda: False)
        assert torch.equal(ranks.logits(ids[:30]), before)
    finally:
        ranks.engine.ranks.close()


def test_a_rank_that_cannot_read_what_it_gains_ends_the_group(monkeypatch: pytest.MonkeyPatch):
    path, ids = saved("qwen3_moe")
    take = Placement.take

    def broken(placement: Placement, owners: Any) -> None:
        if placement.rank == 1:
            raise InputError("its disk is gone")
        take(placement, owners)

    monkeypatch.setattr(Placement, "take", broken)
    failures: list[Exception] = []

    def follows(host: str, port: int, path: Path) -> None:
        try:
            left(host, port, path)
        except InputError as err:
            failures.append(err)

    with together(path, "experts=2", take_part=follows, **PLAIN) as ranks:
        ranks.logits(ids[:30])
        with pytest.raises(RankError, match="rank 1 could not get the experts that it was dealt: its disk is gone"):
            ranks.deal_experts()
        with pytest.raises(RankError):
            ranks.logits(ids[:30])
    assert [str(err) for err in failures] == ["its disk is gone"]


def test_what_cannot_be_dealt_out():
    path, ids = saved("qwen3_moe")
    with pytest.raises(SettingsError, match="one process has all experts"):
        load(path, **PLAIN).deal_experts()
    with together(path, "pipeline=2", **PLAIN) as ranks, pytest.raises(SettingsError, match="does not divide experts"):
        ranks.deal_experts()
    with together(path, "experts=2", **PLAIN) as ranks:
        with pytest.raises(InputError, match="nothing to go by yet"):
            ranks.deal_experts()
        ranks.logits(ids[:9])
        ranks.deal_experts()
        with pytest.raises(InputError, match="nothing to go by yet"):
            ranks.deal_experts()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "holds list, not an object"),
        ("{}", "of another kind or version"),
        ({"model": "x"}, "experts of another model"),
        ({"layers": [1]}, "does not hold a list of counts"),
        ({"layers": {"a": [1, -1]}}, "does not hold a list of counts"),
        ({"layers": {"a": [1, True]}}, "does not hold a list of counts"),
        ({"layers": {"a": [1, 1 << 80]}}, "does not hold a list of counts"),
        ({"layers": {"model.layers.0.mlp": [1, 2]}}, "the uses of 2 experts are known of model.layers.0.mlp"),
    ],
)
def test_files_that_tell_nothing_are_refused(content: Any, reason: str, tmp_path: Path):
    path, ids = saved("qwen3_moe")
    with together(path, "experts=2", **PLAIN) as ranks:
        ranks.logits(ids[:9])
        ranks.deal_experts()
        kept = kept_at(ranks.engine.ranks._name)
    file = tmp_path / "use.json"
    file.write_text(content if isinstance(content, str) else json.dumps({**json.loads(kept.read_text()), **content}))
    asked = replace(parse_parallel("experts=2"), expert_use=str(file))
    with pytest.raises((FormatError, InputError), match=reason):
        load(path, **PLAIN, parallel=asked)


def test_uses_are_for_ranks_that_divide_experts(tmp_path: Path):
    with pytest.raises(SettingsError, match="is for ranks that divide experts"):
        parse_parallel("pipeline=2", expert_use="use.json")
    with pytest.raises(FormatError, match=r"nowhere.json cannot be read: No such file"):
        load(saved("qwen3_moe")[0], parallel=replace(parse_parallel("experts=2"), expert_use=str(tmp_path / "nowhere.json")))
