"""Log probabilities of prompt tokens: those of the model, in any chunks and batch, also where a prefix is cached."""

import pytest
import torch

from auraflux.cache import CacheSettings
from auraflux.engine.engine import Engine
from auraflux.engine.request import Output, Request, TokenLogprob
from auraflux.engine.sampling import Sampling
from auraflux.scheduler import prompt_logprobs
from auraflux.scheduler.scheduler import Scheduler
from tests.scheduler.test_scheduler import model_of


def scheduler_of(name: str, chunk: int = 64, **options: int) -> Scheduler:
    model, shapes, _ = model_of(name)
    options = {"context": 512, "sequences": 4, **options}
    engine = Engine(model, shapes, CacheSettings("k8v4"), chunk=chunk, exact=True, graphs=False, **options)
    return Scheduler(engine, None, frozenset(), max_sequences=4)


def run(scheduler: Scheduler, *requests: Request) -> list[tuple[TokenLogprob, ...]]:
    outputs: list[list[Output]] = [[] for _ in requests]
    sequences = [scheduler.submit(request, found.append) for request, found in zip(requests, outputs, strict=True)]
    while scheduler.step() or scheduler.queued:
        pass
    for sequence in sequences:
        assert sequence.finish_reason == "length", sequence.failure
    # they come with the first output, and only there
    assert all(not output.prompt_logprobs for found in outputs for output in found[1:])
    return [found[0].prompt_logprobs for found in outputs]


def scoring(prompt: list[int], top: int | None = 3, most: int = 3) -> Request:
    return Request(tuple(prompt), Sampling(max_tokens=most), prompt_logprobs=top)


def differ(found: tuple[TokenLogprob, ...], wanted: tuple[TokenLogprob, ...]) -> float:
    assert [each.token for each in found] == [each.token for each in wanted]
    return max(abs(each.logprob - other.logprob) for each, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", ["llama", "qwen3_5_moe", "gpt_oss", "deepseek_v3"])
def test_they_are_those_of_the_model(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prompt_logprobs, "ROWS", 10)
    prompt = model_of(name)[2][:150]
    scheduler = scheduler_of(name)
    sequence = scheduler.engine.cache.open()
    wanted = scheduler.engine.all_logits(sequence, prompt[:-1]).log_softmax(-1)
    sequence.close()
    # twice: the second one must not come from the prefix cache
    for _ in range(2):
        [found] = run(scheduler, scoring(prompt))
        assert [each.token for each in found] == prompt[1:]
        own = wanted.gather(1, torch.tensor(prompt[1:])[:, None]).squeeze(1)
        assert torch.tensor([each.logprob for each in found]).sub(own).abs().max() < 1e-4
        for each in found:
            assert (each.rank == 1) == (each.top[0][1] == each.logprob)
            assert [value for _, value in each.top] == sorted((value for _, value in each.top), reverse=True)
        ranks = [each.rank == 1 for each in found]
        assert sum(ranks) == int((wanted.argmax(-1) == torch.tensor(prompt[1:])).sum())


def test_other_requests_in_the_batch_change_nothing():
    ids = model_of("llama")[2]
    alone = [run(scheduler_of("llama"), scoring(ids[:each]))[0] for each in (100, 61)]
    requests = scoring(ids[:100]), scoring(ids[:80], None), scoring(ids[:61], 0), scoring(ids[:1])
    long, plain, short, tiny = run(scheduler_of("llama", chunk=32), *requests)
    assert (plain, tiny) == ((), ())
    assert max(differ(long, alone[0]), differ(short, alone[1])) < 1e-4
    assert all(each.top == () for each in short)


def test_a_preempted_prompt_is_scored_once():
    prompts = [model_of("llama")[2][at : at + 40] for at in (0, 40, 80)]
    wanted = [run(scheduler_of("llama"), scoring(prompt, most=32))[0] for prompt in prompts]
    # each sequence begins in one page and ends in another, and there are as many pages as sequences
    scheduler = scheduler_of("llama", context=192, tokens=256)
    found = run(scheduler, *(scoring(prompt, most=32) for prompt in prompts))
    assert max(map(differ, found, wanted)) < 1e-4
