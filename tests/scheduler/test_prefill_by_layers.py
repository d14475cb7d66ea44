"""Prefill by layers: long prompts go through each layer in several parts, with the results of one chunk after another."""

import random

import pytest
import torch

from auraflux.cache import Batch
from auraflux.engine.engine import split_parts
from auraflux.engine.graph_runner import GraphRunner
from auraflux.engine.model_runner import ModelRunner
from auraflux.engine.request import Request
from auraflux.errors import CacheFull
from auraflux.models.layer import Layer
from auraflux.scheduler.scheduler import Scheduler
from tests.scheduler.test_scheduler import (
    CALIBRATED,
    SETTINGS,
    finish,
    model_of,
    named,
    nothing_leaks,
    prompts_of,
    scheduler_for,
    submit,
    wanted,
)

CHUNK, PARTS = 16, 4


def by_layers(name: str, kv: str = "k8v4", chunk: int = CHUNK, **options) -> Scheduler:
    scheduler = scheduler_for(name, kv, chunk=chunk, **options)
    scheduler.engine.chunks_by_layer = PARTS
    return scheduler


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The tokens of each part, for every step by layers."""
    seen: list[list[int]] = []
    run = GraphRunner.prefill_by_layers

    def recorded(self: GraphRunner, parts: list[tuple[torch.Tensor, Batch]]) -> None:
        seen.append([len(ids) for ids, _ in parts])
        run(self, parts)

    monkeypatch.setattr(GraphRunner, "prefill_by_layers", recorded)
    return seen


@pytest.mark.parametrize("kv", ["k8v4", "none", CALIBRATED])
@pytest.mark.parametrize("name", named("llama", "qwen3_moe", "qwen3_5_moe", "gpt_oss", "deepseek_v3", "gemma3"))
def test_logits_equal_those_of_one_chunk_after_another(name: str, kv: str, steps: list[list[int]]):
    """Bit for bit, in windows, recurrent states and quantized caches, also of tokens that follow."""
    if (name, kv) == ("qwen4_exp", CALIBRATED):
        pytest.skip("block-sparse attention has no full-precision window")
    text = model_of(name)[2][:250]
    found = []
    for engine in (by_layers(name, kv).engine, scheduler_for(name, kv, chunk=CHUNK).engine):
        sequence, most = engine.cache.open(), engine.max_prefill_tokens([])
        for start in range(0, 200, most):
            engine.prefill([sequence], [text[start : min(start + most, 200)]])
        found.append(engine.all_logits(sequence, text[200:]))
    assert torch.equal(*found)
    # 200 tokens are three times 64, and 8
    assert steps == [[CHUNK] * PARTS] * 3 if by_layers(name).engine.model.supports_mixed_batch else steps == []


@pytest.mark.parametrize("name", named("llama", "qwen3_5_moe", "gpt_oss", "deepseek_v3"))
def test_prompts_share_steps(name: str, steps: list[list[int]]):
    scheduler, prompts = by_layers(name), prompts_of(name)
    assert finish(scheduler, submit(scheduler, prompts)) == wanted(name, "k8v4", prompts)
    assert bool(steps) == scheduler.engine.model.supports_mixed_batch
    assert all(max(parts) <= CHUNK for parts in steps)
    # their prefixes are found afterwards
    before = scheduler.counts.hit_tokens
    assert finish(scheduler, submit(scheduler, prompts)) == wanted(name, "k8v4", prompts)
    assert scheduler.counts.hit_tokens - before == sum(len(prompt) - 1 for prompt in prompts)
    assert nothing_leaks(scheduler)


def test_no_step_is_longer_than_usual_while_a_sequence_decodes(steps: list[list[int]]):
    scheduler, (first, second, *_) = by_layers("llama"), prompts_of("llama")
    (writing,) = submit(scheduler, [second])
    scheduler.wait(lambda: len(writing.generated.tokens) > 2)
    steps.clear()
    late = submit(scheduler, [first])
    scheduler.wait(lambda: late[0].kv_sequence is not None and late[0].kv.length > 2 * CHUNK)
    assert writing.finish_reason is None
    assert steps == []
    assert finish(scheduler, [writing, *late]) == wanted("llama", "k8v4", [second, first])


@pytest.mark.parametrize("name", named("llama", "qwen3_5_moe", "gemma3"))
def test_when_pages_run_out_nothing_is_lost(name: str, steps: list[list[int]]):
    # all prompts share their first steps, and two have room for their ends
    scheduler, prompts = by_layers(name, tokens=320, context=192), [prompt[:60] * 2 for prompt in prompts_of(name)]
    assert finish(scheduler, submit(scheduler, prompts)) == wanted(name, "k8v4", prompts)
    # where prompts share no steps, later ones may wait until there is room
    by_layers_runs = scheduler.engine.model.supports_mixed_batch
    assert scheduler.counts.preemptions > 0 or not by_layers_runs
    assert bool(steps) == by_layers_runs
    assert nothing_leaks(scheduler)


def test_without_room_for_all_parts_no_token_is_computed(monkeypatch: pytest.MonkeyPatch):
    engine = by_layers("gpt_oss", tokens=128, context=128).engine
    sequence, other, text = engine.cache.open(), engine.cache.open(), model_of("gpt_oss")[2]
    engine.prefill([sequence], [text[:60]])
    engine.prefill([other], [text[:60]])
    monkeypatch.delattr(ModelRunner, "prefill_by_layers")
    with pytest.raises(CacheFull):
        engine.prefill([sequence], [text[60:120]])
    assert sequence.length == 60


@pytest.mark.parametrize("name", ["llama", "qwen3_5_moe", "gpt_oss"])
def test_a_failed_step_is_computed_again(name: str, monkeypatch: pytest.MonkeyPatch):
    engine, text = by_layers(name).engine, model_of(name)[2]
    expected, sequence = engine.cache.open(), engine.cache.open()
    for each in (expected, sequence):
        engine.prefill([each], [text[:60]])
        each.checkpoint()
    engine.prefill([expected], [text[60:110]])
    with monkeypatch.context() as patch:
        patch.setattr(Layer, "__call__", lambda self, *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.prefill([sequence], [text[60:110]])
    assert sequence.length == 60
    engine.prefill([sequence], [text[60:110]])
    assert torch.equal(engine.all_logits(sequence, text[110:130]), engine.all_logits(expected, text[110:130]))


def test_steps_that_need_more_than_the_cache_run_chunk_after_chunk():
    engine = by_layers("llama").engine
    sequence = engine.cache.open()
    assert engine.max_prefill_tokens([sequence]) == CHUNK * PARTS
    sequence.adapter = 0
    assert engine.max_prefill_tokens([sequence]) == CHUNK
    sequence.adapter = None
    engine.cache.checkpoints.stride = 32
    assert engine.max_prefill_tokens([sequence]) == CHUNK


def test_prompts_whose_tokens_are_scored_run_chunk_after_chunk(steps: list[list[int]]):
    scheduler, prompt = by_layers("llama"), tuple(prompts_of("llama")[0])
    finish(scheduler, [scheduler.submit(Request(prompt, SETTINGS, prompt_logprobs=1))])
    assert steps == []
    scheduler.prefix_cache.clear()
    finish(scheduler, [scheduler.submit(Request(prompt, SETTINGS))])
    assert steps


def test_parts_have_all_tokens_once_and_in_order():
    seeded = random.Random(0)
    for _ in range(300):
        counts, chunk = [seeded.randrange(0, 90) for _ in range(seeded.randrange(1, 6))], seeded.randrange(1, 40)
        if not sum(counts):
            continue
        parts = split_parts(counts, chunk)
        assert all(0 < sum(len(span) for _, span in part) <= chunk for part in parts)
        assert len(parts) <= -(-sum(counts) // chunk)
        tokens = [(number, at) for part in parts for number, span in part for at in span]
        assert tokens == [(number, at) for number, count in enumerate(counts) for at in range(count)]


def test_hidden_states_are_those_of_one_step(steps: list[list[int]]):
    engine, text = by_layers("llama").engine, model_of("llama")[2]
    assert len(engine.prefill([engine.cache.open()], [text[:60]], hidden=True)) == 60
    assert steps == []
    assert len(engine.prefill([engine.cache.open()], [text[:60]])) == 0
    assert steps == [[15] * 4]


@pytest.mark.parametrize("name", ["gemma4_moe", "qwen4_exp"])
def test_layers_that_read_more_than_the_cache_run_once_per_step(name: str, steps: list[list[int]]):
    """Their per-layer inputs and n-gram rows are made for all tokens of a step."""
    scheduler, prompts = by_layers(name), prompts_of(name)[:2]
    assert finish(scheduler, submit(scheduler, prompts)) == wanted(name, "k8v4", prompts)
    assert steps == []


def test_ahead_of_outputs_runs_a_single_chunk(monkeypatch: pytest.MonkeyPatch, steps: list[list[int]]):
    """Tokens of ending sequences are on their way to the host, which waits for a step of several chunks."""
    monkeypatch.setattr(GraphRunner, "runs_ahead", True)
    scheduler, prompt = by_layers("llama"), prompts_of("llama")[0]
    submit(scheduler, [prompt])
    scheduler._admit()
    for ahead, tokens in (True, CHUNK), (False, CHUNK * PARTS):
        [[(_, count)]] = scheduler._prefill.next(scheduler._running, False, ahead=ahead)
        assert count == tokens
