"""Warm-up after a server is ready: it leaves nothing behind, and a request interrupts it."""

import multiprocessing
import threading
import time

import pytest

from auraflux.engine.request import Request
from auraflux.engine.sampling import Sampling
from auraflux.loading.background_warmup import BackgroundWarmup
from auraflux.loading.language_model import LanguageModel
from auraflux.loading.warmup import Warmup
from auraflux.serve.transport.model_process import ModelProcess, facts_of
from auraflux.serve.transport.pipe import OUTPUTS, SUBMIT
from tests.loading.test_warmup import PROMPT, loaded

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return loaded("llama")


@pytest.fixture
def warmup(model: LanguageModel) -> BackgroundWarmup:
    model.reset()
    model.scheduler.counts.reset()
    return BackgroundWarmup(Warmup(model), 0)


def run(model: LanguageModel, warmup: BackgroundWarmup, steps: int = 1000) -> None:
    for _ in range(steps):
        warmup.advance(idle=True)
        if not warmup.active:
            return
        model.scheduler.step()
    raise AssertionError("the warm-up does not end")


def test_all_parts_run_and_leave_nothing_behind(model: LanguageModel, warmup: BackgroundWarmup):
    wanted = model.generate_batch([PROMPT], max_tokens=6, ignore_eos=True)
    entries, queried = model.scheduler.prefix_cache.entries(), model.scheduler.counts.queried_tokens
    assert entries
    assert warmup.active
    run(model, warmup)
    assert model.scheduler.idle
    assert model.scheduler.prefix_cache.entries() == entries
    assert model.scheduler.counts.queried_tokens == queried
    assert model.generate_batch([PROMPT], max_tokens=6, ignore_eos=True) == wanted


def test_no_part_begins_while_requests_run(model: LanguageModel, warmup: BackgroundWarmup):
    warmup.advance(idle=False)
    assert model.scheduler.idle
    assert warmup.active


def test_a_request_interrupts_a_part_which_begins_again(model: LanguageModel, warmup: BackgroundWarmup):
    warmup.advance(idle=True)
    model.scheduler.step()
    assert model.scheduler.running
    outputs = []
    warmup.interrupt()
    model.scheduler.submit(Request(tuple(PROMPT), Sampling(max_tokens=2, ignore_eos=True)), outputs.append)
    model.scheduler.step()
    assert model.scheduler.running == 1, "the part's prompts are cancelled before the next step"
    warmup.advance(idle=False)
    while not model.scheduler.idle:
        model.scheduler.step()
    assert outputs[-1].finish_reason == "length"
    left = len(warmup._batches)
    assert left == len(Warmup(model).batches)
    run(model, warmup)


def test_a_server_answers_while_it_warms_up(model: LanguageModel, warmup: BackgroundWarmup):
    ours, theirs = multiprocessing.Pipe()
    process = ModelProcess(model, theirs, facts_of(model), warmup=warmup)
    thread = threading.Thread(target=process.run)
    thread.start()
    try:
        ours.send((SUBMIT, 1, Request(tuple(PROMPT), Sampling(max_tokens=3, ignore_eos=True))))
        deadline, tokens = time.monotonic() + 60, []
        while len(tokens) < 3 and time.monotonic() < deadline:
            if ours.poll(0.1) and (message := ours.recv())[0] == OUTPUTS:
                assert {number for number, _ in message[1]} <= {1}, "the warm-up's outputs stay here"
                tokens += [token for _, fields in message[1] for token in fields[1]]
        assert len(tokens) == 3
        while process._warmup is not None and time.monotonic() < deadline:
            if ours.poll(0.01):
                ours.recv()
        assert process._warmup is None
    finally:
        ours.close()
        thread.join(30)


def test_a_failing_part_ends_the_warm_up(model: LanguageModel, warmup: BackgroundWarmup, caplog: pytest.LogCaptureFixture):
    ours, theirs = multiprocessing.Pipe()
    process = ModelProcess(model, theirs, facts_of(model), warmup=warmup)

    def fail(idle: bool) -> None:
        raise RuntimeError("no memory")

    warmup.advance = fail  # type: ignore[method-assign]
    process._warm_up()
    assert process._warmup is None
    assert "the rest of the warm-up is left out: no memory" in caplog.text
    ours.close()
