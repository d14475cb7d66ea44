"""Graph capture by ranks: all ranks record, replay and refuse the same steps, and send no messages inside a step.

Without a GPU, a fake graph runs the step again, collectives included, as a CUDA graph with captured NCCL calls does. A graph
would not repeat messages, so sending one inside a step fails.
"""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from auraflux.distributed.comm.collectives import Collectives
from auraflux.distributed.rank_runner import THROUGH_MEMORY, RankRunner
from auraflux.engine.engine import Engine
from auraflux.engine.graph_runner import GraphRunner
from auraflux.loading.load import load
from tests.distributed.test_pipeline import OPTIONS, saved
from tests.distributed.threaded_ranks import OneRank, decoded, threaded_ranks
from tests.models.oracles import error

ROUNDING = 1e-6  # of another order of summation
PLAIN: dict[str, Any] = {**OPTIONS, "kv": "none", "exact": True}


class Graphs:
    """Fake recordings of all ranks; the rank `broken` fails to record."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, broken: int | None = None):
        self.made: list[int] = []
        self.replayed: list[int] = []
        self.broken, self._inside = broken, threading.local()
        made, send_message = GraphRunner.__init__, Collectives.send_message

        def make(graph_runner: GraphRunner, runner: Any, graphs: bool) -> None:
            made(graph_runner, runner, graphs)
            if isinstance(runner, RankRunner):
                graph_runner._capture = lambda work: self._capture(runner, work)

        def send(collectives: Collectives, message: dict[str, Any], to: int) -> None:
            assert not getattr(self._inside, "a_step", False), "a graph would not send this message again"
            send_message(collectives, message, to)

        monkeypatch.setattr(GraphRunner, "__init__", make)
        monkeypatch.setattr(Collectives, "send_message", send)
        monkeypatch.setattr(RankRunner, "graph_refusal", None)

    def _capture(self, runner: RankRunner, work: Callable[[], Tensor]) -> tuple[Any, Tensor]:
        rank = runner.group.rank
        rejected = runner.agree_on_capture(f"rank {rank} read something" if rank == self.broken else None)
        result = self._run(work)

        def replay() -> None:
            self.replayed.append(rank)
            result.copy_(self._run(work))

        self.made += [rank] if rejected is None else []
        return SimpleNamespace(rejected=rejected, replay=replay), result

    def _run(self, work: Callable[[], Tensor]) -> Tensor:
        self._inside.a_step = True
        try:
            return work().clone()
        finally:
            self._inside.a_step = False


@pytest.mark.parametrize(
    ("name", "layout"), [("llama", "tensor=2"), ("qwen3_moe", "experts=2"), ("qwen3_moe", "pipeline=2,experts=2")]
)
def test_ranks_record_and_replay_the_same_steps(name: str, layout: str, monkeypatch: pytest.MonkeyPatch):
    path, ids = saved(name)
    prompts = [ids[:17], ids[5:12]]
    wanted = decoded(load(path, **PLAIN), prompts, 6)
    graphs = Graphs(monkeypatch)
    with threaded_ranks(path, layout, **PLAIN) as ranks:
        found = decoded(ranks, prompts, 6)
        assert ranks.engine.graphs.refused is None
        assert [each["refused"] for each in ranks.engine.ranks.follower_stats()] == [None] * (ranks.engine.ranks.mesh.size - 1)
        size = ranks.engine.ranks.mesh.size
    # the first step runs, the second is recorded, the others are replayed
    assert sorted(graphs.made) == list(range(size))
    assert sorted(graphs.replayed) == sorted([*range(size)] * 4)
    assert error(found, wanted) <= ROUNDING


@pytest.mark.parametrize("broken", [0, 1])
def test_a_step_that_one_rank_cannot_record_is_not_replayed(broken: int, monkeypatch: pytest.MonkeyPatch):
    path, ids = saved("llama")
    prompts = [ids[:17]]
    wanted = decoded(load(path, **PLAIN), prompts, 5)
    graphs = Graphs(monkeypatch, broken)
    with threaded_ranks(path, "tensor=2", **PLAIN) as ranks:
        found = decoded(ranks, prompts, 5)
        reason = f"rank {broken} read something"
        assert ranks.engine.graphs.refused == reason
        assert ranks.engine.ranks.follower_stats()[0]["refused"] == reason
        # restarted ranks may be able to
        ranks.engine.graphs.reset()
        assert ranks.engine.graphs.refused is None
    assert graphs.replayed == []
    assert error(found, wanted) <= ROUNDING


def test_verify_steps_are_replayed(monkeypatch: pytest.MonkeyPatch):
    path, ids = saved("llama")
    found = []
    for layout in (None, "tensor=2", "pipeline=2"):
        if layout == "tensor=2":
            Graphs(monkeypatch)
        if layout is None:
            found.append(checked(load(path, **PLAIN).engine, ids))
            continue
        with threaded_ranks(path, layout, **PLAIN) as ranks:
            found.append(checked(ranks.engine, ids))
            assert sum(step.recording is not None for step in ranks.engine.graphs._verify_steps.values()) == 1
    assert error(found[1], found[0]) <= ROUNDING
    assert torch.equal(found[2], found[0])


def checked(engine: Engine, ids: list[int]) -> Tensor:
    """Return the logits of steps of four tokens, of which two are accepted."""
    sequence = engine.cache.open()
    engine.prefill([sequence], [ids[:9]])
    batch, found = engine.cache.batch([sequence]), []
    for step in range(4):
        found.append(engine.verify(batch, [ids[step : step + 4]]))
        sequence.truncate(9 + 2 * step + 2)
    sequence.close()
    return torch.cat(found)


@pytest.mark.parametrize("layout", ["pipeline=2", "tensor=2"])
def test_steps_are_padded_on_all_ranks(layout: str, monkeypatch: pytest.MonkeyPatch):
    # as on GPUs
    monkeypatch.setattr(Engine, "decode_batch", lambda engine, sequences: engine.cache.batch(sequences, padding_sequences=2))
    path, ids = saved("llama")
    prompts = [ids[:17], ids[5:12]]
    wanted = decoded(load(path, **PLAIN), prompts, 5)
    with threaded_ranks(path, layout, **PLAIN) as ranks:
        assert error(decoded(ranks, prompts, 5), wanted) <= (0.0 if layout == "pipeline=2" else ROUNDING)


def test_the_reason_for_not_recording_is_reported():
    path, ids = saved("llama")
    with threaded_ranks(path, "tensor=2", **PLAIN) as ranks:
        decoded(ranks, [ids[:5]], 3)
        assert ranks.engine.graphs.refused == THROUGH_MEMORY
        assert ranks.engine.ranks.follower_stats()[0]["refused"] == THROUGH_MEMORY


@pytest.mark.parametrize(("name", "mode"), [("llama", "tensor"), ("qwen3_moe", "experts")])
def test_one_rank_equals_one_process(name: str, mode: str):
    path, ids = saved(name)
    alone, ranks = (load(path, **PLAIN, parallel=layout) for layout in (None, OneRank(mode, 1)))
    try:
        assert error(decoded(ranks, [ids[:17]], 4), decoded(alone, [ids[:17]], 4)) <= ROUNDING
    finally:
        ranks.engine.ranks.close()
