"""Steps of ranks that are recorded: all of them record, replay and give up the same steps, and nobody is told anything inside.

There is no GPU here. What stands in for a CUDA graph runs a step's work again, its exchanges with other ranks too, as a graph
that has captured calls of NCCL does; what goes to others as notes would be missing from it, and is refused.
"""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from auraflux.run.engine import Engine
from auraflux.run.graph import Replayer
from auraflux.run.load import load
from auraflux.run.ranks.members import Members
from auraflux.run.ranks.rank_runner import THROUGH_MEMORY, RankRunner
from tests.models.oracles import error
from tests.run.ranks.test_pipeline import OPTIONS, saved
from tests.run.ranks.together import OneRank, decoded, together

ROUNDING = 1e-6  # of sums in another order
PLAIN: dict[str, Any] = {**OPTIONS, "kv": "none", "exact": True}


class Graphs:
    """All that ranks have recorded, of which `broken` cannot."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, broken: int | None = None):
        self.made: list[int] = []
        self.replayed: list[int] = []
        self.broken, self._inside = broken, threading.local()
        made, say = Replayer.__init__, Members.say

        def make(replayer: Replayer, runner: Any, graphs: bool) -> None:
            made(replayer, runner, graphs)
            if isinstance(runner, RankRunner):
                replayer._capture = lambda work: self._capture(runner, work)

        def tell(members: Members, told: dict[str, Any], to: int) -> None:
            assert not getattr(self._inside, "a_step", False), "a graph would not tell this again"
            say(members, told, to)

        monkeypatch.setattr(Replayer, "__init__", make)
        monkeypatch.setattr(Members, "say", tell)
        monkeypatch.setattr(RankRunner, "unrecorded", None)

    def _capture(self, runner: RankRunner, work: Callable[[], Tensor]) -> tuple[Any, Tensor]:
        rank = runner.group.rank
        spoiled = runner.agreed(f"rank {rank} read something" if rank == self.broken else None)
        result = self._run(work)

        def replay() -> None:
            self.replayed.append(rank)
            result.copy_(self._run(work))

        self.made += [rank] if spoiled is None else []
        return SimpleNamespace(spoiled=spoiled, replay=replay), result

    def _run(self, work: Callable[[], Tensor]) -> Tensor:
        self._inside.a_step = True
        try:
            return work().clone()
        finally:
            self._inside.a_step = False


@pytest.mark.parametrize(
    ("name", "way"), [("llama", "tensor=2"), ("qwen3_moe", "experts=2"), ("qwen3_moe", "pipeline=2,experts=2")]
)
def test_ranks_record_and_replay_the_same_steps(name: str, way: str, monkeypatch: pytest.MonkeyPatch):
    path, ids = saved(name)
    prompts = [ids[:17], ids[5:12]]
    wanted = decoded(load(path, **PLAIN), prompts, 6)
    graphs = Graphs(monkeypatch)
    with together(path, way, **PLAIN) as ranks:
        found = decoded(ranks, prompts, 6)
        assert ranks.engine.replayer.refused is None
        assert [each["refused"] for each in ranks.engine.ranks.ask()] == [None] * (ranks.engine.ranks.mesh.size - 1)
        size = ranks.engine.ranks.mesh.size
    # the first step runs, the second is recorded, the others are replays
    assert sorted(graphs.made) == list(range(size))
    assert sorted(graphs.replayed) == sorted([*range(size)] * 4)
    assert error(found, wanted) <= ROUNDING


@pytest.mark.parametrize("broken", [0, 1])
def test_what_one_rank_cannot_record_none_replays(broken: int, monkeypatch: pytest.MonkeyPatch):
    path, ids = saved("llama")
    prompts = [ids[:17]]
    wanted = decoded(load(path, **PLAIN), prompts, 5)
    graphs = Graphs(monkeypatch, broken)
    with together(path, "tensor=2", **PLAIN) as ranks:
        found = decoded(ranks, prompts, 5)
        reason = f"rank {broken} read something"
        assert ranks.engine.replayer.refused == reason
        assert ranks.engine.ranks.ask()[0]["refused"] == reason
        # others that come may be able to
        ranks.engine.replayer.forget()
        assert ranks.engine.replayer.refused is None
    assert graphs.replayed == []
    assert error(found, wanted) <= ROUNDING


def test_guesses_are_checked_by_replays_too(monkeypatch: pytest.MonkeyPatch):
    path, ids = saved("llama")
    found = []
    for way in (None, "tensor=2", "pipeline=2"):
        if way == "tensor=2":
            Graphs(monkeypatch)
        if way is None:
            found.append(checked(load(path, **PLAIN).engine, ids))
            continue
        with together(path, way, **PLAIN) as ranks:
            found.append(checked(ranks.engine, ids))
            assert sum(step.recording is not None for step in ranks.engine.replayer._several.values()) == 1
    assert error(found[1], found[0]) <= ROUNDING
    assert torch.equal(found[2], found[0])


def checked(engine: Engine, ids: list[int]) -> Tensor:
    """Scores of steps of four tokens, of which two are kept."""
    sequence = engine.cache.open()
    engine.read([sequence], [ids[:9]])
    batch, found = engine.cache.batch([sequence]), []
    for turn in range(4):
        found.append(engine.verify(batch, [ids[turn : turn + 4]]))
        sequence.truncate(9 + 2 * turn + 2)
    sequence.close()
    return torch.cat(found)


@pytest.mark.parametrize("way", ["pipeline=2", "tensor=2"])
def test_steps_are_filled_up_on_all_ranks(way: str, monkeypatch: pytest.MonkeyPatch):
    # as they are on GPUs
    monkeypatch.setattr(Engine, "writing", lambda engine, sequences: engine.cache.batch(sequences, fillers=2))
    path, ids = saved("llama")
    prompts = [ids[:17], ids[5:12]]
    wanted = decoded(load(path, **PLAIN), prompts, 5)
    with together(path, way, **PLAIN) as ranks:
        assert error(decoded(ranks, prompts, 5), wanted) <= (0.0 if way == "pipeline=2" else ROUNDING)


def test_what_is_not_recorded_is_said():
    path, ids = saved("llama")
    with together(path, "tensor=2", **PLAIN) as ranks:
        decoded(ranks, [ids[:5]], 3)
        assert ranks.engine.replayer.refused == THROUGH_MEMORY
        assert ranks.engine.ranks.ask()[0]["refused"] == THROUGH_MEMORY


@pytest.mark.parametrize(("name", "mode"), [("llama", "tensor"), ("qwen3_moe", "experts")])
def test_one_rank_is_what_one_process_is(name: str, mode: str):
    path, ids = saved(name)
    alone, ranks = (load(path, **PLAIN, parallel=way) for way in (None, OneRank(mode, 1)))
    try:
        assert error(decoded(ranks, [ids[:17]], 4), decoded(alone, [ids[:17]], 4)) <= ROUNDING
    finally:
        ranks.engine.ranks.close()
